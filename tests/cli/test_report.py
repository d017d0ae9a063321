"""The report of a conversion as a person meets it: verdict, rows, widths, and what happens to files that were edited."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.cli import run
from bridge.cli.demo import launch_text
from bridge.report.as_text import causes, translation_verdict, unbound, verdict
from bridge.stack.findings import Finding, Origin
from bridge.stack.rules import Effect, How

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --lr 1e-3 "
SAMPLED = MODEL + (
    "--micro-batch-size 1 --global-batch-size 128 --bf16 --train-samples 1953125000 --lr-decay-samples 1949218748 "
    "--lr-warmup-samples 3906252 --calculate-per-token-loss --attention-backend fused --manual-gc --num-workers 1 "
    "--save checkpoints --save-interval 10 --eval-iters 3 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather"
)

RECIPE = {
    "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
    "step_scheduler": {"global_batch_size": 32, "local_batch_size": 4, "max_steps": 10},
    "model": {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": "meta-llama/Llama-3.1-8B",
    },
    "distributed": {"strategy": "fsdp2"},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4},
}

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Said:
    """Runs the command line in a folder with two launches: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "sampled.args").write_text(SAMPLED)
    (tmp_path / "demo.args").write_text(launch_text())

    def call(*words: str) -> tuple[int, str, str]:
        code = run(list(words))
        return code, *capsys.readouterr()

    return call


CONVERT = ("convert", "sampled.args", "--to", "deepspeed", "--world-size", "8")


def finding(
    effect: Effect,
    message: str = "why",
    path: str = "x",
    how: How | None = How.DROPPED,
    **more: Any,
) -> Finding:
    return Finding(path, message, effect, how=how, **more)


class TestVerdict:
    @pytest.mark.parametrize(
        ("findings", "said"),
        [
            ([], "same run"),
            ([finding(Effect.NONE)], "same run"),
            ([finding(Effect.COST)], "same run; 1 effect on memory or speed"),
            (
                [finding(Effect.ROUNDING), finding(Effect.COST)],
                "same up to rounding; 1 effect on memory or speed",
            ),
            (
                [finding(Effect.NUMBERS, "one"), finding(Effect.NUMBERS, "two")],
                "different numbers: 2 things",
            ),
            (
                [finding(Effect.NUMBERS), finding(Effect.NUMBERS, path="y")],
                "different numbers: 1 thing",
            ),
            ([finding(Effect.STOPS), finding(Effect.NUMBERS)], "will not start: 1 thing"),
            (
                [finding(Effect.STOPS, how=How.MISSING)],
                "will not start: 1 setting still to be added",
            ),
            ([finding(Effect.NUMBERS, how=How.MISSING)], "incomplete: 1 setting still to be added"),
            ([finding(Effect.NONE, how=How.MISSING)], "same run; 1 setting still to be added"),
            (
                [finding(Effect.COST), finding(Effect.NONE, how=How.MISSING)],
                "same run; 1 effect on memory or speed; 1 setting still to be added",
            ),
            (
                [
                    finding(Effect.NUMBERS, how=How.MISSING),
                    finding(Effect.NONE, how=How.MISSING, path="y"),
                ],
                "incomplete: 2 settings still to be added",
            ),
            (
                [finding(Effect.NUMBERS), finding(Effect.NUMBERS, how=How.MISSING)],
                "different numbers: 1 thing, 1 setting still to be added",
            ),
        ],
    )
    def test_one_line(self, findings: list[Finding], said: str) -> None:
        assert verdict(findings) == said

    @pytest.mark.parametrize(
        ("snippet", "left"),
        [
            (
                "import math\nscale = 2.0\ndef root(x):\n    return math.sqrt(x) / scale\nroots = [*map(root, range(3))]\n",
                set(),
            ),
            (
                "engine = start(model=model, groups=[p for p in model.parameters()])\n",
                {"start", "model"},
            ),
            ("def loss(x):\n    return criterion(x)\n", {"criterion"}),
            ("", set()),
        ],
    )
    def test_what_the_script_has_to_make_is_a_condition_of_the_same_run(
        self, snippet: str, left: set[str]
    ) -> None:
        assert unbound(snippet) == left
        condition = ", if the script builds the same model" if left else ""
        assert translation_verdict([], snippet) == f"same run{condition}"
        assert (
            translation_verdict([finding(Effect.ROUNDING)], snippet)
            == f"same up to rounding{condition}"
        )
        cost = translation_verdict([finding(Effect.COST)], snippet)
        assert cost == f"same run{condition}; 1 effect on memory or speed"
        assert (
            translation_verdict([finding(Effect.NUMBERS)], snippet) == "different numbers: 1 thing"
        )

    def test_a_remark_is_told_once_and_a_cause_has_one_row(self) -> None:
        twice = [
            finding(Effect.NUMBERS, before=[1]),
            finding(Effect.NUMBERS, before=[1]),
            finding(Effect.NUMBERS, path="y"),
        ]
        (row,) = causes(twice)
        assert [one.path for one in row.findings] == ["x", "y"]

    @pytest.mark.parametrize("file", ["sampled.args", "demo.args"])
    def test_it_is_the_first_line_and_fits_the_exit_code(self, said: Said, file: str) -> None:
        code, _, report = said("convert", file, "--to", "deepspeed", "--world-size", "8")
        same = report.splitlines()[0].startswith("same")
        assert (code == 0) is same and code in (0, 2)


