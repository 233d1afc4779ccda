"""Every parameter of the kit, in one typed model, and the one way to load it strictly.

Parameters are flat scalars or lists. Each is declared once, below, with its group, unit, default, range and description; the
command line's table, the errors, the shipped files' tests and the report all read that declaration.

Why strict. papermill logs a line about an unknown key and exits 0, so `lerning_rate: 3e-4` trains for hours with the default;
YAML 1.1 reads `lr: 5e-5` as text; a second `train_epochs:` further down a file silently wins. Each of these is one line of error
here, with the file, the line and the nearest known name, before anything is started.

Where a value came from (`Params.origin`) is one of four:

* `default`: declared here.
* `file`: the params file gives it, and nothing changed it afterwards.
* `notebook`: written in the notebook's parameters cell.
* `command line`: an override of `eagle3kit run`, or a value injected by papermill.

papermill tells a kernel nothing about itself, so `load` finds this out from two things. The first is IPython's input history:
papermill injects one cell of plain assignments that starts with `# Parameters`, and whatever that cell assigned was not written
by the person at the notebook. The second is the text variable `params_file`, which names the file: `eagle3kit run` injects it
(`Params.notebook_values`) next to the values, and a value that equals the file's is then `file`. Plain `papermill -f FILE` shows
its values as `command line`, which is all a kernel can know; `papermill -p params_file FILE` loads the file here instead, with
every check. In JupyterLab the same variable, in the parameters cell, fills every parameter that the cell leaves at its default:
the shipped notebooks name `params/local.yaml`. Where papermill injects values but no file, the cell's file is not read: a run is
what its command line says. `params_file` is not allowed inside a file: a copied file would go on naming its original.

A value wins over others in this order: command line, notebook (where it differs from the default), file, default.
"""

from __future__ import annotations

import ast
import difflib
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, ValidationInfo, field_validator, model_validator

from eagle3kit.errors import KitError

Origin = Literal["default", "file", "notebook", "command line"]
Kind = Literal["bool", "int", "float", "str", "choice", "list[int]", "list[str]"]

GROUPS: dict[str, str] = {
    "run": "the run and where it lives",
    "target": "the model to be made faster",
    "data": "prompts, and the target's own answers to them",
    "drafter": "the shape of the draft model",
    "vocab": "the draft vocabulary",
    "extraction": "hidden states of the target, and the check that they are the right ones",
    "training": "speculators' trainer",
    "evaluation": "acceptance, losslessness and speed",
    "serving": "the vLLM server behind every stage",
    "hardware": "this machine, and the machine that is planned for",
}


class ParamError(KitError):
    """A parameter that cannot be used.

    Args:
        what: what happened, one sentence without a full stop at its end.
        names: the parameters concerned.
        seen: the value that was found.
        wanted: what would have been right.
        fix: what mends it.
    """

    def __init__(
        self, what: str, *, names: Iterable[str] = (), seen: object = None, wanted: object = None, fix: str | None = None
    ) -> None:
        self.names = tuple(names)
        super().__init__(what, seen=seen, wanted=wanted, fix=fix)

    def at(self, places: Mapping[str, str]) -> ParamError:
        """The same error with the place of each parameter in front of it, for example `params/local.yaml:12`."""
        found = list(dict.fromkeys(places[name] for name in self.names if name in places))
        what = f"{', '.join(found)}: {self.what}" if found else self.what
        return ParamError(what, names=self.names, seen=self.seen, wanted=self.wanted, fix=self.fix)


def _param(group: str, default: Any, unit: str, description: str, *, aka: tuple[str, ...] = (), **limits: Any) -> Any:
    """Declare one parameter: a pydantic field that also carries its group, its unit and other names people know it by."""
    return Field(default, description=description, json_schema_extra={"group": group, "unit": unit, "aka": list(aka)}, **limits)


_run, _target, _data, _drafter, _vocab, _extraction, _training, _evaluation, _serving, _hardware = (
    partial(_param, group) for group in GROUPS
)

# A run's name becomes a folder's name on every system, hence no separators, no leading dot and no dot at the end.
_RUN_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?$"
# Names and paths are handed to other programs and printed in one-line errors: no control characters, and not blank.
_TEXT = r"^[^\x00-\x1f\x7f]*[^\x00-\x20\x7f][^\x00-\x1f\x7f]*$"


