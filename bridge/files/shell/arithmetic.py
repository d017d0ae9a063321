"""Shell arithmetic over whole numbers, evaluated on a syntax tree: no names but known ones, no calls."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

LONGEST = 1000
BITS = 64
Number = Callable[[str], int | None]
"""The value of a variable, or None."""


def _quotient(left: int, right: int) -> int:
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


def _power(left: int, right: int) -> int:
    return pow(left, right, 1 << BITS) if right >= 0 else 0


OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda left, right: left - right * _quotient(left, right),
    ast.Pow: _power,
    ast.LShift: lambda left, right: left << min(right, BITS),
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def value(text: str, number: Number) -> int | None:
    """The value of an expression such as `A * 2 / (B + 1)`; None if a part is not known, or it is no arithmetic."""
    if len(text) > LONGEST or "=" in re.sub(r"[=!<>]=", "", text):
        return None
    try:
        return _value(ast.parse(_python(text) or "0", mode="eval").body, number)
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError, KeyError, RecursionError, MemoryError):
        return None


def _python(text: str) -> str:
    """The expression as Python writes it."""
    for shell, python in SPELLINGS:
        text = shell.sub(python, text)
    return text.strip()


SPELLINGS = (
    (re.compile(r"&&"), " and "),
    (re.compile(r"\|\|"), " or "),
    (re.compile(r"!(?!=)"), " not "),
    (re.compile(r"\$(?=\w)"), ""),
    (re.compile(r"([^?:]*)\?([^?:]*):([^?:]*)"), r"((\2) if (\1) else (\3))"),
)
"""What shells and Python write differently; `condition ? one : other` where it is not nested."""


def _value(node: ast.expr, number: Number) -> int:
    match node:
        case ast.Constant(value=bool()):
            raise ValueError("not a number")
        case ast.Constant(value=int() as constant):
            return constant
        case ast.Name(id=name):
            return _named(name, number)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _value(operand, number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, number)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, number)
        case ast.IfExp(test=test, body=body, orelse=other):
            return _value(body if _value(test, number) else other, number)
        case ast.BoolOp(op=op, values=values):
            results = [bool(_value(item, number)) for item in values]
            return int(all(results) if isinstance(op, ast.And) else any(results))
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            return _wrapped(int(OPERATORS[type(op)](_value(left, number), _value(right, number))))
    raise ValueError("not arithmetic over whole numbers")


def _named(name: str, number: Number) -> int:
    found = number(name)
    if found is None:
        raise ValueError(f"{name} is not known")
    return found


def _wrapped(result: int) -> int:
    """Shells count in 64 bits."""
    half = 1 << (BITS - 1)
    return (result + half) % (1 << BITS) - half
