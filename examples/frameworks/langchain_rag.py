"""LangChain: a ChatPromptTemplate keeps only the text of content parts, so separators around each document make chunks.

Messages that a program makes itself, without a template, may have parts `{"type": "chunk", "text": ...}`.
"""

from collections.abc import Callable

from corpus import SEPARATOR, compare, document_text, search
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_openai import ChatOpenAI


class Search(BaseRetriever):
    def _get_relevant_documents(self, query, *, run_manager):
        return [Document(document_text(document)) for document in search(query)]


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
        context = Search() | RunnableLambda(best_last if last else best_first)
        chain = {"context": context, "question": RunnablePassthrough()} | PROMPT | model | StrOutputParser()
        return chain.invoke(question)

    return answer


if __name__ == "__main__":
    compare(__doc__, pipeline)
