"""Workloads that have a name and need no file, written as they would stand in a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMED: Mapping[str, Mapping[str, Any]] = {
    "chat": {"streams": [{"name": "chat"}]},
    "coserve": {
        "first_s": 60.0,
        "streams": [
            {"name": "chat"},
            {
                "name": "documents",  # BROS §6: lots of a batch interface
                "service": "be",
                "prompt": "512-1024",
                "output": "32-128",
                "arrivals": "closed",
                "in_flight": 32,
            },
        ],
    },
    "diurnal": {
        "streams": [
            {"name": "chat", "arrivals": "diurnal", "least": 1.0, "most": 8.0, "period_s": 300.0, "first_s": 600.0}
        ]
    },
    "conversations": {
        "streams": [
            {
                "name": "talk",
                "rate": 1.0,
                "num_requests": 100,
                "prompt": "lognormal:60:80:1024",
                "turns": "1-8",
                "system": 200,
                "think_s": "exp:10:60",
            }
        ]
    },
    "bursts": {
        "streams": [
            {
                "name": "chat",
                "arrivals": "bursts",
                "calm": 2.0,
                "peak": 20.0,
                "every_s": 30.0,
                "lasts_s": 3.0,
                "first_s": 120.0,
            }
        ]
    },
}
