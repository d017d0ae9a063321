"""Real launch scripts: the words that bash passes to each launcher against what is read, and how many are read to the end.

    python benchmarks/scripts.py FOLDER [--list FILE]

Each script of the folder runs under the real bash, in a root folder of its own without network, where every launcher is a
stand-in that writes its words down. It runs twice: in an empty environment, and with every variable and argument that the
reader asks for. Needs `unshare` and `chroot`, and the right to use them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

import compat
from bridge import translate
from bridge.errors import BridgeError
from bridge.files import Launch, Script, load
from bridge.files.named import reaching
from bridge.shell import Pieces
from bridge.shell.launchers import STARTERS
from bridge.shell.word_pieces import Text
from bridge.testing import processes

TOOLS = (
    *(
        "bash",
        "basename",
        "cat",
        "cp",
        "cut",
        "date",
        "dirname",
        "expr",
        "getopt",
        "grep",
        "head",
        "mkdir",
        "mv",
        "paste",
    ),
    *(
        "printf",
        "readlink",
        "realpath",
        "rm",
        "sed",
        "seq",
        "sort",
        "tail",
        "tee",
        "touch",
        "tr",
        "uniq",
        "wc",
        "xargs",
        "awk",
    ),
)
"""Programs that run as they are, inside the root folder."""
QUIET = (
    "chmod",
    "conda",
    "curl",
    "git",
    "hostname",
    "ln",
    "ls",
    "module",
    "nvidia-smi",
    "pip",
    "pip3",
    "pkill",
    "scontrol",
    "sleep",
    "wget",
    "kill",
)
"""Programs that do nothing."""
OTHERS = (
    "python",
    "python3",
    "python3.8",
    "python3.10",
    "nohup",
    "env",
    "swift",
    "megatron",
    "llamafactory-cli",
    "ipython",
)
BUILT_IN = ("exec", "time", "command", "builtin", "coproc", "xargs")
RECORD = "/record"
SETTINGS = """cd() { builtin cd "$@" 2> /dev/null || true; }
pushd() { true; }
popd() { true; }
cp() { command cp "$@" 2> /dev/null || true; }
mv() { command mv "$@" 2> /dev/null || true; }
source() { if [[ -f $1 ]]; then builtin source "$@"; else builtin source /given; fi; }
command_not_found_handle() { return 0; }
tee() {
    local path
    for path; do [[ $path == -* ]] || command mkdir -p -- "$(command dirname -- "$path")"; done
    command tee "$@"
}
"""
"""What every shell in the root folder begins with: missing folders, files and programs do not stop a script, and a file that
is sourced and missing sets what the reader says that it may set anew, since --env says what such a file would set.
"""
SLURM: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"--nodes[= ]|-N *", ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    (r"--ntasks[= ]|-n *", ("SLURM_NTASKS",)),
    (r"--ntasks-per-node[= ]", ("SLURM_NTASKS_PER_NODE",)),
    (r"--gpus-per-node[= ]", ("SLURM_GPUS_PER_NODE",)),
    (r"--cpus-per-task[= ]|-c *", ("SLURM_CPUS_PER_TASK",)),
)
"""What Slurm sets for a job by the options in the script's head."""
STAND_IN = f"""#!/bin/bash
for ((at = 1; at <= $#; at++)); do
    case ${{!at}} in
        bash | sh | /bin/bash | /bin/sh | /usr/bin/bash) exec /bin/bash "${{@:at+1}}" ;;
        --wrap=*) exec /bin/bash -c "${{!at#--wrap=}}" ;;
    esac
done
[[ ${{0##*/}} == sbatch && $# == 0 ]] && exec /bin/bash
printf '%s\\0' "$(($# + 1))" "${{0##*/}}" "$@" >> {RECORD}
"""
SECONDS = 20
SHELL = (
    "BASH_SOURCE",
    "SECONDS",
    "RANDOM",
    "PWD",
    "HOME",
    "PATH",
    "UID",
    "LINENO",
    "BASH_REMATCH",
    "FUNCNAME",
    "PIPESTATUS",
)
ASKED = re.compile(r"--env (\w+)=\.\.\.")
ANEW = re.compile(r"may change the variable; set --env (\w+)=")
ROUNDS = 12


@dataclass(frozen=True)
class Seen:
    """What one script came to: `kind` against bash, and what differs."""

    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Ran:
    """The words of each launcher that bash started, in order, and the status that the script ended with."""

    runs: list[list[str]]
    status: int


