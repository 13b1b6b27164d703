"""Requests that SGLang alone answers with a 500, or that end its scheduler or HTTP process, get a 400 and a reason."""

import json

import pytest
import requests
from http_prompts import GREEDY, RAILWAY, RIVER, chunk, generate, text

ONE = {"sampling_params": {"max_new_tokens": 1}}
TWO = {"text": ["Who?", "Where?"], **ONE}
USER = {"role": "user", "content": "Who?"}
CHAT = {"model": "default", "messages": [USER], "max_tokens": 1}
COMPLETION = {"model": "default", "prompt": "Who?", "max_tokens": 1}
OLLAMA = {"model": "m", "prompt": "Who?"}
RESPONSE = {"model": "default", "input": "Who?", "max_output_tokens": 4}


def sampling(**params):
    return {"text": "Who?", "sampling_params": {"max_new_tokens": 1, **params}}


CASES = {
    # Wrong types of bodies
    "a chat that is no object": ("/v1/chat/completions", [CHAT], "the body must be an object"),
    "no messages to count": ("/v1/messages/count_tokens", {"model": "default", "messages": []}, "empty conversation"),
    "tools of no type, to count": (
        "/v1/messages/count_tokens",
        {"model": "default", "messages": [USER], "tools": [{"name": "a", "type": ["b"]}]},
        "AttributeError",
    ),
    "tools of no type": (
        "/v1/messages",
        {"model": "default", "messages": [USER], "max_tokens": 1, "tools": [{"name": "a", "type": ["b"]}]},
        "AttributeError",
    ),
    "no input": ("/v1/responses", {**RESPONSE, "input": []}, "empty conversation"),
    "metadata that no event can have": (
        "/v1/responses",
        {**RESPONSE, "stream": True, "metadata": {"a": None}},
        "metadata",
    ),
    # Lists
    "no parameters": ("/generate", {"text": "Who?", "sampling_params": []}, "sampling_params is an empty list"),
    "parameters for a batch": (
        "/generate",
        {"text": "Who?", "sampling_params": [{"max_new_tokens": 1}]},
        "sampling_params is a list, which is for batches of prompts",
    ),
    "parameters for another batch": (
        "/generate",
        {**TWO, "sampling_params": [{"max_new_tokens": 1}]},
        "sampling_params has 1 values for a batch of 2 prompts",
    ),
    "lengths for another batch": ("/generate", {**TWO, "top_logprobs_num": []}, "top_logprobs_num has 0 values"),
    "videos for another batch": ("/generate", {**TWO, "video_data": []}, "the request is malformed: IndexError"),
    "a list of adapters": ("/generate", {"text": "Who?", "lora_id": [], **ONE}, "lora_id is set by the server"),
    "a list of names": ("/v1/chat/completions", {**CHAT, "rid": ["r"]}, "rid is a list"),
    "a list of salts": ("/v1/chat/completions", {**CHAT, "cache_salt": ["a"]}, "cache_salt should be a string"),
    "a list of keys": ("/v1/completions", {**COMPLETION, "extra_key": ["a"]}, "extra_key should be a string"),
    # Numbers
    "a token beyond the vocabulary": ("/generate", {"input_ids": [20, 512], **ONE}, "not in the vocabulary"),
    "a negative token": ("/generate", {"input_ids": [[20], [20, -1]], **ONE}, "not in the vocabulary"),
    "a huge token": ("/v1/completions", {**COMPLETION, "prompt": [2**31]}, "not in the vocabulary"),
    "a token to print": ("/v1/detokenize", {"model": "default", "tokens": [20, 2**63]}, f"{2**63} is not a token id"),
    "tokens to print": ("/v1/detokenize", {"model": "default", "tokens": [[20], [-1]]}, "-1 is not a token id"),
    "more logprobs than tokens": (
        "/v1/chat/completions",
        {**CHAT, "logprobs": True, "top_logprobs": 513},
        "top_logprobs_num must be from 0 to 512, got 513",
    ),
    "all samples there are": ("/v1/completions", {**COMPLETION, "n": 2**31 - 1}, "prompts, got 2147483647"),
    "samples of many prompts": ("/generate", {**TWO, "sampling_params": {"n": 10_000}}, "prompts, got 20000"),
    "no samples": ("/v1/completions", {**COMPLETION, "echo": True, "n": 0}, "n must be at least 1, got 0"),
    "null samples": ("/generate", sampling(n=None), "the request is malformed: TypeError"),
    "a top_k of 33 bits": ("/generate", sampling(top_k=2**31), "top_k must be an integer of 32 bits"),
    "a penalty of nearly 0": ("/generate", sampling(repetition_penalty=1e-237), "repetition_penalty must be at least"),
    "logprobs from before the prompt": (
        "/generate",
        {"text": "Who?", "return_logprob": True, "logprob_start_len": -2, **ONE},
        "logprob_start_len must be a position, or -1 for none, got -2",
    ),
    "a stop token beyond the vocabulary, not to come yet": (
        "/generate",
        sampling(min_new_tokens=1, stop_token_ids=[512]),
        "with min_new_tokens, stop_token_ids must be in the vocabulary, which has 512",
    ),
    "an infinite bias": ("/generate", sampling(logit_bias={"20": 1e308}), "logit_bias must have values from"),
    # Expressions
    "half a stop_regex": ("/generate", sampling(stop_regex="("), "the request is malformed: error: missing )"),
    # Routes without chunks
    "no parameter of Vertex AI's": (
        "/vertex_generate",
        {"instances": [{"text": "Who?"}], "parameters": {"Read": 1}},
        "the request is malformed: TypeError",
    ),
    "no messages for Ollama": ("/api/chat", {"model": "m", "messages": []}, "empty conversation"),
    "more than fits for Ollama": ("/api/generate", {**OLLAMA, "options": {"num_predict": 9000}}, "context length"),
    "a mistyped option of Ollama's": ("/api/generate", {**OLLAMA, "options": {"top_k": "x"}}, "top_k: Expected `int`"),
    "no such parser of tools": ("/parse_function_call", {"text": "x", "tool_call_parser": "x"}, "Unsupported"),
    "no such parser of reasoning": ("/separate_reasoning", {"text": "x", "reasoning_parser": "x"}, "Unsupported"),
    "names for another batch": ("/v1/classify", {"model": "m", "input": ["Who?"], "rid": []}, "rid has 0 values"),
    # Fields that are not the route's
    "a misspelt field": ("/generate", {"text": "Who?", "lnik": "full", **ONE}, "did you mean 'link'"),
    "a misspelt field of a chat": (
        "/v1/chat/completions",
        {**CHAT, "chunk_seperator": "##"},
        "did you mean 'chunk_separator'",
    ),
    "a client's argument": (
        "/v1/chat/completions",
        {**CHAT, "extra_body": {"link": "full"}},
        "extra_body is an argument of OpenAI's client",
    ),
    "a former name": ("/v1/messages", {**CHAT, "salt": "a"}, "did you mean 'cache_salt'"),
    "segments in a chat": ("/v1/responses", {**RESPONSE, "segments": [text("Who?")]}, "segments are for /generate"),
    "segments for Ollama": ("/api/generate", {**OLLAMA, "segments": [text("Who?")]}, "segments are for /generate"),
    "segments to score": (
        "/v1/score",
        {"model": "m", "query": "Who?", "items": ["a"], "label_token_ids": [5], "segments": []},
        "segments are for /generate",
    ),
    "a policy for counting": (
        "/v1/messages/count_tokens",
        {"model": "m", "messages": [USER], "link": "full"},
        "link is not a field of this route",
    ),
    "a separator of tokens": (
        "/generate",
        {"input_ids": [20], "chunk_separator": "##", **ONE},
        "chunk_separator divides text",
    ),
    "a separator of a completion's tokens": (
        "/v1/completions",
        {**COMPLETION, "prompt": [[20], [21]], "chunk_separator": "##"},
        "chunk_separator divides text",
    ),
    # Combinations
    "embeddings from JSON": (
        "/generate",
        {"text": "Who?", "positional_embed_overrides": False, **ONE},
        "positional_embed_overrides is set by the server",
    ),
    "echo without logprobs": (
        "/v1/completions",
        {**COMPLETION, "echo": True, "logprobs": 0},
        "logprobs must be at least 1",
    ),
}


