"""All seven notebooks on the Kimi-K2.5-shaped target, as `params/tiny.yaml` ships, and its drafter through every form.

Acceptance means nothing here, it is zero; names, shapes, layers, maps, files and drafted tokens do. Hence apart from `make test`.
"""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from logits import differences, logits_of, logits_of_specforge, logits_of_speculators
from pipeline import BIN, ROOT, Pipeline
from safetensors.torch import load_file, save_file

from eagle3kit import convert, data, hidden_states, materialize, server, simulate, target
from eagle3kit.params import load_file as load_params
from eagle3kit.rundir import Run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp("tiny")
    params = yaml.safe_load((ROOT / "params" / "tiny.yaml").read_text())
    params |= {"runs_dir": str(folder / "runs"), "reports_dir": str(folder / "reports"), "run_name": "tiny"}
    pipeline = Pipeline(folder, yaml.safe_dump(params), "tiny")
    status, output = pipeline.run(timeout_s=1500)
    assert status == 0, output[-3000:]
    return pipeline


@pytest.fixture(scope="module")
def run(tiny: Pipeline) -> Run:
    return Run(load_params(tiny.file), "soak")


@pytest.fixture(scope="module")
def model(run: Run) -> Path:
    return Path(materialize.materialize(run.params)[0])


@pytest.fixture(scope="module")
def trained(tiny: Pipeline) -> Path:
    """The trained drafter in float32, where equal programs agree to the last bits; the trainer stores bfloat16."""
    folder, twin = tiny.root / "checkpoints" / "0", tiny.folder / "float32"
    twin.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = config["transformer_layer_config"]["dtype"] = "float32"
    (twin / "config.json").write_text(json.dumps(config))
    weights = {name: t.float() if t.is_floating_point() else t for name, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, twin / "model.safetensors", {"format": "pt"})
    return twin


@pytest.fixture(scope="module")
def exported(trained: Path, model: Path) -> Path:
    return convert.export_llama(trained, trained.with_name("exported"), target.describe(str(model))[0].n_layers)


def row(run: Run, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Token ids `[T]`, auxiliary states `[T, 3, hidden]` and the index of the answer's first token."""
    item = data.load_tokens(run)[index]
    states = load_file(hidden_states.state_file(run.path("hidden_states"), index))["hidden_states"]
    return item["input_ids"], states[:, :-1].float(), int(item["loss_mask"].int().argmax())


def test_every_notebook_went_through(tiny: Pipeline) -> None:
    facts = tiny.facts()
    assert tiny.nothing_left()
    assert facts["extraction.golden_top1"] >= 0.99
    assert facts["extraction.golden_mae"] <= 1e-4
    assert facts["lossless.share"] == 1
    assert facts["drafter.target"] == "tiny-kimi-k2.5"
    assert all(facts[f"stage.{stage:02d}.minutes"] >= 0 for stage in range(7))
    print(f"\ntiny.yaml: {facts['pipeline.minutes']:.1f} minutes, {facts['memory.peak_gb']:.1f} GB")


def test_every_program_computes_the_same_logits(run: Run, model: Path, trained: Path, exported: Path) -> None:
    """On states of the target itself: the module that was trained, both forms from disk, and SpecForge's class."""
    ids, states, _ = row(run, 3)
    example = states[:-1].reshape(1, len(ids) - 1, -1), ids[1:][None]
    wanted = logits_of(simulate.load_module(run.path("checkpoints") / "0"), *example)
    back = convert.import_llama(exported, trained.with_name("back"), model)
    for found in (
        logits_of_speculators(trained, *example),
        logits_of_speculators(back, *example),
        logits_of_specforge(exported, *example),
    ):
        assert max(differences(found, wanted)) <= 1e-5
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))


def drafted(module: Any, states: torch.Tensor, ids: torch.Tensor, k: int) -> list[int]:
    """What is proposed after `ids [T]`, the last of which the target has just written, each token fed back; `states [T - 1]`."""
    found: list[int] = []
    for step in range(k):
        known = torch.cat([ids, torch.tensor(found, dtype=ids.dtype)])
        padded = torch.cat([states, states.new_zeros(len(known) - len(states), *states.shape[1:])])
        found.append(int(simulate.drafts(module, padded, known, k)[len(ids) - 2, step]))
    return found


def test_vllm_reads_the_exported_folder_and_drafts_what_the_module_drafts(
    run: Run, model: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token after the same context. Counts of accepted drafts, which is all that a server tells, are zero here."""
    monkeypatch.setenv("DRAFTS", str(tmp_path / "drafts.jsonl"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    engine = server.eagle3(exported, 3)
    recording = (*engine.arguments, "--no-async-scheduling", "--scheduler-cls", "recorder.RecordingScheduler")
    rows = [row(run, index) for index in range(6)]
    with server.Server(run, model, server.Engine("exported", recording), "cpu") as served:
        served.ensure()
        for ids, _, start in rows:
            body = {"model": str(model), "prompt": ids[:start].tolist(), "max_tokens": 16, "temperature": 0}
            served.post("/v1/completions", body)
    module = simulate.load_module(run.path("checkpoints") / "0")
    pairs, others = [], []
    for line in (tmp_path / "drafts.jsonl").read_text().splitlines():
        context, proposed = json.loads(line)
        for ids, states, _ in rows:
            if context == ids[: len(context)].tolist():
                pairs.append((proposed, drafted(module, states[: len(context) - 1], torch.tensor(context), 3)))
                others.append(drafted(module, states[: len(context) - 1].roll(1, dims=1), torch.tensor(context), 3))
                break
    assert len(pairs) > 60
    assert len({tuple(proposed) for proposed, _ in pairs}) > 20
    assert sum(a == b for a, b in pairs) >= 0.97 * len(pairs)
    assert sum(a == b for (a, _), b in zip(pairs, others, strict=True)) < 0.5 * len(pairs)  # control: the layers in another order


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
    apart = torch.cat([(a - b).norm(dim=2) / b.norm(dim=2) for a, b in same])
    far = (apart > 1e-3).float().mean(0).tolist()
    middle = apart.median(0).values.tolist()
    print(f"\n{len(same)} of {len(states[0])} rows equal; relative difference by layer {middle}, share above 0.001 {far}")
    assert len(same) >= 0.9 * len(states[0])
    assert max(middle) < 1e-5
    # Two experts whose scores tie: one token may take another, and what attends to it differs a little.
    assert max(far) < 0.01


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


def test_a_warm_start_from_the_exported_form_begins_where_it_ended(tiny: Pipeline, exported: Path) -> None:
    params = yaml.safe_load(tiny.file.read_text()) | {"run_name": "warm", "train_from": str(exported)}
    warm = tiny.beside("warm", yaml.safe_dump(params))
    tiny.copy_to(warm)
    status, output = warm.run("--from", "05_train", "--to", "05_train")
    assert status == 0, output[-3000:]
    ids, states, _ = row(Run(load_params(tiny.file), "soak"), 3)
    example = states[:-1].reshape(1, len(ids) - 1, -1), ids[1:][None]
    parent, started = (
        logits_of_speculators(folder, *example)
        for folder in (exported.with_name("float32"), warm.root / "warm_start" / "drafter")
    )
    assert max(differences(started, parent)) <= 0.01  # the target's own rows are no longer rounded to bfloat16
    first = [sum(step["loss"] for step in each.training("train")[:3]) / 3 for each in (warm, tiny)]
    assert first[0] < first[1]
