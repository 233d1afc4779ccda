"""Extracted states: read back, taken over, damaged, and held against the engine's log-probabilities."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_data import answer, prompt, write_answers

from eagle3kit import data, hidden_states
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.rundir import Run, read_json, write_json

LAYERS, HIDDEN, VOCAB = [1, 2, 3, 4], 8, 11


def save(path: Path, ids: list[int], **changes: Any) -> Path:
    tensors = {"token_ids": torch.tensor(ids), "hidden_states": torch.randn(len(ids), len(LAYERS), HIDDEN)} | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return path


@pytest.fixture
def rows(run: Run) -> list[data.Row]:
    write_answers(run, [answer("a"), answer("b", generated=(4, 5, 6, 7)), answer("h")])
    run.path("hidden_states").mkdir()
    run.path(hidden_states.CAPTURE).mkdir()
    return data.build_rows(run, [prompt("a"), prompt("b"), prompt("h", split="heldout")], Counter(), captured=True)


def test_captured_states_are_matched_to_rows_by_their_tokens(run: Run, rows: list[data.Row]) -> None:
    folder, tokens = run.path("hidden_states"), data.load_tokens(run)
    captured = run.path(hidden_states.CAPTURE)
    save(captured / "chatcmpl-1.safetensors", [1, 2, 3, 4, 5, 6])  # row 1
    save(captured / "chatcmpl-2.safetensors", [1, 2, 3, 7, 8])  # rows 0 and 2 have equal tokens
    save(captured / "chatcmpl-3.safetensors", [9, 9])  # nobody's
    (captured / "chatcmpl-4.safetensors").write_bytes(b"cut short")
    assert hidden_states.adopt(captured, folder, tokens, range(3)) == 2
    assert hidden_states.state_file(folder, 1).exists()
    wrong, _ = hidden_states.verify(folder, range(len(rows)), tokens, LAYERS, HIDDEN)
    assert list(wrong.values()) == ["missing"]


def test_captured_states_of_a_row_that_keeps_none_are_left(run: Run, rows: list[data.Row]) -> None:
    folder, captured = run.path("hidden_states"), run.path(hidden_states.CAPTURE)
    save(captured / "chatcmpl-1.safetensors", [1, 2, 3, 4, 5, 6])  # row 1
    assert hidden_states.adopt(captured, folder, data.load_tokens(run), [0, 2]) == 0
    assert not list(folder.glob("hs_*"))


@pytest.mark.parametrize(("samples", "kept"), [(1, [0, 7, 8, 9]), (3, [0, 4, 7, 8, 9]), (99, list(range(10)))])
def test_online_the_held_out_rows_and_the_golden_checks_have_files(samples: int, kept: list[int]) -> None:
    rows = [data.Row(f"r{i}", "any", "train" if i < 7 else "heldout", 9, 3) for i in range(10)]
    assert hidden_states.kept_rows(Params(extraction_mode="online", golden_samples=samples), rows) == kept
    assert hidden_states.kept_rows(Params(golden_samples=samples), rows) == list(range(10))


def test_online_only_those_are_extracted_and_counted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that writes the states of whatever it is asked for; what it captured of a training row stays where it is."""
    online = Run(run.params.replace(extraction_mode="online", golden_samples=1), run.stage)
    prompts = [prompt("a"), prompt("b"), prompt("c"), prompt("h", split="heldout")]
    with online.step("data", {}):
        write_answers(online, [answer(name, generated=(4, 5, i, 6)) for i, name in enumerate("abch")])
        rows = data.build_rows(online, prompts, Counter(), captured=True)
    asked: list[list[int]] = []
    server: Any = SimpleNamespace(model="m", run=online)
    captured = hidden_states.capture_folder(online, "m", LAYERS)
    captured.mkdir(parents=True)
    everything = [ids.tolist() for ids in data.load_tokens(online)["input_ids"]]
    save(captured / "chatcmpl-1.safetensors", everything[1])

    def generate(_run: Run, _server: Any, store: Path, missing: Any, say: Any) -> None:
        asked.extend(ids.tolist() for ids in missing["input_ids"])
        for number, ids in enumerate(missing["input_ids"]):
            save(store / f"hs_{number}.safetensors", ids.tolist())

    monkeypatch.setattr(hidden_states, "_generate", generate)
    hidden_states.extract(online, server, LAYERS, HIDDEN, lambda *_: None)
    assert asked == [everything[0], everything[3]]
    names = ["hs_0.safetensors", "hs_3.safetensors"]
    assert sorted(path.name for path in online.path("hidden_states").glob("hs_*")) == names
    assert sorted(read_json(online.path("hidden_states", "files.json"), "")) == names
    assert online.fact("extraction.mode") == "online"
    assert online.fact("extraction.tokens") == rows[0].length + rows[3].length
    assert not online.path(hidden_states.CAPTURE).exists()
    hidden_states.require_intact(online)
    with pytest.raises(KitError, match="another extraction_mode"):
        hidden_states.extract(Run(run.params, run.stage), server, LAYERS, HIDDEN, lambda *_: None)


