"""Every API of a real server: what it accepts, what it answers, what it refuses and why."""

import asyncio
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from http_prompts import LIBRARY, RAILWAY, RIVER, chunk, text
from served import TOLERANCE
from transformers import AutoTokenizer

import sglang_lazy as sgl

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def prompt(*documents, question="\nWhich town lies at the mouth of the river?"):
    return [text("Read: "), *(part for document in documents for part in (chunk(document), text(" "))), text(question)]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def post(server):
    def post(path, **body):
        return requests.post(server + path, json=body, timeout=120)

    return post


@pytest.fixture(scope="module")
def generate(post):
    def generate(**body):
        response = post("/generate", **{"sampling_params": GREEDY, **body})
        assert response.status_code == 200, response.text
        return response.json()

    return generate


def events(response):
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# /generate


def test_chunks_are_reused_in_another_order(generate, tokenizer):
    cache_salt = "order"
    cold = generate(segments=prompt(RIVER, RAILWAY, LIBRARY), cache_salt=cache_salt)["meta_info"]
    warm = generate(segments=prompt(LIBRARY, RIVER, RAILWAY), cache_salt=cache_salt)["meta_info"]
    sizes = [len(tokenizer.encode(document, add_special_tokens=False)) for document in (LIBRARY, RIVER, RAILWAY)]
    assert [report["hit"] for report in cold["chunks"]] == [False] * 3
    assert [report["hit"] for report in warm["chunks"]] == [True] * 3
    assert [report["tokens"] for report in warm["chunks"]] == sizes
    assert {report["id"] for report in warm["chunks"]} == {report["id"] for report in cold["chunks"]}
    assert cold["cached_tokens_details"]["chunk"] == 0
    assert warm["cached_tokens_details"]["chunk"] == sum(sizes) <= warm["cached_tokens"]
    assert "chunk_hits" not in warm["cached_tokens_details"]
    offset = len(tokenizer.encode("Read: "))
    assert [report["offset"] for report in warm["chunks"]] == [
        offset, offset + sizes[0] + 1, offset + sizes[0] + sizes[1] + 2
    ]  # fmt: skip


@pytest.mark.parametrize(
    "link", ["epic:tokens=500", "epic:tokens=4", "query:ratio=0.4", "query:ratio=1", "blend:ratio=0.4"]
)
def test_a_chunk_that_is_recomputed_is_still_a_hit(generate, link):
    """Of the reused tokens there are as many as the policy keeps; without any, the prompt is an ordinary one."""
    segments = prompt(RIVER, RAILWAY)
    cold = generate(segments=segments, cache_salt=link)["meta_info"]
    warm = generate(segments=[*segments, text("?")], cache_salt=link, link=link)["meta_info"]
    assert [report["hit"] for report in cold["chunks"]] == [False] * 2
    assert [report["hit"] for report in warm["chunks"]] == [True] * 2
    reused, tokens = (sum(report[key] for report in warm["chunks"]) for key in ("reused_tokens", "tokens"))
    assert reused == (warm["cached_tokens_details"] or {}).get("chunk", 0)
    if link.startswith("epic"):
        assert reused == (0 if "500" in link else tokens - 8)
    else:
        assert reused == tokens - math.ceil(float(link.partition("=")[2]) * tokens)


def test_forms_of_the_same_prompt_give_the_same_answer(generate, post, tokenizer):
    segments = prompt(RIVER, RAILWAY)
    answer = generate(segments=segments)
    ids = [
        {"type": segment["type"], "input_ids": tokenizer.encode(segment["text"], add_special_tokens=index == 0)}
        for index, segment in enumerate(segments)
    ]
    stream = events(post("/generate", segments=segments, sampling_params=GREEDY, stream=True))
    assert generate(segments=ids)["output_ids"] == answer["output_ids"]
    assert stream[-1]["output_ids"] == answer["output_ids"]
    assert [("chunks" in event["meta_info"]) for event in stream] == [False] * (len(stream) - 1) + [True]
    assert not any("chunk_hits" in (event["meta_info"]["cached_tokens_details"] or {}) for event in stream)


