"""Every error that AlignedServe raises on purpose, but for those that carry more than a message: ApiError
(gateway/openai/errors.py), Overloaded (owner/client.py) and OverQuota (store/store.py).

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
    """A model folder cannot be served: missing, broken or of an unknown kind."""


class UnsupportedModel(ModelError):
    """The folder is sound, but its architecture or an option of it is not supported."""


class AdapterError(ModelError):
    """An adapter (LoRA) cannot be served: missing, broken, or made for another model."""


class WireError(AlignedServeError):
    """A frame is no message of this version: it is dropped, with a line in the log."""


class PlanError(AlignedServeError):
    """The engine cannot execute a step plan as it is: the planner's fault."""


class ConfigError(AlignedServeError):
    """A flag, a variable, a line of the file or their combination is invalid: the user's fault."""


class ChatError(AlignedServeError):
    """The server that the user chats with is not there, refuses, or gives a wrong answer."""


class ArenaError(AlignedServeError):
    """The pool's memory on this node cannot be used: missing, of another layout or another life."""


class ArenaTooSmall(ArenaError):
    """The node has less shared memory than the pool was given: a flag's or the container's fault."""


class MemoryTooSmall(AlignedServeError):
    """Weights, KV and a step do not fit into the memory: a flag's or the machine's fault."""


class LeaseError(AlignedServeError):
    """Pages or a name belong to another holder or to none: the caller's fault."""


class PromptError(AlignedServeError):
    """The model's chat template refuses these messages: the client's fault."""


class PromptTooLong(AlignedServeError):
    """A conversation surely has more tokens than were asked for: the client's fault."""


class NotCaptured(AlignedServeError):
    """A step of some size cannot be captured, while others can."""


class RankLost(AlignedServeError):
    """The ranks of a worker cannot go on together: it ends, its launcher starts it again."""


class RankGaveUp(AlignedServeError):
    """Another rank has given up what all ranks of a worker do together."""


class DeviceLost(AlignedServeError):
    """A GPU computes nothing any more: its process ends, its launcher starts it again."""


class CastOut(AlignedServeError):
    """The router took this process for dead: it ends, its launcher starts it again."""


class FuzzError(AlignedServeError):
    """A saved run of the fuzzer or the simulator cannot be read or written, or is no such run."""


class ProfileError(AlignedServeError):
    """A cost profile cannot be read or written, or is no such profile."""


class WorkloadError(AlignedServeError):
    """A workload for the simulator is invalid: a key, a value, a line of its file."""


class ProcessLost(AlignedServeError):
    """A process that shared a command's work was killed, perhaps since memory ran out."""


class SimulateError(AlignedServeError):
    """A simulated run cannot be as ordered, or its results cannot be written."""


class TransportError(AlignedServeError):
    """KV cannot go from worker to worker in the configured way: a flag's or the machine's fault."""


class StoreError(AlignedServeError):
    """Files and jobs cannot be read or written: the store or its disk; a later try may succeed."""


class StoreFull(StoreError):
    """No space is left for them."""


class BytesGone(StoreError):
    """A file has its record, but not its bytes: they were removed by other means."""


class StoreTaken(StoreError):
    """A deployment with another model or other keys has the store."""


class StoreUnfit(StoreError):
    """The store is there, but of another kind than its address says, or changed by a later version of AlignedServe."""


class StoreRefused(StoreError):
    """The store refuses the user or password: the user's fault."""


class Conflict(StoreError):
    """The record was changed since it was read: read it again."""


class Fenced(StoreError):
    """Another job runner has the lease: this runner writes no more."""


class BatchError(AlignedServeError):
    """The server that batch jobs go to is not there, refuses, or gives a wrong answer."""


class DeploymentError(AlignedServeError):
    """A deployment that Python code starts cannot start: the reason that `serve` gives."""


class AskError(AlignedServeError):
    """A server that Python code asks refuses, gives up, or is not there."""
