"""Typed settings of an AutoModel recipe about distribution, batches and training; all other settings are free-form."""

from bridge.plan.section_rows import build_sections
from compat.automodel import setting_types

globals().update(build_sections(__name__, vars(setting_types)))
SCHEMA = globals()["AutoModel"]
"""The schema, under the name by which `PackagedDialect` finds it."""
