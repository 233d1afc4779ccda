"""What figures allow to say, on made-up figures with known answers."""

import math
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
    ([0.10, 0.02, 0.0], 1000, 0.95, "weak"),
    ([0.14, 0.3, 0.3], 1000, 0.95, "weak"),
    ([0.15, 0.3, 0.3], 1000, 0.95, "healthy"),
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


KNOWN = [(0.95, 1, 12.7062), (0.95, 2, 4.3027), (0.95, 4, 2.7764), (0.95, 8, 2.3060), (0.99, 10, 3.1693), (0.975, 24, 2.3909)]
"""Of the tables of Student's t: probability within, degrees of freedom, bound."""


@pytest.mark.parametrize(("inside", "freedom", "bound"), KNOWN)
def test_bounds_of_students_t_are_those_of_the_tables(inside: float, freedom: int, bound: float) -> None:
    assert verdicts.t_bound(inside, freedom) == pytest.approx(bound, abs=1e-4)


def measured(seed: int, speed: dict[str, float], noise: float = 0.05, drift: float = 0.2, n: int = 3) -> dict[str, list[float]]:
    """Rates of repeats in turn: a repeat's minute moves all contestants alike, noise each by itself."""
    chance = random.Random(seed)  # noqa: S311 - made-up rates
    minutes = [chance.gauss(0, drift) for _ in range(n)]
    return {name: [10 * factor * math.exp(m + chance.gauss(0, noise)) for m in minutes] for name, factor in speed.items()}


def test_a_speed_up_is_the_geometric_mean_of_pairs_with_its_interval_by_hand() -> None:
    rates = {"none": [10.0, 20.0, 40.0], "eagle3": [10 * 1.2, 20 * 1.2 * 1.1, 40 * 1.2 / 1.1]}
    (found,) = verdicts.speedups(rates, True).values()
    assert found["ratio"] == pytest.approx(1.2)
    assert (found["paired"], found["repeats"]) == (True, 3)
    # two contestants: the t-interval of three log ratios, whose standard deviation is log 1.1
    half = 4.3027 * math.log(1.1) / math.sqrt(3)
    assert (found["low"], found["high"]) == pytest.approx((1.2 * math.exp(-half), 1.2 * math.exp(half)), rel=1e-4)


def test_the_interval_is_pooled_and_corrected_for_the_number_of_contestants() -> None:
    rates = {"none": [1.0, 1.0, 1.0], "a": [1.0, 1.1, 1 / 1.1], "b": [1.0, 1 / 1.1, 1.1]}
    found = verdicts.speedups(rates, True)
    spread = math.sqrt(4 * math.log(1.1) ** 2 / 4)  # four residuals that are not zero, four degrees of freedom
    half = 3.4954 * spread * math.sqrt(2 / 3)  # 97.5 % within
    assert found["a"]["high"] == found["b"]["high"] == pytest.approx(math.exp(half), rel=1e-4)


def test_what_moves_all_contestants_of_a_round_is_no_noise_unless_they_took_no_turns() -> None:
    rates = measured(1, {"none": 1, "ngram": 1, "eagle3": 1.3})
    in_turn, apart = (verdicts.speedups(rates, turns)["eagle3"] for turns in (True, False))
    assert verdicts.outcome(in_turn) == "faster"
    assert apart["ratio"] == pytest.approx(in_turn["ratio"])
    assert apart["high"] / apart["low"] > in_turn["high"] / in_turn["low"]
    assert (in_turn["paired"], apart["paired"]) == (True, False)


def sweep(seed: int, speed: dict[str, float]) -> dict[int, dict[str, dict[str, Any]]]:
    return {load: verdicts.speedups(measured(3 * seed + i, speed), True) for i, load in enumerate((1, 4, 16))}


ALIKE = dict.fromkeys(("none", "ngram", "eagle3-k1", "eagle3-k3", "eagle3-k5"), 1.0)


