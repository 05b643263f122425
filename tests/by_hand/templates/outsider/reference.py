"""What ten chat templates from elsewhere want of a trainer: writes `expected.json`.

    python reference.py --templates FOLDER            # writes expected.json beside this file
    python reference.py --templates FOLDER --check    # compares instead; exit status 1 if anything differs
    python reference.py --templates FOLDER --explain  # where the whole text is not context + target

Needs jinja2 alone, and the ten files that `fetch.py` brings. For each turn of the assistant:

* `context` is the template's rendering of the messages before the turn, with the generation prompt:
  what an endpoint would hand to the model when that turn is sampled.
* `target` is written by the functions below, one for each template, from reading the template: what
  the model says from there until the mark that ends its turn, mark included. No rendering of the turn
  goes into it; that is only compared (`--explain`).
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import jinja2
from chats import TOOLS, Message, call, conversations, result, said, system, user
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = Path(__file__).resolve().parent


# ------------------------------------------------------------ rendering, the way transformers does


class Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`, of which only the body counts here."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def environment() -> ImmutableSandboxedEnvironment:
    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: f"⟦now:{form}⟧"  # a date, as a mark in the table
    return made


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


class Refused(Exception):
    """The template does not write this."""


def normal(messages: list[Message], null_stays: bool = False) -> list[Message]:
    """A record in OpenAI's format as an endpoint hands it to a template.

    JSON text of arguments is an object (`""` is `{}`); text that isn't an object's stays text. No tool
    calls (`null`, `[]`) are no key. The assistant's content `null` is `""`. A thought `null` is no key,
    and one under any of its three names is also there as `reasoning_content` and `thinking`.
    """
    result = []
    for message in messages:
        message = json.loads(json.dumps(message))
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        for one in message.get("tool_calls", []):
            arguments = one["function"].get("arguments")
            if isinstance(arguments, str):
                try:
                    read = json.loads(arguments) if arguments else {}
                except json.JSONDecodeError:
                    read = None
                if isinstance(read, dict):
                    one["function"]["arguments"] = read
        if message["role"] == "assistant" and message.get("content") is None and not null_stays:
            message["content"] = ""
        names = ("reasoning_content", "thinking", "reasoning")
        thought = next((message[k] for k in names if message.get(k) is not None), None)
        for name in names:
            if name in message and message[name] is None:
                del message[name]
        if thought is not None:
            message = {"thinking": thought, **message, "reasoning_content": thought}
        result.append(message)
    return result


@dataclass
class Family:
    name: str
    tokens: dict[str, str]
    """`bos_token` and `eos_token` as the template sees them."""
    write: Callable[[list[Message], int, dict[str, Any]], "Written"]
    marks: list[str]
    """Texts with a meaning in this template, to be put into users' texts and tools' results."""
    think: str = "reasoning_content"
    """The field under which records have thoughts."""
    source: Path = field(default_factory=Path)
    _template: Any = None

    def render(self, messages, tools, kwargs, prompt: bool, null_stays: bool = False) -> str:
        return self.render_as_is(normal(messages, null_stays), tools, kwargs, prompt)

    def render_as_is(self, messages, tools, kwargs, prompt: bool) -> str:
        if self._template is None:
            self._template = environment().from_string(self.source.read_bytes().decode("utf-8"))
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self.tokens,
                **kwargs,
            )
        except jinja2.exceptions.UndefinedError as error:
            raise Refused(f"undefined: {error}") from error
        except jinja2.exceptions.TemplateError as error:
            raise Refused(f"raise_exception: {error}") from error
        except (TypeError, AttributeError) as error:
            raise Refused(f"type: {error}") from error


@dataclass
class Written:
    target: str
    end: str
    """The mark that ends the turn: `target` ends with it, and sampling must stop at it."""
    notes: list[str] = field(default_factory=list)
    also: list[dict[str, str]] = field(default_factory=list)
    """Other readings that are right too: `context` and/or `target`, and `why`."""


def tojson(x: Any) -> str:
    return json.dumps(x, ensure_ascii=False)


def thought_of(message: Message) -> str:
    return message.get("reasoning_content") or ""


def calls_of(message: Message) -> list[dict[str, Any]]:
    return [one["function"] for one in message.get("tool_calls", [])]


LOST_CONTENT = (
    "the template writes no content beside tool calls: the content is not trained; say so"
)
LOST_THOUGHT = "the template has no place for this thought here: it is not trained; say so"
LOST_TOOLS = "the template never reads `tools`: the model is not told of them; say so"


# ------------------------------------------------------------ what the assistant says, by template


def mistral_nemo(messages: list[Message], i: int, kwargs: dict[str, Any]) -> Written:
    m, end, notes = messages[i], "</s>", []
    if thought_of(m):
        notes.append(LOST_THOUGHT)
    if "tool_calls" not in m:
        return Written(m["content"] + end, end, notes)
    if m["content"]:
        notes.append(LOST_CONTENT)
    calls = [
        tojson(one["function"])[:-1] + ', "id": "' + one["id"] + '"}' for one in m["tool_calls"]
    ]
    return Written("[TOOL_CALLS][" + ", ".join(calls) + "]" + end, end, notes)


def hermes_3(messages: list[Message], i: int, kwargs: dict[str, Any]) -> Written:
    m, end, notes = messages[i], "<|im_end|>", []
    if thought_of(m):
        notes.append(LOST_THOUGHT)
    if "tool_calls" not in m:
        return Written(m["content"] + end, end, notes)
    if m["content"]:
        notes.append(LOST_CONTENT)
    calls = [
        '<tool_call>\n{"name": "'
        + f["name"]
        + '", "arguments": '
        + text_or_json(f["arguments"])
        + "}\n</tool_call>"
        for f in calls_of(m)
    ]
    return Written("\n".join(calls) + end, end, notes)


def text_or_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else tojson(arguments)


def deepseek_v3_1(messages: list[Message], i: int, kwargs: dict[str, Any]) -> Written:
    m, end, notes, also = messages[i], "<｜end▁of▁sentence｜>", [], []
    before = [x["role"] for x in messages[:i] if x["role"] in ("user", "assistant", "tool")]
    after_user = before[-1:] == ["user"]
    after_tool = before[-1:] == ["tool"]
    thinking = kwargs.get("thinking", kwargs.get("enable_thinking", False))
    opened = after_user and thinking  # the context ends with <think>
    thought, content = thought_of(m), m["content"]
    if "</think>" in content and "tool_calls" not in m and not after_tool:
        inline, content = content.split("</think>", 1)
        thought = thought or inline.removeprefix("<think>")
    start = ""
    if opened:
        start = thought + "</think>"
    elif thought:
        notes.append(LOST_THOUGHT)
    if not before:
        notes.append("no user before: the context has no mark of the assistant")
    if "tool_calls" not in m:
        return Written(start + content + end, end, notes, also)
    calls = "".join(
        "<｜tool▁call▁begin｜>"
        + f["name"]
        + "<｜tool▁sep｜>"
        + tojson(f["arguments"])
        + "<｜tool▁call▁end｜>"
        for f in calls_of(m)
    )
    calls = "<｜tool▁calls▁begin｜>" + calls + "<｜tool▁calls▁end｜>"
    return Written(start + content + calls + end, end, notes, also)


def kimi_k3(messages: list[Message], i: int, kwargs: dict[str, Any]) -> Written:
    def opened(tag: str, **attributes: Any) -> str:
        text = "<|open|>" + tag
        for key, value in attributes.items():
            value = str(value).replace("&", "&amp;").replace('"', "&quot;")
            text += f' {key}="{value}"'
        return text + "<|sep|>"

    def closed(tag: str) -> str:
        return "<|close|>" + tag + "<|sep|>"

    m, end, notes = messages[i], "<|end_of_msg|>", []
    thought = thought_of(m)
    text = ""  # the context ends with an open `think` or `response`
    if kwargs.get("thinking", True):
        if thought.strip():
            text += thought
        text += closed("think") + opened("response")
    elif thought:
        notes.append(LOST_THOUGHT)
    text += m["content"] + closed("response")
    if "tool_calls" in m:
        text += opened("tools")
        for number, f in enumerate(calls_of(m), 1):
            text += opened("call", tool=f["name"], index=number)
            for key, value in f["arguments"].items():
                kind = {bool: "boolean", type(None): "null", int: "number", float: "number"} | {
                    str: "string",
                    dict: "object",
                    list: "array",
                }
                text += opened("argument", key=key, type=kind[type(value)])
                text += text_or_json(value) + closed("argument")
            text += closed("call")
        text += closed("tools")
    return Written(text + closed("message") + end, end, notes)


def minimax_m2(messages: list[Message], i: int, kwargs: dict[str, Any]) -> Written:
    m, end, notes, also = messages[i], "[e~[", [], []
    thought, content = m.get("reasoning_content", ""), m["content"]
    if "reasoning_content" not in m and "</think>" in content:
        thought = content.split("</think>")[0].strip("\n").split("<think>")[-1].strip("\n")
        content = content.split("</think>")[-1].strip("\n")
    text = content
    if "tool_calls" in m:
        text += "\n<minimax:tool_call>\n"
        for f in calls_of(m):
            text += '<invoke name="' + f["name"] + '">\n'
            for key, value in f["arguments"].items():
                value = value if isinstance(value, str) else tojson(value)
                text += f'<parameter name="{key}">{value}</parameter>\n'
            text += "</invoke>\n"
        text += "</minimax:tool_call>"
    if not thought:
        notes.append(
            "the generation prompt opens a thought that the record hasn't: it is closed at once"
        )
        also.append(
            {
                "context_ends": "]~b]ai\n",
                "target": text + end,
                "why": "sampled without the open thought, as the template writes such a turn",
            }
        )
    # The context ends with "<think>\n".
    return Written(thought + "\n</think>\n\n" + text + end, end, notes, also)


def functionary_v3_1(messages: list[Message], i: int, kwargs: dict[str, Any]) -> Written:
    m, notes = messages[i], []
    if thought_of(m):
        notes.append(LOST_THOUGHT)
    if "tool_calls" not in m:
        return Written(m["content"] + "<|eot_id|>", "<|eot_id|>", notes)
    text = m["content"]
    for f in calls_of(m):
        if f["name"] == "python":
            text += "<|python_tag|>" + tojson(f["arguments"])
        else:
            text += "<function=" + f["name"] + ">" + tojson(f["arguments"]) + "</function>"
    return Written(text + "<|eom_id|>", "<|eom_id|>", notes)


def apertus(messages: list[Message], i: int, kwargs: dict[str, Any]) -> Written:
    m, notes, also = messages[i], [], []
    if thought_of(m):
        notes.append(LOST_THOUGHT)
    if "tool_calls" not in m:
        end = "<|assistant_end|>"
        return Written(m["content"] + end, end, notes, also)
    calls = ['{"' + f["name"] + '": ' + tojson(f["arguments"]) + "}" for f in calls_of(m)]
    end = "<|tools_suffix|>"
    text = m["content"] + "<|tools_prefix|>[" + ", ".join(calls) + "]"
    return Written(text + end, end, notes, also)


def solar_open(messages: list[Message], i: int, kwargs: dict[str, Any]) -> Written:
    m, notes, also = messages[i], [], []
    thought = m.get("reasoning") or ""
    if not thought and thought_of(m):
        thought = thought_of(m)
        notes.append("the template reads `reasoning`, the record has another name for it")
    start = ""
    thinks = kwargs.get("reasoning_effort", "high") not in ("low", "minimal")
    if thought and thinks:
        start = "<|think|>" + thought + "<|end|><|begin|>assistant"
    elif thought:
        notes.append(LOST_THOUGHT)  # the context already has an empty one
    if "tool_calls" in m:
        end = "<|calls|>"
        text = "<|tool_calls|>"
        if m["content"]:
            notes.append(LOST_CONTENT)
        for made in m["tool_calls"]:
            f = made["function"]
            text += "<|tool_call:begin|>" + made["id"] + "<|tool_call:name|>" + f["name"]
            text += "<|tool_call:args|>" + text_or_json(f["arguments"]) + "<|tool_call:end|>"
    else:
        end = "<|end|>"
        text = "<|content|>" + m["content"]
    if start and not m.get("reasoning"):
        also.append(
            {"target": text + end, "why": "a thought under a name that the template does not read"}
        )
    return Written(start + text + end, end, notes, also)


def seed_oss(messages: list[Message], i: int, kwargs: dict[str, Any]) -> Written:
    m, end, notes = messages[i], "<seed:eos>", []
    text = ""  # after "<seed:bos>assistant"
    if thought_of(m).strip():
        text += "\n<seed:think>" + thought_of(m).strip() + "</seed:think>"
    content = m["content"].strip()
    if content:
        text += "\n" + content
    if "tool_calls" in m:
        if content:
            text += "\n"
        for f in calls_of(m):
            text += "\n<seed:tool_call>\n<function=" + f["name"] + ">\n"
            for key, value in f["arguments"].items():
                text += f"<parameter={key}>{value}</parameter>\n"  # Python's own text of a value
            text += "</function>\n</seed:tool_call>"
    elif not content:
        notes.append("the template ends no turn without content: its mark is trained all the same")
    # The context ends with "<seed:bos>assistant\n".
    return Written(text.removeprefix("\n") + end, end, notes)


def jamba(messages: list[Message], i: int, kwargs: dict[str, Any]) -> Written:
    m, end, notes = messages[i], "<|eom|>", []
    if thought_of(m):
        notes.append(LOST_THOUGHT)
    text = " " + m["content"]  # the context ends with "<|assistant|>", without the blank
    if "tool_calls" in m:
        calls = [
            '    {"name": "' + f["name"] + '", "arguments": ' + text_or_json(f["arguments"]) + "}"
            for f in calls_of(m)
        ]
        text += "<tool_calls>[\n" + ",\n".join(calls) + "\n]</tool_calls>"
    return Written(text + end, end, notes)


LLAMA = [
    "<|begin_of_text|>",
    "<|start_header_id|>assistant<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
]
FAMILIES = [
    Family(
        "mistral_nemo",
        {"bos_token": "<s>", "eos_token": "</s>"},
        mistral_nemo,
        ["</s>", "[/INST]", "[TOOL_CALLS][", "[AVAILABLE_TOOLS]", "[/TOOL_RESULTS]"],
    ),
    Family(
        "hermes_3",
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"},
        hermes_3,
        [
            "<|im_end|>\n<|im_start|>assistant\n",
            "</tool_response>",
            "<tool_call>",
            "<|begin_of_text|>",
        ],
    ),
    Family(
        "deepseek_v3_1",
        {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
        deepseek_v3_1,
        ["<｜Assistant｜>", "</think>", "<｜end▁of▁sentence｜>", "<｜tool▁output▁end｜>"],
    ),
    Family(
        "kimi_k3",
        {"bos_token": "[BOS]", "eos_token": "[EOS]"},
        kimi_k3,
        [
            "<|close|>message<|sep|><|end_of_msg|>",
            '<|open|>message role="assistant"<|sep|>',
            "<|close|>think<|sep|>",
            "<|kimi_image_placeholder|>",
        ],
    ),
    Family(
        "minimax_m2",
        {"bos_token": "]~!b[", "eos_token": "[e~["},
        minimax_m2,
        ["[e~[\n]~b]ai\n", "<think>", "</response>", "<minimax:tool_call>"],
    ),
    Family(
        "functionary_v3_1",
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        functionary_v3_1,
        [*LLAMA, "<function=get_weather>{}</function>", "<|python_tag|>"],
    ),
    Family(
        "apertus",
        {"bos_token": "<s>", "eos_token": "<|assistant_end|>"},
        apertus,
        [
            "<|assistant_end|>",
            "<|user_end|><|assistant_start|>",
            "<|tools_suffix|>",
            "<|inner_prefix|>",
        ],
    ),
    Family(
        "solar_open",
        {"bos_token": "<s>", "eos_token": "</s>"},
        solar_open,
        ["<|end|><|begin|>assistant<|content|>", "<|calls|>", "<|tool_response:end|>", "<|think|>"],
        think="reasoning",
    ),
    Family(
        "seed_oss",
        {"bos_token": "<seed:bos>", "eos_token": "<seed:eos>"},
        seed_oss,
        ["<seed:eos><seed:bos>assistant\n", "</seed:think>", "</seed:tool_call>", "</parameter>"],
    ),
    Family(
        "jamba",
        {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"},
        jamba,
        ["<|eom|><|bom|><|assistant|>", "<tool_calls>[", "</tool_calls>", "<|endoftext|>"],
    ),
]

# ------------------------------------------------------------ the table


def turns(family: Family, conversation: dict[str, Any]) -> list[dict[str, Any]]:
    given, tools, kwargs = conversation["messages"], conversation["tools"], conversation["kwargs"]
    messages = normal(given)
    try:
        whole = family.render(given, tools, kwargs, prompt=False)
    except Refused:
        whole = None
    table = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        row: dict[str, Any] = {"message": i}
        table.append(row)
        try:
            context = family.render(given[:i], tools, kwargs, prompt=True)
        except Refused as reason:
            row |= {"refused": str(reason), "refused_at": "context"}
            continue
        try:
            family.render(given[: i + 1], tools, kwargs, prompt=False)
        except Refused as reason:
            row |= {"refused": str(reason), "refused_at": "turn", "context": context}
            continue
        written = family.write(messages, i, kwargs)
        if not written.target.endswith(written.end):
            raise AssertionError(f"{family.name} {conversation['name']} {i}: no end")
        row |= {"context": context, "target": written.target, "end": written.end}
        row["in_whole"] = whole is not None and whole.startswith(context + written.target)
        if any(x["role"] == "assistant" and x.get("content") is None for x in given[:i]):
            literal = family.render(given[:i], tools, kwargs, prompt=True, null_stays=True)
            if literal != context and family.name == "minimax_m2":
                written.notes.append("content that stays null becomes the word None in the context")
            elif literal != context:
                written.also.append({"context": literal, "why": "content that stays null"})
        if written.notes:
            row["notes"] = written.notes
        if written.also:
            row["also"] = written.also
        if conversation["name"] == "marks_as_text":
            for name, first, last in (("user_marks", "U1 ", " U2"), ("result_marks", "R1 ", " R2")):
                if first in context:
                    start = context.index(first) + len(first)
                    row[name] = [start, context.index(last, start)]
    return table


def remarks(family: Family, conversation: dict[str, Any]) -> list[str]:
    """What a trainer must say about a conversation as a whole."""
    result = []
    if family.name == "deepseek_v3_1" and conversation["tools"]:
        result.append(LOST_TOOLS)
    if family.name == "minimax_m2" and conversation["name"] == "late_system":
        result.append("the template writes no system message but the first; say so")
    return result


def shapes(family: Family) -> dict[str, str]:
    """What the template does with raw messages of a shape, nothing made normal before."""
    first, thought = [system("Ss"), user("Uu")], "Thought0"

    def tried(messages, *, tools=TOOLS, prompt=False, look: Callable[[str], str]) -> str:
        try:
            return look(family.render_as_is(messages, tools, {}, prompt))
        except Refused as reason:
            return f"refused ({reason})"

    def written(*texts: str) -> Callable[[str], str]:
        return lambda text: "written" if all(x in text for x in texts) else "ignored"

    def place(text: str) -> str:
        if "Late0" not in text:
            return "ignored"
        return (
            "moved to the start"
            if text.index("Late0") < text.index("Uu")
            else "written where it is"
        )

    def as_text(text: str) -> str:
        if json.dumps('{"place": "X0"}') in text:
            return "encoded twice"
        return "written as it is" if '{"place": "X0"}' in text else "ignored"

    one = call(1, "get_weather", {"place": "X0"})
    called = [*first, said("", [one])]
    answered = [*called, result(1, "get_weather", "Result0")]
    thinks = {"reasoning_content": thought, "thinking": thought}
    return {
        "system first": tried([*first, said("Aa")], look=written("Ss")),
        "no system": tried([user("Uu"), said("Aa")], look=written("Uu")),
        "late system": tried([*first, said("Aa"), system("Late0"), user("Vv")], look=place),
        "tools": tried([*first, said("Aa")], look=written("get_weather")),
        "tools: null": tried([*first, said("Aa")], tools=None, look=written("Aa")),
        "arguments as an object": tried(called, look=written("X0")),
        "arguments as JSON text": tried(
            [*first, said("", [call(1, "get_weather", '{"place": "X0"}')])], look=as_text
        ),
        "two calls": tried(
            [*first, said("", [one, call(2, "get_weather", {"place": "Y0"})])],
            look=written("X0", "Y0"),
        ),
        "result by role tool": tried(answered, look=written("Result0")),
        "content beside a call": tried([*first, said("Beside0", [one])], look=written("Beside0")),
        "content null beside a call": tried(
            [*first, said(None, [one])], look=lambda t: "writes None" if "None" in t else "written"
        ),
        "content null, no call": tried(
            [*first, said(None)], look=lambda t: "writes None" if "None" in t else "written"
        ),
        "tool_calls: null": tried([*first, said("Aa") | {"tool_calls": None}], look=written("Aa")),
        "tool_calls: []": tried([*first, said("Aa", [])], look=written("Aa")),
        "reasoning_content, last turn": tried(
            [*first, said("Aa", **thinks)], look=written(thought)
        ),
        "reasoning_content, earlier turn": tried(
            [*first, said("Aa", **thinks), user("Vv"), said("Bb")], look=written(thought)
        ),
        "reasoning, last turn": tried(
            [*first, said("Aa", reasoning=thought)], look=written(thought)
        ),
        "<think> in content, last turn": tried(
            [*first, said(f"<think>{thought}</think>Aa")], look=written(thought)
        ),
        "<think> in content, earlier turn": tried(
            [*first, said(f"<think>{thought}</think>Aa"), user("Vv"), said("Bb")],
            look=written(thought),
        ),
        "two users in a row": tried([*first, user("Vv"), said("Aa")], look=written("Uu", "Vv")),
        "two assistants in a row": tried(
            [*first, said("Aa"), said("Bb")], look=written("Aa", "Bb")
        ),
        "assistant first": tried([system("Ss"), said("Aa"), user("Uu")], look=written("Aa")),
        "result without a call": tried(
            [*first, said("Aa"), result(1, "now", "Result0")], look=written("Result0")
        ),
        "last message the assistant's, with a generation prompt": tried(
            [*first, said("Aa")],
            prompt=True,
            look=lambda text: (
                "ends with " + json.dumps(text[-60:].split("Aa", 1)[-1], ensure_ascii=False)
            ),
        ),
    }


def expected(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for family in FAMILIES:
        family.source = folder / f"{family.name}.jinja"
        table[family.name] = {
            "tokens": family.tokens,
            "shapes": shapes(family),
            "conversations": [
                conversation
                | {"remarks": remarks(family, conversation), "turns": turns(family, conversation)}
                for conversation in conversations(family)
            ],
        }
    return table


def as_json(table: dict[str, Any]) -> str:
    """`table` as JSON, a message and a turn a line; `tools` once, as all conversations have the same."""
    lines = ["{", '"tools": ' + tojson(TOOLS) + ",", '"templates": {']
    for name, rows in table.items():
        lines.append(f"{tojson(name)}: {{")
        lines.append('"tokens": ' + tojson(rows["tokens"]) + ",")
        lines.append('"shapes": ' + json.dumps(rows["shapes"], ensure_ascii=False, indent=1) + ",")
        lines.append('"conversations": [')
        for conversation in rows["conversations"]:
            short = conversation | {"tools": conversation["tools"] is not None}
            listed = {key: short.pop(key) for key in ("messages", "turns")}
            lines.append(tojson(short).removesuffix("}") + ",")
            for key, entries in listed.items():
                lines.append(f" {tojson(key)}: [")
                lines += ["  " + tojson(entry) + "," for entry in entries]
                lines[-1] = lines[-1].removesuffix(",")
                lines.append(" ]" + ("," if key == "messages" else ""))
            lines.append("},")
        lines[-1] = "}"
        lines += ["]", "},"]
    lines[-1] = "}"
    return "\n".join([*lines, "}", "}"]) + "\n"


def explain(folder: Path) -> None:
    """Where the whole conversation's text and context + target part, and how."""
    for name, rows in expected(folder).items():
        family = next(f for f in FAMILIES if f.name == name)
        for conversation in rows["conversations"]:
            given, tools, kwargs = (conversation[k] for k in ("messages", "tools", "kwargs"))
            for row in conversation["turns"]:
                at = f"{name} {conversation['name']} {row['message']}"
                if "refused" in row:
                    say(f"{at}: refused at {row['refused_at']}: {row['refused']}")
                    continue
                ours = row["context"] + row["target"]
                last = family.render(given[: row["message"] + 1], tools, kwargs, prompt=False)
                for what, text in (("as last turn", last), ("in the whole", None)):
                    if text is None:
                        try:
                            text = family.render(given, tools, kwargs, prompt=False)
                        except Refused as reason:
                            say(f"{at} {what}: refused: {reason}")
                            continue
                    if text.startswith(ours):
                        continue
                    both = enumerate(zip(ours, text, strict=False))
                    n = next((k for k, (a, b) in both if a != b), min(len(ours), len(text)))
                    side = "context" if n < len(row["context"]) else "target"
                    before, here, there = ours[n - 20 : n], ours[n : n + 40], text[n : n + 40]
                    say(
                        f"{at} {what}: parts in the {side} after {before!r}: ours {here!r}, there {there!r}"
                    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--templates", type=Path, required=True, help="folder with the ten files")
    parser.add_argument("--check", action="store_true", help="compare with expected.json")
    parser.add_argument("--explain", action="store_true", help="print where renderings part")
    arguments = parser.parse_args()
    if arguments.explain:
        explain(arguments.templates)
        return 0
    made = as_json(expected(arguments.templates))
    path = HERE / "expected.json"
    if arguments.check:
        same = path.read_text(encoding="utf-8") == made
        say("the same" if same else "expected.json differs")
        return 0 if same else 1
    path.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
