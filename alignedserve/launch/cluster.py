"""Serve on Ray: on a Ray of its own on this machine, or on a cluster that is there (`ray up`, `ray start`, KubeRay).

On a cluster the launcher runs on the node whose address users know, with the router and the gateway beside it;
placing.py says which parts go where. Links have keys, which travel to the parts with their specs.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.model_source import at_revision_of, name_of
from alignedserve.architectures.vectors import read_pooled
from alignedserve.config.choices import DeviceKind, ModelNames
from alignedserve.config.config import Config
from alignedserve.core import WORKERS, Role
from alignedserve.errors import AlignedServeError, MemoryTooSmall
from alignedserve.launch.actors import Actors
from alignedserve.launch.bounded import BoundedEnd
from alignedserve.launch.deployment import RunningDeployment
from alignedserve.launch.host import say
from alignedserve.launch.nodes import LOOK_S, ClusterNodes
from alignedserve.launch.orders import Reloading
from alignedserve.launch.placing import (
    NAMED,
    ClusterFile,
    ClusterNode,
    Group,
    NoPlace,
    PlacedGroup,
    Placing,
    cluster_file,
)
from alignedserve.launch.plan import needed_files, new_deployment, parts_of, specs_of
from alignedserve.launch.preflight import Asked
from alignedserve.launch.roles import choose
from alignedserve.machine.resources import memory
from alignedserve.protocol.messages import rank_of
from alignedserve.safe_path import ABOVE
from alignedserve.shell.listener import bind
from alignedserve.shell.part import PartSpec
from alignedserve.sizing.capacity import capacity
from alignedserve.sizing.memory import FreeMemory, num_workers
from alignedserve.sizing.model_folder import model_folder
from alignedserve.sizing.sizes import told, with_sizes
from alignedserve.store.storage import check_storage

CONNECT_S = 5.0
STORE_BYTES = 80 << 20  # of Ray's object store, about its smallest size: nothing is put there
LOGS_S = 0.5  # for the last log lines of the parts to come through Ray, which looks for them every 0.1 s

# Variables that Ray reads as it is imported and hands on to its processes.
LINES = {  # for the log lines of parts, which Ray brings to the launcher's output
    "RAY_DEDUP_LOGS": "0",
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",  # our lines name their part
    "RAY_COLOR_PREFIX": "0",
}
SETTINGS = {
    **LINES,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on loopback only: on every system, whatever the name says
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray hides no device from parts that ask it for none
}


def serve_on_cluster(config: Config, reloading: Reloading) -> int:
    """Serve on the nodes of a cluster until stopped, and return the exit code."""
    os.environ.update(LINES)
    ray = import_ray()
    told = cluster_file(config.ray.cluster_file) if config.ray.cluster_file is not None else ClusterFile()
    ending = BoundedEnd(config.server.drain_s)
    _join(ray, config)
    try:
        asked = Asked.of(config, open_files=needed_files(config), release=version("alignedserve"))
        nodes = ClusterNodes(ray, asked, told.types, told.machines, told.least)
        nodes.look()  # before a model is fetched, which may take long
        folder = model_folder(config)
        # All nodes get this config. A model's folder or file has the same path on every node; each node itself fetches
        # a hub id, at the commit that it has now, and makes the folder of a GGUF file.
        model = at_revision_of(config.model, folder)
        named = config.served_model_name or ModelNames((name_of(config.model),))
        jobs = check_storage(config.jobs, named.names[0], config.server.port)
        config = replace(config, model=model, served_model_name=named, jobs=jobs)
        nodes.serve(model, sum(file.stat().st_size for file in folder.glob("*")))
        host = ray.util.get_node_ip_address()
        with bind(host, 0) as router:  # bound as long as this process lives, as in `serve`
            config, placed = _wait_for_nodes(config, nodes, folder)
            config = size_by_nodes(config, nodes.there(), [each.group for each in placed], nodes.least_gpu())
            specs = _plan(config, [each.group for each in placed], host, f"tcp://{host}:{router.getsockname()[1]}")
            groups, homes = [each.group for each in placed], [each.node.id for each in placed]
            actors = Actors(ray, config, specs[0].deployment, groups, nodes=nodes, homes=homes)
            deployment = RunningDeployment(config, specs, reloading, actors, ending=ending)
            deployment.hear_signals()  # also while it waits for room
            with actors.reserved():
                return deployment.run()
    finally:
        ending.begin()
        ray.shutdown()


def serve_on_ray(config: Config, specs: Sequence[PartSpec], reloading: Reloading) -> int:
    """Serve on a Ray of the deployment's own until stopped, and return the exit code."""
    # A key for this deployment only; otherwise Ray shares one key among all and keeps it in the home directory.
    os.environ.update(SETTINGS, RAY_AUTH_TOKEN=secrets.token_hex(32))
    ray = import_ray()
    group = {spec.name: {"CPU": 1.0} for spec in specs}  # the parts of a node share its memory: placed together
    ending = BoundedEnd(config.server.drain_s)
    host = Actors(ray, config, specs[0].deployment, [group])
    deployment = RunningDeployment(config, specs, reloading, host, ending=ending)
    deployment.hear_signals()  # also while Ray starts, which takes seconds
    try:
        ray.init(
            address="local",  # its own, also where another Ray runs
            job_config=job_config(ray),
            num_cpus=len(specs),  # processes that Ray starts at once, for the actors
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            logging_level="warning",
        )
    except Exception as error:  # Ray raises errors of many kinds here
        raise AlignedServeError(f"Ray does not start: {error}") from error
    try:
        with host.reserved():
            return deployment.run()
    finally:
        ending.begin()
        time.sleep(LOGS_S)
        ray.shutdown()


