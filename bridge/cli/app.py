"""Commands, options and their help; the work is done in the modules beside this one, imported when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from bridge import __version__
from bridge.cli import run
from bridge.cli.job import Job, Picture
from bridge.cli.late_commands import Commands
from bridge.cli.options import (
    CHOOSING,
    GATING,
    DryRun,
    Force,
    Json,
    JsonSteps,
    Output,
    Outputs,
    Ranks,
    Run,
    Silence,
    Timeout,
    ToVersion,
    UserConfig,
    own_file,
    own_place,
    reads_file,
)
from bridge.limits import COUNT, FILES
from bridge.report.exit_codes import table
from bridge.report.row_choice import View

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder or file of a checkpoint.", show_default=False)
]
FromFormat = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--from", metavar="FORMAT", help="Format of the checkpoint, if the folder holds several."
    ),
]
Root = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--root",
        metavar="KEYS",
        help="Keys of the model or the optimizer to read, joined by dots, if the checkpoint has several; or of both, "
        "with a comma between them.",
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        "--processes",
        metavar="N",
        min=1,
        max=64,
        help="Number of processes that share the files to be written.",
    ),
]
DONE = "-"
"""Stands in the exit code table of a command that only succeeds or fails, and has no findings."""

CONVERT = """Convert a training config from one stack to another, and say what did not map and why.

The converted file goes to stdout and the report to stderr; with -o the file goes to OUT and the report to stdout.
OUT.carry.json beside OUT keeps what the other stack cannot express. The way back reads it; edits of OUT win over it.

\b
Examples:
  stagebridge convert launch.args --to deepspeed --world-size 8 -o ds_config.json
  stagebridge convert model_config.yaml --to deepspeed --from-version 0.16.1 --world-size 8 --json
  stagebridge convert launch.args --to deepspeed --world-size 8 --script -o run.json
  stagebridge convert pretrain_gpt.sh --to deepspeed --env DATA=/data/text -o ds_config.json
  stagebridge convert ds_config.json --to megatron --world-size 8 > launch.args
  stagebridge convert zero3.json --to megatron --auto-from args.json --auto hidden_size=4096 --world-size 8
  stagebridge convert zero3.json --to megatron --auto micro_batch=4 --auto 'betas=[0.9, 0.95]'
  stagebridge convert old.json --to deepspeed --from-version 0.16.0 --to-version 0.19.8 -o new.json

FILE is JSON, HJSON, YAML (a recipe with MODEL_ARGS too), a launch script (.sh; read, never run), or plain command-line flags
with # comments; - reads stdin. Values that look like secrets are written to OUT alone: the report, stdout, the sidecar and
--json have marks (__hidden_NAME__) in their place.

""" + table(
    error="wrong usage, a refused input, or an output that stops the run; with --strict any loss"
)

CHECK = """Read a config as its stack would, and say what is wrong, ignored or surprising in it.

\b
Examples:
  stagebridge check ds_config.json
  stagebridge check launch.args --world-size 8 --from-version 0.16.1
  stagebridge check configs 'more/**/*.json' --format sarif > stagebridge.sarif
  stagebridge check configs --ignore disable_allgather --baseline known.json

Options for a whole project are set in [tool.stagebridge] of its pyproject.toml, and options for some of its files in tables
[[tool.stagebridge.files]] (docs/gate.md).

""" + table(error="wrong usage, an invalid config, or a run that stops")

RESOLVE = """Say who wins for each setting of a run that has several sources, what is overruled, and what nobody hears.

A launch script is enough: the files that it names are read with it. Or give the DeepSpeed file, and beside it a file of the
arguments of Hugging Face's Trainer (JSON, YAML) and the model's folder; or a config of accelerate, for FSDP, DeepSpeed,
Megatron-LM and several GPUs. First come contradictions that change numbers, then a table: setting, value, the file and line
that won, and what lost.

\b
Examples:
  stagebridge resolve train.sh
  stagebridge resolve zero3.json --with args.json --model FOLDER --world-size 8
  stagebridge resolve zero3.json args.yaml --with max_steps=1000
  stagebridge resolve fsdp.yaml --auto gpus=8
  stagebridge resolve train.sh --json

""" + table(
    clean="no finding at or above the threshold",
    error="wrong usage, or a run that stops: the sources contradict each other in a way that its programs refuse",
)

DIFFERENCE = """Say where the meanings of two configs differ, of one stack or of two, each difference with its effect on the run.

git:REV:PATH is the config of a commit; the files beside it in that commit are read too. Reading options apply to both configs.

\b
Examples:
  stagebridge diff launch.args ds_config.json --world-size 8
  stagebridge diff git:HEAD~1:configs/ds.json configs/ds.json
  stagebridge diff git:main:launch.sh launch.sh --fail-on memory --format github

""" + table(
    clean="both configs mean the same, up to the threshold",
    findings="the meanings differ: different numbers, or the --fail-on effect",
)

MATCH = """Hold a launch against the model that it loads: does it fit, and with which settings would it?

MODEL is the folder of a Hugging Face model, its config.json, or the launch that wrote the checkpoint. Compared is only what
matters once weights are loaded; initial values, number formats, padding of the vocabulary and shorter sequences do not.

\b
Examples:
  stagebridge match train.sh Qwen2-1.5B
  stagebridge match launch.args model/config.json --json
  stagebridge match finetune.args pretrain.args

""" + table(
    clean="it fits",
    findings="the weights load, and the run computes another function",
    error="wrong usage, or the weights do not fit",
)

SCHEMA = """Print the JSON Schema of a command's output with --json, for programs that read it.

