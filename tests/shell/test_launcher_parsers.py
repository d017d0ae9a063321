"""What the tables of launchers say, against the launchers' own parsers under generated command lines."""

from __future__ import annotations

import argparse
import base64
import json
import re
import shlex
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from bridge.shell import Launch, Script
from bridge.shell.launchers import STARTERS

pytestmark = pytest.mark.once
PROGRAM = "train.py"


def _capture_parser(start: Callable[[], Any]) -> argparse.ArgumentParser:
    """Return the parser that a function builds and calls."""
    parsers = []

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        parsers.append(parser)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(SystemExit):
            start()
    return parsers[0]


@cache
def _parser(name: str) -> argparse.ArgumentParser:
    if name == "torchrun":
        run = pytest.importorskip("torch.distributed.run")
        parser: argparse.ArgumentParser = run.get_args_parser()
    elif name == "accelerate-launch":
        parser = pytest.importorskip("accelerate.commands.launch").launch_command_parser()
    else:
        module = {"deepspeed": "runner", "deepspeed.launcher.launch": "launch"}[name]
        launcher = pytest.importorskip(f"deepspeed.launcher.{module}")
        parser = _capture_parser(launcher.parse_args)
    return parser


def _options(parser: argparse.ArgumentParser) -> dict[str, int]:
    return {
        option: 0 if action.nargs == 0 else 1
        for action in parser._actions
        for option in action.option_strings
    }


def _raise(message: str) -> None:
    raise ValueError(message)


NAMES = ("torchrun", "accelerate-launch", "deepspeed", "deepspeed.launcher.launch")


@pytest.mark.parametrize("name", NAMES)
def test_a_table_has_the_options_of_the_installed_parser(name: str) -> None:
    row, options = STARTERS[name], _options(_parser(name))
    assert {option: row.values.get(row.name_option(option) or "") for option in options} == options


def _read(name: str, words: list[str]) -> Launch:
    launcher = f"python -m {name}" if "." in name else name
    return Script(f"{launcher} {shlex.join(words)}\n").launches[0]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100)
@given(data=st.data())
def test_a_launch_starts_what_the_real_parser_reads(name: str, data: st.DataObject) -> None:
    parser = _parser(name)
    options = {
        option: count
        for option, count in _options(parser).items()
        if option not in ("-h", "--help", "-m", "--module", "--no_python", "--no-python")
    }
    pool = [*options, "--foo", "--no_such", "--node", "--n"]
    words: list[str] = []
    for option in data.draw(st.lists(st.sampled_from(pool), max_size=5)):
        short = data.draw(st.integers(0, 6)) if option.startswith("--") else 0
        text = option[: max(len(option) - short, 4)]
        action = parser._option_string_actions.get(option)
        value = str(next(iter(action.choices))) if action and action.choices else "2"
        if options.get(option, 1) and data.draw(st.booleans()) and option.startswith("--"):
            words.append(f"{text}={value}")
        else:
            words += [text, *[value] * options.get(option, 1)]
    words += [PROGRAM, *data.draw(st.lists(st.sampled_from(["--foo", "-x", "3", "b.py"])))]
    launch = _read(name, words)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parser, "error", _raise)
            real = parser.parse_args(words)
    except ValueError as error:
        unknown = re.search(r"unrecognized arguments: -|ambiguous option: ([^\s=]+)", str(error))
        # Python 3.11 also looks for ambiguous options among the program's own words.
        own = " ".join(words).partition(f" {launch.program} ")[2].split()
        assert not unknown or unknown[1] in own or launch.unknown_options
        return
    program = vars(real).get("training_script", vars(real).get("user_script"))
    rest = vars(real).get("training_script_args", vars(real).get("user_args"))
    assert not launch.unknown_options
    assert (launch.program, launch.texts) == (program, rest)
    if name == "torchrun":
        nodes, ranks = str(real.nnodes), str(real.nproc_per_node)
        nodes = {"1:1": "1"}.get(nodes, nodes)
        whole = nodes.isdigit() and ranks.isdigit()
        assert launch.ranks == (int(nodes) * int(ranks) if whole else None)
    if name == "accelerate-launch":
        assert launch.ranks == real.num_processes


@settings(max_examples=60)
@given(data=st.data())
def test_deepspeed_starts_as_many_ranks_as_its_launcher(data: st.DataObject) -> None:
    """On a node of eight devices: options and the variable of visible devices, which options overrule."""
    runner = pytest.importorskip("deepspeed.launcher.runner")
    devices = st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True).map(
        lambda places: ",".join(map(str, places))
    )
    words = data.draw(
        st.sampled_from(["", "", "--num_gpus 2", "--num_nodes 1", "--include", "--exclude"])
    ).split()
    if words[:1] in (["--include"], ["--exclude"]):
        words.append(f"localhost:{data.draw(devices)}")
    variable = data.draw(st.one_of(st.none(), devices))
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    started: list[list[str]] = []

    def start(command: list[str], **_: Any) -> Any:
        started.append(command)
        raise SystemExit

    assigned = "".join(f"{name}={value} " for name, value in environment.items())
    script = f"{assigned}deepspeed {shlex.join(words)} {PROGRAM}\n"
    ranks = Script(script).launches[0].ranks
    accelerator = SimpleNamespace(
        visible_devices_envs=lambda: ["CUDA_VISIBLE_DEVICES"], device_count=lambda: 8
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(runner, "get_accelerator", lambda: accelerator)
        patch.setattr(runner.subprocess, "Popen", start)
        try:
            runner.main([*words, PROGRAM])
        except ValueError:
            return
        except SystemExit:
            pass
    info = next(word for word in started[0] if word.startswith("--world_info="))
    hosts = json.loads(base64.urlsafe_b64decode(info.partition("=")[2]))
    count = sum(map(len, hosts.values()))
    # Without them, the launcher takes the devices that the machine has.
    known = bool(variable) if not words else words[0] in ("--num_gpus", "--include")
    assert ranks == (count if known else None)
