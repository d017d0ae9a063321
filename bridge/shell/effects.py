"""Effects of programs on files.

They are exact for programs that copy, move and remove files; for other programs, the arguments are
searched for file names.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from bridge.shell import file_contents
from bridge.shell.files import is_gone
from bridge.shell.launchers import Walk
from bridge.shell.patterns import Unread
from bridge.shell.state import ShellState
from bridge.shell.word_pieces import NOWHERE, Pieces, Text, Unknown, spell_pieces, text_if_known

CHANGING = frozenset(
    (
        *(
            "sed",
            "perl",
            "mv",
            "cp",
            "rm",
            "dd",
            "truncate",
            "install",
            "patch",
            "rsync",
            "envsubst",
            "jq",
            "yq",
            "ln",
        ),
        *("unlink", "shred"),
    )
)
"""Programs that may change a file which an argument names."""
IN_PLACE = re.compile(r"\s(-\w*i|--in-place)")
"""Options with which `sed` writes files."""
QUIET = frozenset(
    (
        *(
            "ls",
            "chmod",
            "chown",
            "nvidia-smi",
            "rocm-smi",
            "date",
            "sleep",
            "hostname",
            "scontrol",
            "sinfo",
            "squeue",
            "module",
        ),
        *(
            "ml",
            "nproc",
            "which",
            "id",
            "whoami",
            "uname",
            "env",
            "printenv",
            "lscpu",
            "lspci",
            "free",
            "df",
            "du",
            "stat",
        ),
        *(
            "file",
            "g++",
            "nm",
            "ldd",
            "hostid",
            "ibstat",
            "ibv_devinfo",
            "lsof",
            "netstat",
            "ss",
            "uptime",
        ),
        *(
            "readlink",
            "realpath",
            "mktemp",
            "getconf",
            "ip",
            "ifconfig",
            "ping",
            "ps",
            "pgrep",
            "pkill",
            "killall",
            "clear",
        ),
        *(
            "tput",
            "stty",
            "sync",
            "conda",
            "mamba",
            "deactivate",
            "ray",
            "sacct",
            "scancel",
            "getent",
            "nc",
            "numactl",
        ),
        *(
            "md5sum",
            "sha256sum",
            "diff",
            "cmp",
            "less",
            "more",
            "bc",
            "wc",
            "basename",
            "dirname",
            "ds_ssh",
            "rev",
            "paste",
            "column",
            "logger",
            "nvcc",
            "gcc",
        ),
        *("touch", "mkdir", "rmdir"),
    )
)
"""Programs that do not change files that a script writes and reads."""
TRAINERS = frozenset(("python", "env", "time", "nohup", "exec"))
"""Starters that may start any program. Every other starter, such as `torchrun`, is assumed to start a
training run, which does not write files of the script.
"""
OPEN = re.compile(r"(\$\{[^}]*\}|\$\([^)]*\)|\$\w+|`[^`]*`|[*?]|\[[^]]*\])")
"""Matches the parts of a word's spelling whose expansion is not known."""
TOUCHES = re.compile(r"open|write|dump|save|\bos\b|subprocess|shutil|[Pp]ath|exec|system|import \*")
"""Names in Python code. Code that has none of these names cannot change a file."""
FETCHES = re.compile(
    r"-q|-c|-nc|--quiet|--continue|--no-clobber|--no-check-certificate|https?://.*"
)
"""Matches words of a wget that writes what lies at the addresses it is given, and nothing else."""
NAMED = re.compile(r"""["']([^"'\n]+\.(?:json|hjson|ya?ml))["']""")
"""Matches a text in Python code that names a config."""
WRITING = re.compile(
    r"(?:-[oO]|--(?:out|output|save|write|dest|destination|target|to)(?:[-_]\w+)*)(?:=(?P<file>.+))?",
    re.DOTALL,
)
"""Matches options of a program that name a file which the program writes."""


