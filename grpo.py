r"""GRPO: reinforcement learning with verifiable rewards (Shao et al. 2024, arXiv:2402.03300).

    torchrun --nproc_per_node 8 grpo.py --config configs/qwen3_1.7b_grpo.yaml

The policy samples G completions of every prompt. Each is compared with the others of its group:

    A_i   = (r_i - mean(r_1..r_G)) / std(r_1..r_G)                                      advantages()
    L     = mean_t [ -c_t min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i)
                     + beta KL_t ]                                                            loss()
    rho_t = pi(y_t) / pi_old(y_t)                              pi_old: the policy before the updates

`--loss` (common/objectives/policy.py), `--reduction` and `--advantage` (reduction.py, advantages.py
beside it) select a variant; `--preset` selects that of a paper (GSPO, Dr. GRPO, ...). The default
differs from the paper: mean over all tokens and clip bounds as in DAPO (arXiv:2503.14476), no KL
term, weights c_t = min(pi_old / pi_engine, 2). Its core in 120 lines: course/lessons/nano_grpo.py.

Shapes: P prompts on this rank, B on all ranks, G completions per prompt, T packed tokens of a
micro-batch. Per-token tensors are aligned with the *targets*: x_T[t] is about targets_T[t]."""

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import AtLeast2, BelowOne, Needs, NotNegative, Positive
from common.config.groups import ImageArgs
from common.config.online import OnlineArgs
from common.config.parse import parse
from common.evaluate.held_out import evaluate_prompts
from common.model.hub import longest_sequence, resolve_model
from common.model.policy import load_policy, load_reference
from common.model.scoring import with_logprobs
from common.objectives.advantages import EPSILON, VARIANTS, centre_groups, group_std
from common.objectives.importance import CorrectionArgs, bounded_exp, importance_weights, is_clipped
from common.objectives.kl import KLEstimateArgs, KLEstimator, LogKLArgs, kl_estimate
from common.objectives.policy import BY_COMPLETION, POLICY_LOSSES, PolicyInputs, PolicyLoss
from common.objectives.reduction import token_weights
from common.packs.packing import count_trained, pack_minibatches
from common.parallel import distributed
from common.rewards.total import Rewards, without_unscored
from common.rollout.agreement import measure_mismatch, require_agreement
from common.rollout.engine import EngineOptions, TruncationArgs
from common.rollout.measure import measure_groups, truncation_penalties
from common.rollout.prompts import load_prompts
from common.rollout.sampler import make_sampler, serve
from common.text.tokenizer import load_tokenizer
from common.train.optim import adamw, optimizer_step
from common.train.overview import CURVES, SHOW, describe_rollouts, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

PPO_CLIP = dict(loss="clip", clip_low=0.2, clip_high=0.2)  # bounds of most presets
# defaults of --clip_low and --clip_high, from the papers
CLIP_BOUNDS = dict(clip=(0.2, 0.28), gspo=(3e-4, 4e-4), gmpo=(0.4, 0.4))
GSPO = dict(loss="gspo", clip_low=CLIP_BOUNDS["gspo"][0], clip_high=CLIP_BOUNDS["gspo"][1])
GMPO = dict(loss="gmpo", clip_low=CLIP_BOUNDS["gmpo"][0], clip_high=CLIP_BOUNDS["gmpo"][1])

# ---- the objective ----


def advantages(rewards_BG: Tensor) -> Tensor:
    """Return the advantage of every completion of all ranks, [B, G] float64. Statistics ignore
    missing rewards (NaN), which get 0. A group of equal rewards gets exactly 0."""
    return centre_groups(rewards_BG) / (group_std(rewards_BG) + EPSILON)


