"""What the facts of a run allow to say: the summary in ten lines, and the checks of each stage with their verdicts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from eagle3kit.evidence import STAGES, Check, Evidence, mapping, number, numbers, percent, rows, short
from eagle3kit.rundir import value_digest
from eagle3kit.widgets import SYMBOLS, fmt

# ---- the summary


LONGEST = 1600
"""Characters of a line of the summary at most: the advice ends with the configuration to use, which must not be cut off."""


class Line(NamedTuple):
    """One line of the summary."""

    label: str
    state: str
    text: str


def speed_verdict(low: float | None, high: float | None) -> tuple[str, str]:
    """What a ratio's range allows to say: (`faster`, `slower`, `noise` or `unknown`, the same in words)."""
    if low is None or high is None:
        return "unknown", "whether that is more than noise is unknown, no spread was measured"
    if round(low, 2) > 1:
        return "faster", "faster"
    if round(high, 2) < 1:
        return "slower", "slower"
    return "noise", "inside the noise, neither faster nor slower"


def summary(e: Evidence) -> list[Line]:
    """The ten lines of the summary."""
    lines = [
        _outcome(e),
        _trained(e),
        _data(e),
        al_line(e),
        _positions(e),
        lossless_line(e),
        speed_line(e),
        _golden(e),
        _time(e),
        _memory(e),
    ]
    source = {
        "Trained": "train.steps",
        "Data": "data.train_tokens",
        "Acceptance length": "acceptance.al",
        "By position": "acceptance.position_1",
        "Lossless": "lossless.share",
        "Speed": "speed.eagle3.ratio",
        "Golden check": "extraction.golden_top1",
    }
    marked = []
    for line in lines:
        stage = str(e.facts.get(source.get(line.label, ""), {}).get("stage", ""))
        text, state = line.text, line.state
        if e.stale(stage):
            text = f"From an earlier run of stage {stage[:2]}: {text}"
        elif e.failed is not None and stage[:2] == e.failed:
            text = f"As recorded before stage {stage[:2]} failed, perhaps by an earlier run: {text}"
        old = text != line.text and state == "ok"
        marked.append(line._replace(text=text, state="warn" if old else state))
    return marked


def _outcome(e: Evidence) -> Line:
    done = e.completed()
    if e.failure:
        stage, message = e.failure
        before = f"completed before: {', '.join(done)}" if done else "no stage had completed before"
        first = next((line for line in message.splitlines() if line.strip()), "no message was recorded")
        return Line("Outcome", "fail", f"FAILED in stage {short(stage, 40)}: {short(first)} ({before})")
    if len(done) < len(STAGES):
        missing = ", ".join(stage.number for stage in STAGES if stage.number not in done)
        some = f"completed: {', '.join(done)}" if done else "no stage has completed"
        return Line("Outcome", "warn", f"Unfinished: {some}; still to run: {missing}")
    al, share = e.number("acceptance.al"), e.number("lossless.share")
    _, slowest, fastest = speedup(e)
    verdict, _ = speed_verdict(slowest, fastest)
    if al is not None and al < 1.05:
        return Line("Outcome", "fail", "All seven stages completed, but the drafter's guesses are hardly ever accepted")
    if share is not None and share < 1:
        return Line("Outcome", "fail", "All seven stages completed, but speculation changed outputs: it is not lossless")
    parts = [
        "acceptance is unknown" if al is None else f"the drafter is accepted (AL {al:.2f})",
        "whether it is lossless is unknown" if share is None else "it is lossless",
        {
            "faster": "and on this machine faster than no speculation",
            "slower": "and on this machine slower than no speculation",
            "noise": "and on this machine neither faster nor slower than no speculation",
            "unknown": "and whether it is faster is unknown",
        }[verdict],
    ]
    state = "ok" if al is not None and share is not None and verdict in {"faster", "noise"} else "warn"
    return Line("Outcome", state, f"All seven stages completed: {', '.join(parts)}")


