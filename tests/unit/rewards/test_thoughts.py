"""What of an answer stands behind its thoughts; that built-in rules read nothing else, in any schedule."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_families import FAMILIES, ChatFamily
from letter_chat import LetterTokenizer, ScriptedPolicy, host, task

from realsys.api import registry
from realsys.api.agent import Agent, EpisodeTask
from realsys.api.basics import plugin_table
from realsys.api.basics.reward import KNOWN_FIELDS, UNFINISHED_THOUGHTS, Completion, fields_of
from realsys.api.basics.rule_permissions import RulePermissions
from realsys.api.basics.thoughts import (
    THOUGHT_MARKS,
    decoded_answer,
    has_marks,
    opened_thoughts,
    opening_at_end,
    text_behind_thoughts,
)
from realsys.api.data import MicroBatchSpec
from realsys.data.sequence_sample import SequenceSample
from realsys.interfaces.completions import answered_records
from realsys.interfaces.math_reward import MathRewardInterface
from realsys.rewards import code_rule, reasoning_gym_rule
from realsys.rewards.code_tests import CaseVerdict, CodeGrade
from realsys.rewards.final_answers.stated_answer import stated_answer
from realsys.rewards.harbor import harbor_rule
from realsys.rewards.judge import Judge
from realsys.rewards.math_verify import math_verify_reward
from realsys.rewards.rule import made_rule, rule_of
from realsys.rollout.agents.math_single_step import MathSingleStep
from realsys.rollout.environments.math_question import MathVerify
from realsys.rollout.runners.chat_agent import ChatAgent
from realsys.transport.reward_messages import answer_of_json, answer_to_json

THOUGHT = "<think>\nmaybe \\boxed{5}\n</think>\n"
CUT_OFF = "<think> maybe \\boxed{5}, so #### 5"


@pytest.mark.parametrize(
    ("text", "opened", "behind"),
    [
        ("<think>a</think>b", "", "b"),
        (" \n<think>a</think> b ", "", " b "),
        ("<think>a", "", None),
        ("<think>a</think>", "", ""),
        ("a</think>b", "", "b"),  # the prompt opened it, and nobody says so
        ("a</think>b", "<think>", "b"),
        ("a", "<think>", None),
        ("", "<think>", None),
        ("<think>a</think>b", "<think>", "b"),  # opened twice
        ("a <think> b </think>c", "<think>", "c"),
        ("<think>a<think>b</think>c</think>d", "", "d"),
        ("<think>a the mark <think> is\n<think> </think>d", "", "d"),
        ("<think>a</think>b\n<think>c</think>d", "", "b\n\nd"),
        ("<think>a</think>b\n<think>c", "", None),
        ("<think>a</think>b</think>c", "", "c"),
        ("write <think> in it: b", "", "write <think> in it: b"),
        ("b <think>a</think>c", "", "c"),
        ("<seed:think>a</think>b</seed:think>c", "", "c"),  # only its own mark ends it
        ("a</think>b</seed:think>c", "<seed:think>", "c"),
        ("<|channel|>analysis<|message|>a", "", None),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "", "b"),
        ("<|channel|>final<|message|>b", "", "b"),
    ],
)
def test_the_text_behind_thoughts(text: str, opened: str, behind: str | None) -> None:
    assert text_behind_thoughts(text, opened=opened) == behind
    if behind is not None:
        assert text_behind_thoughts(behind) == behind
    if not opened:
        assert Completion(response=text).final == (behind or "")


@pytest.mark.parametrize(("opening", "closing"), THOUGHT_MARKS)
def test_each_pair_of_marks_is_known(opening: str, closing: str) -> None:
    assert has_marks(opening)
    assert has_marks(closing)
    assert text_behind_thoughts(f"{opening}a{closing}b") == "b"
    assert text_behind_thoughts(f"{opening}a") is None
    assert text_behind_thoughts(f"a{closing}b") == "b"
    assert opening_at_end(f"assistant\n{opening}\n") == opening
    assert opening_at_end(f"assistant\n{opening}\n\n{closing}\n\n") == ""


@pytest.mark.parametrize("text", ["", "#### 5", "I think 5.", "a < b > c [d] | \n\n \\boxed{5}"])
def test_an_answer_without_marks_is_read_as_it_is(text: str) -> None:
    assert text_behind_thoughts(text) is text
    answer = Completion(response=text)
    assert answer.final is text
    assert answer.unfinished_thoughts is None


# ---- built-in rules ------------------------------------------------------------------------------


class _Graded:
    """Notes which text the rules' graders were given, in place of a box, a generator and a judge."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []

        def graded(response: str, *_: Any, **__: Any) -> CodeGrade:
            self.texts.append(response)
            return CodeGrade(tests=(CaseVerdict(passed=True, why="passed"),))

        async def judged(_: Judge, text: str) -> tuple[float, float]:
            self.texts.append(text)
            return 1.0, 1.0

        def played(_: Any, script: str, path: Path) -> Any:
            self.texts.append(script)
            return SimpleNamespace(rewards={"reward": 1.0}, reward=1.0, why="")

        def score_answer(text: str, entry: Any) -> float:
            self.texts.append(text)
            return 1.0

        data = SimpleNamespace(score_answer=score_answer)
        monkeypatch.setattr(code_rule, "grade", graded)
        monkeypatch.setattr(code_rule.CodeTests, "_open", lambda self: None)
        monkeypatch.setattr(Judge, "_graded", judged)
        monkeypatch.setattr(harbor_rule.HarborTests, "verdict", played)
        monkeypatch.setattr(harbor_rule, "parts_of", lambda verdict: {"reward": verdict.reward})
        monkeypatch.setattr(reasoning_gym_rule, "entry_of", lambda record: (data, {"answer": "5"}))
        made_rule.cache_clear()
        here = RulePermissions(trusted=True)  # where these are
        monkeypatch.setattr(registry, "reward_permissions", lambda name, rule: here)


