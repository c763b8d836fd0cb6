"""Run the gateway as a process: HTTP on an event loop, and the owner of its requests in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from alignedserve.architectures.vectors import read_pooled
from alignedserve.config.config import Config
from alignedserve.config.prices import Prices
from alignedserve.config.sections import ServerConfig
from alignedserve.core import Role, Slo
from alignedserve.cost.promising import slowest
from alignedserve.dashboard.sharing import RequestPictures, request_pictures
from alignedserve.errors import ConfigError
from alignedserve.gateway.access.adapters import Adapters
from alignedserve.gateway.access.budgets import Budgets, budgets_of
from alignedserve.gateway.access.exposure import Certificate, is_loopback
from alignedserve.gateway.access.keys import KeysFile
from alignedserve.gateway.access.ledger import Ledger, ledger_name
from alignedserve.gateway.app import make_app
from alignedserve.gateway.batches import BatchRoutes
from alignedserve.gateway.dashboard import Dashboard, OpenJobs
from alignedserve.gateway.embed_side import embedding_model
from alignedserve.gateway.files import FileRoutes, HttpRoute
from alignedserve.gateway.http.connections import GatewayConnection, raise_file_limit
from alignedserve.gateway.http.handover import Handover, handed_on
from alignedserve.gateway.http.middleware import MOST_CONNECTIONS
from alignedserve.gateway.responses.keeping import ResponseKeeper
from alignedserve.gateway.settings import GatewaySettings, body_limit_bytes
from alignedserve.owner.shell import Halt, Owner
from alignedserve.owner.siblings import Siblings, siblings
from alignedserve.protocol.messages import Figures
from alignedserve.shell.event_loop import run_loop
from alignedserve.shell.listener import ask_for, bind, port_name
from alignedserve.shell.loop_watch import LoopWatch
from alignedserve.shell.part import OnStart, Part
from alignedserve.sizing.capacity import Capacity
from alignedserve.store.storage import LazyStorage, holder_of, is_on
from alignedserve.text.text_model import TextModel
from alignedserve.tracing.traces import traces_to

log = logging.getLogger("alignedserve.gateway")

CUT_OFF_S = 1.0  # time for the answers that tell clients that they are cut off
DRAIN_LOOK_S = 0.05  # between two checks whether the last request has ended
READY_LOOK_S = 0.02  # between two checks whether requests can be served
MOST_UNREADY_S = 10.0  # that a gateway beside others takes no connection, because it could not serve
LOOK_S = 1.0  # between looks at the keys file and the certificate
_MANY_OBJECTS = 20_000  # more than Python's own threshold: then it looks for cycles of garbage
_SWITCH_S = 0.0005  # that a thread keeps Python's lock while another waits for it: a tenth of Python's own


class HttpServer(uvicorn.Server):
    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, with settings of Python for many open streams.

        A token makes some dozens of objects, which die with it. With Python's own threshold a look for cycles of
        garbage comes every few tokens, and with many open streams those looks took a tenth of the gateway's time.

        The event loop gives Python's lock away with each read and write. With Python's own setting a thread that works
        on a large body, or on a kept response, has it for 5 ms, several times before a chat's first token.
        """
        gc.freeze()
        gc.set_threshold(_MANY_OBJECTS, *gc.get_threshold()[1:])
        sys.setswitchinterval(_SWITCH_S)
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the part handles signals itself: it drains before it stops


