"""Which layer a layer id means: the auxiliary-layer conventions and their conversion.

EAGLE-3 feeds the drafter with the residual stream of the target at a few depths. Every system numbers those depths in its own
way, ids of one system are valid ids in another, and nothing fails when they are mixed up: the drafter trains on one depth, is
served another, and acceptance is close to 1.0. So the kit keeps ids in one convention, vLLM's, and converts at every border.

The canonical id, for a target of `n` layers numbered 0 .. n-1:

    0       the embeddings (input of layer 0)
    i       input of layer i = output of layer i-1
    n       output of the last layer, before the final norm (what the drafter's training target is computed from)

This module imports nothing but the kit's error, so that every other module may use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from eagle3kit.errors import KitError


class Convention(StrEnum):
    """Whose numbers the ids are.

    Members:
        VLLM: vLLM 0.18 and later; the kit's own.
        SPECULATORS: speculators 0.5 and later; the same numbers as vLLM's.
        SPECULATORS_OLD: speculators 0.4 and older; an id is the layer whose output is taken.
        SGLANG: SGLang, SpecForge and TorchSpec; an id is the layer whose output is taken.
        TRANSFORMERS: index into `output_hidden_states`. Its last entry lies after the final norm, so id n has no index there.
        DFLASH: z-lab's DFlash; id L is `hidden_states[L + 1]`.
    """

    VLLM = "vllm"
    SPECULATORS = "speculators"
    SPECULATORS_OLD = "speculators_old"
    SGLANG = "sglang"
    TRANSFORMERS = "transformers"
    DFLASH = "dflash"


_OFFSET = {
    Convention.VLLM: 0,
    Convention.SPECULATORS: 0,
    Convention.SPECULATORS_OLD: 1,
    Convention.SGLANG: 1,
    Convention.TRANSFORMERS: 0,
    Convention.DFLASH: 1,
}
"""Canonical id minus the convention's id."""

_AFTER_NORM = {Convention.TRANSFORMERS, Convention.DFLASH}
"""Conventions that read `output_hidden_states`, where the last layer's output before the final norm does not occur."""

MIN_LAYERS = 7
"""The fewest layers for which `default_aux_layers` gives three different depths."""


def to_vllm(ids: Iterable[int], convention: Convention | str, n_layers: int) -> tuple[int, ...]:
    """Convert ids of `convention` to the canonical ones.

    Args:
        ids: layer ids, in any order.
        convention: whose ids they are; a `Convention` or its value.
        n_layers: number of decoder layers of the target.

    Returns:
        The ids as vLLM counts them, in the order given, each in 0 .. n_layers.

    Raises:
        KitError: the convention is unknown, an id is outside the target, or it names a point after the final norm.
    """
    known = _convention(convention)
    return tuple(_in_range(i + _OFFSET[known], i, known, n_layers) for i in ids)


def from_vllm(ids: Iterable[int], convention: Convention | str, n_layers: int) -> tuple[int, ...]:
    """Convert canonical ids to those of `convention`. The inverse of `to_vllm`.

    Args:
        ids: canonical ids, in any order.
        convention: whose ids are wanted; a `Convention` or its value.
        n_layers: number of decoder layers of the target.

    Raises:
        KitError: the convention is unknown, an id is outside the target, or the convention has no number for it: id 0
            (embeddings) where ids are layers, and id n_layers (before the final norm) where ids index `hidden_states`.
    """
    known = _convention(convention)
    converted = []
    for i in ids:
        _in_range(i, i, Convention.VLLM, n_layers)
        given = i - _OFFSET[known]
        if given < 0:
            raise KitError(f"the embeddings (vLLM id {i}) have no number in the convention {known.value}", seen=i)
        _in_range(i, given, known, n_layers)
        converted.append(given)
    return tuple(converted)


def default_aux_layers(n_layers: int) -> tuple[int, int, int]:
    """The auxiliary layers that vLLM and SGLang use when a drafter names none: an early, a middle and a late one.

    Source of the formula: `get_eagle3_aux_hidden_state_layers` of vLLM's models, `(2, n // 2, n - 3)`. In SGLang's own
    numbers the same points are `(1, n // 2 - 1, n - 4)`.

    Raises:
        KitError: the target has fewer than `MIN_LAYERS` layers, where the three ids are not three different depths.
    """
    if n_layers < MIN_LAYERS:
        raise KitError(
            "the default auxiliary layers need three different depths",
            seen=f"{n_layers} layers",
            wanted=f"at least {MIN_LAYERS}",
            fix="set aux_layers",
        )
    return 2, n_layers // 2, n_layers - 3


def other_default(ids: Sequence[int], n_layers: int) -> Convention | None:
    """The convention, other than vLLM's, whose default ids for this target are exactly `ids`, or None.

    A list copied from a file of another system nearly always is that system's default, and it nearly always is a list of
    valid vLLM ids one layer away from what was meant.
    """
    if n_layers < MIN_LAYERS:
        return None
    default = default_aux_layers(n_layers)
    lists = {
        Convention.SGLANG: tuple(i - 1 for i in default),
        Convention.SPECULATORS_OLD: (*default, n_layers - 1),
    }
    return next((convention for convention, theirs in lists.items() if tuple(ids) == theirs), None)


