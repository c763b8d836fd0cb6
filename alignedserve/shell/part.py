"""A part of a deployment: what it is told when it starts, where it works, and its links.

launch/start.py starts the part of a role in a process of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec

from alignedserve.architectures.families.model_config import ModelConfig, read_config
from alignedserve.config.config import Config, parse, without_secrets
from alignedserve.core import OWNERS, Role
from alignedserve.locks import NotPrivate
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import AtWork, Event
from alignedserve.protocol.messages import ROUTER, Heartbeat, Life, Member, rank_suffix
from alignedserve.protocol.wire import MOST_FRAME_BYTES
from alignedserve.scheduling.policy import Policy
from alignedserve.shell.clock import Clock, ClockOrigin
from alignedserve.shell.link_keys import LinkKeys
from alignedserve.shell.links import Links, Pulse, inbox, remove_sockets
from alignedserve.shell.loop_watch import LoopWatch
from alignedserve.shell.shell import BeginAside, Shell
from alignedserve.shell.turn import Core, Hands
from alignedserve.shell.work_note import WorkNote, note_of
from alignedserve.signs import NO_SIGNS, Signs, Stage
from alignedserve.sizing.capacity import Capacity, capacity
from alignedserve.sizing.model_folder import model_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EmbedSide:
    """The deployment of the embedding model, beside that of the served one, as its owners of requests need it."""

    deployment: str
    router: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class PartSpec:
    """Everything that a part needs to know to start."""

    role: Role
    name: str
    node: str  # empty: the node that starts the part fills in this field and `host`
    deployment: str  # the names of all files in shared memory begin with it
    host: str  # where transports listen, and inboxes that are not private
    router: str  # the router's address
    config: Mapping[str, Any]  # as `alignedserve.config.config.dump` made it
    origin: ClockOrigin  # the same for all parts
    # The keeper fills in these as the part starts.
    incarnation: int = 0  # number of this life of the part, from 1
    keys: LinkKeys | None = None
    lives: tuple[Life, ...] = ()  # for the router: the newest life of each part
    signs_at: str = ""  # address of the launcher, for signs of life
    rank: int = 0  # tensor parallelism: each rank is a part; other parts talk to rank 0 only
    device: int = 0  # number of the GPU, where there are any
    door: str = ""  # address of the launcher, for parts that ask for more or fewer workers (control.py)
    outlive_s: float = 0.0  # how long the part goes on without a launcher (launch/succession.py)
    replaces: str = ""  # the part that ends when this one runs; a gateway takes its connections over
    lends: bool = False  # whether this prefill worker decodes too: to other parts it is a decode worker
    embed: EmbedSide | None = None  # of an owner of requests: it is a member there, too
    of_embed: bool = False  # whether this part is of the embedding model
    weights: str = ""  # what they were when the deployment started (weights_mark); empty: they are random, or not known
    is_private: bool = False  # whether inboxes are sockets that only this user can open (links.py), and no ports

    @property
    def member(self) -> str:
        """Return the name that other parts know: each router is the only one that its members know."""
        return ROUTER if self.role is Role.ROUTER else self.name

    def on_side(self, side: EmbedSide) -> PartSpec:
        """Return the spec of this owner of requests as a member of that deployment."""
        return replace(
            self, deployment=side.deployment, router=side.router, config=side.config, embed=None, of_embed=True
        )

    @property
    def acts_as(self) -> Role:
        """Return the role that other parts see, and whose core runs here."""
        return Role.DECODE if self.lends else self.role

    @property
    def worker(self) -> str:
        """Return the name of this worker's rank 0."""
        return self.name.removesuffix(rank_suffix(self.rank))

    @property
    def inbox(self) -> str:
        """Return the address at which this life of the part listens."""
        if self.role is Role.ROUTER:
            return self.router
        return inbox(self.deployment, self.name, self.incarnation) if self.is_private else f"tcp://{self.host}:*"

    def to_json(self) -> str:
        """Return the spec as the part gets it, on Ray by way of Ray's database: with secrets only for parts that use
        them, which are gateways and the job runner."""
        spec = self if self.role in OWNERS else replace(self, config=without_secrets(self.config))
        return msgspec.json.encode(spec).decode()

    @classmethod
    def from_json(cls, text: str) -> PartSpec:
        return msgspec.json.decode(text, type=cls)


