"""What a plan counts of conversations is what a worker makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import golden
import pytest

from realsys.api.errors import CheckpointError
from realsys.data.sources.chat_tokens import PromptTokenizer
from realsys.models import conversation_lengths as conversation_lengths_module
from realsys.models.conversation_lengths import conversation_lengths
from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.models.hf import load_tokenizer
from realsys.models.prompt_lengths import turn_end

TURN = "<|{{ m.role }}|>{{ m.reasoning_content if m.reasoning_content and KEEPS }}{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ eos_token }}\n"
CHAT = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    + TURN
    + CALLS
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN, FORGETS = CHAT.replace("KEEPS", "true"), CHAT.replace("KEEPS", "loop.last")
ASKED = {"role": "user", "content": "What is 1 plus 2?"}
THOUGHT = {"role": "assistant", "content": "It is 3.", "reasoning_content": "One and two. "}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}
RESULT = {"role": "tool", "content": "3<eos>", "tool_call_id": "c"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
TALKS = [
    [ASKED, THOUGHT],
    [ASKED, THOUGHT, ASKED, THOUGHT, ASKED, THOUGHT],
    [ASKED, CALLED, RESULT, THOUGHT],
    [ASKED, {"role": "assistant", "content": ""}],
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    build_tiny_llama(
        tmp_path / "m", seed=1, corpus=[ASKED["content"], THOUGHT["content"]], hidden_size=8,
        num_layers=1, num_heads=2, num_kv_heads=1, vocab_size=262,
    )  # fmt: skip
    return tmp_path / "m"


def with_template(model: Path, template: str) -> Path:
    (model / "chat_template.jinja").write_text(template)
    return model


@pytest.mark.parametrize(("template", "counts"), [(PLAIN, [1, 1, 1, 1]), (FORGETS, [1, 3, 1, 1])])
@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_sequences_and_tokens_are_those_of_the_worker(model, template, counts, tools):
    worker = PromptTokenizer(load_tokenizer(with_template(model, template)), system="Be brief.")
    found = conversation_lengths(model, TALKS, system="Be brief.", tools=[tools] * len(TALKS))
    rows = [worker.conversation(talk, tools)[0] for talk in TALKS]
    assert found == [(len(row), max(len(sequence.tokens) for sequence in row)) for row in rows]
    assert [count for count, _ in found] == counts


def test_each_conversation_is_counted_with_the_template_for_its_tools(model):
    with_template(model, PLAIN)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tool_use.jinja").write_text("{{ tools | tojson }}" + PLAIN)
    worker = PromptTokenizer(load_tokenizer(model))
    offers = [[TOOL], [], [TOOL], []]
    found = conversation_lengths(model, TALKS, tools=offers)
    rows = [worker.conversation(talk, o)[0] for talk, o in zip(TALKS, offers, strict=True)]
    assert found == [(1, len(row[0].tokens)) for row in rows]


def test_a_long_conversation_of_many_sequences_takes_no_more_than_its_longest(model, monkeypatch):
    """A quadratic count would fill a login node's memory."""
    encoded = []
    real = conversation_lengths_module.token_counts

    def token_counts(tokenizer, texts, root):
        encoded.extend(texts)
        return real(tokenizer, texts, root)

    monkeypatch.setattr(conversation_lengths_module, "token_counts", token_counts)
    talk = [ASKED, THOUGHT] * 30
    ((count, tokens),) = conversation_lengths(with_template(model, FORGETS), [talk])
    assert (count, len(encoded)) == (30, 2)
    assert tokens > 30


def test_a_conversation_that_the_template_refuses_has_no_sequences(model):
    refuses = PLAIN.replace(
        "{{ m.role }}", "{{ m.role if m.role != 'tool' else raise_exception('no') }}"
    )
    found = conversation_lengths(with_template(model, refuses), TALKS)
    assert [count for count, _ in found] == [1, 1, 0, 1]
    assert found[2] == (0, 0)


def test_nothing_is_counted_without_a_template(model):
    assert conversation_lengths(model, TALKS) is None
    assert turn_end(model) is None


def test_a_template_that_does_not_end_is_told(model):
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with golden.raises(CheckpointError):
        conversation_lengths(with_template(model, endless), TALKS)


@pytest.mark.parametrize(("mark", "end"), [("{{ eos_token }}", "<eos>"), ("<|user|>", "<|user|>")])
def test_the_end_of_a_turn_is_found_behind_an_answer(model, mark, end):
    eos = json.loads((model / "tokenizer_config.json").read_text())["eos_token"]
    file = model / "tokenizer.json"
    read = json.loads(file.read_text())
    read["added_tokens"].append(
        {**read["added_tokens"][0], "id": 261, "content": "<|user|>", "special": True}
    )
    file.write_text(json.dumps(read))
    template = "{% for m in messages %}{{ m.content }}" + mark + "{% endfor %}"
    expected = eos if end == "<eos>" else end
    assert turn_end(with_template(model, template)) == (expected, eos)
