"""Decides which settings of a trial's plan a resume may change, with reasons against the others (pure).

For `realsys resume TRIAL NAME=VALUE`. Two plans are compared leaf by leaf. A leaf may differ if it is in
``ALLOWED``: no checkpoint depends on it, and earlier steps would be computed the same. Everything else is
refused, so a new setting is refused until it is added here. launcher/submit/remake.py makes the plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.config.option_tree import value_text
from realsys.trial.records import PlanChange

Path = tuple[str, ...]
_Unless = Callable[[Mapping[str, Any], Path], str]
MAIN = "main"

# ---- the table ----------------------------------------------------------------------------------
# Paths of a plan; ``*`` is one part, ``**`` any number of parts.

_MAIN = "phases.main.config"


def _length_matters(plan: Mapping[str, Any], path: Path) -> str:
    """Refuses a new length if learning rates depend on it: every schedule but the constant one does."""
    for worker in plan["phases"][MAIN]["config"]["model_worker"]:
        for shard in worker["shards"]:
            optimizer = shard["backend"]["args"].get("optimizer")
            if not isinstance(optimizer, Mapping):
                continue
            shape = optimizer.get("lr_schedule", "constant")
            warmup = optimizer.get("warmup_steps_proportion", 0)
            if shape != "constant" or warmup:
                role = shard["id"]["model_name"]["role"]
                cause = (
                    f"lr_schedule={shape}" if shape != "constant" else f"a warm-up of {warmup:g}"
                )
                return (
                    f"the learning rate of every step depends on the run's length ({role} has {cause} of "
                    "all steps): completed steps used other rates"
                )
    return ""


def _cuts(plan: Mapping[str, Any], path: Path) -> str:
    """Refuses a new length limit for data sets that may drop records by it; ours end the run instead."""
    if reason := _drops(plan, path):
        return reason
    kind = at(plan, (*path[:-2], "type_"))
    if kind in ("math_prompts", "math_sft", "preference_pairs"):
        return ""
    return f"data set {kind} may drop records by it, which would change their order"


def _drops(plan: Mapping[str, Any], path: Path) -> str:
    """Refuses a new length limit where records beyond it are left out (``long_prompts``)."""
    if at(plan, (*path[:-1], "long_prompts")) == "drop":
        return "long_prompts=drop leaves records out by it, which would change their order"
    return ""


def _scales_loss(plan: Mapping[str, Any], path: Path) -> str:
    """Refuses a new answer length if the loss aggregation divides by it."""
    for call in plan["phases"][MAIN]["config"]["model_rpcs"]:
        if call["interface_impl"]["args"].get("loss_aggregation") == "seq_mean_token_sum_norm":
            return "loss_aggregation=seq_mean_token_sum_norm divides each loss by it"
    return ""


_CONTROLS = "exp_ctrl master_worker.*.exp_ctrl"
_EVALUATED = "model_worker.*.shards.*.eval_dataset.args"
_BENCHMARK = "evaluator.*.benchmarks.*.dataset.args"
_CORPUS = "model_worker.*.shards.*.model.args.corpus.args"
_TASK = (
    "cpu mem nodelist exclude env_vars time_limit begin deadline partition account qos reservation "
    "constraint gpu_type extra"
).split()


def _rules(places: str, names: str, unless: _Unless | None = None) -> dict[str, _Unless | None]:
    """Returns the rules for leaves of the main phase's configuration at each of the places."""
    return {f"{_MAIN}.{p}.{n}": unless for p in places.split() for n in names.split()}


