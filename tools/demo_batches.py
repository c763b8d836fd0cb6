"""Build the tensors of a training batch from conversations: inputs, and the tokens that the model learns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from demo_corpus import Sample
from demo_tokenizer import BEGIN, END, PAD, ROLES

ROW_LENGTHS = (256, 384, 512, 768, 1024, 1536, 2048)
ROWS_MULTIPLE = 2
ANSWERS_MULTIPLE = 512


@dataclass(frozen=True)
class Encoded:
    kind: str
    tokens: list[int]
    answers: list[range]  # positions in `tokens` of each answer of the assistant, with its end token


@dataclass(frozen=True)
class Batch:
    """Rows of one length. A row holds whole conversations, which do not attend to each other."""

    inputs: torch.Tensor  # [rows, length]
    mask: torch.Tensor  # [rows, 1, length, length] 0 where a position may attend, else minus infinity
    sources: torch.Tensor  # [answer tokens] positions in the flattened inputs that predict the answers
    targets: torch.Tensor  # [answer tokens]
    weights: torch.Tensor  # [answer tokens] an answer of n tokens weighs sqrt(n) together; fill tokens weigh 0
    owners: torch.Tensor  # [answer tokens] the conversation of each token
    kinds: list[str]  # of each conversation


class Encoder:
    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._begin, self._end, self.pad = tokenizer.convert_tokens_to_ids([BEGIN, END, PAD])
        self._roles = {role: tokenizer.convert_tokens_to_ids(token) for role, token in ROLES.items()}

    def __call__(self, samples: Sequence[Sample]) -> list[Encoded]:
        turns = [[*sample.messages, {"role": "assistant", "content": sample.answer}] for sample in samples]
        texts = [message["content"] for messages in turns for message in messages]
        ids = iter(self._tokenizer(texts, add_special_tokens=False)["input_ids"])
        return [self._joined(sample.kind, messages, ids) for sample, messages in zip(samples, turns, strict=True)]

    def _joined(self, kind: str, messages: list[dict[str, str]], ids: Iterator[list[int]]) -> Encoded:
        tokens, answers = [self._begin], []
        for message in messages:
            tokens += [self._roles[message["role"]], *(content := next(ids)), self._end]
            if message["role"] == "assistant":
                answers.append(range(len(tokens) - len(content) - 1, len(tokens)))
        return Encoded(kind, tokens, answers)


def batches(encoded: Sequence[Encoded], most_tokens: int, pad: int) -> Iterator[Batch]:
    """Yield all conversations in batches of few shapes: CPU kernels are compiled once for each shape."""
    rows = _packed(encoded)
    for length in ROW_LENGTHS:
        fitting = [row for row in rows if row.length == length]
        most_rows = max(most_tokens // length, ROWS_MULTIPLE) // ROWS_MULTIPLE * ROWS_MULTIPLE
        for start in range(0, len(fitting), most_rows):
            yield _batch(fitting[start : start + most_rows], length, pad)


@dataclass
class _Row:
    length: int
    free: int
    conversations: list[Encoded]


def _packed(encoded: Sequence[Encoded]) -> list[_Row]:
    """Pack conversations into rows, the longest first, each into the first row with room.

    A new row is as short as its first conversation allows.
    """
    rows: list[_Row] = []
    for conversation in sorted(encoded, key=lambda conversation: -len(conversation.tokens)):
        size = len(conversation.tokens)
        row = next((row for row in rows if row.free >= size), None)
        if row is None:
            length = next(length for length in ROW_LENGTHS if length >= size)
            rows.append(row := _Row(length, length, []))
        row.conversations.append(conversation)
        row.free -= size
    return rows


def _batch(rows: list[_Row], length: int, pad: int) -> Batch:
    count = -(-len(rows) // ROWS_MULTIPLE) * ROWS_MULTIPLE
    inputs = torch.full((count, length), pad)
    segments = torch.zeros((count, length), dtype=torch.int32)
    places: list[int] = []
    weights: list[float] = []
    owners: list[int] = []
    kinds: list[str] = []
    for number, row in enumerate(rows):
        start = 0
        for conversation in row.conversations:
            end = start + len(conversation.tokens)
            inputs[number, start:end] = torch.tensor(conversation.tokens)
            segments[number, start:end] = len(kinds) + 1
            for answer in conversation.answers:
                places += [number * length + start + place for place in answer]
                weights += [len(answer) ** -0.5] * len(answer)
                owners += [len(kinds)] * len(answer)
            kinds.append(conversation.kind)
            start = end
    fill = -len(places) % ANSWERS_MULTIPLE
    places += places[-1:] * fill
    weights += [0.0] * fill
    owners += owners[-1:] * fill
    targets = torch.tensor(places)
    seen = (segments[:, :, None] == segments[:, None, :]).tril()
    return Batch(
        inputs=inputs,
        mask=torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill_(~seen, float("-inf"))[:, None],
        sources=targets - 1,
        targets=inputs.flatten()[targets],
        weights=torch.tensor(weights),
        owners=torch.tensor(owners),
        kinds=kinds,
    )
