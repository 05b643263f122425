"""What a resume may change: every setting of the experiments is on one side, and the table says which.

A new setting fails `test_every_setting_is_decided` until it is written into one of the two lists.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from typing import Any

import golden
import pytest

from experiments.compose import RLExperiment
from experiments.parts.teacher_calls import TeacherOptions
from experiments.sft import SFTExperiment
from experiments.task import MathTask
from experiments.tasks.mixture import Mixture
from launcher.plan import resolve as resolve_module
from launcher.plan.resolve import resolve
from launcher.submit.planning import default_experiment
from launcher.trials.changed_settings import (
    ABSENT,
    PER_START,
    Difference,
    change_lines,
    differences,
    extends_run,
    matches,
    refused_changes,
    relevant_differences,
)
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ConfigError
from realsys.api.plain import to_plain
from realsys.api.scheduling import GroupOptions, SchedulingOptions
from realsys.config.option_tree import OptionRow, rows
from realsys.trial.records import PlanChange

# With what some settings need to be of any meaning.
EXPERIMENTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ppo-math", {}),
    (
        "ppo-math",
        {
            "auto_eval": True,
            "reward_workers": 1,
            "actor.lora.rank": 4,
            "placement.pools": {"all": "1", "more": "1"},
        },
    ),
    ("grpo-math", {}),
    ("grpo-math", {"schedule.success_range": (0.0, 1.0)}),
    ("ppo-math-async", {"schedule.success_range": (0.0, 1.0)}),
    ("sft-math", {}),
)

# ROLE stands for actor, critic, ref and model; what begins with sft. is settings of a preparation.
CAN = """
tensorboard exp_ctrl.save_freq_epochs exp_ctrl.save_freq_steps
exp_ctrl.save_freq_secs exp_ctrl.ckpt_freq_epochs exp_ctrl.ckpt_freq_steps exp_ctrl.ckpt_freq_secs
exp_ctrl.ckpt_keep exp_ctrl.eval_freq_epochs exp_ctrl.eval_freq_steps exp_ctrl.eval_freq_secs
ROLE.max_tokens_per_mb ROLE.max_cache_tokens ROLE.optimizer.max_skipped_steps
task.max_prompt_len gen.max_new_tokens
schedule.max_gen_batches
schedule.flush_request_timeout schedule.max_concurrent_rollouts schedule.max_in_flight schedule.failed_share
schedule.new_tokens_per_chunk schedule.rollout_request_timeout schedule.dump_limit_gib
schedule.dump_texts
evaluator.batch_size evaluator.max_tries evaluator.retry_s evaluator.poll_s wandb.mode wandb.project
wandb.entity max_answer_len reward_workers benchmarks
""".split()
# CPUs of those who compute are threads, which decide how sums are rounded.
COMPUTE = ["all", "model_worker", "generation_server", "evaluator"]
OTHERS = ["master_worker", "gserver_manager", "rollout_worker", "reward_worker"]
CAN += [f"scheduling.{kind}.mem" for kind in (*COMPUTE, *OTHERS)]
CAN += [f"scheduling.{kind}.cpu" for kind in OTHERS]
CAN_WITH_A_CONSTANT_LEARNING_RATE = "exp_ctrl.total_train_epochs exp_ctrl.benchmark_steps".split()
CANNOT = """
seed group_size teachers evaluator.n_of task.reward
placement.pools placement.allocation placement.n_model_workers
schedule.max_staleness auto_eval placement.copies_through algorithm.ref_ema_eta deterministic
ROLE.path ROLE.dtype ROLE.backend ROLE.parallel ROLE.pool ROLE.recompute ROLE.cpu_offload
ROLE.offload ROLE.optimizer.lr ROLE.optimizer.weight_decay
ROLE.optimizer.beta1 ROLE.optimizer.beta2 ROLE.optimizer.eps ROLE.optimizer.lr_schedule
ROLE.optimizer.warmup_steps_proportion ROLE.optimizer.min_lr_ratio ROLE.optimizer.gradient_clipping
ROLE.lora.rank ROLE.lora.alpha ROLE.lora.target_modules task.path task.eval_path task.train_size
task.slip_share task.eval_size train_bs_n_seqs task.shuffle algorithm.ppo_n_minibatches
algorithm.ppo_epochs algorithm.loss.eps_clip algorithm.loss.eps_clip_higher algorithm.loss.c_clip
algorithm.value_eps_clip algorithm.entropy_coef algorithm.discount algorithm.entropy_target
algorithm.entropy_step algorithm.top_entropy_share algorithm.nll_coef algorithm.kl_in
algorithm.kl_estimator algorithm.kl_unbiased algorithm.opsm_delta algorithm.value_huber_delta
algorithm.gae_length_alpha
algorithm.gae_lambda algorithm.adv_norm algorithm.kl_ctl algorithm.use_adaptive_kl_ctl
algorithm.adaptive_kl_target algorithm.adaptive_kl_horizon algorithm.max_reward_clip
algorithm.reward_output_scaling algorithm.reward_output_bias algorithm.truncation
algorithm.score_on_truncated algorithm.value_norm algorithm.value_norm_beta algorithm.value_norm_eps
algorithm.early_stop_imp_ratio algorithm.early_stop_kl algorithm.critic_warmup_steps
algorithm.loss_aggregation algorithm.mask_truncated algorithm.overlong_buffer_len
algorithm.overlong_penalty_factor algorithm.recompute_logprob algorithm.use_decoupled_loss
algorithm.correction algorithm.correction_level algorithm.behav_imp_weight_cap
algorithm.behav_imp_weight_mode algorithm.tis_imp_ratio_cap algorithm.icepop_low
algorithm.icepop_high algorithm.sequence_mask_low algorithm.sequence_mask_high
algorithm.mismatch_kl_max algorithm.on_mismatch gen.n gen.min_new_tokens gen.greedy gen.temperature
gen.top_p gen.top_k gen.stop_token_ids schedule.staleness_policy schedule.servers
schedule.server_backend schedule.server_args schedule.schedule_policy schedule.update_mode
schedule.weights_through schedule.wire_dtype schedule.delta schedule.workers task.agent
task.agent_args task.env task.env_args schedule.success_range schedule.dump evaluator.n
init.hidden_size init.num_layers init.num_heads init.num_kv_heads init.vocab_size task.reward_args
task.columns.prompt task.columns.answer task.columns.messages task.columns.tools task.system
task.template_args task.marks_as_text task.keep task.transform task.long_prompts
""".split()
CANNOT += [f"scheduling.{kind}.gpu" for kind in (*COMPUTE, *OTHERS)]
CANNOT += [f"scheduling.{kind}.cpu" for kind in COMPUTE]

# Where a changed value can't be guessed from the type.
VALUES: dict[str, Any] = {
    "placement.allocation": "*:d2t1p1",
    "teachers": {"big": TeacherOptions(path="/big")},
    "benchmarks": {"more": MathTask(eval_size=3)},
    "evaluator.n_of": {"held_out": 3},
    "train_bs_n_seqs": 32,
    "algorithm.loss.c_clip": 3.0,
    "placement.n_model_workers": 2,
    "ROLE.dtype": "bfloat16",
    "ROLE.backend": "inference",
    "ROLE.parallel": "d2t1p1",
    "ROLE.pool": "more",
    "ROLE.recompute": True,
    "wandb.mode": "offline",
}


def uncheck(patch: pytest.MonkeyPatch) -> None:
    """Any value makes a plan: no file has to be there, and no package."""
    patch.setattr(resolve_module, "_option_problems", lambda experiment: [])
    patch.setattr(resolve_module, "secret_problems", lambda experiment, cluster, request: [])
    patch.setattr(resolve_module, "unsupported", lambda config: [])
    patch.setattr(resolve_module, "plugin_argument_problems", lambda config: [])
    for kind in (RLExperiment, SFTExperiment):
        patch.setattr(kind, "remarks", lambda experiment, given: ())


def plan_of(name: str, options: Any) -> Any:
    plan = resolve(
        name,
        options,
        cluster=ClusterSpec(file_root="/r", name_resolve="file:///r/name_resolve"),
        trial_name="t",
        user="u",
        fits_memory=False,
    )
    return to_plain(plan)


def with_value(options: Any, path: str, value: Any) -> Any:
    head, _, rest = path.partition(".")
    return replace(
        options, **{head: with_value(getattr(options, head), rest, value) if rest else value}
    )


def other_value(row: OptionRow) -> Any:
    """Another value of the same type and range."""
    name, value = general(row.path), row.default
    if name in VALUES:
        return VALUES[name]
    if " | " in row.range:
        return next(choice for choice in row.range.split(" | ") if choice != value)
    if row.path.endswith("success_range"):
        return (0.5, 1.0)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.5
    if isinstance(value, tuple):
        return (*value, 7)
    if isinstance(value, dict):
        return {"a": "1"}
    if value is None and "number" in row.type:
        return 3 if "whole" in row.type else 0.5
    return f"{value or ''}x"


def general(path: str) -> str:
    """Without the role."""
    return re.sub(r"\b(actor|critic|ref|model)\.", "ROLE.", path)


def not_of_resources(path: str) -> bool:
    """Of tasks, what says nothing of CPUs, GPUs and memory (see ``test_resources_of_tasks``)."""
    _, of_tasks, rest = f".{path}".partition(".scheduling.")
    return bool(of_tasks) and rest.partition(".")[2] not in ("cpu", "gpu", "mem")


def verdicts(
    name: str, needed: dict[str, Any], known: Collection[str]
) -> Iterator[tuple[str, str]]:
    """(setting, yes | no | moot | unjudged) of each of an experiment's settings that is not ``known``."""
    options = default_experiment(name)
    for path, value in needed.items():
        options = with_value(options, path, value)
    before = plan_of(name, options)
    for row in rows(options):
        if row.section or row.type.startswith("group") or not_of_resources(row.path):
            continue
        if row.path in known:
            continue
        try:
            after = plan_of(name, with_value(options, row.path, other_value(row)))
        except ConfigError:
            yield row.path, "unjudged"
            continue
        side = "no" if refused_changes(before, after) else "yes"
        yield row.path, side if relevant_differences(before, after) else "moot"


