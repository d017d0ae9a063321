"""Ten Megatron recipes and ten DeepSpeed configs through `stagebridge verify`; writes docs/verify.md.

Usage: python benchmarks/verify.py [FOLDER]; FOLDER holds truth/ and corpus/; else STAGEBRIDGE_SHARED names it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from typing import Any

from bridge.cli.convert import Job
from bridge.cli.verify import Options, measured

HOME = Path(__file__).resolve().parents[1]
PAGE = HOME / "docs" / "verify.md"
RANKS = 2
RECIPES = {
    "gpt3_7b_tp1_pp4_memory_speed": "pipeline, distributed optimizer",
    "gpt3_7b_tp4_pp1_memory_speed": "tensor and sequence parallel, distributed optimizer",
    "gpt3_mcore_te_tp1_pp1_uniform_full_recompute": "data parallel, full recompute",
    "gpt3_mcore_te_tp1_pp4_resume_torch_dist_swiglu": "pipeline, resumed",
    "gpt3_mcore_te_tp1_pp4_vp1_calculate_per_token_loss": "interleaved pipeline, loss per token",
    "gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce_untied": "interleaved pipeline, untied",
    "gpt3_mcore_te_tp2_pp1_cp2_nondeterministic": "context parallel",
    "gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor": "Megatron-FSDP",
    "gpt3_mcore_tp1_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather": "fp16, distributed optimizer",
    "gpt3_mcore_te_tp2_pp1_te_8experts2parallel_dist_optimizer": "mixture of experts",
}
"""NVIDIA's recipes for Megatron-Core 0.16.1, and what is special about each."""
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


@dataclass(frozen=True)
class Case:
    """A file to verify, what it is called and what is special about it."""

    name: str
    words: str
    job: Job
    to: str


def recipes(shared: Path, folder: Path) -> Iterator[Case]:
    """The Megatron launches, as files of flags."""
    rows = (json.loads(line) for line in (shared / "truth" / "megatron_cli.jsonl").open())
    found = {row["recipe"].split("/")[-2]: row for row in rows if row["version"] == "0.16.1" and "/" in row["recipe"]}
    for name, words in RECIPES.items():
        path = folder / f"{name}.args"
        path.write_text(join(found[name]["flags"]))
        yield Case(name, words, Job(str(path), "megatron", "0.16.1", found[name]["world_size"], True, True), "deepspeed")


def files(shared: Path) -> Iterator[Case]:
    """The DeepSpeed configs."""
    auto = tuple(f"{name}={value}" for name, value in AUTO.items())
    for name, (words, said) in FILES.items():
        path, code = shared / "corpus" / "deepspeed" / name, tuple(f"{key}={value}" for key, value in said.items())
        given = auto if '"auto"' in path.read_text() else ()
        yield Case(
            name.removesuffix(".json"), words, Job(str(path), "deepspeed", "0.19.8", 4, True, True, given, code), "megatron"
        )


def page(cases: list[Case], found: list[dict[str, Any]]) -> str:
    """The page: a table of verdicts, and below it every cause."""
    lines = [HEAD, "| config | to | verdict | source on its stack | translation, as meant | translation on its stack |"]
    lines.append("|---|---|---|---|---|---|")
    for case, report in zip(cases, found, strict=True):
        cells = [_cell(report, side, written) for side, written in (("source", True), ("target", False), ("target", True))]
        lines.append(f"| {case.name}: {case.words} | {case.to} | **{report['verdict']}** | {' | '.join(cells)} |")
    lines += ["", "## Causes", ""]
    lines += [line for case, report in zip(cases, found, strict=True) for line in _causes(case, report)]
    return "\n".join(lines) + "\n"


def _cell(report: dict[str, Any], side: str, written: bool) -> str:
    run = next((it for it in report.get("runs", ()) if it["side"] == side and it["as_written"] == written), None)
    if run is None or run["distance"] is None:
        return run["verdict"] if run else ""
    return f"{run['verdict']}, {float(run['distance']['update']):.0e}"


def _causes(case: Case, report: dict[str, Any]) -> Iterator[str]:
    told = [*report.get("problems", ()), *(f"{run['engine']}: {run['cause']}" for run in report.get("runs", ()) if run["cause"])]
    yield f"**{case.name}**"
    yield ""
    yield from (f"- {line}" for line in dict.fromkeys(told or ["every run is the same"]))
    changed = ", ".join(f"{path} {it['before']} -> {it['after']}" for path, it in report.get("changes", {}).items())
    yield f"- in small: {changed}" if changed else "- nothing had to be changed"
    yield ""


HEAD = """# Verified configs

`stagebridge verify` on ten of NVIDIA's recipes for Megatron-Core 0.16.1 and ten DeepSpeed configs of public repositories, made
by `python benchmarks/verify.py`. Each config runs as it is written on its own stack, its translation on the other one, and what
both mean on the native engine: the same small GPT, the same weights and data, two ranks, three steps. The numbers are relative
distances of all updates from what the source means; what rounding alone does is told apart by a run in the next wider format.
"""


def main(shared: Path) -> None:
    """Measure and write."""
    with tempfile.TemporaryDirectory() as folder:
        cases = [*recipes(shared, Path(folder)), *files(shared)]
        tasks = [(case.job, Options(case.to, ranks=RANKS)) for case in cases]
        found = []
        for case, report in zip(cases, measured(tasks, RANKS), strict=True):
            print(f"{case.name}: {report['verdict']}", flush=True)
            found.append(report)
    PAGE.write_text(page(cases, found))


if __name__ == "__main__":
    named = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("STAGEBRIDGE_SHARED")
    main(Path(named)) if named else sys.exit("Name the folder that holds truth/ and corpus/.")
