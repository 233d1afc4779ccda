"""Prompts to on-policy responses to token rows with loss masks, with an account of everything dropped.

The target answers the prompts itself (speculators' `regenerate-responses` through the running server). Every answer becomes one
row: the tokens the server saw and the tokens it generated, with a loss mask that is 1 on the generated ones. So the mask is
taken from what happened, not from a template.

    data/prompts.jsonl      the conversations that are asked, training ones first: {"id", "kind", "conversations"}
    data/responses.jsonl    what came back, in order of arrival
    data/rows/              the rows as a `datasets` folder, training rows first: input_ids, loss_mask, seq_len
    data/rows.json          per row: id, kind, split, length; and the account of what was dropped
    data/origin.json        who wrote the answers, and how: see `origin.describe`
"""

from __future__ import annotations

import hashlib
import json
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, Literal

from eagle3kit import origin
from eagle3kit.engine_transformers import TransformersEngine
from eagle3kit.errors import KitError
from eagle3kit.params import Params
from eagle3kit.process import run_tool
from eagle3kit.rundir import Run, read_json, value_digest, write_atomic, write_json
from eagle3kit.server import Server, plain
from eagle3kit.template import rows_of

MADE_BY = "03_extract_hidden_states"
Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered: `turns` are user turns, perhaps after one system turn."""

    id: str
    kind: str
    split: Split
    turns: tuple[tuple[str, str], ...]
    """(role, text) pairs."""
    given: tuple[dict[str, Any], ...] = ()
    """The whole conversation as the source has it, its answers included."""

    @property
    def users(self) -> int:
        """How many answers it asks for."""
        return sum(role == "user" for role, _ in self.turns)

    @property
    def answers(self) -> int:
        """How many answers the source gives to it; one that opens a conversation answers nothing."""
        return sum(message["role"] == "assistant" for message in self.given[1:])

    @property
    def normalized(self) -> str:
        """Its letters and digits alone (see `normalized`): equal for prompts that differ in nothing that matters."""
        return normalized("".join(text for _, text in self.turns))

    @property
    def asked(self) -> Iterator[bytes]:
        """What each of its answers answers: a digest of the normalized turns up to each of the user's."""
        text = hashlib.blake2b(digest_size=16)
        for role, turn in self.turns:
            text.update(normalized(turn).encode())
            if role == "user":
                yield text.copy().digest()


@dataclass(frozen=True)
class Row:
    """What is known of one row beside its tokens."""

    id: str
    kind: str
    split: Split
    length: int
    """Tokens in all."""
    supervised: int
    """Tokens with loss mask 1."""


def normalized(text: str) -> str:
    """Text without case, white space, punctuation and differences of Unicode form (NFKC: wide letters, ligatures, accents).

    A text of nothing but other characters keeps them: `+-+` and `***` are not the same prompt.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return "".join(c for c in folded if c.isalnum() or unicodedata.category(c).startswith("M")) or "".join(folded.split())


# ---- prompts


def read_conversations(path: Path) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Read a JSONL file of conversations; a line that is not one is counted by reason, never an exception.

    Returns:
        The rows that hold a `conversations` or `messages` list, and how many lines were dropped for which reason.

    Raises:
        KitError: the file cannot be read at all.
    """
    rows: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    try:
        with path.open("rb") as file:
            for line in _lines(file):
                if line is None:
                    dropped[f"a line of more than {MAX_LINE_BYTES / 1e6:.0f} MB"] += 1
                    continue
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode())
                    json.dumps(row, ensure_ascii=False).encode()  # "\\ud800" is JSON, but no text that can be written again
                except UnicodeError:
                    dropped["not UTF-8"] += 1
                except (ValueError, RecursionError):
                    dropped["not JSON"] += 1
                else:
                    if isinstance(row, dict) and isinstance(row.get("conversations", row.get("messages")), list):
                        rows.append(row)
                    else:
                        dropped["no conversations or messages list"] += 1
    except OSError as error:
        raise KitError(f"cannot read {path}", seen=error.strerror, fix="correct data_source") from None
    return rows, dropped


MAX_LINE_BYTES = 2**26
"""Longest line that is read. A file without line ends, such as weights given as data by mistake, must not fill the memory."""


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines of a file; None in place of one that is too long."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
        yield None


