"""Writes a complete training script for DeepSpeed: model, parameter groups, schedule, data,
checkpoints, and continuing from a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.stack.dialect import Config, Program, Written
from bridge.stack.findings import Finding
from bridge.stack.launch_command import line
from bridge.stack.rules import Effect, How
from compat.deepspeed import code, schedule
from compat.deepspeed.rules.table import table

Flat = Mapping[str, Any]

HEAD = '''"""Trains the model of {model} under DeepSpeed, as {config} says.

    {command}

The data is a one-dimensional array of token ids: a .npy file, or a raw file of ids with two bytes
each (--dtype uint16). A run that finds a checkpoint in the folder of --save continues from it.
"""
'''

OPTIONS = '''
def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", default=str(HERE / {config}))
    parser.add_argument("--model", default=str(HERE / {model}), help="config.json of the model")
    parser.add_argument("--data", required=True, help="file of token ids")
    parser.add_argument("--dtype", default="uint16", help="number format of the ids in a raw file")
    parser.add_argument("--steps", type=int, default=STEPS, required=STEPS is None)
    parser.add_argument("--sequence", type=int, default=SEQUENCE, required=SEQUENCE is None, help="tokens in a sample")
    parser.add_argument("--save", help="folder of checkpoints")
    parser.add_argument("--save-every", type=int, default={every}, help="steps between checkpoints; 0: at the end")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    return parser.parse_args()


def read(path, dtype):
    return numpy.load(path, mmap_mode="r") if path.endswith(".npy") else numpy.memmap(path, dtype, mode="r")


class Samples:
    """Samples by number. The seed decides their order, which is drawn again for each epoch."""

    def __init__(self, tokens, length):
        self.tokens, self.length = tokens, length
        self.count = (len(tokens) - 1) // length
        if self.count < 1:
            raise SystemExit(f"the data has {{len(tokens)}} tokens, fewer than a sample of {{length}} with its targets needs")
        self.passed, self.order = -1, None

    def __getitem__(self, number):
        passed, place = divmod(number, self.count)
        if passed != self.passed:
            self.passed, self.order = passed, numpy.random.default_rng([SEED, passed]).permutation(self.count)
        start = int(self.order[place]) * self.length
        return torch.from_numpy(self.tokens[start : start + self.length + 1].astype(numpy.int64))


def micro_batches(samples, step, engine, rank, ranks):
    """The micro batches of this data rank in one step: tokens, and the next tokens as targets."""
    rows, parts = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    for part in range(parts):
        first = ((step * parts + part) * ranks + rank) * rows
        taken = torch.stack([samples[number] for number in range(first, first + rows)]).to(engine.device)
        yield taken[:, :-1].contiguous(), taken[:, 1:].contiguous()


def exact(model):
    return {{name: buffer.clone() for name, buffer in model.named_buffers()}}


def restore(model, buffers):
    """Undo DeepSpeed's rounding of buffers: those of rotary positions must stay exact."""
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(buffer.device)
'''

WHOLE = """
def build(path):
    config = AutoConfig.from_pretrained(path)
    config.use_cache = False
{padded}    return {begun}
"""

SCALED = '''
def scaled(model, config):
    """Scale initial weights by depth, which this family's config.json cannot express."""
    spread = config.initializer_range / (2 * config.num_hidden_layers) ** 0.5
    for name, weight in model.named_parameters():
        if name.removesuffix(".weight").endswith({ends}):
            nn.init.normal_(weight, std=spread)
    return model
