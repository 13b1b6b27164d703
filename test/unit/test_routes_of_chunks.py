"""The chunk routes without a server: who may call them, which parameters they take, and what they refuse."""

import asyncio
import base64
import hashlib
import inspect
import json
import re
import time

import fastapi
import pytest
from fastapi.testclient import TestClient
from jsonschema import Draft202012Validator
from sglang.srt.utils.auth import AuthLevel, add_api_key_middleware

from fakes.server import FakeServer, new_frontend
from sglang_lazy.core.config import INFO_ROUTE
from sglang_lazy.core.keys import Namespace
from sglang_lazy.core.labels import Label
from sglang_lazy.port.hooks import apply
from sglang_lazy.port.repairs import http as repairs
from sglang_lazy.port.serving import frontend, scopes
from sglang_lazy.serving import chunk_calls, chunk_lists, chunk_routes, page, registration
from sglang_lazy.serving.misses import WORDS, Answered, Terms
from sglang_lazy.serving.tokenization import concatenate

ID = "1" * 16
ONE = {"chunks": 1, "tokens": 5}
SURVEY = {
    "chunks": {"resident": ONE, "host": ONE, "pending": 0},
    "memory": {"device": {"size": 9, "free": 4}, "host": None},
}
SURVEY |= {
    "hottest": [{"id": ID, "hits": 2, "tokens": 5, "adapter": None, "cache_salt": None}],
    "largest": [],
    "evicted": [[20, 3, 12]],
    "pinned": [],
}
UNNAMED = {"cache_salt": None, "name": None, "metadata": None}
DATA = ("/chunks", f"/chunks/{ID}", "/lazy/survey", f"/lazy/uses/{ID}")


class Server(FakeServer):
    """Its scheduler has one chunk."""

    def answer(self, verb, **arguments):
        if verb == "survey":
            return {**SURVEY, "next": None}
        return {
            "chunks": [{"id": ID, "adapter": None, "cache_salt": None}],
            "places": [(1.0, 1)],
            "total": 1,
            "next": None,
        }


@pytest.fixture
def process(monkeypatch):
    made = new_frontend(Server())
    monkeypatch.setattr(frontend, "current", lambda: made)
    return made


@pytest.fixture
def asked(process):
    """What the scheduler is asked for."""
    return process.server.asked


def client(**keys):
    app = fastapi.FastAPI()
    chunk_routes.add_routes(app, frontend.current)
    page.add_route(app)
    scopes.close(app)
    apply(hook for hook in repairs.HOOKS if hook.function is repairs.decide)
    if keys:  # SGLang adds its middleware only if a key is set
        keys = {"api_key": None, "admin_api_key": None, **keys}
        inspect.unwrap(add_api_key_middleware)(app, **keys)  # another test may have hooked it
        scopes.add_middleware(None, app, **keys)
    return TestClient(app)


def test_every_route_needs_the_cache_managers_key():
    app = fastapi.FastAPI()
    chunk_routes.add_routes(app, frontend.current)
    page.add_route(app)
    scopes.close(app)
    ours = [
        route
        for route in app.router.routes
        if route.path.startswith((chunk_routes.CHUNKS_ROUTE, page.PAGE_ROUTE)) and route.path != INFO_ROUTE
    ]
    methods = sorted(method for route in ours for method in route.methods)
    assert methods == ["DELETE", "DELETE", *["GET"] * 6, "PATCH", "POST"]
    assert {route.endpoint._auth_level for route in ours} == {AuthLevel.ADMIN_OPTIONAL}