def test_batch_with_and_without_chunks(generate):
    prompts = [prompt(RIVER), [text("Who built the bridge?")], [chunk(RAILWAY)]]
    params = [{**GREEDY, "max_new_tokens": length} for length in (2, 3, 4)]
    answers = generate(segments=prompts, sampling_params=params, cache_salt=[None, None, "own"])
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [2, 3, 4]
    assert ["chunks" in answer["meta_info"] for answer in answers] == [True, False, True]
    plain = generate(text="Who built the bridge?", sampling_params=params[1])
    assert plain["output_ids"] == answers[1]["output_ids"]


def test_parallel_samples_of_a_cold_prompt_report_no_hits(generate):
    answers = generate(segments=prompt(LIBRARY), cache_salt="samples", sampling_params={**GREEDY, "n": 2})
    assert len(answers) == 2
    for answer in answers:
        assert answer["output_ids"] == answers[0]["output_ids"]
        assert [report["hit"] for report in answer["meta_info"]["chunks"]] == [False]
        assert answer["meta_info"]["cached_tokens_details"]["chunk"] == 0
    again = generate(segments=prompt(LIBRARY), cache_salt="samples")["meta_info"]
    assert [report["hit"] for report in again["chunks"]] == [True], "the samples are in the salt's namespace"


def test_stop_and_logprobs(generate, tokenizer):
    segments = prompt(RIVER)
    full = generate(segments=segments, return_logprob=True, top_logprobs_num=2)["meta_info"]
    assert len(full["output_token_logprobs"]) == 6 and all(len(top) == 2 for top in full["output_top_logprobs"])
    stop = full["output_token_logprobs"][2][1]
    cut = generate(segments=segments, sampling_params={**GREEDY, "stop_token_ids": [stop], "ignore_eos": False})
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_logprobs_of_named_tokens_beside_requests_without(generate):
    """A batch with both kinds of requests ends SGLang's own scheduler."""
    params = GREEDY
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(generate, input_ids=[8, 9, 10], sampling_params={**params, "max_new_tokens": 400})
        ask = dict(input_ids=[5, 6, 7], sampling_params={**params, "max_new_tokens": 8}, return_logprob=True)
        while not other.done():
            found = generate(**ask, token_ids_logprob=[3, 4])["meta_info"]["output_token_ids_logprobs"]
        assert len(other.result()["output_ids"]) == 400
    tops = generate(**ask, top_logprobs_num=500)["meta_info"]["output_top_logprobs"]
    assert len(tops) == 8
    for named, top in zip(found, tops, strict=True):
        expected = {token: logprob for logprob, token, _ in top}
        assert {token: logprob for logprob, token, _ in named} == pytest.approx({n: expected[n] for n in (3, 4)})


def test_prompt_logprobs_after_the_last_chunk(generate):
    segments = prompt(RIVER, question=" Which town lies at the mouth?")
    report = generate(segments=segments)["meta_info"]
    start = report["chunks"][0]["offset"] + report["chunks"][0]["tokens"]
    scored = generate(segments=segments, return_logprob=True, logprob_start_len=start)["meta_info"]
    logprobs = scored["input_token_logprobs"]
    assert len(logprobs) == scored["prompt_tokens"] - start
    assert logprobs[0][0] is None and all(logprob[0] < 0 for logprob in logprobs[1:])


