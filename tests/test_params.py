"""Parameters: every bad input is one line that names the place and the remedy; every value knows where it came from."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from eagle3kit import params as kit
from eagle3kit.params import RULES, SPECS, ParamError, Params, Spec, load, load_file

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted((ROOT / "params").glob("*.yaml"))

Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a params file and return its path."""

    def _write(content: str | bytes) -> Path:
        path = tmp_path / "mine.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return _write


def refused(call: Callable[[], object]) -> str:
    """The message of the error that `call` raises; checks that it is one line, in the notebook too."""
    with pytest.raises(ParamError) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    assert caught.value._render_traceback_() == [f"ParamError: {message}"]
    return message


# --- files ---------------------------------------------------------------------------------------------------------------------

BAD_FILES: dict[str, tuple[str | bytes, list[str]]] = {
    "unknown key": ("seed: 1\nlerning_rate: 3e-4\n", ["mine.yaml:2", "lerning_rate", "write train_lr"]),
    "two unknown keys": (
        "epochs: 1\nseed: 1\neval_kk: 3\n",
        ["mine.yaml:1: unknown parameter epochs", "mine.yaml:3: unknown parameter eval_kk", "write train_epochs", "write eval_k"],
    ),
    "unknown key like nothing": ("qqqqqqqqqqqqqq: 1\n", ["mine.yaml:1", "remove qqqqqqqqqqqqqq", "`eagle3kit params`"]),
    "another program's name": ("num_speculative_tokens: 3\n", ["write eval_k"]),
    "with dashes": ("train-epochs: 3\n", ["write train_epochs for train-epochs"]),
    "nested": ("training:\n  train_lr: 1e-3\n", ["mine.yaml:1", "training", "flat"]),
    "nested in a known key": ("train_lr: {peak: 1e-3}\n", ["mine.yaml:1", "train_lr", "flat"]),
    "params_file inside": ("params_file: x.yaml\n", ["mine.yaml:1", "remove params_file"]),
    "no value": ("seed: 1\ntrain_lr:\n", ["mine.yaml:2", "train_lr", "None", "leave it out for its default 0.001"]),
    "null": ("train_epochs: null\n", ["mine.yaml:1", "train_epochs has the wrong type"]),
    "text for a number": (
        "\n\ntrain_epochs: many\n",
        ["mine.yaml:3: train_epochs has the wrong type", "'many'", "whole number", "6"],
    ),
    "fraction for a whole number": ("train_epochs: 1.5\n", ["train_epochs has the wrong type", "1.5"]),
    "truth value for a number": ("train_epochs: yes\n", ["train_epochs has the wrong type", "True"]),
    "number for a truth value": ("force: 1\n", ["force has the wrong type", "true or false"]),
    "number for text": ("run_name: 007\n", ["run_name has the wrong type", "quotes", "-r run_name"]),
    "truth value for text": ("train_scheduler: no\n", ["train_scheduler has the wrong type", "one of cosine, linear, none"]),
    "list for a number": ("eval_k: [3, 5]\n", ["eval_k has the wrong type", "[3, 5]"]),
    "number for a list": ("aux_layers: 2\n", ["aux_layers has the wrong type", "a list of whole numbers"]),
    "text in a list of numbers": ("aux_layers: [2, x, 27]\n", ["aux_layers has the wrong type"]),
    "truth value in a list of texts": ("serve_extra_args: [--a, true]\n", ["serve_extra_args has the wrong type"]),
    "below range": ("train_epochs: 0\n", ["mine.yaml:1: train_epochs is out of range", "seen 0", "at least 1"]),
    "above range": ("seed: 1\ndata_heldout_share: 0.6\n", ["mine.yaml:2: data_heldout_share", "above 0 and at most 0.5"]),
    "warm-up of the whole run": ("train_warmup_share: 1.0\n", ["train_warmup_share is out of range", "below 1"]),
    "not a number": ("train_lr: .nan\n", ["train_lr is out of range", "nan"]),
    "infinite": ("train_save_every: .inf\n", ["train_save_every is out of range", "inf"]),
    "too large for a float": ("train_lr: 1e999\n", ["train_lr is out of range"]),
    "unknown choice": (
        "train_optimizer: sgd\n",
        ["mine.yaml:1: train_optimizer is not one of the choices", "'sgd'", "adamw, muon"],
    ),
    "path as a run's name": ("run_name: ../elsewhere\n", ["run_name is not a legal value", "not ending in a dot"]),
    "blank text": ("target_model: ' '\n", ["target_model is not a legal value"]),
    "control character": ('data_source: "a\\nb"\n', ["data_source is not a legal value"]),
    "contradiction": (
        "eval_max_tokens: 600\nseed: 1\nserve_max_model_len: 512\n",
        ["mine.yaml:1, ", "mine.yaml:3: ", "eval_max_tokens and serve_max_model_len contradict", "=600", "=512"],
    ),
    "duplicate": ("train_lr: 1e-3\nseed: 1\ntrain_lr: 1e-4\n", ["mine.yaml:3: train_lr is given twice", "mine.yaml:1", "remove"]),
    "list at the top": ("- train_lr\n", ["mine.yaml:1", "a list", "train_epochs: 6"]),
    "single value at the top": ("# comment\ntrain_lr\n", ["mine.yaml:2", "a single value"]),
    "list as a key": ("? [a, b]\n: 1\n", ["mine.yaml:1", "unknown parameter"]),
    "two documents": ("seed: 1\n---\nseed: 2\n", ["mine.yaml:2", "not YAML"]),
    "unclosed": ("seed: 1\naux_layers: [1, 2\n", ["mine.yaml:3", "not YAML"]),
    "tab": ("seed: 1\n\tforce: true\n", ["mine.yaml:2", "not YAML"]),
    "python object": ("seed: !!python/object/apply:os.getpid []\n", ["mine.yaml:1", "not YAML"]),
    "bad UTF-8": (b"seed: 1\nrun_name: \xff\n", ["mine.yaml:2", "UTF-8"]),
    "control byte": (b"seed: 1\nrun_name: a\x00\n", ["mine.yaml:2", "not YAML"]),
    "a number of many digits": ("seed: 1\ntrain_epochs: " + "9" * 5000 + "\n", ["mine.yaml:2"]),
    "deep nesting": ("seed: 1\naux_layers: " + "[" * 1000 + "\n", ["mine.yaml"]),
}


