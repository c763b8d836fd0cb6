"""Build the C++ kernels where there is a compiler; everything else is in pyproject.toml.

They are built for this machine's CPU, since who installs from source usually serves here too. With CPU_KERNELS=all they
are for every CPU of its kind, as a wheel for other machines needs it. With CPU_KERNELS=none they are left out: `make`
builds them while it installs packages.

Without a compiler the package installs too, and computes with torch: `alignedserve doctor` says so.
"""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

BUILD = runpy.run_path(str(Path(__file__).parent / "alignedserve" / "kernels" / "build.py"))


class BuildKernels(build_ext):
    """Build one plain shared library, which is bound to no Python's ABI, in place of an extension module."""

    def build_extension(self, ext: Extension) -> None:
        if (wanted := os.environ.get("CPU_KERNELS", "here")) not in ("here", "all", "none"):
            raise SystemExit(f"CPU_KERNELS is {wanted!r}: set it to here, all or none")
        if wanted == "none":
            return
        library = Path(self.get_ext_fullpath(ext.name))
        library.unlink(missing_ok=True)  # an earlier build in the same folder must not be taken for this one
        try:
            print(BUILD["build"](library, BUILD["Cpus"](wanted)))
        except BUILD["BuildFailed"] as failure:
            print(f"warning: the C++ kernels were not built, torch will be used in their place: {failure}")

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        _, _, system = super().get_tag()
        return "py3", "none", system  # any Python 3, this system


# A release names the repository that it comes from (release.yml); a copy of the sources knows none.
REPOSITORY = os.environ.get("RELEASED_FROM")
URLS = {"Source": "", "Documentation": "/tree/main/docs", "Changes": "/blob/main/CHANGELOG.md", "Issues": "/issues"}

PAGES = "".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("README.md", "CHANGELOG.md"))

setup(
    # An index shows these pages, and has no other file of the repository beside them.
    long_description=re.sub(r"\]\((?!https?:|#)", f"]({REPOSITORY}/blob/main/", PAGES) if REPOSITORY else PAGES,
    long_description_content_type="text/markdown",
    project_urls={name: REPOSITORY + path for name, path in URLS.items()} if REPOSITORY else {},
    ext_modules=[Extension("alignedserve.kernels.libalignedserve_kernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
