"""Breaks messages for fuzz_codec.py: decodes a valid one, changes a few values, encodes it again.

A mutation keeps most of a message valid, so that it passes the first checks, which random bytes hardly
ever do. Values are replaced by ones that break decoders: wrong lengths, deep nesting, limits of the
number ranges, wrong types, other tags. After that the bytes themselves may be cut, flipped and spliced.
The given ``Random`` is the only source of randomness: equal state gives equal bytes.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec

# As msgpack: heads that promise more than comes, depth, duplicates, extensions, impossible text.
_RAW = tuple(
    msgspec.Raw(data)
    for data in (
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 elements
        b"\xdf\xff\xff\xff\xff",  # a map of as many
        b"\xc6\xff\xff\xff\xff",  # bytes
        b"\xdb\x7f\xff\xff\xff",  # text
        b"\xc9\xff\xff\xff\xff\x05",  # an extension
        b"\xdc\xff\xff" + b"\xc0" * 40,
        b"\x91" * 3000 + b"\xc0",
        b"\x81\xa1a" * 3000 + b"\xc0",
        b"\x82\xa4type\xa4Ping\xa4type\xa4Exit",  # a key twice
        b"\x81\x80\x01",  # a map as a key
        b"\x81\x91\x90\x01",
        b"\xd4\x05x",
        b"\xd7\xff" + b"\xff" * 8,  # timestamps
        b"\xc7\x0c\xff" + b"\xff" * 12,
        b"\xa3\xed\xa0\x80",  # a lone surrogate
        b"\xa2\xc0\x80",  # overlong
        b"\xc1",  # a byte that msgpack never uses
        b"",
    )
)
_PLAIN: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 127, 255, 65536, 2**31, 2**63 - 1, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 1e308, 5e-324, "", "a", "\0", "\ud7ff", "é" * 50, "a\nb=c", "x" * 5000),
    *([], {}, [[]], {"": None}, [None] * 300, {"type": "Done"}, "../..", "/dev/zero", "%s%n"),
)
_NOT_JSON: tuple[Any, ...] = (b"", b"\0", b"\xff" * 300, float("nan"), float("inf"), -float("inf"))
_KEYS = ("type", "", "__class__", "self", "order", "version", "body", "x" * 300)
_HEADS = (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc1")


def mutate(rng: Random, message: bytes, others: list[bytes], names: tuple[str, ...]) -> bytes:
    """A msgpack message near ``message``. ``names`` are tags and field names worth trying."""
    kind = rng.random()
    if kind < 0.05:
        return rng.randbytes(int(rng.expovariate(1 / 60)))
    data = message
    if kind < 0.85:
        tree = msgspec.msgpack.decode(message)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            tree = _change(rng, tree, names, _PLAIN + _NOT_JSON + _RAW)
        data = msgspec.msgpack.encode(tree)
    if kind >= 0.7:
        for _ in range(rng.choice((1, 1, 2, 5))):
            data = _change_bytes(rng, data, others)
    return data


def mutate_json(rng: Random, message: bytes, others: list[bytes], names: tuple[str, ...]) -> bytes:
    """The same for JSON."""
    kind = rng.random()
    if kind < 0.05:
        return rng.randbytes(int(rng.expovariate(1 / 60)))
    data = message
    if kind < 0.85:
        tree = _change(rng, json.loads(message), names, _PLAIN)
        data = json.dumps(tree).encode()
    if kind >= 0.7:
        data = _change_bytes(rng, data, others)
    if rng.random() < 0.01:
        data = data.replace(b":", b":" + b"[" * rng.choice((10, 5000, 200_000)), 1)
    return data


def _change(rng: Random, node: Any, names: tuple[str, ...], nasty: tuple[Any, ...]) -> Any:
    """A copy of ``node`` with one change somewhere in it."""
    if isinstance(node, dict) and node and rng.random() < 0.95:
        return _change_map(rng, node, names, nasty)
    if isinstance(node, list) and node and rng.random() < 0.9:
        return _change_list(rng, node, names, nasty)
    if isinstance(node, bytes) and rng.random() < 0.7:
        return _change_inside(rng, node, names, nasty)
    if isinstance(node, str) and rng.random() < 0.4:
        return rng.choice(names)
    if type(node) is int and rng.random() < 0.4:
        return min(max(node + rng.choice((-1, 1, -(2**31), 2**31)), -(2**63)), 2**64 - 1)
    if rng.random() < 0.1:
        value = rng.choice(nasty)
        return [value] * rng.choice((1, 3, 100))
    return rng.choice(nasty)


def _change_map(rng: Random, node: dict[Any, Any], names: tuple[str, ...], nasty: Any) -> Any:
    changed, key = dict(node), rng.choice(list(node))
    act = rng.random()
    if act < 0.75:
        changed[key] = _change(rng, node[key], names, nasty)
    elif act < 0.85:
        del changed[key]
    elif act < 0.9:
        changed[rng.choice(names)] = changed.pop(key)
    elif act < 0.95:
        changed[rng.choice(names + _KEYS)] = rng.choice(nasty)
    else:
        other = rng.choice(list(node))
        changed[key], changed[other] = changed[other], changed[key]
    return changed


def _change_list(rng: Random, node: list[Any], names: tuple[str, ...], nasty: Any) -> Any:
    at, act = rng.randrange(len(node)), rng.random()
    if act < 0.6:
        return [*node[:at], _change(rng, node[at], names, nasty), *node[at + 1 :]]
    if act < 0.7:
        return node[:at] + node[at + 1 :]
    if act < 0.9:
        return node + [node[at]] * rng.choice((1, 2, 200))
    return [*node, rng.choice(nasty)]


def _change_inside(rng: Random, node: bytes, names: tuple[str, ...], nasty: Any) -> Any:
    """A message within a message (a frame's body)."""
    try:
        tree = msgspec.msgpack.decode(node)
        return msgspec.msgpack.encode(_change(rng, tree, names, nasty))
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return _change_bytes(rng, node, [node])


def _change_bytes(rng: Random, data: bytes, others: list[bytes]) -> bytes:
    if not data:
        return rng.randbytes(3)
    at, act = rng.randrange(len(data)), rng.randrange(8)
    if act == 0:
        return data[:at]
    if act == 1:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if act == 2:
        return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
    if act == 3:
        return data[:at] + data[at + rng.randrange(1, 9) :]
    if act == 4:
        other = rng.choice(others)
        return data[:at] + other[rng.randrange(len(other)) :]
    if act == 5:
        return data[:at] + rng.choice(_HEADS) + data[at + 1 :]
    if act == 6:
        end = at + rng.randrange(1, 40)
        return data[:end] + data[at:end] * rng.choice((1, 3, 50)) + data[end:]
    return data + rng.choice((data, b"\0", rng.choice(others)))
