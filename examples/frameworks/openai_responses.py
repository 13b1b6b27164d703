"""OpenAI's client and the Responses API: documents as content parts of type "chunk"."""

import openai
from documents import QUESTION, orders, server_url

client = openai.OpenAI(base_url=f"{server_url(__doc__)}/v1", api_key="none")
ENDS = "response.completed", "response.incomplete"  # the latter after max_output_tokens
(model,) = client.models.list()
for order in orders():
    parts = [{"type": "chunk", "text": document} for document in order]
    stream = client.responses.create(
        model=model.id,
        instructions="Answer from the documents.",
        input=[{"role": "user", "content": [*parts, {"type": "input_text", "text": QUESTION}]}],
        temperature=0,
        max_output_tokens=16,
        stream=True,
    )
    response = next(event.response for event in stream if event.type in ENDS)
    print(repr(response.output_text))
    print("cached tokens:", response.usage.input_tokens_details.cached_tokens)
