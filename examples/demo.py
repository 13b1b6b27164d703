"""Real questions with their documents in changing orders, answered with chunk reuse and without.

Starts a server on this machine, sends the requests of examples/data one after another, prints what each reused and how
long its first token took, and stops the server.
"""

import signal
import statistics
import sys
from collections.abc import Callable

import requests
import torch
from sample import load_sample, without_chunks
from serving import Client, Generation, ServerError, log_tail
from tiny_model import CACHE, tiny_server

from sglang_lazy.verify.prompts import retrieval_segments

LOG = CACHE / "demo-server.log"
MAX_NEW_TOKENS = 8
ANSWER_WIDTH = 48
LIVE = sys.stdout.isatty()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped then too
    prompts = [retrieval_segments(request) for request in load_sample()]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    print(f"sglang-lazy on {device}: {len(prompts)} real questions, each with its 10 documents in an order of its own.")
    print("The model is small and its weights are random, so the answers are noise. The work and the reuse are real.")
    with tiny_server(log=LOG) as url:
        client = Client(url)
        for segments in (prompts[0], without_chunks(prompts[0])):
            client.generate({"segments": segments}, MAX_NEW_TOKENS)  # the first requests of a server are slower
        reuse = run(client, "Documents as chunks, reused at any offset:", prompts)
        plain = run(
            client,
            "The same prompts as plain text, reused as prefixes only:",
            [without_chunks(segments) for segments in prompts],
        )
    print(f"\n{'':24} {'prompt tokens computed':>24} {'median TTFT':>12}")
    for name, results in (("chunk reuse", reuse), ("prefix caching only", plain)):
        computed = sum(result.computed_tokens for result in results)
        total = sum(result.prompt_tokens for result in results)
        ttft = statistics.median(result.ttft for result in results)
        print(f"{name:24} {f'{computed} of {total}':>24} {ttft * 1000:>9.0f} ms")
    print("The answers differ because a document sent as a chunk does not see the documents before it.")
    print(f"\nServer stopped; its log is {LOG}")


def run(client: Client, title: str, prompts: list[list[dict]]) -> list[Generation]:
    """Send `prompts` in turn, beginning with an empty cache, and print a line for each as its answer arrives."""
    client.flush_cache()
    print(f"\n{title}\n  #   prompt   prefix   chunks      TTFT   answer", flush=True)
    results = []
    for number, segments in enumerate(prompts, 1):
        result = client.generate({"segments": segments}, MAX_NEW_TOKENS, on_text=live_answer(number))
        counts = f"{result.prompt_tokens:>8} {result.prefix_tokens:>8} {result.chunk_tokens:>8}"
        print(f"{number:>3} {counts} {result.ttft * 1000:>6.0f} ms   {one_line(result.text)}", flush=True)
        results.append(result)
    return results


def live_answer(number: int) -> Callable[[str], None]:
    """A receiver of pieces that shows the answer grow on the line its row will take."""
    pieces = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if LIVE:
            print(f"{number:>3} {'':37}   {one_line(''.join(pieces))}", end="\r", flush=True)

    return show


def one_line(text: str) -> str:
    """`text` without line breaks and control characters, cut to the table's width."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:ANSWER_WIDTH].ljust(ANSWER_WIDTH)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the server was stopped")
    except (ServerError, requests.RequestException) as error:
        sys.exit(f"\nThe demo failed: {error}\n{log_tail(LOG)}")
