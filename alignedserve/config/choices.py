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