BAD = {
    "unknown type": (dict(segments=[text("a"), {"type": "image", "text": "x"}]), "segments[1]: unknown segment type"),
    "unknown key": (dict(segments=[{**chunk("x"), "title": 1}]), "segments[0]: unknown key 'title'"),
    "empty chunk": (dict(segments=[text("a"), chunk("")]), "segments[1]: the text of a chunk segment is empty"),
    "empty text": (dict(segments=[text("")]), "segments[0]: the text of a text segment is empty"),
    "chunk is no string": (dict(segments=[chunk(["x"])]), "segments[0]: the text of a chunk segment must be a string"),
    "both forms": (dict(segments=[{**chunk("x"), "input_ids": [9]}]), "segments[0]: a chunk segment needs exactly one"),
    "id is no integer": (dict(segments=[{"type": "chunk", "input_ids": [1.5]}]), "must be a list of integers"),
    "id out of range": (dict(segments=[{"type": "chunk", "input_ids": [512]}]), "segments[0]: token id 512"),
    "negative id": (dict(segments=[{"type": "text", "input_ids": [-1]}]), "segments[0]: token id -1"),
    "no segments": (dict(segments=[]), "segments is empty"),
    "segments are no list": (dict(segments="x"), "segments must be a list"),
    "text too": (dict(segments=[chunk("x")], text="x"), "both segments and text"),
    "input_ids too": (dict(segments=[chunk("x")], input_ids=[9]), "both segments and input_ids"),
    "too many chunks": (dict(segments=[chunk("x")] * 257), "more than the 256 chunks that are allowed"),
    "too long": (dict(segments=[chunk("x " * 3000), text("?")]), "longer than the model's context length"),
    "bad salt": (dict(segments=[chunk("x")], cache_salt=1), "cache_salt must be a non-empty string"),
    "bad salt alone": (dict(text="x", cache_salt=""), "cache_salt must be a non-empty string"),
    "salt by its old name": (dict(segments=[chunk("x")], salt="a"), "unknown field 'salt': did you mean 'cache_salt'?"),
    "mistyped temperature": (
        dict(segments=[chunk("x")], sampling_params={"temperature": "0"}),
        "sampling_params: temperature: Expected `float`, got `str`",
    ),
    "mistyped parameter of a plain prompt": (
        dict(text="x", sampling_params={"ignore_eos": "yes"}),
        "sampling_params: ignore_eos: Expected `bool`, got `str`",
    ),
    "unknown parameter": (dict(segments=[chunk("x")], sampling_params={"temprature": 0}), "unknown parameter"),
    "impossible temperature": (dict(segments=[chunk("x")], sampling_params={"temperature": -1}), "temperature must be"),
    "prompt logprobs": (
        dict(segments=[text("a"), chunk("b c"), text("d")], return_logprob=True, logprob_start_len=0),
        "prompt logprobs from position 0",
    ),
    "sessions": (dict(segments=[chunk("x")], session_params={"id": "s"}), "sessions"),
    "one of a batch": (dict(segments=[[text("a")], [chunk("")]]), "prompt 1 of the batch: segments[0]"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_bad_requests(post, generate, case, stream):
    body, reason = BAD[case]
    response = post("/generate", **{"sampling_params": GREEDY, "stream": stream, **body})
    assert response.status_code == 400 and reason in response.json()["error"]["message"], response.text


def test_bad_requests_harm_nobody_else(post, generate):
    expected = generate(segments=prompt(RIVER))["output_ids"]
    with ThreadPoolExecutor(8) as pool:
        bad = [pool.submit(post, "/generate", **body) for body, _ in BAD.values()]
        good = [pool.submit(generate, segments=prompt(RIVER)) for _ in range(4)]
        assert {future.result().status_code for future in bad} == {400}
        assert all(future.result()["output_ids"] == expected for future in good)


def test_a_body_that_is_not_json_is_refused(server):
    response = requests.post(f"{server}/generate", data="{", headers={"Content-Type": "application/json"}, timeout=60)
    assert response.status_code == 400 and "the body is not JSON" in response.json()["message"]


def test_openapi_describes_segments(server):
    schemas = requests.get(f"{server}/openapi.json", timeout=60).json()["components"]["schemas"]
    assert {"segments", "cache_salt", "link", "text", "sampling_params"} <= schemas["GenerateRequest"][
        "properties"
    ].keys()
    assert {"segments", "cache_salt", "link", "prompt"} <= schemas["CompletionsRequest"]["properties"].keys()
    assert {"messages", "cache_salt", "link"} <= schemas["ChatRequest"]["properties"].keys()


# OpenAI completions


def complete(post, segments, **fields):
    fields = {"model": "default", "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
    return post("/v1/completions", segments=segments, **fields)


def test_completions_answer_what_generate_does(post, generate):
    segments = prompt(RIVER, RAILWAY)
    whole = {link: generate(segments=segments, link=link)["text"] for link in ("block", "full")}
    assert whole["block"] != whole["full"]
    for link, answered in ((None, "block"), ("block", "block"), ("full", "full")):
        answer = complete(post, segments, link=link).json()
        assert answer["choices"][0]["text"] == whole[answered]
        stream = events(complete(post, segments, link=link, stream=True, stream_options={"include_usage": True}))
        assert "".join(choice["text"] for event in stream for choice in event["choices"]) == whole[answered]
        counts = {name: count for name, count in stream[-1]["usage"].items() if count is not None}
        assert counts.items() <= complete(post, segments, link=link).json()["usage"].items()
    details = complete(post, segments).json()["usage"]["prompt_tokens_details"]
    assert 0 < details["chunk_tokens"] < details["cached_tokens"]


STREAMED = ["copy", "epic:tokens=3", "query:ratio=0.3", "blend:ratio=0.3", "static:ratio=0.3"]
STREAMED += ["base", "base:preamble=lead", "base+epic:tokens=3", "base+query:ratio=0.3"]


@pytest.mark.parametrize("link", STREAMED)
def test_streams_under_every_policy(post, generate, link):
    """Cold and warm, the pieces add up to the whole answer. That of `copy` is the answer under `block`, all others are
    not."""

    def logprobs(answer):
        return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]

    body = dict(segments=prompt(RIVER, RAILWAY, LIBRARY), link=link)
    block, whole = (
        generate(**{**body, "link": name}, cache_salt="whole", return_logprob=True) for name in ("block", link)
    )
    expected = pytest.approx(logprobs(whole), abs=TOLERANCE)
    assert (logprobs(block) == expected) == (link == "copy")
    for _ in range(2):
        stream = events(complete(post, **body, cache_salt=f"streamed {link}", stream=True, logprobs=1))
        choices = [choice for event in stream for choice in event["choices"]]
        assert len(choices) > 1 and "".join(choice["text"] for choice in choices) == whole["text"]
        assert sum((choice["logprobs"]["token_logprobs"] for choice in choices), []) == expected


def test_completions_of_a_batch_with_samples_and_echo(post, generate):
    prompts, links = [prompt(RIVER), [text("Who built the bridge?")], prompt(LIBRARY)], ["full", None, "block"]
    answers = generate(segments=prompts, link=links)
    body = dict(link=links, cache_salt=[None, None, "own"], n=2, echo=True)
    choices = complete(post, prompts, **body).json()["choices"]
    expected = [
        "".join(segment["text"] for segment in segments) + answer["text"]
        for segments, answer in zip(prompts, answers, strict=True)
        for _ in range(2)
    ]
    assert [choice["text"] for choice in choices] == expected


def test_plain_completions_are_sglangs(post, generate):
    answer = post("/v1/completions", model="default", prompt="Who?", max_tokens=6, temperature=0, ignore_eos=True)
    assert answer.json()["choices"][0]["text"] == generate(text="Who?")["text"]
    assert post("/v1/completions", model="default").status_code == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "segments, fields, reason",
    [
        ([chunk("")], {}, "segments[0]: the text of a chunk segment is empty"),
        ([[text("a")], [chunk("")]], {}, "prompt 1 of the batch: segments[0]"),
        ("x", {}, "segments must be a list"),
        ([chunk("x")], {"prompt": "x"}, "segments cannot be combined with prompt"),
        ([chunk("x")], {"suffix": "x"}, "segments cannot be combined with suffix"),
        ([chunk("x")], {"salt": "a"}, "unknown field 'salt': did you mean 'cache_salt'?"),
        ([chunk("x")], {"link": "half"}, "link must be one of"),
        ([chunk("x")], {"logprobs": 1, "echo": True}, "prompt logprobs from position 0"),
        ([chunk("x " * 3000), text("?")], {}, "longer than the model's context length"),
        (None, {"prompt": "x", "link": "full"}, "link needs a prompt given as segments"),
    ],
)
def test_bad_completions(post, segments, fields, reason, stream):
    response = complete(post, segments, stream=stream, **fields)
    assert response.status_code == 400 and reason in response.json()["message"], response.text


# OpenAI chat


@pytest.fixture(scope="module")
def chat(post):
    def chat(messages, **fields):
        fields = {"model": "default", "temperature": 0, "max_tokens": 6, "ignore_eos": True, **fields}
        return post("/v1/chat/completions", messages=messages, **fields)

    return chat


def user(*parts):
    return {"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}


def test_chat_is_the_rendered_prompt_in_segments(chat, generate, tokenizer):
    messages = [{"role": "system", "content": [chunk(LIBRARY)]}, user("See ", chunk(RIVER), chunk(RAILWAY), "\nWho?")]
    answer = chat(messages, return_meta_info=True, return_token_ids=True).json()["choices"][0]
    rendered = [
        text("<s><|system|>"), chunk(LIBRARY), text("</s><|user|>See "), chunk(RIVER), chunk(RAILWAY),
        text("\nWho?</s><|assistant|>"),
    ]  # fmt: skip
    # the template writes <s> itself; giving ids keeps the tokenizer from adding another
    segments = [
        {"type": segment["type"], "input_ids": tokenizer.encode(segment["text"], add_special_tokens=False)}
        for segment in rendered
    ]
    expected = generate(segments=segments)
    assert answer["response_token_ids"] == expected["output_ids"]
    assert [report["tokens"] for report in answer["meta_info"]["chunks"]] == [
        report["tokens"] for report in expected["meta_info"]["chunks"]
    ]


def test_chat_stream_choices_logprobs_and_usage(chat):
    messages = [user("See ", chunk(RIVER), "\nWho?")]
    fields = dict(n=2, logprobs=True, top_logprobs=2, return_cached_tokens_details=True)
    warm_up = chat(messages, **fields)
    assert warm_up.status_code == 200, warm_up.text
    whole = chat(messages, **fields).json()
    stream = events(chat(messages, stream=True, stream_options={"include_usage": True}, **fields))
    contents = {0: "", 1: ""}
    for event in stream:
        for choice in event["choices"]:
            contents[choice["index"]] += choice["delta"].get("content") or ""
    assert [choice["message"]["content"] for choice in whole["choices"]] == [contents[0], contents[1]]
    assert all(len(choice["logprobs"]["content"]) == 6 for choice in whole["choices"])
    details = whole["usage"]["prompt_tokens_details"]
    assert 0 < details["chunk_tokens"] < details["cached_tokens"] < whole["usage"]["prompt_tokens"]
    assert stream[-1]["usage"]["prompt_tokens_details"] == details
    assert whole["sglext"]["cached_tokens_details"]["chunk"] == details["chunk_tokens"]


def test_chat_without_chunks_reports_none(chat):
    messages = [user("Who built the bridge over the river, and when?")]
    chat(messages)
    details = chat(messages).json()["usage"]["prompt_tokens_details"]
    assert details.keys() == {"cached_tokens"} and details["cached_tokens"] > 0


def test_chat_second_turn_reuses_chunks_and_the_text_after_them(chat):
    first = [user("Two documents: ", chunk(RAILWAY), " and ", chunk(LIBRARY), "\nWhat came with the railway?")]
    answer = chat(first, cache_salt="turns").json()
    second = [*first, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}, user("And then?")]
    usage = chat(second, cache_salt="turns").json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["prompt_tokens"] - 1
    assert usage["prompt_tokens_details"]["chunk_tokens"] > 0


def test_chat_tools_and_continued_answers(chat, tokenizer):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    messages = [user("See ", chunk(RIVER)), {"role": "assistant", "content": "The river"}]
    assert chat(messages, tools=[tool]).status_code == 200
    continued = chat(messages, continue_final_message=True, return_prompt_token_ids=True).json()
    beginning = tokenizer.encode("The river", add_special_tokens=False)
    assert continued["choices"][0]["prompt_token_ids"][-len(beginning) :] == beginning


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "part, fields, reason",
    [
        (chunk(""), {}, "messages[0].content[1]: the text of a chunk segment is empty"),
        (chunk(3), {}, "messages[0].content[1]: the text of a chunk segment must be a string"),
        ({"type": "chunk"}, {}, "messages[0].content[1]: a chunk segment needs exactly one"),
        (chunk("x " * 3000), {}, "longer than the model's context length"),
        (chunk("x"), {"cache_salt": ""}, "cache_salt must be a non-empty string"),
        (chunk("x"), {"salt": "a"}, "unknown field 'salt': did you mean 'cache_salt'?"),
        (chunk("x"), {"link": "half"}, "link must be one of 'block', 'full', 'epic'"),
        (chunk("x"), {"link": "epic:tokens=0"}, "tokens must be at least 1 and at most 1048576, got 0"),
        (text("x"), {"segments": [chunk("x")]}, "in a chat, chunks are content parts"),
        (chunk("x"), {"input_ids": [1, 2]}, "chunk parts cannot be combined with input_ids"),
    ],
)
def test_bad_chats(chat, part, fields, reason, stream):
    response = chat([user("See ", part)], stream=stream, **fields)
    assert response.status_code == 400 and reason in response.json()["message"], response.text


