"""The bodies that clients may send: OpenAI's fields, and vLLM's too.

A field is honoured, or refused by name, or named as ignored in a header of the answer; no field is ignored silently.
Three kinds have no effect on an answer and are accepted: `user`, `metadata`, and any field below that is set to its
default. Deadlines, tiers and priorities decide which request runs first (docs/guides/deadlines.md).
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, PrivateAttr, Tag, field_validator
from pydantic_core import PydanticCustomError

from alignedserve.gateway.openai.errors import UNSUPPORTED, ApiError
from alignedserve.gateway.openai.formats import (
    Choices,
    Format,
    Pattern,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    WantedCalls,
    vllm_formats,
)
from alignedserve.gateway.openai.peers import translated
from alignedserve.gateway.openai.strict import Ignored, ListOf, Ruled, Strict, TextOr, Usual, fault
from alignedserve.gateway.openai.tools import (
    MOST_TOOLS,
    NO_PARAMETERS,
    AllowedTools,
    CalledFunction,
    CalledTool,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
)
from alignedserve.text.call_grammar import BesideCalls, can_write
from alignedserve.text.chat_template import Rendering
from alignedserve.text.text_model import TextModel

if TYPE_CHECKING:
    from typing_extensions import Self

_CALL = "call_{}"  # the id of a call that has none, by the name of its function
_INT32 = 2**31
_INT64 = 2**63
MOST_MESSAGES = 4096
MOST_LOGPROBS = 20  # besides the token's own
MOST_CHOICES = 128  # of a prompt
MOST_CALLS, MOST_DEMANDED_CALLS = 128, 16  # of an answer that may be calls, or must be
MOST_STOP_TOKENS = 256  # that a client names: each token of an output is looked for among them
SWITCHES = ("enable_thinking", "thinking")  # variables of templates: whether the model reasons
_PLAIN, _MOST_UNREAD = re.compile(r"\w{1,64}", re.ASCII), 16  # variables that a header names
MOST_REQUESTS = 1024  # of a body: choices of all its prompts
_LAST = 32  # last tokens of a prompt: they show whether the prompt ends within a reasoning


class TextPart(Strict):
    type: Literal["text"]
    text: str
    # these change nothing: the beginnings of prompts are cached anyway
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


Content = TextOr[ListOf[Part]]


def text_of(content: str | Sequence[Any]) -> str:
    """Return the text of a content, its parts on lines of their own, as in vLLM."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class ChatMessage(Ruled):
    UNSUPPORTED: ClassVar[Usual] = {"audio": ()}
    WHERE = "in a message, "

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None  # an assistant's may be missing, as in an answer that ended while it reasoned
    tool_calls: ListOf[CalledTool] | None = None  # of an assistant
    tool_call_id: str | None = None  # of a tool: the call that it answers
    function_call: CalledFunction | None = None  # the older form of a call, which a message of its function answers
    name: str | None = None
    refusal: str | None = None  # of an assistant: what it said instead of a content
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: Any = None

    def faults(self) -> Iterator[PydanticCustomError]:
        if self.content is None and self.role != "assistant":
            yield fault("content", "is missing", "missing")
        for name in ("tool_calls", "function_call"):
            if getattr(self, name) and self.role != "assistant":
                yield fault(name, "only an assistant calls tools")
        if self.role == "function" and self.name is None:
            yield fault("name", "is missing", "missing")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            yield fault("tool_call_id", "messages of the role tool must have it, other messages must not")

    @property
    def text(self) -> str:
        content = self.content if isinstance(self.content, list) else self.content or self.refusal or ""
        return text_of(content)

    @property
    def shown(self) -> dict[str, Any]:
        """The message as a chat template receives it."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        calls = self.tool_calls or []
        if (called := self.function_call) is not None:
            calls = [*calls, CalledTool(type="function", id=_CALL.format(called.name), function=called)]
        if self.role == "function":
            message |= {"role": "tool", "tool_call_id": _CALL.format(self.name)}
        if calls:
            message["tool_calls"] = [call.shown for call in calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message | self.told

    @property
    def told(self) -> dict[str, str]:
        """Return the fields that only some templates read; both names of a reasoning are in use."""
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        told = {"name": self.name, "reasoning_content": reasoning, "reasoning": reasoning}
        return {name: value for name, value in told.items() if value is not None}


class StreamOptions(Ruled):
    UNSUPPORTED: ClassVar[Usual] = {"include_obfuscation": (False,)}
    WHERE = "stream_options."

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # each chunk shows the usage so far
    include_timing: bool | None = None  # the last usage says how long the answer took

    def faults(self) -> Iterator[PydanticCustomError]:
        for field in ("continuous_usage_stats", "include_timing"):
            if getattr(self, field) and not self.include_usage:
                yield fault(field, "only allowed if include_usage is true")


TokenId = Annotated[int, Field(ge=0)]


class SloFields(Strict):
    """The deadlines of a request, in milliseconds."""

    MOST_MS: ClassVar[float] = 30 * 86_400_000.0

    ttft_ms: float | None = Field(None, gt=0, le=MOST_MS)
    tbt_ms: float | None = Field(None, gt=0, le=MOST_MS)
    jct_ms: float | None = Field(None, gt=0, le=MOST_MS)
    strict: bool | None = None  # whether a prompt that alone takes longer than ttft_ms is refused


class PromisedRequest(Ruled):
    """The fields of every body that asks for tokens or vectors; null counts as not set."""

    model: str
    slo: SloFields | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    priority: int | None = Field(None, ge=-_INT64, lt=_INT64)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    user: str | None = None
    metadata: dict[str, str] | None = None
    _told: dict[str, str] = PrivateAttr(default_factory=dict)  # our names of fields that the client calls otherwise
    _left_out: list[str] = PrivateAttr(default_factory=list)  # fields of the client's that mean nothing here

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Self:
        """Return the body of these fields, which may have peers' names."""
        own = translated(tree, cls.model_fields.keys())
        try:
            body = super().of(own.tree)
        except ApiError as error:
            raise own.renamed(error) from None
        body._told, body._left_out = own.told, own.left_out
        return body

    def told(self, name: str) -> str:
        """Return what the client calls a field of ours."""
        return self._told.get(name, name)

    @property
    def ignored(self) -> list[str]:
        return [*super().ignored, *self._left_out]


