"""The values that settings take: choices, names of formats and families, and the adapters of a deployment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar

from alignedserve.errors import ConfigError


class Launcher(str, Enum):
    LOCAL = "local"
    RAY = "ray"


class TransportName(str, Enum):
    AUTO = "auto"  # direct, but through the pool where prefill workers decode too (transport/opening.py)
    DIRECT = "direct"  # the best road of each pair of workers: mapped memory within a node, NCCL or Gloo between nodes
    HOST = "host"
    COLLECTIVE = "collective"
    IPC = "ipc"


class Dtype(str, Enum):
    AUTO = "auto"  # the type that the model folder names
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class DeviceKind(str, Enum):
    AUTO = "auto"  # GPUs that torch sees, else the CPU (sizing/accelerator.py)
    CPU = "cpu"
    CUDA = "cuda"


class LoadFormat(str, Enum):
    AUTO = "auto"  # the model folder's weights, by the format of its files
    DUMMY = "dummy"  # random weights of its config.json: answers are nonsense, times are real


class Graphs(str, Enum):
    """The choice of whether steps are captured as CUDA graphs and replayed."""

    AUTO = "auto"  # where the device and the model allow it
    ON = "on"  # the start is refused where they do not
    OFF = "off"


class LookAhead(str, Enum):
    """The number of steps that are planned while the step before them runs."""

    AUTO = "auto"  # one on a GPU, none on a CPU
    NONE = "0"
    ONE = "1"


class LogLevel(str, Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(str, Enum):
    TEXT = "text"
    JSON = "json"


class MetricsPrefix(str, Enum):
    ALIGNEDSERVE = "alignedserve"
    VLLM = "vllm"


# The formats of calls by vLLM's names. It has two names for some that are read alike.
CALL_FORMATS = {
    **{name: name for name in ("openai", "mistral", "deepseek_v3", "deepseek_v31", "kimi_k2", "glm45", "qwen3_coder")},
    **{name: name for name in ("seed_oss", "cohere_command3", "phi4_mini_json", "granite", "hermes")},
    **{name: name for name in ("llama4_pythonic", "pythonic", "llama3_json")},
    "granite4": "hermes",
    "glm47": "glm45",
    "llama4_json": "llama3_json",
    "qwen3_xml": "qwen3_coder",
}


AUTO, NONE = "auto", "none"  # as the chat template shows; answers are not parted

REASONING_FAMILIES = (
    *("deepseek_r1", "deepseek_v3", "deepseek_v4", "ernie45", "cohere_command3", "cohere_command4", "gemma4", "glm45"),
    *("glm47", "granite", "holo2", "hunyuan_a13b", "hy_v3", "inkling", "kimi", "kimi_k2", "kimi_k3", "mimo"),
    *("minimax_m2", "minimax_m3", "mistral", "nemotron_v3", "olmo3", "openai_gptoss", "poolside_v1", "qwen3"),
    *("seed_oss", "solar_open2", "step3", "step3p5"),
)


@dataclass(frozen=True)
class ModelNames:
    """The names by which requests call the model, written `my-model,claude-*`: the first is its own, and one with a *
    stands for all names like it."""

    FORM: ClassVar = "a name, or several, such as my-model,claude-* (the first without a *)"

    names: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> ModelNames:
        names = tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
        if not names or "*" in names[0]:
            raise ValueError(text)
        return cls(names)

    def __str__(self) -> str:
        return ",".join(self.names)


MOST_NAME = 200  # characters
_NEXT = re.compile(r",(?=[^,=]*=|,|$)")  # a comma before another name, and not within a folder's name


@dataclass(frozen=True)
class LoraFolders:
    """Names of adapters with their folders, written `sql=/path/of/one,chat=/path/of/another`.

    A folder's name may have commas, but not a comma and later an equals sign, which would be another adapter's name.
    """

    FORM: ClassVar = "NAME=FOLDER, such as sql=/models/sql-adapter"

    folders: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> LoraFolders:
        pairs = [pair.partition("=") for pair in _NEXT.split(text)]
        if not all(name.strip() and folder.strip() for name, _, folder in pairs):
            raise ValueError(text)
        return cls.from_pairs((name.strip(), folder.strip()) for name, _, folder in pairs)

    @classmethod
    def from_mapping(cls, folders: Mapping[object, object]) -> LoraFolders:
        """Return them from a section of a file."""
        if not folders or not all(isinstance(folder, str) and folder for folder in folders.values()):
            raise ValueError(folders)
        return cls.from_pairs((str(name), str(folder)) for name, folder in folders.items())

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, str]]) -> LoraFolders:
        made = [(name, str(Path(folder).expanduser().absolute())) for name, folder in pairs]
        names = [name for name, _ in made]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"lora: {twice!r:.80} is given twice: names of adapters must differ")
        if wrong := next((name for name in names if len(name) > MOST_NAME), None):
            raise ConfigError(f"lora: the name {wrong:.40}... is too long: at most {MOST_NAME} characters")
        if wrong := next((folder for _, folder in made if _NEXT.search(folder)), None):
            raise ConfigError(
                f"lora: the folder {wrong!r:.120} has a comma where a name could begin: give it another name"
            )
        return cls(tuple(made))

    def __str__(self) -> str:
        return ",".join(f"{name}={folder}" for name, folder in self.folders)