class Params(BaseModel):
    """Every parameter of a run, checked. Frozen: a stage cannot change what the next one sees.

    Made by `load` in a notebook and by `load_file` elsewhere; `Params(train_epochs=2)` serves tests and what-if questions.

    Raises:
        ParamError: a name that is not declared, a value of the wrong type or out of range, or two values that contradict
            each other (`RULES`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    run_name: str = _run("local", "", "name of the run: its folder under runs_dir and its report's name", pattern=_RUN_NAME)
    runs_dir: str = _run("runs", "", "folder that holds the runs; hidden states can need terabytes there", pattern=_TEXT)
    reports_dir: str = _run("reports", "", "folder that receives the rendered reports and their index", pattern=_TEXT)
    interactive: bool = _run(True, "", "false runs headless: every control is drawn as a table", aka=("headless",))
    force: bool = _run(False, "", "redo a stage whose inputs changed, over the output that is there", aka=("overwrite",))
    stall_timeout_s: int = _run(
        1800, "seconds", "how long a server, a tool or the trainer may go without any progress before it is ended", ge=1
    )
    seed: int = _run(0, "", "seed of everything that draws at random", ge=0, lt=2**32)

    target_model: str = _target(
        "smollm2-135m",
        "",
        "the target: a preset (smollm2-135m, kimi-k2.5, kimi-k2, tiny-kimi-k2.5), a local folder, or a hub id",
        aka=("model", "verifier", "verifier_name_or_path"),
        pattern=_TEXT,
    )
    target_revision: str = _target("main", "", "branch, tag or commit of a hub target", pattern=_TEXT)
    target_dtype: Literal["float32", "bfloat16", "auto"] = _target(
        "float32", "", "number type that the target is served in; auto takes the checkpoint's own", aka=("dtype", "torch_dtype")
    )
    trust_remote_code: bool = _target(
        False, "", "let the hub's Python code run here; no target of this kit needs it: vLLM and transformers know Kimi natively"
    )

    data_source: str = _data(
        "builtin",
        "",
        "prompts: builtin (shipped with the kit), a local .jsonl file of conversations, or a hub data set's id",
        aka=("dataset",),
        pattern=_TEXT,
    )
    data_train_prompts: int = _data(0, "prompts", "prompts to train on; 0 takes all", aka=("num_samples", "max_samples"), ge=0)
    data_heldout_prompts: int = _data(0, "prompts", "prompts held out for every later measurement; 0 takes all", ge=0)
    data_heldout_share: float = _data(
        0.1, "share", "share of the source that is held out when it has no split of its own", gt=0, le=0.5
    )
    data_regenerate: bool = _data(
        True, "", "let the target answer the prompts itself; false takes the source's answers, which trains a worse drafter"
    )
    data_max_response_tokens: int = _data(96, "tokens", "longest answer that the target writes", aka=("max_tokens",), ge=1)
    data_seq_length: int = _data(
        256,
        "tokens",
        "longest conversation, prompt and answer; what is longer is cut while preparing, where it is counted",
        aka=("max_length",),
        ge=16,
    )
    data_temperature: float = _data(0.0, "", "sampling temperature of the target's answers; 0 is greedy", ge=0, le=2)
    data_concurrency: int = _data(64, "requests", "requests in flight while the target answers", ge=1)

    drafter_parent: str = _drafter(
        "reference",
        "",
        "drafter to start from: reference (the published Kimi-K2 drafter's values, shipped with the kit), a hub id or a folder",
        pattern=_TEXT,
    )
    drafter_layers: int = _drafter(1, "layers", "decoder layers of the drafter; every published one has 1", ge=1, le=8)
    drafter_heads: int = _drafter(0, "heads", "attention heads; 0 chooses and gives the reason", ge=0)
    drafter_kv_heads: int = _drafter(0, "heads", "key and value heads; 0 chooses and gives the reason", ge=0)
    drafter_head_dim: int = _drafter(
        0, "", "width of a head; 0 chooses and gives the reason (the trainer alone would take 64 from an MLA target)", ge=0
    )
    drafter_intermediate_size: int = _drafter(0, "", "width of the drafter's MLP; 0 takes the target's", ge=0)
    drafter_norm_before_residual: bool = _drafter(True, "", "take the residual after the norm of the hidden states")
    drafter_norm_before_fc: bool = _drafter(True, "", "normalise the joined auxiliary states before the fc projection")
    drafter_fc_norm: bool = _drafter(
        False, "", "normalise each auxiliary state by itself before fc; excludes drafter_norm_before_fc"
    )
    drafter_norm_output: bool = _drafter(True, "", "feed normalised states from one draft step to the next")
    aux_layers: list[int] = _drafter(
        [],
        "",
        "three auxiliary layers in vLLM's numbers (id i is the output of layer i-1); [] takes 2, n//2, n-3",
        aka=("target_layer_ids", "eagle_aux_hidden_state_layer_ids"),
    )

    draft_vocab_size: int = _vocab(
        4096, "tokens", "tokens that the drafter can propose; 0 takes the target's full vocabulary", ge=0
    )
    vocab_min_coverage: float = _vocab(
        0.8, "share", "share of the held-out answers' tokens that the draft vocabulary must contain", ge=0, le=1
    )

    extraction_engine: Literal["vllm", "transformers"] = _extraction(
        "vllm", "", "what answers the prompts and hands out hidden states; transformers needs no vLLM, and is slower"
    )
    extraction_mode: Literal["offline", "online"] = _extraction(
        "offline",
        "",
        "offline keeps every row's hidden states in files; online only the held-out rows': the trainer asks vLLM for the others",
    )
    extraction_storage: Literal["native", "fp8"] = _extraction(
        "native",
        "",
        "hidden states on disk: native is the target's number type; fp8 rounds to one byte each, and needs looser golden limits",
    )
    extraction_concurrency: int = _extraction(16, "requests", "requests in flight while hidden states are written", ge=1)
    golden_samples: int = _extraction(
        8, "conversations", "conversations of the golden check against the target's own logits", ge=1
    )
    golden_min_top1: float = _extraction(
        0.99, "share", "golden check: positions whose most likely token must agree; one slot off gives 0.61 or less", ge=0, le=1
    )
    golden_max_mae: float = _extraction(
        0.01, "nats", "golden check: largest mean error of the log-probabilities; one slot off gives 1.7 or more", gt=0
    )

    golden_max_layer_error: float = _extraction(
        0.02,
        "relative L2",
        "golden check: largest error of a slot against its layer in transformers; one layer off gave 0.25 or more",
        gt=0,
    )

    train_from: str = _training(
        "", "", "trained drafter whose weights training starts from: a local folder or a hub id; empty starts afresh"
    )
    train_epochs: int = _training(
        6, "epochs", "passes over the training conversations", aka=("num_epochs", "num_train_epochs"), ge=1
    )
    train_lr: float = _training(1e-3, "", "learning rate at its peak", aka=("learning_rate",), gt=0, lt=1)
    train_pack_tokens: int = _training(
        256,
        "tokens",
        "tokens of one training step and process, whole conversations packed together; the trainer cuts a longer one",
        aka=("total_seq_len", "batch_size"),
        ge=64,
    )
    train_ttt_steps: int = _training(3, "steps", "draft steps that training unrolls (training-time test)", ge=1, le=16)
    train_ttt_decay: float = _training(
        1.0, "", "weight of a draft step's loss, times the one before; below 1 favours the first", gt=0, le=1
    )
    train_on_prompts: bool = _training(
        False, "", "learn what the target expects over the prompts too; its answers are learnt in any case"
    )
    train_optimizer: Literal["adamw", "muon"] = _training(
        "muon", "", "optimiser of the weight matrices; muon learns more from each token, adamw is faster a step"
    )
    train_scheduler: Literal["cosine", "linear", "none"] = _training("cosine", "", "how the learning rate falls after warm-up")
    train_warmup_share: float = _training(
        0.05, "share", "share of the steps that the learning rate rises", aka=("warmup_ratio",), ge=0, lt=1
    )
    train_weight_decay: float = _training(0.1, "", "weight decay, of the matrices and of the rest alike", ge=0, le=10)
    train_save_every: float = _training(
        1.0, "epochs", "epochs between checkpoints; may be a fraction", aka=("checkpoint_freq",), gt=0
    )
    train_best_by: Literal["acceptance", "loss", "last"] = _training(
        "acceptance",
        "",
        "epoch whose checkpoint is served: longest acceptance promised by held-out accuracies, lowest held-out loss, or last",
    )
    train_processes: int = _training(1, "processes", "trainer processes under torchrun, one a GPU", aka=("nproc_per_node",), ge=1)
    train_workers: int = _training(0, "processes", "data-loader workers of each trainer process", aka=("num_workers",), ge=0)

    eval_prompts: int = _evaluation(0, "prompts", "held-out prompts of the acceptance measurement; 0 takes all", ge=0)
    eval_k: int = _evaluation(3, "tokens", "tokens drafted at each step", aka=("num_speculative_tokens",), ge=1, le=16)
    eval_max_tokens: int = _evaluation(96, "tokens", "longest answer while measuring", ge=1)
    eval_concurrency: int = _evaluation(16, "requests", "requests in flight while acceptance is measured", ge=1)
    eval_speed_prompts: int = _evaluation(
        12, "prompts", "held-out prompts of one speed measurement: of different kinds, spread over all", ge=1
    )
    eval_speed_concurrency: int = _evaluation(1, "requests", "requests in flight while speed is measured", ge=1)
    eval_repeats: int = _evaluation(
        3, "runs", "speed measurements of each contestant; one gives no interval, the sweep wants 3", ge=1
    )
    eval_ngram_k: int = _evaluation(4, "tokens", "tokens drafted at each step by the n-gram baseline", ge=1, le=16)
    eval_side_by_side: bool = _evaluation(
        True, "", "run the servers that are compared at the same time, taking turns; needs the target's memory three times"
    )
    eval_sweep: bool = _evaluation(
        False, "", "also sweep draft lengths, loads and temperatures: fifteen minutes on two cores (make sweep)"
    )
    eval_sweep_k: list[int] = _evaluation([1, 3, 5], "tokens", "draft lengths that the sweep serves each drafter with")
    eval_sweep_concurrency: list[int] = _evaluation(
        [1, 4, 16], "requests", "requests in flight at which the sweep measures speed"
    )
    eval_sweep_tokens: int = _evaluation(24, "tokens", "longest answer while the sweep measures speed", ge=8)
    eval_drafters: list[str] = _evaluation(
        [], "", "further drafters that the sweep measures beside the trained one: local folders or hub ids"
    )

    serve_max_model_len: int = _serving(1024, "tokens", "longest context that the server accepts", aka=("max_model_len",), ge=16)
    serve_max_num_seqs: int = _serving(
        64, "requests", "requests that the server runs at once; more wait", aka=("max_num_seqs",), ge=1
    )
    serve_kv_cache_gb: float = _serving(2.0, "GB", "memory for the KV cache on a CPU; a GPU takes what is left", gt=0)
    serve_tensor_parallel: int = _serving(
        1, "GPUs", "GPUs that one server is spread over", aka=("tp", "tensor_parallel_size"), ge=1
    )
    serve_gpu_memory_utilization: float = _serving(
        0.9, "share", "share of each GPU's memory that the server may take", gt=0, le=1
    )
    serve_start_timeout_s: int = _serving(600, "seconds", "how long a server may take until it answers", ge=1)
    serve_extra_args: list[str] = _serving([], "", "further arguments of `vllm serve`, one list item each", aka=("vllm_args",))

    device: Literal["auto", "cpu", "cuda"] = _hardware("auto", "", "where the models run; auto takes a GPU where there is one")
    threads: int = _hardware(0, "threads", "CPU threads; 0 takes every core", ge=0)
    hardware: Literal["cpu", "rtx-pro-6000", "h200", "b200", "b300"] = _hardware(
        "cpu", "", "machine that the plan reckons with: memory, bandwidth and links of this GPU", aka=("gpu", "gpu_type")
    )
    hardware_file: str = _hardware("", "", "YAML or JSON file with more GPUs for the speed-up model; empty: none")
    gpu_count: int = _hardware(0, "GPUs", "GPUs of the machine", aka=("num_gpus", "gpus"), ge=0)
    gpu_price_per_hour: float = _hardware(0.0, "US$/GPU/h", "rent of one GPU; 0 means unknown, and the plan names no cost", ge=0)

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)
    _params_file: str = PrivateAttr("")

    def __init__(self, /, **values: Any) -> None:
        """Check the values; see the class for what is raised."""
        _refuse_unknown(values, {})
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _from_pydantic(error) from None

    @field_validator("*", mode="before")
    @classmethod
    def _coerced(cls, value: object, info: ValidationInfo) -> object:
        """Bring a value to its declared type, because YAML and papermill hand over `5e-5` and `-p force true` as text."""
        return coerce(str(info.field_name), value)

    @model_validator(mode="after")
    def _without_contradiction(self) -> Params:
        """Refuse the first pair of values that contradict each other."""
        for rule in RULES:
            if not rule.holds(self):
                raise ParamError(
                    f"{' and '.join(rule.parameters)} contradict each other"
                    if len(rule.parameters) > 1
                    else f"{rule.parameters[0]} is not a legal value",
                    names=rule.parameters,
                    seen=", ".join(f"{name}={_shown(getattr(self, name))}" for name in rule.parameters),
                    wanted=rule.description,
                    fix=rule.fix,
                )
        return self

    def __eq__(self, other: object) -> bool:
        """Equal values are equal parameters; pydantic would also compare where they came from."""
        return isinstance(other, Params) and self.model_dump() == other.model_dump()

    @property
    def params_file(self) -> str:
        """The file that the values came from, as it was named; empty when there was none."""
        return self._params_file

    def origin(self, name: str) -> Origin:
        """Where the value of `name` came from.

        Raises:
            ParamError: there is no such parameter.
        """
        _refuse_unknown([name], {})
        return self._origins.get(name, "notebook" if name in self.model_fields_set else "default")

    @property
    def origins(self) -> dict[str, Origin]:
        """Where every value came from, by parameter."""
        return {name: self.origin(name) for name in SPECS}

    def describe(self) -> dict[str, dict[str, Any]]:
        """Every parameter with its value, unit and origin, ready for JSON: what a run keeps beside its results."""
        values = self.model_dump()
        return {name: {"value": values[name], "unit": spec.unit, "origin": self.origin(name)} for name, spec in SPECS.items()}

    def subset(self, names: Iterable[str]) -> dict[str, Any]:
        """The values of `names`, in that order, as plain scalars and lists: what a stage's digest is taken over.

        Raises:
            ParamError: one of the names is no parameter.
        """
        names = list(names)
        _refuse_unknown(names, {})
        values = self.model_dump(include=set(names))
        return {name: values[name] for name in names}

    def replace(self, **changes: Any) -> Params:
        """A checked copy with other values (pydantic's `model_copy(update=...)` checks nothing).

        Raises:
            ParamError: as for the class.
        """
        given = {name: getattr(self, name) for name, origin in self.origins.items() if origin != "default"}
        changed: dict[str, Origin] = dict.fromkeys(changes, "notebook")
        return _build({**given, **changes}, {**self.origins, **changed}, {}, self._params_file)

    def notebook_values(self) -> dict[str, Any]:
        """What to hand to papermill so that `load` finds these values and their origins again in the kernel.

        That is every value that is not a default, and `params_file` where there is one. Defaults are left out: whatever
        papermill injects counts as given on purpose.
        """
        values = self.subset(name for name in SPECS if self.origin(name) != "default")
        return {"params_file": self._params_file, **values} if self._params_file else values


@dataclass(frozen=True)
class Spec:
    """One parameter as declared in `Params`.

    Attributes:
        name: its name.
        group: a key of `GROUPS`.
        description: what it does, one line.
        unit: its unit, empty for a plain number or text.
        default: its value when nobody gives one.
        kind: its type.
        choices: the legal values of a `choice`.
        limits: `ge`, `gt`, `le` and `lt` as far as they are set.
        wanted: type and range in words, for errors and tables.
        aka: names that other programs use for it, for the nearest known name.
    """

    name: str
    group: str
    description: str
    unit: str
    default: Any
    kind: Kind
    choices: tuple[str, ...]
    limits: dict[str, float]
    wanted: str
    aka: tuple[str, ...]


def _specs() -> dict[str, Spec]:
    """Read the declarations back from the model."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    types = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text on one line"}
    types |= {"list[int]": "a list of whole numbers", "list[str]": "a list of texts"}
    specs = {}
    for name, field in Params.model_fields.items():
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        kind: Any = "choice" if choices else str(getattr(field.annotation, "__name__", ""))
        if get_origin(field.annotation) is list:
            kind = f"list[{get_args(field.annotation)[0].__name__}]"
        limits = {key: getattr(item, key) for item in field.metadata for key in words if getattr(item, key, None) is not None}
        wanted = f"one of {', '.join(choices)}" if choices else types[kind]
        wanted += "".join(f"{' and' if at else ''} {words[key]} {limit}" for at, (key, limit) in enumerate(limits.items()))
        if name == "run_name":
            wanted = "1 to 64 of the characters A-Z a-z 0-9 . _ -, starting with a letter or digit and not ending in a dot"
        extra: Any = field.json_schema_extra
        default = field.get_default()
        specs[name] = Spec(
            name,
            extra["group"],
            str(field.description),
            extra["unit"],
            default,
            kind,
            choices,
            limits,
            wanted,
            tuple(extra["aka"]),
        )
    return specs


