"""The speed-up model fitted to timed steps of one machine."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eagle3kit import calibrate, step_trace
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.rundir import Run
from eagle3kit.server import Server

REQUEST_S, TOKEN_S = 0.003, 0.001
PLAIN = {n: 0.050 + (REQUEST_S + TOKEN_S) * n for n in calibrate.TOKENS}
BODY = 1 - 49_152 * 576 / 134_515_008
"""Share of a token's operations that a prompt's tokens take: all but the output matrix."""
PROMPTS = {n: 0.2 + BODY * TOKEN_S * n for n in calibrate.PROMPTS}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(Params(runs_dir=str(tmp_path), run_name="r"), "06_evaluate")


def server(monkeypatch: pytest.MonkeyPatch, answers: Sequence[Sequence[float]]) -> Server:
    """A server whose next answers come in pieces at these seconds."""
    left = list(answers)

    class Pool:  # in order, so that each prompt gets the answer that was meant for it
        def __init__(self, _: int) -> None: ...

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None: ...

        map = staticmethod(map)

    monkeypatch.setattr("eagle3kit.calibrate.ThreadPoolExecutor", Pool)
    return cast(Server, SimpleNamespace(model="m", arrivals=lambda path, body: list(left.pop(0))))


def test_a_step_is_timed_without_what_precedes_it_and_without_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    one = [3.0, 3.05, 3.10, 5.10, 5.15]  # a prompt of three seconds, and a stall of two
    assert calibrate.step_times(server(monkeypatch, [one]), [[1, 2]], (1,), {})["steps"] == {1: pytest.approx(0.05)}


def test_only_steps_of_all_requests_together_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone a step takes 0.01 s, with the other request 0.06: it begins later and ends sooner."""
    long = [0.00, 0.01, 0.02, 0.03, 0.09, 0.15, 0.16, 0.17, 0.18]
    short = [0.03, 0.09, 0.15]
    assert calibrate.step_times(server(monkeypatch, [long, short]), [[1], [2]], (2,), {})["steps"] == {2: pytest.approx(0.06)}


def test_requests_that_never_decode_together_are_timed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = [[0.0, 0.1, 0.2], [1.0, 1.1, 1.2]]
    assert calibrate.step_times(server(monkeypatch, apart), [[1], [2]], (2,), {})["steps"] == {2: pytest.approx(0.1)}


def test_an_answer_in_one_piece_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KitError, match="in one piece"):
        calibrate.step_times(server(monkeypatch, [[0.0]]), [[1]], (1,), {})


def test_the_wait_for_a_first_token_is_that_of_the_middle_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3kit.calibrate.time.monotonic", lambda: 10.0)
    answers = [[10.2, 10.3], [10.4, 10.5], [11.0, 11.1]]
    found = calibrate.step_times(server(monkeypatch, answers), [[1], [2]], (3,), {})  # two prompts, the first asked twice
    assert found["first"] == {3: pytest.approx(0.4)}


def test_no_timed_prompt_finds_the_cache_of_another() -> None:
    asked: list[tuple[int, str]] = []

    def arrivals(path: str, body: dict[str, Any]) -> list[float]:
        asked.append((len(body["prompt"]), body["cache_salt"]))
        return [time.monotonic()]

    found = [calibrate.prompt_times(cast(Server, SimpleNamespace(model="m", arrivals=arrivals)), [5, 6, 7]) for _ in range(2)]
    assert [sorted(times) for times in found] == [sorted(calibrate.PROMPTS)] * 2
    assert sorted({n for n, _ in asked}) == sorted(calibrate.PROMPTS)
    assert len({salt for _, salt in asked}) == len(asked) == 2 * len(calibrate.PROMPTS)


def test_the_fitted_machine_has_the_timed_steps(run: Run) -> None:
    here = calibrate.fit(run, PLAIN, PROMPTS, {1: 0.090}, 3, 0)
    for n, seconds in PLAIN.items():
        assert here.step_s(n) == pytest.approx(seconds)
    assert here.step_s(1, 3) == pytest.approx(0.090)
    assert here.speedup(1, 3, 2.0) == pytest.approx(2.0 * PLAIN[1] / 0.090)


def test_two_timed_loads_tell_what_a_step_and_what_a_drafted_token_takes(run: Run) -> None:
    bare = calibrate.fit(run, PLAIN, PROMPTS, {1: 0.0}, 3, 0)
    timed = {n: bare.step_s(n, 3) + 0.004 + 0.0008 * 3 * n for n in (1, 16)}
    here = calibrate.fit(run, PLAIN, PROMPTS, timed, 3, 0)
    assert here.constants is not None
    assert [here.constants.verification_s, here.constants.draft_s] == pytest.approx([0.004, 0.0008])
    assert here.step_s(4, 5) == pytest.approx(bare.step_s(4, 5) + 0.004 + 0.0008 * 5 * 4)
    one = calibrate.fit(run, PLAIN, PROMPTS, {1: timed[1]}, 3, 0)  # one load cannot tell them apart
    assert one.constants is not None
    assert one.constants.draft_s == 0


