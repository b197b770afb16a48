r"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and the objectives that
followed it.

    torchrun --nproc_per_node 8 dpo.py --model Qwen/Qwen3-1.7B \
        --dataset trl-lib/ultrafeedback_binarized

The policy learns from pairs: a prompt with a chosen and a rejected completion, y_c and y_r. The
log-ratio to a frozen reference is an implicit reward, and the loss makes it larger for the chosen
completion:

    r(y) = beta log(pi(y) / pi_ref(y))              pi(y): product over the tokens of the completion
    L    = mean_pairs [ -log sigma(r(y_c) - r(y_r)) ]                                         loss()

sigma is the logistic function.

`--loss` adds up 17 other objectives: common/objectives/preference.py has their equations,
docs/dpo.md a table. `--reference_sync` moves the reference (TR-DPO). kto.py learns from single
completions.

Differences from the papers: the log-probs of the reference are computed once, before training, so
that training holds one model in memory; chosen and rejected share one packed stream.

Shapes: N pairs (2N sequences) and T packed tokens of a micro-batch; sequences 2i and 2i + 1 are
chosen and rejected of pair i. Per-token tensors are aligned with the *targets*: x_T[t] describes
the prediction of targets_T[t]."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import logsigmoid

from common.config.flags import Fraction, NotNegative, Positive, PositiveFraction
from common.config.groups import TINY_GENERATE, TINY_TRAINING, TrainArgs
from common.config.parse import parse
from common.config.preference_flags import PreferenceArgs
from common.config.rules import require_default
from common.config.training import GenerateArgs, ImageArgs, PrefixArgs
from common.data.encode import Encoder
from common.data.load import Samples, load_samples
from common.data.packing import PackedBatch, pack_groups
from common.data.pairs import encode_pair, encode_pairs
from common.data.rows import PAIR_COLUMNS
from common.data.sample import Sample
from common.evaluate.generation import Generation
from common.evaluate.held_out import held_out_accuracy, signs_of_unlearning
from common.metrics.meter import Meter, evaluate_sets
from common.model.hub import fit_max_length, load_tokenizer, resolve_model
from common.model.policy import Policy, load_policy, move_reference
from common.model.reference import completion_logps, reference_logps, reference_or_logps
from common.objectives import preference
from common.objectives.preference import OVER_BATCH, PER_TOKEN, REFERENCE_FREE, Pairs
from common.parallel import distributed
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
    """Return the loss of each pair, [N] float64, and its terms by name: the objectives of `--loss`,
    which are added up with `--loss_weights` (as in MPO, arXiv:2411.10442) and times the weight of
    the pair."""
    terms = {}
    for name in args.loss:
        if name == "sigmoid" and args.f_divergence == "reverse_kl":
            # DPO Eq. 7; with label smoothing cDPO. lc, lr: log-ratios to the reference
            z = args.beta * (pairs.lc - pairs.lr)
            e = args.label_smoothing
            terms[name] = -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)
        else:
            terms[name] = preference.preference_loss(name, pairs, **args.loss_settings)
    weights = args.loss_weights or [1.0] * len(terms)
    total_N = sum(weight * term for weight, term in zip(weights, terms.values(), strict=True))
    return pairs.weights * total_N, terms


