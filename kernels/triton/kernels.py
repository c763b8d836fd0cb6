"""The Triton kernels behind dispatcher.py's interface; torch fills in the rest: linear layers whose weights are not
quantised are cuBLAS."""

from __future__ import annotations

from collections.abc import Sequence

import triton
from alignedserve.kernels.common.decoder import Layer, Sums
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.triton.adapters import TritonAdapters
from alignedserve.kernels.triton.copies import TritonCopies
from alignedserve.kernels.triton.decoder import TritonDecoder
from alignedserve.kernels.triton.experts import TritonExperts
from alignedserve.kernels.triton.few_rows import TritonFewRows
from alignedserve.kernels.triton.latent import TritonLatentAttention
from alignedserve.kernels.triton.products import TritonProducts
from alignedserve.kernels.triton.sampling import TritonSampling
from alignedserve.kernels.triton.tokens import TritonTokens


class TritonKernels(
    TritonLatentAttention,
    TritonTokens,
    TritonProducts,
    TritonFewRows,
    TritonExperts,
    TritonAdapters,
    TritonCopies,
    TritonSampling,
    Reference,
):
    name = f"Triton {triton.__version__}"

    def decoder(self, layers: Sequence[Layer], sums: Sums | None = None) -> TritonDecoder:
        return TritonDecoder(self, layers, sums)
