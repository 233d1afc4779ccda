"""What a run will cost before it runs: tokens, bytes, memory, minutes, money.

Every number is an `Estimate`: its value, its unit, and how it was reached. Three kinds of numbers come out of this:

* counted: prompts, bytes a token, parameters. These are right.
* expected: tokens, and with them steps and disk, from assumed lengths of prompts and answers, with the most it can be beside it.
* guessed: minutes, and money from them. On a CPU from rates measured here, scaled by size; on a GPU from bandwidth and arithmetic
  (`speedup.Setup`, `training_flops`), good to a factor of two or so. They are labelled rough, and what cannot be said is unknown.

The rates and sizes of machines are data: `presets/hardware.json`. A machine is added there, and to the choices of `hardware`.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from eagle3kit import layers, recipe
from eagle3kit.data import Row, load_prompts
from eagle3kit.errors import KitError
from eagle3kit.params import FP8_LIMITS, Params
from eagle3kit.rundir import project_path, total_bytes
from eagle3kit.speedup import COMPUTE_SHARE, Hardware, Setup, active_parameters, hardware_presets, served_bytes
from eagle3kit.target import SMOLLM2, Target

DISK_LIMIT = 0.9
"""A run must not leave the disk fuller than this: file systems slow down, and other users of it fail."""

CHARACTERS_PER_TOKEN, TEMPLATE_TOKENS = 4.0, 32
"""Assumed for prompts that are not tokenised yet: English text, and a chat template with a system turn."""

PROMPT_TOKENS, ANSWER_TOKENS = 200, 1800
"""Assumed where prompts are not read yet, and for answers that may be longer: a thinking model's answer to a common question."""

DISK_GB_S = 1.0
"""Assumed write speed for hidden states, which bounds extraction on fast GPUs."""


class Estimate(NamedTuple):
    """One number of a plan.

    Attributes:
        value: the number or text; None when it is unknown.
        unit: its unit.
        how: how it was reached, with every assumption.
    """

    value: float | int | str | None
    unit: str
    how: str

    @property
    def text(self) -> str:
        """For a table, with a scale that suits the size: `117 GB`, `1.2 M tokens`, `unknown`."""
        if self.value is None or isinstance(self.value, str):
            return self.value or "unknown"
        if self.unit == "bytes":
            return _bytes(self.value)
        if self.unit == "share":
            return f"{100 * self.value:.1f} %"
        if self.unit == "min" and self.value >= 120:
            return f"{self.value / 60:,.1f} h"
        if self.unit == "FLOP":
            return f"{self.value:.2g} FLOP"
        if self.value >= 1e5:
            return f"{_scaled(self.value, ('', 'k', 'M', 'G', 'T'))} {self.unit}".strip()
        return (
            f"{self.value:,.4g} {self.unit}".strip() if isinstance(self.value, float) else f"{self.value:,} {self.unit}".strip()
        )


def _bytes(value: float) -> str:
    return _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def _scaled(value: float, units: Sequence[str]) -> str:
    step = 0
    while value >= 1000 and step < len(units) - 1:
        value, step = value / 1000, step + 1
    return f"{value:.3g} {units[step]}".strip()


# ---- tokens


@dataclass(frozen=True)
class Workload:
    """How much there is to do.

    Attributes:
        train_prompts, heldout_prompts: conversations.
        train_tokens, heldout_tokens: their tokens, prompt and answer.
        answer_tokens: tokens that the target writes, of both.
        most_tokens: the most that both can be; equal to `tokens` when they are counted.
        how: counted, or the assumptions.
    """

    train_prompts: int
    heldout_prompts: int
    train_tokens: int
    heldout_tokens: int
    answer_tokens: int
    most_tokens: int
    how: str

    @property
    def prompts(self) -> int:
        """Conversations in all."""
        return self.train_prompts + self.heldout_prompts

    @property
    def tokens(self) -> int:
        """Tokens in all: every one of them gets a hidden state."""
        return self.train_tokens + self.heldout_tokens


