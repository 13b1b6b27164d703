"""Hooks on SGLang: declared next to the functions that they call, applied and verified here."""

import contextlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple


class Hook(NamedTuple):
    """A hook that calls `function` at `target`, a dotted path; `kind` is an SGLang `HookType`."""

    target: str
    function: Callable
    kind: Literal["BEFORE", "AFTER", "AROUND"]


_applied: dict[str, Any] = {}
"""By target, the function that replaced it."""


def apply(hooks: Iterable[Hook]) -> None:
    """Apply hooks through SGLang's registry, except on targets that are hooked already."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    new = [hook for hook in hooks if hook.target not in _applied]
    stock = {hook.target: _resolve(hook.target) for hook in new}
    for hook in new:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
    with _searching_for_functions_only():
        HookRegistry.apply_hooks()
    for target, original in stock.items():
        hooked = _resolve(target)
        if hooked is not original:
            _applied[target] = hooked


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
    """The targets that are not hooked, or no longer. SGLang itself only logs hooks that it could not apply."""
    return [hook.target for hook in hooks if not _in_place(hook.target)]


def _in_place(target: str) -> bool:
    function = _resolve(target)
    while function is not None:
        if function is _applied.get(target):
            return True
        function = getattr(function, "__wrapped__", None)  # other plugins may have wrapped it
    return False


def _resolve(target: str) -> Any:
    resolved = pkgutil.resolve_name(target)
    return getattr(resolved, "__func__", resolved)
