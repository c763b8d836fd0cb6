"""From the bytes of a body to what a client asks for, checked."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from alignedserve.gateway.openai.errors import from_validation, invalid
from alignedserve.gateway.openai.strict import Strict

LARGE_BYTES = 256 << 10

Body = TypeVar("Body", bound=Strict)


def parsed(kind: type[Body], body: bytes | bytearray) -> Body:
    """The request in a body, or an ApiError that names what is wrong with it."""
    with _nothing_collected() if len(body) > LARGE_BYTES else nullcontext():
        return _parsed(kind, body)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Of millions of lists, made at once, Python's collector would look through all there are again and again: two
    thirds of the time that a hostile body takes. None of them is part of a circle. To freeze and to unfreeze puts them
    with the old ones, which are seldom looked through, and costs nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()
        if was_on:
            gc.enable()


def _parsed(kind: type[Body], body: bytes | bytearray) -> Body:
    try:
        given = from_json(body.decode("utf-8"))  # with NaN, which many clients write: its field then refuses it by name
    except UnicodeDecodeError as error:
        raise invalid("the body is not UTF-8", code="invalid_json") from error
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise from_validation(error, given) from error
