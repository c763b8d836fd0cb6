"""Simulations from Python: what the command gives, for workloads, policies and tables that are objects too."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from alignedserve import System, compare, simulate
from alignedserve.cli import main as cli
from alignedserve.errors import AlignedServeError
from alignedserve.explain.decisions import DecisionRing
from alignedserve.lab.api.simulated_run import SimulatedRun
from alignedserve.lab.loads.figures.tables import csv_text
from alignedserve.lab.loads.records import record_file
from alignedserve.lab.loads.workload.spec import read_workload
from alignedserve.lab.loads.workload.table import trace_of
from alignedserve.worker.scheduler import Scheduler
from alignedserve.worker.step.view import PlannedStep, StepView
from tests.rare import rare, rarely

ROOT = Path(__file__).resolve().parents[2]
SMALL: str = "chat,num_requests=12,rate=20,prompt=exp:60:400,output=exp:6:20"


class LastFirst(Scheduler):
    def plan(self, view: StepView) -> PlannedStep:
        return self.step_of(view, [*view.decodes, *view.prompts, *view.waiting][::-1])


@pytest.fixture(autouse=True)
def no_dataframes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are columns, whatever is installed here."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "polars", None)


@pytest.fixture(scope="module")
def run() -> SimulatedRun:
    return simulate(SMALL, cluster="1+1", seed=3)


def without_speed(document: str) -> Any:
    tree = json.loads(document)
    for each in tree["runs"]:
        del each["figures"]["speed"]
    return tree


def is_speed(line: str) -> bool:
    return "wall" in line


def csv_of(columns: Any) -> str:
    return csv_text([*columns], zip(*columns.values(), strict=True))


# --- Equal to the command


def test_a_run_is_the_commands_run_field_by_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what = f"--workload {SMALL} --cluster 1+1 --seed 3 --gateway-ms 2 --profile rtx4090-llama-3.1-8b-tp1"
    how = "--preset shortest --set schedule.reuse=false --set engine.max_batch=6"
    files = f"--json {tmp_path}/command.json --csv {tmp_path}/command.csv --timeline {tmp_path}/command-timeline"
    assert cli.main(["simulate", *f"{what} {how} {files}".split()]) == 0
    run = simulate(
        SMALL,
        preset="shortest",
        cluster="1+1",
        profile="rtx4090-llama-3.1-8b-tp1",
        seed=3,
        gateway_ms=2,
        settings={"schedule.reuse": False, "engine.max_batch": 6},
    )
    run.json(tmp_path / "python.json")
    run.timeline(tmp_path / "python-timeline")
    command, python = ((tmp_path / f"{who}.json").read_text() for who in ("command", "python"))
    assert without_speed(command) == without_speed(python)
    assert csv_of(run.requests) == (tmp_path / "command.csv").read_text()
    assert csv_of(run.steps) == (tmp_path / "command-steps.csv").read_text()
    assert (tmp_path / "python-timeline").read_text() == (tmp_path / "command-timeline").read_text()
    text = capsys.readouterr().out
    assert [line for line in repr(run).splitlines() if not is_speed(line)] == [
        line for line in text.splitlines() if not is_speed(line)
    ]


@pytest.mark.parametrize("jobs", [1, rarely(2)])
def test_a_comparison_is_the_commands_comparison(jobs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment, script = dict(os.environ), sys.modules["__main__"]
    words, files = SMALL.replace("rate=20,", ""), f"--json {tmp_path}/command.json --csv {tmp_path}/command.csv"
    line = f"--compare fcfs sarathi --workload {words} --cluster 1+1 --seeds 1 --rates 50 --jobs 1"
    assert cli.main(["simulate", *f"{line} {files}".split()]) == 0
    found = compare(["fcfs", "sarathi"], words, cluster="1+1", seeds=[1], rates=[50], jobs=jobs)
    assert (dict(os.environ), sys.modules["__main__"]) == (environment, script), "processes leave this one as it was"
    found.json(tmp_path / "python.json")
    command, python = ((tmp_path / f"{who}.json").read_text() for who in ("command", "python"))
    assert without_speed(command) == without_speed(python)
    with (tmp_path / "command.csv").open() as file:
        [head, *rows] = csv.reader(file)
    assert [*found.runs] == head
    assert len(found.runs["preset"]) == len(rows) == 2
    assert repr(found) == capsys.readouterr().out


# --- Objects


def test_a_system_has_settings_beside_its_preset() -> None:
    crowd = SMALL.replace("rate=20", "rate=2000")
    two_at_once = {"engine.max_batch": 2, "engine.max_step_tokens": 64}
    mine = System("mine", settings={"schedule.scheduler": f"{__name__}:LastFirst"})
    found = compare(["aligned", mine, "shortest"], crowd, settings=two_at_once, jobs=1)
    usual, own, shortest = (run.figures.rt.ttft_s for run in found.all_figures)
    assert [run.trial.preset for run in found.all_figures] == ["aligned", "mine", "shortest"]
    assert usual != own != shortest
    assert found.problems == []


def test_a_workload_is_words_or_an_object_or_the_tree_of_a_file(run: SimulatedRun) -> None:
    _, *pairs = SMALL.split(",")
    tree = {"streams": [{"name": "chat", **dict(pair.split("=") for pair in pairs)}]}
    mixture = read_workload(SMALL)
    for workload in (mixture, mixture.streams[0], tree):
        assert simulate(workload, cluster="1+1", seed=3).requests == run.requests


ROWS = [(0.5, 40, 3), (0.1, 20, 6), (0.9, 30, 5)]
TITLES = ("arrival_s", "prompt_tokens", "output_tokens")


class Dataframe:
    """What dataframes of pandas and polars have in common."""

    columns = TITLES

    def __getitem__(self, title: str) -> list[float]:
        return [row[TITLES.index(title)] for row in ROWS]


@pytest.mark.parametrize(
    "table",
    [
        [dict(zip(TITLES, row, strict=True)) for row in ROWS],
        {title: [row[place] for row in ROWS] for place, title in enumerate(TITLES)},
        Dataframe(),
    ],
    ids=["rows", "columns", "dataframe"],
)
def test_a_table_of_arrivals_is_the_trace_of_a_file(table: Any, tmp_path: Path) -> None:
    lines = [",".join(TITLES), *(",".join(map(str, row)) for row in sorted(ROWS))]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    of_file = simulate(f"trace:{tmp_path}/trace.csv,ttft_s=0.5")
    assert simulate(trace_of(table, ttft_s=0.5)).requests == of_file.requests
    assert simulate(table).requests["arrival_s"] == pytest.approx([0.0, 0.4, 0.8])


def test_a_table_says_which_requests_are_documents() -> None:
    rows = [{**dict(zip(TITLES, row, strict=True)), "service": "be" if row[1] == 20 else "rt"} for row in ROWS]
    run = simulate(rows)
    assert sorted(zip(run.requests["prompt_tokens"], run.requests["service"], strict=True)) == [
        (20, "be"),
        (30, "rt"),
        (40, "rt"),
    ]
    with pytest.raises(AlignedServeError, match="service is a column of the table, and a key: leave one of them out"):
        trace_of(rows, service="be")


# --- A run


def test_tokens_are_those_of_the_requests(run: SimulatedRun) -> None:
    tokens, requests = run.tokens, run.requests
    assert len(tokens["request"]) == sum(requests["output_tokens"]) == run.summary.requests.output_tokens
    rows = zip(tokens["request"], tokens["index"], tokens["gap_s"], strict=True)
    firsts = {name: gap_s for name, index, gap_s in rows if index == 0}
    assert firsts == dict(zip(requests["id"], requests["ttft_s"], strict=True))


def test_refused_requests_say_why(run: SimulatedRun) -> None:
    crowd = simulate("chat,num_requests=30,rate=1000,prompt=900,output=5", settings={"server.max_queue": 2})
    assert {*zip(crowd.requests["outcome"], crowd.requests["refused"], strict=True)} == {
        ("finished", None),
        ("refused", "queue_full"),
    }
    assert {*run.requests["refused"]} == {None}


def test_a_request_is_explained_though_the_parts_have_forgotten_it(
    run: SimulatedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered = run.explain("chat-0")
    assert repr(remembered).startswith("chat-0: real-time, ended after ")
    for module in ("worker.log", "router.state"):
        monkeypatch.setattr(f"alignedserve.{module}.DecisionRing", partial(DecisionRing, 120, 120))
    forgetful = simulate(SMALL, cluster="1+1", seed=3)
    assert forgetful.explain("chat-0").story.stays == remembered.story.stays


def test_its_files_are_written(run: SimulatedRun, tmp_path: Path) -> None:
    run.page(tmp_path / "run.html")
    assert '"decode-0"' in (tmp_path / "run.html").read_text()
    run.plot(tmp_path / "run.svg")
    assert (tmp_path / "run.svg").read_text().startswith("<?xml")
    run.save(tmp_path / "record.json")
    assert record_file.dump(record_file.load(tmp_path / "record.json")) == record_file.dump(run.record)
    run.explain("chat-1").perfetto(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    with pytest.raises(AlignedServeError, match="cannot be written: No such file"):
        run.json(tmp_path / "nowhere" / "run.json")


def test_it_runs_in_a_notebooks_event_loop(run: SimulatedRun) -> None:
    async def cell() -> None:
        assert simulate(SMALL, cluster="1+1", seed=3).requests == run.requests
        assert len(compare("fcfs", SMALL, jobs=1).all_figures) == 1

    asyncio.run(cell())


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_tables_are_dataframes_where_there_are_any(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of this name stands for the library: any version takes columns by their names."""
    there = ModuleType(library)
    vars(there)["DataFrame"] = lambda columns: (library, [*columns])
    monkeypatch.setitem(sys.modules, library, there)
    name, titles = simulate(SMALL).tokens
    assert (name, titles) == (library, ["request", "service", "index", "at_s", "gap_s"])