docs/json.md says what each key means.

\b
Examples:
  stagebridge schema convert > convert.schema.json
  stagebridge schema "checkpoint inspect"
  stagebridge schema                              (lists the names of all outputs)

""" + table(clean="printed", findings=DONE, error="wrong usage: no such output")

DRIFT = """Say what the same file means in two releases of its own stack, and write the file that keeps its meaning.

The report names settings that were removed, added or renamed, defaults that changed, stricter rules, and values that the
stack works out differently. The migrated file goes to stdout and the report to stderr; with -o the file goes to OUT.

\b
Examples:
  stagebridge drift ds_config.json --from-version 0.19.2 --to-version 0.19.8
  stagebridge drift launch.args --from-version 0.13.0 --to-version 0.18.0 --world-size 64 -o new.args
  stagebridge drift new.json --from-version 0.19.8 --to-version 0.16.0 --json

""" + table(
    clean="the file means the same in both releases, up to the threshold",
    findings="the meanings differ: different numbers, or the --fail-on effect",
    error="wrong usage, a file that the first release refuses, or a run that stops in the second",
)

FUZZ = """Fuzz a stack: generated configs of all its releases are written, read, lifted, lowered and converted.

Every config that the stack's rules accept has to be read as it was written, and to keep its meaning when it is lifted and
lowered. With --to, the other stack has to accept the converted config, a finding has to name every setting that is lost,
and the conversion back has to restore the original config.
On a failure the smallest config found is printed, ready to paste, with the command that shows it. Needs the extra "test".

\b
Examples:
  stagebridge fuzz deepspeed
  stagebridge fuzz megatron --to deepspeed --examples 1000 --seed 7
  stagebridge fuzz merak --from-version 2.2.2 --json

""" + table(clean="no failure", findings="a failure", error="wrong usage, or another error")

TRAIN = """Train the plan of FILE on the ranks that the launcher started: on the native engine, or on a real stack's.

With --engine auto, the native engine runs it if it can, else the first installed stack that can; a note says why.

\b
Examples:
  stagebridge train ds_config.json --steps 50
  PYTHONSAFEPATH=1 torchrun --nproc-per-node 2 -m stagebridge train ds_config.json --save run
  PYTHONSAFEPATH=1 deepspeed --num_accelerators 2 --module stagebridge train ds_config.json --json
  PYTHONSAFEPATH=1 torchrun --nproc-per-node 2 -m stagebridge train ds_config.json --trace run --desync raise
  PYTHONSAFEPATH=1 torchrun --nproc-per-node 2 -m stagebridge train launch.args --engine deepspeed --fit

If sizes do not fit the ranks, the error names a command that does; --fit shrinks the sizes and says which.

""" + table(
    clean=(
        "trained; findings are printed at the start; the code stays 0, as launchers take any other "
        "code for a crash"
    ),
    findings=DONE,
)

VERIFY = """Run FILE and its translation, or FILE and OTHER, at small sizes on this machine, and say if they are the same run.

Every run trains the same small GPT, with the same weights and data, on a few local ranks. FILE runs on its own stack and the
translation on the target stack, if they are installed; both plans also run on the native engine and on every other engine that
supports them. Losses, gradient norms and every tensor are compared with the plan of FILE. If they differ by more than rounding,
one feature after the other is switched off to find the cause.

With OTHER, a second config of your own, both run on your own model (--model) and batch (--batch; bridge.trace.batch(FILE, batch)
writes it from a running loop), each on its own stack or on the engine that --on names.

\b
Examples:
  stagebridge verify launch.args --to deepspeed --world-size 8
  stagebridge verify ds_config.json launch.args --model qwen --batch batch.safetensors --world-size 2
  stagebridge verify ds.json ds.json --model qwen --batch batch.safetensors --on fsdp2,deepspeed
  stagebridge verify ds_config.json --to megatron --world-size 8 --ranks 2
  stagebridge verify ds_config.json --to megatron --code pipeline_stages=2 --world-size 2 --json

""" + table(
    clean="the same run: both files ran on their own stacks, with the same numbers",
    findings="not the same run: the numbers differ on at least one engine; the report says why",
    error="wrong usage, or refused",
    unproved=(
        "nothing was proved, or only a part: an engine did not run, a feature was left out, or "
        "an expected difference did not show in so few steps"
    ),
)

MOVE = """Move a run to another stack: its config, code part, launch command and checkpoint, in one folder that is ready to start.

The checkpoint is written in a format that the target can resume from. OUT/report.txt says what the config and the
checkpoint lost; its first line sums up the losses that affect the run. With --prove the old and the new run both resume on this
machine, and are compared as `verify` does; of a large model only the first layers run.

\b
Examples:
  stagebridge move ds_config.json --checkpoint run/checkpoints --to native -o moved
  stagebridge move ds_config.json --checkpoint run/native --to deepspeed --world-size 4 -o moved
  stagebridge move ds_config.json --checkpoint run/checkpoints --to automodel --model model --prove 5 -o moved

""" + table(
    clean="moved; no loss at or above the threshold, and with --prove both are the same run",
    findings="moved; a loss in the report changes numbers, or the proof shows that the runs differ",
    error="wrong usage, a refused input, or a run that stops",
    unproved="moved; only a part was proved: an engine did not run, or layers were left out",
)

LAYOUT = """Show where a plan puts its model: ranks and groups, stages, bytes on each rank, collectives in a step.

