"""The config built, and read by speculators and vLLM."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shapes import FLAT, LOCAL, REFERENCE, SMOL, write_config

from eagle3kit import drafter, drafter_check, recipe
from eagle3kit.errors import KitError
from eagle3kit.rundir import Run, file_digest


class Built:
    """One config built and checked by speculators and vLLM."""

    def __init__(self, folder: Path) -> None:
        self.params = LOCAL.replace(runs_dir=str(folder), run_name="built")
        self.run = Run(self.params, "02_build_k25_config")
        self.derivation = recipe.derive(self.params, REFERENCE, SMOL)
        self.verifier = folder / "model"
        self.verifier.mkdir()
        self.made = drafter_check.make(self.run, self.derivation, self.verifier, say=lambda _: None)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    yield Built(tmp_path_factory.mktemp("drafter"))


class TestMake:
    def test_both_programs_agree(self, built: Built) -> None:
        assert [check["state"] for check in built.made.checks] == ["ok"] * 7
        drafter_check.require(built.made.checks)
        assert built.made.engine["auxiliary layers"] == [2, 15, 27]
        assert built.made.engine["class of the target"] == "LlamaForCausalLM, which records auxiliary layers"
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
        monkeypatch.setattr(drafter_check, "_in_a_process", lambda *_: pytest.fail("a process was started"))
        again = drafter_check.make(Run(built.params, "02_build_k25_config"), built.derivation, built.verifier, say=lambda _: None)
        assert again == built.made

    def test_another_shape_is_refused(self, built: Built) -> None:
        params = built.params.replace(draft_vocab_size=2048)
        with pytest.raises(KitError, match=f"another draft_vocab_size.*seen {built.params.draft_vocab_size}.*wanted 2048"):
            drafter_check.make(Run(params, "02"), recipe.derive(params, REFERENCE, SMOL), built.verifier)

    def test_edited_file_or_other_versions_are_noticed(self, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
        path = built.made.folder / "config.json"
        before = path.read_bytes()
        assert drafter_check._still_valid(built.made.folder)
        path.write_bytes(before.replace(b"1536", b"1537"))
        assert not drafter_check._still_valid(built.made.folder)
        path.write_bytes(before)
        monkeypatch.setattr(drafter_check, "versions", lambda: {"speculators": "1.0"})
        assert not drafter_check._still_valid(built.made.folder)

    def test_failed_check_leaves_no_config(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(_command: str, folder: Path, _logs: Path) -> None:
            write_config(folder, {})
            failed = {"name": "vLLM reads the config", "state": "fail", "found": "no", "wanted": "yes", "fix": "mend it"}
            (folder / "validation.json").write_text(json.dumps({"checks": [failed]}))

        monkeypatch.setattr(drafter_check, "_in_a_process", refuse)
        params = LOCAL.replace(runs_dir=str(tmp_path), run_name="refused")
        run = Run(params, "02")
        with pytest.raises(KitError, match="vLLM reads the config; seen no; wanted yes; fix: mend it"):
            drafter_check.make(run, recipe.derive(params, REFERENCE, SMOL), "some/target", say=lambda _: None)
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
    write_config(root / "fc_norm", {**good, "norm_before_fc": False, "fc_norm": True})
    program = """
import json, pathlib, sys, types
from eagle3kit import drafter_check
root = pathlib.Path(sys.argv[1])
found = {folder.name: drafter_check.check(folder)["checks"] for folder in root.iterdir()}
from speculators.models.eagle3 import Eagle3SpeculatorConfig
config = Eagle3SpeculatorConfig.from_pretrained(root / "weights")
layer = config.transformer_layer_config
rope = {"rope_type": "default", "rope_theta": 10000.0}
engine = types.SimpleNamespace(head_dim=64, max_position_embeddings=8192, rope_parameters=rope)
found["rope"] = drafter_check._check_rope(root, layer.to_dict(), {"config": config, "vllm": engine})
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
            drafter_check.require(checks)

    def test_lost_base_shows_in_the_field_itself(self, findings: dict[str, Any]) -> None:
        check = next(c for c in findings["0"] if c["name"].startswith("vLLM understood"))
        assert "theta 10000" in check["found"]
        assert "theta 100000" in check["wanted"]

    def test_angles_are_really_compared(self, findings: dict[str, Any]) -> None:
        state, found, wanted = findings["rope"]
        assert (state, wanted) == ("fail", "at most 0.001"), found

    def test_one_norm_for_each_auxiliary_state_is_no_fault(self, findings: dict[str, Any]) -> None:
        assert {check["state"] for check in findings["fc_norm"]} == {"ok"}
        assert next(check for check in findings["fc_norm"] if "tensor by tensor" in check["name"])["found"].startswith(
            "19 tensors"
        )

    def test_weights_beside_the_config(self, findings: dict[str, Any]) -> None:
        assert [check["name"] for check in findings["weights"] if check["state"] == "fail"] == [
            "the trainer takes the folder for a config without weights"
        ]


class TestWithoutVllm:
    """Where transformers extracts, vLLM is not needed before notebook 06: what it makes of the config is to be looked at."""

    CHECKS = (
        {"name": "speculators builds the model", "state": "ok", "found": "", "wanted": "", "fix": ""},
        {"name": "vLLM reads the config", "state": "fail", "found": "No module named 'vllm'", "wanted": "no error", "fix": "f"},
    )

    def build(self, built: Built, folder: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> drafter_check.Made:
        def process(command: str, candidate: Path, logs: Path) -> None:
            shutil.copy(built.made.folder / "config.json", candidate)
            digest = file_digest(candidate / "config.json")
            found = {"checks": self.CHECKS, "engine": {}, "versions": drafter_check.versions(), "config_digest": digest}
            (candidate / "validation.json").write_text(json.dumps(found))

        monkeypatch.setattr(drafter_check, "_in_a_process", process)
        params = built.params.replace(runs_dir=str(folder), extraction_engine=engine)
        return drafter_check.make(Run(params, "02_build_k25_config"), built.derivation, built.verifier, say=lambda _: None)

    def test_it_goes_on_and_says_so(self, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made = self.build(built, tmp_path, monkeypatch, "transformers")
        assert [check["state"] for check in made.checks] == ["ok", "warn"]
        assert drafter_check._still_valid(made.folder, needs_vllm=False)
        assert not drafter_check._still_valid(made.folder, needs_vllm=True)

    def test_where_vllm_extracts_it_stops(self, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(KitError, match="this does not hold: vLLM reads the config"):
            self.build(built, tmp_path, monkeypatch, "vllm")


class TestCommand:
    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(KitError, match="has no config.json"):
            drafter_check.validate(tmp_path)
        done = subprocess.run(
            [sys.executable, "-m", "eagle3kit.drafter_check", "check", str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "config.json is missing" in done.stderr

    def test_not_a_drafter(self, tmp_path: Path) -> None:
        with pytest.raises(KitError, match="not a drafter's config in speculators' form"):
            drafter_check.validate(write_config(tmp_path, FLAT))