@pytest.mark.parametrize(("content", "parts"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_file_is_one_line(write: Write, content: str | bytes, parts: list[str]) -> None:
    """Each kind of mistake: one line with the place, the key and the remedy."""
    message = refused(lambda: load_file(write(content)))
    assert "mine.yaml" in message
    assert len(message) < 1000
    for part in parts:
        assert part in message


def test_missing_file_names_its_neighbours(write: Write) -> None:
    """A wrong path: the files that are there are named; a folder is not taken for a file."""
    path = write("")
    message = refused(lambda: load_file(path.with_name("min.yaml")))
    assert "min.yaml: there is no such params file" in message
    assert str(path) in message
    assert "check the path" in refused(lambda: load_file("nowhere/at/all.yaml"))
    assert "cannot be read" in refused(lambda: load_file(path.parent))
    assert "cannot be read" in refused(lambda: load_file("a\0b"))


@pytest.mark.parametrize("content", ["", "# only a comment\n", "---\n", "\ufeff", "{}"])
def test_empty_file_is_all_defaults(write: Write, content: str) -> None:
    """An empty file is legal."""
    loaded = load_file(write(content))
    assert loaded == Params() == load_file(None)
    assert set(loaded.origins.values()) == {"default"}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.text(alphabet="seed_flor:,[]{}#&*!|>'\"%@`-? \n\t0189.~é", max_size=60).map(str.encode))
def test_any_bytes_load_or_fail_in_one_line(write: Write, content: bytes) -> None:
    """Whatever stands in a file, nothing but a one-line error comes out."""
    try:
        load_file(write(content))
    except ParamError as error:
        assert len(str(error).splitlines()) == 1


def test_windows_file_and_dates(write: Write) -> None:
    """A byte-order mark and CRLF do no harm, and a date is a legal name of a run, as it is for papermill."""
    loaded = load_file(write("\ufeffrun_name: 2026-01-31\r\nseed: 4\r\n"))
    assert (loaded.run_name, loaded.seed) == ("2026-01-31", 4)


# --- types ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given_value", "value"),
    [
        ("train_lr", "5e-5", 5e-5),
        ("train_lr", "0.1", 0.1),
        ("gpu_price_per_hour", 6, 6.0),
        ("train_epochs", "64", 64),
        ("train_epochs", 64.0, 64),
        ("train_pack_tokens", "1e3", 1000),
        ("force", "true", True),
        ("force", "False", False),
        ("interactive", "no", False),
        ("aux_layers", "2 15 27", [2, 15, 27]),
        ("aux_layers", "2,15,27", [2, 15, 27]),
        ("aux_layers", "[2, 15, 27]", [2, 15, 27]),
        ("aux_layers", (2, "15", 27.0), [2, 15, 27]),
        ("aux_layers", "", []),
        ("serve_extra_args", "--a 'b c' --d=1", ["--a", "b c", "--d=1"]),
        ("serve_extra_args", ["--max-num-batched-tokens", 8192], ["--max-num-batched-tokens", "8192"]),
        ("serve_extra_args", '["--a", "b"]', ["--a", "b"]),
        ("train_scheduler", "none", "none"),
        ("run_name", "a" * 64, "a" * 64),
    ],
)
def test_coercion(name: str, given_value: object, value: object) -> None:
    """Text, as YAML 1.1 and papermill hand it over, becomes the declared type."""
    found = getattr(Params(**{name: given_value}), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a\\b", "dot.", "a b", "ä", "a\n", "a" * 65, "-x"])
def test_run_name_is_a_folder_name(name: str) -> None:
    """A run's name that is no portable folder name is refused."""
    assert "run_name is not a legal value" in refused(lambda: Params(run_name=name))


@pytest.mark.parametrize(("name", "value"), [("aux_layers", "[2, 15"), ("serve_extra_args", "'open"), ("aux_layers", "{a: 1}")])
def test_broken_list_text(name: str, value: str) -> None:
    """Text that looks like a list and is none."""
    assert f"{name} has the wrong type" in refused(lambda: Params(**{name: value}))


def test_frozen_and_unknown() -> None:
    """Parameters cannot change after loading, and an unknown keyword is the kit's error too."""
    p = Params()
    with pytest.raises(Exception, match="frozen"):
        p.seed = 3  # type: ignore[misc]
    assert "write train_lr" in refused(lambda: Params(learning_rate=1e-3))
    p.aux_layers.append(1)
    assert Params().aux_layers == []


# --- rules ---------------------------------------------------------------------------------------------------------------------

VIOLATIONS: dict[str, dict[str, Any]] = {
    "answer_fits_conversation": {"data_max_response_tokens": 256, "data_seq_length": 256},
    "conversation_fits_pack": {"data_seq_length": 512, "train_pack_tokens": 256},
    "conversation_fits_server": {"data_seq_length": 2048, "train_pack_tokens": 2048, "serve_max_model_len": 1024},
    "evaluation_fits_server": {"eval_max_tokens": 1024, "serve_max_model_len": 1024},
    "fp8_passes_golden": {"extraction_storage": "fp8"},
    "online_asks_vllm": {"extraction_mode": "online", "extraction_engine": "transformers"},
    "online_fits_gpus": {"extraction_mode": "online", "gpu_count": 8, "serve_tensor_parallel": 8},
    "speed_has_prompts": {"eval_speed_concurrency": 16, "eval_speed_prompts": 8},
    "speed_fits_server": {"eval_speed_concurrency": 8, "serve_max_num_seqs": 4},
    "sweep_loads_fit_server": {"eval_sweep": True, "serve_max_num_seqs": 8},
    "sweep_draft_lengths": {"eval_sweep": True, "eval_sweep_k": [3, 3]},
    "sweep_has_the_drafter": {"eval_sweep": True, "eval_sweep_k": [1, 5]},
    "sweep_repeats": {"eval_sweep": True, "eval_repeats": 2},
    "cpu_without_gpus": {"device": "cpu", "gpu_count": 1},
    "cuda_with_gpus": {"device": "cuda", "gpu_count": 0},
    "cpu_without_tensor_parallel": {"device": "cpu", "serve_tensor_parallel": 2},
    "tensor_parallel_fits_gpus": {"device": "cuda", "gpu_count": 4, "serve_tensor_parallel": 8},
    "processes_fit_gpus": {"train_processes": 2, "gpu_count": 0},
    "kv_heads_divide_heads": {"drafter_heads": 9, "drafter_kv_heads": 2},
    "one_norm_before_fc": {"drafter_fc_norm": True, "drafter_norm_before_fc": True},
    "heads_divide_over_gpus": {"drafter_heads": 12, "serve_tensor_parallel": 8, "gpu_count": 8},
    "aux_layers_rise": {"aux_layers": [2, 27, 15]},
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_refuses_its_violation(rule: kit.Rule) -> None:
    """Every rule has an example that breaks it alone, and its error names all parameters concerned."""
    message = refused(lambda: Params(**VIOLATIONS[rule.name]))
    assert rule.description in message
    assert f"fix: {rule.fix}" in message
    for name in rule.parameters:
        assert name in SPECS
        assert f"{name}=" in message


def test_rules_are_all_covered() -> None:
    """No violation without its rule, and the other way round."""
    assert set(VIOLATIONS) == {rule.name for rule in RULES}
    assert len(RULES) == len(VIOLATIONS)


@pytest.mark.parametrize("layers", [[2], [2, 15], [2, 2, 27], [-1, 2, 3], [1, 2, 3, 4], [27, 15, 2]])
def test_aux_layers(layers: list[int]) -> None:
    """Three layers that rise, or none."""
    assert "aux_layers is not a legal value" in refused(lambda: Params(aux_layers=layers))


def test_auto_device_may_have_gpus() -> None:
    """`auto` decides on the machine, so both kinds of machine are legal."""
    assert Params(device="auto", gpu_count=8, serve_tensor_parallel=8, train_processes=8, train_optimizer="muon").gpu_count == 8


# --- shipped files -------------------------------------------------------------------------------------------------------------


def test_shipped_files() -> None:
    """The four machines of the README."""
    assert [path.stem for path in SHIPPED] == ["b300", "local", "rtx6000", "tiny"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_loads_and_is_complete(path: Path) -> None:
    """A shipped file says everything about its run: no default of a later version can change it unseen."""
    p = load_file(path)
    missing = [name for name in SPECS if p.origin(name) == "default"]
    assert missing == ["force"], f"{path.name} leaves out {missing}"
    assert p.run_name == path.stem
    assert p.interactive is False
    assert p.trust_remote_code is False
    on_gpu = path.stem in ("rtx6000", "b300")
    assert p.device == ("cuda" if on_gpu else "cpu")
    assert (p.hardware == "cpu") is not on_gpu
    assert all(len(line) <= 130 for line in path.read_text().splitlines())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_file_means_the_same_to_papermill(path: Path) -> None:
    """papermill reads the file with its own loader and writes it into the kernel: the same values arrive."""
    values = yaml.safe_load(path.read_text())
    assert load({"In": [""], **values}) == load_file(path)


def test_local_is_a_small_headless_run_on_a_cpu() -> None:
    p = load_file(ROOT / "params" / "local.yaml")
    assert (p.target_model, p.device, p.interactive, p.gpu_count) == ("smollm2-135m", "cpu", False, 0)


# --- origins -------------------------------------------------------------------------------------------------------------------


def test_origins_of_a_file_with_overrides(write: Write) -> None:
    """File and command line, also where the value equals the default."""
    p = load_file(write("train_lr: 5e-5\nseed: 0\neval_k: 5\n"), {"eval_k": "7", "aux_layers": "1 2 3"})
    assert (p.train_lr, p.eval_k, p.aux_layers) == (5e-5, 7, [1, 2, 3])
    origins = {name: p.origin(name) for name in ("train_lr", "seed", "eval_k", "aux_layers", "force")}
    assert origins == {
        "train_lr": "file",
        "seed": "file",
        "eval_k": "command line",
        "aux_layers": "command line",
        "force": "default",
    }
    assert p.params_file.endswith("mine.yaml")
    assert "no_such" in refused(lambda: p.origin("no_such"))


def test_bad_override_names_the_command_line(write: Write) -> None:
    """A wrong override does not blame the file."""
    path = write("train_lr: 5e-5\n")
    assert refused(lambda: load_file(path, {"train_lr": "fast"})).startswith("command line: train_lr has the wrong type")
    assert refused(lambda: load_file(path, {"train_rl": 1})).startswith("command line: unknown parameter train_rl")
    message = refused(lambda: load_file(path, {"data_seq_length": 4096}))
    assert message.startswith("command line: data_seq_length and train_pack_tokens contradict")


def run_cell(source: str, space: dict[str, Any]) -> None:
    """Run a cell as a kernel does: its annotations land in the globals too."""
    exec(source, space)  # noqa: S102


def notebook(cell: str, injected: dict[str, object] | None = None, later: str = "") -> dict[str, Any]:
    """The globals of a kernel that ran a parameters cell, and papermill's injected cell where there is one."""
    cells = [cell]
    if injected is not None:
        cells.append("# Parameters\n" + "".join(f"{name} = {value!r}\n" for name, value in injected.items()))
    space: dict[str, Any] = {"__name__": "__main__", "In": ["", *cells], "Out": {}, "exit": object(), "quit": object(), "_i": "x"}
    for source in [*cells, later]:
        run_cell(source, space)
    return space


CELL = "import eagle3kit.errors\ntrain_lr: float = 1e-3  # learning rate\neval_k: int = 3\n"


def test_notebook_alone() -> None:
    """In JupyterLab: defaults, and what the person wrote."""
    p = load(notebook(CELL.replace("1e-3", "2e-3")))
    assert p.train_lr == 2e-3
    assert {name for name, origin in p.origins.items() if origin != "default"} == {"train_lr"}
    assert p.origin("train_lr") == "notebook"
    assert p.params_file == ""


def test_papermill_without_params_file() -> None:
    """`papermill -f` tells the kernel no file: its values are the command line's, the notebook's stay the notebook's."""
    p = load(notebook(CELL.replace("3\n", "4\n"), {"train_lr": "5e-5", "seed": 0, "run_name": "x"}))
    assert (p.train_lr, p.eval_k) == (5e-5, 4)
    origins = {name: p.origin(name) for name in ("train_lr", "seed", "run_name", "eval_k", "force")}
    assert origins == {
        "train_lr": "command line",
        "seed": "command line",
        "run_name": "command line",
        "eval_k": "notebook",
        "force": "default",
    }


def test_round_trip_through_papermill(write: Write) -> None:
    """What the command line loads, a notebook finds again: values, origins and the file."""
    sent = load_file(write("train_lr: 5e-5\neval_k: 3\ninteractive: false\n"), {"seed": "7"})
    p = load(notebook(CELL, sent.notebook_values()))
    assert p == sent
    assert p.origins == sent.origins
    assert p.params_file == sent.params_file


def test_params_file_alone_loads_the_file(write: Write) -> None:
    """`papermill -p params_file FILE`, and an override that equals the default still wins over the file."""
    path = str(write("train_lr: 5e-5\neval_k: 5\ninteractive: false\n"))
    p = load(notebook(CELL, {"params_file": path, "eval_k": 3}))
    assert (p.train_lr, p.eval_k, p.interactive) == (5e-5, 3, False)
    assert (p.origin("train_lr"), p.origin("eval_k"), p.origin("interactive")) == ("file", "command line", "file")


def test_params_file_written_in_the_notebook(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """In JupyterLab a file fills what the cell leaves at its default; the person in front keeps the controls."""
    path = write("train_lr: 5e-5\neval_k: 5\ninteractive: false\n")
    (path.parent / "notebooks").mkdir()
    monkeypatch.chdir(path.parent / "notebooks")
    p = load(notebook(CELL.replace("3\n", "4\n") + "params_file: str = 'mine.yaml'\n"))
    assert (p.train_lr, p.eval_k, p.interactive) == (5e-5, 4, True)
    assert (p.origin("train_lr"), p.origin("eval_k"), p.origin("interactive")) == ("file", "notebook", "default")
    assert load(notebook(CELL + "params_file: str = ''\n")) == Params()


def test_papermills_values_stand_alone_where_papermill_names_no_file(write: Write) -> None:
    """The shipped notebooks name a file of their own: `papermill -f other.yaml` must not be filled up from it."""
    named = CELL + f"params_file: str = {str(write('seed: 7'))!r}\n"
    assert load(notebook(named)).seed == 7
    assert load(notebook(named, {"eval_k": 5})) == Params(eval_k=5)


def test_params_file_that_is_wrong(write: Write) -> None:
    """A missing or bad file behind `params_file` is an error with its line, not a silent default."""
    assert "there is no such params file" in refused(lambda: load(notebook(CELL + "params_file = 'no/where.yaml'\n")))
    assert "params_file has the wrong type" in refused(lambda: load(notebook(CELL + "params_file = 3\n")))
    path = str(write("seed: 1\ntrain_lr: fast\n"))
    assert "mine.yaml:2: train_lr has the wrong type" in refused(lambda: load(notebook(CELL, {"params_file": path})))
    path = str(write("seed: 1\ntrain_rl: 1\n"))
    assert "mine.yaml:2: unknown parameter train_rl" in refused(lambda: load(notebook(CELL, {"params_file": path})))


@pytest.mark.parametrize(
    ("name", "value"),
    [("lerning_rate", 3), ("Train_lr", 3), ("eval_kk", None), ("train_lrs", [1]), ("epochs", "3"), ("warm", 0.1)],
)
def test_unknown_name_from_papermill(name: str, value: object) -> None:
    """papermill logs a line and goes on; the notebook does not."""
    message = refused(lambda: load(notebook(CELL, {name: value})))
    assert f"command line: unknown parameter {name}" in message
    near = kit.nearest(name)
    assert (f"write {near} for {name}" if near else f"remove {name}") in message


def test_unknown_names_in_the_notebook() -> None:
    """A typo in the parameters cell, and a nested group."""
    message = refused(lambda: load(notebook("trian_lr: float = 1e-3\n")))
    assert message.startswith("parameters cell: unknown parameter trian_lr")
    assert "write train_lr for trian_lr, then restart the kernel" in message
    assert "flat" in refused(lambda: load(notebook(CELL, {"training": {"lr": 1}})))


@pytest.mark.parametrize(
    ("value", "part"), [(None, "give train_lr a value"), ({"a": 1}, "flat"), ("fast", "for example"), (True, "True")]
)
def test_bad_values_in_a_notebook(value: object, part: str) -> None:
    """None, a dict, text and a truth value where a number belongs."""
    message = refused(lambda: load(notebook(CELL, {"train_lr": value})))
    assert message.startswith("command line: train_lr has the wrong type")
    assert part in message
    message = refused(lambda: load(notebook(f"train_lr: float = {value!r}\n")))
    assert message.startswith("parameters cell: train_lr has the wrong type")


def test_stepping_back_in_jupyterlab() -> None:
    """Once loaded, the notebook's own variables are not mistaken for parameters; the parameters cell still is read strictly."""
    space = notebook(CELL)
    space["p"] = load(space)
    run_cell("rows = [1, 2]\nal = 1.6\nfacts = {}\n", space)
    run_cell(CELL.replace("1e-3", "2e-3"), space)
    assert load(space).train_lr == 2e-3
    run_cell("train_lrr: float = 3e-3\n", space)
    assert "parameters cell: unknown parameter train_lrr" in refused(lambda: load(space))


def test_injected_value_changed_by_hand() -> None:
    """Somebody opens an executed notebook and changes a value: it is the notebook's then."""
    space = notebook(CELL, {"train_lr": 5e-5}, later="train_lr: float = 7e-5\n")
    assert load(space).origin("train_lr") == "notebook"


def test_names_of_ipython_and_papermill_are_no_parameters() -> None:
    """What a fresh kernel and papermill's --inject-paths put into the globals is left alone."""
    assert load(notebook(CELL, {"PAPERMILL_INPUT_PATH": "a", "PAPERMILL_OUTPUT_PATH": "b"})) == Params()
    assert load({}) == Params()
    assert load({"In": ["# Parameters\nx = = 1", None], "__annotations__": None}) == Params()


KERNEL = """
import sys
sys.modules["rfc3987_syntax"] = None  # builds a grammar for seconds when jsonschema imports it, for a check nobody asks for
import nbformat, yaml
from IPython.core.interactiveshell import InteractiveShell
from papermill.parameterize import parameterize_notebook
from traitlets.config import Config

cells = [nbformat.v4.new_code_cell(source) for source in (PARAMETERS, LOAD, AGAIN)]
for cell in cells:
    cell.metadata["tags"] = ["parameters"] if cell is cells[0] else []
kernelspec = {"name": "python3", "language": "python", "display_name": "Python 3"}
notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernelspec, "papermill": {}})
given = yaml.safe_load("{train_lr: 5e-5, seed: 0, aux_layers: [1, 2, 3]}")
shell = InteractiveShell(config=Config({"HistoryManager": {"hist_file": ":memory:"}}))
for cell in parameterize_notebook(notebook, given).cells:
    shell.run_cell(cell.source, store_history=True)
"""


def test_real_papermill_and_ipython(tmp_path: Path) -> None:
    """The cell that papermill writes, in the shell behind every kernel: the history shows what was injected."""
    sources = {
        "PARAMETERS": "train_lr: float = 1e-3  # learning rate\neval_k: int = 4",
        "LOAD": "from eagle3kit.params import load\np = load(globals())\n"
        "print(p.train_lr, [p.origin(name) for name in ('train_lr', 'eval_k', 'seed', 'aux_layers', 'force')])",
        "AGAIN": "lerning_rate: float = 3\np = load(globals())",
    }
    code = "".join(f"{name} = {source!r}\n" for name, source in sources.items()) + KERNEL
    env = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, check=True)
    printed = done.stdout.splitlines()
    assert printed[0] == "5e-05 ['command line', 'notebook', 'command line', 'command line', 'default']"
    # The error stands alone: no traceback, one line.
    assert printed[1].startswith("ParamError: parameters cell: unknown parameter lerning_rate")
    assert len(printed) == 2


# --- the model -----------------------------------------------------------------------------------------------------------------


def values_of(spec: Spec) -> st.SearchStrategy[Any]:
    """Legal values of one parameter."""
    low = spec.limits.get("ge", spec.limits.get("gt"))
    high = spec.limits.get("le", spec.limits.get("lt"))
    if spec.kind == "int":
        top = int(high) - ("lt" in spec.limits) if high is not None else 2**40
        return st.integers(int(low or 0), top) | st.integers(int(low or 0), min(top, int(low or 0) + 16))
    if spec.kind == "float":
        return st.floats(low, high, exclude_min="gt" in spec.limits, exclude_max="lt" in spec.limits, allow_infinity=False)
    text = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20) | st.sampled_from(
        ["1e3", "no", "007", "~"]
    )
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "bool": st.booleans(),
        "choice": st.sampled_from(spec.choices or ("",)),
        "str": text if spec.name != "run_name" else st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}[a-z0-9]\Z"),
        "list[int]": st.just([]) | st.lists(st.integers(0, 99), min_size=3, max_size=3, unique=True).map(sorted),
        "list[str]": st.lists(text, max_size=3),
    }
    return kinds[spec.kind]