class Jail:
    """A root folder with bash, a few tools and the stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("bin", "work", "root", "tmp", "dev", "usr"):
            (folder / name).mkdir()
        (folder / "dev" / "null").touch()
        (folder / "usr" / "bin").symlink_to("/bin")
        for tool in TOOLS:
            self._copy(tool)
        (folder / "bin" / "sh").symlink_to("bash")
        (folder / "settings").write_text(SETTINGS, "utf-8")
        programs = {name for name in STARTERS if "." not in name or name.startswith("mpi")} - set(
            BUILT_IN
        )
        for name in (*programs, *OTHERS):
            self._stand_in(folder / "bin" / name, STAND_IN)
        for name in QUIET:
            self._stand_in(folder / "bin" / name, "#!/bin/bash\n")

    def _copy(self, tool: str) -> None:
        path = _found(tool)[0]
        shutil.copy(path, self.folder / "bin" / tool)
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        for library in re.findall(r"(/\S+\.so\S*)", listed):
            target = self.folder / library.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copy(library, target)

    def _stand_in(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text, "utf-8")
        path.chmod(0o755)

    def run(self, text: str, outside: Mapping[str, str], anew: Collection[str] = ()) -> Ran:
        """What bash comes to with a script that is started with `outside`; a missing file sets those of it that are `anew`."""
        shutil.rmtree(self.folder / "work")
        (self.folder / "work").mkdir()
        (self.folder / "work" / "launch.sh").write_text(text, "utf-8")
        (self.folder / RECORD.lstrip("/")).write_bytes(b"")
        given = (
            f"unset -v {name}\n{name}={quote(value)}\n"
            for name, value in outside.items()
            if name in anew
        )
        (self.folder / "given").write_text("".join(given), "utf-8")
        for script in set(re.findall(r"(?m)^\s*(\.?/[\w./-]+\.py)\b", text)):
            self._stand_in(
                self.folder / "work" / script
                if script.startswith(".")
                else self.folder / script.lstrip("/"),
                STAND_IN,
            )
        last = max((int(name) for name in outside if name.isdigit()), default=0)
        arguments = [outside.get(str(place), "") for place in range(1, last + 1)]
        named = slurm(text) | {name: value for name, value in outside.items() if not name.isdigit()}
        jailed = [
            *_found("unshare", "-n", "-p", "-f", "--kill-child"),
            *_found("chroot", str(self.folder)),
            "/bin/bash",
            "-c",
        ]
        status = -1
        with suppress(subprocess.TimeoutExpired):
            command = [*jailed, 'cd /work && exec /bin/bash ./launch.sh "$@"', "-", *arguments]
            status = processes.run(
                command, SECONDS, {"PATH": "/bin", "BASH_ENV": "/settings", **named}
            ).returncode
        return Ran(list(_records((self.folder / RECORD.lstrip("/")).read_bytes())), status)


def slurm(text: str) -> dict[str, str]:
    """The variables that Slurm sets for a script by its head."""
    found: dict[str, str] = {}
    for option, names in SLURM:
        if head := re.search(rf"(?m)^#SBATCH\s+(?:{option})(\d+)(?!\S)", text):
            found |= dict.fromkeys(names, head[1])
    return found


def _found(program: str, *arguments: str) -> list[str]:
    """A program of this machine with its arguments."""
    path = shutil.which(program)
    if path is None:
        raise SystemExit(f"{program}: not there; install it")
    return [path, *arguments]


def _records(data: bytes) -> Iterator[list[str]]:
    words = data.decode("utf-8", "replace").split("\0")[:-1]
    while words:
        count = int(words[0])
        yield words[1 : count + 1]
        words = words[count + 1 :]


def is_run(words: Sequence[str]) -> bool:
    """Whether recorded words start a run: a training script, or a module."""
    named = any(word.endswith(".py") or word in ("-m", "--module") for word in words)
    return named and "-c" not in words[:3] and words[:2] != ["ray", "start"]


def matches(launch: Launch, run: str) -> bool:
    """Whether a recorded run is that launch, unknown parts aside; what starts an inner shell stands before it in the launch."""
    words = [*launch.launcher, launch.program]
    first = run.partition("\0")[0]
    starts = [
        at for at, word in enumerate(words) if word is None or word.rpartition("/")[2] == first
    ]
    return any(re.fullmatch(pattern(launch, words[at:]), run, re.DOTALL) for at in starts)


def pattern(launch: Launch, words: Sequence[str | None]) -> str:
    """What a recorded run has to match that begins with `words`, the program last: unknown parts may be anything."""
    before = [ANY if word is None else f"(?:{re.escape(word)}\0)" for word in words]
    if words[0] is not None:
        before[0] = f"(?:{re.escape(words[0].rpartition('/')[2])}\0)"
    if re.search(r"[$`]", launch.program):
        before[-1] = ANY
    return "".join(before) + "".join(map(_word, launch.words))


ANY = r"(?:[^\0]*\0)*?"


def _word(word: Pieces) -> str:
    if any(not isinstance(piece, Text) and piece.loose for piece in word):
        return ANY
    return (
        "".join(re.escape(piece.text) if isinstance(piece, Text) else r"[^\0]*" for piece in word)
        + "\0"
    )


def compared(script: Script, ran: Ran) -> Seen:
    """The runs that bash started against those that are read."""
    try:
        launches = script.launches
    except BridgeError as error:
        return Seen("refused", str(error))
    started = ["".join(f"{word}\0" for word in run) for run in ran.runs if is_run(run)]
    sure = [launch for launch in launches if not launch.branch]
    if not started and not launches:
        return Seen("no run on both sides")
    if started and not launches:
        return Seen("DIFFERENT: only bash starts a run", started[0].replace("\0", " "))
    if not started and ran.status:
        return Seen("bash stops before the run", str(launches[0]))
    if not started:
        return Seen(
            "DIFFERENT: bash starts no run" if sure else "a branch decides", str(launches[0])
        )
    lost = next(
        (run for run in started if not any(matches(launch, run) for launch in launches)), None
    )
    if lost is not None:
        return Seen("DIFFERENT", _difference(lost, launches))
    extra = next(
        (launch for launch in sure if not any(matches(launch, run) for run in started)), None
    )
    if extra is not None:
        return Seen("DIFFERENT: bash does not start it", str(extra))
    return Seen(
        "same, unknown words aside" if any(launch.opaque for launch in launches) else "same words"
    )


def _difference(run: str, launches: Sequence[Launch]) -> str:
    """The first word at which the nearest launch and the run part."""
    launch = max(launches, key=lambda launch: len(launch.words))
    ours, theirs = [*launch.launcher, launch.program, *launch.texts], run.split("\0")
    ours = ours[
        next(
            (at for at, word in enumerate(ours) if word and word.rpartition("/")[2] == theirs[0]), 0
        ) :
    ]
    first = next(
        (index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
        len(ours),
    )
    return f"bash {theirs[first : first + 3]}, read {ours[first : first + 3]}"


GUESSES: tuple[tuple[str, str], ...] = (
    (r"PWD|HOME", "/work"),
    (r".*(ADDR|HOST)", "localhost"),
    (r".*PORT", "6000"),
    (r".*RANK", "0"),
    (r".*(HIDDEN|INTERMEDIATE|FFN|VOCAB).*", "4096"),
    (r".*(SEQ|LEN).*", "2048"),
    (r".*(HEAD|LAYER).*", "8"),
    (
        r"\d+|.*(SIZE|NUM|GPU|NODE|WORLD|ITER|INTERVAL|BATCH|BS|STEP|TOKENS|SAMPLES|LR|WARMUP).*|[TPCEM]P",
        "1",
    ),
    (r".*", "value"),
)
"""What a script is started with, by the name of the variable."""


OFF = ("none", "false", "no", "off")
"""What a user says to leave an option out."""


def guess(name: str, text: str) -> str:
    """A value for what a script is started with: one that it compares it with, if it does, else one by its name."""
    aliases = [name, *re.findall(rf"(?m)^\s*(?:export )?(\w+)=\"?\$\{{?{name}\}}?\"?\s*$", text)]
    for alias in aliases:
        compared_with = re.findall(
            rf"\[\s*\"?\$\{{?{alias}\}}?\"?\s*(?:==?|-eq)\s*[\"']?([\w.-]+)", text
        )
        case = re.findall(rf"case\s+\"?\$\{{?{alias}\}}?\"?\s+in\s+[\"']?([\w.-]+)", text)
        if found := compared_with + case:
            return next((value for value in OFF if value in found), found[0])
    return next(
        value
        for pattern, value in GUESSES
        for alias in aliases[-1:]
        if re.fullmatch(pattern, alias.upper())
    )


def to_the_end(path: Path, outside: dict[str, str], anew: set[str]) -> str:
    """Read a script, giving what it asks for, and convert it; empty if that is done, else the reason why not.

    What a file that is not there may set is `anew`.
    """
    text = path.read_text("utf-8", "replace")
    for _ in range(ROUNDS):
        try:
            return converted(path, outside)
        except BridgeError as error:
            asked = set(ASKED.findall(str(error))) - set(outside)
            anew |= {*ANEW.findall(str(error))}
            if not asked and (better := _corrected(str(error), text, outside)):
                outside |= better
            elif not asked:
                return re.sub(r"\s+", " ", str(error).replace(str(path), ""))
            outside |= {name: guess(name, text) for name in asked}
    return "asks for more and more"


def _corrected(refusal: str, text: str, outside: Mapping[str, str]) -> dict[str, str]:
    """Numbers for what was guessed to be a word and is refused, as a user would give them."""
    flags = re.findall(r"(--[\w-]+): found 'value'; expected a (?:\w+ )?number", refusal)
    names = {name for flag in flags for name in re.findall(rf"{flag}[= ]+\"?\$\{{?(\w+)", text)}
    names |= {
        found
        for name in names
        for found in re.findall(rf"(?m)^\s*(?:export )?{name}=\"?\$\{{?(\w+)", text)
    }
    return {name: "1" for name in names if outside.get(name) == "value"}


def converted(path: Path, outside: Mapping[str, str]) -> str:
    """Convert one script as the command line does, with --lenient, --env and --allow-path; empty if that is done."""
    with reaching(path.parent, [path.parent.parent]):
        return _converted(path, outside)


def _converted(path: Path, outside: Mapping[str, str]) -> str:
    document = load(path)
    document = replace(document, data=document.data.told(outside, None))
    scores = {name: compat.load(name).recognises(document.data) for name in compat.names()}
    best = max(scores.values())
    if not best:
        raise BridgeError("no run of a stack", *document.data.lost)
    name = next(name for name, score in scores.items() if score == best)
    config = compat.load(name).read(document, lenient=True)
    return (
        ""
        if translate(
            config, compat.load("deepspeed" if name != "deepspeed" else "megatron")
        ).written.text
        else "nothing"
    )


REASONS: tuple[tuple[str, str], ...] = (
    ("placeholder", "a placeholder was never filled in"),
    ("no such file", "the config file, or its template, is not there"),
    ("output of a command", "the output of a command decides"),
    ("starts another script", "it starts another script"),
    ("ends the script", "it ends before it starts a run"),
    ("no command that is read calls", "it only defines functions"),
    ("it is not there", "a file that it sources is not there"),
    ("no run of a stack", "it starts no run of a stack"),
    ("--launch", "it starts several runs"),
    ("is not known", "a value is not known"),
    ("expected one of", "a value that counts is unknown to the release"),
    ("", "the stack refuses what it says"),
)


def reason(text: str) -> str:
    """The kind of a refusal."""
    return next(name for part, name in REASONS if part in text)


def main() -> None:
    """Compare, count, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="scripts, in folders OWNER+NAME with their paths")
    parser.add_argument("--list", type=Path, help="a JSON list with repo and path: only these")
    parser.add_argument("--quiet", action="store_true", help="counts only")
    options = parser.parse_args()
    paths = _paths(options.folder, options.list)
    counts: dict[str, Counter[str]] = {
        "alone": Counter(),
        "with --env": Counter(),
        "to the end": Counter(),
    }
    with tempfile.TemporaryDirectory() as folder:
        jail = Jail(Path(folder))
        for path in paths:
            for name, seen in _judged(path, jail):
                counts[name][seen.kind] += 1
                if not options.quiet and (
                    seen.kind.startswith("DIFFERENT") or (name == "to the end" and seen.detail)
                ):
                    print(
                        f"{path.relative_to(options.folder)}: {name}: {seen.kind}: {seen.detail[:400]}"
                    )
    for name, found in counts.items():
        print(f"\n{name}, {found.total()} scripts")
        for kind, count in found.most_common():
            print(f"  {count:5}  {kind}")


