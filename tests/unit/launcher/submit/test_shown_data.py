"""``realsys data show``: the tokens and masks of the data sets that workers make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden
import pytest

from launcher.cli import completion
from launcher.cli.command_line import run
from launcher.submit import shown_data as module
from launcher.submit.shown_data import shown_data
from realsys.api.errors import ConfigError
from realsys.config import extras
from realsys.models.from_scratch.tiny_llama import build_tiny_llama

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "\x1b[31mfour"},
]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Settings of a fine-tuning on conversations."""
    build_tiny_llama(
        tmp_path / "m", seed=1, corpus=["one two"], hidden_size=8, num_layers=1, num_heads=2,
        num_kv_heads=1, vocab_size=261,
    )  # fmt: skip
    config = tmp_path / "m" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    path = tmp_path / "chats.jsonl"
    path.write_text((json.dumps({"messages": CHAT, "answer": "7"}) + "\n") * 5)
    return ["task=file", f"task.path={path}", "task.eval_size=2", f"model.path={tmp_path / 'm'}"]


def shown(name: str, words: list[str], **changes: Any) -> Any:
    given = {"config": None, "imports": (), "phase": "main", "split": "train", "num": 2}
    return shown_data(name, words, **{**given, **changes})


def test_a_conversation_is_shown_in_parts_with_and_without_a_loss(words: list[str]) -> None:
    found = shown("sft-math", words)
    assert (found.type, found.size, found.chat_template) == ("math_sft", 3, TEMPLATE)
    first, second = found.records
    assert first.where.endswith("chats.jsonl:1")
    assert second.where.endswith("chats.jsonl:2")
    assert first.parts == (
        ("<|user|>one<eos>\n<|assistant|>", False),
        ("two<eos>", True),
        ("\n<|user|>three<eos>\n<|assistant|>", False),
        ("\x1b[31mfour<eos>", True),
    )
    assert first.num_loss_tokens < first.num_tokens
    assert first.sequences == (4,)
    assert shown("sft-math", words, split="test", num=9).size == 2


def test_a_prompt_is_shown_with_the_known_answer_of_every_phase(words: list[str]) -> None:
    *task, model = words
    rl = [*task, model.replace("model.path", "actor.path")]
    record = shown("grpo-math", rl).records[0]
    before, answer, between = (text for text, _ in shown("sft-math", words).records[0].parts[:3])
    assert record.parts == ((before + answer + between, False),)
    assert (record.answer, record.num_loss_tokens) == ("7", 0)
    assert shown("grpo-math", [*rl, "schedule=async"]).records[0] == record
    tuned = [*task, *(f"sft.{word}" for word in words)]
    assert shown("grpo-math", tuned).records[0] == record
    assert shown("grpo-math", tuned, phase="sft").records == shown("sft-math", words).records


@pytest.mark.parametrize(
    ("given", "prompt", "said"),
    [
        ((), "<|user|>Q<eos>\n<|assistant|>", ()),
        (("task.agent=math_multi_turn",), "<|user|>Q<eos>\n<|assistant|>", ()),
        (
            ("task.agent=chat", "task.agent_args.system=Be brief."),
            "<|system|>Be brief.<eos>\n<|user|>Q<eos>\n<|assistant|>",
            ("chat",),
        ),
        (
            ("task.agent=chat", "task.env=mcp", "task.env_args.url=http://127.0.0.1:1/mcp"),
            "<|user|>Q<eos>\n<|assistant|>",
            ("chat", "mcp"),
        ),
        (
            ("task.agent=command", "task.agent_args.command=true"),
            "<|user|>Q<eos>\n<|assistant|>",
            ("command",),
        ),
    ],
)
def test_an_agents_prompt_is_shown_as_far_as_it_is_known(
    words: list[str], tmp_path: Path, given: tuple[str, ...], prompt: str, said: tuple[str, ...]
) -> None:
    (tmp_path / "q.jsonl").write_text((json.dumps({"prompt": "Q", "answer": "7"}) + "\n") * 5)
    rl = [f"task.path={tmp_path}/q.jsonl", "task.eval_size=2", f"actor.path={tmp_path}/m"]
    found = shown("grpo-math", [*rl, "schedule=async", *given])
    assert found.records[0].parts == ((prompt, False),)
    assert bool(found.prompt) == bool(said)
    assert all(repr(name) in found.prompt for name in said)


def test_what_is_missing_is_told(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with golden.raises(ConfigError):
        shown("ppo-math", [])
    with golden.raises(ConfigError) as refused:
        shown("grpo-math", [], phase="sfd")
    assert "'sft'" in refused.value.fix
    with golden.raises(ConfigError):
        shown("sft-math", [*words, "task.columms.prompt=x"])
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with golden.raises(ConfigError) as refused:
        shown("sft-math", words)
    assert "pip install 'realsys[train]'" in refused.value.fix


def test_what_is_printed_has_the_loss_in_brackets_and_no_control_codes(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "show", "sft-math", *words, "--num", "1"]) == 0
    text = capsys.readouterr().out
    assert "<|assistant|>⟦two<eos>⟧\n<|user|>three<eos>\n<|assistant|>⟦four<eos>⟧" in text
    assert "\x1b" not in text
    assert "math_sft, 3 records" in text
    assert run(["data", "show", "sft-math", *words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["data"]["records"]) == 3
    for wrong in (["data", "shwo", "sft-math"], ["data", "show", "sft-math", "--split", "x"]):
        assert run(wrong) == 2


FORGETS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content if loop.last else m.content.split('=')[-1] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_conversation_of_several_sequences_is_shown_one_by_one(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "m" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": FORGETS}))
    texts = [("user", "one"), ("assistant", "1=two"), ("user", "three"), ("assistant", "2=four")]
    chat = [{"role": role, "content": text} for role, text in texts]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 3)
    assert shown("sft-math", words).records[0].sequences == (2, 2)
    assert run(["data", "show", "sft-math", *words, "--num", "1"]) == 0
    assert "2 sequences\n1.1\n<|user|>one<eos><|assistant|>⟦1=two<eos>⟧\n1.2\n" in (
        capsys.readouterr().out
    )


def test_records_that_are_all_held_out_are_told(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    others = [word.replace("eval_size=2", "eval_size=5") for word in words]
    assert run(["data", "show", "sft-math", *others]) == 0, capsys.readouterr()
    assert "all are held out" in capsys.readouterr().out


def test_tab_completes_the_action_and_the_experiment() -> None:
    assert completion.candidates(["data", "s"]) == ["score", "show"]
    assert "sft-math" in completion.candidates(["data", "show", "sft"])


def test_the_names_of_keys_are_those_of_the_batches() -> None:
    """The launcher may not import them."""
    from realsys.interfaces import answers

    assert (module.INPUT, module.PROMPT_MASK) == (answers.INPUT, answers.PROMPT_MASK)
