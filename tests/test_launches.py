"""Launches are seen with their words and ranks, whatever stands around them; what is none is not taken for one."""

from __future__ import annotations

import pytest

from bridge.errors import BridgeError
from bridge.files import Script
from bridge.files.shell import known
from bridge.files.shell.pieces import Unknown

SEEN: tuple[tuple[str, str, int | None], ...] = (
    ("./pretrain_gpt.py {}", "./pretrain_gpt.py", None),
    ("uv run torchrun --nproc_per_node=8 a.py {}", "a.py", 8),
    ("uv run --extra x --with y a.py {}", "a.py", None),
    ("poetry run python a.py {}", "a.py", None),
    ("conda run -n env --no-capture-output python a.py {}", "a.py", None),
    ("pixi run -e x torchrun --nproc-per-node=4 a.py {}", "a.py", 4),
    ("docker run --rm -it --gpus all -v /a:/b.py img python -u a.py {}", "a.py", None),
    ("docker run --rm img bash -lc 'torchrun --nproc_per_node 2 a.py {}'", "a.py", 2),
    ("singularity exec --nv -B /a img.sif python a.py {}", "a.py", None),
    ("ft_launcher --nproc_per_node 8 --nnodes 2 a.py {}", "a.py", 16),
    ("stdbuf -o L python a.py {}", "a.py", None),
    ("aprun -n 16 -N 4 python a.py {}", "a.py", 16),
    ("nohup python a.py {} > log &", "a.py", None),
    ("exec python a.py {}", "a.py", None),
    ("time -p python a.py {}", "a.py", None),
    ("command torchrun a.py {}", "a.py", 1),
    ("timeout --foreground 10 python -m torch.distributed.launch --nproc_per_node 4 a.py {}", "a.py", 4),
    ("ray job submit --address=x --runtime-env-json='{{}}' -- python3 train.py {}", "train.py", None),
    ("mpirun -np 16 -x A=1 --bind-to none -H a:8,b:8 python a.py {}", "a.py", 16),
    ("mpirun -npernode 8 python a.py {}", "a.py", None),
    ("srun -N2 --ntasks-per-node=8 python -u -m pkg.train {}", "pkg.train", 16),
    ("srun -l --mpi pmix --new-option word python a.py {}", "a.py", None),
    ("deepspeed --num_gpus 8 --module m.x {}", "m.x", 8),
    ("deepspeed --include localhost:0,1,2@h:1 a.py {}", "a.py", 4),
    ("deepspeed --hostfile h --num_gpus 8 a.py {}", "a.py", None),
    ("accelerate launch --num_processes 4 --main_process_port 2 -m a.train {}", "a.train", 4),
    ("torchrun $ARGS --nproc_per_node 8 $SCRIPT {}", "$SCRIPT", None),
    ('torchrun --nproc_per_node 8 "$SCRIPT" {}', "$SCRIPT", 8),
    ("some_wrapper --x y torchrun --nproc_per_node 2 a.py {}", "a.py", 2),
    ("some_wrapper pretrain_gpt.py {}", "pretrain_gpt.py", None),
    ("$PREFIX python a.py {}", "a.py", None),
    ("nsys profile -o x --trace=cuda python a.py {}", "a.py", None),
    ("numactl -N 0 torchrun --nproc_per_node 2 a.py {}", "a.py", 2),
    ("bash -c 'torchrun --nproc_per_node 2 a.py {}'", "a.py", 2),
    ("sh -ec 'cd x && python a.py \"$@\"' name {}", "a.py", None),
    ("srun bash -c 'python a.py {}'", "a.py", None),
    ("ssh -p 22 host 'cd /x; torchrun --nproc_per_node 2 a.py {}'", "a.py", 2),
    ('pdsh -w a,b "cd /x; python a.py {}"', "a.py", None),
    ("eval python a.py {}", "a.py", None),
    ("C='torchrun a.py {}'; eval $C", "a.py", 1),
    ('run() {{ torchrun a.py "$@"; }}\nrun {}', "a.py", 1),
    ("sbatch --wrap='torchrun --nproc_per_node 2 a.py {}'", "a.py", 2),
    ("sbatch <<EOF\n#!/bin/bash\ntorchrun --nproc_per_node 2 a.py {}\nEOF", "a.py", 2),
    ("srun bash <<'EOF'\ntorchrun --nproc_per_node 2 a.py {}\nEOF", "a.py", 2),
    ("bash <<EOF\npython a.py {}\nEOF", "a.py", None),
    ("ssh host bash <<EOF\npython a.py {}\nEOF", "a.py", None),
    ("cat > run.sh <<EOF\npython a.py {}\nEOF\nbash run.sh", "a.py", None),
    ("cat > run.sh <<EOF\npython a.py {}\nEOF\nsbatch -N 2 run.sh", "a.py", None),
    ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun python a.py {}", "a.py", 8),
    ("#SBATCH --nodes=2\nsrun torchrun --nproc_per_node 4 --nnodes 2 a.py {}", "a.py", 8),
)
"""Commands, the program that they start, and the ranks that they say."""
FLAGS = "--num-layers 2"

