"""What reads the policy's text takes time linear in it: each reader on 256,000 hostile characters.

A policy under training writes anything, and what takes quadratic time on it holds up all who wait for the
same process. So patterns and parsers of the rooms that see its text are listed here: each with the reader
that tries it, or with the reason why it needs none. A new one fails until it is on one of the two lists.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from package_families import OF_PACKAGE

from realsys.api.basics.thoughts import THINK, text_behind_thoughts, without_marks
from realsys.generation.engine.stop_texts import StopTexts
from realsys.observability.report.attempt_outcomes import without_colours as plain_line
from realsys.rewards import judge
from realsys.rewards.final_answers.stated_answer import stated_answer
from realsys.rewards.harbor import verifier_rewards
from realsys.rewards.math_verify import math_verify_reward
from realsys.rewards.programs.code_tests import program_of, same_output
from realsys.rewards.programs.fenced_blocks import fenced_blocks
from realsys.rollout.agents import tool_use
from realsys.rollout.conversation import chat_rendering, message_matching
from realsys.rollout.conversation.answer_forms import ANSWER_FORMS, AnswerForm
from realsys.rollout.conversation.chat_messages import ChatMessage, ToolCall
from realsys.rollout.conversation.form_choice import choose_form
from realsys.rollout.conversation.forms.family_calls import FAMILY_CALLS
from realsys.rollout.conversation.package_form import MOST_CHARACTERS
from realsys.rollout.conversation.stop_cut import before_stops, cut_at_stop
from realsys.rollout.dialects import anthropic_stream, body_fields, chat_completions, error_bodies
from realsys.rollout.environments import calculator, gymnasium_environment
from realsys.rollout.environments.openenv_messages import ActionShape
from realsys.rollout.runners import chat_agent, nemo_gym_agent, shell_turns

ROOT = Path(__file__).parents[3]
ROOMS = (
    *("realsys/rewards", "realsys/reward_worker", "realsys/rollout", "realsys/policy_server"),
    *("realsys/generation/engine", "realsys/generation/decoding", "realsys/evaluator"),
    *("realsys/interfaces", "realsys/observability", "realsys/api/basics", "launcher/serving"),
)

SMALL, LARGE = 32_000, 256_000  # characters
MOST = 24  # times as long, of eight times the text: a quadratic reader takes 64
Hostile = str | tuple[str, str]
FLOOR_S = 0.001  # a small text's time is not known more exactly

# ---- readers -------------------------------------------------------------------------------------

# fmt: off
BLANK = (" ", "\n", "\t \n")
JSON = ("{", "[", '"', "\\", '{"a":', "[1,", "9", "\\u00e9", "é", "\ud83d")
FENCES = ("```\n", "```py\n", "`", '```py\n"""\n', "'''\n", "- ", "```x`")
THOUGHTS = (
    "<think>", "</think>", "<think></think>", "<think>\n", "[THINK]", "[/THINK]",
    "<|channel|>", "<|channel|>analysis<|message|>", "x <think>", "<thin",
)
MATH = (
    "\\boxed{", "\\boxed{{", "}", "$", "$5 ", "$1,1,1,1", "####", "####\n", "#### 1 ", "9", "9,", "1/",
    "1 1/2 ", "9^", "(", "-", "**", "**9 ", "__a ", "`9", "\\frac{", "\\frac{1}{", "x=", "=", "1.", "½",
    "\\text{", "\\,1", "{,}", "12 \\%", "√", "–", "1e3",
)
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
SEPARATED = "<｜tool▁call▁begin｜>a<｜tool▁sep｜>"
FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{}"
KIMI, KIMI_CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>"
MINIMAX, HY3, DSML = "<minimax:tool_call>", "<tool_calls:opensource>", "<｜DSML｜tool_calls>\n"
INKLING = "<|content_invoke_tool_json|>"
DSML_PARAMETER = '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>'
INNER = {"minimax-m2": "</invoke>", "deepseek-v4": "</｜DSML｜invoke>", "hy3": "</tool_call:opensource>"}
# What is repeated, or what it begins with and what is repeated behind that.
MARKS: dict[str, tuple[Hostile, ...]] = {
    "hermes": (
        "<tool_call>", "</tool_call>", "</tool_call", '<tool_call>{"a":', "<tool_call>[",
        '<tool_call>{"</tool_call>', '<tool_call>"', '<tool_call>{\\"', '<tool_call>"\n', CALL,
        ('<tool_call>{"name": "f", "arguments": ', '{"a":'),
    ),
    "qwen3_coder": (
        "<tool_call>", "<function=", "<function=f>", "<parameter=b>", "</function>",
        "<function=f></function> ", "<function=f>\n<parameter=b>\n", "<function=f><parameter=b>[",
        "<tool_call><function=f><parameter=a>", "<tool_call><function=f><parameter=a>x</tool_call>",
        ("<tool_call><function=f>", "<parameter=a>\n1\n</parameter>\n"),
        ("<tool_call><function=f><parameter=a>", "\n"),
        ("<tool_call><function=f><parameter=a>", "\n<parameter="),
        ("<tool_call><function=f><parameter=a>", "</parameter"),
        "<tool_call><function=f><parameter=a></parameter>", "<function=f><parameter=</function>",
    ),
    "glm": (
        "<tool_call>", "</tool_call>", "<arg_key>", "<tool_call>f<arg_key>", "<arg_value>",
        "<tool_call>f<arg_key>a</arg_key>", "<tool_call>f</tool_call> ", "\n<arg_key>",
        ("<tool_call>f", "<arg_key>a</arg_key><arg_value>1</arg_value>"),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>", "</arg_value"),
        "<tool_call>f<arg_value></tool_call>", "<tool_call><arg_value></arg_value>",
        ("<tool_call>f", "\n"),
    ),
    "hy3_preview": (
        "<tool_calls>", "</tool_calls>", "<tool_calls><tool_call>", "<tool_call>f<tool_sep>", "<tool_sep>",
        "<tool_call>f<tool_sep></tool_call> ", ("<tool_call>f", "<tool_sep>"),
        ("<tool_call>f<tool_sep>", "\n"),
        ("<tool_call>f<tool_sep>", "<arg_key>a</arg_key><arg_value>1</arg_value>"),
    ),
    "nemotron_list": ("<TOOLCALL>", '<TOOLCALL>"', "<TOOLCALL>[", '<TOOLCALL>\\"', "</TOOLCALL"),
    "jamba_list": (
        "<tool_calls>", '<tool_calls>"</tool_calls>', "<tool_calls>[{}]</tool_calls>",
        ("<tool_calls>[", '{"name": "f", "arguments": {}},'),
    ),
    "granite_list": ("<|tool_call|>", "<|tool_call|>[]", ("<|tool_call|>", "<|/tool_call|")),
    "llama3_json": (
        "<|python_tag|>", "<|python_tag|>{", '{"name":"f","parameters":{}};', '{"name":', ";",
        ("x ", '{"name":'), ("x ", '{"name": 1} '), ("x ", '{"name":[1,'),
        ("x ", '{"name":"f","parameters":{}} '),
        '{"type": "function", ', '{"name": "f", "parameters": {}};<|python_tag|>',
    ),
    "mistral": (
        "[TOOL_CALLS][{", "[TOOL_CALLS]a[CALL_ID]b", "[CALL_ID]", "[TOOL_CALLS]f [ARGS] ",
        '[TOOL_CALLS][{"name":"a","arguments":{}}]',
        '[TOOL_CALLS]f{} "', '[TOOL_CALLS]f{} \\"', '[TOOL_CALLS]f{"', '[TOOL_CALLS]f{\\"',
        '[TOOL_CALLS]f{} "\\', ('[TOOL_CALLS]f{"a": "', "[TOOL_CALLS]f{}"),
        ("[TOOL_CALLS]f", " "), ("[TOOL_CALLS]f[CALL_ID]", "a"), ("[TOOL_CALLS]", "a"),
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜> ", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>", "\n```json\n", "\n```", f"{SEPARATED}{{", FENCED,
        f'{SEPARATED}"', f'{SEPARATED}"<｜tool▁call▁end｜>', f'{SEPARATED}\\"',
        (SEPARATED, '{"a":'), (FENCED, "\n```"),
    ),
    "plain": (),
    "plain_thoughts": (),
    "kimi-k2": (
        KIMI, KIMI_CALL, "<|tool_call_begin|>", "<|tool_calls_section_end|>",
        (KIMI, KIMI_CALL),
        f'{KIMI}"', f'{KIMI}\\"', f'{KIMI}"<|tool_calls_section_end|>',
        (f"{KIMI}{KIMI_CALL}", '{"a":'), (KIMI, f"{KIMI_CALL}{{}}<|tool_call_end|>"),
    ),
    "minimax-m2": (
        MINIMAX, "<invoke name=", '<invoke name="f">', "</invoke>", f'{MINIMAX}<invoke name="f">',
        (MINIMAX, '<invoke name="f">'), f"{MINIMAX}<parameter name=",
        (MINIMAX, "<parameter name=</parameter"),
        (f'{MINIMAX}<invoke name="f">', '<parameter name="a">'),
        (MINIMAX, '<invoke name="f"><parameter name="a">1</parameter>'),
        (MINIMAX, '<invoke name="f"><parameter name="a">NaN</parameter></invoke>'),
    ),
    "hy3": (
        HY3, "<tool_call:opensource>",
        (HY3, "<tool_call:opensource>f<tool_sep:opensource><arg_key:opensource>"),
        f"{HY3}<arg_value:opensource>", (f"{HY3}<arg_value:opensource>", "</arg_value:"),
        (HY3, "<arg_key:opensource>a</arg_key:opensource><arg_value:opensource>"),
    ),
    "gemma4": (
        "<|tool_call>", "<|tool_call>call:f{", '<|"|>',
        ("<|tool_call>call:f{", "a:{"), ("<|tool_call>call:f{", 'a:<|"|>'),
        '<|tool_call><|"|>', '<|tool_call>call:f{a:<|"|><tool_call|>',
        ("<|tool_call>call:f{", "a:NaN,"), "<|channel>thought", "<channel|>",
    ),
    "inkling": (
        "<|message_model|>", "<|end_message|>", "<|content_thinking|>",
        "f<|content_invoke_tool_json|>", f"<|message_model|>f{INKLING}",
        (f"<|message_model|>f{INKLING}", '{"a":'), f'<|message_model|>f{INKLING}"',
        f'<|message_model|>f{INKLING}"<|end_message|>', f'<|message_model|>f{INKLING}\\"',
    ),
    "deepseek-v4": (
        DSML, '<｜DSML｜invoke name="f">\n', "</｜DSML｜invoke>",
        (DSML, '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>'),
        (f'{DSML}<｜DSML｜invoke name="f">\n', '<｜DSML｜parameter name="a" string="true">'),
        (f'{DSML}<｜DSML｜invoke name="f">\n', '<｜DSML｜parameter name="</｜DSML｜parameter>'),
        (DSML + '<｜DSML｜invoke name="f">\n', DSML_PARAMETER),
    ),
}
# fmt: on


