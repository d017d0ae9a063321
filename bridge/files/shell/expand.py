"""Expansion of shell words: variables, defaults, text operators, arithmetic, output of commands that is known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bridge.errors import nearest
from bridge.files.shell import arithmetic, braces, parameters
from bridge.files.shell.patterns import Char, Unread, active, simple
from bridge.files.shell.pieces import DEFAULT_IFS, Break, Piece, Pieces, Span, Text, Unknown, known, words
from bridge.files.shell.scope import LIVE, Scope, Value, elements, several
from bridge.files.shell.source import Source
from bridge.files.shell.tokens import Fault, Part, Word

LENGTH = re.compile(r"#(?=[A-Za-z0-9_@*#?$!-])")
NAMED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
OPERATOR = re.compile(r":?[-=+?]|//?|%%?|##?|\^\^?|,,?|:|@[A-Za-z]$")
WHOLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\[.*\])?|[0-9]+|[@*]", re.DOTALL)
_STAR = r"\$\{(?:!\w+\[\*\]|\w+\[\*\][^}])"
_EACH = r"(?:\[@\]|\$@|\$\{@)"
EACH = re.compile(_EACH)
"""An expansion that becomes a word for each element, in quotes too."""
JOINED = re.compile(f"{_STAR}.*{_EACH}|{_EACH}.*{_STAR}", re.DOTALL)
ESCAPED = re.compile(rf"\$\{{.*\\[ \t].*{_EACH}|{_EACH}.*\$\{{.*\\[ \t]", re.DOTALL)
ODD = (
    ("[*]", JOINED, "a shell reads [*] beside [@] in one pair of quotes in a way of its own"),
    ("\\", ESCAPED, "a shell splits at a blank behind a backslash beside [@] in one pair of quotes"),
)
"""What nobody should write in double quotes: a sign of it, its form, and what is to be said of it; it may be several words."""
LITERAL = re.compile(r"[A-Za-z0-9_./:=,%@+-]+")
"""A word that stands for itself."""
ALL = ("@", "*")
OUTPUT = "it is the output of a command, and nothing is run"
FORM = "this form of expansion is not read"
FILES = "the files that fit decide it"
GLOBBING = re.compile(r"[*?\[(]")
"""What a pattern cannot do without."""
GROUPS = re.compile(r"[?*+@!]\(")

Expanded = list[Piece | Break]


class Runner(Protocol):
    """Who reads the commands inside of a word."""

    def capture(self, source: Source) -> Pieces:
        """What the commands of `source` write."""

    def stop(self, line: int, problem: str) -> None:
        """A shell stops at an expansion."""

    def doubt(self, line: int) -> None:
        """A shell may stop at an expansion: whether it goes on is not known."""

    def setter(self, name: str) -> int:
        """The line on which the script sets a variable anywhere; 0 if it sets it nowhere."""

    def settled_by(self, line: int) -> str:
        """What the branches around a line ask for, as options that say it."""


@dataclass(slots=True, unsafe_hash=True)
class Subject:
    """A variable that is expanded: its elements (None: it is not set), and how they are joined (`@`, `*` or not at all).

    `element` tells that it is one of an array, `before` that its index lies before the array.
    """

    name: str
    elements: list[tuple[int | str, Pieces]] | None
    joined: str = ""
    element: bool = False
    before: bool = False

    @property
    def words(self) -> list[Pieces]:
        return [word for _, word in self.elements or ()]


class Expander:
    """Expands the words of one source in a scope."""

    def __init__(self, source: Source, scope: Scope, runner: Runner) -> None:
        """`solid` tells that an empty expansion keeps its pair of quotes a word, as those do that have been worked on."""
        self.source, self.scope, self.runner = source, scope, runner
        self.solid = False

    # Words

    def words(self, word: Word, alone: bool = False) -> list[Pieces]:
        """The words that one word becomes; `alone` takes what the script sets nowhere for empty."""
        literal = self._literal(word)
        if literal is not None:
            return [literal]
        separators = self.scope.separators
        found: list[Pieces] = []
        for parts in braces.expanded(self.source.text, word.parts):
            pieces = self.parts(self._tilde(parts, False), False)
            if separators is None:
                pieces = [replace(piece, loose=True) if isinstance(piece, Unknown) else piece for piece in pieces]
                if any(isinstance(piece, Text) and piece.splits for piece in pieces):
                    pieces = [self.unknown(word, "IFS is not known", False)]
            split = words(emptied(pieces) if alone else pieces, separators or "")
            found += [self._globbed(one, word) for one in split]
        return found

    def text(self, word: Word, alone: bool = False, assigned: bool = False) -> Pieces:
        """The text that a word becomes where nothing is split: assigned values, patterns, names of files."""
        literal = self._literal(word)
        if literal is not None:
            return literal
        pieces = self.parts(self._tilde(word.parts, assigned), False)
        if alone:
            pieces = [Break() if isinstance(piece, Break) and piece.made else piece for piece in emptied(pieces)]
        return tuple(self.joined(pieces))

    def _literal(self, word: Word) -> Pieces | None:
        """A word that stands for itself; None for any other."""
        if len(word.parts) != 1 or word.parts[0].kind != "text" or self.source.segments is not None:
            return None
        said = self.source.text[word.start : word.end]
        return (Text(said, (word.start, word.end)),) if LITERAL.fullmatch(said) else None

    def joined(self, pieces: Iterable[Piece | Break]) -> Iterator[Piece]:
        """Pieces where nothing is split."""
        for piece in pieces:
            yield Text(piece.joiner, (0, 0), True, plain=False) if isinstance(piece, Break) else piece

    def _globbed(self, word: Pieces, written: Word) -> Pieces:
        """A word that may become names of files is not known."""
        fitting = any(isinstance(piece, Text) and not piece.quoted and GLOBBING.search(piece.text) for piece in word)
        if not fitting or "noglob" in self.scope.options:
            return word
        text = "".join(piece.text if isinstance(piece, Text) and not piece.quoted else "\0" for piece in word)
        opened = text.find("[")
        groups = "extglob" in self.scope.options and GROUPS.search(text)
        if "*" in text or "?" in text or (opened >= 0 and "]" in text[opened:]) or groups:
            spelling = "".join(piece.text if isinstance(piece, Text) else piece.spelling for piece in word)
            place = self.source.place(written.start, written.end)
            return (Unknown(spelling, place, self.source.line(written.start), FILES, loose=True),)
        return word

    def _tilde(self, parts: tuple[Part, ...], assigned: bool) -> tuple[Part, ...]:
        """`~` at the start as a part of its own; behind a colon too where a value is assigned."""
        if "~" not in self.source.text:
            return parts
        found: list[Part] = []
        for index, part in enumerate(parts):
            said = self.source.said(part)
            if part.kind != "text" or "~" not in said or (index and not assigned):
                found.append(part)
                continue
            pattern = r"(?:(?<=:)|^)~[^/:\s]*" if assigned else r"^~[^/]*"
            position, last = part.start, len(parts) == index + 1
            for match in re.finditer(pattern, said) if not index or assigned else ():
                whole = match.end() < len(said) or last
                if whole and (match.start() or not index):
                    found += [Part("text", position, part.start + match.start())] if match.start() else []
                    found.append(Part("tilde", part.start + match.start(), part.start + match.end()))
                    position = part.start + match.end()
            found += [Part("text", position, part.end)] if position < part.end else []
        return tuple(found)

    # Parts

    def parts(self, parts: Iterable[Part], quoted: bool) -> Expanded:
        """The pieces that parts become, before splitting."""
        return [piece for part in parts for piece in self.part(part, quoted)]

    def part(self, part: Part, quoted: bool) -> Iterable[Piece | Break]:
        """The pieces of one part."""
        match part.kind:
            case "text":
                return self.source.pieces(part.start, part.end, quoted)
            case "escape":
                return self._escaped(part)
            case "single":
                empty = part.end - part.start == 2
                return [self._nothing(part)] if empty else self.source.pieces(part.start + 1, part.end - 1, True)
            case "double":
                return self._double(part)
            case "ansi":
                return [self._known_or(part, True, lambda: parameters.decoded(self.source.text[part.start + 2 : part.end - 1]))]
            case "made":
                return [Text(part.text, self._place(part), quoted, plain=False)]
            case "arith":
                return [self.arithmetic(part, quoted)]
            case "command" | "backtick":
                return [*self.output(part, quoted)]
            case "short" | "param":
                return self._parameter(part, quoted)
            case "tilde":
                return self._home(part)
        return [self.unknown(part, OUTPUT, True)]

    def _nothing(self, part: Part) -> Text:
        """An empty pair of quotes is a word as well."""
        return Text("", self._place(part), True, plain=False)

    def _escaped(self, part: Part) -> list[Piece]:
        said = self.source.said(part)
        kept = "\\" if said == "\\" else said[1:].removeprefix("\n")
        return [Text(kept, self._place(part), True, plain=False)] if kept else []

    def _double(self, part: Part) -> Expanded:
        said = self.source.said(part)
        odd = next((why for sign, form, why in ODD if sign in said and "@" in said and form.search(said)), "")
        if odd:
            return [replace(self.unknown(part, odd, True), loose=True)]
        found: Expanded = []
        missing = False
        before, self.solid = self.solid, False
        for inner in part.parts:
            pieces = list(self.part(inner, True))
            missing |= not pieces and inner.kind != "escape"
            found += pieces
        if (not missing or self.solid) and not any(isinstance(piece, Break) or _shows(piece) for piece in found):
            return [self._nothing(part)]
        self.solid |= before
        return [piece for piece in found if isinstance(piece, Break) or _shows(piece)] if missing else found

    def _home(self, part: Part) -> list[Piece]:
        value = self.scope.get("HOME") if self.source.said(part) == "~" else None
        text = known(value.pieces) if value else None
        if text is None:
            return [self.unknown(part, "the home folder is not known", True)]
        return [Text(text, self._place(part), True, plain=False)]

    def unknown(self, part: Part | Word, why: str, quoted: bool, absent: bool = False) -> Unknown:
        """An expansion that cannot be known."""
        return Unknown(self.source.said(part), self._place(part), self.source.line(part.start), why, quoted, absent=absent)

    def _place(self, part: Part | Word) -> Span:
        return self.source.place(part.start, part.end)

    def _made(self, part: Part, text: str, quoted: bool) -> Text:
        return Text(text, self._place(part), quoted, plain=False, splits=not quoted)

    def _known_or(self, part: Part, quoted: bool, make: Callable[[], str]) -> Piece:
        """What `make` finds, or an unknown with the reason."""
        try:
            return self._made(part, make(), quoted)
        except Unread as error:
            return self.unknown(part, str(error), quoted)
        except arithmetic.Wrong as error:
            return self.wrong(part, str(error), quoted)

    def wrong(self, part: Part, problem: str, quoted: bool) -> Unknown:
        """An expansion on which a shell stops."""
        self.runner.doubt(self.source.line(part.start))
        why = f"a shell stops here: {problem}{self._unset_in(part)}"
        self.runner.stop(self.source.line(part.start), f"{self.source.said(part)}: {why}")
        return self.unknown(part, why, quoted)

    def _unset_in(self, part: Part) -> str:
        """The variables of an expansion that nothing sets, as options that say them."""
        names = dict.fromkeys(re.findall(r"\$\{?([A-Za-z_]\w*|\d+)", self.source.said(part)))
        absent = dict.fromkeys(found for name in names for found in self._asked(name))
        return f"; it needs {' and '.join(f'--env {name}=...' for name in absent)}" if absent else ""

    def settling(self, text: str) -> str:
        """The variables of a text that are not known, as options that say them."""
        names = dict.fromkeys(re.findall(r"\$\{?#?([A-Za-z_]\w*|\d+)", text))
        asked = dict.fromkeys(found for name in names for found in self._asked(name))
        if asked:
            return f"; say it with {' '.join(f'--env {name}=...' for name in asked)}"
        values = ((name, value) for name in names if (value := self.scope.get(name)))
        unknown = ((name, piece.why) for name, value in values for piece in value.pieces if isinstance(piece, Unknown))
        return next((f"; ${name} is not known: {why}" for name, why in unknown if not why.startswith("a branch")), "")

    def _asked(self, name: str) -> list[str]:
        """What a variable without a value waits for: itself, or what its value is made of."""
        value = self.scope.get(name)
        if value is None:
            return [self.scope.outer(name)] if not name.isdigit() or self.scope.arguments is None else []
        return [found for piece in value.pieces if isinstance(piece, Unknown) for found in re.findall(r"--env (\w+)=", piece.why)]

    # Parameters

    def _parameter(self, part: Part, quoted: bool) -> Expanded:
        """A variable with what is done to it."""
        try:
            if part.kind == "short":
                subject = self._subject(part.text or self.source.text[part.start + 1 : part.end], None)
                return self._spread(subject, part, quoted)
            return self._braced(part, quoted)
        except Unread as error:
            unknown = self.unknown(part, str(error), quoted)
            return [replace(unknown, loose=True) if EACH.search(self.source.said(part)) else unknown]
        except arithmetic.Wrong as error:
            return [self.wrong(part, str(error), quoted)]

    def _braced(self, part: Part, quoted: bool) -> Expanded:
        text, start, end = self.source.text, part.start + 2, part.end - 1
        if text[start:end] != "#" and LENGTH.match(text, start) and not text.startswith("#}", start):
            subject, position = self._at(start + 1, end)
            if position == end and subject.before:
                raise arithmetic.Wrong("the index lies before the array")
            if position == end:
                return [self._made(part, str(self._count(subject)), quoted)]
        if text.startswith("!", start) and end > start + 1:
            return self._indirect(part, start + 1, end, quoted)
        subject, position = self._at(start, end)
        return self._operated(part, subject, position, quoted) if position < end else self._spread(subject, part, quoted)

    def _at(self, start: int, end: int) -> tuple[Subject, int]:
        """The variable at `start`, and where its name and its index end."""
        found = NAMED.match(self.source.text, start, end)
        if found is None:
            raise Unread(FORM)
        position, index = found.end(), None
        if self.source.text.startswith("[", position):
            position = self._closed(position + 1)
            index = found.end() + 1, position - 1
        return self._subject(found[0], index), position

    def _closed(self, position: int) -> int:
        try:
            return self.source.scanner.balanced(position, "[", "]")
        except Fault:
            raise Unread(FORM) from None

    def _subject(self, name: str, index: tuple[int, int] | None) -> Subject:
        if name in ALL:
            return Subject(name, list(enumerate(self.scope.given, 1)), name)
        if name in "#?$!-":
            return Subject(name, [(0, self._special(name))])
        value = self.scope.get(name)
        said = self.source.text[slice(*index)] if index else ""
        if said in ALL:
            return Subject(name, list(elements(value)) if value else None, said)
        return self.element(name, value, self.key(index, value) if index and (value or said[:1] == "-") else None, bool(index))

    def element(self, name: str, value: Value | None, key: int | str | None, indexed: bool) -> Subject:
        """One element of a variable."""
        if value is None or not value.words:
            before = isinstance(key, int) and key < 0
            if before and "errexit" in self.scope.options:
                raise arithmetic.Wrong("the index lies before the array, on which set -e ends a shell")
            return Subject(name, None, element=value is not None, before=before)
        if key is None:
            key = "0" if value.table else 0
        if isinstance(key, int) and key < 0:
            if value.open:
                raise Unread("the length of the array is not known")
            key += max((int(place) for place in value.places), default=-1) + 1
        before = isinstance(key, int) and key < 0
        if before and "errexit" in self.scope.options:
            raise arithmetic.Wrong("the index lies before the array, on which set -e ends a shell")
        word = value.at(key)
        return Subject(name, None if word is None else [(key, word)], element=indexed or value.array, before=before)

    def key(self, index: tuple[int, int], value: Value | None) -> int | str:
        """The place that an index means."""
        parts = self.source.double(*index) if not (value and value.table) else self._bare(*index)
        pieces = self.parts(parts, True)
        text = known(self.joined(pieces if value and value.table else self._settled(pieces)))
        if text is None:
            raise Unread("the index is not known")
        if value and value.table and not text and "errexit" in self.scope.options:
            raise arithmetic.Wrong("an empty key is an error, on which set -e ends a shell")
        return text if value and value.table else arithmetic.value(text.replace('"', ""), self)

    def _bare(self, start: int, end: int) -> list[Part]:
        parts: list[Part] = []
        source = self.source
        scanner, position = type(source.scanner)(source.text[:end]), start
        while position < end:
            char = source.text[position]
            if char in "\\'\"$`":
                position = scanner.piece(char, position, parts)
            else:
                parts.append(Part("text", position, position + 1))
                position += 1
        return parts

    def _special(self, name: str) -> Pieces:
        if name == "#":
            if any(several(word) for word in self.scope.given):
                raise Unread("the number of arguments is not known")
            return (Text(str(len(self.scope.given)), (0, 0), plain=False),)
        if name == "?" and self.scope.status is not None:
            return (Text(str(self.scope.status), (0, 0), plain=False),)
        raise Unread("only a run tells")

    def _count(self, subject: Subject) -> int:
        if subject.joined:
            if any(several(word) for word in subject.words):
                raise Unread("it counts what is not known")
            return len(subject.words)
        return len(simple(self._text(subject)))

    def _text(self, subject: Subject) -> str:
        """The known text of a variable that is not a list."""
        if subject.elements is None:
            self._must_be_settled(subject)
            return ""
        text = known(subject.words[0])
        if text is None:
            raise Unread(next(piece.why for piece in subject.words[0] if isinstance(piece, Unknown)))
        return text

    def _must_be_settled(self, subject: Subject) -> None:
        if not self.settled(subject):
            raise Absent(self.unset(subject.name))

    def settled(self, subject: Subject) -> bool:
        """Whether it is known that a variable is not set."""
        return (subject.element or self.scope.settled(subject.name)) and "nounset" not in self.scope.options

    def unset(self, name: str) -> str:
        """Why a variable that is not set is not known."""
        if name.isdigit() and self.scope.arguments is None:
            return f"the script is started with it; say it with --env {self.scope.outer(name)}=..."
        if "nounset" in self.scope.options and self.scope.settled(name):
            return "it is not set, and set -u stops a shell here"
        if self.scope.sourced:
            return f"the file that is sourced on line {self.scope.sourced} may set it; say it with --env {name}=..."
        line = self.runner.setter(name)
        if line:
            hint = self.runner.settled_by(line) or f"; say it with --env {name}=..."
            return f"the script sets it on line {line} alone, which is not reached before{hint}"
        return f"the script sets it nowhere{nearest(name, self.scope.variables) or f'; say it with --env {name}=...'}"

    # What is put in its place

    def _spread(self, subject: Subject, part: Part, quoted: bool) -> Expanded:
        """The elements of a variable as they stand."""
        if subject.elements is None and not subject.joined:
            if self.settled(subject):
                return [self._made(part, "", quoted)]
            alone = not self.scope.sourced and "nounset" not in self.scope.options
            if "nounset" in self.scope.options:
                self.runner.doubt(self.source.line(part.start))
            return [self.unknown(part, self.unset(subject.name), quoted, absent=alone)]
        if subject.elements is None and not self.settled(subject):
            unknown = self.unknown(part, self.unset(subject.name), quoted, absent=not self.scope.sourced)
            return [replace(unknown, loose=bool(self.scope.sourced) and subject.joined == "@")]
        self.solid |= bool(subject.joined and subject.words)
        return self._listed(subject.words, subject.joined, part, quoted, plain=True)

    def _listed(self, listed: Sequence[Pieces], joined: str, part: Part, quoted: bool, plain: bool = False) -> Expanded:
        found: Expanded = []
        for position, word in enumerate(listed):
            if position:
                found.append(self._between(joined, part, quoted, plain))
            found += self._used(word, part, quoted) or [self._made(part, "", quoted)]
        if not listed and joined == "*" and quoted:
            return [self._made(part, "", quoted)]
        return found

    def _check_joiner(self, joined: str, quoted: bool) -> None:
        """Where IFS is empty, bash joins names, keys and what it trims with nothing, with a blank or with a byte of its own."""
        if joined == "*" and not quoted and self.scope.separators == "":
            raise Unread("IFS is empty, and a shell joins [*] in a way of its own here")

    def _between(self, joined: str, part: Part, quoted: bool, plain: bool) -> Piece | Break:
        """Where nothing is split, elements as they are stand apart by a blank, and what is made of them by IFS."""
        if joined != "*" and quoted and plain:
            return Break()
        separators = self.scope.separators
        if separators is None:
            raise Unread("IFS is not known")
        first = separators[:1]
        if joined != "*" and quoted:
            if not first:
                raise Unread("IFS is empty, and a shell joins [@] in a way of its own where nothing is split")
            return Break(first, made=True)
        if quoted:
            return Text(first, self._place(part), True, plain=False)
        return Break(first if joined == "*" else " ", first.strip(DEFAULT_IFS))

    def _used(self, pieces: Pieces, part: Part, quoted: bool) -> list[Piece]:
        place, found = self._place(part), list[Piece]()
        for piece in pieces:
            if isinstance(piece, Text):
                found.append(piece.used(place, quoted))
            elif piece.line:
                found.append(replace(piece, quoted=quoted, uses=(place, *piece.uses)))
            else:
                line, said = self.source.line(part.start), self.source.said(part)
                found.append(replace(piece, quoted=quoted, span=place, line=line, spelling=said))
        return found

    def _indirect(self, part: Part, start: int, end: int, quoted: bool) -> Expanded:
        """`${!NAME}`, `${!NAME[@]}`, `${!PREFIX*}`."""
        text = self.source.text
        found = NAMED.match(text, start, end)
        if found is None:
            raise Unread(FORM)
        rest = text[found.end() : end]
        self._check_joiner(rest.strip("[]"), quoted)
        if rest in ALL:
            scope = self.scope
            if any(name.startswith(found[0]) for name in LIVE):
                raise Unread("a shell sets variables of that name itself")
            names = sorted(name for name in {*scope.variables, *scope.outside} if name.startswith(found[0]) and scope.get(name))
            listed = [(Text(name, (0, 0), plain=False),) for name in names]
            return self._listed(listed, rest, part, quoted)
        if rest in ("[@]", "[*]"):
            subject = self._subject(found[0], (found.end() + 1, end - 1))
            if any(several(word) for word in subject.words):
                raise Unread("the keys of the array are not known")
            keys = [(Text(str(key), (0, 0), plain=False),) for key, _ in subject.elements or ()]
            return self._listed(keys, rest[1], part, quoted)
        subject, position = self._at(start, end)
        target = self._target(self._text(subject), found[0])
        return self._operated(part, target, position, quoted) if position < end else self._spread(target, part, quoted)

    def _target(self, name: str, through: str) -> Subject:
        if not WHOLE.fullmatch(name):
            raise Unread(f"{through} does not name a variable")
        plain, _, index = name.partition("[")
        if not index:
            return self._subject(name, None)
        value = self.scope.get(plain)
        if index[:-1] in ALL:
            return Subject(plain, list(elements(value)) if value else None, index[:-1])
        key: int | str = index[:-1] if value and value.table else arithmetic.value(index[:-1], self)
        return self.element(plain, value, key, True)

    # Operators

    def _operated(self, part: Part, subject: Subject, start: int, quoted: bool) -> Expanded:
        found = OPERATOR.match(self.source.text, start, part.end - 1)
        if found is None:
            raise Unread(FORM)
        operator, start = found[0], found.end()
        if operator[-1] in "-=+?" and operator != ":":
            return self._chosen(part, subject, operator, start, quoted)
        if operator == ":":
            return self._cut(part, subject, start, quoted)
        if subject.elements is None:
            return self._spread(subject, part, quoted)
        if operator[0] in "#%":
            self._check_joiner(subject.joined, quoted)
        change = self._change(part, operator, start)
        self.solid |= subject.joined == "@" and bool(subject.words)
        if not subject.joined:
            self.solid |= operator[0] in "/^,@" or known(subject.words[0]) != ""
        made: list[Pieces] = [(self._turned(part, word, change, quoted),) for word in subject.words]
        return self._listed(made, subject.joined, part, quoted)

    def _turned(self, part: Part, word: Pieces, change: Callable[[str], str], quoted: bool) -> Piece:
        text = known(word)
        if text is None:
            unknown = self.unknown(part, next(piece.why for piece in word if isinstance(piece, Unknown)), quoted)
            return replace(unknown, loose=several(word))
        return self._made(part, change(text), quoted)

    def _change(self, part: Part, operator: str, start: int) -> Callable[[str], str]:
        """What an operator does to a text."""
        if operator[0] == "@":
            if operator[1] not in parameters.TURNED:
                raise Unread(FORM)
            return parameters.TURNED[operator[1]]
        if operator[0] == "/":
            pattern, put = self._halves(part, start)
            return lambda text: parameters.replaced(text, operator, pattern, put)
        chars = self.chars(self.joined(self.operand(part, start, True)))
        if operator[0] in "#%":
            return lambda text: parameters.trimmed(text, operator, chars)
        return lambda text: parameters.lettered(text, operator, chars)

    def chars(self, pieces: Iterable[Piece]) -> list[Char]:
        """The characters of a pattern; groups are read as such under `extglob` alone."""
        found = active(pieces)
        return found if "extglob" in self.scope.options else [(char, special and char != "(") for char, special in found]

    def _halves(self, part: Part, start: int) -> tuple[list[Char], str]:
        """Pattern and replacement of `${NAME/pattern/replacement}`: a slash that is written parts them, none of a value."""
        before, after = _parted(self.source.text, self.source.operand(start, part.end - 1, True), start)
        put = active(self.joined(self.parts(after, False)))
        if after and self.source.text.startswith("~", after[0].start):
            raise Unread("the home folder is not known")
        if any(char in (("&", True), ("\\", True)) for char in put):
            raise Unread("& in a replacement means other things to other releases of bash")
        pattern = self.chars(self.joined(self.parts(self._tilde(before, False), False)))
        return pattern, "".join(char for char, _ in put)

    def operand(self, part: Part, start: int, single: bool, quoted: bool = False) -> Expanded:
        """The word behind an operator."""
        return self.parts(self._tilde(self.source.operand(start, part.end - 1, single), False), quoted)

    def _chosen(self, part: Part, subject: Subject, operator: str, start: int, quoted: bool) -> Expanded:
        """`${NAME:-text}` and its kin."""
        absent = self._absent(subject, operator[0] == ":")
        if absent is None:
            raise Unread(self._reason(subject))
        if operator[-1] == "+":
            nothing: Expanded = [] if subject.joined == "@" else [self._made(part, "", quoted)]
            return nothing if absent else self._default(part, start, quoted)
        if not absent:
            return self._spread(subject, part, quoted)
        if operator[-1] == "?":
            if self.settled(subject) or subject.elements is not None:
                raise arithmetic.Wrong(f"{subject.name} is not set")
            self.runner.doubt(self.source.line(part.start))
            raise Unread(self.unset(subject.name))
        default = self._default(part, start, quoted)
        if operator[-1] == "=":
            if subject.joined or subject.element or subject.name.isdigit():
                raise Unread(FORM)
            self.scope.set(subject.name, Value((tuple(self.joined(default)),)))
            default = [*self._used(tuple(self.joined(default)), part, quoted)]
        place = self._place(part)
        return [replace(piece, uses=(place, *piece.uses)) if not isinstance(piece, Break) else piece for piece in default]

    def _default(self, part: Part, start: int, quoted: bool) -> Expanded:
        """What stands for a variable: as in double quotes where the whole stands in them, else split like any expansion."""
        found = list(self.operand(part, start, not quoted, quoted))
        if not quoted:
            found = [replace(piece, splits=True) if isinstance(piece, Text) and not piece.quoted else piece for piece in found]
        return found or [self._made(part, "", quoted)]

    def _absent(self, subject: Subject, empty: bool) -> bool | None:
        """Whether a variable is not set, or empty where that counts as well; None if that is not known."""
        if subject.elements is None or (subject.joined and not subject.elements):
            return None if self.scope.sourced and not self.scope.settled(subject.name) and not subject.joined else True
        if any(isinstance(piece, Unknown) and piece.perhaps for word in subject.words for piece in word):
            return None
        if any(several(word) for word in subject.words):
            return None
        if not empty:
            return False
        pieces = [piece for word in subject.words for piece in word]
        if any(isinstance(piece, Text) and piece.text for piece in pieces) or (subject.joined and len(subject.words) > 1):
            return False
        unknowns = [piece for piece in pieces if isinstance(piece, Unknown) and not piece.absent]
        return None if unknowns else True

    def _reason(self, subject: Subject) -> str:
        if subject.elements is None:
            return self.unset(subject.name)
        return next(piece.why for word in subject.words for piece in word if isinstance(piece, Unknown))

    def _cut(self, part: Part, subject: Subject, start: int, quoted: bool) -> Expanded:
        """`${NAME:first:count}`."""
        if subject.elements is None:
            return self._spread(subject, part, quoted)
        text = known(self.joined(self._settled(self.parts(self.source.double(start, part.end - 1), True))))
        if text is None:
            raise Unread("the place of a part is not known")
        first, count = (arithmetic.value(half, self) if half is not None else None for half in _bounds(text.replace('"', "")))
        if not subject.joined:
            return [self._turned(part, subject.words[0], lambda whole: self._part_of(whole, first or 0, count), quoted)]
        kept = self._sliced(subject, first or 0, count)
        self.solid |= subject.joined == "@" and bool(kept)
        return self._listed(kept, subject.joined, part, quoted)

    def _part_of(self, whole: str, first: int, count: int | None) -> str:
        self.solid |= -len(whole) <= first <= len(whole)
        return parameters.sliced(whole, first, count)

    def _sliced(self, subject: Subject, first: int, count: int | None) -> list[Pieces]:
        if any(several(word) for word in subject.words):
            raise Unread("the length of the list is not known")
        listed = subject.elements or []
        if subject.name in ALL and (not first or first < -len(listed)):
            raise Unread("the name of the script is a part of it")
        if count is not None and count < 0:
            raise arithmetic.Wrong("the number of elements is below 0")
        value = self.scope.get(subject.name) if subject.name not in ALL else None
        if value is not None and value.table:
            raise Unread("the order of an associative array is not sure")
        last = max((int(place) for place, _ in listed), default=-1) + 1
        begin = first if first >= 0 else last + first
        found = [word for place, word in listed if int(place) >= begin] if begin >= 0 else []
        return found[:count]

    # Arithmetic and commands

    def arithmetic(self, part: Part, quoted: bool) -> Piece:
        """`$((...))`: its value, where all that it needs is known."""
        old = self.source.text.startswith("$[", part.start)
        span = (part.start + 2, part.end - 1) if old else (part.start + 3, part.end - 2)
        return self._known_or(part, quoted, lambda: str(self.calculated(*span)))

    def calculated(self, start: int, end: int) -> int:
        """The value of the expression from `start` to `end`; raises `Unread` and `Wrong`."""
        pieces = list(self.joined(self._settled(self.parts(self.source.double(start, end), True))))
        text = "".join(piece.text if isinstance(piece, Text) else "" for piece in pieces).replace('"', "")
        unknown = next((piece for piece in pieces if isinstance(piece, Unknown)), None)
        if unknown is None:
            return self.evaluated(text)
        self.forget(text, unknown.why)
        raise Unread(unknown.why)

    def _settled(self, pieces: Expanded) -> Expanded:
        """Pieces of an expression: what nothing sets is empty in it, unless a shell stops at that."""
        return pieces if "nounset" in self.scope.options else emptied(pieces)

    def evaluated(self, text: str) -> int:
        """The value of an expression; what it may change is not known if it is not."""
        try:
            return arithmetic.value(text, self)
        except Unread as error:
            self.forget(text, str(error))
            raise

    def forget(self, text: str, why: str) -> None:
        """What an expression may change is not known any more."""
        for name in arithmetic.assigned(text):
            unknown = Unknown(f"${name}", (0, 0), 0, why)
            value = self.scope.get(name)
            array, table = bool(value and value.array), bool(value and value.table)
            self.scope.set(name, Value(((replace(unknown, loose=array),),), array, ("",) if table else None, table))

    def text_of(self, name: str, index: str | None) -> str:
        value = self.scope.get(name)
        key: int | str | None = None
        if index is not None and value is not None:
            key = index if value.table else arithmetic.value(index, self)
        subject = self.element(name, value, key, index is not None)
        if subject.elements is None and not self.scope.sourced:
            if "nounset" in self.scope.options:
                raise arithmetic.Unset(f"{name} is not set, and set -u is on; say it with --env {name}=...")
            return ""
        return self._text(subject)

    def assign(self, name: str, index: str | None, number: int) -> None:
        """Give a variable the value of an expression."""
        word: Pieces = (Text(str(number), (0, 0), plain=False),)
        value = self.scope.get(name)
        if index is None and not (value and value.array):
            self.scope.set(name, Value((word,)))
            return
        value = value or Value((), True)
        key: int | str = (index or "0") if value.table else arithmetic.value(index or "0", self)
        self.scope.set(name, stored(value, key, word))

    def output(self, part: Part, quoted: bool) -> list[Piece]:
        """`$(...)`: what is known of what its commands write."""
        whole = part.kind == "command"
        source = self.source.within(part.start + 2, part.end - 1) if whole else self._backtick(part, quoted)
        pieces = _stripped(self.runner.capture(source))
        unknown = next((piece for piece in pieces if isinstance(piece, Unknown)), None)
        if unknown is not None:
            why = unknown.why if unknown.line and unknown.why != OUTPUT else OUTPUT
            return [self.unknown(part, why, quoted)]
        return [self._made(part, known(pieces) or "", quoted)]

    def _backtick(self, part: Part, quoted: bool) -> Source:
        said = self.source.text[part.start + 1 : part.end - 1]
        if "\\" not in said:
            return self.source.within(part.start + 1, part.end - 1)
        text = re.sub(r'\\([$`\\"])' if quoted else r"\\([$`\\])", r"\1", said)
        return Source.of((Text(text, self._place(part), plain=False),), self.source)


class Absent(Unread):
    """A variable that nothing sets."""


def stored(value: Value, key: int | str, word: Pieces) -> Value:
    """An array with another element; raises `Unread` if its places are not known."""
    if value.open:
        raise Unread("the places of the array are not known")
    if isinstance(key, int) and key < 0:
        key += max((int(place) for place in value.places), default=-1) + 1
        if key < 0:
            raise arithmetic.Wrong("the index lies before the array")
    return value.put(key, word)


def emptied(pieces: Iterable[Piece | Break]) -> Expanded:
    """Pieces as of a script that is started alone: what nothing sets is empty."""
    return [
        Text("", piece.span, piece.quoted, plain=False) if isinstance(piece, Unknown) and piece.absent else piece
        for piece in pieces
    ]


def _shows(piece: Piece | Break) -> bool:
    return not isinstance(piece, Text) or bool(piece.text)


def _stripped(pieces: Pieces) -> list[Piece]:
    found = list(pieces)
    while found and isinstance(found[-1], Text):
        text = found[-1].text.rstrip("\n")
        if text:
            found[-1] = replace(found[-1], text=text, plain=False)
            break
        found.pop()
    return found


def _parted(text: str, parts: Sequence[Part], start: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Parts before and behind the first slash that stands there as it is; one at the very start belongs to the first half."""
    for index, part in enumerate(parts):
        place = text.find("/", max(part.start, start + 1), part.end) if part.kind == "text" else -1
        if place >= 0:
            left = (replace(part, end=place),) if place > part.start else ()
            right = (replace(part, start=place + 1),) if place + 1 < part.end else ()
            return (*parts[:index], *left), (*right, *parts[index + 1 :])
    return tuple(parts), ()


def _bounds(text: str) -> tuple[str, str | None]:
    """The two halves of `first:count`; a colon that belongs to `? :` parts nothing."""
    waiting = depth = 0
    for place, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        waiting += char == "?"
        if char == ":" and not depth:
            if not waiting:
                return text[:place], text[place + 1 :]
            waiting -= 1
    return text, None