NONE = (
    "echo torchrun a.py --num-layers 2",
    "pkill -9 python",
    "ps aux | grep train.py",
    "cat a.py b.py",
    "pip install -r a.py",
    "git add train.py --all",
    "which python",
    "python -c 'print(1)'",
    "python - <<EOF\nimport torch\nEOF",
    "docker ps python a.py",
    "ray start --head a.py",
    "cat <<EOF\npython a.py --num-layers 2\nEOF",
)
"""Commands that name a launcher or a script, and start none."""


@pytest.mark.parametrize(("command", "program", "ranks"), SEEN)
def test_a_launch_is_seen_whatever_stands_around_it(command: str, program: str, ranks: int | None) -> None:
    (launch,) = Script(command.format(FLAGS), "launch.sh").launches
    assert (launch.program, launch.texts, launch.ranks) == (program, FLAGS.split(), ranks)


@pytest.mark.parametrize("command", NONE)
def test_words_that_name_a_launcher_are_no_launch(command: str) -> None:
    assert not Script(command, "launch.sh").launches


@pytest.mark.parametrize(
    ("text", "words", "unknown"),
    [
        ("N=2\nbash -c 'python a.py --num-layers $N'", ["--num-layers", "$N"], "does not export it"),
        ("export N=2\nbash -c 'python a.py --num-layers $N'", ["--num-layers", "2"], ""),
        ("N=2 bash -c 'python a.py --num-layers $N'", ["--num-layers", "2"], ""),
        ('N=2\nbash -c "python a.py --num-layers $N"', ["--num-layers", "2"], ""),
        ("export N=2\nssh host 'python a.py --num-layers $N'", ["--num-layers", "$N"], "does not export it"),
        ("bash -c 'N=4'\npython a.py --num-layers ${N:-2}", ["--num-layers", "2"], ""),
        ("python a.py --num-layers 2\nexec python b.py\npython c.py", ["--num-layers", "2"], ""),
        ("cat words | xargs torchrun a.py --num-layers 2", ["--num-layers", "2", "xargs"], "input of xargs"),
    ],
)
def test_an_inner_shell_sees_what_bash_hands_on(text: str, words: list[str], unknown: str) -> None:
    first, *rest = Script(text, "launch.sh").launches
    assert first.texts == words and [launch.program for launch in rest] == ["b.py"] * ("exec" in text)
    assert unknown in "".join(first.opaque.values()) and bool(unknown) is bool(first.opaque)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exit 0\ntorchrun a.py --n 2", "line 2: is not reached: line 1 ends the script before"),
        ("if [ -z $A ]; then\nexit 1\nfi\ntorchrun a.py", "line 1: if [ -z $A ]; then); say --env A=..."),
        ("f() {\ntorchrun a.py\n}", "line 2: stands in the function f (line 1), which is not called"),
        (
            "A=1\nif [ $A = 2 ]; then\n  torchrun a.py\nfi",
            "line 3: stands in a branch that is not taken: line 2: if [ $A = 2 ]; then",
        ),
        ("bash train.sh 8", "line 1: starts another script, train.sh; read that one"),
        ("torchrun a.py --n $(( $B / 2 ))\nC=$(( / 2 ))", "line 2: $(( / 2 )): a shell stops here"),
    ],
)
def test_a_line_that_is_no_run_says_why(text: str, said: str) -> None:
    script = Script(f"{text}\n", "launch.sh")
    try:
        found = "\n".join(script.lost)
    except BridgeError as error:
        found = str(error)
    assert said in found


def test_what_a_pipe_writes_is_not_taken_for_empty() -> None:
    script = Script('cat t.json | sed "s/a/b/" > ds.json\ndeepspeed a.py --deepspeed_config ds.json\n', "launch.sh")
    (launch,) = script.launches
    content = script.file(launch.words[1])
    assert content is not None and known(content) is None


def test_an_array_that_a_missing_file_may_set_is_any_number_of_words() -> None:
    script = Script('source gone.sh\ntorchrun a.py --colocate "${ARGS[@]}" --n 2 "${ARGS[*]}"\n', "launch.sh")
    (launch,) = script.launches
    loose = [any(isinstance(piece, Unknown) and piece.loose for piece in word) for word in launch.words]
    assert loose == [False, True, False, False, False]
