"""Compare the installed SGLang with what the port expects of it: python -m tools.hook_check

Prints, in Markdown, the imports and hooks' targets that are gone, and the targets whose parameters hooks cannot take.
Starts nothing, and ends with 1 if there is any, repairs aside. What SGLang no longer has is replaced by stand-ins
meanwhile, so that all hooks can be read.
"""

import ast
import importlib.util
import inspect
import itertools
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sglang_lazy import port
from sglang_lazy.port.hooks import Hook, resolve

ROLES = ("required", "feature", "repair")
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Finding(NamedTuple):
    """A hook and what is wrong with it, if anything is."""

    hook: Hook
    state: str  # "gone", "changed" or "fine"
    reason: str


def main() -> None:
    names = [module.name for module in pkgutil.walk_packages(port.__path__, f"{port.__name__}.")]
    gone = dict(itertools.chain.from_iterable(map(gone_imports, names)))
    for name in gone:
        stand_in(name)
    modules, broken = [], []
    for name in names:
        try:
            modules.append(importlib.import_module(name))
        except Exception as error:  # of any kind: SGLang's modules run, too
            broken.append((name, f"{type(error).__name__}: {error}"))
    found = [finding(hook) for module in modules for hook in getattr(module, "HOOKS", ())]
    print(report(gone, broken, found))
    sys.exit(bool(gone or broken or any(each.state != "fine" and each.hook.role != "repair" for each in found)))


def gone_imports(name: str) -> Iterator[tuple[str, str]]:
    """What a module imports of SGLang's, at any depth, that is not there: its name, and the module that wants it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, name
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                wanted = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                wanted = [f"{module}.{alias.name}" for alias in names]
            case _:
                continue
        for each in wanted:
            if each.partition(".")[0] == "sglang" and not is_there(each):
                yield each, name


def is_there(name: str) -> bool:
    """Whether SGLang has this module, or this name in a module."""
    try:
        resolve(name)
    except (ImportError, AttributeError):
        return False
    return True


class StandIn:
    """Takes the place of a class, function, decorator or constant that SGLang no longer has."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else self


def stand_in(name: str) -> None:
    """Provide this module of SGLang's, or name in one, and the modules that it is in."""
    parent, _, own = name.rpartition(".")
    if not is_there(parent):
        stand_in(parent)
    provided: Any = type(own, (StandIn,), {})
    sys.modules[name] = provided
    setattr(resolve(parent), own, provided)


def finding(hook: Hook) -> Finding:
    try:
        target = resolve(hook.target)
    except (ImportError, AttributeError) as error:
        return Finding(hook, "gone", str(error))
    reason = clash(target, hook)
    return Finding(hook, "changed" if reason else "fine", reason)


def clash(target: Callable, hook: Hook) -> str:
    """Why a hook's function cannot take every call of its target by position; empty if it can."""
    theirs = inspect.signature(target).parameters
    signature = inspect.signature(hook.function)
    first = [] if hook.kind == "BEFORE" else [None]  # the result, or the target
    by_name = {name: None for name, each in theirs.items() if each.kind is each.KEYWORD_ONLY}
    by_place = [name for name, each in theirs.items() if each.kind in _BY_PLACE]
    needed = [name for name in by_place if theirs[name].default is inspect.Parameter.empty]
    try:
        signature.bind(*first, *needed, **by_name)
        bound = signature.bind(*first, *by_place, **by_name)
    except TypeError as error:
        return str(error)
    places = list(bound.arguments.items())[len(first) :]
    moved = [(ours, theirs) for ours, theirs in places if ours in by_place and ours != theirs]
    return ", ".join(f"`{theirs}` is where `{ours}` was" for ours, theirs in moved)


def report(gone: dict[str, str], broken: list[tuple[str, str]], found: list[Finding]) -> str:
    lines = ["## Imports", ""]
    lines += [f"- `{name}` is gone; wanted by `{by}`" for name, by in sorted(gone.items())]
    lines += [f"- `{name}` cannot be imported: {reason}" for name, reason in broken]
    if not gone and not broken:
        lines.append("All fine.")
    for role in ROLES:
        of_role = [each for each in found if each.hook.role == role]
        counts = {state: sum(each.state == state for each in of_role) for state in ("gone", "changed", "fine")}
        summary = ", ".join(f"{count} {state}" for state, count in counts.items())
        lines += ["", f"## Hooks: {role}", "", f"{summary}.", *([""] if len(of_role) > counts["fine"] else [])]
        bad = sorted((each for each in of_role if each.state != "fine"), key=lambda each: each.state != "gone")
        for each in bad:
            function = f"{each.hook.function.__module__}.{each.hook.function.__qualname__}"
            lines.append(f"- {each.state}: `{each.hook.target}`: {each.reason} (`{function}`; {each.hook.why})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
