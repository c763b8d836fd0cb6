"""The gateway as a process: HTTP on its event loop, the owner of its requests in a thread beside."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import Any, cast

import uvicorn
import uvloop
from fastapi import FastAPI

from alignedserve.commands import Command, Deliver, Reject, Show
from alignedserve.config import JobsConfig, ServerConfig
from alignedserve.core import Request, Role
from alignedserve.errors import CastOut
from alignedserve.events import Closed, Event, Opened
from alignedserve.exposure import tls_context
from alignedserve.gateway.app import GatewaySettings, make_app
from alignedserve.gateway.arrivals import Arrivals
from alignedserve.gateway.batches import BatchRoutes
from alignedserve.gateway.connections import Connection, make_room
from alignedserve.gateway.errors import draining
from alignedserve.gateway.files import FileRoutes, Route
from alignedserve.gateway.ledger import Ledger
from alignedserve.gateway.listener import bind
from alignedserve.gateway.owner_client import Delivered, GivenUp, Overloaded
from alignedserve.gateway.siblings import Siblings
from alignedserve.gateway.sketches import Sketcher, sketcher
from alignedserve.gateway.text import TextModel
from alignedserve.keys import key_ring
from alignedserve.messages import Figures, Member
from alignedserve.owner import OwnerCore
from alignedserve.parts import CAST_OUT, OnStart, Part
from alignedserve.shell import NoHands, Shell
from alignedserve.store.opening import Lazily, is_on

log = logging.getLogger("alignedserve.gateway")

CUT_OFF_S = 1.0  # for the clients that are cut off to be told
DRAIN_LOOK_S = 0.05  # between two looks at whether the last request has ended
_MIB = 1 << 20
_BROKEN = 1


class Owner(NoHands):
    """The owner's core on a shell of its own; implements `OwnerClient` for the event loop."""

    def __init__(self, part: Part, sketcher: Sketcher) -> None:
        needed = {Role.ROUTER, Role.DECODE}
        if not part.config.topology.colocated:
            needed |= {Role.PREFILL, Role.POOL}
        self.name = part.spec.name
        self._part, self._sketcher = part, sketcher
        self._core = OwnerCore(frozenset(needed))
        self._shell: Shell = part.shell(self._core, self)
        self._arrivals: Arrivals[Deliver | Reject | None] = Arrivals()  # None: cut off
        self.on_figures: Callable[[Figures], None] = lambda _: None  # in the owner's thread
        self._thread = threading.Thread(target=self._run, name="owner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._shell.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._part.run(self._shell)
        except BaseException as error:
            if isinstance(error, CastOut):
                log.error("%s", error)
                os._exit(CAST_OUT)
            log.exception("the owner of the requests broke")
            os._exit(_BROKEN)  # without it no request would ever end; the launcher starts another gateway

    @property
    def ready(self) -> bool:
        return self._core.ready

    @property
    def members(self) -> tuple[Member, ...]:
        others = (member for member in self._core.members if member.name != self.name)
        return (*others, self._part.member)

    @property
    def num_open(self) -> int:
        return self._core.num_open

    def now(self) -> float:
        return self._part.clock.now()

    async def open(self, request: Request) -> AsyncGenerator[Delivered, None]:
        sketch = await asyncio.to_thread(self._sketcher, request.prompt)
        ended = False
        with self._arrivals.of(request.id) as arrivals:
            self._shell.post(Opened(request, sketch))
            try:
                while not ended:
                    arrived = await arrivals.get()
                    if arrived is None:
                        raise draining()
                    ended = isinstance(arrived, Reject) or arrived.finish is not None
                    if isinstance(arrived, Reject):
                        kind = GivenUp if arrived.is_given_up else Overloaded
                        raise kind(arrived.why, arrived.retry_after_s)
                    scores = arrived.logprobs, arrived.prompt_logprobs
                    yield Delivered(arrived.tokens, arrived.finish, *scores, arrived.num_cached)
            finally:
                if not ended:
                    self._shell.post(Closed(request.id))

    def cut_off(self) -> None:
        """End every stream with an error; on the event loop."""
        self._arrivals.put_to_all(None)

    # What the shell asks of it, in the owner's thread.

    def perform(self, command: Command) -> Event | None:
        if isinstance(command, Show):
            self.on_figures(command.figures)
            return None
        assert isinstance(command, Deliver | Reject), f"an owner cannot perform {command}"
        self._arrivals.put(command.request, command)
        return None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the part's to handle: it drains before it stops


def server_of(settings: uvicorn.Config) -> uvicorn.Server:
    return _Server(settings)


def http_settings(app: FastAPI, server: ServerConfig) -> uvicorn.Config:
    most_connections = make_room(server.max_connections)
    settings = uvicorn.Config(
        app,
        http=cast(Any, partial(Connection, most_connections=most_connections)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    settings.load()
    settings.ssl = tls_context(server)
    return settings


class Gateway:
    """Can be stopped: open requests go on for `drain_s`, new ones are refused."""

    def __init__(
        self, app: FastAPI, owner: Owner, listener: socket.socket, siblings: Siblings, server: ServerConfig
    ) -> None:
        self._app, self._owner, self._drain_s = app, owner, server.drain_s
        self._listener, self._siblings = listener, siblings
        self._server = server_of(http_settings(app, server))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._told_to_stop = False

    def stop(self) -> None:
        self._told_to_stop = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._stopping.set)

    def run(self) -> None:
        uvloop.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._told_to_stop:
            self._stopping.set()
        await self._siblings.listen()
        drain = asyncio.create_task(self._drain())
        await self._server.serve(sockets=[self._listener])
        drain.cancel()

    async def _drain(self) -> None:
        await self._stopping.wait()
        self._app.state.draining = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._last_request(), self._drain_s)
        if self._owner.num_open:
            log.warning("%d requests did not end within %.1f s and are cut off", self._owner.num_open, self._drain_s)
            self._owner.cut_off()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._last_request(), CUT_OFF_S)
        self._server.should_exit = True

    async def _last_request(self) -> None:
        while self._owner.num_open:
            await asyncio.sleep(DRAIN_LOOK_S)


