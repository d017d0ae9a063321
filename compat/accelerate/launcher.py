"""Follows `accelerate launch`: options and config file become the environment of the script.

The functions follow accelerate/commands/launch.py (_validate_launch_command, launch_command) and
accelerate/utils/launch.py (prepare_simple_launcher_cmd_env, prepare_multi_gpu_env, prepare_deepspeed_cmd_env).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridge.errors import nearest
from bridge.stack.sources import Said
from compat.accelerate.slots import (
    OVER_SECTIONS,
    Refusal,
    Run,
    Slot,
    default,
    facts,
    is_true,
    since,
)

MODES = ("multi_gpu", "tpu", "tpu_use_cluster", "use_deepspeed", "use_fsdp", "use_megatron_lm")
"""Options with which the config file's distributed_type does not count."""
TYPES: Mapping[str, str] = {
    "DEEPSPEED": "use_deepspeed", "FSDP": "use_fsdp", "MEGATRON_LM": "use_megatron_lm", "XLA": "tpu",
    **{f"MULTI_{one}": "multi_gpu" for one in ("GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")},
}  # fmt: skip
"""The option that each distributed_type of a config file stands for."""
PREFIXES = {"fsdp_config": "fsdp", "fp8_config": "fp8", "dynamo_config": "dynamo_"}
"""What accelerate puts in front of keys of these sections that do not begin with it."""
APART = ("compute_environment", "mixed_precision", "distributed_type")
SECTIONS = tuple(
    name for name in facts()["keys"] if name.endswith("_config") or name == "parallelism_config"
)
BOTH = "You can only use one of --cpu, --multi_gpu, --tpu, --use_deepspeed, --use_fsdp"
KEPT = ("SHARDING_STRATEGY", "MIN_NUM_PARAMS", "AUTO_WRAP_POLICY", "TRANSFORMER_CLS_TO_WRAP",
        "BACKWARD_PREFETCH", "STATE_DICT_TYPE", "VERSION", "IGNORED_MODULES")  # fmt: skip
"""Variables of FSDP that keep capital letters."""
WRAPS = "fsdp_transformer_layer_cls_to_wrap"
ALWAYS = ("tp_degree", "use_custom_fsdp", "pp_degree", "gradient_clipping")
"""Settings of Megatron-LM that are passed on even where they are null."""
DEEPSPEED: Mapping[str, str] = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
"""The variable of each setting of DeepSpeed; of the others, the paths of NVMe, there is none."""
LOWERED = ("gradient_clipping", "offload_optimizer_device", "offload_param_device", "zero3_init_flag",
           "zero3_save_16bit_model")  # fmt: skip
SHARED = (
    "dp_replicate_size",
    "dp_shard_size",
    "tp_size",
    "cp_size",
    "cp_backend",
    "sp_size",
    "sp_backend",
)
MORE = {"cp_size": ("cp_comm_strategy",),
        "sp_size": ("sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")}  # fmt: skip
"""Settings of parallelism_config that are passed on where the size is above 1."""
DYNAMO = ("mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")


@dataclass(frozen=True)
class Machine:
    """What a run depends on beside its sources: GPUs of the machine (None: enough), cores, and whether a library
    for fp8 is installed. `world` is the number of ranks of a run that torchrun starts.
    """

    gpus: int | None = None
    cores: int = 1
    has_fp8: bool = True
    world: int | None = None


@dataclass
class Given:
    """What the sources of a run say: words of the launcher, the config file, and the environment.

    `options` are slots by name of an option, `config` settings of the file by path, in its order, and `environment`
    variables. `starter` is `accelerate`, `torchrun` or `python`.
    """

    options: Mapping[str, Said] = field(default_factory=dict)
    config: Mapping[str, Said] | None = None
    environment: Mapping[str, Said] = field(default_factory=dict)
    starter: str = "accelerate"
    problems: Sequence[Refusal] = ()

    def __iter__(self) -> Iterator[Said]:
        yield from self.options.values()
        yield from (self.config or {}).values()
        yield from self.environment.values()


