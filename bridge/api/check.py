"""Check: what is wrong, ignored or surprising in a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from bridge.api.access import open_source, place_source
from bridge.api.read import read_config
from bridge.api.source import Options, Readable, source_of
from bridge.report.as_json import all_of
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding


@dataclass(frozen=True)
class Checked:
    """A config, the findings on it, and the notes that were made on the way."""

    config: Config
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()


def check(readable: Readable, /, **options: Unpack[Options]) -> Checked:
    """Check a config as its stack and release would.

    Raises `BridgeError` with every problem for which the stack would refuse it.
    """
    source = source_of(readable, options)
    with open_source(source) as notes, place_source(source) as here:
        config = read_config(here)
        return Checked(config, all_of(config), tuple(notes))
