"""The values that settings with a choice take."""

from __future__ import annotations

from enum import Enum


class Launcher(str, Enum):
    LOCAL = "local"
    RAY = "ray"


class TransportName(str, Enum):
    AUTO = "auto"  # the best transport that the machines have (transport/opening.py)
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
    """The choice of whether decode steps are captured as CUDA graphs and replayed."""

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
