"""Workload generators: distributions, distinctness, seeds, and errors that name what is wrong."""

import collections
import itertools
import json
import random
import statistics

import pytest

from benchmark.serving.case import parse_case, read_plan
from benchmark.serving.workloads import (
    PHASES,
    Agent,
    Batch,
    Chat,
    Latency,
    Retrieval,
    Synthetic,
    Trace,
    Traffic,
    Turns,
    draw_distinct,
    zipf_weights,
)


def encode(words: str) -> list[int]:
    """A tokenizer for tests: one token per byte."""
    return list(words.encode())


def conversations(workload: Traffic, seed: int = 0) -> list:
    return [conversation for stage in workload.stages(seed, encode) for conversation in stage.conversations]


def chunks_of(segments: list[dict]) -> list[list[int]]:
    return [segment["input_ids"] for segment in segments if segment["type"] == "chunk"]


def write_lines(path, *objects):
    path.write_text("".join(json.dumps(value) + "\n" for value in objects))
    return path


def sequence_probability(order: tuple[int, ...], weights: list[float]) -> float:
    """The probability of drawing `order` without replacement, each by its share of the remaining weights."""
    probability, left = 1.0, sum(weights)
    for index in order:
        probability *= weights[index] / left
        left -= weights[index]
    return probability


@pytest.mark.parametrize("alpha", [0.0, 0.67, 2.1])
def test_zipf_without_replacement(alpha):
    """The frequency of each set agrees with the sum over all orders of drawing it, within 4.5 standard errors."""
    pool, count, draws = 5, 3, 20_000
    weights = [rank**-alpha for rank in range(1, pool + 1)]
    rng = random.Random(1)
    cumulative = zipf_weights(pool, alpha)
    drawn = collections.Counter(frozenset(draw_distinct(rng, cumulative, count)) for _ in range(draws))
    for members in itertools.combinations(range(pool), count):
        expected = sum(sequence_probability(order, weights) for order in itertools.permutations(members))
        error = (expected * (1 - expected) / draws) ** 0.5
        assert abs(drawn[frozenset(members)] / draws - expected) < 4.5 * error


def test_order_is_random():
    """However skewed the draw, the most popular chunk comes first as often as last."""
    rng = random.Random(2)
    cumulative = zipf_weights(8, 2.0)
    positions = [order.index(0) for order in (draw_distinct(rng, cumulative, 3) for _ in range(9000)) if 0 in order]
    shares = [positions.count(position) / len(positions) for position in range(3)]
    assert all(abs(share - 1 / 3) < 0.025 for share in shares)


@pytest.mark.parametrize("alpha", [0.0, 2.1])
def test_chunks_of_a_request_are_distinct(alpha):
    workload = Synthetic(pool=6, chunks=6, chunk_len=3, alpha=alpha, num_prompts=30, cold_prompts=0)
    pools = set()
    for [turn] in conversations(workload):
        chunks = chunks_of(turn.segments)
        assert len({tuple(chunk) for chunk in chunks}) == 6
        assert turn.segments[-1]["type"] == "text"
        pools.add(frozenset(map(tuple, chunks)))
    assert len(pools) == 1, "every request draws from the same pool"


@pytest.mark.parametrize(
    "workload",
    [
        Synthetic(pool=6, chunks=2, chunk_len=3, num_prompts=4, cold_prompts=2),
        Agent(pool=4, chunk_len=3, system_len=5, message_len=2, num_prompts=2, cold_prompts=1),
        Chat(num_prompts=5),
        Latency(chunks=3, chunk_len=4, num_prompts=2),
        Batch(batch=3, chunk_len=4, rounds=2),
    ],
    ids=lambda workload: type(workload).__name__,
)
def test_seeds(workload):
    """The seed determines everything; another seed changes the prompts."""
    assert workload.stages(7, encode) == workload.stages(7, encode)
    assert workload.stages(7, encode) != workload.stages(8, encode)


def test_longer_runs_begin_alike():
    """A rate measured with more prompts sees the same prompts first."""
    short, long = (Synthetic(pool=6, chunks=2, chunk_len=3, cold_prompts=2, num_prompts=n) for n in (3, 9))
    assert conversations(long)[:5] == conversations(short)


