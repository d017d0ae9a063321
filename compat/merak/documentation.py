"""Contradictions between Merak's documentation and its source. Contradictions about defaults come
from the facts of the releases.
"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.files.shown import show_value
from bridge.stack.findings import Disagreement
from compat.merak.releases import DOCUMENTED, KNOWN, REWRITTEN, ULYSSES, release

PAGE = "docs/api_doc.md"
ORDER = "the values of init are in the order dp, tp, pp; README.md passes the values by position"

STATED: tuple[Disagreement, ...] = (
    *(
        Disagreement(
            f"init.{axis}",
            ORDER,
            "the code and every example have the order pp, tp, dp; pass the degrees by name",
            f"{PAGE}, README.md",
            "Merak/initialize.py: init",
        )
        for axis in ("pp", "tp", "dp")
    ),
    Disagreement(
        "args.sequence_parallel",
        "the switch works together with tensor parallelism, as in Megatron",
        "on main the switch is Ulysses attention over the ranks of init(sp=), only for Llama"
        " models",
        PAGE,
        "Merak/core/sequence_parallel, commit 856746c",
        since=ULYSSES,
    ),
    Disagreement(
        "args.no_load_rng",
        "the optimizer is not loaded",
        "the random state is not loaded",
        PAGE,
        "Merak/core/checkpoint",
    ),
    Disagreement(
        "args.loss_scale",
        "a value other than 0 makes the scale constant",
        "the scale is always dynamic",
        PAGE,
        "Merak/core/amp/amp_engine.py: dynamic_loss_scale=True",
        since=REWRITTEN,
    ),
    Disagreement(
        "args.hysteresis",
        "overflows that are tolerated",
        "no code reads the value; hysteresis is always 2",
        PAGE,
        "Merak/core/amp/amp_engine.py: dynamic_loss_args",
        since=REWRITTEN,
    ),
    Disagreement(
        "args.partition_method",
        "the methods are uniform, uniform_floor and parameters, and uniform cuts evenly",
        "there are also the methods custom and autopipe; with uniform, boundaries exceed the last"
        " shard unless the number of stages divides the number of shards",
        PAGE,
        "Merak/core/pipeline/module_utils.py: partition_uniform",
        since=REWRITTEN,
    ),
    Disagreement(
        "args.activation_checkpoint_ratio",
        "one number",
        "a list of values, one for the first stage or one for each stage",
        PAGE,
        "Merak/merak_args/args.py",
        since=REWRITTEN,
    ),
    Disagreement(
        "trainer.loss_fn",
        "a parameter of MerakTrainer",
        "MerakTrainer does not have this parameter: override get_loss_fn",
        PAGE,
        "Merak/merak_trainer.py",
        since=REWRITTEN,
    ),
    Disagreement(
        "tp_lists.col_para_list",
        "the function is Merak.set_tp_layer_lists",
        "the function is Merak.core.tensor_parallel.mp_attrs.set_tp_layer_lists",
        PAGE,
        "Merak/__init__.py",
        since=REWRITTEN,
    ),
)


def _defaults() -> Iterator[Disagreement]:
    """Yield a row for each documented default that differs from the default in the newest release's
    source.
    """
    at = release(KNOWN[-1])
    for path, value in at.documented.items():
        default = (
            show_value(at.defaults[path])
            if path in at.defaults
            else "the newest release does not have this argument"
        )
        code = "num_layers * 2 + 4" if path == "args.shard_count" else default
        if path not in at.defaults or at.defaults[path] != value:
            first = next(
                version for version, row in DOCUMENTED.items() if path in row and row[path] == value
            )
            fact = code if path not in at.defaults else f"the default is {code}"
            yield Disagreement(
                path,
                f"the default is {show_value(value)}",
                fact,
                PAGE,
                "Merak/merak_args/args.py",
                since=first,
            )


DISAGREEMENTS: tuple[Disagreement, ...] = (*STATED, *_defaults())
