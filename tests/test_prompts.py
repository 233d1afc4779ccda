"""Checks on the built-in prompt set."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

PROMPTS = Path(__file__).parents[1] / "eagle3kit" / "prompts"
NAMES = ("train", "heldout")

Row = dict[str, Any]


def load(name: str) -> list[Row]:
    text = (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def user_text(row: Row) -> str:
    return "\n".join(t["content"] for t in row["conversations"] if t["role"] == "user")


def normalised(row: Row) -> str:
    return re.sub(r"[^a-z0-9]", "", user_text(row).lower())


def trigrams(row: Row) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9']+", user_text(row).lower())
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_well_formed(name: str) -> None:
    rows = load(name)
    for row in rows:
        assert set(row) == {"id", "kind", "conversations"}
        turns = row["conversations"]
        assert all(set(turn) == {"role", "content"} for turn in turns), row["id"]
        assert all(turn["content"].strip() for turn in turns), row["id"]
        roles = [turn["role"] for turn in turns]
        users = roles[1:] if roles[0] == "system" else roles
        assert users and set(users) == {"user"}, row["id"]
        if row["kind"] == "multi_turn":
            assert len(users) >= 2, row["id"]
        else:
            assert len(users) == 1, row["id"]


def test_ids_are_unique() -> None:
    ids = [row["id"] for name in NAMES for row in load(name)]
    assert len(ids) == len(set(ids))


def test_counts_and_kinds() -> None:
    train, heldout = load("train"), load("heldout")
    assert len(train) >= 600
    assert len(heldout) >= 80
    kinds = {row["kind"] for row in train}
    assert len(kinds) >= 8
    assert kinds == {row["kind"] for row in heldout}


def test_no_prompt_occurs_twice() -> None:
    seen: dict[str, str] = {}
    for name in NAMES:
        for row in load(name):
            key = normalised(row)
            assert key not in seen, f"{row['id']} repeats {seen.get(key)}"
            seen[key] = row["id"]


def test_heldout_has_no_near_duplicates_of_train() -> None:
    train = [(row["id"], trigrams(row)) for row in load("train")]
    for row in load("heldout"):
        grams = trigrams(row)
        assert grams, row["id"]
        for train_id, other in train:
            shared = len(grams & other) / len(grams)
            assert shared < 0.9, f"{row['id']} is close to {train_id}"
