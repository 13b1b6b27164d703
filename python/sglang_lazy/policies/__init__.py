"""How prompts use their chunks: one module for each policy, and the registry by which requests name them.

To add a policy, derive from `sglang_lazy.core.policy.Policy` in a module of its own and register it here.
"""

from typing import Any

from sglang_lazy.core.policy import Policy
from sglang_lazy.policies.block import Block
from sglang_lazy.policies.copy import Copy
from sglang_lazy.policies.full import Full

__all__ = ["POLICIES", "get_policy", "register"]

POLICIES: dict[str, Policy] = {}


def register(policy: type[Policy]) -> type[Policy]:
    """Offer a policy under its name; usable as a class decorator. Raises ValueError if the name is taken."""
    if policy.name in POLICIES:
        raise ValueError(f"policy {policy.name!r} is registered already")
    POLICIES[policy.name] = policy()
    return policy


def get_policy(name: Any) -> Policy:
    """The policy of this name. Raises ValueError for anything else."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ValueError(f"link must be one of {', '.join(map(repr, POLICIES))}, got {name!r:.50}")
    return POLICIES[name]


for _policy in (Block, Full, Copy):
    register(_policy)
