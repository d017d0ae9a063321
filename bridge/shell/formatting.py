"""Output of `printf` and `echo -e`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bridge.shell import arithmetic
from bridge.shell.patterns import Unread, simple

LONGEST = 2**20
DIRECTIVE = re.compile(
    r"%(?P<flags>[-+ 0#]*)(?P<width>\d*)(?:\.(?P<precision>\d*))?(?P<kind>[a-zA-Z%])"
)
ESCAPE = re.compile(r"\\(?:(x[0-9a-fA-F]{1,2})|(0?[0-7]{1,3})|(.))", re.DOTALL)
ECHOED = re.compile(r"\\(?:(x[0-9a-fA-F]{1,2})|(0[0-7]{0,3})|(.))", re.DOTALL)
"""The escapes of `echo -e`, where an octal number needs a leading zero."""
SIMPLE = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "E": "\x1b",
    "f": "\f",
    "v": "\v",
    "\\": "\\",
}


def decode_escapes(text: str, inside: bool = False) -> str:
    """Return `text` with the escapes of `echo -e` decoded, or with `inside` the escapes in a format of `printf`."""
    if re.search(r"\\[cuU]", text):
        raise Unread("this escape is not supported")
    return (ESCAPE if inside else ECHOED).sub(lambda match: _escape(match, inside), text)


def _escape(match: re.Match[str], inside: bool) -> str:
    if match[1] or match[2]:
        code = int(match[1][1:], 16) if match[1] else int(match[2], 8)
        # No variable can hold a NUL, and a byte above 127 is only a part of a character.
        if not 0 < code < 128:
            raise Unread("this escape is not supported")
        return chr(code)
    if inside and match[3] in "\"'":
        return str(match[3])
    return SIMPLE.get(match[3], match[0])


def format_output(form: str, words: Sequence[str]) -> str:
    """Return the output of `printf`, which repeats the format until no argument is left."""
    rest, parts = list(words), list[str]()
    while True:
        before = len(rest)
        parts.append(_once(form, rest))
        if sum(map(len, parts)) > LONGEST:
            raise OverflowError(
                f"printf writes more than {LONGEST:,} characters; is this the right file?"
            )
        if not rest or len(rest) == before:
            return "".join(parts)


def _once(form: str, rest: list[str]) -> str:
    parts, position = list[str](), 0
    while position < len(form):
        place = form.find("%", position)
        if place < 0:
            return "".join([*parts, decode_escapes(form[position:], True)])
        parts.append(decode_escapes(form[position:place], True))
        match = DIRECTIVE.match(form, place)
        if match is None or match["kind"] not in "sdiuxXocqb%":
            raise Unread("this format of printf is not supported")
        position = match.end()
        parts.append(
            "%" if match["kind"] == "%" else _format_word(match, rest.pop(0) if rest else None)
        )
    return "".join(parts)


def _format_word(match: re.Match[str], word: str | None) -> str:
    flags, kind = match["flags"], match["kind"]
    width = int(match["width"] or "0")
    if width > 1000 or (match["precision"] is not None and kind != "s"):
        raise Unread("this format of printf is not supported")
    text = _text(kind, flags, word or "")
    if kind == "s" and match["precision"] is not None:
        text = text[: int(match["precision"] or "0")]
    # The locale decides how characters beyond ASCII are counted.
    if width or match["precision"] is not None or kind == "c":
        simple(word or "")
    if "-" in flags:
        return text.ljust(width)
    if "0" in flags and kind in "dixXou":
        sign = text[:1] if text[:1] in ("-", "+", " ") else ""  # zeros come behind the sign
        return sign + text[len(sign) :].rjust(width - len(sign), "0")
    return text.rjust(width)


def _text(kind: str, flags: str, word: str) -> str:
    if kind == "s":
        return word
    if kind == "c":
        return word[:1]
    if kind == "q":
        if word and re.fullmatch(r"[\w@%+=:,./-]+", word, re.ASCII):
            return word
        raise Unread("printf %q is not supported")
    if kind == "b":
        if re.search(r"\\[1-7]", word):
            raise Unread("this escape is not supported")
        return decode_escapes(word)
    number = _number(word)
    if kind in "xXo":
        if number < 0 or "#" in flags:
            raise Unread("this format of printf is not supported")
        return format(number, kind)
    return (
        "+" if "+" in flags and number >= 0 else " " if " " in flags and number >= 0 else ""
    ) + str(number)


def _number(word: str) -> int:
    if word == "":
        return 0
    if not re.fullmatch(r"[-+]?[0-9]\w*", word, re.ASCII):
        raise Unread("printf gets text where it needs a number")
    try:
        value = arithmetic.number(word.lstrip("+-"))
    except arithmetic.Wrong as error:
        raise Unread(str(error)) from None
    return -value if word[0] == "-" else value
