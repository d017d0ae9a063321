"""Every key of a `config.json` that describes the model, with its type. All other keys are kept
unchanged in `others`.
"""

from bridge.plan.section_rows import build_sections
from compat.huggingface import setting_types

globals().update(build_sections(__name__, vars(setting_types)))
SCHEMA = globals()["HuggingFace"]
"""The schema, under the name by which `PackagedDialect` finds it."""
