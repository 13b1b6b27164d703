"""Chunks in the frontend language: the marks survive what the interpreter does to a program's text."""

import copy
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import sglang
from sglang.lang.backend import runtime_endpoint
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.tracer import extract_prefix_by_tracing

import sglang_lazy as sgl
from sglang_lazy.lang import program as language
from sglang_lazy.lang.marked_text import Mark, MarkedText
from sglang_lazy.lang.program import send

NAME = "0123456789abcdef"


class Recorder(BaseBackend):
    """Answers every call and keeps the prompts it was given."""

    def __init__(self):
        super().__init__()
        self.prompts = []

    def generate(self, s, sampling_params):
        self.prompts.append(s.text_)
        return " an answer", {}

    def generate_stream(self, s, sampling_params):
        self.prompts.append(s.text_)
        yield from ((" an", {}), (" answer", {}))

    def select(self, s, choices, temperature, choices_method):
        self.prompts.append([s.text_ + choice for choice in choices])
        return SimpleNamespace(decision=choices[0], meta_info={})

    def commit_lazy_operations(self, s):
        self.prompts.append(s.text_)


@pytest.fixture
def backend():
    return Recorder()


def text(value):
    return {"type": "text", "text": value}


def chunk(value):
    return {"type": "chunk", "text": value}


def test_our_package_has_sglangs_public_names_beside_its_own():
    assert sgl.function is sglang.function and sgl.RuntimeEndpoint is sglang.RuntimeEndpoint
    assert sgl.Runtime is not sglang.Runtime and issubclass(sgl.Runtime, runtime_endpoint.Runtime)
    for name in ("no_such_name", "lang_api", "_wrapped"):
        with pytest.raises(AttributeError, match=name):
            getattr(sgl, name)
    assert sgl.lang.__name__ == "sglang_lazy.lang", "submodules are our own"


@pytest.mark.slow
def test_import_has_no_side_effects():
    """Importing patches neither the import system nor SGLang, in either order, and does not import SGLang."""
    script = """
import sys
finders = list(sys.meta_path)
import sglang_lazy
assert sys.meta_path == finders and "sglang" not in sys.modules and "torch" not in sys.modules
import sglang
assert not hasattr(sglang, "chunk") and not hasattr(sglang, "link")
from sglang.lang.backend import runtime_endpoint
from sglang.utils import http_request
assert runtime_endpoint.http_request is http_request
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


@pytest.mark.parametrize("bad", ["", 3, None, b"bytes"])
def test_bad_chunks_are_refused(bad):
    with pytest.raises(ValueError):
        sgl.chunk(bad)
    with pytest.raises(ValueError):
        sgl.chunk(id=bad)
    with pytest.raises(ValueError, match="either a text or an id"):
        sgl.chunk("doc", id=NAME)


def test_chunk_in_an_f_string_is_refused():
    with pytest.raises(TypeError, match="f-string"):
        f"{sgl.chunk('doc')}"


def test_marks_follow_the_text():
    marked = "a" + MarkedText("doc", (Mark(0, 3),)) + "bc"
    assert marked == "adocbc" and marked.segments() == [text("a"), chunk("doc"), text("bc")]
    assert str(marked).chunks == marked.chunks == copy.deepcopy(marked).chunks
    assert (marked + marked).chunks == (Mark(1, 4), Mark(7, 10))
    assert marked[1:].segments() == [chunk("doc"), text("bc")]
    assert marked[2:].segments() == [text("ocbc")], "part of a chunk is plain text"
    assert marked[::-1].chunks == () and marked[0] == "a"
    assert json.dumps({"text": marked}) == '{"text": "adocbc"}'


def test_program(backend):
    @sgl.function
    def program(s, docs, question):
        s += "Documents: " + sgl.chunk(docs[0]) + "\n"
        s += sgl.chunk(docs[1])
        s += question + sgl.gen("answer")
        s += "!" + sgl.gen("more")

    state = program.run(docs=["first", "second"], question="why?", backend=backend)
    assert state.error() is None
    assert backend.prompts[0].segments() == [
        text("Documents: "), chunk("first"), text("\n"), chunk("second"), text("why?")
    ]  # fmt: skip
    assert backend.prompts[1].segments()[-1] == text("why? an answer!")
    assert state.text() == "Documents: first\nsecondwhy? an answer! an answer"


def test_chunks_by_id(backend):
    """They stay apart, and in their places, through forks and variables; the program's text refers to them."""

    @sgl.function
    def program(s, name):
        s += sgl.chunk(id=name) + sgl.chunk(id=name[::-1])
        s.sync()
        forks = s.fork(2)
        forks += " why?" + sgl.gen("x")
        forks.join()
        with s.var_scope("quoted"):
            s += sgl.chunk(id=name)
        s += s["quoted"] + sgl.gen("end")

    state = program.run(name=NAME, backend=backend)
    assert state.error() is None
    one, other = {"type": "chunk", "id": NAME}, {"type": "chunk", "id": NAME[::-1]}
    _, *forked, end = backend.prompts
    assert [prompt.segments() for prompt in forked] == [[one, other, text(" why?")]] * 2
    assert end.segments() == [one, other, one, one]
    assert state.text().startswith(f"[chunk {NAME}][chunk {NAME[::-1]}]")
    server = Server(200)
    send(server, "http://host/generate", json={"text": end})
    assert server.calls[-1][1]["segments"] == [one, other, one, one]


