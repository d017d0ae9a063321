"""The meaning of a plan's values. An open field has the meaning of a certain value, so two plans
are equal if one leaves the field open and the other sets this value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import isclose, log2
from typing import Any

Values = Mapping[str, Any]
MODEL, MOE, ROTARY = "model.", "model.moe.", "model.rotary."
EXIT = "run.exit_interval"
PARTS = ("embedding", "output")
FACTORS = tuple(f"optimizer.{which}_lr" for which in PARTS)
"""Factors of a part's learning rate."""
SCHEDULE, LOSS_SCALE = "optimizer.schedule.", "precision.loss_scale."
HABITS, RANK = "habits.", "adapters.rank"
DROPOUTS = ("model.dropout", "model.attention.dropout", "model.embedding.dropout")
COMPUTE, AUTOCAST, MASTER = "precision.compute", "precision.autocast", "precision.master"
BALANCE, BY_LOSS = "model.moe.balance", ("batch", "pooled", "sequence", "global")
AUX_LOSS, AUX_TRAINED = "model.moe.aux_loss", "model.moe.aux_trained"
Z_LOSS = "model.moe.z_loss"
PADDING, BEGIN, ENDS = (f"model.embedding.{name}" for name in ("padding", "begin", "ends"))
HEAD_SIZE, SCALE = "model.attention.head_size", "model.attention.scale"


def plain(values: Values) -> dict[str, Any]:
    """Return `values` without values that take no effect, and with the values that open fields
    stand for.

    Whether a value takes effect depends on the other values.
    """
    result = {path: value for path, value in values.items() if value is not None}
    for path in list(result):
        if path.startswith((MODEL, SCHEDULE, LOSS_SCALE, HABITS, EXIT, *FACTORS)) and _idle(
            path, result[path], values
        ):
            if (value := ALIKE.get(path)) is not None:
                result[path] = value
            else:
                del result[path]
    # In the order of the table: a later meaning may build on an earlier one.
    for path, meaning in MEANINGS.items():
        if path not in result and (value := meaning(result)) is not None:
            result[path] = value
    if (
        result.get("optimizer.name") == "adam"
        and result.get("optimizer.weight_decay") == 0
        and not result.get("optimizer.decay_ramp.end")
    ):
        result["optimizer.name"] = (
            "adamw"  # the two differ only in how weights decay, and here none does
        )
    if result.get(BALANCE) in BY_LOSS and result.get(AUX_LOSS) == 0:
        result[BALANCE] = "none"  # a loss without a weight
    if AUTOCAST in result:
        result[COMPUTE] = result[AUTOCAST]
    if (
        result.get("model.experts")
        and result.get("model.moe.ffn")
        and "model.moe.layers" not in result
    ):
        result.pop("model.ffn", None)  # every block has experts, so no layer of that width exists
    # Scores are divided by the root of a head's width by default. Stacks write the scale with few
    # or many digits, and a difference below the precision of any compute format is no other scale.
    size, scale = head_size(result), result.get(SCALE)
    usual = float(size**-0.5) if size else None
    if usual is not None and (scale is None or isclose(scale, usual, rel_tol=1e-9)):
        result[SCALE] = usual
    elif scale is not None:
        result[SCALE] = float(f"{scale:.10g}")
    return result


def head_size(values: Values) -> int | None:
    """Return the width of a head in elements: the value that is set, or else the hidden width
    divided by the number of heads, rounded down.

    Return None for latent attention, where the parts of a head have different widths.
    """
    size = values.get(HEAD_SIZE)
    if size is not None or values.get("model.attention.latent.kv_rank"):
        return size
    return shared_width(values)


