"""Parse and check the bytes of a body."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from alignedserve.gateway.openai.errors import from_validation, invalid
from alignedserve.gateway.openai.strict import Strict

LARGE_BYTES = 256 << 10  # a body above this is parsed without the garbage collector

Body = TypeVar("Body", bound=Strict)


def parse_body(kind: type[Body], body: bytes | bytearray) -> Body:
    """Return the request in a body, or raise an ApiError that names what is wrong with it."""
    with _no_collection() if len(body) > LARGE_BYTES else nullcontext():
        return _parse(kind, body)


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


def _parse(kind: type[Body], body: bytes | bytearray) -> Body:
    try:
        tree = from_json(body.decode("utf-8"))  # accepts NaN, which many clients write: the field then refuses it
    except UnicodeDecodeError as error:
        raise invalid("the body is not UTF-8", code="invalid_json") from error
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(tree, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise from_validation(error, tree) from error
