"""The command `alignedserve plan` searches, writes what starts the answer, and fails with a message of one line."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alignedserve.architectures.quantization import Quantization
from alignedserve.cli import main as cli
from alignedserve.config.choices import DeviceKind, Launcher
from alignedserve.config.config import load
from alignedserve.config.topology import Topology
from alignedserve.lab.cli import plan as plan_command
from alignedserve.lab.planning.outcome import Count, Outcome
from alignedserve.lab.simulator.run import Simulation
from tests.rare import rarely

DEVICE = "rtx4090-llama-3.1-8b-tp1"
MEASURED = "lab/devices/profiles/a100-codellama-34b-tp2.json"
FEW = "sizes:prompt=100,output=5,rate=2,cv=0,num_requests=8"
MANY = "chat,rate=40"


def _refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["plan", *argv]) == 2
    out, err = capsys.readouterr()
    err = re.sub(r"^plan: tries .*\n", "", err)  # where it has begun
    assert (out, err.count("\n")) == ("", 1)
    return err.removeprefix("alignedserve: ").strip()


@pytest.fixture
def enough(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Return a function that says from how many workers on deployments hold; nothing is simulated.

    It returns the list of deployments that are asked for.
    """

    def say(workers: int, interrupted_at: int = 1000, by: signal.Signals = signal.SIGINT) -> list[str]:
        asked: list[str] = []

        def simulate(task: Any) -> tuple[int, Outcome]:
            asked.append(task.trial.cluster)
            if len(asked) == interrupted_at:
                signal.raise_signal(by)
            topology = Topology.parse(task.trial.cluster)
            holds = topology.prefill_workers + topology.decode_workers >= workers
            return task.number, Outcome(Count(100, 0 if holds else 20), Count(), 60.0)

        monkeypatch.setattr(plan_command, "_simulate", simulate)
        return asked

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a command that does not hear it only fails its test
    signal.signal(signal.SIGINT, signal.default_int_handler)  # other tests' event loops may have left it ignored
    yield say
    signal.signal(signal.SIGTERM, before)


# --- A real search


