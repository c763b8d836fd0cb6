"""Encode a text to token ids, and tell before that a text has far too many of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tokenizers import Tokenizer

LEAST_SLICE, MOST_SLICE = 4096, 16384  # characters of a long text that are tokenised together
CUT_TOKENS = 64  # tokens that cutting a text, or a secret name in it, may add to each of its slices, at most


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the text's token ids, encoded as a batch of one.

    The library's own `encode` stops all other threads meanwhile: for seconds, if a text has megabytes."""
    ids: list[int] = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def surely_exceeds(encode: Callable[[str], list[int]], texts: Iterable[str], most: int) -> bool:
    """Return whether the texts surely have more than `most` tokens.

    Texts are tokenised slice by slice: megabytes at once would take gigabytes of memory, what lies behind `most`
    tokens is not looked at, and Python's lock is free between slices. Each slice counts without the tokens that
    cutting may have added, so that no text is refused wrongly."""
    slice_length = min(max(LEAST_SLICE, 4 * most), MOST_SLICE)
    num_tokens = 0
    for text in texts:
        if 4 * len(text) <= CUT_TOKENS:
            continue  # a token has a byte at least, so that nothing would count
        for start in range(0, len(text), slice_length):
            num_tokens += max(0, len(encode(text[start : start + slice_length])) - CUT_TOKENS)
            if num_tokens > most:
                return True
    return False
