"""Which workers are started again, and when: a policy in virtual time, and who counts as hanging."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from realsys.api.scheduling import INDEPENDENTLY_RESTARTABLE, WorkerType
from realsys.supervisor.health.restarts import (
    RestartPolicy,
    Stalls,
    is_restarted_alone,
    judge_stalls,
)
from realsys.trial.records import WorkerStatus

SERVER, MANAGER, ROLLOUT = "generation_server/1", "gserver_manager/0", "rollout_worker/2"
MASTER, MODEL = "master_worker/0", "model_worker/0"


def test_master_and_model_workers_end_the_trial():
    assert set(WorkerType) - INDEPENDENTLY_RESTARTABLE == {
        WorkerType.MASTER_WORKER,
        WorkerType.MODEL_WORKER,
    }
    assert [w for w in (SERVER, MANAGER, ROLLOUT, MASTER, MODEL) if is_restarted_alone(w)] == [
        SERVER,
        MANAGER,
        ROLLOUT,
    ]
    assert not is_restarted_alone("supervisor")


def test_pauses_grow_and_the_sixth_end_within_an_hour_is_the_last():
    policy, past_s, starts = RestartPolicy(), [], []
    now_s = 100.0
    while (start_s := policy.next_start_s(past_s, now_s=now_s)) is not None:
        starts.append(start_s - now_s)
        past_s.append(start_s)
        now_s = start_s + 1.0  # it lives for a second
    assert starts == [0.5, 1.0, 2.0, 4.0, 8.0]
    first_s = past_s[0]
    assert policy.next_start_s(past_s, now_s=first_s + 3599.0) is None
    assert policy.next_start_s(past_s, now_s=first_s + 3600.0) == first_s + 3600.0 + 8.0
    assert policy.next_start_s(past_s, now_s=now_s + 7200.0) == now_s + 7200.5  # long ago


def test_a_configuration_that_is_refused_at_the_first_start_is_not_tried_again():
    policy = RestartPolicy()
    assert policy.next_start_s([], now_s=9.0, kind="ConfigError") is None
    assert policy.next_start_s([], now_s=9.0, kind="ConfigErrors") is None
    assert policy.next_start_s([], now_s=9.0, kind="ClusterError") == 9.5
    assert policy.next_start_s([5.0], now_s=9.0, kind="ConfigError") == 10.0
    # One that has run for long took it before.
    assert policy.next_start_s([], now_s=5000.0, began_s=4500.0, kind="ConfigError") is None
    assert policy.next_start_s([], now_s=5000.0, began_s=4000.0, kind="ConfigError") == 5000.5


@given(
    lives_s=st.lists(st.integers(0, 4000), max_size=60),
    most=st.integers(1, 5),
    window_s=st.integers(10, 4000),
)
def test_it_is_started_again_while_fewer_than_allowed_were_in_the_window(lives_s, most, window_s):
    policy = RestartPolicy(max_restarts=most, window_s=window_s, first_pause_s=0.5)
    now_s, past_s = 0.0, []
    for life_s in lives_s:
        now_s += life_s
        start_s = policy.next_start_s(past_s, now_s=now_s)
        recent = sum(at_s > now_s - window_s for at_s in past_s)
        if start_s is None:
            assert recent == most
            return
        assert recent < most
        assert start_s == now_s + 0.5 * 2**recent
        past_s.append(start_s)
        now_s = start_s


def status(stalled_s: float = 0.0, waits_for: str = "", where: str = "") -> WorkerStatus:
    return WorkerStatus(
        state="running", stalled_s=stalled_s, waits_for=waits_for, stalled_where=where
    )


def test_a_server_that_hangs_is_started_again_and_who_waits_for_it_is_not_blamed():
    statuses = {
        SERVER: status(40.0, where="stopped by SIGSTOP"),
        ROLLOUT: status(35.0, waits_for=f"{SERVER}: tokens"),
        MASTER: status(),
    }
    assert judge_stalls(statuses, recovering=set()) == Stalls(again=(SERVER,))


def test_one_that_is_accused_by_who_waits_is_started_again():
    statuses = {ROLLOUT: status(35.0, waits_for=f"{MANAGER}: a server"), MANAGER: status()}
    assert judge_stalls(statuses, recovering=set()) == Stalls(again=(MANAGER,))


def test_a_model_worker_that_hangs_ends_the_trial_whoever_hangs_besides():
    statuses = {SERVER: status(40.0), MODEL: status(50.0)}
    assert judge_stalls(statuses, recovering=set()) == Stalls(fatal=True)
    assert judge_stalls({MODEL: status(50.0)}, recovering={SERVER}) == Stalls(fatal=True)


def test_who_waits_for_one_that_is_recovering_is_excused_also_at_second_hand():
    statuses = {
        MASTER: status(50.0, waits_for=f"{ROLLOUT}: samples"),
        ROLLOUT: status(40.0, waits_for=f"{SERVER}: tokens"),
    }
    assert judge_stalls(statuses, recovering={SERVER}) == Stalls()
    assert judge_stalls(statuses, recovering=set()) == Stalls(again=(ROLLOUT,))
    again = {**statuses, SERVER: status(60.0)}  # it hangs once more
    assert judge_stalls(again, recovering={SERVER}) == Stalls(again=(SERVER,))
    circle = {
        MASTER: status(50.0, waits_for=f"{ROLLOUT}: samples"),
        ROLLOUT: status(40.0, waits_for=f"{MASTER}: weights"),
    }
    assert judge_stalls(circle, recovering={SERVER}).fatal


def test_nobody_stands_still():
    assert judge_stalls({MASTER: status(), SERVER: status()}, recovering=set()) == Stalls()


def test_a_rank_in_a_collective_is_not_blamed_while_another_computes():
    """In the first steps, whose length nobody knows: one rank is done in ten minutes, one in twelve."""
    where = "all_reduce (torch/distributed/distributed_c10d.py:2501) < step (engine.py:88)"
    waits = WorkerStatus(state="running", stalled_s=700.0, stalled_where=where)
    works = WorkerStatus(state="running")
    assert judge_stalls({MODEL: waits, "model_worker/1": works}, recovering=set()) == Stalls()
    idle = WorkerStatus(state="ready")
    assert judge_stalls(
        {MODEL: waits, "model_worker/1": idle, MASTER: works}, recovering=set()
    ).fatal
    assert judge_stalls({MODEL: waits, "model_worker/1": waits}, recovering=set()).fatal
    elsewhere = WorkerStatus(state="running", stalled_s=700.0, stalled_where="loop (reward.py:7)")
    assert judge_stalls({MODEL: elsewhere, "model_worker/1": works}, recovering=set()).fatal
    both = {MODEL: waits, "model_worker/1": works, "model_worker/2": elsewhere}
    assert judge_stalls(both, recovering=set()).fatal
    too_long = WorkerStatus(state="running", stalled_s=1801.0, stalled_where=where)
    assert judge_stalls({MODEL: too_long, "model_worker/1": works}, recovering=set()).fatal
    one_of_two = {MODEL: too_long, "model_worker/1": waits, "model_worker/2": works}
    assert judge_stalls(one_of_two, recovering=set()).fatal
