"""Build the C++ kernels where there is a compiler; everything else is in pyproject.toml.

Without a compiler the package installs too, and computes with torch: `alignedserve doctor` says so. `make` builds the
kernels while it installs packages, and sets ALIGNEDSERVE_KERNELS_APART so that they are not built twice.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

BUILD = runpy.run_path(str(Path(__file__).parent / "alignedserve" / "kernels" / "build.py"))


class BuildKernels(build_ext):
    """Build one plain shared library, which is bound to no Python's ABI, in place of an extension module."""

    def build_extension(self, ext: Extension) -> None:
        if os.environ.get("ALIGNEDSERVE_KERNELS_APART"):
            return
        library = Path(self.get_ext_fullpath(ext.name))
        library.unlink(missing_ok=True)  # an earlier build in the same folder must not be taken for this one
        try:
            print(BUILD["build"](library))
        except BUILD["BuildFailed"] as failure:
            print(f"warning: the C++ kernels were not built, torch will be used in their place: {failure}")

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        _, _, system = super().get_tag()
        return "py3", "none", system  # any Python 3, this system


setup(
    ext_modules=[Extension("alignedserve.kernels.libalignedserve_kernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
