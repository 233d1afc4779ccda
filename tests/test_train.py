"""The trainer's command line, its log, and checkpoints that a kill cut short."""

import contextlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.optim._muon as muon
from datasets import Dataset, load_from_disk
from drafters import EVERY_FOURTH, edit_weights, maps, write_drafter, write_target
from hs_connectors import HiddenStatesBackend
from hypothesis import given
from hypothesis import strategies as st

from eagle3kit import access, compat, hidden_states, train
from eagle3kit.data import load_tokens
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.rundir import Run, file_digest, write_json
from eagle3kit.server import Server
from eagle3kit.trainer import JsonLines, orthogonalize, row_of, simulated_al, unmark_before_saving


def test_simulated_al_is_the_formula() -> None:
    assert simulated_al([]) == 1
    assert simulated_al([0.5, 0.5, 0.5]) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert simulated_al([0.416, 0.5, 0.6]) == pytest.approx(1 + 0.416 + 0.208 + 0.1248)


@given(st.floats(0, 0.999), st.integers(1, 8))
def test_simulated_al_of_a_constant_rate_is_the_geometric_sum(rate: float, k: int) -> None:
    assert simulated_al([rate] * k) == pytest.approx((1 - rate ** (k + 1)) / (1 - rate))


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_orthogonalize_keeps_the_singular_vectors_and_evens_out_the_values(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    grad = torch.randn(shape)
    coefficients = (3.4445, -4.775, 2.0315)  # torch.optim.Muon's own
    x = orthogonalize(grad, coefficients, 5, 1e-7)
    u, _, v = torch.linalg.svd(grad, full_matrices=False)
    diagonal = u.T @ x @ v.T
    assert torch.allclose(diagonal, torch.diag(diagonal.diag()), atol=1e-4)
    assert 0.5 < diagonal.diag().min() < diagonal.diag().max() < 1.3


def test_orthogonalize_takes_the_place_of_torchs() -> None:
    """Same arguments, same result up to bfloat16: the name that is replaced still means the same in this torch."""
    torch.manual_seed(0)
    grad = torch.randn(12, 40)
    arguments = (grad, (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert torch.allclose(muon._zeropower_via_newtonschulz(*arguments).float(), orthogonalize(*arguments), atol=0.03)


def test_metrics_of_both_splits_become_rows() -> None:
    metrics = {"loss": 3.0, "full_acc_0": 0.4, "full_acc_1": 0.2, "cond_acc_0": 0.4, "cond_acc_1": 0.5, "kl_div_0": 1.0}
    row = row_of("train", metrics, {"epoch": 1, "lr": 1e-3, "profile": {"tokens_per_s": 700.04}}, 7)
    assert row["acc"] == [0.4, 0.2]
    assert row["cond"] == [0.4, 0.5]
    assert "simulated_al" not in row
    assert (row["loss"], row["step"], row["epoch"], row["lr"], row["tokens_per_s"]) == (3.0, 7, 1, 1e-3, 700.0)
    row = row_of("val", {f"{name}_epoch": value for name, value in metrics.items()}, {"epoch": 1}, 7)
    assert (row["loss"], row["acc"], row["lr"]) == (3.0, [0.4, 0.2], None)
    assert row["simulated_al"] == pytest.approx(1 + 0.4 + 0.4 * 0.5)


def test_each_line_of_the_log_has_its_process_and_its_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: -1e9)  # a clock set back
    for step in (1, 2):
        handler = JsonLines(tmp_path / "log.jsonl")
        record = logging.LogRecord("m", 20, "", 0, "", None, None)
        record.msg, record.step = {"train": {"loss": 1.0}}, step
        handler.emit(record)
    first, second = train.read_log(tmp_path / "log.jsonl")
    assert first["part"] != second["part"]
    assert 0 <= first["time"] <= second["time"]


def test_the_log_keeps_the_last_line_of_a_step_and_ignores_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [
        {"split": "train", "step": 1, "loss": 9},
        {"split": "train", "step": 2, "loss": 8},
        {"split": "val", "step": 2, "loss": 7},
    ]
    again = {"split": "train", "step": 2, "loss": 5}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, again]) + '{"split": "tra')
    assert [(row["split"], row["step"], row["loss"]) for row in train.read_log(path)] == [
        ("train", 1, 9),
        ("train", 2, 5),
        ("val", 2, 7),
    ]
    assert train.read_log(tmp_path / "none") == []


