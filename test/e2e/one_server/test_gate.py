"""Choosing between chunk reuse and full attention: requests with either link, and comparisons of both."""

import json
import math
import subprocess
import sys

import pytest
import requests
from http_prompts import GREEDY, LIBRARY, RIVER, SEGMENTS, call, chunk, generate, ids, random_prompt, text

import sglang_lazy as sgl
from oracle.tokenizer import VOCAB_SIZE
from sglang_lazy.testing import Client
from sglang_lazy.verify import ALL, Thresholds, connect, verify
from sglang_lazy.verify.__main__ import main


def refusal(url, path="/generate", **body):
    response = requests.post(url + path, json=body, timeout=120)
    assert response.status_code == 400, response.text
    return response.text


def refusal_message(url, **body):
    return json.loads(refusal(url, **body))["error"]["message"]


# Link by request


def test_full_is_bitwise_the_plain_prompt(server):
    """Same tokens, logprobs, prompt logprobs and prefix hits, cold and repeated."""
    wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
    segments, input_ids = random_prompt(1)
    results = []
    for prompt in ({"input_ids": input_ids}, {"segments": segments, "link": "full"}):
        Client(server).flush_cache()
        answers = [generate(server, **prompt, **(wanted if scored else {"return_logprob": True})) for scored in (1, 0)]
        results.append(answers)
    plain, full = results
    for mine, stock in zip(full, plain, strict=True):
        assert stock["meta_info"]["prompt_tokens"] == len(input_ids)
        for key in ("output_ids", "text"):
            assert mine[key] == stock[key]
        for key in ("output_token_logprobs", "cached_tokens", "cached_tokens_details", "finish_reason"):
            assert mine["meta_info"][key] == stock["meta_info"][key]
        assert mine["meta_info"]["link"] == "full" and "chunks" not in mine["meta_info"]
        assert "link" not in stock["meta_info"]
    for key in ("input_token_logprobs", "output_top_logprobs"):
        assert full[0]["meta_info"][key] == plain[0]["meta_info"][key]
    assert len(full[0]["meta_info"]["input_token_logprobs"]) == len(input_ids)
    assert full[1]["meta_info"]["cached_tokens"] > 0


def test_block_and_full_differ_and_share_a_batch(server):
    segments, input_ids = random_prompt(2)
    alone = [generate(server, segments=segments, link=link)["output_ids"] for link in ("block", "full")]
    assert alone[0] != alone[1], "the links must differ for this test to mean anything"
    prompts, links = [segments, segments, segments, [ids("text", *input_ids)]], ["full", "block", None, "full"]
    answers = generate(server, segments=prompts, link=links)
    assert [answer["output_ids"] for answer in answers] == [alone[1], alone[0], alone[0], alone[1]]
    assert [answer["meta_info"].get("link") for answer in answers] == ["full", "block", "block", None]
    assert ["chunks" in answer["meta_info"] for answer in answers] == [False, True, True, False]
    everywhere = generate(server, segments=prompts[:2], link="full")
    assert [answer["output_ids"] for answer in everywhere] == [alone[1]] * 2


def test_cache_salt_keeps_full_prompts_apart_too(server):
    """A tenant's documents must not become a prefix that another tenant can detect by timing."""
    segments, _ = random_prompt(3)
    cached = [
        generate(server, segments=segments, link="full", cache_salt=salt)["meta_info"]["cached_tokens"]
        for salt in ("a", "a", "b", None)
    ]
    assert cached[1] > 0 and cached[0] == cached[2] == cached[3] == 0


def test_copies_answer_as_chunks_in_place_do(server):
    """The baseline copies chunks for each request and rotates the copies, which rounds keys once more."""
    segments, _ = random_prompt(4)
    block, cold, warm = (
        generate(server, segments=segments, link=link, cache_salt=salt)
        for link, salt in (("block", "in place"), ("copy", "copies"), ("copy", "copies"))
    )
    assert block["output_ids"] == cold["output_ids"] == warm["output_ids"]
    assert [answer["meta_info"]["link"] for answer in (block, cold, warm)] == ["block", "copy", "copy"]
    assert not any(report["hit"] for report in cold["meta_info"]["chunks"])
    assert all(report["hit"] for report in warm["meta_info"]["chunks"])


def test_full_accepts_what_chunks_refuse(server):
    many = [ids("chunk", 9)] * 300
    assert generate(server, segments=many, link="full")["meta_info"]["prompt_tokens"] == 300
    assert "more than the 256 chunks" in refusal(server, segments=many, link="block")
    stream = requests.post(
        server + "/generate", json={"segments": SEGMENTS, "link": "full", "stream": True, "sampling_params": GREEDY}
    )
    *earlier, last = stream.text.strip().removesuffix("data: [DONE]").strip().split("\n\n")
    assert '"link":"full"' in last and earlier and not any('"link"' in event for event in earlier)


