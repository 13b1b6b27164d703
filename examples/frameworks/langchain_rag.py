"""LangChain: a ChatPromptTemplate keeps only the text of content parts, so separators around each document make chunks.

Messages that a program makes itself, without a template, may have parts `{"type": "chunk", "text": ...}`. Documents
are in a vector store, whose embedding needs no download: put yours in its place.
"""

import collections
import math
import re
import zlib
from collections.abc import Callable

from corpus import DOCUMENTS, SEPARATOR, TOP_K, compare, document_text
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI


class HashedWords(Embeddings):
    """TF-IDF: each word of a text adds to one of 4,096 places, the less the more of the corpus has it."""

    def __init__(self, corpus: list[str], places: int = 4096):
        self.places = places
        found = collections.Counter(place for text in corpus for place in set(self._places_of(text)))
        self.weights = [math.log(len(corpus) / (1 + found[place])) for place in range(places)]

    def embed_documents(self, texts):
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text):
        counts = collections.Counter(self._places_of(text))
        return [counts[place] * weight for place, weight in enumerate(self.weights)]

    def _places_of(self, text):
        return [zlib.crc32(word.encode()) % self.places for word in re.findall(r"\w+", text.lower())]


TEXTS = [document_text(document) for document in DOCUMENTS]
STORE = InMemoryVectorStore.from_documents([Document(text) for text in TEXTS], HashedWords(TEXTS))


PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from the documents."), ("user", "{context}Question: {question}")]
)


def best_first(documents: list[Document]) -> str:
    return "".join(f"{SEPARATOR}{document.page_content}{SEPARATOR}" for document in documents)


def best_last(documents: list[Document]) -> str:
    return best_first(documents[::-1])


def pipeline(url: str) -> Callable[[str, bool], str]:
    model = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model="default",
        temperature=0,
        max_tokens=16,
        extra_body={"chunk_separator": SEPARATOR},
    )

    def answer(question: str, last: bool) -> str:
        context = STORE.as_retriever(search_kwargs={"k": TOP_K}) | RunnableLambda(best_last if last else best_first)
        chain = {"context": context, "question": RunnablePassthrough()} | PROMPT | model | StrOutputParser()
        return chain.invoke(question)

    return answer


if __name__ == "__main__":
    compare(__doc__, pipeline)