# --- What is wrong

UNTYPED: Any = "air"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (partial(simulate, "caht"), "did you mean chat?"),
        (partial(simulate, preset="alinged"), "did you mean aligned?"),
        (partial(simulate, cluster="2-2"), "did you mean 2+2?"),
        (partial(simulate, profile="nothing"), "--profile 'nothing' is neither a file"),
        (partial(simulate, transport=UNTYPED), "transport must be host or direct"),
        (partial(simulate, seed=-1), "a seed must be a whole number of 0 or more"),
        (partial(simulate, rate=-1), "a rate must be a number of 0 or more"),
        (partial(simulate, "chat,rate=3", rate=2), "--rates takes the place of rate=3"),
        (partial(simulate, gateway_ms=UNTYPED), "gateway_ms must be a number"),
        (partial(simulate, settings={"server.port": 1}), "a simulation has no such setting"),
        (partial(simulate, settings={"schedule.scheduler": "mine"}), "schedule.scheduler 'mine' is not known"),
        (partial(simulate, {"arrival_s": [1.0], "prompt_tokens": [3]}), "the table has no output_tokens"),
        (partial(simulate, {"arrival_s": [1.0], "prompt_tokens": [3, 4]}), "not equally long"),
        (partial(simulate, [dict(zip(TITLES, (1, -3, 1), strict=True))]), "row 0: prompt_tokens must be"),
        (partial(simulate, [dict(zip(TITLES, ("x", 3, 1), strict=True))]), "a number of seconds"),
        (partial(simulate, []), "the table has no requests"),
        (partial(simulate, 7), "the table must be rows"),
        (partial(compare, []), "name at least one system"),
        (partial(compare, ["fcfs", System("fcfs", "aligned")]), "systems has 'fcfs' twice"),
        (partial(compare, ["fcfs"], seeds=[1, 1]), "seeds has 1 twice"),
        (partial(compare, ["fcfs"], jobs=0), "jobs must be a whole number of 1 or more"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_line(call: Callable[[], object], said: str) -> None:
    with pytest.raises(AlignedServeError) as raised:
        call()
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_run_without_this_request_says_so(run: SimulatedRun) -> None:
    with pytest.raises(AlignedServeError, match="no request 'chat-99'"):
        run.explain("chat-99")


# --- The guide


@rare
def test_the_snippets_of_the_guide_run(tmp_path: Path) -> None:
    """They are a script without a guard: processes that share its work do not run it again."""
    guide = (ROOT / "docs" / "how" / "simulate.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", guide, re.M | re.S))
    (tmp_path / "script.py").write_text(f"print('once')\n{code}")
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("once") == 1
    assert (tmp_path / "run.html").exists()
