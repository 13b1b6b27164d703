"""`sglang_lazy.verify`: prompts in, comparisons by a model of a few tokens, thresholds and a verdict out."""

import json
import math
import random

import pytest

from sglang_lazy import chunk
from sglang_lazy.verify import Thresholds, __main__, verify
from sglang_lazy.verify.cases import Prompt, parse_prompt, read_prompts
from sglang_lazy.verify.compare import TOP_TOKENS, Comparison, kl_divergence
from sglang_lazy.verify.prompts import INSTRUCTION, retrieval_segments
from sglang_lazy.verify.report import summarize
from sglang_lazy.verify.scores import bootstrap, exact_match, f1, wilson

# prompts

TEXT, CHUNK = {"type": "text", "text": "Who?"}, {"type": "chunk", "text": "doc"}
RETRIEVAL = {"docs": [{"title": "A", "text": "a.", "id": 1}], "question": "Who?", "answers": ["x", "y"]}


def test_forms_of_prompts():
    assert parse_prompt({"segments": [chunk("doc"), "Who?"]}) == Prompt([CHUNK, TEXT])
    assert parse_prompt({"segments": [{"type": "chunk", "input_ids": [1]}, TEXT], "answers": ["x"]}) == Prompt(
        [{"type": "chunk", "input_ids": [1]}, TEXT], ("x",)
    )
    assert parse_prompt(RETRIEVAL) == Prompt(
        [
            {"type": "text", "text": INSTRUCTION},
            {"type": "chunk", "text": "A\na.\n\n"},
            {"type": "text", "text": "Question: Who?\nAnswer:"},
        ],
        ("x", "y"),
    )


def said(*messages):
    return [{"role": role, "text": words} for role, words in messages]


def test_prompt_of_a_chat():
    """Earlier questions, each with its answer, are text between the instruction and the documents."""
    history = said(("user", "When?"), ("agent", "1889."), ("user", "Where?"), ("agent", "Paris."))
    prompt = parse_prompt({**RETRIEVAL, "history": history})
    instruction, *rest = parse_prompt({**RETRIEVAL, "history": []}).segments
    assert [instruction, *rest] == retrieval_segments(RETRIEVAL)
    assert prompt.segments == [
        instruction,
        {"type": "text", "text": "Question: When?\nAnswer: 1889.\n\n"},
        {"type": "text", "text": "Question: Where?\nAnswer: Paris.\n\n"},
        *rest,
    ]


BAD_PROMPTS = [
    (3, "an object"),
    ({}, "neither segments nor docs and question"),
    ({"docs": []}, "neither segments nor docs and question"),
    ({"docs": [{"title": "A"}], "question": "?"}, "not a request with docs, each with title and text"),
    ({**RETRIEVAL, "history": "When?"}, "history must be a list, got str"),
    ({**RETRIEVAL, "history": ["When?"]}, "history must be messages, each with role and text: TypeError"),
    (
        {**RETRIEVAL, "history": [{"role": "user"}]},
        "history must be messages, each with role and text: KeyError('text')",
    ),
    ({**RETRIEVAL, "history": said(("user", "When?"))}, "history must alternate user and agent, got user"),
    ({**RETRIEVAL, "history": said(("agent", "Hi."), ("user", "When?"))}, "alternate user and agent, got agent, user"),
    ({**RETRIEVAL, "history": said(("user", "When?"), ("agent", None))}, "the text of a message in history must be a"),
    ({"segments": [CHUNK, {"type": "image", "text": "x"}]}, "segments[1]: unknown segment type 'image'"),
    ({"segments": [TEXT]}, "it has no chunk"),
    ({"segments": [TEXT, CHUNK]}, "it ends with a chunk"),
    ({"segments": [CHUNK, TEXT], "answers": "x"}, "answers must be a list of strings"),
    ({"segments": [CHUNK, TEXT], "answers": [1]}, "answers must be a list of strings"),
]