def test_states_of_other_layers_are_captured_elsewhere(run: Run) -> None:
    folders = {hidden_states.capture_folder(run, model, layers) for model in ("a", "b") for layers in ([1, 2], [1, 3])}
    assert len(folders) == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": torch.tensor([1, 2, 3, 8, 7])}, "token ids are not those of the row"),
        ({"hidden_states": torch.zeros(5, 3, HIDDEN)}, "shape"),
        ({"hidden_states": torch.zeros(4, 4, HIDDEN)}, "shape"),
        ({"hidden_states": torch.full((5, 4, HIDDEN), torch.nan)}, "not finite"),
        ({"hidden_states": torch.full((5, 4, HIDDEN), torch.inf)}, "not finite"),
        ({"hidden_states": None}, "holds"),
    ],
)
def test_each_wrong_file_is_named(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = save(tmp_path / "x.safetensors", [1, 2, 3, 7, 8], **changes)
    found, why = hidden_states.load_states(path, torch.tensor([1, 2, 3, 7, 8]), 4, HIDDEN)
    assert found is None
    assert reason in why


@pytest.mark.parametrize("content", [b"", b"x" * 7, b"\xff" * 64])
def test_no_bytes_make_a_traceback(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert hidden_states.load_states(path, torch.tensor([1]), 4, HIDDEN)[0] is None


def test_statistics_have_known_values(run: Run, rows: list[data.Row]) -> None:
    folder, tokens = run.path("hidden_states"), data.load_tokens(run)
    for index, row in enumerate(rows):
        states = torch.arange(1.0, 5.0)[None, :, None].expand(row.length, 4, HIDDEN).contiguous()
        save(hidden_states.state_file(folder, index), tokens[index]["input_ids"].tolist(), hidden_states=states)
    wrong, described = hidden_states.verify(folder, range(len(rows)), tokens, LAYERS, HIDDEN)
    assert not wrong
    assert described["positions"] == sum(row.length for row in rows)
    for slot, layer in enumerate(described["layers"]):
        assert layer["id"] == LAYERS[slot]
        assert layer["mean"] == pytest.approx(slot + 1)
        assert layer["std"] == pytest.approx(0, abs=1e-6)
        assert layer["norm_mean"] == pytest.approx((slot + 1) * HIDDEN**0.5)
        assert layer["abs_max"] == slot + 1


def test_damaged_files_are_found_by_size_and_checksum(run: Run) -> None:
    folder = run.path("hidden_states")
    folder.mkdir()
    for index in range(4):
        save(hidden_states.state_file(folder, index), [1, 2])
    write_json(folder / "files.json", hidden_states._digests(folder, range(4)))
    hidden_states.require_intact(run)
    content = bytearray((folder / "hs_1.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "hs_1.safetensors").write_bytes(content)
    (folder / "hs_2.safetensors").unlink()
    assert [path.name for path in hidden_states.damaged_files(folder)] == ["hs_1.safetensors", "hs_2.safetensors"]
    with pytest.raises(KitError, match=r"2 hidden-state file\(s\) are damaged or gone, the first is hs_1"):
        hidden_states.require_intact(run)


class TestCompare:
    """The golden check on a model small enough to know the answer."""

    def setup_method(self) -> None:
        torch.manual_seed(0)
        self.head, self.norm, self.eps = torch.randn(VOCAB, HIDDEN), torch.rand(HIDDEN) + 0.5, 1e-5
        self.states, self.ids = torch.randn(6, HIDDEN), torch.randint(VOCAB, (6,))
        normed = torch.nn.functional.rms_norm(self.states, (HIDDEN,), self.norm, self.eps)
        self.logprobs = (normed @ self.head.T).log_softmax(-1)
        self.served = [(int(self.logprobs[t].argmax()), float(self.logprobs[t, self.ids[t + 1]])) for t in range(5)]

    def compare(self, states: torch.Tensor) -> tuple[int, float]:
        return hidden_states.compare(states, self.head, self.norm, self.eps, self.ids, self.served)

    def test_right_states_agree(self) -> None:
        hits, error = self.compare(self.states)
        assert hits == 5
        assert error < 1e-4

    @pytest.mark.parametrize("how", ["shifted by one", "another layer", "after the norm", "two rows swapped"])
    def test_wrong_states_do_not(self, how: str) -> None:
        wrong = {
            "shifted by one": self.states.roll(1, 0),
            "another layer": torch.randn(6, HIDDEN),
            "after the norm": torch.nn.functional.rms_norm(self.states, (HIDDEN,), self.norm * 3, self.eps) * self.norm,
            "two rows swapped": self.states[[1, 0, 2, 3, 4, 5]],
        }[how]
        _, error = self.compare(wrong)
        assert error > 0.1


def test_judge_names_the_layer_that_fits_better() -> None:
    slots = [{"id": 28, "top1": 1.0, "mae": 1e-5}, {"id": 30, "top1": 0.6, "mae": 6.0}]
    with pytest.raises(KitError, match="layer id 28 fits better"):
        hidden_states.judge({"top1": 0.6, "mae": 6.0, "slots": slots}, 0.99, 0.01)
    hidden_states.judge({"top1": 1.0, "mae": 1e-5, "slots": slots}, 0.99, 0.01)
