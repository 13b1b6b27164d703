"""Policies that papers compare with, registered with sglang-lazy in each of SGLang's processes."""

from sglang_lazy.policies import register
from sglang_lazy_policies.blend import Blend
from sglang_lazy_policies.copy import Copy
from sglang_lazy_policies.kvlink import KvLink

__all__ = ["Blend", "Copy", "KvLink", "load"]


def load() -> None:
    """SGLang calls this entry point in each of its processes."""
    for policy in (Copy, Blend, KvLink):
        register(policy)
