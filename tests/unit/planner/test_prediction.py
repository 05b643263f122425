"""From files and formulas to a predicted step, and from a found plan to settings that can be pasted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import golden
import pytest

from launcher.cli.command_line import run
from launcher.plan import plan_search, time_predictions
from launcher.submit.planning import make_plan
from realsys.api.errors import ConfigError
from realsys.api.model import ProcessTopology
from realsys.api.plan import LaunchPlan, plan_text
from realsys.models.shape import ModelShape
from realsys.observability.events import Event, MfcEvent, MoveEvent, PeriodicEvent, StepEvent
from realsys.observability.predicted import error_text, predicted_rows
from realsys.observability.report.report import write_report
from realsys.planner.allocation import CallAllocation
from realsys.planner.gpu_models import DEVICES, device_of
from realsys.planner.memory.memory_of_workers import memory_of_experiment, memory_of_plans
from realsys.planner.placed import (
    RoleModel,
    ServedGeneration,
    allocation_of,
    place_experiment,
    refusal,
)
from realsys.planner.predict import predict
from realsys.planner.read_profile import formulas_of, profile_of
from realsys.planner.time.analytic import (
    bytes_to_receive,
    forward_flops,
)
from realsys.planner.time.gantt import gantt
from realsys.planner.time.profiled import ProfiledCosts
from realsys.planner.time.simulate_steps import simulate
from realsys.planner.time.simulated_timeline import CallWork
from realsys.trial.records import PredictionRecord, TrialFiles, read_record, write_record

SHAPE = ModelShape(
    family="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)
CALLS = ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train")
# Seconds of the made-up run: two workers, split; see `events`.
TOOK = dict(zip(CALLS, (4.0, 0.5, 2.0, 1.0, 3.0, 2.5), strict=True))
RIGHT = ("rew_inf", "critic_inf", "critic_train")


@pytest.fixture
def file_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REALSYS_FILE_ROOT", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def split_plan(*words: str) -> LaunchPlan:
    return make_plan("ppo-math-split", words, trial="made-up")


def events(steps: int = 3) -> list[Event]:
    """Steps of 10.3 s: 0.1 s to load, each call 0.1 s longer than its computation; the first of double.

    left: gen 0.1-4.2, ref 4.2-6.3, actor_train 6.3-9.4; right: rew 4.2-4.8, critic 4.8-5.9,
    critic_train 6.3-8.9. Then 0.5 s until the next step, after a checkpoint of 2 s.
    """
    found: list[Event] = []
    begin = 100.0
    for step in range(1, steps + 1):
        slow = 2.0 if step == 1 else 1.0
        starts = dict(zip(CALLS, (0.1, 4.2, 4.2, 4.8, 6.3, 6.3), strict=True))
        for call, at in starts.items():
            queued = {"critic_inf": 4.2}.get(call, at)
            found.append(
                MfcEvent(
                    step=step,
                    name=call,
                    worker=f"model_worker/{int(call in RIGHT)}",
                    queued=begin + queued * slow,
                    start=begin + at * slow,
                    end=begin + (at + TOOK[call] + 0.1) * slow,
                    compute_s=TOOK[call] * slow,
                    tokens=1000,
                )
            )
        end = begin + 9.4 * slow
        found.append(StepEvent(step=step, start=begin, end=end))
        found.append(PeriodicEvent(kind="checkpoint", step=step, start=end, end=end + 2.0))
        begin = end + 2.5
    return found


def keep(plan: LaunchPlan, rows: list[Event]) -> TrialFiles:
    """A trial's folder with that plan and these events."""
    files = TrialFiles(Path(plan.trial_dir))
    files.root.mkdir(parents=True)
    files.plan.write_text(plan_text(plan))
    kinds = {MfcEvent: "mfc", StepEvent: "step", PeriodicEvent: "periodic", MoveEvent: "move"}
    lines = [json.dumps({"event": kinds[type(e)], **vars(e)}) for e in rows]
    files.phase(files.root).events.write_text("\n".join(lines) + "\n")
    return files


# ---- profiles ---------------------------------------------------------------------------------------


def test_a_profile_is_what_the_typical_steps_took(file_root: Path) -> None:
    profile = profile_of(events(), split_plan(), DEVICES["cpu"])
    assert profile.steps == 2  # without the first
    assert {n: c.compute_s for n, c in profile.calls.items()} == pytest.approx(TOOK)
    assert profile.wall_s == pytest.approx(9.4)
    assert profile.overheads.load_s == pytest.approx(0.1)
    assert profile.overheads.step_s == pytest.approx(0.5)
    # Six calls: 0.1 s each; critic_train also waits for ref: no overhead of its own.
    assert profile.overheads.call_s == pytest.approx(0.1)


