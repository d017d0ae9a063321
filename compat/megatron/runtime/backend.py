"""Runs plans on Megatron-Core itself, on GPUs or on CPUs that answer its requests for CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from bridge.engine.environment import detect
from bridge.engine.interface import MICRO, Backend, Workload, unkept
from bridge.errors import ConfigError, VersionError
from bridge.layout.architecture import Architecture
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config
from bridge.translation.lift import lift, lower, plan_claims
from compat.megatron import live
from compat.megatron.dialect import DIALECT, MegatronConfig

if TYPE_CHECKING:
    from compat.megatron.runtime.trainer import MegatronTrainer

OPEN: Mapping[str, Any] = {
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-3,
    "optimizer.betas": (0.9, 0.999),
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip": 0.0,
    "optimizer.schedule.name": "constant",
    "precision.compute": "fp32",
    "zero.stage": 0,
}
"""Values for fields that a plan leaves open. They are the native engine's defaults, because
Megatron's defaults differ.
"""


@dataclass(frozen=True)
class MegatronBackend(Backend):
    """Megatron-Core as an engine. If a run resumes from a checkpoint, `samples` is the number of
    samples per step in the run that wrote the checkpoint.
    """

    name: ClassVar[str] = "megatron"
    title: ClassVar[str] = "Megatron-Core"
    samples: int | None = None

    @property
    @override
    def release(self) -> str | None:
        return live.release_of_package()

    @override
    def load(self) -> None:
        from bridge.engine.compiling import disable_compile
        from compat.megatron.runtime.cpu import quiet

        with disable_compile(), quiet():
            import compat.megatron.runtime.trainer  # noqa: F401

    @override
    def refusals(self, plan: Plan, world: int) -> tuple[str, ...]:
        losses = unkept(complete_plan(plan, MICRO), DIALECT, self._installed_release(), world)
        return (
            *_limits(plan.values()),
            *(line for line in losses if line.partition(":")[0] not in LIMITS),
        )

    def _installed_release(self) -> str | None:
        """Return the installed release. None if our tables do not have this release; the tables'
        newest release is then used.
        """
        return self.release if self.release in DIALECT.versions else None

    @override
    def open(self, run: Config | Plan, workload: Workload) -> MegatronTrainer:
        self.load()
        from compat.megatron.runtime.trainer import MegatronTrainer

        return MegatronTrainer(self.config(run, workload), workload, self.samples)

    @override
    def following(self, config: Config) -> MegatronBackend:
        """Return the backend for a run that resumes from a checkpoint of `config`. The checkpoint
        counts samples, so the backend needs the number of samples per step in that run.
        """
        return MegatronBackend(lift(config).batch.global_)

    def _installed(self) -> str:
        if self.release is None:
            raise VersionError("megatron-core: not installed; pip install megatron-core")
        return self.release

    def config(self, run: Config | Plan, workload: Workload) -> MegatronConfig:
        """Return the config that runs: the given config, or a plan lowered to Megatron with the
        sizes of the workload.
        """
        world, release = _world(), self._installed()
        if isinstance(run, Plan):
            names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence", "tied")
            sizes = {f"model.{name}": getattr(workload.architecture, name) for name in names}
            # Later rows take precedence: what a workload describes of its model is more exact than
            # its sizes.
            whole = {
                **complete_plan(run, workload.micro).values(),
                **sizes,
                **_model_fields(workload),
            }
            result = lower(Plan.of(whole), DIALECT, release, world)
        else:
            model = _model(run, workload, release, world) if run.entry == "flags" else {}
            result = DIALECT.config({**model, **run.given}, release, world, run.entry)
        assert isinstance(result, MegatronConfig)
        ConfigError.raise_if(_undriven(result.args, workload))
        return result


LIMITS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "parallel.context": (
        (1,),
        "without Transformer Engine, Megatron's attention cannot be split by tokens; use 1 context rank",
    ),
    "model.experts": (
        (1,),
        "the model that is trained has no experts; leave the field unset, or set 1",
    ),
    "precision.fp8": ((), "8-bit products need Transformer Engine; leave the field unset"),
    "zero.weight_buffers": (
        (),
        "Megatron has no setting for the number of buffers; leave the field unset",
    ),
    "zero.grad_buffers": (
        (),
        "Megatron has no setting for the number of buffers; leave the field unset",
    ),
    "zero.offload.optimizer": (
        ("none", "cpu"),
        "Megatron offloads only to the host's memory; use cpu",
    ),
}
"""A table from plan fields to the values that this backend can run, and the reason why it cannot
run other values. A config may have other values.
"""


UNDRIVEN: Mapping[str, str] = {
    "use_torch_fsdp2": "this backend does not run torch's FSDP; use the distributed optimizer",
    "fp8": "8-bit products need Transformer Engine; drop the argument",
}
"""Arguments that this backend cannot run. Each has the reason and an advice."""


FSDP: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "data_parallel_sharding_strategy": (
        ("optim_grads", "optim_grads_params"),
        "this backend runs Megatron-FSDP only with optim_grads and optim_grads_params",
    ),
    "tensor_model_parallel_size": (
        (None, 1),
        "with several tensor ranks, Megatron-FSDP needs Transformer Engine's layers; use 1 tensor rank",
    ),
    "pipeline_model_parallel_size": (
        (None, 1),
        "with a pipeline, Megatron-FSDP stops when it wraps the model; use 1 pipeline rank",
    ),
    "fp16": (
        (None, False),
        "in fp16, Megatron-FSDP stops if a rank holds no part of a parameter; use bf16",
    ),
    "num_distributed_optimizer_instances": (
        (None, 1),
        "this backend runs Megatron-FSDP only with one group of data ranks; use 1",
    ),
}
"""A table from arguments to the values with which this backend runs Megatron-FSDP, and the reason
why it cannot run other values.
"""


def _model_fields(workload: Workload) -> dict[str, Any]:
    """Return the plan fields of the workload's model; empty if only the shape of the model is
    known.
    """
    return dict(Plan(model=workload.model).values()) if workload.model else {}


def _model(run: Config, workload: Workload, release: str, world: int) -> dict[str, Any]:
    """Return the flags that describe the workload's model; empty if `run` itself describes a model."""
    if workload.model is None or run.given.get("num_layers") is not None:
        return {}
    whole = lower(
        Plan.of({**lift(run).values(), **_model_fields(workload)}), DIALECT, release, world
    )
    table = plan_claims(DIALECT)
    rules = [table[path] for path in _model_fields(workload) if path in table]
    return {
        path: whole.given[path] for rule in rules for path in rule.theirs if path in whole.given
    }


