"""The metadata of a file's architecture, each key checked when it is read."""

from __future__ import annotations

from typing import Any

from alignedserve.architectures.gguf.file import GgufFile
from alignedserve.errors import ModelError, UnsupportedModel


class Facts:
    """The metadata of a file's architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.tensors = file, file.tensors
        self.architecture: str = _checked(file, "general.architecture", file.metadata.get("general.architecture"), str)

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        number: int = _checked(self.file, f"{self.architecture}.{key}", default if value is None else value, int)
        return number

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        return float(_checked(self.file, f"{self.architecture}.{key}", value, (int, float)))

    def unsupported(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.file.path}: {what} is not supported")


def _checked(file: GgufFile, key: str, value: Any, kind: Any) -> Any:
    if isinstance(value, kind) and not isinstance(value, bool):
        return value
    raise ModelError(f"{file.path}: its metadata has {'no ' if value is None else 'a wrong '}{key}")