def letters(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def parsed(name: str) -> Callable[[str], Any]:
    @cache
    def form() -> AnswerForm:
        if name in ANSWER_FORMS:
            return ANSWER_FORMS[name]
        return choose_form(name, OF_PACKAGE[name].tokenizer, renderer="template", template="")

    def read(text: str) -> None:
        given, ways = [text], (False, True)
        if name in FAMILY_CALLS:
            ways = (False,)
            calls = FAMILY_CALLS[name]
            if text.startswith(calls.opening):  # the package gets whole blocks only, and short ones
                block = text[: MOST_CHARACTERS - 100] + INNER.get(name, "") + calls.closing
                given += [block * max(1, len(text) // len(block))]
        for answer in given:
            for thinking in ways:
                form().safe_prefix(answer, thinking=thinking, tools=True)
                found = form().parse(answer, thinking=thinking, tools=True)
                assert not NOT_JSON.search("".join(call.arguments for call in found.calls))

    return read


def body_of(text: str) -> bytes:
    message = {"role": "assistant", "content": text, "reasoning_content": text}
    return json.dumps({"model": "", "messages": [message]}).encode()


def bad_body(text: str) -> str | None:
    """Reads a body with many texts below a long name, of which none is broken."""
    texts = {str(i): [i] for i in range(len(text) // 99)}
    return body_fields.half_character(json.dumps({text: texts}).encode())


def streamed(text: str) -> None:
    async def chunks() -> Any:
        for begin in range(0, len(text), 500):
            yield text[begin : begin + 500].encode("utf-8", "replace")

    async def read() -> None:
        kind, request = {"content-type": "text/event-stream"}, httpx2.Request("POST", "http://a")
        response = httpx2.Response(200, headers=kind, content=chunks(), request=request)
        async for _ in httpx2.EventSource(response, max_event_size=None):
            pass

    asyncio.run(read())


def quietly(read: Callable[[str], Any]) -> Callable[[str], None]:
    """A refusal is an answer, too."""

    def call(text: str) -> None:
        try:
            read(text)
        except Exception:
            return

    return call


NOT_JSON = re.compile("NaN|Infinity")
DISCRETE = type("Discrete", (SimpleNamespace,), {})(start=0, n=10)
BOX = SimpleNamespace(from_jsonable=lambda values: values, contains=lambda value: True)
STOPS = ("</s>", "STOP", "\n\n\n")
TOOL_CALLS = ("<<", "<<1", "<", ">>", "<<1=", "<<1>", ("<<", "1"))


def message(*, content: str) -> ChatMessage:
    return ChatMessage(role="assistant", content=content)


def called(arguments: str) -> ToolCall:
    return ToolCall(id="", name="a", arguments=arguments)


def ends_in_stop(text: str) -> bool:
    by_letters = SimpleNamespace(decode=lambda ids, **_: letters(ids))
    return StopTexts(STOPS, by_letters).completed([*map(ord, text)])


# A reader, and what else than BLANK is hostile to it.
READERS: dict[str, tuple[Callable[[str], Any], tuple[Hostile, ...]]] = {
    "thoughts": (text_behind_thoughts, THOUGHTS),
    "opened thoughts": (lambda text: text_behind_thoughts(text, opened=THINK[0]), THOUGHTS),
    "marks of thoughts": (without_marks, THOUGHTS),
    "fenced blocks": (
        fenced_blocks,
        (*FENCES, "`" * 500 + "\n", ("```py\n", "\\'"), ("```py\n", "'")),
    ),
    "printed": (
        lambda text: same_output(text, f"0.5\n{text[:1000]}"),
        ("9", "9 ", "0.5 ", "1e9\n", "é"),
    ),
    "math": (lambda text: math_verify_reward(response=text, answer="4"), MATH),
    "stated answer": (
        stated_answer,
        (
            "<answer>",
            "</answer>",
            "<answer></answer>",
            "<answer>x",
            "\\boxed{",
            "####",
            "The answer is ",
            "```",
            "**",
            "<think>",
        ),
    ),
    "grade": (
        lambda text: judge.read_grade(judge._Reply(text, was_cut=False), 10.0),
        (
            "9",
            "-",
            ".",
            "9.",
            "-9",
            "9/",
            "Grade:",
            "Grade: 9\n",
            "<think>",
            "</think>",
            "[/THINK]",
        ),
    ),
    "program": (
        lambda text: program_of(text, [{"code": text[:1000]}]),
        (*FENCES, "def f\n", ("```py\n", "a:"), ("```py\n", "a: b\n"), ("```py\n", "async  def")),
    ),
    "verdict": (lambda text: verifier_rewards._rewards({"reward.json": text.encode()}), JSON),
    "verdict's number": (
        lambda text: verifier_rewards._rewards({"reward.txt": text.encode()}),
        ("9", ".9", "1e", ("0.", "9")),
    ),
    **{name: (parsed(name), (*marks, "{", "[", '"', "<think>")) for name, marks in MARKS.items()},
    "stop texts": (lambda text: cut_at_stop([*map(ord, text)], STOPS, letters), ("STO", "</", "<")),
    "shown before stops": (lambda text: before_stops(text, STOPS), ("</s", "STO", "</", "<")),
    "newest stop text": (ends_in_stop, ("</s", "STO")),
    "tool use": (lambda text: re.search(tool_use.CALL, text), TOOL_CALLS),
    "calculator's call": (calculator._CALL.search, TOOL_CALLS),
    "calculator": (calculator.evaluate, ("9", "(", "1+", "9,999", "-")),
    "shell's block": (
        lambda text: shell_turns.commands_of(message(content=text), by_calls=False),
        ("<think>", "<think>```sh\n"),
    ),
    "shell's call": (lambda text: shell_turns._called("bash", text, ""), JSON),
    "shell's output": (lambda text: shell_turns.shortened(text, 1000), ("é",)),
    "call's arguments": (lambda text: chat_agent.arguments_of(called(text)), JSON),
    "call in a template": (lambda text: chat_rendering._template_call(called(text)), JSON),
    "call as a key": (message_matching.canonical_json, (*JSON, "1e308,", "[1e308,")),
    "call for Anthropic's clients": (anthropic_stream.tool_input, JSON),
    "whole letters": (chat_agent.whole_letters, ("é", "\ud83d")),
    "history": (lambda text: chat_completions.read(body_of(text), {}), JSON),
    "broken history": (bad_body, JSON),
    "wrong field's path": (error_bodies._FIELD_PATH.match, ("a", "a.", "a[", "a[0]", "[")),
    "discrete action": (
        lambda text: gymnasium_environment.action_of(text, DISCRETE),
        ("9", "-", "-9 "),
    ),
    "boxed action": (lambda text: gymnasium_environment.action_of(text, BOX), JSON),
    "drawing": (
        gymnasium_environment.without_colours,
        ("\x1b[31m", "\x1b[0m", "\x1b[", "\x1b[1;", "\x1b[31m\x1b[m", ("\x1b[", "1;")),
    ),
    "OpenEnv's action": (
        ActionShape(text_field="", fields=(), constant={}).action_of,
        (*JSON, "}", "{}", "}{"),
    ),
    "MCP's events, by its package": (streamed, ("data: ", "data: 1\n", "data", "\r")),
    "NeMo Gym's run": (lambda text: nemo_gym_agent.outcome_of_run(text, ""), JSON),
    "log line": (plain_line, ("\x1b[", "\x1b[0", "\x1b[ ", "\x1b", "\x1b[0m", ("\x1b[", "0"))),
}


def seconds(read: Callable[[str], Any], text: str) -> float:
    """Computing time of this thread, which others on the machine do not lengthen by much."""
    gc.disable()  # it goes through all that other tests have left
    try:
        begin = time.thread_time()
        read(text)
        return time.thread_time() - begin
    finally:
        gc.enable()


def repeated(hostile: Hostile, size: int) -> str:
    begin, piece = ("", hostile) if isinstance(hostile, str) else hostile
    return begin + piece * (size // len(piece) + 1)


def is_linear(read: Callable[[str], Any], hostile: Hostile) -> bool:
    """Tells whether a text is read in time linear in it; measures again where that is in doubt."""
    tiny, small, large = (repeated(hostile, size) for size in (SMALL // 8, SMALL, LARGE))
    for _ in range(5):
        small_s = seconds(read, small)
        # What is quadratic would take hours on the large text
        if small_s > MOST * FLOOR_S and small_s > MOST * seconds(read, tiny):
            continue
        if seconds(read, large) <= MOST * max(FLOOR_S, small_s):
            return True
    return False


@pytest.mark.thorough
@pytest.mark.parametrize("name", READERS)
def test_a_large_text_takes_eight_times_as_long_as_an_eighth(name: str) -> None:
    read, pieces = READERS[name]
    assert [p for p in (*BLANK, *pieces) if not is_linear(quietly(read), p)] == []


@pytest.mark.thorough
def test_what_is_quadratic_is_found() -> None:
    def pairs(text: str) -> int:
        some = range(len(text) // 16)
        return sum(1 for _ in some for _ in some)

    assert not is_linear(pairs, "x")


# ---- patterns and parsers --------------------------------------------------------------------------

# ``file:name`` of a pattern or of the function that parses → the readers above that try it. ``file:*`` and
# ``folder/*``: all in them, which is entered by that reader alone.
TRIED: dict[str, tuple[str, ...]] = {
    "realsys/api/basics/bounded_files.py:parse_json": ("verdict",),
    "realsys/api/basics/thoughts.py:_ANY_MARK": ("thoughts", "marks of thoughts"),
    "realsys/observability/report/attempt_outcomes.py:_ANSI": ("log line",),
    "realsys/rewards/programs/code_tests.py:_NUMBER": ("printed",),
    "realsys/rewards/programs/fenced_blocks.py:_FENCE": ("fenced blocks",),
    "realsys/rewards/programs/fenced_blocks.py:_LANGUAGE": ("fenced blocks",),
    "realsys/rewards/programs/fenced_blocks.py:_UP_TO_QUOTES": ("fenced blocks",),
    "realsys/rewards/harbor/verifier_rewards.py:_rewards": ("verdict", "verdict's number"),
    "realsys/rewards/final_answers/*": ("math", "stated answer"),
    "realsys/rewards/judge.py:_GRADE": ("grade",),
    "realsys/rewards/judge.py:_NAMED": ("grade",),
    "realsys/rewards/programs/code_tests.py:_DEFINED": ("program",),
    "realsys/rewards/programs/code_tests.py:_NAME": ("program",),
    "realsys/rewards/math_verify.py:*": ("math",),
    "realsys/rewards/final_answers/plain_numbers.py:*": ("math",),
    "realsys/rollout/agents/tool_use.py:ToolUse._up_to_call.has_call": ("tool use",),
    "realsys/rollout/conversation/chat_rendering.py:_template_call": ("call in a template",),
    "realsys/rollout/conversation/forms/answer_scan.py:_Walk._blocks": tuple(MARKS),
    "realsys/rollout/conversation/forms/call_syntax.py:up_to": ("hermes", "mistral", "glm", "kimi-k2"),
    "realsys/rollout/conversation/forms/call_syntax.py:_WHITE": ("deepseek", "llama3_json"),
    "realsys/rollout/conversation/forms/family_calls.py:_GEMMA_KEY": ("gemma4",),
    "realsys/rollout/conversation/forms/family_calls.py:_section": ("minimax-m2", "deepseek-v4", "kimi-k2"),
    "realsys/rollout/conversation/package_form.py:_MESSAGE_END": ("inkling",),
    "realsys/rollout/conversation/package_form.py:_THOUGHTS_END": ("inkling",),
    "realsys/rollout/conversation/package_form.py:_Pieces.__init__": ("kimi-k2", "hy3"),
    "realsys/rollout/conversation/forms/llama3_json_form.py:_CALL_LIKE": ("llama3_json",),
    "realsys/rollout/conversation/forms/llama3_json_form.py:_SEPARATOR": ("llama3_json",),
    "realsys/rollout/conversation/forms/mistral_form.py:_HEAD": ("mistral",),
    "realsys/rollout/conversation/forms/qwen3_coder_form.py:_NAME": ("qwen3_coder",),
    "realsys/rollout/conversation/forms/strict_json.py:_DECODER": ("hermes", "mistral"),
    "realsys/rollout/conversation/message_matching.py:canonical_json": ("call as a key",),
    "realsys/rollout/dialects/anthropic_stream.py:tool_input": ("call for Anthropic's clients",),
    "realsys/rollout/dialects/body_fields.py:_SURROGATE": ("broken history",),
    "realsys/rollout/dialects/body_fields.py:decoded": ("history",),
    "realsys/rollout/dialects/body_fields.py:half_character": ("broken history",),
    "realsys/rollout/dialects/error_bodies.py:_FIELD_PATH": ("wrong field's path",),
    "realsys/rollout/environments/calculator.py:_ALLOWED": ("calculator",),
    "realsys/rollout/environments/calculator.py:_CALL": ("calculator's call",),
    "realsys/rollout/environments/calculator.py:_THOUSANDS": ("calculator",),
    "realsys/rollout/environments/calculator.py:evaluate": ("calculator",),
    "realsys/rollout/environments/gymnasium_environment.py:_COLOUR": ("drawing",),
    "realsys/rollout/environments/gymnasium_environment.py:_NUMBER": ("discrete action",),
    "realsys/rollout/environments/gymnasium_environment.py:action_of": ("boxed action",),
    "realsys/rollout/environments/openenv_messages.py:ActionShape.action_of": ("OpenEnv's action",),
    "realsys/rollout/runners/chat_agent.py:arguments_of": ("call's arguments",),
    "realsys/rollout/runners/nemo_gym_agent.py:outcome_of_run": ("NeMo Gym's run",),
    "realsys/rollout/runners/shell_turns.py:_called": ("shell's call",),
}  # fmt: skip

_OURS = "one JSON value, which our own process wrote"
_SETTINGS = "of settings or records, which the policy does not write"
_NAMES = "of names of our files and ids"
REVIEWED: dict[str, str] = {
    "launcher/serving/chat_client.py:_pieces": "one JSON value a line of our server's stream",
    "launcher/serving/chat_client.py:_refusal": _OURS,
    "launcher/serving/saved_models.py:_STEP": _NAMES,
    "launcher/serving/server_process.py:_announced_url": _OURS,
    "realsys/api/basics/reward.py:_TERM": _SETTINGS,
    "realsys/api/basics/reward.py:reward_terms": _SETTINGS,
    "realsys/evaluator/checkpoints.py:_STEP": _NAMES,
    "realsys/evaluator/rescore.py:_ID": _NAMES,
    "realsys/generation/engine/token_grammar.py:_PLACE": "of llguidance's errors, at their beginning",
    "realsys/interfaces/ppo/episode_groups.py:_pairs": _OURS,
    "realsys/interfaces/ppo/ppo_experience.py:_parts": _OURS,
    "realsys/observability/jsonl.py:_object": _OURS,
    "realsys/observability/wandb_run.py:_run_id": _OURS,
    "realsys/rewards/attack/*": "plays a corpus of ours, in no run",
    "realsys/rewards/programs/code_tests.py:read_tests": _SETTINGS,
    "realsys/rewards/guard/*": "in a guard, under its limits, or one JSON value of our own process",
    "realsys/rewards/guarded_rules.py:_new_guard": _SETTINGS,
    "realsys/rewards/math_library.py:*": "in a guard, under its limits",
    "realsys/rewards/harbor/try_tasks.py:main": _SETTINGS,
    "realsys/rewards/judge.py:_PLACE": _SETTINGS,
    "realsys/rewards/judge.py:_read": "one JSON value of at most 1 MiB",
    "realsys/rewards/rule.py:made_rule": _SETTINGS,
    "realsys/rewards/sandbox/box_messages.py:prepare_codec": _OURS,
    "realsys/rewards/sandbox/box_messages.py:receive": _OURS,
    "realsys/rewards/sandbox/box_program.py:_exit_status": "runs in a box, under its limits",
    "realsys/rewards/sandbox/fork_server.py:main": _OURS,
    "realsys/rewards/sandbox/separate_tests/*": "in a box, under its limits",
    "realsys/rewards/sandbox/node_support.py:node_support": _OURS,
    "realsys/rewards/sandbox/sandbox.py:_ForkServer.__init__": _OURS,
    "realsys/rollout/agents/tool_use.py:ToolUse.__post_init__": "only tries whether it is a pattern",
    "realsys/rollout/conversation/reply_grammar.py:_Rules.pattern": "of a client, of bounded length",
    "realsys/rollout/dialects/held_replies.py:_schema": "one JSON value of a client's request",
    "realsys/rollout/endpoint/endpoint_app.py:_KEY": "of a header, of at most 256 characters",
    "realsys/rollout/environments/mcp_http.py:FaultsAsAnswers.handle_async_request": _OURS,
    "realsys/rollout/environments/mcp_http.py:_object": "one JSON value",
    "realsys/rollout/environments/mcp_process.py:_ID_AT_END": "of at most 512 bytes; no overlap",
    "realsys/rollout/environments/mcp_process.py:_ID_BEFORE": "of at most 512 bytes; no overlap",
    "realsys/rollout/environments/mcp_process.py:too_long": "a number, or a text of 100 characters",
    "realsys/rollout/environments/openenv_session.py:OpenEnvSession._object": "one JSON value",
    "realsys/rollout/runners/command_agent.py:_NUMBER": "one number of a bounded file; no overlap",
    "realsys/rollout/runners/command_agent.py:read_reward": "one JSON value of a bounded file",
    "realsys/rollout/runners/export_verifiers.py:launch_command": _SETTINGS,
    "realsys/rollout/runners/export_verifiers.py:main": _SETTINGS,
    "realsys/rollout/runners/host_process.py:HostedEpisodes._read": "JSON, a line, of a bounded one",
    "realsys/rollout/runners/hosts/function_host.py:Host.run.read": _OURS,
    "realsys/rollout/runners/hosts/verifiers_host.py:main": _SETTINGS,
    "realsys/rollout/runners/hosts/verifiers_host.py:taskset_config": _SETTINGS,
    "realsys/rollout/runners/nemo_gym_agent.py:session_key": "one JSON value of a client's request",
    "realsys/rollout/staleness/transmission.py:_NAME": _NAMES,
}  # fmt: skip

_PARSERS = {
    "re": ("compile", "findall", "finditer", "search", "match", "fullmatch", "sub", "subn", "split"),
    "json": ("load", "loads", "JSONDecoder", "decode"),
    "msgpack": ("decode",),
    "ast": ("parse", "literal_eval"),
    "regex": ("compile", "findall", "finditer", "search", "match", "fullmatch", "sub", "split"),
    "yaml": ("safe_load", "load"),
}  # fmt: skip
_BARE = ("eval", "exec", "compile", "parse_json", "literal_eval", "parse_expr", "sympify")


def sites(path: Path) -> Iterator[str]:
    """Yields where a file makes a pattern or parses: names of constants, or of functions and classes."""
    name = str(path.relative_to(ROOT))

    def walk(node: ast.AST, within: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inside = within
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = (*within, child.name)
            elif isinstance(child, ast.Assign | ast.AnnAssign) and not within:
                target = child.targets[0] if isinstance(child, ast.Assign) else child.target
                inside = (target.id,) if isinstance(target, ast.Name) else ("module",)
            elif isinstance(child, ast.Call) and _parses(child.func):
                yield f"{name}:{'.'.join(within) or 'module'}"
            yield from walk(child, inside)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), ())


def _parses(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in _BARE
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value
    of = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
    return function.attr in _PARSERS.get(of, ())


@pytest.mark.thorough
def test_each_pattern_and_parser_is_tried_or_reviewed() -> None:
    found = {s for room in ROOMS for path in (ROOT / room).rglob("*.py") for s in sites(path)}
    listed = {*TRIED, *REVIEWED}
    unknown = {s for s in found if not any(is_of(s, entry) for entry in listed)}
    assert unknown == set(), (
        "try them in READERS and name them in TRIED, or say in REVIEWED why not"
    )
    gone = {entry for entry in listed if not any(is_of(s, entry) for s in found)}
    assert gone == set(), "these parse no more"
    assert {reader for readers in TRIED.values() for reader in readers} <= READERS.keys()


def is_of(site: str, entry: str) -> bool:
    return site.startswith(entry[:-1]) if entry.endswith("*") else site == entry


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import re\nA = re.compile('a')", ["A"]),
        ("import re\nA: int = re.compile('a')", ["A"]),
        ("import re\ndef f(t):\n    return re.findall('a', t)", ["f"]),
        ("class C:\n    def f(self, t):\n        def g():\n            json.loads(t)", ["C.f.g"]),
        ("import msgspec\nmsgspec.json.decode(b'')", ["module"]),
        ("eval('1')\nx = sympy.parse_expr", ["module"]),
        ("text.split('a')\nrecord.match()", []),
    ],
)
def test_patterns_and_parsers_are_found(code: str, names: list[str], tmp_path: Path) -> None:
    path = ROOT / "realsys" / "x.py"
    made = SimpleNamespace(
        relative_to=lambda root: path.relative_to(root), read_text=lambda encoding: code
    )
    assert list(sites(made)) == [f"realsys/x.py:{name}" for name in names]  # type: ignore[arg-type]
