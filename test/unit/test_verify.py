"""`sglang_lazy.verify`: prompts in; comparisons over a tiny table model; thresholds and a verdict out."""

import collections
import json
import math
import random

import pytest

from sglang_lazy import chunk
from sglang_lazy.policies import POLICIES, get_policy
from sglang_lazy.verify import ALL, Report, Thresholds, __main__, cost, verify
from sglang_lazy.verify.cases import Prompt, parse_prompt, read_prompts
from sglang_lazy.verify.compare import TOP_TOKENS, Answer, Comparison, LinkedAnswer, kl_divergence
from sglang_lazy.verify.policies import parse_policies
from sglang_lazy.verify.prompts import INSTRUCTION, retrieval_segments
from sglang_lazy.verify.scores import bootstrap, exact_match, f1, wilson

# Prompts

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


# Scores


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


def test_kl_equals_its_definition_and_is_a_lower_bound():
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


# Comparisons, over a model that is a table


class TableModel:
    """Next tokens depend on the question, the number of tokens since, and on the link where it matters.

    differs: by link, the questions that it answers differently.
    recomputed: by link, how many of a chunk's 20 tokens are not reused.
    ms: by link, how long a prompt takes, by the model's own clock.
    """

    vocab_size = 50

    def __init__(self, differs=None, recomputed=None, ms=None):
        self.differs = differs or {}
        self.recomputed = recomputed or {}
        self.ms = ms or {}
        self.now = 0.0
        self.calls = []

    def perf_counter(self):
        return self.now

    def logprobs(self, link, question, position):
        own = link if question in self.differs.get(link, ()) else ""
        rng = random.Random(f"{question} {position} {own}")
        return normalized({token: math.exp(rng.gauss(0, 3)) for token in range(self.vocab_size)})

    def __call__(self, segments, link, sampling_params, **wanted):
        if isinstance(segments[0], dict):
            return self([segments], link, sampling_params, **wanted)[0]
        self.calls.append((segments, link, sampling_params["max_new_tokens"], wanted))
        link = link or "block"
        self.now += self.ms.get(link, 0) / 1000 * len(segments)
        return [self.one(index, prompt, link, sampling_params, wanted) for index, prompt in enumerate(segments)]

    def one(self, index, prompt, link, params, wanted):
        prompt_tokens = {"full": 3, "block": 3}.get(link, 5)  # some policies add tokens to the prompt
        meta_info = {"link": link, "prompt_tokens": prompt_tokens}
        if link != "full":
            chunks = [{"tokens": 20} for segment in prompt if segment["type"] == "chunk"]
            reused = sum(chunk["tokens"] - self.recomputed.get(link, 0) for chunk in chunks)
            meta_info |= {"chunks": chunks, "cached_tokens_details": {"chunk": reused}}
        if "token_ids_logprob" in wanted:
            *prompt, answer = prompt
            assert answer["type"] == "text" and wanted["logprob_start_len"][index] == prompt_tokens - 1
            ids = wanted["token_ids_logprob"][index]
            rows = [self.logprobs(link, prompt[-1]["text"], at) for at in range(len(answer["input_ids"]))]
            rows = [None, *([[row[token], token, None] for token in ids] for row in rows)]
            return {"meta_info": {**meta_info, "input_token_ids_logprobs": rows}}
        rows = [self.logprobs(link, prompt[-1]["text"], at) for at in range(params["max_new_tokens"])]
        best = [sorted(row, key=row.get, reverse=True) for row in rows]
        answer = [ranked[0] for ranked in best]
        top = [
            [[row[token], token, None] for token in ranked[:TOP_TOKENS]] for row, ranked in zip(rows, best, strict=True)
        ]
        return {
            "text": " ".join(map(str, answer)), "output_ids": answer,
            "meta_info": {**meta_info, "output_top_logprobs": top},
        }  # fmt: skip


OTHER = {"type": "chunk", "text": "another doc"}