def test_a_checkpoint_cut_short_is_dropped_before_resuming(tmp_path: Path) -> None:
    for name, whole in (("0", True), ("1", True), ("10", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
        if whole:
            (tmp_path / name / "training_state.json").write_text(json.dumps({"epoch": int(name), "local_step": 0}))
    (tmp_path / "epoch10_end").symlink_to("10")
    (tmp_path / "epoch1_end").symlink_to("1")
    lines = [{"split": "val", "step": 9 * epoch, "epoch": epoch} for epoch in (0, 1)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    train.drop_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "epoch1_end", "log.jsonl"]
    assert train.last_checkpoint(tmp_path).name == "1"


def checkpoint(folder: Path, epoch: int, local_step: int = 0) -> Path:
    path = folder / str(epoch)
    path.mkdir()
    (path / "model.safetensors").touch()
    (path / "training_state.json").write_text(json.dumps({"epoch": epoch, "local_step": local_step}))
    return path


def test_an_epoch_that_was_saved_but_not_validated_is_trained_again(tmp_path: Path) -> None:
    checkpoint(tmp_path, 0)
    checkpoint(tmp_path, 1)
    (tmp_path / "log.jsonl").write_text(json.dumps({"split": "val", "step": 5, "epoch": 0}) + "\n")
    train.drop_unfinished(tmp_path)
    assert train.last_checkpoint(tmp_path).name == "0"


def test_a_save_over_an_older_checkpoint_takes_back_its_mark_first(tmp_path: Path) -> None:
    """Whatever is killed while it saves: the older save's mark must not vouch for the newer one's half."""

    class Trainer:
        def _training_state_path(self, epoch: int) -> Path:
            return tmp_path / str(epoch) / "training_state.json"

        def maybe_save_checkpoint(self, epoch: int, local_step: int = 0) -> None:
            raise KeyboardInterrupt

    path = checkpoint(tmp_path, 0, local_step=7)
    unmark_before_saving(Trainer)
    with pytest.raises(KeyboardInterrupt):
        Trainer().maybe_save_checkpoint(0, 14)
    train.drop_unfinished(tmp_path)
    assert not path.exists()


@pytest.mark.parametrize("date", [1e9, 4e9])
def test_a_clock_that_was_set_drops_no_checkpoint(tmp_path: Path, date: float) -> None:
    path = checkpoint(tmp_path, 0, local_step=7)
    os.utime(path / "model.safetensors", (date, date))
    train.drop_unfinished(tmp_path)
    assert path.exists()


def test_durations_come_from_the_age_of_each_process(run: Run) -> None:
    """Three parts of one training, two of them killed; the step that was repeated counts in time, and once as a step."""
    parts = {"a": [(1, 11.0), (2, 13.0), (3, 15.0)], "b": [(3, 30.0)], "c": [(3, 10.0), (4, 12.0), (5, 14.0)]}
    lines = [
        {"split": "train", "step": step, "epoch": 0, "loss": 1.0, "acc": [], "cond": [], "part": part, "time": time}
        for part, steps in parts.items()
        for step, time in steps
    ]
    log = run.path("checkpoints", "log.jsonl")
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"split": "tr')
    assert train.seconds_of_parts(log) == 15 + 30 + 14
    train._record(run, train.read_log(log), train.seconds_of_parts(log))
    assert run.fact("train.steps") == 5
    assert run.fact("train.seconds_per_step") == 2
    assert run.fact("time.train_s") == 59


def test_training_that_was_asked_to_stop_is_not_finished(tmp_path: Path) -> None:
    train.require_finished(checkpoint(tmp_path, 2), 3)
    for path, epochs in ((tmp_path / "2", 4), (checkpoint(tmp_path, 3, local_step=5), 4)):
        with pytest.raises(KitError, match="ended before its last epoch"):
            train.require_finished(path, epochs)


def test_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="no checkpoint"):
        train.last_checkpoint(tmp_path)


def test_epoch_rows_show_held_out_rows_only() -> None:
    log = [
        {"split": "train", "step": 1, "epoch": 0, "loss": 9.0, "acc": [0.1], "cond": [0.1]},
        {"split": "val", "step": 1, "epoch": 0, "loss": 8.0, "acc": [0.5], "cond": [0.5]},
    ]
    row = {"epoch": 1, "loss": 8.0, "step 1": "50.0 %", "simulated AL": 1.5, "served": ""}
    assert train.epoch_rows(log) == [row]
    assert train.epoch_rows(log, Path("checkpoints/0")) == [row | {"served": "yes"}]


@pytest.mark.parametrize(("by", "epoch"), [("acceptance", "1"), ("loss", "0"), ("last", "2")])
def test_the_checkpoint_that_is_served_is_the_best_by_what_was_asked(tmp_path: Path, by: str, epoch: str) -> None:
    log = []
    for number, (loss, cond) in enumerate([(5.0, [0.4, 0.2]), (6.0, [0.4, 0.5]), (7.0, [0.3, 0.9])]):  # AL 1.48, 1.6, 1.57
        checkpoint(tmp_path, number)
        log.append({"split": "val", "step": number, "epoch": number, "loss": loss, "acc": cond, "cond": cond})
    assert train.best_checkpoint(tmp_path, log, by).name == epoch


def test_of_equal_checkpoints_the_later_is_served_and_an_unfinished_one_never(tmp_path: Path) -> None:
    log = [{"split": "val", "step": n, "epoch": n, "loss": 5.0, "acc": [0.4], "cond": [0.4]} for n in range(3)]
    for number, local_step in enumerate((0, 0, 7)):
        checkpoint(tmp_path, number, local_step)
    assert train.best_checkpoint(tmp_path, log, "acceptance").name == "1"
    assert train.best_checkpoint(tmp_path, [], "acceptance").name == "2"  # nothing validated: the last


def trained(tmp_path: Path, **changes: object) -> Run:
    """A finished training of two epochs, the first of which accepts more."""
    run = prepared(tmp_path, train_epochs=2, **changes)
    log = [
        {"split": "val", "step": n, "epoch": n, "loss": 6.0 - n, "acc": [0.5 - n / 10], "cond": [0.5 - n / 10]} for n in (0, 1)
    ]
    for name in ("config", "hidden_states"):
        with run.step(name, {}):
            pass
    inputs = {name: run.digest(name, "") for name in ("config", "hidden_states", "vocab")}
    step = run.step("checkpoints", inputs | run.params.subset(train.TUNED))
    if not step.done:
        with step:
            for number in (0, 1):
                checkpoint(step.folder, number)
            (step.folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
            step.outputs = {"checkpoint": "1"}
    return run


@pytest.mark.parametrize(
    ("stall_s", "said"), [(1, "trainer has come no further for 1 s.*stall_timeout_s"), (3600, "no checkpoint")]
)
def test_a_trainer_that_hangs_is_ended_and_named_and_without_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stall_s: int, said: str
) -> None:
    hangs = [sys.executable, "-c", "import time; time.sleep(6)"]
    monkeypatch.setattr(train, "command", lambda *_: hangs)
    monkeypatch.setattr(hidden_states, "require_intact", lambda run: None)
    run = prepared(tmp_path, stall_timeout_s=stall_s)
    for name, notebook in (("config", train.CONFIG_MADE_BY), ("hidden_states", "03_extract_hidden_states")):
        with Run(run.params, notebook).step(name, {}):
            pass
    began = time.monotonic()
    with pytest.raises(KitError, match=said):
        train.train(run, "/model", "cpu", lambda log: None)
    assert (time.monotonic() - began < 6) == (stall_s < 6)
    assert not run.path("logs", "trainer.pid").exists()


def test_damaged_states_are_not_trained_on_and_without_the_guard_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "command", lambda *_: [sys.executable, "-c", ""])
    run = prepared(tmp_path)
    for name, notebook in (("config", train.CONFIG_MADE_BY), ("hidden_states", "03_extract_hidden_states")):
        with Run(run.params, notebook).step(name, {}):
            pass
    states = run.path("hidden_states", "hs_0.safetensors")
    states.write_bytes(b"these were looked at")
    write_json(states.with_name("files.json"), {states.name: [states.stat().st_size, file_digest(states)]})
    states.write_bytes(b"these were not seen!")
    with pytest.raises(KitError, match="1 hidden-state file.*damaged or gone, the first is hs_0.safetensors"):
        train.train(run, "/model", "cpu", lambda log: None)
    monkeypatch.setattr(hidden_states, "require_intact", lambda run: None)
    with pytest.raises(KitError, match="no checkpoint"):  # the trainer was started, and does nothing here
        train.train(run, "/model", "cpu", lambda log: None)