def turns_of(row: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The system and user turns of a conversation in either common form (role/content or from/value); others are left out."""
    names = {"user": "user", "human": "user", "system": "system"}
    found = []
    for turn in row.get("conversations", row.get("messages")) or []:
        if not isinstance(turn, dict):
            continue
        role, text = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if isinstance(role, str) and role in names and isinstance(text, str) and text.strip():
            found.append((names[role], text))
    return tuple(found)


def messages_of(row: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The whole conversation of either common form as chat messages, answers, thoughts and tool calls included."""
    names = {"human": "user", "gpt": "assistant"}
    found = []
    for turn in row.get("conversations", row.get("messages")) or []:
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        text = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if isinstance(role, str) and (text is None or isinstance(text, str)):
            kept = {key: turn[key] for key in ("reasoning_content", "tool_calls", "tool_call_id") if turn.get(key)}
            found.append({"role": names.get(role, role), "content": text or "", **kept})
    return tuple(found)


def load_prompts(params: Params) -> tuple[list[Prompt], Counter[str]]:
    """The prompts that `data_source` names, training ones first, and what was dropped for which reason.

    A source without a split of its own is split by a seeded choice. A training prompt is dropped that asks, in any of its turns,
    what a held-out one asks: the answer that is measured would have been learnt.

    Raises:
        KitError: the source cannot be read, or one of the two splits is empty.
    """
    dropped: Counter[str] = Counter()
    if params.data_source == "builtin":
        folder = resources.files("eagle3kit") / "prompts"
        raw: dict[Split, list[dict[str, Any]]] = {}
        for split in _SPLITS:
            raw[split], lost = read_conversations(Path(str(folder / f"{split}.jsonl")))
            dropped.update(lost)
    else:
        rows, dropped = _source_rows(params)
        raw = _split(rows, params)
    lines = sum(map(len, raw.values())) + sum(dropped.values())
    prompts = {split: list(_prompts(raw[split], split, dropped)) for split in _SPLITS}
    ids: set[str] = set()
    for split in _SPLITS:
        unique = {prompt.id: prompt for prompt in reversed(prompts[split]) if prompt.id not in ids}
        dropped["id used twice"] += len(prompts[split]) - len(unique)
        ids.update(unique)
        prompts[split] = [prompt for prompt in prompts[split] if unique.get(prompt.id) is prompt]
    dropped = +dropped  # without the zeros
    measured = {text for prompt in prompts["heldout"] for text in prompt.asked}
    apart = [prompt for prompt in prompts["train"] if measured.isdisjoint(prompt.asked)]
    if overlapping := len(prompts["train"]) - len(apart):
        dropped["also among the held-out prompts"] += overlapping
        prompts["train"] = apart
    require_account("prompts", lines, sum(map(len, prompts.values())), dropped)
    chosen: list[Prompt] = []
    for split, limit in (("train", params.data_train_prompts), ("heldout", params.data_heldout_prompts)):
        some = prompts[split][: limit or None]
        if not some:
            raise KitError(
                f"no {split} prompt is left of data_source {params.data_source}",
                seen=dict(dropped) or "an empty source",
                wanted="conversations with at least one user turn",
                fix="correct data_source or data_heldout_share",
            )
        chosen += some
    return chosen, dropped


_SPLITS: tuple[Split, ...] = ("train", "heldout")


def _prompts(rows: Iterable[dict[str, Any]], split: Split, dropped: Counter[str]) -> Iterator[Prompt]:
    seen: set[str] = set()
    for number, row in enumerate(rows):
        turns = turns_of(row)
        if not any(role == "user" for role, _ in turns):
            dropped["no user turn"] += 1
            continue
        identity = row.get("id") if isinstance(row.get("id"), str) else None
        prompt = Prompt(identity or f"{split}-{number:06d}", str(row.get("kind", "any")), split, turns, messages_of(row))
        if prompt.normalized in seen:
            dropped["duplicate"] += 1
            continue
        seen.add(prompt.normalized)
        yield prompt


def _source_rows(params: Params) -> tuple[list[dict[str, Any]], Counter[str]]:
    path = Path(params.data_source).expanduser()
    if path.suffix in {".jsonl", ".json"} or path.exists():
        return read_conversations(path)
    from datasets import load_dataset

    try:
        source = load_dataset(params.data_source, split="train")
    except Exception as error:  # the hub client raises many kinds
        raise KitError(
            f"data_source {params.data_source} is neither a local file nor a data set of the hub that can be reached",
            seen=str(error).splitlines()[0][:200],
            fix="give a JSONL file of conversations, or go online",
        ) from None
    return [dict(row) for row in source], Counter()


def _split(rows: Sequence[dict[str, Any]], params: Params) -> dict[Split, list[dict[str, Any]]]:
    import random

    order = list(range(len(rows)))
    random.Random(params.seed).shuffle(order)  # noqa: S311 - a reproducible choice, not a secret
    n = max(1, round(len(rows) * params.data_heldout_share)) if rows else 0
    return {"heldout": [rows[i] for i in sorted(order[:n])], "train": [rows[i] for i in sorted(order[n:])]}


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> Path:
    """Write prompts as JSONL in the common `conversations` form."""
    lines = (
        json.dumps(
            {"id": p.id, "kind": p.kind, "conversations": [{"role": role, "content": text} for role, text in p.turns]},
            ensure_ascii=False,
        )
        for p in prompts
    )
    return write_atomic(path, "".join(f"{line}\n" for line in lines))


# ---- the step


SHAPING = (
    "target_model",
    "target_revision",
    "target_dtype",
    "data_source",
    "data_train_prompts",
    "data_heldout_prompts",
    "data_heldout_share",
    "data_max_response_tokens",
    "data_seq_length",
    "data_temperature",
    "seed",
)
"""Parameters that change the rows: inputs of their step."""


def answer(run: Run, server: Server | TransformersEngine, say: Callable[[int, int], None]) -> list[Row]:
    """Prompts to rows; the resumable step `data`. The server is started only if an answer is missing.

    Raises:
        KitError: a source cannot be read, the target gave no answers, or nothing usable is left.
    """
    prompts, dropped = load_prompts(run.params)
    asked = [[prompt.id, *prompt.turns] for prompt in prompts]
    inputs = {"prompts": value_digest(asked), **run.params.subset(SHAPING)}
    if not run.params.data_regenerate:
        inputs["given"] = value_digest([prompt.given for prompt in prompts])
    step = run.step("data", inputs)
    if not step.done:
        with step:
            began, tokens_before = time.monotonic(), _answer_tokens(step.folder)
            if run.params.data_regenerate:
                regenerate(run, server, prompts, say)
            else:
                take_given(run, server.model, prompts)
            seconds = time.monotonic() - began
            # Rows end where a captured answer's states do, whoever wrote them: they are the same rows with every engine and mode.
            rows = build_rows(run, prompts, dropped, captured=run.params.data_regenerate)
            new_tokens = _answer_tokens(step.folder) - tokens_before
            tokens = load_tokens(run)
            content = [[ids.tolist(), mask.tolist()] for ids, mask in zip(tokens["input_ids"], tokens["loss_mask"], strict=True)]
            step.outputs = {"rows": len(rows), "digest": value_digest(content)}
            label = origin.describe(run.params, server.model, [ids for ids, _ in content])
            write_json(step.folder / "origin.json", label)
            run.record_all(
                {f"data.{key}": (label[key], "") for key in ("on_policy", "thinking", "empty_thoughts")}, "data/origin.json"
            )
            _record(run, rows, prompts, new_tokens, seconds, server.engine.name)
    return load_rows(run)[0]


def _answer_tokens(folder: Path) -> int:
    return sum(sum(row["loss_mask"]) for row in _whole_rows(folder / "responses.jsonl"))


def _record(run: Run, rows: Sequence[Row], prompts: Sequence[Prompt], new_tokens: int, seconds: float, engine: str) -> None:
    dropped = load_rows(run)[1]
    train, heldout = ([row for row in rows if row.split == split] for split in _SPLITS)
    run.record_all(
        {
            "data.prompts": (len(prompts), "conversations"),
            "data.heldout_prompts": (sum(prompt.split == "heldout" for prompt in prompts), "conversations"),
            "data.rows": (len(rows), "rows"),
            "data.dropped": (sum(dropped.values()), "conversations or rows"),
            "data.train_tokens": (sum(row.length for row in train), "tokens"),
            "data.train_supervised_tokens": (sum(row.supervised for row in train), "tokens"),
            "data.heldout_supervised_tokens": (sum(row.supervised for row in heldout), "tokens"),
        },
        "data/rows.json",
    )
    if new_tokens and run.params.data_regenerate:
        run.record_all(
            {
                "extraction.tokens_per_s": (round(new_tokens / seconds, 1), "generated tokens/s"),
                "time.answers_s": (round(seconds, 1), "s"),
            },
            f"{new_tokens} tokens generated with their hidden states captured, start of the server included"
            if engine == "extraction" and run.params.extraction_mode == "offline"
            else f"{new_tokens} tokens generated without their hidden states",
        )
    written_by = Counter(writer(row) for row in _whole_rows(run.path("data", "responses.jsonl")))
    run.record("extraction.engine", " and ".join(sorted(written_by)), "", f"answers by engine: {dict(written_by)}")


# ---- responses


def writer(row: Mapping[str, Any]) -> str:
    """Who wrote a response: `transformers`, `vllm`, or `the source`, whose answers `take_given` writes without metadata."""
    return str(row["metadata"].get("engine", "vllm")) if row.get("metadata") else "the source"


def regenerate(run: Run, server: Server | TransformersEngine, prompts: Sequence[Prompt], say: Callable[[int, int], None]) -> None:
    """Let the target answer every prompt that has no answer yet. `say(done, total)` reports progress in conversations.

    The server is started if it does not run yet. Online a plain one takes its place: one that extracts writes a file a request.

    Raises:
        KitError: the tool failed; what was answered so far is kept.
    """
    folder, p = run.path("data"), run.params
    if p.extraction_mode == "online" and isinstance(server, Server) and server.engine.name == "extraction":
        with Server(run, server.model, plain(), server.device) as other:
            regenerate(run, other, prompts, say)
        return
    asked = write_prompts(folder / "prompts.jsonl", prompts)
    responses = folder / "responses.jsonl"
    repair_responses(responses, prompts)
    server.ensure()
    if isinstance(server, TransformersEngine):
        server.answer(asked, responses, say)
        return
    # The tool ends a conversation when prompt and answer together exceed its --max-tokens, so that one bounds the row, and the
    # request's own max_completion_tokens bounds the answer.
    sampling: dict[str, Any] = {"temperature": p.data_temperature, "max_completion_tokens": p.data_max_response_tokens}
    if server.engine.name == "extraction":
        # The states of a conversation are all in the cache when its answer ends: have them written, which saves a second pass.
        sampling["kv_transfer_params"] = {"include_output_tokens": True}
    command = [*server.tool(), "regenerate-responses"]
    command += ["--endpoint", f"{server.url}/v1/chat/completions", "--dataset", str(asked), "--outfile", str(responses)]
    command += ["--max-tokens", str(p.data_seq_length), "--concurrency", str(p.data_concurrency), "--resume"]
    command += ["--sampling-params", json.dumps(sampling)]
    tail = _Tail(responses)

    def progress() -> int:
        server.require_alive()
        done = tail.conversations()
        say(done, len(prompts))
        return done

    run_tool(
        "regenerate-responses",
        command,
        run.path("logs"),
        env=server.secret | ({"HF_HUB_OFFLINE": "1"} if Path(server.model).exists() else {}),
        progress=progress,
        stall_s=p.stall_timeout_s,
        fix="run the notebook again: answered prompts are kept",
    )


def take_given(run: Run, model: str, prompts: Sequence[Prompt]) -> None:
    """Write the source's own answers as responses: off-policy rows, rendered by the target's chat template.

    speculators' `prepare-data` does the same through a server, but shuffles the rows and drops their ids, so that prompts of the
    held-out split could not be told from the others. What the template refuses gives no row; `build_rows` counts it.

    Raises:
        KitError: the template refuses every conversation.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=run.params.trust_remote_code)
    write_prompts(run.path("data", "prompts.jsonl"), prompts)
    lines, refused = [], None
    for prompt in prompts:
        try:
            rows = rows_of(tokenizer, prompt.given)
        except KitError as error:
            refused = error
            continue
        lines += [
            json.dumps({"id": f"{prompt.id}_gen{number}", "primary_id": prompt.id, **row}) for number, row in enumerate(rows)
        ]
    if refused and not lines:
        raise refused
    write_atomic(run.path("data", "responses.jsonl"), "".join(f"{line}\n" for line in lines))


class _Tail:
    """Counts the conversations in a growing file, reading each byte once."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._ids = path, 0, set[str]()

    def conversations(self) -> int:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(whole) + len(newline)
            self._ids.update(json.loads(line)["primary_id"] for line in whole.splitlines() if line.strip())
        return len(self._ids)


def _whole_rows(responses: Path) -> list[dict[str, Any]]:
    rows = []
    if responses.exists():
        for line in responses.read_bytes().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:  # a killed run can leave half a line at the end
                continue
    return rows


def repair_responses(responses: Path, prompts: Sequence[Prompt]) -> None:
    """Make `responses.jsonl` fit for going on: drop half a line at its end, repeated rows, and a last conversation cut short.

    The tool writes a conversation's rows in one go and takes any row of it for the whole, so after a kill only the last
    conversation in the file can be incomplete.
    """
    if not responses.exists():
        return
    users = {prompt.id: prompt.users for prompt in prompts}
    rows = {row["id"]: row for row in _whole_rows(responses) if row.get("primary_id") in users}
    if rows:
        last = list(rows.values())[-1]["primary_id"]
        of_last = [identity for identity, row in rows.items() if row["primary_id"] == last]
        if len(of_last) < users[last]:
            for identity in of_last:
                del rows[identity]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values())
    if responses.read_bytes() != text.encode():
        write_atomic(responses, text)


