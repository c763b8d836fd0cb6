"""The trace of a run opens in Perfetto: valid, in microseconds, and without overlaps on a track."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from typing import Any

import pytest

from alignedserve.config.topology import Topology
from alignedserve.lab.loads.workload import Workload
from alignedserve.lab.reports.timeline import timeline
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import Settings
from tests.simulator.runs import MIXED

Trace = list[dict[str, Any]]


def events(text: str) -> Trace:
    tree = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert tree["displayTimeUnit"] == "ms"
    found: Trace = tree["traceEvents"]
    return found


def of_phase(trace: Trace, *phases: str) -> Trace:
    return [event for event in trace if event["ph"] in phases]


def test_every_process_and_track_has_a_name() -> None:
    named = [(event["name"], event["args"]["name"]) for event in of_phase(events(timeline(MIXED)), "M")]
    assert named == [
        ("process_name", "requests"),
        ("process_name", "decode-0"),
        ("thread_name", "steps"),
        ("thread_name", "copies"),
        ("thread_name", "copies beside steps"),
    ]


def test_a_step() -> None:
    (step,) = [event for event in of_phase(events(timeline(MIXED)), "X") if event["ts"] == 2_500_000]
    assert (step["name"], step["dur"]) == ("decode", 100_000)
    assert step["args"] == {
        "tokens": 3,
        "chunks": 0,
        "decodes": 3,
        "shortest prefix": 10,
        "longest prefix": 50,
        "spread": 40,
        "predicted ms": 100.0,
    }


def test_a_copy_has_a_track_of_its_own() -> None:
    copies = [event for event in of_phase(events(timeline(MIXED)), "X") if event["cat"] == "copy"]
    assert [(event["name"], event["ts"], event["dur"], event["args"]) for event in copies] == [
        ("to device", 4_000_000, 500_000, {"tokens": 64}),
        ("from device", 5_000_000, 250_000, {"tokens": 32}),
    ]
    assert {event["tid"] for event in copies} == {2}


def test_a_request_begins_has_a_first_token_and_ends() -> None:
    mine = [event for event in events(timeline(MIXED)) if event.get("id") == "late"]
    assert [(event["ph"], event["name"], event["ts"]) for event in mine] == [
        ("b", "rt late", 1_000_000),
        ("n", "first token", 2_500_000),
        ("e", "rt late", 2_600_000),
    ]
    assert mine[0]["args"] == {"prompt": 10, "output": 2, "outcome": "finished"}


def test_a_request_that_is_still_open_ends_with_the_run() -> None:
    (end,) = [event for event in events(timeline(MIXED)) if event.get("id") == "open" and event["ph"] == "e"]
    assert end["ts"] == 10_000_000


def test_a_limit_leaves_out_what_begins_later_and_cuts_requests() -> None:
    trace = of_phase(events(timeline(MIXED, limit_s=2.4)), "X", "b", "n", "e")
    assert all(event["ts"] <= 2_400_000 for event in trace)
    assert [(event["ph"], event["ts"]) for event in trace if event.get("id") == "late"] == [
        ("b", 1_000_000),
        ("e", 2_400_000),
    ]
    assert {event["id"] for event in of_phase(trace, "b")} == {"quick", "late", "halting", "soon", "slow"}
    assert len(of_phase(trace, "X")) == 4


@pytest.mark.parametrize("topology", ["colocated", "1+2"])
def test_the_trace_of_a_real_run(topology: str) -> None:
    workload = Workload(num_requests=20, rate=100.0, mean_output=8, leaving_share=0.2)
    simulation = Simulation(Settings(topology=Topology.parse(topology), workload=workload, record=True))
    simulation.run()
    trace = events(timeline(simulation.record(wall_s=1.0)))
    _check_nesting(trace)
    assert len(of_phase(trace, "b")) == len(of_phase(trace, "e")) == 20
    assert any(event["cat"] == "copy" for event in of_phase(trace, "X"))


def _check_nesting(trace: Trace) -> None:
    """Check that spans on a worker's track do not overlap, and that a request ends after its first token."""
    spans = sorted(of_phase(trace, "X"), key=lambda event: (event["pid"], event["tid"], event["ts"]))
    for _, track in groupby(spans, key=lambda event: (event["pid"], event["tid"])):
        for event, after in pairwise(track):
            assert event["dur"] >= 0
            assert event["ts"] + event["dur"] <= after["ts"] + 1e-6
    requests = sorted(
        of_phase(trace, "b", "n", "e"), key=lambda event: event["id"]
    )  # a stable sort: in order of recording
    for _, mine in groupby(requests, key=lambda event: event["id"]):
        whole = list(mine)
        assert "".join(event["ph"] for event in whole) in ("be", "bne")
        assert [event["ts"] for event in whole] == sorted(event["ts"] for event in whole)
