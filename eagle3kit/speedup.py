"""What speculation buys on a machine: the time of one decode step, taken apart, with and without drafting.

A step that verifies t tokens of B streams takes

    weights read            every dense weight, and of each layer's routed experts those that the t tokens visit
  + KV cache read           the context of every stream, once a step
  + arithmetic              of t tokens
  + all-reduces             two a layer, of t hidden states, from a latency table of the machine
  + launches                a constant a layer, and on a CPU one a request
  + drafter                 k passes over its weights
  + verification            a constant a speculative step

and yields AL tokens a stream; speed-up = AL x step without / step with (Leviathan et al., arXiv 2211.17192). Four constants are
fitted, on published rows only (`model_check`), and stored in `presets/speedup.json`; the rest is data: the target's config,
`presets/hardware.json`, and an acceptance curve.

The terms are added, not overlapped, and nothing is known here of queueing, prefill or the mix of requests: it is a model of
steady decoding with B streams always in flight.
"""

from __future__ import annotations

import itertools
import json
import math
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
"""Share of the dense bf16 peak that products are assumed to reach: in a decode step, in prefill, in training."""

CONTEXT = 1000
"""Tokens of context of a stream where nothing else is said."""

DRAFTER_LAUNCHES = 2
"""Layers' worth of launches of one drafter pass: its layer, and fc, lm_head and the choice of a token together."""


# ---- machines


@dataclass(frozen=True)
class Hardware:
    """A kind of machine.

    Attributes:
        name: its key in `presets/hardware.json`, a choice of the parameter `hardware`.
        label: its name for people.
        memory_gb: of one GPU, in units of 1e9 bytes; None on a CPU, where this machine's own memory counts.
        bandwidth_gb_s: of one GPU's memory.
        link, link_gb_s: between GPUs, in words and as one GPU's bandwidth (of NVLink both directions together, as it is sold).
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
            where they are known `label`, `link`, `source` and `all_reduce`, as in `presets/hardware.json`.

    Raises:
        KitError: the file cannot be read, or something in it is missing, unknown or no positive number.
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


def _own_hardware(file: Path) -> dict[str, Hardware]:
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise KitError(f"the hardware file {file} cannot be read", seen=str(error), fix="set hardware_file") from None
    if not isinstance(given, Mapping) or not all(isinstance(machine, Mapping) for machine in given.values()):
        raise KitError(f"{file} does not map names of GPUs to their numbers", wanted=f"NAME: {{{', '.join(_NEEDED)}}}")
    made = {}
    for name, machine in given.items():
        for key in machine:
            if key not in (*_NEEDED, *_OPTIONAL):
                raise KitError(f"{file}: {name} has an unknown entry", seen=key, wanted=", ".join((*_NEEDED, *_OPTIONAL)))
        for key in _NEEDED:
            _positive(machine.get(key), f"{file}: {name}: {key}")
        values = {**_OPTIONAL, **machine, "label": machine.get("label") or str(name)}
        made[str(name)] = Hardware(name=str(name), rates={}, **values)
        for kind in all_reduce_kinds(made[str(name)]):
            all_reduce_s(made[str(name)], kind, 14_336, 2)
    return made


def _positive(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise KitError(
            f"{what} is no positive number",
            seen="nothing" if value is None else value,
            fix="write a plain number, such as 8000 or 1.8e3",
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
        hardware: gives the tables, and B from `link_gb_s`.
        kind: a name of `all_reduce_kinds`.
        size: bytes that each rank holds.
        ranks: GPUs that take part; one needs none.

    Raises:
        KitError: the machine has no such table, or it is malformed.
    """
    if ranks <= 1:
        return 0.0
    table = hardware.all_reduce.get(kind)
    if table is None:
        raise KitError(f"{hardware.label} has no all-reduce table {kind!r}", wanted=" or ".join(hardware.all_reduce) or "none")
    where = f"all_reduce {kind!r} of {hardware.label}"
    ring = 2 * (ranks - 1) / ranks / (_positive(table.get("gb_s", hardware.link_gb_s), f"link_gb_s of {hardware.label}") * 1e9)
    if "alpha_us" in table:
        return _positive(table["alpha_us"], where) * 1e-6 + ring * size
    if "fastest_of" in table:
        return min(all_reduce_s(hardware, other, size, ranks) for other in table["fastest_of"])
    if "like" in table and table["like"] != kind:
        other, at = str(table["like"]), _positive(table.get("bytes"), where)
        factor = _positive(table.get("us"), where) * 1e-6 / all_reduce_s(hardware, other, at, int(table.get("ranks", 8)))
        return factor * all_reduce_s(hardware, other, size, ranks)
    measured = table.get("us")
    if not isinstance(measured, Mapping) or len(measured) < 2:
        raise KitError(f"{where} is malformed", seen=dict(table), wanted='"us" with two sizes or more, "like" or "alpha_us"')
    points = sorted((float(at), _positive(us, where) * 1e-6) for at, us in measured.items())
    least = min(us for _, us in points)
    more = (ranks - 1) / (int(table.get("ranks", ranks)) - 1)
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


