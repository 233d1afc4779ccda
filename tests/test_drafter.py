"""The published drafter read and explained; the new drafter's config derived, built, and read by speculators and vLLM."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3kit import drafter, layers, plan, plots, target, tiny
from eagle3kit.errors import KitError
from eagle3kit.params import Params, load_file
from eagle3kit.rundir import Run
from eagle3kit.target import Target

ROOT = Path(__file__).parents[1]
K25, K2, SMOL = target.reference("kimi-k2.5"), target.reference("kimi-k2"), target.reference("smollm2-135m")
TINY = Target.from_config(tiny.config(), name="tiny-kimi-k2.5", source="tiny-kimi-k2.5")
B300, LOCAL = load_file(ROOT / "params" / "b300.yaml"), load_file(ROOT / "params" / "local.yaml")
REFERENCE = drafter.reference("a test")


def write_config(folder: Path, config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "draft_vocab_size": 32000,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
    "head_dim": 128,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "rope_theta": 50000,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "vocab_size": 163840,
}
"""A drafter's config in the flat form. Invented but for the published fields."""


class TestFields:
    def test_every_field_is_explained_and_in_one_group(self) -> None:
        grouped = [name for names in drafter.FIELD_GROUPS.values() for name in names]
        assert sorted(grouped) == sorted(drafter.FIELDS)

    @pytest.mark.parametrize(("params", "shape"), [(B300, K25), (LOCAL, SMOL), (LOCAL, TINY)], ids=["k2.5", "smollm2", "tiny"])
    def test_every_field_is_derived(self, params: Params, shape: Target) -> None:
        values = drafter.derive(params, REFERENCE, shape).values
        assert set(values) == set(drafter.FIELDS) - {"verifier"}

    def test_text_keeps_ids_readable(self) -> None:
        assert drafter.text(163839) == "163839"
        assert drafter.text([2, 30, 58]) == "2, 30, 58"
        assert drafter.text(1e-05) == "1e-05"
        assert drafter.text(None) == "unknown"
        assert drafter.text({"rope_type": "default", "rope_theta": 1e5}) == "theta 100000"


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
        monkeypatch.setattr(drafter, "_download", lambda hub_id: (None, f"{hub_id}: no network"))
        parent = drafter.read_parent(Params(drafter_parent=drafter.REFERENCE_ID))
        assert (parent.origin, parent.values) == ("reference", REFERENCE.values)
        assert "no network" in parent.reason
        with pytest.raises(KitError, match="no network.*drafter_parent"):
            drafter.read_parent(Params(drafter_parent="AQ-MedAI/Kimi-K25-eagle3"))

    def test_hub_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_config(tmp_path, FLAT) / "config.json"
        monkeypatch.setattr(drafter, "_download", lambda _: (path, "config.json from the hub"))
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


