"""Builds an importable Fast-LLM's config of a whole run, and the dimensions that its layers split over
the tensor ranks, to see whether they stop. The config classes need no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from bridge.errors import ConfigError
from bridge.files import parse
from bridge.stack.dialect import Config
from compat.fast_llm.rules.batch import AXES
from tests.harvesting.code import first
from tests.harvesting.judges.fast_llm import release_of_package as release_of_package
from tests.harvesting.stacks.fast_llm import REGISTERED, TRAINER

FILLS = True
"""Whether `start` needs none of the settings that `missing` asks for."""
DIMENSION = "fast_llm.engine.config_utils.tensor_dim:TensorDim"
SCHEDULE = "fast_llm.engine.optimizer.learning_rate:create_schedule_from_config"
DIVISION = "fast_llm.utils:div"
TENSOR = "fast_llm.engine.distributed.config:DistributedDimNames"


def start(config: Config) -> None:
    """Build the config of the run and the split dimensions of its layers. Raises `ConfigError` with
    the reason for which Fast-LLM stops.
    """
    data: Any = parse(config.dialect.render(config).text, "the config", ".yaml").data
    ranks = config.world_size or prod(config.effective.get(axis) or 1 for axis in AXES)
    mesh = data.setdefault("model", {}).setdefault("distributed", {})
    mesh.setdefault("world_size", ranks)
    mesh.setdefault("local_world_size", ranks)
    data.setdefault("data", {}).setdefault("maximum_document_length", 1)  # `missing` asks for it
    has_model = "base_model" in data["model"]
    try:
        for name in REGISTERED:
            first([name])
        trainer = first([TRAINER]).from_dict(data)
        first([SCHEDULE])(trainer.optimizer.learning_rate)
        base = trainer.model.base_model
        ours = trainer.model.distributed.get_distributed_dim(first([TENSOR]).tensor)
        divide = first([DIVISION])
        tokens = divide(trainer.data.micro_batch_size, trainer.schedule.micro_batch_splits)
        divide(tokens, trainer.model.distributed.sequence_data_parallel)
        for name, size in _sizes(base) if has_model else ():
            first([DIMENSION])(name, size, ours)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"refused by Fast-LLM: {type(error).__name__}: {reason}") from error


def _sizes(base: Any) -> Iterator[tuple[str, int]]:
    """Yield the sizes that the layers split over the tensor ranks: of the vocabulary, and of the
    heads and channels of each block.
    """
    if base.embeddings.vocab_parallel:
        yield "vocabulary", base.embeddings.vocab_size
    blocks = getattr(base.decoder, "blocks", None)
    for block in blocks.values() if blocks else [base.decoder.block]:
        heads, groups = block.mixer.heads, block.mixer.head_groups
        yield "heads", groups if groups > 1 else heads // groups
        yield "channels", block.mlp.intermediate_size