OPENAI_LIKE = {
    "/v1/embeddings": {"model": "m", "input": "Who?"},
    "/v1/classify": {"model": "m", "input": "Who?"},
    "/v1/rerank": {"query": "Who?", "documents": ["a"]},
    "/v1/score": {"model": "m", "query": "Who?", "items": ["a"]},
    "/tokenize": {"model": "m", "prompt": "Who?"},
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
}


@pytest.mark.parametrize("path", OPENAI_LIKE)
def test_openais_routes_refuse_in_one_form(server, path):
    """Clients of OpenAI's API read `message`, wherever a fault was found; as SGLang has it in its own refusals."""
    body = {"lnik": "full", **OPENAI_LIKE[path]}
    answer = requests.post(server + path, json=body, timeout=60)
    refused = answer.json()
    message = refused.pop("message")
    assert answer.status_code == 400 and "unknown field 'lnik'" in message, message
    assert refused == {"object": "error", "type": "BadRequestError", "param": None, "code": 400}


PART = {"role": "user", "content": [{"type": "chonk", "text": "x"}]}
TOLD = {
    "chat, a part of no type": ("/v1/chat/completions", {**CHAT, "messages": [PART]}, "messages[0].content[0].type: "),
    "chat, no content": ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user"}]}, "messages[0].content: "),
    "chat, a number": ("/v1/chat/completions", {**CHAT, "messages": [{**USER, "content": 3}]}, "messages[0].content: "),
    "responses, a part of no type": ("/v1/responses", {**RESPONSE, "input": [PART]}, "messages[0].content[0].type: "),
    "responses, a number": ("/v1/responses", {**RESPONSE, "input": 3}, "input: Input should be a valid string or"),
    "messages, a number": ("/v1/messages", {**CHAT, "max_tokens": "x"}, "max_tokens: Input should be a valid integer"),
    "messages, a part of no type": ("/v1/messages", {**CHAT, "messages": [PART]}, "messages[0].content[0]: Input tag"),
    "completions, a text": ("/v1/completions", {**COMPLETION, "max_tokens": "x"}, "max_tokens: Input should be a"),
    "completions, segments": ("/v1/completions", {**COMPLETION, "prompt": [chunk("x")]}, "given as `segments`"),
    "generate, a list": ("/generate", [3], "Input should be an object"),
    "generate, segments": ("/generate", {"text": ["x", chunk("x")]}, "text[1]: a prompt with chunks is given as"),
    "tokenize, a number": (
        "/tokenize",
        {"model": "m", "prompt": 3},
        "prompt: Input should be a valid list or a valid string",
    ),
    "no JSON": ("/generate", None, "the body is not JSON: unexpected end of data"),
}


