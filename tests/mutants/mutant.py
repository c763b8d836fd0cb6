"""A mutant that was written by hand: one small change of the source that breaks a core."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from textwrap import indent

from tests.mutants.planted import Place, Planted, all_places, parsed


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # from the root of the repository
    old: str  # an expression, statements, or a case that occurs once in the file, however its lines are broken
    new: str  # what stands there instead; nothing where it is left out
    breaks: str  # what goes wrong, as a sentence
    is_the_same: str = ""  # why the mutant behaves as the source does, where it does

    def plant(self) -> Planted:
        """Find the old code in the syntax tree, so that the text and the lines around it may change."""
        old, new = _nodes(self.old), _nodes(self.new)
        found = list(_found(self.file, old))
        if len(found) != 1:
            raise ValueError(f"{self.name}: its code occurs {len(found)} times in {self.file}")
        (place,) = found
        if isinstance(place.node, ast.stmt):
            new = [ast.Expr(node) if isinstance(node, ast.expr) else node for node in new] or [ast.Pass()]
        return Planted(self.name, self.file, place, tuple(new), len(old))


def _nodes(code: str) -> list[ast.AST]:
    if code.startswith("case "):
        matching = ast.parse(f"match _:\n{indent(code, '    ')}").body[0]
        assert isinstance(matching, ast.Match)
        return list(matching.cases)
    body = ast.parse(code).body
    return [body[0].value] if len(body) == 1 and isinstance(body[0], ast.Expr) else list(body)


def _found(file: str, old: list[ast.AST]) -> list[Place]:
    """Return the places of nodes in a row that are as the old ones. An expression that is a statement counts as one."""
    root = Place((), parsed(file))
    found = [place for place in all_places(file) if _are_alike(_row(root, place, len(old)), old)]
    return [place for place in found if not any(place.path == (*other.path, "value") for other in found)]


def _row(root: Place, place: Place, count: int) -> list[ast.AST]:
    *way, first = place.path or ("",)
    siblings: object = (root / tuple(way)).node if count > 1 and isinstance(first, int) else None
    return siblings[int(first) :][:count] if isinstance(siblings, list) else [place.node]


def _are_alike(ones: object, others: object) -> bool:
    """Return whether two parts of syntax trees are the same code."""
    if isinstance(ones, ast.Expr):
        ones = ones.value
    if isinstance(others, ast.Expr):
        others = others.value
    if type(ones) is not type(others):
        return False
    if isinstance(ones, list) and isinstance(others, list):
        return len(ones) == len(others) and all(map(_are_alike, ones, others))
    if isinstance(ones, ast.AST):
        return all(_are_alike(getattr(ones, field, None), getattr(others, field, None)) for field in ones._fields)
    return ones == others