def test_the_run_that_was_profiled_is_predicted_as_it_was(file_root: Path) -> None:
    plan = split_plan()
    found = place_experiment(plan)
    costs = ProfiledCosts([profile_of(events(), plan, DEVICES["cpu"])])
    predicted = predict(found, costs, basis="itself")
    assert predicted.figures.wall_s == pytest.approx(9.4)
    assert predicted.timeline.step_s == pytest.approx(9.9)


def test_a_shared_run_is_predicted_from_a_split_one(file_root: Path) -> None:
    costs = ProfiledCosts([profile_of(events(), split_plan(), DEVICES["cpu"])])
    shared = make_plan("ppo-math", (), trial="shared")
    predicted = predict(place_experiment(shared), costs, basis="a split run")
    # Hidden behind one another are the overheads of calls whose worker is busy anyway: those of ref_inf,
    # critic_inf and critic_train.
    assert predicted.figures.wall_s == pytest.approx(0.1 + sum(TOOK.values()) + 0.3)


def test_moves_are_taken_by_role_and_layouts(file_root: Path) -> None:
    plan = make_plan(
        "ppo-math",
        [
            "placement.allocation=actor_gen:d2t1p1,*:d1t2p1",
            "placement.n_model_workers=2",
            "ref.backend=inference",
        ],
        trial="made-up",
    )
    move = MoveEvent(
        step=2,
        name="weights actor@0 → actor@1",
        worker="model_worker/0",
        start=1.0,
        end=1.75,
        num_bytes=9,
    )
    profile = profile_of([*events(), move], plan, DEVICES["cpu"])
    assert profile.moves == {("actor", "d1t2p1", "d2t1p1"): 0.75}
    home = CallAllocation(workers=(0, 1), topology=ProcessTopology(tensor=2))
    away = CallAllocation(workers=(0, 1), topology=ProcessTopology(data=2))
    assert ProfiledCosts([profile]).realloc_s("actor", home, away) == 0.75
    assert ProfiledCosts([profile]).realloc_s("actor", away, home) == 0.0


def test_a_run_without_two_steps_is_no_profile(file_root: Path) -> None:
    with golden.raises(ConfigError):
        profile_of(events(1), split_plan(), DEVICES["cpu"])


def test_another_layout_is_scaled_by_the_formulas(file_root: Path) -> None:
    plan = split_plan()
    found = place_experiment(plan)
    formulas = formulas_of(found, DEVICES["cpu"])
    costs = ProfiledCosts([profile_of(events(), plan, DEVICES["cpu"])], formulas)
    train = found.graph["actor_train"]
    one = CallAllocation(workers=(0,), topology=ProcessTopology())
    two = CallAllocation(workers=(0, 1), topology=ProcessTopology(data=2))
    assert costs.call_s(train, one) == pytest.approx(3.0)
    ratio = formulas.call_s(train, two) / formulas.call_s(train, one)
    assert costs.call_s(train, two) == pytest.approx(3.0 * ratio)
    assert 0.5 < ratio < 1.0


# ---- formulas -----------------------------------------------------------------------------------------


def test_forward_operations_are_twice_the_weights_and_the_scores() -> None:
    # One layer: 4096 · (4096 + 2 · 1024) + 4096 · 4096 + 3 · 4096 · 14336 weights; head 4096 · 128256.
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    weights = 32 * layer + 4096 * 128256
    scores = 4 * 1000 * 4096 * 32  # a token of a sequence of 2000 sees 1000 others on average
    assert forward_flops(SHAPE, tokens=1, length=2000) == 2 * weights + scores


def test_weights_that_stay_where_they_are_are_not_moved() -> None:
    four = tuple(range(4))
    t4 = CallAllocation(workers=four, topology=ProcessTopology(tensor=4))
    t2 = CallAllocation(workers=four, topology=ProcessTopology(data=2, tensor=2))
    away = CallAllocation(workers=(4, 5), topology=ProcessTopology(tensor=2))
    assert set(bytes_to_receive(8.0, t4, t4, sharded=False).values()) == {0.0}
    # Halves from quarters: worker 0 (first half) has the first quarter, worker 1 (second) has none of
    # its half, 2 (first) none, 3 (second) the last quarter.
    assert bytes_to_receive(8.0, t4, t2, sharded=False) == {0: 2, 1: 4, 2: 4, 3: 2}
    assert bytes_to_receive(8.0, t4, away, sharded=False) == {4: 4, 5: 4}
    # Shards of data-parallel ranks: each has a quarter of all, and needs the rest.
    d4 = CallAllocation(workers=four, topology=ProcessTopology(data=4))
    assert bytes_to_receive(8.0, d4, d4, sharded=True) == dict.fromkeys(four, 6)


