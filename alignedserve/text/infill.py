"""Prompts that have a model fill in the middle of a text, by the tokens that it was trained with for that.

    prefix first   <|fim_prefix|> prefix <|fim_suffix|> suffix <|fim_middle|> begun
    suffix first   [SUFFIX] suffix [PREFIX] prefix begun
    as a chat      <|user|> task <|code_suffix|> suffix <|code_prefix|> prefix <|code_middle|> <|assistant|> begun

`begun` is the beginning of the middle, where a client has that already. Other files may come first, where the model has
a token that begins a file:

    <|repo_name|>project <|file_sep|>name text <|file_sep|>name text ... <|file_sep|>file, then the middle as above
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# The tokens before a prefix, a suffix and a middle. Where there is none before a middle, the suffix comes first.
_FAMILIES: tuple[tuple[str, str, str | None], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, Stable Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5, CodeGeeX4
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
# CodeGeeX4 is an older GLM, which does not think. It fills in the middle as its answer to this.
_THINK, _GLM_ASKS, _GLM_ANSWERS = "<think>", "<|user|>\n###PATH:\n###LANGUAGE:\n###MODE:BLOCK\n", "<|assistant|>\n"
_REPO = ("<|repo_name|>", "<|fim_repo|>", "<repo_name>", "<reponame>")
_FILE = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|endoftext|>", "▁<EOT>", "<EOT>")
REPO_NAME, FILE_NAME = "project\n", "file\n"  # clients do not tell those of the file that they edit


@dataclass(frozen=True)
class InfillTokens:
    """The tokens of one model."""

    prefix: int
    suffix: int
    middle: int | None
    repo: int | None
    file: int | None
    ends: tuple[int, ...]  # all of these end a middle: what follows them is another part, or another file
    chat: tuple[list[int], list[int]] | None = None  # what stands around the parts, where the middle answers a chat

    @classmethod
    def of(
        cls, find: Callable[[str], int | None], named: Mapping[str, str], encode: Callable[[str], list[int]]
    ) -> InfillTokens | None:
        """Return the tokens of a vocabulary, in which `find` finds a token by its text; None if it has none.

        `named` are those that the model itself names: prefix, suffix, middle, repo, file, end."""

        def first(*texts: str) -> int | None:
            return next((id for id in map(find, texts) if id is not None), None)

        own = named.get("prefix", ""), named.get("suffix", ""), named.get("middle")
        for prefix, suffix, middle in (own, *_FAMILIES):
            before, after, between = find(prefix), find(suffix), None if middle is None else find(middle)
            if before is None or after is None or (middle is not None and between is None):
                continue
            repo, file = first(named.get("repo", ""), *_REPO), first(named.get("file", ""), *_FILE)
            ends = (before, after, between, repo, file, *map(find, (named.get("end", ""), *_ENDS)))
            is_geex = prefix == "<|code_prefix|>" and find(_THINK) is None
            chat = (encode(_GLM_ASKS), encode(_GLM_ANSWERS)) if is_geex else None
            known = tuple(dict.fromkeys(id for id in ends if id is not None))
            return cls(before, after, between, repo, file, known, chat)
        return None

    def prompt(self, prefix: Sequence[int], suffix: Sequence[int], begun: Sequence[int] = ()) -> list[int]:
        if self.middle is None:
            return [self.suffix, *suffix, self.prefix, *prefix, *begun]
        if self.chat is not None:
            asks, answers = self.chat
            return [*asks, self.suffix, *suffix, self.prefix, *prefix, self.middle, *answers, *begun]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle, *begun]