@pytest.mark.parametrize("value, reason", BAD_PROMPTS)
def test_bad_prompts_are_named(value, reason, tmp_path):
    good = {"segments": [CHUNK, TEXT]}
    with pytest.raises(ValueError) as error:
        verify(None, [good, value])
    assert str(error.value).startswith("prompts[1]: ") and reason in str(error.value)
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{json.dumps(good)}\n{json.dumps(value)}\n")
    with pytest.raises(ValueError) as error:
        list(read_prompts(file))
    assert f"{file}, line 2: " in str(error.value) and reason in str(error.value)


def test_no_prompts():
    with pytest.raises(ValueError, match="there are no prompts"):
        verify(None, [])


# scores


@pytest.mark.parametrize(
    "answer, gold, em, score",
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1, 1),
        ("eiffel", ["eiffel tower"], 0, 2 / 3),
        ("tower bridge", ["eiffel tower", "tower bridge in london"], 0, 2 / 3),
        ("", ["x"], 0, 0),
        ("a b b", ["b b c"], 0, 2 * (2 / 2) * (2 / 3) / (2 / 2 + 2 / 3)),  # "a" is an article
    ],
)
def test_squad_scores(answer, gold, em, score):
    assert exact_match(answer, gold) == em and f1(answer, gold) == pytest.approx(score)


def normalized(weights):
    return {token: math.log(weight / sum(weights.values())) for token, weight in weights.items()}


def test_kl_is_that_of_the_definition_and_a_bound_from_below():
    rng = random.Random(0)
    for _ in range(50):
        p, q = (normalized({token: rng.random() ** 4 + 1e-6 for token in range(40)}) for _ in range(2))
        exact = sum(math.exp(p[token]) * (p[token] - q[token]) for token in p)
        assert kl_divergence(p, q) == pytest.approx(exact, abs=1e-9)
        bounds = []
        for count in (1, 5, 20, 39):
            top = dict(sorted(p.items(), key=lambda item: -item[1])[:count])
            bounds.append(kl_divergence(top, q))
        assert bounds[0] > 0 and bounds == sorted(bounds) and bounds[-1] <= exact + 1e-9
    assert kl_divergence(p, p) == 0 and kl_divergence({0: 0.0}, {0: 0.0}) == 0


def test_kl_where_rounding_leaves_nothing_for_the_rest():
    assert kl_divergence({0: math.log(0.5)}, {0: 1e-6}) == pytest.approx(
        0.5 * math.log(0.5) + 0.5 * math.log(0.5 / 1e-7)
    )
    assert kl_divergence({0: 1e-6}, {0: math.log(0.5)}) == pytest.approx(math.log(2), abs=1e-4)


# both ways, over a model that is a table


class TableModel:
    """Next tokens depend on the last token, the number of tokens since the question, and how chunks are linked."""

    vocab_size = 50

    def __init__(self, differs):
        self.differs = differs
        self.calls = []

    def logprobs(self, link, question, position):
        rng = random.Random(f"{question} {position} {link if question in self.differs else ''}")
        return normalized({token: math.exp(rng.gauss(0, 3)) for token in range(self.vocab_size)})

    def __call__(self, segments, link, sampling_params, **wanted):
        self.calls.append((len(segments), link, wanted))
        return [self.one(index, prompt, link, sampling_params, wanted) for index, prompt in enumerate(segments)]

    def one(self, index, prompt, link, params, wanted):
        if params["max_new_tokens"] == 0:
            *prompt, answer = prompt
            assert answer["type"] == "text" and wanted["logprob_start_len"][index] == 2
            ids = wanted["token_ids_logprob"][index]
            rows = [self.logprobs(link, prompt[-1]["text"], at) for at in range(len(answer["input_ids"]))]
            rows = [None, *([[row[token], token, None] for token in ids] for row in rows)]
            return {"meta_info": {"input_token_ids_logprobs": rows}}
        rows = [self.logprobs(link, prompt[-1]["text"], at) for at in range(params["max_new_tokens"])]
        best = [sorted(row, key=row.get, reverse=True) for row in rows]
        answer = [ranked[0] for ranked in best]
        top = [
            [[row[token], token, None] for token in ranked[:TOP_TOKENS]] for row, ranked in zip(rows, best, strict=True)
        ]
        return {
            "text": " ".join(map(str, answer)), "output_ids": answer,
            "meta_info": {"prompt_tokens": 3, "output_top_logprobs": top},
        }  # fmt: skip


