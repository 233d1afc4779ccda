"""All seven notebooks on the Kimi-K2.5-shaped target, as `params/tiny.yaml` ships, and its drafter through every form.

Acceptance means nothing here; names, shapes, layers, maps and files do. About ten minutes, hence apart from `make test`.
"""

import json
import signal
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from pipeline import BIN, ROOT, Pipeline
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp("tiny")
    params = yaml.safe_load((ROOT / "params" / "tiny.yaml").read_text())
    params |= {"runs_dir": str(folder / "runs"), "reports_dir": str(folder / "reports"), "run_name": "tiny"}
    pipeline = Pipeline(folder, yaml.safe_dump(params), "tiny")
    status, output = pipeline.run(timeout_s=1500)
    assert status == 0, output[-3000:]
    return pipeline


def test_every_notebook_went_through(tiny: Pipeline) -> None:
    facts = tiny.facts()
    assert tiny.nothing_left()
    assert facts["extraction.golden_top1"] >= 0.99
    assert facts["extraction.golden_mae"] <= 1e-4
    assert facts["lossless.share"] == 1
    assert facts["drafter.target"] == "tiny-kimi-k2.5"
    assert all(facts[f"stage.{stage:02d}.minutes"] >= 0 for stage in range(7))
    print(f"\ntiny.yaml: {facts['pipeline.minutes']:.1f} minutes, {facts['memory.peak_gb']:.1f} GB")


def test_the_server_drafts_what_the_module_drafts(tiny: Pipeline) -> None:
    """MLA and experts in the target, a wrapper around its weights: the drafter sees the same states in both places."""
    served = json.loads((tiny.root / "eval" / "eagle3" / "result.json").read_text())["accepted"]
    offline = json.loads((tiny.root / "eval" / "simulated" / "result.json").read_text())
    pairs = [(a, b) for name in served for a, b in zip(served[name], offline[name], strict=False)]
    assert len(pairs) > 100
    assert sum(a == b for a, b in pairs) >= 0.97 * len(pairs)


def test_a_killed_sweep_goes_on_where_it_was(tiny: Pipeline) -> None:
    grid = {"eval_sweep": "true", "eval_sweep_k": "1 3", "eval_sweep_concurrency": "1 4", "eval_sweep_tokens": "8"}
    options = [part for name, value in grid.items() for part in ("-p", name, value)] + ["--from", "06_evaluate"]

    def cells() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (tiny.root / "eval" / "sweep").rglob("manifest.json")}

    assert tiny.interrupt(tiny.start(*options), lambda: len(cells()) >= 3) == -signal.SIGKILL
    assert tiny.nothing_left()
    kept = cells()
    status, output = tiny.run(*options, timeout_s=1500)
    assert status == 0, output[-3000:]
    assert kept.items() <= cells().items()
    assert len(cells()) > len(kept)
    said = json.loads((tiny.root / "eval" / "sweep.json").read_text())
    assert {load: set(ratios) for load, ratios in said["ratios"].items()} == {
        load: {"ngram", "eagle3-k1", "eagle3-k3"} for load in ("1", "4")
    }
    assert said["lossless"]["share"] == 1
    assert all(test["p"] >= 0.001 for test in said["first"].values())
    assert tiny.facts()["advice.speculate"] == said["advice"]


def test_without_vllm_the_same_target_goes_through_training(tiny: Pipeline) -> None:
    """A wrapper with MLA and experts, read by transformers: notebooks 03 to 05; then its states against vLLM's for equal rows."""
    params = yaml.safe_load(tiny.file.read_text()) | {"run_name": "transformers", "extraction_engine": "transformers"}
    other = tiny.beside("transformers", yaml.safe_dump(params))
    status, output = other.run("--to", "05_train")
    assert status == 0, output[-3000:]
    assert other.facts()["extraction.golden_top1"] >= 0.99
    assert other.facts()["train.steps"] == tiny.facts()["train.steps"]
    states = [[load_file(path) for path in sorted((run.root / "hidden_states").glob("hs_*"))] for run in (tiny, other)]
    same = [
        (a["hidden_states"], b["hidden_states"])
        for a, b in zip(*states, strict=True)
        if torch.equal(a["token_ids"], b["token_ids"])
    ]
    apart = torch.stack([((a - b).norm(dim=2) / b.norm(dim=2)).amax(0) for a, b in same]).amax(0)
    print(f"\n{len(same)} of {len(states[0])} rows equal; largest relative difference by layer {apart.tolist()}")
    assert len(same) >= 0.9 * len(states[0])
    assert float(apart.max()) < 1e-3


def test_the_drafter_goes_to_the_other_form_and_back(tiny: Pipeline, tmp_path: Path) -> None:
    there, back = tmp_path / "llama", tmp_path / "speculators"
    for command, *folders in (("export", there), ("import", there, back)):
        line = [str(BIN / "eagle3kit"), str(command), str(tiny.file), *map(str, folders)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((there / "config.json").read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"][0] == 1
    trained, returned = (load_file(folder / "model.safetensors") for folder in (tiny.root / "checkpoints" / "0", back))
    assert trained.keys() == returned.keys()
    assert all(torch.equal(returned[name], tensor) for name, tensor in trained.items())


def test_a_warm_start_from_the_exported_form_begins_where_it_ended(tiny: Pipeline, tmp_path: Path) -> None:
    exported = tmp_path / "parent"
    line = [str(BIN / "eagle3kit"), "export", str(tiny.file), str(exported)]
    subprocess.run(line, cwd=ROOT, check=True, capture_output=True, timeout=180)
    params = yaml.safe_load(tiny.file.read_text()) | {"run_name": "warm", "train_from": str(exported)}
    warm = tiny.beside("warm", yaml.safe_dump(params))
    tiny.copy_to(warm)
    status, output = warm.run("--from", "05_train", "--to", "05_train")
    assert status == 0, output[-3000:]
    first = [sum(row["loss"] for row in run.training("train")[:3]) / 3 for run in (warm, tiny)]
    last = sum(row["loss"] for row in tiny.training("train")[-3:]) / 3
    assert first[0] < first[1]
    assert first[0] < 1.2 * last
