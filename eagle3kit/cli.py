"""The command line: `eagle3kit run | params | doctor | plan | report | compare | check-model | export | import`.

`run` executes the notebooks in order with papermill and ends with a report, also when a stage fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from eagle3kit.errors import KitError
from eagle3kit.params import Params, load_file, table
from eagle3kit.process import terminate_like_interrupt
from eagle3kit.rundir import Run, locked, project_path

STAGES = (
    "00_preflight",
    "01_explore_k2_eagle3",
    "02_build_k25_config",
    "03_extract_hidden_states",
    "04_vocab_map",
    "05_train",
    "06_evaluate",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 when a stage or check failed, 2 for bad input, 130 when interrupted."""
    options = parser().parse_args(arguments)
    try:
        with terminate_like_interrupt():
            status: int = options.command(options)
            return status
    except KitError as error:
        print(f"eagle3kit: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("eagle3kit: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        sys.stderr.close()
        return 0


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(prog="eagle3kit", description=__doc__.splitlines()[0] if __doc__ else "")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: object, text: str, *, file: str | None = "?") -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=function)
        if file is not None:
            command.add_argument("file", nargs=file if file else None, help="a params file, for example params/local.yaml")
            command.add_argument(
                "-p", dest="overrides", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="set one parameter"
            )
        return command

    run = add("run", run_command, "run the notebooks in order and write the report", file="")
    run.add_argument("--from", dest="first", choices=STAGES, default=STAGES[0], help="first notebook")
    run.add_argument("--to", dest="last", choices=STAGES, default=STAGES[-1], help="last notebook")
    add("params", params_command, "show every parameter: value, unit, origin, default")
    add("doctor", doctor_command, "check whether this machine can run these parameters", file="")
    add("plan", plan_command, "tokens, bytes, minutes and money before anything runs", file="")
    report = add("report", report_command, "write the report of a run from what it recorded", file="")
    report.set_defaults(command=report_command)
    compare = add("compare", compare_command, "facts of several runs side by side", file=None)
    compare.add_argument("runs", nargs="+", help="run folders, for example runs/local")
    check = add("check-model", check_model_command, "hold the speed-up model against published results", file=None)
    check.add_argument("dest", nargs="?", type=Path, default=project_path("reports"), help="folder of the page")
    check.add_argument("--rows", type=Path, help="predict these rows instead, and compare where they have results; YAML or JSON")
    check.add_argument("--hardware-file", default="", help="more GPUs for --rows; YAML or JSON")
    export = add("export", export_command, "write a run's trained drafter for SGLang, SpecForge and TorchSpec", file="")
    export.add_argument("dest", type=Path, help="folder to make")
    imported = add("import", import_command, "write a LlamaForCausalLMEagle3 drafter in the form that vLLM serves", file="")
    imported.add_argument("source", help="the drafter: a folder or a hub id")
    imported.add_argument("dest", type=Path, help="folder to make")
    imported.add_argument("--convention", choices=["vllm", "sglang"], help="whose numbers its auxiliary layers are")
    return top


def export_command(options: argparse.Namespace) -> int:
    """Export the trained drafter of a run, and hold the copy against the target."""
    from eagle3kit import convert, target, train

    params = _params(options)
    about, _ = target.describe(params.target_model, params.target_revision)
    folder = convert.export_llama(train.drafter_folder(Run(params, "export")), options.dest, about.n_layers)
    return _origin(folder, _target_folder(params), own_head=bool(params.train_from))


def import_command(options: argparse.Namespace) -> int:
    """Import a drafter for the params' target, and hold it against that target."""
    from eagle3kit import convert, hub

    params = _params(options)
    model, source = _target_folder(params), hub.local_folder(options.source)
    folder = convert.import_llama(
        source, options.dest, model, convention=options.convention, trust_remote_code=params.trust_remote_code
    )
    return _origin(folder, model, own_head=True)


