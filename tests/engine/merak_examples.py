"""Merak's own examples, made small, run five steps with the native engine: only the import differs.

`python -m tests.engine.merak_examples FOLDER [NAME ...]` takes the folder `examples` of Merak's source. Models are as small as
`SIZES` and `MORE` say, with random weights and five steps; everything else stays as the script has it: its ranks, its lists for
tensor ranks, its loss, its data set. What a script sets by Merak's names is counted by use: the arguments of `init`,
`set_tp_layer_lists`, `DynamicGenDataset`, and of the trainer beside its model and data; what it assigns to the arguments; and the
methods of the trainer that it overrides. Each use is held to what is seen of the run: axes by the engine's groups, lists by the
weights that are split and the numbers that are divided, data by samples, methods by whether they ran, assignments by the plan. A
use that the trainer's findings name is counted as such. A model's config is transformers' own and is not counted.

Where a model does not run as its script wants, the same script runs on data ranks alone, and its pipeline and tensor ranks do not
count as heard. Scripts that do not run with Merak itself, or import what transformers no longer has, are counted apart.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bridge.translation.lift import lift
from tests.engine.merak_runs import flagged
from tests.engine.pool import Pool, RankError
from tests.engine.uses import WANTED, Use, different, other, table

STEPS = 5
LARGEST = 8_000_000
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 32
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
            "num_decoder_layers",
        ),
        4,
    ),
    **dict.fromkeys(("l_layers", "x_layers", "r_layers"), 2),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(
        ("attention_heads", "num_key_value_heads", "rotary_dim", "num_conv_pos_embedding_groups"), 4
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
        64,
    ),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"),
        64,
    ),
    **dict.fromkeys(("num_conv_pos_embeddings", "projection_dim", "project_dim"), 16),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), 1024),
    "conv_dim": (32,) * 7,
    "d_kv": 8,
}
MORE: Mapping[str, Mapping[str, Any]] = {
    "ConvNextConfig": {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1]},
    "ResNetConfig": {
        "embedding_size": 16,
        "hidden_sizes": [16, 24, 32, 48],
        "depths": [1, 1, 2, 1],
    },
    "SwinConfig": {"embed_dim": 24, "hidden_size": None},
    "AltCLIPConfig": {"text_config": {"max_position_embeddings": 514}},
}
"""Sizes of models in stages; and a table that has to be longer than the words by two, unless two in a sample are padding."""
PARTS = ("text_config", "vision_config", "text_config_dict", "vision_config_dict")
COMMON = (
    *(
        "--output_dir",
        "out",
        "--max_steps",
        str(STEPS),
        "--num_train_epochs",
        "1",
        "--logging_steps",
        "1",
    ),
    *("--use_cpu", "True", "--eval_steps", str(STEPS), "--seq_length"),
)
LENGTHS = {"hubert": "1600", "wav2vec2": "1600"}
"""Numbers of a sound, of which convolutions leave few."""
ALWAYS = (
    "init.pp",
    "init.tp",
    "init.dp",
    "DynamicGenDataset.mode",
    "DynamicGenDataset.dataset_size",
)
"""What every example sets."""
SMALL = (
    "--per_device_train_batch_size",
    "2",
    "--per_device_eval_batch_size",
    "2",
    "--gradient_accumulation_steps",
    "4",
)
METHODS = (
    "get_loss_fn",
    "prepare_data",
    "create_optimizer",
    "create_lr_scheduler",
    "create_dataloader",
)
CONFIG = re.compile(r"\bconfig = (\w+Config)\(")
IMPORTS = re.compile(r"^(\s*)(import|from) Merak\b", re.MULTILINE)
MODEL = re.compile(r"model_name == ['\"]([^'\"]+)['\"]")
APART = {
    "gptj": "it makes its trainer of the class of data sets (`trainer = DynamicGenDataset(model=...)`), in Merak a TypeError too",
    "nezha": "transformers no longer has Nezha",
    "segformer": "transformers no longer has `drop_path` in its module of SegFormer",
    "speech2text2": "transformers no longer has Speech2Text2",
}


def shrunk(kind: Any) -> Any:
    """A config class whose models are small."""

    def make(**given: Any) -> Any:
        usual, more = kind(), MORE.get(kind.__name__, {})
        known = {*usual.to_dict(), *getattr(kind, "attribute_map", {})}
        lists = {name for name in known if isinstance(getattr(usual, name, None), list | tuple)}
        sizes = {name: size for name, size in SIZES.items() if name in known - lists}
        inner = {}
        for name in PARTS:
            if given.get(name) or name in known:
                part = name.removesuffix("_dict")
                whole = getattr(usual, part).to_dict()
                inner[name] = {**_small({**whole, **(given.get(name) or {})}), **more.get(part, {})}
        values = _within({**given, **sizes, **more, **inner})
        return kind(
            **{
                name: value
                for name, value in values.items()
                if value is not None or name not in SIZES
            }
        )

    return make


def _small(values: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {
        key: size
        for key, size in SIZES.items()
        if key in values and not isinstance(values[key], list | tuple)
    }
    return _within({**values, **sizes})


def _within(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of words that are in the vocabulary."""
    most = values.get("vocab_size", SIZES["vocab_size"]) - 1
    ids = {
        key: min(value, most)
        for key, value in values.items()
        if key.endswith("token_id") and isinstance(value, int)
    }
    return {**values, **ids}


