"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and the objectives that followed it.

    torchrun --nproc_per_node 8 dpo.py --model Qwen/Qwen3-1.7B --dataset trl-lib/ultrafeedback_binarized

The policy learns from pairs: a prompt with a chosen and a rejected completion, y_c and y_r. The log-ratio to a frozen
reference is an implicit reward, and the loss makes it larger for the chosen completion:

    r(y) = beta log(pi(y) / pi_ref(y))                  pi(y): product over the tokens of the completion
    L    = mean_pairs [ -log sigma(r(y_c) - r(y_r)) ]                    sigma: logistic function         loss()

`--loss` adds up 16 other objectives: common/objectives/preference.py has their equations, docs/dpo.md a table. kto.py
learns from single completions.

Differences from the papers: the log-probs of the reference are computed once, before training, so that training holds
one model in memory; chosen and rejected share one packed stream.

Shapes: N pairs (2N sequences) and T packed tokens of a micro-batch; sequences 2i and 2i + 1 are chosen and rejected of
pair i. Per-token tensors are aligned with the *targets*: x_T[t] describes the prediction of targets_T[t].
"""

from collections import Counter
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import logsigmoid

from common.config.flags import Fraction, Positive, require_default
from common.config.groups import TINY_GENERATE, TINY_TRAINING, TrainArgs
from common.config.objectives import PreferenceArgs
from common.config.parse import parse
from common.config.sampling import GenerateArgs
from common.config.training import PrefixArgs
from common.data.encode import PAIR_FLAGS, Encoder, encode_pairs
from common.data.packing import PackedBatch, pack_groups
from common.data.rows import PAIR_COLUMNS
from common.data.sample import Sample
from common.data.token_cache import load_samples
from common.metrics.meter import Meter, evaluate_sets
from common.model.hub import fit_max_length, load_tokenizer, resolve_model
from common.model.policy import Policy, load_policy
from common.model.reference import reference_logps, reference_or_logps
from common.model.scoring import weighted_logps
from common.objectives import preference
from common.objectives.preference import OVER_BATCH, PER_TOKEN, REFERENCE_FREE, Pairs
from common.parallel import distributed
from common.train.generation import Generation
from common.train.optim import adamw, optimizer_step
from common.train.overview import describe_data, fall, held_out_accuracy, num_steps
from common.train.plan import dry_run
from common.train.run import Run
from common.train.run_folder import prepare_output_dir

SHOW = ("eval/solved", "loss", "rewards/margins", "eval_rewards/accuracies", "time/step")
CURVES = ("eval/solved", "loss", "eval_loss", "rewards/accuracies", "eval_rewards/accuracies", "rewards/margins",
          "rewards/chosen", "rewards/rejected", "grad_norm")  # fmt: skip

# ---- the objective ----


def loss(pairs: Pairs, args: "Args") -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each pair, [N] float64, and its parts: the objectives of `--loss`, which are added up with
    `--loss_weights` (as in MPO, arXiv:2411.10442) and times the weight of the pair."""
    parts = {}
    for name in args.loss:
        match name:
            case "sigmoid" if args.f_divergence == "reverse_kl":  # DPO Eq. 7; with label smoothing cDPO
                z, e = args.beta * (pairs.lc - pairs.lr), args.label_smoothing  # lc, lr: log-ratios to the reference
                parts[name] = -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)
            case _:
                parts[name] = preference.preference_loss(
                    name, pairs, beta=args.beta, label_smoothing=args.label_smoothing,
                    length_normalize=args.length_normalize, f_divergence=args.f_divergence, f_alpha=args.f_alpha,
                    simpo_gamma=args.simpo_gamma, discopop_tau=args.discopop_tau,
                )  # fmt: skip
    weights = args.loss_weights or [1.0] * len(parts)
    return pairs.weights * sum(weight * part for weight, part in zip(weights, parts.values(), strict=True)), parts


