"""Tests that the plain model says by how much each input of a layer counts, and how far a quantised one is from it. The
model is the demo's, which was trained on text."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.architectures.quantization import Quantization
from alignedserve.config.config import dump, load
from alignedserve.core import Role
from alignedserve.engine.calibration import READ, PlainModel, read_plain, tokens_of
from alignedserve.engine.engine import Engine
from alignedserve.executor import precision
from alignedserve.kernels.common.reference import Reference
from alignedserve.machine.resources import MachineMemory
from alignedserve.shell.clock import ClockOrigin
from alignedserve.shell.part import PartSpec, Place
from alignedserve.shell.process import weights_kept
from alignedserve.signs import NO_SIGNS, Signs, Stage
from tests.models import llama
from tests.rare import thinned
from tests.reference import load as in_transformers


@pytest.fixture(scope="module")
def plain() -> PlainModel:
    return read_plain(DEMO_FOLDER, torch.float32)


def quantised(
    quantization: Quantization, squares: Mapping[str, Tensor] | None = None, blocks: int = 20, dtype: str = "float32"
) -> Engine:
    return Engine(
        DEMO_FOLDER,
        num_blocks=blocks,
        dtype=dtype,
        quantization=quantization,
        squares=squares,
        kernels=Reference(),
    )


def far(plain: PlainModel, engine: Engine) -> float:
    return plain.divergence(engine.logits_of(plain.tokens))


# --- What the plain model says


def test_what_goes_into_a_layer_is_what_transformers_has_there(plain: PlainModel) -> None:
    """Also into parts of a layer that is fused here."""
    network, heard = in_transformers(DEMO_FOLDER), {}

    def hear(name: str, _: object, inputs: tuple[Tensor]) -> None:
        heard[name] = inputs[0][0].square().mean(0)

    names = [name for name, _ in network.named_modules() if name.endswith("_proj")]
    for name in names:
        network.get_submodule(name).register_forward_pre_hook(partial(hear, name))
    with torch.inference_mode():
        network(torch.tensor([Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")).encode(READ).ids]))
    assert plain.squares.keys() == {*names}
    for name in names:
        assert torch.allclose(plain.squares[name], heard[name], rtol=1e-3, atol=1e-5)


def test_fewer_bits_are_farther_and_inputs_that_count_bring_them_nearer(plain: PlainModel) -> None:
    none, int8, int4 = (far(plain, quantised(kind)) for kind in Quantization)
    assert none < 1e-6 < int8 < int4 / 10
    assert far(plain, quantised(Quantization.INT4, plain.squares)) < int4


def test_a_text_is_cut_to_what_the_model_can_read() -> None:
    config = read_config(DEMO_FOLDER)
    whole = tokens_of(DEMO_FOLDER, config, READ)
    assert tokens_of(DEMO_FOLDER, replace(config, max_positions=20), READ) == whole[:20]
    few = tokens_of(DEMO_FOLDER, replace(config, vocab_size=200), READ)
    assert few == tuple(token for token in whole if token < 200)


# --- What a worker says


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that keeps what plain models said: a new one for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "alignedserve" / "plain"


def place(**settings: Any) -> Place:
    return place_in("test", settings)


def place_in(deployment: str, settings: Mapping[str, Any] = MappingProxyType({}), signs: Signs = NO_SIGNS) -> Place:
    tree = dump(load({"model": "demo", "engine.quantization": "int4"} | dict(settings), {}, None))
    links = deployment, "127.0.0.1", "tcp://x:9"
    return Place(PartSpec(Role.DECODE, "decode-0", "local", *links, tree, ClockOrigin.read()), signs)


CPU = torch.device("cpu")


def test_a_model_that_is_far_from_the_plain_one_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    found = precision.plain_model(place(), CPU)
    assert isinstance(found, PlainModel)
    with caplog.at_level(logging.INFO, "alignedserve.engine"):
        precision.say_precision(quantised(Quantization.INT4, found.squares), found)
        assert caplog.records[-1].levelname == "WARNING"
        assert "float32, layers int4; 0." in weights_kept()
        assert weights_kept() in caplog.records[-1].message
        precision.say_precision(quantised(Quantization.INT8, dtype="bfloat16"), found)
        assert caplog.records[-1].levelname == "INFO"
        assert f"nats a token from plain bfloat16, on a text of {len(found.tokens)} tokens" in weights_kept()


def test_weights_that_are_not_quantised_here_have_nothing_to_be_compared_with() -> None:
    assert precision.plain_model(place(**{"engine.quantization": "none"}), CPU) is None
    precision.say_precision(quantised(Quantization.NONE), None)
    assert weights_kept() == "float32"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"engine.load_format": "dummy"}, "its weights are random"),
        ({"engine.tensor_parallel_size": 2}, "several ranks share it"),
    ],
)
def test_why_a_model_is_not_compared(settings: dict[str, Any], why: str) -> None:
    assert precision.plain_model(place(**settings), CPU) == why


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    folder = llama(tmp_path / "model")
    assert precision.plain_model(place(model=str(folder)), CPU) == "its folder has no tokenizer.json"


def test_where_the_plain_model_has_no_room_beside_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "memory", lambda: MachineMemory(1 << 32, 1 << 20, None))
    why = precision.plain_model(place(topology="1+1"), CPU)
    assert isinstance(why, str)
    assert why.startswith("1 MB are free, and 2 workers would need ")
    precision.say_precision(quantised(Quantization.INT4), why)
    assert weights_kept().endswith(f"not compared with the plain model, since {why}")


def test_a_cache_that_the_text_does_not_fit_into(plain: PlainModel) -> None:
    precision.say_precision(quantised(Quantization.INT4, blocks=1), plain)
    assert "the device cache is too small" in weights_kept()


# --- What workers of a machine share


class Reads:
    """Counts how often the plain model is read. No two readings are the same, as if by other numbers of threads."""

    def __init__(self, plain: PlainModel) -> None:
        self._plain, self.num, self.takes_time = plain, 0, False

    def __call__(self, *args: Any) -> PlainModel:
        self.num += 1
        found = read_plain(*args) if self.takes_time else self._plain
        return replace(found, words=found.words + self.num)


@pytest.fixture
def reads(plain: PlainModel, monkeypatch: pytest.MonkeyPatch) -> Reads:
    made = Reads(plain)
    monkeypatch.setattr(precision, "read_plain", made)
    return made


def free_memory(mb: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "memory", lambda: MachineMemory(1 << 40, mb << 20, None))


def asked(of: Place) -> PlainModel:
    found = precision.plain_model(of, CPU)
    assert isinstance(found, PlainModel)
    return found


def check_same(one: PlainModel, other: PlainModel) -> None:
    assert one.tokens == other.tokens
    assert torch.equal(one.words, other.words)
    assert one.squares.keys() == other.squares.keys()
    assert all(torch.equal(of, other.squares[name]) for name, of in one.squares.items())


def kept_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


class _Together:
    """Signs of two workers that look at the same time."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._both = Barrier(2, timeout=60)

    def stage(self, stage: Stage, total: int = 0) -> None:
        self.stages.append(stage)
        if stage is Stage.PLAIN:
            self._both.wait()

    def advance(self, done: int = 1) -> None: ...


