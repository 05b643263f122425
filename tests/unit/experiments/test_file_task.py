"""``task=file``: what a plan finds in a user's data before anything starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import golden
import pytest

from experiments.parts.model_files import turn_end_warnings
from experiments.recipes import grpo
from experiments.sft import SFTExperiment
from experiments.task import FileTask, MathTask
from experiments.tasks.mixture import Mixture
from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.errors import DataError
from realsys.api.options import ModelOptions
from realsys.api.plain import from_plain, to_plain
from realsys.data.sources import record_samples
from realsys.data.sources.dataset_arguments import Columns, MathRecordsArguments
from realsys.models.from_scratch.tiny_llama import build_tiny_llama


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("filter", "reward"):
        monkeypatch.setitem(plugin_table.registered, kind, {})
    registry.register_reward("graded", lambda response, answer: 0.5, trusted=True)
    registry.register_reward("lenient", lambda response, answer="": 0.5, trusted=True)
    registry.register_filter("easy", lambda record: record["level"] < 3)


@pytest.fixture
def file(tmp_path: Path) -> str:
    rows = [{"problem": f"{i} + 1", "meta": {"solution": i + 1}, "level": i % 4} for i in range(40)]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def task(file: str, **changes: object) -> FileTask:
    columns = Columns(prompt="problem", answer="meta.solution")
    given = {"path": file, "columns": columns, "reward": "graded", "eval_size": 4, **changes}
    return FileTask(**given)  # type: ignore[arg-type]


def problems(task: FileTask, tokenizer_dir: str | None = None) -> list[str]:
    found = task.problems(batch_size=8, tokenizer_dir=tokenizer_dir)
    return [f"{p.what} | {p.where} | {p.fix}" for p in found]


def test_a_plan_of_columns_of_ones_own_has_what_the_data_set_is_made_with(file: str) -> None:
    found = task(file, keep=("easy",))
    assert problems(found) == []
    dataset = found.prompts("train")
    read = from_plain(MathRecordsArguments, to_plain(dataset.args))
    assert read.columns == Columns(prompt="problem", answer="meta.solution")
    assert (read.keep, read.whole_answers, read.needs_answer) == (("easy",), True, True)
    assert found.input_files() == (file,)
    golden.check(list(found.remarks(None)))


def test_the_arguments_of_math_tasks_are_as_they_were() -> None:
    names = "eval_path eval_size max_prompt_len path slip_share train_size".split()
    assert sorted(MathTask().data_args()) == names


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"columns": Columns(prompt="problm")}, "no column 'problm' | task.path, FILE:1 | did you"),
        ({"keep": ("esy",)}, "no filter called 'esy' | task.keep | did you mean 'easy'?"),
        ({"transform": ("x",)}, "no transform called 'x' | task.transform"),
        ({"path": None}, "task file has no file | task.path"),
        ({"eval_size": 40}, "40 questions are too few: 8 per batch and 40 held out"),
        ({"keep": ("easy",), "eval_size": 25}, "30 questions are too few"),
        ({"template_args": {"tokenize": True}}, "tokenize is given to the template by realsys"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(file: str, changes: dict, told: str) -> None:
    (found,) = problems(task(file, **changes))
    assert found.startswith(told.replace("FILE", file))


def test_fewer_held_out_questions_than_asked_for_are_told_with_the_setting(file: str) -> None:
    (found,) = problems(task(file, eval_path=file, eval_size=41))
    golden.check(found)


def test_reinforcement_learning_needs_a_rule_and_fine_tuning_none(file: str) -> None:
    unnamed = task(file, reward=None)
    told = [p.where for p in grpo(unnamed, train_bs_n_seqs=8).problems()]
    assert "task.reward" in told
    assert list(SFTExperiment(task=unnamed, train_bs_n_seqs=8).problems()) == []
    (wrong,) = problems(task(file, reward="gradd"))
    golden.check(wrong)


@pytest.mark.parametrize("answer", [{}, {"answer": None}, {"answer": [1]}, {"answer": ""}])
def test_a_rule_that_takes_the_answer_gets_one(tmp_path: Path, answer: dict[str, object]) -> None:
    path = tmp_path / "q.jsonl"
    rows = [{"prompt": "a", **({"answer": "b"} if i != 17 else answer)} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for rule, wrong in (("graded", 1), ("math_verify", 1), ("lenient + graded", 1)):
        found = problems(FileTask(path=str(path), eval_size=0, reward=rule))
        assert len(found) == wrong, found
        assert "'answer' is" in found[0]
        assert f"task.path, {path}:18" in found[0]
    kept = FileTask(path=str(path), eval_size=0, reward="lenient")
    assert (problems(kept) == []) is (answer.get("answer") != "")


CASE = {"stdin": "1", "stdout": "1"}


@pytest.mark.parametrize(
    ("tests", "told"),
    [
        ([CASE], None),
        (json.dumps([CASE]), None),
        (None, "the record has no list of tests in its field 'tests'"),
        ("[1", "the record has no list of tests in its field 'tests'"),
        ([], "a record has no tests"),
        ([{"input": "1", "wanted": "1"}], "test 0 has the fields ['input', 'wanted']"),
        (["assert True"], "test 0 is 'assert True'"),
    ],
)
def test_records_that_a_rule_can_not_score_are_told(
    tmp_path: Path, tests: object, told: str | None
) -> None:
    path = tmp_path / "q.jsonl"
    rows = [{"prompt": "a", "tests": [CASE] if i != 17 else tests} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = problems(FileTask(path=str(path), eval_size=0, reward="lenient + code_tests"))
    if told is None:
        assert found == []
        return
    (wrong,) = found
    assert wrong.startswith(f"{told} | task.path, {path}:18" if "no list" in told else told)
    other = {"code_tests": {"tests": "checks"}}
    (wrong,) = problems(
        FileTask(path=str(path), eval_size=0, reward="code_tests", reward_args=other)
    )
    golden.check(wrong)


RULES = """
import socket
from realsys.api.registry import register_reward

