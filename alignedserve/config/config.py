"""The configuration of a deployment: one frozen tree of settings, layered by the parts that read them.

Every setting is declared once, here: type, default, range, help text, and how it is reached (setting.py). What
only presets and experiments change is declared here too; numbers that nothing changes stand beside their formula.
"""

# ruff: noqa: RUF009  (what it takes for shared defaults are fields, made by `setting`)

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.architectures.quantization import Quantization
from alignedserve.config.lora import LoraFolders
from alignedserve.config.presets import DEFAULT, preset
from alignedserve.config.setting import (
    PREFIX,
    Reach,
    Setting,
    common,
    experiment,
    is_section,
    leaves,
    setting,
    settings_of,
)
from alignedserve.config.sources import read_environment, read_flags, read_tree, read_value, read_yaml
from alignedserve.config.topology import Range, Topology
from alignedserve.core import Role
from alignedserve.errors import ConfigError
from alignedserve.policies.guard import OwnPolicies
from alignedserve.policies.source import PolicySource, check
from alignedserve.scheduling.policy import (
    DEFAULT_POLICY,
    Cache,
    Chunking,
    Compression,
    Grouping,
    Handoff,
    Layout,
    Order,
    Packing,
    Policy,
    Predictor,
    PromptChoice,
    Room,
)
from alignedserve.scheduling.slo import Late
from alignedserve.text.calls.formats import NAMES as CALL_FORMATS
from alignedserve.text.reasoning.families import AUTO, CHOICES


class Launcher(str, Enum):
    LOCAL = "local"
    RAY = "ray"


class TransportName(str, Enum):
    AUTO = "auto"  # the best transport that the machines have (transport/opening.py)
    HOST = "host"
    COLLECTIVE = "collective"
    IPC = "ipc"


class Dtype(str, Enum):
    AUTO = "auto"  # the type that the model folder names
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class DeviceKind(str, Enum):
    AUTO = "auto"  # GPUs that torch sees, else the CPU (machine/accelerator.py)
    CPU = "cpu"
    CUDA = "cuda"


class LoadFormat(str, Enum):
    AUTO = "auto"  # the model folder's weights, by the format of its files
    DUMMY = "dummy"  # random weights of its config.json: answers are nonsense, times are real


class Graphs(str, Enum):
    """The choice of whether decode steps are captured as CUDA graphs and replayed."""

    AUTO = "auto"  # where the device and the model allow it
    ON = "on"  # the start is refused where they do not
    OFF = "off"


class LookAhead(str, Enum):
    """The number of steps that are planned while the step before them runs."""

    AUTO = "auto"  # one on a GPU, none on a CPU
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


class MetricsPrefix(str, Enum):
    ALIGNEDSERVE = "alignedserve"
    VLLM = "vllm"


@dataclass(frozen=True)
class ServerConfig:
    """The gateway: its address, keys and limits."""

    host: str = common("127.0.0.1", "address to listen on; 0.0.0.0 listens on every address of this machine")
    port: int = common(8000, "port to listen on; 0 takes a free port", least=0, most=65_535)
    api_key: str | None = common(
        None,
        f"key that clients must send; set it as {PREFIX}SERVER_API_KEY so that no other user can see it",
        secret=True,
    )
    body_limit_mb: int = setting(4, "largest request body, in MB", least=1)
    drain_s: float = setting(30.0, "how long open requests may go on after a stop, in seconds", least=0)
    max_open: int = setting(
        1024, "how many requests may be open at once; the gateway answers further requests with 429", least=1
    )
    max_queue: int = setting(
        512,
        "how many chats may wait for their prompts to run, and twice as many best-effort requests; more are refused",
        least=1,
    )
    max_queue_tokens: int = setting(
        1_000_000, "how many prompt tokens these chats may have, and best-effort requests four times as many", least=1
    )
    keys_file: str | None = common(None, "YAML file with the hashes of API keys, which `alignedserve key` writes")
    allow_anonymous: bool = setting(False, "serve without keys at an address that other machines can reach")
    gateways: int = setting(1, "processes that serve HTTP, behind one address", least=1, most=64)
    cors_origins: str | None = setting(
        None,
        "origins whose pages may call the API from a browser, separated by commas; * allows all; by default none may. "
        "Without keys, clients may also reach the server by the names in these origins",
    )
    metrics_prefix: MetricsPrefix = setting(
        MetricsPrefix.ALIGNEDSERVE,
        "what the names of metrics begin with; vllm: for boards and routers that read those",
    )
    otlp_endpoint: str | None = setting(
        None,
        "OpenTelemetry collector that gets traces by OTLP over HTTP, such as http://HOST:4318",
        aliases=("--otlp-traces-endpoint",),
    )
    tls_cert: str | None = common(None, "certificate chain in PEM, to serve HTTPS")
    tls_key: str | None = common(
        None, "private key in PEM, without a password; by default it is in the certificate's file"
    )


