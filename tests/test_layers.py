"""Checks on the auxiliary-layer conventions. A mistake here trains without complaint and accepts nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3kit import layers
from eagle3kit.errors import KitError
from eagle3kit.layers import Convention

KIMI = 61


@pytest.mark.parametrize(
    ("convention", "theirs", "canonical"),
    [
        ("vllm", (2, 30, 58, 61), (2, 30, 58, 61)),
        ("speculators", (2, 30, 58, 61), (2, 30, 58, 61)),
        ("sglang", (1, 29, 57), (2, 30, 58)),
        ("sglang", (60,), (61,)),
        ("speculators_old", (2, 30, 58, 60), (3, 31, 59, 61)),
        ("transformers", (2, 30, 58), (2, 30, 58)),
        ("dflash", (1, 29, 57), (2, 30, 58)),
    ],
)
def test_known_answers_for_61_layers(convention: str, theirs: tuple[int, ...], canonical: tuple[int, ...]) -> None:
    assert layers.to_vllm(theirs, convention, KIMI) == canonical
    assert layers.from_vllm(canonical, convention, KIMI) == theirs


def test_default_for_known_targets() -> None:
    assert layers.default_aux_layers(KIMI) == (2, 30, 58)
    assert layers.default_aux_layers(30) == (2, 15, 27)
    assert layers.default_aux_layers(7) == (2, 3, 4)
    with pytest.raises(KitError, match="6 layers"):
        layers.default_aux_layers(6)


def test_extraction_adds_the_last_layer() -> None:
    assert layers.extraction_ids([2, 15, 27], 30) == (2, 15, 27, 30)


@given(st.data(), st.sampled_from(Convention), st.integers(1, 200))
def test_round_trip_from_theirs(data: st.DataObject, convention: Convention, n: int) -> None:
    last = {Convention.VLLM: n, Convention.SPECULATORS: n, Convention.DFLASH: n - 2}.get(convention, n - 1)
    ids = tuple(data.draw(st.lists(st.integers(0, last)))) if last >= 0 else ()
    assert layers.from_vllm(layers.to_vllm(ids, convention, n), convention, n) == ids


@given(st.data(), st.sampled_from(Convention), st.integers(1, 200))
def test_round_trip_from_canonical(data: st.DataObject, convention: Convention, n: int) -> None:
    ids = tuple(data.draw(st.lists(st.integers(0, n))))
    try:
        theirs = layers.from_vllm(ids, convention, n)
    except KitError:
        assert 0 in ids or n in ids  # only the two ends of the stack lack a number in some conventions
        return
    assert layers.to_vllm(theirs, convention, n) == ids


@pytest.mark.parametrize("convention", list(Convention))
@pytest.mark.parametrize("bad", [-1, KIMI + 1, 1000])
def test_outside_the_target(convention: Convention, bad: int) -> None:
    with pytest.raises(KitError, match="outside the target"):
        layers.to_vllm([bad], convention, KIMI)
    with pytest.raises(KitError, match="outside the target"):
        layers.from_vllm([bad], convention, KIMI)


@pytest.mark.parametrize(("convention", "theirs"), [("transformers", KIMI), ("dflash", KIMI - 1)])
def test_transformers_last_entry_is_after_the_norm(convention: str, theirs: int) -> None:
    with pytest.raises(KitError, match=r"after the final norm.*forward hook"):
        layers.to_vllm([theirs], convention, KIMI)
    with pytest.raises(KitError, match="after the final norm"):
        layers.from_vllm([KIMI], convention, KIMI)


def test_embeddings_have_no_after_layer_number() -> None:
    with pytest.raises(KitError, match="embeddings"):
        layers.from_vllm([0], "sglang", KIMI)


def test_unknown_convention() -> None:
    with pytest.raises(KitError, match=r"tensorrt.*wanted vllm, speculators"):
        layers.to_vllm([1], "tensorrt", KIMI)


def test_check_accepts_good_lists() -> None:
    assert layers.check([2, 30, 58], KIMI) == (2, 30, 58)
    assert layers.check((1, 60), KIMI) == (1, 60)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        ([0, 30, 58], r"seen \[0\]; wanted ids in 1 .. 60"),
        ([2, 30, 61], "61 .the last layer's output. is recorded without being listed"),
        ([2, 30, 90], r"seen \[90\]"),
        ([2, 30, 30], r"repeats a layer; seen \[30\]"),
        ([2, 58, 30], r"not increasing.*set aux_layers: \[2, 30, 58\]"),
        ([1, 29, 57], r"convention sglang.*set aux_layers: \[2, 30, 58\]"),
        ([2, 30, 58, 60], r"convention speculators_old.*set aux_layers: \[3, 31, 59\]"),
    ],
)
def test_check_refuses(ids: list[int], message: str) -> None:
    with pytest.raises(KitError, match=message):
        layers.check(ids, KIMI)


@given(st.integers(layers.MIN_LAYERS, 300))
def test_default_is_accepted_and_sglangs_is_recognised(n: int) -> None:
    default = layers.default_aux_layers(n)
    assert layers.check(default, n) == default
    assert layers.other_default(layers.from_vllm(default, "sglang", n), n) is Convention.SGLANG


def test_table_shows_one_point_in_every_system() -> None:
    rows = layers.table([2, 30, 58], KIMI)
    assert [row["vLLM, speculators >= 0.5"] for row in rows] == ["2", "30", "58", "61"]
    assert [row["SGLang, TorchSpec"] for row in rows] == ["1", "29", "57", "60"]
    assert [row["transformers hidden_states"] for row in rows] == ["2", "30", "58", "-"]
    assert [row["DFlash"] for row in rows] == ["1", "29", "57", "-"]
    assert rows[0]["point"] == "output of layer 1"
    assert rows[-1]["point"] == "output of layer 60, before the final norm"
