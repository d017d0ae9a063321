"""Conditions of a script: true, false, or undecided if the value is known only in a real run.

Handles `[[ ]]`, `[ ]` and `test`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence

from bridge.shell import arithmetic, expansion_subjects, steps
from bridge.shell.expand import Expander
from bridge.shell.patterns import Pattern, Unread, active, simple
from bridge.shell.regular import expression, groups_are_certain, longest
from bridge.shell.scope import SELF, SOURCED, Value, several
from bridge.shell.tokens import Word
from bridge.shell.word_pieces import NOWHERE, Pieces, Text, Unknown, text_if_known

NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
EQUAL = ("=", "==", "!=")
ORDERED = ("<", ">")
COMPARED = ("-nt", "-ot", "-ef")
UNARY = frozenset(f"-{letter}" for letter in "abcdefghknoprstuvwxzGLNORS")
LONGEST = 4_000
Truth = bool | None


class Bad(ValueError):
    """Raised for a condition at which a shell reports an error, with status 2."""


def empty(pieces: Pieces) -> Truth:
    """Whether a text is empty; None if that is not known."""
    if any(isinstance(piece, Text) and piece.text for piece in pieces):
        return False
    return None if any(isinstance(piece, Unknown) for piece in pieces) else True


def _not(truth: Truth) -> Truth:
    return None if truth is None else not truth


def _join_truths(left: Truth, right: Truth, both: bool) -> Truth:
    """Return `left and right` if `both`, else `left or right`.

    None stands for an unknown truth; the result is known if one side decides it.
    """
    if left is (not both) or right is (not both):
        return not both
    return None if left is None or right is None else both


class Condition:
    """A condition `[[ ... ]]`, evaluated word by word."""

    def __init__(self, items: Sequence[Word | str], expander: Expander) -> None:
        self.items, self.expander, self.position = items, expander, 0

    def holds(self) -> Truth:
        """Return whether the condition is true; None if that is not known.

        Raises `Bad` for a condition with an error.
        """
        result = self._or(True)
        if self.position < len(self.items):
            raise Bad("unexpected word")
        return result

    def _text_ahead(self, ahead: int = 0) -> str:
        place = self.position + ahead
        if place >= len(self.items):
            return ""
        item = self.items[place]
        return item if isinstance(item, str) else self.expander.source.text_of(item)

    def _or(self, evaluate: bool) -> Truth:
        result = self._and(evaluate)
        while self._text_ahead() == "||":
            self.position += 1
            result = _join_truths(result, self._side(evaluate, result, True, self._and), both=False)
        return result

    def _and(self, evaluate: bool) -> Truth:
        result = self._one(evaluate)
        while self._text_ahead() == "&&":
            self.position += 1
            result = _join_truths(result, self._side(evaluate, result, False, self._one), both=True)
        return result

    def _side(
        self, evaluate: bool, before: Truth, decisive: bool, read: Callable[[bool], Truth]
    ) -> Truth:
        """Evaluate the right operand, unless the left operand decides the result.

        If the left operand is not known, variables that the right operand assigns become uncertain.
        """
        if not evaluate or before is decisive:
            return read(False)
        if before is not None:
            return read(True)
        scope = self.expander.scope
        without = scope.copy()
        result = read(True)
        if without.variables != scope.variables:
            within = scope.copy()
            start = next(item.start for item in self.items if isinstance(item, Word))
            scope.take([within, without], self.expander.source.line(start))
        return result

    def _one(self, evaluate: bool) -> Truth:
        if self._text_ahead() == "!":
            self.position += 1
            return _not(self._one(evaluate))
        if self.position < len(self.items) and self.items[self.position] == "(":
            self.position += 1
            result = self._or(evaluate)
            if self._text_ahead() != ")":
                raise Bad("missing )")
            self.position += 1
            return result
        return self._test(evaluate)

    def _word(self) -> Word:
        item = self.items[self.position] if self.position < len(self.items) else ""
        if isinstance(item, str):
            raise Bad(f"expected a word, found {item!r}")
        self.position += 1
        return item

    def _test(self, evaluate: bool) -> Truth:
        sign = self._text_ahead(1)
        if sign in (*EQUAL, *ORDERED, *NUMBERS, *COMPARED, "=~") and self.position + 2 < len(
            self.items
        ):
            left = self._word()
            self.position += 1
            right = self._word()
            return self._compare_words(left, sign, right) if evaluate else False
        if self._text_ahead() in UNARY and self._text_ahead(1) not in ("", "&&", "||", ")"):
            sign = self._text_ahead()
            self.position += 1
            word = self._word()
            return unary(sign, self._text(word), self.expander) if evaluate else False
        word = self._word()
        return _not(empty(self._text(word))) if evaluate else False

    def _text(self, word: Word) -> Pieces:
        return self.expander.text(word, alone=True)

    def _compare_words(self, left: Word, sign: str, right: Word) -> Truth:
        first = self._text(left)
        second = self._text(right)
        try:
            if sign in EQUAL:
                subject, fold = text_if_known(first), self._fold()
                if subject is None or text_if_known(second) is None:
                    truth = same_script(first, second, self.expander)
                else:
                    truth = Pattern(active(second), fold).matches(
                        subject.lower() if fold else subject
                    )
                return truth if sign != "!=" else _not(truth)
            if sign == "=~":
                return self._regular(first, second)
            if sign in NUMBERS:
                numbers = [self._number(text) for text in (first, second)]
                return NUMBERS[sign](*numbers)
        except arithmetic.Unset:
            raise
        except arithmetic.Wrong:
            return False  # a shell reports it, and takes the condition for false
        except Unread:
            return None
        return sorts_before(first, sign, second) if sign in ORDERED else None

    def _fold(self) -> bool:
        return self.expander.scope.on("nocasematch")

    def _number(self, pieces: Pieces) -> int:
        text = text_if_known(pieces)
        if text is None:
            raise Unread("it is not known")
        return self.expander.evaluate_text(text)

    def _regular(self, first: Pieces, second: Pieces) -> Truth:
        scope = self.expander.scope
        try:
            text = text_if_known(first)
            if text is None or len(text) > LONGEST:
                raise Unread("the text is not known")
            chars = active(second)
            simple(text)
            pattern = expression(chars, self._fold())
            fits = steps.has_match(pattern, text)
        except Unread as error:
            scope.set(
                "BASH_REMATCH",
                Value(((Unknown("${BASH_REMATCH}", NOWHERE, 0, str(error), loose=True),),), True),
            )
            raise
        scope.set("BASH_REMATCH", Value(_groups(pattern, text) if fits else (), True))
        return fits


def _groups(pattern: re.Pattern[str], text: str) -> tuple[Pieces, ...]:
    """Return the text of the match and the texts of its groups.

    A text is `Unknown` if bash may find another text: Python and POSIX can split a match into groups
    differently.
    """
    try:
        match = longest(pattern, text)
    except Unread:
        match = None
    # POSIX takes the longest match, and Python the first one. Groups within that may then differ.
    sure = 1 if match is None else 1 + pattern.groups * groups_are_certain(pattern.pattern)
    texts = [] if match is None else [match[0], *(group or "" for group in match.groups())]
    certain_texts = [(Text(group, NOWHERE, plain=False),) for group in texts[:sure]]
    unsure = (
        Unknown(
            "${BASH_REMATCH}",
            NOWHERE,
            0,
            "this text depends on how bash divides the match into groups",
        ),
    )
    return (*certain_texts, *(unsure for _ in range(pattern.groups + 1 - len(certain_texts))))


def sorts_before(first: Pieces, sign: str, second: Pieces) -> Truth:
    """Return whether `first` sorts before `second` (sign `<`) or after `second` (sign `>`).

    None if a text is not known, or if the order depends on the locale.
    """
    left, right = text_if_known(first), text_if_known(second)
    if left is None or right is None:
        return None
    if left == right or not (left and right):
        return bool(right if sign == "<" else left) and left != right
    # By bytes as in the locale C, and in two ways as languages sort. If all three agree, the locale
    # does not matter.
    orders = {left < right, _by_letters(left, right, False), _by_letters(left, right, True)}
    return (orders == {True}) is (sign == "<") if len(orders) == 1 and None not in orders else None


def _by_letters(left: str, right: str, skips: bool) -> bool | None:
    """Return whether `left` sorts before `right` in a locale's order: signs, then digits, then
    letters, upper and lower case together.

    With `skips`, signs are ignored. None if the order is not known.
    """
    if not (left + right).isascii():
        return None
    first, second = left.lower(), right.lower()
    if skips:
        first, second = (
            "".join(char for char in text if char.isalnum()) for text in (first, second)
        )
    place = next(
        (
            index
            for index, (one, other) in enumerate(zip(first, second, strict=False))
            if one != other
        ),
        None,
    )
    if place is None:
        return None if len(first) == len(second) else len(first) < len(second)
    keys = [(char.isalpha(), char.isdigit(), char) for char in (first[place], second[place])]
    return (
        keys[0] < keys[1] if any(char.isalnum() for char in (first[place], second[place])) else None
    )


def same_script(first: Pieces, second: Pieces, expander: Expander) -> Truth:
    """Return whether two unknown words name the same script; None if that is not known.

    `$0` and `BASH_SOURCE` name the same script outside of sourced files.
    """
    pieces = [
        word[0]
        for word in (first, second)
        if len(word) == 1 and isinstance(word[0], Unknown) and word[0].at
    ]
    if (
        len(pieces) < 2
        or any(piece.firm for piece in pieces)
        or SELF not in (pieces[0].at, pieces[1].at)
    ):
        return None
    name = expander.source.script.name.rpartition("/")[2]
    other = next((piece.at for piece in pieces if piece.at != SELF), SELF).rpartition("/")[2]
    if other == SELF:
        # The right side is a pattern. A name with these characters may not match itself.
        return None if set(name) & set("[\\") else True
    return False if other.startswith(SOURCED) and other != SOURCED + name else None


FILE = ("-e", "-a", "-f", "-r", "-s")
"""File tests that are true for each file that the script has written, and for each file in the script's folder."""


