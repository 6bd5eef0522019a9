"""Values: immutable objects with named fields, as a frozen, keyword-only dataclass would be.

A dataclass writes and compiles its methods when the class is made, about a millisecond for each.
A run that finds nothing to do would spend more on that than on looking at the tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from typing import dataclass_transform
else:

    def dataclass_transform(**_):
        """Stand in for the decorator of this name, which only a type checker needs."""
        return lambda cls: cls


_Kind = TypeVar("_Kind", bound="Value")


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Value:
    """Base of a class whose annotations name its fields.

    A class attribute is the default of the field of that name, and shared by all instances.
    """

    fields: ClassVar[tuple[str, ...]] = ()

    known: ClassVar[frozenset[str]] = frozenset()

    needed: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        cls.fields = tuple(cls.__annotations__)
        cls.known = frozenset(cls.fields)
        cls.needed = frozenset(name for name in cls.fields if name not in cls.__dict__)

    def __init__(self, **given: Any) -> None:
        if not self.needed <= given.keys() <= self.known:
            missing, unknown = self.needed.difference(given), set(given).difference(self.fields)
            told = f"missing {sorted(missing)}, unknown {sorted(unknown)}"
            raise TypeError(f"{type(self).__name__}: {told}")
        self.__dict__.update(given)

    def __setattr__(self, name: str, _: object) -> None:
        raise AttributeError(f"{name} of a {type(self).__name__} cannot be set: use `replace`")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.fields)

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.fields))

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.fields)
        return f"{type(self).__name__}({told})"


def replace(value: _Kind, **changes: Any) -> _Kind:
    """Return a copy of ``value`` with some fields changed."""
    return type(value)(**{name: getattr(value, name) for name in value.fields} | changes)


def plain(value: object) -> Any:
    """Return ``value`` with each `Value` in it as a dict of its fields, ready for JSON."""
    if value is None or isinstance(value, (str, int, float)):
        return value  # first, since most are
    if isinstance(value, Value):
        return {name: plain(getattr(value, name)) for name in value.fields}
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return value