def workload(params: Params, train_prompts: int | None = None, tokens_in: Callable[[str], float] | None = None) -> Workload:
    """The work that the parameters ask for, before anything is answered.

    The built-in prompts and local files are read. A hub data set is read only to count its tokens: otherwise the lengths are
    assumed too, and `data_train_prompts` must say how many. Each answer of a conversation makes a row, with all that precedes it.

    Args:
        params: `data_source`, the numbers of prompts, the longest answer and conversation.
        train_prompts: reckon with so many training prompts of assumed length, whatever the source has.
        tokens_in: counts the tokens of a text (`template.token_counter`); by default they are guessed from its length.

    Raises:
        KitError: the number of prompts cannot be known, or the prompts cannot be read.
    """
    longest, most = params.data_seq_length, params.data_max_response_tokens
    answer = min(most, ANSWER_TOKENS)
    path = Path(params.data_source).expanduser()
    local = params.data_source == "builtin" or path.exists() or path.suffix in (".jsonl", ".json")
    if train_prompts is not None or not (local or tokens_in):
        train = train_prompts or params.data_train_prompts
        if not train:
            raise KitError(
                f"how many prompts data_source {params.data_source} has is not known before it is downloaded",
                seen="data_train_prompts: 0",
                wanted="a number",
                fix="set data_train_prompts",
            )
        heldout = params.data_heldout_prompts or round(train * params.data_heldout_share / (1 - params.data_heldout_share))
        each, n = min(longest, PROMPT_TOKENS + answer), train + heldout
        how = f"expected: prompts of {PROMPT_TOKENS} and answers of {answer} tokens assumed"
        return Workload(train, heldout, train * each, heldout * each, n * answer, n * longest, how)
    tokens, count, answers, upper = {"train": 0, "heldout": 0}, {"train": 0, "heldout": 0}, 0, 0
    for prompt in load_prompts(params)[0]:
        asked, users = float(TEMPLATE_TOKENS), 0
        count[prompt.split] += 1
        for role, text in prompt.turns:
            asked += tokens_in(text) if tokens_in else len(text) / CHARACTERS_PER_TOKEN
            if role == "user":
                users += 1
                tokens[prompt.split] += min(longest, math.ceil(asked) + users * answer)
                upper += min(longest, math.ceil(asked) + users * most)
        answers += users * answer
    asked_for = "tokens of the prompts counted" if tokens_in else f"{CHARACTERS_PER_TOKEN:g} characters a token"
    how = f"expected: {asked_for}, {TEMPLATE_TOKENS} for the template, answers of {answer} assumed"
    return Workload(count["train"], count["heldout"], tokens["train"], tokens["heldout"], answers, upper, how)


def counted(rows: Iterable[Row]) -> Workload:
    """The work that is left once the answers are there: their tokens, counted."""
    rows = list(rows)
    train, heldout = ([row for row in rows if row.split == split] for split in ("train", "heldout"))
    learnt, kept = (sum(row.length for row in split) for split in (train, heldout))
    return Workload(len(train), len(heldout), learnt, kept, sum(row.supervised for row in rows), learnt + kept, "counted")


# ---- sizes


def bytes_per_token(target: Target, n_aux: int, dtype: str, storage: str = "native") -> int:
    """Bytes of a token's hidden states: hidden x (n_aux auxiliary layers + the last one) x bytes of the number type.

    Kimi-K2.5 with three auxiliary layers in bfloat16: 7168 x 4 x 2 = 57,344. With `storage` fp8 it is one byte a number, and four
    for the token's scale.
    """
    numbers = target.hidden_size * (n_aux + 1)
    return numbers + 4 if storage == "fp8" else numbers * served_bytes(target, dtype)


def stored_tokens(params: Params, work: Workload) -> int:
    """Tokens whose states are in files at a time: all; online those of the held-out rows, of the golden check's, and of the rows
    on their way to the trainer, one a data-loader worker. The latter two are reckoned with the average length.
    """
    if params.extraction_mode == "offline":
        return work.tokens
    rows = params.golden_samples + params.train_processes * max(1, params.train_workers)
    return min(work.tokens, work.heldout_tokens + math.ceil(rows * work.tokens / max(1, work.prompts)))