SPECS: dict[str, Spec] = _specs()


FP8_LIMITS = {"golden_min_top1": 0.93, "golden_max_mae": 0.1, "golden_max_layer_error": 0.05}
"""Limits of the golden check that go with `extraction_storage: fp8`: on SmolLM2 the rounding alone takes half of each."""


class Rule(NamedTuple):
    """Values that are legal alone and wrong together.

    Attributes:
        name: short name of the rule.
        parameters: the parameters concerned.
        description: what has to hold, and why.
        holds: whether it does.
        fix: what to change.
    """

    name: str
    parameters: tuple[str, ...]
    description: str
    holds: Callable[[Params], bool]
    fix: str


def _distinct(values: list[int], most: int) -> bool:
    return bool(values) and len(set(values)) == len(values) and all(1 <= value <= most for value in values)


RULES: tuple[Rule, ...] = (
    Rule(
        "answer_fits_conversation",
        ("data_max_response_tokens", "data_seq_length"),
        "answers shorter than the conversation that holds them: otherwise the end of every full answer is cut off",
        lambda p: p.data_max_response_tokens < p.data_seq_length,
        "lower data_max_response_tokens or raise data_seq_length",
    ),
    Rule(
        "conversation_fits_pack",
        ("data_seq_length", "train_pack_tokens"),
        "data_seq_length at most train_pack_tokens: the trainer cuts a conversation that is longer than a step, at its end, "
        "where the answer is",
        lambda p: p.data_seq_length <= p.train_pack_tokens,
        "raise train_pack_tokens or lower data_seq_length",
    ),
    Rule(
        "conversation_fits_server",
        ("data_seq_length", "serve_max_model_len"),
        "data_seq_length at most serve_max_model_len: the server refuses a longer conversation",
        lambda p: p.data_seq_length <= p.serve_max_model_len,
        "raise serve_max_model_len or lower data_seq_length",
    ),
    Rule(
        "evaluation_fits_server",
        ("eval_max_tokens", "serve_max_model_len"),
        "eval_max_tokens below serve_max_model_len: the prompt needs room too",
        lambda p: p.eval_max_tokens < p.serve_max_model_len,
        "raise serve_max_model_len or lower eval_max_tokens",
    ),
    Rule(
        "fp8_passes_golden",
        ("extraction_storage", "golden_min_top1", "golden_max_mae", "golden_max_layer_error"),
        "golden limits that extraction_storage fp8 can keep, golden_min_top1 at most 0.96, golden_max_mae at least 0.05, "
        "golden_max_layer_error at least 0.03: on SmolLM2 the rounding alone gave 0.961, 0.059 nats and 0.026",
        lambda p: (
            p.extraction_storage == "native"
            or (p.golden_min_top1 <= 0.96 and p.golden_max_mae >= 0.05 and p.golden_max_layer_error >= 0.03)
        ),
        f"set {', '.join(f'{name}: {value:g}' for name, value in FP8_LIMITS.items())}, or extraction_storage: native",
    ),
    Rule(
        "online_asks_vllm",
        ("extraction_mode", "extraction_engine"),
        "extraction_engine vllm with extraction_mode online: the trainer asks a vLLM server for states",
        lambda p: p.extraction_mode == "offline" or p.extraction_engine == "vllm",
        "set extraction_engine: vllm, or extraction_mode: offline",
    ),
    Rule(
        "online_fits_gpus",
        ("extraction_mode", "train_processes", "serve_tensor_parallel", "gpu_count"),
        "train_processes and serve_tensor_parallel together at most gpu_count with extraction_mode online: the trainer and the "
        "server that it asks run at the same time",
        lambda p: p.extraction_mode == "offline" or not p.gpu_count or p.train_processes + p.serve_tensor_parallel <= p.gpu_count,
        "lower train_processes or serve_tensor_parallel, or set extraction_mode: offline",
    ),
    Rule(
        "speed_has_prompts",
        ("eval_speed_concurrency", "eval_speed_prompts"),
        "at least as many prompts as requests in flight: otherwise the speed is reported for a load that never happened",
        lambda p: p.eval_speed_concurrency <= p.eval_speed_prompts,
        "raise eval_speed_prompts or lower eval_speed_concurrency",
    ),
    Rule(
        "speed_fits_server",
        ("eval_speed_concurrency", "serve_max_num_seqs"),
        "eval_speed_concurrency at most serve_max_num_seqs: the rest waits, and the speed is reported for the wrong load",
        lambda p: p.eval_speed_concurrency <= p.serve_max_num_seqs,
        "raise serve_max_num_seqs or lower eval_speed_concurrency",
    ),
    Rule(
        "sweep_loads_fit_server",
        ("eval_sweep", "eval_sweep_concurrency", "serve_max_num_seqs"),
        "eval_sweep_concurrency of loads from 1 to serve_max_num_seqs, each named once",
        lambda p: not p.eval_sweep or _distinct(p.eval_sweep_concurrency, p.serve_max_num_seqs),
        "name each load once, and raise serve_max_num_seqs or lower them",
    ),
    Rule(
        "sweep_draft_lengths",
        ("eval_sweep", "eval_sweep_k"),
        "one or more draft lengths from 1 to 16, each named once",
        lambda p: not p.eval_sweep or _distinct(p.eval_sweep_k, 16),
        "set eval_sweep_k: [1, 3, 5]",
    ),
    Rule(
        "sweep_has_the_drafter",
        ("eval_sweep", "eval_sweep_k", "eval_k"),
        "eval_k one of eval_sweep_k: at this length the sweep also samples, traces and times steps",
        lambda p: not p.eval_sweep or p.eval_k in p.eval_sweep_k,
        "add eval_k to eval_sweep_k",
    ),
    Rule(
        "sweep_repeats",
        ("eval_sweep", "eval_repeats"),
        "eval_repeats at least 3 in a sweep: its advice rests on the spread of the repeats",
        lambda p: not p.eval_sweep or p.eval_repeats >= 3,
        "set eval_repeats: 3",
    ),
    Rule(
        "cpu_without_gpus",
        ("device", "gpu_count"),
        "gpu_count 0 with device cpu",
        lambda p: not (p.device == "cpu" and p.gpu_count > 0),
        "set gpu_count: 0, or device: cuda",
    ),
    Rule(
        "cuda_with_gpus",
        ("device", "gpu_count"),
        "gpu_count at least 1 with device cuda",
        lambda p: not (p.device == "cuda" and p.gpu_count == 0),
        "set gpu_count to the machine's GPUs, or device: cpu",
    ),
    Rule(
        "cpu_without_tensor_parallel",
        ("device", "serve_tensor_parallel"),
        "serve_tensor_parallel 1 with device cpu",
        lambda p: not (p.device == "cpu" and p.serve_tensor_parallel > 1),
        "set serve_tensor_parallel: 1, or device: cuda",
    ),
    Rule(
        "tensor_parallel_fits_gpus",
        ("serve_tensor_parallel", "gpu_count"),
        "serve_tensor_parallel at most gpu_count",
        lambda p: p.serve_tensor_parallel <= max(1, p.gpu_count),
        "lower serve_tensor_parallel, or set gpu_count to the machine's GPUs",
    ),
    Rule(
        "processes_fit_gpus",
        ("train_processes", "gpu_count"),
        "train_processes at most gpu_count, and 1 without GPUs: each trainer process takes one GPU",
        lambda p: p.train_processes <= max(1, p.gpu_count),
        "lower train_processes, or set gpu_count to the machine's GPUs",
    ),
    Rule(
        "kv_heads_divide_heads",
        ("drafter_kv_heads", "drafter_heads"),
        "drafter_heads a multiple of drafter_kv_heads: each key and value head serves the same number of heads",
        lambda p: not (p.drafter_heads and p.drafter_kv_heads) or p.drafter_heads % p.drafter_kv_heads == 0,
        "change drafter_kv_heads, or set both to 0",
    ),
    Rule(
        "one_norm_before_fc",
        ("drafter_fc_norm", "drafter_norm_before_fc"),
        "drafter_fc_norm or drafter_norm_before_fc, not both: speculators refuses two norms before fc",
        lambda p: not (p.drafter_fc_norm and p.drafter_norm_before_fc),
        "set drafter_norm_before_fc: false, or drafter_fc_norm: false",
    ),
    Rule(
        "heads_divide_over_gpus",
        ("drafter_heads", "serve_tensor_parallel"),
        "drafter_heads a multiple of serve_tensor_parallel: vLLM spreads the drafter over the target's GPUs",
        lambda p: not p.drafter_heads or p.drafter_heads % p.serve_tensor_parallel == 0,
        "change drafter_heads or serve_tensor_parallel",
    ),
    Rule(
        "aux_layers_rise",
        ("aux_layers",),
        "none, or exactly three ids that rise from 0 upwards",
        lambda p: not p.aux_layers or (len(p.aux_layers) == 3 and 0 <= p.aux_layers[0] < p.aux_layers[1] < p.aux_layers[2]),
        "set aux_layers: [] for the default 2, n//2, n-3",
    ),
)


