"""Every field of a Fast-LLM training config from 0.1.0 to mid 2026, with types and descriptions.
The module `releases` lists the fields of each release.
"""

from bridge.plan.section_rows import build_sections
from compat.fast_llm import setting_types

globals().update(build_sections(__name__, vars(setting_types)))
SCHEMA = globals()["FastLLM"]
"""The schema, under the name by which `PackagedDialect` finds it."""