JUDGE = {"url": "http://judge", "model": "m", "question": "{response}"}
RULES: dict[str, dict[str, Any]] = {
    "code_tests": {"fenced": False},
    "harbor": {"fenced": False},
    "judge": JUDGE,
    "reasoning_gym": {},
}
RECORD = {"prompt": "?", "answer": "5", "tests": [{"code": "pass"}], "task_directory": "/nowhere"}


def scored(name: str, answer: Completion, **args: Any) -> float:
    (result,) = rule_of(name, {name: {**RULES.get(name, {}), **args}}).score_all([answer])
    assert not isinstance(result, Exception), result
    return result.value


@pytest.mark.parametrize("name", RULES)
def test_rules_are_given_what_stands_behind_the_thoughts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graders = _Graded(monkeypatch)
    for response in (f"{THOUGHT}x1", "x2", "maybe </think>x3"):
        assert scored(name, Completion(response=response, record=RECORD)) == 1.0
    assert [text.strip() for text in graders.texts] == ["x1", "x2", "x3"]
    opened = Completion(response="maybe 5", final="", record=RECORD)
    for answer in (Completion(response=CUT_OFF, record=RECORD), opened):
        assert scored(name, answer) == 0.0
        assert answer.unfinished_thoughts
    assert len(graders.texts) == 3  # nobody is asked about these
    assert scored(name, opened, score_unfinished_thoughts=True) == 1.0
    assert graders.texts[3:] == ["maybe 5"]


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (f"{THOUGHT}I am not sure.", 0.0),
        (CUT_OFF, 0.0),
        (f"{THOUGHT}\\boxed{{4}}", 0.0),
        ("<think> 4 </think> #### 5", 1.0),
        (f"{THOUGHT}The answer is 5.", 1.0),
        ("maybe 4 </think> 5", 1.0),
        ("#### 5", 1.0),
    ],
)
def test_a_thought_is_no_worked_answer(response: str, value: float) -> None:
    assert math_verify_reward(response=response, answer="5") == value
    assert scored("math_verify", Completion(response=response, answer="5")) == value