def questions(count):
    return [
        {"segments": [{"type": "chunk", "text": f"doc {index}"}, OTHER, {"type": "text", "text": f"{index}?"}]}
        for index in range(count)
    ]


def test_the_same_model_agrees_with_itself():
    model = TableModel()
    report = verify(model, questions(40), Thresholds(min_agreement=1, min_first_token_agreement=1, max_kl=0))
    values = {name: metric.value for name, metric in report.policies["block"].metrics.items()}
    assert values.pop("kl_mass") > 0.9 and values.pop("ttft_ms") > 0
    assert values == {
        "agreement": 1, "first_token_agreement": 1, "common_prefix": 1, "kl_first_token": 0, "kl_answer": 0,
        "recomputed": 0,
    }  # fmt: skip
    assert report.passed is True and str(report).endswith("PASS: --lazy-default-link block")
    answered = [len(segments) for segments, link, new, _ in model.calls if link == "full" and new == 32]
    assert answered == [16, 16, 8]


def test_differences_are_located():
    differs = {"block": {"1?", "4?", "20?"}, "base": {"4?"}}
    model = TableModel(differs)
    thresholds = Thresholds(min_agreement=0.95, max_kl=10)
    report = verify(model, questions(30), thresholds, policies=["block", "base", "block"], max_new_tokens=4)
    assert list(report.policies) == list(report.comparisons[0].linked) == ["block", "base"]
    for index, one in enumerate(report.comparisons):
        question = f"{index}?"
        for link, linked in one.linked.items():
            assert (one.full.tokens == linked.tokens) == (question not in differs[link])
            for position in range(4):
                p, q = (model.logprobs(way, question, position) for way in ("full", link))
                exact = sum(math.exp(p[token]) * (p[token] - q[token]) for token in p)
                assert linked.kl[position] <= exact + 1e-9
                assert linked.kl[position] == pytest.approx(exact, abs=0.2 * exact + 1e-9)
    block, base = (report.policies[link].metrics for link in ("block", "base"))
    assert block["agreement"].value == 27 / 30 and block["agreement"].passed is False
    assert block["kl_first_token"].passed is True and block["kl_answer"].threshold is None
    assert base["agreement"].value == 29 / 30 and base["agreement"].passed is True
    assert report.passed is True and report.recommended == "base"
    assert "FAIL: same answer" in str(report) and str(report).endswith("PASS: --lazy-default-link base")
    written = json.loads(json.dumps(report.to_dict()))
    assert written["recommended"] == "base" and written["policies"]["block"]["passed"] is False
    assert written["comparisons"][1]["linked"]["base"]["tokens"] == report.comparisons[1].linked["base"].tokens


def test_each_policy_has_a_cache_of_its_own():
    """One policy's chunks would shorten another's times, and what a server has cached already would shorten all."""
    model = TableModel()
    for _ in range(2):
        verify(model, questions(3), policies=["block", "base"])
    salts = {}
    for _, link, _, wanted in model.calls:
        if "cache_salt" in wanted:
            salts.setdefault(link, set()).add(wanted["cache_salt"])
    assert {link: len(of_link) for link, of_link in salts.items()} == {"full": 2, "block": 2, "base": 2}
    assert len(set().union(*salts.values())) == 6


def test_answers_are_scored_before_the_next_question():
    """A policy that chooses by the question, once its choice is forgotten, would choose by the question and the
    answer."""
    model = TableModel()
    docs = [chunk("doc"), OTHER]
    prompts = [{"segments": [*docs, {"type": "text", "text": f"{index}?"}]} for index in range(2)]
    verify(model, [*prompts, *questions(2)], policies=["query"])
    sizes = [len(segments) for segments, link, _, wanted in model.calls if "token_ids_logprob" in wanted]
    assert sizes == [1, 3]


# Cost


