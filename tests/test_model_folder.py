"""Checks on what counts as a complete model."""

from pathlib import Path

import pytest

from eagle3kit import model_folder
from eagle3kit.errors import KitError


def test_broken_download_is_found(miniature: Path, tmp_path: Path) -> None:
    for file in miniature.iterdir():
        (tmp_path / file.name).symlink_to(file)
    shard = tmp_path / "model-00002-of-000002.safetensors"
    whole = shard.read_bytes()
    shard.unlink()
    with pytest.raises(KitError, match=r"missing: model-00002-of-000002.safetensors"):
        model_folder.check_folder(tmp_path)
    for content, message in (
        (whole[:-1], "is cut short"),
        (whole + b"x", "bytes behind its end"),
        (b"", "not a safetensors file"),
        (b"\xff" * 100, "not a safetensors file"),
    ):
        shard.write_bytes(content)
        with pytest.raises(KitError, match=message):
            model_folder.check_folder(tmp_path)