def _paths(folder: Path, listed: Path | None) -> list[Path]:
    if listed is None:
        return sorted(
            path for path in folder.rglob("*") if path.suffix in (".sh", ".slurm", ".sbatch")
        )
    rows = json.loads(listed.read_text("utf-8"))
    paths = [folder / row["repo"].replace("/", "+") / row["path"] for row in rows]
    return [path for path in paths if path.suffix != ".json" and path.is_file()]


def _judged(path: Path, jail: Jail) -> Iterator[tuple[str, Seen]]:
    text = path.read_text("utf-8", "replace")
    yield "alone", compared(Script(text, "launch.sh"), jail.run(text, {}))
    outside: dict[str, str] = {}
    anew: set[str] = set()
    why = to_the_end(path, outside, anew)
    yield "to the end", Seen(f"refused: {reason(why)}" if why else "read to the end", why)
    outside |= {name: guess(name, text) for name in _open(text) - set(outside)}
    yield "with --env", compared(Script(text, "launch.sh", outside), jail.run(text, outside, anew))


def _open(text: str) -> set[str]:
    """What a script uses and never sets."""
    used = set(re.findall(r"\$\{?([A-Z_][A-Z0-9_]*|[1-9]\d?)\b", text))
    return used - set(re.findall(r"\b([A-Za-z_]\w*)\+?=", text)) - set(SHELL)


if __name__ == "__main__":
    main()
