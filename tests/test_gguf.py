"""Checks on what the conversion of SmolLM2's GGUF file puts back."""

from typing import Any

import pytest

from eagle3kit import gguf


@pytest.mark.parametrize("before", [{"type": "ByteLevel"}, {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]}, None])
def test_digits_are_split_first(before: dict[str, Any] | None) -> None:
    once = gguf.with_split_digits({"pre_tokenizer": before, "model": {}})
    steps = once["pre_tokenizer"]["pretokenizers"]
    assert steps[0] == {"type": "Digits", "individual_digits": True}
    assert steps[1:] == ([{"type": "ByteLevel"}] if before else [])
    assert gguf.with_split_digits(once) == once
