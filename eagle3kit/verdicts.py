"""What measured figures allow to say: a drafter's profile, a test of samples, speed-ups, whether to speculate. Pure functions."""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Tokens = Sequence[int]

NEAR_ZERO = 0.05
"""Conditional acceptance below this is what guessing the most frequent token reaches: about 5 % of English text."""
SOUND_FIRST = 0.15
"""First-position acceptance from which the drafter clearly reads the target's states."""
SURE = 0.95
"""Probability that all speed-ups of one measurement lie in their intervals."""
HIGH = 0.9
LOOPING = 0.5
"""Share of distinct bigrams below which an answer mostly repeats itself. Ordinary answers of 64 tokens have 0.8 and more."""
LEAST_DRAFTS = 50
"""Fewer drafts than this say nothing of a profile."""


class Profile(NamedTuple):
    """A named pattern of acceptance, the reason for the name, and what to look at."""

    name: str
    reason: str
    fix: str


def read_profile(conditional: Sequence[float], drafts: float, distinct: float | None) -> Profile:
    """Name the pattern that per-position acceptance shows.

    Args:
        conditional: of the drafts whose first i - 1 tokens were accepted, the share whose i-th was, from i = 1 on.
        drafts: how many drafts that was counted over.
        distinct: share of distinct bigrams in the answers (see `unique_bigrams`), or None where it is unknown.
    """
    if drafts < LEAST_DRAFTS or not conditional:
        return Profile("unknown", f"{drafts:.0f} drafts are too few to tell", "measure more prompts")
    first, later = conditional[0], conditional[1:]
    if distinct is not None and distinct < LOOPING and first > 0.5:
        return Profile(
            "degenerate text",
            f"{100 * distinct:.0f} % of the answers' bigrams are distinct: they run in a loop, which any drafter guesses",
            "measure on prompts that the target answers sensibly; this acceptance means nothing",
        )
    if first < NEAR_ZERO:
        return Profile(
            "first position near zero",
            f"{100 * first:.1f} % of the first guesses are right",
            "wrong auxiliary layers, or weights that were never trained: hold aux_layers against the checkpoint's config.json",
        )
    if first < SOUND_FIRST:
        return Profile(
            "weak",
            f"{100 * first:.1f} % of the first guesses are right: more than guessing, less than a drafter that reads the states",
            "trained on too little, or on other text than the target writes here; or one auxiliary layer of three is wrong, or "
            "the draft vocabulary misses these answers: look at held-out loss, golden check and vocabulary coverage",
        )
    if later and max(later) < NEAR_ZERO:
        return Profile(
            "later positions near zero",
            f"the first guess is right in {100 * first:.1f} %, "
            f"the later ones in at most {100 * max(later):.1f} % of the drafts that reach them",
            "the drafter's own output is not fed back as in training: norm_output, rope positions, train_ttt_steps above 1",
        )
    if min(conditional) > HIGH:
        reason = f"at least {100 * min(conditional):.0f} % at every position"
        return Profile("near perfect", reason, "expected on prompts it was trained on; on held-out ones look for a leak")
    return Profile("healthy", f"the first guess is right in {100 * first:.1f} %, and the later ones go on from it", "")


def unique_bigrams(answers: Sequence[Tokens]) -> float | None:
    """Share of distinct bigrams, over all answers together but counted within each; None when there is no bigram."""
    pairs = [list(itertools.pairwise(answer)) for answer in answers]
    total = sum(map(len, pairs))
    return sum(len(set(found)) for found in pairs) / total if total else None


