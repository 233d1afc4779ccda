"""Shared fixtures."""

from pathlib import Path

import pytest

from eagle3kit.params import Params
from eagle3kit.rundir import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """An empty run in a temporary folder."""
    return Run(Params(run_name="unit", runs_dir=str(tmp_path / "runs")), "03_extract_hidden_states")