def _join(ray: Any, config: Config) -> None:
    address = config.ray.address
    try:
        if found := re.fullmatch(r"([^:/]+):(\d+)", address or ""):  # or Ray would try for minutes
            socket.create_connection((found[1], int(found[2])), CONNECT_S).close()
        ray.init(address=address, logging_level="warning", namespace="alignedserve", job_config=job_config(ray))
    except Exception as error:  # Ray raises errors of many kinds here
        none = f"there is no Ray cluster at {address} (ray.address), or its token is not ours (RAY_AUTH_TOKEN_PATH)"
        raise AlignedServeError(f"{none}: {error}") from error


def _wait_for_nodes(config: Config, nodes: ClusterNodes, folder: Path) -> tuple[Config, list[PlacedGroup]]:
    """Return the groups of parts as soon as nodes have room, and the config with the device that these nodes have and
    the topology: `ray up` ends with the head, other nodes come later."""
    deadline, said, asked = time.monotonic() + config.ray.patience_s, "", config
    while True:
        nodes.look()
        awaited, is_late = nodes.awaited(), time.monotonic() > deadline
        try:
            if awaited and config.topology.is_auto and not is_late:
                raise NoPlace(f"still being set up: {', '.join(awaited)}")
            config, lines = _decide(asked, nodes.placing(asked), nodes, folder)
            parts = parts_of(config)
            prefill, decode = ([name for role, name in parts if role is kind] for kind in (Role.PREFILL, Role.DECODE))
            placed = nodes.placing(config).placed(prefill, decode)
        except NoPlace as error:
            why = f"{error}{_advice(asked, config)}"
            is_hopeless = bool(nodes.left_out) and not awaited and not nodes.placing(asked).may_come
            if is_late or is_hopeless:
                raise NoPlace(f"{why}{'; nodes with a fault are left out' if is_hopeless else ''}") from None
            if why != said:
                say(f"waits for nodes: {why}")
            said = why
        else:
            if asked.engine.device is DeviceKind.AUTO:
                say(f"workers compute on {'GPUs' if config.engine.on_gpu else 'CPUs'}: the nodes' resources say so")
            for line in lines:
                say(line)
            return config, placed
        time.sleep(LOOK_S)