@dataclass
class Args(ImageArgs, PreferenceArgs, GenerateArgs, PrefixArgs, TrainArgs):
    MOVED: ClassVar[dict] = {"loss": {"kto": "python kto.py"}}
    TINY_DEFAULTS: ClassVar[dict] = TINY_TRAINING | TINY_GENERATE | dict(lr=5e-4, sft_weight=1.0)
    model: str = "tiny-sft"
    batch_size: Positive[int] = 64
    """pairs per optimizer step, over all ranks"""
    max_length: Positive[int] | None = None
    """maximum tokens of prompt and completion together; default: 2048, or less if context or
    pack_tokens is smaller"""
    overlong: Literal["drop", "truncate", "error"] = "drop"
    """treatment of pairs with a longer completion. drop: leave them out; truncate: cut its end off
    (both are counted); error: end the run"""
    identical_pairs: Literal["drop", "keep", "error"] = "drop"
    """treatment of pairs whose chosen and rejected are the same. drop: leave them out (counted);
    error: end the run"""
    lr: Positive[float] = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    reference_model: str | None = None
    """Hugging Face id or folder of the reference model; default: the starting model"""
    reference_logprobs: Literal["stored", "online"] = "stored"
    """log-probs of the reference model. stored: computed once before training; online: computed in
    every step by the model, which stays in memory"""
    reference_sync: NotNegative[int] = 0
    """steps between moves of the reference model towards the policy (TR-DPO, arXiv:2404.09656); 0:
    none"""
    reference_rate: PositiveFraction = 1.0
    """with --reference_sync: rate a of a move, reference <- (1 - a) reference + a policy"""
    ld_alpha: Fraction = 1.0
    """weight of a completion's tokens beyond the length of the other one (LD-DPO,
    arXiv:2409.06411)"""
    wpo: bool = False
    """weight each pair by its probability under the current policy (WPO, arXiv:2406.11827)"""

    def __post_init__(self) -> None:
        names = " ".join(self.loss)
        chosen = set(self.loss)
        if chosen <= REFERENCE_FREE:
            unread = ("reference_model", "reference_logprobs", "reference_sync")
            require_default(self, unread, f"with --loss {names}")
        if not self.reference_sync:
            require_default(self, ("reference_rate",), "with --reference_sync 0")
        elif self.reference_logprobs == "stored" or self.reference_model or self.lora_rank:
            needs = "--reference_logprobs online, --lora_rank 0 and no --reference_model"
            raise ValueError(f"--reference_sync {self.reference_sync} needs {needs}")
        if self.wpo and "aot_unpaired" in chosen:
            raise ValueError("--wpo weights pairs, which --loss aot_unpaired takes apart; omit one")
        if self.ld_alpha < 1 and chosen & (REFERENCE_FREE | PER_TOKEN):
            raise ValueError(
                f"--ld_alpha {self.ld_alpha} needs losses of summed log-ratios, not --loss {names}"
            )
        if self.max_length and 2 * (self.max_length - 1) > self.pack_capacity:
            raise ValueError(
                f"--max_length {self.max_length}: two sequences must fit in {self.pack_flags}"
            )


def encode_rows(
    rows: list[dict], columns: tuple[str, ...], encoder: Encoder, args: Args
) -> tuple[list[list[Sample]], Counter]:
    """Tokenize rows into [chosen, rejected] pairs of at most `--max_length` tokens, their tokens
    weighted by `--ld_alpha`; count the rows that were dropped or changed."""
    pairs, counts = encode_pairs(rows, lambda row: encode_pair(encoder, row, columns), args)
    if args.ld_alpha == 1:
        return pairs, counts
    shared = [
        min(sum(sample.loss_mask) for sample in pair) for pair in pairs
    ]  # length of the shorter completion

    def weights(sample: Sample, shared: int) -> list[float]:
        return [1.0 if n <= shared else args.ld_alpha for n in accumulate(sample.loss_mask)]

    weighted = [
        [replace(s, weights=weights(s, n)) for s in pair]
        for pair, n in zip(pairs, shared, strict=True)
    ]
    return weighted, counts


def make_pairs(
    mb: PackedBatch, logprobs_T: Tensor, collision_T: Tensor, ref_logps_B2: Tensor, wpo: bool
) -> Pairs:
    """Return the pairs of a micro-batch: log-probs of completions by policy and reference, lengths,
    weights."""
    logps_2N = completion_logps(mb, logprobs_T)
    ref_logps_2N = mb.select(ref_logps_B2)
    lengths_2N = mb.sequence_sums(torch.ones_like(logprobs_T))
    weights_N = torch.ones_like(logps_2N[0::2])
    if wpo:
        adjusted_2N = mb.sequence_sums(logprobs_T.detach() - collision_T) / lengths_2N
        weights_N = preference.wpo_weights(adjusted_2N[0::2] + adjusted_2N[1::2])
    return Pairs(*sides(logps_2N), *sides(ref_logps_2N), *sides(lengths_2N), weights=weights_N)


