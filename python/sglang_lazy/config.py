"""Configuration: one frozen object, from flags, handed to every process in an environment variable."""

import argparse
import dataclasses
import json
import os
from typing import Literal, get_args

ENV_VAR = "SGLANG_LAZY"
"""Holds the configuration as JSON; its presence is what asks for the plugin."""

LinkBackend = Literal["auto", "torch", "triton", "cuda"]
LinkMethod = Literal["attention", "materialize"]


@dataclasses.dataclass(frozen=True)
class LazyConfig:
    """What `--lazy-*` flags can set. Every field has a flag of the same name."""

    link: LinkMethod = "attention"
    link_backend: LinkBackend = "auto"
    max_chunks: int = 256
    fallback: bool = False

    def __post_init__(self):
        for name, choices in (("link", get_args(LinkMethod)), ("link_backend", get_args(LinkBackend))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        if self.max_chunks < 1:
            raise ValueError(f"max_chunks must be at least 1, got {self.max_chunks}")

    def to_env(self) -> None:
        """Publish this configuration to this process and to those it spawns."""
        os.environ[ENV_VAR] = json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_env(cls) -> "LazyConfig | None":
        """The published configuration, or None where the plugin was not asked for."""
        value = os.environ.get(ENV_VAR)
        return cls(**json.loads(value)) if value else None


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add our flags, with help texts, to `parser`."""
    group = parser.add_argument_group("sglang-lazy", "chunk reuse at any position")
    group.add_argument(
        "--lazy-link",
        choices=get_args(LinkMethod),
        default=LazyConfig.link,
        help="How a prompt uses cached chunks. 'attention': in place, with their positions applied inside attention. "
        "'materialize': each request gets a copy turned to its positions, as Block-Attention does; for comparison.",
    )
    group.add_argument(
        "--lazy-link-backend",
        choices=get_args(LinkBackend),
        default=LazyConfig.link_backend,
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
        "answered with a 400) instead of refusing to start.",
    )


def from_cli_args(args: argparse.Namespace) -> LazyConfig:
    """The configuration in parsed flags."""
    return LazyConfig(**{f.name: getattr(args, f"lazy_{f.name}") for f in dataclasses.fields(LazyConfig)})