# --- one value -----------------------------------------------------------------------------------------------------------------


def _shown(value: object) -> str:
    """A value for an error: as Python writes it, and short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _to_bool(value: object) -> bool | None:
    """True and false, also as the words that YAML 1.1 knows. 0 and 1 are no truth values here."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    return value if isinstance(value, bool) else words.get(value.strip().lower()) if isinstance(value, str) else None


def _to_float(value: object) -> float | None:
    """A number, also written as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _to_int(value: object) -> int | None:
    """A whole number, also written as text or as 64.0 or 1e6: papermill turns `-p seed 1e6` into a float."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    number = _to_float(value)
    return int(number) if number is not None and number.is_integer() else None


def _to_str(value: object) -> str | None:
    """Text. A number is not turned into text: YAML has read 007 as 7 by then."""
    return value if isinstance(value, str) else None


def _to_list(kind: Kind, value: object) -> list[Any] | None:
    """A list, also written as text: papermill's and the command line's `-p` know no other way to give one."""
    if isinstance(value, str):
        try:
            if value.strip().startswith("["):
                value = yaml.safe_load(value)
            else:
                value = shlex.split(value) if kind == "list[str]" else value.replace(",", " ").split()
        except (yaml.YAMLError, ValueError, RecursionError):
            return None
    if not isinstance(value, list | tuple):
        return None
    if kind == "list[int]":
        items: list[Any] = [_to_int(item) for item in value]
    else:
        # Numbers are natural here: `[--max-num-batched-tokens, 8192]`.
        items = [str(item) if isinstance(item, int | float) and not isinstance(item, bool) else _to_str(item) for item in value]
    return None if None in items else items


