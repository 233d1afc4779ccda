"""Pictures of a run: each maker takes the plain data of one file and returns a figure; `save` puts it where the report looks.

    figures/<NN>_<name>.png     the picture, at most about 800 pixels wide
    figures/<NN>_<name>.json    {"caption", "alt"}

Nothing here uses `pyplot`: no global state, no window, nothing to close, and it draws the same in JupyterLab, in papermill and
in a test. matplotlib is imported only when something is drawn. The colours are Okabe and Ito's, which people with any of the
common colour-vision deficiencies tell apart (https://jfly.uni-koeln.de/color/); no difference is told by colour alone.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import layers
from eagle3kit.errors import KitError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from eagle3kit.rundir import Run
    from eagle3kit.target import Target

BLUE, ORANGE, GREEN, RED, SKY, PINK, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#6F6F6F"
STEPS = (BLUE, ORANGE, GREEN, PINK, RED, SKY, GREY)
"""Colours of TTT steps and positions, first to last."""
CONTESTANTS = {"none": GREY, "ngram": ORANGE, "eagle3": BLUE}
CONTESTANT_NAMES = {"none": "no speculation", "ngram": "n-gram", "eagle3": "EAGLE-3"}

WIDTH_IN = 7.4
DPI = 105
"""7.4 inches at 105 dots: 777 pixels, what a page 800 pixels wide shows without scaling."""


@contextmanager
def style() -> Iterator[None]:
    """The look of every picture of the kit, for the length of a `with` block."""
    import matplotlib

    look = {
        "font.family": "DejaVu Sans",
        "font.size": 10.5,
        "axes.titlesize": 11.5,
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#555555",
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#E3E3E3",
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "legend.fontsize": 9.5,
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "lines.linewidth": 1.8,
        "hatch.linewidth": 0.6,
        "svg.hashsalt": "eagle3kit",
    }
    with matplotlib.rc_context(look):
        yield


def _figure(height_in: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure with `columns` axes side by side. Call inside `style()`."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout=layout)
    return figure, [figure.add_subplot(1, columns, i + 1) for i in range(columns)]


def _nothing(what: str) -> Figure:
    """A figure that says there is nothing to draw: a missing picture would look like a forgotten one."""
    with style():
        figure, (axes,) = _figure(1.2)
        axes.axis("off")
        axes.text(0.5, 0.5, f"nothing to draw: {what}", ha="center", va="center", color="#555555", transform=axes.transAxes)
    return figure


def _finite(value: Any) -> float | None:
    """The value as a float, or None when it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _numbers(values: Any) -> list[float]:
    """The finite numbers of a list."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return []
    return [number for number in map(_finite, values) if number is not None]


def _rows(value: Any) -> list[Mapping[str, Any]]:
    """The mappings of a list."""
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, Sequence) else []


def _above(axes: Axes, bars: Any, texts: Sequence[str]) -> None:
    """Write each bar's value above it."""
    axes.bar_label(bars, labels=list(texts), padding=2, fontsize=9, color="#222222")


def _percent(axes: Axes, *, label: str, top: float = 1.0) -> None:
    """A vertical axis of shares from 0 to `top`, labelled in per cent."""
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.set_ylim(0, top)
    axes.set_ylabel(label)


def _legend_below(axes: Axes, down: float = 0.1, columns: int = 3) -> None:
    """A legend under the axes, where it hides nothing."""
    look = {"ncols": columns, "columnspacing": 1.2, "handlelength": 1.6, "borderaxespad": 0.0}
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -down), **look)


