"""Compute how many blocks and pages the given memory holds, and the longest request."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.architectures.vectors import most_in_step
from alignedserve.config.choices import Dtype
from alignedserve.config.config import Config
from alignedserve.core import WorkerLimits, units_for
from alignedserve.errors import ConfigError
from alignedserve.protocol.extents import TOGETHER, Extents, PageBytes
from alignedserve.protocol.int8_layout import Int8Layout
from alignedserve.scheduling.form_rules import Compression
from alignedserve.sizing.model_folder import check_dummy

_MIB = 1 << 20


@dataclass(frozen=True)
class Capacity:
    dtype: str  # that the model computes in
    kv_dtype: KvDtype
    max_model_len: int
    extents: Extents  # of the pool
    sizes: PageBytes  # of its pages
    limits: WorkerLimits

    @property
    def num_pages(self) -> int:
        """Return the number of pages at the size in which requests are stored."""
        return self.extents.num_pages(self.extents.first_kind)

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page on one rank."""
        return self.sizes.payload(self.extents.first_kind)

    def cache_bytes(self, model: ModelConfig) -> int:
        """Return the bytes of the device cache of a rank that has this share of the model."""
        return self.kv_bytes(model, self.limits.num_blocks * self.limits.block_size)

    def kv_bytes(self, model: ModelConfig, tokens: int) -> int:
        """Return the bytes of the KV of `tokens` tokens."""
        return model.kv_bytes(tokens, self.dtype, self.kv_dtype)


def capacity(config: Config, model: ModelConfig, left: int | None = None) -> Capacity:
    """Return the capacity of each worker, or of each rank where ranks share a model and each holds a share; raise a
    ConfigError where the longest request does not fit.

    Where the device cache takes what a GPU has left, only the worker knows its size: `left`, in bytes, once its weights
    are loaded. Every other process sees no blocks.
    """
    room, engine = layout(config, model, left), config.engine
    limits, longest = room.limits, room.max_model_len
    held = limits.least_held(longest)  # at once, by the longest request
    if engine.kv_memory_mb is not None:
        needed_mb = kv_mb(config, room, model, held)
        _holds_longest("--kv-memory-mb", engine.kv_memory_mb, limits.num_tokens, held, needed_mb)
    elif left is not None and limits.num_tokens < held:
        raise ConfigError(
            f"{left // _MIB} MB are left for KV on this GPU, which hold {limits.num_tokens} tokens, one request may"
            f" have {held}: lower --max-model-len to {limits.num_tokens}"
        )
    if not config.topology.colocated and (given_mb := config.kvpool.memory_mb) is not None:
        tokens = room.num_pages * config.page_size
        _holds_longest("--pool-memory-mb", given_mb, tokens, held, least_pool_mb(config, model))
    return room


def layout(config: Config, model: ModelConfig, left: int | None = None) -> Capacity:
    """Return the capacity, whether or not the longest request fits. A cache whose size nobody has decided yet has no
    blocks, and such a pool the fewest pages."""
    engine, pool = config.engine, config.kvpool
    dtype = _dtype(config, model)
    if model.stored is not None:
        model.stored.check(engine.quantization)
    check_dummy(config, model)
    longest = min(engine.max_model_len or model.max_positions, model.max_positions)
    if engine.max_model_len and engine.max_model_len > model.max_positions:
        raise ConfigError(f"--max-model-len {engine.max_model_len} exceeds the model's {model.max_positions}")
    ranks = engine.tensor_parallel_size
    whole, model = model, model.share(ranks)
    if config.policy.block_use.keeps_hidden and model.why_not_hidden is not None:
        raise ConfigError(f"schedule.memory cannot be hybrid: {model.why_not_hidden}: set it to plain")
    if engine.kv_dtype is KvDtype.INT8 and model.why_not_int8 is not None:
        raise ConfigError(f"engine.kv_dtype cannot be int8: {model.why_not_int8}: set it to auto")
    pool_mb = pool.memory_mb or least_pool_mb(config, whole)
    cache = engine.kv_memory_mb * _MIB if engine.kv_memory_mb is not None else left or 0
    num_blocks = cache // model.kv_bytes(engine.block_size, dtype, engine.kv_dtype)
    reach = model.reach if config.policy.drops else None
    layers = model.fold if config.policy.drops else None
    fold = None if layers is None else layers.fold
    step_tokens = most_in_step(model, engine.step_tokens)
    limits = WorkerLimits(num_blocks, engine.block_size, config.page_size, step_tokens, engine.seats, reach, fold)
    sizes = _page_bytes(config, model, dtype)
    extents = sizes.divide(pool_mb * _MIB // ranks // sizes.kv)
    return Capacity(dtype, engine.kv_dtype, longest, extents, sizes, limits)


def kv_mb(config: Config, room: Capacity, model: ModelConfig, tokens: int) -> int:
    """Return the memory that a device cache of `tokens` tokens needs, in MB."""
    engine = config.engine
    of_block = room.kv_bytes(model.share(engine.tensor_parallel_size), engine.block_size)
    return units_for(units_for(tokens, engine.block_size) * of_block, _MIB)


def least_pool_mb(config: Config, model: ModelConfig) -> int:
    """Return the least memory of a pool: it has pages for the longest request where requests go through the pool."""
    tokens = config.page_size
    if not config.topology.colocated:
        tokens += min(config.engine.max_model_len or model.max_positions, model.max_positions)
    pages = units_for(tokens, config.page_size) + TOGETHER
    return units_for(pages * model.kv_bytes(config.page_size, _dtype(config, model), config.engine.kv_dtype), _MIB)


def _dtype(config: Config, model: ModelConfig) -> str:
    return model.dtype if config.engine.dtype is Dtype.AUTO else config.engine.dtype.value


def _page_bytes(config: Config, model: ModelConfig, dtype: str) -> PageBytes:
    """Return the bytes of a page for what the pool keeps."""
    pool, tokens = config.kvpool, config.page_size
    compressed = pool.compression is not Compression.OFF
    int8 = Int8Layout(2 * model.num_layers * model.kv_dim, tokens).size if compressed else 0
    return PageBytes(model.kv_bytes(tokens, dtype, config.engine.kv_dtype), int8)


def _holds_longest(flag: str, given_mb: int, tokens: int, longest: int, needed_mb: int) -> None:
    """Refuse memory that the longest request does not fit in: that request would be accepted and wait for ever."""
    if tokens < longest:
        shorter = f", or lower --max-model-len to {tokens}" if tokens else ""
        raise ConfigError(
            f"{flag} {given_mb} holds {tokens} tokens, but one request may have {longest}: {flag} {needed_mb} does"
            f"{shorter}"
        )
