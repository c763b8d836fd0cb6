"""A launcher without processes, whose parts end as a test says."""

from __future__ import annotations

from collections.abc import Callable, Collection

from alignedserve.config.config import Config
from alignedserve.core import WORKERS
from alignedserve.launch.keeper_events import KeeperEvent
from alignedserve.launch.orders import CommandedKeeper
from alignedserve.launch.plan import LOOPBACK, parts_of
from alignedserve.launch.reloading import Reloading
from alignedserve.launch.succession import Left
from alignedserve.protocol.messages import rank_suffix
from alignedserve.shell.clock import ClockOrigin
from alignedserve.shell.control import HeardOrder
from alignedserve.shell.part import PartSpec
from alignedserve.signs import Sign, Stage

NOWHERE = f"tcp://{LOOPBACK}:9"


def specs_of(config: Config) -> list[PartSpec]:
    at, origin = ("local", "test", LOOPBACK, NOWHERE), ClockOrigin.read()
    return [
        PartSpec(role, f"{name}{rank_suffix(rank)}", *at, {}, origin, rank=rank)
        for role, name in parts_of(config)
        for rank in range(config.engine.tensor_parallel_size if role in WORKERS else 1)
    ]


class ScriptedKeeper(CommandedKeeper):
    """Note the lives that start and the pauses before them; a pause is over at once, unless `on_pause` takes it."""

    def __init__(
        self, config: Config, on_start: Callable[[ScriptedKeeper, PartSpec], None], left: Left | None = None
    ) -> None:
        self.asked = config  # the settings, for the next reload
        specs = specs_of(config) if left is None else left.record.specs
        super().__init__(config, specs, Reloading(config, lambda: self.asked), left=left)
        self.started: list[PartSpec] = []
        self.told: list[PartSpec] = []  # with new settings
        self.pauses_s: list[float] = []
        self.on_forget: Callable[[str], None] = lambda _: None
        self.runs: Callable[[PartSpec], bool] = lambda _: True  # whether a life loads all and runs
        self.on_pause: Callable[[], None] | None = None
        self._on_start = on_start

    def start(self, spec: PartSpec) -> None:
        self.started.append(spec)
        self.began(spec.name)
        if self.runs(spec):
            self.say(Sign(spec.name, spec.incarnation, Stage.RUNS))
        self._on_start(self, spec)

    def say(self, sign: Sign) -> None:
        self._events.put(sign)

    def order(self, order: HeardOrder) -> None:
        self._events.put(order)

    def die(self, spec: PartSpec, failure: str = "") -> None:
        self.ended(spec, "a fault", failure)

    def hand_on(self, spec: PartSpec) -> None:
        self.told.append(spec)

    def ask_to_stop(self, parts: Collection[str]) -> None:
        for part in parts:
            self.end(part)

    def end(self, part: str) -> None:
        self.ended(self._lives[part].spec, "a kill")

    def after(self, seconds: float, event: KeeperEvent) -> None:
        self.pauses_s.append(seconds)
        if self.on_pause is not None:
            self.on_pause()
        else:
            super().after(0.0, event)

    def forget(self, part: str) -> None:
        self.on_forget(part)

    def lives(self, part: str) -> list[int]:
        return [spec.incarnation for spec in self.started if spec.name == part]
