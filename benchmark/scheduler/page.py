"""Measures the scheduler's time for surveys, lists, gauges, deletions and garbage; takes screenshots of `/lazy`.

SGLang's own classes and our hooks run without a model. Half of the chunks fit on the device, and all fit into host
memory; prompts of the last hour draw chunks by a Zipf distribution from a set a tenth larger. Prints the
thread's CPU time in milliseconds: the 99th percentile and the maximum of the work between two batches, and the sum for
one complete survey, page or set of gauges. With `--out` they also go to a file, after a line with the environment. With
`--screenshots FOLDER` it serves the page, and a headless Chromium saves it there as PNG files.

    python -m benchmark.scheduler.page --resident 10 50000 --screenshots docs/images
"""

import argparse
import contextlib
import gc
import io
import json
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastapi
import numpy as np
import torch
import uvicorn
from sglang.srt.sampling.sampling_params import SamplingParams

from benchmark.scheduler.host import VOCAB_SIZE, Host
from benchmark.serving.arguments import positive, typed
from benchmark.serving.environment import describe_environment
from benchmark.serving.workloads import draw_distinct, zipf_weights
from fakes.context import published
from fakes.server import FakeServer, new_frontend
from sglang_lazy.chunks.counts import Census
from sglang_lazy.core.keys import Namespace, chunk_id
from sglang_lazy.core.segments import LAYOUT_PARAM, PromptLayout
from sglang_lazy.core.state import linked
from sglang_lazy.port.scheduler import upkeep
from sglang_lazy.port.scheduler.upkeep import cached_tokens_details
from sglang_lazy.scheduler.control import ChunkControl
from sglang_lazy.serving import chunk_calls, chunk_routes, page
from sglang_lazy.serving.chunk_lists import list_arguments
from sglang_lazy.serving.results import chunk_report
from sglang_lazy.testing.server import free_ports, wait_for

TEXT_LEN = 40_000
"""Tokens of the pool reserved for text."""
SHOTS = {
    "page": {"viewport": (1200, 900), "color_scheme": "light"},
    "dark": {"viewport": (1200, 900), "color_scheme": "dark"},
    "chunk": {"viewport": (1200, 780), "color_scheme": "light"},
    "phone": {"viewport": (390, 844), "color_scheme": "dark"},
}


class Scheduler(FakeServer):
    """Answers for the HTTP process."""

    def __init__(self, control: ChunkControl):
        super().__init__(has_admin_key=True)
        self.control = control

    def answer(self, verb: str, **arguments: Any) -> dict[str, Any]:
        return self.control.handle(verb, arguments, time.time())


