"""A running trial among attackers: nobody gets in, nothing is learned, and its numbers are the same.

One trial in its second attempt, killed once in the first, is attacked by every test of this module in
turn while it trains; another one runs beside it in peace, with keys of its own. The last test waits for
both and compares.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attackers
import pytest
import zmq
from attackers import MIB, Door, ask, say, with_keys
from paced import Pace
from real_trials import (
    Trials,
    explain,
    files_under,
    kill_everything,
    metrics_of,
    name_of,
    small_ppo,
    wait_until,
    worker_pid,
)

from launcher.trials.status import trial_view
from realsys.data.transfer.transfer_messages import TensorReply, TensorRequest
from realsys.transport.codec import MAX_MESSAGE_BYTES, decode, encode
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.messages import PROTOCOL_VERSION, ReplyFrame, RequestFrame
from realsys.transport.worker_requests import Done, Evaluate, Ping, Reply
from realsys.trial.liveness import processes_of
from realsys.trial.records import AttemptFiles, AttemptRecord, TrialFiles, read_record
from realsys.trial.trial_state import State

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

EPOCHS, STEPS = 6, 72
ATTACKED = small_ppo(f"exp_ctrl.total_train_epochs={EPOCHS}", "task.train_size=96")
STEP_S = 5.0  # with them, longer than all attacks together take; the last test lets it hurry
SILENCE_S = 0.4  # how long we wait for an answer that must not come
STRANGER = TrialKeypairs.generate()


@dataclass
class Scene:
    """The trial under attack, the one in peace, and whose keys are whose."""

    trials: Trials
    files: TrialFiles
    peaceful: TrialFiles
    pace: Pace
    is_over: bool = False

    def attempt(self, number: int) -> AttemptFiles:
        """Of the trial under attack."""
        return self.files.attempt(number)

    @property
    def record(self) -> AttemptRecord:
        """Its second attempt."""
        found = read_record(AttemptRecord, self.attempt(2).record)
        assert found is not None
        return found

    @property
    def keys(self) -> TrialKeypairs:
        """The right ones."""
        return TrialKeypairs.load(self.attempt(2).curve_keys)

    @property
    def worker_log(self) -> Path:
        """Of the worker that is attacked."""
        return self.attempt(2).log("model_worker/0")

    def doors(self) -> list[Door]:
        """Where its second attempt listens."""
        return attackers.known_doors(self.worker_log)

    def frame(self, body: bytes | None = None, **changes: Any) -> bytes:
        """A request that only lacks the keys."""
        right: dict[str, Any] = {
            "version": PROTOCOL_VERSION,
            "trial": name_of(self.files),
            "attempt": 2,
            "token": self.record.token,
            "request_id": os.urandom(8).hex(),
            "sender": "master_worker/0",
            "deadline_s": 5.0,
        }
        body = encode(Ping()) if body is None else body
        return encode(RequestFrame(body=body, **{**right, **changes}))

    def tensor_request(self, **changes: Any) -> bytes:
        """The same for tensors."""
        right: dict[str, Any] = {
            "trial": name_of(self.files),
            "attempt": 2,
            "token": self.record.token,
            "key": "packed_input_ids",
            "ids": ("0",),
        }
        return encode(TensorRequest(**{**right, **changes}))

    def message(self, door: Door) -> list[bytes]:
        """What the server behind a door would answer, if it came from a friend."""
        return [self.frame()] if door.server == "control" else [b"id", self.tensor_request()]

    def num_refused(self, reason: str) -> int:
        """How often the worker's log speaks of it: at the counts 1, 2, 4, …"""
        pattern = rf"refused server=model_worker/0.* reason={reason} count=(\d+)"
        return max((int(n) for n in re.findall(pattern, self.worker_log.read_text())), default=0)

    def assert_it_answers(self) -> None:
        """A friend is heard behind both doors."""
        control, data = self.doors()
        mine = with_keys(self.keys, self.keys)
        ((reply,),) = ask(control, mine, [self.frame()])
        assert decode(decode(reply, ReplyFrame).body, Reply) == Done()
        ((_, header),) = ask(data, mine, [b"id", self.tensor_request(ids=("nobody",))])
        assert "on this worker" in decode(header, TensorReply).error


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("attacked")
    trials, pace = Trials(folder / "root"), Pace(folder, 0.2)
    words = (f"actor.path={tiny_policy}", *ATTACKED, *pace.words)
    try:
        files = trials.launch("ppo-math", "attacked", *words)
        trials.wait_for_step(files, 4)
        kill_everything(files)
        trials.wait(files, timeout_s=240)
        pace.set(1.0)  # it has not ended before the other one is launched
        trials.resume(files)
        peaceful = trials.launch("ppo-math", "peaceful", *words)
        wait_until(files, lambda v: v.attempt == 2 and (v.step or 0) >= 6, timeout_s=240)
        pace.set(STEP_S)
        yield Scene(trials, files, peaceful, pace)
    finally:
        trials.end_all()


