"""The command `alignedserve simulate` runs, writes what it was asked for, and fails with a message of one line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice, pairwise
from pathlib import Path
from types import MappingProxyType

import pytest

from alignedserve.cli import main as cli
from alignedserve.config.presets import presets
from alignedserve.errors import SimulateError
from alignedserve.lab import processes
from alignedserve.lab.cli import simulate as simulate_command
from alignedserve.lab.devices import gpu_truth
from alignedserve.lab.loads.records import record_file
from alignedserve.lab.loads.records.records import RequestOutcome, RunRecord
from alignedserve.lab.reports.figures import RunFigures, figure_tree
from alignedserve.lab.reports.trial import OnProgress, SimulationTrial
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.trials.building import parse_cluster, settings_of
from alignedserve.lab.trials.running import run_once, run_saved
from alignedserve.progress import ProgressBar
from alignedserve.scheduling.policy import Predictor
from tests.conftest import SOAK
from tests.simulator.runs import MIXED
from tests.simulator.summary import simulate, summary_of

LONE = "sizes:prompt=100,output=5,rate=1,cv=0,num_requests=4"  # requests run one at a time
SMALL = "chat,num_requests=5,rate=50,prompt=exp:60:400,output=exp:4:20"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SimulationTrial]:
    """Return the trials that were asked for; each gives the same record, made by hand, so that nothing is simulated."""
    found: list[SimulationTrial] = []

    def stub(trial: SimulationTrial, on_progress: OnProgress) -> RunRecord:
        found.append(trial)
        on_progress(1, 2)
        return MIXED

    monkeypatch.setattr(processes, "one_for_each_core", lambda: 1)  # another process would not have the stub
    monkeypatch.setattr(simulate_command, "run_once", stub)
    monkeypatch.setattr(simulate_command, "run_saved", lambda trial, on_progress, _: stub(trial, on_progress))
    monkeypatch.setattr(simulate_command, "settings_of", lambda _: None)
    return found


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing into a folder: plots have tests of their own."""
    monkeypatch.setattr("alignedserve.lab.reports.plots.are_possible", lambda: False)


