"""The speed-up model: its physics, its limits, its data, and the machines a user may add."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3kit import model_check, speedup, target
from eagle3kit.errors import KitError
from eagle3kit.speedup import Curve, Setup, all_reduce_s, hardware_presets

K25 = target.reference("kimi-k2.5")
RTX = hardware_presets()["rtx-pro-6000"]
PCIE = model_check.setup("RTX PRO 6000")
GPUS = [name for name, machine in hardware_presets().items() if machine.is_gpu]
B300 = replace(PCIE, hardware=hardware_presets()["b300"], all_reduce="")

settings.register_profile("model", deadline=None, max_examples=30)  # a neighbour on the machine is no failure
settings.load_profile("model")

machines = st.sampled_from([PCIE, B300, model_check.setup("SpecBundle"), replace(PCIE, all_reduce="one-shot", gpus=4)])
batches = st.integers(1, 512)
depths = st.integers(1, 8)


# ---- what a step reads


@pytest.mark.parametrize(("tokens", "experts"), [(1, 8.0), (2, 15.8), (4, 31.0), (8, 59.5), (16, 109.8)])
def test_experts_touched(tokens: int, experts: float) -> None:
    assert speedup.experts_touched(384, 8, tokens) == pytest.approx(experts, abs=0.05)


def test_bytes_of_a_decode_step() -> None:
    small = target.reference("smollm2-135m")
    assert speedup.step_bytes(K25, 1) == pytest.approx(33e9, rel=0.005)
    everything = speedup.step_bytes(K25, 10**9) + K25.parameters["embed_tokens"] * 2
    assert everything == pytest.approx(replace(K25, bytes_on_disk=None).weight_bytes()[0], rel=1e-6)
    assert speedup.step_bytes(small, 1, "float32") == 4 * 134_515_008  # tied: the embeddings are the lm_head


def test_kv_cache_of_a_token() -> None:
    small = target.reference("smollm2-135m")
    assert speedup.kv_bytes(K25) == 61 * 576 * 2
    assert speedup.kv_bytes(small, "float32") == 30 * 2 * 3 * 64 * 4


def test_active_parameters() -> None:
    assert speedup.active_parameters(K25) == pytest.approx(31.7e9, rel=0.01)
    assert speedup.active_parameters(target.reference("smollm2-135m")) == 134_515_008


def test_operations_of_a_step() -> None:
    shared, routed = speedup.step_operations(K25, 3)
    assert shared + routed == 2 * 3 * speedup.active_parameters(K25)
    assert routed == pytest.approx(2 * 3 * 60 * 8 * 3 * 7168 * 2048)  # layers, experts a token, matrices
    dense = target.reference("smollm2-135m")
    assert speedup.step_operations(dense, 1) == (2 * 134_515_008, 0)


def test_fp8_products_count_half_and_other_formats_are_multiplied_as_bf16() -> None:
    """K2 has fp8 weights, K2.5 experts of 4 bits."""
    k2 = target.reference("kimi-k2")
    assert k2.quantization is not None
    plain = replace(k2, quantization=None)
    assert speedup.step_operations(k2, 1)[1] == speedup.step_operations(plain, 1)[1] / 2
    assert speedup.step_operations(K25, 1)[1] == speedup.step_operations(plain, 1)[1]


def test_operations_of_attention() -> None:
    small = target.reference("smollm2-135m")
    assert speedup.attention_operations(small, 100) == 30 * 9 * 100 * (2 * 64 + 2 * 64)
    assert speedup.attention_operations(K25, 100) == 61 * 64 * 100 * (2 * 576 + 2 * 512)
    assert speedup.attention_operations(K25, 0) == 0


# ---- the model


DENSE = Setup(target.reference("smollm2-135m"), speedup.hardware_presets()["h200"], 1, context=0)


def test_products_of_few_tokens_are_hidden_by_reading_the_matrix() -> None:
    step = DENSE.step(1, 3)
    assert step["arithmetic"] == 0
    assert step["dense weights"] > 0
    apart = replace(DENSE, overlap=False).step(1, 3)
    peak = 990e12 * speedup.COMPUTE_SHARE
    assert apart["arithmetic"] == pytest.approx(4 * 2 * 134_515_008 / peak)


def test_products_of_many_tokens_take_as_long_as_they_take() -> None:
    step = DENSE.step(2048, 3)
    both = step["arithmetic"] + step["dense weights"]
    assert both == pytest.approx(8192 * 2 * 134_515_008 / (990e12 * speedup.DENSE_SHARE))


def test_attention_to_a_long_context_takes_as_long_as_it_takes() -> None:
    far = replace(DENSE, context=100_000, target=replace(DENSE.target, kv_heads=1, heads=64))
    step = far.step(4, 7)
    operations = 32 * speedup.attention_operations(far.target, 100_000)
    assert step["arithmetic"] + step["KV cache"] == pytest.approx(operations / (990e12 * speedup.DENSE_SHARE))


def test_parts_make_up_the_step() -> None:
    step = PCIE.step(4, 3)
    assert tuple(step) == speedup.PARTS
    assert all(seconds > 0 for seconds in step.values())
    assert PCIE.step_s(4, 3) == pytest.approx(sum(step.values()))


@given(machines, batches)
def test_without_drafts_nothing_is_gained_or_lost(setup: Setup, streams: int) -> None:
    assert setup.speedup(streams, 0, 1.0) == 1.0


@given(machines, batches, depths, st.floats(0, 0.99))
def test_speedup_rises_with_acceptance(setup: Setup, streams: int, k: int, share: float) -> None:
    assert setup.speedup(streams, k, 1 + share * k) < setup.speedup(streams, k, 1 + (share + 0.01) * k)


@given(machines, batches, depths)
def test_a_speculative_step_is_never_shorter(setup: Setup, streams: int, k: int) -> None:
    steps = [setup.step_s(streams, drafted) for drafted in range(k + 1)]
    assert all(before < after for before, after in itertools.pairwise(steps))


@given(machines, batches, depths)
def test_at_the_break_even_length_nothing_is_gained(setup: Setup, streams: int, k: int) -> None:
    needed = setup.break_even(streams, k)
    if needed <= k + 1:
        acceptance = setup.break_even_acceptance(streams, k)
        assert acceptance is not None
        assert setup.speedup(streams, k, needed) == pytest.approx(1)
        assert Curve("", (acceptance,)).al(k) == pytest.approx(needed)
    else:
        assert setup.break_even_acceptance(streams, k) is None


@given(machines, batches)
def test_throughput_rises_with_the_batch(setup: Setup, streams: int) -> None:
    assert setup.tokens_per_s(streams) < setup.tokens_per_s(streams + 1)


@pytest.mark.parametrize("setup", [PCIE, B300], ids=["PCIe", "NVLink"])
def test_large_batches_end_the_gain(setup: Setup) -> None:
    gains = [setup.speedup(2**i, 3, 2.687) for i in range(15)]
    from_64 = gains[6:]  # there most experts are read by every step, and it is arithmetic and all-reduces that grow
    assert all(before > after for before, after in itertools.pairwise(from_64))
    assert gains[-1] < 1 < gains[0]


def test_correlated_routing_reads_fewer_experts() -> None:
    experts = [
        replace(PCIE, constants=replace(speedup.constants(), routing_power=power)).step(4, 3)["experts"]
        for power in (0.0, 0.5, 1.0)
    ]
    assert experts[0] < experts[1] < experts[2]
    assert experts[0] == pytest.approx(PCIE.step(4)["experts"])


def test_one_gpu_reduces_nothing() -> None:
    assert replace(PCIE, gpus=1).step(4)["all-reduce"] == 0


def test_a_gpu_with_more_bandwidth_is_faster() -> None:
    faster = replace(RTX, bandwidth_gb_s=2 * (RTX.bandwidth_gb_s or 0))
    assert replace(PCIE, hardware=faster).tokens_per_s(8, 3, 2.5) > PCIE.tokens_per_s(8, 3, 2.5)


def test_longer_context_costs_time_with_and_without() -> None:
    longer = replace(PCIE, context=100_000)
    assert longer.step_s(16) > PCIE.step_s(16)
    assert longer.step(16, 3)["KV cache"] == longer.step(16)["KV cache"]


def test_best_k_may_be_none() -> None:
    assert PCIE.best_k(1, Curve("always wrong", (0.0,))) == (0, 1.0)
    k, gain = PCIE.best_k(1, Curve("nearly always right", (0.95,)))
    assert k == 8
    assert gain > 2


@pytest.mark.parametrize(("streams", "k"), [(0, 3), (1, -1)])
def test_impossible_steps_are_refused(streams: int, k: int) -> None:
    with pytest.raises(KitError, match="no such decode step"):
        PCIE.step(streams, k)


def test_a_cpu_has_no_bandwidth_to_reckon_with() -> None:
    with pytest.raises(KitError, match="bandwidth_gb_s of 2 CPU cores"):
        replace(PCIE, hardware=hardware_presets()["cpu"]).step(1)


SMALL = target.reference("smollm2-135m")
numbers = st.floats(1e-2, 1e6)


@given(st.sampled_from([K25, SMALL]), numbers, numbers, numbers, numbers, st.integers(1, 64), batches, depths, st.floats(0, 1))
def test_any_machine_has_steps_and_speedups(
    model: target.Target,
    memory: float,
    bandwidth: float,
    link: float,
    flops: float,
    gpus: int,
    streams: int,
    k: int,
    share: float,
) -> None:
    b200 = hardware_presets()["b200"]
    any_gpu = replace(b200, memory_gb=memory, bandwidth_gb_s=bandwidth, link_gb_s=link, bf16_tflops=flops)
    check_limits(Setup(model, any_gpu, gpus, drafter_bytes=1e8, drafter_kv_bytes=1e3), streams, k, 1 + share * k)


@given(st.sampled_from(GPUS), st.sampled_from([K25, SMALL]), st.sampled_from([1, 2, 4, 8]), batches, depths, st.floats(0, 1))
def test_every_preset_has_steps_and_speedups(
    name: str, model: target.Target, gpus: int, streams: int, k: int, share: float
) -> None:
    machine = hardware_presets()[name]
    for kind in speedup.all_reduce_kinds(machine):
        check_limits(Setup(model, machine, gpus, kind, drafter_bytes=1e8), streams, k, 1 + share * k)


def check_limits(setup: Setup, streams: int, k: int, al: float) -> None:
    """Times are finite and above 0, and no draft makes a step shorter."""
    for drafted in (0, k):
        assert 0 < setup.step_s(streams, drafted) < math.inf
        assert all(0 <= seconds < math.inf for seconds in setup.step(streams, drafted).values())
    assert 0 < setup.speedup(streams, k, al) <= al <= k + 1 + 1e-9


# ---- the drafter


def test_a_drafter_of_more_layers_takes_longer() -> None:
    one, two = PCIE.step(1, 1)["drafter"], replace(PCIE, drafter_layers=2).step(1, 1)["drafter"]
    a_layer = speedup.constants().layer_s + 2 * all_reduce_s(RTX, "nccl-untuned", 7168 * 2, 8)
    assert two - one == pytest.approx(a_layer)


def test_the_drafters_own_context_is_read() -> None:
    without = replace(PCIE, drafter_kv_bytes=0.0)
    read = PCIE.step(16, 3)["drafter"] - without.step(16, 3)["drafter"]
    reached = 8 * 1790e9 * speedup.constants().bandwidth_share
    assert read == pytest.approx(3 * 16 * speedup.CONTEXT * PCIE.drafter_kv_bytes / reached)
    assert PCIE.drafter_kv_bytes == 64 * 128 * 2 * 2


def test_a_drafter_may_be_read_by_all_gpus_or_run_on_one() -> None:
    step = PCIE.step(1, 1)["drafter"]
    assert replace(PCIE, drafter_gpus=8).step(1, 1)["drafter"] < step
    assert replace(PCIE, drafter_all_reduces=0, drafter_kv_bytes=0).step(1, 1)["drafter"] < step


# ---- memory


@pytest.mark.parametrize(
    ("name", "gpus", "streams", "fits"),
    [("rtx-pro-6000", 1, 1, False), ("rtx-pro-6000", 8, 1, True), ("rtx-pro-6000", 8, 10_000, False), ("b300", 2, 1, False)],
)
def test_what_fits(name: str, gpus: int, streams: int, fits: bool) -> None:
    assert replace(PCIE, hardware=hardware_presets()[name], gpus=gpus).fits(streams) is fits


def test_a_gpu_holds_its_part_of_the_weights_and_all_latents() -> None:
    drafter = (PCIE.drafter_bytes + 16 * 1000 * PCIE.drafter_kv_bytes) / 8
    assert PCIE.memory_gb(16) == pytest.approx((595e9 / 8 + 16 * 1000 * speedup.kv_bytes(K25) + drafter) / 1e9)
    dense = Setup(SMALL, RTX, 2, dtype="bfloat16")  # three heads of keys: two GPUs hold half of the cache each
    assert dense.memory_gb(4) == pytest.approx((134_515_008 + 4 * 1000 * speedup.kv_bytes(SMALL, "bfloat16") / 2) / 1e9)


def test_published_setups_fit() -> None:
    assert all(row.setup.fits(row.streams) for row in model_check.rows())


def test_a_cpu_has_no_gpu_memory_to_fit_in() -> None:
    assert replace(PCIE, hardware=hardware_presets()["cpu"]).fits(1) is None


# ---- all-reduces


@pytest.mark.parametrize(
    ("kind", "size", "us"),
    [
        ("one-shot", 256, 7.5),
        ("one-shot", 8192, 9.2),
        ("nccl", 65536, 24.1),
        ("nccl", 262144, 28.0),
        ("nccl-untuned", 32768, 48),
        ("tuned", 8192, 9.2),
        ("tuned", 262144, 28.0),
    ],
)
def test_measured_latencies_come_back(kind: str, size: int, us: float) -> None:
    assert all_reduce_s(RTX, kind, size, 8) == pytest.approx(us * 1e-6)


@given(st.sampled_from(["one-shot", "nccl", "nccl-untuned", "tuned"]), st.integers(2, 8))
def test_large_all_reduces_are_no_faster_than_the_link(kind: str, ranks: int) -> None:
    size = 10e6
    assert all_reduce_s(RTX, kind, size, ranks) > 2 * (ranks - 1) / ranks * (size - 262144) / 53e9
    assert all_reduce_s(RTX, kind, 2 * size, ranks) > all_reduce_s(RTX, kind, size, ranks)


def test_unknown_all_reduce_names_the_known() -> None:
    with pytest.raises(KitError, match="no all-reduce table 'mpi'; wanted nccl-untuned or nccl or one-shot or tuned"):
        all_reduce_s(RTX, "mpi", 1000, 8)


# ---- acceptance


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_lengths_and_shares_are_the_same_curve(shares: list[float]) -> None:
    curve = Curve("", tuple(shares))
    lengths = [curve.al(k) for k in range(1, len(shares) + 1)]
    again = Curve.from_lengths("", lengths)
    assert [again.al(k) for k in range(1, len(shares) + 1)] == pytest.approx(lengths)
    assert all(1 <= length <= k + 1 for k, length in enumerate(lengths, 1))


@given(depths, st.floats(0, 1))
def test_one_length_gives_the_length_back(k: int, share: float) -> None:
    al = 1 + share * k
    assert Curve.from_length("", k, al).al(k) == pytest.approx(al)


def test_length_at_seven_from_that_at_three() -> None:
    """SpecBundle's benchmarks have both. Acceptance falls a little with the position, so one value for all promises too much."""
    for short, long in ((3.271, 4.655), (3.468, 5.383), (2.390, 2.782), (3.365, 5.162)):
        assert long < Curve.from_length("", 3, short).al(7) < 1.12 * long


