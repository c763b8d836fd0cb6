"""The configuration: one frozen tree of settings, layered by who consumes them.

A setting has one home, its field below: type, default, range, help and flag are read from there, by the
loader, by the command line and by the checks. Its other names follow from its path:

    path      server.port                  a place in the YAML file, and in `dump`
    variable  ALIGNEDSERVE_SERVER_PORT
    flag      --port                       sections other than server and engine keep a prefix: --log-level

Where several speak, a flag outweighs a variable, a variable the file, the file the default.
"""

# ruff: noqa: RUF009  (what it takes for shared defaults are fields, made by `_setting`)

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_type_hints

from alignedserve.errors import ConfigError

PREFIX = "ALIGNEDSERVE_"


class Launcher(str, Enum):
    LOCAL = "local"
    RAY = "ray"


class Dtype(str, Enum):
    AUTO = "auto"  # the one that the model folder names
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class LogLevel(str, Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(str, Enum):
    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True)
class Topology:
    """How many workers of each kind; written `colocated`, or `P+D` such as `2+2`."""

    prefill_workers: int = 0
    decode_workers: int = 1

    def __post_init__(self) -> None:
        if self.decode_workers < 1 or self.prefill_workers < 0 or (self.colocated and self.decode_workers > 1):
            raise ConfigError(
                f"topology cannot be {self.prefill_workers} prefill and {self.decode_workers} decode workers: "
                "it is colocated, or at least 1+1"
            )

    @classmethod
    def parse(cls, text: str) -> Topology:
        if text == "colocated":
            return cls()
        match = re.fullmatch(r"([1-9][0-9]{0,3})\+([1-9][0-9]{0,3})", text)
        if match is None:
            raise ValueError(text)
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return "colocated" if self.colocated else f"{self.prefill_workers}+{self.decode_workers}"

    @property
    def colocated(self) -> bool:
        """The decode worker runs the prompts too."""
        return self.prefill_workers == 0


