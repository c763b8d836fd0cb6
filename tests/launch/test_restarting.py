"""Tests of `alignedserve restart`: which part is replaced next, and what the launcher does for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import pytest

from alignedserve.config.config import Config, dump, load
from alignedserve.core import WORKERS, Role
from alignedserve.launch import deployment
from alignedserve.launch.host import Host, NewPlace, PartBegan, PartEnded
from alignedserve.launch.keeper import Change, Keeper
from alignedserve.launch.orders import Restart
from alignedserve.launch.succession import LauncherRecord, LeftParts
from alignedserve.protocol.messages import Attempt, Died, Life, Retire, Started
from alignedserve.shell.control import RESTARTED, HeardOrder, LauncherOrder
from alignedserve.shell.link_keys import DeploymentKeys
from alignedserve.shell.part import PartSpec
from alignedserve.signs import ExitCode
from tests.launch.keepers import ScriptedDeployment, specs_of
from tests.launch.test_keeper import stop
from tests.launch.test_succession import ASKED, ended_process

SPLIT: Config = load({"topology": "1+1", "server.gateways": 2}, {}, None)
pytestmark = pytest.mark.usefixtures("own_door")
PARTS = ["router", "pool-0", "prefill-0", "decode-0", "gateway-0", "gateway-1", "jobs-0"]


# --- What comes next


class Noted(Host):
    """Starts and ends nothing: what is asked of this host, and said to others, is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def start(self, spec: PartSpec) -> None:
        self.notes.append(f"start {spec.name}")

    def ask_to_stop(self, parts: Collection[str]) -> None:
        self.notes += [f"stop {part}" for part in parts]

    def hand_on(self, spec: PartSpec) -> None: ...

    def end(self, part: str) -> None:
        self.notes.append(f"end {part}")

    def say(self, line: str) -> None: ...

    def tell_router(self, message: Started | Died | Retire) -> None:
        if not isinstance(message, Started):
            self.notes.append(f"{type(message).__name__.lower()} {message.name}")

    def work_of(self, spec: PartSpec) -> tuple[Attempt, ...]:
        return ()

    def remember(self) -> None: ...

    def since(self) -> list[str]:
        """Return the notes since the last look."""
        notes, self.notes = self.notes, []
        return notes


def restart_of(*parts: str, in_place: bool = False) -> tuple[Restart, Noted, socket.socket]:
    """Begin to restart these parts, which all run, and return where the answer is."""
    host, (ours, theirs) = Noted(), socket.socketpair()
    specs = [replace(specs_of(SPLIT)[0], role=Role(part.partition("-")[0]), name=part) for part in parts]
    keeper = Keeper(SPLIT, specs, host, host, lambda: 0.0)
    keeper.begin()
    for part in parts:
        keeper.hear(PartBegan(part, 1))
    host.since()
    restart = Restart(keeper, host, HeardOrder(LauncherOrder(restart=True, in_place=in_place), ours))
    restart.go_on()
    return restart, host, theirs


@pytest.mark.parametrize(("role", "ends"), [("prefill", "retire"), ("decode", "retire"), ("gateway", "stop")])
def test_a_spare_runs_before_its_part_is_retired(role: str, ends: str) -> None:
    old, new = f"{role}-0", f"{role}-1"
    restart, host, _ = restart_of(old)
    assert host.since() == [f"start {new}"]
    restart.hear(Change.RUNS, old, "")  # its signs of life come all the time
    restart.hear(Change.IS_OVER, old, "")  # it has died, and starts again
    assert host.since() == []
    restart.hear(Change.RUNS, new, "")
    assert host.since() == [f"{ends} {old}"]
    restart.hear(Change.RUNS, new, "")
    restart.hear(Change.IS_OVER, new, "")
    assert host.since() == []
    assert not restart.is_over
    restart.hear(Change.IS_OVER, old, "")
    assert restart.is_over


@pytest.mark.parametrize(
    ("part", "in_place"),
    [("router", False), ("pool-0", False), ("jobs-0", False), ("decode-0", True), ("prefill-0", True)],
)
def test_a_part_without_a_spare_ends_and_its_next_life_runs_before_another_part_ends(part: str, in_place: bool) -> None:
    restart, host, _ = restart_of(part, in_place=in_place)
    assert host.since() == [f"stop {part}"]
    restart.hear(Change.RUNS, part, "")  # a sign of the life that ends
    restart.hear(Change.IS_OVER, "other", "")
    restart.hear(Change.IS_OVER, part, "")
    restart.hear(Change.RUNS, "other", "")
    assert not restart.is_over
    restart.hear(Change.RUNS, part, "")
    assert restart.is_over


