"""The number of workers of each kind in a deployment."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from alignedserve.core import Role
from alignedserve.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """The numbers of workers, written `colocated`, `4xcolocated`, or `P+D` such as `2+2`.

    `auto` is decided from nodes and GPUs before anything starts (launch/roles.py); until then it counts as one worker.
    """

    FORM: ClassVar = "colocated, 2xcolocated, prefill+decode workers such as 1+1, or auto"

    prefill_workers: int = 0
    decode_workers: int = 1
    is_auto: bool = False

    def __post_init__(self) -> None:
        if self.decode_workers < 1 or self.prefill_workers < 0:
            raise ConfigError(
                f"topology cannot be {self.prefill_workers} prefill and {self.decode_workers} decode workers: "
                "it is colocated, or at least 1+1"
            )

    @classmethod
    def parse(cls, text: str) -> Topology:
        if text == "auto":
            return cls(is_auto=True)
        if alike := re.fullmatch(r"(?:([1-9][0-9]{0,3})x)?colocated", text):
            return cls(0, int(alike[1] or 1))
        if parted := re.fullmatch(r"([1-9][0-9]{0,3})\+([1-9][0-9]{0,3})", text):
            return cls(int(parted[1]), int(parted[2]))
        raise ValueError(text)

    def __str__(self) -> str:
        if self.is_auto:
            return "auto"
        if not self.colocated:
            return f"{self.prefill_workers}+{self.decode_workers}"
        return "colocated" if self.decode_workers == 1 else f"{self.decode_workers}xcolocated"

    @property
    def colocated(self) -> bool:
        """Return whether decode workers run the prompts too."""
        return self.prefill_workers == 0

    @property
    def prompts_on(self) -> Role:
        """Return the kind of the workers that prompts go to."""
        return Role.DECODE if self.colocated else Role.PREFILL


@dataclass(frozen=True)
class Range:
    """The least and the most workers of a kind, written `1-4`."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Range:
        found = re.fullmatch(r"([1-9][0-9]{0,3})-([1-9][0-9]{0,3})", text)
        if found is None or int(found[2]) < int(found[1]):
            raise ValueError(text)
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.least}-{self.most}"

    def __contains__(self, count: object) -> bool:
        return isinstance(count, int) and self.least <= count <= self.most

    def nearest(self, count: int) -> int:
        return min(self.most, max(self.least, count))
