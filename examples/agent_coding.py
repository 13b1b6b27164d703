"""A coding agent's loop with tool results as chunks: the share of tokens reused, compared with prefix caching.

Each task reads a skill and files, searches, edits, runs tests, and reads the edited file again; each turn sends all of
it so far. Two agents: one keeps every result, the other, to save context, only the last four, and a line in place of
older ones, which ends the prefix that a cache can reuse. All turns are sent with chunks, and with `link` full, which
leaves reuse to SGLang's prefix cache. With the tiny model's tokenizer, of 8 tasks:

- all results kept: the prefix cache reuses 83%, chunks 89%
- last four kept: the prefix cache reuses 27%, chunks 80%

Starts a server with a tiny random-weight model unless --url names a running one (started with --enable-cache-report).
"""

import argparse
import random
from collections.abc import Iterator

import requests
from tiny_model import server_or_tiny

SYSTEM = "You are a coding agent. Each answer is one call of a tool: read, search, edit or test."
SKILL = """---
name: change-code
description: How changes to this repository are made.
---
1. Read the file, and those that it imports, before you edit it.
2. Change as little as the task needs, and keep names, style and comments as they are.
3. Run the tests after each edit. If one fails, read the file again before the next edit.
4. Say in one sentence what was changed, and name the tests that ran.
"""
MODULES = ["orders", "customers", "invoices", "parcels", "stock", "prices", "mail", "reports"]
CODE = '''"""All that the shop knows about {0}."""

from store import Missing, Table

TABLE = Table("{0}", key="number")


def add_{0}(rows):
    """Add new {0}. Raises ValueError if one of them has a number that is taken."""
    taken = [row["number"] for row in rows if row["number"] in TABLE]
    if taken:
        raise ValueError(f"{0}: {{taken}} are taken")
    TABLE.extend(rows)


def find_{0}(query, limit={1}):
    """The {0} that fit a query, the newest first, at most `limit` of them."""
    found = [row for row in TABLE if all(row.get(name) == value for name, value in query.items())]
    return sorted(found, key=lambda row: row["date"], reverse=True)[:limit]


def remove_{0}(number):
    """Remove one of the {0}. Raises Missing if there is none with this number."""
    if number not in TABLE:
        raise Missing("{0}", number)
    del TABLE[number]
'''
KEPT = 4
CLEARED = "[an old result, removed]"


def results(task: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """The calls of a task, each with its result."""
    weights = [1 / rank for rank in range(1, len(MODULES) + 1)]
    module, imported, *_ = dict.fromkeys(rng.choices(MODULES, weights, k=20))
    limit = 50 + task
    yield "read skills/change-code.md", SKILL
    yield (
        f"search find_{module}",
        f"{module}.py:18: def find_{module}(query, limit=20):\nviews.py:{task + 40}: find_{module}(",
    )
    yield f"read {module}.py", CODE.format(module, 20)
    yield f"read {imported}.py", CODE.format(imported, 20)
    yield f"edit {module}.py: limit={limit}", "1 line changed"
    yield f"test {module}", f"FAILED test_{module}.py::test_find: assert {limit} == 20\n1 failed, {7 + task} passed"
    yield f"read {module}.py", CODE.format(module, limit)
    yield f"edit test_{module}.py: {limit}", "1 line changed"
    yield f"test {module}", f"{8 + task} passed"


def prompts(num_tasks: int, kept: int | None) -> Iterator[list[dict]]:
    """The messages of each turn. kept: the number of results that stay whole, or None for all."""
    rng = random.Random(0)
    for task in range(num_tasks):
        turns = []
        for call, result in results(task, rng):
            turns.append((call, result))
            old = len(turns) - kept if kept else 0
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Task {task}: more rows."}]
            for number, (earlier, text) in enumerate(turns):
                messages.append({"role": "assistant", "content": earlier})
                messages.append({"role": "tool", "content": CLEARED if number < old else text})
            yield messages


def reused(url: str, turns: Iterator[list[dict]], salt: str, **options) -> str:
    """The share of the turns' tokens that a server reuses, from an empty cache."""
    total = cached = 0
    for messages in turns:
        body = {"model": "default", "messages": messages, "cache_salt": salt, "max_tokens": 1, **options}
        response = requests.post(f"{url}/v1/chat/completions", json=body, timeout=300)
        response.raise_for_status()
        usage = response.json()["usage"]
        total += usage["prompt_tokens"]
        cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return f"{cached:,} of {total:,} prompt tokens reused, {cached / total:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--tasks", type=int, default=8)
    args = parser.parse_args()

    with server_or_tiny(args.url, "--enable-cache-report") as url:
        for agent, kept in (("all results kept", None), (f"last {KEPT} kept", KEPT)):
            for way, link in (("prefix caching", "full"), ("chunks", "block")):
                options = {"link": link, "chunk_roles": ["tool"]}
                print(f"{agent}, {way}: {reused(url, prompts(args.tasks, kept), f'{agent} {way}', **options)}")


if __name__ == "__main__":
    main()
