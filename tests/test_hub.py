"""Checks on how the hub is asked. No test uses the network."""

import functools
import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from eagle3kit import hub
from eagle3kit.errors import KitError

pytestmark = pytest.mark.usefixtures("offline")


def test_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        reachable, why = hub.reachable(timeout=0.3)
    assert not reachable
    assert "127.0.0.1" in why


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "nothing")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()


def test_hub_that_answers_with_an_error_is_reachable(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert hub.reachable() == (False, "HF_HUB_OFFLINE is set")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert hub.reachable() == (True, f"{endpoint} answers")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (LocalEntryNotFoundError("not cached"), "HF_HUB_OFFLINE is set"),
        (HFValidationError("Repo id must not end with a dot"), "the download failed (Repo id must not end with a dot)"),
        (TimeoutError("timed out"), "the download failed (timed out)"),
    ],
)
def test_a_config_that_is_not_to_be_had_is_explained(monkeypatch: pytest.MonkeyPatch, error: Exception, why: str) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert hub.config_file("owner/model.", "main", "target_model") == (None, why)


def test_a_folder_is_taken_as_it_is_and_anything_else_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str], etag_timeout: float) -> str:
        asked.append((name, revision, allow_patterns))
        if name == "owner/none":
            raise LocalEntryNotFoundError("no connection\nand a second line")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub.local_folder(tmp_path) == tmp_path
    assert not asked
    assert hub.local_folder("owner/drafter", "v1") == tmp_path / "snapshot"
    assert asked == [("owner/drafter", "v1", ["*.json", "*.safetensors"])]  # no pickled file, no code
    with pytest.raises(
        KitError, match="owner/none is neither a local folder nor to be had from the hub; seen no connection; fix"
    ):
        hub.local_folder("owner/none")
