"""What a resume may change in a trial's plan, and why not the rest (pure).

For `realsys resume TRIAL NAME=VALUE`. Two plans are compared at their leaves. A leaf may differ if it
stands in ``ALLOWED``: no checkpoint depends on it, and what was computed before it would be computed
again. All else is refused, so that a new setting stays refused until somebody decides. How the plans are
made is launcher/submit/remake.py's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realsys.config.option_tree import value_text
from realsys.trial.records import PlanChange

Path = tuple[str, ...]
MAIN = "main"

# ---- the table ----------------------------------------------------------------------------------
# Paths of a plan; ``*`` is one part, ``**`` any number of parts. ``P`` stands for any phase.

_MAIN = "phases.main.config"


@dataclass(frozen=True)
class Rule:
    """A leaf that may change: ``unless`` gives a reason against it, from the plan and the leaf's path."""

    where: str
    unless: Callable[[Mapping[str, Any], Path], str] | None = None


def _length_matters(plan: Mapping[str, Any], path: Path) -> str:
    """Learning rates are functions of the step and, but for a constant one, of the run's length."""
    for worker in plan["phases"][MAIN]["config"]["model_worker"]:
        for shard in worker["shards"]:
            optimizer = shard["backend"]["args"].get("optimizer")
            if not isinstance(optimizer, Mapping):
                continue
            shape = optimizer.get("lr_schedule", "constant")
            warmup = optimizer.get("warmup_steps_proportion", 0)
            if shape != "constant" or warmup:
                role = shard["id"]["model_name"]["role"]
                told = f"lr_schedule={shape}" if shape != "constant" else f"a warm-up of {warmup:g}"
                return (
                    f"the learning rate of every step follows from the run's length ({role} has {told} of "
                    "all steps): the steps that are done were made with others"
                )
    return ""


def _cuts(plan: Mapping[str, Any], path: Path) -> str:
    """Our own data sets end a run at a prompt that is too long; others may leave it out."""
    kind = at(plan, (*path[:-2], "type_"))
    if kind in ("math_prompts", "math_sft"):
        return ""
    return f"data set {kind} may leave records out by it, and their order would be another one"


def _scales_loss(plan: Mapping[str, Any], path: Path) -> str:
    """One way to add up losses divides by the longest answer."""
    for call in plan["phases"][MAIN]["config"]["model_rpcs"]:
        if call["interface_impl"]["args"].get("loss_aggregation") == "seq_mean_token_sum_norm":
            return "loss_aggregation=seq_mean_token_sum_norm divides each loss by it"
    return ""


_PERIODS = tuple(
    f"{what}_freq_{unit}"
    for what in ("save", "ckpt", "eval")
    for unit in ("epochs", "steps", "secs")
)
_CONTROLS = (f"{_MAIN}.exp_ctrl", f"{_MAIN}.master_worker.*.exp_ctrl")
_LENGTHS = ("max_prompt_len", "max_answer_len")
_TASK = (
    "cpu mem nodelist exclude env_vars time_limit begin deadline partition account qos reservation "
    "constraint gpu_type extra"
).split()

