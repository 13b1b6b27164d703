"""`/chunks` on a running server: what it lists, to whom, and what it refuses."""

import json
import time

import pytest
import requests
import torch
from http_prompts import GREEDY, chunk, generate, text
from jsonschema import Draft202012Validator
from served import TOLERANCE

from oracle.block_mask import Oracle
from oracle.scenarios import Dice
from sglang_lazy.testing.server import wait_for

DOCUMENT = "A mill stood where the two rivers meet, until the flood of 1784 carried it away."


def get(url, path="", salt=None, **query):
    headers = {} if salt is None else {"X-Cache-Salt": salt}
    return requests.get(f"{url}/chunks{path}", params=query, headers=headers, timeout=60)


def ask(url, document, **body):
    answer = generate(url, segments=[text("Read: "), chunk(document), text(" When?")], **body)
    return answer["meta_info"]["chunks"][0]


def test_chunks_of_prompts_are_listed(server):
    first = ask(server, DOCUMENT, cache_salt="listing")
    assert not first["hit"] and ask(server, DOCUMENT, cache_salt="listing")["hit"]
    page = get(server, cache_salt="listing").json()
    assert page["total"] == 1 and page["next"] is None
    (listed,) = page["chunks"]
    assert (listed["id"], listed["tokens"], listed["hits"]) == (first["id"], first["tokens"], 1)
    assert (listed["state"], listed["tiers"], listed["cache_salt"]) == ("resident", ["device"], "listing")
    assert get(server, salt="listing").json()["total"] == 1
    (same,) = get(server, f"/{first['id']}", salt="listing").json()["chunks"]
    assert same["digest"] == listed["digest"]


def whole_list(url, salt, **query):
    """All pages of a list, three chunks on each."""
    chunks, cursor = [], {}
    while cursor is not None:
        page = get(url, salt=salt, limit=3, **query, **cursor).json()
        assert len(page["chunks"]) == min(3, page["total"] - len(chunks))
        chunks += page["chunks"]
        cursor = {"cursor": page["next"]} if page["next"] else None
    return chunks


def test_pages_are_sorted_and_filtered(server):
    salt = "pages"
    documents = [{"input_ids": list(range(10 + length, 10 + 2 * length))} for length in (4, 9, 2, 7, 5, 11, 3)]
    names = register(server, *documents, salt=salt, wait=True).json()["affected"]
    for number, times in ((2, 3), (0, 1), (5, 2)):  # of which the last one was used last
        for _ in range(times):
            generate(server, segments=[{"type": "chunk", **documents[number]}, text(" Who?")], cache_salt=salt)
    for sort, best in {"tokens": names[5], "hits": names[2], "last_use": names[5]}.items():
        up, down = (whole_list(server, salt, sort=sort, order=order) for order in ("asc", "desc"))
        ids, values = [one["id"] for one in up], [one[sort] for one in up]
        assert [one["id"] for one in down] == ids[::-1] and sorted(ids) == sorted(names) and ids[-1] == best
        assert values == sorted(values) and len(set(values)) > 2
    assert sorted(one["id"] for one in whole_list(server, salt, state="resident")) == sorted(names)
    assert whole_list(server, salt, state="pending") == []


def test_other_tenants_do_not_see_it(server):
    mine = ask(server, DOCUMENT, cache_salt="mine")
    for salt in (None, "other", "min", "mine2"):
        ids = [c["id"] for c in get(server, salt=salt, limit=1000).json()["chunks"]]
        assert salt is None or ids == []
        response = get(server, f"/{mine['id']}", salt=salt)
        if salt is not None:
            assert response.status_code == 404 and mine["id"] in response.text
    unknown = get(server, "/" + "0" * 16, salt="other")
    assert unknown.status_code == 404


def test_refused_calls(server):
    assert get(server, sort="size").status_code == 400
    assert get(server, limit=0).status_code == 400
    assert get(server, "/short").status_code == 400
    assert get(server, salt="a", cache_salt="b").status_code == 400
    assert get(server, all="true").status_code == 403