def drafter_shape(params: Params, target: Target) -> dict[str, int]:
    """Heads, widths and vocabulary of the drafter as far as the plan needs them: what `recipe.derive` will choose.

    Raises:
        KitError: the parameters do not fit the target (`recipe.attention_shape`, `layers.check`).
    """
    attention = {name: value for name, (value, _, _) in recipe.attention_shape(params, target).items()}
    return {
        "heads": attention["num_attention_heads"],
        "kv_heads": attention["num_key_value_heads"],
        "head_dim": attention["head_dim"],
        "intermediate": params.drafter_intermediate_size or target.intermediate_size,
        "vocab": recipe.draft_vocabulary(params, target),
        "layers": params.drafter_layers,
        "aux": len(layers.check(params.aux_layers or layers.default_aux_layers(target.n_layers), target.n_layers)),
    }


def drafter_parameters(target: Target, shape: Mapping[str, int], *, norm_before_fc: bool = True) -> dict[str, int]:
    """Parameters of an EAGLE-3 drafter by group.

    Layout (speculators, vLLM): `fc [h, aux*h]`; the first layer's `q_proj [heads*d, 2h]`, `k_proj` and `v_proj [kv*d, 2h]` (its
    input is the token's embedding beside the state), `o_proj [h, heads*d]`; `gate, up [i, h]`, `down [h, i]`; norms of width h
    (two of the input and one before the MLP, the last one) and one of width aux*h when `norm_before_fc`; `lm_head [draft, h]`;
    `embed_tokens [vocab, h]`. Further layers take h, not 2h, and two norms.

    Args:
        target: gives h and vocab.
        shape: `heads`, `kv_heads`, `head_dim`, `intermediate`, `vocab`, `layers`, `aux`; see `drafter_shape`.
        norm_before_fc: whether the auxiliary states are normalised first, joined or each by itself: the same number of weights.

    Returns:
        `{"fc", "attention", "mlp", "norms", "lm_head", "embed_tokens"}`. The trainer keeps the last two frozen: they are copies
        of the target's.
    """
    h, n = target.hidden_size, shape["layers"]
    queries, keys = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    first, further = (width * (queries + 2 * keys) + queries * h for width in (2 * h, h))
    return {
        "fc": shape["aux"] * h * h,
        "attention": first + (n - 1) * further,
        "mlp": n * 3 * h * shape["intermediate"],
        "norms": 4 * h + (n - 1) * 2 * h + (shape["aux"] * h if norm_before_fc else 0),
        "lm_head": shape["vocab"] * h,
        "embed_tokens": target.vocab_size * h,
    }


def drafter_read_bytes(target: Target, shape: Mapping[str, int]) -> float:
    """Bytes in bfloat16 that one pass of a drafter reads: everything but `embed_tokens`, of which it reads a row."""
    counts = drafter_parameters(target, shape)
    return 2.0 * (sum(counts.values()) - counts["embed_tokens"])


def training_flops(parameters: Mapping[str, int], ttt_steps: int) -> int:
    """Arithmetic of training on one token, attention scores left out.

    A trained matrix of p parameters costs 6p (2p forward, 4p backward), a frozen one that gradients pass through 4p, a frozen one
    without gradient 2p (6p: Kaplan et al., arXiv 2001.08361, section 2.1). `fc` runs once a token, the layer and the frozen
    `lm_head` once a TTT step, the target's own `lm_head` once a token, for the targets.
    """
    once = 6 * parameters["fc"] + 2 * parameters["lm_head"]
    a_step = 6 * (parameters["attention"] + parameters["mlp"]) + 4 * parameters["lm_head"]
    return once + ttt_steps * a_step


# ---- speed


def generation_rate(target: Target, hardware: Hardware, params: Params, streams: int) -> tuple[float, str]:
    """Tokens a second that the target writes with `streams` requests in flight, and how that is known."""
    if hardware.is_gpu:
        setup = Setup(target, hardware, params.serve_tensor_parallel, dtype=params.target_dtype)
        how = f"rough: the model of a decode step, {streams} streams, {params.serve_tensor_parallel} x {hardware.label}"
        return setup.tokens_per_s(streams), how
    known = {int(k): float(v) for k, v in hardware.rates["generate_tokens_per_s"].items()}
    rate = _interpolated(known, streams) * _cpu_scale(target, hardware)
    return rate, f"{rate:.3g} tokens/s at {streams} streams, scaled by size from rates {hardware.source}"


