"""A plan says whose memory it has not estimated, and why: nothing unknown counts as fitting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_shapes import SEVEN_BILLION, model_folder

from launcher.cli.command_line import run
from launcher.submit.planning import make_plan

SITE = """
name: site
scheduler: slurm
file_root: {root}
partitions:
  gpu: {{nodes: 8, cpus: 64, threads_per_core: 1, memory_mib: 2000000, gpus: 8, gpu_type: h100}}
slurm: {{partition: gpu, time_limit: 1-00:00:00, accounting: false}}
"""
GAP = "memory not estimated, so whether it fits was not checked"


@pytest.fixture
def site(file_root: Path) -> str:
    path = file_root.parent / "site.yaml"
    path.write_text(SITE.format(root=file_root))
    return str(path)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Of a run of a model of a family that the planner does not know."""
    model = model_folder(tmp_path / "other", SEVEN_BILLION)
    config = json.loads((Path(model) / "config.json").read_text())
    (Path(model) / "config.json").write_text(json.dumps({**config, "model_type": "gpt_neox"}))
    lines = "".join(json.dumps({"prompt": "a a", "answer": str(i)}) + "\n" for i in range(256))
    (tmp_path / "q.jsonl").write_text(lines)
    data = f"task.path={tmp_path}/q.jsonl"
    short = ["algorithm.kl_ctl=0.01", "task.eval_size=0", "train_bs_n_seqs=64", "group_size=2"]
    return [f"actor.path={model}", data, "placement.n_model_workers=8", *short]


def test_on_gpus_a_warning_says_it(words: list[str], site: str) -> None:
    plan = make_plan("grpo-math", [*words, "scheduling.model_worker.gpu=1"], cluster=site)
    (told,) = (w for w in plan.warnings if GAP in w)
    assert told.startswith("phase main: ")
    assert "actor, ref: " in told
    assert "'gpt_neox'" in told


def test_on_cpus_the_plan_says_it(
    words: list[str], file_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "grpo-math", *words]) == 0
    assert GAP in capsys.readouterr().out


@pytest.mark.parametrize("experiment", ["ppo-math", "ppo-math-async"])
def test_of_known_models_and_of_rules_nothing_is_said(
    experiment: str, file_root: Path, site: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", experiment]) == 0
    shown = capsys.readouterr()
    assert GAP not in shown.out + shown.err
    plan = make_plan(experiment, ["scheduling.model_worker.gpu=1"], cluster=site)
    assert not [w for w in plan.warnings if GAP in w]