class TestRows:
    def test_a_count_of_samples_says_what_it_becomes_and_of_what_it_is_rounded(
        self, said: Said
    ) -> None:
        text = said(*CONVERT)[2]
        assert (
            "lr_warmup_samples (line 1) 3906252 samples -> 30518 steps, rounded up from 30517.6\n"
            in text
        )
        assert (
            "train_samples (line 1) 1953125000 samples -> 15258789 steps, rounded down from 15258789.1\n"
            in text
        )
        (row,) = re.findall(
            r"^  2 .*? samples.*?counts are rounded to whole optimizer steps$",
            text,
            re.MULTILINE | re.DOTALL,
        )
        assert row.count(" samples -> ") == 3

    def test_a_rate_that_stays_constant_has_no_length(self, said: Said, tmp_path: Path) -> None:
        """Steps of the run are no length of a warmup without a decay, so nothing was rounded or left to a default."""
        warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-5, "warmup_num_steps": 100}}
        optimizer = {"type": "AdamW", "params": {"lr": 2e-5}}
        data = {
            "train_batch_size": 8,
            "gradient_clipping": 1.0,
            "optimizer": optimizer,
            "scheduler": warmup,
        }
        (tmp_path / "sch.json").write_text(json.dumps(data))
        verdicts = set()
        for steps in ((), ("--code", "steps=1000")):
            text = said("convert", "sch.json", "--to", "megatron", "--world-size", "8", *steps)[2]
            assert "rounded" not in text and "total_steps" not in text
            verdicts.add(text.partition(",")[0])
        assert verdicts == {"different numbers: 1 thing"}

    def test_a_value_is_told_in_the_words_of_file_and_target(
        self, said: Said, tmp_path: Path
    ) -> None:
        (tmp_path / "x.args").write_text(
            SAMPLED.replace("--lr-warmup-samples 3906252", "--lr-warmup-samples 1280")
        )
        text = said("convert", "x.args", "--to", "deepspeed", "--world-size", "8", "--all", "-v")[2]
        assert re.search(r"^.*\b10\b.*lr_warmup_samples.*$", text, re.MULTILINE)
        decay = json.dumps(
            {
                "train_batch_size": 8,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
            }
        )
        (tmp_path / "ds.json").write_text(decay)
        text = said("convert", "ds.json", "--to", "megatron", "--world-size", "8")[2]
        row = " optimizer.params.weight_decay (line 1) 0.1; optimizer.decay_scope 'all' -> 'matrices'\n"
        assert row in text

    def test_what_is_lost_comes_before_counts_that_were_rounded_and_in_the_order_of_the_file(
        self,
    ) -> None:
        told = [
            finding(Effect.NUMBERS, "rounded", "a", change="9 -> 1", origin=Origin(1)),
            finding(Effect.NUMBERS, "dropped", "b", origin=Origin(5)),
            finding(Effect.NUMBERS, "gone", "c", origin=Origin(3)),
        ]
        assert [row.message for row in causes(told)] == ["gone", "dropped", "rounded"]

    def test_what_a_stack_takes_by_default_is_one_thing(self, said: Said, tmp_path: Path) -> None:
        (tmp_path / "recipe.json").write_text(json.dumps(RECIPE))
        words = ("convert", "recipe.json", "--to", "megatron", "--world-size", "8")
        text, findings = said(*words)[2], json.loads(said(*words, "--json")[1])["findings"]
        opened = [
            one for one in findings if one["how"] == "defaulted" and " leaves " in one["message"]
        ]
        assert len(opened) > 10
        row = "NeMo AutoModel leaves the value open; Megatron-Core uses its own default"
        assert text.count(row) == 1 and all(
            f"{one['path']} {one['after']!r}" in " ".join(text.split()) for one in opened
        )

    def test_what_is_left_open_stands_in_the_words_of_the_target(
        self, said: Said, tmp_path: Path
    ) -> None:
        (tmp_path / "recipe.json").write_text(json.dumps(RECIPE))
        text = " ".join(
            said("convert", "recipe.json", "--to", "megatron", "--world-size", "8")[2].split()
        )
        assert (
            "normalization 'LayerNorm'" in text
            and "swiglu False" in text
            and "model.norm" not in text
        )

    def test_a_setting_that_moves_stands_with_its_value_in_the_file(
        self, said: Said, tmp_path: Path
    ) -> None:
        staged = {
            "strategy": "fsdp2",
            "pp_size": 2,
            "pipeline": {"pp_schedule": "1f1b", "pp_microbatch_size": 1},
        }
        (tmp_path / "recipe.json").write_text(json.dumps({**RECIPE, "distributed": staged}))
        text = said("convert", "recipe.json", "--to", "megatron", "--world-size", "8")[2]
        assert " distributed.strategy (line 1) 'fsdp2' -> use_distributed_optimizer True\n" in text

    def test_a_word_of_the_plan_for_nothing_is_nothing(self, said: Said, tmp_path: Path) -> None:
        (tmp_path / "x.args").write_text(f"{SAMPLED} --recompute-granularity selective")
        text = said("convert", "x.args", "--to", "deepspeed", "--world-size", "8")[2]
        assert "recompute_granularity (line 1) 'selective' -> nothing\n" in text

    def test_the_model_of_a_recipe_is_one_row(self, said: Said, tmp_path: Path) -> None:
        (tmp_path / "recipe.json").write_text(json.dumps(RECIPE))
        text = said("convert", "recipe.json", "--to", "megatron", "--world-size", "8")[2]
        assert text.count("the choice of the model and of its initial weights") == 1
        assert "model._target_" in text and "initial weights\n" in text

    def test_what_was_not_set_is_said_so(self, said: Said, tmp_path: Path) -> None:
        (tmp_path / "one.json").write_text(json.dumps({"train_batch_size": 8}))
        (tmp_path / "two.json").write_text(
            json.dumps({"train_batch_size": 8, "gradient_clipping": 1.0})
        )
        for words in (("diff", "one.json", "two.json"), ("diff", "two.json", "one.json")):
            text = said(*words, "--world-size", "8")[1]
            assert not re.search(r"(null|None|nothing) ->|-> (null|None|nothing)", text)

    def test_what_is_to_be_added_has_its_reason_once(self, said: Said, tmp_path: Path) -> None:
        (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8}))
        text = said("convert", "ds.json", "--to", "megatron", "--world-size", "8")[2]
        part = text.partition("You still have to add\n")[2].partition("\n\n")[0]
        assert "  add --num-layers or --encoder-num-layers\n  add --hidden-size\n" in part
        assert part.count("Megatron refuses to start without this setting") == 1
        count = len(re.findall("^  add ", part, re.MULTILINE))
        assert f", {count} settings still to be added\n" in text and count > 6
        assert not re.search("same numbers|different numbers", part), (
            "a run that does not start has no numbers"
        )

    @pytest.mark.parametrize("width", ["60", "80"])
    def test_a_setting_that_goes_on_stands_deeper_than_the_reason(
        self, said: Said, monkeypatch: pytest.MonkeyPatch, width: str
    ) -> None:
        monkeypatch.setenv("COLUMNS", width)
        lines = said(*CONVERT)[2].splitlines()
        at = next(
            place
            for place, line in enumerate(lines)
            if line.startswith("  2 train_samples") or "train_samples" in line
        )
        assert lines[at + 1].startswith(" " * 8) and re.match(r" {6}\w", lines[at + 2])

    def test_what_is_without_effect_is_counted_and_shown_on_demand(self, said: Said) -> None:
        _, _, usual = said(*CONVERT)
        _, _, everything = said(*CONVERT, "--all")
        count = int(re.findall(r"(\d+) findings? without effect \(--all shows them\)", usual)[0])
        findings = json.loads(said(*CONVERT, "--json")[1])["findings"]
        assert count == sum(one["effect"] == "same numbers" for one in findings)
        assert (
            "save_interval" not in usual
            and "save_interval" in everything
            and "Same numbers" in everything
        )

    def test_quiet_is_one_line(self, said: Said) -> None:
        assert said(*CONVERT, "-q")[2] == said(*CONVERT)[2].splitlines()[0] + "\n"
        assert len(said("check", "demo.args", "--world-size", "8", "-q")[1].splitlines()) == 1

    def test_only_one_effect(self, said: Said) -> None:
        text = said(*CONVERT, "--only", "numbers")[2]
        assert (
            "Different numbers" in text
            and "Memory or speed" not in text
            and "overlap_param_gather" not in text
        )
        assert "--only: found 'loud', expected one of" in said(*CONVERT, "--only", "loud")[2]

    def test_verbose_tells_where_each_written_value_comes_from(self, said: Said) -> None:
        text = said("convert", "demo.args", "--to", "deepspeed", "--world-size", "8", "-v")[2]
        row = next(line for line in text.splitlines() if line.startswith(" optimizer.params.eps"))
        line = launch_text().splitlines().index("--adam-eps 1.0e-8") + 1
        assert row.split() == [
            "optimizer.params.eps",
            "1e-08",
            "adam_eps",
            "(line",
            f"{line})",
            "exact",
        ]

    def test_a_check_shows_what_is_harmless_too(self, said: Said, tmp_path: Path) -> None:
        (tmp_path / "x.args").write_text(SAMPLED + " --lr 2e-3")
        assert "lr" in said("check", "x.args", "--world-size", "8")[1].partition("Same numbers")[2]


