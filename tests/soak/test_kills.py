"""Kills at random moments, and a disk that fills up: every time the run goes on and ends in the facts of an undisturbed one.

    EAGLE3KIT_KILLS=5 EAGLE3KIT_SEED=7 python -m pytest tests/soak/test_kills.py -s

With 20 kills, the default, about an hour on 2 cores.
"""

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from pipeline import SMALL, Pipeline, wait_for

KILLS = int(os.environ.get("EAGLE3KIT_KILLS", "20"))
SEED = int(os.environ.get("EAGLE3KIT_SEED", random.SystemRandom().randrange(10**6)))

UNTIL = ("--to", "05_train")
KINDS = {
    "the kit": "eagle3kit.cli",
    "the notebook's kernel": "ipykernel",
    "the server": "vllm.entrypoints",
    "vLLM's engine": "VLLM::EngineCore",
    "a tool": "-m eagle3kit.access",
    "the trainer": "-m eagle3kit.trainer",
}
SAME = (
    "data.prompts",
    "data.rows",
    "data.dropped",
    "data.train_tokens",
    "data.train_supervised_tokens",
    "extraction.tokens",
    "vocab.size",
    "train.steps",
)


def alive(pipeline: Pipeline) -> dict[str, psutil.Process]:
    """One process of each kind that runs now."""
    found: dict[str, psutil.Process] = {}
    for process in pipeline.processes():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            found |= {kind: process for kind, part in KINDS.items() if part in line and "supervise.py" not in line}
    return found


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def check(pipeline: Pipeline, undisturbed: dict[str, object]) -> None:
    facts = pipeline.facts()
    assert {name: facts[name] for name in SAME} == {name: undisturbed[name] for name in SAME}
    assert facts["extraction.golden_top1"] >= 0.99
    assert facts["train.val_acc_1"] == pytest.approx(undisturbed["train.val_acc_1"], rel=0.3)
    ids = [row["id"] for row in pipeline.answers()]
    assert len(set(ids)) == len(ids) == facts["data.rows"]
    assert [row["epoch"] for row in pipeline.training("val")] == [0, 1]


def test_kills_at_random_moments_change_no_fact(tmp_path: Path) -> None:
    print(f"\n{KILLS} kills, EAGLE3KIT_SEED={SEED}", flush=True)
    chance = random.Random(SEED)  # noqa: S311 - moments that can be had again, no secrets
    calm = Pipeline(tmp_path, SMALL.format(folder=tmp_path, name="calm"), "calm")
    began = time.monotonic()
    status, output = calm.run(*UNTIL, timeout_s=3600)
    assert status == 0, output[-3000:]
    lasts = time.monotonic() - began
    print(f"undisturbed: {lasts:.0f} s", flush=True)
    kills = finished = 0
    victims: set[str] = set()
    pipeline = Pipeline(tmp_path, SMALL.format(folder=tmp_path, name="run0"), "run0")
    while kills < KILLS or not finished:
        process = pipeline.start(*UNTIL)
        moment = chance.uniform(1, lasts) if kills < KILLS else 3600.0
        running: dict[str, psutil.Process] = {}
        if wait_for(ended := partial(has_ended, process), moment) or not (running := alive(pipeline)):
            assert process.wait(60) == 0, pipeline.output.read_text()[-3000:]
            check(pipeline, calm.facts())
            finished += 1
            pipeline = Pipeline(tmp_path, SMALL.format(folder=tmp_path, name=f"run{finished}"), f"run{finished}")
            continue
        victim = chance.choice(sorted(set(running) - victims) or sorted(running))  # each kind before one a second time
        with contextlib.suppress(psutil.NoSuchProcess):
            running[victim].kill()
        kills += 1
        victims.add(victim)
        stage = pipeline.output.read_text().rpartition("\n[")[2].split("]")[0]
        print(f"kill {kills:2} after {moment:4.0f} s in {stage}: {victim}", flush=True)
        assert wait_for(ended, 300), f"{victim} was killed and the run hangs"
        assert pipeline.nothing_left()
    assert victims == KINDS.keys() or kills < 20, f"never killed: {KINDS.keys() - victims}"


def resize(disk: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True, capture_output=True)


def test_a_full_disk_stops_in_one_line_and_loses_nothing(small_disk: Path, tmp_path: Path) -> None:
    """There is room when the run begins; then somebody else takes it, while states are written and while the drafter trains."""
    resize(small_disk, "2g")
    pipeline = Pipeline(tmp_path, SMALL.format(folder=small_disk, name="full"), "full")
    pipeline.root = small_disk / "runs" / "full"

    def fill_up(stage: str, when: Callable[[], bool], mib: int) -> str:
        """Leave so little room once `when` holds; what the run then printed."""
        process, before = pipeline.start(*UNTIL), pipeline.output.stat().st_size
        assert wait_for(lambda: when() or process.poll() is not None, 900)
        assert process.poll() is None, pipeline.output.read_text()[-3000:]
        for more in range(20):  # it cannot be made smaller than what is on it, and that grows
            with contextlib.suppress(subprocess.CalledProcessError):
                resize(small_disk, f"{shutil.disk_usage(small_disk).used // 2**20 + mib + more}m")
                break
        else:
            pytest.fail("the disk cannot be made smaller")
        assert process.wait(600) == 1
        assert pipeline.nothing_left()
        output = pipeline.output.read_text()[before:]
        assert f"[{stage}] failed:" in output
        assert "Traceback" not in output
        resize(small_disk, "2g")
        return output

    fill_up("03_extract_hidden_states", lambda: len(pipeline.answers()) >= 4, 2)
    kept = {row["id"]: row["input_ids"] for row in pipeline.answers()}
    assert "No space left on device" in fill_up("05_train", lambda: bool(pipeline.training("train")), 8)
    answered = {row["id"]: row["input_ids"] for row in pipeline.answers()}
    assert kept.items() <= answered.items()
    status, output = pipeline.run(*UNTIL)
    assert status == 0, output[-3000:]
    facts = pipeline.facts()
    assert facts["data.rows"] == len(answered)
    assert facts["extraction.golden_top1"] >= 0.99
    assert {row["id"]: row["input_ids"] for row in pipeline.answers()} == answered
    assert [row["epoch"] for row in pipeline.training("val")] == [0, 1]
