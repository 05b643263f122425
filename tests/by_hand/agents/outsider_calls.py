"""Are tool calls read as somebody wrote them down who has not read our readers? By hand; three minutes.

    python tests/by_hand/agents/outsider_calls.py [--only TEXT]  writes results/outsider_calls.json

Plays outsider/tool_calls.jsonl and hostile_calls.jsonl (OUTSIDER_CALLS.md) against the form that the
agents' endpoint takes for the family: by a chat template with the marks that the family writes, else by a
renderer of the package. Hostile texts are read in a child, which is ended when it takes too long; its
processor time counts. That the event loop goes on meanwhile is not looked at: the slowest texts are told.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "support"), str(HERE)]
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from by_hand import HandCheck  # noqa: E402
from chat_families import FAMILIES  # noqa: E402
from outsider_tables import (  # noqa: E402
    Outcome,
    cases,
    ends_after,
    failed,
    joined,
    not_played,
    of_result,
    passed,
    tell,
)
from package_families import OF_PACKAGE  # noqa: E402

from realsys.api.errors import RealsysError  # noqa: E402
from realsys.rollout.runners.agent_arguments import ConversationArguments  # noqa: E402
from realsys.rollout.runners.endpoint_agent import session_settings  # noqa: E402

LONGEST_S = 30.0  # that one hostile text may take, wall time, on a machine that is busy
TIMED_S = 0.02  # below this nothing is said of how time grows
TOOLS = json.loads((HERE / "outsider" / "tools.json").read_text())
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}

# The table's name of a family → that of the package renderers.
RENDERERS = {
    "qwen3": "qwen3",
    "qwen3-coder": "qwen3.5",
    "qwen3.5": "qwen3.5",
    "nemotron-3": "nemotron-3",
    "llama-3.1": "llama-3",
    "deepseek-v3": "deepseek-v3",
    "deepseek-r1": "deepseek-r1",
    "deepseek-v4": "deepseek-v4",
    "glm-4.5": "glm-4.5",
    "glm-5": "glm-5",
    "hy3": "hy3",
    "kimi-k2": "kimi-k2",
    "kimi-k2-thinking": "kimi-k2",
    "minimax-m2": "minimax-m2",
    "gemma-4": "gemma4",
    "gpt-oss": "gpt-oss",
}
# What stands in templates besides the calls and thoughts that they write.
_LLAMA = "<|start_header_id|> <|end_header_id|> <|eot_id|>"
TURNS = {
    **dict.fromkeys(("llama-3.1", "llama-3.2"), f'{_LLAMA} "parameters": '),
    **dict.fromkeys(("functionary-3.1", "functionary-3.2", "xlam-2"), _LLAMA),
}
TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_MARKS = re.compile(r"<\|channel>thought|<[^<>]*>|\[/?[A-Z_]+\]")


# ---- the one place that knows how the endpoint reads ---------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a form makes of an answer. ``arguments`` of calls are values of JSON."""

    calls: list[dict[str, Any]]
    text: str
    thoughts: str


@cache
def form_of(family: str) -> Any:
    """Returns the form that the endpoint takes for a family of the table."""
    written = " ".join(sorted(_written().get(family, ())))
    template = f"{{# {TURNS.get(family, '')} {written} #}}{TEMPLATE}"
    named = RENDERERS.get(family, "")
    stands_in = OF_PACKAGE[named] if named in OF_PACKAGE else FAMILIES["chatml"]
    tokenizer = deepcopy(stands_in.tokenizer)
    tokenizer.chat_template = template
    host: Any = SimpleNamespace(tokenizer=tokenizer, end_ids=frozenset({0}), folder=HERE)
    form = session_settings(ConversationArguments(), host).form
    if form.syntax is None and named in OF_PACKAGE:
        with suppress(RealsysError):
            return session_settings(ConversationArguments(renderer=named), host).form
    return form


def read(form: Any, text: str, *, thinking: bool) -> Reading:
    """Reads an answer as the endpoint does, where all tools of tools.json are offered."""
    answer = form.parse(text, thinking=thinking, tools=True, schemas=SCHEMAS)
    calls = [{"name": c.name, "arguments": strict_json(c.arguments)} for c in answer.calls]
    for said in (answer.content, answer.reasoning, *(c.name + c.arguments for c in answer.calls)):
        said.encode()  # what can't be written as UTF-8 raises
    return Reading(calls=calls, text=answer.content, thoughts=answer.reasoning)