_CONVERTERS: dict[Kind, Callable[[object], Any]] = {
    "bool": _to_bool,
    "int": _to_int,
    "float": _to_float,
    "str": _to_str,
    "choice": _to_str,
    "list[int]": partial(_to_list, "list[int]"),
    "list[str]": partial(_to_list, "list[str]"),
}


def coerce(name: str, value: object) -> Any:
    """Bring a value to the declared type of parameter `name`; its range is checked later.

    Raises:
        ParamError: the value cannot be read as that type.
    """
    spec = SPECS[name]
    result = _CONVERTERS[spec.kind](value)
    if result is not None:
        return result
    if value is None:
        fix = f"give {name} a value, or leave it out for its default {_yaml(spec.default)}"
    elif isinstance(value, dict):
        fix = "parameters are flat: write each key at the top level"
    elif spec.kind in ("str", "choice") and isinstance(value, bool | int | float):
        fix = f"write it in quotes, {name}: '{value}' (with papermill: -r {name} {value})"
    else:
        fix = f"for example {name}: {_yaml(spec.default)}"
    raise ParamError(f"{name} has the wrong type", names=[name], seen=_shown(value), wanted=spec.wanted, fix=fix)


def _from_pydantic(error: ValidationError) -> ParamError:
    """The first of pydantic's complaints as an error of the kit: coerced values fail only on range, choice and pattern."""
    first = error.errors(include_url=False)[0]
    spec = SPECS[str(first["loc"][0])]
    what = "is not one of the choices" if spec.choices else "is out of range" if spec.limits else "is not a legal value"
    fix = f"for example {spec.name}: {_yaml(spec.default)}"
    return ParamError(f"{spec.name} {what}", names=[spec.name], seen=_shown(first["input"]), wanted=spec.wanted, fix=fix)


