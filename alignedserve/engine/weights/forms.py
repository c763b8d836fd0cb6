"""Chooses how the weights of a folder are read."""

from __future__ import annotations

from pathlib import Path

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.gguf.places import PLACES
from alignedserve.architectures.stored_form import StoredForm, StoredMethod
from alignedserve.engine.weights.awq import Awq
from alignedserve.engine.weights.compressed_tensors import CompressedTensors
from alignedserve.engine.weights.float8 import Float8
from alignedserve.engine.weights.gguf_weights import GgufWeights
from alignedserve.engine.weights.gptq import Gptq
from alignedserve.engine.weights.mxfp4 import Mxfp4Tensors
from alignedserve.engine.weights.tensors import PLAIN, Form, Tensors, Weights
from alignedserve.errors import ModelError


def weights_of(folder: Path) -> Weights:
    """Return the weights of a folder, by the format of its files."""
    if (folder / PLACES).is_file():
        return GgufWeights(folder)
    stored = read_config(folder).stored
    is_mxfp4 = stored is not None and stored.method is StoredMethod.MXFP4
    return (Mxfp4Tensors if is_mxfp4 else Tensors)(folder, _form_of(stored))


def _form_of(stored: StoredForm | None) -> Form:
    if stored is None:
        return PLAIN
    match stored.method:
        case StoredMethod.GGUF:
            raise ModelError("the model was made of a GGUF file, but its folder has lost the table of its tensors")
        case StoredMethod.MXFP4:  # beside its experts
            return PLAIN
        case StoredMethod.GPTQ:
            return Gptq(stored.zeros, stored.group)
        case StoredMethod.AWQ:
            return Awq()
        case StoredMethod.COMPRESSED_TENSORS:
            return CompressedTensors(stored.block)
        case StoredMethod.FP8:
            return Float8(stored.block)
