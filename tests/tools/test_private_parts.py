"""Private parts of libraries that we use: each is there, as we use it, in the version that is locked.

A library may change these in any release, so pyproject.toml bounds it to the minor version that is tested here.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
# What is imported, or reached through a dot, of modules that are nobody's interface.
PRIVATE = {
    "uvicorn.protocols.http.httptools_impl": {"STATUS_LINE", "HttpToolsProtocol", "RequestResponseCycle"},
    "torch._C._distributed_c10d": {"Store", "PrefixStore"},
    "torch": {"_scaled_mm"},
    "ray._private": {"state.available_resources_per_node"},
}
# Of uvicorn's protocol: what ours overrides or calls, with the parameters beside self; and what it reads.
OVERRIDDEN = {
    "connection_made": ["transport"],
    "connection_lost": ["exc"],
    "data_received": ["data"],
    "on_message_begin": [],
    "on_url": ["url"],
    "on_header": ["name", "value"],
    "on_headers_complete": [],
    "on_body": ["body"],
    "on_response_complete": [],
    "_start_asgi_task": ["cycle", "app"],
    "send_400_response": ["msg"],
    "timeout_keep_alive_handler": [],
}
READ = {"transport", "connections", "headers", "parser", "pipeline", "cycle", "loop"}
READ_OF_A_CYCLE = {"response_complete", "response_started", "more_body", "disconnected", "message_event"}


def moved(library: str, what: str) -> str:
    return f"{library} {version(library)} moved {what}: adapt what uses it, then the bound in pyproject.toml"


def used() -> Iterator[tuple[str, str]]:
    """Yield each private module of these libraries, and what our code uses of it."""
    folders = ("alignedserve", "decode_worker", "prefill_worker", "kvpool", "router", "kernels", "lab", "papers")
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield from (("torch", name) for name in re.findall(r"\btorch\.(_[a-z]\w+)\(", text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("uvicorn.", "torch._C", "ray._")):
                yield from ((str(node.module), name.name) for name in node.names)
        yield from (("ray._private", name) for name in re.findall(r"_ray\._private\.([\w.]+)\(", text))


def test_no_other_private_part_is_used() -> None:
    found: dict[str, set[str]] = {}
    for module, name in used():
        found.setdefault(module, set()).add(name)
    assert found == PRIVATE


def test_uvicorns_protocol_is_what_ours_extends() -> None:
    from uvicorn.protocols.http import httptools_impl

    for name, parameters in OVERRIDDEN.items():
        method = getattr(httptools_impl.HttpToolsProtocol, name, None)
        assert method is not None, moved("uvicorn", f"HttpToolsProtocol.{name}")
        assert [*inspect.signature(method).parameters][1:] == parameters, moved("uvicorn", f"HttpToolsProtocol.{name}")
    for kind, names in (
        (httptools_impl.HttpToolsProtocol, READ),
        (httptools_impl.RequestResponseCycle, READ_OF_A_CYCLE),
    ):
        source = inspect.getsource(kind.__init__)
        for name in names:
            assert re.search(rf"self\.{name}\b.*=", source), moved("uvicorn", f"{kind.__name__}.{name}")
    assert httptools_impl.STATUS_LINE[200].startswith(b"HTTP/1.1 200"), moved("uvicorn", "STATUS_LINE")


def test_ray_says_what_is_free_on_each_node() -> None:
    import ray._private.state

    method = getattr(ray._private.state, "available_resources_per_node", None)
    assert method is not None, moved("ray", "_private.state.available_resources_per_node")
    assert [*inspect.signature(method).parameters] == [], moved("ray", "_private.state.available_resources_per_node")


def test_torchs_product_of_fp8_takes_what_ours_gives_it() -> None:
    said = str(torch.ops.aten._scaled_mm.default._schema)
    for parameter in ("scale_a", "scale_b", "out_dtype"):
        assert f" {parameter}" in said, moved("torch", f"_scaled_mm's parameter {parameter}")


def test_torchs_stores_take_what_ranks_give_them() -> None:
    from torch._C import _distributed_c10d

    for name in PRIVATE["torch._C._distributed_c10d"]:
        assert hasattr(_distributed_c10d, name), moved("torch", f"c10d.{name}")
    said = _distributed_c10d.PrefixStore.__init__.__doc__ or ""
    for parameter in ("prefix", "store"):
        assert f" {parameter}:" in said, moved("torch", f"PrefixStore's parameter {parameter}")
    if torch.distributed.is_nccl_available():
        options = torch.distributed.ProcessGroupNCCL.Options()
        assert hasattr(options, "_timeout"), moved("torch", "NCCL's option _timeout")


def test_each_of_these_libraries_is_bounded_to_the_minor_version_that_is_locked() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for library in ("uvicorn", "ray", "torch"):
        major, minor, *_ = version(library).split(".")
        bound = rf'"{library}>=[\d.]+,<{major}\.{int(minor) + 1}"'
        assert re.search(bound, project), f"{library} {version(library)} is tested: no other minor version may come"
