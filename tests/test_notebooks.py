"""The notebooks as files: clean, inspectable, thin, and in agreement with the parameters."""

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest

from eagle3kit import plan, target
from eagle3kit.cli import STAGES
from eagle3kit.params import SPECS, load, load_file

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_LINES = 6


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def code_cells(path: Path) -> list[tuple[str, str]]:
    return [(cell["id"], "".join(cell["source"])) for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def parameters_cell(path: Path) -> str:
    tagged = [cell for cell in read(path)["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1
    return "".join(tagged[0]["source"])


def test_every_stage_has_its_notebook_and_no_other() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(STAGES)


GUARDS = {
    "00_preflight": ["doctor.require(found)", "reckoning.check()"],
    "02_build_k25_config": ["drafter_check.require(made.checks)"],
    "03_extract_hidden_states": [
        "before.check_disk()",
        "golden.require_uncached(server)",
        "plan.guarded(before, ",
        "masks.check(run, model)",
        "cost.check_disk()",
        "hidden_states.golden(",
        "golden.require_uncached(server)",
        "golden.cross_check(",
    ],
    "04_vocab_map": ["vocab.build(", "vocab.load_maps(run)"],
    "05_train": ["train.train(", "train.check(run, model)"],
    "06_evaluate": ["evaluate.measure(", "evaluate.conclude("],
}
"""Calls that stop a page, in their order: each is tested where it is written, and does nothing if no page makes it."""


def test_what_preflight_expects_is_what_the_plan_says() -> None:
    text = (ROOT / "notebooks" / "00_preflight.ipynb").read_text()
    (found,) = re.findall(r"For `params/local.yaml` about ([\d,]+) prompts, ([\d,]+) tokens and ([\d.]+) GB of disk", text)
    params = load_file(ROOT / "params" / "local.yaml")
    reckoned = plan.plan(params, target.describe(params.target_model, params.target_revision)[0])
    told = [float(number.replace(",", "")) for number in found]
    wanted = [reckoned.value("prompts"), reckoned.value("tokens"), reckoned.value("hidden_states.bytes") / 1e9]
    wanted[2] += reckoned.value("checkpoints.bytes") / 1e9
    assert told == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("stage", GUARDS)
def test_every_guard_stands_in_its_page(stage: str) -> None:
    code = "\n".join(source for _, source in code_cells(ROOT / "notebooks" / f"{stage}.ipynb"))
    for guard in GUARDS[stage]:
        assert guard in code
        code = code.partition(guard)[2]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_is_valid_and_stripped(self, path: Path) -> None:
        nbformat.validate(nbformat.read(path, as_version=4))
        cells = read(path)["cells"]
        assert all(cell.get("id") for cell in cells)
        assert len({cell["id"] for cell in cells}) == len(cells)
        assert not [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")]

    def test_code_is_thin(self, path: Path) -> None:
        for identity, source in code_cells(path):
            if source == parameters_cell(path):
                continue
            assert not re.search(r"^\s*(!|%|def |class |async def )", source, re.MULTILINE), identity
            lines = [line for line in source.splitlines() if line.strip()]
            assert len(lines) <= MAX_LINES, (identity, len(lines))

    def test_prose_outweighs_code(self, path: Path) -> None:
        cells = read(path)["cells"]
        prose = sum(len("".join(cell["source"])) for cell in cells if cell["cell_type"] == "markdown")
        code = sum(len(source) for _, source in code_cells(path) if source != parameters_cell(path))
        assert prose > code

    def test_papermill_reads_every_parameter(self, path: Path) -> None:
        declared = re.findall(r"^(\w+):", parameters_cell(path), re.MULTILINE)
        inferred = papermill.inspect_notebook(str(path))
        assert list(inferred) == declared
        assert all(parameter["help"] for parameter in inferred.values())

    def test_parameters_are_known_with_their_defaults(self, path: Path) -> None:
        space: dict[str, Any] = {}
        exec(parameters_cell(path), space)  # noqa: S102 - our own file
        first, *others = space["__annotations__"]
        assert first == "params_file"
        for name in others:
            assert space[name] == SPECS[name].default, name

    def test_in_jupyterlab_it_shows_the_run_of_make_run(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(path.parent)
        space: dict[str, Any] = {}
        exec(parameters_cell(path), space)  # noqa: S102 - our own file
        here, there = load(space), load_file(ROOT / "params" / "local.yaml")
        assert here.interactive
        assert here.model_copy(update={"interactive": False}) == there

    @pytest.mark.parametrize("file", sorted((ROOT / "params").glob("*.yaml")), ids=lambda file: file.stem)
    def test_every_params_file_gives_what_it_declares(self, path: Path, file: Path) -> None:
        params = load_file(file)
        for name in re.findall(r"^(\w+):", parameters_cell(path), re.MULTILINE)[1:]:
            assert isinstance(getattr(params, name), bool | int | float | str | list)
        assert params.interactive is False


CONTROLS = """
from eagle3kit import widgets
options = {"a": 1, "b": 2, "c": 3}
widgets.choose(options, print, True)
widgets.choose_two(options, lambda one, other: widgets.table([{"one": one, "other": other}]), True)
with widgets.LivePlot(True, total=2, every_s=0) as live:
    live.update([{"split": "train", "step": 1, "loss": 2.0, "acc": [0.1]}])
    live.update([{"split": "train", "step": 2, "loss": 1.0, "acc": [0.2]}])
print("after the last control")
"""


def test_controls_render_and_never_wait_where_nobody_can_use_them(tmp_path: Path) -> None:
    """`interactive: true` under papermill: a mistake that costs a reader nothing but the headless form of the controls."""
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "", "language": "python"}})
    notebook.cells = [nbformat.v4.new_code_cell(CONTROLS)]
    nbformat.write(notebook, tmp_path / "in.ipynb")
    made = papermill.execute_notebook(tmp_path / "in.ipynb", tmp_path / "out.ipynb", execution_timeout=240, progress_bar=False)
    assert any("after the last control" in output.get("text", "") for output in made.cells[0].outputs)
    kinds = [kind for output in made.cells[0].outputs for kind in output.get("data", {})]
    assert kinds.count("application/vnd.jupyter.widget-view+json") == 2
    assert "image/png" in str(kinds) or "text/html" in kinds


def test_notebooks_use_no_other_controls() -> None:
    uses = [
        line for path in NOTEBOOKS for _, source in code_cells(path) for line in source.splitlines() if "p.interactive" in line
    ]
    assert uses
    assert all(re.search(r"widgets\.(choose|choose_two|LivePlot)\(", line) for line in uses)
    assert not [path.name for path in NOTEBOOKS if "ipywidgets" in path.read_text() or "input(" in path.read_text()]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_section_with_something_to_do_does_it_before_the_next_one_begins(path: Path) -> None:
    """A section that announces `*Do.*` and has no code was torn from it: its pictures would stand under another heading."""
    page = "\n".join("[code]" if cell["cell_type"] == "code" else "".join(cell["source"]) for cell in read(path)["cells"])
    torn = [part.partition("\n")[0] for part in page.split("\n## ")[1:] if "*Do.*" in part and "[code]" not in part]
    assert not torn


def test_a_share_is_written_the_same_way_everywhere() -> None:
    """`40.4 %`, as the prose and the report have it, and never `40.4%` beside it."""
    squeezed = {path.stem for path in (ROOT / "eagle3kit").glob("*.py") if re.search(r"\.\d%\}", path.read_text())}
    assert not squeezed
