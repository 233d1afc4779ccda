"""What speculation buys on a machine: the time of one decode step, taken apart, with and without drafting.

A step that verifies t tokens of B streams takes

    weights read            every dense weight, and of each layer's routed experts those that the t tokens visit
  + KV cache read           the context of every stream, once a step
  + arithmetic              of t tokens: that of the routed experts, and of the rest what takes longer than reading its numbers
  + all-reduces             two a layer, of t hidden states, from a latency table of the machine
  + launches                a constant a layer, and on a CPU one a request
  + drafter                 k passes: its weights and its own KV cache read, arithmetic, launches, and two all-reduces a layer
  + verification            a constant a speculative step, and on a CPU one a drafted token

and yields AL tokens a stream; speed-up = AL x step without / step with (Leviathan et al., arXiv 2211.17192). Four constants are
fitted, on published rows only (`model_check`), and stored in `presets/speedup.json`; the rest is data: the target's config,
`presets/hardware.json`, and an acceptance curve.

But for that the terms are added, not overlapped, and nothing is known here of queueing, prefill or the mix of requests: it is a
model of steady decoding with B streams always in flight.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from eagle3kit.errors import KitError
from eagle3kit.model_config import dtype_bytes
from eagle3kit.target import PRESETS, Target

COMPUTE_SHARE = 0.25
"""Share of the dense peak that products are assumed to reach: of routed experts, of a drafter, in prefill, in training."""

DENSE_SHARE = 0.6
"""The same of a decode step's products with a matrix that all its tokens share, and of attention."""

CONTEXT = 1000
"""Tokens of context of a stream where nothing else is said."""

DRAFTER_LAUNCHES = 1
"""Layers' worth of launches of one drafter pass beside its layers: fc, lm_head and the choice of a token together."""

MEMORY_SHARE = 0.95
"""Share of a GPU's memory that weights and KV cache may fill at most; the rest is for a server's buffers."""


# ---- machines


@dataclass(frozen=True)
class Hardware:
    """A kind of machine.

    Attributes:
        name: its key in `presets/hardware.json`, a choice of the parameter `hardware`.
        label: its name for people.
        memory_gb: of one GPU, in units of 1e9 bytes; None on a CPU, where this machine's own memory counts.
        bandwidth_gb_s: of one GPU's memory.
        link, link_gb_s: between GPUs, in words and as one GPU's bandwidth in one direction. NVLink is sold with both directions
            together: half of that.
        bf16_tflops: dense peak of one GPU.
        compute: CUDA compute capability.
        rates: measured rates, of a CPU only.
        server_start_s: start of a server without loading weights.
        load_gb_s: assumed speed of loading weights.
        source: where the numbers come from.
        all_reduce: latency tables by kind, the first the usual one; see `all_reduce_s`.
    """

    name: str
    label: str
    memory_gb: float | None
    bandwidth_gb_s: float | None
    link: str
    link_gb_s: float | None
    bf16_tflops: float | None
    compute: float | None
    rates: Mapping[str, Any]
    server_start_s: float
    load_gb_s: float | None
    source: str
    all_reduce: Mapping[str, Mapping[str, Any]]

    @property
    def is_gpu(self) -> bool:
        """Whether it has GPUs."""
        return self.memory_gb is not None


_NEEDED = ("memory_gb", "bandwidth_gb_s", "link_gb_s", "bf16_tflops")
_OPTIONAL: dict[str, Any] = {
    "label": "",
    "link": "as given",
    "compute": None,
    "server_start_s": 120.0,
    "load_gb_s": 2.0,
    "source": "given by the user",
    "all_reduce": {"assumed": {"alpha_us": 12.0}},
}


