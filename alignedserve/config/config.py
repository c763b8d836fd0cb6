"""The configuration: one frozen tree of settings, layered by who consumes them."""

# ruff: noqa: RUF009  (what it takes for shared defaults are fields, made by `setting`)

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from alignedserve.config.presets import DEFAULT, preset
from alignedserve.config.setting import PREFIX, Setting, is_section, leaves, setting, settings_of
from alignedserve.config.sources import read_environment, read_flags, read_tree, read_value, read_yaml
from alignedserve.config.topology import Range, Topology
from alignedserve.core import Role
from alignedserve.errors import ConfigError
from alignedserve.scheduling.levels import AGE_S
from alignedserve.scheduling.policy import (
    Cache,
    Choice,
    Chunking,
    Compression,
    Entries,
    Grouping,
    Layout,
    Order,
    Packing,
    Policy,
    Predictor,
    Room,
)
from alignedserve.scheduling.slo import Late


class Launcher(str, Enum):
    LOCAL = "local"
    RAY = "ray"


class TransportName(str, Enum):
    AUTO = "auto"  # the best that is there (transport/choice.py)
    HOST = "host"
    COLLECTIVE = "collective"
    IPC = "ipc"


class Dtype(str, Enum):
    AUTO = "auto"  # the one that the model folder names
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class DeviceKind(str, Enum):
    CPU = "cpu"
    CUDA = "cuda"


class Graphs(str, Enum):
    """Whether decode steps are captured once, and replayed."""

    AUTO = "auto"  # where the device and the model allow it
    ON = "on"  # or the start is refused
    OFF = "off"


class LookAhead(str, Enum):
    """Steps that are planned while the one before runs."""

    AUTO = "auto"  # one on a GPU
    NONE = "0"
    ONE = "1"


class LogLevel(str, Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(str, Enum):
    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True)
