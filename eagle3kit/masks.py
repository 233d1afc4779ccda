"""Which tokens training learns from, and the checks that they are the right ones.

A mask that is shifted, inverted or full trains without a word. What is checked is therefore not the mask alone but what the
trainer makes of it, and that the ids are those the server really saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3kit.data import MADE_BY, load_origin, load_rows, load_tokens, prompts_asked
from eagle3kit.errors import KitError
from eagle3kit.rundir import Run, read_json, write_json
from eagle3kit.template import common_prefix, render, rows_of


def predicted(loss_mask: Sequence[int], ttt_step: int = 0) -> list[int]:
    """Positions of the tokens whose prediction is trained at a draft step, as speculators' trainer shifts and aligns a row.

    The state of position t is the target's prediction of token t + 1. The trainer's own `shift_batch` and `align_for_step` are
    given positions in place of states, and what they leave under the mask is read back.

    Args:
        loss_mask: of a row of T tokens; ttt_step: the draft step, from 0.

    Returns:
        Positions in 1 .. T; T is the token behind the row, of which only the target's distribution is known.
    """
    import torch
    from speculators.models.eagle3.data import shift_batch
    from speculators.models.eagle3.metrics import align_for_step

    at = torch.arange(len(loss_mask))
    row = {"input_ids": at, "hidden_states": at[:, None], "verifier_last_hidden_states": at[:, None], "position_ids": at}
    shifted = shift_batch({**row, "loss_mask": torch.tensor(loss_mask), "lengths": torch.tensor([len(loss_mask)])})
    states = shifted["verifier_last_hidden_states"][None]
    _, targets, mask, _ = align_for_step(states, states, shifted["loss_mask"][None], None, ttt_step)
    found: list[int] = (targets[0, :, 0][mask[0].bool()] + 1).tolist()
    return found


# ---- the checks


def check_row(loss_mask: Sequence[int]) -> str:
    """What is wrong with the mask of one row, or an empty text."""
    if not any(loss_mask):
        return "all zeros: nothing of the row is learned"
    if all(loss_mask):
        return "all ones: the prompt would be learned too"
    return ""


def check(run: Run, model: str | Path) -> list[dict[str, Any]]:
    """Check the rows' masks; the resumable step `masks`.

    Returns:
        The checks for `widgets.check_list`: all of them passed.

    Raises:
        KitError: a mask is full or empty, the trainer would learn other positions, or the server saw other ids than the target's
            own template gives.
    """
    step = run.step("masks", {"data": run.digest("data", MADE_BY)})
    if not step.done:
        with step:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=run.params.trust_remote_code)
            tokens = load_tokens(run).with_format(None)
            ids, masks = tokens["input_ids"][:], tokens["loss_mask"][:]
            share = sum(map(sum, masks)) / sum(map(len, masks))
            checks = [
                require_masks(masks),
                require_second_token(masks),
                require_same_ids(run, tokenizer, ids, masks),
                {"name": "supervised tokens", "state": "ok", "found": f"{100 * share:.1f} %", "wanted": "2 % to 98 %"},
                thinking_check(load_origin(run)),
            ]
            write_json(step.folder / "checks.json", checks)
            run.record("data.supervised_share", share, "share", f"{len(masks)} rows")
    return list(read_json(step.folder / "checks.json", MADE_BY))


def require_masks(masks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Every row has tokens to learn and tokens not to learn.

    Raises:
        KitError: one has not.
    """
    wrong = {index: reason for index, mask in enumerate(masks) if (reason := check_row(mask))}
    if wrong:
        index, reason = next(iter(wrong.items()))
        raise KitError(f"{len(wrong)} loss masks are degenerate, the first is row {index}", seen=reason, fix=_LOOK)
    return {"name": "no mask all ones or all zeros", "state": "ok", "found": f"{len(masks):,} rows"}


_LOOK = "look at data/responses.jsonl: are prompt and answer told apart?"


def require_second_token(masks: Sequence[Sequence[int]], rows: int = 8) -> dict[str, Any]:
    """What the trainer learns first from a row is the second token of its answer.

    The first one comes from the target itself: a drafter runs after it, reading the state of the position before.

    Raises:
        KitError: it would learn another position first: the mask is shifted, or this speculators shifts differently.
    """
    for index, mask in enumerate(masks[:rows]):
        wanted, first = list(mask).index(1) + 1, predicted(mask)[:1]
        if first != [wanted]:
            raise KitError(
                f"the trainer would begin with another token of row {index} than the second of the answer",
                seen=f"position {first or 'none'}",
                wanted=f"position {wanted}",
                fix="use the versions of requirements.lock; `eagle3kit doctor` names what differs",
            )
    return {"name": "the first token learned is the answer's second", "state": "ok", "found": f"{min(rows, len(masks))} rows"}


