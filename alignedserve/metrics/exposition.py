"""Metrics in Prometheus' text form, as blocks: a family's name and meaning, and below them its series.

Blocks are made one at a time, and the event loop goes on in between: all of them together would hold it for
milliseconds, in which no stream gets its token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

_HELP = "# HELP "


def block(name: str, kind: str, about: str, lines: Iterable[str]) -> str:
    return f"{_HELP}{name} {about}\n# TYPE {name} {kind}\n{''.join(lines)}"


def line(name: str, labels: str, value: float) -> str:
    return f"{name}{{{labels}}} {float(value)}\n"


def label(name: str, value: str) -> str:
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'{name}="{escaped}"'


async def in_turns(blocks: Iterable[str]) -> list[str]:
    """Make the blocks, and let the event loop go on after each."""
    made: list[str] = []
    for one in blocks:
        made.append(one)
        await asyncio.sleep(0)
    return made


def split(text: str) -> list[str]:
    """Return the blocks of a text."""
    return [f"{_HELP}{rest}\n" for rest in f"\n{text}".removesuffix("\n").split(f"\n{_HELP}")[1:]]


def merge(blocks: Iterable[str]) -> str:
    """Return the blocks as one text, with each family once, that has the series of all."""
    families: dict[tuple[str, str], list[str]] = {}  # by its two lines of comment
    for one in blocks:
        about, kind, series = one.split("\n", 2)
        families.setdefault((about, kind), []).append(series)
    return "".join(piece for (about, kind), series in families.items() for piece in (f"{about}\n{kind}\n", *series))
