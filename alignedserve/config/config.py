"""The configuration of a deployment: one frozen tree of settings, layered by the parts that read them.

Sections are declared in sections.py, and checked together below.
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
from alignedserve.config.choices import (
    AUTO,
    CALL_FORMATS,
    NONE,
    REASONING_FAMILIES,
    DeviceKind,
    Graphs,
    Launcher,
    LookAhead,
    LoraFolders,
    ModelNames,
    TransportName,
)
from alignedserve.config.presets import DEFAULT, preset
from alignedserve.config.sections import (
    PAGE_TOKENS,
    EngineConfig,
    JobsConfig,
    LaunchConfig,
    LogConfig,
    PoolConfig,
    PrefillConfig,
    PriceConfig,
    RayConfig,
    ScaleConfig,
    ScheduleConfig,
    ServerConfig,
    SloConfig,
    WireConfig,
)
from alignedserve.config.setting import Reach, Setting, common, is_section, leaves, setting, settings_of
from alignedserve.config.sources import read_environment, read_flags, read_tree, read_value, read_yaml
from alignedserve.config.topology import Range, Topology
from alignedserve.errors import ConfigError
from alignedserve.scheduling.form_rules import Compression
from alignedserve.scheduling.policy import Handoff, Policy, Predictor


@dataclass(frozen=True)
class Config:
    """The settings of a deployment, by section."""

    preset: str = common(DEFAULT, "how requests are scheduled, by one name: `alignedserve presets` lists the names")
    model: str = common(
        "auto", "model folder, GGUF file, hub id such as org/name, smollm2, minilm, or demo; auto is smollm2, else demo"
    )
    embed: str | None = common(
        None,
        "second model, which answers /v1/embeddings, /v1/score and /v1/rerank by its name, such as minilm; it computes"
        " on the CPU",
    )
    served_model_name: ModelNames | None = common(
        None,
        "name of the model in the API, and other names for it, each a word or with a * for many (my-model 'claude-*');"
        " by default the hub id, or the name of the folder or the file",
    )
    lora: LoraFolders | None = common(
        None,
        "NAME=FOLDER of an adapter (LoRA) in PEFT's format, in a folder that every node has; requests choose it by NAME"
        " as their model; the flag may be given again",
    )
    reasoning_parser: str = setting(
        AUTO, "family of the model's reasoning; by default as its chat template shows, none: answers are not parted"
    )
    tool_call_parser: str = setting(
        AUTO, "format in which the model calls tools, by vLLM's name; by default as its chat template shows"
    )
    topology: Topology = common(
        Topology(),
        f"numbers of workers: {Topology.FORM}, which chooses by nodes, GPUs and promises",
    )
    transport: TransportName = setting(
        TransportName.AUTO,
        "how KV goes from worker to worker: host by the KV pool, collective by torch.distributed, ipc by mapped memory"
        " within a node, direct by ipc within a node and collectively between nodes; auto is ipc, or host where prefill"
        " workers decode too",
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
    price: PriceConfig = field(default_factory=PriceConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
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
        check_together(self)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return the names by which requests call the model; the first is its own."""
        return (self.model,) if self.served_model_name is None else self.served_model_name.names

    @property
    def why_host(self) -> str | None:
        """Return why KV goes through the pool, whatever else a machine has; None where KV may go directly."""
        return self.policy.block_use.why_not_direct

    @property
    def lends(self) -> bool:
        """Return whether prefill workers decode what is near them while they have room."""
        return self.policy.prefill_decodes and not self.topology.colocated

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
        return self.kvpool.page_size or block_size * max(1, PAGE_TOKENS // block_size)

    @property
    def policy(self) -> Policy:
        return Policy(
            **vars(self.schedule),
            lends=self.prefill.lends,
            expected_chunk=self.engine.step_tokens,
            compression=self.kvpool.compression,
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


def reloaded(config: Config, other: Config) -> Config:
    """Return the configuration with what may change while it serves as the other has it."""
    new = {path: value for path, value in leaves(other) if every_setting()[path].reloads}
    return _build({**dict(leaves(config)), **new})


def dump(config: Config, paths: Iterable[str] | None = None) -> dict[str, Any]:
    """Return nested plain values, fit for JSON and YAML, of all settings or of these. Secrets are among them."""
    chosen = every_setting() if paths is None else set(paths)
    tree: dict[str, Any] = {}
    for path, value in leaves(config):
        if path in chosen:
            section, _, name = path.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[name] = plain(value)
    return tree


def without_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `dump` made, with each secret as it is by default."""
    known = {section: dict(value) if isinstance(value, Mapping) else value for section, value in tree.items()}
    for path, declared in every_setting().items():
        section, _, name = path.rpartition(".")
        if declared.secret and name in known.get(section, ()):
            known[section][name] = declared.default
    return known


def plain(value: Any) -> Any:
    """Return the value as a file or a flag says it."""
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Topology | Range | LoraFolders | ModelNames) else value


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


# --- Checks of settings together


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
            f"engine.max_step_tokens must be at least engine.max_batch {engine.seats}, not {engine.step_tokens}: each"
            " request of a step takes a token (--max-step-tokens, --max-batch)"
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
            "engine.kv_dtype int8 leaves no room for hidden vectors, which schedule.memory hybrid keeps in blocks of"
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
    if topology.colocated and not topology.is_auto:
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
    if topology.is_auto:
        return  # checked again once it is decided
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
    if config.embed is not None and config.launcher is Launcher.RAY:
        raise ConfigError("embed starts a second model on this machine: it cannot be used with launcher ray")
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