def _setting(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    aliases: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """A field with all that is to be known of it; `aliases` are vLLM's flags for the same."""
    about = {"help": help, "least": least, "above": above, "most": most, "aliases": aliases, "secret": secret}
    return field(default=default, repr=not secret, metadata=about)


@dataclass(frozen=True)
class ServerConfig:
    """For the gateway."""

    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0 for every one of this machine")
    port: int = _setting(8000, "port to listen on; 0 for any that is free", least=0, most=65_535)
    api_key: str | None = _setting(
        None, f"key that clients must send; in {PREFIX}SERVER_API_KEY no other user can see it", secret=True
    )
    body_limit_mb: int = _setting(4, "largest request body, in MB", least=1)
    drain_s: float = _setting(30.0, "how long open requests may go on after a stop, in seconds", least=0)
    max_open: int = _setting(1024, "most requests that are open at once; more are refused with 429", least=1)


@dataclass(frozen=True)
class EngineConfig:
    """For the workers."""

    dtype: Dtype = _setting(Dtype.AUTO, "type of weights and KV; auto takes the model's own")
    max_model_len: int | None = _setting(None, "most tokens of prompt and output; the model's own by default", least=1)
    block_size: int = _setting(16, "tokens in a device block", least=1)
    kv_memory_mb: int = _setting(512, "memory of a worker's device cache, in MB", least=1)
    max_step_tokens: int = _setting(512, "most tokens in one step", least=1, aliases=("--max-num-batched-tokens",))
    max_batch: int = _setting(64, "most requests in one step", least=1, aliases=("--max-num-seqs",))
    threads: int | None = _setting(None, "compute threads of a worker; by default what the cores allow", least=1)
    tensor_parallel_size: int = _setting(1, "devices that share one model; only 1 is supported today", least=1)


@dataclass(frozen=True)
class PoolConfig:
    """For the KV pool and those who read and write its pages."""

    memory_mb: int = _setting(256, "memory of the KV pool in /dev/shm, in MB", least=1)
    page_size: int = _setting(64, "tokens in a page; a multiple of the block size", least=1)
    verify_pages: bool = _setting(False, "check each page's bytes when it is read")
    directory: str = _setting("/dev/shm", "directory in shared memory for the KV pool")


@dataclass(frozen=True)
class WireConfig:
    """For the messages between processes."""

    max_frame_mb: int = _setting(64, "largest frame, in MB", least=1)
    heartbeat_s: float = _setting(0.5, "time between two heartbeats, in seconds", above=0)
    death_s: float = _setting(3.0, "silence after which a process counts as dead, in seconds", above=0)


@dataclass(frozen=True)
class LogConfig:
    """For every process."""

    level: LogLevel = _setting(LogLevel.INFO, "least severe level that is logged")
    format: LogFormat = _setting(LogFormat.TEXT, "text for people, json for machines")


@dataclass(frozen=True)
class Config:
    model: str = _setting("demo", "model folder, hub id such as org/name, or demo")
    served_model_name: str | None = _setting(None, "name of the model in the API; by default as it was given")
    topology: Topology = _setting(Topology(), "colocated, or prefill+decode workers such as 1+1")
    launcher: Launcher = _setting(Launcher.LOCAL, "what starts the processes")
    server: ServerConfig = field(default_factory=ServerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    kvpool: PoolConfig = field(default_factory=PoolConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        for path, value in _leaves(self):
            problem = settings()[path].problem(value)
            if problem:
                raise ConfigError(f"{path} {problem}")
        _check_together(self)


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
    if wire.death_s <= wire.heartbeat_s:
        raise ConfigError(f"wire.death_s must be more than wire.heartbeat_s {wire.heartbeat_s}, not {wire.death_s}")
    if engine.tensor_parallel_size != 1:
        raise ConfigError(f"engine.tensor_parallel_size {engine.tensor_parallel_size} is not yet supported: 1 is")


@dataclass(frozen=True)
class Setting:
    """One leaf of the tree: what it takes and how it is called."""

    path: str
    kind: type  # str, int, float, bool, Topology or an Enum
    optional: bool
    default: Any
    about: Mapping[str, Any]  # the field's metadata

    @property
    def help(self) -> str:
        return cast(str, self.about["help"])

    @property
    def secret(self) -> bool:
        return cast(bool, self.about["secret"])

    @property
    def variable(self) -> str:
        return PREFIX + self.path.upper().replace(".", "_")

    @property
    def flags(self) -> tuple[str, ...]:
        section, _, name = self.path.rpartition(".")
        prefix = {"": "", "server": "", "engine": "", "kvpool": "pool-"}.get(section, f"{section}-")
        return (f"--{prefix}{name.replace('_', '-')}", *self.about["aliases"])

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(one.value for one in self.kind) if issubclass(self.kind, Enum) else ()

    def problem(self, value: Any) -> str | None:
        """Why a value of the right type cannot be taken."""
        if value is None or isinstance(value, (bool, Enum, Topology)):
            return None
        if isinstance(value, str):
            return "must not be empty" if self.path != "model" and not value.strip() else None
        least, above, most = self.about["least"], self.about["above"], self.about["most"]
        if isinstance(value, float) and not math.isfinite(value):
            return f"must be a finite number, not {value}"
        if least is not None and value < least:
            return f"must be {least} or more, not {value}"
        if above is not None and value <= above:
            return f"must be more than {above}, not {value}"
        if most is not None and value > most:
            return f"must be {most} or less, not {value}"
        return None


@cache
def settings() -> dict[str, Setting]:
    """Every setting, by its path."""
    return {one.path: one for one in _settings_of(Config)}


def load(flags: Mapping[str, Any], env: Mapping[str, str], path: Path | None) -> Config:
    """The configuration that these sources give together.

    `flags` are by path, as text or of the setting's type; those that were not given are not in it.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values |= _read_tree(read_yaml(path), str(path))
    values |= _read_environment(env)
    values |= _read_flags(flags)
    return _build(values)


def parse(tree: Mapping[str, Any]) -> Config:
    """The inverse of `dump`: a configuration from nested plain values."""
    return _build(_read_tree(tree, "configuration"))


def dump(config: Config) -> dict[str, Any]:
    """Nested plain values, fit for JSON and YAML. Secrets are among them."""
    tree: dict[str, Any] = {}
    for path, value in _leaves(config):
        section, _, name = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = _plain(value)
    return tree


def read_yaml(path: Path) -> Mapping[str, Any]:
    import yaml  # here, so that --help does not wait for it

    try:
        text = path.read_text(encoding="utf-8")
        _refuse_repeated_keys(yaml.compose(text, yaml.SafeLoader), path)
        tree = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold settings by name, not {_noun(tree)}")
    return tree


def _refuse_repeated_keys(node: Any, path: Path) -> None:
    """PyYAML would keep the last of them, and drop all that a first section of the name says."""
    if getattr(node, "id", None) != "mapping":
        return
    seen = set()
    for key, value in node.value:
        if str(key.value) in seen:
            raise ConfigError(f"{path}: {key.value} is there twice, again in line {key.start_mark.line + 1}")
        seen.add(str(key.value))
        _refuse_repeated_keys(value, path)


def _read_tree(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Typed values by path, from nested ones."""
    values = {}
    for path, value in _flatten(tree, source):
        values[path] = _typed(_known(path, source), value, f"{source}: {path}")
    return values


def _flatten(tree: Mapping[Any, Any], source: str, above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{above}{key}"
        if "." in str(key):
            raise ConfigError(f"{source}: {path!r} is not a setting: a file names them by section, without dots")
        if path not in _sections():
            yield path, value
        elif isinstance(value, Mapping):
            yield from _flatten(value, source, f"{path}.")
        elif value is not None:  # all of a section's lines may be commented out
            raise ConfigError(f"{source}: {path} is a section of settings, not {_noun(value)}")


def _read_environment(env: Mapping[str, str]) -> dict[str, Any]:
    by_variable = {one.variable: one for one in settings().values()}
    values = {}
    for variable, text in env.items():
        if not variable.startswith(PREFIX) or _is_service_link(variable, text):
            continue
        if variable not in by_variable:
            raise ConfigError(f"environment: {variable} is not a setting{hint(variable, by_variable, '_')}")
        one = by_variable[variable]
        values[one.path] = _from_text(one, text, f"{variable}: {one.path}")
    return values


def _is_service_link(variable: str, text: str) -> bool:
    """Kubernetes sets such variables in every pod for a Service whose name begins like ours."""
    if re.search(r"_SERVICE_HOST$|_SERVICE_PORT(_.*)?$|_PORT_\d+_(TCP|UDP|SCTP)(_.*)?$", variable):
        return True
    return variable.endswith("_PORT") and re.match(r"(tcp|udp|sctp)://", text) is not None


def _read_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for path, value in flags.items():
        one = _known(path, "flags")
        where = f"{one.flags[0]}: {path}"
        values[path] = _from_text(one, value, where) if isinstance(value, str) else _typed(one, value, where)
    return values


def _known(path: str, source: str) -> Setting:
    if path not in settings():
        shown = path if path.isprintable() else repr(path)
        raise ConfigError(f"{source}: {shown} is not a setting{hint(path, [*settings(), *_sections()])}")
    return settings()[path]


def hint(wrong: str, right: Iterable[str], separator: str = ".") -> str:
    """Names the right one that is nearest: it ends like the wrong one, or is spelled much like it."""
    import difflib

    names = list(right)
    ends_alike = [name for name in names if name.endswith(separator + wrong.removeprefix(PREFIX))]
    near = ends_alike or difflib.get_close_matches(wrong, names, 1)
    return f": did you mean {near[0]}?" if near else ""


def _from_text(one: Setting, text: str, where: str) -> Any:
    """From a flag or a variable."""
    try:
        value: Any = _PARSERS[one.kind](text) if one.kind in _PARSERS else text
    except (ValueError, KeyError):
        raise _wrong(one, text, where) from None
    return _typed(one, value, where)


_PARSERS: dict[type, Any] = {
    int: int,
    float: float,
    bool: {"true": True, "1": True, "false": False, "0": False}.__getitem__,
}


def _typed(one: Setting, value: Any, where: str) -> Any:
    """The value as the setting's type, which it must have already, but for what only text can say."""
    try:
        typed = None if value is None and one.optional else _convert(one.kind, value)
    except (TypeError, ValueError, OverflowError):
        raise _wrong(one, value, where) from None
    problem = one.problem(typed)
    if problem:
        raise ConfigError(f"{where} {problem}")
    return typed


def _convert(kind: type, value: Any) -> Any:
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(value, str) and kind is Topology:
        return Topology.parse(value)
    if isinstance(value, str) and issubclass(kind, Enum):
        return kind(value)
    raise TypeError


def _wrong(one: Setting, value: Any, where: str) -> ConfigError:
    given = "" if one.secret else f", not {_noun(value)}"
    return ConfigError(f"{where} must be {_wanted(one)}{given}")


def _wanted(one: Setting) -> str:
    if one.choices:
        return f"one of {', '.join(one.choices)}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return names.get(one.kind, "colocated, or prefill+decode workers such as 1+1")


def _noun(value: Any) -> str:
    """What was given instead, cut where it is long."""
    plain = {type(None): "nothing", dict: "a section", list: "a list", bool: str(value).lower()}
    if type(value) in plain:
        return plain[type(value)]
    kind = {int: "number", float: "number", str: "text"}.get(type(value), type(value).__name__)
    shown = repr(value) if isinstance(value, str) else str(value)
    return f"the {kind} {shown if len(shown) <= 60 else f'{shown[:57]}...'}"


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Topology) else value


def _leaves(part: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for one in fields(part):
        path, value = f"{above}{one.name}", getattr(part, one.name)
        if path in _sections():
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _build(values: Mapping[str, Any]) -> Config:
    parts = {
        section: part(**{path.split(".")[1]: value for path, value in values.items() if path.startswith(f"{section}.")})
        for section, part in _sections().items()
    }
    return Config(**parts, **{path: value for path, value in values.items() if "." not in path})


@cache
def _sections() -> dict[str, type]:
    hints: dict[str, type] = get_type_hints(Config)
    return {name: kind for name, kind in hints.items() if kind is not Topology and is_dataclass(kind)}


def _settings_of(part: type, above: str = "") -> Iterator[Setting]:
    hints = get_type_hints(part)
    for one in fields(part):
        path = f"{above}{one.name}"
        if path in _sections():
            yield from _settings_of(hints[one.name], f"{path}.")
        else:
            inner = [kind for kind in get_args(hints[one.name]) if kind is not NoneType]
            kind = inner[0] if inner else hints[one.name]
            yield Setting(path, kind, bool(inner), one.default, one.metadata)