def _yaml(value: object) -> str:
    """A value as a params file writes it."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).splitlines()[0]


# --- names ---------------------------------------------------------------------------------------------------------------------


def nearest(name: str) -> str | None:
    """The parameter that was probably meant by an unknown name, or None.

    Compared are the full names, the names without their group (`lr`), and the names that other programs use (`learning_rate`).
    """
    spellings: dict[str, str] = {}
    for spec in SPECS.values():
        for spelling in (spec.name, spec.name.partition("_")[2] or spec.name, *spec.aka):
            spellings.setdefault(spelling, spec.name)
    close = difflib.get_close_matches(name.lower().replace("-", "_"), spellings, n=1)
    return spellings[close[0]] if close else None


def _refuse_unknown(given: Iterable[str], places: Mapping[str, str], advice: str = "") -> None:
    """Raise one error for all names that are no parameters; `given` may be a mapping to their values."""
    unknown = [name for name in given if name not in SPECS]
    if not unknown:
        return
    fixes = []
    for name in unknown:
        match = nearest(name)
        if name == "params_file":
            fixes.append(
                "remove params_file: it belongs in the notebook or on the command line, a copied file would lie about it"
            )
        elif isinstance(given, Mapping) and isinstance(given[name], dict):
            fixes.append(f"parameters are flat: write the keys of {name} at the top level")
        else:
            fixes.append(f"write {match} for {name}" if match else f"remove {name}")
    raise ParamError(
        ", ".join(
            f"{places[name]}: unknown parameter {name}" if name in places else f"unknown parameter {name}" for name in unknown
        ),
        names=unknown,
        wanted="names that `eagle3kit params` lists",
        fix=", ".join(fixes) + advice,
    )


# --- a file --------------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """The safe loader, with dates left as text like papermill's: `run_name: 2026-01-31` is a name."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, object], dict[str, str]]:
    """Read a params file.

    Returns:
        The values by name as YAML has them, and `FILE:LINE` by name.

    Raises:
        ParamError: the file is missing or unreadable, is not YAML in UTF-8, is not a mapping, or gives a key twice.
    """
    shown = os.fspath(path)
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        others = ", ".join(str(other) for other in sorted(Path(path).parent.glob("*.yaml")))
        fix = f"choose one of {others}" if others else "check the path, or start in the kit's folder"
        raise ParamError(f"{shown}: there is no such params file", fix=fix) from None
    except (OSError, ValueError) as error:
        raise ParamError(f"{shown}: the params file cannot be read ({getattr(error, 'strerror', None) or error})") from None
    try:
        text = data.decode("utf-8-sig")  # Windows editors put a byte-order mark in front
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ParamError(f"{shown}:{line}: the params file is not UTF-8 text", fix="save it as UTF-8") from None
    loader: _Loader | None = None
    line, values, places = 1, {}, dict[str, str]()
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None or root.tag == "tag:yaml.org,2002:null":  # nothing but comments, or a lone ---
            return {}, {}
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise ParamError(
                f"{shown}:{root.start_mark.line + 1}: the params file holds {kind}", wanted="lines like train_epochs: 6"
            )
        for key, node in root.value:
            line = key.start_mark.line + 1
            name = key.value if isinstance(key, yaml.ScalarNode) else "[...]"
            if name in values:
                raise ParamError(
                    f"{shown}:{line}: {name} is given twice",
                    names=[name],
                    seen=f"the first at {places[name]}",
                    fix="remove one of the two",
                )
            values[name] = loader.construct_object(node, deep=True)
            places[name] = f"{shown}:{line}"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else line
        raise ParamError(f"{shown}:{line}: the params file is not YAML ({error.problem or error.context})") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ParamError(f"{shown}:{line}: the params file is not YAML ({error.reason})") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # a number of 5,000 digits, a list nested 1,000 deep
        raise ParamError(f"{shown}:{line}: the params file cannot be read ({_shown(str(error))})") from None
    finally:
        if loader is not None:
            loader.dispose()
    return values, places


