"""`MerakTrainer` over the native engine. Source: Merak/merak_trainer.py, utils/trainer_utils.py, utils/parameters.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bridge.engine
from bridge.checkpoint.folder_lock import remove_path
from bridge.engine import comm
from bridge.engine.formats import name_of
from bridge.engine.layers import Arguments, logits_in
from bridge.engine.optimizer import HYPER, Make, ParameterGroupSettings
from bridge.engine.own_rules import maker_of
from bridge.engine.runner import Engine
from bridge.errors import BridgeError, ConfigError
from bridge.layout.tensor import TensorPlan
from bridge.plan.plan import Plan
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from bridge.translation.lift import lift
from bridge.translation.translate import unheld
from compat.merak.dialect import DIALECT
from compat.merak.runtime.arguments import set_arguments, unread_arguments
from compat.merak.runtime.launch import RUN, sizes

__all__ = ["MerakTrainer"]
NO_LOADER: Any = None
LABELS, TAG = "labels", "iter_"
SCHEDULER = "scheduler"
OWN = ("run.", "optimizer.schedule.", "optimizer.decay_scope", "optimizer.weight_decay")
"""Plan fields that the trainer itself implements, as Merak's trainer does: length, schedule, and
the choice of weights that decay.
"""
RULED = tuple(f"optimizer.{name}" for name in ("name", "betas", "eps", "momentum"))
"""Plan fields that follow from the optimizer which `create_optimizer` returns."""
TIMED = ("run.timers", "run.log_interval")
"""Plan fields of the run that the engine carries out: it prints the time of each part of a step."""
MINE = (
    "args.learning_rate",
    "args.lr_scheduler",
    "args.warmup",
    "args.max_steps",
    "args.num_train_epochs",
    "args.eval_steps",
    "args.do_eval",
    "args.eval_strategy",
    "args.evaluation_strategy",
    "args.per_device_eval_batch_size",
)
"""Settings that the trainer reads although no plan field stands for them."""


HEADS = ("num_attention_heads", "all_head_size")
BERT = TensorPlan(
    columns=("query", "key", "value", "intermediate.dense"),
    rows=("output.dense",),
    attributes=HEADS,
)
LISTS: Mapping[str, TensorPlan] = {
    "bert": BERT,
    "vit": BERT,
    "t5": TensorPlan(
        columns=("Attention.q", "Attention.k", "Attention.v", "DenseReluDense.wi"),
        rows=("Attention.o", "DenseReluDense.wo"),
        weights=(("relative_attention_bias", 1),),
        attributes=("n_heads", "inner_dim"),
    ),
}
"""Merak's built-in lists for splitting models over tensor ranks, by model type. Source:
core/tensor_parallel/mp_mapping.py.
"""


def current_names(model: nn.Module, part: str) -> list[str]:
    """Return the current names of modules whose names in older releases of transformers contained
    `part`. transformers has a table of these names to read old checkpoints.
    """
    if find_spec("transformers.conversion_mapping") is None:
        return []  # what came with names of its own
    from transformers.conversion_mapping import get_model_conversion_mapping

    names: dict[str, None] = {}
    for row in get_model_conversion_mapping(model):  # type: ignore[arg-type]
        # Others make several weights of one.
        if len(row.source_patterns) == len(row.target_patterns):
            pairs = zip(row.source_patterns, row.target_patterns, strict=True)
            names.update({new: None for old, new in pairs if part in old})
    return list(names)


def _as_objects(model: nn.Module) -> bool:
    """Set the model's config so that the model returns objects, because current releases of
    transformers cannot work internally with tuples. Return whether the config asked for tuples.
    """
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    parts = [config for config in configs if hasattr(config, "return_dict")]
    tuples = any(part.return_dict is False for part in parts)
    for part in parts:
        part.return_dict = True
    return tuples


RULES: Mapping[type[torch.optim.Optimizer], str] = {
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.SGD: "sgd",
}
KERNELS = ("params", "foreach", "fused", "capturable", "differentiable", *HYPER)
"""What optimizers of the classes in `RULES` may set and the engine's do too, or only choose kernels."""