class SampledRequest(PromisedRequest):
    """The fields of every body that asks for tokens, by the same names in all of OpenAI's interfaces."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    expected_tokens: int | None = Field(None, ge=1, lt=_INT32)


class _AnyRequest(SampledRequest):
    """The fields that chat and text completions have in common."""

    UNSUPPORTED: ClassVar[Usual] = {
        **dict.fromkeys(
            ("ec_transfer_params", "guided_decoding_backend", "kv_transfer_params", "logprob_token_ids"), ()
        ),
        **dict.fromkeys(("prompt_logprobs", "repetition_detection", "truncation_side"), ()),
        **dict.fromkeys(("bad_words", "logits_processors"), ([],)),
        **dict.fromkeys(("mm_processor_kwargs", "vllm_xargs"), ({},)),
        **dict.fromkeys(("return_token_offsets", "use_beam_search", "watermarking"), (False,)),
        **dict.fromkeys(("return_mm_kwargs", "spaces_between_special_tokens"), (True,)),
        **dict.fromkeys(("length_penalty", "stream_interval"), (1,)),
        "routed_experts_prompt_start": (0,),
    }
    # Output tokens if the client sets no limit; None: the rest of the context.
    usual_tokens: ClassVar[int | None] = None

    max_tokens: int | None = Field(None, ge=1)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    allowed_token_ids: ListOf[TokenId] | None = Field(None, min_length=1)
    guided_choice: Choices | None = None
    guided_json: Schema | str | None = None
    guided_regex: Pattern | None = None
    guided_grammar: Pattern | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    best_of: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: ListOf[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=16)
    stop_token_ids: ListOf[TokenId] | None = Field(None, max_length=MOST_STOP_TOKENS)
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1, lt=_INT32)
    request_id: Ignored = None
    session_id: Ignored = None

    @field_validator("stop", mode="before")
    @classmethod
    def _list_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("logit_bias")
    @classmethod
    def _check_biases(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for name in biases or ():
            if not (name.isascii() and name.isdecimal() and str(int(name)) == name):
                raise PydanticCustomError("no_token", "its names must be token ids", {"field": name})
        return biases

    def faults(self) -> Iterator[PydanticCustomError]:
        formats = self._formats
        if len(formats) > 1:
            message = f"{formats[1].field} also sets the form of the answer: use only one of them"
            yield fault(formats[0].field, message)
        for name in ("allowed_token_ids", "min_tokens"):
            if formats and getattr(self, name):
                yield fault(name, f"cannot be used with {formats[0].field}")
        if self.stream_options is not None and not self.stream:
            yield fault("stream_options", "only allowed if stream is true")
        if self.best_of not in (None, self.n or 1):
            yield fault("best_of", "best_of is supported only if it equals n: leave it out", UNSUPPORTED)

    @property
    def _formats(self) -> list[Format]:
        kinds = ("choice", "json", "regex", "grammar")
        guided = vllm_formats("guided_", {kind: getattr(self, f"guided_{kind}") for kind in kinds})
        guided = [replace(form, field=self.told(form.field)) for form in guided]
        others = (self.response_format, self.structured_outputs)
        return guided + [form for other in others if other is not None for form in other.formats]

    @property
    def format(self) -> Format | None:
        """The form that the answer must have, if the body sets one."""
        return next(iter(self._formats), None)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        return tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items())

    @property
    def most_tokens(self) -> int | None:
        """The client's limit of output tokens."""
        return self.max_tokens

    @property
    def tokens_asked(self) -> int | None:
        """The most tokens of output, by the client or by the route; None: as many as the context leaves."""
        return self.usual_tokens if self.most_tokens is None else self.most_tokens

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """The number of log-probabilities at each place besides the token's own; None: no log-probabilities at all."""

    @property
    def most_tokens_field(self) -> str:
        """The field that sets the limit of output tokens, as the client calls it."""
        return self.told("max_tokens")


