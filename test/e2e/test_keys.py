"""A server with an API key and an admin key: chunk routes take the key that SGLang's cache routes take."""

import json

import pytest
import requests
from http_prompts import chunk, text
from playwright.sync_api import expect

from sglang_lazy.serving.keys import HIDDEN
from sglang_lazy.testing import device_flags, running_server

pytestmark = pytest.mark.slow  # test/unit/test_routes_of_chunks.py has every choice of keys, without a server

DOCUMENT = "The lock keeper had one key for all four gates."


APPLICATION, READER, OPERATOR = "the-key-of-tenant-a", "the-key-of-a-reader", "another-key-of-admins"
FILE = [
    {"key": APPLICATION, "scopes": ["chunks", "prompts"], "tenant": "a"},
    {"key": READER, "scopes": ["read"]},
    {"key": OPERATOR, "scopes": ["admin"]},
]


@pytest.fixture(scope="module")
def url(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys.json").write_text(json.dumps(FILE))
    flags = ["--model-path", tiny_model, "--max-total-tokens", "4000", *device_flags()]
    flags += ["--api-key", "key", "--admin-api-key", "admin", "--lazy-keys", str(folder / "keys.json")]
    flags += ["--enable-metrics"]
    with running_server(flags, folder / "server.log") as url:
        yield url


def call(url, method, path, key, **body):
    headers: dict = {"X-Cache-Salt": "tenant"}
    if key is not None:
        headers["Authorization"] = b"Bearer " + (key if isinstance(key, bytes) else key.encode())
    return requests.request(method, url + path, json=body or None, headers=headers, timeout=60)


def test_which_key_opens_which_route(url):
    registered = call(url, "POST", "/chunks", "admin", chunks=[DOCUMENT], wait=True)
    (name,) = registered.json()["affected"]
    calls = [
        ("POST", "/chunks", {"chunks": [DOCUMENT], "wait": True}),
        ("GET", "/chunks", {}),
        ("GET", "/chunks?all=true", {}),
        ("GET", f"/chunks/{name}", {}),
        ("GET", "/lazy", {}),
        ("GET", "/lazy/survey", {}),
        ("GET", "/lazy/survey?all=true", {}),
        ("GET", f"/lazy/uses/{name}", {}),
        ("PATCH", f"/chunks/{name}", {"ttl": 60}),
        ("DELETE", f"/chunks?id={'0' * 16}", {}),
        ("DELETE", f"/chunks/{name}", {}),
    ]
    for method, path, body in calls:
        for key in (None, "other", "key", "\xe4".encode()):  # the last one is not ASCII
            refused = call(url, method, path, key, **body)
            assert refused.status_code == 401 and name not in refused.text, (method, path, key)
            assert call(url, "POST", "/flush_cache", key).status_code == 401
        if method != "DELETE":
            assert call(url, method, path, "admin", **body).status_code == 200, (method, path)
    segments = [text("Read: "), {"type": "chunk", "id": name}, text(" Who?")]
    for key, status in ((None, 401), ("admin", 401), ("key", 200)):  # it needs the key for prompts
        assert call(url, "POST", "/generate", key, segments=segments).status_code == status
        assert call(url, "GET", "/lazy_info", key).status_code == status
    for method, path, body in calls[-2:]:
        assert call(url, method, path, "admin", **body).status_code == 200, (method, path)
    answer = call(url, "POST", "/generate", "key", segments=[text("Read: "), chunk(DOCUMENT), text(" Who?")])
    assert [one["hit"] for one in answer.json()["meta_info"]["chunks"]] == [False]


def test_an_application_manages_its_tenants_chunks(url):
    """With one key, and without naming its tenant; it reaches neither others' chunks nor what acts on everybody."""

    def ask(method, path, key=APPLICATION, salt=None, **body):
        headers = {"Authorization": f"Bearer {key}", **({"X-Cache-Salt": salt} if salt else {})}
        return requests.request(method, url + path, json=body or None, headers=headers, timeout=60)

    (name,) = ask("POST", "/chunks", chunks=[DOCUMENT], wait=True, pin=True).json()["affected"]
    (listed,) = ask("GET", "/chunks").json()["chunks"]
    assert (listed["id"], listed["cache_salt"], listed["pinned"]) == (name, "a", True)
    prompt = [text("Read: "), {"type": "chunk", "id": name}, text(" Who?")]
    for path in ("/generate", "/v1/completions"):
        answer = ask("POST", path, segments=prompt)
        assert answer.status_code == 200, answer.text
    message = {"role": "user", "content": prompt}
    assert ask("POST", "/v1/chat/completions", model="m", messages=[message], max_tokens=1).status_code == 200
    assert ask("GET", f"/chunks/{name}").json()["chunks"][0]["hits"] == 3
    assert ask("POST", "/generate", "key", segments=prompt).status_code == 404  # another tenant knows no such id
    assert ask("POST", "/generate", segments=prompt, cache_salt="b").status_code == 400
    assert ask("POST", "/chunks", chunks=["x"], cache_salt="b").status_code == 400
    assert ask("GET", "/chunks", salt="b").status_code == 403
    for path in ("/chunks?all=true", "/server_info", "/flush_cache", "/lazy/survey?all=true", "/v1/loads", "/metrics"):
        assert ask("GET", path).status_code == 403, path
    assert requests.get(f"{url}/metrics", timeout=60).status_code == 401
    assert "sglang_lazy" in ask("GET", "/metrics", OPERATOR).text and ask("GET", "/v1/loads", OPERATOR).json()["loads"]
    memory = ask("GET", "/lazy/survey").json()["memory"]["device"]
    assert memory["size"] and memory["free"] is None
    assert ask("GET", "/chunks", READER, "a").json()["chunks"][0]["id"] == name
    for method, path in (
        ("DELETE", f"/chunks/{name}"),
        ("POST", "/chunks"),
        ("POST", "/generate"),
        ("GET", "/v1/models"),
    ):
        assert ask(method, path, READER, "a").status_code == 403, path
    assert ask("GET", "/chunks?all=true", OPERATOR).json()["total"] >= 1
    shown = ask("GET", "/server_info", OPERATOR)
    assert shown.status_code == 200 and shown.json()["port"]
    assert shown.json()["admin_api_key"] == shown.json()["internal_states"][0]["admin_api_key"] == HIDDEN
    assert "--admin-api-key admin" not in shown.text
    for key in (APPLICATION, READER, OPERATOR):
        assert key not in shown.text and key not in ask("GET", "/lazy_info", OPERATOR).text
    assert ask("DELETE", f"/chunks/{name}").json()["affected"] == [{"id": name, "state": "deleted"}]
    assert ask("POST", "/flush_cache", OPERATOR).status_code == 200


def test_the_page_asks_for_the_key(url, browser):
    """A tenant's chunks are visible to whoever has the key and names the tenant, or asks for all tenants."""
    answer = call(url, "POST", "/generate", "key", segments=[text("Read: "), chunk(DOCUMENT), text(" Who?")])
    (used,) = answer.json()["meta_info"]["chunks"]
    page = browser.new_page()
    assert page.goto(f"{url}/lazy").status == 401
    secret, open_it, numbers = (
        page.locator("#secret"),
        page.get_by_role("button", name="Open"),
        page.locator("#numbers"),
    )
    refused_key = page.get_by_text("The server refused that key.")
    secret.fill("schlüssel")  # which no header can carry
    expect(refused_key).to_be_hidden()
    open_it.click()
    expect(refused_key).to_be_visible()
    for wrong in ("other", "key"):
        secret.fill(wrong)
        with page.expect_response("**/lazy/survey?*") as refused:
            open_it.click()
        assert refused.value.status == 401
        expect(numbers).to_be_hidden()
        expect(refused_key).to_be_visible()
        assert used["id"] not in page.content()
    page.goto(f"{url}/lazy#{used['id']}/tenant")
    page.reload()
    expect(secret).to_be_visible()
    expect(refused_key).to_be_hidden()
    secret.fill("admin")
    open_it.click()
    expect(page.locator("#chunk-id")).to_have_text(used["id"])  # the address waited for the key
    expect(page.locator("#facts")).to_contain_text("tenant")
    page.keyboard.press("Escape")
    expect(numbers).to_be_visible()
    expect(secret).to_be_hidden()
    expect(page.locator("#n-chunks")).to_have_text("0")
    memory = page.locator("#memory")
    expect(memory).to_contain_text("taken")
    page.locator("#salt").fill("tenant")
    expect(page.locator("#n-chunks")).to_have_text("1")
    expect(memory).not_to_contain_text("taken")
    expect(memory).to_contain_text("text, other tenants, free")
    page.locator("#salt").fill("")
    page.get_by_label("all tenants").check()
    expect(memory).to_contain_text("taken")
    block = page.locator(f"#prompts [data-chunk='{used['id']}']").first
    block.click()
    expect(page.locator("#facts")).to_contain_text("tenant")
    page.keyboard.press("Escape")
    page.reload()  # the key is kept
    expect(numbers).to_be_visible()
    assert "admin" not in page.url
    page.close()
    other = browser.new_page()  # but not in another tab
    assert other.goto(f"{url}/lazy").status == 401
    expect(other.locator("#secret")).to_be_visible()
    other.close()


def test_the_page_takes_another_key(url, browser):
    """After a refusal of what the first one does not open, and of a tenant's; the page returns to where it was."""
    call(url, "POST", "/chunks", "admin", chunks=[DOCUMENT], wait=True)
    (listed,) = call(url, "GET", "/chunks", "admin").json()["chunks"]
    page = browser.new_page()
    page.goto(f"{url}/lazy#{listed['id']}/tenant")
    secret, acted, pin = page.locator("#secret"), page.locator("#acted"), page.locator("#pin")

    def enter(key):
        secret.fill(key)
        page.get_by_role("button", name="Open").click()

    enter(READER)
    pin.click()
    expect(acted).to_have_text("It did not work: this route needs a key with the scope chunks, and this key has read")
    assert not call(url, "GET", f"/chunks/{listed['id']}", "admin").json()["chunks"][0]["pinned"]
    page.get_by_role("button", name="Enter another key").click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.locator("#keep").click()  # without another one, it goes on
    page.get_by_role("button", name="Enter another key").or_(pin).first.wait_for()
    pin.click()
    page.get_by_role("button", name="Enter another key").click()
    enter("admin")
    expect(page.locator("#chunk-id")).to_have_text(listed["id"])
    pin.click()
    expect(acted).to_have_text("It is pinned.")
    assert call(url, "GET", f"/chunks/{listed['id']}", "admin").json()["chunks"][0]["pinned"]
    page.keyboard.press("Escape")

    page.get_by_role("button", name="Another key").click()
    enter(READER)
    expect(page.locator("#numbers")).to_be_visible()
    page.get_by_label("all tenants").check()
    expect(page.locator("#message")).to_contain_text("needs a server with --admin-api-key")
    expect(secret).to_be_visible()
    enter(OPERATOR)
    expect(page.locator("#message")).to_be_hidden()
    expect(page.locator(f"[data-chunk='{listed['id']}']").first).to_be_visible()
    page.close()
