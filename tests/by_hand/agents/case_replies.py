"""What the replies of an outsider's case should be, compared with what its clients have read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from case_bodies import number_of
from case_play import CONTEXT, PlayedCase
from raw_client import RawExchange

FORMATS = {
    "date-time": r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)",
    "date": r"\d{4}-\d\d-\d\d",
    "time": r"\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)?",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[^@\s]+@[^@\s]+",
    "ipv4": r"\d{1,3}(\.\d{1,3}){3}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:.*",
}
SLACK_S = 2.0  # of a machine that others use, too
_PROMPT_USAGE = ("prompt_tokens", "input_tokens")
_ANSWER_USAGE = ("completion_tokens", "output_tokens")


def at_path(value: Any, path: str) -> Any:
    """Returns what stands at a path: "a.0.b", "a[type=x].b", also with dots in keys; None: nothing."""
    for part in re.findall(r"[^.\[\]]+(?:\[[^\]]+\])?", path):
        name, _, condition = part.partition("[")
        if isinstance(value, list) and name.isdigit():
            value = value[int(name)] if int(name) < len(value) else None
        elif isinstance(value, dict):
            value = value.get(name)
        else:
            return None
        if condition:
            key, _, wanted = condition.rstrip("]").partition("=")
            rows = [row for row in value or [] if str(row.get(key)) == wanted]
            value = rows[0] if rows else None
    return value


def reply_problems(
    case: Mapping[str, Any], made: PlayedCase, others: Mapping[str, PlayedCase]
) -> Iterator[str]:
    """Yields what is otherwise than ``expect`` says of replies."""
    expect = case["expect"]
    if not made.exchanges:
        yield f"nothing was asked: {made.error!r:.200}"
        return
    if "statuses" in expect:
        got = [e.status for e in made.exchanges]
        if got != expect["statuses"]:
            told = made.exchanges[-1].error.get("message", "")
            yield f"statuses are {got}, wanted {expect['statuses']}: {told!r:.150}"
    if "equal" in expect:
        counted, refused = made.exchanges
        numbers = re.findall(r"\d+", refused.error.get("message", ""))
        if not numbers or int(numbers[0]) != at_path(counted.answer, "input_tokens"):
            told = refused.error.get("message")
            yield f"count_tokens says {counted.answer!r:.60}, the refusal {told!r:.150}"
    last = made.exchanges[-1]
    choices = expect.get("any_of")
    if choices is not None:
        found = [list(_as_expected(choice, case, made, last, others)) for choice in choices]
        if all(found):
            shown = " / ".join(f"[{'; '.join(problems)}]" for problems in found)
            yield f"none of {len(found)} ways: {shown}"
    yield from _as_expected(expect, case, made, last, others)
    if expect.get("never") == 500 and any(e.status == 500 for e in made.exchanges):
        yield "status 500"
    if expect.get("others_delayed_ms_at_most", 1e9) < made.blocked_ms:
        yield f"the event loop was blocked for {made.blocked_ms:.0f} ms of its own time"
    if "beside" in case and (not made.beside or any(s != 200 for s in made.beside)):
        yield f"requests beside it: {made.beside[:20]}"


def _as_expected(
    expect: Mapping[str, Any],
    case: Mapping[str, Any],
    made: PlayedCase,
    got: RawExchange,
    others: Mapping[str, PlayedCase],
) -> Iterator[str]:
    message = str(got.error.get("message", ""))
    for name, wanted in (
        ("status", [expect.get("status")]),
        ("status_any_of", expect.get("status_any_of")),
    ):
        if name not in expect or wanted is None:
            continue
        for one in made.exchanges if name == "status_any_of" else [got]:
            status = "closed" if one.status is None else one.status
            if status not in wanted:
                told = message or one.text
                yield f"status {status}, wanted {wanted}: {told!r:.160}"
                break
    if "seconds_at_most" in expect and got.seconds > expect["seconds_at_most"] + SLACK_S:
        yield f"it took {got.seconds:.1f} s, wanted {expect['seconds_at_most']}"
    if "memory_mb_at_most" in expect and made.memory_mb > expect["memory_mb_at_most"]:
        yield f"memory grew by {made.memory_mb:.0f} MB"
    if expect.get("before_reading_all") and got.sent > 256 << 20:
        yield f"{got.sent} bytes were taken before it was refused"
    yield from _of_errors(expect, got, message)
    yield from _of_numbers(expect, case, made, got, message)
    yield from _of_bodies(expect, made, got)
    yield from _of_streams(expect, got)
    yield from _of_prompts(expect, made, others)


def _of_errors(expect: Mapping[str, Any], got: RawExchange, message: str) -> Iterator[str]:
    kind = got.headers.get("content-type", "")
    if "content_type" in expect and not kind.startswith(expect["content_type"]):
        yield f"content type {kind!r}"
    for name, wanted in expect.get("error", {}).items():
        field = name.removesuffix("_begins")
        found = got.error.get(field)
        is_right = str(found).startswith(wanted) if field != name else found == wanted
        if not is_right:
            yield f"error.{field} is {found!r:.80}, wanted {wanted!r}"
    for name, wanted in expect.get("envelope", {}).items():
        if at_path(got.answer, name) != wanted:
            yield f"{name} is {at_path(got.answer, name)!r:.80}"
    if "envelope_keys" in expect and not (
        {*expect["envelope_keys"]}
        <= {*(got.answer or {})}
        <= {*expect["envelope_keys"], "request_id"}
    ):
        yield f"keys of the body are {[*(got.answer or {})]}"
    if missing := [w for w in expect.get("message_has", ()) if w.lower() not in message.lower()]:
        yield f"the message has not {missing}: {message!r:.200}"
    some = expect.get("message_has_any")
    if some and not any(word.lower() in message.lower() for word in some):
        yield f"the message has none of {some}: {message!r:.200}"
    if bad := [w for w in expect.get("message_must_not_say", ()) if w.lower() in message.lower()]:
        yield f"the message has {bad}"
    if bad := [w for w in expect.get("message_must_not_match", ()) if re.search(w, message)]:
        yield f"the message matches {bad}"
    for name, wanted in expect.get("headers", {}).items():
        found = got.headers.get(name, "")
        is_right = wanted[4:] in found if wanted.startswith("has ") else found == wanted
        if not is_right:
            yield f"header {name} is {found!r}, wanted {wanted!r}"


def _of_numbers(
    expect: Mapping[str, Any],
    case: Mapping[str, Any],
    made: PlayedCase,
    got: RawExchange,
    message: str,
) -> Iterator[str]:
    groups: dict[str, str] = {}
    for pattern in expect.get("message_regex", ()):
        found = re.search(pattern, message)
        if found is None:
            yield f"the message does not match {pattern!r}: {message!r:.200}"
            return
        groups |= found.groupdict()
    for name, wanted in expect.get("numbers", {}).items():
        if name == "asked" and "answer" in groups:
            number = int(groups["prompt"]) + int(groups["answer"])
        else:
            number = int(groups[name])
        if name == "limit":
            right = {CONTEXT}
        elif re.fullmatch(r"[N0-9+*-]+", wanted):
            right = {number_of(wanted, CONTEXT)}
        else:
            right = _asked(case, made)
        if number not in right or (name == "asked" and number <= CONTEXT):
            yield f"{name} is {number}, wanted {wanted!r:.40}: {sorted(right)[:3]}"
    if "sampled" in expect and sum(e.num_sampled for e in made.ask.log) != expect["sampled"]:
        yield f"{sum(e.num_sampled for e in made.ask.log)} tokens were sampled"
    yield from _of_usage(expect, got)


def _asked(case: Mapping[str, Any], made: PlayedCase) -> set[int]:
    """Returns the numbers of tokens that may be told for a prompt which does not fit."""
    exact = [CONTEXT + 7] if "exact_numbers" in case else []
    known = (
        exact or [p for p in made.prompts if p is not None] or [len(c) for c in made.ask.contexts]
    )
    limits = {(case.get("body") or {}).get(n, 0) for n in ("max_tokens", "max_output_tokens")}
    if not known:  # what it should be can't be measured
        return set(range(CONTEXT + 1, 50 * CONTEXT))
    return {p + more for p in known for more in {0, 1, *limits}}


def _of_usage(expect: Mapping[str, Any], got: RawExchange) -> Iterator[str]:
    usage = at_path(got.answer, "usage") or {}
    prompt = next((usage[n] for n in _PROMPT_USAGE if n in usage), None)
    answer = next((usage[n] for n in _ANSWER_USAGE if n in usage), None)
    for name, wanted in expect.get("usage", {}).items():
        if name.endswith("at_most"):
            if answer is None or answer > wanted:
                yield f"usage of the answer is {answer}, wanted at most {wanted}"
        else:
            found = answer if name in ("answer", *_ANSWER_USAGE) else prompt
            if found != number_of(wanted, CONTEXT):
                yield f"usage {name} is {found}, wanted {wanted}"


def _of_bodies(expect: Mapping[str, Any], made: PlayedCase, got: RawExchange) -> Iterator[str]:
    body = got.answer
    for path, wanted in expect.get("body", {}).items():
        values = wanted if isinstance(wanted, list) else [wanted]
        if isinstance(wanted, str) and re.fullmatch(r"N[+-]\d+", wanted):
            values = [number_of(wanted, CONTEXT)]
        if at_path(body, path) not in values:
            yield f"{path} is {at_path(body, path)!r:.80}, wanted {wanted!r}"
    for path in expect.get("body_has", ()):
        if at_path(body, path) is None:
            yield f"{path} is missing"
    for path in expect.get("ints_or_null", ()):
        if not isinstance(at_path(body, path), int | None):
            yield f"{path} is {at_path(body, path)!r:.80}"
    for path, pattern in expect.get("regex", {}).items():
        if not re.search(pattern, str(at_path(body, path))):
            yield f"{path} is {at_path(body, path)!r:.80}, wanted {pattern!r}"
    if "sum" in expect:
        first, second, total = (at_path(body, path) for path in expect["sum"])
        if None in (first, second) or first + second != total:
            yield f"usage does not add up: {first} {second} {total}"
    rows = at_path(body, "choices") or []
    if "choices" in expect and len(rows) != expect["choices"]:
        yield f"{len(rows)} choices"
    if "indexes" in expect and [row.get("index") for row in rows] != expect["indexes"]:
        yield f"indexes are {[row.get('index') for row in rows]}"
    if "token_ids" in expect:
        ids = at_path(body, "choices.0.token_ids")
        if not made.ask.log or ids != list(made.ask.log[0].tokens[: len(ids or ())]) or not ids:
            yield f"token_ids are {ids!r:.80}"
    yield from _of_calls(expect, got)
    if "text" in expect:
        wanted = expect["text"]
        text = wanted if isinstance(wanted, str) else wanted["repeat"] * wanted["times"]
        if got.text != text:
            yield f"{len(got.text)} characters were read, wanted {len(text)}"
    for name in ("second_text", "second_text_begins_with"):
        if name in expect:
            text, wanted = made.exchanges[-1].text, expect[name]  # of the one after who left
            if not (text == wanted if name == "second_text" else text.startswith(wanted)):
                yield f"{name} is {text!r:.100}"
    stops = expect.get("if_text_hits_stop")
    if stops and not (
        at_path(body, "stop_reason") == stops["stop_reason"]
        and at_path(body, "stop_sequence") == stops["stop_sequence"]
        and stops["text_has_not"] not in got.text
    ):
        yield f"at the stop text: {body!r:.200}"


def _of_calls(expect: Mapping[str, Any], got: RawExchange) -> Iterator[str]:
    names = [name for name, _, _ in got.calls]
    match expect.get("calls"):
        case "none" if names:
            yield f"there are calls of {names}"
        case list(wanted) if names != wanted:
            yield f"calls are of {names}, wanted {wanted}: {got.text!r:.80}"
    for _, arguments, _ in got.calls:
        value = _json(arguments)
        if "arguments" in expect and value != expect["arguments"]:
            yield f"arguments are {arguments!r:.80}"
        if expect.get("arguments_valid") and not isinstance((value or {}).get("a"), int):
            yield f"arguments are {arguments!r:.80}"
    if expect.get("json_valid") and _json(got.text) is None:
        yield f"the text is no JSON: {got.text!r:.80}"
    if "text_in" in expect and got.text not in expect["text_in"]:
        yield f"the text is {got.text!r:.80}"
    if (name := expect.get("format_checked")) is not None:
        value = (_json(got.text) or {}).get("v", "")
        if not re.fullmatch(FORMATS[name], str(value)):
            yield f"{value!r:.80} is no {name}"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _of_streams(expect: Mapping[str, Any], got: RawExchange) -> Iterator[str]:
    chunks = [value for _, value in got.events if isinstance(value, dict)]
    kinds = [kind for kind, _ in got.events]
    if expect.get("no_event_before") and got.events:
        yield f"{len(got.events)} events came"
    for path, wanted in expect.get("last_chunk", {}).items():
        found = at_path(chunks[-1], path) if chunks else None
        is_int = isinstance(found, int) and (">" not in str(wanted) or found > 0)
        if not (is_int if str(wanted).startswith("int") else found == wanted):
            yield f"{path} of the last chunk is {found!r:.60}"
    for path, wanted in expect.get("other_chunks", {}).items():
        if any(at_path(chunk, path) != wanted for chunk in chunks[:-1]):
            yield f"{path} of other chunks is not {wanted}"
    if "ends_with" in expect and not got.body.rstrip().endswith(expect["ends_with"].encode()):
        yield f"the stream ends with {got.body[-40:]!r}"
    if "all_chunks" in expect:
        ids = {str(chunk.get("id")) for chunk in chunks}
        objects = {chunk.get("object") for chunk in chunks}
        if (
            len(ids) != 1
            or not min(ids).startswith("chatcmpl-")
            or objects != {expect["all_chunks"]["object"]}
        ):
            yield f"ids {ids}, objects {objects}"
    if expect.get("no_chunk_with_empty_choices") and not all(c.get("choices") for c in chunks):
        yield "a chunk has no choices"
    if "events" in expect and [k for k in kinds if k in expect["events"]] != expect["events"]:
        yield f"events are {kinds[:5]}"
    for path, wanted in expect.get("last_event", {}).items():
        if not chunks or at_path(chunks[-1], path) != wanted:
            yield f"{path} of the last event is not {wanted}"
    for name in ("event", "last"):
        for kind, fields in expect.get(name, {}).items():
            rows = [value for k, value in got.events if k == kind]
            for path in fields:
                found = at_path(rows[-1], path) if rows else None
                if not isinstance(found, int) or ("input" in path and found == 0):
                    yield f"{path} of {kind} is {found!r}"


def _of_prompts(
    expect: Mapping[str, Any], made: PlayedCase, others: Mapping[str, PlayedCase]
) -> Iterator[str]:
    contexts = made.ask.contexts
    prompt = made.ask.text(contexts[0]) if contexts else ""
    if missing := [word for word in expect.get("prompt_has", ()) if word not in prompt]:
        yield f"the prompt has not {missing}"
    if found := [word for word in expect.get("prompt_has_not", ()) if word in prompt]:
        yield f"the prompt has {found}"
    other = expect.get("same_prompt_as")
    if other is not None and contexts[:1] != others[other].ask.contexts[:1]:
        yield f"the prompt is not that of {other}"
    if "same_prompt_as_without" in expect and (not contexts or contexts[0] != made.without):
        yield f"the prompt is not that without {expect['same_prompt_as_without']}"