def test_a_document_cannot_forge_boundaries(chat):
    marker = "0" * 32 + "_0_"
    answer = chat([user(chunk(f"{marker}{RIVER}"), marker)], return_meta_info=True).json()
    assert len(answer["choices"][0]["meta_info"]["chunks"]) == 1


def test_one_salt_is_one_namespace_on_every_api(chat, generate, post, tokenizer):
    """What one API computed under a salt is found by the others under it, and by nobody else."""
    document = chunk("The mill stands where the two brooks meet, and grinds no more.")
    tokens = len(tokenizer.encode(document["text"], add_special_tokens=False))

    def reused(surface, **salt):
        if surface == "generate":
            meta_info = generate(segments=[text("See "), document, text(" Who?")], **salt)["meta_info"]
            return (meta_info["cached_tokens_details"] or {}).get("chunk", 0)
        if surface == "completions":
            usage = complete(post, [text("See "), document, text(" Who?")], **salt).json()["usage"]
        else:
            usage = chat([user("See ", document, " Who?")], **salt).json()["usage"]
        return (usage["prompt_tokens_details"] or {}).get("chunk_tokens", 0)

    surfaces = ("generate", "completions", "chat")
    assert reused("chat", cache_salt="mill") == 0
    assert [reused(surface, cache_salt="mill") for surface in surfaces] == [tokens] * 3
    assert reused("generate", cache_salt="brook") == reused("generate") == 0


