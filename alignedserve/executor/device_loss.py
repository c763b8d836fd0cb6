"""End the process when its device computes nothing any more."""

from __future__ import annotations

import logging
import os

import torch

from alignedserve.kernels.common.failing import loss
from alignedserve.shell.exit_code import ExitCode

log = logging.getLogger("alignedserve.engine")


def end_where_lost(device: torch.device) -> None:
    """End the process if the device is lost, since nothing that it could do is of any use. A thread that has failed
    calls this; the main thread raises DeviceLost instead."""
    if why := loss(device):
        log.error("%s computes nothing any more (%s): this process ends, and is restarted", device, why)
        os._exit(ExitCode.DEVICE_LOST)
