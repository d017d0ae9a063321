"""Secrets in a source, such as passwords and tokens. They are recognised by the name or the form of
a value, and left out of every text that is printed or stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

SURE = ("password", "passwd", "passphrase", "secret", "credential", "apikey", "cookie")
"""Substrings that mark every name that contains one of them as the name of a secret."""
LAST = ("key", "token", "auth", "apitoken", "pass", "pwd")
"""Last words that the names of many secrets have, and some other names too (`pad_token`,
`json_key`).
"""
OWNERS = frozenset(
    (
        *(
            "api",
            "access",
            "auth",
            "secret",
            "private",
            "hf",
            "hub",
            "huggingface",
            "wandb",
            "comet",
            "neptune",
            "aws",
        ),
        *(
            "azure",
            "gcp",
            "google",
            "openai",
            "anthropic",
            "ngc",
            "nvidia",
            "github",
            "gitlab",
            "git",
            "slack",
            "bearer",
        ),
        *(
            "refresh",
            "session",
            "login",
            "user",
            "app",
            "client",
            "service",
            "account",
            "signing",
            "encryption",
            "ssh",
        ),
        *(
            "deploy",
            "webhook",
            "storage",
            "db",
            "database",
            "mysql",
            "postgres",
            "redis",
            "smtp",
            "mail",
            "ftp",
            "admin",
            "ldap",
        ),
        *("proxy", "registry", "docker"),
    )
)
"""Words that mark a name as the name of a secret if they stand directly before one of `LAST`."""
PLAIN = frozenset(
    (
        *(
            "eos",
            "bos",
            "pad",
            "mask",
            "unk",
            "sep",
            "cls",
            "eod",
            "query",
            "sort",
            "json",
            "text",
            "image",
            "input",
        ),
        *(
            "output",
            "prompt",
            "special",
            "num",
            "max",
            "min",
            "per",
            "label",
            "answer",
            "start",
            "stop",
            "end",
            "fim",
            "data",
        ),
        *(
            "model",
            "module",
            "state",
            "ckpt",
            "cache",
            "group",
            "prefix",
            "primary",
            "foreign",
            "forward",
            "backward",
            "single",
        ),
    )
)
"""Words that mark a name as harmless if they stand directly before one of `LAST`: names of columns,
of tokens of a vocabulary, or of passes through a model.
"""
ABOUT = frozenset(
    (
        *(
            "file",
            "path",
            "dir",
            "name",
            "length",
            "size",
            "type",
            "stdin",
            "fd",
            "helper",
            "provider",
            "manager",
            "field",
        ),
        *("prompt", "policy"),
    )
)
"""Last words of names that refer to a secret but do not hold it, such as `token_file`."""
OPEN = ("auth", "authorization", "pwd", "pass", "token")
"""Words that, as the last of a name or as a whole part of it, mark a value in data as a secret unless it is a
word, a path or a token of a vocabulary. In code, such names have other values too often.
"""
ORDINARY = re.compile(r"[a-z_-]*|[\W\d]*|[./~<\[].*|(?=.*[\\$ĠĊ▁]).*", re.DOTALL)
"""Pattern of values that are no secrets under a name of `OPEN`."""
KEYWORDS = ("pass", "pwd", "secret", "credential", "key", "token", "auth", "cookie", "webhook")
"""Every name of a secret contains at least one of these words, so that a search for the words finds
all candidates.
"""
PART = re.compile(r"[\w.-]{0,80}")
VALUE = re.compile(
    r"""(?:["']?\]?[ \t]*(?::[-=]|[:=])[ \t]*|["']?(?P<flag>[ \t]+(?:\\\n[ \t]*)?|,[ \t]*(?:\n[ \t]*)?))"""
    r"""(?:"(?P<double>(?:[^"\\\n]|\\.)*)"|'(?P<single>[^'\n]*)'|(?P<bare>(?=[^\s"',;{}\])&|<>])))"""
)
"""Pattern of a value after a name: `=value`, `: value`, `:-value`, or the word after a flag. A
value without quotes ends where the pattern `END` matches.
"""
END = re.compile(r"""[\s"',;}\])&|<>]|\Z""")
JUDGED = 64
"""Number of leading characters that decide whether a value is a secret. Checking the whole value
would be slow in files with one long line.
"""
FREE = frozenset(";)&|>\n")
"""Characters that, directly after a name, show that the name has no value."""
NOTHING = re.compile(
    r"\$.*|<.*|true|false|null|none|~|yes|no|__hidden_\w*", re.IGNORECASE | re.DOTALL
)
BEGINNINGS = {
    "hf_": r"[A-Za-z0-9]{16,}",
    "sk-": r"(?=[\w-]*\d)[\w-]{16,}",
    **dict.fromkeys(("AKIA", "ASIA"), r"[A-Z0-9]{16}"),
    **dict.fromkeys(
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "gsk_", "npm_", "r8_"), r"[A-Za-z0-9]{20,}"
    ),
    **dict.fromkeys(("github_pat_", "wandb_v1_"), r"\w{20,}"),
    "glpat-": r"[\w-]{16,}",
    "xox": r"[abprs]-[\w-]{10,}",
    "AIza": r"[\w-]{33,}",
    **dict.fromkeys(("nvapi-", "dckr_pat_", "hvs.", "pypi-", "ya29."), r"[\w-]{20,}"),
    "SG.": r"[\w-]{16,}\.[\w-]{16,}",
    "eyJ": r"[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    "-----BEGIN ": r"[A-Z ]{0,40}PRIVATE KEY-----[\w+/=\s\\]*",
}
"""Beginnings of values that are secrets under any name, each with the pattern of the rest."""
SHAPES = {
    begin: rf"{re.escape(begin)}(?<![\w-]{re.escape(begin)}){rest}"
    if begin[0] != "-"
    else begin + rest
    for begin, rest in BEGINNINGS.items()
}
WORD = r"""["']?(?P<value>(?<=")[^"\n]+|(?<=')[^'\n]+|[^\s"';|&]+)"""
REST = r"""(?:[^\n;|&\\]|\\\n){0,300}?"""
REGISTRIES = (
    "docker",
    "podman",
    "nerdctl",
    "buildah",
    "skopeo",
    "oras",
    "helm",
    "singularity",
    "apptainer",
)
LOGIN = r"(?:[ \t]+(?:registry|remote))?[ \t]+login\b"
SAID = (
    ("://", "password", r"://[^/\s:@'\"]{0,80}:(?P<value>[^/\s@'\"]{1,200})@"),
    ("://", "token", r"https?://(?P<value>(?=[\w-]*\d)(?=[\w-]*[a-z])[\w-]{16,200})@"),
    *(
        (f"{name}=", "key", rf"{name}=(?P<value>[^\s;\"']+)")
        for name in ("accountkey", "sharedaccesskey", "sharedaccesssignature")
    ),
    (
        "://hook",
        "token",
        r"://hooks?\.[\w.-]{1,80}/(?:(?:services|hooks|catch)/)*(?P<value>[\w/-]{8,})",
    ),
    ("hooks.slack.com/", "token", r"(?<!://)hooks\.slack\.com/services/(?P<value>[\w/]{8,})"),
    ("/webhook", "token", r"/webhooks?(?:b2)?/(?P<value>[\w/@-]{8,})"),
    ("api.telegram.org/bot", "token", r"api\.telegram\.org/bot(?P<value>[\w:-]{8,})"),
    ("bearer ", "token", r"\bbearer (?P<value>(?=[^\s\d]*\d)[\w.~+/=-]{16,})"),
    (
        "authorization",
        "token",
        r"""authorization["']?[ \t]*[:=](?:\\?[ \t]|["'])*(?:bearer|basic)(?:\\?[ \t])+(?P<value>[^\s"',;)}]+)""",
    ),
    *(
        (
            tool,
            "password",
            rf"{tool}{LOGIN}{REST}\s(?:-p|--password(?![\w-]))(?:[ \t=]|\\\n)*{WORD}",
        )
        for tool in REGISTRIES
    ),
    (
        "--password-stdin",
        "password",
        rf"echo[ \t]+(?:-n[ \t]+)?{WORD}[\"']?[ \t]*\|[ \t]*\w+{LOGIN}{REST}--password-stdin",
    ),
    ("sshpass", "password", rf"sshpass[ \t]+-p[ \t]*{WORD}"),
    (
        "curl",
        "password",
        rf"""curl\b{REST}\s(?:-u|--user)[ \t=]*["']?[^\s:"'$]{{1,80}}:(?P<value>[^\s"'|;&]+)""",
    ),
    (
        "aws configure",
        "key",
        rf"aws[ \t]+configure[ \t]+set[ \t]+\w*(?:secret|token)\w*[ \t]+{WORD}",
    ),
    ("machine", "password", rf"machine\s+\S{{1,200}}\s+login\s+\S{{1,200}}\s+password\s+{WORD}"),
    (
        "=",
        "",
        r"[?&](?P<name>x-amz-(?:signature|credential|security-token)|sig|signature|token|access_token|api_key)="
        r"""(?P<value>[^\s&"'#;<>)\\]+)""",
    ),
)
"""Secrets that their context shows: in addresses and their parameters, headers of requests, and
logins to registries and machines. Each row has a text that every match contains, the name of the
secret, and the pattern, all in lower case.
"""
ITEM = re.compile(
    r"""[\s,]*(?:\[[^\]\n]{0,200}\]=)?(?:"(?P<double>(?:[^"\\\n]|\\.)*)"|'(?P<single>[^'\n]*)'|(?P<bare>[^\s"',()\]]+))"""
)
"""Pattern of one value of an array: `([name]=value "value" value)`."""
ITEMS = 1000
"""Most values of an array that are checked."""
HEX = re.compile(r"(?<![\w/@-])[0-9a-f]{40}(?![\w-])")
"""Pattern of keys of Weights & Biases. Hashes of commits look the same, so a match is no key if the
text before it on the line matches `COMMIT`.
"""
DIGITS = bytes(ord("0" if chr(code) in "0123456789abcdef" else "-") for code in range(256))
"""A table that turns every hexadecimal digit into 0. A search for 40 zeros is then much faster than
the pattern.
"""
COMMIT = re.compile(
    r"revision|commit|sha|hash|digest|ref\b|branch|checkout|version|snapshot", re.IGNORECASE
)
DIGIT, LETTER, BROKEN = re.compile(r"\d"), re.compile(r"[A-Za-z]"), re.compile(r"[\s/<]")
SHORTEST = 5
"""Minimum length of a value that is hidden wherever it occurs. Hiding shorter values would cut into
other words.
"""
MARK = re.compile(r"__hidden_\w+?__")