def _cpu_scale(target: Target, hardware: Hardware) -> float:
    """Rates fall in proportion to the size; a smaller model is not taken to be faster, its steps are all overhead."""
    return min(1.0, int(hardware.rates["rates_for_parameters"]) / active_parameters(target))


def _interpolated(known: Mapping[int, float], x: float) -> float:
    """Between the known points straight over log x; beyond them the nearest one."""
    points = sorted(known.items())
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)
    return points[-1][1]


def _extraction_rate(target: Target, hardware: Hardware, params: Params, per_token: int) -> tuple[float, str]:
    if hardware.bf16_tflops is None:
        rate = hardware.rates["extract_tokens_per_s"] * _cpu_scale(target, hardware)
        return rate, f"{rate:.3g} tokens/s, scaled by size from rates {hardware.source}"
    compute = hardware.bf16_tflops * 1e12 * COMPUTE_SHARE * params.serve_tensor_parallel / (2 * active_parameters(target))
    disk = DISK_GB_S * 1e9 / per_token
    if disk < compute:
        return disk, f"rough: bound by writing, {DISK_GB_S:g} GB/s assumed"
    return compute, f"rough: {100 * COMPUTE_SHARE:.0f} % of {hardware.bf16_tflops:g} TFLOP/s a GPU"


def _training_rate(hardware: Hardware, params: Params) -> tuple[float, str]:
    """FLOP/s of training."""
    if hardware.bf16_tflops is None:
        return hardware.rates["train_gflops"] * 1e9, f"{hardware.rates['train_gflops']} GFLOP/s {hardware.source}"
    rate = hardware.bf16_tflops * 1e12 * COMPUTE_SHARE * params.train_processes
    return rate, f"rough: {100 * COMPUTE_SHARE:.0f} % of {hardware.bf16_tflops:g} TFLOP/s, {params.train_processes} processes"


# ---- the plan


@dataclass(frozen=True)
class Disk:
    """The file system that a run writes to, in bytes: what is used, what this user may still write."""

    used: int
    free: int

    @staticmethod
    def of(folder: Path) -> Disk:
        """Of the nearest existing folder at or above `folder`."""
        usage = shutil.disk_usage(_existing(folder))
        return Disk(usage.used, usage.free)


