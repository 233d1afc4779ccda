"""The speed-up model held against published results: its constants are fitted here, and each result is predicted without itself.

`presets/published.json` has the rows with their sources, and says of each whether it is fitted on. `leave_one_out` predicts the
rows of a benchmark with constants that were fitted without that benchmark. `read_rows` reads rows of the same kind from a file
of the user: results that the kit has never seen, or setups to ask about.

Four constants and twenty rows: the fit is pulled towards values expected beforehand (`presets/speedup.json`), so that what the
rows do not determine stays sane. It minimises the sum of squares of log(predicted / published) / spread over the rows, and of
log(constant / expected) / spread over the constants.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from eagle3kit import plan, target
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.speedup import (
    CONTEXT,
    Constants,
    Curve,
    Hardware,
    Setup,
    all_reduce_kinds,
    check_al,
    constants,
    hardware_presets,
    positive,
    read_yaml,
    served_bytes,
    step_bytes,
)
from eagle3kit.target import PRESETS

MEDIAN_LIMIT, WORST_LIMIT = 0.10, 0.25
"""What the errors of `leave_one_out` may be at most, as shares of the published speed-up."""

NGRAM_K, NGRAM_LOST = 4, (0.09, 0.26)
"""Of the published n-gram result: the draft length that is assumed, which it does not give, and what was lost, which it does."""


@cache
def published() -> dict[str, Any]:
    """`presets/published.json`: drafters, acceptance curves, setups, and rows of results."""
    found: dict[str, Any] = json.loads((PRESETS / "published.json").read_text(encoding="utf-8"))
    return found


@cache
def _stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PRESETS / "speedup.json").read_text(encoding="utf-8"))
    return found


def curves() -> dict[str, Curve]:
    """The published acceptance curves by name."""
    return {
        name: Curve.from_lengths(name, c["lengths"]) if "lengths" in c else Curve.from_length(name, c["k"], c["al"])
        for name, c in published()["curves"].items()
    }


def drafting(of: target.Target, shape: Mapping[str, int]) -> dict[str, Any]:
    """The fields of a `Setup` that a drafter of this shape (`plan.drafter_shape`) gives it."""
    return {
        "drafter_bytes": plan.drafter_read_bytes(of, shape),
        "drafter_layers": shape["layers"],
        "drafter_kv_bytes": 4.0 * shape["layers"] * shape["kv_heads"] * shape["head_dim"],  # keys and values in bfloat16
    }


@cache
def setup(name: str) -> Setup:
    """A published setup, with the shipped constants."""
    return _read_setup(published()["setups"][name], f"published.json, {name}", hardware_presets())


# ---- rows


@dataclass(frozen=True)
class Row:
    """One number of a setup, published or asked for.

    Attributes:
        setup, name: what it is of.
        bench: what it was measured with; rows of one bench are left out together.
        what: `speed-up`, `tokens/s` or `all-reduce share`.
        streams, k, al: of the row; without speculation k is 0 and `al` 1.
        value: the published number; not a number (nan) where there is none to compare with.
        base: tokens a second without speculation; not a number where they are not published.
        fit: whether the constants are fitted on it.
    """

    setup: Setup
    name: str
    bench: str
    what: str
    streams: float
    k: float
    al: float
    value: float
    base: float
    fit: bool

    def predict(self, fitted: Constants | None = None) -> float:
        """The same number from the model; with the shipped constants by default."""
        made = replace(self.setup, constants=fitted)
        if self.what == "speed-up":
            return made.speedup(self.streams, self.k, self.al)
        if self.what == "tokens/s":
            return made.tokens_per_s(self.streams, self.k, self.al)
        return made.step(self.streams, self.k)["all-reduce"] / made.step_s(self.streams, self.k)


_SETUP_KEYS = ("target", "hardware", "gpus", "all_reduce", "drafter", "drafter_gpus", "context")
_ROW_KEYS = ("name", "bench", "what", "streams", "k", "al", "value", "base", "with")
_WHAT = ("speed-up", "tokens/s", "all-reduce share")
_SHAPE = ("heads", "kv_heads", "head_dim", "intermediate", "vocab", "layers", "aux")


@cache
def rows() -> tuple[Row, ...]:
    """Every published row, the speed-ups first."""
    machines, found = hardware_presets(), []
    for i, row in enumerate(published()["rows"], 1):
        given = {"name": row["setup"]} | published()["setups"][row["setup"]] | row
        unread = {"assumed", "setup", "fit", *({"al"} - set(row) if not row.get("k") else ())}
        given = {key: value for key, value in given.items() if key not in unread}
        found.append(replace(_read_row(given, f"published.json, row {i}", machines), fit=row["fit"]))
    return tuple(found)


def read_rows(file: Path, hardware_file: str = "") -> list[Row]:
    """Rows from a file of YAML or JSON, a list of mappings.

    Each has `target` (a name that ships with the kit, a folder, or a hub id), `hardware`, `gpus`, `streams`, `k` and `al`; what
    was measured as `value` (a speed-up), or as `base` and `with` (tokens/s), or nothing; and where it is known `all_reduce`,
    `drafter` (a name in `presets/published.json`, a mapping of a shape's numbers, or `none` for n-gram; without it, the shape
    that the kit gives a drafter of this target), `drafter_gpus`, `context`, `name`, `bench`, and `what` where `value` is no
    speed-up but `tokens/s` or an `all-reduce share`.

    Raises:
        KitError: it cannot be read, or a row is bad; file, number and key are named.
    """
    given = read_yaml(file.expanduser(), "the file of rows", "name a file of YAML or JSON")
    if not isinstance(given, list) or not given:
        raise KitError(f"{file} has no list of rows", seen=type(given).__name__, wanted="- target: ...")
    machines = {name: machine for name, machine in hardware_presets(hardware_file).items() if machine.is_gpu}
    return [_read_row(row, f"{file}, row {i}", machines) for i, row in enumerate(given, 1)]


def _read_row(given: Any, where: str, machines: Mapping[str, Hardware]) -> Row:
    if not isinstance(given, Mapping):
        raise KitError(f"{where} is no mapping", seen=given, wanted="target: ..., hardware: ..., and so on")
    for key in given:
        if key not in (*_SETUP_KEYS, *_ROW_KEYS):
            raise KitError(f"{where} has an unknown key", seen=key, wanted=", ".join((*_SETUP_KEYS, *_ROW_KEYS)))
    made = _read_setup(given, where, machines)
    name = str(given.get("name") or f"{made.target.name}, {made.gpus} x {made.hardware.name}")
    what = given.get("what", "speed-up")
    if what not in _WHAT:
        raise KitError(f"{where}: what is none that the model gives", seen=what, wanted=", ".join(_WHAT))
    streams = positive(given.get("streams"), f"{where}: streams")
    k = 0.0 if given.get("k", None if what == "speed-up" else 0) == 0 else positive(given.get("k"), f"{where}: k")
    if k and given.get("al") is None:
        raise KitError(f"{where}: al is missing", wanted=f"the acceptance length at k = {k:g}, 1 to {k + 1:g}")
    al = 1.0 if given.get("al") is None else positive(given["al"], f"{where}: al")
    with _reading(where, "al"):
        check_al(al, k)
    value, base = math.nan, math.nan
    if "base" in given or "with" in given:
        if "value" in given or what != "speed-up":
            raise KitError(f"{where}: base and with are of a speed-up, which needs no value beside them", seen=", ".join(given))
        base = positive(given.get("base"), f"{where}: base")
        value = positive(given.get("with"), f"{where}: with") / base
    elif "value" in given:
        value = positive(given["value"], f"{where}: value")
    return Row(made, name, str(given.get("bench") or ""), what, streams, k, al, value, base, fit=False)


def _read_setup(given: Mapping[str, Any], where: str, machines: Mapping[str, Hardware]) -> Setup:
    name, machine = given.get("target"), given.get("hardware")
    machine = str(machine) if isinstance(machine, int) else machine  # YAML reads the name 4090 as a number
    if not isinstance(name, str) or not name:
        raise KitError(f"{where}: target is missing", seen=name, wanted=f"{', '.join(target.NAMES)}, a folder or a hub id")
    if not isinstance(machine, str) or machine not in machines:
        raise KitError(
            f"{where}: hardware is not known", seen=machine, wanted=", ".join(machines), fix="add it with --hardware-file"
        )
    with _reading(where, "target"):
        served = target.reference(name) if name in target.HUB_IDS else target.describe(name)[0]
        served_bytes(served, "auto")  # a number type that is not known is this row's error, not the prediction's
    gpus = _whole(given.get("gpus"), f"{where}: gpus")
    kinds = all_reduce_kinds(machines[machine])
    if (kind := given.get("all_reduce") or "") not in ("", *kinds):
        raise KitError(f"{where}: all_reduce is not known of {machine}", seen=kind, wanted=", ".join(kinds))
    context = given.get("context", CONTEXT)
    if context != 0:
        context = _whole(context, f"{where}: context")
    made = Setup(served, machines[machine], gpus, kind, context=context)
    if (drafter_gpus := _whole(given.get("drafter_gpus", 1), f"{where}: drafter_gpus")) > gpus:
        raise KitError(f"{where}: drafter_gpus is more than gpus", seen=drafter_gpus, wanted=f"1 to {gpus}")
    if (drafter := given.get("drafter", True)) in (None, "", "none"):
        return made
    with _reading(where, "drafter"):
        return replace(made, drafter_gpus=drafter_gpus, **drafting(served, _read_shape(drafter, served)))


def _read_shape(given: Any, of: target.Target) -> Mapping[str, int]:
    """A drafter's shape: named, given, or (True) the one that the kit gives a drafter of this target."""
    known = published()["drafters"]
    if given is True:
        return plan.drafter_shape(Params(), of)
    if isinstance(given, Mapping):
        if set(given) != set(_SHAPE):
            raise KitError("a shape has other numbers", seen=", ".join(map(str, given)), wanted=", ".join(_SHAPE))
        return {key: _whole(given[key], key) for key in _SHAPE}
    if not isinstance(given, str) or given not in known:
        raise KitError("it is not known", seen=given, wanted=f"{', '.join(known)}, none, or {{{', '.join(_SHAPE)}}}")
    shape: Mapping[str, int] = known[given]["shape"]
    return shape


