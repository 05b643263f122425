"""Forms of answers, by name and by chat template: raw text of a policy → content, thoughts and tool calls.

A form accepts what its family's template writes and what servers read of it, no more: JSON must be valid.
What looks like a call and is none stays content and is named in ``faults``. The text itself is nobody's to
change: it is what was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from realsys.api.basics.thoughts import THINK
from realsys.rollout.conversation.forms.answer_scan import MarkedForm
from realsys.rollout.conversation.forms.call_syntax import CallSyntax, Schemas
from realsys.rollout.conversation.forms.deepseek_form import DEEPSEEK
from realsys.rollout.conversation.forms.glm_form import GLM, HY3_PREVIEW
from realsys.rollout.conversation.forms.hermes_form import HERMES
from realsys.rollout.conversation.forms.json_list_form import (
    GRANITE_LIST,
    JAMBA_LIST,
    NEMOTRON_LIST,
)
from realsys.rollout.conversation.forms.llama3_json_form import LLAMA3_JSON
from realsys.rollout.conversation.forms.mistral_form import MISTRAL
from realsys.rollout.conversation.forms.parsed_answer import ParsedAnswer, ParsedCall
from realsys.rollout.conversation.forms.qwen3_coder_form import QWEN3_CODER

__all__ = [
    "ANSWER_FORMS",
    "PLAIN_FORMS",
    "AnswerForm",
    "ParsedAnswer",
    "ParsedCall",
    "form_of_template",
]


class AnswerForm(Protocol):
    """How one family of models writes thoughts and tool calls."""

    @property
    def name(self) -> str: ...

    @property
    def thought_marks(self) -> tuple[tuple[str, str], ...]:
        """Pairs of marks around thoughts."""
        ...

    @property
    def syntax(self) -> CallSyntax | None:
        """How calls are written; None: not at all."""
        ...

    def parse(
        self, text: str, *, thinking: bool, tools: bool, schemas: Schemas | None = None
    ) -> ParsedAnswer:
        """Takes apart an answer that was decoded with special tokens, without its end-of-turn token.

        Never raises. Takes time linear in the text.

        Args:
            thinking: the template opened thoughts in the prompt, so the text begins inside of them.
            tools: the request had tools. Otherwise text that looks like a call stays content.
            schemas: JSON schema of a tool's arguments by the tool's name. ``qwen3_coder`` and ``glm`` need
                them: they write texts and numbers alike; without them what reads as JSON is taken as JSON.
        """
        ...

    def safe_prefix(self, text: str, *, thinking: bool, tools: bool) -> str:
        """Returns the content that an answer which begins with ``text`` has for sure, however it goes on.

        It is a prefix of the content of the whole answer, and of the safe prefix of any longer beginning.
        """
        ...


PLAIN = MarkedForm(name="plain", thought_marks=())
PLAIN_THOUGHTS = MarkedForm(name="plain_thoughts")
PLAIN_FORMS = frozenset({PLAIN.name, PLAIN_THOUGHTS.name})  # without tool calls

ANSWER_FORMS: Mapping[str, AnswerForm] = MappingProxyType(
    {
        form.name: form
        for form in (
            *(HERMES, QWEN3_CODER, GLM, HY3_PREVIEW, LLAMA3_JSON, MISTRAL, DEEPSEEK),
            *(NEMOTRON_LIST, JAMBA_LIST, GRANITE_LIST),
            *(PLAIN, PLAIN_THOUGHTS),
        )
    }
)

# All texts of a row stand in the template, none of those after "not". The first row that fits counts.
_TEMPLATE_MARKS: tuple[tuple[MarkedForm, tuple[str, ...], tuple[str, ...]], ...] = (
    (DEEPSEEK, ("<｜tool▁call▁begin｜>",), ()),
    (QWEN3_CODER, ("<tool_call>", "<function=", "<parameter="), ()),
    (HY3_PREVIEW, ("<tool_calls>", "<tool_call>", "<tool_sep>", "<arg_key>", "<arg_value>"), ()),
    (GLM, ("<tool_call>", "<arg_key>", "<arg_value>"), ()),
    (HERMES, ("<tool_call>", "arguments"), ("<arg_key>",)),
    (MISTRAL, ("[TOOL_CALLS]",), ()),
    (LLAMA3_JSON, ("<|start_header_id|>", '"parameters": '), ()),
    (NEMOTRON_LIST, ("<TOOLCALL>", "</TOOLCALL>"), ()),
    (JAMBA_LIST, ("<tool_calls>", "</tool_calls>"), ("<tool_call>",)),
    (GRANITE_LIST, ("<|tool_call|>",), ("<tool_call>",)),
    (PLAIN_THOUGHTS, (THINK[1],), ()),
)


def form_of_template(chat_template: str) -> AnswerForm:
    """Returns the form whose marks a chat template writes; the plain form if it has marks of none."""
    for form, texts, absent in _TEMPLATE_MARKS:
        if all(text in chat_template for text in texts) and not any(
            text in chat_template for text in absent
        ):
            return form
    return PLAIN
