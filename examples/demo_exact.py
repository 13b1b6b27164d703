"""Questions over documents in changing orders, answered by a small trained model with chunk reuse and without.

The model was trained for chunks, so answers are either right or wrong. It is in the repository: nothing is downloaded.

Starts a local server and asks it the questions of examples/data/worlds_sample.jsonl one after another. Prints each
answer next to the right one, how much of the prompt had to be computed and how long the first token took, and stops the
server.
"""

import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import requests
import torch
from sample import WORLDS, load_sample, without_chunks
from tiny_model import CACHE, TRAINED, tiny_server

from sglang_lazy.testing import Client, Generation, ServerError, log_tail
from sglang_lazy.verify.prompts import retrieval_segments
from sglang_lazy.verify.scores import exact_match

LOG = CACHE / "demo-server.log"
MAX_NEW_TOKENS = 8
WAYS = {"chunk reuse": lambda segments: segments, "prefix caching only": without_chunks}
"""How a prompt is sent: its documents as chunks, or the same tokens as plain text."""


def main() -> None:
    questions = load_sample(WORLDS)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    print(f"sglang-lazy on {device}: {len(questions)} questions about 24 invented people unknown to the model,")
    print("each with 10 to 12 documents in its own order. The model has 6.8 million parameters.\n", flush=True)
    with tiny_server(model=TRAINED, log=LOG) as url:
        client = Client(url)
        for way in WAYS:
            ask(client, way, questions[0])  # the first requests of a server are slower
        client.flush_cache()
        results = {way: [] for way in WAYS}
        for number, question in enumerate(questions, 1):
            print(f"{number:>2}  {question['question']}  [{question['answers'][0]}]")
            for way in WAYS:
                results[way].append(ask(client, way, question))
                print(f"    {way:19}  {describe(results[way][-1], question)}", flush=True)
    print(f"\n{'':19} {'right answers':>15} {'prompt tokens computed':>24} {'median TTFT':>13}")
    for way, answered in results.items():
        right = sum(is_right(result, question) for result, question in zip(answered, questions, strict=True))
        computed = sum(result.computed_tokens for result in answered)
        total = sum(result.prompt_tokens for result in answered)
        ttft = statistics.median(result.ttft for result in answered) * 1000
        print(f"{way:19} {f'{right} of {len(questions)}':>15} {f'{computed} of {total}':>24} {ttft:>10.0f} ms")
    print("\nAnswers can differ, since a document sent as a chunk does not see the documents before it. In such a")
    print("small model, prompt tokens cost little next to the server's work; the savings show in the tokens computed.")
    print(f"Server stopped; its log is {LOG}")


def ask(client: Client, way: str, question: dict) -> Generation:
    segments = WAYS[way](retrieval_segments(question))
    return client.generate({"segments": segments}, MAX_NEW_TOKENS, ignore_eos=False)


def is_right(result: Generation, question: dict) -> bool:
    return exact_match(result.text, question["answers"]) == 1


def describe(result: Generation, question: dict) -> str:
    """One line with the answer, whether it is right, and its cost."""
    verdict = "right" if is_right(result, question) else "wrong"
    work = f"{result.computed_tokens:>4} of {result.prompt_tokens} tokens computed"
    return f"{' '.join(result.text.split()):20} {verdict}  {work}, TTFT {result.ttft * 1000:>4.0f} ms"


def run(main: Callable[[], None], log: Path) -> None:
    """Run a demo whose server writes to `log`; exits with a short message on failure."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the server on the way out
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; no server is left")
    except (ServerError, requests.RequestException, openai.OpenAIError) as error:
        sys.exit(f"\nThe demo failed: {error}\n{log_tail(log)}")


if __name__ == "__main__":
    run(main, LOG)
