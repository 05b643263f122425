"""The conversations of `expected.json`: thirteen for all templates, and what only one template has."""

from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place, today or later – “now” if no day is given.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "A place, e.g. Zürich"},
                    "days": {"type": "integer", "description": "How many days"},
                    "units": {"type": "string", "enum": ["C", "F"], "description": "Units"},
                    "options": {"type": "object", "description": "More options"},
                },
                "required": ["place"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
]

RICH = {
    "place": 'Zürich “Hb” \\ "x"\n<b>&amp;</b>',
    "days": 3,
    "units": "C",
    "options": {
        "exact": True,
        "off": False,
        "none": None,
        "ratio": 3.0,
        "tiny": 1e-07,
        "big": 12345678901234567890,
        "list": [1, "zwei", [], {}],
        "emoji": "🌧️",
    },
    "from": "",
}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str | None, calls: list | None = None, **more: Any) -> Message:
    message: Message = {"role": "assistant", "content": text, **more}
    if calls is not None:
        message["tool_calls"] = calls
    return message


def call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    return {
        "id": f"call{number:05d}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def result(number: int, name: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": name, "content": text}


def conversations(family: Any) -> Iterator[dict[str, Any]]:
    """Name, messages, tools and arguments of each; `family` has a name, marks, a field for thoughts."""

    def made(name, what, messages, tools=None, **kwargs):
        return {"name": name, "what": what, "messages": messages, "tools": tools, "kwargs": kwargs}

    think = family.think
    yield made(
        "plain_unicode",
        "system first, two turns, no tools; letters beyond ASCII, blanks at both ends of texts",
        [
            system("Antworte knapp. 请用中文。"),
            user(" Wie heißt du?\u00a0"),
            said("  Ich heiße 小明 👩‍🔬 – e\u0301 ≠ é\n"),
            user("שלום\n\nזה הכול?"),
            said("Ja.\u200b\t"),
        ],
        TOOLS if family.name == "hermes_3" else None,
    )
    yield made(
        "call_then_answer_then_more",
        "a call with nested arguments, its result as JSON, an answer; then a second question and answer",
        [
            system("You have tools."),
            user("Weather?"),
            said("", [call(1, "get_weather", RICH)]),
            result(
                1,
                "get_weather",
                '{"ok": true, "t": [1.50, null], "text": "Regen \\"stark\\" – 雨"}',
            ),
            said("Rain, 1.5 °C."),
            user("Thanks. And tomorrow?"),
            said("I can't tell."),
        ],
        TOOLS,
    )
    yield made(
        "arguments_as_text",
        "arguments as JSON text (compact, escaped; empty), content and unused fields null; two calls",
        [
            system("You have tools."),
            user("Weather in two places, and the time?"),
            said(
                None,
                [
                    call(
                        1,
                        "get_weather",
                        '{"place":"Z\\u00fcrich","days":2,"options":{"a":[true,null,1.0]}}',
                    ),
                    call(2, "now", ""),
                ],
            ),
            result(1, "get_weather", '{"t": 4}'),
            result(2, "now", "12:00"),
            said("4 °C at noon.", None) | {"tool_calls": None},
        ],
        TOOLS,
    )
    yield made(
        "chained_calls_with_thoughts",
        "thought, call, result, twice; thought, answer; then a second question with a thought",
        [
            system("You have tools."),
            user("What time is it, and is it raining in Bern?"),
            said("", [call(1, "now", {})], **{think: "First the time.\nThen the weather."}),
            result(1, "now", "12:00"),
            said("", [call(2, "get_weather", {"place": "Bern"})], **{think: "Now Bern."}),
            result(2, "get_weather", '{"rain": false}'),
            said("Noon, and dry.", **{think: "Both are known."}),
            user("And in Basel?"),
            said("", [call(3, "get_weather", {"place": "Basel"})], **{think: "Basel too."}),
            result(3, "get_weather", '{"rain": true}'),
            said("Wet.", **{think: "It rains."}),
        ],
        TOOLS,
    )
    yield made(
        "thoughts_over_two_questions",
        "two plain turns with thoughts (blank lines at both ends of one), a third without",
        [
            system("Be brief."),
            user("2+2?"),
            said("4", **{think: "\nTwo and two.\n"}),
            user("3+3?"),
            said("6", **{think: "Three and three."}),
            user("4+4?"),
            said("8"),
        ],
        TOOLS if family.name == "hermes_3" else None,
    )
    yield made(
        "thought_inside_content",
        "the thought is in the content, between <think> and </think>, as many data sets have it",
        [
            system("Be brief."),
            user("2+2?"),
            said("<think>\nTwo and two.\n</think>\n\n4"),
            user("The time?"),
            said("<think>\nI ask.\n</think>\n\n", [call(1, "now", {})]),
            result(1, "now", "12:00"),
            said("<think>\nNoon.\n</think>\n\nIt is noon."),
        ],
        TOOLS,
    )
    marks = " ".join(family.marks)
    yield made(
        "marks_as_text",
        "the template's own marks in a user's text and in results; a result is the last message",
        [
            system("You have tools."),
            user(f"U1 {marks} U2"),
            said("", [call(1, "now", {})]),
            result(1, "now", f"R1 {marks} R2"),
            said("Strange text."),
            user("Again?"),
            said("", [call(2, "now", {})]),
            result(2, "now", "12:01"),
        ],
        TOOLS,
    )
    yield made(
        "empty_turns",
        "an empty turn in the middle and one at the end",
        [system("Be brief."), user("Say nothing."), said(""), user("Again."), said("")],
        TOOLS if family.name == "hermes_3" else None,
    )
    yield made(
        "late_system",
        "a second system message in the middle",
        [
            system("Be brief."),
            user("Hello"),
            said("Hi."),
            system("From now on, be rude."),
            user("Hello again"),
            said("Go away."),
        ],
        TOOLS if family.name == "hermes_3" else None,
    )
    yield made(
        "two_users_two_assistants",
        "two messages of the user in a row, and two of the assistant in a row",
        [
            system("Be brief."),
            user("One."),
            user("Two."),
            said("Both."),
            said("And more."),
            user("?"),
            said("!"),
        ],
        TOOLS if family.name == "hermes_3" else None,
    )
    yield made(
        "assistant_first",
        "the assistant begins, after the system message",
        [system("Be brief."), said("How can I help?"), user("Not at all."), said("Good.")],
        TOOLS if family.name == "hermes_3" else None,
    )
    yield made(
        "text_beside_calls",
        "content and two calls in one turn; the first and the third turn have `tool_calls: []`",
        [
            system("You have tools."),
            user("Hello"),
            said("Hello!", []),
            user("Weather and time?"),
            said(
                "  I look it up.\n", [call(1, "get_weather", {"place": "Bern"}), call(2, "now", {})]
            ),
            result(1, "get_weather", '{"t": 4}'),
            result(2, "now", "12:00"),
            said("Done.", []),
        ],
        TOOLS,
    )
    yield made(
        "nothing_first",
        "no system message, no tools: the template's own first words, a date perhaps",
        [user("Hello"), said("Hi."), user("Bye"), said("Bye.")],
    )
    # What only some templates have.
    if family.name == "mistral_nemo":
        yield made(
            "same_question_twice",
            "the last question was asked before: the template compares messages, and writes tools twice",
            [
                user("Time?"),
                said("", [call(1, "now", {})]),
                result(1, "now", "12:00"),
                said("Noon."),
                user("Time?"),
                said("Noon."),
            ],
            TOOLS,
        )
        long = call(1, "now", {}) | {"id": "call_1"}
        yield made(
            "id_of_another_length",
            "an id that is not nine characters long",
            [
                user("Time?"),
                said("", [long]),
                result(1, "now", "12:00") | {"tool_call_id": "call_1"},
                said("Noon."),
            ],
            TOOLS,
        )
    if family.name == "deepseek_v3_1":
        yield made(
            "thinking_on",
            "the template's argument: thoughts are sampled",
            [
                user("2+2?"),
                said("4", reasoning_content="Two and two."),
                user("Time?"),
                said("", [call(1, "now", {})], reasoning_content="I ask."),
                result(1, "now", "12:00"),
                said("Noon."),
                user("5+5?"),
                said("10"),
            ],
            TOOLS,
            thinking=True,
        )
    if family.name == "kimi_k3":
        yield made(
            "results_in_another_order",
            "results in another order than their calls: the template sorts them; a key that needs escaping",
            [
                system("s"),
                user("Both?"),
                said(
                    "",
                    [call(1, "get_weather", {"place": "Bern", 'a "&" b': 1}), call(2, "now", {})],
                ),
                result(2, "now", "12:00"),
                result(1, "get_weather", "dry"),
                said("Noon, dry."),
            ],
            TOOLS,
        )
        yield made(
            "thinking_off",
            "the template's argument: no thoughts, neither sampled nor in earlier turns",
            [
                system("s"),
                user("2+2?"),
                said("4", reasoning_content="Two and two."),
                user("3+3?"),
                said("6"),
            ],
            thinking=False,
        )
        yield made(
            "effort_refused",
            "an effort that the template's text names and its code refuses",
            [system("s"), user("2+2?"), said("4")],
            thinking_effort="medium",
        )
        nameless = {k: v for k, v in result(1, "now", "12:00").items() if k != "name"}
        yield made(
            "nameless_result",
            "a result without a name and without a call before it",
            [system("s"), user("Time?"), nameless, said("Noon.")],
            TOOLS,
        )
    if family.name == "minimax_m2":
        yield made(
            "result_without_call",
            "a tool's result after a plain answer",
            [user("Time?"), said("I know it."), result(1, "now", "12:00"), said("Noon.")],
            TOOLS,
        )
    if family.name == "functionary_v3_1":
        yield made(
            "python",
            "the tool with a format of its own",
            [
                user("6*7?"),
                said("", [call(1, "python", {"code": "print(6*7)"})]),
                result(1, "python", "42"),
                said("42"),
            ],
            TOOLS,
        )
    if family.name == "apertus":
        yield made(
            "result_first",
            "a tool's result before any turn of the assistant",
            [system("s"), user("Time?"), result(1, "now", "12:00"), said("Noon.")],
            TOOLS,
        )
        yield made(
            "thinking_on",
            "the template's argument: one word of the context changes, thoughts still have no place",
            [system("s"), user("2+2?"), said("4", reasoning_content="Two and two.")],
            TOOLS,
            enable_thinking=True,
        )
        yield made(
            "null_between_calls",
            "content null in a second call: the template forgets a bracket there if null stays null",
            [
                system("s"),
                user("Time, and weather?"),
                said(None, [call(1, "now", "{}")]),
                result(1, "now", "12:00"),
                said(None, [call(2, "get_weather", '{"place": "Bern"}')]),
                result(2, "get_weather", "dry"),
                said("Noon, dry."),
            ],
            TOOLS,
        )
        no_type = {k: v for k, v in call(1, "now", {}).items() if k != "type"}
        yield made(
            "call_without_type",
            "a call without `type`",
            [
                system("s"),
                user("Time?"),
                said("", [no_type]),
                result(1, "now", "12:00"),
                said("Noon."),
            ],
            TOOLS,
        )
    if family.name == "solar_open":
        yield made(
            "thought_by_the_usual_name",
            "`reasoning_content`, which most data sets have; the template reads `reasoning` only",
            [system("s"), user("2+2?"), said("4", reasoning_content="Two and two.")],
            default_system_prompt=False,
        )
        yield made(
            "little_effort",
            "the template's argument: the generation prompt has an empty thought",
            [
                system("s"),
                user("2+2?"),
                said("4", reasoning="Two and two."),
                user("Time?"),
                said("", [call(1, "now", {})]),
            ],
            TOOLS,
            reasoning_effort="low",
            default_system_prompt=False,
        )
    if family.name == "seed_oss":
        yield made(
            "no_thought_wanted",
            "the template's argument: a budget of 0 is a second system message and a thought in the prompt",
            [system("s"), user("2+2?"), said("4")],
            thinking_budget=0,
        )
        yield made(
            "thought_only",
            "a thought and no content",
            [system("s"), user("2+2?"), said("", reasoning_content="Four."), user("?"), said("4")],
        )
