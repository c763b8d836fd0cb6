"""Runs a transformers model that has no module of our own: its layers, our attention.

In transformers every layer hands its query, K and V to a function registered under the name `attn_implementation`. Our
function writes K and V to the device cache and attends over the cache; no mask is made. All tokens of a step are one
row of a batch, each with its position in its own request, so the model never sees where one request ends.

This works only for models whose layers keep nothing but K and V of each token, and do not themselves decide which
tokens a token attends to. So each model is checked when it is loaded (transformers_checks.py); a model of another kind
is refused with a message of one line. Code that comes in a model's folder is never run.

The layers of a few families call no such function. They attend by themselves, to copies of what the device cache has
(`SelfAttendingModel`).
"""

from __future__ import annotations

import inspect
import logging
import mmap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignedserve.architectures.families.generic import GenericConfig, check_transformers
from alignedserve.architectures.gguf.places import PLACES
from alignedserve.architectures.quantization import Quantization
from alignedserve.engine.device.devices import out_of_memory
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.models.model import Attention, Model
from alignedserve.engine.models.transformers_layers import quantise_layers, read_weights, reads_as_stored
from alignedserve.engine.weights.dummy import DummyWeights
from alignedserve.errors import ModelError, UnsupportedModel
from alignedserve.kernels.common.decoder import Paged
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.signs import growing

log = logging.getLogger("alignedserve.engine")

# Names of attention functions in transformers. PAGED and PROBE hand a layer's call over to the layer's model; they
# differ in their masks: a mask of PROBE carries the rule by which transformers would make it, and PAGED makes none.
PAGED, PROBE, EAGER = "alignedserve", "alignedserve_probe", "eager"
_LOCAL = {"local_files_only": True, "trust_remote_code": False}
MEMBER = "alignedserve"  # attribute of each module of a model that holds its `Calls`


# How far numbers may be off, relative to the spread of a token's. In half precision rounding errors add up over the
# layers, and may send a token to another expert: then the median over all tokens counts.
CLOSE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


def off_by(ours: Tensor, reference: Tensor, is_exact: bool) -> float:
    """Return how far the rows are off: the largest error of all where they are to be exact, else the median."""
    errors = (ours.float() - reference.float()).square().mean(-1).sqrt() / reference.float().std(-1)
    return float(errors.max() if is_exact else errors.median())


@dataclass(frozen=True)
class Call:
    """A layer's call for attention. Query is [1, heads, rows, head_dim], K and V are [1, kv_heads, rows, head_dim]."""

    module: torch.nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any  # the mask that our mask function returned, as the model passes it on
    scale: float
    options: dict[str, Any]  # all other arguments of the layer


class Calls:
    """Routes the calls of one model's layers to the function that answers them during one pass."""

    def __init__(self, model: Any) -> None:
        self._answer: Callable[[Call], Tensor] | None = None
        for module in model.modules():
            setattr(module, MEMBER, self)

    def answer(self, call: Call) -> Tensor:
        assert self._answer is not None, "layers run only within a pass"
        return self._answer(call)

    @contextmanager
    def answered_by(self, answer: Callable[[Call], Tensor]) -> Iterator[None]:
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None


@dataclass(frozen=True)
class Place:
    """Names the layer of the engine that a module attends for, and how its scores are made."""

    layer: int  # of the device cache
    scoring: Scoring