class ServerConfig:
    """For the gateway."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for every one of this machine")
    port: int = setting(8000, "port to listen on; 0 for any that is free", least=0, most=65_535)
    api_key: str | None = setting(
        None, f"key that clients must send; in {PREFIX}SERVER_API_KEY no other user can see it", secret=True
    )
    body_limit_mb: int = setting(4, "largest request body, in MB", least=1)
    drain_s: float = setting(30.0, "how long open requests may go on after a stop, in seconds", least=0)
    max_open: int = setting(1024, "most requests that are open at once; more are refused with 429", least=1)
    max_rt_queue: int = setting(512, "most chats that wait for their prompts to run; more are refused", least=1)
    max_rt_queue_tokens: int = setting(1_000_000, "most tokens of the prompts of such chats", least=1)
    max_be_queue: int = setting(1024, "most best-effort requests that wait so; more are refused", least=1)
    max_be_queue_tokens: int = setting(4_000_000, "most tokens of their prompts", least=1)
    keys_file: str | None = setting(None, "YAML file with the hashes of keys, which `alignedserve key` writes")
    allow_anonymous: bool = setting(False, "serve without keys at an address that others can reach")
    most_open_per_key: int = setting(
        256, "most requests for tokens that a key has open at once, where its entry names no number", least=1
    )
    max_connections: int = setting(4096, "most connections of a gateway, as far as its open files go", least=1)
    gateways: int = setting(1, "processes that serve HTTP, behind one address", least=1, most=64)
    cors_origins: str | None = setting(
        None, "origins, with commas between, whose pages may call from a browser; * for all; none by default"
    )
    tls_cert: str | None = setting(None, "certificate chain in PEM, to serve HTTPS")
    tls_key: str | None = setting(None, "its key in PEM, without a password; in the certificate's file by default")


CPU_CACHE_MB = 512


@dataclass(frozen=True)
class EngineConfig:
    """For the workers."""

    device: DeviceKind = setting(
        DeviceKind.CPU, "where workers compute: the CPU, or GPUs, on which it has not been run yet"
    )
    dtype: Dtype = setting(Dtype.AUTO, "type of weights and KV; auto takes the model's own")
    max_model_len: int | None = setting(None, "most tokens of prompt and output; the model's own by default", least=1)
    block_size: int = setting(16, "tokens in a device block", least=1)
    kv_memory_mb: int | None = setting(
        None,
        f"memory of a worker's device cache, in MB; by default {CPU_CACHE_MB}, on a GPU all that is left there",
        least=1,
    )
    gpu_reserve_mb: int = setting(
        1024, "memory of a GPU that nobody plans with: for its libraries, graphs and fragments, in MB", least=0
    )
    max_step_tokens: int = setting(512, "most tokens in one step", least=1, aliases=("--max-num-batched-tokens",))
    max_batch: int = setting(64, "most requests in one step", least=1, aliases=("--max-num-seqs",))
    threads: int | None = setting(None, "compute threads of a worker; by default what the cores allow", least=1)
    tune_s: float = setting(
        0.4, "seconds at start for measuring which way each linear layer is fastest; 0 takes the usual ones", least=0
    )
    cuda_graphs: Graphs = setting(
        Graphs.AUTO, "decode steps on a GPU are captured once for each of some sizes, and replayed"
    )
    look_ahead: LookAhead = setting(
        LookAhead.AUTO, "decode steps that are planned while the one before runs: auto is 1 on a GPU, 0 on a CPU"
    )
    profile_s: float = setting(
        10.0, "most seconds that a first start measures steps for; later ones find that in the cache; 0: never", least=0
    )
    profile_cache: str | None = setting(None, "folder for what was measured; $XDG_CACHE_HOME/alignedserve by default")
    tensor_parallel_size: int = setting(
        1, "ranks that share the model in each worker: processes, each with its own GPU if there are any", least=1
    )

    @property
    def cache_mb(self) -> int | None:
        """Of a worker's device cache; None is what its GPU has left."""
        return CPU_CACHE_MB if self.kv_memory_mb is None and self.device is DeviceKind.CPU else self.kv_memory_mb

    def steps_ahead(self, policy: Policy) -> int:
        """Of a decode worker."""
        if self.look_ahead is not LookAhead.AUTO:
            return int(self.look_ahead.value)
        return int(self.device is DeviceKind.CUDA and policy.pairs.why_not_ahead is None)


@dataclass(frozen=True)
class PoolConfig:
    """For the KV pool and those who read and write its pages."""

    memory_mb: int = setting(256, "memory of the KV pool in /dev/shm, in MB", least=1)
    page_size: int = setting(64, "tokens in a page; a multiple of the block size", least=1)
    verify_pages: bool = setting(False, "check each page's bytes when it is read")
    compression: Compression = setting(
        Compression.OFF, "int8 for full pages of requests that wait: none, those with longest to wait, or all"
    )
    entries: Entries = setting(
        Entries.KV, "what the pool keeps of a prompt: its KV, or hidden vectors, of which KV is made when it joins"
    )
    directory: str = setting("/dev/shm", "directory in shared memory for the KV pool")
    rt_reserve: float = setting(
        0.1, "share of the KV pool that best-effort requests never get: there is room for chats", least=0, most=0.9
    )


@dataclass(frozen=True)
class WireConfig:
    """For the messages between processes."""

    max_frame_mb: int = setting(64, "largest frame, in MB", least=1)
    heartbeat_s: float = setting(0.5, "time between two heartbeats, in seconds", above=0)
    death_s: float = setting(3.0, "silence after which a process counts as dead, in seconds", above=0)
    transfer_timeout_s: float = setting(
        10.0, "how long a worker waits for the other end of a transfer of KV, in seconds", above=0
    )