def _whole(given: Any, what: str) -> int:
    if positive(given, what) != int(given):
        raise KitError(f"{what} is no whole number", seen=given)
    return int(given)


@contextmanager
def _reading(where: str, key: str) -> Iterator[None]:
    """Say of an error which row and key it is about."""
    try:
        yield
    except KitError as error:
        raise KitError(f"{where}: {key}: {error.what}", seen=error.seen, wanted=error.wanted, fix=error.fix) from None


def as_rows(predicted: Iterable[tuple[Row, float]]) -> list[dict[str, Any]]:
    """Rows with their predictions, for a table; what is not published is left empty."""
    return [
        {
            "setup": row.name,
            "benchmark": row.bench,
            "streams": row.streams,
            "k": row.k,
            "AL": row.al,
            "what": row.what,
            "published": "" if math.isnan(row.value) else _few(row.value),
            "predicted": _few(found),
            "error": "" if math.isnan(row.value) else f"{100 * (found / row.value - 1):+.1f} %",
            "fits": row.setup.fits(row.streams),
        }
        for row, found in predicted
    ]


def _few(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


# ---- fit


def fit(on: Iterable[Row] | None = None) -> Constants:
    """The constants, fitted on those of the rows that are marked for it; by default on all that are published.

    Gauss-Newton over the logarithms of the constants, from the expected values; derivatives by differences. Ten rounds are more
    than it takes.
    """
    import numpy as np

    expected, spreads = _stored()["expected"], _stored()["spread"]
    start = np.log([e["value"] for e in expected.values()])
    used = [row for row in (rows() if on is None else on) if row.fit]

    def off(x: Any) -> Any:
        made = Constants(**dict(zip(expected, map(float, np.exp(x)), strict=True)))
        misses = [math.log(row.predict(made) / row.value) / spreads[row.what] for row in used]
        return np.concatenate([misses, (x - start) / [e["spread"] for e in expected.values()]])

    x, step = start, 1e-5
    for _ in range(10):
        here = off(x)
        slopes = np.stack([(off(x + step * unit) - here) / step for unit in np.eye(len(x))], axis=1)
        x = x - np.linalg.lstsq(slopes, here, rcond=None)[0]
    return Constants(**{name: float(f"{math.exp(value):.4g}") for name, value in zip(expected, x, strict=True)})


def fits_without(by: str = "bench", of: Sequence[Row] | None = None) -> dict[str, Constants]:
    """Constants by what was left out of their fit: each `bench`, or each `name` of a setup."""
    known = rows() if of is None else of
    return {left: fit(row for row in known if getattr(row, by) != left) for left in dict.fromkeys(getattr(r, by) for r in known)}


def predict_left_out(by: str = "bench", of: Sequence[Row] | None = None) -> list[tuple[Row, float]]:
    """Each speed-up of the rows, by default the published, and its prediction by `fits_without` its benchmark or setup."""
    fitted = fits_without(by, of)
    return [(r, r.predict(fitted[getattr(r, by)])) for r in (rows() if of is None else of) if r.what == "speed-up"]


@cache
def leave_one_out(by: str = "bench") -> tuple[tuple[Row, float], ...]:
    """`predict_left_out` of the published rows."""
    return tuple(predict_left_out(by))


def errors(predicted: Iterable[tuple[Row, float]] | None = None) -> tuple[float, float]:
    """Median and worst absolute error, by default of `leave_one_out`, as shares of what is published."""
    found = [abs(value / row.value - 1) for row, value in (leave_one_out() if predicted is None else predicted)]
    return statistics.median(found), max(found)


# ---- numbers that are set by hand


def _nvlink(setup: Setup, latency: float) -> Setup:
    tables = {
        kind: {**table, "alpha_us": latency} if kind == "nvlink" else table for kind, table in setup.hardware.all_reduce.items()
    }
    return replace(setup, hardware=replace(setup.hardware, all_reduce=tables))


VARIANTS: tuple[tuple[str, str, Callable[[Setup], Setup]], ...] = (
    ("as it is", "", lambda s: s),
    ("COMPUTE_SHARE, share of the peak that experts' products reach", "0.15", lambda s: replace(s, compute_share=0.15)),
    ("", "0.5", lambda s: replace(s, compute_share=0.5)),
    ("DENSE_SHARE, that of other products", "0.3", lambda s: replace(s, dense_share=0.3)),
    ("", "0.9", lambda s: replace(s, dense_share=0.9)),
    ("arithmetic beside reading", "after it", lambda s: replace(s, overlap=False)),
    ("CONTEXT, tokens of a stream", "0", lambda s: replace(s, context=0)),
    ("", "4,000", lambda s: replace(s, context=4000)),
    ("DRAFTER_LAUNCHES, layers' worth beside its own", "0", lambda s: replace(s, drafter_launches=0)),
    ("", "3", lambda s: replace(s, drafter_launches=3)),
    ("NVLink's latency, microseconds", "6", lambda s: _nvlink(s, 6)),
    ("", "24", lambda s: _nvlink(s, 24)),
    ("the drafter's KV cache", "not read", lambda s: replace(s, drafter_kv_bytes=0)),
    ("drafter_gpus: the drafter, spread over all GPUs, is read", "by all", lambda s: replace(s, drafter_gpus=s.gpus)),
    ("the drafter on one GPU", "no all-reduces", lambda s: replace(s, drafter_all_reduces=0)),
)
"""What could have been set otherwise: of which number, to what, and the setup that has it so."""

_ASKED = (16, 3, 2.687)
"""Streams, k and AL of the speed-up of Kimi-K2.5 on 8 x B300 that `variants` compares: what this is all for."""


@cache
def variants() -> tuple[dict[str, Any], ...]:
    """Errors with each hand-set number as it is and at other values, the constants fitted anew; rows for a table."""
    asked = replace(setup("TorchSpec"), hardware=hardware_presets()["b300"])
    found = []
    for what, value, change in VARIANTS:
        of = [replace(row, setup=change(row.setup)) for row in rows()]
        by = {left: errors(predict_left_out(left, of)) for left in ("bench", "name")}
        gain = replace(change(asked), constants=fit(of)).speedup(*_ASKED)
        found.append(
            {"number": what, "set to": value}
            | {"median error": f"{100 * by['bench'][0]:.1f} %", "worst": f"{100 * by['bench'][1]:.1f} %"}
            | {"median, setup left out": f"{100 * by['name'][0]:.1f} %", "worst, setup left out": f"{100 * by['name'][1]:.1f} %"}
            | {f"speed-up on B300, {_ASKED[0]} streams": f"{gain:.2f}"}
        )
    return tuple(found)


# ---- what is known of these machines besides


def claims() -> list[dict[str, str]]:
    """What the model must reproduce besides the ratios; rows `{"name", "state", "found", "wanted"}` for a check list."""
    pcie = setup("RTX PRO 6000")
    read = step_bytes(pcie.target, 1) / 1e9
    share = pcie.step(1)["all-reduce"] / pcie.step_s(1)
    batches = [2**i for i in range(13)]
    gains = [pcie.speedup(streams, 3, rows_al("RTX PRO 6000")) for streams in batches]
    ends = next((streams for streams, gain in zip(batches, gains, strict=True) if gain < 1), None)
    crowded = ends is not None and pcie.fits(ends) is False
    room = f" (they fit only with less than {pcie.context:,} tokens of context each)" if crowded else ""
    return [
        _claim("weights read by a batch-1 step", 32 <= read <= 34, f"{read:.1f} GB", "about 33 GB"),
        _claim(
            "all-reduce share of decode, untuned NCCL",
            0.45 <= share <= 0.58,
            f"{100 * share:.1f} % on 8 x RTX PRO 6000, one stream",
            "51.5 %, about half",
        ),
        _ngram_claim(),
        _claim(
            "EAGLE-3 loses at a high batch on PCIe",
            ends is not None,
            f"from {max(gains):.2f} x with {batches[gains.index(max(gains))]} in flight to below 1 with {ends}{room}",
            "a gain that ends",
        ),
    ]


NGRAM_LOADS = (1, 2, 4, 8, 16, 32, 64)


def ngram(share: float) -> tuple[list[float], tuple[float, float] | None]:
    """N-gram speculation on 8 x RTX PRO 6000 that finds a draft on this share of a stream's steps, else drafts nothing.

    Returns:
        What is lost at each of `NGRAM_LOADS` when no draft is accepted, as shares of the speed without; and from which AL to
        which the loss is as published, `NGRAM_LOST`, at all of them, None where at no AL.
    """
    drafted = share * NGRAM_K
    there = replace(setup("RTX PRO 6000"), drafter_bytes=0.0)
    needed = [there.break_even(streams, drafted) for streams in NGRAM_LOADS]
    least, most = NGRAM_LOST
    low, high = max(1.0, (1 - most) * max(needed)), min(1 + drafted, (1 - least) * min(needed))
    return [1 - 1 / al for al in needed], (low, high) if low <= high else None


def _ngram_claim() -> dict[str, str]:
    """Whether any n-gram speculation loses what was published, at every load: neither the load, nor k, nor AL was."""
    als = {share: found for share in (i / 100 for i in range(1, 101)) if (found := ngram(share)[1])}
    wanted = "9 to 26 % slower (published without load, k and AL)"
    if not als:
        return _claim("n-gram loses on 8 x RTX PRO 6000", False, "at no share of steps and AL as much as published", wanted)
    lost, _ = ngram(1.0)
    return _claim(
        "n-gram loses on 8 x RTX PRO 6000",
        True,
        f"9 to 26 % at every load of 1 to 64 only where {100 * min(als):.0f} to {100 * max(als):.0f} % of the steps draft, "
        f"{NGRAM_K} tokens, "
        f"and AL is {min(low for low, _ in als.values()):.2f} to {max(high for _, high in als.values()):.2f}, hardly a draft "
        f"accepted; were every step to draft in vain, {100 * min(lost):.0f} to {100 * max(lost):.0f} %",
        wanted,
    )


def checks() -> list[dict[str, str]]:
    """Everything the model must hold: its errors, and `claims`."""
    median, worst = errors()
    return [
        _claim(
            "median error, each benchmark left out",
            median <= MEDIAN_LIMIT,
            f"{100 * median:.1f} %",
            f"at most {100 * MEDIAN_LIMIT:.0f} %",
        ),
        _claim(
            "worst error, each benchmark left out",
            worst <= WORST_LIMIT,
            f"{100 * worst:.1f} %",
            f"at most {100 * WORST_LIMIT:.0f} %",
        ),
        *claims(),
    ]


def rows_al(name: str) -> float:
    """The AL assumed for a setup whose rows have none."""
    return float(published()["setups"][name]["al"])


def _claim(name: str, holds: bool, found: str, wanted: str) -> dict[str, str]:
    return {"name": name, "state": "ok" if holds else "fail", "found": found, "wanted": wanted}


# ---- the page


def build(reports_dir: Path | str) -> Path:
    """Write `model_check.html`: errors, rows, constants and assumptions.

    Raises:
        KitError: the disk is full.
    """
    from eagle3kit import page, plots
    from eagle3kit.rundir import write_atomic
    from eagle3kit.widgets import as_check_list, as_picture, as_table, tag

    left_out = [asdict(made) for made in fits_without().values()]
    drawn = plots.predictions([(row.bench, row.value, predicted) for row, predicted in leave_one_out()])
    known = published()
    body = [
        tag("h1", "The speed-up model against published results"),
        tag(
            "p",
            "Each row is predicted by constants that were fitted without any row of its benchmark. The form of the model was "
            "chosen with these rows in view, so their errors are smaller than those of results not yet looked at will be.",
        ),
        as_check_list(checks()).html,
        tag("h2", "Rows"),
        as_table([{k: v for k, v in row.items() if k not in ("what", "fits")} for row in as_rows(leave_one_out())]).html,
        as_picture(plots.png(drawn), "Predicted against published speed-up.", "points near the diagonal").html,
        tag("h2", "A machine left out"),
        tag(
            "p",
            "A machine that is new to the model is more than a benchmark that is: here each row is predicted by constants that "
            "were fitted without any row of its setup.",
        ),
        as_table(_by_setup()).html,
        tag("h2", "Tokens a second: ratios only"),
        tag(
            "p",
            f"The model is one of ratios. Its tokens a second are off by up to a factor of {_worst_factor():.1f}: what it leaves "
            "out, such as prefill, queueing and the tail of a run, is on both sides of a ratio. Plan nothing on them.",
        ),
        as_table([{k: v for k, v in row.items() if k not in ("what", "fits")} for row in as_rows(rates())]).html,
        tag("h2", "Constants"),
        as_table([_constant(name, asdict(constants())[name], left_out) for name in _stored()["expected"]]).html,
        tag("h2", "What is assumed"),
        tag("ul", *(tag("li", f"{name}: {given['assumed']}.") for name, given in known["setups"].items())),
        tag("ul", *(tag("li", f"{name}: {given['note']}.") for name, given in known["drafters"].items())),
        tag("ul", *(tag("li", text) for text in _NOT_MODELLED)),
        tag("h2", "If a number that is set by hand were another"),
        tag(
            "p",
            "The four constants are fitted anew in each row; errors with each benchmark, and with each setup, left out. The last "
            "rows compare what a drafter's pass may take. It is spread over the GPUs like the target, with two all-reduces a "
            "layer, but read as slowly as by one of them: that has about the errors of a drafter on one GPU without all-reduces, "
            "and far smaller ones than a drafter that all GPUs read together.",
        ),
        as_table(variants()).html,
        tag("h2", "If the acceptance length that is not published were another"),
        as_table(_sensitivity()).html,
        tag("h2", "What n-gram speculation loses"),
        tag(
            "p",
            "On 8 x RTX PRO 6000 it was 9 to 26 % slower; load, k and AL are not published. It drafts only where it finds what "
            f"it saw before: by the share of a stream's steps that draft, {NGRAM_K} tokens each, this is what is lost at 1 to 64 "
            "streams if no draft is accepted, and at which AL the loss is 9 to 26 % at all those loads. What a speculative step "
            "takes for verification is charged on every step, since each looks for a draft.",
        ),
        as_table([_ngram_row(share) for share in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.6, 0.8, 1.0)]).html,
    ]
    about = {"compare": True, "run": "the speed-up model, checked"}
    html = page.whole_page("The speed-up model against published results", body, about)
    return write_atomic(Path(reports_dir) / "model_check.html", html)