@pytest.mark.parametrize("lengths", [[], [0.9], [1.5, 1.4], [1.2, 1.9], [2.1]])
def test_impossible_lengths_are_refused(lengths: list[float]) -> None:
    with pytest.raises(KitError, match="no acceptance gives"):
        Curve.from_lengths("a drafter", lengths)


@pytest.mark.parametrize("al", [0.9, 4.1])
def test_impossible_length_is_refused(al: float) -> None:
    with pytest.raises(KitError, match="impossible"):
        PCIE.speedup(1, 3, al)


# ---- a user's machine

MINE = {"memory_gb": 100, "bandwidth_gb_s": 4000, "link_gb_s": 100, "bf16_tflops": 900}


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_gpu_is_added_by_a_file(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"mine.{suffix}"
    file.write_text(json.dumps({"mine": {**MINE, "label": "Mine"}}))
    found = hardware_presets(file)
    assert set(found) == {*hardware_presets(), "mine"}
    assert PCIE.speedup(1, 3, 2.5) != replace(PCIE, hardware=found["mine"], all_reduce="").speedup(1, 3, 2.5) > 0


def test_a_users_measured_latencies_are_used(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"mine": {**MINE, "all_reduce": {"measured": {"ranks": 8, "us": {"1000": 5, "2000": 6}}}}}))
    assert all_reduce_s(hardware_presets(file)["mine"], "measured", 1500, 8) == pytest.approx(5.5e-6)