def _legend_above(axes: Axes) -> None:
    """A legend at the right end of the title's line."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, columnspacing=1.2, handlelength=1.6, borderaxespad=0.3)


def layer_figure(target: Target, ids: Sequence[int]) -> Figure:
    """Where the auxiliary layers lie in the target: between two layers, and what each system calls that place.

    Args:
        target: the target.
        ids: auxiliary layers in vLLM's numbers.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    n, ids = target.n_layers, layers.check(ids, target.n_layers)
    points = (*ids, n)
    with style():
        figure = Figure(figsize=(WIDTH_IN, 4.3), dpi=DPI)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(0, 100)
        axes.set_ylim(1, 60)
        axes.axis("off")

        def box(x: float, y: float, width: float, label: str, colour: str, height: float = 6.5) -> None:
            style = "round,pad=0,rounding_size=1"
            axes.add_patch(FancyBboxPatch((x, y), width, height, style, facecolor=colour, edgecolor="#555555", linewidth=0.9))
            axes.text(x + width / 2, y + height / 2, label, ha="center", va="center", fontsize=8.2, linespacing=1.15)

        def arrow(x: float, y: float, to_x: float, to_y: float, colour: str = "#555555") -> None:
            look = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (to_x, to_y), (x, y), arrowprops=look)

        top, pale, light, green = 44.0, "#F4F4F4", "#D9E9F5", "#E5F3EC"
        axes.text(2, 56, f"The target, {target.name}: {n} layers, residual stream {target.hidden_size:,} wide", fontsize=11.5)
        box(2, top, 8, "embed", pale)
        # Each point is drawn between the layer before it and the layer after it; the layers between two points are left out.
        places, x = {}, 10.0
        for i in points:
            axes.text(x + 2.0, top + 3.2, "…", ha="center", va="center", fontsize=12)
            box(x + 4.0, top, 7.2, f"layer\n{i - 1}", pale)
            places[i] = x + 13.0
            axes.plot([x + 11.2, x + 14.8], [top + 3.25] * 2, color="#555555", linewidth=1.3)
            axes.plot([places[i]], [top + 3.25], marker="o", color=GREEN if i == n else BLUE, markersize=6.5, zorder=3)
            box(x + 14.8, top, 7.2, f"layer\n{i}" if i < n else "norm,\nhead", pale if i < n else green)
            x += 88.0 / len(points)
        for i in points:
            colour = GREEN if i == n else BLUE
            rows = [f"vLLM {i}", f"SGLang {i - 1}", f"hidden_states[{i}]" if i < n else "hidden_states: none"]
            axes.text(places[i], top - 1.5, "\n".join(rows), ha="center", va="top", fontsize=8, color=colour, linespacing=1.35)
        down, bend, middle = top - 10.5, 28.0, (places[ids[0]] + places[ids[-1]]) / 2
        for i in ids:
            axes.plot([places[i]] * 2, [down, bend], color=BLUE, linewidth=1.3)
        axes.plot([places[ids[0]], places[ids[-1]]], [bend] * 2, color=BLUE, linewidth=1.3)
        arrow(middle, bend, middle, 23.5, BLUE)
        box(middle - 13, 17.0, 26, f"fc: {len(ids) * target.hidden_size:,} to {target.hidden_size:,}", light)
        arrow(middle, 17.0, middle, 11.0)
        box(middle - 13, 4.5, 26, "the drafter's layer", light)
        box(2, 4.5, 16, "embedding of\nthe next token", pale)
        arrow(18, 7.75, middle - 13, 7.75)
        box(middle + 20, 4.5, 14, "lm_head\n(draft rows)", light)
        arrow(middle + 13, 7.75, middle + 20, 7.75)
        arrow(places[n], down, places[n], 22.5, GREEN)
        words = "through norm\nand lm_head: what\nthe drafter learns\nto predict"
        axes.text(places[n], 21.5, words, ha="center", va="top", fontsize=8.6, color=GREEN)
    return figure


