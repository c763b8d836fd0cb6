"""Tiny random adapters in PEFT's format, which PEFT itself writes, and the models that it makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from alignedserve.architectures.families.lora import read_lora
from alignedserve.architectures.families.model_config import read_config
from alignedserve.core import Adapter
from tests.reference import load

ALL = "all-linear"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
NOT_ADAPTED = ["project_in", "project_out", "router", "shared_expert_gate"]  # outside layers, or choosing: refused


def make_adapter(
    model: Path,
    folder: Path,
    *,
    seed: int,
    rank: int = 4,
    targets: str | Sequence[str] = ALL,
    scale: float = 0.3,
    **options: Any,
) -> Path:
    """Write an adapter of random numbers for a model."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    wished = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(r=rank, target_modules=wished, exclude_modules=NOT_ADAPTED, task_type="CAUSAL_LM", **options)
    adapted = get_peft_model(load(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(
                    scale * torch.randn_like(parameter)
                )  # PEFT begins with B of zeros, which changes nothing
    adapted.save_pretrained(str(folder))
    return folder


def with_adapter(model: Path, folder: Path) -> Any:
    """Return the reference: the model of transformers with PEFT's adapter."""
    from peft import PeftModel

    return PeftModel.from_pretrained(load(model), folder).eval()


def named(name: str, folder: Path, model: Path) -> Adapter:
    """Return the adapter as a request names it."""
    return Adapter(name, str(folder), read_lora(folder, read_config(model)).id)
