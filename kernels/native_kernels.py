"""The C++ kernels behind the interface of dispatch.py; what they lack, the torch reference does."""

from __future__ import annotations

from alignedserve.kernels.native_attention import NativeAttention
from alignedserve.kernels.native_copies import NativeCopies
from alignedserve.kernels.native_decoder import NativeDecoders
from alignedserve.kernels.native_tokens import NativeTokens


class Native(NativeAttention, NativeTokens, NativeCopies, NativeDecoders):
    """All of them."""