def _written() -> dict[str, set[str]]:
    """Returns what each family's own template must write: its plainest calls, with thoughts."""
    written: dict[str, set[str]] = {}
    for case in cases("tool_calls"):
        if case["id"].rsplit("/", 1)[-1] in ("one", "thoughts_before"):
            written.setdefault(case["family"], set()).add(joined(case["text"]))
    return written


def strict_json(text: str) -> Any:
    """Reads JSON without NaN and infinite numbers.

    Raises:
        ValueError: there are some.
    """
    value = json.loads(text, parse_constant=_refuse)
    for number in _numbers(value):
        if not math.isfinite(number):
            raise ValueError(f"{number} is no number of JSON")
    return value


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    for inner in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _numbers(inner)


# ---- calls ---------------------------------------------------------------------------------------


def play_call(case: dict[str, Any]) -> Outcome:
    """Reads an answer of the table and compares."""
    form = form_of(case["family"])
    group = f"{case['family']} by {form.name}"
    text = joined(case["text"])
    try:
        reading = read(form, text, thinking=case["thinking_open"])
    except Exception as error:  # nothing may be raised
        return failed(case, f"raises {type(error).__name__}: {error}", group=group)
    differences = [
        differs
        for expected in (case["expect"], *case.get("expect_or", ()))
        for differs in [difference(expected, reading, text)]
    ]
    if not all(differences):
        return passed(case, group=group)
    lost = "" if case["expect"]["calls"] or not reading.calls else "calls are invented: "
    got = f"{differences[0]}: {lost}{reading.calls} text {reading.text[:120]!r}"
    return failed(case, f"{got} thoughts {reading.thoughts[:120]!r}", group=group)


def difference(expected: Mapping[str, Any], got: Reading, text: str) -> str:
    """Returns in what a reading differs; empty: in nothing."""
    if len(got.calls) != len(expected["calls"]):
        return f"{len(got.calls)} calls"
    for wanted, call in zip(expected["calls"], got.calls, strict=True):
        if wanted["name"] != call["name"]:
            return "name"
        if "arguments" in wanted and not same(_value(wanted["arguments"]), call["arguments"]):
            return "arguments"
    if "text" in expected and expected["text"].strip() != got.text.strip():
        return "text"
    if "thoughts" in expected and expected["thoughts"].strip() != got.thoughts.strip():
        return "thoughts"
    kept = f"{got.text} {got.thoughts}"
    if not expected["calls"] and "text" not in expected:
        words = Counter(re.findall(r"\w+", _MARKS.sub(" ", text)))
        if lost := words - Counter(re.findall(r"\w+", kept)):
            return f"lost text {[*lost][:4]}"
    return ""