@dataclass
class Seen:
    """What is seen of a run on one rank: uses with what became of each, losses, and why it did not run."""

    uses: dict[str, Use] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    refused: str = ""
    unlike: str = ""


@dataclass
class Watch:
    """Watches a script through the names of Merak that it calls."""

    name: str
    sizes: Mapping[str, int] | None
    seen: Seen = field(default_factory=Seen)
    trainers: list[Any] = field(default_factory=list)
    data: list[Any] = field(default_factory=list)
    axes: dict[str, int] = field(default_factory=dict)
    lists: dict[str, Any] = field(default_factory=dict)
    heads: dict[tuple[str, str], int] = field(default_factory=dict)
    started: dict[str, Any] = field(default_factory=dict)

    def use(self, option: str) -> Use:
        """A use by this script."""
        return self.seen.uses.setdefault(option, Use(self.name, option))

    def patches(self) -> list[tuple[Any, str, Any]]:
        """What takes the place of Merak's names: owner, name and function."""
        from compat.merak.runtime import generated, launch, trainer

        return [
            (launch, "init", self._init(launch.init)),
            (launch, "set_tp_layer_lists", self._lists(launch.set_tp_layer_lists)),
            (trainer.MerakTrainer, "__init__", self._trainer(trainer.MerakTrainer)),
            (
                generated.DynamicGenDataset,
                "__init__",
                self._dataset(generated.DynamicGenDataset.__init__),
            ),
        ]

    def _init(self, real: Any) -> Callable[..., None]:
        def init(pp: int, tp: int, dp: int, *more: Any) -> None:
            self.axes = {"pp": pp, "tp": tp, "dp": dp}
            for axis in self.axes:
                self.use(f"init.{axis}")
            real(**(self.sizes or self.axes))

        return init

    def _lists(self, real: Any) -> Callable[..., None]:
        def lists(**given: Any) -> None:
            self.lists = {name: value for name, value in given.items() if value}
            for name in self.lists:
                self.use(f"set_tp_layer_lists.{name}")
            if (self.sizes or self.axes)["tp"] > 1:
                real(**given)

        return lists

    def _dataset(self, real: Any) -> Callable[..., None]:
        def make(data: Any, *given: Any, **named: Any) -> None:
            self.data.append((data, named))
            for name in named:
                self.use(f"DynamicGenDataset.{name}")
            real(data, *given, **named)

        return make

    def _trainer(self, kind: Any) -> Callable[..., None]:
        real = kind.__init__

        def make(trainer: Any, *given: Any, **named: Any) -> None:
            self.trainers.append(trainer)
            size = sum(weight.numel() for weight in named["model"].parameters())
            assert size < LARGEST, f"{size} parameters: SIZES do not make this model small"
            for name in {"leaf_modules", "data_collator"} & named.keys():
                self.use(f"MerakTrainer.{name}")
            for name in METHODS:
                if name in vars(type(trainer)) and type(trainer) is not kind:
                    self.use(f"override.{name}")
                    self._count(trainer, name)
            for part, module in named["model"].named_modules():
                for name in self.lists.get("tp_attr_list", ()):
                    if isinstance(getattr(module, name, None), int):
                        self.heads[part, name] = getattr(module, name)
            self.started = self._assigned(named["args"])
            real(trainer, *given, **named)

        return make

    def _assigned(self, args: Any) -> dict[str, Any]:
        """What the script assigned to its arguments."""
        text = " ".join(sys.argv)
        found = {}
        for name in ASSIGNED:
            value = getattr(args, name, None)
            if value is not None and f"--{name} {value}" not in text:
                self.use(f"args.{name}")
                found[name] = value
        return found

    def _count(self, trainer: Any, name: str) -> None:
        own = getattr(trainer, name)

        def called(*given: Any, **named: Any) -> Any:
            self.use(f"override.{name}").how = "it ran"
            return own(*given, **named)

        setattr(trainer, name, called)

    def judge(self) -> None:
        """What became of each use."""
        trainer = self.trainers[0]
        engine = trainer.engine
        told = {finding.path for finding in trainer.findings}
        axes = {"pp": engine.line.size, "tp": engine.tensor.size, "dp": engine.data.size}
        for axis, number in self.axes.items():
            self.use(f"init.{axis}").how = (
                f"ranks along an axis: {number}" if axes[axis] == number else ""
            )
        for name in self.lists:
            self.use(f"set_tp_layer_lists.{name}").how = self._split(engine, name)
        for data, named in self.data:
            sample = data[0]
            for name, value in named.items():
                self.use(f"DynamicGenDataset.{name}").how = _sampled(data, sample, name, value)
        for name, value in self.started.items():
            self.use(f"args.{name}").how = self._planned(trainer, name, value)
        for use in self.seen.uses.values():
            path = use.option.removeprefix("MerakTrainer.")
            use.told = not use.how and path in told

    def _split(self, engine: Any, name: str) -> str:
        """What is seen of a list: weights that are split, numbers that are divided."""
        if engine.tensor.size == 1:
            return ""
        if name == "tp_attr_list":
            parts = {part: engine.model.get_submodule(part) for part, _ in self.heads}
            number = sum(
                getattr(parts[part], each) * 2 == value
                for (part, each), value in self.heads.items()
            )
            return "numbers of modules are divided" if number else ""
        dimension = {"col_para_list": 0, "row_para_list": 1}.get(name)
        split = [
            each
            for each in engine.parameters
            if each.split is not None and dimension in (None, each.split)
        ]
        return "weights are split" if split else ""

    def _planned(self, trainer: Any, name: str, value: Any) -> str:
        """Whether another value makes another plan."""
        from compat.merak.dialect import DIALECT
        from compat.merak.runtime.arguments import set_arguments
        from compat.merak.runtime.launch import sizes

        plans = []
        for each in (value, None):
            setattr(trainer.args, name, each)
            config = DIALECT.read(
                {"args": set_arguments(trainer.args), "init": sizes()}, None, engine_ranks(trainer)
            )
            plans.append(lift(config).values())
        setattr(trainer.args, name, value)
        return "the plan" if plans[0] != plans[1] else ""


