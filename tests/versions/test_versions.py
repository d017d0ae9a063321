"""What we accept and write for a release, that release accepts with the same effective values."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import compat
from bridge.errors import BridgeError
from bridge.plan.section import fields
from bridge.stack.dialect import Config, Dialect
from bridge.testing import configs, mutations
from bridge.translation.translate import translate
from tests.harvesting.verdicts import draw_examples

COUNT = int(os.environ.get("STAGEBRIDGE_EXAMPLES", "1000"))
"""Generated configs for each release."""
TRANSLATED = max(10, COUNT // 20)
"""Translated configs from each other dialect for each release."""
COMMON = {"automodel": 8}
"""Values that are compared at least, for a config that could be asked about; 60 unless said."""

Ask = Callable[[Config], Any]
others = pytest.mark.parametrize("source", compat.names())


def disagreements(examples: list[Config], real: Ask) -> tuple[Counter[str], int]:
    """Reasons of refusals and differing values, with how often each came; and how many configs could be asked about."""
    found, asked = Counter[str](), 0
    for config in examples:
        verdict = real(config)
        if verdict.refused:
            found[f"{verdict.refused}: {dict(config.given)}"] += 1
        found.update(
            f"{path}: ours {ours!r}, theirs {theirs!r}"
            for path, (ours, theirs) in verdict.differing.items()
        )
        asked += verdict.value_count >= COMMON.get(config.dialect.name, 60)
    return found, asked


def test_generated_configs_are_accepted_with_equal_values(release: Any, real: Ask) -> None:
    examples = draw_examples(configs(release.dialect, release.version), COUNT)
    assert len(examples) >= COUNT
    found, asked = disagreements(examples, real)
    assert not found, found.most_common(5)
    assert asked > 0.8 * COUNT


@others
def test_translations_are_accepted_with_equal_values(
    release: Any, real: Ask, source: str, tmp_path: Path
) -> None:
    if source == release.dialect.name:
        pytest.skip("its own configs are above")
    if not _said(compat.load(source)) & _said(release.dialect):
        pytest.skip("a config of the one says nothing that one of the other can say")
    results = [
        _translated(config, release, tmp_path)
        for config in draw_examples(configs(compat.load(source)), TRANSLATED)
    ]
    examples = [config for config in results if config is not None]
    assert len(examples) > TRANSLATED / 5
    found, _ = disagreements(examples, real)
    assert not found, found.most_common(5)


def _said(dialect: Dialect) -> set[str]:
    """Fields of a plan that a config of the dialect has settings for."""
    return {path for rule in dialect.rules if rule.theirs for path in rule.ours}


def _translated(config: Config, release: Any, folder: Path) -> Config | None:
    """The config as that release reads it from the file we write; None where it cannot say it, or leaves the batch open."""
    dialect, path = release.dialect, folder / f"config.{SUFFIXES[release.dialect.formats[0]]}"
    try:
        result = translate(config, dialect, release.version)
        dialect.write(result.config, path)
        return dialect.read(path, release.version, result.config.world_size)
    except BridgeError:
        return None


def test_edits_are_refused_by_name_or_mean_the_same(release: Any, real: Ask) -> None:
    """What we still read after an edit, the release accepts with equal values."""
    accepted = []
    for mutation in draw_examples(mutations(release.dialect, release.version), COUNT):
        try:
            read = mutation.read()
        except BridgeError as error:
            assert mutation.is_named_by(error), (mutation.key, mutation.value, str(error))
        else:
            assert read.effective == mutation.config.effective, (mutation.key, mutation.value)
            accepted.append(read)
    found, _ = disagreements(accepted, real)
    assert not found, found.most_common(5)


def test_the_barest_config_has_the_defaults_of_the_release(release: Any, real: Ask) -> None:
    """Every default that the release holds is the one we say, moved ones included."""
    bare = {name: value for name, value in BARE.items() if name in fields(release.dialect.schema)}
    verdict = real(release.dialect.config(bare, release.version, 1))
    assert not verdict.refused
    assert not verdict.differing
    assert verdict.value_count >= COMMON.get(release.dialect.name, 60)


BARE = {"train_micro_batch_size_per_gpu": 1, "micro_batch_size": 1}
"""A batch, which no config does without."""
SUFFIXES = {"json": "json", "flags": "txt", "yaml": "yaml"}