ALLOWED: tuple[Rule, ...] = (
    # When to save, checkpoint and evaluate; how long to go on.
    *(Rule(f"{control}.{name}") for control in _CONTROLS for name in (*_PERIODS, "ckpt_keep")),
    *(
        Rule(f"{control}.{name}", _length_matters)
        for control in _CONTROLS
        for name in ("benchmark_steps", "total_train_epochs")
    ),
    # Lengths: of what is read, and of what is sampled from now on.
    *(
        Rule(f"{_MAIN}.{where}.args.{name}", _cuts)
        for name in _LENGTHS
        for where in (
            "*.*.datasets.*",
            "model_worker.*.shards.*.eval_dataset",
        )
    ),
    Rule(f"{_MAIN}.model_rpcs.*.interface_impl.args.gen.max_new_tokens", _scales_loss),
    Rule(f"{_MAIN}.rollout_worker.*.gconfig.max_new_tokens", _scales_loss),
    Rule(f"{_MAIN}.evaluator.*.gconfig.max_new_tokens"),
    # How much is in memory, or under way, at a time; how long it may take.
    Rule(f"{_MAIN}.model_rpcs.*.mb_spec.max_tokens_per_mb"),
    Rule(f"{_MAIN}.model_rpcs.*.mb_spec.max_cache_tokens"),
    *(
        Rule(f"{_MAIN}.rollout_worker.*.{name}")
        for name in (
            "new_tokens_per_chunk",
            "rollout_request_timeout",
            "max_concurrent_rollouts",
            "dump_limit_gib",
        )
    ),
    Rule(f"{_MAIN}.gserver_manager.*.flush_request_timeout"),
    Rule(f"{_MAIN}.gserver_manager.*.max_concurrent_rollouts"),
    Rule(f"{_MAIN}.rollout.max_in_flight"),
    Rule(f"{_MAIN}.master_worker.*.rollout.max_in_flight"),
    *(
        Rule(f"{_MAIN}.evaluator.*.{name}")
        for name in (
            "batch_size",
            "poll_s",
            "max_tries",
            "retry_s",
            "mb_spec.max_tokens_per_mb",
            "mb_spec.max_cache_tokens",
        )
    ),
    # Where metrics go.
    Rule(f"{_MAIN}.tensorboard"),
    Rule(f"{_MAIN}.wandb.**"),
    # Where tasks run, and with what: of every phase. Not how many there are.
    *(Rule(f"phases.*.scheduling.*.scheduling.{name}.**") for name in _TASK),
    Rule("phases.*.steps.**"),
    Rule("job.**"),
)

# Why not, for leaves that ALLOWED does not have; the first that fits is told.
_REASONS: tuple[tuple[str, str], ...] = (
    ("phases.main.config.*.*.base_seed", "data order and sampling follow from it"),
    ("phases.main.config.**.optimizer.**", "weights and moments were made with it"),
    ("phases.main.config.model_worker.*.datasets.**", "{data}"),
    ("phases.main.config.rollout_worker.*.datasets.**", "{data}"),
    ("phases.main.config.*.*.shuffle_dataset", "{data}"),
    ("phases.main.config.model_rpcs.*.n_seqs", "it is the batch size: {data}"),
    (
        "phases.main.config.model_rpcs.*.n_minibatches",
        "how many updates a step makes depends on it",
    ),
    (
        "phases.main.config.**.eval_dataset.**",
        "evaluations before and after it would be of two tests",
    ),
    ("phases.main.config.evaluator.**", "evaluations before and after it would be of two tests"),
    ("phases.main.config.**.shards.*.model.**", "the checkpoint holds that model's weights"),
    ("phases.main.config.*.*.num_threads", "sums would be rounded in another way"),
    ("phases.main.config.*.*.backend_args.num_threads", "sums would be rounded in another way"),
    ("phases.main.scheduling.*.scheduling.gpu", "tasks would compute on something else"),
    ("phases.main.scheduling.*.scheduling.container_image", "it would be other software"),
    ("phases.main.scheduling.*", "the checkpoint has a file for each worker"),
    ("phases.main.scheduling.*.count", "the checkpoint has a file for each worker"),
    ("phases.main.config.**.shards.*.id.**", "{layout}"),
    ("phases.main.config.**.topo.**", "{layout}"),
    ("phases.main.config.resolved.**", "{layout}"),
    ("phases.main.config.model_worker.**", "{layout}"),
    ("phases.main.config.pools.**", "{layout}"),
    ("phases.main.config.**.interface_impl.**", "{algorithm}"),
    ("phases.main.config.model_rpcs.**", "{algorithm}"),
    ("phases.main.config.**.gconfig.**", "{algorithm}"),
    ("phases.main.config.**.reward", "{algorithm}"),
)
_WORDS = {
    "{data}": "which records make which step follows from it",
    "{layout}": "the checkpoint is cut as models lie on their workers",
    "{algorithm}": "it is a part of what is learned and how: the run would be half of two",
}
_UNDECIDED = "it is not among the settings that no checkpoint depends on"


# ---- telling ------------------------------------------------------------------------------------


def change_text(old: Any, new: Any) -> str:
    """``128 → 256``."""
    return f"{value_text(old)} → {value_text(new)}"