def _refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["simulate", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.removeprefix("alignedserve: ").strip()


# --- A real run


def test_it_really_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    assert cli.main(["simulate", "--workload", SMALL, "--cluster", "1+1", "--record", str(saved)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"aligned, seed 0: 1+1, workload {SMALL}, profile rtxpro6000-llama-3.1-8b-tp1\n")
    assert err == ""
    record = record_file.load(saved)
    assert [request.outcome for request in record.requests] == [RequestOutcome.FINISHED] * 5
    assert set(record.workers) == {"prefill-0", "decode-0"}
    assert {copy.worker for copy in record.copies} <= set(record.workers)


def test_the_simulator_may_know_how_long_outputs_are(capsys: pytest.CaptureFixture[str]) -> None:
    """No deployment could, so a configuration says so, and the command takes it all the same."""
    oracle = ("--set", "schedule.predictor=oracle")
    assert cli.main(["simulate", "--workload", SMALL, *oracle]) == 0
    out, err = capsys.readouterr()
    assert (out.startswith("aligned, seed 0"), err) == (True, "")
    trial = SimulationTrial("aligned", SMALL, options=oracle[1:])
    assert settings_of(trial).policy.predictor is Predictor.ORACLE
    assert settings_of(replace(trial, options=())).policy.predictor is Predictor.HASH


def test_a_record_holds_what_happened() -> None:
    settings = settings_of(SimulationTrial("fcfs", SMALL))
    simulation = Simulation(settings)
    summary = summary_of(simulation)
    record = simulation.record(wall_s=1.0)
    found = RunFigures.from_record(record)
    assert found.requests.finished == summary.num_finished == 5
    assert found.rt.ttft_s.p99 == summary.p99_ttft_s
    assert sum(len(step.emitted) for step in record.steps) == found.requests.output_tokens
    assert found.papers.accelgen.steps_in_slo == 1.0
    assert record.began_at == min(request.arrival_at for request in record.requests)
    assert record.ended_at == max(request.ended_at for request in record.requests)
    assert all(step.seconds > 0 and step.shortest <= step.shape.longest for step in record.steps)


def test_recording_changes_nothing() -> None:
    settings = settings_of(SimulationTrial("fcfs", SMALL, "1+1"))
    assert simulate(settings) == simulate(replace(settings, record=False))


def test_the_same_trial_is_the_same_run_and_progress_reaches_the_end() -> None:
    shown: list[tuple[int, int]] = []
    first = run_once(SimulationTrial("fcfs", SMALL, seed=3), lambda ended, of: shown.append((ended, of)))
    again = run_once(SimulationTrial("fcfs", SMALL, seed=3), lambda _ended, _of: None)
    assert [ended for ended, _ in shown] == [1, 2, 3, 4, 5]
    assert shown[-1] == (5, 5)
    assert _without_speed(first) == _without_speed(again)


def _without_speed(record: RunRecord) -> object:
    return {name: tree for name, tree in figure_tree(RunFigures.from_record(record)).items() if name != "speed"}


def test_a_gpu_profile_sets_what_steps_take() -> None:
    trial = SimulationTrial("fcfs", SMALL, profile="rtx4090-llama-3.1-8b-tp1")
    slow, quick = (run_once(of_trial, lambda _ended, _of: None) for of_trial in (trial, replace(trial, profile=None)))
    assert RunFigures.from_record(slow).steps.seconds.p50 > 1.4 * RunFigures.from_record(quick).steps.seconds.p50


def test_a_gpu_that_nobody_measured_runs_like_a_measured_one(tmp_path: Path) -> None:
    named = SimulationTrial("apt-serve", SMALL, profile="a100-40-opt-13b-tp1")  # it keeps hidden vectors
    path = tmp_path / "mine.yaml"
    path.write_text("gpu: a100-40\nmodel: opt-13b\n", encoding="utf-8")
    first, same = (run_once(trial, lambda _ended, _of: None) for trial in (named, replace(named, profile=str(path))))
    assert [request.outcome for request in first.requests] == [RequestOutcome.FINISHED] * 5
    assert _without_speed(first) == _without_speed(same)


def test_the_rate_replaces_that_of_the_workload() -> None:
    assert settings_of(SimulationTrial("fcfs", SMALL, rate=3.0)).workload.rate == 3.0


# --- Options


def test_flags_become_trials(asked: list[SimulationTrial]) -> None:
    line = "simulate --compare a b --seeds 1,2 --rates 5,2.5 --workload w --cluster 8+8 --profile p"
    line += " --set schedule.room=growing --set schedule.reuse=false"
    assert cli.main(line.split()) == 0
    assert len(asked) == 8
    assert asked[0] == SimulationTrial(
        "a", "w", "8+8", 1, 5.0, "p", options=("schedule.room=growing", "schedule.reuse=false")
    )
    assert {(trial.preset, trial.seed, trial.rate) for trial in asked} == {
        (preset, seed, rate) for preset in "ab" for seed in (1, 2) for rate in (5.0, 2.5)
    }


@pytest.mark.usefixtures("asked")
def test_a_single_run_writes_its_files(tmp_path: Path) -> None:
    names = {
        flag: tmp_path / name for flag, name in (("--json", "f.json"), ("--csv", "r.csv"), ("--timeline", "t.json"))
    }
    assert cli.main(["simulate", *(str(word) for pair in names.items() for word in pair)]) == 0
    assert json.loads((tmp_path / "f.json").read_text())["runs"][0]["trial"]["preset"] == "aligned"
    assert (tmp_path / "r.csv").read_text().count("\n") == 1 + len(MIXED.requests)
    assert (tmp_path / "r-steps.csv").read_text().count("\n") == 1 + len(MIXED.steps)
    assert "traceEvents" in json.loads((tmp_path / "t.json").read_text())


@pytest.mark.usefixtures("asked", "no_plots")
def test_a_folder_gets_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert cli.main(["simulate", "--seeds", "1,2", "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {
        "summary.txt", "figures.json", "runs.csv", "aligned-seed1", "aligned-seed2",
    }  # fmt: skip
    assert {path.name for path in (out / "aligned-seed1").iterdir()} == {"requests.csv", "steps.csv", "timeline.json"}
    assert (out / "summary.txt").read_text() == capsys.readouterr().out


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("flags", "drawn"),
    [
        ("", "plot_run"),
        ("--seeds 1,2", "plot_comparison"),
        ("--compare fcfs aligned", "plot_comparison"),
        ("--rates 1,2", "plot_sweep"),
    ],
)
def test_which_plot_depends_on_what_is_asked(monkeypatch: pytest.MonkeyPatch, flags: str, drawn: str) -> None:
    found: list[str] = []
    for name in ("check", "plot_run", "plot_comparison", "plot_sweep"):
        monkeypatch.setattr(f"alignedserve.lab.reports.plots.{name}", lambda *_, name=name: found.append(name))
    assert cli.main(["simulate", *flags.split(), "--plot", "run.svg"]) == 0
    assert found == ["check", drawn]


@pytest.mark.usefixtures("asked")
def test_what_the_simulation_found_wrong_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(MIXED, problems=("r ended twice",))
    monkeypatch.setattr(simulate_command, "run_once", lambda _trial, _on_progress: wrong)
    assert cli.main(["simulate"]) == 1
    assert capsys.readouterr().err == "alignedserve: aligned, seed 0: r ended twice\n"


# --- Errors


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--preset none", "there is no preset 'none'"),
        (
            "--preset apt-serve",
            "schedule.memory hybrid: rtxpro6000-llama-3.1-8b-tp1's model keeps no hidden vectors: set it to plain",
        ),
        (
            "--preset fcsf",
            "there is no preset 'fcsf': did you mean fcfs?",
        ),
        ("--cluster 0+1", "--cluster '0+1' is neither colocated, nor such as 2+2 or 4xcolocated: did you mean coloc"),
        ("--transport direct", "--transport direct is from prefill to decode workers: --cluster colocated has none"),
        ("--workload chat,speed=3", "--workload: stream chat: speed is not a key"),
        ("--workload chat,rate=fast", "--workload: rate must be a number, not the text 'fast'"),
        ("--workload chat,rate=1e400", "--workload: rate must be a finite number, not inf"),
        ("--workload chat,rate=1e300", "--workload: rate must be 1000000.0 or less, not 1e+300"),
        ("--workload chat,rate=2,rate_scale=3", "--workload: rate and rate_scale exclude each other"),
        ("--workload chat,rate=2 --rates 3", "--rates takes the place of rate=2 in --workload: leave one of them out"),
        ("--workload sizes:rate_scale=2 --rates 3", "--rates takes the place of rate_scale=2 in --workload"),
        ("--workload sizes:arrivals=closed,first_s=3 --rates 3", "--rates: rate cannot be set: no stream of this"),
        ("--workload=", "argument --workload: must not be empty"),
        ("--profile=", "argument --profile: must not be empty"),
        ("--out=", "argument --out: must be the name of a file or folder, not empty"),
        ("--json=", "argument --json: must be the name of a file or folder, not empty"),
        ("--seed -1", "argument --seed: must be a whole number of 0 or more, not '-1'"),
        ("--seed 1.5", "argument --seed: must be a whole number of 0 or more, not '1.5'"),
        ("--seed inf", "argument --seed: must be a whole number of 0 or more, not 'inf'"),
        ("--seeds ,", "argument --seeds: must be whole numbers of 0 or more, such as 1,2,3, not ','"),
        ("--seeds 1,x", "argument --seeds: must be whole numbers of 0 or more, such as 1,2,3, not '1,x'"),
        ("--seeds 1,-1", "argument --seeds: must be whole numbers of 0 or more"),
        ("--seeds 1,1", "argument --seeds: '1,1' names one of them twice"),
        ("--rates 0", "argument --rates: must be numbers above 0, such as 5,10,20, not '0'"),
        ("--rates ,", "argument --rates: must be numbers above 0, such as 5,10,20, not ','"),
        ("--rates 1,nan", "argument --rates: must be numbers above 0, such as 5,10,20, not '1,nan'"),
        ("--rates inf", "argument --rates: must be numbers above 0, such as 5,10,20, not 'inf'"),
        ("--rates 1e400", "argument --rates: must be numbers above 0, such as 5,10,20, not '1e400'"),
        ("--rates 1e300", "--rates: rate must be from 0.0001 to 1,000,000 arrivals in a second, not 1e+300"),
        ("--rates 2,2.0", "argument --rates: '2,2.0' names one of them twice"),
        ("--timeline t --timeline-limit -1", "argument --timeline-limit: must be a number above 0, not '-1'"),
        ("--timeline t --timeline-limit nan", "argument --timeline-limit: must be a number above 0, not 'nan'"),
        ("--timeline-limit 3", "--timeline-limit goes only with --timeline or --out"),
        ("--seed 0 --seeds 1,2", "--seed and --seeds exclude each other"),
        ("--preset fcfs --compare fcfs aligned", "--preset and --compare exclude each other"),
        ("--seed 1 --seed 2", "--seed is given twice"),
        ("--compare fcfs", "--compare takes two presets or more, such as fcfs aligned: 'fcfs' alone is --preset"),
        ("--compare fcfs aligned fcfs", "--compare fcfs aligned fcfs names a preset twice"),
        ("--profile nowhere.json", "--profile 'nowhere.json' is neither a file"),
        ("--profile rtx4090", f"--profile 'rtx4090' is neither a file nor one of {', '.join(gpu_truth.names())}"),
        ("--profile a100-80-opt-175b-tp4", "OPT-175B does not fit on 4 x A100 80GB: its weights take 349.1 GB"),
        ("--profile a100-80-opt-13b-tp3", "OPT-13B has 40 heads, which 3 GPUs cannot share"),
        ("--seeds 1,2 --timeline t.json", "--timeline takes a single run, these are 2"),
        ("--plot run.gif", "a plot is a .png or an .svg"),
        ("--json /nowhere/at/all.json", "/nowhere/at/all.json cannot be written"),
        ("--csv /tmp", "/tmp is a folder"),
        ("--presets fcfs", "--presets is not understood"),
        ("--workload chat,first_s=0", "--workload: no request comes in it"),
        ("--json one --csv one", "two of the files to write have one name"),
        ("--json one --csv ./one", "two of the files to write have one name"),
        ("--json one-steps.csv --csv one.csv", "two of the files to write have one name"),
        ("--out /dev/null", "--out /dev/null cannot be made: File exists"),
        (f"--json {'n' * 300}", f"{'n' * 40}... cannot be written: File name too long"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _refusal(capsys, *line.split()).startswith(said)
    assert list(tmp_path.iterdir()) == []


EACH = MappingProxyType(
    {
        "--preset": "aligned",
        "--compare": "fcfs aligned",
        "--workload": "chat",
        "--set": "schedule.reuse=false",
        "--cluster": "1+1",
        "--seed": "1",
        "--seeds": "1,2",
        "--rates": "3,4",
        "--profile": "p",
        "--transport": "direct",
        "--gateway-ms": "5",
        "--out": "folder",
        "--json": "f.json",
        "--csv": "r.csv",
        "--plot": "p.svg",
        "--timeline": "t.json",
        "--timeline-limit": "3",
        "--record": "s.json",
        "--save": "s.jsonl",
        "--replay": "saved",
        "--diff": "one other",
    }
)


@pytest.mark.usefixtures("asked")
def test_two_flags_both_count_or_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("check", "plot_run", "plot_comparison", "plot_sweep"):
        monkeypatch.setattr(f"alignedserve.lab.reports.plots.{name}", lambda *_: None)
    several = {"--compare", "--seeds", "--rates"}
    for number, (flag, second_flag) in enumerate(islice(combinations(EACH, 2), 0, None, 1 if SOAK else 5)):
        pair = {flag, second_flag}
        refused = (
            pair in ({"--preset", "--compare"}, {"--seed", "--seeds"})
            or ("--timeline-limit" in pair and not pair & {"--timeline", "--out"})
            or (pair & several and pair & {"--timeline", "--record", "--save"})
            or pair & {"--replay", "--diff"}
        )
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        status = cli.main(["simulate", flag, *EACH[flag].split(), second_flag, *EACH[second_flag].split()])
        out, err = capsys.readouterr()
        if refused:
            assert (status, out, err.count("\n"), list(folder.iterdir())) == (2, "", 1, []), pair
            assert flag in err or second_flag in err, pair
        else:
            assert (status, err) == (0, ""), pair


def test_what_gpu_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert _refusal(capsys, "--profile", "rtx4090-llama-3.1-8b").endswith(": did you mean rtx4090-llama-3.1-8b-tp1?")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("4x colocated", "4xcolocated"),
        ("4 x Colocated", "4xcolocated"),
        ("4", "4xcolocated"),
        ("colocated4", "4xcolocated"),
        ("2 + 2", "2+2"),
        ("2-3", "2+3"),
        ("2p3d", "2+3"),
        ("Colocated", "colocated"),
        ("co-located", "colocated"),
    ],
)
def test_what_cluster_was_meant(capsys: pytest.CaptureFixture[str], text: str, meant: str) -> None:
    assert _refusal(capsys, "--cluster", text).endswith(f": did you mean {meant}?")


def test_nothing_runs_where_a_later_trial_cannot(asked: list[SimulationTrial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_command, "settings_of", settings_of)
    assert cli.main(["simulate", "--compare", "fcfs", "none"]) == 2
    assert asked == []


@pytest.mark.parametrize("text", ["colocated", "1+1", "8+8", "4xcolocated"])
def test_clusters(text: str) -> None:
    assert str(parse_cluster(text)) == text


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (SimulateError("no"), 2)])
def test_what_ends_a_run_leaves_no_empty_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException, status: int
) -> None:
    def ended(_trial: SimulationTrial, _on_progress: OnProgress) -> RunRecord:
        raise error

    monkeypatch.setattr(simulate_command, "run_once", ended)
    mine = tmp_path / "mine"
    mine.mkdir()
    for out in (mine, tmp_path / "new" / "folder"):
        assert cli.main(["simulate", "--out", str(out)]) == status
    assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.usefixtures("no_plots")