def test_unfinished_thoughts_are_scored_where_a_setting_says_so() -> None:
    for answer in (
        Completion(response=CUT_OFF, answer="5"),
        Completion(response="maybe 5", final="", answer="5"),
    ):
        assert scored("math_verify", answer) == 0.0
        assert scored("math_verify", answer, score_unfinished_thoughts=True) == 1.0
    wrong = Completion(response=f"{THOUGHT}4", answer="5")
    assert scored("math_verify", wrong, score_unfinished_thoughts=True) == 0.0


@pytest.mark.parametrize("name", KNOWN_FIELDS)
def test_what_a_plan_knows_of_a_rule_is_so(name: str) -> None:
    assert fields_of(plugin_table.find("reward", name)) == KNOWN_FIELDS[name]


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("<answer>a</answer> b <answer> c</answer>", " c"),
        ("<answer>a<answer>b</answer>", "a<answer>b"),
        ("<answer>a</answer><answer>b", "a"),
        ("<answer>a", "<answer>a"),
        ("a</answer>", "a</answer>"),
        ("<answer></answer>", ""),
    ],
)
def test_the_last_marked_answer_of_a_generators_question(text: str, marked: str) -> None:
    assert stated_answer(text) == marked.strip()


# ---- where answers are made ----------------------------------------------------------------------

QUESTION, OPENED = "user: 2+3?\nassistant: ", "user: 2+3?\nassistant: <think>\n"
ANSWERS = ("#### 5", "<think>4</think>5", "maybe 5", "maybe 4 </think> 5", CUT_OFF)
WITHOUT, WITHIN = (1.0, 1.0, 1.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0, 0.0)


def sample(prompt: str, answers: Sequence[str]) -> SequenceSample:
    """One record with these answers."""
    rows = [[*map(ord, prompt + answer)] for answer in answers]
    lengths = [list(map(len, rows))]
    return SequenceSample.from_tensors(
        ["0-0"],
        {"packed_input_ids": lengths, "prompt_mask": lengths},
        {
            "packed_input_ids": torch.tensor([token for row in rows for token in row]),
            "prompt_mask": torch.tensor([i < len(prompt) for row in rows for i in range(len(row))]),
        },
        metadata={"answer": ["5"]},
    )


@pytest.mark.parametrize(("prompt", "values"), [(QUESTION, WITHOUT), (OPENED, WITHIN)])
def test_answers_begin_within_thoughts_that_their_prompt_opens(
    prompt: str, values: tuple[float, ...]
) -> None:
    model: Any = SimpleNamespace(tokenizer=LetterTokenizer())
    data = sample(prompt, ANSWERS)
    given = MathRewardInterface().inference(model, data, MicroBatchSpec())
    assert tuple(given.data["rewards"].tolist()) == values
    (text,) = given.meta.metadata["reward_parts"]
    assert text.count(f'"{UNFINISHED_THOUGHTS}": 1.0') == values.count(0.0)

    async def episode(answer: str) -> tuple[float, Mapping[str, float]]:
        environment = MathVerify()
        await environment.reset({"prompt": prompt, "answer": "5"})
        made = await MathSingleStep().run_episode(
            EpisodeTask(
                id="e",
                prompt=[*map(ord, prompt)],
                record={},
                ask=ScriptedPolicy(answer),
                environment=environment,
                tokenizer=LetterTokenizer(),
            )
        )
        return made.reward, made.stats

    for answer, value in zip(ANSWERS, values, strict=True):
        reward, stats = asyncio.run(episode(answer))
        assert reward == value
        assert stats.get(f"reward/{UNFINISHED_THOUGHTS}", 0.0) == 1.0 - value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("<think>maybe 5", 0.0),
        ("<think>maybe 5</think>", 0.0),
        ("<think>maybe 4</think>#### 5", 1.0),
        ("#### 5", 1.0),
        ("", 0.0),
    ],
)
def test_a_chat_is_scored_by_what_stands_behind_its_thoughts(written: str, value: float) -> None:
    async def episode(**arguments: Any) -> Any:
        environment = MathVerify(**arguments)
        await environment.reset(RECORD)
        agent = ChatAgent(form="hermes")
        await agent.open(host(Path()))
        return await agent.run_episode(task(ScriptedPolicy(written), environment, RECORD))

    made = asyncio.run(episode())
    assert made.reward == value
    thinks_only = written.startswith("<think>") and not value
    assert made.stats.get(f"reward/{UNFINISHED_THOUGHTS}", 0.0) == float(thinks_only)