def test_phases():
    workload = Synthetic(pool=3, chunks=1, chunk_len=2, cold_prompts=2, num_prompts=3, warm=True)
    cold, steady, warm = workload.stages(0, encode)
    assert [cold.phase, steady.phase, warm.phase] == ["cold", "steady", "warm"]
    assert [len(stage.conversations) for stage in (cold, steady, warm)] == [2, 3, 3]
    assert warm.conversations == steady.conversations
    assert [stage.phase for stage in Chat(cold_prompts=0, num_prompts=1).stages(0, encode)] == ["steady"]


def test_agent():
    """Turns extend one conversation; the system prompt occurs once, and tool outputs recur."""
    workload = Agent(turns=3, pool=3, chunks=2, chunk_len=4, system_len=5, message_len=2, num_prompts=4, cold_prompts=0)
    seen = collections.Counter()
    openings = set()
    for conversation in conversations(workload):
        assert len(conversation) == 3
        lengths = [[len(segment["input_ids"]) for segment in turn.segments] for turn in conversation]
        assert lengths == [[7, 4, 4, 2], [2, 4, 4, 2], [2, 4, 4, 2]]
        openings.add(tuple(conversation[0].segments[0]["input_ids"][:5]))
        seen.update(tuple(chunk) for turn in conversation for chunk in chunks_of(turn.segments))
    assert len(openings) == 1
    assert len(seen) == 3 and sum(seen.values()) == 24


def test_turns():
    """Conversations one at a time: chunks in the first turn only, which no other conversation has."""
    stages = Turns(chunks=3, chunk_len=4, turns=3, question_len=2, output_len=5, num_prompts=2).stages(0, encode)
    assert [stage.phase for stage in stages] == ["turns"] * 2
    seen = []
    for stage in stages:
        ((first, *others),) = stage.conversations
        assert [len(ids) for ids in chunks_of(first.segments)] == [4] * 3 and len(others) == 2
        seen += chunks_of(first.segments)
        for turn in (first, *others):
            assert turn.segments[-1]["type"] == "text" and len(turn.segments[-1]["input_ids"]) == 2
            assert turn.output_len == 5
        assert all(len(turn.segments) == 1 for turn in others)
    assert len({*map(tuple, seen)}) == 6


def test_latency():
    """Each sample: new chunks, the same again, then all of them after another first chunk; questions never repeat."""
    stages = Latency(chunks=4, chunk_len=3, question_len=6, num_prompts=5).stages(0, encode)
    assert [stage.phase for stage in stages] == ["cold", "same order", "reordered"] * 5
    turns = [turn for stage in stages for conversation in stage.conversations for turn in conversation]
    for cold, same, reordered in zip(turns[::3], turns[1::3], turns[2::3], strict=True):
        first, again, other = (chunks_of(turn.segments) for turn in (cold, same, reordered))
        assert again == first
        assert other[0] != first[0] and sorted(other) == sorted(first)
    assert len({tuple(turn.segments[-1]["input_ids"]) for turn in turns}) == len(turns)
    assert len({tuple(chunk) for turn in turns for chunk in chunks_of(turn.segments)}) == 20


def test_latency_with_text_between_chunks():
    """The same text between them in all phases, so that a prompt asked again has the same prefix."""
    stages = Latency(chunks=3, chunk_len=4, between_len=2, num_prompts=1).stages(0, encode)
    cold, same, reordered = (stage.conversations[0][0].segments for stage in stages)
    kinds = ["chunk", "text", "chunk", "text", "chunk", "text"]
    assert [[segment["type"] for segment in each] for each in (cold, same, reordered)] == [kinds] * 3
    assert same[:-1] == cold[:-1] and reordered[1:-1:2] == cold[1:-1:2]
    assert len(cold[1]["input_ids"]) == 2 and cold[1] != cold[3]


def test_latency_apart():
    """The same requests, grouped by phase."""
    mixed = Latency(chunks=3, chunk_len=2, num_prompts=4).stages(0, encode)
    apart = Latency(chunks=3, chunk_len=2, num_prompts=4, apart=True).stages(0, encode)
    assert [stage.phase for stage in apart] == [phase for phase in PHASES for _ in range(4)]
    for phase in PHASES:
        assert [stage for stage in apart if stage.phase == phase] == [stage for stage in mixed if stage.phase == phase]