def hardware_presets(file: str | Path | None = None) -> dict[str, Hardware]:
    """Every known machine by name: `presets/hardware.json`, and the user's own.

    Args:
        file: YAML or JSON with more GPUs: `{name: {memory_gb, bandwidth_gb_s, link_gb_s, bf16_tflops}}`, of one GPU each, and
            where they are known `label`, `link`, `source` and `all_reduce`, as in `presets/hardware.json`. `link_gb_s` is that
            of one direction. Without `all_reduce`, 12 microseconds and a ring over the link are assumed, as for NVLink.

    Raises:
        KitError: the file cannot be read, or something in it is missing, unknown, malformed or no positive number.
    """
    presets = json.loads((PRESETS / "hardware.json").read_text(encoding="utf-8"))
    known = {field.name for field in fields(Hardware)}
    found = {
        name: Hardware(
            name=name,
            rates={k: v for k, v in p.items() if k not in known},
            **{"all_reduce": {}} | {k: v for k, v in p.items() if k in known},
        )
        for name, p in presets.items()
    }
    return found | (_own_hardware(Path(file).expanduser()) if file else {})


def read_yaml(file: Path, what: str, fix: str) -> Any:
    """What a file of YAML or JSON holds.

    Raises:
        KitError: it cannot be read.
    """
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise KitError(f"{what} {file} cannot be read", seen=str(error) or type(error).__name__, fix=fix) from None


def _own_hardware(file: Path) -> dict[str, Hardware]:
    given = read_yaml(file, "the hardware file", "set hardware_file")
    if not isinstance(given, Mapping) or not all(isinstance(machine, Mapping) for machine in given.values()):
        raise KitError(f"{file} does not map names of GPUs to their numbers", wanted=f"NAME: {{{', '.join(_NEEDED)}}}")
    made = {}
    for name, machine in given.items():
        where = f"{file}: {name}"
        if name == "cpu":
            raise KitError(f"{where} is the name of machines without a GPU", fix="name the GPU")
        for key in machine:
            if key not in (*_NEEDED, *_OPTIONAL):
                raise KitError(f"{where} has an unknown entry", seen=key, wanted=", ".join((*_NEEDED, *_OPTIONAL)))
        values = {**_OPTIONAL, **machine}
        for key in (*_NEEDED, *(key for key in ("compute", "server_start_s", "load_gb_s") if machine.get(key) is not None)):
            positive(values.get(key), f"{where}: {key}")
        values |= {key: str(values[key] or _OPTIONAL[key] or name) for key in ("label", "link", "source")}
        _check_tables(values["all_reduce"], where)
        made[str(name)] = Hardware(name=str(name), rates={}, **values)
    return made


_FORMS = {"alpha_us": {"gb_s"}, "fastest_of": set(), "like": {"bytes", "us", "ranks"}, "us": {"ranks"}}
"""Forms of an all-reduce table by the key that tells them apart, with what else belongs to each; see `all_reduce_s`."""


def _check_tables(tables: Any, machine: str) -> None:
    if not isinstance(tables, Mapping) or not tables:
        raise KitError(f"{machine}: all_reduce has no tables", seen=tables, wanted="NAME: a table, or no entry all_reduce at all")
    for kind in tables:
        if not isinstance(kind, str):
            raise KitError(f"{machine}: a name in all_reduce is no text", seen=kind, fix="put it in quotes")
        _check_table(tables, kind, machine, ())


