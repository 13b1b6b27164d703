"""Configuration: one frozen object, handed to every process in an environment variable."""

import argparse
import dataclasses
import functools
import json
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

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


class Bounds(NamedTuple):
    """Which numbers a setting may be, in words and in code."""

    words: str
    hold: Callable[[float], bool]


_SHARE = Bounds("between 0 and 1", lambda value: 0 <= value <= 1)
_PART = Bounds("above 0 and below 1", lambda value: 0 < value < 1)


def _up_to(most: int) -> Bounds:
    return Bounds(f"at least 1 and at most {most}", lambda value: 1 <= value <= most)


def _setting(
    default: Any, group: str, help: str, metavar: str | None = None, bounds: Bounds | None = None, choices: tuple = ()
) -> Any:
    """A field and its flag.  group: under which --help lists it.  help: its first sentence is what --help shows."""
    flag = dict(group=group, help=help, metavar=metavar, bounds=bounds, choices=choices)
    return dataclasses.field(default=default, metadata=flag)


@dataclasses.dataclass(frozen=True)
class LazyConfig:
    """The settings; each field has a flag `--lazy-…` and an `Engine` keyword `lazy_…` of the same name."""

    default_link: str = _setting(
        "block",
        "chunks",
        "Policy of requests that name none, as 'base+query:ratio=0.15'. 'block': each chunk sees only itself, and its "
        "cached KV is used in place. 'epic': the first tokens of each chunk are computed in context. 'query': so are "
        "the tokens that the question attends to most. 'full': the same tokens as one ordinary prompt, answered as by "
        "stock SGLang. 'copy': like block, but each request gets a rotated copy of its chunks; a baseline to compare "
        "with. 'base+' before a policy: chunks are computed after --lazy-preamble.",
        "POLICY",
    )
    preamble: str = _setting(
        PREAMBLE,
        "chunks",
        "Neutral text after which 'base' policies compute chunks. Prompts never contain it.",
        "TEXT",
    )
    chunk_separator: str = _setting(
        "",
        "chunks",
        "Text before and after each chunk, for clients of plain text. With ##, 'Read: ##A####B##Who?' has the chunks A "
        "and B. The separators themselves are dropped.",
        "TEXT",
    )
    chunk_roles: str = _setting(
        "", "chunks", "Roles whose messages are chunks as a whole, for example 'tool'.", "ROLE[,ROLE]"
    )
    max_chunks: int = _setting(
        256, "chunks", "Most chunks of a prompt. One with more gets a 400.", "N", _up_to(MAX_CHUNKS)
    )
    max_pinned: float = _setting(
        0.25, "memory", "Share of the KV pool for pinned chunks; 0 for no pins.", "SHARE", _SHARE
    )
    host_share: float = _setting(
        0.8,
        "memory",
        "Share of --hicache-size or --hicache-ratio for chunks. Prompts without chunks have the rest, in SGLang's own "
        "host tier.",
        "SHARE",
        Bounds("above 0 and at most 1", lambda value: 0 < value <= 1),
    )
    storage_writers: int = _setting(
        1,
        "memory",
        "Threads that write chunks to storage. More keep up with faster storage, and slow prompts beside them.",
        "THREADS",
        _up_to(MAX_WRITERS),
    )
    chunk_pool: float = _setting(
        0.5,
        "memory",
        "Share of the KV memory for chunks that an encoder reads (Comb). Also of --max-total-tokens. Per token, a "
        "chunk takes memory only in the cross layers.",
        "SHARE",
        _PART,
    )
    state_share: float = _setting(
        0.0,
        "memory",
        "Share of the memory for KV and states that the states of chunks get. Only models with recurrent layers have "
        "any; a chunk takes as much whatever its length. 0: what chunks of 2,048 tokens need, from a tenth to half.",
        "SHARE",
        Bounds("at least 0 and below 1", lambda value: 0 <= value < 1),
    )
    kernels: Kernels = _setting(
        "auto",
        "what is served",
        "Attention over cached chunks: auto, torch, triton or cuda. 'auto': cuda on Hopper (compiled at the first "
        "start), triton on other GPUs, torch elsewhere.",
        "NAME",
        choices=get_args(Kernels),
    )
    untested_model: bool = _setting(
        False, "what is served", "Serve an untested architecture that passes the start-up check."
    )
    fallback: bool = _setting(
        False,
        "what is served",
        "Serve without chunk reuse what it does not support. Else the server refuses to start. Prompts with chunks "
        "then get a 400 unless their link is full.",
    )
    keys: str = _setting(
        "",
        "what is served",
        "JSON file with keys of applications and their scopes. These are read, chunks, prompts and admin; a key may be "
        "bound to a tenant. Needs --admin-api-key.",
        "FILE",
    )
    shadow_rate: float = _setting(
        0.0,
        "shadow mode",
        "Share of greedy answers to repeat with link full when idle. /metrics counts how often both agree "
        "(sglang_lazy:shadow_...). Needs --enable-metrics.",
        "SHARE",
        _SHARE,
    )
    shadow_min_agreement: float = _setting(
        0.0,
        "shadow mode",
        "Share of identical answers below which it raises an alarm. It is of the last ones compared under a policy. "
        "Below it the log warns and sglang_lazy:shadow_alarm is 1.",
        "SHARE",
        _SHARE,
    )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        if self.shadow_min_agreement and not self.shadow_rate:
            raise BadSetting("shadow_min_agreement", "watches what shadow mode compares, which is off (its rate is 0)")

    def check_shadow(self, metrics: bool, workers: int) -> None:
        """Raise ValueError for shadow mode without metrics or with several tokenizer workers."""
        if not metrics:
            raise ValueError("--lazy-shadow-rate publishes its result as metrics: add --enable-metrics")
        if workers > 1:
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


def _check(field: dataclasses.Field, value: Any) -> None:
    """Raise BadSetting if no configuration has this value in the field."""
    kind: type = type(field.default)
    bounds, choices = field.metadata["bounds"], field.metadata["choices"]
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise BadSetting(field.name, f"must be of type {kind.__name__}, got {value!r:.50}")
    if choices and value not in choices:
        raise BadSetting(field.name, f"must be one of {', '.join(choices)}, got {value!r:.50}")
    if bounds and not bounds.hold(value):
        raise BadSetting(field.name, f"must be {bounds.words}, got {value}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # what a terminal sends in another encoding
            raise BadSetting(field.name, f"must be text in UTF-8, got {value!r:.50}") from None


def _parsed(field: dataclasses.Field) -> Callable[[str], Any]:
    """The type of a field's flag, for argparse, which names the flag in its errors."""

    def parse(text: str) -> Any:
        kind: type = type(field.default)
        try:
            value = kind(text)
            _check(field, value)
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
    """Add the `--lazy-…` flags to `parser`."""
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(LazyConfig):
        title, help = field.metadata["group"], field.metadata["help"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        group = groups[title]
        if field.default is False:
            group.add_argument(flag(field.name), action="store_true", help=help)
            continue
        options = {name: field.metadata[name] for name in ("choices", "metavar") if field.metadata[name]}
        kind = str if options.get("choices") else _parsed(field)
        group.add_argument(flag(field.name), type=kind, default=field.default, help=help, **options)


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
