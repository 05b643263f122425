"""The question's text goes with its record to the rules, which grade alike in every kind of run."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from letter_chat import LetterTokenizer

from realsys.api.agent import Answer, EpisodeTask
from realsys.api.basics.reward import QUESTION_TEXT, Completion, fields_of
from realsys.api.data import MicroBatchSpec
from realsys.data.sequence_sample import SequenceSample
from realsys.data.sources.math_questions import MathPrompts
from realsys.data.sources.record_shape import MOST_ASKED, asked_text
from realsys.interfaces.math_evaluation import AnswerScorer
from realsys.interfaces.math_reward import MathRewardInterface
from realsys.rewards.guarded_rules import sent_answer
from realsys.rewards.rule_terms import rule_term
from realsys.rollout.agents.math_single_step import MathSingleStep
from realsys.rollout.environments.math_question import MathVerify
from realsys.rollout.worker.group import GroupRunner
from realsys.rollout.worker.policy_client import RequestStats
from realsys.transport.reward_messages import answer_of_json, answer_to_json
from realsys.transport.rollout_messages import Ticket

RECORDS = (
    {
        "prompt": "How many subsets has a set of ten elements?",
        "answer": "1024",
        "question_text": "a column of mine",
    },
    {"prompt": "Compute $2^{10}$.", "answer": "1024", "question_text": "a column of mine"},
)
ANSWER = "It is \\boxed{2^{10}}."


class _Letters(LetterTokenizer):
    """As data sets call one, which has no token for a text's begin."""

    bos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = False) -> Any:
        return super().__call__(text, add_special_tokens)


def data_set(tmp_path: Any, **args: Any) -> MathPrompts:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    given = {"tokenizer": _Letters(), "seed": 1, "split": "train", "path": str(path)}
    return MathPrompts(**given, eval_size=0, **args)


def answered(asked: SequenceSample) -> SequenceSample:
    """The same answer to each question, as an engine gives it."""
    prompts = torch.split(asked.data["packed_prompts"], asked.piece_lengths("packed_prompts"))
    rows = [[*prompt.tolist(), *map(ord, ANSWER)] for prompt in prompts]
    lengths = [[len(row)] for row in rows]
    is_prompt = [i < len(row) - len(ANSWER) for row in rows for i in range(len(row))]
    return SequenceSample.from_tensors(
        asked.ids,
        {"packed_input_ids": lengths, "prompt_mask": lengths},
        {
            "packed_input_ids": torch.tensor([token for row in rows for token in row]),
            "prompt_mask": torch.tensor(is_prompt),
        },
        metadata=asked.meta.metadata,
    )


def rewards_of_episodes(dataset: MathPrompts, seen: list[dict[str, Any]]) -> list[float]:
    """The rewards of an asynchronous run's episodes; ``seen``: what their agent knows of the records."""

    class Asks:
        request_stats = RequestStats()

        async def __call__(self, *_: Any, **__: Any) -> Answer:
            tokens = tuple(map(ord, ANSWER))
            return Answer(
                tokens=tokens,
                logprobs=(0.0,) * len(tokens),
                versions=(0,) * len(tokens),
                stopped=True,
            )

    class Watching(MathSingleStep):
        async def run_episode(self, task: EpisodeTask) -> Any:
            seen.append(dict(task.record))
            return await super().run_episode(task)

    groups = GroupRunner(
        dataset=dataset,
        tokenizer=_Letters(),
        agent=Watching(),
        make_environment=MathVerify,
        caller=SimpleNamespace(ask_for=lambda *_, **__: Asks()),
        group_size=1,
    )

    async def play() -> list[float]:
        tickets = [Ticket(id=f"0-{i}", index=i, tries=0, min_version=0) for i in (0, 1)]
        return [(await groups.run(ticket)).rewards[0] for ticket in tickets]

    return asyncio.run(play())


# Power of the known number: right where nobody asked for it, the question again where it stands there.
@pytest.mark.parametrize(("args", "scores"), [({"with_question": True}, [1, 0]), ({}, [0, 0])])
def test_trainer_evaluation_and_rollout_workers_grade_alike(
    tmp_path: Any, args: dict[str, Any], scores: list[float]
) -> None:
    dataset, seen = data_set(tmp_path, **args), list[dict[str, Any]]()
    asked = dataset.batch([0, 1], ["0-0", "0-1"])
    data, model = answered(asked), SimpleNamespace(tokenizer=_Letters())
    given = MathRewardInterface().inference(model, data, MicroBatchSpec())  # type: ignore[arg-type]
    assert given.data["rewards"].tolist() == scores
    evaluated = AnswerScorer("math_verify").scores(data, _Letters(), asked=asked)
    assert [score.value for _, (score,) in evaluated] == scores
    assert rewards_of_episodes(dataset, seen) == scores
    assert seen == [dict(record) for record in RECORDS], "an agent's task is its record"


def test_a_data_set_of_ones_own_and_old_plans_have_none(tmp_path: Any) -> None:
    assert set(data_set(tmp_path).batch([0], ["x"]).meta.metadata) == {"answer"}
    told = data_set(tmp_path, with_question=True).batch([0], ["x"]).meta.metadata
    assert told[QUESTION_TEXT] == (RECORDS[0]["prompt"],)


def test_what_a_conversation_asks_is_all_but_its_system_prompt() -> None:
    chat = (
        {"role": "system", "content": "2^{10}"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    )
    assert asked_text(chat) == "one\ntwo\nthree"
    assert asked_text("a" + "b" * MOST_ASKED) == "b" * MOST_ASKED


def test_a_rule_that_names_it_gets_it_wherever_it_runs() -> None:
    answer = Completion(response="5!", answer="120", question="How many?")
    term = rule_term("math_verify", 1.0, {})
    assert sent_answer(answer, term)["question"] == "How many?"
    assert answer_of_json(answer_to_json(answer, term.fields)).question == "How many?"
    assert "question" not in fields_of(lambda response, **rest: 0.0)
    assert "question" in fields_of(lambda response, question="": 0.0)
    assert "question" not in fields_of(lambda response, question="Is it polite?": 0.0)
