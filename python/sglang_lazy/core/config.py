"""Configuration: one frozen object, handed to every process in an environment variable."""

import argparse
import dataclasses
import functools
import json
import os
from collections.abc import Callable
from typing import Any, Literal, get_args

ENV_VAR = "SGLANG_LAZY"
"""Holds the configuration as JSON; SGLang's processes load the plugin only if it is set."""

INFO_ROUTE = "/lazy_info"
"""Returns the configuration; a server that has this route understands chunks."""

SALT_HEADER = "X-Cache-Salt"
"""HTTP header that sets the cache salt, for gateways that cannot change bodies."""

PREAMBLE = (
    "The river rises in the hills north of the town and flows south for about ninety kilometres before it reaches the "
    "sea.\n\n"
)
"""A neutral sentence, unrelated to any document; alternatives were no better (docs/results/policies)."""

MAX_CHUNKS = 1 << 16
"""The largest `max_chunks`: every row of the pool has memory for so many."""

MAX_WRITERS = 64
"""The largest `storage_writers`."""

Kernels = Literal["auto", "torch", "triton", "cuda"]


class BadSetting(ValueError):
    """A setting that cannot be used, which flags and keywords spell in their own ways.

    name: its field.  reason: what follows the name in a message.
    """

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name} {reason}")
        self.name, self.reason = name, reason


@dataclasses.dataclass(frozen=True)
class LazyConfig:
    """The settings; each field has a flag `--lazy-…` and an `Engine` keyword `lazy_…` of the same name.

    kernels: implementation of attention over cached chunks.
    max_chunks: maximum number of chunks in a prompt.
    fallback: if chunk reuse does not support the model or the flags, serve without it instead of refusing to start.
    untested_model: serve an architecture that no test covers, if it passes the start-up check.
    default_link: policy of requests that name none.
    preamble: text after which policies with `base` compute chunks; it is never part of a prompt.
    chunk_separator: text between the two of a pair of these separators is a chunk; empty for no separator.
    chunk_roles: comma-separated roles; the whole text of messages with these roles is a chunk.
    max_pinned: share of the KV pool that pinned chunks may take, 0 to 1.
    chunk_pool: share of the KV memory for chunks if the model reads them by cross-attention, between 0 and 1.
    host_share: share of the host tier for chunks, above 0 and at most 1; prompts without chunks have the rest.
    storage_writers: threads that write chunks to storage.
    shadow_rate: fraction of greedy answers with chunks that shadow mode repeats with full attention, 0 to 1.
    shadow_min_agreement: share of identical answers below which shadow mode raises an alarm, 0 to 1.
    keys: file with keys of applications, for servers (`serving/keys.py`); empty for none.
    """

    kernels: Kernels = "auto"
    max_chunks: int = 256
    fallback: bool = False
    untested_model: bool = False
    default_link: str = "block"
    preamble: str = PREAMBLE
    chunk_separator: str = ""
    chunk_roles: str = ""
    max_pinned: float = 0.25
    chunk_pool: float = 0.5
    host_share: float = 0.8
    storage_writers: int = 1
    shadow_rate: float = 0.0
    shadow_min_agreement: float = 0.0
    keys: str = ""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name))
        if self.shadow_min_agreement and not self.shadow_rate:
            raise BadSetting("shadow_min_agreement", "watches what shadow mode compares, which is off (its rate is 0)")

    def check_shadow(self, metrics: bool, workers: int) -> None:
        """Raise ValueError if shadow mode is on without metrics or with several tokenizer workers."""
        if self.shadow_rate and not metrics:
            raise ValueError("--lazy-shadow-rate publishes its result as metrics: add --enable-metrics")
        if self.shadow_rate and workers > 1:
            raise ValueError(
                "--lazy-shadow-rate needs one tokenizer worker: a shadow gives way to requests, and each worker sees "
                "only its own"
            )

    def to_env(self) -> None:
        """Publish this configuration to this process and its children."""
        os.environ[ENV_VAR] = json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_env(cls) -> "LazyConfig | None":
        """The published configuration, or None if the plugin is off."""
        value = os.environ.get(ENV_VAR)
        return _decoded(value) if value else None

    @classmethod
    def current(cls) -> "LazyConfig":
        """The published configuration, or the defaults."""
        return cls.from_env() or cls()


