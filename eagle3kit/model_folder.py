"""A folder with a model: is it complete, and which weights are in it, from the headers of its safetensors files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import IO, Any

from eagle3kit.errors import KitError


def tensor_names(folder: Path) -> list[str]:
    """Names of all weights in a model folder, read from the index or from the files' headers, without loading a weight.

    Raises:
        KitError: there are no weights, or a file is cut short.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return sorted(json.loads(index.read_bytes())["weight_map"])
    names = []
    for file in sorted(folder.glob("*.safetensors")):
        names += [name for name in _header(file) if name != "__metadata__"]
    return sorted(names)


def check_folder(folder: Path) -> Path:
    """Check that a folder is a complete model: config, tokenizer, every weight file of the index, and none of them cut short.

    A download that broke off leaves a folder that vLLM opens for minutes before it fails; reading the headers takes a moment.

    Raises:
        KitError: something is missing; the message names it.
    """
    missing = [name for name in ("config.json",) if not (folder / name).exists()]
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tiktoken.model")):
        missing.append("a tokenizer (tokenizer.json, tokenizer.model or tiktoken.model)")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    else:
        files = [file.name for file in folder.glob("*.safetensors")] or ["*.safetensors"]
    missing += [name for name in files if not (folder / name).exists()]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise KitError(f"{folder} is not a complete model", seen=f"missing: {shown}", fix="copy or download the model again")
    for name in files:
        _header(folder / name)
    return folder


def _header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return read_header(stream, file.stat().st_size, str(file))
    except OSError as error:
        raise KitError(f"{file} is not a safetensors file", seen=error, fix="copy or download the model again") from None


def read_header(stream: IO[bytes], size: int, name: str) -> dict[str, Any]:
    """The header of a safetensors file: eight bytes of length, then JSON whose largest offset says how long the file is.

    Args:
        stream: at its beginning; afterwards where the tensors begin, from where their `data_offsets` count.
        size: bytes of the whole file.
        name: what to call it in errors.

    Raises:
        KitError: it is not a safetensors file, or cut short.
    """
    try:
        length = struct.unpack("<Q", stream.read(8))[0]
        header: dict[str, Any] = json.loads(stream.read(min(length, size)))
        wanted = 8 + length + max((v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"), default=0)
    except (struct.error, ValueError, KeyError) as error:
        raise KitError(f"{name} is not a safetensors file", seen=error, fix="copy or download the model again") from None
    if size != wanted:
        raise KitError(
            f"{name} is cut short" if size < wanted else f"{name} has bytes behind its end",
            seen=f"{size} bytes",
            wanted=f"{wanted} bytes",
            fix="copy or download the model again",
        )
    return header