def two_sample(on: Sequence[Sequence[Tokens]], off: Sequence[Sequence[Tokens]], draws: int = 2000) -> dict[str, float]:
    """Permutation test: do samples with and without speculation come from the same distribution?

    The statistic is the total variation distance between the token frequencies of both sides, averaged over prompts and token
    positions. Under the null hypothesis every sample might as well have been drawn by the other side, so its distribution is had
    by shuffling the samples of each prompt between the sides (Fisher's permutation test; exact whatever the distribution is).

    Args:
        on: by prompt, samples of the first tokens with speculation.
        off: the same prompts without.
        draws: permutations.

    Returns:
        `statistic`, its mean under the null hypothesis as `expected`, and `p`, the share of permutations that reach it.
    """
    chance = random.Random(0)  # noqa: S311 - a reproducible test, not a secret

    def distance(sides: Sequence[tuple[Sequence[Tokens], Sequence[Tokens]]]) -> float:
        found = []
        for a, b in sides:
            for place in range(max((len(sample) for sample in (*a, *b)), default=0)):
                left, right = (Counter(s[place] if place < len(s) else None for s in side) for side in (a, b))
                found.append(sum(abs(left[token] / len(a) - right[token] / len(b)) for token in left | right) / 2)
        return sum(found) / len(found) if found else 0.0

    observed = distance(list(zip(on, off, strict=True)))
    null = []
    for _ in range(draws):
        shuffled = []
        for a, b in zip(on, off, strict=True):
            pool = [*a, *b]
            chance.shuffle(pool)
            shuffled.append((pool[: len(a)], pool[len(a) :]))
        null.append(distance(shuffled))
    p = (1 + sum(value >= observed - 1e-12 for value in null)) / (1 + draws)
    return {"statistic": observed, "expected": sum(null) / len(null), "p": p}


def speedups(rates: Mapping[str, Sequence[float]], in_turn: bool) -> dict[str, dict[str, Any]]:
    """Speed-up of every contestant over `none`, with intervals that all hold together with probability `SURE`.

    A logarithm of a rate is taken to be the sum of what its contestant does, of what its repeat does to all contestants (where
    they took turns), and of normal noise of one spread s for all, which is so pooled over the c contestants, `none` included:

        s^2 = sum of squared residuals / f,   f = (c - 1) (n - 1) in turn, for n repeats of each;   sum of (n_i - 1) otherwise
        log speed-up +- t s sqrt(1 / n + 1 / n_none),   t of Student's distribution with f degrees of freedom

    This is a randomized block design, otherwise a one-way layout. The speed-up is the ratio of geometric means, in turn also the
    geometric mean of the pairs' ratios. t leaves out a share of (1 - SURE) / (c - 1), because c - 1 speed-ups are looked at
    (Bonferroni). Over loads s is not pooled: their measurements do not last equally long, and so are not equally noisy.

    Args:
        rates: by contestant, one rate a repeat, in order; greater than 0.
        in_turn: whether the repeats were taken in turns, A B C A B C.

    Returns:
        By contestant but `none`: `ratio`, `low` and `high` (None where no contestant was repeated), `paired`, `repeats`.
    """
    logs = {name: [math.log(rate) for rate in found] for name, found in rates.items()}
    means = {name: statistics.fmean(found) for name, found in logs.items()}
    residuals = {name: [value - means[name] for value in found] for name, found in logs.items()}
    freedom = sum(len(found) - 1 for found in logs.values())
    if in_turn:
        common = [statistics.fmean(each) for each in zip(*residuals.values(), strict=True)]
        residuals = {name: [a - b for a, b in zip(found, common, strict=True)] for name, found in residuals.items()}
        freedom -= len(common) - 1
    squares = sum(value**2 for found in residuals.values() for value in found)
    made = {}
    for name in (name for name in rates if name != "none"):
        log, low, high = means[name] - means["none"], None, None
        if freedom:
            spread = math.sqrt(squares / freedom * (1 / len(rates[name]) + 1 / len(rates["none"])))
            half = spread * t_bound(1 - (1 - SURE) / (len(rates) - 1), freedom)
            low, high = math.exp(log - half), math.exp(log + half)
        repeats = min(len(rates[name]), len(rates["none"]))
        made[name] = {"ratio": math.exp(log), "low": low, "high": high, "paired": in_turn, "repeats": repeats}
    return made


