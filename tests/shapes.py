"""Shapes and drafters' configs that several tests hold up."""

import json
from pathlib import Path

from eagle3kit import drafter, target, tiny
from eagle3kit.params import load_file
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
