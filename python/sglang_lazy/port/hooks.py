"""Hooks on SGLang: declared next to the functions that they call, applied and verified here."""

import contextlib
import functools
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

logger = logging.getLogger(__name__)

Process = Literal["http", "tokenizer", "scheduler"]
"""Where a required hook runs: in a process that serves HTTP; in one that has a tokenizer manager, as HTTP processes and
engines do; or in a scheduler."""
Kind = Literal["BEFORE", "AFTER", "AROUND"]
"""An SGLang `HookType`."""
Role = Literal["required", "feature", "repair"]
Names = str | tuple[str, ...]
F = TypeVar("F", bound=Callable)


class Hook(NamedTuple):
    """A hook that calls `function` at `target`, a dotted path.

    why: what it is for.  until: for a repair, when it can go.  process: for a required hook.
    """

    target: str
    function: Callable
    kind: Kind
    role: Role
    why: str
    until: str = ""
    process: Process | None = None

    @property
    def key(self) -> tuple[str, Callable]:
        """What tells it from all others."""
        return self.target, self.function


class Place:
    """Classes or modules of SGLang's, by their dotted paths, and hooks on their functions.

    Each method makes a decorator for the hook's function. Hooks of one function may have several names.
    """

    def __init__(self, hooks: list[Hook], paths: tuple[str, ...]):
        self._hooks, self._paths = hooks, paths

    def required(self, name: Names, kind: Kind, process: Process, why: str) -> Callable[[F], F]:
        """A hook without which no prompt with chunks is served: it must have run by the end of the self-test."""
        return self._decorator(name, kind, "required", why, process=process)

    def feature(self, name: Names, kind: Kind, why: str) -> Callable[[F], F]:
        """A hook that runs only for some requests, or with some flags."""
        return self._decorator(name, kind, "feature", why)

    def repair(self, name: Names, kind: Kind, why: str, until: str) -> Callable[[F], F]:
        """A hook that mends what is SGLang's own. A server starts without it."""
        return self._decorator(name, kind, "repair", why, until)

    def _decorator(
        self, name: Names, kind: Kind, role: Role, why: str, until: str = "", **process: Any
    ) -> Callable[[F], F]:
        names = (name,) if isinstance(name, str) else name
        targets = [f"{path}.{name}" for path in self._paths for name in names]

        def declare(function: F) -> F:
            self._hooks.extend(Hook(target, function, kind, role, why, until, **process) for target in targets)
            return function

        return declare


class Hooks(list[Hook]):
    """The hooks of one module: `HOOKS = Hooks()`, then `@HOOKS.on("sglang.srt.x.Scheduler").feature("step", ...)`."""

    def on(self, *paths: str) -> Place:
        return Place(self, paths)


_applied: dict[tuple[str, Callable], tuple[Hook, Any]] = {}
"""By key, a hook in place and the function that replaced its target."""
_ran: set[tuple[str, Callable]] = set()
"""The keys of required hooks that have run in this process."""


def apply(hooks: Iterable[Hook]) -> None:
    """Apply hooks through SGLang's registry, except those that are applied already. Warns of repairs without a target.

    Raises RuntimeError if another hook's target does not exist.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    stock: dict[Hook, Any] = {}
    for hook in hooks:
        if hook.key in _applied:
            continue
        try:
            stock[hook] = resolve(hook.target)
        except (ImportError, AttributeError) as error:
            if hook.role != "repair":
                raise RuntimeError(f"sglang-lazy: SGLang has no {hook.target}, a hook's target: {hook.why}") from error
            logger.warning("sglang-lazy: SGLang has no %s any more; without this repair: %s", hook.target, hook.why)
    for hook in stock:
        HookRegistry.register(hook.target, _noting(hook), HookType[hook.kind])
    with _searching_for_functions_only():
        HookRegistry.apply_hooks()
    for hook, original in stock.items():
        hooked = resolve(hook.target)
        if hooked is not original:
            _applied[hook.key] = hook, hooked


def _noting(hook: Hook) -> Callable:
    """The function of a hook; if it is required, one that notes that it has run."""
    if hook.role != "required":
        return hook.function

    @functools.wraps(hook.function)
    def note(*args: Any, **kwargs: Any) -> Any:
        _ran.add(hook.key)
        return hook.function(*args, **kwargs)

    return note


@contextlib.contextmanager
def _searching_for_functions_only() -> Iterator[None]:
    """SGLang replaces what it hooks in all modules that have imported it by name. Methods cannot be imported, and each
    search takes a tenth of a second."""
    from sglang.srt.plugins import hook_registry

    search = hook_registry._propagate_patch
    hook_registry._propagate_patch = lambda original, wrapped, owner: (
        0 if isinstance(owner, type) else search(original, wrapped, owner)
    )
    try:
        yield
    finally:
        hook_registry._propagate_patch = search


def missing(hooks: Iterable[Hook]) -> list[str]:
    """The targets of hooks, repairs aside, that are not in place, or no longer. SGLang itself only logs hooks that it
    could not apply."""
    return [hook.target for hook in hooks if hook.role != "repair" and not _in_place(hook)]


def _in_place(hook: Hook) -> bool:
    _, hooked = _applied.get(hook.key, (None, None))
    function = resolve(hook.target)
    while function is not None:
        if function is hooked:
            return True
        function = getattr(function, "__wrapped__", None)  # other plugins may have wrapped it
    return False


def unused(*processes: Process) -> list[str]:
    """The targets of required hooks of such a process that have not run in this one."""
    return [hook.target for hook, _ in _applied.values() if hook.process in processes and hook.key not in _ran]


def resolve(target: str) -> Any:
    resolved = pkgutil.resolve_name(target)
    return getattr(resolved, "__func__", resolved)
