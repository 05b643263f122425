"""Two processes that use each other's objects: a test, which is trusted, and a program, which is not.

    exchange = ObjectExchange(connection, Side.TEST)
    add = exchange.call("name", "add")      # a RemoteObject
    assert add(1, 2) == 3               # runs there; 3 comes back as a plain value

What is no plain value (value_graph.py) stays in its process and is used from the other by requests. So
that a program can't decide what a test compares, on the test's side

- a value of the test's and an object of the program's meet in no operator that the program carries out:
  it is carried out here, with what the object is as a value of Python's own types, if it is one;
- of the test's objects the program may call functions and use instances by public names and operators.

Errors cross as those of Python's own classes, or as a class of the same name made here.
"""

from __future__ import annotations

import builtins
import copy
import enum
import importlib
import io
import json
import math
import operator
import random
import re
import socket
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

from realsys.rewards.sandbox.separate_tests.value_graph import (
    GraphReader,
    GraphWriter,
    base_value,
    is_changeable,
)

_LENGTH = struct.Struct("<Q")
_MOST_BYTES = 256 << 20  # of a message; the box's memory is the limit that counts
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name)
    for name in (
        *("__add__", "__sub__", "__mul__", "__matmul__", "__truediv__", "__floordiv__", "__mod__"),
        *("__pow__", "__lshift__", "__rshift__", "__and__", "__xor__", "__or__"),
        *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
    )
}
_BINARY["__divmod__"] = divmod
_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_UNARY: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in (
        *("__neg__", "__pos__", "__abs__", "__invert__", "__index__"),
        *("__getitem__", "__setitem__", "__delitem__"),
    )
}
_UNARY |= {"__int__": int, "__float__": float, "__complex__": complex, "__round__": round}
_UNARY |= {"__len__": len, "__bool__": bool, "__iter__": iter, "__next__": next, "__hash__": hash}
_UNARY |= {"__str__": str, "__repr__": repr, "__format__": format, "__bytes__": bytes}
_UNARY |= {"__reversed__": reversed, "__dir__": dir}
_UNARY |= {"__trunc__": math.trunc, "__floor__": math.floor, "__ceil__": math.ceil}
_UNARY["__enter__"] = lambda made: made.__enter__()
_UNARY["__exit__"] = lambda made, *why: made.__exit__(*why)
# What a value of Python's own is asked for in a test, with a part of what is expected as argument.
_VERDICTS = ("startswith", "endswith", "issubset", "issuperset", "isdisjoint", "equals")
_TESTING = ("unittest", "pytest", "_pytest")
_HARMLESS = ("__name__", "__qualname__", "__doc__", "__module__")
_ALIASES = {
    "np": "numpy",
    "pd": "pandas",
    "sp": "scipy",
    "nx": "networkx",
    "plt": "matplotlib.pyplot",
}


class Side(enum.Enum):
    """Of which process a exchange is."""

    TEST = "test"
    PROGRAM = "program"


class OtherEnded(BaseException):
    """The other process closed the connection; no Exception, which a test could take for an answer."""


