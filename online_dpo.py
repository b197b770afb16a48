r"""Online DPO against a reward (Guo et al. 2024, arXiv:2402.04792; asynchronous: Noukhovitch et al.
2024, arXiv:2410.18252).

    torchrun --nproc_per_node 8 online_dpo.py --config configs/qwen3_1.7b_online_dpo.yaml

The policy samples G completions of every prompt. The best and the worst of them are a pair, y_c and
y_r, and the loss of dpo.py makes the policy prefer the one to the other more than the starting
model does:

    y_c, y_r = completions of highest and of lowest reward                             preferences()
    r(y)     = beta log(pi(y) / pi_ref(y))          pi(y): product over the tokens of the completion
    L        = mean_pairs [ -log sigma(r(y_c) - r(y_r)) ]      sigma: logistic function loss()

There is no value model and no importance ratio: a pair stays a pair when older weights have sampled
it, so of the online scripts this one tolerates `--max_staleness` best.

Differences from the papers (docs/online_dpo.md): G may be above two, and `--loss` has every
objective of dpo.py (common/objectives/preference.py).

Shapes: P prompts on this rank, G completions per prompt; N sequences (W = N / 2 pairs) and T packed
tokens of a micro-batch, in which sequences 2i and 2i + 1 are chosen and rejected of pair i.
Per-token tensors are aligned with the *targets*: x_T[t] is about targets_T[t]."""

import math
from itertools import chain
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn.functional import logsigmoid

from common.config.flags import AtLeast2, Positive
from common.config.online import TINY_ONLINE, OnlineArgs, refuse_agent
from common.config.parse import parse
from common.evaluate.held_out import evaluate_prompts
from common.metrics.meter import Meter
from common.model.hub import longest_sequence, resolve_model
from common.model.policy import load_policy, load_reference
from common.model.scoring import with_logprobs
from common.objectives import preference
from common.objectives.advantages import unequal, without_rounding
from common.objectives.preference import REFERENCE_FREE, Pairs, PreferenceArgs, f_slope
from common.packs.packing import PackedBatch, pack_minibatches
from common.packs.sample import Completion, Group
from common.parallel import distributed
from common.rewards.total import Rewards
from common.rollout.agreement import measure_mismatch, require_rollout_agreement
from common.rollout.measure import measure_groups, truncation_penalties
from common.rollout.prompts import load_prompts
from common.rollout.sampler import make_sampler, serve
from common.text.tokenizer import load_tokenizer
from common.train.optim import adamw, optimizer_step
from common.train.overview import CURVES, SHOW, describe_rollouts, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

# ---- the objective ----


def preferences(rewards_PG: Tensor) -> Tensor:
    """Return 1 for the chosen completion of every group, the first of highest reward, -1 for the
    rejected one, the first of lowest reward, and 0 for others, [P, G]. Missing rewards (NaN) get 0,
    and so does a group of equal ones."""
    rewards_PG = without_rounding(rewards_PG)
    best_P1 = rewards_PG.nan_to_num(nan=-math.inf).argmax(-1, keepdim=True)
    worst_P1 = rewards_PG.nan_to_num(nan=math.inf).argmin(-1, keepdim=True)
    signs_PG = torch.zeros_like(rewards_PG).scatter(-1, best_P1, 1.0).scatter(-1, worst_P1, -1.0)
    return signs_PG * unequal(rewards_PG)[:, None]


def loss(pairs: Pairs, args: "Args") -> Tensor:
    """Return the loss of each pair, [W] float64: the objectives of `--loss`, added up with
    `--loss_weights`, and `--sft_weight` times the negative log-likelihood of the chosen
    completion, per token."""
    losses = []
    for name in args.loss:
        if name == "sigmoid":  # DPO, as in dpo.py. lc, lr: log-ratios to the reference
            kind = args.f_divergence
            z = args.beta * (f_slope(pairs.lc, kind) - f_slope(pairs.lr, kind))
            e = args.label_smoothing
            losses.append(-(1 - e) * logsigmoid(z) - e * logsigmoid(-z))
        else:
            losses.append(preference.preference_loss(name, pairs, **args.loss_settings))
    weights = args.loss_weights or [1.0] * len(losses)
    weighted = [weight * each_W for weight, each_W in zip(weights, losses, strict=True)]
    loss_W = sum(weighted, torch.zeros(()))
    if args.sft_weight:
        loss_W = loss_W - args.sft_weight * pairs.mean_pc
    return loss_W