def by_flag() -> Mapping[str, Mapping[str, Any]]:
    """Return the options of the launcher by flag. accelerate takes each with hyphens as well."""
    rows = {flag: row for row in facts()["options"] for flag in row["flags"]}
    return {**{flag[:2] + flag[2:].replace("_", "-"): row for flag, row in rows.items()}, **rows}


def name_option(section: str, key: str) -> str:
    """Return the name of the option that a key in a section of the config file stands for."""
    prefix = PREFIXES.get(section, "")
    if key.startswith(prefix) or (section == "dynamo_config" and not since("1.14.0")):
        return key
    return f"{prefix.rstrip('_')}_{key}"


def read_option(row: Mapping[str, Any], text: str) -> Any:
    """Return the value of an option, as the launcher's parser reads it. Raises `Refusal`."""
    kind = row["kind"]
    try:
        value = (
            {"int": int, "float": float, "bool": bool}[kind](text)
            if kind in ("int", "float", "bool")
            else is_true(text)
            if kind == "str_to_bool"
            else text
        )
    except ValueError:
        raise Refusal(f"found {text}, expected {kind}") from None
    if "choices" in row and value not in row["choices"]:
        raise Refusal(f"found {text}, expected one of {', '.join(row['choices'])}")
    return value


def read_options(words: Sequence[tuple[str, int | None]], source: str) -> Given:
    """Return the options in the launcher's words, each with its line. The last one of a name counts."""
    options, problems = dict[str, Said](), list[Refusal]()
    index = 0
    while index < len(words):
        word, line = words[index]
        flag, tied, text = word.partition("=")
        row, index = by_flag().get(flag), index + 1
        statement = Said(flag, text, source, line)
        if row is None:
            problems.append(
                Refusal(
                    f"accelerate launch has no such option{nearest(flag, tuple(by_flag()))}",
                    statement,
                )
            )
            continue
        if row["kind"] in ("switch", "off"):
            value: Any = row["kind"] == "switch"
        else:
            if not tied and (index == len(words) or words[index][0].startswith("--")):
                problems.append(Refusal("expected a value behind this option", statement))
                continue
            text, index = (text, index) if tied else (words[index][0], index + 1)
            try:
                value = read_option(row, text)
            except Refusal as error:
                problems.append(Refusal(error.message, statement))
                continue
        options[row["name"]] = Said(flag, value, source, line)
    return Given(options, problems=problems)


def set_environment(inputs: Given, machine: Machine, run: Run) -> tuple[dict[str, Slot], bool]:
    """Return the environment of the script, and whether its ranks know each other. Raises `Refusal`."""
    shell = {
        name: Slot(statement.value, statement) for name, statement in inputs.environment.items()
    }
    if inputs.starter != "accelerate":
        ranks = machine.world if inputs.starter == "torchrun" else None
        shell["num_processes"] = Slot(ranks or 1, default("WORLD_SIZE", ranks or 1))
        return shell, inputs.starter == "torchrun"
    if inputs.problems:
        raise inputs.problems[0]
    launch = _Launch(inputs, machine, run)
    launch.merge()
    return launch.export(shell)