def shared_width(values: Values) -> int | None:
    """The hidden width divided by the number of heads, rounded down; None if one is open or the
    result is 0.
    """
    hidden, heads = values.get("model.hidden"), values.get("model.heads")
    return int(hidden // heads) or None if hidden and heads else None


def _as(path: str) -> Callable[[Values], Any]:
    return lambda values: values.get(path)


def _cast(values: Values) -> Any:
    """Return the format of matrix products if the weights that are updated have another format;
    else None.
    """
    # torch.autocast computes in one format and updates weights in another. A stack that casts by
    # itself does the same.
    compute = values.get(COMPUTE)
    return compute if compute != values.get(MASTER, compute) else None


def _beside(path: str, value: Any) -> Callable[[Values], Any]:
    return lambda values: value if values.get(path) is not None else None


SMOOTH = frozenset({"adam", "adamw", "lion", "lamb", "adagrad", "adafactor", "soap"})
"""Optimizers without Nesterov momentum. For them, the open field `nesterov` means off. For sgd and
muon, which exist with and without Nesterov momentum, the field stays open.
"""


MEANINGS: Mapping[str, Callable[[Values], Any]] = {
    HEAD_SIZE: head_size,
    "model.kv_heads": _as("model.heads"),
    "model.moe.ffn": lambda values: (
        values.get("model.ffn") if values.get("model.experts") else None
    ),
    "model.embedding.padded_vocab": _as("model.vocab"),
    "model.vocab": _as("model.embedding.padded_vocab"),
    "model.predicted": _beside("model.hidden", 0),
    "model.embedding.offset": lambda values: (
        0 if values.get("model.embedding.positions") == "learned" else None
    ),
    "model.embedding.scale": _beside("model.hidden", 1.0),
    "model.embedding.logit_scale": _beside("model.hidden", 1.0),
    "model.embedding.residual_scale": _beside("model.hidden", 1.0),
    "model.moe.scale": _beside("model.experts", 1.0),
    Z_LOSS: _beside("model.experts", 0.0),
    AUX_LOSS: _beside("model.experts", 0.0),
    AUX_TRAINED: lambda values: True if values.get(AUX_LOSS) else None,
    "model.rotary.share": _beside("model.rotary.base", 1.0),
    "model.rotary.local_base": _as("model.rotary.base"),
    "model.rotary.scaling.kind": _beside("model.rotary.base", "none"),
    AUTOCAST: _cast,
    "precision.residual": _as("precision.compute"),
    "precision.router": _as("precision.compute"),
    "precision.moments": lambda values: values.get(MASTER) and (values[MASTER],) * 2,
    "optimizer.bias_correction": _beside("optimizer.name", True),
    "optimizer.nesterov": lambda values: False if values.get("optimizer.name") in SMOOTH else None,
    "optimizer.amsgrad": _beside("optimizer.name", False),
}
"""Functions that derive the meaning of an open field from the other values. A function returns None
if the other values do not decide the meaning. The description of each field in `bridge.plan` states
what the open field means.
"""


def _idle(path: str, value: Any, values: Values) -> bool:
    """Return whether a value has no effect, such as a setting of experts in a model without
    experts, or a list of blocks that names every block.
    """
    if path.startswith(MOE) and (
        not values.get("model.experts") or (path == "model.moe.layers" and all(value))
    ):
        return True
    if path in FACTORS:
        return bool(value == 1)
    if path.startswith(ROTARY):
        return bool(values.get("model.embedding.positions", "rotary") != "rotary")
    if path == AUX_TRAINED:
        return not values.get(AUX_LOSS)
    if path == "model.moe.group_best":
        return bool(values.get("model.moe.top_groups") == values.get("model.moe.groups"))
    if path == "model.moe.shared_gate":
        return not values.get("model.moe.shared_ffn")
    if path == "model.norm.shared":
        return not values.get("model.norm.parallel")
    if path == "model.attention.windowed":
        return values.get("model.attention.window") is None or all(value)
    return path in UNREACHED and UNREACHED[path](values)


def _level(values: Values) -> bool:
    """Return whether the learning rate stays constant after the warmup, so that it has no end."""
    return bool(values.get(SCHEDULE + "name") == "constant")


def _half(values: Values) -> bool:
    """Return whether gradients can overflow: the run computes in fp16."""
    return "fp16" in (values.get(COMPUTE), values.get(AUTOCAST))


def _constant(values: Values) -> bool:
    """Return whether the loss is scaled by a constant."""
    return bool(values.get(LOSS_SCALE + "static"))


def _late(values: Values) -> bool:
    """Return whether the loss scale never doubles: the scale is constant, or the run has at most as
    many steps as have to pass before the scale first doubles.
    """
    steps, window = values.get("run.steps"), values.get(LOSS_SCALE + "window")
    return _constant(values) or bool(steps and window and steps <= window)


def _above(values: Values) -> bool:
    """Return whether the run has too few steps for the loss scale to fall to the minimum."""
    steps, initial = values.get("run.steps"), values.get(LOSS_SCALE + "initial")
    minimum = values.get(LOSS_SCALE + "minimum")
    if not (steps and initial and minimum):
        return False
    # Each overflow halves the scale, except that the first `hysteresis - 1` of them leave it.
    halvings = log2(initial / minimum)
    return bool(steps < halvings + (values.get(LOSS_SCALE + "hysteresis") or 1))


def _whole(values: Values) -> bool:
    """Return whether the run makes all of its steps before it would exit."""
    steps, every = values.get("run.steps"), values.get(EXIT)
    return not every or bool(steps and steps <= every)


def _positions_bound_nothing(values: Values) -> bool:
    """Return whether the number of positions bounds nothing that is computed: only learned positions
    have a table of that size, and only some scaled rotary positions depend on it.
    """
    is_learned = values.get("model.embedding.positions", "learned") == "learned"
    # transformers: modeling_rope_utils.py; these kinds scale by a factor and an earlier length alone.
    factor, whole = (values.get(f"model.rotary.scaling.{name}") for name in ("factor", "original"))
    kinds = {"none": True, "linear": factor, "llama3": factor and whole, "yarn": factor and whole}
    return not is_learned and bool(kinds.get(values.get("model.rotary.scaling.kind", "none")))


def _meets_no_padding(values: Values) -> bool:
    """Return whether the row of the padding token is the same with a gradient and without: no loss
    and no attention depends on what follows the last token of a sample, so the row matters only if
    the token also begins or ends documents, or if the output layer has this row, too.
    """
    token, ends = values.get(PADDING), values.get(ENDS)
    # A config without such a token says nothing of the data.
    if values.get("model.tied") is not False or not ends:
        return False
    return token == "none" or token not in (values.get(BEGIN), *ends)


def _factored(values: Values, which: str) -> bool:
    """Return whether the embedding or the output layer has a learning rate of its own."""
    return values.get(f"optimizer.{which}_lr") not in (None, 1)


def _is_one(path: str, values: Values) -> bool:
    """Return whether a factor leaves the learning rate as it is."""
    return bool(values.get(path) == 1)


def _splits_sequences(values: Values) -> bool:
    """Return whether several ranks share the tokens of a sequence."""
    tensor = values.get("parallel.tensor") if values.get("parallel.sequence") else 1
    return (tensor or 1) * (values.get("parallel.context") or 1) > 1


def _learned(values: Values) -> bool:
    return bool(values.get("model.embedding.positions", "learned") == "learned")


UNREACHED: Mapping[str, Callable[[Values], bool]] = {
    "model.embedding.max_positions": lambda values: _positions_bound_nothing(values),
    PADDING: _meets_no_padding,
    # They only say whether training meets the padding token.
    **dict.fromkeys((BEGIN, ENDS), lambda values: True),
    **{SCHEDULE + name: _level for name in ("minimum", "total_steps")},
    EXIT: _whole,
    SCHEDULE + "warmup_from": lambda values: values.get(SCHEDULE + "warmup_steps") == 0,
    **{LOSS_SCALE + name: _constant for name in ("initial", "hysteresis", "window", "minimum")},
    # A loss that is multiplied by 1 is not scaled, and outside fp16 that is all there is to it.
    LOSS_SCALE + "static": lambda values: (
        values.get(LOSS_SCALE + "static") == 1 and not _half(values)
    ),
    LOSS_SCALE + "late": _late,
    LOSS_SCALE + "final": lambda values: _constant(values) or _above(values),
    # Within a document, the distance of rotary positions is the same wherever they count from.
    HABITS + "positions": lambda values: (
        values.get(HABITS + "attention") == "document" and not _learned(values)
    ),
    HABITS + "inverse_sqrt": lambda values: (
        values.get(SCHEDULE + "name") != "inverse_sqrt"
        or values.get(SCHEDULE + "warmup_steps") not in (None, 0)
    ),
    # Without a schedule, or with one rate in all steps, each update has the same.
    HABITS + "first_lr_step": lambda values: (
        values.get(SCHEDULE + "name") in (None, "constant")
        and not values.get(SCHEDULE + "warmup_steps")
    ),
    **{path: partial(_is_one, path) for path in FACTORS},
    HABITS + "embedding_lr": lambda values: (
        not (_factored(values, "embedding") and _learned(values))
    ),
    HABITS + "output_lr": lambda values: not _factored(values, "output"),
    HABITS + "factored_minimum": lambda values: (
        not any(_factored(values, which) for which in PARTS)
        or values.get(SCHEDULE + "name") in (None, "constant")
        or values.get(SCHEDULE + "minimum") == 0
    ),
    HABITS + "factored_start": lambda values: (
        not any(_factored(values, which) for which in PARTS)
        or not values.get(SCHEDULE + "warmup_steps")
        or values.get(SCHEDULE + "warmup_from") == 0
    ),
    HABITS + "adapter_init": lambda values: not values.get(RANK),
    HABITS + "adapter_dropout": lambda values: (
        not (values.get(RANK) and values.get("adapters.dropout"))
    ),
    HABITS + "dropout_ranks": lambda values: (
        (values.get("parallel.data") or 1) == 1 or not any(map(values.get, DROPOUTS))
    ),
    HABITS + "clip_scope": lambda values: (
        not values.get("optimizer.clip")
        or all((values.get(f"parallel.{axis}") or 1) == 1 for axis in ("tensor", "pipeline"))
    ),
    HABITS + "overflow_steps": lambda values: not _half(values),
    HABITS + "router_losses": lambda values: (
        not values.get("model.experts") or not any(map(values.get, (AUX_LOSS, Z_LOSS)))
    ),
    HABITS + "balance_scope": lambda values: (
        not values.get("model.experts")
        or not values.get(AUX_LOSS)
        or values.get(AUX_TRAINED) is False
        or not _splits_sequences(values)
    ),
    HABITS + "mtp_loss": lambda values: not values.get(MODEL + "predicted"),
    HABITS + "muon_qkv": lambda values: "muon" not in (values.get("optimizer.name") or ""),
}
"""Fields that have no effect in some runs, each with the condition under which this holds."""
ALIKE = {HABITS + "clip_scope": "model", HABITS + "balance_scope": "sequence", PADDING: "none"}
"""Values that a field takes in a run in which all of its values are the same, because they are no
longer the same in other runs: on one rank, the norm of its gradients is that of the model, and a
balancing loss that of whole sequences; and a row without inputs has no gradient.
"""
