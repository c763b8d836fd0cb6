"""Tests of what `engine.device: auto` stands for, with a driver and a torch that pretend."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from alignedserve.config.choices import DeviceKind
from alignedserve.config.config import Config, load
from alignedserve.machine import visible_gpus
from alignedserve.sizing import accelerator
from alignedserve.sizing.accelerator import DeviceChoice, decide

ROOT = Path(__file__).resolve().parents[2]
CUDA, HIP = "cuda: Optional[str] = '13.0'", "hip = '7.1'"
CHOOSE = """
import json, sys
from pathlib import Path
from alignedserve.sizing import accelerator
accelerator._DRIVERS = {"cuda": (sys.argv[1],), "hip": (sys.argv[2],)}
choice = accelerator.choose()
print(json.dumps([choice.device.value, choice.why, choice.is_fallback, "torch" in sys.modules]))
"""
TORCH = """
import warnings
class cuda:
    is_available = lambda: {available}
    device_count = lambda: 2
    get_device_name = lambda number: "H100"
"""


def chosen(tmp_path: Path, driver: str, version: str, body: str, visible: str | None = None) -> DeviceChoice:
    """Return the choice where this driver is there, and a torch of this version file and this code."""
    nvidia, amd = tmp_path / "nvidiactl", tmp_path / "kfd"
    if driver:
        (tmp_path / driver).touch()
    torch = tmp_path / "site" / "torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text(f"from typing import Optional\n__version__ = '9.9'\n{version}\n")
    (torch / "__init__.py").write_text(body)
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env["PYTHONPATH"] = f"{torch.parent}{os.pathsep}{ROOT}"
    env |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    command = [sys.executable, "-c", CHOOSE, str(nvidia), str(amd)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    device, why, is_fallback, has_torch = json.loads(done.stdout)
    assert not has_torch, "the process that asks must not load torch"
    return DeviceChoice(DeviceKind(device), why.replace(str(tmp_path), "/dev"), is_fallback)


SEES, SEES_NONE = TORCH.format(available="True"), TORCH.format(available="bool(warnings.warn('the driver is too old'))")
NOT_ASKED = "raise SystemExit('torch was asked')"


@pytest.mark.parametrize(
    ("driver", "version", "body", "choice"),
    [
        ("nvidiactl", f"{CUDA}\nhip: Optional[str] = None", SEES, DeviceChoice(DeviceKind.CUDA, "torch sees 2 x H100")),
        ("kfd", f"cuda = None\n{HIP}", SEES, DeviceChoice(DeviceKind.CUDA, "torch sees 2 x H100")),
        ("", CUDA, NOT_ASKED, DeviceChoice(DeviceKind.CPU, "no driver of a GPU is here")),
        (
            "nvidiactl",
            "cuda: Optional[str] = None",
            NOT_ASKED,
            DeviceChoice(
                DeviceKind.CPU, "/dev/nvidiactl is here, but torch is built without CUDA, or not installed", True
            ),
        ),
        (
            "nvidiactl",
            HIP,
            NOT_ASKED,
            DeviceChoice(DeviceKind.CPU, "/dev/nvidiactl is here, but torch is built for hip alone", True),
        ),
        (
            "nvidiactl",
            CUDA,
            SEES_NONE,
            DeviceChoice(DeviceKind.CPU, "/dev/nvidiactl is here, but torch sees no GPU: the driver is too old", True),
        ),
        (
            "nvidiactl",
            CUDA,
            "raise ImportError('libcudart is missing')",
            DeviceChoice(
                DeviceKind.CPU,
                "/dev/nvidiactl is here, but torch sees no GPU: ImportError: libcudart is missing",
                True,
            ),
        ),
    ],
)
def test_it_is_the_gpu_that_torch_sees_and_else_the_cpu(
    tmp_path: Path, driver: str, version: str, body: str, choice: DeviceChoice
) -> None:
    assert chosen(tmp_path, driver, version, body) == choice


class Driver:
    """NVIDIA's driver, of two GPUs."""

    def __init__(self, version: int = 13_000, refuses: str = "") -> None:
        self._version, self._refuses = version, refuses

    def __getattr__(self, call: str) -> Any:
        def called(*arguments: Any) -> int:
            if call == "cuDeviceGetName":
                arguments[0].value = b"H100"
            elif call != "cuInit":
                found = {"cuDriverGetVersion": self._version, "cuDeviceGetCount": 2, "cuDeviceGet": 7}
                arguments[0]._obj.value = found[call]
            return int(call == self._refuses)

        return called


def test_the_driver_is_asked_before_torch_which_takes_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    assert visible_gpus.of_driver("13.0") == ["H100", "H100"]
    assert visible_gpus.of_driver("12.8") == ["H100", "H100"]
    assert not visible_gpus.of_driver("14.0"), "the driver is too old: torch says so, in full"


@pytest.mark.parametrize("call", ["cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName"])
def test_what_the_driver_does_not_tell_torch_is_asked(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(refuses=call))
    assert not visible_gpus.of_driver("13.0")


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_are_not_asked_for(tmp_path: Path, visible: str) -> None:
    choice = chosen(tmp_path, "nvidiactl", CUDA, NOT_ASKED, visible)
    assert choice == DeviceChoice(DeviceKind.CPU, "CUDA_VISIBLE_DEVICES hides all GPUs")


def test_only_auto_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "choose", lambda: DeviceChoice(DeviceKind.CUDA, "torch sees H100"))
    config, choice = decide(Config())
    assert (config.engine.device, config.engine.seats, choice.why) == (DeviceKind.CUDA, 256, "torch sees H100")
    given = load({"engine.device": "cpu"}, {}, None)
    assert decide(given)[0] == given
