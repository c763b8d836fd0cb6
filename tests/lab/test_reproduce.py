"""Tests of `alignedserve reproduce`: every declared figure can run, and what ran is written as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import isnan
from pathlib import Path

import pytest

from alignedserve import progress
from alignedserve.cli import main as cli
from alignedserve.errors import SimulateError
from alignedserve.lab.cli import reproduce
from alignedserve.lab.cli.flags import WhatIsReproduced
from alignedserve.lab.processes import processes
from alignedserve.lab.reports.figure_rows import Better
from alignedserve.lab.reports.figures import RunFigures
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.reproduce import papers
from alignedserve.lab.reproduce.figure import Axis, Cells, Claim, Figure, Paper, Point, Rival, X
from alignedserve.lab.reproduce.page import FigureRun, document, page, picture, read_document, shown, tables
from alignedserve.lab.reproduce.papers import PAPERS, chosen
from alignedserve.lab.trials.building import settings_of
from alignedserve.lab.trials.running import figures_of
from alignedserve.progress import ProgressBar
from tests.rare import rare, rarely
from tests.simulator.runs import MIXED

DECLARED = [(paper, figure) for paper in PAPERS.values() for figure in paper.figures]

# --- What is declared


@pytest.mark.parametrize("is_full", [False, rarely(True)])
def test_every_run_of_a_figure_resolves(is_full: bool) -> None:
    """Presets, options, clusters, workloads and devices exist: each system and each point is resolved once."""
    for _, figure in DECLARED:
        resolved: set[object] = set()
        for label, x, trial in figure.trials([0], is_full):
            if not resolved >= {label, x}:
                settings_of(trial)
            resolved |= {label, x}


def test_a_figure_reads_off_what_is_measured() -> None:
    figures = RunFigures.from_record(MIXED)
    for _, figure in DECLARED:
        figures.at(figure.metric)


def test_curves_and_points_have_names_of_their_own_and_our_default_is_among_them() -> None:
    for paper, figure in DECLARED:
        labels, xs = [system.label for system in figure.systems], [point.x for point in figure.points]
        assert len({*labels}) == len(labels), (paper.name, figure.number)
        assert len({*xs}) == len(xs), (paper.name, figure.number)
        assert figure.shown(is_full=False), (paper.name, figure.number)
        assert figure.ours, (paper.name, figure.number)


def test_claims_are_of_curves_and_points_of_their_figure() -> None:
    """A claim that names no curve or point of the figure's usual or full size raises as it is computed."""
    for _, figure in DECLARED:
        labels = [system.label for system in figure.systems]
        for is_full in (False, True):
            keys = product(labels, [point.x for point in figure.shown(is_full)])
            cells = Cells({key: [0.5 + number / 100] for number, key in enumerate(keys)}, figure.better)
            for claim in figure.claims:
                claim.of(cells)


def test_numbers_of_figures_are_names_of_files() -> None:
    names = [picture(paper, figure) for paper, figure in DECLARED]
    assert len({*names}) == len(names)
    assert all(Path(name).name == name for name in names)


# --- Numbers of a figure

CELLS = Cells(
    {("a", 1.0): [2.0, 4.0], ("b", 1.0): [1.0, 1.0], ("a", 2.0): [8.0, 8.0], ("b", 2.0): [10.0, 10.0]}, Better.HIGHER
)


def test_what_claims_compute_with() -> None:
    assert (CELLS.at("a", 1.0), CELLS.cell("a", 1.0).half_range) == (3.0, 1.0)
    assert CELLS.times("a", "b", 1.0) == 3.0
    assert CELLS.most_times("a", "b") == 3.0
    assert CELLS.over("a") == 5.5
    assert CELLS.times_over("a", "b") == 1.0
    assert CELLS.less("a", "b") == pytest.approx(100 * (-2.0 + 0.2) / 2)


@pytest.mark.parametrize(
    ("text", "paper", "ours", "part"),
    [
        ("a ÷ b", 4.0, 2.0, 0.5),
        ("a ÷ b", 0.25, 0.5, 0.5),
        ("a ÷ b", 0.25, 4.0, -1.0),  # slower, where the paper is faster
        ("a ÷ b", 1.5, 1.0, 0.0),
        ("a below b, %", 40.0, 10.0, 0.25),
        ("points that a adds", 4.0, -2.0, -0.5),
    ],
)
def test_an_effect_counts_with_its_direction(text: str, paper: float, ours: float, part: float) -> None:
    assert Claim(text, paper, lambda _cells: ours).shown(CELLS) == pytest.approx(part)


