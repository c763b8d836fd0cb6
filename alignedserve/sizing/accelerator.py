"""Decide what `engine.device: auto` stands for on this machine: the GPUs that torch sees, else the CPU.

The process that plans a deployment decides once, before it starts parts: all of them compute alike, and their memory,
their steps and their checks are planned for one device. That process loads neither torch, which takes seconds, nor
CUDA, which does not survive a fork: visible_gpus.py asks them in a process of its own, and only where a build of torch
for GPUs and a driver are there. On the nodes of a Ray cluster launch/cluster.py decides, by what the nodes offer.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from alignedserve.config.choices import DeviceKind
from alignedserve.config.config import Config
from alignedserve.safe_path import module_command

# What the drivers of each build of torch open: NVIDIA's, also of boards (nvmap) and under WSL (dxg); AMD's.
NVIDIA = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg")
_DRIVERS = {"cuda": NVIDIA, "hip": ("/dev/kfd",)}
_HIDING = "CUDA_VISIBLE_DEVICES"
_LIMIT_S = 120.0


@dataclass(frozen=True)
class DeviceChoice:
    """A device, and why it is taken."""

    device: DeviceKind
    why: str
    is_fallback: bool = False  # whether the CPU computes although a GPU's driver is there


def choose() -> DeviceChoice:
    """Choose the device of workers on this machine."""
    there = [path for paths in _DRIVERS.values() for path in paths if Path(path).exists()]
    if not there:
        return DeviceChoice(DeviceKind.CPU, "no driver of a GPU is here")
    if os.environ.get(_HIDING, "0").strip() in ("", "-1"):
        return DeviceChoice(DeviceKind.CPU, f"{_HIDING} hides all GPUs")
    built = torch_is_built_for()
    if not any(path in _DRIVERS[kind] for kind in built for path in there):
        what = f"built for {' and '.join(built)} alone" if built else "built without CUDA, or not installed"
        return DeviceChoice(DeviceKind.CPU, f"{there[0]} is here, but torch is {what}", is_fallback=True)
    seen = _visible(built.get("cuda"))
    if isinstance(seen, str):
        return DeviceChoice(DeviceKind.CPU, f"{there[0]} is here, but torch sees no GPU: {seen}", is_fallback=True)
    counts = {name: seen.count(name) for name in seen}
    listed = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
    return DeviceChoice(DeviceKind.CUDA, f"torch sees {listed}")


def decide(config: Config) -> tuple[Config, DeviceChoice]:
    """Return the config with a device in place of `auto`, and why it is that one."""
    if config.engine.device is not DeviceKind.AUTO:
        return config, DeviceChoice(config.engine.device, "engine.device says so")
    choice = choose()
    return replace(config, engine=replace(config.engine, device=choice.device)), choice


def torch_is_built_for() -> Mapping[str, str]:
    """Return what the installed torch was built for, `cuda` or `hip`, and its version, without loading torch: it has a
    file that says it."""
    found = find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        file = Path(folder, "version.py")
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            return dict(re.findall(r"^(cuda|hip)\b.*=\s*['\"](\d[\d.]*)", text, re.MULTILINE))
    return {}


@cache
def _visible(cuda: str | None) -> Sequence[str] | str:
    """Return the names of the GPUs that torch sees, or why it sees none; asked once in a process."""
    command = module_command("alignedserve.machine.visible_gpus", *filter(None, [cuda]))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
        told = json.loads((done.stdout.splitlines() or [""])[-1])
    except subprocess.TimeoutExpired:
        return f"asking it took more than {_LIMIT_S:g} s"
    except ValueError:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    names, problem = told["names"], told["problem"]
    return names or problem or "torch.cuda is not available"
