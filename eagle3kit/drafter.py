"""A drafter: the fields of its config, its tensors, and a published one read from whichever form its file has.

A field that a published drafter's file does not give stays unknown; nothing is filled in. Neither torch, speculators nor vLLM is
imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle3kit import hub, model_config
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.target import PRESETS, Target

MADE_BY = "02_build_k25_config"
"""The notebook that makes the config."""

REFERENCE = "reference"

REFERENCE_ID = "AQ-MedAI/Kimi-K2-Instruct-eagle3"

PRESET = PRESETS / "k2-eagle3.json"

AUX = "eagle_aux_hidden_state_layer_ids"

ROPE = "rope_parameters"


# ---- what a field means


@dataclass(frozen=True)
class Field:
    """A field of a drafter's config.

    Attributes:
        meaning: what it decides.
        engine: what vLLM, or where that matters more the trainer, does with it.
    """

    meaning: str
    engine: str


FIELDS: dict[str, Field] = {
    "architectures": Field(
        "the class that the weights belong to",
        "vLLM serves speculators' form with a Llama layer, and LlamaForCausalLMEagle3, by one and the same class",
    ),
    "model_type": Field("the kind of decoder layer", "vLLM accepts llama and qwen3 in speculators' form, nothing else"),
    "hidden_size": Field(
        "width of the residual stream: the drafter reads the target's hidden states and uses its embeddings and lm_head rows",
        "the trainer refuses a width that is not the target's",
    ),
    "vocab_size": Field(
        "tokens that the drafter can read: the target's vocabulary", "vLLM scatters the drafter's logits over this many tokens"
    ),
    "draft_vocab_size": Field(
        "tokens that the drafter can propose: fewer are faster, and a token outside is never accepted",
        "rows of lm_head and length of the map d2t; the full vocabulary needs no map",
    ),
    "num_hidden_layers": Field("decoder layers that run for every drafted token", "vLLM builds them one after another"),
    "num_attention_heads": Field(
        "query heads of the drafter's own attention", "must divide evenly over the GPUs of tensor parallelism"
    ),
    "num_key_value_heads": Field(
        "key and value heads: fewer make a smaller cache", "size of the drafter's KV cache, beside the target's"
    ),
    "head_dim": Field(
        "width of a head", "left out, both programs divide hidden_size by the heads, and rotate that width: 112 for Kimi, not 128"
    ),
    "intermediate_size": Field("width of the drafter's MLP: most of its own weights", "read from memory for every drafted token"),
    "hidden_act": Field("activation of the MLP", "vLLM's Llama MLP takes silu and refuses everything else"),
    "rms_norm_eps": Field(
        "what is added under the root in every norm",
        "the trainer also norms the target's hidden states with it to make its training targets, so it is the target's",
    ),
    ROPE: Field(
        "base and scaling of the rotary positions", "vLLM falls back to a base of 10,000 without a word when rope_theta is lost"
    ),
    "max_position_embeddings": Field(
        "longest position that the drafter is asked for",
        "vLLM raises a smaller value to the context that the target is served with",
    ),
    AUX: Field(
        "the depths of the target whose hidden states the drafter is fed",
        "vLLM records exactly these while the target runs; read in another system's numbers, each is one layer off",
    ),
    "norm_before_residual": Field(
        "whether the drafter's residual stream starts from the normed or from the raw hidden state",
        "when it is missing, vLLM assumes true and speculators false: a drafter without it is served in another way than trained",
    ),
    "norm_before_fc": Field(
        "one norm over the joined auxiliary states, before fc", "one more tensor, input_norm; both assume false"
    ),
    "fc_norm": Field("a norm for each auxiliary state instead of one for all", "excludes norm_before_fc"),
    "norm_output": Field(
        "feed normed states from one draft step to the next, so that they do not grow with depth (EAGLE 3.1)",
        "decides which states vLLM hands to the next step; both assume false",
    ),
    "layer_types": Field(
        "full attention or a sliding window, for each layer",
        "speculators would make it a window of 2,048 tokens; vLLM does as told",
    ),
    "attention_bias": Field("biases in q, k, v and o", "adds tensors that no published EAGLE-3 drafter of this layout has"),
    "mlp_bias": Field("biases in the MLP", "adds tensors that no published EAGLE-3 drafter of this layout has"),
    "tie_word_embeddings": Field(
        "whether lm_head is the embedding table", "cannot be: lm_head has a row for each draft token only"
    ),
    "pad_token_id": Field(
        "the id that fills up a batch", "the trainer builds the embeddings with it; without weight, because they stay frozen"
    ),
    "bos_token_id": Field("the id that begins a text", "neither uses it while drafting; other tools that read the file do"),
    "eos_token_id": Field("the id that ends a text", "neither uses it while drafting; the target decides when to stop"),
    "dtype": Field("number type of the stored weights", "vLLM converts them to the type that it serves the target in"),
    "initializer_range": Field("spread of fresh weights", "used once, when training starts from nothing"),
    "embed_requires_grad": Field(
        "whether the embeddings are trained", "they are the target's; training them makes another table"
    ),
    "speculative_tokens": Field(
        "tokens drafted at each step when nobody says otherwise", "`vllm serve` on the drafter's own folder takes it from here"
    ),
    "verifier": Field(
        "the target that the drafter belongs to", "the trainer copies embeddings, lm_head rows and the norm from it"
    ),
}
"""Every field that matters for a drafter, in the order of the tables."""

FIELD_GROUPS: dict[str, tuple[str, ...]] = {
    "size and vocabulary": (
        "architectures",
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "hidden_act",
        "rms_norm_eps",
        "vocab_size",
        "draft_vocab_size",
        "mlp_bias",
        "tie_word_embeddings",
    ),
    "attention and positions": (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "attention_bias",
        "layer_types",
        ROPE,
        "max_position_embeddings",
    ),
    "EAGLE-3's own": (
        AUX,
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "embed_requires_grad",
        "speculative_tokens",
        "verifier",
    ),
    "ids and bookkeeping": ("pad_token_id", "bos_token_id", "eos_token_id", "dtype", "initializer_range"),
}
"""The fields by what they are about."""


def text(value: Any) -> str:
    """A value for a table: ids without thousands separators, rope in a few words, None as unknown."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(text, value))
    if isinstance(value, Mapping):
        if "rope_theta" in value:
            return model_config.read_rope({ROPE: value}, "the config").summary
        return ", ".join(f"{key} {text(item)}" for key, item in value.items())
    return str(value)


