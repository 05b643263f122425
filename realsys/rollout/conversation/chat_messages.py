"""Messages, requests and replies of a conversation, the same for every dialect (pure values)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Prompt = str | tuple[int, ...]  # a text, or tokens
CHAT_PREFIX = "chatcmpl-"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call that the policy made. ``arguments`` is JSON text as the policy wrote it, maybe not valid."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    """One message.

    Attributes:
        role: ``system``, ``developer``, ``user``, ``assistant`` or ``tool``.
        content: text; parts of text are joined. Pictures and sounds are refused by the dialects.
        reasoning: thoughts before the content, without their marks; assistants only.
        tool_calls: assistants only.
        tool_call_id, name: of a ``tool`` message: the call that it answers; the tool's name if known.
    """

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class Unserved(StrEnum):
    """What becomes of tools and parts of messages that a policy of text can't take."""

    REFUSE = "refuse"
    DROP = "drop"  # tools are left out, and a short text stands for a part


class ToolChoice(StrEnum):
    """Whether the policy may call tools; ``ONE`` names which."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    ONE = "one"


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """What a client asks for.

    Attributes:
        prompts: instead of messages, texts or tokens that are continued as they are.
        tools: function tools in the form of Chat Completions: ``{"type": "function", "function": {…}}``.
        tool_name: with ``ToolChoice.ONE``.
        allowed_tools: with ``AUTO`` and ``REQUIRED``: names of those that may be called; empty: all.
        one_call: a reply that is held to calls of tools makes one, not several.
        n: replies, each sampled by itself; to each of several prompts.
        max_tokens: None: as many as the run allows.
        stop: texts that end a reply, which does not contain them.
        logprobs: whether log-probs of the reply's tokens are told. ``token_ids``: whether these tokens
            are, and those of the prompt.
        stream: whether the reply comes as server-sent events; ``stream_usage``: whether those of Chat
            Completions end with the counts of tokens, as other dialects' always do.
        continues: the reply goes on with the last message, which is the assistant's, and holds what is new.
        template_args: of the chat template, for this request; what the template does not read is refused.
        template_hints: arguments that count where the template reads them, and are no mistake elsewhere.
        sampling: what the client wrote of temperature, top_p, top_k, min_p, seed, …; used only where the
            endpoint allows it.
        schema: JSON schema that the reply must follow; None: free text. Instead of it ``choices``, texts
            that it must be one of, or ``pattern``, a regex. ``schema_field``: where that stands in the
            client's body, for errors. ``must_hold``: it is refused where replies are not held to it.
        left_out: kinds of tools and parts that the body had and these fields have not, see ``Unserved``.
        retries: how often the client says that it sent this request before (``x-stainless-retry-count``).
        idempotency_key: of the client, or empty.
        id_prefix: with which ids of answers begin in the client's API.
    """

    messages: tuple[ChatMessage, ...]
    prompts: tuple[Prompt, ...] = ()
    model: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice.AUTO
    tool_name: str = ""
    allowed_tools: tuple[str, ...] = ()
    one_call: bool = False
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    token_ids: bool = False
    stream: bool = False
    stream_usage: bool = False
    continues: bool = False
    template_args: Mapping[str, Any] = field(default_factory=dict)
    template_hints: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None
    choices: tuple[str, ...] = ()
    pattern: str = ""
    schema_field: str = "response_format"
    must_hold: bool = False
    left_out: tuple[str, ...] = ()
    retries: int = 0
    idempotency_key: str = ""
    id_prefix: str = field(default=CHAT_PREFIX, compare=False)

    @property
    def num_replies(self) -> int:
        """How many replies there are, to all prompts together."""
        return self.n * max(1, len(self.prompts))

    @property
    def has_form(self) -> bool:
        """Whether the text of the reply must have a certain form."""
        return self.schema is not None or bool(self.choices) or bool(self.pattern)


class FinishReason(StrEnum):
    """Why a reply ended."""

    STOP = "stop"  # the end token, or a stop text
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"  # ended by itself, and it calls tools


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """A token of a reply as the client sees it. ``text`` may be a part of a letter, then with U+FFFD."""

    text: str
    logprob: float


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """One sampled reply.

    Attributes:
        stop_text: the stop text that ended it; empty: another end.
        logprobs: one a token, if they were asked for.
        num_tokens: that the policy sampled for it.
        token_ids, prompt_ids: those tokens, and all before them, if they were asked for.
    """

    message: ChatMessage
    finish: FinishReason
    stop_text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    num_tokens: int = 0
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    prompt_ids: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class ChatResult:
    """The reply, or ``n`` of them, to one request.

    Attributes:
        id: unique in the trial; the client may name it when it sets a reward.
        created: seconds since the epoch.
        num_prompt_tokens: of the conversation before the replies, or of all prompts; ``num_cached`` of them
            are tokens that an earlier reply was continued from.
    """

    id: str
    created: int
    model: str
    replies: tuple[ChatReply, ...]
    num_prompt_tokens: int
    num_cached: int = 0