def _limit(most: Any) -> Any:
    """Return a limit of tokens: for LM Studio, llama.cpp and Ollama -1 is none, for the last -2 too."""
    return None if type(most) is int and most in (-1, -2) else most


class ChatRequest(_AnyRequest):
    UNSUPPORTED: ClassVar[Usual] = {
        **_AnyRequest.UNSUPPORTED,
        **dict.fromkeys(("audio", "chat_template", "moderation", "web_search_options"), ()),
        "documents": ([],),
        **dict.fromkeys(("add_special_tokens", "echo", "return_prompt_text"), (False,)),
        "media_io_kwargs": ({},),
        "modalities": (["text"],),
    }

    messages: ListOf[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    tools: ListOf[Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = None
    functions: ListOf[Function] | None = Field(None, max_length=MOST_TOOLS)  # the older form of tools, of one call
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    max_reasoning_tokens: int | None = Field(None, ge=0, lt=_INT32)
    thinking_token_budget: int | None = Field(None, ge=-1, lt=_INT32)  # vLLM's name of it; -1 sets none
    verbosity: Annotated[str, Field(max_length=32)] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    store: Ignored = None
    max_tokens: Annotated[int | None, BeforeValidator(_limit)] = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    def faults(self) -> Iterator[PydanticCustomError]:
        yield from super().faults()
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            yield fault("max_tokens", "max_completion_tokens sets another limit")
        if self.most_reasoning_tokens is not None and self.allowed_token_ids:
            yield fault("allowed_token_ids", "cannot be used with a budget of reasoning")
        if None not in (self.max_reasoning_tokens, self.thinking_token_budget):
            yield fault("thinking_token_budget", "max_reasoning_tokens sets the same: use only one of them")
        if self.top_logprobs and not self.logprobs:
            yield fault("top_logprobs", "only allowed if logprobs is true")
        yield from self._faults_of_tools()
        last = self.messages[-1]
        may_continue = not self.add_generation_prompt and last.role == "assistant" and not last.tool_calls
        if self.continue_final_message and not may_continue:
            message = "only allowed if the last message is a text of the assistant, and add_generation_prompt is false"
            yield fault("continue_final_message", message)

    def _faults_of_tools(self) -> Iterator[PydanticCustomError]:
        """Make tools of functions. Leave only the tools that an allowed_tools choice allows, its mode as the choice.
        Yield what is wrong."""
        if self.is_legacy:
            if self.tools or self.tool_choice:
                yield fault("functions", "tools and tool_choice set the same: use only the newer two")
            self.tools = [Tool(type="function", function=function) for function in self.functions or ()]
            choice, self.parallel_tool_calls = self.function_call, False
            if isinstance(choice, NamedFunction):
                self.tool_choice = NamedTool(type="function", function=choice)
            else:
                self.tool_choice = choice
        if isinstance(self.tool_choice, AllowedTools):
            allowed = self.tool_choice.allowed_tools
            wanted, known = {tool.function.name for tool in allowed.tools}, self.tools or []
            if unknown := wanted - {tool.function.name for tool in known}:
                yield fault("tool_choice", f"there is no tool named {min(unknown)} among tools")
            self.tools = [tool for tool in known if tool.function.name in wanted]
            self.tool_choice = allowed.mode
        names, (tools, call) = [tool.function.name for tool in self.tools or ()], self._names_of_tools
        if len(set(names)) < len(names):
            yield fault(tools, f"two {tools} have the same name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            yield fault(call, f"there is none with this name among {tools}")
        if self.tool_choice == "required" and not names:
            yield fault("tool_choice", "there are no tools to call")
        others = [form for form in super()._formats if form.kind != "json"]
        if self.may_call and self.demanded_calls is None and others:
            name = others[0].field
            message = f"{name} leaves no room for calls: set tool_choice to none or required, or use a schema"
            yield fault(tools, message)

    @property
    def is_legacy(self) -> bool:
        """Return whether the client knows functions, and no tools."""
        return bool(self.functions) or isinstance(self.function_call, NamedFunction)

    @property
    def _names_of_tools(self) -> tuple[str, str]:
        """Return the names of the fields that say which tools there are, and which is called."""
        return ("functions", "function_call") if self.is_legacy else ("tools", "tool_choice")

    @property
    def most_reasoning_tokens(self) -> int | None:
        """The budget of the reasoning, in tokens."""
        other = None if self.thinking_token_budget == -1 else self.thinking_token_budget
        return self.max_reasoning_tokens if other is None else other

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def most_tokens_field(self) -> str:
        return self.told("max_tokens") if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def ignored(self) -> list[str]:
        notes = any(message.annotations for message in self.messages)
        return [*super().ignored, *(["messages.annotations"] if notes else [])]

    @property
    def strict_functions(self) -> frozenset[str]:
        """The functions whose schemas bind every call."""
        return frozenset(tool.function.name for tool in self.tools or () if tool.function.strict)

    @property
    def may_call(self) -> bool:
        """Return whether the answer is searched for tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def decides_to_call(self) -> bool:
        """Return whether the model itself decides if it calls tools."""
        return self.may_call and self.demanded_calls is None

    @property
    def demanded_calls(self) -> WantedCalls | None:
        """The calls that the answer must be, if any are demanded."""
        schemas, choice = self.schemas, self.tool_choice
        if choice in (None, "none", "auto"):
            return None
        if isinstance(choice, NamedTool):
            name = choice.function.name
            return WantedCalls({name: schemas[name]} if name in schemas else {}, several=False)
        return WantedCalls(schemas, several=self.parallel_tool_calls is True)

    @property
    def schemas(self) -> dict[str, Schema]:
        """The schemas of the parameters of all functions, by the names of the functions."""
        functions = [tool.function for tool in self.tools or ()]
        return {item.name: NO_PARAMETERS if item.parameters is None else item.parameters for item in functions}

    def begins_inside(self, prompt: Sequence[int], text: TextModel) -> bool:
        """Return whether an output begins within a reasoning, as the last tokens of the prompt show, or the continued
        message."""
        family = text.reasoning
        if family is None or not self.continue_final_message:
            return family is not None and family.begins_inside(text.decode_all(prompt[-_LAST:]))
        said = self.messages[-1].text
        begun, ended = (max(map(said.rfind, markers)) for markers in (family.starts, family.ends))
        return begun > ended

    def is_held(self, text: TextModel) -> bool:
        """Return whether free text is held to the format of calls once it begins one.

        A model that was never shown how to call tools is, and any model where schemas bind it."""
        has_free_end = not (self.ignore_eos or self.min_tokens or self.allowed_token_ids)
        own, strict = text.call_format, bool(self.strict_functions)
        wants = (own.has_mark and not text.shows_tools) or (strict and (own.has_mark or own.is_whole_answer))
        return self.may_call and self.format is None and has_free_end and wants and can_write(own, self.schemas)

    @property
    def _formats(self) -> list[Format]:
        """The forms that the body sets; a demanded call replaces all others, and a schema may stand beside calls."""
        calls, others = self.demanded_calls, super()._formats
        if calls is not None:
            return [Format(self._names_of_tools[1], "calls", calls=calls)]
        if not self.may_call:
            return others
        calls = WantedCalls(self.schemas, self.most_calls > 1, BesideCalls.SCHEMA)
        return [replace(form, calls=calls) for form in others]

    @property
    def most_calls(self) -> int:
        """After how many calls the answer ends, as it does before one that repeats another: a weak model would go on
        calling until its tokens are used up."""
        if (calls := self.demanded_calls) is not None:
            return MOST_DEMANDED_CALLS if calls.several else 1
        return 1 if self.parallel_tool_calls is False else MOST_CALLS

    @property
    def rendering(self) -> Rendering:
        reasons = self.enable_thinking
        if reasons is None and self.reasoning_effort is not None:
            reasons = self.reasoning_effort != "none"
        return Rendering(
            tuple(tool.shown for tool in self.tools or ()) if self.may_call else (),
            opens_answer=self.add_generation_prompt is not False and not self.continue_final_message,
            continues=bool(self.continue_final_message),
            more={
                **self._offered,
                **({} if reasons is None else dict.fromkeys(SWITCHES, reasons)),
                **(self.chat_template_kwargs or {}),
            },
        )

    @property
    def _offered(self) -> dict[str, str]:
        """Return the variables that some templates have."""
        offered = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return {name: value for name, value in offered.items() if value is not None}

    def unread_by(self, text: TextModel) -> list[str]:
        """Return the fields that change nothing: the model's template does not read them, or it does not reason.

        A tool's `strict` changes nothing where no grammar can enforce it."""
        template, reasons = text.template, text.reasoning is not None
        found = dict.fromkeys(unread_variables(self.chat_template_kwargs, text), True)
        if template is not None:
            for name in self._offered:
                read_as = (name, *(SWITCHES if name == "reasoning_effort" else ()))
                found[name] = not any(map(template.has_variable, read_as))
            told = {name for message in self.messages for name in message.told}
            of_messages = {"messages.name": {"name"}, "messages.reasoning": {"reasoning", "reasoning_content"}}
            for shown, names in of_messages.items():
                found[shown] = bool(told & names) and not any(map(template.reads, names))
        found |= {
            "tools.function.strict": bool(self.strict_functions) and self.format is None and not self.is_held(text),
            "enable_thinking": self.enable_thinking is not None
            and self.enable_thinking != reasons
            and not (template is not None and any(map(template.has_variable, SWITCHES))),
            "max_reasoning_tokens": self.max_reasoning_tokens is not None and not reasons,
            "thinking_token_budget": self.thinking_token_budget not in (None, -1) and not reasons,
        }
        return [self.told(name) for name, is_set in found.items() if is_set]


def unread_variables(given: Mapping[str, Any] | None, text: TextModel) -> list[str]:
    """Return which of chat_template_kwargs the model's template does not read, as far as a header can name them."""
    unread = [name for name in given or () if text.template is not None and not text.template.has_variable(name)]
    plain = (f".{name}" if _PLAIN.fullmatch(name) else "" for name in unread[:_MOST_UNREAD])
    return [f"chat_template_kwargs{name}" for name in plain]


def _kind_of_prompt(prompt: Any) -> str:
    return "ids" if isinstance(prompt, list) else "text"


Prompt = Annotated[Annotated[str, Tag("text")] | Annotated[ListOf[TokenId], Tag("ids")], Discriminator(_kind_of_prompt)]


def kind_of_prompts(prompt: Any) -> str:
    """Return the kind of `prompt`: a list of token ids is a single prompt, a list of texts or of such lists several."""
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return "several" if several else _kind_of_prompt(prompt)


Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[ListOf[TokenId], Tag("ids")]
    | Annotated[ListOf[Prompt], Field(max_length=MOST_REQUESTS), Tag("several")],
    Discriminator(kind_of_prompts),
]


def listed_prompts(prompt: Any) -> list[str | list[int]]:
    """Return all that `prompt` has, as a list."""
    return cast("list[str | list[int]]", prompt if kind_of_prompts(prompt) == "several" else [prompt])


class CompletionRequest(_AnyRequest):
    UNSUPPORTED: ClassVar[Usual] = {
        **_AnyRequest.UNSUPPORTED,
        "prompt_embeds": (),
        "thinking_token_budget": (-1,),
    }
    usual_tokens = 16  # as for OpenAI and vLLM: the continuation of a text has no natural end

    prompt: Prompts
    suffix: str | None = None  # what follows the answer; an empty text is none
    add_special_tokens: bool | None = None
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def faults(self) -> Iterator[PydanticCustomError]:
        yield from super().faults()
        if self.max_tokens == 0 and not self.echo:
            yield fault("max_tokens", "may be 0 only if echo is true")
        for name in ("echo", "truncate_prompt_tokens"):
            if self.suffix and getattr(self, name):
                yield fault(name, "cannot be used with suffix")
        if (number := len(self.prompts) * (self.n or 1)) > MOST_REQUESTS:
            message = f"with n there would be {number} choices, but a request may have at most {MOST_REQUESTS}"
            yield fault("prompt", message)

    @property
    def prompts(self) -> list[str | list[int]]:
        return listed_prompts(self.prompt)


class FimRequest(CompletionRequest):
    """A middle of a text, which ends where the model ends it."""

    usual_tokens = None


class TokenizeRequest(Ruled):
    """The body of /tokenize: a text, or a conversation that is rendered as a prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[ChatMessage] | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    tools: ListOf[Tool] | None = Field(None, max_length=MOST_TOOLS)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def faults(self) -> Iterator[PydanticCustomError]:
        if (self.prompt is None) == (self.messages is None):
            yield fault("prompt", "there must be either a prompt or messages")
        foreign = (
            ("add_special_tokens",) if self.messages else ("tools", "add_generation_prompt", "chat_template_kwargs")
        )
        for name in foreign:
            if getattr(self, name) is not None:
                yield fault(name, f"cannot be used with {'messages' if self.messages else 'a prompt'}")


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: ListOf[TokenId]


class UnloadAdapter(Strict):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str


class LoadAdapter(Strict):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
