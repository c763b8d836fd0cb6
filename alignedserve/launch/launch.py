"""Start a deployment and keep it alive until it is told to stop.

plan.py says which parts there are, and deployment.py keeps them: as processes of this machine (processes.py), or with
`launcher: ray` as actors (actors.py) of a Ray of its own, or on the nodes of a cluster (cluster.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from socket import socket

from alignedserve.architectures.model_source import name_of
from alignedserve.config.choices import DeviceKind, Launcher, ModelNames
from alignedserve.config.config import Config, parse
from alignedserve.core import Role
from alignedserve.errors import ConfigError, ModelError
from alignedserve.gateway.access.exposure import check_exposure, warnings
from alignedserve.launch.deployment import RunningDeployment
from alignedserve.launch.host import say
from alignedserve.launch.orders import Reloading
from alignedserve.launch.plan import check_open_files, other_weights, plan
from alignedserve.launch.processes import ForkServers, ProcessHost, fork_servers
from alignedserve.launch.succession import (
    OUTLIVE_S,
    LeftParts,
    RecordFile,
    asks_the_same,
    may_outlive,
    with_settings_of,
)
from alignedserve.machine.shared_files import remove_ended
from alignedserve.protocol.wire import VERSION
from alignedserve.shell.links import PREFIX, remove_sockets
from alignedserve.shell.listener import ask_for, bind, handover_name, offered
from alignedserve.shell.part import PartSpec
from alignedserve.sizing.accelerator import choose, decide
from alignedserve.sizing.claims import Claim
from alignedserve.sizing.model_folder import dummy_warning, model_folder, with_model
from alignedserve.store.storage import check_storage
from alignedserve.tracing.traces import check_collector


def serve(config: Config, read: Callable[[], Config]) -> int:
    """Serve until stopped, and return the exit code; `read` returns the configuration as it is asked for later."""
    reloading = Reloading(config, read)
    check_open_files(config)
    config = check_exposure(config)
    check_collector(config.server.otlp_endpoint)
    is_local = config.launcher is Launcher.LOCAL and config.ray.address is None
    record = RecordFile(config.server.port if is_local and may_outlive() else 0)
    left = _left(record, reloading)
    # Clients know one port. This process keeps it bound, so that no other program gets it while a gateway starts again.
    with _port(config, left) as web, fork_servers(is_local) as servers, offered(web):
        if left is not None:
            return _go_on(left, servers, reloading, record)
        config = replace(config, server=replace(config.server, port=web.getsockname()[1]))
        config, about_demo = with_model(config)
        for warning in (*warnings(config.server), dummy_warning(config), about_demo):
            if warning is not None:
                say(f"warning: {warning}")
        if config.ray.address is not None:
            from alignedserve.launch.cluster import serve_on_cluster

            return serve_on_cluster(config, reloading)
        return _serve_here(config, servers, reloading, record)


def _port(config: Config, left: LeftParts | None) -> socket:
    """Return the socket of the port: where a gateway goes on that another launcher has left, the one that it has."""
    gateways = [] if left is None else [spec for spec in left.record.specs if spec.name in left.processes]
    for spec in gateways:
        if spec.role is Role.GATEWAY and (web := ask_for(handover_name(spec.deployment, spec.name))) is not None:
            return web
    return bind(config.server.host, config.server.port)


def _left(record: RecordFile, reloading: Reloading) -> LeftParts | None:
    """Return what a launcher that was killed has left at this port, if it was asked for the same and the model's folder
    has the same weights; else end it."""
    found, others = record.read(), "other settings"
    if found is not None and found.version == VERSION and asks_the_same(found.asked, asked := reloading.asked):
        others = ""
        with suppress(ModelError):  # parts that run need no folder
            others = "other weights" if other_weights(found.specs) else ""
    if found is not None and not others:
        claimed = record.claim()
        left = LeftParts.taken_over(claimed) if claimed is not None else None
        if left is None or not left.processes:
            return None
        if found.asked == asked:
            return left
        return replace(left, record=with_settings_of(left.record, asked), is_other_version=True)
    if num_ended := record.end_left():
        say(f"a launcher that was killed had left {num_ended} processes with {others}: they are ended")
    return None


def _go_on(left: LeftParts, servers: ForkServers, reloading: Reloading, record: RecordFile) -> int:
    specs = left.record.specs
    config = parse(specs[0].config)
    say(f"it goes on with what a launcher that was killed has left: {', '.join(left.processes)}")
    directory, deployments = Path(config.kvpool.directory), dict.fromkeys(spec.deployment for spec in specs)
    claims = [Claim.join(directory, deployment, as_worker=False) for deployment in deployments]
    with _kept_clean(config, specs, record, claims):
        host = ProcessHost(servers, left)
        return RunningDeployment(config, specs, reloading, host, record=record, left=left).run()


@contextmanager
def _kept_clean(
    config: Config, specs: Sequence[PartSpec], record: RecordFile, claims: Sequence[Claim | None]
) -> Iterator[None]:
    """Leave nothing of the deployment when it ends."""
    try:
        yield
    finally:
        record.remove()
        for claim in claims:
            if claim is not None:
                claim.close()
        remove_ended(Path(config.kvpool.directory), PREFIX, specs[0].deployment)
        remove_sockets(specs[0].deployment)


def _serve_here(config: Config, servers: ForkServers, reloading: Reloading, record: RecordFile) -> int:
    config, choice = decide(asked := config)
    if choice.is_fallback:
        say(f"warning: workers compute on the CPU: {choice.why}; engine.device cpu says that this is wanted")
    elif asked.engine.device is DeviceKind.CUDA and (found := choose()).device is DeviceKind.CPU:
        raise ConfigError(f"engine.device cuda needs a GPU that torch sees: {found.why}; set it to auto or cpu")
    elif config.engine.device is not asked.engine.device and config.engine.on_gpu:
        say(f"workers compute on GPUs: {choice.why}")
    # A model that is named by a hub id is looked up once, here, so that all parts use the same folder.
    named = config.served_model_name or ModelNames((name_of(config.model),))
    folder = model_folder(config)
    jobs = check_storage(config.jobs, named.names[0], config.server.port)
    config = replace(config, model=str(folder), served_model_name=named, jobs=jobs)
    outlive_s = OUTLIVE_S if record.is_kept else 0.0
    planned = plan(config)
    config, specs = planned.config, [replace(spec, outlive_s=outlive_s) for spec in planned.specs]
    for line in planned.sizes:
        say(line)
    with _kept_clean(config, specs, record, planned.claims):
        if config.launcher is Launcher.RAY:
            from alignedserve.launch.cluster import serve_on_ray

            return serve_on_ray(config, specs, reloading)
        return RunningDeployment(config, specs, reloading, ProcessHost(servers), record=record).run()
