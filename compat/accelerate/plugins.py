"""What `Accelerator()` makes of its environment: its own settings, and those of its plugins.

The functions follow accelerate/accelerator.py (Accelerator.__init__), state.py (PartialState, AcceleratorState),
utils/dataclasses.py (the plugins) and parallelism_config.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from bridge.stack.sources import Said, Settled
from compat.accelerate.launcher import Machine
from compat.accelerate.slots import Refusal, Run, Slot, default, facts, is_true, one_of, since

Environment = Mapping[str, Slot]
Parse = Callable[[Any], Any]
HALF = {"fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}
"""The format of FSDP's parameters and gradients for each precision."""
MEGATRON: tuple[tuple[str, str, Parse, Any], ...] = (
    ("tensor_model_parallel_size", "TP_DEGREE", int, 1),
    ("pipeline_model_parallel_size", "PP_DEGREE", int, 1),
    ("use_custom_fsdp", "USE_CUSTOM_FSDP", is_true, False),
    ("no_load_optim", "NO_LOAD_OPTIM", is_true, False),
    ("eod_mask_loss", "EOD_MASK_LOSS", is_true, False),
    ("no_save_optim", "NO_SAVE_OPTIM", is_true, False),
    ("optimizer_cpu_offload", "OPTIMIZER_CPU_OFFLOAD", is_true, False),
    ("overlap_cpu_optimizer_d2h_h2d", "OVERLAP_CPU_OPTIMIZER_D2H_H2D", is_true, False),
    ("use_precision_aware_optimizer", "USE_PRECISION_AWARE_OPTIMIZER", is_true, False),
    ("decoder_last_pipeline_num_layers", "DECODER_LAST_PIPELINE_NUM_LAYERS", int, None),
    ("num_micro_batches", "NUM_MICRO_BATCHES", int, 1),
    ("clip_grad", "GRADIENT_CLIPPING", float, 1.0),
    ("recompute_activations", "RECOMPUTE_ACTIVATIONS", is_true, False),
    ("use_distributed_optimizer", "USE_DISTRIBUTED_OPTIMIZER", is_true, False),
    ("sequence_parallel", "SEQUENCE_PARALLELISM", is_true, False),
    ("recompute_granularity", "RECOMPUTE_GRANULARITY", str, "full"),
    ("recompute_method", "RECOMPUTE_METHOD", str, "uniform"),
    ("recompute_num_layers", "RECOMPUTE_NUM_LAYERS", int, 1),
    ("attention_backend", "ATTENTION_BACKEND", is_true, True),
    ("expert_model_parallel_size", "EXPERT_MODEL_PARALLEL_SIZE", int, 1),
    ("context_parallel_size", "CONTEXT_PARALLEL_SIZE", int, 2),
    ("attention_dropout", "ATTENTION_DROPOUT", float, 0.0),
    ("hidden_dropout", "HIDDEN_DROPOUT", float, 0.0),
    ("attention_softmax_in_fp32", "ATTENTION_SOFTMAX_IN_FP32", is_true, True),
    ("expert_tensor_parallel_size", "EXPERT_TENSOR_PARALLEL_SIZE", int, 1),
    ("calculate_per_token_loss", "CALCULATE_PER_TOKEN_LOSS", is_true, True),
    ("use_rotary_position_embeddings", "USE_ROTARY_POSITION_EMBEDDINGS", is_true, True),
)
"""Settings of the plugin for Megatron-LM: name, variable, type and default."""
USES = "ACCELERATE_USE_"
OLD_MEGATRON = "stagebridge knows runs of Megatron-LM since accelerate 1.13.0 alone"
KINDS = ("DEEPSPEED", "FSDP", "MEGATRON_LM")
AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
BUILTIN = ("flash_attention_2", "flash_attention_3", "sdpa")


def _is_word_true(text: str) -> bool:
    return text.lower() == "true"


