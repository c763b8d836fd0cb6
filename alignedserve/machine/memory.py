"""Check that weights, KV and a step's work fit into memory, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alignedserve.architectures.model_config import DTYPE_BYTES, ModelConfig
from alignedserve.architectures.weight_files import count_numbers
from alignedserve.config.config import Config, DeviceKind, TransportName
from alignedserve.errors import MemoryTooSmall
from alignedserve.kvpool.arena.shared_files import DEVICE_CACHE, POOL, Use
from alignedserve.machine.capacity import Capacity
from alignedserve.machine.resources import memory

_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryDemand:
    """The memory that one rank of a worker needs, in bytes."""

    weights: int
    cache: int
    step: int
    dtype: str

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.step

    def __str__(self) -> str:
        weights, cache, step = (-(-size // _MIB) for size in (self.weights, self.cache, self.step))
        return f"{weights} MB of weights as {self.dtype}, {cache} of KV and {step} for a step"


def demand(config: Config, model: ModelConfig, room: Capacity, folder: Path) -> MemoryDemand:
    ranks = config.engine.tensor_parallel_size
    whole, embedding = count_numbers(folder), model.vocab_size * model.hidden_size  # every rank has a whole embedding
    model = model.share(ranks)
    return MemoryDemand(
        weights=(whole + (ranks - 1) * min(whole, embedding)) // ranks * DTYPE_BYTES[room.dtype],
        cache=model.kv_bytes(room.limits.num_pairs * room.limits.block_size, room.dtype),
        step=model.step_bytes(config.engine.max_step_tokens, config.engine.max_batch, room.dtype),
        dtype=room.dtype,
    )


def shared_memory(config: Config, model: ModelConfig, room: Capacity) -> int:
    """Return the shared memory that the parts of one machine take: arenas, and device caches that other parts map."""
    ranks, topology = config.engine.tensor_parallel_size, config.topology
    pool = ranks * room.num_pages * room.page_bytes
    if not _maps_files(config):
        return pool
    cache = model.share(ranks).kv_bytes(room.limits.num_pairs * room.limits.block_size, room.dtype)
    return pool + ranks * (topology.prefill_workers + topology.decode_workers) * cache


def use_of(config: Config) -> Use:
    if not _maps_files(config):
        return POOL
    return Use("the KV pool with the workers' device caches (transport ipc)", f"{POOL.flag}, {DEVICE_CACHE.flag}")


def _maps_files(config: Config) -> bool:
    return config.transport is TransportName.IPC and config.engine.device is DeviceKind.CPU


def check_worker(config: Config, model: ModelConfig, room: Capacity, folder: Path) -> None:
    """Check the memory for this process, which becomes a worker; other workers may have taken their memory already."""
    _check(config, demand(config, model, room, folder), 1, 0)


def check_machine(config: Config, model: ModelConfig, room: Capacity, folder: Path) -> None:
    """Check that all workers and the pool fit on this machine. On GPUs each worker checks after loading weights."""
    if config.engine.device is not DeviceKind.CPU:
        return
    topology = config.topology
    ranks = config.engine.tensor_parallel_size
    pool = ranks * room.num_pages * room.page_bytes
    workers = ranks * (topology.prefill_workers + topology.decode_workers)
    num_places = config.policy.pairs.num_places(room.limits.num_pairs * room.limits.block_size)
    checkpoints = topology.decode_workers * ranks * model.share(ranks).kv_bytes(num_places, room.dtype)
    _check(config, demand(config, model, room, folder), workers, pool, checkpoints)


def _check(config: Config, rank: MemoryDemand, workers: int, pool: int, checkpoints: int = 0) -> None:
    """Raise MemoryTooSmall where the demand exceeds memory; `checkpoints` are bytes of all workers."""
    found = memory()
    needed = workers * rank.total + pool + checkpoints
    if found is None or needed <= found.available:
        return
    noun = "rank" if config.engine.tensor_parallel_size > 1 else "worker"
    each = f"a {noun} takes" if workers == 1 else f"each of {workers} {noun}s takes"
    and_pool = f", the KV pool {pool // _MIB}" if pool else ""
    and_more = f", checkpoints {checkpoints // _MIB}" if checkpoints else ""
    raise MemoryTooSmall(
        f"{found.available // _MIB} MB of memory are available, {-(-needed // _MIB)} are needed:"
        f" {each} {rank}{and_pool}{and_more}: {_advice(config, rank, workers, found.available, pool, checkpoints)}"
    )


def _advice(config: Config, rank: MemoryDemand, workers: int, available: int, pool: int, checkpoints: int) -> str:
    if checkpoints and workers * rank.total + pool <= available:
        fitting = config.schedule.checkpoints * (available - workers * rank.total - pool) / checkpoints
        return f"lower schedule.checkpoints from {config.schedule.checkpoints:g} to {int(100 * fitting) / 100:g}"
    share = (available - pool) // workers  # of each worker
    fitting = (share - rank.weights - rank.step) // _MIB
    if fitting > 0:
        return f"lower engine.kv_memory_mb from {config.engine.cache_mb} to {fitting}"
    smaller_pool = (available - workers * rank.total) // _MIB
    if pool and smaller_pool > 0:
        return f"lower kvpool.memory_mb from {config.kvpool.memory_mb} to {smaller_pool}"
    if rank.weights + rank.step > share >= rank.weights:
        return f"lower engine.max_step_tokens from {config.engine.max_step_tokens}, and engine.kv_memory_mb"
    if rank.dtype == "float32" and rank.weights // 2 < share:
        return "set engine.dtype to bfloat16, which halves the weights, or take a smaller model"
    return "take a smaller model or fewer workers"
