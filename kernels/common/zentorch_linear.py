"""AMD's zentorch, where it is installed: an optional extra, for the tuning to weigh against the others.

Left to itself, zentorch 2.13 rewrites a weight in its own order *in place* at the first call, and knows it again by its
address: whatever else reads the weight then gets nonsense, and so does a new weight at the old address. Told to keep no
weights it does neither. Whether that holds is tried before it is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from functools import cache
from typing import Protocol

import torch

from alignedserve.kernels.common.threads import openmp_libraries

log = logging.getLogger("alignedserve.kernels")


class ZenLinear(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, /) -> torch.Tensor: ...


@cache
def zen_linear() -> ZenLinear | None:
    """Its linear layer, tried once; None where it is not installed. Where it is and does not work, the log says why."""
    if importlib.util.find_spec("zentorch") is None:
        return None
    try:
        os.environ.setdefault("ZENDNNL_MATMUL_WEIGHT_CACHE", "0")  # read when it is imported
        importlib.import_module("zentorch")
        linear: ZenLinear = torch.ops.zentorch.zentorch_linear_unary
        harmless = leaves_weights_alone(linear)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        log.warning("zentorch is installed but not used: %s", " ".join(str(error).split()))
        return None
    if not harmless:
        log.warning("zentorch is installed but not used: it changes weights, or remembers them by their address")
        return None
    if len(pools := openmp_libraries()) > 1:
        log.warning("zentorch is installed but not used: it brings a second OpenMP pool (%s)", ", ".join(sorted(pools)))
        return None
    return linear


def leaves_weights_alone(linear: ZenLinear) -> bool:
    """Whether a weight is the same after calls, and one that has changed since the last call is read anew."""
    weight = torch.empty(96, 64, dtype=torch.bfloat16)
    for seed in range(2):
        values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for rows in (1, 4, 64):
            weight.copy_(values)
            product = linear(torch.ones(rows, 64, dtype=torch.bfloat16), weight)
            exact = values.float().sum(1).expand(rows, -1)
            if not torch.equal(weight, values) or not torch.allclose(product.float(), exact, rtol=0.02, atol=0.05):
                return False
    return True