def _check_table(tables: Mapping[str, Any], kind: str, machine: str, path: tuple[str, ...]) -> None:
    """Raise a KitError where a table, or one that it refers to, is malformed, missing, or leads back to itself."""
    if kind in path:
        raise KitError(f"{machine}: all_reduce {kind!r} leads back to itself", seen=" -> ".join((*path, kind)))
    where, table = f"{machine}: all_reduce {kind!r}", tables[kind]
    form = next((form for form in _FORMS if form in table), "") if isinstance(table, Mapping) else ""
    if not form or not set(table) <= {form, "note"} | _FORMS[form]:
        raise KitError(f"{where} is malformed", seen=table, wanted='one of "us", "like", "fastest_of" and "alpha_us"')
    needed = {"alpha_us": ["alpha_us"], "like": ["bytes", "us"]}.get(form, [])
    for key in (*needed, *({"gb_s"} & set(table))):
        positive(table.get(key), f"{where}: {key}")
    ranks = table.get("ranks", 8)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2:
        raise KitError(f"{where}: ranks is no number of GPUs that reduce", seen=ranks, wanted="2 or more")
    if form == "us":
        points = table["us"]
        if not isinstance(points, Mapping) or len({_size(size, where) for size in points}) < 2:
            raise KitError(f"{where} is malformed", seen=points, wanted='"us" with two sizes or more')
        for size, us in points.items():
            positive(us, f"{where}: us at {size}")
    others = [table["like"]] if form == "like" else table.get("fastest_of", [])
    if not isinstance(others, list) or (form == "fastest_of" and not others):
        raise KitError(f"{where}: fastest_of names no tables", seen=others, wanted="a list of names")
    for other in others:
        if not isinstance(other, str) or other not in tables:
            raise KitError(f"{where} refers to a table that is missing", seen=other, wanted=", ".join(map(str, tables)))
        _check_table(tables, other, machine, (*path, kind))


def _size(given: Any, where: str) -> float:
    """A size in bytes, the key of a measured latency: a number, or in JSON its digits."""
    try:
        return positive(float(given), "")
    except (TypeError, ValueError, OverflowError, KitError):
        raise KitError(f"{where}: a size is no positive number", seen=given, fix="write bytes, such as 8192") from None


def positive(value: Any, what: str) -> float:
    """A number above 0.

    Raises:
        KitError: it is none; `what` says what it should be one of.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise KitError(
            f"{what} is no positive number",
            seen="nothing" if value is None else value,
            fix="write a plain number, such as 8000 or 1.8e+3",
        )
    return float(value)


def all_reduce_kinds(hardware: Hardware) -> list[str]:
    """Names of the machine's all-reduce tables, the usual one first."""
    return list(hardware.all_reduce)


def all_reduce_s(hardware: Hardware, kind: str, size: float, ranks: int) -> float:
    """Seconds of one all-reduce.

    A table is one of these:

    * `{"us": {bytes: microseconds}, "ranks": n}`, measured: straight lines between its points, and above the last one its last
      slope, or that of a ring, 2 (n - 1) / n / B, where that is steeper. With other ranks, what exceeds the smallest latency
      grows with ranks - 1.
    * `{"like": kind, "bytes": s, "us": t}`: another table, scaled so that s bytes take t microseconds.
    * `{"fastest_of": [kinds]}`: what an engine that chooses by size gets.
    * `{"alpha_us": a}`, modelled, not measured: a + 2 (n - 1) / n x size / B; `"gb_s"` gives another B.

    Args:
        hardware: gives the tables, which were checked when they were loaded, and B from `link_gb_s`.
        kind: a name of `all_reduce_kinds`.
        size: bytes that each rank holds.
        ranks: GPUs that take part; one needs none.

    Raises:
        KitError: the machine has no such table.
    """
    if ranks <= 1:
        return 0.0
    table = hardware.all_reduce.get(kind)
    if table is None:
        raise KitError(f"{hardware.label} has no all-reduce table {kind!r}", wanted=" or ".join(hardware.all_reduce) or "none")
    ring = 2 * (ranks - 1) / ranks / (positive(table.get("gb_s", hardware.link_gb_s), f"link_gb_s of {hardware.label}") * 1e9)
    if "alpha_us" in table:
        return float(table["alpha_us"]) * 1e-6 + ring * size
    if "fastest_of" in table:
        return min(all_reduce_s(hardware, other, size, ranks) for other in table["fastest_of"])
    if "like" in table:
        usual = all_reduce_s(hardware, table["like"], table["bytes"], table.get("ranks", 8))
        return float(table["us"]) * 1e-6 / usual * all_reduce_s(hardware, table["like"], size, ranks)
    points: list[tuple[float, float]] = sorted((float(at), us * 1e-6) for at, us in table["us"].items())
    least = min(us for _, us in points)
    more: float = (ranks - 1) / (table.get("ranks", ranks) - 1)
    (x0, y0), (x1, y1) = points[-2:]
    if size > x1:
        return least + (y1 - least) * more + (size - x1) * max((y1 - y0) / (x1 - x0) * more, ring)
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if size <= x1:
            between = y0 + (y1 - y0) * (max(size, x0) - x0) / (x1 - x0)
            return least + (between - least) * more
    raise AssertionError("points are sorted")


