"""Every extracted slot held against the same weights run by transformers: which layer is it really?

The golden check knows only the last layer, for only that one has logits to compare with. A drafter trained on an auxiliary layer
that is one off is merely worse, so here each slot is held against every layer of a second implementation: a table slot x layer,
whose smallest error must stand at the layer that the slot is said to hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit.errors import KitError
from eagle3kit.rundir import total_bytes

if TYPE_CHECKING:
    import torch

MEMORY_FACTOR = 1.3
"""Memory that a forward pass of a few rows takes, in sizes of the weights; twice that while weights are converted to float32."""


def why_not(folder: Path, dtype: str, available: int) -> str | None:
    """Why the target cannot also be run by transformers here, or None when it can.

    Args:
        folder: the target's checkpoint. dtype: number type that it is served in; the reference computes in it too.
        available: free memory in bytes.
    """
    stored = total_bytes(folder.glob("*.safetensors"))
    needed = stored * MEMORY_FACTOR * (2 if dtype == "float32" else 1)
    if not stored:
        return f"no weights in {folder}"
    if needed > available:
        return f"transformers would need {needed / 1e9:.1f} GB for the weights of the target, {available / 1e9:.1f} GB are free"
    return None


def load(folder: Path, dtype: str, trust_remote_code: bool = False) -> torch.nn.Module:
    """The target as transformers builds it, on the CPU, in the number type that it is served in.

    A Kimi-K2.5 wrapper is an image-text-to-text model. Its latent norms get the epsilon of the config, as vLLM has it:
    transformers leaves them at its default, which alone makes an error of 1e-5.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    kind = AutoModelForCausalLM if text is config else AutoModelForImageTextToText
    number_type = "auto" if dtype == "auto" else getattr(torch, dtype)
    model: torch.nn.Module = kind.from_pretrained(
        folder, dtype=number_type, attn_implementation="eager", trust_remote_code=trust_remote_code
    ).eval()
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = text.rms_norm_eps
    return model


def decoder(model: torch.nn.Module, n_layers: int) -> torch.nn.Module:
    """The part of a model that has `n_layers` decoder layers in `layers`, and the final `norm`.

    Raises:
        KitError: there is none.
    """
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if layers is not None and hasattr(module, "norm") and len(layers) == n_layers:
            return module
    raise KitError(
        f"{type(model).__name__} has no decoder of {n_layers} layers that transformers' forward could be watched in",
        fix="correct target_model",
    )


def states(model: torch.nn.Module, ids: torch.Tensor, n_layers: int) -> torch.Tensor:
    """The residual stream of one sequence at every point that vLLM numbers: id i is the input of layer i, the last is the norm's.

    Args:
        ids: `[T]`.

    Returns:
        `[n_layers + 1, T, hidden]`. transformers' own `output_hidden_states` ends with the state after the norm instead.
    """
    import torch

    found: list[torch.Tensor] = []

    def keep(_: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found.append((args[0] if args else kwargs["hidden_states"])[0].detach())

    part: Any = decoder(model, n_layers)
    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in (*part.layers, part.norm)]
    try:
        with torch.inference_mode():
            model(input_ids=ids[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found)


def errors(extracted: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Relative error of each slot against each layer, averaged over positions.

    Args:
        extracted: `[T, slots, hidden]`. known: `[layers, T, hidden]`.

    Returns:
        `[slots, layers]`: the L2 norm of the difference, over that of the known state. Each position counts alike: the first
        token's state is often a thousand times larger than the others and would hide them.
    """
    import torch

    known = known.float()
    size = known.norm(dim=-1).clamp(min=1e-12)  # [layers, T]
    slots = [((extracted[:, slot].float() - known).norm(dim=-1) / size).mean(-1) for slot in range(extracted.shape[1])]
    return torch.stack(slots)


def judge(result: Mapping[str, Any], max_error: float) -> None:
    """Raise unless every slot holds the layer that it is said to hold.

    Args:
        result: `{"layers": [ids of the slots], "errors": [slots][layers]}`.
        max_error: largest relative error of a slot against its own layer.

    Raises:
        KitError: a slot is further off; names the layer that it fits best.
    """
    for slot, (layer, row) in enumerate(zip(result["layers"], result["errors"], strict=True)):
        best = min(range(len(row)), key=row.__getitem__)
        if row[layer] <= max_error and best == layer:
            continue
        raise KitError(
            f"slot {slot} does not hold layer {layer} of the target",
            seen=f"relative error {row[layer]:.2g} against layer {layer}; it fits layer {best} best ({row[best]:.2g})",
            wanted=f"at most {max_error:g} (golden_max_layer_error), and no layer that fits better",
            fix="check aux_layers and the vLLM version, then run with force: true",
        )


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each slot's error against its own layer and the two beside it, for a table."""
    found = []
    for slot, (layer, row) in enumerate(zip(result.get("layers", []), result.get("errors", []), strict=True)):
        near = {name: row[at] if 0 <= at < len(row) else None for name, at in (("before", layer - 1), ("after", layer + 1))}
        found.append(
            {
                "slot": slot,
                "layer": layer,
                "error": row[layer],
                "against the layer before": near["before"],
                "against the layer after": near["after"],
                "fits best": min(range(len(row)), key=row.__getitem__),
            }
        )
    return found


def score(
    folder: Path, dtype: str, samples: Sequence[tuple[torch.Tensor, torch.Tensor]], layers: Sequence[int], trust_remote_code: bool
) -> dict[str, Any]:
    """Hold the extracted states of a few rows against transformers.

    Args:
        folder: the target's checkpoint. dtype: `target_dtype`.
        samples: (token ids `[T]`, extracted states `[T, slots, hidden]`).
        layers: vLLM ids of the slots; the last is the number of layers.

    Returns:
        `{"layers", "errors": [slots][layers + 1], "positions"}`, ready for `judge`.
    """
    import torch

    model = load(folder, dtype, trust_remote_code)
    total = torch.zeros(len(layers), layers[-1] + 1)
    positions = 0
    for ids, extracted in samples:
        total += errors(extracted, states(model, ids, layers[-1])) * len(ids)
        positions += len(ids)
    return {"layers": list(layers), "errors": (total / positions).tolist(), "positions": positions}
