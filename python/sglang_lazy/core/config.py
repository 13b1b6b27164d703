"""Configuration: one frozen object, from flags, handed to every process in an environment variable."""

import argparse
import dataclasses
import json
import os
from typing import Literal, get_args

ENV_VAR = "SGLANG_LAZY"
"""Holds the configuration as JSON; its presence is what asks for the plugin."""

Kernels = Literal["auto", "torch", "triton", "cuda"]
RequestLink = Literal["block", "full", "copy"]


@dataclasses.dataclass(frozen=True)
class LazyConfig:
    """What `--lazy-*` flags can set. Every field has a flag of the same name."""

    kernels: Kernels = "auto"
    max_chunks: int = 256
    fallback: bool = False
    default_link: RequestLink = "block"
    shadow_rate: float = 0.0

    def __post_init__(self):
        for name, kind in (("kernels", Kernels), ("default_link", RequestLink)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {get_args(kind)}, got {getattr(self, name)!r}")
        if self.max_chunks < 1:
            raise ValueError(f"max_chunks must be at least 1, got {self.max_chunks}")
        if not 0 <= self.shadow_rate <= 1:
            raise ValueError(f"shadow_rate must be between 0 and 1, got {self.shadow_rate}")

    def check_metrics(self, enabled: bool) -> None:
        """Raise ValueError if shadow mode is asked for where its result could not be seen."""
        if self.shadow_rate and not enabled:
            raise ValueError("--lazy-shadow-rate publishes its result as metrics: add --enable-metrics")

    def to_env(self) -> None:
        """Publish this configuration to this process and to those it spawns."""
        os.environ[ENV_VAR] = json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_env(cls) -> "LazyConfig | None":
        """The published configuration, or None where the plugin was not asked for."""
        value = os.environ.get(ENV_VAR)
        return cls(**json.loads(value)) if value else None


def current_config() -> LazyConfig:
    """The published configuration, or the defaults where the plugin was not asked for."""
    return LazyConfig.from_env() or LazyConfig()


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add our flags, with help texts, to `parser`."""
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
        help="Most chunks one prompt may have; a prompt with more is answered with a 400.",
    )
    group.add_argument(
        "--lazy-fallback",
        action="store_true",
        help="Where chunk reuse does not fit the model or the flags, serve without it (prompts with chunks are then "
        "answered with a 400 unless their link is full) instead of refusing to start.",
    )
    group.add_argument(
        "--lazy-default-link",
        choices=get_args(RequestLink),
        default=LazyConfig.default_link,
        help="How prompts with chunks are answered that do not say it themselves (request field link). 'block': a "
        "chunk sees only itself, and its KV is reused. 'full': the same tokens as one ordinary prompt, as stock "
        "SGLang would.",
    )
    group.add_argument(
        "--lazy-shadow-rate",
        type=float,
        default=LazyConfig.shadow_rate,
        help="Fraction of the greedy answers over chunks that are made again with link full, in quiet moments, to "
        "count on /metrics how often both agree (sglang_lazy:shadow_...). Needs --enable-metrics.",
    )


def from_cli_args(args: argparse.Namespace) -> LazyConfig:
    """The configuration in parsed flags."""
    return LazyConfig(**{f.name: getattr(args, f"lazy_{f.name}") for f in dataclasses.fields(LazyConfig)})