@pytest.mark.parametrize(
    ("keys", "allowed"),
    [
        ({}, {None, "key", "admin"}),
        ({"api_key": "key"}, {"key"}),
        ({"admin_api_key": "admin"}, {"admin"}),
        ({"api_key": "key", "admin_api_key": "admin"}, {"admin"}),
    ],
)
def test_which_key_opens_them(asked, keys, allowed):
    http = client(**keys)
    for key in (None, "key", "admin", "other", "k\xe9y"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
        expected = 200 if key in allowed or not keys else 401
        for path in (*DATA, "/lazy"):
            answer = http.get(path, headers=headers)
            assert answer.status_code == expected and (expected == 200 or ID not in answer.text)
    assert [verb for verb, _ in asked if verb != "survey"] == ["page", "get"] * (5 if not keys else len(allowed))


def test_only_the_page_asks_for_a_missing_key(process):
    """Only by the page, which is the same with and without a key."""
    http = client(api_key="key")
    refused, shown = http.get("/lazy"), http.get("/lazy", headers={"Authorization": "Bearer key"})
    assert (refused.status_code, shown.status_code) == (401, 200)
    assert refused.text == shown.text == client().get("/lazy").text and "<!doctype html>" in refused.text
    assert refused.headers["content-type"] == shown.headers["content-type"] == "text/html; charset=utf-8"
    for method, path in [
        *(("GET", path) for path in DATA),
        ("POST", "/lazy"),
        ("GET", "/lazy/"),
        ("GET", "/lazy/../chunks"),
    ]:
        answer = http.request(method, path)
        assert answer.status_code == 401 and "html" not in answer.headers["content-type"], (method, path)


def test_the_page_runs_only_its_own_script():
    """The hashes in its policy are those of its script and style, and it refers to no other host."""
    answer = client().get("/lazy")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"}  # XML namespaces, never fetched
    assert set(re.findall(r"\w+://[^\"' )]*", answer.text)) == names
    for risky in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"):
        assert risky not in answer.text


def test_parts_of_a_survey(process, asked):
    http = client()
    for salt in (None, "a"):
        report = [{"id": ID, "tokens": 5, "hit": salt is None}]
        process.usage.add(Namespace("chunk", None, salt), "block", report, 0, time.time())
    found = http.get("/lazy/survey").json()
    assert asked == [("survey", {"tenant": None, "everybody": False, "starts": None})]
    assert found["hottest"] == [{"id": ID, "hits": 2, "tokens": 5, "lora_path": None, "dp_rank": 0, **UNNAMED}]
    for name in ("chunks", "memory", "evicted"):
        assert found[name] == SURVEY[name]
    assert [row[1:] for row in found["history"]] == [[1, 1, 1, 5, 0]] and abs(found["time"] - time.time()) < 60
    assert [prompt["chunks"][0]["hit"] for prompt in found["prompts"]] == [True]
    uses = http.get(f"/lazy/uses/{ID}{'0' * 48}", headers={"X-Cache-Salt": "a"}).json()
    assert uses["num_prompts"] == 1 and not uses["prompts"][0]["chunks"][0]["hit"]
    process.server.has_admin_key = True
    assert http.get(f"/lazy/uses/{ID}?all=true").json()["num_prompts"] == 2


def test_why_chunks_were_not_cached(process):
    """By the id of a request; other tenants know no such request."""
    other = "b" * 16
    report = [
        {"id": ID, "offset": 0, "tokens": 9, "hit": False},
        {"id": other, "offset": 9, "tokens": 10, "hit": False},
        {"id": "c" * 16, "offset": 19, "tokens": 1, "hit": True},
    ]
    process.labels.add("a", {ID: Label("Lease")})
    process.usage.add(Namespace("chunk", None, "a"), "block", report, 1, 7.0, "r")

    async def answer():
        ids = [*range(9), 90, *range(9), 5]
        process.misses.note(Answered("before", "a", Terms(), ids, report[:1], 3.0, 4.0))
        process.misses.note(Answered("r", "a", Terms(), ids, report, 5.0, 6.0))
        await process.misses.of("a", "r")

    http, mine = client(), {"X-Cache-Salt": "a"}
    unknown = http.get("/lazy/why?rid=r", headers=mine).json()["chunks"]
    assert [one.get("reason") for one in unknown] == ["unknown", "unknown", None]
    asyncio.run(answer())
    gone = {"reason": "evicted", "like": None, "words": WORDS["evicted"]}
    like = {"id": ID, "name": "Lease"}
    words = f"chunk {ID} was used before, and has much of the same text, but another beginning"
    expected = [
        {"id": ID, "name": "Lease", "tokens": 9, "hit": False, **gone},
        {"id": other, "tokens": 10, "hit": False, "reason": "beginning", "like": like, "words": words},
        {"id": "c" * 16, "tokens": 1, "hit": True},
    ]
    found = http.get("/lazy/why?rid=r", headers=mine).json()
    assert found == {"rid": "r", "time": 7.0, "link": "block", "cache_salt": "a", "chunks": expected}
    for headers in ({}, {"X-Cache-Salt": "b"}):
        assert http.get("/lazy/why?rid=r", headers=headers).status_code == 404
    assert http.get("/lazy/why").status_code in (400, 422)


def test_parameters_of_a_list(asked):
    http = client()
    query = {"sort": "hits", "order": "asc", "limit": 7, "state": "host", "cache_salt": "a"}
    page = http.get("/chunks", params=query).json()
    assert page == {"total": 1, "chunks": [{"id": ID, "dp_rank": 0, "lora_path": None, **UNNAMED}], "next": None}
    wanted = {"sort": "hits", "descending": False, "limit": 8, "after": None, "state": "host"}
    assert asked.pop() == ("page", {"tenant": "a", "everybody": False, "starts": None, **wanted})
    http.get("/chunks", headers={"X-Cache-Salt": "b"})
    wanted = {"sort": "last_use", "descending": True, "limit": 101, "after": None, "state": None}
    assert asked.pop() == ("page", {"tenant": "b", "everybody": False, "starts": None, **wanted})
    names = {one["name"] for one in http.get("/openapi.json").json()["paths"]["/chunks"]["get"]["parameters"]}
    assert names == {"sort", "order", "limit", "cursor", "state", "all", "cache_salt", "X-Cache-Salt"}


@pytest.mark.parametrize(
    ("path", "headers", "status", "reason"),
    [
        ("/chunks?sort=size", {}, 400, "sort"),
        ("/chunks?limit=0", {}, 400, "limit"),
        ("/chunks?cursor=x", {}, 400, "cursor"),
        ("/chunks?cache_salt=", {}, 400, "cache_salt"),
        ("/chunks?cache_salt=a", {"X-Cache-Salt": "b"}, 400, "disagree"),
        ("/chunks?all=true", {}, 403, "admin"),
        ("/chunks/short", {}, 400, "16 to 64"),
        ("/lazy/survey?all=true", {}, 403, "admin"),
        (f"/lazy/uses/{ID}?all=true", {}, 403, "admin"),
        ("/lazy/survey?cache_salt=", {}, 400, "cache_salt"),
        ("/lazy/uses/short", {}, 400, "16 to 64"),
    ],
)
def test_refused_parameters(asked, path, headers, status, reason):
    answer = client().get(path, headers=headers)
    assert answer.status_code == status and reason in answer.json()["detail"]
    assert not asked


CHUNKS = [
    *({"text": value} for value in ("x", "", 5)),
    *({"input_ids": value} for value in ([5], [], [-1], ["5"], 5)),
    *({"text": "x", **more} for more in ({"type": "chunk"}, {"type": "text"}, {"input_ids": [5]}, {"id": ID})),
    *({"text": "x", "name": value} for value in ("Lease", None, "", 5, "x" * 256, "x" * 257)),
    *({"text": "x", "metadata": value} for value in ({"page": 3}, {}, None, [], "x")),
    *({"id": ID}, {}, [], "", "x", 5, None),
]
FIELDS = ("chunks", "link", "cache_salt", "lora_path", "wait", "pin", "ttl", "unknown")
VALUES = [
    *(None, True, False, 0, 1, -1, 0.5, 10**9, 10**9 + 1, "", "block", {}, []),
    *([chunk] for chunk in CHUNKS),
    *(["x"] * count for count in (1000, 1001)),
]


@pytest.mark.parametrize(
    ("method", "path", "usual"), [("POST", "/chunks", {"chunks": ["x"]}), ("PATCH", f"/chunks/{ID}", {"pin": True})]
)
def test_bodies_are_taken_if_the_schema_allows_them(process, monkeypatch, method, path, usual):
    async def done(*_args):
        return [], []

    async def pinned(*_args):
        return {"skipped": []}

    def tokenize(segments, _salt):
        return concatenate(segments, [[5]])

    process.server.adapters = {"block": "1"}
    monkeypatch.setattr(process.prompts, "tokenize", tokenize)
    monkeypatch.setattr(chunk_calls, "compute", done)
    monkeypatch.setattr(process.pins, "set", pinned)
    http = client()
    operation = http.get("/openapi.json").json()["paths"][path.replace(ID, "{chunk_id}")][method.lower()]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    bodies = [usual, {}, [], "x", None]
    bodies += [{**usual, name: value} for name in FIELDS for value in VALUES]
    sent = list(map(json.dumps, bodies))  # in Python 1 equals True
    allowed = [body for body in sent if Draft202012Validator(schema).is_valid(json.loads(body))]
    taken = [body for body in sent if http.request(method, path, content=body).status_code < 300]
    assert taken == allowed and sent[0] in taken and len(taken) < len(sent)


def test_parameters_are_taken_if_the_schema_allows_them(asked):
    http = client()
    paths = http.get("/openapi.json").json()["paths"]
    (name,) = (one for one in paths["/chunks/{chunk_id}"]["get"]["parameters"] if one["in"] == "path")
    sent = {f"/chunks/{value}": (name, value) for value in ("0" * 15, ID, "g" * 16, "a" * 64, "a" * 65)}
    for parameter in paths["/chunks"]["get"]["parameters"]:
        for value in (*chunk_lists.SORTS, *chunk_lists.STATES, "asc", "desc", "x", 0, 1, 1000, 1001):
            if parameter["name"] in ("sort", "order", "limit", "state"):
                sent[f"/chunks?{parameter['name']}={value}"] = parameter, value
    allowed = [url for url, (one, value) in sent.items() if Draft202012Validator(one["schema"]).is_valid(value)]
    taken = [url for url in sent if http.get(url).status_code == 200]
    assert taken == allowed and len(taken) == 2 + 4 + 2 + 2 + 5


def test_deletions_are_sent_in_shares():
    """Each share is a message of its own, so batches run in between; a chunk that became unknown is skipped."""

    class Scheduler(FakeServer):
        def answer(self, verb, tenant, ids):
            unknown = [{"id": name, "reason": "unknown"} for name in ids[:1]]
            return {"affected": [{"id": name, "state": "deleted"} for name in ids[1:]], "skipped": unknown}

    server, ids = Scheduler(), [f"{i:016x}" for i in range(2 * chunk_calls.MAX_DELETED + 1)]
    answer = asyncio.run(chunk_calls.delete_chunks(new_frontend(server), None, [*ids, ids[0]]))
    assert [len(arguments["ids"]) for _, arguments in server.asked] == [chunk_calls.MAX_DELETED] * 2 + [1]
    first = [ids[i] for i in (0, chunk_calls.MAX_DELETED, 2 * chunk_calls.MAX_DELETED)]
    assert [one["id"] for one in answer["skipped"]] == first and answer["requested"] == len(ids)
    assert [one["id"] for one in answer["affected"]] == [name for name in ids if name not in first]


def test_a_registration_without_room_may_be_sent_again(asked, monkeypatch):
    async def busy(*_args):
        raise registration.Busy("no room")

    monkeypatch.setattr(chunk_calls, "register_chunks", busy)
    answer = client().post("/chunks", json={"chunks": ["x"]})
    assert answer.status_code == 429 and int(answer.headers["Retry-After"]) == registration.RETRY_S
    assert answer.json()["message"] == "no room" and answer.json()["code"] == 429
