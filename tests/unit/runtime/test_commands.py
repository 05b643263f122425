"""Commands to a worker: which are understood, which are taken, when they take effect."""

from itertools import product
from types import SimpleNamespace

import golden
import pytest

from realsys.api.errors import TrialError
from realsys.runtime.lifecycle import FINAL, WorkerEvent, WorkerState
from realsys.runtime.worker_commands import ALLOWED, Command, Verb, parse_command, refusal
from realsys.trial.records import AttemptRecord, StopRequest, dumps
from realsys.worker.runner import WorkerRunner

ATTEMPT = AttemptRecord(
    number=2, token="ours", host="h", supervisor_pid=1, supervisor_start=1, started_at=0.0
)


def command(verb, **changes):
    named = {
        "id": f"c-{verb}",
        "verb": verb,
        "by": "anna",
        "at": 0.0,
        "attempt": 2,
        "token": "ours",
    }
    return Command(**{**named, **changes})


@pytest.mark.parametrize(("verb", "state"), list(product(Verb, WorkerState)), ids=str)
def test_only_the_table_lets_a_command_in(verb, state):
    args = {"log_level": "debug"} if verb is Verb.CONFIGURE else {}
    why = refusal(command(verb, args=args), attempt=2, token="ours", state=state)
    assert why == ("" if state in ALLOWED[verb] else f"a worker that is {state} can't take {verb}")


def test_no_command_is_for_the_dead():
    assert all(not FINAL & states for states in ALLOWED.values())
    assert set(ALLOWED) == set(Verb)


@pytest.mark.parametrize("changes", [{"attempt": 1}, {"token": "theirs"}], ids=str)
def test_another_incarnations_command_is_refused(changes):
    why = refusal(command(Verb.PAUSE, **changes), attempt=2, token="ours", state=WorkerState.READY)
    golden.check(why)


@pytest.mark.parametrize(
    "args", [{}, {"log_level": "loud"}, {"log_level": "info", "x": "y"}], ids=str
)
def test_only_the_log_level_is_configured(args):
    asked = command(Verb.CONFIGURE, args=args)
    assert refusal(asked, attempt=2, token="ours", state=WorkerState.READY)


def test_a_command_is_read_as_it_was_written():
    asked = command(Verb.CONFIGURE, args={"log_level": "debug"})
    assert parse_command(dumps(asked), where="here") == asked


@pytest.mark.parametrize("data", [b"", b"{}", b'{"verb": "dance"}', b"\xff"])
def test_what_is_no_command_is_refused(data):
    with pytest.raises(TrialError):
        parse_command(data, where="here")


class FakeHeartbeat:
    def __init__(self):
        self.told, self.limits_s = [], []

    def publish_status(self, status, *, may_take_s=0.0, ticks_within_s=0.0):
        self.told.append(status)
        self.limits_s.append(may_take_s)


@pytest.fixture
def runner():
    plan = SimpleNamespace(
        cluster=SimpleNamespace(name="here"), user="anna", experiment_name="ppo", trial_name="run"
    )
    made = WorkerRunner(plan, None, ATTEMPT, "model_worker", 0)
    made.controls.supported = frozenset(Verb)
    made._heartbeat = FakeHeartbeat()
    made.move(WorkerEvent.REGISTERED)
    return made


def states(runner):
    return [status.state for status in runner.heartbeat.told]


def test_a_pause_takes_effect_between_two_requests(runner):
    runner.move(WorkerEvent.STARTED, mfc="actor_train", step=3)
    runner._on_command(dumps(command(Verb.PAUSE)))
    assert runner.state is WorkerState.RUNNING
    assert runner.heartbeat.told[-1].last_command == ""
    runner.move(WorkerEvent.FINISHED_CALL)
    looks = []

    def until():
        looks.append(runner.heartbeat.told[-1])
        runner._on_command(dumps(command(Verb.RESUME)))
        return False

    runner.between_requests(until=until)
    assert (looks[0].state, looks[0].last_command) == ("paused", "c-pause")
    assert runner.heartbeat.told[-1].last_command == "c-resume"
    assert states(runner)[-3:] == ["paused", "paused", "ready"]
    runner.between_requests(until=until)
    assert len(looks) == 1


@pytest.mark.parametrize(("verb", "is_interrupted"), [(Verb.INTERRUPT, True), (Verb.EXIT, False)])
def test_interrupt_and_exit_ask_the_loop_to_leave(runner, verb, is_interrupted):
    left = []
    runner.controls.leave = lambda: left.append(True)
    runner._on_command(dumps(command(Verb.PAUSE)))
    runner._on_command(dumps(command(verb)))
    assert left == [True]
    assert runner.controls.is_interrupted is is_interrupted
    runner.between_requests(until=lambda: pytest.fail("it is not paused any more"))


def test_a_refusal_is_answered(runner):
    runner.controls.supported = frozenset({Verb.CONFIGURE})
    runner._on_command(dumps(command(Verb.PAUSE)))
    answer = runner.heartbeat.told[-1]
    assert (answer.last_command, answer.state) == ("c-pause", "ready")
    golden.check(answer.command_refused)
    runner._on_command(b"no command at all")
    assert runner.heartbeat.told[-1] is answer


def test_a_stop_that_came_early_is_told_once(runner):
    request, heard = StopRequest(grace_seconds=1, by="anna", at=0.0, attempt=2), []
    runner._on_stop_request(request)
    runner.on_stop = heard.append
    runner._on_stop_request(request)
    assert heard == [request]
    assert runner._stop == request


def test_what_it_waits_for_is_told_and_taken_back(runner):
    runner.move(WorkerEvent.STARTED, mfc="main loop", step=1, may_take_s=600.0)
    with runner.waiting_for("model_worker/1: tensors rewards"):
        assert runner.heartbeat.told[-1].waits_for == "model_worker/1: tensors rewards"
    assert runner.heartbeat.told[-1].waits_for == ""
    runner.publish_status(mfc="main loop", step=2, may_take_s=900.0)
    runner._on_command(b"no command at all")
    runner._on_command(dumps(command(Verb.PAUSE, token="theirs")))
    assert runner.heartbeat.limits_s[-5:] == [600.0, 600.0, 600.0, 900.0, 900.0]
    runner.publish_status(mfc="main loop", step=3)
    assert runner.heartbeat.limits_s[-1] == 0.0