@functools.lru_cache(maxsize=1)  # several times for each request
def _decoded(value: str) -> LazyConfig:
    return LazyConfig(**json.loads(value))


def _check(name: str, value: Any) -> None:
    """Raise BadSetting if no configuration has this value in the field `name`."""
    kind = type(getattr(LazyConfig, name))
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise BadSetting(name, f"must be of type {kind.__name__}, got {value!r:.50}")
    if name == "kernels" and value not in get_args(Kernels):
        raise BadSetting(name, f"must be one of {', '.join(get_args(Kernels))}, got {value!r:.50}")
    if name == "max_chunks" and not 1 <= value <= MAX_CHUNKS:
        raise BadSetting(name, f"must be at least 1 and at most {MAX_CHUNKS}, got {value}")
    if name == "storage_writers" and not 1 <= value <= MAX_WRITERS:
        raise BadSetting(name, f"must be at least 1 and at most {MAX_WRITERS}, got {value}")
    if name == "chunk_pool" and not 0 < value < 1:
        raise BadSetting(name, f"must be above 0 and below 1, got {value}")
    if name == "host_share" and not 0 < value <= 1:
        raise BadSetting(name, f"must be above 0 and at most 1, got {value}")
    if name in ("max_pinned", "shadow_rate", "shadow_min_agreement") and not 0 <= value <= 1:
        raise BadSetting(name, f"must be between 0 and 1, got {value}")
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:  # what a terminal sends in another encoding
            raise BadSetting(name, f"must be text in UTF-8, got {value!r:.50}") from None


def _parsed(name: str) -> Callable[[str], Any]:
    """The type of a field's flag, for argparse, which names the flag in its errors."""

    def parse(text: str) -> Any:
        kind = type(getattr(LazyConfig, name))
        try:
            value = kind(text)
            _check(name, value)
        except BadSetting as error:
            raise argparse.ArgumentTypeError(error.reason) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be of type {kind.__name__}, got {text!r:.50}") from None
        return value

    return parse


