"""LlamaIndex: its messages have no chunks, so separators in plain text, two for each, mark the documents."""

from documents import QUESTION, orders, server_url
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

SEPARATOR = "<|document|>"

model = OpenAILike(
    api_base=f"{server_url(__doc__)}/v1",
    api_key="none",
    model="default",
    is_chat_model=True,
    temperature=0,
    max_tokens=16,
    additional_kwargs={"extra_body": {"chunk_separator": SEPARATOR}},
)
for order in orders():
    response = model.chat(
        [
            ChatMessage(role="system", content="Answer from the documents."),
            ChatMessage(role="user", content="Read: " + "".join(SEPARATOR + d + SEPARATOR for d in order) + QUESTION),
        ]
    )
    print(repr(response.message.content))
    details = response.raw.usage.prompt_tokens_details  # None if nothing was cached
    print("cached tokens:", details.cached_tokens if details else 0)
