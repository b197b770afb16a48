r"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

    torchrun --nproc_per_node 8 rloo.py --config configs/qwen3_1.7b_rloo.yaml

The policy samples G completions of every prompt. A whole completion y is one action, and its return
R is compared with the returns of the prompt's other completions:

    R_i   = score_i - beta log(pi_old(y_i) / pi_ref(y_i))                       returns_BG in main()
    A_i   = R_i - mean of the other R_j of the prompt                                   advantages()
    L     = mean_i [ -c_i min(rho_i A_i, clip(rho_i, 1 - clip_low, 1 + clip_high) A_i) ]     loss()
    rho_i = pi(y_i) / pi_old(y_i)                         pi_old: the policy before the updates

There is no value model. Differences from the paper (docs/rloo.md): the clip of PPO allows several
updates per rollout, and importance weights c_i = min(pi_old(y_i) / pi_engine(y_i), 2) correct for
the difference between engine and trainer.

Shapes: P prompts on this rank, B on all ranks, G completions per prompt, N completions and T packed
tokens of a micro-batch. Per-token tensors are aligned with the *targets*: x_T[t] is about
targets_T[t]."""

from itertools import chain
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import AtLeast2, BelowOne, NotNegative, Positive
from common.config.online import TINY_ONLINE, OnlineArgs
from common.config.parse import parse
from common.evaluate.held_out import evaluate_prompts
from common.model.hub import longest_sequence, resolve_model
from common.model.policy import load_policy, load_reference
from common.model.scoring import with_logprobs
from common.objectives.advantages import centre_groups
from common.objectives.importance import CorrectionArgs, bounded_exp, importance_weights, is_clipped
from common.objectives.kl import LogKLArgs
from common.packs.packing import count_trained, pack_minibatches, per_sample
from common.parallel import distributed
from common.rewards.total import Rewards, without_unscored
from common.rollout.agreement import measure_mismatch, require_agreement
from common.rollout.measure import measure_groups, truncation_penalties
from common.rollout.prompts import load_prompts
from common.rollout.sampler import make_sampler, serve
from common.text.tokenizer import load_tokenizer
from common.train.optim import adamw, optimizer_step
from common.train.overview import CURVES, SHOW, describe_rollouts, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

# ---- the objective ----


def advantages(rewards_BG: Tensor) -> Tensor:
    """Return the advantage of every completion, [B, G] float64: its reward minus the mean reward of
    the others of its group. A missing reward (NaN) counts in no mean and gets 0; a group of equal
    rewards gets exactly 0."""
    size_B1 = (~rewards_BG.isnan()).sum(-1, keepdim=True)
    # n / (n - 1) (r - mean of all n)
    return centre_groups(rewards_BG) * size_B1 / (size_B1 - 1).clamp(min=1)


def loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    c_N: Tensor,
    advantages_N: Tensor,
    num_sequences: Tensor,
    args: "Args",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return each completion's share of the objective L, to be minimised, and further numbers of
    each to log. Log-probs are sums over a completion. `c_N`: c_i; `num_sequences`: number
    of completions of the *global* minibatch."""
    log_rho_N = logprobs_N - old_logprobs_N
    A_N = advantages_N
    rho_N = bounded_exp(log_rho_N)
    clipped_N = rho_N.clamp(1 - args.clip_low, 1 + args.clip_high)
    loss_N = -torch.min(rho_N * A_N, clipped_N * A_N) * c_N
    is_clipped_N = is_clipped(log_rho_N.detach(), A_N, args.clip_low, args.clip_high)
    logged = {"loss": loss_N, "ratio": rho_N, "clip_ratio/region_mean": is_clipped_N}
    return loss_N / num_sequences, logged