def _build(values: Mapping[str, Any], origins: Mapping[str, Origin], places: Mapping[str, str], params_file: str) -> Params:
    """Make checked parameters that know where they came from; errors name the place of each value."""
    _refuse_unknown(values, places)
    try:
        params = Params(**values)
    except ParamError as error:
        raise error.at(places) from None
    params._origins, params._params_file = dict(origins), params_file
    return params


def load_file(path: str | os.PathLike[str] | None, overrides: Mapping[str, object] | None = None) -> Params:
    """Load a params file strictly.

    Args:
        path: a flat YAML file; an empty file is all defaults, and None is no file.
        overrides: values of the command line, which win; text is brought to the declared type, lists too (`2 15 27`).

    Raises:
        ParamError: always one line, with the file and line where there is one: missing or unreadable file, no UTF-8, no YAML,
            no mapping, a key twice, an unknown key, a wrong type, a value out of range, or a contradiction (`RULES`).
    """
    values, places = _read(path) if path is not None else ({}, {})
    origins: dict[str, Origin] = dict.fromkeys(values, "file")
    _refuse_unknown(values, places)
    for name, value in (overrides or {}).items():
        values[name], origins[name], places[name] = value, "command line", "command line"
    return _build(values, origins, places, "" if path is None else os.fspath(path))