def _text(text: str) -> Pieces:
    return (Text(text, NOWHERE, True, plain=False),)


def leave(reader: ShellState, argv: Sequence[Pieces], search: Walk, has_model: bool) -> None:
    """Record the files that a program may have changed.

    With `has_model`, the effects of the program are already applied.
    """
    if has_model:
        return
    name, line = (
        (text_if_known(argv[0]) or "").rpartition("/")[2],
        reader.source.line(reader.place),
    )
    if name in CHANGING:
        if name != "sed" or IN_PLACE.search(" ".join(map(spell_pieces, argv))):
            touch_named(reader, argv)
        return
    # Python with a text of its own that touches no file leaves files alone, too.
    texts = [spell_pieces(word) for word in argv]
    reckons = "python" in texts[0] and "-c" in texts and not TOUCHES.search(texts[-1])
    if not search.kind and (name in QUIET or reckons):
        return
    program = spell_pieces(argv[0])
    for word in (*_outputs(argv), *_find_names_in_python(reader, texts)):
        _touch_file(reader, word, f"{program} may write the file (line {line})")
    if name == "wget" and all(map(FETCHES.fullmatch, texts[1:])):
        for url in argv[1:]:  # it writes a file of the name at the end of the address
            _touch_file(reader, url, f"{program} may write the file (line {line})")
        return
    trains = search.kind in ("program", "module") and any(
        link.name not in TRAINERS for link in search.links
    )
    if not trains:
        reader.scope.files.record_writer(f"{_command_text(argv)} (line {line})")


def _find_names_in_python(reader: ShellState, texts: Sequence[str]) -> Iterator[Pieces]:
    """Yield the names of configs in Python code that is in the command itself, or in its input, and may write files."""
    if "python" in texts[0]:
        code = texts[-1] if "-c" in texts else spell_pieces(reader.scope.input or ())
        yield from map(_text, NAMED.findall(code) if TOUCHES.search(code) else ())


def _command_text(argv: Sequence[Pieces]) -> str:
    return " ".join(map(spell_pieces, argv[:2]))[:60]


def _outputs(argv: Sequence[Pieces]) -> list[Pieces]:
    """Return the words that name files which a command writes, as far as its options show them."""
    targets = []
    for index, word in enumerate(argv):
        option = WRITING.fullmatch(spell_pieces(word))
        if option is not None:
            targets += (
                [_text(option["file"])] if option["file"] else list(argv[index + 1 : index + 2])
            )
    return targets


def touch_named(reader: ShellState, argv: Sequence[Pieces]) -> None:
    """Mark each file as uncertain if its name is, or may be, among the arguments of a program."""
    line = reader.source.line(reader.place)
    program = spell_pieces(argv[0])
    why = f"{program} may change the file (line {line})"
    unknown = [word for word in argv[1:] if text_if_known(word) is None]
    if unknown:
        reader.scope.files.record_writer(f"{_command_text(argv)} (line {line})")
    # A word that is not known may become the name of every file that fits the letters in it that
    # are known. Without any such letter it may become all names, and is left to `record_writer`
    # above.
    for spelling in map(spell_pieces, unknown):
        if not re.search(r"\w", OPEN.sub("", spelling)):
            continue
        pattern = "".join(
            ".*" if index % 2 else re.escape(part)
            for index, part in enumerate(OPEN.split(spelling))
        )
        for key in list(reader.scope.files.held):
            if re.fullmatch(pattern, key.removeprefix(reader.scope.folder), re.DOTALL):
                _doubt_file(reader, key, key, why)
    for word in argv[1:]:
        _touch_file(reader, word, why)


def _touch_file(reader: ShellState, word: Pieces, why: str) -> None:
    # The file itself, or one of its name in the working directory, into which some programs write.
    for key in (reader.key(word), reader.scope.folder + spell_pieces(word).rpartition("/")[2]):
        _doubt_file(reader, key, spell_pieces(word), why)


