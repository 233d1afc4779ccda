"""The command line: bad input is one line, and a stage that fails is reported."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from eagle3kit import cli
from eagle3kit.params import Params
from eagle3kit.rundir import Run, locked

ROOT = Path(__file__).parents[1]


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "eagle3kit.cli", *arguments], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "params/none.yaml"], "params/none.yaml"),
        (["run", "params/local.yaml", "-p", "lerning_rate", "3"], "lerning_rate"),
        (["params", "params/local.yaml", "-p", "train_epochs", "many"], "train_epochs"),
        (["plan", "params/local.yaml", "-p", "target_model", "/no/such/folder"], "/no/such/folder"),
        (["compare", "/no/such/run", "/no/such/other"], "/no/such/run"),
    ],
)
def test_bad_input_is_one_line_that_names_it(arguments: list[str], says: str) -> None:
    done = call(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("eagle3kit: ")
    assert says in done.stderr


def test_from_after_to_is_refused(tmp_path: Path) -> None:
    done = call("run", "params/local.yaml", "-p", "runs_dir", str(tmp_path), "--from", "05_train", "--to", "04_vocab_map")
    assert done.returncode == 2
    assert "no notebook lies between" in done.stderr


def test_b300_stops_at_preflight_with_what_is_missing(tmp_path: Path) -> None:
    done = call("run", "params/b300.yaml", "-p", "runs_dir", str(tmp_path / "runs"), "-p", "reports_dir", str(tmp_path))
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("[00_preflight] failed:")]
    assert len(failed) == 1
    assert "GPU" in failed[0]
    assert "fix:" in failed[0]
    assert "Traceback" not in done.stdout + done.stderr
    assert "00_preflight" in (tmp_path / "b300.html").read_text()


@pytest.mark.parametrize("stage", ["01_explore_k2_eagle3", "02_build_k25_config"])
def test_k25_is_explored_and_built_anywhere(tmp_path: Path, stage: str) -> None:
    """From the shipped reference values where the hub cannot be reached."""
    places = ["-p", "runs_dir", str(tmp_path / "runs"), "-p", "reports_dir", str(tmp_path)]
    done = call("run", "params/b300.yaml", *places, "--from", stage, "--to", stage)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "b300" / "notebooks" / f"{stage}.ipynb").exists()


def test_a_cell_that_raises_anything_else_is_named_with_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("notebooks", "params"):
        (tmp_path / folder).mkdir()
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}})
    notebook.cells = [nbformat.v4.new_code_cell("1 / 0")]
    nbformat.write(notebook, tmp_path / "notebooks" / "04_vocab_map.ipynb")
    monkeypatch.chdir(tmp_path)
    message = cli.execute(Run(Params(run_name="x"), "run"), "04_vocab_map")
    assert message is not None
    assert message.startswith("ZeroDivisionError: division by zero (the traceback is in ")


def test_memory_of_children_is_counted() -> None:
    with (
        cli.MemoryPeak(every_s=0.05) as memory,
        subprocess.Popen([sys.executable, "-c", "x = bytearray(3 * 10**8); input()"]) as child,
    ):
        for _ in range(100):
            if memory.highest > 3e8:
                break
            memory._stop.wait(0.05)
        child.kill()
    assert memory.highest > 3e8


def test_a_second_run_on_the_same_folder_is_refused_by_the_pid_of_the_first(tmp_path: Path) -> None:
    with locked(tmp_path / "local" / "locks" / "run", wait=False, busy=""):
        done = call("run", "params/local.yaml", "-p", "runs_dir", str(tmp_path))
    assert done.returncode == 2
    assert f"run local is already being worked on; seen process {os.getpid()};" in done.stderr
