"""Recipes of published runs: they want model and data, and plan on the example sites as they are."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import golden
import pytest
import yaml
from real_shapes import HALF_A_BILLION, SEVEN_BILLION, Config, model_folder
from wanted_resources import model_workers

from experiments.asynchronous import Async
from experiments.grpo_math import grpo_math
from experiments.known_results import QwenDAPO, QwenGSM8K
from experiments.task import MathTask
from launcher.hub.hub_names import parse_hub_name
from launcher.plan.memory_check import memory_of_plan
from launcher.submit.planning import make_plan
from realsys.api.errors import ConfigErrors
from realsys.api.model import GenerationHyperparameters
from realsys.api.options import ModelOptions

RECIPES: dict[str, Config] = {
    "qwen2.5-0.5b-gsm8k": HALF_A_BILLION,
    "qwen2.5-7b-dapo": {**SEVEN_BILLION, "max_position_embeddings": 32768},
}
ROOT = Path(__file__).parents[3]


@pytest.fixture
def given(tmp_path: Path, file_root: Path) -> Path:
    """Two questions and a folder for models."""
    lines = "".join(json.dumps({"prompt": "a a", "answer": str(i)}) + "\n" for i in range(2048))
    (tmp_path / "q.jsonl").write_text(lines)
    (tmp_path / "held_out.jsonl").write_text(lines + "\n")
    return tmp_path


def site(tmp_path: Path, archetype: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An example site whose folders are here."""
    spec = yaml.safe_load((ROOT / "cluster_specs" / f"{archetype}.yaml").read_text())
    spec["file_root"] = str(tmp_path / "shared")
    spec.pop("name_resolve", None)
    spec.pop("etcd", None)
    for key in ("cpu_image", "gpu_image"):
        if key in spec:
            ending = "sif" if spec["container"]["runtime"] == "apptainer" else "sqsh"
            spec[key] = str(tmp_path / f"{key}.{ending}")
            Path(spec[key]).touch()
    spec["name"] = "there"
    (tmp_path / "shared").mkdir(exist_ok=True)
    file = tmp_path / "there.yaml"
    file.write_text(yaml.safe_dump(spec))
    return str(file)


@pytest.mark.thorough
@pytest.mark.parametrize("archetype", ["example_pyxis", "example_apptainer", "example_etcd"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_plans_on_each_archetype(recipe, archetype, given, monkeypatch):
    model = model_folder(given / "model", RECIPES[recipe])
    data = given / "q.jsonl"
    words = [f"actor.path={model}", f"task.path={data}", f"task.eval_path={given}/held_out.jsonl"]
    plan = make_plan(recipe, words, cluster=site(given, archetype, monkeypatch))
    (phase,) = plan.phases
    (groups,) = memory_of_plan(plan).values()
    assert groups
    for group in groups:
        assert group.limit is not None
        assert group.memory.bytes < 0.9 * group.limit
        assert sum(group.host.values()) < group.host_limit
    assert not [w for w in plan.warnings if "toy" in w or "built-in" in w]
    assert phase.scheduling.model_worker.scheduling.gpu == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_model_and_data_it_says_which(recipe, file_root):
    with pytest.raises(ConfigErrors) as error:
        make_plan(recipe)
    told = {problem.where: problem.fix for problem in error.value.problems}
    assert {"actor.path", "task.path", "task.eval_path"} <= set(told)
    assert re.search(r"Qwen/Qwen2\.5-\S+ at revision [0-9a-f]{12}", told["actor.path"])


def test_data_that_can_be_read_as_they_are_on_the_hub_are_named_so(file_root):
    with pytest.raises(ConfigErrors) as error:
        make_plan("qwen2.5-0.5b-gsm8k")
    told = {problem.where: problem.fix for problem in error.value.problems}
    page = (ROOT / "docs" / "known_results.md").read_text()
    for setting, split in (("task.path", "train"), ("task.eval_path", "test")):
        given = told[setting].removeprefix("give ").partition(",")[0]
        name = parse_hub_name(given.removeprefix(f"{setting}="), where=setting)
        assert (name.repo, name.has_commit) == ("openai/gsm8k", True)
        assert name.files == f"main/{split}-00000-of-00001.parquet"
        assert given in page


def test_the_page_names_sources_and_revisions_and_what_was_not_reproduced():
    page = (ROOT / "docs" / "known_results.md").read_text()
    for recipe in (QwenGSM8K, QwenDAPO):
        for source in recipe.sources.values():
            assert source.revision in page
    for name in RECIPES:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert row.endswith("| not yet reproduced |")


def test_answers_beyond_the_models_positions_are_refused(given):
    model = model_folder(given / "model", {**SEVEN_BILLION, "max_position_embeddings": 4096})
    data = given / "q.jsonl"
    words = [f"actor.path={model}", f"task.path={data}", f"task.eval_path={given}/held_out.jsonl"]
    with golden.raises(ConfigErrors):
        make_plan("qwen2.5-7b-dapo", words)
    fits = [*words, "gen.max_new_tokens=3000", "algorithm.overlong_buffer_len=none"]
    told = replace(
        grpo_math(),
        actor=ModelOptions(path=str(model)),
        task=MathTask(max_prompt_len=2048),
        gen=GenerationHyperparameters(max_new_tokens=3000),
    ).remarks(fits)
    golden.check(told)


def test_who_computes_on_cpus_beside_gpus_is_told():
    gpus = model_workers(gpu=1)
    experiment = replace(grpo_math(), schedule=Async(), auto_eval=True, scheduling=gpus)
    told = " ".join(experiment.remarks(()))
    assert "Set scheduling.generation_server.gpu=1" in told
    assert "Set scheduling.evaluator.gpu=1" in told
    assert "compute on CPUs" not in " ".join(replace(grpo_math(), schedule=Async()).remarks(()))