def make_pairs(mb: PackedBatch, logprobs_T: Tensor) -> Pairs:
    """Return the pairs of a micro-batch: log-probs of completions by policy and reference (0
    without one), lengths."""
    ref_logprobs_T = mb.ref_logprobs_T
    if ref_logprobs_T is None:
        ref_logprobs_T = torch.zeros_like(logprobs_T)
    logps_N = mb.sequence_sums(logprobs_T)
    ref_logps_N = mb.sequence_sums(ref_logprobs_T)
    lengths_N = mb.sequence_sums(torch.ones_like(logprobs_T))
    return Pairs(
        chosen_logps=logps_N[0::2],
        rejected_logps=logps_N[1::2],
        ref_chosen_logps=ref_logps_N[0::2],
        ref_rejected_logps=ref_logps_N[1::2],
        chosen_lengths=lengths_N[0::2],
        rejected_lengths=lengths_N[1::2],
    )


# ---- metrics ----


def measure_pairs(meter: Meter, rewards_PG: Tensor) -> None:
    """Measure how far best and worst rewards are apart, the groups without a pair, and the pairs
    with a tie."""
    rounded_PG = without_rounding(rewards_PG)
    highest_PG = rounded_PG.nan_to_num(nan=-math.inf)
    lowest_PG = rounded_PG.nan_to_num(nan=math.inf)
    best_P1, worst_P1 = highest_PG.amax(-1, keepdim=True), lowest_PG.amin(-1, keepdim=True)
    unequal_P = (best_P1 > worst_P1)[:, 0]
    tied_P = ((rounded_PG == best_P1).sum(-1) > 1) | ((rounded_PG == worst_P1).sum(-1) > 1)
    best_P = rewards_PG.nan_to_num(nan=-math.inf).amax(-1)  # the margin is that of the rewards
    worst_P = rewards_PG.nan_to_num(nan=math.inf).amin(-1)
    meter.mean("pairs/win_margin", (best_P - worst_P)[unequal_P].sum(), unequal_P.sum())
    meter.mean("pairs/skipped_fraction", (~unequal_P).sum(), len(unequal_P))
    meter.mean("pairs/tied_fraction", (tied_P & unequal_P).sum(), len(unequal_P))


def chosen_pair(group: Group, signs_G: Tensor) -> list[Completion]:
    """Return the preferred completion (sign 1) and the other one (-1), or nothing without signs."""
    if not signs_G.any():
        return []
    return [group[signs_G.argmax()], group[signs_G.argmin()]]


def measured(pairs: Pairs, loss_W: Tensor, args: "Args") -> dict[str, Tensor]:
    """Return the loss, log-probs and implicit rewards of each pair to log, the latter by the first
    objective."""
    chosen_W, rejected_W = preference.implicit_rewards(args.loss[0], pairs, args.beta)
    kl = {"kl": (pairs.lc + pairs.lr) / 2} if set(args.loss) - REFERENCE_FREE else {}
    return kl | {
        "loss": loss_W,
        "rewards/chosen": chosen_W,
        "rewards/rejected": rejected_W,
        "rewards/margins": chosen_W - rejected_W,
        "rewards/accuracies": chosen_W > rejected_W,
        "logps/chosen": pairs.chosen_logps,
        "logps/rejected": pairs.rejected_logps,
    }


