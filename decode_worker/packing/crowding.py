"""Documents use less of the time that chats leave them where chats fill the memory of the device.

Documents make steps longer, so chats stay longer. While memory is plenty that harms nobody. Where chats come so fast
that they fill the memory, the next ones are refused, although all would be served without documents. So from some share
of the memory on a step with documents takes only so many times as long as the chats' decodes alone, and less with every
chat: the share settles where chats stay as short as they must. A little is always left to documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from alignedserve.worker.step.limits import Moment, estimate_of
from alignedserve.worker.step.running import Running

# Between these shares of the memory, the most time of a step falls from `LONGEST` to `LEAST` times that of the chats.
SOME, MUCH = 0.4, 0.7
LONGEST, LEAST = 3.0, 1.2


def crowded_s(seated: Sequence[Running], num_pairs: int, at: Moment) -> float:
    """Return the most time of a step with documents, by the share of the device's pairs that chats hold."""
    chats = [running for running in seated if running.promise.is_rt]
    if len(chats) == len(seated):
        return inf
    share = sum([len(running.pairs) for running in chats]) / num_pairs
    if share <= SOME:
        return inf
    times = max(LEAST, 1 + (LONGEST - 1) * (MUCH - share) / (MUCH - SOME))
    return times * estimate_of((running for running in chats if running.output), at).seconds
