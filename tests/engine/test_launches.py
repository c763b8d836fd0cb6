"""Ratchets: how many kernels a captured decode step launches, and how many copies to the device it takes beside them.

The Triton kernels run in Triton's interpreter, on a CPU that plays the device. A launch is a Triton kernel, or an
operation of torch that computes or moves numbers; a product may be two kernels of cuBLAS, and counts as one. Copies to
the device are those that placing.py makes. Numbers may fall: then write the new ones here.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import interpreter

from alignedserve.core import Sampling, StepPlan
from alignedserve.engine import graphs
from alignedserve.engine.device.ranks import ALONE, RankLinks
from alignedserve.engine.engine import Engine
from alignedserve.engine.graphs import Step
from alignedserve.engine.models.rope import Rotation
from alignedserve.kernels.common import placing
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.dispatch.paged_attention import PagedKernels
from alignedserve.kernels.dispatch.paged_libraries import FlashAttn3, PagedRequests
from alignedserve.kernels.triton.decoder import TritonDecoder
from alignedserve.kernels.triton.kernels import TritonKernels
from alignedserve.kernels.triton.launch import interpreting
from tests import models
from tests.adapters import make_adapter, named
from tests.engine.driver import Driver, prompt_of
from tests.rare import rare

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not interpreting(), reason="Triton compiles here, and its launches are not seen"),
]


class Counting(TorchDispatchMode):
    """Counts launches by name, those of the captured part and those behind it apart, and copies to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: Counter[str] = Counter()
        self.beside: Counter[str] = Counter()
        self.behind: Counter[str] = Counter()
        self.copies = 0
        self._is_captured = self._is_silent = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, made = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        copies = name == "to" and made is not args[0]
        if copies or not (func.is_view or name.startswith(("empty", "new_empty", "detach", "_unsafe_view"))):
            self.launched(name)
        return made

    def launched(self, name: str) -> None:
        if not self._is_silent:
            (self.captured if self._is_captured else self.beside)[name] += 1
            if not self._is_captured:
                self.behind[name] += 1

    def capture(self, step: Step) -> Step:
        """Stand for a device's graphs."""
        self.silently(step)  # tables that stay are made now

        def replay() -> torch.Tensor:
            self._is_captured = True
            try:
                return step()
            finally:
                self._is_captured = False
                self.behind.clear()

        return replay

    def silently(self, work: Callable[..., Any], *args: Any, **named: Any) -> Any:
        before, self._is_silent = self._is_silent, True
        try:
            return work(*args, **named)
        finally:
            self._is_silent = before


class PlayedRanks(RankLinks):
    """Plays the first of two ranks on a device: each sum and each join is one launch of NCCL's."""

    size = 2

    def __init__(self, counts: Counting) -> None:
        self._counts = counts

    def total(self, x: torch.Tensor) -> None:
        self._counts.launched("sum of ranks")

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        self._counts.launched("join of ranks")
        joined: torch.Tensor = self._counts.silently(torch.cat, [x] * self.size, 1)
        return joined


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch, counts: Counting) -> Iterator[None]:
    """Play the device, and count what is launched on it."""
    run = interpreter.GridExecutor.__call__

    def launch(executor: Any, *args: Any, **named: Any) -> Any:
        counts.launched(executor.fn.__name__)
        return counts.silently(run, executor, *args, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)

    def copies(name: str) -> Callable[..., Any]:
        copy = getattr(placing, name)

        def counted(*args: Any) -> Any:
            counts.copies += 1
            return counts.silently(copy, *args)

        return counted

    for name in ("on_device", "put"):
        original, counted = getattr(placing, name), copies(name)
        for module in [module for module in sys.modules.values() if vars(module).get(name) is original]:
            monkeypatch.setattr(module, name, counted)
    monkeypatch.setattr(Rotation, "at", Rotation._computed)  # tables that grow are for CPUs
    yield


