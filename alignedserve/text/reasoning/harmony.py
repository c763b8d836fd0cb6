"""Part an output in the harmony form, which has messages in channels.

    <|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>
    ^header                       ^body      ^end   ^header                              ^body    ^end

The channel analysis is reasoning, and what the channels final and commentary say is the answer. A message to a
recipient is a call. It stays in the text for the reader of calls, in one form wherever its header names the recipient:

    <|channel|>commentary to=functions.weather<|message|>{"city": "Rom"}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from alignedserve.text.calls.scanning import find_first, num_unsettled
from alignedserve.text.reasoning.splitting import ReasoningPhase, Splitter, SplitText

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_BODY_ENDS = (START, CHANNEL, END, CALL, RETURN)
_MOST_HEADER = 512  # characters; what is longer is no header
_HEADER_STARTS = (*MARKERS, "to=")
_PHASES = {"analysis": ReasoningPhase.REASONING, "commentary": ReasoningPhase.ASIDE}


class HarmonySplitter(Splitter):
    def __init__(self, inside: bool, calls: bool) -> None:
        """`calls`: calls stay in the text with their headers; otherwise only their bodies do."""
        super().__init__()
        self.phase = ReasoningPhase.OPEN
        self._keeps_calls = calls
        self._in_header, self._is_first = True, True
        self._is_call = False  # whether the open message is a call that stays in the text
        self._begins = False  # whether the open message has no text yet
        self._said: set[bool] = set()  # whether messages of reasoning, and others, have had text
        if inside:
            self._open(ReasoningPhase.REASONING)

    def _read(self, text: str) -> Iterator[SplitText]:
        while text:
            text, found = self._read_header(text) if self._in_header else self._read_body(text)
            yield found

    def _last(self, held: str) -> SplitText:
        return SplitText() if self._in_header else self._take(held)

    def _read_header(self, text: str) -> tuple[str, SplitText]:
        begins = text.lstrip()
        is_header = any(begins.startswith(start) or start.startswith(begins) for start in _HEADER_STARTS)
        if self._is_first and not is_header:  # a model that does not keep to the form
            self._open(ReasoningPhase.ANSWER)
            return text, SplitText()
        at = text.find(MESSAGE, 0, _MOST_HEADER)
        if at < 0 and len(text) < _MOST_HEADER:
            self._held = text
            return "", SplitText()
        if at < 0:
            self._open(ReasoningPhase.ANSWER)
            return text.removeprefix(START).removeprefix(CHANNEL), SplitText()
        header, after = text[:at].rpartition(END)[2], text[at + len(MESSAGE) :]
        if found := _RECIPIENT.search(header):
            self._open(ReasoningPhase.ASIDE, self._keeps_calls)
            beginning = f"{CHANNEL}commentary to={found[1]}{MESSAGE}"
            return after, SplitText("", beginning if self._keeps_calls else "")
        channel = header.partition(CHANNEL)[2].strip()
        self._open(next((phase for name, phase in _PHASES.items() if channel.startswith(name)), ReasoningPhase.ANSWER))
        return after, SplitText()

    def _open(self, phase: ReasoningPhase, is_call: bool = False) -> None:
        self.phase, self._is_call = phase, is_call
        self._in_header, self._is_first, self._begins = False, False, True

    def _read_body(self, text: str) -> tuple[str, SplitText]:
        first = find_first(text, _BODY_ENDS)
        if first is None:
            settled = len(text) - num_unsettled(text, _BODY_ENDS)
            self._held = text[settled:]
            return "", self._take(text[:settled])
        at, marker = first
        found = self._take(text[:at]) + SplitText("", CALL if self._is_call else "")
        self._in_header, self.phase = True, ReasoningPhase.REASONING
        return text[at:] if marker in (START, CHANNEL) else text[at + len(marker) :], found

    def _take(self, text: str) -> SplitText:
        """Return a text of the open message; messages of one kind stand on lines of their own."""
        if not text or self._is_call:
            return SplitText("", text)
        reasons = self.phase is ReasoningPhase.REASONING
        if self._begins and reasons in self._said:
            text = "\n" + text
        self._begins = False
        self._said.add(reasons)
        return SplitText(text, "") if reasons else SplitText("", text)