def _maker(optimizer: torch.optim.Optimizer) -> Make | None:
    """Return a function that makes optimizers like a script's own, or None if the engine's by the
    plan is alike. Raises `ConfigError` if the engine cannot run the optimizer.
    """
    kind = type(optimizer)
    usual = {"decoupled_weight_decay": kind is torch.optim.AdamW}
    if kind in RULES and not any(
        value and value != usual.get(name)
        for group in optimizer.param_groups
        for name, value in group.items()
        if name not in KERNELS
    ):
        return None
    parameters = signature(kind).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in parameters}
    return maker_of(kind, settings, "create_optimizer")


def _rule(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the plan values of a script's own optimizer of a class in `RULES`."""
    name, group = RULES[type(optimizer)], optimizer.param_groups[0]
    beside = (
        {"optimizer.betas": tuple(group["betas"]), "optimizer.eps": group["eps"]}
        if "betas" in group
        else {}
    )
    momentum = {"optimizer.momentum": group["momentum"]} if "momentum" in group else {}
    return {"optimizer.name": name, **beside, **momentum}


def _number(loader: Any) -> int:
    """Return the number of batches in a pass over the data; 0 if the loader does not know it."""
    try:
        return len(loader)
    except TypeError:
        return 0


class Sampler:
    """Draws the microbatches of one data rank. Each rank draws from a separate part of the data, in
    a random order that is the same in every epoch.
    """

    def __init__(self, samples: int, rows: int, rank: int, ranks: int) -> None:
        if samples < rows * ranks:
            raise ConfigError(
                f"train_dataset: found {samples} samples, expected at least {rows * ranks},"
                " the samples of a microbatch on all ranks"
            )
        self.samples, self.rows, self.rank = samples, rows, rank
        # Samples of a data rank: as many as make whole microbatches on every rank. The rest is
        # never drawn.
        self.bucket = samples // (rows * ranks) * rows

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator()
        generator.manual_seed(0)
        order = torch.randperm(self.bucket, generator=generator)
        for start in range(0, self.bucket, self.rows):
            yield [self.rank * self.bucket + int(row) for row in order[start : start + self.rows]]


class MerakTrainer:
    """Trains a model of Hugging Face over pipeline, tensor and data ranks.

    `engine` is the native engine, and `findings` lists its differences from Merak. Subclasses may
    override `get_loss_fn`, `prepare_data`, `create_optimizer`, `create_lr_scheduler` or
    `create_dataloader`. The argument `leaf_modules` has no effect, because the engine does not
    trace the model. Raises `ConfigError` for settings that the engine cannot run.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Callable[..., Any] | None = None,
        leaf_modules: Any = (),
    ) -> None:
        if model is None or args is None:
            raise ConfigError("MerakTrainer: found no model or no args; pass both")
        if train_dataset is None and eval_dataset is None:
            raise ConfigError("MerakTrainer: found no data; pass train_dataset or eval_dataset")
        self.model, self.args, self.train_dataset, self.eval_dataset = (
            model,
            args,
            train_dataset,
            eval_dataset,
        )
        self.collate_fn, self.train_dataloader = data_collator, NO_LOADER
        self.input_to_stage_dic = {
            0: [name for name in signature(model.forward).parameters if name != LABELS]
        }
        self._tuples = _as_objects(model)
        self._told: list[Finding] = []
        if leaf_modules:
            names = ", ".join(getattr(each, "__name__", str(each)) for each in leaf_modules)
            message = (
                f"the engine does not trace the model, so the leaf modules {names} have no effect"
            )
            self._told.append(Finding("leaf_modules", message, Effect.NONE, True))
        self.log_history: list[dict[str, float]] = []
        config = DIALECT.read(
            {"args": set_arguments(args), "init": sizes()},
            None,
            (comm.rank_and_world() or (0, 1))[1],
        )
        omissions = [one for one in unheld(config, blurred=True) if not one.path.startswith(MINE)]
        ConfigError.raise_if(
            f"{finding.path}: found {finding.before!r}; {finding.message}, and the engine does not run"
            " this setting; leave the setting out"
            for finding in omissions
            if finding.effect is Effect.NUMBERS
        )
        plan = lift(config)
        self.plan = Plan.of(
            {
                path: value
                for path, value in plan.values().items()
                if path in TIMED or not path.startswith(OWN)
            }
        )
        self.plan = Plan.of({**self.plan.values(), **self._formats()})
        self.max_steps = self._length()
        self.optimizer = self.create_optimizer(model)
        self._make = _maker(self.optimizer)
        rule = {} if self._make else _rule(self.optimizer)
        rest = {path: value for path, value in self.plan.values().items() if path not in RULED}
        self.plan = Plan.of({**rest, **rule})
        self.lr_scheduler = self.create_lr_scheduler(self.optimizer)
        self.loss_fn = self.get_loss_fn()
        self.engine = self._engine()
        lost_paths = {one.path for one in omissions}
        self._told += unread_arguments(args)
        self._told += (one for one in config.findings if one.given and one.path not in lost_paths)
        self.findings: tuple[Finding, ...] = (*omissions, *self._told, *self.engine.findings)

    # What a script overrides

    def get_loss_fn(self) -> Callable[[Any, Any], Tensor]:
        """Return a function that computes the loss from logits (rows, tokens, vocabulary) and
        labels (rows, tokens). The function does not shift the labels.
        """
        criterion = nn.CrossEntropyLoss()

        def loss_fn(outputs: Any, labels: Any) -> Tensor:
            logits, targets = (
                value[0] if isinstance(value, tuple) else value for value in (outputs, labels)
            )
            loss: Tensor = criterion(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))
            return loss

        return loss_fn

    def create_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW with two groups: weights that decay, and biases and LayerNorms, which do not
        decay. The engine reads the settings of the groups at every step.
        """
        if getattr(self.args, "adafactor", False):
            raise ConfigError("args.adafactor: the engine has no Adafactor; leave it out")
        norms = {
            id(weight)
            for part in model.modules()
            if isinstance(part, nn.LayerNorm)
            for weight in part.parameters(recurse=False)
        }
        without_decay = [
            name
            for name, weight in model.named_parameters()
            if id(weight) in norms or "bias" in name
        ]
        weights = {
            name: weight for name, weight in model.named_parameters() if weight.requires_grad
        }
        kinds = (
            [name for name in weights if name not in without_decay],
            [name for name in weights if name in without_decay],
        )
        decays = (self.args.weight_decay, 0.0)
        groups = [
            {"params": [weights[name] for name in names], "weight_decay": decay}
            for names, decay in zip(kinds, decays, strict=True)
            if names
        ]
        betas = (self.args.adam_beta1, self.args.adam_beta2)
        return torch.optim.AdamW(
            groups, lr=self.args.learning_rate, betas=betas, eps=self.args.adam_epsilon
        )

    def create_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the learning-rate scheduler that the arguments select, built by transformers."""
        from transformers import get_scheduler

        # As transformers did it until version 5, which Merak is written for.
        share = math.ceil(self.max_steps * (self.args.warmup_ratio or 0))
        kind, more = self.args.lr_scheduler_type, self.args.lr_scheduler_kwargs
        try:
            scheduler = get_scheduler(
                kind,
                optimizer=optimizer,
                num_warmup_steps=self.args.get_warmup_steps(self.max_steps) or share,
                num_training_steps=self.max_steps,
                scheduler_specific_kwargs=more or None,
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"args.lr_scheduler_kwargs: found {more}; transformers refuses it for {kind.value} ({error})"
            ) from error
        if (
            not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
            or "metrics" in signature(scheduler.step).parameters
        ):
            raise ConfigError(
                f"args.lr_scheduler_type: found {kind.value}, which needs a metric in each step, and"
                " Merak's engine passes none; use another"
            )
        return scheduler

    def prepare_data(self, data: Any) -> Any:
        """Split a batch into the model's arguments and the labels for the loss. A batch without
        names becomes a tuple whose last entry holds the labels; a batch with names becomes
        `Arguments`.
        """
        if not isinstance(data, Mapping):
            return tuple(data)
        if LABELS not in data and type(self).get_loss_fn is MerakTrainer.get_loss_fn:
            raise BridgeError(
                f"batch: found {', '.join(data)}, expected the key {LABELS} too; add it in"
                " the data collator"
            )
        targets = data.get(LABELS, torch.zeros(()))  # a loss of the script's own may need none
        return Arguments(
            (targets,), {name: value for name, value in data.items() if name != LABELS}
        )

    def get_train_sampler(self) -> Sampler:
        """Return the indices of this data rank's samples, microbatch by microbatch."""
        data = self.engine.data
        return Sampler(
            len(self.train_dataset), self.args.per_device_train_batch_size, data.index, data.size
        )

    def create_dataloader(self) -> None:
        """Set `train_dataloader`."""
        self.train_dataloader = torch.utils.data.DataLoader(
            self.train_dataset,
            batch_sampler=self.get_train_sampler(),
            num_workers=self.args.dataloader_num_workers,
            collate_fn=self.collate_fn,
        )

    # Running

    def train(self) -> None:
        """Train for the number of steps in the arguments. Evaluate and save at the intervals in the
        arguments.
        """
        if self.args.resume_from_checkpoint:
            self.load_checkpoint(self.args.resume_from_checkpoint)
        self.create_dataloader()
        if self.train_dataloader is None:
            raise BridgeError(
                "create_dataloader: the method did not set train_dataloader; set"
                " self.train_dataloader in it"
            )
        batches, interval = self._batches(), max(int(self.args.logging_steps), 1)
        # Passes over the data follow each other without regard to epochs or steps.
        draws, whole = self.steps * self.engine.accumulation, _number(self.train_dataloader)
        for _ in range(draws % whole if whole else draws):
            next(batches)
        while self.steps < self._epochs() * self._epoch_steps():
            rate = self.optimizer.param_groups[0]["lr"]
            loss = self.engine.train_batch(batches)
            self.optimizer.step()
            self.lr_scheduler.step()
            if self.steps % interval == 0:
                self._log(
                    {
                        "step": self.steps,
                        "loss": loss,
                        "grad_norm": self.engine.progress.grad_norm,
                        "learning_rate": rate,
                    }
                )
            whole = self.steps % self._epoch_steps() == 0
            if self.args.do_eval and whole:
                self.evaluation()
            if (
                self.args.output_dir
                and getattr(self.args, "save", False)
                and (whole or self.steps % self.args.save_steps == 0)
            ):
                self.save_checkpoint()

    def evaluation(self) -> float:
        """Return the mean loss over the first `eval_steps` batches (default: all). As in Merak,
        every rank runs all of these batches.
        """
        if self.eval_dataset is None:
            raise BridgeError("evaluation: found no eval_dataset; pass one to MerakTrainer")
        loader = torch.utils.data.DataLoader(
            self.eval_dataset, self.args.per_device_eval_batch_size, collate_fn=self.collate_fn
        )
        number, total = int(self.args.eval_steps or len(loader)), 0.0
        for batch, _ in zip(loader, range(number), strict=False):
            total += float(self._evaluate(self._prepare_batch(batch)))
        mean = total / min(number, len(loader))
        self._log({"step": self.steps, "eval_loss": mean})
        return mean

    evaluate = evaluation

    @torch.no_grad()
    def _evaluate(self, batch: Arguments) -> Tensor:
        training = self.engine.model.training
        self.engine.eval()
        try:
            output: Tensor = self.engine(*batch.given, **batch.named)
            return output
        finally:
            self.engine.train(training)

    def save_checkpoint(self, best_model: Any = None) -> Path:
        """Write a checkpoint of the native engine into `output_dir`. If `save_total_limit` is above
        0, delete the oldest checkpoints beyond that number.
        """
        if not self.args.output_dir:
            raise BridgeError("save_checkpoint: found no output_dir; set args.output_dir")
        state = {
            SCHEDULER: self.lr_scheduler.state_dict(),
            "rates": [group["lr"] for group in self.optimizer.param_groups],
        }
        path = self.engine.save_checkpoint(self.args.output_dir, f"{TAG}{self.steps:07d}", state)
        limit = self.args.save_total_limit or -1
        if self.engine.comm.rank == 0 and limit > 0:
            for old in sorted(path.parent.glob(f"{TAG}*"))[:-limit]:
                remove_path(old)
        return path

    def load_checkpoint(self, resume_from_checkpoint: str | Path, peft_config: Any = None) -> int:
        """Continue from `output_dir` of another run, or from one of its checkpoint folders. Return
        the number of finished steps.
        """
        if peft_config is not None:
            raise BridgeError(
                "load_checkpoint: found peft_config, which is not supported; wrap the model with"
                " peft before MerakTrainer"
            )
        ConfigError.raise_if(
            f"args.{name}: found True; the engine loads a checkpoint whole; leave it out"
            for name in ("finetune", "no_load_optim", "no_load_rng")
            if getattr(self.args, name)
        )
        path = Path(resume_from_checkpoint)
        place = (path.parent, path.name) if path.name.startswith(TAG) else (path, None)
        _, state = self.engine.load_checkpoint(*place)
        if SCHEDULER in state:
            self.lr_scheduler.load_state_dict(state[SCHEDULER])
            for group, rate in zip(self.optimizer.param_groups, state["rates"], strict=True):
                group["lr"] = rate
        return self.steps

    @property
    def steps(self) -> int:
        """Number of finished steps, including skipped steps."""
        return self.engine.progress.steps + self.engine.progress.skipped

    # Parts

    def _formats(self) -> dict[str, Any]:
        """Return the plan's number formats if the arguments ask for none: Merak then trains the
        model in the format that it has.
        """
        dtypes = {weight.dtype for weight in self.model.parameters() if weight.is_floating_point()}
        if self.plan.precision.compute != "fp32" or dtypes <= {torch.float32}:
            return {}
        if len(dtypes) > 1 or torch.float16 in dtypes:
            names = ", ".join(sorted(str(each) for each in dtypes))
            raise ConfigError(
                f"model: found weights in {names}; the engine trains one format, and fp16 with"
                " args.fp16 alone; convert the model, such as by model.float()"
            )
        name = name_of(dtypes.pop(), "model")
        paths = ("compute", "master", "reduce")
        formats = {f"precision.{path}": name for path in paths}
        return {**formats, "precision.moments": (name, name)}

    def _engine(self) -> Engine:
        own = {id(weight): name for name, weight in self.model.named_parameters()}
        groups = [
            ParameterGroupSettings(frozenset(own[id(each)] for each in group["params"]), group)
            for group in self.optimizer.param_groups
        ]
        loss_fn = self.loss_fn
        return bridge.engine.initialize(
            self.model,
            self.plan,
            lambda output, labels: loss_fn(self._loss_argument(output), labels),
            tensor_plan=self._lists() if (self.plan.parallel.tensor or 1) > 1 else None,
            groups=groups,
            seed=int(self.args.seed),
            variable_shapes=True,
            sample=self._sample(),
            optimizer=self._make,
        )

    def _sample(self) -> Arguments:
        """Return a batch of two samples. It is used to try a model that needs more inputs than
        tokens.
        """
        data = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        collate = self.collate_fn or torch.utils.data.default_collate
        return self._prepare_batch(collate([data[index] for index in range(min(2, len(data)))]))

    def _loss_argument(self, output: Any) -> Any:
        """Return the argument for the loss function: a tuple if the model's config asks for tuples,
        else the logits, or the first output if there are no logits.

        As in Merak, a tuple with a single output becomes this output
        (core/fx/graph_shard/split_module.py).
        """
        if self._tuples and hasattr(output, "to_tuple"):
            value = output.to_tuple()
            return value[0] if len(value) == 1 else value
        value = logits_in(output)
        return value.to_tuple() if hasattr(value, "to_tuple") else value

    def _lists(self) -> TensorPlan | None:
        """Return the script's lists for splitting the model over tensor ranks. If the script has
        none, return Merak's built-in lists for the model's type. Names in the lists are replaced by
        the current names of the model's modules. Return None if there are no lists; the engine then
        splits the model in its own way.

        With and without lists, the engine checks that the split model gives the same logits.
        """
        kind = getattr(getattr(self.model, "config", None), "model_type", "")
        lists = RUN.lists or LISTS.get(kind)
        if lists is None:
            return None
        modules = [name for name, _ in self.model.named_modules()]
        if any(name.endswith(("lora_A", "lora_B")) for name in modules):
            raise ConfigError(
                f"set_tp_layer_lists: found {type(self.model).__name__} with LoRA and tp"
                f" ({self.plan.parallel.tensor}); Merak's LoRA needs tp = 1; use init(tp=1)"
            )
        weights = [name for name, _ in self.model.named_parameters()]
        there = {name for part in self.model.modules() for name in vars(part)}
        columns = self._today("col_para_list", lists.columns, modules)
        rows = self._today("row_para_list", lists.rows, modules)
        attributes = tuple(name for name in lists.attributes if name in there)
        self._missing("tp_attr_list", [each for each in lists.attributes if each not in there])
        pairs = tuple(pair for pair in lists.weights if any(pair[0] in each for each in weights))
        missing = [pair[0] for pair in lists.weights if pair not in pairs]
        self._missing("weight_change_list", missing)
        if not (columns or rows or pairs or lists.shapes):
            return TensorPlan(whole=True)
        return replace(lists, columns=columns, rows=rows, attributes=attributes, weights=pairs)

    def _today(self, option: str, parts: Sequence[str], modules: Sequence[str]) -> tuple[str, ...]:
        """Return the entries of a list that occur in the names of the model's modules. If an entry
        occurs in no name, it is an old name of transformers, and the current names of the same
        modules replace it.
        """
        names: dict[str, None] = {}
        for part in parts:
            now = (
                [part] if any(part in name for name in modules) else current_names(self.model, part)
            )
            there = [each for each in now if any(each in name for name in modules)]
            if not there:
                self._missing(option, [part])
            names.update(dict.fromkeys(there))
        return tuple(names)

    def _missing(self, option: str, parts: Sequence[str]) -> None:
        """Add a finding for names in a list that the model does not have. Merak ignores such names
        too.
        """
        if parts and RUN.lists is not None:
            message = f"no module of {type(self.model).__name__} has {', '.join(parts)}"
            path = f"set_tp_layer_lists.{option}"
            self._told.append(
                Finding(path, f"{message}; this entry splits nothing", Effect.COST, True)
            )

    def _length(self) -> int:
        """Return the number of steps in the whole run, from the arguments or else from the size of
        the data.
        """
        steps = int(self.args.max_steps)
        if steps > 0 or self.train_dataset is None:
            return max(steps, 1)
        return self._epochs() * len(self.train_dataset) // self._samples()

    def _samples(self) -> int:
        return int(
            self.args.per_device_train_batch_size
            * self.args.gradient_accumulation_steps
            * sizes()["dp"]
        )

    def _epochs(self) -> int:
        whole: int = math.ceil(self.args.num_train_epochs)
        return whole

    def _epoch_steps(self) -> int:
        """Return the number of steps that Merak counts as an epoch: an equal share of all steps.
        With `max_steps` this number may be larger than the number of batches.
        """
        total, epochs = len(self.train_dataset) * self._epochs() // self._samples(), self._epochs()
        if self.args.max_steps > total:
            epochs = max(self.args.max_steps * self._samples() // len(self.train_dataset), 1)
        steps = self.max_steps // epochs
        if not steps:
            raise ConfigError(
                f"max_steps: found {self.max_steps} for {epochs} epochs, so that an epoch has"
                " no steps; set num_train_epochs to 1"
            )
        return int(steps)

    def _batches(self) -> Iterator[Arguments]:
        """Yield microbatches without end."""
        while True:
            for batch in self.train_dataloader:
                yield self._prepare_batch(batch)

    def _prepare_batch(self, batch: Any) -> Arguments:
        arguments = self.prepare_data(batch)
        return arguments if isinstance(arguments, Arguments) else Arguments(tuple(arguments), {})

    def _log(self, line: dict[str, float]) -> None:
        self.log_history.append(line)
        if self.engine.comm.rank == 0:
            print("  ".join(f"{name} {value:.6g}" for name, value in line.items()), flush=True)