class TestExplain:
    def test_reference_agrees_with_k2_as_far_as_it_is_known(self) -> None:
        rows = {row["field"]: row for row in drafter.explain(REFERENCE, K2)}
        assert list(rows) == list(drafter.FIELDS)
        assert rows["hidden_size"]["agrees with kimi-k2"] == "yes"
        assert rows["hidden_size"]["value"] == "7168 (implied)"
        assert rows["rms_norm_eps"]["value"] == rows["rms_norm_eps"]["agrees with kimi-k2"] == "unknown"
        assert rows[drafter.AUX]["agrees with kimi-k2"].startswith("yes")
        assert drafter.disagreements(REFERENCE, K2) == []
        assert sum(map(len, drafter.in_groups(drafter.explain(REFERENCE, K2)).values())) == len(rows)

    def test_what_disagrees_is_named(self) -> None:
        assert {row["field"] for row in drafter.disagreements(REFERENCE, SMOL)} == {"hidden_size", "vocab_size", drafter.AUX}

    @pytest.mark.parametrize(
        ("ids", "word"), [([1, 29, 57], "sglang"), ([2, 30, 58, 60], "speculators_old"), ([5, 4, 90], "no:")]
    )
    def test_layers_in_other_numbers(self, ids: list[int], word: str) -> None:
        parent = drafter.from_config({**FLAT, "eagle_config": {drafter.AUX: ids}}, "x", "folder", "")
        assert (
            word in next(row for row in drafter.disagreements(parent, K2) if row["field"] == drafter.AUX)["agrees with kimi-k2"]
        )
        assert drafter.places(parent, K2)[0] == (2, 30, 58)

    def test_places_of_the_published_drafter(self) -> None:
        assert drafter.places(REFERENCE, K2)[0] == (2, 30, 58)
        assert drafter.places(REFERENCE, SMOL)[0] == (2, 15, 27)

    def test_k2_against_k25(self) -> None:
        rows = {row["field"]: (row["kimi-k2"], row["kimi-k2.5"]) for row in drafter.differences(K2, K25)}
        assert rows["rms_norm_eps"] == ("1e-06", "1e-05")
        assert rows["max_position_embeddings"] == ("131072", "262144")
        assert rows["pad_token_id"] == ("none", "163839")
        assert rows["weight names"] == ("model.*", "language_model.model.*")
        assert set(rows) == {
            "rms_norm_eps",
            drafter.ROPE,
            "max_position_embeddings",
            "pad_token_id",
            "weight names",
            "quantisation",
        }
        assert drafter.differences(K25, K25) == []


def fields(params: Params, shape: Target, parent: drafter.Parent = REFERENCE) -> dict[str, drafter.Derived]:
    return {field.name: field for field in drafter.derive(params, parent, shape).fields}


