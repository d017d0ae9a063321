"""Findings: violations of invariants in a single run, each with a sentence that explains it."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, overload

Severity = Literal["fault", "remark"]
"""How grave a finding is: a fault is wrong in every training; a remark may be intended."""

FILE = "findings.jsonl"
PATIENCE = 60
"""Maximum number of seconds for the user's command that is run for a finding. The training waits
for the command.
"""
logger = logging.getLogger("bridge.trace")


@dataclass(frozen=True, slots=True)
class Meaning:
    """The explanation of a kind of finding, and the severity of this kind."""

    text: str
    severity: Severity = "fault"


MEANINGS: Mapping[str, Meaning] = {
    "replicas-differ": Meaning(
        "ranks that must hold equal tensors hold different ones, and the difference grows"
    ),
    "models-differ": Meaning(
        "data ranks do not have the same parameters; nothing else can be compared between these ranks"
    ),
    "gradient-stale": Meaning(
        "gradients of the step before are left when backward begins: zero_grad is missing"
    ),
    "gradient-lost": Meaning(
        "gradients that backward computed are gone when the step begins: zero_grad is "
        "called too early, as between the passes of a step, or the gradients are set to None"
    ),
    "gradient-missing": Meaning(
        "a parameter that requires a gradient got none, though its layer ran", "remark"
    ),
    "gradient-not-reduced": Meaning(
        "a rank updates weights with the gradient that it computed itself instead of the mean over data ranks"
    ),
    "gradient-summed": Meaning(
        "gradients are summed over data ranks, not averaged, which is right only if the loss was "
        "divided by the number of ranks"
    ),
    "gradient-averaged-twice": Meaning("gradients are divided by the number of data ranks twice"),
    "gradient-changed": Meaning(
        "the optimizer gets other gradients than backward computed: elements were changed or "
        "dropped before the step",
        "remark",
    ),
    "step-without-backward": Meaning(
        "the optimizer stepped twice without a backward pass between the two steps"
    ),
    "not-training": Meaning(
        "the model is in evaluation mode in a training step: dropout is off, and norms do not "
        "update their statistics"
    ),
    "layer-not-training": Meaning(
        "a layer, or a part of it, is in evaluation mode while layers like it are in training mode",
        "remark",
    ),
    "not-in-optimizer": Meaning(
        "a parameter that gets gradients is in no group of the optimizer, so that it is never updated"
    ),
    "in-two-groups": Meaning(
        "a parameter is in more than one group of the optimizer, so that a step updates it more than once"
    ),
    "not-of-the-model": Meaning(
        "the optimizer holds parameters that the model does not have: it was made for another copy of the model"
    ),
    "not-updated": Meaning(
        "a parameter has a gradient and a learning rate, but the step did not change it"
    ),
    "update-too-large": Meaning(
        "updates are larger than the optimizer's rule allows at this learning rate"
    ),
    "update-unexplained": Meaning(
        "an update is not the one that the optimizer's rule gives for this gradient, state and settings"
    ),
    "weights-changed": Meaning(
        "something other than the optimizer changed weights between two steps", "remark"
    ),
    "parameter-replaced": Meaning(
        "names of the model mean other parameters than in the step before: modules or parameters "
        "were replaced, or changed places",
        "remark",
    ),
    "weights-not-finite": Meaning("a weight has become NaN or infinite by its update"),
    "updates-lost": Meaning(
        "most updates vanish in rounding: 16-bit weights are updated without fp32 masters"
    ),
    "cast-stale": Meaning(
        "forward uses 16-bit weights that are not those of the fp32 masters: an update did not reach "
        "the model, or weights were loaded without their masters"
    ),
    "moments-missing": Meaning(
        "the optimizer's moments and step counts do not fit together: some were not resumed"
    ),
    "moments-lost": Meaning(
        "the optimizer lost the state of a parameter since the last step, and starts again without "
        "this state"
    ),
    "moments-changed": Meaning(
        "something other than the optimizer changed its moments between two steps", "remark"
    ),
    "optimizer-replaced": Meaning(
        "another optimizer takes over during the run, with new moments and step counts", "remark"
    ),
    "moments-not-resumed": Meaning(
        "the schedule continues where a run ended, but the optimizer starts again: the optimizer's "
        "moments were not resumed",
        "remark",
    ),
    "schedule-not-resumed": Meaning(
        "the optimizer continues where a run ended, but the schedule starts again: the schedule's "
        "state was not resumed",
        "remark",
    ),
    "clip-norms-differ": Meaning(
        "ranks clip by different norms: the norm is not computed over all ranks, or it is the norm "
        "of gradients that differ between ranks"
    ),
    "clip-changed": Meaning("gradients are clipped to another norm than before", "remark"),
    "decay-on-norms": Meaning("weight decay applies to biases or norms", "remark"),
    "same-data": Meaning("data ranks get the same samples: the batch is effectively smaller"),
    "data-repeated": Meaning(
        "a pass gets the same samples as another pass of this step or of the step before", "remark"
    ),
    "dropout-repeated": Meaning(
        "random numbers start from the same state in several passes: dropout drops the same "
        "elements in each of these passes"
    ),
    "dropout-alike": Meaning(
        "data ranks draw the same random numbers: dropout drops the same elements on all of these ranks",
        "remark",
    ),
    "positions-moved": Meaning(
        "the positions of a pass start with another number than in all passes before"
    ),
    "future-seen": Meaning(
        "outputs depend on later tokens, which the model is trained to predict: the causal mask is "
        "missing"
    ),
    "buffers-differ": Meaning("buffers that no forward pass changes differ between data ranks"),
    "buffers-diverge": Meaning(
        "a buffer that the training loop changes, and no forward pass, has become different on data ranks",
        "remark",
    ),
    "loss-spike": Meaning("the loss is far above that of all recent steps", "remark"),
    "gradient-spike": Meaning(
        "the norm of gradients is far above that of all recent steps", "remark"
    ),
    "untied": Meaning("two weights that should be one parameter are separate: a tie was lost"),
    "skipped-alone": Meaning(
        "some ranks skipped a step that others took: replicas differ from here on, and no later "
        "step is compared"
    ),
    "rank-absent": Meaning(
        "ranks take steps at different times, or different numbers of steps; no later step is compared",
        "remark",
    ),
    "rank-late": Meaning("a rank keeps the others waiting", "remark"),
    "layers-differ": Meaning("data ranks did not call the same layers equally often", "remark"),
    "passes-differ": Meaning(
        "data ranks made different numbers of forward passes in a step: their samples count differently"
    ),
    "recompute-differs": Meaning(
        "recomputing a layer for backward gave other values than the forward pass: the state of the "
        "random numbers was not restored"
    ),
    "check-ended": Meaning(
        "one of the trace's checks failed with an error of its own, and is not run any more",
        "remark",
    ),
    "accumulation-differs": Meaning(
        "a step had another number of passes than the setting `accumulation`: the gradients of the "
        "step have the wrong scale"
    ),
}
"""The explanation of each kind of finding, by id. An id never changes its meaning."""


@dataclass(frozen=True, slots=True)
class TraceFinding:
    """A finding in a step. `where` is the layer or parameter, `ranks` are the ranks that the
    finding concerns (empty: all), and `evidence` says what was measured.
    """

    id: str
    step: int
    where: str
    evidence: str
    ranks: tuple[int, ...] = ()

    @property
    def severity(self) -> Severity:
        """Whether the finding is a fault or a remark."""
        return MEANINGS[self.id].severity

    @property
    def meaning(self) -> str:
        """A sentence that explains this kind of finding."""
        return MEANINGS[self.id].text

    def __str__(self) -> str:
        ranks = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.id}: step {self.step}: {self.where or 'the run'}{ranks}: {self.evidence}; {self.meaning}"


@dataclass(eq=False, repr=False)
class Findings(Sequence[TraceFinding]):
    """The findings of a run, in the order in which they were made. A finding that occurs again for
    the same layer or parameter is dropped. Unless `folder` is None, the others are written to a
    file in `folder`.

    `command` is a command line, split into words as in a shell. It is run for each finding, with
    the finding as a JSON object on stdin and in STAGEBRIDGE_FINDING.
    """

    folder: Path | None = None
    command: str | None = None
    said: bool = True
    found: list[TraceFinding] = field(default_factory=list)
    _known: set[tuple[str, str]] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.found)

    @overload
    def __getitem__(self, index: int) -> TraceFinding: ...

    @overload
    def __getitem__(self, index: slice) -> list[TraceFinding]: ...

    def __getitem__(self, index: int | slice) -> TraceFinding | list[TraceFinding]:
        return self.found[index]

    def __repr__(self) -> str:
        return f"Findings({self.found!r})"

    def add(self, findings: Iterable[TraceFinding], aloud: bool = True) -> None:
        """Record the findings that are new and, if `aloud` is true, log them."""
        for finding in findings:
            # What is wrong in one step mostly is wrong in all that follow.
            if (finding.id, finding.where) not in self._known:
                self._known.add((finding.id, finding.where))
                self.found.append(finding)
                self._tell(finding, aloud)

    def _tell(self, finding: TraceFinding, aloud: bool) -> None:
        if not self.said:
            return
        if aloud:
            logger.log(
                logging.ERROR if finding.severity == "fault" else logging.WARNING,
                "%s: %s",
                finding.severity,
                finding,
            )
        text = json.dumps(
            {**asdict(finding), "severity": finding.severity, "meaning": finding.meaning}
        )
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with (self.folder / FILE).open("a") as file:
                    file.write(text + "\n")
            except OSError as error:
                logger.warning(
                    "%s: the findings cannot be written: %s", self.folder, error.strerror
                )
                # Reported once, not in every step.
                self.folder = None
        if self.command is not None:
            self._run(self.command, text)

    def _run(self, command: str, text: str) -> None:
        """Run the user's command for one finding, which `text` holds as JSON. No shell is used. If
        the command fails, there is a warning and the training continues.
        """
        try:
            words, environment = shlex.split(command), {**os.environ, "STAGEBRIDGE_FINDING": text}
            process = subprocess.run(
                words, input=text + "\n", text=True, env=environment, check=False, timeout=PATIENCE
            )
            problem = (
                f"this command ended with exit code {process.returncode}"
                if process.returncode
                else ""
            )
        except subprocess.TimeoutExpired:
            problem = f"this command did not end within {PATIENCE} s and was killed"
        except (OSError, ValueError, IndexError) as error:
            problem = f"this command cannot be run: {error}"
        if problem:
            logger.warning("--on-finding: %s: %s", command, problem)
