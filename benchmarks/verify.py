"""Configs through `stagebridge verify`: those of `verify_cases.py`, recipes of Megatron, DeepSpeed files; writes docs/verify.md.

Usage: python benchmarks/verify.py [FOLDER]; FOLDER holds truth/ and corpus/; else STAGEBRIDGE_SHARED names it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import join
from typing import Any

from verify_cases import Case, own

from bridge.api.source import Source
from bridge.api.verify import VerifyOptions, run_tasks
from bridge.errors import BridgeError

HOME = Path(__file__).resolve().parents[1]
PAGE = HOME / "docs" / "verify.md"
RANKS = 2
RECIPES = {
    "gpt3_7b_tp1_pp4_memory_speed": "pipeline, distributed optimizer",
    "gpt3_mcore_te_tp1_pp4_vp1_calculate_per_token_loss": "interleaved pipeline, loss per token",
    "gpt3_mcore_te_tp2_pp1_cp2_nondeterministic": "context parallel",
    "gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor": "Megatron-FSDP",
    "gpt3_mcore_tp1_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather": "fp16, distributed optimizer",
    "gpt3_mcore_te_tp2_pp1_te_8experts2parallel_dist_optimizer": "mixture of experts",
}
"""NVIDIA's recipes for Megatron-Core 0.16.1, and what is special about each. Most have dropout, which each stack draws in its own
way: they are *in part*, and three stand for all of these.
"""
FILES = {
    "deepspeedai_DeepSpeedExamples__training_pipeline_parallelism_ds_config.json": ("pipeline, no ZeRO", {"pipeline_stages": 2}),
    "deepspeedai_DeepSpeedExamples__training_bf16_master_weight_configs_baseline.json": ("bf16, ZeRO 3", {}),
    "deepspeedai_DeepSpeedExamples__training_bf16_master_weight_configs_bf16_full.json": ("bf16 masters", {}),
    "deepspeedai_DeepSpeedExamples__training_imagenet_config_ds_fp16_config.json": ("fp16, no ZeRO", {}),
    "deepspeedai_DeepSpeedExamples__training_BingBertGlue_glue_bert_base.json": ("fp32, no ZeRO", {}),
    "deepspeedai_DeepSpeed__examples_sdma_allgather_ds_config_zero3.json": ("bf16, ZeRO 3, WarmupLR", {}),
    "deepspeedai_DeepSpeed__tests_model_BingBertSquad_deepspeed_bsz24_fp16_zero2_config.json": ("fp16, ZeRO 2", {}),
    "deepspeedai_DeepSpeed__tests_model_Megatron_GPT2_ds_config_func_bs8_zero2_offload.json": (
        "fp16, ZeRO 2, backward called twice a step by the script", {"manual_accumulation": True}
    ),
    "deepspeedai_DeepSpeed__tests_model_Megatron_GPT2_ds_config_func_bs4_zero1.json": ("fp16, ZeRO 1", {}),
    "huggingface_accelerate__tests_deepspeed_ds_config_zero2_model_only.json": ("bf16, ZeRO 2, values from the trainer", {}),
}  # fmt: skip
"""Files of the corpus, what is special about each, and what its training script says."""
AUTO = {
    "hidden_size": 1024, "micro_batch": 1, "accumulation": 1, "lr": 1e-4, "eps": 1e-8,
    "weight_decay": 0.01, "clip": 1.0, "warmup_steps": 10, "total_steps": 100, "mixed_precision": "bf16", "save_16bit": "true",
}  # fmt: skip
"""What a trainer would fill in for "auto"."""


def recipes(shared: Path) -> Iterator[Case]:
    """The Megatron launches."""
    rows = (json.loads(line) for line in (shared / "truth" / "megatron_cli.jsonl").open())
    found = {
        row["recipe"].split("/")[-2]: row
        for row in rows
        if row["version"] == "0.16.1" and "/" in row["recipe"]
    }
    for name, words in RECIPES.items():
        flags, world = join(found[name]["flags"]), found[name]["world_size"]
        yield Case(name, words, "megatron", flags, "deepspeed", world, "0.16.1", lenient=True)


def files(shared: Path) -> Iterator[Case]:
    """The DeepSpeed configs."""
    auto = tuple(f"{name}={value}" for name, value in AUTO.items())
    for name, (words, said) in FILES.items():
        text, code = (
            (shared / "corpus" / "deepspeed" / name).read_text(),
            tuple(f"{key}={value}" for key, value in said.items()),
        )
        given = auto if '"auto"' in text else ()
        told = {"code": code, "auto": given, "suffix": ".json", "lenient": True}
        yield Case(
            name.removesuffix(".json"), words, "deepspeed", text, "megatron", 4, "0.19.8", **told
        )


def page(head: str, cases: Sequence[Case], found: Sequence[Outcome]) -> str:
    """The page: a table of verdicts, and below it every cause."""
    lines = [
        head,
        "| config | to | verdict | source on its stack | translation, as meant | translation on its stack | seconds |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for case, outcome in zip(cases, found, strict=True):
        report = outcome.found
        cells = [
            _cell(report, side, written)
            for side, written in (("source", True), ("target", False), ("target", True))
        ]
        took = f"{outcome.wall:.0f}, {outcome.processor:.0f}"
        lines.append(
            f"| {case.name}: {case.words} | {case.to} | **{report['verdict']}** | {' | '.join(cells)} | {took} |"
        )
    lines += ["", "## Causes", ""]
    lines += [
        line
        for case, outcome in zip(cases, found, strict=True)
        for line in _causes(case, outcome.found)
    ]
    return "\n".join(lines) + "\n"


def _cell(report: dict[str, Any], side: str, written: bool) -> str:
    run = next(
        (it for it in report.get("runs", ()) if it["side"] == side and it["as_written"] == written),
        None,
    )
    if run is None or run["distance"] is None:
        return run["verdict"] if run else ""
    return f"{run['verdict']}, {float(run['distance']['update']):.0e}"


def _causes(case: Case, report: dict[str, Any]) -> Iterator[str]:
    lacking = [f"only in part: {line}" for line in report.get("lacking", ())]
    causes = [f"{run['engine']}: {run['cause']}" for run in report.get("runs", ()) if run["cause"]]
    told = [*report.get("problems", ()), *lacking, *causes]
    yield f"**{case.name}**"
    yield ""
    yield from (f"- {line}" for line in dict.fromkeys(told or ["every run is the same"]))
    changed = ", ".join(
        f"{path} {it['before']} -> {it['after']}" for path, it in report.get("changes", {}).items()
    )
    yield f"- in small: {changed}" if changed else "- nothing had to be changed"
    yield ""


HEAD = """# Verified configs

