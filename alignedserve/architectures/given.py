"""A config.json, each key checked when it is read."""

from __future__ import annotations

import json
from contextlib import suppress
from copy import copy
from math import inf
from pathlib import Path
from typing import Any

from alignedserve.errors import ModelError, UnsupportedModel


class Given:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = read_json(path)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value as it is; the default only where the key is missing."""
        return self._values.get(key, default)

    def has(self, key: str) -> bool:
        return key in self._values

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int or value < 1:
            raise self.wrong(key, "a whole number above 0", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < inf:
            raise self.wrong(key, "a number above 0", value)
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false", value)
        return value

    def word(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if type(value) is not str:
            raise self.wrong(key, "a name", value)
        return value

    def section(self, key: str) -> Given:
        """Return an inner object; an empty one where it is null or missing."""
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object", value)
        section = copy(self)
        section._values = value
        return section

    @property
    def text(self) -> Given:
        """Return what the file says of the text model, which has its own section where there are other parts."""
        return self.section("text_config") if self.get("text_config") else self

    def token_ids(self, key: str) -> frozenset[int]:
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in ids):
            raise self.wrong(key, "a token id or a list of them", value)
        return frozenset(ids)

    def sections(self) -> list[str]:
        """Return the keys whose values are objects."""
        return [key for key, value in self._values.items() if isinstance(value, dict)]

    @property
    def folder(self) -> Path:
        return self._path.parent

    def wrong(self, key: str, wanted: str, value: Any) -> ModelError:
        return ModelError(f"{self._path}: {key} must be {wanted}, not {value!r:.60}")

    def unsupported(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.folder}: {what:.200} is not supported")

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if default is None and key not in self._values:
            raise ModelError(f"{self._path}: {key} is missing")
        return default if value is None else value


def decode_json(raw: bytes) -> Any:
    """Read JSON by msgspec, a tokenizer of 9 MB in a fifth of the time; a machine that only computes may lack it."""
    with suppress(ImportError):
        import msgspec

        with suppress(msgspec.DecodeError, RecursionError):  # json reads more, as NaN, and says better what is wrong
            return msgspec.json.decode(raw)
    return json.loads(raw.decode("utf-8"))


def encode_json(value: Any) -> bytes:
    with suppress(ImportError):
        import msgspec

        return msgspec.json.encode(value)
    return json.dumps(value, ensure_ascii=False).encode()


def read_json(path: Path) -> dict[str, Any]:
    try:
        read = decode_json(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, or an endless number
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return read


def read_json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