def flag(name: str) -> str:
    """The flag of a field."""
    return f"--lazy-{name.replace('_', '-')}"


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the `--lazy-…` flags to `parser`. The first sentence of each help is what --help shows."""
    group = parser.add_argument_group("chunks")
    group.add_argument(
        "--lazy-default-link",
        type=_parsed("default_link"),
        default=LazyConfig.default_link,
        metavar="POLICY",
        help="Policy of requests that name none, as 'base+query:ratio=0.15'. 'block': "
        "each chunk sees only itself, and its cached KV is used in place. 'epic': the first tokens of each chunk are "
        "computed in context. 'query': so are the tokens that the question attends to most. 'full': the same tokens as "
        "one ordinary prompt, answered as by stock SGLang. 'copy': like block, but each request gets a rotated copy of "
        "its chunks; a baseline to compare with. 'base+' before a policy: chunks are computed after --lazy-preamble.",
    )
    group.add_argument(
        "--lazy-preamble",
        type=_parsed("preamble"),
        default=LazyConfig.preamble,
        metavar="TEXT",
        help="Neutral text after which 'base' policies compute chunks. Prompts never contain it.",
    )
    group.add_argument(
        "--lazy-chunk-separator",
        type=_parsed("chunk_separator"),
        default=LazyConfig.chunk_separator,
        metavar="TEXT",
        help="Text before and after each chunk, for clients of plain text. With ##, 'Read: ##A####B##Who?' has the "
        "chunks A and B. The separators themselves are dropped.",
    )
    group.add_argument(
        "--lazy-chunk-roles",
        type=_parsed("chunk_roles"),
        default=LazyConfig.chunk_roles,
        metavar="ROLE[,ROLE]",
        help="Roles whose messages are chunks as a whole, for example 'tool'.",
    )
    group.add_argument(
        "--lazy-max-chunks",
        type=_parsed("max_chunks"),
        default=LazyConfig.max_chunks,
        metavar="N",
        help="Most chunks of a prompt. One with more gets a 400.",
    )
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--lazy-max-pinned",
        type=_parsed("max_pinned"),
        default=LazyConfig.max_pinned,
        metavar="SHARE",
        help="Share of the KV pool for pinned chunks; 0 for no pins.",
    )
    group.add_argument(
        "--lazy-host-share",
        type=_parsed("host_share"),
        default=LazyConfig.host_share,
        metavar="SHARE",
        help="Share of --hicache-size or --hicache-ratio for chunks. Prompts without chunks have the rest, in SGLang's "
        "own host tier.",
    )
    group.add_argument(
        "--lazy-storage-writers",
        type=_parsed("storage_writers"),
        default=LazyConfig.storage_writers,
        metavar="THREADS",
        help="Threads that write chunks to storage. More keep up with faster storage, and slow prompts beside them.",
    )
    group.add_argument(
        "--lazy-chunk-pool",
        type=_parsed("chunk_pool"),
        default=LazyConfig.chunk_pool,
        metavar="SHARE",
        help="Share of the KV memory for chunks that an encoder reads (Comb). Also of --max-total-tokens. Per token, a "
        "chunk takes memory only in the cross layers.",
    )
    group = parser.add_argument_group("what is served")
    group.add_argument(
        "--lazy-kernels",
        choices=get_args(Kernels),
        default=LazyConfig.kernels,
        metavar="NAME",
        help="Attention over cached chunks: auto, torch, triton or cuda. 'auto': cuda on Hopper (compiled at the first "
        "start), triton on other GPUs, torch elsewhere.",
    )
    group.add_argument(
        "--lazy-untested-model",
        action="store_true",
        help="Serve an untested architecture that passes the start-up check.",
    )
    group.add_argument(
        "--lazy-fallback",
        action="store_true",
        help="Serve without chunk reuse what it does not support. Else the server refuses to start. "
        "Prompts with chunks then get a 400 unless their link is full.",
    )
    group.add_argument(
        "--lazy-keys",
        type=_parsed("keys"),
        default=LazyConfig.keys,
        metavar="FILE",
        help="JSON file with keys of applications and their scopes. These are read, chunks, prompts and admin; a key "
        "may be bound to a tenant. Needs --admin-api-key.",
    )
    group = parser.add_argument_group("shadow mode")
    group.add_argument(
        "--lazy-shadow-rate",
        type=_parsed("shadow_rate"),
        default=LazyConfig.shadow_rate,
        metavar="SHARE",
        help="Share of greedy answers to repeat with link full when idle. /metrics "
        "counts how often both agree (sglang_lazy:shadow_...). Needs --enable-metrics.",
    )
    group.add_argument(
        "--lazy-shadow-min-agreement",
        type=_parsed("shadow_min_agreement"),
        default=LazyConfig.shadow_min_agreement,
        metavar="SHARE",
        help="Share of identical answers below which it raises an alarm. It is of the last ones compared under a "
        "policy. Below it the log warns and sglang_lazy:shadow_alarm is 1.",
    )


def from_cli_args(args: argparse.Namespace) -> LazyConfig:
    """The configuration that the parsed flags give. Raises ValueError, naming the flag, for a bad value."""
    try:
        return LazyConfig(**{f.name: getattr(args, f"lazy_{f.name}") for f in dataclasses.fields(LazyConfig)})
    except BadSetting as error:
        raise ValueError(f"{flag(error.name)} {error.reason}") from None


def pop_keywords(kwargs: dict[str, Any]) -> LazyConfig:
    """Remove the `lazy_…` keywords from `kwargs` and return the configuration they give.

    Raises TypeError for an unknown one, ValueError for a bad value.
    """
    names = {f"lazy_{field.name}": field.name for field in dataclasses.fields(LazyConfig)}
    given = [name for name in kwargs if name.startswith("lazy_")]
    for name in given:
        if name not in names:
            raise TypeError(f"unexpected keyword {name!r}, expected one of {', '.join(names)}")
    try:
        return LazyConfig(**{names[name]: kwargs.pop(name) for name in given})
    except BadSetting as error:
        raise ValueError(f"lazy_{error}") from None
