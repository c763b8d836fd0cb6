"""Reads traces whose prompts share blocks, in Mooncake's format: a JSON object in each line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 2354]}

The timestamp is in milliseconds. A prompt has an id for every 512 tokens, and an id for the rest; an id always stands
for the same tokens. So two prompts share the tokens of the ids with which both begin.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from alignedserve.errors import WorkloadError
from alignedserve.lab.loads.workload.amounts import Pair
from alignedserve.lab.loads.workload.files import MOST_S, FileRequests, json_lines, notes_of, rising
from alignedserve.lab.loads.workload.tape import BLOCK

SUFFIX = ".jsonl"
_TIME, _PROMPT, _OUTPUT, _IDS = "timestamp", "input_length", "output_length", "hash_ids"
_MOST_TOKENS = 10**9

Row = dict[str, Any]


def read_block_trace(path: Path) -> FileRequests:
    times, pairs, blocks, num_rows, last = list[float](), list[Pair](), list[tuple[int, ...]](), 0, -math.inf
    for where, row in json_lines(path):
        if not isinstance(row, dict):
            wanted = f"a JSON object such as {{{_TIME!r}: 0, ...}}: complete it, or remove it"
            raise WorkloadError(f"{where} is not {wanted}")
        num_rows, last = num_rows + 1, rising(_block_time(row, where), last, where, _TIME)
        pair = _tokens(row, _PROMPT, where), _tokens(row, _OUTPUT, where)
        if all(pair):
            times.append(last)
            pairs.append(pair)
            blocks.append(_ids(row, pair[0], where))
    return FileRequests(tuple(pairs), tuple(times), tuple(blocks), notes_of(path, num_rows, len(pairs)))


def _value(row: Row, key: str, where: str) -> Any:
    value = row.get(key)
    if value is None:
        raise WorkloadError(f"{where}: {key} is missing: fill it in, or remove the line")
    return value


def _block_time(row: Row, where: str) -> float:
    value = _value(row, _TIME, where)
    if type(value) not in (int, float) or not abs(value) < 1000 * MOST_S:
        raise WorkloadError(f"{where}: {_TIME} must be a number of milliseconds, not {value!r:.40}")
    return float(value) / 1000


def _tokens(row: Row, key: str, where: str) -> int:
    value = _value(row, key, where)
    if type(value) is not int or not 0 <= value < _MOST_TOKENS:
        raise WorkloadError(f"{where}: {key} must be a whole number of 0 or more, below a billion, not {value!r:.40}")
    return value


def _ids(row: Row, num_tokens: int, where: str) -> tuple[int, ...]:
    ids, needed = _value(row, _IDS, where), -(-num_tokens // BLOCK)
    if not isinstance(ids, list) or not all(type(block) is int for block in ids):
        raise WorkloadError(f"{where}: {_IDS} must be a list of whole numbers, not {ids!r:.40}")
    if len(ids) != needed:
        has = f"{len(ids)} ids for a prompt of {num_tokens:,} tokens"
        raise WorkloadError(
            f"{where}: {_IDS} has {has}, which is {needed} blocks of {BLOCK}: correct or remove the line"
        )
    return tuple(ids)
