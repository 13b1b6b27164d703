"""A server with LoRA adapters, against the oracle: the model with an adapter's weights merged into it."""

import concurrent.futures
import itertools
import json
import sys

import pytest
import requests
import torch
import transformers
from stored import TOLERANCE, started

from oracle.adapters import merged, random_adapter
from oracle.policies import PolicyOracle, epic, keep_all_but, leading_text, without_best_of_each
from oracle.scenarios import Dice
from oracle.segments import text, token_ids
from research.policies import train_model
from research.quality.asking import Prompts, as_user_message
from research.quality.questions import read_questions
from research.quality.worlds import records

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("waiting")]

NUM_TOKENS = 5
ATTENTION = ("q_proj", "v_proj")  # as in most adapters; keys then differ from the second layer on
ADAPTERS = {
    "a": {"seed": 1, "rank": 4},
    "b": {"seed": 2, "rank": 8, "modules": ATTENTION},
    "c": {"seed": 3, "rank": 2},
    "other c": {"seed": 4, "rank": 8},
}
LOADED = ("a", "b")


@pytest.fixture(scope="module")
def paths(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {name: random_adapter(tiny_model, folder / name, **options) for name, options in ADAPTERS.items()}


@pytest.fixture(scope="module")
def oracles(tiny_model, paths, tmp_path_factory):
    """By adapter; None is the base model."""
    folder = tmp_path_factory.mktemp("merged")
    models = {name: str(merged(tiny_model, path, folder / name)) for name, path in paths.items()}
    return {name: PolicyOracle(model) for name, model in {None: tiny_model, **models}.items()}


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


def flags(adapters):
    """A limit on adapters, so that no batch has the base model and both of two adapters."""
    named = [f"{name}={path}" for name, path in adapters.items()]
    return ["--hicache-storage-backend", "file", "--max-loras-per-batch", "2", "--lora-paths", *named]


@pytest.fixture(scope="module")
def server(tiny_model, paths, storage, tmp_path_factory):
    loaded = flags({name: paths[name] for name in LOADED})
    with started(tiny_model, storage, tmp_path_factory.mktemp("log"), *loaded) as server:
        yield server


def ask(url, prompts, **fields):
    body = {
        "segments": [[segment.to_request() for segment in prompt] for prompt in prompts],
        "sampling_params": {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
        "return_logprob": True,
    }
    answer = requests.post(f"{url}/generate", json={**body, **fields}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check(oracle, prompt, output, kept=None, preamble=()):
    """The answer must be the oracle's; returns whether each chunk was a hit."""
    tokens, meta = output["output_ids"], output["meta_info"]
    expected = oracle.logprobs(prompt, tokens[:-1], keep_all_but(prompt, ()) if kept is None else kept, preamble)
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    reported = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
    assert (chosen - reported).abs().max() <= TOLERANCE and (expected.amax(-1) - chosen).max() <= TOLERANCE
    return [entry["hit"] for entry in meta["chunks"]]


def prompt_of(dice, num_chunks=2):
    return [dice.text(6), *dice.chunks(num_chunks, 12, 30), dice.text(5)]


def test_each_adapter_answers_over_its_own_chunks(server, oracles):
    """One document under the base model and adapters at once: nothing is shared between them, everything within
    each."""
    prompt = prompt_of(Dice("at once"))
    again = [prompt[2], prompt[1], prompt[3]]
    names = (None, *LOADED)
    for segments, hit in ((prompt, False), (prompt, True), (again, True)):
        outputs = ask(server.url, [segments] * 3, lora_path=names)
        assert len({tuple(output["output_ids"]) for output in outputs}) == 3
        for name, output in zip(names, outputs, strict=True):
            assert check(oracles[name], segments, output) == [hit] * 2


KEPT = {
    "epic:tokens=3": lambda oracle, prompt: epic(prompt, 3),
    "query:ratio=0.3": lambda oracle, prompt: oracle.query(prompt, 0.3, [2]),  # the last of three layers
    "blend:ratio=0.3": lambda oracle, prompt: oracle.blend(prompt, 0.3),
    "static:ratio=0.3": lambda oracle, prompt: without_best_of_each(prompt, -oracle.key_sizes(prompt), 0.3),
}


def test_policies_measure_and_choose_under_the_adapter(server, oracles):
    """Cold and warm, in batches of all policies."""
    prompt = prompt_of(Dice("policies"), num_chunks=3)
    cases = list(itertools.product(KEPT, (None, *LOADED)))
    for hit in (False, True):
        outputs = ask(
            server.url,
            [prompt] * len(cases),
            link=[link for link, _ in cases],
            lora_path=[name for _, name in cases],
        )
        for (link, name), output in zip(cases, outputs, strict=True):
            hits = check(oracles[name], prompt, output, KEPT[link](oracles[name], prompt))
            assert not hit or all(hits)


def test_chunks_behind_a_lead(server, oracles):
    prompt = prompt_of(Dice("lead"))
    for _ in range(2):
        outputs = ask(server.url, [prompt] * 2, link="base:preamble=lead", lora_path=list(LOADED))
        for name, output in zip(LOADED, outputs, strict=True):
            check(oracles[name], prompt, output, preamble=leading_text(prompt))


def test_openai_and_anthropic_apis_name_an_adapter_after_the_model(server):
    """As in SGLang, and over the chunks that /generate computed under the adapter."""
    parts = [{"type": "text", "text": "Read: "}, {"type": "chunk", "text": "The mill burnt down in 1871."}]
    question = {"type": "text", "text": " When?"}
    body = {"model": "default:a", "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}

    def post(path, **fields):
        answer = requests.post(server.url + path, json={**body, **fields}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    plain = {"segments": [*parts, question], "sampling_params": params, "lora_path": "a"}
    expected = requests.post(f"{server.url}/generate", json=plain, timeout=60).json()["text"]
    (choice,) = post("/v1/completions", segments=[*parts, question])["choices"]
    assert choice["text"] == expected
    message = {"messages": [{"role": "user", "content": [*parts, question]}]}
    (choice,) = post("/v1/chat/completions", **message, return_meta_info=True)["choices"]
    assert choice["meta_info"]["chunks"][0]["hit"]
    base = post("/v1/chat/completions", **message, model="default")["choices"][0]["message"]["content"]
    (block,) = post("/v1/messages", **message)["content"]
    assert block["text"] == choice["message"]["content"] != base


def adapters_of(url, **query):
    chunks = requests.get(f"{url}/chunks", params={"limit": 1000, **query}, timeout=60).json()["chunks"]
    return [(chunk["lora_path"], chunk["pinned"]) for chunk in chunks]


def control(url, verb, **fields):
    answer = requests.post(f"{url}/{verb}_lora_adapter", json=fields, timeout=60)
    assert answer.ok and answer.json()["success"], answer.text


def test_a_reloaded_name_has_no_old_chunks(server, oracles, paths):
    """All chunks of the adapter loaded first are gone, its pin too."""
    prompt = prompt_of(Dice("again"))
    salt = {"cache_salt": "again"}
    for name in ("c", "other c"):
        control(server.url, "load", lora_name="c", lora_path=str(paths[name]))
        for hit in (False, True):
            (output,) = ask(server.url, [prompt], lora_path="c", **salt)
            assert check(oracles[name], prompt, output) == [hit] * 2
        for entry in output["meta_info"]["chunks"]:
            requests.patch(f"{server.url}/chunks/{entry['id']}", params=salt, json={"pin": True}, timeout=60)
        assert adapters_of(server.url, **salt) == [("c", True)] * 2
        control(server.url, "unload", lora_name="c")
        assert adapters_of(server.url, **salt) == []


def cut(url, body):
    """Leave a stream after its first event."""
    with requests.post(f"{url}/generate", json={**body, "stream": True}, stream=True, timeout=60) as stream:
        next(stream.iter_lines())


def aborted(url, body, rid="aborted"):
    """Abort a request as soon as the server knows it, which may be at any of its steps."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(requests.post, f"{url}/generate", json={**body, "rid": rid}, timeout=60)
        while not answer.done():
            assert requests.post(f"{url}/abort_request", json={"rid": rid}, timeout=60).ok


def answered(url, body, status=200, **fields):
    answer = requests.post(f"{url}/generate", json={**body, **fields}, timeout=60)
    assert answer.status_code == status, answer.text


LONG = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
TOO_LONG = [{"type": "text", "input_ids": [5] * 5000}]
WAYS_OUT = {
    "stream left": cut,
    "aborted": aborted,
    "samples": lambda url, body: answered(url, body, sampling_params={"n": 4, "max_new_tokens": 2}),
    "batch of samples": lambda url, body: answered(
        url, body, segments=[body["segments"]] * 2, sampling_params={"n": 3, "max_new_tokens": 2}
    ),
    "stream of samples left": lambda url, body: cut(url, {**body, "sampling_params": {**LONG, "n": 3}}),
    "too long": lambda url, body: answered(url, body, 400, segments=TOO_LONG),
    "refused in the HTTP process": lambda url, body: answered(url, body, 400, session_params={"id": "s"}),
    "refused in the scheduler": lambda url, body: answered(
        url, body, 400, segments=[{"type": "chunk", "input_ids": [5] * 1500}]
    ),
    "one of a batch refused": lambda url, body: answered(url, body, 400, segments=[body["segments"], TOO_LONG]),
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_an_adapter_is_unloaded_however_its_requests_ended(server, paths, way):
    """As soon as they have; a fill that nobody waits for any more ends as well."""
    dice, name = Dice(way), "left"
    prompt = [dice.text(6), *dice.chunks(2, 100, 200), dice.text(5)]
    body = {"segments": [segment.to_request() for segment in prompt], "lora_path": name, "sampling_params": LONG}
    control(server.url, "load", lora_name=name, lora_path=str(paths["c"]))
    WAYS_OUT[way](server.url, body)
    control(server.url, "unload", lora_name=name)
    ask(server.url, [prompt])


def test_an_adapter_trained_for_chunks_is_served_beside_its_model(server, oracles, tiny_model, tmp_path, monkeypatch):
    """In one batch, each over its own chunks; over them, the adapter's answers are nearer to the model's under full
    attention."""
    questions, folder = tmp_path / "worlds.jsonl", tmp_path / "trained"
    questions.write_text("".join(json.dumps(record) + "\n" for record in records(0, "test", 1, 1, documents=(3, 3))))
    arguments = ["--model", tiny_model, "--questions", str(questions), "--out", str(folder)]
    arguments += ["--lora", "4", "--learning-rate", "1e-2", "--steps", "15", "--batch", "2", "--new-tokens", "4"]
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    train_model.main()
    control(server.url, "load", lora_name="trained", lora_path=str(folder))
    trained, base = PolicyOracle(str(merged(tiny_model, folder, tmp_path / "merged"))), oracles[None]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    (prompt,) = (
        Prompts(tokenizer).make(as_user_message(question, tokenizer)) for question in read_questions(questions)
    )
    for hit in (False, True):
        outputs = ask(server.url, [prompt] * 2, lora_path=["trained", None], cache_salt="trained")
        for oracle, output in zip((trained, base), outputs, strict=True):
            assert check(oracle, prompt, output) == [hit] * 3
    full = base.logprobs([text(token_ids(prompt))], [], [])
    before, after = (
        (full.exp() * (full - oracle.logprobs(prompt, [], keep_all_but(prompt, ())))).sum()
        for oracle in (base, trained)
    )
    assert after < 0.5 * before
    control(server.url, "unload", lora_name="trained")


def test_a_registration_names_its_adapter(server, oracles):
    dice, salt = Dice("registered"), {"cache_salt": "registered"}
    prompt = prompt_of(dice, num_chunks=1)
    body = {"chunks": [{"input_ids": list(prompt[1].ids)}], "wait": True, "pin": True, **salt}
    answer = requests.post(f"{server.url}/chunks", json={**body, "lora_path": "a"}, timeout=60).json()
    assert answer["skipped"] == []
    outputs = ask(server.url, [prompt] * 2, lora_path=["a", None], **salt)
    assert [check(oracles[name], prompt, output) for name, output in zip(("a", None), outputs, strict=True)] == [
        [True],
        [False],
    ]
    assert sorted(adapters_of(server.url, **salt), key=str) == [("a", True), (None, False)]
    for wrong, reason in ((5, "must be the name"), ("z", "no LoRA adapter 'z' is loaded")):
        refused = requests.post(f"{server.url}/chunks", json={**body, "lora_path": wrong}, timeout=60)
        assert refused.status_code == 400 and reason in refused.text


def test_stored_chunks_are_found_by_the_adapters_weights(server, oracles, tiny_model, paths, storage, tmp_path):
    """Whatever the adapter's name is there; and not by its name, once that names other weights."""
    prompt = prompt_of(Dice("stored"))
    for name, output in zip((None, "a"), ask(server.url, [prompt] * 2, lora_path=[None, "a"]), strict=True):
        check(oracles[name], prompt, output)
    server.flush()  # waits until everything is stored
    renamed = {"renamed": "a", "a": "b"}
    with started(tiny_model, storage, tmp_path, *flags({new: paths[old] for new, old in renamed.items()})) as another:
        names = [None, *renamed]
        outputs = ask(another.url, [prompt] * 3, lora_path=names)
        for name, output in zip(names, outputs, strict=True):
            check(oracles[renamed.get(name)], prompt, output)
    found = [output["meta_info"]["cached_tokens_details"].get("storage", 0) for output in outputs]
    num_tokens = sum(len(segment.ids) for segment in prompt if segment.kind == "chunk")
    assert found == [num_tokens, num_tokens, 0]
