"""The door: README's commands as a person types them, from a wheel in an empty environment for each extra.

`tox -e door` runs it; `python tests/door.py [EXTRA ...] [--home CLONE]` tries some of the extras, or another clone.

Each environment has one shell, which starts in an empty folder and runs README's lines in their order. Without an extra these are
the lines that need none; with one they are the lines for the extra, and those that lead there: the clone, installs and changes of
folder. A command that does not end with 0, or with the code that its remark names, keeps the door shut. The clone's address means
the clone here. The line that runs all tests is left out.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import environ, pathsep
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
NONE = ""
"""The environment without an extra."""
BLOCK = re.compile(
    r"^```(?P<kind>sh|python)\n(?P<block>.*?)^```$|^ {4}(?P<line>(?:git|pip|cd|stagebridge|PYTHONSAFEPATH=1) .*?)$"
    r"|^With the extra `(?P<extra>\w+)`|^## ",
    re.MULTILINE | re.DOTALL,
)
"""Fenced commands, a command in an indented block, and what begins and ends the lines for an extra."""
INSTALL = re.compile(r"pip install .*\[(\w+)\]")
LEADS = re.compile(r"(git clone|pip install|cd) ")
CODE = re.compile(r"#.*\bends with (\d+)")
CLONE = re.compile(r"git clone (\S+)")
SUITE = "pip install -c constraints.txt tox && tox"
IMPORTED = {
    "deepspeed": "deepspeed",
    "megatron": "megatron.core",
    "huggingface": "transformers, accelerate",
}
"""Stacks that an extra brings. README has no commands for them, so they are imported, and a config is checked next to them."""
BUILT = {"deepspeed": "deepspeed"}
"""Packages without wheels: they are built here without torch, as in an environment that never saw them."""
PLANTED = ("json", "torch", "bridge", "deepspeed", "hypothesis")
WORKERS = 2


@dataclass(frozen=True)
class Command:
    """A line of README, the extra that it needs, and the code with which it is to end."""

    text: str
    extra: str = NONE
    code: int = 0

    def script(self) -> str:
        """The command as bash runs it, and what ends the script if its code is another one."""
        shown = shlex.quote(f"$ {self.text}")
        ended = shlex.quote(f"door: ended with %s, expected {self.code}: {self.text}\n")
        return f"echo {shown}\n{self.text}\ncode=$?\nif [ $code != {self.code} ]; then printf {ended} $code; exit 1; fi\n"


def commands(readme: str) -> Iterator[Command]:
    """README's commands in their order. An extra is named by a line that installs it, or in front of the block."""
    extra = NONE
    for found in BLOCK.finditer(readme):
        if found["kind"] == "python":
            yield Command(f"python -P -c {shlex.quote(found['block'])}", extra)
        elif text := found["block"] or found["line"]:
            for line in text.splitlines():
                install, code = INSTALL.search(line), CODE.search(line)
                yield Command(line, install[1] if install else extra, int(code[1]) if code else 0)
        else:
            extra = found["extra"] or NONE


def read_pages(home: Path) -> str:
    """README and the page of commands. Extras are installed in the clone, before README enters the demo's folder."""
    readme = (home / "README.md").read_text("utf-8")
    body, _, extras = (home / "docs" / "commands.md").read_text("utf-8").partition("## Extras")
    install, mark, rest = readme.partition("## Five commands")
    return install + extras + mark + rest + body


def walk(readme: str, extra: str) -> Iterator[Command]:
    """README's commands for an extra, in their order."""
    for command in commands(readme):
        if command.text != SUITE and (
            command.extra == extra or (command.extra == NONE and LEADS.match(command.text))
        ):
            yield command


def entered(extra: str, clone: Path) -> Iterator[Command]:
    """What else is tried in an environment: the start, a check, and the stack of the extra."""
    yield Command("stagebridge --help > help.txt", extra)
    loads = (
        "import bridge, compat, stagebridge; [compat.load(name).schema for name in compat.names()]"
    )
    yield Command(f"python -P -c '{loads}'", extra)
    if extra in IMPORTED:
        yield Command(f"python -P -c 'import {IMPORTED[extra]}'", extra)
        yield Command("stagebridge check ds_config.json --world-size 8", extra)
    if extra in (NONE, "engine"):
        yield from planted(clone, extra)