def test_a_users_gpu_is_reckoned_like_a_preset(tmp_path: Path) -> None:
    """`link_gb_s` is of one direction in both, and so is the all-reduce that is assumed where none is measured."""
    file = tmp_path / "mine.yaml"
    known = hardware_presets()["b300"]
    file.write_text(json.dumps({"mine": {key: getattr(known, key) for key in MINE}}))
    mine = replace(PCIE, hardware=hardware_presets(file)["mine"], all_reduce="")
    assert mine.step(16, 3) == B300.step(16, 3)
    assert all_reduce_s(known, "nvlink", 1e9, 8) == pytest.approx(12e-6 + 2 * 7 / 8 / 900)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "all_reduce has no tables"),
        (["nvlink"], "all_reduce has no tables"),
        (None, "all_reduce has no tables"),
        ({"x": None}, "all_reduce 'x' is malformed"),
        ({"x": {}}, "all_reduce 'x' is malformed"),
        ({"x": {"alpha_us": 3, "alpha": 4}}, "all_reduce 'x' is malformed"),
        ({"x": {"alpha_us": "12"}}, "all_reduce 'x': alpha_us is no positive number; seen 12"),
        ({"x": {"alpha_us": 12, "gb_s": 0}}, "all_reduce 'x': gb_s is no positive number"),
        ({"x": {"us": {"1": 2, "2": "no"}}}, "all_reduce 'x': us at 2 is no positive number; seen no"),
        (
            {"x": {"us": {"1000": 5, "2000": 6}, "ranks": 1}},
            "all_reduce 'x': ranks is no number of GPUs.*seen 1; wanted 2 or more",
        ),
        ({"x": {"us": {"1000": 5, "2000": 6}, "ranks": "8"}}, "all_reduce 'x': ranks is no number of GPUs"),
        ({"x": {"us": {"1k": 3, "2k": 4}}}, "all_reduce 'x': a size is no positive number; seen 1k"),
        ({"x": {"us": {"1000": 5}}}, "all_reduce 'x' is malformed.*two sizes"),
        ({"x": {"us": {"1000": 5, "1000.0": 6}}}, "all_reduce 'x' is malformed.*two sizes"),
        ({"x": {"us": 5}}, "all_reduce 'x' is malformed.*two sizes"),
        ({"x": {"fastest_of": ["x"]}}, "all_reduce 'x' leads back to itself; seen x -> x"),
        ({"a": {"fastest_of": ["b"]}, "b": {"fastest_of": ["a"]}}, "all_reduce 'a' leads back to itself; seen a -> b -> a"),
        ({"x": {"like": "x", "bytes": 1, "us": 2}}, "all_reduce 'x' leads back to itself"),
        ({"x": {"fastest_of": []}}, "all_reduce 'x': fastest_of names no tables"),
        ({"x": {"fastest_of": "y"}, "y": {"alpha_us": 3}}, "all_reduce 'x': fastest_of names no tables; seen y"),
        ({"x": {"fastest_of": [["y"]]}}, "all_reduce 'x' refers to a table that is missing"),
        ({"x": {"like": "y", "bytes": 1, "us": 2}}, "all_reduce 'x' refers to a table that is missing; seen y; wanted x"),
        ({"x": {"like": "y", "us": 2}, "y": {"alpha_us": 3}}, "all_reduce 'x': bytes is no positive number; seen nothing"),
    ],
)
def test_a_bad_table_is_told_when_it_is_loaded(tmp_path: Path, tables: Any, message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"mine": {**MINE, "all_reduce": tables}}))
    with pytest.raises(KitError, match=f"mine.yaml: mine: {message}"):
        hardware_presets(file)


