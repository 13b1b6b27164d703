"""LangChain: it passes content parts of type "chunk" through."""

from documents import QUESTION, orders, server_url
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    base_url=f"{server_url(__doc__)}/v1",
    api_key="none",
    model="default",
    temperature=0,
    max_tokens=16,
    extra_body={"link": "block"},
)
for order in orders():
    parts = [{"type": "chunk", "text": document} for document in order]
    answer = model.invoke(
        [SystemMessage("Answer from the documents."), HumanMessage([*parts, {"type": "text", "text": QUESTION}])]
    )
    print(repr(answer.content))
    print("cached tokens:", answer.usage_metadata.get("input_token_details", {}).get("cache_read", 0))
