"""Options that are flat in text and in Python, and are stored in nested dataclasses. Pure.

A field with the metadata `NESTED` holds a value of the dataclass that is the field's default factory. The options of
that value are written as if they were options of the outer class: `FedAvg(dropout=0.1)` is
`FedAvg(population=PopulationSpec(dropout=0.1))`, in the text form `fedavg:dropout=0.1`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

from rayps_client.values import Json, JsonObject, Keywords

Option: TypeAlias = dataclasses.Field[Any]  # a field of any type
NESTED = {"nested": True}  # the metadata of a field with a nested value


class HasName(Protocol):
    """A strategy or a replica, of which the wire form uses the name, and the options, which are dataclass fields."""

    @property
    def name(self) -> str:
        """The name by which its class is found."""


def options_of(kind: type) -> list[Option]:
    """Return the options of a class, in order and including the options of nested values.

    The list is empty if the class is no dataclass.
    """
    found: list[Option] = []
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        inner = _find_kind(field)
        found += [field] if inner is None else options_of(inner)
    return found


def yield_options(value: Any) -> Iterator[tuple[Option, Any]]:
    """Yield each option of `value`, including nested options, as (option, value of the option)."""
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        held = getattr(value, field.name)
        if _find_kind(field) is not None:
            yield from yield_options(held)
        else:
            yield field, held


def wire_of(value: HasName) -> JsonObject:
    """Return a strategy's or a replica's name and options as JSON-ready data.

    An option whose default and value are both None is left out.
    """
    found: JsonObject = {"name": value.name}
    for field, held in sorted(yield_options(value), key=lambda option: option[0].default is None):
        if field.default is not None or held is not None:
            found[field.name] = _write_plain(held)
    return found


def _find_kind(field: Option) -> type | None:
    """Return the dataclass of a field's nested value, or None if the field is itself an option."""
    made = field.default_factory
    return made if "nested" in field.metadata and isinstance(made, type) else None


def _write_plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__") and hasattr(value, "name"):
        return wire_of(value)
    return list(value) if isinstance(value, tuple) else value


class FlatOptions:
    """A frozen dataclass whose nested options are given and read as if they were its own fields.

    Derived dataclasses inherit this class's `__init__`, including those decorated with plain `@dataclass(frozen=True)`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Set options by name, or in the order of `options_of`.

        Raises:
            TypeError: an option is unknown, missing or given twice.
        """
        kind = type(self)
        names = [field.name for field in options_of(kind) if not field.kw_only]
        if len(args) > len(names):
            raise TypeError(f"{kind.__name__} takes at most {len(names)} options, and {len(args)} were given")
        for name, value in zip(names, args, strict=False):
            if name in options:
                raise TypeError(f"{kind.__name__} got the option {name} twice, by position and by name")
            options[name] = value
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, _take_value(kind, field, options))
        if options:
            raise TypeError(f"{kind.__name__} has no option {next(iter(options))!r}; it has {', '.join(names)}")
        getattr(self, "__post_init__", lambda: None)()

    def __init_subclass__(cls, **more: Json) -> None:
        super().__init_subclass__(**more)
        if "__init__" not in cls.__dict__:
            cls.__init__ = FlatOptions.__init__  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        """Return an option that is stored in a nested value."""
        for value in self.__dict__.values():
            if dataclasses.is_dataclass(value) and any(field.name == name for field in dataclasses.fields(value)):
                return getattr(value, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _take_value(kind: type, field: Option, options: Keywords) -> Any:
    """Build the value of a field from the options that belong to it, and remove those options from `options`."""
    inner = _find_kind(field)
    given = options.pop(field.name, dataclasses.MISSING)
    if given is dataclasses.MISSING:
        given = field.default if inner is None else inner()
    if given is dataclasses.MISSING:
        raise TypeError(f"{kind.__name__} needs the option {field.name}")
    if inner is None:
        return given
    own = {option.name: options.pop(option.name) for option in options_of(inner) if option.name in options}
    return dataclasses.replace(given, **own) if own else given
