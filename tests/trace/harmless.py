"""Unedited scripts of many kinds, run with the trace and without it: both print the same numbers, bit by bit, and end alike.

`python -m tests.trace.harmless [NUMBER [SEED]]` draws scripts, and prints those that the trace changes and counts.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from random import Random

import torch

from bridge.trace.injected_watch import watch_script
from tests.engine.pool import free_port

HEAD = """
import copy, io, os, pickle, random, sys
import numpy, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
if world > 1:
    dist.init_process_group("gloo")
for seed in (torch.manual_seed, random.seed, numpy.random.seed):
    seed(7)
calls = []
def shown(*values):
    print(rank, *(float(value).hex() for value in values), flush=True)
def tokens(step):
    return torch.randint(3, 23, (4, 9), generator=torch.Generator().manual_seed(10 * step + rank))
def rows(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(DROP)
        self.seen = []
    def forward(self, x):
        self.seen.append(x.shape[0])
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return x * (1 + 0.01 * DRAWN) + 0.01 * DRAWN
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.blocks, self.head = nn.Embedding(23, 8), nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 23)
    def forward(self, ids):
        x = self.tok(ids)
        for block in self.blocks:
            x = RUN
        return self.head(x)
"""
MODELS: Mapping[str, tuple[str, str]] = {
    "words": (
        "inner = Words()",
        "def loss_of(model, step):\n    ids = tokens(step)\n"
        "    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())",
    ),
    "norms": (
        "inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(DROP), nn.Linear(16, 1))",
        "def loss_of(model, step):\n    return model(rows(step)).square().mean()",
    ),
    "recurrent": (
        "class Inner(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.lstm, self.head = nn.LSTM(8, 8, 2), nn.Linear(8, 1)\n"
        "    def forward(self, x):\n        return self.head(self.lstm(x)[0])\n"
        "inner = Inner()",
        "def loss_of(model, step):\n    return (model(rows(step).view(4, 1, 8)) - 1).square().mean()",
    ),
    "normed weights": (
        "inner = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh(),"
        " nn.utils.spectral_norm(nn.Linear(8, 1)))",
        "def loss_of(model, step):\n    return (model(rows(step)) - 1).square().mean()",
    ),
}
TRACE = ("bridge.trace.invariants", "bridge.trace.layer_log", "bridge.trace.pipelining")
LEVELS = ("layer_outputs", "layer_gradients", "param_init", "all_param_gradients", "param_update")
LIMIT = 300
"""Seconds after which a script is killed."""
RUNS = (
    "block(x)",
    "checkpoint(block, x, use_reentrant=False)",
    "checkpoint(block, x, use_reentrant=True)",
)
DRAWS = ("0.5", "random.random()", "numpy.random.rand()", "torch.rand(1)", "len(calls)")
OPTIMIZERS = (
    "torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)",
    "torch.optim.AdamW(model.parameters(), 1e-2)",
    "torch.optim.AdamW(model.parameters(), 1e-2, foreach=False, amsgrad=True)",
    "torch.optim.Adafactor(model.parameters(), 1e-2)",
    "torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)",
)
STEPS = (
    "optimizer.zero_grad(); loss = loss_of(model, step); loss.backward(); optimizer.step()",
    "optimizer.zero_grad()\n"
    "    for part in range(2):\n        loss = loss_of(model, 2 * step + part) / 2; loss.backward()\n"
    "    nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n    optimizer.step()",
    "with torch.autocast('cpu', torch.bfloat16):\n        loss = loss_of(model, step)\n"
    "    optimizer.zero_grad(); loss.backward(); optimizer.step()",
)
CLOSURE = (
    "def closure():\n        optimizer.zero_grad(); loss = loss_of(model, step); loss.backward(); return loss\n"
    "    loss = optimizer.step(closure)"
)
EXTRAS: Mapping[str, tuple[str, str]] = {
    "copy of the inner": (
        "",
        "if step % 2:\n        best = copy.deepcopy(inner); shown(loss_of(best, 50))",
    ),
    "copy at the start": (
        "average = copy.deepcopy(model)",
        "with torch.no_grad():\n"
        "        for mean, weight in zip(average.parameters(), model.parameters()): mean.lerp_(weight, 0.1)\n"
        "        shown(loss_of(average.eval(), 60))",
    ),
    "training copy": (
        "",
        "twin = copy.deepcopy(inner); side = torch.optim.SGD(twin.parameters(), 0.1)\n"
        "    out = loss_of(twin, 70); out.backward(); side.step(); shown(out)",
    ),
    "averaged": (
        "mean = torch.optim.swa_utils.AveragedModel(inner)",
        "mean.update_parameters(inner); shown(loss_of(mean, 80))",
    ),
    "saved": (
        "",
        "file = io.BytesIO(); torch.save(inner, file); file.seek(0)\n"
        "    shown(loss_of(torch.load(file, weights_only=False), 90))",
    ),
    "pickled": ("", "shown(loss_of(pickle.loads(pickle.dumps(inner)), 95))"),
    "copied with its optimizer": (
        "",
        "kept = copy.deepcopy((inner, optimizer)); shown(sum(w.sum() for w in kept[0].parameters()))",
    ),
    "resumed": (
        "",
        "if step == 1: state = copy.deepcopy((inner.state_dict(), optimizer.state_dict()))\n"
        "    if step == 3: inner.load_state_dict(state[0]); optimizer.load_state_dict(state[1])",
    ),
    "evaluated": (
        "",
        "model.eval()\n    with torch.no_grad(): shown(loss_of(model, 40))\n    model.train()",
    ),
    "evaluated on the first": (
        "",
        "if rank == 0:\n        inner.eval()\n        with torch.no_grad(): shown(loss_of(inner, 41))\n        inner.train()",
    ),
    "hooks": ("inner.register_forward_hook(lambda *_: calls.append(1))", "shown(len(calls))"),
    "draws": ("", "shown(random.random(), numpy.random.rand(), torch.rand(1))"),
    "frozen": ("", "if step == 2: next(iter(inner.parameters())).requires_grad_(False)"),
    "two more": (
        "critic = nn.Linear(1, 1); other = torch.optim.Adam(critic.parameters(), 0.01)",
        "other.zero_grad(); critic(loss.detach().view(1, 1)).square().mean().backward(); other.step()",
    ),
    "exits": ("", "if step == 4: sys.exit(5)"),
}


def prepare() -> None:
    """Import what scripts and the trace need once, and not in every process, where it takes seconds."""
    torch.set_num_threads(1)
    for name in ("torch._dynamo", "torch.distributed.tensor", *TRACE):
        import_module(name)


def draw_script(seed: int) -> tuple[int, str]:
    """A number of ranks, and the text of a script."""
    draw = Random(seed)
    build, loss = MODELS[draw.choice([*MODELS, "words", "words"])]
    ranks = draw.choice([1, 1, 2])
    optimizer = draw.choice(OPTIMIZERS)
    extras = draw.sample([*EXTRAS.values()], draw.randint(1, 4))
    step = CLOSURE if "LBFGS" in optimizer else draw.choice(STEPS)
    wrapped = "nn.parallel.DistributedDataParallel(inner)" if ranks > 1 else "inner"
    # What draws other numbers when it is computed again is no right training under DDP's own checks.
    head = HEAD.replace("RUN", draw.choice(RUNS)).replace("DRAWN", draw.choice(DRAWS))
    lines = [
        head + build,
        loss,
        f"model = {wrapped}",
        f"optimizer = {optimizer}",
        *(start for start, _ in extras),
        "for step in range(5):",
        *(f"    {part}" for part in (step, "shown(loss)", *(each for _, each in extras))),
        "shown(random.random(), numpy.random.rand(), torch.rand(1), *(w.sum() for w in inner.parameters()))",
        "if world > 1: dist.destroy_process_group()",
    ]
    return ranks, "\n".join(lines).replace("DROP", draw.choice(["0.0", "0.2"]))


def run_script(
    path: Path, ranks: int, trace: Path | None, level: int = 2
) -> list[tuple[int, list[str]]]:
    """The exit code and the lines of each rank of a script, which runs in processes forked from this one."""
    port, children = free_port(), list[tuple[int, Path]]()
    for rank in range(ranks):
        lines = path.with_suffix(f".{bool(trace)}{rank}")
        child = os.fork()
        if not child:
            signal.alarm(LIMIT)
            os._exit(_run_rank(path, lines, rank, ranks, port, trace, level))
        children.append((child, lines))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, _ in children]
    return [
        (code, lines.read_text().splitlines())
        for code, (_, lines) in zip(codes, children, strict=True)
    ]


def _run_rank(
    path: Path, lines: Path, rank: int, ranks: int, port: int, trace: Path | None, level: int
) -> int:
    with lines.open("w") as file:
        os.dup2(file.fileno(), 1)
        with lines.with_suffix(f"{lines.suffix}.log").open("w") as log:
            os.dup2(log.fileno(), 2)
        sys.stdout = os.fdopen(os.dup(1), "w")
        sys.stderr = os.fdopen(os.dup(2), "w")
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
        os.environ |= where | {"WORLD_SIZE": str(ranks)}
        code = 0
        try:
            if trace is not None:
                logs = dict.fromkeys(LEVELS, level)
                watch_script({"run": str(trace), "debug": logs | {"tensor_parallel": True}})
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        return code


def changed_scripts(
    seeds: range, folder: Path, counts: dict[str, int]
) -> Iterator[tuple[int, str]]:
    """The seeds of those scripts that the trace changes, with how. Scripts that fail by themselves, and that nothing was
    attached to, are counted apart.
    """
    prepare()
    for seed in seeds:
        ranks, text = draw_script(seed)
        path = folder / f"{seed}.py"
        path.write_text(text)
        plain = run_script(path, ranks, None)
        watched = run_script(path, ranks, folder / f"trace{seed}")
        attached = (folder / f"trace{seed}" / "attached.json").exists()
        kind = "fails" if any(code not in (0, 5) for code, _ in plain) else "runs"
        counts[kind] = counts.get(kind, 0) + 1
        counts["watched"] = counts.get("watched", 0) + attached
        logs = [path.with_suffix(f".True{rank}.log").read_text() for rank in range(ranks)]
        alarms = [
            line
            for log in logs
            for line in log.splitlines()
            if re.search("observer|check-ended", line)
        ]
        if plain != watched or not attached or alarms:
            yield seed, "\n".join([str(plain)[:400], str(watched)[:400], *alarms, logs[0][-800:]])


def main() -> None:
    """Print the scripts that the trace changes, and counts."""
    number, first = (*map(int, sys.argv[1:3]), *(60, 0)[len(sys.argv) - 1 :])[:2]
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        changed = 0
        for seed, how in changed_scripts(range(first, first + number), Path(folder), counts):
            changed += 1
            print(f"script {seed} is changed:\n{how}", flush=True)
    print(f"{number} scripts: {counts}, {changed} changed")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
