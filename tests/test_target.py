"""Checks on what the kit knows about a target. No test uses the network."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3kit import model_config, target
from eagle3kit.errors import KitError

pytestmark = pytest.mark.usefixtures("offline")


# ---- the numbers


def test_kimi_k25_reference() -> None:
    k = target.reference("kimi-k2.5")
    assert (k.n_layers, k.hidden_size, k.vocab_size, k.intermediate_size) == (61, 7168, 163840, 18432)
    assert (k.heads, k.kv_heads, k.head_dim) == (64, 64, 192)
    assert k.mla == model_config.Mla(1536, 512, 128, 64, 128)
    assert k.moe == model_config.Moe(experts=384, experts_per_token=8, shared_experts=1, intermediate_size=2048, dense_layers=1)
    assert k.rms_norm_eps == 1e-5
    assert k.rope.theta == 50000
    assert k.rope.scaling is not None
    assert (k.rope.scaling["rope_type"], k.rope.scaling["factor"], k.rope.scaling["beta_fast"]) == ("yarn", 64, 32)
    assert k.max_position_embeddings == 262144
    assert (k.bos_token_id, k.eos_token_ids, k.pad_token_id, k.media_token_id) == (163584, (163585,), 163839, 163605)
    assert (k.weight_prefix, k.tie_word_embeddings) == ("language_model.", False)
    assert (k.architecture, k.model_type, k.text_model_type) == ("KimiK25ForConditionalGeneration", "kimi_k25", "kimi_k2")
    assert k.reference
    assert "text_config.rope_scaling.beta_fast" in k.unverified
    assert k.rows()[-1]["what"] == "unverified"


def test_k2_differs_from_k25_where_it_matters() -> None:
    k2, k25 = target.reference("kimi-k2"), target.reference("kimi-k2.5")
    assert (k2.rms_norm_eps, k25.rms_norm_eps) == (1e-6, 1e-5)
    assert (k2.max_position_embeddings, k25.max_position_embeddings) == (131072, 262144)
    assert (k2.pad_token_id, k25.pad_token_id) == (None, 163839)
    assert {"what": "bos / eos / pad", "value": "163584 / 163585 / none"} in k2.rows()
    assert (k2.weight_prefix, k25.weight_prefix) == ("", "language_model.")
    assert k2.rope.scaling is not None
    assert (k2.rope.scaling["factor"], k2.rope.scaling["beta_fast"]) == (32, 1)


def test_which_parts_are_quantised() -> None:
    k2, k25 = target.reference("kimi-k2").quantization, target.reference("kimi-k2.5").quantization
    assert k2 is not None
    assert k25 is not None
    assert k25.parts == ("routed experts",)
    assert (k25.bits, k25.overhead_bits) == (4, 0.5)
    assert k2.parts == ("attention", "dense mlp", "shared experts", "routed experts")
    assert k2.bits == 8


def test_weights_counted_from_the_config_agree_with_the_published_sizes() -> None:
    for name, published in (("kimi-k2", 958.5 * 2**30), ("kimi-k2.5", 595e9)):
        counted = dataclasses.replace(target.reference(name), bytes_on_disk=None).weight_bytes()
        assert counted[0] == pytest.approx(published, rel=0.002)
        assert counted[1] == "counted from the config"
        assert target.reference(name).weight_bytes()[0] == pytest.approx(published, rel=0.001)


def test_known_parameter_counts() -> None:
    assert sum(target.reference("smollm2-135m").parameters.values()) == 134_515_008
    k = target.reference("kimi-k2.5").parameters
    assert k["routed experts"] == 60 * 384 * 3 * 7168 * 2048
    assert sum(k.values()) == pytest.approx(1026e9, rel=0.001)


def test_served_dtype_changes_unquantised_weights_only() -> None:
    small, k = target.reference("smollm2-135m"), target.reference("kimi-k2.5")
    assert small.weight_bytes("float32")[0] == 2 * small.weight_bytes("bfloat16")[0] == 4 * 134_515_008
    assert k.weight_bytes("float32") == k.weight_bytes("auto")


# ---- where it is described


@pytest.mark.parametrize("model", ["kimi-k2.5", "moonshotai/Kimi-K2.5", "kimi-k2", "moonshotai/Kimi-K2-Instruct"])
def test_without_the_hub_kimi_is_described_by_the_reference(model: str) -> None:
    found, reason = target.describe(model)
    assert found.reference
    assert "HF_HUB_OFFLINE is set" in reason


def test_with_the_hub_its_own_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = target.reference_config("kimi-k2.5")
    del config["_reference"]
    config["text_config"]["rope_scaling"]["beta_fast"] = 1.0
    (tmp_path / "config.json").write_text(json.dumps(config))

    def download(hub_id: str, file: str, **_: object) -> str:
        assert (hub_id, file) == ("moonshotai/Kimi-K2.5", "config.json")
        return str(tmp_path / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    found, reason = target.describe("kimi-k2.5")
    assert not found.reference
    assert found.rope.scaling is not None
    assert found.rope.scaling["beta_fast"] == 1
    assert "local cache" in reason


def test_other_hub_models_have_no_reference() -> None:
    with pytest.raises(KitError, match="config of owner/model cannot be read"):
        target.describe("owner/model")


def test_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(KitError, match=re.escape("fix: set target_model: kimi-k2.5")):
        target.describe("kimi-k25")


def test_small_targets_are_described_before_they_exist() -> None:
    small, reason = target.describe("smollm2-135m")
    assert (small.n_layers, small.hidden_size, small.rope.theta) == (30, 576, 100000)
    assert "not on this machine yet" in reason
    assert target.describe("HuggingFaceTB/SmolLM2-135M-Instruct") == (small, reason)
    mini, _ = target.describe("tiny-kimi-k2.5")
    assert (mini.n_layers, mini.weight_prefix) == (9, "language_model.")


def test_importing_it_imports_no_framework() -> None:

    code = "import sys; from eagle3kit import target, materialize, devices, plan, doctor, layers; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "vllm", "speculators", "huggingface_hub", "datasets"} & set(done.stdout.split())
