"""Phi-3 and Phi-4: they compute as Llama, with fused weights."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.architectures.families.llama import LayerNames, LlamaConfig, read_family
from alignedserve.architectures.given import Given


def read_phi3(given: Given) -> LlamaConfig:
    layers, has_window = given.whole("num_hidden_layers"), given.get("sliding_window") is not None
    windows = (given.whole("sliding_window"),) * layers if has_window else ()
    config = read_family(given, windows=windows, turned_share=given.number("partial_rotary_factor", 1.0))
    return replace(config, names=LayerNames(qkv="qkv_proj", gate_up="gate_up_proj"))
