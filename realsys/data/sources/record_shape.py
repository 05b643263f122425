"""Turns a user's record into a question: prompt or messages, answer, and all of its fields. No torch.

A record is any JSON object. Which of its fields are asked and known is said by ``Columns``; without it a
record has ``prompt`` or ``question``, a text or a list of chat messages, or ``messages``, a conversation
that may end with the answer; ``answer``; and ``tools``. A field within a field is named with dots:
``reward_model.ground_truth``, ``turns.0.content``.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.api.errors import DataError, did_you_mean
from realsys.data.sources.dataset_arguments import Columns

FINAL = "####"
MOST_ASKED = 20_000  # characters of a question's text: of its end, where the task stands
Message = Mapping[str, Any]  # role, content, and what else the template reads
Tool = Mapping[str, Any]  # as OpenAI's API has them, or the function alone
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names for a message's thoughts
_SYSTEM_ROLES = ("system", "developer")
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and what is known about it.

    Attributes:
        prompt: a text, or messages up to where the answer begins.
        answer: the known answer with its steps; None: there is none.
        messages: the whole conversation, if the record has one: ``prompt`` and what follows.
        record: all fields of the user's record.
        tools: what the policy may call, for the chat template.
    """

    prompt: str | tuple[Message, ...]
    answer: str | None
    messages: tuple[Message, ...] | None
    record: Mapping[str, Any]
    tools: tuple[Tool, ...] = ()


def final_answer(answer: str) -> str:
    """Returns the text after the last ``####``, or the whole text if there is none."""
    return answer.rpartition(FINAL)[2].strip()


def question_of(
    record: Mapping[str, Any], columns: Columns, where: str, *, needs_answer: bool
) -> Question:
    """Finds prompt and answer in a record.

    Raises:
        DataError: one that is needed is missing, empty, or no text.
    """
    tools = _tools(record, columns, where)
    if columns.messages or (not columns.prompt and _has_messages_only(record)):
        name = columns.messages or "messages"
        messages = read_messages(_field(record, name, where), name, where)
        end = len(messages) - (messages[-1]["role"] == "assistant")
        if not end:
            raise DataError(
                f"{name!r} has an answer and no question",
                where=where,
                fix="begin with a user's message",
            )
        reply = messages[end]["content"] if end < len(messages) else None
        answer = _answer(record, columns, where, needed=needs_answer and not reply) or reply or None
        return Question(messages[:end], answer, messages, record, tools)
    name, value = _prompt_field(record, columns, where)
    prompt: str | tuple[Message, ...]
    if isinstance(value, list):
        prompt = read_messages(value, name, where)
        if prompt[-1]["role"] == "assistant":
            raise DataError(
                f"{name!r} ends with an assistant's message",
                where=where,
                fix=f"name the column of whole conversations: columns.messages={name}",
            )
    else:
        prompt = _text(record, name, value, where)
    answer = _answer(record, columns, where, needed=needs_answer)
    return Question(prompt, answer, None, record, tools)


def prompt_texts(prompt: str | tuple[Message, ...]) -> list[str]:
    """Returns the texts of a prompt, what templates read beside the contents (tool calls) as text too."""
    if isinstance(prompt, str):
        return [prompt]
    return [m["content"] + repr({**m, "content": ""}) * (len(m) > 2) for m in prompt]


def asked_text(prompt: str | tuple[Message, ...]) -> str:
    """Returns what a prompt asks as one text, without system prompts: at most the end of it."""
    if isinstance(prompt, str):
        return prompt[-MOST_ASKED:]
    contents = [m["content"] for m in prompt if m["role"] not in _SYSTEM_ROLES]
    return "\n".join(contents)[-MOST_ASKED:]


def with_system(messages: tuple[Message, ...], system: str | None) -> tuple[Message, ...]:
    """Puts a system prompt before messages that don't begin with one of their own."""
    if system is None or messages[0]["role"] in _SYSTEM_ROLES:
        return messages
    return ({"role": "system", "content": system}, *messages)