@dataclass(frozen=True)
class Plan:
    """A run's cost before it runs. Made by `plan`.

    Attributes:
        params, target, work, hardware: what it was made from.
        items: every estimate by name, in the order of the table.
        disk: the file system of `runs_dir`.
        captured: where the server writes states, if that is known.
    """

    params: Params
    target: Target
    work: Workload
    hardware: Hardware
    items: dict[str, Estimate]
    disk: Disk
    captured: Path | None = None

    def __getitem__(self, name: str) -> Estimate:
        return self.items[name]

    def value(self, name: str) -> float:
        """The number of an estimate.

        Raises:
            TypeError: it is text, or unknown.
        """
        value = self.items[name].value
        if not isinstance(value, int | float):
            raise TypeError(f"{name} is not a number: {value}")
        return value

    def rows(self) -> list[dict[str, str]]:
        """Rows `{"what", "value", "how"}` for a table."""
        return [{"what": name, "value": item.text, "how": item.how} for name, item in self.items.items()]

    def problems(self) -> list[KitError]:
        """What stands against the plan, each with what would mend it; empty when nothing does."""
        return [problem for problem in (self._memory_problem(), self._disk_problem()) if problem is not None]

    def check(self) -> None:
        """Stop here if the plan cannot work.

        Raises:
            KitError: the target's weights do not fit in memory, or the disk would be more than 90 % full afterwards.
        """
        for problem in self.problems():
            raise problem

    def check_disk(self) -> None:
        """Stop here if the disk would be more than 90 % full afterwards.

        Raises:
            KitError: it would; the message names the parameters that would fit.
        """
        if (problem := self._disk_problem()) is not None:
            raise problem

    def _memory_problem(self) -> KitError | None:
        if self["memory.fits"].value != "no":
            return None
        weights, room = self.value("target.weights"), self.value("memory.for_target")
        p, h = self.params, self.hardware
        if h.memory_gb is None:
            return KitError(
                f"the weights of {self.target.name} do not fit in this machine's memory",
                seen=f"{_bytes(weights)} of weights",
                wanted=f"at most {_bytes(room)} beside the KV cache",
                fix=f"set target_model: smollm2-135m or tiny-kimi-k2.5, or run {self.target.name} on GPUs",
            )
        per_gpu = h.memory_gb * 1e9 * p.serve_gpu_memory_utilization
        needed = math.ceil(weights / per_gpu)
        spread = next((n for n in (1, 2, 4, 8, 16, 32, 64) if n >= needed), needed)
        remedy = f"set serve_tensor_parallel: {spread}"
        if spread > p.gpu_count:
            bigger = sorted(
                x.name for x in hardware_presets().values() if (x.memory_gb or 0) * 1e9 * p.gpu_count * 0.9 >= weights
            )
            remedy = f"take a machine with {spread} of these GPUs (gpu_count, serve_tensor_parallel)"
            remedy += f", or {p.gpu_count} of hardware {', '.join(bigger)}" if bigger else ""
        return KitError(
            f"the weights of {self.target.name} do not fit in the memory of {p.serve_tensor_parallel} x {h.label}",
            seen=f"{weights / 1e9:.1f} GB of weights",
            wanted=f"at most {room / 1e9:.1f} GB (serve_tensor_parallel {p.serve_tensor_parallel}, "
            f"serve_gpu_memory_utilization {p.serve_gpu_memory_utilization:g})",
            fix=remedy,
        )

    def _disk_problem(self) -> KitError | None:
        need, share = self.value("disk.needed"), self.value("disk.share")
        if share <= DISK_LIMIT or need < 0.1 * self.disk.free:  # a full disk is no reason to refuse a run that hardly adds to it
            return None
        p, states = self.params, self.value("hidden_states.bytes")
        # What the states may take at most: the limit, less what is used and what else the run writes.
        room = states + DISK_LIMIT * (self.disk.used + self.disk.free) - (self.disk.used + need)
        fits = math.floor(room / states * self.work.prompts) - self.work.heldout_prompts
        remedy = f"set runs_dir to a disk with {_bytes(need / DISK_LIMIT)} free"
        n_aux, kept = drafter_shape(p, self.target)["aux"], stored_tokens(p, self.work)
        rounded = kept * bytes_per_token(self.target, n_aux, p.target_dtype, "fp8")
        if p.extraction_storage == "native" and rounded <= room:
            limits = ", ".join(f"{name}: {value:g}" for name, value in FP8_LIMITS.items())
            remedy += f", or extraction_storage: fp8 (with {limits})"
        few = stored_tokens(p.model_copy(update={"extraction_mode": "online"}), self.work) * states // kept
        if p.extraction_mode == "offline" and p.extraction_engine == "vllm" and few <= room:
            both = p.train_processes + p.serve_tensor_parallel
            gpus = f", with train_processes and serve_tensor_parallel together at most {p.gpu_count}"
            remedy += f", or extraction_mode: online ({_bytes(few)} of states{gpus if 0 < p.gpu_count < both else ''})"
        if fits >= 1 and p.extraction_mode == "offline":
            remedy += f", or data_train_prompts: {fits}"
            shorter = math.floor(p.data_seq_length * room / states)
            if shorter > p.data_max_response_tokens:
                remedy += f", or data_seq_length: {shorter}"
        return KitError(
            f"the disk of runs_dir would be {100 * min(share, 9.99):.0f} % full",
            seen=f"{self['disk.needed'].text} needed, {self['disk.free'].text} free",
            wanted=f"at most {100 * DISK_LIMIT:.0f} % full",
            fix=remedy,
        )