# ---- what a step reads and computes


def experts_touched(experts: int, per_token: int, tokens: float) -> float:
    """Distinct experts that `tokens` tokens visit in one layer under uniform routing: E (1 - (1 - K/E)^t).

    384 experts, 8 a token: 8, 15.8, 31, 59.5, 109.8 for 1, 2, 4, 8, 16 tokens. Routing of consecutive tokens is correlated
    (MoESD, arXiv 2505.19645), so the true number is lower; see `Constants.routing_power`.
    """
    untouched: float = (1 - per_token / experts) ** tokens
    return experts * (1 - untouched)


def served_bytes(target: Target, dtype: str) -> int:
    """Bytes of a number in the type that the target is served in."""
    return dtype_bytes(target.dtype or "bfloat16" if dtype == "auto" else dtype)


def step_bytes(target: Target, tokens: float, dtype: str = "auto") -> float:
    """Bytes of weights that one decode step of `tokens` tokens reads: all of them, but of the routed experts only those touched.

    `embed_tokens` is left out: a row a token is read, unless it is also the `lm_head`.
    """
    counts = target.parameters
    plain = served_bytes(target, dtype)
    total = 0.0
    for group, count in counts.items():
        q = target.quantization if target.quantization and group in target.quantization.parts else None
        size = count * ((q.bits + q.overhead_bits) / 8 if q else plain)
        if group == "routed experts" and target.moe:
            size *= experts_touched(target.moe.experts, target.moe.experts_per_token, tokens) / target.moe.experts
        if group == "embed_tokens" and not target.tie_word_embeddings:
            size = 0.0
        total += size
    return total


def kv_bytes(target: Target, dtype: str = "auto") -> float:
    """Bytes of the KV cache of one token: the latent and the rotary part for MLA, keys and values of every head otherwise."""
    width = (
        target.mla.kv_lora_rank + target.mla.qk_rope_head_dim if target.mla is not None else 2 * target.kv_heads * target.head_dim
    )
    return target.n_layers * width * served_bytes(target, dtype)


def _active(target: Target) -> dict[str, int]:
    counts = dict(target.parameters)
    if target.moe:
        counts["routed experts"] = counts["routed experts"] * target.moe.experts_per_token // target.moe.experts
    if not target.tie_word_embeddings:
        counts["embed_tokens"] = 0
    return counts


def active_parameters(target: Target) -> int:
    """Parameters that one token passes through (an embedding row is a look-up, not a product)."""
    return sum(_active(target).values())


def step_operations(target: Target, tokens: float) -> tuple[float, float]:
    """Operations of a step's products with weights: (with those that all tokens share, with routed experts).

    Two a weight and token, counted as such of bf16: of fp8 weights GPUs make twice as many a second. Weights of other formats are
    made bf16 before they are multiplied.
    """
    fp8 = target.quantization.parts if target.quantization and target.quantization.method == "fp8" else ()
    found = {group: 2 * count * tokens / (2 if group in fp8 else 1) for group, count in _active(target).items()}
    routed = found.pop("routed experts", 0.0) if target.moe else 0.0
    return sum(found.values()), routed


def attention_operations(target: Target, context: int) -> float:
    """Operations of one token's attention to `context` tokens: products of queries with keys, and of their weights with values.

    With MLA in its absorbed form, in which decoding uses it: keys are latent and rotary part, values the latent.
    """
    mla = target.mla
    widths = 2 * target.head_dim if mla is None else 2 * mla.kv_lora_rank + mla.qk_rope_head_dim
    return 2.0 * target.n_layers * target.heads * widths * context


