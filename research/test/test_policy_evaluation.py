"""The comparison of policies without a server: its shortcuts against the oracle, its specs, and the numbers of a
table."""

import json
import re
import sys

import pytest
import torch
from transformers import AutoTokenizer

from benchmark.report import means
from benchmark.report.policies import policies_comb
from oracle.block_mask import Oracle, greedy, load_model
from oracle.policies import PolicyOracle, candidates, chunk_spans, epic, keep_all_but
from oracle.scenarios import Dice
from oracle.segments import token_ids
from research.policies import evaluate, served
from research.policies.prototype import Prototype
from research.policies.specs import best_nearby, parse
from research.policies.statics import STATICS
from research.quality.asking import Prompts, as_user_message
from research.quality.comb import Comb, save_comb
from research.quality.llama import Llama, Shape, save_for_serving
from research.quality.questions import read_questions
from research.quality.vocabulary import BOS, EOS, PAD, VOCAB_SIZE, save_tokenizer, train_tokenizer
from research.quality.worlds import records

PREAMBLE = Dice("preamble").ids(9)
PREAMBLES = {"server": PREAMBLE, "other": (30, 31)}


@pytest.fixture(scope="module")
def prompts():
    dice = Dice(5)
    head, one, two, three, question = dice.text(7), dice.chunk(40), dice.chunk(25), dice.chunk(33), dice.text(6)
    return [[head, one, two, three, question], [head, three, one, question], [one, head, two]]


@pytest.mark.parametrize("preamble", [(), PREAMBLE], ids=["alone", "preamble"])
def test_prototype_is_the_oracle(tiny_model, prompts, preamble):
    """Also while it caches another prompt, and after a prompt that was scored and continued."""
    prototype, oracle = Prototype(tiny_model), PolicyOracle(tiny_model)
    for segments in [*prompts, prompts[0]]:
        for scores in ("query_scores", "blend_scores"):
            found = getattr(prototype, scores)(segments, preamble=preamble)
            assert torch.allclose(found, getattr(oracle, scores)(segments, preamble=preamble), rtol=1e-4, atol=1e-4)
        for kept in (epic(segments, 8), keep_all_but(segments, candidates(segments)[::3])):
            prompt = prototype.start(segments, kept, preamble)
            tokens = prompt.greedy(5, end=-1)
            assert tokens == greedy(oracle.logprobs(segments, tokens[:-1], kept, preamble))
            assert prompt.greedy(5, end=tokens[2]) == tokens[: tokens.index(tokens[2])]
            for answer in ([20, 30, 40], [20]):
                expected = oracle.logprobs(segments, answer[:-1], kept, preamble)
                assert torch.allclose(prompt.score(answer), expected, atol=1e-4)


def test_served_answers_are_compared_step_by_step(tiny_model, prompts):
    """The oracle's best token has no deficit, another has its own; plain PyTorch is scored by the oracle as well."""
    oracle, link = Prototype(tiny_model), "base+epic:tokens=3"
    kept = epic(prompts[0], 3)
    tokens = oracle.start(prompts[0], kept, PREAMBLE).greedy(4, end=-1)
    for answer in (tokens, [*tokens[:2], tokens[2] ^ 1, *tokens[3:]]):
        logprobs = oracle.logprobs(prompts[0], answer[:-1], kept, PREAMBLE)
        chosen, ordered = logprobs[range(4), answer], logprobs.sort(descending=True).values
        meta = {"output_token_logprobs": [[value + 0.25] for value in chosen.tolist()], "cached_tokens": 9}
        output = {"output_ids": answer, "meta_info": meta}
        found = served.compare(oracle, oracle, prompts[0], link, PREAMBLES, output)
        assert found["margins"] == pytest.approx((ordered[:, 0] - ordered[:, 1]).tolist(), rel=1e-2, abs=1e-4)
        assert found["deficits"] == pytest.approx((ordered[:, 0] - chosen).tolist(), rel=1e-2, abs=1e-4)
        assert [value == 0 for value in found["deficits"]] == (logprobs.argmax(-1) == torch.tensor(answer)).tolist()
        assert found["plain_deficits"] == [0] * 4 and found["cached_tokens"] == 9
        assert found["logprob_error"] == pytest.approx(0.25, abs=1e-4)
    assert found["deficits"][2] > 0.01
    head = (plain := Prototype(tiny_model)).model.lm_head
    head.weight = torch.nn.Parameter(-head.weight)  # its best token is the oracle's worst
    worst = (ordered[:, 0] - ordered[:, -1]).tolist()
    found = served.compare(oracle, plain, prompts[0], link, PREAMBLES, output)
    assert found["plain_deficits"] == pytest.approx(worst, rel=1e-2)