class Served:
    """A scheduler with `num_chunks` chunks, and the HTTP process's record of its prompts."""

    def __init__(self, num_chunks: int, num_prompts: int, seed: int = 0):
        self.rng = random.Random(seed)
        num_documents = num_chunks + num_chunks // 10
        self.lengths = [min(600, int(self.rng.lognormvariate(4.6, 0.7)) + 8) for _ in range(num_documents)]
        self.weights = zipf_weights(num_documents, 0.9)
        size = sum(self.lengths)
        self.host = Host(True, size // 2 + TEXT_LEN, 20_000, "cpu", 2 * size)
        for number in self.rng.sample(range(num_documents), num_chunks):
            self.host.insert_chunk(self.document(number))
        self.control = self.host.admission.control
        self.frontend = new_frontend(Scheduler(self.control))
        now = time.time()
        for began in sorted(self.rng.triangular(0, 3600, 3600) for _ in range(num_prompts)):
            self.prompt(now - 3600 + began)
        pinned = sorted(self.host.tree_cache.store.catalog, key=lambda chunk: -chunk.hits)[1 : num_chunks // 2 : 3][:7]
        ids = [chunk_id(chunk.key.tokens) for chunk in pinned]
        self.control.handle("pin", {"tenant": None, "ids": ids, "pin": True, "ttl": None, "only": None}, now)

    def document(self, number: int) -> array:
        tokens = np.random.default_rng((1, number)).integers(VOCAB_SIZE, size=self.lengths[number])
        return array("q", tokens.tobytes())

    def prompt(self, answered: float) -> None:
        """Serve another prompt, answered at the given time."""
        chunks, ids = [], array("q")
        for number in draw_distinct(self.rng, self.weights, min(len(self.lengths), self.rng.choice((2, 3, 4, 5, 8)))):
            chunks.append((len(ids), len(ids) + self.lengths[number]))
            ids += self.document(number)
        ids.extend(self.rng.choices(range(VOCAB_SIZE), k=20))
        layout = PromptLayout(tuple(chunks))
        params = SamplingParams(max_new_tokens=1, custom_params={LAYOUT_PARAM: layout.pack()})
        params.normalize(None)
        req = self.host.request_class(f"request-{answered}", "", ids, params, vocab_size=VOCAB_SIZE)
        self.host.serve(req)
        details = cached_tokens_details(req, linked(req))
        report = chunk_report(layout, ids.tolist(), int(details["chunk_hits"], 16))
        self.frontend.usage.add(Namespace("chunk", None, None), "block", report, details["chunk"], answered)

    def pieces(self, verb: str, **arguments: Any) -> list[float]:
        """One complete survey, or one page of a list; returns the milliseconds of each piece."""
        times, starts = [], None
        while starts is None or starts[0] is not None:
            start = time.thread_time_ns()
            found = self.control.handle(verb, {"tenant": None, "starts": starts, **arguments}, time.time())
            times.append((time.thread_time_ns() - start) / 1e6)
            starts = {0: found["next"]}
        return times

    def gauges(self) -> list[float]:
        """One complete set of gauges; returns the milliseconds of each piece."""
        times, census, found = [], Census(self.host.tree_cache.store), None
        while found is None:
            start = time.thread_time_ns()
            found = census.step()
            times.append((time.thread_time_ns() - start) / 1e6)
        return times

    def collection(self, set_aside: bool) -> list[float]:
        """One full garbage collection.  set_aside: first freeze the objects that servers exclude from collection."""
        if set_aside:
            upkeep.freeze()
        start = time.thread_time_ns()
        gc.collect()
        times = [(time.thread_time_ns() - start) / 1e6]
        gc.unfreeze()
        return times

    def delete(self) -> list[float]:
        """Delete as many chunks as one message may name."""
        chunks, _ = self.host.tree_cache.store.catalog.scan(None, False, 0, chunk_calls.MAX_DELETED)
        ids = [chunk_id(chunk.key.tokens) for chunk in chunks[: chunk_calls.MAX_DELETED]]
        start = time.thread_time_ns()
        self.control.handle("delete", {"tenant": None, "ids": ids}, time.time())
        return [(time.thread_time_ns() - start) / 1e6]


WORK: dict[str, Callable[[Served], list[float]]] = {
    "survey": lambda served: served.pieces("survey", everybody=False),
    "page of 100": lambda served: served.pieces("page", **list_arguments(limit=100), everybody=False),
    "page of 1,000": lambda served: served.pieces("page", **list_arguments(limit=1000), everybody=False),
    "those on the host": lambda served: served.pieces("page", **list_arguments(state="host"), everybody=False),
    "gauges": Served.gauges,
    "deletion": Served.delete,
    "garbage": lambda served: served.collection(set_aside=False),
    "garbage, as served": lambda served: served.collection(set_aside=True),
}


@contextlib.contextmanager
def page_of(served: Served) -> Iterator[str]:
    """Serve the page for the length of a `with` block; yields its URL."""
    app, (port,) = fastapi.FastAPI(), free_ports(1)
    chunk_routes.add_routes(app, lambda: served.frontend)
    page.add_route(app)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert wait_for(lambda: server.started, timeout=30)
        yield f"http://127.0.0.1:{port}{page.PAGE_ROUTE}"
    finally:
        server.should_exit = True
        thread.join()


def shoot(browser: Any, url: str, name: str, file: Path) -> None:
    """Save the page as a PNG with few colours, as one of `SHOTS`."""
    from PIL import Image

    width, height = SHOTS[name]["viewport"]
    shown = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme=SHOTS[name]["color_scheme"], reduced_motion="reduce"
    )
    shown.goto(url)
    shown.locator("#hottest button").first.wait_for()
    if name == "chunk":
        shown.locator("#hottest button").first.evaluate("button => button.click()")
        shown.locator("#graph svg").wait_for()
    shown.wait_for_timeout(200)
    picture = shown.screenshot(full_page=name in ("page", "dark"))
    few = Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, kmeans=2, dither=Image.Dither.NONE)
    few.save(file, optimize=True)
    shown.close()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = typed(positive)
    parser.add_argument("--resident", type=count, nargs="+", default=[10, 1000, 10_000, 50_000], help="chunks")
    parser.add_argument("--prompts", type=count, default=1000)
    parser.add_argument("--times", type=count, default=20, help="repetitions of each measurement")
    parser.add_argument("--screenshots", type=Path, help="folder")
    parser.add_argument("--commit", help="recorded in the results; required without git")
    parser.add_argument("--out", type=Path, help="JSON lines are written to this file")
    parser.add_argument("--browser", default="/usr/bin/chromium-headless-shell")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    if args.out is not None:
        environment = describe_environment(commit=args.commit, seed=0, server_flags=[])
        args.out.write_text(json.dumps({"environment": environment}) + "\n", encoding="utf-8")
    with published("cpu"):
        for num_chunks in args.resident:
            served = Served(num_chunks, args.prompts)
            for what, work in WORK.items():
                times = [work(served) for _ in range(args.times)]
                pieces = [piece for of in times for piece in of]
                of_all = [np.percentile(pieces, 99), max(pieces), np.median([sum(of) for of in times])]
                p99, longest, total = (round(float(ms), 2) for ms in of_all)
                row = {"chunks": num_chunks, "what": what, "ms_p99": p99, "ms_max": longest, "ms_all": total}
                print(row, flush=True)
                if args.out is not None:
                    with open(args.out, "a", encoding="utf-8") as out:
                        print(json.dumps(row), file=out)
            if args.screenshots is None:
                continue
            from playwright.sync_api import sync_playwright

            args.screenshots.mkdir(parents=True, exist_ok=True)
            shown = Served(num_chunks, args.prompts)  # another: the measurements have deleted chunks
            with page_of(shown) as url, sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=args.browser)
                for name in SHOTS:
                    shoot(browser, url, name, args.screenshots / f"{name}-{num_chunks}.png")
                browser.close()


if __name__ == "__main__":
    main()
