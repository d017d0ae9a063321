"""Typed keys of a model's config: all keys that the table of families reads."""

from bridge.plan.families import setting_types
from bridge.plan.section_rows import build_sections

globals().update(build_sections(__name__, vars(setting_types)))
