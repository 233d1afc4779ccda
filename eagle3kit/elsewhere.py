"""What speculation would buy on another machine: the speed-up model (`speedup`), asked by notebook 06.

On a machine with GPUs the question is about the run's own target there. On a CPU it is about what all this is for: Kimi-K2.5 on
a B300 machine, with a drafter of a published shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from eagle3kit import model_check, plan, target, widgets
from eagle3kit.params import Params
from eagle3kit.rundir import Run
from eagle3kit.speedup import CONTEXT, Curve, Hardware, Setup, all_reduce_kinds, hardware_presets

STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DEFAULT_CURVE = "MTBench, K2.5 drafter"
"""Where the run's own drafter is for another target: mixed questions, the least acceptance published for K2.5."""
_DRAFTER = "lightseekorg/kimi-k2.5-eagle3"
_AL = "AL "
"""Begins an acceptance that is chosen as a length, whatever k, and not as a curve."""


def machines(params: Params) -> dict[str, Hardware]:
    """The machines that the model can reckon with: every GPU preset, and those of `hardware_file`."""
    return {name: machine for name, machine in hardware_presets(params.hardware_file).items() if machine.is_gpu}


def setup(params: Params) -> Setup:
    """What the section is about: the run's target on its GPUs, or Kimi-K2.5 on 8 x B300 when the run is on a CPU.

    Raises:
        KitError: `hardware_file` is bad, or the target cannot be described.
    """
    found = machines(params)
    if params.hardware not in found:
        kimi = target.reference("kimi-k2.5")
        shape = model_check.published()["drafters"][_DRAFTER]["shape"]
        return Setup(kimi, found["b300"], 8, **model_check.drafting(kimi, shape))
    served, _ = target.describe(params.target_model, params.target_revision)
    return Setup(
        served,
        found[params.hardware],
        params.serve_tensor_parallel,
        context=min(CONTEXT, params.serve_max_model_len),
        dtype=params.target_dtype,
        **model_check.drafting(served, plan.drafter_shape(params, served)),
    )


def curves(run: Run) -> dict[str, Curve]:
    """Acceptance curves by name: the one measured in this run, if it was, and the published ones."""
    measured: list[float] = []
    while (share := run.fact(f"acceptance.conditional_{len(measured) + 1}")) is not None:
        measured.append(float(share))
    name = f"this run ({run.params.target_model})"
    return ({name: Curve(name, tuple(measured))} if measured else {}) | model_check.curves()


def default_curve(run: Run, there: Setup) -> Curve:
    """The run's own curve where it is about the same target, else `DEFAULT_CURVE`: acceptance does not move between targets."""
    found = curves(run)
    own = next(iter(found.values()))
    return own if own.name.startswith("this run") and there.hardware.name == run.params.hardware else found[DEFAULT_CURVE]


def rows(there: Setup, curve: Curve, k: int, streams: Sequence[int] = (1, 4, 16, 64, 256)) -> list[dict[str, Any]]:
    """By number of streams: speed-up at k and at the best k, and what it takes to break even; for a table.

    `fits` says whether the weights and the streams' KV cache fit in the GPUs' memory; what does not fit is reckoned all the same.
    """
    found = []
    for n in streams:
        best, gain = there.best_k(n, curve)
        needed = there.break_even_acceptance(n, k)
        found.append(
            {
                "requests in flight": n,
                "fits": there.fits(n),
                "tokens/s without, roughly": round(there.tokens_per_s(n)),
                f"speed-up, k = {k}": round(there.speedup(n, k, curve.al(k)), 2),
                "best k": best or "do not speculate",
                "speed-up there": round(gain, 2),
                f"AL to break even, k = {k}": round(there.break_even(n, k), 2),
                "acceptance of each position for it": "out of reach" if needed is None else f"{100 * needed:.0f} %",
            }
        )
    return found


def conclude(run: Run, there: Setup, curve: Curve) -> list[dict[str, Any]]:
    """`rows` at `eval_k`, with facts `model.<machine>.*` for one stream and sixteen."""
    k, name = run.params.eval_k, there.hardware.name
    facts: dict[str, tuple[Any, str]] = {}
    for n, suffix in ((1, ""), (16, ".streams_16")):
        facts[f"model.{name}.speedup{suffix}"] = (round(there.speedup(n, k, curve.al(k)), 3), "x")
        facts[f"model.{name}.break_even_al{suffix}"] = (round(there.break_even(n, k), 3), "tokens/forward")
        facts[f"model.{name}.best_k{suffix}"] = (there.best_k(n, curve)[0], "tokens")
    run.record_all(facts, f"reckoned, not measured: {title(there)}, k = {k}, AL {curve.al(k):.2f} ({curve.name})")
    return rows(there, curve, k)


