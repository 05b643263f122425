"""The launch plan: the same text for the same value, read back exactly, refused when it changed."""

import json
from dataclasses import replace
from pathlib import Path

import golden
import pytest

from experiments.ppo_math import ppo_math
from realsys.api.cluster import ClusterSpec
from realsys.api.dataflow import OffloadHook, ParamReallocHook
from realsys.api.errors import ConfigError
from realsys.api.model import ModelName
from realsys.api.plan import (
    FOLDED_VERSION,
    LaunchPlan,
    PhasePlan,
    plan_hash,
    plan_text,
    read_plan,
)


def make_plan(**changes) -> LaunchPlan:
    experiment = ppo_math()
    config = experiment.initial_setup().lazy_init().set_worker_information("ppo-math", "run1")
    phase = PhasePlan(
        name="main",
        experiment_name="ppo-math",
        folder="/runs/run1",
        publish=None,
        scheduling=experiment.scheduling_setup(),
        config=config,
    )
    fields = {
        "experiment_name": "ppo-math",
        "trial_name": "run1",
        "user": "anna",
        "trial_dir": "/runs/run1",
        "cluster": ClusterSpec(file_root="/lustre"),
        "phases": (phase,),
        "options": {"actor": {"path": None}, "note": "Größe"},
        "warnings": ("slow",),
    }
    return LaunchPlan(**{**fields, **changes})


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, str]:
    text = plan_text(make_plan())
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    return path, plan_hash(text)


def test_a_plan_is_read_back_exactly(written):
    path, expected = written
    assert read_plan(path, expected_hash=expected) == make_plan()


def test_hooks_of_a_plan_are_read_back_exactly(tmp_path):
    plan = make_plan()
    (phase,) = plan.phases
    first, *others = phase.config.model_rpcs
    hooks = (ParamReallocHook(source=ModelName("actor"), eta=0.5), OffloadHook())
    config = replace(phase.config, model_rpcs=(replace(first, pre_hooks=hooks), *others))
    plan = replace(plan, phases=(replace(phase, config=config),))
    (tmp_path / "plan.json").write_text(plan_text(plan), encoding="utf-8")
    assert read_plan(tmp_path / "plan.json") == plan


def test_equal_plans_have_one_text_whatever_the_order_of_their_tables():
    one = make_plan(options={"a": 1, "b": 2})
    other = make_plan(options={"b": 2, "a": 1})
    assert plan_text(one) == plan_text(other)
    assert plan_text(one) != plan_text(make_plan(options={"a": 1, "b": 3}))


def test_the_hash_is_sha256_of_the_text():
    # sha256sum of "abc", FIPS 180-2 appendix B.1
    assert plan_hash("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_plan_edited_after_launch_is_refused_with_both_hashes(written):
    path, expected = written
    path.write_text(path.read_text().replace('"anna"', '"otto"'), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_plan(path, expected_hash=expected)
    assert expected[:12] in refused.value.what
    assert plan_hash(path.read_text())[:12] in refused.value.what
    assert refused.value.where == str(path)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", b"\xff\xfe"])
def test_what_is_no_plan_is_refused_with_its_path(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with golden.raises(ConfigError) as refused:
        read_plan(path)
    assert refused.value.where == str(path)


def test_a_missing_plan_is_refused_with_its_path(tmp_path):
    with pytest.raises(ConfigError) as refused:
        read_plan(tmp_path / "plan.json")
    assert refused.value.where == str(tmp_path / "plan.json")


def test_another_plan_version_is_refused_with_both_numbers(written):
    path, _ = written
    data = {**json.loads(path.read_text()), "version": FOLDED_VERSION + 1}
    path.write_text(json.dumps(data))
    with golden.raises(ConfigError):
        read_plan(path)


def test_a_misfit_in_a_plan_is_told_with_its_path(written):
    path, _ = written
    data = json.loads(path.read_text())
    data["phases"][0]["config"]["model_rpcs"][0]["n_seqs"] = "many"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as refused:
        read_plan(path)
    assert refused.value.where == "plan.json.phases[0].config.model_rpcs[0].n_seqs"


def test_phases_are_found_by_name():
    plan = make_plan()
    assert plan.phase("main") is plan.phases[0]
    with golden.raises(ConfigError) as refused:
        plan.phase("sft")
    assert "main" in refused.value.fix


def test_the_store_is_the_clusters_or_lies_under_its_file_root():
    assert make_plan().name_resolve_url == "file:///lustre/name_resolve"
    spaced = make_plan(cluster=ClusterSpec(file_root="/a b#c"))
    assert spaced.name_resolve_url == "file:///a%20b%23c/name_resolve"
    named = make_plan(cluster=ClusterSpec(name_resolve="memory://x"))
    assert named.name_resolve_url == "memory://x"
    assert named.trial == "ppo-math/run1"
