r"""Reward models (Bradley-Terry, as in Ouyang et al. 2022, arXiv:2203.02155 Eq. 1): one number that
rates an answer.

    torchrun --nproc_per_node 8 rm.py --config configs/qwen3_1.7b_rm.yaml

A language model with a scalar head reads its reward r at the last token of prompt and completion.
It learns from pairs of a chosen and a rejected completion, with rewards r_c and r_r:

    L = mean_pairs [ -log sigma(r_c - r_r - margin) + center_coefficient (r_c + r_r)^2 ]      loss()

tools/relabel.py measures how often the trained model agrees with pairs, and swaps the others.

Differences from the paper: pairs instead of rankings of several answers; a penalty centres the
rewards, not a shift. See docs/rm.md.

Shapes: N sequences (W = N / 2 pairs) and T packed tokens of a micro-batch, P pairs of a batch on
this rank, B on all ranks; sequences 2i and 2i + 1 are chosen and rejected of pair i."""

import math
from itertools import chain
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import logsigmoid

from common.config.flags import MAX_FLOAT, NotNegative, Positive
from common.config.groups import LengthArgs, PrefixArgs, TrainArgs
from common.config.parse import parse
from common.evaluate.offline import held_out_accuracy
from common.metrics.meter import Meter, evaluate_sets
from common.model.hub import fit_max_length, resolve_model
from common.model.policy import ScalarModel, load_scalar_model
from common.packs.packing import PackedBatch, pack_groups, positions_of_rank
from common.packs.sample import Sample, at_end
from common.parallel import distributed
from common.text.columns import PAIR_COLUMNS
from common.text.encode import Encoder
from common.text.load import Samples, load_samples
from common.text.pairs import encode_pair
from common.text.tokenizer import load_tokenizer
from common.train.optim import adamw, optimizer_step
from common.train.overview import describe_data, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

SHOW = ("loss", "rewards/accuracies", "eval_rewards/accuracies", "time/step")
CURVES = (
    "loss",
    "eval_loss",
    "rewards/accuracies",
    "eval_rewards/accuracies",
    "rewards/margins",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/std",
    "grad_norm",
)


def loss(
    chosen_W: Tensor,
    rejected_W: Tensor,
    margin_W: Tensor | float = 0.0,
    center_coefficient: float = 0.0,
) -> Tensor:
    """Return the loss of each pair, [W]: the negative log-likelihood of the preference
    (arXiv:2203.02155 Eq. 1), the margin of arXiv:2307.09288 Eq. 2, the centring penalty of
    arXiv:2312.09244."""
    centring_W = center_coefficient * (chosen_W + rejected_W).square()
    return -logsigmoid(chosen_W - rejected_W - margin_W) + centring_W


