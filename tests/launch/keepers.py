"""A launcher without processes, whose parts end as a test says."""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.config.config import Config
from alignedserve.launch.keeper import Keeper
from alignedserve.launch.plan import LOOPBACK, parts_of
from alignedserve.shell.clock import ClockOrigin
from alignedserve.shell.part import PartSpec

NOWHERE = f"tcp://{LOOPBACK}:9"


def specs_of(config: Config) -> list[PartSpec]:
    at, origin = ("local", "test", LOOPBACK, NOWHERE), ClockOrigin.read()
    return [PartSpec(role, name, *at, {}, origin) for role, name in parts_of(config)]


class ScriptedKeeper(Keeper):
    """Note the lives that start; `on_start` may end any of them, or stop the keeper."""

    def __init__(self, config: Config, on_start: Callable[[ScriptedKeeper, PartSpec], None]) -> None:
        super().__init__(config, specs_of(config))
        self.started: list[PartSpec] = []
        self._on_start = on_start

    def start(self, spec: PartSpec) -> None:
        self.started.append(spec)
        self.began(spec.name)
        self._on_start(self, spec)

    def die(self, spec: PartSpec) -> None:
        self.ended(spec, "a fault")

    def ask_to_stop(self, part: str) -> None:
        self.ended(self._lives[part].spec, 0)

    def end(self, part: str) -> None: ...

    def lives(self, part: str) -> list[int]:
        return [spec.incarnation for spec in self.started if spec.name == part]