ASSIGNED = ("custom_split_points", "num_layers", "seq_length")
"""What scripts assign to their arguments."""


def engine_ranks(trainer: Any) -> int:
    """Ranks of the run."""
    engine = trainer.engine
    return int(engine.line.size * engine.tensor.size * engine.data.size)


def _sampled(data: Any, sample: Mapping[str, Any], name: str, value: Any) -> str:
    """What is seen of an argument of the data set in its samples."""
    from compat.merak.runtime.generated import KINDS

    shapes = [tuple(tensor.shape) for tensor in sample.values()]
    if name == "dataset_size":
        return "samples" if len(data) == int(value) else ""
    if name == "image_size":
        return "samples" if any(shape[1:] == (value, value) for shape in shapes) else ""
    if name == "seq_length":
        return "samples" if any(value in shape for shape in shapes) else ""
    another = KINDS["text_only" if value == "vision_only" else "vision_only"](
        data, torch.Generator()
    )
    kinds = [{key: item.shape for key, item in each.items()} for each in (sample, another)]
    return "samples" if kinds[0] != kinds[1] else ""


def ran(
    rank: int, world: int, path: Path, sizes: Mapping[str, int] | None, flags: Sequence[str]
) -> Seen:
    """One example; `sizes` are taken instead of the script's."""
    from compat.merak.runtime import launch

    watch = Watch(path.parent.name, sizes)
    patches = watch.patches()
    held = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    length = LENGTHS.get(path.parent.name, "64")
    argv, sys.argv = (
        sys.argv,
        [path.name, *COMMON, length, *flags, "--model_name", _model_name(path)],
    )
    sys.path.insert(0, str(path.parent))
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = IMPORTS.sub(
                _changed, CONFIG.sub(r"config = __shrunk(\1)(", path.read_text(encoding="utf-8"))
            )
            module = types.ModuleType(f"merak_{path.stem}")
            module.__dict__.update({"__shrunk": shrunk, "__name__": "__main__"})
            exec(compile(text, str(path), "exec"), module.__dict__)
        watch.judge()
        lines = watch.trainers[0].log_history
        watch.seen.losses = [
            line[kind] for line in lines for kind in ("loss", "eval_loss") if kind in line
        ]
    finally:
        for owner, name, value in held:
            setattr(owner, name, value)
        launch.RUN.lists = None
        sys.argv = argv
        sys.path.remove(str(path.parent))
        sys.modules.pop("config", None)
    return watch.seen


