"""Pictures of a simulated run: what the live page would have shown, and no other run because of it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cli import main as cli
from alignedserve.lab.loads.records.records import RunRecord
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.trials import running
from alignedserve.lab.trials.building import settings_of
from alignedserve.lab.trials.running import Film, run_filmed, run_once
from alignedserve.metrics.recent import SLOT_S
from tests.rare import rare

TRIAL = SimulationTrial("aligned", "chat,num_requests=30,rate=6,output=exp:60:150", "1+1")


def filmed(trial: SimulationTrial) -> tuple[Simulation, list[Any]]:
    simulation = Simulation(settings_of(trial))
    film = Film(simulation, "a trial")
    simulation.run()
    return simulation, [json.loads(picture) for picture in film.pictures]


@pytest.fixture(scope="module")
def run() -> tuple[Simulation, list[Any]]:
    return filmed(TRIAL)


def test_a_run_is_the_same_whether_it_is_filmed_or_not(run: tuple[Simulation, list[Any]]) -> None:
    plain = Simulation(settings_of(TRIAL))
    plain.run()
    assert plain.world.digest == run[0].world.digest
    assert list(plain.clients.records()) == list(run[0].clients.records())


def test_its_pictures_show_a_second_each_from_the_first_part_to_rest(run: tuple[Simulation, list[Any]]) -> None:
    _, pictures = run
    ats = [picture["at"] for picture in pictures]
    assert [b - a for a, b in pairwise(ats)] == pytest.approx([1.0] * (len(ats) - 1))
    assert {part["name"] for part in pictures[5]["parts"]} == {"router", "gateway-0", "prefill-0", "decode-0", "pool-0"}
    busiest = max(pictures, key=lambda picture: sum(len(group["rt"]) for group in groups(picture)))
    assert busiest["workers"][0]["lengths"]["band"] is not None
    assert sum(busiest["queues"]["rt"].values()) + sum(busiest["queues"]["be"].values()) > 0
    assert (pictures[0]["state"], pictures[-1]["state"]) == ("not ready", "ready")
    last = pictures[-1]
    assert sum(last["queues"]["rt"].values()) == sum(last["queues"]["be"].values()) == 0
    assert not any(group["num_rt"] or group["num_be"] for group in groups(last))


def groups(picture: Any) -> list[Any]:
    return [
        worker["lengths"][lane]
        for worker in picture["workers"]
        for lane in ("batch", "guests", "prompts", "waiting", "coming")
    ]


def test_tokens_and_ends_add_up_to_the_run(run: tuple[Simulation, list[Any]]) -> None:
    simulation, pictures = run
    slots, records = pictures[-1]["requests"]["slots"], list(simulation.clients.records())
    for service in ("rt", "be"):
        of_class = [record for record in records if record.service.value == service]
        assert sum(slot[service]["tokens"] for slot in slots) == sum(len(record.token_at) for record in of_class)
        assert sum(slot[service]["ended"] for slot in slots) == len(of_class)


def test_a_long_run_has_no_more_pictures(monkeypatch: pytest.MonkeyPatch, run: tuple[Simulation, list[Any]]) -> None:
    monkeypatch.setattr(running, "MOST_PICTURES", 16)
    _, pictures = filmed(TRIAL)
    assert 8 <= len(pictures) <= 16
    assert pictures[-1]["at"] > 0.7 * run[1][-1]["at"]


def test_charts_of_a_long_run_count_each_token_when_it_came(
    monkeypatch: pytest.MonkeyPatch, run: tuple[Simulation, list[Any]]
) -> None:
    """Pictures may be further apart than the slots of a chart."""
    monkeypatch.setattr(running, "MOST_PICTURES", 2)
    _, pictures = filmed(TRIAL)
    at = pictures[-1]["at"]
    assert at > SLOT_S
    (same,) = [picture for picture in run[1] if picture["at"] == at]
    assert pictures[-1]["requests"] == same["requests"]


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    flags = ("--workload", TRIAL.workload or "", "--cluster", "1+1", "--page", str(page))
    assert cli.main(["simulate", *flags]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert '"decode-0"' in page.read_text()


@rare
def test_a_record_is_the_same_with_a_page(tmp_path: Path) -> None:
    def requests(record: RunRecord) -> list[object]:
        return [*record.requests]

    plain = run_once(TRIAL, lambda *_: None)
    assert requests(run_filmed(TRIAL, lambda *_: None, tmp_path / "page.html")) == requests(plain)
