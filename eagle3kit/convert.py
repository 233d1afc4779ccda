"""A drafter's weights: read strictly, moved between two forms, started from a parent, and held against their target.

Two forms hold the same drafter:

    speculators   nested config; `layers.0.*`; auxiliary ids in vLLM's numbers. What the trainer writes and vLLM serves.
    llama         flat config of `LlamaForCausalLMEagle3`; `midlayer.*`; ids in `eagle_config`, in SGLang's numbers.
                  What SGLang serves and SpecForge and TorchSpec train; most published drafters are in it.

In both, `d2t [draft_vocab] int64` holds differences: the target id of draft id i is `i + d2t[i]`, and `t2d [vocab] bool` marks
the ids that it reaches.

`LlamaForCausalLMEagle3` has a fixed arithmetic, and nothing fails where a drafter was trained with another one. In SpecForge
0.2.0 and SGLang 0.5.14 it is, in speculators' flags, `norm_before_residual: false` (the residual stream starts from the raw
output of fc), `norm_before_fc: false` (there is no such norm) and `norm_output: false`; one layer, three auxiliary states, no
biases, full attention. `fc_norm` exists in both and is carried over. `norm_output` must not stand in a flat config at all: for
SGLang and vLLM it feeds normed states to the next draft step, for SpecForge it is the norm before lm_head, on by default.

Two readers of a flat config number layers differently, so an export names them twice: `eagle_config` has SGLang's ids, where
SGLang and SpecForge look, and the top level has vLLM's, where vLLM looks first.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3kit import checkpoint, drafter, layers, vocab
from eagle3kit import target as targets
from eagle3kit.checkpoint import AGAIN, EMBEDDINGS, HEAD, NORM
from eagle3kit.drafter import AUX, ROPE
from eagle3kit.errors import KitError
from eagle3kit.layers import Convention
from eagle3kit.rundir import write_json

if TYPE_CHECKING:
    import torch

LLAMA_CLASS = "LlamaForCausalLMEagle3"
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
VERIFIER_NORM = "verifier_norm.weight"

FIRST_ID_DECIDES = ("Deepseek", "Kimi", "Glm4MoeLite")
"""Targets for which SGLang 0.5.14 adds 1 to a drafter's layer ids only when the first of them is 1 (its `deepseek_v2.py`)."""

_SIZES = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers")

Form = Literal["speculators", "llama"]


@dataclass(frozen=True)
class Drafter:
    """A drafter's folder, read.

    Attributes:
        folder: where it lies.
        form: which of the two forms.
        config: its `config.json` as it is.
        values: fields by speculators' names, with what the form leaves to a default filled in; the auxiliary ids as the file
            numbers them, None where it names none.
        weights: every tensor, by speculators' names, in the stored type.
    """

    folder: Path
    form: Form
    config: dict[str, Any]
    values: dict[str, Any]
    weights: dict[str, torch.Tensor]


# ---- reading


def load_drafter(folder: Path, *, trust_remote_code: bool = False) -> Drafter:
    """Read a drafter in either form, strictly.

    Every tensor that the config describes must be there, with its shape and a type that it can have, and no other: a reader that
    skips one serves random weights without a word. May be missing: `embed_tokens` in llama form. May be there: the verifier's
    norm in speculators' form, and in llama form the maps of a full vocabulary, which change nothing.

    Raises:
        KitError: no config or not an EAGLE-3 drafter's; a config that asks for code of its own (none is ever run;
            `trust_remote_code` says that its class is known to compute the same); pickled, missing or damaged files; a tensor
            that is missing, unexpected, or of another shape or type; broken vocabulary maps; a flag with two meanings.
    """
    config = _config(folder)
    code = [str(name) for name in (config.get("auto_map") or {}).values()]
    if not trust_remote_code and not all(name.endswith("Eagle3SpeculatorConfig") for name in code):  # that is the trainer's own
        what = f"the config of {folder} asks for code of its own (auto_map), which may compute something else"
        raise KitError(what, seen=", ".join(code), wanted="none", fix="read that code, then set trust_remote_code: true")
    form: Form = "speculators" if "speculators_model_type" in config else "llama"
    kind = config["speculators_model_type"] if form == "speculators" else (config.get("architectures") or [None])[0]
    if kind not in ("eagle3", LLAMA_CLASS):
        raise KitError(f"{folder} is no EAGLE-3 drafter that can be read", seen=kind, wanted=f"eagle3 or {LLAMA_CLASS}")
    values = _values(config, form, folder)
    shapes = drafter.tensors({**values, AUX: values[AUX] or (0, 0, 0)})  # where none are named, readers make fc for three
    optional: dict[str, tuple[int, ...]] = {VERIFIER_NORM: (values["hidden_size"],)}
    if form == "llama":
        optional = {EMBEDDINGS: shapes.pop(EMBEDDINGS)}
        if "d2t" not in shapes:
            optional |= {"d2t": (values["draft_vocab_size"],), "t2d": (values["vocab_size"],)}
        shapes = {_flat_name(name): shape for name, shape in shapes.items()}
    read = checkpoint.read_exactly(folder, shapes, optional)
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in read.items()}
    _check_maps(weights.get("d2t"), weights.get("t2d"), str(folder))
    weights = {name: tensor for name, tensor in weights.items() if name not in ("d2t", "t2d") or name in shapes}
    return Drafter(folder, form, config, values, weights)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (ValueError, OSError) as error:
        raise KitError(f"{folder} has no config.json that can be read", seen=error, wanted="JSON", fix="check the path") from None
    return config


