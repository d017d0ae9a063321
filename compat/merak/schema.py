"""Every setting of a Merak run, with type and description: parameters of `init`, `MerakArguments`,
the trainer, and the tensor-parallel lists.
"""

from bridge.plan.section_rows import build_sections
from compat.merak import setting_types

globals().update(build_sections(__name__, vars(setting_types)))
SCHEMA = globals()["Merak"]
"""The schema, under the name by which `PackagedDialect` finds it."""
