"""`AutoPipeline` over the native engine. Source: components/distributed/pipelining/autopipeline.py, functional.py."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import bridge.engine
from bridge.engine import comm
from bridge.engine.formats import name_of
from bridge.engine.layers import Arguments, logits_in
from bridge.engine.models.cutting import cut_of, is_hugging_face
from bridge.engine.runner import Engine, chain_of_model
from bridge.errors import BridgeError, ConfigError
from bridge.files.write import write_text
from bridge.layout.schedule.table import schedule_to_csv
from bridge.plan.plan import Plan
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from bridge.translation.lift import lift
from compat.automodel.dialect import DIALECT
from compat.automodel.runtime.parts import StageModules, even, layers_by_stage

__all__ = ["AutoPipeline", "PipelineConfig", "PipelineInfo"]
BATCH, HEADER = "batch", 10
DTYPES = (torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
ABSENT = -1


@dataclass
class PipelineConfig:
    """Settings of a pipeline with AutoModel's names and defaults. `autopipeline` makes an
    AutoPipeline of them.
    """

    pp_schedule: str | None = "1f1b"
    pp_schedule_csv: str | None = None
    pp_microbatch_size: int = 1
    pp_batch_size: int = 1
    layers_per_stage: int | None = None
    round_virtual_stages_to_pp_multiple: str | None = None
    module_fqns_per_model_part: list[list[str]] | None = None
    patch_inner_model: bool = True
    patch_causal_lm_model: bool = True
    patch_stage_backward_maybe_with_nosync: bool = False
    dtype: torch.dtype | None = None
    scale_grads_in_schedule: bool = False
    loss_fn: Callable[..., Any] | None = None
    pp_seq_len: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all settings by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def autopipeline(self, world_mesh: Any, **more: Any) -> AutoPipeline:
        """Make an AutoPipeline from these settings. `build` uses the `loss_fn` of these settings if
        it gets none.
        """
        pipeline = AutoPipeline(
            world_mesh,
            **{**{key: value for key, value in self.to_dict().items() if key != "loss_fn"}, **more},
        )
        pipeline.loss_fn = self.loss_fn
        return pipeline


@dataclass(frozen=True)
class Stage:
    """One virtual stage of this rank."""

    stage_index: int
    num_stages: int
    submod: StageModules

    @property
    def is_first(self) -> bool:
        """Whether it takes tokens."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives logits."""
        return self.stage_index == self.num_stages - 1


@dataclass
class PipelineInfo:
    """The result of `build`: the schedule, and the stages of this rank with their modules."""

    enabled: bool = False
    schedule: StageSchedule | None = None
    has_first_stage: bool = False
    has_last_stage: bool = False
    model_parts: list[StageModules] | None = None
    stages: list[Stage] | None = None


