"""The values that `make figures` compares with: of loads that there are, with every seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignedserve.lab.benchmarks import figures
from alignedserve.lab.benchmarks.common.columns import NAMES, Load, kind_of
from alignedserve.lab.benchmarks.rules import kind_of as kind_of_mix
from alignedserve.lab.benchmarks.rules import mixes
from alignedserve.lab.reproduce.papers import PAPERS


@pytest.fixture
def loads(tmp_path: Path) -> dict[str, Load]:
    return figures.loads(tmp_path)


def test_every_point_of_a_published_figure_where_the_default_runs_is_a_load(loads: dict[str, Load]) -> None:
    run = {load.trial for load in loads.values()}
    for paper in PAPERS.values():
        for figure in paper.figures:
            assert run >= {trial for label, _, trial in figure.trials([0], False) if label in figure.ours}
    assert {kind_of(name) for name in loads} == {*PAPERS, "traces", "rules"}


def test_what_is_committed_is_of_loads_that_there_are(loads: dict[str, Load]) -> None:
    reasons, rows = figures.read(figures.COMMITTED)
    assert reasons[0]["reason"]
    assert loads.keys() >= rows.keys()
    for by_seed in rows.values():
        assert tuple(by_seed) == figures.SEEDS
        assert all({*NAMES} < row.keys() for row in by_seed.values())


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    row = {"load": "bros: 1", "seed": 0, **dict.fromkeys(NAMES, 1.0), "cpu_s": 2}
    reason = {"reason": "why", "loads": 1}
    figures.write(tmp_path / "new" / "figures.jsonl", [reason], {"bros: 1": {0: row}})
    assert figures.read(tmp_path / "new" / "figures.jsonl") == ([reason], {"bros: 1": {0: row}})
    assert json.loads((tmp_path / "new" / "figures.jsonl").read_text().splitlines()[1]) == row
    assert figures.read(tmp_path / "none.jsonl") == ([], {})


def test_a_line_says_what_moved_with_the_figures() -> None:
    before = {seed: dict.fromkeys(NAMES, 100.0) for seed in figures.SEEDS}
    now = {seed: {**columns, "latency_ms": 120.0 + seed} for seed, columns in before.items()}
    line = figures.line_of("bros: 1", before, now, figures.shifts(before, now))
    assert line.startswith("RED    bros: 1: latency_ms -21 ± 0.58 % | attained 100, documents 100, latency_ms 121,")
    assert figures.line_of("bros: 1", before, before, figures.shifts(before, before)).startswith("ok     bros: 1 | ")
    assert figures.line_of("bros: 1", {}, now, {}).startswith("new    bros: 1 | ")


def test_each_mix_of_the_rule_table_has_a_kind(tmp_path: Path) -> None:
    assert {kind_of_mix(mix) for mix in mixes(tmp_path)} == {"alone", "documents", "floods", "CPUs"}
    assert [*map(kind_of_mix, ("chats lots", "flood on a CPU", "scarce"))] == ["documents", "floods", "CPUs"]
