r"""Best-of-k fine-tuning, also known as rejection sampling (Dong et al. 2023, RAFT,
arXiv:2304.06767; asynchronously: Noukhovitch et al. 2024, arXiv:2410.18252).

    torchrun --nproc_per_node 8 bok.py --config configs/qwen3_1.7b_bok.yaml

The policy samples G completions of every prompt and learns the best ones by maximum likelihood, as
in sft.py. No term of the objective lowers the probability of the others:

    R_i  = score_i - beta log(pi(y_i) / pi_ref(y_i))                            ranking_PG in main()
    kept = the `keep` completions of a prompt with the highest R_i                            best()
    L    = mean_t [ -log pi(y_t) ]                 t: tokens of the kept completions          loss()

Differences from the papers: by default there is one optimizer step for each rollout. RAFT has large
rounds of sampling and of training; --prompts_per_step, --minibatches and --epochs_per_rollout make
such rounds, and docs/bok.md shows a single one with eval.py and sft.py. The loss needs no log-probs
of the engine, so sampling may truncate the distribution (--top_p, --top_k, --min_p).

Shapes: P prompts on this rank, B on all ranks, G completions per prompt, T packed tokens of a
micro-batch. Per-token tensors are aligned with the *targets*: x_T[t] is about targets_T[t]."""

import math
from itertools import chain, compress

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import AtLeast2, NotNegative, Positive
from common.config.online import OnlineArgs
from common.config.parse import parse
from common.evaluate.held_out import evaluate_prompts
from common.model.hub import longest_sequence, resolve_model
from common.model.policy import load_policy, load_reference
from common.model.scoring import with_logprobs
from common.objectives.advantages import without_rounding
from common.objectives.kl import LogKLArgs
from common.packs.packing import pack_minibatches, per_sample
from common.parallel import distributed
from common.rewards.total import Rewards
from common.rollout.agreement import measure_mismatch, require_rollout_agreement
from common.rollout.engine import EngineOptions, TruncationArgs
from common.rollout.measure import measure_groups, truncation_penalties
from common.rollout.prompts import load_prompts
from common.rollout.sampler import make_sampler, serve
from common.text.tokenizer import load_tokenizer
from common.train.optim import adamw, optimizer_step
from common.train.overview import CURVES, describe_rollouts, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

SHOW = ("loss", "reward", "eval/solved", "time/step")

# ---- the objective ----


def best(ranking_PG: Tensor, keep: int) -> Tensor:
    """Return which completions are trained on, [P, G] bool: the `keep` highest of each group, the
    first among equals. A completion without a reward (NaN) is not kept."""
    rounded_PG = without_rounding(ranking_PG).nan_to_num(nan=-math.inf)
    order_PG = rounded_PG.argsort(dim=-1, descending=True, stable=True)
    return (order_PG.argsort(dim=-1) < keep) & ~ranking_PG.isnan()


def loss(logprobs_T: Tensor, mask_T: Tensor, num_tokens: Tensor) -> Tensor:
    """Return each token's share of the loss: the mean of -log pi over the `num_tokens` of the
    *global* minibatch."""
    return -logprobs_T * mask_T / num_tokens.clamp(min=1)