def _decide(config: Config, placing: Placing, nodes: ClusterNodes, folder: Path) -> tuple[Config, Sequence[str]]:
    """Return the config with a device and a topology, and lines that say why. Where no node has room for a worker, one
    of those that may come is thought of."""
    config = decide_by_nodes(config, placing)
    if not config.topology.is_auto:
        return config, ()
    present = replace(placing, gpus_per_worker=config.ray.gpus_per_worker or 0.0, may_come=())
    offers = nodes.offers(placing.nodes if present.has_node_for(Role.DECODE) else placing.may_come[:1])
    return choose(config, offers, read_config(folder), folder)


def decide_by_nodes(config: Config, placing: Placing) -> Config:
    """Return the config with a device, and the GPUs of each rank. The launcher's own node may have no GPU, so the nodes
    decide: `auto` takes GPUs where they are reserved, or where a node of the cluster, or one that may come, has a GPU
    and room for a decode worker beside it."""
    engine, gpus = config.engine, config.ray.gpus_per_worker
    if engine.device is DeviceKind.AUTO:
        on_gpus = replace(placing, gpus_per_worker=1.0).has_node_for(Role.DECODE) if gpus is None else gpus > 0
        engine = replace(engine, device=DeviceKind.CUDA if on_gpus else DeviceKind.CPU)
    reserved = float(engine.on_gpu) if gpus is None else gpus
    return replace(config, engine=engine, ray=replace(config.ray, gpus_per_worker=reserved))


def size_by_nodes(
    config: Config, nodes: Sequence[ClusterNode], groups: Sequence[Group], gpu: int | None = None
) -> Config:
    """Return the config with KV memory and a context for the node that offers least memory, with all workers of the
    largest group on it; on GPUs for the smallest `gpu`. Each node's pool and threads are sized there, and its workers
    look at what is free there, so an offer that is too small refuses nothing."""
    folder = model_folder(config)
    model, workers = read_config(folder), num_workers(config)
    totals = [node.total for node in nodes if node.total.get("CPU")]  # no worker is on others
    offered = [int(total["memory"]) for total in totals if "memory" in total]
    found = memory()
    least = min(offered) if offered else None if found is None else found.available
    together = max(sum(name.partition("-")[0] in WORKERS for name in group) for group in groups)
    free = FreeMemory(None if least is None else least * workers // max(1, together), shared=1 << 60, gpu=gpu)
    try:
        sized = with_sizes(config, model, folder, free)
    except MemoryTooSmall as error:
        say(f"warning: by what the nodes offer, {error}")
        sized = with_sizes(config, model, folder, replace(free, available=None))
    for line in told(config, sized, model, capacity(sized, model), free, read_pooled(folder, model).longest):
        if line.startswith(("context", "kv")):
            say(line)
    return replace(config, engine=replace(sized.engine, threads=config.engine.threads))


def _advice(config: Config, decided: Config) -> str:
    """Return what to set where there is no room on GPUs that nobody has asked for."""
    asked = config.engine.device is not DeviceKind.AUTO or config.ray.gpus_per_worker is not None
    if asked or not decided.engine.on_gpu:
        return ""
    return (
        "; nodes have GPUs, so each rank of a worker gets one: ray.gpus_per_worker 0.5, with"
        " engine.kv_memory_mb, lets two workers share it, and engine.device cpu takes none"
    )


def _plan(config: Config, groups: Sequence[Group], host: str, router: str) -> list[PartSpec]:
    """Return the specs of all parts; several nodes with workers have several pools."""
    parts = [(Role(name.partition("-")[0]), name, rank_of(name)) for group in groups for name in group]
    here = [(role, name, 0) for role, name in parts_of(config) if role not in NAMED]
    return specs_of(config, [*here, *parts], lambda r: "" if r in NAMED else "head", new_deployment(), host, router)


def job_config(ray: Any) -> Any:
    """Return the settings of our job: its actors find modules where this process does.

    Ray would put the working directory first on their path, but for jobs that it takes for those of a remote client."""
    return ray.job_config.JobConfig(_client_job=True, _py_driver_sys_path=[] if ABOVE in sys.path else [ABOVE])


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise AlignedServeError("the launcher ray needs Ray: pip install 'alignedserve[ray]'") from None
    return ray
