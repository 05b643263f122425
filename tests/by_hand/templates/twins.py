"""What a training template of trl marks as generated, turn by turn, and how that differs from ours."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jinja2 import nodes
from jinja2.ext import Extension

from realsys.data.sources.assistant_turns import AssistantTurn

BEGIN, END = "\ue000", "\ue001"  # around what a training template marks as generated
_FIRST = 0xE100  # of the characters that stand for the texts of a conversation
_LOOP = re.compile(r"for (message|m) in \w*messages\b")
Messages = Sequence[Mapping[str, Any]]


def place_of(message: Any) -> str:
    """Returns the place that ``with_places`` gave a message; empty outside of the loop over messages."""
    return str(message["place"]) if isinstance(message, Mapping) and "place" in message else ""


def with_places(messages: Messages) -> list[dict[str, Any]]:
    """Returns messages that know where they stand."""
    return [{**message, "place": place} for place, message in enumerate(messages)]


class Generated(Extension):
    """``{% generation %}``, with marks around its body and the place of the message that it is of."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> list[Any]:
        """Keeps the body, between two marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        name = self.environment.globals.get("message_name", "message")
        of = nodes.Call(
            nodes.Name("place_of", "load"), [nodes.Name(str(name), "load")], [], None, None
        )
        begin = nodes.Output([nodes.TemplateData(BEGIN), of, nodes.TemplateData(BEGIN)])
        end = nodes.Output([nodes.TemplateData(END)])
        return [begin.set_lineno(line), *body, end.set_lineno(line)]


def prepare(environment: Any, source: str) -> None:
    """Has a jinja environment mark what a template generates."""
    name = max(_LOOP.findall(source), key=len)
    environment.globals |= {"place_of": place_of, "message_name": name}
    environment.add_extension(Generated)


def without_marks(text: str) -> str:
    """Returns a rendering as the template itself makes it."""
    return re.sub(f"{BEGIN}[^{BEGIN}]*{BEGIN}|{END}", "", text)


def generated(text: str) -> dict[int, str]:
    """Returns what a rendering marks, by the message's place; what is in no message is the last one's."""
    found: dict[int, str] = {}
    last = -1
    for place, body in re.findall(f"{BEGIN}([^{BEGIN}]*){BEGIN}(.*?){END}", text, re.DOTALL):
        last = int(place) if place else last
        found[last] = found.get(last, "") + body
    return found


def kinds(
    theirs: str, turn: AssistantTurn, message: Mapping[str, Any], marks: re.Pattern[str], eos: str
) -> Iterator[str]:
    """Yields the kinds of difference between what trl's template trains of a turn and what we do."""
    ours = turn.target if turn.is_whole else ""
    if theirs and not ours:
        yield "not whole"
        return
    if theirs.endswith(eos) and not ours.endswith(eos):
        yield "end of the text"
        theirs = theirs.removesuffix(eos)
    if theirs.rstrip() != theirs:
        yield "white space behind the end"
        theirs = theirs.rstrip()
    if opening := _opening(theirs, ours, turn.context):
        yield "opening"
        theirs = theirs.removeprefix(opening)
    one, other = (_pieces(text, message, marks) for text in (theirs, ours))
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            yield _named("".join(one[a:b]), "".join(other[c:d]))


def _opening(theirs: str, ours: str, context: str) -> str:
    """Returns the end of the context with which trl's text begins, and ours does not."""
    closed = context.rstrip().removesuffix("<think>")
    for end in (context[-200:], context[-200:].rstrip(), closed[-200:]):
        for part in (end[start:] for start in range(len(end))):
            if part != theirs and theirs.startswith(part) and not ours.startswith(part):
                return part
    return ""


def _named(theirs: str, ours: str) -> str:
    if "«thought»" in ours and "«thought»" not in theirs:
        return "thoughts"
    if "«thought»" in theirs and "«thought»" not in ours:
        return "thoughts of theirs"
    return f"theirs {theirs!r}, ours {ours!r}"


def _pieces(text: str, message: Mapping[str, Any], marks: re.Pattern[str]) -> list[str]:
    """Cuts a turn's text into marks, white space, texts of the message (by name), and what is between."""
    known = [(str(message["content"]), "«content»")]
    known.append((str(message.get("reasoning_content") or ""), "«thought»"))
    for call in message.get("tool_calls") or ():
        given = call["function"]["arguments"]
        given = json.loads(given) if isinstance(given, str) else given
        known += [(str(value), "«argument»") for value in given.values()]
    known = sorted((k for k in known if k[0]), key=lambda k: -len(k[0]))
    known += [(json.dumps(value)[1:-1], f"{name} in ASCII") for value, name in known]
    for number, (value, _) in enumerate(known):
        for form in (value, json.dumps(value, ensure_ascii=False)[1:-1], value.replace('"', '\\"')):
            text = text.replace(form, chr(_FIRST + number))
    own = "[\ue100-\uf8ff]"
    cut = re.compile(rf"{own}|\s+|{marks.pattern}|.+?(?={own}|\s|{marks.pattern}|$)", re.DOTALL)
    pieces = (found[0] for found in cut.finditer(text))
    return [known[ord(p) - _FIRST][1] if re.fullmatch(own, p) else p for p in pieces]


@dataclass(frozen=True)
class Verdict:
    """Who is right where trl's training template trains something else than we do.

    Attributes:
        differs: what the difference is, for the page.
        right: ``realsys``, ``trl`` or ``both``.
        why: by what the model has to say when it is sampled at that turn.
    """

    differs: str
    right: str
    why: str