def test_costs_are_measured_over_cached_documents_in_a_new_order(monkeypatch):
    model = TableModel(recomputed={"block": 0, "epic": 5}, ms={"full": 30, "block": 4, "epic": 10})
    monkeypatch.setattr(cost, "time", model)
    a, b, c = ({"type": "chunk", "text": name} for name in "abc")
    between, question = {"type": "text", "text": "then"}, {"type": "text", "text": "?"}
    report = verify(model, [{"segments": [a, between, b, c, question]}], policies=["block", "epic"])
    for link in ("full", "block", "epic"):
        seen = [(prompt, new) for (prompt, *_), way, new, _ in model.calls if way == link and new < 2]
        first = [a, between, b, c, question]
        assert seen[-2:] == [(first, 0), ([b, between, c, a, question], 1)]
    assert report.full_ttft_ms == pytest.approx(30)
    costs = {
        link: (one.metrics["ttft_ms"].value, one.metrics["recomputed"].value) for link, one in report.policies.items()
    }
    assert costs["block"] == pytest.approx((4, 0)) and costs["epic"] == pytest.approx((10, 0.25))


def test_prompts_without_another_order_are_not_timed():
    same = [{"segments": [CHUNK, TEXT]}, {"segments": [CHUNK, CHUNK, TEXT]}]
    report = verify(TableModel(recomputed={"block": 5}), same, Thresholds(min_agreement=1))
    assert "ttft_ms" not in report.policies["block"].metrics and report.full_ttft_ms is None
    assert report.policies["block"].metrics["recomputed"].value == 0.25 and report.recommended == "block"
    with pytest.raises(ValueError, match="budget_ms needs prompts with at least two different chunks"):
        verify(TableModel(), same, Thresholds(budget_ms=5))
    timed = verify(TableModel(), [*same, *questions(1)], Thresholds(budget_ms=5))
    assert [one.costs["full"].ttft_ms is None for one in timed.comparisons] == [True, True, False]


@pytest.mark.parametrize(
    "meta_info, share",
    [
        ({"chunks": [{"tokens": 30}, {"tokens": 10}], "cached_tokens_details": {"chunk": 30}}, 0.25),
        ({"chunks": [{"tokens": 30}], "cached_tokens_details": {"device": 3}}, 1),
        ({"chunks": [{"tokens": 30}], "cached_tokens_details": None}, 1),
        ({}, 1),
    ],
)
def test_share_recomputed(meta_info, share):
    assert cost.recomputed_share(meta_info) == share


@pytest.mark.parametrize(
    "ms, recomputed, limits, recommended",
    [
        ({"block": 4, "base": 6, "query": 9}, {}, {"max_kl": 0}, "base"),  # block is not good enough
        ({"block": 4, "base": 9, "copy": 6}, {}, {"max_kl": 0}, "copy"),  # no more work, and faster
        ({"block": 4, "epic": 9, "query": 6}, {"epic": 4, "query": 3}, {"max_kl": 0}, "query"),
        ({"block": 4, "epic": 6, "query": 9}, {"epic": 4, "query": 3}, {"max_kl": 0}, "epic"),  # it has no extra pass
        ({"block": 4, "epic": 9, "query": 9.3}, {"epic": 4, "query": 3}, {"max_kl": 0}, "query"),  # equally fast
        ({"block": 4, "epic": 9, "query": 9.5}, {"epic": 4, "query": 3}, {"max_kl": 0}, "epic"),
        ({"block": 4, "epic": 9, "static": 6}, {"epic": 3, "static": 4}, {"max_kl": 0}, "epic"),  # work for nothing
        ({"block": 4, "base": 9, "query": 6}, {"query": 3}, {"max_kl": 0}, "base"),
        ({"block": 4, "base": 9, "query": 6}, {"query": 3}, {"max_kl": 0, "budget_ms": 7}, "query"),
        ({"block": 4, "base": 9, "query": 6}, {}, {"max_kl": 0, "budget_ms": 5}, None),
        ({"block": 4, "base": 9, "query": 6}, {}, {"budget_ms": 5}, "block"),
        ({"block": 4, "base": 3.9, "query": 6}, {}, {"budget_ms": 5}, "block"),
    ],
)
def test_the_cheapest_policy_that_passes_is_recommended(monkeypatch, ms, recomputed, limits, recommended):
    model = TableModel({"block": {"1?"}}, recomputed, ms)
    monkeypatch.setattr(cost, "time", model)
    report = verify(model, questions(6), Thresholds(**limits), policies=list(ms))
    assert report.recommended == recommended and report.passed is (recommended is not None)
    last = f"PASS: --lazy-default-link {recommended}" if recommended else "FAIL: none of these policies meets"
    assert last in str(report).splitlines()[-1]