def test_a_model_without_thoughts_has_the_same_numbers_as_ever() -> None:
    data = sample(QUESTION, ["#### 5", "I think 4", ""])
    (record,) = answered_records(data, LetterTokenizer(), {"response"}, asked=data)
    assert [answer.final is answer.response for answer in record.answers] == [True] * 3
    model: Any = SimpleNamespace(tokenizer=LetterTokenizer())
    given = MathRewardInterface().inference(model, data, MicroBatchSpec())
    assert given.data["rewards"].tolist() == [1.0, 0.0, 0.0]
    assert "reward_parts" not in given.meta.metadata


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_what_a_familys_template_opens_is_seen_in_its_tokens(family: ChatFamily) -> None:
    tokenizer = family.tokenizer
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2+3?"}], add_generation_prompt=True, tokenize=False
    )
    opened = "<think>" if family.name == "deepseek" else ""
    assert opened_thoughts(tokenizer, tokenizer.encode(text)) == opened
    for content in ("#### 5", "<think>4</think>5" if family.thinks else "5"):
        assert decoded_answer(tokenizer, tokenizer.encode(content)) == content


def test_a_reward_worker_is_told_what_it_cannot_see() -> None:
    answer = Completion(response="maybe 5", final="", answer="5")
    assert answer_of_json(answer_to_json(answer, KNOWN_FIELDS["math_verify"])) == answer


class _SpecialMarks:
    """Has marks, and an end, as special tokens; else a token a letter."""

    chat_template = "… [THINK] … [/THINK] …"
    special = ("[THINK]", "[/THINK]", "</s>")

    def __init__(self) -> None:
        self.added_tokens_decoder = {
            number: SimpleNamespace(content=text, special=True)
            for number, text in enumerate(self.special)
        }

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(
            (self.special[i] if not skip_special_tokens else "") if i < 3 else chr(i) for i in ids
        )


def test_marks_that_are_special_tokens_stay_in_the_text() -> None:
    tokenizer = _SpecialMarks()
    tokens = [0, *map(ord, "4"), 1, *map(ord, "5"), 2]
    assert decoded_answer(tokenizer, tokens) == "[THINK]4[/THINK]5"
    assert decoded_answer(tokenizer, tokens[3:]) == "5"
    tokenizer.chat_template = "…"  # knows no thoughts
    assert decoded_answer(tokenizer, tokens) == "45"


def test_an_agent_of_ones_own_is_told_that_an_answer_begins_within_thoughts() -> None:
    class Plain(Agent):
        async def run(self, prompt: Any, *, ask: Any, environment: Any, tokenizer: Any) -> Any:
            answer = await ask(prompt, None, stop=("\n",))
            seen.append(answer.opened)
            return SimpleNamespace(reward=0.0, stats={})

    seen: list[str] = []
    for prompt in (QUESTION, OPENED):
        asked: Any = SimpleNamespace(
            prompt=[*map(ord, prompt)],
            ask=ScriptedPolicy("5"),
            environment=None,
            tokenizer=LetterTokenizer(),
        )
        asyncio.run(Plain().run_episode(asked))
    assert seen == ["", "<think>"]
