"""The draft vocabulary: which target tokens the drafter can propose, and how much of real text they cover.

vocab/d2t.npy         `[draft_vocab] int64`: target id of draft id i is `i + d2t[i]`
vocab/t2d.npy         `[target_vocab] bool`: whether a target token is in the draft vocabulary
vocab/coverage.json   coverage of the training and held-out answers against size
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from eagle3kit.data import MADE_BY as ROWS_MADE_BY
from eagle3kit.data import load_rows, load_tokens
from eagle3kit.errors import KitError
from eagle3kit.rundir import Run, read_json, write_atomic, write_json

if TYPE_CHECKING:
    import numpy as np
    import torch

MADE_BY = "04_vocab_map"


def count_supervised(tokens: Any, indices: Iterable[int]) -> Counter[int]:
    """How often each token id occurs among the supervised tokens (loss mask 1) of the rows `indices`."""
    counts: Counter[int] = Counter()
    for index in indices:
        row = tokens[index]
        counts.update(row["input_ids"][row["loss_mask"].bool()].tolist())
    return counts


def choose(counts: Mapping[int, int], size: int, target_vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `size` most frequent tokens as (d2t `[size]`, t2d `[target_vocab]`), by speculators' own rule.

    Raises:
        KitError: `size` is larger than the target's vocabulary, or a counted id is outside it.
    """
    if not 0 < size <= target_vocab:
        raise KitError(
            "draft_vocab_size does not fit the target", seen=size, wanted=f"1 to {target_vocab}", fix="lower draft_vocab_size"
        )
    if counts and max(counts) >= target_vocab:
        raise KitError(
            "a token id is outside the target's vocabulary", seen=max(counts), wanted=f"below {target_vocab}", fix="run 03 again"
        )
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    d2t, t2d = build_vocab_mappings_from_distribution(dict(counts), size, target_vocab)
    check_maps(d2t, t2d)
    return d2t, t2d


def check_maps(d2t: torch.Tensor, t2d: torch.Tensor) -> None:
    """Hold the two maps against each other.

    Raises:
        KitError: d2t is not strictly increasing in target ids or leaves the vocabulary, or t2d marks other tokens.
    """
    import torch

    ids = torch.arange(len(d2t)) + d2t
    if len(ids) == 0 or bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= len(t2d):
        raise KitError("d2t is not an increasing map into the target's vocabulary", fix=f"run notebook {MADE_BY} again")
    marked = t2d.nonzero()[:, 0]
    if not torch.equal(marked, ids):
        raise KitError("t2d marks other tokens than d2t reaches", seen=len(marked), wanted=len(ids), fix=f"run {MADE_BY} again")


def coverage(counts: Mapping[int, int], t2d: torch.Tensor) -> float:
    """Share of the counted tokens that are in the draft vocabulary `t2d [target_vocab]`."""
    chosen = {int(token) for token in t2d.nonzero()[:, 0]}
    return sum(n for token, n in counts.items() if token in chosen) / max(1, sum(counts.values()))


def build(run: Run, target_vocab: int) -> dict[str, Any]:
    """Count, choose, save; the resumable step `vocab`.

    Returns:
        `{"sizes", "train", "heldout", "chosen", "distinct"}`, the coverage curve.

    Raises:
        KitError: the held-out coverage is below `vocab_min_coverage`.
    """
    size = run.params.draft_vocab_size or target_vocab
    step = run.step("vocab", {"data": run.digest("data", ROWS_MADE_BY), "size": size, "target_vocab": target_vocab})
    if not step.done:
        with step:
            rows, _ = load_rows(run)
            tokens = load_tokens(run)
            train = count_supervised(tokens, (i for i, row in enumerate(rows) if row.split == "train"))
            heldout = count_supervised(tokens, (i for i, row in enumerate(rows) if row.split == "heldout"))
            d2t, t2d = choose(train, size, target_vocab)
            sizes = sorted({min(2**power, target_vocab) for power in range(8, 18)} | {size})
            maps = [choose(train, each, target_vocab)[1] for each in sizes]
            curve = {
                "sizes": sizes,
                "train": [coverage(train, each) for each in maps],
                "heldout": [coverage(heldout, each) for each in maps],
                "chosen": size,
                "distinct": len(train),
            }
            share = coverage(heldout, t2d)
            _save(run, d2t.numpy(), t2d.numpy())
            write_json(run.path("vocab", "coverage.json"), curve)
            step.outputs = {"size": size, "heldout_coverage": share}
            run.record_all(
                {"vocab.size": (size, "tokens"), "vocab.distinct": (len(train), "tokens")}, "supervised training tokens"
            )
            run.record("vocab.heldout_coverage", round(share, 5), "share", "supervised held-out tokens")
    share = run.manifest("vocab", MADE_BY)["outputs"]["heldout_coverage"]
    if share < run.params.vocab_min_coverage:
        raise KitError(
            "the draft vocabulary covers too little of the held-out answers",
            seen=f"{100 * share:.1f} %",
            wanted=f"at least {100 * run.params.vocab_min_coverage:.0f} % (vocab_min_coverage)",
            fix="raise draft_vocab_size or train on more prompts",
        )
    result: dict[str, Any] = read_json(run.path("vocab", "coverage.json"), MADE_BY)
    return result


def _save(run: Run, d2t: np.ndarray[Any, Any], t2d: np.ndarray[Any, Any]) -> None:
    import numpy as np

    for name, array in (("d2t", d2t), ("t2d", t2d)):
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        write_atomic(run.path("vocab", f"{name}.npy"), buffer.getvalue())


def load_maps(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """(d2t `[draft_vocab] int64`, t2d `[target_vocab] bool`) of the run, checked against each other."""
    import numpy as np
    import torch

    d2t, t2d = (torch.from_numpy(np.load(run.path("vocab", f"{name}.npy"), allow_pickle=False)) for name in ("d2t", "t2d"))
    check_maps(d2t, t2d)
    return d2t, t2d


def coverage_rows(curve: dict[str, Any]) -> list[dict[str, Any]]:
    """The coverage curve as rows of a table, the chosen size marked."""
    return [
        {
            "size": size,
            "training": f"{100 * train:.2f} %",
            "held out": f"{100 * heldout:.2f} %",
            "": "chosen" if size == curve["chosen"] else "",
        }
        for size, train, heldout in zip(curve["sizes"], curve["train"], curve["heldout"], strict=True)
    ]
