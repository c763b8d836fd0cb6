"""Small sums with the steps written out, digit by digit as at school."""

from __future__ import annotations

from demo_corpus.phrasing import number, request
from demo_corpus.sample import Draw, Sample, Turn

_ASKED = {
    "+": ("What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b}", "{a} + {b} = ?", "How much is {a} + {b}?"),
    "-": ("What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "{a} - {b} = ?", "How much is {a} - {b}?"),
    "x": ("What is {a} x {b}?", "What is {a} times {b}?", "{a} x {b}", "{a} * {b}", "How much is {a} times {b}?"),
}
_ORDERED = {
    "+": ("Add {a} and {b}", "Calculate {a} + {b}", "Work out {a} plus {b}", "Compute {a} + {b}"),
    "-": ("Subtract {b} from {a}", "Calculate {a} - {b}", "Work out {a} minus {b}", "Take {b} away from {a}"),
    "x": ("Multiply {a} by {b}", "Calculate {a} x {b}", "Work out {a} times {b}", "Compute {a} x {b}"),
}


def worked(a: int, sign: str, b: int) -> str:
    """Return the steps, if there are any, and the result: the text ends in `a sign b = result.`"""
    steps = [] if max(a, b) < 10 else {"+": _added, "-": _subtracted, "x": _multiplied}[sign](a, b)
    result = {"+": a + b, "-": a - b, "x": a * b}[sign]
    return "".join(f"{step}. " for step in steps) + ("So " if steps else "") + f"{a} {sign} {b} = {result}."


def _digits(value: int) -> list[int]:
    return [int(digit) for digit in reversed(str(value))]


def _line(sign: str, terms: list[str]) -> str:
    return f"{sign.join(terms)} {'=' if len(terms) > 1 else 'stays'}"


def _added(a: int, b: int) -> list[str]:
    steps, carry = [], 0
    left, right = _digits(a), _digits(b)
    for place in range(max(len(left), len(right))):
        terms = [str(digits[place]) for digits in (left, right) if place < len(digits)]
        if carry:
            terms.append(str(carry))
        total = sum(map(int, terms))
        carry = total // 10
        steps.append(f"{_line(' + ', terms)} {total}" + (f", write {total % 10}, carry {carry}" if carry else ""))
    return steps


def _subtracted(a: int, b: int) -> list[str]:
    steps, borrowed = [], 0
    left, right = _digits(a), _digits(b)
    for place, digit in enumerate(left):
        taken = [str(right[place])] if place < len(right) else []
        taken += ["1"] if borrowed else []
        need = sum(map(int, taken))
        borrowed = int(digit < need)
        top = digit + 10 * borrowed
        steps.append(f"{_line(' - ', [str(top), *taken])} {top - need}" + (", borrow 1" if borrowed else ""))
    return steps


def _multiplied(a: int, b: int) -> list[str]:
    if a < 10 or a % 10 == 0:
        return []
    tens, ones = a // 10 * 10, a % 10
    return [f"{tens} x {b} = {tens * b}", f"{ones} x {b} = {ones * b}", f"{tens * b} + {ones * b} = {a * b}"]


def operands(draw: Draw) -> tuple[int, str, int]:
    """Return a sum of this side: up to three digits to add or subtract, two digits by one to multiply."""

    def make() -> tuple[int, str, int]:
        sign = draw.choose("++--x")
        if sign == "x":
            return draw.integer(2, 99 if draw.chance(0.6) else 12), sign, draw.integer(2, 9)
        top = draw.choose((9, 99, 99, 999))
        a, b = draw.integer(0, top), draw.integer(0, draw.choose((top, min(top, 99))))
        return (max(a, b), sign, min(a, b)) if sign == "-" else (a, sign, b)

    return draw.fresh(make)


def sums(draw: Draw) -> Sample:
    a, sign, b = operands(draw)
    values = {"a": number(draw, a), "b": number(draw, b)}
    if draw.chance(0.6):
        user = draw.choose(_ASKED[sign]).format(**values)
        user = user.lower() if draw.chance(0.15) else user
    else:
        user = request(draw, draw.choose(_ORDERED[sign]).format(**values))
    return Sample("sum", (Turn(user, worked(a, sign, b)),))