def test_what_was_written_before_an_interrupt_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def second_is_interrupted(trial: SimulationTrial, _on_progress: OnProgress) -> RunRecord:
        if trial.seed == 2:
            raise KeyboardInterrupt
        return MIXED

    monkeypatch.setattr(simulate_command, "run_once", second_is_interrupted)
    monkeypatch.setattr(simulate_command, "settings_of", lambda _: None)
    assert cli.main(["simulate", "--seeds", "1,2", "--jobs", "1", "--out", str(tmp_path / "out")]) == 130
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["aligned-seed1"]


@pytest.mark.usefixtures("asked", "no_plots")
def test_files_may_be_in_the_folder_that_is_made(tmp_path: Path) -> None:
    assert cli.main(["simulate", "--out", f"{tmp_path}/out", "--record", f"{tmp_path}/out/record.json"]) == 0
    assert record_file.load(tmp_path / "out" / "record.json").requests == MIXED.requests


@pytest.mark.parametrize("command", ["simulate", "fuzz"])
def test_help_is_readable_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) < 80


def test_help_names_every_preset_and_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    shown = "".join(capsys.readouterr().out.split())  # the help breaks lines within names
    assert f"{','.join(presets())}(default:aligned)" in shown


# --- ProgressBar


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
    with ProgressBar("a", terminal) as progress:
        progress.show(1, 2)
        progress.show(2, 2)
    shown = terminal.getvalue().split("\r\x1b[K")
    assert shown == ["", f"a [{'#' * 15}{'.' * 15}] 1 of 2", f"a [{'#' * 30}] 2 of 2", ""]