def _trained(e: Evidence) -> Line:
    size = e.count("vocab.size", "tokens")
    steps = e.number("train.steps")
    epochs = e.param("train_epochs")
    took = "training has not finished" if steps is None else f"trained for {steps:,.0f} optimizer steps"
    if steps is not None and epochs is not None:
        took += f" ({fmt(epochs)} epochs)"
    return Line(
        "Trained",
        "ok" if steps is not None else "unknown",
        f"An EAGLE-3 drafter for {short(target(e), 80)}, draft vocabulary of {size}, {took}",
    )


def target(e: Evidence) -> str:
    """The target's name, from the facts or the parameters."""
    return str(e.value("target.name") or e.param("target_model") or "an unknown target")


def _data(e: Evidence) -> Line:
    source = e.param("data_source")
    own = "the prompts that come with the kit"
    written = {"True": "answered by the target itself", "False": "answered by the source, not by the target"}
    by = written.get(str(e.value("data.on_policy")), "whose answers are of unknown origin")
    where = (
        "prompts of unknown origin" if source is None else own if source == "builtin" else f"the prompts of {short(source, 60)}"
    )
    known = e.number("data.train_tokens") is not None
    dropped = e.number("data.dropped")
    lost = "how many were dropped is unknown" if dropped is None else f"{dropped:,.0f} dropped"
    return Line(
        "Data",
        "ok" if known else "unknown",
        f"{e.count('data.train_tokens', 'tokens').capitalize()} in training rows, from {where}, {by}; "
        f"{e.count('data.heldout_prompts', 'prompts')} held out; {lost}",
    )


def interval_text(low: float | None, high: float | None, digits: int = 2) -> str:
    """The ends of an interval in brackets, or nothing where one is unknown."""
    return "" if low is None or high is None else f" ({low:.{digits}f} to {high:.{digits}f})"


def _k(e: Evidence) -> int | None:
    found = number(mapping(e.json("eval/acceptance.json")).get("k")) or number(e.param("eval_k")) or len(e.positions()) or None
    return None if found is None else int(found)


def al_line(e: Evidence) -> Line:
    """The acceptance length and its interval."""
    al, low, high = (e.number(f"acceptance.al{end}") for end in ("", ".low", ".high"))
    if al is None:
        return Line("Acceptance length", "unknown", "unknown: not measured (stage 06 measures it)")
    k = _k(e)
    spread = interval_text(low, high) or " (its interval is unknown)"
    most = "" if k is None else f", {k + 1} that every guess is"
    text = f"{al:.2f}{spread} tokens a forward pass at k = {fmt(k)} on held-out prompts; 1 means that nothing is accepted{most}"
    return Line("Acceptance length", "fail" if al < 1.05 else "ok", text)


def _positions(e: Evidence) -> Line:
    shares = e.positions()
    if not shares:
        return Line("By position", "unknown", "unknown: not measured (stage 06 measures it)")
    told = ", ".join(f"{percent(share)} at position {i + 1}" for i, share in enumerate(shares))
    profile = mapping(mapping(e.json("eval/acceptance.json")).get("profile"))
    name = short(profile.get("name") or "unknown", 60)
    told += f". Pattern: {name}" + (f", {short(profile.get('reason'))}" if profile.get("reason") else "")
    state = "fail" if shares[0] < 0.05 else "ok" if name in {"healthy", "near perfect"} else "warn"
    return Line("By position", state, f"Of all drafts accepted: {told}")


def lossless_line(e: Evidence) -> Line:
    """Whether speculation left the answers as they were."""
    share = e.number("lossless.share")
    if share is None:
        return Line("Lossless", "unknown", "unknown: not measured (stage 06 measures it)")
    record = mapping(e.json("eval/lossless.json"))
    compared = number(record.get("compared"))
    of = "the compared outputs" if compared is None else f"{compared:,.0f} compared outputs"
    ties = e.number("lossless.ties")
    ties = float(len(rows(record.get("ties")))) if ties is None and record else ties
    told = "" if not ties else f", counting {ties:,.0f} that part{'s' if ties == 1 else ''} at a tie"
    return Line(
        "Lossless",
        "ok" if share >= 1 else "fail",
        f"{percent(share)} of {of} equal those without speculation, token for token{told}",
    )


