"""What figures allow to say, on made-up figures with known answers."""

import random
from typing import Any

import pytest

from eagle3kit import verdicts

PROFILES: list[tuple[list[float], float, float | None, str]] = [
    ([0.36, 0.44, 0.46], 1000, 0.95, "healthy"),
    ([0.01, 0.3, 0.3], 1000, 0.95, "first position near zero"),
    ([0.4, 0.02, 0.0], 1000, 0.95, "later positions near zero"),
    ([0.97, 0.98, 0.99], 1000, 0.1, "degenerate text"),
    ([0.97, 0.98, 0.99], 1000, 0.95, "near perfect"),
    ([0.97, 0.98, 0.99], 1000, None, "near perfect"),
    ([0.01, 0.0, 0.0], 10, 0.95, "unknown"),
    ([], 1000, 0.95, "unknown"),
    ([0.36], 1000, 0.95, "healthy"),
]


@pytest.mark.parametrize(("conditional", "drafts", "distinct", "name"), PROFILES)
def test_profiles_are_named(conditional: list[float], drafts: float, distinct: float | None, name: str) -> None:
    profile = verdicts.read_profile(conditional, drafts, distinct)
    assert profile.name == name
    assert profile.reason
    assert bool(profile.fix) == (name != "healthy")


def test_unique_bigrams_are_counted_within_each_answer() -> None:
    assert verdicts.unique_bigrams([[1, 2, 3, 4]]) == 1
    assert verdicts.unique_bigrams([[1, 2, 1, 2, 1], [1, 2]]) == pytest.approx(3 / 5)
    assert verdicts.unique_bigrams([[1], []]) is None


def samples(seed: int, weights: list[float], count: int = 60) -> list[list[tuple[int, int]]]:
    """Three prompts, samples of two tokens."""
    chance = random.Random(seed)  # noqa: S311 - made-up samples
    tokens = range(len(weights))
    return [[(chance.choices(tokens, weights)[0], chance.choices(tokens, weights)[0]) for _ in range(count)] for _ in range(3)]


def test_samples_of_one_distribution_pass() -> None:
    found = [verdicts.two_sample(samples(seed, [5, 3, 1, 1]), samples(seed + 100, [5, 3, 1, 1]), 200) for seed in range(10)]
    assert sum(test["p"] < 0.05 for test in found) <= 3  # one in twenty, by chance
    assert all(test["p"] > 0.001 for test in found)
    assert found[0]["statistic"] == pytest.approx(found[0]["expected"], abs=0.05)


def test_a_shifted_distribution_fails() -> None:
    test = verdicts.two_sample(samples(1, [3, 5, 1, 1]), samples(2, [5, 3, 1, 1]), 2000)
    assert test["p"] < 0.001
    assert test["statistic"] > test["expected"]


def test_a_shift_of_one_token_place_is_seen_where_only_that_differs() -> None:
    off = samples(3, [1, 1, 1])
    on = [[(sample[0], 2) for sample in prompt] for prompt in off]
    assert verdicts.two_sample(on, off, 2000)["p"] < 0.001


def test_equal_samples_are_no_evidence() -> None:
    same = samples(4, [1, 1])
    assert verdicts.two_sample(same, same, 100) == {"statistic": 0, "expected": pytest.approx(0.1, abs=0.1), "p": 1}


def ratio(median: float, low: float, high: float) -> dict[str, float]:
    return {"median": median, "low": low, "high": high}


RATIOS: dict[int, dict[str, Any]] = {
    16: {"ngram": ratio(0.8, 0.7, 0.9), "eagle3-k3": ratio(1.05, 0.98, 1.1)},
    1: {"ngram": ratio(1.1, 1.01, 1.2), "eagle3-k3": ratio(1.3, 1.2, 1.4), "eagle3-k5": ratio(1.5, 0.9, 2.0)},
}


def test_outcomes_need_the_whole_range() -> None:
    assert verdicts.outcome(ratio(1.3, 1.2, 1.4)) == "faster"
    assert verdicts.outcome(ratio(0.8, 0.7, 0.9)) == "slower"
    assert verdicts.outcome(ratio(1.5, 0.9, 2.0)) == "inside the noise"


def test_the_fastest_beyond_the_noise_is_advised_at_each_load() -> None:
    assert verdicts.advise(RATIOS) == {1: "eagle3-k3", 16: "none"}
    assert verdicts.advice(RATIOS, {"eagle3-k3": "{...}"}) == (
        "by requests in flight: at 1 speculate with eagle3-k3, 1.30 x (1.20 to 1.40); at 16 do not, nothing is faster beyond the "
        "noise; eagle3-k3 is --speculative-config '{...}'"
    )


def test_where_nothing_is_faster_the_advice_is_not_to() -> None:
    words = verdicts.advice({16: RATIOS[16]}, {})
    assert words == "do not speculate: nothing is faster beyond the noise at 16 requests in flight"