CPU_CACHE_MB, ADAPTERS_MB = 512, 256
_CPU_SEATS, _GPU_SEATS = 64, 256
_CPU_STEP_TOKENS, _GPU_STEP_TOKENS = 512, 2048


@dataclass(frozen=True)
class EngineConfig:
    """Workers: device, memory and the size of a step."""

    device: DeviceKind = common(
        DeviceKind.AUTO,
        "where workers compute; auto takes the GPUs that torch sees, on a Ray cluster those of its nodes (all workers"
        " compute on GPUs where a node that is there or may come has one for a decode worker), else the CPU",
    )
    dtype: Dtype = common(Dtype.AUTO, "type of weights and KV; auto takes the model's own")
    load_format: LoadFormat = setting(
        LoadFormat.AUTO,
        "where weights come from: auto reads the model's files; dummy makes random ones of its config.json, to measure",
    )
    kv_dtype: KvDtype = common(
        KvDtype.AUTO,
        "how KV is kept: in the type that the model computes in, or in int8, which takes half the memory of bf16",
        aliases=("--kv-cache-dtype",),
    )
    quantization: Quantization = common(
        Quantization.NONE,
        "how weights of linear layers are kept: as they are, or in 8 or 4 bits; quantised folders keep their own",
    )
    max_model_len: int | None = common(
        None, "tokens that prompt and output may have together; by default as many as the model allows", least=1
    )
    block_size: int = setting(16, "tokens in a device block", least=1)
    kv_memory_mb: int | None = common(
        None,
        f"memory of a worker's device cache, in MB; by default {CPU_CACHE_MB}, on a GPU all that is left there",
        least=1,
    )
    gpu_reserve_mb: int = setting(
        1024, "memory of a GPU that is left free for its libraries, graphs and fragments, in MB", least=0
    )
    max_step_tokens: int | None = common(
        None,
        f"most tokens in one step; by default {_CPU_STEP_TOKENS}, on a GPU {_GPU_STEP_TOKENS}, and max_batch at least",
        least=1,
        aliases=("--max-num-batched-tokens",),
    )
    max_batch: int | None = common(
        None,
        f"most requests in one step; by default {_CPU_SEATS}, on a GPU {_GPU_SEATS}, and max_step_tokens at most",
        least=1,
        aliases=("--max-num-seqs",),
    )
    threads: int | None = setting(None, "compute threads of a worker; by default what the cores allow", least=1)
    tune_s: float = experiment(
        0.4,
        "seconds at the start for measuring which implementation of each linear layer is fastest; 0 takes the usual",
        least=0,
    )
    cuda_graphs: Graphs = setting(
        Graphs.AUTO, "whether decode steps on a GPU are captured once for each of some sizes, and replayed"
    )
    look_ahead: LookAhead = experiment(
        LookAhead.AUTO, "decode steps that are planned while the step before runs; auto is 1 on a GPU, 0 on a CPU"
    )
    profile_s: float = setting(
        10.0,
        "most seconds that a first start measures steps for; later starts read the result from the cache; 0: never",
        least=0,
    )
    adapters_mb: int | None = experiment(
        None,
        f"memory of a worker for adapters, in MB; by default what those of --lora take, and {ADAPTERS_MB} at least; 0"
        " without --lora",
        least=0,
    )
    tensor_parallel_size: int = common(
        1, "ranks that share the model in each worker: processes, each with its own GPU if there are any", least=1
    )

    @property
    def on_gpu(self) -> bool:
        """Return whether workers compute on GPUs. Until auto is decided, it counts as the CPU."""
        return self.device is DeviceKind.CUDA

    @property
    def cache_mb(self) -> int | None:
        """Return the size of a worker's device cache; None stands for all that its GPU has left."""
        return CPU_CACHE_MB if self.kv_memory_mb is None and not self.on_gpu else self.kv_memory_mb

    @property
    def seats(self) -> int:
        """Return the most requests in one step: where only its tokens are given, they are enough for all requests."""
        usual = _GPU_SEATS if self.on_gpu else _CPU_SEATS
        return self.max_batch or min(usual, self.max_step_tokens or usual)

    @property
    def step_tokens(self) -> int:
        """Return the most tokens in one step."""
        usual = _GPU_STEP_TOKENS if self.on_gpu else _CPU_STEP_TOKENS
        return self.max_step_tokens or max(usual, self.seats)

    def steps_ahead(self, policy: Policy) -> int:
        """Return how many steps a decode worker plans while another runs."""
        if self.look_ahead is not LookAhead.AUTO:
            return int(self.look_ahead.value)
        return int(self.on_gpu and policy.why_not_ahead is None)


