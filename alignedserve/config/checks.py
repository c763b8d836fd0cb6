"""Checks of settings together: what each of them allows, and both do not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.config.choices import DeviceKind, Graphs, Launcher, LookAhead, TransportName
from alignedserve.config.sections import EngineConfig, RayConfig, ScaleConfig
from alignedserve.errors import ConfigError
from alignedserve.forms.rules import Compression
from alignedserve.scheduling.policy import Handoff, Predictor
from alignedserve.text.calls.names import CALL_FORMATS
from alignedserve.text.reasoning.names import AUTO, NONE, REASONING_FAMILIES

if TYPE_CHECKING:
    from alignedserve.config.config import Config


def check_together(config: Config) -> None:
    _check_sizes(config)
    _check_policy(config)
    _check_transport(config)
    _check_scale(config)
    _check_ray(config)
    _check_named("reasoning_parser", config.reasoning_parser, (AUTO, NONE, *REASONING_FAMILIES))
    _check_named("tool_call_parser", config.tool_call_parser, (AUTO, *sorted(CALL_FORMATS)))
    if not re.match(r"(sqlite|off)$|rediss?(\+(cluster|sentinel))?://|unix://", config.jobs.store):
        shown = config.jobs.store.partition(":")[0]  # a password may follow
        raise ConfigError(f"jobs.store must be sqlite, off, or a URL that begins with redis://, not {shown!r:.40}")


def _check_named(path: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ConfigError(f"{path} {name!r:.40} is not known: choose one of {', '.join(known)}")


def _check_sizes(config: Config) -> None:
    engine, page_size = config.engine, config.page_size
    if page_size % engine.block_size:
        raise ConfigError(
            f"kvpool.page_size must be a multiple of engine.block_size {engine.block_size}, not {page_size}"
        )
    if engine.step_tokens < engine.seats:
        raise ConfigError(
            f"engine.max_step_tokens must be at least engine.max_batch {engine.seats}, "
            f"not {engine.step_tokens}: each request of a step takes a token"
        )
    if engine.cuda_graphs is Graphs.ON and engine.device is DeviceKind.CPU:
        raise ConfigError(
            f"engine.cuda_graphs on needs engine.device cuda, not {engine.device.value}: set it to auto or off"
        )


def _check_policy(config: Config) -> None:
    engine, policy = config.engine, config.policy
    if policy.problem is not None:
        raise ConfigError(f"schedule: {policy.problem}")
    if engine.kv_dtype is KvDtype.INT8 and policy.block_use.keeps_hidden:
        raise ConfigError(
            "engine.kv_dtype int8 leaves no room for hidden vectors, which schedule.cache hybrid keeps in the blocks of"
            " KV: set one of them to its default"
        )
    if engine.kv_dtype is KvDtype.INT8 and policy.compression is not Compression.OFF:
        raise ConfigError("engine.kv_dtype int8 keeps pages in int8 already: set kvpool.compression to off")
    if engine.look_ahead is LookAhead.ONE and policy.why_not_ahead is not None:
        raise ConfigError(f"engine.look_ahead cannot be 1: {policy.why_not_ahead}: set it to 0")
    if config.schedule.predictor is Predictor.ORACLE:
        raise ConfigError("schedule.predictor oracle works in the simulator only: set hash")


def _check_transport(config: Config) -> None:
    transport, topology = config.transport, config.topology
    if transport is TransportName.HOST and config.policy.handoff is Handoff.DEVICE:
        raise ConfigError("schedule.handoff device sends KV from device to device: transport cannot be host")
    if transport in (TransportName.AUTO, TransportName.HOST):
        return
    if topology.colocated:
        raise ConfigError(
            f"transport {transport.value} is between prefill and decode workers: topology "
            f"{topology} has no prefill workers"
        )
    if config.why_host is not None:
        raise ConfigError(f"transport cannot be {transport.value}: {config.why_host}: set it to host")


def _check_scale(config: Config) -> None:
    scale, topology = config.scale, config.topology
    if not scale.ranges and scale != ScaleConfig():
        raise ConfigError("scale.shrink_after_s is for workers that come and go: set scale.prefill or scale.decode too")
    if topology.colocated and scale.prefill is not None:
        raise ConfigError(f"scale.prefill is for prefill workers, and topology {topology} has none: set scale.decode")
    for name, between, count in (
        ("prefill", scale.prefill, topology.prefill_workers),
        ("decode", scale.decode, topology.decode_workers),
    ):
        if between is not None and count not in between:
            raise ConfigError(f"scale.{name} {between}: topology {topology} begins with {count}, outside that range")


def _check_ray(config: Config) -> None:
    ray = config.ray
    if ray.gpus_per_worker is not None:
        _check_reserved(config.engine, ray.gpus_per_worker)
    if ray.address is not None and config.launcher is not Launcher.RAY:
        raise ConfigError("ray.address needs launcher ray: set both or neither")
    if ray.address is None and ray != RayConfig():
        raise ConfigError("ray: its settings are for the nodes of a cluster: set ray.address too, or none of them")


def _check_reserved(engine: EngineConfig, gpus: float) -> None:
    """Refuse GPUs that are reserved and would idle, or that would be used and are not reserved."""
    ranks = engine.tensor_parallel_size
    if ranks > 1 and 0 < gpus < 1:
        raise ConfigError(
            f"ray.gpus_per_worker counts for each rank, and NCCL refuses two ranks on one GPU: with"
            f" engine.tensor_parallel_size {ranks} it is 1, or 0 on CPUs, not {gpus:g}"
        )
    if gpus > 1:
        raise ConfigError(
            f"ray.gpus_per_worker counts for each rank, and a rank computes on one GPU: set it to 1, not {gpus:g}, and"
            f" engine.tensor_parallel_size, which is {ranks}, to the GPUs that share the model"
        )
    if 0 < gpus < 1 and engine.kv_memory_mb is None:
        raise ConfigError(
            f"ray.gpus_per_worker {gpus:g} puts several workers on a GPU, and each would take all of its memory: set"
            " engine.kv_memory_mb to what each is to take"
        )
    if gpus and engine.device is DeviceKind.CPU:
        raise ConfigError(
            f"ray.gpus_per_worker {gpus:g} reserves GPUs, and with engine.device cpu nothing computes on them: set"
            " engine.device to cuda, or ray.gpus_per_worker to 0"
        )
    if not gpus and engine.device is DeviceKind.CUDA:
        raise ConfigError(
            "engine.device cuda needs GPUs, and ray.gpus_per_worker 0 reserves none: set it to 1, or to 0.5 where two"
            " workers share a GPU"
        )