# --- a notebook ----------------------------------------------------------------------------------------------------------------

# Public names that are not parameters and may stand in a notebook before `load`: IPython's, and papermill's --inject-paths.
_FOREIGN = {"In", "Out", "PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH"}


def _injected(namespace: Mapping[str, Any]) -> dict[str, object]:
    """What papermill's injected cell assigned, read from IPython's input history.

    A cell counts when it starts with papermill's `# Parameters`. Only plain assignments are taken: a notebook's own parameters
    cell, which might start with the same comment, annotates its names.
    """
    assigned: dict[str, object] = {}
    history = namespace.get("In")
    for source in history if isinstance(history, list) else []:
        if not isinstance(source, str) or not source.startswith("# Parameters\n"):
            continue
        try:
            for node in ast.parse(source).body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    assigned[node.targets[0].id] = ast.literal_eval(node.value)
        except (SyntaxError, ValueError):  # float('nan'), which no parameter accepts, is no literal
            continue
    return assigned


def _suspects(namespace: Mapping[str, Any]) -> dict[str, object]:
    """The public names of a notebook that can only have been meant as parameters.

    The first `load` runs before any other work, so every plain value counts. Later ones (somebody stepped back, changed a value
    and ran the cell again) see the notebook's own variables too, and only annotated names count: those of the parameters cell.
    """
    loaded_before = any(isinstance(value, Params) for value in namespace.values())
    annotated = namespace.get("__annotations__") or {}
    return {
        name: value
        for name, value in namespace.items()
        if not name.startswith("_")
        and name not in _FOREIGN
        and name != "params_file"
        and isinstance(value, str | int | float | list | dict | None)
        and (name in annotated or not loaded_before)
    }


def _find_upwards(path: str) -> Path:
    """A relative path, looked for from the working directory upwards: JupyterLab starts a kernel in the notebook's folder."""
    tries = [folder / path for folder in (Path.cwd(), *Path.cwd().parents)]
    return next((found for found in tries if found.is_file()), Path(path))


def load(namespace: Mapping[str, Any]) -> Params:
    """The parameters of a notebook: `p = eagle3kit.load(globals())`, in the cell after the parameters cell.

    Args:
        namespace: the notebook's globals. Names that it lacks take their value from the file that `params_file` names, or their
            default; see the module for the order. `interactive` is not taken from a file that the notebook itself names:
            the shipped files say false because they are meant for headless runs, and somebody sits in front of this one.

    Raises:
        ParamError: an unknown name in the parameters cell or on papermill's command line, and as for `load_file`.
    """
    injected = _injected(namespace)
    given = {name: value for name, value in namespace.items() if name in SPECS}
    suspects = _suspects(namespace)
    here = {
        name: "command line" if name in injected and injected[name] == namespace[name] else "parameters cell"
        for name in (*given, *suspects, "params_file")
        if name in namespace
    }
    _refuse_unknown(suspects, here, ", then restart the kernel (it still knows the old name)")

    file = namespace.get("params_file") or "" if not injected or "params_file" in injected else ""
    if not isinstance(file, str):
        raise ParamError("params_file has the wrong type", names=["params_file"], seen=_shown(file), wanted="a path").at(here)
    values, places = _read(_find_upwards(file)) if file else ({}, {})
    _refuse_unknown(values, places)
    if here.get("params_file") != "command line":
        values.pop("interactive", None)
    try:
        values = {name: coerce(name, value) for name, value in values.items()}
    except ParamError as error:
        raise error.at(places) from None
    origins: dict[str, Origin] = dict.fromkeys(values, "file")
    for name, raw in given.items():
        try:
            value = coerce(name, raw)
        except ParamError as error:
            raise error.at(here) from None
        on_command_line = here[name] == "command line"
        if name in values and value == values[name]:
            continue
        if on_command_line or value != SPECS[name].default:
            values[name], origins[name], places[name] = value, "command line" if on_command_line else "notebook", here[name]
    return _build(values, origins, places, file)


# --- tables --------------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One parameter in a table; `wanted` is its type and range in words."""

    name: str
    value: Any
    origin: Origin
    default: Any
    unit: str
    description: str
    group: str
    wanted: str


def defaults() -> dict[str, Any]:
    """Every parameter's default, by name."""
    return Params().model_dump()


def parameters_of(group: str) -> tuple[str, ...]:
    """The parameters of a group, in their order.

    Raises:
        ParamError: there is no such group.
    """
    if group not in GROUPS:
        raise ParamError(f"unknown group of parameters {group}", wanted=f"one of {', '.join(GROUPS)}")
    return tuple(spec.name for spec in SPECS.values() if spec.group == group)


def schema_rows(params: Params | None = None) -> list[Row]:
    """One row a parameter, by group; with the values of `params`, or with the defaults."""
    params = Params() if params is None else params
    return [
        Row(s.name, getattr(params, s.name), params.origin(s.name), s.default, s.unit, s.description, s.group, s.wanted)
        for s in SPECS.values()
    ]


def table(params: Params | None = None) -> str:
    """The rows as aligned text, a heading a group; a default that equals the value is not repeated."""
    rows = schema_rows(params)
    cells = [
        (r.name, _yaml(r.value), r.unit, r.origin, "" if r.value == r.default else f"default {_yaml(r.default)}") for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines, group = [], ""
    for row, cell in zip(rows, cells, strict=True):
        if row.group != group:
            group = row.group
            lines += ["", f"{group}: {GROUPS[group]}"]
        aligned = "  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True))
        spec = SPECS[row.name]
        legal = f" ({row.wanted})" if spec.limits or spec.choices else ""
        lines.append(f"  {aligned}  {row.description}{legal}")
    return "\n".join(lines[1:])
