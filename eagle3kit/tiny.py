"""A miniature Kimi-K2.5: every code path of the real target, on a laptop, with weights that mean nothing.

The folder has the shape of the published checkpoint: the `KimiK25ForConditionalGeneration` wrapper with a nested text config of
type `kimi_k2`, weights under `language_model.model.` and `language_model.lm_head.`, multi-head latent attention with the real
`kv_lora_rank` and rope width, a first dense layer and then sigmoid-routed experts with a correction bias, yarn, a small vision
tower, shards with an index, and the embeddings and `lm_head` in the last shard. What is small is what costs time: width, depth,
the number of experts and the vocabulary.

Acceptance on it is meaningless. What it shows is that names, shapes, layers and files are handled as the real target needs them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3kit.errors import KitError

if TYPE_CHECKING:
    import torch

DType = Literal["float32", "bfloat16"]

N_LAYERS = 9
VOCAB_SIZE = 49152
HIDDEN, DENSE, EXPERT, EXPERTS, EXPERTS_PER_TOKEN = 256, 512, 64, 16, 4
INT4_GROUP = 32
HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 4, 64, 512, 32, 64, 32
VISION_HIDDEN, VISION_MLP, VISION_LAYERS, VISION_HEADS, VISION_GRID, PATCH, MERGE = 64, 128, 2, 2, 8, 14, 2

SPECIAL_TOKENS = {
    3: "<|media_begin|>",
    4: "<|media_content|>",
    5: "<|media_end|>",
    6: "<|media_pad|>",
    7: "<think>",
    8: "</think>",
    9: "<|im_user|>",
    10: "<|im_assistant|>",
    11: "<|im_system|>",
    12: "<|im_middle|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    16: "[PAD]",
}
"""Unused special tokens of the SmolLM2 tokenizer, and the K2.5 token that each becomes. Ids stay as they are.