# The frontend language


@pytest.fixture(scope="module")
def endpoint(server):
    return sgl.RuntimeEndpoint(server)


@sgl.function
def answer_from(s, documents, question):
    s += "Read: "
    for document in documents:
        s += sgl.chunk(document) + " "
    s += question + sgl.gen("answer", max_tokens=6, temperature=0, ignore_eos=True)


def test_a_program_equals_the_request(endpoint, generate):
    segments = prompt(RIVER, RAILWAY, question="Who?")
    merged = [*segments[:-2], text(" Who?")]
    state = answer_from.run(documents=[RIVER, RAILWAY], question="Who?", backend=endpoint)
    assert state.error() is None and state["answer"] == generate(segments=merged)["text"]
    assert len(state.get_meta_info("answer")["chunks"]) == 2
    assert state.text() == f"Read: {RIVER} {RAILWAY} Who?" + state["answer"]


def test_program_batch_and_stream(endpoint):
    arguments = [{"documents": order, "question": "Who?"} for order in ([RIVER, RAILWAY], [RAILWAY, RIVER])]
    states = answer_from.run_batch(arguments, backend=endpoint, num_threads=2)
    for state, argument in zip(states, arguments, strict=True):
        streamed = answer_from.run(**argument, backend=endpoint, stream=True)
        assert "".join(streamed.text_iter()) == state.text()
        assert all(report["hit"] for report in streamed.get_meta_info("answer")["chunks"])