@pytest.mark.parametrize("case", TOLD)
def test_the_error_that_matters_is_told(server, case):
    """In a line, without the other alternatives of a union, the server's paths, or the whole body."""
    path, body, reason = TOLD[case]
    how = {"json": body} if body is not None else {"data": "{", "headers": {"Content-Type": "application/json"}}
    response = requests.post(server + path, timeout=60, **how)
    told = response.json()
    message = told.get("error", told)["message"]
    assert response.status_code == 400 and reason in message, message
    assert len(message) < 250 and not any(part in message for part in ("\n", ".py", "pydantic", "loc", "None")), message


@pytest.mark.parametrize("case", CASES)
def test_refused_with_a_reason(server, case):
    path, body, reason = CASES[case]
    response = requests.post(server + path, json=body, timeout=60)
    assert response.status_code == 400 and reason in response.text, response.text
    assert generate(server, segments=[text("Read: "), chunk(RIVER)], sampling_params=GREEDY)


def test_loads_that_are_not_there(server):
    response = requests.get(f"{server}/v1/loads?include=x", timeout=60)
    assert response.status_code == 400 and "Invalid include sections" in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_s_chat_is_answered(server, stream):
    """SGLang's own fails on what Transformers 5 renders a chat template to."""
    body = {"model": "m", "messages": [USER], "stream": stream, "options": {"temperature": 0, "num_predict": 4}}
    answer = requests.post(f"{server}/api/chat", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    parts = [json.loads(line) for line in answer.text.splitlines()]
    assert parts[-1]["done"] and (len(parts) > 1) == stream
    if not stream:
        body = {**CHAT, "max_tokens": 4, "temperature": 0}
        chat = requests.post(f"{server}/v1/chat/completions", json=body, timeout=60)
        assert parts[0]["message"]["content"] == chat.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_unusual_but_valid_requests_are_answered(server, path):
    """Per-prompt lists of the right length, more values than prompts where SGLang allows it, the last token id, all
    logprobs, samples."""
    if path == "/v1/completions":
        body = {**COMPLETION, "prompt": [[511], [0]], "n": 2, "logprobs": 512, "echo": False}
        answer = requests.post(server + path, json=body, timeout=60)
        assert len(answer.json()["choices"]) == 4
        return
    params = [{"max_new_tokens": 1, "top_k": 2**31 - 1, "logit_bias": {"20": 100}}] * 3
    body = {"text": [RIVER, RAILWAY], "sampling_params": params, "rid": ["a", "b"], "return_logprob": [True, False]}
    answer = requests.post(server + path, json=body, timeout=60).json()
    assert ["output_token_logprobs" in one["meta_info"] for one in answer] == [True, False]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**COMPLETION, "logprobs": 1}),
        ("/v1/completions", {**COMPLETION, "logprobs": 1, "echo": True}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}),
    ],
    ids=["completion", "echo", "chat"],
)
def test_a_stream_with_logprobs_whose_grammar_is_refused(server, path, body):
    """The stream ends with an event that says so."""
    answer = requests.post(server + path, json={**body, "stream": True, "regex": "("}, timeout=60)
    (event,) = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert event["error"]["code"] == 400 and "grammar" in event["error"]["message"].lower(), answer.text


