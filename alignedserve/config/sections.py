"""The sections of settings: each setting with its type, default, range, help text and how it is reached (setting.py).

Every setting is declared once: here, or in config.py where it is of no section. What only presets and experiments
change is declared too; numbers that nothing changes stand beside their formula.
"""

# ruff: noqa: RUF009  (what it takes for shared defaults are fields, made by `setting`)

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.architectures.quantization import Quantization
from alignedserve.config.choices import (
    DeviceKind,
    Dtype,
    Graphs,
    LoadFormat,
    LogFormat,
    LogLevel,
    LookAhead,
    MetricsPrefix,
)
from alignedserve.config.setting import PREFIX, common, experiment, setting
from alignedserve.config.topology import Range
from alignedserve.core import Role
from alignedserve.scheduling.form_rules import Compression
from alignedserve.scheduling.policy import (
    DEFAULT_POLICY,
    Chunking,
    Grouping,
    Handoff,
    Lends,
    Policy,
    Predictor,
    Room,
)
from alignedserve.scheduling.slo import Late


@dataclass(frozen=True)
class ServerConfig:
    """The gateway: its address, keys and limits."""

    host: str = common("127.0.0.1", "address to listen on; 0.0.0.0 listens on every address of this machine")
    port: int = common(8000, "port to listen on; 0 takes a free port", least=0, most=65_535)
    api_key: str | None = common(
        None,
        f"key that clients must send; set it as {PREFIX}SERVER_API_KEY so that no other user can see it",
        secret=True,
        reloads=True,
    )
    body_limit_mb: int = setting(4, "largest request body, in MB", least=1, reloads=True)
    drain_s: float = setting(30.0, "how long open requests may go on after a stop, in seconds", least=0, reloads=True)
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
    patience_s: float = setting(
        60.0,
        "how long a chat without a promise of its own may wait in line for its first token, in seconds, or five times "
        "as long as its prompt takes alone; beyond that it is asked to come again later",
        least=0,
    )
    keys_file: str | None = common(
        None, "YAML file with the hashes of API keys, which `alignedserve key` writes", reloads=True
    )
    allow_anonymous: bool = setting(False, "serve without keys at an address that other machines can reach")
    gateways: int = setting(1, "processes that serve HTTP, behind one address", least=1, most=63)
    cors_origins: str | None = setting(
        None,
        "origins whose pages may call the API from a browser, separated by commas; * allows all, and none no page; by "
        "default those of localhost at any port, where no other machine reaches the server. "
        "Without keys, clients may also reach the server by the names in these origins",
    )
    metrics_prefix: MetricsPrefix = setting(
        MetricsPrefix.ALIGNEDSERVE, "what the names of metrics begin with; vllm: for boards and routers that read those"
    )
    otlp_endpoint: str | None = setting(
        None,
        "OpenTelemetry collector that gets traces by OTLP over HTTP, such as http://HOST:4318",
        aliases=("--otlp-traces-endpoint",),
    )
    tls_cert: str | None = common(None, "certificate chain in PEM, to serve HTTPS", reloads=True)
    tls_key: str | None = common(
        None, "private key in PEM, without a password; by default it is in the certificate's file", reloads=True
    )


