"""What gives no reward is named, tried once more and set aside, until there are too many of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import golden
import numpy as np
import pytest
import torch
from estimators_named import estimator
from near import assert_near, near

from realsys.api import registry
from realsys.api.basics import plugin_table
from realsys.api.basics.reward import Completion
from realsys.api.data import MicroBatchSpec, SequenceMeta
from realsys.api.errors import DataError, RewardError, RolloutError
from realsys.api.model import (
    FinetuneSpec,
    GenerationHyperparameters,
    ModelName,
    ParallelGroups,
    ProcessTopology,
)
from realsys.api.options import OptimizerOptions
from realsys.backends.fsdp import FSDPBackend
from realsys.backends.hf.data_parallel import DataParallel
from realsys.backends.inference import InferenceBackend
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.math_questions import MathPrompts
from realsys.interfaces.interface_arguments import PPOSettings
from realsys.interfaces.math_evaluation import evaluate_math
from realsys.interfaces.math_reward import MathRewardInterface
from realsys.interfaces.ppo.ppo_actor import PPOActorInterface
from realsys.interfaces.ppo.ppo_critic import PPOCriticInterface
from realsys.interfaces.ppo.ppo_experience import prepare_experience
from realsys.master.graph.data_schedule import DataSchedule
from realsys.master.rollouts.rollout_dispatcher import RolloutDispatcher
from realsys.master.rollouts.routes import Routes
from realsys.models.factories import hf_causal_lm, hf_critic, tiny_llama
from realsys.rewards.rule import RewardRule, made_rule
from realsys.rewards.scores import checked_score, too_many
from realsys.rewards.set_aside import Answered, SetAsideRecords
from realsys.rollout.environments.math_question import MathVerify
from realsys.rollout.staleness.ledger import StalenessLedger
from realsys.transport import rollout_messages as rm

COMPANY: dict[str, Any] = {
    "name": ModelName("actor"),
    "device": "cpu",
    "topology": ProcessTopology(),
    "rank": 0,
    "groups": ParallelGroups(),
}
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=64, train_batch_size=4)
MB = MicroBatchSpec()


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers a rule as ``mine`` for the test."""
    monkeypatch.setattr(plugin_table, "registered", {kind: {} for kind in registry.BUILTIN})
    monkeypatch.setattr(registry, "_reward_options", {})
    made_rule.cache_clear()

    def register(function: Callable[..., Any], **options: Any) -> None:
        registry.register_reward("mine", function, trusted=True, **options)

    return register


# ---- one score ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [1, 0.5, True, np.float32(0.25), torch.tensor(-2.0), torch.tensor([3.0])]
)
def test_numbers_are_rewards(value: Any) -> None:
    assert checked_score(value, source="x") == float(value)


@pytest.mark.parametrize(
    "value",
    [
        float("inf"),
        float("-inf"),
        float("nan"),
        None,
        "1.0",
        b"1",
        [1.0],
        {},
        1j,
        torch.tensor([1.0, 2.0]),
    ],
    ids=repr,
)
def test_all_else_is_refused_with_the_rules_name(rule: Any, value: Any) -> None:
    rule(lambda response: value)
    (error,) = RewardRule("mine").score_all([Completion(response="")])
    assert isinstance(error, RewardError)
    assert "reward rule 'mine'" in error.what
    assert "returned" in error.what
    golden.check(error)


@pytest.mark.parametrize("value", [1e308, -1e39, 10**30 * 10**9, 10**400, 10**9000], ids="abcde")
def test_a_number_beyond_float32_is_told_the_limit(rule: Any, value: Any) -> None:
    rule(lambda response: value)
    (error,) = RewardRule("mine").score_all([Completion(response="")])
    assert isinstance(error, RewardError)
    golden.check(error)
    assert "finite" not in error.what


def test_an_exception_of_a_rule_is_told_as_the_rules(rule: Any) -> None:
    def broken(response: str) -> float:
        raise KeyError("unit")

    rule(broken)
    (error,) = RewardRule("mine").score_all([Completion(response="")])
    assert isinstance(error, RewardError)
    line = broken.__code__.co_firstlineno + 1
    golden.check(error)
    assert error.where == f"test_reward_failures.py:{line} in broken, reward rule 'mine'"
    assert isinstance(error.__cause__, KeyError)