def test_the_kits_own_tables_are_good() -> None:
    for name in GPUS:
        speedup._check_tables(hardware_presets()[name].all_reduce, name)


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({**MINE, "bandwith": 3}, "mine has an unknown entry; seen bandwith; wanted memory_gb"),
        ({**MINE, "bandwidth_gb_s": "fast"}, "mine: bandwidth_gb_s is no positive number; seen fast"),
        ({**MINE, "link_gb_s": 0}, "link_gb_s is no positive number"),
        ({"memory_gb": 3}, "bandwidth_gb_s is no positive number; seen nothing"),
        ({**MINE, "load_gb_s": -1}, "mine: load_gb_s is no positive number; seen -1"),
        ("fast", "does not map names of GPUs"),
    ],
)
def test_a_bad_machine_is_told_what_is_wrong(tmp_path: Path, machine: Any, message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"mine": machine}))
    with pytest.raises(KitError, match=message):
        hardware_presets(file)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="cannot be read.*set hardware_file"):
        hardware_presets(tmp_path / "none.yaml")


def test_a_gpu_is_not_called_a_cpu(tmp_path: Path) -> None:
    """A run on a CPU looks its machine up under this name."""
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"cpu": MINE}))
    with pytest.raises(KitError, match="cpu is the name of machines without a GPU; fix: name the GPU"):
        hardware_presets(file)
