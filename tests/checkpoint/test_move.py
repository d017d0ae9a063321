"""A run moves: config, launch and checkpoint in one folder, which the other stack goes on from with the next losses."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from bridge.api import move_target as moving
from bridge.api.read import read_config
from bridge.checkpoint import formats, groups, smaller_model
from bridge.cli import run as command
from bridge.cli.job import Job
from bridge.cli.move import move
from tests.checkpoint import checkpoints
from tests.checkpoint.checkpoints import Task
from tests.common.schemas import problems
from tests.engine.pool import Run

pytestmark = pytest.mark.usefixtures("foreign")
TASK = Task(precision="fp32", level=2)
LONG = pytest.mark.skipif(
    "STAGEBRIDGE_MOVES" not in os.environ, reason="takes a minute each; tox -e long"
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, pools: dict[int, Any]) -> Path:
    """Five steps of DeepSpeed on two ranks: its config, the config.json of its model, and its checkpoint."""
    from tests.engine.pool import Pool

    top = tmp_path_factory.mktemp("begun")
    pools.setdefault(2, Pool(2)).run(checkpoints.deepspeed, replace(TASK, last=5, save=top / "run"))
    (top / "ds_config.json").write_text(json.dumps(checkpoints.config_of(TASK, 2)))
    checkpoints.model_of("llama").config.save_pretrained(top / "model")  # type: ignore[operator, union-attr]
    return top


def moved(config: Path, checkpoint: Path, to: str, output: Path, *more: str) -> tuple[int, str]:
    """What `move` ends with, and says on both streams."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(out):
        code = command(
            [
                "move",
                str(config),
                "--checkpoint",
                str(checkpoint),
                "--to",
                to,
                "-o",
                str(output),
                *more,
            ]
        )
    return code, out.getvalue()


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_run_goes_on_from_the_folder_on_each_stack(begun: Path, run: Run, tmp_path: Path) -> None:
    """Five steps on DeepSpeed, two on the native engine, three on DeepSpeed at another level; beside ten."""
    unbroken = run(2, checkpoints.deepspeed, replace(TASK, last=10))[0]
    code, said = moved(begun / "ds_config.json", begun / "run", "native", tmp_path / "native")
    assert code == 0 and "Nothing was taken away." in said
    known = {"ds_config.json", "ds_config.code.py", "launch.sh", "report.txt", "checkpoint/latest"}
    inner = {
        f"checkpoint/step5/{name}"
        for name in ("SHA256SUMS", "rank-00000.safetensors", "state.json")
    }
    assert files(tmp_path / "native") == known | inner
    assert (tmp_path / "native" / "ds_config.json").read_bytes() == (
        begun / "ds_config.json"
    ).read_bytes()
    middle = replace(
        TASK, first=5, last=7, load=tmp_path / "native" / "checkpoint", save=tmp_path / "two"
    )
    assert run(1, checkpoints.native, middle)[0] == pytest.approx(unbroken[5:7], abs=1e-6)
    config = checkpoints.config_of(replace(TASK, level=3), 2)
    (tmp_path / "level3.json").write_text(json.dumps(config))
    code, said = moved(
        tmp_path / "level3.json",
        tmp_path / "two",
        "deepspeed",
        tmp_path / "back",
        "--world-size",
        "2",
    )
    assert code == 2 and said.startswith("Taken away: random (different numbers).")
    back = tmp_path / "back"
    assert json.loads((back / "ds_config.json").read_text())["zero_optimization"]["stage"] == 3
    assert len(list((back / "checkpoint" / "global_step7").iterdir())) == 5
    last = replace(TASK, level=3, first=7, last=10, load=back / "checkpoint")
    assert run(2, checkpoints.deepspeed, last)[0] == pytest.approx(unbroken[7:], abs=1e-6)