def test_specs(tiny_model, prompts):
    oracle, segments = PolicyOracle(tiny_model), prompts[0]
    for spec, preamble, kept in (
        ("block", (), keep_all_but(segments, ())),
        ("full", (), [(), (), ()]),
        ("base", PREAMBLE, keep_all_but(segments, ())),
        ("base:preamble=lead", segments[0].ids, keep_all_but(segments, ())),
        ("epic:tokens=3", (), epic(segments, 3)),
        ("query:ratio=0.1", (), oracle.query(segments, 0.1, [2])),
        ("query:ratio=0.1,layers=0.2", (), oracle.query(segments, 0.1, [0, 2])),
        ("query:ratio=0.1,layers=1-2", (), oracle.query(segments, 0.1, [1, 2])),
        ("base+query:ratio=0.1", PREAMBLE, oracle.query(segments, 0.1, [2], PREAMBLE)),
        ("base:preamble=lead+blend:ratio=0.2", segments[0].ids, oracle.blend(segments, 0.2, segments[0].ids)),
    ):
        assert parse(spec).preamble(segments, PREAMBLES) == preamble
        assert parse(spec).kept(oracle, segments, PREAMBLES) == kept
    assert parse("base:preamble=lead").preamble(prompts[2], PREAMBLES) == ()
    assert parse("base:preamble=other+block").preamble(segments, PREAMBLES) == (30, 31)
    for unknown in ("bse", "epic:tokens=1+query:ratio=0.1", "base+base+block"):
        with pytest.raises(ValueError, match="no policy"):
            parse(unknown)


def test_window(prompts):
    """A score counts for its neighbours too, but not across chunks, which have 40, 25 and 33 tokens."""
    scores = torch.zeros(98)
    scores[[39, 50]] = torch.tensor([2.0, 1.0])
    expected = torch.zeros(98)
    expected[37:40], expected[48:53] = 2, 1
    assert torch.equal(best_nearby(prompts[0], scores, "5"), expected)
    assert best_nearby(prompts[0], scores, None) is scores


def test_shares_by_key_size_and_by_question(tiny_model, prompts):
    """A tenth of each chunk by key size, and of the rest what the question attends to most."""
    oracle, segments = PolicyOracle(tiny_model), prompts[0]
    left_out = [
        set(candidates(segments)) - kept_positions(segments, parse(spec).kept(oracle, segments, PREAMBLES))
        for spec in ("base+static:ratio=0.1", "base+query:ratio=0.2", "base+query:ratio=0.2,static=0.1")
    ]
    by_size, by_question, by_both = left_out
    assert len(by_size) == 4 + 3 + 4 and len(by_question) == len(by_both) == 20
    assert by_size <= by_both
    attention = dict(zip(candidates(segments), oracle.query_scores(segments, [2], PREAMBLE).tolist(), strict=True))
    rest = sorted(set(candidates(segments)) - by_size, key=attention.get, reverse=True)
    assert by_both - by_size == set(rest[: 20 - len(by_size)]) != by_question - by_size


