"""A published drafter explained; two targets compared."""

import dataclasses
import io
import json
import struct
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from shapes import FLAT, K2, K25, REFERENCE, SMOL, write_config

from eagle3kit import drafter, explore, hub, target, widgets
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.target import Target


class TestExplain:
    def test_reference_agrees_with_k2_as_far_as_it_is_known(self) -> None:
        rows = {row["field"]: row for row in explore.explain(REFERENCE, K2)}
        assert list(rows) == list(drafter.FIELDS)
        assert rows["hidden_size"]["agrees with kimi-k2"] == "yes"
        assert rows["hidden_size"]["value"] == "7168 (implied)"
        assert rows["rms_norm_eps"]["value"] == rows["rms_norm_eps"]["agrees with kimi-k2"] == "unknown"
        assert rows[drafter.AUX]["agrees with kimi-k2"].startswith("yes")
        assert explore.disagreements(REFERENCE, K2) == []
        assert sum(map(len, explore.in_groups(explore.explain(REFERENCE, K2)).values())) == len(rows)

    def test_what_disagrees_is_named(self) -> None:
        assert {row["field"] for row in explore.disagreements(REFERENCE, SMOL)} == {"hidden_size", "vocab_size", drafter.AUX}

    @pytest.mark.parametrize(
        ("ids", "word"), [([1, 29, 57], "sglang"), ([2, 30, 58, 60], "speculators_old"), ([5, 4, 90], "no:")]
    )
    def test_layers_in_other_numbers(self, ids: list[int], word: str) -> None:
        parent = drafter.from_config({**FLAT, "eagle_config": {drafter.AUX: ids}}, "x", "folder", "")
        assert (
            word in next(row for row in explore.disagreements(parent, K2) if row["field"] == drafter.AUX)["agrees with kimi-k2"]
        )
        assert explore.places(parent, K2)[0] == (2, 30, 58)

    def test_places_of_the_published_drafter(self) -> None:
        assert explore.places(REFERENCE, K2)[0] == (2, 30, 58)
        assert explore.places(REFERENCE, SMOL)[0] == (2, 15, 27)