@st.composite
def legal_values(draw: st.DrawFn) -> dict[str, Any]:
    """Values of a few parameters that do not contradict each other."""
    names = draw(st.lists(st.sampled_from(sorted(SPECS)), max_size=8, unique=True))
    values = {name: draw(values_of(SPECS[name])) for name in names}
    try:
        Params(**values)
    except ParamError as error:
        assume("contradict" not in str(error))
        raise
    return values


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
)
@given(legal_values())
def test_dump_and_load(write: Write, values: dict[str, Any]) -> None:
    """Any legal parameters survive a params file and a notebook."""
    p = Params(**values)
    whole = load_file(write(yaml.safe_dump(p.model_dump(), allow_unicode=True)))
    assert whole == p
    part = load_file(write(yaml.safe_dump(values)))
    assert part == p
    assert {name for name in SPECS if part.origin(name) == "file"} == set(values)
    again = load(notebook("", part.notebook_values()))
    assert (again, again.origins) == (part, part.origins)


def test_every_parameter_is_declared_in_full() -> None:
    """Group, description and a default that is legal; groups in the declared order, names in no group twice."""
    assert [name for group in kit.GROUPS for name in kit.parameters_of(group)] == list(SPECS)
    for spec in SPECS.values():
        assert spec.group in kit.GROUPS
        assert spec.description
        assert len(spec.description) <= 130
        assert not spec.description.endswith(".")
        assert spec.wanted
    assert Params(**kit.defaults()) == Params()
    assert "unknown group" in refused(lambda: kit.parameters_of("trainning"))