class RemoteObject:
    """An object of the other process. Operators are carried out there, if its exchange lets them."""

    __slots__ = ("_exchange", "_number")

    def __init__(self, exchange: ObjectExchange, number: int) -> None:
        object.__setattr__(self, "_exchange", exchange)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        exchange: ObjectExchange = object.__getattribute__(self, "_exchange")
        return exchange.attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        exchange: ObjectExchange = object.__getattribute__(self, "_exchange")
        exchange.call("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        exchange: ObjectExchange = object.__getattribute__(self, "_exchange")
        exchange.call("delete", self, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        exchange: ObjectExchange = object.__getattribute__(self, "_exchange")
        return exchange.call("call", self, list(arguments), named)

    def __contains__(self, item: Any) -> bool:
        # Item by item, and compared here: of the test's value the other process gets to know nothing.
        items: Any = self  # its operators are set below
        return any(item is other or item == other for other in items)

    def __copy__(self) -> Any:
        exchange: ObjectExchange = object.__getattribute__(self, "_exchange")
        return exchange.call("copy", self)

    def __deepcopy__(self, _: Any) -> Any:
        exchange: ObjectExchange = object.__getattribute__(self, "_exchange")
        return exchange.call("deepcopy", self)

    def __instancecheck__(self, value: Any) -> bool:
        exchange: ObjectExchange = object.__getattribute__(self, "_exchange")
        return bool(exchange.call("isinstance", value, self))

    def __subclasscheck__(self, value: Any) -> bool:
        exchange: ObjectExchange = object.__getattribute__(self, "_exchange")
        return bool(exchange.call("issubclass", value, self))


def _binary(name: str, *, reflected: bool) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        exchange: ObjectExchange = object.__getattribute__(self, "_exchange")
        return exchange.operate(name, self, other, reflected=reflected)

    return method


def _unary(name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any) -> Any:
        exchange: ObjectExchange = object.__getattribute__(self, "_exchange")
        return exchange.call("operate", name, self, *arguments)

    return method


for _name in _UNARY:
    setattr(RemoteObject, _name, _unary(_name))
for _name in _BINARY:
    setattr(RemoteObject, _name, _binary(_name, reflected=False))
    if _name not in _COMPARISONS:
        setattr(RemoteObject, f"__r{_name[2:]}", _binary(_name, reflected=True))
RemoteObject.__array_ufunc__ = None  # type: ignore[attr-defined]  # else numpy would take it for a scalar


class ObjectExchange:
    """One end of the connection.

    Args:
        wait: called before more of a message is read; blocks until it is there.
    """

    def __init__(
        self,
        connection: socket.socket,
        side: Side,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection, self._side, self._wait = connection, side, wait
        self._names: dict[str, Any] = {}  # of the program
        self._flush: Callable[[], None] = lambda: None
        self._objects: list[Any] = []  # used by the other process, by their numbers
        self._numbers: dict[int, int] = {}
        self._remote: dict[int, Any] = {}
        self._classes: dict[tuple[str, str], type[BaseException]] = {}

    # ---- requests -----------------------------------------------------------------------------

    def call(self, what: str, *arguments: Any) -> Any:
        """Asks for something and returns it; serves requests of the other process meanwhile.

        Raises:
            OtherEnded: the connection is closed. Others: what the other process raised.
        """
        writer = GraphWriter(self)
        root = writer.write(list(arguments))
        self._send({"what": what, "root": root, "nodes": writer.nodes})
        while True:
            message = self._receive()
            if "what" not in message:
                return self._answer(what, message, writer.changeable)
            self._serve(message)

    def serve_names(self, names: dict[str, Any], flush: Callable[[], None]) -> None:
        """Serves a test that uses a program's global names, until it closes the connection.

        Args:
            flush: called before each reply.
        """
        self._names, self._flush = names, flush
        try:
            while True:
                self._serve(self._receive())
        except OtherEnded:
            pass

    def _answer(self, what: str, message: dict[str, Any], changeable: dict[int, Any]) -> Any:
        reuse = {
            int(there): changeable[int(number)]
            for number, there in message.get("changed", ())
            if number in changeable
        }
        reader = GraphReader(self, message["nodes"], reuse)
        if "error" in message:
            raise self._error(what, message["error"], reader)
        result, _ = reader.read(message["root"])
        return result

    def _serve(self, message: dict[str, Any]) -> None:
        writer = GraphWriter(self)
        try:
            reader = GraphReader(self, message["nodes"])
            arguments = reader.read(message["root"])
            done = self._done(message["what"], arguments)
            # Node 0 is the list of arguments, which is none of the sender's own.
            changed = {n: made for n, made in reader.made.items() if n and is_changeable(made)}
            root = writer.write([done, list(changed.values())])
            places = [[number, writer.write(made)[0]] for number, made in changed.items()]
            reply = {"root": root, "nodes": writer.nodes, "changed": places}
        except OtherEnded:
            raise
        except BaseException as error:  # the other process gets it
            reply = self._error_reply(error)
        self._flush()
        self._send(reply)

    def _done(self, what: str, arguments: list[Any]) -> Any:
        """Carries out a request. What a program may ask a test for is less than the reverse."""
        if self._side is Side.PROGRAM:
            match what:
                case "ready":
                    return None
                case "name":
                    if (name := arguments[0]) not in self._names:
                        raise NameError(name)
                    return self._names[name]
                case "names":
                    return [name for name in self._names if not name.startswith("_")]
                case "isinstance":
                    return isinstance(*arguments)
                case "issubclass":
                    return issubclass(*arguments)
                case "copy":
                    return copy.copy(arguments[0])
                case "deepcopy":
                    return copy.deepcopy(arguments[0])
                case "base":
                    found = base_value(arguments[0])
                    return [] if found is arguments[0] else [found]
        match what:
            case "call":
                function, positional, named = arguments
                return function(*positional, **named)
            case "get":
                self._check_name(*arguments)
                return getattr(*arguments)
            case "set":
                self._check_name(*arguments[:2])
                if self._side is Side.TEST and callable(
                    getattr(type(arguments[0]), arguments[1], None)
                ):
                    raise AttributeError("a test's methods are not the program's to replace")
                setattr(*arguments)
                return None
            case "delete":
                self._check_name(*arguments)
                delattr(*arguments)
                return None
            case "operate":
                name, *operands = arguments
                return (_UNARY.get(name) or _BINARY[name])(*operands)
        raise ValueError(f"no request {what!r}")

    def _check_name(self, owner: Any, name: str) -> None:
        """Refuses a program the ways from a test's object to its code, frames and globals."""
        if self._side is Side.PROGRAM:
            return
        kind = type(owner)
        is_known = kind in _SHOWN_TO_PROGRAMS or kind.__module__ == "__main__"
        is_shown = is_known and not name.startswith("_")
        if not is_shown and not (
            kind is types.GeneratorType and name in ("send", "close", "throw")
        ):
            raise AttributeError(f"a test's {kind.__name__} shows a program no {name}")

    def attribute(self, owner: RemoteObject, name: str) -> Any:
        """Returns an attribute of a remote object. Raises AttributeError: it has none, or it is refused."""
        if self._side is Side.TEST:
            if name in _VERDICTS:
                raise AttributeError(
                    f"{name} of an object of the program's: it would say itself what is right"
                )
            if name.startswith("__") and name not in _HARMLESS:
                raise AttributeError(name)
        return self.call("get", owner, name)

    def operate(self, name: str, mine: RemoteObject, other: Any, *, reflected: bool) -> Any:
        """Carries out a binary operator, here or there.

        Raises:
            TypeError: it is one of an object of the program's and a value of the test's.
        """
        operation = _BINARY[name]
        if isinstance(other, RemoteObject) or self._side is Side.PROGRAM:
            if mine is other and name == "__eq__":
                return True
            pair = (other, mine) if reflected else (mine, other)
            return self.call("operate", name, *pair)
        if base := self.call("base", mine):
            return operation(other, base[0]) if reflected else operation(base[0], other)
        if name in ("__eq__", "__ne__"):
            return name == "__ne__"
        raise TypeError(
            f"{name} of an object of the program's and a value of the test's: a test's values are compared "
            "outside of the program, so let it give a number, text, list …"
        )

    # ---- objects ------------------------------------------------------------------------------

    def node_of(self, value: Any) -> list[Any]:
        """As ``ObjectTable``."""
        if type(value) is RemoteObject:
            return ["yours", object.__getattribute__(value, "_number")]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if self._side is Side.TEST and (named := _public_name(value)):
            return ["global", *named]
        if (
            self._side is Side.PROGRAM
            and isinstance(value, type)
            and issubclass(value, BaseException)
        ):
            return ["exception", _lineage(value)]
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return ["mine", number]

    def object_of(self, node: list[Any]) -> Any:
        """As ``ObjectTable``."""
        match node:
            case ["yours", int(number)] if 0 <= number < len(self._objects):
                return self._objects[number]
            case ["mine", int(number)]:
                if number not in self._remote:
                    self._remote[number] = RemoteObject(self, number)
                return self._remote[number]
            case ["module", str(name)]:
                return _Module(name)
            case ["global", str(module), str(name)] if self._side is Side.PROGRAM:
                found: Any = importlib.import_module(module)
                for part in name.split("."):
                    found = getattr(found, part)
                return found
            case ["exception", list(lineage)] if self._side is Side.TEST:
                return self._exception_class(lineage)
        raise ValueError("a message stands for no object")

    # ---- errors -------------------------------------------------------------------------------

    def _error_reply(self, error: BaseException) -> dict[str, Any]:
        """Returns an error as a reply."""
        try:
            text = str(error)
        except Exception:  # of a class of the program's
            text = ""
        writer = GraphWriter(self)
        try:
            arguments = writer.write(list(error.args))
        except Exception:
            writer = GraphWriter(self)
            arguments = writer.write([text])
        fields = {
            "lineage": _lineage(type(error)),
            "arguments": arguments,
            "text": text,
            "number": self.node_of(error)[1],
            "own": getattr(error, "__dict__", {}).get("_remote_number"),
        }
        return {"error": fields, "nodes": writer.nodes}

    def _error(self, what: str, fields: dict[str, Any], reader: GraphReader) -> BaseException:
        own = fields.get("own")
        if type(own) is int and 0 <= own < len(self._objects):
            found = self._objects[own]
            if isinstance(found, BaseException):  # raised here, and only passed on there
                return found
        arguments = reader.read(fields["arguments"])
        kind = self._exception_class(fields["lineage"])
        if self._side is Side.TEST and issubclass(kind, StopIteration) and what == "call":
            # ``all(map(is_right, cases))`` of a test would end there, and be true.
            kind = RuntimeError
        try:
            made = kind(*arguments)
        except Exception:
            made = kind.__new__(kind)
            made.args = tuple(arguments)
        made.__dict__["_remote_number"] = fields["number"]
        made.__dict__["_remote"] = RemoteObject(self, fields["number"])
        made.__dict__["_remote_text"] = str(fields["text"])
        return made

    def _exception_class(self, lineage: list[Any]) -> type[BaseException]:
        """Returns Python's own class, or makes one of this name, once, that extends such."""
        module, name = str(lineage[0][0]), str(lineage[0][1])
        own = getattr(builtins, name, None) if module == "builtins" else None
        is_testing = module.partition(".")[0] in _TESTING  # a skipped test is a good one
        if own is None and module != "__main__" and module in sys.modules and not is_testing:
            own = getattr(sys.modules[module], name, None)
        if isinstance(own, type) and issubclass(own, BaseException):
            return own
        if len(lineage) == 1:
            return Exception
        if (module, name) not in self._classes:
            base = self._exception_class(lineage[1:])
            made = type(name, (_OfProgram, base), {"__module__": module})
            self._classes[module, name] = made
        return self._classes[module, name]

    # ---- messages -----------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        try:
            self._connection.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise OtherEnded from error

    def _receive(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _MOST_BYTES:
            raise OtherEnded
        found = json.loads(self._exactly(length))
        if not isinstance(found, dict):
            raise OtherEnded
        return found

    def _exactly(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            self._wait()
            try:
                piece = self._connection.recv(min(length - len(received), 1 << 20))
            except OSError as error:
                raise OtherEnded from error
            if not piece:
                raise OtherEnded
            received += piece
        return bytes(received)

    def named(self, name: str) -> Any:
        """Returns a global of the program's; a module as it is here. Raises KeyError: it has none."""
        if name.startswith("__"):
            raise KeyError(name)
        try:
            found = self.call("name", name)
        except NameError:
            raise KeyError(name) from None
        if not isinstance(found, _Module):
            return found
        if found.name.rpartition(".")[2] != name and _ALIASES.get(name) != found.name:
            raise KeyError(name)
        return importlib.import_module(found.name)


# Of a test's objects those of its own classes, and these: others lead to files, frames or code.
_SHOWN_TO_PROGRAMS = (io.StringIO, io.BytesIO, random.Random, re.Pattern, re.Match)


class _Module:
    """A module of the other process."""

    def __init__(self, name: str) -> None:
        self.name = name


class _OfProgram(BaseException):
    """What an exception of a class of the program's can do in a test."""

    def __str__(self) -> str:
        text: str | None = self.__dict__.get("_remote_text")
        return super().__str__() if text is None else text

    def __getattr__(self, name: str) -> Any:
        remote = self.__dict__.get("_remote")
        if remote is None or name.startswith("_"):
            raise AttributeError(name)
        return getattr(remote, name)


def _lineage(kind: type) -> list[list[str]]:
    """Returns module and name of an exception's class and of those it extends, up to Python's own."""
    found = []
    for base in kind.__mro__:
        if issubclass(base, BaseException):
            found.append([str(base.__module__), str(base.__name__)])
            if base.__module__ == "builtins":
                break
    return found


def _public_name(value: Any) -> tuple[str, str] | None:
    """Returns module and name by which the other process finds the same function or class."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(value, type | types.BuiltinFunctionType | types.FunctionType):
        return None
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return (module, name) if found is value else None
