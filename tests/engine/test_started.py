"""What `convert --script` writes starts as it is; `tests/engine/started.py` starts ten launches, here one of them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from started import started


@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core")
def test_a_launch_script_of_megatron_trains_as_it_is_written(tmp_path: Path) -> None:
    seen = started("SGD", "megatron", tmp_path)
    assert seen.trained, seen.failure
    assert seen.losses[-1] < seen.losses[0]