@dataclass
class Args(PreferenceArgs, GenerateArgs, PrefixArgs, TrainArgs):
    MOVED: ClassVar[dict] = {"loss": {"kto": "python kto.py"}}
    TINY_DEFAULTS: ClassVar[dict] = TINY_TRAINING | TINY_GENERATE | dict(lr=5e-4, sft_weight=1.0)
    model: str = "tiny-sft"
    batch_size: Positive[int] = 64
    """pairs per optimizer step, over all ranks"""
    max_length: Positive[int] | None = None
    """maximum tokens of prompt and completion together; default: 2048, or less if context or pack_tokens is smaller"""
    overlong: Literal["drop", "truncate", "error"] = "drop"
    """treatment of pairs with a longer completion. drop: leave them out; truncate: cut its end off (both are counted);
    error: end the run"""
    identical_pairs: Literal["drop", "keep", "error"] = "drop"
    """treatment of pairs whose chosen and rejected are the same. drop: leave them out (counted); error: end the run"""
    lr: Positive[float] = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    reference_model: str | None = None
    """Hugging Face id or folder of the reference model; default: the starting model"""
    reference_logprobs: Literal["stored", "online"] = "stored"
    """log-probs of the reference model. stored: computed once before training; online: computed in every step by the
    model, which stays in memory"""
    ld_alpha: Fraction = 1.0
    """weight of a completion's tokens beyond the length of the other one (LD-DPO, arXiv:2409.06411)"""
    wpo: bool = False
    """weight each pair by its probability under the current policy (WPO, arXiv:2406.11827)"""

    def __post_init__(self) -> None:
        names, chosen = " ".join(self.loss), set(self.loss)
        if chosen <= REFERENCE_FREE:
            require_default(self, ("reference_model", "reference_logprobs"), f"with --loss {names}")
        if self.ld_alpha < 1 and chosen & (REFERENCE_FREE | PER_TOKEN):
            raise ValueError(f"--ld_alpha {self.ld_alpha} needs losses of summed log-ratios, not --loss {names}")
        if self.max_length and 2 * (self.max_length - 1) > self.room:
            raise ValueError(f"--max_length {self.max_length}: two sequences must fit in {self.room_flags}")


def encode_rows(
    rows: list[dict], columns: tuple[str, ...], encoder: Encoder, args: Args
) -> tuple[list[list[Sample]], Counter]:
    """Tokenize rows into [chosen, rejected] pairs of at most `--max_length` tokens, their tokens weighted by
    `--ld_alpha`; count the rows that were dropped or changed."""
    pairs, counts = encode_pairs(rows, lambda row: encoder.pair(row, columns), args)
    if args.ld_alpha == 1:
        return pairs, counts
    shared = [min(sum(sample.loss_mask) for sample in pair) for pair in pairs]  # length of the shorter completion

    def weights(sample: Sample, shared: int) -> list[float]:
        return [1.0 if n <= shared else args.ld_alpha for n in accumulate(sample.loss_mask)]

    weighted = [[replace(s, weights=weights(s, n)) for s in pair] for pair, n in zip(pairs, shared, strict=True)]
    return weighted, counts


def make_pairs(mb: PackedBatch, logprobs_T: Tensor, collision_T: Tensor, ref_logps_P2: Tensor, wpo: bool) -> Pairs:
    """Return the pairs of a micro-batch: log-probs of completions by policy and reference, lengths, weights."""
    logps_2N, lengths_2N = weighted_logps(mb, logprobs_T), mb.sequence_sums(torch.ones_like(logprobs_T))
    sides = [x_2N[side::2] for x_2N in (logps_2N, mb.select(ref_logps_P2), lengths_2N) for side in (0, 1)]
    adjusted_2N = mb.sequence_sums(logprobs_T.detach() - collision_T) / lengths_2N
    weights_N = preference.wpo_weights(adjusted_2N[0::2] + adjusted_2N[1::2]) if wpo else torch.ones_like(sides[0])
    return Pairs(*sides, weights=weights_N)


