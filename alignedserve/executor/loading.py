"""Load a worker's engine: its threads, its device, the size of the device cache, captured steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch

from alignedserve.architectures.weight_files import weights_mark
from alignedserve.config.choices import DeviceKind, Graphs, Launcher, LookAhead
from alignedserve.config.config import Config
from alignedserve.core import Role
from alignedserve.engine.calibration import PlainModel
from alignedserve.engine.device.devices import cache_room, check_shared, device_of, free_memory, out_of_memory
from alignedserve.engine.device.ranks import ALONE, OTHER_RANK, RankLinks, Team
from alignedserve.engine.engine import Engine
from alignedserve.engine.graphs import CAPTURED, STEP_BY_STEP, CudaCapture
from alignedserve.engine.weights.dummy import DummyWeights
from alignedserve.engine.weights.forms import weights_of
from alignedserve.engine.weights.tensors import Weights
from alignedserve.errors import ConfigError, ModelError, RankGaveUp, RankLost
from alignedserve.executor.precision import plain_model, say_precision
from alignedserve.fallbacks import fell_back
from alignedserve.kernels.common.failing import fault_of_kernel
from alignedserve.machine.resources import threads_of_each
from alignedserve.shell.part import Place
from alignedserve.signs import Stage
from alignedserve.sizing.adapters import adapter_room, as_named, first_adapters
from alignedserve.sizing.capacity import Capacity, capacity
from alignedserve.sizing.memory import check_worker, demand
from alignedserve.sizing.model_folder import dummy_warning
from alignedserve.transport.mapping import CudaMaps

log = logging.getLogger("alignedserve.engine")


def use_threads(threads: int | None, workers: int) -> None:
    """Set the compute threads of this worker, given the number of workers on its machine."""
    torch.set_num_threads(threads or threads_of_each(workers))


AnEngine = TypeVar("AnEngine", bound=Engine)


def load(place: Place, kind: type[AnEngine], team: Team | None) -> AnEngine:
    """Return the engine of one rank, as soon as all ranks have loaded theirs."""
    config, (model, room) = place.config, place.capacity()
    topology, ranks, device = config.topology, config.engine.tensor_parallel_size, device_for(place)
    if device.type == "cpu":
        check_worker(config, model, room, place.folder, bool(place.spec.replaces))
    use_threads(config.engine.threads, ranks * (topology.prefill_workers + topology.decode_workers))
    has_graphs = config.engine.cuda_graphs is not Graphs.OFF and device.type == "cuda"
    _check_unchanged(place)
    plain = plain_model(place, device)
    place.signs.stage(Stage.WEIGHTS, demand(config, model, room, place.folder).weights)
    engine = kind(
        place.folder,
        tensors_of=weights_for(config),
        num_blocks=lambda: _num_blocks(place, team or ALONE) - has_graphs,  # a block is kept for padding
        block_size=room.limits.block_size,
        dtype=room.dtype,
        kv_dtype=room.kv_dtype,
        quantization=config.engine.quantization,
        squares=plain.squares if isinstance(plain, PlainModel) else None,
        tune_s=config.engine.tune_s,
        ranks=team or ALONE,
        device=device,
        has_graphs=has_graphs,
        adapter_bytes=adapter_room(config, model, room.dtype),
        signs=place.signs,
    )
    _check_unchanged(place)  # or the new weights came while they were read
    adapters = as_named(first_adapters(config, model))
    place.signs.stage(Stage.ADAPTERS, len(adapters))
    engine.adapters.load(adapters, place.signs.advance)
    began = perf_counter()
    engine.rehearse()
    if device.type == "cuda":
        log.info("kernels compiled and measured in %.1f s", perf_counter() - began)
    say_precision(engine, plain)
    if engine.ranks.size > 1:
        place.signs.stage(Stage.RANKS)
    engine.ranks.agree(True)
    return engine


def _check_unchanged(place: Place) -> None:
    """Raise where other weights lie in the folder than when the deployment started: two models would answer under one
    name, and streams of one would go on with the other."""
    if place.spec.weights and weights_mark(place.folder) != place.spec.weights:
        raise ModelError(
            f"{place.folder} has other weights than when the deployment started, and {place.spec.name} does not mix"
            " them: put those back, or stop and serve again"
        )


def weights_for(config: Config) -> Callable[[Path], Weights]:
    """Return how the weights of a folder are read, or made."""
    if (warning := dummy_warning(config)) is None:
        return weights_of
    log.warning("%s", warning)
    return lambda _: DummyWeights()


def _num_blocks(place: Place, ranks: RankLinks) -> int:
    """Return the number of blocks of the device cache: as many as the GPU has room for beside the weights, or as
    many as the configuration says."""
    config, (model, room), device = place.config, place.capacity(), device_for(place)
    engine, topology = config.engine, config.topology
    if device.type == "cpu":
        return room.limits.num_blocks
    if engine.kv_memory_mb is None and config.launcher is Launcher.LOCAL:
        check_shared(engine.tensor_parallel_size * (topology.prefill_workers + topology.decode_workers))
    if ranks.size > 1:
        place.signs.stage(Stage.RANKS)
        ranks.agree(True)  # this waits for the others without a limit, a sum does not
        ranks.total(torch.zeros(1, device=device))  # NCCL connects now, so its memory is not counted as free
    free = free_memory(device) or 0
    needs, reserve = demand(config, model, room, place.folder), engine.gpu_reserve_mb << 20
    left = ranks.least(cache_room(str(device), free, engine.kv_memory_mb, needs, reserve))
    limits = capacity(config, model, left).limits
    log.info("the device cache holds %d tokens: %d MB of what %s has left", limits.num_tokens, left >> 20, device)
    return limits.num_blocks


def capture_steps(engine: Engine, config: Config, role: Role = Role.DECODE) -> None:
    """Capture the steps of a worker's role as CUDA graphs. They may take half of the memory reserve; the other half is
    left for the rest."""
    why_never = engine.why_no_graphs
    if not engine.ranks.agree(why_never is None):
        why_never = why_never or OTHER_RANK
    why = why_never or _captured(engine, config, only_prompts=role is not Role.DECODE)
    if why is None:
        return
    if config.engine.cuda_graphs is Graphs.ON:
        raise ConfigError(f"engine.cuda_graphs cannot be on: {why}: set it to auto")
    if why_never is None or engine.device.type != "cpu":  # nobody can change that a CPU has no graphs
        fell_back(CAPTURED, why, STEP_BY_STEP)


def _captured(engine: Engine, config: Config, only_prompts: bool) -> str | None:
    """Capture the steps, or return why that failed: then steps run kernel by kernel."""
    least = config.engine.gpu_reserve_mb << 19
    try:
        capture, free = CudaCapture(engine.device), lambda: free_memory(engine.device) or 0
        engine.capture(
            *(config.engine.seats, capture, free, least),
            most_tokens=config.engine.step_tokens,
            with_adapters=engine.captures_adapters,
            only_prompts=only_prompts,
            maps=CudaMaps(engine.device),
        )
    except RankLost:
        raise
    except RankGaveUp as error:
        return str(error)
    except Exception as error:  # any error of a driver or a library, unless the device is lost
        why = out_of_memory(error) or fault_of_kernel(error, engine.device)
        engine.ranks.give_up()
        return why
    return None


def steps_ahead(place: Place) -> int:
    """Return how many steps a worker plans while another runs; say why a GPU plans none, unless that was asked for."""
    engine, policy = place.config.engine, place.config.policy
    is_open = engine.look_ahead is LookAhead.AUTO and engine.device is DeviceKind.CUDA
    if is_open and policy.why_not_ahead is not None:
        fell_back("steps planned ahead", policy.why_not_ahead, "the GPU waits between two steps")
    return engine.steps_ahead(policy)


def with_blocks(room: Capacity, engine: Engine) -> Capacity:
    """Return the capacity with as many blocks as the engine has."""
    return replace(room, limits=replace(room.limits, num_blocks=engine.num_blocks))


def device_for(place: Place) -> torch.device:
    return device_of(place.config.engine.device.value, place.spec.device)
