"""Write `examples/`: chats and documents from the demo model's own generator, with a separate seed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from demo_corpus import Draw, Split, sample
from demo_corpus.document_tasks import drawn_document, extraction, pasted
from demo_corpus.documents import Document

ROOT = Path(__file__).resolve().parent.parent
SEED = "examples"
DOCUMENTS = 200
MODEL = "demo"  # the name that `make serve` gives the model
CHAT_KINDS = (
    "smalltalk",
    "count_up",
    "count_steps",
    "spell",
    "sum",
    "list",
    "story",
    "unknown",
    "extract_json",
    "summary_one",
    "multi_turn",
    "multi_turn",
)


def documents() -> list[tuple[str, Draw, Document]]:
    """Return each document with its id, and the draw that its questions continue."""
    draws = ((f"doc-{number:03}", Draw(f"{SEED}/{number}", Split.HELD_OUT)) for number in range(1, DOCUMENTS + 1))
    return [(name, draw, drawn_document(draw)) for name, draw in draws]


def document_lines() -> Iterator[dict[str, Any]]:
    for name, _, document in documents():
        yield {"id": name, "type": document.type, "text": document.text, "facts": document.facts}


def batch_lines() -> Iterator[dict[str, Any]]:
    """Yield an OpenAI batch input file over the same documents: extract fields of each document as JSON."""
    for name, draw, document in documents():
        instruction, _ = extraction(draw, document, as_json=True)
        messages = [{"role": "user", "content": pasted(instruction, document)}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 256, "temperature": 0}
        yield {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def chat_lines() -> Iterator[dict[str, Any]]:
    """Yield bodies for `/v1/chat/completions`, one for each kind of request."""
    for number, kind in enumerate(CHAT_KINDS):
        asked = sample(Draw(f"{SEED}/chat/{number}", Split.HELD_OUT), kind)
        yield {"model": MODEL, "messages": asked.messages, "temperature": 0}


FILES = {
    "chats.jsonl": chat_lines,
    "documents.jsonl": document_lines,
    "extraction_batch.jsonl": batch_lines,
}


def as_jsonl(lines: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "examples", help="folder to write")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in FILES.items():
        (out / name).write_text(as_jsonl(lines()), encoding="utf-8")
        print(f"wrote {out / name}")


if __name__ == "__main__":
    main()
