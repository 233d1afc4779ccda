"""A published drafter explained; two targets compared."""

import pytest
from shapes import FLAT, K2, K25, REFERENCE, SMOL

from eagle3kit import drafter, explore


class TestExplain:
    def test_reference_agrees_with_k2_as_far_as_it_is_known(self) -> None:
        rows = {row["field"]: row for row in explore.explain(REFERENCE, K2)}
        assert list(rows) == list(drafter.FIELDS)
        assert rows["hidden_size"]["agrees with kimi-k2"] == "yes"
        assert rows["hidden_size"]["value"] == "7168 (implied)"
        assert rows["rms_norm_eps"]["value"] == rows["rms_norm_eps"]["agrees with kimi-k2"] == "unknown"
        assert rows[drafter.AUX]["agrees with kimi-k2"].startswith("yes")
        assert explore.disagreements(REFERENCE, K2) == []
        assert sum(map(len, explore.in_groups(explore.explain(REFERENCE, K2)).values())) == len(rows)

    def test_what_disagrees_is_named(self) -> None:
        assert {row["field"] for row in explore.disagreements(REFERENCE, SMOL)} == {"hidden_size", "vocab_size", drafter.AUX}

    @pytest.mark.parametrize(
        ("ids", "word"), [([1, 29, 57], "sglang"), ([2, 30, 58, 60], "speculators_old"), ([5, 4, 90], "no:")]
    )
    def test_layers_in_other_numbers(self, ids: list[int], word: str) -> None:
        parent = drafter.from_config({**FLAT, "eagle_config": {drafter.AUX: ids}}, "x", "folder", "")
        assert (
            word in next(row for row in explore.disagreements(parent, K2) if row["field"] == drafter.AUX)["agrees with kimi-k2"]
        )
        assert explore.places(parent, K2)[0] == (2, 30, 58)

    def test_places_of_the_published_drafter(self) -> None:
        assert explore.places(REFERENCE, K2)[0] == (2, 30, 58)
        assert explore.places(REFERENCE, SMOL)[0] == (2, 15, 27)

    def test_k2_against_k25(self) -> None:
        rows = {row["field"]: (row["kimi-k2"], row["kimi-k2.5"]) for row in explore.differences(K2, K25)}
        assert rows["rms_norm_eps"] == ("1e-06", "1e-05")
        assert rows["max_position_embeddings"] == ("131072", "262144")
        assert rows["pad_token_id"] == ("none", "163839")
        assert rows["weight names"] == ("model.*", "language_model.model.*")
        assert set(rows) == {
            "rms_norm_eps",
            drafter.ROPE,
            "max_position_embeddings",
            "pad_token_id",
            "weight names",
            "quantisation",
        }
        assert explore.differences(K25, K25) == []