def read_messages(value: Any, name: str, where: str) -> tuple[Message, ...]:
    """Checks chat messages; a content in parts becomes one text.

    Raises:
        DataError: a message has no known role, or a content that is no text.
    """
    if not isinstance(value, list) or not value:
        kind = "empty" if value == [] else f"a {type(value).__name__}"
        raise DataError(
            f"{name!r} is {kind}, not a list of messages",
            where=where,
            fix='write [{"role": "user", "content": …}, …]',
        )
    return tuple(_message(m, f"{name}.{i}", where) for i, m in enumerate(value))


def _message(message: Any, name: str, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        role = message.get("role") if isinstance(message, dict) else None
        fix = (
            did_you_mean(str(role), _ROLES)
            if role
            else 'write {"role": "user", "content": …}; a transform can rename other spellings'
        )
        what = f"the role {role!r}" if role else f"{message!r:.80}, which has no role"
        raise DataError(f"{name!r} has {what}", where=where, fix=fix)
    content = message.get("content")
    if isinstance(content, list):  # parts: [{"type": "text", "text": …}]
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        found = [text for text in texts if isinstance(text, str)]
        content = "".join(found) if len(found) == len(texts) else content
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise DataError(
            f"'{name}.content' is {_kind(content)}, not a text",
            where=where,
            fix="give text; images and sounds are not trained on",
        )
    return {**message, "content": content, **_calls(message, name, where)}


def _calls(message: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Reads ``tool_calls``, where there are some, also from JSON text.

    Raises:
        DataError: they are no list of calls.
    """
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        try:
            calls = json.loads(calls or "[]")
        except (ValueError, RecursionError):
            pass
    if not calls:
        return {}
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise DataError(
            f"'{name}.tool_calls' is {calls!r:.80}, no list of calls",
            where=where,
            fix='write [{"type": "function", "function": {"name": …, "arguments": {…}}}, …], or JSON text',
        )
    return {"tool_calls": calls}


def _is_call(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    function = value.get("function", value)
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def template_forms(messages: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """Yields the forms in which messages are given to a chat template, until it takes one.

    Thoughts under the names that templates read, as transformers gives them since 5.24; and arguments of
    calls as objects, which most templates write by themselves, or else as JSON text: DeepSeek-V3's puts
    texts together.
    """
    whole = [_as_templates_read(message) for message in messages]
    yield whole
    texts = [
        {**m, "tool_calls": [*map(_with_text, given["tool_calls"])]} if m.get("tool_calls") else m
        for m, given in zip(whole, messages, strict=True)
    ]
    if texts != whole:
        yield texts


def _as_templates_read(message: Message) -> dict[str, Any]:
    made = {name: value for name, value in message.items() if value is not None}
    calls = made.pop("tool_calls", None)
    if calls:
        made["tool_calls"] = [_with_object(call) for call in calls]
    if thought := thought_of(made):
        made |= dict.fromkeys(THOUGHTS[:2], thought)
    return made


def thought_of(message: Message) -> str:
    """Returns an assistant's thoughts, where they are a field of the message."""
    found = (message.get(name) for name in THOUGHTS)
    return next((text for text in found if isinstance(text, str) and text), "")


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_object(call["function"])}
    given = call.get("arguments")
    if not isinstance(given, str):
        return call
    try:
        read = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "arguments": read} if isinstance(read, dict) else call


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_text(call["function"])}
    given = call.get("arguments")
    is_object = isinstance(given, Mapping)
    return {**call, "arguments": json.dumps(given, ensure_ascii=False)} if is_object else call


