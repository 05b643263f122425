"""Fields that requests of all dialects have, and the errors that name them (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from realsys.api.errors import DataError, did_you_mean
from realsys.rollout.conversation.chat_messages import ToolChoice

T = TypeVar("T")

MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_REPLIES = 16
MAX_STOPS = 64
Number = int | float
# A text, or parts of one
Content = str | list[dict[str, Any]]
_SURROGATE = re.compile("[\ud800-\udfff]")
_LEFT_OUT_AS_NULL = ("description", "parameters", "strict")
_TEXT_PARTS = ("text", "input_text", "output_text")
# Type of a part that is no text → what it is
PART_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
}
LEFT_OUT = "[{kind} left out]"
HOW_TO_DROP = "have it left out by task.agent_args.unserved=drop (realsys serve --unserved drop)"


class SamplingFields(msgspec.Struct, kw_only=True):
    """What a client may write about sampling, under the same names in all dialects."""

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    min_tokens: int | None = None
    seed: int | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    length_penalty: Number | None = None
    use_beam_search: bool | None = None
    repeat_penalty: Number | None = None
    typical_p: Number | None = None
    tfs_z: Number | None = None
    top_a: Number | None = None
    top_n_sigma: Number | None = None
    mirostat: int | None = None
    dry_multiplier: Number | None = None
    xtc_probability: Number | None = None
    dynatemp_range: Number | None = None


class ContentPart(msgspec.Struct):
    """A part of a content; which of the fields it has depends on its type."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionSpec(msgspec.Struct):
    """The fields of a function tool that are checked."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


def refused(what: str, *, where: str, fix: str) -> DataError:
    """Returns the error of a request that can't be served. ``where``: the field's path."""
    return DataError(what, where=where, fix=fix)


def decoded(body: bytes, kind: type[T]) -> T:
    """Decodes the body of a request; fields that ``kind`` doesn't have are ignored."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(error, "") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if (where := half_character(body)) is not None:
            raise refused(
                "half of a surrogate pair stands there, which is no character",
                where=where or "body",
                fix="cut texts between whole characters, and replace broken ones with U+FFFD",
            ) from None
        what = f"the body is no JSON: {error}"
        if (place := _not_utf8(body)) is not None:
            what = f"byte {body[place]:#x} at place {place} of the body is no UTF-8"
        raise refused(what, where="body", fix="send one JSON object in UTF-8") from None


def _not_utf8(body: bytes) -> int | None:
    """Returns the place of the first byte that is none of UTF-8's; None: there is none."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def half_character(body: bytes) -> str | None:
    """Returns the path of a text with half of a surrogate pair, by which a body is no JSON to us; None:
    there is none, or the body is no JSON at all.
    """
    try:
        steps = _steps_to_half(json.loads(body))
    except (ValueError, RecursionError):
        return None
    return None if steps is None else "".join(steps).lstrip(".")


def _steps_to_half(value: object) -> list[str] | None:
    """Returns the way to the first one; paths to all other texts would be as long as the names in them."""
    if isinstance(value, str):
        return [] if _SURROGATE.search(value) else None
    if isinstance(value, dict):
        if any(_SURROGATE.search(name) for name in value):
            return []
    elif not isinstance(value, list):
        return None
    for step, part in value.items() if isinstance(value, dict) else enumerate(value):
        if (rest := _steps_to_half(part)) is not None:
            return [f"[{step}]" if isinstance(step, int) else f".{step}", *rest]
    return None


def known_fields(body: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuses a field that would be ignored, though a client relies on it."""
    for name in body:
        if name not in known:
            raise refused(
                f"there is no field {name!r}",
                where=name if name.isidentifier() else "body",
                fix=did_you_mean(name, known),
            )


def converted(value: object, kind: type[T], where: str) -> T:
    """Converts a decoded part of the body, at the path ``where``."""
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(error, where) from None
    except RecursionError:
        raise nested_too_deeply(where) from None


def _wrong_field(error: msgspec.ValidationError, prefix: str) -> DataError:
    what, _, path = str(error).partition(" - at `$")
    where = (prefix + path.removesuffix("`")).lstrip(".").replace("[...]", ".*")
    return refused(
        what.replace("`", "'").lower(),
        where=where or "body",
        fix="send the field as the API has it",
    )


def nested_too_deeply(where: str) -> DataError:
    """Returns the error of values inside of values that no reader follows to the end."""
    return refused("nested too deeply", where=where, fix="send flatter values")


def bounded(values: Sequence[T] | None, most: int, where: str) -> Sequence[T]:
    """Returns the values of a list, which may be absent; refuses more than ``most``."""
    if values is not None and len(values) > most:
        raise refused(
            f"{len(values)} entries, at most {most} are allowed", where=where, fix="send fewer"
        )
    return values or ()


def positive(value: int | None, where: str, most: int | None = None) -> int | None:
    """Returns an optional number; refuses one below 1 or above ``most``."""
    if value is not None and (value < 1 or (most is not None and value > most)):
        allowed = "1 or more" if most is None else f"1 to {most}"
        raise refused(
            f"{value} is not allowed", where=where, fix=f"send {allowed}, or leave it out"
        )
    return value