class _Launch:
    """The arguments of the launcher, by name, on their way to the environment."""

    def __init__(self, inputs: Given, machine: Machine, run: Run) -> None:
        self.given, self.machine, self.run = inputs, machine, run
        rows = {row["name"]: row["default"] for row in facts()["options"] if row["kind"] != "off"}
        self.args = {name: Slot(value, default(f"--{name}", value)) for name, value in rows.items()}
        for name, statement in inputs.options.items():
            self.args[name] = Slot(statement.value, statement).after(self.args.get(name))

    def __getitem__(self, name: str) -> Any:
        slot = self.args.get(name)
        return slot.value if slot else None

    def read(self, name: str) -> Any:
        """Return an argument that decides about the launch, and record that it is heard."""
        if name in self.args:
            self.run.hear(self.args[name].said)
        return self[name]

    def settle(self, name: str) -> Any:
        """Record an argument that the launcher uses itself, and return it."""
        if self.args[name].is_given:
            self.run.settle(name, self.args[name])
        return self[name]

    def _refuse(self, message: str, *names: str) -> Refusal:
        statement = next(
            (self.args[one].said for one in names if one in self.args and self.args[one].is_given),
            None,
        )
        return Refusal(message, statement)

    def merge(self) -> None:
        """Take over the config file, as _validate_launch_command does."""
        modes = [
            one for one in ("multi_gpu", "cpu", "tpu", "use_deepspeed", "use_fsdp") if self[one]
        ]
        if len(modes) > 1:
            raise self._refuse(f"{BOTH} at a time", *modes)
        if self["multi_gpu"] and self["num_processes"] is not None and self["num_processes"] < 2:
            raise self._refuse("--multi_gpu needs at least 2 processes", "num_processes")
        if self["use_parallelism_config"] and not self["use_fsdp"]:
            raise self._refuse(
                "--use_parallelism_config needs --use_fsdp with version 2", "use_parallelism_config"
            )
        if self.given.config is None:
            self._merge_nothing()
        else:
            self._merge_config(self.given.config)
        if self["num_cpu_threads_per_process"] is None:
            self._count_threads()

    def _merge_nothing(self) -> None:
        if self["num_processes"] is None:
            said = default("the number of GPUs of the machine", self.machine.gpus)
            self.args["num_processes"] = Slot(said.value, said)
        many = self["num_processes"]
        if not self["multi_gpu"] and (many is None or many > 1) and self.machine.gpus not in (0, 1):
            self.args["multi_gpu"] = Slot(True, default("multi_gpu", True))
        for name, value in (
            ("num_machines", 1),
            ("mixed_precision", "no"),
            ("dynamo_backend", "no"),
        ):
            if self[name] is None:
                self.args[name] = Slot(value, default(name, value))
        self.args["use_cpu"] = self.args["cpu"]

    def _merge_config(self, config: Mapping[str, Said]) -> None:
        self._check_config(config)
        kind = config["distributed_type"]
        chosen = next((one for one in MODES if self[one]), "")
        if chosen:
            # What the file asks for is lost, unless it asks for the same.
            self.args[chosen] = self.args[chosen].after(Slot(None, kind))
        else:
            if option := TYPES.get(kind.value):
                self.args[option] = Slot(True, kind)
            if not self["cpu"]:
                self.run.hear(kind)
            sizes = (one for path, one in config.items() if path.startswith("parallelism_config."))
            if first := next(sizes, None):
                whole = Said("parallelism_config", True, first.source, first.line)
                self.args["use_parallelism_config"] = Slot(True, whole)
        if self["gpu_ids"] is None:
            statement = config.get("gpu_ids")
            self.args["gpu_ids"] = (
                Slot(statement.value, statement)
                if statement and statement.value is not None
                else Slot("all", default("gpu_ids", "all"))
            )
        if self["multi_gpu"] and self["num_machines"] is None:
            self._take("num_machines", config)
        ids = self["gpu_ids"]
        if not isinstance(ids, str):
            raise self._refuse(f"found {ids!r}, expected a text such as '0,1'", "gpu_ids")
        if (
            len(ids.split(",")) < 2
            and ids != "all"
            and self["multi_gpu"]
            and self["num_machines"] <= 1
        ):
            raise self._refuse("less than two GPU ids for multi_gpu", "gpu_ids")
        for path, one in config.items():
            section, _, key = path.partition(".")
            if key:
                name = name_option(section, key)
                slot = self.args.get(name)
                if name not in self.given.options or slot is None:
                    self.args[name] = Slot(one.value, one)
                elif since(OVER_SECTIONS):
                    self.args[name] = slot.after(Slot(None, one))
                else:
                    self.args[name] = Slot(one.value, one).after(slot)
            elif path not in ("use_cpu", "debug", *APART, *SECTIONS):
                self._take(path, config)
        for name, value in facts()["keys"].items():
            if name not in (*APART, *SECTIONS) and self[name] is None and value is not None:
                self.args[name] = Slot(value, default(name, value))
        if statement := config.get("debug"):
            own = self.args["debug"]
            self.args["debug"] = (
                own.after(Slot(None, statement)) if own.value else Slot(statement.value, statement)
            )
        use = config.get("use_cpu", default("use_cpu", False))
        self.args["use_cpu"] = Slot(use.value, use)
        precision = config.get("mixed_precision")
        if self["mixed_precision"]:
            if precision and precision.value is not None:
                self.args["mixed_precision"] = self.args["mixed_precision"].after(
                    Slot(None, precision)
                )
        elif precision and precision.value is not None:
            self.args["mixed_precision"] = Slot(precision.value, precision)
        else:
            old = None if precision else config.get("fp16")
            self.args["mixed_precision"] = (
                Slot("fp16", old)
                if old and old.value
                else Slot("no", default("mixed_precision", "no"))
            )
        if self["dynamo_backend"] is None:
            self.args["dynamo_backend"] = Slot("no", default("dynamo_backend", "no"))
        if self["num_processes"] == -1:
            raise Refusal(
                "the config file has no num_processes; give --num_processes to the launch, or --world-size here"
            )

    def _check_config(self, config: Mapping[str, Said]) -> None:
        values = {path: statement.value for path, statement in config.items()}
        if values.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
            raise Refusal(
                "stagebridge reads configs of accelerate for LOCAL_MACHINE alone",
                config["compute_environment"],
            )
        if "distributed_type" not in values:
            raise Refusal("the config file has no distributed_type, which accelerate needs")
        keys = {*facts()["keys"], "fp16", "dynamo_backend"}
        for path, statement in config.items():
            top, dot, _ = path.partition(".")
            if top not in keys or (dot and top not in SECTIONS):
                raise Refusal(
                    f"accelerate does not know the key {top}, and stops{nearest(top, tuple(keys))}",
                    statement,
                )
        if values["distributed_type"] not in facts()["types"]:
            raise Refusal(
                f"expected one of {', '.join(facts()['types'])}", config["distributed_type"]
            )

    def _take(self, name: str, config: Mapping[str, Said]) -> None:
        """Take a value of the config file where no option gives one."""
        statement, slot = config.get(name), self.args.get(name)
        if statement is None or (slot and not slot.is_given and slot.value is not None):
            value = facts()["keys"].get(name)
            if slot is None or slot.value is None:
                self.args[name] = Slot(value, default(name, value))
        elif slot is None or slot.value is None:
            self.args[name] = Slot(statement.value, statement)
        else:
            self.args[name] = slot.after(Slot(None, statement))

    def _count_threads(self) -> None:
        statement = self.given.environment.get("OMP_NUM_THREADS")
        many = int(statement.value) if statement and str(statement.value).isdigit() else 1
        own = max(
            self.machine.cores
            // max((self["num_processes"] or 1) // (self["num_machines"] or 1), 1),
            1,
        )
        if own > 1 and not (statement and many) and not self["use_deepspeed"]:
            self.read("use_cpu")
        if self["use_cpu"] and not (statement and many) and (self["num_processes"] or 0) >= 1:
            many = own
        self.args["num_cpu_threads_per_process"] = Slot(
            many, statement or default("num_cpu_threads_per_process", many)
        )

    def export(self, shell: dict[str, Slot]) -> tuple[dict[str, Slot], bool]:
        """Return the script's environment, as the launcher of this kind of run sets it."""
        cpu = self["cpu"]
        modes = [
            one
            for one in ("use_deepspeed", "use_fsdp", "use_megatron_lm", "multi_gpu")
            if self[one] and not cpu
        ]
        if self["tpu"] and not cpu and not modes:
            raise self._refuse("stagebridge does not read runs on TPUs", "tpu")
        mode = modes[0] if modes else ""
        for one in (mode, "cpu"):
            if one and self[one]:
                self.read(one)
        if self["no_python"] and self["module"]:
            raise self._refuse("--module and --no_python cannot be used together", "module")
        if mode:
            kind = next(kind for kind, option in TYPES.items() if option == mode and kind != "XLA")
            slot = self.args[mode]
            shell["distributed_type"] = Slot(kind, slot.said, slot.lost)
        self._set_ranks(shell, mode)
        if not mode:
            slot = self.args["cpu"].after(self.args["use_cpu"]) if cpu else self.args["use_cpu"]
            self._set(
                shell,
                "ACCELERATE_USE_CPU",
                slot,
                str(bool(slot.value)) if slot.value in (True, False) else str(slot.value),
            )
        elif "ACCELERATE_USE_CPU" in shell:
            shell["ACCELERATE_USE_CPU"] = shell["ACCELERATE_USE_CPU"].after(self.args["use_cpu"])
        self._set_debug(shell)
        if self.read("gpu_ids") != "all" and self["gpu_ids"] is not None:
            self._set(shell, "CUDA_VISIBLE_DEVICES", self.args["gpu_ids"], self["gpu_ids"])
        self._set_precision(shell)
        if mode != "use_deepspeed":
            self._set_dynamo(shell)
            self._set(shell, "OMP_NUM_THREADS", self.args["num_cpu_threads_per_process"])
        if self["enable_cpu_affinity"]:
            self._set(shell, "ACCELERATE_CPU_AFFINITY", self.args["enable_cpu_affinity"], "1")
        if self["use_fsdp"] and mode and mode != "use_deepspeed":
            self._set_fsdp(shell)
        if self["use_megatron_lm"] and mode and mode != "use_deepspeed":
            self._set_megatron(shell)
        if mode == "use_deepspeed":
            self._set_deepspeed(shell)
        if self["use_parallelism_config"] and mode:
            self._set_parallelism(shell)
        return shell, bool(mode)

    def _set(self, shell: dict[str, Slot], name: str, slot: Slot, text: str | None = None) -> None:
        statement = slot.said if slot.is_given else default(name, slot.value)
        shell[name] = Slot(str(slot.value) if text is None else text, statement, slot.lost).after(
            shell.get(name)
        )

    def _set_ranks(self, shell: dict[str, Slot], mode: str) -> None:
        """Set the number of ranks, and check what a run on several machines needs."""
        machines, many = self.settle("num_machines"), self["num_processes"]
        if not isinstance(machines, int) or isinstance(machines, bool):
            raise self._refuse("expected a whole number", "num_machines")
        if machines > 1:
            if mode and self.settle("machine_rank") is None:
                raise self._refuse("several machines need --machine_rank", "num_machines")
            if not mode and None in (
                self.settle("main_process_ip"),
                self.settle("main_process_port"),
            ):
                raise self._refuse(
                    "several machines need main_process_ip and main_process_port", "num_machines"
                )
        if not mode:
            shell["num_processes"] = Slot(1, default("num_processes", 1))
            if many == 1:
                self.read("num_processes")
            return
        self.settle("main_process_port")
        self.settle("main_process_ip")
        slot = self.args["num_processes"]
        self.run.hear(slot.said)
        local = None if many is None else many // max(machines, 1)
        if local == 0:
            raise Refusal(
                "no process would start: num_processes is below num_machines, or no GPU was found",
                slot.said,
            )
        if many is not None and not isinstance(many, int):
            raise Refusal("expected a whole number", slot.said)
        shell["num_processes"] = Slot(
            None if local is None else local * max(machines, 1), slot.said, slot.lost
        )

    def _set_debug(self, shell: dict[str, Slot]) -> None:
        slot, name = self.args["debug"], "ACCELERATE_DEBUG_MODE"
        if slot.value:
            self._set(shell, name, slot, "true")
        elif name in shell:
            shell[name] = shell[name].after(slot if slot.value is not None else None)
        elif slot.is_given:
            shell[name] = Slot("False", slot.said)

    def _set_precision(self, shell: dict[str, Slot]) -> None:
        slot = self.args["mixed_precision"]
        text = str(slot.value).lower() if isinstance(slot.value, str) else None
        if text not in facts()["precisions"]:
            raise Refusal(
                f"found {slot.value!r}, expected one of {', '.join(facts()['precisions'])}",
                slot.said,
            )
        if text == "fp8" and not self.machine.has_fp8:
            raise Refusal("fp8 needs Transformer Engine, MS-AMP or torchao", slot.said)
        self._set(shell, "ACCELERATE_MIXED_PRECISION", slot, text)

    def _set_dynamo(self, shell: dict[str, Slot]) -> None:
        slot = self.args["dynamo_backend"]
        text = str(slot.value).upper() if isinstance(slot.value, str) else ""
        if text not in facts()["backends"]:
            raise Refusal(
                f"found {slot.value!r}, expected one of {', '.join(facts()['backends'])}", slot.said
            )
        self._set(shell, "ACCELERATE_DYNAMO_BACKEND", slot, text)
        for name in DYNAMO:
            if f"dynamo_{name}" in self.args:
                self._set(shell, f"ACCELERATE_DYNAMO_{name.upper()}", self.args[f"dynamo_{name}"])

    def _set_fsdp(self, shell: dict[str, Slot]) -> None:
        self._set(shell, "ACCELERATE_USE_FSDP", self.args["use_fsdp"], "true")
        ram, sync = "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states"
        if self[ram] and not self[sync]:
            raise Refusal(f"{ram} needs {sync}; set it to true", self.args[sync].said)
        if self[ram] and not isinstance(self[sync], str):
            self.run.hear(self.args[sync].said)  # any text passes this check, also "false"
        rows = {
            row["name"]: row["default"]
            for row in facts()["options"]
            if row["name"].startswith("fsdp_")
        }
        policy = self.args.get("fsdp_backward_prefetch_policy")
        if policy and policy.value is not None and "fsdp_backward_prefetch_policy" in rows:
            self.args["fsdp_backward_prefetch"] = policy.after(self.args["fsdp_backward_prefetch"])
        for name, usual in {**rows, "fsdp_ignored_modules": None}.items():
            variable = (
                "TRANSFORMER_CLS_TO_WRAP" if name == WRAPS else name.removeprefix("fsdp_").upper()
            )
            slot = self.args.get(name)
            if slot and (usual is not None or slot.value is not None):
                text = str(slot.value) if variable in KEPT else str(slot.value).lower()
                self._set(shell, f"FSDP_{variable}", slot, text)

    def _set_megatron(self, shell: dict[str, Slot]) -> None:
        self._set(shell, "ACCELERATE_USE_MEGATRON_LM", self.args["use_megatron_lm"], "true")
        for row in facts()["options"]:
            if row["name"].startswith("megatron_lm_"):
                slot = self.args[row["name"]]
                if slot.value is not None or row["name"].removeprefix("megatron_lm_") in ALWAYS:
                    self._set(shell, row["name"].upper(), slot)

    def _set_deepspeed(self, shell: dict[str, Slot]) -> None:
        self._set(shell, "ACCELERATE_USE_DEEPSPEED", self.args["use_deepspeed"], "true")
        config = self.given.config or {}
        fields = [path.partition(".")[2] for path in config if path.startswith("deepspeed_config.")]
        if not self.given.options.get("mixed_precision") and self.args["mixed_precision"].is_given:
            fields.append("mixed_precision")
        section = next(
            (
                statement
                for path, statement in config.items()
                if path.startswith("deepspeed_config.")
            ),
            default("", ""),
        )
        shell["ACCELERATE_CONFIG_DS_FIELDS"] = Slot(",".join(fields).lower(), section)
        for name, variable in DEEPSPEED.items():
            if self[name] is not None:
                text = str(self[name])
                self._set(
                    shell, variable, self.args[name], text.lower() if name in LOWERED else text
                )
        if self["num_machines"] > 1:
            self.read("deepspeed_multinode_launcher")

    def _set_parallelism(self, shell: dict[str, Slot]) -> None:
        prefix = "parallelism_config_"
        slot = self.args["use_parallelism_config"]
        self._set(shell, "ACCELERATE_USE_PARALLELISM_CONFIG", slot, "true")
        names_to_set = list(SHARED)
        for size, names in MORE.items():
            value = self[prefix + size] if prefix + size in self.args else 1
            if not isinstance(value, int):
                raise Refusal("expected a whole number", self.args[prefix + size].said)
            names_to_set += names if value > 1 else ()
        for name in names_to_set:
            if prefix + name in self.args:
                self._set(shell, f"PARALLELISM_CONFIG_{name.upper()}", self.args[prefix + name])
