"""The demo without its server: the documents it asks about, its counts, and the table it prints at the end."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_lazy.testing import Generation

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def demo():
    """The demo's module, imported as when run: its neighbours are modules of the same folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import demo

        yield demo
        for name, module in list(sys.modules.items()):  # so that no other test imports its `sample`
            if Path(getattr(module, "__file__", None) or "/").parent == EXAMPLES:
                del sys.modules[name]


def test_documents_recur_but_no_prefix_does(demo):
    orders = demo.shuffled(1 + len(demo.QUESTIONS))
    assert len({order[0]["title"] for order in orders}) == len(orders)
    assert all(sorted(doc["title"] for doc in order) == sorted(demo.TITLES) for order in orders)
    assert orders == demo.shuffled(len(orders))


def test_each_answer_is_in_the_documents(demo):
    texts = [doc["text"] for doc in demo.shuffled(1)[0]]
    for gold in demo.QUESTIONS.values():
        assert sum(gold in text for text in texts) == 1


def event(text: str | None, usage=None):
    choices = [] if text is None else [SimpleNamespace(delta=SimpleNamespace(content=text))]
    return SimpleNamespace(choices=choices, usage=usage)


class Details(dict):
    to_dict = dict.copy


@pytest.mark.parametrize(
    ("details", "computed"),
    [(Details(cached_tokens=70, chunk_tokens=60), 30), (Details(cached_tokens=13), 87), (None, 100)],
)
def test_an_answer_is_streamed_and_counted(demo, capsys, details, computed):
    """Tokens of chunks are among the cached ones; requests without chunks lack the field, or all details."""
    sent = {}

    def create(**fields):
        sent.update(fields)
        return [
            event(""),
            event("In\n"),
            event("Rome"),
            event(None, SimpleNamespace(prompt_tokens=100, prompt_tokens_details=details)),
        ]

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    docs = [{"title": "A", "text": "a."}, {"title": "B", "text": "b."}]
    result = demo.ask(client, "base", docs, "Where?")
    assert (result.text, result.computed_tokens, result.prompt_tokens) == ("In\nRome", computed, 100)
    assert sent["extra_body"] == {"link": "base"}
    parts = sent["messages"][-1]["content"]
    assert [part["type"] for part in parts] == ["chunk", "chunk", "text"] and "Where?" in parts[-1]["text"]
    assert f"{computed} of 100 tokens computed" in capsys.readouterr().out


def test_table(demo):
    def answer(text: str, computed: int, ttft: float, full: str):
        return demo.Answer(Generation(text, 100, 100 - computed, 0, ttft), "Rome", full)

    full = [answer("In Rome", 90, 4.0, "In Rome"), answer("Athens", 92, 5.0, "Athens"), answer("Oslo", 99, 9.0, "Oslo")]
    base = [
        answer("in rome.", 10, 0.5, "In Rome"),
        answer("Sparta", 11, 0.7, "Athens"),
        answer("Oslo", 12, 0.6, "Oslo"),
    ]
    _, first, second = demo.table({"full": full, "base": base}).splitlines()
    assert first.split() == ["full", "1", "of", "3", "100%", "92", "5.00", "s"]
    assert second.split() == ["base", "1", "of", "3", "67%", "11", "0.60", "s"]


def test_without_the_package_the_exact_demo_runs(demo, monkeypatch, capsys):
    def unavailable():
        raise demo.subprocess.CalledProcessError(1, "pip")

    ran = []
    monkeypatch.setattr(demo, "smollm2", unavailable)
    monkeypatch.setattr(demo.demo_exact, "main", lambda: ran.append(True))
    demo.main()
    assert ran and "Running the exact demo instead" in capsys.readouterr().out