def is_secret(name: str, value: str) -> bool:
    """Return whether the value of a variable, flag or key is a secret."""
    if not value or NOTHING.fullmatch(value) or (value.isdigit() and len(value) < SHORTEST):
        return False
    names = _names_one(name)
    if names is not None:
        return names
    # The name leaves it open: a key of a service is long, has letters and digits, and no blanks or
    # slashes.
    letters_and_digits = bool(DIGIT.search(value)) and bool(LETTER.search(value))
    return len(value) >= 16 and letters_and_digits and not BROKEN.search(value)


@lru_cache(10_000)
def _names_one(name: str) -> bool | None:
    """Return whether values with this name are secrets. Return None if the value itself has to
    decide. A number at the end of the name is ignored.
    """
    # camelCase is split into words too.
    words = [
        word for word in re.split(r"[\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)) if word
    ]
    while words and words[-1].isdigit():
        words.pop()
    if [word.lower() for word in words[-3:]] == ["private", "key", "id"]:
        words.pop()
    lower = [word.lower() for word in words]
    if not lower or lower[-1] in ABOUT:
        return False
    hook = lower[-2:] if lower[-1] in ("url", "uri", "webhook") else ()
    if "webhook" in hook or any(part in word for word in lower for part in SURE):
        return True
    if lower[-1].rstrip("0123456789") not in LAST:
        return False
    owner = lower[-2] if len(lower) > 1 else ""
    # A name in capitals is a variable of the environment, where keys and tokens are secrets more
    # often than not.
    in_capitals = name.upper() == name and owner and owner not in PLAIN
    return True if owner in OWNERS or in_capitals else None


def _is_secret_in_data(name: str, value: str) -> bool:
    """Return whether a value of data, not of code, is a secret under a name that leaves it open."""
    parts = name.lower().lstrip(".").split(".")
    *owners, last = re.split(r"[\W_]+", parts[-1])
    is_open = last in OPEN and not PLAIN & set(owners[-1:])
    return (
        len(value) >= SHORTEST
        and (is_open or "auth" in parts[:-1])
        and not ORDINARY.fullmatch(value)
        and not NOTHING.fullmatch(value)
    )


def spans(text: str) -> list[tuple[int, int, str]]:
    """Return the secrets of `text` as (start, end, name), in order and without overlap."""
    small = text.lower()
    if len(small) != len(text):
        # A few letters become two when they are lowered (İ); then positions in `small` would not be
        # those in `text`.
        small = "".join(min(letter.lower(), letter, key=len) for letter in text)
    # At one place the longest comes first, and all that overlap it are dropped.
    candidates = sorted(
        [*_find_by_name(text, small), *_find_by_shape(text, small)],
        key=lambda span: (span[0], -span[1]),
    )
    result: list[tuple[int, int, str]] = []
    for span in candidates:
        if not result or span[0] >= result[-1][1]:
            result.append(span)
    return result


def _keyword(small: str, position: int, places: dict[str, int]) -> tuple[int, int] | None:
    """Return start and end of the next keyword at or after `position`.

    `places` stores the next position of each keyword between calls, so that the text is searched
    only once for each keyword.
    """
    for word, place in places.items():
        if place < position:
            next_place = small.find(word, position)
            places[word] = next_place if next_place >= 0 else len(small)
    place, word = min((place, word) for word, place in places.items())
    return (place, place + len(word)) if place < len(small) else None


def _find_by_name(text: str, small: str) -> Iterator[tuple[int, int, str]]:
    position, end, places = 0, 0, dict.fromkeys(KEYWORDS, -1)
    while keyword := _keyword(small, position, places):
        # The keyword is only a part of the name: the rest before it is matched backwards, from the
        # keyword to the left.
        before = PART.match(text[max(position, keyword[0] - 80) : keyword[0]][::-1])
        after = PART.match(text, keyword[1])
        name = (
            (before[0][::-1] if before else "")
            + text[slice(*keyword)]
            + (after[0] if after else "")
        )
        position = after.end() if after else keyword[1]
        if text[position : position + 1] in FREE:
            continue
        value = VALUE.match(text, position)
        # A word after a blank is the value only of a flag: in a sentence, the next word is just a
        # word.
        if value is None or (value["flag"] is not None and not name.startswith("-")):
            continue
        start, stop = value.span(value.lastgroup or 0)
        if value.lastgroup == "bare" and text[start] in "([":
            for begin, stop in _items(text, start + 1):
                if is_secret(name, text[begin : min(stop, begin + JUDGED)]):
                    yield begin, stop, _word(name)
                    position = stop
            continue
        if value.lastgroup == "bare":
            # Many names may stand in one long word. Its end is searched once, or the time would
            # grow with the square.
            if start >= end:
                match = END.search(text, start)
                end = match.start() if match else len(text)
            stop = end
        if is_secret(name, text[start : min(stop, start + JUDGED)]):
            yield start, stop, _word(name)
            position = stop


def _items(text: str, place: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each value of an array whose bracket opens before `place`."""
    for _ in range(ITEMS):
        if (item := ITEM.match(text, place)) is None:
            return
        yield item.span(item.lastgroup or 0)
        place = item.end()


def _find_by_shape(text: str, small: str) -> Iterator[tuple[int, int, str]]:
    yield from (
        (*match.span(), "token") for shape in _shapes(text) for match in shape.finditer(text)
    )
    for fragment, name, pattern in SAID:
        for match in re.finditer(pattern, small) if fragment in small else ():
            if not match["value"].startswith("{") and not NOTHING.fullmatch(match["value"]):
                yield *match.span("value"), _word(name or text[slice(*match.span("name"))])
    digits = text.encode("ascii", "replace").translate(DIGITS)
    for match in HEX.finditer(text) if b"0" * 40 in digits else ():
        line = text[max(0, match.start() - 120) : match.start()].rpartition("\n")[2]
        if not COMMIT.search(line):
            yield match.start(), match.end(), "key"


def _shapes(text: str) -> Iterator[re.Pattern[str]]:
    """Return the patterns whose literal prefix occurs in `text`. Searching for the prefix is far
    cheaper than matching the pattern.
    """
    return (re.compile(pattern) for begin, pattern in SHAPES.items() if begin in text)


def _word(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_")


@dataclass
class Secrets:
    """Values that must not be shown, each with the mark that is shown in its place."""

    marks: dict[str, str] = field(default_factory=dict)
    _next: dict[str, int] = field(default_factory=dict, compare=False)
    _taken: set[str] = field(default_factory=set, compare=False)
    _begun: dict[str, list[int]] = field(default_factory=dict, compare=False)
    """Lengths of the known values by the first characters of these values, the longest first."""

    @classmethod
    def of(cls, text: str, values: Mapping[str, str] | None = None) -> Secrets:
        """Return the secrets of a text, and the secrets among `values`, which are given by name."""
        result = cls()
        for start, end, name in spans(text):
            result.add(name, text[start:end])
        for name, value in (values or {}).items():
            if is_secret(name, value):
                result.add(_word(name), value)
        return result

    def add(self, name: str, value: str) -> str:
        """Add a secret value and return its mark. If the value was added before, this is the old
        mark.
        """
        if value not in self.marks:
            number = self._next.get(name, 1)
            while (
                mark := f"__hidden_{name}__" if number == 1 else f"__hidden_{name}_{number}__"
            ) in self._taken:
                number += 1
            self._next[name] = number + 1
            self.learn({value: mark})
        return self.marks[value]

    def learn(self, marks: Mapping[str, str]) -> None:
        """Add values with their marks. A value that was added before keeps its old mark."""
        for value, mark in marks.items():
            if value not in self.marks:
                self.marks[value] = mark
                self._taken.add(mark)
                lengths = (
                    self._begun.setdefault(value[:SHORTEST], []) if len(value) >= SHORTEST else []
                )
                if len(value) not in lengths:
                    lengths.append(len(value))
                    lengths.sort(reverse=True)

    def forget(self) -> None:
        """Forget all values, so that none is hidden any more."""
        self.marks.clear()
        self._next.clear()
        self._taken.clear()
        self._begun.clear()

    def hide(self, text: str) -> str:
        """`text` with marks instead of secrets."""
        if text in self.marks:
            return self.marks[text]
        parts, position = list[str](), 0
        for start, end, name in spans(text):
            parts += (text[position:start], self.marks.get(text[start:end]) or f"__hidden_{name}__")
            position = end
        return self.hide_known("".join((*parts, text[position:])))

    def hide_known(self, text: str) -> str:
        """`text` with marks in place of known values and of everything that has the shape of a
        secret.
        """
        result = self._replace_known(text) if self._begun else text
        for shape in _shapes(result):
            result = shape.sub("__hidden_token__", result)
        return result

    def _replace_known(self, text: str) -> str:
        """Return `text` with marks in place of known values. If several values begin at one
        position, the longest is replaced.
        """
        # A few values are replaced one by one, which Python does fastest. More of them would each
        # pass through the text, so it is passed once and looked up at each place by its first
        # characters.
        if len(self.marks) <= SOME:
            for value in sorted(self.marks, key=len, reverse=True):
                if len(value) >= SHORTEST:
                    text = text.replace(value, self.marks[value])
            return text
        parts, position, place = list[str](), 0, 0
        while place < len(text):
            lengths = self._begun.get(text[place : place + SHORTEST], ())
            secret = next(
                (
                    text[place : place + size]
                    for size in lengths
                    if text[place : place + size] in self.marks
                ),
                "",
            )
            if secret:
                parts += (text[position:place], self.marks[secret])
                position = place + len(secret)
            place += len(secret) or 1
        return "".join((*parts, text[position:]))

    def within(self, value: Any, name: str = "") -> Any:
        """Plain data with marks in place of secrets; `name` is the key of `value`."""
        if isinstance(value, str):
            if is_secret(name, value) or _is_secret_in_data(name, value):
                return self.add(_word(name), value)
            return self.marks.get(value) or self.hide(value)
        if isinstance(value, int) and any(word in name.lower() for word in SURE):
            return self.add(_word(name), str(value)) if is_secret(name, str(value)) else value
        if isinstance(value, Mapping):
            # A report has {"path": "wandb.api_key", "value": ...}: there the path is the name of
            # the value.
            inside = str(value["path"]) if isinstance(value.get("path"), str) else ""
            return {
                key: self.within(inner, inside if key in WHOLE else f".{key}")
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple | set | frozenset):
            # The words of a command line: a flag is the name of the word behind it.
            flags = ("", *(word if isinstance(word, str) else "" for word in value))
            names = (flag.lstrip("-") if flag.startswith("-") else name for flag in flags)
            return type(value)(
                [self.within(inner, own) for inner, own in zip(value, names, strict=False)]
            )
        return value

    def reveal(self, value: Any) -> Any:
        """Plain data, with each mark replaced by the secret that it stands for."""
        back = {mark: secret for secret, mark in self.marks.items()}
        if isinstance(value, str):
            return MARK.sub(lambda mark: back.get(mark[0], mark[0]), value)
        if isinstance(value, Mapping):
            return {key: self.reveal(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self.reveal(inner) for inner in value])
        return value


SOME = 20
"""Most values that are replaced one by one."""
WHOLE = ("value", "before", "after")
"""Keys of a finding in a report that hold values of the field at the finding's `path`."""


def marks_in(value: Any) -> Iterable[str]:
    """Return the marks in plain data, in order."""
    if isinstance(value, str):
        return MARK.findall(value)
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    return dict.fromkeys(mark for inner in items for mark in marks_in(inner))


HIDDEN = Secrets()
"""The secrets in everything that this process reads. No text that this process prints may contain a
secret.
"""


def keep_hidden(text: str, values: Mapping[str, str] | None = None) -> None:
    """Hide the secrets of `text` in everything that is printed from now on."""
    HIDDEN.learn(Secrets.of(text, values).marks)


def hide(text: str) -> str:
    """Return `text` without the secrets that this process has read, so that it may be printed."""
    return HIDDEN.hide_known(text)
