"""The engine: owns the weights and the device cache, and executes step plans.

A step is one pass over all of its tokens, prompt chunks and decodes alike: concatenated for the
linear layers, by request for attention. Which requests run, and in which blocks their KV lies, the
plan says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from alignedserve.architectures.generic import GenericConfig
from alignedserve.architectures.model_config import read_config
from alignedserve.core import Chunk, Decode, StepFailure, StepPlan, StepResult
from alignedserve.engine.device import devices, large_pages
from alignedserve.engine.device.devices import CPU
from alignedserve.engine.device.memory import out_of_memory
from alignedserve.engine.device.ranks import ALONE, Ranks
from alignedserve.engine.graphs import Capture, DecodeGraphs
from alignedserve.engine.inputs import NOTHING, Before
from alignedserve.engine.models.attention import attention_of, hidden_slots
from alignedserve.engine.models.choice import load
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.models.runs import Checker, Run, run_of
from alignedserve.engine.models.tensors import Tensors
from alignedserve.engine.sampling.reading import Begun, Done, DrawnStep, Passing
from alignedserve.engine.sampling.sampling import NextToken, Sampler
from alignedserve.engine.sampling.step_result import next_tokens, result_of, rows_wanted
from alignedserve.errors import RankLost
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.spans import Lie, Spans
from alignedserve.kernels.common.static_spans import StaticSpans
from alignedserve.kernels.dispatch.dispatcher import KernelChoice, Kernels, choose
from alignedserve.kernels.dispatch.rehearsing import rehearse
from alignedserve.kernels.dispatch.tuning import tune
from alignedserve.text.syntax import Syntaxes

log = logging.getLogger("alignedserve.engine")


class Engine:
    def __init__(
        self,
        folder: Path,
        *,
        num_pairs: int | Callable[[], int],
        block_size: int = 16,
        dtype: str | None = None,
        kernels: Kernels | None = None,
        tune_s: float = 0.0,
        ranks: Ranks = ALONE,
        device: torch.device = CPU,
        tensors_of: Callable[[Path], Tensors] = Tensors,
        has_graphs: bool = False,
    ) -> None:
        """The fastest kernels that there are, unless others are named; for `tune_s` seconds linear layers are measured,
        to choose the fastest way of each, else the usual one is taken. Of several `ranks` each has its own
        engine with so many pairs, all take the same steps, and rank 0 samples. Where `num_pairs` is a function, that
        says how many when the weights are there. `has_graphs` where steps will be captured: they need a pair more."""
        large_pages.keep_freed_memory()
        device = devices.use(device)
        self.ranks, self.device, self.has_graphs = ranks, device, has_graphs
        self.reads_later = device.type == "cuda"  # tokens of a step may wait for the next one
        self.config = read_config(folder).share(ranks.size)
        self.block_size = block_size
        self.dtype: torch.dtype = getattr(torch, dtype or self.config.dtype)
        chosen = (
            choose(device, self.dtype, block_size=block_size) if kernels is None else KernelChoice(kernels, "asked for")
        )
        self._kernels = chosen.kernels
        self._load(folder, tensors_of(folder), tune_s)
        log.info("kernels: %s (%s)", chosen.kernels.name, chosen.why)  # a folder that cannot be loaded says that alone
        self.resize(num_pairs if isinstance(num_pairs, int) else num_pairs())
        syntaxes = Syntaxes(folder) if (folder / "tokenizer.json").exists() else None
        self._sampler = Sampler(self.config.vocab_size, syntaxes, self._kernels)
        self._before = NOTHING  # the last step

    @property
    def kernels(self) -> str:
        """Which compute, told apart from those of any other build."""
        return self._kernels.identity

    @torch.inference_mode()
    def _load(self, folder: Path, tensors: Tensors, tune_s: float) -> None:
        began = time.perf_counter()
        linears: list[Linear] = []

        def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            linears.append(self._kernels.linear(weight, bias))
            return linears[-1]

        loader = Loader(tensors, self.dtype, self._kernels, make_linear, self.ranks, self.device)
        self.config, self._model = load(folder, self.config, loader)
        seconds, megabytes = time.perf_counter() - began, loader.num_bytes >> 20
        log.info("loaded %s in %.1f s, %d MB of weights as %s", folder, seconds, megabytes, self.dtype)
        if tune_s:
            tune(linears, tune_s)

    def resize(self, num_pairs: int) -> None:
        """What was in the device cache is gone, and so is what was captured."""
        self.num_pairs = num_pairs
        self.cache = self.new_cache(num_pairs + self.has_graphs)  # the last one is of padding (graphs.py)
        self._graphs: DecodeGraphs | None = None
        self._checker = Checker(self.config, num_pairs, self.block_size)

    def new_cache(self, num_pairs: int) -> torch.Tensor:
        """Zeros that take memory only once they are written: an idle worker stays small."""
        shape = (self.config.num_layers, 2 * num_pairs, self.block_size, self.config.kv_dim)
        if self.device.type == "cpu":
            return large_pages.zeros(shape, self.dtype)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @property
    def why_no_graphs(self) -> str | None:
        """Why its decode steps cannot be captured, where that is so."""
        if self.device.type != "cuda":
            return f"{self.device} has no graphs"
        if self.ranks.size > 1:
            return "ranks meet in the middle of a step"
        if isinstance(self.config, GenericConfig):
            return "transformers runs this model"
        return None if self._kernels.captures else f"attention of {self._kernels.name} looks at tables on the CPU"

    def rehearse(self) -> None:
        """On a GPU: kernels are compiled, and measured where there is a choice, before a step waits for that. The cache
        is read as it is, and stays so."""
        if self.device.type == "cuda":
            config, layer = self.config, self.cache[0]
            rehearse(self._kernels, layer, config.num_heads, config.head_dim, config.vocab_size, config.max_positions)

    @torch.inference_mode()
    def capture(self, most: int, capture: Capture, free: Callable[[], int], least: int) -> None:
        """Steps of up to so many decodes, as long as so many bytes are free."""
        assert self.has_graphs, "there is no pair for padding"
        scratch, pairs, captures = self.num_pairs, self.num_pairs, self._kernels.captures
        words = self.config.vocab_size
        graphs = DecodeGraphs(most, words, self._decode, capture, self.block_size, pairs, scratch, self.device)
        graphs.capture_all(free, least)
        if self._kernels.captures is captures:
            self._graphs = graphs
        else:  # torch has taken the place of attention that failed: what it has looked at is in the graph for good
            log.warning("decode steps are not captured after all: %s", self.why_no_graphs)

    def step(self, plan: StepPlan) -> StepResult:
        """What came out, or that there was too little memory: then nothing has changed but places of tokens that were
        to run."""
        return self.begin(plan).result()

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> Begun:
        """The same for who goes on before it has run: the step that is begun next may name its tokens as inputs."""
        plan = self.without_ended(plan)
        rows = self.unread_rows(plan)
        runs = [
            *map(self._chunk_run, plan.chunks),
            *(self._decode_run(one, one.request in rows) for one in plan.decodes),
        ]
        for run in runs:
            self._checker.check(run)
        wanted = next_tokens(plan, {run.request: run.tokens[-1] for run in runs})
        try:
            self._sampler.begin(wanted)
            logits = self._logits(plan, runs, rows) if runs else torch.empty(0)
            is_scored = any(chunk.scoring for chunk in plan.chunks)
            reads_later = self.reads_later and bool(wanted) and not is_scored
            if self.ranks.rank:
                self._before = self._handed_on(wanted) if reads_later else NOTHING
                return Done(StepResult(plan.number, ()))
            if not (wanted or is_scored):
                self._before = NOTHING
                return Passing(plan.number, self.device)
            if reads_later:
                return self._read_later(plan, wanted, logits)
            result = result_of(plan, logits, self._sampler, wanted)
        except (MemoryError, RuntimeError) as error:
            why = out_of_memory(error)
            if why is None:
                raise
            if self.ranks.size > 1:  # the others are in the middle of it, and wait
                raise RankLost(f"too little memory for step {plan.number} on rank {self.ranks.rank}: {why}") from error
            return Done(StepResult(plan.number, (), failure=StepFailure(why)))
        self._before = Before.of(result)
        return Done(result)

    def _read_later(self, plan: StepPlan, wanted: Sequence[NextToken], logits: torch.Tensor) -> DrawnStep:
        drawn = self._sampler.draw(logits[: len(wanted)], wanted)
        self.ranks.hand_on(drawn.tokens)
        reading = DrawnStep(plan.number, [one.request for one in wanted], drawn)
        self._before = Before.unread(drawn.tokens, [one.request for one in wanted])
        return reading

    def _handed_on(self, wanted: Sequence[NextToken]) -> Before:
        """What rank 0 has drawn, which alone reads it."""
        tokens = torch.empty(len(wanted), dtype=torch.long, device=self.device)
        self.ranks.hand_on(tokens)
        return Before.unread(tokens, [one.request for one in wanted])

    def without_ended(self, plan: StepPlan) -> StepPlan:
        """Requests that were planned ahead, and have ended since."""
        if not any(one.token is None and self._before.ended(one.request) for one in plan.decodes):
            return plan
        left = tuple(one for one in plan.decodes if one.token is not None or not self._before.ended(one.request))
        return replace(plan, decodes=left)

    def unread_rows(self, plan: StepPlan) -> dict[str, int]:
        """Of decodes whose input is still on the device: where it is there. Whose logits its history edits is read."""
        rows = (
            (one.request, self._before.row(one.request))
            for one in plan.decodes
            if one.token is None and one.history is None
        )
        return {request: row for request, row in rows if row is not None}

    def _chunk_run(self, chunk: Chunk) -> Run:
        return run_of(chunk, chunk.tokens)

    def _decode_run(self, decode: Decode, is_unread: bool) -> Run:
        if is_unread:
            return run_of(decode, (0,))  # in the place of what the device has
        return run_of(decode, (self.sampled(decode.request) if decode.token is None else decode.token,))

    def sampled(self, request: str) -> int:
        """Its token of the step before."""
        return self._before.token(request)

    def _logits(self, plan: StepPlan, runs: Sequence[Run], unread: Mapping[str, int]) -> torch.Tensor:
        """Of the tokens that `result_of` wants them of."""
        ordered = sorted(runs, key=lambda run: run.is_hidden)
        lies = [self._lie(run) for run in ordered if not run.is_hidden]
        first, end = {}, 0  # row of each request's first token
        for run in ordered:
            first[run.request] = end
            end += len(run.tokens)
        tokens = [token for run in ordered for token in run.tokens]
        inputs = self._before.inputs(tokens, {first[request]: row for request, row in unread.items()})
        if self._graphs is not None and not plan.chunks and len(lies) == len(runs):
            logits = self._graphs.logits(lies, inputs)
            if logits is not None:
                return logits
        spans = Spans(lies, self.block_size)
        attention = attention_of(ordered, spans, self.cache, self.config, self._kernels, self._model)
        wanted = rows_wanted(plan, [first[run.request] for run in runs])
        rows = None if wanted == [*range(end)] else on_device(torch.tensor(wanted, dtype=torch.long), self.device)
        hidden = [torch.arange(run.start, run.end) for run in ordered if run.is_hidden]
        positions = torch.cat((spans.positions, *hidden)) if hidden else spans.positions
        return self._model.forward(inputs.placed(self.device), on_device(positions, self.device), rows, attention)

    def _decode(self, tokens: torch.Tensor, spans: StaticSpans) -> torch.Tensor:
        """Logits of one token of each request."""
        attention = attention_of((), spans, self.cache, self.config, self._kernels, self._model)
        return self._model.forward(tokens, spans.positions, None, attention)

    def _lie(self, run: Run) -> Lie:
        return Lie(len(run.tokens), run.end, run.pairs, run.from_right)

    @torch.inference_mode()
    def project(
        self, request: str, blocks: Sequence[int], pairs: Sequence[int], tokens: int, from_right: Sequence[int] = ()
    ) -> None:
        """A hidden request becomes one of the kind KV: K and V of its first `tokens` are made of what its hidden blocks
        hold, in all layers, and written to the pairs. The pairs may be made of the very same blocks."""
        self._checker.check_hidden(request, blocks, tokens)
        self._checker.check_pairs(request, pairs, tokens)
        slots = hidden_slots(blocks, self.block_size, tokens)
        spans = Spans([Lie(tokens, tokens, pairs, from_right)], self.block_size)
        for layer, cache in enumerate(self.cache.unbind(0)):
            hidden = self._kernels.read_hidden(cache, slots, self.config.hidden_size)
            k, v = self._model.project(layer, hidden, spans.positions)
            self._kernels.write(cache, spans, k, v)
