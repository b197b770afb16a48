"""Who did what when in a run, from its ranks' own clocks: RUN_DIR/timeline.png.

    python bench/timeline.py runs/grpo
    python bench/timeline.py runs/grpo --first 30 --seconds 5

One row for every rank. Ranks that train: completions waited for or sampled, rewards, log-probs, training, the hand-over
of weights; ranks that only generate: sampling, waiting for prompts, taking weights. Also the seconds of each.
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

COLOURS = dict(sample="C0", rollout="C0", wait="lightgrey", reward="C1", logprobs="C4", train="C2", sync="black",
               weights="black", save="C5")  # fmt: skip
WITHIN = {"step"}  # spans that others make up


def read(run: Path) -> dict[int, list[dict]]:
    """Every rank's spans, in order. Exits with a line if there are none."""
    files = sorted((run / "timeline").glob("rank_*.jsonl"), key=lambda file: int(file.stem.removeprefix("rank_")))
    if not files:
        sys.exit(f"{run}: no timeline/rank_*.jsonl, so no run")
    lines = {int(file.stem.removeprefix("rank_")): file.read_text().splitlines() for file in files}
    return {rank: [json.loads(line) for line in of_rank] for rank, of_rank in lines.items()}


def between(spans: list[dict], began: float, ended: float) -> list[dict]:
    """What of them is in a stretch of time."""
    cut = [span | dict(began=max(span["began"], began), ended=min(span["ended"], ended)) for span in spans]
    return [span for span in cut if span["ended"] > span["began"] and span["what"] not in WITHIN]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="output_dir of a run")
    parser.add_argument("--first", type=float, help="seconds after the first step began; default: the middle of it")
    parser.add_argument("--seconds", type=float, default=5.0, help="how much of the run is drawn")
    args = parser.parse_args()
    ranks = read(args.run)
    steps = [span for spans in ranks.values() for span in spans if span["what"] == "step"]
    if not steps:
        sys.exit(f"{args.run}: no step has ended")
    start, end = min(span["began"] for span in steps), max(span["ended"] for span in steps)
    first = start + ((end - start - args.seconds) / 2 if args.first is None else args.first)
    first = max(start, first)

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(11, 1.2 + 0.45 * len(ranks)), layout="constrained")
    for row, (rank, spans) in enumerate(ranks.items()):
        seconds: dict[str, float] = defaultdict(float)
        for span in between(spans, start, end):
            seconds[span["what"]] += span["ended"] - span["began"]
        parts = ", ".join(f"{what} {100 * spent / (end - start):.0f}%" for what, spent in seconds.items())
        print(f"rank {rank}, {end - start:.1f} s: {parts}")
        for span in between(spans, first, first + args.seconds):
            colour = COLOURS.get(span["what"], "C7")
            axis.barh(row, span["ended"] - span["began"], left=span["began"] - first, color=colour, height=0.8)
    used = {span["what"] for spans in ranks.values() for span in between(spans, first, first + args.seconds)}
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS.get(what, "C7")) for what in sorted(used)]
    axis.legend(handles, sorted(used), ncols=len(used), loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)
    axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axis.invert_yaxis()
    axis.set_xlim(0, args.seconds)
    axis.set_xlabel(f"seconds, from {first - start:.1f} s after the first step began")
    figure.savefig(args.run / "timeline.png", dpi=110)
    print(f"{args.run / 'timeline.png'}")


if __name__ == "__main__":
    main()