@functools.cache
def t_bound(inside: float, freedom: int) -> float:
    """The t that Student's distribution exceeds neither above nor, negative, below, with probability `inside`: by bisection."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < inside else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Probability of |t| < sqrt(freedom) tan(angle): Abramowitz, Stegun, Handbook of Mathematical Functions, 26.7.3 and 4."""
    odd, total = freedom % 2, 0.0
    term = math.cos(angle) if odd else 1.0
    for i in range(freedom // 2):
        total += term
        term *= math.cos(angle) ** 2 * (2 * i + 1 + odd) / (2 * i + 2 + odd)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def outcome(ratio: Mapping[str, Any]) -> str:
    """`faster`, `slower`, `inside the noise` where the interval of a speed-up holds 1, or that it has none.

    The ends count as they are printed, with two digits, so that no `1.00` stands beside `faster`.
    """
    if ratio["low"] is None:
        return "unknown: one repeat"
    low, high = round(ratio["low"], 2), round(ratio["high"], 2)
    return "faster" if low > 1 else "slower" if high < 1 else "inside the noise"


def speedup_text(ratio: Mapping[str, Any]) -> str:
    """A speed-up with its interval, in words."""
    known = ratio["low"] is not None
    return f"{ratio['ratio']:.2f} x " + (f"({ratio['low']:.2f} to {ratio['high']:.2f})" if known else "(interval unknown)")


def advise(ratios: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> dict[int, str]:
    """By load the contestant to switch on: of those that are faster beyond the noise the fastest, or `none`.

    Args:
        ratios: by requests in flight, by contestant, the speed-up, see `speedups`.
    """
    found = {}
    for load, contestants in sorted(ratios.items()):
        faster = {name: ratio["ratio"] for name, ratio in contestants.items() if outcome(ratio) == "faster"}
        found[load] = max(faster, key=lambda name: faster[name]) if faster else "none"
    return found


def advice(ratios: Mapping[int, Mapping[str, Mapping[str, Any]]], configs: Mapping[str, str]) -> str:
    """The advice in words: one clause a load, then the `--speculative-config` to use.

    Where nothing is faster beyond the noise it says whether all are slower, or that the best is not told from no speculation:
    the first is a reason to leave speculation off, the second one to measure more.

    Args:
        ratios: see `advise`.
        configs: by contestant, its `--speculative-config`.
    """
    if all(ratio["low"] is None for contestants in ratios.values() for ratio in contestants.values()):
        return "unknown: one repeat does not tell a gain from noise"
    chosen = advise(ratios)
    if set(chosen.values()) <= {"none"}:
        loads = ", ".join(map(str, chosen)) + (" request" if list(chosen) == [1] else " requests")
        why = "; ".join(f"at {load} {_not_faster(ratios[load])}" for load in chosen)
        return f"do not speculate: nothing is faster beyond the noise at {loads} in flight ({why})"
    said = []
    for load, name in chosen.items():
        if name == "none":
            said.append(f"at {load} do not, {_not_faster(ratios[load])}")
        else:
            ratio = ratios[load][name]
            said.append(f"at {load} speculate with {name}, {speedup_text(ratio)}")
    lines = [f"{name} is --speculative-config '{configs[name]}'" for name in dict.fromkeys(chosen.values()) if name != "none"]
    return f"by requests in flight: {'; '.join([*said, *lines])}"


def _not_faster(ratios: Mapping[str, Mapping[str, Any]]) -> str:
    """Of a load at which nothing is faster beyond the noise, how the best of those that are not slower fares."""
    possible = {name: ratio for name, ratio in ratios.items() if outcome(ratio) != "slower"}
    if not possible:
        return "all are slower"
    best = max(possible, key=lambda name: possible[name]["ratio"])
    return f"undecided: the best is {best}, {speedup_text(possible[best])}"
