"""Draw mutants of all product code at random: from each folder by its lines, and from none too few."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from draw_folders import modules
from tests.mutants.operators import Change, changes
from tests.mutants.planted import SOURCE, Planted

LEAST = 3  # mutants of a folder
# Folders whose code decides. They are what a lost request, a wrong token or a broken promise comes from.
CORES = (
    "router",
    "prefill_worker",
    "decode_worker",
    "kvpool",
    "alignedserve/owner",
    "alignedserve/protocol",
    "alignedserve/schedulers",
    "alignedserve/scheduling",
    "alignedserve/worker",
)


def is_core(folder: str) -> bool:
    return any(folder == core or folder.startswith(f"{core}/") for core in CORES)


def part_of(folder: str) -> str:
    """Return the part of the product that a folder is in, whose tests are in one folder."""
    first, *others = Path(folder).parts
    return "/".join([first, *others[:1]]) if first == "alignedserve" else first


def files_by_folder() -> dict[str, list[str]]:
    """Return all product files in Python by their folders, cores first."""
    found: dict[str, list[str]] = {}
    for path in sorted(modules().values()):
        file = path.relative_to(SOURCE)
        found.setdefault(str(file.parent), []).append(str(file))
    return dict(sorted(found.items(), key=lambda entry: (not is_core(entry[0]), entry[0])))


def lines_of(files: list[str]) -> int:
    return sum(len(Path(SOURCE / file).read_text(encoding="utf-8").splitlines()) for file in files)


def shares(lines: Mapping[str, int], number: int, least: int = LEAST) -> dict[str, int]:
    """Return how many mutants are drawn of each folder: so many at least, and the rest in proportion to its lines."""
    rest = max(0, number - least * len(lines))
    return {folder: least + round(rest * count / sum(lines.values())) for folder, count in lines.items()}


def draw(files: list[str], number: int, seed: int) -> list[Planted]:
    """Draw changes of a folder's files: a larger number with the same seed draws the same ones, and more.

    A node is drawn first, and then one of its changes, so that a number that may become two others counts once.
    """
    nodes: dict[tuple[str, object], list[Change]] = {}
    for file in files:
        for change in changes(file):
            nodes.setdefault((file, change.place.path), []).append(change)
    luck = random.Random(f"{seed} {Path(files[0]).parent}")
    order = [(file, luck.choice(choices)) for (file, _), choices in nodes.items()]
    luck.shuffle(order)
    return [change.planted(file) for file, change in order[:number]]
