"""Messages to bytes and back; whatever comes from a socket is a message or one ProtocolError."""

import contextlib
import os
import pickle
import stat
from pathlib import Path

import golden
import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from realsys.api.errors import (
    ConfigError,
    ConfigErrors,
    DataError,
    InternalError,
    KeyExists,
    RealsysError,
    RemoteError,
    StaleAttempt,
    UnknownName,
    WorkerLost,
)
from realsys.transport.client import client_context, too_many_peers
from realsys.transport.codec import MAX_MESSAGE_BYTES, ProtocolError, decode, encode
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.messages import (
    PROTOCOL_VERSION,
    ErrorInfo,
    FrameHead,
    ReplyFrame,
    RequestFrame,
    error_to_info,
    info_to_error,
)
from realsys.transport.server import KeptReplies
from realsys.transport.worker_requests import Reply


class Train(msgspec.Struct, frozen=True, tag=True):
    step: int
    ids: list[str]


class Stop(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Nested(msgspec.Struct, frozen=True, tag=True):
    inside: "Nested | None" = None


FRAME = RequestFrame(
    version=PROTOCOL_VERSION,
    trial="ppo-math/run1",
    attempt=2,
    token="5f" * 16,
    request_id="0123456789abcdef",
    sender="master_worker/0",
    deadline_s=12.5,
    body=encode(Train(step=7, ids=["a", "b"])),
)
REPLY = ReplyFrame(
    version=PROTOCOL_VERSION,
    request_id="0123456789abcdef",
    attempt=2,
    ok=False,
    error=ErrorInfo(kind="DataError", what="w", where="x", fix="f", traceback="t"),
)


def test_messages_come_back_as_they_went():
    assert decode(encode(FRAME), RequestFrame) == FRAME
    assert decode(encode(REPLY), ReplyFrame) == REPLY
    assert decode(FRAME.body, Train | Stop) == Train(step=7, ids=["a", "b"])
    assert decode(encode(Stop("end")), Train | Stop) == Stop("end")


def test_a_head_reads_frames_of_versions_to_come():
    later = {**msgspec.to_builtins(FRAME), "version": 99, "deadline_s": "soon", "new": [1]}
    head = decode(msgspec.msgpack.encode(later), FrameHead)
    assert (head.version, head.trial, head.request_id) == (99, FRAME.trial, FRAME.request_id)
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(later), RequestFrame)


def test_a_head_reads_frames_of_the_version_before_tokens():
    before = {**msgspec.to_builtins(FRAME), "version": 1, "body": FRAME.body}
    del before["token"]
    data = msgspec.msgpack.encode(before)
    assert decode(data, FrameHead).version == 1
    with golden.raises(ProtocolError):
        decode(data, RequestFrame)


@given(st.binary(max_size=300))
def test_random_bytes_are_a_protocol_error(data: bytes):
    read_or_refuse(data)


@given(st.sampled_from([FRAME, REPLY]), st.integers(min_value=0))
def test_a_cut_message_is_a_protocol_error(message: msgspec.Struct, at: int):
    data = encode(message)
    with pytest.raises(ProtocolError):
        decode(data[: at % len(data)], RequestFrame | ReplyFrame)


