"""Whole scripts of the kinds that people write, run with the trace and without it: both print the same numbers, bit by bit, and
end alike. `harmless.py` draws small ones; these are EMA, saving, evaluation, adversaries, recompute, LoRA, rewards, compile,
accelerate, the Trainer, DeepSpeed itself, sharding and pipelining.

`python -m tests.trace.unedited [KIND:NAME ...]` runs all of them, or those, and prints what the trace changes, and counts.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.engine.scripts import FOLDER, names
from tests.trace.harmless import prepare, run_script

NUMBERS = """
import hashlib
def shown(value):
    if isinstance(value, dict):
        for name in sorted(value, key=str): print(name, end=" "); shown(value[name])
    elif isinstance(value, (list, tuple)):
        for part in value: shown(part)
    elif hasattr(value, "detach"):
        print(hashlib.sha256(value.detach().double().contiguous().numpy().tobytes()).hexdigest())
    else:
        print(value.hex() if isinstance(value, float) else repr(value))
"""
PLAIN = """
from pathlib import Path
from tests.engine.scripts import plain
run = plain(NAME, Path(FOLDER))
shown([run.losses, run.norms, run.notes, run.weights])
"""
DEEPSPEED = """
import contextlib, os, sys, torch
from pathlib import Path
from tests.engine import trainer_scripts
os.environ |= {"LOCAL_RANK": "0", **trainer_scripts.places(1)}
torch.manual_seed(0)
run = trainer_scripts.Run(Path(FOLDER), LEVEL)
with contextlib.redirect_stdout(sys.stderr):  # trainers print how long they took
    trainer_scripts.SCRIPTS[NAME](run)
shown([run.numbers, run.weights])
"""
HEAD = """
import os, torch, torch.distributed as dist
from torch import nn
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1: dist.init_process_group("gloo")
torch.manual_seed(5)
def rows(step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * step + rank))
def net(*sizes):
    parts = []
    for one, other in zip(sizes, sizes[1:]): parts += [nn.Linear(one, other), nn.LeakyReLU()]
    return nn.Sequential(*parts[:-1])
"""
END = """
if world > 1: dist.destroy_process_group()
"""
WHOLE: Mapping[str, tuple[int, str]] = {
    "adversaries": (
        1,
        """
makes, judges = net(4, 16, 8), net(8, 16, 1)
optimizers = [torch.optim.Adam(one.parameters(), 1e-3, betas=(0.5, 0.99)) for one in (makes, judges)]
bce = nn.functional.binary_cross_entropy_with_logits
for step in range(6):
    false = makes(rows(step, 8, 4))
    optimizers[1].zero_grad()
    loss = bce(judges(rows(step, 8, 8)), torch.ones(8, 1)) + bce(judges(false.detach()), torch.zeros(8, 1))
    loss.backward(); optimizers[1].step(); shown(float(loss))
    optimizers[0].zero_grad()
    loss = bce(judges(false), torch.ones(8, 1))
    loss.backward(); optimizers[0].step(); shown(float(loss))
shown([*makes.parameters(), *judges.parameters()])
""",
    ),
    "critic of Wasserstein": (
        2,
        """
makes = nn.parallel.DistributedDataParallel(net(4, 16, 8))
judges = nn.parallel.DistributedDataParallel(net(8, 16, 1))
first, second = (torch.optim.RMSprop(one.parameters(), 1e-3) for one in (judges, makes))
for step in range(6):
    first.zero_grad()
    loss = judges(makes(rows(step, 8, 4)).detach()).mean() - judges(rows(step, 8, 8)).mean()
    loss.backward(); first.step(); shown(float(loss))
    for weight in judges.parameters(): weight.data.clamp_(-0.05, 0.05)
    if step % 2:
        second.zero_grad(); loss = -judges(makes(rows(step, 8, 4))).mean()
        loss.backward(); second.step(); shown(float(loss))
shown([*makes.parameters(), *judges.parameters()])
""",
    ),
    "gradient penalty": (
        1,
        """
model = net(8, 16, 1); optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(4):
    x = rows(step, 8, 8).requires_grad_()
    out = model(x)
    slope, = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = out.square().mean() + (slope.norm(dim=1) - 1).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); shown(float(loss))
shown([*model.parameters()])
""",
    ),
    "policy gradient": (
        1,
        """