def test_a_run_moves_to_fully_shard(begun: Path, run: Run, tmp_path: Path) -> None:
    unbroken = run(2, checkpoints.deepspeed, replace(TASK, last=8))[0]
    code, said = moved(begun / "ds_config.json", begun / "run", "automodel", tmp_path / "fsdp")
    assert code == 2 and said.splitlines()[1].startswith("Taken away: scheduler.type")
    assert "set_state_dict(model, optimizer" in (tmp_path / "fsdp" / "launch.sh").read_text()
    middle = replace(TASK, first=5, last=8, load=tmp_path / "fsdp" / "checkpoint")
    assert run(2, checkpoints.fsdp, middle)[0] == pytest.approx(unbroken[5:], abs=1e-6)


def test_a_run_moves_to_megatron_and_back(begun: Path, tmp_path: Path) -> None:
    """Flags that load the checkpoint, under Megatron's names, with the samples seen; back by names, every bit of it."""
    model = ("--model", str(begun / "model"))
    code, said = moved(
        begun / "ds_config.json", begun / "run", "megatron", tmp_path / "megatron", *model
    )
    assert code == 2 and "use_megatron_fsdp: FSDP cannot load the written checkpoint" in said
    flags = (tmp_path / "megatron" / "launch.args").read_text()
    wanted = (
        "--load checkpoint",
        "--exit-on-missing-checkpoint",
        "--no-load-rng",
        "--use-distributed-optimizer",
        "--swiglu",
    )
    assert (
        all(flag in flags for flag in (*wanted, "--position-embedding-type rope"))
        and "fsdp" not in flags
    )
    held = formats.read_checkpoint(tmp_path / "megatron" / "checkpoint")
    assert held.origin.format == "megatron" and held.where.samples == 5 * TASK.batch
    assert (
        "args" not in said.partition("\n")[0]
        and held.client["megatron"]["args"]["consumed_train_samples"] == 20
    )
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in held.parameters
    there = tmp_path / "megatron"
    two = ("--world-size", "2")
    code, said = moved(
        there / "launch.args",
        there / "checkpoint",
        "native",
        tmp_path / "n",
        *model,
        *two,
        "--prove",
        "2",
    )
    assert code in (0, 2), said
    assert "--resume checkpoint --model model" in (tmp_path / "n" / "launch.sh").read_text()
    assert (tmp_path / "n" / "model" / "config.json").read_bytes() == (
        begun / "model" / "config.json"
    ).read_bytes()
    proof = json.loads((tmp_path / "n" / "proof.json").read_text())
    assert (
        code == 2
        and "seq_length" in said
        and proof["verdict"] == "same"
        and proof["distance"]["norm"] < 1e-6
    ), said
    assert [row["lr"] for row in proof["runs"]] == [pytest.approx([0.00625, 0.0075])] * 2
    moved(there / "launch.args", there / "checkpoint", "deepspeed", tmp_path / "back", *model)
    with redirect_stdout(StringIO()) as out:
        command(["checkpoint", "diff", str(begun / "run"), str(tmp_path / "back" / "checkpoint")])
    assert "63 tensors: 63 equal" in out.getvalue()
    back = formats.read_checkpoint(tmp_path / "back" / "checkpoint")
    assert back.origin.format == "deepspeed"
    assert [(len(group.names), group.settings["weight_decay"]) for group in back.groups] == [
        (16, 0.1),
        (5, 0.0),
    ]


def test_a_move_that_cannot_be_right_is_refused(begun: Path, tmp_path: Path) -> None:
    """Into the checkpoint that is read, with another model, and a proof of nothing."""
    config, run = begun / "ds_config.json", begun / "run"
    checkpoints.config_for("gpt2").save_pretrained(tmp_path / "gpt2")
    tries = {
        "lies inside": (run / "out",),
        "but the weights have 24": (tmp_path / "out", "--model", str(tmp_path / "gpt2")),
        "writes nothing to prove": (tmp_path / "out", "--dry-run", "--prove", "1"),
    }
    for words, (output, *more) in tries.items():
        code, said = moved(config, run, "native", output, *map(str, more))
        assert code == 1 and words in said and not output.exists(), said


