"""How bodies are read: nothing is converted, and what is not known, or not supported, is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from alignedserve.gateway.errors import UNSUPPORTED


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


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
