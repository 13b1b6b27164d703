"""Cases: a workload, and how it arrives. On the command line and in plans, a case is one line of words."""

import argparse
import dataclasses
import math
import shlex
from pathlib import Path

from benchmark.serving.arguments import positive, positive_float, typed
from benchmark.serving.contenders import parse_contenders
from benchmark.serving.workloads import WORKLOADS, Encode, Stage, Workload


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Rates are conversations per second; infinity is all at once. contenders: those to measure; None for all.

    Equality is identity: a case given twice is measured twice.
    """

    name: str
    workload: Workload
    request_rates: list[float]
    max_concurrency: int | None
    seconds: float | None
    contenders: list[str] | None

    def runs(self, seed: int, encode: Encode) -> list["Run"]:
        """One run per rate, slowest first. Raises ValueError if the data are malformed."""
        return [self._run(rate, seed, encode) for rate in sorted(self.request_rates)]

    def _run(self, rate: float, seed: int, encode: Encode) -> "Run":
        workload = self.workload
        if self.seconds and not math.isinf(rate):
            enough = max(workload.num_prompts, round(self.seconds * rate))
            workload = dataclasses.replace(workload, num_prompts=enough)
        return Run(self, workload, rate, workload.stages(seed, encode))


@dataclasses.dataclass(frozen=True)
class Run:
    """A case at one rate: the traffic for every contender."""

    case: Case
    workload: Workload
    request_rate: float
    stages: list[Stage]

    def describe(self) -> dict:
        """The columns that identify this run; a rate of None is infinite."""
        parameters = {
            name: str(value) if isinstance(value, Path) else value for name, value in vars(self.workload).items()
        }
        return {
            "workload": self.case.name,
            "parameters": parameters,
            "request_rate": None if math.isinf(self.request_rate) else self.request_rate,
            "max_concurrency": self.case.max_concurrency,
        }


def parse_case(line: str) -> Case:
    """A case from a workload's name and flags. Exits with a message on bad ones, and on --help."""
    parser = argparse.ArgumentParser(prog="--case", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True, metavar="workload")
    for name, workload in WORKLOADS.items():
        flags = names.add_parser(name, description=workload.__doc__, help=workload.__doc__)
        for field in dataclasses.fields(workload):
            _add_flag(flags, field)
        flags.add_argument(
            "--request-rate",
            type=typed(positive_float),
            nargs="+",
            default=[math.inf],
            help="conversations per second, any number of rates; default: all at once",
        )
        flags.add_argument("--max-concurrency", type=typed(positive), help="maximum requests in flight")
        flags.add_argument(
            "--seconds",
            type=typed(positive_float),
            default=None,
            help="--num-prompts is at least what arrives in this time, at each rate",
        )
        flags.add_argument(
            "--contenders", type=typed(parse_contenders), help="contenders that get this case; default: all"
        )
    values = vars(parser.parse_args(shlex.split(line)))
    name = values.pop("name")
    how = [values.pop(flag) for flag in ("request_rate", "max_concurrency", "seconds", "contenders")]
    try:
        return Case(name, WORKLOADS[name](**values), *how)
    except ValueError as error:
        parser.error(f"{name}: {error}")


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field) -> None:
    flag, text = f"--{field.name.replace('_', '-')}", field.metadata["help"]
    if field.type is bool:
        parser.add_argument(flag, action="store_true", help=text)
    elif field.default is dataclasses.MISSING:
        parser.add_argument(flag, type=field.type, required=True, help=text)
    else:
        parser.add_argument(flag, type=field.type, default=field.default, help=f"{text}; default: {field.default}")


def read_plan(path: str) -> list[str]:
    """The cases of a plan, one per line; `#` begins a comment. Raises ValueError if it cannot be read."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    return [case for line in lines if (case := line.partition("#")[0].strip())]
