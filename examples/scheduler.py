"""A scheduler of yours beside the default, on the same arrivals. Offered by a package, `serve` plans with it too:

[project.entry-points."alignedserve.schedulers"]
few_documents = "my_package.scheduler:FewDocuments"

alignedserve serve --set schedule.scheduler=few_documents
"""

from alignedserve import System, compare
from alignedserve.schedulers.aligned import step_bounds
from alignedserve.worker.scheduler import PlannedStep, Scheduler, StepView


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


if __name__ == "__main__":
    mine = System("few documents", settings={"schedule.scheduler": "__main__:FewDocuments"})
    print(compare(["aligned", mine], "coserve,chat.rate=6,documents.in_flight=8,first_s=5", seeds=[0, 1], jobs=1))