# ---- the model


@dataclass(frozen=True)
class Constants:
    """What is fitted: four numbers, in `presets/speedup.json`; the others are timed on the machine that `calibrate` looks at.

    Attributes:
        bandwidth_share: share of the memory bandwidth that reading weights reaches.
        layer_s: seconds a layer that no bandwidth shortens: launches, small kernels.
        routing_power: n consecutive tokens of a stream visit as many experts as n^this independent tokens: 1 if routing were
            uncorrelated, 0 if all took the same experts.
        verification_s: seconds that a speculative step takes beside its forward passes: sampling, bookkeeping.
        request_s: seconds that a request adds to every step, whatever its tokens. Not fitted on published rows: 0 where the CPU
            that schedules and replies is not the one that computes.
        pass_s: seconds that a drafter's pass takes beyond its reading, its arithmetic and its launches; as `request_s`.
        draft_s: seconds that each drafted token of each request takes beyond all of these; as `request_s`.
    """

    bandwidth_share: float
    layer_s: float
    routing_power: float
    verification_s: float
    request_s: float = 0.0
    pass_s: float = 0.0
    draft_s: float = 0.0


@cache
def constants() -> Constants:
    """The fitted constants that the kit ships; `model_check.fit` gives them again."""
    return Constants(**json.loads((PRESETS / "speedup.json").read_text(encoding="utf-8"))["constants"])


PARTS = ("dense weights", "experts", "KV cache", "arithmetic", "all-reduce", "launches", "drafter", "verification")
"""Names of a step's parts, in the order of a stacked bar."""