def kept_positions(segments, kept):
    return {
        start + i
        for (start, _), ranges in zip(chunk_spans(segments), kept, strict=True)
        for first, last in ranges
        for i in range(first, last)
    }


@pytest.mark.parametrize("score", STATICS)
def test_static_scores(tiny_model, prompts, score):
    """One per candidate, independent of the chunk's place."""
    oracle = PolicyOracle(tiny_model)
    first, second = (STATICS[score](oracle, segments, (), PREAMBLE) for segments in prompts[:2])
    assert len(first) == 40 + 25 + 33 and len(second) == 33 + 40
    assert torch.allclose(first[:40], second[33:], rtol=1e-3, atol=1e-3)
    kept = parse(f"static:ratio=0.1,score={score}").kept(oracle, prompts[0], PREAMBLES)
    assert [len(ranges) for ranges in kept] == [40 - 4, 25 - 3, 33 - 4]


def test_attention_inside_of_chunks(tiny_model, prompts):
    """A token's attention to its chunk and to the text before it adds up to one per head and layer."""
    from research.policies.statics import attention

    oracle = Oracle(tiny_model)
    heads = oracle.model.config.num_attention_heads * oracle.model.config.num_hidden_layers
    received, paid = attention(PolicyOracle(tiny_model), prompts[0], PREAMBLE)
    later = torch.arange(40, 0, -1)
    assert torch.isclose((received[:40] * later).sum() + paid[:40].sum(), torch.tensor(40.0 * heads), rtol=1e-4)


def test_evaluation(tiny_model, tmp_path, monkeypatch):
    """Every prompt has a line per policy, `full` is at distance 0 from itself, and the table has a row per policy."""
    questions, out = tmp_path / "worlds.jsonl", tmp_path / "out.jsonl"
    questions.write_text("".join(json.dumps(r) + "\n" for r in records(0, "test", 4, 1, documents=(2, 4))))
    policies = ["block", "base+query:ratio=0.2"]
    arguments = ["--model", tiny_model, "--questions", str(questions), "--count", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["", *arguments, "--policies", *policies, "--generate", "block"])
    evaluate.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["policy"] for line in lines] == ["full", *policies] * 3
    assert len({line["id"] for line in lines}) == 3
    for full, block, query in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        assert (full["share"], block["share"]) == (1, 0) and 0.199 < query["share"] < 0.21
        assert full["kl"] == full["own_kl"] == 0 and full["agree"] == full["own_agree"] == 1
        assert block["kl"] > 0 and query["own_kl"] > 0 and "f1" in block and "f1" not in query
    assert lines[0]["nll"] == pytest.approx(nll_of_gold(tiny_model, questions, lines[0]["id"]), abs=1e-4)
    text = means.table([means.row(policy, means.load([out])) for policy in ("full", *policies)])
    assert "| `base+query:ratio=0.2` | 3 | 20 |" in text


