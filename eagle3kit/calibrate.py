"""The speed-up model fitted to this machine, to see whether its form holds where everything can be measured.

Timed are decode steps of 1 to 16 requests and prompts of two lengths without speculation, and speculative steps of 1 and of 16
requests at one draft length. The plain steps give what a step costs and what a request adds to it with its token; the prompts
what a token alone adds, for verifying a draft adds tokens to a request and no requests. What share of the speculative step
drafting takes is traced, which gives the drafter's passes; what both speculative steps take beyond all that is
`Constants.verification_s` and `draft_s`. The speed-ups that follow at all loads and draft lengths are held against those that
the sweep measured, with other requests, whose acceptance is given: of decoding, and of whole answers. The model knows nothing
of what precedes decoding; for whole answers the wait for the first token is what the timed requests waited.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations, cycle, islice, pairwise
from pathlib import Path
from typing import Any

from eagle3kit import plan, step_trace, target
from eagle3kit.errors import KitError
from eagle3kit.rundir import Run
from eagle3kit.server import Server
from eagle3kit.speedup import COMPUTE_SHARE, Constants, Setup, active_parameters, hardware_presets, served_bytes, step_bytes

TOKENS = (1, 2, 4, 8, 16)
"""Requests of the timed steps, and so their tokens."""
SPECULATIVE = (TOKENS[0], TOKENS[-1])
"""Requests of the timed speculative steps."""
STEPS, REPEATS = 10, 5
"""Steps of one timing, about, and timings, each of the plain steps followed by one of the speculative steps.

