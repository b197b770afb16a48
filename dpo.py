r"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and the objectives that
followed it.

    torchrun --nproc_per_node 8 dpo.py --config configs/qwen3_1.7b_dpo.yaml

The policy learns from pairs: a prompt with a chosen and a rejected completion, y_c and y_r. The
log-ratio to a frozen reference is an implicit reward, and the loss makes it larger for the chosen
completion:

    r(y) = beta log(pi(y) / pi_ref(y))              pi(y): product over the tokens of the completion
    L    = mean_pairs [ -log sigma(r(y_c) - r(y_r)) ]                                         loss()

sigma is the logistic function. Its core in 114 lines: course/lessons/nano_dpo.py.

`--loss` offers 14 other objectives, and adds up those that you name: their equations are in
common/objectives/preference.py, a table in docs/dpo.md. kto.py learns from single completions.

Differences from the papers: the log-probs of the reference are computed once, before training, so
that training holds one model in memory; chosen and rejected share one packed stream.

Shapes: N sequences (W = N / 2 pairs) and T packed tokens of a micro-batch, B pairs of a batch on
all ranks, R rows of the data; sequences 2i and 2i + 1 are chosen and rejected of pair i. Per-token
tensors are aligned with the *targets*: x_T[t] describes the prediction of targets_T[t]."""

from itertools import chain
from typing import Annotated, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import logsigmoid

from common.config.flags import NamesModels, Needs, Positive
from common.config.groups import TINY_OFFLINE, ImageArgs, LengthArgs, OfflineArgs, PrefixArgs
from common.config.parse import parse
from common.evaluate.offline import held_out_accuracy, start_generation
from common.metrics.meter import Meter, evaluate_sets
from common.model.hub import fit_max_length, resolve_model
from common.model.policy import Policy, load_policy
from common.model.scoring import reference_logps
from common.objectives import preference
from common.objectives.preference import REFERENCE_FREE, Pairs, PreferenceArgs, f_slope
from common.packs.packing import PackedBatch, pack_groups
from common.packs.sample import Sample
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

SHOW = ("eval/solved", "loss", "rewards/margins", "eval_rewards/accuracies", "time/step")
CURVES = (
    "eval/solved",
    "loss",
    "eval_loss",
    "rewards/accuracies",
    "eval_rewards/accuracies",
    "rewards/margins",
    "rewards/chosen",
    "rewards/rejected",
    "grad_norm",
)

# ---- the objective ----


def loss(pairs: Pairs, args: "Args") -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each pair, [W] float64, and its terms by name: the objectives of `--loss`,
    which are added up with `--loss_weights` (as in MPO, arXiv:2411.10442)."""
    terms = {}
    for name in args.loss:
        if name == "sigmoid":  # DPO Eq. 7; with label smoothing cDPO
            # lc, lr: log-ratios to the reference; f_slope is the identity without --f_divergence
            kind = args.f_divergence
            z = args.beta * (f_slope(pairs.lc, kind) - f_slope(pairs.lr, kind))
            e = args.label_smoothing
            terms[name] = -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)
        else:
            terms[name] = preference.preference_loss(name, pairs, **args.loss_settings)
    weights = args.loss_weights or [1.0] * len(terms)
    weighted = [weight * term for weight, term in zip(weights, terms.values(), strict=True)]
    return sum(weighted, torch.zeros(())), terms


@dataclass
class Args(ImageArgs, PreferenceArgs, PrefixArgs, LengthArgs, OfflineArgs):
    SEQUENCES_TOGETHER: ClassVar[int] = 2
    TINY_DEFAULTS: ClassVar[dict] = TINY_OFFLINE | dict(lr=5e-4, sft_weight=1.0)
    model: str = "tiny-sft"
    batch_size: Positive[int] = 64
    """train on this many pairs per optimizer step, over all ranks"""
    lr: Positive[float] = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    reference_model: Annotated[NamesModels[str | None], Needs(loss=preference.REFERENCED)] = None
    """compare with this reference model: Hugging Face id or folder; default: the starting model"""


def encode_row(row: dict, columns: tuple[str, ...], encoder: Encoder, args: Args) -> list[Sample]:
    """Tokenise a row: [chosen, rejected]."""
    return encode_pair(encoder, row, columns)


def make_pairs(mb: PackedBatch, logprobs_T: Tensor, ref_logps_B2: Tensor) -> Pairs:
    """Return the pairs of a micro-batch: log-probs of completions by policy and reference, and
    lengths."""
    logps_N = mb.sequence_sums(logprobs_T)
    ref_logps_N = mb.select(ref_logps_B2)
    lengths_N = mb.sequence_sums(torch.ones_like(logprobs_T))
    return Pairs(*sides(logps_N), *sides(ref_logps_N), *sides(lengths_N))


