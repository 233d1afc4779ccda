"""What the target is, as numbers, wherever it is described: shipped with the kit, in a folder, or on the hub.

Everything that a later stage needs to know about the target comes from its own `config.json`, never from a constant in the kit:
the published K2 and K2.5 configs differ in the norm's epsilon, the rope scaling, the context, the pad id and the weight names,
and each of these, taken from the wrong one, trains a drafter that is quietly worse.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3kit import hub, target_cache, tiny
from eagle3kit.errors import KitError
from eagle3kit.model_config import (
    Mla,
    Moe,
    Quantization,
    Rope,
    dtype_bytes,
    integer,
    number,
    read_quantization,
    read_rope,
    rounded,
)
from eagle3kit.model_folder import tensor_names

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
        read = functools.partial(integer, text, where)

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
            rms_norm_eps=rounded(number(text, where, "rms_norm_eps")),
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
        ids = (self.bos_token_id, ", ".join(map(str, self.eos_token_ids)), self.pad_token_id)
        rows += [
            ("norm epsilon", f"{self.rms_norm_eps:g}"),
            ("rope", self.rope.summary),
            ("context", str(self.max_position_embeddings)),
            ("bos / eos / pad", " / ".join("none" if one is None else str(one) for one in ids)),
            ("tied embeddings", "yes" if self.tie_word_embeddings else "no"),
            ("weight names", f"{self.weight_prefix}model.*, {self.weight_prefix}lm_head.*"),
            ("quantisation", self.quantization.summary if self.quantization else f"none ({self.dtype or 'type not given'})"),
            ("weights", f"{size / 1e9:,.4g} GB ({how})" if size < 1e12 else f"{size / 1e12:.3f} TB ({how})"),
        ]
        if self.unverified:
            rows.append(("unverified", ", ".join(self.unverified)))
        return [{"what": what, "value": value} for what, value in rows]


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
        cache: folder of materialised targets; by default `target_cache.folder()`.

    Returns:
        The target and the reason. For the Kimi targets that is the hub's own file where the hub (or its local cache) has it, else
        the shipped reference values; for the two small ones the folder on this machine where it exists already.

    Raises:
        KitError: the name is unknown, the folder has no usable `config.json`, or the hub refuses it.
    """
    model = SMOLLM2 if model == HUB_IDS[SMOLLM2] else model
    if model in (SMOLLM2, TINY):
        folder = target_cache.find(model, cache or target_cache.folder())
        if folder is not None:
            return read_folder(folder, model), f"config.json of {folder}"
        if model == SMOLLM2:
            return reference(SMOLLM2), "shipped values; the model itself is not on this machine yet"
        return Target.from_config(tiny.config(), name=TINY, source=TINY), "the kit's own miniature, not built on this machine yet"
    if is_folder(model):
        folder = Path(model).expanduser().resolve()
        return read_folder(folder, folder.name), f"config.json of {folder}"
    hub_id = hub_id_of(model)
    path, reason = hub.config_file(hub_id, revision, "target_model and target_revision")
    name = next((n for n, i in HUB_IDS.items() if i == hub_id), None)
    if path is not None:
        size = hub.weight_bytes(hub_id, revision)
        return Target.from_config(json.loads(path.read_bytes()), name=name or "", source=hub_id, bytes_on_disk=size), reason
    if name is None:
        raise KitError(
            f"the config of {hub_id} cannot be read",
            seen=reason,
            fix="give this machine access to the hub, or set target_model to a local folder with the model",
        )
    return reference(name), f"shipped reference values, because {reason}"


def read_folder(folder: Path, name: str) -> Target:
    """The target in a folder: its `config.json`, the size of its weight files and the prefix of their names.

    Raises:
        KitError: there is no usable `config.json`, or a weight file is cut short.
    """
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


def is_folder(model: str) -> bool:
    """Whether `target_model` names a folder of this machine."""
    return Path(model).expanduser().is_dir()


def hub_id_of(model: str) -> str:
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
