"""The speed-up model against published results, each predicted by constants that were fitted without it."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from eagle3kit import cli, model_check, speedup, target
from eagle3kit.errors import KitError


def test_fitting_again_gives_the_stored_constants() -> None:
    assert asdict(model_check.fit()) == pytest.approx(asdict(speedup.constants()), rel=1e-3)


def test_leaving_a_benchmark_out_leaves_out_all_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = model_check.fits_without()["RTX PRO 6000"]
    spoiled = tuple(replace(row, value=row.value * (1.5 if row.bench == "RTX PRO 6000" else 1)) for row in model_check.rows())
    monkeypatch.setattr(model_check, "rows", lambda: spoiled)
    assert model_check.fits_without()["RTX PRO 6000"] == before
    assert model_check.fit() != speedup.constants()


def test_a_row_not_marked_for_it_is_not_fitted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    unmarked = (*model_check.rows(), replace(model_check.rows()[0], value=9.0, fit=False))
    monkeypatch.setattr(model_check, "rows", lambda: unmarked)
    assert model_check.fit() == speedup.constants()


def test_every_published_speedup_is_predicted() -> None:
    predicted = [(row.bench, row.streams, row.k) for row, _ in model_check.leave_one_out()]
    assert len(predicted) == len(set(predicted)) == 15
    assert {bench for bench, _, _ in predicted} == {"gsm8k", "math500", "mtbench", "humaneval", "RTX PRO 6000", "TorchSpec"}


def test_errors_of_benchmarks_left_out() -> None:
    median, worst = model_check.errors()
    assert median <= model_check.MEDIAN_LIMIT
    assert worst <= model_check.WORST_LIMIT


@pytest.mark.parametrize("claim", model_check.claims(), ids=lambda claim: claim["name"])
def test_what_is_known_of_these_machines_is_reproduced(claim: dict[str, str]) -> None:
    assert claim["state"] == "ok", claim["found"]


def test_a_load_that_does_not_fit_is_said_to_be_one() -> None:
    """The gain ends where 8 x 96 GB no longer hold the streams at the context that is assumed."""
    (claim,) = (claim for claim in model_check.claims() if claim["name"].startswith("EAGLE-3 loses"))
    assert claim["found"].endswith("below 1 with 512 (they fit only with less than 1,000 tokens of context each)")


def test_leaving_a_machine_out_leaves_out_all_its_rows() -> None:
    fitted = model_check.fits_without("name")
    assert list(fitted) == ["SpecBundle", "RTX PRO 6000", "TorchSpec"]
    assert fitted["SpecBundle"] == model_check.fit(row for row in model_check.rows() if row.name != "SpecBundle")
    for row, predicted in model_check.leave_one_out("name"):
        assert predicted == row.predict(fitted[row.name])


def test_a_variant_kept_is_not_worse_than_those_it_was_compared_with() -> None:
    """What a drafter's pass takes was chosen by these errors; the page says how they compare."""
    rows = {row["set to"]: row for row in model_check.variants()}
    kept = rows[""]
    assert kept["median error"] == f"{100 * model_check.errors()[0]:.1f} %"
    for other in ("by all", "no all-reduces", "not read"):
        assert float(kept["worst"][:-1]) <= float(rows[other]["worst"][:-1])
        assert float(kept["median error"][:-1]) <= float(rows[other]["median error"][:-1]) + 0.5
    assert float(rows["by all"]["worst"][:-1]) > 2 * float(kept["worst"][:-1])


def test_tokens_a_second_are_far_off_and_said_to_be(tmp_path: Path) -> None:
    predicted = {(row.bench, row.streams, row.k): (row.value, found) for row, found in model_check.rates()}
    assert len(predicted) == 12 + 8
    assert predicted["gsm8k", 8, 0][0] == 337.9
    assert predicted["gsm8k", 8, 3][0] == pytest.approx(498.4)
    factor = max(max(found / value, value / found) for value, found in predicted.values())
    page = model_check.build(tmp_path).read_text()
    assert factor > 1.5
    assert "ratios only" in page
    assert f"up to a factor of {factor:.1f}" in page


# ---- n-gram


def test_the_loss_of_ngram_is_compared_with_the_published() -> None:
    lost, als = model_check.ngram(0.2)
    assert als is not None
    there = replace(model_check.setup("RTX PRO 6000"), drafter_bytes=0.0)
    for al in als:
        losses = [1 - there.speedup(streams, 0.2 * model_check.NGRAM_K, al) for streams in model_check.NGRAM_LOADS]
        assert all(0.09 - 1e-9 <= loss <= 0.26 + 1e-9 for loss in losses)
    assert max(lost) == pytest.approx(1 - 1 / max(there.break_even(n, 0.8) for n in model_check.NGRAM_LOADS))
    assert model_check.ngram(1.0)[1] is None  # no AL explains what was published, were every step to draft


def test_ngram_that_nothing_explains_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "NGRAM_LOST", (0.60, 0.61))
    assert [claim["state"] for claim in model_check.claims() if "n-gram" in claim["name"]] == ["fail"]