def test_parts_go_in_an_order_and_none_is_forgotten() -> None:
    restart, host, _ = restart_of(*reversed([part for part in PARTS if "gateway" not in part]), in_place=True)
    order = list[str]()
    while not restart.is_over:
        [note] = host.since()
        order.append(part := note.removeprefix("stop "))
        restart.hear(Change.IS_OVER, part, "")
        restart.hear(Change.RUNS, part, "")
    assert order == ["router", "pool-0", "prefill-0", "decode-0", "jobs-0"]


def test_a_spare_that_cannot_run_ends_it() -> None:
    restart, _, answer = restart_of("decode-0")
    restart.hear(Change.LEFT_OUT, "other", "of scale")
    assert not restart.is_over
    restart.hear(Change.LEFT_OUT, "decode-1", "no memory")
    assert restart.is_over
    assert "error: decode-0 is not replaced: no memory; --in-place" in answer.recv(1000).decode()


# --- What the launcher does


class Commanded(ScriptedDeployment):
    """A deployment that gets commands one after the other once it serves, and then stops."""

    def __init__(self, *commands: LauncherOrder, config: Config = SPLIT, left: LeftParts | None = None) -> None:
        super().__init__(config, lambda _, spec: self.on_start(spec), left)
        self.commands, self.answers = commands, list[list[str]]()
        self.on_start: Callable[[PartSpec], None] = lambda _: None
        self.greets = True
        self.command: Callable[[], None] = threading.Thread(target=self._command, daemon=True).start

    def announce(self, announce: Callable[[str], None]) -> None:
        if self.greets:
            announce("it serves")
        self.command()

    def _command(self) -> None:
        for order in self.commands:
            self.answers.append(self.answer(order))
        stop()

    def answer(self, order: LauncherOrder) -> list[str]:
        with self.ordered(order) as theirs, theirs.makefile() as lines:
            return lines.read().splitlines()

    def ordered(self, order: LauncherOrder) -> socket.socket:
        """Give an order, and return the connection on which it is answered."""
        ours, theirs = socket.socketpair()
        self.order(HeardOrder(order, ours))
        return theirs


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Commanded], None]:
    def run(kept: Commanded) -> None:
        monkeypatch.setattr(deployment, "announce_when_ready", lambda _, announce: kept.announce(announce))
        assert kept.run() == ExitCode.STOPPED

    return run


RESTART = LauncherOrder(restart=True)


def test_every_part_is_replaced_and_names_come_back(run: Callable[[Commanded], None]) -> None:
    run(kept := Commanded(RESTART, RESTART))
    first, second = kept.answers
    assert first[-1].startswith(RESTARTED)
    assert second[-1].startswith(RESTARTED)
    assert [line.partition(" ")[0] for line in first if " starts" in line or "starts again" in line] == [
        *("router", "pool-0", "prefill-1", "decode-1", "gateway-2", "gateway-0", "jobs-0")
    ]
    assert "gateway-2 starts, in place of gateway-0" in first
    assert "gateway-0 starts, in place of gateway-1" in first
    assert {spec.name: spec.replaces for spec in kept.started if spec.replaces}.items() >= {
        ("gateway-2", "gateway-0"),
        ("decode-1", "decode-0"),
    }
    assert kept.there() == {"router", "pool-0", "prefill-0", "decode-0", "gateway-1", "gateway-2", "jobs-0"}
    assert all(not spec.replaces for spec in map(kept.spec, kept.there())), "what is gone is replaced by nobody"
    assert kept.lives("router") == kept.lives("jobs-0") == [1, 2, 3]


def test_all_ranks_are_replaced(run: Callable[[Commanded], None]) -> None:
    config = load({"topology": "colocated", "engine.tensor_parallel_size": 2, "jobs.store": "off"}, {}, None)
    run(kept := Commanded(RESTART, config=config))
    assert kept.answers[0][-1].startswith(RESTARTED)
    assert kept.there() == {"router", "pool-0", "decode-1", "decode-1-rank-1", "gateway-1"}


