"""Statements of a script: tokens read by the grammar of bash."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from bridge.shell.tokens import Fault, Token, Word

ENDS = (";;", ";&", ";;&")
"""Operators that end an item of a `case`."""


@dataclass(slots=True, eq=False)
class Statement:
    """A command of any kind, from `start` to `end`, and the redirections around it."""

    start: int
    end: int
    redirects: tuple[Token, ...]


@dataclass(slots=True, eq=False)
class Pipeline:
    """Statements with `|` between them, after `!` if `negated`."""

    start: int
    end: int
    negated: bool
    stages: tuple[Statement, ...]


@dataclass(slots=True, eq=False)
class AndOr:
    """Pipelines with `&&` and `||` between them: the first, and each other with its operator; with `&`, in the background."""

    first: Pipeline
    others: tuple[tuple[str, Pipeline], ...]
    background: bool


Body = Sequence[AndOr]


@dataclass(slots=True, eq=False)
class SimpleCommand(Statement):
    """Assignments, and a command with its words."""

    words: tuple[Word, ...]


@dataclass(slots=True, eq=False)
class Test(Statement):
    """`[[ ... ]]` or `((...))`."""

    token: Token


@dataclass(slots=True, eq=False)
class Block(Statement):
    """`{ ... }`."""

    body: Body


@dataclass(slots=True, eq=False)
class Subshell(Block):
    """`( ... )`."""


@dataclass(slots=True, eq=False)
class If(Statement):
    """The condition and the body of each branch; the condition of `else` is None."""

    branches: tuple[tuple[Body | None, Body], ...]


@dataclass(slots=True, eq=False)
class CaseItem:
    """Patterns, the body for what fits one of them, and the operator behind it."""

    patterns: tuple[Word, ...]
    body: Body
    sign: str


@dataclass(slots=True, eq=False)
class Case(Statement):
    """`case ... esac`."""

    value: Word
    items: tuple[CaseItem, ...]


@dataclass(slots=True, eq=False)
class For(Statement):
    """`for` and `select`: without `in`, `words` is None; `counter` is the `((...))` of a loop that counts."""

    asks: bool
    name: Word | None
    counter: Token | None
    words: tuple[Word, ...] | None
    body: Body


@dataclass(slots=True, eq=False)
class While(Statement):
    """`while` and `until`."""

    until: bool
    condition: Body
    body: Body


@dataclass(slots=True, eq=False)
class Function(Statement):
    """The definition of a function."""

    name: Word
    statement: Statement


class Parser:
    """Reads tokens as statements. Raises `Fault` where bash finds a syntax error."""

    def __init__(self, tokens: Sequence[Token], size: int) -> None:
        """Set up a parser for the tokens of a text with `size` characters."""
        self.tokens, self.at = [*tokens, Token("end", size, size)], 0

    def lines(self, *closing: str) -> list[list[AndOr]]:
        """Return the statements up to one of the words `closing`, or to the end, in groups that no line end divides."""
        groups: list[list[AndOr]] = []
        while True:
            starts_line = self._skip_lines() or not groups
            token = self.tokens[self.at]
            if token.kind == "end" or token.text in closing:
                return groups
            if starts_line:
                groups.append([])
            groups[-1].append(self._and_or())
            ended = self._take(";", "&") or self.tokens[self.at].kind in ("newline", "end")
            if not ended and self.tokens[self.at].text not in closing:
                raise Fault(self.tokens[self.at].start, "")

    def _skip_lines(self) -> bool:
        first = self.at
        while self.tokens[self.at].kind == "newline":
            self.at += 1
        return self.at > first

    def _take(self, *texts: str) -> Token | None:
        """Take the next token if it is one of `texts`; else return None."""
        token = self.tokens[self.at]
        if token.text not in texts or token.kind == "redirect":
            return None
        self.at += 1
        return token

    def _require(self, text: str, start: int) -> Token:
        """Take `text`, without which the statement that begins at `start` is not closed."""
        token = self._take(text)
        if token is not None:
            return token
        if self.tokens[self.at].kind == "end":
            raise Fault(start, f"a statement is never closed; expected {text}")
        raise Fault(self.tokens[self.at].start, "")

    def _word(self) -> Word:
        token = self.tokens[self.at]
        if token.kind != "word" or token.word is None:
            raise Fault(token.start, "")
        self.at += 1
        return token.word

    def _body(self, start: int, *closing: str) -> Body:
        """Read one statement or more up to one of `closing`."""
        body = tuple(chain.from_iterable(self.lines(*closing)))
        if not body:
            self._require("a command", start)
        return body

    def _and_or(self) -> AndOr:
        first, others = self._pipeline(), list[tuple[str, Pipeline]]()
        while sign := self._take("&&", "||"):
            self._skip_lines()
            others.append((sign.text, self._pipeline()))
        return AndOr(first, tuple(others), self.tokens[self.at].text == "&")

    def _pipeline(self) -> Pipeline:
        negations, token = 0, None
        while before := self._take("!", "time"):
            negations, token = negations + (before.text == "!"), before
        after = self.tokens[self.at]
        if token and (after.kind in ("newline", "end") or after.text in (";", "&")):
            empty = SimpleCommand(token.start, token.end, (), ())
            return Pipeline(token.start, token.end, bool(negations % 2), (empty,))
        stages = [self._statement()]
        while self._take("|", "|&"):
            self._skip_lines()
            stages.append(self._statement())
        # `! !` cancels out.
        return Pipeline(stages[0].start, stages[-1].end, bool(negations % 2), tuple(stages))

    def _statement(self) -> Statement:
        token, after = self.tokens[self.at], self.tokens[min(self.at + 1, len(self.tokens) - 1)]
        if token.kind in ("cond", "arith"):
            self.at += 1
            statement: Statement = Test(token.start, token.end, (), token)
        elif token.kind in ("word", "op") and token.text in COMPOUND:
            self.at += 1
            statement = COMPOUND[token.text](self, token)
        elif token.kind == "word" and not token.text and (after.kind, after.text) == ("op", "("):
            return self._function(token)
        else:
            return self._simple(token)
        first = self.at
        while self.tokens[self.at].kind == "redirect":
            self.at += 1
        statement.redirects += tuple(self.tokens[first : self.at])
        return statement

    def _simple(self, first: Token) -> SimpleCommand:
        if first.kind not in ("word", "redirect") or (first.kind == "word" and first.text):
            raise Fault(first.start, "")
        words, redirects = list[Word](), list[Token]()
        while (token := self.tokens[self.at]).kind in ("word", "redirect"):
            if token.kind == "redirect":
                redirects.append(token)
                self.at += 1
            else:
                words.append(self._word())
        # Without a word the redirections are the command.
        start, end = (
            (words[0].start, words[-1].end) if words else (redirects[-1].start, redirects[-1].end)
        )
        return SimpleCommand(start, end, tuple(redirects), tuple(words))

    def _function(self, first: Token) -> Statement:
        name = self._word()
        if self._take("("):
            self._require(")", first.start)
        self._skip_lines()
        statement = self._statement()
        if isinstance(statement, SimpleCommand | Function):
            raise Fault(statement.start, "")
        return Function(first.start, statement.end, (), name, statement)

    def _block(self, first: Token) -> Statement:
        body = self._body(first.start, "}")
        return Block(first.start, self._require("}", first.start).end, (), body)

    def _subshell(self, first: Token) -> Statement:
        body = self._body(first.start, ")")
        return Subshell(first.start, self._require(")", first.start).end, (), body)

    def _coprocess(self, first: Token) -> Statement:
        statement = self._statement()
        pipeline = Pipeline(statement.start, statement.end, False, (statement,))
        return Subshell(first.start, statement.end, (), (AndOr(pipeline, (), True),))

    def _if(self, first: Token) -> Statement:
        branches = list[tuple[Body | None, Body]]()
        while not branches or self._take("elif"):
            condition = self._body(first.start, "then")
            self._require("then", first.start)
            branches.append((condition, self._body(first.start, "elif", "else", "fi")))
        if self._take("else"):
            branches.append((None, self._body(first.start, "fi")))
        return If(first.start, self._require("fi", first.start).end, (), tuple(branches))

    def _case(self, first: Token) -> Statement:
        value = self._word()
        self._skip_lines()
        self._require("in", first.start)
        items = list[CaseItem]()
        self._skip_lines()
        while not (end := self._take("esac")):
            self._take("(")
            patterns = [self._word()]
            while self._take("|"):
                patterns.append(self._word())
            self._require(")", first.start)
            body = tuple(chain.from_iterable(self.lines(*ENDS, "esac")))
            sign = self._take(*ENDS)
            items.append(CaseItem(tuple(patterns), body, sign.text if sign else ""))
            self._skip_lines()
            if not sign or self.tokens[self.at].kind == "end":
                end = self._require("esac", first.start)
                break
        return Case(first.start, end.end, (), value, tuple(items))

    def _for(self, first: Token) -> Statement:
        counter = self.tokens[self.at] if self.tokens[self.at].kind == "counted" else None
        if counter:
            self.at += 1
        name, words = None if counter else self._word(), None
        self._skip_lines()
        if not counter and self._take("in"):
            words = list[Word]()
            while self.tokens[self.at].kind == "word":
                words.append(self._word())
        self._take(";")
        self._skip_lines()
        opening = self._take("{") or self._require("do", first.start)
        closing = "}" if opening.text == "{" else "done"
        body = self._body(first.start, closing)
        end = self._require(closing, first.start).end
        found = None if words is None else tuple(words)
        return For(first.start, end, (), first.text == "select", name, counter, found, body)

    def _while(self, first: Token) -> Statement:
        condition = self._body(first.start, "do")
        self._require("do", first.start)
        body = self._body(first.start, "done")
        end = self._require("done", first.start).end
        return While(first.start, end, (), first.text == "until", condition, body)


COMPOUND: Mapping[str, Callable[[Parser, Token], Statement]] = {
    "{": Parser._block,
    "(": Parser._subshell,
    "if": Parser._if,
    "case": Parser._case,
    "for": Parser._for,
    "select": Parser._for,
    "while": Parser._while,
    "until": Parser._while,
    "function": Parser._function,
    "coproc": Parser._coprocess,
}
"""The words and signs that begin a compound command."""