def header(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A safetensors file."""
    entries, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    written = json.dumps({"__metadata__": {}, **entries}).encode()
    return struct.pack("<Q", len(written)) + written + data


PROPOSABLE = frozenset({0, 1, 163586, 163607})
FILE = {
    "fc.weight": ("BF16", [4, 12], b"\0" * 96),
    "midlayer.self_attn.q_proj.weight": ("BF16", [2, 8], b"\0" * 32),
    "lm_head.weight": ("BF16", [4, 4], b"\0" * 32),
    "t2d": ("BOOL", [163840], bytes(i in PROPOSABLE for i in range(163840))),
}
D2T = ("I64", [3], struct.pack("<3q", 0, 4, 163605))


def drafter_folder(folder: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> drafter.Parent:
    (write_config(folder, FLAT) / "model.safetensors").write_bytes(header(tensors))
    return drafter.read_parent(Params(drafter_parent=str(folder)))


class TestWeights:
    def test_read_from_a_folder(self, tmp_path: Path) -> None:
        parent = drafter_folder(tmp_path, FILE)
        weights = explore.read_weights(parent)
        assert weights.tensors["fc.weight"] == explore.Tensor("BF16", (4, 12), 96)
        assert weights.proposable == PROPOSABLE
        assert (weights.has("lm_head.weight"), weights.has("embed_tokens.weight"), weights.has("norm.weight")) == (
            True,
            False,
            False,
        )
        rows = {row["tensor"]: row for row in explore.tensor_table(parent, weights)}
        assert (rows["fc.weight"]["parameters"], rows["fc.weight"]["bytes"], rows["fc.weight"]["in the file"]) == (48, 96, "yes")
        assert (rows["embed_tokens.weight"]["in the file"], rows["embed_tokens.weight"]["bytes"]) == ("no", 2 * 163840 * 7168)
        assert (rows["t2d"]["parameters"], rows["t2d"]["bytes"]) == (None, 163840)
        found = {row["what"]: row["found"] for row in explore.contents(parent, weights)}
        assert found["size"] == "80 parameters, 164,000 bytes"
        assert found["draft vocabulary"] == "32,000 of 163,840 (19.5 %); the map in the file has 4"
        assert (found["lm_head.weight"], found["embed_tokens.weight"]) == ("in the file", "not in the file")

    def test_map_from_d2t_alone(self, tmp_path: Path) -> None:
        assert explore.read_weights(drafter_folder(tmp_path, {"d2t": D2T})).proposable == frozenset({0, 5, 163607})

    def test_reference_is_counted_and_what_is_not_known_stays_unknown(self) -> None:
        weights = explore.read_weights(REFERENCE)
        assert (weights.tensors, weights.proposable, weights.has("lm_head.weight")) == ({}, None, None)
        rows = {row["tensor"]: row for row in explore.tensor_table(REFERENCE, weights)}
        assert rows["fc.weight"]["parameters"] == 7168 * 21504
        assert rows["midlayer.mlp.up_proj.weight"]["parameters"] is None
        assert rows["midlayer.mlp.up_proj.weight"]["shape"] == "unknown x 7,168"
        assert {row["in the file"] for row in rows.values()} == {"unknown"}
        assert "7 tensors of unknown size" in explore.contents(REFERENCE, weights)[1]["found"]

    def test_a_file_cut_short(self, tmp_path: Path) -> None:
        parent = drafter_folder(tmp_path, FILE)
        file = tmp_path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(KitError, match="cut short"):
            explore.read_weights(parent)

    def test_pickle_is_not_opened(self, tmp_path: Path) -> None:
        (write_config(tmp_path, FLAT) / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
        weights = explore.read_weights(drafter.read_parent(Params(drafter_parent=str(tmp_path))))
        assert "only pytorch_model.bin, and pickle files are not opened" in weights.where

    def test_on_the_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        parent = drafter.from_config(FLAT, "owner/name", "hub", "", folder=write_config(tmp_path, FLAT))
        content = header(FILE)

        class Hub:
            def ls(self, name: str) -> list[dict[str, Any]]:
                return [{"name": f"{name}/model.safetensors", "size": len(content)}, {"name": f"{name}/x.txt", "size": 1}]

            def open(self, name: str, mode: str) -> io.BytesIO:
                return io.BytesIO(content)

        monkeypatch.setattr("huggingface_hub.HfFileSystem", Hub)
        assert explore.read_weights(parent).proposable == PROPOSABLE
        monkeypatch.setattr(Hub, "ls", lambda *_: (_ for _ in ()).throw(OSError("no network")))
        assert "the hub does not give them (no network)" in explore.read_weights(parent).where


class TestSpecialTokens:
    def test_coverage(self, tmp_path: Path) -> None:
        weights = explore.read_weights(drafter_folder(tmp_path, FILE))
        rows = {row["token"]: row for row in explore.special_token_rows(weights, K25)}
        assert (rows["<think>"]["can be proposed"], rows["</think>"]["can be proposed"]) == ("no", "yes")
        assert rows["<think>"]["note"].startswith("new in K2.5")
        assert sum("tool-call mark" in token for token in rows) == 5
        assert {row["can be proposed"] for row in explore.special_token_rows(explore.read_weights(REFERENCE), K25)} == {"unknown"}

    def test_a_tokenizer_file_comes_first(self, tmp_path: Path) -> None:
        shape = dataclasses.replace(K25, source=str(tmp_path))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"7": {"content": "<x>"}}}))
        assert explore.special_tokens(shape)[0] == {7: "<x>"}
        assert explore.special_tokens(SMOL)[0] == {}


def checkpoint(shape: Target) -> explore.Checkpoint:
    return explore.Checkpoint(shape.name, shape, "")


class TestCompare:
    def test_k2_against_k25(self) -> None:
        rows = {row["field"]: row for row in explore.compare(checkpoint(K2), checkpoint(K25))}
        assert (rows["rms_norm_eps"]["kimi-k2"], rows["rms_norm_eps"]["kimi-k2.5"]) == ("1e-06", "1e-05")
        assert {name: row["effect"] for name, row in rows.items()} == {
            "rms_norm_eps": "must change",
            drafter.ROPE: "must change",
            "max_position_embeddings": "must change",
            "token meanings": "must change",
            "pad_token_id": "may change",
            "quantisation": "may change",
            "class": "may change",
            "weight names": "harmless",
            "media token": "harmless",
        }
        assert explore.compare(checkpoint(K25), checkpoint(K25)) == []
        shown = explore.pair(checkpoint(K2), checkpoint(K25))
        assert "4 must change, 3 may change, 2 harmless; 12 of 21 fields are equal" in repr(shown)
        assert widgets.COLOURS["fail"] in shown.html

    def test_a_checkpoint_that_is_not_known_is_said_to_be(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub, "reachable", lambda: (False, "no network"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        folder = write_config(tmp_path / "mine", target.reference_config("kimi-k2.5"))
        found = explore.checkpoints(Params(target_model=str(folder)))
        assert list(found) == ["kimi-k2", "kimi-k2.5", "kimi-k2.6", "mine"]
        assert found["kimi-k2.6"].target is None
        (row,) = explore.compare(found["kimi-k2"], found["kimi-k2.6"])
        assert (row["effect"], "no network" in row["why"]) == ("unknown", True)
        assert explore.compare(found["kimi-k2.5"], found["mine"]) == []
        assert explore.pairs(found)[0] == ("kimi-k2", "kimi-k2.5")

    @pytest.mark.parametrize(("name", "made_for"), [("AQ-MedAI/Kimi-K25-eagle3", "kimi-k2.5"), (drafter.REFERENCE_ID, "kimi-k2")])
    def test_target_of_a_drafter(self, name: str, made_for: str) -> None:
        assert explore.own_target(drafter.from_config(FLAT, name, "hub", ""))[0].name == made_for


def test_trainers_are_compared_in_the_versions_that_are_installed() -> None:
    rows, tips = explore.trainers()
    assert all(len(row) == 4 and all(row.values()) for row in rows)
    assert f"speculators {metadata.version('speculators')}" in rows[0]
    assert {"licence", "layer numbers", "what it offers for Kimi-K2.5", "data on disk"} <= {row["question"] for row in rows}
    assert all(set(tip) == {"if", "then"} for tip in tips)
