"""Scripts that use what DeepSpeed has beside `initialize`, run with DeepSpeed itself and with the drop-in."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bridge.errors import BridgeError
from tests.engine.dropin_scripts import config_of, module

LAYERS = (8, 16, 16, 4)
RULES = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}
}


def below(name: str, path: str) -> Any:
    """A module of DeepSpeed's."""
    return import_module(f"{'deepspeed' if name == 'deepspeed' else 'compat.deepspeed'}.{path}")


def layers() -> list[nn.Module]:
    """Layers with the same weights every time."""
    torch.manual_seed(5)
    return [
        nn.Linear(LAYERS[0], LAYERS[1]),
        nn.Tanh(),
        nn.Linear(LAYERS[1], LAYERS[2]),
        nn.Tanh(),
        nn.Linear(*LAYERS[2:]),
    ]


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a microbatch on a rank."""
    generator = torch.Generator().manual_seed(97 * step + rank)
    return torch.randn(2, LAYERS[0], generator=generator), torch.randn(
        2, LAYERS[-1], generator=generator
    )


def _step(engine: Any, rank: int, step: int, see: Any = lambda: None) -> list[float]:
    losses = []
    for micro in range(2):
        inputs, targets = batch_of(2 * step + micro, rank)
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        if micro == 1:
            see()
        engine.step()
        losses.append(float(loss))
    return losses


def asked(rank: int, world: int, name: str, level: int) -> dict[str, Any]:
    """What a script reads and writes of parameters, gradients and moments while it trains."""
    deepspeed, utils, zero = module(name), below(name, "utils"), module(name).zero
    os.environ["LOCAL_RANK"] = str(rank)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=nn.Sequential(*layers()), config=config_of(level, **RULES)
    )
    weights, seen = list(engine.module.parameters()), dict[str, Any]()

    def see() -> None:
        seen["gradients"] = [utils.safe_get_full_grad(weight).tolist() for weight in weights]

    seen["first"] = _step(engine, rank, 0, see)
    seen["masters"] = [utils.safe_get_full_fp32_param(weight).tolist() for weight in weights]
    moments = {
        key: [utils.safe_get_full_optimizer_state(weight, key) for weight in weights]
        for key in ("exp_avg", "exp_avg_sq")
    }
    seen["moments"] = {key: [value.tolist() for value in values] for key, values in moments.items()}

    def halve() -> None:
        utils.safe_set_full_fp32_param(weights[0], utils.safe_get_full_fp32_param(weights[0]) * 0.5)
        utils.safe_set_full_optimizer_state(weights[2], torch.ones(LAYERS[2], LAYERS[1]), "exp_avg")
        utils.safe_set_full_grad(weights[4], utils.safe_get_full_grad(weights[4]) * 0.5)

    seen["second"] = _step(engine, rank, 1, halve)
    if level == 3:
        with zero.GatheredParameters([weights[2], weights[3]], modifier_rank=0):
            seen["whole"] = weights[3].detach().tolist()
            if rank == 0:
                weights[3].data.mul_(3)
        with zero.GatheredParameters(weights[3]):
            seen["changed"] = weights[3].detach().tolist()
        seen["facts"] = [(tuple(weight.ds_shape), weight.ds_numel) for weight in weights]
        whole = engine._zero3_consolidated_16bit_state_dict()
        seen["state"] = (
            None if whole is None else {key: value.tolist() for key, value in whole.items()}
        )
    for group in optimizer.param_groups:
        group["lr"] = 0.002
    seen["third"] = _step(engine, rank, 2)
    seen["module"] = (
        isinstance(engine, nn.Module),
        [key for key, _ in engine.named_parameters()],
        engine.training,
    )
    engine.eval()
    if level < 3:  # where DeepSpeed forgets at the next step what `GatheredParameters` changed
        seen["evaluated"] = (engine.module.training, engine(batch_of(0, rank)[0]).tolist())
    seen["asked"] = (
        engine.get_lr(),
        engine.optimizer_name(),
        engine.zero_gather_16bit_weights_on_model_save(),
    )
    return seen


def said(rank: int, world: int, name: str, folder: Path) -> dict[str, Any]:
    """What modules beside the engine answer."""
    deepspeed, dist, utils = module(name), below(name, "comm"), below(name, "utils")
    accelerator = below(name, "accelerator").get_accelerator()
    os.environ["LOCAL_RANK"] = str(rank)
    deepspeed.init_distributed("gloo")
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    parts = [torch.zeros(1) for _ in range(world)]
    dist.all_gather(parts, total * (rank + 1))
    whole = torch.zeros(world)
    dist.all_gather_into_tensor(whole, total + rank)
    dist.barrier()
    names = (
        "is_synchronized_device",
        "device_name",
        "current_device_name",
        "is_available",
        "is_bf16_supported",
        "device_count",
    )
    loader = utils.RepeatingLoader([1, 2])
    checkpointing = below(name, "checkpointing") if name != "deepspeed" else deepspeed.checkpointing
    weight = torch.ones(3, requires_grad=True)
    checkpointing.checkpoint(
        lambda value: (value * weight).sin(), torch.ones(3, requires_grad=True)
    ).sum().backward()
    config = folder / f"{name}{rank}.json"
    config.write_text(
        '{"train_batch_size": 8, "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW"}}'
    )
    read = deepspeed.DeepSpeedConfig(str(config))
    model = nn.Linear(2, 2)
    return {
        "ranks": (
            dist.get_rank(),
            dist.get_world_size(),
            dist.get_local_rank(),
            dist.is_initialized(),
        ),
        "values": (float(total), [float(part) for part in parts], whole.tolist()),
        "accelerator": [getattr(accelerator, each)() for each in names]
        + [accelerator.on_accelerator(total)],
        "backend": accelerator.communication_backend_name() in ("gloo", "ccl"),
        "repeated": [next(loader) for _ in range(5)],
        "gradient": weight.grad.tolist() if weight.grad is not None else None,
        "config": (
            read.train_batch_size,
            read.train_micro_batch_size_per_gpu,
            read.gradient_accumulation_steps,
            read.optimizer_name,
        ),
        "zero": (read.zero_enabled, read.zero_optimization_stage, read.gradient_clipping),
        "copied": {
            key: value.tolist() == model.state_dict()[key].tolist()
            for key, value in _cloned(name, model).items()
        },
        "schedules": below(name, "runtime.lr_schedules").VALID_LR_SCHEDULES,
        "moved": [
            type(item).__name__
            for item in below(name, "runtime.utils").move_to_device(
                [total, (total, {"a": total})], "cpu", torch.is_tensor
            )
        ],
    }


def _cloned(name: str, model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = below(name, "checkpoint.utils").clone_tensors_for_torch_save(
        model.state_dict()
    )
    return found


class Scaled(nn.Module):
    """A weight that two layers share."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size, size), 0.1) + torch.eye(size))

    def forward(self, inputs: Tensor) -> Tensor:
        """Rows times the weight."""
        return inputs @ self.weight