'''

TOKENS = '''
class First(nn.Module):
    """Tokens to hidden states."""

    def __init__(self, whole, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        whole._init_weights(self.tokens)

    def forward(self, tokens):
        return self.tokens(tokens)

'''

ROTARY = '''
class Block(nn.Module):
    """One layer, which computes its own rotary angles."""

    def __init__(self, whole, config, index):
        super().__init__()
        self.layer = type(whole.model.layers[index])(config, index)
        self.layer.apply(whole._init_weights){begun}
        self.angles = type(whole.model.rotary_emb)(config)

    def forward(self, hidden):
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        out = self.layer(hidden, position_ids=positions, position_embeddings=self.angles(hidden, positions))
        return out[0] if isinstance(out, tuple) else out


class Norm(nn.Module):
    """The norm after the last layer."""

    def __init__(self, whole, config):
        super().__init__()
        self.norm = type(whole.model.norm)(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden):
        return self.norm(hidden)

'''

LEARNED = '''
class Places(nn.Module):
    """Adds the position embeddings."""

    def __init__(self, whole, config):
        super().__init__()
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        whole._init_weights(self.places)
        self.dropout = nn.Dropout(config.embd_pdrop)

    def forward(self, hidden):
        return self.dropout(hidden + self.places(torch.arange(hidden.shape[1], device=hidden.device)))


class Block(nn.Module):
    """One layer."""

    def __init__(self, whole, config, index):
        super().__init__()
        self.layer = type(whole.transformer.h[index])(config, index)
        self.layer.apply(whole._init_weights){begun}

    def forward(self, hidden):
        out = self.layer(hidden)
        return out[0] if isinstance(out, tuple) else out


class Norm(nn.Module):
    """The norm after the last layer."""

    def __init__(self, whole, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(self, hidden):
        return self.norm(hidden)

'''

STAGED = '''
class Last(nn.Module):
    """Hidden states to logits."""

    def __init__(self, whole, config):
        super().__init__()
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=whole.lm_head.bias is not None)
        whole._init_weights(self.output)

    def forward(self, hidden):
        return self.output(hidden)


def loss_of(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(path):
    config = AutoConfig.from_pretrained(path)
    config._attn_implementation = "sdpa"
{padded}    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    first, last = LayerSpec(First, whole, config), LayerSpec(Last, whole, config)
    if config.tie_word_embeddings:
        first = TiedLayerSpec("tokens", First, whole, config, tied_weight_attr="tokens.weight")
        last = TiedLayerSpec("tokens", First, whole, config, tied_weight_attr="tokens.weight", forward_fn=logits_of)
    blocks = [{places}*(LayerSpec(Block, whole, config, index) for index in range(config.num_hidden_layers))]
    layers = [first, *blocks, LayerSpec(Norm, whole, config), last]
    return PipelineModule(
        layers=layers,
        num_stages={stages},
        loss_fn=loss_of,
        partition_method={partition!r},
        activation_checkpoint_interval={interval},
    )


def logits_of(first, hidden):
    return nn.functional.linear(hidden, first.tokens.weight)
'''

STEP = """
def one_step(engine, samples, step, rank, ranks):
    total = torch.zeros((), device=engine.device)
    for inputs, targets in micro_batches(samples, step, engine, rank, ranks):
        loss = engine(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach() / engine.gradient_accumulation_steps()
    deepspeed.comm.all_reduce(total)
    return total.item() / deepspeed.comm.get_world_size()
"""

PIPED_STEP = """
def one_step(engine, samples, step, rank, ranks):
    return engine.train_batch(micro_batches(samples, step, engine, rank, ranks)).item()
"""

MAIN = '''
def prepare(arguments):
    torch.manual_seed(SEED)
    numpy.random.seed(SEED)
    model = build(arguments.model)
    buffers = exact(model)
{groups}    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters={parameters},
{schedule}        config={settings},
    )
    restore(engine.module, buffers)
    return engine


def place(engine):
    """This rank's index among the data ranks, and the number of data ranks."""
    return {place}


def main():
    arguments = options()
    deepspeed.init_distributed()
    engine = prepare(arguments)
    samples = Samples(read(arguments.data, arguments.dtype), arguments.sequence)
    rank, ranks = place(engine)
    step = 0
    if arguments.save and {latest}:
        _, state = engine.load_checkpoint(arguments.save)
        step = state["step"]
    while step < arguments.steps:
        loss = one_step(engine, samples, step, rank, ranks)
        step += 1
        if deepspeed.comm.get_rank() == 0:
            print(json.dumps({{"step": step, "loss": loss, "lr": engine.get_lr()[0]}}), flush=True)
        due = arguments.save_every and step % arguments.save_every == 0
        if arguments.save and (due or step == arguments.steps):
            engine.save_checkpoint(arguments.save, client_state={{"step": step}})
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
'''

PIPELINES = {**dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ROTARY), "gpt2": LEARNED}
"""The code of pipeline layers, for each family of models that stagebridge can put into a pipeline.
Each layer computes rotary angles itself, because a pipeline passes on only hidden states.
"""


def refusals(values: Flat, model: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why stagebridge cannot write a complete script for this run."""
    has_pipeline, family = code.size(values, "pipeline_stages") > 1, model.get("model_type")
    # Outside a pipeline AutoTP splits the layers of any family; a
    # PipelineModule has to bring split layers.
    if has_pipeline and code.size(values, "tensor_parallel") > 1:
        yield "stagebridge has no code for pipeline layers that are split over tensor ranks"
    if code.size(values, "context_parallel") > 1:
        yield (
            "ranks that share a sequence need Ulysses attention (deepspeed.sequence) in the"
            " model's code"
        )
    if has_pipeline and family not in (None, *PIPELINES):
        yield (f"stagebridge has no code for a pipeline of {family} layers")
    if has_pipeline and (model.get("sliding_window") or model.get("attention_dropout")):
        yield (
            "stagebridge has no code for pipeline layers with sliding windows or attention dropout"
        )
    if values.get("optimizer.type") is None:
        yield "the config has no optimizer, because DeepSpeed does not have this run's optimizer"
    if schedule.settings_of_code(values).get("name") == schedule.OTHER:
        yield "stagebridge cannot translate this learning-rate schedule"


RESIDUAL: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("o_proj", "down_proj"): (
        *(
            "llama",
            "mistral",
            "mixtral",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "gemma",
            "gemma2",
            "gemma3_text",
            "olmoe",
        ),
        *(
            "olmo2",
            "phi3",
            "cohere",
            "cohere2",
            "smollm3",
            "granite",
            "glm",
            "glm4",
            "glm4_moe",
            "glm4_moe_lite",
            "gpt_oss",
        ),
        *("deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "minimax_m2", "exaone_moe"),
    ),
    ("o_proj", "c_proj"): ("starcoder2",),
    (".dense", "dense_4h_to_h"): ("gpt_neox", "bloom", "falcon"),
    ("out_proj", "fc_out"): ("gptj",),
    ("out_proj", "fc2"): ("opt",),
    (".dense", "fc2"): ("phi",),
}
"""Families of models for which the script can scale initial weights, because transformers does not
scale them. Each key is a pair: the endings of the names of the last matrix in attention and the
last matrix in the feed-forward layer.
"""


def _name_endings(model: Mapping[str, Any], plan: Flat) -> tuple[str, str] | None:
    """Return the name endings of the two matrices whose initial values the script must scale.
    Return None if the plan asks for no scaling, or if `RESIDUAL` lacks the family.
    """
    if not plan.get("model.init.scaled"):
        return None
    return next(
        (ends for ends, families in RESIDUAL.items() if model.get("model_type") in families), None
    )


def model_fields_in_script(plan: Flat, model: Config | None) -> frozenset[str]:
    """Return the plan fields of the model that the script sets in code, because the model's config
    has no keys for them.
    """
    fields = {"model.sequence", PADDED}
    if model is not None and _name_endings(model.given, plan):
        fields.add("model.init.scaled")
    return frozenset(fields)


PADDED = "model.embedding.padded_vocab"
SCRIPT, MODEL, DATA = ".train.py", ".model.json", "tokens.npy"
"""Three parts of names: the endings of the script's file and of the model's config file, and the
name in the launch command that the user replaces by the data file.
"""


def beside(
    output: Written, config: Config, plan: Mapping[str, Any], model: Config | None
) -> Program:
    """Return the config with its training script. If the model is known, a file with the model's
    config is added. All files belong in one folder.
    """
    place = Path(output.file)
    script, model_file = place.with_suffix(SCRIPT).name, place.with_suffix(MODEL).name
    launch = tuple(
        script if word == code.SCRIPT else word for word in (*output.launch, "--data", DATA)
    )
    text = program(
        config.given, model.given if model else {}, plan, place.name, model_file, line(launch)
    )
    model_files = {MODEL: model.text()} if model else {}
    files = {SCRIPT: text, **model_files}
    return Program(
        replace(output, beside=files, snippet="", launch=launch),
        tuple(_find_lacking(config.given, plan, model_file, model)),
    )


def _find_lacking(
    values: Flat, plan: Flat, model_file: str, model: Config | None
) -> Iterator[Finding]:
    """Yield a finding for each thing that the user still has to give to the script."""
    yield Finding("--data", f"replace {DATA} by a file of token ids", Effect.NONE, how=How.MISSING)
    if model is None:
        yield Finding(
            model_file,
            "add the model's config.json, because no given file describes the model",
            Effect.STOPS,
            how=How.MISSING,
        )
    if plan.get("model.sequence") is None:
        yield Finding(
            "--sequence",
            "add the length of a sample in tokens, because no given file has this length",
            Effect.STOPS,
            how=How.MISSING,
        )
    if values.get("code.steps") is None:
        yield Finding(
            "--steps",
            "add the number of steps, because no given file has this number",
            Effect.STOPS,
            how=How.MISSING,
        )
    for path, (holds, what, effect) in UNTAKEN.items():
        if holds(values):
            yield Finding(path, what, effect, how=How.MISSING)
    what = "do what the Trainer does with it, because the script trains without the Trainer"
    for rule in table():
        for path in rule.theirs:
            if path.startswith("code.trainer.") and path in values:
                yield Finding(path, what, rule.effect_of(values), how=How.MISSING)


UNTAKEN: Mapping[str, tuple[Callable[[Flat], bool], str, Effect]] = {
    "code.expert_parallel": (
        lambda values: code.size(values, "expert_parallel") > 1,
        "split the experts with deepspeed.moe.layer.MoE(ep_size=), because in the script every"
        " rank holds all experts",
        Effect.COST,
    ),
    "code.manual_accumulation": (
        lambda values: bool(values.get("code.manual_accumulation")),
        "set gradient_accumulation_steps, because in this script the engine counts the micro"
        " batches",
        Effect.NUMBERS,
    ),
    "code.loss": (
        lambda values: values.get("code.loss") == "per_token",
        "divide the sum of losses by the tokens of the step on all ranks, because the script takes"
        " the mean of the micro batches",
        Effect.NUMBERS,
    ),
    "code.checkpoint_interval": (
        lambda values: (
            code.size(values, "checkpoint_interval") > 1
            and code.size(values, "pipeline_stages") == 1
        ),
        "choose the layers to recompute, because the script recomputes all layers",
        Effect.COST,
    ),
}
"""Settings of the code part that the script does not implement. Each has a condition for when the
setting matters, advice for the user, and the effect of ignoring the setting.
"""


def program(
    values: Flat, model: Mapping[str, Any], course: Flat, name: str, beside: str, command: str
) -> str:
    """Return the training script for the config file `name` and the model's config in the file
    `beside`. `course` is the plan.
    """
    advice = "drop --script and write your own script from the code part"
    BridgeError.raise_if(f"script: {problem}; {advice}" for problem in refusals(values, model))
    has_pipeline, ends = code.size(values, "pipeline_stages") > 1, _name_endings(model, course)
    # The code that builds the model: whole, or as the layers of a pipeline.
    layers = PIPELINES.get(model.get("model_type") or "", ROTARY)
    building = f"{TOKENS}{layers}{STAGED}" if has_pipeline else WHOLE
    padding_line = ""
    rows, words = course.get(PADDED), course.get("model.vocab")
    # Padding rows take part in every softmax, so a model without them has another loss.
    if rows and words and rows > words:
        padding_line = f"    config.vocab_size = {rows}  # with padding rows that no token uses\n"
    return "".join(
        (
            HEAD.format(model=beside, config=name, command=command),
            "\n" + "\n".join(_imports(values, ends is not None)) + "\n\n",
            "HERE = Path(__file__).parent\n",
            f"STEPS, SEQUENCE = {values.get('code.steps')}, {course.get('model.sequence')}\n",
            f"SEED = {values.get('code.seed') or 0}\n",
            "\n" + "\n".join([*schedule.lines(values), ""]) if schedule.steers(values) else "",
            "\n"
            + OPTIONS.format(
                config=repr(name), model=repr(beside), every=course.get("run.save_interval") or 0
            ),
            "\n" + SCALED.format(ends=ends) if ends else "",
            "\n"
            + building.format(
                **_model_settings(values, model, ends is not None), padded=padding_line
            ),
            GROUPED if values.get(code.GROUPS) else "",
            "\n" + (PIPED_STEP if has_pipeline else STEP),
            "\n" + MAIN.format(**_main(values)),
        )
    )


def _imports(values: Flat, scales: bool) -> Iterator[str]:
    has_pipeline, has_schedule = code.size(values, "pipeline_stages") > 1, schedule.steers(values)
    yield from (
        "import argparse",
        "import json",
        *(["import math"] if has_schedule else []),
        "from pathlib import Path",
        "",
    )
    yield from ("import deepspeed", "import numpy", "import torch")
    if has_pipeline:
        yield "from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec"
    else:
        yield "from deepspeed.utils import groups as ranks_of"
    if has_pipeline or scales:
        yield "from torch import nn"
    if has_schedule:
        yield "from torch.optim.lr_scheduler import LambdaLR"
    yield "from transformers import AutoConfig, AutoModelForCausalLM"


def _model_settings(values: Flat, model: Mapping[str, Any], scales: bool) -> dict[str, Any]:
    """Return the values to insert into the template that builds the model: settings of the
    pipeline, and a call that scales initial weights.
    """
    if code.size(values, "pipeline_stages") <= 1:
        plain = "AutoModelForCausalLM.from_config(config)"
        return {"begun": f"scaled({plain}, config)" if scales else plain}
    return {
        "begun": "\n        scaled(self.layer, config)" if scales else "",
        "places": "LayerSpec(Places, whole, config), " if model.get("model_type") == "gpt2" else "",
        "stages": code.size(values, "pipeline_stages"),
        "partition": values.get("code.partition_method") or "parameters",
        "interval": values.get("pipeline.activation_checkpoint_interval") or 0,
    }


NAMED = "groups = grouped(model, HERE / {file})"
GROUPED = '''

def grouped(model, file):
    """The optimizer's groups, with the settings and the names of parameters in the file."""
    rows, trained = json.loads(file.read_text()), {name for name, p in model.named_parameters() if p.requires_grad}
    named = dict(model.named_parameters())
    odd = sorted(trained.symmetric_difference(name for row in rows for name in row["params"]))
    if odd:
        raise SystemExit(f"{file}: {odd[0]} is a trained parameter that is in no group, or the reverse; correct the file")
    return [{**row, "params": [named[name] for name in row["params"]]} for row in rows]
'''
RECOMPUTED = '    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})\n'
SETTINGS = "    settings = json.loads(Path(arguments.deepspeed_config).read_text())\n"
SPLIT = """    # DeepSpeed splits the layers itself, and counts these ranks as data ranks too: a total
    # for the true data ranks would not fit.
    settings["tensor_parallel"] = {{"autotp_size": {size}}}
    settings.pop("train_batch_size", None)
"""


UNIVERSAL = """    # The first run loads the universal checkpoint, later ones load their own.
    settings["checkpoint"]["load_universal"] = not Path(arguments.save or "", "latest").is_file()
"""


def _main(values: Flat) -> dict[str, str]:
    """Return the values to insert into the template of the main function."""
    has_pipeline, tensor = (
        code.size(values, "pipeline_stages") > 1,
        code.size(values, "tensor_parallel"),
    )
    # A PipelineModule recomputes by its own interval.
    recompute_lines = RECOMPUTED if values.get("code.checkpointing") and not has_pipeline else ""
    # The first run loads a universal checkpoint; from its own first checkpoint on it loads that.
    universal = bool(values.get("checkpoint.load_universal"))
    split = (SPLIT.format(size=tensor) if tensor > 1 else "") + (UNIVERSAL if universal else "")
    groups = (
        [NAMED.format(file=json.dumps(values[code.GROUPS]))]
        if values.get(code.GROUPS)
        else code.groups(values)
    )
    group_lines = "".join(f"    {line}\n" for line in groups)
    schedule_line = (
        "        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lr_factor),\n"
        if schedule.steers(values)
        else ""
    )
    whole = "ranks_of._get_data_parallel_rank(), ranks_of._get_data_parallel_world_size()"
    return {
        "groups": recompute_lines + (SETTINGS if split else "") + split + group_lines,
        "parameters": "groups"
        if group_lines
        else "[p for p in model.parameters() if p.requires_grad]",
        "schedule": schedule_line,
        "latest": 'any(Path(arguments.save).glob("latest*"))'
        if universal
        else 'Path(arguments.save, "latest").is_file()',
        "settings": "settings" if split else "arguments.deepspeed_config",
        "place": "engine.grid.data_parallel_id, engine.grid.data_parallel_size"
        if has_pipeline
        else whole,
    }
