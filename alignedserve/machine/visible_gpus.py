"""Print which GPUs torch sees, as a program: it runs in a process of its own, which CUDA and torch may stay in.

    python -m alignedserve.machine.visible_gpus [CUDA]

CUDA is the version of CUDA that torch was built for, such as 13.0. NVIDIA's driver is asked first, since that takes no
seconds: torch sees its GPUs where the driver is for that CUDA or a later one. Otherwise torch is loaded and asked; it
also says what is wrong.
"""

from __future__ import annotations

import ctypes
import json
import sys
import warnings
from collections.abc import Sequence

_NAME_BYTES = 256


def of_driver(cuda: str) -> Sequence[str]:
    """Return the names of the GPUs that NVIDIA's driver has; none where it is missing, or too old for this CUDA."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    number = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(number)):
        return ()
    if number.value // 1000 < int(cuda.partition(".")[0]) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return ()
    names = []
    for device in range(number.value):
        name = ctypes.create_string_buffer(_NAME_BYTES)
        if driver.cuDeviceGet(ctypes.byref(number), device) or driver.cuDeviceGetName(name, _NAME_BYTES, number):
            return ()
        names.append(name.value.decode(errors="replace"))
    return names


def of_torch() -> tuple[Sequence[str], str]:
    """Return the names of the GPUs that torch sees, and what it warns of."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [torch.cuda.get_device_name(number) for number in range(count)]
    return names, " ".join(str(warning.message) for warning in warned)


def main() -> None:
    problem = ""
    names = of_driver(sys.argv[1]) if len(sys.argv) > 1 else ()
    if not names:
        names, problem = of_torch()
    print(json.dumps({"names": list(names), "problem": problem}))


if __name__ == "__main__":
    main()
