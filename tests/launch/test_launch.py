"""Tests of what a launcher says before there is a deployment."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.config.choices import DeviceKind
from alignedserve.config.config import Config, load, parse
from alignedserve.core import WORKERS
from alignedserve.errors import ConfigError, ModelError
from alignedserve.launch import launch
from alignedserve.launch.plan import plan
from alignedserve.launch.screen import url_of
from alignedserve.shell.listener import bind
from alignedserve.shell.part import PartSpec
from alignedserve.sizing import accelerator
from alignedserve.sizing.accelerator import DeviceChoice


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_the_address_can_be_pasted(host: str, url: str) -> None:
    config = Config()
    assert url_of(replace(config, server=replace(config.server, host=host, port=8000))) == url


def test_connections_are_known_to_be_tcp() -> None:
    """Otherwise asyncio leaves Nagle's delay on, and each answer that is not streamed comes 40 ms late."""
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_the_ranks_of_a_worker_are_parts_beside_it(tmp_path: Path) -> None:
    config = load(
        {"model": "demo", "topology": "1+1", "engine.tensor_parallel_size": 2, "kvpool.directory": str(tmp_path)},
        {},
        None,
    )
    specs = plan(config).specs
    assert [(spec.name, spec.worker, spec.rank) for spec in specs] == [
        ("router", "router", 0),
        ("pool-0", "pool-0", 0),
        ("prefill-0", "prefill-0", 0),
        ("prefill-0-rank-1", "prefill-0", 1),
        ("decode-0", "decode-0", 0),
        ("decode-0-rank-1", "decode-0", 1),
        ("gateway-0", "gateway-0", 0),
        ("jobs-0", "jobs-0", 0),
    ]
    workers = [spec for spec in specs if spec.role in WORKERS]
    assert len({spec.device for spec in workers}) == len(workers) == 4


class _Kept:
    """A deployment that starts nothing, and keeps what it was given."""

    def __init__(self, config: Config, specs: Sequence[PartSpec], *_: object, record: object) -> None:
        kept[:] = [config, *specs]

    def run(self) -> int:
        return 7


kept: list[Config | PartSpec] = []


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (DeviceChoice(DeviceKind.CPU, "no driver of a GPU is here"), ""),
        (DeviceChoice(DeviceKind.CUDA, "torch sees H100"), "alignedserve: workers compute on GPUs: torch sees H100\n"),
        (
            DeviceChoice(DeviceKind.CPU, "torch sees no GPU", is_fallback=True),
            "alignedserve: warning: workers compute on the CPU: torch sees no GPU; engine.device cpu says that this is"
            " wanted\n",
        ),
    ],
)
def test_what_auto_stands_for_is_decided_once_and_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    choice: DeviceChoice,
    said: str,
) -> None:
    monkeypatch.setattr(accelerator, "choose", lambda: choice)
    monkeypatch.setattr(launch, "RunningDeployment", _Kept)
    monkeypatch.setattr(launch, "fork_servers", lambda _: nullcontext({}))
    flags = {"server.port": 0, "jobs.store": "off", "kvpool.directory": str(tmp_path)}
    assert launch.serve(asked := load(flags, {}, None), lambda: asked) == 7
    config, *specs = kept
    assert isinstance(config, Config)
    told = [parse(spec.config).engine.device for spec in specs if isinstance(spec, PartSpec)]
    assert {config.engine.device, *told} == {choice.device}, "every part is told, and none decides by itself"
    lines = capsys.readouterr().err.removeprefix(said).splitlines()
    assert [line.split()[1] for line in lines] == ["context:", "kv:", "pool:", "steps:"]


def test_cuda_without_a_gpu_is_refused_before_a_part_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "choose", lambda: DeviceChoice(DeviceKind.CPU, "no driver of a GPU is here"))
    monkeypatch.setattr(launch, "fork_servers", lambda _: nullcontext({}))
    flags = {"engine.device": "cuda", "server.port": 0, "jobs.store": "off", "kvpool.directory": str(tmp_path)}
    with pytest.raises(ConfigError, match="no driver of a GPU is here; set it to auto or cpu"):
        launch.serve(asked := load(flags, {}, None), lambda: asked)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("tokenizer.json", Path.unlink, "tokenizer.json is missing"),
        ("tokenizer.json", _cut, "tokenizer.json cannot be read"),
        ("model.safetensors", Path.unlink, "holds neither model.safetensors nor"),
        ("model.safetensors", _cut, "it was not fetched whole"),
    ],
)
def test_a_folder_that_lacks_something_is_refused_before_a_part_starts(
    tmp_path: Path, name: str, harm: Callable[[Path], None], said: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, folder)
    harm(folder / name)
    config = load({"model": str(folder), "engine.device": "cpu", "kvpool.directory": str(tmp_path)}, {}, None)
    with pytest.raises(ModelError, match=said):
        plan(config)


def test_a_model_that_needs_transformers_is_refused_before_a_part_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, folder)
    path = folder / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "StableLmForCausalLM"))
    config = load({"model": str(folder), "engine.device": "cpu", "kvpool.directory": str(tmp_path)}, {}, None)
    assert plan(config)
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = f"{folder}: StableLmForCausalLM is run by transformers, which is not installed: {sys.executable} -m pip"
    with pytest.raises(ModelError, match=rf"^{re.escape(said)} install 'alignedserve\[transformers\]'$"):
        plan(config)


def test_the_launcher_loads_no_torch() -> None:
    """It would take seconds of each start."""
    code = "import sys, alignedserve.launch.launch as launch; from alignedserve.config.config import Config\n"
    code += "launch.decide(Config()); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
