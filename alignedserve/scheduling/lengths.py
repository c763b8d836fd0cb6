"""The expected length of a request's output: the prediction, within the bounds that the request sets itself.

    bounds          max_tokens caps the length; min_tokens and a grammar bound it; no stop tokens: exact
    prediction      by the client or the router (Request.estimate)
    prior           Policy.expected_output, or the most that the request may produce (predictor: off)

When a request has produced as much as was predicted, the prediction doubles (ALISE, Algorithm 1).
"""

from __future__ import annotations

from alignedserve.core import Estimate, Request
from alignedserve.scheduling.policy import Policy, Predictor, Room

LEAST_ENDED = 8  # outputs, before the router predicts anything
SPREAD = 2  # upper estimate / mean, without a prediction: up to the first doubling


def expected(request: Request, policy: Policy) -> Estimate:
    """Return the expected length of the whole output, in tokens."""
    return Estimate(*mean_and_upper(request, policy))


def mean_and_upper(request: Request, policy: Policy) -> tuple[int, int]:
    """Return the same as two numbers, which take a third of the time to make."""
    least, most = bounds(request)
    given = request.estimate
    mean, upper = _prior(policy, most) if given is None else (given.mean, given.upper)
    return max(least, min(mean, most)), max(least, min(upper, most))


def planned(request: Request, policy: Policy) -> int:
    """Return the length that the plan of a best-effort request has, without a prediction (dues.py)."""
    least, most = bounds(request)
    return max(least, min(_prior(policy, most)[0], most))


def bounds(request: Request) -> tuple[int, int]:
    """Return the least and the most tokens that the output may have."""
    most, sampling = request.max_tokens, request.sampling
    if not request.stop_tokens:
        return most, most
    if sampling.grammar is not None:  # an output of the grammar, and a stop token
        most = min(most, 1 + max(map(len, sampling.grammar.outputs)))
    return max(1, min(sampling.min_tokens, most)), most


def is_exact(request: Request) -> bool:
    """Return whether the output can have only a single length."""
    least, most = bounds(request)
    return least == most


def hinted(mean: int) -> Estimate:
    """Return the estimate for a length that a client named."""
    return Estimate(mean, SPREAD * mean)


def outlived(estimate: int, most: int, num_output: int) -> int:
    """Return the prediction for a request with `num_output` tokens of output: doubled until it is more than that."""
    while estimate <= num_output:
        estimate *= 2
    return min(estimate, most)


def num_outlived(estimate: int, num_output: int) -> int:
    """Return how often the prediction has doubled for a request with `num_output` tokens of output."""
    return (num_output // max(1, estimate)).bit_length()


def tokens_left(request: Request, policy: Policy, num_output: int) -> int:
    """Return how many more tokens a request with `num_output` tokens is expected to produce."""
    return outlived(expected(request, policy).mean, request.max_tokens, num_output) - num_output


def room_for(request: Request, num_output: int, policy: Policy, most: int) -> int:
    """Return for how many tokens a request gets memory with its seat, on a device of `most` tokens."""
    if policy.room is Room.WHOLE:
        return max(request.most_tokens, min(policy.reserve, most))
    return len(request.prompt) + num_output


def _prior(policy: Policy, most: int) -> tuple[int, int]:
    """Return mean and upper value without a prediction."""
    if policy.predictor is Predictor.OFF:
        return most, most
    return policy.expected_output, SPREAD * policy.expected_output
