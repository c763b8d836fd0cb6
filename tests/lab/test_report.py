"""Reports of a run: text, JSON, CSV, comparisons, sweeps, pictures and the file of its record."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from io import StringIO
from math import inf, isnan
from pathlib import Path

import pytest

from alignedserve.core import Slo, Usage
from alignedserve.errors import SimulateError
from alignedserve.lab.loads.figures.tables import Unit, table
from alignedserve.lab.loads.records import record_file
from alignedserve.lab.loads.records.distribution import cdf
from alignedserve.lab.loads.records.records import RunRecord
from alignedserve.lab.reports import plots
from alignedserve.lab.reports.comparison import Cell, compare, effective_throughput, sweeps
from alignedserve.lab.reports.figure_rows import COMPARED, NUMBERS, ROWS
from alignedserve.lab.reports.figures import RunFigures
from alignedserve.lab.reports.report import comparison_text, document, requests_csv, runs_csv, steps_csv, summary
from alignedserve.lab.reports.trial import SimulationTrial, TrialRun, trials
from tests.rare import rare, thinned
from tests.simulator.runs import MIXED, record, rt


def attaining(kept: int, of: int = 4) -> RunRecord:
    """Return a run in which this many RT requests attain, and the others come too late."""
    return record([rt(str(number), 0.0, 0.5 if number < kept else 1.5) for number in range(of)])


def run(preset: str, seed: int = 0, rate: float | None = None, kept: int = 4) -> TrialRun:
    return TrialRun.from_record(SimulationTrial(preset, seed=seed, rate=rate), attaining(kept))


THREE_SEEDS = [run("a", 1, kept=2), run("a", 2, kept=3), run("a", 3, kept=4), run("b", 1), run("b", 2), run("b", 3)]


# --- Text


def test_the_summary_names_every_figure_that_there_is() -> None:
    text = summary(TrialRun.from_record(SimulationTrial("fcfs", seed=7), MIXED))
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "fcfs, seed 7: colocated, workload default"
    for row in ROWS:
        assert any(line.startswith(row.label) for line in lines), row.label
    assert "attainment 25 %".split() in [line.split() for line in lines]
    assert lines[-1].split() == ["decode-0", "6", "10", "%", "7.5", "%", "5", "%"]


def test_the_summary_is_silent_on_what_there_is_nothing_of() -> None:
    text = summary(TrialRun.from_record(SimulationTrial("fcfs"), record([rt("r", 0.0, 0.5)])))
    assert "JCT attainment" not in text.partition("As the papers count")[0]
    assert "prediction error" not in text
    assert "nan" not in text


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        (Unit.NUMBER, 12345.0, "12,345"),
        (Unit.SHARE, 0.9731, "97.3 %"),
        (Unit.MILLISECONDS, 0.00416, "4.16 ms"),
        (Unit.PER_SECOND, 0.0, "0/s"),
        (Unit.SECONDS, float("nan"), "-"),
    ],
)
def test_numbers_are_short(unit: Unit, value: float, text: str) -> None:
    assert unit.show(value) == text


def test_columns_are_aligned() -> None:
    assert table([["", "a"], ["first", "10 %"], ["x", "1"]]) == "           a\nfirst   10 %\nx          1"


# --- Comparisons


def test_a_comparison_is_means_over_the_seeds_with_half_their_range() -> None:
    found = compare(THREE_SEEDS)
    assert (found.presets, found.seeds) == (("a", "b"), (1, 2, 3))
    (cells,) = [cells for row, cells in found.rows.items() if row.path == "rt.attainment"]
    assert cells == {"a": Cell(0.75, 0.25), "b": Cell(1.0, 0.0, is_best=True)}


def test_where_all_are_equal_none_is_best_and_lower_may_be_better() -> None:
    found = {row.path: [cell.is_best for cell in cells.values()] for row, cells in compare(THREE_SEEDS).rows.items()}
    assert not any(found["requests.refused"])
    assert found["rt.ttft_s.p99"] == [False, True]


def test_a_comparison_as_text() -> None:
    lines = comparison_text(THREE_SEEDS).splitlines()
    assert lines[0] == THREE_SEEDS[0].trial.setting
    assert lines[1] == "seeds 1, 2, 3: mean ± half the range; * is the best mean"
    (attainment,) = [line for line in lines if line.startswith("attainment")]
    assert attainment.split() == "attainment 75 ± 25 % 100 % *".split()
    assert any(line.startswith("refused ") for line in lines)


def test_presets_take_turns_in_going_first() -> None:
    planned = trials(SimulationTrial("x", cluster="1+1"), ["a", "b"], [1, 2], [])
    assert [(trial.preset, trial.seed) for trial in planned] == [("a", 1), ("b", 1), ("b", 2), ("a", 2)]
    assert {trial.cluster for trial in planned} == {"1+1"}


# --- Sweeps


def test_effective_throughput_lies_on_the_line_between_two_measured_rates() -> None:
    points = [(1, 1.0), (2, 0.95), (4, 0.75), (8, 0.35)]
    assert effective_throughput(points, 0.9).rate == pytest.approx(2.5)
    assert effective_throughput(points, 0.6).rate == pytest.approx(5.5)
    assert not effective_throughput(points, 0.9).is_lower_bound


def test_beyond_what_was_measured_there_is_a_bound_or_nothing() -> None:
    points = [(1, 0.8), (2, 0.7)]
    highest = effective_throughput(points, 0.6)
    assert (highest.rate, highest.is_lower_bound, str(highest)) == (2, True, "at least 2/s")
    assert isnan(effective_throughput(points, 0.9).rate)


def test_a_sweep_is_over_the_seeds_in_the_order_of_rates() -> None:
    runs = [run("a", seed, rate, kept) for rate, seed, kept in ((4.0, 1, 1), (4.0, 2, 3), (2.0, 1, 4), (2.0, 2, 4))]
    (found,) = sweeps(runs)
    assert [(point.rate, point.attainment) for point in found.points] == [(2.0, Cell(1.0, 0.0)), (4.0, Cell(0.5, 0.25))]
    assert [point.rate for point in found.effective] == [pytest.approx(2.4), pytest.approx(3.6)]
    text = comparison_text(runs)
    assert "highest rate at 90%" in text
    assert text.index("2/s, seeds 1, 2") < text.index("4/s, seeds 1, 2")


# --- JSON and CSV


def test_json_is_whole_strict_and_always_in_the_same_order() -> None:
    runs = [
        TrialRun.from_record(SimulationTrial("a", seed=1), MIXED),
        TrialRun.from_record(SimulationTrial("b", seed=1), attaining(4)),
    ]
    text = document(runs)
    assert text == document(runs)
    tree = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert list(tree) == ["format", "runs", "comparisons"]
    assert tree["runs"][0]["trial"]["preset"] == "a"
    assert tree["runs"][0]["figures"]["rt"]["attainment"] == 0.25
    assert tree["runs"][1]["figures"]["be"]["jct_attainment"] is None
    assert tree["runs"][0]["figures"]["workers"][0]["role"] == "decode"
    assert tree["comparisons"][0]["figures"]["rt.attainment"]["b"]["is_best"] is True


def test_a_row_for_each_request() -> None:
    rows = list(csv.DictReader(StringIO(requests_csv(MIXED))))
    assert [row["id"] for row in rows] == [request.id for request in MIXED.requests]
    quick, refused = rows[0], rows[3]
    assert (quick["service"], quick["outcome"], quick["attained"]) == ("rt", "finished", "1")
    assert (quick["ttft_s"], quick["mean_tpot_s"]) == ("0.3", "0.1")
    assert (quick["output_tokens"], quick["tokens_in_time"]) == ("3", "3")
    assert (refused["ttft_s"], refused["p99_tbt_s"], refused["end_to_end_s"], refused["attained"]) == ("", "", "", "0")


def test_a_row_for_each_step() -> None:
    rows = list(csv.DictReader(StringIO(steps_csv(MIXED))))
    assert [row["kind"] for row in rows] == ["prefill", "decode", "decode", "prefill", "decode", "decode"]
    assert (rows[4]["shortest"], rows[4]["longest"], rows[4]["predicted_s"]) == ("10", "50", "0.1")
    assert (rows[0]["predicted_s"], rows[0]["chunk_tokens"], rows[0]["free_share"]) == ("", "50", "0.75")


def test_a_row_for_each_run() -> None:
    rows = list(csv.DictReader(StringIO(runs_csv(THREE_SEEDS))))
    assert [(row["preset"], row["seed"], row["rt.attainment"]) for row in rows[:3]] == [
        ("a", "1", "0.5"),
        ("a", "2", "0.75"),
        ("a", "3", "1"),
    ]
    assert {row.path for row in COMPARED} < set(rows[0])
    assert {"requests.finished", "requests.left", "duration_s", "mean_step_share", "steps.count"} < set(rows[0])
    assert (rows[0]["workload"], rows[0]["cluster"], rows[0]["rate"]) == ("", "colocated", "")


def test_text_json_and_csv_say_the_same() -> None:
    run = TrialRun.from_record(SimulationTrial("a", "chat", rate=2.0), MIXED)
    [row] = csv.DictReader(StringIO(runs_csv([run])))
    [told] = json.loads(document([run]))["runs"]
    lines = [line.split() for line in summary(run).splitlines()]
    for number in NUMBERS:
        value = told["figures"]
        for name in number.path.split("."):
            value = value[name]
        assert (float(row[number.path]) if row[number.path] else None) == pytest.approx(value)
        if number in ROWS and value is not None:
            assert f"{number.label} {number.unit.show(value)}".split() in lines


def test_what_is_no_finite_number_is_left_out() -> None:
    """A run that took no time at all has no rates."""
    at_once = replace(MIXED, ended_at=MIXED.began_at, wall_s=5e-324)
    run = TrialRun.from_record(SimulationTrial("a"), at_once)
    json.loads(document([run, run]), parse_constant=pytest.fail)
    assert not {"inf", "nan", "-inf"} & set(runs_csv([run]).replace("\n", ",").split(","))
    assert " inf" not in summary(run)


# --- The record as a file


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    endless = replace(MIXED.requests[0], id="endless", slo=Slo(jct_s=inf))
    whole = replace(MIXED, requests=[*MIXED.requests, endless], pool=[Usage(rt=1, free=2)])
    record_file.save(whole, path)
    back = record_file.load(path)
    assert record_file.dump(back) == record_file.dump(whole)
    assert (back.requests, back.copies, back.pool) == (whole.requests, whole.copies, whole.pool)
    assert document([TrialRun.from_record(SimulationTrial("a"), back)]) == document(
        [TrialRun.from_record(SimulationTrial("a"), whole)]
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 2, "began_at": []}'])
def test_a_file_that_is_no_record_is_refused_in_a_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(SimulateError, match="is not the record of a run"):
        record_file.load(path)


# --- Pictures


@pytest.fixture
def needs_matplotlib() -> None:
    pytest.importorskip("matplotlib")


@pytest.mark.usefixtures("needs_matplotlib")
class TestPlots:
    HEADS = ((".png", b"\x89PNG\r\n\x1a\n"), (".svg", b"<?xml"))

    @pytest.mark.parametrize(("suffix", "head"), thinned(HEADS, usual=1))
    def test_of_a_run(self, tmp_path: Path, suffix: str, head: bytes) -> None:
        path = tmp_path / f"run{suffix}"
        plots.plot_run(MIXED, "a title", path)
        assert path.read_bytes().startswith(head)

    @rare
    def test_of_a_run_in_which_nothing_happened(self, tmp_path: Path) -> None:
        plots.plot_run(replace(record(), ended_at=0.0), "nothing", tmp_path / "run.svg")

    @rare  # another test draws a run
    def test_of_a_comparison_and_of_a_sweep_whose_titles_name_what_was_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        titles: list[str] = []
        monkeypatch.setattr("matplotlib.figure.Figure.suptitle", lambda _, text, **__: titles.append(text))
        first, second = (
            replace(run("a", seed, rate, 4), trial=SimulationTrial("a", "coserve", "2+2", seed, rate, "gpu"))
            for seed, rate in ((1, 2.0), (2, 4.0))
        )
        plots.plot_comparison([first], tmp_path / "compare.svg")
        plots.plot_sweep([first, second], tmp_path / "sweep.svg")
        assert first.trial.title == "a, 2/s, seed 1: 2+2, workload coserve, profile gpu"
        assert titles == [
            "2+2, workload coserve, profile gpu\n2/s, seed 1",
            "2+2, workload coserve, profile gpu\nseeds 1, 2: mean ± half the range",
        ]
        assert (tmp_path / "compare.svg").read_bytes().startswith(b"<?xml")
        assert (tmp_path / "sweep.svg").read_bytes().startswith(b"<?xml")


def test_attainment_over_time() -> None:
    """Windows are 0.25 s: of the four RT requests, which arrive at 0, 1, 2 and 3, only the first attains."""
    assert plots.attainment_over_time(MIXED) == [(0.125, 1.0), (1.125, 0.0), (2.125, 0.0), (3.125, 0.0)]


def test_a_curve_of_many_values_is_thinned_but_keeps_the_largest() -> None:
    assert cdf([2.0, 1.0]) == [(1.0, 0.5), (2.0, 1.0)]
    points = cdf(map(float, range(20_001)))
    assert 2000 < len(points) <= 5001
    assert points[-1] == (20_000.0, 1.0)


def test_how_many_there_are_over_time() -> None:
    assert plots.over_time([(0.0, 1), (2.0, -1), (1.0, 1), (3.0, -1)]) == [(0.0, 1), (1.0, 2), (2.0, 1), (3.0, 0)]
    assert plots.over_time([(0.0, 1), (0.0, -1), (1.0, -1), (1.0, 1)]) == [(0.0, 0), (1.0, 0)], "never fewer than none"


def test_without_matplotlib_a_plot_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SimulateError, match="pip install 'alignedserve\\[lab\\]'"):
        plots.check(Path("run.svg"))


def test_a_plot_is_a_png_or_an_svg() -> None:
    with pytest.raises(SimulateError, match=r"a plot is a \.png or an \.svg, not run\.gif"):
        plots.check(Path("run.gif"))


def test_all_figures_that_tables_name_are_there() -> None:
    figures = RunFigures.from_record(MIXED)
    for row in ROWS:
        row.show(figures)
    for row in COMPARED:
        figures.at(row.path)
