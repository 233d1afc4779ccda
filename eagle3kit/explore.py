"""Page 01: a published drafter explained and held against its target, and two targets against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eagle3kit import layers
from eagle3kit.drafter import AUX, FIELD_GROUPS, FIELDS, ROPE, Parent, target_values, text
from eagle3kit.errors import KitError
from eagle3kit.target import Target


def explain(parent: Parent, target: Target) -> list[dict[str, str]]:
    """Rows for a table: each field of a published drafter, what it means, and whether it agrees with a target.

    Keys: `field`, `value`, `meaning`, `what the engine does with it`, `agrees with <target>`. A value that was not read but
    follows from what is published is marked as implied. Agreement is `yes`, `no: ...`, `unknown`, or empty where the drafter is
    free.
    """
    wanted, rows = target_values(target), []
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
        both.append({key: "none" if value is None else text(value) for key, value in {**target_values(target), **extra}.items()})
    first, second = both
    return [
        {"field": key, one.name: first[key], other.name: second[key], "what it does to a drafter": effects[key]}
        for key in effects
        if first[key] != second[key]
    ]
