"""The Responses and Messages APIs, text that becomes chunks, and the salt header, on a real server."""

import json

import pytest
import requests
from http_prompts import LIBRARY, RAILWAY, RIVER, chunk, text
from transformers import AutoTokenizer

MODEL = {"model": "default", "temperature": 0}


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def tokens(tokenizer):
    return lambda document: len(tokenizer.encode(document, add_special_tokens=False))


@pytest.fixture(scope="module")
def post(server):
    def post(path, body, **headers):
        return requests.post(server + path, json={**MODEL, **body}, headers=headers, timeout=120)

    return post


def chat_body(*parts, **fields):
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 6, **fields}


def responses_body(*parts, **fields):
    return {"input": [{"role": "user", "content": list(parts)}], "max_output_tokens": 8, **fields}


def messages_body(*parts, **fields):
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 6, **fields}


BODIES = {
    "/v1/chat/completions": chat_body,
    "/v1/responses": responses_body,
    "/v1/messages": messages_body,
}


def answer_of(path, body):
    """Text, prompt tokens and cached tokens of an answer."""
    if path == "/v1/chat/completions":
        cached = (body["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"], cached
    if path == "/v1/messages":
        usage = body["usage"]
        cached = usage.get("cache_read_input_tokens", 0)
        return body["content"][0]["text"], usage["input_tokens"] + cached, cached
    usage = body["usage"]
    if "input_tokens" in usage:  # SGLang's name for it in a stream
        counts = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    else:
        counts = usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return body["output"][0]["content"][0]["text"], *counts


@pytest.fixture(scope="module")
def ask(post):
    def ask(path, *parts, headers=None, **fields):
        response = post(path, BODIES[path](*parts, **fields), **(headers or {}))
        assert response.status_code == 200, response.text
        return answer_of(path, response.json())

    return ask


def events(response):
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def streamed(path, response):
    """The same as `answer_of`, from a stream's events."""
    found = events(response)
    if path == "/v1/responses":
        return answer_of(path, found[-1]["response"])
    start = next(event["message"] for event in found if event["type"] == "message_start")
    deltas = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    return answer_of(path, {"content": [{"text": "".join(deltas)}], "usage": start["usage"]})


SEE = [text("See "), chunk(RIVER), text(" and "), chunk(LIBRARY), text("\nWho?")]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_every_api_answers_alike(ask, post, path, tokens):
    """Every API renders the same messages, so each policy gives the same answers over the same tokens."""
    whole = {link: ask("/v1/chat/completions", *SEE, link=link) for link in ("block", "full")}
    assert whole["block"][0] != whole["full"][0]
    for link, expected in whole.items():
        fields = {"link": link, "cache_salt": f"{path}{link}"}
        cold = ask(path, *SEE, **fields)
        assert cold == (*expected[:2], 0)
        answer, prompt_tokens, cached = ask(path, *SEE, **fields)
        assert (answer, prompt_tokens) == expected[:2] and cached == prompt_tokens - 1
        stream = post(path, BODIES[path](*SEE, stream=True, **fields))
        assert streamed(path, stream) == (answer, prompt_tokens, cached)


@pytest.mark.parametrize("path", BODIES)
def test_one_salt_is_one_namespace(ask, tokens, path):
    document = "The mill grinds no more, and its wheel hangs in the hall of the town."
    salt = f"mill of {path}"
    ask(path, text("See "), chunk(document), text(" Who?"), cache_salt=salt)
    for other in BODIES:
        _, _, cached = ask(other, chunk(document), text(" Why?"), cache_salt=salt)
        assert cached >= tokens(document)
        assert ask(other, chunk(document), text(" Why?"), cache_salt=f"{salt} {other}")[2] < tokens(document)


# Documents of the Messages API


SEARCH_RESULT = {
    "type": "search_result",
    "source": "https://example.org/river",
    "title": "River",
    "content": [{"type": "text", "text": RIVER}, {"type": "text", "text": "It is old."}],
    "citations": {"enabled": True},
}
SEARCH_TEXT = f"Title: River\nSource: https://example.org/river\nContent: {RIVER}\nIt is old."
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": LIBRARY}}


def test_blocks_of_documents_are_chunks(ask, post, tokens):
    expected = ask(
        "/v1/chat/completions", text("Read "), chunk(SEARCH_TEXT), chunk(f"Content: {LIBRARY}"), text("Who?")
    )
    got = ask("/v1/messages", text("Read "), SEARCH_RESULT, DOCUMENT, text("Who?"))
    assert got[:2] == expected[:2]
    swapped = ask("/v1/messages", DOCUMENT, SEARCH_RESULT, text("Who?"))
    assert swapped[2] >= tokens(SEARCH_TEXT) + tokens(f"Content: {LIBRARY}")


def test_blocks_in_results_of_tools_and_in_the_system_prompt(post, tokens):
    tool_use = {"type": "tool_use", "id": "t1", "name": "search", "input": {"query": "river"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [SEARCH_RESULT, DOCUMENT]}
    body = {
        "system": [text("Be brief."), chunk(RAILWAY)],
        "messages": [
            {"role": "user", "content": "Who?"},
            {"role": "assistant", "content": [tool_use]},
            {"role": "user", "content": [result, text("Well?")]},
        ],
        "max_tokens": 4,
        "cache_salt": "tools",
    }
    assert post("/v1/messages", body).status_code == 200
    result["content"].reverse()
    body["system"].reverse()
    usage = post("/v1/messages", body).json()["usage"]
    reused = sum(map(tokens, (RAILWAY, SEARCH_TEXT, f"Content: {LIBRARY}")))
    assert usage["cache_read_input_tokens"] >= reused


# The next turn of a response


def test_a_following_response_keeps_the_chunks(ask, post, tokens):
    first = post("/v1/responses", responses_body(*SEE, cache_salt="turns")).json()
    body = responses_body(text("And "), chunk(RAILWAY), cache_salt="turns", previous_response_id=first["id"])
    second = post("/v1/responses", body)
    assert second.status_code == 200, second.text
    _, prompt_tokens, cached = answer_of("/v1/responses", second.json())
    assert cached >= answer_of("/v1/responses", first)[1] - 1
    assert prompt_tokens > sum(map(tokens, (RIVER, LIBRARY, RAILWAY)))
    body = responses_body(text("So?"), cache_salt="turns", previous_response_id=second.json()["id"])
    third = answer_of("/v1/responses", post("/v1/responses", body).json())
    assert third[2] >= prompt_tokens - 1


def test_a_stored_response_is_its_tenants(post, server):
    """Whoever else knows its id can neither read, continue, cancel nor replace it."""
    name = post("/v1/responses", responses_body(*SEE, cache_salt="owner")).json()["id"]
    url = f"{server}/v1/responses/{name}"
    assert requests.get(url, params={"cache_salt": "owner"}, timeout=60).json()["id"] == name
    assert requests.get(url, headers={"X-Cache-Salt": "owner"}, timeout=60).ok
    for other in ({"cache_salt": "other"}, {}):
        assert requests.get(url, params=other, timeout=60).status_code == 404
        assert requests.post(f"{url}/cancel", params=other, timeout=60).status_code == 404
        body = responses_body(text("So?"), previous_response_id=name, **other)
        assert post("/v1/responses", body).status_code == 404
    refused = post("/v1/responses", responses_body(*SEE, request_id=name))
    assert refused.status_code == 400 and "the server's" in refused.text
    name = post("/v1/responses", responses_body(*SEE)).json()["id"]
    assert requests.get(f"{server}/v1/responses/{name}", timeout=60).ok


def test_developer_messages_and_outputs_of_functions(post, tokens):
    body = {
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}, chunk(LIBRARY)]},
            {"role": "user", "content": "Who?"},
            {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": RIVER},
        ],
        "instructions": "Answer.",
        "chunk_roles": ["tool"],
        "max_output_tokens": 6,
        "cache_salt": "functions",
    }
    assert post("/v1/responses", body).status_code == 200
    body["instructions"] = "Answer in one word."
    _, _, cached = answer_of("/v1/responses", post("/v1/responses", body).json())
    assert cached >= tokens(LIBRARY) + tokens(RIVER)


