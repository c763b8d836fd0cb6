"""Write what a release is served with as a list of software (SBOM, CycloneDX 1.6), from the locks.

    python tools/sbom.py build/sbom.json

It needs no package and no network. Both images and the wheel are covered: each package names its lock, since torch and
the CUDA libraries differ.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SERVED = ("serve.txt", "image.txt", "image-cuda.txt", "torch-cpu.txt", "torch-cuda.txt")
_ENTRY = re.compile(r"^([\w.-]+)==(\S+)(?: ; (.*?))? \\\n((?: .*\n)*)", re.M)


def bill(folder: Path) -> dict[str, Any]:
    """Return the list of what the locks in the folder have; the same locks give the same list."""
    components = [each for name in SERVED for each in _components(name, (folder / name).read_text(encoding="utf-8"))]
    found = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert found is not None, "pyproject.toml has no version"
    own = {"type": "application", "bom-ref": "alignedserve", "name": "alignedserve", "version": found[1]}
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([own, components]))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{number}",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
    }


def _components(lock: str, text: str) -> list[dict[str, Any]]:
    made = []
    for name, version, marker, files in _ENTRY.findall(text):
        url = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
        properties = [{"name": "alignedserve:lock", "value": lock}]
        properties += [{"name": "alignedserve:where", "value": marker}] if marker else []
        hashes = [{"alg": "SHA-256", "content": digest} for digest in re.findall(r"--hash=sha256:(\w+)", files)]
        about = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
        made.append({**about, "hashes": hashes, "properties": properties})
    return made


def main(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(bill(ROOT / "deploy" / "locks"), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