def layer_statistics(statistics: Mapping[str, Any]) -> Figure:
    """Size of the hidden states of every extracted layer.

    Args:
        statistics: `hidden_states/statistics.json`: `{"layers": [{"id", "slot", "mean", "std", "norm_mean", "abs_max"}]}`, in the
            model's own activation units.
    """
    layers = _rows(statistics.get("layers"))
    if not layers:
        return _nothing("no layer statistics")
    names = [f"layer {layer.get('id')}\nslot {layer.get('slot')}" for layer in layers]
    places = range(len(layers))
    with style():
        figure, (left, right) = _figure(3.1, 2)
        norms = [_finite(layer.get("norm_mean")) or 0.0 for layer in layers]
        _above(left, left.bar(places, norms, width=0.62, color=BLUE), [f"{norm:.3g}" for norm in norms])
        left.set_title("Mean length of a hidden state")
        left.set_ylabel("L2 norm")
        left.margins(y=0.14)
        for key, name, colour, marker in (
            ("abs_max", "largest |value|", RED, "^"),
            ("std", "standard deviation", BLUE, "o"),
            ("mean", "|mean|", GREEN, "s"),
        ):
            points = [(i, abs(_finite(layer.get(key)) or 0.0)) for i, layer in enumerate(layers)]
            points = [(i, value) for i, value in points if value > 0]
            if points:
                right.plot(*zip(*points, strict=True), marker=marker, color=colour, label=name, markersize=6)
        if right.lines:
            right.set_yscale("log")
            _legend_below(right, 0.28, columns=2)
        right.set_title("Spread of its values (log)")
        right.set_ylabel("activation")
        right.margins(x=0.12, y=0.12)
        for axes in (left, right):
            axes.set_xticks(list(places), names)
            axes.grid(False, axis="x")
    return figure


def golden_scores(golden: Mapping[str, Any]) -> Figure:
    """The golden check: the last layer's slot against every other slot, as if it had been stored there.

    The right slot must stand apart from the others in both panels. Where it does not, the check proves nothing.

    Args:
        golden: `hidden_states/golden.json`: `{"top1", "mae", "positions", "slots": [{"id", "top1", "mae"}]}`; top1 is a share of
            positions, mae the mean absolute difference of log-probabilities in nats.
    """
    slots = _rows(golden.get("slots"))
    if not slots:
        return _nothing("no golden check")
    right_slot = max(range(len(slots)), key=lambda i: _finite(slots[i].get("id")) or 0.0)
    names = [f"layer {slot.get('id')}" + ("\n(right)" if i == right_slot else "") for i, slot in enumerate(slots)]
    colours = [BLUE if i == right_slot else GREY for i in range(len(slots))]
    hatches = ["" if i == right_slot else "///" for i in range(len(slots))]
    places = range(len(slots))
    with style():
        figure, (left, right) = _figure(2.9, 2)
        shares = [_finite(slot.get("top1")) or 0.0 for slot in slots]
        bars = left.bar(places, shares, width=0.62, color=colours, hatch=hatches, edgecolor="white")
        _above(left, bars, [f"{100 * share:.1f} %" for share in shares])
        left.set_title("Same most likely token")
        _percent(left, label="share of positions", top=1.12)
        left.set_yticks([0, 0.25, 0.5, 0.75, 1])
        errors = [_finite(slot.get("mae")) for slot in slots]
        positive = [error for error in errors if error is not None and error > 0]
        floor = min(positive, default=1e-6) / 3
        heights = [error if error is not None and error > 0 else floor for error in errors]
        bars = right.bar(places, heights, width=0.62, color=colours, hatch=hatches, edgecolor="white")
        _above(right, bars, ["unknown" if error is None else f"{error:.2g}" for error in errors])
        right.set_yscale("log")
        right.set_ylim(floor / 2, max(heights) * 12)
        right.set_title("Mean error of log-probability (log)")
        right.set_ylabel("nats")
        for axes in (left, right):
            axes.set_xticks(list(places), names)
            axes.grid(False, axis="x")
    return figure