@pytest.fixture(scope="module")
def found() -> dict[str, set[str]]:
    """Setting, generally → what it is in any of the experiments. Where one comes again, with more set, only
    what meant nothing before is judged. A preparation is always the same: its settings are judged once."""
    judged: dict[str, set[str]] = {}
    decided: dict[str, set[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        uncheck(patch)
        for name, needed in EXPERIMENTS:
            known = decided.setdefault(name, set())
            known |= {
                path for paths in decided.values() for path in paths if path.startswith("sft.")
            }
            for path, side in verdicts(name, needed, frozenset(known)):
                judged.setdefault(general(path), set()).add(side)
                if side in ("yes", "no"):
                    known.add(path)
    return judged


def own(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the settings of a preparation."""
    return {name: sides for name, sides in found.items() if not name.startswith("sft.")}


@pytest.mark.thorough
def test_every_setting_is_decided(found: dict[str, set[str]]) -> None:
    decided = [*CAN, *CAN_WITH_A_CONSTANT_LEARNING_RATE, *CANNOT]
    assert sorted(decided) == sorted(own(found))


def test_what_can_be_changed_can_in_every_experiment(found: dict[str, set[str]]) -> None:
    assert {name for name, sides in own(found).items() if "yes" in sides} == set(CAN)
    assert [name for name in CAN if "no" in found[name]] == []


def test_what_cannot_is_refused_wherever_it_means_anything(found: dict[str, set[str]]) -> None:
    assert [name for name in CANNOT if "no" not in found[name]] == []


@pytest.mark.parametrize(
    ("former", "later"),
    [
        ({}, {"curriculum": "learnability"}),
        ({"curriculum": "learnability"}, {}),
        (
            {"curriculum": "learnability"},
            {"curriculum": "learnability", "curriculum_floor": 0.2},
        ),
    ],
)
def test_a_curriculum_stays(former: dict[str, Any], later: dict[str, Any]) -> None:
    sources = {"a": MathTask(train_size=96), "b": MathTask(train_size=96)}
    with pytest.MonkeyPatch.context() as patch:
        uncheck(patch)
        before, after = (
            plan_of(
                "grpo-math",
                replace(default_experiment("grpo-math"), task=Mixture(sources=sources, **given)),
            )
            for given in (former, later)
        )
    refused = refused_changes(before, after)
    assert {"phases.main.config.curriculum", "phases.main.config.master_worker.*.curriculum"} <= {
        change.difference.name.removesuffix(".floor") for change in refused
    }
    golden.check({change.why for change in refused})


def test_a_benchmark_can_join_or_leave_and_one_that_stays_stays_the_same() -> None:
    def plan(**benchmarks: MathTask) -> Any:
        options = with_value(default_experiment("ppo-math"), "auto_eval", True)
        return plan_of("ppo-math", replace(options, benchmarks=benchmarks))

    hard, short, sums = MathTask(eval_size=20), MathTask(eval_size=10), MathTask(eval_size=3)
    with pytest.MonkeyPatch.context() as patch:
        uncheck(patch)
        before, more, other = plan(hard=hard), plan(hard=hard, sums=sums), plan(hard=short)
    assert relevant_differences(before, more)
    assert refused_changes(before, more) == refused_changes(more, before) == []
    refused = refused_changes(before, other)
    golden.check({change.why for change in refused})


def test_of_a_preparation_only_memory_can_be_changed(found: dict[str, set[str]]) -> None:
    its = {name for name, sides in found.items() if name.startswith("sft.") and "yes" in sides}
    memory = {f"sft.scheduling.{kind}.mem" for kind in ("all", "model_worker", "master_worker")}
    assert its == {*memory, "sft.scheduling.master_worker.cpu"}


CONSTANT = {
    f"{role}.optimizer.{name}": value
    for role in ("actor", "critic")
    for name, value in (("lr_schedule", "constant"), ("warmup_steps_proportion", 0.0))
}


@pytest.mark.parametrize("name", CAN_WITH_A_CONSTANT_LEARNING_RATE)
def test_a_run_can_be_made_longer_where_no_learning_rate_follows_from_its_length(name: str) -> None:
    options = default_experiment("ppo-math")
    longer = with_value(options, name, 7)
    (told, *_) = refused_changes(plan_of("ppo-math", options), plan_of("ppo-math", longer))
    assert told.difference.name == f"phases.main.config.{name}"
    assert "actor has lr_schedule=linear" in told.why
    for path, value in CONSTANT.items():
        options, longer = with_value(options, path, value), with_value(longer, path, value)
    assert refused_changes(plan_of("ppo-math", options), plan_of("ppo-math", longer)) == []
    warm = with_value(options, "critic.optimizer.warmup_steps_proportion", 0.5)
    warm_longer = with_value(longer, "critic.optimizer.warmup_steps_proportion", 0.5)
    (told, *_) = refused_changes(plan_of("ppo-math", warm), plan_of("ppo-math", warm_longer))
    golden.check(told.why)


def test_the_longest_answer_may_not_change_where_losses_are_divided_by_it() -> None:
    by_sum = with_value(
        default_experiment("grpo-math"), "algorithm.loss_aggregation", "seq_mean_token_sum_norm"
    )
    longer = with_value(by_sum, "gen.max_new_tokens", 99)
    (told, *_) = refused_changes(plan_of("grpo-math", by_sum), plan_of("grpo-math", longer))
    assert told.difference.name.endswith("gen.max_new_tokens")
    golden.check(told.why)


def test_a_data_set_that_may_leave_records_out_keeps_its_lengths() -> None:
    before = plan_of("ppo-math", default_experiment("ppo-math"))
    after = plan_of("ppo-math", with_value(default_experiment("ppo-math"), *LONGER))
    assert refused_changes(before, after) == []
    for plan in (before, after):
        for worker in plan["phases"][-1]["config"]["model_worker"]:
            for data in worker["datasets"]:
                data["type_"] = "mine"
    (told,) = refused_changes(before, after)
    assert told.difference.new == 256
    golden.check(told.why)


LONGER = ("task.max_prompt_len", 256)
# How many there are, on what they compute and with which software: not a matter of resources.
# CPUs are threads too.
TASK_CANNOT = ("cpu", "gpu", "container_image")


@pytest.mark.parametrize("field", [f.name for f in fields(GroupOptions)])
def test_resources_of_tasks(field: str) -> None:
    values: dict[str, Any] = {"cpu": 3, "gpu": 1.0, "mem": 99, "env_vars": {"A": "1"}}
    values["extra"] = {"comment": "x"}
    group = GroupOptions(**{field: values.get(field, "x")})
    options = default_experiment("ppo-math")
    before = plan_of("ppo-math", options)
    wanted = replace(options, scheduling=SchedulingOptions(model_worker=group))
    after = plan_of("ppo-math", wanted)
    assert relevant_differences(before, after)
    assert bool(refused_changes(before, after)) == (field in TASK_CANNOT)


# ---- the parts --------------------------------------------------------------------------------


def test_differences_are_leaves_and_lists_of_other_lengths() -> None:
    old = {"a": [{"b": 1, "c": 2}, {"b": 3}], "d": [1], "e": None, "f": {}}
    new = {"a": [{"b": 1, "c": 5}, {"b": 3}], "d": [1, 2], "e": None, "f": {"g": 0}}
    assert list(differences(old, new)) == [
        Difference(("a", "0", "c"), 2, 5),
        Difference(("d",), [1], [1, 2]),
        Difference(("f", "g"), ABSENT, 0),
    ]
    assert list(differences(old, old)) == []
    assert Difference(("a", "0", "c"), 2, 5).name == "a.*.c"


@pytest.mark.parametrize(
    ("path", "pattern", "fits"),
    [
        ("a.0.b", "a.*.b", True),
        ("a.0.b", "a.*", False),
        ("a.0.b", "a.**", True),
        ("a", "a.**", True),
        ("a.0.b.c", "**.c", True),
        ("a.0.b.c", "**.b", False),
        ("a.0.b.c", "a.**.c", True),
        ("ab", "a", False),
    ],
)
def test_patterns(path: str, pattern: str, fits: bool) -> None:
    assert matches(path.split("."), pattern.split(".")) is fits


def test_what_each_start_has_anew_is_no_difference() -> None:
    plan = plan_of("ppo-math", default_experiment("ppo-math"))
    old = {**plan, "job": {"begin": "now", "requeue": True}, "warnings": ["x"]}
    new = {**plan, "job": {"begin": None, "requeue": True}}
    assert relevant_differences(old, new, ignored=PER_START) == []
    assert [d.name for d in relevant_differences(old, new)] == ["job.begin"]
    assert refused_changes(old, new) == []


def test_an_unknown_part_of_a_plan_is_refused() -> None:
    plan = plan_of("ppo-math", default_experiment("ppo-math"))
    (told,) = refused_changes(plan, {**plan, "something_new": 1})
    golden.check(told.why)


def test_a_run_that_goes_further() -> None:
    options = default_experiment("ppo-math")
    ten, twenty = (with_value(options, "exp_ctrl.benchmark_steps", n) for n in (10, 20))
    plans = [plan_of("ppo-math", o) for o in (ten, twenty, options)]
    assert extends_run(plans[0], plans[1])
    assert extends_run(plans[1], plans[2])
    assert not extends_run(plans[1], plans[0])
    assert not extends_run(plans[0], plans[0])


def test_changes_are_told_with_their_attempt() -> None:
    change = PlanChange(
        from_attempt=2,
        plan_hash="h",
        at=0.0,
        settings={"task.max_prompt_len": (128, 256), "--time": (None, "2:00:00")},
    )
    golden.check(change_lines([change]))