_PAGE_TOKENS = 64


@dataclass(frozen=True)
class PoolConfig:
    """The KV pool, which keeps KV in shared memory."""

    memory_mb: int | None = common(
        None,
        "memory of the KV pool in /dev/shm, in MB; by default four times the decode workers' device caches, and at most"
        " half of what is free",
        least=1,
    )
    page_size: int | None = experiment(
        None, f"tokens in a page; by default {_PAGE_TOKENS}, in whole blocks, or those of one block", least=1
    )
    verify_pages: bool | None = setting(
        None, "check the bytes of pages and transfers by checksums; by default where the CPU copies them anyway"
    )
    compression: Compression = setting(
        DEFAULT_POLICY.compression,
        "whether full pages of waiting requests are kept as int8: never, while few pages are free, or always",
    )
    directory: str = setting("/dev/shm", "directory in shared memory for the KV pool")
    rt_reserve: float = experiment(
        DEFAULT_POLICY.rt_reserve,
        "share of the KV pool that is kept free for chats: best-effort requests never take it",
        least=0,
        most=0.9,
    )


_BEATS_UNTIL_DEATH = 6
_BEAT_S = 0.5  # most seconds between two heartbeats: starts and lists of members wait for some of them


@dataclass(frozen=True)
class WireConfig:
    """Messages and transfers between processes."""

    death_s: float = setting(3.0, "silence after which a process counts as dead, in seconds", least=0.5)
    transfer_timeout_s: float = experiment(
        10.0, "how long a worker waits for the other end of a transfer of KV, in seconds", above=0
    )

    @property
    def heartbeat_s(self) -> float:
        """Return the time between two heartbeats: several of them may be lost before a process counts as dead."""
        return min(_BEAT_S, self.death_s / _BEATS_UNTIL_DEATH)


@dataclass(frozen=True)
class SloConfig:
    """The promises to requests that name none."""

    ttft_ms: float = common(1000.0, "time to a chat's first token, in ms", above=0)
    tbt_ms: float = common(187.5, "time between two tokens of a chat, in ms; the default is reading speed", above=0)
    flex_jct_s: float = setting(600.0, "completion window of service_tier flex, in seconds", above=0)