def questions(count):
    return [{"segments": [CHUNK, {"type": "text", "text": f"{index}?"}]} for index in range(count)]


def test_the_same_model_agrees_with_itself():
    model = TableModel(differs=())
    report = verify(model, questions(40), Thresholds(min_agreement=1, min_first_token_agreement=1, max_kl=0))
    values = {name: metric.value for name, metric in report.metrics.items()}
    assert values.pop("kl_mass") > 0.9
    assert values == {
        "agreement": 1, "first_token_agreement": 1, "common_prefix": 1, "kl_first_token": 0, "kl_answer": 0
    }  # fmt: skip
    assert report.passed is True and str(report).endswith("PASS")
    sizes = [size for size, link, wanted in model.calls if link == "full"]
    assert sizes == [16, 16, 8] and len(model.calls) == 9


def test_differences_are_found_where_they_are():
    differs = {"1?", "4?", "20?"}
    model = TableModel(differs)
    report = verify(model, questions(30), Thresholds(min_agreement=0.95, max_kl=10), max_new_tokens=4)
    for index, one in enumerate(report.comparisons):
        question = f"{index}?"
        assert (one.full == one.block) == (question not in differs)
        for position in range(4):
            p, q = (model.logprobs(link, question, position) for link in ("full", "block"))
            exact = sum(math.exp(p[token]) * (p[token] - q[token]) for token in p)
            assert one.kl[position] <= exact + 1e-9 and one.kl[position] == pytest.approx(exact, abs=0.2 * exact + 1e-9)
    assert report.metrics["agreement"].value == 27 / 30 and report.metrics["agreement"].passed is False
    assert report.metrics["kl_first_token"].passed is True and report.metrics["kl_answer"].threshold is None
    assert report.passed is False and str(report).endswith("FAIL")
    assert json.loads(json.dumps(report.to_dict()))["comparisons"][1]["full"] == report.comparisons[1].full


def test_a_refused_batch_is_named():
    def refuse(segments, **_):
        raise ValueError("too long")

    with pytest.raises(ValueError, match="prompts 0 to 2: too long"):
        verify(refuse, questions(3))


# reports


def comparison(full, block, answers=(), texts=("", ""), kl=(0.0,)):
    return Comparison(Prompt([], tuple(answers)), full, block, *texts, list(kl), 1.0)


def test_means_and_gold_answers():
    report = summarize(
        [
            comparison([1, 2], [1, 2], ["x"], ("x", "x"), kl=[0.1, 0.3]),
            comparison([1, 2, 3, 4], [1, 2, 5], ["y"], ("y", "no"), kl=[0.3]),
            comparison([1], [2], ["big dog"], ("cat", "dog")),
            comparison([1], [1, 2]),
        ],
        Thresholds(max_em_drop=33, max_f1_drop=12),
    )
    values = {name: metric.value for name, metric in report.metrics.items()}
    assert values == pytest.approx(
        {
            "agreement": 1 / 4, "first_token_agreement": 3 / 4, "common_prefix": (1 + 1 / 2 + 0 + 1 / 2) / 4,
            "kl_first_token": 0.1, "kl_answer": 0.125, "kl_mass": 1,
            "em_full": 200 / 3, "em_block": 100 / 3, "em_drop": 100 / 3,
            "f1_full": 200 / 3, "f1_block": 500 / 9, "f1_drop": 100 / 9,
        }
    )  # fmt: skip
    assert report.metrics["em_drop"].passed is False and report.metrics["f1_drop"].passed is True
    assert report.passed is False


def test_without_thresholds_there_is_no_verdict():
    report = summarize([comparison([1], [2])], Thresholds())
    assert report.passed is None and "no verdict" in str(report)
    assert all(metric.interval is None for metric in report.metrics.values())