# A leaf that may change: None, or a function of (new plan, leaf's path) that returns a reason against it.
ALLOWED: dict[str, _Unless | None] = {
    # When to save, checkpoint and evaluate; length of the run.
    **_rules(_CONTROLS, "save_freq_epochs save_freq_steps save_freq_secs"),
    **_rules(_CONTROLS, "ckpt_freq_epochs ckpt_freq_steps ckpt_freq_secs ckpt_keep"),
    **_rules(_CONTROLS, "eval_freq_epochs eval_freq_steps eval_freq_secs"),
    **_rules(_CONTROLS, "benchmark_steps total_train_epochs", _length_matters),
    # Length limits of data and of future samples.
    **_rules("*.*.datasets.*.args", "max_prompt_len max_answer_len", _cuts),
    **_rules(f"{_EVALUATED} {_BENCHMARK}", "max_prompt_len max_answer_len", _cuts),
    **_rules("model_rpcs.*.interface_impl.args.gen", "max_new_tokens", _scales_loss),
    **_rules("rollout_worker.*.gconfig", "max_new_tokens", _scales_loss),
    **_rules("evaluator.*.gconfig", "max_new_tokens"),
    **_rules("*.*.datasets.*.args.sources.*", "max_prompt_len max_answer_len", _drops),
    **_rules(
        f"{_EVALUATED}.sources.* {_BENCHMARK}.sources.*", "max_prompt_len max_answer_len", _drops
    ),
    # Their tokenizer is trained on whole texts, however long.
    **_rules(f"{_CORPUS} {_CORPUS}.sources.*", "max_prompt_len max_answer_len", _drops),
    # A generated task is one of its data's arguments, with all its settings; its length is that above.
    **_rules(
        "*.*.datasets.*.args.task *.*.datasets.*.args.sources.*.task", "max_prompt_len", _drops
    ),
    **_rules(f"{_EVALUATED}.task {_EVALUATED}.sources.*.task", "max_prompt_len", _drops),
    **_rules(f"{_BENCHMARK}.task {_BENCHMARK}.sources.*.task", "max_prompt_len", _drops),
    **_rules(f"{_CORPUS}.task {_CORPUS}.sources.*.task", "max_prompt_len", _drops),
    # Memory and concurrency limits; time-outs.
    **_rules("model_rpcs.*.mb_spec evaluator.*.mb_spec", "max_tokens_per_mb max_cache_tokens"),
    # When to give up; steps that are made are the same.
    **_rules("model_worker.*.shards.*.backend.args.optimizer", "max_skipped_steps"),
    **_rules("rollout_worker.*", "new_tokens_per_chunk rollout_request_timeout"),
    **_rules("rollout_worker.*", "max_concurrent_rollouts dump_limit_gib dump_texts"),
    **_rules("gserver_manager.*", "flush_request_timeout max_concurrent_rollouts"),
    **_rules("rollout master_worker.*.rollout", "max_in_flight silence_s failed_share"),
    **_rules("evaluator.*", "batch_size poll_s max_tries retry_s"),
    **_rules("evaluator.*.benchmarks.*.player", "rollout_request_timeout"),
    # One more benchmark, or one less: the others' figures stay as they are.
    f"{_MAIN}.evaluator.*.benchmarks.*": None,
    # A step trains on the same questions however many it may ask.
    **_rules("dynamic_sampling master_worker.*.dynamic_sampling", "max_gen_batches"),
    # Who calls the reward rules, which give the same scores wherever they run.
    f"{_MAIN}.reward_worker": None,
    **dict.fromkeys(f"phases.*.scheduling.reward_worker{leaf}" for leaf in ("", ".count")),
    # Destinations of metrics.
    f"{_MAIN}.tensorboard": None,
    f"{_MAIN}.wandb.**": None,
    # Placement and resources of tasks in every phase, but not their number.
    **dict.fromkeys(f"phases.*.scheduling.*.scheduling.{name}.**" for name in _TASK),
    "phases.*.steps.**": None,
    "job.**": None,
}

# Reasons against leaves of the main phase that are not in ALLOWED; the first that matches is reported.
_REASONS: tuple[tuple[str, str], ...] = (
    ("config.*.*.base_seed", "data order and sampling follow from it"),
    ("config.**.optimizer.**", "weights and moments were computed with it"),
    ("config.model_worker.*.datasets.**", "{data}"),
    ("config.rollout_worker.*.datasets.**", "{data}"),
    ("config.*.*.shuffle_dataset", "{data}"),
    ("config.curriculum.**", "{data}"),
    ("config.master_worker.*.curriculum.**", "{data}"),
    ("config.dynamic_sampling.**", "{data}"),
    ("config.master_worker.*.dynamic_sampling.**", "{data}"),
    ("config.model_rpcs.*.n_seqs", "it is the batch size: {data}"),
    ("config.model_rpcs.*.n_minibatches", "the number of updates per step depends on it"),
    ("config.**.eval_dataset.**", "evaluations before and after it would not be comparable"),
    ("config.evaluator.**", "evaluations before and after it would not be comparable"),
    ("config.**.shards.*.model.**", "the checkpoint holds that model's weights"),
    ("config.*.*.num_threads", "sums would be rounded differently"),
    ("config.*.*.backend_args.num_threads", "sums would be rounded differently"),
    ("scheduling.*.scheduling.gpu", "tasks would compute on other devices"),
    ("scheduling.*.scheduling.container_image", "the software would differ"),
    ("scheduling.*", "the checkpoint has a file for each worker"),
    ("scheduling.*.count", "the checkpoint has a file for each worker"),
    ("config.**.shards.*.id.**", "{layout}"),
    ("config.**.topo.**", "{layout}"),
    ("config.resolved.**", "{layout}"),
    ("config.model_worker.**", "{layout}"),
    ("config.pools.**", "{layout}"),
    ("config.**.interface_impl.**", "{algorithm}"),
    ("config.model_rpcs.**", "{algorithm}"),
    ("config.**.gconfig.**", "{algorithm}"),
    ("config.**.reward", "{algorithm}"),
)
_WORDS = {
    "{data}": "the assignment of records to steps depends on it",
    "{layout}": "the checkpoint is sharded as models lie on their workers",
    "{algorithm}": "it is part of the algorithm: the run would mix two algorithms",
}
_NOT_ALLOWED = "it is not among the settings that no checkpoint depends on"


