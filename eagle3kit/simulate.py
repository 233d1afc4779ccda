"""The acceptance that serving should give, computed without a server: chain drafting over captured hidden states.

speculators' module, unrolled over a whole answer, drafts from every position at once, as in training: step i of the draft that
starts at position j reads its own output of step i - 1 and the token that really stands there. Where the first i drafts were
right these are the tokens that serving would feed back too, so the leading run of right drafts is what the engine would accept.
The walk then goes as the engine does: past the accepted tokens and the one that the target adds, to the next draft.

Served and simulated acceptance of the same answers must be equal but for ties. Where they are not, trainer and server disagree on
layers, shift, norms, rope or vocabulary, and each of these is silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import hidden_states, state_files
from eagle3kit.data import load_rows, load_tokens
from eagle3kit.rundir import Run

if TYPE_CHECKING:
    import torch


def load_module(folder: Path) -> Any:
    """The drafter in `folder` as speculators' module, float32, on the CPU."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"  # its default wants a compiler
    return Eagle3DraftModel.from_pretrained(folder, config=config).float().eval()


def drafts(module: Any, states: torch.Tensor, ids: torch.Tensor, k: int) -> torch.Tensor:
    """What the drafter proposes from every position.

    Args:
        module: see `load_module`.
        states: `[T, n_aux, hidden]` float32, the target's auxiliary states.
        ids: `[T]` token ids.
        k: tokens a draft.

    Returns:
        `[T - 1, k]` target ids. Row j is drafted from state j, given token j + 1; its column i stands for token j + 2 + i, and
        holds what is proposed there when the columns before it are right.
    """
    import torch

    known = ids[1:][None]
    with torch.inference_mode():
        steps = module(
            hidden_states=states[:-1].reshape(1, len(ids) - 1, -1),
            input_ids=known,
            document_ids=torch.zeros_like(known),
            ttt_steps=k,
        )
    proposed = torch.stack([step[0] for step in steps], dim=1)
    return proposed if module.d2t is None else proposed + module.d2t[proposed]


def accepted(proposed: Sequence[Sequence[int]], ids: Sequence[int], start: int) -> list[int]:
    """How many tokens of each draft are accepted while an answer is written.

    Args:
        proposed: per position, the drafted tokens (see `drafts`).
        ids: the whole row, prompt and answer.
        start: index of the answer's first token.

    Returns:
        One count a draft, in order. A draft that reaches past the row's end is left out: what it would score is not known.
    """
    counts: list[int] = []
    k, position = len(proposed[0]), start - 1
    while position + 1 + k < len(ids):
        truth = ids[position + 2 : position + 2 + k]
        right = next((i for i, token in enumerate(proposed[position]) if token != truth[i]), k)
        counts.append(right)
        position += right + 1
    return counts


def heldout(run: Run, folder: Path, lengths: Sequence[int]) -> dict[int, dict[str, list[int]]]:
    """Simulated acceptance of the held-out rows, for every length of a draft at once.

    What stands in the first places of a draft does not depend on how many follow; where the next draft starts does. So the
    drafter runs once, at the greatest length, and each length walks the answer by itself.

    Args:
        folder: the drafter, in speculators' form.
        lengths: tokens a draft.

    Returns:
        By length, by row id: one count a draft.
    """
    module = load_module(folder)
    rows, _ = load_rows(run)
    tokens = load_tokens(run)
    found: dict[int, dict[str, list[int]]] = {k: {} for k in lengths}
    for index, row in enumerate(rows):
        if row.split == "heldout":
            item = tokens[index]
            states = state_files.read(hidden_states.state_file(run.path("hidden_states"), index))["hidden_states"]
            ids = item["input_ids"][: len(states)]
            proposed = drafts(module, states[:, :-1].float(), ids, max(lengths)).tolist()
            start = int(item["loss_mask"].int().argmax())
            for k in lengths:
                found[k][row.id] = accepted([draft[:k] for draft in proposed], ids.tolist(), start)
    return found
