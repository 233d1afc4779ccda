"""The vocabulary maps, on cases small enough to know the answer, and on any counts."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import answer, prompt, write_answers

from eagle3kit import data, vocab
from eagle3kit.errors import KitError
from eagle3kit.rundir import Run


def test_the_most_frequent_tokens_in_order_of_their_ids() -> None:
    d2t, t2d = vocab.choose({5: 9, 2: 7, 8: 1}, 2, 10)
    assert d2t.tolist() == [2, 4]  # draft ids 0 and 1 are target ids 0 + 2 and 1 + 4
    assert t2d.nonzero()[:, 0].tolist() == [2, 5]


def test_ties_go_to_the_lower_id_and_room_is_filled_with_unseen_tokens() -> None:
    assert (torch.arange(2) + vocab.choose({9: 1, 3: 1, 4: 1}, 2, 10)[0]).tolist() == [3, 4]
    assert (torch.arange(4) + vocab.choose({9: 1}, 4, 10)[0]).tolist() == [0, 1, 2, 9]


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.integers(0, 49), st.integers(1, 99)), st.integers(1, 50))
def test_any_counts_give_consistent_maps(counts: dict[int, int], size: int) -> None:
    d2t, t2d = vocab.choose(counts, size, 50)
    ids = (torch.arange(size) + d2t).tolist()
    assert ids == sorted(set(ids))
    assert int(t2d.sum()) == size
    outside = [counts[token] for token in counts if token not in ids]
    inside = [counts.get(token, 0) for token in ids]
    assert not outside or max(outside) <= min(inside)


@pytest.mark.parametrize("size", [0, -1, 11])
def test_a_size_that_does_not_fit_is_an_error(size: int) -> None:
    with pytest.raises(KitError, match="draft_vocab_size does not fit"):
        vocab.choose({1: 1}, size, 10)


def test_a_token_outside_the_target_is_an_error() -> None:
    with pytest.raises(KitError, match="outside the target's vocabulary"):
        vocab.choose({10: 1}, 2, 10)


@pytest.mark.parametrize(
    ("d2t", "marked"),
    [
        ([2, 0], [2]),  # both draft ids reach target id 2 or fall back
        ([3, 1], [2, 3]),  # decreasing
        ([0, 9], [0, 10]),  # leaves the vocabulary
        ([-1, 0], [1]),  # below it
        ([0, 0], [0, 2]),  # t2d marks another token
        ([0, 0], [0, 1, 2]),  # t2d marks one more
        ([], []),
    ],
)
def test_broken_maps_are_refused(d2t: list[int], marked: list[int]) -> None:
    t2d = torch.zeros(10, dtype=torch.bool)
    t2d[[token for token in marked if token < 10]] = True
    with pytest.raises(KitError):
        vocab.check_maps(torch.tensor(d2t, dtype=torch.long), t2d)


def test_coverage_has_known_values_and_reaches_one() -> None:
    counts = {1: 6, 2: 3, 9: 1}
    shares = [vocab.coverage(counts, vocab.choose(counts, size, 10)[1]) for size in (1, 2, 3, 10)]
    assert shares == pytest.approx([0.6, 0.9, 1.0, 1.0])
    assert vocab.coverage({}, torch.ones(3, dtype=torch.bool)) == 0.0


@pytest.fixture
def rows(run: Run) -> Run:
    answers = [answer("a", generated=(7, 7, 8, 9)), answer("h", generated=(7, 4, 9))]
    with run.step("data", {}):
        write_answers(run, answers)
        data.build_rows(run, [prompt("a"), prompt("h", split="heldout")], Counter(), captured=True)
    return run


def test_only_supervised_training_tokens_are_counted(rows: Run) -> None:
    tokens = data.load_tokens(rows)
    assert vocab.count_supervised(tokens, [0]) == {7: 2, 8: 1}
    assert vocab.count_supervised(tokens, [0, 1]) == {7: 3, 8: 1, 4: 1}


def test_build_saves_maps_that_load_and_records_the_heldout_coverage(rows: Run) -> None:
    run = Run(rows.params.replace(draft_vocab_size=2, vocab_min_coverage=0.5), "04_vocab_map")
    curve = vocab.build(run, 20)
    d2t, t2d = vocab.load_maps(run)
    assert (torch.arange(2) + d2t).tolist() == [7, 8]
    assert len(t2d) == 20
    assert run.fact("vocab.heldout_coverage") == 0.5  # of 7 and 4, the vocabulary has 7
    assert curve["chosen"] == 2
    assert [row[""] for row in vocab.coverage_rows(curve)].count("chosen") == 1


def test_too_little_coverage_stops_the_stage_every_time(rows: Run) -> None:
    run = Run(rows.params.replace(draft_vocab_size=2, vocab_min_coverage=0.9), "04_vocab_map")
    for _ in range(2):
        with pytest.raises(KitError, match="covers too little.*seen 50.0 %"):
            vocab.build(run, 20)