import copy
policy, optimizer = net(4, 16, 3), None
optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
reference = copy.deepcopy(policy).eval()
for step in range(4):
    policy.eval()
    with torch.no_grad():
        states = rows(step, 16, 4); acts = torch.distributions.Categorical(logits=policy(states)).sample()
        old = policy(states).log_softmax(-1).gather(1, acts[:, None])
    policy.train()
    gain = (acts == 1).float()[:, None] - 0.5
    for epoch in range(3):
        logs = policy(states).log_softmax(-1).gather(1, acts[:, None])
        ratio = (logs - old).exp()
        with torch.no_grad(): far = reference(states).log_softmax(-1)
        loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        loss = loss + 0.1 * nn.functional.kl_div(policy(states).log_softmax(-1), far, log_target=True)
        optimizer.zero_grad(); loss.backward(); optimizer.step(); shown(float(loss))
shown([*policy.parameters()])
""",
    ),
    "values of a target": (
        1,
        """
import copy
model = net(4, 16, 2); target = copy.deepcopy(model); optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step in range(6):
    now, then = rows(step, 8, 4), rows(step + 50, 8, 4)
    with torch.no_grad(): aim = 1 + 0.9 * target(then).max(-1).values
    loss = (model(now)[:, 0] - aim).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); shown(float(loss))
    if step % 2: target.load_state_dict(model.state_dict())
shown([*model.parameters()])
""",
    ),
    "average of weights under DDP": (
        2,
        """
import copy
model = net(8, 16, 1)
mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
wrapped = nn.parallel.DistributedDataParallel(model); optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
best = None
for step in range(5):
    loss = wrapped(rows(step, 8, 8)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); mean.update_parameters(model); shown(float(loss))
    if best is None or float(loss) < best[0]: best = float(loss), copy.deepcopy(wrapped)
shown([*mean.parameters(), *best[1].parameters(), *model.parameters()])
""",
    ),
    "saved and loaded under DDP": (
        2,
        """
import io
model = net(8, 16, 1); wrapped = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
plan = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
for step in range(6):
    loss = wrapped(rows(step, 8, 8)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); plan.step(); shown(float(loss))
    if step == 2:
        file = io.BytesIO(); torch.save({"m": model, "o": optimizer.state_dict(), "s": plan.state_dict()}, file)
    if step == 4:
        file.seek(0); kept = torch.load(file, weights_only=False)
        model.load_state_dict(kept["m"].state_dict()); optimizer.load_state_dict(kept["o"]); plan.load_state_dict(kept["s"])
shown([*model.parameters()])
""",
    ),
    "compiled under DDP": (
        2,
        """
model = torch.compile(nn.parallel.DistributedDataParallel(net(8, 16, 1)), backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for step in range(4):
    loss = model(rows(step, 8, 8)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); shown(float(loss))
shown([*model.parameters()])
""",
    ),
    "compiled step": (
        1,
        """
model = net(8, 16, 1); optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
model.compile(backend="aot_eager")
for step in range(4):
    loss = model(rows(step, 8, 8)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); shown(float(loss))
shown([*model.parameters()])
""",
    ),
    "compiled blocks and optimizer": (
        1,
        """
model = net(8, 16, 16, 1); optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for part in model: part.compile(backend="aot_eager")
update = torch.compile(optimizer.step, backend="aot_eager")
for step in range(4):
    loss = model(rows(step, 8, 8)).square().mean()
    optimizer.zero_grad(); loss.backward(); update(); shown(float(loss))
shown([*model.parameters()])
""",
    ),
    "sharded": (
        2,
        """
from torch.distributed.fsdp import fully_shard
model = net(8, 16, 16, 1)
for part in model: fully_shard(part) if isinstance(part, nn.Linear) else None
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step in range(4):
    for part in range(2):
        model.set_requires_gradient_sync(part == 1)
        loss = model(rows(10 * step + part, 8, 8)).square().mean() / 2
        loss.backward(); shown(float(loss))
    shown(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()))
    optimizer.step(); optimizer.zero_grad()
shown([weight.full_tensor() for weight in model.parameters()])
""",
    ),
    "pipelined": (
        2,
        """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
