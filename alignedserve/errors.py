"""Every error that AlignedServe raises on purpose.

    AlignedServeError
    ├── ConfigError           a flag, a variable, a line of the file or their combination is invalid: the user's fault
    ├── ChatError             the server that the user chats with is not there, refuses, or gives a wrong answer
    ├── ModelError            a model folder cannot be served: missing, broken or of an unknown kind
    │   ├── UnsupportedModel  the folder is sound, but its architecture or an option of it is not supported
    │   └── AdapterError      an adapter (LoRA) cannot be served: missing, broken, or made for another model
    ├── ArenaError            the pool's memory on this node cannot be used: missing, of another layout or another life
    │   └── ArenaTooSmall     the node has less shared memory than the pool was given: a flag's or the container's fault
    ├── MemoryTooSmall        weights, KV and a step do not fit into the memory: a flag's or the machine's fault
    ├── LeaseError            pages or a name belong to another holder or to none: the caller's fault
    ├── PromptError           the model's chat template refuses these messages: the client's fault
    ├── PromptTooLong         a conversation surely has more tokens than were asked for: the client's fault
    ├── ApiError              an answer of the gateway that is an error (gateway/openai/errors.py)
    ├── Overloaded            a request was not accepted, a later try may be (owner/client.py)
    ├── WireError             a frame is no message of this version: it is dropped, with a line in the log
    ├── CastOut               the router took this process for dead: it ends, its launcher starts it again
    ├── RankLost              the ranks of a worker cannot go on together: it ends, its launcher starts it again
    ├── DeviceLost            a GPU computes nothing any more: its process ends, its launcher starts it again
    ├── WorkloadError         a workload for the simulator is invalid: a key, a value, a line of its file
    ├── NotFinite             int8 cannot hold some numbers, NaN or infinite: their page is not compressed
    ├── FuzzError             a saved run of the fuzzer or the simulator cannot be read or written, or is no such run
    ├── ProfileError          a cost profile cannot be read or written, or is no such profile
    ├── TransportError        KV cannot go from worker to worker in the configured way: a flag's or the machine's fault
    ├── StoreError            files and jobs cannot be read or written: the store or its disk; a later try may succeed
    │   ├── StoreFull         no space is left for them
    │   ├── StoreUnfit        a later version of AlignedServe has changed the store, or its address is of another kind
    │   ├── StoreRefused      the store refuses the user or password: the user's fault
    │   ├── BytesGone         a file has its record, but not its bytes: they were removed by other means
    │   ├── Conflict          the record was changed since it was read: read it again
    │   └── Fenced            another job runner has the lease: this runner writes no more
    ├── OverQuota             a key would have more files, bytes or open batches than it may (store/store.py)
    ├── BatchError            the server that batch jobs go to is not there, refuses, or gives a wrong answer
    ├── DeploymentError       a deployment that Python code starts cannot start: the reason that `serve` gives
    ├── AskError              a server that Python code asks refuses, gives up, or is not there
    ├── BenchError            the server that is measured is not there, refuses, or a run cannot be read or written
    ├── ProcessLost           a process that shared a command's work was killed, perhaps since memory ran out
    ├── SimulateError         a simulated run cannot be as ordered, or its results cannot be written
    └── PlanError             the engine cannot execute a step plan as it is: the planner's fault

A message is one line, names what is wrong and says what to do; it reaches the user as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class AlignedServeError(Exception):
    """An error whose text is meant for the user: one line, without a traceback."""


@contextmanager
def file_errors(kind: type[AlignedServeError], file: object, verb: str = "written") -> Iterator[None]:
    """Raise an OSError of the block as an error of this kind: `runs.json cannot be written: Permission denied`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{file} cannot be {verb}: {error.strerror}") from error


class ModelError(AlignedServeError):
    pass


class UnsupportedModel(ModelError):
    pass


class AdapterError(ModelError):
    pass


class WireError(AlignedServeError):
    pass


class PlanError(AlignedServeError):
    pass


class ConfigError(AlignedServeError):
    pass


class ChatError(AlignedServeError):
    pass


class ArenaError(AlignedServeError):
    pass


class ArenaTooSmall(ArenaError):
    pass


class MemoryTooSmall(AlignedServeError):
    pass


class LeaseError(AlignedServeError):
    pass


class PromptError(AlignedServeError):
    pass


class PromptTooLong(AlignedServeError):
    pass


class RankLost(AlignedServeError):
    pass


class RankGaveUp(AlignedServeError):
    pass


class DeviceLost(AlignedServeError):
    pass


class CastOut(AlignedServeError):
    pass


class NotFinite(AlignedServeError):
    pass


class FuzzError(AlignedServeError):
    pass


class ProfileError(AlignedServeError):
    pass


class WorkloadError(AlignedServeError):
    pass


class ProcessLost(AlignedServeError):
    pass


class SimulateError(AlignedServeError):
    pass


class TransportError(AlignedServeError):
    pass


class StoreError(AlignedServeError):
    pass


class StoreFull(StoreError):
    pass


class BytesGone(StoreError):
    pass


class StoreTaken(StoreError):
    """A deployment with another model or other keys has the store."""


class StoreUnfit(StoreError):
    """The store is there, and this deployment cannot use it as it is named."""


class StoreRefused(StoreError):
    """The store refuses our user or password."""


class Conflict(StoreError):
    pass


class Fenced(StoreError):
    pass


class BatchError(AlignedServeError):
    pass


class DeploymentError(AlignedServeError):
    pass


class AskError(AlignedServeError):
    pass


class BenchError(AlignedServeError):
    pass