def test_devices_are_found_by_the_name_that_slurm_has() -> None:
    assert device_of("nvidia_h100_80gb_hbm3") is DEVICES["h100"]
    with golden.raises(ConfigError):
        device_of("mi300")


# ---- limits -------------------------------------------------------------------------------------------


def test_refusals_name_the_rule(file_root: Path) -> None:
    found = place_experiment(make_plan("ppo-math", ["actor.backend=megatron"], trial="t"))

    def why(call: str, degrees: str) -> str:
        topo = ProcessTopology.parse(degrees)
        place = CallAllocation(workers=tuple(range(topo.world_size)), topology=topo)
        return refusal(found, found.graph[call], place) or ""

    assert why("actor_train", "d2t2p1") == ""
    assert "heads" in why("actor_train", "d1t8p1")
    assert "layers" in why("actor_train", "d1t1p2")
    assert why("actor_train", "d1t2p3") == ""
    assert "pipeline" in why("critic_train", "d1t1p3")  # backend fsdp
    assert "minibatches" in why("actor_train", "d3t1p1")
    assert "one worker" in why("rew_inf", "d2t1p1")


def test_memory_of_a_plan_is_that_of_its_experiment(file_root: Path) -> None:
    plan = split_plan(
        "placement.n_model_workers=4", "actor.backend=megatron", "actor.parallel=d1t2p1"
    )
    config = plan.phases[-1].config
    made = place_experiment(plan).roles["actor"].shape
    of_plan = memory_of_plans(config, made)(allocation_of(config))
    expected = {w: m.bytes for w, m in memory_of_experiment(config, made).items()}
    assert of_plan == pytest.approx({w: n for w, n in expected.items() if n})


# ---- what is printed and kept -------------------------------------------------------------------------


def test_the_proposal_can_be_pasted(file_root: Path) -> None:
    words = ("actor.backend=megatron", "train_bs_n_seqs=64")
    plan = make_plan("ppo-math", words, trial="t")
    proposal = plan_search.propose(
        plan, gpus=4, profiles=(), device="h100", cluster=None, within_s=3.0
    )
    pasted = [word.replace("'", "") for word in proposal.overrides]  # as the shell gives them
    again = make_plan("ppo-math", [*words, *pasted], trial="t2")
    assert allocation_of(again.phases[-1].config) == proposal.found.allocation


