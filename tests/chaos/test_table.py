"""Tests that trials add up: in the state file, and in the table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.chaos.table import append, least_tried, num_faults, read, table
from tests.chaos.trial import Row


def row(scenario: str, seed: int, kills: int, **more: object) -> Row:
    made = Row(scenario, scenario, "processes", seed, faults=Counter(kills=kills), streams=10, tokens=500)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_a_state_file_gives_back_what_was_appended(tmp_path: Path) -> None:
    rows, state = (
        [row("1+1", 0, 4, absent=["no disk"]), row("2+2", 1, 6, problems=["lost"])],
        tmp_path / "new" / "state",
    )
    assert read(state) == []
    for each in rows:
        append(state, each)
    assert read(state) == rows
    assert num_faults(read(state)) == 10


def test_a_part_of_a_run_goes_on_with_what_was_tried_least() -> None:
    names, rows = ["1+1", "2+2", "ray"], list[Row]()
    for number in range(7):
        rows.append(row(least_tried(names, rows), number, 1))
    assert [each.scenario for each in rows] == ["1+1", "2+2", "ray", "1+1", "2+2", "ray", "1+1"]
    assert least_tried(["2+2", "new"], rows) == "new"


def test_the_table_sums_the_trials_of_a_scenario_and_says_what_went_wrong() -> None:
    killed = Counter(pool=3, decode=1)
    rows = [
        row("1+1", 0, 4, killed=killed),
        row("2+2", 1, 6),
        row("1+1", 2, 5, wrong=3, longest_pause_s=9.5, problems=["3 wrong"]),
    ]
    head, first, second, everything, legend, problem = table(rows).splitlines()
    columns = (
        head.replace("near ties", "near_ties")
        .replace("pause s", "pause_s")
        .replace("noticed s", "noticed_s")
        .replace("false alarms", "false_alarms")
        .split()
    )
    cells = dict(zip(columns, first.split(), strict=True))
    assert (cells["scenario"], cells["kills"], cells["streams"], cells["wrong"]) == ("1+1", "9", "20", "3")
    assert (cells["pool"], cells["decode"], cells["router"]) == ("3", "1", "0")
    assert (cells["pause_s"], cells["problems"]) == ("9.5", "1")
    assert second.split()[0] == "2+2"
    assert everything.split()[:9] == ["all", "0.0", "0", "3", "0", "1", "0", "0", "15"]
    assert legend.startswith("broken: ")
    assert problem == "1+1: 3 wrong"
