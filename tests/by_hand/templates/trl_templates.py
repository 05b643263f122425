"""Are turns found in the chat templates that trl ships, and as in those it wrote for training? By hand.

    python tests/by_hand/templates/trl_templates.py [--conversations 1000] [--templates FOLDER]

writes results/trl_templates.json. Of each template that is no training template, generated conversations
(system prompts, tools, parallel calls, thoughts, empty turns, late system messages) must have every turn
once, with a mark at its end; counted is which texts of a message the template leaves out. Where there is a
training template of the same name, what it marks as generated is compared, for twenty conversations; where
that begins with the opening of an answer, which nobody samples, the opening counts apart.
Templates are fetched by pip and stay outside the tree.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "support")]

from by_hand import HandCheck  # noqa: E402
from jinja2 import nodes  # noqa: E402
from jinja2.ext import Extension  # noqa: E402

from realsys.api.errors import DataError  # noqa: E402
from realsys.data.sources.assistant_turns import TurnReader, any_of  # noqa: E402
from realsys.data.sources.record_shape import read_messages, template_forms  # noqa: E402
from realsys.models.render_template import environment  # noqa: E402

PACKAGE = "trl==1.16.0"
BEGIN, END = "\ue000", "\ue001"  # around what a training template marks as generated
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
MARKS = re.compile(r"<\|?[^\s<>{}']*?\|?>|<｜[^｜]*｜>|\[[A-Z_/]+\]")
NUMBER = re.compile(r"(?:№|\\u2116)(\d+)")
SEED = 1
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "where"}},
            "required": ["place"],
        },
    },
}
Chat = tuple[tuple[Mapping[str, Any], ...], Sequence[Mapping[str, Any]]]


class Generated(Extension):
    """``{% generation %}``, with a mark at its beginning and its end."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> list[Any]:
        """Keeps the body, between two marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(x)], lineno=line) for x in (BEGIN, END))
        return [begin, *body, end]


class Template:
    """One template of the wheel."""

    def __init__(self, file: Path) -> None:
        made = environment()
        made.add_extension(Generated)
        self.source = file.read_text()
        self.marks = any_of({*MARKS.findall(self.source), *TOKENS.values(), "\n", "\n\n"})
        self._compiled = made.from_string(self.source)

    def text(self, chat: Chat, messages: Sequence[Mapping[str, Any]], opens: bool) -> str:
        """Raises DataError: it refuses the messages."""
        given = {"tools": [*chat[1]] or None, "documents": None, **TOKENS}
        first: Exception | None = None
        for form in template_forms(messages):
            try:
                return str(
                    self._compiled.render(messages=form, add_generation_prompt=opens, **given)
                )
            except Exception as error:  # a template may raise anything
                first = first or error
        raise DataError(str(first)[:100], where="template", fix="") from first

    def reader(self, chat: Chat) -> TurnReader:
        """Reads turns of a conversation."""
        return TurnReader(
            lambda messages, opens: re.sub(f"[{BEGIN}{END}]", "", self.text(chat, messages, opens)),
            marks=self.marks,
            last_mark=TOKENS["eos_token"],
        )


def drawn_chat(draw: random.Random) -> Chat:
    """One conversation as data sets have them."""
    thinks, late_system, with_tools = (draw.random() < share for share in (0.4, 0.05, 0.5))
    number = num_texts = 0

    def words() -> str:
        nonlocal num_texts
        num_texts += 1  # a number of its own, by which a text is known
        return " ".join([f"№{num_texts}", *draw.choices(WORDS, k=draw.randint(0, 5))])

    def answer(content: str, **more: Any) -> dict[str, Any]:
        thought = {"reasoning_content": words()} if thinks and draw.random() < 0.8 else {}
        return {"role": "assistant", "content": content, **thought, **more}

    messages: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": words()})
    for turn in range(draw.randint(1, 4)):
        if late_system and turn == 1:
            messages.append({"role": "system", "content": words()})
        messages.append({"role": "user", "content": words()})
        while with_tools and draw.random() < 0.5:
            calls = []
            for _ in range(draw.choice((1, 1, 1, 2))):
                number += 1
                arguments: Any = {"place": words()}
                arguments = draw.choice((arguments, json.dumps(arguments)))
                function = {"name": "get_weather", "arguments": arguments}
                calls.append({"id": f"call{number:05}", "type": "function", "function": function})
            messages.append(answer(draw.choice(("", "", words())), tool_calls=calls))
            messages += [
                {"role": "tool", "content": words(), "tool_call_id": c["id"], "name": "get_weather"}
                for c in calls
            ]
        messages.append(answer("" if draw.random() < 0.03 else words()))
    return read_messages(messages, "messages", "drawn"), [TOOL] * with_tools


WORDS = ("sun", "rain", "Zürich", "{}", '"quoted"', "1.50", "a\nb", "明天", "<b>", "it's")


def faults(template: Template, chat: Chat, counts: Counter[str]) -> Iterator[str]:
    """Yields what is wrong with the turns of a conversation; counts what became of them."""
    messages, reader = chat[0], template.reader(chat)
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            turn = reader.read(messages, place)
        except DataError:
            counts["refused"] += 1
            continue
        counts["trained" if turn.is_whole else "left out"] += 1
        counts.update(f"without {name}" for name in turn.left_out)
        ends = [found.end() for found in template.marks.finditer(turn.target)]
        if not ends or ends[-1] != len(turn.target):
            yield f"no end: {turn.target!r}"
        if strangers := {*NUMBER.findall(turn.target)} - {*NUMBER.findall(str(message))}:
            yield f"with {strangers} of other messages: {turn.target!r}"


def twins_differences(plain: Template, twin: Template) -> tuple[Counter[str], list[str]]:
    """Compares what two templates train of the fixed conversations."""
    counts: Counter[str] = Counter()
    differences = []
    draw = random.Random(SEED)
    for _ in range(20):
        chat = drawn_chat(draw)
        try:
            marked = twin.text(chat, chat[0], False)
            places = [i for i, message in enumerate(chat[0]) if message["role"] == "assistant"]
            ours = [plain.reader(chat).read(chat[0], place) for place in places]
            openings = [
                turn.context[len(plain.text(chat, chat[0][:place], False)) :].strip()
                for turn, place in zip(ours, places, strict=True)
            ]
        except DataError:
            counts["refused"] += 1
            continue
        theirs = re.sub(r"\s", "", "".join(re.findall(f"{BEGIN}(.*?){END}", marked, re.DOTALL)))
        said = "".join(turn.target for turn in ours)
        for number in range(4):  # marks of the opening that are trained, too
            with_opening = "".join(
                _last_marks(plain, opening, number) + turn.target
                for opening, turn in zip(openings, ours, strict=True)
            )
            if re.sub(r"\s", "", with_opening) == theirs:
                counts["same with the opening" if number else "same"] += 1
                break
        else:
            counts["other"] += 1
            differences.append(f"theirs {theirs[:300]!r}, ours {said[:300]!r}")
    return counts, differences


def _last_marks(template: Template, opening: str, number: int) -> str:
    """Returns the end of an opening that begins with its ``number``-th mark from behind."""
    starts = [found.start() for found in template.marks.finditer(opening)]
    return opening[starts[-number] :] if 0 < number <= len(starts) else opening * (number > 0)


def fetched(folder: Path) -> Path:
    """Brings the templates into a folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    return folder / "trl" / "chat_templates"


def main() -> int:
    """Returns 0 where no turn of any template is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--templates", type=Path)
    given = parser.parse_args()
    check = HandCheck(__file__)
    problems: list[str] = []
    table: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = given.templates or fetched(Path(name))
        for file in sorted(folder.glob("*.jinja")):
            if file.stem.endswith("_training"):
                continue
            template, counts, draw = Template(file), Counter[str](), random.Random(SEED)
            wrong = []
            for _ in range(given.conversations):
                wrong += faults(template, drawn_chat(draw), counts)
            problems += [f"{file.stem}: {what}" for what in wrong[:3]]
            table[file.stem] = dict(counts) | {"wrong": len(wrong)}
            twin = file.with_name(f"{file.stem}_training.jinja")
            if twin.exists():
                compared, differences = twins_differences(template, Template(twin))
                table[file.stem] |= {"twin": dict(compared), "differences": differences[:2]}
    args = f"--conversations {given.conversations}"
    return check.write(f"turns of the templates of {PACKAGE}", problems, args=args, templates=table)


if __name__ == "__main__":
    sys.exit(main())
