"""Run the programs of examples/frameworks against a tiny server: what they send in another order must be reused.

Likewise examples/agent_skills.py, whose prompts must reuse by chunks and by prefixes what its docstring says.

usage: clients.py PYTHON, the interpreter of the environment that examples/frameworks/requirements.txt describes
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import requests
from transformers import AutoTokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
FRAMEWORKS = EXAMPLES / "frameworks"
sys.path[:0] = [str(EXAMPLES), str(FRAMEWORKS)]

# Behind the line that makes them importable.
from documents import DOCUMENTS  # noqa: E402
from tiny_model import tiny_model, tiny_server  # noqa: E402


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout


def main() -> None:
    (python,) = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokens = sum(len(tokenizer.encode(document, add_special_tokens=False)) for document in DOCUMENTS)
    programs = sorted(path for path in FRAMEWORKS.glob("*.py") if path.name != "documents.py")
    with tiny_server("--enable-cache-report") as url:
        for program in programs:
            requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
            first, second = map(int, re.findall(r"cached tokens: (\d+)", output_of(python, program, "--url", url)))
            print(f"{program.name}: {first} tokens reused of the first order, {second} of the second")
            # Tokens at a chunk's ends may differ from those of the document alone.
            if second - first < 0.95 * tokens:
                sys.exit(f"{program.name}: the documents have {tokens} tokens, and they were not all reused")
        agents = EXAMPLES / "agent_skills.py"
        output = output_of(sys.executable, agents, "--url", url)
        print(output)
        shares = sorted(re.findall(r"\d+%", output))
        says = ast.get_docstring(ast.parse(agents.read_text(encoding="utf-8")))
        if shares != sorted(re.findall(r"\d+%", says)):
            sys.exit(f"agent_skills.py: {' and '.join(shares)} of the tokens are reused, not what it says")


if __name__ == "__main__":
    main()
