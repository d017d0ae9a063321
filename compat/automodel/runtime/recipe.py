"""Runs recipes on the native engine: the model, optimizer, schedule and data that a recipe names.
Source: recipes/llm/train_ft.py.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bridge.engine
from bridge.engine import comm
from bridge.engine.environment import detect
from bridge.engine.fields import accumulation_of, check
from bridge.engine.layers import logits_in
from bridge.engine.optimizer import Make
from bridge.engine.own_rules import maker_of
from bridge.engine.runner import Engine
from bridge.engine.training import Report, report_of_step
from bridge.errors import ConfigError
from bridge.files import writable
from bridge.layout.mesh import Mesh
from bridge.plan.plan import Plan
from bridge.stack.dialect import Config
from bridge.stack.findings import Finding
from bridge.stack.rules import Effect
from bridge.translation.lift import lift
from bridge.translation.translate import unheld
from compat.automodel.dialect import DIALECT
from compat.automodel.rules.optimizers import NAMES, SWITCHES
from compat.automodel.rules.table import ENTROPIES
from compat.automodel.runtime import built
from compat.automodel.runtime.adapters import add_adapters
from compat.automodel.runtime.datasets import dataset
from compat.automodel.runtime.formatting import IGNORED
from compat.automodel.runtime.loader import Loader, count_labels, microbatches
from compat.automodel.runtime.sections import TARGET, Section, only, recipe, section, target

CLASSES = ("TrainFinetuneRecipeForNextTokenPrediction",)
SEED, EPOCHS = 42, 10
"""AutoModel's defaults for the seed and for the number of epochs."""
HEARD = (
    "recipe",
    "model",
    "dataset",
    "dataloader",
    "validation_dataset",
    "validation_dataloader",
    "loss_fn",
    "peft",
    "rng",
    "seed",
)
STEPS = ("step_scheduler", "checkpoint", "packed_sequence", "compile", "ci", "wandb", "dist_env")
"""Sections that this module reads. The functions that read them also report unknown settings."""
PLANNED, KERNELS = ("AdamW", "Adam", "SGD"), ("foreach", "fused")
"""Torch's optimizers that the engine makes by the plan, and arguments of all of them that only
choose kernels.
"""
MADE = ("name", "betas", "eps", "momentum", *SWITCHES)
"""Plan fields that the optimizer of a recipe has of its own."""
CONSOLIDATED: Mapping[Any, str] = {True: "every", False: "false", None: "final"}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean validation loss per label, over all ranks."""

    step: int
    val_loss: float

    def __str__(self) -> str:
        return f"step {self.step}  val loss {self.val_loss:.4f}"

    def fields(self) -> dict[str, float | int]:
        """Return the values as a dictionary for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Saved:
    """The event that a checkpoint has been written."""

    step: int
    saved: str

    def __str__(self) -> str:
        return f"step {self.step}  saved {self.saved}"

    def fields(self) -> dict[str, Any]:
        """Return the values as a dictionary for JSON."""
        return asdict(self)


Line = Report | Evaluation | Saved