@dataclass(frozen=True)
class Setup:
    """A target served on a machine, with something that drafts.

    Attributes:
        target: the target.
        hardware: the machine.
        gpus: GPUs of one server (tensor parallel).
        all_reduce: a name of `all_reduce_kinds`; empty for the machine's usual one.
        drafter_bytes: bytes that one drafter pass reads (`plan.drafter_read_bytes`); 0 for n-gram, which has no drafter.
        drafter_layers: its layers.
        drafter_kv_bytes: bytes of its own KV cache of one token.
        drafter_gpus: GPUs' worth of bandwidth and arithmetic that its passes get. It is spread over all GPUs like the target, but
            so small a model gains little from it: published rows say nothing at all (`model_check`).
        drafter_all_reduces: of each of its layers; 0 for a drafter that is not spread.
        context: tokens of context of a stream.
        dtype: the parameter `target_dtype`.
        constants: None for those that the kit ships.
        compute_share, dense_share, drafter_launches: as the constants of these names.
        overlap: whether a matrix is read while products are made of it, as a GPU does; experts get too few tokens each for that,
            and a drafter's matrices are too small. A CPU's cores do one after the other, all of it at `compute_share`.
    """

    target: Target
    hardware: Hardware
    gpus: int = 8
    all_reduce: str = ""
    drafter_bytes: float = 0.0
    drafter_layers: int = 1
    drafter_kv_bytes: float = 0.0
    drafter_gpus: int = 1
    drafter_all_reduces: int = 2
    context: int = CONTEXT
    dtype: str = "auto"
    constants: Constants | None = None
    compute_share: float = COMPUTE_SHARE
    dense_share: float = DENSE_SHARE
    overlap: bool = True
    drafter_launches: float = DRAFTER_LAUNCHES

    def step(self, streams: float, k: float = 0) -> dict[str, float]:
        """Seconds of one decode step by part (`PARTS`).

        Args:
            streams: requests in flight, the batch.
            k: tokens drafted for each; 0 is no speculation. A mean may be fractional: n-gram drafts nothing on many steps.

        Raises:
            KitError: a number is out of its range, or the machine's numbers are not known.
        """
        if streams <= 0 or k < 0 or self.gpus < 1 or self.context < 0:
            raise KitError(
                "no such decode step",
                seen=f"{streams} streams, k = {k}, {self.gpus} GPUs, context {self.context}",
                wanted="streams above 0, k of 0 or more, 1 GPU or more",
            )
        t, hw, c = self.target, self.hardware, self.constants or constants()
        one = positive(hw.bandwidth_gb_s, f"bandwidth_gb_s of {hw.label}") * 1e9 * c.bandwidth_share
        peak = positive(hw.bf16_tflops, f"bf16_tflops of {hw.label}") * 1e12
        tokens = streams * (k + 1)
        dense = step_bytes(t, 0, self.dtype)
        experts = step_bytes(t, streams * (k + 1) ** c.routing_power, self.dtype) - dense
        kind = self.all_reduce or next(iter(hw.all_reduce), "")
        state = t.hidden_size * served_bytes(t, self.dtype)
        dense_s, kv_s = dense / (one * self.gpus), streams * self.context * kv_bytes(t, self.dtype) / (one * self._kv_shards)
        shared, routed = step_operations(t, tokens)
        attending = attention_operations(t, self.context) * tokens
        slow, fast = peak * self.compute_share, peak * self.dense_share
        if self.overlap:
            arithmetic = routed / (slow * self.gpus)
            arithmetic += max(0.0, shared / (fast * self.gpus) - dense_s) + max(0.0, attending / (fast * self.gpus) - kv_s)
        else:
            arithmetic = (shared + routed + attending) / (slow * self.gpus)
        a_pass = (
            self.drafter_bytes / (one * self.drafter_gpus)
            # two operations a weight, of matrices too small to hide them
            + streams * 2 * self.drafter_bytes / served_bytes(t, self.dtype) / (slow * self.drafter_gpus)
            + streams * self.context * self.drafter_kv_bytes / (one * self._drafter_parts)
            + (self.drafter_layers + self.drafter_launches) * c.layer_s
            + c.pass_s
            + self.drafter_layers * self.drafter_all_reduces * all_reduce_s(hw, kind, streams * state, self.gpus)
        )
        return {
            "dense weights": dense_s,
            "experts": experts / (one * self.gpus),
            "KV cache": kv_s,
            "arithmetic": arithmetic,
            "all-reduce": 2 * t.n_layers * all_reduce_s(hw, kind, tokens * state, self.gpus),
            "launches": t.n_layers * c.layer_s + streams * c.request_s,
            "drafter": k * a_pass if self.drafter_bytes else 0.0,
            "verification": c.verification_s + streams * k * c.draft_s if k else 0.0,
        }

    @property
    def _kv_shards(self) -> int:
        """GPUs that the KV cache is spread over. Latents of MLA are the same for every head, so each GPU has them all."""
        return 1 if self.target.mla is not None else min(self.gpus, self.target.kv_heads)

    @property
    def _drafter_parts(self) -> int:
        """GPUs that hold a part of the drafter and of its KV cache."""
        return self.gpus if self.drafter_all_reduces else 1

    def memory_gb(self, streams: float) -> float:
        """What one GPU must hold, in units of 1e9 bytes: its part of both models' weights and of every stream's KV cache."""
        weights = self.target.weight_bytes(self.dtype)[0] / self.gpus + self.drafter_bytes / self._drafter_parts
        kv = kv_bytes(self.target, self.dtype) / self._kv_shards + self.drafter_kv_bytes / self._drafter_parts
        return (weights + streams * self.context * kv) / 1e9

    def fits(self, streams: float) -> bool | None:
        """Whether that is at most `MEMORY_SHARE` of a GPU's memory; None where the machine's memory is not known."""
        room = self.hardware.memory_gb
        return None if room is None else self.memory_gb(streams) <= MEMORY_SHARE * room

    def step_s(self, streams: float, k: float = 0) -> float:
        """Seconds of one decode step."""
        return sum(self.step(streams, k).values())

    def tokens_per_s(self, streams: float, k: float = 0, al: float = 1.0) -> float:
        """Tokens a second of all streams together."""
        return streams * al / self.step_s(streams, k)

    def speedup(self, streams: float, k: float, al: float) -> float:
        """Tokens a second with speculation over those without.

        Raises:
            KitError: `al` is not between 1 and k + 1.
        """
        return check_al(al, k) / self.break_even(streams, k)

    def break_even(self, streams: float, k: float) -> float:
        """The acceptance length at which speculation neither gains nor loses: step with / step without. Above k + 1: never."""
        return self.step_s(streams, k) / self.step_s(streams)

    def break_even_acceptance(self, streams: float, k: int) -> float | None:
        """The acceptance of every position, were they all equal, at which speculation breaks even; None when it cannot."""
        needed = self.break_even(streams, k)
        return acceptance_of(k, needed) if needed <= k + 1 else None

    def best_k(self, streams: float, curve: Curve, most: int = 8) -> tuple[int, float]:
        """The k of 0 to `most` that is fastest, and its speed-up; 0 is the advice not to speculate."""
        return max(((k, self.speedup(streams, k, curve.al(k))) for k in range(most + 1)), key=lambda found: found[1])


