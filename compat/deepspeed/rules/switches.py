"""Rules for settings of DeepSpeed's engine that exist in other stacks too: logs, autocast, context
parallelism.
"""

from __future__ import annotations

from bridge.stack.rules import EFFECTS, Effect, Group, Rule, convert
from bridge.stack.words import effect_if, on

WANDB, AUTOCAST = "wandb", "torch_autocast"
OFF: Group = {}


RULES: tuple[Rule, ...] = (
    convert(
        (f"{WANDB}.enabled", f"{WANDB}.project", f"{WANDB}.team"),
        ("run.project", "run.entity"),
        lambda values, context: (
            {
                "run.project": values.get(f"{WANDB}.project"),
                "run.entity": values.get(f"{WANDB}.team"),
            }
            if values.get(f"{WANDB}.enabled")
            else OFF
        ),
        lambda values, context: (
            {
                f"{WANDB}.enabled": True,
                f"{WANDB}.project": values.get("run.project"),
                f"{WANDB}.team": values.get("run.entity"),
            }
            if values.get("run.project") or values.get("run.entity")
            else OFF
        ),
        effect=EFFECTS["run.project"],
        carries={
            f"{WANDB}.enabled": "run.project",
            f"{WANDB}.project": "run.project",
            f"{WANDB}.team": "run.entity",
        },
        lossy="a project name is lost if logging to W&B is off",
        source="monitor/config.py: WandbConfig; monitor/wandb.py",
    ),
    convert(
        (f"{AUTOCAST}.enabled", f"{AUTOCAST}.dtype"),
        "precision.autocast",
        lambda values, context: (
            {"precision.autocast": values.get(f"{AUTOCAST}.dtype") or "bf16"}
            if values.get(f"{AUTOCAST}.enabled")
            else OFF
        ),
        lambda values, context: (
            {f"{AUTOCAST}.enabled": True, f"{AUTOCAST}.dtype": values["precision.autocast"]}
            if values.get("precision.autocast") in ("bf16", "fp16", "fp32")
            else OFF
        ),
        effect=effect_if(on(f"{AUTOCAST}.enabled"), Effect.NUMBERS),
        lossy="DeepSpeed's autocast supports only bf16, fp16 and fp32",
        source="runtime/torch_autocast.py: autocast_if_enabled; runtime/config.py: get_torch_autocast_dtype",
    ),
    convert(
        (),
        "parallel.context_method",
        # Ulysses, of the script or of the file, is the one method that DeepSpeed has.
        lambda values, context: (
            {"parallel.context_method": "a2a"}
            if (values.get("code.context_parallel") or 1) > 1
            or (values.get("sequence_parallel_size") or 1) > 1
            else OFF
        ),
        lambda values, context: OFF,
        effect=EFFECTS["parallel.context_method"],
        sees=("code.context_parallel", "sequence_parallel_size"),
        note="Ulysses uses an all-to-all, which exchanges heads for tokens",
        source="sequence/layer.py: DistributedAttention",
    ),
)
