"""Decide the sizes that nobody named, once, before anything is loaded; all parts then read numbers.

    free on this machine, less what running deployments may still take (claims.py)
    ┌──────────────────────┬───────────────────────────┬────────────────────────┬──────────────┐
    │ weights and a step   │ KV of each worker, as far │ the KV pool: two       │ 15 % stay    │
    │ of each worker       │ as that is of use         │ fifths of the KV       │ for others   │
    └──────────────────────┴───────────────────────────┴────────────────────────┴──────────────┘

KV is of use for one request of the model's whole context and 2,048 tokens for each seat; beyond that one request it
takes 5 GB at most, or a quarter of what is planned with. Where memory holds less, the context is the longest that fits.
Example: 20 GB are free, a 1.5B in 4 bits takes 1 and a step 0.1. A request of 32,768 tokens and 64 of 2,048 are 163,840
tokens, 4.7 GB at 28 KiB each; the pool gets 1.9 GB, and 12 stay free.

On GPUs the worker takes what is left there once weights are loaded; the context is decided before, by the GPU's memory
as its driver tells it, less a tenth. A number that was named never changes: what cannot be is refused.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path

from alignedserve.architectures.families.generic import GenericConfig
from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.config.config import Config
from alignedserve.core import units_for
from alignedserve.errors import AlignedServeError, ArenaTooSmall, ConfigError, MemoryTooSmall
from alignedserve.machine.resources import threads_of_each
from alignedserve.sizing.capacity import Capacity, kv_mb, layout, least_pool_mb
from alignedserve.sizing.memory import (
    BATCH_SHARE,
    SHARE_LEFT,
    SHARED_RECORDS,
    FreeMemory,
    MemoryDemand,
    demand,
    lighter,
    maps_files,
    num_workers,
    too_much,
)

_MIB = 1 << 20
USUAL_TOKENS = 2048  # of a request beside the longest
LEAST_CONTEXT = 512  # a model that may say less is of no use
_ENOUGH = 5 << 30  # bytes of KV: its pool, two fifths of it, is filled in a second, and a next server finds memory
_OF_A_STEP = 0.25  # most of the memory beside weights that a step takes before it is made smaller
_LEAST_SEATS, _LEAST_STEP_TOKENS = 8, 64
_UNKNOWN = 2 << 30  # bytes for KV and the pool where the system does not tell what is free
_GPU_MARGIN = 0.1  # of what a GPU is thought to have left: libraries and fragments take some of it
_GPU_CACHES = 4  # the pool's memory in caches of GPUs: a machine has more memory than they
_GPU_CACHE_MB = 16_384  # assumed of a GPU whose driver tells nothing


@dataclass(frozen=True)
class _Rank:
    """One rank of a worker without KV, and the bytes of a token's KV there."""

    needs: MemoryDemand
    token: Fraction
    room: Capacity

    @classmethod
    def of(cls, config: Config, model: ModelConfig, folder: Path) -> _Rank:
        engine = replace(config.engine, kv_memory_mb=None)
        room = layout(config := replace(config, engine=engine), model)
        block = room.kv_bytes(model.share(engine.tensor_parallel_size), engine.block_size)
        return cls(demand(config, model, room, folder), Fraction(block, engine.block_size), room)


def with_sizes(config: Config, model: ModelConfig, folder: Path, free: FreeMemory) -> Config:
    """Return the config with a number for each size that was left open. Raise MemoryTooSmall, ArenaTooSmall or a
    ConfigError where no such number can be, or a named one cannot."""
    threads = config.engine.threads or threads_of_each(num_workers(config))
    config = _with_steps(config, model, folder, free)
    config = replace(config, engine=replace(config.engine, threads=threads))
    if not config.engine.on_gpu:
        config = _with_kv(config, model, folder, free)
    config = with_pool_memory(config, model, folder, free)
    return _with_context(config, model, folder, free)