@sgl.function
def conversation(s, document):
    s += sgl.user("See " + sgl.chunk(document) + " Who?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=4, temperature=0, ignore_eos=True))
    s.sync()
    forks = s.fork(2)
    for fork, question in zip(forks, ("When?", "Where?"), strict=True):
        fork += sgl.user(sgl.chunk(document) + question)
        fork += sgl.assistant("It is " + sgl.select("choice", choices=["yes", "no", "maybe not"]))
    forks.join()


def test_program_with_roles_forks_and_choices(endpoint):
    state = conversation.run(document=LIBRARY, backend=endpoint)
    assert state.error() is None
    assert state.messages()[0]["content"] == f"See {LIBRARY} Who?"
    assert len(state["choice"]) == 2 and set(state["choice"]) <= {"yes", "no", "maybe not"}


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_choices_right_after_a_chunk_are_refused(endpoint):
    @sgl.function
    def program(s):
        s += "See " + sgl.chunk(RIVER)
        s += sgl.select("choice", choices=["yes", "no"])

    state = program.run(backend=endpoint)
    assert "prompt logprobs from position" in str(state.error())


ONE_BOOLEAN = {
    "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False
}  # fmt: skip


def test_structured_output_over_chunks(generate, chat):
    """A grammar holds for answers over chunks, cold and warm, on both APIs."""
    params = {"temperature": 0, "max_new_tokens": 24, "json_schema": json.dumps(ONE_BOOLEAN)}
    documents = [RIVER + " Seen from the bridge.", LIBRARY + " Seen from the square."]
    for _ in range(2):
        answer = generate(segments=prompt(*documents), sampling_params=params)
        assert isinstance(json.loads(answer["text"])["ok"], bool)
        documents.reverse()
    assert answer["meta_info"]["cached_tokens_details"]["chunk"] > 0
    response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ONE_BOOLEAN}}
    messages = [user("Read: ", chunk(RIVER), " True?")]
    reply = chat(messages, response_format=response_format, max_tokens=24, ignore_eos=False)
    assert isinstance(json.loads(reply.json()["choices"][0]["message"]["content"])["ok"], bool)


