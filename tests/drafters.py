"""A target of 200 tokens with random weights, and drafters for it; in folders, to be read, changed and broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3kit import convert, drafter
from eagle3kit.drafter import AUX

HIDDEN, VOCAB, DRAFT, LAYERS = 64, 200, 50, 8
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
LAYER = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 512,
    "layer_types": ["full_attention"],
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "dtype": "float32",
}


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_weights(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def maps(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    return torch.tensor(ids) - torch.arange(len(ids)), t2d


EVERY_FOURTH = list(range(0, VOCAB, 4))


def write_target(folder: Path) -> Path:
    config = {**LAYER, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "layer_types": None}
    write_json(folder / "config.json", config)
    weights = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN, seed=1),
        "lm_head.weight": random(VOCAB, HIDDEN, seed=2),
        "model.norm.weight": random(HIDDEN, seed=3),
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer.json").write_text("{}")
    return folder


def config_of(target: Path, **changes: Any) -> dict[str, Any]:
    layer = {**LAYER, **{key: changes.pop(key) for key in list(changes) if key in LAYER}}
    method = {"proposal_type": "greedy", "speculative_tokens": 3}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT,
        AUX: [2, 4, 5],
        **dict.fromkeys((*convert.NORM_FLAGS, "embed_requires_grad"), False),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]},
        },
        **changes,
    }


def write_drafter(folder: Path, target: Path, ids: Any = EVERY_FOURTH, **changes: Any) -> Path:
    config = config_of(target, **{"draft_vocab_size": len(ids), **changes})
    values = {**config["transformer_layer_config"], **{k: v for k, v in config.items() if k != "transformer_layer_config"}}
    theirs = load_file(target / "model.safetensors")
    weights = {
        name: 1 + random(*shape, seed=n) / 10 if len(shape) == 1 else random(*shape, seed=n) / shape[-1] ** 0.5
        for n, (name, shape) in enumerate(drafter.tensors(values).items(), 10)
    }
    weights["embed_tokens.weight"] = theirs["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"] = theirs["lm_head.weight"][list(ids)].clone()
    if "d2t" in weights:
        weights["d2t"], weights["t2d"] = maps(ids)
    write_json(folder / "config.json", config)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
