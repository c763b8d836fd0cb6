"""Check that weights, KV and a step's work fit into memory, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from alignedserve.architectures.families.model_config import DTYPE_BYTES, ModelConfig
from alignedserve.architectures.quantization import Quantization
from alignedserve.architectures.weight_files import (
    count_in_experts,
    count_numbers,
    count_tables,
    largest_numbers,
    quantised_bytes,
)
from alignedserve.config.choices import LoadFormat, TransportName
from alignedserve.config.config import Config
from alignedserve.errors import MemoryTooSmall
from alignedserve.machine.gpus import gpu_memory
from alignedserve.machine.resources import memory
from alignedserve.machine.shared_files import DEVICE_CACHE, POOL, Use
from alignedserve.sizing.adapters import adapter_room
from alignedserve.sizing.capacity import Capacity
from alignedserve.sizing.claims import claimed

_MIB = 1 << 20
SHARE_LEFT = 0.15  # of free memory, which stays free
SHARED_RECORDS = 9 * _MIB // 4  # beside the pool: what gateways count of callers, and the adapters that are loaded
BATCH_SHARE = 0.4  # of a decode worker's device that the pool fills with one batch (kvpool/batching.py)


@dataclass(frozen=True)
class FreeMemory:
    """The memory that a deployment may plan with, in bytes; None where the system does not tell."""

    available: int | None  # without what running deployments may still take
    shared: int  # in the pool's directory
    gpu: int | None = None  # of the smallest visible GPU, used or not: a pool that starts again finds its workers there

    @classmethod
    def here(cls, directory: Path) -> FreeMemory:
        found, there = memory(), os.statvfs(directory)
        available = None if found is None else max(0, found.available - claimed(directory))
        return cls(available, there.f_bavail * there.f_frsize, gpu_memory())

    @property
    def usable(self) -> int | None:
        """Return what is planned with: the rest stays for other programs, and for our processes' own memory."""
        return None if self.available is None else int((1 - SHARE_LEFT) * self.available)


