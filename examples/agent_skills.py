"""Agents' tools and skills as chunks: the share of prompt tokens reused, compared with prefix caching.

Each request of an agent has the definitions of the tools and skills that its task needs in the system message, in an
order of its own. The same requests are answered twice: with chunks, and with `link` full, which leaves reuse to
SGLang's prefix cache. With the tiny model's tokenizer, chunks reuse 88% of 40 requests' tokens, the prefix cache 43%.

Starts a server with a tiny random-weight model unless --url names a running one (started with --enable-cache-report).
"""

import argparse
import json
import random

import requests
from tiny_model import server_or_tiny

SUBJECTS = ["calendar", "contract", "customer", "invoice", "mail", "meeting", "order", "parcel", "report", "ticket"]
VERBS = {
    "search": "Find every {0} that fits a query. Give the query in the words of the user; results are sorted by date.",
    "change": "Change one {0}. Look it up first, say what will be changed, and wait until the user has agreed.",
}
SKILL = """---
name: {0}-desk
description: Handles requests about any {0}, from the first question to the reply.
---
1. Find out which {0} is meant. If several fit, list at most five with their dates and ask.
2. Read the whole {0} before you answer, notes and attachments included.
3. Answer in at most three sentences, and quote the line of the {0} that the answer rests on.
4. If a {0} has to be changed, describe the change first. Never change two of them in one step.
5. Close with the number of the {0}, so that the user can find it again.
"""


def definitions(subject: str) -> list[str]:
    """What an agent needs for a subject: two tools as JSON, and a skill."""
    tools = [
        {
            "name": f"{verb}_{subject}",
            "description": text.format(subject),
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "number": {"type": "integer"}},
                "required": ["query"],
            },
        }
        for verb, text in VERBS.items()
    ]
    return [*(json.dumps(tool) + "\n" for tool in tools), SKILL.format(subject)]


def prompts(count: int, seed: int = 0) -> list[list[dict]]:
    """The messages of `count` tasks. Each needs two to four subjects, some of them popular."""
    rng = random.Random(seed)
    weights = [1 / rank for rank in range(1, len(SUBJECTS) + 1)]
    found = []
    for number in range(count):
        subjects = list(dict.fromkeys(rng.choices(SUBJECTS, weights, k=rng.randint(2, 4))))
        parts = [{"type": "chunk", "text": text} for subject in subjects for text in definitions(subject)]
        system = {"role": "system", "content": [{"type": "text", "text": "You are an agent.\n"}, *parts]}
        question = f"Task {number}: is there anything about {' and '.join(subjects)} that is still open?"
        found.append([system, {"role": "user", "content": question}])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--requests", type=int, default=40)
    args = parser.parse_args()

    with server_or_tiny(args.url, "--enable-cache-report") as url:
        for link, name in (("full", "prefix caching"), ("block", "chunks")):
            total = cached = 0
            for messages in prompts(args.requests):
                body = {"model": "default", "messages": messages, "link": link, "cache_salt": name, "max_tokens": 1}
                response = requests.post(f"{url}/v1/chat/completions", json=body, timeout=300)
                response.raise_for_status()
                usage = response.json()["usage"]
                total += usage["prompt_tokens"]
                cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
            print(f"{name}: {cached:,} of {total:,} prompt tokens reused, {cached / total:.0%}")


if __name__ == "__main__":
    main()
