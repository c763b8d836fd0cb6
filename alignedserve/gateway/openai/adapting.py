"""Load and unload adapters (LoRA), in the words of vLLM."""

from __future__ import annotations

from alignedserve.errors import AdapterError
from alignedserve.gateway.access.adapters import Adapters, UnknownAdapter
from alignedserve.gateway.openai.errors import ApiError, invalid
from alignedserve.gateway.openai.strict import Strict


class LoadAdapter(Strict):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str


class UnloadAdapter(Strict):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str


def load_adapter(body: LoadAdapter, adapters: Adapters, models: tuple[str, ...]) -> str:
    """Load an adapter and return the answer; an event loop must not call this, since it reads all of its files."""
    try:
        adapters.load(body.lora_name, body.lora_path, models)
    except AdapterError as error:
        raise invalid(str(error), code="invalid_lora") from error
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


def unload_adapter(body: UnloadAdapter, adapters: Adapters) -> str:
    """Unload an adapter and return the answer."""
    try:
        adapters.unload(body.lora_name)
    except UnknownAdapter as error:
        raise ApiError(404, str(error), param="lora_name", code="model_not_found") from error
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."
