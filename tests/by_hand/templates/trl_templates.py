"""Are turns found in the chat templates that trl ships, and as in those it wrote for training? By hand.

    python tests/by_hand/templates/trl_templates.py [--conversations 10000] [--templates FOLDER] [--jobs 2]

writes results/trl_templates.json; `templates_page.py --write` makes docs/chat_templates.md of it. Of each
template that is no training template, generated conversations (system prompts, tools, parallel calls,
thoughts, empty turns, late system messages) must have

- every turn once, with a mark at its end, and of all texts those of its message that the template writes;
- of every tenth conversation, contexts that are what the agents' endpoint renders of the same messages;
- where trl has a training template of the same name, the targets that this marks as generated; each kind of
  difference has a judgement in `twins.py`, or is a problem.

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
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "support")]

import twins  # noqa: E402
from by_hand import HandCheck  # noqa: E402
from tally import FIELDS, Tally  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from realsys.api.errors import ConfigError, DataError  # noqa: E402
from realsys.data.sources.assistant_turns import AssistantTurn, TurnReader, any_of  # noqa: E402
from realsys.data.sources.record_shape import read_messages, template_forms  # noqa: E402
from realsys.models.render_template import environment  # noqa: E402
from realsys.rollout.conversation.chat_messages import ChatMessage, ToolCall  # noqa: E402
from realsys.rollout.conversation.chat_rendering import TemplateRenderer  # noqa: E402

PACKAGE = "trl==1.16.0"
COMPARED = 10  # of so many conversations one is rendered by the endpoint, too
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


class Template:
    """One template of the wheel. ``marks_generated``: what it marks as generated is found in its texts."""

    def __init__(self, file: Path, *, marks_generated: bool = False) -> None:
        made = environment()
        self.source = file.read_text()
        if marks_generated:
            twins.prepare(made, self.source)
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
        raise DataError(str(first)[:200], where="template", fix="") from first

    def reader(self, chat: Chat) -> TurnReader:
        """Reads turns of a conversation."""
        return TurnReader(
            lambda messages, opens: self.text(chat, messages, opens),
            marks=self.marks,
            last_mark=TOKENS["eos_token"],
        )


class Endpoint:
    """Renders messages as the agents' endpoint does, by transformers."""

    def __init__(self, template: Template) -> None:
        words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS.values())}))
        made = PreTrainedTokenizerFast(tokenizer_object=words, **TOKENS)
        made.chat_template = template.source
        self._made = TemplateRenderer(made, end_ids=[made.eos_token_id], marks_as_text="none")

    def text(self, chat: Chat, messages: Sequence[Mapping[str, Any]]) -> str:
        """Raises DataError: the template refuses the messages."""
        return self._made._text([*map(_as_client, messages)], chat[1])


