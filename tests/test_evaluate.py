"""Counters, ties and ratios with known answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3kit import evaluate
from eagle3kit.errors import KitError
from eagle3kit.evaluate import Question
from eagle3kit.params import Params
from eagle3kit.rundir import Run

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


def test_repeats_are_in_turn_where_all_contestants_were_measured_in_one_go() -> None:
    results = timed(none=[10.0, 20.0, 40.0], ngram=[10.0, 21.0, 40.0], eagle3=[15.0, 30.0, 60.0])
    for name in ("none", "ngram"):
        results[name]["paired"] = True
    for anew in (False, True):  # the drafter was trained again, and measured alone
        results["eagle3"]["paired"] = not anew
        fast = evaluate.speed(results)
        assert fast["in_turn"] is not anew
        assert fast["ratios"]["eagle3"]["paired"] is not anew
        assert fast["ratios"]["eagle3"]["ratio"] == pytest.approx(1.5)
        said = evaluate.verdict(fast)
        assert ("inside the noise" if anew else "faster") in said
        assert ("one contestant after the other" if anew else "contestants in turn") in said


SAYS = [([15.0] * 3, "faster"), ([5.0] * 3, "slower"), ([9.0, 10.0, 11.0], "inside the noise"), ([15.0], "unknown: one repeat")]


@pytest.mark.parametrize(("rates", "says"), SAYS)
def test_the_verdict_is_honest(rates: list[float], says: str) -> None:
    fast = evaluate.speed(timed(none=[10.0] * len(rates), eagle3=rates))
    assert says in evaluate.verdict(fast)
    none, eagle3 = evaluate.speed_rows(fast)
    assert (none["verdict"], eagle3["verdict"]) == ("baseline", says)


@given(st.lists(st.sampled_from("abc"), max_size=40), st.integers(1, 50))
def test_prompts_of_speed_are_of_all_kinds_and_lie_apart(kinds: list[str], count: int) -> None:
    chosen = evaluate.spread(kinds, count)
    assert len(chosen) == len(set(chosen)) == min(count, len(kinds))
    assert len({kinds[place] for place in chosen}) == min(len(chosen), len(set(kinds)))


def test_prompts_of_speed_are_not_the_first_ones() -> None:
    assert evaluate.spread(["a"] * 100, 4) == [12, 37, 62, 87]
    assert evaluate.spread(["a", "b"] * 50, 2) == [25, 76]  # the next one of another kind


def test_a_speed_up_is_reckoned_for_the_acceptance_of_all_prompts() -> None:
    found = evaluate.at_heldout(1.3, 2.0, 1.6)
    assert found == {"al": 2.0, "heldout_al": 1.6, "at_heldout": pytest.approx(1.04)}
    assert evaluate.heldout_columns(found)["speed-up at AL held-out, reckoned"] == "1.04 x"
    assert evaluate.at_heldout(1.3, None, 1.6)["at_heldout"] is None  # its prompts drafted nothing
    assert set(evaluate.heldout_columns({}).values()) == {""}
    facts = evaluate.ratio_facts("speed.eagle3", {"ratio": 1.3, "low": None, "high": None} | found)
    assert facts["speed.eagle3.ratio.low"][0] is None  # an earlier value does not stay
    assert facts["speed.eagle3.ratio.at_heldout"][0] == 1.04


def test_the_first_position_has_an_interval_over_prompts() -> None:
    assert evaluate.first_interval([[0, 1], [2, 0], [0, 3]]) == (0.5, 0.5)
    low, high = evaluate.first_interval([[0] * 10, [1] * 10, [0, 1] * 5])
    assert low is not None and high is not None and low < 0.5 < high
    assert evaluate.first_interval([[1]]) == (None, None)


def test_conclusions_hold_the_pattern_and_what_speed_was_measured_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Params(runs_dir=str(tmp_path), run_name="r", eval_speed_prompts=2), "06_evaluate")
    asked = [Question(f"q{i}", kind, (1,)) for i, kind in enumerate(("math", "math", "story", "story"))]
    monkeypatch.setattr(evaluate, "questions", lambda run: asked)
    accepted = {"q0": [3] * 20, "q1": [0] * 20, "q2": [3] * 20, "q3": [1] * 20}
    counters = {"drafts": 80.0, "accepted_tokens": 140.0, "accepted_1": 60.0, "accepted_2": 40.0, "accepted_3": 40.0}
    answers = {"answers": {q.id: list(range(40)) for q in asked}, "differences": {}, "ready_s": 1.0, "paired": True}
    rates = {"none": [10.0, 11.0, 12.0], "ngram": [9.0, 10.0, 11.0], "eagle3": [15.0, 16.5, 18.0]}
    results = {name: answers | {"tokens_per_s": found, "counters": {}} for name, found in rates.items()}
    results["eagle3"] |= {"accepted": accepted, "counters": counters}
    said = evaluate.conclude(run, results)
    assert [q.id for q in evaluate.speed_questions(run, asked)] == ["q1", "q3"]
    assert said["speed"]["ratios"]["eagle3"]["al"] == 1.5  # of q1 and q3 alone
    assert said["speed"]["ratios"]["eagle3"]["at_heldout"] == pytest.approx(1.5 * 2.75 / 1.5)
    assert said["acceptance"]["profile"]["name"] == "healthy"
    assert run.fact("acceptance.profile") == "healthy"
    assert run.fact("acceptance.conditional_2") == pytest.approx(2 / 3, abs=1e-6)  # rounded twice, 46.648 % would read 46.7 %
    assert (run.fact("speed.eagle3.al"), run.fact("speed.eagle3.heldout_al")) == (1.5, 2.75)


def against(served: float, simulated: int, promised: list[float], drafts: int = 100) -> list[dict[str, Any]]:
    accepted = {"al": 1 + served, "unconditional": [served], "conditional": [served]}
    return evaluate.train_against_serve(promised, accepted, {"a": [1] * simulated + [0] * (drafts - simulated)})


def test_training_simulation_and_serving_stand_side_by_side() -> None:
    first, total = against(0.39, 40, [0.48, 0.25])
    assert (first["training, chained"], first["simulated"], first["served"], first["alarm"]) == (0.48, 0.4, 0.39, "")
    assert (first["served less simulated"], first["simulated less training"]) == (-0.01, -0.08)
    assert (total["position"], total["training, chained"], total["simulated"], total["served"]) == ("AL", 1.48, 1.4, 1.39)


def test_lengths_are_compared_up_to_where_training_unrolled() -> None:
    accepted = {"al": 1.68, "unconditional": [0.4, 0.19, 0.09], "conditional": [0.4, 0.475, 0.47]}
    rows = evaluate.train_against_serve([0.49, 0.25], accepted, {"a": [0] * 60 + [1] * 20 + [2] * 10 + [3] * 10})
    assert [row["position"] for row in rows] == ["1", "2", "3", "AL, up to 2", "AL"]
    shown = [(row["training, chained"], row["simulated"], row["served"]) for row in rows]
    assert shown[2:] == [("unknown", 0.1, 0.09), (1.74, 1.6, 1.59), ("unknown", 1.7, 1.68)]


@pytest.mark.parametrize(
    ("served", "simulated", "promised", "drafts", "alarm"),
    [
        (0.2, 40, [0.48], 100, "serving is far below the simulation"),
        (0.2, 20, [0.48], 100, "the simulation is far below training"),
        (0.1, 20, [0.48], 100, "serving is far below the simulation; the simulation is far below training"),
        (0.2, 2, [0.48], 10, ""),  # too few drafts to tell
        (0.2, 20, [], 100, ""),
    ],
)
def test_each_step_from_training_to_serving_has_its_alarm(
    served: float, simulated: int, promised: list[float], drafts: int, alarm: str
) -> None:
    rows = against(served, simulated, promised, drafts)
    assert [row["alarm"] for row in rows] == [alarm, alarm]
    assert (rows[0]["training, chained"] == "unknown") == (not promised)


def test_training_promises_products_of_the_served_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Params(runs_dir=str(tmp_path), run_name="r"), "06_evaluate")
    monkeypatch.setattr("eagle3kit.train.drafter_folder", lambda run: run.path("checkpoints", "1"))
    lines = [{"split": "val", "step": step, "epoch": epoch, "cond": [0.5, 0.4 + epoch / 10]} for step, epoch in ((9, 0), (19, 1))]
    run.path("checkpoints", "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert evaluate.promised(run) == pytest.approx([0.5, 0.25])