def _read_steps(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _read_norm(text: str) -> float | str:
    return text if text == "auto" else float(text)


ZERO, OWN = "zero_optimization.", "ACCELERATE_DEEPSPEED_"
SAVES = "stage3_gather_16bit_weights_on_model_save"
KEYS: Mapping[str, tuple[str, str, Parse, Any]] = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", _read_steps, "auto"),
    "gradient_clipping": ("gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", _read_norm, "auto"),
    "zero_stage": (f"{ZERO}stage", f"{OWN}ZERO_STAGE", int, 2),
    "offload_optimizer_device": (f"{ZERO}offload_optimizer.device", f"{OWN}OFFLOAD_OPTIMIZER_DEVICE", str, "none"),
    "offload_param_device": (f"{ZERO}offload_param.device", f"{OWN}OFFLOAD_PARAM_DEVICE", str, "none"),
    "offload_param_nvme_path": (f"{ZERO}offload_param.nvme_path", f"{OWN}OFFLOAD_PARAM_NVME_PATH", str, "none"),
    "offload_optimizer_nvme_path": (f"{ZERO}offload_optimizer.nvme_path", f"{OWN}OFFLOAD_OPTIMIZER_NVME_PATH", str, "none"),
    "zero3_save_16bit_model": (ZERO + SAVES, f"{OWN}ZERO3_SAVE_16BIT_MODEL", _is_word_true, False),
}  # fmt: skip
"""Settings of the plugin for DeepSpeed: DeepSpeed's key, variable, type and default."""
CLIPS = "accelerate replaces auto by 1.0 (accelerator.py: _prepare_deepspeed); write 0.0 for no clipping"


