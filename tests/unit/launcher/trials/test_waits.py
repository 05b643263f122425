"""Who waits for whom, as `realsys explain` draws it."""

from __future__ import annotations

from dataclasses import replace

import golden

from launcher.trials.explain import MASTER, MAX_CHAINS, explain, wait_chains
from launcher.trials.render import _where
from launcher.trials.trial_view import TrialView, WorkerView
from realsys.trial.records import Progress
from realsys.trial.trial_state import State


def view(*workers: WorkerView, **running: str) -> TrialView:
    progress = Progress(attempt=1, phase="main", step=6, total_steps=9, running=running)
    return TrialView(
        trial="t/1", state=State.RUNNING, folder="/x", workers=workers, progress=progress
    )


def worker(index: int, **more: object) -> WorkerView:
    fields = {"state": "running", "seconds_in_state": 62.0, **more}
    return WorkerView(worker=f"model_worker/{index}", **fields)  # type: ignore[arg-type]


def test_while_all_compute_there_is_nothing_to_tell():
    assert (
        list(wait_chains(view(worker(0), worker(1), actor_train="model_worker/0, model_worker/1")))
        == []
    )
    assert list(wait_chains(view())) == []


def test_a_chain_ends_at_the_one_that_stands_still():
    found = view(
        worker(0, waits_for="model_worker/1: tensors of actor_gen"),
        worker(1, stalled_s=62.0, stalled_where="stopped by SIGSTOP"),
        ref_inf="model_worker/0",
    )
    golden.check(list(wait_chains(found)))


def test_a_circle_is_called_one():
    found = view(
        worker(0, waits_for="model_worker/1: tensors of a"),
        worker(1, waits_for="model_worker/0: tensors of b"),
        ref_inf="model_worker/0",
    )
    (_, chain) = wait_chains(found)
    assert chain.endswith("→ model_worker/0 (tensors of b): a cycle")
    found = view(*found.workers, worker(2, waits_for="model_worker/1"), ref_inf="model_worker/2")
    (_, chain) = wait_chains(found)  # that its first worker is not in
    assert chain.endswith("→ model_worker/1 (tensors of a): a cycle")


def test_one_that_does_not_run_at_the_end_is_named_with_its_state():
    found = view(worker(0, state="lost", seconds_in_state=None), ref_inf="model_worker/0")
    assert list(wait_chains(found))[1:] == ["  master_worker/0 → model_worker/0 (ref_inf): lost"]


def test_of_many_chains_a_dozen_is_shown():
    many = [worker(i, state="gone") for i in range(MAX_CHAINS + 2)]
    lines = list(wait_chains(view(*many, train=", ".join(w.worker for w in many))))
    assert len(lines) == MAX_CHAINS + 2
    assert lines[-1] == "  and 2 more"


def test_what_the_master_waits_for_is_told():
    why = "no episode has succeeded for 4 min: no generation server is well (200 of 200 failures)"
    master = WorkerView(worker=MASTER, state="running", seconds_in_state=9.0, waits_for=why)
    assert f"{MASTER} waits: {why}" in list(explain(view(master)))


def test_a_phase_is_named_where_there_are_several() -> None:
    one = replace(view(), phases=("main",), phase="main")
    assert _where(one) == ""
    assert "phase sft (1 of 2)" in _where(replace(one, phases=("sft", "main"), phase="sft"))
