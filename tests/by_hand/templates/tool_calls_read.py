"""Which reader reads which family's tool calls, and what hostile text costs it? By hand; a few minutes.

    python tests/by_hand/templates/tool_calls_read.py

writes results/tool_calls_read.json, of which `tool_calls_table.py --write` makes two tables of
docs/agents_endpoint.md. Cases are those of tests/support/call_cases.py, hostile texts those of
tests/unit/house/test_policy_texts.py, of a megabyte each. Tokenizers are ours, with the families' marks.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "unit" / "house")]

from by_hand import HandCheck  # noqa: E402
from call_cases import (  # noqa: E402
    ARGUMENTS,
    NAME,
    SCHEMAS,
    TOOLS,
    CallCase,
    cases,
    package_of,
)
from package_families import OF_PACKAGE  # noqa: E402
from test_policy_texts import BLANK, INNER, MARKS, Hostile, repeated  # noqa: E402

from realsys.rollout.conversation.answer_forms import ANSWER_FORMS, AnswerForm  # noqa: E402
from realsys.rollout.conversation.form_choice import choose_form, form_of_family  # noqa: E402
from realsys.rollout.conversation.forms.family_calls import FAMILY_CALLS  # noqa: E402

MEGABYTE = 1_000_000
BARE = (
    4_000,
    16_000,
)  # characters that the package alone gets: some families need its time squared
MOST_RATIO, FLOOR_S = 3.0, 0.02
MOST_S = 3.0  # that a megabyte may take
Calls = list[tuple[Any, Any]]


def verdict(case: CallCase, found: Callable[[], tuple[str, Calls]]) -> str:
    """Returns "right", or what is wrong with what a reader found of a case: content and calls."""
    try:
        content, calls = found()
    except Exception as error:  # the package may raise anything
        return f"raises {type(error).__name__}"
    if not case.calls:
        return _of_broken(calls)
    if len(calls) != case.calls:
        return f"{len(calls)} of {case.calls} calls" if calls else "not read"
    if calls != [(NAME, ARGUMENTS)] * case.calls:
        return "read otherwise"
    return "right" if case.content in (None, content.strip()) else "other content"


def _of_broken(calls: Calls) -> str:
    if not calls:
        return "right"
    values = calls[0][1] if isinstance(calls[0][1], dict) else {}
    days = values.get("days")
    if days == "NaN":
        return "right"  # a text
    if days is not None and days != days:
        return "NaN passes"
    return "the last one passes" if days == ARGUMENTS["nights"] else "called"


def by_form(form: AnswerForm, case: CallCase) -> tuple[str, Calls]:
    """Returns what a form of ours, or the package's behind its bounds, reads."""
    answer = form.parse(case.text, thinking=False, tools=True, schemas=SCHEMAS)
    return answer.content, [(call.name, json.loads(call.arguments)) for call in answer.calls]


def by_package(family: str, case: CallCase) -> tuple[str, Calls]:
    """Returns what the package alone calls OK."""
    tokens = OF_PACKAGE[family].tokenizer.encode(case.text, add_special_tokens=False)
    parsed = package_of(family).parse_response(tokens, tools=TOOLS)
    good = [call for call in parsed.tool_calls if str(call.status) == "ok"]
    return parsed.content, [(call.name, call.arguments) for call in good]


def judged(family: str, form: AnswerForm) -> dict[str, Any]:
    """Returns a family's row: each case by ours, by the package, and by what is used."""
    ours = ANSWER_FORMS.get(form_of_family(family))
    return {
        "read_by": form.name,
        "cases": {
            name: {
                "ours": "no form" if ours is None else verdict(case, partial(by_form, ours, case)),
                "package": verdict(case, partial(by_package, family, case)),
                "used": verdict(case, partial(by_form, form, case)),
            }
            for name, case in cases(family).items()
        },
    }


