"""Checks and derivations for the modules that CUDA graphs capture. Since 0.18, the parser and the
config class have them in common.
"""

from __future__ import annotations

from typing import Any

from compat.megatron.arguments.namespace import Namespace, Step, member_name
from compat.megatron.arguments.steps import check, compute_argument, derive

PLACE = "transformer/cuda_graph_config.py: normalize_cuda_graph_modules"
MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
"""Members of CudaGraphModule (transformer/enums.py)."""
SCOPES = {
    "none": ("none",),
    "local": ("layer", "block"),
    "transformer_engine": ("none",),
    "full_iteration": ("none",),
}
"""Scopes of inference graphs that each implementation allows (ALLOWED_INFERENCE_SCOPES)."""
MOVED = {"full_iteration": (None, "none"), "full_iteration_inference": (None, "block")}
"""Former module names. Each may only be combined with one of the given values of
`inference_cuda_graph_scope`, where None means that this argument is not set.
"""


def module_names(a: Namespace) -> list[str]:
    """Return the names of the modules in `cuda_graph_modules`, which may be a list, a text with
    commas, or one member of the enumeration.
    """
    modules: Any = a.cuda_graph_modules
    if isinstance(modules, str):
        modules = modules.split(",") if modules else ()
    elif not isinstance(modules, list | tuple | None):
        modules = (modules,)
    return [member_name(module) for module in modules or ()]


def _modules_to_move(a: Namespace) -> list[str]:
    return [module for module in module_names(a) if module in MOVED]


def _has_other_modules(a: Namespace) -> bool:
    modules, scope = _modules_to_move(a), a.inference_cuda_graph_scope
    if not modules:
        return False
    impls = ("none", "local") + (("full_iteration",) if modules[0] == "full_iteration" else ())
    if len(set(modules)) > 1 or a.cuda_graph_impl not in impls:
        return True
    return (member_name(scope) if scope else scope) not in MOVED[modules[0]]


def _settle(a: Namespace) -> None:
    for module in _modules_to_move(a):
        if module == "full_iteration":
            a.cuda_graph_impl = "full_iteration"
        elif a.cuda_graph_impl != "none":
            a.inference_cuda_graph_scope = "block"
        # With cuda_graph_impl none, upstream only warns that full_iteration_inference has no
        # effect.
    # An empty list of modules means whole layers, and so does `full`.
    a.cuda_graph_modules = [module for module in module_names(a) if module not in (*MOVED, "full")]


MODULE_STEPS: tuple[Step, ...] = (
    check(
        PLACE,
        lambda a: "full" in module_names(a) and len(module_names(a)) > 1,
        "cuda_graph_modules: found full beside other modules; drop the others",
        since="0.18.0",
        name="found-full-beside-others-drop",
    ),
    check(
        PLACE,
        lambda a: not {*module_names(a)} <= {*MODULES, *MOVED, "full"},
        "cuda_graph_modules: found {cuda_graph_modules}; expected names among "
        + ", ".join(MODULES),
        since="0.18.0",
    ),
    check(
        PLACE,
        _has_other_modules,
        "cuda_graph_modules: found {cuda_graph_modules} with cuda_graph_impl {cuda_graph_impl} and"
        " inference_cuda_graph_scope {inference_cuda_graph_scope}; set only the latter two",
        since="0.18.0",
        last=True,
    ),
    derive(PLACE, _settle, since="0.18.0"),
    derive(
        PLACE,
        compute_argument(
            "inference_cuda_graph_scope",
            lambda a: member_name(
                a.inference_cuda_graph_scope
                or ("layer" if a.cuda_graph_impl == "local" else "none")
            ),
        ),
        since="0.18.0",
    ),
    check(
        PLACE,
        lambda a: (
            member_name(a.inference_cuda_graph_scope) not in SCOPES.get(a.cuda_graph_impl, ())
        ),
        "inference_cuda_graph_scope: found {inference_cuda_graph_scope}, which cuda_graph_impl"
        " {cuda_graph_impl} does not allow; leave it out",
        since="0.18.0",
    ),
)