@pytest.mark.parametrize("processes", ["1", rarely("12")])
def test_it_really_searches(processes: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One worker serves two small requests a second; two processes find the same answer as one."""
    found = []
    for jobs in processes:
        saved, start = tmp_path / f"{jobs}.json", tmp_path / f"{jobs}.yaml"
        files = ("--json", str(saved), "--out", str(start))
        argv = ["plan", "--workload", FEW, "--device", f"{DEVICE}:0.5", "--workers", "2", "--jobs", jobs, *files]
        assert cli.main(argv) == 0
        found.append({**json.loads(saved.read_text()), "took_s": 0})
    out, err = capsys.readouterr()
    assert out.startswith(f"colocated of {DEVICE}: 1 GPU, 0.50 an hour")
    assert "check, seeds 1, 2, 3" in out
    assert err.count(f"plan: tries 1 to 2 workers of {DEVICE}, in about ") == len(processes)
    assert len(re.findall(r"plan: the first simulation took .* s: about \d+ s for about \d+ more\n", err)) == len(
        processes
    )
    assert found[0] == found[-1]
    assert found[0]["is_checked"]
    assert start.read_text() == (tmp_path / "1.yaml").read_text()


def test_a_simulation_that_is_wrong_about_itself_proves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Simulation, "run", lambda simulation: simulation.problems.append("r ended twice"))
    asked = ("--workload", FEW, "--device", f"{DEVICE}:1", "--workers", "1", "--jobs", "1")
    assert "r ended twice" in _refusal(capsys, *asked)


# --- What is asked and answered


def test_the_settings_start_what_was_simulated(
    enough: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enough(9)
    start = tmp_path / "serve.yaml"
    devices = ("--device", f"{DEVICE}:0.5", "--preset", "fcfs", "--set", "engine.max_batch=64", "--jobs", "1")
    assert cli.main(["plan", "--workload", f"{MANY},ttft_s=0.5", *devices, "--out", str(start)]) == 0
    assert capsys.readouterr().out.startswith(f"9xcolocated of {DEVICE}: 9 GPUs, 4.50 an hour")
    config = load({}, {}, start)
    assert (config.topology, config.preset) == (Topology(0, 9), "fcfs")
    assert config.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert (config.engine.max_batch, config.engine.max_step_tokens) == (64, 2048)
    assert (config.engine.device, config.engine.tensor_parallel_size) == (DeviceKind.CUDA, 1)
    assert (config.slo.ttft_ms, config.slo.tbt_ms) == (500, 187.5)
    assert (config.launcher, config.ray.gpus_per_worker) == (Launcher.RAY, 1)


def test_a_gpu_alone_stands_for_all_numbers_of_it_that_hold_the_model(
    enough: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enough(1)
    prices = tmp_path / "prices.yaml"
    prices.write_text("h100: 3.9\na100-40: 1.5\n")
    argv = ["plan", "--model", "llama-3.1-70b", "--devices", str(prices), "--jobs", "1", "--workload", "chat,rate=1"]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert out.startswith("colocated of a100-40-llama-3.1-70b-tp4: 4 GPUs, 6.00 an hour")
    assert [ranks for ranks in "1248" if f"h100-llama-3.1-70b-tp{ranks}, colocated" in out] == ["2", "4", "8"]


def test_energy_may_decide_which_gpu_is_the_cheapest(
    enough: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    enough(1)
    gpus = ("--device", "h100:1.00", "--device", "l40s:1.10", "--model", "llama-3.1-8b")
    asked = ("plan", *gpus, "--jobs", "1", "--workload", "chat,rate=1")
    assert cli.main([*asked]) == 0
    assert capsys.readouterr().out.startswith("colocated of h100-llama-3.1-8b-tp1: 1 GPU, 1.00 an hour")
    assert cli.main([*asked, "--price-kwh", "0.5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("colocated of l40s-llama-3.1-8b-tp1: 1 GPU, 1.28 an hour"), "1.10, and 0.35 kWh of 0.5"
    assert "at 0.5 a kWh" in out


def test_quantised_weights_need_fewer_gpus_and_the_settings_say_them(
    enough: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enough(1)
    start = tmp_path / "serve.yaml"
    argv = ["plan", "--model", "llama-3.1-70b-int4", "--device", "h100:3.9", "--jobs", "1", "--workload", "chat,rate=1"]
    assert cli.main([*argv, "--out", str(start)]) == 0
    assert capsys.readouterr().out.startswith("colocated of h100-llama-3.1-70b-int4-tp1: 1 GPU, 3.90 an hour")
    config = load({}, {}, start)
    assert (config.model, config.engine.quantization) == ("meta-llama/Llama-3.1-70B-Instruct", Quantization.INT4)


def test_a_workload_that_does_not_say_how_long_it_lasts_gets_a_minute(
    enough: Callable[..., list[str]], tmp_path: Path
) -> None:
    enough(1)
    for workload, lasts in (("chat,rate=20", "chat,rate=20,first_s=60"), (FEW, FEW), ("chat,first_s=9,rate=1",) * 2):
        saved = tmp_path / "plan.json"
        argv = ["plan", "--workload", workload, "--device", f"{DEVICE}:1", "--jobs", "1", "--json", str(saved)]
        assert cli.main(argv) == 0
        assert json.loads(saved.read_text())["question"]["workload"] == lasts


def test_a_preset_with_prefill_workers_is_planned_with_them(enough: Callable[..., list[str]]) -> None:
    asked = enough(3)
    argv = ["plan", "--preset", "distserve", "--workload", "chat,rate=1", "--device", f"{DEVICE}:1", "--jobs", "1"]
    assert cli.main(argv) == 0
    assert all("+" in cluster for cluster in asked)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_the_best_so_far(
    enough: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    enough(1, interrupted_at=3, by=number)
    argv = ["plan", "--workload", "chat,rate=1", "--device", f"{DEVICE}:1", "--jobs", "1"]
    assert cli.main(argv) == 130
    assert capsys.readouterr().out.startswith(f"colocated of {DEVICE}: 1 GPU, 1.00 an hour (2 simulations, ")


def test_where_nothing_keeps_the_promises_it_says_what_lacks(
    enough: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enough(99)
    start = tmp_path / "serve.yaml"
    argv = ["plan", "--workload", "chat,rate=1", "--device", f"{DEVICE}:1", "--jobs", "1", "--out", str(start)]
    assert cli.main(argv) == 1
    assert "chats 80.0% of 99%" in capsys.readouterr().out
    assert not start.exists()


def test_the_picture_has_loads_beside_the_workloads_own(enough: Callable[..., list[str]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    asked = enough(1)
    picture = tmp_path / "plan.svg"
    argv = ["plan", "--workload", "chat,rate=1", "--device", f"{DEVICE}:1", "--jobs", "1", "--plot", str(picture)]
    assert cli.main(argv) == 0
    assert picture.stat().st_size > 1000
    assert asked[-4:] == ["colocated"] * 4


# --- Wrong input


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "name the devices that can be had"),
        (("--device", DEVICE), f"--device '{DEVICE}' has no price: write DEVICE:PRICE, such as {DEVICE}:3.90"),
        (("--device", f"{DEVICE}:free"), f"the price of {DEVICE} must be a number above 0"),
        (("--device", f"{DEVICE}:1", "--device", f"{DEVICE}:2"), f"--device {DEVICE} is given twice"),
        (("--device", f"{MEASURED}:3", "--price-kwh", "1"), f"nobody knows what {MEASURED} takes: add its energy"),
        (("--device", "h100:3"), "--device h100 is a GPU alone: it needs --model, one of opt-6.7b"),
        (("--device", "h100:3", "--model", ""), "--model"),
        (("--device", "nothing:3"), "--profile 'nothing' is neither a file"),
        (("--device", "l40s-llama-3.1-70b-tp1:1"), "Llama-3.1-70B does not fit on 1 x L40S"),
        (("--device", "rtx4090:1", "--model", "opt-175b"), "OPT-175B does not fit on 8 x RTX 4090"),
        (("--device", "nothing:3", "--be-tokens", "9"), "--be-tokens is of documents"),
        (("--json", ""), "--json: must"),
        (("--jobs", "0"), "--jobs: must be a whole number of 1 or more"),
        (("--device", f"{DEVICE}:1", "--attain", "99"), "--attain: must be a share above 0 and up to 1"),
        (("--device", f"{DEVICE}:1", "--workload", "chats"), "--workload: 'chats' is none of these"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    assert said in _refusal(capsys, *argv)


def test_a_trace_that_no_seed_varies_is_named(
    enough: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enough(1)
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{at},100,5\n" for at in range(100))
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    said = []
    for workload in (f"trace:{trace}", f"trace:{trace},window_s=10"):
        assert cli.main(["plan", "--workload", workload, "--device", f"{DEVICE}:1", "--jobs", "1"]) == 0
        said.append("Every seed has the trace as it is" in capsys.readouterr().out)
    assert said == [True, False]