def test_a_config_whose_decay_no_group_has_is_named(begun: Path, tmp_path: Path) -> None:
    """A checkpoint of which no parameter decays, and the config of a run in which they do."""
    hub = formats.read_checkpoint(begun / "run")
    still = [replace(one, settings={**one.settings, "weight_decay": 0.0}) for one in hub.groups]
    config = read_config(Job(str(begun / "ds_config.json"), world_size=2))
    source = moving.MoveSource(config, replace(hub, groups=tuple(still)), *([None] * 2))  # type: ignore[arg-type]
    (found,) = moving.find_other_settings(source)
    assert (found.path, found.before, found.after) == ("optimizer.weight_decay", 0.1, 0.0)


def test_weights_alone_go_by_names(begun: Path, tmp_path: Path) -> None:
    """Where nothing says the groups of the optimizer, DeepSpeed gets a universal checkpoint, and its config says so."""
    checkpoints.model_of("llama").save_pretrained(tmp_path / "weights")  # type: ignore[operator]
    code, said = moved(
        begun / "ds_config.json",
        tmp_path / "weights",
        "deepspeed",
        tmp_path / "out",
        "--world-size",
        "2",
        "--json",
    )
    found = json.loads(said)
    assert not problems("move", found)
    assert code == found["exit_code"] == 2 and found["target"]["format"] == "universal"
    assert found["taken_away"] == "Taken away: moments, schedule, step (different numbers)."
    assert (
        json.loads((tmp_path / "out" / "ds_config.json").read_text())["checkpoint"][
            "load_universal"
        ]
        is True
    )


def test_the_launch_starts_from_the_checkpoint(begun: Path, tmp_path: Path) -> None:
    """With the model's config.json there is a whole script, which a shell starts."""
    code, said = moved(
        begun / "ds_config.json",
        begun / "run",
        "deepspeed",
        tmp_path / "out",
        "--model",
        str(begun / "model"),
    )
    assert code == 1 and "--sequence" in said  # which nothing tells: as with `convert --script`
    assert {"ds_config.train.py", "ds_config.model.json", "ds_config.json.carry.json"} <= files(
        tmp_path / "out"
    )
    text = (tmp_path / "out" / "launch.sh").read_text()
    assert text.endswith("--deepspeed_config ds_config.json --data tokens.npy --save checkpoint\n")
    assert subprocess.run(["sh", "-n", tmp_path / "out" / "launch.sh"], check=False).returncode == 0
    assert formats.read_checkpoint(tmp_path / "out" / "checkpoint").client == {
        "epoch": 3,
        "step": 5,
    }  # what the script asks for


def ends_of(page: str) -> list[int]:
    """The exit codes of all commands of a page, in the folder where this process is."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    ends = []
    for words in [
        shlex.split(line.strip())
        for line in text.splitlines()
        if line.startswith("    stagebridge ")
    ]:
        with redirect_stdout(StringIO()) as out, redirect_stderr(out):
            ends.append(command(words[1:]))
        assert ends[-1] in (0, 2), (words, out.getvalue())
    return ends


def test_the_page_of_checkpoints_is_run_from_top_to_end(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command of docs/checkpoints.md, where a run of DeepSpeed and one of Megatron lie."""
    shutil.copytree(begun / "run", tmp_path / "run" / "checkpoints")
    shutil.copytree(begun / "model", tmp_path / "model")
    code, said = moved(
        begun / "ds_config.json",
        begun / "run",
        "megatron",
        tmp_path / "moved",
        "--model",
        str(begun / "model"),
    )
    assert code == 2, said
    shutil.copytree(tmp_path / "moved" / "checkpoint", tmp_path / "megatron" / "checkpoints")
    monkeypatch.chdir(tmp_path)
    assert ends_of("checkpoints.md") == [0, 0, 0, 0, 0, 2]