def test_in_place_no_worker_has_a_spare(run: Callable[[Commanded], None]) -> None:
    run(kept := Commanded(LauncherOrder(restart=True, in_place=True)))
    assert kept.answers[0][-1].startswith(RESTARTED)
    assert kept.there() == {*PARTS, "gateway-2"} - {"gateway-1"}
    assert kept.lives("decode-0") == kept.lives("prefill-0") == [1, 2]


def test_in_place_the_ranks_of_a_worker_may_end_in_any_order(run: Callable[[Commanded], None]) -> None:
    """Nothing is heard of the ranks that are ended with the first: they have their next lives by then."""

    class LastRankFirst(Commanded):
        def ask_to_stop(self, parts: Collection[str]) -> None:
            if "decode-0" in parts:
                self.end("decode-0-rank-1")
            super().ask_to_stop(parts)

    config = load({"topology": "colocated", "engine.tensor_parallel_size": 2, "jobs.store": "off"}, {}, None)
    run(kept := LastRankFirst(LauncherOrder(restart=True, in_place=True), config=config))
    assert kept.answers[0][-1].startswith(RESTARTED)
    assert kept.lives("decode-0") == kept.lives("decode-0-rank-1") == [1, 2]


def test_a_spare_that_goes_with_its_pool_ends_the_restart(
    run: Callable[[Commanded], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Commanded(RESTART)
    monkeypatch.setattr(kept.host, "make_place", lambda at: NewPlace(["pool-1"] if at == "decode-1" else []))
    monkeypatch.setattr(kept.host, "goes_with", lambda gone: ["decode-1"] if gone == "pool-1" else [])
    kept.on_start = lambda spec: kept.die(spec, "no memory") if spec.name == "pool-1" else None
    kept.runs = lambda spec: spec.name not in ("pool-1", "decode-1")
    run(kept)
    assert kept.answers[0][-1] == "error: decode-0 is not replaced: decode-1 has ended for good; see the log"
    assert kept.there() == {*PARTS, "prefill-1"} - {"prefill-0"}


def test_a_worker_that_is_left_out_while_it_is_restarted_in_place_ends_the_restart(
    run: Callable[[Commanded], None],
) -> None:
    kept = Commanded(LauncherOrder(decode=2), LauncherOrder(restart=True, in_place=True))
    kept.on_start = lambda spec: kept.die(spec) if (spec.name, spec.incarnation > 1) == ("decode-1", True) else None
    kept.runs = lambda spec: spec.name != "decode-1"
    run(kept)
    assert kept.answers[1][-1] == "error: decode-1 is not replaced: decode-1 has ended for good; see the log"
    assert kept.there() == {*PARTS}


def test_a_spare_without_memory_leaves_its_worker_and_the_error_says_what_else_can_be_done(
    run: Callable[[Commanded], None],
) -> None:
    kept = Commanded(RESTART, LauncherOrder(decode=1))
    kept.on_start = lambda spec: kept.die(spec, "no memory") if spec.name == "decode-1" else None
    kept.runs = lambda spec: spec.name != "decode-1"
    run(kept)
    assert kept.answers[0][-1] == (
        "error: decode-0 is not replaced: no memory; --in-place ends a worker before the next one starts"
    )
    assert kept.lives("decode-0") == [1]
    assert kept.there() == {*PARTS, "prefill-1"} - {"prefill-0"}
    assert kept.answers[1] == [], "other commands are taken again"


def test_there_is_one_at_a_time_and_an_interrupted_one_ends_between_two_parts(
    run: Callable[[Commanded], None], capsys: pytest.CaptureFixture[str]
) -> None:
    kept, commands = Commanded(), list[socket.socket]()
    kept.command = lambda: commands.extend(map(kept.ordered, (RESTART, RESTART, LauncherOrder(decode=2))))
    kept.on_start = lambda spec: commands[0].close() if spec.name == "decode-1" else None
    kept.on_forget = lambda part: stop() if part == "decode-0" else None
    run(kept)
    for refused in commands[1:]:
        with refused, refused.makefile() as lines:
            assert lines.read() == "error: a restart goes on: wait until it has ended, or interrupt it\n"
    assert "restart: error: it was interrupted, and ends before gateway-0\n" in capsys.readouterr().err
    assert kept.there() == {*PARTS, "prefill-1", "decode-1"} - {"prefill-0", "decode-0"}


def test_before_it_serves_nothing_is_restarted(run: Callable[[Commanded], None]) -> None:
    kept = Commanded(RESTART)
    kept.greets = False
    run(kept)
    assert kept.answers == [["error: it still starts: wait until it serves"]]


def test_a_restart_that_its_launcher_did_not_survive_leaves_no_part_twice(run: Callable[[Commanded], None]) -> None:
    specs = specs_of(SPLIT)
    like = {spec.name: spec for spec in specs}
    spares = {"gateway-2": "gateway-1", "decode-1": "decode-0"}
    specs += [replace(like[old], name=spare, replaces=old) for spare, old in spares.items()]
    lives = {spec.name: Life(spec.name, spec.acts_as, 1) for spec in specs}
    record = LauncherRecord(ended_process(), ASKED, DeploymentKeys.new(), lives, tuple(specs), {})
    running: Mapping[str, object] = dict.fromkeys(lives)
    kept, gone = Commanded(left=LeftParts(record, running)), set[str]()  # pyrefly: ignore[bad-argument-type]

    def on_forget(part: str) -> None:
        gone.add(part)
        if gone == set(spares.values()):
            stop()

    kept.command, kept.on_forget = lambda: None, on_forget
    run(kept)
    assert kept.there() == {*PARTS, *spares} - gone


def test_parts_of_a_version_with_other_settings_are_replaced(run: Callable[[Commanded], None]) -> None:
    specs = tuple(specs_of(SPLIT))
    lives = {spec.name: Life(spec.name, spec.acts_as, 1) for spec in specs}
    running: Mapping[str, object] = dict.fromkeys(lives)
    record = LauncherRecord(ended_process(), ASKED, DeploymentKeys.new(), lives, specs, {})
    left = LeftParts(record, running, is_other_version=True)  # pyrefly: ignore[bad-argument-type]
    kept = Commanded(left=left)
    kept.command = lambda: None
    kept.on_start = lambda _: stop() if kept.lives("jobs-0") == [1, 2] else None
    run(kept)
    assert kept.there() == {"router", "pool-0", "prefill-1", "decode-1", "gateway-2", "gateway-0", "jobs-0"}


def test_replaced_weights_end_no_part_and_the_error_says_how_they_are_taken(run: Callable[[Commanded], None]) -> None:
    specs = tuple(replace(spec, config=dump(SPLIT), weights="of before") for spec in specs_of(SPLIT))
    lives = {spec.name: Life(spec.name, spec.acts_as, 1) for spec in specs}
    record = LauncherRecord(ended_process(), ASKED, DeploymentKeys.new(), lives, specs, {})
    running: Mapping[str, object] = dict.fromkeys(lives)
    orders = (RESTART, LauncherOrder(restart=True, in_place=True), LauncherOrder(reload=True))
    kept = Commanded(*orders, left=LeftParts(record, running))  # pyrefly: ignore[bad-argument-type]
    run(kept)
    how = "`alignedserve stop --port 8000` and then `alignedserve serve` as before takes them"
    why = f"{SPLIT.model} has other weights than this deployment started with: {how}"
    refused = [f"error: nothing is restarted: {why}"]
    assert kept.answers == [refused, refused, ["no setting has changed", f"the model stays as it is: {why}"]]
    assert {spec.incarnation for spec in kept.started} == {1}


def test_a_worker_that_has_left_leaves_its_devices_to_the_next() -> None:
    config = load({"topology": "2xcolocated"}, {}, None)
    host, devices = Noted(), iter((0, 1))
    specs = [replace(spec, device=next(devices) if spec.role in WORKERS else 0) for spec in specs_of(config)]
    keeper = Keeper(config, specs, host, host, lambda: 0.0)
    keeper.begin()
    keeper.hear(PartBegan("decode-0", 1))
    keeper.retire("decode-0")
    keeper.add("decode-2")
    keeper.hear(PartEnded("decode-0", 1, 0, ""))
    keeper.add("decode-3")
    devices_of = {part.spec.name: part.spec.device for part in keeper.parts() if part.spec.role in WORKERS}
    assert devices_of == {"decode-1": 1, "decode-2": 2, "decode-3": 0}
