"""The checkpoint side of a stack: how its runs save checkpoints and resume from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from bridge.errors import BridgeError
from bridge.stack.dialect import Config, Dialect, Written
from bridge.stack.findings import Finding
from bridge.stack.launch_command import torchrun
from bridge.stack.stack_tables import StackTables

if TYPE_CHECKING:
    from bridge.checkpoint.hub import Hub
    from bridge.checkpoint.interface import Format
    from bridge.checkpoint.parameter_names import Naming


@dataclass(frozen=True)
class Saves:
    """The way in which a run of a config saves checkpoints and resumes from them.

    `format` is the format of the checkpoints. The sharding `level`, the number of data `ranks` and
    the `dtype` of the weights are None if the format does not depend on them. `samples` is true if
    the learning-rate schedule counts samples instead of steps. `schedule` is the state of the
    scheduler that the run's script makes from a plan. `instead` are settings that the config needs
    to resume (None: unset), and `findings` say what these settings change. `client` is the state
    that the run's own script would have saved; it is used if the checkpoint has no such state.
    `config` is the config that this script would have saved.
    """

    format: str
    level: int | None = None
    ranks: int | None = None
    dtype: str | None = None
    samples: bool = False
    schedule: Mapping[str, Any] | None = None
    client: Mapping[str, Any] = field(default_factory=dict)
    instead: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    config: Mapping[str, Any] | None = None


class CheckpointSide:
    """How runs of a stack save checkpoints and resume from them. This class stands for a stack of which no
    checkpoint is written; a stack has a subclass of its own as `SIDE` in its module `resuming`.
    """

    loads: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Checkpoint formats from which the stack can resume, each with the settings that the config
    then needs.
    """
    native_parameters: ClassVar[str | None] = None
    """Name of the convention that names the parameters when the native engine trains the model in a
    config. None if configs of the stack describe no model for the native engine.
    """
    scheduled: ClassVar[tuple[str, ...]] = ()
    """Optimizer settings that the stack's scheduler sets in every step from the config. The values
    in a checkpoint have no effect.
    """
    grouping: ClassVar[bool] = False
    """Whether training scripts build the optimizer's parameter groups themselves, from any
    parameters. If false, the stack builds the groups.
    """
    scoped: ClassVar[bool] = True
    """Whether a run that resumes from a checkpoint still leaves biases and norms out of weight decay
    if the config says so.
    """
    spared: ClassVar[tuple[str, ...]] = ()
    """Arguments of `--code` that state a fact which only the training script shows: biases and
    norms are in a parameter group without weight decay.
    """
    by_place: ClassVar[bool] = False
    """Whether checkpoints of the stack identify parameters by index in the optimizer's groups. Each
    stack forms different groups, so no other engine can load such a checkpoint.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect

    def saves(self, config: Config, hub: Hub) -> Saves:
        """Return the way in which a run of `config` keeps checkpoints, for a checkpoint with the
        content of `hub`. Raises `BridgeError` if no such checkpoint can be made.
        """
        raise BridgeError(
            f"move: no checkpoint is written for {self.dialect.title} yet; use `stagebridge checkpoint convert`"
        )

    def parameter_names(self, config: Config) -> str | None:
        """Return the name of the convention by which a run of `config` names parameters. None
        stands for the names in the model of the training script.
        """
        return None

    def config_of_record(self, hub: Hub) -> Config | None:
        """Return the config of the model that the arguments of a run in a checkpoint describe, without
        dropout and with a microbatch of one sample; None if there are none, or those alone that a
        conversion knew. Raises `BridgeError` for arguments without a meaning.
        """
        return None

    def settings_for_groups(self, file: str) -> Mapping[str, Any]:
        """Return the settings that make the training script build the optimizer's parameter groups
        from `file`.
        """
        return {}

    def resume_from(self, output: Written, folder: str, groups: str = "") -> Written:
        """Add to `output` the settings that make the run resume from the checkpoint in `folder`,
        with the optimizer's parameter groups from the file `groups`.
        """
        return output

    def run_natively(
        self, output: Written, world: int, folder: str, groups: str = "", model: str = ""
    ) -> Written:
        """Add to `output` the command by which the native engine runs the config on `world` ranks.

        The run resumes from the checkpoint in `folder`, with the optimizer's parameter groups from
        the file `groups`. The run trains the model of the folder `model`; "file" stands for the
        model that the config states.
        """
        options = [
            word
            for option, name in (("--model", model), ("--groups", groups))
            if name
            for word in (option, name)
        ]
        # The environment keeps Python from importing files of the current directory.
        launch = torchrun(
            world, "-m", "stagebridge", "train", output.file, "--resume", folder, *options
        )
        return replace(
            output, launch=launch, arguments=False, snippet="", environment={"PYTHONSAFEPATH": "1"}
        )


@cache
def side_of(dialect: Dialect) -> CheckpointSide:
    """Return the checkpoint side of a stack."""
    return dialect.find_part("resuming", "SIDE", CheckpointSide)(dialect)


def formats_of(dialect: StackTables) -> tuple[Format, ...]:
    """Return the checkpoint formats that the stack writes: `FORMATS` of its module `checkpoint`."""
    return dialect.find_part("checkpoint", "FORMATS", ())


def namings_of(dialect: StackTables) -> tuple[Naming, ...]:
    """Return the conventions by which the stack names the parameters of models: `NAMINGS` of its module
    `checkpoint`.
    """
    return dialect.find_part("checkpoint", "NAMINGS", ())
