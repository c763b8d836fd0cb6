"""The Triton kernels behind the interface of dispatch.py; what they lack, torch does: linear layers are cuBLAS."""

from __future__ import annotations

import triton

from alignedserve.kernels.reference import Reference
from alignedserve.kernels.triton_attention import TritonAttention
from alignedserve.kernels.triton_copies import TritonCopies
from alignedserve.kernels.triton_sampling import TritonSampling
from alignedserve.kernels.triton_tokens import TritonTokens


class TritonKernels(TritonAttention, TritonTokens, TritonCopies, TritonSampling, Reference):
    name = f"Triton {triton.__version__}"