@dataclass
class Args(TruncationArgs, LogKLArgs, OnlineArgs):
    lr: Positive[float] = 1e-6
    samples_per_prompt: AtLeast2 = 4
    """sample this many completions for each prompt (G, the k of best-of-k)"""
    keep: Positive[int] = 1
    """train on this many completions of each prompt: those with the best rewards"""
    beta: NotNegative[float] = 0.0
    """rank completions with a KL penalty of this weight, by reward - beta log(policy / starting
    model); 0: no penalty, and no reference model in memory"""

    def __post_init__(self) -> None:
        if self.keep >= self.samples_per_prompt:
            most = self.samples_per_prompt - 1
            raise ValueError(
                f"--keep {self.keep} must be at most {most}, below --samples_per_prompt"
            )


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.live_rollout_ranks)
    options = EngineOptions(truncation_args=args)
    if distributed.is_rollout_rank():
        return serve(args, device, options)  # generates until training ends
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
                       own_forwards=int(needs_reference),
                       trained_fraction=args.keep / args.samples_per_prompt)  # fmt: skip
    begin_run(args, prompts.rows, held_out.rows)

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device)  # trained
    reference = load_reference(policy, args, device) if needs_reference else None  # frozen
    optimizer = adamw(policy, args)
    sampler = make_sampler(policy, prompts, args, tokenizer, rewards.begin, options)

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, prompts)
    curves = (*CURVES, "kept/reward", "loss", "kl")
    run = Run(
        args, policy, optimizer, tokenizer, total_steps, sampler=sampler, show=SHOW, curves=curves
    )
    run.message(*describe_rollouts(args, prompts, held_out, sampler))
    meter = run.meter
    if args.truncation is not None:  # the engine then samples from another distribution
        run.message("engine and trainer are not compared: the sampled distribution is truncated")
    if run.first_step == 0:
        run.log(0, evaluate_prompts(sampler, 0, held_out, rewards))

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. rollout: G completions of each of P prompts ----
        rollout = sampler.rollout(step, total_steps, meter)  # syncs weights, then samples
        if rollout is None:  # a stop was requested
            break
        groups, positions = rollout.groups, rollout.positions  # P of the B groups
        with meter.time("reward"):
            rewards_PG, named_rewards, _ = rewards.wait(groups, meter)
        measure_groups(meter, groups, rewards_PG, named_rewards, warn=step == 0)
        if args.truncation is None and run.checks_engine(step):
            require_rollout_agreement(policy, groups, step, args)

        # ---- 2. rank and choose; pack: completions move to the ranks that train on them ----
        ranking_PG = rewards_PG + truncation_penalties(groups, args.missing_eos_penalty)
        if reference is not None:
            with meter.time("logprobs"):
                packed = pack_minibatches(
                    groups, positions, 1, args.pack_tokens, device, policy.share_prefix
                )
                (mbs,) = with_logprobs(packed, args.temperature, old=policy, ref=reference)
            kl = [mb.sequence_sums(mb.old_logprobs_T - mb.ref_logprobs_T) for mb in mbs]
            kl_BG = per_sample(mbs, kl, (args.prompts_per_step, args.samples_per_prompt))
            kl_PG = kl_BG[positions]
            ranking_PG = ranking_PG - args.beta * kl_PG
            meter.mean("kl", kl_PG.sum(), kl_PG.numel())
        kept_PG = best(ranking_PG, args.keep)
        kept = [
            list(compress(group, kept_G)) for group, kept_G in zip(groups, kept_PG, strict=True)
        ]
        minibatches = pack_minibatches(
            kept, positions, args.minibatches, args.pack_tokens, device, policy.share_prefix
        )
        meter.mean("kept/reward", rewards_PG[kept_PG].sum(), kept_PG.sum())
        meter.mean("kept/fraction", kept_PG.sum(), kept_PG.numel())

        # ---- 3. update: one optimizer step per minibatch; a loss of nan or inf stops the run ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            updated = False
            for minibatch in minibatches * args.epochs_per_rollout:
                num_tokens = distributed.all_sum(sum(mb.loss_mask_T.sum() for mb in minibatch))
                total_loss = torch.zeros((), device=device)
                for mb in minibatch:
                    logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
                    share_T = loss(logprobs_T, mb.loss_mask_T, num_tokens)
                    # FSDP averages gradients over ranks; undo that.
                    (share_T.sum() * world_size).backward()
                    total_loss += share_T.detach().sum()
                    meter.tokens(mb, {"loss": -logprobs_T, "entropy": entropy_T}, share_T)
                    if not updated and args.truncation is None:
                        measure_mismatch(meter, logprobs_T.detach(), mb)
                if num_tokens:
                    grad_norm = optimizer_step(
                        policy, optimizer, lr, args.max_grad_norm, total_loss
                    )
                    meter.mean("grad_norm", grad_norm)
                    updated = True
                else:  # no completion was kept: no step by momentum alone
                    optimizer.zero_grad()

        # ---- 4. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr)
        if run.evaluates(step + 1):
            metrics |= evaluate_prompts(sampler, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        run.show_samples(step + 1, groups, positions, rewards_PG, kept_PG.double(), named_rewards)

    run.end()
    sampler.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