def _target_folder(params: Params) -> Path:
    from eagle3kit import hub, materialize

    return hub.local_folder(materialize.materialize(params)[0], params.target_revision)


def _origin(folder: Path, model: Path, *, own_head: bool) -> int:
    """Print whether a drafter's tensors are the target's; status 1 when one that must be is not."""
    from eagle3kit import convert

    rows = convert.verify_origin(folder, model, own_head=own_head)
    for row in rows:
        print(f"{row['state']:4}  {row['name']}: {row['found']}" + (f"  -> {row['fix']}" * bool(row["fix"])))
    print(folder)
    return int(any(row["state"] == "fail" for row in rows))


def _params(options: argparse.Namespace) -> Params:
    return load_file(options.file, dict(options.overrides))


def params_command(options: argparse.Namespace) -> int:
    """Print the table of parameters."""
    print(table(_params(options)))
    return 0


def doctor_command(options: argparse.Namespace) -> int:
    """Print every check; status 1 when one of them fails."""
    from eagle3kit import doctor

    checks = doctor.checks(_params(options))
    for check in checks:
        print(
            f"{check.status:4}  {check.name}: found {check.found}, wanted {check.wanted}"
            + (f"  -> {check.fix}" * bool(check.fix))
        )
    return int(any(check.status == "fail" for check in checks))


def plan_command(options: argparse.Namespace) -> int:
    """Print the plan."""
    from eagle3kit import plan, target

    params = _params(options)
    for row in plan.plan(params, target.describe(params.target_model, params.target_revision)[0]).rows():
        print("  ".join(str(value) for value in row.values()))
    return 0


def report_command(options: argparse.Namespace) -> int:
    """Write the report of a run and print its path."""
    from eagle3kit import report

    params = _params(options)
    print(report.build(Run(params, "report").root, project_path(params.reports_dir)))
    return 0


def compare_command(options: argparse.Namespace) -> int:
    """Write the comparison of several runs and print its path."""
    from eagle3kit import report

    print(report.compare([Path(run) for run in options.runs]))
    return 0


def check_model_command(options: argparse.Namespace) -> int:
    """Write the page and print its path; status 1 when the model misses what it must hold. With `--rows`, print their table."""
    from eagle3kit import model_check, widgets

    if options.rows:
        asked = [(row, row.predict()) for row in model_check.read_rows(options.rows, options.hardware_file)]
        print(widgets.as_table(model_check.as_rows(asked)))
        for what in dict.fromkeys(row.what for row, _ in asked):  # apart: the model is one of ratios, not of tokens a second
            if known := [(row, found) for row, found in asked if row.what == what and not math.isnan(row.value)]:
                median, worst = model_check.errors(known)
                print(f"{what}: median error {100 * median:.1f} %, worst {100 * worst:.1f} %, of {len(known)} published")
        return 0
    print(model_check.build(options.dest))
    missed = [check for check in model_check.checks() if check["state"] != "ok"]
    for check in missed:
        print(f"{check['name']}: found {check['found']}, wanted {check['wanted']}", file=sys.stderr)
    return int(bool(missed))


# ---- run