VERDICTS = {
    "white space behind the end": Verdict(
        "trl's template also trains the line break that stands behind the mark which ends a turn.",
        "realsys",
        "Sampling stops at the mark, so the model never says that line break.",
    ),
    "opening": Verdict(
        "trl's template also trains the opening of an answer, such as `<think>` or "
        "`<|start|>assistant`, or the last line break of it.",
        "realsys",
        "The opening stands in the prompt before the model is sampled.",
    ),
    "not whole": Verdict(
        "trl's template trains turns of which the template leaves out a call, or all that they say.",
        "realsys",
        "Such a target teaches an empty answer, or one call where there were two. realsys does not train "
        "the turn, and says so in the log.",
    ),
    "end of the text": Verdict(
        "trl's template also trains the end of the text behind the mark that ends the last turn.",
        "realsys",
        "Sampling stops at the mark, so the model never says what follows it.",
    ),
    "thoughts": Verdict(
        "trl's template trains no thoughts of turns before the last question, since the template does not "
        "write them into a longer conversation.",
        "realsys",
        "The model had to think when it was sampled at that turn: of the messages up to there the template "
        "writes the thoughts. realsys makes the turn a sequence of its own.",
    ),
    "opened thoughts": Verdict(
        "The template opens an answer with `<think>`, but writes no thoughts. trl's template trains the "
        "content alone. realsys trains the thoughts, if there are some, and the mark that closes them.",
        "realsys",
        "Behind the opened `<think>` the model has to end its thoughts before it answers.",
    ),
    "closed thoughts": Verdict(
        "trl's template trains thoughts although the template opens an answer with closed, empty thoughts.",
        "realsys",
        "Behind closed thoughts the model is not asked to think. realsys leaves the thoughts out, and says "
        "so in the log. With the template's argument `enable_thinking` they are trained.",
    ),
    "line of the closing mark": Verdict(
        "A turn without thoughts has `<think></think>` in trl's template. realsys puts the closing mark on "
        "a line of its own, as the template does behind thoughts.",
        "realsys",
        "The context ends in `<think>` and a line break, which the template never writes before "
        "`</think>` alone.",
    ),
    "late system message": Verdict(
        "trl's template ends a turn with `<|system|>` where a system message follows.",
        "realsys",
        "The model can't know what follows. Sampling stops at `<|user|>`, the mark that ends an answer.",
    ),
    "end of a message": Verdict(
        "trl's template ends answers before the last one with `<|end|>`.",
        "realsys",
        "Sampling does not stop at `<|end|>`, which stands behind thoughts, too. It stops at `<|return|>`.",
    ),
    "end of calls": Verdict(
        "trl's template trains no mark behind calls.",
        "realsys",
        "The template writes `<|tool_response>` behind calls that wait for their results. A model that "
        "does not say it goes on, and makes up the result.",
    ),
    "letters of arguments": Verdict(
        "trl's template writes arguments of calls anew. realsys trains JSON text as the record has it.",
        "both",
        "Both texts mean the same.",
    ),
}
_LINE = {"white space behind the end": "white space behind the end"}
_WHOLE = {"not whole": "not whole"}
_OPENING = {"opening": "opening"}
_THOUGHTS = {"thoughts": "thoughts"}
_TEXT_END = {"end of the text": "end of the text"}
_DEEPSEEK = _OPENING | {
    "thoughts": "opened thoughts",
    "theirs '', ours '\\n</think>\\n\\n'": "opened thoughts",
    "theirs '', ours '</think>\\n\\n'": "opened thoughts",
}
_NEMOTRON = _LINE | _OPENING | _THOUGHTS
_IN_LINES = {"theirs '', ours '\\n'": "line of the closing mark"}
JUDGED: dict[str, dict[str, str]] = {  # by template and kind of difference: the verdict
    "cohere": _WHOLE,
    "cohere2": _WHOLE,
    "deepseek_r1_distill": _DEEPSEEK | _WHOLE,
    "deepseekv3": _DEEPSEEK
    | _WHOLE
    | {"theirs '«argument»', ours '«argument» in ASCII'": "letters of arguments"},
    "diffusion_gemma": _LINE | _THOUGHTS | {"theirs '', ours '<|tool_response>'": "end of calls"},
    "gemma": _LINE | _WHOLE,
    "gemma3": _LINE | _WHOLE,
    "glm4moe": _THOUGHTS | {"theirs '<|system|>', ours '<|user|>'": "late system message"},
    "gptoss": _OPENING
    | _THOUGHTS
    | _WHOLE
    | {
        "theirs '<|end|>', ours '<|return|>'": "end of a message",
        "theirs '', ours '<|channel|>analysis<|message|>«content»<|end|><|start|>assistant'": "thoughts",
    },
    "idefics3": _WHOLE,
    "lfm2": _LINE | _WHOLE,
    "lfm2_v2": _LINE | _WHOLE,
    "llama3": _WHOLE,
    "muse_glimmer": _OPENING,
    "nemotron_3_5_lightning": _NEMOTRON,
    "nemotron_3_nano": _NEMOTRON | _IN_LINES,
    "nemotron_3_super": _NEMOTRON | _IN_LINES,
    "nemotron_3_ultra": _NEMOTRON,
    "phi3": _LINE | _WHOLE | _TEXT_END,
    "phi3_5": _LINE | _WHOLE | _TEXT_END,
    "qwen2_5": _LINE | _OPENING | _WHOLE,
    "qwen2_5_vl": _LINE | _WHOLE,
    "qwen3": _LINE,
    "qwen3_5_nothink": _LINE | _OPENING | _WHOLE | {"thoughts of theirs": "closed thoughts"},
    "qwen3_5_think": _LINE | _OPENING,
    "qwen3_6": _LINE | _OPENING,
    "qwen3_8": _LINE | _OPENING,
    "qwen3_instruct_2507": _LINE | _WHOLE,
    "qwen3_vl": _LINE | _WHOLE,
    "smolvlm": _WHOLE,
}
