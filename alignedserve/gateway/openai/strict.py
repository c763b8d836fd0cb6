"""Parse bodies, and validate them strictly: nothing is converted, unknown or unsupported fields are refused by name."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from alignedserve.config.sources import hint
from alignedserve.gateway.openai.errors import UNKNOWN, UNSUPPORTED, from_validation, invalid

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_NAMES = 2048  # fields of an object
_MANY_NAMES = f"more than {MOST_NAMES} names in an object"
MOST_BRACKETS = 131_072  # [ and { of a body, in its texts too: each list or object takes the event loop up to 2.5 µs
_MOST_SPELLED = 64  # characters of a name that are compared with those that are known


class _FirstFault(FailFast):
    """FailFast made hashable, which the members of a union must be."""

    __hash__ = object.__hash__


T = TypeVar("T")
# A list is checked up to its first fault only: a hostile list would have millions of faults to write down.
ListOf: TypeAlias = Annotated[list[T], _FirstFault()]


def type_of(given: Any) -> Any:
    """Return the `type` of an object, as a body has it or parsed."""
    return given.get("type") if isinstance(given, dict) else getattr(given, "type", None)


TextOr: TypeAlias = Annotated[  # a text, or a list of this type
    Annotated[str, Tag("text")] | Annotated[T, Tag("list")],
    Discriminator(lambda given: "list" if isinstance(given, list) else "text"),
]
_IGNORED = "ignored"
Ignored: TypeAlias = Annotated[Any, _IGNORED]  # of a field without a meaning here, whose absence changes no answer


def fault(field: str | None, message: str, kind: str = "rule") -> PydanticCustomError:
    """Return the fault of an object in which this field is the one to change."""
    return PydanticCustomError(kind, message, {"field": field})  # pyrefly: ignore[bad-argument-type]  # any str will do


Usual: TypeAlias = Mapping[str, tuple[Any, ...]]  # field -> values that ask for nothing


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    # Fields that are known but not supported, with the values that, like null, ask for nothing.
    UNSUPPORTED: ClassVar[Usual] = {}
    WHERE: ClassVar[str] = ""  # such a field stands, for its error

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Self:
        """Return the object of these fields; raise an ApiError that names what is wrong."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise from_validation(error, tree) from None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, tree: Any) -> Any:
        """Drop unsupported fields that ask for nothing, and refuse the others and unknown ones. Refuse an object with
        very many fields before they are checked: each fault would be written down."""
        if not isinstance(tree, dict):
            return tree
        for name, value in tree.items() if cls.UNSUPPORTED else ():
            if name not in cls.UNSUPPORTED or value is None:
                continue
            is_bool, usual = isinstance(value, bool), cls.UNSUPPORTED[name]  # in JSON 1.0 equals 1, but true does not
            if not any(value == each and is_bool == isinstance(each, bool) for each in usual):
                raise fault(name, f"{cls.WHERE}{name} is not supported yet: leave it out", UNSUPPORTED)
        tree = {name: value for name, value in tree.items() if name not in cls.UNSUPPORTED}
        for name, value in [(None, tree), *tree.items()]:
            if isinstance(value, dict) and len(value) > MOST_NAMES:
                raise fault(name, _MANY_NAMES)
        if (name := next((name for name in tree if name not in _fields_of(cls)), None)) is not None:
            raise fault(name, f"there is no such field{hint(name[:_MOST_SPELLED], _fields_of(cls))}", UNKNOWN)
        return tree

    @property
    def ignored(self) -> list[str]:
        """The fields that are set and change nothing; a header names them to the client."""
        fields = type(self).model_fields.items()
        return [
            name for name, field in fields if _IGNORED in field.metadata and getattr(self, name) not in (None, False)
        ]


@cache
def _fields_of(kind: type[Strict]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


class Ruled(Strict):
    """An object with rules about several of its fields."""

    def faults(self) -> Iterator[PydanticCustomError]:
        """Yield the faults; only the first counts."""
        yield from ()

    @model_validator(mode="after")
    def _check_rules(self) -> Ruled:
        for found in self.faults():
            raise found
        return self


class SentBack(Strict):
    """A part of an answer that clients send back as they got it: null is as if its field were not there."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


LARGE_BYTES = 256 << 10  # a body above this is parsed without the garbage collector

Body = TypeVar("Body", bound=Strict)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause Python's garbage collector.

    While a hostile body becomes millions of lists, the collector would search all of them again and again: two thirds
    of the time of parsing. None of these lists is part of a cycle. Freezing and unfreezing them moves them to the
    oldest generation, which is searched seldom, and costs nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        if was_on:
            gc.enable()


def parse_body(kind: type[Body], body: bytes | bytearray) -> Body:
    """Return the request in a body, or raise an ApiError that names what is wrong with it."""
    if len(body) > MOST_BRACKETS and body.count(b"[") + body.count(b"{") > MOST_BRACKETS:
        raise invalid(f"the body has more than {MOST_BRACKETS} brackets [ and {{: send it in parts", code="too_large")
    with _no_collection() if len(body) > LARGE_BYTES else nullcontext():
        try:
            tree = from_json(body.decode("utf-8"))  # accepts NaN, which many clients write: the field then refuses it
        except UnicodeDecodeError as error:
            raise invalid("the body is not UTF-8", code="invalid_json") from error
        except ValueError as error:
            said = "the body is not JSON"
            raise invalid(f"{said}: {error}", code="invalid_json", logged=said) from error
        if not isinstance(tree, dict):
            raise invalid("the body must be a JSON object", code="invalid_json")
        if len(tree) > MOST_NAMES:
            raise invalid(_MANY_NAMES)
        return kind.of(tree)