def _with_steps(config: Config, model: ModelConfig, folder: Path, free: FreeMemory) -> Config:
    """Return the config with numbers for seats and tokens of a step, made smaller where memory is short."""
    engine = config.engine
    seats, tokens = engine.seats, engine.step_tokens
    least_seats = engine.max_batch or min(seats, _LEAST_SEATS)
    least_tokens = engine.max_step_tokens or min(tokens, max(least_seats, _LEAST_STEP_TOKENS))
    rank, workers = _Rank.of(config, model, folder), num_workers(config)
    if free.usable is not None and not engine.on_gpu:
        share, most = model.share(engine.tensor_parallel_size), free.usable // workers - rank.needs.weights
        while share.step_bytes(tokens, seats, rank.room.dtype) > _OF_A_STEP * most:
            if (seats, tokens) == (least_seats, least_tokens):
                break
            seats, tokens = max(least_seats, seats // 2), max(least_tokens, tokens // 2)
    return replace(config, engine=replace(engine, max_batch=seats, max_step_tokens=tokens))


def _with_kv(config: Config, model: ModelConfig, folder: Path, free: FreeMemory) -> Config:
    """Return the config with a device cache for CPUs."""
    if config.engine.kv_memory_mb is not None:
        return config
    rank = _Rank.of(config, model, folder)
    longest = rank.room.limits.least_held(rank.room.max_model_len)
    useful = tokens = min(config.engine.seats * longest, longest + config.engine.seats * USUAL_TOKENS)
    least = longest if config.engine.max_model_len else min(longest, LEAST_CONTEXT)
    if model.keeps_kv:  # else blocks stay unwritten and take nothing
        enough = max(_ENOUGH, (free.usable or 0) // 4 // num_workers(config))
        tokens = _tokens_within(config, model, rank, free, min(useful, max(longest, int(enough / rank.token))))
        if free.usable is None and not maps_files(config):
            tokens = max(tokens, least)
        if tokens < least:
            raise _too_small(config, model, folder, rank, free, tokens, least)
    surely = next(number for number in (useful, longest, least) if tokens >= number)
    cache_mb = max(kv_mb(config, rank.room, model, surely), _steady(int(tokens * rank.token) // _MIB))
    return replace(config, engine=replace(config.engine, kv_memory_mb=cache_mb))


def _steady(size_mb: int) -> int:
    """Return the next smaller of few sizes: starts of about the same free memory come to the same, so that a context
    does not change from day to day, nor the steps that a profile measures."""
    step = 1 << max(0, size_mb.bit_length() - 5)
    return size_mb // step * step


def _over(config: Config, rank: _Rank, free: FreeMemory, tokens: int, pool: int) -> int:
    """Return by how many bytes device caches of so many tokens with this pool exceed what may be used: below 0 they
    leave some."""
    workers, needs, cache = num_workers(config), rank.needs, ceil(rank.token * tokens)
    over = workers * cache + pool - _UNKNOWN
    if free.usable is not None:
        checkpoints = config.topology.decode_workers * config.engine.tensor_parallel_size
        checkpoints *= ceil(config.policy.block_use.on_host * cache)
        over = workers * replace(needs, cache=cache).total + checkpoints + pool - free.usable
    return max(over, workers * cache + pool + SHARED_RECORDS - free.shared) if maps_files(config) else over


def _tokens_within(config: Config, model: ModelConfig, rank: _Rank, free: FreeMemory, most: int) -> int:
    """Return how many tokens, at most these, each device cache may have beside its pool."""

    def over(tokens: int) -> int:
        return _over(config, rank, free, tokens, _in_pool(config, model, rank, free, tokens))

    return max(0, bisect_right(range(most + 1), 0, key=over) - 1)


def _in_pool(config: Config, model: ModelConfig, rank: _Rank, free: FreeMemory, tokens: int) -> int:
    """Return the bytes of a pool beside device caches of so many tokens: a batch of each decode worker, and where every
    request goes through it, the longest."""
    if config.kvpool.memory_mb is not None:
        return config.kvpool.memory_mb * _MIB
    least, token = _least_pool(config, model, LEAST_CONTEXT), config.engine.tensor_parallel_size * rank.token
    if not model.keeps_kv:
        return least
    batches = Fraction(str(BATCH_SHARE)) * config.topology.decode_workers * tokens
    wanted = ceil((batches + config.page_size) * token)  # whole pages
    if not config.topology.colocated:
        longest = rank.room.max_model_len
        wanted = max(wanted, ceil(tokens * token) if tokens < longest else _least_pool(config, model, longest))
    return max(least, min(units_for(wanted, _MIB) * _MIB, _most_shared(free)))


def _least_pool(config: Config, model: ModelConfig, context: int) -> int:
    """Return the bytes of a pool for requests of so many tokens, or of as many as are named."""
    context = config.engine.max_model_len or min(context, model.max_positions)
    return least_pool_mb(replace(config, engine=replace(config.engine, max_model_len=context)), model) * _MIB


def _most_shared(free: FreeMemory) -> int:
    """Return the most that the pool takes of shared memory: half, as others need some."""
    return max(0, free.shared - SHARED_RECORDS) // 2


def with_pool_memory(config: Config, model: ModelConfig, folder: Path, free: FreeMemory) -> Config:
    """Return the config with a pool for this machine, if none is named: the workers come first. Raise ArenaTooSmall
    where shared memory has no room for a request on its way."""
    if config.kvpool.memory_mb is not None:
        return config
    rank, least = _Rank.of(config, model, folder), _least_pool(config, model, LEAST_CONTEXT)
    if not config.topology.colocated and least > free.shared - SHARED_RECORDS:
        raise ArenaTooSmall(
            f"{config.kvpool.directory} has {free.shared // _MIB} MB free, and one request of"
            f" {min(config.engine.max_model_len or LEAST_CONTEXT, model.max_positions)} tokens takes"
            f" {least // _MIB} MB of the KV pool there: start the container with --shm-size="
            f"{2 * (least + SHARED_RECORDS) // _MIB}m or more, or serve --topology colocated, which needs no pool"
            " for that"
        )
    if config.engine.on_gpu:
        most = min(_most_shared(free), (free.available or free.shared) // 2)
        size = max(least, min(_beside_gpus(config, rank, free), most)) if model.keeps_kv else least
    else:
        tokens = int((config.engine.kv_memory_mb or 0) * _MIB / rank.token) if model.keeps_kv else 0
        size = _in_pool(config, model, rank, free, tokens)
        size = max(least, size - max(0, _over(config, rank, free, tokens, size)))
    if config.topology.colocated:
        size = min(size, _most_shared(free))  # which may be too little for any request
    return replace(config, kvpool=replace(config.kvpool, memory_mb=max(1, size // _MIB)))


def _beside_gpus(config: Config, rank: _Rank, free: FreeMemory) -> int:
    """Return the bytes of a pool beside GPUs, were there enough."""
    cache_mb = config.engine.kv_memory_mb or (_left_on_gpu(config, rank, free) or 0) // _MIB or _GPU_CACHE_MB
    return _GPU_CACHES * config.topology.decode_workers * config.engine.tensor_parallel_size * cache_mb * _MIB


def _left_on_gpu(config: Config, rank: _Rank, free: FreeMemory) -> int | None:
    """Return about how many bytes a GPU will have for KV; None where nobody can tell."""
    if free.gpu is None:
        return None
    left = free.gpu - rank.needs.weights - rank.needs.step - config.engine.gpu_reserve_mb * _MIB
    return left if left > 0 else None  # then its worker says what is to be done


def on_gpu(config: Config, model: ModelConfig, folder: Path, gpu: int | None) -> tuple[int, int]:
    """Return the bytes of a rank's weights, and about how many tokens of KV a GPU of so many bytes holds beside."""
    rank = _Rank.of(config, model, folder)
    left = _left_on_gpu(config, rank, FreeMemory(None, shared=0, gpu=gpu)) or 0
    return rank.needs.weights, int((1 - _GPU_MARGIN) * left / rank.token)


def _with_context(config: Config, model: ModelConfig, folder: Path, free: FreeMemory) -> Config:
    """Return the config with the longest context that fits, if none is named."""
    if config.engine.max_model_len is not None:
        return config
    left = None
    if config.engine.on_gpu and config.engine.kv_memory_mb is None:
        found = _left_on_gpu(config, _Rank.of(config, model, folder), free)
        left = None if found is None else int((1 - _GPU_MARGIN) * found)
    room = layout(config, model, left)
    longest, limits = room.max_model_len, room.limits
    is_known = config.engine.kv_memory_mb is not None or limits.num_tokens >= LEAST_CONTEXT  # else its worker says
    if is_known and limits.least_held(longest) > limits.num_tokens:
        longest = limits.num_tokens
    in_pool = room.num_pages * config.page_size
    if not config.topology.colocated and limits.least_held(longest) > in_pool:
        longest = in_pool
    if longest < min(LEAST_CONTEXT, model.max_positions):
        raise _named_too_small(config, model, room, free)
    return replace(config, engine=replace(config.engine, max_model_len=longest))


# --- What cannot be


def _too_small(
    config: Config, model: ModelConfig, folder: Path, rank: _Rank, free: FreeMemory, tokens: int, least: int
) -> AlignedServeError:
    """Return why not even the shortest context fits, or not the one that was named."""
    workers, least_mb, engine = num_workers(config), kv_mb(config, rank.room, model, least), config.engine
    if engine.max_model_len and tokens >= LEAST_CONTEXT:
        fits = tokens // config.engine.block_size * config.engine.block_size
        return ConfigError(
            f"--max-model-len {least} needs {least_mb} MB for KV in each worker, and {int(tokens * rank.token) // _MIB}"
            f" are free there of {(free.available or free.shared) // _MIB} MB, beside weights, steps and the KV pool:"
            f" lower --max-model-len to {fits}, or name more by --kv-memory-mb"
        )
    needs, pool = replace(rank.needs, cache=least_mb * _MIB), _in_pool(config, model, rank, free, least)
    if maps_files(config) and (shared := workers * needs.cache + pool + SHARED_RECORDS) > free.shared:
        return ArenaTooSmall(
            f"{config.kvpool.directory} has {free.shared // _MIB} MB free, and device caches with the KV pool take"
            f" {-(-shared // _MIB)} there with transport ipc: start the container with a larger --shm-size"
        )
    there, usable = "", free.usable or 0
    if free.available is not None:
        there = f" ({free.available // _MIB} are free, {SHARE_LEFT:.0%} stay for other programs)"
    what = too_much(config, needs, workers, pool, workers * needs.total + pool)
    advice = lighter(config, model, rank.room, folder, needs.cache, (usable - pool) // workers)
    if replace(needs, step=0).total <= (left := (usable - pool) // workers) and engine.step_tokens > _LEAST_STEP_TOKENS:
        share = 0.9 * (left - needs.weights - needs.cache) / needs.step  # seats take some of it too
        fits = max(1, int(share * engine.step_tokens) // _LEAST_STEP_TOKENS) * _LEAST_STEP_TOKENS
        seats = f", and --max-batch from {engine.seats}" if engine.seats > fits else ""
        advice = f"lower --max-step-tokens from {engine.step_tokens} to {fits}{seats}"
    for_pool = usable - workers * needs.total
    if (named := config.kvpool.memory_mb) is not None and for_pool >= _MIB:
        advice = f"lower --pool-memory-mb from {named} to {for_pool // _MIB}"
    return MemoryTooSmall(f"{usable // _MIB} MB of memory may be used{there}, {what}: {advice}")


def _named_too_small(config: Config, model: ModelConfig, room: Capacity, free: FreeMemory) -> ConfigError:
    """Return which number is too small for any context."""
    least, engine = min(LEAST_CONTEXT, model.max_positions), config.engine
    there = "" if free.available is None else f"; {free.available // _MIB} MB are free"
    if engine.kv_memory_mb is not None and room.limits.num_tokens < least:
        flag, given, needed = "--kv-memory-mb", engine.kv_memory_mb, kv_mb(config, room, model, least)
        held = room.limits.num_tokens
    else:
        flag, given = "--pool-memory-mb", config.kvpool.memory_mb
        held, needed = room.num_pages * config.page_size, _least_pool(config, model, LEAST_CONTEXT) // _MIB
    return ConfigError(f"{flag} {given} holds {held} tokens, too few for any use: {flag} {needed} holds {least}{there}")


# --- What is told


def told(
    asked: Config, config: Config, model: ModelConfig, room: Capacity, free: FreeMemory, longest: int | None = None
) -> list[str]:
    """Return a line for each size that was decided, with the flag that changes it. `longest` are the tokens of a text
    that becomes a vector, where the model's folder says how many."""
    engine, whole = config.engine, model.max_positions
    lines = []
    if isinstance(model, GenericConfig):
        lines.append(f"model: transformers runs {model.architecture}; models with a module of ours are faster")
    if longest is not None and longest < room.max_model_len and not model.generates:
        lines.append(f"context: {longest:,} tokens of a text, as the model's folder says")
    elif room.max_model_len < whole:
        named = asked.engine.max_model_len is not None
        flags = "--max-model-len" if named or engine.on_gpu else "--max-model-len, --kv-memory-mb"
        lines.append(f"context: {room.max_model_len:,} of the model's {whole:,} tokens ({flags})")
    else:
        lines.append(f"context: {whole:,} tokens, all that the model has (--max-model-len)")
    if engine.kv_memory_mb is not None and model.keeps_kv:
        there = "" if free.available is None or engine.on_gpu else f" of {free.available // _MIB:,} MB free"
        each = f" on each of {num_workers(config)} workers" if num_workers(config) > 1 else ""
        lines.append(
            f"kv: {engine.kv_memory_mb:,} MB{there} for {room.limits.num_tokens:,} tokens{each} (--kv-memory-mb)"
        )
    elif engine.on_gpu:
        lines.append("kv: what a GPU has left beside the weights (--kv-memory-mb, --gpu-reserve-mb)")
    lines.append(f"pool: {config.kvpool.memory_mb:,} MB of shared memory (--pool-memory-mb)")
    lines.append(
        f"steps: up to {engine.seats} requests and {room.limits.max_step_tokens:,} tokens on {engine.threads}"
        f" thread{'s' * (engine.threads != 1)} (--max-batch, --max-step-tokens, --threads)"
    )
    return lines
