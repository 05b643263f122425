"""One mistake is one problem: no follow-up of a value out of range, none for each phase or task group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import golden
import pytest
from wanted_resources import model_workers

from experiments.compose import RLExperiment
from experiments.ppo_math import ppo_math
from launcher.plan.resolve import resolve
from launcher.submit.planning import make_plan
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ConfigError, flat
from realsys.api.options import range_problems, with_defaults_out_of_range

SITE = """
name: site
scheduler: slurm
file_root: {root}
partitions:
  gpu: {{nodes: 8, cpus: 64, threads_per_core: 1, memory_mib: 2000000, gpus: 8}}
slurm: {{partition: gpu, time_limit: 1-00:00:00, accounting: false}}
"""
PPO = ppo_math()


@pytest.fixture
def site(file_root: Path) -> str:
    path = file_root.parent / "site.yaml"
    path.write_text(SITE.format(root=file_root))
    return str(path)


@pytest.mark.parametrize(
    ("experiment", "what"),
    [
        (replace(PPO, scheduling=model_workers(gpu=-1)), "scheduling.model_worker.gpu is -1"),
        (
            replace(PPO, actor=replace(PPO.actor, max_cache_tokens=0)),
            "actor.max_cache_tokens is 0",
        ),
        (
            replace(PPO, sft=replace(PPO.sft, scheduling=model_workers(cpu=0))),
            "sft.scheduling.model_worker.cpu is 0",
        ),
    ],
)
def test_a_value_out_of_range_has_no_follow_up(
    experiment: RLExperiment, what: str, tmp_path: Path
) -> None:
    where = ClusterSpec(file_root=str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        resolve("ppo-math", experiment, cluster=where, trial_name="a", user="ada")
    assert [p.what for p in flat(refused.value)] == [what]


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(
    ("setting", "what", "fix"),
    [
        ("scheduling.all.gpu=1.5", "a task asks for 1.5 GPUs", "use 0, 1, or a fraction below 1"),
        ("scheduling.model_worker.gpu=1.5", "a task asks for 1.5 GPUs", "use 0, 1, or a fraction"),
        (
            "scheduling.model_worker.gpu=1e30",
            "a task asks for 1e+30 GPUs",
            "use 0, 1, or a fraction",
        ),
        (
            "scheduling.model_worker.gpu=9",
            "a model worker computes on one GPU, but 9 are requested for each",
            "use 1, and more model workers for more GPUs",
        ),
    ],
)
def test_gpus_that_a_task_cant_use_are_told_once(
    setting: str, what: str, fix: str, local: bool, site: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make_plan("ppo-math-async", [setting], cluster=None if local else site)
    (problem,) = flat(refused.value)
    assert problem.what == what
    assert problem.fix.startswith(fix)


def test_an_image_without_a_runtime_is_told_for_the_first_group(site: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_plan("ppo-math", ["scheduling.all.container_image=/i/x.sqsh"], cluster=site)
    (problem,) = flat(refused.value)
    golden.check(problem)
    assert problem.where == "scheduling.model_worker.container_image (phase sft)"


def test_mistakes_of_two_causes_are_two(site: str) -> None:
    words = ["scheduling.model_worker.gpu=9", "scheduling.all.partition=gone"]
    with pytest.raises(ConfigError) as refused:
        make_plan("ppo-math", words, cluster=site)
    told = " ".join(p.what for p in flat(refused.value))
    golden.check(told)
    assert "'gone'" in told


def test_only_what_is_out_of_range_gets_its_default() -> None:
    broken = replace(PPO, seed=5, actor=replace(PPO.actor, max_cache_tokens=0, recompute=True))
    repaired = with_defaults_out_of_range(broken)
    assert not list(range_problems(repaired))
    assert repaired == replace(PPO, seed=5, actor=replace(PPO.actor, recompute=True))
    assert with_defaults_out_of_range(PPO) is PPO