def check(ids: Sequence[int], n_layers: int) -> tuple[int, ...]:
    """Check auxiliary-layer ids in the canonical convention before anything is spent on them.

    Wanted: at least one id, each in 1 .. n_layers - 1, strictly increasing. Id 0 is the embeddings, which the drafter is fed
    anyway and which vLLM cannot record; id n_layers is always recorded beside the auxiliary layers and is not one of them.

    Args:
        ids: the ids as vLLM counts them.
        n_layers: number of decoder layers of the target.

    Returns:
        The ids as a tuple.

    Raises:
        KitError: the list is empty, out of range, repeated or not increasing, or it is another convention's default list for
            this target; the message then names that convention and the ids it stands for here.
    """
    other = other_default(ids, n_layers)
    if other is not None:
        meant = [i for i in to_vllm(ids, other, n_layers) if i < n_layers]
        raise KitError(
            f"aux_layers is the default list of the convention {other.value} for {n_layers} layers, which names the layer whose "
            f"output is taken: read as vLLM ids, each means one layer earlier",
            seen=list(ids),
            wanted=f"{meant}, the same points in vLLM's ids",
            fix=f"set aux_layers: {meant}",
        )
    if not ids:
        raise KitError("aux_layers is empty", seen=[], wanted="three ids", fix=_fix(n_layers))
    outside = [i for i in ids if not 1 <= i < n_layers]
    if outside:
        note = f"; {n_layers} (the last layer's output) is recorded without being listed" if n_layers in outside else ""
        raise KitError(
            f"aux_layers names layers that the target does not have as auxiliary layers{note}",
            seen=outside,
            wanted=f"ids in 1 .. {n_layers - 1} for a target of {n_layers} layers",
            fix=_fix(n_layers),
        )
    if len(set(ids)) != len(ids):
        repeated = sorted({i for i in ids if list(ids).count(i) > 1})
        raise KitError("aux_layers repeats a layer", seen=repeated, wanted="every id once", fix=_fix(n_layers))
    if list(ids) != sorted(ids):
        raise KitError(
            "aux_layers is not increasing: vLLM records layers in their order in the target, whatever the order of the list, "
            "so the columns of the drafter's fc would be swapped",
            seen=list(ids),
            wanted=sorted(ids),
            fix=f"set aux_layers: {sorted(ids)}",
        )
    return tuple(ids)


def extraction_ids(aux_layers: Sequence[int], n_layers: int) -> tuple[int, ...]:
    """What to record for training: the auxiliary layers and, last, id n_layers, from which the targets are computed.

    The recorded array is `[T, len(aux_layers) + 1, hidden]` in this order.
    """
    return (*check(aux_layers, n_layers), n_layers)


def table(ids: Sequence[int], n_layers: int) -> list[dict[str, str]]:
    """Rows for display: the same residual points in every system's numbers, the last layer's output included.

    Args:
        ids: canonical auxiliary-layer ids; id n_layers is added when it is not among them.
        n_layers: number of decoder layers of the target.

    Raises:
        KitError: an id is outside 0 .. n_layers.
    """
    points = tuple(ids) if n_layers in ids else (*ids, n_layers)
    return [
        {
            "point": _point(i, n_layers),
            "vLLM, speculators >= 0.5": str(i),
            "transformers hidden_states": _number(i, Convention.TRANSFORMERS, n_layers),
            "SGLang, TorchSpec": _number(i, Convention.SGLANG, n_layers),
            "speculators <= 0.4": _number(i, Convention.SPECULATORS_OLD, n_layers),
            "DFlash": _number(i, Convention.DFLASH, n_layers),
        }
        for i in points
    ]


def _point(i: int, n_layers: int) -> str:
    if i == 0:
        return "embeddings"
    return f"output of layer {i - 1}" + (", before the final norm" if i == n_layers else "")


def _number(i: int, convention: Convention, n_layers: int) -> str:
    """The id of a canonical point in `convention`, or a dash where it has none."""
    _in_range(i, i, Convention.VLLM, n_layers)
    try:
        return str(from_vllm([i], convention, n_layers)[0])
    except KitError:
        return "-"


def _convention(name: Convention | str) -> Convention:
    try:
        return Convention(name)
    except ValueError:
        raise KitError("unknown layer convention", seen=name, wanted=", ".join(c.value for c in Convention)) from None


def _in_range(canonical: int, given: int, convention: Convention, n_layers: int) -> int:
    """Return `canonical` if it is a point of the target that `convention` can name; `given` is the id as the caller wrote it."""
    if canonical == n_layers and convention in _AFTER_NORM:
        raise KitError(
            f"layer id {given} cannot be taken from transformers' hidden_states: its last entry lies after the final norm",
            seen=given,
            wanted="a point before the last layer's output",
            fix="take the last layer's output with a forward hook",
        )
    if given < 0 or not 0 <= canonical <= n_layers:
        highest = n_layers - _OFFSET[convention] - (convention in _AFTER_NORM)
        raise KitError(
            f"layer id {given} is outside the target of {n_layers} layers (convention {convention.value})",
            seen=given,
            wanted=f"ids in 0 .. {highest}",
            fix="correct the ids, or say whose numbers they are (convention)",
        )
    return canonical


def _fix(n_layers: int) -> str:
    return f"set aux_layers: {list(default_aux_layers(n_layers))}" if n_layers >= MIN_LAYERS else "set aux_layers"
