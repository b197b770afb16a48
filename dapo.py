"""DAPO: GRPO for long chains of thought (Yu et al. 2025, arXiv:2503.14476).

    torchrun --nproc_per_node 8 dapo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k --reward gsm8k

Groups of G completions are compared as in grpo.py, with four changes: a wider upper clip bound (clip-higher), a mean
over all tokens of the batch, a penalty near the length limit (overlong shaping), and further groups in place of those
whose rewards are all equal (dynamic sampling, chapter 1 of the loop). There is no KL term:

    R_i   = r_i + penalty(length_i)                                                      overlong_penalties()
    A_i   = (R_i - mean(R_1..R_G)) / std(R_1..R_G)                                       advantages()
    L     = mean_t [ -c_t min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i) ]     loss()
    rho_t = pi(y_t) / pi_old(y_t)                    pi_old: the policy at the time of the rollout

On request only the tokens of highest entropy have a loss (Wang et al. 2025, arXiv:2506.01939).

Differences from the paper (docs/dapo.md): truncated importance weights c_t = pi_old(y_t) / pi_engine(y_t) correct for
the difference between engine and trainer, and a step trains on fewer groups if --max_draws do not give enough.

Shapes: P prompts on this rank, B of all draws and ranks of a step, G completions per prompt, T packed tokens of a
micro-batch. Per-token tensors are aligned with the *targets*: x_T[t] describes the prediction of targets_T[t].
"""

import fractions
import math
from dataclasses import replace
from itertools import chain

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import AtLeast2, BelowOne, Fraction, NotNegative, Positive, PositiveFraction, require_default
from common.config.groups import OnlineArgs
from common.config.objectives import CorrectionArgs, LogKLArgs
from common.config.parse import parse
from common.data.packing import PackedBatch, pack_minibatches
from common.model.hub import context_length, load_tokenizer, resolve_model
from common.model.policy import load_policy, load_reference
from common.model.scoring import with_logprobs
from common.objectives.advantages import centre_groups, unequal
from common.objectives.importance import importance_weights
from common.objectives.policy import bounded_exp, is_clipped, kl_estimate
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout import statistics
from common.rollout.prompts import load_prompts
from common.rollout.remote_sampler import make_sampler, serve
from common.train.optim import adamw, optimizer_step
from common.train.overview import CURVES, SHOW, describe_rollouts, num_steps
from common.train.plan import dry_run
from common.train.run import Run
from common.train.run_folder import prepare_output_dir

# ---- the objective ----


def overlong_penalties(lengths: Tensor, args: "Args") -> Tensor:
    """Return the penalties for length, float64: 0 up to (1 - overlong_buffer) max_new_tokens tokens, then falling
    linearly to -overlong_penalty at max_new_tokens (Eq. 13)."""
    if not args.overlong_buffer:
        return torch.zeros_like(lengths, dtype=torch.float64)
    buffer = args.overlong_buffer * args.max_new_tokens
    return args.overlong_penalty * ((args.max_new_tokens - buffer - lengths.double()) / buffer).clamp(-1, 0)


def advantages(rewards_BG: Tensor) -> Tensor:
    """Return the advantage of every completion, [B, G] float64: (R - mean) / std of its group. A missing reward (NaN)
    counts in no statistic and gets 0; a group of equal rewards gets exactly 0."""
    centred_BG, size_B1 = centre_groups(rewards_BG), (~rewards_BG.isnan()).sum(-1, keepdim=True)
    std_B1 = (centred_BG.square().sum(-1, keepdim=True) / (size_B1 - 1).clamp(min=1)).sqrt()
    return centred_BG / (std_B1 + 1e-6)


def loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, old_entropy_T: Tensor | None,
    advantages_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, tokens: Tensor, threshold: float, args: "Args",
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return each token's share of the objective L, to be minimised, and per-token tensors to log. `mask_T`: trained
    tokens; `sequence_ids_T`: the completion of each token; `tokens`: number of trained tokens of the *global*
    minibatch; `threshold`: least entropy of a token with a loss, with --top_entropy."""
    log_rho_T, A_T = logprobs_T - old_logprobs_T, advantages_T
    rho_T = bounded_exp(log_rho_T)
    loss_T = -torch.min(rho_T * A_T, rho_T.clamp(1 - args.clip_low, 1 + args.clip_high) * A_T)
    c_T = importance_weights(
        old_logprobs_T - rollout_logprobs_T, mask_T, sequence_ids_T, level=args.correction, mode=args.correction_mode,
        low=args.correction_low, high=args.correction_high, keep=args.correction_filter,
    )  # fmt: skip
    loss_T = loss_T * c_T
    if args.top_entropy < 1:
        loss_T = loss_T * (old_entropy_T >= threshold)
    clipped_T = is_clipped(log_rho_T.detach(), A_T, args.clip_low, args.clip_high)
    logged = {"ratio": rho_T.detach(), "clip_ratio/region_mean": clipped_T, "sampling/weight": c_T}
    return loss_T * mask_T / tokens, logged | {"sampling/kept_fraction": c_T > 0}


def entropy_threshold(minibatches: list[list[PackedBatch]], fraction: float) -> float:
    """Return the entropy, in nats, that the top `fraction` of the trained tokens of all ranks reaches, rounded up to
    whole tokens: of 100 tokens and 0.07, the seventh highest (arXiv:2506.01939). Collective."""
    if fraction == 1:
        return -math.inf
    mine = torch.cat([mb.old_entropy_T[mb.loss_mask_T] for mb in chain(*minibatches)]).cpu()
    entropies = torch.cat(distributed.gather_objects(mine)).sort(descending=True).values
    count = math.ceil(fractions.Fraction(str(fraction)) * len(entropies))  # exact: 0.07 * 100 is above 7 in floats
    return entropies[count - 1].item() if count else math.inf


# ---- dynamic sampling ----


def next_draw(kept: int, drawn: int, args: "Args") -> int:
    """Return the number of prompts to draw if `kept` of the `drawn` groups so far have unequal rewards: as few as fill
    the step with a probability of about 0.98 if further groups are unequal as often, at most `--prompts_per_step`, and
    at most what `--max_draws` leaves."""
    step, missing, chance = args.prompts_per_step, args.prompts_per_step - kept, kept / max(1, drawn)
    enough = (n for n in range(missing, step) if n * chance - 2 * math.sqrt(n * chance * (1 - chance)) >= missing)
    return min(next(enough, step), max(1, args.max_draws) * step - drawn)


@dataclass
class Args(LogKLArgs, CorrectionArgs, OnlineArgs):
    lr: Positive[float] = 1e-6
    samples_per_prompt: AtLeast2 = 8
    """completions sampled for each prompt (G): a group, whose rewards are compared"""
    clip_low: BelowOne = 0.2
    """lower clip bound of the importance ratio: 1 - clip_low"""
    clip_high: NotNegative[float] = 0.28
    """upper clip bound of the importance ratio: 1 + clip_high"""
    max_draws: NotNegative[int] = 10
    """maximum prompts drawn for a step, as a multiple of prompts_per_step, to fill it with groups of different rewards;
    0: train on all groups"""
    overlong_buffer: Fraction = 0.2
    """last fraction of max_new_tokens, in which a completion is penalised; 0: off"""
    overlong_penalty: NotNegative[float] = 1.0
    """penalty on the reward of a completion of max_new_tokens; falls linearly to 0 where the buffer begins"""
    mask_truncated: bool = False
    """do not train on truncated completions; their rewards still count in their groups"""
    top_entropy: PositiveFraction = 1.0
    """fraction of tokens with a policy loss, those of highest entropy (arXiv:2506.01939: 0.2); 1: all tokens"""

    def __post_init__(self) -> None:
        if not self.overlong_buffer:
            require_default(self, ("overlong_penalty",), "with --overlong_buffer 0")


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.rollout_ranks * (not args.dry_run), args.nccl_timeout)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and the rewards of their completions ----
    path = resolve_model(args.model, weights=not args.dry_run)
    tokenizer = load_tokenizer(path, args)
    prompts, held_out = load_prompts(args, tokenizer, context_length(path, args))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)
    dry_run(args, path, tokenizer, prompts, held_out, rewards, [path] if args.log_kl else [])

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device)  # trained
    reference = load_reference(policy, args, device) if args.log_kl else None  # frozen
    optimizer = adamw(policy, args)
    rollouts = make_sampler(policy, prompts, args, tokenizer, rewards)  # vLLM, here or on rollout ranks

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps, curves = num_steps(args, prompts), (*CURVES, "dynamic_sampling/unequal_fraction")
    run = Run(args, policy, optimizer, tokenizer, total_steps, rollouts=rollouts, show=SHOW, curves=curves)
    run.message(*describe_rollouts(args, prompts, held_out, rollouts))
    meter, needs_old = run.meter, args.updates_per_rollout > 1 or args.top_entropy < 1
    if run.first_step == 0:
        run.log(0, statistics.evaluate(rollouts, 0, held_out, rewards))

    for step in run.steps():
        # ---- 1. rollout and rewards, until enough groups have unequal rewards (dynamic sampling) ----
        groups, draws, parts, kept, drawn = {}, [], [], [], 0  # groups: of this rank, by their positions in the step
        while len(kept) < args.prompts_per_step and (size := next_draw(len(kept), drawn, args)) > 0:
            fresh = rollouts.rollout(step, total_steps, meter, size)
            if fresh is None:  # a stop was requested
                break
            with meter.time("reward"):
                scores_PG, parts_of_draw, _ = rewards(fresh, meter)
            statistics.measure_groups(meter, fresh, scores_PG, parts_of_draw, first=step == drawn == 0)
            penalties_PG = statistics.truncation_penalties(fresh, args.missing_eos_penalty)
            penalties_PG = penalties_PG + overlong_penalties(statistics.lengths(fresh), args)
            mine = torch.stack([scores_PG, scores_PG + penalties_PG], dim=1)
            draws.append(statistics.gather_groups(mine, rollouts.positions))
            parts.append(parts_of_draw)
            scores_BG, rewards_BG = torch.cat(draws).unbind(1)
            groups |= zip((drawn + i for i in rollouts.positions), fresh, strict=True)
            unequal_B = unequal(scores_BG) | (args.max_draws == 0)
            kept, drawn = unequal_B.nonzero()[:, 0].tolist()[: args.prompts_per_step], len(unequal_B)
        if fresh is None:
            break
        if not kept:
            what = f"no group has unequal rewards after --max_draws {args.max_draws}"
            raise distributed.RunError(f"step {step + 1}: {what}")

        # ---- 2. advantages; pack the kept groups; log-probs of the policy before its updates ----
        advantages_BG = advantages(rewards_BG)
        advantages_BG[[i for i in range(drawn) if i not in kept]] = 0.0  # samples.jsonl has all groups that were drawn
        advantages_PG = advantages_BG[[i for i in kept if i in groups]]
        kept_groups = [groups.get(i, []) for i in kept]  # the same positions on every rank; empty: of another rank
        if args.mask_truncated:
            kept_groups = [
                [replace(s, loss_mask=[m and s.finish_reason != "length" for m in s.loss_mask]) for s in group]
                for group in kept_groups
            ]
        count = min(args.minibatches, len(kept))
        minibatches = pack_minibatches(kept_groups, count, args.pack_tokens, device)
        with meter.time("logprobs"):  # on policy the log-probs of the update itself can serve as old ones
            old = policy if needs_old or run.checks_engine(step) else None
            minibatches = with_logprobs(minibatches, args.temperature, old=old, ref=reference)
        if run.checks_engine(step):
            statistics.check_agreement(minibatches, step, args, device)
        threshold = entropy_threshold(minibatches, args.top_entropy)

        # ---- 3. update: one optimizer step per minibatch ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            for minibatch in minibatches * args.epochs_per_rollout:
                tokens, _ = statistics.count_trained(minibatch)  # of the *global* minibatch
                minibatch_loss = torch.zeros((), device=device)
                for mb in minibatch:
                    logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
                    old_logprobs_T = logprobs_T.detach() if mb.old_logprobs_T is None else mb.old_logprobs_T
                    share_T, logged = loss(
                        logprobs_T, old_logprobs_T, mb.rollout_logprobs_T, mb.old_entropy_T,
                        mb.on_tokens(advantages_PG), mb.loss_mask_T, mb.sequence_ids_T, tokens, threshold, args,
                    )  # fmt: skip
                    if mb.ref_logprobs_T is not None:
                        logged["kl"] = kl_estimate(logprobs_T.detach(), mb.ref_logprobs_T)
                    (share_T.sum() * world_size).backward()  # FSDP averages gradients over ranks; undo that
                    minibatch_loss += share_T.detach().sum()
                    meter.tokens(mb, {"entropy": entropy_T} | logged, share_T)
                    statistics.measure_mismatch(meter, old_logprobs_T, mb)
                meter.mean("grad_norm", optimizer_step(policy, optimizer, lr, args.max_grad_norm, minibatch_loss))
                meter.mean("loss", minibatch_loss, 1 / world_size)  # the loss is the sum over ranks

        # ---- 4. log and evaluate ----
        metrics = run.reduce((sample for mb in chain(*minibatches) for sample in mb.samples), lr=lr)
        metrics["dynamic_sampling/draws"] = drawn / args.prompts_per_step
        metrics["dynamic_sampling/unequal_fraction"] = float(unequal_B.double().mean())
        if run.evaluates(step + 1):
            metrics |= statistics.evaluate(rollouts, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        mine = list(groups)
        parts = {name: torch.cat([of_draw[name] for of_draw in parts]) for name in parts[0]}
        run.show_samples(step + 1, list(groups.values()), mine, scores_BG[mine], advantages_BG[mine], parts)

    run.end()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.leave()
