"""Shell arithmetic over whole numbers of 64 bits: names, assignments and every operator, as a shell reads them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Protocol

from bridge.shell.patterns import Unread

LONGEST = 10_000
DEEPEST = 40
"""Largest depth of nested brackets in an expression, and of variables whose values are expressions too."""
TOKEN = re.compile(
    r"[ \t\n]*(?:(?P<number>[0-9][0-9A-Za-z_@]*(?:#[0-9A-Za-z_@]+)?)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>\*\*|<<=|>>=|\+\+|--|&&|\|\||<=|>=|==|!=|<<|>>|[-+*/%&^|]=|[-+*/%&^|<>=!~?:,()\[\]]))",
    re.ASCII,
)
# An assignment by any operator, or `++` and `--` on either side. `==` is a comparison.
ASSIGNING = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^\]]*\])?\s*(?:(?:<<|>>|[-+*/%&^|])?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)",
    re.ASCII,
)
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ@_"
LEVELS: tuple[tuple[str, ...], ...] = (
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
"""Left-associative binary operators in groups of equal precedence, lowest precedence first."""


class Wrong(ValueError):
    """Raised for an expression at which a shell stops with an error."""


class Discarded(Wrong):
    """Raised for an error in an expression.

    A shell reports the error, skips the rest of the line, and continues with the next line.
    """


class Dropped(Discarded):
    """Raised for an assignment to a read-only variable. Unlike other errors, `set -e` ends the shell there."""


class Unset(Wrong):
    """Raised for the use of a variable that is not set, under `set -u` or with `${NAME:?}`. A shell ends there."""


class Names(Protocol):
    """Access to shell variables. The index is None for a variable that is no array.

    `lacking` collects, for each variable that nothing sets, the reason why its value is not known.
    """

    lacking: list[str]

    def text_of(self, name: str, index: str | None) -> str:
        """Return the value of a variable; empty if the variable is not set.

        Raises `Unread` if the value is not known.
        """

    def assign(self, name: str, index: str | None, number: int) -> None:
        """Assign a number to a variable."""


def _quotient(left: int, right: int) -> int:
    if not right:
        raise Discarded("division by zero")
    # As in C, the quotient is cut towards zero; Python rounds it down.
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


def _shift(count: int) -> int:
    if not 0 <= count < 64:
        raise Unread(f"the result of a shift by {count} bits depends on the machine")
    return count


BINARY: Mapping[str, Callable[[int, int], int]] = {
    "|": operator.or_,
    "^": operator.xor,
    "&": operator.and_,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "<<": lambda left, right: left << _shift(right),
    ">>": lambda left, right: left >> _shift(right),
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _quotient,
    "%": lambda left, right: left - right * _quotient(left, right),
}
Place = tuple[str, str | None]


def value(text: str, names: Names, depth: int = 0) -> int:
    """Return the value of an expression.

    Raises `Wrong` if a shell stops at the expression, and `Unread` if a part of it is not known.
    """
    if len(text) > LONGEST:
        raise Unread(f"an expression of more than {LONGEST:,} characters is not supported")
    if depth > DEEPEST:
        raise Discarded("expression recursion level exceeded")
    return _Expression(text, names, depth).whole()


def assignable_names(text: str) -> set[str]:
    """Return the names of variables that an expression may change."""
    return {first or second for first, second in ASSIGNING.findall(text)}


def number(text: str) -> int:
    """Return the value of a number literal: decimal, octal, hexadecimal, or `base#digits`."""
    base, sign, digits = text.partition("#")
    if not sign:
        if text[:2] in ("0x", "0X"):
            base, digits = "16", text[2:]
        elif text[0] == "0":
            base, digits = "8", text[1:]
        else:
            base, digits = "10", text
    # A base that is written itself takes no leading zero.
    size = int(base) if base.isdigit() and (sign == "" or base[0] != "0") and len(base) < 4 else 0
    if not 2 <= size <= 64:
        raise Discarded(f"{text} is no number: invalid arithmetic base")
    result = 0
    for char in digits:
        # Up to base 36 capitals stand for the small letters; above, they are digits of their own.
        digit = DIGITS.find(char.lower() if size <= 36 else char)
        if not 0 <= digit < size:
            raise Discarded(f"{text} is no number of base {size}")
        result = result * size + digit
    return _wrap_to_64_bits(result)


def _wrap_to_64_bits(result: int) -> int:
    """Return the result as a signed number of 64 bits, which wraps around on overflow."""
    return (int(result) + (1 << 63)) % (1 << 64) - (1 << 63)


class _Expression:
    def __init__(self, text: str, names: Names, depth: int) -> None:
        self.text, self.names, self.depth = text, names, depth
        # `kind` and `sign` are the token that comes next, `position` is behind it. While `idle` is
        # above 0, a part is read but not computed: it is behind `&&`, `||` or `?` and not taken.
        # `begun` is the position behind a name that begins an operand, at which an assignment is
        # allowed.
        self.position, self.kind, self.sign, self.idle, self.nested, self.begun = (
            0,
            "",
            "",
            0,
            0,
            -1,
        )
        self._next()

    def _next(self) -> None:
        match = TOKEN.match(self.text, self.position)
        if match is None:
            if self.text[self.position :].strip(" \t\n"):
                raise Discarded(f"syntax error in {self.text.strip()!r}")
            self.kind = self.sign = ""
            return
        self.kind, self.sign, self.position = (
            str(match.lastgroup),
            str(match[str(match.lastgroup)]),
            match.end(),
        )

    def _take(self, *signs: str) -> str:
        """Consume and return the next operator if it is one of `signs`; otherwise return an empty text."""
        if self.kind != "sign" or self.sign not in signs:
            return ""
        sign = self.sign
        self._next()
        return sign

    def whole(self) -> int:
        if not self.kind:
            return 0
        result = self._comma()
        if self.sign in ("++", "--", "=", "["):
            raise Unread(f"{self.text.strip()!r} is not supported")
        if self.kind:
            raise Discarded(f"syntax error in {self.text.strip()!r}")
        return result

    def _comma(self) -> int:
        self.nested += 1
        if self.nested > DEEPEST:
            raise Unread("an expression is nested too deeply")
        before = len(self.names.lacking)
        result = self._choice()
        while self._take(","):
            # What stands before a comma does not matter for what follows.
            del self.names.lacking[before:]
            result = self._choice()
        self.nested -= 1
        return result

    def _choice(self, assigns: bool = True) -> int:
        """Return the value of `test ? one : other`.

        With `assigns`, the expression may begin with an assignment.
        """
        self.begun = self.position if assigns else -1
        test = self._or()
        if not self._take("?"):
            return test
        first = self._either(not test, self._comma)
        if not self._take(":"):
            raise Discarded(f"syntax error in {self.text.strip()!r}")
        second = self._either(bool(test), lambda: self._choice(False))
        return first if test else second

    def _either(self, idle: bool, part: Callable[[], int]) -> int:
        self.idle += idle
        result = part()
        self.idle -= idle
        return result

    def _or(self) -> int:
        result = self._and()
        while self._take("||"):
            other = self._either(bool(result), self._and)
            result = int(bool(result or other))
        return result

    def _and(self) -> int:
        result = self._level(0)
        while self._take("&&"):
            other = self._either(not result, lambda: self._level(0))
            result = int(bool(result and other))
        return result

    def _level(self, level: int) -> int:
        if level == len(LEVELS):
            return self._power()
        result = self._level(level + 1)
        while sign := self._take(*LEVELS[level]):
            result = self._apply_operator(sign, result, self._level(level + 1))
        return result

    def _apply_operator(self, sign: str, left: int, right: int) -> int:
        if sign == "**" and right < 0:
            raise Discarded("exponent less than 0")
        if sign == "**":
            return _wrap_to_64_bits(pow(left, right, 1 << 64))
        # Operands of an idle part are read as 0, on which division and shifts must not fail.
        if self.idle and sign in "/%":
            right = right or 1
        if self.idle and sign in ("<<", ">>"):
            return left
        return _wrap_to_64_bits(BINARY[sign](left, right))

    def _power(self) -> int:
        base = self._unary()  # binds more than `**`: bash reads -2 ** 2 as 4
        return self._apply_operator("**", base, self._power()) if self._take("**") else base

    def _unary(self) -> int:
        sign = self._take("!", "~", "-", "+", "++", "--")
        if sign in ("++", "--"):
            if self.kind == "name":
                place = self._place()
                return self._assign(place, self._read(place) + (1 if sign == "++" else -1))
            # Before anything but a name, `--5` is twice the sign.
            return self._unary()
        if sign:
            self.nested += 1
            if self.nested > DEEPEST:
                raise Unread("an expression is nested too deeply")
            operand = self._unary()
            self.nested -= 1
            return _wrap_to_64_bits(
                {"!": int(not operand), "~": ~operand, "-": -operand, "+": operand}[sign]
            )
        return self._primary()

    def _primary(self) -> int:
        if self._take("("):
            result = self._comma()
            if not self._take(")"):
                raise Discarded(f"syntax error in {self.text.strip()!r}: missing )")
            return result
        if self.kind == "number":
            literal = number(self.sign)
            self._next()
            return literal
        if self.kind != "name":
            raise Discarded(f"syntax error in {self.text.strip()!r}: operand expected")
        begins = self.position == self.begun
        return self._evaluate_name(self._place(), begins)

    def _place(self) -> Place:
        name, position = self.sign, self.position
        index = None
        if self.text.startswith("[", position):
            end = _closing(self.text, position)
            index, self.position = self.text[position + 1 : end], end + 1
            if "~" in index:
                raise Unread('the meaning of "~" in an index depends on the release of bash')
        self._next()
        return name, index

    def _evaluate_name(self, place: Place, begins: bool) -> int:
        sign = self._take("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "^=", "|=")
        if sign and not begins:
            raise Unread(
                f"{self.text.strip()!r}: an assignment inside of an expression is not supported"
            )
        if sign == "=":
            return self._assign(place, self._choice())
        if sign:
            before = self._read(place)
            return self._assign(place, self._apply_operator(sign[:-1], before, self._choice()))
        before = self._read(place)
        step = self._take("++", "--")
        if step:
            self._assign(place, before + (1 if step == "++" else -1))
        return before

    def _read(self, place: Place) -> int:
        # A shell evaluates the value of a variable as an expression in turn.
        return 0 if self.idle else value(self.names.text_of(*place), self.names, self.depth + 1)

    def _assign(self, place: Place, result: int) -> int:
        result = _wrap_to_64_bits(result)
        if not self.idle:
            self.names.assign(*place, result)
        return result


def _closing(text: str, position: int) -> int:
    depth = 0
    for place in range(position, len(text)):
        depth += (text[place] == "[") - (text[place] == "]")
        if not depth:
            return place
    raise Discarded(f"syntax error in {text.strip()!r}: missing ]")
