"""The second engine: transformers answers the prompts and hands out hidden states. It needs no vLLM.

It is the fallback where vLLM's version does not fit, and the other side of the comparison where it does. It makes the same rows
and the same files; it is slower, and the target has to fit into the memory of this process. Notebook 06 still needs vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import origin, state_files
from eagle3kit.hub import local_folder
from eagle3kit.rundir import Run, cannot_write, write_atomic
from eagle3kit.server import Engine, cores

if TYPE_CHECKING:
    import torch


def load(folder: Path, dtype: str = "float32", device: str = "cpu", *, trust_remote_code: bool = False) -> Any:
    """The target as a transformers model: the whole of it, or for a wrapper such as Kimi-K2.5's the wrapper.

    Args:
        folder: a checkpoint.
        dtype: number type, or `auto` for the checkpoint's own.
        device: `cpu` or `cuda`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    kind = AutoModelForCausalLM if text is config else AutoModelForImageTextToText
    model = kind.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code).to(device).eval()
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):  # vLLM takes the config's epsilon here, transformers 1e-6
            module.variance_epsilon = text.rms_norm_eps
    return model


def states(model: Any, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> list[torch.Tensor]:
    """Hidden states of several sequences in one batch.

    The states are taken where they leave a layer: transformers' own list of them ends with the output of the final norm, while
    the trainer needs that of the last layer before it. Shorter rows are filled up on the right, where causal attention does not
    look.

    Args:
        model: what `load` returned, of n decoder layers.
        rows: token ids, `[T]` each.
        layers: vLLM layer ids: i is the output of layer i - 1, 0 the embeddings, n the last layer before the norm.

    Returns:
        `[T, len(layers), hidden]` for each row, on the CPU.
    """
    import torch

    decoder = model.get_decoder()
    places = [decoder.embed_tokens, *decoder.layers]
    left: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(_module: object, _inputs: object, output: Any) -> None:
            left[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    batch = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for number, row in enumerate(rows):
        batch[number, : len(row)] = torch.as_tensor(row)
    hooks = [places[layer].register_forward_hook(keep(layer)) for layer in layers]
    try:
        with torch.inference_mode():
            decoder(input_ids=batch.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    together = torch.stack([left[layer] for layer in layers], 2).cpu()
    return [together[number, : len(row)].contiguous() for number, row in enumerate(rows)]


def states_of(folder: Path, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> list[torch.Tensor]:
    """`states` of a checkpoint in float32, one row after the other: what other ways of getting them are held against."""
    model = load(folder)
    return [states(model, [row], layers)[0] for row in rows]


@dataclass
class _Talk:
    """A conversation that is being answered: what was said, what is still to be asked, and a row for each answer."""

    id: str
    ahead: list[dict[str, str]]
    said: list[dict[str, str]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def ask(self) -> bool:
        """Go on to the next question. Returns whether there is one."""
        while self.ahead and not self.error:
            self.said.append(self.ahead.pop(0))
            if self.said[-1]["role"] == "user":
                return True
        return False


class TransformersEngine:
    """Stands where `Server` stands while a run's answers and hidden states are made.

    Args:
        run: the run it works for.
        model: folder or hub id of the target.
        layers: vLLM layer ids whose states are extracted.
        device: `cpu` or `cuda`.
    """

    def __init__(self, run: Run, model: str | Path, layers: Sequence[int], device: str) -> None:
        self.run, self.model, self.layers, self.device = run, str(model), list(layers), device
        self.engine = Engine("transformers")
        self._model: Any = None

    def ensure(self) -> None:
        """Load the target if it is not loaded yet."""
        if self._model is None:
            import torch
            from transformers import AutoTokenizer

            p = self.run.params
            torch.set_num_threads(cores(p))
            folder = local_folder(self.model, p.target_revision)
            self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=p.trust_remote_code)
            self._model = load(folder, p.target_dtype, self.device, trust_remote_code=p.trust_remote_code)

    def stop(self) -> None:
        """Let go of the target's memory."""
        self._model = None

    # ---- answers

    def answer(self, asked: Path, responses: Path, say: Callable[[int, int], None]) -> None:
        """Answer the conversations of `asked` that have no row in `responses`, as speculators' `regenerate-responses` does.

        A conversation's rows are appended in one go, one an answer: `{"id", "primary_id", "input_ids", "loss_mask", "text",
        "metadata"}`. What could not be answered is noted in `responses.errors.jsonl`.

        Args:
            asked: JSONL of `{"id", "conversations": [{"role", "content"}]}`.
            responses: JSONL that grows.
            say: called with (conversations done, conversations in all).
        """
        known = {json.loads(line)["primary_id"] for line in _lines(responses)}
        conversations = [json.loads(line) for line in _lines(asked)]
        talks = [_Talk(row["id"], list(row["conversations"])) for row in conversations if row["id"] not in known]
        done, size = len(conversations) - len(talks), self.run.params.data_concurrency
        for start in range(0, len(talks), size):
            say(done + start, len(conversations))
            batch = talks[start : start + size]
            while asking := [talk for talk in batch if talk.ask()]:
                self._answer_once(asking)
            _append(responses, [row for talk in batch for row in talk.rows])
            failed = [{"id": talk.id, "metadata": {"error": talk.error}} for talk in batch if talk.error]
            _append(responses.with_suffix(".errors.jsonl"), failed)
        say(len(conversations), len(conversations))

    def _answer_once(self, talks: Sequence[_Talk]) -> None:
        p = self.run.params
        prompts: list[list[int]] = []
        for talk in list(talks):
            ids = self._tokenizer.apply_chat_template(talk.said, add_generation_prompt=True, return_dict=False)
            if len(ids) >= p.serve_max_model_len:
                talk.error = f"the prompt has {len(ids)} tokens, serve_max_model_len is {p.serve_max_model_len}"
            prompts.append(ids)
        fitting = [(talk, ids) for talk, ids in zip(talks, prompts, strict=True) if not talk.error]
        for (talk, ids), (generated, reason) in zip(fitting, self._generate([ids for _, ids in fitting]), strict=True):
            content = self._tokenizer.decode(generated, skip_special_tokens=True)
            if not content:
                talk.error = "empty answer"
                continue
            talk.rows.append(
                {
                    "id": f"{talk.id}_gen{len(talk.rows)}",
                    "primary_id": talk.id,
                    "input_ids": [*ids, *generated],
                    "loss_mask": [0] * len(ids) + [1] * len(generated),
                    "text": self._tokenizer.decode([*ids, *generated]),
                    "metadata": {"finish_reason": reason, "engine": self.engine.name},
                }
            )
            talk.said.append({"role": "assistant", "content": content})
            if len(ids) + len(generated) > p.data_seq_length:
                talk.ahead.clear()

    def _generate(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], str]]:
        """What the target writes after each prompt, end-of-turn token included, and why it ended: `stop` or `length`."""
        import torch

        if not prompts:
            return
        p, config = self.run.params, self._model.generation_config
        own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        ends = [token for token in (*own, self._tokenizer.eos_token_id) if token is not None]  # vLLM stops at each of them too
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), ends[0])
        mask = torch.zeros_like(ids)
        for number, prompt in enumerate(prompts):  # on the left, so that every row goes on at the same place
            ids[number, width - len(prompt) :] = torch.as_tensor(prompt)
            mask[number, width - len(prompt) :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        if p.data_temperature:
            # without a top_k of its own transformers would take 50, vLLM takes all
            chosen = {"top_k": 0} | origin.own_sampling(self.model, p.target_revision)
            sampling = {"do_sample": True, "temperature": p.data_temperature, **chosen}
        torch.manual_seed(p.seed)
        device = self._model.device
        written = self._model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=p.data_max_response_tokens,
            eos_token_id=ends,
            pad_token_id=ends[0],
            **sampling,
        )
        for row in written[:, width:].tolist():
            length = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
            yield row[:length], "stop" if row[length - 1] in ends else "length"

    # ---- hidden states

    def extract(self, wanted: Mapping[Path, Sequence[int]], say: Callable[[int], None]) -> None:
        """Write the states of each sequence to its file (see `state_files`).

        Args:
            wanted: token ids by file; a file appears when it is whole.
            say: called with the number of files written so far.
        """
        import torch
        from safetensors.torch import save

        ordered = sorted(wanted.items(), key=lambda item: len(item[1]))  # rows of a batch of about the same length
        size = self.run.params.extraction_concurrency
        for start in range(0, len(ordered), size):
            batch = ordered[start : start + size]
            for (path, ids), found in zip(batch, states(self._model, [ids for _, ids in batch], self.layers), strict=True):
                write_atomic(path, save(state_files.tensors(found, torch.as_tensor(ids), self.run.params.extraction_storage)))
            say(start + len(batch))

    def prompt_logprobs(self, ids: Sequence[int]) -> list[tuple[int, float]]:
        """For each position but the first: the model's most likely token, and the log-probability of the token that is there."""
        import torch

        with torch.inference_mode():
            logits = self._model(input_ids=torch.as_tensor(ids)[None].to(self._model.device), use_cache=False).logits
        logprobs = logits[0, :-1].float().log_softmax(-1).cpu()
        of_next = logprobs.gather(1, torch.as_tensor(ids)[1:, None])[:, 0]
        return list(zip(logprobs.argmax(-1).tolist(), of_next.tolist(), strict=True))


def _lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines() if line.strip()] if path.exists() else []


def _append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        try:
            with path.open("a") as file:
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        except OSError as error:  # half a line that it leaves is dropped by the next run
            raise cannot_write(path, error) from error
