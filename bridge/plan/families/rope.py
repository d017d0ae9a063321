"""Reads and writes the settings of rotary positions: the keys `rope_theta` and `rope_scaling`, or
since transformers 5 the mapping `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from bridge.errors import ConfigError
from bridge.plan.families.source import Group, Source, Target

THETA, SCALING, GROUPED = "rope_theta", "rope_scaling", "rope_parameters"
SHARE = "partial_rotary_factor"
LOCAL, ORIGINAL = "rope_local_base_freq", "original_max_position_embeddings"
FULL, SLIDING = "full_attention", "sliding_attention"
KEYS = (
    THETA,
    SCALING,
    GROUPED,
    "rotary_emb_base",
    SHARE,
    "rotary_pct",
    "rotary_dim",
    LOCAL,
    ORIGINAL,
)
APART = frozenset((THETA, SCALING, "rotary_emb_base", "rotary_pct", LOCAL))
"""Keys that `rope_parameters` replaces."""
NAMES: Mapping[str, str] = {
    "factor": "factor",
    "original": ORIGINAL,
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "fast": "beta_fast",
    "slow": "beta_slow",
    "attention": "attention_factor",
    "mscale": "mscale",
    "mscale_all": "mscale_all_dim",
    "truncate": "truncate",
}
"""The key of rotary scaling in a config for each plan field below `rotary.scaling`."""
BY_KIND: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original"),
    "yarn": ("factor", "original", "fast", "slow", "attention", "mscale", "mscale_all", "truncate"),
    "llama3": ("factor", "original", "low", "high"),
    "longrope": ("factor", "original", "attention"),
}
"""Plan fields that each kind of scaling reads (modeling_rope_utils.py)."""
SPELLED = {"default": "none", "su": "longrope", "mrope": "none", None: "none"}
USUAL: Mapping[str, Mapping[str, Any]] = {
    "yarn": {"fast": 32.0, "slow": 1.0, "truncate": True},
    "llama3": {},
}
"""Default values of the settings of each kind of scaling, for kinds with defaults
(modeling_rope_utils.py: _compute_yarn_parameters).
"""
WHOLE, SWITCHES = ("original",), ("truncate",)
WEIGHTS = ("mscale", "mscale_all")
PATHS = (
    "rotary.base",
    "rotary.local_base",
    "rotary.share",
    "rotary.scaling.kind",
    *(f"rotary.scaling.{name}" for name in NAMES),
)
_STRETCHED = ("rotary.scaling.kind", *(f"rotary.scaling.{name}" for name in NAMES))
SAYS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((THETA, "rotary_emb_base"), ("rotary.base",)),
    **dict.fromkeys((SHARE, "rotary_pct", "rotary_dim"), ("rotary.share",)),
    LOCAL: ("rotary.local_base",),
    SCALING: _STRETCHED,
    ORIGINAL: ("rotary.scaling.original", "rotary.scaling.factor"),
}
"""The fields that each key of rotary positions sets. The key `rope_parameters` is not listed,
because it sets all fields.
"""
BASE = 10000.0
"""Base of the rotary frequencies if the family has no default of its own."""


def apart(keys: Collection[str]) -> bool:
    """Return whether a config with these keys stores the base and the scaling of rotary positions
    under separate keys.
    """
    return GROUPED not in keys and not APART.isdisjoint(keys)


def read(source: Source, model: Group, options: Group) -> Group:
    """Read the settings of rotary positions: the base, the share of each head that rotates, and the
    scaling. They are stored under separate keys or in the mapping `rope_parameters`.

    The mapping may have an entry for each kind of block. If a config has both `rope_scaling` and
    `rope_parameters`, `rope_scaling` takes precedence. In families with one base for each kind of
    block, the entries of the two keys are merged (modeling_rope_utils.py:
    convert_rope_params_to_dict).
    """
    # An empty name in the family's row: its code computes with the usual base and reads no key for
    # it.
    if options.get("base") == "":
        return {
            "rotary.base": BASE,
            "rotary.share": _share(source, {}, model, options),
            "rotary.scaling.kind": "none",
        }
    parameters = _mapping(source.given, GROUPED)
    per_kind = any(isinstance(value, Mapping) for value in parameters.values())
    full = _inner(parameters, FULL) if per_kind else parameters
    if own := _mapping(source.given, SCALING):
        full = {**full, **own} if options.get("local") else own
    scaling = full
    # A default of the class takes effect only if the file has neither of the two keys, not if it
    # has a null.
    if not source.has(SCALING) and not source.has(GROUPED):
        scaling = dict(_mapping(source.defaults, SCALING))
    local = _inner(parameters, SLIDING).get(THETA) if per_kind else None
    result = {
        "rotary.base": _base(source, full, options),
        "rotary.local_base": _number(local or source.find(LOCAL), LOCAL)
        if options.get("local")
        else None,
        "rotary.share": _share(source, full, model, options),
        **_scaling(scaling, source, model),
    }
    # A file of an unknown class without any of these keys may have other positions altogether.
    return result if source.named or any(source.has(key) for key in KEYS) else {}


def _mapping(values: Group, key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}


def _inner(parameters: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = parameters.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(value: Any, key: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{key}: found {value!r}; expected a number above 0")
    return float(value)


def _base(source: Source, full: Mapping[str, Any], options: Group) -> float | None:
    own = options.get("base", THETA)
    base = full.get(THETA) or (source.find(*dict.fromkeys((own, THETA))) if own else None)
    if base is None and not source.named:
        return None
    return _number(base, own or THETA) or BASE


def _share(source: Source, full: Mapping[str, Any], model: Group, options: Group) -> float | None:
    if options.get("latent"):
        return None
    if options.get("dim"):
        width, size = source.find(options["dim"]), model.get("attention.head_size")
        if not size:
            return None
        return width / size if width and width <= size else 1.0
    if not options.get("share"):
        return 1.0 if source.named else None
    value = full.get(SHARE) if full.get(SHARE) is not None else source.find(options["share"])
    if value is None and not source.named:
        return None
    share = _number(value, options["share"]) or 1.0
    if share > 1:
        raise ConfigError(f"{options['share']}: found {share:g}; expected at most 1")
    return share


def _scaling(scaling: Mapping[str, Any], source: Source, model: Group) -> dict[str, Any]:
    kind_name = scaling.get("rope_type", scaling.get("type"))
    kind = (
        SPELLED.get(kind_name, kind_name or "")
        if kind_name is None or isinstance(kind_name, str)
        else ""
    )
    if kind not in BY_KIND:
        raise ConfigError(
            f"rope_scaling: found kind {kind_name!r}; expected one of {', '.join(BY_KIND)}"
        )
    if kind == "none" and not source.named:
        return {}
    result: dict[str, Any] = {"rotary.scaling.kind": kind}
    for name in BY_KIND[kind]:
        if name in WEIGHTS:
            continue
        value = scaling.get(NAMES[name], USUAL.get(kind, {}).get(name))
        result[f"rotary.scaling.{name}"] = _check_number(name, value)
    if kind == "yarn":
        result |= _weights(scaling)
    # Files may leave out the length before scaling, and then the model's own length stands for it.
    if "original" in BY_KIND[kind] and result["rotary.scaling.original"] is None:
        result["rotary.scaling.original"] = source.find(ORIGINAL) or model.get(
            "embedding.max_positions"
        )
    if kind == "longrope" and result["rotary.scaling.factor"] is None:
        original, reach = result["rotary.scaling.original"], model.get("embedding.max_positions")
        result["rotary.scaling.factor"] = reach / original if original and reach else None
    return result


def _weights(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Read both mscale values of YaRN. `mscale` takes effect only together with `mscale_all_dim`
    (_compute_yarn_parameters).
    """
    both = scaling.get(NAMES["mscale"]) and scaling.get(NAMES["mscale_all"])
    result: dict[str, Any] = {}
    for name in WEIGHTS:
        value = scaling.get(NAMES[name])
        works = both or name == "mscale_all"
        number = None
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and works:
            number = float(value)
        result[f"rotary.scaling.{name}"] = number
    return result


