"""Rings in shared memory: what one end fills the other empties; nobody else's memory is opened."""

import os
import platform
from types import SimpleNamespace

import pytest
import torch

from realsys.weights.realloc import rings
from realsys.weights.realloc.rings import NUM_SLOTS, Ring, RingRefused, wait_any


def open_files() -> int:
    """Rings that this process has open as files."""
    names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum("realsys-weights" in name for name in names)


def send(ring: Ring, number: int) -> None:
    slot = ring.reserve(number, timeout_s=0)
    assert slot is not None
    assert slot.shape == (number,)
    slot.fill_(number)
    ring.publish(number, tag=10 + number)


def receive(ring: Ring) -> tuple[list[int], int]:
    assert ring.has_message()
    slot, tag = ring.message()
    got = slot.tolist()
    ring.release()
    return got, tag


def test_messages_come_in_order_with_size_and_tag_round_after_round():
    ring, offer = Ring.create()
    reader = Ring.open(offer)
    sent = 0
    for taken in range(1, 3 * NUM_SLOTS):
        while (slot := ring.reserve(1, timeout_s=0)) is not None:
            assert slot.numel() == 1
            sent += 1
            send(ring, sent)
        assert sent == NUM_SLOTS + taken - 1, "a full ring gives no slot"
        assert receive(reader) == ([taken] * taken, 10 + taken)
    while reader.has_message():
        taken += 1
        assert receive(reader) == ([taken] * taken, 10 + taken)
    assert taken == sent


def test_files_are_closed_once_both_ends_have_the_memory():
    before = open_files()
    ring, offer = Ring.create()
    assert open_files() == before + 1
    reader = Ring.open(offer)
    assert open_files() == before + 1
    ring.opened()
    ring.opened()
    assert open_files() == before
    with pytest.raises(RingRefused):
        Ring.open(offer)
    send(ring, 3)
    assert receive(reader) == ([3, 3, 3], 13)


@pytest.mark.parametrize(
    "change", [{"boot": "x"}, {"pid_namespace": None}, {"fd": 10**6}, {"nonce": "0" * 32}]
)
def test_memory_of_another_host_or_process_is_refused(change):
    _, offer = Ring.create()
    before = open_files()
    with pytest.raises(RingRefused):
        Ring.open({**offer, **change})
    assert open_files() == before


@pytest.mark.parametrize("what", ["other size", "no file"])
def test_what_is_no_ring_is_left_as_it_is(what, tmp_path):
    """A process id may be another's by now, and the number of its file that of a file of its own."""
    _, offer = Ring.create()
    path = tmp_path / "file"
    path.write_bytes(b"ours")
    fd = os.open(path if what == "other size" else tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(RingRefused):
            Ring.open({**offer, "fd": fd})
    finally:
        os.close(fd)
    assert path.read_bytes() == b"ours"


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64"])
def test_a_ring_is_made_where_writes_stay_in_order(machine, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    if machine != "aarch64":
        assert Ring.create()[1]["pid"] == os.getpid()
        return
    with pytest.raises(RingRefused):
        Ring.create()


@pytest.mark.parametrize(("of", "name"), [(rings, "memfd_create"), (os, "readlink")])
def test_a_host_that_has_no_such_memory_is_told_from_a_fault(of, name, monkeypatch):
    def refused(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(of, name, refused)
    with pytest.raises(RingRefused):
        Ring.create()


class Clock(SimpleNamespace):
    """Time that passes by what is slept, and 30 µs a look."""

    def __init__(self):
        super().__init__(now_s=5.0, pauses=[])

    def monotonic(self):
        self.now_s += 3e-5
        return self.now_s

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now_s += seconds


def test_a_wait_is_quick_at_first_then_leaves_the_core_and_ends_in_time(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(rings, "time", clock)
    ring, _ = Ring.create()
    for number in range(1, NUM_SLOTS + 1):
        send(ring, number)
    assert clock.pauses == []
    assert ring.reserve(1, timeout_s=0.05) is None
    assert 5.05 < clock.now_s < 5.052
    slower = [min(20e-6 * 1.5**i, 1e-3) for i in range(len(clock.pauses) - 3)]
    assert clock.pauses == pytest.approx([0.0] * 3 + slower)
    assert slower[-1] == 1e-3


def test_the_first_of_several_is_found_or_none_in_time(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(rings, "time", clock)
    conditions = {3: lambda: False, 5: lambda: clock.now_s > 5.01, 7: lambda: clock.now_s > 5.01}
    assert wait_any(conditions, timeout_s=1) == 5
    assert wait_any({3: lambda: False}, timeout_s=1) is None
    assert clock.now_s > 6.01


def test_what_is_shared_is_the_memory_not_a_copy():
    ring, offer = Ring.create()
    reader = Ring.open(offer)
    slot = ring.reserve(2, timeout_s=0)
    slot.copy_(torch.tensor([1, 2], dtype=torch.uint8))
    assert not reader.has_message(), "before it is published"
    ring.publish(2, tag=7)
    slot[0] = 9
    assert receive(reader) == ([9, 2], 7)
    assert not reader.has_message()
