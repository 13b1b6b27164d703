"""The page of `.ci/next`, in Markdown: versions, the check of the hooks, and each failing test by module.

usage: next_page.py HOOKS RESULTS...: what tools.hook_check printed, and pytest's results as JUnit XML
"""

import importlib.metadata
import platform
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

DISTRIBUTIONS = ("sglang", "sglang-kernel", "flashinfer-python", "torch", "transformers")


def versions() -> str:
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    others = []
    for name in DISTRIBUTIONS:
        try:
            others.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            others.append(f"no {name}")
    return f"Commit {commit}, Python {platform.python_version()}, {', '.join(others)}."


def error_of(case: ElementTree.Element) -> str | None:
    """The line that says most of why a test failed: of a failed assertion the first, of others the last."""
    failed = case.find("error") if case.find("failure") is None else case.find("failure")
    if failed is None:
        return None
    lines = [line for line in failed.get("message", "").splitlines() if line.strip()]
    if lines == ["collection failure"]:
        lines = [line[1:] for line in failed.text.splitlines() if line.startswith("E ")]
    return (lines[0 if lines[0].startswith(("assert ", "AssertionError")) else -1] if lines else "no message").strip()


def tests(results: Path) -> list[str]:
    """Modules that could not be imported come first, then those of which most tests fail."""
    cases = list(ElementTree.parse(results).iter("testcase"))
    failed = defaultdict(list)
    for case in cases:
        if (error := error_of(case)) is not None:
            module = case.get("classname") or case.get("name")
            failed[module].append((case.get("name") if case.get("classname") else "", error))
    lines = [f"{len(cases)} ran, {sum(map(len, failed.values()))} failed.", ""]
    for module, errors in sorted(failed.items(), key=lambda each: (each[1][0][0] != "", -len(each[1]))):
        lines.append(f"- `{module}`" + (f": {len(errors)}" if errors[0][0] else " cannot be imported"))
        lines += [f"  - {f'`{name}`: ' if name else ''}`{error}`" for name, error in errors]
    return lines


def main() -> None:
    hooks, *results = map(Path, sys.argv[1:])
    print("# The newest SGLang\n", versions(), "", hooks.read_text().strip(), "", "## Tests", sep="\n")
    for path in results:
        print("", *(tests(path) if path.exists() else ["They did not run."]), sep="\n")


if __name__ == "__main__":
    main()
