"""A drafter's weights: read strictly, moved between two forms, started from a parent, and held against their target.

Two forms hold the same drafter:

    speculators   nested config; `layers.0.*`; auxiliary ids in vLLM's numbers. What the trainer writes and vLLM serves.
    llama         flat config of `LlamaForCausalLMEagle3`; `midlayer.*`; ids in `eagle_config`, in SGLang's numbers.
                  What SGLang serves and SpecForge and TorchSpec train; most published drafters are in it.

In both, `d2t [draft_vocab] int64` holds differences: the target id of draft id i is `i + d2t[i]`; `t2d [vocab] bool` marks those.

`LlamaForCausalLMEagle3` has a fixed arithmetic, and nothing fails where a drafter was trained with another one. In SpecForge 0.2.0
and SGLang 0.5.14 it is, in speculators' flags, `norm_before_residual: false` (the residual stream starts from the raw output of
fc), `norm_before_fc: false` (there is no such norm), and `norm_output: false`; one layer, three auxiliary states, no biases, full
attention. `fc_norm` exists in both and is carried over. `norm_output` must not stand in a flat config at all: for SGLang and vLLM
it feeds normed states to the next draft step, for SpecForge it is the norm before lm_head, which is on where it is missing.

Two readers of a flat config number layers differently, so an export names them twice: `eagle_config` has SGLang's ids, where
SGLang and SpecForge look, and the top level has vLLM's, where vLLM looks first.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3kit import drafter, layers, vocab
from eagle3kit import target as targets
from eagle3kit.drafter import AUX, ROPE
from eagle3kit.errors import KitError
from eagle3kit.layers import Convention
from eagle3kit.rundir import write_json

if TYPE_CHECKING:
    import torch

LLAMA_CLASS = "LlamaForCausalLMEagle3"
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
COPIES = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Copies of the target's tensors that some versions of speculators store. Accepted, never written."""

FIRST_ID_DECIDES = ("Deepseek", "Kimi", "Glm4MoeLite")
"""Targets for which SGLang 0.5.14 adds 1 to a drafter's layer ids only when the first of them is 1 (`deepseek_v2.py`)."""

_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}
_OWN_CLASSES = ("Eagle3SpeculatorConfig", "Eagle3DraftModel")
_AGAIN = "copy or download it again"


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
    form: Literal["speculators", "llama"]
    config: dict[str, Any]
    values: dict[str, Any]
    weights: dict[str, torch.Tensor]


# ---- reading


def load_drafter(folder: Path, *, trust_remote_code: bool = False) -> Drafter:
    """Read a drafter in either form, strictly.

    Every tensor that the config describes must be there, with its shape and a type that it can have, and no other: a reader that
    skips one serves random weights without a word. Only `embed_tokens.weight` may be missing in llama form.

    Raises:
        KitError: no config or not an EAGLE-3 drafter's; a config that asks for code of its own (nothing of it is ever run;
            `trust_remote_code` says that its class is known to compute the same); pickled, missing or damaged files; a tensor
            that is missing, unexpected, or of another shape or type; broken vocabulary maps.
    """
    config = _config(folder)
    code = [str(name) for name in (config.get("auto_map") or {}).values()]
    if not trust_remote_code and not all(name.endswith(_OWN_CLASSES) for name in code):
        raise KitError(
            f"the config of {folder} asks for code of its own (auto_map), which may compute something else than {LLAMA_CLASS}",
            seen=", ".join(code),
            wanted="a drafter without code",
            fix="read that code, then set trust_remote_code: true",
        )
    form: Literal["speculators", "llama"] = "speculators" if "speculators_model_type" in config else "llama"
    kind = config.get("speculators_model_type") if form == "speculators" else (config.get("architectures") or [None])[0]
    if kind not in ("eagle3", LLAMA_CLASS):
        raise KitError(f"{folder} is not an EAGLE-3 drafter", seen=kind, wanted=f"speculators' eagle3, or {LLAMA_CLASS}")
    values = _values(config, form, folder)
    shapes = drafter.tensors({**values, AUX: values[AUX] or (0, 0, 0)})  # both programs size fc for three where none are named
    optional = COPIES if form == "speculators" else ("embed_tokens.weight", "d2t", "t2d")
    shapes |= (
        dict(zip(COPIES, ((values["hidden_size"],), shapes["lm_head.weight"]), strict=True)) if form == "speculators" else {}
    )
    if "d2t" not in shapes and form == "llama":  # a full vocabulary may carry maps, if they change nothing
        shapes |= {"d2t": (values["draft_vocab_size"],), "t2d": (values["vocab_size"],)}
    elif form == "llama":
        optional = ("embed_tokens.weight",)
    own = {_llama_name(name) if form == "llama" else name: name for name in shapes}
    weights = {
        own[name]: tensor
        for name, tensor in _read_exactly(folder, {name: shapes[o] for name, o in own.items()}, optional).items()
    }
    _check_maps(weights.get("d2t"), weights.get("t2d"), folder)
    if values["draft_vocab_size"] == values["vocab_size"]:
        weights.pop("d2t", None), weights.pop("t2d", None)
    return Drafter(folder, form, config, values, weights)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise KitError(f"{folder} has no config.json", wanted="a drafter's folder", fix="correct the path") from None
    except (ValueError, OSError) as error:
        raise KitError(f"{folder}/config.json cannot be read", seen=error, wanted="JSON", fix=_AGAIN) from None
    if not isinstance(config, dict):
        raise KitError(f"{folder}/config.json is not a config", seen=type(config).__name__, wanted="an object", fix=_AGAIN)
    return config


