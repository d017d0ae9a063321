"""Expansion of shell words: variables, default values, operators on text, arithmetic, and the
output of commands where it is known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from bridge.shell import arithmetic, braces, expansion_subjects, operators, parameters
from bridge.shell.expansion import Expanded, Expansion, Subject
from bridge.shell.expansion_subjects import ALL, FORM, NAMED, put_element
from bridge.shell.files import path_in_folder
from bridge.shell.patterns import Unread
from bridge.shell.scope import LIVE, Value, several
from bridge.shell.source import ShellSource
from bridge.shell.tokens import Word, WordPart
from bridge.shell.word_pieces import (
    Break,
    Piece,
    Pieces,
    Text,
    Unknown,
    emptied,
    text_if_known,
    unknowns,
    words,
)

LENGTH = re.compile(r"#(?=[A-Za-z0-9_@*#?$!-])")
_STAR = r"\$\{(?:!\w+\[\*\]|\w+\[\*\][^}])"
_EACH = r"(?:\[@\]|\$@|\$\{@)"
EACH = re.compile(_EACH)
"""Matches expansions that yield one word for each element, even in double quotes, such as `"$@"`."""
JOINED = re.compile(f"{_STAR}.*{_EACH}|{_EACH}.*{_STAR}", re.DOTALL)
ESCAPED = re.compile(rf"\$\{{.*\\[ \t].*{_EACH}|{_EACH}.*\$\{{.*\\[ \t]", re.DOTALL)
ODD = (
    ("[*]", JOINED, "[*] and [@] in one pair of quotes are not supported"),
    ("\\", ESCAPED, "a backslash before a blank and [@] in one pair of quotes are not supported"),
)
"""Texts in double quotes that shells read in unusual ways.