FILE is a config of any stack; nothing is started and torch is not needed. Sizes of the model that FILE does not state come from
--model NAME (a known shape instead of FILE's) or from an option for each size. The figures are the native engine's, to the byte.

\b
Examples:
  stagebridge layout launch.args --ranks 8 --vocab 32000
  stagebridge layout ds_config.json --ranks 4 --model gpt2
  stagebridge layout launch.args --ranks 8 --vocab 32000 --memory 80 --plot ranks.svg
  stagebridge layout zero3.json --layers 24 --hidden 1024 --heads 16 --vocab 50304 --sequence 1024 --json

""" + table(
    clean="shown; no finding at or above the threshold",
    error="wrong usage, a missing size, or sizes that do not fit the ranks (the message names some that do) or --memory",
)

ESTIMATE = """Say how much memory each stage of a run needs in a step, and whether it fits into a device.

The sources of a run are read as `resolve` reads them. Counted are weights, gradients, masters and moments by the stack's
rules of sharding, activations by layer, recomputation and what the schedule has in flight, logits, buffers, and margins for
fragments, the CUDA context and NCCL. If the run does not fit into --memory, up to three changes follow, each of which makes it
fit and is accepted by the stack, cheapest first. What is not counted is named.

\b
Examples:
  stagebridge estimate launch.args --ranks 16 --memory 80
  stagebridge estimate zero3.json args.json FOLDER --ranks 8 --sequence 4096 --memory 24
  stagebridge estimate fsdp.yaml --model FOLDER --sequence 4096 --micro-batch 1 --explain

""" + table(
    clean="it fits, or --memory was not given",
    error="wrong usage, a missing size, or a run that does not fit",
)

SHOW = """Show what a field of a stack means: type, bounds, default by release, and where it goes in the other stacks.

FIELD is a path as the stack spells it, a flag, or a section, which shows its fields. Without FIELD all fields are listed.

\b
Examples:
  stagebridge show deepspeed gradient_clipping
  stagebridge show megatron --json params_dtype
  stagebridge show automodel distributed.pipeline
  stagebridge show fast_llm
  stagebridge show deepspeed --schema > deepspeed.schema.json

""" + table(clean="shown", findings=DONE, error="wrong usage: no such stack or field")

SCHEDULE = """Show the pipeline schedule of a config: what each rank computes when, its bubble, and activations in flight.

The schedule is proved first: every message is sent and received, no rank waits for ever, and each microbatch passes each stage
once forward and once backward. Times are in units of one forward pass of a stage; backward takes two.

\b
Examples:
  stagebridge schedule launch.args --world-size 8
  stagebridge schedule recipe.yaml --microbatches 8 --plot schedule.svg
  stagebridge schedule launch.args --csv schedule.csv     (torch.distributed.pipelining reads it)

""" + table(
    clean="shown, and proved",
    findings=DONE,
    error="wrong usage, a refused input, or an invalid schedule",
)

TRACE = """See inside training runs: what every layer did, and where two runs first differ.

A run is the folder that `train --trace DIR` (or `bridge.trace.attach`) wrote; it can be read while the training runs.
"""

DIFF = """Compare two traced runs of any layouts or stacks, down to the first tensor that differs.

The runs' settings are compared first. Then tensors are matched by name and sample order, in order of execution, with the copies
of all ranks. A distance that rounding can explain, for the formats and the depth of the model, is taken for rounding; the runs
first differ at the first tensor with a larger distance. If the logs show a cause, the report names it with the evidence; else it
says what to log next. NaNs never pass. A tensor that one run did not log, such as one of a layer that a compiler hides, is
counted "unseen".

\b
Examples:
  PYTHONSAFEPATH=1 torchrun --nproc-per-node 2 -m stagebridge train tp2.json --steps 5 --trace two
  stagebridge train one.json --steps 5 --trace one
  stagebridge trace diff two one
  stagebridge trace diff two one --html compared.html   (a page: layers x steps x ranks)

""" + table(
    clean="equal up to rounding",
    findings="the runs differ",
    error="wrong usage: no run there, or no step that both runs logged",
    unproved="nothing was proved: no tensor was logged with values",
)

WATCHED = """Run a training as it is, and watch it: invariants of all trainings are checked in every step, and ranks compared.

On every rank the first model is watched that runs forward in training mode and whose weights an optimizer holds: plain torch,
DDP, FSDP, accelerate, the Trainer of transformers, DeepSpeed. Megatron-Core takes two lines (docs/trace.md).

What is wrong in every training is a fault, what may be meant is a remark; each line on stderr says which. Only faults change the
exit code.

\b
Examples:
  stagebridge trace run -- torchrun --nproc-per-node 2 train.py
  stagebridge trace run --level 5 --run a -- python train.py --steps 10
  stagebridge trace run --on-finding './page.sh --to me' -- accelerate launch train.py

""" + table(
    clean="the training ended well, and nothing was found wrong",
    findings=(
        "the training ended well, but an invariant is broken or ranks disagree; "
        "DIR/findings.jsonl has the findings"
    ),
    error="wrong usage; a training that fails keeps its own exit code",
    unproved="no model was watched",
)

FOLLOWED = """Follow a run: print a line for each step with its loss and norms, and for each finding, once it is logged.

The command ends with the training, or with Ctrl-C. A run that has ended is printed as a whole. The output can be piped.

\b
Examples:
  stagebridge trace watch run
  stagebridge trace watch run --interval 10 | grep fault

""" + table(
    clean="no fault was found",
    findings="faults were found",
    error="wrong usage: no run there, or a damaged one",
)

EXPORT = """Write what a run logged as scalars for another tool: loss, norms of gradients, outputs and weights, norms by layer.

Weights & Biases is used offline: nothing is sent; `wandb sync` can send it later.

\b
Examples:
  stagebridge trace export run -o board
  stagebridge trace export run --to wandb -o offline

""" + table(
    clean="written",
    findings=DONE,
    error="wrong usage: no run there, the tool is not installed, or the folder exists already",
)

LINES = """Show the tensors that a run logged, put together from all ranks: shape, type, statistics, some values.

The values of two layouts can be compared: gradients are always of the step's mean loss, without loss scale.

\b
Examples:
  stagebridge trace show run --step 3
  stagebridge trace show run --layer block1 --kind output --microbatches
  stagebridge trace show run --kind gradient --plot norms.png

""" + table(
    clean="shown",
    findings=DONE,
    error="wrong usage: no run there, or no tensor of the run that the filters let through",
)

PAGE = """Write one HTML file that needs nothing else: loss, norms, a map of layers, steps and ranks, findings and their meaning.

A page of two runs shows the settings that differ, where the runs first differ, why, and how they differ in all later steps.
The page can be printed, follows the browser's light or dark theme, and never tells anything by colour alone.

\b
Examples:
  stagebridge trace html run -o run.html
  stagebridge trace html bad good -o compared.html

""" + table(
    clean="written; one run has no fault, or two runs are equal up to rounding",
    findings="written; one run has faults, or two runs differ",
    error="wrong usage: no run there, or no step that both runs logged",
    unproved="written, but nothing was proved: no tensor of the two runs was logged with values",
)

DEMO = """Convert a bundled Megatron launch (8 ranks) to DeepSpeed and back, print the report and write the files.

If torch is installed, the converted plan is then trained on two local ranks with a small model, saved and resumed.

""" + table(clean="done", findings=DONE, error="something failed")

CHECKPOINT = """Read, convert and compare checkpoints of any stack, without the stack, a GPU, or executing anything in them.

Formats: native, safetensors (or huggingface), bin (pytorch_model.bin), trainer (Hugging Face Trainer and accelerate), dcp
(torch.distributed.checkpoint), file (torch.save, Lightning), deepspeed (ZeRO 0 to 3), universal, megatron (torch_dist)
and megatron-ranks (mp_rank_*).
A pickle that holds anything but tensors, plain values and listed classes is refused, and the error names it.
"""

INSPECT = """Show what a checkpoint holds: format, release, layout, steps, parameters, optimizer, loss scale, and what is damaged.

\b
Examples:
  stagebridge checkpoint inspect run/checkpoints
  stagebridge checkpoint inspect run/global_step500 --tensors
  stagebridge checkpoint inspect model --check --json
  stagebridge checkpoint inspect last.ckpt --root state_dict_ema

""" + table(
    clean="shown; nothing was lost that changes numbers",
    findings="shown; something was lost that changes numbers; the report names it",
    error="wrong usage, no checkpoint there, or a damaged one",
)

CHECKPOINT_CONVERT = """Write a checkpoint in another format, with its masters, moments, steps, schedule and loss scale.

The files are written beside OUT and renamed at the end; a conversion that was killed continues where it stopped. The report
names, with its effect, everything that the other format has no place for.

\b
Examples:
  stagebridge checkpoint convert run/checkpoints --to native -o run/native
  stagebridge checkpoint convert run/native --to deepspeed --level 2 --ranks 8 -o run/zero
  stagebridge checkpoint convert run/checkpoints --to safetensors --dtype bf16 -o model
  stagebridge checkpoint convert run/checkpoints --to safetensors -o model --dry-run
  stagebridge checkpoint convert run/checkpoints --to megatron --config model/config.json -o megatron

""" + table(
    clean="written, and nothing that changes numbers was lost",
    findings="written; a loss changes the numbers of a run that resumes from it",
    error="wrong usage, a refused or damaged checkpoint, or no room on the disk",
)

CHECKPOINT_DIFF = """Compare two checkpoints of any formats: every weight, master and moment, and the steps of the runs.

If two copies have different number formats, they are compared in the coarser one.

\b
Examples:
  stagebridge checkpoint diff run/checkpoints run/native
  stagebridge checkpoint diff model run/checkpoints --json

""" + table(
    clean="equal, bit by bit",
    findings="the checkpoints differ, or one has tensors that the other lacks",
    error="wrong usage, or no checkpoint there",
    unproved="nothing was proved: neither checkpoint has a tensor",
)

app = Commands(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Translate LLM training configs between stacks, with every loss named. Start with: stagebridge demo\n\n"
    + table(unproved="nothing was proved (verify, trace diff)"),
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stagebridge {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "-V", "--version", callback=_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
    # Launchers such as deepspeed put it before the words of the command.
    local_rank: Annotated[
        int,
        typer.Option(
            "--local_rank",
            "--local-rank",
            hidden=True,
            help="Accepted and ignored: launchers add this option, and the environment has the same number.",
        ),
    ] = 0,
) -> None:
    """Handle the options of `stagebridge` itself, such as `--version`."""


@app.late_command("help", short_help="Show the help of stagebridge, or of one of its commands.")
def help_of(
    context: typer.Context,
    words: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[COMMAND]...", show_default=False),
    ] = None,
) -> None:
    """Show the help of stagebridge, or of one command: stagebridge help convert."""
    code = run([*(words or ()), "--help"])
    if code:
        raise typer.Exit(code)


@app.late_command(
    help=CONVERT,
    short_help="Convert a config to another stack, and say what was lost.",
    reads=reads_file(counts=True, reports=True, gating=CHOOSING, many=True, model=True),
)
def convert(
    job: Job,
    view: View,
    gate: Any,
    names: tuple[str, ...],
    to: Annotated[
        str,
        typer.Option("--to", metavar="DIALECT", help="Stack to convert to.", show_default=False),
    ],
    to_version: ToVersion = None,
    output: Outputs = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Any loss is an error, and nothing is written.")
    ] = False,
    carry: Annotated[
        bool,
        typer.Option(
            help="Read and write OUT.carry.json, with what the other stack cannot express."
        ),
    ] = True,
    script: Annotated[
        bool,
        typer.Option(
            "--script", help="Also write the script that starts the run (DeepSpeed, Megatron)."
        ),
    ] = False,
    force: Force = False,
    dry_run: DryRun = False,
) -> int:
    """Convert one file."""
    from bridge.cli.convert import Asked, convert

    options = {"to_version": to_version, "strict": strict, "script": script, "force": force}
    return convert(job, Asked(to, output, view, carry, dry_run, options), gate, names)


@app.late_command(
    help=CHECK,
    short_help="Say what is wrong or surprising in a config.",
    reads=reads_file(counts=True, reports=True, gating=GATING, many=True, model=True),
)
def check(job: Job, view: View, gate: Any, names: tuple[str, ...]) -> int:
    """Check one file or several files."""
    from bridge.cli.check import check

    return check(job, view, gate, names)


@app.late_command(
    help=RESOLVE,
    short_help="Say which source of a run wins, and which is ignored.",
    reads=reads_file(counts=True, reports=True, gating=CHOOSING, many=True, model=True, file=Run),
)
def resolve(
    job: Job, view: View, gate: Any, names: tuple[str, ...], user_config: UserConfig = False
) -> int:
    """Resolve one run."""
    from bridge.cli.resolve import resolve

    return resolve(job, view, gate, names, user_config)


@app.late_command(
    help=DIFFERENCE,
    short_help="Say where the meanings of two configs differ.",
    reads=reads_file(counts=True, reports=True, gating=GATING, model=True),
)
def diff(
    job: Job,
    other: Annotated[
        str,
        typer.Argument(
            metavar="OTHER", help="The config to compare FILE with.", show_default=False
        ),
    ],
    view: View,
    gate: Any,
) -> int:
    """Compare two files."""
    from bridge.cli.check import diff

    return diff(job, other, view, gate)


@app.late_command(
    help=MATCH,
    short_help="Say whether a launch fits the model that it loads.",
    reads=reads_file(counts=True, reports=True, gating=CHOOSING),
)
def match(
    job: Job,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="The model's folder, config or launch.", show_default=False
        ),
    ],
    view: View,
    gate: Any,
) -> int:
    """Hold one launch against a model."""
    from bridge.cli.match import match

    return match(job, model, view, gate)


@app.late_command(
    help=LAYOUT,
    short_help="Show stages, bytes and collectives of a config's plan.",
    reads=reads_file(counts=True, sized=True, world_size=Ranks),
)
def layout(job: Job, sizes: Any, picture: Picture) -> int:
    """Show the layout of one file."""
    from bridge.cli.layout import layout

    return layout(job, sizes, picture)


@app.late_command(
    help=ESTIMATE,
    short_help="Say how much memory a run needs, and whether it fits.",
    reads=reads_file(counts=True, sized=True, world_size=Ranks, many=True, file=Run),
)
def estimate(
    job: Job,
    names: tuple[str, ...],
    sizes: Any,
    picture: Picture,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every number with its formula.")
    ] = False,
) -> int:
    """Estimate the memory of one run."""
    from bridge.cli.estimate import estimate

    return estimate(job, sizes, picture, explain, names)


@app.late_command(
    help=SHOW,
    short_help="Say what a field means, and where it goes in the other stacks.",
    context_settings={"ignore_unknown_options": True},  # FIELD may be a flag, such as --clip-grad
)
def show(
    dialect: Annotated[
        str,
        typer.Argument(metavar="DIALECT", help="Stack whose fields to show.", show_default=False),
    ],
    field: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="[FIELD]",
            help="Path, flag or section; all fields by default.",
            show_default=False,
        ),
    ] = None,
    schema: Annotated[
        bool,
        typer.Option("--schema", help="Print the JSON Schema of the stack's files, for editors."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Show one field, a section, or a list of all fields."""
    from bridge.cli.show import show

    return show(dialect, field, as_json, schema)


@app.late_command(
    "schema", help=SCHEMA, short_help="Print the JSON Schema of a command's output with --json."
)
def schema_of(
    name: Annotated[Optional[str], typer.Argument(metavar="[COMMAND]", show_default=False)] = None,  # noqa: UP045
) -> int:
    """Print the JSON Schema of one output or, without a name, the names of all outputs."""
    from bridge.cli.show import schema_of

    return schema_of(name)


@app.late_command(
    help=DRIFT,
    short_help="Say what a config means in another release, and migrate it.",
    reads=reads_file(counts=True, model=True),
)
def drift(
    job: Job, to_version: ToVersion = None, output: Output = None, force: Force = False
) -> int:
    """Compare the meaning of one file in two releases."""
    from bridge.cli.drift import drift

    return drift(job, to_version, output, force)


@app.late_command(
    help=FUZZ, short_help="Try generated configs of a stack, and print the smallest that fails."
)
def fuzz(
    dialect: Annotated[
        str, typer.Argument(metavar="DIALECT", help="Stack to fuzz.", show_default=False)
    ],
    to: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--to",
            metavar="DIALECT",
            help="Stack to convert the configs to, and back from; by default they are not converted.",
        ),
    ] = None,
    examples: Annotated[
        int, typer.Option("--examples", metavar="N", min=1, help="Number of configs to try.")
    ] = 200,
    seed: Annotated[
        int, typer.Option("--seed", metavar="S", min=0, help="Another seed tries other configs.")
    ] = 0,
    from_version: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--from-version", metavar="V", help="Release to fuzz; all by default."),
    ] = None,
    to_version: ToVersion = None,
    as_json: Json = False,
) -> int:
    """Fuzz one dialect."""
    from bridge.cli.fuzz import fuzz

    return fuzz(dialect, to, (from_version, to_version), examples, seed, as_json)