def require_same_ids(
    run: Run, tokenizer: Any, ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], count: int = 16
) -> dict[str, Any]:
    """What the server saw of a prompt is what the target's own tokenizer and chat template make of it.

    Raises:
        KitError: they differ: the server has another template or tokenizer, and the served model will see other prompts.
    """
    asked = prompts_asked(run)
    compared = 0
    for index, row in enumerate(load_rows(run)[0]):
        conversation = asked.get(row.id.removesuffix("_gen0"))
        if conversation is None or compared == count:  # only a first answer's prompt is known word for word
            continue
        upto = [m["role"] for m in conversation].index("user") + 1
        rendered = render(tokenizer, conversation[:upto], None, True)
        seen = list(ids[index][: list(masks[index]).index(1)])
        if rendered != seen:
            at = common_prefix(rendered, seen)
            raise KitError(
                f"the server saw other tokens in row {index} than the target's own chat template gives",
                seen=f"{tokenizer.decode(seen[at : at + 8])!r} at token {at}",
                wanted=repr(tokenizer.decode(rendered[at : at + 8])),
                fix="serve the target with its own chat template: take --chat-template out of serve_extra_args",
            )
        compared += 1
    return {
        "name": "rendered ids are those the server saw",
        "state": "ok" if compared else "unknown",
        "found": f"{compared} prompts",
    }


def thinking_check(origin: Mapping[str, Any]) -> dict[str, Any]:
    """A line on how the target thought: never an error, but a drafter for a thinking target should see thoughts."""
    how = origin.get("thinking", "unknown")
    if how in ("none", "unknown"):
        found = "the target has no <think>" if how == "none" else "the rows were made before this was looked at"
        return {"name": "thinking", "state": "ok" if how == "none" else "unknown", "found": found}
    found = f"{origin['rows_with_thoughts']} rows with thoughts, {100 * origin['empty_thoughts']:.1f} % of the blocks are empty"
    return {"name": "thinking", "state": "ok" if how == "on" else "warn", "found": found}


# ---- for the notebook

CASES: dict[str, list[dict[str, Any]]] = {
    "system prompt": [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "The capital of France?"},
        {"role": "assistant", "content": "Paris."},
    ],
    "several turns, thinking": [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "reasoning_content": "Two and two make four.", "content": "4"},
        {"role": "user", "content": "And times 3?"},
        {"role": "assistant", "reasoning_content": "Four times three is twelve.", "content": "12"},
    ],
    "tool call": [
        {"role": "user", "content": "Is it raining in Oslo?"},
        {
            "role": "assistant",
            "reasoning_content": "I have to look.",
            "content": "",
            "tool_calls": [
                {"id": "weather:0", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}},
            ],
        },
        {"role": "tool", "tool_call_id": "weather:0", "content": "rain"},
        {"role": "assistant", "reasoning_content": "The tool says rain.", "content": "Yes, it is."},
    ],
}
"""Conversations that templates treat in different ways."""


def marked(tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> list[dict[str, Any]]:
    """A row for `widgets.conversation`: the text of each token, whether it is supervised, and whether it is a special token."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    texts = (tokenizer.decode([token], skip_special_tokens=False) for token in ids)
    return [
        {"text": text, "supervised": bool(on), "special": token in special}
        for text, on, token in zip(texts, mask, ids, strict=True)
    ]


def cases(run: Run, model: str | Path) -> dict[str, list[list[dict[str, Any]]]]:
    """How this target's template treats a system prompt, thoughts of earlier turns and tool calls: every row of each case.

    A template that cannot render a case is left out with what it says.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=run.params.trust_remote_code)
    shown = {}
    for name, conversation in CASES.items():
        try:
            made = rows_of(tokenizer, conversation)
        except KitError as error:
            shown[name] = [[{"text": error.message, "supervised": False}]]
        else:
            shown[name] = [marked(tokenizer, row["input_ids"], row["loss_mask"]) for row in made]
    return shown
