"""Who wrote the rows, and how: the label that every later number depends on.

A drafter is asked to predict what the target writes. Answers of another model, another sampling or another chat template train it
for a text that it will never see; nothing fails, it only accepts less.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3kit import hub
from eagle3kit.params import Params

THINK, END_THINK = "<think>", "</think>"


def describe(params: Params, model: str | Path, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The label of a run's rows.

    Args:
        model: the target, a folder or hub id. rows: token ids of every row.

    Returns:
        `{"on_policy", "model", "revision", "commit", "sampling", "chat_template", "thinking", "rows_with_thoughts",
        "empty_thoughts"}`; the chat template by its digest, `commit` empty for a local folder, `sampling` None for answers that
        the target did not write.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=params.trust_remote_code)
    template = tokenizer.chat_template
    asked = {"temperature": params.data_temperature, "max_tokens": params.data_max_response_tokens, "seed": params.seed}
    file = hub.cached_file(model, params.target_revision, "config.json")
    return {
        "on_policy": params.data_regenerate,
        "model": params.target_model,
        "revision": params.target_revision,
        "commit": file.parent.name if file is not None and file.parent.parent.name == "snapshots" else "",
        "sampling": asked | own_sampling(model, params.target_revision) if params.data_regenerate else None,
        "chat_template": hashlib.blake2b(str(template).encode(), digest_size=8).hexdigest() if template else "",
        **thinking(tokenizer, rows),
    }


def own_sampling(model: str | Path, revision: str) -> dict[str, float]:
    """What the target's `generation_config.json` sets of how tokens are chosen; vLLM and transformers both follow it.

    Its temperature is left out: every request names one.
    """
    file = hub.cached_file(model, revision, "generation_config.json")
    try:
        config = json.loads(file.read_bytes()) if file is not None else {}
    except (OSError, ValueError):
        config = {}
    found = {name: config.get(name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def thought(ids: Sequence[int], opened: int, closed: int) -> list[list[int]]:
    """The tokens of every thinking block of a row, one that never ends included."""
    blocks: list[list[int]] = []
    inside = False
    for token in ids:
        if token == opened:
            blocks.append([])
            inside = True
        elif token == closed:
            inside = False
        elif inside:
            blocks[-1].append(token)
    return blocks


def thinking(tokenizer: Any, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How the last turn of each row thinks: `{"thinking": on, off or none, "rows_with_thoughts", "empty_thoughts"}`.

    `none` is a target without the tokens `<think>` and `</think>`; `empty_thoughts` is the share of the rows with a block whose
    last block holds nothing but white space. A drafter trained on empty blocks never learns to draft thoughts.
    """
    vocabulary = tokenizer.get_vocab()
    if THINK not in vocabulary or END_THINK not in vocabulary:
        return {"thinking": "none", "rows_with_thoughts": 0, "empty_thoughts": 0.0}
    last = [blocks[-1] for ids in rows if (blocks := thought(ids, vocabulary[THINK], vocabulary[END_THINK]))]
    empty = sum(not tokenizer.decode(block).strip() for block in last)
    return {
        "thinking": "on" if empty < len(last) else "off",
        "rows_with_thoughts": len(last) - empty,
        "empty_thoughts": empty / max(1, len(last)),
    }