part = net(8, 16, 8); stage = PipelineStage(part, rank, world, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(part.parameters(), 1e-2); losses = []
for step in range(4):
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    schedule.step(*((x,) if rank == 0 else ()), target=None if rank == 0 else y, losses=losses)
    optimizer.step()
shown([float(loss) for loss in losses]); shown([*part.parameters()])
""",
    ),
    "pipelined, zero bubble": (
        2,
        """
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
parts = [net(8, 16, 8) for _ in range(2)]
stages = [PipelineStage(part, rank + at * world, 4, torch.device("cpu")) for at, part in enumerate(parts)]
schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD([w for part in parts for w in part.parameters()], 0.1); losses = []
for step in range(4):
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    schedule.step(*((x,) if rank == 0 else ()), target=None if rank == 0 else y, losses=losses)
    if rank or step != 2: optimizer.step()
shown([float(loss) for loss in losses]); shown([*parts[0].parameters()])
""",
    ),
    "LoRA merged for evaluation": (
        1,
        """
class Adapted(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (nn.Linear(*shape, bias=False) for shape in ((base.in_features, rank), (rank, base.out_features)))
        nn.init.zeros_(self.up.weight); self.merged = False
    def merge(self, sign):
        self.base.weight.data.add_(self.up.weight.data @ self.down.weight.data, alpha=sign); self.merged = sign > 0
    def forward(self, x):
        return self.base(x) if self.merged else self.base(x) + self.up(self.down(x))
model = nn.Sequential(Adapted(nn.Linear(8, 16)), nn.Tanh(), Adapted(nn.Linear(16, 1)))
optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], 1e-2)
for step in range(5):
    loss = (model(rows(step, 8, 8)) - 1).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); shown(float(loss))
    if step == 2:
        model.eval()
        for part in (model[0], model[2]): part.merge(1)
        with torch.no_grad(): shown(float(model(rows(60, 8, 8)).mean()))
        for part in (model[0], model[2]): part.merge(-1)
        model.train()
shown([*model.parameters()])
""",
    ),
    "masters in half, copied in a hook": (
        1,
        """
model = net(8, 16, 16, 1).half()
masters = [nn.Parameter(weight.detach().float()) for weight in model.parameters()]
optimizer = torch.optim.SGD(masters, 0.05, momentum=0.9); scale = 64.0
def cast(*_):
    with torch.no_grad():
        for master, weight in zip(masters, model.parameters()): weight.copy_(master)
model.register_forward_pre_hook(cast)
for step in range(8):
    for part in range(2):
        loss = model(rows(2 * step + part, 8, 8).half()).float().square().mean(); (loss * scale).backward()
    for master, weight in zip(masters, model.parameters()): master.grad = weight.grad.float() / scale
    if step != 3: optimizer.step()
    model.zero_grad(); shown(float(loss))
shown([*model.parameters()])
""",
    ),
    "masters rounded at random": (
        1,
        """
model = net(8, 16, 16, 1).bfloat16()
masters = [nn.Parameter(weight.detach().float()) for weight in model.parameters()]
mean = [master.detach().clone() for master in masters]
optimizer = torch.optim.AdamW([{"params": [m for m in masters if m.dim() > 1]},
    {"params": [m for m in masters if m.dim() < 2], "weight_decay": 0.0}], 1e-2)
for step in range(8):
    loss = model(rows(step, 8, 8).bfloat16()).float().square().mean(); loss.backward()
    for master, weight in zip(masters, model.parameters()): master.grad = weight.grad.float()
    optimizer.step(); model.zero_grad(); shown(float(loss))
    with torch.no_grad():
        for master, weight, ema in zip(masters, model.parameters(), mean):
            noise = torch.randint(0, 1 << 16, master.shape, dtype=torch.int32)
            weight.copy_((master.view(torch.int32) + noise).bitwise_and(-65536).view(torch.float32))
            ema.lerp_(master, 0.1)
        if step == 4:  # evaluates with the average
            kept = [weight.clone() for weight in model.parameters()]
            for weight, ema in zip(model.parameters(), mean): weight.copy_(ema)
            model.eval(); shown(float(model(rows(90, 8, 8).bfloat16()).float().mean())); model.train()
            for weight, old in zip(model.parameters(), kept): weight.copy_(old)
shown([*model.parameters()])
""",
    ),
    "masters of its own": (
        1,
        """