@app.late_command(
    help=DEMO, short_help="Convert a bundled Megatron launch to DeepSpeed and back, and train it."
)
def demo(
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="DIR", callback=own_place, help="Folder to write to."
        ),
    ] = Path("stagebridge-demo"),
    train: Annotated[
        bool, typer.Option(help="Train the plan on two local ranks, if torch is installed.")
    ] = True,
    silence: Silence = None,
    timeout: Timeout = None,
) -> int:
    """Run the bundled example."""
    from bridge.cli.demo import demo

    return demo(output, train, silence, timeout)


Traced = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--trace",
        metavar="DIR",
        callback=own_place,
        help=(
            "Folder for a log of every layer: what FILE asks to log, else statistics and some values; "
            "see trace --help."
        ),
    ),
]
StepsInAll = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--steps",
        metavar="N",
        min=1,
        help=(
            "Number of steps in all, including the steps before a resume; default: the number in a "
            "recipe, else 20."
        ),
    ),
]
ModelToTrain = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--model",
        metavar="NAME",
        help=(
            "tiny, file (the model that FILE states), or a model's folder; a recipe names its "
            "own model."
        ),
    ),
]
EngineToRun = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Engine to run on: native, a stack with an engine of its own, or auto.",
    ),
]


@app.late_command(
    help=TRAIN,
    short_help="Run a config's plan on the native engine.",
    reads=reads_file(as_json=JsonSteps, launched=True),
)
def train(
    job: Job,
    steps: StepsInAll = None,
    model: ModelToTrain = None,
    data: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--data",
            metavar="TEXT",
            help="File to train on, byte by byte; a bundled text by default.",
        ),
    ] = None,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit", help="Shrink sizes that do not fit the ranks launched, and say which."
        ),
    ] = False,
    engine: EngineToRun = "native",
    save: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--save", metavar="DIR", callback=own_place, help="Write a checkpoint at the end."
        ),
    ] = None,
    resume: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--resume",
            metavar="DIR",
            help="Continue from the latest checkpoint there, of any layout.",
        ),
    ] = None,
    groups: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--groups",
            metavar="FILE",
            help="File with the optimizer's groups of parameters, as `move` writes it.",
        ),
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Make two runs equal bit by bit, at a loss of speed."),
    ] = False,
    trace: Traced = None,
    trace_full: Annotated[
        bool, typer.Option("--trace-full", help="Write whole tensors into the log.")
    ] = False,
    desync: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--desync",
            metavar="WHAT",
            help="Compare ranks that must agree; on a mismatch: log, raise or dump.",
        ),
    ] = None,
    desync_every: Annotated[
        int, typer.Option("--desync-every", metavar="N", min=1, help="Compare every N steps.")
    ] = 1,
    silence: Silence = None,
    timeout: Timeout = None,
) -> int:
    """Train the plan of one file."""
    from bridge.api import read
    from bridge.cli.train import TrainOptions, Watch, check_choice, train

    known = model and read.check_choice("--model", model, ("tiny", "file"))
    # Before the config is read, which may take ranks and time.
    if desync is not None:
        check_choice("--desync", desync, ("log", "raise", "dump"))
    watch = Watch(trace, trace_full, desync, desync_every)
    return train(
        job,
        TrainOptions(
            steps,
            known,
            data,
            fit,
            save,
            resume,
            groups,
            deterministic,
            watch,
            engine,
            silence,
            timeout,
        ),
    )