def _of_jobs(config: JobsConfig) -> tuple[Route, ...]:
    if not is_on(config):
        return ()
    keeping = Lazily(config)
    return (*FileRoutes(keeping, config).routes, *BatchRoutes(keeping, config).routes)


def _ledger(part: Part) -> Ledger:
    """Of the deployment: its limits hold over all of its gateways."""
    return Ledger(part.shared_memory / f"{part.spec.deployment}-limits", int(part.spec.name.rpartition("-")[2]))


def _siblings(part: Part, series: Callable[[], bytes]) -> Siblings:
    names = [f"gateway-{number}" for number in range(part.config.server.gateways)]
    return Siblings(part.spec.deployment, part.spec.name, [name for name in names if name != part.spec.name], series)


def run(part: Part, on_start: OnStart) -> None:
    server = part.config.server
    listener = bind(server.host, server.port, shared=server.gateways > 1)
    _, capacity = part.capacity()
    text = TextModel.load(part.folder)
    owner = Owner(part, sketcher(part.config.policy.predictor, text))
    name = part.config.served_model_name or part.config.model
    settings = GatewaySettings(
        served_model_names=(name,),
        max_model_len=capacity.max_model_len,
        keys=key_ring(server.api_key, server.keys_file, server.most_open_per_key),
        cors_origins=tuple(filter(None, (one.strip() for one in (server.cors_origins or "").split(",")))),
        body_limit_bytes=server.body_limit_mb * _MIB,
        slo=part.config.slo,
    )
    app = make_app(owner, text, settings, _ledger(part), _of_jobs(part.config.jobs))
    owner.on_figures = app.state.metrics.told
    siblings = _siblings(part, app.state.metrics.series)
    app.state.series = siblings.series
    gateway = Gateway(app, owner, listener, siblings, server)
    on_start(gateway)
    owner.start()
    try:
        gateway.run()
    finally:
        owner.stop()