@dataclass
class Args(LogKLArgs, CorrectionArgs, OnlineArgs):
    TINY_DEFAULTS: ClassVar[dict] = TINY_ONLINE | dict(beta=0.01)
    samples_per_prompt: AtLeast2 = 8
    """sample this many completions for each prompt (G); the baseline of each is the mean reward of
    the others"""
    lr: Positive[float] = 1e-6
    clip_low: BelowOne = 0.2
    """clip the importance ratio of a completion below 1 - clip_low"""
    clip_high: NotNegative[float] = 0.2
    """clip the importance ratio of a completion above 1 + clip_high"""
    beta: NotNegative[float] = 0.05
    """subtract the KL to the starting model from the rewards with this weight; 0: no penalty, and
    no reference model in memory"""

    def __post_init__(self) -> None:
        self.correction_form(by_completion=True)  # refuses a weight per token


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.live_rollout_ranks)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    prepare_output_dir(args, args.dry_run)

    # ---- data: prompts as token ids, and the rewards of their completions ----
    needs_reference = args.beta > 0 or args.log_kl
    path = resolve_model(args.model, weights=not args.dry_run)
    tokenizer = load_tokenizer(path, args)
    prompts, held_out = load_prompts(args, tokenizer, longest_sequence(path, args))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device, args.dry_run)
    if args.dry_run:
        frozen = [path] if needs_reference else []
        return dry_run(args, path, tokenizer, prompts, held_out, rewards, frozen,
                       own_forwards=1 if needs_reference else 1 - 1 / args.minibatches)  # fmt: skip
    begin_run(args, prompts.rows, held_out.rows)

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device)  # trained
    reference = load_reference(policy, args, device) if needs_reference else None  # frozen
    optimizer = adamw(policy, args)
    sampler = make_sampler(policy, prompts, args, tokenizer, on_complete=rewards.begin)

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, prompts)
    run = Run(
        args, policy, optimizer, tokenizer, total_steps, sampler=sampler, show=SHOW, curves=CURVES
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

        # ---- 2. rewards: wait for the last ones; pack: completions move to ranks that train ----
        with meter.time("reward"):
            rewards_PG, named_rewards, _ = rewards.wait(groups, meter)
        measure_groups(meter, groups, rewards_PG, named_rewards, warn=step == 0)
        trained = without_unscored(groups, rewards_PG)
        minibatches = pack_minibatches(
            trained, positions, args.minibatches, args.pack_tokens, device, policy.share_prefix
        )
        checks_engine = run.checks_engine(step)
        needs_all = checks_engine or needs_reference
        with meter.time("logprobs"):
            minibatches = with_logprobs(
                minibatches, args.temperature, old=policy, ref=reference, old_of_first=needs_all
            )
        if checks_engine:
            require_agreement(minibatches, step, args, device)

        # ---- 3. returns and advantages: the KL of a completion is subtracted from its score ----
        penalties_PG = truncation_penalties(groups, args.missing_eos_penalty)
        returns_BG = distributed.gather_rows(rewards_PG + penalties_PG, positions)
        if needs_reference:
            kl = []  # one [N] for each micro-batch
            for mb in chain(*minibatches):
                kl_N = mb.sequence_sums(mb.old_logprobs_T - mb.ref_logprobs_T)
                meter.mean("kl", kl_N.sum(), mb.is_trained_N.sum())
                kl.append(kl_N)
            kl_BG = per_sample(chain(*minibatches), kl, returns_BG.shape)
            returns_BG = returns_BG - args.beta * kl_BG
        advantages_BG = advantages(returns_BG).to(device)

        # ---- 4. update: one optimizer step per minibatch; a loss of nan or inf stops the run ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            for n, minibatch in enumerate(minibatches * args.epochs_per_rollout):
                _, num_sequences = count_trained(minibatch)  # on all ranks
                total_loss = torch.zeros((), device=device)
                for mb in minibatch:
                    logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
                    if n == 0:  # before the first update pi_old is pi
                        mb.old_logprobs_T = logprobs_T.detach()
                    c_T = importance_weights(
                        mb.old_logprobs_T,
                        mb.rollout_logprobs_T,
                        mb.loss_mask_T,
                        mb.sequence_ids_T,
                        args.correction_form(by_completion=True),
                    )
                    share_N, logged = loss(
                        mb.sequence_sums(logprobs_T), mb.sequence_sums(mb.old_logprobs_T),
                        c_T[mb.ends_N], mb.select(advantages_BG), num_sequences, args,
                    )  # fmt: skip
                    # FSDP averages gradients over ranks; undo that.
                    (share_N.sum() * world_size).backward()
                    total_loss += share_N.detach().sum()
                    meter.samples(mb, logged, share_N)
                    meter.tokens(mb, {"entropy": entropy_T})
                    measure_mismatch(meter, mb.old_logprobs_T, mb)
                grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, total_loss)
                meter.mean("grad_norm", grad_norm)

        # ---- 5. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr)
        if run.evaluates(step + 1):
            metrics |= evaluate_prompts(sampler, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        advantages_PG = advantages_BG[positions]
        run.show_samples(step + 1, groups, positions, rewards_PG, advantages_PG, named_rewards)

    run.end()
    sampler.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