class Busy(TableModel):
    """load: the factor by which a call takes longer, by how many calls there were before; drawn from `rng`."""

    def __init__(self, load, seed, **model):
        super().__init__(**model)
        self.load, self.rng = load, random.Random(seed)

    def __call__(self, segments, link, *arguments, **wanted):
        before = self.now
        answers = super().__call__(segments, link, *arguments, **wanted)
        if not isinstance(segments[0], dict):
            self.now = before + (self.now - before) * self.load(len(self.calls), self.rng)
        return answers


LOADS = {
    "falling": lambda calls, rng: rng.uniform(0.9, 1.1) * max(1, 3 - calls / 60),
    "rising": lambda calls, rng: rng.uniform(0.9, 1.1) * (1 + calls / 60),
    "in waves": lambda calls, rng: rng.uniform(0.9, 1.1) * (2 + math.sin(calls / 40)),
    "stepping": lambda calls, rng: rng.uniform(0.9, 1.1) * (1 if calls // 70 % 2 else 3),
    "spiking": lambda calls, rng: rng.uniform(0.9, 1.1) * (20 if rng.random() < 0.1 else 1),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    "ms, recommended",
    [
        ({"block": 4, "base": 4, "epic": 5, "query": 5}, "block"),  # equal answers: nothing is worth recomputing
        ({"query": 5, "epic": 5, "base": 4, "block": 4}, "base"),
        ({"block": 4, "copy": 4, "base": 4, "packet": 4}, "block"),
        ({"query": 8, "epic": 4}, "epic"),  # recomputes more, but has no extra pass
        ({"epic": 8, "query": 4}, "query"),
        ({"epic": 8, "query": 8}, "query"),
    ],
)
def test_a_change_of_load_is_no_difference_between_policies(monkeypatch, load, ms, recommended):
    """Answers are the same under all; times under load differ more than those of the policies."""
    for seed in range(5):
        model = Busy(LOADS[load], seed, recomputed={"epic": 4, "query": 3}, ms={"full": 30, **ms})
        monkeypatch.setattr(cost, "time", model)
        report = verify(model, questions(32), Thresholds(min_agreement=1), policies=list(ms), max_new_tokens=1)
        assert report.recommended == recommended, seed


@pytest.mark.parametrize("load", LOADS)
def test_noise_around_the_budget_recommends_no_recomputation(monkeypatch, load):
    """The budget is where medians of equal policies fall on either side of it."""
    ms = {"block": 4, "epic": 4, "query": 4}
    for seed in range(5):
        model = Busy(LOADS[load], seed, recomputed={"epic": 4, "query": 3}, ms=ms)
        monkeypatch.setattr(cost, "time", model)
        medians = verify(model, questions(16), policies=list(ms), max_new_tokens=1).policies
        budget = sum(report.metrics["ttft_ms"].value for report in medians.values()) / 3
        model = Busy(LOADS[load], seed, recomputed={"epic": 4, "query": 3}, ms=ms)
        monkeypatch.setattr(cost, "time", model)
        report = verify(model, questions(16), Thresholds(budget_ms=budget), policies=list(ms), max_new_tokens=1)
        assert report.recommended == "block" and report.policies["block"].verdict == "pass", seed


def test_policies_are_timed_in_turns():
    """Each prompt under all policies before the next, warmed up right before, in a new but repeatable order."""
    orders = []
    for _ in range(2):
        model = TableModel()
        verify(model, questions(20), policies=["block", "base"])
        timed = [(segments[0], link, new) for segments, link, new, wanted in model.calls[-120:]]
        runs = [timed[start : start + 6] for start in range(0, 120, 6)]
        for index, run in enumerate(runs):
            assert [new for *_, new in run] == [0, 1] * 3
            assert all(segments[-1]["text"] == f"{index}?" for segments, *_ in run)
            assert [link for _, link, _ in run[::2]] == [link for _, link, _ in run[1::2]]
        orders.append([tuple(link for _, link, _ in run[::2]) for run in runs])
    assert orders[0] == orders[1] and len(set(orders[0])) == 6


def test_who_is_faster_takes_six_prompts(monkeypatch):
    model = TableModel({}, {"epic": 4, "query": 3}, {"epic": 4, "query": 9})
    monkeypatch.setattr(cost, "time", model)
    few, enough = (verify(model, questions(n), Thresholds(max_kl=0), policies=["epic", "query"]) for n in (5, 6))
    assert (few.recommended, enough.recommended) == ("query", "epic")


def test_policies_that_only_the_server_knows_have_no_extra_pass():
    for link, probes in (("mine:tokens=3", False), ("static", False), ("base+query:ratio=0.1", True), ("blend", True)):
        assert cost.Work.of(link, 0.1) == (0.1, probes)


BETWEEN = "query:ratio=0.185"  # 5.7 ms on the line through 4 ms at 0.1 and 8 ms at 0.3


@pytest.mark.parametrize(
    "differs, ms, recommended",
    [
        ({"query:ratio=0.1": {"1?"}}, 5.7, BETWEEN),
        ({}, 5.7, "query:ratio=0.1"),  # less is good enough
        ({"query:ratio=0.1": {"1?"}}, 6.2, None),  # slower than expected
        ({"query:ratio=0.1": {"1?"}, BETWEEN: {"1?"}}, 5.7, None),  # not good enough
    ],
)
def test_the_value_chosen_for_a_budget_is_measured_like_the_others(monkeypatch, differs, ms, recommended):
    """Between the measured values, 5% below the budget; recommended only if it meets every threshold itself."""
    links = ["query:ratio=0.1", "query:ratio=0.3"]
    model = TableModel(differs, {}, {"query:ratio=0.1": 4, "query:ratio=0.3": 8, BETWEEN: ms})
    monkeypatch.setattr(cost, "time", model)
    report = verify(model, questions(20), Thresholds(min_agreement=1, budget_ms=6), policies=links)
    assert report.within_budget == {BETWEEN: pytest.approx(5.7)}
    assert f"  {BETWEEN}  5.7 ms" in str(report).splitlines()
    assert list(report.policies) == list(report.comparisons[0].linked) == [*links, BETWEEN]
    assert report.policies[BETWEEN].metrics["ttft_ms"].value == pytest.approx(ms)
    assert report.recommended == recommended and report.passed is (recommended is not None)
    full = [len(segments) for segments, link, new, _ in model.calls if link == "full" and new == 32]
    assert full == [16, 4]  # not answered again
    without = verify(model, questions(3), Thresholds(min_agreement=1), policies=links)
    assert without.within_budget == {} and list(without.policies) == links


def test_a_budget_that_allows_the_largest_value_needs_no_other(monkeypatch):
    links = ["query:ratio=0.5", "query:ratio=1.0", "epic:tokens=1", "epic:tokens=9"]
    model = TableModel({}, {}, dict(zip(links, (2, 3, 4, 8), strict=True)))
    monkeypatch.setattr(cost, "time", model)
    report = verify(model, questions(3), Thresholds(budget_ms=6), policies=links)
    assert list(report.within_budget) == ["query:ratio=1.0", "epic:tokens=4"]
    assert list(report.policies) == [*links, "epic:tokens=4"]


def test_full_cannot_be_compared():
    with pytest.raises(ValueError, match="link full is what policies are compared with"):
        verify(TableModel(), questions(1), policies=["block", "full"])


def test_lists_of_policies():
    assert parse_policies("all") == "all"
    assert parse_policies("block,base+query:ratio=0.15") == ["block", "base+query:ratio=0.15"]
    two = "base:preamble=lead,more=1+x:ratio=0.1,tokens=3"
    assert parse_policies(f"base,{two},epic:tokens=16") == ["base", two, "epic:tokens=16"]


def test_all_policies():
    """Every policy with answers of its own: `copy` answers as `block` does. Those that recompute have two values or
    more, with a preamble and without; trained tokens are for chunks without one."""
    values = collections.defaultdict(set)
    for link in ALL:
        policy = get_policy(link)
        assert str(policy) == link
        amount = getattr(policy, "ratio", getattr(policy, "tokens", None))
        values[policy.preamble, policy.name].add((amount, getattr(policy, "static", 0)))
    assert sum(map(len, values.values())) == len(ALL)
    assert {name for _, name in values} == POLICIES.keys() - {"full", "copy"}
    for (preamble, name), of_policy in values.items():
        alone = name in ("block", "kvlink", "packet")
        assert len(of_policy) == 1 if alone else len(of_policy) >= 2, name
        assert POLICIES[name].trained or ("none" if preamble == "neutral" else "neutral", name) in values


class Picky(TableModel):
    """refuses: parts of links that it refuses, with the reason."""

    def __init__(self, refuses):
        super().__init__()
        self.refuses = refuses

    def __call__(self, segments, link, *arguments, **wanted):
        for name, reason in self.refuses.items():
            if name in link:
                raise ValueError(reason)
        return super().__call__(segments, link, *arguments, **wanted)


def test_all_policies_that_the_server_does_not_refuse(capsys, monkeypatch, prompts_file):
    reasons = {"kvlink": "not trained for it", "blend": "mixed chunks"}
    report = verify(Picky(reasons), questions(2), policies="all")
    refused = [link for link in ALL if "kvlink" in link or "blend" in link]
    assert list(report.policies) == [link for link in ALL if link not in refused]
    assert list(report.left_out) == refused and report.left_out["kvlink:tokens=5"] == "not trained for it"
    assert "  base+blend:ratio=0.15  mixed chunks" in str(report).splitlines()
    assert report.to_dict()["left_out"] == report.left_out
    monkeypatch.setattr(__main__, "connect", lambda url, api_key: Picky(reasons))
    argv = ["--url", "http://host", "--prompts", prompts_file, "--policies"]
    status, shown = command(capsys, *argv, "all")
    assert status == 0 and "  kvlink:tokens=5  not trained for it" in shown.splitlines()
    status, shown = command(capsys, *argv, "block,kvlink")  # asked for by name
    assert status == 2 and "error: not trained for it" in shown


def test_a_server_that_runs_no_policy():
    with pytest.raises(ValueError, match="refuses every policy, .* with: no chunks here"):
        verify(Picky(dict.fromkeys((":", "block", "base", "packet"), "no chunks here")), questions(1), policies="all")
    with pytest.raises(ValueError, match="^too long$"):
        verify(Picky({"": "too long"}), questions(1), policies="all")


def test_a_refused_batch_is_named():
    class Refusing(TableModel):
        def __call__(self, segments, link, *arguments, **wanted):
            if len(segments) == 4 and link == "base":
                raise ValueError("too long")
            return super().__call__(segments, link, *arguments, **wanted)

    with pytest.raises(ValueError, match="prompts 16 to 19: too long"):
        verify(Refusing(), questions(20), policies=["block", "base"])


# Reports


def comparison(full, linked, answers=(), texts=("", ""), kl=(0.0,), ms=None):
    linked = {"block": LinkedAnswer(linked, texts[1], list(kl))}
    costs = {"full": cost.Cost(ms, 1.0), "block": cost.Cost(ms, 0.5)}
    return Comparison(Prompt([], tuple(answers)), Answer(full, texts[0]), linked, 1.0, costs)


def test_means_and_gold_answers():
    report = Report.of(
        [
            comparison([1, 2], [1, 2], ["x"], ("x", "x"), kl=[0.1, 0.3], ms=9),
            comparison([1, 2, 3, 4], [1, 2, 5], ["y"], ("y", "no"), kl=[0.3], ms=1),
            comparison([1], [2], ["big dog"], ("cat", "dog"), ms=2),
            comparison([1], [1, 2]),
        ],
        Thresholds(max_em_drop=33, max_f1_drop=12),
    )
    metrics = report.policies["block"].metrics
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(
        {
            "agreement": 1 / 4, "first_token_agreement": 3 / 4, "common_prefix": (1 + 1 / 2 + 0 + 1 / 2) / 4,
            "kl_first_token": 0.1, "kl_answer": 0.125, "kl_mass": 1,
            "em_full": 200 / 3, "em_linked": 100 / 3, "em_drop": 100 / 3,
            "f1_full": 200 / 3, "f1_linked": 500 / 9, "f1_drop": 100 / 9, "recomputed": 0.5, "ttft_ms": 2,
        }
    )  # fmt: skip
    assert metrics["em_drop"].passed is False and metrics["f1_drop"].passed is True
    assert report.passed is False and report.recommended is None and report.full_ttft_ms == 2
    assert "FAIL: EM lost" in str(report) and str(report).endswith("none of these policies meets the thresholds.")


def test_without_thresholds_there_is_no_verdict():
    report = Report.of([comparison([1], [2])], Thresholds())
    assert report.passed is None and report.recommended is None and "no verdict" in str(report)
    assert all(metric.interval is None for metric in report.policies["block"].metrics.values())


def test_intervals():
    low, high = wilson([True] * 19 + [False])
    assert (low, high) == pytest.approx((0.7639, 0.9911), abs=1e-4)  # by Wilson's formula
    rng = random.Random(1)
    values = [rng.gauss(3, 1) for _ in range(200)]
    low, high = bootstrap(values)
    half = 1.96 * (sum((v - sum(values) / 200) ** 2 for v in values) / 200 / 200) ** 0.5
    assert (low, high) == pytest.approx((sum(values) / 200 - half, sum(values) / 200 + half), abs=0.03)
    assert bootstrap(values) == (low, high) and bootstrap([2.0, 2.0]) == (2, 2)
    low, high = bootstrap([1.0] * 30 + [1000.0], "median")
    assert (low, high) == (1, 1)


@pytest.mark.parametrize(
    "field, value", [("min_agreement", 1.1), ("max_kl", -1), ("max_em_drop", math.nan), ("budget_ms", -1)]
)
def test_impossible_thresholds(field, value):
    with pytest.raises(ValueError, match=field):
        Thresholds(**{field: value})


# The command


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


@pytest.mark.parametrize(
    "differs, status, recommended",
    [({}, 0, "block"), ({"block": {"1?"}}, 0, "base"), ({"block": {"1?"}, "base": {"2?"}}, 1, None)],
)
def test_exit_status_is_the_verdict(capsys, monkeypatch, prompts_file, tmp_path, differs, status, recommended):
    model = TableModel(differs)
    monkeypatch.setattr(cost, "time", model)
    monkeypatch.setattr(__main__, "connect", lambda url, api_key: model)
    out = tmp_path / "report.json"
    argv = ["--url", "http://host", "--prompts", prompts_file, "--out", str(out), "--policies", "block,base"]
    assert command(capsys, *argv, "--min-agreement", "1")[0] == status
    report = json.loads(out.read_text())
    assert report["passed"] == (status == 0) and report["recommended"] == recommended
    assert report["prompts"] == len(report["comparisons"]) == 4 and list(report["policies"]) == ["block", "base"]
    assert command(capsys, *argv)[0] == 0


@pytest.mark.parametrize(
    "argv, reason",
    [
        ([], "one of the arguments --model-path --url is required"),
        (["--url", "http://127.0.0.1:9", "--model-path", "m"], "not allowed with argument"),
        (["--url", "http://127.0.0.1:9", "--", "--tp", "2"], "flags after -- are for an engine"),
        (["--model-path", "m", "--api-key", "k"], "--api-key goes with --url"),
        (["--url", "http://127.0.0.1:9", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (
            ["--url", "http://127.0.0.1:9", "--min-agreement", "2"],
            "argument --min-agreement: must be at least 0 and at",
        ),
        (["--url", "http://127.0.0.1:9", "--max-kl", "nan"], "argument --max-kl: must be at least 0, got nan"),
        (["--url", "http://127.0.0.1:9", "--budget-ms", "x"], "argument --budget-ms: must be a number, got 'x'"),
        (["--url", "http://127.0.0.1:9", "--out", "/nowhere/x"], "--out: there is no folder /nowhere"),
        (["--model-path", "m", "--device", "cpu"], "flags of the engine follow after --, as in: -- --device cpu"),
        (["--model-path", "m", "--policies", "block,half"], "--policies: link must be one of"),
        (
            ["--model-path", "m", "--", "--lazy-max-chunks", "0"],
            "verify: error: argument --lazy-max-chunks: must be at",
        ),
        (["--model-path", "m", "--max-em-drop", "1"], "error: --max-em-drop needs prompts with gold answers"),
        (["--url", "http://127.0.0.1:9"], "error: no server answers at http://127.0.0.1:9: start one with"),
        (["--url", "127.0.0.1:9"], "begins with http:// or https://, got '127.0.0.1:9'"),
        (["--url", "http://127.0.0.1:9", "--prompts", "/nowhere"], "cannot read /nowhere"),
    ],
)
def test_bad_usage(capsys, prompts_file, argv, reason):
    status, shown = command(capsys, "--prompts", prompts_file, *argv)
    assert status == 2 and reason in shown


def test_an_engine_that_does_not_start_is_no_verdict(capsys, monkeypatch, prompts_file):
    def fails(*_):
        raise RuntimeError("no accelerator")

    monkeypatch.setattr(__main__, "started", fails)
    status, shown = command(capsys, "--model-path", "m", "--prompts", prompts_file)
    assert status == 2 and "error: no accelerator" in shown


def test_engine_gets_the_flags_after_the_dashes(capsys, monkeypatch, prompts_file):
    from sglang_lazy.entrypoints import engine
    from sglang_lazy.port import plugin

    class Engine:
        def __init__(self, server_args, **options):
            seen.update(server_args=server_args, options=options)
            self.generate = TableModel()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            seen["closed"] = True

    seen = {}
    monkeypatch.setattr(engine, "Engine", Engine)
    monkeypatch.setattr(plugin, "activate", lambda config: None)
    monkeypatch.setattr("sglang.srt.server_args.prepare_server_args", lambda argv: argv)
    monkeypatch.setattr("sglang.srt.plugins.load_plugins", lambda: None)
    argv = ["--model-path", "m", "--prompts", prompts_file, "--policies", "base"]
    flags = ["--", "--tp", "2", "--lazy-max-chunks", "9"]
    status, shown = command(capsys, *argv[:-1], "half", *flags)
    assert status == 2 and "link must be one of" in shown and not seen
    assert command(capsys, *argv, *flags)[0] == 0
    assert seen["server_args"] == ["--model-path", "m", "--log-level", "error", "--tp", "2"]
    assert seen["options"]["lazy_max_chunks"] == 9 and seen["closed"]
