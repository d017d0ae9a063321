"""A launch script as data: the training runs that it starts, with words, ranks and variables, and the files that it writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from bridge.errors import SourceError
from bridge.files.document import TEXT, Document
from bridge.files.shell.pieces import Pieces, Unknown, known, line_of, spelled, unknowns
from bridge.files.shell.read import Command, Reader, file_key
from bridge.files.shell.scope import Scope

MAX_CHARACTERS = 2**20
STARTERS = (
    "torchrun",
    "deepspeed",
    "srun",
    "mpirun",
    "mpiexec",
    "accelerate",
    "horovodrun",
    "numactl",
    "nsys",
    "env",
    "sudo",
    "timeout",
    "ds",
    "pdsh",
)
"""Programs that start a training script, as the first word of a command."""
PYTHON = re.compile(r"(\S*/)?python[\d.]*$")
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner", "deepspeed.launcher.launch")
PER_NODE = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num-gpus", "--gpus_per_node", "--num_accelerators")
NODES = ("--nnodes", "--num_nodes", "--num-nodes")
BATCH_SYSTEM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}
"""Options of `#SBATCH` lines, and the variables that Slurm sets from them."""
DIRECTIVE = re.compile(r"^#SBATCH\s+--?(?P<name>[\w-]+)[=\s]\s*(?P<value>\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Launch:
    """One training run that a script starts: `python`, `torchrun`, `deepspeed`, ... with a program and its words.

    `launcher` are the words before the program; `branch` is the line of an undecided branch around it, or 0.
    """

    program: str
    words: tuple[Pieces, ...]
    launcher: tuple[str | None, ...]
    environment: Mapping[str, Pieces]
    line: int
    lines: tuple[int, ...]
    branch: int = 0

    @property
    def texts(self) -> list[str]:
        """The words as text; what is not known stands as the script spells it."""
        return [spelled(word) for word in self.words]

    @property
    def opaque(self) -> dict[int, str]:
        """Why a word is not known, by its place: the first part of it that only a run would tell."""
        firsts = ((index, next(unknowns(word), None)) for index, word in enumerate(self.words))
        return {index: f"{part.spelling} (line {part.line}) is not known: {part.why}" for index, part in firsts if part}

    @property
    def loose(self) -> frozenset[int]:
        """Words that may become any number of words, or none: an expansion alone, without quotes, that is not known."""
        alone = ((index, word[0]) for index, word in enumerate(self.words) if len(word) == 1)
        return frozenset(index for index, piece in alone if isinstance(piece, Unknown) and piece.loose)

    @cached_property
    def ranks(self) -> int | None:
        """World size in ranks, where the launcher's words say it in numbers."""
        per_node, nodes = self._option(PER_NODE), self._option(NODES)
        own = any(word in ("torchrun", *LAUNCHERS) for word in self.launcher)
        if per_node is None and not own:
            return None
        sizes = [_number(found) if found is not None else 1 for found in (per_node, nodes)]
        return sizes[0] * sizes[1] if sizes[0] and sizes[1] else None

    def _option(self, names: Sequence[str]) -> str | None:
        """The value of an option of the launcher; empty if it is not known."""
        found = None
        for word, after in zip(self.launcher, [*self.launcher[1:], None], strict=True):
            name, tied, attached = (word or "").partition("=")
            if name in names:
                found = attached if tied else after or ""
        return found

    def __str__(self) -> str:
        where = f", in a branch that nothing decides (line {self.branch})" if self.branch else ""
        return f"line {self.line}: {self.program}{where}"


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,9}", text) else None


