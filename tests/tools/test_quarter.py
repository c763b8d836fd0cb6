"""Tests of the script that measures on a GPU for some minutes: a bad step costs only itself, and nothing is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import quarter
from quarter import ROOT, STEPS, WHEELS, Results, Step
from tests.rare import rare

# What the machine's image holds of what we use, each with what it needs; the wheels are carried there.
ON_THE_MACHINE = (
    "torch triton transformers numpy tokenizers safetensors huggingface-hub httpx jinja2 prometheus-client pyyaml "
    "fsspec uvloop hypothesis pytest pytest-timeout setuptools pip psutil"
).split()


def step(name: str, code: str, limit_s: float = 30.0) -> Step:
    return Step("a", name, ("-c", textwrap.dedent(code)), limit_s, name)


def ran(out: Path, *steps: Step, seconds: float = 60.0) -> list[dict[str, object]]:
    results = Results(out, {"gpu": "none"})
    quarter.run_all(steps, seconds, results, out, dry=True, site=None)
    results.close()
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def ends(lines: list[dict[str, object]]) -> dict[object, object]:
    return {line["step"]: line["status"] for line in lines if "status" in line}


CRASHES = """import os; print('{"name": "crash", "value": 1.0, "unit": "1"}', flush=True); os.abort()"""
HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
FLOODS = "while True: print('x' * 10_000)"
GOOD = step("good", """print('{"name": "speed", "value": 2.0, "unit": "m/s"}')""")


def test_steps_that_crash_hang_or_print_without_end_cost_only_themselves(tmp_path: Path) -> None:
    lines = ran(tmp_path, step("crash", CRASHES), step("hang", HANGS, 1.0), step("flood", FLOODS), GOOD)
    assert ends(lines) == {"crash": "died of SIGABRT", "hang": "limit", "flood": "says too much", "good": "ok"}
    assert [(line["step"], line["value"]) for line in lines if "value" in line] == [("crash", 1.0), ("good", 2.0)]


@pytest.mark.parametrize("session", [False, True], ids=["in its group", "in a session of its own"])
def test_a_process_that_a_step_leaves_behind_ends_with_it(tmp_path: Path, session: bool) -> None:
    """It holds the step's output open, which must not hold up the rest."""
    begun = f"subprocess.Popen(['sleep', '1000'], start_new_session={session})"
    left = step("left", f"import subprocess, sys; print({begun}.pid, file=sys.stderr)")
    lines = ran(tmp_path, left, GOOD)
    assert ends(lines) == {"left": "ok", "good": "ok"}
    pid = int((tmp_path / "stderr.log").read_text().split("=== good")[0].splitlines()[-1])
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Return whether the process runs: one that was killed may still wait to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_what_no_longer_fits_is_left_out_and_said(tmp_path: Path) -> None:
    lines = ran(tmp_path, GOOD, seconds=1.0)
    assert [(line["step"], line["status"], line["why"]) for line in lines] == [("good", "left out", "no time is left")]


def test_a_lost_gpu_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarter, "STILL_COMPUTES", "raise RuntimeError('an illegal memory access')")
    results = Results(tmp_path, {})
    steps = [step("bad", "raise SystemExit(3)"), GOOD]
    assert not quarter.run_all(steps, 60.0, results, tmp_path, dry=False, site=None)
    results.close()
    assert ends(results.lines) == {"bad": "lost"}
    assert "illegal memory access" in str(results.lines[-1]["why"])