def plan(
    params: Params,
    target: Target,
    work: Workload | int | None = None,
    disk: Disk | None = None,
    captured: Path | None = None,
) -> Plan:
    """Reckon a run before it runs.

    Args:
        params: the parameters.
        target: from `target.describe`.
        work: what was counted; or a number of training prompts, of assumed length; or None for what the parameters ask for.
        disk: the file system; by default the one of `runs_dir`.
        captured: where the server writes the states of these layers; by default all that it has written for the run counts.

    Raises:
        KitError: the number of prompts cannot be known, or the drafter's parameters do not fit the target. Whether the run fits
            the machine is `Plan.check`'s business.
    """
    p = params
    if not isinstance(work, Workload):
        work = workload(p, work)
    disk = disk or Disk.of(project_path(p.runs_dir))
    hardware = hardware_presets()[p.hardware]
    items = {
        "prompts": Estimate(work.prompts, "prompts", f"{work.train_prompts} to train on, {work.heldout_prompts} held out"),
        "tokens": Estimate(work.tokens, "tokens", f"{work.how}; cut at data_seq_length ({p.data_seq_length})"),
    }
    items |= _sizes(p, target, work, disk, captured)
    items |= _minutes(p, target, work, hardware)
    items |= _memory(p, target, hardware)
    items["money"] = _money(p, items["minutes.total"])
    return Plan(p, target, work, hardware, items, disk, captured)


FIRST_LOOK = 32
"""Conversations that must be answered before their lengths say something of the others."""


