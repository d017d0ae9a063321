"""Settings with which a recipe's pipeline starts, and the object of AutoModel's class
PipelineConfig that has these settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version as installed
from typing import Any

from bridge.errors import ConfigError, VersionError
from bridge.stack.dialect import Config
from compat.automodel.formats import pipeline_fields
from compat.automodel.releases import KNOWN, release

PP = "distributed.pipeline."
TORCH = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """Settings of a pipeline under AutoModel's names. `dtype` is a short name such as bf16."""

    pp_schedule: str | None = "1f1b"
    pp_schedule_csv: str | None = None
    pp_microbatch_size: int = 1
    pp_batch_size: int = 1
    layers_per_stage: int | None = None
    round_virtual_stages_to_pp_multiple: str | None = None
    module_fqns_per_model_part: list[list[str]] | None = None
    patch_inner_model: bool = True
    patch_causal_lm_model: bool = True
    patch_stage_backward_maybe_with_nosync: bool = False
    dtype: str | None = None
    scale_grads_in_schedule: bool = False
    loss_fn: Any = None
    pp_seq_len: int | None = None
    pp_recv_buffer_pool: bool = False
    pp_recv_buffer_pool_slack: int = 2
    version: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that the release has, in AutoModel's order."""
        at = release(self.version or KNOWN[-1])
        return {name: getattr(self, name) for name in pipeline_fields() if at.reads(PP + name)}


def pipeline(config: Config) -> PipelineConfig:
    """Return the pipeline settings with which a recipe starts. If the source is only a pipeline
    config, its settings are returned unchanged.
    """
    options = {name: config.effective.get(PP + name) for name in pipeline_fields()}
    options = {name: value for name, value in options.items() if value is not None}
    parts = options.get("module_fqns_per_model_part")
    if parts is not None:
        options["module_fqns_per_model_part"] = [list(part) for part in parts]
    # A function from the user's code, which no file can hold.
    if config.opaque.get(PP + "loss_fn") is not None:
        options["loss_fn"] = config.opaque[PP + "loss_fn"]
    return PipelineConfig(version=config.version, **options)


def live(config: Config) -> Any:
    """Return the PipelineConfig of the installed AutoModel."""
    try:
        have = installed("nemo-automodel")
    except PackageNotFoundError:
        raise VersionError(
            "automodel: nemo-automodel is not installed; install it, or write the recipe as YAML"
        ) from None
    # The main branch of a day calls itself by the release before it, without the day.
    if have.partition("+")[0] != config.version.partition(".post")[0]:
        raise VersionError(
            f"automodel: the config is for {config.version}, but {have} is installed; read the"
            f" recipe for {have}"
        )
    if not config.effective.get(PP + "pp_schedule"):
        raise ConfigError("distributed.pp_size: found no pipeline; set pp_size above 1")
    values = pipeline(config).to_dict()
    if values["dtype"] is not None:
        values["dtype"] = getattr(import_module("torch"), TORCH[values["dtype"]])
    return import_module("nemo_automodel.components.distributed.pipelining.config").PipelineConfig(
        **values
    )