# ---- rows from a file

ROW = {"target": "kimi-k2.5", "hardware": "b300", "gpus": 8, "streams": 8, "k": 3, "al": 2.5, "value": 1.5}
SHAPE = {"heads": 64, "kv_heads": 64, "head_dim": 128, "intermediate": 12288, "vocab": 163840, "layers": 1, "aux": 3}


def written(tmp_path: Path, *rows: Any) -> Path:
    file = tmp_path / "rows.yaml"
    file.write_text(json.dumps(list(rows)))
    return file


def test_a_row_from_a_file_is_predicted_as_the_published_one(tmp_path: Path) -> None:
    given = {"target": "kimi-k2.5", "hardware": "rtx-pro-6000", "gpus": 8, "all_reduce": "nccl-untuned", "streams": 16, "k": 3}
    given |= {"drafter": "lightseekorg/kimi-k2.5-eagle3", "al": 2.687, "base": 475.2, "with": 659.0}
    by_shape = {**given, "drafter": SHAPE}
    known = next(row for row in model_check.rows() if row.name == "RTX PRO 6000" and row.streams == 16)
    for row in model_check.read_rows(written(tmp_path, given, by_shape)):
        assert row.predict() == known.predict()
        assert row.value == known.value


def test_what_a_row_may_leave_out(tmp_path: Path) -> None:
    asked = {key: value for key, value in ROW.items() if key != "value"}
    plain, ngram, null, whole, longer, sharded, rate = model_check.read_rows(
        written(
            tmp_path,
            asked,
            {**asked, "drafter": "none"},
            {**asked, "drafter": None},
            {**asked, "target": "smollm2-135m", "gpus": 1, "name": "small", "bench": "one"},
            {**asked, "context": 100_000},
            {**asked, "drafter_gpus": 8},
            {"target": "kimi-k2.5", "hardware": "b300", "gpus": 8, "streams": 8, "what": "tokens/s", "value": 700},
        )
    )
    assert math.isnan(plain.value)
    assert plain.setup.drafter_bytes > 0 == ngram.setup.drafter_bytes == null.setup.drafter_bytes
    assert (whole.name, whole.bench, whole.setup.target.name) == ("small", "one", "smollm2-135m")
    assert longer.setup.step(8)["KV cache"] == pytest.approx(100 * plain.setup.step(8)["KV cache"])
    assert sharded.setup.step(8, 3)["drafter"] < plain.setup.step(8, 3)["drafter"]
    assert rate.predict() == rate.setup.tokens_per_s(8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": None}, "row 2: target is missing"),
        ({"target": "/nowhere/at/all"}, "row 2: target: "),
        ({"hardware": "abacus"}, "row 2: hardware is not known; seen abacus; wanted rtx-pro-6000, h200.*--hardware-file"),
        ({"hardware": "cpu"}, "row 2: hardware is not known; seen cpu"),
        ({"gpus": 0}, "row 2: gpus is no positive number; seen 0"),
        ({"gpus": 2.5}, "row 2: gpus is no whole number; seen 2.5"),
        ({"streams": None}, "row 2: streams is no positive number; seen nothing"),
        ({"k": None}, "row 2: k is no positive number; seen nothing"),
        ({"k": "three"}, "row 2: k is no positive number; seen three"),
        ({"al": None}, "row 2: al is missing; wanted the acceptance length at k = 3"),
        ({"al": None, "drafter": "none"}, "row 2: al is missing"),
        ({"al": 9}, "row 2: al: this acceptance length is impossible; seen AL 9 at k = 3"),
        ({"al": "high"}, "row 2: al is no positive number; seen high"),
        ({"value": "fast"}, "row 2: value is no positive number; seen fast"),
        ({"value": None, "base": 100}, "row 2: with is no positive number; seen nothing"),
        ({"base": 100, "with": 150}, "row 2: base and with are of a speed-up, which needs no value"),
        ({"all_reduce": "mpi"}, "row 2: all_reduce is not known of b300; seen mpi; wanted nvlink"),
        ({"drafter": "somebody/else"}, "row 2: drafter: it is not known; seen somebody/else"),
        ({"drafter": ["heads"]}, "row 2: drafter: it is not known"),
        ({"drafter": {"heads": 64}}, "row 2: drafter: a shape has other numbers; seen heads; wanted heads, kv_heads"),
        ({"drafter": {**SHAPE, "heads": -1}}, "row 2: drafter: heads is no positive number"),
        ({"drafter_gpus": 16}, "row 2: drafter_gpus is more than gpus; seen 16; wanted 1 to 8"),
        ({"context": "long"}, "row 2: context is no positive number; seen long"),
        ({"what": "joy"}, "row 2: what is none that the model gives; seen joy"),
        ({"stream": 3}, "row 2 has an unknown key; seen stream; wanted target"),
    ],
)
def test_a_bad_row_is_told_what_is_wrong(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    bad = {key: value for key, value in {**ROW, **change}.items() if value is not None}
    with pytest.raises(KitError, match=f"rows.yaml, {message}") as caught:
        model_check.read_rows(written(tmp_path, ROW, bad))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "row 1 is no mapping; seen 1"),
        ("[]", "has no list of rows"),
        ("a: 1", "has no list of rows"),
        ("[", "cannot be read"),
    ],
)
def test_a_file_without_rows_is_told(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rows.yaml"
    file.write_text(text)
    with pytest.raises(KitError, match=message):
        model_check.read_rows(file)
    with pytest.raises(KitError, match="cannot be read"):
        model_check.read_rows(tmp_path / "none.yaml")


def test_a_published_row_without_al_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be predicted as if no draft were ever accepted."""
    known = json.loads(json.dumps(model_check.published()))
    del known["rows"][0]["al"]
    monkeypatch.setattr(model_check, "published", lambda: known)
    with pytest.raises(KitError, match=r"published.json, row 1: al is missing"):
        model_check.rows.__wrapped__()


def test_the_readmes_rows_are_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    file = tmp_path / "mine.yaml"
    file.write_text(text.split("```yaml\n")[1].split("```")[0])
    assert cli.main(["check-model", "--rows", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "rtx-pro-6000" in shown
    assert "of 1 published" in shown


def test_the_readme_says_how_far_off_it_is() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    median, worst = model_check.errors()
    assert f"median error {100 * median:.0f} %, worst {100 * worst:.0f} %" in text
    factor = max(max(found / row.value, row.value / found) for row, found in model_check.rates())
    assert f"tokens a second miss by up to {factor:.1f} times" in text


def test_a_gpu_may_be_named_by_digits(tmp_path: Path) -> None:
    mine = tmp_path / "gpus.yaml"
    mine.write_text("4090: {memory_gb: 24, bandwidth_gb_s: 1008, link_gb_s: 25, bf16_tflops: 165}\n")
    (row,) = model_check.read_rows(written(tmp_path, {**ROW, "hardware": 4090}), str(mine))
    assert row.setup.hardware.name == "4090"


def test_errors_of_ratios_and_of_rates_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rate = {key: value for key, value in ROW.items() if key not in ("k", "al")} | {"what": "tokens/s", "value": 10.0}
    assert cli.main(["check-model", "--rows", str(written(tmp_path, ROW, rate))]) == 0
    ratios, rates = capsys.readouterr().out.splitlines()[-2:]
    assert ratios.startswith("speed-up: median error")
    assert rates.startswith("tokens/s: median error")
    assert all(line.endswith("of 1 published") for line in (ratios, rates))


def test_a_number_type_that_is_not_known_is_the_rows_error(tmp_path: Path) -> None:
    config = target.reference_config("smollm2-135m") | {"torch_dtype": "float8_e4m3fn", "dtype": "float8_e4m3fn"}
    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8" / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "_reference"}))
    file = written(tmp_path, ROW, {**ROW, "target": str(tmp_path / "fp8")})
    with pytest.raises(KitError, match="row 2: target: the number type of the target is not known; seen float8_e4m3fn"):
        model_check.read_rows(file)


def test_command_predicts_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "gpus.yaml"
    mine.write_text("mine: {memory_gb: 100, bandwidth_gb_s: 4000, link_gb_s: 100, bf16_tflops: 900}\n")
    asked = {key: value for key, value in ROW.items() if key != "value"}
    file = written(tmp_path, ROW, {**ROW, "value": 3.0}, {**asked, "hardware": "mine", "gpus": 1, "name": "too small"})
    assert cli.main(["check-model", "--rows", str(file), "--hardware-file", str(mine)]) == 0
    shown = capsys.readouterr().out.splitlines()
    predicted = model_check.read_rows(file, str(mine))[0].predict()
    assert f"{predicted:.2f}" in shown[2]
    assert f"{100 * (predicted / 1.5 - 1):+.1f} %" in shown[2]
    assert shown[2].endswith("yes")
    assert "too small" in shown[4]
    assert shown[4].endswith("no")
    off = sorted((abs(predicted / 1.5 - 1), abs(predicted / 3 - 1)))
    assert shown[5] == f"speed-up: median error {100 * sum(off) / 2:.1f} %, worst {100 * off[1]:.1f} %, of 2 published"
    assert not list(tmp_path.glob("*.html"))
    assert cli.main(["check-model", "--rows", str(written(tmp_path, {**ROW, "k": "x"}))]) == 2
    assert capsys.readouterr().err.startswith("eagle3kit: ")


# ---- the page


def test_page_says_all_of_it(tmp_path: Path) -> None:
    page = model_check.build(tmp_path).read_text()
    assert "http" not in page.replace("http-equiv", "")
    for row, predicted in model_check.leave_one_out():
        assert f"{row.value:.2f}" in page
        assert f"{predicted:.2f}" in page
    for name in (
        "bandwidth_share",
        "layer_s",
        "routing_power",
        "verification_s",
        "assumed",
        "A machine left out",
        "drafter_gpus",
    ):
        assert name in page


def test_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-model", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "model_check.html")
