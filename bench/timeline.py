"""Draw the activity of every rank of a run, by the ranks' own clocks: RUN_DIR/timeline.png.

    python bench/timeline.py runs/grpo
    python bench/timeline.py runs/grpo --first 30 --seconds 5

One row per rank. Training ranks: waiting or sampling, rewards, log-probs, training, weight
transfer. Rollout ranks: sampling, waiting for prompts, loading weights. The program also prints the
seconds of each activity."""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

COLOURS = dict(
    sample="C0", rollout="lightsteelblue", wait="lightgrey", reward="C1", logprobs="C4", train="C2",
    sync="black", weights="black", save="C5",
)  # fmt: skip
WITHIN = {"step"}  # spans that consist of other spans


def read(run: Path) -> dict[int, list[dict]]:
    """Return every rank's spans, in order. Exit with a line if there are none."""
    files = sorted(
        (run / "timeline").glob("rank_*.jsonl"),
        key=lambda file: int(file.stem.removeprefix("rank_")),
    )
    if not files:
        sys.exit(f"{run}: no timeline/rank_*.jsonl, so no run")
    lines = {int(file.stem.removeprefix("rank_")): file.read_text().splitlines() for file in files}
    return {rank: [json.loads(line) for line in of_rank] for rank, of_rank in lines.items()}


def between(spans: list[dict], began: float, ended: float) -> list[dict]:
    """Return the parts of the spans within an interval."""
    cut = [
        span | dict(began=max(span["began"], began), ended=min(span["ended"], ended))
        for span in spans
    ]
    return [span for span in cut if span["ended"] > span["began"] and span["what"] not in WITHIN]


def draw(axis, ranks: dict[int, list[dict]], began: float, seconds: float) -> None:
    """Draw an interval, one row per rank."""
    for row, spans in enumerate(ranks.values()):
        for span in between(spans, began, began + seconds):
            colour = COLOURS.get(span["what"], "C7")
            axis.barh(
                row,
                span["ended"] - span["began"],
                left=span["began"] - began,
                color=colour,
                height=0.8,
            )
    axis.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axis.invert_yaxis()
    axis.set_xlim(0, seconds)


def legend(figure) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=what) for what, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=8)


def duration(ranks: dict[int, list[dict]]) -> tuple[float, float]:
    """Return the start of the first step and the end of the last one. Exit with a line if no step
    has ended."""
    steps = [span for spans in ranks.values() for span in spans if span["what"] == "step"]
    if not steps:
        sys.exit("no step has ended")
    return min(span["began"] for span in steps), max(span["ended"] for span in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="output_dir of a run")
    parser.add_argument(
        "--first",
        type=float,
        help="start in seconds after the first step; default: middle of the run",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the interval")
    args = parser.parse_args()
    ranks = read(args.run)
    start, end = duration(ranks)
    first = max(0.0, (end - start - args.seconds) / 2) if args.first is None else args.first
    for rank, spans in ranks.items():
        spent: dict[str, float] = defaultdict(float)
        for span in between(spans, start, end):
            spent[span["what"]] += span["ended"] - span["began"]
        parts = ", ".join(
            f"{what} {100 * seconds / (end - start):.0f}%" for what, seconds in spent.items()
        )
        print(f"rank {rank}, {end - start:.1f} s: {parts}")

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(11, max(2, 1 + 0.4 * len(ranks))), layout="constrained")
    draw(axis, ranks, start + first, args.seconds)
    axis.set_xlabel(f"seconds, from {first:.1f} s after the first step began")
    legend(figure)
    figure.savefig(args.run / "timeline.png", dpi=110)
    print(args.run / "timeline.png")


if __name__ == "__main__":
    main()