@app.late_command(
    help=VERIFY,
    short_help="Run a config and its translation side by side, and say if they are the same run.",
    reads=reads_file(),
)
def verify(
    job: Job,
    other: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="[OTHER]",
            help="A config of your own to compare FILE with, instead of --to.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--to", metavar="DIALECT", help="Stack to translate to.", show_default=False),
    ] = None,
    model: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--model",
            metavar="FOLDER",
            help="Folder of your model: config.json of Hugging Face, with or without weights.",
        ),
    ] = None,
    batch: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--batch",
            metavar="FILE",
            help="Your batch, as bridge.trace.batch(FILE, batch) writes it.",
        ),
    ] = None,
    on: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--on",
            metavar="A,B",
            help=(
                "Engines of FILE and OTHER: torch, ddp, fsdp2, native or a stack; by default their "
                "own stacks."
            ),
        ),
    ] = None,
    to_version: ToVersion = None,
    ranks: Annotated[
        int,
        typer.Option("--ranks", metavar="N", min=1, max=8, help="Largest number of local ranks."),
    ] = 4,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            help="Steps of each run; by default enough to show a difference.",
        ),
    ] = None,
    padded: Annotated[
        bool,
        typer.Option(
            "--padded",
            help="Turn half of every third sample into padding that the loss leaves out.",
        ),
    ] = False,
) -> int:
    """Verify one file."""
    from bridge.cli.verify import verify

    options = {"to": to, "to_version": to_version, "ranks": ranks, "steps": steps, "padded": padded}
    return verify(job, other, model, batch, on, options)


