"""Does the architecture of the published drafter carry over to this target? Each item with a verdict and its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from eagle3kit.drafter import AUX, ROPE, target_values, text
from eagle3kit.explore import Weights, new_since_k2, special_tokens
from eagle3kit.recipe import Derivation
from eagle3kit.target import Target

Verdict = Literal["passes", "needs a change", "unknown"]
PASSES: Verdict = "passes"
CHANGE: Verdict = "needs a change"
UNKNOWN: Verdict = "unknown"
COLOURS = {PASSES: "ok", CHANGE: "warn", UNKNOWN: "unknown"}
"""For the table: the verdict's words in the colour of a check's state."""


@dataclass(frozen=True)
class Item:
    """One thing that may or may not carry over; `value` is what the new drafter has."""

    item: str
    verdict: Verdict
    value: str
    evidence: str


_FIELDS = {
    "width": ("hidden_size",),
    "vocabulary": ("vocab_size",),
    "kind and number of layers": ("model_type", "num_hidden_layers"),
    "heads, key and value heads, head width": ("num_attention_heads", "num_key_value_heads", "head_dim"),
    "MLP width": ("intermediate_size",),
    "auxiliary layers, in vLLM's numbers": (AUX,),
    "epsilon of the norms": ("rms_norm_eps",),
    "rope": (ROPE,),
    "longest position": ("max_position_embeddings",),
    "pad id": ("pad_token_id",),
    "norms and residual": ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    "size of the draft vocabulary": ("draft_vocab_size",),
}
"""What is compared by the config's fields."""


def judge(derivation: Derivation, weights: Weights, before: Target, after: Target, engine: Mapping[str, Any]) -> list[Item]:
    """The seed assumption item by item: passes, needs a change, or unknown, each with the evidence.

    Args:
        derivation: the new drafter's config, and the published drafter that it was held against.
        weights: what was read of the published drafter's weights.
        before: the target of the published drafter; it stands in for a field of the drafter that is not known but follows the
            target.
        after: the target of the new drafter.
        engine: what vLLM made of the new config (`drafter_check.Made.engine`).
    """
    values, parent = derivation.values, derivation.parent
    items = [_by_fields(name, fields, derivation, before) for name, fields in _FIELDS.items()]

    def add(item: str, verdict: Verdict, value: str, evidence: str) -> None:
        items.append(Item(item, verdict, value, evidence))

    new = new_since_k2(after) if before.media_token_id is None and after.media_token_id is not None else frozenset()
    if new:
        names = special_tokens(after)[0]
        thinking = ", ".join(f"{names[i]} ({i})" for i in sorted(new) if "think" in names.get(i, ""))
        seen = "not read" if weights.proposable is None else f"without {len(new - weights.proposable)} of them"
        why = f"{len(new)} ids are new since K2, among them {thinking}; the published map: {seen}"
        add("meaning of the tokens", CHANGE, "counted anew, page 04", why)
    else:
        same = before.vocab_size == after.vocab_size
        why = "the same vocabulary" if same else "another vocabulary"
        add("meaning of the tokens", PASSES if same else CHANGE, "counted anew, page 04", why)
    why = "the drafter must have exactly the tables of the target that it is served with"
    add("embed_tokens, lm_head rows, last norm", CHANGE, f"copied from {after.name}", why)
    if all(item.verdict != CHANGE for item in items if item.item in _SHAPES):
        why = "as far as known the shapes are the same; whether they start better than fresh weights shows only in training"
        add("fc and the layer's weights as a start", UNKNOWN, "page 05", why)
    else:
        add("fc and the layer's weights as a start", CHANGE, "fresh weights", "other shapes")
    form, old_form = text(values["architectures"]), text(parent.values.get("architectures"))
    why = f"{old_form} there; vLLM serves both, the trainer writes its own, with layers.0. for midlayer."
    add("form of the file", PASSES if form == old_form else CHANGE, form, why)
    why = f"{before.weight_prefix}model.* there; the trainer looks for the end of a name"
    add("names of the target's weights", PASSES, f"{after.weight_prefix}model.*", why)
    serves = str(engine.get("class of the target", "not asked"))
    verdict = PASSES if serves.endswith(_RECORDS) else CHANGE if "," in serves else UNKNOWN
    add("the engine records auxiliary layers", verdict, serves, f"vLLM was asked for the class {after.architecture}")
    if new and after.hidden_size == before.hidden_size:
        add("acceptance of this architecture on K2.5", PASSES, "to be measured, page 06", _PUBLISHED)
    return items


_SHAPES = ("width", "heads, key and value heads, head width", "MLP width", "kind and number of layers")
_RECORDS = "which records auxiliary layers"
_PUBLISHED = (
    "published, not measured here: lightseekorg/kimi-k2.5-eagle3, a Llama layer too, has an acceptance length of 2.69 (MTBench) "
    "to 3.34 (MATH500) at k = 3"
)


def _by_fields(name: str, fields: tuple[str, ...], derivation: Derivation, before: Target) -> Item:
    """Compare some fields of the two drafters; one difference makes a change, and one unknown an unknown."""
    parent, values, stand_in = derivation.parent, derivation.values, target_values(before)
    verdict: Verdict = PASSES
    evidence = []
    for field in fields:
        label = "" if len(fields) == 1 else f"{field} "
        if field in parent.values or field in stand_in:
            old = parent.values.get(field, stand_in.get(field))
            shown = "none" if old is None else text(old)
            whose = parent.status(field) if field in parent.values else f"{before.name}'s, the drafter's own is not known"
            evidence.append(f"{label}{shown} there ({whose})")
            verdict = CHANGE if old != values[field] else verdict
        else:
            evidence.append(f"{label}not known of the published drafter")
            verdict = UNKNOWN if verdict == PASSES else verdict
    value = " / ".join("none" if values[field] is None else text(values[field]) for field in fields)
    return Item(name, verdict, value, "; ".join(evidence))


def rows(items: list[Item]) -> list[dict[str, str]]:
    """Rows for a table."""
    return [asdict(item) for item in items]


def summary(items: list[Item]) -> str:
    """The verdict in one line, for a caption and the report."""
    counts = {verdict: sum(item.verdict == verdict for item in items) for verdict in COLOURS}
    changes = "; ".join(item.item for item in items if item.verdict == CHANGE)
    return f"{counts[PASSES]} pass, {counts[CHANGE]} need a change ({changes}), {counts[UNKNOWN]} unknown"
