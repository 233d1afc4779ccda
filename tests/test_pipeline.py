"""The whole pipeline on real parts: SmolLM2, vLLM, speculators, papermill; interrupted, damaged, resumed, repeated.

One small run serves all tests, in the order below: each test leaves it further along, so that every server start counts twice.
"""

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline import BIN, EXTRACTED, ROOT, SMALL, Pipeline
from safetensors.torch import load_file

from eagle3kit import simulate
from eagle3kit.params import load_file as load_params
from eagle3kit.rundir import Run

PARAMS = SMALL.replace("{name}", "test")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp("pipeline")
    return Pipeline(folder, PARAMS.format(folder=folder))


def test_sigterm_while_a_server_starts_leaves_nothing(pipeline: Pipeline) -> None:
    status = pipeline.interrupt(pipeline.start(), lambda: bool(pipeline.servers()), signal.SIGTERM)
    assert status == 130
    assert pipeline.nothing_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_papermill_ended_while_a_server_starts_leaves_nothing(pipeline: Pipeline, number: int) -> None:
    process = pipeline.start_notebook("03_extract_hidden_states")
    assert pipeline.interrupt(process, lambda: bool(pipeline.servers()), number) != 0
    assert pipeline.nothing_left()


def test_sigkill_in_the_second_epoch_leaves_nothing(pipeline: Pipeline) -> None:
    status = pipeline.interrupt(pipeline.start(), lambda: any(row["epoch"] == 1 for row in pipeline.training("train")))
    assert status == -signal.SIGKILL
    assert pipeline.nothing_left()
    assert not (pipeline.root / "checkpoints" / "manifest.json").exists()


def test_resumed_it_goes_through_to_the_report(pipeline: Pipeline) -> None:
    kept = {row["id"]: row["input_ids"] for row in pipeline.answers()}
    first_epoch = [row for row in pipeline.training("train") if row["epoch"] == 0]
    validated = pipeline.training("val")
    assert [row["epoch"] for row in validated] == [0]
    status, output = pipeline.run(timeout_s=1500)
    assert status == 0, output[-3000:]
    assert pipeline.nothing_left()
    answers = pipeline.answers()
    assert len({row["id"] for row in answers}) == len(answers)
    assert kept.items() <= {row["id"]: row["input_ids"] for row in answers}.items()
    assert (pipeline.folder / "reports" / "test.html").stat().st_size <= 2_000_000
    assert not (pipeline.root / "failure.json").exists()
    assert [row for row in pipeline.training("train") if row["epoch"] == 0] == first_epoch  # not trained again
    assert pipeline.training("val")[:1] == validated
    assert [row["epoch"] for row in pipeline.training("val")] == [0, 1]


def test_facts_are_recorded(pipeline: Pipeline) -> None:
    facts = pipeline.facts()
    assert facts["data.heldout_prompts"] == 10
    assert facts["data.prompts"] == 50
    assert facts["extraction.bytes"] >= facts["extraction.tokens"] * 4 * 576 * 4
    assert facts["extraction.golden_top1"] >= 0.99
    assert facts["extraction.golden_mae"] <= 1e-3
    assert facts["extraction.layer_error"] <= 1e-3
    assert facts["extraction.own_answers"] >= 0.95
    assert facts["data.on_policy"] is True
    assert 0.02 <= facts["data.supervised_share"] <= 0.98
    assert facts["vocab.size"] == 2048
    assert 0.5 <= facts["vocab.heldout_coverage"] <= 1
    assert facts["train.steps"] >= 10
    assert facts["train.val_acc_1"] > 0.05
    assert 1 < facts["train.simulated_al"] < 4
    assert 1 < facts["acceptance.al"] < 4
    assert facts["acceptance.position_1"] >= facts["acceptance.position_2"] >= facts["acceptance.position_3"] > -1e-9
    assert facts["lossless.share"] == 1
    for name in ("none", "ngram", "eagle3"):
        assert facts[f"speed.{name}.tokens_per_s"] > 0
    assert facts["speed.eagle3.ratio.low"] <= facts["speed.eagle3.ratio"] <= facts["speed.eagle3.ratio.high"]
    assert facts["memory.peak_gb"] < 14  # three servers at once; the bound of a full run is looked at in its report
    for stage in range(7):
        assert facts[f"stage.{stage:02d}.minutes"] > 0
    assert facts["pipeline.minutes"] > 0