# ---- rows


def build_rows(run: Run, prompts: Sequence[Prompt], dropped: Counter[str], captured: bool) -> list[Row]:
    """Turn responses into rows: training rows first, each split in the order of its prompts.

    With `captured` the last generated token of a row is left off: it was sampled but never fed to the target, so the server has
    no hidden state for it (and none is needed: no later token depends on it).

    Raises:
        KitError: no row of a split is left, or the loss mask of a row is degenerate.
    """
    from datasets import Dataset

    folder, p = run.path("data"), run.params
    order = {prompt.id: (prompt.split == "heldout", number) for number, prompt in enumerate(prompts)}
    by_id = {prompt.id: prompt for prompt in prompts}
    answers = [row for row in _whole_rows(folder / "responses.jsonl") if row["primary_id"] in by_id]
    answers.sort(key=lambda row: (order[row["primary_id"]], row["id"]))
    wanted = {prompt.id: prompt.users if p.data_regenerate else max(1, prompt.answers) for prompt in prompts}
    lost: Counter[str] = Counter()
    came = Counter(row["primary_id"] for row in answers)
    missing = set(by_id) - set(came)
    if missing:
        why = "the target gave no answer" if p.data_regenerate else "the source gives no answer that the chat template takes"
        lost[why] += sum(map(wanted.__getitem__, missing))
        if p.data_regenerate and len(missing) > max(1, MAX_UNANSWERED * len(prompts)):
            raise KitError(
                "the target left too many prompts without an answer",
                seen=f"{len(missing)} of {len(prompts)}; the first error is {_first_error(folder)}",
                wanted=f"at most {100 * MAX_UNANSWERED:.0f} %",
                fix="run the notebook again: answered prompts are kept",
            )
    lost["the conversation ended before this turn"] += sum(max(0, wanted[identity] - n) for identity, n in came.items())
    rows: list[Row] = []
    table: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for answer in answers:
        ids, mask = answer["input_ids"], answer["loss_mask"]
        if captured:
            ids, mask = ids[:-1], mask[:-1]
        if len(ids) > p.data_seq_length:
            lost["longer than data_seq_length"] += 1
            continue
        if sum(mask) < 2:  # the drafter's first prediction is for the second token
            lost["fewer than 2 generated tokens"] += 1
            continue
        prompt = by_id[answer["primary_id"]]
        rows.append(Row(answer["id"], prompt.kind, prompt.split, len(ids), sum(mask)))
        for key, value in (("input_ids", ids), ("loss_mask", mask), ("seq_len", len(ids))):
            table[key].append(value)
    require_account("answers", sum(wanted.values()), len(rows), lost)
    dropped = +(Counter(dropped) + lost)
    for split in _SPLITS:
        if not any(row.split == split for row in rows):
            raise KitError(f"no {split} row is left", seen=dict(dropped), fix="raise data_seq_length, or correct data_source")
    check_masks(table["loss_mask"])
    dataset = Dataset.from_dict(table)
    dataset.set_format("torch")  # speculators' loader calls tensor methods on what it reads
    dataset.save_to_disk(str(folder / "rows"))
    write_json(
        folder / "rows.json",
        {"rows": [asdict(row) for row in rows], "prompts": len(prompts), "answers": len(answers), "dropped": dict(dropped)},
    )
    return rows


