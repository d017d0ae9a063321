"""Reads recipes in YAML, JSON, mappings, overrides and live
objects into typed values by path, and writes explicit YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bridge.errors import ConfigError, SourceError, nearest
from bridge.files import (
    Document,
    OutsideError,
    check_nested,
    find,
    folder_of,
    load,
    own,
    read_text,
    scalar,
    spell_yaml,
)
from bridge.files.shown import show_value
from bridge.plan.families import NULL
from bridge.plan.families.setting_types import spell_value
from bridge.plan.free_sections import path_at, values_in_section
from bridge.plan.section import Values, fields, nest
from bridge.stack.dialect import Reading, Written, flags_of
from bridge.stack.findings import Origin, twice
from bridge.stack.reader import Reader, flaw, mapping
from bridge.stack.refusals import MEANT, SELECTORS
from bridge.stack.rules import Effect
from compat.automodel import signatures
from compat.automodel.releases import NEW_LAYOUT, RELEASES, Release, instead, since, until
from compat.automodel.schedules import Table, table
from compat.automodel.schema import AutoModel
from compat.automodel.setting_types import REST, SPELLED, TAKEN
from compat.automodel.value_types import expected, takes_text, typed

RECIPE, OBJECT = "recipe", "object"
"""Entry points: a recipe file, and a live PipelineConfig or the result of its `to_dict`."""
PIPELINE = "distributed.pipeline"
EMPTY = {
    PIPELINE: ("pp_schedule", "1f1b", "a pipeline"),
    "model.backend.te_fp8": ("recipe", "current", "8-bit products"),
    "peft": ("dim", 8, "adapters"),
}
"""Sections that switch a feature on by being present. For each: a setting to write explicitly, its
default, and the feature.
"""
TARGET = "_target_"
SECTIONS = "a recipe, a mapping of sections"
OLD = "autopipeline"
CONFIG = "model.config."
SIGNAL = "step_scheduler.preemption_signal"
"""A setting that is switched off by null. Its default is SIGTERM. A null is stored as an empty
list.
"""
IGNORED = ("clip_grad_norm.max_norm",)
"""Settings that older releases ignore instead of refusing them."""

Tree = dict[str, Any]
"""Keys in a recipe or in one of its sections. The value of a key is the setting's path, or another
`Tree` if the key is a section.
"""


@cache
def tree() -> Tree:
    """Return all settings as a tree of keys."""
    return nest({path: path for path in fields(AutoModel)})


@cache
def formats() -> frozenset[str]:
    """Return the settings whose value is a number format."""
    return frozenset(
        path for path in fields(AutoModel) if expected(path).startswith("a number format")
    )


@cache
def pipeline_fields() -> tuple[str, ...]:
    """Return the settings of PipelineConfig, in AutoModel's order."""
    return tuple(tree()["distributed"]["pipeline"])


# Reading


def read(source: Any, release: Release, lenient: bool = False) -> Reading:
    """Read a path, text, mapping, list of overrides, `Written`, or live PipelineConfig. Raises all
    problems at once.
    """
    data, document, entry = _load_source(source)
    reader = _RecipeReader(release, lenient, document)
    reader.findings += twice(document)
    reader.recipe(data)
    reader.schedule_file(folder_of(document or source))
    reading = Reading(
        Values(reader.given), entry, reader.origins, tuple(reader.findings), reader.opaque
    )
    return reading.unless(reader.problems)


def _load_source(source: Any) -> tuple[Mapping[str, Any], Document | None, str]:
    if isinstance(source, Mapping):
        check_nested(source, "mapping")
        return _as_recipe(source)
    if isinstance(source, Written):
        document = load(source.text)
        return mapping(document, SECTIONS), document, RECIPE
    # A live PipelineConfig is known by its parts, so that AutoModel need not be installed.
    if hasattr(source, "pp_schedule") and hasattr(source, "to_dict"):
        return _as_recipe(source.to_dict())
    words = flags_of(source)
    if words is not None:
        return overrides(words), None, RECIPE
    if not isinstance(source, str | Path | Document):
        raise SourceError(
            f"source: found {show_value(source)}, expected a path, text, mapping, list of flags or PipelineConfig"
        )
    document = load(source)
    if document.format == "flags":
        return overrides(document.data), None, RECIPE
    return mapping(document, SECTIONS), document, RECIPE


def _as_recipe(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], None, str]:
    """Return the data as a recipe, and the kind of source. A pipeline config alone is put into its
    section of a recipe.
    """
    if data and data.keys() <= set(pipeline_fields()) and "pp_schedule" in data:
        return {"distributed": {"pipeline": dict(data)}}, None, OBJECT
    return data, None, RECIPE


def overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return the recipe that command-line overrides such as `--distributed.pp_size 2` or
    `--distributed.pp_size=2` set.
    """
    flat: dict[str, Any] = {}
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--") or (not equals and not rest):
            raise SourceError(
                f"overrides: found {show_value(name)}, expected --section.name with a value"
            )
        flat[name[2:]] = scalar(value if equals else rest.pop(0))
    try:
        return nest(flat)
    # A name that is a value cannot hold another name too.
    except (AttributeError, TypeError):
        raise SourceError(
            "overrides: one override sets a section to a value, another sets a key inside it; keep"
            " one of the two"
        ) from None


STRICT = ("step_scheduler", "distributed", "lr_scheduler", "clip_grad_norm", OLD)
"""Sections whose settings are arguments of a class. AutoModel stops at an unknown argument."""


class _RecipeReader(Reader):
    """Reads a recipe section by section, and checks each key against the known settings."""

    release: Release

    def recipe(self, data: Mapping[str, Any]) -> None:
        """Read all sections. Settings of the older layout are kept under their newer paths."""
        sections = dict(data)
        old, mesh = sections.get(OLD), sections.get("distributed")
        pipeline = mesh.get("pipeline") if isinstance(mesh, Mapping) else None
        if isinstance(old, Mapping) and old and pipeline is not None:
            self.problem(
                OLD,
                f"the recipe also has {PIPELINE}, which replaces this section since {NEW_LAYOUT};"
                " keep one of the two",
            )
        elif isinstance(old, Mapping):
            self.old_layout(sections.pop(OLD))
        self.section(sections, "", tree())

    def old_layout(self, old: Mapping[str, Any]) -> None:
        """Read `autopipeline`, which has the settings of the pipeline section."""
        self.walk(old, OLD, {**tree()["distributed"]["pipeline"], **tree()[OLD]})
        if self.release.nests_pipeline:
            message = (
                f"this section belongs to the layout before {NEW_LAYOUT}; for"
                f" {self.release.version} write its settings in {PIPELINE}"
            )
            self.finding(OLD, message, Effect.NONE)

    def section(self, data: Mapping[str, Any], path: str, level: Tree) -> None:
        """Read the mapping `data`, the section at `path`."""
        # Without a setting nothing would tell that the section was there.
        if path in EMPTY and not data:
            name, value, feature = EMPTY[path]
            self.given[f"{path}.{name}"] = value
            self.finding(
                path,
                f"an empty section switches {feature} on with defaults; the output sets {name}"
                " explicitly",
                Effect.NONE,
            )
        self.walk(data, path, level)

    def walk(self, data: Mapping[str, Any], path: str, level: Tree) -> None:
        """Read each entry of `data`. Free-form settings of a section are stored together under one
        path.
        """
        others: dict[str, Any] = {}
        # Arguments that the class named in the section does not take: AutoModel stops at them.
        wrong = dict(signatures.find_wrong_keys(path, data)) if REST in level else {}
        for name, value in data.items():
            where = f"{path}.{name}" if path else str(name)
            # "*" is our name for the rest of a section; a recipe
            # that has such a key means another thing.
            entry = None if name == REST else level.get(name)
            if name in wrong:
                self.unread(where, wrong[name])
            elif entry is None and REST in level:
                self.free(where, path, str(name), data, level)
                self.check_free_section(where, value)
                others[str(name)] = _plain_value(value)
            elif entry is None:
                self.unknown(where, level)
                self.suppose(where, value, data, level)
            elif isinstance(entry, str):
                self.leaf(where, entry, value, others)
            elif isinstance(value, Mapping):
                self.section(value, where, entry)
            elif value not in (None, "none", "None"):
                self.no_mapping(where, str(name), value, level, others)
        if others:
            self.set(level.get(REST) or f"{path}.{REST}", others, path)

    def free(self, where: str, path: str, name: str, data: Mapping[str, Any], level: Tree) -> None:
        """Add a finding about a free-form setting if AutoModel's own recipes do not have such a
        setting.
        """
        if remark := signatures.strange(path, name, data, level, len(self.findings)):
            self.finding(where, remark, Effect.NUMBERS)

    def check_free_section(self, key: str, value: Any) -> None:
        """Add findings about the keys inside a free-form section. The section itself is stored
        unchanged.
        """
        apart = key.partition(".")[0] in signatures.APART
        for place, message, stops in signatures.find_problems(key, value):
            if stops:
                self.unread(place, message)
            else:
                self.finding(place, message, Effect.NONE if apart else Effect.NUMBERS)

    def no_mapping(
        self, where: str, name: str, value: Any, level: Tree, others: dict[str, Any]
    ) -> None:
        """Handle a section that has a text or a list as value. Free-form sections accept both; for
        all others an error is added.
        """
        if REST in level and where not in STRICT:
            others[name] = _plain_value(value)
        else:
            self.problem(where, f"found {show_value(value)}, expected a mapping")

    # Leaves

    def leaf(self, where: str, path: str, value: Any, others: dict[str, Any]) -> None:
        """Read one value."""
        if callable(value) and path.endswith(".loss_fn"):
            self.opaque[path] = value
        elif not self.knows_setting(where, path):
            return
        elif (meaning := _value_of_text(path, value)) is not None:
            self.value(where, path, meaning, others)
        elif path == f"{PIPELINE}.pp_schedule":
            self.problem(
                where,
                "found null; AutoModel's splitter needs the name of a schedule, even with a CSV"
                " file; name a schedule",
            )

    def value(self, where: str, path: str, value: Any, others: dict[str, Any]) -> None:
        try:
            result = typed(path, value)
        except ValueError as error:
            # A section of one's own may have a name that AutoModel uses for something else.
            if "." not in path and path != "seed":
                others[path] = _plain_value(value)
            else:
                self.problem(where, str(error))
            return
        wrong = flaw(result)
        if isinstance(value, str) and path in formats() and value.lower() not in TAKEN:
            self.finding(
                where,
                f"AutoModel refuses the spelling {show_value(value)}; write {SPELLED.get(result, result)}",
                Effect.STOPS,
            )
        if wrong:
            self.problem(where, wrong)
        else:
            self.check_free_section(where, result)
            self.set(path, _plain_value(result), where)

    def knows_setting(self, where: str, path: str) -> bool:
        """Return whether the release has the setting. If not, add an error, or a finding if reading
        is lenient.
        """
        if self.release.reads(path) or path in IGNORED:
            return True
        self.unread(where, history(path, self.release))
        return False

    def unknown(self, where: str, level: Tree) -> None:
        """Add an error for a key that is a setting in no release, or a finding if reading is
        lenient.
        """
        self.unread(
            where,
            f"unknown key{nearest(where.rpartition('.')[2], level, len(self.problems) + len(self.findings))}",
        )

    def suppose(self, where: str, value: Any, data: Mapping[str, Any], level: Tree) -> None:
        """Read a misspelled key that selects a class or a strategy as if it were spelled correctly.

        The recipe is refused in any case. If the value were dropped, the section would be checked
        as another class, and its other errors would appear only after the spelling is mended.
        """
        match = MEANT.search(nearest(where.rpartition(".")[2], level))
        entry = level.get(match[1]) if match and match[1] in SELECTORS else None
        if isinstance(entry, str) and match and match[1] not in data and not self.lenient:
            self.leaf(where, entry, value, {})

    def unread(self, where: str, message: str) -> None:
        """Add an error about a setting that AutoModel does not read, or a finding if reading is
        lenient.
        """
        if self.lenient:
            self.record_omission(where, message)
        else:
            self.problem(where, message)

    def set(self, path: str, value: Any, where: str) -> None:
        """Store a value, with its line in the source."""
        self.given[path] = value
        line = self.line(where)
        spelling = where if where != path and not path.endswith(REST) else ""
        if line or spelling:
            self.origins[path] = Origin(line, spelling)
        for keys, _ in values_in_section(value) if path.endswith(REST) else ():
            if line := self.line(".".join((where, *keys)).lstrip(".")):
                self.origins[path_at(path, keys)] = Origin(line)

    # A schedule in a file of its own

    def schedule_file(self, folder: Path | None) -> None:
        """Check the CSV file of the schedule, if it is in the recipe's folder or in an allowed
        folder.
        """
        name = self.given.get(f"{PIPELINE}.pp_schedule_csv")
        if not isinstance(name, str):
            return
        try:
            # A mapping has no folder, so its name is taken as it stands.
            path = find(name, folder) if self.document else own(name)
            if path is None:
                self.finding(
                    f"{PIPELINE}.pp_schedule_csv",
                    f"{show_value(name)} was not found, so it was not checked",
                    Effect.NONE,
                )
            else:
                self.fits(table(read_text(path), name), name)
        except OutsideError as error:
            self.finding(f"{PIPELINE}.pp_schedule_csv", str(error), Effect.NONE)
        except (ConfigError, SourceError) as error:
            self.problems.extend(error.problems)

    def fits(self, schedule: Table, name: str) -> None:
        """Add an error if the CSV schedule has another number of ranks or micro batches than the
        recipe.
        """
        ranks, batch = (
            self.given.get("distributed.pp_size"),
            self.given.get("step_scheduler.local_batch_size"),
        )
        if ranks and len(schedule.ranks) != ranks:
            self.problem(
                f"{PIPELINE}.pp_schedule_csv",
                f"{name} has {len(schedule.ranks)} rows, expected one for each of {ranks} pipeline ranks",
            )
        # Micro batches of one pass: the local batch passes the pipeline at once.
        count = batch // (self.given.get(f"{PIPELINE}.pp_microbatch_size") or 1) if batch else None
        if count and schedule.microbatches != count:
            self.problem(
                f"{PIPELINE}.pp_schedule_csv",
                f"{name} has {schedule.microbatches} micro batches, expected {count} by the batch"
                " sizes",
            )


def _value_of_text(path: str, value: Any) -> Any:
    """Return the value that AutoModel's loader makes of a text: null, true, false or a number
    (config/loader.py, translate_value).
    """
    if path == SIGNAL and value in (None, "none", "None"):
        return ()
    if nullable(path) and value in (None, "none", "None", NULL):
        return NULL
    # For activation_checkpointing the text none is a mode of its own: off.
    if value in ("none", "None") and expected(path) != "true, false or selective":
        return None
    return scalar(value) if isinstance(value, str) and not takes_text(path) else value


def _plain_value(value: Any) -> Any:
    """Copy a free-form value into plain lists and dictionaries."""
    if isinstance(value, Mapping):
        return {str(name): _plain_value(inner) for name, inner in value.items()}
    return [_plain_value(item) for item in value] if isinstance(value, list) else value


def history(path: str, release: Release) -> str:
    """Return a message about the setting `path`, which the release does not have."""
    if until(path) and release.since(since(path)):
        last, new = RELEASES.last(until(path)), instead(path)
        advice = f"use {new}" if new else "drop it"
        return (
            f"AutoModel {last} was the last release that read this setting, and this is"
            f" {release.version}; {advice}"
        )
    return (
        f"this setting is new in AutoModel {since(path)}, and this is {release.version}; drop it, or"
        " name a later release"
    )


# Writing


def nest_recipe(settings: Mapping[str, Any], release: Release) -> dict[str, Any]:
    """Return the recipe as nested mappings in the layout of the release. A recipe that was read in
    the older layout keeps the older layout.
    """
    root: dict[str, Any] = {}
    order = {path: place for place, path in enumerate(fields(AutoModel))}
    for path in sorted(settings, key=lambda path: order[path]):
        *parents, leaf = place_of(path, settings, release)
        place = root
        for parent in parents:
            place = place.setdefault(parent, {})
        # The rest of a section stands beside its typed settings.
        place.update(settings[path] if leaf == REST else {leaf: _spell_value(path, settings[path])})
    return root


def place_of(path: str, settings: Mapping[str, Any], release: Release) -> tuple[str, ...]:
    """Return the keys that lead to the setting `path`, in the layout of the release or of the
    recipe.
    """
    old = f"{OLD}.{TARGET}" in settings or not release.nests_pipeline
    return tuple(
        (path.replace(PIPELINE, OLD, 1) if old and path.startswith(PIPELINE + ".") else path).split(
            "."
        )
    )


@cache
def nullable(path: str) -> bool:
    """Whether the setting at `path` accepts null as a value, so that null differs from a missing
    key.
    """
    return path.startswith(CONFIG) and NULL in expected(path).split()


def _spell_value(path: str, value: Any) -> Any:
    if path == SIGNAL and value == ():
        return None
    if path in formats():
        return SPELLED.get(value, value)
    return spell_value(path.removeprefix(CONFIG), value) if path.startswith(CONFIG) else value


FILE = "recipe.yaml"
"""The default name of a written file."""
NAMED = "0.4.0"
"""First release in which a recipe names its class and the app starts that class."""


def program(release: Release) -> tuple[str, ...]:
    """Return the module that runs a recipe on every rank, followed by the arguments that precede
    the file (cli/app.py, recipes/llm/train_ft.py).
    """
    if release.since(NAMED):
        return ("nemo_automodel.cli.app",)
    return ("nemo_automodel.recipes.llm.train_ft", "--config")


def text(settings: Mapping[str, Any], release: Release) -> str:
    """Return a recipe as YAML that sets every value explicitly."""
    return spell_yaml(nest_recipe(settings, release))
