"""A deployment without processes, whose parts end as a test says."""

from __future__ import annotations

from collections.abc import Callable, Collection

from alignedserve.config.config import Config
from alignedserve.core import WORKERS, Role
from alignedserve.launch.deployment import RunningDeployment
from alignedserve.launch.host import Events, Host, PartBegan, PartTask
from alignedserve.launch.orders import Reloading
from alignedserve.launch.plan import LOOPBACK, parts_of
from alignedserve.launch.succession import LeftParts
from alignedserve.protocol.messages import rank_suffix
from alignedserve.shell.clock import ClockOrigin
from alignedserve.shell.control import HeardOrder
from alignedserve.shell.part import PartSpec
from alignedserve.signs import Sign, Stage

NOWHERE = f"tcp://{LOOPBACK}:9"


def specs_of(config: Config) -> list[PartSpec]:
    at, origin = ("local", "test", LOOPBACK, NOWHERE), ClockOrigin.read()
    specs = [
        PartSpec(role, f"{name}{rank_suffix(rank)}", *at, {}, origin, rank=rank)
        for role, name in parts_of(config)
        for rank in range(config.engine.tensor_parallel_size if role in WORKERS else 1)
    ]
    beside = [] if config.embed is None else [(Role.ROUTER, "router-embed"), (Role.DECODE, "decode-embed")]
    return [*specs, *(PartSpec(role, name, *at, {}, origin, of_embed=True) for role, name in beside)]


class ScriptedEvents(Events):
    """Note the pauses; a pause is over at once, unless `on_pause` takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses_s: list[float] = []
        self.on_pause: Callable[[], None] | None = None

    def after(self, seconds: float, task: PartTask) -> None:
        self.pauses_s.append(seconds)
        if self.on_pause is not None:
            self.on_pause()
        else:
            super().after(0.0, task)


class ScriptedHost(Host):
    """Starts and ends parts by the methods of a scripted deployment, which tests override."""

    def __init__(self, script: ScriptedDeployment) -> None:
        super().__init__()
        self.events: ScriptedEvents = ScriptedEvents()
        self._script = script

    def start(self, spec: PartSpec) -> None:
        self._script.start(spec)

    def ask_to_stop(self, parts: Collection[str]) -> None:
        self._script.ask_to_stop(parts)

    def hand_on(self, spec: PartSpec) -> None:
        self._script.hand_on(spec)

    def end(self, part: str) -> None:
        self._script.end(part)

    def forget(self, part: str) -> None:
        self._script.on_forget(part)


class ScriptedDeployment(RunningDeployment):
    """Note the lives that start."""

    def __init__(
        self, config: Config, on_start: Callable[[ScriptedDeployment, PartSpec], None], left: LeftParts | None = None
    ) -> None:
        self.asked = config  # the settings, for the next reload
        specs = specs_of(config) if left is None else left.record.specs
        self.host = ScriptedHost(self)
        super().__init__(config, specs, Reloading(config, lambda: self.asked), self.host, left=left)
        self.started: list[PartSpec] = []
        self.told: list[PartSpec] = []  # with new settings
        self.on_forget: Callable[[str], None] = lambda _: None
        self.runs: Callable[[PartSpec], bool] = lambda _: True  # whether a life loads all and runs
        self._on_start = on_start

    @property
    def pauses_s(self) -> list[float]:
        return self.host.events.pauses_s

    def on_pause(self, act: Callable[[], None] | None) -> None:
        self.host.events.on_pause = act

    def start(self, spec: PartSpec) -> None:
        self.started.append(spec)
        self.keeper.hear(PartBegan(spec.name, spec.incarnation))
        if self.runs(spec):
            self.sign(Sign(spec.name, spec.incarnation, Stage.RUNS))
        self._on_start(self, spec)

    def sign(self, sign: Sign) -> None:
        self.host.events.put(sign)

    def order(self, order: HeardOrder) -> None:
        self.host.events.put(order)

    def die(self, spec: PartSpec, failure: str = "") -> None:
        self.host.events.ended(spec, "a fault", failure)

    def hand_on(self, spec: PartSpec) -> None:
        self.told.append(spec)

    def ask_to_stop(self, parts: Collection[str]) -> None:
        for part in parts:
            self.end(part)

    def end(self, part: str) -> None:
        self.host.events.ended(self.spec(part), "a kill")

    def spec(self, part: str) -> PartSpec:
        found = self.keeper.part(part)
        assert found is not None
        return found.spec

    def there(self) -> set[str]:
        return {part.spec.name for part in self.keeper.parts()}

    def lives(self, part: str) -> list[int]:
        return [spec.incarnation for spec in self.started if spec.name == part]
