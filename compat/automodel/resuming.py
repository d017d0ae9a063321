"""How scripts that use NeMo AutoModel save checkpoints and resume from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from bridge.stack.checkpoint_side import CheckpointSide, Saves
from bridge.stack.dialect import Config, Written

if TYPE_CHECKING:
    from bridge.checkpoint.hub import Hub

GROUPED = """groups, named = json.loads(Path("{file}").read_text()), dict(model.named_parameters())  # yours, after fully_shard
groups = [{{**group, "params": [named[name] for name in group["params"]]}} for group in groups]
optimizer = torch.optim.AdamW(groups)  # of the class that your script takes; a schedule starts from the rate of each group
"""
# A torch checkpoint of parameters and optimizer state. The
# recipes' own checkpoints have other folders and names.
LOADING = """{imports}import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

{grouped}model_state, optimizer_state = get_state_dict(model, optimizer)  # yours, after fully_shard
state = {{"model": model_state, "optimizer": optimizer_state, "step": 0}}
dcp.load(state, checkpoint_id="{folder}")
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
"""


class AutoModelCheckpoints(CheckpointSide):
    """Checkpoints of torch, which a script loads: the training loop of recipes cannot read them."""

    loads: ClassVar[Mapping[str, Mapping[str, Any]]] = {"dcp": {}}
    grouping = True
    scoped = False  # a script of the user's own loads the checkpoint

    def saves(self, config: Config, hub: Hub) -> Saves:
        """Name the checkpoint format: torch's distributed checkpoints, which any number of ranks
        can load.
        """
        return Saves("dcp")

    def resume_from(self, output: Written, folder: str, groups: str = "") -> Written:
        """Return code with which a script loads a torch checkpoint. The recipe's own training loop
        cannot read these checkpoints.
        """
        group_lines = GROUPED.format(file=groups) if groups else ""
        imports = "import json\nfrom pathlib import Path\n\nimport torch\n" if groups else ""
        return replace(
            output, snippet=LOADING.format(folder=folder, grouped=group_lines, imports=imports)
        )


SIDE = AutoModelCheckpoints
