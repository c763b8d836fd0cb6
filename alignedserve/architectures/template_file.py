"""Read the chat template of a model's folder, which a base model lacks."""

from __future__ import annotations

from pathlib import Path

from alignedserve.architectures.given import read_json_if_there
from alignedserve.errors import ModelError

TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"


def template_source(folder: Path) -> str | None:
    path = folder / _TEMPLATE
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    configured = read_json_if_there(folder / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(configured, list):  # several templates with names
        named = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
        configured = named.get("default")
    if configured is not None and not isinstance(configured, str):
        raise ModelError(f"{folder / TOKENIZER_CONFIG}: chat_template must be a text")
    return configured
