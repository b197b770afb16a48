"""KTO: learning from single completions that were good or bad (Ethayarajh et al. 2024,
arXiv:2402.01306).

    torchrun --nproc_per_node 8 kto.py --config configs/qwen3_1.7b_kto.yaml

As in dpo.py, the implicit reward of a completion y is beta l(y), where l is its log-ratio to a
frozen reference. Without pairs it is compared with a baseline beta z0:

    l(y) = log(pi(y) / pi_ref(y))                   pi(y): product over the tokens of the completion
    z0   = max(0, mean of l over mismatches)                                           kl_baseline()
    L    = mean_y [ loss of y ]
           desirable y:    desirable_weight (1 - sigma(beta (l(y) - z0)))                     loss()
           undesirable y:  undesirable_weight (1 - sigma(beta (z0 - l(y))))                   loss()

A mismatch is a prompt with the completion of another prompt. `--loss apo_zero_unpaired`
(arXiv:2408.06266) sets z0 to 0 and needs no mismatches. Differences from the paper: z0 is a mean
over the global batch, and the log-probs of the reference are computed once, before training.
See docs/kto.md.

Shapes: N completions and T packed tokens of a micro-batch, B completions of a batch on all ranks,
P of them on this rank, R rows of the data. Per-token tensors are aligned with the *targets*: x_T[t]
describes the prediction of targets_T[t]."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import NamesModels, Positive
from common.config.groups import TINY_OFFLINE, LengthArgs, OfflineArgs
from common.config.parse import parse
from common.evaluate.offline import held_out_accuracy, start_generation
from common.metrics.meter import Meter, evaluate_sets
from common.model.hub import fit_max_length, resolve_model
from common.model.policy import Policy, load_policy
from common.model.scoring import reference_logps
from common.packs.packing import PackedBatch, pack, positions_of_rank
from common.packs.sample import Sample
from common.parallel import distributed
from common.text.columns import KTO_COLUMNS, PAIR_COLUMNS
from common.text.encode import Encoder, truncate
from common.text.load import Samples, load_samples
from common.text.messages import messages_field
from common.text.pairs import encode_pair
from common.text.tokenizer import load_tokenizer
from common.train.optim import adamw, optimizer_step
from common.train.overview import describe_data, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

SHOW = ("eval/solved", "loss", "rewards/accuracies", "eval_rewards/accuracies", "time/step")
CURVES = (
    "eval/solved",
    "loss",
    "eval_loss",
    "rewards/accuracies",
    "eval_rewards/accuracies",
    "kl",
    "rewards/chosen",
    "rewards/rejected",
    "grad_norm",
)


def loss(
    log_ratio_N: Tensor, desirable_N: Tensor, baseline: Tensor | float, args: "Args"
) -> Tensor:
    """Return the loss of each completion, [N]. `desirable_N`: bool; `baseline`: z0, without
    gradient; 0 for apo_zero_unpaired."""
    margin_N = args.beta * (log_ratio_N - baseline)
    sign_N = torch.where(desirable_N, 1.0, -1.0).to(margin_N)
    weight_N = torch.where(desirable_N, args.desirable_weight, args.undesirable_weight).to(margin_N)
    return weight_N * (-sign_N * margin_N).sigmoid()


@dataclass
class Args(LengthArgs, OfflineArgs):
    TINY_DEFAULTS: ClassVar[dict] = TINY_OFFLINE | dict(lr=5e-4, beta=1.0)
    model: str = "tiny-sft"
    batch_size: Positive[int] = 64
    """train on this many completions per optimizer step, over all ranks"""
    lr: Positive[float] = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """compare the log-ratio of a completion. kto: with a baseline; apo_zero_unpaired: with 0, which
    saves the forward pass of the baseline"""
    beta: Positive[float] = 0.1
    """scale the implicit rewards by this: larger values keep the policy closer to the reference"""
    desirable_weight: Positive[float] = 1.0
    """weigh completions whose label is true by this"""
    undesirable_weight: Positive[float] = 1.0
    """weigh completions whose label is false by this"""
    reference_model: NamesModels[str | None] = None
    """compare with this reference model: Hugging Face id or folder; default: the starting model"""


def encode_row(row: dict, columns: tuple[str, ...], encoder: Encoder, args: Args) -> list[Sample]:
    """Tokenise a row: [completion] or, for a pair, [desirable, undesirable]; their rows have a bool
    `label`. The completion of a conversation is its last turn."""
    if "chosen" in columns:
        pair = encode_pair(encoder, row, columns)
        return [replace(s, row=s.row | dict(label=i == 0)) for i, s in enumerate(pair)]
    row = row | dict(label=label_of(row))
    if "prompt" not in columns:
        messages = messages_field(row, columns[0])
        if not messages or messages[-1]["role"] != "assistant":
            problem = f"column {columns[0]} must end with a turn of the assistant"
            raise ValueError(f"{row['_source']}: {problem}")
        row = row | dict(prompt=messages[:-1], completion=messages[-1:])
    return [encoder.completion(row, "prompt", "completion")]


def label_of(row: dict) -> bool:
    """Return the label of a row: true or false, also as 1 or 0 and as the text of a .csv file."""
    label = str(row.get("label")).lower()
    if label not in ("true", "1", "1.0", "false", "0", "0.0"):
        raise ValueError(
            f"{row['_source']}: column label is {row.get('label')!r:.50}, expected true or false"
        )
    return label in ("true", "1", "1.0")


def with_mismatches(samples: Samples, args: Args, others: Samples | None = None) -> Samples:
    """Return [completion, mismatch] for each completion; for pairs, all desirable ones come first.
    A mismatch joins the prompt and the completion of the next row that has another prompt: its
    log-ratio estimates the KL. Rows with a single prompt take a completion of `others`.
    apo_zero_unpaired needs none: [completion] alone."""
    per_row = len(samples[0]) if samples else 1  # a pair has two
    next_R: list[int | None] = []  # the next row with another prompt
    another = None  # a completion for rows with a single prompt
    if samples and args.loss == "kto":
        count = len(samples) * per_row
        prompts = (completion_of(samples, i % count).prompt_ids for i in range(count + 1))
        next_R = next_differing([x != y for x, y in pairwise(prompts)])
        if next_R[0] is None:
            another = completion_elsewhere(completion_of(samples, 0).prompt_ids, others or ())
    make = partial(with_mismatch, samples, args, next_R, another)
    return Samples(samples.rows * per_row, make)


def completion_of(samples: Samples, i: int) -> Sample:
    """Return completion i of all; for pairs, all desirable ones come first."""
    return samples[i % len(samples)][i // len(samples)]


def completion_elsewhere(prompt_ids: list[int], others: Iterable[list[Sample]]) -> Sample:
    """Return a completion of another prompt. Raises `ValueError` if there is none."""
    for sample, *_ in others:
        if sample.prompt_ids != prompt_ids:
            return sample
    problem = "all rows have one prompt, the baseline needs completions of others"
    raise ValueError(f"--loss kto: {problem}; --loss apo_zero_unpaired has none")


def with_mismatch(
    samples: Samples, args: Args, next_R: list[int | None], another: Sample | None, i: int
) -> list[Sample]:
    """Return completion i and its mismatch, see `with_mismatches`."""
    sample = completion_of(samples, i)
    if args.loss == "apo_zero_unpaired":
        return [sample]
    other = another or completion_of(samples, next_R[i])
    mask = bytes(sample.prompt_length) + other.loss_mask[other.prompt_length :]
    mismatch = Sample(sample.prompt_ids + other.completion_ids, mask)
    return [sample, truncate(mismatch, args.max_length)]


def next_differing(differs: list[bool]) -> list[int | None]:
    """Walk around a circle of items. Return for each the number of the next item that differs from
    it; None if all are equal. `differs[i]`: whether item i and the one after it differ."""
    count = len(differs)
    found: list[int | None] = [None] * count
    for i in reversed(range(2 * count)):  # twice around: the last items look at the first
        found[i % count] = (i + 1) % count if differs[i % count] else found[(i + 1) % count]
    return found


def describe_labels(samples: Samples, args: Args) -> list[str]:
    """Return a line if the labels are so unbalanced that their weights should differ: desirable
    weight x rows should be 1 to 4/3 times undesirable weight x rows (arXiv:2402.01306). Raises
    `ValueError` unless the rows have both labels."""
    labels = [sample.row["label"] for sample in chain.from_iterable(samples)]
    desirable = labels.count(True)
    undesirable = labels.count(False)
    if not (desirable and undesirable):
        raise ValueError(
            f"kto.py needs rows with label true and rows with label false; all are {labels[0]}"
        )
    ratio = args.desirable_weight * desirable / (args.undesirable_weight * undesirable)
    if 0.8 < ratio < 1.6:  # near enough
        return []
    flag = "desirable_weight" if ratio < 1 else "undesirable_weight"
    weight = getattr(args, flag) * max(ratio, 1 / ratio)
    return [
        f"labels: {desirable} true, {undesirable} false; --{flag} {weight:.3g} would balance them "
        f"(weight x count of true / false is {ratio:.3g}, arXiv:2402.01306 recommends 1 to 1.33)"
    ]


@torch.no_grad()
def kl_baseline(policy: Policy, micro_batches: list[PackedBatch], ref_logps_B: Tensor) -> Tensor:
    """Return z0, the mean log-ratio of the mismatches of all ranks, not below 0. Collective."""
    sums = [
        (mb.sequence_sums(policy(mb)[0]) - mb.select(ref_logps_B)).sum() for mb in micro_batches
    ]
    mean = distributed.all_sum(sum(sums)) / len(ref_logps_B)
    return mean.clamp(min=0).to(micro_batches[0].loss_mask_T.device)


def forward(
    policy: Policy, mb: PackedBatch, ref_logps_B: Tensor, desirable_B: Tensor, baseline: Tensor,
    args: Args, meter: Meter, prefix: str = "",
) -> Tensor:  # fmt: skip
    """Return the loss of a micro-batch, summed over its completions; log it with implicit rewards
    and log-probs."""
    logprobs_T, entropy_T, *_ = policy(mb)
    logps_N = mb.sequence_sums(logprobs_T)
    desirable_N = mb.select(desirable_B).bool()
    log_ratio_N = logps_N - mb.select(ref_logps_B)
    loss_N = loss(log_ratio_N, desirable_N, baseline, args)
    rewards_N = args.beta * log_ratio_N.detach()
    logged = {"log_ratio": log_ratio_N}
    logged["rewards/accuracies"] = (rewards_N > args.beta * baseline) == desirable_N
    if args.loss == "kto":
        logged["kl"] = baseline.expand(mb.num_samples)
    logged["loss"] = loss_N
    meter.samples(mb, logged, loss_N / args.batch_size, prefix)
    for name, side_N in (("chosen", desirable_N), ("rejected", ~desirable_N)):
        meter.masked_mean(f"{prefix}rewards/{name}", rewards_N, side_N)
        meter.masked_mean(f"{prefix}logps/{name}", logps_N, side_N)
    meter.tokens(mb, {f"{prefix}entropy": entropy_T})
    return loss_N.sum()


def pack_with_baseline(
    policy: Policy, groups: list[list[Sample]], ref_logps_B2: Tensor, args: Args,
    device: torch.device,
) -> tuple[list[PackedBatch], Tensor, Tensor]:  # fmt: skip
    """Pack completions of `with_mismatches`. Return the micro-batches; which completions
    of all ranks are desirable, [B]; and the baseline z0. Collective."""
    completions = pack([group[0] for group in groups], args.pack_tokens, device)
    desirable_P = torch.tensor([completion.row["label"] for completion, *_ in groups])
    desirable_B = distributed.gather_rows(desirable_P, positions_of_rank(len(groups))).to(device)
    if args.loss == "apo_zero_unpaired":
        return completions, desirable_B, torch.zeros((), device=device)
    mismatches = pack([group[1] for group in groups], args.pack_tokens, device)
    return completions, desirable_B, kl_baseline(policy, mismatches, ref_logps_B2[:, 1])


@torch.no_grad()
def evaluate(
    policy: Policy, groups: Samples, indices: list[int], ref_logps_B2: Tensor, args: Args,
    device: torch.device,
) -> Meter:  # fmt: skip
    """Measure this rank's part of the held-out completions with these indices."""
    meter = Meter()
    own = [groups[i] for i in distributed.items_of_rank(indices)]
    ref_logps_B2 = ref_logps_B2[indices].to(device)
    micro_batches, desirable_B, baseline = pack_with_baseline(
        policy, own, ref_logps_B2, args, device
    )
    for mb in micro_batches:
        forward(policy, mb, ref_logps_B2[:, 0], desirable_B, baseline, args, meter, "eval_")
    return meter


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed)
    earlier_flags = prepare_output_dir(args, args.dry_run)  # {} unless a run is resumed

    # ---- data: completions with a mismatch each, as token ids with masks, and their order ----
    path = resolve_model(args.model, weights=not args.dry_run)
    args = fit_max_length(args, path, earlier_flags)
    tokenizer = load_tokenizer(path, args)
    (samples, counts), (eval_samples, eval_counts) = load_samples(
        encode_row, (*KTO_COLUMNS, *PAIR_COLUMNS), tokenizer, args
    )
    groups = with_mismatches(samples, args)
    eval_groups = with_mismatches(eval_samples, args, others=samples)
    balance = describe_labels(samples, args)
    if args.dry_run:
        return dry_run(args, path, tokenizer, groups, eval_groups, counts=counts + eval_counts)
    begin_run(args, samples.rows, eval_samples.rows)
    order = groups.order(args)

    # ---- models: FSDP2 shards; the frozen reference scores the data before training ----
    policy = load_policy(path, args, device)
    ref_logps_R2, eval_ref_logps_R2 = reference_logps(
        policy, (groups, eval_groups), tokenizer, args, device
    )  # all R rows
    optimizer = adamw(policy, args)
    # --eval_generate: answers held-out prompts; None without it
    generation = start_generation(policy, args, tokenizer, eval_samples.all_rows)

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, groups)
    run = Run(
        args, policy, optimizer, tokenizer, total_steps, order=order, show=SHOW, curves=CURVES
    )
    run.message(*describe_data(args, groups, eval_groups, counts, eval_counts), *balance)
    run.logger.preview(groups[0][0], tokenizer)
    meter = run.meter
    if generation and run.first_step == 0:
        run.log(0, generation.evaluate(0))

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. batch: this rank's part; which rows are drawn does not depend on the ranks ----
        drawn = order.draw(args.batch_size)
        batch = [groups[i] for i in distributed.items_of_rank(drawn)]
        ref_logps_B2 = ref_logps_R2[drawn].to(device)
        with meter.time("logprobs"):
            micro_batches, desirable_B, baseline = pack_with_baseline(
                policy, batch, ref_logps_B2, args, device
            )
        ref_logps_B = ref_logps_B2[:, 0]

        # ---- 2. update: one optimizer step; the loss is a mean over all ranks' completions ----
        with meter.time("train"):
            batch_loss = torch.zeros((), device=device)
            for mb in micro_batches:
                mb_loss = forward(policy, mb, ref_logps_B, desirable_B, baseline, args, meter)
                mb_loss = mb_loss / args.batch_size
                # FSDP averages gradients over ranks; undo that.
                (mb_loss * world_size).backward()
                batch_loss += mb_loss.detach()
            lr = run.learning_rate(step)
            grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, batch_loss)

        # ---- 3. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce([completion for completion, *_ in batch], grad_norm=grad_norm, lr=lr)
        if run.evaluates(step + 1):
            metrics |= evaluate_sets(
                eval_groups,
                lambda indices: evaluate(
                    policy, eval_groups, indices, eval_ref_logps_R2, args, device
                ),
            )
            if generation:
                metrics |= generation.evaluate(step + 1)
        run.log(step + 1, metrics)

    run.end(held_out_accuracy(run.latest, eval_groups))
    if generation:
        generation.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
