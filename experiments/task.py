"""Tasks: what is learned. Questions, how an answer is scored, how an episode runs. ``task=math``.

``FileTask`` has questions from files of any shape (docs/your_data.md); ``MathTask`` those with a checkable
answer, or arithmetic. A task of one's own is a ``GeneratedTask`` with a
method that makes a question and one that scores an answer (docs/your_task.md).
"""

from __future__ import annotations

import abc
import inspect
import random
import re
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, TypeVar

from experiments.parts.agent_files import (
    agent_file_problems,
    located_agent_args,
    located_env_args,
    role_problems,
)
from experiments.parts.chosen_settings import MeasuredQuestions
from experiments.parts.conversation_files import conversation_problems, conversation_warnings
from experiments.parts.held_out_records import ReadQuestions, files_of
from experiments.parts.question_files import (
    absolute,
    answer_problems,
    count_questions,
    dataset_problems,
    measured_questions,
    question_files,
    rule_record_problems,
    sampled_warnings,
)
from experiments.parts.rule_trials import right_answer, trial_problems, trusted_rules
from realsys.api import registry
from realsys.api.basics.choice import Choice, register_kind
from realsys.api.basics.reward import (
    OF_RECORD,
    QUESTION,
    WITH_QUESTION,
    fields_of_expression,
    needs_answer,
    rule_problems,
)
from realsys.api.basics.rule_permissions import RulePermissions
from realsys.api.errors import ConfigError, DataError
from realsys.api.model import DatasetAbstraction
from realsys.api.options import option
from realsys.api.plain import from_plain, to_plain
from realsys.api.worker_configs import CurriculumControl, RolloutWorker
from realsys.data.sources.dataset_arguments import DROP, REFUSE, MathRecordsArguments
from realsys.data.sources.dataset_arguments import Columns as Columns

T = TypeVar("T", bound="type[Task]")
LOG_EVERY_S = 10.0  # while questions are made
TEST_PERCENT = 10  # of a generated task's questions, by what they say
MOST_DRAWS = 1000  # for one question of a split
SINGLE_STEP = "math_single_step"
PLAIN_ENVIRONMENT = "math_verify"
FROM_OUTSIDE = "external"  # an agent whose clients start their episodes themselves
# Each plays one kind of task.
OWN_AGENTS = {"harbor": "harbor", "harbor_command": "harbor", "verifiers": "verifiers"}
# Built-in agents whose episodes have no reward but their environment's, and environments that have none but
# the rule's. All others may have one of their own.
SCORED_BY_ENVIRONMENT = (SINGLE_STEP, "math_multi_turn", "tool_use", "chat")
SCORING_BY_RULE = (PLAIN_ENVIRONMENT, "calculator", "mcp")