def unary(sign: str, pieces: Pieces, expander: Expander) -> Truth:
    """Return whether `-n text`, `-v name` or a test of a file is true; None if that is not known.

    A file test is decided if the file exists or if the script has removed it.
    """
    if sign in ("-n", "-z"):
        blank = empty(pieces)
        return blank if sign == "-z" else _not(blank)
    text = text_if_known(pieces)
    if sign == "-v":
        return None if text is None else _is_set(text, expander)
    if sign == "-o" and text in ("errexit", "nounset", "noglob", "allexport", "pipefail"):
        return None if text in expander.scope.unsure else text in expander.scope.options
    return expander.runner.lies(pieces, filled=sign == "-s") if sign in FILE else None


def _is_set(name: str, expander: Expander) -> Truth:
    plain, _, index = name.partition("[")
    value = expander.scope.get(plain)
    if value is None:
        certain = expander.scope.is_unset(plain) or not expander.scope.overtaker(plain)
        return False if certain else None
    if any(
        isinstance(piece, Unknown) and (piece.perhaps or several(word))
        for word in value.words
        for piece in word
    ):
        return None
    if index[:-1] in ("@", "*") and index:
        return bool(value.words)
    if not index and not value.array:
        return True
    try:
        key: int | str = (
            (index[:-1] or "0") if value.table else arithmetic.value(index[:-1] or "0", expander)
        )
        return expansion_subjects.element(expander, plain, value, key, True).elements is not None
    except (Unread, arithmetic.Wrong):
        return None