def test_batch():
    """Every batch has the first one's chunks, in their order, behind them questions that never repeat."""
    stages = Batch(batch=5, group=2, chunks=3, chunk_len=4, question_len=6, rounds=2).stages(0, encode)
    assert [stage.phase for stage in stages] == ["cold", "steady", "steady"]
    batches = [[turn for [turn] in stage.conversations] for stage in stages]
    contexts = [[chunks_of(turn.segments) for turn in batch] for batch in batches]
    a, a2, b, b2, c = contexts[0]
    assert a == a2 and b == b2 and contexts == [contexts[0]] * 3
    assert len({tuple(chunk) for chunks in (a, b, c) for chunk in chunks}) == 9
    assert len({tuple(turn.segments[-1]["input_ids"]) for batch in batches for turn in batch}) == 15


def test_chat():
    """No chunks; lengths are log-normal around their medians, within bounds."""
    turns = [turn for [turn] in conversations(Chat(num_prompts=2000, cold_prompts=0))]
    assert all([segment["type"] for segment in turn.segments] == ["text"] for turn in turns)
    inputs = [len(turn.segments[0]["input_ids"]) for turn in turns]
    outputs = [turn.output_len for turn in turns]
    assert min(inputs) == 4 and max(inputs) == 1024
    assert min(outputs) >= 4 and max(outputs) == 1024
    assert abs(statistics.median(inputs) / 90 - 1) < 0.15
    assert abs(statistics.median(outputs) / 120 - 1) < 0.15


def test_retrieval(tmp_path):
    """Documents in the file's order, titles included."""
    docs = [{"id": "b", "title": "B", "text": "bees"}, {"id": "a", "title": "A", "text": "ants"}]
    data = write_lines(tmp_path / "data.jsonl", {"docs": docs, "question": "Which?"})
    [[turn]] = conversations(Retrieval(data=data, num_prompts=1, cold_prompts=0, output_len=3))
    assert chunks_of(turn.segments) == [encode("B\nbees\n\n"), encode("A\nants\n\n")]
    assert turn.segments[-1] == {"type": "text", "input_ids": encode("Question: Which?\nAnswer:")}
    assert turn.output_len == 3


def test_retrieval_in_a_chat(tmp_path):
    """Earlier turns come before the documents, which belong to the current question; the next prompt shares a
    prefix."""
    said = [("user", "Who?"), ("agent", "Ann."), ("user", "When?"), ("agent", "1889.")]
    history = [{"role": role, "text": words} for role, words in said]
    first = {"docs": [{"title": "A", "text": "ants"}], "question": "When?", "history": history[:2]}
    second = {"docs": [{"title": "B", "text": "bees"}], "question": "Where?", "history": history}
    data = write_lines(tmp_path / "data.jsonl", {**first, "question": "Who?", "history": []}, first, second)
    [[opening], [first], [second]] = conversations(Retrieval(data=data, num_prompts=3, cold_prompts=0))
    assert [bytes(segment["input_ids"]).decode() for segment in second.segments[1:]] == [
        "Question: Who?\nAnswer: Ann.\n\n",
        "Question: When?\nAnswer: 1889.\n\n",
        "B\nbees\n\n",
        "Question: Where?\nAnswer:",
    ]
    assert [segment["type"] for segment in second.segments] == ["text", "text", "text", "chunk", "text"]
    assert opening.segments[:1] == first.segments[:1] and first.segments[:2] == second.segments[:2]
    assert len(opening.segments) == 3