def test_few_records_may_fail_and_one_in_a_hundred_of_many() -> None:
    assert not too_many(8, 8)
    assert too_many(9, 9)
    assert not too_many(100, 10_000)
    assert too_many(109, 10_000)


def test_the_second_try_counts(rule: Any, caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([RewardError("once", where="rule", fix="mend"), 0.5])

    def call(response: str) -> float:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    rule(call)
    aside = SetAsideRecords()
    record = Answered(id="a", prompt=lambda: "?", answers=[Completion(response="")])
    with caplog.at_level(logging.WARNING):
        ((score,),) = aside.scores(RewardRule("mine"), [record])  # type: ignore[misc]
    assert (score.value, aside.ids, aside.num_records) == (0.5, [], 1)
    assert not caplog.records


def test_where_no_record_has_a_reward_the_run_ends_with_the_rules_own_words(rule: Any) -> None:
    rule(lambda response: "a text")
    answers = [Completion(response="")]
    records = [Answered(id=str(i), prompt=lambda: "?", answers=answers) for i in range(4)]
    with golden.raises(RewardError):
        SetAsideRecords().scores(RewardRule("mine"), records)
    one = SetAsideRecords()
    assert one.scores(RewardRule("mine"), records[:1]) == [
        None
    ]  # a single one may be at fault itself


# ---- a synchronous run --------------------------------------------------------------------------


class Letters:
    """One letter a token."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i) for i in ids)


def asked(num: int) -> SequenceSample:
    """``num`` records with two answers each; the prompt of record i is ``ab`` or so, its answer ``i``."""
    lengths = [[3, 3]] * num
    return SequenceSample.from_tensors(
        [f"0-{i}" for i in range(num)],
        {"packed_input_ids": lengths, "prompt_mask": lengths},
        {
            "packed_input_ids": torch.arange(3).repeat(2 * num),
            "prompt_mask": torch.tensor([True, True, False] * 2 * num),
        },
        metadata={"answer": [str(i) for i in range(num)]},
    )


def no_number_for(*bad: str) -> Callable[..., float]:
    return lambda *, response, answer: float("inf") if answer in bad else 1.0


def test_a_record_without_a_reward_is_set_aside_with_all_its_answers(
    rule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rule(no_number_for("1"))
    does, model = MathRewardInterface(reward="mine"), SimpleNamespace(tokenizer=Letters())
    with caplog.at_level(logging.WARNING):
        rewards = does.inference(model, asked(3), MB).data["rewards"]  # type: ignore[arg-type]
    assert rewards[[0, 1, 4, 5]].tolist() == [1.0] * 4
    assert rewards[[2, 3]].isnan().all()
    assert (does.set_aside.ids, does.set_aside.num_records) == (["0-1"], 3)
    (line,) = [r.getMessage() for r in caplog.records]
    for word in ("record set aside", "0-1", "reward rule 'mine'", "inf", "'ab'"):
        assert word in line


def test_too_many_of_them_end_the_run(rule: Any) -> None:
    rule(no_number_for(*map(str, range(9))))
    does, model = MathRewardInterface(reward="mine"), SimpleNamespace(tokenizer=Letters())
    with golden.raises(RewardError) as e:
        does.inference(model, asked(20), MB)  # type: ignore[arg-type]
    assert "record 0-8: 'ab'" in e.value.where


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tiny") / "model")
    made = FSDPBackend().initialize(tiny_llama(hidden_size=32, num_layers=1, **COMPANY), SPEC)
    made.module.save_to_hf(tokenizer=made.tokenizer, save_dir=folder)
    return folder


def experience(path: str, scores: list[float]) -> SequenceSample:
    """Four records with three answers each, and all keys of PPO."""
    does = PPOActorInterface(gen=GenerationHyperparameters(max_new_tokens=6), group_size=3)
    actor = FSDPBackend().initialize(hf_causal_lm(path=path, **COMPANY), SPEC)
    critic = InferenceBackend().initialize(hf_critic(path=path, **COMPANY), SPEC)
    prompts = MathPrompts(tokenizer=actor.tokenizer, seed=1, split="train", train_size=64)
    data = prompts.batch(range(4), list("abcd"))
    data = data.update(does.generate(actor, data, MB))
    reference = does.inference(actor, data, MB).remap({"logprobs": "packed_ref_logprobs"})
    values = PPOCriticInterface(group_size=3).inference(critic, data, MB)
    rewards = SequenceSample.from_tensors(
        data.ids, {"rewards": [[1] * 3] * 4}, {"rewards": torch.tensor(scores)}
    )
    return data.update(reference).update(values).update(rewards)


NAN = float("nan")


@pytest.mark.parametrize("advantage", ["gae", "dr_grpo"])
def test_the_policy_and_the_critic_learn_as_if_it_were_not_there(path: str, advantage: str) -> None:
    scores = [1.0, 0.0, 0.5, NAN, NAN, NAN, 0.0, 0.0, 1.0, 0.25, 1.0, 0.0]
    whole = experience(path, scores)
    ppo = {
        "advantage": estimator(advantage),
        "gen": GenerationHyperparameters(max_new_tokens=6),
        "group_size": 3,
        "ppo_n_minibatches": 1,
        "adv_norm": "batch" if advantage == "gae" else "none",
    }
    roles = [(PPOActorInterface, hf_causal_lm)]
    roles += [(PPOCriticInterface, hf_critic)] if advantage == "gae" else []
    for interface, make in roles:
        found = []
        for data in (whole, whole.take([0, 2, 3])):
            optimizer = OptimizerOptions(lr=1e-2, weight_decay=0.0, eps=1e-2)
            model = FSDPBackend(optimizer=optimizer).initialize(make(path=path, **COMPANY), SPEC)
            stats = interface(**ppo).train_step(model, data, MB)
            found.append((stats, dict(model.module.module.state_dict())))
        (with_it, weights), (without, expected) = found
        assert_near(weights, expected)
        alike = set(with_it) - {"n_tokens", "reward/answers_set_aside"}
        assert alike == set(without) - {"n_tokens"}
        assert {k: with_it[k] for k in alike} == near({k: without[k] for k in alike})
        if interface is PPOActorInterface:
            assert with_it["reward/answers_set_aside"] == 3


def test_a_minibatch_of_which_all_was_set_aside_is_passed_over(path: str) -> None:
    data = experience(path, [1.0, 0.0, 0.5, 0.0, 0.0, 1.0, *[NAN] * 6])
    for interface, make in ((PPOActorInterface, hf_causal_lm), (PPOCriticInterface, hf_critic)):
        model = FSDPBackend().initialize(make(path=path, **COMPANY), SPEC)
        interface(group_size=3, ppo_n_minibatches=2).train_step(model, data, MB)
        steps = {float(m["step"]) for m in model.module.state_dict()["optimizer"].values()}
        assert steps == {1.0}


def test_a_batch_without_any_reward_says_where_to_look(path: str) -> None:
    data = experience(path, [NAN] * 12)
    with golden.raises(DataError):
        prepare_experience(data, PPOSettings(), kl_coef=0.0, ranks=DataParallel())


# ---- held-out questions ---------------------------------------------------------------------------


class Echo:
    """A model that answers each prompt with one token, its number in the batch."""

    def generate(
        self, batch: SequenceSample, *, tokenizer: Any, gconfig: Any, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        assert gconfig.greedy
        rows = [[0, 1, i] for i in range(batch.batch_size)]
        lengths = [[3]] * batch.batch_size
        return SequenceSample.from_tensors(
            batch.ids,
            {"packed_input_ids": lengths, "prompt_mask": lengths},
            {
                "packed_input_ids": torch.tensor([token for row in rows for token in row]),
                "prompt_mask": torch.tensor([True, True, False] * batch.batch_size),
            },
        )


def questions(num: int) -> SequenceSample:
    return SequenceSample.from_tensors(
        [f"eval-{i}" for i in range(num)],
        {"packed_prompts": [[2]] * num},
        {"packed_prompts": torch.tensor([0, 1] * num)},
        metadata={"answer": [str(i) for i in range(num)]},
    )


def evaluated(num: int) -> dict[str, Any]:
    model: Any = SimpleNamespace(
        module=Echo(), tokenizer=Letters(), device="cpu", groups=ParallelGroups()
    )
    gen = GenerationHyperparameters(max_new_tokens=1)
    return evaluate_math(model, [questions(num)], gen=gen, reward="mine", mb_spec=MicroBatchSpec())


def graded(*, response: str, answer: str) -> float:
    """0, 0.3, 0.6, 0.9, 1.2: partly right."""
    return 0.3 * int(answer)


def test_accuracy_is_what_the_rule_calls_right_and_the_mean_reward_is_beside_it(rule: Any) -> None:
    rule(graded)
    found = evaluated(5)
    assert found["accuracy"] == near(1 / 5), "0.6 and 0.9 are not right"
    assert found["mean_reward"] == near(0.6)
    assert [s["correct"] for s in found["samples"]] == [False] * 4 + [True]


def test_a_rule_may_have_a_notion_of_its_own(rule: Any) -> None:
    rule(graded, right=0.6)
    assert evaluated(5)["accuracy"] == near(3 / 5)

    async def said() -> bool:
        environment = MathVerify(reward="mine", turns=2)
        await environment.reset({"answer": "2"})
        return (await environment.step("")).done

    assert asyncio.run(said()), "the environment takes the rule's notion too"


def test_held_out_answers_without_a_score_are_in_no_figure(rule: Any) -> None:
    rule(lambda *, response, answer: {"1": float("inf"), "2": 0.0}.get(answer, 1.0))
    found = evaluated(4)
    assert (found["accuracy"], found["mean_reward"]) == (2 / 3, 2 / 3)
    assert (found["num_problems"], found["num_unscored"]) == (4, 1)
    plugin_table.registered["reward"]["mine"] = lambda response: {}["none"]
    made_rule.cache_clear()
    with golden.raises(RewardError):
        evaluated(20)


# ---- an asynchronous run --------------------------------------------------------------------------

SCHEDULE = DataSchedule(dataset_size=100, batch_size=2, seed=1, shuffle=True)


async def make_desk() -> RolloutDispatcher:
    desk = RolloutDispatcher()
    ledger = StalenessLedger(batch_size=2, max_staleness=0, policy="wait", total_steps=50)
    asking = asyncio.create_task(desk.handle(rm.AskPlaces(worker="w", dataset_size=100)))
    await desk.dataset_size(timeout_s=60)

    async def clear(worker: int, ids: Any) -> None:
        del worker, ids

    await desk.open(ledger, SCHEDULE, routes=Routes(holders=(0,), endpoints=["a"]), clear=clear)
    await asking
    return desk


async def take(desk: RolloutDispatcher) -> list[rm.Ticket]:
    return list((await desk.handle(rm.TakeWork(worker="w", room=9, wait_s=0.05))).tickets)


async def unscored(desk: RolloutDispatcher, ticket: rm.Ticket) -> None:
    why = "reward rule 'mine' returned inf"
    await desk.handle(
        rm.GiveUp(worker="w", id=ticket.id, tries=ticket.tries, why=why, unscored=True)
    )


async def deliver(desk: RolloutDispatcher, ticket: rm.Ticket) -> None:
    meta = SequenceMeta(
        ids=(rm.sample_id(ticket.id, ticket.tries),),
        seqlens={"x": ((1,),)},
        dtypes={"x": "int64"},
        trailing_shapes={"x": ()},
    )
    version = ticket.min_version
    await desk.handle(
        rm.Deliver(
            worker="w",
            id=ticket.id,
            tries=ticket.tries,
            holder=0,
            meta=meta,
            oldest=version,
            newest=version,
        )
    )


def test_a_prompt_without_a_reward_is_given_out_once_more_and_then_replaced() -> None:
    async def story() -> None:
        desk = await make_desk()
        first, second = await take(desk)
        await deliver(desk, second)
        await unscored(desk, first)
        (again,) = await take(desk)
        assert (again.id, again.tries) == (first.id, 1)
        await unscored(desk, again)
        (third,) = await take(desk)
        assert third.id not in (first.id, second.id)
        await deliver(desk, third)
        held = await desk.load(1)
        assert [meta.ids for meta, _ in held] == [(second.id,), (third.id,)]
        await desk.trained(1)
        assert desk.metrics()["rollout/set_aside"] == 1

    asyncio.run(asyncio.wait_for(story(), 100))


def test_a_rule_that_never_gives_a_number_ends_the_run() -> None:
    async def story() -> None:
        desk = await make_desk()
        for _ in range(10):
            for ticket in await take(desk):
                await unscored(desk, ticket)
        with golden.raises(RolloutError):
            await desk.load(1)

    asyncio.run(asyncio.wait_for(story(), 100))
