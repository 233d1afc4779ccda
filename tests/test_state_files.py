"""Hidden states in one byte a number: written alike by every engine, and read back as numbers by everything that reads them."""

import importlib
import json
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hs_connectors.fp8_utils
import pytest
import torch
from hs_connectors import HiddenStatesBackend
from safetensors.torch import load_file, save_file
from test_hidden_states import HIDDEN, LAYERS, rows  # noqa: F401 - a fixture

from eagle3kit import data, hidden_states, server, state_files
from eagle3kit.rundir import Run

UNIT, LEAST = 2**-4, 2**-10
"""Of e4m3, four significant bits: relative error of a normal number, absolute error of a smaller one in units of the scale."""


@pytest.fixture
def states() -> torch.Tensor:
    """Six tokens `[6, 4, 8]`: ordinary ones, one with an outlier, one of zeros, one very small."""
    torch.manual_seed(0)
    made = torch.randn(6, len(LAYERS), HIDDEN)
    made[1, 2, 3] = 25_000
    made[2] = 0
    made[3] *= 1e-6
    return made


def write(path: Path, states: torch.Tensor, storage: str = "fp8") -> Path:
    save_file(state_files.tensors(states, torch.arange(len(states)), storage), path)
    return path


def test_known_numbers_are_rounded_to_their_neighbours(tmp_path: Path) -> None:
    numbers = torch.tensor([448.0, -17.5, 250.0, 0.0, 3.0])[None, None]  # the largest is that of e4m3, so the scale is 1
    path = write(tmp_path / "x.safetensors", torch.cat([numbers, numbers / 64]))
    wanted = torch.tensor([448.0, -18.0, 256.0, 0.0, 3.0])
    assert torch.equal(state_files.read(path)["hidden_states"], torch.stack([wanted, wanted / 64])[:, None])
    stored = load_file(path)
    assert stored["hidden_states"].dtype == torch.float8_e4m3fn
    assert stored["hidden_states_scales"].flatten().tolist() == [1, 1 / 64]


def test_what_is_read_is_what_was_written_to_four_bits(tmp_path: Path, states: torch.Tensor) -> None:
    found = state_files.read(write(tmp_path / "x.safetensors", states))
    assert set(found) == {"hidden_states", "token_ids"}
    assert found["hidden_states"].dtype == torch.float32
    scale = states.abs().amax((1, 2), keepdim=True) / 448
    assert bool(((found["hidden_states"] - states).abs() <= (UNIT * states.abs()).maximum(LEAST * scale) * 1.0001).all())
    assert found["hidden_states"][1, 2, 3] == pytest.approx(25_000)
    assert not found["hidden_states"][2].any()


def test_native_states_are_read_as_they_were_written(tmp_path: Path, states: torch.Tensor) -> None:
    path = write(tmp_path / "x.safetensors", states.bfloat16(), "native")
    assert torch.equal(state_files.read(path)["hidden_states"], states.bfloat16())
    assert state_files.storage_of(path) == "native"


@pytest.mark.parametrize("storage", ["native", "fp8"])
def test_some_positions_are_those_of_the_whole(tmp_path: Path, states: torch.Tensor, storage: str) -> None:
    path = write(tmp_path / "x.safetensors", states, storage)
    whole, some = state_files.read(path), state_files.read(path, [4, 1])
    assert {name: tensor.tolist() for name, tensor in some.items()} == {name: whole[name][[4, 1]].tolist() for name in whole}


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_none_stays_none(tmp_path: Path, states: torch.Tensor, broken: float) -> None:
    states[4, 0, 0] = broken
    path = write(tmp_path / "x.safetensors", states)
    assert hidden_states.load_states(path, torch.arange(6), len(LAYERS), HIDDEN) == (None, "not finite")


@pytest.mark.parametrize("scales", [None, torch.ones(1, 1, 1), torch.ones(6)])
def test_a_file_without_a_scale_for_each_token_is_refused(tmp_path: Path, states: torch.Tensor, scales: Any) -> None:
    path = write(tmp_path / "x.safetensors", states)
    stored = {**load_file(path), "hidden_states_scales": scales}
    save_file({name: tensor.clone() for name, tensor in stored.items() if tensor is not None}, path)
    found, reason = hidden_states.load_states(path, torch.arange(6), len(LAYERS), HIDDEN)
    assert found is None
    assert "without a scale for each token" in reason


@pytest.mark.parametrize(("stored", "wanted"), [("native", "fp8"), ("fp8", "native")])
def test_a_file_stored_in_another_form_than_the_trainer_is_told_is_named(
    run: Run,
    rows: list[data.Row],  # noqa: F811
    stored: str,
    wanted: str,
) -> None:
    folder, tokens = run.path("hidden_states"), data.load_tokens(run)
    for index, row in enumerate(rows):
        form = stored if index == 1 else wanted
        states = torch.randn(row.length, len(LAYERS), HIDDEN)
        save_file(state_files.tensors(states, tokens[index]["input_ids"], form), hidden_states.state_file(folder, index))
    wrong, described = hidden_states.verify(folder, range(len(rows)), tokens, LAYERS, HIDDEN, wanted)
    assert wrong == {1: f"stored as {stored}, wanted {wanted}"}
    assert described["layers"][0]["std"] == pytest.approx(1, abs=0.3)