_NOT_MODELLED = (
    "Benchmarks differ in the model by their acceptance only. Prompt lengths, prefill and the tail of a run, when fewer requests "
    "are left than the batch, are not modelled: gsm8k, the slowest here without speculation too, gains less than predicted.",
    "The drafter's weights are read at the speed of one GPU, whatever the tensor parallelism (drafter_gpus sets another).",
    "NVLink's latency is assumed, 12 microseconds an all-reduce. Untuned NCCL is measured at one size.",
    "Expert weights are read at the same share of the bandwidth as dense ones. Products of fp8 weights cost half of what bf16 "
    "ones do, of other quantised weights the same. Shares of the peak (COMPUTE_SHARE, DENSE_SHARE) are assumed.",
)


def _by_setup() -> list[dict[str, Any]]:
    found = []
    for name in published()["setups"]:
        without_bench, without_setup = (
            errors(pair for pair in leave_one_out(by) if pair[0].name == name) for by in ("bench", "name")
        )
        found.append(
            {"setup": name, "speed-ups": sum(row.name == name for row, _ in leave_one_out())}
            | {"median error, benchmark left out": f"{100 * without_bench[0]:.1f} %", "worst": f"{100 * without_bench[1]:.1f} %"}
            | {
                "median error, setup left out": f"{100 * without_setup[0]:.1f} %",
                "worst, setup left out": f"{100 * without_setup[1]:.1f} %",
            }
        )
    return found


