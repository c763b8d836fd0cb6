"""The form in which a folder keeps the weights of its linear layers, if somebody has quantised them already.

`quantization_config` of config.json names it, or a file beside it. What the engine cannot read is refused here, before
any weight is read; how the tensors are read is in engine/weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from alignedserve.architectures.given import Given
from alignedserve.architectures.quantization import Quantization
from alignedserve.errors import ConfigError

_WIDTHS = (4, 8)
_LEAST_GROUP = 8  # inputs; kernels/common/quantised.py takes multiples of it


class StoredMethod(str, Enum):
    COMPRESSED_TENSORS = "compressed-tensors"
    GPTQ = "gptq"
    AWQ = "awq"
    FP8 = "fp8"
    MXFP4 = "mxfp4"
    GGUF = "gguf"


# Files in which older tools say what they did, where config.json does not.
_FILES = {"quantize_config.json": StoredMethod.GPTQ, "quant_config.json": StoredMethod.AWQ}


class ZeroForm(str, Enum):
    """How a folder of GPTQ keeps the zeros of groups."""

    LESS_ONE = "gptq"
    PLAIN = "gptq_v2"


@dataclass(frozen=True, kw_only=True)
class StoredForm:
    method: StoredMethod
    bits: tuple[int, ...]  # of a weight; several where layers differ
    is_float: bool = False  # floats of these bits
    block: tuple[int, int] | None = None  # outputs and inputs of the blocks that share a scale
    group: int | None = None  # inputs that share a scale, where a folder of GPTQ says so
    zeros: ZeroForm = ZeroForm.PLAIN

    @property
    def label(self) -> str:
        """Return the form in words, for logs, plans and profiles."""
        bits = " and ".join(map(str, self.bits))
        each = f"{bits}-bit floats" if self.is_float else f"{bits} bits"
        return f"{self.method.value} of {each}"

    def check(self, asked: Quantization) -> None:
        """Raise ConfigError if weights are to be quantised otherwise than they are."""
        if asked is not Quantization.NONE and (self.is_float or self.bits != (asked.bits,)):
            raise ConfigError(
                f"engine.quantization cannot be {asked.value}: the model is quantised already ({self.label}):"
                " set it to none"
            )


def stored_form(given: Given, *parts: Given) -> StoredForm | None:
    """Return the form that one of these sections names; None where weights are plain numbers."""
    for section in (given, *parts):
        if section.get("quantization_config"):
            return _read(section.section("quantization_config"), None)
    for name, method in _FILES.items():
        if (given.folder / name).is_file():
            return _read(Given(given.folder / name), method.value)
    return None


def _read(quantized: Given, method: str | None) -> StoredForm:
    """Read what a section or file says, which may leave out the method where there is only one for it."""
    match quantized.get("quant_method", method):
        case "compressed-tensors":
            return _read_compressed_tensors(quantized)
        case "gptq":
            return _read_gptq(quantized)
        case "awq":
            return _read_awq(quantized)
        case "fp8":
            return _read_fp8(quantized)
        case "mxfp4":
            return StoredForm(method=StoredMethod.MXFP4, bits=(4,), is_float=True)
        case "gguf":  # of a folder that was made of such a file
            return StoredForm(method=StoredMethod.GGUF, bits=tuple(quantized.get("bits") or ()))
        case other:
            methods = ", ".join(method.value for method in StoredMethod)
            raise quantized.unsupported(f"quantization {other} (read are {methods})")


# --- GPTQ and AWQ


def _read_gptq(quantized: Given) -> StoredForm:
    zeros = quantized.get("checkpoint_format") or quantized.get("format") or ZeroForm.LESS_ONE.value
    if quantized.get("is_marlin_format"):
        zeros = "marlin"
    if zeros not in list(ZeroForm):
        raise quantized.unsupported(f"quantization gptq in the format {zeros}")
    packed = quantized.get("pack_dtype") or "int32"
    if packed != "int32":
        raise quantized.unsupported(f"quantization gptq packed as {packed}")
    bits = _width(quantized, "gptq", "bits")
    group = _group(quantized, "gptq", quantized.get("group_size"))
    return StoredForm(method=StoredMethod.GPTQ, bits=(bits,), group=group, zeros=ZeroForm(zeros))


def _read_awq(quantized: Given) -> StoredForm:
    version = str(quantized.get("version") or "gemm").lower()
    if version != "gemm":
        raise quantized.unsupported(f"quantization awq in the format {version}")
    bits = _width(quantized, "awq", "bits" if quantized.has("bits") else "w_bit")
    if bits != 4:
        raise quantized.unsupported(f"quantization awq of {bits} bits")
    if not quantized.flag("zero_point", True):
        raise quantized.unsupported("quantization awq without zero_point")
    _group(quantized, "awq", quantized.get("group_size", quantized.get("q_group_size")))
    return StoredForm(method=StoredMethod.AWQ, bits=(bits,))


def _width(quantized: Given, method: str, key: str) -> int:
    bits = quantized.whole(key)
    if bits not in _WIDTHS:
        raise quantized.unsupported(f"quantization {method} of {bits} bits")
    return bits


def _group(quantized: Given, method: str, group: object) -> int | None:
    """Return how many inputs a group has; None is one group of all inputs. Raises for what the kernels do not take."""
    if group is None or group == -1:
        return None
    if type(group) is not int or group < 1 or group % _LEAST_GROUP:
        raise quantized.unsupported(f"quantization {method} with groups of {group} inputs")
    return group


# --- 8-bit floats


def _read_fp8(quantized: Given) -> StoredForm:
    kind = str(quantized.get("fmt") or "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise quantized.unsupported(f"quantization fp8 of {kind} numbers")
    return StoredForm(
        method=StoredMethod.FP8, bits=(8,), is_float=True, block=_block(quantized, quantized.get("weight_block_size"))
    )


def _block(quantized: Given, sizes: object) -> tuple[int, int] | None:
    if sizes is None:
        return None
    match sizes:
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
            return outputs, inputs
    raise quantized.wrong("the block of weights that share a scale", "two whole numbers above 0", sizes)


# --- compressed-tensors

_FORMATS = ("int-quantized", "pack-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_STRATEGIES = ("tensor", "channel", "group", "block")


def _read_compressed_tensors(quantized: Given) -> StoredForm:
    _check_format(quantized, quantized.get("format"))
    if quantized.get("kv_cache_scheme"):
        raise quantized.unsupported("quantization compressed-tensors with a kv_cache_scheme")
    if (sparse := quantized.section("sparsity_config").get("format", "dense")) != "dense":
        raise quantized.unsupported(f"quantization compressed-tensors with the sparse format {sparse}")
    if quantized.section("transform_config").get("config_groups"):
        raise quantized.unsupported("quantization compressed-tensors with a transform_config")
    if quantized.get("moe_sparsity_config"):
        raise quantized.unsupported("quantization compressed-tensors with a moe_sparsity_config")
    groups = quantized.section("config_groups")
    forms = [_read_scheme(groups.section(name)) for name in groups.sections()]
    if not forms:
        raise quantized.wrong("config_groups", "an object of schemes", quantized.get("config_groups"))
    blocks = {form.block for form in forms if form.is_float}
    if len(blocks) > 1:
        raise quantized.unsupported("quantization compressed-tensors with floats in blocks of several sizes")
    return StoredForm(
        method=StoredMethod.COMPRESSED_TENSORS,
        bits=tuple(sorted({width for form in forms for width in form.bits})),
        is_float=all(form.is_float for form in forms),
        block=next(iter(blocks), None),
    )


def _check_format(quantized: Given, format: object) -> None:
    if format not in _FORMATS:
        raise quantized.unsupported(f"quantization compressed-tensors in the format {format}")


def _read_scheme(scheme: Given) -> StoredForm:
    """Read what one group of layers has; what it says of activations is not needed: kernels scale them by blocks."""
    if scheme.get("format"):
        _check_format(scheme, scheme.get("format"))
    weights, method = scheme.section("weights"), "compressed-tensors"
    if (strategy := weights.get("strategy")) not in _STRATEGIES:
        raise scheme.unsupported(f"quantization {method} with scales by {strategy}")
    bits, is_float = _width(weights, method, "num_bits"), weights.word("type", "int") == "float"
    if is_float and bits != 8:
        raise scheme.unsupported(f"quantization {method} of {bits}-bit floats")
    if strategy == "block" and not is_float:
        raise scheme.unsupported(f"quantization {method} of whole numbers with scales by block")
    if not is_float:
        _group(scheme, method, weights.get("group_size"))
    return StoredForm(
        method=StoredMethod.COMPRESSED_TENSORS,
        bits=(bits,),
        is_float=is_float,
        block=_block(scheme, weights.get("block_structure")) if strategy == "block" else None,
    )
