"""The adapters (LoRA) that a deployment begins with, and the memory that a worker has for all that it serves."""

from __future__ import annotations

from pathlib import Path

from alignedserve.architectures.config import DTYPE_BYTES, ModelConfig
from alignedserve.architectures.families.lora import LoraFiles, read_lora
from alignedserve.config.config import Config
from alignedserve.config.sections import ADAPTERS_MB
from alignedserve.core import Adapter
from alignedserve.errors import ConfigError

_MIB = 1 << 20


def first_adapters(config: Config, model: ModelConfig) -> list[tuple[str, LoraFiles]]:
    """Return the adapters of the setting, checked against the model."""
    folders = () if config.lora is None else config.lora.folders
    return [(name, read_lora(Path(folder), model)) for name, folder in folders]


def as_named(adapters: list[tuple[str, LoraFiles]]) -> list[Adapter]:
    """Return the adapters as requests name them."""
    return [Adapter(name, str(files.folder), files.id) for name, files in adapters]


def adapter_room(config: Config, model: ModelConfig, dtype: str) -> int:
    """Return the bytes that a worker has for adapters; raise where those of the setting take more."""
    taken = sum(files.num_bytes(DTYPE_BYTES[dtype]) for _, files in first_adapters(config, model))
    given = config.engine.adapters_mb
    if given is None:
        return max(taken, ADAPTERS_MB * _MIB) if taken else 0
    if taken > given * _MIB:
        raise ConfigError(
            f"engine.adapters_mb {given} is too little for the adapters of --lora, which take {-(-taken // _MIB)} MB:"
            " raise it, or leave some out"
        )
    return given * _MIB


def adapter_roots(config: Config) -> tuple[Path, ...]:
    """Return the folders below which clients may load adapters."""
    if (root := config.engine.adapters_root) is not None:
        return (Path(root).expanduser().absolute(),)
    parents = (Path(folder).parent for _, folder in (() if config.lora is None else config.lora.folders))
    return tuple(dict.fromkeys(parent for parent in parents if parent != parent.parent))  # the root of all is no choice


def check_names(config: Config) -> None:
    """Raise where an adapter has the model's own name: a request could not choose between them."""
    adapters = {} if config.lora is None else dict(config.lora.folders)
    for name in config.model_names:
        if name in adapters:
            raise ConfigError(f"lora: the model itself is called {name!r:.80}: give the adapter another name")