WIDTHS = (60, 72, 80, 100, 120, 200)
BESIDE = ("In the training script", "Launch\n", "wrote ")


class TestWidths:
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("file", ["sampled.args", "demo.args"])
    def test_no_character_is_lost_and_no_line_is_wider_or_ends_in_blanks(
        self, said: Said, monkeypatch: pytest.MonkeyPatch, width: int, file: str
    ) -> None:
        words = ("convert", file, "--to", "deepspeed", "--world-size", "8", "--all", "-v")
        findings = json.loads(said(*words, "--json")[1])["findings"]
        monkeypatch.setenv("COLUMNS", str(width))
        text = said(*words)[2]
        body = text.partition("In the training script")[0]
        assert max(map(len, body.splitlines())) <= width
        assert not re.search(r"[ \t]$", text, re.MULTILINE)
        assert not re.search(r"->$", text, re.MULTILINE), "an arrow stands with the value behind it"
        packed = re.sub(r"\s+", "", text)
        for one in findings:
            assert re.sub(r"\s+", "", one["message"]) in packed and one["path"] in packed

    @pytest.mark.parametrize("width", range(60, 130, 7))
    def test_an_arrow_stands_on_the_line_of_its_value(
        self, said: Said, monkeypatch: pytest.MonkeyPatch, width: int
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        text = said("convert", "demo.args", "--to", "deepspeed", "--world-size", "8", "--all")[2]
        assert " -> nothing" in text and not re.search(r"->$", text, re.MULTILINE)
        assert max(map(len, text.partition("In the training script")[0].splitlines())) <= width

    @pytest.mark.parametrize("width", (60, 80))
    def test_a_path_is_whole_in_every_heading(
        self, said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        long = str(tmp_path / f"{'a_launch_with_a_long_name_' * 4}.args")
        out = long.replace(".args", ".json")
        Path(long).write_text(SAMPLED)
        for words, path in (
            (("check", long), f"{long}:"),
            (("check", long, "demo.args"), f"{long}:"),
            (("diff", long, "demo.args"), long),
            (("convert", long, "--to", "deepspeed", "-o", out), f"{out},"),
        ):
            text = said(*words, "--world-size", "8")[1]
            assert path in text.split(), words
            assert not re.search(r" $", text, re.MULTILINE)

    @pytest.mark.parametrize(
        "words",
        [("layout", "demo.args", "--vocab", "32000"), ("show", "deepspeed", "gradient_clipping")],
    )
    def test_tables_of_other_commands_keep_to_the_width(
        self, said: Said, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
    ) -> None:
        shown = {}
        for width in (200, 60):
            monkeypatch.setenv("COLUMNS", str(width))
            shown[width] = said(*words)[1]
            assert max(map(len, shown[width].splitlines())) <= width
            assert not re.search(r" $", shown[width], re.MULTILINE)
        packed, heads = re.sub(r"\s+", "", shown[60]), {"layers", "collective", "stack"}
        assert [
            word
            for word in re.findall(r"[\w.]+", shown[200])
            if word not in packed and word not in heads
        ] == []

    def test_nonsense_in_columns_is_ignored(
        self, said: Said, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usual = said(*CONVERT)[2]
        monkeypatch.setenv("COLUMNS", "wide")
        assert said(*CONVERT)[2] == usual


class TestFiles:
    def test_those_written_are_listed(self, said: Said, tmp_path: Path) -> None:
        before = {path.name for path in tmp_path.iterdir()}
        text = said(*CONVERT, "-o", "ds.json")[1]
        listed = text.splitlines()[-1].removeprefix("wrote ").split(", ")
        assert set(listed) == {path.name for path in tmp_path.iterdir()} - before
        assert json.loads(said(*CONVERT, "-o", "ds.json", "--json")[1])["files"] == listed

    def test_the_same_again_is_no_overwriting(self, said: Said) -> None:
        assert said(*CONVERT, "-o", "ds.json")[0] == said(*CONVERT, "-o", "ds.json")[0] == 2

    def test_what_a_conversion_wrote_is_written_anew(self, said: Said, tmp_path: Path) -> None:
        said(*CONVERT, "-o", "ds.json")
        (tmp_path / "sampled.args").write_text(SAMPLED.replace("--lr 1e-3", "--lr 2e-3"))
        assert said(*CONVERT, "-o", "ds.json")[0] == 2
        assert '"lr": 0.002' in (tmp_path / "ds.json").read_text()

    @pytest.mark.parametrize(
        "name", ["ds.json", "ds.code.py", "ds.code.json", "ds.json.carry.json"]
    )
    def test_an_edited_one_is_kept_unless_forced(
        self, said: Said, tmp_path: Path, name: str
    ) -> None:
        said(*CONVERT, "-o", "ds.json")
        edited = (
            "# mine\n"
            if name.endswith(".carry.json")
            else (tmp_path / name).read_text() + "\n# mine\n"
        )
        (tmp_path / name).write_text(edited)
        now = {path: path.read_text() for path in tmp_path.iterdir()}
        code, out, err = said(*CONVERT, "-o", "ds.json")
        assert (
            (code, out) == (1, "")
            and f"{name}: was edited since it was written" in err
            and "--force" in err
        )
        assert {path: path.read_text() for path in tmp_path.iterdir()} == now
        assert said(*CONVERT, "-o", "ds.json", "--force")[0] == 2
        assert (tmp_path / name).read_text() != edited

    def test_a_file_of_somebody_else_is_kept(self, said: Said, tmp_path: Path) -> None:
        (tmp_path / "new.args").write_text("--lr 1\n")
        for words in (
            ("convert", "demo.args", "--to", "megatron"),
            ("drift", "demo.args", "--to-version", "0.18.0"),
        ):
            code, _, err = said(*words, "--world-size", "8", "-o", "new.args")
            assert (
                code == 1
                and "new.args: was edited" in err
                and (tmp_path / "new.args").read_text() == "--lr 1\n"
            )

    def test_a_dry_run_shows_a_diff_and_writes_nothing(self, said: Said, tmp_path: Path) -> None:
        assert said(*CONVERT, "--dry-run")[0] == 1
        text = said(*CONVERT, "-o", "ds.json", "--dry-run")[1]
        assert (
            re.search(r"^ds\.json: new, \d+ lines$", text, re.MULTILINE)
            and not (tmp_path / "ds.json").exists()
        )
        said(*CONVERT, "-o", "ds.json")
        path = tmp_path / "ds.json"
        path.write_text(path.read_text().replace('"lr": 0.001', '"lr": 0.5'))
        edited = path.read_text()
        text = said(*CONVERT, "-o", "ds.json", "--dry-run")[1]
        assert "ds.json: was edited, needs --force" in text and "ds.code.py: as it is" in text
        lines = text.splitlines()
        assert [line.strip(" ,") for line in lines if re.match(r'[-+] +"lr"', line)] == [
            '-      "lr": 0.5',
            '+      "lr": 0.001',
        ]
        assert path.read_text() == edited
        told = json.loads(said(*CONVERT, "-o", "ds.json", "--dry-run", "--json")[1])
        assert told["dry_run"] is True and '+      "lr": 0.001,' in told["changes"]

    def test_a_dry_run_shows_no_secret_of_what_is_there(self, said: Said, tmp_path: Path) -> None:
        said(*CONVERT, "-o", "ds.json")
        path, secret = tmp_path / "ds.json", "hf_" + "kQ8vZr3TnXw5LpB2" * 2
        path.write_text(path.read_text().replace("{", f'{{\n  "api_key": "{secret}",', 1))
        code, out, err = said(*CONVERT, "-o", "ds.json", "--dry-run")
        assert code == 2 and "api_key" in out and secret not in out + err
