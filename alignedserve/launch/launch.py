"""Start a deployment and keep it alive until it is told to stop.

plan.py says which parts there are, and a Keeper (keeper.py) keeps them: as processes of this machine (local.py), or
with `launcher: ray` as actors (ray_actors.py) of a Ray of its own, or on the nodes of a cluster (cluster.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from alignedserve.architectures.model_source import without_revision
from alignedserve.config.choices import DeviceKind, Launcher
from alignedserve.config.config import Config
from alignedserve.errors import ConfigError
from alignedserve.gateway.access.exposure import check_exposure, warnings
from alignedserve.kvpool.arena.shared_files import remove_ended
from alignedserve.launch.keeper import say
from alignedserve.launch.local import ForkServers, OnThisMachine, fork_servers
from alignedserve.launch.plan import LaunchMachine, check_open_files, plan
from alignedserve.launch.reloading import Reloading
from alignedserve.shell.inboxes import PREFIX, remove_sockets
from alignedserve.shell.listener import bind
from alignedserve.sizing.accelerator import choose, decide
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
    # Clients know one port. This process keeps it bound, so that no other program gets it while a gateway starts again.
    with bind(config.server.host, config.server.port) as web, fork_servers(is_local) as servers:
        config = replace(config, server=replace(config.server, port=web.getsockname()[1]))
        config, about_demo = with_model(config)
        for warning in (*warnings(config.server), dummy_warning(config), about_demo):
            if warning is not None:
                _warn(warning)
        if config.ray.address is not None:
            from alignedserve.launch.cluster import serve_on_cluster

            return serve_on_cluster(config, reloading)
        return _serve_here(config, servers, reloading)


def _warn(warning: str) -> None:
    print(f"alignedserve: warning: {warning}", file=sys.stderr, flush=True)


def _serve_here(config: Config, servers: ForkServers, reloading: Reloading) -> int:
    config, choice = decide(asked := config)
    if choice.is_fallback:
        _warn(f"workers compute on the CPU: {choice.why}; engine.device cpu says that this is wanted")
    elif asked.engine.device is DeviceKind.CUDA and (found := choose()).device is DeviceKind.CPU:
        raise ConfigError(f"engine.device cuda needs a GPU that torch sees: {found.why}; set it to auto or cpu")
    elif config.engine.device is not asked.engine.device and config.engine.on_gpu:
        say(f"workers compute on GPUs: {choice.why}")
    # A model that is named by a hub id is looked up once, here, so that all parts use the same folder.
    named = config.served_model_name or without_revision(config.model)
    folder = model_folder(config)
    jobs = check_storage(config.jobs, named, config.server.port)
    config = replace(config, model=str(folder), served_model_name=named, jobs=jobs)
    with closing(LaunchMachine(config.engine.tensor_parallel_size)) as machine:
        specs = plan(config, machine)
        try:
            if config.launcher is Launcher.RAY:
                from alignedserve.launch.ray_actors import serve_on_ray

                return serve_on_ray(config, specs, reloading, machine)
            return OnThisMachine(config, specs, reloading, machine, servers).run()
        finally:
            remove_ended(Path(config.kvpool.directory), PREFIX, specs[0].deployment)
            remove_sockets(specs[0].deployment)