def compact_json(value: object, where: str) -> str:
    """Returns JSON text without spaces, keys in their order."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise nested_too_deeply(where) from None


def joined_text(content: Content | None, where: str) -> str:
    """Returns the text of a content; parts are joined without a separator. Refuses all but text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, raw in enumerate(content):
        part = converted(raw, ContentPart, f"{where}[{i}]")
        if part.type in _TEXT_PARTS and part.text is not None:
            texts.append(part.text)
        elif part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
        elif part.type in (*_TEXT_PARTS, "refusal"):
            raise refused(
                f"a part of type {part.type!r} without its text",
                where=f"{where}[{i}]",
                fix="add it",
            )
        else:
            raise unreadable_part(part.type, f"{where}[{i}]")
    return "".join(texts)


def unreadable_part(kind: str, where: str) -> DataError:
    """Returns the error of a part, or block, that is no text."""
    drop = f", or {HOW_TO_DROP}" if kind in PART_KINDS else ""
    return refused(
        f"a part of type {kind!r:.60} can't be read",
        where=where,
        fix=f"send text: the policy reads no pictures, sounds or files{drop}",
    )


def unserved_tool(kind: object, where: str, form: str) -> DataError:
    """Returns the error of a tool that is no function. ``form``: what may be sent instead."""
    drop = f", or {HOW_TO_DROP}" if isinstance(kind, str) else ""
    return refused(f"a tool of type {kind!r:.60} is not served", where=where, fix=form + drop)


def sampling_of(fields: SamplingFields) -> dict[str, Any]:
    """Returns what the client wrote about sampling, as it was written."""
    given = ((name, getattr(fields, name)) for name in SamplingFields.__struct_fields__)
    return {name: value for name, value in given if value is not None}


def stop_texts(stop: str | list[str] | None, where: str) -> tuple[str, ...]:
    """Returns the stop texts; an empty one stops nothing and is left out."""
    texts = [stop] if isinstance(stop, str) else bounded(stop, MAX_STOPS, where)
    return tuple(text for text in texts if text)


def function_tool(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a function tool in the form of Chat Completions, its name and types checked."""
    if not function.get("name") or not converted(function, FunctionSpec, where).name:
        raise refused("a tool without a name", where=f"{where}.name", fix="name it")
    # Clients write null for what they leave out
    given = {k: v for k, v in function.items() if v is not None or k not in _LEFT_OUT_AS_NULL}
    return {"type": "function", "function": given}


def unserved_choice(choice: object, fix: str) -> DataError:
    """Returns the error of a ``tool_choice`` that is none of the API's, or of a tool that isn't served."""
    return refused(f"the choice {choice!r:.100} is not served", where="tool_choice", fix=fix)


def checked_choice(
    choice: ToolChoice, name: str, tools: Sequence[Mapping[str, Any]], where: str
) -> tuple[ToolChoice, str]:
    """Returns the choice and the tool's name; refuses to require a tool that isn't offered."""
    offered = [tool["function"]["name"] for tool in tools]
    if choice in (ToolChoice.REQUIRED, ToolChoice.ONE) and not offered:
        raise refused("a tool is required, but none is offered", where=where, fix="send tools")
    if choice is ToolChoice.ONE and name not in offered:
        raise refused(f"tool {name!r} is not among tools", where=where, fix="name one of the tools")
    return choice, name


def schema_of(format: Mapping[str, Any] | None, where: str) -> Mapping[str, Any] | None:
    """Returns the JSON schema of a format ``{"type": …, "schema": …}``; None: free text."""
    kind = "text" if format is None else format.get("type", "text")
    if format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema" and isinstance(schema := format.get("schema"), dict):
        return schema
    if kind == "json_schema":
        raise refused(
            "a JSON schema is missing", where=f"{where}.schema", fix="send it as an object"
        )
    raise refused(
        f"format {kind!r} is not served",
        where=f"{where}.type",
        fix="use text, json_object or json_schema",
    )


def response_schema(format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Returns the JSON schema of ``response_format`` as Chat Completions has it; None: free text."""
    if format is not None and format.get("type") == "json_schema":
        inner = format.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        return schema_of({"type": "json_schema", "schema": schema}, "response_format.json_schema")
    return schema_of(format, "response_format")


def no_top_logprobs(top: int | None, where: str) -> None:
    """Refuses alternatives to the sampled tokens: the log-probs of the sampled ones alone are known."""
    if top:
        raise refused(
            f"{top} alternatives a token are not known", where=where, fix="send 0, or leave it out"
        )


def retries_and_key(headers: Mapping[str, str]) -> tuple[int, str]:
    """Returns how often the client sent this request before, and its idempotency key."""
    by_name = {name.lower(): value for name, value in headers.items()}
    count = by_name.get("x-stainless-retry-count", "").strip()
    retries = int(count) if count.isascii() and count.isdecimal() and len(count) < 10 else 0
    return retries, by_name.get("idempotency-key", "").strip()


def tokens_of_bytes(text: str) -> list[int] | None:
    """Returns the bytes of a token's text; None: the text is a part of a letter and hides them."""
    return None if "\ufffd" in text else list(text.encode("utf-8", "surrogatepass"))