def _back(module: Any, inputs: Tensor) -> Tensor:
    found: Tensor = inputs @ module.weight.T
    return found


def piped(rank: int, world: int, name: str, stages: int) -> dict[str, Any]:
    """A pipeline of specs, ties and a function: mean losses of its steps."""
    deepspeed, pipe = module(name), below(name, "pipe")
    os.environ["LOCAL_RANK"] = str(rank)
    size, made = LAYERS[0], layers()
    specs = [
        pipe.TiedLayerSpec("ends", Scaled, size),
        *made[:2],
        made[2],
        torch.tanh,
        pipe.LayerSpec(_Seeded, LAYERS[2], size),
        pipe.TiedLayerSpec("ends", Scaled, size, forward_fn=_back),
    ]
    model = pipe.PipelineModule(
        specs, num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform"
    )
    config = config_of(0, gradient_clipping=0, **RULES)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    group = rank // stages if name == "deepspeed" else engine.native.data.index
    losses = []
    for step in range(3):
        batches = [batch_of(2 * step + micro, group) for micro in range(2)]
        losses.append(
            float(engine.train_batch(iter([(inputs, inputs.roll(1, 1)) for inputs, _ in batches])))
        )
    return {"losses": losses, "steps": engine.global_steps, "lr": engine.get_lr()}