NUMBERS = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
MISTYPED = {**NUMBERS, "max_new_tokens": 4.0, "skip_special_tokens": 0, "ignore_eos": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ["Who?", "Where?"], "sampling_params": [NUMBERS, NUMBERS]}),
        (
            "/vertex_generate",
            {"instances": [{"text": "Who?"}], "parameters": {"sampling_params": MISTYPED, "stream": 0}},
        ),
        ("/v1/completions", {**COMPLETION, "max_tokens": 4.0, "skip_special_tokens": 0, "ignore_eos": 1}),
    ],
)
def test_numbers_of_another_type_are_converted(server, path, body):
    answer = requests.post(server + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    answer = answer.json()
    answer = answer.get("predictions", [answer]) if isinstance(answer, dict) else answer
    for one in answer:
        counts = [
            one.get("eval_count"),
            *(one.get(place, {}).get("completion_tokens") for place in ("usage", "meta_info")),
        ]
        assert 4 in counts


def test_streams_that_were_refused_abort_nobody_and_keep_their_connection(server):
    """Two seconds after a stream, SGLang aborts its id. Here it is that of a longer request, before and after it."""
    long = {"rid": "mine", "stream": True, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
    with requests.Session() as other, requests.Session() as session:
        answered = session.post(f"{server}/generate", json={"text": "Who?", "stream": True, **ONE, "rid": "mine"})
        assert answered.ok and "error" not in answered.text
        answer = other.post(f"{server}/generate", json={"text": "Who?", **long}, stream=True, timeout=60)
        events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: {"))
        assert next(events)["meta_info"]["finish_reason"] is None
        for fields in ({"sampling_params": {"n": "x"}}, {"rid": {}}, {"rid": "mine"}):
            body = {"text": "Who?", "stream": True, **ONE, **fields}
            refused = session.post(f"{server}/generate", json=body, timeout=60)
            assert "error" in refused.text, fields
        *_, last = events
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 2000}
        assert session.post(f"{server}/generate", json={"text": "Who?", **ONE}, timeout=60).ok