@dataclass(frozen=True, kw_only=True)
class Task(Choice, abc.ABC):
    """Base: settings of every task."""

    choice = "task"
    asks_itself: ClassVar[bool] = True  # else other tasks do, which have settings of their own
    own_agents: ClassVar[tuple[str, ...]] = ()  # that play only tasks of this kind

    eval_size: int = option(500, "held-out questions", ge=0)
    max_prompt_len: int = option(128, "longest question; see long_prompts", unit="tokens", ge=1)
    long_prompts: str = option(
        REFUSE,
        "a question longer than max_prompt_len is an error before step 1 (refuse), or left out and counted "
        "(drop), of held-out questions too; none is ever cut",
        choices=(REFUSE, DROP),
    )
    shuffle: bool = option(True, "a new order each epoch")
    reward: str | None = option(
        None, "rules that score an answer, e.g. a + 0.2*b; none: the task's own"
    )
    reward_args: Mapping[str, Mapping[str, Any]] = option(
        {}, "arguments of the rules, by their names"
    )
    agent: str = option(SINGLE_STEP, "registered agent, where generation servers sample")
    agent_args: Mapping[str, Any] = option({}, "its arguments")
    env: str = option(PLAIN_ENVIRONMENT, "registered environment of the agent")
    env_args: Mapping[str, Any] = option({}, "its arguments")

    @abc.abstractmethod
    def data_args(self) -> dict[str, Any]:
        """Arguments of the data sets ``math_prompts`` and ``math_sft``, besides the split."""

    @property
    @abc.abstractmethod
    def is_generated(self) -> bool:
        """Whether questions are made, and none is read from a file."""

    @property
    def is_arithmetic(self) -> bool:
        """Whether all questions are the built-in arithmetic."""
        return False

    @property
    def num_questions(self) -> int | None:
        """Questions of an epoch; None: as many as a file has."""
        return None

    def counted_questions(self) -> int | None:
        """Questions of an epoch, of a file as many as a plan counts; None: only workers know."""
        return self.num_questions

    @property
    def num_held_out(self) -> int:
        """Held-out questions."""
        return self.eval_size

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest question that is allowed."""
        return self.max_prompt_len

    @property
    def _of_long_prompts(self) -> dict[str, Any]:
        """Argument of the data sets, where it is not the default's."""
        return {"long_prompts": self.long_prompts} if self.long_prompts != REFUSE else {}

    @property
    def curriculum_control(self) -> CurriculumControl | None:
        """How records are chosen by success; None: they are not."""
        return None

    @property
    def rule(self) -> str:
        """The registered reward rule."""
        return self.reward or self.kind

    @property
    def needs_rule(self) -> bool:
        """Whether nothing but a rule gives episodes a reward; an agent of one's own may return it."""
        return self.agent in SCORED_BY_ENVIRONMENT and self.env in SCORING_BY_RULE

    @property
    def reward_rule(self) -> dict[str, Any]:
        """The rules as arguments of interfaces, environments and evaluators."""
        args = to_plain(self.reward_args)
        return {"reward": self.rule, **({"reward_args": args} if args else {})}

    @property
    def episode_args(self) -> dict[str, Any]:
        """The agent's arguments as workers get them."""
        return located_agent_args(self.agent, self.agent_args)

    @property
    def is_played(self) -> bool:
        """Whether an agent or an environment takes part, so that an episode is more than one answer."""
        plain = self.agent == SINGLE_STEP and self.env == PLAIN_ENVIRONMENT
        return not plain or bool(self.agent_args or self.env_args)

    def player(self, split: str, **others: Any) -> RolloutWorker:
        """Builds what runs episodes of a split's questions; ``others``: further fields."""
        return RolloutWorker(
            env=self.env,
            env_args={**self.reward_rule, **located_env_args(self.env, self.env_args)},
            agent=self.agent,
            agent_args=self.episode_args,
            datasets=(self.prompts(split),),
            **others,
        )

    @property
    def holds_to_schemas(self) -> bool:
        """Whether answers are held to the JSON schemas that an agent's requests have."""
        return self.agent_args.get("schema") == "enforce"

    @property
    def reward_keys(self) -> tuple[str, ...]:
        """Keys of a batch that the rules look at, besides the answers' tokens."""
        fields = self._fields_of_rule
        record = ("record",) if fields & OF_RECORD else ()
        return (*record, *(("seq_no_eos_mask",) if "finish_reason" in fields else ()))

    @property
    def rules_look_at_question(self) -> bool:
        """Whether the rules compare an answer with what is asked, so that the data set has to tell it."""
        return QUESTION in self._fields_of_rule

    @property
    def _fields_of_rule(self) -> frozenset[str]:
        try:
            return fields_of_expression(self.rule)
        except ConfigError:  # reported by problems()
            return frozenset()

    @property
    def prompt_keys(self) -> tuple[str, ...]:
        """Keys of the data set of prompts."""
        return ("packed_prompts", *(key for key in self.reward_keys if key == "record"))

    def prompts(self, split: str) -> DatasetAbstraction:
        """The questions of a split, ``train`` or ``test``."""
        whole = {"with_record": True} if "record" in self.reward_keys else {}
        whole |= {WITH_QUESTION: True} if self.rules_look_at_question else {}
        return DatasetAbstraction("math_prompts", {**self.data_args(), **whole, "split": split})

    def answers(self, split: str, *, max_answer_len: int) -> DatasetAbstraction:
        """Questions with their worked answers, for fine-tuning."""
        args = {**self.data_args(), "max_answer_len": max_answer_len, "split": split}
        return DatasetAbstraction("math_sft", args)

    def problems(self, *, batch_size: int, tokenizer_dir: str | None) -> Iterator[ConfigError]:
        """Yields unknown names, fewer questions than a batch, and what is wrong with files."""
        if self.num_questions is not None and self.num_questions < batch_size:
            yield ConfigError(
                f"{self.num_questions} questions are too few for a batch of {batch_size}",
                where="task.train_size and train_bs_n_seqs",
                fix=f"use task.train_size={batch_size} or more",
            )
        if self.rule:
            yield from rule_problems(self.rule, self.reward_args, where="task.reward")
        for kind, name, where in (
            ("agent", self.agent, "task.agent"),
            ("environment", self.env, "task.env"),
        ):
            if problem := registry.check(kind, name, where=where):
                yield problem
        yield from agent_file_problems(self.agent, self.agent_args)
        yield from role_problems(self.agent_args)
        if OWN_AGENTS.get(self.agent, self.kind) != self.kind:
            yield ConfigError(
                f"agent {self.agent!r} plays tasks of its own kind only, and this one is {self.kind!r}",
                where="task.agent and task",
                fix=f"use task={OWN_AGENTS[self.agent]}, or another agent",
            )

    def reward_problems(self) -> Iterator[ConfigError]:
        """Yields that no rule is named, which fine-tuning does without, and an agent that rewards."""
        if not self.rule and self.needs_rule:
            yield ConfigError(
                f"task {self.kind} has no rule that scores an answer",
                where="task.reward",
                fix="name a registered one, e.g. task.reward=math_verify (docs/your_data.md shows yours); "
                "an agent that returns its reward needs none: task.agent=python",
            )

    def answer_problems(self) -> Iterator[ConfigError]:
        """Yields what fine-tuning on the task's answers would fail at."""
        yield from ()

    def conversation_problems(
        self, tokenizer_dir: str | None, *, max_answer_len: int
    ) -> Iterator[ConfigError]:
        """Yields conversations that are too long for fine-tuning."""
        yield from ()

    def conversation_warnings(self, tokenizer_dir: str | None) -> Iterator[str]:
        """Yields what becomes of conversations in fine-tuning."""
        yield from ()

    def agent_problems(self) -> Iterator[ConfigError]:
        """Yields what a run without generation servers would not act on."""
        if self.agent != SINGLE_STEP or self.agent_args:
            yield ConfigError(
                f"agent {self.agent!r} asks the policy through generation servers, and there are none",
                where="task.agent and schedule",
                fix="use schedule=async, or leave task.agent out: one question, one answer",
            )
        if self.env_args or self.env != PLAIN_ENVIRONMENT:
            yield ConfigError(
                f"environment {self.env!r} belongs to an agent, and without generation servers there is "
                "none: task.reward scores the answers",
                where="task.env and schedule",
                fix="use schedule=async, or leave task.env and task.env_args out",
            )

    def remarks(self, tokenizer_dir: str | None) -> Iterator[str]:
        """Yields what a user should know about the questions."""
        yield from self.reward_warnings()

    def reward_warnings(self) -> Iterator[str]:
        """Yields what is known against the rule that scores the answers."""
        yield from ()

    def trusted_rules(self) -> tuple[str, ...]:
        """Names of the rules that run in the workers themselves, without walls or limits."""
        return trusted_rules(self.rule, self.reward_args)

    def measured(self, tokenizer_dir: str) -> MeasuredQuestions | None:
        """How many and how long the questions are; None: that is not known before a worker reads them."""
        return None

    def input_files(self) -> tuple[str, ...]:
        """Files that the questions come from."""
        return ()

    def read_questions(self, setting: str) -> Iterator[ReadQuestions]:
        """Yields what it reads and holds out of files, as the task that stands at ``setting``."""
        yield from ()

    def with_absolute_paths(self) -> Task:
        """Returns the task with its files as they are named from the present folder."""
        return self

    def as_benchmark(self) -> Task:
        """Returns the task with all of its questions held out, as far as they are known and
        ``eval_size`` allows."""
        return self


