"""Steps, facts and atomic writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.rundir import Run, project_path, read_json, write_atomic, write_json


def again(run: Run, **changes: object) -> Run:
    return Run(run.params.replace(**changes), run.stage)


def test_a_finished_step_is_done_with_equal_inputs(run: Run) -> None:
    with run.step("vocab", {"size": 8}) as step:
        step.outputs = {"n": 1}
    found = again(run).step("vocab", {"size": 8})
    assert found.done
    assert found.outputs == {"n": 1}


def test_other_inputs_are_refused_and_the_difference_named(run: Run) -> None:
    with run.step("vocab", {"size": 8, "data": "a"}):
        pass
    with pytest.raises(KitError, match="another size; seen 8; wanted 9") as caught:
        again(run).step("vocab", {"size": 9, "data": "a"})
    assert "force: true" in caught.value.message


def test_force_does_it_again_from_nothing(run: Run) -> None:
    with run.step("vocab", {"size": 8}) as step:
        (step.folder / "old").touch()
    forced = again(run, force=True).step("vocab", {"size": 9})
    assert forced.state == "fresh"
    assert not (forced.folder / "old").exists()


def test_an_interrupted_step_resumes_with_what_it_had(run: Run) -> None:
    with pytest.raises(RuntimeError), run.step("data", {"n": 1}) as step:
        (step.folder / "half").touch()
        raise RuntimeError("killed")
    found = again(run).step("data", {"n": 1})
    assert found.state == "resume"
    assert (found.folder / "half").exists()
    with pytest.raises(KitError, match="was begun with another n"):
        again(run).step("data", {"n": 2})


def test_a_folder_without_a_record_is_not_trusted(run: Run) -> None:
    stray = run.path("vocab", "stray")
    stray.touch()
    assert run.step("vocab", {}).state == "fresh"
    assert not stray.exists()


def test_two_processes_cannot_work_on_one_step(run: Run) -> None:
    with run.step("data", {"n": 1}), pytest.raises(KitError, match="another process"), again(run).step("data", {"n": 1}):
        pass


HOLD = """
import sys
from eagle3kit.params import Params
from eagle3kit.rundir import Run
with Run(Params(run_name="unit", runs_dir=sys.argv[1]), "03").step("data", {"n": 1}):
    print("working", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("force", [False, True])
def test_a_second_process_is_refused_by_the_pid_of_the_first_and_deletes_nothing(run: Run, force: bool) -> None:
    line = [sys.executable, "-c", HOLD, run.params.runs_dir]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "working\n"
        stray = run.path("data", "half")
        stray.touch()
        with (
            pytest.raises(KitError, match=f"another process is working on step data of run unit; seen process {other.pid};"),
            again(run, force=force).step("data", {"n": 2 if force else 1}),
        ):
            pass
        assert stray.exists()
        other.kill()
    with again(run).step("data", {"n": 1}) as step:  # the lock ends with its process
        assert step.state == "resume"


def test_digest_follows_inputs_and_outputs_only(run: Run) -> None:
    digests: list[str] = []
    for outputs in ({"a": 1}, {"a": 1}, {"a": 2}):
        with again(run, force=True).step("data", {"n": len(digests) == 9}) as step:
            step.outputs = dict(outputs)
        digests.append(run.digest("data", "03"))
        step.reopen()
    assert digests[0] == digests[1] != digests[2]


def test_a_missing_step_names_its_notebook(run: Run) -> None:
    with pytest.raises(KitError, match="run notebook 04_vocab_map first"):
        run.digest("vocab", "04_vocab_map")


def test_facts_are_kept_with_unit_stage_and_source(run: Run) -> None:
    run.record("a.b", 1.5, "s", "a clock")
    again(run).record("c", 2)
    assert run.facts() == {
        "a.b": {"value": 1.5, "unit": "s", "stage": run.stage, "source": "a clock"},
        "c": {"value": 2, "unit": "", "stage": run.stage, "source": ""},
    }
    assert run.fact("a.b") == 1.5
    assert run.fact("nothing", "unknown") == "unknown"


def test_stage_minutes_are_those_of_the_run_that_worked(run: Run) -> None:
    run.worked = True
    run.finish()
    before = run.facts()
    idle = again(run)
    idle.finish()
    assert run.facts() == before
    assert before["stage.03.worked"]["value"] == 1


def test_failure_is_kept_until_that_stage_succeeds(run: Run) -> None:
    run.record_failure("04_vocab_map", "why")
    run.finish()
    assert run.failure() == {"stage": "04_vocab_map", "message": "why"}
    Run(run.params, "04_vocab_map").finish()
    assert run.failure() is None


def test_write_atomic_keeps_the_old_file_when_the_new_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_atomic(tmp_path / "x", "old")

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(KitError, match="No space left"):
        write_atomic(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff\xfe"])
def test_read_json_names_the_notebook_that_makes_the_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KitError, match="04_vocab_map"):
        read_json(path, "04_vocab_map")


def test_relative_paths_start_at_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("notebooks", "params", "notebooks/deeper"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "notebooks" / "deeper")
    assert project_path("runs") == tmp_path / "runs"
    assert project_path("/elsewhere") == Path("/elsewhere")


def test_parameters_of_each_stage_are_kept(tmp_path: Path) -> None:
    run = Run(Params(run_name="x", runs_dir=str(tmp_path), seed=3), "04_vocab_map")
    rows = json.loads(run.path("params", "04_vocab_map.json").read_text())
    assert next(row for row in rows if row["name"] == "seed")["value"] == 3


def test_error_is_one_line_with_what_mends_it(tmp_path: Path) -> None:
    error = KitError("it broke", seen="a\n b", wanted=3, fix="do this")
    assert str(error) == "it broke; seen a b; wanted 3; fix: do this"
    assert error._render_traceback_() == [f"KitError: {error}"]
    assert write_json(tmp_path / "a" / "b.json", {"x": 1}).read_text() == '{\n "x": 1\n}\n'
