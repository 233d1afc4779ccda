"""Page 01: a published drafter explained and held against its target, its weights, and two targets against each other."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO, Any

from eagle3kit import layers
from eagle3kit import target as targets
from eagle3kit.drafter import AUX, FIELD_GROUPS, FIELDS, MAPS, ROPE, Parent, target_values, tensors, text
from eagle3kit.errors import KitError
from eagle3kit.model_folder import read_header
from eagle3kit.params import Params
from eagle3kit.target import Target
from eagle3kit.widgets import Shown, as_table


def own_target(parent: Parent) -> tuple[Target, str]:
    """The target that a published drafter was made for, as far as its file or its name says, and where that config is from.

    Raises:
        KitError: the file names a target that cannot be read.
    """
    named = parent.values.get("verifier")
    if named:
        target, reason = targets.describe(named)
        return target, f"{reason}, named in the drafter's file"
    k25 = any(word in parent.name.lower() for word in ("k2.5", "k25"))
    return targets.describe("kimi-k2.5" if k25 else "kimi-k2")


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


# ---- a published drafter's weights


@dataclass(frozen=True)
class Tensor:
    """A tensor as the header of its file describes it; `bytes` in the file."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Weights:
    """What the weight files of a published drafter hold. Only headers and the vocabulary map are read.

    Attributes:
        where: the folder or hub id, or why no weights were read.
        tensors: by name; empty when none were read.
        proposable: ids of the target's tokens that the drafter can propose, from t2d, else d2t; None without a map.
    """

    where: str
    tensors: dict[str, Tensor]
    proposable: frozenset[int] | None

    def has(self, name: str) -> bool | None:
        """Whether a tensor is in the files, whatever stands before its name; None when no weights were read."""
        return any(key == name or key.endswith(f".{name}") for key in self.tensors) if self.tensors else None


def read_weights(parent: Parent) -> Weights:
    """The weights of a published drafter, where they are: in its folder, in the hub's cache, or on the hub by parts of files.

    Raises:
        KitError: a file is cut short or no safetensors file.
    """
    if parent.folder is None:
        return Weights(f"none read: {parent.reason}", {}, None)
    files = sorted(parent.folder.glob("*.safetensors"))
    if files:
        return _collect(str(parent.folder), [(str(file), file.stat().st_size, file.open("rb")) for file in files])
    if parent.origin == "hub":
        import huggingface_hub as hub

        try:
            system = hub.HfFileSystem()
            found = [info for info in system.ls(parent.name) if info["name"].endswith(".safetensors")]
            if found:
                return _collect(parent.name, [(i["name"], i["size"], system.open(i["name"], "rb")) for i in found])
        except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
            return Weights(f"none read: the hub does not give them ({error})", {}, None)
    pickles = [file.name for file in (*parent.folder.glob("*.bin"), *parent.folder.glob("*.pt"))]
    why = f"only {', '.join(pickles)}, and pickle files are not opened" if pickles else "no safetensors file"
    return Weights(f"none read: {parent.folder if parent.origin == 'folder' else parent.name} has {why}", {}, None)


def _collect(where: str, files: Sequence[tuple[str, int, IO[bytes]]]) -> Weights:
    tensors: dict[str, Tensor] = {}
    maps: dict[str, bytes] = {}
    for name, size, stream in files:
        with stream:
            header = read_header(stream, size, name)
            header.pop("__metadata__", None)
            first = size - max((entry["data_offsets"][1] for entry in header.values()), default=0)
            for key, entry in header.items():
                start, end = entry["data_offsets"]
                tensors[key] = Tensor(entry["dtype"], tuple(entry["shape"]), end - start)
                if key in MAPS:
                    stream.seek(first + start)
                    maps[key] = stream.read(end - start)
    if "t2d" in maps:
        return Weights(where, tensors, frozenset(i for i, kept in enumerate(maps["t2d"]) if kept))
    if "d2t" in maps:  # a difference: the target's id is the row's number plus the entry
        deltas = struct.unpack(f"<{len(maps['d2t']) // 8}q", maps["d2t"])
        return Weights(where, tensors, frozenset(i + delta for i, delta in enumerate(deltas)))
    return Weights(where, tensors, None)