def at_setting(problem: ConfigError, task: Task, path: str) -> ConfigError:
    """Returns a task's problem with the names that its settings have where the task stands at ``path``."""
    names = "|".join(f.name for f in fields(task))
    where, fix = (
        re.sub(rf"(?<![\w./])task\.(?=(?:{names})\b)", f"{path}.", text)
        for text in (problem.where, problem.fix)
    )
    return type(problem)(problem.what, where=where, fix=fix)


@dataclass(frozen=True, kw_only=True)
class FileTask(Task):
    """Questions from files of any shape, scored by a rule of one's own."""

    kind = "file"

    path: str | None = option(
        None,
        "records: JSONL, CSV, Parquet, a save_to_disk folder; a folder or pattern of shards; on a hub "
        "hf:OWNER/NAME[@REVISION][/FILES]",
        hub_split="train",
    )
    eval_path: str | None = option(
        None, "held-out records; none takes the last eval_size of path", hub_split=""
    )
    columns: Columns = option(Columns(), "which fields of a record are asked and known")
    system: str | None = option(None, "system prompt of messages that have none of their own")
    template_args: Mapping[str, Any] = option(
        {}, "keyword arguments of the tokenizer's chat template, e.g. {enable_thinking: false}"
    )
    marks_as_text: Literal["tools", "all", "none"] = option(
        "tools",
        "in whose texts the chat template's marks (<|im_end|>) are text and no control tokens: results of "
        "tools, all but the policy's, or nobody's",
    )
    keep: tuple[str, ...] = option((), "registered filters; a record stays if all return True")
    transform: tuple[str, ...] = option(
        (), "registered transforms of the records that stay, in this order"
    )

    whole_answers: ClassVar[bool] = True  # else rules get what follows the last ####

    @property
    def needs_answer(self) -> bool:
        """Whether a record without an answer is refused: a rule may need only the record."""
        return needs_answer(self.rule) if self.rule else False

    @property
    def is_generated(self) -> bool:
        """Whether questions are made."""
        return False

    @property
    def rule(self) -> str:
        """The registered reward rule; empty: none is named."""
        return self.reward or ""

    def counted_questions(self) -> int | None:
        """Those that are made, or of the file."""
        return self.num_questions or count_questions(self._data)

    def data_args(self) -> dict[str, Any]:
        """Arguments of the data sets, besides the split."""
        given = {
            "columns": to_plain(self.columns) if self.columns != Columns() else None,
            "system": self.system,
            "template_args": dict(self.template_args),
            "marks_as_text": self.marks_as_text if self.marks_as_text != "tools" else None,
            "keep": list(self.keep),
            "transform": list(self.transform),
            "whole_answers": self.whole_answers,
            **self._of_long_prompts,
        }
        return {
            "path": absolute(self.path),
            "eval_path": absolute(self.eval_path),
            "eval_size": self.eval_size,
            "max_prompt_len": self.max_prompt_len,
            **{name: value for name, value in given.items() if value},
            **({} if self.needs_answer else {"needs_answer": False}),
        }

    def problems(self, *, batch_size: int, tokenizer_dir: str | None) -> Iterator[ConfigError]:
        """Yields unknown names, and unreadable or incomplete files."""
        yield from super().problems(batch_size=batch_size, tokenizer_dir=tokenizer_dir)
        if self.path is None and not self.is_generated:
            yield ConfigError(
                f"task {self.kind} has no file", where="task.path", fix="set task.path=FILE"
            )
        found = list(
            dataset_problems(self._data, batch_size=batch_size, tokenizer_dir=tokenizer_dir)
        )
        yield from found
        if not found and self.rule:
            yield from rule_record_problems(self._data, self.rule, self.reward_args)

    def answer_problems(self) -> Iterator[ConfigError]:
        """Yields records without anything to fine-tune on."""
        if not self.needs_answer:
            yield from answer_problems(self._data)

    def conversation_problems(
        self, tokenizer_dir: str | None, *, max_answer_len: int
    ) -> Iterator[ConfigError]:
        """Yields the longest conversation over the limit, of those that are counted."""
        yield from conversation_problems(self._data, tokenizer_dir, max_answer_len=max_answer_len)

    def conversation_warnings(self, tokenizer_dir: str | None) -> Iterator[str]:
        """Reports conversations that become several sequences."""
        yield from conversation_warnings(self._data, tokenizer_dir)

    def remarks(self, tokenizer_dir: str | None) -> Iterator[str]:
        """Reports how many questions of large files were counted, and what filters drop."""
        yield from sampled_warnings(self._data, tokenizer_dir)

    def measured(self, tokenizer_dir: str) -> MeasuredQuestions | None:
        """Those of the files."""
        return None if self.path is None else measured_questions(self._data, tokenizer_dir)

    def input_files(self) -> tuple[str, ...]:
        """The question files."""
        return question_files(self._data)

    def read_questions(self, setting: str) -> Iterator[ReadQuestions]:
        """Yields its files, unless its questions are made."""
        if self.path is not None:
            yield ReadQuestions(
                setting=setting,
                path=self.path,
                eval_path=self.eval_path,
                eval_size=self.eval_size,
                files=files_of(self.path),
                eval_files=files_of(self.eval_path),
                keep=self.keep,
            )

    def with_absolute_paths(self) -> Task:
        """Returns it with the paths of its records absolute."""
        return replace(self, path=absolute(self.path), eval_path=absolute(self.eval_path))

    def as_benchmark(self) -> Task:
        """Returns it with all records of its file held out, at most ``eval_size``."""
        file = self.eval_path or self.path
        if file is None:
            return self
        held_out = replace(self, path=file, eval_path=file)
        return replace(
            held_out, eval_size=min(self.eval_size, held_out.counted_questions() or self.eval_size)
        )

    @property
    def _data(self) -> MathRecordsArguments:
        return from_plain(MathRecordsArguments, {"split": "train", **self.data_args()})


