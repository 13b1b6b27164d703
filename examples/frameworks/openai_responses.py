"""OpenAI's client and the Responses API: documents as content parts of type "chunk"."""

from collections.abc import Callable

import openai
from corpus import compare, document_text, search

ENDS = "response.completed", "response.incomplete"  # the latter after max_output_tokens


def pipeline(url: str) -> Callable[[str, bool], str]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    (model,) = client.models.list()

    def answer(question: str, best_last: bool) -> str:
        found = search(question)
        parts = [{"type": "chunk", "text": document_text(document)} for document in found[:: -1 if best_last else 1]]
        stream = client.responses.create(
            model=model.id,
            instructions="Answer from the documents.",
            input=[{"role": "user", "content": [*parts, {"type": "input_text", "text": question}]}],
            temperature=0,
            max_output_tokens=16,
            stream=True,
        )
        return next(event.response for event in stream if event.type in ENDS).output_text

    return answer


if __name__ == "__main__":
    compare(__doc__, pipeline)