# ---- acceptance


def check_al(al: float, k: float) -> float:
    """`al`, when it is possible at k.

    Raises:
        KitError: it is not between 1 and k + 1.
    """
    if not 1 <= al <= k + 1 + 1e-9:
        raise KitError("this acceptance length is impossible", seen=f"AL {al:g} at k = {k:g}", wanted=f"1 to {k + 1:g}")
    return al


def acceptance_of(k: int, al: float) -> float:
    """The acceptance a of every position that gives this AL: solves 1 + a + ... + a^k = AL (Leviathan et al., arXiv 2211.17192).

    Raises:
        KitError: `al` is not between 1 and k + 1.
    """
    check_al(al, k)
    low, high = 0.0, 1.0
    for _ in range(60):
        a = (low + high) / 2
        low, high = (a, high) if sum(a**i for i in range(k + 1)) < al else (low, a)
    return (low + high) / 2


@dataclass(frozen=True)
class Curve:
    """Acceptance by draft position.

    Attributes:
        name: where it comes from.
        conditional: share of the drafts accepted at each position, of those accepted up to there. Beyond the last position the
            last value holds on.
    """

    name: str
    conditional: tuple[float, ...]

    def al(self, k: int) -> float:
        """Tokens a target forward when k are drafted: 1 + sum over i of the product of the first i."""
        reached, total = 1.0, 1.0
        for i in range(k):
            reached *= self.conditional[min(i, len(self.conditional) - 1)]
            total += reached
        return total

    @staticmethod
    def from_lengths(name: str, lengths: Sequence[float]) -> Curve:
        """From measured AL at k = 1, 2, 3, ...: their differences are the shares accepted up to each position.

        Raises:
            KitError: lengths that no acceptance gives: they must rise from 1, by less at each k.
        """
        reached = [1.0, *(after - before for before, after in itertools.pairwise([1.0, *lengths]))]
        if not lengths or any(not 0 <= b <= a + 1e-9 for a, b in itertools.pairwise(reached)):
            raise KitError(
                f"no acceptance gives the lengths of {name}", seen=list(lengths), wanted="AL at k = 1, 2, ..., rising by less"
            )
        return Curve(name, tuple(b / a if a else 0.0 for a, b in itertools.pairwise(reached)))

    @staticmethod
    def from_length(name: str, k: int, al: float) -> Curve:
        """From one measured AL at one k: the same acceptance at every position.

        Acceptance falls a little with the position: from k = 3 this promises 2 to 10 % too much at k = 7 (SpecBundle's rows).

        Raises:
            KitError: `al` is not between 1 and k + 1.
        """
        return Curve(name, (acceptance_of(k, al),))
