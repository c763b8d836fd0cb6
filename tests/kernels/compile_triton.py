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

from alignedserve.kernels.triton import adapters as triton_adapters
from alignedserve.kernels.triton import attention as triton_attention
from alignedserve.kernels.triton import copies as triton_copies
from alignedserve.kernels.triton import int8_kv as triton_int8_kv
from alignedserve.kernels.triton import latent as triton_latent
from alignedserve.kernels.triton import pieces as triton_pieces
from alignedserve.kernels.triton import products as triton_products
from alignedserve.kernels.triton import sampling as triton_sampling
from alignedserve.kernels.triton import tokens as triton_tokens

INT, LONG, FLOAT, DOUBLE, WHOLE = "*i32", "*i64", "*fp32", "*fp64", "i32"
POINTERS = {
    "pieces pairs from_right merges odd": INT,
    "slots tokens tops likeliest counts": LONG,
    "partial weights cos sin least step values logits sinks slopes": FLOAT,
    "wishes": DOUBLE,
    "q": "*u8",
}
NAMED = {name: kind for names, kind in POINTERS.items() for name in names.split()} | dict.fromkeys(
    ("eps", "scale", "softcap"), "fp32"
)
HEADS = {"VECTOR": 1024, "BLOCK_SIZE": 16, "GROUP": 4, "HEAD_DIM": 128, "WIDTH": 128, "ROWS": 16}
LATENT = {"HALF": 288, "BLOCK_SIZE": 16, "GROUP": 16, "RANK": 512, "SIZE": 576, "WIDTH": 512, "REST": 64, "WIDE": False}
CHUNK, CHUNK_MHA = {"ROWS": 64}, {"ROWS": 64, "GROUP": 1}
USUAL = dict.fromkeys(("CAPPED", "SLOPED", "WITH_SINKS"), False)
CHANGED = CHUNK | dict.fromkeys(USUAL, True)
SMALL = {"VECTOR": 32, "HEAD_DIM": 8, "WIDTH": 16, "GROUP": 1, "BLOCK_SIZE": 33}
# Multiples of 16, as addresses are, so that many numbers are read at once.
STRIDES = {"row_stride", "head_stride", "inputs", "outputs", "group"}
INT8, OF_INT8 = {"IN_INT8": True, "VECTOR": 1040}, {"cache": "*i8", "scales": "*i16"}
ONE_COLUMN = {"columns": 1, "stride": 1}  # Triton treats an argument that is 1 as a constant
MOVED = {"SIZE": 1000, "WIDTH": 1024}
LEVELS = {"LEVELS": 255, "TINY": 2.0**-100, "ENLARGE": 2.0**64}
NORM = {
    "HEADS": 2,
    "SIZE": 100,
    "WIDTH": 128,
    "CENTRED": True,
    "ADDS": True,
    "WEIGHS": True,
    "SHIFTS": True,
    "WIDE": False,
}

# Of 4 bits with zeros, of 8 bits with groups that fit no tile, and of whole numbers: for few rows, and for many.
PRODUCT = {"BITS": 4, "HALF": 64, "WHOLE": False, "TILED": True, "SHIFTS": True, "HAS_BIAS": True, "ADDS": True}
PRODUCT |= {"SPLITS": False, "WIDE": False, "ROWS": 16, "OUTS": 64}
MANY = {"ROWS": 64, "OUTS": 128, "HAS_BIAS": False, "ADDS": False}
UNTILED, WHOLE_ROWS = {"BITS": 8, "HALF": 32, "TILED": False, "SHIFTS": False}, {"BITS": 8, "WHOLE": True}
OF_WEIGHT = {"memory": "*u8", "scales": "*bf16", "zeros": "*bf16", "of_rows": FLOAT, "partial": FLOAT}
OF_WHOLE = OF_WEIGHT | {"x": "*i8", "memory": "*i8", "scales": FLOAT, "bias": "*bf16", "out": "*bf16"}
FP8, LEAST_OF_FP8 = "*fp8e4nv", 89  # 8-bit floats, and the compute capability from which on GPUs have them