def require_account(what: str, came: int, kept: int, dropped: Mapping[str, int]) -> None:
    """Everything that came in is kept or dropped for a reason.

    Raises:
        KitError: something vanished or was counted twice.
    """
    if came != kept + sum(dropped.values()):
        raise KitError(
            f"the account of the {what} does not add up",
            seen=f"{came} came in, {kept} are kept, dropped: {dict(dropped) or 'none'}",
            wanted=f"{came} = kept + dropped",
            fix="delete the run's data folder and run notebook 03 again; if it happens again it is an error of the kit",
        )


MAX_UNANSWERED = 0.02
"""Share of prompts that may stay without an answer: a few empty generations are normal, a failing server is not."""


def _first_error(folder: Path) -> str:
    for row in _whole_rows(folder / "responses.errors.jsonl"):
        return str(row.get("metadata", {}).get("error", "unknown"))[:200]
    return "unknown"


def check_masks(masks: Sequence[Sequence[int]], low: float = 0.02, high: float = 0.98) -> float:
    """Share of supervised tokens over all rows.

    Raises:
        KitError: the share is outside `low` .. `high`: all-zero masks train nothing, all-one masks train on the prompts.
    """
    total = sum(len(mask) for mask in masks)
    share = sum(map(sum, masks)) / total if total else 0.0
    if not low <= share <= high:
        raise KitError(
            "the loss mask is degenerate",
            seen=f"{100 * share:.1f} % of the tokens supervised",
            wanted=f"{100 * low:.0f} to {100 * high:.0f} %",
            fix="look at data/responses.jsonl: are prompt and answer told apart?",
        )
    return share