def test_a_regex_and_required_tools_over_chunks(generate, chat, server):
    """A server on a CPU must survive them, too."""
    params = {"temperature": 0, "max_new_tokens": 8, "regex": "(19|20)[0-9]{2}"}
    assert re.fullmatch(params["regex"], generate(segments=prompt(RIVER), sampling_params=params)["text"])
    tool = {"type": "function", "function": {"name": "look", "parameters": ONE_BOOLEAN}}
    messages = [user("Read: ", chunk(RIVER), " True?")]
    reply = chat(messages, tools=[tool], tool_choice="required", max_tokens=64, ignore_eos=False)
    content = reply.json()["choices"][0]["message"]["content"]  # SGLang's schema lets it go on with other keys
    assert re.match(r'\[\{"name": ?"look", ?"parameters": ?\{"ok": ?(true|false)\}', content), content
    assert requests.get(server + "/health", timeout=60).status_code == 200


def test_weight_updates_and_flushes_forget_chunks(generate, post, server, tiny_model):
    """KV computed with other weights is never reused, and no lock stays behind to block either call."""
    segments = prompt(RAILWAY + " It is gone.", LIBRARY)
    # An answer is sent while a batch launched before it still runs: both calls wait for its end.
    for path, body in (("/flush_cache?timeout=60", {}), ("/update_weights_from_disk", {"model_path": tiny_model})):
        generate(segments=segments)
        warm = generate(segments=segments)
        assert all(one["hit"] for one in warm["meta_info"]["chunks"])
        response = post(path, **body)
        assert response.status_code == 200, response.text
        cold = generate(segments=segments)
        assert cold["meta_info"]["cached_tokens"] == 0
        assert cold["output_ids"] == warm["output_ids"]


LONG = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}


