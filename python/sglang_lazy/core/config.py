"""Configuration: one frozen object, handed to every process in an environment variable."""

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any, Literal, get_args

ENV_VAR = "SGLANG_LAZY"
"""Holds the configuration as JSON; SGLang's processes load the plugin if it is set."""

INFO_ROUTE = "/lazy_info"
"""Answers with the configuration; clients recognize a server that understands chunks by it."""

Kernels = Literal["auto", "torch", "triton", "cuda"]


@dataclasses.dataclass(frozen=True)
class LazyConfig:
    """What the `--lazy-…` flags set: every field has a flag and a keyword of `Engine` by its name.

    kernels: implementation of attention over cached chunks.
    max_chunks: most chunks of one prompt.
    fallback: serve without chunk reuse where it does not fit the model or the flags.
    default_link: policy of requests that name none.
    shadow_rate: fraction of the greedy answers over chunks that shadow mode repeats, 0 to 1.
    """

    kernels: Kernels = "auto"
    max_chunks: int = 256
    fallback: bool = False
    default_link: str = "block"
    shadow_rate: float = 0.0

    def __post_init__(self):
        if self.kernels not in get_args(Kernels):
            raise ValueError(f"kernels must be one of {get_args(Kernels)}, got {self.kernels!r}")
        if self.max_chunks < 1:
            raise ValueError(f"max_chunks must be at least 1, got {self.max_chunks}")
        if not 0 <= self.shadow_rate <= 1:
            raise ValueError(f"shadow_rate must be between 0 and 1, got {self.shadow_rate}")

    def check_metrics(self, enabled: bool) -> None:
        """Raise ValueError if shadow mode is on but its metrics would not be published."""
        if self.shadow_rate and not enabled:
            raise ValueError("--lazy-shadow-rate publishes its result as metrics: add --enable-metrics")

    def to_env(self) -> None:
        """Publish this configuration to this process and to those it spawns."""
        os.environ[ENV_VAR] = json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_env(cls) -> "LazyConfig | None":
        """The published configuration, or None where the plugin is off."""
        value = os.environ.get(ENV_VAR)
        return cls(**json.loads(value)) if value else None

    @classmethod
    def current(cls) -> "LazyConfig":
        """The published configuration, or the default one."""
        return cls.from_env() or cls()


def add_cli_args(parser: argparse.ArgumentParser, links: Sequence[str]) -> None:
    """Add our flags, with help texts, to `parser`. links: names of the policies."""
    group = parser.add_argument_group("sglang-lazy", "chunk reuse at any position")
    group.add_argument(
        "--lazy-kernels",
        choices=get_args(Kernels),
        default=LazyConfig.kernels,
        help="Implementation of attention over cached chunks. 'auto': cuda on Hopper (compiled at the first start), "
        "triton on other GPUs, torch elsewhere.",
    )
    group.add_argument(
        "--lazy-max-chunks",
        type=int,
        default=LazyConfig.max_chunks,
        help="Most chunks of one prompt; a prompt with more gets a 400.",
    )
    group.add_argument(
        "--lazy-fallback",
        action="store_true",
        help="If chunk reuse does not fit the model or the flags, serve without it instead of refusing to start. "
        "Prompts with chunks then get a 400 unless their link is full.",
    )
    group.add_argument(
        "--lazy-default-link",
        choices=links,
        default=LazyConfig.default_link,
        help="Policy for prompts with chunks whose request names none. 'block': each chunk sees only itself, and "
        "its cached KV is used in place. 'full': the same tokens as one ordinary prompt, answered as by stock SGLang. "
        "'copy': like block, but each request gets a rotated copy of its chunks; a baseline to compare with.",
    )
    group.add_argument(
        "--lazy-shadow-rate",
        type=float,
        default=LazyConfig.shadow_rate,
        help="Fraction of the greedy answers over chunks to repeat with link full while the server is idle. /metrics "
        "counts how often both agree (sglang_lazy:shadow_...). Needs --enable-metrics.",
    )


def from_cli_args(args: argparse.Namespace) -> LazyConfig:
    """The configuration in parsed flags."""
    return LazyConfig(**{f.name: getattr(args, f"lazy_{f.name}") for f in dataclasses.fields(LazyConfig)})


def pop_keywords(kwargs: dict[str, Any]) -> LazyConfig:
    """Take the `lazy_…` keywords, one for each field of `LazyConfig`, out of `kwargs`.

    Raises TypeError for an unknown one, ValueError for a bad value.
    """
    names = {f"lazy_{field.name}": field.name for field in dataclasses.fields(LazyConfig)}
    given = [name for name in kwargs if name.startswith("lazy_")]
    for name in given:
        if name not in names:
            raise TypeError(f"unexpected keyword {name!r}, expected one of {', '.join(names)}")
    return LazyConfig(**{names[name]: kwargs.pop(name) for name in given})
