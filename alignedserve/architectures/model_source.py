"""Find the folder of a model from the name that a user gives."""

from __future__ import annotations

import re
from pathlib import Path

from alignedserve.errors import ModelError

DEMO_FOLDER = Path(__file__).parent.parent / "demo_model"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
_SUBFOLDERS = ["*/*"]  # the same weights in other formats


def resolve(model: str) -> Path:
    """Return the folder of the demo model, of a local folder, or of a model that is fetched from the hub."""
    if model == "demo":
        return _demo()
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if _HUB_ID.fullmatch(model) and not folder.exists():
        return _fetch(model)
    raise ModelError(f"{model} is neither a folder nor a hub id such as org/name, nor demo")


def _demo() -> Path:
    if not (DEMO_FOLDER / "config.json").is_file():
        raise ModelError(f"the demo model is missing from this installation ({DEMO_FOLDER}): name a model folder")
    return DEMO_FOLDER


def _fetch(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, allow_patterns=_FILES, ignore_patterns=_SUBFOLDERS))
    except GatedRepoError:
        why = "the hub gives it only after you accept its terms: do so there, then set HF_TOKEN"
    except RepositoryNotFoundError:
        why = "the hub has no such model, or shows it only with HF_TOKEN set"
    except LocalEntryNotFoundError:
        why = "the hub cannot be reached, or HF_HUB_OFFLINE is set, and it was not fetched before"
    except HFValidationError:
        why = "this cannot be a hub id"
    except Exception as error:  # errors of the hub's client, its HTTP library and the disk
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    raise ModelError(f"{model} is not a local folder and cannot be fetched: {why}")