def _changed(found: re.Match[str]) -> str:
    indent, word = found.groups()
    return (
        f"{indent}import compat.merak as Merak"
        if word == "import"
        else f"{indent}from compat.merak"
    )


def _model_name(path: Path) -> str:
    beside = path.parent / "config.py"
    found = MODEL.search(beside.read_text(encoding="utf-8")) if beside.exists() else None
    return found.group(1) if found else "small"


def tried(path: Path, pools: dict[int, Pool]) -> tuple[Seen, dict[str, int]]:
    """An example as it is, else on other ranks: what is seen, and the ranks."""
    own = {
        name: int(number)
        for name, number in re.findall(r"^\s*(pp|tp|dp) = (\d+)", path.read_text(), re.MULTILINE)
    }
    found = Seen()
    for sizes in (
        None,
        {"pp": 1, "tp": own["tp"], "dp": own["pp"] * own["dp"]},
        {"pp": 1, "tp": 1, "dp": 2},
    ):
        used = sizes or own
        world, first = used["pp"] * used["tp"] * used["dp"], found
        try:
            found = pools.setdefault(world, Pool(world)).run(ran, path, sizes, SMALL, timeout=300)[
                0
            ]
        except RankError as error:
            found = Seen(refused=str(error).strip().splitlines()[-1][:300])
        found.unlike = first.unlike or first.refused
        if not found.refused:
            break
    return found, used


COMMAND = re.compile(r"^torchrun\b.*?(?=^```|^torchrun|\Z)", re.MULTILINE | re.DOTALL)
"""A command in a page, with the lines that it goes on in."""
OTHER: Mapping[str, Any] = {
    "partition_method": "parameters",
    "activation_checkpointing": "true",
    "checkpoint_num_layers": 2,
    "dataloader_num_workers": 0,
    "resume_from_checkpoint": None,
    "num_train_epochs": 1,
    "learning_rate": 0.005,
    "logging_steps": 2,
    "save_steps": 2,
    "seed": 7,
    "output_dir": "elsewhere",
}
"""Another value of a flag; None: none."""
GIVEN: Mapping[str, str] = {
    **dict.fromkeys(("save_steps", "logging_steps", "per_device_train_batch_size"), "1"),
    "gradient_accumulation_steps": "4",
    "resume_from_checkpoint": "saved/iter_0000002",
    "num_train_epochs": "2",
    "learning_rate": "0.01",
}
"""What becomes of values that say where something is, or that are long for a short run."""
BESIDE: Mapping[str, Sequence[str]] = {
    "save_steps": ("--save", "true"),
    "output_dir": ("--save", "true", "--save_steps", "2"),
    "num_train_epochs": ("--max_steps", "-1"),
    "checkpoint_num_layers": ("--activation_checkpointing", "true"),
}
"""Flags that a flag is seen beside, in both runs."""
KINDS = ("refused", "lines", "timed", "files", "stages", "chunks", "own", "findings", "plan")