@dataclass
class Args(PreferenceArgs, OnlineArgs):
    TINY_DEFAULTS: ClassVar[dict] = TINY_ONLINE | dict(
        beta=1.0, sft_weight=1.0, prompts_per_step=64, samples_per_prompt=4
    )
    samples_per_prompt: AtLeast2 = 2
    """sample this many completions for each prompt (G); the best and the worst are the pair"""
    lr: Positive[float] = 1e-6

    def __post_init__(self) -> None:
        refuse_agent(self.agent)  # pairs have two sequences


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.live_rollout_ranks)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    prepare_output_dir(args, args.dry_run)

    # ---- data: prompts as token ids, and the rewards of their completions ----
    needs_reference = not set(args.loss) <= REFERENCE_FREE
    path = resolve_model(args.model, weights=not args.dry_run)
    tokenizer = load_tokenizer(path, args)
    limit = longest_sequence(path, args, sequences=2)  # a pair shares a pack
    prompts, held_out = load_prompts(args, tokenizer, limit)
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device, args.dry_run)
    if args.dry_run:
        frozen = [path] if needs_reference else []
        return dry_run(args, path, tokenizer, prompts, held_out, rewards, frozen,
                       trained_fraction=2 / args.samples_per_prompt)  # fmt: skip
    begin_run(args, prompts.rows, held_out.rows)

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device)  # trained
    reference = load_reference(policy, args, device) if needs_reference else None  # frozen
    optimizer = adamw(policy, args)
    sampler = make_sampler(policy, prompts, args, tokenizer, on_complete=rewards.begin)

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, prompts)
    curves = (*CURVES, "pairs/win_margin", "rewards/accuracies")
    run = Run(
        args, policy, optimizer, tokenizer, total_steps, sampler=sampler, show=SHOW, curves=curves
    )
    run.message(*describe_rollouts(args, prompts, held_out, sampler))
    meter = run.meter
    if run.first_step == 0:
        run.log(0, evaluate_prompts(sampler, 0, held_out, rewards))

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. rollout: G completions of each of P prompts; their rewards begin meanwhile ----
        rollout = sampler.rollout(step, total_steps, meter)  # syncs weights, then samples
        if rollout is None:  # a stop was requested
            break
        groups, positions = rollout.groups, rollout.positions  # P of the B groups

        # ---- 2. rewards: wait for the last ones; the pair of each group ----
        with meter.time("reward"):
            rewards_PG, named_rewards, _ = rewards.wait(groups, meter)
        measure_groups(meter, groups, rewards_PG, named_rewards, warn=step == 0)
        scores_PG = rewards_PG + truncation_penalties(groups, args.missing_eos_penalty)
        measure_pairs(meter, scores_PG)
        signs_PG = preferences(scores_PG)
        pairs = [chosen_pair(group, s_G) for group, s_G in zip(groups, signs_PG, strict=True)]

        # ---- 3. pack: pairs move to the ranks that train on them; log-probs of the reference ----
        if run.checks_engine(step):  # all completions, also those without a pair
            require_rollout_agreement(policy, groups, step, args)
        minibatches = pack_minibatches(
            pairs, positions, args.minibatches, args.pack_tokens, device, policy.share_prefix,
            together=True,
        )  # fmt: skip
        with meter.time("logprobs"):
            minibatches = with_logprobs(minibatches, args.temperature, ref=reference)

        # ---- 4. update: one optimizer step per minibatch; a loss of nan or inf stops the run ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            updated = False
            for minibatch in minibatches * args.epochs_per_rollout:
                num_pairs = int(distributed.all_sum(sum(mb.num_samples for mb in minibatch))) // 2
                if not num_pairs:  # all rewards of each group are equal: no step by momentum alone
                    continue
                total_loss = torch.zeros((), device=device)
                for mb in minibatch:
                    logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
                    mb_pairs = make_pairs(mb, logprobs_T)
                    loss_W = loss(mb_pairs, args)
                    share_W = loss_W / num_pairs
                    # FSDP averages gradients over ranks; undo that.
                    (share_W.sum() * world_size).backward()
                    total_loss += share_W.detach().sum()
                    meter.samples(mb, measured(mb_pairs, loss_W, args), share_W)
                    meter.tokens(mb, {"entropy": entropy_T})
                    if not updated:
                        measure_mismatch(meter, logprobs_T.detach(), mb)
                grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, total_loss)
                meter.mean("grad_norm", grad_norm)
                updated = True

        # ---- 5. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr)
        if run.evaluates(step + 1):
            metrics |= evaluate_prompts(sampler, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        run.show_samples(step + 1, groups, positions, rewards_PG, signs_PG, named_rewards)

    run.end()
    sampler.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