def test_another_choice_of_checkpoint_needs_no_training(tmp_path: Path) -> None:
    for by, epoch in (("last", "1"), ("acceptance", "0"), ("loss", "1")):
        run = trained(tmp_path, train_best_by=by)
        train.train(run, "/model", "cpu", lambda log: None)
        assert train.drafter_folder(run).name == epoch
        if by != "last":
            assert run.fact("train.val_acc_1") == pytest.approx(0.5 - int(epoch) / 10)


def prepared(tmp_path: Path, **changes: object) -> Run:
    run = Run(Params(run_name="unit", runs_dir=str(tmp_path), **changes), "05_train")
    rows = [
        {"id": f"r{i}", "kind": "any", "split": "train" if i < 7 else "heldout", "length": 9, "supervised": 3} for i in range(10)
    ]
    write_json(run.path("data", "rows.json"), {"rows": rows, "dropped": {}})
    with run.step("vocab", {}) as step:
        step.outputs = {"size": 64}
    return run


def flags(command: list[str]) -> dict[str, str]:
    return dict(item[2:].split("=", 1) for item in command if item.startswith("--") and "=" in item)


def test_the_command_takes_shape_and_vocabulary_from_the_run(tmp_path: Path) -> None:
    run = prepared(tmp_path, train_epochs=5, train_lr=6e-4)
    command = train.command(run, "/model", "cpu")
    found = flags(command)
    assert found["from-pretrained"] == str(run.path("config"))
    assert found["d2t-path"].endswith("vocab/d2t.npy")
    assert (found["draft-vocab-size"], found["epochs"], found["lr"], found["on-missing"]) == ("64", "5", "0.0006", "raise")
    assert (found["draft-attn-impl"], found["hidden-states-dtype"]) == ("sdpa", "float32")
    assert "--cpu" in command
    assert "torch.distributed.run" not in command


