"""The parts of a model's `config.json` that come in more than one style: experts, latent attention, rope, quantisation.

Target and drafter are read with the same functions. What has no safe default is an error, never a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3kit.errors import KitError


@dataclass(frozen=True)
class Moe:
    """Mixture of experts.

    Attributes:
        experts: routed experts of a layer.
        experts_per_token: how many of them a token visits.
        shared_experts: experts that every token visits.
        intermediate_size: width of one expert.
        dense_layers: leading layers that have an ordinary MLP instead.
    """

    experts: int
    experts_per_token: int
    shared_experts: int
    intermediate_size: int
    dense_layers: int


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: ranks of the query and key-value projections, and the three head widths.

    `q_lora_rank` is None where queries are projected in one step.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        theta: the base. It is never assumed: a base lost between two config styles costs most of the acceptance.
        scaling: the scaling block with `rope_type` (`yarn` and others) and its numbers; None without scaling.
    """

    theta: float
    scaling: dict[str, Any] | None = None

    @property
    def summary(self) -> str:
        """For a table: `theta 50000, yarn x64 from 4096`."""
        text = f"theta {self.theta:g}"
        if self.scaling:
            text += f", {self.scaling.get('rope_type')} x{self.scaling.get('factor', 1):g}"
            if "original_max_position_embeddings" in self.scaling:
                text += f" from {self.scaling['original_max_position_embeddings']}"
        return text


@dataclass(frozen=True)
class Quantization:
    """How the weights are stored.

    Attributes:
        method: `quant_method` of the config, for example `fp8` or `compressed-tensors`.
        bits: bits of a quantised weight.
        overhead_bits: bits a weight for scales (and nothing for zero points, which no target here has).
        group: what shares a scale, in words.
        parts: which of the groups of `Target.parameters` are quantised.
    """

    method: str
    bits: int
    overhead_bits: float
    group: str
    parts: tuple[str, ...]

    @property
    def summary(self) -> str:
        """For a table: `compressed-tensors 4 bit, groups of 32: routed experts`."""
        return f"{self.method} {self.bits} bit, {self.group}: {', '.join(self.parts) or 'nothing'}"


def read_rope(config: Mapping[str, Any], where: str) -> Rope:
    """Rope base and scaling, from both styles of config.

    Older files have `rope_theta` and `rope_scaling`; transformers 5 writes one `rope_parameters` with `rope_theta` in it and
    `rope_type: default` for no scaling. Readers of one style silently fall back to a base of 10000 on the other.

    Args:
        config: the config of a language model.
        where: what to call it in errors.

    Raises:
        KitError: there is no base, the two styles contradict each other, or layers have different ropes.
    """
    new = config.get("rope_parameters") or {}
    old = config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in new.values()):
        raise KitError(f"{where} gives different ropes to different layers", seen=new, wanted="one rope for all layers")
    thetas = {float(block["rope_theta"]) for block in (config, new, old) if block.get("rope_theta") is not None}
    if not thetas:
        raise KitError(
            f"{where} has no rope_theta",
            seen="neither rope_theta nor rope_parameters.rope_theta",
            wanted="the base of the rotary embedding, which must not be guessed",
            fix="add rope_theta to the config.json, with the value the model was trained with",
        )
    if len(thetas) > 1:
        raise KitError(f"{where} gives two rope bases", seen=sorted(thetas), wanted="one rope_theta", fix="remove the wrong one")
    blocks = [_scaling(block) for block in (new, old)]
    given = [block for block in blocks if block]
    if len(given) == 2 and given[0] != given[1]:
        raise KitError(
            f"{where} has rope_parameters and rope_scaling that differ", seen=given, wanted="one", fix="remove the wrong one"
        )
    return Rope(thetas.pop(), given[0] if given else None)


def _scaling(block: Mapping[str, Any]) -> dict[str, Any] | None:
    """A scaling block under the newer names, None for no scaling."""
    scaling = {k: v for k, v in block.items() if k not in ("rope_theta", "type")}
    kind = block.get("rope_type", block.get("type", "default"))
    return None if kind == "default" else {"rope_type": kind, **scaling, **{"rope_type": kind}}


def read_quantization(config: Mapping[str, Any] | None, prefix: str, where: str) -> Quantization | None:
    """What a `quantization_config` means for each part of the model.

    Which parts are quantised is asked of the ignore list with the real names of modules, the way vLLM asks it, because that list
    is where checkpoints of the same method differ: K2 stores everything in fp8, K2.5 only the routed experts in int4.

    Raises:
        KitError: the method is one that the kit cannot count.
    """
    if not config:
        return None
    method = str(config.get("quant_method", ""))
    layer = f"{prefix}model.layers.1"
    modules = {
        "lm_head": f"{prefix}lm_head",
        "attention": f"{layer}.self_attn.o_proj",
        "dense mlp": f"{prefix}model.layers.0.mlp.gate_proj",
        "shared experts": f"{layer}.mlp.shared_experts.gate_proj",
        "routed experts": f"{layer}.mlp.experts.0.gate_proj",
    }
    if method == "compressed-tensors":
        weights = next(iter(config["config_groups"].values()))["weights"]
        bits, size = int(weights["num_bits"]), weights.get("group_size")
        overhead, group = (16 / size, f"groups of {size}") if size and size > 0 else (0.0, f"a scale a {weights.get('strategy')}")
        ignored = config.get("ignore") or []
    elif method == "fp8":
        bits, block = 8, config.get("weight_block_size")
        overhead = 32 / math.prod(block) if block else 0.0
        group = f"blocks of {block[0]}x{block[1]}" if block else "a scale a tensor"
        ignored = [*(config.get("modules_to_not_convert") or []), "lm_head"]
    else:
        raise KitError(f"{where} has a quantisation that the kit does not know", seen=method, wanted="fp8 or compressed-tensors")
    parts = tuple(part for part, module in modules.items() if not _ignored(module, ignored))
    return Quantization(method, bits, overhead, group, parts)


def _ignored(module: str, ignored: Sequence[str]) -> bool:
    """Whether an ignore list names a module: `re:` entries as patterns from the start, others as a name or the name's tail."""
    for entry in ignored:
        if entry.startswith("re:"):
            if re.match(entry[3:], module):
                return True
        elif module == entry or module.endswith(f".{entry}"):
            return True
    return False


def dtype_bytes(dtype: str) -> int:
    """Bytes of one number of a type, under any of the names that configs give it.

    Raises:
        KitError: it is another type. Weights in fp8 are a quantisation: their config names the type of all else.
    """
    known = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}
    size = known.get(dtype.removeprefix("torch."))
    if size is None:
        raise KitError("the number type of the target is not known", seen=dtype, wanted=", ".join(known), fix="set target_dtype")
    return size


def integer(config: Mapping[str, Any], where: str, key: str, default: int | None = None) -> int:
    """A field that is a whole number above 0; `default` stands in where the field is missing.

    Raises:
        KitError: it is missing without a default, or something else.
    """
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise KitError(f"{where} has no usable {key}", seen=value, wanted="a whole number above 0", fix="check the file")
    return value


def number(config: Mapping[str, Any], where: str, key: str) -> float:
    """A field that is a number above 0.

    Raises:
        KitError: it is missing, or something else.
    """
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise KitError(f"{where} has no usable {key}", seen=value, wanted="a number above 0", fix="check the file")
    return float(value)


def rounded(value: float) -> float:
    """Undo the trip through float32 that GGUF files cause: 9.999999747378752e-06 is 1e-05."""
    return float(f"{value:.6g}")