def run_command(options: argparse.Namespace) -> int:
    """Execute the chosen notebooks; print the report's path and a summary of ten lines."""
    params = _params(options)
    stages = STAGES[STAGES.index(options.first) : STAGES.index(options.last) + 1]
    if not stages:
        raise KitError("no notebook lies between --from and --to", seen=f"{options.first} .. {options.last}")
    run = Run(params, "run")
    began, worked, failed = time.monotonic(), False, False
    alone = locked(run.path("locks", "run"), wait=False, busy=f"run {run.name} is already being worked on")
    with alone, MemoryPeak() as memory:
        for stage in stages:
            print(f"[{stage}] started {time.strftime('%H:%M:%S')}", flush=True)
            stage_began = time.monotonic()
            worked_before = run.fact(f"stage.{stage[:2]}.worked", 0)
            message = execute(run, stage)
            peak = round(memory.take() / 1e9, 2)
            if message is not None:
                print(f"[{stage}] failed: {message}", flush=True)
                with contextlib.suppress(KitError):  # on a full disk the line above has to do
                    run.record_failure(stage, message)
                failed = True
                break
            if run.fact(f"stage.{stage[:2]}.worked", 0) != worked_before:
                worked = True
                run.record(f"stage.{stage[:2]}.peak_gb", peak, "GB", "sum over all processes of the run")
            print(f"[{stage}] done in {(time.monotonic() - stage_began) / 60:.1f} min", flush=True)
    if worked:
        peaks = [run.fact(f"stage.{stage[:2]}.peak_gb", 0.0) for stage in STAGES]
        run.record(
            "memory.peak_gb", max(peaks), "GB", "highest of the stages: proportional set sizes of all processes, every 5 s"
        )
    if not failed and stages == STAGES and worked:
        run.record("pipeline.minutes", round((time.monotonic() - began) / 60, 2), "min", "wall time of `eagle3kit run`")
    return int(failed) if finish(run) else 1


def finish(run: Run) -> bool:
    """Write the report, print its path and the summary. A failing report must not hide what the run found."""
    from eagle3kit import findings, report

    try:
        path = report.build(run.root, project_path(run.params.reports_dir))
    except KitError as error:
        print(f"eagle3kit: the report could not be written: {error.message}", file=sys.stderr)
        return False
    print()
    for line in findings.summary_lines(run.root):
        print(line)
    print(f"\nreport: {path}")
    return True


def execute(run: Run, stage: str) -> str | None:
    """Execute one notebook with papermill. Returns None, or in one line why it failed.

    The executed notebook is kept in the run's `notebooks/`, also when it failed. papermill marks a killed cell as completed, so
    success is that this call returns without an error.
    """
    import papermill
    from papermill.exceptions import PapermillException, PapermillExecutionError

    source = project_path("notebooks") / f"{stage}.ipynb"
    if not source.exists():
        raise KitError(f"{source} is missing", fix="run from a checkout of eagle3kit")
    logging.getLogger("papermill").setLevel(logging.ERROR)
    try:
        papermill.execute_notebook(
            str(source),
            str(run.path("notebooks", f"{stage}.ipynb")),
            parameters=run.params.notebook_values(),
            kernel_name="python3",
            progress_bar=False,
            stdout_file=_Indented(),
            extra_arguments=["--IPKernelApp.log_level=ERROR"],
            start_timeout=300,
            cwd=str(project_path(".")),
        )
    except PapermillExecutionError as error:
        if error.ename in ("KitError", "ParamError"):
            return str(error.evalue)
        return f"{error.ename}: {error.evalue} (the traceback is in {run.path('notebooks', f'{stage}.ipynb')})"
    except (PapermillException, RuntimeError, OSError) as error:  # a kernel that died comes as a RuntimeError
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'the kernel died'}"
    return None


class _Indented(io.TextIOBase):
    """Standard output for what cells print, two spaces in; tables and pictures stay in the executed notebook."""

    def write(self, text: str) -> int:
        """Pass on the lines of `text` that say something."""
        for line in text.splitlines():
            if line.strip():
                print(f"  {line.strip()}", flush=True)
        return len(text)


class MemoryPeak:
    """Samples the memory of this process and all its descendants every few seconds.

    Proportional set size: memory that processes share is counted once over all of them.
    """

    def __init__(self, every_s: float = 5.0) -> None:
        self.highest = 0
        self._since = 0
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def take(self) -> int:
        """The peak in bytes since the last call."""
        peak, self._since = self._since, 0
        return peak

    def _watch(self) -> None:
        own = psutil.Process()
        while not self._stop.wait(self._every_s):
            total = 0
            for process in (own, *own.children(recursive=True)):
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self._since, self.highest = max(self._since, total), max(self.highest, total)

    def __enter__(self) -> MemoryPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


if __name__ == "__main__":
    sys.exit(main())
