"""Haystack: a prompt builder's template makes one text, so it writes separators around each document."""

from collections.abc import Callable

from corpus import DOCUMENTS, SEPARATOR, TOP_K, compare, document_text
from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.retrievers import InMemoryBM25Retriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret

TEMPLATE = [
    ChatMessage.from_system("Answer from the documents."),
    ChatMessage.from_user(
        "{% for document in documents[:: -1 if best_last else 1] %}"
        + SEPARATOR
        + "{{ document.content }}"
        + SEPARATOR
        + "{% endfor %}Question: {{ question }}"
    ),
]


def pipeline(url: str) -> Callable[[str, bool], str]:
    store = InMemoryDocumentStore()
    store.write_documents([Document(content=document_text(document)) for document in DOCUMENTS])
    rag = Pipeline()
    rag.add_component("retriever", InMemoryBM25Retriever(store, top_k=TOP_K))
    rag.add_component("prompt", ChatPromptBuilder(TEMPLATE, required_variables="*"))
    generator = OpenAIChatGenerator(
        api_base_url=f"{url}/v1",
        api_key=Secret.from_token("none"),
        model="default",
        generation_kwargs={"temperature": 0, "max_tokens": 16, "extra_body": {"chunk_separator": SEPARATOR}},
    )
    rag.add_component("generator", generator)
    rag.connect("retriever", "prompt.documents")
    rag.connect("prompt", "generator")

    def answer(question: str, best_last: bool) -> str:
        inputs = {"retriever": {"query": question}, "prompt": {"question": question, "best_last": best_last}}
        (reply,) = rag.run(inputs)["generator"]["replies"]
        return reply.text

    return answer


if __name__ == "__main__":
    compare(__doc__, pipeline)