@dataclass(frozen=True)
class MemoryDemand:
    """The memory that one rank of a worker needs, in bytes."""

    weights: int
    cache: int
    step: int
    dtype: str
    loading: int = 0  # beside the weights while they are loaded; KV and steps take their memory only afterwards

    @property
    def total(self) -> int:
        return self.weights + max(self.loading, self.cache + self.step)

    def __str__(self) -> str:
        weights, cache, step, loading = (
            -(-size // _MIB) for size in (self.weights, self.cache, self.step, self.loading)
        )
        needs = f"{weights} MB of weights as {self.dtype}, {cache} of KV and {step} for a step"
        return f"{needs}, while it loads {loading} beside the weights" if loading > cache + step else needs


def demand(config: Config, model: ModelConfig, room: Capacity, folder: Path) -> MemoryDemand:
    ranks = config.engine.tensor_parallel_size
    weights = _weights(config, model, room, folder) + adapter_room(config, model, room.dtype)
    kept, model = _kept(config.engine.quantization, model, room.dtype), model.share(ranks)
    is_written = config.engine.on_gpu or model.keeps_kv  # on a CPU blocks that are not written take no memory
    return MemoryDemand(
        weights=weights,
        cache=room.cache_bytes(model) if is_written else 0,
        step=model.step_bytes(config.engine.step_tokens, config.engine.seats, room.dtype),
        dtype=kept,
        loading=_loading(config, model, folder),
    )


def plain(config: Config) -> Config:
    """Return the config of the same workers with weights as the files have them."""
    return replace(config, engine=replace(config.engine, quantization=Quantization.NONE))


def _loading(config: Config, model: ModelConfig, folder: Path) -> int:
    """Return the bytes that a layer of whole numbers takes on its way: a byte of each number before they are packed,
    in a fused layer of two tensors; those of files are there twice, as they were read and side by side."""
    quantization = config.engine.quantization
    if _is_dummy(config):
        return 0 if quantization is Quantization.NONE else 2 * model.vocab_size * model.hidden_size
    if model.stored is not None:
        return 4 * largest_numbers(folder, min(model.stored.bits, default=8))
    return 0 if quantization is Quantization.NONE else 2 * largest_numbers(folder, 8)


def _is_dummy(config: Config) -> bool:
    """Return whether there are no files of weights to look at: then the configuration says how many there are."""
    return config.engine.load_format is LoadFormat.DUMMY


def _kept(quantization: Quantization, model: ModelConfig, dtype: str) -> str:
    """Return how weights are kept, in words."""
    if model.stored is not None:
        return f"{model.stored.label} and {dtype}"
    return dtype if quantization is Quantization.NONE else f"{quantization.value} and {dtype}"


def _weights(config: Config, model: ModelConfig, room: Capacity, folder: Path) -> int:
    """Return the bytes of a rank's weights."""
    ranks, whole = config.engine.tensor_parallel_size, DTYPE_BYTES[room.dtype]
    is_quantised = model.stored is not None or config.engine.quantization is not Quantization.NONE
    plain = model.plain_numbers * whole // ranks if is_quantised else 0
    on_all = model.numbers_on_all_ranks * (ranks - 1) // ranks
    share = model.share(ranks)  # beside it a rank has copies of heads of K and V that other ranks have too
    copied = 2 * share.num_layers * share.hidden_size * share.kv_dim * (share.kv_copies - 1) // share.kv_copies
    return _shares(config, model, room, folder) + plain + (on_all + copied) * whole


def _shares(config: Config, model: ModelConfig, room: Capacity, folder: Path) -> int:
    """Return the bytes of a rank's weights where it has the whole embedding and a share of all else."""
    ranks, quantization = config.engine.tensor_parallel_size, config.engine.quantization
    numbers = model.numbers if _is_dummy(config) else count_numbers(folder)
    table, whole = model.vocab_size * model.hidden_size, DTYPE_BYTES[room.dtype]
    if model.stored is not None and not _is_dummy(config):
        stored = quantised_bytes(folder, whole)
        return max(0, stored - table * whole) // ranks + min(stored, table * whole)
    table = min(numbers, table)
    if quantization is Quantization.NONE:
        return (numbers - table) * whole // ranks + table * whole
    # Our own modules quantise experts as all else.
    experts = 0 if model.has_experts or _is_dummy(config) else count_in_experts(folder)
    is_tied = model.tied_embeddings  # of what transformers runs, only the files tell
    if not is_tied and not _is_dummy(config):
        is_tied = count_tables(folder, (model.vocab_size, model.hidden_size)) == 1
    layers = max(0, numbers - experts - (table if is_tied else 2 * table))
    head = numbers - experts - layers - table
    if is_tied and ranks > 1:
        head = table  # each rank has its share of the head besides
    embedding = quantization.num_bytes(0, 0, table, whole) if is_tied else table * whole
    return quantization.num_bytes(layers, experts, head, whole) // ranks + embedding


def why_too_small(config: Config, room: Capacity) -> str | None:
    """Return why the pool is too small for batches to mean anything, or None; on GPUs caches are not known before."""
    tokens, batch = room.num_pages * config.page_size, int(BATCH_SHARE * room.limits.num_tokens)
    if tokens >= batch:
        return None
    needed_mb = -(-batch * room.page_bytes // config.page_size * config.engine.tensor_parallel_size // _MIB)
    there = os.statvfs(config.kvpool.directory)
    shared_mb = there.f_blocks * there.f_frsize // _MIB
    first = f"give {config.kvpool.directory} more than its {shared_mb} MB (--shm-size of a container), and "
    return (
        f"the KV pool holds {tokens} tokens, a decode worker's batch may have {batch}: it can group few requests by"
        f" length, and keeps few prefixes; {first if shared_mb < 2 * needed_mb else ''}raise --pool-memory-mb"
        f" from {config.kvpool.memory_mb} to {needed_mb}"
    )


def shared_memory(config: Config, model: ModelConfig, room: Capacity, with_pool: bool = True) -> int:
    """Return the shared memory that the parts of one machine take: arenas, and device caches that other parts map."""
    ranks, pool = config.engine.tensor_parallel_size, _pool_bytes(config, room) if with_pool else 0
    if not maps_files(config):
        return pool
    return pool + num_workers(config) * room.cache_bytes(model.share(ranks))


def use_of(config: Config) -> Use:
    if not maps_files(config):
        return POOL
    return Use("the KV pool with the workers' device caches (transport ipc)", f"{POOL.flag}, {DEVICE_CACHE.flag}")


def maps_files(config: Config) -> bool:
    return config.transport in (TransportName.IPC, TransportName.DIRECT) and not config.engine.on_gpu


def check_worker(config: Config, model: ModelConfig, room: Capacity, folder: Path, replaces: bool = False) -> None:
    """Check the memory for this process, which becomes a worker; other workers may have taken their memory already. One
    that `replaces` another takes memory for KV only as that one frees it."""
    needs, found = demand(config, model, room, folder), memory()
    if found is not None:
        needs = replace(needs, cache=0) if replaces else needs
        _check(config, model, room, folder, needs, 1, 0, found.available)


def check_machine(config: Config, model: ModelConfig, room: Capacity, folder: Path, free: FreeMemory) -> None:
    """Check that all workers and the pool fit on this machine. On GPUs each worker checks after loading weights."""
    if config.engine.on_gpu or free.available is None:
        return
    pool = _pool_bytes(config, room)
    _, workers, checkpoints = _of_workers(config, model, room, folder)
    needs = demand(config, model, room, folder)
    _check(config, model, room, folder, needs, workers, pool, free.available, checkpoints)


def machine_demand(config: Config, model: ModelConfig, room: Capacity, folder: Path) -> int:
    """Return the bytes that workers and the pool may come to in this machine's own memory."""
    if config.engine.on_gpu:
        return _pool_bytes(config, room)
    of_workers, _, checkpoints = _of_workers(config, model, room, folder)
    return of_workers + _pool_bytes(config, room) + checkpoints


def _pool_bytes(config: Config, room: Capacity) -> int:
    return config.engine.tensor_parallel_size * room.num_pages * room.page_bytes


def num_workers(config: Config) -> int:
    """Return the ranks of all workers."""
    topology = config.topology
    return config.engine.tensor_parallel_size * (topology.prefill_workers + topology.decode_workers)


def _of_workers(config: Config, model: ModelConfig, room: Capacity, folder: Path) -> tuple[int, int, int]:
    """Return the bytes that all ranks of all workers need, how many ranks there are, and the bytes of checkpoints."""
    topology, ranks = config.topology, config.engine.tensor_parallel_size
    workers = num_workers(config)
    num_places = config.policy.block_use.num_on_host(room.limits.num_blocks * room.limits.block_size)
    checkpoints = topology.decode_workers * ranks * room.kv_bytes(model.share(ranks), num_places)
    return workers * demand(config, model, room, folder).total, workers, checkpoints


def _check(
    config: Config,
    model: ModelConfig,
    room: Capacity,
    folder: Path,
    rank: MemoryDemand,
    workers: int,
    pool: int,
    available: int,
    checkpoints: int = 0,
) -> None:
    """Raise MemoryTooSmall where the demand exceeds memory; `checkpoints` are bytes of all workers."""
    needed = workers * rank.total + pool + checkpoints
    if needed > available:
        more = f", checkpoints {checkpoints // _MIB}" if checkpoints else ""
        advice = _advice(config, rank, workers, available, pool, checkpoints)
        advice = advice or lighter(config, model, room, folder, 0, (available - pool) // workers)
        there = f"{available // _MIB} MB of memory are available"
        raise MemoryTooSmall(f"{there}, {too_much(config, rank, workers, pool, needed)}{more}: {advice}")


def too_much(config: Config, rank: MemoryDemand, workers: int, pool: int, needed: int) -> str:
    """Return how much is needed, in words."""
    noun = "rank" if config.engine.tensor_parallel_size > 1 else "worker"
    each = f"a {noun} takes" if workers == 1 else f"each of {workers} {noun}s takes"
    and_pool = f", the KV pool {pool // _MIB}" if pool else ""
    return f"{-(-needed // _MIB)} are needed: {each} {rank}{and_pool}"


def _advice(config: Config, rank: MemoryDemand, workers: int, available: int, pool: int, checkpoints: int) -> str:
    """Return which number to lower; empty where that would not be enough."""
    if checkpoints and workers * rank.total + pool <= available:
        share = config.policy.block_use.on_host * (available - workers * rank.total - pool) / checkpoints
        memory = config.schedule.memory.partition(":")[0]
        return f"set schedule.memory from {config.schedule.memory} to {memory}:{int(100 * share) / 100:g}"
    share = (available - pool) // workers  # of each worker
    loads = rank.weights + rank.loading <= share
    fitting = (share - rank.weights - rank.step) // _MIB
    if loads and fitting > 0:
        return f"lower --kv-memory-mb from {config.engine.kv_memory_mb} to {fitting}"
    smaller_pool = (available - workers * rank.total) // _MIB
    if pool and smaller_pool > 0:
        return f"lower --pool-memory-mb from {config.kvpool.memory_mb} to {smaller_pool}"
    if loads and rank.weights + rank.step > share:
        return f"lower --max-step-tokens from {config.engine.step_tokens}, and --kv-memory-mb"
    return ""


def lighter(config: Config, model: ModelConfig, room: Capacity, folder: Path, cache: int, share: int) -> str:
    """Return how weights may be kept so that a worker with this cache fits into its share of memory, in words."""
    engine = config.engine
    if room.dtype == "float32":
        halved = demand(config, model, replace(room, dtype="bfloat16"), folder)
        if replace(halved, cache=cache // 2).total <= share:
            return "say --dtype bfloat16, which halves the weights, or take a smaller model"
    forms = (Quantization.INT8, Quantization.INT4) if engine.quantization is Quantization.NONE else ()
    for form in () if model.stored is not None else forms:
        kept = demand(replace(config, engine=replace(engine, quantization=form)), model, room, folder)
        if replace(kept, cache=cache).total <= share:
            return f"say --quantization {form.value}, which keeps a weight in {form.bits} bits, or take a smaller model"
    return "take a smaller model or fewer workers"
