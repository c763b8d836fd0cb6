"""The C++ kernels behind dispatcher.py's interface; the torch reference fills in what they lack."""

from __future__ import annotations

from alignedserve.kernels.native.adapters import NativeAdapters
from alignedserve.kernels.native.attention import NativeAttention
from alignedserve.kernels.native.copies import NativeCopies
from alignedserve.kernels.native.decoder import NativeDecoders
from alignedserve.kernels.native.tokens import NativeTokens


class Native(NativeAttention, NativeTokens, NativeCopies, NativeAdapters, NativeDecoders):
    """All kernels of the C++ library."""