def same(a: Any, b: Any) -> bool:
    """Tells whether values are equal and of the same types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        if "$text" in value:
            return joined(value["$text"])
        if "$int" in value:
            return int(joined(value["$int"]))
        return {key: _value(inner) for key, inner in value.items()}
    return [_value(inner) for inner in value] if isinstance(value, list) else value


# ---- hostile texts -------------------------------------------------------------------------------


def sized(text: Any, *, half: bool) -> str:
    """Returns a hostile text, or the one of which it is the double."""
    parts = [dict(part) for part in text]
    for part in parts:
        if half and part["times"] > 1:
            part["times"] //= 2
    return joined(parts)


def child(pipe: Connection) -> None:
    """Reads texts as it is told, until the pipe ends; answers processor time and what was read."""
    with suppress(EOFError):
        while True:
            family, case, half = pipe.recv()
            form, text = form_of(family), sized(case["text"], half=half)
            begun = time.process_time()
            try:
                answer = form.parse(
                    text, thinking=case["thinking_open"], tools=True, schemas=SCHEMAS
                )
                seconds = time.process_time() - begun
                reading = read(form, text, thinking=case["thinking_open"])
                problem = "" if len(reading.calls) == len(answer.calls) else "is read in two ways"
                pipe.send((seconds, len(reading.calls), problem))
            except Exception as error:  # nothing may be raised
                seconds = time.process_time() - begun
                pipe.send((seconds, 0, f"raises {type(error).__name__}: {str(error)[:150]}"))


class Child:
    """A process that reads texts, and is ended when one takes too long."""

    def __init__(self) -> None:
        self._process: Any = None

    def read(self, family: str, case: dict[str, Any], *, half: bool) -> tuple[float, int, str]:
        """Returns processor seconds, the number of calls, and what is wrong."""
        if self._process is None:
            context = get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=child, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
            self._ask("qwen3", {"text": [], "thinking_open": False}, half, 300.0)  # imports
        return self._ask(family, case, half, LONGEST_S)

    def _ask(
        self, family: str, case: dict[str, Any], half: bool, limit_s: float
    ) -> tuple[float, int, str]:
        self._pipe.send((family, case, half))
        try:
            if self._pipe.poll(limit_s):
                said: tuple[float, int, str] = self._pipe.recv()
                return said
        except EOFError:
            self.end()
            return 0.0, 0, "ends the process"
        self.end()
        return limit_s, 0, f"takes more than {limit_s:.0f} s"

    def end(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join(10)
            self._process = None


def families_of_forms() -> dict[str, list[str]]:
    """Returns a family of the table for each of its names of forms; ``all``: one for each form of ours."""
    families: dict[str, list[str]] = {}
    ours: dict[str, str] = {}
    for case in cases("tool_calls"):
        families.setdefault(case["form"], [case["family"]])
        ours.setdefault(form_of(case["family"]).name, case["family"])
    return {**families, "all": list(ours.values())}


def play_hostile(
    case: dict[str, Any],
    families: Mapping[str, list[str]],
    reader: Child,
    seconds: dict[str, float],
) -> Outcome:
    """Reads a text, and one half as long, in each of the forms that the table names.

    Args:
        seconds: gets how long the slowest of them took.
    """
    expect, problems = case["expect"], []
    chosen = list(dict.fromkeys(f for form in case["forms"] for f in families.get(form, ())))
    if not chosen:
        return not_played(case, "no family has this form")
    for family in chosen:
        name = form_of(family).name
        full_s, calls, problem = reader.read(family, case, half=False)
        seconds[case["id"]] = round(max(full_s, seconds.get(case["id"], 0.0)), 3)
        if problem:
            problems.append(f"{family} by {name} {problem}")
            continue
        if calls > expect["calls_at_most"]:
            problems.append(f"{family} by {name} reads {calls} calls")
        if full_s > expect["seconds_at_most"]:
            problems.append(f"{family} by {name} takes {full_s:.2f} s")
        if (
            full_s > TIMED_S
            and (ratio := _ratio(family, case, reader)) > (expect["twice_as_long_takes_at_most"])
        ):
            problems.append(f"{family} by {name} takes {ratio:.1f} times as long as for half")
    return failed(case, "; ".join(problems)) if problems else passed(case)


def _ratio(family: str, case: dict[str, Any], reader: Child) -> float:
    """Returns how much longer a text takes than half of it, the shortest of three times each."""
    full = min(reader.read(family, case, half=False)[0] for _ in range(3))
    half = min(reader.read(family, case, half=True)[0] for _ in range(3))
    return full / max(half, 1e-6) if full > TIMED_S else 0.0


def main() -> int:
    """Returns 0 if all cases are as the tables have them, or judged."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases with this in their id; writes no result")
    options = parser.parse_args()
    check = HandCheck(__file__)
    ends_after(3600)
    calls = [play_call(case) for case in cases("tool_calls") if options.only in case["id"]]
    calls.sort(key=lambda outcome: not form_of(outcome.id.split("/")[0]).syntax)  # unread ones last
    told = tell("tool_calls", calls, with_problems=bool(options.only))
    families, reader = families_of_forms(), Child()
    hostile, seconds = [], dict[str, float]()
    try:
        for case in cases("hostile_calls"):
            if options.only in case["id"]:
                hostile.append(play_hostile(case, families, reader, seconds))
    finally:
        reader.end()
    told_hostile = tell("hostile_calls", hostile, with_problems=bool(options.only))
    slowest = dict(sorted(seconds.items(), key=lambda pair: -pair[1])[:5])
    sys.stdout.write(f"families that are read: {of_read(calls)}\nslowest texts, s: {slowest}\n")
    if options.only:
        return 0
    return check.write(
        "tool calls as an outsider wrote them down, and texts that were made to break readers",
        [*told_hostile.problems, *told.problems],
        of_read_families=of_read(calls),
        tool_calls=of_result(told),
        hostile_calls={**of_result(told_hostile), "slowest_s": slowest},
    )


def of_read(calls: list[Outcome]) -> dict[str, int]:
    """Counts the cases of families for which there is a form with calls, judged ones as failed."""
    return dict(
        Counter(
            f"{'certain' if call.certain else 'not certain'}, {call.status}"
            for call in calls
            if form_of(call.id.split("/")[0]).syntax
        )
    )


if __name__ == "__main__":
    sys.exit(main())
