"""The lines, tables and small decisions of a plan over parts made by hand: what each field changes."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace as Parts

import golden
import pytest

from experiments.ppo_math import ppo_math
from launcher.plan import memory_advice, memory_check, plan_search, time_predictions
from launcher.plan import resolve as resolving
from launcher.plan.memory_check import (
    ServerGroup,
    WorkerGroup,
    gpu_bytes,
    server_problems,
    servers_of_plan,
    usable_bytes,
)
from launcher.plan.plan_view import memory_rows, rollout_lines, server_rows
from launcher.plan.product_names import _imports_of, content_hash
from launcher.submit.planning import make_plan
from realsys.api.cluster import ClusterSpec, PartitionSpec
from realsys.api.errors import ConfigError, flat
from realsys.api.scheduling import GroupOptions, Scheduling, SchedulingOptions, WorkerType
from realsys.planner.gpu_models import DEVICES
from realsys.planner.memory.memory_of_workers import WorkerMemory
from realsys.planner.memory.server_memory import ServerMemory, memory_of_evaluator
from realsys.planner.placed import allocation_of, model_made_before, place_experiment
from realsys.planner.predict import Prediction, predict
from realsys.planner.read_profile import formulas_of
from realsys.planner.time.figures import figures
from realsys.planner.time.simulate_steps import simulate
from realsys.planner.time.simulated_timeline import CallWork

GiB, MiB = float(1 << 30), float(1 << 20)
ROOM = usable_bytes(10 * GiB, workers=1, copies=0)

# ---- memory ------------------------------------------------------------------------------------


def test_what_a_process_and_its_communicators_take_of_a_gpu() -> None:
    assert 9.6 * GiB - 512 * MiB == ROOM
    assert usable_bytes(10 * GiB, workers=2, copies=3) == ROOM - 4 * 300 * MiB
    assert usable_bytes(10 * GiB, workers=1, copies=3) == ROOM


@pytest.mark.parametrize(
    ("task", "found"),
    [
        ({}, 80 * GiB),
        ({"gpu": 0}, None),
        ({"gpu": 0.5}, 40 * GiB),
        ({"gpu": 4}, 80 * GiB),
        ({"partition": "known"}, 12 * GiB),
        ({"partition": "odd"}, None),
        ({"partition": "odd", "gpu_type": "a100"}, 80 * GiB),
        ({"partition": "gone"}, None),
    ],
)
def test_the_memory_of_a_tasks_gpu(task: dict, found: float | None) -> None:
    partitions = {
        "h": PartitionSpec(gpus=8, gpu_type="h100"),
        "known": PartitionSpec(gpus=8, gpu_type="h100", gpu_memory_gib=12),
        "odd": PartitionSpec(gpus=8, gpu_type="mi300"),
    }
    cluster = ClusterSpec(file_root="/x", partitions=partitions)
    cluster = replace(cluster, slurm=replace(cluster.slurm, partition="h"))
    scheduling = Scheduling(**{"cpu": 1, "mem": 1024, "gpu": 1, **task})
    assert gpu_bytes(cluster, scheduling) == found
    assert gpu_bytes(ClusterSpec(file_root="/x"), Scheduling(cpu=1, gpu=1, mem=1)) is None


def group(
    used: float,
    *,
    token: float = 0,
    kind: WorkerType = WorkerType.GENERATION_SERVER,
    **more: object,
) -> ServerGroup:
    terms = {"cache": 1 * GiB, "weights": used - 1 * GiB}
    memory = ServerMemory(
        what="engine of x",
        terms=terms,
        cache_token=token,
        longest=1024,
        host={"a": GiB, "b": 2 * GiB},
    )
    usual = {"limit": 10 * GiB, "host_limit": 4 * GiB, "count": 2}
    return ServerGroup(kind=kind, memory=memory, **{**usual, **more})  # type: ignore[arg-type]


def test_servers_that_fit_and_that_do_not() -> None:
    groups = [
        group(ROOM, token=MiB / 4),
        group(5 * GiB),
        group(ROOM + MiB, token=MiB),
        group(ROOM + MiB),
        group(ROOM + MiB, kind=WorkerType.EVALUATOR, count=1),
        group(99 * GiB, limit=None),
    ]
    golden.check(["  ".join(row) for row in server_rows(groups)])
    problems = list(server_problems({"sft": groups[:2], "main": groups}))
    assert len(problems) == 3
    golden.check(problems)


def test_workers_that_fit_and_that_do_not() -> None:
    memory = WorkerMemory(
        copies={"actor@0": {"weights": ROOM - 2 * GiB}, "ref@0": {"a": GiB / 2, "b": GiB / 2}},
        calls={"gen": {"cache": GiB / 2}, "train": {"activations": GiB}},
    )
    larger = replace(memory, calls={})
    larger = replace(larger, copies={"actor@0": {"weights": ROOM + MiB}})
    groups = [
        WorkerGroup(workers=(0,), memory=memory, limit=10 * GiB),
        WorkerGroup(workers=(1,), memory=memory, limit=None, host={"x": GiB}, host_limit=2 * GiB),
        WorkerGroup(workers=(2,), memory=larger, limit=10 * GiB),
    ]
    golden.check(["  ".join(row) for row in memory_rows(groups[:1])])
    golden.check(["  ".join(row) for row in memory_rows(groups)])


def test_an_evaluator_with_a_gpu_is_counted_as_one(file_root: Path, monkeypatch) -> None:
    plan = make_plan("ppo-math", ["auto_eval=true", "exp_ctrl.save_freq_steps=1"])
    *made, phase = plan.phases
    task = phase.scheduling.evaluator
    assert servers_of_plan(plan)["main"] == []
    task = replace(task, count=3, scheduling=replace(task.scheduling, gpu=1, partition="g"))
    phase = replace(phase, scheduling=replace(phase.scheduling, evaluator=task))
    (found,) = servers_of_plan(replace(plan, phases=(*made, phase)))["main"]
    assert (found.kind, found.count, found.usable) == (WorkerType.EVALUATOR, 3, None)
    assert found.memory == memory_of_evaluator(phase.config, model_made_before(plan))
    assert found.host_limit == task.scheduling.mem * MiB
    # A server is given the room that it may use.
    plan = make_plan("ppo-math-async", ())
    *made, phase = plan.phases
    given = list[tuple[float | None, object]]()
    monkeypatch.setattr(
        memory_check, "memory_of_server", lambda config, *of: given.append(of) or found.memory
    )
    task = phase.scheduling.generation_server
    for partition in ("g", "gone"):
        scheduling = replace(task.scheduling, gpu=1, partition=partition)
        group = replace(task, scheduling=scheduling)
        here = replace(phase, scheduling=replace(phase.scheduling, generation_server=group))
        site = {"g": PartitionSpec(gpus=1, gpu_memory_gib=10)}
        cluster = replace(plan.cluster, partitions=site)
        (server,) = servers_of_plan(replace(plan, phases=(*made, here), cluster=cluster))["main"]
        assert (server.kind, server.memory) == (WorkerType.GENERATION_SERVER, found.memory)
    assert given == [(ROOM, model_made_before(plan)), (None, model_made_before(plan))]


@pytest.mark.parametrize(
    ("workers", "parallel", "changes"),
    [
        (
            8,
            None,
            ["actor.parallel=d4t2p1", "placement.allocation=gen:d8t1p1", "actor.offload=True"],
        ),
        (8, "d8t1p1", ["placement.allocation=gen:d8t1p1", "actor.offload=True"]),
        (3, None, ["placement.allocation=gen:d3t1p1", "actor.offload=True"]),
        (1, None, None),
    ],
)
def test_a_copy_of_its_own_for_generation(workers: int, parallel: str | None, changes) -> None:
    plan = ppo_math()
    (call,) = (c for c in plan.initial_setup().model_rpcs if c.name == "actor_gen")
    shards = [Parts(id=Parts(model_name=call.model_name))]
    config = Parts(
        model_rpcs=[replace(call, name="gen")], model_worker=[Parts(shards=shards)] * workers
    )
    experiment = Parts(
        placement=Parts(allocation=None), actor=replace(plan.actor, parallel=parallel)
    )
    found = [
        [f"{change.path}={change.value}" for change in candidate]
        for candidate in memory_advice._own_copy(experiment, config)
    ]
    assert found == ([changes] if changes else [])
    experiment.placement.allocation = "actor_gen:d8t1p1"
    assert list(memory_advice._own_copy(experiment, config)) == []
    assert list(memory_advice._own_copy(Parts(), config)) == []


@pytest.mark.parametrize(
    ("tokens", "cache", "told"),
    [
        (None, None, ["tokens", "tokens"]),
        (1 << 30, 1 << 30, ["tokens", "tokens", "cache", "cache"]),
        ("answer", "answer", []),
        (1, 1, []),
    ],
)
def test_micro_batches_and_caches_are_proposed_as_long_as_an_answer(tokens, cache, told) -> None:
    experiment = ppo_math()
    config = experiment.initial_setup()
    answer = -(-memory_advice.step_sizes(config).length // memory_advice._ROUND)
    answer *= memory_advice._ROUND
    sizes = {
        "max_tokens_per_mb": answer if tokens == "answer" else tokens,
        "max_cache_tokens": answer if cache == "answer" else cache,
    }
    changed = {role: replace(getattr(experiment, role), **sizes) for role in ("actor", "critic")}
    found = [
        change
        for candidate in memory_advice.candidates(replace(experiment, **changed), config)
        for change in candidate
        if "max_" in change.path and change.path.partition(".")[0] in changed
    ]
    assert [change.path.partition("_")[2].partition("_")[0] for change in found] == told
    assert {change.value for change in found} <= {answer}


# ---- lines of a phase ----------------------------------------------------------------------------


def test_the_lines_of_rollout() -> None:
    maker = Parts(name="a", servers=(0, 1), rollout_workers=(2,), holders=(3, 4), sources=(5,))
    control = Parts(
        trains=True,
        max_staleness=2,
        policy="soft",
        weights_through="disk",
        update_steps=2,
        buffer_limit=9,
        makers=[maker],
    )
    config = Parts(
        replay=None,
        rollout=control,
        generation_server=[Parts(backend_type=name) for name in ("vllm", "sglang", "vllm")],
        rollout_worker=[Parts(agent="one", env="math")] * 2,
    )
    golden.check(list(rollout_lines(config)))
    plain = Parts(**{**vars(control), "update_steps": 1, "buffer_limit": None, "makers": []})
    golden.check(list(rollout_lines(Parts(**{**vars(config), "rollout": plain, "replay": "all"}))))
    control.trains = False
    told = list(rollout_lines(config))
    assert (len(told), "nothing trains" in told[1]) == (2, True)
    control.trains, config.rollout = True, None
    assert list(rollout_lines(config)) == []


# ---- times ---------------------------------------------------------------------------------------


def prediction(**more: object) -> Prediction:
    """A step of 12.5 s: 3 s on worker 0, 9 s on both, then nothing and 0.5 s on worker 0."""
    parents = {
        "a": frozenset[str](),
        "b": frozenset({"a"}),
        "c": frozenset({"b"}),
        "d": frozenset({"c"}),
    }
    works = (
        CallWork(call="a", workers=(0,), seconds=3.0),
        CallWork(call="b", workers=(0, 1), seconds=9.0),
        CallWork(call="c", workers=(0,), seconds=0.0),
        CallWork(call="d", workers=(0,), seconds=0.5),
    )
    timeline = simulate(works, parents, num_workers=2)
    return Prediction(
        basis="hand",
        works=works,
        timeline=timeline,
        figures=figures(timeline),
        **more,  # type: ignore[arg-type]
    )


SERVED = Parts(servers=2, gpus=1, overlaps=True)
PREDICTIONS = {
    "no servers": prediction(),
    "slower servers": prediction(served=SERVED, served_s=24.0),
    "as fast": prediction(served=SERVED, served_s=12.5),
    "in turn": prediction(served=Parts(servers=2, gpus=1, overlaps=False), served_s=12.5),
    "measured": prediction(served=SERVED, is_measured=True),
    "on CPUs": prediction(served=Parts(servers=2, gpus=0, overlaps=True)),
    "not known": prediction(served=SERVED),
}


@pytest.mark.parametrize("what", PREDICTIONS)
def test_a_predicted_step(what: str) -> None:
    golden.check(list(time_predictions.prediction_lines(PREDICTIONS[what])))


def test_seconds_as_they_are_shown() -> None:
    shown = [time_predictions.seconds(value) for value in (0.04567, 9.994, 9.996, 10.0, 123.45)]
    assert shown == ["0.0457 s", "9.99 s", "10 s", "10.0 s", "123.5 s"]


@pytest.mark.parametrize(
    ("wanted", "default", "named", "found"),
    [
        ("a", None, None, "a100"),
        (None, "h", None, "h100"),
        ("a", "h", "b200", "b200"),
        (None, None, None, None),
        ("gone", "h", None, None),
        ("odd", "h", None, None),
        ("cpus", "h", None, None),
    ],
)
def test_the_device_of_a_site(wanted, default, named, found) -> None:
    partitions = {
        "a": PartitionSpec(gpus=4, gpu_type="a100"),
        "h": PartitionSpec(gpus=6, gpu_type="h100"),
        "odd": PartitionSpec(gpus=2, gpu_type="mi300"),
        "cpus": PartitionSpec(),
    }
    worker = Parts(scheduling=Parts(partition=wanted))
    plan = Parts(
        cluster=Parts(partitions=partitions, slurm=Parts(partition=default)),
        phases=[Parts(), Parts(scheduling=Parts(model_worker=worker))],
    )
    device = time_predictions._site_device(plan, named)
    assert (device and device.name) == found
    assert time_predictions.gpus_per_node(plan) == 6
    for none in ({}, {"cpus": PartitionSpec()}):
        plan.cluster.partitions = none
        assert time_predictions.gpus_per_node(plan) == time_predictions.GPUS_PER_NODE


def test_a_plan_whose_sizes_are_not_known_has_no_formulas(file_root: Path, monkeypatch) -> None:
    plan = make_plan("ppo-math", ())
    found = place_experiment(plan)
    monkeypatch.setattr(time_predictions, "_measured_trials", lambda plan: ["t"])
    similar = list[str]()
    monkeypatch.setattr(
        time_predictions, "_similar_profiles", lambda plan, *of: similar.append(of[1].name) or ()
    )
    costs = [
        time_predictions.costs_for(plan, replace(found, unknown=unknown), device=device)
        for unknown, device in (({}, "h100"), ({"actor": "why"}, "h100"), ({}, None))
    ]
    assert [c and (c.basis, c.device) for c in costs] == [
        ("formulas for h100", DEVICES["h100"]),
        None,
        None,
    ]
    assert similar == ["cpu"]  # not where a device is named


# ---- the search ----------------------------------------------------------------------------------


def test_a_proposal(file_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    plan = make_plan("ppo-math", ["placement.n_model_workers=2"])
    now = allocation_of(plan.phases[-1].config)

    def propose(limit: float | None, gpus: int | None = None, device: str | None = None):
        monkeypatch.setattr(plan_search, "memory_limit", lambda plan, of: limit)
        return plan_search.propose(
            plan, gpus=gpus, profiles=(), device=device, cluster=None, within_s=0.0
        )

    needs = plan_search.memory_of_plans(plan.phases[-1].config, plan_search.model_made_before(plan))
    fullest = max(needs(now).values())
    found = place_experiment(plan)
    fits = {limit: propose(limit) for limit in (None, fullest, inf)}
    assert [p.now_fits for p in fits.values()] == [True] * 3
    small = propose(fullest - 1)
    assert (small.now_fits, small.limit_bytes) == (False, fullest - 1)
    assert small.most_bytes == max(needs(small.found.allocation).values()) < fullest
    assert (small.num_workers, propose(None, gpus=1).now) == (2, None)
    assert "CPU" in small.prediction.basis
    formulas = formulas_of(found, DEVICES["h100"])
    on_h100 = propose(None, device="h100")
    assert on_h100.now is not None
    assert on_h100.now.figures == predict(found, formulas, basis="x").figures
    capsys.readouterr()
    told = []
    for proposal in (small, fits[fullest], propose(None, gpus=1)):
        plan_search.print_proposal(plan, proposal)
        told.append(
            [
                line.partition("plan ")[0].strip() + ("does not fit" in line) * "!"
                for line in capsys.readouterr().out.splitlines()
                if line.startswith(("  present plan", "  memory"))
            ]
        )
    assert [len(lines) for lines in told] == [2, 2, 1]
    assert ["!" in "".join(lines) for lines in told] == [True, False, False]


@pytest.mark.parametrize(
    ("whole", "limit"), [("h100", usable_bytes(80 * GiB, workers=2, copies=4)), ("cpu", None)]
)
def test_the_memory_that_a_search_may_use(file_root: Path, whole: str, limit: float | None) -> None:
    plan = make_plan("ppo-math", ["placement.n_model_workers=2"])
    assert plan_search.memory_limit(plan, DEVICES[whole]) == limit
    assert plan_search.memory_limit(plan, None) is None


# ---- names and problems --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "module", "names"),
    [
        ("import a.b, c", "p.q.m", ["a.b", "c"]),
        ("from a import b, c", "p.q.m", ["a", "a.b", "a.c"]),
        ("from . import b", "p.q.m", ["p.q", "p.q.b"]),
        ("from .a import b", "p.q.m", ["p.q.a", "p.q.a.b"]),
        ("from .. import b", "p.q.m", ["p", "p.b"]),
        ("from ..a import b", "p.q.r.m", ["p.q.a", "p.q.a.b"]),
        ("from ...a import b", "p.q.r.m", ["p.a", "p.a.b"]),
        ("def f():\n    import a", "m", ["a"]),
        ("no python", "m", []),
    ],
)
def test_what_import_statements_mean(tmp_path: Path, text: str, module: str, names) -> None:
    path = tmp_path / "m.py"
    path.write_text(text)
    assert list(_imports_of(path, module)) == names
    package = tmp_path / "__init__.py"
    package.write_text("from .a import b")
    assert list(_imports_of(package, "p.q")) == ["p.q.a", "p.q.a.b"]


def test_files_count_by_their_names_and_contents(tmp_path: Path) -> None:
    config = ppo_math().initial_setup()
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("x")
    hashes = [content_hash(config), content_hash(config, [str(first)])]
    hashes += [content_hash(config, [str(second)])]  # missing
    first.write_text("y")
    hashes += [content_hash(config, [str(first)]), content_hash(config, [str(first), str(second)])]
    assert len(set(hashes)) == 5
    assert {len(one) for one in hashes} == {16}


def test_arguments_that_a_plug_in_does_not_take_are_told_unless_their_setting_is(
    tmp_path: Path, monkeypatch
) -> None:
    problems = [
        ConfigError(what, where="plug-in", fix="leave it out")
        for what in ("gpu is -1", "no argument x")
    ]
    monkeypatch.setattr(resolving, "plugin_argument_problems", lambda config: problems)
    wanted = SchedulingOptions(model_worker=GroupOptions(gpu=-1))
    with pytest.raises(ConfigError) as refused:
        resolving.resolve(
            "ppo-math",
            replace(ppo_math(), scheduling=wanted),
            cluster=ClusterSpec(file_root=str(tmp_path)),
            trial_name="a",
            user="ada",
        )
    told = [problem.what for problem in flat(refused.value)]
    assert set(told) == {"scheduling.model_worker.gpu is -1", "no argument x"}
