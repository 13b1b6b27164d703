"""Keys of applications: the file that has them, and which routes each opens, without a server."""

import inspect
import json

import fastapi
import pytest
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server
from sglang.srt.utils.auth import AuthLevel, add_api_key_middleware, auth_level
from sglang.srt.utils.common import add_prometheus_middleware

from fakes.server import new_frontend
from sglang_lazy.port.hooks import apply
from sglang_lazy.port.repairs import http as repairs
from sglang_lazy.port.serving import frontend, scopes
from sglang_lazy.serving.keys import Scope, check_keys, opened_by, read_keys, sees_all_tenants

SECRET = "0123456789abcdef"
READ, CHUNKS, PROMPTS, ADMIN, TENANT = (f"key-with-scope-{name}" for name in ("read", "chunks", "prompts", "all", "a"))
FILE = [
    {"key": READ, "scopes": ["read"]},
    {"key": CHUNKS, "scopes": ["chunks"]},
    {"key": PROMPTS, "scopes": ["prompts"]},
    {"key": ADMIN, "scopes": ["admin"]},
    {"key": TENANT, "scopes": ["chunks", "prompts"], "tenant": "a"},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys.json"

    def write(content):
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return str(path)

    return write


def one(**fields):
    return [{"key": SECRET, "scopes": ["read"], **fields}]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff", "not text in UTF-8"),
        (b"[", "is not JSON: Expecting value: line 1"),
        (b"[" * 100_000, "is not JSON"),
        ({}, "must hold a list of keys"),
        ([], "must hold a list of keys"),
        ([SECRET], r"key \[0\]: must be an object"),
        (one(tenent="a"), r"key \[0\]: unknown field 'tenent'"),
        *((one(key=key), "key must be 16 to 256") for key in (None, 5, "0" * 15, "0" * 257, "ü" * 16, SECRET + " ")),
        *(
            (one(scopes=scopes), "some of read, chunks, prompts, admin")
            for scopes in (None, [], "read", ["write"], [{}])
        ),
        *((one(tenant=tenant), "tenant must be") for tenant in ("", 5, "ü", "a\n", "a" * 257)),
        (one(scopes=["admin"], tenant="a"), "acts on all tenants"),
        (one() + one(scopes=["chunks"]), r"key \[1\]: it is the same as key \[0\]"),
        (one(key="the-admins-own-key"), r"key \[0\]: it is the same as one of SGLang's"),
    ],
)
def test_bad_files(file, content, reason):
    with pytest.raises(ValueError, match=reason) as error:
        read_keys(file(content), (None, "the-admins-own-key"))
    assert SECRET not in str(error.value) and "keys.json" in str(error.value)


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(ValueError, match="missing.json cannot be read: No such file"):
        read_keys(str(tmp_path / "missing.json"))


def test_flags_that_a_file_of_keys_needs(file):
    def check(path, **flags):
        check_keys(path, **{"api_key": None, "admin_api_key": "admin", "num_workers": 1, **flags})

    check(file(one()))
    for flags, reason in (({"admin_api_key": None}, "--admin-api-key"), ({"num_workers": 2}, "one tokenizer")):
        with pytest.raises(ValueError, match=reason):
            check(file(one()), **flags)
    for name in ("api_key", "admin_api_key"):
        with pytest.raises(ValueError, match=r"--lazy-keys .*keys.json: key \[0\]: it is the same as one of SGLang's"):
            check(file(one()), **{name: SECRET})


ROUTES = {
    "/read": Scope.READ,
    "/chunks": Scope.CHUNKS,
    "/prompts": Scope.PROMPTS,
    "/prompts/models": Scope.PROMPTS,
    "/none": Scope.PROMPTS,  # a 404, if the key opens it
    "/v1/loads": Scope.PROMPTS,
    "/metrics": Scope.READ,
    "/metrics/": Scope.READ,
    "/metricsandmore": Scope.READ,  # SGLang takes any path that begins so
    "/flush": Scope.ADMIN,
    "/weights": Scope.ADMIN,
    "/included": Scope.ADMIN,  # by a router in the router, as /scale_elastic_ep is
    "/server_info": Scope.ADMIN,
}
"""By path, the scope that opens it."""
TOTALS = {"/v1/loads", "/metrics", "/metrics/", "/metricsandmore"}
"""Paths that no tenant's key opens: they count all tenants."""
OPENS = {
    READ: {Scope.READ},
    CHUNKS: {Scope.READ, Scope.CHUNKS},
    PROMPTS: {Scope.PROMPTS},
    TENANT: {Scope.READ, Scope.CHUNKS, Scope.PROMPTS},
    ADMIN: set(Scope),
}