def commands(folder: Path) -> list[tuple[str, str, str]]:
    """The flags of Merak's arguments in the commands of pages beside examples: page, name and value. Other flags are the
    scripts' own.
    """
    from compat.merak.runtime.arguments import DEFAULTS

    found = []
    for page in sorted(folder.glob("*/README.md")):
        for command in COMMAND.findall(page.read_text(encoding="utf-8")):
            text = " ".join(
                line.partition(" #")[0].strip().rstrip("\\") for line in command.splitlines()
            )
            words = shlex.split(text)
            script = next(place for place, word in enumerate(words) if word.endswith(".py"))
            for option in re.split(r"(?:^| )--", " ".join(words[script + 1 :]))[1:]:
                name, _, value = option.replace("=", " ", 1).strip().partition(" ")
                full = (
                    [name]
                    if name in DEFAULTS
                    else [each for each in DEFAULTS if each.startswith(name)]
                )
                if len(full) == 1:
                    found.append((page.parent.name, full[0], value or "true"))
    return found


def flags(folder: Path) -> list[Use]:
    """The flags of the commands, each tried with another value on a small model over two stages."""
    pool, told = Pool(2), dict[tuple[str, str], Use]()
    found = []
    for where, name, value in commands(folder):
        if (name, value) not in told:
            told[name, value] = _flag(pool, name, value)
        known = told[name, value]
        found.append(Use(f"{where}/README.md", f"--{name}", known.how, known.told))
    pool.close()
    return found


def _flag(pool: Pool, name: str, value: str) -> Use:
    """What is seen of a flag."""
    value = GIVEN.get(name, value)
    switch = value.lower()
    another = other(
        name, switch == "true" if switch in ("true", "false") else _number(value), OTHER
    )
    seen = []
    for each in (value, another):
        with tempfile.TemporaryDirectory() as place:
            if name == "resume_from_checkpoint":
                pool.run(
                    flagged,
                    Path(place),
                    ["--save", "true", "--save_steps", "2", "--output_dir", "saved"],
                    timeout=300,
                )
            words = [] if each is None else [f"--{name}", *str(each).split()]
            given = [*BESIDE.get(name, ()), *words]
            # Ranks of a pool may not start processes, as loaders do.
            alone = name == "dataloader_num_workers"
            found = (
                flagged(0, 1, Path(place), given)
                if alone
                else pool.run(flagged, Path(place), given, timeout=300)[0]
            )
            seen.append(found)
    path = f"args.{name}"
    if "refused" in seen[0]:
        return Use("", name, "", name in seen[0]["refused"])
    how = different(*seen, KINDS)
    # Of a value that nobody knows only the refusal is seen.
    told = path in seen[0]["findings"] and ("refused" in seen[1] or how in ("", "findings"))
    return Use("", name, how, told)


def _number(value: str) -> Any:
    try:
        return int(value)
    except ValueError:
        return value


def main(folder: Path, chosen: Sequence[str]) -> int:
    """Run them all and print what is seen; 1 if less is heard than wanted."""
    torch.set_num_threads(1)
    pools: dict[int, Pool] = {}
    uses: list[Use] = []
    paths = [
        path
        for path in sorted(folder.glob("models/*/run_*.py"))
        if not chosen or path.parent.name in chosen
    ]
    whole = partly = refused = 0
    print("| example | ranks | losses, or why not | not as it is, since |\n|---|---|---|---|")
    for path in paths:
        if path.parent.name in APART:
            continue
        found, ranks = tried(path, pools)
        told = found.refused or " ".join(f"{loss:.3f}" for loss in found.losses)
        print(f"| {path.parent.name} | {ranks} | {told} | {found.unlike} |", flush=True)
        refused += bool(found.refused)
        partly += bool(found.unlike) and not found.refused
        whole += not found.unlike and not found.refused
        uses += (
            found.uses.values()
            if found.uses
            else [Use(path.parent.name, option) for option in ALWAYS]
        )
    for pool in pools.values():
        pool.close()
    apart = [path.parent.name for path in paths if path.parent.name in APART]
    print(
        f"\n{whole} run as they are, {partly} on other ranks, {refused} not; apart: {len(apart)} of {len(paths)}"
    )
    for name in apart:
        print(f"- {name}: {APART[name]}")
    table(uses)
    told = flags(folder) if not chosen else []
    print("\nFlags of the commands in pages beside other examples, tried on a small GPT-2:")
    return int(table([*told]) < WANTED) if told else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