def all_kernels() -> Iterator[tuple[Any, Mapping[str, Any], Mapping[str, str]]]:
    """Yield each kernel with its constants, and with the arguments whose type differs from other kernels."""
    attend, of_attend = HEADS | {"WIDE": False, "IN_INT8": False, "TOKENS": 32}, {"query": "", "cache": "", "out": ""}
    attend |= USUAL
    for heads in ({}, CHUNK, CHUNK_MHA, SMALL, CHANGED):
        yield triton_attention._attend, attend | heads, of_attend | {"scales": ""}
        yield triton_attention._attend, attend | heads | INT8, of_attend | OF_INT8
    yield triton_latent._attend_latent, LATENT | {"ROWS": 16, "TOKENS": 16}, of_attend
    for dtype in ("*bf16", "*fp16"):
        yield triton_latent._attend_latent, LATENT | {"ROWS": 32, "TOKENS": 32}, dict.fromkeys(of_attend, dtype)
    merge = {name: HEADS[name] for name in ("GROUP", "HEAD_DIM", "WIDTH", "ROWS")}
    for with_sinks in (False, True):
        yield triton_pieces.merge, merge | {"WITH_SINKS": with_sinks}, {"out": ""}
    yield triton_attention._write, {"KV_DIM": 1000, "WIDTH": 1024}, {"cache": "", "k": "", "v": ""}
    written = {"VECTOR": 1040, "HEAD_DIM": 128, "WIDTH": 128, "MOST": 127, "TINY": 2.0**-126}
    yield triton_int8_kv._write_int8, written, OF_INT8 | {"k": "", "v": ""}
    for to_cache in (True, False):
        yield triton_copies._move, MOVED | {"TO_CACHE": to_cache}, {"cache": "", "rows": ""}
        yield triton_copies._move_hidden, MOVED | {"TO_CACHE": to_cache}, {"cache": "", "vectors": ""}
    yield triton_copies._quantise, LEVELS | {"TOKENS": 64, "WIDTH": 128}, {"rows": "", "tokens": WHOLE}
    yield triton_copies._dequantise, {"LARGEST": 3.4e38, "WIDTH": 128}, {"out": ""}
    yield triton_copies._expand, MOVED | {"LARGEST": 3.4e38}, {"cache": ""}
    yield triton_tokens._norm, NORM, {"x": "", "more": "", "weight": "", "bias": "", "out": ""}
    yield triton_tokens._rotate, {"HEADS": 2, "HALF": 60, "WIDTH": 64}, {"vectors": ""}
    for is_gelu in (False, True):
        yield triton_tokens._gated, {"INNER": 3000, "WIDTH": 1024, "GELU": is_gelu}, {"gate_up": "", "out": ""}
    of_x = OF_WEIGHT | {"x": "", "bias": "", "out": ""}
    for kind in ({}, {"SPLITS": True}, UNTILED):
        yield triton_products._multiply, PRODUCT | kind, of_x
    yield triton_products._multiply, PRODUCT | MANY, OF_WEIGHT | {"x": "*bf16", "bias": "*bf16", "out": "*bf16"}
    for kind in ({}, MANY):
        yield triton_products._multiply, PRODUCT | WHOLE_ROWS | kind, OF_WHOLE
    ends = {"HAS_BIAS": True, "ADDS": True, "WIDTH": 1024}
    yield triton_products._finish, ends, {"bias": "", "out": "", "rows": WHOLE}
    shrink = {"LEAST": 1e-30, "WIDTH": 1024}
    yield triton_products._shrink, shrink | {"MOST": 127, "ROUNDS": True}, {"x": "", "out": "*i8", "of_rows": FLOAT}
    yield triton_products._shrink, shrink | {"MOST": 448.0, "ROUNDS": False}, {"x": "", "out": FP8, "of_rows": FLOAT}
    of_adapters = {"layer": LONG, "tiles": INT, "rows": INT, "sums": FLOAT}
    tile = {"FIELDS": 18, "RANKS": 64, "ROWS": 16, "WIDE": False}
    yield triton_adapters._sum_ranks, tile | {"INPUTS": 64}, of_adapters | {"x": ""}
    yield (
        triton_adapters._add_panels,
        tile | {"PART": 8, "ALL_RANKS": 128, "PANEL": 64, "PAIR": 2},
        of_adapters | {"out": ""},
    )
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
    stages = {"_attend": 3, "_attend_latent": 2, "_multiply": 2}.get(function.__name__)
    options = {} if stages is None else {"num_stages": stages}
    return function, triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", type=int, nargs="+", default=[90], help="compute capabilities, times ten")
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], help="of K, V and what is computed with them")
    parser.add_argument("--kernels", nargs="+", help="the names of some")
    options = parser.parse_args()
    for arch in options.archs:
        for kernel, constants, kinds in all_kernels():
            if FP8 in kinds.values() and arch < LEAST_OF_FP8:
                continue
            if options.kernels and function_of(kernel).__name__ not in options.kernels:
                continue
            for dtype in options.dtypes if "" in kinds.values() else ("fp32",):
                function, made = compiled(kernel, constants, kinds, arch, dtype)
                told = {"kernel": function.__name__, "arch": arch, "dtype": dtype, "shared": made.metadata.shared}
                print(json.dumps(told | {"bytes": len(made.asm["cubin"])}), flush=True)


if __name__ == "__main__":
    main()
