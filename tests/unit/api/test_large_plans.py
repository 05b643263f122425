"""Plans of many workers: short, read back exactly, and equal to what older revisions wrote."""

from __future__ import annotations

import json

import golden
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from experiments.ppo_math import ppo_math
from launcher.plan.resolve import resolve
from realsys.api.basics.like_before import LIKE_BEFORE, fold, unfold
from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ConfigError
from realsys.api.plan import FOLDED_VERSION, MANY_WORKERS, PLAN_VERSION, plan_text, read_plan
from realsys.config.overrides import with_settings

SCALARS = st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([0.0, 1.0, "", "a"])
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=5,
)


def plan_of(num_workers):
    words = [
        f"placement.n_model_workers={num_workers}",
        f"train_bs_n_seqs={4 * num_workers}",
        "task.eval_size=0",
    ]
    return resolve(
        "ppo-math",
        with_settings(ppo_math, words=words),
        cluster=ClusterSpec(file_root="/tmp/root"),
        trial_name="a",
        user="ada",
        machine_gpus=lambda: 8,
    )


@pytest.fixture(scope="module")
def large():
    return plan_of(MANY_WORKERS + 44)


@given(st.lists(TREES, max_size=6))
@example([{"a": None, "b": None}, {"b": None, "a": None}])
def test_what_was_folded_is_unfolded_to_the_same(items):
    # repr tells 1 from 1.0 and from True, which are equal
    assert repr(unfold(json.loads(json.dumps(fold(items))))) == repr(items)


def test_only_what_differs_is_said():
    items = [{"info": {"index": i, "type": "model"}, "shards": [{"rank": i}]} for i in range(3)]
    change = {LIKE_BEFORE: {"info": {"index": 1}, "shards": {"0": {"rank": 1}}}}
    assert fold(items)[:2] == [items[0], change]
    assert fold([{"a": 1}, {"b": 1}, {"b": 1}]) == [{"a": 1}, {"b": 1}, {LIKE_BEFORE: {}}]


@pytest.mark.parametrize(
    "folded",
    [
        [{LIKE_BEFORE: {}}],
        [{"a": 1}, {LIKE_BEFORE: {"b": 2}}],
        [[1], {LIKE_BEFORE: {"7": 2}}],
        [[1], {LIKE_BEFORE: {"x": 2}}],
        [{"a": {}}, {LIKE_BEFORE: {"a": 3}}],
        [{"a": 1}, {LIKE_BEFORE: 3}],
    ],
)
def test_changes_that_do_not_fit_are_refused(folded):
    with pytest.raises(ValueError):
        unfold(folded)


def test_a_large_plan_is_read_back_exactly_from_a_tenth(large, tmp_path):
    path, text = tmp_path / "plan.json", plan_text(large)
    path.write_text(text)
    assert read_plan(path) == large
    assert json.loads(text)["version"] == FOLDED_VERSION
    workers = json.loads(text)["phases"][-1]["config"]["model_worker"]
    assert len(json.dumps(workers[1:])) / len(workers[1:]) < len(json.dumps(workers[0])) / 5
    first, second, *_ = read_plan(path).phases[-1].config.model_worker
    assert first.shards[0].backend is second.shards[0].backend  # read once


def test_a_small_plan_says_each_worker_whole(large, tmp_path):
    data = json.loads(plan_text(plan_of(2)))
    assert data["version"] == PLAN_VERSION
    assert LIKE_BEFORE not in json.dumps(data)


def test_a_large_plan_whose_changes_do_not_fit_is_refused_with_its_path(large, tmp_path):
    data = json.loads(plan_text(large))
    data["phases"][-1]["config"]["model_worker"][1] = {LIKE_BEFORE: {"nothing": 1}}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with golden.raises(ConfigError) as refused:
        read_plan(path)
    assert refused.value.where == str(path)


def test_plans_that_told_workers_more_are_still_read(tmp_path):
    plan = plan_of(2)
    data = json.loads(plan_text(plan))
    config = data["phases"][-1]["config"]
    for worker in (*config["model_worker"], *config["master_worker"]):
        worker |= {"model_topos": [], "data_transfer_pairs": [], "sync_param_pairs": []}
    config["resolved"]["msid2mwid"] = []
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert read_plan(path) == plan
    config["model_worker"][0]["another"] = []
    path.write_text(json.dumps(data))
    with golden.raises(ConfigError):
        read_plan(path)