@dataclass
class StageSchedule:
    """Runs the microbatches of a batch over the stages, as torch's schedules do.

    Gradients are added to `.grad` of the parameters. The script's own optimizer updates the
    weights.
    """

    engine: Engine
    name: str
    microbatches: int
    scale_grads: bool
    _loss_fn: Callable[..., Any]
    outputs: dict[int, Any] = field(default_factory=dict)

    @property
    def n_microbatches(self) -> int:
        """Microbatches in a batch."""
        return self.microbatches

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward over one batch, and add the gradients to `.grad` of the
        parameters. The rank with the last stage returns the logits of all rows.

        Only the rank with the first stage has to pass the tokens (rows, ...), and only the rank
        with the last stage has to pass `target`. Named arguments are passed on all ranks.
        """
        self.outputs.clear()
        passes = self.engine.gradients_of(self._batches(args, target, kwargs))
        factor = 1.0 if self.scale_grads else float(self.microbatches)
        parameters = dict(self.engine.model.named_parameters())
        for name, gradient in passes.gradients.items():
            _add_gradient(parameters[name], gradient if factor == 1.0 else gradient * factor)
        if losses is not None and self.has_last:
            losses[:] = passes.losses
        return self._merge_outputs() if return_outputs else None

    def eval(
        self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any
    ) -> Any:
        """Run only the forward pass, in evaluation mode. Arguments and results are
        those of `step`.
        """
        self.outputs.clear()
        results = []
        for number, batch in enumerate(self._batches(args, target, kwargs)):
            self.engine.executor.microbatch = number
            results.append(self.engine.eval_batch(batch))
        if losses is not None and self.has_last:
            losses[:] = results
        return self._merge_outputs()

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.engine.pipeline.schedule.homes[-1] == self.engine.line.index

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss of a microbatch from the script's loss function, and store the logits for
        the script.
        """
        logits = logits_in(output)
        self.outputs[self.engine.executor.microbatch] = logits.detach()
        value: Tensor = self._loss_fn(logits, target)
        return value

    def _merge_outputs(self) -> Any:
        outputs = [self.outputs[number] for number in sorted(self.outputs)]
        self.outputs.clear()
        return torch.cat(outputs) if outputs else None

    def _batches(
        self, args: tuple[Any, ...], target: Any, kwargs: Mapping[str, Any]
    ) -> list[Arguments]:
        """Split a batch into microbatches. They are all made before the first one runs, because
        ranks must not exchange anything else while the schedule runs.
        """
        if len(args) > 1:
            raise BridgeError(
                f"schedule.step: found {len(args)} unnamed arguments, expected only the tokens;"
                " pass the others by name"
            )
        tokens = self._shared(args[0] if args else None)
        if len(tokens) < self.microbatches:
            raise BridgeError(
                f"schedule.step: found {len(tokens)} rows, expected at least one for each of {self.microbatches} microbatches;"
                " change pp_batch_size or pp_microbatch_size"
            )
        whole = Arguments((target,), {"input_ids": tokens, **_model_arguments(kwargs)})
        cuts = (
            partial(_cut_tensor, number=number, count=self.microbatches)
            for number in range(self.microbatches)
        )
        return [tree_map_only(Tensor, cut, whole) for cut in cuts]

    def _shared(self, tokens: Tensor | None) -> Tensor:
        """Broadcast the tokens from the rank with the first stage to every rank of the pipeline,
        because any layer may need them.
        """
        engine, line = self.engine, self.engine.line
        source, device = engine.pipeline.schedule.homes[0], engine.device
        header = torch.full((HEADER,), ABSENT, dtype=torch.int64, device=device)
        if tokens is not None and line.index == source:
            header[: tokens.dim() + 2] = torch.tensor(
                [tokens.dim(), DTYPES.index(tokens.dtype), *tokens.shape]
            )
        engine.comm.broadcast(BATCH, header, line, source)()
        dimensions, kind, *shape = header.tolist()
        if dimensions == ABSENT:
            raise BridgeError(
                "schedule.step: the rank with the first stage passed no tokens; call step(tokens, ...) there"
            )
        if tokens is None or line.index != source:
            tokens = torch.empty(*shape[:dimensions], dtype=DTYPES[kind])
        whole = tokens.to(device).contiguous()
        engine.comm.broadcast(BATCH, whole, line, source)()
        return whole


def _cut_tensor(tensor: Tensor, number: int, count: int) -> Tensor:
    return torch.tensor_split(tensor, count)[number] if tensor.dim() else tensor


