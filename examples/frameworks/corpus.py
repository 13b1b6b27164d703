"""Shared by the pipelines here: a corpus, a search, questions, and how much of the prompts a server reused."""

import argparse
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import bm25s
import httpx

TOP_K = 5
SEPARATOR = "<|document|>"
"""Before and after each document in frameworks that pass on nothing but text; no document contains it."""

_requests = [
    json.loads(line) for line in (Path(__file__).parents[1] / "data/2wiki_sample.jsonl").open(encoding="utf-8")
]
DOCUMENTS = list({doc["id"]: doc for request in _requests for doc in request["docs"]}.values())
"""Passages of Wikipedia, each with `title` and `text`."""
QUESTIONS = [request["question"] for request in _requests]


def document_text(document: dict[str, str]) -> str:
    """A document as it stands in a prompt: always the same bytes, with the white space at its end."""
    return f"{document['title']}\n{document['text']}\n\n"


_index = bm25s.BM25()
_index.index(bm25s.tokenize(list(map(document_text, DOCUMENTS)), show_progress=False), show_progress=False)


def search(question: str) -> list[dict[str, str]]:
    """The five best documents by BM25, best first."""
    query = bm25s.tokenize(question, show_progress=False)
    (found,), _ = _index.retrieve(query, DOCUMENTS, k=TOP_K, show_progress=False)
    return list(found)


def counted(url: str) -> tuple[int, int, int]:
    """How many requests the server has answered, the tokens of their prompts, and of these the reused ones."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    names = "num_requests_total", "prompt_tokens_total", "cached_tokens_total"
    values = (re.findall(rf"^sglang[:_]{name}\{{.*\}} (\S+)$", text, re.MULTILINE) for name in names)
    requests, prompt, cached = (int(sum(map(float, found))) for found in values)
    return requests, prompt, cached


def compare(description: str, pipeline: Callable[[str], Callable[[str, bool], str]]) -> None:
    """Ask the questions with the best document first, then with the best one last, which is next to the question, and
    print the share of prompt tokens reused in each order. A prefix cache reuses next to nothing in the second.

    pipeline: gets the server's URL, and returns what answers a question, with the best document last if true.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="a server with chunk reuse, started with --enable-metrics")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="how many to ask")
    args = parser.parse_args()
    answer = pipeline(args.url)
    questions = QUESTIONS[: args.questions]
    for best_last in (False, True):
        before = counted(args.url)
        for question in questions:
            print(repr(answer(question, best_last)))
        while (after := counted(args.url))[0] < before[0] + len(questions):  # they are counted after the answer
            time.sleep(0.1)
        _, prompt, cached = (now - then for now, then in zip(after, before, strict=True))
        order = "best last" if best_last else "best first"
        print(f"{order}: {cached:,} of {prompt:,} prompt tokens reused, {cached / prompt:.0%}")