def http_settings(app: FastAPI, certificate: Certificate | None) -> uvicorn.Config:
    app.state.calls.most = most_connections = raise_file_limit(MOST_CONNECTIONS)
    settings = uvicorn.Config(
        app,
        http=cast(Any, partial(GatewayConnection, most_connections=most_connections)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    settings.load()
    settings.ssl = None if certificate is None else certificate.context
    return settings


class Gateway:
    """The gateway's HTTP server. A stopped gateway refuses new requests and lets open requests run for `drain_s`."""

    def __init__(
        self,
        app: FastAPI,
        owners: Sequence[Owner],
        listener: socket.socket,
        siblings: Siblings,
        pictures: RequestPictures,
        server: ServerConfig,
        keys_file: KeysFile,
        budgets: Budgets,
        handover: Handover,
    ) -> None:
        self._app, self._owners, self._drain_s, self._keys_file = app, owners, server.drain_s, keys_file
        self._listener, self._siblings, self._pictures = listener, siblings, pictures
        self._handover = handover
        cert, self._budgets = server.tls_cert, budgets
        self._certificate = None if cert is None else Certificate(cert, server.tls_key or cert)
        self._server = HttpServer(http_settings(app, self._certificate))
        self._dashboard: Dashboard = app.state.dashboard
        self._halt = Halt()

    def stop(self) -> None:
        self._halt.say()

    def reload(self, config: Config) -> None:
        """Take new settings; the keys and the certificate are read at the next look. Any thread may call this."""
        self._drain_s, server = config.server.drain_s, config.server
        self._keys_file.follow(config)
        if self._certificate is not None and server.tls_cert is not None:
            self._certificate.follow(server.tls_cert, server.tls_key or server.tls_cert)

    def run(self, watch: LoopWatch) -> None:
        run_loop(self._serve(), watch)

    async def _serve(self) -> None:
        followed = [_follow(self._keys_file.read, "the keys are", self._app.state.end_revoked)]
        if self._certificate is not None:
            followed.append(_follow(self._certificate.read, "the certificate is"))
        with self._handover.offered():
            async with self._siblings.listening(), self._pictures.listening(), self._budgets.kept():
                beside = [asyncio.create_task(each) for each in (self._drain(), *followed)]
                self._dashboard.begin()
                await self._wait_for_workers()
                await self._server.serve(sockets=[self._listener])
                for task in beside:
                    task.cancel()

    async def _wait_for_workers(self) -> None:
        """Leave connections to the other gateways at this port until this one knows workers, or is to stop. If none is
        known for long, the gateway listens, and answers why requests are refused."""
        ends_at = time.monotonic() + MOST_UNREADY_S
        while self._handover.has_others and not (self._owners[0].ready or self._app.state.draining):
            if time.monotonic() >= ends_at:
                return
            await asyncio.sleep(READY_LOOK_S)

    async def _drain(self) -> None:
        await self._halt.wait()
        if self._handover.is_done:
            self._leave_connections()
        else:
            self._app.state.draining = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wait_until_idle(), self._drain_s)
        if self._num_open:
            log.warning("%d requests did not end within %.1f s and are cut off", self._num_open, self._drain_s)
            for owner in self._owners:
                owner.cut_off()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wait_until_idle(), CUT_OFF_S)
        self._dashboard.end()
        self._server.should_exit = True

    @property
    def _num_open(self) -> int:
        return sum(owner.num_open for owner in self._owners)

    def _leave_connections(self) -> None:
        """Leave new connections to the gateway that replaces this one, and end each that there is with its next answer.
        One that is idle ends after a time, as always."""
        for server in getattr(self._server, "servers", ()):  # it may not listen yet
            server.close()
        state, closes = self._server.server_state, (b"connection", b"close")
        self._server.config.encoded_headers.append(closes)  # from the next second on
        state.default_headers = [*state.default_headers, closes]
        self._dashboard.end()

    async def _wait_until_idle(self) -> None:
        while self._num_open or (self._handover.is_done and self._server.server_state.connections):
            await asyncio.sleep(DRAIN_LOOK_S)


async def _follow(read: Callable[[], object], what_is: str, then: Callable[[], object] = lambda: None) -> None:
    """Read what a file has now and then: what it says counts from then on, such as that a key is refused. Call `then`
    behind each look."""
    fault = ""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            await asyncio.to_thread(read)
            then()
            fault = ""
        except ConfigError as error:
            if str(error) != fault:
                log.error("%s as before, since the file cannot be read again: %s", what_is, error)
            fault = str(error)


def _listed(origins: str | None) -> tuple[str, ...] | None:
    return None if origins is None else tuple(filter(None, map(str.strip, origins.split(","))))