def test_a_sentence_counts_effects_by_what_is_shown() -> None:
    found = [(Claim("a ÷ b", 0.5, lambda _cells, ours=ours: ours), CELLS) for ours in (0.4, 0.6, 0.9, 1.0, 2.0, 0.0)]
    found.append((Claim("a, mean, %", 2.0, lambda _cells: 2.0, is_effect=False), CELLS))
    assert shown(found) == (
        "Of 6 effects: 1 in full, 1 half or more, 1 less than half, 1 none, 1 the opposite, 1 not known."
    )


def test_a_highest_rate_lies_between_two_points() -> None:
    falling = Cells({("a", 1.0): [1.0], ("a", 2.0): [0.8], ("a", 3.0): [0.0]})
    assert falling.crossing("a", 0.9) == pytest.approx(1.5)
    assert falling.crossing("a", 0.4) == pytest.approx(2.5)
    assert isnan(Cells({("a", 1.0): [0.1]}).crossing("a", 0.9))


def test_where_a_system_is_behind_the_best_of_the_others() -> None:
    assert CELLS.behind("a") == {2.0: pytest.approx(0.2)}
    assert CELLS.behind("b") == {1.0: pytest.approx(2 / 3)}
    assert replace(CELLS, better=Better.LOWER).behind("b") == {2.0: pytest.approx(0.25)}
    assert CELLS.behind("a", kin=["b"]) == {}, "our default on another cluster is no rival"


def test_half_a_percent_is_no_difference() -> None:
    assert Cells({("a", "x"): [0.995], ("b", "x"): [1.0]}).behind("a") == {}


# --- A small figure

SMALL = "chat,num_requests=4,rate=50,prompt=exp:60:400,output=exp:4:20"
FIGURE = Figure(
    "1",
    "tokens against the rate",
    Axis("requests in a second"),
    Axis("time of a step", "ms"),
    (Rival("Theirs", "fcfs"), Rival("aligned", "aligned", "1+1")),
    (Point(50, SMALL), Point(80, SMALL.replace("rate=50", "rate=80"), only_full=True)),
    "steps.seconds.p50",
    (Claim("steps of aligned ÷ Theirs", 2.0, lambda cells: cells.times("aligned", "Theirs", 50)),),
    "Nothing is shown.",
    Better.LOWER,
    "for want of a better test.",
)
PAPER = Paper("small", "Small", (FIGURE,))
RUN = FigureRun((0,), False, {("aligned", 50): [0.02], ("Theirs", 50): [0.01]}, reproduce.size_of(FIGURE, False))
RUNS = {("small", "1"): RUN}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers, "_PAPERS", (PAPER,))
    monkeypatch.setitem(PAPERS, "small", PAPER)


def test_tables_say_what_the_paper_says_and_what_ran() -> None:
    lines = tables([PAPER], RUNS).splitlines()
    assert lines[0] == "## Small"
    assert "| requests in a second \\ time of a step, ms | Theirs | aligned |" in lines
    assert "| 50 | 10 | 20 |" in lines
    assert "| steps of aligned ÷ Theirs | 2 | 2 | 1 |" in lines
    last = "Of 1 effect: 1 in full. Nothing is shown. "
    last += "`aligned` is behind the best by 100 % at 50: for want of a better test."
    assert lines[-1] == last


def test_the_page_shows_the_picture_and_how_to_make_it() -> None:
    text = page([PAPER], RUNS)
    assert "![Small, figure 1](reproductions/small-1.svg)" in text
    assert "`alignedserve reproduce small --figure 1 --seeds 0`: 1 seed, 4 requests, 256 seats" in text
    assert "All papers: Of 1 effect: 1 in full." in text


def test_numbers_are_read_again_as_they_were_written() -> None:
    assert read_document(document(PAPER, RUNS), "small.json") == {
        ("small", "1"): replace(RUN, values={("Theirs", 50): [0.01], ("aligned", 50): [0.02]})
    }


def test_a_missing_number_is_read_again() -> None:
    runs = {("small", "1"): replace(RUN, values={("aligned", 50): [float("nan")], ("Theirs", 50): [1.0]})}
    text = document(PAPER, runs)
    assert '"ours": null' in text
    assert isnan(read_document(text, "small.json")["small", "1"].values["aligned", 50][0])
    assert "| 50 | 1,000 | - |" in tables([PAPER], runs)


def test_numbers_of_another_declaration_are_left_out() -> None:
    other = replace(PAPER, figures=(replace(FIGURE, systems=FIGURE.systems[1:]),))
    assert tables([other], RUNS) == "\n"
    assert "Small" not in page([other], RUNS)


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"format": 1, "paper": "a", "figures": [{}]}', '{"format": 2}'])
def test_a_file_of_something_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(SimulateError) as found:
        read_document(text, "small.json")
    assert "\n" not in str(found.value)


# --- The command


