"""A program with chunks in the frontend language, run by its local runtime: `python -m local_runtime MODEL`."""

import sys

from http_prompts import RIVER

import sglang_lazy as sgl
from sglang_lazy.testing import device_options


@sgl.function
def answer_from(s, document):
    s += "Read: " + sgl.chunk(document) + " Who?" + sgl.gen("answer", max_tokens=6, temperature=0, ignore_eos=True)


def main() -> None:
    runtime = sgl.Runtime(launch_timeout=600, model_path=sys.argv[1], max_total_tokens=8192, **device_options())
    try:
        state = answer_from.run(document=RIVER, backend=runtime)
        assert state.error() is None and state.get_meta_info("answer")["chunks"][0]["offset"] > 0
    finally:
        runtime.shutdown()


if __name__ == "__main__":
    main()