@app.late_command(
    help=MOVE,
    short_help="Move a run with its checkpoint to another stack, and prove it.",
    reads=reads_file(counts=True),
)
def move(
    job: Job,
    checkpoint: Annotated[
        Path,
        typer.Option(
            "--checkpoint",
            metavar="DIR",
            help="Folder of the run's checkpoint.",
            show_default=False,
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="STACK", help="Stack to move to, or native.", show_default=False
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            callback=own_place,
            help="Folder to write.",
            show_default=False,
        ),
    ],
    to_version: ToVersion = None,
    from_format: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--from-format",
            metavar="FORMAT",
            help="Format of the checkpoint, if the folder holds several.",
        ),
    ] = None,
    model: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--model",
            metavar="DIR",
            help="Folder with the model's config.json, if FILE does not state it.",
        ),
    ] = None,
    prove: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--prove",
            metavar="N",
            min=1,
            help="Resume the old and the new run for N steps, and compare them.",
        ),
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks",
            metavar="N",
            min=1,
            max=8,
            help="Largest number of local ranks for the proof.",
        ),
    ] = 2,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")
    ] = False,
    verify: Annotated[
        bool, typer.Option(help="Check the checkpoint against its own checksums first.")
    ] = True,
    processes: Processes = 1,
) -> int:
    """Move one run."""
    from bridge.cli.move import move

    return move(
        job,
        checkpoint=checkpoint,
        to=to,
        output=output,
        to_version=to_version,
        from_=from_format,
        model=model,
        prove=prove,
        ranks=ranks,
        processes=processes,
        dry_run=dry_run,
        verify=verify,
    )


