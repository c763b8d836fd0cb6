"""The transport `ipc`: two processes on one GPU map each other's device cache, where NCCL refuses two ranks.

What it needs is probed when a worker starts. It moves KV as the others do (transport.py), and is for GPUs alone: the
blocks are copied within the device, by handles that travel as notes of a `Meeting`.
"""

from __future__ import annotations

import torch


def why_no_ipc(device: torch.device) -> str | None:
    """Why this worker can map nobody's device cache."""
    if device.type != "cuda":
        return f"it maps the memory of a GPU, and this worker's KV is on the {device.type.upper()}"
    return "this version maps no GPU's memory yet"