`stagebridge verify` on {cases} configs: {written} written for this page in the manner of public ones, six of NVIDIA's recipes for
Megatron-Core 0.16.1, ten DeepSpeed configs of public repositories, and an example of each of three more stacks. Each config runs
as it is written on its own stack, its translation on the other one, and what both mean on the native engine: the same small model
with the heads, experts, gates and positions that the config asks for, the same weights and data, two ranks. Where Megatron's
flags tell the model, DeepSpeed runs the training script and the config.json that `convert --script` writes. The numbers are
relative distances of all updates from what the source means; what rounding alone does is told apart by a run in the next wider
format. A verdict is *same* only where both stacks ran and nothing was taken out. Seconds are those of the clock and of processors
for one command, on two cores that others use as well.

Made by `python benchmarks/verify.py`. Verdicts: {verdicts}.
Of {clean} clean pairs, which ask for nothing that one of the two stacks lacks, {same} are *same*. Most recipes of NVIDIA have
dropout, which each stack draws in its own way: they are *in part*, and three stand for all of these. Rows in bf16 and fp16
stand for a run of each stack in fp32 too, in which rounding hides less. All rows were made on one state of the code.
"""


@dataclass(frozen=True)
class Outcome:
    """What was found for a case, and the seconds that took: of the clock, and of processors."""

    found: dict[str, Any]
    wall: float
    processor: float


def judged(case: Case) -> Outcome:
    """One verdict, as the command gives it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"config{case.suffix}"
        path.write_text(case.text)
        job = Source(
            str(path),
            case.dialect,
            case.version,
            case.world,
            case.lenient,
            True,
            auto=case.auto,
            code=case.code,
        )
        start, before = time.monotonic(), _processor()
        try:
            found = next(run_tasks([(job, VerifyOptions(case.to, ranks=RANKS))], RANKS))
        except BridgeError as error:
            found = {"verdict": "not run", "problems": list(error.problems)}
    return Outcome(found, time.monotonic() - start, _processor() - before)


def _processor() -> float:
    """Seconds that processes which have ended spent."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def outcomes(cases: Sequence[Case], kept: Path) -> dict[str, Outcome]:
    """By name: those that `kept` holds from a run before, and the others, which are added to it."""
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    found = {line.pop("name"): Outcome(**line) for line in lines}
    for case in cases:
        if case.name not in found:
            outcome = found[case.name] = judged(case)
            with kept.open("a") as file:
                file.write(json.dumps({"name": case.name, **asdict(outcome)}) + "\n")
            print(
                f"{case.name}: {outcome.found['verdict']}, {outcome.wall:.0f} s, {outcome.processor:.0f} s",
                flush=True,
            )
    return found


def main(shared: Path | None, kept: Path) -> None:
    """Measure and write."""
    own_cases = list(own())
    cases = [*own_cases, *((*recipes(shared), *files(shared)) if shared else ())]
    found = outcomes(cases, kept)
    clean = [case.name for case in cases if case.clean]
    counted = Counter(found[case.name].found["verdict"] for case in cases)
    head = HEAD.format(
        cases=len(cases),
        written=len(own_cases) - 3,
        verdicts=", ".join(f"{verdict} {number}" for verdict, number in counted.most_common()),
        clean=len(clean),
        same=sum(found[name].found["verdict"] == "same" for name in clean),
    )
    PAGE.write_text(page(head, cases, [found[case.name] for case in cases]))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "shared", nargs="?", default=os.environ.get("STAGEBRIDGE_SHARED"), type=Path
    )
    options.add_argument(
        "--kept", type=Path, help="a file of verdicts so far, which are not made again"
    )
    said = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        main(said.shared, said.kept or Path(scratch) / "kept.jsonl")