ADAPTERS_MB = 256
_CPU_SEATS, GPU_SEATS = 64, 256
_CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 2048


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
        None,
        "tokens that prompt and output may have together; by default as many as the model allows and memory holds",
        least=1,
    )
    block_size: int = setting(16, "tokens in a device block", least=1)
    kv_memory_mb: int | None = common(
        None,
        "memory of a worker's device cache, in MB; by default what is free beside the weights and of use, on a GPU all"
        " that is left there",
        least=1,
    )
    gpu_reserve_mb: int = setting(
        1024, "memory of a GPU that is left free for its libraries, graphs and fragments, in MB", least=0
    )
    max_step_tokens: int | None = common(
        None,
        f"most tokens in one step; by default {_CPU_STEP_TOKENS}, fewer where memory is short, on a GPU"
        f" {GPU_STEP_TOKENS}, and max_batch at least",
        least=1,
        aliases=("--max-num-batched-tokens",),
    )
    max_batch: int | None = common(
        None,
        f"most requests in one step; by default {_CPU_SEATS}, fewer where memory is short, on a GPU {GPU_SEATS}, and"
        " max_step_tokens at most",
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
        Graphs.AUTO, "whether steps on a GPU are captured once for each of some sizes, and replayed"
    )
    look_ahead: LookAhead = experiment(
        LookAhead.AUTO, "steps that a worker plans while the step before runs; auto is 1 on a GPU, 0 on a CPU"
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
    adapters_root: str | None = experiment(
        None,
        "the folder below which adapters lie that clients load while it runs; by default the folders in which those of"
        " --lora lie, and without --lora clients load none",
    )
    tensor_parallel_size: int = common(
        1, "ranks that share the model in each worker: processes, each with its own GPU if there are any", least=1
    )

    @property
    def on_gpu(self) -> bool:
        """Return whether workers compute on GPUs. Until auto is decided, it counts as the CPU."""
        return self.device is DeviceKind.CUDA

    @property
    def seats(self) -> int:
        """Return the most requests in one step: where only its tokens are given, they are enough for all requests."""
        usual = GPU_SEATS if self.on_gpu else _CPU_SEATS
        return self.max_batch or min(usual, self.max_step_tokens or usual)

    @property
    def step_tokens(self) -> int:
        """Return the most tokens in one step."""
        usual = GPU_STEP_TOKENS if self.on_gpu else _CPU_STEP_TOKENS
        return self.max_step_tokens or max(usual, self.seats)

    def steps_ahead(self, policy: Policy) -> int:
        """Return how many steps a worker plans while another runs."""
        if self.look_ahead is not LookAhead.AUTO:
            return int(self.look_ahead.value)
        return int(self.on_gpu and policy.why_not_ahead is None)


PAGE_TOKENS = 64


@dataclass(frozen=True)
class PoolConfig:
    """The KV pool, which keeps KV in shared memory."""

    memory_mb: int | None = common(
        None,
        "memory of the KV pool in /dev/shm, in MB; by default two fifths of the decode workers' device caches, or one"
        " of these where requests go through it, on GPUs four times as much; at most half of what is free",
        least=1,
    )
    page_size: int | None = experiment(
        None, f"tokens in a page; by default {PAGE_TOKENS}, in whole blocks, or those of one block", least=1
    )
    verify_pages: bool | None = setting(
        None, "check the bytes of pages and transfers by checksums; by default where the CPU copies them anyway"
    )
    compression: Compression = setting(
        DEFAULT_POLICY.compression,
        "whether full pages of waiting requests are kept as int8: never, while few pages are free, or always",
    )
    directory: str = setting("/dev/shm", "directory in shared memory for the KV pool")


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

    ttft_ms: float | None = common(
        None,
        "time to a chat's first token, in ms; by default 1000 or what this machine can keep, and chats wait in line",
        above=0,
        reloads=True,
    )
    tbt_ms: float | None = common(
        None,
        "time between two tokens of a chat, in ms; by default 187.5 (reading speed) or what this machine can keep",
        above=0,
        reloads=True,
    )
    flex_jct_s: float = setting(600.0, "completion window of service_tier flex, in seconds", above=0, reloads=True)


@dataclass(frozen=True)
class PriceConfig:
    """The prices of workers' time and energy, in a currency of yours; without any no price is shown."""

    device_hour: float | None = setting(
        None, "price of a device for an hour of its steps: a GPU, or on CPUs a rank of a worker", above=0, reloads=True
    )
    kwh: float | None = setting(None, "price of a kWh that devices take in steps", above=0, reloads=True)


@dataclass(frozen=True)
class ScheduleConfig:
    """The schedule of requests: a preset chooses it, and these settings change parts of it.

    Each is a field of Policy and has its default from there.
    """

    scheduler: str = experiment(
        DEFAULT_POLICY.scheduler,
        "what plans the steps of workers, and says which request leaves where memory is short: aligned, another "
        "system's (papers/names.py), or one that an installed package offers",
    )
    chunking: Chunking = experiment(
        DEFAULT_POLICY.chunking,
        "prompt tokens of a step: whole prompts alone, or chunks beside decodes, up to a fixed number or to the time",
    )
    room: Room = experiment(
        DEFAULT_POLICY.room,
        "device memory for the longest output at once, block by block (a request may have to leave), or by chunks",
    )
    grouping: Grouping = experiment(
        DEFAULT_POLICY.grouping,
        "which requests decode together: those of about one length, or the next, whatever their length",
    )
    reuse: bool = setting(
        DEFAULT_POLICY.reuse,
        "prefix cache: KV of prompts that begin alike is computed once, while a device or the pool has room for it",
    )
    late: Late = experiment(
        DEFAULT_POLICY.late,
        "a chat that has missed a deadline gets later deadlines, goes behind all others, or keeps its place",
    )
    predictor: Predictor = experiment(
        DEFAULT_POLICY.predictor,
        "what predicts the length of outputs: nothing, a constant, or past prompts of like tokens; a simulation may "
        "have an oracle",
    )
    memory: str = experiment(
        DEFAULT_POLICY.memory,
        "how device memory is used: `plain`: each block holds KV of one request; of the papers `two_ended`: a chat's "
        "from the left and another's from the right, with room on the host for the share behind a colon of what chats "
        "displace (`two_ended:0.2`; else all); `hybrid`: also hidden vectors, half as large, for time in each step",
    )
    reserve: int = experiment(
        DEFAULT_POLICY.reserve,
        "with room whole, least tokens of memory for a request, even if its output cannot be so long (Orca)",
        least=0,
    )
    handoff: Handoff = experiment(
        DEFAULT_POLICY.handoff,
        "where finished prompts wait for decoding: `room`: on a decode worker with space, else in the pool; `pool`: "
        "always in the pool; `device`: where they ran, until a decode worker pulls them",
    )
    pinning: bool = experiment(
        DEFAULT_POLICY.pinning, "chats that cannot wait in the KV pool go straight to a decode worker"
    )
    evict: bool = experiment(
        DEFAULT_POLICY.evict, "a request that leaves a device keeps its KV elsewhere; otherwise KV is recomputed"
    )
    prefetch: bool = experiment(
        DEFAULT_POLICY.prefetch,
        "prefill workers that can send KV hold the KV of the next batch and of requests that had to leave",
    )
    candidate_share: float = experiment(
        DEFAULT_POLICY.candidate_share, "most of a prefill worker's device cache that such KV takes", least=0, most=1
    )
    helps: bool = experiment(
        DEFAULT_POLICY.helps,
        "decode workers take prompts that pile up, and prefill workers decode as prefill.lends says",
    )
    slo_scale: float = setting(
        DEFAULT_POLICY.slo_scale,
        "how early chats' tokens are to come: at 0.8 steps are planned for 0.8 of ttft and tbt, at 1 for all of them; "
        "what counts as kept stays as promised",
        above=0,
        most=1,
    )
    refuse_ttfts: float = experiment(
        DEFAULT_POLICY.refuse_ttfts,
        "in a burst, refuse a chat that would wait for others for more than this multiple of its ttft; 0 refuses none",
        least=0,
    )


@dataclass(frozen=True)
class PrefillConfig:
    """Prefill workers, where topology has some."""

    lends: Lends = common(
        DEFAULT_POLICY.lends,
        "when prefill workers decode, too: always, while they have room, or never; never keeps gaps even, and KV goes"
        " from GPU to GPU directly where it can",
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
    """The start of the parts, and the watch over them."""

    quiet_s: float = setting(
        120.0,
        "how long a part that starts may stand still before the start has failed, in seconds; as long as weights are "
        "read, kernels tried or steps captured, a start may take any time",
        above=0,
    )
    still_s: float = experiment(
        30.0,
        "how many seconds a loop of a part may stand still; then its process is ended and started again. A process "
        "from which the launcher hears nothing is ended after a third more",
        above=0,
    )


PLACE_S, COMING_S = 60.0, 1800.0  # a machine that has just been rented installs torch first


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
    place_s: float | None = experiment(
        None,
        f"how long a part may wait for a node before that is reported, in seconds; by default {PLACE_S:g}, or"
        f" {COMING_S:g} where cluster_file says which nodes may come",
        above=0,
    )
    cluster_file: str | None = setting(
        None, "file that `ray up` was given: while nodes are full, more nodes of its types are asked for"
    )

    @property
    def patience_s(self) -> float:
        """Return how long a part waits for a node."""
        return self.place_s or (PLACE_S if self.cluster_file is None else COMING_S)


@dataclass(frozen=True)
class JobsConfig:
    """Files and batch jobs."""

    store: str = common(
        "sqlite",
        "where jobs are kept: sqlite, a redis://, redis+sentinel:// or redis+cluster:// URL, or off for no files and "
        f"batches; set a URL with a password as {PREFIX}JOBS_STORE so that no other user can see it",
        secret=True,
    )
    directory: str | None = setting(
        None, "data folder of sqlite and files; by default $XDG_DATA_HOME/alignedserve/jobs/MODEL-PORT"
    )
    files: str | None = setting(
        None, "URL of the folder for the files' bytes, as fsspec has them; a folder in the data folder by default"
    )
    quota_mb: int = setting(
        10_000,
        "most that the files of one API key and the results of its batches may take, in MB",
        least=1,
    )
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
        LogLevel.INFO, "least severe level that is logged; debug follows each request from part to part", reloads=True
    )
    format: LogFormat = setting(LogFormat.TEXT, "text for people, json for machines", reloads=True)
