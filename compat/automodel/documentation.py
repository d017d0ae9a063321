"""Contradictions between AutoModel's docstrings and its code."""

from __future__ import annotations

from bridge.findings import Disagreement

DOCSTRING = "docstring of PipelineConfig"
FUNCTIONAL = "nemo_automodel/components/distributed/pipelining/functional.py"
RECIPE = "nemo_automodel/recipes/llm/train_ft.py"
P = "distributed.pipeline."

DISAGREEMENTS: tuple[Disagreement, ...] = (
    Disagreement(
        P + "pp_schedule",
        "interleaved_1f1b, looped_bfs, dfs, v_schedule and zero_bubble are names of schedules",
        "torch refuses all five; it takes 1F1B, Interleaved1F1B, GPipe, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble and "
        "DualPipeV, in any case of letters",
        DOCSTRING,
        "torch.distributed.pipelining.schedules: get_schedule_class",
    ),
    Disagreement(
        P + "pp_schedule_csv",
        "it overrides pp_schedule",
        "pp_schedule still decides how many stages a rank has and where they lie, and may not be none",
        DOCSTRING,
        FUNCTIONAL,
    ),
    Disagreement(
        P + "pp_batch_size",
        "the total batch of a pipeline stage",
        "recipes overwrite it with step_scheduler.local_batch_size",
        DOCSTRING,
        RECIPE,
    ),
    Disagreement(
        P + "layers_per_stage",
        "layers in a pipeline stage",
        "layers wanted in a virtual stage: it sets the number of virtual stages, over which layers are then spread evenly",
        DOCSTRING,
        f"{FUNCTIONAL}: calculate_virtual_stages",
    ),
    Disagreement(
        P + "module_fqns_per_model_part",
        "it overrides the automatic split",
        "the automatic split is still computed, and may fail; nothing checks that every module is named exactly once",
        DOCSTRING,
        FUNCTIONAL,
    ),
    Disagreement(
        P + "patch_stage_backward_maybe_with_nosync",
        "a switch of the pipeline config",
        "recipes overwrite it with model.backend.enable_fsdp_optimizations",
        DOCSTRING,
        RECIPE,
    ),
    Disagreement(
        P + "dtype",
        "unset, the model's own format is taken",
        "unset, the output format of the mixed-precision policy is taken, else that of its parameters",
        DOCSTRING,
        RECIPE,
    ),
    Disagreement(
        P + "loss_fn",
        "a setting of the pipeline config",
        "recipes put the loss of the loss_fn section here",
        DOCSTRING,
        RECIPE,
    ),
)
