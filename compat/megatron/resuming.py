"""How runs of Megatron-LM save checkpoints and resume from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from bridge.plan.section import Values
from bridge.stack.checkpoint_side import CheckpointSide, Saves
from bridge.stack.dialect import Config, Reading
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect, How
from compat.megatron.shards import FSDP

if TYPE_CHECKING:
    from bridge.checkpoint.hub import Hub

HALVES = {"bf16": "BF16", "fp16": "F16"}
"""The number format of weights in a checkpoint, by the argument that selects it."""
LOADS: Mapping[str, Any] = {
    "load": "checkpoint",
    "ckpt_format": "torch_dist",
    "exit_on_missing_checkpoint": True,
    "no_load_rng": True,
    "override_opt_param_scheduler": True,
}
"""Arguments with which Megatron-LM loads a checkpoint that we wrote. Such a checkpoint has no
random states, and the scheduler's state in it is only the number of samples seen.
"""
BESIDE_FSDP = ("data_parallel_sharding_strategy", "ckpt_format")
"""Arguments that a launch sets only together with FSDP."""
REPLACED = (
    "FSDP cannot load the written checkpoint; the distributed optimizer replaces FSDP, with "
    "the same numbers"
)
KEPT = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "group_query_attention",
    ),
    *(
        "kv_channels",
        "max_position_embeddings",
        "position_embedding_type",
        "add_position_embedding",
        "swiglu",
        "normalization",
    ),
    *(
        "vocab_size",
        "padded_vocab_size",
        "make_vocab_size_divisible_by",
        "tokenizer_type",
        "num_experts",
    ),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "global_batch_size", "seed"),
)
"""Arguments of the model and the layout that a written checkpoint holds.

Megatron-LM compares these arguments with those of its launch, and uses them to find the position in
the data (training/checkpointing.py: check_checkpoint_args, load_checkpoint).
"""
TOKENIZER = Finding(
    "tokenizer_type",
    "the tokenizer type is not known; if --vocab-file is given, Megatron-LM compares this type and stops: set"
    " --tokenizer-model instead",
    Effect.NONE,
    how=How.MISSING,
)
OUTSIDE = {"seq_length", "tokenizer_type", "tensor_model_parallel_size"}
"""Arguments that rules about a model look at, and that describe its run."""
WHOLE = 200
"""Megatron-LM saves all its arguments, which are more in every release."""
RUNNING: Mapping[str, Any] = {
    "micro_batch_size": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""Arguments of a run that are needed to read those of a model."""


class MegatronCheckpoints(CheckpointSide):
    """Distributed checkpoints, from which any number of ranks can resume."""

    loads: ClassVar[Mapping[str, Mapping[str, Any]]] = {"megatron": LOADS}
    native_parameters = "neutral"
    scheduled = ("lr", "weight_decay")

    def config_of_record(self, hub: Hub) -> Config | None:
        """Return the config of the arguments that Megatron-LM saved, of those that rules call facts about
        the model.
        """
        # Checkpoints need torch, which a config is read without.
        from compat.megatron.checkpoint.run import run_state

        args = run_state(hub).get("args")
        # What a conversion did not know to write is no default of the run.
        if not isinstance(args, Mapping) or not args.get("num_layers") or len(args) < WHOLE:
            return None
        facts = {
            path
            for rule in self.dialect.rules
            if any(path.startswith("model.") for path in rule.ours)
            for path in (*rule.theirs, *rule.sees)
        }
        values = {
            path: value
            for path, value in args.items()
            if path in facts - OUTSIDE and value is not None
        }
        settings = Values({**values, **RUNNING})
        return self.dialect.check_reading(
            lambda: Reading(settings, "flags"), self.dialect.newest, None
        )

    def saves(self, config: Config, hub: Hub) -> Saves:
        """Save as torch_dist, which loads on any ranks.

        FSDP cannot load this format, so the distributed optimizer replaces FSDP.
        """
        values = config.effective
        dtype = next((code for name, code in HALVES.items() if values.get(name)), "F32")
        # A derived switch is no loss: only a given one is named as replaced.
        fsdp = [name for name in FSDP if values.get(name) and config.given.get(name) is not None]
        level = int(bool(fsdp or values.get("use_distributed_optimizer")))
        instead = (
            {**dict.fromkeys((*fsdp, *BESIDE_FSDP)), "use_distributed_optimizer": True}
            if fsdp
            else {}
        )
        client = {
            "megatron": {
                "args": {name: values[name] for name in KEPT if values.get(name) is not None}
            }
        }
        tokens = (
            [TOKENIZER]
            if values.get("tokenizer_type") is None and not hub.client.get("megatron")
            else []
        )
        replacements = [
            Finding(name, REPLACED, Effect.COST, how=How.DROPPED, before=True) for name in fsdp
        ]
        findings = (*replacements, *tokens)
        return Saves(
            "megatron",
            level,
            dtype=dtype,
            samples=True,
            client=client,
            instead=instead,
            findings=findings,
        )

    def parameter_names(self, config: Config) -> str:
        """Return the table of parameter names. It differs by spec: Transformer Engine's layers keep
        norms inside the linear layers.
        """
        return (
            "megatron-local" if config.effective.get("transformer_impl") == "local" else "megatron"
        )


SIDE = MegatronCheckpoints