@dataclass(frozen=True)
class SloConfig:
    """What requests are promised where they name nothing."""

    ttft_ms: float = setting(1000.0, "time to a chat's first token, in ms", above=0)
    tbt_ms: float = setting(187.5, "time between two tokens of a chat, in ms; the default is reading speed", above=0)
    flex_jct_s: float = setting(600.0, "completion window of service_tier flex, in seconds", above=0)
    priority_factor: float = setting(0.5, "what service_tier priority makes of ttft and tbt: times this", above=0)


@dataclass(frozen=True)
class ScheduleConfig:
    """For whoever decides who goes first: workers and the KV pool."""

    order: Order = setting(Order.SLACK, "who goes first: the most urgent promise, the first that came, or the shortest")
    chunking: Chunking = setting(
        Chunking.SLO,
        "prompts of a step: whole and alone, or beside decodes, as many as are fixed or as there is time for",
    )
    selection: Choice = setting(
        Choice.MULTI_RESOURCE, "prompts that are not urgent run in order, or as they best fill time and memory together"
    )
    room: Room = setting(
        Room.GROWING,
        "device memory for the longest output or the predicted one at once, block by block (some may leave), or chunk "
        "by chunk",
    )
    grouping: Grouping = setting(
        Grouping.ALIGNED, "who decodes together: requests of about one length, or who is next, whatever its length"
    )
    packing: Packing = setting(
        Packing.RT_BE, "who of those with memory on a decode worker runs in a step, and who leaves for want of it"
    )
    reuse: bool = setting(True, "KV of prompts that begin alike is computed once, while the pool has room for it")
    late: Late = setting(
        Late.DECAY, "a chat that has missed a deadline gets later ones, goes behind all others, or keeps its place"
    )
    token_group: int = setting(1, "tokens of a chat that are due together", least=1)
    predictor: Predictor = setting(
        Predictor.HASH, "who predicts lengths of outputs: nobody, a constant, past prompts by their tokens or meaning"
    )
    predictor_cache: str | None = setting(
        None, "folder for lengths of past outputs, for the next start; $XDG_CACHE_HOME/alignedserve by default"
    )
    expected_output: int = setting(256, "tokens that a request is taken to produce until that is predicted", least=1)
    age_s: float = setting(AGE_S, "seconds unserved after which a best-effort request rises a level", above=0)
    window_s: float = setting(0.75, "seconds of slack within which multi_resource chooses", least=0)
    long_prompt: int = setting(4096, "with slo chunking, prompts of so many tokens start one at a time", least=1)
    budget_pivots: float = setting(
        4.0, "most prompt tokens of a step with slo chunking, times those that saturate the hardware", above=0
    )
    as_in_paper: bool = setting(False, "AccelGen's own budget, slack and distance, to compare with")
    blocks: Layout = setting(
        Layout.PLAIN, "device blocks hold one request's tokens, or a chat's from the left and another's from the right"
    )
    cache: Cache = setting(
        Cache.KV, "device memory holds KV, or for who has waited long hidden vectors: half of it, and time in each step"
    )
    reserve: int = setting(
        0, "with room whole, least tokens of memory for a request, even if it may say less (Orca)", least=0
    )
    waiting_ratio: float = setting(
        0.0, "with chunking none, waiting prompts for each decode before those are interrupted; 0: any (TGI)", least=0
    )
    pinning: bool = setting(True, "chats that cannot wait in the KV pool go straight to a decode worker")
    evict: bool = setting(True, "who has to leave a device keeps its KV elsewhere; otherwise it is computed anew")
    prefetch: bool = setting(
        True, "prefill workers that can send KV hold that of the next batch and of who had to leave"
    )
    candidate_share: float = setting(
        0.3,
        "most of a prefill worker's device cache that KV of the next batch, and of who had to leave, has",
        least=0,
        most=1,
    )
    helps: bool = setting(True, "decode workers take prompts of chats while those pile up before prefill workers")
    refuse_ttfts: float = setting(
        3.0, "chats are refused whose first token is predicted later than so many times their ttft; 0: none", least=0
    )
    checkpoints: float = setting(
        1.0, "with bidirectional blocks, memory for tokens that chats displace, as a share of the device's", least=0
    )


