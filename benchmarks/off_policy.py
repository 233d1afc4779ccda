"""How far the answers that a drafter learnt from are from what the target would write, and what that costs. Not a test.

    eagle3kit run params/local.yaml -p run_name sampled -p data_temperature 1 --to 05_train
    python benchmarks/off_policy.py params/local.yaml runs/local runs/sampled [--rows 100]

Every supervised token of the training rows is rated by the target's own last hidden states as the run has them: mean negative
log-likelihood in nats, and the share that is the target's most likely token. Then each run's drafter drafts offline on the
held-out answers of the first run: the acceptance length that serving them would give. Further runs may have the answers of
another author (`data_regenerate: false`) or, as above, of the target's own at a temperature that it is not served at.
"""

import argparse
from pathlib import Path

from eagle3kit import data, evaluate, golden, hidden_states, hub, materialize, simulate, target, train
from eagle3kit.params import load_file
from eagle3kit.rundir import Run, read_json


def main() -> None:
    """Rate the answers of each run, draft with its drafter, and print one line a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="parameters that the runs share, such as params/local.yaml")
    parser.add_argument(
        "runs", type=Path, nargs="+", help="finished up to notebook 05; the first one's held-out rows are drafted"
    )
    parser.add_argument("--rows", type=int, default=None, help="training rows to rate, the first ones; all of them if not given")
    options = parser.parse_args()
    opened = [
        Run(load_file(options.file, {"runs_dir": str(root.resolve().parent), "run_name": root.name}), data.MADE_BY)
        for root in options.runs
    ]
    params = opened[0].params
    model, _ = materialize.materialize(params)
    about, _ = target.describe(params.target_model, params.target_revision)
    head, norm = hidden_states.head_and_norm(hub.local_folder(model, params.target_revision))
    for run in opened:
        training = [index for index, row in enumerate(data.load_rows(run)[0]) if row.split == "train"][: options.rows]
        rated = golden.score_rows(run, training, params.data_seq_length, head, norm, about.rms_norm_eps)
        hits, positions, nll = (sum(column) for column in zip(*rated.values(), strict=True))
        label = read_json(run.path("data", "origin.json"), data.MADE_BY)
        who = f"on-policy, {label['sampling']}" if label["on_policy"] else "off-policy"
        print(f"{run.name}, {who}: {positions} tokens, {nll / positions:.4f} nats a token, {hits / positions:.2%} most likely")
        walks = list(simulate.heldout(opened[0], train.drafter_folder(run), [params.eval_k])[params.eval_k].values())
        low, high = evaluate.interval(walks)
        print(f"  its drafter: AL {evaluate.length(walks):.4f} ({low:.3f} to {high:.3f}) at k = {params.eval_k}, simulated")


if __name__ == "__main__":
    main()