class TransformersModel(Model):
    """A transformers model as the engine runs it."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """Vectors of the device cache have this dtype."""
        self._model, self._dtype = model, dtype
        self.layers: dict[torch.nn.Module, Place] = {}  # of each module that attends: transformers_checks.py finds them
        self._calls = Calls(model)
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def kind(self) -> str:
        return type(self._model).__name__

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self._model.parameters()).device
        return device

    def name_of(self, module: torch.nn.Module) -> str:
        return next((name for name, found in self._model.named_modules() if found is module), type(module).__name__)

    def forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        return self.answered(tokens, positions, rows, partial(self._answer, attention))

    def answered(
        self, tokens: Tensor, positions: Tensor, rows: Tensor | None, answer: Callable[[Call], Tensor]
    ) -> Tensor:
        """Return logits as `forward` does, where this function attends."""
        kept = {"logits_to_keep": rows} if rows is not None and self._takes_rows else {}
        with self._calls.answered_by(answer):
            outputs = self._model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **kept)
        logits: Tensor = outputs.logits[0]
        return (logits if kept or rows is None else logits[rows]).float()

    def states(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        with self._calls.answered_by(partial(self._answer, attention)):
            outputs = self._model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        states: Tensor = outputs.last_hidden_state[0]
        return states if rows is None else states[rows]

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits, in fp32, of states: the model runs with them in place of its layers."""
        tokens = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        with standing_in(self._model, FoundStates(states[None])):
            logits: Tensor = self._model(input_ids=tokens, use_cache=False).logits[0]
        return logits.float()

    def run_plainly(self, tokens: Tensor) -> Tensor:
        """Return the logits, in fp32, of all tokens of one request, as transformers computes them without us."""
        self.attend_by(EAGER)
        logits: Tensor = self._model(input_ids=tokens[None], use_cache=False).logits[0]
        return logits.float()

    def attend_by(self, name: str) -> None:
        self._model.set_attn_implementation(name)

    def _answer(self, attention: Attention, call: Call) -> Tensor:
        query, key, value = (x[0].transpose(0, 1).to(self._dtype) for x in (call.query, call.key, call.value))
        place = self.layers[call.module]
        attended = attention.attend(place.layer, query, key.flatten(1), value.flatten(1), place.scoring)
        return attended[None].to(call.query.dtype)

    def project(self, layer: int, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        raise UnsupportedModel(f"K and V of {self.kind} cannot be computed from the inputs of a layer")


class SelfAttendingModel(TransformersModel):
    """A transformers model whose layers attend by themselves, to copies of K and V.

    Requests with as many tokens in a step run as one batch, the shorter ones padded on the left, as long as the copies
    are no larger than that of the longest request that the model takes.
    """

    def __init__(self, model: Any, dtype: torch.dtype, config: GenericConfig, kernels: Kernels) -> None:
        super().__init__(model, dtype)
        self._config, self._kernels = config, kernels
        takes = inspect.signature(model.base_model.forward).parameters
        self._cache_name = "cache" if "cache" in takes else "past_key_values"  # until transformers 5.23
        self._takes_positions = "position_ids" in takes

    def forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        return self.logits(self.states(tokens, positions, rows, attention))

    def states(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, attention: Attention) -> Tensor:
        paged = attention.paged
        assert paged is not None, "all requests are kept as KV"
        states = torch.empty(len(tokens), self._config.hidden_size, dtype=self._dtype, device=tokens.device)
        made = states.new_empty(len(paged.cache), 2, len(tokens), self._config.kv_dim)
        for batch in self._batches(paged.spans):
            own = batch.rows.to(tokens.device)
            past, mask = self._past(paged, batch)
            options = {self._cache_name: past, "attention_mask": mask, "use_cache": True}
            if self._takes_positions:
                options["position_ids"] = positions[own]
            states[own] = self._model.base_model(input_ids=tokens[own], **options).last_hidden_state.to(self._dtype)
            for number, layer in enumerate(past.layers):
                for into, whole in zip(made[number], (layer.keys, layer.values), strict=True):
                    into[own] = whole[:, :, -own.shape[1] :].transpose(1, 2).flatten(2).to(self._dtype)
        for layer, (k, v) in zip(paged.cache, made, strict=True):
            self._kernels.write(layer, paged.spans, k, v)
        return states if rows is None else states[rows]

    def _batches(self, spans: Spans) -> Iterator[_Batch]:
        bounds, lengths = spans.rows.tolist(), spans.tokens.tolist()
        queries = [end - first for first, end in pairwise(bounds)]
        batch: list[int] = []
        for span in sorted(range(len(spans)), key=lambda span: (queries[span], lengths[span])):
            fits = (len(batch) + 1) * lengths[span] <= self._config.max_positions
            if batch and (queries[batch[0]] != queries[span] or not fits):
                yield _Batch.of(spans, batch, bounds, queries[batch[0]])
                batch = []
            batch.append(span)
        yield _Batch.of(spans, batch, bounds, queries[batch[0]])

    def _past(self, paged: Paged, batch: _Batch) -> tuple[Any, Tensor | None]:
        """Return K and V as transformers keeps them, and which of the tokens count; None where all do."""
        from transformers import DynamicCache

        past, device = DynamicCache(), paged.cache.device
        pads = batch.slots < 0
        slots, absent = batch.slots.to(device), pads.to(device)
        for number, layer in enumerate(paged.cache if slots.numel() else ()):
            vectors = layer.view(-1, layer.shape[-1])
            both = (vectors[found.clamp(0)] for found in (slots, slots + layer.shape[1]))
            by_head = (x.masked_fill(absent[..., None], 0).unflatten(2, (-1, self._config.head_dim)) for x in both)
            past.update(*(x.transpose(1, 2) for x in by_head), number)
        if not pads.any():
            return past, None
        return past, torch.nn.functional.pad((~absent).long(), (0, batch.rows.shape[1]), value=1)

    def attend_by(self, name: str) -> None:
        """Do nothing: the layers attend in one way."""


@dataclass(frozen=True)
class _Batch:
    """Requests that run together."""

    rows: Tensor  # [requests, tokens of each]: where their tokens lie in the step
    slots: Tensor  # [requests, most tokens before these]: of K; -1 before the first token of a shorter request

    @staticmethod
    def of(spans: Spans, batch: Sequence[int], bounds: Sequence[int], queries: int) -> _Batch:
        past = [spans.slots(span)[:-queries] for span in batch]
        slots = torch.full((len(batch), max(map(len, past))), -1)
        for row, known in zip(slots, past, strict=True):
            row[len(row) - len(known) :] = known
        firsts = torch.tensor([bounds[span] for span in batch])
        return _Batch(firsts[:, None] + torch.arange(queries), slots)


class FoundStates(torch.nn.Module):
    """Stands in for the layers below a head, whose states are known."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self._states = states

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self._states)


@contextmanager
def standing_in(model: Any, layers: FoundStates) -> Iterator[None]:
    """Let a model run these in place of its layers."""
    prefix, own = model.base_model_prefix, model.base_model
    setattr(model, prefix, layers)
    try:
        yield
    finally:
        setattr(model, prefix, own)


def read_model(folder: Path, config: GenericConfig, loader: Loader) -> TransformersModel:
    """Read a model from a folder, and count the bytes of its weights."""
    began = time.perf_counter()
    model = _read(folder, config, loader)
    loader.count(sum(parameter.nbytes for parameter in model.parameters()))
    log.info("%s, run by transformers, was read in %.1f s", type(model).__name__, time.perf_counter() - began)
    model = model.eval().requires_grad_(False).to(loader.device)
    if config.attends_itself:
        return SelfAttendingModel(model, loader.dtype, config, loader.kernels)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{folder}: {config.architecture} is not supported: it counts positions by itself")
    return TransformersModel(model, loader.dtype)


def _read(folder: Path, config: GenericConfig, loader: Loader) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    with one_line(folder, "cannot be read by transformers"):
        ways = {} if config.attends_itself else {"attn_implementation": PROBE}
        known = AutoConfig.from_pretrained(folder, **ways, **_LOCAL)
    runs = _names(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(known), ()))
    if config.architecture not in runs:
        instead = " or ".join(runs) or "no causal language model"
        known_as = f"for its model_type {known.model_type}, transformers has {instead}"
        raise UnsupportedModel(f"{folder}: architecture {config.architecture} is not supported: {known_as}")
    with one_line(folder, f"{config.architecture} cannot be loaded by transformers"):
        if isinstance(loader.tensors, DummyWeights):
            return _random(known, loader)
        if config.stored is not None or (folder / PLACES).is_file():
            return _of_files(known, loader)
        if loader.quantization is Quantization.NONE:
            return _pretrained(folder, known, loader)
        model = _empty(known, loader.dtype)
        if reads_as_stored(model, loader.tensors):
            read_weights(model, loader)
        else:
            model = _pretrained(folder, known, loader)
            quantise_layers(model, loader)
        return model


def _resident_bytes() -> int:
    """Return the memory of this process; 0 where the system has no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def _pretrained(folder: Path, known: Any, loader: Loader) -> Any:
    """Return a model that transformers reads."""
    from transformers import AutoModelForCausalLM

    options = {"config": known, "dtype": loader.dtype, "use_safetensors": True, **_LOCAL}
    with growing(loader.signs, _resident_bytes):
        model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    missing = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})
    if missing:
        raise ModelError(f"{folder}: tensor {missing[0]} is missing, or of another shape than the configuration says")
    return model


