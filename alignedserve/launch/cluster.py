"""Join a Ray cluster that is there already (`ray up`, `ray start`, KubeRay), and plan a deployment on its nodes.

The launcher runs on the node whose address users know, with the router and the gateway beside it; placing.py says
which parts go where, and ray_actors.py keeps them. Links have keys, which travel to the parts with their specs.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from alignedserve.architectures.model_source import at_revision_of, without_revision
from alignedserve.config.choices import DeviceKind
from alignedserve.config.config import Config, dump
from alignedserve.core import Role
from alignedserve.errors import AlignedServeError
from alignedserve.launch.ending import BoundedEnd
from alignedserve.launch.keeper import say
from alignedserve.launch.placing import NAMED, Group, NodeType, NoPlace, Placing, node_types
from alignedserve.launch.plan import new_deployment, parts_of
from alignedserve.launch.ray_actors import LINES, LOOK_S, OnRay, import_ray, job_config, placing_of
from alignedserve.launch.reloading import Reloading
from alignedserve.protocol.messages import rank_of
from alignedserve.shell.clock import ClockOrigin
from alignedserve.shell.control import door_of
from alignedserve.shell.listener import bind
from alignedserve.shell.part import PartSpec
from alignedserve.sizing.model_folder import model_folder
from alignedserve.store.storage import check_storage

CONNECT_S = 5.0


def serve_on_cluster(config: Config, reloading: Reloading) -> int:
    """Serve until stopped, and return the exit code."""
    os.environ.update(LINES)
    ray = import_ray()
    # All nodes get this config. A model's folder or file has the same path on every node; each node itself fetches a
    # hub id, at the commit that it has now, and makes the folder of a GGUF file.
    model = at_revision_of(config.model, model_folder(config))
    named = config.served_model_name or without_revision(config.model)
    jobs = check_storage(config.jobs, named, config.server.port)
    config = replace(config, model=model, served_model_name=named, jobs=jobs)
    types = node_types(config.ray.cluster_file) if config.ray.cluster_file is not None else []
    ending = BoundedEnd(config.server.drain_s)
    _join(ray, config)
    try:
        host = ray.util.get_node_ip_address()
        with bind(host, 0) as router:  # bound as long as this process lives, as in `serve`
            config, groups = _wait_for_nodes(ray, config, types)
            specs = _plan(config, groups, host, f"tcp://{host}:{router.getsockname()[1]}")
            return OnRay(ray, config, specs, reloading, ending, groups, types=types).run()
    finally:
        ending.begin()
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
    deployment, tree = new_deployment(), dump(config)
    door, origin = str(door_of(config.server.port)), ClockOrigin.read()
    parts = [(Role(name.partition("-")[0]), name, rank_of(name)) for group in groups for name in group]
    here = [(role, name, 0) for role, name in parts_of(config) if role not in NAMED]
    return [
        PartSpec(
            *(role, name, "" if role in NAMED else "head", deployment, host, router, tree, origin),
            rank=rank,
            door=door,
            lends=config.lends and role is Role.PREFILL,
        )
        for role, name, rank in (*here, *parts)
    ]