@app.late_command(
    help=SCHEDULE,
    short_help="Show, prove and draw a config's pipeline schedule.",
    reads=reads_file(),
)
def schedule(
    job: Job,
    microbatches: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--microbatches",
            metavar="N",
            min=1,
            max=COUNT,
            help="Number of microbatches in a step; by default as FILE says.",
        ),
    ] = None,
    png: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--plot",
            "--png",
            metavar="OUT",
            callback=own_file,
            help="Draw the schedule; the suffix of OUT sets the format: svg, pdf, html or png.",
        ),
    ] = None,
    csv: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--csv",
            metavar="OUT",
            callback=own_file,
            help="Write the schedule as a compute-only table of torch.distributed.pipelining.",
        ),
    ] = None,
) -> int:
    """Show one file's schedule."""
    from bridge.cli.schedule import ScheduleOptions, schedule

    return schedule(job, ScheduleOptions(microbatches, png, csv))


checkpoint = Commands(help=CHECKPOINT)
app.add_typer(
    checkpoint, name="checkpoint", short_help="See, convert and compare checkpoints of any format."
)


@checkpoint.late_command("inspect", help=INSPECT, short_help="Show what a checkpoint holds.")
def checkpoint_inspect(
    folder: Folder,
    from_: FromFormat = None,
    root: Root = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Read all files, and check them against their own checksums."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Show one checkpoint."""
    from bridge.cli.checkpoint import inspect

    return inspect(folder, from_, root, tensors, check, as_json)


@checkpoint.late_command(
    "convert", help=CHECKPOINT_CONVERT, short_help="Write a checkpoint in another format."
)
def checkpoint_convert(
    folder: Folder,
    to: Annotated[
        str, typer.Option("--to", metavar="FORMAT", help="Format to write.", show_default=False)
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            callback=own_place,
            help="Folder to write.",
            show_default=False,
        ),
    ],
    from_: FromFormat = None,
    root: Root = None,
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--dtype",
            metavar="TYPE",
            help="Format of the weights: fp32, bf16 or fp16; unchanged by default.",
        ),
    ] = None,
    ranks: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--ranks",
            metavar="N",
            min=1,
            max=FILES,
            help="Number of data ranks to write files for, if the format depends on it.",
        ),
    ] = None,
    level: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--level",
            metavar="L",
            min=0,
            max=3,
            help="ZeRO level to write, if the format depends on it.",
        ),
    ] = None,
    names: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--names",
            metavar="NAMES",
            help="Names of parameters: huggingface, transformers, megatron, megatron-local, neutral.",
        ),
    ] = None,
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--config", metavar="FILE", help="Config of the model, of any stack, for --names."
        ),
    ] = None,
    samples: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--samples",
            metavar="N",
            min=0,
            help="Number of samples that the run has seen, if the checkpoint does not state it.",
        ),
    ] = None,
    shard_size: Annotated[
        float, typer.Option("--shard-size", metavar="GB", help="Largest file of weights.")
    ] = 5.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")
    ] = False,
    verify: Annotated[
        bool, typer.Option(help="Check the checkpoint against its own checksums first.")
    ] = True,
    processes: Processes = 1,
    as_json: Json = False,
) -> int:
    """Convert one checkpoint."""
    from bridge.cli.checkpoint import CheckpointOptions, convert

    wanted = {"dtype": dtype, "ranks": ranks, "level": level, "shard": shard_size}
    return convert(
        folder,
        CheckpointOptions(
            to,
            output,
            from_,
            wanted,
            dry_run,
            verify,
            as_json,
            processes,
            names,
            config,
            samples,
            root,
        ),
    )