def _check_number(name: str, value: Any) -> Any:
    key = f"rope_scaling.{NAMES[name]}"
    if value is None or name in SWITCHES:
        return value if value is None or isinstance(value, bool) else None
    number = _number(value, key)
    if number is not None and name in WHOLE:
        if number != int(number):
            raise ConfigError(f"{key}: found {value!r}; expected a whole number")
        return int(number)
    return number


def write(model: Group, target: Target, options: Group) -> Group:
    """Write the base of rotary positions, the share of each head that rotates, and the scaling.

    They are separate keys or, for releases from transformers 5 on, the mapping `rope_parameters`.
    """
    share, keys = _share_of_options(model, options), {}
    base, kind = model.get("rotary.base"), model.get("rotary.scaling.kind")
    scaling = {"rope_type": "default" if kind == "none" else kind} if kind else {}
    for name in BY_KIND[kind or "none"]:
        if (value := model.get(f"rotary.scaling.{name}")) is not None:
            scaling[NAMES[name]] = value
    if base is None and not scaling:
        return share
    own, local = options.get("base", THETA), model.get("rotary.local_base")
    if target.grouped and own:
        full = {"rope_type": "default", **scaling, **({THETA: base} if base is not None else {})}
        if (
            own != THETA and share
        ):  # rope_parameters has one name for the share, whatever the family's own key
            full, share = {**full, SHARE: share[options["share"]]}, {}
        both = {SLIDING: {"rope_type": "default", THETA: local}, FULL: full}
        return {**share, GROUPED: both if options.get("local") and local else full}
    if options.get("local") and local is not None:
        keys[LOCAL] = local
    if own and base is not None:
        keys[own] = base
    # No scaling has to be written if the class scales by default.
    plain = kind in (None, "none") and not target.defaults.get(SCALING)
    return {**share, **keys, **({} if plain else {SCALING: scaling})}


def _share_of_options(model: Group, options: Group) -> dict[str, Any]:
    share, size = model.get("rotary.share"), model.get("attention.head_size")
    if share is None:
        return {}
    if options.get("dim") and size:
        return {options["dim"]: round(share * size)}
    return {options["share"]: share} if options.get("share") else {}