def load_rows(run: Run) -> tuple[list[Row], dict[str, int]]:
    """The rows' descriptions in the order of `data/rows`, and the drop account."""
    found = read_json(run.path("data", "rows.json"), MADE_BY)
    return [Row(**row) for row in found["rows"]], found["dropped"]


def load_origin(run: Run) -> dict[str, Any]:
    """The label of the rows (`origin.describe`); empty for rows that were made before there was one."""
    path = run.path("data", "origin.json")
    label: dict[str, Any] = read_json(path, MADE_BY) if path.exists() else {}
    return label


def prompts_asked(run: Run) -> dict[str, list[dict[str, str]]]:
    """The conversations that were asked, by id."""
    rows, _ = read_conversations(run.path("data", "prompts.jsonl"))
    return {row["id"]: row["conversations"] for row in rows}


def load_tokens(run: Run) -> Any:
    """The rows' tokens: a `datasets.Dataset` with torch columns input_ids, loss_mask, seq_len."""
    from datasets import load_from_disk

    return load_from_disk(str(run.path("data", "rows")))


# ---- for the notebook


def count_by_kind(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """How many prompts of each kind each split has; for a table."""
    kinds = Counter((prompt.kind, prompt.split) for prompt in prompts)
    return [{"kind": kind, **{split: kinds[kind, split] for split in _SPLITS}} for kind in sorted({kind for kind, _ in kinds})]


def account(rows: Sequence[Row], dropped: Mapping[str, int]) -> list[dict[str, Any]]:
    """Rows and tokens that each split keeps, then what was dropped by reason; for a table."""
    kept = [
        {
            "what": f"{split} rows",
            "count": sum(row.split == split for row in rows),
            "tokens": sum(row.length for row in rows if row.split == split),
            "supervised": sum(row.supervised for row in rows if row.split == split),
        }
        for split in _SPLITS
    ]
    return kept + [{"what": f"dropped: {reason}", "count": count} for reason, count in sorted(dropped.items())]


def examples(run: Run, model: str | Path, count: int) -> dict[str, list[tuple[str, bool]]]:
    """A few rows as (token text, supervised) pairs, one of each kind, by `kind: id`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=run.params.trust_remote_code)
    rows, _ = load_rows(run)
    tokens = load_tokens(run)
    first_of_kind: dict[str, int] = {}
    for index, row in enumerate(rows):
        first_of_kind.setdefault(row.kind, index)
    found = {}
    for kind, index in list(first_of_kind.items())[:count]:
        ids, mask = tokens[index]["input_ids"].tolist(), tokens[index]["loss_mask"].bool().tolist()
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        found[f"{kind}: {rows[index].id}"] = list(zip(texts, mask, strict=True))
    return found
