"""Shared fixtures, and the order of the tests."""

from pathlib import Path

import pytest

from eagle3kit.params import Params
from eagle3kit.rundir import Run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The pipeline's tests first: they take longest, and the others run beside them."""
    items.sort(key=lambda item: item.path.name != "test_pipeline.py")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """An empty run in a temporary folder."""
    return Run(Params(run_name="unit", runs_dir=str(tmp_path / "runs")), "03_extract_hidden_states")
