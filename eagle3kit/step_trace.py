"""What share of a speculative step goes into drafting: read from the trace that vLLM's own profiler writes.

vLLM counts accepted tokens, not where the time goes. But its model runner names its parts for torch's profiler, which a server
offers when it was started with `arguments`; it costs nothing until a step is traced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

DRAFT = "gpu_model_runner: draft"
"""The scope in which vLLM's model runner drafts, on a CPU too."""

CATEGORIES = ("gpu_user_annotation", "user_annotation")
"""Kinds of event that carry a scope's time: a GPU's, where there is one, and the process's, which only launches kernels there."""


def arguments(folder: Path) -> tuple[str, ...]:
    """What a server is started with so that its steps can be traced into `folder`."""
    options = {"torch_profiler_dir": str(folder.absolute()), "torch_profiler_with_stack": False, "ignore_frontend": True}
    return ("--profiler-config", json.dumps({"profiler": "torch", "torch_profiler_use_gzip": False, **options}))


def drafting(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """The share of each step that was spent drafting, a step being the time from one draft's begin to the next one's.

    Args:
        events: of a trace in Chrome's form, times in microseconds; of one worker and one request, so steps follow one another.

    Returns:
        Empty where the trace shows no two drafts.
    """
    drafts: dict[str, list[tuple[float, float]]] = {category: [] for category in CATEGORIES}
    for event in events:
        if event.get("name") == DRAFT and event.get("cat") in drafts:
            drafts[event["cat"]].append((float(event["ts"]), float(event["dur"])))
    found = next((sorted(each) for each in drafts.values() if len(each) > 1), [])
    return [duration / (later - began) for (began, duration), (later, _) in pairwise(found)]


def read(folder: Path) -> list[float]:
    """The shares of the newest trace in `folder` (see `drafting`), of one worker where several wrote; the traces are deleted."""
    traces = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    shares = drafting(json.loads(traces[-1].read_text())["traceEvents"]) if traces else []
    for path in folder.glob("*"):
        path.unlink()
    return shares
