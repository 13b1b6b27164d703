"""The environments of measurements, from what each benchmark records."""

import collections
import json
import re
from pathlib import Path

from benchmark.report.cells import folders, lines, table


def runs(sources: list[Path]) -> str:
    """A table of the facts in which sources differ, a table of those they share, and their commands."""
    found: dict[str, dict[str, list[str]]] = {}
    commands: dict[str, collections.Counter[str]] = {}
    for name, environment in (each for source in sources for each in environments(source)):
        of = found.setdefault(name, {})
        for fact, value in facts(environment).items():
            values = of.setdefault(fact, [])
            values += [value] if value not in values else []
        commands.setdefault(name, collections.Counter())[shown(environment["command"])] += 1
    names = list(dict.fromkeys(fact for of in found.values() for fact in of))
    same = [name for name in names if len({tuple(of.get(name, ())) for of in found.values()}) == 1]
    differ = [name for name in names if name not in same]
    text = ""
    if differ:
        cells = ([run, *(", ".join(of.get(name, [])) for name in differ)] for run, of in found.items())
        text += table(["run", *differ], cells) + "\n"
    first = next(iter(found.values()))
    text += table(["", ""], ([name, ", ".join(first[name])] for name in same))
    text += "\n```sh\n"
    for run, counts in commands.items():
        text += f"# {run}\n" if len(found) > 1 else ""
        text += "".join(f"{command}{f'  # {n} times' if n > 1 else ''}\n" for command, n in counts.items())
    return text + "```\n"


def environments(source: Path) -> list[tuple[str, dict]]:
    """The facts recorded by each run, with the name of its file or folder."""
    if source.is_dir():
        return [(f.name, json.loads((f / "environment.json").read_text(encoding="utf-8"))) for f in folders([source])]
    if source.suffix == ".json":
        return [(source.stem, json.loads(source.read_text(encoding="utf-8"))["header"])]
    return [(source.stem, row["environment"]) for row in lines(source) if "environment" in row]


def facts(environment: dict) -> dict[str, str]:
    """The same facts of any benchmark's environment."""
    # One line per GPU of the host, of which only one was used.
    driver, _, power = (environment.get("driver, power limit") or "").partition("\n")[0].partition(", ")
    driver, power = environment.get("driver") or driver, environment.get("power_limit") or power
    gpu = environment.get("gpu")
    versions = environment.get("versions") or {name: environment[name] for name in ("torch", "triton", "flashinfer")}
    found = {
        "date": environment.get("time", "")[:10],
        "GPU": f"{gpu}, {power.removesuffix('.00 W')} W, driver {driver}" if gpu else "none",
        "host": environment.get("machine", ""),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Python": environment["python"],
        "commit": environment["commit"],
        "seed": str(environment["seed"]),
    }
    return {name: fact for name, fact in found.items() if fact}


def shown(command: str) -> str:
    """A command line without the output paths, with each case on its own line."""
    command = re.sub(r" --(commit|out) \S+", "", command)
    if not re.match(r"(\w+=\S+ )*python ", command):  # older runs left it out
        command = f"python {command}"
    return command.replace(" --case", " \\\n    --case")
