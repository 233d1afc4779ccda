"""Pictures: every maker draws its data, survives missing and odd data, and saves what the report needs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from shapes import K25, SMOL, TINY

from eagle3kit import layers, plots
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.rundir import Run
from eagle3kit.target import Target

NAN = float("nan")
LAYERS = {
    "layers": [
        {"id": 2, "slot": 0, "mean": 0.01, "std": 0.9, "norm_mean": 20.1, "abs_max": 310.0},
        {"id": 30, "slot": 1, "mean": -0.2, "std": 2.9, "norm_mean": 70.1, "abs_max": 2310.0},
    ]
}
GOLDEN = {
    "top1": 1.0,
    "mae": 7.5e-6,
    "positions": 231,
    "slots": [{"id": 2, "top1": 0.01, "mae": 9.1}, {"id": 27, "top1": 0.6, "mae": 6.1}, {"id": 30, "top1": 1.0, "mae": 7.5e-6}],
}
SLOTS = {"layers": [1, 3], "errors": [[0.9, 1e-6, 0.4, 0.8], [1.2, 0.7, 0.3, 0.0]], "positions": 90}
COVERAGE = {"sizes": [1024, 4096, 49152], "train": [0.8, 0.94, 1.0], "heldout": [0.78, 0.9, 0.99], "chosen": 4096}
LOG = [
    {"split": split, "step": step, "loss": 9 - step / 30, "acc": [step / 300, step / 600, step / 900]}
    for step in range(10, 101, 10)
    for split in (("train", "val") if step % 50 == 0 else ("train",))
]
ACCEPTANCE = {
    "k": 3,
    "al": 1.72,
    "al_low": 1.66,
    "al_high": 1.78,
    "unconditional": [0.42, 0.19, 0.11],
    "conditional": [0.42, 0.45, 0.58],
    "by_kind": {"story": {"al": 1.5, "prompts": 10}, "pay $5 or $6": {"al": 1.9, "prompts": 10}},
}
SPEED = {
    "contestants": {"none": {"tokens_per_s": [80.2, 79.0, 82.1]}, "eagle3": {"tokens_per_s": [79.1, 84.0, 82.0]}},
    "ratios": {"eagle3": {"ratio": 1.01, "low": 0.96, "high": 1.05}},
    "prompts": 12,
    "concurrency": 1,
}
PAYS = {
    "ratios": {
        "1": {"eagle3-k3": {"ratio": 1.2, "low": 1.1, "high": 1.3}},
        "16": {"eagle3-k3": {"ratio": 1.0, "low": 0.9, "high": 1.1}},
    }
}
Maker = Callable[[Any], Any]
MAKERS: list[tuple[Maker, Any, Any]] = [
    (plots.layer_statistics, LAYERS, {}),
    (plots.golden_scores, GOLDEN, {}),
    (plots.layer_errors, SLOTS, {"reason": "no memory"}),
    (plots.coverage, COVERAGE, {}),
    (plots.training_curves, LOG, []),
    (plots.acceptance, ACCEPTANCE, {}),
    (plots.acceptance_by_kind, ACCEPTANCE, {}),
    (plots.speed, SPEED, {}),
    (plots.when_it_pays, PAYS, {}),
    (plots.stage_minutes, {"00 preflight": 0.4, "05 train": 7.1}, {}),
    (plots.sequence_lengths, [100, 120, 300, 80], []),
]
ids = [maker.__name__ for maker, _, _ in MAKERS]


def texts(figure: Any) -> str:
    """All text in a figure."""
    from matplotlib.text import Text

    return "\n".join(item.get_text() for item in figure.findobj(Text))


def damage(value: Any, by: Any) -> Any:
    """Every number replaced."""
    if isinstance(value, dict):
        return {key: damage(item, by) for key, item in value.items()}
    if isinstance(value, list):
        return [damage(item, by) for item in value]
    return value if isinstance(value, str) else by


@pytest.mark.parametrize(("maker", "data", "nothing"), MAKERS, ids=ids)
def test_makers_draw_and_stay_small(maker: Maker, data: Any, nothing: Any) -> None:
    figure = maker(data)
    picture = plots.png(figure)
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert picture.startswith(b"\x89PNG") and len(picture) < 120_000
    assert 700 <= width <= 800 and 120 <= height <= 600
    assert all(axes.get_xlabel() or axes.get_ylabel() for axes in figure.axes)  # what is drawn says what it is
    assert "nothing to draw" in texts(maker(nothing))


@pytest.mark.parametrize("by", [NAN, None, 0, -1, "text"], ids=str)
@pytest.mark.parametrize(("maker", "data", "nothing"), MAKERS, ids=ids)
@pytest.mark.filterwarnings("error")
def test_makers_survive_odd_values(maker: Maker, data: Any, nothing: Any, by: Any) -> None:
    maker(damage(data, by))


def test_pictures_say_the_numbers() -> None:
    assert {"1.0 %", "60.0 %", "100.0 %", "7.5e-06"} <= set(texts(plots.golden_scores(GOLDEN)).splitlines())
    assert "layer 30\n(right)" in texts(plots.golden_scores(GOLDEN))
    assert {"slot 0, layer 1: 1.0e-06", "slot 1, layer 3: 1.0e-09"} <= set(texts(plots.layer_errors(SLOTS)).splitlines())
    assert "Acceptance length 1.72 (1.66 to 1.78) tokens a forward pass, at most 4" in texts(plots.acceptance(ACCEPTANCE))
    assert "82.0 tokens/s\n1.01 x (0.96 to 1.05)" in texts(plots.speed(SPEED))
    assert "chosen: 4,096 tokens" in texts(plots.coverage(COVERAGE)) and "90.0 %" in texts(plots.coverage(COVERAGE))
    assert "limit: 512" in texts(plots.sequence_lengths([1, 2, 3], 512))
    assert "7.5 minutes in all" in texts(plots.stage_minutes({"a": 0.4, "b": 7.1}))


def test_training_curves_hold_both_splits() -> None:
    axes: Any = plots.training_curves(LOG).axes
    left, right = axes
    assert [len(line.get_xdata()) for line in left.lines] == [10, 2]
    assert len(right.lines) == 6
    placeless = [row | {"step": None} if row["split"] == "val" else row for row in LOG]
    axes = plots.training_curves(placeless).axes
    assert list(axes[0].lines[1].get_xdata()) == [50, 100]


def test_text_from_a_run_is_not_read_as_mathematics() -> None:
    broken = {"by_kind": {r"$\frac{$ \undefined": {"al": 1.5, "prompts": 1}, "x" * 500: {"al": 1.2, "prompts": 1}}}
    plots.png(plots.acceptance_by_kind(broken))
    plots.png(plots.stage_minutes({"$\\bad": 1.0}))
    plots.png(plots.speed({"contestants": {"$\\bad$": {"tokens_per_s": [1.0]}}}))


def test_drawing_leaves_no_trace() -> None:
    before = dict(matplotlib.rcParams)
    first = plots.png(plots.coverage(COVERAGE))
    assert dict(matplotlib.rcParams) == before
    assert plots.png(plots.coverage(COVERAGE)) == first


def test_save_writes_picture_and_caption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(Params(runs_dir=str(tmp_path)), "04_vocab_map")
    path = plots.save(run, "coverage", plots.coverage(COVERAGE), "What <b>to</b> see.", "a rising line")
    assert path == run.root / "figures" / "04_coverage.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert json.loads(path.with_suffix(".json").read_text()) == {"caption": "What <b>to</b> see.", "alt": "a rising line"}
    plots.show(run, "again", plots.coverage(COVERAGE), "caption", "alt text")
    assert "[picture: alt text]" in capsys.readouterr().out
    for name in ("../x", "a b", "", "Ä"):
        with pytest.raises(KitError, match="name is not usable"):
            plots.save(run, name, plots.coverage({}), "", "")
    assert sorted(item.name for item in (run.root / "figures").iterdir()) == [
        "04_again.json", "04_again.png", "04_coverage.json", "04_coverage.png",
    ]  # fmt: skip


def test_imports_nothing_slow_and_needs_no_pyplot() -> None:
    code = (
        "import sys, eagle3kit.plots as p; print('matplotlib' in sys.modules);"
        "p.png(p.coverage({'sizes': [1, 2], 'train': [0.5, 1], 'heldout': [0.5, 1], 'chosen': 2}));"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


class TestLayers:
    @pytest.mark.parametrize("shape", [K25, SMOL, TINY], ids=lambda shape: shape.name)
    def test_draws(self, shape: Target) -> None:
        figure = plots.layer_figure(shape, layers.default_aux_layers(shape.n_layers))
        assert plots.png(figure) == plots.png(figure)

    def test_refuses_layers_in_other_numbers(self) -> None:
        with pytest.raises(KitError, match="sglang"):
            plots.layer_figure(K25, [1, 29, 57])
