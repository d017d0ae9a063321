"""World size, computed from the arguments of launchers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from bridge.shell.launchers.find import LaunchWord, Walk
from bridge.shell.launchers.tables import STARTERS, Starter
from bridge.shell.word_pieces import Pieces, text_if_known

DEVICES = re.compile(r"[\w.-]+:(\d+(?:,\d+)*)")
NAME = re.compile(r"--?[A-Za-z][\w-]*")
"""Matches an option without a value."""
BY_NODE = {
    "ntasks-per-node": "node",
    "nodes": "nodes",
    "N": "nodes",
    "ntasks": "total",
    "n": "total",
}
"""Options of a batch job that set its number of tasks, each with its role: tasks of a node, nodes, or all tasks."""


Sizes = dict[str, str | int]
"""Sizes that options set, by role such as `nodes`: the text, or the index of a word that is not known."""


def ranks(
    search: Walk, job: Mapping[str, str], variables: Mapping[str, Pieces]
) -> tuple[int | None, Sequence[int]]:
    """Return the world size by the arguments of the innermost launcher; None if these do not give the size as numbers,
    with the indices of the words that would give it and are not known.

    `job` has options of the batch job, which Slurm's launcher inherits; `variables` are those of the environment.
    """
    links = [link for link in search.links if link.name in STARTERS and STARTERS[link.name].own]
    if not links:
        return None, ()
    last = links[-1]
    row, words = STARTERS[last.name], search.words[last.start : last.end]
    sizes = _sizes_by_role(words, row)
    if last.name in ("srun", "yhrun"):
        # The total of the batch job has no effect if the launcher sets sizes itself.
        found_job = {BY_NODE[name]: value for name, value in job.items() if name in BY_NODE}
        job_sizes: Sizes = {
            role: value for role, value in found_job.items() if role != "total" or not sizes
        }
        sizes = {**job_sizes, **sizes}
    listed = text_if_known(variables.get(row.devices, ()))
    size = len(listed.split(",")) if listed and not sizes else _product(sizes, row)
    unknown = {last.start + place for place in sizes.values() if isinstance(place, int)}
    return size, () if size else sorted(unknown)


def list_unknown_options(search: Walk) -> Iterator[tuple[str, str]]:
    """Yield launcher and option for each option that the launcher's parser does not know."""
    for link in search.links:
        row = STARTERS.get(link.name)
        if row is None or not row.parser:
            continue
        words = iter(search.words[link.start : link.end])
        next((word for word in words if word.name == link.name), None)
        for word in words:
            option, tied, _ = word.spelling.partition("=")
            if word.text is None or not word.option or option == "--":
                continue
            name = row.name_option(option) or row.name_option(option[:2])
            if name is None:
                yield link.name, option
            elif not tied and name == (row.name_option(option) or ""):
                for _ in range(row.values[name]):
                    next(words, None)


def _sizes_by_role(words: Sequence[LaunchWord], row: Starter) -> Sizes:
    """Return the sizes that options set.

    An unknown value leaves only its own option open. A word that may itself be an option leaves all
    sizes open, until a later option sets them.
    """
    sizes: Sizes = {}
    skip = 0
    before = ""
    for place, (word, after) in enumerate(
        zip(words, [*words[1:], LaunchWord("", "")], strict=True)
    ):
        option, tied, value_text = word.spelling.partition("=")
        option = row.name_option(option) or option
        has_name = word.text is not None or (tied and NAME.fullmatch(option) is not None)
        if skip:
            skip -= 1
        elif has_name:
            # A short option may have its number attached, as in `-n8`.
            attachable = (name for name in row.sizes if len(name) == 2 and option.startswith(name))
            short = next((name for name in attachable if option[2:].isdigit()), "")
            if option in row.sizes:
                value = word if tied else after
                text = value_text if tied else value.text
                sizes[row.sizes[option]] = place + (not tied) if value.text is None else text or ""
            elif short:
                sizes[row.sizes[short]] = option[len(short) :]
            skip = 0 if tied else row.values.get(option, 0)
        elif not (NAME.fullmatch(before) and row.values.get(row.name_option(before) or before, 1)):
            sizes = dict.fromkeys(row.sizes.values(), place)
        before = word.spelling
    return sizes


def _product(sizes: Sizes, row: Starter) -> int | None:
    if "total" in sizes:
        return _number(sizes["total"])
    if "listed" in sizes and "node" not in sizes:
        # `host:0,1@other:0,1` names the devices of each host.
        parts = [DEVICES.fullmatch(part) for part in str(sizes["listed"]).split("@")]
        return sum(part[1].count(",") + 1 for part in parts if part) if all(parts) else None
    node = _number(sizes["node"]) if "node" in sizes else row.fallback
    nodes = _number(sizes["nodes"]) if "nodes" in sizes else None if "hosts" in sizes else row.alone
    return node * nodes if node and nodes else None


def _number(text: str | int) -> int | None:
    return (
        int(text)
        if isinstance(text, str) and re.fullmatch(r"\d{1,9}", text) and int(text)
        else None
    )
