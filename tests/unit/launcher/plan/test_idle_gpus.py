"""A plan on GPU nodes that asks for no GPU is warned of: it would compute on CPUs, for days."""

from __future__ import annotations

from pathlib import Path

import golden
import pytest

from launcher.submit.planning import make_plan

SITE = """
name: site
scheduler: slurm
file_root: {root}
partitions:
  gpu: {{nodes: 8, cpus: 64, threads_per_core: 1, memory_mib: 2000000, gpus: 8}}
  cpu: {{nodes: 8, cpus: 64, threads_per_core: 1, memory_mib: 2000000}}
slurm: {{partition: gpu, time_limit: 1-00:00:00, accounting: false}}
"""
ALL_MODELS = "scheduling.model_worker.gpu=1"


@pytest.fixture
def site(file_root: Path) -> str:
    path = file_root.parent / "site.yaml"
    path.write_text(SITE.format(root=file_root))
    return str(path)


@pytest.mark.parametrize(
    ("experiment", "words", "who", "fix"),
    [
        ("ppo-math", [], "model_worker tasks (phase sft, main)", ALL_MODELS),
        (
            "ppo-math",
            [ALL_MODELS, "sft.scheduling.model_worker.gpu=0"],
            "model_worker tasks (phase sft)",
            ALL_MODELS,
        ),
        ("ppo-math", [ALL_MODELS], "", ""),
        ("ppo-math", ["scheduling.all.partition=cpu"], "", ""),
        (
            "ppo-math-async",
            [],
            "model_worker tasks (phase sft, main) and generation_server tasks (phase main)",
            f"{ALL_MODELS} scheduling.generation_server.gpu=1",
        ),
    ],
)
def test_gpus_that_nothing_asks_for_are_told(
    experiment: str, words: list[str], who: str, fix: str, site: str
) -> None:
    warnings = make_plan(experiment, words, cluster=site).warnings
    told = [w for w in warnings if "ask for no GPU" in w]
    if not who:
        assert told == []
        return
    golden.check(told)


def test_servers_without_gpus_beside_trainers_with_some_are_told_once(site: str) -> None:
    warnings = make_plan("ppo-math-async", [ALL_MODELS], cluster=site).warnings
    assert len([w for w in warnings if "compute on CPUs" in w]) == 1


def test_on_this_machine_nothing_is_told(file_root: Path) -> None:
    assert not [w for w in make_plan("ppo-math").warnings if "GPU" in w]
