"""Write what each hot path takes now; the commit with a number that rises says why."""

from __future__ import annotations

import json

from tests.ratchets import ACCEPTED, accepted
from tests.ratchets.paths import PATHS

if __name__ == "__main__":
    before = accepted() if ACCEPTED.exists() else {}
    counts = {name: round(path(), 1) for name, path in PATHS.items()}
    for name, count in counts.items():
        print(f"{count:10,.1f}  {name}" + (f" (was {before[name]:,.1f})" if before.get(name, count) != count else ""))
    ACCEPTED.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