@dataclass(frozen=True, kw_only=True)
class MathTask(FileTask):
    """Questions with a checkable answer, from files, or arithmetic word problems."""

    kind = "math"

    path: str | None = option(
        None,
        'records of {"prompt", "answer"} or GSM8K\'s {"question", "answer"}; none: arithmetic',
        hub_split="train",
    )
    train_size: int = option(16384, "questions to make when path is none", ge=1)
    slip_share: float = option(
        0.0, "share of made questions with a carry whose answer forgets it", ge=0, le=1
    )
    reward: str | None = option("math_verify", "rules that score an answer, e.g. a + 0.2*b")

    whole_answers = False

    @property
    def needs_answer(self) -> bool:
        """True."""
        return True

    @property
    def is_generated(self) -> bool:
        """Whether it is arithmetic."""
        return self.path is None

    @property
    def is_arithmetic(self) -> bool:
        """Whether no file is read."""
        return self.is_generated

    @property
    def num_questions(self) -> int | None:
        """Questions of an epoch; None: as many as the file has."""
        return self.train_size if self.is_generated else None

    @property
    def rule(self) -> str:
        """The registered reward rule."""
        return self.reward or "math_verify"

    def data_args(self) -> dict[str, Any]:
        """Arguments of the data sets, besides the split."""
        return {
            **super().data_args(),
            "train_size": self.train_size,
            "slip_share": self.slip_share,
        }


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(Task):
    """Base of tasks whose questions a method makes.

    Attributes:
        permissions: what ``score`` may do besides looking at the answer (docs/rewards.md).

    A subclass has a ``kind``, ``question(rng)`` and, unless ``reward`` names a rule, a static method
    ``score(response, answer)``; ``register_task`` makes it known.
    """

    permissions: ClassVar[RulePermissions] = RulePermissions()

    train_size: int = option(16384, "questions to make", ge=1)

    def question(self, rng: random.Random) -> Mapping[str, Any]:
        """Makes one record: ``prompt``, ``answer``, further fields for the rule. An answer may work step
        by step and end in ``#### 42``; then the last part is compared, and fine-tuning learns the whole.
        """
        raise NotImplementedError(f"{type(self).__name__} has no question(rng)")

    @property
    def is_generated(self) -> bool:
        """True."""
        return True

    @property
    def num_questions(self) -> int | None:
        """Questions of an epoch."""
        return self.train_size

    @property
    def rule(self) -> str:
        """The registered reward rule; empty: none is named, and the class has no ``score``."""
        rule = super().rule
        is_own = rule == self.kind and self.reward is None
        return "" if is_own and registry.check("reward", rule, where="") else rule

    def data_args(self) -> dict[str, Any]:
        """The task itself, from which a worker makes its questions."""
        args = {"task": to_plain(self), "max_prompt_len": self.max_prompt_len}
        return {**args, **self._of_long_prompts}

    def input_files(self) -> tuple[str, ...]:
        """The file of the class: other code makes other questions."""
        source = inspect.getsourcefile(type(self))
        return () if source is None else (source,)

    def records(self, split: str, seed: int) -> list[dict[str, Any]]:
        """Makes the questions of a split; what a question says decides its split, so none is in both.
        Where that takes long, the log tells how many are made.

        Raises:
            DataError: ``question`` makes hardly any for this split.
        """
        rng = random.Random(f"{seed}/{split}")
        size = self.eval_size if split == "test" else self.train_size
        made: list[dict[str, Any]] = []
        began_s = logged_s = time.monotonic()
        while len(made) < size:
            made.append(self._record(split, rng))
            if (now_s := time.monotonic()) - logged_s > LOG_EVERY_S:
                left_s = (now_s - began_s) / len(made) * (size - len(made))
                _log_progress(len(made), size, left_s)
                logged_s = now_s
        return made

    def _record(self, split: str, rng: random.Random) -> dict[str, Any]:
        for _ in range(MOST_DRAWS):
            record = self._made(rng)
            held_out = zlib.crc32(record["prompt"].encode()) % 100 < TEST_PERCENT
            if held_out == (split == "test"):
                return record
        raise DataError(
            f"{MOST_DRAWS} questions in a row belong to the other split than {split!r}",
            where=f"task {self.kind!r}, question(rng)",
            fix="make more different questions: a tenth of them, by their text, are held out",
        )

    def _made(self, rng: random.Random) -> dict[str, Any]:
        """One record. Raises DataError: ``question`` gave none, and whatever it raises."""
        made: Any = self.question(rng)
        texts = isinstance(made, Mapping) and [made.get("prompt"), made.get("answer")]
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise DataError(
                f"question(rng) gave {made!r:.200}",
                where=f"task {self.kind!r}",
                fix='return {"prompt": …, "answer": …}, two texts that are not empty',
            )
        return dict(made)

    def problems(self, *, batch_size: int, tokenizer_dir: str | None) -> Iterator[ConfigError]:
        """Yields what is wrong with any task, and with one question, tried."""
        yield from super().problems(batch_size=batch_size, tokenizer_dir=tokenizer_dir)
        try:
            record = self._made(random.Random("tried by the plan"))
        except DataError as error:
            yield ConfigError(error.what, where=error.where, fix=error.fix)
            return
        except Exception as error:  # a user's code may raise anything
            yield _raised(self.kind, "question(rng)", error)
            return
        if self.reward is None and not list(rule_problems(self.rule, {}, where="")):
            where = f"task {self.kind!r}, score"
            yield from trial_problems(
                self.rule, self.reward_args.get(self.rule, {}), right_answer(record), where=where
            )