@pytest.mark.parametrize(
    ("mode", "path", "status"),
    [
        ("retract", "/update_weights_from_disk", 200),
        ("retract", "/release_memory_occupation", 200),
        ("retract", "/flush_cache?timeout=60", 200),
        ("in_place", "/update_weights_from_disk", 400),
        ("in_place", "/release_memory_occupation", 400),
        ("in_place", "/flush_cache", 400),
    ],
)
def test_a_paused_server_is_emptied_or_says_why_not(generate, post, server, tiny_model, mode, path, status):
    """In the middle of an answer, which goes on as if nothing had happened; another request waits."""
    segments = prompt(RAILWAY + f" {mode} {path}", LIBRARY)
    expected = generate(segments=segments, sampling_params=LONG)["output_ids"]
    body = {"segments": segments, "sampling_params": LONG}
    with ThreadPoolExecutor() as clients:
        with requests.post(f"{server}/generate", json={**body, "stream": True}, stream=True, timeout=120) as stream:
            lines = (line.removeprefix(b"data: ") for line in stream.iter_lines() if line)
            next(lines)
            assert post("/pause_generation", mode=mode).ok
            waiting = clients.submit(post, "/generate", **body)
            answer = post(path, **({"model_path": tiny_model} if "update" in path else {}))
            if path == "/release_memory_occupation" and answer.ok:
                assert post("/resume_memory_occupation").ok
            assert post("/continue_generation").ok
            *_, last, done = lines
        assert answer.status_code == status, answer.text
        assert done == b"[DONE]" and json.loads(last)["output_ids"] == expected
        assert waiting.result().json()["output_ids"] == expected


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/resume_memory_occupation", {}, "was not released"),
        ("/release_memory_occupation", {"tags": ["all"]}, "unknown tags"),
        ("/start_expert_distribution_record", {}, "expert_distribution_recorder_mode"),
    ],
)
def test_an_operators_mistake_is_answered(generate, post, path, body, reason):
    """And the server goes on."""
    answer = post(path, **body)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text
    generate(segments=prompt(RIVER))


# Python


def test_engine_forms(engine, generate):
    segments = ["Read: ", sgl.chunk(RIVER), {"type": "text", "text": " Who?"}]
    expected = generate(segments=[text("Read: "), chunk(RIVER), text(" Who?")])["output_ids"]
    assert engine.generate(segments=segments, sampling_params=GREEDY)["output_ids"] == expected
    batch = engine.generate(segments=[segments, ["Who?"]], sampling_params=GREEDY)
    assert batch[0]["output_ids"] == expected and "chunks" not in batch[1]["meta_info"]
    assert batch[1]["output_ids"] == engine.generate("Who?", GREEDY)["output_ids"]
    stream = engine.generate(segments=segments, sampling_params=GREEDY, stream=True)
    assert stream[-1]["output_ids"] == expected and stream[-1]["meta_info"]["chunks"][0]["hit"]

    arguments = dict(segments=segments, sampling_params=GREEDY)
    streamed, whole = engine.call_together("async_generate", [{**arguments, "stream": True}, arguments])
    assert streamed[-1]["output_ids"] == whole["output_ids"] == expected
    assert asyncio.iscoroutinefunction(sgl.Engine.async_generate)


def test_engine_refuses_bad_segments(engine):
    for arguments, reason in (
        ({"segments": [""]}, r"segments\[0\]"),
        ({"segments": [sgl.chunk("x")] * 5}, "more than the 4 chunks that are allowed"),
        ({"segments": ["x"], "prompt": "x"}, "both segments and a prompt"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt must be a non-empty string"),
        ({"segments": ["x", sgl.chunk("y")], "sampling_params": {"beam_width": 2}}, "beam search"),
        ({"prompt": "x", "link": "full"}, "link needs a prompt given as segments"),
        ({"segments": ["x"], "link": "half"}, "link must be one of 'block', 'full', 'epic'"),
        ({"segments": ["x"], "link": "query:ratio=0"}, "ratio must be above 0 and at most 1"),
        ({"segments": ["x"], "sampling_params": {"temperature": "0"}}, "temperature: Expected `float`"),
    ):
        with pytest.raises(ValueError, match=reason):
            engine.generate(**{"sampling_params": GREEDY, **arguments})


def test_engine_link(engine, generate):
    segments = ["Read: ", sgl.chunk(RIVER), sgl.chunk(LIBRARY), " Who?"]
    prompt = [text("Read: "), chunk(RIVER), chunk(LIBRARY), text(" Who?")]
    expected = {link: generate(segments=prompt, link=link)["output_ids"] for link in ("block", "full")}
    assert expected["block"] != expected["full"]
    for link, answered in ((None, "block"), ("block", "block"), ("full", "full")):
        once = engine.generate(segments=segments, sampling_params=GREEDY, link=link)
        again = engine.call("async_generate", segments=[segments], sampling_params=GREEDY, link=[link])
        for answer in (once, *again):
            assert (answer["output_ids"], answer["meta_info"]["link"]) == (expected[answered], answered)