def test_intervals():
    low, high = wilson([True] * 19 + [False])
    assert (low, high) == pytest.approx((0.7639, 0.9911), abs=1e-4)  # from Wilson's formula
    rng = random.Random(1)
    values = [rng.gauss(3, 1) for _ in range(200)]
    low, high = bootstrap(values)
    half = 1.96 * (sum((v - sum(values) / 200) ** 2 for v in values) / 200 / 200) ** 0.5
    assert (low, high) == pytest.approx((sum(values) / 200 - half, sum(values) / 200 + half), abs=0.03)
    assert bootstrap(values) == (low, high) and bootstrap([2.0, 2.0]) == (2, 2)


@pytest.mark.parametrize("field, value", [("min_agreement", 1.1), ("max_kl", -1), ("max_em_drop", math.nan)])
def test_impossible_thresholds(field, value):
    with pytest.raises(ValueError, match=field):
        Thresholds(**{field: value})


# the command


@pytest.fixture
def prompts_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in questions(4)))
    return str(file)


def command(capsys, *argv):
    with pytest.raises(SystemExit) as stopped:
        __main__.main(argv)
    shown = capsys.readouterr()
    return stopped.value.code, shown.out + shown.err


@pytest.mark.parametrize("differs, status", [((), 0), (("1?",), 1)])
def test_exit_status_is_the_verdict(capsys, monkeypatch, prompts_file, tmp_path, differs, status):
    monkeypatch.setattr(__main__, "connect", lambda url, api_key: TableModel(differs))
    out = tmp_path / "report.json"
    argv = ["--url", "http://host", "--prompts", prompts_file, "--out", str(out)]
    assert command(capsys, *argv, "--min-agreement", "1")[0] == status
    report = json.loads(out.read_text())
    assert report["passed"] == (status == 0) and report["prompts"] == len(report["comparisons"]) == 4
    assert command(capsys, *argv)[0] == 0


@pytest.mark.parametrize(
    "argv, reason",
    [
        ([], "one of the arguments --model-path --url is required"),
        (["--url", "http://127.0.0.1:9", "--model-path", "m"], "not allowed with argument"),
        (["--url", "http://127.0.0.1:9", "--", "--tp", "2"], "flags after -- are for an engine"),
        (["--model-path", "m", "--api-key", "k"], "--api-key goes with --url"),
        (["--url", "http://127.0.0.1:9", "--max-new-tokens", "0"], "must be at least 1"),
        (["--url", "http://127.0.0.1:9", "--min-agreement", "2"], "min_agreement must be"),
        (["--model-path", "m", "--max-em-drop", "1"], "max_em_drop needs prompts with gold answers"),
        (["--url", "http://127.0.0.1:9"], "no answer from http://127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9", "--prompts", "/nowhere"], "cannot read /nowhere"),
    ],
)
def test_bad_usage(capsys, prompts_file, argv, reason):
    status, shown = command(capsys, "--prompts", prompts_file, *argv)
    assert status == 2 and reason in shown


def test_engine_gets_the_flags_after_the_dashes(capsys, monkeypatch, prompts_file):
    from sglang_lazy.entrypoints import engine
    from sglang_lazy.port import plugin

    class Engine:
        def __init__(self, server_args, **options):
            seen.update(server_args=server_args, options=options)
            self.generate = TableModel(())

        def __enter__(self):
            return self

        def __exit__(self, *_):
            seen["closed"] = True

    seen = {}
    monkeypatch.setattr(engine, "Engine", Engine)
    monkeypatch.setattr(plugin, "activate", lambda config: None)
    monkeypatch.setattr("sglang.srt.server_args.prepare_server_args", lambda argv: argv)
    argv = ["--model-path", "m", "--prompts", prompts_file, "--", "--tp", "2", "--lazy-max-chunks", "9"]
    assert command(capsys, *argv)[0] == 0
    assert seen["server_args"] == ["--model-path", "m", "--log-level", "error", "--tp", "2"]
    assert seen["options"]["lazy_max_chunks"] == 9 and seen["closed"]