@torch.no_grad()
def gather_pairs(
    policy: Policy, micro_batches: list[PackedBatch], ref_logps_P2: Tensor, args: Args
) -> tuple[Pairs | None, list[slice]]:
    """Return the pairs of all ranks for objectives that sort them, and the place of each micro-batch among them; else
    None. Collective."""
    if not OVER_BATCH & set(args.loss):
        return None, [slice(None)] * len(micro_batches)
    outputs = ((mb, policy(mb)) for mb in micro_batches)
    mine = [make_pairs(mb, out[0], out[3], ref_logps_P2, args.wpo).tensors() for mb, out in outputs]
    ranks = distributed.gather_objects([torch.cat(column).cpu() for column in zip(*mine, strict=True)])
    first = sum(len(columns[0]) for columns in ranks[: torch.distributed.get_rank()])
    ends = accumulate((len(tensors[0]) for tensors in mine), initial=first)
    pairs = Pairs(*(torch.cat(columns).to(mine[0][0].device) for columns in zip(*ranks, strict=True)))
    return pairs, [slice(*bounds) for bounds in pairwise(ends)]


def insert_own(others: Pairs | None, own: slice, pairs: Pairs) -> Pairs:
    """Return the pairs of all ranks with `pairs`, which have gradients, in their place; without others, `pairs`."""
    if others is None:
        return pairs
    columns = zip(others.tensors(), pairs.tensors(), strict=True)
    return Pairs(*(torch.cat([x_N[: own.start], own_N, x_N[own.stop :]]) for x_N, own_N in columns))


def forward(
    policy: Policy, mb: PackedBatch, ref_logps_P2: Tensor, others: Pairs | None, own: slice, args: Args, meter: Meter,
    prefix: str = "",
) -> Tensor:  # fmt: skip
    """Return the loss of a micro-batch, summed over its pairs; log it with implicit rewards and log-probs."""
    logprobs_T, entropy_T, _, collision_T = policy(mb)
    pairs = make_pairs(mb, logprobs_T, collision_T, ref_logps_P2, args.wpo)
    loss_N, parts = loss(insert_own(others, own, pairs), args)
    nll_N = -mb.sequence_sums(logprobs_T)[0::2] / (pairs.chosen_lengths if args.sft_length_normalize else 1)
    # The value is that of the own pairs; the gradient is that of all pairs that they were sorted with.
    total = loss_N.sum() + (loss_N[own].sum() - loss_N.sum()).detach() + args.sft_weight * nll_N.sum()

    first, per_token = args.loss[0], preference.rewards_per_token(args.loss[0], args.length_normalize)
    chosen_N, rejected_N = preference.implicit_rewards(
        pairs, per_token=per_token, referenced=first not in REFERENCE_FREE, beta=args.beta
    )
    logged = {"loss": loss_N[own] + args.sft_weight * nll_N, "rewards/chosen": chosen_N, "rewards/rejected": rejected_N,
              "rewards/margins": chosen_N - rejected_N, "rewards/accuracies": chosen_N > rejected_N,
              "logps/chosen": pairs.chosen_logps, "logps/rejected": pairs.rejected_logps}  # fmt: skip
    if len(parts) > 1 or args.sft_weight:
        logged |= {f"loss/{name}": part_N[own] for name, part_N in parts.items()}
    logged |= ({"loss/sft": nll_N} if args.sft_weight else {}) | ({"wpo/weight": pairs.weights} if args.wpo else {})
    meter.rows(mb, logged, logged["loss"] / args.batch_size, prefix)
    meter.tokens(mb, {f"{prefix}entropy": entropy_T})
    return total