@dataclass
class Args(PrefixArgs, LengthArgs, TrainArgs):
    SEQUENCES_TOGETHER: ClassVar[int] = 2
    output_dir: str = ""
    """write all files of the run to this folder: args.yaml, metrics.jsonl, curves.png,
    checkpoints/, hf/; default: runs/ and the name of the script"""
    batch_size: Positive[int] = 64
    """train on this many pairs per optimizer step, over all ranks"""
    center_coefficient: NotNegative[float] = 0.0
    """add (rc + rr)^2 to the loss with this weight, rc and rr the rewards of chosen and rejected,
    which keeps the mean reward near 0 (arXiv:2312.09244)"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"


def encode_row(row: dict, columns: tuple[str, ...], encoder: Encoder, args: Args) -> list[Sample]:
    """Tokenise a row: [chosen, rejected]. If any row has a `margin`, all need one."""
    if "margin" in columns:
        row = row | dict(margin=margin_of(row))
    return encode_pair(encoder, row, columns)


def at_ends(samples: Samples) -> Samples:
    """Return the samples with the last token of each as the only trained one."""
    return Samples(samples.rows, lambda i: [at_end(x.ids, x.row) for x in samples[i]])


def margin_of(row: dict) -> float:
    """Return the margin of a row: a number, also as the text of a .csv file."""
    margin = row.get("margin")
    try:
        number = math.nan if isinstance(margin, bool) else float(margin)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= MAX_FLOAT:
        raise ValueError(
            f"{row['_source']}: column margin is {margin!r:.50}, expected a finite number"
        )
    return number


def gather_margins(pairs: list[list[Sample]]) -> Tensor:
    """Return the margin of each sample of all ranks' pairs, [B, 2]; 0 without the column.
    Collective."""
    margins_P2 = torch.tensor([[sample.row.get("margin", 0.0) for sample in p] for p in pairs])
    return distributed.gather_rows(margins_P2, positions_of_rank(len(pairs)))


def forward(
    model: ScalarModel,
    mb: PackedBatch,
    margins_B2: Tensor,
    args: Args,
    meter: Meter,
    prefix: str = "",
) -> Tensor:
    """Return the loss of a micro-batch, summed over its pairs; log it with the rewards."""
    rewards_N = mb.sequence_sums(model(mb))  # the last token of each sequence alone is trained
    margin_W = mb.select(margins_B2)[0::2]
    chosen_W = rewards_N[0::2]
    rejected_W = rewards_N[1::2]
    num_pairs = len(margin_W)
    loss_W = loss(chosen_W, rejected_W, margin_W, args.center_coefficient)
    if num_pairs:  # a rank may have no pair of this pack
        logged = {
            "loss": loss_W,
            "rewards/chosen": chosen_W,
            "rewards/rejected": rejected_W,
            "rewards/margins": chosen_W - rejected_W,
            "rewards/accuracies": chosen_W > rejected_W,
        }
        meter.samples(mb, logged, loss_W / args.batch_size, prefix)
        rewards_N = torch.cat([chosen_W, rejected_W]).detach()
        meter.mean(f"{prefix}rewards/mean", rewards_N.sum(), 2 * num_pairs)
        meter.std(f"{prefix}rewards/std", rewards_N)
        meter.min(f"{prefix}rewards/min", rewards_N.min())
        meter.max(f"{prefix}rewards/max", rewards_N.max())
    return loss_W.sum()


@torch.no_grad()
def evaluate(
    model: ScalarModel, samples: Samples, indices: list[int], args: Args, device: torch.device
) -> Meter:
    """Measure this rank's part of the held-out pairs with these indices."""
    meter = Meter()
    own = [samples[i] for i in distributed.items_of_rank(indices)]
    margins_B2 = gather_margins(own).to(device)
    for mb in pack_groups(own, args.pack_tokens, device, model.share_prefix):
        forward(model, mb, margins_B2, args, meter, "eval_")
    return meter


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed)
    earlier_flags = prepare_output_dir(args, args.dry_run)  # {} unless a run is resumed

    # ---- data: pairs of token ids with masks, and their order ----
    path = resolve_model(args.model, weights=not args.dry_run)
    args = fit_max_length(args, path, earlier_flags)
    tokenizer = load_tokenizer(path, args)
    (samples, counts), (eval_samples, eval_counts) = load_samples(
        encode_row, PAIR_COLUMNS, tokenizer, args, optional=("margin",)
    )
    samples, eval_samples = at_ends(samples), at_ends(eval_samples)
    if args.dry_run:
        counts += eval_counts
        return dry_run(args, None, tokenizer, samples, eval_samples, counts=counts, value_path=path)
    begin_run(args, samples.rows, eval_samples.rows)
    order = samples.order(args)

    # ---- model: FSDP2 shards of float32 masters, with a scalar head ----
    model = load_scalar_model(path, args, device)
    optimizer = adamw(model, args)

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, samples)
    run = Run(args, model, optimizer, tokenizer, total_steps, order=order, show=SHOW, curves=CURVES)
    run.message(*describe_data(args, samples, eval_samples, counts, eval_counts))
    for name, sample in zip(("chosen", "rejected"), samples[0], strict=True):
        run.message(f"{name}: {tokenizer.decode(sample.ids[:-1])}")
    meter = run.meter

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. batch: this rank's part; which rows are drawn does not depend on the ranks ----
        batch = [samples[i] for i in distributed.items_of_rank(order.draw(args.batch_size))]
        micro_batches = pack_groups(batch, args.pack_tokens, device, model.share_prefix)
        margins_B2 = gather_margins(batch).to(device)

        # ---- 2. update: one optimizer step; the loss is a mean over the pairs of all ranks ----
        with meter.time("train"):
            batch_loss = torch.zeros((), device=device)
            for mb in micro_batches:
                mb_loss = forward(model, mb, margins_B2, args, meter) / args.batch_size
                # FSDP averages gradients over ranks; undo that.
                (mb_loss * world_size).backward()
                batch_loss += mb_loss.detach()
            lr = run.learning_rate(step)
            grad_norm = optimizer_step(model, optimizer, lr, args.max_grad_norm, batch_loss)

        # ---- 3. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*batch), grad_norm=grad_norm, lr=lr)
        if run.evaluates(step + 1):
            metrics |= evaluate_sets(
                eval_samples, lambda indices: evaluate(model, eval_samples, indices, args, device)
            )
        run.log(step + 1, metrics)

    run.end(held_out_accuracy(run.latest, eval_samples))
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