def lock_name(deployment: str, holder: str, rank: int = 0) -> str:
    """Return the name of a rank's lock: each rank writes to its own pages, so each has its own lock."""
    return f"{deployment}-{holder}{rank_suffix(rank)}"


class LiveSettings:
    """Settings that change while a part runs. Who uses them is called with each new configuration."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: list[Callable[[Config], None]] = []
        self._newest: Config | None = None

    def on_change(self, take: Callable[[Config], None]) -> None:
        """Call `take` with each new configuration, and with one that has come already. Any thread may do so."""
        with self._lock:
            self._users.append(take)
            if self._newest is not None:
                take(self._newest)

    def change(self, config: Config) -> None:
        with self._lock:
            self._newest = config
            for take in self._users:
                take(config)


class Place:
    """The place of a part: its files, keys and settings, as its spec says; `live` tells of settings that change."""

    def __init__(self, spec: PartSpec, signs: Signs = NO_SIGNS, live: LiveSettings | None = None) -> None:
        self.spec, self.signs = spec, signs
        self.live = live or LiveSettings()
        self.config: Config = parse(spec.config)
        self.incarnation = spec.incarnation
        self.watch = LoopWatch(self.config.launch.still_s, signs.advance)

    @property
    def shared_memory(self) -> Path:
        return Path(self.config.kvpool.directory)

    def arena_path(self, rank: int = 0) -> Path:
        return self.shared_memory / f"{self.spec.deployment}-{self.spec.node}{rank_suffix(rank)}"

    @cached_property
    def policy(self) -> Policy:
        return self.config.policy

    @property
    def folder(self) -> Path:
        return model_folder(self.config)

    def capacity(self) -> tuple[ModelConfig, Capacity]:
        model = read_config(self.folder)
        return model, capacity(self.config, model)


class Part(Place):
    """A part that is set up: its inbox listens already, and `run` makes it a member of the deployment."""

    def __init__(self, spec: PartSpec, signs: Signs = NO_SIGNS, live: LiveSettings | None = None) -> None:
        super().__init__(spec, signs, live)
        assert spec.keys is not None, f"{spec.name} has no keys for its links"
        self._keys = spec.keys
        self.clock = Clock(spec.origin)
        if spec.is_private:
            remove_sockets(spec.deployment, f"{spec.name}.")  # of its earlier lives
        self.links = Links(spec.member, self.incarnation, spec.inbox, spec.router, MOST_FRAME_BYTES, self._keys)
        self.member = Member(
            spec.member, spec.acts_as, spec.node, self.incarnation, self.links.address, lends=spec.lends
        )

    @cached_property
    def at_work(self) -> AtWork:
        """Return the note of what the core is working on. An owner that ends leaves no request that could go on."""
        if self.spec.role in OWNERS:
            return AtWork()
        try:
            return WorkNote(note_of(self.shared_memory, self.spec.deployment, self.spec.name))
        except (OSError, NotPrivate) as error:
            log.warning("a request that kills this process would not be found out: %s", error)
            return AtWork()

    def shell(
        self,
        core: Core,
        hands: Hands | None = None,
        begin_aside: BeginAside | None = None,
        give_up_on: Callable[[Event], list[Command] | None] = lambda _: None,
    ) -> Shell:
        return Shell(core, self.links, self.clock, hands, begin_aside, self.spec.lives, give_up_on, self.at_work)

    def run(
        self,
        shell: Shell,
        first: list[Command] | None = None,
        late_s: Callable[[], float] = lambda: 0.0,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run the shell until it is stopped. `late_s` is asked before each heartbeat, in the thread that sends it;
        while `is_busy`, the shell may stand still."""
        pulse = None
        if self.spec.role is not Role.ROUTER:
            beat = Heartbeat(self.member)
            said_by = self.member.name, self.incarnation
            to, interval_s = self.spec.router, self.config.wire.heartbeat_s
            pulse = Pulse(*said_by, beat, to, interval_s, self._keys, lambda _: replace(beat, late_s=late_s()))
        self.signs.stage(Stage.RUNS)
        try:
            with self.watch.over("turn loop", shell.wake, is_busy) as turns:
                shell.run(first or [], turns)
        finally:
            self.watch.end()
            if pulse is not None:
                pulse.stop()
            self.links.close()


class Stoppable(Protocol):
    def stop(self) -> None:
        """Stop the part. Any thread may call this, also before the part runs."""


OnStart = Callable[[Stoppable], None]  # receives the part before it runs, to stop it later