def test_extraction_verifies_no_draft(pipeline: Pipeline) -> None:
    """The engine logs what it drafts; on a CPU verifying the extraction method's own would double the work."""
    log = (pipeline.root / "logs" / "server_extraction.log").read_text()
    assert "generation throughput" in log
    assert "SpecDecoding metrics" not in log


def test_the_server_accepts_what_the_drafter_gets_right_offline(pipeline: Pipeline) -> None:
    """Draft by draft: trainer and server agree on layers, shift, norms, rope and vocabulary. A tie may turn an answer."""
    served = json.loads((pipeline.root / "eval" / "eagle3" / "result.json").read_text())["accepted"]
    offline = json.loads((pipeline.root / "eval" / "simulated" / "result.json").read_text())
    assert served.keys() == offline.keys()
    pairs = [(a, b) for name in served for a, b in zip(served[name], offline[name], strict=False)]
    assert len(pairs) > 60
    assert sum(a == b for a, b in pairs) >= 0.97 * len(pairs)
    assert sum(a for a, _ in pairs) > 0


def test_repeated_it_does_nothing(pipeline: Pipeline) -> None:
    before, logs = pipeline.facts(), {path: path.stat().st_mtime for path in (pipeline.root / "logs").glob("*.log")}
    began = time.monotonic()
    done = subprocess.run(["make", "run", f"PARAMS={pipeline.file}"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert f"report: {pipeline.folder}/reports/test.html" in done.stdout
    assert {path: path.stat().st_mtime for path in (pipeline.root / "logs").glob("*.log")} == logs
    assert settled(pipeline.facts()) == settled(before)
    assert time.monotonic() - began < 300  # measured in benchmarks; this only catches work done again


def test_one_notebook_runs_alone_under_papermill(pipeline: Pipeline, tmp_path: Path) -> None:
    command = [BIN / "papermill", "notebooks/04_vocab_map.ipynb", tmp_path / "out.ipynb", "-f", pipeline.file]
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "held-out coverage" in (tmp_path / "out.ipynb").read_text()


def test_an_unknown_parameter_stops_papermill(pipeline: Pipeline, tmp_path: Path) -> None:
    command = [
        BIN / "papermill",
        "notebooks/04_vocab_map.ipynb",
        tmp_path / "out.ipynb",
        "-f",
        pipeline.file,
        "-p",
        "draft_vocab",
        "9",
    ]
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "draft_vocab_size" in done.stderr


def test_the_report_can_be_written_again(pipeline: Pipeline) -> None:
    report = pipeline.folder / "reports" / "test.html"
    report.unlink()
    done = subprocess.run(
        [str(BIN / "eagle3kit"), "report", str(pipeline.file)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert report.exists()
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", report.read_text())


def test_a_warm_start_begins_where_its_parent_ended(pipeline: Pipeline) -> None:
    """Same rows in the same order: the first steps of a cold start know nothing, those of a warm one what the parent knew."""
    parent = pipeline.root / "checkpoints" / "1"
    changes = {"run_name: test": "run_name: warm", "train_epochs: 2": f"train_epochs: 1\ntrain_from: {parent}"}
    params = PARAMS.format(folder=pipeline.folder)
    for old, new in changes.items():
        params = params.replace(old, new)
    warm = pipeline.beside("warm", params)
    pipeline.copy_to(warm)
    status, output = warm.run("--from", "05_train", "--to", "05_train")
    assert status == 0, output[-3000:]

    run = Run(load_params(pipeline.file), "test")
    ended, began = (simulate.heldout(run, folder, [3])[3] for folder in (parent, warm.root / "warm_start" / "drafter"))
    pairs = [(a, b) for name in ended for a, b in zip(ended[name], began[name], strict=False)]
    assert sum(a > 0 for a, _ in pairs) > 0
    assert sum(a == b for a, b in pairs) >= 0.97 * len(pairs)  # before a step is trained; bfloat16 may turn a tie

    def first_steps(run: Pipeline, of: Callable[[dict[str, Any]], float]) -> float:
        return sum(of(row) for row in run.training("train")[:3]) / 3

    last = pipeline.training("train")[-3:]
    assert first_steps(warm, lambda row: row["acc"][0]) > first_steps(pipeline, lambda row: row["acc"][0])
    assert first_steps(warm, lambda row: row["loss"]) < 0.7 * first_steps(pipeline, lambda row: row["loss"])
    assert first_steps(warm, lambda row: row["loss"]) < 1.3 * sum(row["loss"] for row in last) / 3
    assert warm.facts()["train.val_acc_1"] > 0.9 * pipeline.facts()["train.val_acc_1"]


def test_the_drafter_is_exported_and_comes_back_bit_for_bit(pipeline: Pipeline, tmp_path: Path) -> None:
    there, back = tmp_path / "llama", tmp_path / "speculators"
    for command, *folders in (("export", there), ("import", there, back)):
        line = [str(BIN / "eagle3kit"), str(command), str(pipeline.file), *map(str, folders)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "embed_tokens.weight is the target's: 49,152 of 49,152 rows equal" in done.stdout
        assert "lm_head.weight is the target's: 2,048 of 2,048 rows equal" in done.stdout
    trained = load_file(pipeline.root / "checkpoints" / "1" / "model.safetensors")
    returned = load_file(back / "model.safetensors")
    assert trained.keys() == returned.keys()
    assert all(torch.equal(returned[name], tensor) for name, tensor in trained.items())


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete"])
def test_damage_is_found_before_training(pipeline: Pipeline, damage: str) -> None:
    from eagle3kit.hidden_states import damaged_files

    path = pipeline.root / "hidden_states" / "hs_3.safetensors"
    content = path.read_bytes()
    try:
        hurt(path, damage)
        assert damaged_files(path.parent) == [path]
    finally:
        path.write_bytes(content)
    assert damaged_files(path.parent) == []


def test_a_corrupt_file_is_extracted_anew(pipeline: Pipeline) -> None:
    folder, before = pipeline.root / "hidden_states", pipeline.facts()
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("hs_*.safetensors")}
    damaged = ("hs_5.safetensors", "hs_7.safetensors", "hs_9.safetensors")
    was = {name: load_file(folder / name)["hidden_states"].clone() for name in damaged}  # the file itself is only mapped
    hurt(folder / "hs_5.safetensors", "flip")
    hurt(folder / "hs_7.safetensors", "truncate")
    hurt(folder / "hs_9.safetensors", "empty")
    status, output = pipeline.run("--from", "03_extract_hidden_states", "--to", "03_extract_hidden_states")
    assert status == 0, output[-3000:]
    assert pipeline.nothing_left()
    now = {path.name: path.stat().st_mtime_ns for path in folder.glob("hs_*.safetensors")}
    assert {name for name in times if now[name] != times[name]} == set(was)
    for name, states in was.items():
        torch.testing.assert_close(load_file(folder / name)["hidden_states"], states, rtol=1e-3, atol=1e-2)
    assert {name: pipeline.facts()[name] for name in EXTRACTED} == {name: before[name] for name in EXTRACTED}


def test_other_parameters_are_refused_by_name(pipeline: Pipeline) -> None:
    changed = pipeline.beside("changed", PARAMS.format(folder=pipeline.folder).replace("2048", "1024"))
    status, output = changed.run("--from", "04_vocab_map", "--to", "04_vocab_map")
    assert status == 1
    assert "another size" in output
    assert "force: true" in output
    assert json.loads((pipeline.root / "vocab" / "manifest.json").read_text())["outputs"]["size"] == 2048


def settled(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts without the free space of the disk, which preflight looks up anew every time."""
    return {name: value for name, value in facts.items() if not name.startswith("plan.disk.")}


def hurt(path: Path, how: str) -> None:
    """Damage a file: `flip` one bit in its middle, `truncate` it, make it `empty`, or `delete` it."""
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
