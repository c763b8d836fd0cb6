"""How long a request's output is taken to be: what was predicted, within what the request says of itself.

    what it says itself        max_tokens caps it; min_tokens and a grammar bound it; without a stop token it is exact
    what was predicted         by its client or the router, as it came (Request.estimate)
    the prior                  schedule.expected_output, or all that it may say (predictor: off)

Who has produced as much as was predicted is predicted twice as much (ALISE, Algorithm 1).
"""

from __future__ import annotations

from alignedserve.core import Estimate, Request
from alignedserve.scheduling.policy import Policy, Predictor, Room

SPREAD = 2  # times its mean is the upper estimate of what nobody has looked at: as far as the first doubling


def expected(request: Request, policy: Policy) -> Estimate:
    """Tokens of its whole output, when it has none yet."""
    least, most = bounds(request)
    given = request.estimate or _prior(policy, most)
    return Estimate(max(least, min(given.mean, most)), max(least, min(given.upper, most)))


def bounds(request: Request) -> tuple[int, int]:
    """The least and the most that its output may have."""
    most, sampling = request.max_tokens, request.sampling
    if not request.stop_tokens:
        return most, most
    if sampling.grammar is not None:  # one of these, and a stop token
        most = min(most, 1 + max(map(len, sampling.grammar.outputs)))
    return max(1, min(sampling.min_tokens, most)), most


def hinted(mean: int) -> Estimate:
    """By a client."""
    return Estimate(mean, SPREAD * mean)


def outlived(estimate: int, most: int, num_output: int) -> int:
    """What is predicted of one that has so much output already."""
    while estimate <= num_output:
        estimate *= 2
    return min(estimate, most)


def room_for(request: Request, num_output: int, policy: Policy, most: int) -> int:
    """Tokens of prompt and output that a request with so much output gets the memory for of a device of `most`."""
    if policy.room is Room.WHOLE:
        return max(request.most_tokens, min(policy.reserve, most))
    return len(request.prompt) + num_output


def _prior(policy: Policy, most: int) -> Estimate:
    if policy.predictor is Predictor.OFF:
        return Estimate(most, most)
    return hinted(policy.expected_output)