def _values(config: Mapping[str, Any], form: str, folder: Path) -> dict[str, Any]:
    """The fields by speculators' names, defaults filled in as the form's own readers do."""
    given = drafter.from_config(config, str(folder), "folder", "", folder=folder).values
    needed = ("hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
    if form == "speculators":
        needed += ("draft_vocab_size", "num_key_value_heads", "head_dim", "num_hidden_layers", AUX)
    for name in needed:
        if given.get(name) in (None, []):
            raise KitError(f"the config of {folder} does not say {name}", wanted=name, fix="add it to config.json")
    heads = given["num_attention_heads"]
    values = {
        "draft_vocab_size": given["vocab_size"],
        "num_key_value_heads": heads,
        "head_dim": given["hidden_size"] // max(1, heads),
        "num_hidden_layers": 1,
        AUX: None,
        **dict.fromkeys(NORM_FLAGS, False),
        **given,
    }
    for name in (*needed, "draft_vocab_size", "num_key_value_heads", "head_dim", "num_hidden_layers"):
        if name != AUX and (not isinstance(values[name], int) or values[name] < 1):
            raise KitError(f"{name} in the config of {folder} is no count", seen=values[name], wanted="1 or more", fix=_AGAIN)
    return values


def _llama_name(name: str) -> str:
    return name.replace("layers.0.", "midlayer.", 1)


def _places(folder: Path) -> dict[str, Path]:
    """The file of every tensor, from the index or, where one file holds everything, from that file."""
    pickled = sorted(path.name for path in folder.glob("*") if path.suffix in _PICKLES)
    index, files = folder / "model.safetensors.index.json", sorted(folder.glob("*.safetensors"))
    if index.exists():
        try:
            places = {str(name): folder / str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KitError(f"{index} cannot be read", seen=repr(error), wanted="a weight_map", fix=_AGAIN) from None
        files = sorted(set(places.values()))
        odd = [file.name for file in files if file.suffix != ".safetensors" or file.parent != folder]
        if odd:
            raise KitError(
                f"{index} names files that are not safetensors beside it", seen=odd[0], wanted="*.safetensors", fix=_AGAIN
            )
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise KitError(
                f"{folder} lacks weight files of its index", seen=f"no {', '.join(missing)}", wanted=missing[0], fix=_AGAIN
            )
        return places
    if not files and pickled:
        raise KitError(
            f"the weights in {folder} are pickled, and reading them could run any code",
            seen=", ".join(pickled[:3]),
            wanted="*.safetensors",
            fix="convert them with safetensors, on a machine where that does not matter",
        )
    if not files:
        raise KitError(f"{folder} has no weights", seen="no *.safetensors", wanted="model.safetensors", fix=_AGAIN)
    if len(files) > 1 or "-of-" in files[0].name:
        raise KitError(
            f"{folder} has shards without an index", seen=", ".join(f.name for f in files[:3]), wanted=index.name, fix=_AGAIN
        )
    with _opened(files[0]) as file:
        return dict.fromkeys(file.keys(), files[0])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise KitError(f"{path} is cut short or no safetensors file", seen=error, wanted="a whole file", fix=_AGAIN) from None


def _read(places: Mapping[str, Path], names: Iterable[str]) -> dict[str, torch.Tensor]:
    wanted = set(names)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted({places[name] for name in wanted}):
        with _opened(path) as file:
            tensors |= {name: file.get_tensor(name) for name in sorted(wanted) if places[name] == path}
    return tensors


def _read_exactly(folder: Path, shapes: Mapping[str, tuple[int, ...]], optional: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors of a folder, which must be these and no others; shapes and types are compared before anything is loaded."""
    places = _places(folder)
    seen: dict[str, str] = {}
    for path in sorted(set(places.values())):
        with _opened(path) as file:
            for name in file.keys():
                part = file.get_slice(name)
                kind = part.get_dtype()
                seen[name] = f"{list(part.get_shape())} {'float' if kind in ('F32', 'F16', 'BF16') else kind}"
    kinds = {"d2t": "I64", "t2d": "BOOL"}
    wanted = {name: f"{list(shape)} {kinds.get(name, 'float')}" for name, shape in shapes.items()}
    faults = [f"{name} is in a file and not in the index" for name in sorted(set(seen) - set(places))]
    wants = ["an index of every tensor"] * len(faults)
    for name in sorted((set(wanted) | set(places)) - (set(seen) - set(places))):
        if seen.get(name) != wanted.get(name) and not (name in optional and name not in seen):
            faults.append(f"{name} {seen[name] if name in seen else 'missing'}")
            wants.append(f"{name} {wanted[name]}" if name in wanted else f"no {name}")
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise KitError(
            f"{folder} does not hold the tensors that its config describes",
            seen=", ".join(faults[:5]) + more,
            wanted=", ".join(wants[:5]),
            fix="use a drafter of this class, with its own config.json",
        )
    return _read(places, places)


def _check_maps(d2t: torch.Tensor | None, t2d: torch.Tensor | None, where: object) -> None:
    """`vocab.check_maps`, with the place in the message; None and None is the full vocabulary."""
    if d2t is None and t2d is None:
        return
    if d2t is None or t2d is None:
        raise KitError(f"{where} has one of the maps d2t and t2d only", seen="one", wanted="both or none", fix=_AGAIN)
    if int(t2d.sum()) != len(d2t):
        raise KitError(f"t2d and d2t of {where} differ", seen=f"{int(t2d.sum())} marked", wanted=len(d2t), fix=_AGAIN)
    try:
        vocab.check_maps(d2t, t2d)
    except KitError as error:
        ids = target_ids(d2t, len(d2t))
        raise KitError(
            f"{where}: {error.what}",
            seen=f"target ids {int(ids.min())} to {int(ids.max())}, in the order {ids[:4].tolist()} ...",
            wanted=f"increasing target ids below {len(t2d)}, those that t2d marks",
            fix="use the maps that belong together: vocab/ of a run, or the drafter's own",
        ) from None


def target_ids(d2t: torch.Tensor | None, draft_vocab: int) -> torch.Tensor:
    """Target id of every draft id, `[draft_vocab] int64`; without a map they are equal."""
    import torch

    ids = torch.arange(draft_vocab)
    return ids if d2t is None else ids + d2t


def _from_target(folder: Path, target: targets.Target) -> dict[str, torch.Tensor]:
    """`embed_tokens.weight`, `lm_head.weight` and `norm.weight` of a target, found by the end of their names.

    Wrappers put a prefix before them. The shortest name wins, as in speculators: a vision tower may have such a name too. Only the
    shards that hold these three are opened. Without lm_head the embeddings stand in, if the config says that they are tied.
    """
    places = _places(folder)
    found = {}
    for name, end in (
        ("embed_tokens.weight", "embed_tokens.weight"),
        ("lm_head.weight",) * 2,
        ("norm.weight", "model.norm.weight"),
    ):
        matches = [place for place in places if place == end or place.endswith(f".{end}")]
        if matches:
            found[name] = min(matches, key=len)
    if target.tie_word_embeddings and "embed_tokens.weight" in found:
        found.setdefault("lm_head.weight", found["embed_tokens.weight"])
    h, wanted = target.hidden_size, ("embed_tokens.weight", "lm_head.weight", "norm.weight")
    missing = [name for name in wanted if name not in found]
    if missing:
        raise KitError(f"the target {folder} lacks weights", seen=f"no {', '.join(missing)}", wanted=missing[0], fix=_AGAIN)
    read = _read(places, found.values())
    tensors = {name: read[found[name]] for name in wanted}
    for name, shape in zip(wanted, ((target.vocab_size, h), (target.vocab_size, h), (h,)), strict=True):
        if tuple(tensors[name].shape) != shape or not tensors[name].is_floating_point():
            seen = f"{list(tensors[name].shape)} {tensors[name].dtype}"
            raise KitError(f"{found[name]} of the target {folder} does not fit", seen=seen, wanted=list(shape), fix=_AGAIN)
    return tensors


def _fits(values: Mapping[str, Any], wanted: Mapping[str, Any], whose: str, other: str, names: Iterable[str]) -> None:
    for name in names:
        if values[name] != wanted[name]:
            raise KitError(
                f"{name} of {whose} is not that of {other}", seen=values[name], wanted=wanted[name], fix=f"make {name} agree"
            )


def _target(folder: Path, values: Mapping[str, Any], whose: str) -> targets.Target:
    """The target, if its width and vocabulary are the drafter's."""
    target, _ = targets.describe(str(folder))
    wanted = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    _fits(values, wanted, whose, f"the target {folder}", wanted)
    return target


# ---- writing


@contextmanager
def _new_folder(dest: Path) -> Iterator[Path]:
    """A folder to fill, which takes the name `dest` when it is full, and is gone when filling it fails."""
    if dest.exists() or dest.is_symlink():
        raise KitError(f"{dest} is there already", wanted="a new folder", fix="remove it, or choose another")
    dest.parent.mkdir(parents=True, exist_ok=True)
    partial = dest.with_name(f".{dest.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        yield partial
        partial.rename(dest)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(dest: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    with _new_folder(dest) as folder:
        write_json(folder / "config.json", dict(config))
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    return dest


# ---- between the forms


def _expressible(given: Drafter) -> None:
    """Refuse what `LlamaForCausalLMEagle3` would compute in another way."""
    v = given.values
    n = len(v[AUX] or (0, 0, 0))
    wanted = dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output", "attention_bias", "mlp_bias"), False)
    one = {"num_hidden_layers": 1, "model_type": "llama", "layer_types": ["full_attention"], "number of auxiliary layers": 3}
    seen = {"attention_bias": False, "mlp_bias": False, "model_type": "llama", **v, "number of auxiliary layers": n}
    seen.setdefault("layer_types", ["full_attention"])
    for name, value in (wanted | one).items():
        if seen[name] != value:
            name_of = f"drafter_{name}" if name.startswith("norm") else name
            raise KitError(
                f"{LLAMA_CLASS} cannot express the {name} of {given.folder}",
                seen=seen[name],
                wanted=value,
                fix=f"train with {name_of}: {str(value).lower()}, or serve it in speculators' form, which vLLM reads",
            )
    if ROPE not in v:
        raise KitError(f"the config of {given.folder} names no rope_theta", wanted="a rope base", fix="add it to config.json")
    kind = v[ROPE]["rope_type"]
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        raise KitError(f"{LLAMA_CLASS} has no such rope", seen=kind, wanted="default, linear, dynamic, llama3 or yarn")


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
        raise KitError(f"{source} is in the form of {LLAMA_CLASS} already", wanted="speculators' form", fix="copy the folder")
    _expressible(given)
    v = given.values
    ids = layers.check(v[AUX], target_layers)
    theirs = layers.from_vllm(ids, Convention.SGLANG, target_layers)
    target_class = "".join((given.config["speculators_config"]["verifier"].get("architectures") or [""])[:1])
    if theirs[0] != 1 and target_class.startswith(FIRST_ID_DECIDES):
        raise KitError(
            f"SGLang counts a drafter's layers for {target_class} as the other systems do only if the first is 1",
            seen=list(theirs),
            wanted="1 first, which is vLLM's 2",
            fix="train with aux_layers that begin with 2, or serve it in speculators' form",
        )
    rope = dict(v[ROPE])
    if rope["rope_type"] == "yarn":  # what transformers assumes where they are missing; SpecForge assumes nothing
        rope = {"beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 0, **rope}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config = {
        **{
            key: value
            for key, value in given.config["transformer_layer_config"].items()
            if key not in ("layer_types", "auto_map")
        },
        "architectures": [LLAMA_CLASS],
        "model_type": "llama",
        "draft_vocab_size": v["draft_vocab_size"],
        "target_hidden_size": v["hidden_size"],
        "tie_word_embeddings": False,
        "dtype": _dtype(given.weights),
        ROPE: rope,
        "rope_theta": rope["rope_theta"],  # older readers know these two only
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        AUX: list(ids),
        "eagle_config": {AUX: list(theirs), "use_aux_hidden_state": True},
        **({"fc_norm": True} if v["fc_norm"] else {}),
    }
    return _write(dest, config, {_llama_name(name): t for name, t in given.weights.items() if name not in COPIES})


def _dtype(weights: Mapping[str, torch.Tensor]) -> str:
    return str(weights["fc.weight"].dtype).removeprefix("torch.")


def vllm_ids(given: Drafter, n_layers: int, convention: Convention | str | None = None) -> tuple[int, ...]:
    """A drafter's auxiliary layers as vLLM counts them.

    A flat config does not say whose numbers its ids are; they are read as SGLang's. Where they are exactly vLLM's default they
    were probably meant as vLLM's, and a guess is not good enough: `convention` must say. A file that names them twice, as an
    export does, needs no guess. One that names none leaves them to the default.

    Raises:
        KitError: ids out of range, repeated, not increasing, or another convention's default.
    """
    ids, block = given.values[AUX], (given.config.get("eagle_config") or {}).get(AUX)
    if given.form == "speculators":
        return layers.check(ids, n_layers)
    if not ids:
        return layers.default_aux_layers(n_layers)
    if convention is not None:
        return layers.check(layers.to_vllm(ids, convention, n_layers), n_layers)
    default = layers.default_aux_layers(n_layers) if n_layers >= layers.MIN_LAYERS else None
    other = Convention.VLLM if tuple(ids) == default else layers.other_default(ids, n_layers)
    if other not in (None, Convention.SGLANG):
        raise KitError(
            f"the auxiliary layers of {given.folder} are {other} 's default, in a file where SGLang's numbers are usual",
            seen=list(ids),
            wanted=f"{[i - 1 for i in default or ()]} for the same layers",
            fix=f"say whose numbers they are: convention {other}, or convention sglang",
        )
    found = layers.check(layers.to_vllm(ids, Convention.SGLANG, n_layers), n_layers)
    top = given.config.get(AUX)
    if block and top and tuple(top) != found:
        raise KitError(
            f"{given.folder} names its auxiliary layers twice, and differently",
            seen=f"{top} and, in eagle_config, {block}",
            wanted=f"{list(found)} at the top level",
            fix="say whose numbers those in eagle_config are: convention vllm or sglang",
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

    Imports speculators (10 seconds), whose own config class writes `config.json`.

    Args:
        source: the drafter's folder. Without `embed_tokens.weight` it gets the target's.
        dest: a folder that does not exist.
        verifier: the target's folder.
        convention: whose numbers the auxiliary ids are, where `vllm_ids` cannot tell.
        speculative_tokens: tokens drafted at a step unless the server is told otherwise; the flat form does not say.
        trust_remote_code: as for `load_drafter`.

    Raises:
        KitError: as `load_drafter`, `vllm_ids`; a norm that the file's readers understand differently; a drafter of another
            width or vocabulary than the target; `dest` exists. Nothing is written then.
    """
    given = load_drafter(source, trust_remote_code=trust_remote_code)
    if given.form != "llama":
        raise KitError(f"{source} is in speculators' form already", wanted=LLAMA_CLASS, fix="use it as it is")
    if "norm_output" in given.config:
        raise KitError(
            f"norm_output in the config of {source} has two meanings: SGLang and vLLM feed normed states to the next step, "
            "SpecForge takes the norm before lm_head",
            seen=given.config["norm_output"],
            wanted="no norm_output",
            fix="remove it if SpecForge trained the drafter with true; else this class cannot express it",
        )
    _expressible(given)
    target = _target(verifier, given.values, f"the drafter {source}")
    weights = dict(given.weights)
    if "embed_tokens.weight" not in weights:
        weights["embed_tokens.weight"] = _from_target(verifier, target)["embed_tokens.weight"].to(weights["fc.weight"].dtype)
    fields = {
        "rms_norm_eps": 1e-6,  # transformers' default, which every reader of the flat form shares
        **{key: value for key, value in given.values.items() if key in drafter.FIELDS and key != "verifier"},
        "architectures": ["Eagle3Speculator"],
        "model_type": "llama",
        "layer_types": ["full_attention"],
        "tie_word_embeddings": False,
        "embed_requires_grad": False,
        "speculative_tokens": speculative_tokens,
        "dtype": _dtype(weights),
        AUX: list(vllm_ids(given, target.n_layers, convention)),
    }
    derivation = {
        "fields": [{"name": name, "value": value, "source": "parent"} for name, value in fields.items()],
        "target": {"architecture": target.architecture},
    }
    config = json.loads(drafter.build_config(derivation, verifier).to_json_string())
    return _write(dest, config, weights)


# ---- from a parent


def move_rows(old: torch.Tensor, old_ids: torch.Tensor, new_ids: torch.Tensor, fresh: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Rows of `old [n_old, h]` brought to the places of their target ids; what it lacks comes from `fresh [n_new, h]`.

    Args:
        old: rows by old draft id.
        old_ids: `[n_old]`, target id of each, increasing.
        new_ids: `[n_new]`, target id of each new draft id.
        fresh: rows for ids that `old` does not have.

    Returns:
        The rows `[n_new, h]`, and how many of them came from `old`.
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

    What the parent learnt is kept: fc, its layer with the layer's norms, and the final norm. The final norm is not replaced by
    the target's: it scales the drafter's own states, and a training that starts from the target's starts worse (measured on a
    fresh drafter). What belongs to the target is taken from it: the embeddings, which the trainer freezes; and the verifier's
    norm, which is not stored, because the trainer reads it from the target each time. Rows of lm_head follow their target ids
    into the new draft vocabulary; ids that the parent did not have get the target's rows.

    All floating tensors are float32, and the config says so: speculators keeps stored types, and mixed ones stop the trainer.

    Args:
        parent: a drafter's folder in either form. Its auxiliary ids are only reported: the new config's decide.
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
    config = _config(config_folder)
    if config.get("speculators_model_type") != "eagle3":
        raise KitError(f"{config_folder} has no config in speculators' form", wanted="eagle3", fix="run 02_build_k25_config")
    v = _values(config, "speculators", config_folder)
    target = _target(target_folder, v, f"the config {config_folder}")
    layers.check(v[AUX], target.n_layers)
    shapes = drafter.tensors(v)
    for name, tensor in (("d2t", d2t), ("t2d", t2d)):
        seen = None if tensor is None else tuple(tensor.shape)
        if seen != shapes.get(name):
            raise KitError(f"{name} does not fit the config", seen=seen, wanted=shapes.get(name), fix="run 04_vocab_map again")
    _check_maps(d2t, t2d, "the new vocabulary")
    old = load_drafter(parent, trust_remote_code=trust_remote_code)
    old_aux = old.values[AUX] or (0, 0, 0)
    sizes = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    names = ("number of auxiliary layers", "num_hidden_layers", *sizes, *NORM_FLAGS)
    count = {"number of auxiliary layers": len(old_aux)}, {"number of auxiliary layers": len(v[AUX])}
    _fits(old.values | count[0], v | count[1], f"the parent {parent}", f"the config {config_folder}", names)

    theirs = _from_target(target_folder, target)
    new_ids = target_ids(d2t, v["draft_vocab_size"])
    old_ids = target_ids(old.weights.get("d2t"), old.values["draft_vocab_size"])
    weights = {name: old.weights[name].float() for name in shapes if name not in ("embed_tokens.weight", "d2t", "t2d")}
    weights["embed_tokens.weight"] = theirs["embed_tokens.weight"].float()
    fresh = theirs["lm_head.weight"][new_ids].float()
    weights["lm_head.weight"], moved = move_rows(weights["lm_head.weight"], old_ids, new_ids, fresh)
    weights |= {name: tensor for name, tensor in (("d2t", d2t), ("t2d", t2d)) if tensor is not None}

    same = old_ids.tolist() == new_ids.tolist()
    reasons = {
        "fc.weight": (
            "kept",
            f"learnt on layers {_shown(old)}, reads {', '.join(map(str, v[AUX]))} (vLLM's numbers) from now on",
        ),
        "norm.weight": ("kept", "the drafter's own final norm: the target's makes training start worse"),
        "embed_tokens.weight": ("replaced", "the target's: the drafter reads the target's tokens, and they stay frozen"),
        "lm_head.weight": (
            "kept" if same else "moved",
            "rows follow their target ids; rows that the parent lacks are the target's",
        ),
        "d2t": ("kept" if same else "new", "the run's own vocabulary map"),
        "t2d": ("kept" if same else "new", "the run's own vocabulary map"),
    }
    rows = []
    for name, shape in shapes.items():
        what, reason = reasons.get(name, ("kept", "learnt with the parent's layer"))
        counts = (moved, len(new_ids) - moved) if name == "lm_head.weight" else (None, None)
        row = {
            "tensor": name,
            "shape": list(shape),
            "what": what,
            "rows moved": counts[0],
            "new rows": counts[1],
            "reason": reason,
        }
        rows.append(row)
    why = "the target's; not stored, the trainer reads it from the target"
    no = {"rows moved": None, "new rows": None}
    rows.append({"tensor": "verifier_norm.weight", "shape": shapes["norm.weight"][:1], "what": "replaced", **no, "reason": why})

    layer = {**config["transformer_layer_config"], "dtype": "float32"}
    made = {**{k: x for k, x in config.items() if k != "auto_map"}, "dtype": "float32", "transformer_layer_config": layer}
    made["speculators_config"] = {
        **config["speculators_config"],
        "verifier": {**config["speculators_config"]["verifier"], "name_or_path": drafter.verifier_path(target_folder)},
    }
    _write(dest, made, {name: weights[name] for name in shapes})
    return rows


def _shown(given: Drafter) -> str:
    ids = ", ".join(map(str, given.values[AUX] or ())) or "unnamed"
    return ids if given.form == "speculators" else f"{ids} (as its file numbers them)"


# ---- against the target


def verify_origin(drafter_folder: Path, target_folder: Path) -> list[dict[str, str]]:
    """Compare what a drafter should have from its target with the target, bit for bit in the drafter's stored type.

    speculators keeps the embeddings and lm_head frozen, so after training and every export they must still be the target's;
    a row that is not was lost or mixed up on the way. SpecForge trains lm_head: there a difference is no fault.

    Returns:
        Rows for a table, for embed_tokens, lm_head and, where it is stored, the verifier's norm: `name`, `state` (`ok`, `fail`),
        `found`, `wanted`, `fix`.

    Raises:
        KitError: as `load_drafter`, or the target's width or vocabulary is another.
    """
    import torch

    given = load_drafter(drafter_folder)
    theirs = _from_target(target_folder, _target(target_folder, given.values, f"the drafter {drafter_folder}"))
    ids = target_ids(given.weights.get("d2t"), given.values["draft_vocab_size"])
    pairs = {
        "embed_tokens.weight": theirs["embed_tokens.weight"],
        "lm_head.weight": theirs["lm_head.weight"][ids],
        "verifier_lm_head.weight": theirs["lm_head.weight"][ids],
        "verifier_norm.weight": theirs["norm.weight"][None],
    }
    rows = []
    for name, wanted in pairs.items():
        if name not in given.weights:
            continue
        own = given.weights[name].reshape(wanted.shape)
        bits = torch.int32 if own.dtype == torch.float32 else torch.int16
        equal = int((own.view(bits) == wanted.to(own.dtype).contiguous().view(bits)).all(dim=1).sum())
        state = "ok" if equal == len(own) else "fail"
        rows.append(
            {
                "name": f"{name} is the target's",
                "state": state,
                "found": f"{equal:,} of {len(own):,} rows equal, in {str(own.dtype).removeprefix('torch.')}",
                "wanted": "" if state == "ok" else "all",
                "fix": "" if state == "ok" else "check target_model and the conversion; no fault where lm_head was trained",
            }
        )
    return rows
