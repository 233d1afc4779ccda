"""The target's own tensors in a folder of safetensors. What is refused in a drafter's folder is in `test_convert.py`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from shapes import TINY

from eagle3kit import checkpoint, hidden_states
from eagle3kit.checkpoint import EMBEDDINGS, HEAD, NORM
from eagle3kit.errors import KitError

VOCAB, HIDDEN = 24, 8


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {EMBEDDINGS: torch.randn(VOCAB, HIDDEN), HEAD: torch.randn(VOCAB, HIDDEN), NORM: torch.randn(HIDDEN)}


def folder_with(folder: Path, weights: dict[str, torch.Tensor], **config: object) -> Path:
    from eagle3kit import tiny

    whole = tiny.config()
    whole["text_config"] |= {"hidden_size": HIDDEN, "vocab_size": VOCAB, **config}
    (folder / "config.json").write_text(json.dumps(whole))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_the_targets_tensors_are_found_with_and_without_the_wrapper(
    tmp_path: Path, tensors: dict[str, torch.Tensor], prefix: str
) -> None:
    named = {f"{prefix}model.{EMBEDDINGS}": tensors[EMBEDDINGS], f"{prefix}{HEAD}": tensors[HEAD]}
    decoys = {"vision_tower.encoder.model.norm.weight": tensors[NORM] * 2, f"{prefix}model.layers.0.{NORM}": tensors[NORM] * 3}
    folder = folder_with(tmp_path, {**named, f"{prefix}model.{NORM}": tensors[NORM], **decoys})
    head, norm = hidden_states.head_and_norm(folder)
    assert torch.equal(head, tensors[HEAD])
    assert torch.equal(norm, tensors[NORM])


def test_tied_embeddings_are_the_output_matrix_where_the_config_says_so(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    named = {f"model.{EMBEDDINGS}": tensors[EMBEDDINGS], f"model.{NORM}": tensors[NORM]}
    assert torch.equal(
        hidden_states.head_and_norm(folder_with(tmp_path, named, tie_word_embeddings=True))[0], tensors[EMBEDDINGS]
    )
    with pytest.raises(KitError, match="no lm_head.weight"):
        hidden_states.head_and_norm(folder_with(tmp_path, named, tie_word_embeddings=False))


def test_a_tensor_that_does_not_fit_the_config_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder = folder_with(tmp_path, {HEAD: tensors[HEAD]})
    with pytest.raises(KitError, match=r"lm_head.weight of .* does not fit its config; seen \[24, 8\].*wanted \[49152, 256\]"):
        checkpoint.of_target(folder, TINY, [HEAD])
