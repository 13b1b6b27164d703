"""Values of requests' fields, converted to the types that a class declares for them, or refused by name."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, get_args, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12


class Fields:
    """The fields of a dataclass, except `left_out`."""

    def __init__(self, kind: Any, left_out: Collection[str]):
        types = get_type_hints(kind, include_extras=True)
        self._defaults = {field.name: field.default for field in dataclasses.fields(kind) if field.name not in left_out}
        own: Any = {name: types[name] for name in self._defaults}
        record: Any = TypedDict(kind.__name__, own, total=False)  # type: ignore[misc]
        self._adapter = TypeAdapter(with_config(ConfigDict(arbitrary_types_allowed=True))(record))

    def convert(self, obj: Any) -> None:
        """Convert the fields of `obj` in place.

        Raises ValueError, naming the field, for a value of another type, and a number of more than 64 bits.
        """
        values = vars(obj)
        given = {name: values[name] for name, default in self._defaults.items() if values[name] is not default}
        if not given:
            return
        try:
            converted: Any = self._adapter.validate_python(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise ValueError(f"{first['loc'][0]}: {first['msg']}") from None
        for name, value in converted.items():
            _check_ints(name, value, 64)
        values.update(converted)


class Parameters:
    """The parameters of an object in a request, by name, with their types.

    wide: those of 64 bits; tensors of the others have 32.  free: those whose numbers no tensor gets.
    """

    def __init__(self, types: Mapping[str, Any], wide: Collection[str] = (), free: Collection[str] = ()):
        self._types, self._wide, self._free = types, wide, free
        # Values of these types need no conversion, which would take longer than to see that.
        self._exact = {name: {int, float, bool, str} & set(get_args(kind) or (kind,)) for name, kind in types.items()}

    def convert(self, what: str, given: Any) -> dict[str, Any]:
        """A copy of `given` with values of these types: 16 for 16.0, true for 1.

        what: its name in errors. Raises ValueError, naming the parameter, if it is unknown or of another type.
        """
        if not isinstance(given, Mapping):
            raise ValueError(f"{what} must be an object, got {type(given).__name__}")
        converted = {}
        for name, value in given.items():
            if name not in self._types:
                raise ValueError(f"{what}: unknown parameter {name!r:.50}")
            if value is not None and type(value) not in self._exact[name]:
                try:
                    value = msgspec.convert(value, self._types[name], strict=not isinstance(value, int | float))
                except msgspec.ValidationError as error:
                    raise ValueError(f"{what}: {name}: {error}") from None
            if name not in self._free:
                _check_ints(f"{what}: {name}", value, 64 if name in self._wide else 32)
            converted[name] = value
        return converted

    def convert_each(self, what: str, given: Any) -> Any:
        """Convert one object, each of a list of them for a batch, or None, which means all defaults."""
        if given is None:
            return None
        if not isinstance(given, list | tuple):
            return self.convert(what, given)
        if not given:
            raise ValueError(f"{what} is an empty list")
        return [one if one is None else self.convert(what, one) for one in given]


@functools.cache
def field_names(kind: Any) -> frozenset[str]:
    """The names of the fields of a dataclass, a pydantic model or a struct."""
    if issubclass(kind, BaseModel):
        return frozenset(kind.model_fields)
    if issubclass(kind, msgspec.Struct):
        return frozenset(kind.__struct_fields__)
    return frozenset(field.name for field in dataclasses.fields(kind))


def types_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of a struct's fields, by name."""
    return {field.name: field.type for field in msgspec.structs.fields(struct)}


def _check_ints(name: str, value: Any, bits: int) -> None:
    """Raise ValueError if a value holds a number that needs more bits, which tensors and messages do not have."""
    if isinstance(value, int):
        if not -(1 << bits - 1) <= value < 1 << bits - 1:
            raise ValueError(f"{name} must be an integer of {bits} bits")
    elif isinstance(value, list):
        for one in value:
            _check_ints(name, one, bits)
