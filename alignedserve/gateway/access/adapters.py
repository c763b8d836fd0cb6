"""The adapters (LoRA) that clients may choose as their model, which all gateways and the job runner share in a file.

The file lies in shared memory, so a process that starts again knows what was loaded, and a new deployment begins with
what its settings say:

    count of changes 8 | length 8 | JSON: name -> [folder, id, bytes]

A reader looks at the count alone, unless it has changed.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TypeAlias

from alignedserve.architectures.config import DTYPE_BYTES, ModelConfig
from alignedserve.architectures.families.lora import CONFIG, WEIGHTS, LoraFiles, read_lora
from alignedserve.config.choices import MOST_NAME
from alignedserve.core import Adapter
from alignedserve.errors import AdapterError
from alignedserve.gateway.access.ledger import LOCK_S, open_shared
from alignedserve.locks import LockHeld, take
from alignedserve.shell.part import Part
from alignedserve.sizing.adapters import adapter_room, adapter_roots, first_adapters

_MIB = 1 << 20
_SIZE = 1 << 20  # of the file
_CHANGE_S = 60.0  # for another part's change to end
_HEAD = struct.Struct("=QQ")
_Loaded: TypeAlias = tuple[Adapter, int]  # with the bytes that it takes on each worker


class Adapters:
    """A process's view of the adapters: in a file that it shares, or without `path` in its own memory."""

    def __init__(
        self,
        path: Path | None = None,
        model: ModelConfig | None = None,
        dtype: str = "float32",
        room: int = 0,
        roots: Sequence[Path] = (),
    ) -> None:
        """`room` is the bytes that each worker has for all adapters of this model, in this dtype. Clients load those
        alone that lie below one of the `roots`."""
        self._roots = roots
        self._model, self._of_number, self._room = model, DTYPE_BYTES[dtype], room
        self._path = path or Path()
        self._fd = -1 if path is None else open_shared(path, _SIZE)
        self._memory, self._alone = mmap.mmap(self._fd, _SIZE), Lock()
        self._seen, self._known = -1, dict[str, _Loaded]()

    @classmethod
    def for_part(cls, part: Part) -> Adapters:
        """Return the adapters of a part's deployment; the first part writes those of the settings."""
        config, (model, room) = part.config, part.capacity()
        path = part.shared_memory / f"{part.spec.deployment}-adapters"
        made = cls(path, model, room.dtype, adapter_room(config, model, room.dtype), adapter_roots(config))
        made.begin(first_adapters(config, model))
        return made

    def begin(self, adapters: list[tuple[str, LoraFiles]]) -> None:
        """Take these adapters, unless a process of the deployment has done so."""
        with self._locked():
            if self._num_changes() == 0:
                self._write({name: self._loaded(name, files) for name, files in adapters})

    @property
    def loaded(self) -> Mapping[str, _Loaded]:
        """Return the adapters by name, with the bytes of each."""
        if self._num_changes() != self._seen:
            with suppress(AdapterError), self._locked(LOCK_S):  # the event loop waits: the next request looks again
                self._read()
        return self._known

    def find(self, name: str | None) -> Adapter | None:
        found = None if name is None else self.loaded.get(name)
        return None if found is None else found[0]

    def load(self, name: str, folder: str, models: tuple[str, ...]) -> None:
        """Load an adapter under a name that no adapter and none of the `models` has; this takes as long as reading it.

        Raise AdapterError, in a line, where that cannot be."""
        if not name.strip() or len(name) > MOST_NAME:
            raise AdapterError(f"lora_name must be a text of 1 to {MOST_NAME} characters")
        if not Path(folder).is_absolute() or "\0" in folder:
            raise AdapterError(f"lora_path {folder!r:.160} must be an absolute path, of a folder that every node sees")
        if self._model is None or not self._room:
            raise AdapterError(
                "this deployment has no memory for adapters: start it with --lora, or with --set engine.adapters_mb=N"
            )
        self._check_below(Path(folder))
        self._check_new(name, models)
        loaded = self._loaded(name, read_lora(Path(folder), self._model))
        with self._locked():
            self._read()
            self._check_new(name, models)
            taken, num_bytes = sum(size for _, size in self._known.values()), loaded[1]
            if taken + num_bytes > self._room:
                raise AdapterError(
                    f"each worker keeps {self._room // _MIB} MB for adapters, {-(-taken // _MIB)} are taken and this"
                    f" one needs {-(-num_bytes // _MIB)}: unload another, or start with a larger"
                    " engine.adapters_mb"
                )
            self._write({**self._known, name: loaded})

    def unload(self, name: str) -> bool:
        """Forget an adapter, and return whether there was one; open requests with this adapter go on to the end."""
        with self._locked():
            self._read()
            if name in self._known:
                self._write({other: loaded for other, loaded in self._known.items() if other != name})
                return True
            return False

    def _check_below(self, folder: Path) -> None:
        """Raise where the folder or one of its files lies elsewhere than below a root, wherever links lead. What is
        said is the same whether or not something is there."""
        if not self._roots:
            raise AdapterError("clients load no adapters here: start it with --set engine.adapters_root=FOLDER")
        roots = [root.resolve() for root in self._roots]
        for file in (folder, folder / CONFIG, folder / WEIGHTS):
            if not any(file.resolve().is_relative_to(root) for root in roots):
                raise AdapterError(
                    f"lora_path {str(folder)!r:.160} does not lie below {' or '.join(map(str, self._roots))}"
                    " (engine.adapters_root), or links lead elsewhere"
                )

    def _check_new(self, name: str, models: tuple[str, ...]) -> None:
        if name in models:
            raise AdapterError(f"the model itself is called {name!r:.80}: give the adapter another name")
        if name in self._known:
            raise AdapterError(f"an adapter {name!r:.80} is loaded already: unload it first, or take another name")

    def _loaded(self, name: str, files: LoraFiles) -> _Loaded:
        return Adapter(name, str(files.folder), files.id), files.num_bytes(self._of_number)

    @contextmanager
    def _locked(self, within_s: float = _CHANGE_S) -> Iterator[None]:
        with self._alone:  # the kernel's lock keeps out other processes, not other threads
            if self._fd >= 0:
                try:
                    take(self._fd, self._path, within_s, lock=fcntl.lockf)
                except LockHeld as error:
                    raise AdapterError(str(error)) from None
            try:
                yield
            finally:
                if self._fd >= 0:
                    fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _num_changes(self) -> int:
        return int(_HEAD.unpack_from(self._memory)[0])

    def _read(self) -> None:
        changes, length = _HEAD.unpack_from(self._memory)
        tree = json.loads(self._memory[_HEAD.size : _HEAD.size + length]) if length else {}
        self._known = {name: (Adapter(name, folder, id), size) for name, (folder, id, size) in tree.items()}
        self._seen = changes

    def _write(self, adapters: Mapping[str, _Loaded]) -> None:
        tree = {name: (adapter.folder, adapter.id, size) for name, (adapter, size) in adapters.items()}
        written = json.dumps(tree).encode()
        if _HEAD.size + len(written) > _SIZE:
            raise AdapterError("too many adapters are loaded: unload some first")
        self._memory[_HEAD.size : _HEAD.size + len(written)] = written
        _HEAD.pack_into(self._memory, 0, self._num_changes() + 1, len(written))
        self._read()
