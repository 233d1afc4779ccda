"""Rules that hold in every file of the package, read from its syntax trees; CONTRIBUTING.md has the reasons."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3kit import hidden_states
from eagle3kit.errors import KitError
from eagle3kit.rundir import Run, write_json

PACKAGE = Path(__file__).parents[1] / "eagle3kit"
MODULES = sorted(PACKAGE.glob("*.py"))

OWN = {
    "simulate.py: Eagle3SpeculatorConfig.from_pretrained": "speculators' own class, which takes no code",
    "simulate.py: Eagle3DraftModel.from_pretrained": "speculators' own class, which takes no code",
    "drafter_check.py: Eagle3SpeculatorConfig.from_pretrained": "speculators' own class, which takes no code",
    "drafter_check.py: get_config": "off whatever the parameters say: a drafter needs none",
    "gguf.py: AutoModelForCausalLM.from_pretrained": "a GGUF file, which holds no code",
    "gguf.py: AutoTokenizer.from_pretrained": "a GGUF file, which holds no code",
}
"""Loading calls that do not pass `trust_remote_code` on, and why."""

MARKUP = {"escape", "join", "tag", "as_conversation", "whole_page"}
"""Functions that may call text HTML: each escapes, or takes what one of the others made."""


def calls(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.Call, str]]:
    """Every call: what is called, the call, and the innermost function it stands in, empty for a module's own lines."""
    for node in ast.iter_child_nodes(tree):
        here = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else inside
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node, here
        yield from calls(node, here)


def keyword(call: ast.Call, name: str) -> str:
    return next((ast.unparse(each.value) for each in call.keywords if each.arg == name), "")


def loads(tree: ast.AST, module: str) -> dict[str, str]:
    """What each call that may run a model's own code gives as `trust_remote_code`."""
    found = [(name, call) for name, call, _ in calls(tree) if name.endswith(".from_pretrained") or name == "get_config"]
    return {f"{module}: {name}": keyword(call, "trust_remote_code") for name, call in found}


def dangers(tree: ast.AST) -> list[str]:
    """Ways to run what a file or a model says: a shell, pickle, evaluated text, YAML's full loader."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [
                name for name in names if name.split(".")[0] in {"pickle", "dill", "joblib", "marshal", "shelve", "cloudpickle"}
            ]
    for name, call, _ in calls(tree):
        shell = keyword(call, "shell") not in ("", "False") or name in {"os.system", "os.popen"}
        unpickled = name == "torch.load" and keyword(call, "weights_only") != "True"
        unpickled |= name in {"np.load", "numpy.load", "np.save"} and keyword(call, "allow_pickle") != "False"
        found += [name] * (shell or unpickled or name in {"eval", "exec", "yaml.load"})
    return found


def markup(tree: ast.AST) -> set[str]:
    """Functions that call text HTML."""
    return {function for name, _, function in calls(tree) if name == "Markup"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_nothing_runs_what_a_file_or_a_model_says(path: Path) -> None:
    assert dangers(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from joblib import load",
        "def f():\n    subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=True)",
        "class C:\n    x = subprocess.run('ls', shell=True)",
        "def f():\n    os.system('ls')",
        "def f():\n    torch.load('x')",
        "def f():\n    torch.load('x', weights_only=False)",
        "def f():\n    np.load('x')",
        "def f():\n    eval('1')",
        "def f():\n    yaml.load(x)",
    ],
)
def test_what_would_run_it_is_seen(code: str) -> None:
    assert dangers(ast.parse(code))


def test_trust_remote_code_is_passed_on_by_every_call_that_loads() -> None:
    found = {name: given for path in MODULES for name, given in loads(ast.parse(path.read_text()), path.name).items()}
    assert {name for name, given in found.items() if not given.endswith("trust_remote_code")} == set(OWN)


def test_a_call_that_forgets_it_is_seen() -> None:
    code = (
        "def f():\n    AutoTokenizer.from_pretrained(m)\n    AutoConfig.from_pretrained(m, trust_remote_code=p.trust_remote_code)"
    )
    assert loads(ast.parse(code), "x.py") == {
        "x.py: AutoTokenizer.from_pretrained": "",
        "x.py: AutoConfig.from_pretrained": "p.trust_remote_code",
    }


def test_text_becomes_html_in_few_places_only() -> None:
    assert set().union(*(markup(ast.parse(path.read_text())) for path in MODULES)) <= MARKUP
    assert markup(ast.parse("def careless(x):\n    return Markup(x)")) == {"careless"}


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a/../../x", ".."])
def test_a_list_of_state_files_cannot_reach_out_of_its_folder(run: Run, name: str) -> None:
    """Damaged ones are deleted, so a run folder from elsewhere could name any file."""
    folder = run.path("hidden_states")
    folder.mkdir()
    write_json(folder / "files.json", {name: [1, "digest"]})
    with pytest.raises(KitError, match="not in its folder"):
        hidden_states.damaged_files(folder)


def test_a_damaged_file_of_the_folder_itself_is_still_found(run: Run) -> None:
    folder = run.path("hidden_states")
    folder.mkdir()
    write_json(folder / "files.json", {"hs_0.safetensors": [1, "digest"]})
    assert hidden_states.damaged_files(folder) == [folder / "hs_0.safetensors"]
