"""Types of the keys of a `config.json`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from bridge.plan.families.schema import ModelKeys as ModelKeys
from bridge.plan.families.setting_types import Free as Free, Share as Share


def _dtype(value: Any) -> Any:
    return value.removeprefix("torch.") if isinstance(value, str) else value


Dtype = Annotated[str, BeforeValidator(_dtype)]
