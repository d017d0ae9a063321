"""Contradictions between AutoModel's docstrings and its code."""

from __future__ import annotations

from bridge.stack.findings import Disagreement

DOCSTRING = "docstring of PipelineConfig"
FUNCTIONAL = "nemo_automodel/components/distributed/pipelining/functional.py"
RECIPE = "nemo_automodel/recipes/llm/train_ft.py"
P = "distributed.pipeline."

DISAGREEMENTS: tuple[Disagreement, ...] = (
    Disagreement(
        P + "pp_schedule",
        "interleaved_1f1b, looped_bfs, dfs, v_schedule and zero_bubble are names of schedules",
        "torch refuses all five names; it accepts 1F1B, Interleaved1F1B, GPipe, LoopedBFS,"
        " InterleavedZeroBubble, ZBVZeroBubble and DualPipeV, in any case of letters",
        DOCSTRING,
        "torch.distributed.pipelining.schedules: get_schedule_class",
    ),
    Disagreement(
        P + "pp_schedule_csv",
        "pp_schedule_csv overrides pp_schedule",
        "pp_schedule decides which stages each rank has, and AutoModel refuses pp_schedule none",
        DOCSTRING,
        FUNCTIONAL,
    ),
    Disagreement(
        P + "pp_batch_size",
        "the setting is the total batch of a pipeline stage",
        "recipes overwrite this setting with step_scheduler.local_batch_size",
        DOCSTRING,
        RECIPE,
    ),
    Disagreement(
        P + "layers_per_stage",
        "the setting is the number of layers in a pipeline stage",
        "AutoModel computes the number of virtual stages from this setting, and then spreads the"
        " layers evenly over the stages",
        DOCSTRING,
        f"{FUNCTIONAL}: calculate_virtual_stages",
    ),
    Disagreement(
        P + "module_fqns_per_model_part",
        "the setting overrides the automatic split",
        "AutoModel still computes the automatic split, which may fail; AutoModel does not check that"
        " each module is named exactly once",
        DOCSTRING,
        FUNCTIONAL,
    ),
    Disagreement(
        P + "patch_stage_backward_maybe_with_nosync",
        "the setting is a switch of the pipeline config",
        "recipes overwrite this switch with model.backend.enable_fsdp_optimizations",
        DOCSTRING,
        RECIPE,
    ),
    Disagreement(
        P + "dtype",
        "the default is the model's own format",
        "the default is output_dtype of the mixed-precision policy, or param_dtype if the policy"
        " has no output_dtype",
        DOCSTRING,
        RECIPE,
    ),
    Disagreement(
        P + "loss_fn",
        "the loss is a setting of the pipeline config",
        "recipes replace this loss by the loss of the section loss_fn",
        DOCSTRING,
        RECIPE,
    ),
)
