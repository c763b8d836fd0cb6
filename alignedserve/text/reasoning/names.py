"""The names of the families that reason, for whoever checks a setting and needs no family."""

from __future__ import annotations

AUTO, NONE = "auto", "none"  # as the chat template shows; answers are not parted

REASONING_FAMILIES = (
    *("deepseek_r1", "deepseek_v3", "deepseek_v4", "ernie45", "cohere_command3", "cohere_command4", "gemma4", "glm45"),
    *("glm47", "granite", "holo2", "hunyuan_a13b", "hy_v3", "inkling", "kimi", "kimi_k2", "kimi_k3", "mimo"),
    *("minimax_m2", "minimax_m3", "mistral", "nemotron_v3", "olmo3", "openai_gptoss", "poolside_v1", "qwen3"),
    *("seed_oss", "solar_open2", "step3", "step3p5"),
)