class TestDerive:
    def test_k25(self) -> None:
        found = fields(B300, K25)
        values = {name: field.value for name, field in found.items()}
        assert (values["num_attention_heads"], values["num_key_value_heads"], values["head_dim"]) == (64, 64, 128)
        assert (values["hidden_size"], values["vocab_size"], values["draft_vocab_size"]) == (7168, 163840, 32000)
        assert (values["rms_norm_eps"], values["max_position_embeddings"], values["pad_token_id"]) == (1e-05, 262144, 163839)
        assert values[drafter.ROPE] == {**(K25.rope.scaling or {}), "rope_theta": 50000.0}
        assert (values[drafter.ROPE]["rope_type"], values[drafter.ROPE]["factor"]) == ("yarn", 64.0)
        assert values["layer_types"] == ["full_attention"]
        assert (found[drafter.AUX].value, found[drafter.AUX].source) == ([2, 30, 58], "parent")
        assert "beta_fast" in found[drafter.ROPE].reason
        assert all(field.reason for field in found.values())
        dropped = [name for name, field in found.items() if field.source == "dropped"]
        assert len(dropped) == 4
        assert any("kv_lora_rank" in name for name in dropped)

    def test_smollm2(self) -> None:
        found = fields(LOCAL, SMOL)
        shape = [found[name].value for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")]
        assert shape == [9, 3, 64, 1536]
        assert (found["head_dim"].source, found[drafter.AUX].value) == ("target", [2, 15, 27])
        assert found[drafter.ROPE].value == {"rope_type": "default", "rope_theta": 100000.0}
        assert "2, 30, 58 are not copied" in found[drafter.AUX].reason

    def test_mla_target_never_gives_its_own_head_width(self) -> None:
        found = fields(LOCAL, TINY)
        assert [found[name].value for name in ("num_attention_heads", "num_key_value_heads", "head_dim")] == [4, 4, 128]

    def test_what_the_target_prescribes_is_not_inherited(self, tmp_path: Path) -> None:
        parent = drafter.read_parent(Params(drafter_parent=str(write_config(tmp_path, FLAT))))
        derivation = drafter.derive(B300, parent, K25)
        found = {field.name: field for field in derivation.fields}
        assert (found["rms_norm_eps"].value, found["rms_norm_eps"].source) == (1e-05, "target")
        assert "1e-06 belongs to another target" in found["rms_norm_eps"].reason
        assert found["num_attention_heads"].source == "parent"
        assert derivation.before(found["rms_norm_eps"]) == "1e-06"
        assert derivation.before(found["num_attention_heads"]) == "same"
        assert (found["eagle_config"].source, found["use_cache"].source) == ("dropped", "dropped")

    def test_parameters_decide(self) -> None:
        found = fields(
            LOCAL.replace(draft_vocab_size=0, drafter_norm_output=False, drafter_heads=12, aux_layers=[3, 9, 20]), SMOL
        )
        assert found["draft_vocab_size"].value == 49152
        assert found["norm_output"].value is False
        assert found["num_attention_heads"] == drafter.Derived("num_attention_heads", 12, "chosen", "drafter_heads: 12")
        assert found[drafter.AUX].value == [3, 9, 20]

    @pytest.mark.parametrize(
        ("params", "shape", "message"),
        [
            (B300.replace(aux_layers=[1, 29, 57]), K25, "sglang.*set aux_layers: \\[2, 30, 58\\]"),
            (LOCAL.replace(aux_layers=[2, 30, 58]), SMOL, "layers that the target does not have"),
            (LOCAL.replace(draft_vocab_size=50000), SMOL, "larger than the target's vocabulary.*49152"),
            (LOCAL.replace(drafter_heads=8), SMOL, "8 heads, 3 key and value heads"),
            (LOCAL.replace(drafter_head_dim=65), SMOL, "odd width.*65"),
            (B300.replace(drafter_heads=0, drafter_kv_heads=0), SMOL, "cannot be spread over the GPUs.*serve_tensor_parallel 8"),
        ],
    )
    def test_what_does_not_fit(self, params: Params, shape: Target, message: str) -> None:
        with pytest.raises(KitError, match=message):
            drafter.derive(params, REFERENCE, shape)

    def test_activation_that_the_engine_lacks(self) -> None:
        config = {**target.reference_config("smollm2-135m"), "hidden_act": "gelu"}
        found = fields(LOCAL, Target.from_config(config, name="x"))["hidden_act"]
        assert (found.value, found.source) == ("silu", "chosen")
        assert "gelu" in found.reason

    def test_tables_name_every_field_once(self) -> None:
        derivation = drafter.derive(B300, REFERENCE, K25)
        assert len({row["field"] for row in derivation.rows()}) == len(derivation.fields) == sum(derivation.counts().values())
        assert {row["from"] for row in derivation.rows()} == {"parent", "target", "chosen", "dropped"}


class TestSize:
    def test_published_size(self) -> None:
        found = drafter.size(drafter.derive(B300, REFERENCE, K25).values)
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
        values = drafter.derive(params, REFERENCE, shape).values
        counts = plan.drafter_parameters(shape, plan.drafter_shape(params, shape), norm_before_fc=params.drafter_norm_before_fc)
        assert drafter.size(values).parameters == sum(counts.values())

    def test_rows(self) -> None:
        values = drafter.derive(LOCAL, REFERENCE, SMOL).values
        rows = drafter.tensor_rows(values)
        assert sum(row["parameters"] or 0 for row in rows) == drafter.size(values).parameters
        assert {row["tensor"] for row in rows if row["parameters"] is None} == {"d2t", "t2d"}
        full = drafter.tensors({**values, "draft_vocab_size": values["vocab_size"]})
        assert "d2t" not in full
        assert "t2d" not in full


class TestFigure:
    @pytest.mark.parametrize("shape", [K25, SMOL, TINY], ids=lambda shape: shape.name)
    def test_draws(self, shape: Target) -> None:
        figure = drafter.layer_figure(shape, layers.default_aux_layers(shape.n_layers))
        assert plots.png(figure) == plots.png(figure)

    def test_refuses_layers_in_other_numbers(self) -> None:
        with pytest.raises(KitError, match="sglang"):
            drafter.layer_figure(K25, [1, 29, 57])


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


# ---- both programs, for real


class Built:
    """One config built and checked by speculators and vLLM."""

    def __init__(self, folder: Path) -> None:
        self.params = LOCAL.replace(runs_dir=str(folder), run_name="built")
        self.run = Run(self.params, "02_build_k25_config")
        self.derivation = drafter.derive(self.params, REFERENCE, SMOL)
        self.verifier = folder / "model"
        self.verifier.mkdir()
        self.made = drafter.make(self.run, self.derivation, self.verifier, say=lambda _: None)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    yield Built(tmp_path_factory.mktemp("drafter"))


class TestMake:
    def test_both_programs_agree(self, built: Built) -> None:
        assert [check["state"] for check in built.made.checks] == ["ok"] * 7
        drafter.require(built.made.checks)
        assert built.made.engine["auxiliary layers"] == [2, 15, 27]
        assert built.made.engine["target that it would serve"] == str(built.verifier)

    def test_files(self, built: Built) -> None:
        names = {path.name for path in built.made.folder.iterdir() if not path.name.startswith(".")}
        assert names == {"config.json", "derivation.json", "diff.json", "validation.json", "manifest.json"}
        config = json.loads((built.made.folder / "config.json").read_text())
        assert "auto_map" not in config  # readers would ask to run the code that it names
        assert config["speculators_config"]["verifier"] == {
            "name_or_path": str(built.verifier),
            "architectures": ["LlamaForCausalLM"],
        }
        assert config["transformer_layer_config"]["layer_types"] == ["full_attention"]
        diff = {row["field"]: row["change"] for row in json.loads((built.made.folder / "diff.json").read_text())}
        assert (diff["hidden_size"], diff["num_hidden_layers"]) == ("changed", "same")
        assert (diff["rms_norm_eps"], diff["eagle_config"]) == ("new", "dropped")

    def test_facts(self, built: Built) -> None:
        facts = {name: fact["value"] for name, fact in built.run.facts().items()}
        size = built.made.size
        assert (facts["drafter.parameters"], facts["drafter.parameters_trained"]) == (size.parameters, size.trained)
        assert (facts["drafter.bytes_bf16"], facts["drafter.aux_layers"]) == (size.bytes_bf16, [2, 15, 27])

    def test_started_again_it_does_nothing(self, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(drafter, "_in_a_process", lambda *_: pytest.fail("a process was started"))
        again = drafter.make(Run(built.params, "02_build_k25_config"), built.derivation, built.verifier, say=lambda _: None)
        assert again == built.made

    def test_another_shape_is_refused(self, built: Built) -> None:
        params = built.params.replace(draft_vocab_size=2048)
        with pytest.raises(KitError, match="another draft_vocab_size.*seen 4096.*wanted 2048"):
            drafter.make(Run(params, "02"), drafter.derive(params, REFERENCE, SMOL), built.verifier)

    def test_edited_file_or_other_versions_are_noticed(self, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
        path = built.made.folder / "config.json"
        before = path.read_bytes()
        assert drafter._still_valid(built.made.folder)
        path.write_bytes(before.replace(b"1536", b"1537"))
        assert not drafter._still_valid(built.made.folder)
        path.write_bytes(before)
        monkeypatch.setattr(drafter, "versions", lambda: {"speculators": "1.0"})
        assert not drafter._still_valid(built.made.folder)

    def test_failed_check_leaves_no_config(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_command: str, folder: Path, _logs: Path) -> None:
            write_config(folder, {})
            failed = {"name": "vLLM reads the config", "state": "fail", "found": "no", "wanted": "yes", "fix": "mend it"}
            (folder / "validation.json").write_text(json.dumps({"checks": [failed]}))

        monkeypatch.setattr(drafter, "_in_a_process", refuse)
        params = LOCAL.replace(runs_dir=str(tmp_path), run_name="refused")
        run = Run(params, "02")
        with pytest.raises(KitError, match="vLLM reads the config; seen no; wanted yes; fix: mend it"):
            drafter.make(run, drafter.derive(params, REFERENCE, SMOL), "some/target", say=lambda _: None)
        assert not (run.root / "config" / "config.json").exists()
        assert not (run.root / "config" / "manifest.json").exists()


FOUR_LAYERS = [2, 10, 15, 27]
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rope base lost": ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, "as it was meant"),
    "sliding window": ({}, {"layer_types": ["sliding_attention"], "sliding_window": 2048}, "as it was meant"),
    "narrow heads": ({}, {"head_dim": 32}, "speculators builds the model"),
    "norm flag missing": ({"norm_before_residual": None}, {}, "speculators reads the config back"),
    "four layers": ({drafter.AUX: FOUR_LAYERS}, {}, "vLLM would build the same tensors"),
    "layers of another system": ({drafter.AUX: [1, 14, 26]}, {}, "vLLM understood every field"),
    "a layer that vLLM cannot serve": ({}, {"model_type": "mistral"}, "vLLM reads the config"),
}
"""Faults put into a good config: top-level fields (None removes one), fields of the layer, and the check that must fail."""


@pytest.fixture(scope="module")
def findings(built: Built, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the check says of every fault. One process for all of them: importing the two programs is what takes time."""
    root = tmp_path_factory.mktemp("faults")
    good = json.loads((built.made.folder / "config.json").read_text())
    derivation = (built.made.folder / "derivation.json").read_text()
    for number, (top, layer, _) in enumerate(FAULTS.values()):
        config = {**good, **top, "transformer_layer_config": {**good["transformer_layer_config"], **layer}}
        folder = write_config(root / str(number), {key: value for key, value in config.items() if value is not None})
        if top.get(drafter.AUX) != FOUR_LAYERS:  # there the config itself is what was meant, and vLLM alone would differ
            (folder / "derivation.json").write_text(derivation)
    (write_config(root / "weights", good) / "model.safetensors").touch()
    program = """
import json, pathlib, sys, types
from eagle3kit import drafter
root = pathlib.Path(sys.argv[1])
found = {folder.name: drafter.check(folder)["checks"] for folder in root.iterdir()}
from speculators.models.eagle3 import Eagle3SpeculatorConfig
config = Eagle3SpeculatorConfig.from_pretrained(root / "weights")
layer = config.transformer_layer_config
rope = {"rope_type": "default", "rope_theta": 10000.0}
engine = types.SimpleNamespace(head_dim=64, max_position_embeddings=8192, rope_parameters=rope)
found["rope"] = drafter._check_rope(root, layer.to_dict(), {"config": config, "vllm": engine})
(root / "found.json").write_text(json.dumps(found))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, str(root)], check=True, capture_output=True, timeout=300)
    found: dict[str, Any] = json.loads((root / "found.json").read_text())
    return found


class TestFaults:
    @pytest.mark.parametrize("fault", FAULTS)
    def test_is_caught(self, findings: dict[str, Any], fault: str) -> None:
        checks = findings[str(list(FAULTS).index(fault))]
        failed = [check["name"] for check in checks if check["state"] == "fail"]
        assert any(FAULTS[fault][2] in name for name in failed), failed
        with pytest.raises(KitError, match="not fit for use"):
            drafter.require(checks)

    def test_lost_base_shows_in_the_field_itself(self, findings: dict[str, Any]) -> None:
        check = next(c for c in findings["0"] if c["name"].startswith("vLLM understood"))
        assert "theta 10000" in check["found"]
        assert "theta 100000" in check["wanted"]

    def test_angles_are_really_compared(self, findings: dict[str, Any]) -> None:
        state, found, wanted = findings["rope"]
        assert (state, wanted) == ("fail", "at most 0.001"), found

    def test_weights_beside_the_config(self, findings: dict[str, Any]) -> None:
        assert [check["name"] for check in findings["weights"] if check["state"] == "fail"] == [
            "the trainer takes the folder for a config without weights"
        ]


class TestCommand:
    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(KitError, match="has no config.json"):
            drafter.validate(tmp_path)
        done = subprocess.run(
            [sys.executable, "-m", "eagle3kit.drafter", "check", str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "config.json is missing" in done.stderr

    def test_not_a_drafter(self, tmp_path: Path) -> None:
        with pytest.raises(KitError, match="not a drafter's config in speculators' form"):
            drafter.validate(write_config(tmp_path, FLAT))
