"""How far the answers that a drafter learns from are from what the target would write. Not a test.

    python benchmarks/off_policy.py params/local.yaml runs/local [runs/other ...] [--rows 100]

Every supervised token of the training rows, rated by the target's own last hidden states as the run has them: mean negative
log-likelihood in nats, and the share that is the target's most likely token. A second run of the same prompts with
`data_regenerate: false` is the off-policy variant. What that costs in acceptance is the difference of the two runs'
`acceptance.al` (eagle3kit compare), after training both; these figures do not tell it.
"""

import argparse
from pathlib import Path

from eagle3kit import data, golden, hidden_states, hub, materialize, target
from eagle3kit.params import load_file
from eagle3kit.rundir import Run, read_json


def main() -> None:
    """Rate the answers of each run and print one line a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="parameters that the runs share, such as params/local.yaml")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=None, help="training rows to rate, the first ones; all of them if not given")
    options = parser.parse_args()
    for root in options.runs:
        params = load_file(options.file, {"runs_dir": str(root.resolve().parent), "run_name": root.name})
        run = Run(params, data.MADE_BY)
        model, _ = materialize.materialize(params)
        about, _ = target.describe(params.target_model, params.target_revision)
        head, norm = hidden_states.head_and_norm(hub.local_folder(model, params.target_revision))
        training = [index for index, row in enumerate(data.load_rows(run)[0]) if row.split == "train"][: options.rows]
        rated = golden.score_rows(run, training, params.data_seq_length, head, norm, about.rms_norm_eps)
        hits, positions, nll = (sum(column) for column in zip(*rated.values(), strict=True))
        who = "on-policy" if read_json(run.path("data", "origin.json"), data.MADE_BY)["on_policy"] else "off-policy"
        print(f"{root.name}, {who}: {positions} tokens, {nll / positions:.4f} nats a token, {hits / positions:.2%} most likely")


if __name__ == "__main__":
    main()
