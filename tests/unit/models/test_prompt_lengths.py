"""What a plan knows of a model's tokenizer and chat template, without torch: the worker's own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import golden
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from experiments.parts import question_files
from experiments.parts.model_files import model_problems
from experiments.parts.question_files import dataset_problems, sample_of
from realsys.api.errors import CheckpointError
from realsys.api.options import ModelOptions
from realsys.data.sources.chat_tokens import PromptTokenizer
from realsys.data.sources.dataset_arguments import MathRecordsArguments
from realsys.models.from_scratch.tiny_llama import build_tiny_llama
from realsys.models.hf import load_tokenizer
from realsys.models.prompt_lengths import (
    check_conversations,
    prompt_lengths,
    special_tokens,
    text_lengths,
    tokenizer_faults,
)

QUESTIONS = ["What is 1 plus 2?", "Ends in a space ", "Ünïcödé 🙂\nand more", "a" * 300]
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}{{ eos_token }}"
    "{% endfor %}\n{% if add_generation_prompt %}{% generation %}Answer:{% endgeneration %}{% endif %}"
)


@pytest.fixture
def model(tmp_path) -> Path:
    build_tiny_llama(
        tmp_path / "m", seed=1, corpus=QUESTIONS, hidden_size=8, num_layers=1, num_heads=2,
        num_kv_heads=1, vocab_size=300,
    )  # fmt: skip
    return tmp_path / "m"


def set_template(model: Path, template: object) -> None:
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))


@pytest.mark.parametrize(
    "template",
    [None, CHAT, [{"name": "other", "template": "{{"}, {"name": "default", "template": CHAT}]],
    ids=["none", "one", "named"],
)
def test_lengths_are_those_that_the_worker_finds(model, template):
    if template is not None:
        set_template(model, template)
    tokenizer = load_tokenizer(model)
    if isinstance(template, list):
        tokenizer.chat_template = CHAT  # what transformers takes of several
    expected = [len(PromptTokenizer(tokenizer).tokens(q)) for q in QUESTIONS]
    assert prompt_lengths(model, QUESTIONS) == expected
    assert special_tokens(model)["eos_token"] == tokenizer.eos_token


@pytest.mark.parametrize("reads", ["c.arguments.a", "'x' + c.arguments"])
def test_tools_and_calls_count_as_the_worker_writes_them(model, reads):
    set_template(
        model,
        "{% for t in tools or [] %}{{ t | tojson(indent=2, sort_keys=True) }}{% endfor %}"
        "{% for m in messages %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ "
        + reads
        + " }}{% endfor %}{% endfor %}",
    )
    tool = {"name": "b", "description": "add two numbers", "parameters": {}}
    call = {"name": "b", "arguments": '{"a": "some text"}'}
    asked = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    prompts, tools = [asked, asked, asked[:1]], [[tool], [], [tool, tool]]
    for args in ({}, {"tools": [tool]}):
        worker = PromptTokenizer(load_tokenizer(model), template_args=args)
        found = prompt_lengths(model, prompts, tools=tools, template_args=args)
        assert found == [len(worker.tokens(p, t)) for p, t in zip(prompts, tools, strict=True)]
        assert len(set(found)) == 3 - bool(args)  # one's own tools go before those of the template


@pytest.mark.parametrize("of", ["none", "tools", "all"])
def test_marks_within_texts_count_as_the_worker_reads_them(model, of):
    set_template(model, CHAT)
    config = json.loads((model / "tokenizer_config.json").read_text())
    end = config["eos_token"]
    asked = [
        [{"role": "system", "content": f"a{end}b"}, {"role": "user", "content": end * 2}],
        [{"role": "user", "content": "read"}, {"role": "tool", "content": f"1 {end} 2 \ufdd0"}],
        f"what is {end}?",
    ]
    worker = PromptTokenizer(load_tokenizer(model), marks_as_text=of)
    found = prompt_lengths(model, asked, marks_as_text=of)
    assert found == [len(worker.tokens(prompt)) for prompt in asked]
    worker = PromptTokenizer(load_tokenizer(model))
    assert (found == [len(worker.tokens(prompt)) for prompt in asked]) == (of == "tools")


@pytest.mark.parametrize("place", ["config", "files"])
def test_the_template_for_tools_is_filled_where_there_are_tools(model, place):
    with_tools = "{{ tools | tojson }}" + CHAT
    if place == "config":
        listed = {"default": CHAT, "tool_use": with_tools, "rag": "{{"}.items()
        set_template(model, [{"name": name, "template": text} for name, text in listed])
    else:
        (model / "additional_chat_templates").mkdir()
        (model / "chat_template.jinja").write_text(CHAT)
        (model / "additional_chat_templates/tool_use.jinja").write_text(with_tools)
    tool = {"type": "function", "function": {"name": "b", "parameters": {}}}
    worker = PromptTokenizer(load_tokenizer(model))
    found = prompt_lengths(model, QUESTIONS[:3], tools=[[tool], [], [tool]])
    expected = [worker.tokens(q, t) for q, t in zip(QUESTIONS, [[tool], [], [tool]], strict=False)]
    assert found == [len(tokens) for tokens in expected]
    assert found[1] == prompt_lengths(model, QUESTIONS[:3])[1] < found[0]


def test_padding_kept_in_a_tokenizers_file_is_not_counted(model):
    expected = prompt_lengths(model, QUESTIONS)
    file = model / "tokenizer.json"
    padded = {"strategy": {"Fixed": 64}, "direction": "Left", "pad_id": 0, "pad_type_id": 0,
              "pad_to_multiple_of": None, "pad_token": "x"}  # fmt: skip
    file.write_text(json.dumps({**json.loads(file.read_text()), "padding": padded}))
    assert prompt_lengths(model, QUESTIONS) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for m in messages %}", "does not compile"),
        ("{{ raise_exception('no system') }}", "can't be filled with a question: no system"),
        ("{{ messages.__class__.__mro__ }}", "can't be filled with a question: access to attribute"),
        ("{{ 'x' * 10 ** 10 }}", "it needs more than 1024 MiB"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes longer"),
        ("{{ 'x' * 40000000 }}", "80,000,000 characters of 2 questions"),
    ],
)  # fmt: skip
def test_a_template_that_breaks_or_runs_away_is_a_fault_in_bounded_time(
    model, template, told, monkeypatch
):
    limit_s = 2.0 if told == "takes longer" else 60.0
    monkeypatch.setattr("realsys.models.prompt_lengths.RENDER_S", limit_s)
    set_template(model, template)
    with golden.raises(CheckpointError) as caught:
        prompt_lengths(model, QUESTIONS[:2])
    assert caught.value.what.startswith("the chat template: ")


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ROLE = "{% for m in messages %}x{% if m['role'] == 'ROLE' %}THEN{% endif %}{% endfor %}"
NAMED = [{"name": "default", "template": CHAT}, {"name": "tool_use", "template": ENDLESS}]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("template", "told"),
    [
        (ROLE.replace("ROLE", "assistant").replace("THEN", ENDLESS), "takes longer"),
        (ROLE.replace("ROLE", "tool").replace("THEN", ENDLESS), "takes longer"),
        ("x{% if not add_generation_prompt %}" + ENDLESS + "{% endif %}", "takes longer"),
        ("x{% if tools %}" + ENDLESS + "{% endif %}", "takes longer"),
        ("x{% if messages | length > 3 %}{{ 'x' * 10 ** 10 }}{% endif %}", "1024 MiB"),
        (NAMED, "takes longer"),
        (ROLE.replace("ROLE", "tool").replace("THEN", "{{ raise_exception('no tools') }}"), None),
        (CHAT, None),
        (None, None),
    ],
)  # fmt: skip
def test_a_template_that_does_not_end_behind_an_answer_is_a_fault_before_it_is_used(
    model, template, told, monkeypatch
):
    if template is not None:
        set_template(model, template)
    assert prompt_lengths(model, QUESTIONS[:2])  # it ends with a question
    if told is None:
        check_conversations(model)
        return
    if told == "takes longer":
        monkeypatch.setattr("realsys.models.prompt_lengths.RENDER_S", 0.3)
    with golden.raises(CheckpointError):
        check_conversations(model)


def test_plan_and_serve_try_conversations_before_they_load_anything(model):
    from realsys.policy_server.load_policy import load_policy

    set_template(model, "x{% if tools %}{{ 'x' * 10 ** 10 }}{% endif %}")
    (problem,) = model_problems(ModelOptions(path=str(model)), "actor")
    assert "1024 MiB" in problem.what
    (model / "model.safetensors").unlink()
    with golden.raises(CheckpointError):
        load_policy(model, name="m", dtype="float32", device="cpu")


def test_a_tokenizer_that_is_torn_or_of_another_model_is_a_fault(model):
    assert tokenizer_faults(model, rows=300) == []
    (fault,) = tokenizer_faults(model, rows=299)
    golden.check(fault)
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "<end>"}))
    (fault,) = tokenizer_faults(model, rows=300)
    golden.check(fault)
    file = model / "tokenizer.json"
    file.write_text(file.read_text()[:500])
    (fault,) = tokenizer_faults(model, rows=300)
    golden.check(fault)


def test_a_question_is_as_long_as_its_chat_template_makes_it(model, tmp_path):
    set_template(model, "{{ 'please ' * 30 }}{{ messages[0]['content'] }}")
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps({"prompt": q, "answer": "1"}) + "\n" for q in QUESTIONS[:2]))
    (longest, _) = sorted(prompt_lengths(model, QUESTIONS[:2]), reverse=True)
    data = MathRecordsArguments(
        split="train", path=str(path), eval_size=0, max_prompt_len=longest - 1
    )
    (problem,) = dataset_problems(data, batch_size=2, tokenizer_dir=str(model))
    assert f"are longer than {longest - 1} tokens" in problem.what
    assert problem.fix.startswith(f"raise task.max_prompt_len to {longest},")


def test_of_many_questions_the_longest_and_some_of_everywhere_are_looked_at(monkeypatch):
    assert sample_of([5, 1, 3]) == [0, 1, 2]
    monkeypatch.setattr(question_files, "MAX_SAMPLED_QUESTIONS", 4)
    assert sample_of([1, 1, 1, 9, 1, 1, 1, 8, 1, 1]) == [0, 3, 5, 7]


def test_a_tokenizer_without_tokens_for_a_text_is_a_fault(model):
    words = Tokenizer(WordLevel({"1": 0, "<eos>": 1}))
    words.save(str(model / "tokenizer.json"))
    with golden.raises(CheckpointError):
        text_lengths(model, ["1", "2"])
    (fault,) = model_problems(ModelOptions(path=str(model)), "actor")
    golden.check(fault)
