"""Checks on reading a config: every style of a field, and nothing guessed."""

import copy
from typing import Any

import pytest

from eagle3kit import target
from eagle3kit.errors import KitError
from eagle3kit.target import Target


def llama(**changes: Any) -> dict[str, Any]:
    config = target.reference_config("smollm2-135m")
    del config["_reference"]
    return {key: value for key, value in (config | changes).items() if value is not ...}


YARN = {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0}


@pytest.mark.parametrize(
    ("changes", "theta", "kind"),
    [
        ({"rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}}, 5e4, None),
        ({"rope_parameters": ..., "rope_theta": 5e4}, 5e4, None),
        ({"rope_parameters": ..., "rope_theta": 5e4, "rope_scaling": None}, 5e4, None),
        ({"rope_parameters": ..., "rope_theta": 5e4, "rope_scaling": {"type": "yarn", **YARN}}, 5e4, "yarn"),
        ({"rope_parameters": {"rope_theta": 5e4, "rope_type": "yarn", **YARN}}, 5e4, "yarn"),
        (
            {
                "rope_parameters": {"rope_theta": 5e4, "rope_type": "yarn", **YARN},
                "rope_theta": 50000,
                "rope_scaling": {"type": "yarn", **YARN},
            },
            5e4,
            "yarn",
        ),
    ],
)
def test_rope_in_both_styles(changes: dict[str, Any], theta: float, kind: str | None) -> None:
    rope = Target.from_config(llama(**changes)).rope
    assert rope.theta == theta
    assert (rope.scaling or {}).get("rope_type") == kind
    if kind:
        assert rope.scaling == {"rope_type": "yarn", **YARN}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": ...}, "no rope_theta.*must not be guessed"),
        ({"rope_parameters": {"rope_type": "yarn", **YARN}}, "no rope_theta"),
        ({"rope_theta": 10000.0}, r"two rope bases; seen \[10000.0, 100000.0\]"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}},
            "differ",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "different ropes to different layers"),
        ({"hidden_size": ...}, "no usable hidden_size"),
        ({"num_hidden_layers": "30"}, "no usable num_hidden_layers; seen 30"),
        ({"rms_norm_eps": 0}, "no usable rms_norm_eps"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantisation that the kit does not know; seen awq"),
    ],
)
def test_what_must_not_be_guessed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KitError, match=message):
        Target.from_config(llama(**changes), source="x/y")


def test_missing_field_of_a_wrapper_names_the_inner_config() -> None:
    config = copy.deepcopy(target.reference_config("kimi-k2.5"))
    del config["text_config"]["rope_theta"]
    with pytest.raises(KitError, match=r"\(text_config\) has no rope_theta"):
        Target.from_config(config, source="x/y")


def test_epsilon_through_float32_is_restored() -> None:
    assert Target.from_config(llama(rms_norm_eps=9.999999747378752e-06)).rms_norm_eps == 1e-5


def test_eos_may_be_a_list() -> None:
    assert Target.from_config(llama(eos_token_id=[2, 3])).eos_token_ids == (2, 3)
    assert Target.from_config(llama(eos_token_id=...)).eos_token_ids == ()
