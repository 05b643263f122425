"""Frames of a tensor stream: each opens once, at its place, in its stream, as it was sent."""

import pytest

from realsys.data.transfer.sealed_frames import (
    TAG_BYTES,
    FrameOpener,
    FrameSealer,
    hello,
    is_hello,
    new_offer,
    place_of,
    stream_of,
)

FRAMES = [bytes([n]) * 1000 for n in range(3)]
PLACES = [place_of(0, 1000 * n, 3000) for n in range(3)]


def sealed(key, frames=FRAMES):
    sealer = FrameSealer(key)
    found = []
    for frame, place in zip(frames, PLACES, strict=True):
        out = memoryview(bytearray(len(frame) + TAG_BYTES))
        assert sealer.seal(memoryview(frame), place, out) == len(out)
        found.append(bytes(out))
    return found


def opened(key, frames, places=PLACES):
    """What comes out, up to the first frame that does not open."""
    opener, found = FrameOpener(key), []
    for frame, place in zip(frames, places, strict=False):
        out = memoryview(bytearray(len(frame) - TAG_BYTES))
        if not opener.open(memoryview(frame), place, out):
            break
        found.append(bytes(out))
    return found


def test_frames_open_as_they_were_and_say_nothing_on_the_way():
    key = new_offer(1).key
    there = sealed(key)
    assert opened(key, there) == FRAMES
    assert not any(frame[:8] in b"".join(there) for frame in FRAMES)
    assert len(set(sealed(key, [FRAMES[0]] * 3))) == 3  # equal frames look different


@pytest.mark.parametrize(
    ("order", "good"),
    [((0, 2, 1), 1), ((0, 0, 1), 1), ((1, 2), 0), ((0, 2), 1), ((2,), 0)],
    ids=["swapped", "repeated", "first_missing", "one_missing", "last_alone"],
)
def test_a_frame_opens_only_in_its_turn(order, good):
    key = new_offer(1).key
    there = sealed(key)
    assert opened(key, [there[i] for i in order]) == FRAMES[:good]


@pytest.mark.parametrize("at", [0, 500, 999, 1000, 1015])
def test_one_changed_bit_is_noticed(at):
    key = new_offer(1).key
    there = sealed(key)
    changed = bytearray(there[1])
    changed[at] ^= 1
    assert opened(key, [there[0], bytes(changed), there[2]]) == FRAMES[:1]


def test_a_frame_opens_at_its_place_in_its_message_only():
    key = new_offer(1).key
    others = (place_of(1, 0, 3000), place_of(0, 1, 3000), place_of(0, 0, 2999))
    for other in others:
        assert opened(key, sealed(key), [other]) == []


def test_a_frame_of_another_stream_does_not_open():
    assert opened(new_offer(1).key, sealed(new_offer(1).key)) == []


def test_a_hello_proves_the_key_of_its_stream():
    mine, other = new_offer(1), new_offer(1)
    said = hello(mine)
    assert stream_of(said) == mine.stream
    assert is_hello(said, mine)
    assert not is_hello(said, other)
    assert not is_hello(hello(other), mine)
    for i in range(len(said)):
        changed = bytearray(said)
        changed[i] ^= 1
        assert not is_hello(bytes(changed), mine)
    assert stream_of(said[:-1]) is None
    assert stream_of(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") is None


def test_an_offer_in_a_log_gives_no_key_away():
    offer = new_offer(40123)
    assert str(offer) == repr(offer) == "StreamOffer(port=40123)"
