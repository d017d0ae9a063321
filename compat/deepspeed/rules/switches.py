"""Rules for settings of DeepSpeed's engine that exist in other stacks too: logs, autocast, context
parallelism.
"""

from __future__ import annotations

from bridge.stack.rules import EFFECTS, Effect, Rule, convert, nothing
from bridge.stack.words import above, among, effect_if, give, of, on, some

WANDB, AUTOCAST = "wandb", "torch_autocast"


RULES: tuple[Rule, ...] = (
    convert(
        (f"{WANDB}.enabled", f"{WANDB}.project", f"{WANDB}.team"),
        ("run.project", "run.entity"),
        give(
            {"run.project": of(f"{WANDB}.project"), "run.entity": of(f"{WANDB}.team")},
            when=on(f"{WANDB}.enabled"),
        ),
        give(
            {
                f"{WANDB}.enabled": True,
                f"{WANDB}.project": of("run.project"),
                f"{WANDB}.team": of("run.entity"),
            },
            when=some(on("run.project"), on("run.entity")),
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
        give("precision.autocast", of(f"{AUTOCAST}.dtype", "bf16"), on(f"{AUTOCAST}.enabled")),
        give(
            {f"{AUTOCAST}.enabled": True, f"{AUTOCAST}.dtype": of("precision.autocast")},
            when=among("precision.autocast", "bf16", "fp16", "fp32"),
        ),
        effect=effect_if(on(f"{AUTOCAST}.enabled"), Effect.NUMBERS),
        lossy="DeepSpeed's autocast supports only bf16, fp16 and fp32",
        source="runtime/torch_autocast.py: autocast_if_enabled; runtime/config.py: get_torch_autocast_dtype",
    ),
    convert(
        (),
        "parallel.context_method",
        # Ulysses, of the script or of the file, is the one method that DeepSpeed has.
        give(
            "parallel.context_method",
            "a2a",
            some(above("code.context_parallel"), above("sequence_parallel_size")),
        ),
        nothing,
        effect=EFFECTS["parallel.context_method"],
        sees=("code.context_parallel", "sequence_parallel_size"),
        note="Ulysses uses an all-to-all, which exchanges heads for tokens",
        source="sequence/layer.py: DistributedAttention",
    ),
)
