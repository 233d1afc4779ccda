"""Page 02: the config of the drafter to be trained, field by field, each with its reason.

A drafter's config fails quietly. A rope base that is lost between two styles of config, a sliding window that nobody asked for,
a head width taken from the target's latent attention, an auxiliary layer counted in another system's numbers: each of them
trains, loads and answers, and the acceptance length is near 1. So no field is left to a default. `drafter_check` then lets both
programs that will use the file read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from eagle3kit import layers
from eagle3kit.drafter import AUX, ROPE, Parent, size, target_values, text
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.target import Target

HEAD_DIM = 128
"""Width of a head where the target's own does not apply: that of the published drafters of this family."""

Source = Literal["parent", "target", "chosen", "dropped"]

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
    prescribed = target_values(target)
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
    part = f"{100 * size / target.vocab_size:.0f} %"
    share = f"{part} of the target's {target.vocab_size:,} tokens; lm_head is read for every drafted token"
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
        ("fc_norm", "a norm for each depth in place of one over all; excludes norm_before_fc"),
        ("norm_output", "what one draft step hands to the next keeps its size (EAGLE 3.1)"),
    ):
        value = bool(getattr(params, f"drafter_{name}"))
        choose(name, value, f"drafter_{name}: {str(value).lower()}; {why}")
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


def size_choices(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows for a table: what the width of the MLP and the draft vocabulary cost, beside what is published for Kimi's width.

    Args:
        values: of the derived config (`Derivation.values`); its own choices are marked.
    """
    kimi = values["hidden_size"] == KIMI_WIDTH
    full, own = values["vocab_size"], (values["intermediate_size"], values["draft_vocab_size"])
    rows = []
    for width in sorted({own[0], *((12288, 18432) if kimi else ())}):
        for vocabulary in sorted({own[1], full, *((32000,) if kimi else ())}):
            found = size({**values, "intermediate_size": width, "draft_vocab_size": vocabulary})
            rows.append(
                {
                    "MLP width": width,
                    "draft vocabulary": f"{vocabulary:,}" + (" (full)" if vocabulary == full else ""),
                    "parameters": found.parameters,
                    "without embed_tokens and lm_head": found.trained,
                    "bytes in bfloat16": found.bytes_bf16,
                    "published": PUBLISHED_SIZES.get((width, vocabulary), "") if kimi else "",
                    "": "this config" if (width, vocabulary) == own else "",
                }
            )
    return rows


_NORM_READERS = {
    "norm_before_residual": (
        "the residual starts from the normed state",
        "no such field: it starts from the raw state",
        "false only",
    ),
    "norm_before_fc": ("one norm over the three states, input_norm", "no such field, and no place for its tensor", "false only"),
    "fc_norm": ("a norm for each of the three states", "the same", "true or false"),
    "norm_output": (
        "normed states go to the next draft step",
        "another thing of that name: a norm before lm_head, on where the field is missing",
        "false only, by leaving it out",
    ),
}
"""What vLLM 0.32 and SpecForge 0.2.0 do where a norm's field is true, and what an export can carry; read in both packages."""


def norm_choices(values: Mapping[str, Any]) -> list[dict[str, str]]:
    """Rows for a table: who reads each of the four norms, and whether this drafter can leave speculators' form with it.

    Args:
        values: of the derived config (`Derivation.values`).
    """
    return [
        {
            "norm": name,
            "here": text(values[name]),
            "true in vLLM 0.32, both forms": engine,
            "true in SpecForge 0.2.0": other,
            "exported": carried,
            "this drafter": "stays with vLLM" if values[name] and carried != "true or false" else "can be exported",
        }
        for name, (engine, other, carried) in _NORM_READERS.items()
    ]


KIMI_WIDTH = 7168
PUBLISHED_SIZES = {
    (12288, 32000): "about 0.83 B without embed_tokens and lm_head",
    (12288, 163840): "lightseekorg/kimi-k2.5-eagle3: about 6.0 GB; 8 key and value heads give 5.95 GB, 64 give 6.36 GB",
}
"""What is published of drafters of Kimi's width, by MLP width and draft vocabulary."""
