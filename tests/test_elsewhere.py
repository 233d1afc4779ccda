"""What notebook 06 says of other machines."""

from dataclasses import replace
from pathlib import Path

import pytest

from eagle3kit import elsewhere, plots
from eagle3kit.params import Params
from eagle3kit.rundir import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(Params(runs_dir=str(tmp_path), run_name="r", interactive=False), "06_evaluate")
    made.record_all({f"acceptance.conditional_{i}": (share, "share") for i, share in ((1, 0.4), (2, 0.5))})
    return made


def gpus(tmp_path: Path) -> Run:
    values = {"target_model": "kimi-k2.5", "target_dtype": "auto", "hardware": "rtx-pro-6000", "serve_tensor_parallel": 8}
    params = Params(**values, runs_dir=str(tmp_path), run_name="r", device="cuda", gpu_count=8, interactive=False)
    made = Run(params, "06_evaluate")
    made.record_all({"acceptance.conditional_1": (0.8, "share"), "acceptance.conditional_2": (0.7, "share")})
    return made


def test_a_small_run_asks_about_kimi_on_b300(run: Run) -> None:
    there = elsewhere.setup(run.params)
    assert (there.target.name, there.hardware.name, there.gpus) == ("kimi-k2.5", "b300", 8)
    assert elsewhere.default_curve(run, there).name == elsewhere.DEFAULT_CURVE  # a small target's drafter says nothing there


def test_a_run_on_gpus_asks_about_itself(tmp_path: Path) -> None:
    run = gpus(tmp_path)
    there = elsewhere.setup(run.params)
    assert (there.target.name, there.hardware.name) == ("kimi-k2.5", "rtx-pro-6000")
    assert elsewhere.default_curve(run, there).conditional == (0.8, 0.7)


def test_the_measured_curve_stands_beside_the_published(run: Run) -> None:
    found = elsewhere.curves(run)
    assert next(iter(found.values())).al(2) == pytest.approx(1 + 0.4 + 0.4 * 0.5)
    assert elsewhere.DEFAULT_CURVE in found


def test_facts_are_what_the_model_says(run: Run) -> None:
    there = elsewhere.setup(run.params)
    curve = elsewhere.default_curve(run, there)
    rows = elsewhere.conclude(run, there, curve)
    assert run.fact("model.b300.speedup") == pytest.approx(there.speedup(1, 3, curve.al(3)), abs=1e-3)
    assert run.fact("model.b300.break_even_al.streams_16") == pytest.approx(there.break_even(16, 3), abs=1e-3)
    assert "reckoned, not measured" in run.facts()["model.b300.speedup"]["source"]
    assert rows[0]["speed-up, k = 3"] == pytest.approx(run.fact("model.b300.speedup"), abs=0.01)


def test_pictures_are_drawn(run: Run) -> None:
    there = elsewhere.setup(run.params)
    steps = elsewhere.steps(there, 3)
    assert list(steps) == [f"{n}, {what}" for n in ("1 stream", "16 streams") for what in ("no speculation", "k = 3")]
    for figure in (plots.step_parts(steps), plots.speedup_by_batch(elsewhere.lines(run, there, 3))):
        assert plots.png(figure).startswith(b"\x89PNG")


def test_headless_every_machine_is_in_the_table(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere.what_if(run, elsewhere.setup(run.params))
    shown = capsys.readouterr().out
    for machine in elsewhere.machines(run.params).values():
        assert machine.label in shown


def test_what_does_not_fit_is_not_called_faster(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """595 GB of weights on GPUs of 96 GB: the ratio can be reckoned, and the machine cannot be."""
    one = replace(elsewhere.setup(gpus(tmp_path).params), gpus=1)
    assert [row["fits"] for row in elsewhere.rows(one, elsewhere.default_curve(run, one), 3)] == [False] * 5
    elsewhere.what_if(gpus(tmp_path), one)
    answers = capsys.readouterr().out
    assert "does not fit" in answers
    assert "faster" not in answers


def test_a_gain_inside_the_models_own_error_is_no_verdict() -> None:
    found = [elsewhere.verdict_of(gain) for gain in (0.85, 0.95, 1.0, 1.05, 1.15)]
    assert found == ["slower: do not speculate", *["too near to 1 for the model to tell"] * 3, "faster"]


def test_controls_change_the_answer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import ipywidgets

    from eagle3kit import widgets

    shown: list[object] = []
    monkeypatch.setattr(widgets, "_display", shown.append)
    there = elsewhere.setup(run.params)
    elsewhere.what_if(Run(run.params.replace(interactive=True), "06_evaluate"), there)
    box = next(item for item in shown if isinstance(item, ipywidgets.VBox))
    by_name = {dropdown.description: dropdown for dropdown in box.children[0].children}
    assert set(by_name) == {"gpu", "gpus", "streams", "k", "acceptance", "all-reduce"}
    before = str(shown[-1])
    by_name["gpu"].value = "rtx-pro-6000"
    assert "RTX PRO 6000" in str(shown[-1]) != before
    by_name["all-reduce"].value = "one-shot"
    assert "all-reduce one-shot" in str(shown[-1])
    by_name["all-reduce"].value = "nvlink"
    assert isinstance(answer := shown[-1], widgets.Shown) and "all-reduce nccl-untuned (it has no nvlink)" in answer.html
    by_name["acceptance"].value = "AL 2.5"
    assert "2.5" in str(shown[-1])
    by_name["k"].value = 1
    assert "impossible: AL is at most 2 at k = 1" in str(shown[-1])
    by_name["k"].value, by_name["gpus"].value = 3, 1
    assert "does not fit" in str(shown[-1])


def test_a_users_gpu_can_be_chosen(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine: {label: My GPU, memory_gb: 100, bandwidth_gb_s: 4000, link_gb_s: 100, bf16_tflops: 900}\n")
    mine = Run(run.params.replace(hardware_file=str(file)), "06_evaluate")
    elsewhere.what_if(mine, elsewhere.setup(mine.params))
    assert "My GPU" in capsys.readouterr().out
