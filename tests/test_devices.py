"""Checks on which GPUs are found, and on what is chosen where there are none."""

import subprocess

import pytest

from eagle3kit import devices
from eagle3kit.params import Params


def fake_smi(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr("subprocess.run", lambda command, **_: subprocess.CompletedProcess(command, 0, answer, ""))


TWO = "0, GPU-aa, NVIDIA H200, 143771, 9.0, 580.65.06\n1, GPU-bb, NVIDIA H200, 143771, 9.0, 580.65.06\n"


def test_gpus_from_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_smi(monkeypatch, TWO + "2, GPU-cc, NVIDIA H200, [N/A], 9.0, 580.65.06\n")
    found, _ = devices.gpus()
    assert [gpu.index for gpu in found] == [0, 1]
    assert found[0].memory_gb == pytest.approx(150.75, abs=0.01)
    assert devices.device(Params()) == ("cuda", "device: auto, and nvidia-smi lists 2 (NVIDIA H200)")
    assert devices.device(Params(device="cpu"))[0] == "cpu"


@pytest.mark.parametrize(("visible", "wanted"), [("1", [1]), ("GPU-aa", [0]), ("1,0", [0, 1]), ("", [])])
def test_visible_devices_count(monkeypatch: pytest.MonkeyPatch, visible: str, wanted: list[int]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    fake_smi(monkeypatch, TWO)
    assert [gpu.index for gpu in devices.gpus()[0]] == wanted


def test_no_nvidia_smi_means_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert devices.device(Params()) == ("cpu", "device: auto, and there is no nvidia-smi")
