"""Chain drafting over captured states: the walk along an answer, with counts known by hand."""

from hypothesis import given
from hypothesis import strategies as st

from eagle3kit.simulate import accepted


def test_the_walk_goes_past_what_was_accepted_and_the_targets_own_token() -> None:
    ids = [9, 9, 1, 2, 3, 4, 5, 6, 7, 8]  # the answer starts at index 2; row j drafts for the tokens after j + 1
    proposed = [[0, 0], [2, 3], [0, 0], [0, 0], [5, 0], [0, 0], [0, 0], [0, 0], [0, 0]]
    # draft 1 from state 1: tokens 2 and 3 right, the target adds 4; draft 2 from state 4: token 5 right, then the target's 6;
    # draft 3 from state 6: 0 is wrong, the target's 7; from state 7 a draft would reach past the end
    assert accepted(proposed, ids, 2) == [2, 1, 0]


@given(st.lists(st.integers(0, 3), min_size=4, max_size=40), st.integers(1, 4))
def test_perfect_drafts_are_accepted_whole_and_wrong_ones_not_at_all(ids: list[int], k: int) -> None:
    right = [[*ids[j + 2 : j + 2 + k], *[0] * k][:k] for j in range(len(ids) - 1)]
    assert set(accepted(right, ids, 1)) <= {k}
    wrong = [[token + 1 for token in row] for row in right]
    counts = accepted(wrong, ids, 1)
    assert set(counts) <= {0}
    assert len(counts) == max(0, len(ids) - 1 - k)
