"""Tests that only the reading of tokens makes a step wait for the device.

No device is needed: the CPU plays one. Tensors that `on_device` puts there, the cache, and all that is computed
from them count as *there*. The test finds code that asks for their content in a way for which a GPU would have to
finish first (its numbers, how many are not zero, which rows a mask picks), and copies that do not come from pinned
memory. Kernels run on the device itself; the reads are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from alignedserve.architectures.quantization import Quantization
from alignedserve.core import StepPlan, StepResult
from alignedserve.engine import engine as engine_module
from alignedserve.engine import inputs
from alignedserve.engine.device import devices
from alignedserve.engine.engine import Engine
from alignedserve.engine.models.rope import Rotation
from alignedserve.engine.sampling import reading
from alignedserve.kernels.common import placing
from alignedserve.kernels.common.experts import ExpertPacking
from alignedserve.kernels.common.reference import Reference
from tests.engine.driver import Driver, prompt_of

ASKS = {
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__array__,
    torch.Tensor.nonzero,
    torch.nonzero,
    torch.masked_select,
    torch.Tensor.masked_select,
    torch.equal,
    torch.Tensor.equal,
    torch.unique,
    torch.Tensor.unique,
}
COPIES = {torch.Tensor.to, torch.Tensor.cuda}


class Waits(AssertionError):
    pass


class There(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in _flat((args, kwargs.values())) if isinstance(value, torch.Tensor)]
        is_there = any(map(_is_there, tensors))
        if is_there and func in ASKS:
            raise Waits(f"{func.__name__} waits for the device")
        if is_there and func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and _picks(args[1]):
            raise Waits("a mask or a list of indices waits for the device")
        if (
            func in COPIES
            and not _is_there(args[0])
            and any(isinstance(value, torch.device) for value in _flat(args[1:]))
        ):
            raise Waits("a copy from memory that is not pinned waits for the device")
        if func is torch.Tensor.copy_ and _is_there(args[0]) and not _is_there(args[1]):
            raise Waits("a copy from memory that is not pinned waits for the device")
        made = func(*args, **kwargs)
        if is_there:
            for value in _flat([made]):
                put_there(value)
        return made


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _picks(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(index, list) or (isinstance(index, torch.Tensor) and index.dtype is torch.bool) for index in parts
    )


def _is_there(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "is_there", False)


def put_there(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value.is_there = True  # pyrefly: ignore[missing-attribute]
    return value


class Opaque(Reference):
    """Kernels that count as one launch each: how the reference computes them does not matter."""

    captures_experts = True

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found) or name in ("linear", "decoder"):
            return found

        def launched(*args: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return put_there(found(*args))

        return launched


@contextmanager
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Play the device, and yield the sizes of all reads from it."""
    read: list[int] = []

    class Counted(devices.ReadBack):
        def read(self) -> torch.Tensor:
            read.append(self._host.numel())
            with torch._C.DisableTorchFunction():
                return self._host.clone()

    def on_device(tensor: torch.Tensor, _device: torch.device) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return tensor if _is_there(tensor) else put_there(tensor.clone())

    def put(out: torch.Tensor, values: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():
            put_there(out).copy_(values)

    section = placing.StepInputs.section

    def section_there(self: placing.StepInputs, count: int, dtype: torch.dtype) -> placing.Section:
        made = section(self, count, dtype)
        put_there(made.device)
        return made

    for module in (engine_module, inputs, placing):
        monkeypatch.setattr(module, "on_device", on_device)
    for module in (inputs, placing):
        monkeypatch.setattr(module, "put", put)
    monkeypatch.setattr(placing.StepInputs, "section", section_there)
    monkeypatch.setattr(reading, "ReadBack", Counted)
    monkeypatch.setattr(Rotation, "at", Rotation._computed)  # tables that grow are for CPUs
    with There():
        yield read


MIXTURES = ("mixtral", "qwen2-moe", "deepseek-v2", "deepseek-v3", "llama4", "gpt-oss", "glm4-moe")


@pytest.fixture(params=["opt"])
def driver(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Driver:
    engine = Engine(
        folder_of(request.param), num_blocks=60, block_size=4, dtype="float32", kernels=Opaque(), has_graphs=True
    )
    engine.reads_later = True
    return Driver(engine, 1)


@pytest.mark.parametrize("driver", ["opt", "gqa-untied", *MIXTURES], indirect=True)
@pytest.mark.parametrize("is_captured", [False, True])
def test_steps_wait_for_their_tokens_alone(driver: Driver, monkeypatch: pytest.MonkeyPatch, is_captured: bool) -> None:
    """The steps are a prompt, decodes, and decodes that go on from tokens that are not read yet."""
    engine, live = driver.engine, driver.start("r", prompt_of(1, 9), 8)
    put_there(engine.cache)
    with device(monkeypatch) as read:
        if is_captured:
            engine.capture(2, lambda step: step, lambda: 1 << 40, 0, most_tokens=12)
        begun = [engine.begin(StepPlan(1, (live.chunk(9),)))]
        begun += [engine.begin(StepPlan(n, (), (live.decode_ahead(None, n - 1),))) for n in (2, 3, 4)]
        assert read == []
        tokens = [dict(step.result().tokens)["r"] for step in begun]
    assert read == [1] * 4
    live.output = []
    plain = Driver(driver.engine, 2)
    engine.reads_later = False
    again = plain.start("again", live.prompt, 8)
    plain.prefill(again)
    assert plain.generate(again, 4) == tokens


def test_experts_that_run_in_turn_are_found(monkeypatch: pytest.MonkeyPatch, folder_of: Callable[[str], Path]) -> None:
    """Experts that cannot be packed wait in every layer, to learn which of them run."""
    monkeypatch.setattr(ExpertPacking, "from_weight", lambda _weight: None)
    engine = Engine(
        folder_of("mixtral"),
        num_blocks=60,
        block_size=4,
        dtype="float32",
        kernels=Opaque(),
        quantization=Quantization.INT8,
    )
    live = Driver(engine, 1).start("r", prompt_of(1, 9), 8)
    put_there(engine.cache)
    with device(monkeypatch), pytest.raises(Waits):
        engine.begin(StepPlan(1, (live.chunk(9),)))


@pytest.mark.parametrize("reads_later", [False, True])
def test_a_step_that_brings_no_token_has_ended_when_the_device_is_through(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, reads_later: bool
) -> None:
    """The step has not ended when it was only begun: from its end on, the blocks of a chunk in the middle of a prompt
    may be copied."""
    seen = list[str]()

    class Noted(devices.Mark):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            seen.append("ordered")

        def wait(self) -> None:
            seen.append("waited")

    monkeypatch.setattr(reading, "Mark", Noted)
    driver.engine.reads_later = reads_later
    live = driver.start("r", prompt_of(1, 9), 8)
    begun = driver.engine.begin(StepPlan(1, (live.chunk(4),)))
    assert seen == ["ordered"]
    assert begun.result() == StepResult(1, ())
    assert seen == ["ordered", "waited"]


@pytest.mark.parametrize(
    "asks", [torch.Tensor.tolist, torch.Tensor.nonzero, bool, lambda x: x[x > 0], lambda x: x[[0]]]
)
def test_code_that_waits_is_found(monkeypatch: pytest.MonkeyPatch, asks: Callable[[torch.Tensor], object]) -> None:
    with device(monkeypatch):
        there = put_there(torch.ones(1)) + 1
        with pytest.raises(Waits):
            asks(there)
        with pytest.raises(Waits):
            torch.ones(1).to(torch.device("cpu"))