def sides(x_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of the chosen and of the rejected completions, [W] each."""
    return x_N[0::2], x_N[1::2]


def forward(
    policy: Policy,
    mb: PackedBatch,
    ref_logps_B2: Tensor,
    args: Args,
    meter: Meter,
    prefix: str = "",
) -> Tensor:
    """Return the loss of a micro-batch, summed over its pairs; log it with implicit rewards and
    log-probs."""
    logprobs_T, entropy_T, *_ = policy(mb)
    pairs = make_pairs(mb, logprobs_T, ref_logps_B2)
    loss_W, terms = loss(pairs, args)
    nll_W = -pairs.mean_pc
    loss_W = loss_W + args.sft_weight * nll_W

    chosen_W, rejected_W = preference.implicit_rewards(args.loss[0], pairs, args.beta)
    logged = {
        "loss": loss_W,
        "rewards/chosen": chosen_W,
        "rewards/rejected": rejected_W,
        "rewards/margins": chosen_W - rejected_W,
        "rewards/accuracies": chosen_W > rejected_W,
        "logps/chosen": pairs.chosen_logps,
        "logps/rejected": pairs.rejected_logps,
    }
    if len(terms) > 1 or args.sft_weight:
        logged |= {f"loss/{name}": term_W for name, term_W in terms.items()}
    if args.sft_weight:
        logged["loss/sft"] = nll_W
    meter.samples(mb, logged, loss_W / args.batch_size, prefix)
    meter.tokens(mb, {f"{prefix}entropy": entropy_T})
    return loss_W.sum()


@torch.no_grad()
def evaluate(
    policy: Policy,
    samples: Samples,
    indices: list[int],
    ref_logps_B2: Tensor,
    args: Args,
    device: torch.device,
) -> Meter:
    """Measure this rank's part of the held-out pairs with these indices."""
    meter = Meter()
    own = [samples[i] for i in distributed.items_of_rank(indices)]
    for mb in pack_groups(own, args.pack_tokens, device, policy.share_prefix):
        forward(policy, mb, ref_logps_B2.to(device), args, meter, "eval_")
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
        encode_row, PAIR_COLUMNS, tokenizer, args, image_args=args
    )
    needs_reference = not set(args.loss) <= REFERENCE_FREE
    if args.dry_run:
        counts += eval_counts
        return dry_run(args, path, tokenizer, samples, eval_samples, counts=counts, image_args=args)
    begin_run(args, samples.rows, eval_samples.rows)
    order = samples.order(args)

    # ---- models: FSDP2 shards; the frozen reference scores the pairs before training ----
    policy = load_policy(path, args, device, image_args=args)
    ref_logps_R2, eval_ref_logps_R2 = reference_logps(
        policy, (samples, eval_samples), tokenizer, args, device, needs_reference
    )  # all R rows
    optimizer = adamw(policy, args)
    # --eval_generate: answers held-out prompts; None without it
    generation = start_generation(policy, args, tokenizer, eval_samples.all_rows)

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, samples)
    run = Run(
        args, policy, optimizer, tokenizer, total_steps, order=order, show=SHOW, curves=CURVES
    )
    run.message(*describe_data(args, samples, eval_samples, counts, eval_counts))
    for sample in samples[0]:
        run.logger.preview(sample, tokenizer)
    meter = run.meter
    if generation and run.first_step == 0:
        run.log(0, generation.evaluate(0))

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. batch: this rank's part; which rows are drawn does not depend on the ranks ----
        drawn = order.draw(args.batch_size)
        batch = [samples[i] for i in distributed.items_of_rank(drawn)]
        micro_batches = pack_groups(batch, args.pack_tokens, device, policy.share_prefix)
        ref_logps_B2 = ref_logps_R2[drawn].to(device)

        # ---- 2. update: one optimizer step; the loss is a mean over the pairs of all ranks ----
        with meter.time("train"):
            batch_loss = torch.zeros((), device=device)
            for mb in micro_batches:
                mb_loss = forward(policy, mb, ref_logps_B2, args, meter) / args.batch_size
                # FSDP averages gradients over ranks; undo that.
                (mb_loss * world_size).backward()
                batch_loss += mb_loss.detach()
            lr = run.learning_rate(step)
            grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, batch_loss)

        # ---- 3. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*batch), grad_norm=grad_norm, lr=lr)
        if run.evaluates(step + 1):
            metrics |= evaluate_sets(
                eval_samples,
                lambda indices: evaluate(
                    policy, eval_samples, indices, eval_ref_logps_R2[indices], args, device
                ),
            )
            if generation:
                metrics |= generation.evaluate(step + 1)
        run.log(step + 1, metrics)

    run.end(held_out_accuracy(run.latest, eval_samples))
    if generation:
        generation.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
