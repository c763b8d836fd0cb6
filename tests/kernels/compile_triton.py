"""Compiles every Triton kernel down to machine code, for a GPU that need not be there.

It runs by itself, without the interpreter, and prints a line of JSON for each kernel.

    python -m tests.kernels.compile_triton --archs 80 90 --dtypes bf16 fp16 fp32
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from alignedserve.kernels.triton import attention as triton_attention
from alignedserve.kernels.triton import copies as triton_copies
from alignedserve.kernels.triton import sampling as triton_sampling
from alignedserve.kernels.triton import tokens as triton_tokens

INT, LONG, FLOAT, DOUBLE, WHOLE = "*i32", "*i64", "*fp32", "*fp64", "i32"
POINTERS = {
    "pieces pairs from_right merges odd": INT,
    "slots tokens tops likeliest counts": LONG,
    "partial weights cos sin least step values logits": FLOAT,
    "wishes": DOUBLE,
    "q": "*u8",
}
NAMED = {name: kind for names, kind in POINTERS.items() for name in names.split()} | {"eps": "fp32", "scale": "fp32"}
HEADS = {"KV_DIM": 1024, "BLOCK_SIZE": 16, "GROUP": 4, "HEAD_DIM": 128, "WIDTH": 128, "ROWS": 16}
CHUNK, CHUNK_MHA = {"ROWS": 64}, {"ROWS": 64, "GROUP": 1}
SMALL = {"KV_DIM": 32, "HEAD_DIM": 8, "WIDTH": 16, "GROUP": 1, "BLOCK_SIZE": 33}
STRIDES = {"row_stride", "head_stride"}  # multiples of 16, as addresses are, so that many numbers are read at once
ONE_COLUMN = {"columns": 1, "stride": 1}  # Triton treats an argument that is 1 as a constant
MOVED = {"SIZE": 1000, "WIDTH": 1024}
LEVELS = {"LEVELS": 255, "TINY": 2.0**-100, "ENLARGE": 2.0**64}
NORM = {"HEADS": 2, "SIZE": 100, "WIDTH": 128, "CENTRED": True, "ADDS": True, "WEIGHS": True, "SHIFTS": True}


def all_kernels() -> Iterator[tuple[Any, Mapping[str, Any], Mapping[str, str]]]:
    """Yield each kernel with its constants, and with the arguments whose type differs from other kernels."""
    attend, of_attend = HEADS | {"WIDE": False, "TOKENS": 32}, {"query": "", "cache": "", "out": ""}
    for heads in ({}, CHUNK, CHUNK_MHA, SMALL):
        yield triton_attention._attend, attend | heads, of_attend
    merge = {name: HEADS[name] for name in ("GROUP", "HEAD_DIM", "WIDTH", "ROWS")}
    yield triton_attention._merge, merge, {"out": ""}
    yield triton_attention._write, {"KV_DIM": 1000, "WIDTH": 1024}, {"cache": "", "k": "", "v": ""}
    for to_cache in (True, False):
        yield triton_copies._move, MOVED | {"TO_CACHE": to_cache}, {"cache": "", "rows": ""}
        yield triton_copies._move_hidden, MOVED | {"TO_CACHE": to_cache}, {"cache": "", "vectors": ""}
    yield triton_copies._quantise, LEVELS | {"TOKENS": 64, "WIDTH": 128}, {"rows": "", "tokens": WHOLE}
    yield triton_copies._dequantise, {"LARGEST": 3.4e38, "WIDTH": 128}, {"out": ""}
    yield triton_copies._expand, MOVED | {"LARGEST": 3.4e38}, {"cache": ""}
    yield triton_tokens._norm, NORM, {"x": "", "more": "", "weight": "", "bias": "", "out": ""}
    yield triton_tokens._rotate, {"HEADS": 2, "HALF": 60, "WIDTH": 64}, {"vectors": ""}
    yield triton_tokens._silu_mul, {"INNER": 3000, "WIDTH": 1024}, {"gate_up": "", "out": ""}
    for columns in ({}, ONE_COLUMN):
        yield triton_sampling._draw, {"BLOCK": 4096} | columns, {"out": LONG}
    yield triton_sampling._logprobs, {"BLOCK": 4096}, {"of_token": FLOAT}


def function_of(kernel: Any) -> Any:
    return kernel.fn if hasattr(kernel, "configs") else kernel  # a tuned kernel wraps its function


def compiled(kernel: Any, constants: Mapping[str, Any], dtypes_of: Mapping[str, str], arch: int, dtype: str) -> Any:
    function = function_of(kernel)
    kinds = {name: NAMED.get(name, WHOLE) for name in function.arg_names} | {
        name: kind or f"*{dtype}" for name, kind in dtypes_of.items()
    }
    source = ASTSource(
        function,
        signature=kinds | dict.fromkeys(constants, "constexpr"),
        constexprs=dict(constants),
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(function.arg_names)
            if name not in constants and (kinds[name].startswith("*") or name in STRIDES)
        },
    )
    options = {"num_stages": 3} if function is function_of(triton_attention._attend) else {}
    return function, triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", type=int, nargs="+", default=[90], help="compute capabilities, times ten")
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], help="of K, V and what is computed with them")
    parser.add_argument("--kernels", nargs="+", help="the names of some")
    options = parser.parse_args()
    for arch in options.archs:
        for kernel, constants, kinds in all_kernels():
            if options.kernels and function_of(kernel).__name__ not in options.kernels:
                continue
            for dtype in options.dtypes if "" in kinds.values() else ("fp32",):
                function, made = compiled(kernel, constants, kinds, arch, dtype)
                told = {"kernel": function.__name__, "arch": arch, "dtype": dtype, "shared": made.metadata.shared}
                print(json.dumps(told | {"bytes": len(made.asm["cubin"])}), flush=True)


if __name__ == "__main__":
    main()