class Measured(NamedTuple):
    """Where the speed of the run is told from, as the names of its facts.

    Attributes:
        where: the measurement, in words.
        drafter: first part of the names of the trained drafter's facts; likewise `plain` and `ngram`.
    """

    where: str
    drafter: str
    plain: str
    ngram: str


def measured_speed(e: Evidence) -> Measured:
    """The sweep where the advice rests on it and it measured the same load and draft length, else the short measurement.

    The sweep is the longer of the two. Told from both, one line of a page could say faster and the next one not to speculate.
    """
    load = f"sweep.c{fmt(e.param('eval_speed_concurrency'))}"
    drafter = f"{load}.eagle3-k{fmt(e.param('eval_k'))}"
    if e.value("advice.from_sweep") is not True:
        return Measured("", "speed.eagle3", "speed.none", "speed.ngram")
    if e.number(f"{drafter}.ratio") is None:
        return Measured("a short measurement at a load that the sweep left out", "speed.eagle3", "speed.none", "speed.ngram")
    return Measured(f"in the sweep, {load.removeprefix('sweep.c')} at a time", drafter, f"{load}.none", f"{load}.ngram")


def speedup(e: Evidence) -> tuple[float | None, float | None, float | None]:
    """The trained drafter's speed-up at the run's own load, and its interval."""
    name = measured_speed(e).drafter
    return e.number(f"{name}.ratio"), e.number(f"{name}.ratio.low"), e.number(f"{name}.ratio.high")


def speed_line(e: Evidence) -> Line:
    """The speed-up, its interval, what it would be at the acceptance of all held-out prompts, and the advice."""
    ratio, low, high = speedup(e)
    if ratio is None:
        return Line("Speed", "unknown", "unknown: not measured (stage 06 measures it)")
    verdict, words = speed_verdict(low, high)
    by = measured_speed(e)
    plain, with_drafter = e.number(f"{by.plain}.tokens_per_s"), e.number(f"{by.drafter}.tokens_per_s")
    rates = "" if plain is None or with_drafter is None else f" ({with_drafter:.1f} against {plain:.1f} tokens/s)"
    text = f"{ratio:.2f} times{interval_text(low, high)} the speed without speculation{rates}: {words}"
    text += f" ({by.where})" if by.where else ""
    al, heldout = e.number(f"{by.drafter}.al"), e.number(f"{by.drafter}.heldout_al")
    reckoned = e.number(f"{by.drafter}.ratio.at_heldout")
    if al is not None and heldout is not None and reckoned is not None:
        text += f"; its prompts have AL {al:.2f}, held-out ones {heldout:.2f}: reckoned for those {reckoned:.2f} times"
    ngram = e.number(f"{by.ngram}.ratio")
    if ngram is not None:
        text += (
            f"; n-gram {ngram:.2f} times{interval_text(e.number(f'{by.ngram}.ratio.low'), e.number(f'{by.ngram}.ratio.high'))}"
        )
    if isinstance(advice := e.value("advice.speculate"), str):
        text += f". Advice: {short(advice, LONGEST // 2)}"
    return Line("Speed", {"faster": "ok", "noise": "warn"}.get(verdict, "warn"), text)


def _golden(e: Evidence) -> Line:
    top1, mae = e.number("extraction.golden_top1"), e.number("extraction.golden_mae")
    if top1 is None or mae is None:
        return Line("Golden check", "unknown", "unknown: the extracted hidden states were not checked (stage 03 does it)")
    state, judged = _judge_golden(e, top1, mae)
    return Line(
        "Golden check",
        state,
        f"{judged}: the extracted states give the server's own most likely token at {percent(top1)} of positions, "
        f"mean error {mae:.2g} nats",
    )