# ---- tensors


def tensors(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the drafter's tensors, counted from its config by the published layout (speculators' names).

    `d2t` and `t2d`, the vocabulary map, are among them when the draft vocabulary is reduced; they are not parameters. Inputs of
    the first layer are twice as wide: the token's embedding beside the hidden state.
    """
    v = values
    h, heads = v["hidden_size"], v["num_attention_heads"] * v["head_dim"]
    kv, width, aux = v["num_key_value_heads"] * v["head_dim"], v["intermediate_size"], len(v[AUX])
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (v["vocab_size"], h)}
    if v["norm_before_fc"]:
        shapes["input_norm.weight"] = (aux * h,)
    if v["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (h,) for i in range(aux)}
    shapes["fc.weight"] = (h, aux * h)
    for i in range(v["num_hidden_layers"]):
        name, inputs = f"layers.{i}", 2 * h if i == 0 else h
        if i == 0:
            shapes[f"{name}.hidden_norm.weight"] = (h,)
        shapes |= {
            f"{name}.input_layernorm.weight": (h,),
            f"{name}.self_attn.q_proj.weight": (heads, inputs),
            f"{name}.self_attn.k_proj.weight": (kv, inputs),
            f"{name}.self_attn.v_proj.weight": (kv, inputs),
            f"{name}.self_attn.o_proj.weight": (h, heads),
            f"{name}.post_attention_layernorm.weight": (h,),
            f"{name}.mlp.gate_proj.weight": (width, h),
            f"{name}.mlp.up_proj.weight": (width, h),
            f"{name}.mlp.down_proj.weight": (h, width),
        }
    shapes |= {"norm.weight": (h,), "lm_head.weight": (v["draft_vocab_size"], h)}
    if v["draft_vocab_size"] != v["vocab_size"]:
        shapes |= {"d2t": (v["draft_vocab_size"],), "t2d": (v["vocab_size"],)}
    return shapes


FROM_TARGET = ("embed_tokens.weight", "lm_head.weight")
"""Tensors that are copied from the target and, in speculators 0.9, stay frozen."""

MAPS = {"d2t": 8, "t2d": 1}
"""Tensors of the vocabulary map, and the bytes of an entry: int64 and bool."""


@dataclass(frozen=True)
class Size:
    """How large a drafter is.

    Attributes:
        parameters: of every tensor in its file, the vocabulary map left out.
        trained: of those that training changes.
        bytes_bf16: of its file, in bfloat16, with the map.
    """

    parameters: int
    trained: int
    bytes_bf16: int


def size(values: Mapping[str, Any]) -> Size:
    """How large a drafter with this config is."""
    counts = {name: math.prod(shape) for name, shape in tensors(values).items()}
    parameters = sum(count for name, count in counts.items() if name not in MAPS)
    trained = parameters - sum(counts[name] for name in FROM_TARGET)
    maps = sum(count * MAPS[name] for name, count in counts.items() if name in MAPS)
    return Size(parameters, trained, 2 * parameters + maps)


def tensor_rows(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows for a table: `tensor`, `shape`, `parameters`, `share`, `bf16`, `training`."""
    total = size(values).parameters
    rows: list[dict[str, Any]] = []
    for name, shape in tensors(values).items():
        count = math.prod(shape)
        is_map = name in MAPS
        rows.append(
            {
                "tensor": name,
                "shape": " x ".join(f"{n:,}" for n in shape),
                "parameters": None if is_map else count,
                "share": "" if is_map else f"{100 * count / total:.1f} %",
                "in the file": _bytes(count * MAPS.get(name, 2)),
                "training": "made by notebook 04" if is_map else "copied from the target" if name in FROM_TARGET else "trained",
            }
        )
    return rows


