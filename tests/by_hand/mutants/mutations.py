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
REACHED = "__reached__"  # a builtin, where statements tell
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
    statement: ast.stmt | ast.Lambda  # that it is in; of a module's own lambda, that

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
        statement: line of its statement.
    """

    number: int
    line: int
    kind: str
    text: str
    change: str
    inside: bool
    statement: int


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
            place.statement.lineno,
        )
        for number, (kind, place, new) in enumerate(_changes(ast.parse(source)))
    ]


def mutated(source: str, number: int) -> ast.Module:
    """Plants fault ``number`` of ``mutants_of(source)``; other lines stay where they are."""
    tree = ast.parse(source)
    for i, (_, place, new) in enumerate(_changes(tree)):
        if i == number:
            place.put(new)
            _keep_names(tree, place)
            return tree
    raise IndexError(f"mutant {number}")


def _keep_names(tree: ast.Module, place: Place) -> None:
    """Leaves what was changed behind as code that never runs: a function may take over only code that has
    the same names from around it, like the one of ``super()``."""
    if isinstance(place.node, ast.Continue | ast.Break | ast.Slice):
        return
    around = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = [n for n in around if any(place.parent is each for each in ast.walk(n))]
    if inner and place.inside:
        never = place.node if isinstance(place.node, ast.stmt) else ast.Expr(place.node)
        kept = ast.If(ast.Constant(False), [ast.copy_location(never, place.node)], [])
        inner[-1].body.append(ast.fix_missing_locations(ast.copy_location(kept, place.node)))


def telling(source: str, file: str) -> ast.Module:
    """Makes each statement of a function call ``REACHED(file, its line)`` first, and each lambda."""
    tree = ast.parse(source)
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in {inner for function in inside for inner in ast.walk(function)}:
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                told = [(_told(s, file), s) for s in statements]
                setattr(node, field, [s for pair in told for s in pair])
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            node.body = ast.BoolOp(ast.Or(), [_told(node, file).value, node.body])
    return ast.fix_missing_locations(tree)


def _told(node: ast.stmt | ast.Lambda, file: str) -> ast.Expr:
    args: list[ast.expr] = [ast.Constant(file), ast.Constant(node.lineno)]
    call = ast.Call(ast.Name(REACHED, ast.Load()), args, [])
    told = ast.Expr(call)
    for each in ast.walk(told):
        ast.copy_location(each, node)
    return told


def _changes(tree: ast.Module) -> Iterator[tuple[str, Place, ast.AST]]:
    for place in _places(tree, inside=False, statement=None):
        for kind, new in _of_node(place.node, place):
            yield kind, place, new


def _places(
    node: ast.AST, *, inside: bool, statement: ast.stmt | ast.Lambda | None
) -> Iterator[Place]:
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
            is_inside, at = inside or is_body, index if several else None
            is_own = isinstance(node, ast.Lambda) and is_body and not inside
            of = child if isinstance(child, ast.stmt) else node if is_own else statement
            if of is not None and hasattr(child, "lineno"):
                yield Place(node, field, at, child, is_inside, of)
            yield from _places(child, inside=is_inside, statement=of)


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