def test_a_file_shows_none() -> None:
    file = io.StringIO()
    with ProgressBar("a", file) as progress:
        progress.show(1, 2)
    assert file.getvalue() == ""


def test_what_was_left_out_and_what_was_cut_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["arrival_s,prompt_tokens,output_tokens", "0,30,2", "0.1,5,0", "0.2,700000,3"]
    (tmp_path / "trace.csv").write_text("\n".join(rows))
    assert (
        cli.main(["simulate", "--compare", "fcfs", "tgi", "--jobs", "1", "--workload", f"trace:{tmp_path}/trace.csv"])
        == 0
    )
    notes = capsys.readouterr().out.partition("\nNotes\n")[2].splitlines()
    assert notes == [
        "  trace.csv: 1 of 3 rows have no prompt or no output, and were left out",
        "  trace: 1 of its requests were cut to a context of 16,384 tokens",
    ]


def test_what_a_gateway_takes_comes_before_the_first_token_and_nowhere_else() -> None:
    at_once, later = (run_once(SimulationTrial("fcfs", LONE, gateway_ms=ms), lambda *_: None) for ms in (0.0, 7.0))
    for early, late in zip(at_once.requests, later.requests, strict=True):
        gaps = [[after - before for before, after in pairwise(each.token_at)] for each in (early, late)]
        assert late.arrival_at == early.arrival_at
        assert gaps[1] == pytest.approx(gaps[0], abs=2e-3)
        assert late.token_at[0] - early.token_at[0] == pytest.approx(7e-3, abs=3e-3)
    assert "gateway 7 ms" in SimulationTrial("fcfs", gateway_ms=7.0).title