def guarded(reckoned: Plan, say: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """`say`, called with (conversations answered, all of them), which also ends the work early where the disk will not do.

    Answers are written with their states, and how long they get is only assumed before. So the plan is reckoned anew from what
    the first ones took, each time that twice as many are there.

    Args:
        reckoned: the plan; its `captured` is where the states appear.

    Returns:
        The function; it raises a `KitError` where the disk would be more than 90 % full, as `Plan.check_disk` does.
    """
    due = FIRST_LOOK

    def look(done: int, total: int) -> None:
        nonlocal due
        say(done, total)
        if done < due or reckoned.captured is None:
            return
        due = 2 * done
        work = reckoned.work
        tokens = _captured_bytes(reckoned.captured) / reckoned.value("hidden_states.bytes_per_token") * total / done
        if not tokens:
            return  # nothing is written with the answers
        longer = tokens / max(1, work.tokens)
        learnt, kept = round(work.train_tokens * longer), round(work.heldout_tokens * longer)
        how = f"expected: from the first {done:,} of {total:,} conversations"
        seen = replace(work, train_tokens=learnt, heldout_tokens=kept, most_tokens=learnt + kept, how=how)
        plan(reckoned.params, reckoned.target, seen, captured=reckoned.captured).check_disk()

    return look


def _sizes(p: Params, target: Target, work: Workload, disk: Disk, captured: Path | None) -> dict[str, Estimate]:
    """Bytes of everything that is written, against the disk; parameters of the drafter."""
    shape = drafter_shape(p, target)
    n_aux = shape["aux"]
    counts = drafter_parameters(target, shape, norm_before_fc=p.drafter_norm_before_fc or p.drafter_fc_norm)
    total = sum(counts.values())
    trained = total - counts["lm_head"] - counts["embed_tokens"]
    per_token = bytes_per_token(target, n_aux, p.target_dtype, p.extraction_storage)
    number = p.target_dtype if p.extraction_storage == "native" else f"{p.extraction_storage} with a scale a token"
    kept, there = stored_tokens(p, work), _existing_states(p, captured)
    states = kept * per_token
    which = "" if p.extraction_mode == "offline" else " of the held-out rows, the golden check's and those in flight"
    saves = math.ceil(p.train_epochs / p.train_save_every)
    checkpoints = saves * (2 * total + 4 * trained)
    download, download_how, same_disk = _download(p, target)
    need = max(0, states - there) + checkpoints + (download if same_disk else 0)
    parts = "hidden states + checkpoints" + (" + download" if download and same_disk else "")
    return {
        "hidden_states.bytes_per_token": Estimate(
            per_token, "bytes", f"{target.hidden_size} wide x ({n_aux} auxiliary layers + the last), number type {number}"
        ),
        "hidden_states.bytes": Estimate(states, "bytes", f"{work.how.partition(':')[0]}: tokens{which} x bytes per token"),
        "hidden_states.at_most": Estimate(
            work.most_tokens * kept // max(1, work.tokens) * per_token,
            "bytes",
            "every answer as long as data_max_response_tokens and data_seq_length allow",
        ),
        "checkpoints.bytes": Estimate(checkpoints, "bytes", f"{saves} checkpoints: weights and AdamW's two moments in bfloat16"),
        "download.bytes": Estimate(download, "bytes", download_how),
        "disk.needed": Estimate(need, "bytes", parts + (f"; {_bytes(there)} of the states are there already" if there else "")),
        "disk.free": Estimate(disk.free, "bytes", f"file system of runs_dir ({p.runs_dir})"),
        "disk.share": Estimate(
            (disk.used + need) / max(1, disk.used + disk.free), "share", "of that file system in use after the run"
        ),
        "drafter.trained_parameters": Estimate(
            trained,
            "parameters",
            f"fc, attention ({shape['heads']} heads x {shape['head_dim']}), MLP ({shape['intermediate']} wide), norms",
        ),
        "drafter.parameters": Estimate(total, "parameters", f"and lm_head ({shape['vocab']} tokens) and embeddings, both frozen"),
        "drafter.bytes": Estimate(2 * total, "bytes", "in bfloat16"),
    }


def _existing_states(p: Params, captured: Path | None) -> int:
    """Bytes of hidden states that this run has already written, those not yet given to their rows included."""
    run = project_path(p.runs_dir) / p.run_name
    folders = run.glob("captured/*") if captured is None else [captured]
    return sum(map(_captured_bytes, [run / "hidden_states", *folders]))


def _captured_bytes(folder: Path) -> int:
    try:
        return total_bytes(folder.glob("*.safetensors"))
    except OSError:  # a file was renamed or deleted meanwhile
        return 0


def _download(p: Params, target: Target) -> tuple[int, str, bool]:
    """Bytes that vLLM still has to download, where they go, and whether that is the disk of `runs_dir`."""
    if "/" not in target.source or target.source.startswith("/") or target.name == SMOLLM2:
        return 0, "the target is on this machine, or is made here", False
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    blobs = cache / f"models--{target.source.replace('/', '--')}" / "blobs"
    try:
        have = total_bytes(file for file in blobs.iterdir() if file.is_file())
    except OSError:
        have = 0
    left = max(0, target.weight_bytes()[0] - have)
    same = _existing(cache).stat().st_dev == _existing(project_path(p.runs_dir)).stat().st_dev
    return left, f"weights of {target.source} to {cache}" + (", the same disk" if same else ", another disk"), same


def _existing(folder: Path) -> Path:
    """The nearest existing folder at or above `folder`."""
    return next((path for path in (folder.resolve(), *folder.resolve().parents) if path.exists()), Path("/"))


def _minutes(p: Params, target: Target, work: Workload, hardware: Hardware) -> dict[str, Estimate]:
    """Steps, arithmetic and time."""
    shape = drafter_shape(p, target)
    per_token = bytes_per_token(target, shape["aux"], p.target_dtype, p.extraction_storage)
    passes = work.train_tokens * p.train_epochs
    steps = p.train_epochs * math.ceil(work.train_tokens / (p.train_pack_tokens * p.train_processes))
    flops = training_flops(drafter_parameters(target, shape), p.train_ttt_steps) * passes
    loading = target.weight_bytes(p.target_dtype)[0] / (hardware.load_gb_s * 1e9) if hardware.load_gb_s else 0.0
    start = hardware.server_start_s + loading

    answer_rate, answer_how = generation_rate(target, hardware, p, min(p.data_concurrency, p.serve_max_num_seqs))
    extract_rate, extract_how = _extraction_rate(target, hardware, p, per_token)
    answering = work.answer_tokens / answer_rate + max(0, work.tokens - work.answer_tokens) / extract_rate
    online = p.extraction_mode == "online"
    extracting = stored_tokens(p, work) / extract_rate
    train_rate, train_how = _training_rate(hardware, p)
    training = flops / train_rate
    if online:
        training += passes / extract_rate
        train_how += (
            f"; and every epoch extracts anew, at most {passes / p.train_epochs / extract_rate / 60:,.1f} min ({extract_how})"
        )

    asked = min(p.eval_prompts or work.heldout_prompts, work.heldout_prompts)
    few = min(p.eval_speed_prompts, asked)
    eval_rate, _ = generation_rate(target, hardware, p, min(p.eval_concurrency, p.serve_max_num_seqs))
    speed_rate, _ = generation_rate(target, hardware, p, p.eval_speed_concurrency)
    answer = min(p.eval_max_tokens, ANSWER_TOKENS)
    one = answer * (asked / eval_rate + p.eval_repeats * few / speed_rate) + start
    starts = 3 if online else 1  # before the evaluation's
    total = starts * start + answering + extracting + training + 3 * one + 120
    return {
        "train.token_passes": Estimate(passes, "tokens", f"training tokens x {p.train_epochs} epochs"),
        "train.steps": Estimate(
            steps, "steps", f"packs of {p.train_pack_tokens} tokens filled to the end, {p.train_processes} process(es)"
        ),
        "train.flops": Estimate(
            flops, "FLOP", f"{p.train_ttt_steps} TTT steps of 6 x trained parameters + 4 x frozen lm_head a token, fc once"
        ),
        "server.starts": Estimate(
            starts + 3,
            "starts",
            ("one that answers, one that extracts, one beside the trainer" if online else "one that answers and extracts")
            + f", then none, ngram and eagle3 in turn; about {start:,.0f} s each",
        ),
        "minutes.answers": Estimate(answering / 60, "min", answer_how),
        "minutes.hidden_states": Estimate(
            extracting / 60,
            "min",
            f"at most, {extract_how}" + ("" if online else "; states captured while answering are taken over"),
        ),
        "minutes.training": Estimate(training / 60, "min", train_how),
        "minutes.evaluation": Estimate(
            3 * one / 60,
            "min",
            f"3 contestants: {asked} prompts at {p.eval_concurrency} streams, {p.eval_repeats} x {few} prompts at "
            f"{p.eval_speed_concurrency}, answers of {answer} tokens, no gain from speculation counted",
        ),
        "minutes.total": Estimate(
            total / 60, "min", f"at most: the above, {starts} server start(s) before the evaluation, and 2 min for the rest"
        ),
    }


def _memory(p: Params, target: Target, hardware: Hardware) -> dict[str, Estimate]:
    """The target's weights against the memory of the GPUs that one server has, or of this machine."""
    weights, weights_how = target.weight_bytes(p.target_dtype)
    room: int | None
    if hardware.memory_gb is not None:
        room = int(hardware.memory_gb * 1e9 * p.serve_tensor_parallel * p.serve_gpu_memory_utilization)
        how = f"{p.serve_tensor_parallel} of {p.gpu_count} x {hardware.label}, {hardware.memory_gb:g} GB each, of which "
        how += f"{100 * p.serve_gpu_memory_utilization:.0f} %"
    else:
        try:
            room = int(0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - p.serve_kv_cache_gb * 1e9)
        except (OSError, ValueError):
            room = None
        how = f"90 % of this machine's memory, less the KV cache ({p.serve_kv_cache_gb:g} GB)"
    left = None if room is None else room - weights
    fits = None if left is None else "yes" if left >= 0 else "no"
    rest = "" if left is None else f"; {abs(left) / 1e9:,.1f} GB {'are left' if left >= 0 else 'are missing'}"
    return {
        "target.weights": Estimate(weights, "bytes", weights_how),
        "memory.for_target": Estimate(room, "bytes", how),
        "memory.fits": Estimate(fits, "", f"the target's weights in that memory{rest}"),
    }


def _money(p: Params, minutes: Estimate) -> Estimate:
    if not p.gpu_price_per_hour or not p.gpu_count or not isinstance(minutes.value, float):
        return Estimate(None, "US$", "gpu_price_per_hour or gpu_count is 0")
    hours = minutes.value / 60
    how = f"rough: {hours:.1f} h x {p.gpu_count} GPUs x {p.gpu_price_per_hour:g} US$, download not counted"
    return Estimate(round(hours * p.gpu_count * p.gpu_price_per_hour, 2), "US$", how)