@dataclass(frozen=True)
class ScheduleConfig:
    """The schedule of requests: a preset chooses it, and these settings change parts of it.

    Each is a field of Policy and has its default from there; `policy` is what it calls `own`.
    """

    policy: PolicySource | None = experiment(
        None, "policies of one's own, in a Python file or an installed package; --policy FILE says the same"
    )
    order: Order = experiment(
        DEFAULT_POLICY.order,
        "which request goes first: the most urgent promise, by its due or by the slack that its work leaves, the first "
        "that came, the shortest, or five levels (ALISE)",
    )
    chunking: Chunking = experiment(
        DEFAULT_POLICY.chunking,
        "prompt tokens of a step: whole prompts alone, or chunks beside decodes, up to a fixed number or to the time",
    )
    selection: PromptChoice = experiment(
        DEFAULT_POLICY.selection,
        "whether prompts that are not urgent run in order, or as they best fill time and memory together",
    )
    room: Room = experiment(
        DEFAULT_POLICY.room,
        "device memory for the longest output at once, block by block (a request may have to leave), or by chunks",
    )
    grouping: Grouping = experiment(
        DEFAULT_POLICY.grouping,
        "which requests decode together: those of about one length, or the next, whatever their length",
    )
    packing: Packing = experiment(
        DEFAULT_POLICY.packing,
        "which requests with memory on a decode worker run in a step, and which leave when memory runs out",
    )
    reuse: bool = setting(
        DEFAULT_POLICY.reuse,
        "prefix cache: KV of prompts that begin alike is computed once, while a device or the pool has room for it",
    )
    late: Late = experiment(
        DEFAULT_POLICY.late,
        "a chat that has missed a deadline gets later deadlines, goes behind all others, or keeps its place",
    )
    predictor: Predictor = setting(
        DEFAULT_POLICY.predictor,
        "what predicts the length of outputs: nothing, a constant, past prompts of like tokens, or of like meaning; a "
        "simulation may have an oracle",
    )
    as_in_paper: bool = experiment(
        DEFAULT_POLICY.as_in_paper, "AccelGen's own budget, slack and distance, to compare with"
    )
    blocks: Layout = experiment(
        DEFAULT_POLICY.blocks,
        "whether a device block holds one request's tokens, or a chat's from the left and another's from the right",
    )
    cache: Cache = experiment(
        DEFAULT_POLICY.cache,
        "device memory holds KV only, or also hidden vectors, which take half the memory and time in each step",
    )
    reserve: int = experiment(
        DEFAULT_POLICY.reserve,
        "with room whole, least tokens of memory for a request, even if its output cannot be so long (Orca)",
        least=0,
    )
    waiting_ratio: float = experiment(
        DEFAULT_POLICY.waiting_ratio,
        "with chunking none, waiting prompts for each decode before they interrupt decodes; 0: any (TGI)",
        least=0,
    )
    handoff: Handoff = experiment(
        DEFAULT_POLICY.handoff,
        "prompts that are through go to a decode worker that has room, else to the KV pool; always to it; or stay "
        "on their device until a decode worker pulls them",
    )
    pinning: bool = experiment(
        DEFAULT_POLICY.pinning, "chats that cannot wait in the KV pool go straight to a decode worker"
    )
    evict: bool = experiment(
        DEFAULT_POLICY.evict, "a request that leaves a device keeps its KV elsewhere; otherwise KV is computed anew"
    )
    prefetch: bool = experiment(
        DEFAULT_POLICY.prefetch,
        "prefill workers that can send KV hold the KV of the next batch and of requests that had to leave",
    )
    candidate_share: float = experiment(
        DEFAULT_POLICY.candidate_share,
        "most of a prefill worker's device cache that such KV takes",
        least=0,
        most=1,
    )
    helps: bool = experiment(
        DEFAULT_POLICY.helps, "decode workers take prompts of chats while these pile up before prefill workers"
    )
    refuse_ttfts: float = setting(
        DEFAULT_POLICY.refuse_ttfts,
        "in a burst, refuse a chat that would wait for others for more than so many times its ttft; 0 refuses none",
        least=0,
    )
    checkpoints: float = experiment(
        DEFAULT_POLICY.checkpoints,
        "with bidirectional blocks, memory for tokens that chats displace, as a share of the device's",
        least=0,
    )


