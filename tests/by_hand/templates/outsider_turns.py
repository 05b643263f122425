"""Are turns found as somebody wrote them down who read ten templates, and not our code? By hand; seconds.

    python tests/by_hand/templates/outsider_turns.py [--templates FOLDER]

writes results/outsider_turns.json, of which `templates_page.py --write` makes a part of
docs/chat_templates.md. Compares contexts and targets of `TurnReader` with `outsider/expected.json` (its
README.md says how that was made). Without a folder of templates it fetches them, by pip.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUTSIDER = HERE / "outsider"
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "support"), str(OUTSIDER)]

from by_hand import HandCheck  # noqa: E402
from reference import FAMILIES, Family, Refused, normal  # noqa: E402
from tally import Tally  # noqa: E402

from realsys.api.errors import DataError  # noqa: E402
from realsys.data.sources.assistant_turns import AssistantTurn, TurnReader, any_of  # noqa: E402
from realsys.data.sources.record_shape import read_messages  # noqa: E402

# What looks like a token of its own in these templates: no tokenizer is at hand.
MARKS = re.compile(r"<\|?[^\s<>{}']*?\|?>|<｜[^｜]*｜>|\[[A-Z_/]+\]|\]~!?b\[|\[e~\[|\]~b\]")


def judged(
    family: Family, table: dict[str, Any], tools: list[Any]
) -> tuple[dict[str, Any], list[str]]:
    """Counts turns by what became of them, and lists those that are otherwise than the table has them."""
    marks = any_of({*MARKS.findall(family.source.read_text()), *family.tokens.values(), "\n"})
    tally = Tally(marks)
    counts: Counter[str] = Counter()
    wrong = []
    for chat in table["conversations"]:
        told = tools if chat.get("tools") else None

        def render(messages: Any, opens: bool, chat: Any = chat, told: Any = told) -> str:
            try:
                return family.render_as_is([*messages], told, chat.get("kwargs") or {}, opens)
            except Refused as error:
                raise DataError(str(error)[:200], where=family.name, fix="") from error

        reader = TurnReader(render, marks=marks, last_mark=family.tokens["eos_token"])
        messages = read_messages(normal(chat["messages"]), "messages", chat["name"])
        turns: dict[int, AssistantTurn] = {}
        why = ""
        for turn in chat["turns"]:
            try:
                found = turns[turn["message"]] = reader.read(messages, turn["message"])
            except DataError as error:
                found, why = None, why or error.what.partition(": ")[2]
            if "target" not in turn or found is None:
                is_right = found is None and "target" not in turn
                outcome = "refused"
            else:
                is_right = any(
                    found.target == target and context in (None, found.context)
                    for context, target in readings(turn)
                )
                outcome = "trained"
            counts[outcome if is_right else "wrong"] += 1
            if not is_right:
                wrong.append(f"{family.name}: {chat['name']}, message {turn['message']}")
        if why:
            tally.refused(why)
        else:
            tally.taken(messages, turns)
    return tally.found() | {"as_the_outsider_wrote": dict(counts)}, wrong


def readings(turn: dict[str, Any]) -> list[tuple[str | None, str]]:
    """Contexts and targets that are right; None: a context that differs in its end."""
    others = [
        (None if "context_ends" in also or "context" in also else turn["context"], also)
        for also in turn.get("also") or []
    ]
    return [
        (turn["context"], turn["target"]),
        *((context, also.get("target", turn["target"])) for context, also in others),
    ]


def main() -> int:
    """Returns 0 where every turn is as in the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--templates", type=Path)
    given = parser.parse_args()
    check = HandCheck(__file__)
    table = json.loads((OUTSIDER / "expected.json").read_text())
    by_template: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = given.templates or Path(name)
        if given.templates is None:
            command = [sys.executable, str(OUTSIDER / "fetch.py"), "--to", name]
            subprocess.run(command, check=True)
        for family in FAMILIES:
            family.source = folder / f"{family.name}.jinja"
            rows = table["templates"][family.name]
            by_template[family.name], wrong = judged(family, rows, table["tools"])
            problems += wrong
    return check.write(
        "contexts and targets of ten templates from elsewhere, as an outsider wrote them",
        problems,
        templates=by_template,
    )


if __name__ == "__main__":
    sys.exit(main())