def change_lines(changes: Iterable[PlanChange]) -> list[str]:
    """``dataset.max_prompt_len: 128 → 256 since attempt 2``, of all that resumes have changed."""
    return [
        f"{name}: {change_text(*values)} since attempt {change.from_attempt}"
        for change in changes
        for name, values in change.settings.items()
    ]


# ---- comparing ------------------------------------------------------------------------------------


class _Absent:
    """What is not there."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


@dataclass(frozen=True)
class Difference:
    """A leaf that two plans do not agree about. Lists of other lengths are a leaf."""

    path: Path
    old: Any
    new: Any

    @property
    def name(self) -> str:
        """Dotted, with ``*`` for a place in a list."""
        return ".".join("*" if part.isdecimal() else part for part in self.path)


@dataclass(frozen=True)
class RefusedChange:
    """A difference that a resume can't have, and why."""

    difference: Difference
    why: str


def by_phase(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's plain value with a table of phases, so that paths name them."""
    return {**plan, "phases": {phase["name"]: phase for phase in plan["phases"]}}


def differences(old: Any, new: Any, path: Path = ()) -> Iterator[Difference]:
    """All leaves in which two plain values differ."""
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
    """The value at a path; None where there is none."""
    for part in path:
        if isinstance(plan, Mapping):
            plan = plan.get(part)
        elif isinstance(plan, list) and part.isdecimal() and int(part) < len(plan):
            plan = plan[int(part)]
        else:
            return None
    return plan


def matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether ``pattern`` is of this path: ``*`` is one part, ``**`` any number of them."""
    if not pattern:
        return not path
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        return any(matches(path[n:], rest) for n in range(len(path) + 1))
    return bool(path) and head in ("*", path[0]) and matches(path[1:], rest)


# What is about words, not about what is done; what each start has anew.
_ASIDE = ("options.**", "scheduling_options.**", "warnings.**")
OF_A_START = (
    *(f"job.{name}" for name in ("begin", "deadline", "dependency", "after")),
    *(f"phases.*.scheduling.*.scheduling.{name}" for name in ("begin", "deadline")),
)


def what_differs(
    old: Mapping[str, Any], new: Mapping[str, Any], *, aside: Iterable[str] = ()
) -> list[Difference]:
    """Differences of two plans' plain values that tell of another run."""
    left_out = [pattern.split(".") for pattern in (*_ASIDE, *aside)]
    return [
        found
        for found in differences(by_phase(old), by_phase(new))
        if not any(matches(found.path, pattern) for pattern in left_out)
    ]


def refused(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[RefusedChange]:
    """What differs and may not, with the reason; what tells most comes first."""
    plan = by_phase(new)
    found = []
    for difference in what_differs(old, new):
        place, why = _judged(plan, difference.path)
        if why:
            found.append((place, RefusedChange(difference, why)))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def why_not(plan: Mapping[str, Any], path: Path) -> str:
    """Why a leaf may not change; empty if it may.

    Args:
        plan: the new one, as ``by_phase`` makes it.
    """
    return _judged(plan, path)[1]


def _judged(plan: Mapping[str, Any], path: Path) -> tuple[int, str]:
    """(place of the reason in the table, the reason)."""
    for rule in ALLOWED:
        if matches(path, rule.where.split(".")):
            return 0, rule.unless(plan, path) if rule.unless else ""
    if path[0] == "phases" and path[1] != MAIN:
        return 0, f"phase {path[1]} was begun with the former, and its product is named by them all"
    for place, (pattern, why) in enumerate(_REASONS, 1):
        if matches(path, pattern.split(".")):
            for word, meaning in _WORDS.items():
                why = why.replace(word, meaning)
            return place, why
    return len(_REASONS) + 1, _UNDECIDED


def goes_further(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the new plan's run is longer by its limits: what a completed trial goes on with."""
    former, now = (
        at(by_phase(plan), ("phases", MAIN, "config", "exp_ctrl")) for plan in (old, new)
    )
    for name in ("benchmark_steps", "total_train_epochs"):
        limits = [float("inf") if ctrl[name] is None else ctrl[name] for ctrl in (former, now)]
        if limits[1] > limits[0]:
            return True
    return False
