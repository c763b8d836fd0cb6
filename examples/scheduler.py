"""Your own order of requests beside the default's, on the same arrivals; `serve --policy FILE` serves with it."""

from alignedserve import System, compare
from alignedserve.policies import OrderPolicy, RequestInLine


class ShortestFirst(OrderPolicy):
    """A token that is left weighs as much as 10 ms of waiting."""

    def key(self, request: RequestInLine) -> float:
        return request.arrival_at + 0.01 * request.tokens_left


if __name__ == "__main__":
    mine = System("shortest first", policy=ShortestFirst)
    print(compare(["aligned", mine], "coserve,chat.rate=6,documents.in_flight=8,first_s=5", seeds=[0, 1]))