def _random(known: Any, loader: Loader) -> Any:
    """Return a model with random weights, which are the same at every start."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(), loader.device:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(known, dtype=loader.dtype)
    if loader.quantization is not Quantization.NONE:
        quantise_layers(model, loader)
    return model


def _of_files(known: Any, loader: Loader) -> Any:
    """Return a model whose files transformers does not read."""
    if hasattr(known, "quantization_config"):
        del known.quantization_config  # transformers would ask for the packages of the format
    model = _empty(known, loader.dtype)
    read_weights(model, loader)
    return model


def _empty(known: Any, dtype: torch.dtype) -> Any:
    """Return a model whose weights are still to be read."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = AutoModelForCausalLM.from_config(known, dtype=dtype)
    model.tie_weights()
    return model


def _names(classes: Any) -> list[str]:
    return [cls.__name__ for cls in (classes if isinstance(classes, tuple) else (classes,))]


@contextmanager
def one_line(folder: Path, what: str) -> Iterator[None]:
    """Turn any error of transformers inside this context into an error of one line, unless memory is too small."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        if PROBE in str(error) or PAGED in str(error):
            why = "its layers do not call the AttentionInterface of transformers"
            raise UnsupportedModel(f"{folder}: {what}: {why}") from error
        message = " ".join(str(error).split())
        raise UnsupportedModel(f"{folder}: {what}: {type(error).__name__}: {message:.200}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from writing to the console: our own messages say what matters."""
    from transformers.utils import logging as chatter

    level, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    chatter.set_verbosity(logging.CRITICAL)
    chatter.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        chatter.set_verbosity(level)
        if bars:
            chatter.enable_progress_bar()


def register(folder: Path, architecture: str) -> None:
    """Make our attention known to transformers."""
    check_transformers(folder, architecture)
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, mask in ((PAGED, _no_mask), (PROBE, _named_mask)):
        AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(name, mask)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = Call(module, query, key, value, attention_mask, scale, options)
    calls: Calls = getattr(module, MEMBER)
    return calls.answer(call), None


def _no_mask(**_: Any) -> None:
    return None


def _named_mask(*, q_length: int, kv_length: int, mask_function: Any, **_: Any) -> Tensor:
    """Return a causal mask that carries the rule by which transformers would have made the real mask."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool).tril()
    mask.rule = mask_function  # pyrefly: ignore[missing-attribute]
    return mask
