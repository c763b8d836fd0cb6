"""The names of the formats of calls, for whoever checks a setting and needs no format."""

from __future__ import annotations

# The formats of calls by vLLM's names. It has two names for some that are read alike.
CALL_FORMATS = {
    **{name: name for name in ("openai", "mistral", "deepseek_v3", "deepseek_v31", "kimi_k2", "glm45", "qwen3_coder")},
    **{name: name for name in ("seed_oss", "cohere_command3", "phi4_mini_json", "granite", "hermes")},
    **{name: name for name in ("llama4_pythonic", "pythonic", "llama3_json")},
    "granite4": "hermes",
    "glm47": "glm45",
    "llama4_json": "llama3_json",
    "qwen3_xml": "qwen3_coder",
}
