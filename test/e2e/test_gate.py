"""The gate to chunk reuse: answering with and without it, comparing both, watching both in service."""

import collections
import json
import math
import random
import subprocess
import sys
import time

import pytest
import requests
import sglang as sgl
from oracle.tokenizer import VOCAB_SIZE

from sglang_lazy.verify import connect, verify

RIVER = "The river rises in the northern hills and flows south for two hundred kilometres."
LIBRARY = "The library holds more than forty thousand books, of which the oldest was printed in Venice."
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def text(value):
    return {"type": "text", "text": value}


def chunk(value):
    return {"type": "chunk", "text": value}


def ids(kind, *tokens):
    return {"type": kind, "input_ids": list(tokens)}


def call(url, path, **body):
    response = requests.post(url + path, json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def generate(url, **body):
    return call(url, "/generate", **{"sampling_params": GREEDY, **body})


def refusal(url, path="/generate", **body):
    response = requests.post(url + path, json=body, timeout=120)
    assert response.status_code == 400, response.text
    return response.text


def flush(url):
    requests.get(
        url + "/server_info", timeout=60
    ).raise_for_status()  # answered when the scheduler's last batch is over
    requests.post(url + "/flush_cache", timeout=60).raise_for_status()


SEGMENTS = [text("Read: "), chunk(RIVER), text(" "), chunk(LIBRARY), text(" Which town?")]


# link, request by request


def random_prompt(seed):
    rng = random.Random(seed)
    pieces = [[rng.randrange(10, 500) for _ in range(rng.randint(1, 40))] for _ in range(7)]
    segments = [ids("chunk" if index % 2 else "text", *piece) for index, piece in enumerate(pieces)]
    return segments, sum(pieces, [])


def test_full_is_the_plain_prompt_bit_by_bit(server):
    """Same tokens, same logprobs, prompt logprobs included, same prefix hits: cold, and again."""
    wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
    segments, input_ids = random_prompt(1)
    results = []
    for prompt in ({"input_ids": input_ids}, {"segments": segments, "link": "full"}):
        flush(server)
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
    assert alone[0] != alone[1], "otherwise this test would see no difference"
    prompts, links = [segments, segments, segments, [ids("text", *input_ids)]], ["full", "block", None, "full"]
    answers = generate(server, segments=prompts, link=links)
    assert [answer["output_ids"] for answer in answers] == [alone[1], alone[0], alone[0], alone[1]]
    assert [answer["meta_info"].get("link") for answer in answers] == ["full", "block", "block", None]
    assert ["chunks" in answer["meta_info"] for answer in answers] == [False, True, True, False]
    everywhere = generate(server, segments=prompts[:2], link="full")
    assert [answer["output_ids"] for answer in everywhere] == [alone[1]] * 2


def test_salt_keeps_full_prompts_apart_too(server):
    """The documents of a tenant do not become a prefix that another can time."""
    segments, _ = random_prompt(3)
    cached = [
        generate(server, segments=segments, link="full", salt=salt)["meta_info"]["cached_tokens"]
        for salt in ("a", "a", "b", None)
    ]
    assert cached[1] > 0 and cached[0] == cached[2] == cached[3] == 0


def test_full_takes_what_chunks_refuse(server):
    many = [ids("chunk", 9)] * 300
    assert generate(server, segments=many, link="full")["meta_info"]["prompt_tokens"] == 300
    assert "at most 256" in refusal(server, segments=many, link="block")
    stream = requests.post(
        server + "/generate", json={"segments": SEGMENTS, "link": "full", "stream": True, "sampling_params": GREEDY}
    )
    *earlier, last = stream.text.strip().removesuffix("data: [DONE]").strip().split("\n\n")
    assert '"link":"full"' in last and earlier and not any('"link"' in event for event in earlier)


@pytest.mark.parametrize(
    "body, reason",
    [
        ({"segments": SEGMENTS, "link": "half"}, "link must be one of 'block', 'full', got 'half'"),
        ({"segments": SEGMENTS, "link": 1}, "link must be one of 'block', 'full', got 1"),
        ({"segments": [SEGMENTS, SEGMENTS], "link": ["full"]}, "link has 1 entries for a batch of 2 prompts"),
        ({"segments": [SEGMENTS, SEGMENTS], "link": ["full", ""]}, "prompt 1 of the batch: link must be one of"),
        ({"text": "Who?", "link": "full"}, "link says how chunks are answered and needs a prompt given as segments"),
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
    assert default["token_ids"] == block["token_ids"] != full["token_ids"]
    assert [one["meta_info"]["link"] for one in (default, block, full)] == ["block", "block", "full"]
    assert full["prompt_token_ids"] == block["prompt_token_ids"]
    assert full["token_ids"] == generate(server, input_ids=full["prompt_token_ids"])["output_ids"]
    assert "link must be one of" in refusal(server, path, **body(link="half"))
    plain = [{"role": "user", "content": "Who?"}]
    for field in ({"link": "full"}, {"salt": "a"}):
        assert "needs a prompt given as chunk parts" in refusal(server, path, **body(messages=plain, **field))


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


# verify


def next_token_logprobs(url, link, segments):
    """Of the whole vocabulary, after the prompt."""
    whole = list(range(VOCAB_SIZE))
    fields = {"return_logprob": True, "token_ids_logprob": whole, "sampling_params": {**GREEDY, "max_new_tokens": 1}}
    (row,) = generate(url, segments=segments, link=link, **fields)["meta_info"]["output_token_ids_logprobs"]
    return [logprob for logprob, _, _ in row]


def test_verify_sees_what_the_model_does(server):
    """Agreement where both ways are the same, and divergence as the whole vocabulary has it where they are not."""
    same = [[ids("chunk", *range(40, 40 + n)), ids("text", 30, 31, n)] for n in (5, 8)]
    prompts = same + [random_prompt(seed)[0] for seed in range(10, 14)]
    report = verify(connect(server), [{"segments": segments} for segments in prompts], max_new_tokens=6)
    for segments, one in zip(prompts, report.comparisons, strict=True):
        params = {"temperature": 0, "max_new_tokens": 6}
        answers = [generate(server, segments=segments, link=link, sampling_params=params) for link in ("full", "block")]
        assert [one.full, one.block] == [answer["output_ids"] for answer in answers]
        assert [one.full_text, one.block_text] == [answer["text"] for answer in answers]
        for position in (0, len(one.full) - 1):  # the last one after the answer so far
            context = [*segments, ids("text", *one.full[:position])] if position else segments
            full, block = (next_token_logprobs(server, link, context) for link in ("full", "block"))
            exact = sum(math.exp(p) * (p - q) for p, q in zip(full, block, strict=True))
            if segments in same:
                assert one.kl[position] == pytest.approx(0, abs=1e-5) and one.full == one.block
            else:
                assert 0.2 * exact < one.kl[position] < exact + 1e-4
    assert 2 / 6 <= report.metrics["agreement"].value < 1


def test_verify_where_answers_end_early(server):
    """At a stop token, which is part of the answer, and at a stop text."""
    answer = generate(server, segments=SEGMENTS, link="full")
    first, word = answer["output_ids"][0], answer["text"][2:4]
    at_token = {**GREEDY, "ignore_eos": False, "stop_token_ids": [first]}
    ended = generate(server, segments=SEGMENTS, link="full", sampling_params=at_token, return_logprob=True)
    assert ended["output_ids"] == [first] and len(ended["meta_info"]["output_token_logprobs"]) == 1
    report = verify(connect(server), [{"segments": SEGMENTS}], max_new_tokens=8, stop=[word])
    (one,) = report.comparisons
    assert word not in one.full_text and len(one.kl) == len(one.full) < 8


def test_verify_command(server, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"segments": SEGMENTS, "answers": ["Venice"]}) + "\n")
    command = [sys.executable, "-m", "sglang_lazy.verify", "--url", server, "--prompts", str(prompts)]
    judged = subprocess.run([*command, "--min-agreement", "1"], capture_output=True, text=True, timeout=120)
    assert judged.returncode == 1 and judged.stdout.endswith("FAIL\n"), judged.stderr
    prompts.write_text(json.dumps({"segments": [*SEGMENTS[:2], text("x " * 3000)]}))
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2 and "longer than the model's context length" in refused.stderr


# shadow mode


@pytest.fixture(scope="module")
def shadowing(tiny_model, tmp_path_factory):
    """URL of a server that makes every greedy answer over chunks twice, and takes chunks as text unless told."""
    from serving import device_flags, running_server

    flags = ["--model-path", tiny_model, "--max-total-tokens", "20000", *device_flags()]
    flags += ["--enable-metrics", "--lazy-shadow-rate", "1", "--lazy-default-link", "full"]
    with running_server(flags, tmp_path_factory.mktemp("shadow") / "server.log") as url:
        yield url


def metrics(url):
    """Values by name, without labels; series of one name added up."""
    values = collections.Counter()
    for line in requests.get(url + "/metrics", timeout=60).text.splitlines():
        if not line.startswith("#"):
            values[line.split("{")[0].split(" ")[0]] += float(line.rsplit(" ", 1)[1])
    return values


def shadows(url):
    return {
        name.removeprefix("sglang_lazy:shadow_").removesuffix("_total"): int(value)
        for name, value in metrics(url).items()
        if name.startswith("sglang_lazy:shadow_")
    }


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def running(url):
    return requests.get(url + "/v1/loads", timeout=60).json()["loads"][0]["num_running_reqs"]


def test_default_link_and_shadows(shadowing):
    """Where nothing stands before the only chunk, block and full are the same; elsewhere they are not."""
    same = [[ids("chunk", *range(20, 20 + n)), ids("text", 30, 31, n)] for n in (4, 9)]
    others = [random_prompt(seed)[0] for seed in range(4)]
    full = [generate(shadowing, segments=segments) for segments in same + others]
    assert {answer["meta_info"]["link"] for answer in full} == {"full"}
    assert set(shadows(shadowing).values()) == {0}
    users = metrics(shadowing)["sglang:num_requests_total"]
    expected = {"requests": 0, "identical_answers": 0, "first_token_agreements": 0, "dropped": 0, "failed": 0}
    expected["ineligible"] = 0
    for segments, other in zip(same + others, full, strict=True):
        answer = generate(shadowing, segments=segments, link="block")
        assert answer["meta_info"]["link"] == "block"
        expected["requests"] += 1
        expected["identical_answers"] += answer["output_ids"] == other["output_ids"]
        expected["first_token_agreements"] += answer["output_ids"][0] == other["output_ids"][0]
        wait_until(lambda: shadows(shadowing)["requests"] == expected["requests"])
    assert shadows(shadowing) == expected
    assert 2 <= expected["identical_answers"] < 6, "both outcomes must occur for this test to see anything"
    assert metrics(shadowing)["sglang:num_requests_total"] == users + 6  # shadows are not counted as requests


def test_what_is_and_is_not_shadowed(shadowing):
    before = shadows(shadowing)
    sampled = {**GREEDY, "temperature": 1}
    generate(shadowing, segments=SEGMENTS, link="block", sampling_params=sampled)
    generate(shadowing, segments=SEGMENTS, link="block", sampling_params={**GREEDY, "n": 2})
    generate(shadowing, text="Which town?")
    wait_until(lambda: shadows(shadowing)["ineligible"] == before["ineligible"] + 3)
    body = {"segments": SEGMENTS, "link": "block", "stream": True, "sampling_params": GREEDY}
    stream = requests.post(shadowing + "/generate", json=body, timeout=120)
    assert stream.text.rstrip().endswith("[DONE]") and "lazy-shadow" not in stream.text
    wait_until(lambda: shadows(shadowing)["requests"] == before["requests"] + 1)
    messages = [{"role": "user", "content": SEGMENTS}]
    fields = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 4, "link": "block"}
    reply = call(shadowing, "/v1/chat/completions", **fields)
    assert reply["usage"]["completion_tokens"] <= 4 and len(reply["choices"]) == 1
    wait_until(lambda: shadows(shadowing)["requests"] == before["requests"] + 2)
    generate(shadowing, segments=[SEGMENTS] * 3, link="block")  # of answers that end together, one is compared
    wait_until(lambda: shadows(shadowing)["requests"] == before["requests"] + 3)
    assert shadows(shadowing)["dropped"] == before["dropped"] + 2
    assert shadows(shadowing)["failed"] == 0