def asks(response, answer):
    return float(socket.create_connection(("127.0.0.1", 9)) is None)

def raises(response, answer):
    return 1.0 / 0.0

register_reward("asks", asks)
register_reward("raises", raises)
register_reward("here", raises, trusted=True)
"""


def test_a_plan_says_which_line_lets_a_rule_do_what_it_does(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_imported", [])  # other tests' files are gone
    (tmp_path / "asking_rules.py").write_text(RULES)
    registry.load_plugins([str(tmp_path / "asking_rules.py")])
    (undeclared,) = problems(task(file, reward="asks + 0.5*raises"))
    assert undeclared.endswith('register_reward("asks", asks, network=True)')
    assert task(file, reward="raises + here").trusted_rules() == ("here",)
    run = grpo(task(file, reward="here"), train_bs_n_seqs=8)
    assert run.trusted_rules() == ("here",)
    assert [remark for remark in run.remarks(()) if "here" in remark and "trusted" in remark]


def test_a_rule_of_ones_own_checks_records_as_it_gets_them(file: str) -> None:
    @dataclass(kw_only=True)
    class Close:
        def __call__(self, response: str, record: dict[str, Any]) -> float:
            return 0.5

        def check_record(self, record: dict[str, Any]) -> None:
            if int(record["answer"]) > 30:  # not a field of this file
                raise DataError("the answer is too large", where="a record", fix="leave it out")
            _ = 1 / (record["level"] - self.refused)

        refused: int = -1

    registry.register_reward("close", Close, trusted=True)
    (told,) = problems(task(file, reward="close"))
    golden.check(told)
    (told,) = problems(task(file, reward="close", reward_args={"close": {"refused": 2}}))
    golden.check(told)


def test_fine_tuning_on_records_without_answers_is_told(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "a"}\n' * 20)
    unanswered = FileTask(path=str(path), eval_size=0, reward="lenient")
    assert problems(unanswered) == []
    (told,) = SFTExperiment(task=unanswered, train_bs_n_seqs=8).problems()
    golden.check(told)


@pytest.mark.thorough
def test_settings_of_a_template_are_checked_with_the_model(file: str, tmp_path: Path) -> None:
    model = tmp_path / "m"
    build_tiny_llama(
        model, seed=1, corpus=["1 + 1"], hidden_size=8, num_layers=1, num_heads=2,
        num_kv_heads=1, vocab_size=261,
    )  # fmt: skip
    (told,) = problems(task(file, system="Be brief."), str(model))
    golden.check(told)
    config = model / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ style }}"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    plain = {"max_prompt_len": 16}
    assert problems(task(file, **plain), str(model)) == []
    for more in ({"system": "Be brief. " * 10}, {"template_args": {"style": "plain " * 20}}):
        (told,) = problems(task(file, **plain, **more), str(model))
        golden.check(told)
        (told,) = problems(task(file, **plain, **more, long_prompts="drop"), str(model))
        golden.check(told)


def test_an_argument_that_the_template_does_not_read_is_told(file: str, tmp_path: Path) -> None:
    model = tmp_path / "m"
    build_tiny_llama(
        model, seed=1, corpus=["1 + 1"], hidden_size=8, num_layers=1, num_heads=2,
        num_kv_heads=1, vocab_size=261,
    )  # fmt: skip
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}"
    )
    assert problems(task(file, template_args={"enable_thinking": False}), str(model)) == []
    for name in ("enable_thinkng", "style", "tokenize"):
        (told,) = problems(task(file, template_args={name: False}), str(model))
        golden.check(told)


FORGETS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content if loop.last else m.content[-1] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_conversations_are_counted_as_they_are_trained(tmp_path: Path) -> None:
    model = tmp_path / "m"
    build_tiny_llama(
        model, seed=1, corpus=["1 + 1"], hidden_size=8, num_layers=1, num_heads=2,
        num_kv_heads=1, vocab_size=261,
    )  # fmt: skip
    turn = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    path = tmp_path / "chats.jsonl"
    rows = [{"messages": turn * (1 + i % 3)} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = FileTask(path=str(path), eval_size=4)
    assert list(given.conversation_warnings(str(model))) == []  # there is no template
    (model / "chat_template.jinja").write_text(FORGETS)
    golden.check(list(given.conversation_warnings(str(model))))
    assert list(given.conversation_warnings(None)) == []
    assert list(given.conversation_problems(str(model), max_answer_len=999)) == []
    tight = FileTask(path=str(path), eval_size=4, max_prompt_len=60)
    (told,) = tight.conversation_problems(str(model), max_answer_len=20)
    longest = int(told.what.split()[3])
    assert told.where == f"task.path, {path}:39"
    assert told.fix.startswith(f"set max_answer_len={longest - 60},")
    enough = tight.conversation_problems(str(model), max_answer_len=longest - 60)
    assert list(enough) == []
    mixed = Mixture(sources={"a": tight, "b": given})
    (told,) = mixed.conversation_problems(str(model), max_answer_len=20)
    assert told.where.startswith("task.sources.a.path, ")
    assert [r[:9] for r in mixed.conversation_warnings(str(model))] == ["source a:", "source b:"]
    long = {"messages": [{"role": "user", "content": "x" * 500}, turn[1]]}
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, long]))
    for more, count in (({}, 1), ({"long_prompts": "drop"}, 0)):
        some = FileTask(path=str(path), eval_size=4, max_prompt_len=60, **more)
        assert len(list(some.conversation_problems(str(model), max_answer_len=100))) == count
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = SFTExperiment(task=given, model=ModelOptions(path=str(model)), train_bs_n_seqs=4)
    assert [r for r in run.remarks(()) if "become several" in r]
    assert [p for p in run.problems() if "a conversation has" in p.what] == []


def test_a_conversation_without_anything_to_train_is_told(tmp_path: Path) -> None:
    model = tmp_path / "m"
    build_tiny_llama(
        model, seed=1, corpus=["1 + 1"], hidden_size=8, num_layers=1, num_heads=2,
        num_kv_heads=1, vocab_size=261,
    )  # fmt: skip
    (model / "chat_template.jinja").write_text(
        FORGETS.replace("{{ m.role }}", "{{ refused(m) if m.x }}")
    )
    good = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    path = tmp_path / "chats.jsonl"
    for bad, of in (
        (good[:1], FileTask.answer_problems),
        ([good[0], {**good[1], "x": 1}], None),
    ):
        rows = [{"messages": good}] * 6 + [{"messages": bad}]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = FileTask(path=str(path), eval_size=2)
        found = (
            of(given)
            if of is not None
            else given.conversation_problems(str(model), max_answer_len=99)
        )
        (told,) = found
        assert told.where.endswith(":7")
        golden.check(told.what)


def test_a_turn_that_ends_otherwise_than_a_text_is_told(tmp_path: Path) -> None:
    model = tmp_path / "m"
    build_tiny_llama(
        model, seed=1, corpus=["1 + 1"], hidden_size=8, num_layers=1, num_heads=2,
        num_kv_heads=1, vocab_size=261,
    )  # fmt: skip
    assert list(turn_end_warnings(None)) == list(turn_end_warnings(str(model))) == []
    eos = json.loads((model / "tokenizer_config.json").read_text())["eos_token"]
    template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    (model / "chat_template.jinja").write_text(template.replace("<|end|>", eos))
    assert list(turn_end_warnings(str(model))) == []
    read = json.loads((model / "tokenizer.json").read_text())
    end = {**read["added_tokens"][0], "id": 260, "content": "<|end|>", "special": True}
    (model / "tokenizer.json").write_text(
        json.dumps({**read, "added_tokens": [*read["added_tokens"], end]})
    )
    (model / "chat_template.jinja").write_text(template)
    (told,) = turn_end_warnings(str(model))
    golden.check(told.replace(str(model), "MODEL"))


def test_long_prompts_that_are_left_out_are_told(file: str, tmp_path: Path) -> None:
    model = tmp_path / "m"
    build_tiny_llama(
        model, seed=1, corpus=["1 + 1"], hidden_size=8, num_layers=1, num_heads=2,
        num_kv_heads=1, vocab_size=261,
    )  # fmt: skip
    assert "long_prompts" not in task(file).data_args()
    (told,) = problems(task(file, max_prompt_len=1), str(model))
    longest = int(told.rpartition("raise task.max_prompt_len to ")[2].partition(",")[0])
    some = task(file, max_prompt_len=longest - 1, long_prompts="drop")
    assert some.data_args()["long_prompts"] == "drop"
    assert problems(some, str(model)) == []
    (remark,) = some.remarks(str(model))
    left_out = int(remark.partition(" of 40 questions")[0])
    assert 0 < left_out < 40


def test_of_a_large_file_a_sample_is_read_and_said(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_samples, "WHOLE_BYTES", 100)
    monkeypatch.setattr(record_samples, "RUN_RECORDS", 2)
    monkeypatch.setattr(record_samples, "_TAIL_BYTES", 100)
    large = task(file, keep=("easy",))
    assert problems(large) == []
    told = list(large.remarks(None))
    assert "records read" in told[0]
    golden.check(told[1])


def test_settings_reach_a_nested_column_by_name(file: str) -> None:
    from realsys.config.overrides import with_settings

    words = ["task=file", f"task.path={file}", "task.columns.prompt=problem", "task.reward=graded"]
    made = with_settings(grpo(MathTask(), actor=ModelOptions(path="x")), words=words)
    assert isinstance(made.task, FileTask)
    assert made.task.columns.prompt == "problem"
