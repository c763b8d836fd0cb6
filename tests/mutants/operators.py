"""Every small change that the sample draws from: operators on the syntax tree of a file.

What nobody would notice, or a type checker finds, is left out: annotations, decorators, docstrings, texts of logs and
errors, `__repr__`, assertions, and blocks for type checkers.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.mutants.planted import FUNCTIONS, Place, Planted, Step, parsed, parts

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_EMPTY = {
    "list": "[]",
    "tuple": "()",
    "dict": "{}",
    "set": "set()",
    "frozenset": "frozenset()",
    "str": "''",
    "int": "0",
    "float": "0.0",
    "Iterator": "iter(())",
    "Sequence": "()",
}
_LOGS = ("log", "_log", "logging", "warnings")
_UNSEEN = ("annotation", "returns", "decorator_list", "type_params", "pattern", "bases")


@dataclass(frozen=True)
class Change:
    """What an operator does: the node at a place becomes others, or is left out of its list."""

    operator: str
    place: Place
    new: tuple[ast.AST, ...]
    at: Place | None = None  # where that is written, if not there

    def planted(self, file: str) -> Planted:
        return Planted(key(file, self), file, self.at or self.place, self.new)


def key(file: str, change: Change) -> str:
    """Name a change by what stays when lines move: its file, function, operator and code."""
    return " | ".join((file, change.place.function or "-", change.operator, _text(change.place.node)))


def changes(file: str) -> list[Change]:
    """Return all changes of a file; of those that look the same in one function, the first."""
    found: dict[str, Change] = {}
    for change in _changes(Place((), parsed(file)), None):
        found.setdefault(key(file, change), change)
    return list(found.values())


def _changes(place: Place, returns: ast.expr | None) -> Iterator[Change]:
    node = place.node
    if _is_left_out(node):
        return
    if isinstance(node, FUNCTIONS):
        returns = node.returns
    yield from _of_node(place, returns)
    for inner in parts(place):
        if inner.path[len(place.path)] not in _UNSEEN:
            yield from _changes(inner, returns)


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef(name="__repr__" | "__str__") | ast.Assert() | ast.JoinedStr():
            return True
        case ast.Raise() | ast.Import() | ast.ImportFrom():
            return isinstance(node, ast.Import | ast.ImportFrom)
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
            return name in _LOGS
        case ast.Expr(value=ast.Call() as call):
            return _is_left_out(call)
    return False


def _of_node(place: Place, returns: ast.expr | None) -> Iterator[Change]:
    node = place.node
    match node:
        case ast.Compare(ops=operators):
            for index, operator in enumerate(operators):
                yield from _swap(place, ("ops", index), operator)
        case ast.BinOp(op=operator, left=left, right=right) if not any(map(_is_of_types, (left, right))):
            yield from _swap(place, ("op",), operator)
        case ast.AugAssign(op=operator):
            yield from _swap(place, ("op",), operator)
            yield Change("statement left out", place, (ast.Pass(),))
        case ast.BoolOp(op=operator):
            yield from _swap(place, ("op",), operator)
        case ast.UnaryOp(op=ast.Not() | ast.USub() as operator, operand=operand):
            if not (isinstance(operator, ast.USub) and isinstance(operand, ast.Constant)):
                yield Change(f"{type(operator).__name__} left out", place, (operand,))
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield _negated(place, ("test",), test)
        case ast.comprehension(ifs=conditions):
            for index, condition in enumerate(conditions):
                yield _negated(place, ("ifs", index), condition)
        case ast.Match(cases=cases) if len(cases) > 1:
            for index, case in enumerate(cases):
                at = place / ("cases", index)
                yield Change("case left out", replace(at, node=case.pattern), (), at)
        case ast.match_case(guard=ast.expr() as guard):
            yield _negated(place, ("guard",), guard)
        case ast.Constant(value=bool() as value):
            yield Change("constant", place, (ast.Constant(not value),))
        case ast.Constant(value=int() | float() as value):
            yield from (Change(f"constant {by:+}", place, (ast.Constant(value + by),)) for by in (1, -1))
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            for new in _returned(value, returns):
                yield Change("return nothing", place, (ast.Return(new),))
        case ast.Expr(value=ast.Call() | ast.Await() | ast.Yield() | ast.YieldFrom()) | ast.Delete():
            yield Change("statement left out", place, (ast.Pass(),))
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if place.line:
            yield Change("statement left out", place, (ast.Pass(),))
        case ast.Raise():
            yield Change("raise left out", place, (ast.Pass(),))
        case ast.Break():
            yield Change("break to continue", place, (ast.Continue(),))
        case ast.Continue():
            yield Change("continue to break", place, (ast.Break(),))
        case ast.Call(func=function, keywords=keywords):
            if isinstance(function, ast.Name) and function.id in _CALLS:
                other = _CALLS[function.id]
                yield Change(f"{function.id} to {other}", place, (ast.Name(other, ast.Load()),), place / ("func",))
            for index, keyword in enumerate(keywords):
                if keyword.arg not in (None, "help", "metavar", "description"):
                    yield Change(f"argument {keyword.arg} left out", place, (), place / ("keywords", index))


def _swap(place: Place, step: tuple[Step, ...], operator: ast.AST) -> Iterator[Change]:
    if new := _SWAPPED.get(type(operator)):
        yield Change(f"{type(operator).__name__} to {new.__name__}", place, (new(),), place / step)


def _negated(place: Place, step: tuple[Step, ...], test: ast.expr) -> Change:
    there = place / step
    return Change("condition negated", there, (ast.UnaryOp(ast.Not(), copy.deepcopy(test)),))


def _returned(value: ast.expr, returns: ast.expr | None) -> Iterator[ast.expr]:
    """Yield what is returned instead: the opposite, something empty of the type, or None."""
    name = ast.unparse(returns).partition("[")[0] if returns else ""
    if name == "bool":
        yield ast.UnaryOp(ast.Not(), value)
        return
    new = ast.parse(_EMPTY.get(name, "None"), mode="eval").body
    if ast.dump(new) != ast.dump(value):
        yield new


def _is_of_types(node: ast.AST) -> bool:
    """Return whether an operand is a text, or a type, which other operators would only refuse."""
    match node:
        case ast.Constant(value=str() | None) | ast.JoinedStr():
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name[:1].isupper() and not name.isupper()
    return isinstance(node, ast.BinOp) and _is_of_types(node.left)


def _text(node: ast.AST) -> str:
    """Return the code of a node in one line: of statements with a body, the first."""
    return " ".join(ast.unparse(node).partition(":\n")[0].split())