@pytest.mark.parametrize(
    "body, reason",
    [
        ({"segments": SEGMENTS, "link": "half"}, "link must be one of 'block', 'full', 'epic'"),
        ({"segments": SEGMENTS, "link": 1}, "got 1"),
        ({"segments": [SEGMENTS, SEGMENTS], "link": ["full"]}, "link has 1 values for a batch of 2 prompts"),
        ({"segments": [SEGMENTS, SEGMENTS], "link": ["full", ""]}, "prompt 1 of the batch: link must be one of"),
        ({"segments": SEGMENTS, "link": "query:ratio=2"}, "ratio must be above 0 and at most 1, got 2.0"),
        ({"text": "Who?", "link": "full"}, "link needs a prompt given as segments"),
    ],
)
def test_bad_links(server, body, reason):
    assert reason in refusal(server, **body)


def test_link_in_chat(server):
    def body(**fields):
        fields = {"messages": [{"role": "user", "content": parts}], "return_prompt_token_ids": True, **fields}
        return {"model": "default", "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_meta_info": True,
                "return_token_ids": True, **fields}  # fmt: skip

    path, parts = "/v1/chat/completions", [text("See "), chunk(RIVER), chunk(LIBRARY), text("\nWho?")]
    default, block, full = (call(server, path, **body(link=link))["choices"][0] for link in (None, "block", "full"))
    assert default["response_token_ids"] == block["response_token_ids"] != full["response_token_ids"]
    assert [one["meta_info"]["link"] for one in (default, block, full)] == ["block", "block", "full"]
    assert full["prompt_token_ids"] == block["prompt_token_ids"]
    assert full["response_token_ids"] == generate(server, input_ids=full["prompt_token_ids"])["output_ids"]
    assert "link must be one of" in refusal(server, path, **body(link="half"))
    plain = [{"role": "user", "content": "Who?"}]
    assert "link needs a prompt with chunk parts" in refusal(server, path, **body(messages=plain, link="full"))


@sgl.function
def answer_from(s, link):
    if link:
        s += sgl.link(link)
    s += "Read: " + sgl.chunk(RIVER) + " " + sgl.chunk(LIBRARY) + " Which town?"
    s += sgl.gen("answer", max_tokens=8, temperature=0, ignore_eos=True)


def test_link_in_a_program(server):
    endpoint = sgl.RuntimeEndpoint(server)
    answers = {}
    for link in (None, "block", "full"):
        state = answer_from.run(link=link, backend=endpoint)
        assert state.error() is None
        answers[link] = state["answer"]
        assert state.get_meta_info("answer")["link"] == (link or "block")
        assert state["answer"] == generate(server, segments=SEGMENTS, link=link)["text"]
    assert answers["full"] != answers["block"] == answers[None]


# Verify

FOUR = {"temperature": 0, "max_new_tokens": 4}


def next_token_logprobs(url, link, segments):
    """Over the whole vocabulary, after the prompt."""
    whole = list(range(VOCAB_SIZE))
    fields = {"return_logprob": True, "token_ids_logprob": whole, "sampling_params": {**GREEDY, "max_new_tokens": 1}}
    (row,) = generate(url, segments=segments, link=link, **fields)["meta_info"]["output_token_ids_logprobs"]
    return [logprob for logprob, _, _ in row]


def test_verify_sees_what_the_model_does(server):
    """Agreement where both ways are the same; elsewhere the divergence equals that over the whole vocabulary."""
    same = [[ids("chunk", *range(40, 40 + n)), ids("text", 30, 31, n)] for n in (5, 8)]
    prompts = same + [random_prompt(seed)[0] for seed in range(10, 14)]
    report = verify(connect(server), [{"segments": segments} for segments in prompts], max_new_tokens=6)
    for segments, one in zip(prompts, report.comparisons, strict=True):
        params = {"temperature": 0, "max_new_tokens": 6}
        answers = [generate(server, segments=segments, link=link, sampling_params=params) for link in ("full", "block")]
        ((link, linked),) = one.linked.items()
        assert link == "block"
        assert [one.full.tokens, linked.tokens] == [answer["output_ids"] for answer in answers]
        assert [one.full.text, linked.text] == [answer["text"] for answer in answers]
        for position in (0, len(one.full.tokens) - 1):  # the last position includes the answer so far
            context = [*segments, ids("text", *one.full.tokens[:position])] if position else segments
            full, block = (next_token_logprobs(server, link, context) for link in ("full", "block"))
            exact = sum(math.exp(p) * (p - q) for p, q in zip(full, block, strict=True))
            if segments in same:
                assert linked.kl[position] == pytest.approx(0, abs=1e-5) and one.full.tokens == linked.tokens
            else:
                assert 0.2 * exact < linked.kl[position] < exact + 1e-4
    assert 2 / 6 <= report.policies["block"].metrics["agreement"].value < 1