@dataclass
class Recipe:
    """An engine with the data of a recipe. `length` is the number of steps in the whole run."""

    engine: Engine
    loader: Loader
    validation: Loader | None
    settings: Section
    length: int
    findings: tuple[Finding, ...]
    tokenizer: Any = None

    @classmethod
    def of(
        cls,
        config: Config,
        world: int,
        planned: Callable[[Plan], Plan] = lambda plan: plan,
        timeout: float | None = None,
        **watch: Any,
    ) -> Recipe:
        """Build the model, data and engine that `config` names.

        `planned` adds command-line options to the plan. `timeout`, in seconds, overrides the
        timeout of the recipe. `watch` has further arguments of `initialize`. Raises `BridgeError`
        if a file or class does not exist, or if the engine cannot run the recipe.
        """
        settings = recipe(config)
        _check_settings(settings)
        plan = lift(config)
        mesh = Mesh.of(plan.parallel, world)
        seed = plan.run.seed if plan.run.seed is not None else SEED
        model, dtype, remarks = built.model(section(settings, "model"), seed)
        rank = (comm.rank_and_world() or (detect().rank, 0))[0]
        place, has_pipeline = (
            (mesh.coordinate(rank, "data"), mesh.sizes["data"]),
            mesh.sizes["pipeline"] > 1,
        )
        words = _Words(section(settings, "model"))
        loader = _build_loader(settings, "dataset", "dataloader", place, seed, has_pipeline, words)
        validation = _build_loader(
            settings,
            "validation_dataset",
            "validation_dataloader",
            place,
            seed,
            has_pipeline,
            words,
        )
        assert loader is not None
        length = _count_steps(settings, loader)
        make = _optimizer_maker(settings)
        plan = planned(_complete_plan(config, dtype, length, make))
        model, adapters = add_adapters(model, section(settings, "peft"))
        compilation = section(settings, "compile")
        read = (*HEARD, *STEPS, *(("optimizer",) if make else ()))
        findings = (*_find_unheard(config, settings, read), *remarks, *adapters)
        ConfigError.raise_if(
            f"{finding.path}: found {finding.before!r}; {finding.message}; use another value, leave it out,"
            " or use --model tiny"
            for finding in findings
            if finding.effect is Effect.NUMBERS
        )
        check(plan, world)
        if compilation.get("enabled"):
            findings = (
                *findings,
                Finding("compile", "blocks run without compilation", Effect.COST, True),
            )
        minutes = section(settings, "dist_env").get("timeout_minutes")
        if minutes and timeout is None and comm.rank_and_world() is None:
            comm.patient(None, minutes * 60)
        upcast = section(settings, "loss_fn").get("fp32_upcast") is not False
        engine = bridge.engine.initialize(
            model,
            plan,
            partial(loss, upcast=upcast),
            seed=seed,
            variable_shapes=True,
            optimizer=make,
            **watch,
        )
        return cls(
            engine, loader, validation, settings, length, (*findings, *engine.findings), words.found
        )

    def steps(self, number: int | None = None) -> Iterator[Line]:
        """Train until `number` steps are done in total, including steps before a resume. By default
        `number` comes from the recipe. Yield the result of each step, validation and checkpoint.

        Validates and saves when the recipe says so.
        """
        number = self.length if number is None else number
        while self.steps_so_far < number:
            before = self.steps_so_far
            yield from self._epoch(self.steps_so_far // self.epoch_steps, number)
            if self.steps_so_far == before:
                raise ConfigError(
                    "step_scheduler: an epoch has no batch; use a smaller local_batch_size, or"
                    " more data"
                )

    @property
    def steps_so_far(self) -> int:
        """Number of finished steps, including steps without an update because of an overflow."""
        return self.engine.progress.steps + self.engine.progress.skipped

    @property
    def epoch_steps(self) -> int:
        """Number of steps in an epoch. The last step may have fewer batches."""
        return _epoch_steps(self.settings, self.loader)

    def _epoch(self, epoch: int, number: int) -> Iterator[Line]:
        passes = _count_passes(self.settings, self.loader)
        first = self.steps_so_far % self.epoch_steps
        batches = self.loader.epoch(epoch, first * passes)
        for _ in range(first, self.epoch_steps):
            group = list(islice(batches, passes))
            yield self._step(group)
            yield from self._after(epoch, number)
            if self.steps_so_far >= number:
                return

    def _step(self, batches: list[dict[str, Tensor]]) -> Report:
        engine, start = self.engine, time.perf_counter()
        rows = engine.plan.batch.micro or 1
        engine.train_batch(iter(microbatches(batches, rows, engine.accumulation)))
        seconds = time.perf_counter() - start
        tokens = sum(batch["input_ids"].numel() for batch in batches) * engine.data.size
        every = section(self.settings, "step_scheduler").get("gc_every_steps")
        if every and self.steps_so_far % every == 0:
            gc.collect()
        return report_of_step(engine, self.steps_so_far, tokens / seconds)

    def _after(self, epoch: int, number: int) -> Iterator[Line]:
        """Validate and save if the recipe says so for this step."""
        scheduler, step = section(self.settings, "step_scheduler"), self.steps_so_far
        last, whole = step >= number, step % self.epoch_steps == 0
        each = scheduler.get("ckpt_every_steps")
        saves = (
            last
            or bool(each and step % each == 0)
            or (whole and scheduler.get("save_checkpoint_every_epoch", True))
        )
        every = scheduler.get("val_every_steps")
        if self.validation is not None and (saves or (every and step % every == 0)):
            yield Evaluation(step, self.validate_on(self.validation))
        if saves and section(self.settings, "checkpoint").get("enabled"):
            yield Saved(step, str(self.save(epoch, last)))

    def validate_on(self, loader: Loader) -> float:
        """Return the mean loss per label, over all batches of `loader` and over all ranks."""
        engine, rows = self.engine, self.engine.plan.batch.micro or 1
        # The sum of losses and the number of labels, in fp64: batches have different numbers of
        # labels.
        totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
        for batch in loader.epoch(0):
            for each in microbatches([batch], rows, 0):
                count = count_labels(each.given[0])
                totals += torch.tensor(
                    [float(engine.eval_batch(each)) * count, count], device=engine.device
                )
        engine.comm.all_reduce("validation", totals, engine.data)()
        return float(totals[0] / totals[1])

    def save(self, epoch: int, last: bool) -> Path:
        """Write a checkpoint of the native engine into the recipe's folder, and also the model in
        Hugging Face's format if the recipe says so.
        """
        checkpoint = section(self.settings, "checkpoint")
        place = writable(str(checkpoint.get("checkpoint_dir", "checkpoints/")))
        # AutoModel numbers steps from 0, and names a checkpoint after the step that was done last.
        tag = f"epoch_{epoch}_step_{self.steps_so_far - 1}"
        path = self.engine.save_checkpoint(place, tag)
        mode = checkpoint.get("save_consolidated")
        mode = CONSOLIDATED.get(mode, mode)
        if checkpoint.get("model_save_format", "safetensors") == "safetensors" and (
            mode == "every" or (mode == "final" and last)
        ):
            self._consolidate(place / f"{tag}_consolidated")
        return path

    def _consolidate(self, place: Path) -> None:
        """Write the whole model and its tokenizer, on the first rank."""
        model: Any = self.engine.model
        first, state = self.engine.comm.rank == 0, {}
        # Every rank takes part in gathering a weight; only the first keeps it, on the CPU.
        for name, weight in self.engine.state_dict():
            if first:
                state[name] = weight.detach().to("cpu", copy=True)
        if first:
            model.save_pretrained(place, state_dict=state)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(place)


def open_recipe(config: Config, world: int, **watch: Any) -> Recipe:
    """Make the recipe in `config` ready to run. The command `train` calls this function."""
    return Recipe.of(config, world, **watch)


def loss(output: Any, labels: Tensor, upcast: bool = True) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropy over all labels that are not ignored, and the number of
    these labels. With `upcast`, the cross entropy of logits in half precision is computed in fp32.
    """
    logits: Tensor = logits_in(output)
    half = logits.dtype in (torch.bfloat16, torch.float16)
    logits = logits.float() if upcast and half else logits
    total = nn.functional.cross_entropy(
        logits.reshape(-1, logits.size(-1)),
        labels.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )
    return total, (labels != IGNORED).sum()


class _Words:
    """Loads tokenizers for a recipe's data on demand, and remembers the first one."""

    def __init__(self, model: Section) -> None:
        self.model, self.found = model, None

    def of(self, data: Section, path: str) -> Any:
        """Return the tokenizer of a data set. If the section of the data set names none, it is the
        model's tokenizer.
        """
        tokenizer = built.tokenizer(self.model, data, path)
        self.found = self.found or tokenizer
        return tokenizer


def _build_loader(
    settings: Section,
    data: str,
    loading: str,
    place: tuple[int, int],
    seed: int,
    has_pipeline: bool,
    words: _Words,
) -> Loader | None:
    options = section(settings, data)
    if not options:
        return None
    samples = dataset(options, data, lambda: words.of(options, data), seed)
    how = section(settings, loading)
    rows = section(settings, "step_scheduler").get("local_batch_size") or 1
    if loading != "dataloader":
        rows = how.get("batch_size") or rows
    elif how.get("batch_size") not in (None, rows):
        raise ConfigError(
            f"dataloader.batch_size: found {how['batch_size']} with step_scheduler.local_batch_size"
            f" {rows}; a step is counted by the latter; leave batch_size out"
        )
    return Loader.of(samples, how, loading, rows, place, seed, has_pipeline)


def _check_settings(settings: Section) -> None:
    """Raise `ConfigError` if the recipe has a class, a loss or a packing of samples that the native
    engine cannot run.
    """
    if "recipe" in settings:
        kind = settings["recipe"]
        target({TARGET: kind if isinstance(kind, str) else kind.get(TARGET)}, "recipe", CLASSES)
    entropy = section(settings, "loss_fn")
    target(entropy, "loss_fn", ENTROPIES)
    only(entropy, "loss_fn", ("fp32_upcast", "reduction"))
    if entropy.get("reduction", "sum") != "sum":
        raise ConfigError(
            f"loss_fn.reduction: found {entropy['reduction']!r}; recipes divide the sum of a step by"
            " its tokens, and AutoModel refuses another reduction; use sum"
        )
    size = section(settings, "packed_sequence").get("packed_sequence_size")
    if size:
        raise ConfigError(
            f"packed_sequence.packed_sequence_size: found {size}, but samples cannot be packed"
            " here; set it to 0"
        )


def _count_passes(settings: Section, loader: Loader) -> int:
    """Return the number of batches that one rank reads in a step."""
    scheduler = section(settings, "step_scheduler")
    local = scheduler.get("local_batch_size") or 1
    return max(
        1, (scheduler.get("global_batch_size") or local * loader.ranks) // (local * loader.ranks)
    )


def _epoch_steps(settings: Section, loader: Loader) -> int:
    return -(-loader.batches // _count_passes(settings, loader))


def _count_steps(settings: Section, loader: Loader) -> int:
    """Return the number of steps in the run: the steps of all epochs, or `max_steps` if that is
    smaller.
    """
    scheduler, epoch = section(settings, "step_scheduler"), _epoch_steps(settings, loader)
    most, epochs = scheduler.get("max_steps"), scheduler.get("num_epochs")
    if not epoch:
        raise ConfigError(
            f"dataset: found {len(loader.samples)} samples, fewer than a batch of every rank ({loader.rows} x {loader.ranks});"
            " use more data, or a smaller step_scheduler.local_batch_size"
        )
    epochs = epochs or (-(-most // epoch) if most else EPOCHS)
    steps = epochs * epoch
    return int(min(steps, most) if most else steps)


def _optimizer_maker(settings: Section) -> Make | None:
    """Return a function that makes the recipe's optimizer if it is one of torch's, or has settings
    of torch's, that no plan holds. Otherwise the engine makes the optimizer of the plan.
    """
    options = dict(section(settings, "optimizer"))
    name = str(options.pop(TARGET, None))
    module, _, short = name.rpartition(".")
    more = any(value for key, value in options.items() if key not in (*NAMES, *KERNELS))
    if module != "torch.optim" or (short in PLANNED and not more):
        return None
    if "param_group_overrides" in options:
        raise ConfigError(
            f"optimizer.param_group_overrides: found with {name}; groups are run with"
            f" torch.optim.{', '.join(PLANNED)} alone; leave it out"
        )
    return maker_of(
        getattr(torch.optim, short, type(short, (), {})), options, f"optimizer.{TARGET}"
    )


def _complete_plan(config: Config, dtype: str, length: int, make: Make | None) -> Plan:
    """Return the plan of the recipe. Its length, number format and batch sizes are completed from
    the data and the model. The plan says nothing of an optimizer that `make` makes but its rate.
    """
    weight = nn.Parameter(torch.zeros(()))
    usual = make([{"params": [weight]}]).defaults if make else {}
    usual = {f"optimizer.{name}": usual[name] for name in ("lr", "weight_decay") if name in usual}
    whole = DIALECT.config(
        {**usual, **config.given, "step_scheduler.max_steps": length},
        config.version,
        config.world_size,
        config.entry,
    )
    values = {
        path: value
        for path, value in lift(whole).values().items()
        if not path.startswith(("model.", "adapters."))
        and not (make and path.removeprefix("optimizer.") in MADE)
    }
    formats = {
        "precision.master": dtype,
        "precision.compute": values.get("precision.compute") or dtype,
    }
    plan = Plan.of({**values, **{path: values.get(path, value) for path, value in formats.items()}})
    local = config.given.get("step_scheduler.local_batch_size") or 1
    micro = plan.batch.micro or local
    data = plan.parallel.data or config.world_size or 1
    passes = max(1, (plan.batch.global_ or local * data) // (local * data))
    sizes = {"batch.micro": micro, "batch.accumulation": passes * -(-local // micro)}
    plan = Plan.of(
        {
            **{path: value for path, value in plan.values().items() if path != "batch.global_"},
            **sizes,
        }
    )
    accumulation_of(plan, data)
    return plan


def _find_unheard(config: Config, settings: Section, read: Collection[str]) -> Iterator[Finding]:
    """Yield a finding for each setting of the recipe that has no effect on this run. This module
    reads the sections `read` itself.
    """
    for finding in unheld(config, blurred=True):
        head = finding.path.partition(".")[0]
        if head not in read:
            yield finding
    yield from _find_unread(
        settings, "rng", ("seed", "ranked"), "random numbers come from the engine's own generators"
    )
    if section(settings, "rng").get("ranked") is False:
        yield Finding(
            "rng.ranked",
            "each microbatch draws its own random numbers",
            Effect.ROUNDING,
            True,
            before=False,
        )
    yield from _find_unread(
        settings,
        "checkpoint",
        ("enabled", "checkpoint_dir", "model_save_format", "save_consolidated"),
        _FORMS,
    )
    if section(settings, "checkpoint").get("model_save_format", "safetensors") != "safetensors":
        yield Finding(
            "checkpoint.model_save_format", _FORMS, Effect.NONE, True, before="torch_save"
        )
    yield from _find_unread(
        settings, "step_scheduler", _SCHEDULER, "the engine does not have this setting"
    )
    for name in ("ci", "wandb"):
        if section(settings, name):
            yield Finding(name, "nothing here reads it", Effect.NONE, True)
    for name in ("use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"):
        if name in section(settings, "lr_scheduler"):
            message = "a resumed run follows the recipe's schedule, not the checkpoint's"
            yield Finding(f"lr_scheduler.{name}", message, Effect.NONE, True)
    backend = section(settings, "dist_env").get("backend")
    own = "nccl" if torch.cuda.is_available() else "gloo"
    if backend not in (None, own):
        yield Finding(
            "dist_env.backend",
            f"the backend follows from the device: {own}",
            Effect.COST,
            True,
            before=backend,
        )


_FORMS = "checkpoints are those of the native engine"
_SCHEDULER = (
    "global_batch_size",
    "local_batch_size",
    "num_epochs",
    "max_steps",
    "ckpt_every_steps",
    "save_checkpoint_every_epoch",
    "val_every_steps",
    "gc_every_steps",
)


def _find_unread(
    settings: Section, name: str, names: Iterable[str], message: str
) -> Iterator[Finding]:
    for key, value in section(settings, name).items():
        if key not in names and key != TARGET:
            yield Finding(f"{name}.{key}", message, Effect.NONE, True, before=value)