class Plugins:
    """Follows `Accelerator()` in the environment of a script."""

    def __init__(
        self, env: Environment, has_ranks: bool, machine: Machine, run: Run, file: Any = None
    ) -> None:
        self.env, self.ranked, self.machine, self.run, self.file = (
            env,
            has_ranks,
            machine,
            run,
            file,
        )
        self.outer = run

    def slot(self, name: str, usual: Any) -> Slot:
        """The variable's slot; accelerate's default, where nobody sets it."""
        return self.env.get(name) or Slot(usual, default(name, usual))

    def peek(self, name: str, usual: str = "false") -> str:
        """The variable's text, which decides something and is no setting itself."""
        slot = self.slot(name, usual)
        self.run.hear(slot.said)
        return str(slot.value)

    def settle(self, name: str, variable: str, parse: Parse, usual: Any, why: str = "") -> Any:
        """Record the setting that a variable gives. A default needs no parsing."""
        if variable not in self.env:
            self.run.add(name, usual, default(variable, usual), why)
            return usual
        return self.run.settle(name, self.env[variable], parse, why)

    def build(self) -> None:
        """Record every setting in force; raises `Refusal` where accelerate refuses the run."""
        self._settle_dynamo()
        uses = {one: str(self.slot(USES + one, "").value).lower() == "true" for one in KINDS}
        deepspeed = self._build(self._settle_deepspeed) if uses["DEEPSPEED"] else None
        fsdp = self._build(self._settle_fsdp) if uses["FSDP"] else None
        megatron = self._build(self._settle_megatron) if uses["MEGATRON_LM"] else None
        shares = self.peek(USES + "PARALLELISM_CONFIG").lower() == "true"
        sizes = self._settle_parallelism() if shares else None
        cpu = self.settle("cpu", "ACCELERATE_USE_CPU", is_true, False)
        self.settle("debug", "ACCELERATE_DEBUG_MODE", is_true, False)
        kind = self._find_type(cpu, uses)
        chosen = {"DEEPSPEED": deepspeed, "FSDP": fsdp, "MEGATRON_LM": megatron}.get(kind)
        if kind == "FSDP" and sizes and sizes["cp"] > 1 and fsdp and fsdp[0]["fsdp_version"] == 1:
            raise Refusal("cp_size above 1 needs FSDP 2", self.slot("FSDP_VERSION", 1).said)
        if kind == "MULTI_GPU" and sizes and sizes["cp"] > 1:
            raise Refusal("cp_size above 1 needs FSDP 2")
        self._settle_type(kind)
        self._settle_precision(kind, chosen)
        world = self._settle_world(kind)
        if chosen is not None:
            self.run.settings += chosen[1].settings
            self.run.heard |= chosen[1].heard
        if sizes is not None:
            self._check_sizes(
                sizes, kind, world, fsdp[0]["fsdp_version"] if kind == "FSDP" and fsdp else 0
            )
        steps = self.slot("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1)
        if kind == "DEEPSPEED":  # whose plugin has said who wins
            steps = Slot(steps.value, steps.said)
        self.run.settle("gradient_accumulation_steps", steps, int)
        for name, variable, parse in (("device_ids", "CUDA_VISIBLE_DEVICES", str), ("omp_num_threads", "OMP_NUM_THREADS", str),
                                      ("cpu_affinity", "ACCELERATE_CPU_AFFINITY", str)):  # fmt: skip
            self.settle(name, variable, parse, None)
        for variable, slot in self.env.items():
            # The launcher writes over what the shell says, also where nothing reads it then.
            losers = [
                statement
                for statement in slot.lost
                if statement.setting == variable and variable.isupper()
            ]
            is_heard = any((variable, statement.source) in self.run.heard for statement in losers)
            if losers and not is_heard and str(losers[0].value).lower() != str(slot.value).lower():
                self.run.settle(variable, Slot(slot.value, slot.said, tuple(losers)))

    def _build(self, function: Callable[[Run], dict[str, Any]]) -> tuple[dict[str, Any], Run]:
        """Return the values of a plugin, and its own record, which counts only if the run uses the plugin."""
        record = Run()
        before, self.run = self.run, record
        self.outer = before
        try:
            return function(record), record
        finally:
            self.run = before

    def _settle_dynamo(self) -> None:
        prefix = "ACCELERATE_DYNAMO_"
        self.settle("dynamo_backend", prefix + "BACKEND", _read_backend, "NO")
        self.settle("dynamo.mode", prefix + "MODE", str, "default")
        self.settle("dynamo.fullgraph", prefix + "USE_FULLGRAPH", is_true, False)
        self.settle(
            "dynamo.use_regional_compilation", prefix + "USE_REGIONAL_COMPILATION", is_true, False
        )
        usual = None if since("1.15.0") else False
        self.settle("dynamo.dynamic", prefix + "USE_DYNAMIC", is_true, usual)

    def _settle_fsdp(self, run: Run) -> dict[str, Any]:
        """Return the values of FullyShardedDataParallelPlugin."""
        values: dict[str, Any] = {}

        def settle(name: str, parse: Parse, usual: Any, variable: str = "") -> Any:
            values[name] = self.settle(
                f"fsdp.{name}", f"FSDP_{variable or name.upper()}", parse, usual
            )
            return values[name]

        def drop(name: str) -> None:
            values[name] = None
            run.add(f"fsdp.{name}", None)

        if "fsdp_version" in {row["name"] for row in facts()["options"]}:
            version = settle("fsdp_version", int, 1, "VERSION")
        else:  # a release without FSDP 2 asks nobody
            version = values["fsdp_version"] = 1
        if version not in (1, 2):
            raise Refusal(f"found {version}, expected 1 or 2", self.slot("FSDP_VERSION", 1).said)
        first = version == 1
        names = [*facts()["strategies"][:4], "_HYBRID_SHARD_ZERO2"]
        if first:
            settle(
                "sharding_strategy",
                lambda text: names[
                    facts()["strategies"].index(
                        one_of(facts()["strategies"], text.removeprefix("_"))
                    )
                ],
                "FULL_SHARD",
            )
            drop("reshard_after_forward")
        else:
            drop("sharding_strategy")
            settle("reshard_after_forward", is_true, True)
        settle("cpu_offload", is_true, False, "OFFLOAD_PARAMS")
        prefetch = self.slot("FSDP_BACKWARD_PREFETCH", None)
        if prefetch.value is not None:
            _parsed_text(prefetch, lambda text: one_of(facts()["prefetches"], text), None)
        if first:
            settle(
                "backward_prefetch",
                lambda text: (
                    None if (one := one_of(facts()["prefetches"], text)) == "NO_PREFETCH" else one
                ),
                None,
            )
        else:
            drop("backward_prefetch")
        states = facts()["state_dicts"]
        state = settle(
            "state_dict_type", lambda text: one_of(states, text), states[0 if first else 2]
        )
        if not first and (state == states[1] or (state != states[2] and not since("1.7.0"))):
            raise Refusal(
                f"FSDP 2 has no {state} in this release; use {states[2]}",
                self.slot("FSDP_STATE_DICT_TYPE", "").said,
            )
        policy = settle("auto_wrap_policy", _read_policy, None)
        for own, variable, parse, kind, usual in (
            (
                "transformer_cls_names_to_wrap",
                "TRANSFORMER_CLS_TO_WRAP",
                lambda text: text.split(","),
                "transformer",
                None,
            ),
            ("min_num_params", "", int, "size", 0),
        ):
            settle(
                own, parse, usual, variable
            ) if policy == f"{kind}_{'' if kind != 'size' else 'based_'}auto_wrap_policy" else drop(
                own
            )
        for own in ("use_orig_params", "sync_module_states", "forward_prefetch"):
            settle(own, is_true, False) if first else drop(own)
        checkpoints = settle("activation_checkpointing", is_true, False)
        offloads = settle("activation_checkpointing_offload", is_true, False)
        statement = self.slot("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "").said
        if offloads and not checkpoints:
            raise Refusal(
                "activation_checkpointing_offload needs activation_checkpointing", statement
            )
        if offloads and first:
            raise Refusal("activation_checkpointing_offload needs fsdp_version 2", statement)
        settle("ignored_modules", str, None)
        ram = settle("cpu_ram_efficient_loading", is_true, False)
        if first and ram and not values["sync_module_states"]:
            values["sync_module_states"] = True
            run.settings = [one for one in run.settings if one.setting != "fsdp.sync_module_states"]
            run.add(
                "fsdp.sync_module_states",
                True,
                self.slot("FSDP_CPU_RAM_EFFICIENT_LOADING", "").said,
            )
        if values["sync_module_states"] and self.machine.gpus == 0:
            raise Refusal("FSDP 1 needs a GPU for sync_module_states, and the machine has none")
        sync = self.slot("FSDP_SYNC_MODULE_STATES", None).said
        if first and ram and not isinstance(sync.value, bool):
            # Any text passes the launcher's check, and the plugin then switches it on.
            run.heard.discard((sync.setting, sync.source))
        if self.machine.gpus == 0:  # version 1 would stop here
            self.outer.hear(self.slot("FSDP_VERSION", 1).said)
        if not first:
            self.outer.hear(self.slot("FSDP_RESHARD_AFTER_FORWARD", True).said)
        return values

    def _settle_megatron(self, run: Run) -> dict[str, Any]:
        """Return the values of MegatronLMPlugin."""
        if not since("1.13.0"):
            raise Refusal(OLD_MEGATRON, self.slot(f"{USES}MEGATRON_LM", "").said)
        values = {
            name: self.settle(f"megatron_lm.{name}", f"MEGATRON_LM_{variable}", parse, usual)
            for name, variable, parse, usual in MEGATRON
        }
        local = values["pipeline_model_parallel_size"] > 1 or values["use_distributed_optimizer"]
        run.add("megatron_lm.DDP_impl", "local" if local else "torch")
        return values

    def _settle_parallelism(self) -> dict[str, int]:
        """Return the sizes of ParallelismConfig."""
        prefix, sizes = "PARALLELISM_CONFIG_", dict[str, int]()
        for axis in AXES:
            sizes[axis] = self.settle(
                f"parallelism.{axis}_size", f"{prefix}{axis.upper()}_SIZE", int, 1
            )
        for axis, backends in (("cp", ("torch",)), ("sp", ("deepspeed",))):
            backend = self.settle(
                f"parallelism.{axis}_backend", f"{prefix}{axis.upper()}_BACKEND", str, backends[0]
            )
            if backend not in backends:
                raise Refusal(
                    f"found {backend}, expected {backends[0]}",
                    self.slot(f"{prefix}{axis.upper()}_BACKEND", "").said,
                )
        if sizes["cp"] > 1:
            self.settle(
                "parallelism.cp_comm_strategy",
                f"{prefix}CP_COMM_STRATEGY",
                _read_strategy,
                "allgather",
            )
        if sizes["sp"] > 1:
            varies = self.peek(prefix + "SP_SEQ_LENGTH_IS_VARIABLE", "true").lower() == "true"
            if not varies:
                self.settle(
                    "parallelism.sp_seq_length",
                    prefix + "SP_SEQ_LENGTH",
                    lambda text: None if text == "None" else int(text),
                    None,
                )
            self.settle(
                "parallelism.sp_attn_implementation",
                prefix + "SP_ATTN_IMPLEMENTATION",
                _read_attention,
                None,
            )
        for axis, size in sizes.items():
            if size < 1:
                raise Refusal(
                    f"found {size}, expected 1 or more",
                    self.slot(f"{prefix}{axis.upper()}_SIZE", 1).said,
                )
        if sizes["cp"] > 1 and sizes["sp"] > 1:
            raise Refusal(
                "cp_size and sp_size exclude each other", self.slot(prefix + "SP_SIZE", 1).said
            )
        if (
            max(sizes["tp"], sizes["cp"]) > 1
            and sizes["dp_replicate"] > 1
            and sizes["dp_shard"] == 1
        ):
            statement = self.slot(prefix + "DP_REPLICATE_SIZE", 1).said
            raise Refusal(
                "tp_size or cp_size above 1 with dp_replicate_size above 1 need dp_shard_size above 1",
                statement,
            )
        return sizes

    def _find_type(self, cpu: bool, uses: Mapping[str, bool]) -> str:
        """Return the distributed type, as PartialState and AcceleratorState choose it."""
        if uses["DEEPSPEED"] and not cpu:
            return "DEEPSPEED"
        # Before 1.13 ranks without a GPU found each other on the CPU (state.py: _prepare_backend).
        if self.ranked and (cpu or (self.machine.gpus == 0 and not since("1.13.0"))):
            return "MULTI_CPU"
        if not self.ranked or self.machine.gpus == 0:
            return "NO"
        return "MEGATRON_LM" if uses["MEGATRON_LM"] else "FSDP" if uses["FSDP"] else "MULTI_GPU"

    def _settle_type(self, kind: str) -> None:
        request, own = self.env.get("distributed_type"), self.env.get(USES + kind)
        usual = default("distributed_type", kind)
        if request and request.value == kind:
            self.run.settle("distributed_type", request)
            if own:
                self.run.hear(own.said, *own.lost)
        elif own:
            self.run.settle("distributed_type", Slot(kind, own.said))
        elif request:
            # What lost did so against what was asked for.
            lost = self.run.claim("distributed_type", request, request.value, str)
            said, why = (
                request.said if request.lost else usual,
                f"asked for {request.value}, runs as {kind}",
            )
            self.run.hear(said)
            self.run.settings.append(Settled("distributed_type", kind, said, lost, why))
        else:
            self.run.add("distributed_type", kind)

    def _settle_precision(self, kind: str, chosen: Any) -> None:
        """Record the precision, and pass it to the plugin of the run."""
        variable = "ACCELERATE_MIXED_PRECISION"
        slot = self.slot(variable, "no")
        precision = str(slot.value)
        if precision == "fp8" and not self.machine.has_fp8:
            raise Refusal("fp8 needs Transformer Engine, MS-AMP or torchao", slot.said)
        if kind == "DEEPSPEED":
            self._mix_deepspeed(chosen, slot)
            return
        self.settle("mixed_precision", variable, str, "no")
        if kind == "FSDP" and chosen is not None:
            if precision == "no":
                chosen[1].add("fsdp.mixed_precision_policy", None)
                return
            if precision not in HALF:
                raise Refusal(f"found {precision}, expected one of {', '.join(HALF)}", slot.said)
            last = "buffer_dtype" if chosen[0]["fsdp_version"] == 1 else "output_dtype"
            for one in ("param_dtype", "reduce_dtype", last):
                chosen[1].add(f"fsdp.mixed_precision_policy.{one}", HALF[precision], slot.said)
        if kind == "MEGATRON_LM" and chosen is not None and precision in ("fp16", "bf16"):
            chosen[1].add(f"megatron_lm.{precision}", True, slot.said)
            if precision == "bf16":
                chosen[1].settings = [
                    one for one in chosen[1].settings if one.setting != "megatron_lm.DDP_impl"
                ]
                chosen[1].add("megatron_lm.DDP_impl", "local", slot.said)

    def _settle_world(self, kind: str) -> int | None:
        """Record and return the number of ranks; without a backend each process is alone."""
        slot = self.env["num_processes"]
        alone = not self.ranked or (self.machine.gpus == 0 and kind != "MULTI_CPU")
        if alone:
            self.run.add("num_processes", 1)
            return 1
        world = self.run.settle("num_processes", slot)
        return world if isinstance(world, int) else None

    def _check_sizes(
        self, sizes: dict[str, int], kind: str, world: int | None, version: int
    ) -> None:
        """Check the mesh against the ranks (ParallelismConfig._validate_accelerator)."""
        total, statement = (
            math.prod(sizes.values()),
            self.slot("ACCELERATE_USE_PARALLELISM_CONFIG", "").said,
        )
        alone = not self.ranked or kind == "NO"
        whole = kind == "FSDP" and version == 2 and sizes["dp_shard"] * sizes["cp"] == 1
        lacks = (
            "FSDP 2 has no dimension to shard over: dp_shard_size and cp_size are 1"
            if whole
            else ""
        )
        few = total > 1 and (alone or (world is not None and total > world))
        if kind != "MULTI_GPU" and total == 1:
            return
        if sizes["sp"] == 1 and (few or (world is not None and total not in (1, world))):
            needs = f"the sizes of parallelism_config need {total} ranks, and the run has {world}"
            raise Refusal("; and ".join(filter(None, (needs, lacks))), statement)
        if total == 1 and world is not None:
            sizes["dp_replicate"] = world
            name = "parallelism.dp_replicate_size"
            self.run.settings = [one for one in self.run.settings if one.setting != name]
            self.run.add(name, world, self.env["num_processes"].said)
        if lacks:
            raise Refusal(lacks, statement)
        if (
            math.prod(sizes.values()) > 1
            and kind not in ("MULTI_GPU", "DEEPSPEED")
            and version != 2
        ):
            raise Refusal(
                f"parallelism_config goes with FSDP 2, several GPUs or DeepSpeed, and the run is {kind}",
                statement,
            )

    def _settle_deepspeed(self, run: Run) -> dict[str, Any]:
        """Return the values of DeepSpeedPlugin; `config` is DeepSpeed's own."""
        values: dict[str, Any] = {
            name: _parsed_text(self.slot(variable, usual), parse, usual)
            for name, (_, variable, parse, usual) in KEYS.items()
        }
        file = self.slot("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        by_file = str(file.value) != "none"
        run.hear(file.said)
        config = self._fill_file(values, file) if by_file else _inline_config(values)
        for name, (key, variable, parse, usual) in KEYS.items():
            value = _value_at(config, key)
            by_key = (
                by_file and value is not None and _value_at(self.file, key) not in (None, "auto")
            )
            if by_file and value not in (None, "auto"):
                values[name] = value
            if by_key:
                slot = Slot(value, Said(key, value, str(file.value)))
                run.settle(f"deepspeed.{name}", slot.after(self.env.get(variable)))
            elif (
                name.endswith("nvme_path")
                and not by_file
                and values[name.replace("nvme_path", "device")] != "nvme"
            ):
                run.add(f"deepspeed.{name}", values[name])
            elif (
                by_file
                and _value_at(self.file, key) is None
                and name != "gradient_accumulation_steps"
            ):
                run.add(f"deepspeed.{name}", values[name], self.slot(variable, usual).said)
                run.hear(self.slot(variable, usual).said)
            elif (
                by_file
                and name == "gradient_accumulation_steps"
                and _value_at(self.file, key) is None
            ):
                run.add(f"deepspeed.{name}", 1)
            else:
                self.settle(
                    f"deepspeed.{name}",
                    variable,
                    parse,
                    usual,
                    CLIPS if name == "gradient_clipping" and values[name] == "auto" else "",
                )
        third = _value_at(config, "zero_optimization.stage") == 3
        flag = self.slot("ACCELERATE_DEEPSPEED_ZERO3_INIT", str(third))
        value = _parsed_text(flag, is_true, third)
        if third:
            self.settle(
                "deepspeed.zero3_init_flag", "ACCELERATE_DEEPSPEED_ZERO3_INIT", is_true, third
            )
        else:
            run.add("deepspeed.zero3_init_flag", False)
        self.settle("deepspeed.moe_env", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", str, None)
        config["steps_per_print"] = "inf"
        return {**values, "zero3_init_flag": value and third, "config": config}

    def _fill_file(self, values: Mapping[str, Any], file: Slot) -> dict[str, Any]:
        if not isinstance(self.file, Mapping):
            raise Refusal("this DeepSpeed file is not there, or is no mapping", file.said)
        config = {"gradient_accumulation_steps": 1, **deepcopy(dict(self.file))}
        if "zero_optimization" not in config:
            raise Refusal(
                "accelerate needs the section zero_optimization in the DeepSpeed file", file.said
            )
        fields = {
            variable.replace("ACCELERATE_", "").replace("DEEPSPEED_", "").lower()
            for _, variable, _, _ in KEYS.values()
        } | {"mixed_precision"}
        names_in_config = set(str(self.slot("ACCELERATE_CONFIG_DS_FIELDS", "").value).split(","))
        if fields & names_in_config:
            names = ", ".join(sorted(fields & names_in_config))
            raise Refusal(
                f"beside a DeepSpeed file accelerate's config file may not have {names}", file.said
            )
        for name, (key, _, _, _) in KEYS.items():
            if _value_at(config, key) == "auto":
                _put_value(config, key, values[name])
        return config

    def _mix_deepspeed(self, chosen: Any, slot: Slot) -> None:
        """Complete the sections of both 16-bit formats (DeepSpeedPlugin.set_mixed_precision)."""
        config, precision = chosen[0]["config"], str(slot.value)
        before = {
            one for one in ("fp16", "bf16") if isinstance(self.file, Mapping) and one in config
        }
        if precision == "fp16" and "fp16" not in config:
            config["fp16"] = {"enabled": True, "auto_cast": True}
        elif precision in ("bf16", "fp8") and "bf16" not in config:
            config["bf16"] = {"enabled": True}
        other = "bf16" if precision == "fp16" else "fp16"
        if (
            precision != "no"
            and str((config.get(other) or {}).get("enabled", "False")).lower() == "true"
        ):
            raise Refusal(
                f"mixed_precision {precision} goes with no {other} in the DeepSpeed file", slot.said
            )
        for one, on in (("fp16", precision == "fp16"), ("bf16", precision in ("bf16", "fp8"))):
            section = config.setdefault(one, {"enabled": False})
            if section.get("enabled") == "auto":
                section["enabled"] = on
                before.discard(one)
        used = next((one for one in ("fp16", "bf16") if config[one].get("enabled", False)), "no")
        if precision == "fp8":
            used = "fp8"
        if used in before:
            own = Slot(
                used,
                Said(
                    f"{used}.enabled",
                    True,
                    str(self.slot("ACCELERATE_DEEPSPEED_CONFIG_FILE", "").value),
                ),
            )
            self.run.settle("mixed_precision", own.after(slot))
        elif used == precision:
            self.run.settle("mixed_precision", slot)
        else:
            self.run.add("mixed_precision", used)
        for key, value in _flat_items(config):
            if key not in {one[0] for one in KEYS.values()}:
                chosen[1].add(f"deepspeed.deepspeed_config.{key}", value)


def _parsed_text(slot: Slot, parse: Parse, usual: Any) -> Any:
    if not slot.is_given and slot.value == usual and not isinstance(slot.value, str):
        return slot.value
    try:
        return parse(str(slot.value))
    except (ValueError, Refusal):
        raise Refusal(f"found {slot.value}, which accelerate cannot read", slot.said) from None


def _read_backend(text: str) -> str:
    name = text.upper()
    if name not in facts()["backends"]:
        raise Refusal(f"found {text}, expected one of {', '.join(facts()['backends'])}")
    return name


def _read_policy(text: str) -> str | None:
    if text.upper() not in facts()["wraps"]:
        raise Refusal(f"found {text}, expected one of {', '.join(facts()['wraps'])}")
    return {
        "TRANSFORMER_BASED_WRAP": "transformer_auto_wrap_policy",
        "SIZE_BASED_WRAP": "size_based_auto_wrap_policy",
    }.get(text.upper())


def _read_strategy(text: str) -> str:
    if text not in ("allgather", "alltoall"):
        raise Refusal(f"found {text}, expected allgather or alltoall")
    return text


def _read_attention(text: str) -> str:
    if text not in BUILTIN and ("/" not in text or "flash-attn" not in text):
        raise Refusal(f"found {text}, expected one of {', '.join(BUILTIN)}, or a kernel of the hub")
    return text


def _inline_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that accelerate builds where no file is named."""
    zero: dict[str, Any] = {"stage": values["zero_stage"]}
    for part in ("optimizer", "param"):
        device = values[f"offload_{part}_device"]
        path = values[f"offload_{part}_nvme_path"] if device == "nvme" else None
        zero[f"offload_{part}"] = {"device": device, "nvme_path": path}
    zero["stage3_gather_16bit_weights_on_model_save"] = values["zero3_save_16bit_model"]
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
              "gradient_accumulation_steps": values["gradient_accumulation_steps"], "zero_optimization": zero}  # fmt: skip
    return {
        **config,
        **(
            {"gradient_clipping": values["gradient_clipping"]}
            if values["gradient_clipping"]
            else {}
        ),
    }


def _value_at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def _put_value(config: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        config = config[section]
    config[name] = value


def _flat_items(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    return [
        pair
        for name, value in config.items()
        for pair in (
            _flat_items(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else [(prefix + name, value)]
        )
    ]
