"""The engine: owns the weights and the device cache, and executes step plans.

A step is one pass over all of its tokens, prompt chunks and decodes alike: concatenated for the
linear layers, by request for attention. The plan says which requests run, and which blocks hold the KV.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from alignedserve.architectures.families.generic import GenericConfig
from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.kv_dtype import KvDtype
from alignedserve.architectures.quantization import Quantization
from alignedserve.architectures.vectors import read_pooled
from alignedserve.core import Adapter, Decode, Sampling, StepFailure, StepPlan, StepResult, units_for
from alignedserve.engine.calibration import logits_of
from alignedserve.engine.device import devices, large_pages
from alignedserve.engine.device.devices import CPU, out_of_memory
from alignedserve.engine.device.ranks import ALONE, OTHER_RANK, RankLinks
from alignedserve.engine.device.shared_sums import Maps
from alignedserve.engine.forms.other import OtherForm, other_form
from alignedserve.engine.graphs import CAPTURED, STEP_BY_STEP, Capture, Computed, StepGraphs, places_for
from alignedserve.engine.inputs import NOTHING, Before
from alignedserve.engine.models.encoder import Encoder
from alignedserve.engine.models.families.choice import load
from alignedserve.engine.models.folding import FoldedAttention, fold_blocks
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.models.model import Attention, KvAttention, attention_of
from alignedserve.engine.models.runs import Checker, Run, run_of
from alignedserve.engine.pooling import Pooler, Vectors, encoded, head_of
from alignedserve.engine.sampling.reading import (
    Begun,
    Done,
    DrawnStep,
    Passing,
    next_tokens,
    result_of,
    rows_wanted,
    with_draws,
)
from alignedserve.engine.sampling.sampling import NextToken, Sampler
from alignedserve.engine.weights.adapters import AdaptedLayers, KeptAdapters
from alignedserve.engine.weights.forms import weights_of
from alignedserve.engine.weights.tensors import Weights
from alignedserve.errors import PlanError, RankLost
from alignedserve.fallbacks import fell_back
from alignedserve.kernels.common.adapters import StaticAdapters, StepAdapters
from alignedserve.kernels.common.decoder import Pauses
from alignedserve.kernels.common.int8_kv import vector_of
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.quantised import AnyQuantised, QuantisedLinear
from alignedserve.kernels.common.spans import LongChunks, QuerySpan, Spans, StaticSpans, StepSize
from alignedserve.kernels.dispatch.dispatcher import KernelChoice, Kernels, choose
from alignedserve.kernels.dispatch.rehearsing import (
    OF_EXPERTS,
    OF_LAYERS,
    REHEARSED,
    rehearse,
    rehearse_experts,
    rehearse_layers,
)
from alignedserve.kernels.dispatch.tuning import Seconds, seconds_on_gpu, tune
from alignedserve.signs import NO_SIGNS, Signs, Stage
from alignedserve.text.syntax import Syntaxes

log = logging.getLogger("alignedserve.engine")


class Engine:
    """A model with its device cache and sampler on one device."""

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int | Callable[[], int],
        block_size: int = 16,
        dtype: str | None = None,
        kv_dtype: KvDtype = KvDtype.AUTO,
        quantization: Quantization = Quantization.NONE,
        squares: Mapping[str, Tensor] | None = None,
        kernels: Kernels | None = None,
        tune_s: float = 0.0,
        ranks: RankLinks = ALONE,
        device: torch.device = CPU,
        tensors_of: Callable[[Path], Weights] = weights_of,
        has_graphs: bool = False,
        adapter_bytes: int | None = None,
        signs: Signs = NO_SIGNS,
    ) -> None:
        """Load the model of the folder and make its device cache of `num_blocks` blocks.

        Without `kernels` the fastest ones for the device are taken. For `tune_s` seconds linear layers are measured, to
        choose the fastest way for each; with 0 each takes the usual way. Each of several `ranks` has an engine of its
        own with `num_blocks` blocks; all run the same steps, and rank 0 samples. If `num_blocks` is a function, it is
        called once the weights are loaded. `has_graphs` says that steps will be captured: this needs one block more.
        Above `adapter_bytes`, the adapters that no step has needed for longest are forgotten. `signs` hears how far
        the start is. `squares` are the mean squares of what goes into layers, by which they are quantised.
        """
        large_pages.keep_freed_memory()
        device = devices.use(device)
        self.ranks, self.device, self.has_graphs, self.signs = ranks, device, has_graphs, signs
        self.reads_later = device.type == "cuda"  # a step's tokens may be read after the next step has begun
        whole = read_config(folder)
        self.config = whole.share(ranks.size)
        self.block_size = block_size
        self.dtype: torch.dtype = getattr(torch, dtype or self.config.dtype)
        self.quantization, self.kv_dtype, stored = quantization, kv_dtype, self.config.stored
        if stored is not None:  # then its layers stay as they are
            stored.check(quantization)
            self.quantization = Quantization.NONE
        chosen = (
            choose(device, self.dtype, block_size=block_size) if kernels is None else KernelChoice(kernels, "asked for")
        )
        self._kernels = chosen.kernels
        self._quantised: dict[Hashable, QuantisedLinear] = {}  # one of each kind
        # Kernels may be replaced.
        self._adapted = AdaptedLayers(lambda step, layer, x, out: self._kernels.adapt(step, layer, x, out))
        self._load(folder, tensors_of(folder), squares or {}, tune_s)
        self.adapters = KeptAdapters(self._adapted.layers, whole, adapter_bytes)
        # Only after loading, so that a folder that cannot be loaded logs nothing but its error.
        log.info("kernels: %s (%s)", chosen.kernels.name, chosen.why)
        self.resize(num_blocks if isinstance(num_blocks, int) else num_blocks())
        syntaxes = Syntaxes(folder) if (folder / "tokenizer.json").exists() else None
        self._sampler = Sampler(self.config.vocab_size, syntaxes, self._kernels)
        self._before = NOTHING  # tokens of the newest step

    @property
    def weights_as(self) -> str:
        """Return how weights are kept, for logs."""
        dtype, stored = str(self.dtype).removeprefix("torch."), self.config.stored
        if stored is not None:
            return f"{dtype}, layers {stored.label}"
        return dtype if self.quantization is Quantization.NONE else f"{dtype}, layers {self.quantization.value}"

    @property
    def numbers_as(self) -> str:
        """Return how weights and KV are kept, for profiles."""
        return self.weights_as if self.kv_dtype is KvDtype.AUTO else f"{self.weights_as}, KV {self.kv_dtype.value}"

    @cached_property
    def form(self) -> OtherForm:
        """Return the other form than KV in which requests can be kept."""
        return other_form(self.config, self.kv_dtype, self._kernels, self._model if self._encoder is None else None)

    @property
    def captured(self) -> str:
        """Return which kinds of steps are captured, in words; nothing where none are."""
        return "" if self._graphs is None else self._graphs.kinds

    @property
    def sums_through_memory(self) -> bool:
        """Return whether ranks sum through each other's memory for some captured steps."""
        return self._sums is not None and bool(self._sums.rows)

    @property
    def kernels(self) -> str:
        """Return the identity of the kernels in use, which differs from that of any other build."""
        return self._kernels.identity

    @torch.inference_mode()
    def _load(self, folder: Path, tensors: Weights, squares: Mapping[str, Tensor], tune_s: float) -> None:
        began = time.perf_counter()
        linears: list[Linear] = []

        def make_linear(weight: Tensor | AnyQuantised, bias: Tensor | None) -> Linear:
            made = self._kernels.layer(weight, bias, self.dtype)
            if isinstance(made, QuantisedLinear):
                self._quantised.setdefault(made.kind, made)
            else:
                linears.append(made)
            return made

        ranks, device, quantization = self.ranks, self.device, self.quantization
        loader = Loader(
            *(tensors, self.dtype, self._kernels, make_linear, ranks, device, quantization, squares, self._adapted),
            signs=self.signs,
        )
        self.config, model = load(folder, self.config, loader)
        self._in_turn = loader.in_turn
        self._decoder = next(iter(loader.decoders), None)
        self._sums = next(iter(loader.sums), None)
        self._mixtures = {mixture.kind: mixture for mixture in loader.mixtures}  # one of each kind
        self._encoder = model if isinstance(model, Encoder) else None
        if not isinstance(model, Encoder):
            self._model = model
        head = head_of(folder, self.config, device) if self._encoder is None else self._encoder.head
        self._pooler = Pooler(read_pooled(folder, self.config), device, head)
        seconds, megabytes = time.perf_counter() - began, loader.num_bytes >> 20
        log.info("loaded %s in %.1f s, %d MB of weights as %s", folder, seconds, megabytes, self.weights_as)
        if tune_s:
            self.signs.stage(Stage.LAYERS, len({layer.shape for layer in linears}))
            tune(linears, tune_s, self.signs.advance)

    def resize(self, num_blocks: int) -> None:
        """Make an empty device cache of `num_blocks` blocks; KV in the old cache and captured graphs are dropped."""
        self.num_blocks = num_blocks
        self.cache = self.new_cache(num_blocks + self.has_graphs)  # the last block is for padding rows (graphs.py)
        self._graphs: StepGraphs | None = None
        self._captured_adapters: StaticAdapters | None = None  # of the step that is replayed
        self._checker = Checker(self.config, num_blocks, self.block_size, lambda run: self.form.problem(run))

    def new_cache(self, num_blocks: int) -> Tensor:
        """Return a device cache of zeros. On a CPU it takes memory only once written or mapped (large_pages.py)."""
        config = self.config
        dtype, vector = vector_of(self.kv_dtype, self.dtype, config.num_kv_heads, config.head_dim)
        shape = (config.num_layers, 2 * num_blocks, self.block_size, vector)
        if self.device.type == "cpu":
            return large_pages.zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def why_no_graphs(self) -> str | None:
        """Return why steps cannot be captured, or None where they can."""
        if self.device.type != "cuda":
            return f"{self.device} has no graphs"
        if not self.ranks.captures:
            return "ranks meet over sockets in the middle of a step"
        if isinstance(self.config, GenericConfig):
            return "transformers runs this model"
        if self._in_turn:
            return f"{self._in_turn[0]}: which of them a step needs is known only when it runs"
        if self.config.has_experts and not self._kernels.captures_experts:
            return f"which experts a step needs is known only when it runs, with {self._kernels.name}"
        return None if self._captures else f"attention of {self._kernels.name} looks at tables on the CPU"

    @property
    def captures_adapters(self) -> bool:
        """Return whether there is memory for adapters, and what they add can be captured."""
        return bool(self.adapters.most_bytes and self._adapted.layers) and self._kernels.captures_adapters

    @property
    def _captures(self) -> bool:
        """Return whether the attention and the experts of this model read nothing on the CPU."""
        kernels, config = self._kernels, self.config
        if config.has_experts and (self._in_turn or not kernels.captures_experts):
            return False
        return kernels.captures if config.latent_rank is None else kernels.captures_latent

    def rehearse(self) -> None:
        """Compile the kernels on a GPU, and measure them where there is a choice, so that no step waits for that.

        Nothing is in the cache yet: it may be written to.
        """
        if self.device.type == "cuda":
            config, layer = self.config, self.cache[0]
            shape = config.num_heads, config.compared_dim, config.vocab_size, config.max_positions
            products = () if self._decoder is None else self._decoder.rehearsals(layer)
            num_layers = len(OF_LAYERS) * len(self._quantised) + OF_EXPERTS * len(self._mixtures)
            self.signs.stage(Stage.KERNELS, REHEARSED + num_layers + len(products))
            rehearse(self._kernels, layer, self.dtype, *shape, config.latent_rank, self.signs.advance)
            rehearse_layers(self._quantised.values(), config.vocab_size, self.signs.advance)
            rehearse_experts(self._kernels, self._mixtures.values(), self.signs.advance)
            for measure in products:
                measure()
                self.signs.advance()

    @torch.inference_mode()
    def capture(
        self,
        most: int,
        capture: Capture,
        free: Callable[[], int],
        least: int,
        *,
        most_tokens: int = 0,
        with_adapters: bool = False,
        only_prompts: bool = False,
        maps: Maps | None = None,
        seconds: Seconds = seconds_on_gpu,
    ) -> None:
        """Capture decode steps of up to `most` requests, and steps with prompts of up to `most_tokens` tokens, as long
        as `least` bytes are free: all ranks together. `with_adapters` says that each is captured with adapters, too;
        `only_prompts` that no request decodes here. With `maps` the ranks may sum through each other's memory."""
        assert self.has_graphs, "there is no block for padding"
        scratch, captures, config = self.num_blocks, self._captures, self.config
        longest = units_for(config.max_positions, self.block_size)
        places = places_for(most, longest, self.num_blocks)
        least_long, long = self.ranks.together(self._kernels.long_chunk), None  # 0 where one rank has no library
        if least_long and config.latent_rank is None:
            long = LongChunks(least_long, min(longest, self.num_blocks))
        forward, words, block_size = self._forward_captured, config.vocab_size, self.block_size
        tokens = min(most_tokens, config.max_positions)  # padding is one chunk
        draw = None if self.ranks.rank or not self._kernels.captures_draws else self._kernels.draw_by
        adapters, captures_adapters = None, self._kernels.captures_adapters
        if self.ranks.together(int(with_adapters)):
            adapters = StaticAdapters(max(most, tokens))
        self._captured_adapters = adapters
        kinds = draw, adapters, only_prompts, long, seconds
        graphs = StepGraphs(most, tokens, words, forward, capture, block_size, places, scratch, self.device, *kinds)
        self.signs.stage(Stage.GRAPHS, len(graphs))
        if maps is not None and self._sums is not None:
            like = torch.zeros((1, config.hidden_size), dtype=self.dtype, device=self.device)
            self._sums.choose(maps, graphs.rows, like, capture, seconds)
        graphs.capture_all(free, least, self.signs.advance, self.ranks)
        if not self.ranks.together(int(self._kernels.captures_adapters is captures_adapters)):
            self._captured_adapters = None  # their kernel failed, and a graph would keep what torch read on the CPU
        if self.ranks.together(int(self._captures is captures)):
            self._graphs = graphs
            if graphs.left_out:
                fell_back(CAPTURED, f"there was too little memory for those of {graphs.left_out}", STEP_BY_STEP)
        else:  # attention failed, and torch took its place: it reads tables on the CPU, whose values a graph would keep
            fell_back(CAPTURED, self.why_no_graphs or OTHER_RANK, STEP_BY_STEP)

    @property
    def compared(self) -> Mapping[StepSize, tuple[float, float]]:
        """Return the seconds of captured steps with chunks of long requests: by another library, and by ours."""
        return {} if self._graphs is None else self._graphs.compared

    def step(self, plan: StepPlan) -> StepResult:
        """Run the step and return its result.

        If memory was too small the result says so; then only the slots of tokens that were to run have changed.
        """
        return self.begin(plan).result()

    def pauses(self, rows: int) -> Pauses | None:
        """Return the pauses of steps of up to `rows` tokens; None where such steps run without a pause."""
        return self._decoder.pauses if self._decoder is not None and self._decoder.takes(rows) else None

    def begin_amid(self, plan: StepPlan) -> Begun:
        """Run a step in the pause of another."""
        adapters = self._adapted.step
        try:
            return self.begin(plan)
        finally:
            self._adapted.step = adapters

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> Begun:
        """Begin the step and return before it has run: the next step may already use its tokens as inputs."""
        plan = self.without_ended(plan)
        rows = self.unread_rows(plan)
        runs = [
            *(run_of(chunk, chunk.tokens) for chunk in plan.chunks),
            *(self._decode_run(decode, decode.request in rows) for decode in plan.decodes),
        ]
        for run in runs:
            self._checker.check(run)
        wanted = next_tokens(plan, {run.request: run.tokens[-1] for run in runs})
        vectors = Vectors(self._pooler, plan)
        try:
            if self._encoder is not None:
                return Done(encoded(self._encoder, vectors, plan, runs))
            self._sampler.begin(wanted)
            is_read = bool(vectors.chunks) or any(chunk.scoring for chunk in plan.chunks)
            reads_later = self.reads_later and bool(wanted) and not is_read
            by = wanted if reads_later and not plan.draws else ()
            logits, drawn = self._compute(plan, runs, rows, vectors, by) if runs else Computed(torch.empty(0))
            if self.ranks.rank:
                self._before = self._handed_on(wanted) if reads_later else NOTHING
                return Done(StepResult(plan.number, ()))
            if plan.draws:
                logits = with_draws(plan, logits, wanted)
            if not (wanted or is_read):
                self._before = NOTHING
                return Passing(plan.number, self.device)
            if reads_later:
                return self._read_later(plan, wanted, logits, drawn)
            result = vectors.added_to(result_of(plan, logits, self._sampler, wanted))
        except (MemoryError, RuntimeError) as error:
            why = out_of_memory(error)
            if why is None:
                raise
            if self.ranks.size > 1:  # the other ranks are in the middle of the step, and wait for this rank
                raise RankLost(f"too little memory for step {plan.number} on rank {self.ranks.rank}: {why}") from error
            return Done(StepResult(plan.number, (), failure=StepFailure(why)))
        self._before = Before.from_result(result)
        return Done(result)

    def _read_later(
        self, plan: StepPlan, wanted: Sequence[NextToken], logits: Tensor, tokens: Tensor | None
    ) -> DrawnStep:
        sampler = self._sampler
        drawn = sampler.draw(logits[: len(wanted)], wanted) if tokens is None else sampler.drawn(tokens, wanted)
        self.ranks.hand_on(drawn.tokens)
        requests = [token.request for token in wanted]
        self._before = Before.from_device(drawn.tokens, requests)
        return DrawnStep(plan.number, requests, drawn)

    def _handed_on(self, wanted: Sequence[NextToken]) -> Before:
        """Receive the tokens that rank 0 has drawn; only rank 0 reads them."""
        tokens = torch.empty(len(wanted), dtype=torch.long, device=self.device)
        self.ranks.hand_on(tokens)
        return Before.from_device(tokens, [token.request for token in wanted])

    def prepare_syntax(self, sampling: Sampling, caller: str, ready: Callable[[], None]) -> None:
        """Compile the syntax beside the steps; `ready` is called in another thread."""
        self._sampler.prepare(sampling, caller, ready)

    def without_ended(self, plan: StepPlan) -> StepPlan:
        """Return the plan without decodes planned ahead for requests that have ended since."""
        left = tuple(d for d in plan.decodes if d.token is not None or not self._before.ended(d.request))
        return plan if len(left) == len(plan.decodes) else replace(plan, decodes=left)

    def unread_rows(self, plan: StepPlan) -> dict[str, int]:
        """Return the device row of each decode with an input token not read yet.

        Where history edits the logits, the decode is left out: the token must be read first.
        """
        rows = (
            (decode.request, self._before.row(decode.request))
            for decode in plan.decodes
            if decode.token is None and decode.history is None
        )
        return {request: row for request, row in rows if row is not None}

    @torch.inference_mode()
    def logits_of(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits of all tokens of a text, before any request is there, in the first blocks."""
        self._adapted.step = None
        return logits_of(tokens, self._model, self._kernels, self.cache)

    def _decode_run(self, decode: Decode, is_unread: bool) -> Run:
        if is_unread:
            return run_of(decode, (0,))  # stands for the token that only the device has
        return run_of(decode, (self.sampled(decode.request) if decode.token is None else decode.token,))

    def sampled(self, request: str) -> int:
        """Return the token that the step before sampled for the request."""
        return self._before.token(request)

    def _compute(
        self,
        plan: StepPlan,
        runs: Sequence[Run],
        unread: Mapping[str, int],
        vectors: Vectors,
        drawn: Sequence[NextToken],
    ) -> Computed:
        """Run the model and return the logits of the tokens that `result_of` needs; `vectors` gets its states. A step
        that is captured draws the tokens `drawn` itself if it can."""
        # Decodes come first: a kernel may let the last rows run half a layer behind them (csrc/decoder.cpp).
        ordered = sorted(runs, key=lambda run: (bool(run.kv.form), len(run.tokens) > 1))
        lies = [
            QuerySpan(len(run.tokens), run.num_held, run.kv.blocks, run.kv.dropped)
            for run in ordered
            if not run.kv.form
        ]
        first, end = {}, 0  # row of each request's first token
        for run in ordered:
            first[run.request] = end
            end += len(run.tokens)
        tokens = [token for run in ordered for token in run.tokens]
        inputs = self._before.inputs(tokens, {first[request]: row for request, row in unread.items()})
        self._adapted.step = adapters = self.adapters.step(_rows_by_adapter(ordered, first))
        fold = self.config.fold if any(run.kv.dropped for run in runs) else None
        wanted = rows_wanted(plan, [first[run.request] for run in runs])
        counted = vectors.rows(first)
        is_captured = adapters is None or self._captured_adapters is not None
        is_plain = len(lies) == len(runs) and is_captured and fold is None and not counted
        if self._graphs is not None and is_plain:
            computed = self._graphs.replay(lies, inputs, wanted, lambda: self._sampler.table(drawn), adapters)
            if computed is not None:
                return computed
        spans = Spans(lies, self.block_size)
        attention: Attention
        if fold is None:
            attention = self._attention(ordered, spans, adapters)
        else:
            attention = FoldedAttention(ordered, self.cache, fold, self._kernels)
        rows = None
        if counted or wanted != [*range(end)]:
            rows = on_device(torch.tensor(wanted + counted, dtype=torch.long), self.device)
        others = [torch.arange(run.start, run.end) for run in ordered[len(lies) :]]
        positions = torch.cat((spans.positions, *others)) if others else spans.positions
        placed = inputs.placed(self.device), on_device(positions, self.device), rows, attention
        if not counted:
            return Computed(self._model.forward(*placed))
        states = self._model.states(*placed)
        vectors.take(states[len(wanted) :])
        return Computed(self._model.logits(states[: len(wanted)]) if wanted else torch.empty(0))

    def _attention(self, ordered: Sequence[Run], spans: Spans, adapters: StepAdapters | None) -> Attention:
        """Return the attention of a step: first come the runs of KV, which `spans` describes."""
        others = ordered[len(spans) :]
        if not others:
            return attention_of(spans, self.cache, self._kernels, adapters)
        for_kv = KvAttention(self.cache, spans, self._kernels) if len(spans) else None
        return self.form.attention(for_kv, spans.num_rows, others, self.cache)

    def _forward_captured(self, tokens: Tensor, spans: StaticSpans, rows: Tensor | None) -> Tensor:
        self._adapted.step = adapters = self._captured_adapters if spans.size.adapted else None
        attention = attention_of(spans, self.cache, self._kernels, adapters)
        return self._model.forward(tokens, spans.positions, rows, attention)

    @torch.inference_mode()
    def fold(self, folds: Sequence[Sequence[int]]) -> None:
        """Fold blocks that lie behind the windows of a request: the first of each takes what the others keep."""
        if self.config.fold is None:
            raise PlanError("blocks are to be folded, but the model has no layers with windows beside others")
        fold_blocks(self.cache, self.config.fold, folds)


def _rows_by_adapter(runs: Sequence[Run], first: Mapping[str, int]) -> dict[Adapter, list[int]]:
    """Return the rows of each adapter in a step; `first` has each request's first row."""
    rows: dict[Adapter, list[int]] = {}
    for run in runs:
        if run.adapter is not None:
            at = first[run.request]
            rows.setdefault(run.adapter, []).extend(range(at, at + len(run.tokens)))
    return rows
