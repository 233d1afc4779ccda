"""Shared fixtures, and the order of the tests."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3kit.params import Params
from eagle3kit.rundir import Run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The pipeline's tests first: they take longest, and the others run beside them."""
    items.sort(key=lambda item: item.path.name != "test_pipeline.py")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB in memory, whose end is soon reached."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here: see tests/SKIPS.md")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """An empty run in a temporary folder."""
    return Run(Params(run_name="unit", runs_dir=str(tmp_path / "runs")), "03_extract_hidden_states")