@dataclass(frozen=True)
class RayConfig:
    """For the launcher on a Ray cluster."""

    address: str | None = setting(
        None, "Ray cluster whose nodes the parts are started on, such as auto; by default a Ray of this machine alone"
    )
    gpus_per_worker: float = setting(
        0.0, "GPUs that Ray gives each rank of a worker; 0.5 where two workers share one", least=0
    )
    place_s: float = setting(60.0, "how long a part may wait for a place before that is said, in seconds", above=0)
    cluster_file: str | None = setting(
        None, "what `ray up` was given: nodes of its types are asked for, while those that are there have no room"
    )


@dataclass(frozen=True)
class ScaleConfig:
    """For the router, which asks for as many workers as the load takes; `alignedserve scale` asks for others."""

    prefill: Range | None = setting(
        None, "as many prefill workers as the load takes, between two numbers such as 1-4; by default they stay"
    )
    decode: Range | None = setting(
        None, "as many decode workers as the load takes, between two numbers such as 1-4; by default they stay"
    )
    grow_after_s: float = setting(
        3.0, "how long workers are to be short of what was promised before there are more, in seconds", above=0
    )
    shrink_after_s: float = setting(300.0, "how long one less is to be enough before there is one less", above=0)
    be_wait_s: float = setting(
        60.0, "how long best-effort requests may wait, as predicted, before there are more workers for them", above=0
    )

    @property
    def ranges(self) -> dict[Role, Range]:
        """Of the roles whose workers come and go with the load."""
        named = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {role: one for role, one in named.items() if one is not None}


@dataclass(frozen=True)
class JobsConfig:
    """For files and batch jobs: the gateway and the job runner."""

    store: str = setting("sqlite", "where jobs are kept: sqlite, a redis:// URL, or off for no files and batches")
    directory: str | None = setting(None, "data folder of sqlite and files; $XDG_DATA_HOME/alignedserve by default")
    files: str | None = setting(
        None, "URL of the files' bytes as fsspec has them; a folder in the data folder by default"
    )
    key_prefix: str = setting("alignedserve", "what all keys in Redis begin with")
    file_limit_mb: int = setting(200, "largest file, in MB", least=1)
    most_lines: int = setting(50_000, "most requests in the file of a batch", least=1)
    quota_mb: int = setting(10_000, "most that the files of one API key may take, in MB", least=1)
    most_files: int = setting(10_000, "most files of one API key", least=1)
    most_unfinished: int = setting(100, "most batches of one API key that have not ended", least=1)
    keep_days: float = setting(
        30.0,
        "days after which files expire where their clients have not said when, and batches that have ended",
        above=0,
        most=36_525,
    )
    most_open: int = setting(256, "most lines of batches that run or wait for a worker at once", least=1)
    retries: int = setting(5, "how often a line is tried again after a failure that may pass", least=0)

    @property
    def keep_s(self) -> int:
        return int(self.keep_days * 86_400)


@dataclass(frozen=True)
class LogConfig:
    """For every process."""

    level: LogLevel = setting(LogLevel.INFO, "least severe level that is logged")
    format: LogFormat = setting(LogFormat.TEXT, "text for people, json for machines")