class Silent(FlashAttn3):
    """A library whose attention is one launch."""

    def __init__(self) -> None:
        pass

    def attend(
        self,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        requests: PagedRequests,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        return query.clone()


def step_of(
    made: Callable[..., Path],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
    num_requests: int,
    chunk: int,
    own_products: bool = False,
    adapted: bool = False,
    has_ranks: bool = False,
    library: bool = False,
) -> Counting:
    """Return what a captured step launches. Its decodes are sampled, and go on from tokens that nobody has read; beside
    them runs the middle of a prompt, `chunk` tokens. Where steps are `adapted`, the last decode has an adapter; a
    `library` attends for the chunk."""
    counts, kernels = Counting(), PagedKernels([Silent()], long_chunk=2) if library else TritonKernels()
    engine = Engine(
        made(folder, num_hidden_layers=layers),
        num_blocks=60,
        dtype="bfloat16",
        kernels=kernels,
        has_graphs=True,
        ranks=PlayedRanks(counts) if has_ranks else ALONE,
    )
    monkeypatch.setattr(graphs, "_LEAST_LONG_ROWS", 8)
    engine.reads_later = True
    if own_products:
        assert isinstance(engine._decoder, TritonDecoder)
        took = count(100, -1)
        for measure in engine._decoder.rehearsals(engine.cache[0], *2 * (lambda _: next(took),)):
            measure()
    driver = Driver(engine, 1)
    lives = [driver.start(f"r{number}", (), 8) for number in range(num_requests)]
    for live in lives:
        live.output.append(5)  # it runs at position 0
    if adapted:
        lives[-1].adapter = named("a", make_adapter(folder, folder / "adapter", seed=1), folder)
    prompt = driver.start("prompt", prompt_of(1, chunk + 1), 1)
    chunks = (prompt.chunk(chunk),) if chunk else ()
    with counting(monkeypatch, counts):
        tokens = 8 if chunk else 0
        faster = cycle((1.0, 1.0, 1.0, 2.0, 2.0, 2.0))  # a library's graph comes first
        engine.capture(
            *(num_requests, counts.capture, lambda: 1 << 40, 0),
            most_tokens=tokens,
            with_adapters=adapted,
            seconds=lambda _: next(faster),
        )
        sampling = Sampling(0.8, top_p=0.9)
        first = engine.begin(StepPlan(50, (), tuple(live.decode() for live in lives)))
        counts.copies = 0
        counts.captured.clear()
        with counts:
            engine.begin(StepPlan(51, chunks, tuple(live.decode_ahead(None, 1, sampling) for live in lives))).result()
        assert first.result().tokens
    monkeypatch.undo()
    return counts


def with_experts_alone(folder: Path, **changes: Any) -> Path:
    return models.qwen2_moe(folder, mlp_only_layers=[], **changes)


@pytest.mark.parametrize(
    ("made", "of_layer", "num_requests", "chunk", "options"),
    [
        # norm, query + K + V, attention with rotation and writing, output; norm, gate + up, activation, down
        pytest.param(models.gqa, 8, 1, 0, {}, id="dense"),
        pytest.param(models.gqa, 10, 1, 4, {}, id="with a prompt", marks=rare),  # rotation and write; attention twice
        # one of them by a library, which writes among the rows of ours
        pytest.param(models.gqa, 10, 1, 6, {"library": True}, id="with a prompt by a library", marks=rare),
        # norm and query + K + V, attention, output; norm, gate + up and activation, down
        pytest.param(models.gqa, 5, 1, 0, {"own_products": True}, id="one row by our products"),
        pytest.param(models.gqa, 7, 2, 0, {"own_products": True}, id="norms apart", marks=rare),
        # beside the eight of a dense layer two for each of its four products
        pytest.param(models.gqa, 16, 2, 0, {"own_products": True, "adapted": True}, id="adapters", marks=rare),
        # four of norms, additions and norms before both halves become two
        pytest.param(models.glm4, 8, 2, 0, {}, id="norms behind both halves", marks=rare),
        # for each half a sum, and one kernel that adds it and norms
        pytest.param(models.gqa, 10, 2, 0, {"has_ranks": True}, id="ranks", marks=rare),
        pytest.param(models.gqa, 9, 1, 0, {"has_ranks": True, "own_products": True}, id="ranks by our products"),
        pytest.param(models.gqa, 18, 2, 0, {"has_ranks": True, "adapted": True}, id="ranks, adapters", marks=rare),
        # norm, query + K + V, attention, output
        # norm, router's rows to fp32, router, choice, up, down, sum
        pytest.param(models.mixtral, 11, 2, 0, {}, id="experts", marks=rare),
        pytest.param(models.mixtral, 13, 2, 4, {}, id="experts with a prompt", marks=rare),
        pytest.param(models.mixtral, 10, 1, 0, {"own_products": True}, id="experts, one row", marks=rare),
        # beside them gate + up, activation, down, and the gate of what they make: its product, sigmoid, and factor
        pytest.param(with_experts_alone, 17, 2, 0, {}, id="experts beside a gated one", marks=rare),
        pytest.param(models.mixtral, 13, 2, 0, {"has_ranks": True}, id="ranks, experts", marks=rare),
    ],
)
def test_a_captured_step_launches_no_more_kernels_than_it_did(
    made: Callable[..., Path],
    of_layer: int,
    num_requests: int,
    chunk: int,
    options: dict[str, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = (
        step_of(made, tmp_path / f"{layers}", monkeypatch, layers, num_requests, chunk, **options) for layers in (1, 2)
    )
    by_layer = two.captured - one.captured
    assert by_layer["clone"] == options.get("library", False)
    assert by_layer.total() <= of_layer, by_layer
    # Tokens of the step before, the embedding, the angles (two are brought to fp32), the last norm, the head and what
    # brings it to fp32; the rows that are wanted; three for drawing. Where parts are held back: the first norm, the
    # norm of the last part, and its addition. With ranks: what joins their logits.
    around, held_back = one.captured - by_layer, 3 * ("_add_and_norm" in by_layer)
    assert around.total() <= 16 + bool(chunk) + held_back + 2 * options.get("has_ranks", False), around
    sent = 1 + options.get("adapted", False)
    assert one.copies == two.copies == sent, "all that a step reads is sent at once; adapters' rows apart"
    assert two.beside == one.beside, "the host launches nothing for a layer"
    assert two.behind == Counter(copy_=1), "the tokens go to the CPU"


def test_what_is_launched_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counting()
    with counting(monkeypatch, counts), counts:
        x = torch.ones(2, 16)
        TritonKernels().rms_norm(x[:, :8], torch.ones(8), 1e-5)
        placing.put(x, x + 1)
    assert counts.beside == Counter(ones=2, _norm=1, add=1)
    assert counts.copies == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_of_a_gpu_are_one_product_in_fp32(dtype: torch.dtype) -> None:
    """No GPU is needed: torch says of each operation what it would return there."""
    with FakeTensorMode():
        head = Linear(torch.empty(1000, 64, dtype=dtype, device="cuda"))
        x, out = torch.empty(3, 64, dtype=dtype, device="cuda"), torch.empty(3, 1000, device="cuda")
        with Counting() as counted:
            found = head.wide(x)
        assert (found.dtype, found.shape) == (torch.float32, (3, 1000))
        assert counted.beside - Counter(device=1) == Counter(mm=1)  # `device` asks where a tensor is
        assert head.wide(x, out) is out