def _judge_golden(e: Evidence, top1: float, mae: float) -> tuple[str, str]:
    least, most = number(e.param("golden_min_top1")), number(e.param("golden_max_mae"))
    if least is None or most is None:
        return "unknown", "not judged (its thresholds are unknown)"
    return ("ok", "passed") if top1 >= least and mae <= most else ("fail", "FAILED")


def _time(e: Evidence) -> Line:
    minutes, whole = e.minutes(), e.number("pipeline.minutes")
    if not minutes:
        return Line("Time", "unknown", "unknown: no stage has been timed")
    minutes = {key: value for key, value in minutes.items() if key in e.completed()} or minutes
    total = sum(minutes.values())
    longest = max(minutes, key=lambda key: minutes[key])
    title = next(stage.title for stage in STAGES if stage.number == longest)
    text = f"{total:.1f} minutes of work in {len(minutes)} stage{'s' if len(minutes) > 1 else ''}"
    if e.failed is not None:
        text += " that did not fail"
    else:
        text += f", {whole:.1f} minutes for the run as a whole" if whole is not None else ", the run as a whole was not timed"
    share = f" ({percent(minutes[longest] / total)})" if total > 0 else ""
    return Line("Time", "ok", f"{text}; the longest is {longest} {title} with {minutes[longest]:.1f}{share}")


def _memory(e: Evidence) -> Line:
    peak = e.number("memory.peak_gb")
    on = machine_sentence(e)
    if peak is None:
        return Line("Memory", "unknown", f"unknown: the peak was not recorded; machine: {on}")
    return Line("Memory", "ok", f"At most {peak:.1f} GB in all processes together, on {on}")


def machine_sentence(e: Evidence) -> str:
    """The machine in a few words."""
    cpu = e.value("machine.cpu") or e.value("machine.cpu_model")
    cores, memory = e.number("machine.cores"), e.number("machine.memory_gb")
    gpu = e.value("machine.gpu")
    parts = [
        "an unknown processor" if cpu is None else short(cpu, 80),
        "an unknown number of cores" if cores is None else f"{cores:.0f} core{'s' if cores != 1 else ''}",
        "unknown memory" if memory is None else f"{memory:.0f} GB",
        *([] if gpu is None else [short(gpu, 80)]),
    ]
    return "an unknown machine" if cpu is None and cores is None and memory is None and gpu is None else ", ".join(parts)


def summary_lines(run_root: Path) -> list[str]:
    """The summary as exactly ten lines of plain text, for the terminal.

    Raises:
        KitError: there is no such run folder.
    """
    return [short(f"{line.label}: {line.text}", LONGEST) for line in summary(Evidence(run_root))]


# ---- checks that the report makes itself


def checks(e: Evidence, stage: str) -> list[Check]:
    """What can be held against the facts of a stage, with the verdict; an unknown fact gives an unknown verdict."""
    made = {"02": _check_config, "03": _check_extraction, "04": _check_vocab, "05": _check_training, "06": _check_evaluation}.get(
        stage
    )
    return made(e) if made else []


def check_steps(e: Evidence) -> list[Check]:
    """Whether each step was built on what now lies in the folders it names: the stale-map failure."""
    digests = {name: value_digest([m.get("inputs"), m.get("outputs")]) for name, m in e.manifests.items()}
    found = []
    for name, manifest in e.manifests.items():
        for key, value in mapping(manifest.get("inputs")).items():
            if key in digests and key != name and isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value):
                found.append((name, key, value == digests[key]))
    told = "Step {} was made from another {} than the one now in the run"
    wrong = [Check("fail", told.format(name, key)) for name, key, same in found if not same]
    if wrong or not found:
        return wrong
    return [Check("ok", f"Every step was made from what the run now holds ({len(found)} links between steps compared)")]


