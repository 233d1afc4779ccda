"""The share of drafting in a step, from hand-made traces in the form of torch's profiler."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from eagle3kit import step_trace


def event(ts: float, dur: float, name: str = step_trace.DRAFT, cat: str = "user_annotation") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_a_step_lasts_from_draft_to_draft() -> None:
    events = [event(1000, 10), event(1050, 30, "gpu_model_runner: forward"), event(1100, 25), event(1300, 40), {"name": "other"}]
    assert step_trace.drafting(events) == pytest.approx([0.1, 0.125])
    assert step_trace.drafting(reversed(events)) == pytest.approx([0.1, 0.125])


def test_on_a_gpu_its_own_time_counts() -> None:
    launched = [event(0, 1), event(100, 1)]
    assert step_trace.drafting(
        [*launched, event(5, 30, cat="gpu_user_annotation"), event(105, 30, cat="gpu_user_annotation")]
    ) == [0.3]


@pytest.mark.parametrize("events", [[], [event(0, 1)], [event(0, 1, "gpu_model_runner: forward"), event(9, 1, "x")]])
def test_a_trace_without_two_drafts_says_nothing(events: list[dict[str, Any]]) -> None:
    assert step_trace.drafting(events) == []


def test_the_newest_trace_is_read_and_all_are_deleted(tmp_path: Path) -> None:
    assert step_trace.read(tmp_path) == []
    for name, age, share in (("old", 100, 10), ("new", 0, 50)):
        file = tmp_path / f"{name}.pt.trace.json"
        file.write_text(json.dumps({"traceEvents": [event(0, share), event(100, 1)]}))
        os.utime(file, (1e9 - age, 1e9 - age))
    (tmp_path / "rank0.profiler_out.txt").write_text("a table")
    assert step_trace.read(tmp_path) == [0.5]
    assert list(tmp_path.iterdir()) == []
