"""The folder of the model that a configuration names, and what random weights cannot be made for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.architectures.model_source import AUTO, chosen_model, has_tokenizer, resolve
from alignedserve.architectures.quantization import Quantization
from alignedserve.architectures.stored_form import StoredMethod
from alignedserve.architectures.vectors import EncoderConfig
from alignedserve.config.choices import LoadFormat
from alignedserve.config.config import Config
from alignedserve.errors import ConfigError


def model_folder(config: Config) -> Path:
    """Return the folder; with random weights it has a tokenizer, if need be that of the demo model."""
    return resolve(config.model, config.cache_directory, with_weights=config.engine.load_format is not LoadFormat.DUMMY)


def with_model(config: Config) -> tuple[Config, str | None]:
    """Return the configuration with a model where none was named, and what to say of it if it is the demo model."""
    if config.model != AUTO:
        return config, None
    demo = replace(config, model="demo")
    if config.engine.load_format is LoadFormat.DUMMY:
        return demo, None
    if (form := config.engine.quantization) is not Quantization.NONE:
        return demo, f"no model was named: serving demo in {form.value}, since smollm2 is quantised already"
    model, why = chosen_model(config.cache_directory)
    said = f"no model was named: serving demo, which knows only a little small talk, since {why}" if why else None
    return replace(config, model=model), said


def dummy_warning(config: Config) -> str | None:
    """Return what to say of random weights; None where the model has its own."""
    if config.engine.load_format is not LoadFormat.DUMMY:
        return None
    named = Path(config.model).expanduser()
    borrows = named.is_dir() and not has_tokenizer(named)
    tokens = f"; {named} has no tokenizer, so tokens are spelled by the demo model's" if borrows else ""
    return f"weights are random (engine.load_format dummy): answers are nonsense{tokens}"


def check_dummy(config: Config, model: ModelConfig) -> None:
    """Refuse random weights for models whose layers are not made of plain numbers by our loader."""
    if config.engine.load_format is not LoadFormat.DUMMY:
        return
    if isinstance(model, EncoderConfig) or model.labels:
        raise ConfigError(
            "engine.load_format dummy is for models that write text, and this one makes vectors or scores: set it to"
            " auto"
        )
    if model.stored is not None and model.stored.method is not StoredMethod.MXFP4:  # that is expanded anyway
        raise ConfigError(
            f"engine.load_format dummy makes plain numbers, and the model's are quantised ({model.stored.label}): take"
            " quantization_config out of config.json, and set engine.quantization"
        )