def _bytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


# ---- a published drafter


@dataclass(frozen=True)
class Parent:
    """A published drafter's config, as far as it is known.

    Attributes:
        name: what it was asked for by, or the hub id of the reference values.
        origin: `folder`, `hub`, or `reference` for the values shipped with the kit.
        reason: why it is read from there.
        values: the fields of `FIELDS` that it gives, in speculators' names whatever form the file has. A field that is missing
            is not known; nothing is filled in.
        implied: fields that the file itself was not seen to have but that follow from something published, and from what.
        others: names of fields in the file that are not in `FIELDS`.
        notes: what is odd about the file.
        folder: where its files are, None for reference values.
    """

    name: str
    origin: Literal["folder", "hub", "reference"]
    reason: str
    values: dict[str, Any]
    implied: dict[str, str]
    others: tuple[str, ...]
    notes: tuple[str, ...]
    folder: Path | None

    def status(self, field: str) -> str:
        """Whether a field is `published`, `implied` (not read, but following from what is published) or `unknown`."""
        if field not in self.values:
            return "unknown"
        return "implied" if field in self.implied else "published"


def read_parent(params: Params) -> Parent:
    """The drafter that `drafter_parent` names, and why it was read from where it was.

    `reference` is the published Kimi-K2 drafter as far as the kit knows it. For that drafter's hub id the kit falls back to the
    same values, with the reason recorded, when the hub cannot be reached; no other drafter has values to fall back to.

    Raises:
        KitError: the folder or hub id has no drafter's config, or the hub cannot be reached and no reference values exist.
    """
    name = params.drafter_parent
    if name == REFERENCE:
        return reference("drafter_parent: reference")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _read_file(folder.resolve() / "config.json", name, "folder", f"config.json of {folder.resolve()}")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise KitError(
            "drafter_parent is neither reference, nor a folder, nor a hub id",
            seen=name,
            wanted="reference, a folder that exists, or owner/name",
            fix="correct drafter_parent",
        )
    path, why = hub.config_file(name, "main", "drafter_parent")
    if path is not None:
        return _read_file(path, name, "hub", why)
    if name == REFERENCE_ID:
        return reference(f"shipped reference values, because {why}")
    raise KitError(
        f"the config of the drafter {name} cannot be read",
        seen=why,
        fix="give this machine access to the hub, or set drafter_parent to a local folder or to reference",
    )