# ---- rendering ----------------------------------------------------------------------------------


def change_text(old: Any, new: Any) -> str:
    """Renders ``128 → 256``."""
    return f"{value_text(old)} → {value_text(new)}"


def change_lines(changes: Iterable[PlanChange]) -> list[str]:
    """Renders ``task.max_prompt_len: 128 → 256 since attempt 2`` for all changes made by resumes."""
    return [
        f"{name}: {change_text(*values)} since attempt {change.from_attempt}"
        for change in changes
        for name, values in change.settings.items()
    ]


# ---- comparing ------------------------------------------------------------------------------------


class _Absent:
    """Placeholder for a missing value."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


@dataclass(frozen=True)
class Difference:
    """A leaf in which two plans differ. Lists of different lengths count as one leaf."""

    path: Path
    old: Any
    new: Any

    @property
    def name(self) -> str:
        """The dotted path, with ``*`` for list indices."""
        return ".".join("*" if part.isdecimal() else part for part in self.path)


@dataclass(frozen=True)
class RefusedChange:
    """A difference that a resume must not make, and the reason."""

    difference: Difference
    why: str


def by_phase(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plan's plain value with phases as a table, so that paths name them."""
    return {**plan, "phases": {phase["name"]: phase for phase in plan["phases"]}}


def differences(old: Any, new: Any, path: Path = ()) -> Iterator[Difference]:
    """Yields all leaves in which two plain values differ."""
    if old is new or old == new:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            yield from differences(old.get(key, ABSENT), new.get(key, ABSENT), (*path, str(key)))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, (*path, str(index)))
    else:
        yield Difference(path, old, new)


def at(plan: Any, path: Path) -> Any:
    """Returns the value at a path; None if there is none."""
    for part in path:
        if isinstance(plan, Mapping):
            plan = plan.get(part)
        elif isinstance(plan, list) and part.isdecimal() and int(part) < len(plan):
            plan = plan[int(part)]
        else:
            return None
    return plan


def matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the path matches ``pattern``: ``*`` is one part, ``**`` any number of parts."""
    if not pattern:
        return not path
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        return any(matches(path[n:], rest) for n in range(len(path) + 1))
    return bool(path) and head in ("*", path[0]) and matches(path[1:], rest)


# Leaves that do not affect the run; leaves that are set anew for each start.
_IGNORED = ("options.**", "chosen.**", "warnings.**")
PER_START = (
    *(f"job.{name}" for name in ("begin", "deadline", "dependency", "after")),
    *(f"phases.*.scheduling.*.scheduling.{name}" for name in ("begin", "deadline")),
)


def relevant_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], *, ignored: Iterable[str] = ()
) -> list[Difference]:
    """Lists differences of two plans' plain values that make a different run."""
    left_out = [pattern.split(".") for pattern in (*_IGNORED, *ignored)]
    return [
        found
        for found in differences(by_phase(old), by_phase(new))
        if not any(matches(found.path, pattern) for pattern in left_out)
    ]


def refused_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[RefusedChange]:
    """Lists the refused differences with reasons, the most specific reason first."""
    plan = by_phase(new)
    found = []
    for difference in relevant_differences(old, new):
        place, why = _refusal_of(plan, difference.path)
        if why:
            found.append((place, RefusedChange(difference, why)))
    return [change for _, change in sorted(found, key=lambda pair: pair[0])]


def _refusal_of(plan: Mapping[str, Any], path: Path) -> tuple[int, str]:
    """Returns (index of the reason in the table, reason); 0 if allowed or refused by a rule."""
    for pattern, unless in ALLOWED.items():
        if matches(path, pattern.split(".")):
            return 0, unless(plan, path) if unless else ""
    if path[0] == "phases" and path[1] != MAIN:
        return (
            0,
            f"phase {path[1]} was started with the former value, and its product's name depends on it",
        )
    for place, (pattern, why) in enumerate(_REASONS, 1):
        if matches(path[:2], ("phases", MAIN)) and matches(path[2:], pattern.split(".")):
            for word, meaning in _WORDS.items():
                why = why.replace(word, meaning)
            return place, why
    return len(_REASONS) + 1, _NOT_ALLOWED


def extends_run(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the new plan's limits allow a longer run, so that a completed trial can continue."""
    former, now = (
        at(by_phase(plan), ("phases", MAIN, "config", "exp_ctrl")) for plan in (old, new)
    )
    for name in ("benchmark_steps", "total_train_epochs"):
        limits = [float("inf") if ctrl[name] is None else ctrl[name] for ctrl in (former, now)]
        if limits[1] > limits[0]:
            return True
    return False
