"""Keep the working directory off the path on which Python finds modules.

`python -m` and `python -c` put the folder in which they are typed first. So a `statistics.py` that lies there would be
imported in place of Python's own, by the launcher and by every part: by accident, or because it is somebody's trap.

This file is also the script that runs a module in a child process: Python puts a script's own folder on the path, and
never the working directory. Until that is gone it may import only what Python has loaded by itself.
"""

import os
import sys

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
ABOVE = os.path.dirname(_PACKAGE)  # the folder in which the package lies


def leave_out_working_directory() -> None:
    """Take the working directory off the path of this process, and of all that it starts (from Python 3.11 on)."""
    if sys.path and sys.path[0] in ("", os.getcwd()) and not _is_safe():
        del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a child process that runs a module like `python -m`, without the working directory."""
    return [sys.executable, os.path.abspath(__file__), module, *arguments]


def code_command(code: str) -> list[str]:
    """Return the command of a child process that runs code like `python -c`, without the working directory."""
    return [sys.executable, "-c", f"import sys\nsys.path[:] = [*filter(None, sys.path), {ABOVE!r}]\n{code}"]


def pip_command() -> str:
    """Return the command of this Python's own pip, for a person to type."""
    return f"{sys.executable} -m pip"


def _is_safe() -> bool:
    """Return whether Python itself has left the first entry out of the path."""
    return bool(getattr(sys.flags, "safe_path", False))


def _run_module() -> None:
    if not _is_safe():
        del sys.path[0]
    sys.path.insert(0, ABOVE)  # only for this import: a child runs the package of its parent
    import alignedserve  # noqa: F401

    del sys.path[0]
    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_module()
