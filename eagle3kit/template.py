"""How a conversation becomes tokens: the target's chat template, and the rows with loss masks that it gives.

What is needed of it here is small, for the answers that the target writes come with their tokens. It is used for answers that are
given, and to see what a template does with thoughts, system prompts and tool calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3kit.errors import KitError

Message = Mapping[str, Any]


def rows_of(tokenizer: Any, conversation: Sequence[Message], tools: Sequence[Any] | None = None) -> list[dict[str, list[int]]]:
    """One row for each assistant turn that answers something: `{"input_ids", "loss_mask"}`, the mask 1 on that turn alone.

    Each turn gets a row of its own because templates rewrite history: a thinking model's earlier thoughts are gone from the
    prompt of the next turn, so one row for the whole conversation would show the drafter a text that the target never saw. The
    answer begins where the rendered conversation goes on from its own generation prompt, or parts from it (recorded thoughts
    where the prompt opens and closes them).

    Raises:
        KitError: the template refuses the conversation, or renders its history differently with and without the answer.
    """
    rows = []
    for number, message in enumerate(conversation):
        if message["role"] != "assistant" or not number:
            continue
        asked, history, whole = (
            render(tokenizer, conversation[: number + more], tools, prompt)
            for more, prompt in ((0, True), (0, False), (1, False))
        )
        start = common_prefix(asked, whole)
        if start < len(history) or whole[: len(history)] != history:
            raise KitError(
                f"the chat template renders the history of turn {number} differently once the turn is answered",
                seen=f"the texts part at token {start} of {len(asked)}",
                fix="let the target answer the prompts itself: data_regenerate: true",
            )
        rows.append({"input_ids": whole, "loss_mask": [0] * start + [1] * (len(whole) - start)})
    return rows


def token_counter(model: str | Path, trust_remote_code: bool) -> Callable[[str], int]:
    """A function that counts a text's tokens, without special ones.

    Args:
        model: the target, a folder or hub id.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def render(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool) -> list[int]:
    """The tokens of a conversation, with or without the beginning of the next answer (`prompt`).

    Raises:
        KitError: the template refuses the conversation.
    """
    try:
        ids = tokenizer.apply_chat_template(list(messages), tools=tools, add_generation_prompt=prompt, return_dict=False)
    except Exception as error:  # a template is a program and may raise anything
        raise KitError("the chat template refuses a conversation", seen=error, fix="correct data_source") from None
    return list(ids)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share at their beginning."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
