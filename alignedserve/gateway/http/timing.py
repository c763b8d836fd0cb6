"""The times of an answer, for its client: in the header Server-Timing, which browsers show, and in the usage of a
stream, under Groq's names."""

from __future__ import annotations

from dataclasses import dataclass

HEADER = "server-timing"


@dataclass(frozen=True, slots=True)
class Timing:
    queue_s: float  # until the prompt of its first choice began to run
    prompt_s: float  # from then until the first token of any choice
    output_s: float  # from then until now
    is_over: bool

    @property
    def headers(self) -> dict[str, str]:
        """Return the header, in milliseconds. A stream's headers are sent with its first token."""
        first_s = self.queue_s + self.prompt_s
        times = {"queue": self.queue_s, "prefill": self.prompt_s, "first_token": first_s}
        if self.is_over:
            times |= {"decode": self.output_s, "total": first_s + self.output_s}
        return {HEADER: ", ".join(f"{name};dur={1e3 * seconds:.1f}" for name, seconds in times.items())}

    @property
    def usage(self) -> dict[str, float]:
        """Return the fields of a usage, in seconds."""
        times = {"queue_time": self.queue_s, "prompt_time": self.prompt_s, "completion_time": self.output_s}
        return {name: round(seconds, 6) for name, seconds in (*times.items(), ("total_time", sum(times.values())))}