@dataclass(frozen=True)
class ScaleConfig:
    """The number of workers: as many as the load needs, between two limits."""

    prefill: Range | None = common(
        None, "least and most prefill workers, such as 1-4; by default their number stays as it is"
    )
    decode: Range | None = common(
        None, "least and most decode workers, such as 1-4; by default their number stays as it is"
    )
    shrink_after_s: float = setting(
        300.0, "how long fewer workers must have been enough before a worker goes, in seconds", above=0
    )

    @property
    def ranges(self) -> dict[Role, Range]:
        """Return the roles whose workers come and go with the load, each with its least and most."""
        named = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {role: between for role, between in named.items() if between is not None}


@dataclass(frozen=True)
class LaunchConfig:
    """The start of the parts."""

    quiet_s: float = setting(
        120.0,
        "how long a part that starts may stand still before the start has failed, in seconds; as long as weights are "
        "read, kernels tried or steps captured, a start may take any time",
        above=0,
    )


@dataclass(frozen=True)
class RayConfig:
    """Nodes of a Ray cluster, for launcher ray."""

    address: str | None = common(
        None, "Ray cluster on whose nodes the parts start, such as auto; by default a Ray of this machine alone"
    )
    gpus_per_worker: float | None = setting(
        None,
        "GPUs that Ray reserves for each rank of a worker; by default 1 where it computes on a GPU, else 0; 0.5 where"
        " two workers share a GPU",
        least=0,
    )
    place_s: float = setting(60.0, "how long a part may wait for a node before that is reported, in seconds", above=0)
    cluster_file: str | None = setting(
        None, "file that `ray up` was given: while nodes are full, more nodes of its types are asked for"
    )


@dataclass(frozen=True)
class JobsConfig:
    """Files and batch jobs."""

    store: str = common("sqlite", "where jobs are kept: sqlite, a redis:// URL, or off for no files and batches")
    directory: str | None = setting(
        None,
        "data folder of sqlite and files; by default $XDG_DATA_HOME/alignedserve/jobs/MODEL-PORT",
    )
    files: str | None = setting(
        None, "URL of the folder for the files' bytes, as fsspec has them; a folder in the data folder by default"
    )
    quota_mb: int = setting(10_000, "most that the files of one API key may take, in MB", least=1)
    keep_days: float = setting(
        30.0,
        "days after which batches that have ended expire, and files whose clients have not said when",
        above=0,
        most=36_525,
    )
    most_open: int = experiment(256, "most lines of batches that run or wait for a worker at once", least=1)

    @property
    def keep_s(self) -> int:
        return int(self.keep_days * 86_400)


@dataclass(frozen=True)
class LogConfig:
    """The logs of every process."""

    level: LogLevel = common(
        LogLevel.INFO, "least severe level that is logged; debug follows each request from part to part"
    )
    format: LogFormat = setting(LogFormat.TEXT, "text for people, json for machines")


