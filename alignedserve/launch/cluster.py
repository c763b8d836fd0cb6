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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.model_source import at_revision_of, name_of
from alignedserve.architectures.vectors import read_pooled
from alignedserve.config.choices import DeviceKind, ModelNames
from alignedserve.config.config import Config
from alignedserve.core import WORKERS, Role
from alignedserve.errors import AlignedServeError, MemoryTooSmall
from alignedserve.launch.actors import LOOK_S, Actors, placing_of
from alignedserve.launch.bounded import BoundedEnd
from alignedserve.launch.deployment import RunningDeployment
from alignedserve.launch.host import say
from alignedserve.launch.orders import Reloading
from alignedserve.launch.placing import NAMED, Group, NodeType, NoPlace, Placing, node_types
from alignedserve.launch.plan import new_deployment, parts_of, specs_of
from alignedserve.machine.gpus import gpu_memory
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
ASK_S = 20.0  # for a node to start a process and say how large its GPUs are
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
    # All nodes get this config. A model's folder or file has the same path on every node; each node itself fetches a
    # hub id, at the commit that it has now, and makes the folder of a GGUF file.
    model = at_revision_of(config.model, model_folder(config))
    named = config.served_model_name or ModelNames((name_of(config.model),))
    jobs = check_storage(config.jobs, named.names[0], config.server.port)
    config = replace(config, model=model, served_model_name=named, jobs=jobs)
    types = node_types(config.ray.cluster_file) if config.ray.cluster_file is not None else []
    ending = BoundedEnd(config.server.drain_s)
    _join(ray, config)
    try:
        host = ray.util.get_node_ip_address()
        with bind(host, 0) as router:  # bound as long as this process lives, as in `serve`
            config, groups = _wait_for_nodes(ray, config, types)
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            config = size_by_nodes(config, nodes, groups, _least_gpu(ray) if config.engine.on_gpu else None)
            specs = _plan(config, groups, host, f"tcp://{host}:{router.getsockname()[1]}")
            host = Actors(ray, config, specs[0].deployment, groups, types=types)
            deployment = RunningDeployment(config, specs, reloading, host, ending=ending)
            deployment.hear_signals()  # also while it waits for room
            with host.reserved():
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
    host = Actors(ray, config, specs[0].deployment, [group], is_own=True)
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


def _wait_for_nodes(ray: Any, config: Config, types: Sequence[NodeType]) -> tuple[Config, list[Group]]:
    """Return the groups of parts as soon as nodes have room, and the config with the device that these nodes have:
    `ray up` ends with the head, other nodes come later."""
    deadline, said = time.monotonic() + config.ray.place_s, ""
    parts = parts_of(config)
    prefill, decode = ([name for role, name in parts if role is kind] for kind in (Role.PREFILL, Role.DECODE))
    while True:
        placing = placing_of(ray, config, types)
        decided = decide_by_nodes(config, placing)
        try:
            groups = replace(placing, gpus_per_worker=decided.ray.gpus_per_worker or 0.0).groups(prefill, decode)
        except NoPlace as error:
            why = f"{error}{_advice(config, decided)}"
            if time.monotonic() > deadline:
                raise NoPlace(why) from None
            if why != said:
                say(f"waits for nodes: {why}")
            said = why
        else:
            if config.engine.device is DeviceKind.AUTO:
                say(f"workers compute on {'GPUs' if decided.engine.on_gpu else 'CPUs'}: the nodes' resources say so")
            return decided, groups
        time.sleep(LOOK_S)


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


def _least_gpu(ray: Any) -> int | None:
    """Return the bytes of the smallest GPU of the nodes; None where none tells in time."""
    ask = ray.remote(num_cpus=0, max_retries=0)(gpu_memory)
    on = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    asked = [ask.options(scheduling_strategy=on(node, soft=False)).remote() for node in nodes]
    told, _ = ray.wait(asked, num_returns=len(asked), timeout=ASK_S) if asked else ([], [])
    with suppress(ray.exceptions.RayError):
        return min((found for found in ray.get(told) if found is not None), default=None)
    return None


def size_by_nodes(
    config: Config, nodes: Sequence[Mapping[str, float]], groups: Sequence[Group], gpu: int | None = None
) -> Config:
    """Return the config with KV memory and a context for the node that offers least memory, with all workers of the
    largest group on it; on GPUs for the smallest `gpu`. Each node's pool and threads are sized there, and its workers
    look at what is free there, so an offer that is too small refuses nothing."""
    folder = model_folder(config)
    model, workers = read_config(folder), num_workers(config)
    offered = [int(node["memory"]) for node in nodes if "memory" in node and node.get("CPU")]  # no worker is on heads
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