def test_where_nothing_is_faster_few_sweeps_advise_to_speculate() -> None:
    chosen = [verdicts.advise(sweep(seed, ALIKE)) for seed in range(2000)]
    assert sum(set(found.values()) != {"none"} for found in chosen) / 2000 <= 0.06


def test_the_intervals_of_a_load_hold_together() -> None:
    missed = 0
    for seed in range(2000):
        found = verdicts.speedups(measured(seed, ALIKE), True)
        missed += any(verdicts.outcome(ratio) != "inside the noise" for ratio in found.values())
    assert 0.02 <= missed / 2000 <= 0.06


def test_a_clear_gain_is_found() -> None:
    chosen = [verdicts.advise(sweep(seed, ALIKE | {"eagle3-k3": 1.3})) for seed in range(200)]
    assert sum(found == dict.fromkeys((1, 4, 16), "eagle3-k3") for found in chosen) >= 190


def test_one_repeat_tells_nothing() -> None:
    found = verdicts.speedups({"none": [10.0], "eagle3": [30.0]}, True)
    assert found["eagle3"] == {"ratio": pytest.approx(3), "low": None, "high": None, "paired": True, "repeats": 1}
    assert verdicts.outcome(found["eagle3"]) == "unknown: one repeat"
    assert verdicts.speedup_text(found["eagle3"]) == "3.00 x (interval unknown)"
    assert verdicts.advise({1: found}) == {1: "none"}
    assert verdicts.advice({1: found}, {}).startswith("unknown: one repeat")


def ratio(middle: float, low: float, high: float) -> dict[str, float]:
    return {"ratio": middle, "low": low, "high": high}


RATIOS: dict[int, dict[str, Any]] = {
    16: {"ngram": ratio(0.8, 0.7, 0.9), "eagle3-k3": ratio(1.05, 0.98, 1.1)},
    1: {"ngram": ratio(1.1, 1.01, 1.2), "eagle3-k3": ratio(1.3, 1.2, 1.4), "eagle3-k5": ratio(1.5, 0.9, 2.0)},
}


def test_outcomes_need_the_whole_range() -> None:
    assert verdicts.outcome(ratio(1.3, 1.2, 1.4)) == "faster"
    assert verdicts.outcome(ratio(0.8, 0.7, 0.9)) == "slower"
    assert verdicts.outcome(ratio(1.5, 0.9, 2.0)) == "inside the noise"
    assert verdicts.outcome(ratio(1.2, 1.0001, 1.4)) == "inside the noise"  # the page says 1.00


def test_the_fastest_beyond_the_noise_is_advised_at_each_load() -> None:
    assert verdicts.advise(RATIOS) == {1: "eagle3-k3", 16: "none"}
    assert verdicts.advice(RATIOS, {"eagle3-k3": "{...}"}) == (
        "by requests in flight: at 1 speculate with eagle3-k3, 1.30 x (1.20 to 1.40); at 16 do not, undecided: the best is "
        "eagle3-k3, 1.05 x (0.98 to 1.10); eagle3-k3 is --speculative-config '{...}'"
    )


def test_where_nothing_is_faster_the_advice_is_not_to() -> None:
    words = verdicts.advice({16: RATIOS[16]}, {})
    assert words == (
        "do not speculate: nothing is faster beyond the noise at 16 requests in flight "
        "(at 16 undecided: the best is eagle3-k3, 1.05 x (0.98 to 1.10))"
    )
    assert "at 1 request in flight" in verdicts.advice({1: {"ngram": ratio(1.0, 0.9, 1.1)}}, {})


def test_a_loss_is_told_from_what_is_undecided() -> None:
    loss = {"ngram": ratio(0.9, 0.85, 0.95), "eagle3-k1": ratio(0.6, 0.5, 0.7)}
    words = verdicts.advice({1: {**loss, "eagle3-k3": ratio(1.18, 1.0, 1.39)}, 16: loss}, {})
    assert words.endswith("(at 1 undecided: the best is eagle3-k3, 1.18 x (1.00 to 1.39); at 16 all are slower)")