@torch.no_grad()
def evaluate(
    policy: Policy, reference: Policy | None, pairs: list[list[Sample]], stored_P2: Tensor, args: Args,
    device: torch.device,
) -> Meter:  # fmt: skip
    """Measure this rank's share of the held-out pairs."""
    meter, micro_batches = Meter(), pack_groups(pairs, args.pack_tokens, device)
    ref_logps_P2 = reference_logps(reference, micro_batches, stored_P2)
    others, places = gather_pairs(policy, micro_batches, ref_logps_P2, args)
    for mb, own in zip(micro_batches, places, strict=True):
        forward(policy, mb, ref_logps_P2, others, own, args, meter, "eval_")
    return meter


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, rank, world_size = distributed.setup(args.seed, nccl_timeout=args.nccl_timeout)
    prepare_output_dir(args, owned=("reference_logps.json",))

    # ---- data: pairs of token ids with masks, and their order ----
    path = resolve_model(args.model, weights=not args.dry_run)
    fit_max_length(args, path, room=args.room // 2)
    tokenizer = load_tokenizer(path, args)
    (pairs, counts), (eval_pairs, eval_counts) = load_samples(
        encode_rows, PAIR_COLUMNS, tokenizer, args, (*PAIR_FLAGS, "ld_alpha")
    )
    needed = not set(args.loss) <= REFERENCE_FREE
    frozen = [args.reference_model or path] if needed and args.reference_logprobs == "online" else []
    dry_run(args, path, tokenizer, pairs, eval_pairs, frozen=frozen, counts=counts + eval_counts)
    order = pairs.order(args)

    # ---- models: FSDP2 shards of float32 masters; the frozen reference scores the pairs before training ----
    policy = load_policy(path, args, device)
    reference, (stored, eval_stored) = reference_or_logps(policy, (pairs, eval_pairs), tokenizer, args, device, needed)
    optimizer = adamw(policy, args)
    generation = Generation(policy, args, tokenizer)  # answers held-out prompts, with --eval_generate

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    run = Run(args, policy, optimizer, tokenizer, num_steps(args, pairs), order=order, show=SHOW, curves=CURVES)
    run.message(*describe_data(args, pairs, eval_pairs, counts, eval_counts))
    for sample in pairs[0]:
        run.logger.preview(sample, tokenizer)
    meter = run.meter
    per_token = preference.rewards_per_token(args.loss[0], args.length_normalize)  # the logged rewards
    summed = args.loss[0] not in REFERENCE_FREE and not per_token
    if run.first_step == 0:
        run.log(0, generation.evaluate(0))

    for step in run.steps():
        # ---- 1. batch: the same global pairs on any number of ranks; every rank takes its share ----
        mine = order.draw(args.batch_size)[rank::world_size]
        batch = [pairs[i] for i in mine]
        micro_batches = pack_groups(batch, args.pack_tokens, device)  # as many on every rank: FSDP collectives match
        with meter.time("logprobs"):
            ref_logps_P2 = reference_logps(reference, micro_batches, stored[mine])
            others, places = gather_pairs(policy, micro_batches, ref_logps_P2, args)

        # ---- 2. update: one optimizer step; the loss is a mean over the pairs of the *global* batch ----
        with meter.time("train"):
            batch_loss = torch.zeros((), device=device)
            for mb, own in zip(micro_batches, places, strict=True):
                mb_loss = forward(policy, mb, ref_logps_P2, others, own, args, meter) / args.batch_size
                (mb_loss * world_size).backward()  # FSDP averages gradients over ranks; undo that
                batch_loss += mb_loss.detach()
            lr = run.learning_rate(step)
            grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, batch_loss)

        # ---- 3. log and evaluate ----
        metrics = run.reduce(chain(*batch), grad_norm=grad_norm, lr=lr)
        if run.evaluates(step + 1):
            metrics |= evaluate_sets(eval_pairs, lambda mine: evaluate(
                policy, reference, [eval_pairs[i] for i in mine], eval_stored[mine], args, device
            ))  # fmt: skip
            metrics |= generation.evaluate(step + 1)
            if not args.sft_weight and (fell := fall(args, run.logger.first, metrics, summed)):
                advice = "--sft_weight 1 adds the likelihood of chosen to the loss"
                run.message_once(f"warning: {fell} by step {step + 1}; {advice} (docs/dpo.md)")
        run.log(step + 1, metrics)

    run.end(held_out_accuracy(run, eval_pairs))
    generation.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.leave()