@dataclass(frozen=True)
class Script:
    """A script, read as started without arguments in an empty environment, but for what `outside` tells.

    `outside` holds variables by name, and arguments by number. `chosen` is the number of the run that is meant, from 1.
    """

    text: str
    name: str = TEXT
    outside: Mapping[str, str] = field(default_factory=dict)
    chosen: int | None = None

    def told(self, outside: Mapping[str, str], chosen: int | None) -> Script:
        """The same script, started with `outside`."""
        return replace(self, outside=outside, chosen=chosen)

    @cached_property
    def reader(self) -> Reader:
        """The script, read."""
        if len(self.text) > MAX_CHARACTERS:
            raise SourceError(f"{self.name}: found more than 1 MiB; a launch script is smaller, is this the right file?")
        reader = Reader(self.name, Scope({**_slurm(self.text), **self.outside}))
        try:
            reader.read(self.text)
        except RecursionError:
            raise SourceError(f"{self.name}: nested too deeply; a launch script is flatter, is this the right file?") from None
        return reader

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """Every training run that it starts."""
        found = (_launch(command, self.text) for command in self.reader.commands)
        return tuple(launch for launch in found if launch is not None)

    def strays(self) -> Iterator[tuple[int, str, str]]:
        """Flags that the shell would take for a command, because the line before does not continue: line, flag, reason."""
        for command in self.reader.commands:
            first = spelled(command.words[0])
            if re.match(r"--?[a-zA-Z]", first):
                yield command.line, first, _stray(self.text, command.line)

    def launch(self, fits: Callable[[Launch], bool], what: str) -> Launch:
        """The one run that `fits`; `SourceError` if there is none, or more than one and none is chosen."""
        if self.chosen is not None:
            return self._numbered(self.chosen)
        fitting = [launch for launch in self.launches if fits(launch)]
        if not fitting:
            raise SourceError(f"{self.name}: found no run with {what}; the runs that it starts: {self.seen}", *self._lost())
        if len(fitting) > 1:
            listed = (f"{self.name}: --launch {self.launches.index(launch) + 1}: {launch}" for launch in fitting)
            raise SourceError(f"{self.name}: starts {len(fitting)} runs with {what}; name one with --launch", *listed)
        return fitting[0]

    @property
    def seen(self) -> str:
        """The runs that it starts, for messages."""
        return "; ".join(map(str, self.launches)) or "none"

    def _numbered(self, number: int) -> Launch:
        if not 1 <= number <= len(self.launches):
            listed = (f"{self.name}: {index}: {launch}" for index, launch in enumerate(self.launches, 1))
            raise SourceError(f"{self.name}: there is no run {number}; it starts {len(self.launches)}", *listed)
        return self.launches[number - 1]

    def _lost(self) -> list[str]:
        return [f"{self.name}: line {line}: {word}: {reason}" for line, word, reason in self.strays()]

    def file(self, path: Pieces) -> Pieces | None:
        """What the script writes to `path`, if it does."""
        return self.reader.scope.files.get(file_key(path))


def _stray(text: str, line: int) -> str:
    """Why a flag begins a command."""
    before = text.split("\n")[max(line - 2, 0)] if line > 1 else ""
    reason = f"line {line - 1} does not end in a backslash"
    if before.rstrip().endswith("\\") and before != before.rstrip():
        reason = f"a blank follows the backslash of line {line - 1}"
    elif before.lstrip().startswith("#"):
        reason = f"the comment on line {line - 1} ends the command"
    return f"no part of the run: {reason}, so that the shell takes this for a command"


def _slurm(text: str) -> dict[str, str]:
    """Variables that Slurm sets from the directives of a script."""
    found = {match["name"]: match["value"] for match in DIRECTIVE.finditer(text) if match["value"].isdigit()}
    return {variable: value for name, value in found.items() for variable in BATCH_SYSTEM.get(name, ())}


def _launch(command: Command, text: str) -> Launch | None:
    texts = [known(word) for word in command.words]
    place = _program(texts, [spelled(word) for word in command.words])
    if place is None:
        return None
    words = command.words[place + 1 :]
    lines = tuple(line_of(word, text) or command.line for word in words)
    program = spelled(command.words[place])
    return Launch(program, words, tuple(texts[:place]), command.environment, command.line, lines, command.branch)


def _program(texts: Sequence[str | None], spellings: Sequence[str]) -> int | None:
    """Where the program stands in the words of a command that starts one."""
    first = (texts[0] or "").rpartition("/")[2]
    if texts[0] is not None and not (first in STARTERS or PYTHON.match(first) or first.endswith(".py")):
        return None
    for index, text in enumerate(spellings):
        if text.endswith(".py") and not text.startswith("-"):
            return index
        if index and spellings[index - 1] in ("-m", "--module") and text not in LAUNCHERS:
            return index
    opaque = (index for index, text in enumerate(texts) if text is None and not _is_value(spellings, index))
    return next(opaque, None) if texts[0] is not None else None


def _is_value(spellings: Sequence[str], index: int) -> bool:
    """Whether a word follows an option, so that it may be its value."""
    return index == 0 or (spellings[index - 1].startswith("-") and "=" not in spellings[index - 1])


def load_script(text: str, name: str = TEXT) -> Document:
    """A shell script as a document; `data` is the `Script`."""
    return Document(Script(text, name), {}, "script", name=name)