# Text that becomes chunks


@pytest.mark.parametrize("path", BODIES)
def test_a_separator_makes_chunks(ask, post, path):
    joined = f"See <|>{RIVER}<|><|>{LIBRARY}<|>\nWho?"
    expected = ask("/v1/chat/completions", text("See "), chunk(RIVER), chunk(LIBRARY), text("\nWho?"))
    for content in ([text(joined)], joined):
        body = BODIES[path](chunk_separator="<|>")
        body["input" if "input" in body else "messages"][0]["content"] = content
        assert answer_of(path, post(path, body).json())[:2] == expected[:2]


@pytest.mark.parametrize("path, prompt", [("/generate", "text"), ("/v1/completions", "prompt")])
def test_a_separator_in_a_plain_prompt(post, path, prompt):
    params = {"max_tokens": 6} if prompt == "prompt" else {"sampling_params": {"temperature": 0, "max_new_tokens": 6}}
    joined = f"See <|>{RIVER}<|> and <|>{LIBRARY}<|>\nWho?"

    def ask(**fields):
        response = post(path, {**params, **fields})
        assert response.status_code == 200, response.text
        answer = response.json()
        return answer["text"] if prompt == "text" else answer["choices"][0]["text"]

    segments = [text("See "), chunk(RIVER), text(" and "), chunk(LIBRARY), text("\nWho?")]
    assert ask(**{prompt: joined}, chunk_separator="<|>") == ask(segments=segments)
    assert ask(**{prompt: joined}) != ask(segments=segments), "without a separator it is text"


