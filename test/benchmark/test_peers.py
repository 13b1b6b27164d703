"""What benchmark.serving.peers sends, and in which order."""

import contextlib
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from benchmark.serving import peers

SIZE = peers.Size(3, 7)
DOCUMENTS = slice(1, 4)


@contextlib.contextmanager
def recording(status: int = 200):
    """The URL of a server that knows no model, and the requests that it got."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/completions"
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = json.dumps({"usage": {"prompt_tokens": 1}}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(peers, "SETTLE_S", 0)


def measured(kind: str) -> tuple[list[dict], list[dict]]:
    with recording() as (url, got):
        rows = list(peers.measure(peers.Server("one", kind, url), SIZE, seed=1))
    return rows, got


def split(ids: list[int]) -> list[list[int]]:
    """A prompt's parts, without the separators between them."""
    parts = " ".join(map(str, ids)).split(" 1001 1002 1003 ")
    return [[int(token) for token in part.split()] for part in parts]


def ids_of(body: dict) -> list[int]:
    return body["prompt"] if "prompt" in body else [token for part in body["segments"] for token in part["input_ids"]]


def test_all_kinds_get_the_same_prompts():
    sent = {kind: [ids_of(body) for body in measured(kind)[1]] for kind in ("chunks", "plain", "pieces")}
    assert sent["chunks"] == sent["plain"]
    whole = [ids for ids in sent["pieces"] if len(split(ids)) > 1]  # others are pieces to store
    cold = peers.UNCOUNTED + peers.COLD
    assert whole == [*sent["plain"][:cold], *sent["plain"][cold + 1 :]]
    pieces = [ids for ids in sent["pieces"] if len(split(ids)) == 1]
    assert pieces == split(sent["plain"][cold])[:-1]


def test_only_documents_are_chunks():
    _, got = measured("chunks")
    for body in got:
        chunks = [part["input_ids"] for part in body["segments"] if part["type"] == "chunk"]
        assert chunks == split(ids_of(body))[DOCUMENTS]


def test_orders():
    """New documents are cold; the stored ones come in new orders, then in the one in which they were stored."""
    rows, got = measured("plain")
    documents = [tuple(map(tuple, split(ids_of(body))[DOCUMENTS])) for body in got]
    cold, counted = peers.UNCOUNTED + peers.COLD, peers.UNCOUNTED + peers.STORED
    stored, reordered, same = documents[cold], documents[cold + 1 : cold + 1 + counted], documents[cold + 1 + counted :]
    assert len(set(itertools.chain(*documents[: cold + 1]))) == SIZE.count * (cold + 1)
    assert {frozenset(each) for each in reordered} == {frozenset(stored)} and len(set(reordered)) > 3
    assert set(same) == {stored} and len(same) == counted
    assert len({tuple(split(ids_of(body))[-1]) for body in got}) == len(got)  # questions
    counts = {row["phase"]: len(row["ms"]) for row in rows}
    assert counts == {"cold": peers.COLD, "new order": peers.STORED, "same order": peers.STORED}


def test_lmcache_stores_pieces_only():
    _, got = measured("pieces")
    for body in got:
        is_piece = len(split(body["prompt"])) == 1
        assert body.get("kv_transfer_params") == (None if is_piece else {"lmcache.skip_save": True})


def test_a_refusal_is_an_error():
    with recording(status=400) as (url, _), pytest.raises(requests.RequestException, match="400"):
        list(peers.measure(peers.Server("one", "plain", url), SIZE, seed=1))


def test_separator_becomes_its_ids(tmp_path):
    from transformers import AutoTokenizer

    peers.write_model(tmp_path)
    text = " ".join(f"t{token}" for token in peers.SEPARATOR)
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == [peers.BOS, *peers.SEPARATOR]


@pytest.mark.parametrize("text", ["one", "one=plain", "one=other@http://a", "one=http://a"])
def test_malformed_servers(text):
    with pytest.raises(ValueError, match=text):
        peers.Server.parse(text)