def _check_config(e: Evidence) -> list[Check]:
    """The checks that stage 02 made, and kept."""
    kept = rows(mapping(e.json("config/validation.json")).get("checks"))
    if not kept:
        return [Check("unknown", "Whether speculators and vLLM accept the drafter's config is unknown")]
    found = []
    for check in kept:
        state = str(check.get("state"))
        seen = f": {short(check.get('found'))}" if check.get("found") else ""
        wanted = f" (wanted {short(check.get('wanted'))})" if check.get("wanted") and state != "ok" else ""
        found.append(Check(state if state in SYMBOLS else "unknown", f"{short(check.get('name'))}{seen}{wanted}"))
    return found


def _check_extraction(e: Evidence) -> list[Check]:
    top1, mae = e.number("extraction.golden_top1"), e.number("extraction.golden_mae")
    if top1 is None or mae is None:
        return [Check("unknown", "The golden check has not been made: whether the right layer was recorded is unknown")]
    state, judged = _judge_golden(e, top1, mae)
    least, most = percent(number(e.param("golden_min_top1"))), fmt(e.param("golden_max_mae"))
    found = [
        Check(
            state,
            f"Golden check {judged}: top-1 agreement {percent(top1)} (wanted at least {least}), mean error {mae:.2g} nats "
            f"(wanted at most {most})",
        )
    ]
    found += [*_check_layers(e), *_check_origin(e)]
    slots = rows(e.golden().get("slots"))
    errors = [number(slot.get("mae")) for slot in slots]
    others = [error for error in errors[:-1] if error is not None]
    if others and errors[-1] is not None:
        apart = min(others) > 10 * errors[-1]
        found.append(
            Check(
                "ok" if apart else "warn",
                f"It tells layers apart: the best other slot is off by {min(others):.2g} nats, the right one by {errors[-1]:.2g}"
                if apart
                else "Another slot scores nearly as well as the right one: the check proves little for this target",
            )
        )
    return found


def _check_layers(e: Evidence) -> list[Check]:
    """Each slot against transformers, and each row's states against its own answer."""
    error, most, own = (
        e.number("extraction.layer_error"),
        number(e.param("golden_max_layer_error")),
        e.number("extraction.own_answers"),
    )
    found = []
    if error is None:
        found.append(
            Check(
                "unknown", "The auxiliary layers were not held against transformers: whether they are the right ones is unknown"
            )
        )
    elif most is not None:
        text = f"Every slot against transformers: largest relative error {error:.2g} (wanted at most {fmt(most)})"
        found.append(Check("ok" if error <= most else "fail", text))
    if own is not None:
        found.append(Check("ok", f"The states of every row predict its own answer: {percent(own)} of the positions looked at"))
    return found


OFF_POLICY_COST = (
    "For scale: on SmolLM2 a drafter trained on answers with 44 % of such tokens had an acceptance length of 1.62, one trained "
    "on the target's own greedy answers 1.68 (benchmarks/off_policy.py)"
)


def _check_origin(e: Evidence) -> list[Check]:
    """Whether the target wrote the answers, and what it costs where it did not."""
    label = mapping(e.json("data/origin.json"))
    if not label:
        return [Check("unknown", "Who wrote the answers was not recorded")]
    made = f"chat template {short(label.get('chat_template'))}, thinking {short(label.get('thinking'))}"
    if label.get("on_policy") is True:
        sampling = mapping(label.get("sampling"))
        at = short(label.get("commit") or label.get("revision"))
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        how = ", ".join(f"{name} {fmt(sampling[name])}" for name in names if name in sampling)
        who = f"{short(label.get('model'))} at {at}, {how or 'sampling unknown'},"
        return [Check("ok", f"On-policy: {who} wrote the answers; {made}")]
    share = e.number("data.off_policy_tokens")
    text = (
        f"Off-policy: the answers are the source's own ({made}). Tokens that the target would most likely not write: "
        f"{percent(share)}. On its own text the drafter accepts less than its accuracy in training says; how much less is not "
        f"measured here: only a second run with data_regenerate: true shows. {OFF_POLICY_COST}"
    )
    return [Check("warn", text)]