class _Seeded(nn.Linear):
    """A layer that begins alike wherever it is made."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-0.3, 0.3, inputs * outputs).view(outputs, inputs))
            self.bias.zero_()


def early(rank: int, world: int) -> tuple[Any, ...]:
    """With the drop-in: what a model made within `zero.Init` holds after one rank loaded it, and a step that ends early."""
    import compat.deepspeed as deepspeed

    torch.manual_seed(rank)
    with deepspeed.zero.Init():
        model = nn.Sequential(nn.Linear(2, 2, bias=False))
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=1):
        if rank == 1:
            model[0].weight.data.fill_(4)
    loaded = model[0].weight.detach().tolist()
    config = {
        **config_of(1, gradient_accumulation_steps=3),
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0,
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    return (
        loaded,
        engine.module[0].weight.detach().tolist(),
        engine.global_steps,
        engine.was_step_applied(),
    )


def refused(rank: int, world: int) -> list[str]:
    """With the drop-in at level 3: calls that would see weights that are not whole."""
    import compat.deepspeed as deepspeed
    from bridge.errors import BridgeError

    engine = deepspeed.initialize(model=nn.Sequential(*layers()), config=config_of(3, **RULES))[0]
    inputs, found = batch_of(0, rank)[0], []
    calls = (
        lambda: engine.module(inputs),
        lambda: engine.module[0](inputs),
        engine.module.state_dict,
        lambda: engine.module_state_dict()["0.weight"].tolist(),
        engine.half,
        lambda: engine.load_module_state_dict({"0.weight": torch.ones(1)}),
        lambda: engine.compile(),
    )
    for call in calls:
        try:
            found.append(str(call()))
        except BridgeError as error:
            found.append(str(error))
    engine.eval()
    with torch.no_grad():
        found.append(str(bool(torch.equal(engine.module(inputs), engine(inputs)))))
    engine.load_module_state_dict(
        {key: value * 0 + 2 for key, value in engine.module_state_dict().items()}
    )
    found.append(str({float(value.mean()) for value in engine.module_state_dict().values()}))

    def save_pretrained() -> str:
        return str(engine.module.state_dict())

    try:
        found.append(save_pretrained())
    except BridgeError as error:
        found.append(str(error))
    return found


def around(rank: int, world: int, name: str, config: dict[str, Any], folder: Path) -> list[Any]:
    """What a script reads of gradients, norms and counters before and after a checkpoint is loaded, whole, without the
    optimizer, and as weights alone; `refused` where reading is an error.
    """
    if name == "deepspeed" and not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    deepspeed, utils = module(name), below(name, "utils")
    os.environ["LOCAL_RANK"] = str(rank)
    seen = list[Any]()

    def start() -> Any:
        model = nn.Sequential(*layers())
        return deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=dict(config)
        )[0]

    def gradient() -> Any:
        try:
            found = utils.safe_get_full_grad(engine.module[0].weight)
        except (BridgeError, ValueError):
            return "refused"
        return None if found is None else found.float().tolist()

    def read() -> None:
        norm = engine.get_global_grad_norm()
        seen.append((None if norm is None else float(norm), engine.micro_steps, engine.get_lr()))

    def train(step: int) -> None:
        for micro in range(2):
            inputs, targets = batch_of(2 * step + micro, rank)
            output = engine(inputs.to(next(engine.module.parameters()).dtype))
            loss = nn.functional.mse_loss(output.float(), targets)
            engine.backward(loss)
            if micro:
                seen.append(gradient())
            engine.step()
            seen.append(float(loss.detach()))
        master = utils.safe_get_full_fp32_param(engine.module[0].weight)
        seen.append(None if master is None else master.tolist())

    engine = start()
    read()
    train(0)
    if engine.zero_optimization_stage() in (
        1,
        2,
    ):  # at ZeRO 3 DeepSpeed shows those of the last step
        seen.append(gradient())
    read()
    engine.save_checkpoint(str(folder))
    ways: tuple[dict[str, bool], ...] = ({}, {"load_optimizer_states": False})
    if engine.zero_optimization_stage() < 3:  # where DeepSpeed itself loads nothing
        ways += ({"load_module_only": True},)
    for way in ways:
        engine = start()
        engine.load_checkpoint(str(folder), **way)
        read()
        for step in (1, 2):
            train(step)
        read()
    return seen