def planted(clone: Path, extra: str) -> Iterator[Command]:
    """An editable install starts in the root of its clone, and none of the files planted there is imported."""
    yield Command(f"cd {shlex.quote(str(clone))} && pip install -q -c constraints.txt -e .")
    for name in PLANTED:
        yield Command(
            f'echo \'open("ran", "a").write(__file__ + chr(10)); raise SystemExit(9)\' > {name}.py'
        )
    demo = "stagebridge-demo/ds_config.json"
    for tool in ("stagebridge", "python -P -m stagebridge", "python -m stagebridge"):
        yield Command(f"{tool} check {demo} --world-size 8 -q")
    if extra:
        yield Command(f"stagebridge train {demo} --fit --steps 1")
        yield Command("stagebridge demo -o planted-demo > demo.txt")
        yield Command(
            f"PYTHONSAFEPATH=1 torchrun --nproc-per-node 2 -m stagebridge train {demo} --fit --steps 1"
        )
    yield Command("test ! -e ran")


def run(extra: str, home: Path, wheel: Path, work: Path) -> tuple[str, bool, float]:
    """Open the door of one extra. Returns what was printed, whether it opened, and the seconds."""
    began, place = time.monotonic(), work / (extra or "none")
    (place / "here").mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
    path = f"{place / 'venv' / 'bin'}{pathsep}{environ['PATH']}"
    readme = read_pages(home)
    address = CLONE.search(readme)
    url = address[1] if address else str(home)
    redirected = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{home}.insteadOf",
        "GIT_CONFIG_VALUE_0": url,
    }
    named = f"{wheel}[{extra}]" if extra else str(wheel)
    start = (
        f"python -m pip install -q -c {home}/constraints.txt --find-links {wheel.parent} '{named}'"
    )
    clone = place / "here" / Path(url).name
    script = "".join(
        command.script()
        for command in (Command(start), *walk(readme, extra), *entered(extra, clone))
    )
    environment = {
        **clean(environ),
        **redirected,
        "PATH": path,
        "VIRTUAL_ENV": str(place / "venv"),
        "DS_ACCELERATOR": "cpu",
    }
    output = place / "output"
    with output.open("w") as file:
        command = ["bash", "-uc", script]
        done = subprocess.run(
            command, cwd=place / "here", env=environment, stdout=file, stderr=file, check=False
        )
    return output.read_text("utf-8"), done.returncode == 0, time.monotonic() - began


def clean(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment without what names another Python, or lets tests find this clone."""
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith(("PYTHON", "STAGEBRIDGE", "COV", "TOX"))
    }


def build(home: Path, work: Path, others: Sequence[str]) -> Path:
    """Build the wheel of a clone, and next to it other packages."""
    subprocess.run([sys.executable, "-m", "venv", work / "builder"], check=True)
    pip = [
        work / "builder" / "bin" / "python",
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        work / "wheels",
    ]
    subprocess.run(
        [*pip, "-c", home / "constraints.txt", "--no-cache-dir", home, *others], check=True
    )
    (wheel,) = (work / "wheels").glob("stagebridge-*.whl")
    return wheel


def main(arguments: Sequence[str] | None = None) -> int:
    """Open the door of each extra. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "extras",
        nargs="*",
        metavar="EXTRA",
        help="extras to try, 'none' among them; all by default",
    )
    parser.add_argument(
        "--home", type=Path, default=HOME, help="the clone whose README and package are tried"
    )
    options = parser.parse_args(arguments)
    home = options.home.resolve()
    project = tomllib.loads((home / "pyproject.toml").read_text("utf-8"))["project"]
    # Those that take longest begin first.
    known = ("engine", *sorted(project["optional-dependencies"].keys() - {"engine"}), NONE)
    extras = [NONE if name == "none" else name for name in options.extras] or known
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        work = Path(folder)
        wheel = build(home, work, [BUILT[extra] for extra in extras if extra in BUILT])
        opened = True
        tried = pool.map(lambda extra: run(extra, home, wheel, work), extras)
        for extra, (said, fine, seconds) in zip(extras, tried, strict=True):
            opened &= fine
            shown = (
                said
                if not fine
                else "\n".join(line for line in said.splitlines() if line.startswith("$ "))
            )
            print(
                f"== {extra or 'none'}: {'opened' if fine else 'STAYS SHUT'} after {seconds:.0f} s\n{shown}",
                flush=True,
            )
    return 0 if opened else 1


if __name__ == "__main__":
    sys.exit(main())
