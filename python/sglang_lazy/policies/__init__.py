"""Policies, which say how prompts use their chunks: one module each, and their registry.

A request's `link` is `name` or `name:parameter=value,...`. The prefix `base+` has chunks computed after a preamble:
`base+epic:tokens=8`.

To add a policy, derive from `sglang_lazy.core.policy.Policy` in a module of its own and register it, here or in a
plugin of SGLang's, as the distribution `sglang-lazy-policies` is.
"""

import dataclasses
import functools
import importlib.metadata
from typing import Any

from sglang_lazy.core.names import MAX_NAME
from sglang_lazy.core.policy import Policy
from sglang_lazy.policies.block import Block
from sglang_lazy.policies.epic import Epic
from sglang_lazy.policies.full import Full
from sglang_lazy.policies.packet import Packet
from sglang_lazy.policies.query import Query
from sglang_lazy.policies.static import Static
from sglang_lazy.policies.whole import Whole

__all__ = ["POLICIES", "UnknownPolicy", "check_policy", "get_policy", "policy_elsewhere", "register"]

POLICIES: dict[str, type[Policy]] = {}

PACKAGED = ("copy", "blend", "kvlink")
"""Policies that are in the distribution `sglang-lazy-policies`, a plugin of SGLang's."""

BASE = "base"
"""Prefix that gives chunks a preamble; alone it means `base+block`."""


class UnknownPolicy(ValueError):
    """No policy of this name is registered in this process."""


def register(policy: type[Policy]) -> type[Policy]:
    """Register a policy under its name in this process; usable as a class decorator. Once more changes nothing.

    The server's processes must register it as well, through an entry point in the group `sglang.srt.plugins`.
    Raises ValueError if the name is taken by another.
    """
    if POLICIES.get(policy.name) is policy:
        return policy
    if policy.name in POLICIES or policy.name == BASE:
        raise ValueError(f"policy {policy.name!r} is registered already")
    POLICIES[policy.name] = policy
    return policy


def get_policy(link: Any) -> Policy:
    """The policy that `link` names, with its parameters. Its `str` is the link with all parameters.

    Raises ValueError for anything else, and for parameters that the policy does not take or that are out of range;
    UnknownPolicy if there is none of this name.
    """
    if not isinstance(link, str):
        raise _unknown(link)
    if len(link) > MAX_NAME or not link.isprintable():
        raise ValueError(f"link must have at most {MAX_NAME} printable characters, got {ascii(link):.50}")
    return _parse(link, frozenset(POLICIES.values()))


@functools.lru_cache(maxsize=1024)  # requests repeat their links; the registry is part of the cache key
def _parse(link: str, _known: frozenset[type[Policy]]) -> Policy:
    base, plus, rest = link.partition("+")
    if base.partition(":")[0] == BASE:
        values = _parameters(base, BASE, {"preamble": "neutral"})
        rest = rest if plus else Block.name
    else:
        base, values, rest = "", {"preamble": "none"}, link
    name = rest.partition(":")[0]
    if name not in POLICIES and name in PACKAGED:
        _load_packaged()
        if name not in POLICIES:
            raise UnknownPolicy(f"link {link!r:.50}: {name} needs the package sglang-lazy-policies")
    if name not in POLICIES:
        raise _unknown(link)
    policy = POLICIES[name]
    if base and not policy.reuses:
        raise ValueError(f"link {link!r:.50}: {name} computes no chunks, so a preamble has no effect")
    defaults = {field.name: field.default for field in dataclasses.fields(policy) if field.name != "preamble"}
    try:
        values |= _parameters(rest, name, defaults)
        policy.check(values)
        return policy(**values)
    except ValueError as error:
        raise ValueError(f"link {link!r:.50}: {error}") from None


def _load_packaged() -> None:
    """Load the distribution's plugin if it is installed: clients load none, and servers check links before they do."""
    for plugin in importlib.metadata.entry_points(group="sglang.srt.plugins", name="sglang_lazy_policies"):
        plugin.load()()


def check_policy(link: str) -> None:
    """Raise ValueError if there is no policy `link`, unless a plugin of SGLang's that is not loaded yet may add it."""
    try:
        get_policy(link)
    except ValueError:
        if not others_installed():
            raise


def others_installed() -> bool:
    """Whether plugins of SGLang's are installed that may add policies. Imports none."""
    packages = {entry.module.partition(".")[0] for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")}
    known = {"sglang_lazy", "sglang_lazy_policies", "smg_grpc_servicer"}  # SGLang requires the last
    return not packages <= known


def policy_elsewhere(link: str) -> Policy:
    """`get_policy` in a process that another one has started, and which knows the policy of this name."""
    try:
        return get_policy(link)
    except UnknownPolicy:
        raise ValueError(
            f"link {link!r:.80}: this policy is registered only in the process that has started the server's others. "
            "These load plugins: declare an entry point in the group 'sglang.srt.plugins', whose function calls "
            "sglang_lazy.policies.register"
        ) from None


def _unknown(link: Any) -> UnknownPolicy:
    names = ", ".join(map(repr, POLICIES))
    return UnknownPolicy(f"link must be one of {names}, or 'base', alone or as in 'base+epic'; got {link!r:.50}")


def _parameters(text: str, name: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Parse `name:parameter=value,...`; each value has the type of its default, and absent ones keep it."""
    values: dict[str, Any] = {}
    given = text.removeprefix(name).removeprefix(":")
    for item in given.split(",") if text != name else ():
        parameter, _, value = item.partition("=")
        if parameter not in defaults:
            known = f"takes {', '.join(defaults)}" if defaults else "has no parameters"
            raise ValueError(f"policy {name!r} {known}, got {item!r:.50}")
        if parameter in values:
            raise ValueError(f"{parameter} is given twice")
        try:
            values[parameter] = type(defaults[parameter])(value)
        except ValueError:
            kind = type(defaults[parameter]).__name__
            raise ValueError(f"{parameter} must be of type {kind}, got {value!r:.50}") from None
    return defaults | values


for _policy in (Block, Full, Epic, Query, Static, Whole, Packet):
    register(_policy)
