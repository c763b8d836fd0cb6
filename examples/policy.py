from collections.abc import Sequence

from alignedserve.policies import AdmissionPolicy, LoadAhead, NewRequest, PackingPolicy, SeatedRequest


class FewDocuments(PackingPolicy):
    """Beside chats only some documents decode in a step, in turns."""

    most = 4

    def __init__(self) -> None:
        self.turn = 0

    def run(self, requests: Sequence[SeatedRequest]) -> Sequence[str]:
        chats = [request.id for request in requests if request.is_rt]
        documents = [request.id for request in requests if not request.is_rt]
        if not chats or len(documents) <= self.most:
            return [*chats, *documents]
        self.turn += 1
        first = self.turn * self.most % len(documents)
        return [*chats, *(documents[first:] + documents[:first])[: self.most]]


class InTime(AdmissionPolicy):
    """Chats that would come too late are refused at once."""

    def refuse(self, request: NewRequest, load: LoadAhead) -> float | None:
        late_s = load.first_token_s - request.ttft_s
        return late_s if request.is_rt and late_s > 0 else None
