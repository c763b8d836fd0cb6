"""Tests of which parts a trial hurts: all of them, at any time."""

from __future__ import annotations

from random import Random

from tests.chaos.parts import Parts

START = "python -m alignedserve.launch.start "


def test_parts_are_found_however_they_were_started_and_nothing_else() -> None:
    titles = [
        f"{START}router",
        "alignedserve: prefill-0",
        "alignedserve: fork server of workers",
        "ray::decode-0.run()",
        "ray::gateway-0",
        "ray::IDLE",
        "python -m alignedserve serve demo",
    ]
    found = Parts(lambda: dict(enumerate(titles, start=1)))
    parts = {("router", 1), ("prefill-0", 2), ("decode-0", 4), ("gateway-0", 5)}
    assert {found.choose(Random(seed)) for seed in range(80)} == parts
    assert found.choose(Random(1), ("pool",)) is None
    assert found.running().items() == {(pid, part) for part, pid in parts}


def test_a_part_is_hurt_again_and_again_as_soon_as_it_has_a_process() -> None:
    """The launcher's rules for quick deaths are met in trials."""
    processes = iter({pid: f"{START}decode-0"} for pid in range(1, 6))
    found, draw, noted = Parts(lambda: next(processes)), Random(1), list[str]()
    found.note = noted.append
    assert [found.choose(draw) for _ in range(5)] == [("decode-0", pid) for pid in range(1, 6)]
    assert noted == ["decode-0"] * 5


def test_servers_are_found_by_their_programs() -> None:
    commands = ["/ray/gcs/gcs_server --port=1", "/ray/raylet/raylet --name raylet", "ray::decode-0.run()", "sh raylet"]
    found = Parts(lambda: dict(enumerate(commands)))
    assert found.servers(("gcs_server", "raylet")) == {0: "gcs_server", 1: "raylet"}
