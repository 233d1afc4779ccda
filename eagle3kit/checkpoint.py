"""Weights in a folder of safetensors: where each tensor is, and those of the target that a drafter is made from.

Only the files that hold a wanted tensor are opened. Pickled weights never are: reading one runs what is written in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit.errors import KitError
from eagle3kit.target import Target

if TYPE_CHECKING:
    import torch

EMBEDDINGS, HEAD, NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"

Shapes = Mapping[str, tuple[int, ...]]
"""Of tensors, by name."""

AGAIN = "copy or download it again"
_PICKLED = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}


def places(folder: Path) -> dict[str, Path]:
    """The file of every tensor, from the index or, where one file holds everything, from that file.

    Raises:
        KitError: there are no weights, only pickled ones, shards without an index, or an index that names another kind of file.
    """
    index, files = folder / "model.safetensors.index.json", sorted(folder.glob("*.safetensors"))
    if index.exists():
        try:
            found = {str(name): folder / str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KitError(f"{index} cannot be read", seen=repr(error), wanted="a weight_map", fix=AGAIN) from None
        for file in sorted(set(found.values())):
            if file.suffix != ".safetensors" or file.parent != folder or not file.exists():
                seen = "nothing" if file.suffix == ".safetensors" else file.suffix
                raise KitError(f"{index.name} of {folder} names {file.name}", seen=seen, wanted="a safetensors file", fix=AGAIN)
        return found
    if not files:
        pickled = [path.name for path in sorted(folder.glob("*")) if path.suffix in _PICKLED]
        what = "has only pickled weights, and reading those could run any code" if pickled else "has no weights"
        seen = ", ".join(pickled[:3]) or "no *.safetensors"
        raise KitError(f"{folder} {what}", seen=seen, wanted="model.safetensors", fix="get it in safetensors")
    if len(files) > 1 or "-of-" in files[0].name:
        seen = ", ".join(file.name for file in files[:3])
        raise KitError(f"{folder} has shards without an index", seen=seen, wanted=index.name, fix=AGAIN)
    with opened(files[0]) as file:
        return dict.fromkeys(file.keys(), files[0])


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, opened for torch.

    Raises:
        KitError: it is cut short, or no such file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise KitError(f"{path} is cut short or no safetensors file", seen=error, wanted="a whole file", fix=AGAIN) from None


def read(where: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """Tensors from their files."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(set(where.values())):
        with opened(path) as file:
            tensors |= {name: file.get_tensor(name) for name, place in where.items() if place == path}
    return tensors


def read_exactly(folder: Path, shapes: Shapes, optional: Shapes) -> dict[str, torch.Tensor]:
    """The tensors of a drafter's folder, which must be these and no others; they are compared before anything is loaded.

    Raises:
        KitError: as `places` and `opened`; a tensor is missing, unexpected, or of another shape or type: each is named.
    """
    where = places(folder)
    seen: dict[str, str] = {}
    for path in sorted(set(where.values())):
        with opened(path) as file:
            for name in list(file.keys()):
                part = file.get_slice(name)
                kind = "float" if part.get_dtype() in ("F32", "F16", "BF16") else part.get_dtype()
                seen[name] = f"{list(part.get_shape())} {kind}"
    kinds = {"d2t": "I64", "t2d": "BOOL"}
    wanted = {name: f"{list(shape)} {kinds.get(name, 'float')}" for name, shape in {**shapes, **optional}.items()}
    faults = {name: (f"{name} in a file", f"{name} in the index") for name in sorted(set(seen) - set(where))}
    for name in sorted({*wanted, *where} - {*faults}):
        if seen.get(name) != wanted.get(name) and (name in seen or name not in optional):
            want = f"{name} {wanted[name]}" if name in wanted else f"no {name}"
            faults[name] = (f"{name} {seen.get(name, 'missing')}", want)
    if faults:
        first = list(faults.values())[:5]
        what = f"{folder} does not hold the {len(wanted)} tensors that its config describes, {len(faults)} differ"
        seen_all, wanted_all = (", ".join(texts) for texts in zip(*first, strict=True))
        raise KitError(what, seen=seen_all, wanted=wanted_all, fix="use a drafter of this class, with its own config.json")
    return read(where)


def of_target(folder: Path, target: Target, wanted: Sequence[str] = (EMBEDDINGS, HEAD, NORM)) -> dict[str, torch.Tensor]:
    """The target's embeddings `[vocab, h]`, lm_head `[vocab, h]` and final norm `[h]`, found by the end of their names.

    Wrappers put a prefix before them. The shortest name wins, as in speculators: a vision tower may have such a name too. Without
    lm_head the embeddings stand in, if the config says that they are tied.

    Raises:
        KitError: as `places` and `opened`; a tensor is missing, or does not fit the target's config.
    """
    where, h = places(folder), target.hidden_size
    tensors: dict[str, torch.Tensor] = {}
    for name in wanted:
        matches = _matches(where, name)
        if not matches and name == HEAD and target.tie_word_embeddings:
            matches = _matches(where, EMBEDDINGS)
        if not matches:
            raise KitError(f"the target {folder} lacks a weight", seen=f"no {name}", wanted=name, fix=AGAIN)
        found = min(matches, key=len)
        tensor = read({found: where[found]})[found]
        shape = (h,) if name == NORM else (target.vocab_size, h)
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            seen = f"{list(tensor.shape)} {tensor.dtype}"
            raise KitError(f"{found} of the target {folder} does not fit its config", seen=seen, wanted=list(shape), fix=AGAIN)
        tensors[name] = tensor
    return tensors


def _matches(where: Mapping[str, Path], name: str) -> list[str]:
    end = f"model.{NORM}" if name == NORM else name
    return [place for place in where if place == end or place.endswith(f".{end}")]