def layer_errors(result: Mapping[str, Any]) -> Figure:
    """Each extracted slot against every layer of the target: a line a slot, which must dip at its own layer and nowhere else.

    Args:
        result: `cross_check/layers.json`: `{"layers": [id of each slot], "errors": [slots][layers], "positions"}`, relative
            errors; or `{"reason"}` where transformers could not run the target too.
    """
    ids, errors = result.get("layers"), result.get("errors")
    lines: list[tuple[int, int, dict[int, float]]] = []  # slot, its layer, error by layer
    if isinstance(ids, Sequence) and isinstance(errors, Sequence):
        for slot, (layer, row) in enumerate(zip(ids, errors, strict=False)):
            points = {at: max(n, 1e-9) for at, value in enumerate(row) if (n := _finite(value)) is not None} if row else {}
            if layer in points:
                lines.append((slot, layer, points))
    if not lines:
        return _nothing(str(result.get("reason") or "no comparison with transformers"))
    with style():
        figure, (axes,) = _figure(3.3)
        for slot, layer, points in lines:
            colour = STEPS[slot % len(STEPS)]
            axes.plot(list(points), list(points.values()), color=colour, linewidth=1.2)
            label = f"slot {slot}, layer {layer}: {points[layer]:.1e}"
            axes.plot(layer, points[layer], "o", color=colour, markersize=7, label=label)
        axes.set_yscale("log")
        axes.set_xlabel("layer of the target that the slot is held against (vLLM's numbers)")
        axes.set_ylabel("relative error")
        _legend_below(axes, 0.22, columns=2)
    return figure


def coverage(data: Mapping[str, Any]) -> Figure:
    """Share of tokens that a draft vocabulary of a given size can propose.

    Args:
        data: `vocab/coverage.json`: `{"sizes": [...], "train": [...], "heldout": [...], "chosen": int}`, coverages as shares.
    """
    sizes = _numbers(data.get("sizes"))
    if not sizes or min(sizes) <= 0:
        return _nothing("no coverage")
    chosen = _finite(data.get("chosen"))
    with style():
        figure, (axes,) = _figure(3.2)
        lowest = 1.0
        for key, name, colour, marker, line in (
            ("train", "training split (counted here)", GREY, "s", "--"),
            ("heldout", "held-out split", BLUE, "o", "-"),
        ):
            shares = _numbers(data.get(key))
            if len(shares) == len(sizes):
                axes.plot(sizes, shares, marker=marker, linestyle=line, color=colour, label=name, markersize=5)
                lowest = min(lowest, *shares)
                if key == "heldout" and chosen in sizes:
                    share = shares[sizes.index(chosen)]
                    axes.annotate(f"{100 * share:.1f} %", (chosen, share), (6, -14), textcoords="offset points", color=BLUE)
        if chosen:
            axes.axvline(chosen, color=RED, linestyle=":", label=f"chosen: {chosen:,.0f} tokens")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
        axes.minorticks_off()
        axes.tick_params(axis="x", labelrotation=30 if len(sizes) > 9 else 0, labelsize=9)
        axes.set_xlabel("size of the draft vocabulary (tokens)")
        _percent(axes, label="tokens covered", top=1.02)
        axes.set_ylim(bottom=max(0.0, math.floor((lowest - 0.03) * 10) / 10))
        _legend_above(axes)
    return figure


