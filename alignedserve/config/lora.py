"""The adapters (LoRA) that a deployment begins with, as a setting says them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from alignedserve.errors import ConfigError

MOST_NAME = 200  # characters
_NEXT = re.compile(r",(?=[^,=]*=|,|$)")  # a comma before another name, and not within a folder's name


@dataclass(frozen=True)
class LoraFolders:
    """Names of adapters with their folders, written `sql=/path/of/one,chat=/path/of/another`.

    A folder's name may have commas, but not a comma and later an equals sign, which would be another adapter's name.
    """

    FORM: ClassVar = "NAME=FOLDER, such as sql=/models/sql-adapter"

    folders: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> LoraFolders:
        pairs = [pair.partition("=") for pair in _NEXT.split(text)]
        if not all(name.strip() and folder.strip() for name, _, folder in pairs):
            raise ValueError(text)
        return cls.from_pairs((name.strip(), folder.strip()) for name, _, folder in pairs)

    @classmethod
    def from_mapping(cls, folders: Mapping[object, object]) -> LoraFolders:
        """Return them from a section of a file."""
        if not folders or not all(isinstance(folder, str) and folder for folder in folders.values()):
            raise ValueError(folders)
        return cls.from_pairs((str(name), str(folder)) for name, folder in folders.items())

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, str]]) -> LoraFolders:
        made = [(name, str(Path(folder).expanduser().absolute())) for name, folder in pairs]
        names = [name for name, _ in made]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"lora: {twice!r:.80} is given twice: names of adapters must differ")
        if wrong := next((name for name in names if len(name) > MOST_NAME), None):
            raise ConfigError(f"lora: the name {wrong:.40}... is too long: at most {MOST_NAME} characters")
        if wrong := next((folder for _, folder in made if _NEXT.search(folder)), None):
            raise ConfigError(
                f"lora: the folder {wrong!r:.120} has a comma where a name could begin: give it another name"
            )
        return cls(tuple(made))

    def __str__(self) -> str:
        return ",".join(f"{name}={folder}" for name, folder in self.folders)