def _log_progress(count: int, size: int, left_s: float) -> None:
    import logging  # plans do without

    text = "questions made=%d of=%d left_s=%.0f; task.train_size makes fewer"
    logging.getLogger(__name__).info(text, count, size, left_s)


def _raised(kind: str, what: str, error: Exception) -> ConfigError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return ConfigError(
        f"{what} raised {type(error).__name__}: {error}",
        where=f"task {kind!r}, {last.filename}:{last.lineno}",
        fix="repair it; a plan tries one question, and scores its right answer",
    )


def register_task(cls: T) -> T:
    """Registers a user's task, and its ``score`` as the reward rule of that name. Usable as a decorator.

    Raises:
        ConfigError: it is no task, no dataclass of its own or has no usable name; another task or rule has
            its name.
    """
    kind, where = getattr(cls, "kind", None), f"register_task({cls.__name__})"
    if not issubclass(cls, Task):
        raise ConfigError(f"{cls.__name__} is no task", where=where, fix="inherit GeneratedTask")
    if not isinstance(kind, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", kind):
        raise ConfigError(
            f"the name of task {cls.__name__} is {kind!r}",
            where=where,
            fix='write kind = "…" in the class, with letters, digits, - and _',
        )
    if "__dataclass_fields__" not in vars(cls):
        raise ConfigError(
            f"{cls.__name__} is no dataclass of its own, so its settings would not be known",
            where=where,
            fix="write @dataclass(frozen=True, kw_only=True) above the class, below @register_task",
        )
    register_kind(cls)
    if (score := getattr(cls, "score", None)) is not None:
        registry.register_reward(cls.kind, score, **cls.permissions.declared())  # type: ignore[attr-defined]
    return cls