@cache
def rates() -> tuple[tuple[Row, float], ...]:
    """Published tokens a second, without and with speculation, and their predictions by `fits_without` their benchmark."""
    known: dict[tuple[Any, ...], Row] = {}
    for row in rows():
        if not math.isnan(row.base):
            plain = replace(row, what="tokens/s", k=0, al=1.0, value=row.base)
            for each in (plain, replace(row, what="tokens/s", value=row.value * row.base)):
                known[each.bench, each.streams, each.k] = each
    fitted = fits_without()
    return tuple((row, row.predict(fitted[row.bench])) for row in known.values())


def _worst_factor() -> float:
    return max(max(found / row.value, row.value / found) for row, found in rates())


def _ngram_row(share: float) -> dict[str, Any]:
    lost, als = ngram(share)
    return {
        "steps that draft": f"{100 * share:.0f} %",
        "lost, none accepted": f"{100 * min(lost):.0f} to {100 * max(lost):.0f} %",
        "AL for 9 to 26 %": f"{als[0]:.2f} to {als[1]:.2f}" if als else "none",
    }


def _constant(name: str, value: float, left_out: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    expected = _stored()["expected"][name]
    found = [made[name] for made in left_out]
    return {
        "constant": name,
        "fitted": value,
        "with one benchmark left out": f"{min(found):.3g} to {max(found):.3g}",
        "expected": expected["value"],
        "why": expected["why"],
    }


def _sensitivity() -> list[dict[str, Any]]:
    """Median and worst error over the rows whose AL is assumed, at other ALs; the constants as shipped."""
    unknown = [row for row in rows() if row.what == "speed-up" and "al" in published()["setups"][row.name]]
    found: list[dict[str, Any]] = []
    for name, curve in curves().items():
        al = curve.al(3)
        off = [abs(replace(row, al=al).predict(constants()) / row.value - 1) for row in unknown]
        found.append(
            {
                "AL at k = 3": round(al, 3),
                "of": name,
                "median error": f"{100 * statistics.median(off):.0f} %",
                "worst": f"{100 * max(off):.0f} %",
            }
        )
    return sorted(found, key=lambda row: float(row["AL at k = 3"]))