@given(st.sampled_from([FRAME, REPLY]), st.lists(st.integers(min_value=0), min_size=1, max_size=8))
def test_flipped_bits_are_a_message_or_a_protocol_error(message: msgspec.Struct, bits: list[int]):
    data = bytearray(encode(message))
    for bit in bits:
        data[bit // 8 % len(data)] ^= 1 << bit % 8
    read_or_refuse(bytes(data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x81\xa4type" + b"\x91" * 100_000,  # as deep as it is long
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 elements, says its head
        b"\xc6\xff\xff\xff\xff",
        pickle.dumps({"type": "Stop"}),
        encode(Stop("x")) + b"\x00",
        msgspec.msgpack.encode({"type": "Unknown"}),
        msgspec.msgpack.encode({"type": "Stop"}),
        msgspec.msgpack.encode({"type": "Stop", "reason": 3}),
    ],
)
def test_malformed_messages_are_a_protocol_error(data: bytes):
    with golden.raises(ProtocolError) as caught:
        decode(data, Train | Stop)
    assert caught.value.fix


def test_deep_nesting_is_a_protocol_error():
    data = b"\x82\xa4type\xa6Nested\xa6inside" * 50_000 + b"\xc0"
    with pytest.raises(ProtocolError):
        decode(data, Nested)


def test_a_value_that_refuses_itself_is_a_protocol_error():
    meta = {"ids": ["a", "a"], "seqlens": {}, "dtypes": {}, "trailing_shapes": {}, "metadata": {}}
    data = msgspec.msgpack.encode({"type": "Fetched", "meta": meta})
    with golden.raises(ProtocolError):
        decode(data, Reply)


@pytest.mark.parametrize("name", ["trial", "token", "request_id", "sender"])
def test_a_name_in_a_frame_has_a_limit(name: str):
    data = encode(msgspec.structs.replace(FRAME, **{name: "x" * 1001}))
    with golden.raises(ProtocolError):
        decode(data, RequestFrame)


def test_the_size_limit_holds_both_ways_and_names_both_numbers():
    with golden.raises(ProtocolError):
        encode(Stop("x" * 200), max_bytes=100)
    with golden.raises(ProtocolError):
        decode(b"x" * 201, Stop, max_bytes=200)
    with golden.raises(ProtocolError):
        encode(bytes(MAX_MESSAGE_BYTES))


@pytest.mark.parametrize("message", [object(), Stop("\ud800"), Train(2**70, [])])
def test_what_cant_be_said_is_a_protocol_error(message: object):
    with golden.raises(ProtocolError):
        encode(message)


def test_protocol_errors_pickle():
    error = pickle.loads(pickle.dumps(ProtocolError("w", where="x", fix="f")))
    assert (error.what, error.where, error.fix) == ("w", "x", "f")


# --- errors on their way ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [KeyExists, StaleAttempt, WorkerLost, UnknownName, InternalError, ProtocolError]
)
def test_our_errors_arrive_as_their_class(kind: type[RealsysError]):
    try:
        raise kind("what happened", where="there", fix="do this")
    except RealsysError as error:
        info = decode(encode(error_to_info(error)), ErrorInfo)
    arrived = info_to_error(info, "model_worker/3")
    assert type(arrived) is kind
    assert (arrived.what, arrived.fix) == ("what happened", "do this")
    assert arrived.where == "there (on model_worker/3)"
    assert "test_our_errors_arrive_as_their_class" in "".join(arrived.__notes__)


def test_other_errors_arrive_with_their_traceback():
    def divide() -> None:
        raise ZeroDivisionError("by \ud800")

    try:
        divide()
    except ZeroDivisionError as error:
        info = decode(encode(error_to_info(error)), ErrorInfo)
    arrived = info_to_error(info, "model_worker/3")
    assert type(arrived) is RemoteError
    golden.line(arrived, "ZeroDivisionError")
    assert "in divide" in arrived.what


def test_an_error_about_something_huge_still_fits_into_a_reply():
    info = error_to_info(DataError("x" * 10**7, where="y" * 10**7, fix="z" * 10**7))
    assert len(encode(info)) < 100_000


def test_an_error_with_its_own_constructor_still_arrives():
    problems = ConfigErrors([ConfigError("one", where="a", fix="b")])
    arrived = info_to_error(error_to_info(problems), "w")
    assert type(arrived) is RemoteError
    assert "1 problem in" in arrived.what


# --- kept replies -------------------------------------------------------------------------------


def test_kept_replies_are_bounded_in_bytes_at_any_time_and_in_number_once_they_are_old():
    now_s = [0.0]
    kept = KeptReplies(max_replies=2, max_bytes=10, young_s=60.0, clock=lambda: now_s[0])
    for name in "abc":
        kept.keep(name, b"123")
    assert [kept.get(name) for name in "abc"] == [b"123"] * 3, "a copy of each may still come"
    now_s[0] = 60.0
    kept.keep("d", b"1234567")  # 3 + 7 bytes: c may stay
    assert [kept.get(name) for name in "abcd"] == [None, None, b"123", b"1234567"]
    assert not kept.was_answered("a"), "of an old one no copy comes"
    kept.keep("e", b"x" * 100)
    assert [kept.get(name) for name in "cde"] == [None, None, b"x" * 100]