model = net(8, 16, 1).bfloat16()
masters = [nn.Parameter(weight.detach().float()) for weight in model.parameters()]
optimizer = torch.optim.AdamW(masters, 1e-2)
for step in range(5):
    loss = model(rows(step, 8, 8).bfloat16()).float().square().mean(); loss.backward()
    for master, weight in zip(masters, model.parameters()): master.grad = weight.grad.float()
    optimizer.step(); model.zero_grad(); shown(float(loss))
    with torch.no_grad():
        for master, weight in zip(masters, model.parameters()): weight.copy_(master)
shown([*model.parameters()])
""",
    ),
    "scaled": (
        1,
        """
model = net(8, 16, 1); optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, growth_interval=2)
for step in range(8):
    with torch.autocast("cpu", torch.float16): loss = model(rows(step, 8, 8)).float().square().mean()
    optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer); scaler.update(); shown([float(loss), scaler.get_scale()])
shown([*model.parameters()])
""",
    ),
    "ends with an error": (
        1,
        """
model = net(8, 16, 1); optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    loss = model(rows(step, 8, 8 if step < 3 else 7)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); shown(float(loss))
""",
    ),
}
"""By name: ranks, and the script between `HEAD` and `END`."""


def every(folder: Path) -> Iterator[tuple[str, int, str]]:
    """All scripts: kind and name, ranks and text; what they read or write lies in `folder`. Those of DeepSpeed are at another
    level of ZeRO each.
    """
    for name in names():
        source = (FOLDER / f"{name}.py").read_text()
        if "\nREFUSED = " not in source and ("peft" not in source or find_spec("peft")):
            text = NUMBERS + PLAIN.replace("NAME", repr(name))
            yield f"torch:{name}", 1, text.replace("FOLDER", repr(str(folder)))
    for name, (ranks, text) in WHOLE.items():
        yield f"whole:{name}", ranks, NUMBERS + HEAD + text + END
    from tests.engine import trainer_scripts

    for at, name in enumerate(trainer_scripts.available([])):
        text = NUMBERS + DEEPSPEED.replace("NAME", repr(name)).replace("LEVEL", str(at % 4))
        yield f"DeepSpeed:{name}", 1, text.replace("FOLDER", repr(str(folder / "run")))


def changed(chosen: Sequence[str], folder: Path, counts: Counter[str]) -> Iterator[tuple[str, str]]:
    """The scripts that the trace changes, with how; those that fail by themselves are counted apart."""
    prepare()
    for name, ranks, text in every(folder):
        if chosen and not any(re.fullmatch(one, name) for one in chosen):
            continue
        path = folder / f"{sum(counts.values())}.py"
        path.write_text(text)
        trace = path.with_suffix(".trace")
        (folder / "run").mkdir(exist_ok=True)
        plain, watched = (_without_times(run_script(path, ranks, to, 1)) for to in (None, trace))
        fails = any(code for code, _ in plain)
        counts["fails by itself" if fails else "runs"] += 1
        logs = [path.with_suffix(f".True{rank}.log").read_text() for rank in range(ranks)]
        told = [line for log in logs for line in log.splitlines() if ALARM.search(line)]
        faults = sorted(
            {
                line.split(":")[1]
                for log in logs
                for line in log.splitlines()
                if line.startswith("fault: ")
            }
        )
        counts.update(f"finds{fault}" for fault in faults)
        if faults:
            print(f"{name}: {', '.join(faults)}", file=sys.stderr)
        if not (fails or (trace / "attached.json").exists()):
            told.append("nothing was attached")
        if plain != watched:
            told.append(f"{plain}\n{watched}\n{logs[0][-2000:]}")
        if told:
            yield name, "\n".join(told)


ALARM = re.compile("observer|hook failed|check-ended")


def _without_times(ranks: list[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
    """Exit codes and lines, without those of loggers, which begin with the time."""
    return [(code, [line for line in lines if not line.startswith("[20")]) for code, lines in ranks]


def main() -> int:
    """Print the scripts that the trace changes, and counts; 1 if there are any."""
    counts, found = Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        from tests.engine import trainer_scripts

        trainer_scripts.begin(trainer_scripts.THEIRS)
        trainer_scripts.write_models(Path(folder))
        for name, how in changed(sys.argv[1:], Path(folder), counts):
            found += 1
            print(f"{name} is changed:\n{how}", flush=True)
    print(f"{dict(counts)}, {found} changed")
    return int(found > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
