"""Say how a worker keeps its weights, and how far the model is from the plain one where it quantises them itself.

    cache/plain/
      3f0c….safetensors       what the plain model said: read once on a machine, so all workers have the same weights
      3f0c…-DEPLOYMENT.why    why this deployment does without, also workers that start when there is more memory
      .lock                   held by the one worker that looks, and reads the plain model where it must

Each node of a Ray cluster has its own cache, and reads for itself: there near ties may be rounded otherwise.
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import torch
from safetensors import SafetensorError

from alignedserve.architectures.model_source import cache_directory
from alignedserve.architectures.quantization import Quantization
from alignedserve.architectures.vectors import EncoderConfig
from alignedserve.config.choices import LoadFormat
from alignedserve.config.config import Config
from alignedserve.core import units_for
from alignedserve.engine.calibration import COMPARED, READ, PlainModel, kept_name, read_plain, tokens_of
from alignedserve.engine.device.devices import free_memory
from alignedserve.engine.engine import Engine
from alignedserve.machine.resources import memory
from alignedserve.machine.whole_file import one_at_a_time, whole_file
from alignedserve.shell.part import Place
from alignedserve.shell.process import note_weights
from alignedserve.signs import Stage
from alignedserve.sizing.memory import demand, plain

log = logging.getLogger("alignedserve.engine")

FAR = 0.05  # nats a token, from which on a user should know that answers differ
_MOST_KEPT = 8  # files of a kind in the cache, the newest


def plain_model(place: Place, device: torch.device) -> PlainModel | str | None:
    """Return what the model says before it is quantised, or why it is not asked; None where nothing is quantised.

    Where the cache does not have it, the plain model is in memory meanwhile: it is read only where all workers of this
    machine still fit beside it.
    """
    config, (model, room) = place.config, place.capacity()
    if config.engine.quantization is Quantization.NONE or model.stored is not None:
        return None
    if config.engine.load_format is LoadFormat.DUMMY:
        return "its weights are random"
    if config.engine.tensor_parallel_size > 1:
        return "several ranks share it"
    if isinstance(model, EncoderConfig) or model.labels:
        return "it makes vectors or scores"
    if not (place.folder / "tokenizer.json").exists():
        return "its folder has no tokenizer.json"
    if not all(tokens_of(place.folder, model, text) for text in (COMPARED, READ)):
        return "its tokenizer has other tokens than the model"
    dtype, folder = getattr(torch, room.dtype), cache_directory(config.cache_directory) / "plain"
    kept = folder / kept_name(place.folder, dtype)
    refused = kept.with_name(f"{kept.stem}-{place.spec.deployment}.why")
    place.signs.stage(Stage.PLAIN)
    with one_at_a_time(folder, place.signs.advance) as takes_turns:
        if (found := _known(kept, refused, device)) is not None:
            return found
        needs = demand(plain(config), model, room, place.folder).weights
        quantised = demand(config, model, room, place.folder).total
        if (why := _too_large(config, device, needs, quantised, takes_turns)) is not None:
            _keep(refused, why.encode())
            return why
        place.signs.stage(Stage.WEIGHTS, needs)
        found = read_plain(place.folder, dtype, device, place.signs)
        gc.collect()  # or what refers to itself would keep the plain model
        _keep(kept, found.packed())
        return found


def _known(kept: Path, refused: Path, device: torch.device) -> PlainModel | str | None:
    """Return what an earlier worker found; None where there was none, or its file cannot be read."""
    try:
        return refused.read_text() if refused.exists() else PlainModel.unpacked(kept.read_bytes(), device)
    except OSError:  # mostly none has been here; `_keep` says if the folder is at fault
        return None
    except (SafetensorError, KeyError) as error:
        log.warning("%s is broken (%s): the plain model is read again", kept, error)
        return None


def _keep(path: Path, content: bytes) -> None:
    """Write the file, and remove the oldest of its kind, and what workers left that were killed as they wrote."""
    try:
        with whole_file(path) as file:
            file.write(content)
        by_age = sorted(path.parent.glob(f"*{path.suffix}"), key=lambda file: file.stat().st_mtime_ns)
        for old in (*by_age[:-_MOST_KEPT], *path.parent.glob("*.part")):
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning(
            "what the plain model says cannot be kept: %s: each worker reads it by itself at each start, and its"
            " weights may differ from the others': set cache_directory to a folder that can be written",
            error,
        )


def _too_large(
    config: Config, device: torch.device, plain_bytes: int, quantised_bytes: int, takes_turns: bool
) -> str | None:
    workers, found = config.topology.prefill_workers + config.topology.decode_workers, memory()
    if (free := free_memory(device)) is not None:
        workers = 1
    elif found is not None:
        free = found.available
    needed = (1 if takes_turns else workers) * plain_bytes + workers * quantised_bytes
    if free is None or needed <= free:
        return None
    each = f"{workers} workers" if workers > 1 else "a worker"
    return f"{free >> 20} MB are free, and {each} would need {needed >> 20} with the plain weights"


def say_precision(engine: Engine, found: PlainModel | str | None) -> None:
    """Log what the weights cost, once the engine is there."""
    kept = engine.weights_as
    if isinstance(found, PlainModel):
        if units_for(len(found.tokens), engine.block_size) <= engine.num_blocks:
            kept = _measured(engine, found)
        else:
            found = "the device cache is too small for its text"
    if isinstance(found, str):
        log.info("weights as %s: how far that is from the plain model is not measured, since %s", kept, found)
        kept += f"; not compared with the plain model, since {found}"
    note_weights(kept)


def _measured(engine: Engine, found: PlainModel) -> str:
    nats, dtype = found.divergence(engine.logits_of(found.tokens)), str(engine.dtype).removeprefix("torch.")
    words = f"{engine.weights_as}; {nats:.2g} nats a token from plain {dtype}, on a text of {len(found.tokens)} tokens"
    if nats > FAR:
        log.warning("weights as %s: answers may differ from the model's, engine.quantization int8 is nearer", words)
    else:
        log.info("weights as %s", words)
    return words