def test_of_a_young_reply_that_had_to_go_it_is_known_that_it_was_given():
    now_s = [0.0]
    kept = KeptReplies(max_replies=2, max_bytes=10, young_s=60.0, clock=lambda: now_s[0])
    kept.keep("a", b"123")
    now_s[0] = 30.0
    kept.keep("b", b"x" * 100)
    assert kept.get("a") is None
    assert kept.was_answered("a")
    assert not kept.was_answered("b")
    now_s[0] = 61.0
    kept.keep("c", b"")
    assert not kept.was_answered("a")


# --- peers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_peers", "max_files", "told"),
    [
        (10_000, -1, None),  # no limit
        (10_000, 2**20, None),
        (10_000, 40_256, None),
        (
            10_000,
            40_255,
            "10,000 workers need 40,256 open files in one process, 40,255 are allowed",
        ),
        (1, 4096, None),
        (1000, 4096, "1,000 workers need 4,256 open files"),
        (21_845, -1, None),
        (21_846, -1, "need 65,538 sockets of one process, 65,535 are possible"),
    ],
)
def test_more_peers_than_a_process_can_have_are_told_before_the_first_call(
    num_peers, max_files, told
):
    problem = too_many_peers(num_peers, max_files)
    assert (problem is None) == (told is None)
    assert told is None or told in problem.what


def test_a_context_has_room_for_ten_thousand_peers():
    context = client_context()
    try:
        assert context.get(zmq.MAX_SOCKETS) >= 3 * 10_000
    finally:
        context.term()


# --- the trial's keys ---------------------------------------------------------------------------


def test_keys_are_saved_for_their_owner_alone(tmp_path: Path):
    keys = TrialKeypairs.create(tmp_path / "keys.json")
    assert stat.S_IMODE(os.stat(tmp_path / "keys.json").st_mode) == 0o600
    assert os.listdir(tmp_path) == ["keys.json"]
    assert TrialKeypairs.load(tmp_path / "keys.json") == keys
    assert keys != TrialKeypairs.generate()


def test_keys_are_never_shown(tmp_path: Path):
    keys = TrialKeypairs.create(tmp_path / "keys.json")
    for shown in (repr(keys), str(keys), f"{keys}"):
        assert keys.server_secret.decode() not in shown
        assert keys.client_secret.decode() not in shown


def test_keys_are_not_written_over(tmp_path: Path):
    keys = TrialKeypairs.create(tmp_path / "keys.json")
    with golden.raises(ConfigError):
        TrialKeypairs.create(tmp_path / "keys.json")
    assert TrialKeypairs.load(tmp_path / "keys.json") == keys


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622])
def test_keys_that_others_can_reach_are_refused(tmp_path: Path, mode: int):
    path = tmp_path / "keys.json"
    TrialKeypairs.create(path)
    path.chmod(mode)
    with golden.raises(ConfigError) as caught:
        TrialKeypairs.load(path)
    assert f"chmod 600 {path}" in caught.value.fix


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"server_public": "x"}', "\udcff"])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "keys.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    path.chmod(0o600)
    with golden.raises(ConfigError):
        TrialKeypairs.load(path)


def test_missing_keys_say_who_writes_them(tmp_path: Path):
    with golden.raises(ConfigError) as caught:
        TrialKeypairs.load(tmp_path / "keys.json")
    assert "launcher" in caught.value.fix
    with golden.raises(ConfigError):
        TrialKeypairs.create(tmp_path / "nowhere" / "keys.json")


def read_or_refuse(data: bytes) -> None:
    for type_ in (RequestFrame, ReplyFrame, FrameHead, Train | Stop):
        with contextlib.suppress(ProtocolError):
            decode(data, type_)