@pytest.mark.usefixtures("small")
def test_a_figure_runs_and_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert cli.main(["reproduce", "small", "--seeds", "0,1", "--jobs", "1", "--out", str(out)]) == 0
    shown, err = capsys.readouterr()
    assert ("| 50 |" in shown, "| 80 |" in shown) == (True, False)
    assert err == "reproduce: 4 simulated runs: about 28 s with 1 process; estimated again as they end\n"
    assert shown.splitlines()[-1] in (out / "reproductions.md").read_text()
    tree = json.loads((out / "reproductions" / "small.json").read_text())
    cells = tree["figures"][0]["cells"]
    assert [(cell["system"], cell["x"], len(cell["values"])) for cell in cells] == [
        ("Theirs", 50, 2),
        ("aligned", 50, 2),
    ]
    assert (out / "reproductions" / "small-1.svg").stat().st_size > 1000


@pytest.mark.usefixtures("small")
def test_a_page_keeps_what_ran_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Paper("other", "Other", (FIGURE,))
    monkeypatch.setitem(PAPERS, "other", other)
    for paper in (PAPER, other):
        reproduce.run((paper,), WhatIsReproduced(seeds=(0,), jobs=1, out=tmp_path))
    text = (tmp_path / "reproductions.md").read_text()
    assert ("## Small" in text, "## Other" in text) == (True, True)


@pytest.mark.usefixtures("small")
def test_a_trial_of_two_figures_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[SimulationTrial] = []

    def counted(trial: SimulationTrial, _: object) -> object:
        ran.append(trial)
        return MIXED

    monkeypatch.setattr("alignedserve.lab.trials.running.run_once", counted)
    twice = replace(PAPER, figures=(FIGURE, replace(FIGURE, number="2", metric="tokens_per_s")))
    assert reproduce.run((twice,), WhatIsReproduced(seeds=(0, 1), jobs=1)) == 0
    assert len(ran) == len({*ran}) == 4


class Runs:
    """What the command runs; each trial takes two seconds by a recorded run, and Ctrl-C may come before one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[SimulationTrial] = []
        self.interrupted_before = 100
        monkeypatch.setattr("alignedserve.lab.reports.plots.are_possible", lambda: False)
        monkeypatch.setattr("alignedserve.lab.trials.running.run_once", self._run)

    def _run(self, trial: SimulationTrial, _: object) -> object:
        if len(self.ran) == self.interrupted_before:
            raise KeyboardInterrupt
        self.ran.append(trial)
        return replace(MIXED, wall_s=2.0)


TWICE = replace(PAPER, figures=(FIGURE, replace(FIGURE, number="2", systems=(Rival("Third", "sarathi"),), claims=())))
COMMAND = "reproduce small --seeds 0 --jobs 1"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Three trials: two of the first figure, one of the second."""
    monkeypatch.setattr(papers, "_PAPERS", (TWICE,))
    monkeypatch.setitem(PAPERS, "small", TWICE)
    return Runs(monkeypatch)


def test_an_interrupted_command_writes_whole_figures_and_goes_on_from_there(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*COMMAND.split(), "--out", str(tmp_path)]
    runs.interrupted_before = 2
    assert cli.main(argv) == 130
    shown, err = capsys.readouterr()
    page = (tmp_path / "reproductions.md").read_text()
    assert [("figure 1:" in text, "figure 2:" in text) for text in (shown, page)] == [(True, False)] * 2
    kept = tmp_path / "reproductions" / "runs.jsonl"
    assert err.splitlines()[-1] == (
        f"alignedserve: interrupted after 2 of 3 runs, which {kept} keeps: the same command goes on from there;"
        " figures that are whole: 1"
    )
    runs.interrupted_before = 100
    kept.write_text(kept.read_text() + '{"trial": "cut o')  # as a command leaves it that was killed
    assert cli.main(argv) == 0
    shown, err = capsys.readouterr()
    assert ("figure 1:" in shown, "figure 2:" in shown) == (True, True)
    said = "reproduce: 3 simulated runs, 2 of them kept from an earlier command: about 2 s with 1 process"
    assert err.startswith(said)
    assert [trial.preset for trial in runs.ran] == ["fcfs", "aligned", "sarathi"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().err == (
        "reproduce: 3 simulated runs, 3 of them kept from an earlier command: nothing is left to run\n"
    )


def test_what_other_code_ran_is_run_again(runs: Runs, tmp_path: Path) -> None:
    argv = [*COMMAND.split(), "--out", str(tmp_path)]
    assert cli.main(argv) == 0
    kept = tmp_path / "reproductions" / "runs.jsonl"
    kept.write_text(kept.read_text().replace('{"code": "', '{"code": "0'))
    assert cli.main(argv) == 0
    assert len(runs.ran) == 6


def test_without_a_folder_an_interrupt_shows_whole_figures(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.interrupted_before = 2
    assert cli.main(COMMAND.split()) == 130
    shown, err = capsys.readouterr()
    assert ("figure 1:" in shown, "figure 2:" in shown) == (True, False)
    assert err.endswith("after 2 of 3 runs, which are lost: --out FOLDER keeps them for the next time\n")


@pytest.mark.usefixtures("runs")
def test_the_time_left_follows_from_runs_that_have_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProgressBar, "_next_line_at", 0.0)
    monkeypatch.setattr(progress, "_LOG_PAUSE_S", 0.0)
    assert cli.main(COMMAND.split()) == 0
    said = [line.split("] ")[1] for line in capsys.readouterr().err.splitlines()[1:]]
    assert said == ["1 of 3, about 4 s left", "2 of 3, about 2 s left", "3 of 3"]


@pytest.mark.usefixtures("small")
def test_the_full_size_has_all_points(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "small", "--seeds", "0", "--jobs", "1", "--full"]) == 0
    shown, _ = capsys.readouterr()
    assert ("| 50 |" in shown, "| 80 |" in shown, "--full`" in shown) == (True, True, True)


