"""Files of programs that no dialect reads, recognised by the keys of these programs, with what to give instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ForeignKind:
    """A kind of file: `needed` are keys that all such files have, of `usual` they have at least `least`.

    A key is dotted, and begins at the top level. `source` is the place in the program's code that
    reads the keys. `advice` says what to give instead.
    """

    title: str
    source: str
    needed: frozenset[str] = frozenset()
    usual: frozenset[str] = frozenset()
    least: int = 0
    advice: str = "give the config or the launch script that the program runs with"

    def fits(self, data: Mapping[Any, Any]) -> bool:
        """Return whether a file is of this kind."""
        count = sum(_value(data, key) is not None for key in self.usual)
        return all(_value(data, key) is not None for key in self.needed) and count >= self.least

    @property
    def sentence(self) -> str:
        """The sentence about a file of this kind."""
        return f"{self.title}, which stagebridge does not read; {self.advice}"


def _value(data: Any, key: str) -> Any:
    """Return the value of a dotted key; False stands for a key without a value, None for no key."""
    for name in key.split("."):
        if not isinstance(data, Mapping) or name not in data:
            return None
        data = data[name]
    return False if data is None else data


def _kind(
    title: str, source: str, needs: str, usual: str = "", least: int = 0, **more: str
) -> ForeignKind:
    return ForeignKind(
        title, source, frozenset(needs.split()), frozenset(usual.split()), least, **more
    )


NEOX = (
    "give the script that starts deepy.py with all files of the run, as one part sets up no model"
)
KINDS: tuple[ForeignKind, ...] = (
    _kind(
        "a config of GPT-NeoX",
        "EleutherAI/gpt-neox: megatron/neox_arguments/neox_args.py",
        "pipe_parallel_size",
        advice=NEOX,
    ),
    _kind(
        "a config of GPT-NeoX",
        "EleutherAI/gpt-neox: megatron/neox_arguments/neox_args.py",
        "",
        "pipe-parallel-size model-parallel-size data-path train-iters lr-decay-style no-weight-tying vocab-file "
        "merge-file data-impl pos-emb attention-config checkpoint-activations model_parallel_size data_path "
        "train_data_paths train_iters lr_decay_style no_weight_tying vocab_file merge_file data_impl pos_emb "
        "attention_config checkpoint_activations partition_activations synchronize_each_layer steps_per_print",
        4,
        advice=NEOX,
    ),
    _kind(
        "arguments of LLaMA-Factory",
        "hiyouga/LLaMA-Factory: src/llamafactory/hparams",
        "",
        "finetuning_type cutoff_len template plot_loss dataset_dir quantization_bit stage infer_backend",
        2,
        advice="give the file or the script of a training",
    ),
    _kind(
        "a config of torchtune",
        "pytorch/torchtune: torchtune/config/_instantiate.py",
        "",
        "model._component_ tokenizer._component_ checkpointer._component_ optimizer._component_ "
        "dataset._component_ loss._component_ metric_logger._component_",
        2,
    ),
    _kind(
        "a config of OLMo",
        "allenai/OLMo: olmo/config.py (TrainConfig)",
        "model max_duration device_train_microbatch_size",
        "save_interval_unsharded save_num_unsharded_checkpoints_to_keep evaluators data.paths",
        1,
    ),
    _kind(
        "a config of Composer (llm-foundry)",
        "mosaicml/llm-foundry: llmfoundry/utils/config_utils.py (TrainConfig)",
        "model max_duration",
        "global_train_batch_size device_train_microbatch_size train_loader fsdp_config max_seq_len "
        "device_eval_batch_size",
        2,
    ),
    _kind(
        "a config of torchtitan",
        "pytorch/torchtitan: torchtitan/config/job_config.py",
        "job training",
        "model optimizer metrics parallelism profiling checkpoint lr_scheduler comm activation_checkpoint",
        1,
    ),
    _kind(
        "a config of torchtitan",
        "pytorch/torchtitan: torchtitan/config/job_config.py",
        "training",
        "model.flavor job parallelism metrics.log_freq activation_checkpoint experimental float8 lr_scheduler "
        "training.local_batch_size training.seq_len parallelism.tensor_parallel_degree",
        2,
    ),
    _kind(
        "a config of nanotron",
        "huggingface/nanotron: src/nanotron/config/config.py",
        "parallelism tokens",
        "general data_stages checkpoints logging",
        2,
    ),
    _kind(
        "a config of verl",
        "volcengine/verl: verl/trainer/config",
        "",
        "actor_rollout_ref algorithm.adv_estimator data.train_files trainer.project_name ray_kwargs "
        "trainer.n_gpus_per_node trainer.nnodes reward_model critic",
        2,
    ),
    _kind("a config of NeMo", "NVIDIA/NeMo: nemo/utils/exp_manager.py", "trainer exp_manager"),
    _kind(
        "the metadata of a Python project", "packaging.python.org: pyproject.toml", "build-system"
    ),
    _kind("a manifest of Kubernetes", "kubernetes.io: objects", "apiVersion kind metadata"),
)
"""Kinds of files that people give to stagebridge, the more special before the more general."""


def foreign(data: Any) -> str:
    """Return a sentence on a file of a program that no dialect reads, with what to give instead; empty for other files."""
    if not isinstance(data, Mapping):
        return ""
    return next((kind.sentence for kind in KINDS if kind.fits(data)), "")