def _check_vocab(e: Evidence) -> list[Check]:
    share, least = e.number("vocab.heldout_coverage"), number(e.param("vocab_min_coverage"))
    if share is None:
        return [Check("unknown", "The coverage of the held-out answers is unknown")]
    text = f"The draft vocabulary covers {percent(share)} of the held-out answers' tokens"
    if least is None:
        return [Check("unknown", f"{text}; what was wanted is unknown")]
    return [Check("ok" if share >= least else "fail", f"{text} (wanted at least {percent(least)})")]


def _check_training(e: Evidence) -> list[Check]:
    log = e.log()
    if not log:
        return [Check("unknown", "There is no training log")]
    losses = [row.get("loss") for row in log if row.get("split") == "train"]
    bad = sum(number(loss) is None for loss in losses)
    found = [
        Check("fail", f"{bad} of {len(losses)} logged losses are not finite numbers")
        if bad
        else Check("ok", f"All {len(losses)} logged training losses are finite")
    ]
    held_out = [loss for row in log if row.get("split") == "val" and (loss := number(row.get("loss"))) is not None]
    if not held_out:
        found.append(Check("unknown", "No held-out loss was logged"))
    elif held_out[-1] > min(held_out):
        at = held_out.index(min(held_out)) + 1
        found.append(
            Check(
                "warn",
                f"The held-out loss was lowest at validation {at} of {len(held_out)} ({min(held_out):.3f}) and ended at "
                f"{held_out[-1]:.3f}: more epochs of the same data would not help",
            )
        )
    elif len(held_out) > 1:
        found.append(Check("ok", f"The held-out loss fell to its end, from {held_out[0]:.3f} to {held_out[-1]:.3f}"))
    return found


def _check_evaluation(e: Evidence) -> list[Check]:
    al, shares, found = e.number("acceptance.al"), e.positions(), []
    if al is None:
        found.append(Check("unknown", "The acceptance length has not been measured"))
    elif al < 1.05:
        found.append(
            Check(
                "fail",
                "The acceptance length is near 1: the drafter hardly ever helps. Silent causes: shifted auxiliary layers, an "
                "unshifted loss mask, weights lost in the export, another RoPE base, a stale vocabulary map",
            )
        )
    if al is not None and shares:
        gap = abs(al - 1 - sum(shares))
        found.append(
            Check(
                "ok" if gap <= 0.01 + 0.005 * len(shares) else "warn",
                f"The acceptance length is 1 plus the positions' shares: {al:.3f} against {1 + sum(shares):.3f}",
            )
        )
    simulated = e.number("train.simulated_al")
    if al is None or simulated is None:
        found.append(Check("unknown", "Training's simulated acceptance length cannot be compared with the served one"))
    else:
        agree = al - 1 >= 0.6 * (simulated - 1)
        told = f"training simulated an acceptance length of {simulated:.2f}, serving gave {al:.2f}"
        found.append(
            Check("ok", f"Trainer and server agree: {told}")
            if agree
            else Check(
                "warn", f"Serving accepts far less than training promised: {told}. Look at layers, shift, vocabulary map, weights"
            )
        )
    share = e.number("lossless.share")
    if share is None:
        found.append(Check("unknown", "Whether speculation is lossless has not been measured"))
    else:
        found.append(Check("ok" if share >= 1 else "fail", f"Outputs with speculation equal those without: {percent(share)}"))
    contestants = mapping(mapping(e.json("eval/speed.json")).get("contestants"))
    repeats = [len(numbers(mapping(entry).get("tokens_per_s"))) for entry in contestants.values()]
    if repeats:
        enough = min(repeats) >= 3
        found.append(
            Check(
                "ok" if enough else "warn",
                f"Repeats of each speed measurement: {min(repeats)}" + ("" if enough else ", too few for a narrow interval"),
            )
        )
    else:
        found.append(Check("unknown", "Speed has not been measured"))
    return found
