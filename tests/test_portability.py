"""The verdict on what carries over from the published drafter."""

from shapes import B300, FLAT, K2, K25, LOCAL, REFERENCE, SMOL

from eagle3kit import drafter, explore, portability, recipe
from eagle3kit.params import Params
from eagle3kit.target import Target

SERVED = {"class of the target": "KimiK25ForConditionalGeneration, which records auxiliary layers"}


def verdicts(params: Params, parent: drafter.Parent, before: Target, after: Target) -> dict[str, portability.Item]:
    derivation = recipe.derive(params, parent, after)
    items = portability.judge(derivation, explore.read_weights(parent), before, after, SERVED)
    assert all(item.evidence and item.value for item in items)
    assert all(item.verdict in portability.COLOURS for item in items)
    return {item.item: item for item in items}


def test_k2_to_k25() -> None:
    found = verdicts(B300, REFERENCE, K2, K25)
    by = {verdict: {item.item for item in found.values() if item.verdict == verdict} for verdict in portability.COLOURS}
    assert {"width", "vocabulary", "auxiliary layers, in vLLM's numbers", "the engine records auxiliary layers"} < by["passes"]
    assert {"epsilon of the norms", "rope", "longest position", "pad id", "meaning of the tokens"} < by["needs a change"]
    assert {"MLP width", "norms and residual", "fc and the layer's weights as a start"} < by["unknown"]
    assert "kimi-k2's, the drafter's own is not known" in found["rope"].evidence
    assert "<think> (163606)" in found["meaning of the tokens"].evidence
    assert portability.summary(list(found.values())).startswith("8 pass, 7 need a change (epsilon of the norms; rope")


def test_a_known_file_speaks_for_itself() -> None:
    flat = {**FLAT, "intermediate_size": 18432, "num_key_value_heads": 64, "rms_norm_eps": 1e-5}
    found = verdicts(B300, drafter.from_config(flat, "x", "folder", ""), K2, K25)
    assert found["epsilon of the norms"].verdict == "passes"
    assert found["heads, key and value heads, head width"].verdict == "passes"
    assert (found["MLP width"].verdict, found["MLP width"].value) == ("needs a change", "12288")
    assert found["fc and the layer's weights as a start"].verdict == "needs a change"


def test_another_family_starts_afresh() -> None:
    found = verdicts(LOCAL, REFERENCE, K2, SMOL)
    assert found["width"].verdict == found["meaning of the tokens"].verdict == "needs a change"
    assert found["fc and the layer's weights as a start"].value == "fresh weights"
    assert "acceptance of this architecture on K2.5" not in found