def test_rows_and_table(write: Write) -> None:
    """The rows behind `eagle3kit params`, and their text."""
    p = load_file(write("train_lr: 5e-5\n"))
    row = next(row for row in kit.schema_rows(p) if row.name == "train_lr")
    assert row[:5] == ("train_lr", 5e-5, "file", 1e-3, "")
    assert row.group == "training"
    line = next(line for line in kit.table(p).splitlines() if line.startswith("  train_lr "))
    assert "5.0e-05" in line
    assert "file" in line
    assert "default 0.001" in line
    text = kit.table()
    assert all(f"  {name} " in text for name in SPECS)
    assert all(f"{group}: " in text for group in kit.GROUPS)
    long = kit.table(Params(serve_extra_args=["x" * 50] * 5))
    assert "x" * 50 + ", " in long


def test_subset_and_replace() -> None:
    """A stage's digest takes a few values in a fixed order; a what-if is checked again."""
    p = Params(train_lr=2e-3, aux_layers=[1, 2, 3])
    assert list(p.subset(["train_lr", "aux_layers"]).items()) == [("train_lr", 2e-3), ("aux_layers", [1, 2, 3])]
    p.subset(["aux_layers"])["aux_layers"].append(4)
    assert p.aux_layers == [1, 2, 3]
    assert "unknown parameter nope" in refused(lambda: p.subset(["nope"]))
    other = p.replace(eval_k=5)
    assert (other.eval_k, other.train_lr, other.origin("eval_k"), other.origin("seed")) == (5, 2e-3, "notebook", "default")
    assert "contradict" in refused(lambda: p.replace(data_seq_length=9999))


def test_describe() -> None:
    """What a run keeps: every parameter, ready for JSON."""
    kept = json.loads(json.dumps(Params(train_lr=2e-3).describe()))
    assert list(kept) == list(SPECS)
    assert kept["train_lr"] == {"value": 2e-3, "unit": "", "origin": "notebook"}
    assert kept["eval_k"] == {"value": 3, "unit": "tokens", "origin": "default"}


def test_equality_and_nearest() -> None:
    """Origins do not make parameters different; common names of other programs lead to ours."""
    assert Params(seed=0) == Params()
    assert Params(seed=1) != Params()
    assert Params() != "text"
    known = {"lr": "train_lr", "max_model_len": "serve_max_model_len", "tp": "serve_tensor_parallel", "lerning_rate": "train_lr"}
    assert {name: kit.nearest(name) for name in known} == known
    assert kit.nearest("zzzzzz") is None


def test_import_is_light() -> None:
    """The command line's `params` and `--help` answer at once: the module pulls in no model library."""
    heavy = ("torch", "vllm", "transformers", "numpy", "IPython")
    code = f"import sys, eagle3kit.params; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ast.literal_eval(done.stdout) == []
