"""OpenAI's published schema of what we implement: components of its OpenAPI document, without their descriptions.

`openai_schema.json` beside this file is an excerpt of openapi.json of github.com/openai/openai-openapi, under the MIT
license that it contains. To make it again from a clone of that repository:

    python -m tests.gateway.published CLONE
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

EXCERPT = Path(__file__).with_name("openai_schema.json")
SOURCE = "https://github.com/openai/openai-openapi"
ANSWERS = (
    *("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse", "CreateCompletionResponse"),
    *("ListModelsResponse", "Model", "ErrorResponse"),
    *("OpenAIFile", "ListFilesResponse", "DeleteFileResponse", "Batch", "ListBatchesResponse"),
)
_SAYS_NOTHING = {"description", "example", "examples", "title", "x-oaiMeta", "x-stainless-const"}


@cache
def validator(name: str) -> Any:
    """Return the validator of bodies that should match this component."""
    components = json.loads(EXCERPT.read_text(encoding="utf-8"), object_hook=_with_null)["components"]
    schema = {"$ref": f"#/components/schemas/{name}", "components": components}
    return jsonschema.Draft202012Validator(schema)


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Translate the published `nullable` into a type of JSON Schema.
    The document says by its version that it is JSON Schema, which writes null as one more type."""
    return {"anyOf": [schema, {"type": "null"}]} if schema.pop("nullable", False) is True else schema


def excerpt(clone: Path) -> dict[str, Any]:
    published = json.loads((clone / "openapi.json").read_text(encoding="utf-8"))
    commit = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    schemas = published["components"]["schemas"]
    wanted = {name: _bare(schemas[name]) for name in sorted(_reached(schemas))}
    return {
        "source": f"openapi.json of {SOURCE} at {commit.stdout.strip()}",
        "license": (clone / "LICENSE").read_text(encoding="utf-8").splitlines(),
        "openapi": published["openapi"],
        "info": {"version": published["info"]["version"]},
        "components": {"schemas": wanted},
    }


def _reached(schemas: dict[str, Any]) -> set[str]:
    """Return the names of the schemas that our answers use, directly or through other schemas."""
    found: set[str] = set()
    waiting = [*ANSWERS]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [ref.rpartition("/")[2] for ref in _references(schemas[name])]
    return found


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        schema = [*schema.values()]
    for inner in schema if isinstance(schema, list) else ():
        yield from _references(inner)


def _bare(schema: Any, is_names: bool = False) -> Any:
    """Return the schema without descriptions. `is_names`: its keys are names of properties, and so all of them stay."""
    if isinstance(schema, list):
        return [_bare(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: part for name, part in schema.items() if is_names or name not in _SAYS_NOTHING}
    return {name: _bare(part, is_names=name == "properties" and not is_names) for name, part in kept.items()}


if __name__ == "__main__":
    EXCERPT.write_text(json.dumps(excerpt(Path(sys.argv[1])), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
