"""How what the CPU has made for a step reaches the device."""

from __future__ import annotations

import torch


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without waiting for what the device is at."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def put(out: torch.Tensor, values: torch.Tensor) -> None:
    """The same, to where something lies already."""
    out.copy_(values.pin_memory() if out.device.type == "cuda" else values, non_blocking=True)
