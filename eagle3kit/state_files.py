"""A file of hidden states: in the target's own number type (`native`), or in one byte a number with a scale a token (`fp8`).

    hidden_states [T, n_layers, hidden]    the target's number type, or float8_e4m3fn
    hidden_states_scales [T, 1, 1]         float32, with `fp8` only
    token_ids [T]

Layout and rounding of `fp8` are hs_connectors': its connector writes such files on a GPU, its reader gives them to the trainer.
A token's scale serves all its layers, so a layer much smaller than the largest loses more than another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

AGAIN = "delete the run's hidden_states folder and run notebook 03_extract_hidden_states again"
"""What mends states that are whole but wrong: no parameter has changed, so `force` would do nothing."""


def tensors(states: torch.Tensor, token_ids: torch.Tensor, storage: str) -> dict[str, torch.Tensor]:
    """What to write for one sequence.

    Args:
        states: `[T, n_layers, hidden]`, contiguous.
        token_ids: `[T]`.
        storage: `native` or `fp8`.
    """
    if storage == "native":
        return {"hidden_states": states, "token_ids": token_ids}
    from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8

    rounded, scales = quantize_tensor_to_fp8(states)
    return {"hidden_states": rounded, SCALES_KEY: scales, "token_ids": token_ids}


def read(path: Path, positions: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
    """`hidden_states` and `token_ids` of a file, with the states as numbers whatever they are stored as.

    Everything of the kit that looks at states reads them here: numbers of one byte without their scales are not the states, and
    look like it. From `fp8` the states come in float32. The trainer's reader makes them and their scales bfloat16 first, which
    adds an eighth of the first rounding at most.

    Args:
        path: the file.
        positions: read only these, in this order, not the whole file.

    Raises:
        SafetensorError, OSError: the file is missing, cut short or no safetensors file.
        ValueError: it holds numbers of one byte without a scale for each token.
    """
    import torch
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        if positions is None:
            found = {name: file.get_tensor(name) for name in names}
        else:
            found = {name: torch.cat([file.get_slice(name)[at : at + 1] for at in positions]) for name in names}
    states = found.get("hidden_states")
    if states is not None and states.dtype == torch.float8_e4m3fn:
        from hs_connectors.fp8_utils import SCALES_KEY, dequantize_fp8_tensor

        scales = found.pop(SCALES_KEY, None)
        if scales is None or scales.shape != (len(states), 1, 1):
            raise ValueError("numbers of one byte without a scale for each token")
        found["hidden_states"] = dequantize_fp8_tensor(states, scales, torch.float32)
    return found


def storage_of(path: Path) -> str:
    """`native` or `fp8`: what a file's states are stored as. Raises as `read` does for a file that cannot be opened."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return "fp8" if file.get_slice("hidden_states").get_dtype() == "F8_E4M3" else "native"