def test_a_token_to_verify_costs_no_request(run: Run) -> None:
    target = replace(calibrate.fit(run, PLAIN, PROMPTS, {1: 0.0}, 3, 0), drafter_bytes=0)
    assert target.step_s(4, 3) == pytest.approx(0.050 + 4 * REQUEST_S + 16 * TOKEN_S)
    assert target.step_s(4, 3) < PLAIN[16]


def test_the_drafter_alone_is_a_lower_bound(run: Run) -> None:
    here = calibrate.fit(run, PLAIN, PROMPTS, {1: 0.0}, 3, 0)
    assert here.step(1, 3)["verification"] == 0
    assert here.step_s(1, 3) > 0.050 + REQUEST_S + 4 * TOKEN_S


def test_a_traced_share_is_what_the_drafters_passes_take(run: Run) -> None:
    by_size = calibrate.fit(run, PLAIN, PROMPTS, {1: 0.090}, 3, 0).step(1, 3)
    traced = calibrate.fit(run, PLAIN, PROMPTS, {1: 0.090}, 3, 0.3)
    assert traced.step(1, 3)["drafter"] == pytest.approx(0.027)
    assert traced.step_s(1, 3) == pytest.approx(0.090)
    assert traced.step(1, 1)["drafter"] == pytest.approx(0.009)
    less = calibrate.fit(run, PLAIN, PROMPTS, {1: 0.090}, 3, 1e-6).step(1, 3)
    assert less == by_size


def test_drafting_is_traced_for_one_request(tmp_path: Path) -> None:
    done: list[str] = []

    @contextmanager
    def traced() -> Iterator[None]:
        done.append("begin")
        yield
        done.append("end")
        events = [{"name": step_trace.DRAFT, "cat": "user_annotation", "ts": at, "dur": 20} for at in (0, 100)]
        (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))

    def arrivals(path: str, body: dict[str, Any]) -> list[float]:
        done.append("asked")
        return [0.0]

    stand_in = SimpleNamespace(model="m", arrivals=arrivals, traced=traced)
    assert calibrate.drafting_shares(cast(Server, stand_in), [1, 2], {}, tmp_path) == [0.2]
    assert done == ["begin", "asked", "end"]


def test_what_noise_makes_negative_is_left_out_of_the_fit(run: Run) -> None:
    """Prompts that came back sooner the longer they were give operations a negative time; clipped, the steps would be missed."""
    here = calibrate.fit(run, PLAIN, {16: 0.30, 128: 0.25}, {1: 0.090}, 3, 0)
    for n, seconds in PLAIN.items():  # a request and its token cannot be told apart then, but together they take what they took
        assert here.step_s(n) == pytest.approx(seconds, rel=1e-4)
    assert here.constants is not None
    assert here.constants.request_s == pytest.approx(REQUEST_S + TOKEN_S, rel=1e-3)


def test_a_coefficient_that_would_be_negative_is_zero_and_the_others_are_fitted_anew() -> None:
    rows, values = [(1, 1), (1, 2), (1, 3)], [3.0, 2.5, 2.2]
    assert calibrate.non_negative_least_squares(rows, values) == pytest.approx((sum(values) / 3, 0.0))
    assert calibrate.non_negative_least_squares(rows, [3.0, 5.0, 7.0]) == pytest.approx((1.0, 2.0))
    assert calibrate.non_negative_least_squares(rows, [-1.0, -2.0, -3.0]) == (0.0, 0.0)


@pytest.mark.parametrize("plain", [{1: 0.05}, {1: 0.01, 16: 1.0}])
def test_steps_that_make_no_line_are_refused(run: Run, plain: dict[int, float]) -> None:
    with pytest.raises(KitError, match="make no line"):
        calibrate.fit(run, plain, PROMPTS, {1: 0.1}, 3, 0)


@pytest.mark.parametrize(
    ("plain", "waited"),
    [({1: 0.2, 16: 0.5}, 0.26), ({1: 0.3}, 0.3), ({1: 0.1, 2: 0.0}, 0.0)],  # on a line; as it is; never below nothing
)
def test_predictions_stand_beside_what_was_measured(run: Run, plain: dict[int, float], waited: float) -> None:
    here = calibrate.fit(run, PLAIN, PROMPTS, {1: 0.090}, 3, 0)
    decoding, answers = {"ratio": 1.0, "low": 0.9, "high": 1.1}, {"ratio": 0.8, "low": 0.7, "high": 0.9}
    measured = calibrate.Measured(4, 3, 2.0, 14.0, 23.0, decoding, answers)
    (row,) = calibrate.compare(here, plain, {1: 0.4, 16: 0.4}, [measured])
    assert row["predicted"] == pytest.approx(2 * here.step_s(4) / here.step_s(4, 3))
    assert row["error"] == pytest.approx(row["predicted"] - 1)
    expected = (waited + 23 * here.step_s(4)) / (0.4 + 14 * here.step_s(4, 3))
    assert row["answers_predicted"] == pytest.approx(expected)
    assert row["answers_error"] == pytest.approx(expected / 0.8 - 1)