def test_verify_compares_policies(server):
    """Recomputing every token equals full attention; the report has the recomputed share and its time."""
    prompts = [{"segments": random_prompt(seed)[0]} for seed in range(20, 24)]
    policies = ["block", "query:ratio=0.25", "base+epic:tokens=1000"]
    report = verify(connect(server), prompts, Thresholds(max_kl=1e-4), policies=policies, max_new_tokens=4)
    metrics = {link: report.policies[link].metrics for link in policies}
    everything = "base+epic:tokens=1000"
    assert metrics[everything]["agreement"].value == 1 and metrics["block"]["kl_first_token"].value > 1e-3
    assert report.recommended == everything and report.passed is True
    for prompt, one in zip(prompts, report.comparisons, strict=True):
        total = sum(len(segment["input_ids"]) for segment in prompt["segments"] if segment["type"] == "chunk")
        shares = [one.costs[link].recomputed for link in policies]
        assert shares == pytest.approx([0, math.ceil(total / 4) / total, 1])
        answer = generate(server, segments=prompt["segments"], link="query:ratio=0.25", sampling_params=FOUR)
        assert one.linked["query:ratio=0.25"].tokens == answer["output_ids"]
    assert all(one["ttft_ms"].value > 0 for one in metrics.values()) and report.full_ttft_ms > 0


@pytest.mark.slow  # test_verify_compares_policies has some
def test_verify_compares_all_policies(server):
    """This model has no trained tokens. A budget that allows everything chooses the largest value of each policy."""
    prompts = [{"segments": random_prompt(seed)[0]} for seed in range(30, 32)]
    report = verify(connect(server), prompts, Thresholds(budget_ms=1e6), policies="all", max_new_tokens=4)
    assert list(report.left_out) == ["packet", "kvlink:tokens=5"]
    for link, reason in report.left_out.items():
        name = link.partition(":")[0]
        assert reason == refusal_message(server, segments=SEGMENTS, link=name)
        assert reason.startswith(f"link {name}: this model was not trained for it")
    assert list(report.policies) == [link for link in ALL if link not in report.left_out]
    largest = ("epic:tokens=64", "static:ratio=0.15", "query:ratio=0.15", "blend:ratio=0.15", "whole:ratio=0.3")
    assert set(report.within_budget) == {f"{base}{link}" for base in ("", "base+") for link in largest} - {
        "base+query:ratio=0.15"
    } | {"base+query:ratio=0.3"}
    for prompt, one in zip(prompts, report.comparisons, strict=True):
        for link, linked in one.linked.items():
            answer = generate(server, segments=prompt["segments"], link=link, sampling_params=FOUR)
            assert answer["meta_info"]["link"] == link and linked.tokens == answer["output_ids"]


def test_verify_where_answers_end_early(server):
    """At a stop token, which is part of the answer, and at a stop string."""
    answer = generate(server, segments=SEGMENTS, link="full")
    first, word = answer["output_ids"][0], answer["text"][2:4]
    at_token = {**GREEDY, "ignore_eos": False, "stop_token_ids": [first]}
    ended = generate(server, segments=SEGMENTS, link="full", sampling_params=at_token, return_logprob=True)
    assert ended["output_ids"] == [first] and len(ended["meta_info"]["output_token_logprobs"]) == 1
    report = verify(connect(server), [{"segments": SEGMENTS}], max_new_tokens=8, stop=[word])
    (one,) = report.comparisons
    assert word not in one.full.text and len(one.linked["block"].kl) == len(one.full.tokens) < 8


@pytest.mark.slow  # starts the command; the other tests call what it does
def test_verify_command(server, tmp_path, capfd):
    """Once as users start it. What else it may exit with is tried in this process, which has imported SGLang."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"segments": SEGMENTS, "answers": ["Venice"]}) + "\n")
    arguments = ["--url", server, "--prompts", str(prompts)]
    compared = [*arguments, "--policies", "block,base+query:ratio=1", "--min-agreement", "1"]
    command = [sys.executable, "-m", "sglang_lazy.verify", *compared]
    judged = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert judged.returncode == 0, judged.stderr
    assert judged.stdout.endswith("PASS: --lazy-default-link base+query:ratio=1.0\n")

    def judge(*arguments):
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        return ended.value.code, *capfd.readouterr()

    status, printed, _ = judge(*arguments, "--min-agreement", "1")
    assert status == 1 and "FAIL: none of these policies" in printed
    prompts.write_text(json.dumps({"segments": [*SEGMENTS[:2], text("x " * 3000)]}))
    status, _, errors = judge(*arguments)
    assert status == 2 and "longer than the model's context length" in errors
