"""Reads and writes keys of a config that have a meaning only together with other keys: positions,
windows, blocks with experts, and sizes that depend on other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isclose, sqrt
from typing import Any

from bridge.plan.families.codecs import head_size, undone
from bridge.plan.families.rope import (
    KEYS as ROPE_KEYS,
    PATHS as ROPE_PATHS,
    SAYS as ROPE_SAYS,
    read as read_rope,
    write as write_rope,
)
from bridge.plan.families.source import Group, Source, Target
from bridge.plan.families.sparse import (
    KEYS as SPARSE_KEYS,
    read as read_sparse,
    write as write_sparse,
)
from bridge.plan.families.windows import (
    KEYS as WINDOW_KEYS,
    PATHS as WINDOW_PATHS,
    read as read_windows,
    write as write_windows,
)

Options = Mapping[str, Any]


@dataclass(frozen=True)
class KeyGroup:
    """A group of keys and fields that are read and written together, such as those of rotary
    positions. The options in a family's row adapt the group to the family.
    """

    keys: Callable[[Options], tuple[str, ...]]
    paths: Callable[[Options], tuple[str, ...]]
    read: Callable[[Source, Group, Options], Group]
    write: Callable[[Group, Target, Options], Group]


def _always(*names: str) -> Callable[[Options], tuple[str, ...]]:
    return lambda options: names


# Heads


def _read_heads(source: Source, model: Group, options: Options) -> Group:
    """Read the number of key and value heads: 1 if the family's switch is on, else the number of
    attention heads.
    """
    single = options.get("key") and source.find(options["key"])
    return {"kv_heads": 1 if single else model.get("heads")}


def _write_heads(model: Group, target: Target, options: Options) -> Group:
    if not options.get("key") or not model.get("kv_heads"):
        return {}
    return {options["key"]: model.get("kv_heads") == 1}


FALCON = (
    "num_kv_heads",
    "multi_query",
    "new_decoder_architecture",
    "parallel_attn",
    "alibi",
    "num_ln_in_parallel_attn",
)


def _read_falcon(source: Source, model: Group, options: Options) -> Group:
    """Read the settings of Falcon's older and newer blocks
    (models/falcon/modeling_falcon.py: FalconAttention, FalconDecoderLayer).
    """
    heads, new = model.get("heads"), bool(source.find("new_decoder_architecture"))
    # The older blocks know only one key and value head or all of them, and the switch decides.
    older = 1 if source.find("multi_query") else heads
    kv = (source.find("num_kv_heads") or heads) if new else older
    # The newer ones are always side by side, whatever `parallel_attn` is.
    parallel = new or bool(source.find("parallel_attn"))
    norms = source.find("num_ln_in_parallel_attn") or (2 if new else 1)
    return {
        "kv_heads": kv,
        "embedding.positions": "alibi" if source.find("alibi") else "rotary",
        "norm.parallel": parallel,
        "norm.shared": norms == 1 if parallel else None,
    }


def _write_falcon(model: Group, target: Target, options: Options) -> Group:
    kv, heads, parallel = (
        model.get("kv_heads"),
        model.get("heads"),
        bool(model.get("norm.parallel")),
    )
    # Only the newer blocks have two norms, or a number of key and value heads other than 1 and all.
    new = parallel and (model.get("norm.shared") is False or kv not in (1, heads))
    norms = (1 if model.get("norm.shared") else 2) if new else None
    return {
        "new_decoder_architecture": new,
        "multi_query": kv == 1 and not new,
        "num_kv_heads": kv if new else None,
        "parallel_attn": parallel,
        "num_ln_in_parallel_attn": norms,
        "alibi": model.get("embedding.positions") == "alibi",
    }


# Sizes that depend on others


def _read_shared(source: Source, model: Group, options: Options) -> Group:
    """Read the total width of all shared experts from the number of shared experts. Each shared
    expert is as wide as a routed expert.
    """
    count, width = source.find(options["count"]), model.get("moe.ffn") or model.get("ffn")
    if (
        count is None
        and not source.has(options["count"])
        and options["count"] not in source.defaults
    ):
        return {}
    return {"moe.shared_ffn": (count or 0) * (width or 0)} if width or not count else {}


def _write_shared(model: Group, target: Target, options: Options) -> Group:
    total, width = model.get("moe.shared_ffn"), model.get("moe.ffn") or model.get("ffn")
    if total is None or (total and (not width or total % width)):
        return {}
    return {options["count"]: total // width if total and width else 0}


GATED = "shared_expert_intermediate_size"


def _read_gated(source: Source, model: Group, options: Options) -> Group:
    width = source.find(GATED) or 0
    return {"moe.shared_ffn": width, "moe.shared_gate": bool(width)}


def _read_root(source: Source, model: Group, options: Options) -> Group:
    """Read the factor by which the embedding's output is multiplied: the square root of the hidden
    size (models/gemma/modeling_gemma.py).
    """
    return {"embedding.scale": sqrt(model["hidden"])} if model.get("hidden") else {}


SCALAR = "query_pre_attn_scalar"


def _read_scalar(source: Source, model: Group, options: Options) -> Group:
    value, size = source.find(SCALAR), model.get("attention.head_size")
    return {"attention.scale": value**-0.5 if value and value != size else None}


def _write_scalar(model: Group, target: Target, options: Options) -> Group:
    scale, size = model.get("attention.scale"), model.get("attention.head_size") or head_size(model)
    # The logits are multiplied by scalar ** -0.5, so the scalar is scale ** -2.
    value = size if scale is None else undone(lambda number: number**-0.5, scale**-2, scale)
    # transformers wants a whole number; a scale that another stack rounded still maps to it.
    whole = round(value) if value else None
    if value and whole and isclose(whole, value, rel_tol=1e-9):
        value = whole
    return {SCALAR: value}


PROJECTED = "word_embed_proj_dim"


def _read_width(source: Source, model: Group, options: Options) -> Group:
    width = source.find(PROJECTED)
    return {"embedding.width": width if width != model.get("hidden") else None}


# Norm


def _read_epsilon(source: Source, model: Group, options: Options) -> Group:
    """Read the epsilon and the kind of the norms. The name of the key that holds epsilon tells the
    kind.
    """
    for name, kind in (
        ("rms_norm_eps", "rms"),
        ("layer_norm_eps", "layer"),
        ("layer_norm_epsilon", "layer"),
    ):
        if (value := source.find(name)) is not None:
            return {"norm.eps": value, "norm.kind": kind}
    return {}


def _write_epsilon(model: Group, target: Target, options: Options) -> Group:
    eps, kind = model.get("norm.eps"), model.get("norm.kind")
    if eps is None or not kind:
        return {}
    return {"rms_norm_eps" if kind == "rms" else "layer_norm_eps": eps}


# Load balancing of experts


BALANCE, ROUTED = "router_aux_loss_coef", "output_router_logits"


def _read_balance(source: Source, model: Group, options: Options) -> Group:
    """Read the coefficient of the load-balancing loss over all tokens and all blocks.

    Training includes this loss only if the key `output_router_logits` is true
    (models/mixtral/modeling_mixtral.py: load_balancing_loss_func, MixtralForCausalLM.forward). If
    the config sets the key to false, the model has no loss. If the config leaves the key out, the
    coefficient is kept although the default is false, because other code that trains the model may
    use the coefficient.
    """
    logits_flag = source.find(ROUTED)
    loss = 0.0 if logits_flag is False else source.find(BALANCE)
    in_training = bool(logits_flag) if loss and source.named else None
    over = "pooled" if in_training else "batch"
    return {
        "moe.aux_loss": loss,
        "moe.balance": over if loss else "none",
        "moe.aux_trained": in_training,
    }


def _write_balance(model: Group, target: Target, options: Options) -> Group:
    loss, over = model.get("moe.aux_loss"), model.get("moe.balance")
    if over == "none":
        return {BALANCE: loss or 0.0}
    in_training = over in ("batch", "pooled") and loss and model.get("moe.aux_trained") is not False
    return {BALANCE: loss, ROUTED: True if in_training else None}


def _read_auxiliary(source: Source, model: Group, options: Options) -> Group:
    """Read DeepSeek-V2's load-balancing loss, which is averaged over a token's experts. Other
    families sum over these experts.
    """
    alpha, chosen = source.find("aux_loss_alpha"), model.get("moe.top_k")
    if alpha is None or not chosen:
        return {}
    # A class that lacks the key balances within each sequence, which is its default.
    over = "sequence" if source.find("seq_aux") in (None, True) else "batch"
    return {"moe.aux_loss": alpha / chosen, "moe.balance": over if alpha else "none"}


def _write_auxiliary(model: Group, target: Target, options: Options) -> Group:
    loss, over, chosen = model.get("moe.aux_loss"), model.get("moe.balance"), model.get("moe.top_k")
    if loss is None or not chosen:
        return {}
    alpha = undone(lambda number: number / chosen, loss * chosen, loss) if loss else 0.0
    return {"aux_loss_alpha": alpha, "seq_aux": over == "sequence" if loss else None}


def _read_grouped(source: Source, model: Group, options: Options) -> Group:
    """Read the number of groups of experts, and of groups that a token may choose from. In
    DeepSeek-V2 only the method group_limited_greedy uses groups.
    """
    if source.find("topk_method") != "group_limited_greedy":
        return {}
    return {"moe.groups": source.find("n_group"), "moe.top_groups": source.find("topk_group")}


def _write_grouped(model: Group, target: Target, options: Options) -> Group:
    groups = model.get("moe.groups")
    if not groups:
        return {"topk_method": "greedy"} if model.get("experts") else {}
    return {
        "topk_method": "group_limited_greedy",
        "n_group": groups,
        "topk_group": model.get("moe.top_groups"),
    }


def _nothing(model: Group, target: Target, options: Options) -> Group:
    return {}


SAYS: Mapping[str, tuple[str, ...]] = {**ROPE_SAYS, BALANCE: ("moe.aux_loss", "moe.balance")}
"""Keys that belong to a part but set only some of the part's fields. Each key comes with the names
of the fields that it sets.
"""

PARTS: Mapping[str, KeyGroup] = {
    "all_heads": KeyGroup(
        lambda options: (options["key"],) if options.get("key") else (),
        _always("kv_heads"),
        _read_heads,
        _write_heads,
    ),
    "falcon": KeyGroup(
        _always(*FALCON),
        _always("kv_heads", "embedding.positions", "norm.parallel", "norm.shared"),
        _read_falcon,
        _write_falcon,
    ),
    "shared": KeyGroup(
        lambda options: (options["count"],), _always("moe.shared_ffn"), _read_shared, _write_shared
    ),
    "gated": KeyGroup(
        _always(GATED),
        _always("moe.shared_ffn", "moe.shared_gate"),
        _read_gated,
        lambda model, target, options: {GATED: model.get("moe.shared_ffn")},
    ),
    # The feed-forward layer of these families is always four times as wide as the residual stream,
    # without a key for it.
    "four": KeyGroup(
        _always(),
        _always("ffn"),
        lambda source, model, options: {"ffn": 4 * model["hidden"]} if model.get("hidden") else {},
        _nothing,
    ),
    "root": KeyGroup(_always(), _always("embedding.scale"), _read_root, _nothing),
    "scalar": KeyGroup(_always(SCALAR), _always("attention.scale"), _read_scalar, _write_scalar),
    "width": KeyGroup(
        _always(PROJECTED),
        _always("embedding.width"),
        _read_width,
        lambda model, target, options: {
            PROJECTED: model.get("embedding.width") or model.get("hidden")
        },
    ),
    "epsilon": KeyGroup(
        _always("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
        _always("norm.eps", "norm.kind"),
        _read_epsilon,
        _write_epsilon,
    ),
    "balance": KeyGroup(
        _always(BALANCE, ROUTED),
        _always("moe.aux_loss", "moe.balance", "moe.aux_trained"),
        _read_balance,
        _write_balance,
    ),
    "auxiliary": KeyGroup(
        _always("aux_loss_alpha", "seq_aux"),
        _always("moe.aux_loss", "moe.balance"),
        _read_auxiliary,
        _write_auxiliary,
    ),
    "grouped": KeyGroup(
        _always("topk_method", "n_group", "topk_group"),
        _always("moe.groups", "moe.top_groups"),
        _read_grouped,
        _write_grouped,
    ),
    "rope": KeyGroup(lambda options: ROPE_KEYS, lambda options: ROPE_PATHS, read_rope, write_rope),
    "windows": KeyGroup(
        lambda options: WINDOW_KEYS, lambda options: WINDOW_PATHS, read_windows, write_windows
    ),
    "sparse": KeyGroup(
        lambda options: SPARSE_KEYS, _always("moe.layers"), read_sparse, write_sparse
    ),
}
"""Every `KeyGroup` by the name that rows of `families.json` use, in the order in which parts are read."""