def test_what_a_step_prints_is_on_the_disk_while_it_still_runs(tmp_path: Path) -> None:
    """The run itself may be killed at any time."""
    slow = CRASHES.replace("os.abort()", "import time; time.sleep(60)")
    code = f"""
        import quarter
        from pathlib import Path
        step = quarter.Step("a", "slow", ("-c", {slow!r}), 60, "")
        quarter.run_all([step], 60.0, quarter.Results(Path({str(tmp_path)!r}), {{}}), Path("."), True, None)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=environment, start_new_session=True)
    try:
        while not (found := list(tmp_path.glob("stdout.log"))) or "crash" not in found[0].read_text():
            assert run.poll() is None
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    assert json.loads(found[0].read_text().splitlines()[-1])["name"] == "crash"


# --- On a machine that has only what the GPU's has


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_needs(names: list[str]) -> set[str]:
    """Return these packages and all that they need, of those that are installed here."""
    found, open_ = set[str](), [*names]
    while open_:
        name = normal(open_.pop())
        if name in found:
            continue
        found.add(name)
        with suppress(PackageNotFoundError):
            needs = (Requirement(text) for text in requires(name) or ())
            open_ += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(params=["with wheels"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Return an environment in which only packages are found that are on the machine or carried there."""
    allowed = with_needs([*ON_THE_MACHINE, *WHEELS])
    if request.param == "without wheels":
        allowed -= set(map(normal, WHEELS))
    owners = packages_distributions().items()
    modules = {module for module, names in owners if not allowed & set(map(normal, names))} - {"alignedserve"}
    assert {"ray", "redis", "openai", "matplotlib"} <= modules
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
            import sys
            from importlib.machinery import PathFinder

            class OfTheMachine(PathFinder):
                @classmethod
                def find_spec(cls, name, path=None, target=None):
                    lacks = name.partition(".")[0] in {sorted(modules)!r}
                    return None if lacks else PathFinder.find_spec(name, path, target)

            sys.meta_path[sys.meta_path.index(PathFinder)] = OfTheMachine
        """)
    )
    paths = [str(tmp_path), str(ROOT), str(ROOT / "tools")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


without_wheels = pytest.mark.parametrize("machine", ["without wheels"], indirect=True)


@rare
@without_wheels
def test_tests_of_gpus_are_collected_there(machine: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "--confcutdir=tests/gpu", "--collect-only", "-q", "tests/gpu"]
    command += ["-p", "no:cacheprovider", "-p", "pytest_timeout"]
    machine["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # pytest finds plugins of what is installed here
    said = subprocess.run(command, cwd=ROOT, env=machine, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout[-2000:] + said.stderr[-2000:]


@rare
@pytest.mark.parametrize(("machine", "part"), [("without wheels", "a"), ("with wheels", "b")], indirect=["machine"])
def test_what_steps_run_is_found_there(machine: dict[str, str], part: str) -> None:
    modules = sorted({step.command[1] for step in STEPS if step.part == part and step.command[1] != "pytest"})
    program = f"from importlib import import_module\nfor name in {modules}: assert import_module(name).main"
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=machine, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr[-2000:]


def test_a_dry_step_needs_no_plugin_and_one_tiny_model() -> None:
    for step in map(quarter.dried, STEPS):
        assert "-n" not in step.command
        assert step.command.count("--model") == (step.command[1] != "pytest")


@rare  # all together take minutes
@pytest.mark.parametrize("name", [step.name for step in STEPS if step.name != "server"])
def test_each_step_can_be_tried_without_a_gpu(name: str, tmp_path: Path) -> None:
    """Tests of GPUs skip; all else measures a tiny model of its kind, with experts where there are some."""
    (tried,) = [quarter.dried(step) for step in STEPS if step.name == name]
    lines = ran(tmp_path, tried, seconds=tried.limit_s)
    assert ends(lines) == {name: "ok"}, (tmp_path / "stderr.log").read_text()[-3000:]
    is_measured = tried.command[1] != "pytest"
    assert any("value" in line for line in lines) is is_measured


@rare  # it takes as long as ten other tests, and the GPU checks run it too
def test_a_server_answers_there(machine: dict[str, str], tmp_path: Path) -> None:
    """A whole deployment on the CPU, of a model without weights, is asked as on the GPU."""
    command = [sys.executable, str(ROOT / "tools" / "quarter.py"), "--only", "server", "--dry", "--out", str(tmp_path)]
    machine["ALIGNEDSERVE_ENGINE_PROFILE_S"] = "0"  # to measure steps takes longer than all else
    subprocess.run(command, env=machine, stdout=subprocess.DEVNULL, timeout=300, check=False)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert ends(lines) == {"server": "ok"}, (tmp_path / "stderr.log").read_text()[-3000:]
    figures = {line["name"]: line["value"] for line in lines if "value" in line}
    assert figures["shared_whole"] == 4
    assert figures["kill_tokens"] == 768
