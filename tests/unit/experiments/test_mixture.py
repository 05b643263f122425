"""``task=mixture``: what a plan of several sources has, its data, its rewards, what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.asynchronous import Async, RolloutOnly
from experiments.recipes import grpo
from experiments.schedule import Replay
from experiments.sft import SFTExperiment
from experiments.task import FileTask, MathTask, Task
from experiments.tasks.mixture import Mixture
from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.basics.reward import (
    BY_SOURCE,
    GOES_ON,
    QUESTION_TEXT,
    WITH_QUESTION,
    Completion,
    Score,
)
from realsys.api.errors import DataError, RewardError
from realsys.api.options import ModelOptions
from realsys.api.plain import from_plain, to_plain
from realsys.api.worker_configs import CurriculumControl
from realsys.config.overrides import apply_settings
from realsys.data.record_bytes import records_of
from realsys.data.sources.arithmetic_problems import arithmetic_word_problems
from realsys.data.sources.record_parts import index_of, items_of_epoch, place
from realsys.models.from_scratch.tiny_llama import train_tokenizer
from realsys.rewards.rule import made_rule, rule_of


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugin_table.registered, "reward", {})
    made_rule.cache_clear()
    registry.register_reward("length", lambda response: float(len(response)), trusted=True)
    registry.register_reward(
        "batch_size",
        lambda response: [len(response)] * len(response),
        batched=True,
        trusted=True,
    )

    async def later(response: str, answer: str) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"reward": 0.5, "correct": response == answer, "tries": 2.0}

    registry.register_reward("later", later, trusted=True)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    problems = arithmetic_word_problems(num_problems=300, seed=0, split="train")
    return train_tokenizer([p["prompt"] + p["answer"] for p in problems], vocab_size=400)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "own.jsonl"
    rows = [{"prompt": f"{i} + 1", "answer": str(i + 1), "source": "web"} for i in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def mixture(file: str, **changes: Any) -> Mixture:
    sources: dict[str, Task] = {
        "sums": MathTask(train_size=12, eval_size=3),
        "own": FileTask(path=file, eval_size=4, reward="length", max_prompt_len=64),
    }
    return Mixture(**{"sources": sources, **changes})


def test_all_sources_tell_what_they_ask_where_the_rules_of_one_look_at_it(
    file: str, tokenizer: Any
) -> None:
    data = registry.make_dataset(mixture(file).prompts("train"), tokenizer=tokenizer, seed=1)
    at = [index_of(data.items, name, 0) for name in ("sums", "own")]
    told = data.batch(at, ["a", "b"]).meta.metadata[QUESTION_TEXT]
    assert told == (data.question_text(at[0]), "0 + 1")
    own = FileTask(path=file, eval_size=4, reward="length", max_prompt_len=64)
    assert WITH_QUESTION not in json.dumps(to_plain(own.prompts("train")))
    assert WITH_QUESTION not in json.dumps(
        to_plain(mixture(file, sources={"own": own}).prompts("test"))
    )
    learnt = mixture(file).answers("train", max_answer_len=9)
    assert WITH_QUESTION not in json.dumps(to_plain(learnt)), "the key of a product stays as it is"


@pytest.mark.parametrize(
    ("changes", "goes_on"),
    [({}, False), ({"weights": {"sums": 2.0}}, True), ({"temperature": 2.0}, True)],
)
def test_where_records_repeat_epochs_go_on(
    file: str, changes: dict[str, Any], goes_on: bool
) -> None:
    made = mixture(file, **changes)
    assert (GOES_ON in made.prompts("train").args) == goes_on
    assert (GOES_ON in made.answers("train", max_answer_len=9).args) == goes_on
    assert GOES_ON not in made.prompts("test").args


# ---- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("weights", [{}, {"a": 2}, {"a": 0.1, "b": 0.2, "c": 0.7}])
@pytest.mark.parametrize("sizes", [{"a": 1}, {"a": 3, "b": 5, "c": 2}, {"b": 40, "a": 1, "c": 7}])
def test_every_item_of_a_source_has_one_index(
    sizes: dict[str, int], weights: dict[str, float], temperature: float
) -> None:
    items = items_of_epoch(sizes, weights, temperature=temperature)
    found = [place(items, i) for i in range(sum(items.values()))]
    assert [index_of(items, *item) for item in found] == list(range(len(found)))
    assert sorted(found) == sorted((name, k) for name, own in items.items() for k in range(own))
    assert all(items[name] >= size for name, size in sizes.items()), "no record is left out"
    for outside in (-1, len(found)):
        with pytest.raises(IndexError):
            place(items, outside)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 10**13), min_size=1, max_size=12), st.data())
def test_items_of_large_and_of_many_sources_are_found(
    sizes: list[int], data: st.DataObject
) -> None:
    items = {f"s{i}": size for i, size in enumerate(sizes)}
    index = data.draw(st.integers(0, sum(sizes) - 1))
    assert index_of(items, *place(items, index)) == index


def test_weights_are_proportions_and_repeat_what_is_small_for_its_weight() -> None:
    assert items_of_epoch({"a": 3, "b": 5}, {}) == {"a": 3, "b": 5}
    assert items_of_epoch({"a": 3, "b": 5}, {"a": 1, "b": 1}) == {"a": 5, "b": 5}
    assert items_of_epoch({"a": 3, "b": 5}, {"a": 2}) == {"a": 10, "b": 5}
    assert items_of_epoch({"a": 30, "b": 50}, {"a": 0.1, "b": 0.3}) == {"a": 30, "b": 90}
    assert items_of_epoch({"a": 100, "b": 10000}, {}, temperature=2.0) == {"a": 1000, "b": 10000}


def test_equal_weights_of_any_sizes_make_an_epoch() -> None:
    sizes = {"large": 10**7, "small": 1000}
    assert items_of_epoch(sizes, {"small": 1.0}) == {"large": 10**7, "small": 10**7}
    sizes = {"large": 3 * 10**9, "small": 1}
    for weights, temperature in (({"small": 1.0}, 1.0), ({}, 1e300)):
        items = items_of_epoch(sizes, weights, temperature=temperature)
        assert sum(items.values()) == 6 * 10**9
    assert items_of_epoch({"a": 5}, {"a": 1e9}) == {"a": 5}


@pytest.mark.parametrize(
    ("weights", "temperature", "reported", "where"),
    [
        ({"a": 1e9}, 1.0, "an epoch would have 5.00e+9 items, made of 8 records;", "task.weights"),
        ({"a": 1e308, "b": 1e-308}, 1.0, "an epoch would have 5.00e+616 items", "task.weights"),
        ({}, 0.02, "an epoch would have 3.71e+11 items, made of 8 records;", "task.temperature"),
        ({}, 1e-9, "5 records to the power of 1 / 1e-09 are too large", "task.temperature"),
        (
            {},
            1e-320,
            "5 records to the power of 1 / 9.99989e-321 are too large",
            "task.temperature",
        ),
    ],
)
def test_too_long_an_epoch_is_refused(
    weights: dict[str, float], temperature: float, reported: str, where: str
) -> None:
    with pytest.raises(DataError) as caught:
        items_of_epoch({"a": 3, "b": 5}, weights, temperature=temperature)
    assert caught.value.what.startswith(reported)
    assert caught.value.where == where
    if where == "task.weights":
        assert caught.value.fix.startswith(f"bring task.weights.a={weights['a']:g} and ")


def test_sources_take_turns() -> None:
    items = {"a": 2, "b": 4}
    assert [place(items, i)[0] for i in range(6)] == ["b", "a", "b", "b", "a", "b"]
    large = {"a": 10**7, "b": 3 * 10**7}
    assert place(large, 4 * 10**6 + 1) == ("a", 10**6)


# ---- data ----------------------------------------------------------------------------------------


def test_an_index_is_a_record_of_a_source_with_its_metadata(file: str, tokenizer: Any) -> None:
    task = mixture(file, weights={"sums": 1, "own": 1})
    data = registry.make_dataset(task.prompts("train"), tokenizer=tokenizer, seed=1)
    assert data.items == {"sums": 12, "own": 12}  # 5 records of own, which begin anew
    counts = Counter(data.find(i) for i in range(len(data)))
    assert [counts["own", k] for k in range(5)] == [3, 3, 2, 2, 2]
    assert [counts["sums", k] for k in range(12)] == [1] * 12
    batch = data.batch([1, 0, 3], ["x", "y", "z"])
    assert batch.ids == ("x", "y", "z")
    records = records_of(batch)
    assert [r["task_source"] for r in records] == [data.find(i)[0] for i in (1, 0, 3)]
    assert records == [data.record(i) for i in (1, 0, 3)]
    assert [r["answer"] for r in records] == list(batch.meta.metadata["answer"])
    own = next(r for r in records if r["task_source"] == "own")
    assert own["source"] == "web", "a record's own field of that name stays"
    assert data.where(1).split(": ")[0] == data.find(1)[0]


def test_held_out_records_come_once_and_fine_tuning_has_all_sources(
    file: str, tokenizer: Any
) -> None:
    task = mixture(file, weights={"own": 9})
    test = registry.make_dataset(task.prompts("test"), tokenizer=tokenizer, seed=1)
    assert test.items == {"sums": 3, "own": 4}
    assert task.num_held_out == 7
    made = task.answers("train", max_answer_len=64)
    sft = registry.make_dataset(made, tokenizer=tokenizer, seed=1)
    assert sft.batch([0, 1], ["a", "b"]).keys == {"packed_input_ids", "prompt_mask"}


def test_a_source_without_records_is_told(file: str, tokenizer: Any) -> None:
    empty = FileTask(path=file, eval_size=9, reward="length")
    task = Mixture(sources={"sums": MathTask(train_size=4), "none": empty})
    with golden.raises(DataError):
        registry.make_dataset(task.prompts("train"), tokenizer=tokenizer, seed=1)


def test_a_long_prompt_names_the_setting_of_its_source(file: str, tokenizer: Any) -> None:
    task = Mixture(
        sources={"own": FileTask(path=file, reward="length", eval_size=2, max_prompt_len=1)}
    )
    with pytest.raises(DataError) as caught:
        registry.make_dataset(task.prompts("train"), tokenizer=tokenizer, seed=1).batch([0], ["a"])
    assert caught.value.resume_with.startswith("task.sources.own.max_prompt_len=")


# ---- rewards -------------------------------------------------------------------------------------

RULES = {
    "plain": {"reward": "length"},
    "slow": {"reward": "later"},
    "many": {"reward": "batch_size + 0.5*length"},
}


def answer(source: str, text: str = "four") -> Completion:
    return Completion(response=text, answer="four", record={"task_source": source})


def test_each_answer_is_scored_by_the_rules_of_its_source() -> None:
    rule = rule_of(BY_SOURCE, RULES)
    assert rule.fields == {"record", "response", "answer"}
    assert set(rule.sources) == set(RULES)
    asked = [answer("many"), answer("slow"), answer("plain"), answer("many"), answer("slow", "x")]
    found = rule.score_all(asked)
    assert [r.value for r in found if isinstance(r, Score)] == [4.0, 0.5, 4.0, 4.0, 0.5]
    scores = [r for r in found if isinstance(r, Score)]
    assert [s.correct for s in scores] == [True, True, True, True, False]
    assert scores[4].parts == {
        "slow": 0.5,
        "slow/correct": 0.0,
        "slow/tries": 2.0,
        "slow/share": 1.0,
        "plain/share": 0.0,
        "many/share": 0.0,
    }
    assert scores[0].parts["many/batch_size"] == 2.0  # the answers of its source alone, together


def test_one_answer_at_a_time_is_scored_the_same() -> None:
    rule = rule_of(BY_SOURCE, RULES)
    assert asyncio.run(rule.score(answer("slow"))).parts["slow/tries"] == 2.0
    assert asyncio.run(rule.score(answer("many"))).value == 3.0
    with golden.raises(RewardError):
        asyncio.run(rule.score(answer("other")))


# ---- settings and plans --------------------------------------------------------------------------


def told(task: Mixture) -> list[str]:
    found = task.problems(batch_size=8, tokenizer_dir=None)
    return [f"{p.what} | {p.where} | {p.fix}" for p in (*found, *task.reward_problems())]


def test_sources_are_settings_each_of_any_kind(file: str) -> None:
    words = (
        "task=mixture task.sources.sums=math task.sources.sums.train_size=12 task.sources.own=file "
        f"task.sources.own.path={file} task.sources.own.reward=length task.weights.own=0.5 "
        "task.sources.sums.eval_size=3 task.sources.own.eval_size=4 task.sources.own.max_prompt_len=64"
    )
    applied = apply_settings(grpo(MathTask()), words=words.split())
    assert applied.problems == []
    found = applied.options.task
    assert found == mixture(file, weights={"own": 0.5})
    assert from_plain(Task, to_plain(found)) == found  # type: ignore[type-abstract]
    assert told(found) == []
    assert (found.longest_prompt, found.num_held_out, found.num_questions) == (128, 7, None)
    assert found.input_files() == (file,)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sources": {}}, "a mixture without sources | task.sources | "),
        ({"reward": "length"}, "reward is not read here: each source has its own | task.reward"),
        ({"eval_size": 3}, "eval_size is not read here"),
        ({"weights": {"sms": 1}}, "weight 1 of source 'sms' | task.weights.sms | did you mean"),
        ({"weights": {"own": 0}}, "weight 0 of source 'own' | task.weights.own"),
        (
            {"weights": {"own": 1e308}},
            "weight 1e+308 of source 'own' | task.weights.own | use a num",
        ),
        (
            {"weights": {"own": 1e9}},
            "an epoch would have 1.20e+10 items, made of 17 records; at most 20,000,000 are possible | "
            "task.weights | bring task.weights.own=1e+09 and task.weights.sums=1 nearer together",
        ),
        ({"temperature": 1e-9}, "12 records to the power of 1 / 1e-09 are too large"),
        ({"weights": {"own": 2}, "temperature": 2.0}, "weights are given, and a temperature"),
        ({"sources": {"a": Mixture()}}, "a mixture in a mixture is not possible | task.sources.a"),
        ({"sources": {"a": MathTask(env="calculator")}}, "env is not read here: all sources have"),
        ({"sources": {"a": FileTask(path="none.jsonl", reward="length")}}, "the data set can't"),
        ({"sources": {"a": MathTask(train_size=4)}}, "4 questions are too few for a batch of 8"),
        (
            {"sources": {"a": MathTask(reward="lngth")}},
            "no reward called 'lngth' | task.sources.a.",
        ),
    ],
)
def test_what_is_wrong_is_told_with_the_settings_that_it_is_about(
    file: str, changes: dict[str, Any], said: str
) -> None:
    assert told(mixture(file, **changes))[0].startswith(said)


def test_too_long_an_epoch_is_told_with_what_is_wrong_with_sources(file: str) -> None:
    wrong = {"a": MathTask(reward="lngth"), "b": MathTask()}
    for changes in ({"weights": {"a": 1e9}}, {"temperature": 1e-9}):
        task = Mixture(sources=wrong, **changes)
        assert task.num_questions is None
        assert [text.split(" | ")[1] for text in told(task)[:2]] == [
            f"task.{next(iter(changes))}",
            "task.sources.a.reward",
        ]
    assert told(mixture(file, weights={"own": 1e9}, curriculum="learnability")) == []


def test_workers_refuse_too_long_an_epoch_of_what_a_plan_could_not_count(
    file: str, tokenizer: Any
) -> None:
    source = FileTask(path="hf:own/records", reward="length")
    assert source.counted_questions() is None
    assert FileTask(path=file, eval_size=4).counted_questions() == 5
    assert FileTask(path=file, eval_size=9).counted_questions() is None
    task = mixture(file, weights={"own": 1e9})
    with golden.raises(DataError):
        registry.make_dataset(task.prompts("train"), tokenizer=tokenizer, seed=1)
    held_out = registry.make_dataset(task.prompts("test"), tokenizer=tokenizer, seed=1)
    assert len(held_out) == 7


def test_a_source_needs_a_rule(file: str) -> None:
    (found,) = told(Mixture(sources={"own": FileTask(path=file, eval_size=2)}))
    assert "has no rule" in found
    assert "| task.sources.own.reward |" in found


def test_a_plan_gives_every_call_what_the_rules_look_at(file: str) -> None:
    experiment = grpo(mixture(file), actor=ModelOptions(path="/model"))
    config = experiment.initial_setup()
    (scored,) = [c for c in config.model_rpcs if c.name == "rew_inf"]
    assert "record" in scored.input_keys
    assert scored.interface_impl.args["reward"] == BY_SOURCE
    assert scored.interface_impl.args["reward_args"]["own"] == {"reward": "length"}
    assert config.dataset_keys == ("packed_prompts", "record")


# ---- curriculum ----------------------------------------------------------------------------------


def with_curriculum(file: str, **changes: Any) -> Mixture:
    return mixture(file, curriculum="learnability", **changes)


def test_a_curriculum_takes_the_weights_to_the_master_and_each_record_once_to_the_data(
    file: str, tokenizer: Any
) -> None:
    weights = {"sums": 1.0, "own": 9.0}
    task = with_curriculum(file, weights=weights, curriculum_floor=0.2, curriculum_steps=5)
    assert told(task) == []
    data = registry.make_dataset(task.prompts("train"), tokenizer=tokenizer, seed=1)
    assert data.source_items == {"sums": 12, "own": 5}
    control = CurriculumControl(weights=weights, floor=0.2, steps=5)
    experiment = grpo(task, actor=ModelOptions(path="/model"))
    for schedule in (experiment.schedule, Async()):
        config = dataclasses.replace(experiment, schedule=schedule).initial_setup().lazy_init()
        assert config.curriculum == control
        (master,) = config.master_worker
        assert master.curriculum == control
        assert from_plain(type(config), to_plain(config)).curriculum == control
    replay = dataclasses.replace(experiment, schedule=Replay(folder="/run"))
    assert replay.initial_setup().curriculum is None, "it trains on what was chosen then"
    assert grpo(mixture(file)).initial_setup().curriculum is None
    assert grpo(MathTask()).initial_setup().curriculum is None


def test_an_epoch_with_a_curriculum_has_as_many_questions_as_there_are(file: str) -> None:
    sources = {"a": MathTask(train_size=12), "b": MathTask(train_size=8)}
    assert Mixture(sources=sources, weights={"a": 9}).num_questions == 80
    assert Mixture(sources=sources, weights={"a": 9}, curriculum="learnability").num_questions == 20


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"sources": {"own": MathTask(train_size=12)}},
            "a curriculum chooses among sources, and there is 1 | task.curriculum and task.sources | ",
        ),
        (
            {"temperature": 2.0},
            "temperature 2 makes weights of sizes, which a curriculum does not look at | "
            "task.curriculum and task.temperature | set task.weights.<name>",
        ),
    ],
)
def test_what_a_curriculum_can_not_go_with_is_told(
    file: str, changes: dict[str, Any], said: str
) -> None:
    (found,) = told(with_curriculum(file, **changes))
    assert found.startswith(said)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("task.curriculum=easy_first", "task.curriculum"),
        ("task.curriculum_floor=0", "task.curriculum_floor"),
        ("task.curriculum_floor=1.5", "task.curriculum_floor"),
        ("task.curriculum_steps=0", "task.curriculum_steps"),
    ],
)
def test_a_curriculum_out_of_its_range_is_refused(file: str, word: str, said: str) -> None:
    applied = apply_settings(grpo(with_curriculum(file)), words=[word])
    (problem,) = applied.problems
    assert said in problem.where


def test_a_curriculum_is_for_answers_that_are_sampled_and_trained_on(file: str) -> None:
    task = with_curriculum(file)
    fine_tuning = SFTExperiment(task=task)
    assert [p.where for p in fine_tuning.problems() if "fine-tuning" in p.what] == [
        "task.curriculum"
    ]
    experiment = grpo(task, actor=ModelOptions(path="/model"), schedule=RolloutOnly())
    (found,) = [p for p in experiment.problems() if "curriculum" in p.where]
    golden.check(found)
    assert found.where == "task.curriculum and schedule"
