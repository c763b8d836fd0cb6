"""Chooses the module that runs a model."""

from __future__ import annotations

from pathlib import Path

from alignedserve.architectures.families.bloom import BloomConfig
from alignedserve.architectures.families.deepseek import DeepseekConfig
from alignedserve.architectures.families.generic import GenericConfig
from alignedserve.architectures.families.llama import LlamaConfig
from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.architectures.vectors import EncoderConfig
from alignedserve.engine.models.encoder import Encoder, load_encoder
from alignedserve.engine.models.families.bloom import Bloom
from alignedserve.engine.models.families.deepseek import Deepseek
from alignedserve.engine.models.families.llama import Llama
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.models.model import Model
from alignedserve.engine.models.transformers_checks import load_transformers
from alignedserve.errors import UnsupportedModel


def load(folder: Path, config: ModelConfig, loader: Loader) -> tuple[ModelConfig, Model | Encoder]:
    """Load the model with our own module if there is one, else with transformers.

    The returned configuration also holds facts that only the loaded model could tell.
    """
    if isinstance(config, EncoderConfig):
        return config, load_encoder(folder, config, loader)
    if not isinstance(config, GenericConfig):
        return config, load_model(config, loader)
    return load_transformers(folder, config, loader)


def load_model(config: ModelConfig, loader: Loader) -> Model:
    """Load the model with our own module for its configuration."""
    match config:
        case LlamaConfig():
            return Llama(config, loader)
        case BloomConfig():
            return Bloom(config, loader)
        case DeepseekConfig():
            return Deepseek(config, loader)
    raise UnsupportedModel(f"there is no module for the configuration {type(config).__name__}")