def assert_live(scene: Scene) -> None:
    view = trial_view(scene.files)
    assert view.state in State.live(), explain(scene.files, view)


@pytest.fixture(autouse=True)
def it_goes_on(scene: Scene) -> Iterator[None]:
    """Each attack finds the trial running and leaves it running."""
    assert_live(scene)
    yield
    if not scene.is_over:
        assert_live(scene)


def test_every_port_that_it_listens_on_is_one_of_two_known_doors(scene: Scene) -> None:
    worker = worker_pid(trial_view(scene.files), "model_worker/0")
    expected = {door.port: {worker} for door in scene.doors()}
    assert attackers.listening_ports(scene.files.root) == expected
    assert {door.host for door in scene.doors()} == {"127.0.0.1"}
    scene.assert_it_answers()


# ---- without keys --------------------------------------------------------------------------------


def test_bytes_that_are_no_zeromq_get_nothing_but_a_greeting(scene: Scene) -> None:
    for door in scene.doors():
        noise = os.urandom(4 * MIB)
        for parts in ((b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",), (noise,), (b"",), (b"\xff" * 64,)):
            assert len(say(door, *parts)) <= 64
    scene.assert_it_answers()


def test_slow_and_half_open_connections_hold_nobody_up(scene: Scene) -> None:
    step = trial_view(scene.files).step or 0
    with ExitStack() as open_ones:
        for door in scene.doors():
            ends = [open_ones.enter_context(attackers.connected(door)) for _ in range(200)]
            for end in ends[:100]:
                end.sendall(attackers.greeting(b"CURVE")[:11])
            drops = [bytes([b]) for b in attackers.greeting(b"CURVE") * 2]
            slow = {"pause_s": 0.03}
            threading.Thread(target=say, args=(door, *drops), kwargs=slow, daemon=True).start()
        scene.assert_it_answers()
        time.sleep(4)
        scene.assert_it_answers()
        scene.pace.set(0.5)
        wait_until(scene.files, lambda v: (v.step or 0) >= step + 3, timeout_s=240)
        scene.pace.set(STEP_S)


def test_old_versions_of_the_protocol_which_know_no_keys_are_cut_off(scene: Scene) -> None:
    for door in scene.doors():
        message = scene.message(door)[-1]
        for spoken in (attackers.zmtp_1(message), attackers.zmtp_2(message)):
            answer = say(door, spoken, listen_s=SILENCE_S)
            assert len(answer) <= 64
            assert b"Reply" not in answer
    scene.assert_it_answers()


def test_handshakes_by_hand_end_in_a_cut(scene: Scene) -> None:
    hello = attackers.command(b"HELLO", b"\x01\x00" + os.urandom(198))
    for door in scene.doors():
        for mechanism, then in (
            (b"NULL", attackers.command(b"READY", b"\x0bSocket-Type\0\0\0\x06DEALER")),
            (b"PLAIN", attackers.command(b"HELLO", b"\x04root\x04root")),
            (b"GSSAPI", attackers.command(b"INITIATE", b"x" * 40)),
            (b"CURVE", hello),
            (b"CURVE", attackers.command(b"INITIATE", os.urandom(200))),
            (b"CURVE", b"\x00\x05Hello"),  # a message where a command must be
            (b"CURVE", attackers.command(b"", b"")),
            (b"curve", hello),
        ):
            for minor in (0, 1):
                answer = say(door, attackers.greeting(mechanism, minor=minor), then, listen_s=0.1)
                assert b"Reply" not in answer
                assert b"WELCOME" not in answer
    wait_until(scene.files, lambda _: scene.num_refused("no_handshake") >= 16, timeout_s=240)
    scene.assert_it_answers()


def test_a_message_that_claims_to_be_huge_is_not_even_read(scene: Scene) -> None:
    pid = worker_pid(trial_view(scene.files), "model_worker/0")
    for door in scene.doors():
        for claimed in (MAX_MESSAGE_BYTES + 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1):
            before_mib = attackers.resident_mib(pid)
            taken = attackers.flood(door, claimed=claimed, limit=300 * MIB)
            grown_mib = attackers.resident_mib(pid) - before_mib
            assert taken < 30 * MIB, f"{door} took {taken >> 20} MiB of a stranger"
            assert grown_mib < 100, f"{door} grew by {grown_mib:.0f} MiB"
    scene.assert_it_answers()


@pytest.mark.parametrize("whose", ["nobody's", "a stranger's", "the right server's, mine", "PLAIN"])
def test_a_zeromq_peer_without_keys_gets_no_answer(scene: Scene, whose: str) -> None:
    options = {
        "nobody's": {},
        "a stranger's": with_keys(STRANGER, STRANGER),
        "the right server's, mine": with_keys(scene.keys, STRANGER),
        "PLAIN": {zmq.PLAIN_USERNAME: b"root", zmq.PLAIN_PASSWORD: scene.record.token.encode()},
    }[whose]
    reason = "wrong_key" if whose.endswith("mine") else "no_handshake"
    for door in scene.doors():
        assert ask(door, options, scene.message(door), wait_s=SILENCE_S) == []
    wait_until(scene.files, lambda _: scene.num_refused(reason) > 0, timeout_s=240)
    scene.assert_it_answers()


@pytest.mark.parametrize("whose", ["another trial", "the attempt before"])
def test_keys_of_others_open_no_door(scene: Scene, whose: str) -> None:
    other = scene.peaceful.attempt(1) if whose == "another trial" else scene.attempt(1)
    theirs = TrialKeypairs.load(other.curve_keys)
    assert theirs != scene.keys
    for door in scene.doors():
        for server in (theirs, scene.keys):
            options = with_keys(server, theirs)
            assert ask(door, options, scene.message(door), wait_s=SILENCE_S) == []
    scene.assert_it_answers()


def test_a_storm_of_connections_with_wrong_keys_slows_nobody_down(scene: Scene) -> None:
    options = with_keys(scene.keys, STRANGER)
    with ExitStack() as stack:
        for _ in range(30):
            for door in scene.doors():
                stack.enter_context(attackers.peer(door, options)).send_multipart([b"x"])
        time.sleep(3)
        scene.assert_it_answers()
    wait_until(scene.files, lambda _: scene.num_refused("wrong_key") >= 32, timeout_s=240)


# ---- with the right keys -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "error", "changes"),
    [
        ("stale", "StaleAttempt", {"attempt": 1}),
        ("stale", "StaleAttempt", {"attempt": 3}),
        ("stale", "StaleAttempt", {"attempt": -1}),
        ("stale", "StaleAttempt", {"token": ""}),
        ("stale", "StaleAttempt", {"token": "5f" * 16}),
        ("version", "ProtocolError", {"version": 1}),
        ("version", "ProtocolError", {"version": 99}),
        ("other_trial", "", {"trial": "ppo-math/peaceful"}),
        ("", "ProtocolError", {"body": b""}),
        ("", "ProtocolError", {"body": b"\xc1" * 1000}),
        ("", "ProtocolError", {"body": b"\x81\xa4type\xa4Nuke"}),
        ("", "ProtocolError", {"body": b"\x81\xa4type\xa7RunCall"}),
        ("", "ProtocolError", {"body": b"\x91" * 100_000}),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_forged_requests_are_refused_and_told_so(
    scene: Scene, reason: str, error: str, changes: dict[str, Any]
) -> None:
    control, _ = scene.doors()
    mine = with_keys(scene.keys, scene.keys)
    wait_s = 60.0 if error else SILENCE_S
    answers = ask(control, mine, [scene.frame(**changes)], wait_s=wait_s)
    if error:
        reply: ReplyFrame = decode(answers[0][0], ReplyFrame)
        assert reply.error is not None
        assert (reply.ok, reply.body, reply.error.kind) == (False, b"", error)
        assert scene.record.token not in str(reply.error)
    else:
        assert answers == []
    if reason:
        wait_until(scene.files, lambda _: scene.num_refused(reason) > 0, timeout_s=240)


def test_a_name_can_not_forge_a_line_of_the_log(scene: Scene) -> None:
    control, _ = scene.doors()
    mine = with_keys(scene.keys, scene.keys)
    forged = scene.frame(trial="x\n2026-11-21T04:12:03.123 ERROR master_worker/0 forged")
    assert ask(control, mine, *[[forged]] * 8, wait_s=SILENCE_S) == []
    scene.assert_it_answers()
    lines = scene.worker_log.read_text().splitlines()
    assert not [line for line in lines if line.endswith("forged") and "refused" not in line]


def test_malformed_and_oversized_frames_of_a_key_holder_are_dropped(scene: Scene) -> None:
    control, _ = scene.doors()
    mine = with_keys(scene.keys, scene.keys)
    right = scene.frame()
    for message in ([b""], [b"", b""], [b"\xc1"], [right[:-1]], [right, right], [right + b"\0"]):
        assert ask(control, mine, message, wait_s=SILENCE_S) == []
    wait_until(scene.files, lambda _: scene.num_refused("malformed") >= 4, timeout_s=240)
    assert ask(control, mine, [bytes(MAX_MESSAGE_BYTES + 1)], wait_s=2) == []
    scene.assert_it_answers()


def test_names_as_long_as_a_message_do_not_end_the_server(scene: Scene) -> None:
    control, data = scene.doors()
    mine = with_keys(scene.keys, scene.keys)
    long = "x" * (MAX_MESSAGE_BYTES - 1000)
    ask(control, mine, [scene.frame(version=1, request_id=long)], wait_s=1.5)
    ask(control, mine, [scene.frame(token="", sender=long[: len(long) // 2])], wait_s=1.5)
    ask(data, mine, [b"id", scene.tensor_request(trial=long)], wait_s=1.5)
    ask(data, mine, [b"id", scene.tensor_request(ids=(long,))], wait_s=1.5)
    scene.assert_it_answers()


def test_a_replayed_request_is_run_once_and_an_old_order_never_again(scene: Scene) -> None:
    control, _ = scene.doors()
    mine = with_keys(scene.keys, scene.keys)
    replayed = scene.frame(encode(Evaluate(order=0, step=0)), request_id="replayed")
    ((first,),) = ask(control, mine, [replayed])
    for _ in range(3):
        assert ask(control, mine, [replayed]) == [[first]]  # from another connection
    reply: ReplyFrame = decode(first, ReplyFrame)
    assert reply.error is not None
    assert "request number 0" in reply.error.what  # the master's own number 0 was run
    assert scene.worker_log.read_text().count("request=replayed") == 1


@pytest.mark.parametrize(
    "changes",
    [{"token": ""}, {"token": "5f" * 16}, {"attempt": 1}, {"trial": "ppo-math/peaceful"}],
    ids=str,
)
def test_tensors_are_given_to_this_attempt_only(scene: Scene, changes: dict[str, Any]) -> None:
    _, data = scene.doors()
    mine = with_keys(scene.keys, scene.keys)
    ((_, header, *rest),) = ask(data, mine, [b"id", scene.tensor_request(**changes)])
    assert "request is from" in decode(header, TensorReply).error
    assert rest == []


def test_broken_requests_for_tensors_hear_why(scene: Scene) -> None:
    _, data = scene.doors()
    mine = with_keys(scene.keys, scene.keys)
    for body in ([], [b""], [b"\xc1"], [b"\x91" * 100_000], [scene.tensor_request(ids=())]):
        ((_, header, *rest),) = ask(data, mine, [b"id", *body])
        assert decode(header, TensorReply).error
        assert rest == []
    scene.assert_it_answers()


# ---- what others can see -------------------------------------------------------------------------


def secrets_of(scene: Scene) -> dict[str, bytes]:
    """Key material of both trials' attempts, and their tokens."""
    found = {}
    for attempt in (scene.attempt(1), scene.attempt(2), scene.peaceful.attempt(1)):
        keys, record = (
            TrialKeypairs.load(attempt.curve_keys),
            read_record(AttemptRecord, attempt.record),
        )
        assert record is not None
        found[f"{attempt.root} server"] = keys.server_secret
        found[f"{attempt.root} client"] = keys.client_secret
        found[f"{attempt.root} token"] = record.token.encode()
    return found


def mode_of(path: Path) -> int:
    """0 if it is gone: checkpoints come and go while we look."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0


def contents(path: Path, *, mask: int) -> bytes:
    """Of a file whose mode has a bit of ``mask``; nothing of others and of those that are gone."""
    try:
        there = path.lstat()
        return path.read_bytes() if stat.S_ISREG(there.st_mode) and there.st_mode & mask else b""
    except FileNotFoundError:  # old checkpoints and log entries go while we look
        return b""


def test_no_secret_is_in_a_command_line_or_an_environment(scene: Scene) -> None:
    secrets = secrets_of(scene)
    processes = processes_of(scene.files.root) + processes_of(scene.peaceful.root)
    assert len(processes) >= 4
    for process in processes:
        for file in ("cmdline", "environ"):
            shown = Path(f"/proc/{process.pid}/{file}").read_bytes()
            assert [name for name, secret in secrets.items() if secret in shown] == []


def test_no_secret_is_in_a_file_that_others_can_read(scene: Scene) -> None:
    secrets = secrets_of(scene)
    found = []
    for folder, folders, names in os.walk(scene.trials.file_root):
        # A folder that others can't enter hides what is below it.
        folders[:] = [f for f in folders if mode_of(Path(folder, f)) & 0o055]
        for path in (Path(folder, n) for n in names):
            data = contents(path, mask=0o044)
            found += [f"{path}: {n}" for n, secret in secrets.items() if secret in data]
    assert found == []


def test_keys_are_nowhere_but_in_their_files(scene: Scene) -> None:
    secrets = {n: s for n, s in secrets_of(scene).items() if not n.endswith("token")}
    found = set()
    for path in files_under(scene.trials.file_root):
        data = contents(path, mask=0o777)
        if any(secret in data for secret in secrets.values()):
            found.add(path)
    homes = {Path(name.split()[0]) / "secrets" / "curve.json" for name in secrets}
    assert found == homes
    for home in homes:
        assert stat.S_IMODE(home.stat().st_mode) == 0o600
        assert stat.S_IMODE(home.parent.stat().st_mode) == 0o700


# ---- the end -------------------------------------------------------------------------------------


def test_after_all_of_it_the_trial_ends_with_the_numbers_of_one_in_peace(scene: Scene) -> None:
    scene.is_over = True
    scene.pace.set(0.0)
    for files in (scene.files, scene.peaceful):
        view = scene.trials.wait(files, timeout_s=500)
        assert view.state is State.COMPLETED, explain(files, view)
    attacked, peaceful = metrics_of(scene.files), metrics_of(scene.peaceful)
    assert peaceful[-1]["step"] == STEPS
    assert attacked == peaceful