def test_users_and_operators_come_first(shadowing, tiny_model):
    """While a shadow runs, requests are answered as ever, and what needs an idle server finds one."""
    long = {"segments": SEGMENTS, "link": "block", "sampling_params": {**GREEDY, "max_new_tokens": 600}}
    expected = generate(shadowing, segments=SEGMENTS)["output_ids"]
    before = shadows(shadowing)
    answer = generate(shadowing, **long)["output_ids"]
    wait_until(lambda: running(shadowing) == 1)
    assert generate(shadowing, segments=SEGMENTS)["output_ids"] == expected
    wait_until(lambda: running(shadowing) == 1)  # it started over
    controls = [("/flush_cache", {}), ("/update_weights_from_disk", {"model_path": tiny_model})]
    for count, (path, body) in enumerate([*controls, ("/abort_request", {"abort_all": True})], 1):
        response = requests.post(shadowing + path, json=body, timeout=120)
        assert response.status_code == 200, response.text
        wait_until(lambda: shadows(shadowing)["dropped"] == before["dropped"] + count)  # noqa: B023
        assert shadows(shadowing) == {**before, "dropped": before["dropped"] + count}
        again = generate(shadowing, segments=SEGMENTS)
        assert again["output_ids"] == expected and (path == "/abort_request" or not again["meta_info"]["cached_tokens"])
        if count < 3:
            assert generate(shadowing, **long)["output_ids"] == answer
            wait_until(lambda: running(shadowing) == 1)