def title(there: Setup) -> str:
    """The setup in words: target, machine, all-reduce."""
    kind = there.all_reduce or next(iter(all_reduce_kinds(there.hardware)), "none")
    return f"{there.target.name}, {there.gpus} x {there.hardware.label}, all-reduce {kind}"


def steps(there: Setup, k: int, streams: Sequence[int] = (1, 16)) -> dict[str, dict[str, float]]:
    """Seconds of a step by part, with and without speculation, for `plots.step_parts`."""
    return {
        f"{n} stream{'s' * (n > 1)}, {f'k = {drafted}' if drafted else 'no speculation'}": there.step(n, drafted)
        for n in streams
        for drafted in (0, k)
    }


def lines(run: Run, there: Setup, k: int) -> dict[str, list[tuple[int, float]]]:
    """Speed-up against the batch, a line for each acceptance curve, for `plots.speedup_by_batch`."""
    return {
        f"{name}: AL {curve.al(k):.2f}": [(n, there.speedup(n, k, curve.al(k))) for n in STREAMS]
        for name, curve in curves(run).items()
    }


def verdict_of(gain: float) -> str:
    """A reckoned speed-up in words: none where it is nearer to 1 than the model's median error may be."""
    if abs(math.log(gain)) <= math.log1p(model_check.MEDIAN_LIMIT):
        return "too near to 1 for the model to tell"
    return "faster" if gain > 1 else "slower: do not speculate"


def what_if(run: Run, there: Setup) -> None:
    """Controls over GPU, tensor parallel, streams, k, acceptance (curve or length), all-reduce; headless, a table of machines."""
    found = machines(run.params)
    known = curves(run)
    kinds = list(dict.fromkeys(kind for machine in found.values() for kind in all_reduce_kinds(machine)))
    k, curve = run.params.eval_k, default_curve(run, there)

    def answer(gpu: str, gpus: int, streams: int, k: int, acceptance: str, all_reduce: str) -> list[dict[str, Any]]:
        usual = all_reduce if all_reduce in all_reduce_kinds(found[gpu]) else ""
        made = replace(there, hardware=found[gpu], gpus=gpus, all_reduce=usual)
        al = known[acceptance].al(k) if acceptance in known else float(acceptance.removeprefix(_AL))
        other = "" if usual or all_reduce not in kinds else f" (it has no {all_reduce})"
        row = {"setup": title(made) + other, "fits": made.fits(streams), "streams": streams, "k": k, "AL": round(al, 2)}
        if al > k + 1:
            return [row | {"so": f"impossible: AL is at most {k + 1} at k = {k}"}]
        gain = made.speedup(streams, k, al)
        verdict = "does not fit" if made.fits(streams) is False else verdict_of(gain)
        return [row | {"speed-up": round(gain, 2), "AL to break even": round(made.break_even(streams, k), 2), "so": verdict}]

    def every() -> widgets.Shown:
        kinds_of = [(name, kind) for name, machine in found.items() for kind in all_reduce_kinds(machine)]
        made = [answer(name, there.gpus, n, k, curve.name, kind) for name, kind in kinds_of for n in (1, 16)]
        return widgets.as_table([row for rows in made for row in rows], caption=f"acceptance: {curve.name}")

    controls: Mapping[str, tuple[Sequence[Any], Any]] = {
        "gpu": (list(found), there.hardware.name),
        "gpus": ([1, 2, 4, 8], there.gpus if there.gpus in (1, 2, 4, 8) else 8),
        "streams": (list(STREAMS), 1),
        "k": (list(range(1, 9)), min(k, 8)),
        "acceptance": ([*known, *(f"{_AL}{1 + quarter / 4:g}" for quarter in range(1, 13))], curve.name),
        "all_reduce": (["the machine's usual one", *kinds], "the machine's usual one"),
    }
    widgets.controls(controls, lambda **chosen: widgets.as_table(answer(**chosen)), run.params.interactive, every)
