"""Shell text as tokens: words with quotes and expansions, operators, redirections and conditions.

Each token has its position.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
BLANK = re.compile(r"(?:[ \t]|\\\n)+")
PLAIN = re.compile(r"[^ \t\n;&|()<>\\'\"$`]+")
INSIDE = re.compile(r"[^\\\"$`]+")
OPERAND = re.compile(r"[^\\'\"$`{}]+")
OPERATOR = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;&|()]")
REDIRECT = re.compile(
    r"(?:(?P<fd>[0-9]+|\{" + NAME + r"\}))?(?P<op><<<|<<-|<<|<>|<&|>>|>&|>\||&>>|&>|<|>)"
)
REDIRECTING = "<>&{0123456789"
"""First characters of redirections."""
ASSIGNED = re.compile(NAME + r"\+?=$|" + NAME + r"\[.*\]\+?=$", re.DOTALL)
SUBSCRIPT = re.compile(NAME + r"\[")
ADDING = re.compile(r"\+?=")
CONDITION = re.compile(r"\[\[(?=[ \t\n])")
DENIED = re.compile(r"!(?=\()")
BRACKETS = re.compile(r"[ \t]*(\()[ \t]*(\))")
PORTABLE = re.compile(r"[ \t]+-p(?=[ \t\n])")
GAP = re.compile(r"(?:[ \t\n]|\\\n)+")
CONDITION_END = re.compile(r"\]\](?=[ \t\n;&|)]|$)")
SIGN = re.compile(r"&&|\|\||[()<>]|!(?=[ \t\n(])")
ASSIGNING = re.compile(NAME + r"\+?=|" + NAME + r"\[")
ADDED = re.compile(NAME + r"\+?=")
PARAMETER = re.compile(r"[#!]?(?:[A-Za-z0-9_]+|[@*#?$!-])")
SHORT = re.compile(NAME + r"|[0-9@*#?$!-]")
KEYWORDS = frozenset(
    (
        *(
            "if",
            "then",
            "elif",
            "else",
            "fi",
            "while",
            "until",
            "do",
            "done",
            "case",
            "esac",
            "for",
            "select",
            "function",
        ),
        *("{", "}", "!", "time", "coproc"),
    )
)
CLOSING = frozenset(("fi", "done", "esac", "}"))
MOST_STEPS, STEPS = 100_000, 4
"""Limit on scanned characters: `MOST_STEPS`, plus `STEPS` for each character of the text."""
DEEPEST = 60
MOST_TOKENS = 100_000
TABS = "\t*"
HOLE = "\ue000"
"""Character that stands for an unknown part, in a text that is read a second time."""


class Fault(ValueError):
    """Raised for a syntax error; `place` is its offset."""

    def __init__(self, place: int, problem: str) -> None:
        super().__init__(problem)
        self.place, self.problem = place, problem


@dataclass(slots=True, unsafe_hash=True)
class WordPart:
    """A part of a word: literal text, quotes or an expansion, from `start` to `end`.

    `kind` is one of text, escape, single, ansi, double, param, short, command, backtick, arith,
    process, array, made. A part of the kind `made` has a `text` that the script does not contain.
    """

    kind: str
    start: int
    end: int
    parts: tuple[WordPart, ...] = ()
    words: tuple[Word, ...] = ()
    text: str = ""


@dataclass(slots=True, unsafe_hash=True)
class Word:
    """A word, as it is written in the source."""

    start: int
    end: int
    parts: tuple[WordPart, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """The body of a here-document: its start, its end, and whether its delimiter is quoted.

    With `tabs`, leading tabs are removed.
    """

    start: int
    end: int
    quoted: bool
    tabs: bool


@dataclass(slots=True)
class Token:
    """A token of a script: `kind` is one of word, op, newline, redirect, cond, arith, counted.

    `items` are the words and signs of a condition; `body` the here-document of a redirection.
    """

    kind: str
    start: int
    end: int
    text: str = ""
    word: Word | None = None
    items: tuple[Word | str, ...] = ()
    body: Document | None = None
    fd: str = ""


@dataclass(frozen=True, slots=True)
class _Pending:
    token: Token
    mark: str
    quoted: bool
    tabs: bool


@dataclass(slots=True)
class _Shared:
    """State that all scanners of one text share: the number of characters that they may still scan,
    and the ends of expansions found so far.
    """

    left: int
    ends: dict[tuple[int, bool], tuple[str, int]] = field(default_factory=dict)


class Scanner:
    """Finds where words and expansions end."""

    def __init__(self, text: str, shared: _Shared | None = None) -> None:
        self.text, self.size, self.depth = text, len(text), 0
        self.shared = shared or _Shared(MOST_STEPS + STEPS * len(text))

    def word(self, start: int, stops: str = "") -> Word:
        """Return the word that begins at `start`."""
        parts: list[WordPart] = []
        position = self._subscript(start, parts)
        while position < self.size:
            plain = PLAIN.match(self.text, position)
            if plain:
                end = plain.end()
                self._literal(parts, position, end)
                position = end
                continue
            after = self._special(self.text[position], position, start, parts)
            if after == position:
                break
            position = after
        return Word(start, position, tuple(parts))

    def _subscript(self, start: int, parts: list[WordPart]) -> int:
        """Scan `NAME[index]=` at the start of a word, and return the offset after it.

        The index may contain blanks.
        """
        match = SUBSCRIPT.match(self.text, start)
        if not match:
            return start
        try:
            end = self.scan_brackets(match.end(), "[", "]")
        except Fault:
            return start
        if not ADDING.match(self.text, end):
            return start
        self._literal(parts, start, end)
        return end

    def _literal(self, parts: list[WordPart], start: int, end: int) -> None:
        if parts and parts[-1].kind == "text" and parts[-1].end == start:
            start = parts.pop().start
        parts.append(WordPart("text", start, end))

    def _special(self, char: str, position: int, start: int, parts: list[WordPart]) -> int:
        """Scan the part that begins with a special character, and return its end.

        If the word ends before that character, return `position`.
        """
        if char in "<>" and self.text.startswith("(", position + 1):
            end = self.command(position + 2)
            parts.append(WordPart("process", position, end))
            return end
        if char == "(":
            return self._parenthesis(position, start, parts)
        if char in " \t\n;&|()<>":
            return position
        return self.piece(char, position, parts)

    def _parenthesis(self, position: int, start: int, parts: list[WordPart]) -> int:
        """Scan an array after `NAME=`, or a group of patterns after one of `?*+@!`, and return its
        end.

        Any other bracket ends the word.
        """
        if position > start and ASSIGNED.match(self.text[start:position]):
            end, words = self.array(position + 1)
            parts.append(WordPart("array", position, end, words=words))
            return end
        if position > start and self.text[position - 1] in "?*+@!" and parts[-1].kind == "text":
            return self.group(position, parts)
        return position

    def group(self, position: int, parts: list[WordPart]) -> int:
        """Scan `(...)` of an extended pattern, as text with its quotes and expansions, and return
        its end.
        """
        depth = 0
        while position < self.size:
            char = self.text[position]
            if char in "'\"$`\\":
                position = self.piece(char, position, parts)
                continue
            depth += (char == "(") - (char == ")")
            self._literal(parts, position, position + 1)
            position += 1
            if not depth:
                return position
        raise Fault(position - 1, "a bracket is never closed; expected )")

    def piece(self, char: str, position: int, parts: list[WordPart]) -> int:
        """Scan a quote, an escape or an expansion outside of double quotes, and return its end."""
        if char == "'":
            end = self._find("'", position)
            parts.append(WordPart("single", position, end + 1))
            return end + 1
        if char == '"':
            return self._double(position, parts, "double", position + 1)
        if char == "\\":
            end = min(position + 2, self.size)
            parts.append(WordPart("escape", position, end))
            return end
        if char == "$" and self.text.startswith("'", position + 1):
            end = self._ansi(position + 2)
            parts.append(WordPart("ansi", position, end))
            return end
        if char == "$" and self.text.startswith('"', position + 1):
            return self._double(position, parts, "double", position + 2)
        return self.expansion(char, position, parts, False)

    def _find(self, char: str, position: int) -> int:
        end = self.text.find(char, position + 1)
        if end < 0:
            raise Fault(position, "")
        return end

    def _ansi(self, position: int) -> int:
        start = position
        while position < self.size:
            if self.text[position] == "'":
                return position + 1
            position += 2 if self.text[position] == "\\" else 1
        raise Fault(start - 2, "")

    def _double(self, position: int, parts: list[WordPart], kind: str, start: int) -> int:
        inner: list[WordPart] = []
        end = self.scan_quotes(start, inner)
        if end >= self.size:
            raise Fault(position, "")
        parts.append(WordPart(kind, position, end + 1, tuple(inner)))
        return end + 1

    def scan_quotes(self, position: int, parts: list[WordPart], stop: str = '"') -> int:
        """Scan text as in double quotes, up to `stop`, and return its end."""
        while position < self.size and self.text[position] != stop:
            plain = INSIDE.match(self.text, position)
            if plain:
                self._literal(parts, position, plain.end())
                position = plain.end()
            elif self.text[position] == "\\":
                position = self._scan_escape(position, parts, stop)
            elif self.text[position] in "$`":
                position = self.expansion(self.text[position], position, parts, True)
            else:
                self._literal(parts, position, position + 1)
                position += 1
        return position

    def _scan_escape(self, position: int, parts: list[WordPart], stop: str) -> int:
        end = min(position + 2, self.size)
        # Within double quotes a backslash hides only these; before any other character it is literal.
        escapes = self.text[position + 1 : end] in (
            "$",
            "`",
            "\\",
            "\n",
            *((stop,) if stop else ()),
        )
        if escapes:
            parts.append(WordPart("escape", position, end))
            return end
        self._literal(parts, position, position + 1)
        return position + 1

    def expansion(self, char: str, position: int, parts: list[WordPart], in_quotes: bool) -> int:
        """Scan an expansion that begins with `$` or a backtick, and return its end."""
        if char == "`":
            end = position + 1
            while end < self.size and self.text[end] != "`":
                end += 2 if self.text[end] == "\\" else 1
            if end >= self.size:
                raise Fault(position, "")
            parts.append(WordPart("backtick", position, end + 1))
            return end + 1
        kind, end = self._dollar(position, in_quotes)
        if kind:
            parts.append(WordPart(kind, position, end))
        else:
            self._literal(parts, position, end)
        return end

    def _dollar(self, position: int, in_quotes: bool) -> tuple[str, int]:
        # Nested scanners come to the same expansion several times; each is scanned once.
        key = position, in_quotes
        if key not in self.shared.ends:
            self.shared.ends[key] = self._scan_opening(position, in_quotes)
        return self.shared.ends[key]

    def _scan_opening(self, position: int, in_quotes: bool) -> tuple[str, int]:
        text = self.text
        # `$((` may also open a command substitution with a subshell: it is arithmetic only if `))` closes it.
        if text.startswith("((", position + 1):
            end = self.arithmetic(position + 3)
            if end:
                return "arith", end
        if text.startswith("(", position + 1):
            return "command", self.command(position + 2)
        if text.startswith("{", position + 1):
            return "param", self.braces(position, in_quotes)
        if text.startswith("[", position + 1):
            return "arith", self.scan_brackets(position + 2, "[", "]")
        short = SHORT.match(text, position + 1)
        return ("short", short.end()) if short else ("", position + 1)

    def arithmetic(self, position: int) -> int:
        """Return the offset after the closing `))` of an arithmetic expression; 0 if a single bracket closes it."""
        depth, start = 0, position
        while position < self.size:
            char = self.text[position]
            if char == ")" and not depth:
                return position + 2 if self.text.startswith("))", position) else 0
            depth += (char == "(") - (char == ")")
            position = self.skip(char, position, start)
        return 0

    def skip(self, char: str, position: int, start: int) -> int:
        """Return the offset after the character at `position`, or after the quotes or the expansion that it opens."""
        self.shared.left -= 1
        if self.shared.left < 0:
            raise Fault(start, "")
        if char == "\\":
            return position + 2
        if char in "'\"$`":
            self._deeper(start)
            end = self.piece(char, position, [])
            self.depth -= 1
            return end
        return position + 1

    def _deeper(self, start: int) -> None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise RecursionError(start)

    def scan_brackets(self, position: int, opening: str, closing: str) -> int:
        """Return the offset after the bracket that closes the bracket open at `position`."""
        depth, start = 0, position
        while position < self.size:
            char = self.text[position]
            if char == closing and not depth:
                return position + 1
            if char == "\n" and closing == "]":
                break
            depth += (char == opening) - (char == closing)
            position = self.skip(char, position, start)
        raise Fault(start - 1, f"a bracket is never closed; expected {closing}")

    def braces(self, start: int, in_quotes: bool) -> int:
        """The end of `${...}`."""
        match = PARAMETER.match(self.text, start + 2)
        position = match.end() if match else start + 2
        if self.text.startswith("[", position):
            position = self.scan_brackets(position + 1, "[", "]")
        single = not in_quotes or self.text[position : position + 1] in ("#", "%", "/", "^", ",")
        return self.operand(position, [], single) + 1

    def operand(self, position: int, parts: list[WordPart], single: bool) -> int:
        """Scan the word after the operator of `${NAME...}`, and return the offset of the closing `}`.

        With `single`, single quotes are read as quotes.
        """
        start = position
        while position < self.size:
            plain = OPERAND.match(self.text, position)
            char = self.text[position]
            if plain:
                self._literal(parts, position, plain.end())
                position = plain.end()
            elif char == "}":
                return position
            elif char == "\\" and not single:
                position = self._scan_escape(
                    position, parts, "}" if self.text.startswith("}", position + 1) else '"'
                )
            elif char == "{" or (char == "'" and not single):
                self._literal(parts, position, position + 1)
                position += 1
            else:
                self._deeper(start)
                position = self.piece(char, position, parts)
                self.depth -= 1
        raise Fault(max(start - 2, 0), "a brace is never closed; expected }")

    def command(self, position: int) -> int:
        """Return the offset after the `)` that closes a command substitution."""
        self._deeper(position)
        lexer = Lexer(self.text, position, inside=True, depth=self.depth, shared=self.shared)
        lexer.run()
        self.depth -= 1
        return lexer.position + 1

    def array(self, position: int) -> tuple[int, tuple[Word, ...]]:
        """Return the end of `(...)`, and its elements."""
        start, words = position, list[Word]()
        while position < self.size:
            char, blank = self.text[position], BLANK.match(self.text, position)
            if blank:
                position = blank.end()
            elif char == "\n":
                position += 1
            elif char == "#":
                position = self._line_end(position)
            elif char == ")":
                return position + 1, tuple(words)
            else:
                element = self.element(position)
                if element.end == position:
                    raise Fault(position, "")
                words.append(element)
                position = element.end
        raise Fault(start - 1, "a bracket is never closed; expected )")

    def element(self, position: int) -> Word:
        """Return a word of an array, which may be `[key]=value`."""
        if self.text[position] == "[":
            try:
                end = self.scan_brackets(position + 1, "[", "]")
            except Fault:
                end = 0
            if end and ADDING.match(self.text, end):
                after = self.word(end)
                first = after.parts[0]
                return Word(
                    position, after.end, (WordPart("text", position, first.end), *after.parts[1:])
                )
        return self.word(position)

    def _line_end(self, position: int) -> int:
        end = self.text.find("\n", position)
        return self.size if end < 0 else end


class Lexer(Scanner):
    """Splits a script, or the text within `$(...)`, into tokens."""

    def __init__(
        self,
        text: str,
        position: int = 0,
        inside: bool = False,
        depth: int = 0,
        shared: _Shared | None = None,
    ) -> None:
        super().__init__(text, shared)
        self.position, self.inside, self.depth = position, inside, depth
        self.tokens: list[Token] = []
        # Where the next word stands: only there are keywords such. `open` are the brackets and
        # cases around it, `pending` the here-documents whose bodies begin behind the next line end.
        self.place = "command"
        self.open: list[str] = []
        self.pending: list[_Pending] = []

    def run(self) -> list[Token]:
        """Return all tokens.

        With `inside`, stop at the closing bracket; `position` is then the offset of this bracket.
        """
        start = self.position
        while self.position < self.size:
            char = self.text[self.position]
            if char in " \t\\" and (blank := BLANK.match(self.text, self.position)):
                self.position = blank.end()
            elif char == "#":
                self.position = self._line_end(self.position)
            elif char == "\n":
                self._newline()
            # The pattern of a `case` has one, too.
            elif self.inside and char == ")" and not self.open:
                return self.tokens
            else:
                self._token(char)
        if self.inside:
            raise Fault(start - 2, "a bracket is never closed; expected )")
        self._documents()
        return self.tokens

    def _add(
        self, kind: str, end: int, text: str = "", word: Word | None = None, fd: str = ""
    ) -> Token:
        token = Token(kind, self.position, end, text, word, fd=fd)
        self.tokens.append(token)
        if len(self.tokens) > MOST_TOKENS:
            raise Fault(
                token.start,
                f"found more than {MOST_TOKENS:,} words; a launch script is smaller, is this the right file?",
            )
        self.position = end
        return token

    def _newline(self) -> None:
        self._add("newline", self.position + 1)
        if self.place not in ("case-in", "pattern", "for-in"):
            self.place = "command"
        self._documents()

    def _documents(self) -> None:
        """Scan the bodies of the here-documents whose operators are on the line before."""
        for pending in self.pending:
            # Within `$(...)` the bracket may follow the delimiter on its line.
            tabs, after = TABS if pending.tabs else "", "[)]|" if self.inside else ""
            match = re.compile(
                f"^{tabs}{re.escape(pending.mark)}(?={after}$)", re.MULTILINE
            ).search(self.text, self.position)
            if not match:
                raise Fault(
                    pending.token.start,
                    "a here-document is never closed; expected its delimiter on a line of its own",
                )
            pending.token.body = Document(
                self.position, match.start(), pending.quoted, pending.tabs
            )
            self.position = match.end()
            if len(self.pending) > 1 and self.position < self.size:
                self.position += 1
        self.pending.clear()

    def _token(self, char: str) -> None:
        if self.place == "for-name" and self.text.startswith("((", self.position):
            return self._count_word()
        redirect = REDIRECT.match(self.text, self.position) if char in REDIRECTING else None
        if redirect and self.place != "pattern" and not self.text.startswith("(", redirect.end()):
            return self._redirect(redirect)
        # `((` at the start of a command is arithmetic if `))` closes it, else two subshells.
        if self.place == "command" and self.text.startswith("((", self.position):
            end = self.arithmetic(self.position + 2)
            if end:
                self._add("arith", end)
                self.place = "after"
                return None
        operator = OPERATOR.match(self.text, self.position) if char in ";&|()" else None
        if operator:
            return self._operator(operator)
        return self._word()

    def _count_word(self) -> None:
        end = self.arithmetic(self.position + 2)
        if not end:
            raise Fault(self.position, "a bracket is never closed; expected ))")
        self._add("counted", end)
        self.place = "for-in"

    def _redirect(self, match: re.Match[str]) -> None:
        token = self._add("redirect", match.end(), match["op"], fd=match["fd"] or "")
        blank = BLANK.match(self.text, self.position)
        position = blank.end() if blank else self.position
        target = self.word(position)
        if target.end == position:
            raise Fault(token.start, "")
        token.word, token.end, self.position = target, target.end, target.end
        if match["op"] in ("<<", "<<-"):
            # Any quote in the delimiter turns expansion in the body off.
            has_quotes = any(part.kind != "text" for part in target.parts)
            self.pending.append(
                _Pending(
                    token,
                    _unquote_delimiter(self.text, target.parts),
                    has_quotes,
                    match["op"] == "<<-",
                )
            )
        if self.place == "command":
            self.place = "command"

    def _operator(self, match: re.Match[str]) -> None:
        sign = match[0]
        self._add("op", match.end(), sign)
        if sign in (";;", ";&", ";;&"):
            self.place = "pattern"
        elif self.place == "pattern":
            self.place = "command" if sign == ")" else "pattern"
        elif sign == "(":
            self.open.append("(")
            self.place = "command"
        elif sign == ")":
            if not self.open or self.open.pop() != "(":
                raise Fault(match.start(), "")
            self.place = "after"
        else:
            self.place = "command"

    def _word(self) -> None:
        if self.place == "command" and CONDITION.match(self.text, self.position):
            return self._condition()
        if self.place == "command" and DENIED.match(self.text, self.position):
            self._add("word", self.position + 1, "!")
            return None
        word = self.word(self.position)
        if word.end == word.start:
            raise Fault(self.position, "")
        text = self.text[word.start : word.end]
        self._add("word", word.end, text if self._keyword(text) else "", word=word)
        self._after_word(text, word)
        return None

    def _keyword(self, text: str) -> bool:
        if self.place == "command":
            return text in KEYWORDS
        return (
            (self.place in ("case-in", "for-in") and text in ("in", "do", "{"))
            or (self.place == "pattern" and text == "esac")
            or (self.place == "after" and text in KEYWORDS)
        )

    def _after_word(self, text: str, word: Word) -> None:
        place = self.place
        if place in ("command", "after") and text in KEYWORDS:
            self._after_keyword(text)
        elif place == "case-word":
            self.place = "case-in"
        elif place == "case-in":
            self.open.append("case")
            self.place = "pattern"
        elif place == "pattern":
            if text == "esac":
                self._close_case(word)
        elif place == "for-name":
            self.place = "for-in"
        elif place == "for-in":
            self.place = "command" if text in ("do", "{") else "arguments"
        elif place == "function-name":
            self._brackets()
            self.place = "command"
        elif (
            place == "command"
            and ASSIGNING.match(text)
            and (ADDED.match(text) or "]=" in text or "]+=" in text)
        ):
            pass  # the command may still follow
        elif place == "command" and self._brackets():
            self.place = "command"
        elif place == "command":
            self.place = "arguments"

    def _brackets(self) -> bool:
        """Scan `()` after the name of a function. Returns False if there is no `()`."""
        match = BRACKETS.match(self.text, self.position)
        if not match:
            return False
        for place in (1, 2):
            self.position = match.start(place)
            self._add("op", match.end(place), match[place])
        return True

    def _after_keyword(self, text: str) -> None:
        places = {
            "case": "case-word",
            "for": "for-name",
            "select": "for-name",
            "function": "function-name",
        }
        if text == "esac":
            self._close_case(self.tokens[-1])
        elif text == "time":
            match = PORTABLE.match(self.text, self.position)
            self.tokens[-1].end = self.position = match.end() if match else self.position
        else:
            self.place = places.get(text, "after" if text in CLOSING else "command")

    def _close_case(self, word: Word | Token) -> None:
        if not self.open or self.open.pop() != "case":
            raise Fault(word.start, "")
        self.place = "after"

    # Conditions

    def _condition(self) -> None:
        start = self.position
        position, items = start + 2, list[Word | str]()
        while True:
            blank = GAP.match(self.text, position)
            position = blank.end() if blank else position
            if position >= self.size:
                raise Fault(start, "a condition is never closed; expected ]]")
            if CONDITION_END.match(self.text, position):
                break
            position = self._item(position, items)
        token = self._add("cond", position + 2)
        token.items = tuple(items)
        self.place = "after"

    def _item(self, position: int, items: list[Word | str]) -> int:
        before = self.text_of(items[-1]) if items else ""
        if before == "=~" and len(items) > 1:
            word = self._regular(position)
        else:
            # Behind a comparison a bracket begins a pattern. `<(...)` is a word, and not a sign.
            sign = SIGN.match(self.text, position)
            sign = None if before in ("==", "=", "!=") else sign
            if sign and not (sign[0] in "<>" and self.text.startswith("(", sign.end())):
                items.append(sign[0])
                return sign.end()
            word = self.pattern(position) if before in ("==", "=", "!=") else self.word(position)
        if word.end == position:
            raise Fault(position, "")
        items.append(word)
        return word.end

    def text_of(self, item: Word | str) -> str:
        """Return an item as it is written."""
        return item if isinstance(item, str) else self.text[item.start : item.end]

    def pattern(self, position: int) -> Word:
        """Return the word that is a pattern; it may begin with a group."""
        return self.word(position)

    def _regular(self, start: int) -> Word:
        """Return the word that is a regular expression.

        It may contain brackets, bars, and blanks within brackets.
        """
        parts: list[WordPart] = []
        position, depth = start, 0
        while position < self.size:
            char = self.text[position]
            if char in " \t\n" and not depth:
                break
            if char in "'\"$`\\":
                position = self.piece(char, position, parts)
                continue
            depth += (char == "(") - (char == ")")
            if depth < 0 or (char in "&;" and not depth):
                break
            self._literal(parts, position, position + 1)
            position += 1
        return Word(start, position, tuple(parts))


def _unquote_delimiter(text: str, parts: Sequence[WordPart]) -> str:
    """Return the delimiter of a here-document without quotes."""
    texts = []
    for part in parts:
        spelling = text[part.start : part.end]
        inside = {
            "single": spelling[1:-1],
            "double": spelling[1:-1],
            "escape": spelling[1:],
            "ansi": spelling[2:-1],
        }
        texts.append(inside.get(part.kind, spelling))
    return "".join(texts)
