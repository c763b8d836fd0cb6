"""Validate bodies strictly: no value is converted, and unknown or unsupported fields are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, model_validator
from pydantic_core import PydanticCustomError

from alignedserve.gateway.openai.errors import UNSUPPORTED

MOST_NAMES = 2048  # fields of an object


class _FirstFault(FailFast):
    """FailFast made hashable, which the members of a union must be."""

    __hash__ = object.__hash__


T = TypeVar("T")
# A list is checked up to its first fault only: a hostile list would have millions of faults to write down.
ListOf: TypeAlias = Annotated[list[T], _FirstFault()]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_few_names(cls, tree: Any) -> Any:
        """Refuse an object with very many fields before they are checked: each fault would be written down."""
        if isinstance(tree, dict):
            for name, value in [(None, tree), *tree.items()]:
                if isinstance(value, dict) and len(value) > MOST_NAMES:
                    message = f"more than {MOST_NAMES} names in an object"
                    raise PydanticCustomError("many_names", message, {"field": name})
        return tree


def without_unsupported(tree: Any, unsupported: Mapping[str, tuple[Any, ...]], where: str = "") -> Any:
    """Return the object without its unsupported fields, or refuse it if such a field asks for something.

    `unsupported` maps a field to the values that, like null, ask for nothing."""
    if not isinstance(tree, dict):
        return tree
    for name, value in tree.items():
        if name in unsupported and value is not None and not any(_same(value, usual) for usual in unsupported[name]):
            message = f"{where}{name} is not supported yet: leave it out"
            raise PydanticCustomError(UNSUPPORTED, message, {"field": name})
    return {name: value for name, value in tree.items() if name not in unsupported}


def _same(value: Any, usual: Any) -> bool:
    """Return whether the values are equal in JSON: 1.0 equals 1, but true does not."""
    return isinstance(value, bool) == isinstance(usual, bool) and bool(value == usual)


class SentBack(Strict):
    """A part of an answer that clients send back as they got it: null is as if its field were not there."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given