Short and many: on a shared machine a timing is off by what its seconds were like, however many steps are in them.
"""
TRACED = 20
"""Tokens of the answer whose steps are traced."""
YIELD = 1.6
"""Tokens that a speculative step is taken to yield where the length of its answers is chosen."""
PROMPTS = (16, 128)
"""Tokens of the prompts whose reading is timed."""


def step_times(
    server: Server, prompts: Sequence[Sequence[int]], counts: Iterable[int], extra: Mapping[str, Any], tokens: int = STEPS
) -> dict[str, dict[int, float]]:
    """Decode steps and the wait for them.

    A step is the median gap between two pieces of a streamed answer, and only gaps count in which all requests were decoding. A
    stall of a shared machine is in one gap, and in no other: seconds of whole answers scattered twice as much.

    Args:
        prompts: token ids, asked one each, again from the first where there are fewer.
        counts: requests at a time.
        extra: further fields of every request.
        tokens: of an answer, after its first.

    Returns:
        By requests at a time, in seconds: `steps`, and `first`, the median wait for a first token.

    Raises:
        KitError: the server sent no answer in pieces.
    """
    found: dict[str, dict[int, float]] = {"steps": {}, "first": {}}
    for n in counts:
        answers = _arrivals(server, list(islice(cycle(prompts), n)), 1 + tokens, extra)
        begun, ended = max(times[0] for times in answers), min(times[-1] for times in answers)
        gaps = [(a, b) for times in answers for a, b in pairwise(times)]
        together = [b - a for a, b in gaps if begun <= a and b <= ended] or [b - a for a, b in gaps]
        if not together:
            seen = f"{n} requests for {1 + tokens} tokens each"
            raise KitError("a streamed answer came in one piece", seen=seen, fix="read the server's log; run notebook 06 again")
        found["steps"][n] = statistics.median(together)
        found["first"][n] = statistics.median(times[0] for times in answers)
    return found


def prompt_times(server: Server, ids: Sequence[int]) -> dict[int, float]:
    """Seconds to answer prompts of `PROMPTS` tokens with one token; none of them finds the cache of another.

    Args:
        ids: token ids that the prompts are cut from.
    """
    salts = {n: {"cache_salt": f"{n} {time.monotonic_ns()}"} for n in PROMPTS}
    return {n: _arrivals(server, [list(islice(cycle(ids), n))], 1, salt)[0][0] for n, salt in salts.items()}


def drafting_shares(server: Server, prompt: Sequence[int], extra: Mapping[str, Any], folder: Path) -> list[float]:
    """Share of drafting in each step of one request for `TRACED` tokens (see `step_trace.drafting`).

    Args:
        extra: further fields of the request.
        folder: where the server writes its traces.
    """
    with server.traced():
        _arrivals(server, [prompt], TRACED, extra)
    return step_trace.read(folder)


def _arrivals(server: Server, prompts: Sequence[Sequence[int]], tokens: int, extra: Mapping[str, Any]) -> list[list[float]]:
    """When the pieces of the answers to prompts that are asked together came, in seconds after they were asked."""
    began = time.monotonic()

    def one(ids: Sequence[int]) -> list[float]:
        body = {"model": server.model, "prompt": list(ids), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **extra}
        return [at - began for at in server.arrivals("/v1/completions", body)]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def fit(
    run: Run,
    plain: Mapping[int, float],
    prompts: Mapping[int, float],
    speculative: Mapping[int, float],
    k: int,
    drafting: float,
) -> Setup:
    """This machine as the model sees it.

    Least squares over the plain steps, and over what the longer prompt takes beyond the shorter: bytes read / bandwidth +
    operations / their rate + requests x `request_s`, none of them negative. Of a prompt, only the last token goes through the
    output matrix.

    Args:
        plain: seconds of a step without speculation by its requests.
        prompts: seconds to answer one prompt by its tokens.
        speculative: seconds of a step with drafts of `k` tokens by its requests, of one among them.
        drafting: the share of that of one spent drafting; 0 where it is unknown: then the drafter costs what its size says.

    Raises:
        KitError: fewer than two plain steps were timed, or they make no line that rises from above zero.
    """
    p = run.params
    served, _ = target.describe(p.target_model, p.target_revision)
    a_token = 2.0 * active_parameters(served)
    body = a_token - 2.0 * served.vocab_size * served.hidden_size
    work = [(step_bytes(served, n, p.target_dtype), a_token * n, n) for n in plain]
    few, many = min(prompts), max(prompts)
    read = step_bytes(served, many, p.target_dtype) - step_bytes(served, few, p.target_dtype)
    work.append((read, body * (many - few), 0))
    seconds = [*plain.values(), prompts[many] - prompts[few]]
    a_byte, an_operation, a_request = non_negative_least_squares(work, seconds)
    if len(plain) < 2 or a_byte <= 0:
        raise KitError("the timed steps make no line", seen=dict(plain), fix="run notebook 06 again when the machine is quiet")
    an_operation = max(an_operation, 1e-6 * a_byte)  # 0 would be an infinite rate
    machine = replace(
        hardware_presets()["cpu"],
        name="this-machine",
        label="this machine",
        bandwidth_gb_s=1 / a_byte / 1e9,
        bf16_tflops=1 / an_operation / COMPUTE_SHARE / 1e12,
    )
    drafter = plan.drafter_read_bytes(served, plan.drafter_shape(p, served)) * served_bytes(served, p.target_dtype) / 2
    found = Constants(1, 0, 1, 0, request_s=a_request)
    made = Setup(served, machine, 1, drafter_bytes=drafter, context=0, dtype=p.target_dtype, constants=found, overlap=False)
    found = replace(found, pass_s=max(0.0, drafting * speculative[1] - made.step(1, k)["drafter"]) / k)
    made = replace(made, constants=found)
    left = [seconds - made.step_s(n, k) for n, seconds in speculative.items()]
    a_step, a_draft = non_negative_least_squares([(1, n * k) for n in speculative], left)
    return replace(made, constants=replace(found, verification_s=a_step, draft_s=a_draft))


def non_negative_least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """The coefficients, none negative, that come nearest to `values`; one for each of the few columns of `rows`.

    They are the plain least squares over one of the sets of columns, so every set is tried. To clip a negative coefficient
    instead would leave the others as they were beside it.
    """
    import numpy as np

    wide, wanted = np.array(rows, float), np.array(values, float)
    best, least = np.zeros(wide.shape[1]), float(np.linalg.norm(wanted))
    scale = np.linalg.norm(wide, axis=0)
    for n in range(1, wide.shape[1] + 1):
        for columns in map(list, combinations(range(wide.shape[1]), n)):
            found = np.zeros(wide.shape[1])
            found[columns] = np.linalg.lstsq(wide[:, columns] / scale[columns], wanted, rcond=None)[0] / scale[columns]
            off = float(np.linalg.norm(wide @ found - wanted))
            if (found >= 0).all() and off < least:
                best, least = found, off
    return tuple(map(float, best))


@dataclass(frozen=True)
class Measured:
    """A measured speed-up.

    Attributes:
        requests: in flight.
        k: tokens a draft.
        a_step: tokens that a step yielded to a request.
        steps, plain_steps: of an answer after its first token, with speculation and without: the most, where all answers are
            begun together, for the slowest ends them.
        decoding, answers: the speed-up of decoding and that of whole answers (see `verdicts.speedups`).
    """

    requests: int
    k: int
    a_step: float
    steps: float
    plain_steps: float
    decoding: Mapping[str, Any]
    answers: Mapping[str, Any]


def compare(
    here: Setup, plain: Mapping[int, float], speculative: Mapping[int, float], measured: Iterable[Measured]
) -> list[dict[str, Any]]:
    """Predicted beside measured speed-ups.

    Args:
        here: see `fit`.
        plain: by requests, the seconds that they waited for the first token.
        speculative: the same with speculation.
        measured: what to hold predictions against.

    Returns:
        One row each: of decoding `predicted`, `measured`, `low`, `high` and `error`, as a share of the measured speed-up; with
        `answers_` before these keys, of whole answers.
    """
    rows = []
    for m in measured:
        decoding = here.speedup(m.requests, m.k, m.a_step)
        without = _wait(plain, m.requests) + m.plain_steps * here.step_s(m.requests)
        answers = without / (_wait(speculative, m.requests) + m.steps * here.step_s(m.requests, m.k))
        row: dict[str, Any] = {"requests": m.requests, "k": m.k, "a_step": m.a_step}
        for prefix, predicted, ratio in (("", decoding, m.decoding), ("answers_", answers, m.answers)):
            row |= {f"{prefix}predicted": predicted, f"{prefix}measured": ratio["ratio"]}
            row |= {f"{prefix}{end}": ratio[end] for end in ("low", "high")}
            row[f"{prefix}error"] = predicted / ratio["ratio"] - 1
        rows.append(row)
    return rows


def _wait(seconds: Mapping[int, float], requests: int) -> float:
    """Of so many requests: on the line through the timed waits."""
    import numpy as np

    if len(seconds) < 2:
        return next(iter(seconds.values()))
    slope, base = np.polyfit(list(seconds), list(seconds.values()), 1)
    return max(0.0, float(base + slope * requests))
