"""Tests that a worker refuses weights that are not those that its deployment was started with."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.architectures.weight_files import weights_mark
from alignedserve.config.config import Config
from alignedserve.config.config import load as load_config
from alignedserve.core import Role
from alignedserve.engine.engine import Engine
from alignedserve.errors import ModelError
from alignedserve.executor import loading
from alignedserve.launch.plan import other_weights, specs_of
from alignedserve.shell.part import Place

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))


def replaced(folder: Path) -> None:
    """Write weights of the same names, types and sizes, of which one tensor is another."""
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    save_file({**tensors, name: -tensors[name]}, folder / "new")
    (folder / "new").replace(folder / WEIGHTS)


def place_of(folder: Path, **settings: str) -> Place:
    config: Config = load_config(
        {"model": str(folder), "engine.device": "cpu", "engine.kv_memory_mb": "16", **settings}, {}, None
    )
    (spec,) = specs_of(config, [(Role.DECODE, "decode-0", 0)], lambda _: "local", "test", "127.0.0.1", "tcp://x:9")
    return Place(spec)


def test_a_worker_refuses_weights_that_were_replaced_until_they_are_back(folder: Path) -> None:
    place = place_of(folder)
    shutil.copy(folder / WEIGHTS, folder / "old")
    replaced(folder)
    with pytest.raises(ModelError, match=f"{folder} has other weights .* decode-0 does not mix them: put those back"):
        loading.load(place, Engine, None)
    (folder / "old").replace(folder / WEIGHTS)
    os.utime(folder / WEIGHTS)  # as another node has them, or another copy
    assert loading.load(place, Engine, None).config.num_layers


def test_weights_that_are_replaced_while_they_are_read_are_refused(folder: Path) -> None:
    class Slow(Engine):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            replaced(folder)

    with pytest.raises(ModelError, match="other weights"):
        loading.load(place_of(folder), Slow, None)


def test_random_weights_and_specs_of_an_earlier_version_are_compared_with_nothing(folder: Path) -> None:
    assert not place_of(folder, **{"engine.load_format": "dummy"}).spec.weights
    place = Place(replace(place_of(folder).spec, weights=""))
    replaced(folder)
    assert loading.load(place, Engine, None).config.num_layers


def test_the_mark_tells_configurations_and_single_tensors(folder: Path) -> None:
    marks = {weights_mark(folder)}
    replaced(folder)
    marks.add(weights_mark(folder))
    with (folder / "config.json").open("a") as file:
        file.write("\n")
    assert len({*marks, weights_mark(folder)}) == 3


def test_the_launcher_sees_them_in_what_it_planned(folder: Path) -> None:
    specs = [place_of(folder).spec, place_of(folder, **{"engine.load_format": "dummy"}).spec]
    assert not other_weights(specs)
    replaced(folder)
    assert other_weights(specs) == str(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelError, match="holds neither"):
        other_weights(specs)
