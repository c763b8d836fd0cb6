"""The C++ kernels behind the interface of dispatch.py; what they lack, the torch reference does."""

from __future__ import annotations

from alignedserve.kernels.native.attention import NativeAttention
from alignedserve.kernels.native.copies import NativeCopies
from alignedserve.kernels.native.decoder import NativeDecoders
from alignedserve.kernels.native.tokens import NativeTokens


class Native(NativeAttention, NativeTokens, NativeCopies, NativeDecoders):
    """All of them."""