def _model_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for a model of Hugging Face. AutoModel's precomputed causal masks become
    `attention_mask`, and arguments that are None are left out.
    """
    arguments = {
        key: value for key, value in kwargs.items() if value is not None and key != "padding_mask"
    }
    masks = arguments.pop("causal_mask_mapping", None)
    if masks:
        arguments["attention_mask"] = next(iter(masks.values())) if len(masks) == 1 else masks
    return arguments


def _add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)


class AutoPipeline:
    """Pipelines of Hugging Face models: `AutoPipeline(mesh, ...).build(model, loss_fn=...)`.

    `world_mesh` determines the sizes of all axes. `engine` is the native engine, and `findings`
    lists differences of the native engine from AutoModel. `patch_inner_model`,
    `patch_causal_lm_model` and `pp_seq_len` have no effect, because the model is split without
    patches and the length of sequences may vary. Gradients are averaged over data ranks. Raises
    `ConfigError` for settings that the engine cannot run.
    """

    def __init__(
        self,
        world_mesh: Any = None,
        moe_mesh: Any = None,
        pp_axis_name: str = "pp",
        dp_axis_names: tuple[str, ...] = ("dp",),
        cp_axis_name: str | None = None,
        tp_axis_name: str | None = None,
        ep_axis_name: str | None = None,
        ep_shard_axis_names: tuple[str, ...] | None = None,
        pp_schedule: str | None = "1f1b",
        pp_schedule_csv: str | None = None,
        pp_microbatch_size: int = 1,
        pp_batch_size: int = 1,
        layers_per_stage: int | None = None,
        round_virtual_stages_to_pp_multiple: str | None = None,
        module_fqns_per_model_part: list[list[str]] | None = None,
        patch_inner_model: bool = True,
        patch_causal_lm_model: bool = True,
        patch_stage_backward_maybe_with_nosync: bool = False,
        defer_fsdp_grad_sync: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        scale_grads_in_schedule: bool = False,
        pp_seq_len: int | None = None,
    ) -> None:
        if world_mesh is None:
            raise ConfigError(
                "AutoPipeline: found no world_mesh; pass a DeviceMesh with the axis pp"
            )
        if moe_mesh is not None:
            raise ConfigError(
                "AutoPipeline: found moe_mesh; the engine has no axis for experts; leave it out"
            )
        if pp_axis_name not in (world_mesh.mesh_dim_names or ()):
            raise ConfigError(
                f"AutoPipeline: world_mesh has {', '.join(world_mesh.mesh_dim_names or ())}, expected {pp_axis_name} among them"
            )
        if pp_batch_size % pp_microbatch_size:
            raise ConfigError(
                f"pp_batch_size: found {pp_batch_size}, expected a multiple of pp_microbatch_size ({pp_microbatch_size})"
            )
        self.world_mesh, self.pp_axis_name, self.dtype = world_mesh, pp_axis_name, dtype
        self.axes = {
            "pp": (pp_axis_name,),
            "dp": dp_axis_names,
            "cp": (cp_axis_name,),
            "tp": (tp_axis_name,),
        }
        self.pp_batch_size, self.pp_microbatch_size = pp_batch_size, pp_microbatch_size
        self.scale_grads_in_schedule = scale_grads_in_schedule
        self.module_fqns_per_model_part = module_fqns_per_model_part
        self.split = {
            "layers_per_stage": layers_per_stage,
            "round_virtual_stages_to_pp_multiple": round_virtual_stages_to_pp_multiple,
        }
        self.pp_schedule, self.pp_schedule_csv = pp_schedule, pp_schedule_csv
        self._device = (
            torch.device("cuda" if torch.cuda.is_available() else "cpu")
            if device is None
            else torch.device(device)
        )
        self.loss_fn: Callable[..., Any] | None = None
        self.findings: tuple[Finding, ...] = ()
        self._info = PipelineInfo()

    @property
    def pp_mesh(self) -> Any:
        """The mesh of the ranks in this rank's pipeline."""
        return self.world_mesh[self.pp_axis_name]

    def build(
        self,
        model: nn.Module,
        *,
        loss_fn: Callable[..., Any] | None = None,
        parallelize_fn: Callable[..., Any] | None = None,
    ) -> AutoPipeline:
        """Split `model` into stages and make the schedule that runs them. `loss_fn(logits, target)`
        returns the loss of a microbatch.

        `parallelize_fn` is not called, because the engine itself splits the model over data and
        tensor ranks.
        """
        loss_fn = loss_fn or self.loss_fn
        if loss_fn is None:
            raise ConfigError(
                "AutoPipeline.build: found no loss_fn; pass a function of logits and target"
            )
        _check_model(model)
        chain, sizes = chain_of_model(model, cut_of(model)), self._sizes()
        plan = self._plan(model, sizes, len(chain.layers) - chain.leading - chain.trailing)
        parts = self.module_fqns_per_model_part
        spread = {"pp_size": sizes["pp"], "schedule": self.pp_schedule, **self.split}
        split = even(chain, **spread) if parts is None else layers_by_stage(model, chain, parts)
        holder: list[StageSchedule] = []
        engine = bridge.engine.initialize(
            model,
            plan,
            lambda output, target: holder[0].loss(output, target),
            device=self._device,
            module_fqns_per_model_part=split,
            variable_shapes=True,
        )
        microbatches = self.pp_batch_size // self.pp_microbatch_size
        schedule = StageSchedule(
            engine,
            plan.schedule.name or "1f1b",
            microbatches,
            self.scale_grads_in_schedule,
            loss_fn,
        )
        holder.append(schedule)
        self.engine, self.findings = (
            engine,
            (*self._unheard(parallelize_fn, sizes), *engine.findings),
        )
        local, count = engine.pipeline.local(engine.line.index), len(split)
        layers = {layer.name: layer for layer in engine.chain.layers}
        modules = [
            Stage(stage, count, StageModules(engine.model, (layers[name] for name in split[stage])))
            for stage in local
        ]
        self._info = PipelineInfo(
            True,
            schedule,
            0 in local,
            count - 1 in local,
            [each.submod for each in modules],
            modules,
        )
        return self

    def _sizes(self) -> dict[str, int]:
        """Return the number of ranks along each axis of the mesh."""
        names = self.world_mesh.mesh_dim_names
        sizes = dict.fromkeys(self.axes, 1)
        for axis, members in self.axes.items():
            for name in members:
                sizes[axis] *= self.world_mesh[name].size() if name in names else 1
        others = set(names) - {name for members in self.axes.values() for name in members}
        ConfigError.raise_if(
            f"world_mesh: the axis {name} has {self.world_mesh[name].size()} ranks, but"
            " AutoPipeline does not know its meaning; name the axis in dp_axis_names or"
            " tp_axis_name"
            for name in sorted(others)
            if self.world_mesh[name].size() > 1
        )
        return sizes

    def _plan(self, model: nn.Module, sizes: Mapping[str, int], layers: int) -> Plan:
        """Return the plan for these settings, in the model's number format. The rules that
        translate recipes make the plan.
        """
        settings = {
            "pp_schedule": self.pp_schedule,
            "pp_schedule_csv": self.pp_schedule_csv,
            "pp_microbatch_size": self.pp_microbatch_size,
            "pp_batch_size": self.pp_batch_size,
            "module_fqns_per_model_part": self.module_fqns_per_model_part,
            **self.split,
        }
        mesh = {f"{axis}_size": size for axis, size in sizes.items()}
        section = {
            **mesh,
            "pipeline": {name: value for name, value in settings.items() if value is not None},
        }
        config = DIALECT.read(
            {"distributed": section, "model": {"config": {"num_hidden_layers": layers}}},
            None,
            (comm.rank_and_world() or (0, 1))[1],
        )
        prefixes = ("parallel.", "schedule.", "stages.")
        plan = {
            path: value
            for path, value in lift(config).values().items()
            if path.startswith(prefixes)
        }
        dtype = name_of(next(iter(model.parameters())).dtype, "model")
        formats = {f"precision.{name}": dtype for name in ("compute", "master", "reduce")}
        batch = {
            "batch.micro": self.pp_microbatch_size,
            "batch.accumulation": self.pp_batch_size // self.pp_microbatch_size,
        }
        return Plan.of(
            {**plan, **formats, **batch, **self._order(), "zero.stage": 0, "optimizer.name": "sgd"}
        )

    def _order(self) -> dict[str, str]:
        """Return the plan field with the order of axes in the mesh, fastest first. The result is
        empty if the mesh has only one axis.
        """
        places = {name: axis for axis, members in self.axes.items() for name in members}
        axes = [places[name] for name in reversed(self.world_mesh.mesh_dim_names) if name in places]
        return {"parallel.order": "-".join(dict.fromkeys(axes))} if len(set(axes)) > 1 else {}

    def _unheard(self, parallelize_fn: object, sizes: Mapping[str, int]) -> Iterator[Finding]:
        if parallelize_fn is not None:
            message = (
                "the engine does not call parallelize_fn, because the engine itself averages gradients"
                " over data ranks and splits layers over tensor ranks"
            )
            warnings.warn(f"AutoPipeline.build: {message}", stacklevel=3)
            yield Finding("parallelize_fn", message, Effect.COST, True)
        if (
            self.dtype is not None
            and name_of(self.dtype, "dtype") != self.engine.plan.precision.compute
        ):
            yield Finding(
                "dtype",
                "tensors between stages have the model's format",
                Effect.ROUNDING,
                True,
                before=str(self.dtype),
            )

    # What scripts ask for

    @property
    def info(self) -> PipelineInfo:
        """The result of `build`: the schedule, and the stages of this rank."""
        return self._info

    @property
    def parts(self) -> list[StageModules]:
        """The modules of each stage of this rank. Raises `BridgeError` before `build`."""
        if self._info.model_parts is None:
            raise BridgeError(
                "AutoPipeline: found no stages yet; call build(model, loss_fn=...) first"
            )
        return self._info.model_parts

    @property
    def device(self) -> torch.device:
        """Where stages compute."""
        return self._device

    def step(
        self,
        model_input: Any,
        *,
        target: Any = None,
        losses: list[Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run `info.schedule.step` with the same arguments. All ranks must call it."""
        _ = self.parts
        assert self._info.schedule is not None
        args = (model_input,) if self._info.has_first_stage else ()
        return self._info.schedule.step(*args, target=target, losses=losses, **kwargs)

    def update_seq_len(self, seq_len: int) -> None:
        """Does nothing, because the length of sequences may vary from batch to batch."""

    def list_stage_modules(self) -> list[list[str]]:
        """Return the names of all modules in each stage of this rank."""
        return [
            [name for name, _ in part.named_modules() if name]
            for part in self._info.model_parts or []
        ]

    def get_stage_param_counts(self, trainable_only: bool = False) -> list[int]:
        """Return the number of parameters in each stage of this rank."""
        return [_count_elements(part, trainable_only) for part in self._info.model_parts or []]

    def get_total_param_count(self, trainable_only: bool = False) -> int:
        """Return the number of parameters in all stages of this rank."""
        return sum(self.get_stage_param_counts(trainable_only))

    def pretty_print_stages(
        self, max_modules_per_stage: int = 16, trainable_only: bool = False
    ) -> str:
        """Return the stages of this rank, with the first modules of each, as text."""
        lines = []
        for stage, names in zip(self._info.stages or [], self.list_stage_modules(), strict=True):
            marks = [
                mark
                for mark, there in (("first", stage.is_first), ("last", stage.is_last))
                if there
            ]
            tag = f" ({','.join(marks)})" if marks else ""
            lines.append(
                f"Stage {stage.stage_index}{tag}: params={_count_elements(stage.submod, trainable_only):,}"
            )
            lines += [f"  - {name}" for name in names[:max_modules_per_stage]]
            lines += ["  - ..."] if len(names) > max_modules_per_stage else []
        return "\n".join(lines) or "<no stages>"

    def debug_summary(self) -> str:
        """Return the sizes and the schedule of this rank as text, one value on each line."""
        schedule = self._info.schedule
        return "\n".join(
            (
                f"PP degree: {self.pp_mesh.size()}",
                f"Local stages: {len(self._info.stages or [])}",
                f"Schedule: {schedule.name if schedule else None}",
                f"n_microbatches: {schedule.microbatches if schedule else None}",
                f"Total params: {self.get_total_param_count():,} (trainable: {self.get_total_param_count(True):,})",
            )
        )

    def log_debug_summary(self) -> None:
        """Log `debug_summary` and the stages."""
        logging.getLogger(__name__).info(
            "\n%s\n%s", self.debug_summary(), self.pretty_print_stages()
        )

    def visualize_current_schedule(self, filename: str | None = None) -> None:
        """Print the schedule as a table of actions, or write it to `filename` in the form that
        `pp_schedule_csv` reads.
        """
        _ = self.parts
        text = schedule_to_csv(self.engine.pipeline.schedule)
        if filename is None:
            print(text, end="", flush=True)
        elif self.engine.comm.rank == 0:
            write_text(filename, text)


def _count_elements(module: nn.Module, trainable_only: bool) -> int:
    return sum(
        weight.numel()
        for weight in module.parameters()
        if weight.requires_grad or not trainable_only
    )


def _check_model(model: nn.Module) -> None:
    if not is_hugging_face(model):
        raise ConfigError(
            f"AutoPipeline.build: found {type(model).__name__}, expected a model of Hugging Face"
        )
    if any(weight.is_meta for weight in model.parameters()):
        raise ConfigError(
            "AutoPipeline.build: the model has weights without values (meta); load it without"
            " init_empty_weights"
        )
