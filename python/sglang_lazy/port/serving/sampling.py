"""Check sampling parameters against the types that SGLang declares."""

from collections.abc import Mapping
from typing import Any

import msgspec
from sglang.srt.sampling.sampling_params import SamplingParams

_TYPES: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
_TYPES |= {
    "stop_token_ids": list[int | None] | None,  # SGLang skips nulls
    "custom_params": dict | None,  # may hold anything, since SGLang's processes exchange pickles by default
}


def check_sampling_params(params: Any) -> None:
    """Raise ValueError for an unknown parameter or one of a wrong type, naming it.

    SGLang checks ranges but not types; wrong ones lead to a 500 or crash its scheduler. None means a parameter's
    default.  params: one object, or a list of them for a batch.
    """
    if isinstance(params, list | tuple) and not params:
        raise ValueError("sampling_params is an empty list")
    for one in params if isinstance(params, list | tuple) else [params]:
        if one is not None and not isinstance(one, Mapping):
            raise ValueError(f"sampling_params must be an object, got {type(one).__name__}")
        for name, value in (one or {}).items():
            if name not in _TYPES:
                raise ValueError(f"sampling_params: unknown parameter {name!r}")
            if value is not None:
                _check_type(name, value)


def _check_type(name: str, value: Any) -> None:
    try:
        # Numbers are converted: SGLang accepts 16.0 for 16 and 1 for true.
        msgspec.convert(value, _TYPES[name], strict=not isinstance(value, int | float))
    except msgspec.ValidationError as error:
        raise ValueError(f"sampling_params: {name}: {error}") from None
