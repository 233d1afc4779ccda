"""The speed-up model against published results, each predicted by constants that were fitted without it."""

from dataclasses import asdict
from pathlib import Path

import pytest

from eagle3kit import model_check, speedup


def test_fitting_again_gives_the_stored_constants() -> None:
    assert asdict(model_check.fit()) == pytest.approx(asdict(speedup.constants()), rel=1e-3)


def test_leaving_a_benchmark_out_leaves_out_all_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    before = model_check.fit("RTX PRO 6000")
    spoiled = tuple(replace(row, value=row.value * (1.5 if row.bench == "RTX PRO 6000" else 1)) for row in model_check.rows())
    monkeypatch.setattr(model_check, "rows", lambda: spoiled)
    assert model_check.fit("RTX PRO 6000") == before
    assert model_check.fit() != speedup.constants()


def test_a_row_not_marked_for_it_is_not_fitted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

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


def test_page_says_all_of_it(tmp_path: Path) -> None:
    page = model_check.build(tmp_path).read_text()
    assert "http" not in page.replace("http-equiv", "")
    for row, predicted in model_check.leave_one_out():
        assert f"{row.value:.2f}" in page
        assert f"{predicted:.2f}" in page
    for name in ("bandwidth_share", "layer_s", "routing_power", "verification_s", "assumed"):
        assert name in page


def test_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from eagle3kit import cli

    assert cli.main(["check-model", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "model_check.html")
