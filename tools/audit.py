"""Ask the package index whether a package of the locks has a known vulnerability, by pip-audit, which is locked too.

    make audit

It ends with 1 where one has, and with 2 where it could not be asked: what was not looked up counts as neither.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

LOCKS = Path(__file__).resolve().parents[1] / "deploy" / "locks"
# Strict: a package that the index says nothing of is an error. Else an index that knows none would pass all of them.
ASKED = ("--strict", "--disable-pip", "--require-hashes", "--progress-spinner", "off", "--requirement")


def audit(pip_audit: str, lock: Path) -> tuple[bool | None, str]:
    """Return whether the lock is free of known vulnerabilities, or None if that is unknown, with what was said."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as asked:
        # The index knows torch by its version alone, not by its build.
        asked.write(lock.read_text(encoding="utf-8").replace("+cpu ", " "))
        asked.flush()
        done = subprocess.run([pip_audit, *ASKED, asked.name], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return True, ""
    if "known vulnerabilit" in done.stderr:
        return False, done.stdout.strip()
    said = done.stderr.strip().splitlines() or ["pip-audit said nothing"]
    return None, said[-1]


def main(pip_audit: str) -> int:
    code = 0
    for lock in sorted(LOCKS.glob("*.txt")):
        is_free, said = audit(pip_audit, lock)
        if is_free is None:
            print(f"no audit of {lock.name}, is the package index reached? {said}", file=sys.stderr)
            return 2
        print(f"{lock.name}: {'no known vulnerability' if is_free else said}", flush=True)
        code = code or int(not is_free)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
