"""Every extracted slot held against the same weights run by transformers: which layer is it really?

The golden check knows only the last layer, for only that one has logits to compare with. A drafter trained on an auxiliary layer
that is one off is merely worse, so here each slot is held against every layer of a second implementation: a table slot x layer,
whose smallest error must stand at the layer that the slot is said to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import engine_transformers, state_files
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
            fix=f"check aux_layers and the vLLM version, then {state_files.AGAIN}",
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


def caption(result: Mapping[str, Any], engine: str) -> str:
    """What the table of `rows` compares, and how far the two engines' predictions lie apart.

    Args:
        engine: `extraction_engine`, which made the states.
    """
    if "reason" in result:
        return f"parity of the two engines {result['reason']}"
    if engine == "transformers":
        return (
            "transformers made these states: it is compared with itself, which says nothing of vLLM; relative error of each slot"
        )
    apart = (
        f"most likely token equal at {100 * result['top1']:.2f} % of {result['positions']} positions, log-probabilities "
        f"{result['mae']:.1e} nats apart; "
        if "top1" in result  # a run of an older version has none
        else ""
    )
    return f"parity of vLLM and transformers on the same token ids: {apart}relative error of each slot against the layers there"


def score(
    folder: Path,
    dtype: str,
    samples: Sequence[tuple[torch.Tensor, torch.Tensor]],
    layers: Sequence[int],
    predict: Callable[[torch.Tensor], torch.Tensor],
    trust_remote_code: bool,
) -> dict[str, Any]:
    """Hold the extracted states of a few rows against transformers.

    Args:
        folder: the target's checkpoint. dtype: `target_dtype`.
        samples: (token ids `[T]`, extracted states `[T, slots, hidden]`).
        layers: vLLM ids of the slots; the last is the number of layers.
        predict: log-probabilities `[T, vocab]` of last-layer states `[T, hidden]`: `log_softmax(lm_head(norm(h)))`.

    Returns:
        `{"layers", "errors": [slots][layers + 1], "positions", "top1", "mae"}`, ready for `judge`. The last two compare what
        both engines' last states predict: share of positions with the same most likely token, and mean absolute difference of
        the log-probability of the token that follows, in nats.
    """
    import torch

    model = engine_transformers.load(folder, dtype, trust_remote_code=trust_remote_code)
    every = range(layers[-1] + 1)
    total = torch.zeros(len(layers), len(every))
    positions, hits, apart = 0, 0, 0.0
    for ids, extracted in samples:
        (known,) = engine_transformers.states(model, [ids.tolist()], every)
        total += errors(extracted, known.transpose(0, 1)) * len(ids)
        positions += len(ids)
        ours, theirs = predict(extracted[:-1, -1]), predict(known[:-1, -1])
        hits += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        apart += float((ours - theirs).gather(1, ids[1:, None]).abs().sum())
    predicted = max(1, positions - len(samples))
    found = {"layers": list(layers), "errors": (total / positions).tolist(), "positions": positions}
    return found | {"top1": hits / predicted, "mae": apart / predicted}
