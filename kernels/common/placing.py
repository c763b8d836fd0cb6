"""Copy a step's inputs from the CPU to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device, without waiting for the device's work."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def put(out: Tensor, values: Tensor) -> None:
    """Copy the values to `out` on the device, without waiting for the device's work."""
    out.copy_(values.pin_memory() if out.device.type == "cuda" else values, non_blocking=True)
