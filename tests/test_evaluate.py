"""Counters, ties and ratios with known answers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3kit import evaluate
from eagle3kit.errors import KitError
from eagle3kit.evaluate import Question

METRICS = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 64.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 16.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 8.0
"""


def test_counters_are_read_from_the_engine() -> None:
    assert evaluate.spec_counters(METRICS) == {
        "drafts": 100,
        "draft_tokens": 300,
        "accepted_tokens": 64,
        "accepted_1": 40,
        "accepted_2": 16,
        "accepted_3": 8,
    }
    assert evaluate.spec_counters("") == {}


KINDS = {"p1": "story", "p2": "story", "p3": "math"}
COUNTS = [0] * 30 + [1] * 12 + [2] * 4 + [3] * 4
ACCEPTED = {"p1": COUNTS, "p2": COUNTS, "p3": []}


def test_acceptance_has_known_values() -> None:
    found = evaluate.acceptance(evaluate.spec_counters(METRICS), ACCEPTED, KINDS, 3)
    assert found["al"] == pytest.approx(1.64)
    assert found["unconditional"] == pytest.approx([0.4, 0.16, 0.08])
    assert found["conditional"] == pytest.approx([0.4, 0.4, 0.5])
    assert found["by_kind"] == {"story": {"al": pytest.approx(1.64), "prompts": 2}}  # the third prompt drafted nothing
    assert found["al_low"] == pytest.approx(1.64) == pytest.approx(found["al_high"])  # both answers are alike


def test_a_position_is_rated_by_all_drafts_and_by_those_that_reached_it() -> None:
    assert evaluate.positions([6, 3, 0, 0], 12) == {"unconditional": [0.5, 0.25, 0, 0], "conditional": [0.5, 0.5, 0, 0]}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5))
def test_al_is_one_plus_the_sum_of_unconditional_rates(steps: list[int]) -> None:
    accepted = sorted(steps, reverse=True)
    counters = {"drafts": 50.0, "accepted_tokens": float(sum(accepted))}
    counters |= {f"accepted_{i + 1}": float(n) for i, n in enumerate(accepted)}
    counts = [sum(draft < n for n in accepted) for draft in range(50)]
    found = evaluate.acceptance(counters, {"p": counts}, {"p": "any"}, len(accepted))
    assert found["al"] == pytest.approx(1 + sum(found["unconditional"]))
    assert found["by_kind"]["any"]["al"] == pytest.approx(found["al"])
    assert all(0 <= rate <= 1 for rate in found["conditional"])


def test_the_interval_is_as_wide_as_the_prompts_differ() -> None:
    assert evaluate.interval([[0, 1], [0, 1, 0, 1], [0] + [1] * 9]) == pytest.approx((1.5, 1.9))
    assert evaluate.interval([[0, 1]]) == (None, None)


def test_serving_far_below_the_simulation_is_an_error() -> None:
    simulated = {"a": [1, 0, 2, 0] * 5}
    evaluate.require_served({"a": [1, 0, 2, 0] * 4}, simulated)  # a shorter answer: only what both have counts
    evaluate.require_served({"a": [0] * 4}, {"a": [1, 0, 0, 1]})  # too few tokens to tell
    with pytest.raises(KitError, match="far less.*seen 0 tokens in 20 drafts; wanted about 15"):
        evaluate.require_served({"a": [0] * 20}, simulated)


def test_no_draft_is_an_error() -> None:
    with pytest.raises(KitError, match="counted no draft"):
        evaluate.acceptance({}, {}, {}, 3)


class Scored:
    """Stands for a server that gives each token a log-probability of minus its id."""

    model = "m"

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        token = body["prompt"][-1]
        return {"choices": [{"prompt_logprobs": [None, {str(token): {"logprob": -float(token)}}]}]}


ASKED = [Question(name, "any", (1, 2)) for name in ("same", "differs", "shorter")]
BASELINE = {"same": [5, 6, 7], "differs": [5, 6, 7], "shorter": [5, 6, 7]}


def differences(**answers: list[int]) -> dict[str, dict[str, Any]]:
    given = {**BASELINE, **answers}
    return evaluate.first_differences(Scored(), ASKED, BASELINE, given, 3)  # type: ignore[arg-type]


def test_the_first_difference_is_found_with_both_log_probabilities() -> None:
    found = differences(differs=[5, 8, 7], shorter=[5, 6])
    assert list(found) == ["differs", "shorter"]
    assert found["differs"] == {
        "prompt_id": "differs",
        "position": 1,
        "expected": 6,
        "got": 8,
        "logprob_expected": -6.0,
        "logprob_got": -8.0,
    }
    assert (found["shorter"]["position"], found["shorter"]["expected"], found["shorter"]["got"]) == (2, 7, None)


def results(entry: dict[str, Any] | None) -> dict[str, Any]:
    changed = {"x": entry} if entry else {}
    return {"none": {"answers": BASELINE}, "eagle3": {"answers": BASELINE, "differences": changed}}


def test_losslessness_tells_ties_from_differences() -> None:
    def entry(gap: float | None) -> dict[str, Any]:
        return {"prompt_id": "x", "position": 1, "logprob_expected": -1.0, "logprob_got": None if gap is None else -1.0 - gap}

    assert evaluate.losslessness(results(None), 1e-3)["share"] == 1
    tie = evaluate.losslessness(results(entry(1e-5)), 1e-3)
    assert (tie["share"], tie["identical"], len(tie["ties"]), tie["differences"]) == (1, 2, 1, [])
    for gap in (0.5, None):
        wrong = evaluate.losslessness(results(entry(gap)), 1e-3)
        assert wrong["share"] == pytest.approx(2 / 3)
        assert len(wrong["differences"]) == 1


def timed(**rates: list[float]) -> dict[str, Any]:
    return {name: {"tokens_per_s": values} for name, values in rates.items()}


def test_speed_is_a_ratio_of_medians_with_the_range_of_all_pairs() -> None:
    fast = evaluate.speed(timed(none=[10.0, 10.0, 20.0], eagle3=[15.0, 12.0, 18.0]))
    assert fast["ratios"]["eagle3"] == {"median": 1.5, "low": 0.6, "high": 1.8, "paired": False}


def test_repeats_taken_in_turns_are_compared_in_pairs() -> None:
    results = timed(none=[10.0, 20.0, 40.0], eagle3=[15.0, 24.0, 80.0])
    results["eagle3"]["paired"] = True
    assert evaluate.speed(results)["ratios"]["eagle3"] == {"median": 1.5, "low": 1.2, "high": 2.0, "paired": True}


@pytest.mark.parametrize(("rates", "says"), [([15.0] * 3, "faster"), ([5.0] * 3, "slower"), ([9.0, 10.0, 11.0], "no difference")])
def test_the_verdict_is_honest(rates: list[float], says: str) -> None:
    assert says in evaluate.verdict(evaluate.speed(timed(none=[10.0] * 3, eagle3=rates)))