def test_kv_may_go_from_device_to_device() -> None:
    """No decode worker copies KV from the pool where transfers are direct."""
    trial = SimulationTrial("aligned", LONE, "1+1")
    by_pool, directly = (run_once(replace(trial, direct=direct), lambda *_: None) for direct in (False, True))
    copied_in = [sum(copy.to_device for copy in record.copies) for record in (by_pool, directly)]
    assert copied_in[0] > 0
    assert copied_in[1] == 0
    assert not directly.problems
    assert "KV sent from device to device" in replace(trial, direct=True).title


def test_progress_is_of_all_that_will_come() -> None:
    told: list[tuple[int, int]] = []
    run_once(SimulationTrial("fcfs", SMALL), lambda ended, of: told.append((ended, of)))
    assert told == [(ended, 5) for ended in range(1, 6)]


# --- Saved runs


def _save(path: Path, *argv: str) -> None:
    assert cli.main(["simulate", "--workload", SMALL, *argv, "--save", str(path)]) == 0


def test_a_saved_run_comes_out_the_same_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "one.jsonl", tmp_path / "other.jsonl.gz"
    _save(first, "--cluster", "1+1")
    _save(second, "--cluster", "1+1")
    capsys.readouterr()
    assert cli.main(["simulate", "--replay", str(second)]) == 0
    assert cli.main(["simulate", "--diff", str(first), str(second)]) == 0
    assert capsys.readouterr().out == 2 * f"the same: {len(first.read_text().splitlines()) - 2} commands\n"


