"""Part an output in the harmony form, which has messages in channels.

    <|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>
    ^header                       ^body      ^end   ^header                              ^body    ^end

The channel analysis is reasoning, and what the channels final and commentary say is the answer. A message to a
recipient is a call. It stays in the text for the reader of calls, in one form wherever its header names the recipient:

    <|channel|>commentary to=functions.weather<|message|>{"city": "Rom"}<|call|>
"""

from __future__ import annotations

import re

from alignedserve.text.calls.scanning import Reading
from alignedserve.text.reasoning.splitting import ReasoningPhase, Splitter

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
        super().__init__(inside)
        self._keeps_calls = calls
        self._is_call = False  # whether the open message is a call that stays in the text
        self._begins = True  # whether the open message has no text yet
        self._said: set[bool] = set()  # whether messages of reasoning, and others, have had text

    def _read(self) -> Reading[None]:
        if self.phase is ReasoningPhase.OPEN:
            yield from self._read_header()
        while marker := (yield from self.until(*_BODY_ENDS, pass_on=self._say)):
            if self._is_call:
                self._text_left += CALL
            if marker in (START, CHANNEL):
                self._at -= len(marker)
            self.phase = ReasoningPhase.REASONING
            yield from self._read_header()

    def _read_header(self) -> Reading[None]:
        is_first = self.phase is ReasoningPhase.OPEN
        while True:
            text = self._text[self._at :]
            begins = text.lstrip()
            is_header = any(begins.startswith(start) or start.startswith(begins) for start in _HEADER_STARTS)
            if is_first and not is_header:  # a model that does not keep to the form
                return self._open(ReasoningPhase.ANSWER)
            if (end := text.find(MESSAGE, 0, _MOST_HEADER)) >= 0:
                break
            if len(text) >= _MOST_HEADER:
                self._at += len(text) - len(text.removeprefix(START).removeprefix(CHANNEL))
                return self._open(ReasoningPhase.ANSWER)
            if not (yield from self._wait()):
                if not is_first or begins.startswith(_HEADER_STARTS):
                    self._at = len(self._text)
                return
        self._at += end + len(MESSAGE)
        header = text[:end].rpartition(END)[2]
        if found := _RECIPIENT.search(header):
            self._open(ReasoningPhase.ASIDE, self._keeps_calls)
            if self._is_call:
                self._text_left += f"{CHANNEL}commentary to={found[1]}{MESSAGE}"
            return
        channel = header.partition(CHANNEL)[2].strip()
        self._open(next((phase for name, phase in _PHASES.items() if channel.startswith(name)), ReasoningPhase.ANSWER))

    def _open(self, phase: ReasoningPhase, is_call: bool = False) -> None:
        self.phase, self._is_call, self._begins = phase, is_call, True

    def _say(self, text: str) -> None:
        """Add a text of the open message; messages of one kind stand on lines of their own."""
        reasons = self.phase is ReasoningPhase.REASONING
        if not self._is_call:
            if self._begins and reasons in self._said:
                text = "\n" + text
            self._begins = False
            self._said.add(reasons)
        if reasons:
            self._reasoning += text
        else:
            self._text_left += text
