from alignedserve.policies import AdmissionPolicy, LoadAhead, NewRequest
from alignedserve.schedulers.aligned import step_bounds
from alignedserve.schedulers.scheduler import PlannedStep, Scheduler, StepView


class FewDocuments(Scheduler):
    """Chats first; beside chats four documents decode in a step, in turns."""

    num_documents = 4

    def plan(self, view: StepView) -> PlannedStep:
        chats = [request for request in (*view.decodes, *view.prompts) if request.promise.is_rt]
        documents = [request for request in view.decodes if not request.promise.is_rt]
        prompts = [request for request in view.prompts if not request.promise.is_rt]
        chats += view.waiting.real_time
        if chats and documents:
            first = view.ran.number * self.num_documents % len(documents)
            documents = (documents[first:] + documents[:first])[: self.num_documents]
        order = [*chats, *documents, *prompts, *view.waiting.best_effort]
        return self.step_of(view, order, step_bounds(view))


class InTime(AdmissionPolicy):
    """Chats that would come too late are refused at once."""

    def refuse(self, request: NewRequest, load: LoadAhead) -> float | None:
        late_s = load.first_token_s - request.ttft_s
        return late_s if request.is_rt and late_s > 0 else None