@rare  # the figures that other tests make run in one process
def test_processes_give_what_one_gives() -> None:
    trials = [SimulationTrial("fcfs", SMALL, seed=seed) for seed in range(2)]
    found = []
    for jobs in (1, 2):
        with processes(jobs) as started:
            found.append({run.trial: run.figures.tokens_per_s for run in started.as_done(figures_of, trials)})
    assert found[0] == found[1]
    assert len(found[0]) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("reproduce brso", "there is no paper 'brso': there are alignedserve, bros"),
        ("reproduce brso", "did you mean bros?"),
        ("reproduce alignedserve --figure 99", "alignedserve has no figure '99' here: it has"),
        ("reproduce --figure 7", "--figure needs a paper"),
        ("reproduce --jobs 0", "a whole number of 1 or more"),
        ("reproduce alignedserve --out /dev/null/x", "cannot be made"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), said in err) == ("", 1, True)


def test_papers_are_found_by_name() -> None:
    assert [paper.name for paper in chosen(None, None)] == list(PAPERS)
    assert [figure.number for figure in chosen("alignedserve", ["9", "7", "9"])[0].figures] == ["9", "7"]


@pytest.mark.parametrize(
    ("text", "paper", "of", "marks"),
    [
        ("A ÷ B at 2", 3.0, lambda cells: cells.times("A", "B", 2), [("A", 2, 12.0)]),
        ("A below B, mean, %", 75.0, lambda cells: cells.less("A", "B"), [("A", 1, 0.5), ("A", 2, 1.0)]),
        ("A, mended ÷ A at 1", 5.0, lambda cells: cells.times("A, mended", "A", 1), [("A, mended", 1, 5.0)]),
        ("B, mean", 6.0, lambda cells: cells.over("B"), [("B", 1, 4.0), ("B", 2, 8.0)]),
        ("B ÷ A, most", 6.0, lambda cells: cells.most_times("B", "A"), [("B", 1, 6.0), ("B", 2, 12.0)]),
        ("what A adds to B", 3.0, lambda cells: cells.at("A", 1) - cells.at("B", 1), []),  # about no one system
        ("A, always", 3.0, lambda _: 1.0, []),  # nothing that A does leads there
    ],
)
def test_a_mark_stands_where_the_papers_number_would_put_the_system(
    text: str, paper: float, of: Callable[[Cells], float], marks: list[tuple[str, X, float]]
) -> None:
    values = {"A": (1.0, 2.0), "A, mended": (2.0, 2.0), "B": (2.0, 4.0)}
    cells = Cells({(label, x): [both[x - 1]] for label, both in values.items() for x in (1, 2)})
    found = list(Claim(text, paper, of).marks(cells))
    assert [mark[:2] for mark in found] == [mark[:2] for mark in marks]
    assert [mark[2] for mark in found] == pytest.approx([mark[2] for mark in marks])


def test_a_number_about_a_place_on_the_x_axis_says_where_its_mark_is_and_a_system_may_be_named() -> None:
    cells = Cells({("A", 1): [1.0], ("A", 2): [2.0]})

    def of(cells: Cells) -> float:
        return cells.at("A", 2)

    assert list(Claim("rate at 1.5", 9.0, of, "A", at=lambda _: (9.0, 1.5)).marks(cells)) == [("A", 9.0, 1.5)]
    ((label, x, value),) = Claim("points more at 2", 9.0, of, "A").marks(cells)
    assert (label, x) == ("A", 2)
    assert value == pytest.approx(9.0)
