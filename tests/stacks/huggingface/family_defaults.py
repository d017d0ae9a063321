"""Defaults of transformers' own config classes, for the keys that the table of families reads: python family_defaults.py FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LEFT_OUT = ("num_mtp_layers", "num_nextn_predict_layers", "output_router_logits")
"""Keys whose default describes layers that transformers' own model does not have, or a choice that whoever trains makes."""

TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def defaults(config: str, known: frozenset[str]) -> dict[str, Any]:
    """What the class `config` takes where a key is left out; rotary positions in their older words."""
    import dataclasses

    import transformers

    kind = getattr(transformers, config)
    made = kind()
    fields = {
        field.name: field.default
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING
    }
    found = {
        key: value
        for key, value in fields.items()
        if key in known and key not in (*LEFT_OUT, "rope_parameters")
    }
    # Some classes set these when they are built.
    found |= {key: getattr(made, key) for key in TOKENS if key in known}
    found |= _rotary(getattr(made, "rope_parameters", None) or {}, known)
    return dict(sorted((key, value) for key, value in found.items() if value is not None))


def _rotary(rope: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    full = (
        rope.get("full_attention", rope) if isinstance(rope.get("full_attention"), dict) else rope
    )
    if not full:
        return {}
    said: dict[str, Any] = {"rope_theta": full["rope_theta"]}
    if isinstance(rope.get("sliding_attention"), dict):
        said["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    if full.get("partial_rotary_factor") is not None:
        said |= dict.fromkeys(
            ("partial_rotary_factor", "rotary_pct"), full["partial_rotary_factor"]
        )
    if full["rope_type"] != "default":
        said["rope_scaling"] = {
            key: value
            for key, value in full.items()
            if key not in ("rope_theta", "partial_rotary_factor")
        }
    return {key: value for key, value in said.items() if key in known}


def main(place: Path) -> None:
    """Write the defaults of every family with a class."""
    from bridge.plan.families.table import FAMILIES

    harvested = {
        name: defaults(family.config, family.keys_it_reads)
        for name, family in FAMILIES.items()
        if family.config
    }
    rows = [f" {json.dumps(name)}: {json.dumps(values)}" for name, values in harvested.items()]
    place.write_text("{\n" + ",\n".join(rows) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
