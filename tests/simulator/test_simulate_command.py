"""`alignedserve simulate` runs, writes what it was asked for, and fails in one line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve import cli, simulate_command
from alignedserve.progress import Progress
from alignedserve.simulate_once import parse_cluster, run_once, settings_of
from alignedserve.simulator import record_file
from alignedserve.simulator.figures import Figures, tree_of
from alignedserve.simulator.records import Outcome, RunRecord
from alignedserve.simulator.run import Simulation, simulate
from alignedserve.simulator.trial import OnProgress, RunOnce, Trial
from tests.simulator.runs import MIXED

SMALL = "chat,num_requests=5,rate=50,prompt=exp:60:400,output=exp:4:20"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """What was asked to run; each run is the same, made by hand, so that nothing is simulated."""
    found: list[Trial] = []

    def stub(trial: Trial, on_progress: OnProgress) -> RunRecord:
        found.append(trial)
        on_progress(1, 2)
        return MIXED

    monkeypatch.setattr(simulate_command, "run_once", stub)
    monkeypatch.setattr(simulate_command, "settings_of", lambda _: None)
    return found


def _refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["simulate", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.removeprefix("alignedserve: ").strip()


# --- A real run


def test_it_really_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    assert cli.main(["simulate", "--workload", SMALL, "--cluster", "1+1", "--save", str(saved)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"fcfs, seed 0: 1+1, workload {SMALL}\n")
    assert err == ""
    record = record_file.load(saved)
    assert [request.outcome for request in record.requests] == [Outcome.FINISHED] * 5
    assert set(record.workers) == {"prefill-0", "decode-0"}
    assert len(record.copies) == sum(len(request.token_at) > 1 for request in record.requests) * 2


def test_a_record_holds_what_happened() -> None:
    settings = settings_of(Trial("fcfs", SMALL))
    simulation = Simulation(settings)
    summary = simulation.run()
    record = simulation.record(wall_s=1.0)
    found = Figures.of(record)
    assert found.requests.finished == summary.num_finished == 5
    assert found.rt.ttft_s.p99 == summary.ttft_s[99]
    assert sum(len(step.emitted) for step in record.steps) == found.requests.output_tokens
    assert found.papers.accelgen.steps_in_slo == 1.0
    assert record.began_at == min(request.arrival_at for request in record.requests)
    assert record.ended_at == max(request.ended_at for request in record.requests)
    assert all(step.seconds > 0 and step.shortest <= step.shape.longest for step in record.steps)


def test_recording_changes_nothing() -> None:
    settings = settings_of(Trial("fcfs", SMALL, "1+1"))
    assert simulate(settings) == simulate(replace(settings, record=False))


def test_the_same_trial_is_the_same_run_and_progress_reaches_the_end() -> None:
    shown: list[tuple[int, int]] = []
    run: RunOnce = run_once
    first = run(Trial("fcfs", SMALL, seed=3), lambda ended, of: shown.append((ended, of)))
    again = run(Trial("fcfs", SMALL, seed=3), lambda _ended, _of: None)
    assert [ended for ended, _ in shown] == [1, 2, 3, 4, 5]
    assert shown[-1] == (5, 5)
    assert _without_speed(first) == _without_speed(again)


def _without_speed(record: RunRecord) -> object:
    return {name: tree for name, tree in tree_of(Figures.of(record)).items() if name != "speed"}


def test_a_gpu_profile_sets_what_steps_take() -> None:
    trial = Trial("fcfs", SMALL, profile="rtx4090-llama-3.1-8b-tp1")
    slow, quick = (run_once(one, lambda _ended, _of: None) for one in (trial, replace(trial, profile=None)))
    assert Figures.of(slow).steps.seconds.p50 > 1.4 * Figures.of(quick).steps.seconds.p50


def test_the_rate_replaces_that_of_the_workload() -> None:
    assert settings_of(Trial("fcfs", SMALL, rate=3.0)).workload.rate == 3.0


# --- What is asked for


def test_flags_become_trials(asked: list[Trial]) -> None:
    line = "simulate --compare a b --seeds 1,2 --rates 5,2.5 --workload w --cluster 8+8 --profile p"
    assert cli.main(line.split()) == 0
    assert len(asked) == 8
    assert asked[0] == Trial("a", "w", "8+8", 1, 5.0, "p")
    assert {(one.preset, one.seed, one.rate) for one in asked} == {
        (preset, seed, rate) for preset in "ab" for seed in (1, 2) for rate in (5.0, 2.5)
    }


@pytest.mark.usefixtures("asked")
def test_a_single_run_writes_its_files(tmp_path: Path) -> None:
    names = {
        flag: tmp_path / name for flag, name in (("--json", "f.json"), ("--csv", "r.csv"), ("--timeline", "t.json"))
    }
    assert cli.main(["simulate", *(str(word) for pair in names.items() for word in pair)]) == 0
    assert json.loads((tmp_path / "f.json").read_text())["runs"][0]["trial"]["preset"] == "fcfs"
    assert (tmp_path / "r.csv").read_text().count("\n") == 1 + len(MIXED.requests)
    assert (tmp_path / "r-steps.csv").read_text().count("\n") == 1 + len(MIXED.steps)
    assert "traceEvents" in json.loads((tmp_path / "t.json").read_text())


@pytest.mark.usefixtures("asked")
def test_a_folder_gets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("alignedserve.simulator.plots.are_possible", lambda: False)  # plots have tests of their own
    out = tmp_path / "new" / "folder"
    assert cli.main(["simulate", "--seeds", "1,2", "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {
        "summary.txt", "figures.json", "runs.csv", "fcfs-seed1", "fcfs-seed2",
    }  # fmt: skip
    assert {path.name for path in (out / "fcfs-seed1").iterdir()} == {"requests.csv", "steps.csv", "timeline.json"}
    assert (out / "summary.txt").read_text() == capsys.readouterr().out


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("flags", "drawn"),
    [
        ("", "plot_run"),
        ("--seeds 1,2", "plot_comparison"),
        ("--compare a b", "plot_comparison"),
        ("--rates 1,2", "plot_sweep"),
    ],
)
def test_which_plot_depends_on_what_is_asked(monkeypatch: pytest.MonkeyPatch, flags: str, drawn: str) -> None:
    found: list[str] = []
    for name in ("check", "plot_run", "plot_comparison", "plot_sweep"):
        monkeypatch.setattr(f"alignedserve.simulator.plots.{name}", lambda *_, name=name: found.append(name))
    assert cli.main(["simulate", *flags.split(), "--plot", "run.svg"]) == 0
    assert found == ["check", drawn]


@pytest.mark.usefixtures("asked")
def test_what_the_simulation_found_wrong_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(MIXED, problems=("r ended twice",))
    monkeypatch.setattr(simulate_command, "run_once", lambda _trial, _on_progress: wrong)
    assert cli.main(["simulate"]) == 1
    assert capsys.readouterr().err == "alignedserve: fcfs, seed 0: r ended twice\n"


# --- What cannot be


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--preset none", "there is no preset 'none'"),
        ("--cluster 0+1", "--cluster '0+1' is neither"),
        ("--workload chat,speed=3", "--workload: stream chat: speed is not a key"),
        ("--workload chat,rate=fast", "--workload: rate must be a number, not the text 'fast'"),
        ("--seeds 1,x", "argument --seeds: '1,x' is not a list"),
        ("--seeds 1,1", "argument --seeds: '1,1' names one of them twice"),
        ("--rates 0,1", "argument --rates: '0,1' is not a list"),
        ("--seed 1 --seeds 1,2", "argument --seeds: not allowed with argument --seed"),
        ("--preset a --compare b", "argument --compare: not allowed with argument --preset"),
        ("--profile nowhere.json", "--profile 'nowhere.json' is no file"),
        ("--seeds 1,2 --timeline t.json", "--timeline takes a single run, these are 2"),
        ("--plot run.gif", "a plot is a .png or an .svg"),
        ("--json /nowhere/at/all.json", "/nowhere/at/all.json cannot be written"),
        ("--csv /tmp", "/tmp is a folder"),
        ("--presets fcfs", "--presets is not understood"),
        ("--workload chat,first_s=0", "--workload: nobody asks for anything in it"),
        ("--json one --csv one", "two of the files to write have one name"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(capsys: pytest.CaptureFixture[str], line: str, said: str) -> None:
    assert _refusal(capsys, *line.split()).startswith(said)


def test_nothing_runs_where_a_later_trial_cannot(asked: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_command, "settings_of", settings_of)
    assert cli.main(["simulate", "--compare", "fcfs", "none"]) == 2
    assert asked == []


@pytest.mark.parametrize("text", ["colocated", "1+1", "8+8", "4xcolocated"])
def test_clusters(text: str) -> None:
    assert str(parse_cluster(text)) == text


def test_ctrl_c_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_trial: Trial, _on_progress: OnProgress) -> RunRecord:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate_command, "run_once", interrupted)
    assert cli.main(["simulate"]) == 130


def test_help_names_the_default_preset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    assert "(default: fcfs)" in capsys.readouterr().out


# --- Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    times = iter(range(100))
    monkeypatch.setattr("alignedserve.progress.monotonic", lambda: float(next(times)))
    return iter(())


@pytest.mark.usefixtures("clock")
def test_a_terminal_shows_progress_and_is_left_clean() -> None:
    terminal = Terminal()
    with Progress("a", terminal) as progress:
        progress.show(1, 2)
        progress.show(2, 2)
    shown = terminal.getvalue().split("\r\x1b[K")
    assert shown == ["", f"a [{'#' * 15}{'.' * 15}] 1 of 2", f"a [{'#' * 30}] 2 of 2", ""]


def test_a_file_shows_none() -> None:
    file = io.StringIO()
    with Progress("a", file) as progress:
        progress.show(1, 2)
    assert file.getvalue() == ""