ASKED: Any = SimpleNamespace(url="http://127.0.0.1:1")
"""A server, as far as a command line names it."""


def test_online_the_trainer_asks_the_server_and_bears_no_failure(tmp_path: Path) -> None:
    run = prepared(tmp_path, stall_timeout_s=77)
    command = train.command(run, "/model", "cpu", ASKED)
    found = flags(command)
    assert (found["on-missing"], found["vllm-endpoint"], found["request-timeout"]) == ("generate", "http://127.0.0.1:1/v1", "77")
    assert found["max-consecutive-generation-failures"] == "1"
    assert command[command.index("--store") + 1] == str(run.path(hidden_states.CAPTURE))
    assert command.index("--store") < command.index("--")
    offline = train.command(run, "/model", "cpu")
    assert "vllm-endpoint" not in flags(offline)
    assert "--store" not in offline


@pytest.mark.parametrize("ends", ["well", "in an error"])
def test_online_a_server_runs_beside_the_trainer_on_the_next_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    run = prepared(tmp_path, extraction_mode="online", device="cuda", gpu_count=3, serve_tensor_parallel=2)
    with run.step("hidden_states", {"layers": [1, 2, 3, 4]}):
        pass
    log: list[str] = []
    monkeypatch.setattr(Server, "ensure", lambda self: log.append(self.variables["CUDA_VISIBLE_DEVICES"]))
    monkeypatch.setattr(Server, "stop", lambda self: log.append("stopped"))
    run.path(hidden_states.CAPTURE, "left").mkdir()
    with contextlib.suppress(ZeroDivisionError), train.online_server(run, "/model", "cuda") as server:
        assert server is not None
        assert "[1, 2, 3, 4]" in " ".join(server.engine.arguments)
        environment = train._environment(run, "cuda", server)
        assert environment["CUDA_VISIBLE_DEVICES"] == "4"
        assert environment[access.KEY] == server.secret[access.KEY]
        if ends != "well":
            raise ZeroDivisionError
    assert log == ["5,6", "stopped"]
    assert not run.path(hidden_states.CAPTURE).exists()


def test_offline_no_server_runs(tmp_path: Path) -> None:
    with train.online_server(prepared(tmp_path), "/model", "cpu") as server:
        assert server is None


def test_online_a_server_that_ended_ends_training(tmp_path: Path) -> None:
    def gone() -> None:
        raise KitError("the vLLM server 'extraction' ended")

    with pytest.raises(KitError, match="ended"):
        train._look(tmp_path / "log.jsonl", lambda _: None, cast(Any, SimpleNamespace(require_alive=gone)))


def test_states_of_one_byte_are_read_by_the_reader_that_knows_their_scales(tmp_path: Path) -> None:
    limits = {"golden_min_top1": 0.93, "golden_max_mae": 0.1, "golden_max_layer_error": 0.05}
    assert "hidden-states-backend" not in flags(train.command(prepared(tmp_path), "/model", "cpu"))
    found = flags(train.command(prepared(tmp_path, extraction_storage="fp8", **limits), "/model", "cpu"))
    assert found["hidden-states-backend"] in HiddenStatesBackend.registry
    assert (found["hidden-states-backend"], found["hidden-states-dtype"]) == ("fp8", "float32")