def nll_of_gold(model, questions, name):
    """Hugging Face's, of the answer as it follows "Answer:", in the text as a whole."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    (asked,) = [question for question in read_questions(questions) if question.id == name]
    asked = as_user_message(asked, tokenizer)
    prompt = token_ids(Prompts(tokenizer).make(asked))
    whole = tokenizer.encode(asked.closing + f" {asked.answers[0]}", add_special_tokens=False)
    answer = whole[len(tokenizer.encode(asked.closing, add_special_tokens=False)) :]
    with torch.no_grad():
        logits = load_model(model, torch.float32, "cpu")(torch.tensor([prompt + answer])).logits[0]
    return torch.nn.functional.cross_entropy(logits[len(prompt) - 1 : -1], torch.tensor(answer)).item()


@pytest.mark.slow
def test_comb(tmp_path, monkeypatch):
    """With closed gates a Comb model answers from the text alone, whatever its chunks are; the table has the bytes of
    its cross layers' KV. Another model's checkpoint is refused."""
    torch.manual_seed(0)
    decoder, made = Llama(Shape(VOCAB_SIZE, 64, 96, 4, 4, 2, 16, 512)), tmp_path / "comb"
    comb = Comb(decoder.shape, (1, 3))
    comb.start_from(decoder)
    for path in (tmp_path / "stock", made):
        path.mkdir()
        save_tokenizer(train_tokenizer(), path, 512)
    save_for_serving(decoder, tmp_path / "stock", torch.float32, bos=BOS, eos=EOS, pad=PAD)
    save_comb(decoder, comb, made, torch.float32, {})
    questions, out = tmp_path / "worlds.jsonl", tmp_path / "out.jsonl"
    questions.write_text("".join(json.dumps(r) + "\n" for r in records(0, "test", 3, 1, documents=(2, 4))))
    arguments = ["--model", str(tmp_path / "stock"), "--comb", str(made), "--questions", str(questions)]
    arguments += ["--policies", "block", "--generate", "block", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    evaluate.main()
    monkeypatch.setattr(sys, "argv", ["", *arguments, "--prefix", "twin "])
    evaluate.main()
    lines = means.load([out])
    assert list(lines) == [*(names := ["full", "block", "comb", "comb:chunks=1"]), *(f"twin {name}" for name in names)]
    for prompt, line in lines["comb"].items():
        assert line["kv_bytes"] == 2 * 2 * 2 * 16 * 2 and lines["full"][prompt]["kv_bytes"] == 2 * line["kv_bytes"]
        assert line["own_kl"] == pytest.approx(lines["comb:chunks=1"][prompt]["own_kl"], abs=1e-5)
        assert line["own_kl"] > 0
    assert re.search(r"\| `comb` \| 0% \| 256 \| \d\.\d{3} \| \d+% ", policies_comb([out]))
    with torch.no_grad():
        decoder.model.norm.weight[0] += 1
    save_comb(decoder, comb, made, torch.float32, {})
    with pytest.raises(SystemExit, match="norm.weight differs"):
        evaluate.main()


def test_rows():
    """Of two prompts the second falls half short of `full`; a third is missing from the policy's results and does not
    count."""

    def lines(**nll):
        prompts = {("g", prompt): value for prompt, value in nll.items()}
        return {key: {"share": 0.5, "nll": value, "own_kl": value} for key, value in prompts.items()}

    found = means.row("p", {"full": lines(a=1, b=1, c=9), "block": lines(a=2, b=3, c=9), "p": lines(a=1, b=2)})
    assert (found["n"], found["share"], found["nll"]) == (2, 0.5, 1.5)
    assert found["closed"] == pytest.approx(1 - 0.5 / 1.5)
    low, high = found["closed_interval"]
    assert (low, high) == pytest.approx((0.5, 1))  # the extreme draws take one prompt only


def test_paired():
    """Differences of -1 and -2 on the two prompts in common; draws of only one of them bound the interval."""
    lines = {"p": {1: {"nll": 1.0}, 2: {"nll": 1.0}, 3: {"nll": 7.0}}, "q": {1: {"nll": 2.0}, 2: {"nll": 3.0}}}
    assert means.paired("p", "q", "nll", lines) == (-1.5, -2, -1)
    assert means.paired("q", "p", "nll", lines) == (1.5, 1, 2)


def test_figure(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the figure, is not installed")
    from research.policies import plots

    policies = {"full", "block", *(policy for curve in plots.CURVES.values() for policy in curve)}
    values = {policy: 1 + (policy == "block") for policy in policies}
    lines = [
        {"group": "g", "id": str(i), "policy": policy, "share": 0.1, "nll": value + i, "own_kl": value}
        for policy, value in values.items()
        for i in range(3)
    ]
    results, out = tmp_path / "results.jsonl", tmp_path / "policies.png"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plots.draw([results], out)
    assert out.read_bytes().startswith(b"\x89PNG")