def active_parameters(target: Target) -> int:
    """Parameters that one token passes through (an embedding row is a look-up, not a product)."""
    counts = dict(target.parameters)
    if target.moe:
        counts["routed experts"] = counts["routed experts"] * target.moe.experts_per_token // target.moe.experts
    if not target.tie_word_embeddings:
        counts["embed_tokens"] = 0
    return sum(counts.values())


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
    """

    bandwidth_share: float
    layer_s: float
    routing_power: float
    verification_s: float
    request_s: float = 0.0
    pass_s: float = 0.0


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
        context: tokens of context of a stream.
        dtype: the parameter `target_dtype`.
        constants: None for those that the kit ships.
    """

    target: Target
    hardware: Hardware
    gpus: int = 8
    all_reduce: str = ""
    drafter_bytes: float = 0.0
    context: int = CONTEXT
    dtype: str = "auto"
    constants: Constants | None = None

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
        one = _positive(hw.bandwidth_gb_s, f"bandwidth_gb_s of {hw.label}") * 1e9 * c.bandwidth_share
        flops = _positive(hw.bf16_tflops, f"bf16_tflops of {hw.label}") * 1e12 * COMPUTE_SHARE
        tokens = streams * (k + 1)
        dense = step_bytes(t, 0, self.dtype)
        experts = step_bytes(t, streams * (k + 1) ** c.routing_power, self.dtype) - dense
        # Latents of MLA are the same for every head, so each GPU reads them all.
        shards = 1 if t.mla is not None else min(self.gpus, t.kv_heads)
        kind = self.all_reduce or next(iter(hw.all_reduce), "")
        state = t.hidden_size * served_bytes(t, self.dtype)
        a_pass = (
            # So small a model gains nothing from being spread: read and computed as if by one GPU.
            self.drafter_bytes / one
            + streams * 2 * self.drafter_bytes / served_bytes(t, self.dtype) / flops  # two operations a weight
            + DRAFTER_LAUNCHES * c.layer_s
            + c.pass_s
            + 2 * all_reduce_s(hw, kind, streams * state, self.gpus)
        )
        return {
            "dense weights": dense / (one * self.gpus),
            "experts": experts / (one * self.gpus),
            "KV cache": streams * self.context * kv_bytes(t, self.dtype) / (one * shards),
            "arithmetic": 2 * active_parameters(t) * tokens / (flops * self.gpus),
            "all-reduce": 2 * t.n_layers * all_reduce_s(hw, kind, tokens * state, self.gpus),
            "launches": t.n_layers * c.layer_s + streams * c.request_s,
            "drafter": k * a_pass if self.drafter_bytes else 0.0,
            "verification": c.verification_s if k else 0.0,
        }

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
