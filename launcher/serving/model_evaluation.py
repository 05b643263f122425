"""Prepares the evaluation of a saved model on a task's held-out questions, for ``realsys eval``."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.parts.agent_files import located_env_args
from experiments.task import FROM_OUTSIDE, MathTask, Task
from launcher.hub.hub_settings import with_local_data
from launcher.serving.saved_models import SavedModel
from launcher.sites.clusters import find_cluster
from launcher.submit.planning import hub_of, import_all
from launcher.submit.submit import packages_of_rollouts
from launcher.trials.find_trials import trial_name
from launcher.trials.launch_folder import in_launch_folder, read_trial_record
from realsys.api.errors import (
    ClusterError,
    ConfigError,
    MadeByOtherCode,
    did_you_mean,
    raise_all,
)
from realsys.api.model import GenerationHyperparameters
from realsys.api.options import option
from realsys.api.plain import from_plain
from realsys.api.plan import read_plan
from realsys.api.worker_configs import HELD_OUT, Benchmark, Evaluator, RolloutWorker
from realsys.config.extras import missing_packages
from realsys.config.overrides import with_settings
from realsys.trial.folders import check_ours

if TYPE_CHECKING:
    from realsys.evaluator.saved_model import EvaluatedModel

_CODE = "realsys.evaluator.saved_model"  # with torch, so imported when it is used
_NEEDED = ("torch", "transformers")
_BATCH = 128  # questions at a time


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The settings that an evaluation has beside its options, by the names that a launch has for them."""

    task: Task = option(MathTask(), "what is asked and how an answer is scored")


@dataclass(frozen=True, kw_only=True)
class AskedOptions:
    """How the questions are asked: the options of ``realsys eval``.

    Attributes:
        temperature: None: greedy if there is one answer a question, else 1.
        max_new_tokens: None: 1024, or as many as the model's positions leave.
        dtype: None: float32 on a CPU, bfloat16 on a GPU.
        limit: most questions; None: all that are held out.
        at_once: episodes at a time, where an agent plays.
    """

    samples: int = 1
    temperature: float | None = None
    top_p: float = 1.0
    max_new_tokens: int | None = None
    limit: int | None = None
    seed: int = 1
    device: str | None = None
    dtype: str | None = None
    at_once: int = 64

    def gconfig(self) -> GenerationHyperparameters:
        """Returns how answers are sampled, but for their number and length.

        Raises:
            ConfigError: several greedy answers are asked for, which would be the same.
        """
        hot = self.temperature if self.temperature is not None else float(self.samples > 1)
        if hot == 0 and self.samples > 1:
            raise ConfigError(
                f"{self.samples} greedy answers to a question are all the same",
                where="--samples and --temperature",
                fix="use --temperature above 0, or one sample",
            )
        return GenerationHyperparameters(greedy=hot == 0, temperature=hot or 1.0, top_p=self.top_p)


def task_settings(
    model: SavedModel,
    kind: str | None,
    words: Sequence[str],
    *,
    benchmark: str | None = None,
    imports: Sequence[str],
    limit: int | None,
    cluster: str | None,
    report: Callable[[str], None],
) -> Task:
    """Returns the task that is asked for, or the trial's own with the settings given.

    Args:
        benchmark: of the trial's, in place of its task.
        words: ``task.NAME=VALUE``.
        limit: most questions; so many are held out where the words don't say.
        report: gets lines about data that are fetched from a hub.
    Raises:
        ConfigErrors: every mistake in the settings, and what a launch would refuse of the task.
    """
    if other := [word for word in words if not word.startswith("task.")]:
        raise ConfigError(
            f"{other[0]!r} is no setting of a task",
            where="command line",
            fix="give --task KIND, and task.NAME=VALUE",
        )
    start, plan_imports = _start(model, kind, benchmark)
    import_all([*plan_imports, *imports])
    chosen = [f"task={kind}"] if kind is not None else []
    given = {word.partition("=")[0] for word in words}
    if "task.eval_path" in given and "task.path" not in given:
        chosen += [
            f"task.path={w.partition('=')[2]}" for w in words if w.startswith("task.eval_path=")
        ]
    if (
        kind is not None
        and limit is not None
        and "task.eval_size" not in given
        and kind != "mixture"
    ):
        chosen.append(f"task.eval_size={limit}")
    begin = EvaluationSettings() if start is None else start()
    settings: EvaluationSettings = with_settings(begin, words=[*chosen, *words])
    located = with_local_data(settings, hub_of(find_cluster(cluster), report), fetch=True)
    raise_all(located.problems)
    task = located.experiment.task
    if benchmark is not None:
        task = task.as_benchmark()
    problems = [
        *task.problems(batch_size=1, tokenizer_dir=str(model.path)),
        *task.reward_problems(),
        *_outside_problems(task, model),
    ]
    raise_all(problems)
    return task


def _outside_problems(task: Task, model: SavedModel) -> Iterator[ConfigError]:
    """Yields that nobody here starts the agent's episodes."""
    if task.agent == FROM_OUTSIDE:
        name = str(model.path) if model.trial is None else trial_name(model.trial)
        yield ConfigError(
            f"the clients of agent {FROM_OUTSIDE!r} start their episodes themselves",
            where="task.agent",
            fix=f"let them ask a server, realsys serve {name}, and score what they did; "
            "or name another agent, task.agent=NAME",
        )