def hostile(form: AnswerForm, pieces: tuple[Hostile, ...], closing: str) -> dict[str, Any]:
    """Returns what a megabyte of each piece costs, and what half of it does; ``closing``: of a block."""
    slowest, ratio, invented, is_json = 0.0, 0.0, 0, True
    for piece in (*BLANK, *pieces):
        few, half, whole = (
            _closed(repeated(piece, n), closing) for n in (600, MEGABYTE // 2, MEGABYTE)
        )
        half_s, whole_s = (_seconds(form, text) for text in (half, whole))
        slowest = max(slowest, whole_s)
        ratio = max(ratio, whole_s / max(half_s, FLOOR_S))
        calls = form.parse(whole, thinking=False, tools=True).calls
        is_json &= not any("NaN" in c.arguments or "Infinity" in c.arguments for c in calls)
        if calls and not form.parse(few, thinking=False, tools=True).calls:
            invented += 1
    return {
        "pieces": len(pieces) + len(BLANK),
        "slowest_s": round(slowest, 3),
        "doubled": round(ratio, 2),
        "calls_invented": invented,
        "no_nan": is_json,
    }


def _closed(text: str, closing: str) -> str:
    block = text[:60_000] + closing
    return block * max(1, len(text) // len(block)) if closing else text


def _seconds(form: AnswerForm, text: str) -> float:
    least = float("inf")
    for _ in range(2):
        begin = time.thread_time()
        form.parse(text, thinking=False, tools=True)
        form.safe_prefix(text, thinking=False, tools=True)
        least = min(least, time.thread_time() - begin)
    return least


def package_alone(family: str, pieces: tuple[Hostile, ...], closing: str) -> dict[str, Any]:
    """Returns how many times as long the package alone takes for four times the text."""
    worst, slowest = 0.0, 0.0
    for piece in pieces:
        spent = []
        for size in BARE:
            text = repeated(piece, size) + closing
            tokens = OF_PACKAGE[family].tokenizer.encode(text, add_special_tokens=False)
            begin = time.thread_time()
            try:
                package_of(family).parse_response(tokens, tools=TOOLS)
            except Exception:
                pass
            spent.append(time.thread_time() - begin)
        worst = max(worst, spent[1] / max(spent[0], 0.001))
        slowest = max(slowest, spent[1])
    return {"four_times": round(worst, 1), "slowest_s": round(slowest, 3)}


def main() -> int:
    """Returns 0 where what is used reads all cases, and all hostile texts in linear time."""
    check = HandCheck(__file__)
    problems: list[str] = []
    families: dict[str, Any] = {}
    costs: dict[str, Any] = {}
    for family, of in OF_PACKAGE.items():
        form = choose_form("", of.tokenizer, renderer=family, template="")
        families[family] = judged(family, form)
        problems += [
            f"{family}: {case}: {said['used']}"
            for case, said in families[family]["cases"].items()
            if said["used"] != "right"
        ]
        closing = (
            INNER.get(family, "") + FAMILY_CALLS[family].closing if family in FAMILY_CALLS else ""
        )
        if form.name not in costs:
            marks = MARKS[family.removesuffix(".5") if family in FAMILY_CALLS else form.name]
            pieces = (*marks, cases(family)["one call"].text)
            costs[form.name] = hostile(form, pieces, "")
            if closing:
                closed = hostile(form, pieces, closing)
                costs[form.name] = {
                    "pieces": costs[form.name]["pieces"] * 2,
                    "slowest_s": max(costs[form.name]["slowest_s"], closed["slowest_s"]),
                    "doubled": max(costs[form.name]["doubled"], closed["doubled"]),
                    "calls_invented": costs[form.name]["calls_invented"] + closed["calls_invented"],
                    "no_nan": costs[form.name]["no_nan"] and closed["no_nan"],
                }
            costs[form.name]["package_alone"] = package_alone(family, pieces, closing)
    for name, cost in costs.items():
        if cost["doubled"] > MOST_RATIO or cost["slowest_s"] > MOST_S:
            problems.append(f"{name}: {cost['slowest_s']} s, doubled {cost['doubled']}")
        if cost["calls_invented"] or not cost["no_nan"]:
            problems.append(f"{name}: calls in hostile text: {cost}")
    return check.write(
        f"tool calls of {len(families)} families as renderers {version('renderers')} writes them",
        problems,
        families=families,
        hostile=costs,
    )


if __name__ == "__main__":
    sys.exit(main())