@checkpoint.late_command(
    "diff",
    help=CHECKPOINT_DIFF,
    short_help="Compare two checkpoints of any formats, tensor by tensor.",
)
def checkpoint_diff(
    first: Annotated[
        Path, typer.Argument(metavar="A", help="Folder of a checkpoint.", show_default=False)
    ],
    second: Annotated[
        Path,
        typer.Argument(
            metavar="B", help="Folder of the checkpoint to compare A with.", show_default=False
        ),
    ],
    as_json: Json = False,
) -> int:
    """Compare two checkpoints."""
    from bridge.cli.checkpoint import diff

    return diff(first, second, as_json)


trace = Commands(help=TRACE)
app.add_typer(
    trace, name="trace", short_help="See inside runs: what each layer did, where two first differ."
)


@trace.late_command("diff", help=DIFF, short_help="Find where two runs first differ.")
def trace_diff(
    first: Annotated[
        Path, typer.Argument(metavar="A", help="Folder of a traced run.", show_default=False)
    ],
    second: Annotated[
        Path,
        typer.Argument(
            metavar="B", help="Folder of the run to compare A with.", show_default=False
        ),
    ],
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--html",
            metavar="OUT",
            callback=own_file,
            help="Write a page of all steps: map, loss, norms, findings.",
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Also compare the steps after the first step that differs."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Compare two runs."""
    from bridge.cli.trace import diff

    return diff(first, second, html, every, as_json)


@trace.late_command(
    "html", help=PAGE, short_help="Write a page of a run, or of two that are compared."
)
def trace_html(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a traced run.", show_default=False)
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="OUT",
            callback=own_file,
            help="File for the page.",
            show_default=False,
        ),
    ],
    second: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(
            metavar="[B]", help="Folder of a second run, to compare RUN with.", show_default=False
        ),
    ] = None,
) -> int:
    """Write a page."""
    from bridge.cli.trace import html

    return html(run, second, out)


@trace.late_command("watch", help=FOLLOWED, short_help="Follow a run while it trains.")
def trace_watch(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a traced run.", show_default=False)
    ],
    interval: Annotated[
        float,
        typer.Option(
            "--interval", metavar="S", min=0.05, help="Seconds between two reads of the log."
        ),
    ] = 1.0,
) -> int:
    """Follow a run."""
    from bridge.cli.watching import watch

    return watch(run, interval)


@trace.late_command(
    "export", help=EXPORT, short_help="Write a run for TensorBoard, or Weights & Biases offline."
)
def trace_export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a traced run.", show_default=False)
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="DIR",
            callback=own_place,
            help="Folder to make.",
            show_default=False,
        ),
    ],
    target: Annotated[
        str, typer.Option("--to", metavar="TOOL", help="tensorboard or wandb.")
    ] = "tensorboard",
) -> int:
    """Export a run."""
    from bridge.cli.watching import export

    return export(run, target, out)


@trace.late_command(
    "run", help=WATCHED, short_help="Run a training of any stack, unedited, and watch it."
)
def trace_run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="Command to run.", show_default=False)
    ],
    run: Annotated[
        Path, typer.Option("--run", metavar="DIR", callback=own_place, help="Folder of the trace.")
    ] = Path("trace"),
    level: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--level",
            metavar="N",
            min=1,
            help="Also log every layer, gradient and weight, at this level.",
        ),
    ] = None,
    every: Annotated[
        int, typer.Option("--every", metavar="N", min=1, help="Log tensors in every Nth step.")
    ] = 1,
    ranks: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--ranks", metavar="LIST", help="Log tensors of these ranks: 0,3 or 0-7."),
    ] = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Log only one copy of tensors that are equal on several ranks, bit by bit.",
        ),
    ] = False,
    budget: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--budget",
            metavar="SIZE",
            help=(
                "Largest size of the log, such as 500MB or 2GB; near that size fewer steps "
                "are logged, then none."
            ),
        ),
    ] = None,
    on_finding: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--on-finding",
            metavar="CMD",
            help="Run CMD for each finding, without a shell; it gets the finding as JSON on stdin.",
        ),
    ] = None,
    accept: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--accept",
            metavar="ID:PLACE",
            help=(
                "A fault that is meant: the id of the finding and the layer or parameter that it "
                "names, or `the run`; it does not count for the exit code. Repeatable. A whole project "
                'accepts with accept = ["ID:PLACE"] under [tool.stagebridge.trace] in its pyproject.toml.'
            ),
        ),
    ] = None,
) -> int:
    """Watch a training."""
    from bridge.cli.trace import Kept, start_traced

    return start_traced(
        command, run, level, on_finding, Kept(every, ranks, once, budget), accept or ()
    )


@trace.late_command("show", help=LINES, short_help="Show what a run logged.")
def trace_show(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a traced run.", show_default=False)
    ],
    layer: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--layer", metavar="PART", help="Show layers whose name contains PART."),
    ] = None,
    kind: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--kind", metavar="KIND", help="output, input gradient, weight, gradient, memory, ..."
        ),
    ] = None,
    step: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(
            "--step",
            metavar="N",
            min=0,
            help="Steps to show; 0 is the state before the first step.",
        ),
    ] = None,
    microbatches: Annotated[
        bool, typer.Option("--microbatches", help="Also show each microbatch separately.")
    ] = False,
    plot: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--plot", metavar="OUT", callback=own_file, help="Draw a statistic over steps, as PNG."
        ),
    ] = None,
    statistic: Annotated[
        str, typer.Option("--statistic", metavar="NAME", help="The statistic to plot.")
    ] = "norm",
    as_json: Json = False,
) -> int:
    """Show one run."""
    from bridge.cli.trace import Selection, show

    return show(
        run, Selection(layer or (), kind or (), step or (), microbatches), plot, statistic, as_json
    )