def _values(config: Mapping[str, Any], form: Form, folder: Path) -> dict[str, Any]:
    """The fields by speculators' names, defaults filled in as the form's own readers do."""
    given = drafter.from_config(config, str(folder), "folder", "", folder=folder).values
    if form == "llama":
        if "norm_output" in given:
            what = f"norm_output of {folder} has two meanings: normed states for the next step, or the norm before lm_head"
            fix = "remove it if SpecForge trained this drafter with true"
            raise KitError(what, seen=given["norm_output"], wanted="no norm_output in this form", fix=fix)
        given.setdefault("draft_vocab_size", given.get("vocab_size"))
    given.setdefault("num_key_value_heads", given.get("num_attention_heads"))
    for name in ("draft_vocab_size", *_SIZES):
        if not isinstance(given.get(name), int) or given[name] < 1:
            raise KitError(f"the config of {folder} has no usable {name}", seen=given.get(name), wanted="a count", fix=AGAIN)
    if form == "speculators" and not given.get(AUX):
        raise KitError(f"the config of {folder} names no auxiliary layers", seen=f"no {AUX}", wanted="three ids", fix="add them")
    for name in ("attention_bias", "mlp_bias"):
        if given.get(name):
            raise KitError(
                f"{folder} has {name}, which no reader of this layout shares", seen=True, wanted=False, fix="train without"
            )
    flags = dict.fromkeys(NORM_FLAGS, False)
    return {"head_dim": given["hidden_size"] // given["num_attention_heads"], AUX: None, **flags, **given}


def _flat_name(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def _check_maps(d2t: torch.Tensor | None, t2d: torch.Tensor | None, where: str) -> None:
    """`vocab.check_maps` with the place and the values in the message; None and None is the full vocabulary."""
    if d2t is None or t2d is None:
        if d2t is not t2d:
            raise KitError(f"{where} has only one of d2t and t2d", seen="one", wanted="both or none", fix=AGAIN)
        return
    fix = "use a d2t and a t2d that belong together"
    if int(t2d.sum()) != len(d2t):
        raise KitError(f"t2d of {where} does not fit d2t", seen=f"{int(t2d.sum())} marked", wanted=len(d2t), fix=fix)
    try:
        vocab.check_maps(d2t, t2d)
    except KitError as error:
        ids = target_ids(d2t, len(d2t))
        seen = f"target ids {int(ids.min())} to {int(ids.max())}, first {ids[:4].tolist()}"
        raise KitError(
            f"{where}: {error.what}", seen=seen, wanted=f"increasing ids below {len(t2d)}, as t2d marks", fix=fix
        ) from None


def target_ids(d2t: torch.Tensor | None, draft_vocab: int) -> torch.Tensor:
    """Target id of every draft id, `[draft_vocab] int64`; without a map they are equal."""
    import torch

    ids = torch.arange(draft_vocab)
    return ids if d2t is None else ids + d2t


def _fits(values: Mapping[str, Any], wanted: Mapping[str, Any], whose: str, other: str) -> None:
    for name, want in wanted.items():
        if values[name] != want:
            raise KitError(f"{name} of {whose} is not {other}'s", seen=values[name], wanted=want, fix=f"make {name} agree")


def _target(folder: Path, values: Mapping[str, Any], whose: str) -> targets.Target:
    """The target, if its width and vocabulary are the drafter's."""
    target, _ = targets.describe(str(folder))
    _fits(values, {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}, whose, f"the target {folder}")
    return target


# ---- writing


def _write(dest: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Path:
    """A drafter's folder, filled beside its place and then renamed: it is there whole or not at all."""
    from safetensors.torch import save_file

    if dest.exists() or dest.is_symlink():
        raise KitError(
            f"{dest} is there already", seen="a file or folder", wanted="a new name", fix="remove it or choose another"
        )
    dest.parent.mkdir(parents=True, exist_ok=True)
    partial = dest.with_name(f".{dest.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write_json(partial / "config.json", dict(config))
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()}, partial / "model.safetensors", {"format": "pt"}
        )
        partial.rename(dest)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return dest


# ---- between the forms


def _require_expressible(given: Drafter) -> None:
    """Refuse what `LlamaForCausalLMEagle3` would compute in another way."""
    v = {"model_type": "llama", "layer_types": ["full_attention"], **given.values}
    v |= {"auxiliary layers": len(v[AUX] or (0, 0, 0)), "rope_type": v.get(ROPE, {}).get("rope_type", "no rope_theta")}
    possible: dict[str, tuple[Any, ...]] = dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output"), (False,))
    possible |= {"num_hidden_layers": (1,), "auxiliary layers": (3,), "layer_types": (["full_attention"],)}
    possible |= {"model_type": ("llama",), "rope_type": ("default", "linear", "dynamic", "llama3", "yarn")}
    for name, values in possible.items():
        if v[name] not in values:
            fix = f"train with drafter_{name}: false" if name in NORM_FLAGS else "train another drafter"
            what = f"{LLAMA_CLASS} cannot express the {name} of {given.folder}"
            fix += ", or stay with speculators' form, which vLLM serves"
            raise KitError(what, seen=v[name], wanted=" or ".join(map(str, values)), fix=fix)


def export_llama(source: Path, dest: Path, target_layers: int) -> Path:
    """Write a drafter in speculators' form as `LlamaForCausalLMEagle3`; every tensor bit for bit. Returns `dest`.

    Args:
        source: the drafter's folder.
        dest: a folder that does not exist.
        target_layers: number of the target's decoder layers, to number the auxiliary layers.

    Raises:
        KitError: as `load_drafter`; a norm or another field that the class cannot express; auxiliary ids that do not fit the
            target, or that SGLang would misread for it; `dest` exists. Nothing is written then.
    """
    given = load_drafter(source)
    if given.form != "speculators":
        raise KitError(f"{source} is in this form already", seen=LLAMA_CLASS, wanted="speculators' form", fix="copy the folder")
    _require_expressible(given)
    v, old = given.values, given.config
    ids = layers.check(v[AUX], target_layers)
    theirs = layers.from_vllm(ids, Convention.SGLANG, target_layers)
    served = str((old.get("speculators_config") or {}).get("verifier", {}).get("architectures"))
    if theirs[0] != 1 and any(name in served for name in FIRST_ID_DECIDES):
        what = f"SGLang reads a drafter's layers for {served} one layer off unless the first is 1 (vLLM's 2)"
        raise KitError(what, seen=list(theirs), wanted="1 first", fix="set aux_layers to begin with 2, or serve it with vLLM")
    rope = dict(v[ROPE])
    if rope["rope_type"] == "yarn":  # what transformers assumes where they are missing; SpecForge assumes nothing
        rope = {"beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 0, **rope}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config = {
        **{key: value for key, value in old["transformer_layer_config"].items() if key != "layer_types"},
        "architectures": [LLAMA_CLASS],
        "draft_vocab_size": v["draft_vocab_size"],
        "target_hidden_size": v["hidden_size"],
        "dtype": _dtype(given),
        ROPE: rope,
        "rope_theta": rope["rope_theta"],  # older readers know this and the next only
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        AUX: list(ids),
        "eagle_config": {AUX: list(theirs), "use_aux_hidden_state": True},
        **({"fc_norm": True} if v["fc_norm"] else {}),
    }
    return _write(dest, config, {_flat_name(name): t for name, t in given.weights.items() if name != VERIFIER_NORM})


def _dtype(given: Drafter) -> str:
    return str(given.weights["fc.weight"].dtype).removeprefix("torch.")


def vllm_ids(given: Drafter, n_layers: int, convention: Convention | str | None = None) -> tuple[int, ...]:
    """A drafter's auxiliary layers as vLLM counts them, for a target of `n_layers` layers.

    Ids in `eagle_config` are SGLang's, unless `convention` says otherwise. Where they are exactly vLLM's default it has to say:
    the published Kimi-K2 drafter has such a list, SGLang 0.5.14 reads it as vLLM's for a DeepSeek or Kimi target and as its own
    for any other, and a wrong guess would be one layer off. A file that names no layers leaves them to the default.

    Raises:
        KitError: ids out of range, repeated, not increasing, another convention's default, or named twice and differently.
    """
    block, top = (given.config.get("eagle_config") or {}).get(AUX), given.config.get(AUX)
    if not block:
        return layers.check(top, n_layers) if top else layers.default_aux_layers(n_layers)
    if convention is None and n_layers >= layers.MIN_LAYERS and tuple(block) == (default := layers.default_aux_layers(n_layers)):
        what = f"the auxiliary layers of {given.folder} are vllm's default list, in a file where SGLang's numbers are usual"
        usual = list(layers.from_vllm(default, Convention.SGLANG, n_layers))
        raise KitError(
            what, seen=block, wanted=f"{usual} for the same layers", fix="say whose they are: convention vllm or sglang"
        )
    found = layers.check(layers.to_vllm(block, convention or Convention.SGLANG, n_layers), n_layers)
    if convention is None and top and tuple(top) != found:
        what, wanted = f"{given.folder} names its auxiliary layers twice, and differently", f"{list(found)} at the top level"
        raise KitError(
            what, seen=f"{top}, and {block} in eagle_config", wanted=wanted, fix="say whose the latter are: convention"
        )
    return found


def import_llama(
    source: Path,
    dest: Path,
    verifier: Path,
    *,
    convention: Convention | str | None = None,
    speculative_tokens: int = 3,
    trust_remote_code: bool = False,
) -> Path:
    """Write a `LlamaForCausalLMEagle3` drafter in speculators' form; every tensor bit for bit. Returns `dest`.

    Imports speculators (10 seconds), whose own config class makes `config.json`.

    Args:
        source: the drafter's folder. Without `embed_tokens.weight` it gets the target's.
        dest: a folder that does not exist.
        verifier: the target's folder.
        convention: whose numbers the auxiliary ids are, where `vllm_ids` cannot tell.
        speculative_tokens: tokens drafted at a step unless the server is told otherwise; the flat form does not say.
        trust_remote_code: as for `load_drafter`.

    Raises:
        KitError: as `load_drafter` and `vllm_ids`; a field that the class cannot express; a drafter of another width or
            vocabulary than the target; `dest` exists. Nothing is written then.
    """
    given = load_drafter(source, trust_remote_code=trust_remote_code)
    if given.form != "llama":
        raise KitError(f"{source} is in this form already", seen="speculators' form", wanted=LLAMA_CLASS, fix="use it as it is")
    _require_expressible(given)
    target = _target(verifier, given.values, f"the drafter {source}")
    weights = dict(given.weights)
    if EMBEDDINGS not in weights:
        weights[EMBEDDINGS] = checkpoint.of_target(verifier, target, [EMBEDDINGS])[EMBEDDINGS].to(weights["fc.weight"].dtype)
    fields = {
        **{key: value for key, value in given.values.items() if key != "verifier"},
        "architectures": ["Eagle3Speculator"],
        "model_type": "llama",
        "layer_types": ["full_attention"],
        "tie_word_embeddings": False,
        "embed_requires_grad": False,
        "speculative_tokens": speculative_tokens,
        "dtype": _dtype(given),
        AUX: list(vllm_ids(given, target.n_layers, convention)),
    }
    listed = [{"name": name, "value": value, "source": "parent"} for name, value in fields.items()]
    made = drafter.build_config({"fields": listed, "target": {"architecture": target.architecture}}, verifier)
    return _write(dest, json.loads(made.to_json_string()), weights)


# ---- from a parent


def move_rows(old: torch.Tensor, old_ids: torch.Tensor, new_ids: torch.Tensor, fresh: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Rows of `old [n_old, h]` in the order of `new_ids [n_new]`, by target id; rows it lacks come from `fresh [n_new, h]`.

    `old_ids [n_old]`, increasing, are the target ids of the old rows. Also returns how many rows came from `old`.
    """
    import torch

    place = torch.searchsorted(old_ids, new_ids).clamp(max=len(old_ids) - 1)
    known = old_ids[place] == new_ids
    return torch.where(known[:, None], old[place], fresh), int(known.sum())


def warm_start(
    parent: Path,
    config_folder: Path,
    target_folder: Path,
    dest: Path,
    d2t: torch.Tensor | None,
    t2d: torch.Tensor | None,
    *,
    trust_remote_code: bool = False,
) -> list[dict[str, Any]]:
    """Build the folder that `speculators train --from-pretrained DEST` starts from: a new config, a parent's weights.

    What the parent learnt is kept: fc, its layer with the layer's norms, and the final norm. That one scales the drafter's own
    states: a fresh drafter that started with the target's norm in its place trained worse. What belongs to the target is taken
    from it: the embeddings, which stay frozen, and the verifier's norm, which is not stored, because the trainer reads it from
    the target each time. Rows of lm_head follow their target ids into the new draft vocabulary; ids that the parent did not have
    get the target's rows, and rows that are the target's in the parent's stored type get its precision back.

    Everything is float32, and the config says so: speculators keeps stored types, and its trainer stops on mixed ones.

    Args:
        parent: a drafter's folder in either form. Its auxiliary ids are reported, not used: the new config's decide.
        config_folder: the new drafter's config in speculators' form, as notebook 02 writes it.
        target_folder: the target's folder.
        dest: a folder that does not exist.
        d2t: `[draft_vocab] int64`, the new map; None for the full vocabulary.
        t2d: `[vocab] bool`, the new map; None for the full vocabulary.
        trust_remote_code: as for `load_drafter`.

    Returns:
        One row a tensor, for a table: `tensor`, `shape`, `what` (`kept`, `moved`, `replaced`, `new`), `rows moved`, `new rows`
        (None but for lm_head), `reason`.

    Raises:
        KitError: as `load_drafter`; shapes or norms that differ between the parent and the config, or the config and the target;
            auxiliary ids that do not fit the target; maps that do not fit. Nothing is written then.
    """
    import torch

    config = _config(config_folder)
    if (kind := config.get("speculators_model_type")) != "eagle3" or not config.get("speculators_config"):
        raise KitError(f"{config_folder} has no drafter's config", seen=kind, wanted="eagle3", fix=f"run {drafter.MADE_BY}")
    v = _values(config, "speculators", config_folder)
    target = _target(target_folder, v, f"the config {config_folder}")
    layers.check(v[AUX], target.n_layers)
    shapes = drafter.tensors(v)
    for name, tensor in (("d2t", d2t), ("t2d", t2d)):
        if (seen := None if tensor is None else tuple(tensor.shape)) != (wanted := shapes.get(name)):
            raise KitError(f"{name} does not fit draft_vocab_size", seen=seen, wanted=wanted, fix=f"run {vocab.MADE_BY} again")
    _check_maps(d2t, t2d, "the new vocabulary")
    old = load_drafter(parent, trust_remote_code=trust_remote_code)
    wanted_values = {name: v[name] for name in (*_SIZES, "head_dim", *NORM_FLAGS)} | {"number of auxiliary layers": len(v[AUX])}
    seen_values = old.values | {"number of auxiliary layers": len(old.values[AUX] or (0, 0, 0))}
    _fits(seen_values, wanted_values, f"the parent {parent}", f"the config {config_folder}")

    theirs = checkpoint.of_target(target_folder, target)
    new_ids = target_ids(d2t, v["draft_vocab_size"])
    old_ids = target_ids(old.weights.get("d2t"), old.values["draft_vocab_size"])
    fresh = theirs[HEAD][new_ids]
    head, moved = move_rows(old.weights[HEAD], old_ids, new_ids, fresh.to(old.weights[HEAD].dtype))
    copied = (head == fresh.to(head.dtype)).all(dim=1, keepdim=True)
    head = torch.where(copied, fresh.float(), head.float())
    weights = {name: old.weights[name].float() for name in shapes if name not in drafter.MAPS and name != EMBEDDINGS}
    weights |= {EMBEDDINGS: theirs[EMBEDDINGS].float(), HEAD: head}
    weights |= {} if d2t is None or t2d is None else {"d2t": d2t, "t2d": t2d}

    same = "kept" if old_ids.tolist() == new_ids.tolist() else ""
    before = f"{drafter.text(old.values[AUX])}{' as its file numbers them' if old.form == 'llama' else ''}"
    why = {
        EMBEDDINGS: ("replaced", "the target's: the drafter reads the target's tokens, and they stay frozen"),
        "fc.weight": ("kept", f"learnt on layers {before}, now fed {drafter.text(v[AUX])}"),
        NORM: ("kept", "scales the drafter's own states; training starts worse from the target's"),
        HEAD: (same or "moved", "rows follow their target ids; those that the parent lacks are the target's"),
        "d2t": (same or "new", "the new draft vocabulary"),
        "t2d": (same or "new", "the new draft vocabulary"),
        VERIFIER_NORM: ("replaced", "the target's; not stored, the trainer reads it from the target"),
    }
    rows = []
    for name, shape in {**shapes, VERIFIER_NORM: shapes[NORM]}.items():
        what, reason = why.get(name, ("kept", "learnt by the parent"))
        counts = (moved, len(new_ids) - moved) if name == HEAD else (None, None)
        row = {"tensor": name, "shape": list(shape), "what": what, "rows moved": counts[0], "new rows": counts[1]}
        rows.append({**row, "reason": reason})
    made = json.loads(json.dumps({key: value for key, value in config.items() if key != "auto_map"}))
    made["dtype"] = made["transformer_layer_config"]["dtype"] = "float32"
    made["speculators_config"]["verifier"]["name_or_path"] = drafter.verifier_path(target_folder)
    _write(dest, made, weights)
    return rows


# ---- against the target


def verify_origin(drafter_folder: Path, target_folder: Path, *, own_head: bool = False) -> list[dict[str, str]]:
    """Compare what a drafter should have from its target with the target, bit for bit in the drafter's stored type.

    speculators keeps the embeddings and lm_head frozen, so after training and every export they must still be the target's;
    a row that is not was lost or mixed up on the way. SpecForge trains lm_head: there a difference is worth a note, no more.

    Args:
        drafter_folder: the drafter, in either form.
        target_folder: the target.
        own_head: the rows of lm_head may be the drafter's own: it was, or it descends from, a drafter trained elsewhere.

    Returns:
        Rows for a table, for embed_tokens, lm_head and, where it is stored, the verifier's norm: `name`, `state` (`ok`, `note`,
        `fail`), `found`, `wanted`, `fix`.

    Raises:
        KitError: as `load_drafter`, or the target's width or vocabulary is another, or a weight of it is missing.
    """
    import torch

    given = load_drafter(drafter_folder)
    theirs = checkpoint.of_target(target_folder, _target(target_folder, given.values, f"the drafter {drafter_folder}"))
    ids = target_ids(given.weights.get("d2t"), given.values["draft_vocab_size"])
    rows = []
    for name, wanted in ((EMBEDDINGS, theirs[EMBEDDINGS]), (HEAD, theirs[HEAD][ids]), (VERIFIER_NORM, theirs[NORM][None])):
        if name not in given.weights:
            continue
        own = given.weights[name].reshape(wanted.shape)
        bits = torch.int32 if own.dtype == torch.float32 else torch.int16
        equal = int((own.view(bits) == wanted.to(own.dtype).contiguous().view(bits)).all(dim=1).sum())
        state, fix = "ok", ""
        if equal < len(own):
            state, fix = "fail", "check the target's folder, and where the drafter comes from"
            if own_head and name == HEAD:
                state, fix = "note", "no fault: SpecForge trains these rows"
        found = f"{equal:,} of {len(own):,} rows equal, in {str(own.dtype).removeprefix('torch.')}"
        rows.append({"name": f"{name} is the target's", "state": state, "found": found, "wanted": "all rows", "fix": fix})
    return rows
