"""Faults of extraction, each put into the states of a small real model: caught and named, and passing with its guard off."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_data import prompt, write_answers

from eagle3kit import data, engine_transformers, golden, hidden_states, reference, server, state_files
from eagle3kit.errors import KitError
from eagle3kit.params import FP8_LIMITS, Params
from eagle3kit.rundir import Run, write_json

N_LAYERS, HIDDEN, VOCAB, EPS = 4, 32, 97, 1e-5
LAYERS = [1, 2, 3, N_LAYERS]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers with random weights, as a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=EPS,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Engine:
    """Stands where a server stands: what it says of a text comes from the same weights."""

    def __init__(self, target: Path) -> None:
        from transformers import LlamaForCausalLM

        self.model, self._weights = str(target), LlamaForCausalLM.from_pretrained(target).eval()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with torch.inference_mode():
            logprobs = self._weights(torch.tensor([body["prompt"]])).logits[0].float().log_softmax(-1)
        entries: list[Any] = [None]
        for position, token in enumerate(body["prompt"][1:]):
            best = int(logprobs[position].argmax())
            entries.append({str(t): {"logprob": float(logprobs[position, t])} for t in {best, token}})
        return {"choices": [{"prompt_logprobs": entries}]}


@pytest.fixture(scope="module")
def made(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of ten greedy answers of two lengths, and their states taken by the model's own `output_hidden_states`."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    run = Run(
        Params(run_name="made", runs_dir=str(tmp_path_factory.mktemp("made")), golden_samples=3), "03_extract_hidden_states"
    )
    prompts = [prompt(f"p{i}", split="heldout" if i == 9 else "train") for i in range(10)]
    answers = []
    for number, p in enumerate(prompts):
        ids = torch.randint(VOCAB, (1, 6), generator=torch.Generator().manual_seed(number))
        new = 12 if number % 2 else 16
        with torch.inference_mode():
            written = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
            )[0].tolist()
        row = {"input_ids": written, "loss_mask": [0] * 6 + [1] * new}
        answers.append({"id": f"{p.id}_gen0", "primary_id": p.id, **row})
    write_answers(run, answers)
    data.build_rows(run, prompts, Counter(), captured=True)
    folder = run.path("hidden_states")
    folder.mkdir()
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0][0]))
    for index, ids in enumerate(data.load_tokens(run)["input_ids"]):
        with torch.inference_mode():
            states = model(ids[None], output_hidden_states=True).hidden_states
        slots = [states[layer][0] for layer in LAYERS[:-1]] + [last[-1]]
        save_file({"hidden_states": torch.stack(slots, 1), "token_ids": ids}, hidden_states.state_file(folder, index))
    return run


@pytest.fixture
def extracted(made: Run, tmp_path: Path) -> Run:
    """A copy of it that a test may damage."""
    import shutil

    shutil.copytree(made.root, tmp_path / "runs" / "made")
    return Run(made.params.replace(runs_dir=str(tmp_path / "runs")), made.stage)


def change(run: Run, how: Callable[[torch.Tensor], torch.Tensor], rows: range = range(10)) -> None:
    for index in rows:
        path = hidden_states.state_file(run.path("hidden_states"), index)
        tensors = load_file(path)
        replace(path, {**tensors, "hidden_states": how(tensors["hidden_states"]).contiguous()})


def replace(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a new file in place of one whose tensors may still be mapped."""
    save_file(tensors, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def swap(run: Run, pairs: list[tuple[int, int]], *, names_too: bool) -> None:
    """Exchange the states of rows of equal length; with `names_too` whole files, token ids included."""
    for one, other in pairs:
        a, b = (hidden_states.state_file(run.path("hidden_states"), index) for index in (one, other))
        first, second = load_file(a), load_file(b)
        for path, own, states in ((a, first, second), (b, second, first)):
            replace(path, states if names_too else {**own, "hidden_states": states["hidden_states"]})


def nan(states: torch.Tensor) -> torch.Tensor:
    states[5, 2, 7] = math.nan
    return states


# ---- the guards, by name


def read(run: Run, target: Path) -> None:
    """Every file read back: what `extract` refuses to keep."""
    rows, _ = data.load_rows(run)
    wrong, _ = hidden_states.verify(run.path("hidden_states"), range(len(rows)), data.load_tokens(run), LAYERS, HIDDEN)
    if wrong:
        raise KitError(f"rows {sorted(wrong)}: {next(iter(wrong.values()))}")


def last_layer(run: Run, target: Path) -> None:
    result = hidden_states.score(run, Engine(target), target, LAYERS, EPS)  # type: ignore[arg-type]
    hidden_states.judge(result, run.params.golden_min_top1, run.params.golden_max_mae)


def every_layer(run: Run, target: Path) -> None:
    reference.judge(
        golden.against_transformers(run, target, LAYERS, *hidden_states.head_and_norm(target), EPS),
        run.params.golden_max_layer_error,
    )


def own_answers(run: Run, target: Path) -> None:
    golden.require_own_answers(golden.answers(run, *hidden_states.head_and_norm(target), EPS))


GUARDS: dict[str, Callable[[Run, Path], None]] = {
    "read": read,
    "last layer": last_layer,
    "every layer": every_layer,
    "own answers": own_answers,
}


def test_right_states_pass_every_guard(extracted: Run, target: Path) -> None:
    for guard in GUARDS.values():
        guard(extracted, target)


def test_every_slot_fits_its_layer_and_no_other(extracted: Run, target: Path) -> None:
    result = golden.against_transformers(extracted, target, LAYERS, *hidden_states.head_and_norm(target), EPS)
    for row in reference.rows(result):
        assert row["fits best"] == row["layer"]
        assert row["error"] < 1e-5
        assert row["against the layer before"] > 0.05


def test_the_table_says_how_far_the_engines_are_apart_and_when_there_is_only_one(extracted: Run, target: Path) -> None:
    parts = (*hidden_states.head_and_norm(target), EPS)
    same = golden.against_transformers(extracted, target, LAYERS, *parts)
    assert (same["top1"], same["mae"] < 1e-5) == (1, True)
    assert "vLLM and transformers on the same token ids: most likely token equal at 100.00 %" in reference.caption(same, "vllm")
    assert "compared with itself" in reference.caption(same, "transformers")
    FAULTS["the last layer is the one before"][0](extracted)
    other = golden.against_transformers(extracted, target, LAYERS, *parts)
    assert other["top1"] < 0.9
    assert other["mae"] > 0.01
    assert "not made: no memory" in reference.caption({"reason": "not made: no memory"}, "vllm")


FAULTS: dict[str, tuple[Callable[[Run], None], dict[str, str]]] = {
    "auxiliary layers one too early": (
        lambda run: change(run, lambda s: s[:, [0, 0, 1, 3]]),
        {"every layer": "slot 1 does not hold layer 2 .* it fits layer 1 best"},
    ),
    "auxiliary layers in another order": (
        lambda run: change(run, lambda s: s[:, [1, 0, 2, 3]]),
        {"every layer": "slot 0 does not hold layer 1 .* it fits layer 2 best"},
    ),
    "the last layer is the one before": (
        lambda run: change(run, lambda s: s[:, [0, 1, 2, 2]]),
        {
            "last layer": "golden check failed",
            "every layer": f"slot 3 does not hold layer {N_LAYERS} .* it fits layer {N_LAYERS - 1} best",
            "own answers": "are not those of their answers",
        },
    ),
    "the last layer is missing": (lambda run: change(run, lambda s: s[:, :3]), {"read": r"shape \(\d+, 3, 32\), wanted"}),
    "positions one too late": (
        lambda run: change(run, lambda s: s.roll(1, 0)),
        {"last layer": "golden check failed", "every layer": "slot 0", "own answers": "are not those of their answers"},
    ),
    "a cached prefix left out": (lambda run: change(run, lambda s: s[4:]), {"read": "shape .*, wanted"}),
    "a cached prefix left empty": (
        lambda run: change(run, lambda s: torch.cat([torch.zeros(4, *s.shape[1:]), s[4:]])),
        {"last layer": "golden check failed", "every layer": "slot 0 does not hold layer 1"},
    ),
    "one NaN": (lambda run: change(run, nan, range(7, 8)), {"read": r"rows \[7\]: not finite"}),
    "files of a batch in another order": (
        lambda run: swap(run, [(0, 2), (4, 6)], names_too=True),
        {"read": r"rows \[0, 2, 4, 6\]: token ids are not those of the row"},
    ),
    "states of a batch in another order": (
        lambda run: swap(run, [(1, 3), (3, 5), (5, 7)], names_too=False),
        {"every layer": "slot 0", "own answers": "states of 4 of 10 rows .*; seen rows 1, 3, 5, 7"},
    ),
    "two samples swapped": (
        lambda run: swap(run, [(2, 6)], names_too=False),
        {"own answers": "hidden states of 2 of 10 rows .*; seen rows 2, 6"},
    ),
}
"""By fault: how it is made, and which guards must catch it with which words. All other guards let it pass, so with these off it
trains and says nothing: the reason why they are there."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_and_named_and_passes_without_its_guard(extracted: Run, target: Path, fault: str) -> None:
    make, caught = FAULTS[fault]
    make(extracted)
    for name, message in caught.items():
        with pytest.raises(KitError, match=message):
            GUARDS[name](extracted, target)
    if "read" not in caught:  # a file that cannot be read stops the others too
        for name in GUARDS.keys() - caught:
            GUARDS[name](extracted, target)


def test_states_of_one_byte_pass_every_guard_and_fail_without_their_scales(
    extracted: Run, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(extracted.params.replace(extraction_storage="fp8", **FP8_LIMITS), extracted.stage)
    folder = run.path("hidden_states")
    for index in range(10):
        path = hidden_states.state_file(folder, index)
        stored = load_file(path)
        replace(path, state_files.tensors(stored["hidden_states"], stored["token_ids"], "fp8"))
    wrong, _ = hidden_states.verify(folder, range(10), data.load_tokens(run), LAYERS, HIDDEN, "fp8")
    assert wrong == {}
    for guard in (last_layer, every_layer, own_answers):
        guard(run, target)
    monkeypatch.setattr("hs_connectors.fp8_utils.dequantize_fp8_tensor", lambda stored, _scale, dtype: stored.to(dtype))
    last_layer(run, target)  # the norm takes a token's scale out again, so this guard cannot see it
    with pytest.raises(KitError, match="slot 0 does not hold layer 1"):
        every_layer(run, target)


def trusting(path: Path, token_ids: torch.Tensor, n_layers: int, hidden_size: int) -> tuple[torch.Tensor, str]:
    """A reader that checks nothing: what the file lacks is zero."""
    states = load_file(path)["hidden_states"]
    return torch.nn.functional.pad(states, (0, 0, 0, n_layers - states.shape[1])), ""


@pytest.mark.parametrize("fault", [name for name, (_, caught) in FAULTS.items() if "read" in caught])
def test_without_the_file_check_a_wrong_file_is_taken(
    extracted: Run, target: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault][0](extracted)
    with pytest.raises(KitError):
        read(extracted, target)
    monkeypatch.setattr(hidden_states, "load_states", trusting)
    read(extracted, target)


def test_thresholds_switch_the_guards_off(extracted: Run, target: Path) -> None:
    FAULTS["the last layer is the one before"][0](extracted)
    loose = extracted.params.replace(golden_min_top1=0, golden_max_mae=1e9)
    last_layer(Run(loose, extracted.stage), target)
    shifted = {"layers": [2], "errors": [[0.9, 0.3, 0.2]]}
    with pytest.raises(KitError, match="slot 0 does not hold layer 2"):
        reference.judge(shifted, 0.1)
    reference.judge(shifted, 0.5)


def test_a_layer_that_fits_better_is_refused_below_the_threshold_too() -> None:
    with pytest.raises(KitError, match="it fits layer 1 best"):
        reference.judge({"layers": [2], "errors": [[0.9, 0.001, 0.002]]}, 0.01)


# ---- the whole check


def finished(run: Run) -> None:
    """As `extract` leaves them: with the digests of the files."""
    folder = run.path("hidden_states")
    write_json(folder / "files.json", hidden_states._digests(folder, range(10)))
    write_json(folder / "manifest.json", {"inputs": {}, "outputs": {}})


def test_the_whole_check_is_recorded_and_not_made_twice(extracted: Run, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(extracted)
    said: list[str] = []
    golden.cross_check(extracted, target, LAYERS, EPS, said.append)
    assert extracted.fact("extraction.layer_error") < 1e-5
    assert extracted.fact("extraction.own_answers") == 1.0
    monkeypatch.setattr(engine_transformers, "load", None)  # would fail if it were called
    golden.cross_check(extracted, target, LAYERS, EPS, said.append)
    assert len(said) == 4
    assert all("passed at" in line for line in said)


@pytest.mark.parametrize("check", ["golden", "cross_check"])
def test_states_that_were_made_anew_are_checked_anew(
    extracted: Run, target: Path, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many files as before, as large as before, of another layer; with the guard off the old result stands for them."""

    def look() -> None:
        if check == "golden":
            engine = Engine(target)
            engine.ensure = lambda: None  # type: ignore[attr-defined]
            hidden_states.golden(extracted, engine, target, LAYERS, EPS)  # type: ignore[arg-type]
        else:
            golden.cross_check(extracted, target, LAYERS, EPS)

    finished(extracted)
    look()
    FAULTS["the last layer is the one before"][0](extracted)
    finished(extracted)
    with monkeypatch.context() as off:
        off.setattr(golden if check == "cross_check" else hidden_states, "reopen_for_new", lambda *_: None)
        look()
    with pytest.raises(KitError, match=r"delete the run's hidden_states folder|golden check failed"):
        look()


def test_a_failed_check_is_made_again(extracted: Run, target: Path) -> None:
    finished(extracted)
    FAULTS["two samples swapped"][0](extracted)
    with pytest.raises(KitError, match="are not those of their answers"):
        golden.cross_check(extracted, target, LAYERS, EPS)
    FAULTS["two samples swapped"][0](extracted)  # back again
    golden.cross_check(extracted, target, LAYERS, EPS)


def test_what_cannot_be_checked_is_said(extracted: Run, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference.why_not(target, "float32", available=10**9) is None
    assert "transformers would need" in str(reference.why_not(target, "float32", available=1000))
    assert "no weights" in str(reference.why_not(extracted.root, "float32", available=10**9))
    sampled = Run(extracted.params.replace(data_temperature=0.7), extracted.stage)
    assert "temperature 0.7" in golden.answers(sampled, *hidden_states.head_and_norm(target), EPS)["reason"]


def test_answers_of_another_writer_are_rated_and_not_judged(extracted: Run, target: Path) -> None:
    weights = hidden_states.head_and_norm(target)
    own = golden.answers(extracted, *weights, EPS)
    swap(extracted, [(1, 3), (2, 6)], names_too=False)  # answers that these states would not give
    given = Run(extracted.params.replace(data_regenerate=False, data_temperature=0.7), extracted.stage)
    found = golden.answers(given, *weights, EPS)
    for name, result in (("layers", {"reason": "not made"}), ("answers", found)):
        write_json(given.path("cross_check", f"{name}.json"), result)
    golden.judge(given, given.path("cross_check"))
    golden._record(given, given.path("cross_check"))
    assert own["agree"] == 1
    assert 0.5 < found["agree"] < 1
    assert found["nll"] > own["nll"]
    assert "the target did not write these answers" in found["reason"]
    assert given.fact("data.off_policy_tokens") == pytest.approx(1 - found["agree"])
    assert given.fact("extraction.own_answers") is None


def test_a_target_with_a_repetition_penalty_of_its_own_is_not_judged_by_its_likeliest_tokens(
    extracted: Run, target: Path
) -> None:
    FAULTS["two samples swapped"][0](extracted)
    write_json(extracted.path("data", "origin.json"), {"sampling": {"temperature": 0, "repetition_penalty": 1.1}})
    found = golden.answers(extracted, *hidden_states.head_and_norm(target), EPS)
    assert "repetition_penalty (1.1)" in found["reason"]


def test_positions_are_spread_from_first_to_last() -> None:
    assert golden.spread(list(range(10, 30)), 4) == [10, 16, 23, 29]
    assert golden.spread([5, 6], 4) == [5, 6]


# ---- the prefix cache

METRICS = """# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} %s
vllm:external_prefix_cache_hits_total{engine="0"} 9.0
"""


def a_server(extra: list[str], hits: str = "", engine: server.Engine | None = None, root: Path | None = None) -> Any:
    """A server that extracts, running if it has counted something."""
    return SimpleNamespace(
        engine=engine or server.extraction([1, 2, 3], Path("states"), "cpu"),
        run=SimpleNamespace(params=Params(serve_extra_args=extra), root=root),
        running=bool(hits),
        metrics=lambda: METRICS % hits,
    )


def test_extraction_as_the_kit_starts_it_has_no_prefix_cache() -> None:
    golden.require_uncached(a_server([]))
    golden.require_uncached(a_server(["--no-enable-prefix-caching"], "0.0"))
    golden.require_uncached(a_server(["--enable-prefix-caching"], "64.0", server.plain()))  # no states are taken from this one


@pytest.mark.parametrize("extra", [["--enable-prefix-caching"], ["--max-logprobs", "5", "--enable_prefix_caching"]])
def test_a_prefix_cache_switched_on_by_hand_is_refused(extra: list[str]) -> None:
    with pytest.raises(KitError, match="with prefix caching on.*serve_extra_args"):
        golden.require_uncached(a_server(extra))


def test_an_engine_without_the_switch_is_refused() -> None:
    with pytest.raises(KitError, match="on is vLLM's default"):
        golden.require_uncached(a_server([], engine=server.Engine("extraction")))


def test_positions_that_came_from_the_cache_are_seen_in_the_servers_counters(tmp_path: Path) -> None:
    """The next run starts another server, whose counters know nothing: what was made must not be there for it to find."""
    for name in ("hidden_states", "captured", "data"):
        (tmp_path / name).mkdir()
    with pytest.raises(KitError, match="seen 48 positions from the cache; hidden_states and captured of the run deleted"):
        golden.require_uncached(a_server([], "48.0", root=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
