"""The metadata of a file's architecture, each key checked when it is read."""

from __future__ import annotations

from alignedserve.architectures.gguf.file import GgufFile
from alignedserve.architectures.given import Given
from alignedserve.errors import ModelError, UnsupportedModel


class Facts(Given):
    """The metadata of a file's architecture, by keys without its name."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.tensors = file, file.tensors
        self.architecture = file.metadata.get("general.architecture")
        if not isinstance(self.architecture, str):
            raise ModelError(f"{file.path}: general.architecture is missing")
        begin = f"{self.architecture}."
        own = {key.removeprefix(begin): of for key, of in file.metadata.items() if key.startswith(begin)}
        super().__init__(file.path, own)

    def unsupported(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.file.path}: {what} is not supported")