def test_roles_and_messages(backend):
    @sgl.function
    def program(s, doc):
        s += sgl.system("Be brief.")
        s += sgl.user("See: " + sgl.chunk(doc))
        with s.user():
            s += sgl.chunk(doc)
        s += sgl.assistant(sgl.gen("answer"))

    state = program.run(doc="doc", backend=backend)
    assert state.error() is None
    assert [segment for segment in backend.prompts[0].segments() if segment["type"] == "chunk"] == [chunk("doc")] * 2
    assert [message["content"] for message in state.messages()] == ["Be brief.", "See: doc", "doc", "an answer"]
    assert all(type(message["content"]) is str for message in state.messages())


def test_fork_select_and_variables(backend):
    @sgl.function
    def program(s, doc):
        s += "A " + sgl.chunk(doc) + " B "
        s.sync()  # SGLang commits the common prefix only if it is there when the program forks
        forks = s.fork(2)
        forks += lambda i: str(i) + sgl.gen("x")
        forks.join()
        with s.var_scope("quoted"):
            s += sgl.chunk("other")
        s += " C " + sgl.select("choice", choices=["yes", "no"])
        s += s["quoted"]
        s += sgl.gen("end")

    state = program.run(doc="doc", backend=backend)
    assert state.error() is None
    commit, *forked, choices, end = backend.prompts
    assert commit.segments() == [text("A "), chunk("doc"), text(" B ")]
    assert sorted(prompt.segments()[-1]["text"] for prompt in forked) == [" B 0", " B 1"]
    assert [prompt.segments()[-1] for prompt in choices] == [text(" C yes"), text(" C no")]
    assert [s["text"] for s in end.segments() if s["type"] == "chunk"] == ["doc", "other", "other"]


def test_streaming(backend):
    @sgl.function
    def program(s, doc):
        s += sgl.chunk(doc) + "?" + sgl.gen("answer")

    state = program.run(doc="doc", backend=backend, stream=True)
    assert "".join(state.text_iter()) == "doc? an answer"
    assert backend.prompts[0].segments() == [chunk("doc"), text("?")]


def test_tracing_keeps_chunks_and_stops_at_arguments(backend):
    @sgl.function
    def program(s, doc):
        s += "Always " + sgl.chunk("the preamble")
        s += sgl.chunk(doc)

    prefix = extract_prefix_by_tracing(program, backend)
    assert prefix.segments() == [text("Always "), chunk("the preamble")]


class Server:
    """Stands in for `http_request` to a server that does or does not know chunks."""

    def __init__(self, status):
        self.status = status
        self.calls = []

    def __call__(self, url, json=None, **kwargs):
        self.calls.append((url, json))
        return SimpleNamespace(status_code=self.status if json is None else 200)


@pytest.fixture(autouse=True)
def _forget_servers(monkeypatch):
    monkeypatch.setattr(language, "_known_servers", set())


def test_marked_text_is_sent_as_segments():
    server, marked = Server(200), "a" + MarkedText("doc", (Mark(0, 3),))
    send(server, "http://host/generate", json={"text": marked, "stream": True}, api_key="key")
    send(server, "http://host/generate", json={"text": [marked + "b", "c"]})
    assert server.calls == [
        ("http://host/lazy_info", None),
        ("http://host/generate", {"stream": True, "segments": [text("a"), chunk("doc")], "link": None}),
        (
            "http://host/generate",
            {"segments": [[text("a"), chunk("doc"), text("b")], [text("c")]], "link": [None, None]},
        ),
    ]


def test_link_is_sent_beside_the_segments():
    server, full = Server(200), MarkedText("", link="full")
    epic = sgl.link("base+epic").value
    marked = "a" + full + MarkedText("doc", (Mark(0, 3),))
    send(server, "http://host/generate", json={"text": marked})
    send(server, "http://host/generate", json={"text": [marked + "b", marked + epic]})
    (_, one), (_, two) = server.calls[1:]
    assert one == {"segments": [text("a"), chunk("doc")], "link": "full"}
    assert two["link"] == ["full", "base+epic:tokens=16"] and two["segments"] == [
        [text("a"), chunk("doc"), text("b")],
        one["segments"],
    ]


def test_link_follows_the_program(backend):
    @sgl.function
    def program(s, doc, how):
        s += "See " + sgl.chunk(doc)
        s += sgl.gen("default")
        s += sgl.user(sgl.link(how) + sgl.chunk("other") + "?")
        s.sync()
        forks = s.fork(2)
        forks += sgl.gen("x")
        forks.join()
        s += sgl.link("block") + sgl.gen("end")

    state = program.run(doc="doc", how="full", backend=backend)
    assert state.error() is None
    assert [prompt.link for prompt in backend.prompts] == [None, "full", "full", "full", "block"]
    assert backend.prompts[0] == "See doc" and copy.deepcopy(backend.prompts[1]).link == "full"


@pytest.mark.parametrize("bad", ["", "blok", None, 1])
def test_bad_links_are_refused(bad):
    with pytest.raises(ValueError, match="link must be one of 'block', 'full', 'epic'"):
        sgl.link(bad)
    with pytest.raises(ValueError, match="ratio must be of type float, got 'much'"):
        sgl.link("query:ratio=much")


def test_plain_text_is_sent_unchanged():
    server, json = Server(404), {"text": MarkedText("plain")}
    send(server, "http://host/generate", json=json)
    assert server.calls == [("http://host/generate", json)] and server.calls[0][1] is json


def test_a_server_without_the_plugin_is_a_clear_error():
    with pytest.raises(RuntimeError, match="does not understand chunks.*sglang_lazy.launch_server"):
        send(Server(404), "http://host/generate", json={"text": MarkedText("doc", ((0, 3),))})


def test_only_the_first_chunk_hooks_the_client():
    sgl.chunk("doc")
    hooked = runtime_endpoint.http_request
    assert hooked.__wrapped__.__module__ == "sglang.utils"
    sgl.chunk("doc")
    assert runtime_endpoint.http_request is hooked
