"""Faults on the real stack, one after the other in one run; then it ends in the facts of an undisturbed one.

    python -m pytest tests/soak/test_faults.py -s

About a quarter of an hour on 2 cores. `tests/test_extraction.py` and `tests/test_pipeline.py` kill servers and the kit.
"""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from pipeline import SMALL, Pipeline, wait_for

UNTIL = ("--to", "05_train")
SAME = ("data.rows", "data.dropped", "data.train_tokens", "extraction.tokens", "vocab.size", "train.steps")
STALL_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def calm(folder: Path) -> Pipeline:
    """The run that nothing happens to."""
    pipeline = Pipeline(folder, SMALL.format(folder=folder, name="calm"), "calm")
    status, output = pipeline.run(*UNTIL, timeout_s=1800)
    assert status == 0, output[-3000:]
    return pipeline


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Pipeline:
    return Pipeline(folder, SMALL.format(folder=folder, name="test") + f"stall_timeout_s: {STALL_S}\n")


def only(pipeline: Pipeline, part: str) -> psutil.Process:
    """The process whose command line has `part`; not the one that watches over it."""
    lines = {process: " ".join(process.cmdline()) for process in pipeline.processes()}
    (found,) = (process for process, line in lines.items() if part in line and "supervise.py" not in line)
    return found


def kept(pipeline: Pipeline) -> dict[str, list[int]]:
    return {row["id"]: row["input_ids"] for row in pipeline.answers()}


def test_ctrl_c_in_a_cell_of_the_real_notebook(pipeline: Pipeline) -> None:
    status, output = pipeline.run("--to", "02_build_k25_config")
    assert status == 0, output[-3000:]
    process = pipeline.start_notebook("03_extract_hidden_states")
    assert wait_for(lambda: len(pipeline.answers()) >= 6 or process.poll() is not None, 400)
    only(pipeline, "ipykernel").send_signal(signal.SIGINT)  # what JupyterLab's stop button does
    assert process.wait(120) != 0
    assert pipeline.nothing_left()
    assert "KeyboardInterrupt" in (pipeline.folder / "03_extract_hidden_states.ipynb").read_text()
    assert len(kept(pipeline)) >= 6


def test_a_server_that_hangs_is_ended_and_the_wait_says_what_for(pipeline: Pipeline) -> None:
    before, length = kept(pipeline), len(pipeline.output.read_text())
    process = pipeline.start("--from", "03_extract_hidden_states", *UNTIL)
    assert wait_for(lambda: len(kept(pipeline)) > len(before) + 4 or process.poll() is not None, 400)
    pipeline.workers()[0].suspend()
    began = time.monotonic()
    assert process.wait(10 * STALL_S) == 1
    assert time.monotonic() - began > STALL_S / 2
    assert pipeline.nothing_left()
    failed = [line for line in pipeline.output.read_text()[length:].splitlines() if "] failed:" in line]
    assert len(failed) == 1
    assert f"regenerate-responses has come no further for {STALL_S} s" in failed[0]
    assert before.items() <= kept(pipeline).items()


def test_a_second_run_is_refused_and_the_first_goes_on_until_its_trainer_is_killed(pipeline: Pipeline) -> None:
    first = pipeline.start("--from", "03_extract_hidden_states", *UNTIL)
    assert wait_for(lambda: bool(pipeline.training("train")) or first.poll() is not None, 900)
    second = pipeline.beside("second", pipeline.file.read_text())
    status, output = second.run(*UNTIL)
    assert status == 2
    assert f"process {first.pid}" in output
    length = len(pipeline.output.read_text())
    only(pipeline, "-m eagle3kit.trainer").kill()
    assert first.wait(120) == 1
    assert pipeline.nothing_left()
    assert "[05_train] failed: the trainer was ended by SIGKILL" in pipeline.output.read_text()[length:]


def test_the_clock_was_set_back_by_a_year_and_all_ends_in_the_same_facts(pipeline: Pipeline, calm: Pipeline) -> None:
    later = time.time() + 365 * 86400
    for path in pipeline.root.rglob("*"):
        os.utime(path, (later, later), follow_symlinks=False)
    status, output = pipeline.run(*UNTIL)
    assert status == 0, output[-3000:]
    assert pipeline.nothing_left()
    assert {name: pipeline.facts()[name] for name in SAME} == {name: calm.facts()[name] for name in SAME}
    assert len(kept(pipeline)) == len(pipeline.answers()) == calm.facts()["data.rows"]
    assert [row["epoch"] for row in pipeline.training("val")] == [0, 1]
    assert pipeline.facts()["extraction.golden_top1"] >= 0.99
    assert pipeline.facts()["train.val_acc_1"] == pytest.approx(calm.facts()["train.val_acc_1"], rel=0.3)
