"""Training that asks a server for the hidden states, on the real stack: its server is killed, it goes on, and ends as offline."""

import json
import shutil

import pytest
from pipeline import SMALL, Pipeline, wait_for

UNTIL = ("--to", "05_train")


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = tmp_path_factory.mktemp("online")
    return Pipeline(folder, SMALL.format(folder=folder, name="test") + "extraction_mode: online\n")


def test_a_server_that_dies_ends_training_in_one_line(online: Pipeline) -> None:
    process = online.start(*UNTIL)
    assert wait_for(lambda: bool(online.training("train")) or process.poll() is not None, 900)
    assert process.poll() is None, online.output.read_text()[-3000:]
    next(each for each in online.servers() if "supervise.py" not in " ".join(each.cmdline())).kill()
    assert process.wait(120) == 1
    assert online.nothing_left()
    failed = [line for line in online.output.read_text().splitlines() if line.startswith("[05_train] failed:")]
    assert len(failed) == 1
    assert "the vLLM server 'extraction' ended" in failed[0]


def test_it_goes_on_and_training_rows_have_no_files(online: Pipeline) -> None:
    with online.file.open("a") as file:
        file.write("train_workers: 1\n")  # as on a GPU: the process that asks is another than the trainer's
    status, output = online.run(*UNTIL)
    assert status == 0, output[-3000:]
    assert online.nothing_left()
    assert [row["epoch"] for row in online.training("val")] == [0, 1]
    rows = json.loads((online.root / "data" / "rows.json").read_text())["rows"]
    golden = {0, round((len(rows) - 1) / 2), len(rows) - 1}  # three samples
    wanted = golden | {index for index, row in enumerate(rows) if row["split"] == "heldout"}
    assert {path.name for path in (online.root / "hidden_states").glob("hs_*")} == {f"hs_{i}.safetensors" for i in wanted}
    assert not (online.root / "captured").exists()
    facts = online.facts()
    assert facts["extraction.mode"] == "online"
    assert facts["extraction.tokens"] == sum(rows[index]["length"] for index in wanted)
    assert facts["extraction.golden_top1"] >= 0.99


def test_it_learns_what_training_from_files_learns(online: Pipeline) -> None:
    """The same answers; then every row's states in files, made in one go by the tool."""
    offline = online.beside("offline", SMALL.format(folder=online.folder, name="offline"))
    online.copy_to(offline)
    shutil.rmtree(offline.root / "hidden_states")
    status, output = offline.run("--from", "03_extract_hidden_states", *UNTIL)
    assert status == 0, output[-3000:]
    assert len(list((offline.root / "hidden_states").glob("hs_*"))) == online.facts()["data.rows"]
    assert online.facts()["train.steps"] == offline.facts()["train.steps"]
    losses = [[row["loss"] for row in each.training("val")] for each in (online, offline)]
    print(f"\nheld-out losses online {losses[0]}, offline {losses[1]}")
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
