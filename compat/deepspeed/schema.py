"""Every key of a DeepSpeed config from 0.15.0 to 0.19.8, with type and description. The module
`releases` lists the keys of each release.
"""

from bridge.plan.section_rows import build_sections
from compat.deepspeed import setting_types

globals().update(build_sections(__name__, vars(setting_types)))
SCHEMA = globals()["DeepSpeed"]
"""The schema, under the name by which `PackagedDialect` finds it."""