def test_of_workers_that_start_together_one_reads_and_all_know_the_same(reads: Reads) -> None:
    signs, reads.takes_time = _Together(), True
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(asked, [place_in("test", signs=signs), place_in("test", signs=signs)])
    check_same(one, other)
    assert reads.num == 1
    assert sorted(signs.stages, key=lambda stage: stage.order) == [Stage.PLAIN, Stage.PLAIN, Stage.WEIGHTS]


def test_a_later_start_reads_nothing_and_needs_no_memory_for_it(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that starts again beside the others too."""
    first = asked(place())
    free_memory(1, monkeypatch)
    check_same(first, asked(place()))
    check_same(first, asked(place_in("other")))
    assert reads.num == 1


@pytest.mark.parametrize("content", thinned((b"", b"no tensors", "half", b"\2\0\0\0\0\0\0\0{}"), usual=2))
def test_a_broken_file_is_made_again(
    content: bytes | str, reads: Reads, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked(place())
    (path,) = kept_in(cache)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    again = asked(place())
    assert reads.num == 2
    assert f"{path} is broken" in caplog.text
    check_same(again, asked(place()))
    assert reads.num == 2


def test_without_a_cache_each_worker_reads_by_itself(
    reads: Reads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for num in (1, 2):
        asked(place(cache_directory=str(tmp_path / "file")))
        assert reads.num == num
    assert "set cache_directory to a folder that can be written" in caplog.text


def test_memory_is_needed_for_one_plain_model_where_workers_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_memory(1, monkeypatch)
    why = precision.plain_model(place(topology="2+2"), CPU)
    assert isinstance(why, str)
    free_memory(int(why.split()[-5]) + 1, monkeypatch)
    (tmp_path / "file").touch()
    alone = place(topology="2+2", cache_directory=str(tmp_path / "file"))
    assert "4 workers would need" in str(precision.plain_model(alone, CPU))
    asked(place_in("next", {"topology": "2+2"}))


def test_what_one_worker_had_no_memory_for_no_other_of_its_deployment_has(monkeypatch: pytest.MonkeyPatch) -> None:
    free_memory(1, monkeypatch)
    why = precision.plain_model(place(), CPU)
    free_memory(1 << 20, monkeypatch)
    asked(place_in("next"))
    assert precision.plain_model(place(), CPU) == why


def test_other_weights_and_other_types_have_files_of_their_own(reads: Reads, cache: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    asked(place(model=str(folder)))
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes())  # at another time
    asked(place(model=str(folder)))
    asked(place(model=str(folder), **{"engine.dtype": "float32"}))
    asked(place(model=str(folder), **{"engine.dtype": "bfloat16"}))
    asked(place(model=str(DEMO_FOLDER)))
    assert reads.num == len(kept_in(cache)) == 4


def test_the_newest_are_kept_and_nothing_of_workers_that_were_killed(
    reads: Reads, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_MOST_KEPT", 2)
    (weights,) = shutil.copytree(DEMO_FOLDER, tmp_path / "model").glob("*.safetensors")
    cache.mkdir(parents=True)
    (cache / "x.safetensors.123.part").touch()
    worker = place(model=str(weights.parent))
    for _ in range(3):
        weights.write_bytes(weights.read_bytes())
        asked(worker)
    assert len(kept_in(cache)) == 2
    assert not [*cache.glob("*.part")]
    asked(worker)
    assert reads.num == 3, "the newest is there"
