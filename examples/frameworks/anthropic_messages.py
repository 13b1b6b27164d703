"""Anthropic's client: documents as its blocks of type search_result, which become chunks."""

import anthropic
from documents import QUESTION, orders, server_url

client = anthropic.Anthropic(base_url=server_url(__doc__), api_key="none")
for order in orders():
    results = [
        {
            "type": "search_result",
            "source": "https://example.org",
            "title": "Sights",
            "content": [{"type": "text", "text": document}],
        }
        for document in order
    ]
    message = client.messages.create(
        model="default",
        system="Answer from the documents.",
        messages=[{"role": "user", "content": [*results, {"type": "text", "text": QUESTION}]}],
        max_tokens=16,
        extra_body={"link": "block"},
    )
    print(repr(message.content[0].text))
    print("cached tokens:", message.usage.cache_read_input_tokens or 0)
