"""Compiles every Triton kernel down to machine code, for a GPU that need not be there.

It runs by itself, without the interpreter, and prints a line of JSON for each kernel.

    python -m tests.kernels.compile_triton --archs 80 90 --dtypes bf16 fp16 fp32

With --choices it compiles what the tuner chooses from, all choices of each tuned kernel that fit, at the sizes of an 8B
(of a mixture, of a model with compressed vectors), and tells the registers, the bytes on the stack and the
instructions as well.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from alignedserve.kernels.triton import adapters as triton_adapters
from alignedserve.kernels.triton import attention as triton_attention
from alignedserve.kernels.triton import copies as triton_copies
from alignedserve.kernels.triton import experts as triton_experts
from alignedserve.kernels.triton import few_rows as triton_few_rows
from alignedserve.kernels.triton import latent as triton_latent
from alignedserve.kernels.triton import products as triton_products
from alignedserve.kernels.triton import sampling as triton_sampling
from alignedserve.kernels.triton import sums as triton_sums
from alignedserve.kernels.triton import tokens as triton_tokens

INT, LONG, FLOAT, DOUBLE, WHOLE = "*i32", "*i64", "*fp32", "*fp64", "i32"
POINTERS = {
    "pieces tables counters": INT,
    "slots tokens tops likeliest counts": LONG,
    "partial weights cos sin least step values logits sinks": FLOAT,
    "wishes": DOUBLE,
    "q": "*u8",
}
NAMED = {name: kind for names, kind in POINTERS.items() for name in names.split()} | dict.fromkeys(
    ("eps", "scale", "softcap"), "fp32"
)
HEADS = {"VECTOR": 1024, "BLOCK_SIZE": 16, "GROUP": 4, "HEAD_DIM": 128, "WIDTH": 128, "ROWS": 16}
LATENT = {"HALF": 288, "BLOCK_SIZE": 16, "GROUP": 16, "RANK": 512, "SIZE": 576, "WIDTH": 512, "REST": 64, "WIDE": False}
CHUNK, CHUNK_MHA = {"ROWS": 64}, {"ROWS": 64, "GROUP": 1}
USUAL = dict.fromkeys(("CAPPED", "WITH_SINKS"), False)
CHANGED = CHUNK | dict.fromkeys(USUAL, True)
SMALL = {"VECTOR": 32, "HEAD_DIM": 8, "WIDTH": 16, "GROUP": 1, "BLOCK_SIZE": 33}
# Multiples of 16, as addresses are, so that many numbers are read at once.
STRIDES = {"row_stride", "part_stride", "head_stride", "inputs", "outputs", "group", "x_row", "out_row"}
INT8, OF_INT8 = {"IN_INT8": True, "VECTOR": 1040}, {"cache": "*i8", "scales": "*i16"}
ONE_COLUMN = {"columns": 1, "stride": 1}  # Triton treats an argument that is 1 as a constant
TURNED = {"VECTOR": 1024, "GROUP": 4, "QUERIES": 4, "HALF": 64, "HEAD_DIM": 128, "WIDTH": 128}
TURNED |= {"NORMED": True, "IN_INT8": False, "MOST": 127, "TINY": 2.0**-126}
OF_TURNED = dict.fromkeys(("cache", "scales", "qkv", "query", "query_norm", "k_norm"), "")
NEW = {"NEW": True, "HALF": 64, "NORMED": False, "MOST": 127, "TINY": 2.0**-126}  # decodes that write their K and V
OF_NORMS = {"query_norm": "*bf16", "k_norm": "*bf16"}
FEW = dict.fromkeys(("NORMED", "HAS_BIAS", "ADDS", "WIDE"), False) | {"GATE": 0}
ONE_ROW = {"ROWS": 1, "NORM_WIDTH": 4096, "OUTS": 8, "DEPTH": 512}
FEW_ROWS = {"ROWS": 16, "NORM_WIDTH": 512, "OUTS": 8, "DEPTH": 512}
OF_FEW = dict.fromkeys(("x", "weight", "bias", "norm", "out"), "") | {"rows": WHOLE}
SUMMED = {
    "RANK": 1,
    "RANKS": 2,
    "FLAGS": 2048,
    "HALF": 32768,
    "MOST_POLLS": 1 << 24,
    "AFTER": False,
    "NORMS": True,
    "INTERPRETED": False,
}
OF_SUMMED = {"addresses": LONG, "rows": WHOLE, "counts": WHOLE}
MOVED = {"SIZE": 1000, "WIDTH": 1024}
LEVELS = {"LEVELS": 255, "TINY": 2.0**-100, "ENLARGE": 2.0**64}
NORM = {
    "HEADS": 2,
    "SIZE": 100,
    "WIDTH": 128,
    "CENTRED": True,
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
EXPERT = {"TAKEN": 8, "UNIT": 128, "GATED": True, "CLAMPED": False, "WEIGHS": False, "HAS_BIAS": False, "ALONE": False}
EXPERT |= {"FEW": False, "CHOSEN": 8, "EACH": 8, "EXPERTS": 128}
EXPERT |= {"BITS": 0, "FLOATS": False, "ON_CHIP": False, "SHIFTS": False, "GROUP": 1 << 30, "HALF": 16}
EXPERT |= {"WIDE": False, "ROWS": 16}
FP8_EXPERT: dict[str, Any] = {"BITS": 8, "FLOATS": True, "GROUP": 128}
INT4_EXPERT: dict[str, Any] = {"BITS": 4, "SHIFTS": True, "GROUP": 128}
GPT_OSS, DOWN = {"CLAMPED": True, "WEIGHS": True, "HAS_BIAS": True}, {"TAKEN": 1, "GATED": False}
SMALL_EXPERT, OF_FP32 = {"OUTS": 64, "DEPTH": 64}, {"OUTS": 64, "DEPTH": 32}
OF_EXPERT = {"owners": INT, "order": INT, "shares": FLOAT, "weights": LONG, "biases": LONG}
OF_EXPERT |= {"scales": LONG, "zeros": LONG, "scale": FLOAT}
OF_EXPERT |= {"pairs": WHOLE, "limit": "fp32", "slope": "fp32", "x": "", "out": ""}
ROUTE: dict[str, Any] = {"EXPERTS": 256, "ALL": 256, "TAKEN": 8, "GROUPS": 8, "TAKEN_GROUPS": 4}
ROUTE |= {"SOFTMAX": False, "BIASED": True, "NORMALISED": True, "LEAST": 1e-20}
WEIGH = {"PARTS": 32, "PART": 4096, "BOUNDS": 32}
OF_DRAW = {"looks": FLOAT, "tokens": INT, "bounds": INT, "counts": INT, "weights": DOUBLE}
OF_DRAW |= {"listed": FLOAT, "listed_tokens": INT}
FP8, LEAST_OF_FP8 = "*fp8e4nv", 89  # 8-bit floats, and the compute capability from which on GPUs have them
LEAST_OF_PDL = 90


def all_kernels() -> Iterator[tuple[Any, Mapping[str, Any], Mapping[str, str]]]:
    """Yield each kernel with its constants, and with the arguments whose type differs from other kernels."""
    attend, of_attend = HEADS | {"WIDE": False, "IN_INT8": False, "TOKENS": 32}, {"query": "", "cache": "", "out": ""}
    attend, of_attend = attend | USUAL, of_attend | {"query_norm": "", "k_norm": ""}
    wide = {"HEAD_DIM": 256, "WIDTH": 256}  # as many numbers as a program may rotate
    for heads in ({}, CHUNK, CHUNK_MHA, SMALL, CHANGED, NEW, NEW | wide, NEW | SMALL | {"NORMED": True, "HALF": 3}):
        yield triton_attention._attend, attend | heads, of_attend | {"scales": ""}
        yield triton_attention._attend, attend | heads | INT8, of_attend | OF_INT8
    yield triton_latent._attend_latent, LATENT | {"ROWS": 16, "TOKENS": 16}, of_attend
    for dtype in ("*bf16", "*fp16"):
        yield triton_latent._attend_latent, LATENT | {"ROWS": 32, "TOKENS": 32}, dict.fromkeys(of_attend, dtype)
    yield triton_attention._write, {"KV_DIM": 1000, "WIDTH": 1024}, {"cache": "", "k": "", "v": ""}
    written = {"VECTOR": 1040, "HEAD_DIM": 128, "WIDTH": 128, "MOST": 127, "TINY": 2.0**-126}
    yield triton_attention._write_int8, written, OF_INT8 | {"k": "", "v": ""}
    for kind in ({}, {"IN_INT8": True, "VECTOR": 1040}, {"NORMED": False, "HALF": 20, "HEAD_DIM": 96}):
        yield triton_attention._rotate_and_write, TURNED | kind, OF_TURNED | (OF_INT8 if "VECTOR" in kind else {})
    for kind in ({}, {"GATE": 1, "NORMED": True}, {"HAS_BIAS": True, "ADDS": True}):
        for tile in (ONE_ROW, FEW_ROWS):
            yield triton_few_rows._few_rows, FEW | tile | kind, OF_FEW
    for to_cache in (True, False):
        yield triton_copies._move, MOVED | {"TO_CACHE": to_cache}, {"cache": "", "rows": ""}
    yield triton_copies._quantise, LEVELS | {"TOKENS": 64, "WIDTH": 128}, {"rows": "", "tokens": WHOLE}
    yield triton_copies._expand, MOVED | {"LARGEST": 3.4e38}, {"cache": ""}
    yield triton_tokens._norm, NORM, {"x": "", "weight": "", "bias": "", "out": ""}
    added = NORM | {"CENTRED": False, "SHIFTS": False}
    del added["HEADS"]
    of_added = dict.fromkeys(("x", "part", "after", "after_bias", "weight", "bias", "out"), "") | {"after_eps": "fp32"}
    for size in ({}, {"SIZE": 4096, "WIDTH": 4096}, {"SIZE": 8192, "WIDTH": 8192}):
        for is_normed in (False, True):
            yield triton_tokens._add_and_norm, added | size | {"AFTER": is_normed}, of_added
    for kind in ({}, {"SIZE": 4096, "WIDTH": 4096}, {"SIZE": 8192, "WIDTH": 8192, "RANKS": 8, "AFTER": True}):
        yield (
            triton_sums._sum_add_norm,
            added | SUMMED | kind,
            of_added | OF_SUMMED,
        )
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
    of_adapters = {"tiles": LONG, "sums": FLOAT}
    tile = {"FIELDS": 18, "ALL_RANKS": 768, "RANKS": 16, "ROWS": 16, "WIDE": False}
    yield triton_adapters._sum_ranks, tile | {"INPUTS": 128}, of_adapters | {"x": ""}
    panel = {"BEFORE_PARTS": 3, "OF_PART": 5, "PARTS": 3, "PANEL": 64, "PAIR": 2}
    yield triton_adapters._add_panels, tile | panel, of_adapters | {"out": ""}
    of_choice = {"bias": FLOAT, "chosen": LONG, "shares": FLOAT, "factor": "fp32"}
    for kind in ({}, {"SOFTMAX": True, "BIASED": False, "GROUPS": 1, "TAKEN_GROUPS": 1}):
        yield triton_experts._route, ROUTE | kind, of_choice
    of_count, placed = {"pairs": WHOLE, "chosen": LONG, "counts": INT}, {"order": INT, "owners": INT}
    yield triton_experts._count, {"WIDTH": 1024}, of_count
    place = {"EXPERTS": 128, "ALL": 128, "ROWS": 16, "PART": 128}
    for kind in ({"COUNTED": True, "WIDTH": 1024}, {"COUNTED": False, "WIDTH": 512}):
        yield triton_experts._place, place | kind, of_count | placed
    for kind in ({}, GPT_OSS, DOWN):
        yield triton_experts._by_expert, EXPERT | OF_FP32 | kind, OF_EXPERT
        yield triton_experts._by_expert, EXPERT | SMALL_EXPERT | kind, OF_EXPERT | {"x": "*bf16", "out": "*bf16"}
    for kind in (FP8_EXPERT, FP8_EXPERT | {"ON_CHIP": True}, INT4_EXPERT, {"BITS": 8}):
        yield triton_experts._by_expert, EXPERT | SMALL_EXPERT | kind, OF_EXPERT | {"x": "*bf16", "out": "*bf16"}
        yield triton_experts._by_expert, EXPERT | OF_FP32 | kind | DOWN, OF_EXPERT
    one_row = OF_EXPERT | {"owners": LONG, "order": LONG}
    for kind in ({"ALONE": True}, {"FEW": True}):
        yield triton_experts._by_expert, EXPERT | OF_FP32 | kind, one_row
        yield triton_experts._by_expert, EXPERT | SMALL_EXPERT | kind, one_row | {"x": "*bf16", "out": "*bf16"}
    summed = {"TAKEN": 8, "WEIGHS": True, "WIDTH": 1024}
    for adds in (False, True):
        of_summed = {"pairs": WHOLE, "made": FLOAT, "shares": FLOAT, "out": ""}
        yield triton_experts._sum, summed | {"ADDS": adds}, of_summed
    for columns in ({}, ONE_COLUMN):
        yield triton_sampling._forbid, {"PART": 4096} | columns, {"words": INT}
        yield triton_sampling._look, {"PART": 4096} | columns, OF_DRAW
        yield triton_sampling._weigh, WEIGH | columns, OF_DRAW
        yield triton_sampling._draw, WEIGH | {"LISTED": 16384, "BLOCK": 4096} | columns, OF_DRAW | {"out": LONG}
    yield triton_sampling._logprobs, {"BLOCK": 4096}, {"of_token": FLOAT}


def all_choices() -> Iterator[tuple[Any, Mapping[str, Any], Mapping[str, str], Any]]:
    """Yield each tuned kernel at the sizes of an 8B in bf16, with each of its choices that fit."""
    attend = HEADS | USUAL | {"WIDE": False, "IN_INT8": False}
    latent = {"query": "*bf16", "cache": "*bf16", "out": "*bf16"}
    of_attend = latent | OF_NORMS
    product = PRODUCT | {"HAS_BIAS": False, "ADDS": False}
    of_product = OF_WEIGHT | {"x": "*bf16", "bias": "*bf16", "out": "*bf16"}
    kinds: list[tuple[Any, Mapping[str, Any], Mapping[str, str]]] = [
        (triton_attention._attend, attend, of_attend | {"scales": "*bf16"}),
        (triton_attention._attend, attend | NEW, of_attend | {"scales": "*bf16"}),
        (triton_attention._attend, attend | NEW | {"NORMED": True}, of_attend | {"scales": "*bf16"}),
        (triton_attention._attend, attend | NEW | INT8, of_attend | OF_INT8),
        (triton_attention._attend, attend | NEW | INT8 | {"NORMED": True}, of_attend | OF_INT8),
        (triton_attention._attend, attend | CHUNK, of_attend | {"scales": "*bf16"}),
        (triton_attention._attend, attend | INT8, of_attend | OF_INT8),
        (triton_attention._attend, attend | CHUNK | INT8, of_attend | OF_INT8),
        (triton_latent._attend_latent, LATENT | {"ROWS": 16}, latent),
        (triton_latent._attend_latent, LATENT | {"ROWS": 32}, latent),
        (triton_sampling._draw, WEIGH | {"LISTED": 16384}, OF_DRAW | {"out": LONG}),
        (triton_sampling._logprobs, {}, {"of_token": FLOAT}),
    ]
    for tile in (ONE_ROW, FEW_ROWS):
        for form in ({}, {"NORMED": True}, {"GATE": 1}, {"GATE": 1, "NORMED": True}, {"ADDS": True}):
            kinds.append(
                (triton_few_rows._few_rows, FEW | tile | form, dict.fromkeys(OF_FEW, "*bf16") | {"rows": WHOLE})
            )
    for rows in triton_products.TILE_ROWS:
        if rows <= triton_products._MOST_HALVES[4]:
            kinds.append((triton_products._multiply, product | {"ROWS": rows}, of_product))
        floats = product | {"BITS": 8, "ROWS": rows, "SHIFTS": False}
        kinds.append((triton_products._multiply, floats, of_product | {"memory": "*i8"}))
        kinds.append((triton_products._multiply, product | WHOLE_ROWS | {"ROWS": rows, "SHIFTS": False}, OF_WHOLE))
    for rows in triton_experts.TILE_ROWS:
        for kind in ({}, FP8_EXPERT, FP8_EXPERT | {"ON_CHIP": True}, INT4_EXPERT, INT4_EXPERT | {"GROUP": 32}):
            of_expert = OF_EXPERT | {"x": "*bf16", "out": "*bf16"}
            for side in ({}, DOWN):
                kinds.append((triton_experts._by_expert, EXPERT | kind | side | {"ROWS": rows}, of_expert))
    in_bf16 = torch.empty(0, dtype=torch.bfloat16)
    for kernel, constants, dtypes in kinds:
        arguments = {"query": in_bf16, "x": in_bf16} | dict(constants)
        own = {name: size for name, size in constants.items() if name not in kernel.configs[0].kwargs}
        for choice in kernel.early_config_prune(kernel.configs, arguments):
            yield kernel, own | choice.kwargs, dtypes, choice


def resources(made: Any) -> dict[str, int]:
    """Return the registers and the bytes on the stack of a thread: what does not fit its registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", told), re.search(r"STACK:(\d+)", told)
    assert registers, told
    assert stack, told
    return {"registers": int(registers[1]), "stack": int(stack[1])}


