"""Chooses the module that runs a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from alignedserve.architectures.families.deepseek import DeepseekConfig
from alignedserve.architectures.families.encoders import BertConfig, ModernBertConfig
from alignedserve.architectures.families.generic import GenericConfig
from alignedserve.architectures.families.llama import LlamaConfig
from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.architectures.families.opt import OptConfig
from alignedserve.architectures.vectors import EncoderConfig
from alignedserve.engine.models.encoder import Encoder, EncoderModel
from alignedserve.engine.models.families.bert import Bert
from alignedserve.engine.models.families.deepseek import Deepseek
from alignedserve.engine.models.families.llama import Llama
from alignedserve.engine.models.families.modern_bert import ModernBert
from alignedserve.engine.models.families.opt import Opt
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.models.model import Model
from alignedserve.engine.models.transformers_checks import load_transformers
from alignedserve.engine.weights.adapters import AdaptedLayers
from alignedserve.errors import UnsupportedModel


def load(folder: Path, config: ModelConfig, loader: Loader) -> tuple[ModelConfig, Model | Encoder]:
    """Load the model with our own module if there is one, else with transformers.

    The returned configuration also holds facts that only the loaded model could tell.
    """
    if isinstance(config, EncoderConfig):
        return config, Encoder(load_encoder(config, loader), loader.device)
    if not isinstance(config, GenericConfig):
        return config, load_model(config, loader)
    return load_transformers(folder, config, loader)


def load_encoder(config: EncoderConfig, loader: Loader) -> EncoderModel:
    """Load the encoder with the module for its configuration."""
    loader = replace(loader, adapted=AdaptedLayers())  # adapters change no encoder
    match config:
        case BertConfig():
            return Bert(config, loader)
        case ModernBertConfig():
            return ModernBert(config, loader)
    raise UnsupportedModel(f"there is no module for the configuration {type(config).__name__}")


def load_model(config: ModelConfig, loader: Loader) -> Model:
    """Load the model with our own module for its configuration."""
    match config:
        case LlamaConfig():
            return Llama(config, loader)
        case OptConfig():
            return Opt(config, loader)
        case DeepseekConfig():
            return Deepseek(config, loader)
    raise UnsupportedModel(f"there is no module for the configuration {type(config).__name__}")
