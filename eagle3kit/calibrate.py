"""The speed-up model fitted to this machine, to see whether its form holds where everything can be measured.

Decode steps of 1 to 16 tokens are timed on the server without speculation, as so many requests at once, and a speculative step of
one request on the drafter's. The first give what a step costs and what a token adds, and with the drafter's size its passes; what
the speculative step takes beyond that is `Constants.verification_s`. The speed-ups that follow at other loads and draft lengths
are held against those that the sweep measured, with other requests.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from eagle3kit import plan, target
from eagle3kit.errors import KitError
from eagle3kit.rundir import Run
from eagle3kit.server import Server
from eagle3kit.speedup import COMPUTE_SHARE, Constants, Setup, active_parameters, hardware_presets, served_bytes, step_bytes

TOKENS = (1, 2, 4, 8, 16)
"""Tokens of the timed steps."""
STEPS, REPEATS = 12, 3
"""Steps that one timing lasts, and timings: `TOKENS` take some fifteen seconds on two cores."""


def step_times(
    server: Server, prompts: Sequence[Sequence[int]], counts: Iterable[int], extra: Mapping[str, Any]
) -> dict[int, float]:
    """Seconds of a decode step by requests in flight, the median of `REPEATS`.

    What precedes decoding is taken off: requests for two tokens are timed too.

    Args:
        prompts: token ids; a count beyond their number is left out.
        counts: requests at a time.
        extra: further fields of every request.
    """
    found: dict[int, float] = {}
    for n in (n for n in counts if n <= len(prompts)):
        times = []
        for _ in range(REPEATS):
            (short, few), (long, many) = (_timed(server, prompts[:n], tokens, extra) for tokens in (2, 2 + STEPS))
            times.append(max(0.0, long - short) / max(1, many - few))
        found[n] = statistics.median(times)
    return found


def _timed(server: Server, prompts: Sequence[Sequence[int]], tokens: int, extra: Mapping[str, Any]) -> tuple[float, int]:
    """Seconds until all prompts have so many tokens, and the steps that the longest of them took."""

    def one(ids: Sequence[int]) -> int:
        body = {"model": server.model, "prompt": list(ids), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **extra}
        reply = server.post("/v1/completions", body)
        drafted = (reply.get("metrics") or {}).get("speculative_decoding") or {}
        return len(drafted.get("per_step_accepted") or []) or tokens

    began = time.monotonic()
    with ThreadPoolExecutor(len(prompts)) as pool:
        steps = max(pool.map(one, prompts))
    return time.monotonic() - began, steps


def fit(run: Run, plain: Mapping[int, float], speculative: float, k: int) -> Setup:
    """This machine as the model sees it.

    Least squares over the plain steps: bytes read / bandwidth + operations / their rate.

    Args:
        plain: seconds of a step without speculation by its tokens.
        speculative: seconds of a step of one request with drafts of `k` tokens.

    Raises:
        KitError: fewer than two plain steps were timed, or they make no line that rises from above zero.
    """
    import numpy as np

    p = run.params
    served, _ = target.describe(p.target_model, p.target_revision)
    work = [(step_bytes(served, n, p.target_dtype), 2.0 * active_parameters(served) * n) for n in plain]
    a_byte, an_operation = map(float, np.linalg.lstsq(np.array(work), np.array(list(plain.values())), rcond=None)[0])
    if len(plain) < 2 or a_byte <= 0:
        raise KitError("the timed steps make no line", seen=dict(plain), fix="run notebook 06 again when the machine is quiet")
    an_operation = max(an_operation, 1e-6 * a_byte)  # noise can make it negative
    machine = replace(
        hardware_presets()["cpu"],
        name="this-machine",
        label="this machine",
        bandwidth_gb_s=1 / a_byte / 1e9,
        bf16_tflops=1 / an_operation / COMPUTE_SHARE / 1e12,
    )
    drafter = plan.drafter_read_bytes(served, plan.drafter_shape(p, served)) * served_bytes(served, p.target_dtype) / 2
    made = Setup(served, machine, 1, drafter_bytes=drafter, context=0, dtype=p.target_dtype, constants=Constants(1, 0, 1, 0))
    rest = max(0.0, speculative - made.step_s(1, k))
    return replace(made, constants=Constants(1, 0, 1, rest))


def compare(here: Setup, measured: Iterable[tuple[int, int, float, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Predicted beside measured speed-ups.

    Args:
        here: see `fit`.
        measured: requests in flight, k, acceptance length, and the measured ratio (`median`, `low`, `high`).

    Returns:
        One row each, `error` as a share of the measured speed-up.
    """
    rows = []
    for streams, k, al, ratio in measured:
        predicted = here.speedup(streams, k, al)
        row = {"requests": streams, "k": k, "AL": al, "predicted": predicted, "measured": ratio["median"]}
        rows.append(row | {"low": ratio["low"], "high": ratio["high"], "error": predicted / ratio["median"] - 1})
    return rows
