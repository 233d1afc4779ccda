"""Shared fixtures, and the order of the tests."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3kit import tiny
from eagle3kit.params import Params
from eagle3kit.rundir import Run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of real runs first: they take longest, and the others run beside them."""
    real = ["test_pipeline.py", "test_extraction.py"]
    items.sort(key=lambda item: real.index(item.path.name) if item.path.name in real else len(real))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB in memory, whose end is soon reached."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here: see tests/SKIPS.md")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """An empty run in a temporary folder."""
    return Run(Params(run_name="unit", runs_dir=str(tmp_path / "runs")), "03_extract_hidden_states")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hub, and no cache but an empty one."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("EAGLE3KIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in with SmolLM2's special tokens and size: the real one takes 20 seconds to get out of its file."""
    folder = tmp_path_factory.mktemp("tokenizer")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"]
    special += ["<gh_stars>", "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>"]
    special += ["<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>"]
    words = {word: at for at, word in enumerate(special + [f"w{n}" for n in range(tiny.VOCAB_SIZE - len(special))])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": at, "content": word, **flags} for at, word in enumerate(special)],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<|endoftext|>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<|im_end|>"}))
    return folder


@pytest.fixture(scope="session")
def miniature(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """The Kimi-K2.5 miniature in float32, built once: not to be changed."""
    return tiny.build_tiny(tmp_path_factory.mktemp("tiny"), 0, tokenizer)