def _tools(record: Mapping[str, Any], columns: Columns, where: str) -> tuple[Tool, ...]:
    name = columns.tools or "tools"
    value = _field(record, name, where) if columns.tools else record.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value or "[]")
        except (ValueError, RecursionError):
            value = None if columns.tools is None else value
    if value is None:
        return ()
    if isinstance(value, list) and all(isinstance(t, dict) and _is_tool(t) for t in value):
        return tuple(value)
    if columns.tools is None:  # a column of the same name that means something else
        return ()
    raise DataError(
        f"{name!r} is {value!r:.80}, no list of tools",
        where=where,
        fix='write [{"type": "function", "function": {"name": …, "parameters": {…}}}, …], or JSON text',
    )


def _is_tool(value: Mapping[str, Any]) -> bool:
    function = value.get("function")
    if function is None and ("parameters" in value or "input_schema" in value):
        function = value
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _has_messages_only(record: Mapping[str, Any]) -> bool:
    return (
        record.get("prompt") is None
        and record.get("question") is None
        and isinstance(record.get("messages"), list)
    )


def _prompt_field(record: Mapping[str, Any], columns: Columns, where: str) -> tuple[str, Any]:
    """Returns the name and value of what is asked."""
    if columns.prompt:
        return columns.prompt, _field(record, columns.prompt, where)
    if record.get("prompt") is None and record.get("question") is not None:
        return "question", record["question"]
    return "prompt", record.get("prompt")


def _answer(record: Mapping[str, Any], columns: Columns, where: str, *, needed: bool) -> str | None:
    if columns.answer:
        value = _field(record, columns.answer, where)
        if value is None and not needed:
            return None
    else:
        value = record.get("answer")
        if not needed and (value is None or isinstance(value, list | dict)):
            return None  # a rule may read it from the record
    if needed and isinstance(value, list) and value and isinstance(value[-1], dict):
        # a conversation that ends in the answer
        value = read_messages(value, columns.answer or "answer", where)[-1]["content"]
    return _text(record, columns.answer or "answer", value, where)


def _text(record: Mapping[str, Any], name: str, value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        missing = value is None and name in ("prompt", "answer") and name not in record
        fault = "is missing" if missing else f"is {_kind(value)}"
        advice = did_you_mean(name, record) if missing else ""
        fix = "every record needs a prompt and an answer"
        if missing:
            fix += f" ({advice}; columns.{name}=… names another column)"
        elif isinstance(value, bool):
            fix = (
                "say how it is to be answered: write the word, e.g. yes and no, into the file, or by a "
                "function that task.transform names"
            )
        raise DataError(f"{name!r} {fault}", where=where, fix=fix)
    return str(value)


def _kind(value: Any) -> str:
    return "empty" if value == "" else "null" if value is None else f"a {type(value).__name__}"


def _field(record: Mapping[str, Any], name: str, where: str) -> Any:
    """Returns the value of a column, or of a field within one.

    Raises:
        DataError: there is none of that name.
    """
    if name in record:
        return record[name]
    value: Any = record
    for at, part in enumerate(parts := name.split(".")):
        known: Sequence[str] = ()
        if isinstance(value, Mapping):
            if part in value:
                value = value[part]
                continue
            known = [".".join([*parts[:at], str(key)]) for key in value]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
            continue
        tried = ".".join(parts[: at + 1])
        raise DataError(
            f"no column {tried!r}",
            where=where,
            fix=did_you_mean(tried, known) if known else f"a {type(value).__name__} has no fields",
        )
    return value


def plain_record(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Turns a record's values into those that messages between workers carry.

    Dates become texts, decimals numbers, NaN null, and whole numbers of more than 64 bits texts.

    Raises:
        DataError: a value is binary, or of another kind that JSON has not.
    """
    return {name: _plain(value, name, where) for name, value in row.items()}


def _plain(value: Any, name: str, where: str) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{name}.{k}", where) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, name, where) for v in value]
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime.date | datetime.time):  # and datetime
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    raise DataError(
        f"column {name!r} holds a {type(value).__name__}, which is no text, number, list or table",
        where=where,
        fix="leave it out when you write the file, or by a transform",
    )