There are no more of them: the marks around a whole section of tool calls stay text.
"""

TEMPLATE = Path(__file__).parent / "presets" / "kimi-k2.5.jinja"
FORMAT = 2
"""Raised whenever the miniature changes, so that one built earlier on this machine is not taken for it."""

BOS, EOS, PAD, MEDIA = 1, 2, 16, 6


def config(dtype: DType = "float32", *, int4: bool = False) -> dict[str, Any]:
    """The `config.json` of the miniature; with `int4` its routed experts are packed as the published checkpoint's are.

    Names and structure are the published checkpoint's. The vision part carries both the hub's names (`vt_*`) and the ones that
    transformers and vLLM read. There is no `auto_map`: with one, transformers asks on standard input whether to run remote code.

    Rope is yarn like the real target's, not only for likeness: on a CPU vLLM computes MLA with the plain rope wrongly.
    """
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "dtype": dtype,
        "eos_token_id": EOS,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": DENSE,
        "kv_lora_rank": KV_RANK,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": EXPERT,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "num_hidden_layers": N_LAYERS,
        "num_key_value_heads": HEADS,
        "num_nextn_predict_layers": 0,
        "pad_token_id": PAD,
        "q_lora_rank": Q_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 64.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": VALUE,
        "vocab_size": VOCAB_SIZE,
    }
    vision = {
        "init_pos_emb_height": VISION_GRID,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": VISION_GRID,
        "merge_kernel_size": [MERGE, MERGE],
        "merge_type": "sd2_tpool",
        "mm_hidden_size": VISION_HIDDEN,
        "mm_projector_type": "patchmerger",
        "patch_size": PATCH,
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05,
        "text_hidden_size": HIDDEN,
        "video_attn_type": "spatial_temporal",
        "vt_hidden_size": VISION_HIDDEN,
        "vt_intermediate_size": VISION_MLP,
        "vt_num_attention_heads": VISION_HEADS,
        "vt_num_hidden_layers": VISION_LAYERS,
        "hidden_size": VISION_HIDDEN,
        "intermediate_size": VISION_MLP,
        "num_attention_heads": VISION_HEADS,
        "num_hidden_layers": VISION_LAYERS,
        "pos_emb_height": VISION_GRID,
        "pos_emb_time": 4,
        "pos_emb_width": VISION_GRID,
    }
    if int4:
        text["quantization_config"] = _quantization()
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": BOS,
        "dtype": dtype,
        "eos_token_id": EOS,
        "ignore_index": -100,
        "image_token_id": MEDIA,
        "media_placeholder_token_id": MEDIA,
        "pad_token_id": PAD,
        "projection_hidden_size": VISION_HIDDEN,
        "text_config": text,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": vision,
    }


def _quantization() -> dict[str, Any]:
    """The published block, with the vision part in the ignore list: transformers would look for packed weights there."""
    weights = {"group_size": INT4_GROUP, "num_bits": 4, "strategy": "group", "symmetric": True, "type": "int"}
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    return {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "format": "pack-quantized",
        "ignore": [*ignore, "re:.*vision_tower.*", "re:.*mm_projector.*"],
        "quant_method": "compressed-tensors",
    }


def build_tiny(dest: Path, seed: int, tokenizer: Path, dtype: DType = "float32", *, int4: bool = False) -> Path:
    """Write the miniature checkpoint.

    Args:
        dest: folder to fill; it is made when missing.
        seed: seed of the random weights; equal seeds give equal files.
        tokenizer: a folder with the SmolLM2 tokenizer (`tokenizer.json`, `tokenizer_config.json`).
        dtype: number type of the weights. In bfloat16 a random mixture of experts is chaotic (6 to 29 % between two
            implementations), so float32 is what comparisons need.
        int4: pack the routed experts in four bits, as the published checkpoint does. vLLM cannot run those on a CPU without AMX;
            elsewhere `target_model` may name the folder.

    Returns:
        `dest`, with `config.json`, `generation_config.json`, `preprocessor_config.json`, the tokenizer, two shards and their
        index. About 35 M parameters, of which 25 M are embeddings and `lm_head`.

    Raises:
        KitError: `tokenizer` lacks a file, or is another tokenizer: the special tokens to rename are not there.
    """
    import torch
    from safetensors.torch import save_file

    dest.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(tokenizer, dest)
    _write_json(dest / "config.json", config(dtype, int4=int4))
    _write_json(dest / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD})
    _write_json(dest / "preprocessor_config.json", {"media_proc_cfg": _media_processing()})

    generator = torch.Generator().manual_seed(seed)
    weights = {
        # The correction bias only ranks experts, and is float32 whatever the rest is.
        name: value if name.endswith("e_score_correction_bias") else value.to(getattr(torch, dtype))
        for name, value in _weights(generator)
    }
    if int4:
        experts = [name for name in weights if ".mlp.experts." in name]
        weights |= {f"{name}_{part}": t for name in experts for part, t in packed(weights.pop(name)).items()}
    last = {name for name in weights if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
    shards = [{k: v for k, v in weights.items() if k not in last}, {k: v for k, v in weights.items() if k in last}]
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file(shard, dest / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    total = sum(value.numel() * value.element_size() for value in weights.values())
    _write_json(dest / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    return dest


def _weights(generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, in float32.

    Scales are chosen so that the logits differ clearly from each other: with the usual tiny initialisation every token is
    equally likely, and a comparison of two implementations would show nothing.
    """
    import torch

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    def linear(out: int, into: int, gain: float = 1.0) -> torch.Tensor:
        return normal(out, into, std=gain / into**0.5)

    def norm(width: int) -> torch.Tensor:
        return 1 + normal(width, std=0.1)

    def mlp(prefix: str, width: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{prefix}.gate_proj.weight", linear(width, HIDDEN)
        yield f"{prefix}.up_proj.weight", linear(width, HIDDEN)
        yield f"{prefix}.down_proj.weight", linear(HIDDEN, width)

    model = "language_model.model"
    yield f"{model}.embed_tokens.weight", normal(VOCAB_SIZE, HIDDEN, std=0.5)
    for layer in range(N_LAYERS):
        at = f"{model}.layers.{layer}"
        yield f"{at}.input_layernorm.weight", norm(HIDDEN)
        yield f"{at}.post_attention_layernorm.weight", norm(HIDDEN)
        yield f"{at}.self_attn.q_a_proj.weight", linear(Q_RANK, HIDDEN)
        yield f"{at}.self_attn.q_a_layernorm.weight", norm(Q_RANK)
        yield f"{at}.self_attn.q_b_proj.weight", linear(HEADS * (NOPE + ROPE), Q_RANK)
        yield f"{at}.self_attn.kv_a_proj_with_mqa.weight", linear(KV_RANK + ROPE, HIDDEN)
        yield f"{at}.self_attn.kv_a_layernorm.weight", norm(KV_RANK)
        yield f"{at}.self_attn.kv_b_proj.weight", linear(HEADS * (NOPE + VALUE), KV_RANK)
        yield f"{at}.self_attn.o_proj.weight", linear(HIDDEN, HEADS * VALUE)
        if layer == 0:
            yield from mlp(f"{at}.mlp", DENSE)
            continue
        yield f"{at}.mlp.gate.weight", linear(EXPERTS, HIDDEN, gain=2.0)
        yield f"{at}.mlp.gate.e_score_correction_bias", normal(EXPERTS, std=0.1)
        for expert in range(EXPERTS):
            yield from mlp(f"{at}.mlp.experts.{expert}", EXPERT)
        yield from mlp(f"{at}.mlp.shared_experts", EXPERT)
    yield f"{model}.norm.weight", norm(HIDDEN)
    yield "language_model.lm_head.weight", linear(VOCAB_SIZE, HIDDEN, gain=2.0)

    tower = "vision_tower"
    yield f"{tower}.patch_embed.proj.weight", normal(VISION_HIDDEN, 3, PATCH, PATCH, std=0.04)
    yield f"{tower}.patch_embed.proj.bias", normal(VISION_HIDDEN, std=0.02)
    yield f"{tower}.patch_embed.pos_emb.weight", normal(VISION_GRID, VISION_GRID, VISION_HIDDEN, std=0.1)
    for block in range(VISION_LAYERS):
        at = f"{tower}.encoder.blocks.{block}"
        for name in ("norm0", "norm1"):
            yield f"{at}.{name}.weight", norm(VISION_HIDDEN)
            yield f"{at}.{name}.bias", normal(VISION_HIDDEN, std=0.02)
        for name, out, into in (
            ("wqkv", 3 * VISION_HIDDEN, VISION_HIDDEN),
            ("wo", VISION_HIDDEN, VISION_HIDDEN),
            ("mlp.fc0", VISION_MLP, VISION_HIDDEN),
            ("mlp.fc1", VISION_HIDDEN, VISION_MLP),
        ):
            yield f"{at}.{name}.weight", linear(out, into)
            yield f"{at}.{name}.bias", normal(out, std=0.02)
    yield f"{tower}.encoder.final_layernorm.weight", norm(VISION_HIDDEN)
    yield f"{tower}.encoder.final_layernorm.bias", normal(VISION_HIDDEN, std=0.02)
    merged = MERGE * MERGE * VISION_HIDDEN
    yield "mm_projector.pre_norm.weight", norm(VISION_HIDDEN)
    yield "mm_projector.pre_norm.bias", normal(VISION_HIDDEN, std=0.02)
    yield "mm_projector.proj.0.weight", linear(merged, merged)
    yield "mm_projector.proj.0.bias", normal(merged, std=0.02)
    yield "mm_projector.proj.2.weight", linear(HIDDEN, merged)
    yield "mm_projector.proj.2.bias", normal(HIDDEN, std=0.02)


def packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix `[out, in]` in symmetric int4 as compressed-tensors stores it: eight numbers in an int32, a scale for a group."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    groups = weight.float().view(len(weight), -1, INT4_GROUP)
    scale = (groups.abs().amax(2, keepdim=True) / 7).bfloat16()
    numbers = (groups / scale.float()).round().clamp(-8, 7).to(torch.int8).flatten(1)
    shape = torch.tensor(weight.shape, dtype=torch.int32)
    return {"packed": pack_to_int32(numbers, 4), "scale": scale[..., 0].contiguous(), "shape": shape}


def _media_processing() -> dict[str, Any]:
    """What vLLM's image processor is built from; it is built even when only text is served."""
    return {
        "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "in_patch_limit": 16384,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": None,
        "max_num_frames_each_video": None,
        "merge_kernel_size": MERGE,
        "patch_limit_on_one_side": 512,
        "patch_size": PATCH,
        "sample_fps": 2.0,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
    }


def _write_tokenizer(source: Path, dest: Path) -> None:
    """Copy a SmolLM2 tokenizer with `SPECIAL_TOKENS` renamed, in the vocabulary and in the list of added tokens alike."""
    try:
        tokenizer = json.loads((source / "tokenizer.json").read_bytes())
        settings = json.loads((source / "tokenizer_config.json").read_bytes())
        added = {token["id"]: token for token in tokenizer["added_tokens"]}
        vocabulary = tokenizer["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KitError(
            f"no tokenizer for the miniature in {source}", seen=repr(error), wanted="the SmolLM2 tokenizer's files"
        ) from None
    names = {old: at for old, at in vocabulary.items() if at in SPECIAL_TOKENS}
    if len(vocabulary) != VOCAB_SIZE or len(names) != len(SPECIAL_TOKENS) or any(at not in added for at in SPECIAL_TOKENS):
        raise KitError(
            f"the tokenizer in {source} is not SmolLM2's",
            seen=f"{len(vocabulary)} tokens, special ids {sorted(added)[:20]}",
            wanted=f"{VOCAB_SIZE} tokens, special ids 0 .. 16",
        )
    for old, at in names.items():
        del vocabulary[old]
        vocabulary[SPECIAL_TOKENS[at]] = at
        added[at]["content"] = SPECIAL_TOKENS[at]
    tokenizer["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    # Lists of special tokens in here would bring the old names back as new tokens behind the vocabulary.
    for key in ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"):
        settings.pop(key, None)
    settings["pad_token"] = SPECIAL_TOKENS[PAD]
    _write_json(dest / "tokenizer.json", tokenizer)
    settings.pop("chat_template", None)
    _write_json(dest / "tokenizer_config.json", settings)
    (dest / "chat_template.jinja").write_bytes(TEMPLATE.read_bytes())


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