@dataclass(frozen=True)
class Config:
    """The settings of a deployment, by section."""

    preset: str = common(DEFAULT, "how requests are scheduled, by one name: `alignedserve presets` lists the names")
    model: str = common(
        "auto", "model folder, GGUF file, hub id such as org/name, smollm2, or demo; auto is smollm2, else demo"
    )
    served_model_name: str | None = common(None, "name of the model in the API; by default as it was given")
    lora: LoraFolders | None = common(
        None,
        "adapters (LoRA) in PEFT's format, by the names that requests choose as their model: NAME=FOLDER, which every"
        " node sees; the flag may be given again",
    )
    reasoning_parser: str = setting(
        AUTO, "family of the model's reasoning; by default as its chat template shows, none: answers are not parted"
    )
    tool_call_parser: str = setting(
        AUTO, "format in which the model calls tools, by vLLM's name; by default as its chat template shows"
    )
    topology: Topology = common(Topology(), "colocated, 2xcolocated, or prefill+decode workers such as 1+1")
    transport: TransportName = setting(
        TransportName.AUTO,
        "how KV goes from worker to worker: through the KV pool, or directly by torch.distributed or mapped memory",
    )
    launcher: Launcher = common(Launcher.LOCAL, "what starts the processes")
    cache_directory: str | None = setting(
        None, "folder for what a start measured and learnt, for the next start; $XDG_CACHE_HOME/alignedserve by default"
    )
    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    kvpool: PoolConfig = field(default_factory=PoolConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    jobs: JobsConfig = field(default_factory=JobsConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        declared = every_setting()
        for path, value in leaves(self):
            problem = declared[path].problem(value)
            if problem:
                raise ConfigError(f"{path} {problem}")
        _check_together(self)

    @property
    def why_host(self) -> str | None:
        """Return why KV goes through the pool, whatever else a machine has; None where KV may go directly."""
        return self.policy.pairs.why_not_direct

    @property
    def verifies_pages(self) -> bool:
        """Return whether pages have checksums. A CPU sums up what it copies meanwhile; a GPU's pages it reads again."""
        wanted = self.kvpool.verify_pages
        return not self.engine.on_gpu if wanted is None else wanted

    def verifies_transfers(self, transport: TransportName) -> bool:
        """Return whether transfers have checksums. With `ipc` the source has to read all of the KV for that."""
        return self.kvpool.verify_pages or (self.verifies_pages and transport is not TransportName.IPC)

    @property
    def page_size(self) -> int:
        """Return the tokens of a page of the KV pool, a multiple of the block size."""
        block_size = self.engine.block_size
        return self.kvpool.page_size or block_size * max(1, _PAGE_TOKENS // block_size)

    @property
    def policy(self) -> Policy:
        options = {**vars(self.schedule)}
        return Policy(
            own=OwnPolicies(options.pop("policy")),
            **options,
            expected_chunk=self.engine.step_tokens,
            compression=self.kvpool.compression,
            rt_reserve=self.kvpool.rt_reserve,
        )


def _check_together(config: Config) -> None:
    _check_sizes(config)
    _check_policy(config)
    _check_transport(config)
    _check_scale(config)
    _check_ray(config)
    if config.reasoning_parser not in CHOICES:
        known = ", ".join(CHOICES)
        raise ConfigError(f"reasoning_parser {config.reasoning_parser!r:.40} is not known: choose one of {known}")
    if config.tool_call_parser not in (AUTO, *CALL_FORMATS):
        known = ", ".join((AUTO, *CALL_FORMATS))
        raise ConfigError(f"tool_call_parser {config.tool_call_parser!r:.40} is not known: choose one of {known}")
    if not re.match(r"(sqlite|off)$|rediss?://|unix://", config.jobs.store):
        raise ConfigError(
            f"jobs.store must be sqlite, off, or a URL that begins with redis://, not {config.jobs.store!r:.40}"
        )


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
    if engine.kv_dtype is KvDtype.INT8 and policy.pairs.keeps_hidden:
        raise ConfigError(
            "engine.kv_dtype int8 leaves no room for hidden vectors, which schedule.cache hybrid keeps in the blocks of"
            " KV: set one of them to its default"
        )
    if engine.kv_dtype is KvDtype.INT8 and policy.compression is not Compression.OFF:
        raise ConfigError("engine.kv_dtype int8 keeps pages in int8 already: set kvpool.compression to off")
    if engine.look_ahead is LookAhead.ONE and policy.why_not_ahead is not None:
        raise ConfigError(f"engine.look_ahead cannot be 1: {policy.why_not_ahead}: set it to 0")
    if config.schedule.predictor is Predictor.ORACLE:
        raise ConfigError("schedule.predictor oracle works in the simulator only: set hash or minilm")


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
    if transport is TransportName.IPC and config.ray.address is not None:
        raise ConfigError("transport ipc works within one machine only: with ray.address set it to collective or host")


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


# --- From declarations and sources to a configuration


@cache
def settings() -> dict[str, Setting]:
    """Return every setting of a deployment by its path: each has a flag and a variable, and a place in the file."""
    return {path: setting for path, setting in every_setting().items() if setting.reach is not Reach.EXPERIMENT}


@cache
def every_setting() -> dict[str, Setting]:
    """Return every setting by its path, those of experiments too, which presets and `--set` change."""
    return {setting.path: setting for setting in settings_of(Config)}


def load(flags: Mapping[str, Any], env: Mapping[str, str], path: Path | None) -> Config:
    """Return the configuration that these sources give together: a flag outweighs a variable, a variable the file,
    and the file the preset that any of them names.

    `flags` has the settings that were given by path, as text or of the setting's type; those of `--set` among them.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values |= _without_experiments(read_tree(read_yaml(path), str(path), every_setting()), str(path))
    values |= _without_experiments(read_environment(env, every_setting()), "environment")
    values |= read_flags(flags, every_setting())
    check(values.get("schedule.policy"))
    return of_preset(values.get("preset", DEFAULT), values)


def _without_experiments(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the values, or refuse a setting that only presets and `--set` change."""
    for path in values:
        if every_setting()[path].reach is Reach.EXPERIMENT:
            raise ConfigError(f"{source}: {path} is for experiments: choose a preset, or say --set {path}=VALUE")
    return values


def of_preset(name: str, values: Mapping[str, Any], least: Mapping[str, Any] | None = None) -> Config:
    """Return the preset's configuration: what it sets outweighs the defaults and `least`, and `values`, by path,
    outweigh the preset."""
    return _build({**(least or {}), **_settings_of_preset(name), **values, "preset": name})


def _settings_of_preset(name: str) -> dict[str, Any]:
    declared = every_setting()
    return {
        path: read_value(declared[path], value, f"preset {name}: {path}")
        for path, value in preset(name).settings.items()
    }


def parse(tree: Mapping[str, Any]) -> Config:
    """Return a configuration from nested plain values: the inverse of `dump`."""
    return _build(read_tree(tree, "configuration", every_setting()))


def dump(config: Config, paths: Iterable[str] | None = None) -> dict[str, Any]:
    """Return nested plain values, fit for JSON and YAML, of all settings or of these. Secrets are among them."""
    chosen = every_setting() if paths is None else set(paths)
    tree: dict[str, Any] = {}
    for path, value in leaves(config):
        if path in chosen:
            section, _, name = path.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[name] = plain(value)
    return tree


def plain(value: Any) -> Any:
    """Return the value as a file or a flag says it."""
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Topology | Range | PolicySource | LoraFolders) else value


def _build(values: Mapping[str, Any]) -> Config:
    parts = {
        section: part(**{path.split(".")[1]: value for path, value in values.items() if path.startswith(f"{section}.")})
        for section, part in sections().items()
    }
    return Config(**parts, **{path: value for path, value in values.items() if "." not in path})


@cache
def sections() -> dict[str, type]:
    """Return the dataclass of each section of settings, by its name."""
    hints = get_type_hints(Config)
    return {declared.name: hints[declared.name] for declared in fields(Config) if is_section(declared)}


def about(section: str) -> str:
    """Return the sentence that says what a section is for: the first line of its docstring."""
    return str(sections()[section].__doc__).partition("\n")[0]