def test_trace(tmp_path):
    """A document has the same text wherever it occurs, with the length that the trace gives."""
    traces = [{"dataset": name, "requests": [[0, 1], [1, 2]], "doc_words": [10, 20, 0]} for name in ("x", "y")]
    data = write_lines(tmp_path / "traces.jsonl", *traces)
    workload = Trace(data=data, dataset="y", tokens_per_word=1.5, num_prompts=2, cold_prompts=0)
    (first, second), (third, last) = (chunks_of(turn.segments) for [turn] in conversations(workload))
    assert second == third
    assert [len(chunk) for chunk in (first, second, last)] == [15, 30, 1]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Synthetic(pool=4, chunks=5), "5 distinct chunks cannot be drawn from a pool of 4"),
        (lambda: Synthetic(chunk_len=0), "chunk_len must be at least 1, got 0"),
        (lambda: Synthetic(alpha=-1.0), "alpha must be at least 0, got -1.0"),
        (lambda: Agent(pool=1, chunks=2), "2 distinct tool outputs cannot be drawn from a pool of 1"),
        (lambda: Latency(chunks=1), "chunks must be at least 2, got 1"),
    ],
)
def test_bad_parameters(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"docs": [], "question": "q"}\n{"docs": ', r"data.jsonl, line 2: not JSON"),
        ("[]\n", "line 1: expected an object, got list"),
        ('{"question": "q"}\n', "line 1: not a request with docs, .* KeyError"),
        ('{"docs": [{"title": "t"}], "question": "q"}\n', "line 1: not a request .* KeyError"),
        ('{"docs": [{"title": null, "text": "x"}], "question": "q"}\n', "line 1: not a request .*not a string"),
        pytest.param("[" * 100_000, "line 1: not JSON", id="deep"),
        ('{"docs": [], "question": "\udce9"}\n', "line 1: not JSON: 'utf-8' codec"),
        ('{"docs": [], "question": "q", "history": "h"}\n', "line 1: history must be a list, got str"),
        ('{"docs": [], "question": "q", "history": [{"role": "user"}]}\n', "line 1: history .* KeyError.'text'"),
        ('{"docs": [], "question": "q"}\n', "2 conversations are requested, there are 1"),
    ],
)
def test_bad_data(tmp_path, content, message):
    data = tmp_path / "data.jsonl"
    data.write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        conversations(Retrieval(data=data, num_prompts=2, cold_prompts=0))


def test_missing_data(tmp_path):
    with pytest.raises(ValueError, match="cannot read .*none.jsonl: No such file"):
        conversations(Retrieval(data=tmp_path / "none.jsonl"))
    data = write_lines(tmp_path / "traces.jsonl", {"dataset": "x"}, {"dataset": "y"})
    with pytest.raises(ValueError, match="has no trace 'z', but x, y"):
        conversations(Trace(data=data, dataset="z"))
    with pytest.raises(ValueError, match="trace 'x': .*doc_words"):
        conversations(Trace(data=data, dataset="x"))


def test_cases():
    """A line gives the workload, its parameters and its arrival process; rates run in ascending order."""
    case = parse_case("synthetic --pool 9 --chunk-len 2 --chunks 2 --request-rate 4 0.5 --seconds 20 --num-prompts 15")
    slow, fast = case.runs(0, encode)
    assert (slow.request_rate, fast.request_rate) == (0.5, 4)
    assert (slow.workload.num_prompts, fast.workload.num_prompts) == (15, 80)
    assert fast.describe()["parameters"]["pool"] == 9
    [run] = parse_case("chat --warm --max-concurrency 3").runs(0, encode)
    assert run.describe()["request_rate"] is None and run.describe()["max_concurrency"] == 3
    assert run.workload.warm


@pytest.mark.parametrize(
    "line, message",
    [
        ("synthetic --chunks 5 --pool 4", "synthetic: 5 distinct chunks cannot be drawn"),
        ("synthetic --request-rate 2 0", "--request-rate: expected more than 0, got 0"),
        ("chat --max-concurrency 0", "expected at least 1, got 0"),
        ("retrieval", "the following arguments are required: --data"),
        ("sharegpt", "invalid choice: 'sharegpt'"),
    ],
)
def test_bad_cases(line, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_case(line)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_plans(tmp_path):
    plan = tmp_path / "plan.txt"
    plan.write_text("# all of it\n\nchat  # plain\nlatency --chunks 3\n")
    assert read_plan(str(plan)) == ["chat", "latency --chunks 3"]
    with pytest.raises(ValueError, match="cannot read"):
        read_plan(str(tmp_path / "none.txt"))


def test_rounds():
    """The same conversations, in parts that are measured one after another as one phase."""
    whole = parse_case("chat --num-prompts 7 --cold-prompts 2").workload
    parts = parse_case("chat --num-prompts 7 --cold-prompts 2 --rounds 3 --warm").workload.stages(0, encode)
    assert [(stage.phase, len(stage.conversations)) for stage in parts] == [
        ("cold", 2), ("steady", 3), ("steady", 3), ("steady", 1), ("warm", 3), ("warm", 3), ("warm", 1),
    ]  # fmt: skip
    steady = [conversation for stage in parts if stage.phase == "steady" for conversation in stage.conversations]
    assert steady == whole.stages(0, encode)[1].conversations