def _doubt_file(reader: ShellState, key: str, spelling: str, why: str) -> None:
    reader.scope.files.doubt(key, Unknown(spelling, NOWHERE, reader.source.line(reader.place), why))


# Programs


def _operands(texts: Sequence[str], flags: str) -> tuple[str, list[str]]:
    """Return a program's option letters and its operands.

    Raises `Unread` for an option that is not in `flags`.
    """
    letters, rest = "", list(texts[1:])
    while rest and re.match(r"-.", rest[0]):
        word = rest.pop(0)
        if word == "--":
            break
        if not re.fullmatch(f"-[{flags}]+", word):
            raise Unread("this option is not supported")
        letters += word[1:]
    if any(re.match(r"-.", text) for text in rest):
        raise Unread("options after file names are not supported")
    return letters, rest


def remove(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `rm [-f] [-r] FILE ...`."""
    letters, names = _operands(texts, "frRv")
    files = reader.scope.files
    status: int | None = 0
    for name in names:
        key = reader.key(_text(name))
        if files.there(f"{key}/") or (set(letters) & set("rR") and files.there(key) is None):
            _remove_folder(reader, key)
            status = status if set(letters) & set("rR") else 1
            continue
        there = files.there(key)
        files.remove(key)
        if "f" not in letters and not there:
            status = None if there is None else 1
    reader.scope.status = status
    return ()


def _remove_folder(reader: ShellState, key: str) -> None:
    files, inside = reader.scope.files, f"{key.removesuffix('/')}/"
    for path in [path for path in files.held if path.startswith(inside) or path == key]:
        files.remove(path)
    files.folders = {folder for folder in files.folders if not folder.startswith(inside)}


def copy(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `cp FILE TARGET` and `mv FILE TARGET` for a single file.

    The content of the file may be unknown.
    """
    _, names = _operands(texts, "fpv")
    if len(names) != 2:
        return None
    files, moves = reader.scope.files, texts[0].endswith("mv")
    source, target = reader.key(_text(names[0])), reader.key(_text(names[1]))
    # Into a folder the file goes under its own name.
    if names[1].endswith("/") or files.there(f"{target.removesuffix('/')}/"):
        target = posixpath.join(target, posixpath.basename(names[0]))
    content = file_contents.content(reader, _text(names[0]))
    if content is None or files.there(f"{source}/"):
        return None
    if is_gone(content) or source == target:
        reader.scope.status = 1
        return ()
    files.put(target, content)
    if moves:
        files.remove(source)
    return ()


def touch(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `touch FILE ...`, which creates an empty file unless the file exists."""
    _, names = _operands(texts, "c")
    for name in names:
        content = file_contents.content(reader, _text(name))
        if content is None or is_gone(content):
            reader.scope.files.put(reader.key(_text(name)), ())
    return ()


def make_folder(reader: ShellState, texts: Sequence[str]) -> Pieces | None:
    """Model `mkdir [-p] FOLDER ...`."""
    letters, names = _operands(texts, "pv")
    files = reader.scope.files
    status: int | None = None
    for name in names:
        key = reader.key(_text(name)).removesuffix("/") + "/"
        # Without `-p` a folder that is there is an error. One that this reader does not know of may
        # be there all the same.
        if "p" not in letters and files.there(key):
            status = 1
        parts = key.split("/")[:-1]
        files.folders |= (
            {"/".join(parts[: end + 1]) + "/" for end in range(len(parts))}
            if "p" in letters
            else {key}
        )
    reader.scope.status = 0 if "p" in letters else status
    return ()


PROGRAMS: Mapping[str, Callable[[ShellState, Sequence[str]], Pieces | None]] = {
    "rm": remove,
    "cp": copy,
    "mv": copy,
    "touch": touch,
    "mkdir": make_folder,
}
"""Models of programs that change files, by name; `programs.PROGRAMS` includes them."""