# `[ ... ]` and `test`


def evaluate_test(words: Sequence[Pieces], expander: Expander) -> Truth:
    """Return whether `[ ... ]` with these words is true; None if that is not known.

    Raises `Bad` for a condition with an error.
    """
    if any(several(word) for word in words):
        return None
    return _Test(words, expander).holds()


class _Test:
    def __init__(self, words: Sequence[Pieces], expander: Expander) -> None:
        self.words, self.expander = words, expander
        self.said = [text_if_known(word) for word in words]
        self.position = 0

    def holds(self) -> Truth:
        # POSIX defines up to four words by their number, and bash follows it. More of them are an
        # expression with precedence.
        size = len(self.words)
        if size <= 4:
            truth = (self._none, self._single, self._two, self._three, self._four)[size](0)
            if truth != "more":
                return truth  # type: ignore[return-value]
        # A word that is not known may be an operator, unless it stands where only an operand can:
        # beside a binary operator, or behind `-n` or `-z`.
        for index, word in enumerate(self.said):
            if word is not None:
                continue
            near = [self.said[place] for place in (index - 1, index + 1) if 0 <= place < size]
            beside = any(one in NUMBERS or one in EQUAL for one in near)
            if not beside and not (index > 0 and self.said[index - 1] in ("-n", "-z")):
                return None
        result = self._or()
        if self.position < size:
            raise Bad("too many arguments")
        return result

    def _none(self, start: int) -> Truth:
        return False

    def _single(self, start: int) -> Truth:
        return _not(empty(self.words[start]))

    def _two(self, start: int) -> Truth:
        first = self.said[start]
        if first is None:
            return None
        if first == "!":
            return _not(self._single(start + 1))
        if first in UNARY:
            return self._unary(start)
        raise Bad("unary operator expected")

    def _three(self, start: int) -> Truth:
        sign = self.said[start + 1]
        if sign is None:
            return None
        if self._binary_sign(sign):
            return self._binary(start)
        if sign in ("-a", "-o"):
            return _join_truths(self._single(start), self._single(start + 2), both=sign == "-a")
        if self.said[start] == "!":
            return _not(self._two(start + 1))
        if self.said[start] == "(" and self.said[start + 2] == ")":
            return self._single(start + 1)
        if self.said[start] is None:
            return None
        raise Bad("binary operator expected")

    def _four(self, start: int) -> Truth | str:
        if self.said[start] == "!":
            return _not(self._three(start + 1))
        if self.said[start] == "(" and self.said[start + 3] == ")":
            return self._two(start + 1)
        return "more" if self.said[start] is not None else None

    def _binary_sign(self, sign: str | None) -> bool:
        return sign in NUMBERS or sign in EQUAL or sign in ORDERED or sign in COMPARED

    def _unary(self, start: int) -> Truth:
        sign, word = str(self.said[start]), self.words[start + 1]
        return unary(sign, word, self.expander)

    def _binary(self, start: int) -> Truth:
        left, sign, right = self.words[start], str(self.said[start + 1]), self.words[start + 2]
        if sign in EQUAL:
            first, second = text_if_known(left), text_if_known(right)
            plain = first is not None and second is not None
            truth = first == second if plain else same_script(left, right, self.expander)
            return truth if sign != "!=" else _not(truth)
        if sign in NUMBERS:
            first, second = text_if_known(left), text_if_known(right)
            for text in (first, second):
                if text is not None and not re.fullmatch(
                    r"[ \t\n]*[-+]?\d+[ \t\n]*", text, re.ASCII
                ):
                    raise Bad("integer expression expected")
            if first is None or second is None:
                return None
            # Unlike arithmetic, a test refuses numbers beyond 64 bits.
            if max(abs(int(first)), abs(int(second))) >= 1 << 63:
                raise Bad("integer expression expected")
            return NUMBERS[sign](int(first), int(second))
        return sorts_before(left, sign, right) if sign in ORDERED else None

    # More than four words

    def _here(self) -> str | None:
        return self.said[self.position] if self.position < len(self.said) else ""

    def _or(self) -> Truth:
        result = self._and()
        while self._here() == "-o" and self.position < len(self.said):
            self.position += 1
            result = _join_truths(result, self._and(), both=False)
        return result

    def _and(self) -> Truth:
        result = self._term()
        while self._here() == "-a" and self.position < len(self.said):
            self.position += 1
            result = _join_truths(result, self._term(), both=True)
        return result

    def _term(self) -> Truth:
        remaining = len(self.said) - self.position
        if not remaining:
            raise Bad("argument expected")
        word = self._here()
        if word == "!":
            self.position += 1
            return _not(self._term())
        if word == "(":
            self.position += 1
            result = self._or()
            if self._here() != ")":
                raise Bad("missing )")
            self.position += 1
            return result
        start = self.position
        if remaining >= 3 and self._binary_sign(self.said[start + 1]):
            self.position += 3
            return self._binary(start)
        if remaining >= 2 and word in UNARY:
            self.position += 2
            return self._unary(start)
        self.position += 1
        return self._single(start)