def test_the_page_of_moves_is_run_from_top_to_end(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command of docs/move.md, in a folder as the page describes it."""
    for name in ("run", "model", "ds_config.json"):
        (shutil.copytree if (begun / name).is_dir() else shutil.copy)(begun / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    # Megatron decays no norms, so groups that come back from it do not either, and `diff` names them.
    assert ends_of("move.md") == [0, 0, 0, 0, 0, 2, 2, 2, 2, 2]
    proof = json.loads((tmp_path / "native" / "proof.json").read_text())
    assert not problems("move", proof, "Proved")
    assert (proof["verdict"], proof["ranks"], proof["lacking"]) == ("same", 2, []) and proof[
        "distance"
    ]["loss"] < 1e-6
    assert [row["first"] for row in proof["runs"]] == [5, 5]
    assert [row["lr"] for row in proof["runs"]] == [pytest.approx([0.005, 0.00625])] * 2


GROUPED = Task(level=3, matrices=True, ends=3e-3, last=5, warmup={})
"""Matrices decay, vectors do not, and the ends have a learning rate and betas of their own, without a scheduler."""


def begin(top: Path, run: Run, task: Task) -> Path:
    """A run of DeepSpeed with its config and the config.json of its model."""
    run(2, checkpoints.deepspeed, replace(task, save=top / "run"))
    (top / "ds_config.json").write_text(json.dumps(checkpoints.config_of(task, 2)))
    checkpoints.model_of("llama").config.save_pretrained(top / "model")  # type: ignore[operator, union-attr]
    return top


def test_groups_of_parameters_go_along(run: Run, tmp_path: Path) -> None:
    """The script is told names and settings of each group; with one group for all, neither side goes on as it was."""
    begin(tmp_path, run, GROUPED)
    code, found = proved(tmp_path, tmp_path / "ds_config.json", tmp_path / "out", "native")
    assert (code, found["verdict"]) == (0, "same") and found["distance"]["loss"] < 1e-6, found
    rows = groups.read_groups(tmp_path / "out" / groups.FILE)
    told = [(len(row["params"]), row["lr"], row["weight_decay"]) for row in rows]
    assert told == [(14, 0.01, 0.1), (5, 0.01, 0.0), (2, 3e-3, 0.1)]
    assert rows[2]["betas"] == [0.8, 0.9] and rows[2]["params"] == [
        "model.embed_tokens.weight",
        "lm_head.weight",
    ]
    assert 'Path("parameter_groups.json")' in (tmp_path / "out" / "launch.sh").read_text()
    words = ("--world-size", "2", "--model", str(tmp_path / "model"))
    moved(
        tmp_path / "out" / "ds_config.json",
        tmp_path / "out" / "checkpoint",
        "deepspeed",
        tmp_path / "back",
        *words,
    )
    script = (tmp_path / "back" / "ds_config.train.py").read_text()
    assert "model_parameters=groups" in script and (tmp_path / "back" / groups.FILE).is_file()
    back = replace(GROUPED, first=5, last=7, load=tmp_path / "back" / "checkpoint")
    unbroken = run(2, checkpoints.deepspeed, replace(GROUPED, last=7))[0]
    assert run(2, checkpoints.deepspeed, back)[0] == pytest.approx(unbroken[5:], abs=1e-6)
    code, said = moved(
        tmp_path / "ds_config.json", tmp_path / "run", "megatron", tmp_path / "megatron", *words
    )
    assert (
        code == 2
        and "2 parameters, such as embedding.word_embeddings.weight, had learning rate 0.003 instead of 0.01"
        in said
    )


@LONG
@pytest.mark.parametrize("to", ["megatron", "automodel"])
def test_groups_of_parameters_are_proved(run: Run, tmp_path: Path, to: str) -> None:
    """Vectors without decay go to Megatron, whose own groups these are, and any groups to torch's; and back."""
    begin(tmp_path, run, replace(GROUPED, ends=None) if to == "megatron" else GROUPED)
    _, found = proved(tmp_path, tmp_path / "ds_config.json", tmp_path / "out", to)
    assert found["verdict"] == "same" and found["distance"]["loss"] < 1e-6, found
    config = tmp_path / "out" / ("launch.args" if to == "megatron" else "recipe.yaml")
    options = moving.MoveOptions(
        tmp_path / "out" / "checkpoint",
        "deepspeed",
        tmp_path / "back",
        prove=2,
        model=tmp_path / "model",
    )
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
        move(Job(str(config), world_size=2, json=True), **vars(options))
    found = json.loads(out.getvalue())["proof"]
    assert found["verdict"] == "same" and found["distance"]["loss"] < 1e-6, found


def refused(begun: Path, tmp_path: Path, *words: str) -> str:
    code, said = moved(
        begun / "ds_config.json", begun / "run", *words[:1], tmp_path / "out", *words[1:]
    )
    assert code == 1 and not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    return said


def test_what_cannot_be_moved_or_proved_is_refused_before_anything_is_written(
    begun: Path, tmp_path: Path
) -> None:
    assert "name the folder of its config.json with --model" in refused(
        begun, tmp_path, "native", "--prove", "1"
    )
    other = tmp_path / "gpt2"
    checkpoints.model_of("gpt2").config.save_pretrained(other)  # type: ignore[operator, union-attr]
    assert "in the checkpoint" in refused(
        begun, tmp_path, "native", "--prove", "1", "--model", str(other)
    )
    config = checkpoints.config_of(replace(TASK, level=0), 2)
    (tmp_path / "level0.json").write_text(json.dumps(config))
    code, said = moved(tmp_path / "level0.json", begun / "run", "deepspeed", tmp_path / "out")
    assert code == 1 and "set the stage to 1, which gives the same numbers" in said
    checkpoints.model_of("llama").save_pretrained(tmp_path / "weights")  # type: ignore[operator]
    words = ("--prove", "1", "--model", str(begun / "model"))
    code, said = moved(
        begun / "ds_config.json", tmp_path / "weights", "native", tmp_path / "out", *words
    )
    assert code == 1 and "only weights" in said
    code, _ = moved(
        begun / "ds_config.json", begun / "run", "native", tmp_path / "out", "--dry-run"
    )
    assert code == 0 and not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    assert moved(begun / "ds_config.json", begun / "run", "native", tmp_path / "out")[0] == 1


def test_a_cut_keeps_the_first_layers_of_all_that_there_is(
    begun: Path, run: Run, tmp_path: Path
) -> None:
    hub = formats.read_checkpoint(begun / "run")
    assert smaller_model.layers_of(hub) == {"model.layers": 2}
    found = smaller_model.cut_layers(hub, 1)
    assert {name for name in hub.parameters if ".layers.1." in name} == set(hub.parameters) - set(
        found.parameters
    )
    assert found.groups[0].names == tuple(found.parameters) and smaller_model.count_elements(
        found
    ) == smaller_model.count_elements(hub, 1)
    given = json.loads((begun / "model" / "config.json").read_text())
    assert smaller_model.config_with_layers({**given, "layer_types": ["a", "b"]}, 1) == {
        **given,
        "num_hidden_layers": 1,
        "layer_types": ["a"],
    }
    assert smaller_model.without_dropout(
        {"attn_pdrop": 0.1, "attention_dropout": 0.0, "vocab_size": 3}
    ) == ({"attn_pdrop": 0.0, "attention_dropout": 0.0, "vocab_size": 3}, ("attn_pdrop",))


def test_settings_of_the_checkpoint_that_the_config_says_otherwise_are_told(
    begun: Path, tmp_path: Path
) -> None:
    config = checkpoints.config_of(
        replace(TASK, adam={"torch_adam": True, "betas": [0.9, 0.98]}), 2
    )
    (tmp_path / "other.json").write_text(json.dumps(config))
    code, said = moved(tmp_path / "other.json", begun / "run", "native", tmp_path / "out")
    assert code == 2 and "Taken away: optimizer.betas (different numbers)." in said
    assert (
        "[0.9, 0.98] in the config, [0.9, 0.95] in the checkpoint; a resumed run uses the value in the checkpoint"
        in said
    )


def steady(rank: int, world: int, config: dict[str, Any], save: Path) -> None:
    """Three steps of DeepSpeed without a scheduler."""
    net = checkpoints.model_of("llama")
    engine, *_ = checkpoints.real_deepspeed().initialize(
        model=net, model_parameters=net.parameters(), config=config, dist_init_required=False
    )
    checkpoints.continued(engine, rank, world, replace(TASK, save=save))


def proved(
    begun: Path, config: Path, output: Path, to: str, most: int = moving.LARGE
) -> tuple[int, dict[str, Any]]:
    options = moving.MoveOptions(
        begun / "run", to, output, model=begun / "model", prove=2, most=most
    )
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
        code = move(Job(str(config), json=True), **vars(options))
    return code, json.loads(out.getvalue())["proof"]


@LONG
def test_a_large_model_is_proved_in_part_and_another_schedule_is_no_proof(
    begun: Path, run: Run, tmp_path: Path
) -> None:
    config = checkpoints.config_of(TASK, 2)
    del config["scheduler"]
    (tmp_path / "steady.json").write_text(json.dumps(config))
    run(2, steady, config, tmp_path / "run")
    (tmp_path / "model").symlink_to(begun / "model")
    code, found = proved(tmp_path, tmp_path / "steady.json", tmp_path / "whole", "automodel")
    assert found["verdict"] == "same", found
    code, found = proved(
        tmp_path, tmp_path / "steady.json", tmp_path / "part", "automodel", most=4000
    )
    assert (code, found["verdict"]) == (3, "in part") and found["lacking"][
        0
    ] == "only the first 1 layers ran", found
    code, found = proved(begun, begun / "ds_config.json", tmp_path / "other", "automodel")
    assert (code, found["verdict"]) == (
        2,
        "differs",
    ) and "learning rate 0.00625 in step 6 of the target" in found["cause"]


@LONG
@pytest.mark.parametrize(
    ("kind", "precision", "level"), [("gpt2", "fp16", 1), ("llama", "bf16", 3), ("gpt2", "bf16", 2)]
)
def test_a_move_is_proved_in_halves(
    run: Run, tmp_path: Path, kind: str, precision: str, level: int
) -> None:
    task = Task(kind=kind, precision=precision, level=level, last=5, save=tmp_path / "run")
    run(2, checkpoints.deepspeed, task)
    (tmp_path / "ds_config.json").write_text(json.dumps(checkpoints.config_of(task, 2)))
    checkpoints.model_of(kind).config.save_pretrained(tmp_path / "model")  # type: ignore[operator, union-attr]
    code, found = proved(tmp_path, tmp_path / "ds_config.json", tmp_path / "out", "native")
    assert (code, found["verdict"]) == (0, "same"), found
    config = {**checkpoints.config_of(replace(task, level=4 - level), 2)}
    (tmp_path / "other.json").write_text(json.dumps(config))
    options = moving.MoveOptions(
        tmp_path / "out" / "checkpoint",
        "deepspeed",
        tmp_path / "back",
        prove=2,
        model=tmp_path / "model",
    )
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
        move(Job(str(tmp_path / "other.json"), world_size=2, json=True), **vars(options))
    assert json.loads(out.getvalue())["proof"]["verdict"] == "same", out.getvalue()