def instructions(made: Any) -> dict[str, int]:
    """Return how often the code copies to shared memory beside its work, and multiplies on tensor cores."""
    code = made.asm["ptx"]
    return {
        "copies": len(re.findall(r"cp\.async\.c[ag]\.shared\.global", code)),
        "mma": len(re.findall(r"\bmma\.sync", code)),
        "wgmma": len(re.findall(r"wgmma\.mma_async", code)),
    }


def accesses_before_the_wait(made: Any) -> int:
    """Return how many instructions of a kernel launched while another ends read or write memory before it waits."""
    before, _, behind = made.asm["ptx"].partition("griddepcontrol.wait")
    assert behind, "it does not wait"
    return len(re.findall(r"\b(ld|st|red|atom|cp\.async[.a-z]*)\.(?!param)[a-z.]*global", before))


def function_of(kernel: Any) -> Any:
    return kernel.fn if hasattr(kernel, "configs") else kernel  # a tuned kernel wraps its function


def compiled(
    kernel: Any,
    constants: Mapping[str, Any],
    dtypes_of: Mapping[str, str],
    arch: int,
    dtype: str,
    choice: Any = None,
) -> Any:
    function = function_of(kernel)
    kinds = {name: NAMED.get(name, WHOLE) for name in function.arg_names} | {
        name: kind or f"*{dtype}" for name, kind in dtypes_of.items() if name in function.arg_names
    }
    if "PDL" in function.arg_names:
        constants = {"PDL": arch >= LEAST_OF_PDL, **constants}
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
    if function.__name__ == "_rotate_and_write":
        options["num_warps"] = 1
    if function.__name__ == "_sum_add_norm":
        options = {"num_warps": triton_sums.warps(constants["SIZE"]), "num_stages": 1}
    if choice is not None:
        options = {"num_stages": choice.num_stages, "num_warps": choice.num_warps}
    return function, triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", type=int, nargs="+", default=[90], help="compute capabilities, times ten")
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], help="of K, V and what is computed with them")
    parser.add_argument("--kernels", nargs="+", help="the names of some")
    parser.add_argument("--choices", action="store_true", help="compile all choices of tuned kernels, in bf16")
    parser.add_argument("--rows", type=int, help="with --choices: only tiles of so many rows")
    options = parser.parse_args()
    for arch in options.archs if options.choices else ():
        for kernel, constants, kinds, choice in all_choices():
            if constants.get("ON_CHIP") and arch < LEAST_OF_FP8:
                continue
            if options.kernels and function_of(kernel).__name__ not in options.kernels:
                continue
            if options.rows and constants.get("ROWS") != options.rows:
                continue
            function, made = compiled(kernel, constants, kinds, arch, "bf16", choice)
            told = {"kernel": function.__name__, "arch": arch, "choice": choice.kwargs, "warps": choice.num_warps}
            told |= {"stages": choice.num_stages, "shared": made.metadata.shared}
            told |= {
                name: constants[name]
                for name in ("ROWS", "BITS", "WHOLE", "IN_INT8", "GATED", "ON_CHIP", "GATE", "NEW", "NORMED", "ADDS")
                if name in constants
            }
            print(json.dumps(told | resources(made) | instructions(made)), flush=True)
    for arch in () if options.choices else options.archs:
        for kernel, constants, kinds in all_kernels():
            if (FP8 in kinds.values() or constants.get("ON_CHIP")) and arch < LEAST_OF_FP8:
                continue
            if options.kernels and function_of(kernel).__name__ not in options.kernels:
                continue
            for dtype in options.dtypes if "" in kinds.values() else ("fp32",):
                function, made = compiled(kernel, constants, kinds, arch, dtype)
                told = {"kernel": function.__name__, "arch": arch, "dtype": dtype, "shared": made.metadata.shared}
                if "PDL" in function.arg_names and arch >= LEAST_OF_PDL:
                    told["early"] = accesses_before_the_wait(made)
                print(json.dumps(told | resources(made) | {"bytes": len(made.asm["cubin"])}), flush=True)


if __name__ == "__main__":
    main()