def _start(
    model: SavedModel, kind: str | None, benchmark: str | None
) -> tuple[Callable[[], EvaluationSettings] | None, Sequence[str]]:
    """Returns what makes the settings to begin with, once the trial's plug-ins are imported."""
    if kind is not None and benchmark is not None:
        raise ConfigError(
            "a task and a benchmark, and one of them is asked",
            where="--task and --benchmark",
            fix="leave one of them out",
        )
    if model.trial is None:
        if kind is None:
            raise ConfigError(
                "a directory of a model has no task of its own",
                where="command line",
                fix="name one, e.g. --task math",
            )
        return None, ()
    files = model.trial
    plan = read_plan(files.plan)
    if kind is not None:
        return None, plan.imports
    options: Mapping[str, Any] = plan.options
    known = options.get("benchmarks") or {}
    if benchmark is not None and benchmark not in known:
        raise ConfigError(
            f"{plan.trial} has no benchmark {benchmark!r}",
            where="--benchmark",
            fix=did_you_mean(benchmark, known) if known else "name a task: --task KIND",
        )

    def own() -> EvaluationSettings:
        asked = options["task"] if benchmark is None else known[benchmark]
        try:
            made = from_plain(EvaluationSettings, {"task": asked})
            with in_launch_folder(read_trial_record(files)):
                return replace(made, task=_located(made.task))
        except (KeyError, ConfigError) as error:
            raise MadeByOtherCode(
                f"the task of {plan.trial} can't be read: {error}",
                where=str(model.path),
                fix="name the task: --task KIND task.NAME=VALUE",
            ) from error

    return own, plan.imports


def _located(task: Task) -> Task:
    """Returns the task with its files, and its agent's, as they are named from the present folder."""
    return replace(
        task.with_absolute_paths(),
        agent_args=task.episode_args,
        env_args=located_env_args(task.env, task.env_args),
    )


def as_trained(model: SavedModel, asked: AskedOptions, *, given: Collection[str]) -> AskedOptions:
    """Returns the options with the seed, the length and the dtype of the trial's own evaluation where none
    are given, so that its figures come out again.

    Args:
        given: fields of ``asked`` that the user set.
    """
    if model.trial is None:
        return asked
    plan = read_plan(model.trial.plan)
    found, options = plan.phase("main").config.evaluator, plan.options
    own = {
        "seed": options.get("seed"),
        "max_new_tokens": options.get("gen", {}).get("max_new_tokens"),
        "dtype": found[0].dtype if found else None,
    }
    return replace(asked, **{k: v for k, v in own.items() if v is not None and k not in given})


def evaluated(
    model: SavedModel,
    task: Task,
    asked: AskedOptions,
    *,
    logs: Path,
    report: Callable[[str], None],
) -> EvaluatedModel:
    """Evaluates the model in this process: by its answers to the questions, or, if the task has an agent
    or an environment, by its episodes.

    Args:
        logs: folder for what an agent's programs write.
    Raises:
        ConfigError: packages are missing, or an option is wrong. Whatever the model and the task raise.
    """
    options: dict[str, Any] = {
        "longest_prompt": task.longest_prompt,
        "max_new_tokens": asked.max_new_tokens,
        "limit": asked.limit,
        "device": asked.device,
        "dtype": asked.dtype,
        "report": report,
    }
    found: EvaluatedModel
    if task.is_played:
        worker = _player(model, task, asked)
        needed = [*_NEEDED, "aiohttp", *packages_of_rollouts([worker])]
        raise_all(missing_packages(needed, where="realsys eval"))
        code = importlib.import_module(_CODE)
        found = code.evaluate_episodes(model.path, worker, logs=logs, **options)
        return found
    raise_all(missing_packages(_NEEDED, where="realsys eval"))
    config = Evaluator(
        base_seed=asked.seed,
        role=model.role or "actor",
        benchmarks={
            HELD_OUT: Benchmark(dataset=task.prompts("test"), n=asked.samples, **task.reward_rule)
        },
        gconfig=asked.gconfig(),
        batch_size=_BATCH,
    )
    found = importlib.import_module(_CODE).evaluate_model(model.path, config, **options)
    return found


def _player(model: SavedModel, task: Task, asked: AskedOptions) -> RolloutWorker:
    """Returns what runs the task's episodes, with the time that the trial gives an environment."""
    limits: dict[str, Any] = {}
    if model.trial is not None:
        for worker in read_plan(model.trial.plan).phase("main").config.rollout_worker[:1]:
            limits["rollout_request_timeout"] = worker.rollout_request_timeout
    return task.player(
        "test",
        base_seed=asked.seed,
        gconfig=asked.gconfig(),
        group_size=asked.samples,
        max_concurrent_rollouts=asked.at_once,
        **limits,
    )


@contextmanager
def agents_logs(results: Path | None) -> Iterator[Path]:
    """Gives the folder for what an agent's programs write: beside the results; or, without any, one that
    stays only after a failure.
    """
    if results is not None:
        yield results.with_suffix(".agents")
        return
    folder = Path(tempfile.mkdtemp(prefix="realsys-eval-"))
    try:
        yield folder
    except Exception:
        with suppress(OSError):
            folder.rmdir()  # if it is empty
        raise
    except BaseException:  # the user's own doing
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def result_file(model: SavedModel, asked: str, out: Path | None) -> Path | None:
    """Returns where results are written: as told, or beside the trial, by what was asked; None: nowhere."""
    if out is not None or model.trial is None:
        return out
    try:
        check_ours(model.trial)
    except ClusterError:  # it is another user's
        return None
    folder = model.trial.root / "evals"
    stem = f"{model.role}-step-{model.step:06d}-{asked}"
    taken = {path.name for path in folder.glob(f"{stem}-*.json")}
    number = next(n for n in range(1, len(taken) + 2) if f"{stem}-{n}.json" not in taken)
    return folder / f"{stem}-{number}.json"
