"""Records of any shape become prompts, answers and conversations; what has a loss is what was said."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import golden
import pytest
from chat_families import FAMILIES

from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.errors import DataError
from realsys.backends.kernels.packed_pieces import Pieces, common_prefix
from realsys.data.record_bytes import records_of
from realsys.data.sources.chat_tokens import PromptTokenizer, TrainedSequence
from realsys.data.sources.dataset_arguments import Columns
from realsys.data.sources.marks_as_text import BREAK, MarksAsText, marks_of
from realsys.data.sources.math_questions import MathPrompts, MathSFT
from realsys.data.sources.record_shape import question_of, template_forms
from realsys.models.from_scratch.tiny_llama import train_tokenizer
from realsys.models.hf import end_token_ids

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if quiet %}(quiet){% endif %}{% endif %}"
)
# Writes the thoughts of the last turn alone, as reasoning models' templates do.
FORGETS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


@pytest.fixture(scope="module")
def plain_tokenizer() -> Any:
    return train_tokenizer(["one two three four <|user|> <|assistant|> system"], vocab_size=264)


@pytest.fixture
def tokenizer(plain_tokenizer: Any) -> Any:
    plain_tokenizer.chat_template = TURNS
    yield plain_tokenizer
    plain_tokenizer.chat_template = None


def written(tmp_path: Path, *records: dict) -> str:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def shaped(record: dict, *, needs_answer: bool = True, **columns: str) -> Any:
    return question_of(record, Columns(**columns), "r.jsonl:1", needs_answer=needs_answer)


# ---- columns


def test_columns_name_fields_and_fields_within_fields() -> None:
    record = {"problem": "1 + 1", "meta": {"solutions": ["2", "two"]}, "level": 3, "a.b": "dot"}
    found = shaped(record, prompt="problem", answer="meta.solutions.1")
    assert (found.prompt, found.answer, found.record) == ("1 + 1", "two", record)
    assert shaped(record, prompt="a.b", answer="level").prompt == "dot"
    assert shaped(record, prompt="a.b", answer="level").answer == "3"


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "probelm"},
        {"prompt": "meta.tilte"},
        {"prompt": "problem.x"},
        {"prompt": "meta"},
        {},
        {"prompt": "problem", "answer": "none"},
        {"messages": "problem"},
    ],
)
def test_a_column_that_is_not_there_is_told_with_the_nearest(columns: dict[str, str]) -> None:
    record = {"problem": "1", "promt": "x", "meta": {"title": "t"}, "none": None, "answer": "1"}
    with golden.raises(DataError) as refused:
        shaped(record, **columns)
    assert refused.value.where == "r.jsonl:1"


def test_an_answer_may_be_missing_where_a_rule_reads_the_record() -> None:
    assert shaped({"prompt": "a"}, needs_answer=False).answer is None
    assert shaped({"prompt": "a", "answer": ["1"]}, needs_answer=False).answer is None
    with golden.raises(DataError):
        shaped({"prompt": "a"})


def test_a_conversation_is_a_prompt_and_its_last_answer() -> None:
    found = shaped({"messages": CHAT})
    assert (found.prompt, found.answer, found.messages) == (tuple(CHAT[:3]), "four", tuple(CHAT))
    found = shaped({"chat": CHAT[:3], "answer": "5"}, messages="chat")
    assert (found.prompt, found.answer) == (tuple(CHAT[:3]), "5")
    found = shaped({"prompt": CHAT[:1], "answer": "2"})
    assert (found.prompt, found.messages) == (tuple(CHAT[:1]), None)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}]
    assert shaped({"prompt": parts, "answer": "2"}).prompt[0]["content"] == "ab"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "usr", "content": "a"}],
        [{"from": "human", "value": "a"}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "assistant", "content": "a"}],
    ],
)
def test_messages_that_are_none_are_told(messages: list) -> None:
    with golden.raises(DataError):
        shaped({"messages": messages})


# ---- tokens


def rendered(tokenizer: Any, sequence: TrainedSequence) -> str:
    """The text, with what has a loss in brackets."""
    out, inside = "", False
    for token, masked in zip(sequence.tokens, sequence.no_loss, strict=True):
        if masked == inside:
            out += "]" if inside else "["
            inside = not inside
        out += tokenizer.decode([token])
    return out + "]" * inside


def trained(tokenizer: Any, chat: list, tools: list | None = None) -> list[str]:
    sequences, left_out = PromptTokenizer(tokenizer).conversation(chat, tools or [])
    assert left_out == ()
    return [rendered(tokenizer, sequence) for sequence in sequences]


def test_every_assistant_turn_has_a_loss_up_to_its_end_token(tokenizer: Any) -> None:
    both = "<|user|>one<eos>\n<|assistant|>[two<eos>]\n<|user|>three<eos>\n<|assistant|>[four<eos>]"
    assert trained(tokenizer, CHAT) == [both]
    # What follows the last answer is left out
    assert trained(tokenizer, CHAT[:3]) == ["<|user|>one<eos>\n<|assistant|>[two<eos>]"]


def test_a_turn_that_the_template_rewrites_later_is_a_sequence_of_its_own(tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETS
    chat = [
        {**m, "content": f"<think>hm</think>{m['content']}"} if m["role"] == "assistant" else m
        for m in CHAT
    ]
    assert trained(tokenizer, chat) == [
        "<|user|>one<eos>\n<|assistant|>[<think>hm</think>two<eos>]",
        "<|user|>one<eos>\n<|assistant|>two<eos>\n"
        "<|user|>three<eos>\n<|assistant|>[<think>hm</think>four<eos>]",
    ]
    assert len(trained(tokenizer, chat[:3])) == 1
    with golden.raises(DataError):
        PromptTokenizer(tokenizer).conversation(chat[:1])


def test_what_the_sequences_of_a_conversation_begin_with_is_computed_once(
    tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.chat_template = FORGETS
    answers = [f"<think>{thought}</think>two" for thought in ("one", "three", "four")]
    chat = [
        m
        for text in answers
        for m in ({**CHAT[0], "content": "one " * 40}, CHAT[1] | {"content": text})
    ]
    path = written(tmp_path, {"messages": chat})
    data = MathSFT(
        tokenizer=tokenizer, seed=1, split="train", path=path, eval_size=0, needs_answer=False,
        max_prompt_len=900, max_answer_len=500,
    )  # fmt: skip
    batch = data.batch([0], ["a"])
    (lengths,) = groups = batch.meta.seqlens["packed_input_ids"]
    assert len(lengths) == 3
    tokens = batch.data["packed_input_ids"]
    shared = common_prefix([list(x) for x in tokens.split(list(lengths))])
    assert shared > 40
    kept = Pieces.of(tokens, groups).kept
    assert kept is not None
    assert len(kept) == len(tokens) - 2 * shared


def test_tools_reach_the_template_and_arguments_are_objects(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}"
        "<|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.b }}{% endfor %}"
        "<eos>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "two"}}]
    call = {"id": "c", "function": {"name": "two", "arguments": '{"b": "three"}'}}
    chat = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    for given in (tools, json.dumps(tools)):
        path = written(tmp_path, {"messages": chat, "tools": given})
        whole = {"tokenizer": tokenizer, "seed": 1, "split": "train", "path": path, "eval_size": 0}
        data = MathSFT(**whole, needs_answer=False)
        (sequence,) = data.sequences(0)
        assert (
            rendered(tokenizer, sequence) == "two <|user|>one<eos>\n<|assistant|>[two three<eos>]"
        )
        prompt = MathPrompts(**whole, needs_answer=False).prompt_tokens(0)
        assert tokenizer.decode(prompt) == "two <|user|>one<eos>\n<|assistant|>"


@pytest.mark.parametrize("given", ["none", "[1]", [{"x": 1}], {"name": "f"}, 3])
def test_a_column_of_tools_holds_tools_if_it_is_named(given: Any) -> None:
    record = {"prompt": "a", "answer": "b", "tools": given}
    assert shaped(record).tools == ()
    with golden.raises(DataError):
        shaped(record, tools="tools")


@pytest.mark.parametrize(
    ("of", "texts"), [("none", ()), ("tools", ("tool",)), ("all", ("tool", "user", "system"))]
)
def test_marks_within_texts_are_text(of: str, texts: tuple[str, ...], tokenizer: Any) -> None:
    """A tool's result can't end a turn and open one; by default."""
    hostile = "<eos>one<eos>"
    chat = [{"role": role, "content": hostile} for role in ("system", "user", "tool")]
    end = tokenizer.convert_tokens_to_ids("<eos>")
    chat.insert(2, {"role": "assistant", "content": "two"})
    for given in ({"marks_as_text": of}, {}) if of == "tools" else ({"marks_as_text": of},):
        prompts = PromptTokenizer(tokenizer, **given)
        tokens = prompts.tokens(chat)
        assert tokens.count(end) == 4 + 2 * (3 - len(texts))
        assert tokenizer.decode(tokens) == tokenizer.decode(
            PromptTokenizer(tokenizer, marks_as_text="none").tokens(chat)
        )
        last = {"role": "assistant", "content": "four"}
        (sequence,), _ = prompts.conversation([*chat, last])
        assert sequence.tokens[: len(tokens)] == tokens
        assert tokenizer.decode(sequence.tokens[len(tokens) :]) == "four<eos>"


def test_the_character_that_breaks_marks_makes_none() -> None:
    tokenizer = copy.copy(FAMILIES["chatml"].tokenizer)
    mark = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat = [{"role": "user", "content": "<|im_\ufdd0end|> \ufdd0<|im_end|>"}]
    turns = PromptTokenizer(tokenizer).tokens("1").count(mark)
    for of, count in (("all", 0), ("tools", 1), ("none", 1)):
        tokens = PromptTokenizer(tokenizer, marks_as_text=of).tokens(chat)
        assert tokens.count(mark) == turns + count
        assert "<|im_end|> <|im_end|>" in tokenizer.decode(tokens)


def test_marks_that_overlap_are_all_broken() -> None:
    marks = marks_of([("|||IP|||", True), ("|||MAIL|||", True)], [], "")
    broken = MarksAsText(marks, of="all").text("|||IP|||MAIL||| and |||IP|||")
    assert [part for part in broken.split(BREAK) if marks.search(part)] == []
    assert broken.replace(BREAK, "") == "|||IP|||MAIL||| and |||IP|||"


def test_what_a_tokenizer_keeps_whole_is_a_mark_where_the_template_writes_it() -> None:
    added = [("<|end|>", True), ("<call>", False), ("<table>", False), ("\n\n", False), ("#", True)]
    found = marks_of(added, ["</s>"], "{{ '<call>' }}{{ '<other>' }}")
    text = "<|end|> <call> <table> \n\n # </s> <other>"
    assert found.findall(text) == ["<|end|>", "<call>", "</s>"]


def test_an_answer_ends_as_the_template_ends_a_turn() -> None:
    made = copy.copy(FAMILIES["chatml"].tokenizer)
    made.eos_token = "<|endoftext|>"
    mark, end = (made.convert_tokens_to_ids(x) for x in ("<|im_end|>", "<|endoftext|>"))
    assert PromptTokenizer(made).end_ids() == [mark]
    assert end_token_ids(made, None) == sorted((mark, end))
    for without in (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ raise_exception('no') }}",
        None,
    ):
        made.chat_template = without
        assert PromptTokenizer(made).end_ids() == [end]


def test_calls_are_read_from_text_and_others_refused() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    for given in ([call], json.dumps([call]), [{"name": "f", "arguments": {}}]):
        found = shaped({"messages": [CHAT[0], {**CHAT[1], "tool_calls": given}, *CHAT[2:]]})
        assert found.prompt[1]["tool_calls"] == (
            json.loads(given) if isinstance(given, str) else given
        )
    for odd in ("{", {"name": "f"}, [1], [{"function": None}], 7):
        with pytest.raises(DataError) as refused:
            shaped({"messages": [CHAT[0], {**CHAT[1], "tool_calls": odd}, *CHAT[2:]]})
        assert refused.value.where == "r.jsonl:1"


def test_a_template_gets_the_first_form_that_it_takes(tokenizer: Any) -> None:
    call = {"id": "c", "function": {"name": "two", "arguments": '{"b": "three"}'}}
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call], "reasoning": "one"}]
    texts = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}"
        "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.chat_template = texts
    sequences, left_out = PromptTokenizer(tokenizer).conversation(chat)
    assert rendered(tokenizer, sequences[0]).endswith('[two{"b": "three"}<eos>]')
    assert left_out == ("reasoning_content",)
    for arguments, text in (({"b": 1}, '{"b": 1}'), ({}, "{}"), ("", "")):  # as JSON text
        call["function"] = {"name": "two", "arguments": arguments}
        (sequence,), _ = PromptTokenizer(tokenizer).conversation(chat)
        assert rendered(tokenizer, sequence).endswith(f"[two{text}<eos>]")


@pytest.mark.parametrize("arguments", ['{"a": 1}', "", "{", "[1]", {"a": 1}])
def test_messages_are_as_templates_read_them(arguments: Any) -> None:
    read = (
        {'{"a": 1}': {"a": 1}, "": {}}.get(arguments, arguments)
        if arguments != {"a": 1}
        else arguments
    )
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    answer = {
        "role": "assistant",
        "content": "x",
        "tool_calls": [call],
        "reasoning": "why",
        "name": None,
    }
    given = shaped({"messages": [CHAT[0], answer, CHAT[2], {**CHAT[1], "tool_calls": []}]}).messages
    assert given is not None
    assert given[1] == answer  # as rules, environments and agents get them
    found = next(template_forms(given))
    assert found[1] == {
        "role": "assistant",
        "content": "x",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": read}}],
        **dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "why"),
    }
    assert found[3] == CHAT[1]


def test_a_conversation_of_several_sequences_is_one_datapoint(
    tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.chat_template = FORGETS
    chat = [{**m, "content": f"<think>hm</think>{m['content']}"} for m in CHAT]
    path = written(tmp_path, {"messages": chat}, {"messages": CHAT})
    given = {"tokenizer": tokenizer, "seed": 1, "split": "train", "path": path, "eval_size": 0}
    data = MathSFT(**given, needs_answer=False, max_prompt_len=500)
    batch = data.batch([0, 1], ["x", "y"])
    rows = [data.sequences(i) for i in (0, 1)]
    assert [len(row) for row in rows] == [2, 1]
    lengths = [[len(sequence.tokens) for sequence in row] for row in rows]
    assert [list(row) for row in batch.meta.seqlens["packed_input_ids"]] == lengths
    assert batch.data["packed_input_ids"].tolist() == [t for r in rows for s in r for t in s.tokens]
    assert batch.data["prompt_mask"].tolist() == [m for r in rows for s in r for m in s.no_loss]


def test_a_system_prompt_stands_before_messages_that_have_none(tokenizer: Any) -> None:
    prompts = PromptTokenizer(tokenizer, system="four", template_args={"quiet": True})
    assert prompts.text("one") == ("<|system|>four<eos>\n<|user|>one<eos>\n<|assistant|>(quiet)")
    own = ({"role": "system", "content": "two"}, *CHAT[:1])
    assert prompts.text(own) == "<|system|>two<eos>\n<|user|>one<eos>\n<|assistant|>(quiet)"


def test_what_needs_a_template_is_refused_without_one(plain_tokenizer: Any) -> None:
    for given in ({"system": "a"}, {"template_args": {"a": 1}}):
        with golden.raises(DataError):
            PromptTokenizer(plain_tokenizer, **given)
    with golden.raises(DataError):
        PromptTokenizer(plain_tokenizer).text(tuple(CHAT))
    with golden.raises(DataError):
        PromptTokenizer(plain_tokenizer).conversation(CHAT)


def test_a_template_that_refuses_messages_is_told(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with golden.raises(DataError) as refused:
        PromptTokenizer(tokenizer, system="a").text("one")
    assert refused.value.where == "messages of system, user"


# ---- data sets


def test_prompts_of_a_conversation_end_where_the_fine_tuned_answer_begins(
    tokenizer: Any, tmp_path: Path
) -> None:
    path = written(tmp_path, {"messages": CHAT, "id": 7})
    given = {"tokenizer": tokenizer, "seed": 1, "split": "train", "path": path, "eval_size": 0}
    data = MathPrompts(**given, whole_answers=True, needs_answer=False)
    batch = data.batch([0], ["x"])
    assert batch.meta.metadata["answer"] == ("four",)
    assert data.record(0) == {"messages": CHAT, "id": 7, "prompt": CHAT[:-1], "answer": "four"}
    (sequence,) = MathSFT(**given, needs_answer=False).sequences(0)
    prompt = data.prompt_tokens(0)
    assert sequence.tokens[: len(prompt)] == prompt
    assert sequence.no_loss[len(prompt) - 1 : len(prompt) + 1] == [True, False]
    short = MathSFT(**given, max_prompt_len=len(prompt), max_answer_len=1, needs_answer=False)
    with golden.raises(DataError):
        short.batch([0], ["x"])


def test_a_record_without_answer_can_be_asked_and_not_learnt(
    tokenizer: Any, tmp_path: Path
) -> None:
    path = written(tmp_path, {"prompt": "one", "tests": ["a"]})
    given = {"tokenizer": tokenizer, "seed": 1, "split": "train", "path": path, "eval_size": 0}
    batch = MathPrompts(**given, needs_answer=False, with_record=True).batch([0], ["x"])
    assert batch.meta.metadata["answer"] == ("",)
    assert records_of(batch) == [{"prompt": "one", "tests": ["a"], "answer": ""}]
    without = MathPrompts(**given, needs_answer=False)
    assert tuple(without.batch([0], ["x"]).data) == without.keys == ("packed_prompts",)
    with golden.raises(DataError) as refused:
        MathSFT(**given, needs_answer=False).batch([0], ["x"])
    assert refused.value.where == f"{path}:1"


def test_the_known_answer_is_whole_or_what_follows_the_hashes(
    tokenizer: Any, tmp_path: Path
) -> None:
    path = written(tmp_path, {"prompt": "one", "answer": "#### Title\ntext"})
    given = {"tokenizer": tokenizer, "seed": 1, "split": "train", "path": path, "eval_size": 0}
    for whole, expected in ((True, "#### Title\ntext"), (False, "Title\ntext")):
        data = MathPrompts(**given, whole_answers=whole)
        assert data.batch([0], ["x"]).meta.metadata["answer"] == (expected,)


# ---- filters and transforms


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("filter", "transform"):
        monkeypatch.setitem(plugin_table.registered, kind, {})
    registry.register_filter("even", lambda record: record["n"] % 2 == 0)
    registry.register_filter("none", lambda record: False)
    registry.register_filter("breaks", lambda record: record["missing"])
    registry.register_transform("asks", lambda r: {**r, "prompt": f"n is {r['n']}", "answer": "x"})
    registry.register_transform("loud", lambda r: {**r, "prompt": r["prompt"].upper()})
    registry.register_transform("forgets", lambda r: None)


def numbers(tmp_path: Path, tokenizer: Any, **given: Any) -> MathPrompts:
    path = written(tmp_path, *({"n": n} for n in range(10)))
    return MathPrompts(
        tokenizer=tokenizer, seed=1, path=path, **{"split": "train", "eval_size": 2, **given}
    )


def test_records_are_filtered_then_transformed_then_held_out(
    functions: None, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"keep": ("even",), "transform": ("asks", "loud")}
    with caplog.at_level("INFO"):
        train = numbers(tmp_path, tokenizer, **given)
    assert [train.question(i).prompt for i in range(len(train))] == ["N IS 0", "N IS 2", "N IS 4"]
    test = numbers(tmp_path, tokenizer, split="test", **given)
    assert [test.question(i).prompt for i in range(len(test))] == ["N IS 6", "N IS 8"]
    assert test.records.where(1).endswith("r.jsonl:9")
    assert "filters=even kept=5 dropped=5" in caplog.text


@pytest.mark.parametrize(
    ("given", "what", "where"),
    [
        ({"keep": ("none",)}, "keep none of 10 records", "r.jsonl"),
        ({"keep": ("breaks",)}, "filter 'breaks' raised KeyError: 'missing'", "r.jsonl:1"),
        ({"transform": ("asks", "forgets")}, "returned a NoneType", "r.jsonl:1"),
        ({"transform": ("loud",)}, "transform 'loud' raised KeyError", "r.jsonl:1"),
    ],
)
def test_a_function_that_fails_is_told_with_the_record(
    functions: None, tokenizer: Any, tmp_path: Path, given: dict, what: str, where: str
) -> None:
    with pytest.raises(DataError, match=what) as refused:
        numbers(tmp_path, tokenizer, **given)
    assert refused.value.where.endswith(where)


def test_a_record_is_such_that_json_carries_it(tokenizer: Any, tmp_path: Path) -> None:
    big = {"prompt": "one", "n": [10**30, 2**64 - 1, -(2**63)], "x": {"y": 10**20}}
    given = {"tokenizer": tokenizer, "seed": 1, "split": "train", "eval_size": 0}
    path = written(tmp_path, big)
    data = MathPrompts(**given, path=path, needs_answer=False, with_record=True)
    (record,) = records_of(data.batch([0], ["x"]))
    assert record == data.record(0)
    assert record["n"] == [str(10**30), 2**64 - 1, -(2**63)]
    assert record["x"] == {"y": str(10**20)}


def test_a_transform_that_gives_what_no_message_carries_is_told(
    functions: None, tokenizer: Any, tmp_path: Path
) -> None:
    registry.register_transform("odd", lambda r: {"prompt": "a", "answer": "b", "it": {object()}})
    data = numbers(tmp_path, tokenizer, transform=("odd",))
    with golden.raises(DataError) as refused:
        data.record(3)
    assert refused.value.where.endswith("r.jsonl:4")
