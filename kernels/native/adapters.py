"""Adds to a linear layer what its adapters change, in C++."""

from __future__ import annotations

from ctypes import addressof, c_int, c_int64, c_void_p

from torch import Tensor

from alignedserve.kernels.common.adapters import StepAdapters
from alignedserve.kernels.library import DTYPES, Library
from alignedserve.kernels.native.library import NativeLibrary


class NativeAdapters(NativeLibrary):
    def __init__(self, library: Library) -> None:
        super().__init__(library)
        arguments = c_int, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64
        self._adapt = library.kernel("adapt", *arguments)

    def adapt(self, step: StepAdapters, layer: int, x: Tensor, out: Tensor) -> None:
        step.check(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        if out.stride(1) != 1 or out.dtype is not x.dtype:
            raise ValueError(f"outputs {out.dtype} with steps {out.stride()} are not rows of {x.dtype}")
        self._adapt(
            DTYPES[x.dtype],
            addressof(step.in_c),
            layer,
            x.shape[1],
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
        )