def reference(reason: str) -> Parent:
    """The published Kimi-K2 drafter as far as the kit knows it: few fields, each published or following from what is."""
    config: dict[str, Any] = json.loads(PRESET.read_text(encoding="utf-8"))
    known = config.pop("_reference")
    return from_config(config, known["hub_id"], "reference", reason, implied=known["implied"])


_PLUMBING = {"_name_or_path", "_reference", "auto_map", "speculators_model_type", "speculators_version", "transformers_version"}
"""Fields that programs write for themselves, and that say nothing about the drafter."""


def from_config(
    config: Mapping[str, Any],
    name: str,
    origin: Literal["folder", "hub", "reference"],
    reason: str,
    *,
    implied: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Parent:
    """Read a drafter's `config.json` that is in memory: speculators' form, or the flat form of SGLang, SpecForge and TorchSpec.

    Raises:
        KitError: it is not the config of an EAGLE-3 drafter.
    """
    nested = config.get("transformer_layer_config")
    flat: dict[str, Any] = (
        {**nested, **{k: v for k, v in config.items() if k != "transformer_layer_config"}} if nested else {**config}
    )
    eagle = flat.pop("eagle_config", None) or {}
    names = flat.get("architectures") or []
    is_drafter = any("eagle3" in str(architecture).lower() for architecture in names)
    if not (is_drafter or eagle or "draft_vocab_size" in flat or flat.get("speculators_model_type") == "eagle3"):
        raise KitError(
            f"the config of {name} is not that of an EAGLE-3 drafter",
            seen=f"architectures {names}",
            wanted="an Eagle3 architecture, an eagle_config or a draft_vocab_size",
            fix="set drafter_parent to a drafter, not to a target",
        )
    notes = []
    values = {key: flat[key] for key in FIELDS if flat.get(key) is not None}
    used = {*values, *_PLUMBING, ROPE, "rope_scaling", "rope_theta", "torch_dtype", "speculators_config"}
    for key in ("norm_before_fc", AUX):  # the flat form keeps these in a block of its own, where vLLM looks first
        if eagle.get(key) is not None:
            values[key] = eagle[key]
    if "dtype" not in values and flat.get("torch_dtype") is not None:
        values["dtype"] = flat["torch_dtype"]
    values.pop(ROPE, None)
    if any(flat.get(key) is not None for key in (ROPE, "rope_scaling", "rope_theta")):
        try:
            values[ROPE] = _rope(model_config.read_rope(flat, f"the config of {name}"))
        except KitError as error:  # it is only shown; the new drafter takes its rope from the target
            notes.append(f"{error.what}: readers fall back to a base of 10000")
    speculators = flat.get("speculators_config") or {}
    for method in (speculators.get("proposal_methods") or [])[:1]:
        values["speculative_tokens"] = method.get("speculative_tokens")
    if (speculators.get("verifier") or {}).get("name_or_path"):
        values["verifier"] = speculators["verifier"]["name_or_path"]
    others = sorted({key for key in flat if key not in used and flat[key] is not None} | ({"eagle_config"} if eagle else set()))
    return Parent(name, origin, reason, values, dict(implied or {}), tuple(others), tuple(notes), folder)


def _read_file(path: Path, name: str, origin: Literal["folder", "hub"], reason: str) -> Parent:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise KitError(f"{path.parent} has no config.json", fix="set drafter_parent to a drafter's folder") from None
    except (ValueError, OSError) as error:
        raise KitError(f"{path} cannot be read", seen=error, fix="copy or download the drafter again") from None
    if not isinstance(config, dict):
        raise KitError(
            f"{path} is not a config", seen=type(config).__name__, wanted="a JSON object", fix="correct drafter_parent"
        )
    return from_config(config, name, origin, reason, folder=path.parent)


# ---- what a target prescribes


def _rope(rope: model_config.Rope) -> dict[str, Any]:
    """A rope as one block in transformers 5's names: base and scaling can then not be separated from each other."""
    return {"rope_type": "default", **(rope.scaling or {}), "rope_theta": rope.theta}


def target_values(target: Target) -> dict[str, Any]:
    """What a target prescribes for its drafter, by the drafter's names."""
    return {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": target.rms_norm_eps,
        ROPE: _rope(target.rope),
        "max_position_embeddings": target.max_position_embeddings,
        "pad_token_id": target.pad_token_id,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": _eos(target),
    }


def _eos(target: Target) -> int | list[int] | None:
    ids = list(target.eos_token_ids)
    return (ids[0] if len(ids) == 1 else ids) if ids else None


def verifier_path(verifier: str | Path) -> str:
    """The target as the config names it: an absolute folder, because the trainer stores it word for word, or a hub id.

    Raises:
        KitError: it is neither.
    """
    path = Path(verifier).expanduser()
    if path.is_dir():
        return str(path.resolve())
    name = str(verifier)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise KitError("the target's folder is not there", seen=name, wanted="a folder or owner/name", fix="correct target_model")
    return name


# ---- speculators' form

_OWN = (
    "draft_vocab_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "embed_requires_grad",
    AUX,
)
"""Fields that speculators keeps outside the decoder layer's config."""


def kept(derivation: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `derivation.json` that are in the config, by name."""
    return {field["name"]: field["value"] for field in derivation["fields"] if field["source"] != "dropped"}


def build_config(derivation: Mapping[str, Any], verifier: str | Path) -> Any:
    """The config as speculators' own `Eagle3SpeculatorConfig`. Imports speculators: call it in a process of its own.

    The target's architecture is recorded from the derivation, where speculators would read it from the target's files: the same
    value, and it can also be had where the target is not on this machine.

    Args:
        derivation: `Derivation.as_json()`.
        verifier: the target's folder or hub id.

    Raises:
        KitError: speculators refuses the fields, or the folder is not there.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    values = kept(derivation)
    own = (*_OWN, "speculative_tokens", "architectures", "model_type")
    try:
        return Eagle3SpeculatorConfig(
            transformer_layer_config=LlamaConfig(**{key: value for key, value in values.items() if key not in own}),
            architectures=values["architectures"],
            **{key: values[key] for key in _OWN},
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=values["speculative_tokens"])],
                default_proposal_method="greedy",
                verifier=VerifierConfig(
                    name_or_path=verifier_path(verifier), architectures=[derivation["target"]["architecture"]]
                ),
            ),
        )
    except (ValueError, TypeError, KeyError) as error:  # pydantic's and huggingface_hub's validation errors are ValueErrors
        raise KitError("speculators refuses the drafter's config", seen=error, fix="correct the drafter_* parameters") from error


def flat_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config in speculators' form, by the names of `FIELDS`."""
    speculators = config["speculators_config"]
    return {
        **config["transformer_layer_config"],
        **{key: config[key] for key in (*_OWN, "architectures")},
        "speculative_tokens": speculators["proposal_methods"][0]["speculative_tokens"],
    }
