"""Where a checkpoint can go: the formats that can hold it, and what each would lose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bridge.checkpoint import formats
from bridge.checkpoint.hub import Hub
from bridge.checkpoint.interface import Format, Wanted
from bridge.checkpoint.model_facts import Said, rename_known, with_arguments
from bridge.errors import BridgeError
from bridge.stack.rules import Effect

WEIGHTLESS = ("safetensors", "bin")
"""Names of formats that hold no state of an optimizer, so that no run can resume from them."""


@dataclass(frozen=True)
class Target:
    """A format that can be written, with the parts of a checkpoint that it loses, or why it cannot hold the checkpoint."""

    to: str
    lost: tuple[str, ...] = ()
    refused: str | None = None


def list_targets(hub: Hub, configs: Sequence[Said]) -> Iterator[Target]:
    """Yield each format that can be written, with what it would do to the checkpoint `hub`. `configs` are what configs
    say about the model.
    """
    known = {finding.path for finding in hub.findings}
    hub, configs = with_arguments(hub, configs)
    for target in formats.all_formats().values():
        if type(target).plan is Format.plan:
            continue  # a format that is only read
        try:
            named = rename_known(hub, configs, None, target.names)
            written = formats.plan_files(target, named, Wanted())
        except BridgeError as error:
            yield Target(target.name, refused=error.problems[0])
            continue
        findings = (*formats.findings_that_matter(target, named), *written.findings)
        lost = {one.path for one in findings if one.effect is not Effect.NONE} - known
        yield Target(target.name, tuple(sorted(lost)))