def clip(x: PolicyInputs) -> PolicyLoss:
    """Return loss, rho and clipping per token. The same in five scripts; a test compares them."""
    rho_T = bounded_exp(x.log_rho_T)
    clipped_T = rho_T.clamp(1 - x.clip_low, 1 + x.clip_high)
    loss_T = -torch.min(rho_T * x.A_T, clipped_T * x.A_T)
    return PolicyLoss(loss_T, rho_T, is_clipped(x.log_rho_T, x.A_T, x.clip_low, x.clip_high))


ADVANTAGES = {"group": advantages} | VARIANTS  # by --advantage
LOSSES = {"clip": clip} | POLICY_LOSSES  # by --loss


def loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor,
    ref_logprobs_T: Tensor | None, entropy_T: Tensor, advantages_T: Tensor, mask_T: Tensor,
    sequence_ids_T: Tensor, num_tokens: Tensor, num_sequences: Tensor, args: "Args",
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return each token's share of the objective L, to be minimised, and per-token tensors to log:

        L = sum_t w_t (c_t policy_loss_t + beta KL_t - entropy_coef H_t)

    The shares of all micro-batches and ranks add up to a mean over the *global* minibatch of
    `num_tokens` trained tokens in `num_sequences` completions. c_t = pi_old / pi_engine, bounded,
    without gradient. `mask_T`: trained tokens; `sequence_ids_T`: number of the completion."""
    low, high = args.clip_bounds
    x = PolicyInputs(logprobs_T, old_logprobs_T, advantages_T, mask_T, sequence_ids_T, low, high)
    policy_T, ratio_T, stopped_T = LOSSES[args.loss](x)
    correction = args.correction_form(args.loss in BY_COMPLETION)
    c_T = importance_weights(old_logprobs_T, rollout_logprobs_T, mask_T, sequence_ids_T, correction)
    loss_T = policy_T * c_T
    logged = {
        "ratio": ratio_T.detach(),
        "clip_ratio/region_mean": stopped_T,
        "sampling/weight": c_T,
    }
    if ref_logprobs_T is not None:
        kl_T = kl_estimate(logprobs_T, ref_logprobs_T, args.kl_estimator)
        loss_T = loss_T + args.beta * kl_T
        logged["kl"] = kl_T
    if args.entropy_coef:  # skipped at 0: its backward pass reads all logits again
        loss_T = loss_T - args.entropy_coef * entropy_T
    w_T = token_weights(
        args.reduction, mask_T, sequence_ids_T, num_tokens, num_sequences, args.max_new_tokens
    )
    return loss_T * w_T, logged


@dataclass
class Args(ImageArgs, KLEstimateArgs, LogKLArgs, CorrectionArgs, TruncationArgs, OnlineArgs):
    PRESETS: ClassVar[dict[str, dict]] = {
        "grpo": PPO_CLIP | dict(reduction="sequence", advantage="group", beta=0.04,
                                kl_estimator="k3"),
        "dr_grpo": PPO_CLIP | dict(reduction="constant", advantage="group_mean"),
        "maxrl": PPO_CLIP | dict(reduction="token", advantage="group_ratio"),
        "dppo": dict(loss="dppo", reduction="constant", advantage="group_mean",
                     old_logprobs="engine", correction="none"),
        "cispo": dict(loss="cispo", reduction="token", advantage="group"),
        "sapo": dict(loss="sapo", reduction="sequence", advantage="group"),
        "liteppo": PPO_CLIP | dict(reduction="token", advantage="group_mean_batch_std"),
        "gspo": GSPO | dict(reduction="sequence", advantage="group"),
        "luspo": GSPO | dict(reduction="sequence_sum", advantage="group"),
        "gmpo": GMPO | dict(reduction="sequence", advantage="group"),
        "topr": dict(loss="topr", reduction="sequence_sum", advantage="group_mean"),
    }  # fmt: skip
    samples_per_prompt: AtLeast2 = 8
    lr: Positive[float] = 1e-6
    preset: Literal[tuple(PRESETS)] | None = None
    """set the flags of a published variant (docs/grpo.md); contradicting flags are an error"""
    loss: Literal[tuple(LOSSES)] = "clip"
    """minimise this policy loss (docs/losses.md). By the ratio of a token: clip: PPO; dppo: bounded
    divergence; cispo: clips the weight of the gradient; sapo: soft clip; reinforce: -A log pi,
    without ratio. By the ratio of a completion: gspo: clip of its geometric mean over tokens; gmpo:
    geometric mean of clipped token ratios; topr: clips the ratio if A < 0"""
    reduction: Literal["token", "sequence", "sequence_sum", "constant"] = "token"
    """reduce the loss of tokens. token: mean over tokens; sequence: mean over completions of their
    means; sequence_sum: of their sums; constant: of their sums / max_new_tokens"""
    advantage: Literal[tuple(ADVANTAGES)] = "group"
    """compute advantages from rewards r. group: (r - mean) / std; group_mean: r - mean;
    group_ratio: (r - mean) / mean; group_mean_batch_std: (r - mean) / std of the batch"""
    clip_low: Annotated[BelowOne | None, Needs(loss=tuple(CLIP_BOUNDS))] = None
    """clip the ratio below 1 - clip_low; gmpo: a token's log-ratio below -clip_low; default: clip
    0.2, gspo 3e-4, gmpo 0.4"""
    clip_high: Annotated[NotNegative[float] | None, Needs(loss=tuple(CLIP_BOUNDS))] = None
    """clip above 1 + clip_high; gmpo: clip_high; default: clip 0.28, gspo 4e-4, gmpo 0.4"""
    beta: NotNegative[float] = 0.0
    """add the KL to the starting model to the loss with this weight; 0: no reference model"""
    kl_estimator: KLEstimator = "k3"
    entropy_coef: NotNegative[float] = 0.0
    """add an entropy bonus with this weight, reduced over tokens like the loss (--reduction)"""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """take pi_old from the trainer, before the first update, or from the engine's log-probs"""

    def __post_init__(self) -> None:
        if self.loss in BY_COMPLETION and self.reduction not in ("sequence", "sequence_sum"):
            problem = "a loss by completion needs sequence or sequence_sum"
            raise ValueError(f"--loss {self.loss} --reduction {self.reduction}: {problem}")
        self.correction_form(self.loss in BY_COMPLETION)  # refuses a weight per token
        if self.old_logprobs == "engine" and self.correction != "none":
            raise ValueError("--correction must be none with --old_logprobs engine")
        if self.truncation and self.top_k == 0:
            problem = "training keeps what each token could be"
            raise ValueError(f"--top_p {self.top_p} --min_p {self.min_p}: {problem}; give --top_k")
        if self.top_k and self.agent:
            raise ValueError(f"--top_k {self.top_k} --agent: not for agents; leave out --top_k")

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """clip_low and clip_high, or the defaults of the loss."""
        low, high = CLIP_BOUNDS.get(self.loss, (0.0, 0.0))
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    def cautions(self) -> Iterator[str]:
        """Yield warnings about flags with unexpected effects."""
        if self.beta and self.kl_estimator == "k1":
            yield "--kl_estimator k1: the expected gradient is zero and constrains nothing"
        if self.loss == "reinforce" and self.updates_per_rollout > 1:
            yield "--loss reinforce: the gradient is biased after the first update of a rollout"


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.live_rollout_ranks)
    options = EngineOptions(image_args=args, truncation_args=args, support=args.top_k)
    if distributed.is_rollout_rank():
        return serve(args, device, options)  # generates until training ends
    prepare_output_dir(args, args.dry_run)

    # ---- data: prompts as token ids, and the rewards of their completions ----
    needs_reference = args.beta > 0 or args.log_kl
    needs_old = args.old_logprobs == "trainer"
    path = resolve_model(args.model, weights=not args.dry_run)
    tokenizer = load_tokenizer(path, args)
    prompts, held_out = load_prompts(args, tokenizer, longest_sequence(path, args), image_args=args)
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device, args.dry_run)
    if args.dry_run:
        frozen = [path] if needs_reference else []
        return dry_run(args, path, tokenizer, prompts, held_out, rewards, frozen, image_args=args,
                       own_forwards=1 - 1 / args.minibatches if needs_old else 0)  # fmt: skip
    begin_run(args, prompts.rows, held_out.rows)

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device, image_args=args)  # trained
    reference = load_reference(policy, args, device) if needs_reference else None  # frozen
    optimizer = adamw(policy, args)
    sampler = make_sampler(policy, prompts, args, tokenizer, rewards.begin, options)

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, prompts)
    run = Run(
        args, policy, optimizer, tokenizer, total_steps,
        sampler=sampler,
        show=SHOW, curves=CURVES,
    )  # fmt: skip
    run.message(*describe_rollouts(args, prompts, held_out, sampler, args.preset), *args.cautions())
    meter = run.meter
    if run.first_step == 0:
        run.log(0, evaluate_prompts(sampler, 0, held_out, rewards))

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. rollout: G completions of each of P prompts; their rewards begin meanwhile ----
        rollout = sampler.rollout(step, total_steps, meter)  # syncs weights, then samples
        if rollout is None:  # a stop was requested
            break
        groups, positions = rollout.groups, rollout.positions  # P of the B groups

        # ---- 2. rewards: wait for the last ones; advantages: from the rewards of all ranks ----
        with meter.time("reward"):
            rewards_PG, named_rewards, _ = rewards.wait(groups, meter)
        measure_groups(meter, groups, rewards_PG, named_rewards, warn=step == 0)
        penalties_PG = truncation_penalties(groups, args.missing_eos_penalty)
        scores_BG = distributed.gather_rows(rewards_PG + penalties_PG, positions)
        advantages_BG = ADVANTAGES[args.advantage](scores_BG).to(device)

        # ---- 3. pack: completions move to the ranks that train on them; fixed log-probs ----
        trained = without_unscored(groups, rewards_PG)
        minibatches = pack_minibatches(
            trained, positions, args.minibatches, args.pack_tokens, device, policy.share_prefix
        )
        checks_engine = run.checks_engine(step)
        old = policy if checks_engine or needs_old else None
        with meter.time("logprobs"):
            minibatches = with_logprobs(
                minibatches, args.temperature, old=old, ref=reference, old_of_first=checks_engine
            )
        if checks_engine:
            require_agreement(minibatches, step, args, device)

        # ---- 4. update: one optimizer step per minibatch; a loss of nan or inf stops the run ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            for n, minibatch in enumerate(minibatches * args.epochs_per_rollout):
                num_tokens, num_sequences = count_trained(minibatch)  # on all ranks
                total_loss = torch.zeros((), device=device)
                for mb in minibatch:
                    logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
                    if n == 0:  # before the first update pi_old is pi
                        mb.old_logprobs_T = logprobs_T.detach()
                    old_logprobs_T = mb.old_logprobs_T if needs_old else mb.rollout_logprobs_T
                    share_T, logged = loss(
                        logprobs_T, old_logprobs_T, mb.rollout_logprobs_T, mb.ref_logprobs_T,
                        entropy_T, mb.on_tokens(advantages_BG), mb.loss_mask_T, mb.sequence_ids_T,
                        num_tokens, num_sequences, args,
                    )  # fmt: skip
                    # FSDP averages gradients over ranks; undo that.
                    (share_T.sum() * world_size).backward()
                    total_loss += share_T.detach().sum()
                    meter.tokens(mb, {"entropy": entropy_T} | logged, share_T)
                    if mb.old_logprobs_T is not None:  # else pi_old is the engine's
                        measure_mismatch(meter, mb.old_logprobs_T, mb)
                grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, total_loss)
                meter.mean("grad_norm", grad_norm)
                meter.sum_over_ranks("loss", total_loss)

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
