"""Anthropic's client: documents as its blocks of type search_result, which become chunks."""

from collections.abc import Callable

import anthropic
from corpus import compare, search


def search_result(document: dict[str, str]) -> dict:
    return {
        "type": "search_result",
        "source": "https://en.wikipedia.org",
        "title": document["title"],
        "content": [{"type": "text", "text": document["text"]}],
    }


def pipeline(url: str) -> Callable[[str, bool], str]:
    client = anthropic.Anthropic(base_url=url, api_key="none")

    def answer(question: str, best_last: bool) -> str:
        results = list(map(search_result, search(question)))[:: -1 if best_last else 1]
        message = client.messages.create(
            model="default",
            system="Answer from the documents.",
            messages=[{"role": "user", "content": [*results, {"type": "text", "text": question}]}],
            max_tokens=16,
            extra_body={"link": "block"},
        )
        return message.content[0].text

    return answer


if __name__ == "__main__":
    compare(__doc__, pipeline)
