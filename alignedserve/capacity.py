"""How far the memory that was given goes: pairs, pages and the longest request."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.config import Config, Dtype
from alignedserve.errors import ConfigError
from alignedserve.model_config import ModelConfig
from alignedserve.running import WorkerLimits

_MIB = 1 << 20


@dataclass(frozen=True)
class Capacity:
    dtype: str  # of weights and KV
    max_model_len: int
    num_pages: int
    page_bytes: int
    limits: WorkerLimits


def capacity(config: Config, model: ModelConfig) -> Capacity:
    engine, pool = config.engine, config.kvpool
    dtype = model.dtype if engine.dtype is Dtype.AUTO else engine.dtype.value
    longest = min(engine.max_model_len or model.max_positions, model.max_positions)
    if engine.max_model_len and engine.max_model_len > model.max_positions:
        raise ConfigError(f"engine.max_model_len {engine.max_model_len} exceeds the model's {model.max_positions}")
    num_pairs = engine.kv_memory_mb * _MIB // model.kv_bytes(engine.block_size, dtype)
    page_bytes = model.kv_bytes(pool.page_size, dtype)
    num_pages = pool.memory_mb * _MIB // page_bytes
    _holds_longest("engine.kv_memory_mb", engine.kv_memory_mb, num_pairs * engine.block_size, longest)
    if not config.topology.colocated:
        _holds_longest("kvpool.memory_mb", pool.memory_mb, num_pages * pool.page_size, longest)
        _holds_longest_beside_reserve(config, num_pages, longest)
    limits = WorkerLimits(num_pairs, engine.block_size, pool.page_size, engine.max_step_tokens, engine.max_batch)
    return Capacity(dtype, longest, num_pages, page_bytes, limits)


def _holds_longest(path: str, given_mb: int, tokens: int, longest: int) -> None:
    """Otherwise a long request would be accepted and wait for ever."""
    if tokens < longest:
        shorter = f", or lower engine.max_model_len to {tokens}" if tokens else ""
        raise ConfigError(
            f"{path} {given_mb} holds {tokens} tokens, one request may have {longest}: raise {path}{shorter}"
        )


def _holds_longest_beside_reserve(config: Config, num_pages: int, longest: int) -> None:
    """Otherwise a long best-effort request would."""
    pool, left = config.kvpool, num_pages - config.policy.reserved(num_pages)
    if left * pool.page_size < longest:
        raise ConfigError(
            f"kvpool.memory_mb {pool.memory_mb} less kvpool.rt_reserve {pool.rt_reserve:g} holds"
            f" {left * pool.page_size} tokens, one request may have {longest}: raise kvpool.memory_mb,"
            " or lower kvpool.rt_reserve"
        )