@dataclass(frozen=True)
class Config:
    preset: str = setting(DEFAULT, "settings in place of the defaults, by one name: `alignedserve presets` lists them")
    model: str = setting("demo", "model folder, hub id such as org/name, or demo")
    served_model_name: str | None = setting(None, "name of the model in the API; by default as it was given")
    topology: Topology = setting(Topology(), "colocated, 2xcolocated, or prefill+decode workers such as 1+1")
    transport: TransportName = setting(
        TransportName.AUTO,
        "how KV goes from worker to worker: through the KV pool, or directly by torch.distributed or mapped memory",
    )
    launcher: Launcher = setting(Launcher.LOCAL, "what starts the processes")
    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    kvpool: PoolConfig = field(default_factory=PoolConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    jobs: JobsConfig = field(default_factory=JobsConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        for path, value in leaves(self):
            problem = settings()[path].problem(value)
            if problem:
                raise ConfigError(f"{path} {problem}")
        _check_together(self)

    @property
    def why_host(self) -> str | None:
        """Why KV goes through the pool, whatever else a machine has; None where it may go directly."""
        return self.policy.pairs.why_not_direct

    @property
    def policy(self) -> Policy:
        one, chunk = self.schedule, self.engine.max_step_tokens
        return Policy(
            order=one.order,
            chunking=one.chunking,
            selection=one.selection,
            room=one.room,
            grouping=one.grouping,
            packing=one.packing,
            reuse=one.reuse,
            late=one.late,
            token_group=one.token_group,
            expected_output=one.expected_output,
            predictor=one.predictor,
            age_s=one.age_s,
            window_s=one.window_s,
            long_prompt=one.long_prompt,
            budget_pivots=one.budget_pivots,
            as_in_paper=one.as_in_paper,
            blocks=one.blocks,
            cache=one.cache,
            reserve=one.reserve,
            waiting_ratio=one.waiting_ratio,
            pinning=one.pinning,
            evict=one.evict,
            prefetch=one.prefetch,
            candidate_share=one.candidate_share,
            helps=one.helps,
            refuse_ttfts=one.refuse_ttfts,
            checkpoints=one.checkpoints,
            expected_chunk=chunk,
            compression=self.kvpool.compression,
            entries=self.kvpool.entries,
            rt_reserve=self.kvpool.rt_reserve,
        )


def _check_together(config: Config) -> None:
    """What a single setting cannot know."""
    engine, page_size, wire = config.engine, config.kvpool.page_size, config.wire
    if page_size % engine.block_size:
        raise ConfigError(
            f"kvpool.page_size must be a multiple of engine.block_size {engine.block_size}, not {page_size}"
        )
    if engine.max_step_tokens < engine.max_batch:
        raise ConfigError(
            f"engine.max_step_tokens must be at least engine.max_batch {engine.max_batch}, "
            f"not {engine.max_step_tokens}: each request of a step takes a token"
        )
    pool = config.kvpool
    if pool.entries is Entries.HIDDEN and pool.compression is not Compression.OFF:
        raise ConfigError(
            f"kvpool.compression {pool.compression.value} is for KV, not for kvpool.entries hidden: set one of the two"
        )
    if config.policy.problem is not None:
        raise ConfigError(f"schedule: {config.policy.problem}")
    if engine.look_ahead is LookAhead.ONE and config.policy.pairs.why_not_ahead is not None:
        raise ConfigError(f"engine.look_ahead cannot be 1: {config.policy.pairs.why_not_ahead}: set it to 0")
    if engine.cuda_graphs is Graphs.ON and engine.device is not DeviceKind.CUDA:
        raise ConfigError(
            f"engine.cuda_graphs on needs engine.device cuda, not {engine.device.value}: set it to auto or off"
        )
    if config.schedule.predictor is Predictor.ORACLE:
        raise ConfigError("schedule.predictor oracle is the simulator's, which knows all lengths: set hash, or minilm")
    if wire.death_s <= wire.heartbeat_s:
        raise ConfigError(f"wire.death_s must be more than wire.heartbeat_s {wire.heartbeat_s}, not {wire.death_s}")
    if config.topology.colocated and config.transport not in (TransportName.AUTO, TransportName.HOST):
        raise ConfigError(
            f"transport {config.transport.value} is between prefill and decode workers: topology "
            f"{config.topology} has no prefill workers"
        )
    if config.policy.pairs.why_not_direct is not None and config.transport not in (
        TransportName.AUTO,
        TransportName.HOST,
    ):
        raise ConfigError(
            f"transport {config.transport.value} brings KV to pairs that nobody else is in: "
            "schedule.blocks bidirectional needs host"
        )
    if config.transport is TransportName.IPC and config.ray.address is not None:
        raise ConfigError("transport ipc is within one machine: with ray.address it is collective, or host")
    if engine.tensor_parallel_size > 1 and 0 < config.ray.gpus_per_worker < 1:
        raise ConfigError(
            f"ray.gpus_per_worker is of each rank, and NCCL refuses two on one GPU: with engine.tensor_parallel_size "
            f"{engine.tensor_parallel_size} it is 1, or 0 on CPUs, not {config.ray.gpus_per_worker:g}"
        )
    _check_scale(config)
    if config.ray.address is not None and config.launcher is not Launcher.RAY:
        raise ConfigError("ray.address is for launcher ray: set that too, or neither")
    if config.ray.address is None and config.ray != RayConfig():
        raise ConfigError("ray: its settings are for the nodes of a cluster: set ray.address too, or none of them")
    if not re.match(r"(sqlite|off)$|rediss?://|unix://", config.jobs.store):
        raise ConfigError(
            f"jobs.store must be sqlite, off, or a URL that begins with redis://, not {config.jobs.store!r:.40}"
        )


def _check_scale(config: Config) -> None:
    scale, topology = config.scale, config.topology
    if topology.colocated and scale.prefill is not None:
        raise ConfigError(f"scale.prefill is for prefill workers, and topology {topology} has none: set scale.decode")
    for name, between, count in (
        ("prefill", scale.prefill, topology.prefill_workers),
        ("decode", scale.decode, topology.decode_workers),
    ):
        if between is not None and count not in between:
            raise ConfigError(f"scale.{name} {between}: topology {topology} begins with {count}, which is not in that")


@cache
def settings() -> dict[str, Setting]:
    """Every setting, by its path."""
    return {one.path: one for one in settings_of(Config)}


def load(flags: Mapping[str, Any], env: Mapping[str, str], path: Path | None) -> Config:
    """The configuration that these sources give together: a flag outweighs a variable, a variable the file, and
    the file the preset that any of them names.

    `flags` are by path, as text or of the setting's type; those that were not given are not in it.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values |= read_tree(read_yaml(path), str(path), settings())
    values |= read_environment(env, settings())
    values |= read_flags(flags, settings())
    return of_preset(values.get("preset", DEFAULT), values)


def of_preset(name: str, values: Mapping[str, Any], least: Mapping[str, Any] | None = None) -> Config:
    """What the preset says stands in place of the defaults, or of `least`; these values, by path, outweigh it."""
    return _build({**(least or {}), **_options_of(name), **values, "preset": name})


def _options_of(name: str) -> dict[str, Any]:
    said = preset(name).options
    return {path: read_value(settings()[path], value, f"preset {name}: {path}") for path, value in said.items()}


def parse(tree: Mapping[str, Any]) -> Config:
    """The inverse of `dump`: a configuration from nested plain values."""
    return _build(read_tree(tree, "configuration", settings()))


def dump(config: Config) -> dict[str, Any]:
    """Nested plain values, fit for JSON and YAML. Secrets are among them."""
    tree: dict[str, Any] = {}
    for path, value in leaves(config):
        section, _, name = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = _plain(value)
    return tree


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Topology | Range) else value


def _build(values: Mapping[str, Any]) -> Config:
    parts = {
        section: part(**{path.split(".")[1]: value for path, value in values.items() if path.startswith(f"{section}.")})
        for section, part in _sections().items()
    }
    return Config(**parts, **{path: value for path, value in values.items() if "." not in path})


@cache
def _sections() -> dict[str, type]:
    hints = get_type_hints(Config)
    return {one.name: hints[one.name] for one in fields(Config) if is_section(one)}
