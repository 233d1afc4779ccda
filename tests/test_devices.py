"""Checks on which GPUs are found, and on what is chosen where there are none."""

import subprocess

import pytest

from eagle3kit import devices
from eagle3kit.errors import KitError
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
    assert devices.device(Params()) == ("cuda", "cuda, by device: auto: nvidia-smi lists 2 (NVIDIA H200)")
    assert devices.device(Params(device="cpu"))[0] == "cpu"


@pytest.mark.parametrize(("visible", "wanted"), [("1", [1]), ("GPU-aa", [0]), ("1,0", [0, 1]), ("", [])])
def test_visible_devices_count(monkeypatch: pytest.MonkeyPatch, visible: str, wanted: list[int]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    fake_smi(monkeypatch, TWO)
    assert [gpu.index for gpu in devices.gpus()[0]] == wanted


def test_no_nvidia_smi_means_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert devices.device(Params()) == ("cpu", "cpu, by device: auto: there is no nvidia-smi")


ONLINE = Params(extraction_mode="online", device="cuda", gpu_count=8, train_processes=2, serve_tensor_parallel=4)


@pytest.mark.parametrize(
    ("visible", "trainer", "server"),
    [("0,1,2,3,4,5,6,7", "0,1", "2,3,4,5"), (" 7, 5,3,GPU-aa,1,0", "7,5", "3,GPU-aa,1,0"), (None, "0,1", "2,3,4,5")],
)
def test_the_trainer_has_the_first_gpus_and_its_server_the_next(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, trainer: str, server: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    fake_smi(monkeypatch, "".join(f"{i}, GPU-{i}, NVIDIA H200, 143771, 9.0, 580.65.06\n" for i in range(8)))
    assert devices.divide(ONLINE) == (trainer, server)


def test_too_few_gpus_for_both_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    with pytest.raises(KitError, match=r"too few GPUs .*seen 5; wanted 2 \(train_processes\) and 4 \(serve_tensor_parallel\)"):
        devices.divide(ONLINE)


def test_gpus_at_once_are_both_online_and_the_larger_offline() -> None:
    assert (devices.at_once(ONLINE), devices.at_once(ONLINE.replace(extraction_mode="offline"))) == (6, 4)
