"""Run the pipelines of examples/frameworks against a tiny server: what they send in another order must be reused, and
five retrieved documents must be five chunks.

Likewise the agents among the examples, which must reuse by chunks and by prefixes what their docstrings say.

usage: clients.py PYTHON, the interpreter of the environment that examples/frameworks/requirements.txt describes
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import requests

EXAMPLES = Path(__file__).parents[1] / "examples"
FRAMEWORKS = EXAMPLES / "frameworks"
sys.path[:0] = [str(EXAMPLES)]

# Behind the line that makes the first importable.
from tiny_model import tiny_server  # noqa: E402

from sglang_lazy.testing.server import wait_for  # noqa: E402

QUESTIONS = 4
LEAST = 90
"""Percent of the tokens to be reused in the second order: all but instructions, templates and questions."""


def output_of(*command: str | Path) -> str:
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # or DSPy's LiteLLM fetches a list of prices
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1200, env=env).stdout


def chunks_of_prompts(url: str) -> float:
    """How many chunks the server has seen in prompts."""
    metrics = requests.get(f"{url}/metrics", timeout=60).text
    return sum(map(float, re.findall(r"^sglang_lazy[:_]chunk_references_total\{.*\} (\S+)$", metrics, re.MULTILINE)))


def check_pipeline(python: str, program: Path, url: str) -> None:
    """Exits with a message unless the pipeline's documents are chunks and are reused."""
    requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    before = chunks_of_prompts(url)
    output = output_of(python, program, "--url", url, "--questions", str(QUESTIONS))
    expected = 5 * 2 * QUESTIONS  # in both orders
    if not wait_for(lambda: chunks_of_prompts(url) - before == expected, timeout=10):
        sys.exit(f"{program.name}: {expected} documents became {chunks_of_prompts(url) - before:.0f} chunks")
    shares = re.findall(r"^(best \w+: .* (\d+)%)$", output, re.MULTILINE)
    print(f"{program.name}:", "; ".join(line for line, _ in shares), flush=True)
    _, (_, second) = shares
    if int(second) < LEAST:
        sys.exit(f"{program.name}: its documents were not all reused")


def check_agent(program: Path, url: str) -> None:
    """Exits with a message unless the program prints the shares that its docstring states."""
    requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    output = output_of(sys.executable, program, "--url", url)
    print(output, flush=True)
    shares = sorted(re.findall(r"\d+%", output))
    says = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8")))
    if shares != sorted(re.findall(r"\d+%", says)):
        sys.exit(f"{program.name}: {', '.join(shares)} of the tokens are reused, not what it says")


def main() -> None:
    (python,) = sys.argv[1:]
    with tiny_server("--enable-cache-report", "--enable-metrics") as url:
        for program in sorted(FRAMEWORKS.glob("*.py")):
            if program.name != "corpus.py":
                check_pipeline(python, program, url)
        for program in sorted(EXAMPLES.glob("agent_*.py")):
            check_agent(program, url)


if __name__ == "__main__":
    main()
