"""Convert the fields of requests to the types that SGLang declares for them, or refuse them.

SGLang checks ranges but not types, and values of other types end its scheduler or detokenizer. Types are read from
SGLang's own classes, so a field that a later release adds is converted as well.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from sglang_lazy.core.names import check_name
from sglang_lazy.port.serving.server_fields import INTERNAL_PARAMS

_NAMES = ("rid", "session_id", "conversation_id", "routing_key", "lora_path", "extra_key", "cache_salt")
"""Fields with a name, or one for each prompt of a batch."""
_PROMPT = {"text", "input_ids", "input_embeds", "image_data", "video_data", "audio_data"}
"""Fields that are not converted: they may be long, and are read before a request leaves this process."""
_OWN_CHECKS = _PROMPT | {"sampling_params", "session_params"}
"""Fields that are checked elsewhere."""
_NEVER_EMPTY = ("rid", "cache_salt")
"""Names that, empty, would be used, or leave a tenant in everybody's namespace. Others are none then."""


class _Fields(NamedTuple):
    """Of a class of requests.  defaults: by field, for those to convert.  adapter: converts a dict of some fields."""

    defaults: dict[str, Any]
    adapter: TypeAdapter


@functools.cache
def _fields_of(kind: Any) -> _Fields:
    types = get_type_hints(kind, include_extras=True)
    defaults = {field.name: field.default for field in dataclasses.fields(kind) if field.name not in _OWN_CHECKS}
    record: Any = TypedDict(kind.__name__, {name: types[name] for name in defaults}, total=False)  # type: ignore[misc]
    return _Fields(defaults, TypeAdapter(with_config(ConfigDict(arbitrary_types_allowed=True))(record)))


def convert_request(obj: Any) -> None:
    """Convert the fields of a `GenerateReqInput` or `EmbeddingReqInput` in place.

    Raises ValueError, naming the field, for a value of another type, a number of more than 64 bits, and a name that is
    not printable.
    """
    kind: type = type(obj)
    defaults, adapter = _fields_of(kind)
    given = {name: vars(obj)[name] for name, default in defaults.items() if vars(obj)[name] is not default}
    if given:
        try:
            given = adapter.validate_python(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise ValueError(f"{first['loc'][0]}: {first['msg']}") from None
        for name, value in given.items():
            _check_ints(name, value, 64)
        vars(obj).update(given)
    for name in _NAMES:
        value = vars(obj).get(name)
        for one in value if isinstance(value, list) else (value,):
            if one or name in _NEVER_EMPTY and one is not None:
                check_name(name, one)
    if getattr(obj, "session_params", None) is not None:
        obj.session_params = _converted("session_params", obj.session_params, _SESSION)
    obj.sampling_params = convert_sampling_params(obj.sampling_params)


def _check_ints(name: str, value: Any, bits: int) -> None:
    """Raise ValueError if a value holds a number that needs more bits, which tensors and messages do not have."""
    if isinstance(value, int):
        if not -(1 << bits - 1) <= value < 1 << bits - 1:
            raise ValueError(f"{name} must be an integer of {bits} bits")
    elif isinstance(value, list):
        for one in value:
            _check_ints(name, one, bits)


def _types_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(struct)}


_SESSION = _types_of(SessionParams)
_SAMPLING = {name: kind for name, kind in _types_of(SamplingParams).items() if name not in INTERNAL_PARAMS}
_SAMPLING |= {
    "stop_token_ids": list[int | None] | None,  # SGLang skips nulls
    "custom_params": dict | None,  # may hold anything, since SGLang's processes exchange pickles by default
}
_EXACT = {
    name: {int, float, bool, str} & set(get_args(kind) or (kind,)) for name, kind in (_SAMPLING | _SESSION).items()
}
"""By parameter, types of values that need no conversion, which would take longer than to see that."""
_WIDE = ("sampling_seed",)
"""Sampling parameters of 64 bits; tensors of the others have 32."""


def convert_sampling_params(params: Any) -> Any:
    """A copy of `params` with values of the types that SGLang declares: 16 for 16.0, true for 1.

    params: one object, or a list of them for a batch; None means a parameter's default. Raises ValueError, naming the
    parameter, if it is unknown or of another type.
    """
    if params is None:
        return None
    if not isinstance(params, list | tuple):
        return _converted("sampling_params", params, _SAMPLING)
    if not params:
        raise ValueError("sampling_params is an empty list")
    return [one if one is None else _converted("sampling_params", one, _SAMPLING) for one in params]


def _converted(what: str, params: Any, types: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(params, Mapping):
        raise ValueError(f"{what} must be an object, got {type(params).__name__}")
    converted = {}
    for name, value in params.items():
        if name not in types:
            raise ValueError(f"{what}: unknown parameter {name!r:.50}")
        if value is not None and type(value) not in _EXACT[name]:
            try:
                value = msgspec.convert(value, types[name], strict=not isinstance(value, int | float))
            except msgspec.ValidationError as error:
                raise ValueError(f"{what}: {name}: {error}") from None
        if name != "custom_params":
            _check_ints(f"{what}: {name}", value, 64 if name in _WIDE else 32)
        converted[name] = value
    return converted
