"""LlamaIndex: a query engine joins its nodes to one text, so the nodes' template puts separators around each."""

from collections.abc import Callable

from corpus import DOCUMENTS, SEPARATOR, TOP_K, compare
from llama_index.core import PromptTemplate
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode
from llama_index.llms.openai_like import OpenAILike
from llama_index.retrievers.bm25 import BM25Retriever

NODES = [
    TextNode(
        text=document["text"],
        metadata={"title": document["title"]},
        text_template=SEPARATOR + "{metadata_str}\n{content}" + SEPARATOR,
    )
    for document in DOCUMENTS
]
PROMPT = PromptTemplate("Answer from the documents.\n\n{context_str}\n\nQuestion: {query_str}")


class BestLast(BaseNodePostprocessor):
    def _postprocess_nodes(self, nodes, query_bundle=None):
        return nodes[::-1]


def pipeline(url: str) -> Callable[[str, bool], str]:
    model = OpenAILike(
        api_base=f"{url}/v1",
        api_key="none",
        model="default",
        is_chat_model=True,
        temperature=0,
        max_tokens=16,
        context_window=4096,
        additional_kwargs={"extra_body": {"chunk_separator": SEPARATOR}},
    )
    retriever = BM25Retriever.from_defaults(nodes=NODES, similarity_top_k=TOP_K)
    engines = [
        RetrieverQueryEngine.from_args(
            retriever, llm=model, text_qa_template=PROMPT, node_postprocessors=postprocessors
        )
        for postprocessors in ([], [BestLast()])
    ]
    return lambda question, best_last: str(engines[best_last].query(question))


if __name__ == "__main__":
    compare(__doc__, pipeline)
