"""Checks on the Kimi-K2.5 miniature: it has the real one's shape, names and files, and transformers loads it."""

import dataclasses
import json
from pathlib import Path

import pytest

from eagle3kit import engine_transformers, hidden_states, reference, target, tiny
from eagle3kit.errors import KitError
from eagle3kit.model_folder import check_folder

pytestmark = pytest.mark.usefixtures("offline")


def test_miniature_has_the_shape_of_the_real_one(miniature: Path) -> None:
    small, reason = target.describe(str(miniature))
    real = target.reference("kimi-k2.5")
    for key in ("architecture", "model_type", "text_model_type", "weight_prefix", "tie_word_embeddings", "rope", "rms_norm_eps"):
        assert getattr(small, key) == getattr(real, key), key
    assert small.mla is not None
    assert (small.mla.kv_lora_rank, small.mla.qk_rope_head_dim, small.n_layers) == (512, 64, 9)
    assert small.moe is not None
    assert small.moe.dense_layers == 1
    assert len({small.bos_token_id, *small.eos_token_ids, small.pad_token_id, small.media_token_id}) == 4
    assert str(miniature) in reason
    assert set(real_keys := target.reference_config("kimi-k2.5")) - {"_reference"} <= set(tiny.config())
    assert set(real_keys["text_config"]) - {"quantization_config"} <= set(text := tiny.config()["text_config"])
    routing = ("scoring_func", "topk_method", "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace")
    assert {key: text[key] for key in routing} == {key: real_keys["text_config"][key] for key in routing}


def test_miniature_files(miniature: Path) -> None:
    check_folder(miniature)
    places = json.loads((miniature / "model.safetensors.index.json").read_bytes())["weight_map"]
    last = max(places.values())
    assert {name for name, file in places.items() if file == last} == {
        "language_model.model.embed_tokens.weight",
        "language_model.lm_head.weight",
    }
    assert "language_model.model.layers.0.mlp.gate_proj.weight" in places
    assert "language_model.model.layers.8.mlp.gate.e_score_correction_bias" in places
    words = json.loads((miniature / "tokenizer.json").read_bytes())
    assert words["model"]["vocab"]["<think>"] == 7
    assert words["added_tokens"][6]["content"] == "<|media_pad|>"
    assert len(words["model"]["vocab"]) == tiny.VOCAB_SIZE
    counted = sum(target.describe(str(miniature))[0].parameters.values())
    assert counted == pytest.approx(35.5e6, rel=0.01)


def test_miniature_needs_the_right_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(KitError, match="no tokenizer for the miniature"):
        tiny.build_tiny(tmp_path / "a", 0, tmp_path)
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    content = json.loads((tokenizer / "tokenizer.json").read_bytes())
    content["added_tokens"] = content["added_tokens"][:3]
    (wrong / "tokenizer.json").write_text(json.dumps(content))
    (wrong / "tokenizer_config.json").write_text("{}")
    with pytest.raises(KitError, match="not SmolLM2's"):
        tiny.build_tiny(tmp_path / "b", 0, wrong)


def test_seed_and_number_type(miniature: Path, tokenizer: Path, tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    def first(folder: Path, name: str = "language_model.model.layers.1.mlp.gate.weight") -> torch.Tensor:
        with safe_open(folder / "model-00001-of-000002.safetensors", framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    half = tiny.build_tiny(tmp_path / "half", 0, tokenizer, "bfloat16")
    other = tiny.build_tiny(tmp_path / "other", 1, tokenizer)
    assert torch.equal(first(half), first(miniature).bfloat16())
    assert not torch.equal(first(other), first(miniature))
    bias = "language_model.model.layers.1.mlp.gate.e_score_correction_bias"
    assert first(half, bias).dtype == torch.float32
    assert target.describe(str(half))[0].dtype == "bfloat16"


def test_transformers_loads_the_miniature(miniature: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    model, report = AutoModelForImageTextToText.from_pretrained(miniature, output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        logits = model(input_ids=torch.arange(20, 28)[None]).logits
    assert logits.shape == (1, 8, tiny.VOCAB_SIZE)
    assert logits.isfinite().all()
    assert logits.std() > 0.5  # tokens differ: a comparison of two implementations shows something
    words = AutoTokenizer.from_pretrained(miniature)
    assert len(words) == tiny.VOCAB_SIZE
    assert (words.bos_token_id, words.eos_token_id, words.pad_token_id) == (tiny.BOS, tiny.EOS, tiny.PAD)
    assert words("<think> w0 </think> <|media_pad|>")["input_ids"] == [7, 17, 8, 6]


def test_every_layer_of_the_miniature_can_be_watched(miniature: Path) -> None:
    import torch

    model = engine_transformers.load(miniature)
    ids = torch.arange(20, 28)
    (found,) = engine_transformers.states(model, [ids.tolist()], range(tiny.N_LAYERS + 1))
    states = found.transpose(0, 1)
    assert states.shape == (tiny.N_LAYERS + 1, len(ids), tiny.HIDDEN)
    head, norm = hidden_states.head_and_norm(miniature)
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0]
    assert torch.allclose(torch.nn.functional.rms_norm(states[-1], norm.shape, norm, 1e-5) @ head.T, logits, atol=1e-4)
    nearest = reference.errors(states[[2, 4, 6]].transpose(0, 1), states).argmin(1)
    assert nearest.tolist() == [2, 4, 6]
    epsilons = {module.variance_epsilon for name, module in model.named_modules() if name.endswith("kv_a_layernorm")}
    assert epsilons == {1e-5}  # the config's, as vLLM has it


def test_experts_in_four_bits_are_counted_and_read(miniature: Path, tokenizer: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    folder = tiny.build_tiny(tmp_path / "int4", 0, tokenizer, int4=True)
    shape, _ = target.describe(str(folder))
    real = target.reference("kimi-k2.5").quantization
    assert shape.quantization == real
    weights = load_file(check_folder(folder) / "model-00001-of-000002.safetensors")
    weights |= load_file(folder / "model-00002-of-000002.safetensors")
    stored = {
        name: tensor.numel() * tensor.element_size() for name, tensor in weights.items() if name.startswith("language_model")
    }
    counted, _ = dataclasses.replace(shape, bytes_on_disk=None).weight_bytes()
    assert counted == pytest.approx(sum(stored.values()), rel=0.001)
    name = "language_model.model.layers.3.mlp.experts.5.down_proj.weight"
    assert weights[f"{name}_packed"].shape == (tiny.HIDDEN, tiny.EXPERT // 8)

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    plain = AutoModelForImageTextToText.from_pretrained(miniature)
    layer, before = (m.get_submodule("model.language_model.layers.3.mlp.experts") for m in (model, plain))
    error = (layer.down_proj[5].float() - before.down_proj[5]).abs()
    largest = before.down_proj[5].abs().unflatten(1, (-1, tiny.INT4_GROUP)).amax(2)
    furthest = error.unflatten(1, (-1, tiny.INT4_GROUP)).amax(2)
    assert (furthest <= 0.53 * largest / 7).all()  # half a step of each group, and two bfloat16 roundings