def training_curves(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss, and full accuracy at each TTT step, over the optimizer steps.

    Args:
        rows: the lines of `checkpoints/log.jsonl`: `{"split": "train" | "val", "step", "loss", "acc": [per TTT step], ...}`. Rows
            without a finite number are passed over, so a run that went to NaN still draws what came before.
    """
    placed, step = [], 0.0
    for row in _rows(rows):  # a row of validation may carry no step of its own: it belongs where training then was
        step = _finite(row.get("step")) or step
        placed.append({**row, "step": step})
    train = [row for row in placed if row.get("split") == "train"]
    val = [row for row in placed if row.get("split") == "val"]
    if not train and not val:
        return _nothing("no step of training is logged yet")
    with style():
        figure, (left, right) = _figure(3.5, 2)

        def line(axes: Axes, split: Sequence[Mapping[str, Any]], get: Any, **look: Any) -> None:
            points = [(float(row["step"]), value) for row in split if (value := _finite(get(row))) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), **look)

        def held_out(colour: str, name: str) -> dict[str, Any]:
            return {"color": colour, "label": name, "marker": "o", "markersize": 5, "linewidth": 1.8, "zorder": 3}

        line(left, train, lambda row: row.get("loss"), color=GREY, linewidth=1, label="training")
        line(left, val, lambda row: row.get("loss"), **held_out(BLUE, "held out"))
        left.set_title("Loss")
        left.set_ylabel("loss")
        steps = max((len(_numbers(row.get("acc"))) for row in [*train, *val]), default=0)
        for i in range(steps):

            def accuracy(row: Mapping[str, Any], i: int = i) -> Any:
                found = row.get("acc")
                return found[i] if isinstance(found, Sequence) and len(found) > i else None

            colour = STEPS[i % len(STEPS)]
            thin = {"linewidth": 0.8, "alpha": 0.45} if val else {"linewidth": 1.2, "label": f"TTT step {i + 1}"}
            line(right, train, accuracy, color=colour, **thin)
            line(right, val, accuracy, **held_out(colour, f"TTT step {i + 1}"))
        right.set_title("Full accuracy (thin: training)" if val else "Full accuracy in training")
        highest = max((n for row in [*train, *val] for n in _numbers(row.get("acc"))), default=1.0)
        _percent(right, label="tokens predicted", top=min(1.02, max(0.1, highest * 1.15)))
        for axes in (left, right):
            axes.set_xlabel("optimizer step")
            if axes.lines:
                _legend_below(axes, 0.24)
    return figure


def acceptance(data: Mapping[str, Any]) -> Figure:
    """How often the draft token at each position is accepted: of all drafts, and of those that got that far.

    Args:
        data: `eval/acceptance.json`: `{"k", "al", "al_low", "al_high", "unconditional": [...], "conditional": [...]}`.
    """
    every, reached = _numbers(data.get("unconditional")), _numbers(data.get("conditional"))
    count = max(len(every), len(reached))
    if not count:
        return _nothing("no acceptance")
    places = range(count)
    with style():
        figure, (axes,) = _figure(3.1)
        for values, shift, colour, hatch, name in (
            (every, -0.2, BLUE, "", "of all drafts"),
            (reached, 0.2, ORANGE, "///", "of drafts accepted up to there"),
        ):
            if values:
                here = [i + shift for i in range(len(values))]
                bars = axes.bar(here, values, width=0.38, color=colour, hatch=hatch, edgecolor="white", label=name)
                _above(axes, bars, [f"{100 * value:.1f} %" for value in values])
        axes.set_xticks(list(places), [f"position {i + 1}" for i in places])
        axes.grid(False, axis="x")
        _percent(axes, label="drafts accepted", top=min(1.1, max([*every, *reached, 0.1]) * 1.25))
        al, low, high = (_finite(data.get(key)) for key in ("al", "al_low", "al_high"))
        if al is not None:
            spread = f" ({low:.2f} to {high:.2f})" if low is not None and high is not None else ""
            axes.set_title(f"Acceptance length {al:.2f}{spread} tokens a forward pass, at most {count + 1}")
        _legend_below(axes, 0.15)
    return figure


def acceptance_by_kind(data: Mapping[str, Any]) -> Figure:
    """Acceptance length of every kind of prompt (how many prompts in brackets), the best on top.

    Args:
        data: `eval/acceptance.json` with `"by_kind": {kind: {"al", "prompts"}}`; its `al` is drawn as a line.
    """
    kinds = data.get("by_kind")
    found = {
        str(kind): (al, entry.get("prompts"))
        for kind, entry in (kinds.items() if isinstance(kinds, Mapping) else ())
        if isinstance(entry, Mapping) and (al := _finite(entry.get("al"))) is not None
    }
    if not found:
        return _nothing("no acceptance by kind of prompt")
    names = sorted(found, key=lambda kind: found[kind][0])
    with style():
        figure, (axes,) = _figure(0.9 + 0.31 * len(names))
        values = [found[name][0] for name in names]
        bars = axes.barh(range(len(names)), [value - 1 for value in values], left=1, height=0.68, color=BLUE)
        labels = axes.bar_label(bars, labels=[f"{value:.2f}" for value in values], padding=3, fontsize=9)
        for label in labels:
            label.set(bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6}, zorder=5)
        counts = ["" if found[name][1] is None else f" ({_plain(found[name][1])})" for name in names]
        axes.set_yticks(range(len(names)), [_plain(name) + count for name, count in zip(names, counts, strict=True)])
        axes.grid(False, axis="y")
        axes.set_xlim(1, max([*values, 1.1]) + (max([*values, 1.1]) - 1) * 0.15)
        axes.set_xlabel("acceptance length (tokens a forward pass; 1 = nothing accepted)")
        al = _finite(data.get("al"))
        if al is not None:
            axes.axvline(al, color=RED, linestyle=":", label=f"all prompts: {al:.2f}")
            _legend_above(axes)
    return figure


def _plain(text: object, limit: int = 28) -> str:
    """Text for a picture: without the dollar signs that matplotlib would read as mathematics, and not too long."""
    shown = " ".join(str(text).split()).replace("$", r"\$")
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def speed(data: Mapping[str, Any]) -> Figure:
    """Tokens a second of every contestant: the median as a bar, the range as a whisker, each repeat as a dot.

    Args:
        data: `eval/speed.json`: `{"contestants": {name: {"tokens_per_s": [one a repeat]}}, "ratios": {name: {"ratio", "low",
            "high"}}}`; a ratio is against `none` on the same prompts.
    """
    from statistics import median

    contestants, ratios = data.get("contestants"), data.get("ratios")
    found = {
        str(name): repeats
        for name, entry in (contestants.items() if isinstance(contestants, Mapping) else ())
        if isinstance(entry, Mapping) and (repeats := _numbers(entry.get("tokens_per_s")))
    }
    if not found:
        return _nothing("no measured speed")
    with style():
        figure, (axes,) = _figure(3.3)
        highest = max(max(repeats) for repeats in found.values())
        for i, (name, repeats) in enumerate(found.items()):
            middle, low, high = median(repeats), min(repeats), max(repeats)
            axes.bar(i, middle, width=0.56, color=CONTESTANTS.get(name, GREEN), alpha=0.85)
            axes.errorbar(i, middle, [[middle - low], [high - middle]], color="#222222", capsize=7, linewidth=1.3)
            spread = [i + 0.16 * (j / max(len(repeats) - 1, 1) - 0.5) for j in range(len(repeats))]
            axes.plot(spread, repeats, "o", color="white", markeredgecolor="#222222", markersize=5.5, zorder=4)
            text = f"{middle:,.1f} tokens/s"
            ratio = ratios.get(name) if isinstance(ratios, Mapping) else None
            if isinstance(ratio, Mapping) and (centre := _finite(ratio.get("ratio"))) is not None:
                a, b = _finite(ratio.get("low")), _finite(ratio.get("high"))
                text += f"\n{centre:.2f} x" + (f" ({a:.2f} to {b:.2f})" if a is not None and b is not None else "")
            axes.annotate(text, (i, high), (0, 8), textcoords="offset points", ha="center", fontsize=9.5)
        axes.set_xticks(range(len(found)), [CONTESTANT_NAMES.get(name, _plain(name)) for name in found])
        axes.set_xlim(-0.6, max(len(found) - 0.4, 1.6))
        axes.set_ylim(0, highest * 1.28 if highest > 0 else 1)
        axes.set_ylabel("output tokens per second")
        axes.grid(False, axis="x")
        repeats_text = sorted({len(repeats) for repeats in found.values()})
        prompts, streams = data.get("prompts"), data.get("concurrency")
        title = f"{' or '.join(map(str, repeats_text))} repeats (dots)"
        title += f", {prompts} prompts each" if _finite(prompts) is not None else ""
        title += f", {streams} at a time" if _finite(streams) is not None else ""
        axes.set_title(title)
    return figure


def when_it_pays(data: Mapping[str, Any]) -> Figure:
    """Speed-up of every contestant over the requests in flight: a line, its interval as a whisker, 1 dashed.

    Args:
        data: `eval/sweep.json`: `{"ratios": {load: {contestant: {"ratio", "low", "high"}}}}`.
    """
    found: dict[str, list[tuple[int, float, float, float]]] = {}
    ratios = data.get("ratios")
    for load, contestants in ratios.items() if isinstance(ratios, Mapping) else ():
        for name, ratio in contestants.items():
            middle, low, high = (_finite(ratio.get(key)) for key in ("ratio", "low", "high"))
            if middle is not None and low is not None and high is not None:
                found.setdefault(str(name), []).append((int(load), middle, low, high))
    if not found:
        return _nothing("no sweep of speed")
    loads = sorted({point[0] for points in found.values() for point in points})
    with style():
        figure, (axes,) = _figure(3.4)
        for i, (name, points) in enumerate(found.items()):
            shift = 0.06 * (i - (len(found) - 1) / 2)  # whiskers side by side
            at = [loads.index(load) + shift for load, *_ in points]
            middles = [middle for _, middle, _, _ in points]
            spread = [[middle - low for _, middle, low, _ in points], [high - middle for _, middle, _, high in points]]
            axes.errorbar(at, middles, spread, color=STEPS[i % len(STEPS)], marker="o", capsize=4, label=_plain(name))
        axes.axhline(1, color="#222222", linestyle="--", linewidth=1)
        axes.set_xticks(range(len(loads)), list(map(str, loads)))
        axes.set_xlabel("requests in flight")
        axes.set_ylabel("speed-up")
        axes.set_title("When does it pay? Above 1 with the whole whisker")
        _legend_below(axes, 0.2)
    return figure


def stage_minutes(minutes: Mapping[str, float]) -> Figure:
    """Where the time went: one bar a stage, in the order given.

    Args:
        minutes: wall time of each stage, in minutes.
    """
    found = {name: value for name, given in minutes.items() if (value := _finite(given)) is not None}
    total = sum(found.values())
    if not found:
        return _nothing("no stage has been timed")
    with style():
        figure, (axes,) = _figure(0.8 + 0.33 * len(found))
        bars = axes.barh(range(len(found)), list(found.values()), height=0.68, color=BLUE)
        _above(axes, bars, [f"{value:.1f}" + (f"  ({100 * value / total:.0f} %)" if total else "") for value in found.values()])
        axes.set_yticks(range(len(found)), [_plain(name, 40) for name in found])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlim(0, max([*found.values(), 0.1]) * 1.18)
        axes.set_xlabel("minutes")
        axes.set_title(f"{total:.1f} minutes in all")
    return figure


def sequence_lengths(lengths: Sequence[int], limit: int | None = None) -> Figure:
    """Histogram of the number of tokens in a sample.

    Args:
        lengths: tokens of each sample.
        limit: the longest sample that training takes, drawn as a line.
    """
    from statistics import median

    found = _numbers(lengths)
    if not found:
        return _nothing("no samples")
    with style():
        figure, (axes,) = _figure(2.9)
        axes.hist(found, bins=min(40, max(8, math.isqrt(len(found)) * 2)), color=BLUE, edgecolor="white", linewidth=0.6)
        axes.axvline(median(found), color=ORANGE, linestyle="--", label=f"median: {median(found):,.0f}")
        if limit is not None:
            axes.axvline(limit, color=RED, linestyle=":", label=f"limit: {limit:,}")
        axes.set_xlim(left=0)
        axes.set_xlabel("tokens in a sample")
        axes.set_ylabel("samples")
        axes.set_title(f"{len(found):,} samples, {sum(found):,.0f} tokens")
        _legend_above(axes)
    return figure


def predictions(points: Sequence[tuple[str, float, float]]) -> Figure:
    """Predicted against published speed-up, one point a row, with the diagonal and 25 % on both sides of it.

    Args:
        points: benchmark, published, predicted.
    """
    with style():
        figure, (axes,) = _figure(3.6)
        ends = [0.8, 1.1 * max(max(published, predicted) for _, published, predicted in points)]
        axes.plot(ends, ends, color=GREY, linewidth=1)
        axes.fill_between(ends, [0.75 * x for x in ends], [1.25 * x for x in ends], color=GREY, alpha=0.12, label="25 %")
        for i, name in enumerate(dict.fromkeys(name for name, _, _ in points)):
            xs, ys = zip(*((x, y) for bench, x, y in points if bench == name), strict=True)
            axes.plot(xs, ys, "os^Dv*"[i % 6], color=STEPS[i % len(STEPS)], label=_plain(name))
        axes.set_xlabel("published speed-up")
        axes.set_ylabel("predicted speed-up")
        axes.set_xlim(*ends)
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def step_parts(steps: Mapping[str, Mapping[str, float]]) -> Figure:
    """Where the time of a decode step goes: one stacked bar for each entry.

    Args:
        steps: seconds by part (`speedup.PARTS`), by the bar's name.
    """
    colours = (BLUE, SKY, GREEN, PINK, RED, GREY, ORANGE, "#222222")
    with style():
        figure, (axes,) = _figure(1.5 + 0.5 * len(steps))
        names = list(steps)
        left = [0.0] * len(names)
        for i, part in enumerate(next(iter(steps.values()))):
            widths = [1e3 * steps[name][part] for name in names]
            axes.barh(range(len(names)), widths, 0.6, left, color=colours[i % len(colours)], label=part, edgecolor="white")
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for i, total in enumerate(left):
            axes.annotate(f"{total:.1f} ms", (total, i), (4, 0), textcoords="offset points", va="center", fontsize=9.5)
        axes.set_yticks(range(len(names)), [_plain(name, 40) for name in names])
        axes.invert_yaxis()
        axes.set_xlim(0, max(left) * 1.12)
        axes.set_xlabel("milliseconds of one decode step")
        axes.grid(False, axis="y")
        _legend_below(axes, 0.45 if len(steps) < 3 else 0.28, 4)
    return figure


def speedup_by_batch(lines: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Speed-up against the number of requests in flight, and the line at 1 below which speculation loses.

    Args:
        lines: `(streams, speed-up)` points by the line's name.
    """
    with style():
        figure, (axes,) = _figure(3.5)
        for i, (name, points) in enumerate(lines.items()):
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, "-" + "os^Dv*"[i % 6], color=STEPS[i % len(STEPS)], label=_plain(name, 48), markersize=5)
        axes.axhline(1, color="#222222", linewidth=1.2, linestyle="--")
        axes.set_xscale("log", base=2)
        ticks = sorted({streams for points in lines.values() for streams, _ in points})
        axes.set_xticks(ticks, [str(streams) for streams in ticks])
        axes.set_xlabel("requests in flight")
        axes.set_ylabel("speed-up")
        _legend_below(axes, 0.2, 2)
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG. The same figure gives the same bytes: no date, no version of matplotlib in it."""
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
    return buffer.getvalue()


def save(run: Run, name: str, figure: Figure, caption: str, alt: str) -> Path:
    """Write a picture into the run's folder for the report, with its caption.

    Args:
        run: the run; the number of its stage becomes part of the file's name and places the picture in the report.
        name: lower-case letters, digits and underscores.
        figure: from one of the makers above.
        caption: one or two sentences under the picture: what to see in it.
        alt: what the picture shows, for someone who cannot see it.

    Raises:
        KitError: the name would not make a plain file name, or the disk is full.
    """
    from eagle3kit.rundir import write_atomic

    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise KitError("a picture's name is not usable", seen=name, wanted="lower-case letters, digits and underscores")
    path = run.path("figures", f"{run.stage[:2]}_{name}.png")
    write_atomic(path, png(figure))
    write_atomic(path.with_suffix(".json"), json.dumps({"caption": caption, "alt": alt}) + "\n")
    return path


def show(run: Run, name: str, figure: Figure, caption: str, alt: str) -> None:
    """`save`, and show the picture with its caption in the notebook."""
    from eagle3kit import widgets

    path = save(run, name, figure, caption, alt)
    widgets.picture(path.read_bytes(), caption=caption, alt=alt)