# ---- writers


def test_the_connector_for_gpus_writes_the_same_file(tmp_path: Path, states: torch.Tensor) -> None:
    transfer = json.loads(server.extraction(LAYERS, tmp_path, "cuda", "fp8").arguments[2])
    connector = getattr(importlib.import_module(transfer["kv_connector_module_path"]), transfer["kv_connector"])
    done = SimpleNamespace(synchronize=lambda: None)
    given = {"hidden_states": states, "token_ids": torch.arange(6)}
    connector._write_tensors(given, done, str(tmp_path / "theirs.safetensors"), None)
    theirs, ours = load_file(tmp_path / "theirs.safetensors"), load_file(write(tmp_path / "ours.safetensors", states))
    assert {name: tensor.float().tolist() for name, tensor in theirs.items()} == {
        name: tensor.float().tolist() for name, tensor in ours.items()
    }


def test_what_is_written_is_told_to_the_connector(tmp_path: Path) -> None:
    for device, storage, name in (
        ("cpu", "native", "CpuHiddenStatesConnector"),
        ("cpu", "fp8", "CpuHiddenStatesConnector"),
        ("cuda", "native", "ExampleHiddenStatesConnector"),
        ("cuda", "fp8", "FP8HiddenStatesConnector"),
    ):
        words = server.extraction(LAYERS, tmp_path, device, storage).arguments
        transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert transfer["kv_connector"] == name
        assert transfer["kv_connector_extra_config"].get("storage") == ("fp8" if (device, storage) == ("cpu", "fp8") else None)


def test_the_tool_is_not_asked_to_validate_what_it_cannot_read(
    run: Run, states: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculators.data_generation.offline import check_hidden_states

    given = state_files.tensors(states, torch.arange(6), "fp8")
    with pytest.raises(NotImplementedError):  # once it can, it may be asked again
        check_hidden_states(given, list(range(6)))
    commands: dict[str, list[str]] = {}
    engine: Any = SimpleNamespace(ensure=lambda: None, tool=lambda *_: ["tool"], url="url", secret={})
    limits = {"golden_min_top1": 0.93, "golden_max_mae": 0.1, "golden_max_layer_error": 0.05}
    for storage in ("native", "fp8"):
        monkeypatch.setattr(
            hidden_states, "run_tool", lambda _name, command, *_, to=storage, **__: commands.update({to: command})
        )
        other = Run(run.params.replace(extraction_storage=storage, **limits), "unit")
        missing: Any = SimpleNamespace(save_to_disk=lambda _: None)
        hidden_states._generate(other, engine, run.path("captured"), missing, lambda _: None)
    assert ("--validate-outputs" in commands["native"], "--validate-outputs" in commands["fp8"]) == (True, False)


# ---- readers


def test_the_trainers_reader_sees_the_same_numbers(tmp_path: Path, states: torch.Tensor) -> None:
    from speculators.train.data import CollateFn

    path = write(hidden_states.state_file(tmp_path, 0), states)
    reader = HiddenStatesBackend.registry["fp8"].from_train_args(Namespace(hidden_states_path=str(tmp_path)), "")
    found = reader.get_cached(0)
    assert found is not None
    ours = state_files.read(path)["hidden_states"]
    torch.testing.assert_close(found["hidden_states"].float(), ours, rtol=2**-7, atol=0)
    item = {"hidden_states": found["hidden_states"][:, :-1].flatten(1), "lengths": torch.tensor([6])}
    batch = CollateFn(8, HIDDEN, dtype=torch.float32)([item])
    assert batch["hidden_states"].dtype == torch.float32
    torch.testing.assert_close(batch["hidden_states"][0, :6], ours[:, :-1].flatten(1), rtol=2**-7, atol=0)


def test_numbers_taken_without_their_scales_would_be_far_off(
    tmp_path: Path, states: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.safetensors", states)
    ordinary = [0, 4, 5]
    right = state_files.read(path, ordinary)["hidden_states"]
    torch.testing.assert_close(right, states[ordinary], rtol=UNIT, atol=0.01)
    monkeypatch.setattr(hs_connectors.fp8_utils, "dequantize_fp8_tensor", lambda stored, _scale, dtype: stored.to(dtype))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(state_files.read(path, ordinary)["hidden_states"], states[ordinary], rtol=UNIT, atol=0.01)


def test_nothing_else_opens_a_state_file() -> None:
    """Weights are read in `checkpoint` and `train`, and `adopt` looks at the token ids alone."""
    package = Path(state_files.__file__).parent
    opening = {
        path.stem: len(re.findall(r"^ +from safetensors(?:\.torch)? import .*\b(?:load_file|safe_open)\b", text, re.MULTILINE))
        for path in sorted(package.glob("*.py"))
        if "safetensors" in (text := path.read_text())
    }
    assert {name: count for name, count in opening.items() if count} == {
        "checkpoint": 1,
        "hidden_states": 1,
        "state_files": 2,
        "train": 1,
    }