def test_the_verbs_print_step_bars_and_settings(
    file_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "ppo-math", "--device", "h100"]) == 0
    told = capsys.readouterr().out
    assert "(formulas for h100)" in told
    assert "critical path  actor_gen" in told
    search = ["plan", "ppo-math", "--search", "--gpus", "2", "--device", "h100", "--within", "2"]
    assert run(search) == 0
    told = capsys.readouterr().out
    assert "on 2 GPUs" in told
    assert told.splitlines()[-1].startswith("  placement.n_model_workers=2 placement.pools.")
    assert run([*search, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["search"]["found"]["exact"] in (True, False)
    assert run(["plan", "ppo-math", "--gpus", "2"]) != 0
    assert "--search" in capsys.readouterr().err


def test_figures_come_from_trials_of_the_same_models_and_batch(file_root: Path) -> None:
    trial = keep(split_plan(), events())
    shared = make_plan("ppo-math", (), trial="shared")
    figures = time_predictions.costs_for(shared, place_experiment(shared))
    assert figures is not None
    assert figures.basis == "measured in ppo-math-split/made-up"
    other = make_plan("ppo-math", ["group_size=8"], trial="other")
    assert time_predictions.costs_for(other, place_experiment(other)) is None
    time_predictions.store_prediction(shared, TrialFiles(trial.root))
    record = read_record(PredictionRecord, trial.prediction)
    assert record is not None
    assert record.calls == pytest.approx(TOOK)
    assert record.step_s == pytest.approx(13.4)


def test_predicted_and_measured_are_told_side_by_side(file_root: Path) -> None:
    files = keep(split_plan(), events())
    record = PredictionRecord(basis="h100", step_s=4.7, calls={"ref_inf": 2.5, "gone": 1.0})
    rows = predicted_rows(record, events())
    assert [(r.name, r.measured_s) for r in rows] == [
        ("step", pytest.approx(9.4)),
        ("ref_inf", pytest.approx(2.0)),
    ]
    assert [error_text(r) for r in rows] == ["-50 %", "+25 %"]
    write_record(files.prediction, record)
    page = write_report(files.root).read_text()
    assert "Predicted and measured" in page
    assert "4.700 s" in page


def test_events_are_read_a_few_times_however_many_steps_there_are(file_root: Path) -> None:
    class Counted(list):
        reads = 0

        def __iter__(self):
            self.reads += 1
            return super().__iter__()

    many, few = Counted(events(40)), Counted(events(4))
    record = PredictionRecord(basis="h100", step_s=4.7, calls={"ref_inf": 2.5})
    plan = split_plan()
    for found in (many, few):
        assert predicted_rows(record, found)
        assert profile_of(found, plan, device_of("h100")).calls
    assert many.reads == few.reads


def test_bars_are_as_long_as_their_calls_and_like_workers_share_a_line() -> None:
    parents = {"a": frozenset[str](), "b": frozenset({"a"})}
    works = [
        CallWork(call="a", workers=(0, 1), seconds=3),
        CallWork(call="b", workers=(2,), seconds=1),
    ]
    lanes = gantt(simulate(works, parents, num_workers=4), width=52)
    assert [lane.text for lane in lanes] == [  # 38 columns for 4 s
        f"workers 0-1 │├a{'─' * 26}{'·' * 10}│",
        f"workers 2   │{'·' * 28}├b{'─' * 8}│",
        f"workers 3   │{'·' * 38}│",
    ]
    assert all(len(lane.text) <= 52 for lane in lanes)


def test_a_role_of_an_unknown_family_is_told_before_the_search(
    file_root: Path, tmp_path: Path
) -> None:
    plan = split_plan()
    phases = plan.phases[-1:]  # no phase makes the model, and there is none
    with golden.raises(ConfigError):
        plan_search.propose(
            replace(plan, phases=phases),
            gpus=2,
            profiles=(),
            device="h100",
            cluster=None,
            within_s=1.0,
        )


def test_an_experiment_without_allocations_is_not_searched(file_root: Path) -> None:
    with golden.raises(ConfigError):
        plan_search.propose(
            make_plan("sft-math", (), trial="t"),
            gpus=2,
            profiles=(),
            device="h100",
            cluster=None,
            within_s=1.0,
        )


# ---- generation on servers -------------------------------------------------------------------------------


def served(model: RoleModel | None, **changed: object) -> ServedGeneration:
    usual = {
        "overlaps": True,
        "model": model,
        "servers": 4,
        "gpus": 1,
        "is_embedded": True,
        "most_rows": None,
    }
    return ServedGeneration(**{**usual, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize("fast", [True, False])
def test_a_step_is_as_long_as_the_slower_of_servers_and_trainers(
    file_root: Path, fast: bool
) -> None:
    found = place_experiment(make_plan("ppo-math-async", trial="a"))
    assert found.served is not None
    assert (found.served.servers, found.served.gpus, found.served.is_embedded) == (1, 0, True)
    assert found.served.model is not None
    costs = formulas_of(found, DEVICES["h100"])
    model = RoleModel(shape=SHAPE if not fast else found.served.model.shape, backend="inference")
    beside = predict(replace(found, served=served(model)), costs, basis="formulas")
    training = beside.figures.wall_s
    assert beside.served_s is not None
    assert (beside.served_s < training) == fast
    assert beside.step_s == beside.record().step_s == max(training, beside.served_s)
    (line, *_) = time_predictions.prediction_lines(beside)
    assert f"bound by {'training' if fast else 'generation'}" in line
    in_turn = predict(replace(found, served=served(model, overlaps=False)), costs, basis="x")
    assert in_turn.step_s == training + beside.served_s
    assert ", then training " in next(iter(time_predictions.prediction_lines(in_turn)))


@pytest.mark.parametrize("what", [{"gpus": 0}, {"model": None}])
def test_generation_that_is_not_predicted_is_not_said_to_be(file_root: Path, what: dict) -> None:
    found = place_experiment(make_plan("ppo-math-async", trial="a"))
    costs = formulas_of(found, DEVICES["h100"])
    mine = served(**{"model": RoleModel(shape=SHAPE), **what})
    told = predict(replace(found, served=mine), costs, basis="formulas")
    assert told.step_s == told.figures.wall_s
    first, second, *_ = time_predictions.prediction_lines(told)
    golden.check(first)
    assert "without generation" in first
    assert "no prediction" in second
    assert told.record().basis == "formulas; without generation"