@pytest.fixture
def metrics(tmp_path, monkeypatch):
    """SGLang's route of metrics, for an app."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    return add_prometheus_middleware


@pytest.fixture
def client(file, metrics, monkeypatch):
    """Makes a client of a server with the keys above; each answer tells the headers that its route has got."""

    def make(**keys):
        made = new_frontend(keys=file(FILE))
        monkeypatch.setattr(frontend, "current", lambda: made)
        app = fastapi.FastAPI()

        def answer(request: fastapi.Request):
            salts = request.headers.getlist("X-Cache-Salt")
            return {"salts": salts, "all": sees_all_tenants(request, bool(keys.get("admin_api_key")))}

        def marked(mark):
            def endpoint(request: fastapi.Request):
                return answer(request)

            return mark(endpoint)

        app.get("/read")(marked(opened_by(Scope.READ)))
        app.get("/chunks")(marked(opened_by(Scope.CHUNKS)))
        app.get("/flush")(marked(auth_level(AuthLevel.ADMIN_OPTIONAL)))
        app.get("/weights")(marked(auth_level(AuthLevel.ADMIN_FORCE)))
        for path in ("/prompts", "/prompts/{model}", "/health", "/v1/loads"):
            app.get(path)(answer)
        router = fastapi.APIRouter()
        router.get("/included")(marked(auth_level(AuthLevel.ADMIN_OPTIONAL)))
        app.include_router(router)
        metrics(app)
        monkeypatch.setattr(scopes, "_SHOW_KEYS", (shown := marked(lambda endpoint: endpoint),))
        app.get("/server_info")(shown)
        scopes.close(app)
        apply(hook for hook in repairs.HOOKS if hook.function is repairs.decide)
        keys = {"api_key": None, **keys}
        inspect.unwrap(add_api_key_middleware)(app, **keys)  # another test may have hooked it
        scopes.add_middleware(None, app, **keys)
        return TestClient(app, headers={"X-Other": "kept"})

    return make


def call(http, path, key, **headers):
    return http.get(path, headers={"Authorization": f"Bearer {key}", **headers})


@pytest.mark.parametrize("api_key", [None, "the-key-for-prompts"])
def test_what_each_key_opens(client, api_key):
    http = client(api_key=api_key, admin_api_key="the-admins-own-key")
    for path, needed in ROUTES.items():
        for key, opens in OPENS.items():
            answer = call(http, path, key)
            bound = key == TENANT and path in TOTALS
            expected = 403 if needed not in opens or bound else 404 if path == "/none" else 200
            assert answer.status_code == expected, (path, key)
            if expected == 403:
                reason = "counts all tenants" if bound else f"scope {needed}"
                assert reason in answer.json()["error"]["message"]
        assert call(http, "/health", key).status_code == 200


def test_other_keys_are_sglangs_to_check(client):
    http = client(api_key="the-key-for-prompts", admin_api_key="the-admins-own-key")
    for key in ("other", READ[:-1], READ + "x", "", "k\xe9y", f"{READ}\xe9"):
        assert http.get("/prompts", headers={"Authorization": f"Bearer {key}".encode("latin-1")}).status_code == 401
    assert http.get("/read").status_code == 401
    assert http.get("/read", headers={"Authorization": READ}).status_code == 401
    assert http.get("/read", headers={"Authorization": f"Basic {READ}"}).status_code == 401
    assert http.get("/read", headers={"Authorization": f"bearer {READ}"}).status_code == 200
    assert [call(http, path, "the-admins-own-key").status_code for path in ("/read", "/flush", "/prompts")] == [
        200,
        200,
        401,
    ]
    assert [call(http, path, "the-key-for-prompts").status_code for path in ("/read", "/prompts")] == [401, 200]


def test_a_key_of_a_tenant_sets_the_salt(client):
    http = client(api_key="the-key-for-prompts", admin_api_key="the-admins-own-key")
    for path in ("/read", "/prompts"):
        assert call(http, path, TENANT).json()["salts"] == ["a"]
        assert call(http, path, TENANT, **{"X-Cache-Salt": "a"}).json()["salts"] == ["a"]
        refused = call(http, path, TENANT, **{"x-cache-salt": "b"})
        assert refused.status_code == 403 and "bound to a tenant" in refused.json()["error"]["message"]
        twice = [("Authorization", f"Bearer {TENANT}"), ("X-Cache-Salt", "a"), ("X-Cache-Salt", "b")]
        assert http.get(path, headers=twice).status_code == 403
    assert call(http, "/read", READ, **{"X-Cache-Salt": "b"}).json()["salts"] == ["b"]


def test_who_sees_all_tenants(client):
    http = client(admin_api_key="the-admins-own-key")
    seen = {key: call(http, "/read", key).json()["all"] for key in (READ, CHUNKS, TENANT, ADMIN, "the-admins-own-key")}
    assert {key for key, all in seen.items() if all} == {ADMIN, "the-admins-own-key"}


def test_metrics_need_a_key_that_is_no_tenants(client):
    """They have the numbers of all tenants, and SGLang asks for none."""
    http = client(api_key="the-key-for-prompts", admin_api_key="the-admins-own-key")
    for path in ("/metrics", "/metrics/", "/metricsandmore", "/metrics?name[]=x"):
        assert http.get(path).status_code == 401, path
        for key, status in (("the-key-for-prompts", 401), (PROMPTS, 403), ("the-admins-own-key", 200), (READ, 200)):
            assert call(http, path, key).status_code == status, (path, key)


def test_sglang_still_counts_all_tenants_where_we_think(metrics):
    """The routes that we keep from tenants."""
    assert "/v1/loads" in http_server.app.openapi()["paths"]
    metrics(app := fastapi.FastAPI())
    ours, theirs = scopes._METRICS.path_regex, app.routes[-1].path_regex
    for path in ("/metrics", "/metrics/", "/metrics/a", "/metricsa", "/v1/metrics", "/metric"):
        assert bool(ours.match(path)) == bool(theirs.match(path)), path


def test_sglang_still_shows_its_keys_where_we_think(client):
    """The endpoints that we keep from applications."""
    shown = [route for route in http_server.app.router.routes if getattr(route, "endpoint", None) in scopes._SHOW_KEYS]
    assert {route.path for route in shown} == {"/server_info", "/get_server_info"}
