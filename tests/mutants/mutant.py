"""A mutant: one small change of the source that breaks a core."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # from the root of the repository
    old: str  # text that occurs once in the file
    new: str
    breaks: str  # what goes wrong, as a sentence
    is_the_same: str = ""  # why the mutant behaves as the source does, where it does

    @property
    def tests(self) -> str:
        """Return the folder of the unit tests of the mutated file."""
        first, second, *_ = Path(self.file).parts
        return f"tests/{second}" if first == "alignedserve" else f"tests/{first}"

    def plant(self, root: Path = SOURCE) -> str:
        """Return the source of the file with the mutation."""
        source = (root / self.file).read_text(encoding="utf-8")
        if (times := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its text occurs {times} times in {self.file}")
        return source.replace(self.old, self.new)
