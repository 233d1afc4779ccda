"""The scheduler that lets a request choose the draft length: what vLLM's own scheduler is told."""

from types import SimpleNamespace
from typing import Any

import pytest


def request(draft_tokens: int | None = None) -> Any:
    extra = None if draft_tokens is None else {"draft_tokens": draft_tokens}
    return SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))


@pytest.mark.parametrize(
    ("running", "waiting", "length"),
    [
        ([], [], 5),
        ([request()], [], 5),
        ([request(3), request(3)], [request(3)], 3),
        ([], [request(1)], 1),
        ([request(3)], [request(1), request()], 1),
        ([SimpleNamespace(sampling_params=None)], [], 5),
    ],
)
def test_the_shortest_draft_that_is_asked_for_counts(
    monkeypatch: pytest.MonkeyPatch, running: list[Any], waiting: list[Any], length: int
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from eagle3kit.scheduler import DraftLengthScheduler

    told: list[list[int]] = []
    monkeypatch.setattr(Scheduler, "schedule", lambda self, throttle: told.append(self.dynamic_sd_lookup))
    scheduler = DraftLengthScheduler.__new__(DraftLengthScheduler)
    scheduler.running, scheduler.waiting, scheduler.num_spec_tokens = running, waiting, 5
    scheduler.scheduler_config = SimpleNamespace(max_num_seqs=4)
    scheduler.schedule(False)
    assert told == [[length] * 5]  # vLLM looks the batch size up, from 1 on