def test_prompts_are_learnt_from_where_the_training_rows_part(tmp_path: Path) -> None:
    run = prepared(tmp_path, train_on_prompts=True)
    ids = [[1, 2, 2, 10 + i, 4, 5] for i in range(10)]
    answers = [[0, 0, 0, 0, 1, 1]] * 10
    table = Dataset.from_dict({"input_ids": ids, "loss_mask": answers})
    table.set_format("torch")
    table.save_to_disk(str(run.path("data", "rows")))
    assert flags(train.command(run, "/model", "cpu"))["data-path"] == str(run.path("checkpoints", "rows"))
    for _ in range(2):  # a resumed training writes them again
        train.open_masks(run, run.path("checkpoints", "rows"))
    opened = load_from_disk(str(run.path("checkpoints", "rows")))
    assert opened["input_ids"][9].tolist() == ids[9]
    assert [mask.tolist() for mask in opened["loss_mask"]] == [[0, 0, 0, 1, 1, 1]] * 7 + answers[7:]
    assert [mask.tolist() for mask in load_tokens(run)["loss_mask"]] == answers


def test_the_trainer_cuts_the_rows_where_the_splits_meet(tmp_path: Path) -> None:
    ratio = float(flags(train.command(prepared(tmp_path), "/model", "cpu"))["train-data-ratio"])
    assert int(10 * ratio) == 7


def test_several_processes_run_under_torchrun_on_gpus(tmp_path: Path) -> None:
    run = prepared(tmp_path, device="cuda", gpu_count=8, train_processes=8)
    command = train.command(run, "org/model", "cuda")
    assert "--nproc-per-node=8" in command
    assert "--cpu" not in command
    assert "hidden-states-dtype" not in flags(command)


def test_rows_are_packed_whole() -> None:
    assert train.packs([], 10) == 0
    assert train.packs([10, 10], 10) == 2
    assert train.packs([6, 6, 4, 4, 2], 10) == 3  # 6 | 6 4 | 4 2


def test_compat_looks_for_the_options_of_this_command_line(tmp_path: Path) -> None:
    run = prepared(tmp_path, train_optimizer="muon")
    both = [flags(train.command(run, "/model", "cpu", server)) for server in (None, ASKED)]
    assert {*both[0], *both[1]} - {"hidden-states-path"} == set(compat.TRAINER_OPTIONS)
    for name, choices in compat.TRAINER_OPTIONS.items():
        assert not choices or {given[name] for given in both if name in given} == {*choices}


def finished(tmp_path: Path, **changes: object) -> tuple[Run, Path, Path]:
    """A run with a finished training, its target's folder and its drafter's."""
    target = write_target(tmp_path / "target")
    run = Run(Params(run_name="unit", runs_dir=str(tmp_path), **changes), "05_train")
    with run.step("checkpoints", {}) as step:
        drafter = write_drafter(step.folder / "0", target)
        step.outputs = {"checkpoint": "0"}
    for name, tensor in zip(("d2t", "t2d"), maps(EVERY_FOURTH), strict=True):
        np.save(run.path("vocab", f"{name}.npy"), tensor.numpy())
    run.record("train.val_acc_1", 0.4, "share", "a test")
    return run, target, drafter


def test_a_drafter_that_kept_what_is_the_targets_passes(tmp_path: Path) -> None:
    run, target, _ = finished(tmp_path)
    assert [row["found"] for row in train.check(run, target)][2:] == [
        "200 of 200 rows equal, in float32",
        "50 of 50 rows equal, in float32",
        "40.0 %",
    ]


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_frozen_weight_that_changed_stops_the_run(tmp_path: Path, name: str) -> None:
    run, target, drafter = finished(tmp_path)
    edit_weights(drafter, lambda weights: weights[name][7].neg_())
    with pytest.raises(KitError, match=f"not so: {name} is the target's.*rows equal.*fix: delete the run's checkpoints folder"):
        train.check(run, target)


def test_output_rows_of_a_parent_may_be_its_own_and_its_embeddings_not(tmp_path: Path) -> None:
    run, target, drafter = finished(tmp_path, train_from="parent")
    edit_weights(drafter, lambda weights: weights["lm_head.weight"].neg_())
    assert "0 of 50 rows equal, in float32" in [row["found"] for row in train.check(run, target)]
    edit_weights(drafter, lambda weights: weights["embed_tokens.weight"].neg_())
    with pytest.raises(KitError, match="not so: embed_tokens.weight"):
        train.check(run, target)
