"""Tests that each run need not try: they cost much, and their kin that each run has find nearly all that they find.

    pytest --rare 1                              all of them
    pytest --rare 0.1 --rare-seed 57             a tenth, drawn by the seed
    pytest 'tests/engine/test_models.py::test_logits[opt]'       one that is named always runs

`make test` leaves them out. CI draws some by the commit below a change, so that each is tried in one of several changes
and no change draws again. `make soak` runs all. Mutants are tried without them: what finds a mutant alone is not rare
(tests/mutants).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import pytest

IN_SOAK = 1.0 if os.environ.get("SOAK") else 0.0

rare = pytest.mark.rare


def thinned(cases: Iterable[Any], usual: int) -> list[Any]:
    """Return all cases for `parametrize`. Each run tries `usual` of them, evenly spread from the first on."""
    cases = list(cases)
    often = {at * len(cases) // usual for at in range(usual)}
    return [case if at in often else rarely(case) for at, case in enumerate(cases)]


def is_rare(item: pytest.Item) -> bool:
    return item.get_closest_marker("rare") is not None


def rarely(case: Any) -> Any:
    """Return a case for `parametrize` that is rare. A tuple stands for several arguments."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=rare)


class Plugin:
    """Leaves out the rare tests that are neither drawn nor named."""

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.addoption(
            "--rare", type=float, default=IN_SOAK, metavar="SHARE", help="run this share of the rare tests (0 to 1)"
        )
        parser.addoption("--rare-seed", default="0", metavar="SEED", help="by which they are drawn")

    def pytest_report_header(self, config: pytest.Config) -> str:
        return f"rare tests: {config.option.rare:.0%} of them, drawn by {config.option.rare_seed} (tests/rare.py)"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        share, seed = config.option.rare, config.option.rare_seed
        named = tuple(arg for arg in config.args if "::" in arg)

        def runs(item: pytest.Item) -> bool:
            return (
                not is_rare(item) or Random(f"{seed} {item.nodeid}").random() < share or _is_named(item.nodeid, named)
            )

        left_out = [item for item in items if not runs(item)]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = filter(runs, items)


def _is_named(nodeid: str, named: Sequence[str]) -> bool:
    return any(nodeid == arg or nodeid.startswith((f"{arg}[", f"{arg}::")) for arg in named)