def test_a_deleted_chunk_is_computed_again(server):
    first = ask(server, DOCUMENT, cache_salt="deleting")
    for salt, status in (("other", 404), ("deleting", 200), ("deleting", 404)):
        headers = {"X-Cache-Salt": salt}
        response = requests.delete(f"{server}/chunks/{first['id']}", headers=headers, timeout=60)
        assert response.status_code == status, response.text
        if status == 200:
            assert response.json() == {
                "requested": 1,
                "affected": [{"id": first["id"], "state": "deleted"}],
                "skipped": [],
            }
    assert not ask(server, DOCUMENT, cache_salt="deleting")["hit"]


@pytest.mark.slow
def test_a_deleted_chunk_in_use_goes_when_it_is_released(server, tiny_model):
    """The answer that reads it is the oracle's to the end. Its id is forgotten at once."""
    salt, dice, num_tokens = "in use", Dice("in use"), 500
    prompt = [dice.text(3), dice.chunk(30), dice.text(4)]
    (name,) = register(server, {"input_ids": list(prompt[1].ids)}, salt=salt, wait=True).json()["affected"]
    by_id = {"type": "chunk", "id": name}
    body = {"segments": [prompt[0].to_request(), by_id, prompt[2].to_request()], "cache_salt": salt, "stream": True}
    body["sampling_params"] = {**GREEDY, "max_new_tokens": num_tokens}
    with requests.post(f"{server}/generate", json=body, stream=True, timeout=60) as response:
        lines = filter(None, response.iter_lines())
        next(lines)
        deleted = requests.delete(f"{server}/chunks/{name}", headers={"X-Cache-Salt": salt}, timeout=60)
        assert deleted.json() == {"requested": 1, "affected": [{"id": name, "state": "in use"}], "skipped": []}
        assert requests.post(f"{server}/generate", json=body, timeout=60).status_code == 404
        *_, last, done = lines
    tokens = json.loads(last.removeprefix(b"data: "))["output_ids"]
    assert done == b"data: [DONE]" and len(tokens) == num_tokens
    expected = Oracle(tiny_model).logprobs(prompt, tokens[:-1])
    assert (expected.amax(-1) - expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max() <= TOLERANCE
    assert wait_for(lambda: get(server, f"/{name}", salt=salt).status_code == 404)
    assert get(server, salt=salt).json()["total"] == 0


def register(url, *chunks, salt=None, **body):
    headers = {} if salt is None else {"X-Cache-Salt": salt}
    return requests.post(f"{url}/chunks", json={"chunks": list(chunks), **body}, headers=headers, timeout=60)


def test_a_registered_chunk_is_found_by_prompts(server):
    response = register(server, DOCUMENT, {"input_ids": [7, 8, 9]}, salt="ahead", wait=True)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["requested"] == 2 and len(answer["affected"]) == 2 and answer["skipped"] == []
    assert {one["id"] for one in get(server, salt="ahead").json()["chunks"]} == set(answer["affected"])
    used = ask(server, DOCUMENT, cache_salt="ahead")
    assert used["hit"] and used["id"] == answer["affected"][0]
    assert not ask(server, DOCUMENT, cache_salt="ahead of others")["hit"]
    assert not ask(server, DOCUMENT, cache_salt="ahead", link="base")["hit"]
    assert register(server, DOCUMENT, salt="ahead", link="base+epic", wait=True).status_code == 200
    again = get(server, f"/{used['id']}", salt="ahead").json()["chunks"]
    assert sorted(one["preamble"] for one in again) == [False, True]


def test_a_registration_is_polled(server):
    too_long = {"input_ids": [6] * 9000}
    response = register(server, DOCUMENT, too_long, cache_salt="polled")
    assert response.status_code == 202, response.text
    name, failing = response.json()["accepted"]
    deadline = time.monotonic() + 60
    while (answer := get(server, f"/{name}", salt="polled")).json()["registration"] == {"state": "waiting"}:
        assert answer.status_code == 200 and time.monotonic() < deadline
        time.sleep(0.05)
    assert answer.json()["registration"] is None and answer.json()["chunks"][0]["state"] == "resident"
    while (answer := get(server, f"/{failing}", salt="polled").json())["registration"] == {"state": "waiting"}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert answer["chunks"] == [] and answer["registration"]["state"] == "failed"
    reason = register(server, too_long, salt="polled", wait=True).json()["skipped"][0]["reason"]
    assert answer["registration"]["reason"] == reason
    assert get(server, f"/{failing}", salt="other").status_code == 404


def test_prompts_of_others_go_before_registered_chunks(server):
    """However many one tenant registers: another's answer does not wait for all of them."""
    dice, salt = Dice("many"), "many registrations"
    for _ in range(20):
        answer = register(server, *({"input_ids": dice.ids(200)} for _ in range(16)), salt=salt)
    generate(server, segments=[text("Read: "), chunk(DOCUMENT), text(" Who?")], cache_salt="another")
    last = answer.json()["accepted"][-1]
    assert get(server, f"/{last}", salt=salt).json()["registration"] == {"state": "waiting"}
    assert wait_for(lambda: get(server, f"/{last}", salt=salt).json()["registration"] is None, 120)


def test_bad_registrations(server):
    for chunks, body, reason in (
        ([], {}, "1 to 1000"),
        ([""], {}, "chunks[0]"),
        ([DOCUMENT, 5], {}, "chunks[1]"),
        ([{"input_ids": [-1]}], {}, "chunks[0]"),
        ([DOCUMENT], {"link": "full"}, "computes no chunks"),
        ([DOCUMENT], {"link": "base:preamble=lead"}, "depend on the prompt"),
        ([DOCUMENT], {"tll": 5}, "unknown field 'tll'"),
        ([DOCUMENT], {"ttl": 0}, "ttl"),
        ([DOCUMENT], {"pin": "yes"}, "pin"),
        ([DOCUMENT], {"wait": 1}, "wait"),
        ([DOCUMENT], {"cache_salt": ""}, "cache_salt"),
    ):
        response = register(server, *chunks, **body)
        assert response.status_code == 400 and reason in response.text, response.text
    assert requests.post(f"{server}/chunks", data="no json", timeout=60).status_code == 400
    too_long = register(server, {"input_ids": [5] * 9000}, salt="long", wait=True).json()
    assert too_long["affected"] == [] and len(too_long["skipped"]) == 1


def test_prompts_name_a_chunk_by_its_id(server):
    salt = "by id"
    (name,) = register(server, DOCUMENT, salt=salt, wait=True).json()["affected"]
    by_id = {"type": "chunk", "id": name}
    by_text = generate(server, segments=[text("Read: "), chunk(DOCUMENT), text(" When?")], cache_salt=salt)
    answer = generate(server, segments=[text("Read: "), by_id, text(" When?")], cache_salt=salt)
    assert answer["text"] == by_text["text"] and answer["meta_info"]["chunks"] == by_text["meta_info"]["chunks"]
    content = [{"type": "text", "text": "Read: "}, by_id, {"type": "text", "text": "When?"}]
    bodies = {
        "/generate": {"segments": [text("Read: "), by_id, text(" When?")]},
        "/v1/completions": {"segments": [text("Read: "), by_id, text(" When?")]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": content}]},
        "/v1/responses": {"input": [{"role": "user", "content": content}]},
        "/v1/messages": {"messages": [{"role": "user", "content": content}]},
    }
    for path, body in ((path, {**body, "stream": stream}) for path, body in bodies.items() for stream in (False, True)):
        full = {"model": "default", "max_tokens": 2, "store": False, **body} if path != "/generate" else body
        known = requests.post(server + path, json=full, headers={"X-Cache-Salt": salt}, timeout=60)
        assert known.status_code == 200, (path, known.text)
        for other in ("other", None):
            headers = {} if other is None else {"X-Cache-Salt": other}
            unknown = requests.post(server + path, json=full, headers=headers, timeout=60)
            assert unknown.status_code == 404 and name in json.dumps(unknown.json()), (path, unknown.text)
    headers = {"X-Cache-Salt": salt}
    assert requests.delete(f"{server}/chunks/{name}", headers=headers, timeout=60).status_code == 200
    gone = requests.post(server + "/generate", json=bodies["/generate"], headers=headers, timeout=60)
    assert gone.status_code == 404


@pytest.mark.parametrize("name", ["abc", "0" * 15, "0" * 65, "x" * 16])
def test_malformed_ids_are_no_unknown_chunks(server, name):
    by_id = {"type": "chunk", "id": name}
    messages = {"messages": [{"role": "user", "content": [by_id]}]}
    bodies = {
        "/generate": {"segments": [by_id]},
        "/v1/completions": {"segments": [by_id], "prompt": ""},
        "/v1/chat/completions": messages,
        "/v1/responses": {"input": messages["messages"]},
        "/v1/messages": messages,
    }
    for path, body in bodies.items():
        full = {"model": "default", "max_tokens": 2, **body} if path != "/generate" else body
        answer = requests.post(server + path, json=full, timeout=60)
        assert answer.status_code == 400 and "has 16 to 64 hexadecimal digits" in answer.text, (path, answer.text)
    for method, path in (("GET", ""), ("PATCH", ""), ("DELETE", ""), ("GET", "/uses")):
        url = f"{server}/lazy/uses/{name}" if path else f"{server}/chunks/{name}"
        answer = requests.request(method, url, json={"pin": True} if method == "PATCH" else None, timeout=60)
        assert answer.status_code == 400 and "has 16 to 64 hexadecimal digits" in answer.text, (method, answer.text)


def test_an_id_outlives_the_kv(server):
    """What was evicted is computed again from the tokens that are remembered."""
    salt = "outlives"
    (name,) = register(server, DOCUMENT, salt=salt, wait=True).json()["affected"]
    fill_pool(server)
    assert get(server, f"/{name}", salt=salt).status_code == 404, "its KV is gone"
    prompt = [text("Read: "), {"type": "chunk", "id": name}, text(" When?")]
    assert requests.post(f"{server}/generate", json={"segments": prompt, "cache_salt": "x"}).status_code == 404
    answer = generate(server, segments=prompt, cache_salt=salt)
    assert [(one["id"], one["hit"]) for one in answer["meta_info"]["chunks"]] == [(name, False)]
    anew = generate(server, segments=[text("Read: "), chunk(DOCUMENT), text(" When?")], cache_salt="another")
    assert answer["output_ids"] == anew["output_ids"]
    assert listed(server, name, salt)["state"] == "resident"


def patch(url, name, body, salt=None):
    headers = {} if salt is None else {"X-Cache-Salt": salt}
    return requests.patch(f"{url}/chunks/{name}", json=body, headers=headers, timeout=60)


def listed(url, name, salt):
    (one,) = get(url, f"/{name}", salt=salt).json()["chunks"]
    return one


def fill_pool(url):
    """Send unrelated prompts with more tokens than the pool holds."""
    for i in range(5):
        generate(url, input_ids=[20 + i, *range(30, 230)] * 10, sampling_params={"max_new_tokens": 1})


@pytest.mark.slow
def test_a_pinned_chunk_stays_until_it_expires(server):
    salt = "pins"
    answer = register(server, DOCUMENT, {"input_ids": [7, 8, 9, 10]}, salt=salt, wait=True, pin=True).json()
    assert len(answer["affected"]) == 2, answer
    pinned, other = answer["affected"]
    assert patch(server, other, {"pin": False}, salt).json() == {
        "requested": 1,
        "affected": [{"id": other, "pinned": False, "pinned_until": None}],
        "skipped": [],
    }
    assert (listed(server, pinned, salt)["pinned"], listed(server, pinned, salt)["users"]) == (True, 0)
    fill_pool(server)
    assert get(server, f"/{other}", salt=salt).status_code == 404
    assert listed(server, pinned, salt)["state"] == "resident"
    before = time.time()
    (affected,) = patch(server, pinned, {"ttl": 0.5}, salt).json()["affected"]
    assert before < affected["pinned_until"] <= time.time() + 0.5
    while listed(server, pinned, salt)["pinned"]:
        assert time.time() < before + 60
        time.sleep(0.05)
    assert time.time() >= affected["pinned_until"]
    fill_pool(server)
    assert get(server, f"/{pinned}", salt=salt).status_code == 404


@pytest.mark.slow
def test_hits_renew_a_pin(server):
    """At the end of its time; one without hits ends then, as above."""
    salt, ttl = "renewed", 5
    hit, other = register(server, DOCUMENT, {"input_ids": [7, 8, 9]}, salt=salt, wait=True, pin=True, ttl=ttl).json()[
        "affected"
    ]
    until = listed(server, hit, salt)["pinned_until"]
    assert ask(server, DOCUMENT, cache_salt=salt)["hit"]
    while (now := listed(server, hit, salt))["pinned_until"] == until:
        time.sleep(0.05)
    assert now["pinned"] and now["pinned_until"] >= until + ttl, now
    assert wait_for(lambda: not listed(server, other, salt)["pinned"])  # pinned a little later, it also ends later
    assert listed(server, hit, salt)["pinned"]
    while listed(server, hit, salt)["pinned"]:
        assert time.time() < until + 60
        time.sleep(0.05)
    assert time.time() >= now["pinned_until"]


def test_refused_pins(server):
    salt = "no pins"
    (name,) = register(server, DOCUMENT, salt=salt, wait=True).json()["affected"]
    for other in (None, "other"):
        response = patch(server, name, {"pin": True}, other)
        assert response.status_code == 404 and name in response.text
    assert not listed(server, name, salt)["pinned"]
    for body in ({}, [], {"pin": 1}, {"ttl": -1}, {"ttl": "1h"}, {"ttl": True}, {"pin": False, "ttl": 5}, {"until": 5}):
        assert patch(server, name, body, salt).status_code == 400, body
    large = [{"input_ids": [token] * 1100} for token in (5, 6, 7)]  # 2,000 of 8,000 tokens may be pinned
    first, second = register(server, *large[:2], salt=salt, wait=True).json()["affected"]
    assert patch(server, first, {"pin": True}, salt).status_code == 200
    response = patch(server, second, {"pin": True}, salt)
    assert response.status_code == 409 and "--lazy-max-pinned" in response.text
    (skipped,) = register(server, large[2], salt=salt, wait=True, pin=True).json()["skipped"]
    assert skipped["reason"].startswith("computed, but not pinned: ")
    assert patch(server, first, {"pin": False}, salt).status_code == 200
    assert patch(server, second, {"pin": True}, salt).status_code == 200
    assert requests.delete(f"{server}/chunks/{second}", headers={"X-Cache-Salt": salt}, timeout=60).status_code == 200


def test_several_are_deleted(server):
    salt = "several"
    headers = {"X-Cache-Salt": salt}
    names = register(server, "One.", "Two, three.", "Four.", salt=salt, wait=True).json()["affected"]
    unknown = "0" * 16
    params = {"id": [*names[:2], unknown]}
    response = requests.delete(f"{server}/chunks", params=params, headers=headers, timeout=60)
    assert response.json() == {
        "requested": 3,
        "affected": [{"id": name, "state": "deleted"} for name in names[:2]],
        "skipped": [{"id": unknown, "reason": "unknown"}],
    }
    assert [one["id"] for one in get(server, salt=salt).json()["chunks"]] == names[2:]
    assert requests.delete(f"{server}/chunks", headers=headers, timeout=60).status_code == 400


def test_answers_are_as_the_schema_says(server):
    api = requests.get(f"{server}/openapi.json", timeout=60).json()
    salt = "described"
    headers = {"X-Cache-Salt": salt}

    def check(answer, path="/chunks"):
        operation = api["paths"][path][answer.request.method.lower()]
        schema = operation["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
        Draft202012Validator({**schema, "components": api["components"]}).validate(answer.json())
        return answer.json()

    too_long = {"input_ids": [6] * 9000}
    assert len(check(register(server, too_long, DOCUMENT, salt=salt, wait=True, ttl=60))["skipped"]) == 1
    _, name = check(register(server, too_long, DOCUMENT, salt=salt))["accepted"]
    generate(server, segments=[{"type": "chunk", "id": name}, text(" When?")], cache_salt=salt)
    assert check(get(server, salt=salt))["chunks"][0]["pinned"]
    one = "/chunks/{chunk_id}"
    assert check(get(server, f"/{name}", salt=salt), one)["chunks"]
    failed = register(server, too_long, salt=salt, wait=True).json()["skipped"][0]["id"]
    assert check(get(server, f"/{failed}", salt=salt), one)["registration"]["state"] == "failed"
    assert check(patch(server, name, {"ttl": 60}, salt), one)["affected"]
    assert check(requests.delete(f"{server}/chunks/{name}", headers=headers, timeout=60), one)["affected"]
    params = {"id": [name, failed]}
    several = check(requests.delete(f"{server}/chunks", params=params, headers=headers, timeout=60))
    assert several["affected"] and several["skipped"]
