"""Compute the time that ranks wait for the slowest, with and without common/parallel/placement.py,
as a Markdown table.

    python bench/balance.py

With FSDP every micro-batch waits for the rank with the most work. So this fraction of a step is
lost:

    1 - (cost of all ranks) / (ranks x sum over micro-batches of the highest cost of a rank)

Lengths are drawn at random. Chat: lognormal, median 450, at most 8,192. GSM8K: 8 completions per
prompt, about 270 tokens with the prompt. Chains of thought: 8 per prompt, median 4,000, at most
16,384; prompt and sample contribute equally to the variation. "Owned": each rank packs its own
samples, first-fit decreasing. "Shared": `assign`, as in the scripts. The cost of a sequence is that
of Qwen3-8B; `ATTENTION` is 2e-5 here.

The second table has groups of completions whose prompt is computed once: the time of the slowest
ranks without shared prefixes, over that with them. "Whole": every group on one rank. "Parts":
`place`, as in the scripts. Completions are lognormal. P tokens of a prompt, C of a completion in
the mean, G completions."""

import math
import random
import sys
import time
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.parallel import placement
from common.parallel.placement import GroupShape, assign, place

BATCHES, RANKS = 20, (8, 64)
placement.ATTENTION = 2e-5


def chat(draw: random.Random, ranks: int, per_rank: int) -> list[int]:
    return [
        min(8192, round(math.exp(draw.gauss(math.log(450), 0.95)))) for _ in range(ranks * per_rank)
    ]


def completions(
    draw: random.Random, prompts: int, median: float, of_prompt: float, of_sample: float, most: int
):
    centers = [draw.gauss(math.log(median), of_prompt) for _ in range(prompts)]
    return [
        min(most, 100 + round(math.exp(draw.gauss(center, of_sample))))
        for center in centers
        for _ in range(8)
    ]


