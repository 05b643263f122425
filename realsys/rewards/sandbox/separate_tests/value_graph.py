"""Values of Python's own types as JSON, for two processes of which one does not trust the other.

Plain data alone: reading a message makes lists, numbers and the like, and runs nothing of the sender's.
What is no plain value stays where it is, and goes as a number (remote_objects.py). Containers are nodes of
a graph: what is one object for the sender is one for the reader, and what the reader changes can be sent
back.

    scalar                null, true, 1, 1.5, "text"; tagged ["i", "0x…"], ["f", "nan"], ["b", "latin-1"] …
    container, object     [number of its node]
    node                  [kind, content …]
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import functools
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

_INT_BITS = 63
_DTYPE = re.compile(r"[<>|=]?[biufcSU][0-9]{1,4}")
_DATES: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "time": datetime.time.fromisoformat,
}
_MUTABLE: tuple[type, ...] = (
    *(list, dict, set, bytearray, collections.deque, collections.OrderedDict),
    *(collections.defaultdict, collections.Counter),
)
_ITEMS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_DICTS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "odict",
    collections.Counter: "counter",
    collections.defaultdict: "ddict",
}
# Classes that a message may name. Not type and object: calling what they give could make anything.
PLAIN_CLASSES: dict[str, type] = {
    name: found
    for name, found in vars(builtins).items()
    if isinstance(found, type)
    and (
        found
        in (int, float, complex, bool, str, bytes, bytearray, list, tuple, dict, set, frozenset)
    )
}
PLAIN_CLASSES["NoneType"] = type(None)


class ObjectTable(Protocol):
    """What knows the objects that are no plain values."""

    def node_of(self, value: Any) -> list[Any]:
        """Returns the node of an object, whose content is JSON."""
        ...

    def object_of(self, node: list[Any]) -> Any:
        """Returns what a node stands for. Raises ValueError: nothing."""
        ...


class GraphWriter:
    """Writes one message. ``changeable``: numbers of nodes that a reader may change, with their objects."""

    def __init__(self, table: ObjectTable) -> None:
        self._table = table
        self.nodes: list[list[Any]] = []
        self.changeable: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # an id is of one object while it lives
        self._to_do: list[tuple[int, Any]] = []

    def write(self, value: Any) -> Any:
        """Returns a value as JSON; its nodes are in ``nodes``."""
        found = self._inline(value)
        while self._to_do:
            number, container = self._to_do.pop()
            self.nodes[number] = self._node(container)
        return found

    def _inline(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if value.bit_length() <= _INT_BITS else ["i", hex(value)]
        if kind is float:
            return value if value - value == 0 else ["f", repr(value)]
        if kind is complex:
            return ["c", repr(value.real), repr(value.imag)]
        if kind is bytes:
            return ["b", value.decode("latin-1")]
        if value is ...:
            return ["..."]
        if (plain := _plain_scalar(value)) is not value:
            return self._inline(plain)
        number = self._numbers.get(id(value))
        if number is None:
            number = len(self.nodes)
            self.nodes.append([])
            self._numbers[id(value)] = number
            self._kept.append(value)
            self._to_do.append((number, value))
            if is_changeable(value):
                self.changeable[number] = value
        return [number]

    def _node(self, value: Any) -> list[Any]:
        kind = type(value)
        if name := _ITEMS.get(kind):
            return [name, self._items(value)]
        if name := _DICTS.get(kind):
            return [name, self._items([part for pair in value.items() for part in pair])]
        if kind is bytearray:
            return ["bytearray", value.decode("latin-1")]
        if kind is collections.deque:
            return ["deque", value.maxlen, self._items(value)]
        if kind in (range, slice):
            return [kind.__name__, *map(self._inline, (value.start, value.stop, value.step))]
        if kind.__name__ in _DATES and kind.__module__ == "datetime":
            return ["when", kind.__name__, value.isoformat()]
        if kind is datetime.timedelta:
            return ["delta", value.days, value.seconds, value.microseconds]
        if isinstance(value, pathlib.PurePath):
            return ["path", str(value)]
        if kind is decimal.Decimal:
            return ["decimal", str(value)]
        if kind is fractions.Fraction:
            return ["fraction", hex(value.numerator), hex(value.denominator)]
        if isinstance(value, tuple):
            fields = getattr(kind, "_fields", ())
            named = [kind.__name__, list(fields)] if fields else []
            return ["named", *named, self._items(value)] if named else ["tuple", self._items(value)]
        if _is_array(value) and _DTYPE.fullmatch(value.dtype.str):
            raw = value.tobytes().decode("latin-1")
            return ["array", value.dtype.str, list(value.shape), raw]
        if isinstance(value, type) and PLAIN_CLASSES.get(value.__name__) is value:
            return ["class", value.__name__]
        return self._table.node_of(value)

    def _items(self, values: Iterable[Any]) -> list[Any]:
        return [self._inline(value) for value in values]


class GraphReader:
    """Reads one message.

    Args:
        reuse: number of a node → the object that it is of, which gets its content.
    """

    def __init__(
        self, table: ObjectTable, nodes: list[Any], reuse: Mapping[int, Any] | None = None
    ) -> None:
        self._table, self._nodes, self._reuse = table, nodes, dict(reuse or {})
        self.made: dict[int, Any] = {}
        self._open: set[int] = set()
        self._to_fill: list[tuple[Any, list[Any]]] = []

    def read(self, value: Any) -> Any:
        """Returns a value. Raises ValueError, TypeError, LookupError: it is no such message."""
        found = self._inline(value)
        while self._to_fill:
            target, node = self._to_fill.pop()
            self._fill(target, node)
        return found

    def _inline(self, value: Any) -> Any:
        if not isinstance(value, list):
            if isinstance(value, dict):
                raise ValueError("no value of a message")
            return value
        head = value[0]
        if type(head) is int:
            return self._of_node(head)
        match head:
            case "i":
                return int(value[1], 16)
            case "f":
                return float(value[1])
            case "c":
                return complex(float(value[1]), float(value[2]))
            case "b":
                return value[1].encode("latin-1")
            case "...":
                return ...
        raise ValueError("no value of a message")

    def _of_node(self, number: int) -> Any:
        if number in self.made:
            return self.made[number]
        if number in self._open or number < 0:
            raise ValueError("a value that holds itself and can't")
        self._open.add(number)
        made = self.made[number] = self._made(number, self._nodes[number])
        return made

    def _made(self, number: int, node: list[Any]) -> Any:
        empty = self._empty(node)
        if empty is not None:
            target = self._reuse.get(number, empty)
            if type(target) is not type(empty):
                raise ValueError("a container of another type came back")
            self._to_fill.append((target, node))
            return target
        match node[0]:
            case "tuple":
                return tuple(self._inline(item) for item in node[1])
            case "frozenset":
                return frozenset(self._inline(item) for item in node[1])
            case "named":
                return _named_tuple(node[1], tuple(node[2]))(*map(self._inline, node[3]))
            case "range":
                return range(*map(self._inline, node[1:]))
            case "slice":
                return slice(*map(self._inline, node[1:]))
            case "when":
                return _DATES[node[1]](node[2])
            case "delta":
                return datetime.timedelta(node[1], node[2], node[3])
            case "path":
                return pathlib.Path(node[1])
            case "decimal":
                return decimal.Decimal(node[1])
            case "fraction":
                return fractions.Fraction(int(node[1], 16), int(node[2], 16))
            case "class":
                return PLAIN_CLASSES[node[1]]
            case "array":
                return self._array(number, node)
        return self._table.object_of(node)

    @staticmethod
    def _empty(node: list[Any]) -> Any:
        match node[0]:
            case "list":
                return []
            case "dict":
                return {}
            case "set":
                return set()
            case "bytearray":
                return bytearray()
            case "deque":
                return collections.deque(maxlen=node[1])
            case "odict":
                return collections.OrderedDict()
            case "counter":
                return collections.Counter()
            case "ddict":
                return collections.defaultdict()
        return None

    def _fill(self, target: Any, node: list[Any]) -> None:
        """Gives a container its content; all that its items are made of can be made by now."""
        if isinstance(target, bytearray):
            target[:] = node[1].encode("latin-1")
            return
        items = [self._inline(item) for item in node[-1]]
        if isinstance(target, list):
            target[:] = items
            return
        target.clear()
        if isinstance(target, dict):
            for key, item in zip(items[::2], items[1::2], strict=True):
                target[key] = item
        elif isinstance(target, set):
            target.update(items)
        else:
            target.extend(items)

    def _array(self, number: int, node: list[Any]) -> Any:
        import numpy as np

        if not _DTYPE.fullmatch(node[1]):
            raise ValueError("no array of numbers or texts")
        flat = np.frombuffer(node[3].encode("latin-1"), dtype=np.dtype(node[1]))
        made = flat.reshape([int(size) for size in node[2]]).copy()
        target = self._reuse.get(number)
        if target is None or target.shape != made.shape or target.dtype != made.dtype:
            return made
        target[...] = made
        return target


def base_value(value: Any) -> Any:
    """Returns what an object is as a value of Python's own types; itself if it is none.

    Of a program's class that extends ``list``, say, or a dictionary's view.
    """
    kinds: tuple[Any, ...] = (list, set, frozenset, tuple, collections.deque)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(kind.__iter__(value))
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, type({}.keys()) | type({}.items())):
        try:
            return set(value)
        except TypeError:
            return value
    return value


def is_changeable(value: Any) -> bool:
    """Returns whether a value is a container that its reader may change."""
    return type(value) in _MUTABLE or _is_array(value)


def _plain_scalar(value: Any) -> Any:
    """Returns a number or text of a class that extends one as such; else the value itself."""
    if isinstance(value, int) and type(value) is not int:
        return int.__add__(value, 0)
    if isinstance(value, float):
        return float.__add__(value, 0.0)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(memoryview(value))
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not _is_array(value):
        found = value.item()
        return found if isinstance(found, bool | int | float | complex | str | bytes) else value
    return value


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is getattr(numpy, "ndarray", None)


@functools.lru_cache(maxsize=256)
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    return collections.namedtuple(name, fields)  # which checks the names