def _undriven(args: Mapping[str, Any], workload: Workload) -> Iterator[str]:
    if args.get("num_experts") and workload.model is None:
        yield f"num_experts: found {args['num_experts']!r}; the model that is trained has no experts; drop it"
    if "lr" not in args:
        yield (
            "megatron: found a config object, which has no batch size and no optimizer; "
            "expected flags, or a recipe"
        )
    elif args["lr"] is None:
        yield "lr: missing; without it Megatron stops when it builds the optimizer; add --lr"
    if args.get("use_custom_fsdp") and not args.get("use_megatron_fsdp"):
        yield (
            "use_custom_fsdp: found True; this backend runs only the Megatron-FSDP of 0.14 and later; "
            "use the distributed optimizer"
        )
    if args.get("use_megatron_fsdp"):
        rows = ((name, args.get(name), runs, reason) for name, (runs, reason) in FSDP.items())
        yield from (
            f"{name}: found {value!r}; {reason}"
            for name, value, runs, reason in rows
            if value not in runs
        )
    yield from (
        f"{name}: found {args[name]!r}; {reason}"
        for name, reason in UNDRIVEN.items()
        if args.get(name)
    )


def _limits(values: Mapping[str, Any]) -> Iterator[str]:
    name = values.get("optimizer.name")
    if values.get("zero.stage") and name not in (None, "adam", "adamw"):
        level = values["zero.stage"]
        yield (
            f"optimizer.name: found {name!r} with zero.stage {level}; "
            "Megatron's sharded optimizer supports only adam; use adam, or zero.stage 0"
        )
    if (values.get("zero.stage") or 0) > 1 and (values.get("parallel.tensor") or 1) > 1:
        yield f"zero.stage: found {values['zero.stage']} with tensor ranks; {FSDP['tensor_model_parallel_size'][1]}"
    for path, (runs, reason) in LIMITS.items():
        if path in values and values[path] not in runs:
            yield f"{path}: found {values[path]!r}; {reason}"


def _world() -> int:
    from bridge.engine.comm import rank_and_world

    here = rank_and_world()
    return here[1] if here else detect().world


def complete_plan(plan: Plan, micro: int) -> Plan:
    """Return the plan with the native engine's defaults for open fields. `micro` is the microbatch
    size if the plan does not determine one.
    """
    batch = {} if plan.batch.global_ and plan.batch.accumulation else {"batch.micro": micro}
    momentum = {"optimizer.momentum": 0.0} if plan.optimizer.name == "sgd" else {}
    return Plan.of({**OPEN, **batch, **momentum, **plan.values()})


def architecture(config: MegatronConfig) -> Architecture:
    """Return the shape of the native GPT that computes the same as the GPT of these flags.

    Raises `ConfigError` if the native GPT cannot compute the same.
    """
    args = config.args
    ConfigError.raise_if(_others(args, {**UNDRAWN, **NATIVE}))
    shape = Architecture.of(lift(config).model)
    return replace(
        shape,
        norm="rms" if args["normalization"] == "RMSNorm" else "layer",
        gated=bool(args["swiglu"]),
        rotary=args["position_embedding_type"] == "rope",
        bias=bool(args["add_bias_linear"]),
    )


def workload(config: MegatronConfig) -> Workload:
    """Return the workload for these flags. It is the native GPT if the native GPT can compute the
    model, else the model that the lifted plan describes.

    Raises `ConfigError` if neither is possible.
    """
    args = config.args
    if not any(_others(args, NATIVE)):
        return Workload(architecture(config))
    ConfigError.raise_if(_others(args, UNDRAWN))
    section = Plan.of({**lift(config).values(), **WEIGHTLESS}).model
    return Workload(Architecture.of(section), model=section)


def _others(args: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each argument that has another value than the expected one."""
    yield from (
        f"{name}: found {args[name]!r}; expected {value!r}, or nothing"
        for name, value in values.items()
        if args.get(name, value) != value
    )


NATIVE: Mapping[str, Any] = {"num_experts": None, "multi_latent_attention": False}
"""Values that some arguments must have if the native GPT is to compute the same as Megatron's GPT.
"""
WEIGHTLESS: Mapping[str, Any] = {"model.moe.aux_loss": 0.0, "model.moe.z_loss": 0.0}
"""Coefficients of the expert losses in the model that provides the initial weights. They are 0
there, because Megatron takes the coefficients from its own flags.
"""
UNDRAWN: Mapping[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
"""Values that the arguments of dropout must have. Each engine draws different random numbers, so
runs with dropout cannot be compared.
"""


BACKEND = MegatronBackend()
