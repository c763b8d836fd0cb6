"""How bodies are read: nothing is converted, and what is not known, or not supported, is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, model_validator
from pydantic_core import PydanticCustomError

from alignedserve.gateway.openai.errors import UNSUPPORTED

MOST_NAMES = 2048  # of an object


class _FirstFault(FailFast):
    """Hashable, as what is in a union has to be."""

    __hash__ = object.__hash__


T = TypeVar("T")
# Of a list only the first fault is looked for: each of millions would be written down.
ListOf: TypeAlias = Annotated[list[T], _FirstFault()]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_names(cls, given: Any) -> Any:
        """Each fault of an object's fields is written down: of very many, none is looked for."""
        if isinstance(given, dict):
            for name, one in [(None, given), *given.items()]:
                if isinstance(one, dict) and len(one) > MOST_NAMES:
                    message = f"more than {MOST_NAMES} names in an object"
                    raise PydanticCustomError("many_names", message, {"field": name})
        return given


def without_unsupported(given: Any, unsupported: Mapping[str, tuple[Any, ...]], where: str = "") -> Any:
    """`unsupported`: field -> the values beside null that ask for nothing special."""
    if not isinstance(given, dict):
        return given
    for name, value in given.items():
        if name in unsupported and value is not None and not any(_same(value, usual) for usual in unsupported[name]):
            message = f"{where}{name} is not supported yet: leave it out"
            raise PydanticCustomError(UNSUPPORTED, message, {"field": name})
    return {name: value for name, value in given.items() if name not in unsupported}


def _same(value: Any, usual: Any) -> bool:
    """1.0 is 1, but true is not."""
    return isinstance(value, bool) == isinstance(usual, bool) and bool(value == usual)
