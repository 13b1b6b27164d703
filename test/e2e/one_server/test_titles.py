"""Labels on a running server: where they show, and that they change no KV."""

import requests
from http_prompts import GREEDY, call, text

DOCUMENT = "A ferry crossed here until the bridge of 1902; its bell hangs in the town hall."
LEASE = {"name": "Ferry <b>1902</b>", "metadata": {"source": "ferry.txt", "page": 3}}


def shown(url, salt, path="/chunks", **query):
    return requests.get(url + path, params=query, headers={"X-Cache-Salt": salt}, timeout=60).json()


def labels(chunks):
    return [{"name": chunk["name"], "metadata": chunk["metadata"]} for chunk in chunks]


def prompt(**label):
    return [text("Read: "), {"type": "chunk", "text": DOCUMENT, **label}, text(" When?")]


def report(answer):
    return answer["meta_info"]["chunks"][0]


def test_labels_show_in_lists(server):
    body = {"cache_salt": "labels", "sampling_params": GREEDY}
    first = call(server, "/generate", segments=prompt(), **body)
    second = call(server, "/generate", segments=prompt(**LEASE), **body)
    assert not report(first)["hit"] and report(second)["hit"] and first["text"] == second["text"]
    name = report(first)["id"]
    listed = shown(server, "labels")
    assert listed["total"] == 1 and labels(listed["chunks"]) == [LEASE]
    assert labels(shown(server, "labels", f"/chunks/{name}")["chunks"]) == [LEASE]
    survey = shown(server, "labels", "/lazy/survey")
    assert labels(survey["hottest"]) == [LEASE]
    assert [chunk["name"] for chunk in survey["prompts"][0]["chunks"]] == [LEASE["name"]]
    used = shown(server, "labels", f"/lazy/uses/{name}")
    assert used["prompts"][0]["chunks"][0]["name"] == LEASE["name"]
    call(server, "/generate", segments=prompt(), **{**body, "cache_salt": "no labels"})
    assert labels(shown(server, "no labels")["chunks"]) == [{"name": None, "metadata": None}]


def test_every_api_takes_them(server):
    for path, body in {
        "/v1/completions": {"segments": prompt(name="completion")},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": prompt(name="chat")}]},
        "/v1/messages": {"messages": [{"role": "user", "content": prompt(name="message")}]},
        "/chunks": {"chunks": [{"text": DOCUMENT, "name": "registered"}], "wait": True},
    }.items():
        if path != "/chunks":
            body |= {"model": "m", "max_tokens": 1}
        call(server, path, **body, cache_salt="every api")
        chunks = shown(server, "every api")["chunks"]
        named = (body.get("chunks") or body.get("segments", body.get("messages", [{}])[0].get("content"))[1:])[0][
            "name"
        ]
        assert named in {chunk["name"] for chunk in chunks}, path


def test_a_deleted_chunk_loses_its_label(server):
    call(server, "/chunks", chunks=[{"text": DOCUMENT, **LEASE}], wait=True, cache_salt="deleted")
    (listed,) = shown(server, "deleted")["chunks"]
    requests.delete(f"{server}/chunks/{listed['id']}", headers={"X-Cache-Salt": "deleted"}, timeout=60)
    call(server, "/chunks", chunks=[DOCUMENT], wait=True, cache_salt="deleted")
    assert labels(shown(server, "deleted")["chunks"]) == [{"name": None, "metadata": None}]


def test_long_labels_are_refused(server):
    for label in ({"name": "x" * 257}, {"metadata": {"x": "x" * 2048}}):
        answer = requests.post(server + "/generate", json={"segments": prompt(**label)}, timeout=60)
        assert answer.status_code == 400 and "segments[1]: " in answer.json()["error"]["message"]