def sides(x_2N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of the chosen and of the rejected completions, [N] each."""
    return x_2N[0::2], x_2N[1::2]


@torch.no_grad()
def gather_pairs(
    policy: Policy, micro_batches: list[PackedBatch], ref_logps_B2: Tensor, args: Args
) -> tuple[Pairs | None, list[slice]]:
    """Return, for objectives that sort all pairs of a batch, the pairs of all ranks and the slice
    of each micro-batch among them. For other objectives the pairs are None. Collective."""
    if not OVER_BATCH & set(args.loss):
        return None, [slice(None)] * len(micro_batches)
    columns = []  # of each micro-batch
    for mb in micro_batches:
        logprobs_T, _, _, collision_T = policy(mb)
        columns.append(make_pairs(mb, logprobs_T, collision_T, ref_logps_B2, args.wpo).tensors())
    device = columns[0][0].device
    on_rank = [torch.cat(tensors).cpu() for tensors in zip(*columns, strict=True)]
    ranks = distributed.gather_objects(on_rank)
    batch_pairs = Pairs(*(torch.cat(tensors).to(device) for tensors in zip(*ranks, strict=True)))
    first = sum(len(tensors[0]) for tensors in ranks[: distributed.rank()])
    ends = accumulate((len(tensors[0]) for tensors in columns), initial=first)
    return batch_pairs, [slice(*bounds) for bounds in pairwise(ends)]


def insert(pairs: Pairs, batch_pairs: Pairs | None, own_slice: slice) -> Pairs:
    """Return the pairs of all ranks, where `pairs`, which have gradients, replace those in
    `own_slice`; without pairs of all ranks, return `pairs`."""
    if batch_pairs is None:
        return pairs
    columns = zip(batch_pairs.tensors(), pairs.tensors(), strict=True)
    before = slice(own_slice.start)
    after = slice(own_slice.stop, None)
    return Pairs(*(torch.cat([x_B[before], x_N, x_B[after]]) for x_B, x_N in columns))


def forward(
    policy: Policy, mb: PackedBatch, ref_logps_B2: Tensor, batch_pairs: Pairs | None,
    own_slice: slice, args: Args, meter: Meter, prefix: str = "",
) -> Tensor:  # fmt: skip
    """Return the loss of a micro-batch, summed over its pairs; log it with implicit rewards and
    log-probs. `batch_pairs` and `own_slice`: see `gather_pairs`."""
    # collision: log of the sum of squared probabilities, for --wpo
    logprobs_T, entropy_T, _, collision_T = policy(mb)
    pairs = make_pairs(mb, logprobs_T, collision_T, ref_logps_B2, args.wpo)
    loss_B, terms = loss(insert(pairs, batch_pairs, own_slice), args)
    loss_N = loss_B[own_slice]  # of the pairs of this micro-batch
    total = loss_B.sum()
    if batch_pairs is not None:
        # Sorting gives these pairs a gradient in the terms of other pairs too. So the gradient is
        # that of all terms, but the value is that of the terms of these pairs.
        total = total + (loss_N.sum() - total).detach()
    nll_N = -mb.sequence_sums(logprobs_T)[0::2]
    if args.sft_length_normalize:
        nll_N = nll_N / pairs.chosen_lengths
    total = total + args.sft_weight * nll_N.sum()

    chosen_N, rejected_N = preference.implicit_rewards(
        pairs,
        per_token=preference.rewards_per_token(args.loss[0], args.length_normalize),
        referenced=args.loss[0] not in REFERENCE_FREE,
        beta=args.beta,
    )
    logged = {
        "loss": loss_N + args.sft_weight * nll_N,
        "rewards/chosen": chosen_N,
        "rewards/rejected": rejected_N,
        "rewards/margins": chosen_N - rejected_N,
        "rewards/accuracies": chosen_N > rejected_N,
        "logps/chosen": pairs.chosen_logps,
        "logps/rejected": pairs.rejected_logps,
    }
    if len(terms) > 1 or args.sft_weight:
        logged |= {f"loss/{name}": term_B[own_slice] for name, term_B in terms.items()}
    if args.sft_weight:
        logged["loss/sft"] = nll_N
    if args.wpo:
        logged["wpo/weight"] = pairs.weights
    meter.rows(mb, logged, logged["loss"] / args.batch_size, prefix)
    meter.tokens(mb, {f"{prefix}entropy": entropy_T})
    return total


@torch.no_grad()
def evaluate(
    policy: Policy, reference: Policy | None, pairs: Samples, indices: list[int],
    stored_logps: Tensor, args: Args, device: torch.device,
) -> Meter:  # fmt: skip
    """Measure this rank's share of the held-out pairs with these indices."""
    meter = Meter()
    share = [pairs[i] for i in distributed.share_of(indices)]
    micro_batches = pack_groups(share, args.pack_tokens, device, args.share_prefix)
    ref_logps_B2 = reference_logps(reference, micro_batches, stored_logps[indices])
    batch_pairs, slices = gather_pairs(policy, micro_batches, ref_logps_B2, args)
    for mb, own_slice in zip(micro_batches, slices, strict=True):
        forward(policy, mb, ref_logps_B2, batch_pairs, own_slice, args, meter, "eval_")
    return meter


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, rank, world_size = distributed.setup(args.seed)
    prepare_output_dir(args)

    # ---- data: pairs of token ids with masks, and their order ----
    path = resolve_model(args.model, weights=not args.dry_run, rope_factor=args.rope_factor)
    fit_max_length(args, path, room=args.pack_capacity // 2)
    tokenizer = load_tokenizer(path, args)
    (pairs, counts), (eval_pairs, eval_counts) = load_samples(
        encode_rows, PAIR_COLUMNS, tokenizer, args
    )
    needs_reference = not set(args.loss) <= REFERENCE_FREE
    if args.dry_run:  # ends the process
        is_resident = needs_reference and args.reference_logprobs == "online"
        frozen = [args.reference_model or path] if is_resident else []
        all_counts = counts + eval_counts
        dry_run(args, path, tokenizer, pairs, eval_pairs, frozen=frozen, counts=all_counts,
                moving=args.reference_sync > 0)  # fmt: skip
    begin_run(args)
    order = pairs.order(args)

    # ---- models: FSDP2 shards; the frozen reference scores the pairs before training ----
    policy = load_policy(path, args, device)
    # Either the model or its stored log-probs: the other is None, or zeros.
    reference, (stored_logps, eval_stored_logps) = reference_or_logps(
        policy, (pairs, eval_pairs), tokenizer, args, device, needs_reference
    )
    optimizer = adamw(policy, args)
    generation = Generation(policy, args, tokenizer)  # --eval_generate: answers held-out prompts

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, pairs)
    run = Run(
        args, policy, optimizer, tokenizer, total_steps, order=order, show=SHOW, curves=CURVES,
        moving=reference if args.reference_sync else None,
    )  # fmt: skip
    run.message(*describe_data(args, pairs, eval_pairs, counts, eval_counts))
    for sample in pairs[0]:
        run.logger.preview(sample, tokenizer)
    meter = run.meter
    # Whether the logged rewards are beta x summed log-ratios.
    is_summed = not preference.rewards_per_token(args.loss[0], args.length_normalize)
    is_summed = is_summed and args.loss[0] not in REFERENCE_FREE
    if run.first_step == 0:
        run.log(0, generation.evaluate(0))

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. batch: a share of rows that do not depend on the ranks; packing moves pairs ----
        drawn = order.draw(args.batch_size)
        batch = [pairs[i] for i in drawn[rank::world_size]]
        micro_batches = pack_groups(batch, args.pack_tokens, device, args.share_prefix)
        with meter.time("logprobs"):
            ref_logps_B2 = reference_logps(reference, micro_batches, stored_logps[drawn])
            batch_pairs, slices = gather_pairs(policy, micro_batches, ref_logps_B2, args)

        # ---- 2. update: one optimizer step; the loss is a mean over the pairs of all ranks ----
        with meter.time("train"):
            batch_loss = torch.zeros((), device=device)
            for mb, own_slice in zip(micro_batches, slices, strict=True):
                pairs_loss = forward(policy, mb, ref_logps_B2, batch_pairs, own_slice, args, meter)
                mb_loss = pairs_loss / args.batch_size
                # FSDP averages gradients over ranks; undo that.
                (mb_loss * world_size).backward()
                batch_loss += mb_loss.detach()
            lr = run.learning_rate(step)
            grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, batch_loss)
        move_reference(reference, policy, step + 1, args)  # with --reference_sync

        # ---- 3. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*batch), grad_norm=grad_norm, lr=lr)
        if run.evaluates(step + 1):
            metrics |= evaluate_sets(
                eval_pairs,
                lambda indices: evaluate(
                    policy, reference, eval_pairs, indices, eval_stored_logps, args, device
                ),
            )
            metrics |= generation.evaluate(step + 1)
            signs = signs_of_unlearning(args, run.logger.first, metrics, is_summed)
            if signs and not args.sft_weight:
                advice = "--sft_weight 1 adds the likelihood of chosen to the loss"
                run.message_once(f"warning: {signs} by step {step + 1}; {advice} (docs/dpo.md)")
        run.log(step + 1, metrics)

    run.end(held_out_accuracy(run.latest, eval_pairs))
    generation.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