def test_prompts_of_many_pages_are_saved_too(tmp_path: Path) -> None:
    """The names of pages are unsigned numbers of 64 bits."""
    path = tmp_path / "run.jsonl"
    assert (
        cli.main(
            [*"simulate --cluster 1+1 --workload chat,num_requests=2,prompt=2000,output=3 --save".split(), str(path)]
        )
        == 0
    )
    assert '"AskPrefix"' in path.read_text()
    assert cli.main(["simulate", "--replay", str(path)]) == 0


def test_to_save_a_run_changes_nothing(tmp_path: Path) -> None:
    trial = SimulationTrial("aligned", SMALL, "2xcolocated")
    plain, saved = run_once(trial, lambda *_: None), run_saved(trial, lambda *_: None, tmp_path / "run")
    assert _without_speed(plain) == _without_speed(saved)


def test_the_first_command_that_differs_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    _save(path)
    head, *commands, end = path.read_text().splitlines(keepends=True)
    at = next(at for at, line in enumerate(commands) if '"Deliver"' in line)
    kept = [head, *commands[:at], commands[at].replace('"chat-', '"chat-9'), *commands[at + 1 :], end]
    path.write_text("".join(kept))
    capsys.readouterr()
    assert cli.main(["simulate", "--replay", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"they differ first in line {at + 2}:\n")
    assert "chat-9" in out.partition("saved:")[2].partition("this time:")[0]


def test_another_seed_differs_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _save(tmp_path / "one")
    _save(tmp_path / "other", "--seed", "1")
    capsys.readouterr()
    assert cli.main(["simulate", "--diff", str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    assert capsys.readouterr().out.startswith("they differ first in line 1:\n")


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        ({"preset": 3}, "preset must be a text, not 3"),
        ({"seed": 1}, "preset is missing"),
        ({"preset": "fcfs", "rate": "10"}, "rate must be a number, not '10'"),
        ({"preset": "fcfs", "seed": 1.5}, "seed must be a whole number, not 1.5"),
        ([], "it must be an object, not []"),
    ],
)
def test_what_somebody_wrote_wrongly_into_a_saved_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trial: object, said: str
) -> None:
    (tmp_path / "run").write_text(json.dumps({"format": 1, "trial": trial}))
    refusal = _refusal(capsys, "--replay", str(tmp_path / "run"))
    assert f"{tmp_path / 'run'}: " in refusal
    assert said in refusal


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"format": 1, "trial": {"other": 1}}'])
def test_what_is_no_saved_run_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "run").write_text(content)
    assert "run" in _refusal(capsys, "--replay", str(tmp_path / "run"))
    assert "none cannot be opened" in _refusal(capsys, "--diff", "none", str(tmp_path / "run"))


def test_a_part_of_a_core_has_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 0.4)
    assert processes.one_for_each_core() == 1
