"""The speed-up model fitted to timed steps of one machine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eagle3kit import calibrate
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.rundir import Run
from eagle3kit.server import Server

PLAIN = {n: 0.050 + 0.004 * n for n in calibrate.TOKENS}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(Params(runs_dir=str(tmp_path), run_name="r"), "06_evaluate")


def server(monkeypatch: pytest.MonkeyPatch, prefill: float, step: float, tokens_a_step: int) -> Server:
    """A server on a clock of its own."""
    now = [0.0]
    monkeypatch.setattr("eagle3kit.calibrate.time.monotonic", lambda: now[0])

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        steps = -(-body["max_tokens"] // tokens_a_step)
        now[0] += prefill + step * steps
        return {"metrics": {"speculative_decoding": {"per_step_accepted": [1] * steps}}} if tokens_a_step > 1 else {}

    return cast(Server, SimpleNamespace(model="m", post=post))


def test_a_step_is_timed_without_what_precedes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calibrate.step_times(server(monkeypatch, 3.0, 0.05, 1), [[1, 2]], (1, 2), {}) == {1: pytest.approx(0.05)}
    assert calibrate.step_times(server(monkeypatch, 3.0, 0.08, 2), [[1, 2]], (1,), {}) == {1: pytest.approx(0.08)}


def test_the_fitted_machine_has_the_timed_steps(run: Run) -> None:
    here = calibrate.fit(run, PLAIN, 0.090, 3)
    for n, seconds in PLAIN.items():
        assert here.step_s(n) == pytest.approx(seconds)
    assert here.step_s(1, 3) == pytest.approx(0.090)
    assert here.speedup(1, 3, 2.0) == pytest.approx(2.0 * PLAIN[1] / 0.090)


def test_the_drafter_alone_is_a_lower_bound(run: Run) -> None:
    here = calibrate.fit(run, PLAIN, 0.0, 3)
    assert here.step(1, 3)["verification"] == 0
    assert here.step_s(1, 3) > PLAIN[4]


@pytest.mark.parametrize("plain", [{1: 0.05}, {1: 0.01, 16: 1.0}])
def test_steps_that_make_no_line_are_refused(run: Run, plain: dict[int, float]) -> None:
    with pytest.raises(KitError, match="make no line"):
        calibrate.fit(run, plain, 0.1, 3)


def test_predictions_stand_beside_what_was_measured(run: Run) -> None:
    here = calibrate.fit(run, PLAIN, 0.090, 3)
    (row,) = calibrate.compare(here, [(1, 3, 2.0, {"median": 1.0, "low": 0.9, "high": 1.1})])
    assert row["predicted"] == pytest.approx(1.2)
    assert row["error"] == pytest.approx(0.2)