def tensor_table(parent: Parent, weights: Weights) -> list[dict[str, Any]]:
    """Rows for a table: `tensor`, `shape`, `parameters`, `bytes`, `in the file`.

    Read from the files where there are any; tensors of the published layout that they lack are listed too. Else counted from the
    config by that layout, two bytes a parameter, with a width that the config does not give as unknown.
    """
    needed = ("hidden_size", "vocab_size", "draft_vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    values = {**dict.fromkeys((*needed, "head_dim", "norm_before_fc", "fc_norm"), 0), "num_hidden_layers": 1, AUX: (0, 0, 0)}
    layout = tensors({**values, **parent.values})  # a width that is not known counts as 0, and so does every product with it
    flat = "LlamaForCausalLMEagle3" in parent.values.get("architectures", ())
    if any("midlayer." in name for name in weights.tensors) if weights.tensors else flat:
        layout = {name.replace("layers.0.", "midlayer."): shape for name, shape in layout.items()}
    rows = [
        {"tensor": name, "shape": _dims(t.shape), "parameters": math.prod(t.shape), "bytes": t.bytes, "in the file": "yes"}
        for name, t in weights.tensors.items()
    ]
    rest = {name: shape for name, shape in layout.items() if not weights.has(name)}
    state = "no" if weights.tensors else "unknown"
    for name, shape in rest.items():
        count = math.prod(shape) or None
        size = count * MAPS.get(name, 2) if count else None
        rows.append({"tensor": name, "shape": _dims(shape), "parameters": count, "bytes": size, "in the file": state})
    for row in rows:  # the map's entries are not parameters
        if row["tensor"] in MAPS:
            row["parameters"] = None
    return rows


def _dims(shape: Sequence[int]) -> str:
    return " x ".join(f"{n:,}" if n else "unknown" for n in shape)


_WITHOUT = {
    "embed_tokens.weight": "where it is missing, vLLM shares the target's; a copy must equal it, and costs its bytes once more",
    "lm_head.weight": "a row for each draft token: without it there is nothing to draft with",
    "norm.weight": "the drafter's own last norm",
    "d2t": "without a map vLLM takes draft token i for the target's token i: right for the full vocabulary only",
    "t2d": "vLLM does not read it; trainers do",
}


def contents(parent: Parent, weights: Weights) -> list[dict[str, str]]:
    """Rows for a table: what is in the file and what follows, the draft vocabulary, and the totals."""
    table = tensor_table(parent, weights)
    here = [row for row in table if row["in the file"] != "no"]
    unknown = sum(row["bytes"] is None for row in here)
    more = f", and {unknown} tensors of unknown size" if unknown else ""
    total = f"{sum(row['parameters'] or 0 for row in here):,} parameters, {sum(row['bytes'] or 0 for row in here):,} bytes{more}"
    draft, vocabulary = parent.values.get("draft_vocab_size"), parent.values.get("vocab_size")
    share = f" of {vocabulary:,} ({100 * draft / vocabulary:.1f} %)" if draft and vocabulary else ""
    seen = "" if weights.proposable is None else f"; the map in the file has {len(weights.proposable):,}"
    rows = [("weights", weights.where, ""), ("size", total, "" if weights.tensors else "counted from the config")]
    rows.append(("draft vocabulary", (f"{draft:,}{share}" if draft else "unknown") + seen, FIELDS["draft_vocab_size"].meaning))
    words = {True: "in the file", False: "not in the file", None: "unknown"}
    rows += [(name, words[weights.has(name)], why) for name, why in _WITHOUT.items()]
    rows += [("odd in the config", note, "") for note in parent.notes]
    return [{"what": what, "found": found, "what it means": means} for what, found, means in rows]


# ---- special tokens


def special_tokens(target: Target) -> tuple[dict[int, str], str]:
    """The special tokens of a target by id, and where they were read: its own tokenizer file, or the shipped list for Kimi."""
    for file in ("tokenizer_config.json", "tokenizer.json"):
        path = Path(target.source) / file
        if not path.is_file():
            continue
        read = json.loads(path.read_bytes())
        found = {int(key): value["content"] for key, value in read.get("added_tokens_decoder", {}).items()}
        found |= {token["id"]: token["content"] for token in read.get("added_tokens") or []}
        if found:
            return found, f"{file} of {target.source}"
    known = targets.reference_config("kimi-k2.5")
    if target.vocab_size == known["text_config"]["vocab_size"]:
        tokens = known["_reference"]["special_tokens"]
        return {int(key): value for key, value in tokens.items()}, "the shipped list of Kimi-K2.5's"
    return {}, "no tokenizer file, and no shipped list for this vocabulary"


def new_since_k2(target: Target) -> frozenset[int]:
    """Ids that Kimi-K2.5 gave a meaning and Kimi-K2 did not have; empty for other vocabularies."""
    known = targets.reference_config("kimi-k2.5")
    same = target.vocab_size == known["text_config"]["vocab_size"]
    return frozenset(known["_reference"]["new_since_k2"]) if same else frozenset()


def special_token_rows(weights: Weights, target: Target) -> list[dict[str, Any]]:
    """Rows for a table: each special token of a target, and whether a published drafter can propose it."""
    tokens, _ = special_tokens(target)
    new = new_since_k2(target)
    rows = []
    for number, content in sorted(tokens.items()):
        can = "unknown" if weights.proposable is None else "yes" if number in weights.proposable else "no"
        note = "new in K2.5: no answer of K2 contains it" if number in new else ""
        rows.append({"id": str(number), "token": content, "can be proposed": can, "note": note})
    return rows


# ---- two checkpoints


K26 = "moonshotai/Kimi-K2.6"
"""No values are shipped for it: its config is read where the hub has it, and unknown elsewhere."""


@dataclass(frozen=True)
class Checkpoint:
    """A target to compare; `target` is None when its config cannot be read, and `reason` says from where or why not."""

    name: str
    target: Target | None
    reason: str


def checkpoints(params: Params) -> dict[str, Checkpoint]:
    """Kimi-K2, K2.5, K2.6 and the run's own target, which may be a local folder, by name."""
    found: dict[str, Checkpoint] = {}
    for name, model in (("kimi-k2", "kimi-k2"), ("kimi-k2.5", "kimi-k2.5"), ("kimi-k2.6", K26), ("", params.target_model)):
        try:
            target, reason = targets.describe(model, "main" if name else params.target_revision)
        except KitError as error:
            found[name or model] = Checkpoint(name or model, None, error.message)
        else:
            found.setdefault(name or target.name, Checkpoint(name or target.name, target, reason))
    return found


def pairs(found: Mapping[str, Checkpoint]) -> list[tuple[str, str]]:
    """What to compare when nobody picks: K2 with each of the others."""
    first, *others = found
    return [(first, other) for other in others]


MUST, MAY, HARMLESS, UNKNOWN = "must change", "may change", "harmless", "unknown"
EFFECTS: dict[str, tuple[str, str]] = {
    "hidden_size": (MUST, "every tensor of the drafter has another shape: nothing carries over"),
    "vocab_size": (MUST, "another tokenizer: embeddings, lm_head and the vocabulary map do not carry over"),
    "layers": (MUST, "the auxiliary layers are counted anew"),
    "rms_norm_eps": (MUST, "every norm of the drafter, and the targets that it is trained on"),
    ROPE: (MUST, "the drafter's positions are turned by other angles"),
    "max_position_embeddings": (MUST, "the drafter is asked for every position that the target reaches"),
    "token meanings": (MUST, "the draft vocabulary is counted anew: a map from older answers lacks the new tokens"),
    "quantisation": (MAY, "the states are those of the quantised target: train on the checkpoint that is served"),
    "class": (MAY, "vLLM must know the class, and record auxiliary layers in it"),
    "heads": (MAY, "the drafter's attention is its own; a Llama target's shape is taken over"),
    "MLP width": (MAY, "the drafter's MLP is its own; without a parameter this width is taken"),
    "activation": (MAY, "vLLM's Llama MLP takes silu only"),
    "pad_token_id": (MAY, "written into the drafter's config; no effect while drafting"),
    "bos_token_id": (MAY, "written into the drafter's config; no effect while drafting"),
    "eos_token_id": (MAY, "written into the drafter's config; no effect while drafting"),
    "latent attention": (HARMLESS, "the drafter has a cache of its own"),
    "experts": (HARMLESS, "the drafter's MLP is dense"),
    "tied embeddings": (HARMLESS, "the trainer copies lm_head rows from the embeddings where they are tied"),
    "weight names": (HARMLESS, "the trainer finds embeddings, lm_head and norm by the end of their names"),
    "media token": (HARMLESS, "the drafter sees text"),
    "number type": (HARMLESS, "the drafter is stored in bfloat16 either way"),
}
"""What a difference between two targets does to a drafter: how much, and why."""

EFFECT_COLOURS = {MUST: "fail", MAY: "warn", HARMLESS: "ok", UNKNOWN: "unknown"}
"""For the tables: the effect's words in the colour of a check's state."""


def _compared(target: Target) -> dict[str, str]:
    meanings = "K2.5's" if target.media_token_id in new_since_k2(target) else "as published for K2"
    found = {
        **target_values(target),
        "layers": target.n_layers,
        "token meanings": meanings if new_since_k2(target) else "of its own vocabulary",
        "quantisation": target.quantization.summary if target.quantization else None,
        "class": target.architecture,
        "heads": f"{target.heads} / {target.kv_heads} / {target.head_dim}",
        "MLP width": target.intermediate_size,
        "activation": target.hidden_act,
        "latent attention": ", ".join(map(str, astuple(target.mla))) if target.mla else None,
        "experts": ", ".join(map(str, astuple(target.moe))) if target.moe else None,
        "tied embeddings": target.tie_word_embeddings,
        "weight names": f"{target.weight_prefix}model.*",
        "media token": target.media_token_id,
        "number type": target.dtype,
    }
    return {key: "none" if found[key] is None else text(found[key]) for key in EFFECTS}


def compare(one: Checkpoint, other: Checkpoint) -> list[dict[str, str]]:
    """Rows for a table: the fields in which two targets differ, and what each does to a drafter.

    Keys: `field`, the two names, `effect` (a key of `EFFECT_COLOURS`) and `why`; one row that says so where one is not known.
    """
    for unread, why in ((c.name, c.reason) for c in (one, other) if c.target is None):
        return [{"field": "every field", "effect": UNKNOWN, "why": f"{unread}: {why}"}]
    assert one.target and other.target  # noqa: S101 - for the type checker
    first, second = _compared(one.target), _compared(other.target)
    return [
        {"field": field, one.name: first[field], other.name: second[field], "effect": effect, "why": why}
        for field, (effect, why) in EFFECTS.items()
        if first[field] != second[field]
    ]


def pair(one: Checkpoint, other: Checkpoint) -> Shown:
    """`compare` as a coloured table; the caption counts the effects and names the values that were not read from a file."""
    rows = compare(one, other)
    title = f"{one.name} against {other.name}"
    if one.target and other.target:
        counts = ", ".join(f"{n} {effect}" for effect in EFFECT_COLOURS if (n := sum(row["effect"] == effect for row in rows)))
        title += f": {counts or 'no difference'}; {len(EFFECTS) - len(rows)} of {len(EFFECTS)} fields are equal"
    shipped = [c.name for c in (one, other) if c.target and c.target.reference]
    title += f". Reference values: {', '.join(shipped)}" if shipped else ""
    return as_table(rows, title, colours=EFFECT_COLOURS)


# ---- SpecForge or speculators


def trainers() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows for two tables: what the two trainers offer for Kimi-K2.5 and how that was checked; what would tip the choice.

    Facts of the versions named in `presets/trainers.json`.
    """
    known = json.loads((targets.PRESETS / "trainers.json").read_text(encoding="utf-8"))
    names = {name: f"{name} {known['versions'][name]}" for name in ("speculators", "specforge")}
    rows = [{names.get(key, key): value for key, value in row.items()} for row in known["rows"]]
    return rows, known["tips"]