def gsm8k(draw: random.Random, ranks: int, per_rank: int) -> list[int]:
    return completions(draw, ranks * per_rank // 8, 170, 0.25, 0.35, 1024)


def reasoning(draw: random.Random, ranks: int, per_rank: int) -> list[int]:
    return completions(draw, ranks * per_rank // 8, 4000, 0.6, 0.5, 16384)


CASES = {
    "chat, 16 sequences a rank": (chat, 16, 8192),
    "GSM8K, 8 prompts a rank": (gsm8k, 64, 8192),
    "GSM8K, 1 prompt a rank": (gsm8k, 8, 8192),
    "chains of thought, 8 prompts a rank": (reasoning, 64, 16384),
    "chains of thought, 1 prompt a rank": (reasoning, 8, 16384),
}


def first_fit(lengths: list[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for n in sorted(lengths, reverse=True):
        fits = next((kept for kept in bins if sum(kept) + n <= max_tokens), None)
        bins.append([n]) if fits is None else fits.append(n)
    return bins


def lost(rows: list[list[list[int]]]) -> float:
    """Return the lost fraction. `rows` has, per micro-batch and rank, the lengths that this rank
    computes."""
    costs = [[sum(GroupShape([n], [0]).cost for n in lengths) for lengths in row] for row in rows]
    return 1 - sum(map(sum, costs)) / (len(rows[0]) * sum(map(max, costs)))


def owned(lengths: list[int], ranks: int, per_rank: int, max_tokens: int) -> list[list[list[int]]]:
    ranks_bins = [
        first_fit(lengths[r * per_rank : (r + 1) * per_rank], max_tokens) for r in range(ranks)
    ]
    return [
        [bins[m] if m < len(bins) else [] for bins in ranks_bins]
        for m in range(max(map(len, ranks_bins)))
    ]


def shared(lengths: list[int], ranks: int, max_tokens: int) -> list[list[list[int]]]:
    rows = assign({(0, i): GroupShape([n], [0]) for i, n in enumerate(lengths)}, ranks, max_tokens)
    return [[[lengths[i] for _, i in keys] for keys in row] for row in rows]


GROUPS = [  # P, C, G, prompts, ranks, pack_tokens
    (300, 300, 8, 64, 8, 16384),
    (300, 300, 8, 16, 8, 16384),
    (300, 300, 8, 8, 8, 16384),
    (512, 128, 8, 64, 8, 8192),
    (512, 128, 8, 512, 64, 8192),
    (512, 1500, 8, 128, 8, 16384),
    (512, 4000, 16, 64, 8, 32768),
    (512, 4000, 16, 64, 32, 32768),
    (2000, 200, 8, 8, 8, 8192),
    (2000, 200, 8, 64, 64, 8192),
    (300, 150, 2, 256, 8, 8192),
]


def print_groups() -> None:
    print(
        "\n| P, C, G | prompts, ranks, pack_tokens | computed tokens | whole | parts |\n"
        "|---|---|---|---|---|"
    )
    for P, C, G, prompts, ranks, max_tokens in GROUPS:
        draw, times, tokens = random.Random(0), [], []
        for _ in range(BATCHES // 4):
            drawn = [[] for _ in range(ranks)]
            for i in range(prompts):
                lengths = [
                    P + min(4 * C, max(2, round(draw.lognormvariate(math.log(C) - 0.18, 0.6))))
                    for _ in range(G)
                ]
                drawn[i % ranks].append(GroupShape(lengths, [0, *[P - 1] * (G - 1)]))
            apart = [[GroupShape(group.lengths, [0] * G) for group in groups] for groups in drawn]
            placed = [place(apart, ranks, max_tokens, together=False)]
            fits = all(group.size <= max_tokens for groups in drawn for group in groups)
            placed += [place(drawn, ranks, max_tokens, together=True)] if fits else []
            placed.append(place(drawn, ranks, max_tokens, together=False))
            times.append([placement.cost(*each) for each in placed])
            tokens.append([sum(group.tokens for group in groups.values()) for groups, _ in placed])
        before, *after = (mean(column) for column in zip(*times, strict=True))
        whole, parts = (["do not fit"] if len(after) == 1 else []) + [
            f"{before / x:.2f}x" for x in after
        ]
        less = mean(row[0] / row[-1] for row in tokens)
        print(
            f"| {P}, {C}, {G} | {prompts}, {ranks}, "
            f"{max_tokens:,} | {less:.2f}x fewer | {whole} | {parts} |"
        )
    start = time.perf_counter()
    place(drawn_groups(8192, 8), 64, 8192, together=False)
    print(
        "placing 8,192 completions of 1,024 prompts on 64 ranks: "
        f"{time.perf_counter() - start:.2f} s"
    )


def drawn_groups(sequences: int, G: int) -> list[list[GroupShape]]:
    draw = random.Random(0)
    lengths = [[300 + draw.randrange(50, 600) for _ in range(G)] for _ in range(sequences // G)]
    groups = [GroupShape(of_group, [0, *[299] * (G - 1)]) for of_group in lengths]
    return [groups[rank::64] for rank in range(64)]


def main() -> None:
    print("| time lost | " + " | ".join(f"{ranks} ranks: owned | shared" for ranks in RANKS) + " |")
    print("|---" * (1 + 2 * len(RANKS)) + "|")
    for name, (lengths_of, per_rank, max_tokens) in CASES.items():
        cells = []
        for ranks in RANKS:
            batches = [
                lengths_of(random.Random(batch), ranks, per_rank) for batch in range(BATCHES)
            ]
            cells.append(
                mean(lost(owned(lengths, ranks, per_rank, max_tokens)) for lengths in batches)
            )
            cells.append(mean(lost(shared(lengths, ranks, max_tokens)) for lengths in batches))
        print(f"| {name} | " + " | ".join(f"{cell:.0%}" for cell in cells) + " |")
    for name in (
        "chat, 16 sequences a rank",
        "GSM8K, 8 prompts a rank",
        "chains of thought, 8 prompts a rank",
    ):
        lengths_of, _, max_tokens = CASES[name]
        lengths = lengths_of(random.Random(0), 64, 128)
        start = time.perf_counter()
        old = first_fit(lengths, max_tokens)
        middle = time.perf_counter()
        new = shared(lengths, 1, max_tokens)
        seconds = f"{middle - start:.2f} s first fit, {time.perf_counter() - middle:.2f} s best fit"
        print(
            f"packing {len(lengths):,} sequences ({name}): {seconds}; "
            f"{len(old)} and {len(new)} packs"
        )
    print_groups()


if __name__ == "__main__":
    main()
