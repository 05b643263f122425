"""Host memory of workers with GPUs: counted by the model's size, asked for, shown, and compared."""

from dataclasses import replace

import pytest
from wanted_resources import model_workers

from experiments.placement import Shared
from experiments.ppo_math import ppo_math, ppo_math_async
from launcher.plan.memory_check import memory_of_plan
from launcher.plan.plan_view import memory_rows
from launcher.plan.resolve import resolve
from realsys.api.cluster import ClusterSpec
from realsys.api.model import ProcessTopology
from realsys.models.shape import ModelShape
from realsys.planner.memory.copy_memory import HeldModel
from realsys.planner.memory.host_memory import (
    PROCESS_BYTES,
    VERSIONS,
    host_memory_of_experiment,
    host_mib,
    of_copy,
)

GiB = 1 << 30
QWEN_7B = ModelShape(
    family="qwen2",
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=152064,
    qkv_bias=True,
)
TRAINED = HeldModel(shape=QWEN_7B, dtype="bfloat16", trained=True)


def plan_of(**settings):
    experiment = replace(ppo_math(), **settings)
    cluster = ClusterSpec(file_root="/tmp/root")
    return resolve(
        "ppo-math", experiment, cluster=cluster, trial_name="a", user="ada", machine_gpus=lambda: 8
    )


def large(**wanted):
    """A toy of 3.4 billion numbers: nothing is read or made for a plan."""
    sft = ppo_math().sft
    init = replace(sft.init, hidden_size=4096, num_layers=16, num_heads=32, num_kv_heads=8)
    return {"sft": replace(sft, init=init), "scheduling": model_workers(gpu=1, **wanted)}


def task(plan, phase="main"):
    return plan.phase(phase).scheduling.model_worker.scheduling


def test_terms_of_a_7b_model_by_hand():
    terms = of_copy(TRAINED, ProcessTopology(data=8), 0)
    numbers = QWEN_7B.num_params
    assert terms["loading"] == 2 * 4 * 152064 * 3584, (
        "the embedding, as read and as held in float32"
    )
    assert terms["checkpoint"] == numbers / 8 * 12, "float32 shards and two moments"
    assert terms["parked"] == terms["offloaded"] == 0
    away = of_copy(replace(TRAINED, offload=True), ProcessTopology(data=8), 0)
    assert away["parked"] == numbers / 8 * 12, "gradients are none between two calls"
    shards = of_copy(replace(TRAINED, cpu_offload=True), ProcessTopology(data=8), 0)
    assert shards["offloaded"] == numbers / 8 * 16
    frozen = of_copy(replace(TRAINED, backend="inference", trained=False), ProcessTopology(), 0)
    assert frozen == {
        "loading": 2 * 2 * 152064 * 3584,
        "checkpoint": 0,
        "parked": 0,
        "offloaded": 0,
    }
    assert host_mib({"process": 3.0 * GiB, "loading": 4.0 * GiB}) == 8 * 1024  # 7.7 GiB


def test_versions_for_servers_are_counted_once_among_those_who_give_them():
    run = replace(ppo_math_async(), placement=Shared(n_model_workers=2))
    config = run.initial_setup().lazy_init()
    made = ModelShape(**{**vars(QWEN_7B), "num_layers": 2})
    needs = host_memory_of_experiment(config, made)
    assert config.rollout is not None
    givers = [terms for terms in needs.values() if "published" in terms]
    assert sum(terms["published"] for terms in givers) == VERSIONS * 4 * made.num_params
    assert all(terms["process"] == PROCESS_BYTES for terms in needs.values())
    on_disk = replace(config, rollout=replace(config.rollout, weights_through="disk"))
    through_files = host_memory_of_experiment(on_disk, made)
    assert not any("published" in terms for terms in through_files.values())


def test_a_worker_with_a_gpu_is_given_what_its_models_need():
    toy, real = task(plan_of(scheduling=model_workers(gpu=1))), task(plan_of(**large()))
    assert (toy.mem, toy.cpu) == (8192, 6)
    assert real.mem > 60_000, "weights, moments: 40 GB are copied for a checkpoint"
    assert real.mem % 1024 == 0
    asked = task(plan_of(**large(mem=5000, cpu=3)))
    assert (asked.mem, asked.cpu) == (5000, 3)
    assert (task(plan_of()).mem, task(plan_of()).cpu) == (8192, 2), "without GPUs as ever"


def test_too_little_of_it_is_a_warning_with_its_terms():
    plan = plan_of(**large(mem=9000))
    (told,) = (w for w in plan.warnings if "host's memory" in w and w.startswith("phase main"))
    for words in ("their tasks have 8.8 GiB", "checkpoint", "loading", "process 3.0 GiB"):
        assert words in told
    enough = int(told.split("raise scheduling.model_worker.mem to ")[1].split(",")[0])
    assert enough == task(plan_of(**large())).mem
    assert not any("host's memory" in w for w in plan_of(**large()).warnings)
    small = plan_of(scheduling=model_workers(mem=600)).warnings
    (on_cpus,) = (w for w in small if w.startswith("phase main: model workers"))
    assert "process 0.6 GiB" in on_cpus


@pytest.mark.parametrize(("gpus", "process"), [(0, "0.6"), (1, "3.0")])
def test_the_table_of_a_plan_shows_it(gpus, process):
    plan = plan_of(scheduling=model_workers(gpu=gpus))
    (row,) = [row for row in memory_rows(memory_of_plan(plan)["main"]) if row[1] == "host memory"]
    assert row[3].startswith(f"of 8.0 GiB: process {process} GiB, ")