def _settings_of(part: Part, keys_file: KeysFile, capacity: Capacity) -> GatewaySettings:
    server = part.config.server
    return GatewaySettings(
        served_model_names=part.config.model_names,
        max_model_len=capacity.max_model_len,
        keys=keys_file.ring,
        is_exposed=not is_loopback(server.host),
        cors_origins=_listed(server.cors_origins),
        names=(server.host, socket.gethostname()),
        metrics_prefix=server.metrics_prefix,
        body_limit_bytes=body_limit_bytes(part.config),
        slo=part.config.slo,
        prices=Prices.from_config(part.config),
        at_once=max(1, capacity.limits.max_batch // 2),
        scale={role.value: str(num_workers) for role, num_workers in part.config.scale.ranges.items()},
    )


def run(part: Part, on_start: OnStart) -> None:
    server, jobs, spec = part.config.server, part.config.jobs, part.spec
    # On a machine without the launcher it binds one itself.
    listener = handed_on(spec) or ask_for(port_name(server.port)) or bind(server.host, server.port, server.gateways > 1)
    model, capacity = part.capacity()
    text = TextModel.load(part.folder, part.config.reasoning_parser, part.config.tool_call_parser)
    text = replace(text, pooled=read_pooled(part.folder, model))
    if text.template is not None:
        _ = text.template.tokenizer  # made now: no chat is to wait for it
    if text.reasoning is not None:
        log.info("answers come without their reasoning, which is read as that of %s", text.reasoning.name)
    owner = Owner(part)
    keys_file = KeysFile(server.api_key, server.keys_file)
    name = part.config.model_names[0]
    settings = _settings_of(part, keys_file, capacity)
    traces = traces_to(server.otlp_endpoint, name)
    holder = holder_of(spec.deployment, spec.name, part.incarnation, name, settings.keys.digest)
    storage = LazyStorage(jobs, holder) if is_on(jobs) else None
    runner_away_s = partial(owner.away_s, Role.JOBS)
    routes: list[HttpRoute] = []
    if storage is not None:
        routes += FileRoutes(storage, jobs).routes
        routes += BatchRoutes(storage, jobs, runner_away_s, settings.prices).routes
    # A caller's limits hold over all gateways together.
    limits = part.shared_memory / ledger_name(spec.deployment)
    ledger = Ledger(limits, int(spec.name.rpartition("-")[2]), budgets_of(jobs))
    keeper = ResponseKeeper(storage, jobs, runner_away_s)

    def hear_embed(figures: Figures, model: str) -> None:
        app.state.parts.update(figures, model)
        dashboard.hear(replace(figures, rt=None, be=None))  # the page's queues are those of chats

    embed = embedding_model(part, hear_embed)
    of_app = ledger, routes, traces, keeper, Adapters.for_part(part), embed and embed[0]
    app = make_app(owner, text, settings, *of_app)
    dashboard: Dashboard = app.state.dashboard
    if storage is not None:
        dashboard.jobs = OpenJobs(storage, owner.now)

    promises: dict[str, Slo] = {}  # worker -> what it can keep

    def hear(figures: Figures) -> None:
        app.state.parts.update(figures)
        dashboard.hear(figures)
        if figures.promise is not None:
            promises[figures.member] = figures.promise
            there = {member.name for member in owner.members} | {figures.member}
            settings.machine = slowest(slo for worker, slo in promises.items() if worker in there)

    owner.on_figures = hear
    others = siblings(part, lambda _: app.state.metrics.text())
    app.state.scrapes.owners = others.ask_all
    pictures = request_pictures(part, app.state.metrics.log, owner.now)
    dashboard.all_requests = pictures.of_all
    handover = Handover(spec, listener, has_others=server.gateways > 1 or bool(spec.replaces))
    owners = [owner, *([] if embed is None else [embed[1]])]
    gateway = Gateway(app, owners, listener, others, pictures, server, keys_file, ledger.budgets, handover)
    on_start(gateway)
    for each in (settings, gateway):
        part.live.on_change(each.reload)
    with closing(traces), contextlib.ExitStack() as running:
        for each in owners:
            running.enter_context(each.running())
        gateway.run(part.watch)