def _as_client(message: Mapping[str, Any]) -> ChatMessage:
    """Returns a message as the endpoint gets it."""
    calls = []
    for call in message.get("tool_calls") or ():
        name, given = call["function"]["name"], call["function"]["arguments"]
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        calls.append(ToolCall(id=call["id"], name=name, arguments=arguments))
    return ChatMessage(
        role=message["role"],
        content=message["content"],
        reasoning=message.get("reasoning_content", ""),
        tool_calls=tuple(calls),
        tool_call_id=message.get("tool_call_id", ""),
        name=message.get("name", ""),
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


class Examined:
    """What was found of one template."""

    def __init__(self, file: Path) -> None:
        self.name, self.template = file.stem, Template(file)
        self.tally = Tally(self.template.marks)
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        twin = file.with_name(f"{file.stem}_training.jinja")
        self.twin = Template(twin, marks_generated=True) if twin.exists() else None
        try:
            self.endpoint: Endpoint | None = Endpoint(self.template)
        except ConfigError:
            self.endpoint = None

    def examine(self, chat: Chat, number: int) -> None:
        """Reads the turns of a conversation, and compares them."""
        turns, why = read_all(self.template.reader(chat), chat[0])
        for place, turn in turns.items():
            self.faults += _faults(self.template, chat, place, turn)
        if why:
            self.tally.refused(why)
        else:
            self.tally.taken(chat[0], turns)
        if number % COMPARED == 0:
            self._compare_contexts(chat, turns)
        if self.twin:
            self._compare_twin(self.twin, chat, turns, why)

    def _compare_contexts(self, chat: Chat, turns: Mapping[int, AssistantTurn]) -> None:
        for place, turn in turns.items():
            self.counts["contexts"] += 1
            try:
                text = self.endpoint.text(chat, chat[0][:place]) if self.endpoint else None
            except DataError as error:
                text = error.what
            if text != turn.context:
                self.faults.append(f"the endpoint has {text!r:.200}, not {turn.context!r:.200}")

    def _compare_twin(
        self, twin: Template, chat: Chat, turns: Mapping[int, AssistantTurn], why: str
    ) -> None:
        try:
            theirs = twins.generated(twin.text(chat, twins.with_places(chat[0]), False))
        except DataError:
            self.counts["refused by both" if why else "refused by theirs"] += 1
            return
        if why:
            self.counts["refused by ours"] += 1
            return
        eos = TOKENS["eos_token"]
        found = Counter(
            kind
            for place, turn in turns.items()
            for kind in twins.kinds(
                theirs.get(place, ""), turn, chat[0][place], self.template.marks, eos
            )
        )
        self.kinds += found
        self.counts["other" if found else "same"] += 1

    def problems(self) -> list[str]:
        """Returns what is wrong, and differences that nobody has judged."""
        judged = twins.JUDGED.get(self.name, {})
        refusing = [f"refused by {whose}" for whose in ("ours", "theirs")]
        unjudged = [kind for kind in [*self.kinds, *refusing] if kind not in judged]
        unjudged = [kind for kind in unjudged if self.kinds[kind] or self.counts[kind]]
        return [f"{self.name}: {fault}" for fault in self.faults[:3]] + [
            f"{self.name}: nobody has judged: {kind}" for kind in unjudged
        ]

    def found(self) -> dict[str, Any]:
        """Returns what was found, for the result."""
        said = self.tally.found() | {
            "wrong": len(self.faults),
            "contexts_compared_with_the_endpoint": self.counts.pop("contexts", 0),
        }
        if self.twin:
            judged = twins.JUDGED.get(self.name, {})
            differences = {
                kind: {"turns": count, "judged": judged.get(kind, "")}
                for kind, count in self.kinds.most_common()
            }
            said |= {"twin": dict(self.counts), "differences": differences}
        return said


def read_all(
    reader: TurnReader, messages: Sequence[Mapping[str, Any]]
) -> tuple[dict[int, AssistantTurn], str]:
    """Returns the turns by their places up to one that is refused, and why it is."""
    turns: dict[int, AssistantTurn] = {}
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            try:
                turns[place] = reader.read(messages, place)
            except DataError as error:
                return turns, error.what
    return turns, ""


def _faults(template: Template, chat: Chat, place: int, turn: AssistantTurn) -> Iterator[str]:
    """Yields what is wrong with a turn."""
    message = chat[0][place]
    ends = [found.end() for found in template.marks.finditer(turn.target)]
    if not ends or ends[-1] != len(turn.target):
        yield f"no end: {turn.target!r}"
    if strangers := {*NUMBER.findall(turn.target)} - {*NUMBER.findall(str(message))}:
        yield f"with {strangers} of other messages: {turn.target!r}"
    if not turn.left_out or turn.context.rstrip().endswith("</think>"):
        return  # behind closed thoughts nobody can think
    written = {*NUMBER.findall(template.text(chat, chat[0][: place + 1], False))}
    for field in {*turn.left_out} & {*FIELDS.values()}:
        lost = {*NUMBER.findall(str(message.get(field)))} & written
        if lost - {*NUMBER.findall(turn.target)}:
            yield f"without {field}, which the template writes: {turn.target!r}"


def fetched(folder: Path) -> Path:
    """Brings the templates into a folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    return folder / "trl" / "chat_templates"


def examined(file: Path, conversations: int) -> tuple[str, dict[str, Any], list[str]]:
    """Returns a template's name, what was found, and problems."""
    made, draw = Examined(file), random.Random(SEED)
    for number, chat in enumerate(islice(iter(lambda: drawn_chat(draw), None), conversations)):
        made.examine(chat, number)
    return made.name, made.found(), made.problems()


def main() -> int:
    """Returns 0 where no turn of any template is wrong, and all differences are judged."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=10000)
    parser.add_argument("--templates", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    check = HandCheck(__file__)
    with tempfile.TemporaryDirectory() as name:
        folder = given.templates or fetched(Path(name))
        files = [f for f in sorted(folder.glob("*.jinja")) if not f.stem.endswith("_training")]
        with ProcessPoolExecutor(given.jobs) as pool:
            rows = [*pool.map(examined, files, [given.conversations] * len(files))]
    problems = [problem for _, _, found in rows for problem in found]
    args = f"--conversations {given.conversations}"
    return check.write(
        f"turns of the templates of {PACKAGE}",
        problems,
        args=args,
        templates={name: found for name, found, _ in rows},
    )


if __name__ == "__main__":
    sys.exit(main())