Each has a character to search for first, a pattern, and a message.
"""
LITERAL = re.compile(r"[A-Za-z0-9_./:=,%@+-]+")
"""Matches a word without expansions and quotes."""
OUTPUT = "the value is the output of a command, and commands are not run"
FILES = "the value depends on the files that match the pattern"
EXPANDED = re.compile(r"\$\{?([A-Za-z_]\w*|\d+)")
"""Matches the names of variables in an expansion."""
COUNTED = re.compile(r"(?<![\w#])[A-Za-z_]\w*|(?<=\$)\d+|(?<=\$\{)\d+")
"""Matches the names of variables in an arithmetic expansion, where they need no dollar sign."""
GLOBBING = re.compile(r"[*?\[(]")
"""Matches a character such as `*`. Every glob pattern has at least one of these characters."""
GROUPS = re.compile(r"[?*+@!]\(")


class Expander(Expansion):
    """Expands the words of one source with the variables of a scope."""

    # Words

    def words(self, word: Word, alone: bool = False) -> list[Pieces]:
        """Return the words that one word expands to.

        With `alone`, variables that the script never sets are empty.
        """
        # Most words of a script are literal.
        literal = self._literal(word)
        if literal is not None:
            return [literal]
        separators = self.scope.separators
        expansions: list[Pieces] = []
        try:
            choices = self.choices(word)
        except OverflowError as error:
            return [(replace(self.unknown(word, str(error), False), loose=True),)]
        for parts in choices:
            pieces = self.parts(self.tilde(parts, False), False)
            if separators is None:
                pieces = [
                    replace(piece, loose=True) if isinstance(piece, Unknown) else piece
                    for piece in pieces
                ]
                if any(isinstance(piece, Text) and piece.splits for piece in pieces):
                    pieces = [self.unknown(word, "IFS is not known", False)]
            # In the order of a shell: braces, tilde, variables and commands, then word splitting,
            # then names of files.
            if alone:
                self.runner.record_unset(pieces)
                pieces = emptied(pieces)
            split = words(pieces, separators or "")
            expansions += [self._expand_glob(one, word) for one in split]
        return expansions

    def choices(self, word: Word) -> list[tuple[WordPart, ...]]:
        """Return the words that brace expansion makes of one word."""
        alternatives = braces.expand_braces(self.source.text, word.parts)
        return (
            alternatives if len(alternatives) == 1 or self.scope.on("braceexpand") else [word.parts]
        )

    def text(self, word: Word, alone: bool = False, assigned: bool = False) -> Pieces:
        """Return the text that a word expands to without word splitting, as in assignments, patterns and file names."""
        literal = self._literal(word)
        if literal is not None:
            return literal
        pieces = self.parts(self.tilde(word.parts, assigned), False)
        if alone:
            self.runner.record_unset(pieces)
            pieces = [
                Break() if isinstance(piece, Break) and piece.made else piece
                for piece in emptied(pieces)
            ]
        return tuple(self.without_splitting(pieces))

    def _literal(self, word: Word) -> Pieces | None:
        """Return the text of a literal word; None for a word with expansions or quotes."""
        if len(word.parts) != 1 or word.parts[0].kind != "text" or self.source.segments is not None:
            return None
        text = self.source.text[word.start : word.end]
        return (Text(text, (word.start, word.end)),) if LITERAL.fullmatch(text) else None

    def _expand_glob(self, word: Pieces, source_word: Word) -> Pieces:
        """Return the word, or an unknown word if it may expand to names of files."""
        fitting = any(
            isinstance(piece, Text) and not piece.quoted and GLOBBING.search(piece.text)
            for piece in word
        )
        if not fitting or self.scope.options >= {"noglob"}:
            return word
        # Quoted and unknown parts are no pattern: a NUL stands for them, which no name has.
        text = "".join(
            piece.text if isinstance(piece, Text) and not piece.quoted else "\0" for piece in word
        )
        bracket = text.find("[")
        groups = GROUPS.search(text) and self.scope.may("extglob")
        if "*" in text or "?" in text or (bracket >= 0 and "]" in text[bracket:]) or groups:
            spelling = "".join(
                piece.text if isinstance(piece, Text) else piece.spelling for piece in word
            )
            place = self.source.place(source_word.start, source_word.end)
            why = next((piece.why for piece in unknowns(word)), FILES)
            return (Unknown(spelling, place, self.source.line(source_word.start), why, loose=True),)
        return word

    # Parts

    def parts(self, parts: Iterable[WordPart], in_quotes: bool) -> Expanded:
        """Return the pieces that parts expand to, before word splitting."""
        return [piece for part in parts for piece in self.part(part, in_quotes)]

    def part(self, part: WordPart, in_quotes: bool) -> Iterable[Piece | Break]:
        """Return the pieces that one part expands to."""
        match part.kind:
            case "text":
                return self.source.pieces(part.start, part.end, in_quotes)
            case "escape":
                # A backslash before a line end joins the lines, and leaves nothing. At the end of
                # the text it is itself.
                text = self.source.text_of(part)
                char = "\\" if text == "\\" else text[1:].removeprefix("\n")
                return [Text(char, self.place(part), True, plain=False)] if char else []
            case "single":
                empty = part.end - part.start == 2
                return (
                    [self._nothing(part)]
                    if empty
                    else self.source.pieces(part.start + 1, part.end - 1, True)
                )
            case "double":
                return self._double(part)
            case "ansi":
                text = self.source.text[part.start + 2 : part.end - 1]
                return self._whole(
                    part,
                    True,
                    lambda: [self.make_text(part, parameters.decode_escapes(text), True)],
                )
            case "made":
                return [Text(part.text, self.place(part), in_quotes, plain=False)]
            case "arith":
                return self._whole(
                    part,
                    in_quotes,
                    lambda: [self.make_text(part, self._arithmetic(part), in_quotes)],
                )
            case "command" | "backtick":
                return [*self.output(part, in_quotes)]
            case "short" | "param":
                return self._whole(part, in_quotes, lambda: self._parameter(part, in_quotes))
            case "tilde":
                return self._home(part)
        return [self.unknown(part, OUTPUT, True)]

    def _nothing(self, part: WordPart) -> Text:
        """Return the empty text of a pair of quotes without content, which counts as a word."""
        return Text("", self.place(part), True, plain=False)

    def _double(self, part: WordPart) -> Expanded:
        text = self.source.text_of(part)
        odd = next(
            (why for sign, form, why in ODD if sign in text and "@" in text and form.search(text)),
            "",
        )
        if odd:
            return [replace(self.unknown(part, odd, True), loose=True)]
        # Quotes make a word even if nothing is in them, except around `"$@"` without arguments.
        # `missing` tells that some expansion gave no piece at all, `solid` that another one makes a
        # word in any case.
        result: Expanded = []
        missing = False
        before, self.solid = self.solid, False
        for inner in part.parts:
            pieces = list(self.part(inner, True))
            missing |= not pieces and inner.kind != "escape"
            result += pieces
        if (not missing or self.solid) and not any(
            isinstance(piece, Break) or _shows(piece) for piece in result
        ):
            return [self._nothing(part)]
        self.solid |= before
        several = any(
            isinstance(piece, Break) for piece in result
        )  # an empty element between two words is a word
        return [piece for piece in result if _shows(piece)] if missing and not several else result

    def _home(self, part: WordPart) -> list[Piece]:
        value = self.scope.get("HOME") if self.source.text_of(part) == "~" else None
        text = text_if_known(value.pieces) if value else None
        if text is None:
            return [self.unknown(part, "the home folder is not known", True)]
        return [Text(text, self.place(part), True, plain=False)]

    def _whole(self, part: WordPart, in_quotes: bool, make: Callable[[], Expanded]) -> Expanded:
        """Return the pieces that `make` computes.

        If `make` fails, or computes them from a variable that nothing sets, return an unknown piece
        with the reason.
        """
        outer, self.lacking = self.lacking, []
        # A number is one word, whichever number it is.
        single = in_quotes or part.kind == "arith"
        try:
            result = make()
            if self.lacking:
                alone = (
                    None
                    if any(isinstance(piece, Break) for piece in result)
                    else text_if_known(emptied(result))
                )
                result = [self._failed(part, self.lack(), single, alone)]
        except Unread as error:
            result = [self._failed(part, str(error), single)]
        except arithmetic.Wrong as error:
            result = [self.wrong(part, error, single)]
        finally:
            self.lacking = outer
        return result

    def _failed(
        self, part: WordPart, why: str, in_quotes: bool, alone: str | None = None
    ) -> Unknown:
        many = part.kind == "param" and bool(EACH.search(self.source.text_of(part)))
        return replace(self.unknown(part, why, in_quotes, alone), loose=many)

    def wrong(self, part: WordPart, error: arithmetic.Wrong, in_quotes: bool) -> Unknown:
        """Return the unknown piece for an expansion with an error."""
        line, discards = self.source.line(part.start), isinstance(error, arithmetic.Discarded)
        if self.lacking and discards:
            # Whoever starts the script sets them, and then there is no error.
            return self.unknown(part, self.lack(str(error)), in_quotes)
        # The unset variables in it may be the reason. The message says how to set them.
        names = (COUNTED if part.kind == "arith" else EXPANDED).findall(self.source.text_of(part))
        absent = dict.fromkeys(
            variable for name in dict.fromkeys(names) for variable in self._variables_to_set(name)
        )
        env_options = " ".join(f"--env {name}=..." for name in absent)
        if not discards:
            self.runner.doubt(line)
        hint = f"; set {env_options}" if env_options and "--env" not in str(error) else ""
        why = f"a shell stops here: {error}{hint}"
        self.runner.stop(line, f"{self.source.text_of(part)}: {why}", discards)
        return self.unknown(part, why, in_quotes)

    def settling(self, text: str) -> str:
        """Return the command-line options that would set the unknown variables of a text, for messages."""
        names = dict.fromkeys(re.findall(r"\$\{?#?([A-Za-z_]\w*|\d+)", text))
        absent = dict.fromkeys(
            variable for name in names for variable in self._variables_to_set(name)
        )
        if absent:
            return f"; set {' '.join(f'--env {name}=...' for name in absent)}"
        values = ((name, value) for name in names if (value := self.scope.get(name)))
        unknown = (
            (name, piece.why)
            for name, value in values
            for piece in value.pieces
            if isinstance(piece, Unknown)
        )
        return next((f"; ${name} is not known: {why}" for name, why in unknown), "")

    def _variables_to_set(self, name: str) -> list[str]:
        """Return the variables that the user would have to set: the unknown variable, or the
        variables from which its value is made.
        """
        value = self.scope.get(name)
        if value is None:
            return (
                [self.scope.outer(name)]
                if not name.isdigit() or self.scope.arguments is None
                else []
            )
        return [
            variable
            for piece in value.pieces
            if isinstance(piece, Unknown)
            for variable in re.findall(r"--env (\w+)=", piece.why)
        ]

    # Parameters

    def _parameter(self, part: WordPart, in_quotes: bool) -> Expanded:
        """Return the value of `$NAME` or `${NAME...}`, with the operator applied if there is one."""
        if part.kind == "short":
            subject = expansion_subjects.subject_of_name(
                self, part.text or self.source.text[part.start + 1 : part.end], None
            )
            return self.spread(subject, part, in_quotes)
        return self._expand_braced(part, in_quotes)

    def _expand_braced(self, part: WordPart, in_quotes: bool) -> Expanded:
        # `${#NAME}` is a length, `${#}` the number of arguments, and `${#-text}` an operator behind
        # that number.
        text, start, end = self.source.text, part.start + 2, part.end - 1
        if (
            text[start:end] != "#"
            and LENGTH.match(text, start)
            and not text.startswith("#}", start)
        ):
            subject, position = expansion_subjects.at(self, start + 1, end)
            if position == end and "[" not in text[start + 1 : end] and subject.indexed:
                raise Unread("the length of a reference to an element is not supported")
            if position == end and subject.before:
                raise arithmetic.Wrong("the index lies before the start of the array")
            if position == end:
                return [
                    self.make_text(
                        part, str(expansion_subjects.count_elements(self, subject)), in_quotes
                    )
                ]
            if subject.name not in expansion_subjects.SPECIAL:
                raise expansion_subjects.malformed_expansion(self, start, end)
        if text.startswith("!", start) and end > start + 1:
            return self._indirect(part, start + 1, end, in_quotes)
        subject, position = expansion_subjects.at(self, start, end)
        return self._apply_operator(part, subject, position, in_quotes)

    # What is put in its place

    def _indirect(self, part: WordPart, start: int, end: int, in_quotes: bool) -> Expanded:
        """Return the value of `${!NAME}`, `${!NAME[@]}` or `${!PREFIX*}`."""
        text = self.source.text
        match = NAMED.match(text, start, end)
        if match is None:
            raise Unread(FORM)
        rest = text[match.end() : end]
        self.check_joiner(rest.strip("[]"), in_quotes)
        if rest in ALL:
            scope = self.scope
            if any(name.startswith(match[0]) for name in LIVE):
                raise Unread(f"a shell itself sets variables whose names begin with {match[0]}")
            names = sorted(
                name
                for name in {*scope.variables, *scope.outside}
                if name.startswith(match[0]) and scope.get(name)
            )
            elements = [(Text(name, (0, 0), plain=False),) for name in names]
            return self.list_pieces(elements, rest, part, in_quotes)
        if rest in ("[@]", "[*]"):
            subject = expansion_subjects.subject_of_name(self, match[0], (match.end() + 1, end - 1))
            if any(several(word) for word in subject.words):
                raise Unread("the keys of the array are not known")
            keys = [(Text(str(key), (0, 0), plain=False),) for key, _ in subject.elements or ()]
            return self.list_pieces(keys, rest[1], part, in_quotes)
        subject, position = expansion_subjects.at(self, start, end)
        target = expansion_subjects.target(
            self, expansion_subjects.text_of(self, subject), match[0]
        )
        return self._apply_operator(part, target, position, in_quotes)

    def _apply_operator(
        self, part: WordPart, subject: Subject, position: int, in_quotes: bool
    ) -> Expanded:
        """Return the value of a variable, with the operator at `position` applied if there is one."""
        if position < part.end - 1:
            return operators.apply_operator(self, part, subject, position, in_quotes)
        return self.spread(subject, part, in_quotes)

    # Operators

    # Arithmetic and commands

    def _arithmetic(self, part: WordPart) -> str:
        """Return the value of `$((...))`."""
        old = self.source.text.startswith("$[", part.start)
        span = (part.start + 2, part.end - 1) if old else (part.start + 3, part.end - 2)
        return str(self.evaluate_span(*span))

    def evaluate_span(self, start: int, end: int) -> int:
        """Return the value of the arithmetic expression from `start` to `end`.

        Raises `Unread` if it is not known, and `Wrong` if a shell stops at it.
        """
        pieces = list(
            self.without_splitting(self.plain(self.parts(self.source.double(start, end), True)))
        )
        text = "".join(piece.text if isinstance(piece, Text) else "" for piece in pieces).replace(
            '"', ""
        )
        unknown = next((piece for piece in pieces if isinstance(piece, Unknown)), None)
        if unknown is None:
            return self.evaluate_text(text)
        self.forget(text, unknown.why)
        raise Unread(unknown.why)

    def evaluate_text(self, text: str) -> int:
        """Return the value of an expression.

        If the value is not known, the variables that the expression assigns become unknown too.
        """
        try:
            return arithmetic.value(text, self)
        except Unread as error:
            self.forget(text, str(error))
            raise
        except arithmetic.Wrong as error:
            if self.lacking:
                self.forget(text, self.lack(str(error)))
            raise

    def forget(self, text: str, why: str) -> None:
        """Mark as unknown the variables that an expression may change."""
        for target in arithmetic.assignable_names(text):
            name = self.scope.resolve_reference(target).partition("[")[0]
            unknown = Unknown(f"${name}", (0, 0), 0, why)
            value = self.scope.get(name)
            array, table = bool(value and value.array), bool(value and value.table)
            self.scope.set(
                name,
                Value(((replace(unknown, loose=array),),), array, ("",) if table else None, table),
            )

    def text_of(self, name: str, index: str | None) -> str:
        if index is None and "[" in (reference := self.scope.resolve_reference(name)):
            return expansion_subjects.text_of(
                self, expansion_subjects.target(self, reference, name)
            )
        value = self.scope.get(name)
        key: int | str | None = None
        if index is not None and value is not None:
            key = index if value.table else arithmetic.value(index, self)
        subject = expansion_subjects.element(self, name, value, key, index is not None)
        if subject.elements is None and not self.scope.overtaker(name):
            if self.scope.on("nounset"):
                raise arithmetic.Unset(f"{name} is not set, and set -u is on; set --env {name}=...")
            if not self.scope.is_unset(name):
                self.lacking.append(self.unset(name))
            return ""
        if subject.elements:
            self.lacking += [
                piece.why for piece in unknowns(subject.words[0]) if piece.alone is not None
            ]
            alone = text_if_known(emptied(subject.words[0]))
            if alone is not None:
                return alone
        return expansion_subjects.text_of(self, subject)

    def assign(self, name: str, index: str | None, number: int) -> None:
        """Assign the value of an expression to a variable."""
        word: Pieces = (Text(str(number), (0, 0), plain=False),)
        if self.lacking:
            word = (Unknown(f"${name}", (0, 0), 0, self.lack(), alone=str(number)),)
        if index is None and "[" in (reference := self.scope.resolve_reference(name)):
            name, _, inside = reference.partition("[")
            index = inside[:-1]
        value = self.scope.get(name)
        if index is None and not (value and value.array):
            self.scope.set(name, Value((word,)))
            return
        value = value or Value((), True)
        # Without an index an array's element 0 is meant.
        key: int | str = (index or "0") if value.table else arithmetic.value(index or "0", self)
        self.scope.set(name, put_element(value, key, word))

    def output(self, part: WordPart, in_quotes: bool) -> list[Piece]:
        """Return the output of the commands in `$(...)`, as far as it is known."""
        whole = part.kind == "command"
        source = (
            self.source.within(part.start + 2, part.end - 1)
            if whole
            else self._backtick(part, in_quotes)
        )
        # A shell drops all line ends at the end of an output.
        pieces = _strip_blanks(self.runner.capture(source))
        unknown = next((piece for piece in pieces if isinstance(piece, Unknown)), None)
        path_piece = path_in_folder(self.scope.folder, tuple(pieces))
        if path_piece:
            return [
                replace(
                    self.unknown(part, OUTPUT, in_quotes), at=path_piece.at, firm=path_piece.firm
                )
            ]
        if unknown is not None:
            why = unknown.why if unknown.line and unknown.why != OUTPUT else OUTPUT
            alone = text_if_known(emptied(pieces))
            return [self.unknown(part, why, in_quotes, alone and alone.rstrip("\n"))]
        return [self.make_text(part, text_if_known(pieces) or "", in_quotes)]

    def _backtick(self, part: WordPart, in_quotes: bool) -> ShellSource:
        inside = self.source.text[part.start + 1 : part.end - 1]
        if "\\" not in inside:
            return self.source.within(part.start + 1, part.end - 1)
        # Within backticks a backslash before these is taken away first, and what is left is read as
        # a script.
        text = re.sub(r'\\([$`\\"])' if in_quotes else r"\\([$`\\])", r"\1", inside)
        return ShellSource.of((Text(text, self.place(part), plain=False),), self.source)


def _shows(piece: Piece | Break) -> bool:
    return not isinstance(piece, Text) or bool(piece.text)


def _strip_blanks(pieces: Pieces) -> list[Piece]:
    result = list(pieces)
    while result and isinstance(result[-1], Text):
        text = result[-1].text.rstrip("\n")
        if text:
            result[-1] = replace(result[-1], text=text, plain=False)
            break
        result.pop()
    return result