def test_roles_make_chunks(post, tokens):
    def cached(order, **fields):
        messages = [{"role": "tool", "tool_call_id": str(index), "content": found} for index, found in enumerate(order)]
        messages.append({"role": "user", "content": "Who?"})
        body = {"messages": messages, "max_tokens": 4, "cache_salt": "roles", **fields}
        response = post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        return (response.json()["usage"]["prompt_tokens_details"] or {}).get("chunk_tokens", 0)

    cached([RIVER, LIBRARY], chunk_roles=["tool"])
    assert cached([LIBRARY, RIVER], chunk_roles=["tool"]) == tokens(RIVER) + tokens(LIBRARY)
    assert cached([LIBRARY, RIVER]) == 0


# The salt header


@pytest.mark.parametrize("path", BODIES)
def test_the_header_sets_the_salt(ask, tokens, path):
    document = "The brewery burned down twice and was built again with a taller chimney."
    salt = f"brewery of {path}".replace("/", "-")
    parts, header = (chunk(document), text(" Who?")), {"X-Cache-Salt": salt}
    ask(path, *parts, headers=header)
    assert ask(path, *parts, cache_salt=salt)[2] >= tokens(document)
    assert ask(path, *parts, headers=header, cache_salt=salt)[2] >= tokens(document)
    assert ask(path, *parts, headers={"X-Cache-Salt": f"{salt}2"})[2] < tokens(document)


def test_the_header_also_separates_plain_prompts(post):
    prompt = "Who built the brewery, who burned it down, and who paid for the chimney?"

    def cached(**headers):
        body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
        return post("/generate", body, **headers).json()["meta_info"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert [cached(**{"X-Cache-Salt": "chimney"}) > 1 for _ in range(2)] == [False, True]


# Bad input


def reason_in(path, body):
    if path == "/v1/messages":
        assert body["type"] == "error"
    if path == "/v1/chat/completions":
        return body["message"]
    return body["error"]["message"]


BAD = {
    "empty": (chunk(""), {}, "content[1]: the text of a chunk segment is empty"),
    "key": ({**chunk("x"), "title": 1}, {}, "content[1]: unknown key 'title'"),
    "id": ({**chunk("x"), "id": 1}, {}, "content[1]: the id of a chunk"),
    "long": (chunk("x " * 3000), {}, "longer than the model's context length"),
    "salt": (chunk("x"), {"salt": "a"}, "unknown field 'salt': did you mean 'cache_salt'?"),
    "no salt": (chunk("x"), {"cache_salt": ""}, "cache_salt must be a non-empty string"),
    "link": (chunk("x"), {"link": "half"}, "link must be one of"),
    "no chunk": (text("x"), {"link": "block"}, "link needs a prompt with chunk parts"),
    "segments": (text("x"), {"segments": [chunk("x")]}, "in a chat, chunks are content parts"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("path", BODIES)
def test_bad_requests(post, path, case, stream):
    part, fields, reason = BAD[case]
    response = post(path, BODIES[path](text("See "), part, stream=stream, **fields))
    assert response.status_code == 400 and reason in reason_in(path, response.json()), response.text


@pytest.mark.parametrize(
    "block, reason",
    [
        (
            {"type": "document", "source": {"type": "base64", "data": ""}},
            "content[0]: the source of a document must be",
        ),
        ({"type": "document", "source": {"type": "text", "data": ""}}, "content[0]: the text of a document is empty"),
        ({"type": "search_result", "content": []}, "content[0]: the text of a document is empty"),
    ],
)
def test_bad_documents(post, block, reason):
    response = post("/v1/messages", messages_body(block))
    assert response.status_code == 400 and reason in reason_in("/v1/messages", response.json()), response.text


@pytest.mark.parametrize("path", BODIES)
def test_a_header_that_disagrees_is_refused(post, path):
    response = post(path, BODIES[path](chunk("x"), cache_salt="a"), **{"X-Cache-Salt": "b"})
    assert response.status_code == 400 and "X-Cache-Salt disagree" in reason_in(path, response.json())
