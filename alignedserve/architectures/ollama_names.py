"""The hub ids of models that people know by their names in Ollama, such as qwen2.5:0.5b."""

from __future__ import annotations

import re

# name -> hub id, with {} for the size as the hub writes it: in capitals or not; and the size where none is named
_HUB = {
    "llama3.3": ("meta-llama/Llama-3.3-{}-Instruct", "70B"),
    "llama3.2": ("meta-llama/Llama-3.2-{}-Instruct", "3B"),
    "llama3.1": ("meta-llama/Llama-3.1-{}-Instruct", "8B"),
    "llama3": ("meta-llama/Meta-Llama-3-{}-Instruct", "8B"),
    "qwen3": ("Qwen/Qwen3-{}", "8B"),
    "qwen2.5": ("Qwen/Qwen2.5-{}-Instruct", "7B"),
    "qwen2.5-coder": ("Qwen/Qwen2.5-Coder-{}-Instruct", "7B"),
    "gemma3": ("google/gemma-3-{}-it", "4b"),
    "gemma2": ("google/gemma-2-{}-it", "9b"),
    "mistral": ("mistralai/Mistral-{}-Instruct-v0.3", "7B"),
    "phi4": ("microsoft/phi-4", ""),
    "deepseek-r1": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-{}", "7B"),
    "gpt-oss": ("openai/gpt-oss-{}", "20b"),
    "tinyllama": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", ""),
    "smollm2": ("HuggingFaceTB/SmolLM2-{}-Instruct", "1.7B"),
    "all-minilm": ("sentence-transformers/all-MiniLM-L6-v2", ""),
}


def hub_id(name: str) -> str | None:
    """Return the hub id of a model that Ollama calls so; None where it is not among the known."""
    family, _, tag = name.lower().partition(":")
    if family not in _HUB:
        return None
    model, usual = _HUB[family]
    size = re.match(r"[0-9.]+[bm](-a[0-9]+b)?(?![a-z])", tag)
    named = usual if size is None else size[0]
    return model.format(named.upper() if usual.isupper() else named)
