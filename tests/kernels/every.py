"""Makes all kernels that this machine can run: the torch reference, and the C++ kernels of every instruction set it
has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from alignedserve.kernels.build import LIBRARY
from alignedserve.kernels.common.linear import Linear
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.library import Library, usable_sets
from alignedserve.kernels.native.kernels import Native
from tests.conftest import SOAK


def native_sets() -> list[str]:
    """Return the usable instruction sets: none if the library was not built, for want of a compiler; a stale library is
    an error."""
    return usable_sets() if LIBRARY.exists() else []


def sets_for_whole_models() -> list[str]:
    """Return the usable sets but for the generic one, where there are others: it takes as long as all of them."""
    return [isa for isa in native_sets() if SOAK or isa != "generic"] or native_sets()


def kernels_of(name: str) -> Kernels:
    return Reference() if name == "reference" else Native(Library(name))


def _packs(isa: str) -> bool:
    return Linear(torch.ones(16, 2, dtype=torch.bfloat16), None, Library(isa)).pack()


# Instruction sets whose linear layers can pack their weights.
PACKING = [isa for isa in native_sets() if _packs(isa)]


def on_all_kernels(test: Callable[..., Any]) -> Any:
    return pytest.mark.parametrize("kernels", [kernels_of(name) for name in ("reference", *native_sets())], ids=_name)(
        test
    )


def on_native_kernels(test: Callable[..., Any]) -> Any:
    return pytest.mark.parametrize("kernels", [kernels_of(name) for name in native_sets()], ids=_name)(test)


def _name(kernels: Kernels) -> str:
    return kernels.name
