"""A drafter's fields, its tensors, and a published one read."""

from pathlib import Path

import pytest
from shapes import B300, FLAT, K25, LOCAL, REFERENCE, SMOL, TINY, write_config

from eagle3kit import drafter, hub, plan, recipe
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.target import Target


class TestParent:
    def test_reference_holds_only_what_is_published_or_implied(self) -> None:
        known = {name: REFERENCE.status(name) for name in REFERENCE.values}
        assert [name for name, status in known.items() if status == "published"] == [
            "architectures",
            "draft_vocab_size",
            "num_hidden_layers",
            drafter.AUX,
        ]
        assert {name for name, status in known.items() if status == "implied"} == set(REFERENCE.implied)
        for name in ("rms_norm_eps", drafter.ROPE, "num_attention_heads", "intermediate_size", "norm_before_residual"):
            assert REFERENCE.status(name) == "unknown"

    def test_flat_form(self, tmp_path: Path) -> None:
        folder = write_config(tmp_path / "drafter", FLAT)
        parent = drafter.read_parent(Params(drafter_parent=str(folder)))
        assert parent.origin == "folder"
        assert parent.folder == folder
        assert str(folder) in parent.reason
        assert parent.values[drafter.AUX] == [2, 30, 58]
        assert parent.values["dtype"] == "bfloat16"
        assert parent.values[drafter.ROPE]["rope_theta"] == 50000
        assert parent.values[drafter.ROPE]["rope_type"] == "yarn"
        assert parent.others == ("eagle_config", "use_cache")

    def test_speculators_form(self, tmp_path: Path) -> None:
        config = {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": 8,
            "norm_output": True,
            drafter.AUX: [2, 15, 27],
            "speculators_model_type": "eagle3",
            "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}], "verifier": {"name_or_path": "some/target"}},
            "transformer_layer_config": {"hidden_size": 576, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
        }
        values = drafter.read_parent(Params(drafter_parent=str(write_config(tmp_path, config)))).values
        assert values["hidden_size"] == 576
        assert values[drafter.ROPE] == {"rope_type": "default", "rope_theta": 1e5}
        assert (values["speculative_tokens"], values["verifier"], values["norm_output"]) == (3, "some/target", True)

    def test_lost_rope_base_is_noted_and_never_assumed(self, tmp_path: Path) -> None:
        config = {key: value for key, value in FLAT.items() if key != "rope_theta"}
        parent = drafter.read_parent(Params(drafter_parent=str(write_config(tmp_path, config))))
        assert drafter.ROPE not in parent.values
        assert "no rope_theta" in parent.notes[0]

    def test_hub_out_of_reach_falls_back_and_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub, "config_file", lambda hub_id, *_: (None, f"{hub_id}: no network"))
        parent = drafter.read_parent(Params(drafter_parent=drafter.REFERENCE_ID))
        assert (parent.origin, parent.values) == ("reference", REFERENCE.values)
        assert "no network" in parent.reason
        with pytest.raises(KitError, match="no network.*drafter_parent"):
            drafter.read_parent(Params(drafter_parent="AQ-MedAI/Kimi-K25-eagle3"))

    def test_hub_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_config(tmp_path, FLAT) / "config.json"
        monkeypatch.setattr(hub, "config_file", lambda *_: (path, "config.json from the hub"))
        parent = drafter.read_parent(Params(drafter_parent=drafter.REFERENCE_ID))
        assert (parent.origin, parent.reason, parent.status("rms_norm_eps")) == ("hub", "config.json from the hub", "published")

    @pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "refrence"])
    def test_neither_folder_nor_hub_id(self, name: str) -> None:
        with pytest.raises(KitError, match="neither reference, nor a folder, nor a hub id"):
            drafter.read_parent(Params(drafter_parent=name))

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ("{", "cannot be read"),
            ("[1]", "is not a config"),
            ({"architectures": ["LlamaForCausalLM"], "hidden_size": 576}, "not that of an EAGLE-3 drafter"),
        ],
    )
    def test_bad_file(self, tmp_path: Path, config: object, message: str) -> None:
        with pytest.raises(KitError, match=message):
            drafter.read_parent(Params(drafter_parent=str(write_config(tmp_path, config))))

    def test_folder_without_config(self, tmp_path: Path) -> None:
        with pytest.raises(KitError, match="has no config.json"):
            drafter.read_parent(Params(drafter_parent=str(tmp_path)))


class TestSize:
    def test_published_size(self) -> None:
        found = drafter.size(recipe.derive(B300, REFERENCE, K25).values)
        assert found.trained == pytest.approx(0.83e9, rel=0.01)  # published: about 0.83 B without embed_tokens and lm_head
        assert found.parameters == found.trained + (163840 + 32000) * 7168
        assert found.bytes_bf16 == 2 * found.parameters + 8 * 32000 + 163840

    @pytest.mark.parametrize(
        ("params", "shape"),
        [
            (B300, K25),
            (LOCAL, SMOL),
            (LOCAL, TINY),
            (LOCAL.replace(drafter_layers=2, draft_vocab_size=0, drafter_norm_before_fc=False), SMOL),
        ],
        ids=["k2.5", "smollm2", "tiny", "two layers"],
    )
    def test_plan_counts_the_same(self, params: Params, shape: Target) -> None:
        values = recipe.derive(params, REFERENCE, shape).values
        counts = plan.drafter_parameters(shape, plan.drafter_shape(params, shape), norm_before_fc=params.drafter_norm_before_fc)
        assert drafter.size(values).parameters == sum(counts.values())

    def test_rows(self) -> None:
        values = recipe.derive(LOCAL, REFERENCE, SMOL).values
        rows = drafter.tensor_rows(values)
        assert sum(row["parameters"] or 0 for row in rows) == drafter.size(values).parameters
        assert {row["tensor"] for row in rows if row["parameters"] is None} == {"d2t", "t2d"}
        full = drafter.tensors({**values, "draft_vocab_size": values["vocab_size"]})
        assert "d2t" not in full
        assert "t2d" not in full


class TestVerifierPath:
    def test_folder_becomes_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "model").mkdir()
        monkeypatch.chdir(tmp_path)
        assert drafter.verifier_path("model") == str(tmp_path / "model")
        assert drafter.verifier_path("moonshotai/Kimi-K2.5") == "moonshotai/Kimi-K2.5"

    @pytest.mark.parametrize("name", ["/no/such/folder", "./x/y", "nothing"])
    def test_missing_folder(self, name: str) -> None:
        with pytest.raises(KitError, match="the target's folder is not there"):
            drafter.verifier_path(name)
