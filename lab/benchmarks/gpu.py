"""Measure the engine on a GPU, on random weights of real shapes; it needs torch, Triton, transformers and numpy.

    python -m lab.benchmarks.gpu                          # all parts, of the 8B
    python -m lab.benchmarks.gpu --only decode            # a single part
    python -m lab.benchmarks.gpu --model tiny             # what it measures, tried on a CPU

`warm` compiles and measures all choices of the kernels, and names those that are broken. Decode is measured in three
ways: kernel by kernel, with captured steps, and with captured steps that each begin before the result of the step
before is read; beside the time of a step are that of its host and that for which the GPU computes. `kernels` says what
a step's time goes to.

`pdl` replays steps with and without programmatic dependent launches, and compares what they write: a kernel that does
not wait for those before it reads what the step of other tokens has left in the same memory.

`quantised` measures each kind of quantised weights against bf16. `fp8` is what a folder of 8-bit floats with a scale
for each output takes: its head stays bf16.

Every share is relative to a measurement of the same GPU in the same run: memory bandwidth of a copy within the device,
speed of a large product, speed of a copy from pinned memory. A case that does not fit, or a part that fails, is
reported and left out. lab/benchmarks/gpu_ceilings.py measures what needs no engine, tools/quarter.py runs both.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from enum import Enum
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Thread
from unittest.mock import patch

import torch

from alignedserve.architectures.quantization import Quantization
from alignedserve.core import Chunk, Decode, KvForm, Sampling, StepPlan, StepResult
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.device.devices import beside_steps, free_memory
from alignedserve.engine.device.pinning import cudart_for, pin
from alignedserve.engine.engine import Engine
from alignedserve.engine.graphs import CudaCapture
from alignedserve.engine.weights.dummy import DummyWeights
from alignedserve.engine.weights.tensors import Cut
from alignedserve.kernels.common import fp8
from alignedserve.kernels.common.fp8 import fp8_weight, why_none
from alignedserve.kernels.common.quantised import FP8, AnyQuantised, Fp8Weight
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.lab.benchmarks.common.gpu_shapes import (
    BLOCK_SIZE,
    DEVICE,
    MODELS,
    PAGE,
    about,
    all_tried,
    asked,
    busy,
    config_of,
    head_weights,
    kernels_of,
    left_out,
    num_read,
    seconds,
    step_bytes,
    timed,
)
from alignedserve.lab.benchmarks.common.report import report
from alignedserve.lab.devices.devices import Model

PARTS = ("warm", "decode", "kernels", "prompts", "copies", "pdl", "quantised")
LEFT = 4 << 30  # bytes beside the cache, for steps, graphs and the data of measurements
ON_CPU = 1 << 28  # bytes of the cache in a dry run
MOST_BATCH, STEP_TOKENS = 256, 2048
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, top_p=0.95)
DECODES = [(batch, 1000) for batch in (1, 8, 32, 64, 128, 256)] + [(1, 8000), (16, 8000)]
EAGER = [(1, 1000), (64, 1000)]
PREFILL_GOAL, SLOWDOWN_GOAL = 0.6, 1.05
COPY_GOAL = 45.0  # GB/s, of a link of 55
OF_WHOLE = [(1, 1000), (64, 1000)]  # decodes of a mixture with all layers, which takes longer to make and to capture
# ms, on an H100, whose memory moves 3.35 TB/s.
STEP_GOALS = {("llama_8b_gqa", 1): 5.6, ("llama_8b_gqa", 128): 12.5, ("qwen3_moe_fp8", 64): 15.0}
JOINING = 8_000 // PAGE * PAGE  # tokens of a request that joins others
PROMPTS = [(512, 0), (2048, 0), (8192, 0), (512, 8000)]  # tokens, and those before them
QUANTISED, SHORT = (1, 8, 64), 64  # batches, and tokens before: nearly all that is read is weights
BLOCK = 128  # outputs and inputs of 8-bit floats that share a scale
MANY, MIXED = 64, (64, 128, 256, 512)  # decodes in a mixed step, and tokens of the prompt
OVERLAPPED, REPLAYS = (1, 2, 8, 64), 100 if DEVICE.type == "cuda" else 2  # batches, and replays of each of two steps
OF_BUSY = 1.1  # the time of a mixed step that is planned ahead, in times of that for which the GPU computes


class Bench:
    quantization = Quantization.NONE
    tensors: type[DummyWeights] = DummyWeights
    expert_bytes = 2.0  # of a weight
    decoding = DECODES

    def __init__(self, model: Model) -> None:
        self.model, self.device = model, DEVICE

    @cached_property
    def bandwidth(self) -> float:
        """Return the bytes per second that a copy within the device reads and writes."""
        source = torch.empty(1 << 30, dtype=torch.uint8, device=self.device)
        out = torch.empty_like(source)
        return 2 * source.nbytes / seconds(lambda: out.copy_(source))

    @cached_property
    def products(self) -> float:
        """Return the operations per second of a large product in bf16."""
        edge = 8192 if self.device.type == "cuda" else 512
        a, b = torch.randn(2, edge, edge, device=self.device, dtype=torch.bfloat16)
        return 2 * edge**3 / seconds(lambda: a @ b)

    @property
    def title(self) -> str:
        return self.model.name

    @cached_property
    def engine(self) -> Engine:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_of(self.model)))
            few = Engine(
                Path(folder),
                num_blocks=1,
                quantization=self.quantization,
                device=self.device,
                tensors_of=lambda _: self.tensors(),
                has_graphs=True,
            )
        free = free_memory(self.device)
        room = ON_CPU if free is None else free - LEFT
        few.resize(room // (self.model.kv_bytes * BLOCK_SIZE))
        few.cache.normal_()
        report(f"rehearse_{self.title}", timed(few.rehearse), "s")
        return few

    @cached_property
    def capturing(self) -> Engine:
        """Return the engine with captured steps, or report why capture is not possible and run kernel by kernel."""
        if (why := self.engine.why_no_graphs) is not None:
            left_out(f"graphs_{self.title}", why)
            return self.engine
        capture, least = CudaCapture(self.device), LEFT // 8
        free, most = (lambda: free_memory(self.device) or 0), STEP_TOKENS
        batch = min(MOST_BATCH, max(batch for batch, _ in self.decoding))
        took = timed(lambda: self.engine.capture(batch, capture, free, least, most_tokens=most))
        report(f"capture_{self.title}", took, "s")
        for size, (theirs, ours) in self.engine.compared.items():
            report(f"prompt_{self.title}_{size.rows}_behind_8000_library", theirs * 1e3, "ms", baseline=ours * 1e3)
        return self.engine

    def close(self) -> None:
        """Give the GPU's memory back: an engine with graphs is a reference cycle, which needs a garbage collection."""
        for name in ("capturing", "engine"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def num_tokens(self) -> int:
        return self.engine.num_blocks * BLOCK_SIZE

    def decodes(self, prefixes: Sequence[int], sampling: Sampling = GREEDY) -> StepPlan:
        chance, first, parts = random.Random(0), 0, []
        blocks = chance.sample(range(self.num_tokens // BLOCK_SIZE), self.num_tokens // BLOCK_SIZE)
        for number, prefix in enumerate(prefixes):
            count = -(-(prefix + 1) // BLOCK_SIZE)
            own = tuple(blocks[first : first + count])
            first += count
            parts.append(
                Decode(f"r{number}", chance.randrange(self.model.vocabulary), prefix, KvForm(own), sampling, 0)
            )
        return StepPlan(0, (), tuple(parts))

    # --- Measurements

    def warm(self) -> None:
        """Compile and measure all choices of all kernels, as a first start does."""
        broken: list[str] = []
        listening = logging.Handler(logging.WARNING)
        listening.emit = lambda record: broken.append(record.getMessage())  # pyrefly: ignore[method-assign]
        log = logging.getLogger("alignedserve")
        log.addHandler(listening)
        try:
            _ = self.capturing
        finally:
            log.removeHandler(listening)
        report(f"broken_{self.title}", len(broken), "1", goal=0)
        for why in broken:
            left_out(f"broken_{self.title}", why)

    def decode(self) -> None:
        fitting = [(batch, prefix) for batch, prefix in self.decoding if self.fits(batch, prefix)]
        plans = {case: self.decodes([case[1]] * case[0]) for case in fitting}
        eager = {case: seconds(partial(self.engine.step, plans[case]), 5) for case in EAGER if case in plans}
        engine = self.capturing
        for (batch, prefix), plan in plans.items():
            name = f"decode_{self.title}_batch_{batch}_prefix_{prefix}"
            captured = seconds(partial(engine.step, plan))
            alone = eager.get((batch, prefix))
            report(f"{name}_captured", captured * 1e3, "ms", baseline=None if alone is None else alone * 1e3)
            ahead, host = self.ahead(plan)
            goal = STEP_GOALS.get((self.title, batch)) if prefix == 1000 and "H100" in about()["gpu"] else None
            report(f"{name}_ahead", ahead * 1e3, "ms", baseline=captured * 1e3, goal=goal)
            report(f"{name}_host", host * 1e3, "ms", baseline=ahead * 1e3)
            report(f"{name}_rate", batch / ahead, "tokens/s")
            read = step_bytes(self.model, batch, prefix, self.expert_bytes)
            report(f"{name}_bandwidth", read / ahead / self.bandwidth, "share")
            if batch in (1, 64) and prefix == 1000:
                sampled, of_host = self.ahead(self.decodes([prefix] * batch, SAMPLED))
                report(f"{name}_sampled", sampled * 1e3, "ms", baseline=ahead * 1e3)
                report(f"{name}_sampled_host", of_host * 1e3, "ms", baseline=host * 1e3)
        self.busy(
            {f"decode_{self.title}_batch_{batch}_prefix_{prefix}": plan for (batch, prefix), plan in plans.items()}
        )

    def busy(self, plans: Mapping[str, StepPlan]) -> dict[str, float]:
        """Report for how long the GPU computes in each step, and return these seconds: last, as launches take longer
        once a profiler was on."""
        found = {name: busy(partial(self.capturing.step, plan)) for name, plan in plans.items()}
        for name, took in found.items():
            report(f"{name}_gpu", took * 1e3, "ms")
        return found

    def fits(self, batch: int, prefix: int) -> bool:
        fits = batch * (prefix + BLOCK_SIZE) <= self.num_tokens
        if not fits:
            why = f"{batch * prefix} tokens of KV, {self.num_tokens} fit"
            left_out(f"decode_{self.title}_batch_{batch}_prefix_{prefix}", why)
        return fits

    def ahead(self, plan: StepPlan, steps: int = 16) -> tuple[float, float]:
        """Return the seconds of a step when each begins before the step before is read, and of these its host's. All
        have equal positions."""
        engine, took = self.capturing, list[float]()
        following = replace(plan, decodes=tuple(replace(decode, token=None) for decode in plan.decodes))

        def row() -> None:
            running = engine.begin(plan)
            for _ in range(steps - 1):
                began = time.perf_counter()
                running, last = engine.begin(following), running
                took.append(time.perf_counter() - began)
                last.result()
            running.result()

        return seconds(row, 10) / steps, median(took)

    def kernels(self) -> None:
        """Report what the time of a captured step goes to."""
        for batch in (1, 32, 128):
            if not self.fits(batch, 1000):
                continue
            found = kernels_of(partial(self.capturing.step, self.decodes([1000] * batch)))
            title = f"kernel_{self.title}_batch_{batch}"
            report(f"{title}_all", 1e6 * sum(took for took, _ in found.values()), "us")
            uploads = sum(count for name, (_, count) in found.items() if "HtoD" in name)
            report(f"{title}_uploads", uploads, "1", goal=1)
            for name, (took, count) in sorted(found.items(), key=lambda item: -item[1][0])[:14]:
                report(f"{title}_{name[:60]}", took * 1e6, "us", baseline=count)  # as often in a step

    def pdl(self) -> None:
        """Report how many replays write something else where kernels begin while others end, and what that saves."""
        from alignedserve.kernels.triton import launch

        if self.device.type == "cuda" and not launch.has_pdl(self.device):
            left_out(f"pdl_{self.title}", "this GPU, its driver or this Triton has no programmatic dependent launches")
            return
        kept, plain = dict[int, list[tuple[StepResult, torch.Tensor]]](), dict[int, tuple[int, float]]()
        for overlaps in (False, True):
            self.__dict__.pop("capturing", None)
            with patch.object(launch, "has_pdl", return_value=overlaps):
                _ = self.capturing
            for batch in [batch for batch in OVERLAPPED if self.fits(batch, 1000)]:
                step = self.decodes([1000] * batch, Sampling(logprobs=4))
                others = tuple(replace(decode, token=7) for decode in step.decodes)
                steps = [step, replace(step, decodes=others)]
                expected = kept.setdefault(batch, [self.written(step) for step in steps])
                found = [
                    (self.written(step), its) for _ in range(REPLAYS) for step, its in zip(steps, expected, strict=True)
                ]
                off = sum(result != its or not torch.equal(kv, its_kv) for (result, kv), (its, its_kv) in found)
                took, _ = self.ahead(self.decodes([1000] * batch))
                if not overlaps:
                    plain[batch] = off, took
                    continue
                name, (plain_off, plain_took) = f"pdl_{self.title}_batch_{batch}", plain[batch]
                report(f"{name}_differ", off, "1", baseline=plain_off, goal=0)
                report(f"{name}_ahead", took * 1e3, "ms", baseline=plain_took * 1e3)

    def written(self, plan: StepPlan) -> tuple[StepResult, torch.Tensor]:
        """Run a step of decodes; return its tokens with their log-probabilities, and the K and V that it writes."""
        blocks = [decode.kv.blocks[decode.start // BLOCK_SIZE] for decode in plan.decodes]
        halves = torch.tensor([[2 * block, 2 * block + 1] for block in blocks], device=self.device)
        offsets = torch.tensor([[decode.start % BLOCK_SIZE] for decode in plan.decodes], device=self.device)
        self.engine.cache[:, halves, offsets] = 0
        return self.engine.step(plan), self.engine.cache[:, halves, offsets]

    def prompt(self, tokens: int, behind: int = 0) -> StepPlan:
        """Return a step with a chunk of `tokens` of one prompt, after `behind` tokens that have KV already."""
        prompt = tuple(random.Random(0).choices(range(self.model.vocabulary), k=tokens))
        blocks = tuple(range(-(-(behind + tokens) // BLOCK_SIZE)))
        return StepPlan(0, (Chunk("r", prompt, behind, KvForm(blocks), GREEDY),))

    def prompt_s(self, tokens: int) -> float:
        plan = self.prompt(tokens)
        return seconds(lambda: self.engine.step(plan))

    def prompts(self) -> None:
        engine, model, plans = self.capturing, self.model, dict[str, StepPlan]()
        for tokens, behind in PROMPTS if self.device.type == "cuda" else PROMPTS[:1]:
            name = f"prompt_{self.title}_{tokens}" + (f"_behind_{behind}" if behind else "")
            plans[name] = plan = self.prompt(tokens, behind)
            took = seconds(partial(engine.step, plan), 8)
            dense = 2 * (num_read(model) - head_weights(model)) * tokens
            # Two products of two operations each, of half of the square and what lies before it.
            attention = 4 * tokens * (tokens / 2 + behind) * model.heads * model.head_dim * model.layers
            share = (dense + attention) / took / self.products
            report(f"{name}_rate", tokens / took, "tokens/s")
            report(f"{name}_products", share, "share", goal=PREFILL_GOAL if tokens == 2048 else None, at_least=True)
        mixed = self.mixed() if self.fits(MANY + 1, 1000) else {}
        took = self.busy(plans | {name: plan for name, (plan, _) in mixed.items()})
        for name, (_, ahead) in mixed.items():
            if took[name]:
                report(f"{name}_of_gpu", ahead / took[name], "times", goal=OF_BUSY if name.endswith("_256") else None)

    def mixed(self) -> dict[str, tuple[StepPlan, float]]:
        """Report steps of decodes with some tokens of a prompt, and return the steps, with the seconds that each takes
        where it is planned ahead."""
        engine, plans = self.capturing, dict[str, tuple[StepPlan, float]]()
        alone = seconds(partial(engine.step, self.decodes([1000] * MANY)), 8)
        for tokens in MIXED if self.device.type == "cuda" else MIXED[:1]:
            plan = self.decodes([1000] * (MANY + 1))
            own, prompt = plan.decodes[-1].kv, self.prompt(tokens).chunks[0]
            plan = replace(plan, chunks=(replace(prompt, request="prompt", kv=own),), decodes=plan.decodes[:-1])
            name = f"mixed_{self.title}_{MANY}_decodes_{tokens}"
            captured = seconds(partial(engine.step, plan), 8)
            report(f"{name}_captured", captured * 1e3, "ms", baseline=alone * 1e3)
            ahead, host = self.ahead(plan)
            report(f"{name}_ahead", ahead * 1e3, "ms", baseline=captured * 1e3)
            report(f"{name}_host", host * 1e3, "ms", baseline=ahead * 1e3)
            plans[name] = plan, ahead
        return plans

    def copies(self) -> None:
        count = 16
        size = count * PAGE * self.model.kv_bytes
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        here = torch.empty(size, dtype=torch.uint8, device=self.device)
        fastest = {"in": seconds(lambda: here.copy_(host)), "out": seconds(lambda: host.copy_(here))}
        with self.copier(count) as copier:
            pages, tokens = range(count), [1] * (count * PAGE)
            blocks = range(len(tokens) // BLOCK_SIZE)
            ways: dict[str, Callable[[], object]] = {
                "out": lambda: copier.copy_out(blocks, pages, tokens),
                "in": lambda: copier.copy_in(pages, blocks, tokens),
            }
            plan = self.decodes([512] * 16)
            alone, _ = self.ahead(plan)
            for way, copy in ways.items():
                pace, link = size / seconds(copy) / 1e9, size / fastest[way] / 1e9
                report(f"arena_{way}_{self.title}_pace", pace, "GB/s", baseline=link, goal=COPY_GOAL, at_least=True)
                report(f"arena_{way}_{self.title}", pace / link, "share")
                with repeating(copy, self.device):
                    beside, _ = self.ahead(plan)
                report(f"step_beside_arena_{way}_{self.title}", beside / alone, "times", goal=SLOWDOWN_GOAL)
        self.join()

    def join(self) -> None:
        """Copy in the KV of a long request beside steps of others: how much longer does any of those steps take?"""
        count = JOINING // PAGE
        with self.copier(count) as copier:
            pages, tokens, blocks = range(count), [1] * JOINING, range(JOINING // BLOCK_SIZE)
            copier.copy_out(blocks, pages, tokens)
            plan, took = self.decodes([1000] * 16), list[float]()
            copy = partial(copier.copy_in, pages, blocks, tokens)
            gaps = self.gaps(plan, lambda: None)
            beside = self.gaps(plan, lambda: took.append(timed_alone(copy)))
        report(f"join_{JOINING}_{self.title}", took[0] * 1e3, "ms")
        longest = (max(beside) - median(gaps)) * 1e3
        report(f"join_{JOINING}_delay_{self.title}", longest, "ms", baseline=(max(gaps) - median(gaps)) * 1e3, goal=1.0)
        report(f"join_{JOINING}_step_{self.title}", median(beside) * 1e3, "ms", baseline=median(gaps) * 1e3)

    def gaps(self, plan: StepPlan, meanwhile: Callable[[], object], steps: int = 24) -> list[float]:
        """Return the seconds between the results of steps, each begun ahead, while another thread does something."""
        engine, read_at = self.capturing, list[float]()
        following = replace(plan, decodes=tuple(replace(decode, token=None) for decode in plan.decodes))

        def aside() -> None:
            with beside_steps(self.device):
                meanwhile()

        running = engine.begin(plan)
        for number in range(steps):
            running, last = engine.begin(following), running
            last.result()
            read_at.append(time.perf_counter())
            if number == 3:
                thread = Thread(target=aside, daemon=True)
                thread.start()
        running.result()
        thread.join()
        return [later - earlier for earlier, later in pairwise(read_at)]

    @contextmanager
    def copier(self, pages: int) -> Iterator[PageCopier]:
        size = PAGE * self.model.kv_bytes
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
            closing(
                Arena.create(Path(folder) / "arena", pages=pages, payload_bytes=size, page_size=PAGE, incarnation=1)
            ) as arena,
        ):
            cudart = cudart_for(self.device)
            unpin = None if cudart is None else pin(arena, cudart, self.device)
            try:
                yield PageCopier(self.engine.cache, arena, PAGE, verify=False)
            finally:
                if unpin is not None:
                    unpin()


def timed_alone(work: Callable[[], object]) -> float:
    """Return the seconds of work that waits for the device by itself."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def repeating(copy: Callable[[], object], device: torch.device) -> Iterator[None]:
    """Repeat the copy in a separate thread and stream while the context is open, from after a first one on."""
    going, first = [True], Future[None]()

    def again() -> None:
        try:
            with beside_steps(device):
                copy()
                first.set_result(None)
                while going[0]:
                    copy()
        except BaseException as error:
            if first.done():
                raise
            first.set_exception(error)

    thread = Thread(target=again, daemon=True)
    thread.start()
    try:
        first.result()
        yield
    finally:
        going[0] = False
        thread.join()


# --- Quantised weights


class Quantised(str, Enum):
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"

    @property
    def quantization(self) -> Quantization:
        return Quantization.NONE if self is Quantised.FP8 else Quantization(self.value)

    def read_bytes(self, model: Model) -> int:
        """Return the bytes of weights that a step reads."""
        head = head_weights(model)
        if self is Quantised.FP8:
            return num_read(model) - head + 2 * head
        return self.quantization.num_bytes(num_read(model) - head, 0, head, 2)


class RandomFloats(DummyWeights):
    """Random weights of layers as 8-bit floats."""

    def quantised(self, layer: str, shape: tuple[int, int], cut: Cut | None = None) -> AnyQuantised | None:
        return None if layer == "lm_head" else fp8_weight(torch.randn(shape, device=DEVICE) * 0.02)


class FloatExperts(DummyWeights):
    """Random weights whose experts are 8-bit floats with a scale for each block, as those of Qwen3-FP8."""

    def quantised(self, layer: str, shape: tuple[int, int], cut: Cut | None = None) -> AnyQuantised | None:
        if ".experts." not in layer:
            return None
        values = (torch.randn(shape, device=DEVICE) * 100).clamp(-fp8.MOST, fp8.MOST).to(FP8)
        return Fp8Weight(values, torch.full((shape[0], -(-shape[1] // BLOCK)), 2e-4, device=DEVICE), BLOCK)


class FloatExpertsBench(Bench):
    tensors, expert_bytes = FloatExperts, 1 + 4 / BLOCK

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        if model is MODELS["moe-fp8-whole"]:
            self.decoding = OF_WHOLE


class QuantisedBench(Bench):
    def __init__(self, model: Model, kind: Quantised) -> None:
        super().__init__(model)
        self.kind, self.quantization = kind, kind.quantization
        self.tensors = RandomFloats if kind is Quantised.FP8 else DummyWeights

    @property
    def title(self) -> str:
        return f"{self.model.name}_{self.kind.value}"

    def rates(self) -> dict[str, float]:
        """Return the tokens per second of decodes and prompts."""
        found = dict[str, float]()
        for batch in QUANTISED:
            took, _ = self.ahead(self.decodes([SHORT] * batch))
            found[f"decode_{batch}"] = batch / took
            share = (self.kind.read_bytes(self.model) + batch * SHORT * self.model.kv_bytes) / took / self.bandwidth
            report(f"{self.title}_decode_{batch}_bandwidth", share, "share")
        return found | {f"prompt_{tokens}": tokens / self.prompt_s(tokens) for tokens in (512, 2048)}


def quantised(model: Model) -> None:
    """Report each kind of weights, all but the first against bf16."""
    plain = dict[str, float]()
    for kind in Quantised:
        if kind is Quantised.FP8 and (why := why_none(DEVICE, torch.bfloat16)) is not None:
            left_out("fp8", why)
            continue
        bench = QuantisedBench(model, kind)
        rates = bench.rates()
        for name, rate in rates.items():
            report(f"{bench.title}_{name}", rate, "tokens/s", baseline=plain.get(name))
        plain = plain or rates
        bench.close()


def main() -> int:
    parts, model = asked(__doc__, "gpu", PARTS)
    bench = (FloatExpertsBench if model.name.endswith("_fp8") else Bench)(model)

    def measure(part: str) -> None:
        if part != "quantised":
            getattr(bench, part)()
            return
        bench.close()  # its memory is needed
        quantised(model)

    return 0 if all_tried(parts, measure) else 1


if __name__ == "__main__":
    sys.exit(main())
