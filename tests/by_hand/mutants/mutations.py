"""Faults that may be planted in a source file: one changed place of its syntax tree each.

Left out is what no test should hold: annotations, decorators, docstrings, imports, texts and log lines.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGS = ("log", "logger", "logging", "warnings")
_UNREAD = {"decorator_list", "annotation", "returns", "type_comment", "format_spec", "type_params"}


@dataclass(frozen=True)
class Place:
    """A node that may be replaced: ``setattr(parent, field, new)``, or its item ``index``."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST
    inside: bool  # in the body of a function: it need not be imported anew

    def put(self, new: ast.AST) -> None:
        """Puts ``new`` in the node's place."""
        ast.fix_missing_locations(ast.copy_location(new, self.node))
        if self.index is None:
            setattr(self.parent, self.field, new)
        else:
            getattr(self.parent, self.field)[self.index] = new


@dataclass(frozen=True)
class Mutant:
    """A fault in a file.

    Attributes:
        number: its place among the file's mutants.
        text: its line in the source, without blanks around it.
        change: what is there, and what instead: ``a < b → a <= b``.
        inside: it is in the body of a function.
    """

    number: int
    line: int
    kind: str
    text: str
    change: str
    inside: bool


def mutants_of(source: str) -> list[Mutant]:
    """Finds all faults that may be planted in ``source``, in the order of its lines."""
    lines = source.splitlines()
    return [
        Mutant(
            number,
            place.node.lineno,
            kind,
            lines[place.node.lineno - 1].strip(),
            f"{_text(place.node)} → {_text(new)}",
            place.inside,
        )
        for number, (kind, place, new) in enumerate(_changes(ast.parse(source)))
    ]


def mutated(source: str, number: int) -> ast.Module:
    """Plants fault ``number`` of ``mutants_of(source)``; other lines stay where they are."""
    tree = ast.parse(source)
    for i, (_, place, new) in enumerate(_changes(tree)):
        if i == number:
            place.put(new)
            return tree
    raise IndexError(f"mutant {number}")


def _changes(tree: ast.Module) -> Iterator[tuple[str, Place, ast.AST]]:
    for place in _places(tree, inside=False):
        for kind, new in _of_node(place.node, place):
            yield kind, place, new


def _places(node: ast.AST, *, inside: bool) -> Iterator[Place]:
    for field, value in ast.iter_fields(node):
        is_body = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and (
            field == "body"
        )
        if field in _UNREAD or (field == "test" and _is_for_types(node)):
            continue
        several = isinstance(value, list)
        for index, child in enumerate(value if several else [value]):
            if not isinstance(child, ast.AST) or _is_untested(child):
                continue
            place = Place(node, field, index if several else None, child, inside or is_body)
            if hasattr(child, "lineno"):
                yield place
            yield from _places(child, inside=place.inside)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _is_untested(node: ast.AST) -> bool:
    """Is this an import, a docstring, an assertion for the type checker, or a line of a log?"""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert) or _is_for_types(node):
        return True
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("__"):
        return True
    if not isinstance(node, ast.Expr):
        return False
    called = node.value.func if isinstance(node.value, ast.Call) else None
    is_log = isinstance(called, ast.Attribute) and ast.unparse(called.value).lstrip("_") in _LOGS
    return isinstance(node.value, ast.Constant) or is_log


def _of_node(node: ast.AST, place: Place) -> Iterator[tuple[str, ast.AST]]:
    """Yields what may stand there instead, each with its kind."""
    match node:
        case ast.Compare(left, [op], compared):
            for other in _COMPARED[type(op)]:
                yield "comparison", ast.Compare(left, [other()], compared)
        case ast.BoolOp(op, values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and/or", ast.BoolOp(other, values)
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            yield "arithmetic", ast.BinOp(left, _ARITHMETIC[type(op)](), right)
        case ast.AugAssign(target, op, value) if type(op) in _ARITHMETIC:
            yield "arithmetic", ast.AugAssign(target, _ARITHMETIC[type(op)](), value)
            yield "deleted statement", ast.Pass()
        case ast.Constant(value=bool(value)):
            yield "True/False", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
            yield "constant", ast.Constant(value - 1)
        case ast.UnaryOp(ast.Not(), operand):
            yield "not", operand
        case ast.UnaryOp(ast.USub(), operand):
            yield "sign", operand
        case ast.Return(ast.AST() as value) if not _is_none(value):
            yield "returned None", ast.Return(ast.Constant(None))
        case ast.Call(ast.Name(name), args, keywords) if name in _CALLED:
            yield "min/max/any/all", ast.Call(ast.Name(_CALLED[name], ast.Load()), args, keywords)
        case ast.Slice(lower, upper, step):
            first = ast.BinOp(lower, ast.Add(), ast.Constant(1)) if lower else ast.Constant(1)
            last = ast.BinOp(upper, ast.Sub(), ast.Constant(1)) if upper else ast.Constant(-1)
            yield "slice end", ast.Slice(first, upper, step)
            yield "slice end", ast.Slice(lower, last, step)
        case ast.Expr(ast.Call()) | ast.Raise() | ast.Continue() | ast.Break():
            yield "deleted statement", ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "deleted statement", ast.Pass()
        case _:
            pass
    is_test = place.field == "test" and isinstance(place.parent, ast.If | ast.IfExp)
    if is_test or (place.field == "ifs" and isinstance(place.parent, ast.comprehension)):
        yield "forced condition", ast.Constant(True)
        yield "forced condition", ast.Constant(False)
    elif place.field == "test" and isinstance(place.parent, ast.While):
        yield "forced condition", ast.Constant(False)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())
