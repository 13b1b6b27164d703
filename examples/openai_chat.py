"""OpenAI's client: documents as content parts of type "chunk", and the reused tokens in the usage.

Starts a server with a tiny random-weight model unless --url names a running one (started with --enable-cache-report,
which the usage details need).
"""

import argparse

import openai
from sample import load_sample
from tiny_model import server_or_tiny

from sglang_lazy.verify.prompts import document_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    args = parser.parse_args()

    request = load_sample()[0]
    parts = [{"type": "chunk", "text": document_text(doc)} for doc in request["docs"]]
    with server_or_tiny(args.url, "--enable-cache-report") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        for order in (parts, parts[::-1]):
            completion = client.chat.completions.create(
                model="default",
                messages=[
                    {"role": "system", "content": "Answer from the documents."},
                    {"role": "user", "content": [*order, {"type": "text", "text": request["question"]}]},
                ],
                temperature=0,
                max_tokens=16,
            )
            print(repr(completion.choices[0].message.content))
            print(completion.usage.to_dict())


if __name__ == "__main__":
    main()
