"""The routes about chunks without a server: who may, what their parameters are, what is refused."""

import types

import fastapi
import pytest
from fastapi.testclient import TestClient
from sglang.srt.lora.lora_registry import LoRARegistry
from sglang.srt.utils.auth import AuthLevel, add_api_key_middleware

from sglang_lazy.port import chunk_calls, chunk_routes

ID = "1" * 16


@pytest.fixture
def asked(monkeypatch):
    """What the scheduler is asked."""
    asked = []

    async def ask(_manager, verb, **arguments):
        asked.append((verb, arguments))
        return [{"chunks": [{"id": ID, "adapter": None}], "places": [(1.0, 1)], "total": 1}]

    monkeypatch.setattr(chunk_calls, "ask", ask)
    args = types.SimpleNamespace(admin_api_key=None)
    manager = types.SimpleNamespace(server_args=args, lora_registry=LoRARegistry(None))
    monkeypatch.setattr(chunk_routes, "_manager", lambda: manager)
    return asked


def client(**keys):
    app = fastapi.FastAPI()
    chunk_routes.add_routes(app)
    add_api_key_middleware(app, **{"api_key": None, "admin_api_key": None, **keys})
    return TestClient(app)


def test_every_route_asks_for_the_key_that_guards_the_cache():
    app = fastapi.FastAPI()
    chunk_routes.add_routes(app)
    ours = [route for route in app.router.routes if route.path.startswith(chunk_routes.CHUNKS_ROUTE)]
    methods = sorted(method for route in ours for method in route.methods)
    assert methods == ["DELETE", "DELETE", "GET", "GET", "PATCH", "POST"]
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
    for key in (None, "key", "admin", "other"):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        expected = 200 if key in allowed or not keys else 401
        for path in ("/chunks", f"/chunks/{ID}"):
            assert http.get(path, headers=headers).status_code == expected
    assert len(asked) == 2 * (4 if not keys else len(allowed))


def test_a_list_s_parameters(asked):
    http = client()
    query = {"sort": "hits", "order": "asc", "limit": 7, "state": "host", "cache_salt": "a"}
    page = http.get("/chunks", params=query).json()
    assert page == {"total": 1, "chunks": [{"id": ID, "dp_rank": 0, "lora_path": None}], "next": None}
    wanted = {"sort": "hits", "descending": False, "limit": 8, "after": None, "state": "host"}
    assert asked.pop() == ("page", {"tenant": "a", "everybody": False, **wanted})
    http.get("/chunks", headers={"X-Cache-Salt": "b"})
    wanted = {"sort": "last_use", "descending": True, "limit": 101, "after": None, "state": None}
    assert asked.pop() == ("page", {"tenant": "b", "everybody": False, **wanted})
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
    ],
)
def test_what_is_refused(asked, path, headers, status, reason):
    answer = client().get(path, headers=headers)
    assert answer.status_code == status and reason in answer.json()["detail"]
    assert not asked
