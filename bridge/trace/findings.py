"""Findings: violations of invariants in a single run, each with its meaning."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Severity = Literal["fault", "remark"]
"""A fault breaks an assumption of every training; a remark may be intended."""

FILE = "findings.jsonl"
PATIENCE = 60
"""Largest time in seconds for a user's command on a finding, during which the training waits."""
logger = logging.getLogger("bridge.trace")


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of a finding, and its severity."""

    text: str
    severity: Severity = "fault"


MEANINGS: Mapping[str, Meaning] = {
    "replicas-differ": Meaning(
        "ranks that must hold equal tensors hold different ones, and the difference grows"
    ),
    "models-differ": Meaning(
        "data ranks do not have the same parameters; nothing else can be compared between them"
    ),
    "gradient-stale": Meaning(
        "gradients of the step before are left when backward begins: zero_grad is missing"
    ),
    "gradient-lost": Meaning(
        "gradients that backward computed are gone when the step begins: zero_grad comes too "
        "early, or they are unset"
    ),
    "gradient-missing": Meaning(
        "a parameter that should train got no gradient, though its layer ran", "remark"
    ),
    "gradient-not-reduced": Meaning(
        "a rank steps with its own gradient instead of the mean over data ranks"
    ),
    "gradient-summed": Meaning(
        "gradients are summed over data ranks, not averaged, which is right only if the loss was "
        "divided by the number of ranks"
    ),
    "gradient-averaged-twice": Meaning(
        "gradients are divided by the number of data ranks twice"
    ),
    "gradient-changed": Meaning(
        "the optimizer gets other gradients than backward computed: elements were changed or "
        "dropped in between"
    ),
    "step-without-backward": Meaning(
        "the optimizer stepped again without a backward pass since its last step"
    ),
    "not-training": Meaning(
        "the model is in evaluation mode in a training step: dropout is off, and norms do not "
        "update their statistics"
    ),
    "not-in-optimizer": Meaning(
        "a parameter gets gradients but is in no group of the optimizer: it is never updated"
    ),
    "in-two-groups": Meaning(
        "a parameter is in more than one group: it is updated more than once a step"
    ),
    "not-of-the-model": Meaning(
        "the optimizer holds parameters that the model does not have: it was built for another copy"
    ),
    "not-updated": Meaning(
        "a parameter has a gradient and a learning rate, but the step did not change it"
    ),
    "update-too-large": Meaning(
        "updates are larger than this optimizer can make them at its learning rate"
    ),
    "update-unexplained": Meaning(
        "an update does not follow from the gradient by the optimizer's rule, state and settings"
    ),
    "weights-changed": Meaning(
        "something other than the optimizer changed weights between two steps", "remark"
    ),
    "updates-lost": Meaning(
        "most updates vanish in rounding: 16-bit weights are updated without fp32 masters"
    ),
    "moments-missing": Meaning(
        "parameters of one group have taken different numbers of steps: moments were not resumed for all"
    ),
    "moments-lost": Meaning(
        "the optimizer lost its state of a parameter since its last step, and starts again without "
        "it"
    ),
    "optimizer-replaced": Meaning(
        "another optimizer takes over during the run, with new moments and step counts", "remark"
    ),
    "moments-not-resumed": Meaning(
        "the schedule continues where a run ended, but the optimizer starts again: its moments "
        "were not resumed",
        "remark",
    ),
    "schedule-not-resumed": Meaning(
        "the optimizer continues where a run ended, but the schedule starts again: it was not "
        "resumed",
        "remark",
    ),
    "clip-norms-differ": Meaning(
        "ranks clip by different norms: the norm is not computed over all ranks"
    ),
    "decay-on-norms": Meaning("weight decay applies to biases or norms", "remark"),
    "same-data": Meaning("data ranks get the same samples: the batch is effectively smaller"),
    "data-repeated": Meaning(
        "a pass gets the same samples as another pass of this step or of the step before", "remark"
    ),
    "dropout-repeated": Meaning(
        "random numbers start from the same state in several passes: dropout drops the same "
        "elements in each"
    ),
    "dropout-alike": Meaning(
        "data ranks draw the same random numbers: dropout drops the same elements on each", "remark"
    ),
    "positions-moved": Meaning("positions start with another number than in all passes before"),
    "future-seen": Meaning(
        "outputs depend on later tokens, which they are trained to predict: the causal mask is "
        "missing"
    ),
    "buffers-differ": Meaning("buffers that no forward pass changes differ between data ranks"),
    "untied": Meaning(
        "two weights start with the same values but are not one parameter: a tie was lost"
    ),
    "skipped-alone": Meaning(
        "ranks did not step together: some skipped the step, and replicas differ from here on; no "
        "more is compared"
    ),
    "rank-absent": Meaning(
        "ranks take steps at different times, or different numbers of steps; no more is compared",
        "remark",
    ),
    "rank-late": Meaning("a rank keeps the others waiting", "remark"),
    "layers-differ": Meaning("data ranks did not call the same layers equally often"),
    "recompute-differs": Meaning(
        "recomputing a layer for backward gave other values: its random numbers were not kept"
    ),
    "check-ended": Meaning(
        "a check of the trace itself failed with an error, and is not run any more",
        "remark",
    ),
    "accumulation-differs": Meaning(
        "a step had another number of passes than the run was set to: its gradients have the wrong "
        "scale"
    ),
}
"""The meaning of each finding, by id. An id never changes its meaning."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding in a step: its id, the layer or parameter, the ranks that the finding concerns
    (empty: all), and the evidence.
    """

    id: str
    step: int
    where: str
    evidence: str
    ranks: tuple[int, ...] = ()

    @property
    def severity(self) -> Severity:
        """The severity of the finding."""
        return MEANINGS[self.id].severity

    @property
    def meaning(self) -> str:
        """The meaning of the finding."""
        return MEANINGS[self.id].text

    def __str__(self) -> str:
        ranks = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.id}: step {self.step}: {self.where or 'the run'}{ranks}: {self.evidence}; {self.meaning}"


@dataclass
class Findings:
    """The findings of a run. Each is reported once for each place and, unless `folder` is None,
    written to `folder`.

    `command` is a command line, split as a shell would split it. It is run for each finding, with
    the finding as a JSON object on stdin and in STAGEBRIDGE_FINDING.
    """

    folder: Path | None = None
    command: str | None = None
    said: bool = True
    found: list[Finding] = field(default_factory=list)
    _known: set[tuple[str, str]] = field(default_factory=set)

    def add(self, findings: Iterable[Finding], aloud: bool = True) -> None:
        """Record the findings that are new and, with `aloud`, log them."""
        for finding in findings:
            # What is wrong in one step mostly is wrong in all that follow.
            if (finding.id, finding.where) not in self._known:
                self._known.add((finding.id, finding.where))
                self.found.append(finding)
                self._tell(finding, aloud)

    def _tell(self, finding: Finding, aloud: bool) -> None:
        if not self.said:
            return
        if aloud:
            logger.log(
                logging.ERROR if finding.severity == "fault" else logging.WARNING, "%s", finding
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
                logger.warning("%s: findings cannot be written: %s", self.folder, error.strerror)
                # Reported once, not in every step.
                self.folder = None
        if self.command is not None:
            self._run(self.command, text)

    def _run(self, command: str, text: str) -> None:
        """Run the command without a shell.

        If it fails, there is a warning and the training continues.
        """
        try:
            words, known = shlex.split(command), {**os.environ, "STAGEBRIDGE_FINDING": text}
            done = subprocess.run(
                words, input=text + "\n", text=True, env=known, check=False, timeout=PATIENCE
            )
            problem = f"ended with exit code {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"did not end within {PATIENCE} s and was ended"
        except (OSError, ValueError, IndexError) as error:
            problem = f"cannot be run: {error}"
        if problem:
            logger.warning("--on-finding: %s %s", command, problem)
