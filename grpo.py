"""GRPO and its family, reinforcement learning with verifiable rewards (Shao et al. 2024, arXiv:2402.03300).

    torchrun --nproc_per_node 8 grpo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k --reward gsm8k --preset gspo

Several completions of each prompt are sampled and rewarded; a completion's advantage is how much better it did than its
group, and PPO's clipped loss makes the better ones more likely. No value model, and no reference unless `--beta`. The
family differs in the loss, in what a token counts, and in the advantage: a flag for each, a `--preset` for a paper's.
dapo.py and reinforce.py go on from here.

Differences from the paper, without a preset: the loss is a mean over the tokens of the whole global batch and the clip
bounds differ (both DAPO, arXiv:2503.14476), KL to the reference is off, and the probabilities of engine and trainer are
reconciled by truncated importance weights. See docs/grpo.md.

Shapes: P prompts on this rank, B prompts of the step on all ranks, G samples per prompt, K rewards, T packed tokens in
one micro-batch. Every per-token stream is aligned with *targets*: x_T[t] describes targets_T[t].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

import torch
from torch import Tensor

from common.config.flags import AtLeast2, BelowOne, NotNegative, Positive, require_flags_read, with_flags
from common.config.groups import OnlineArgs, SamplingArgs, TrainArgs
from common.config.parse import parse
from common.data.packing import PackedBatch, pack_minibatches, to_samples
from common.model.hub import context_length, load_tokenizer, resolve_model
from common.model.logprobs import add_logprobs
from common.model.lora import LoRAArgs
from common.model.policy import load_policy, load_reference
from common.objectives import advantages
from common.objectives import policy as losses
from common.objectives.importance import CorrectionArgs, correction_weights, off_policy_mask
from common.objectives.shaping import truncation_penalties
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout import statistics
from common.rollout.prompts import load_prompts
from common.rollout.remote_sampler import make_rollouts, serve
from common.train.checkpoint import prepare_output_dir
from common.train.optim import adamw, optimizer_step
from common.train.run import Run

# --loss: the function, and of what its importance ratio is, on each token (docs/grpo.md has the formulas).
TOKEN, MEAN, SUM = (lambda mb, x_T: x_T), PackedBatch.sequence_mean_T, PackedBatch.sequence_sum_T
LOSSES = {
    "clip": (losses.clip_policy_loss, TOKEN),
    "reinforce": (losses.reinforce_loss, TOKEN),
    "cispo": (losses.cispo_loss, TOKEN),
    "sapo": (losses.sapo_loss, TOKEN),
    "gspo": (losses.clip_policy_loss, MEAN),
    "sequence_clip": (losses.clip_policy_loss, SUM),
    "topr": (losses.topr_loss, SUM),
    "vespo": (losses.vespo_loss, SUM),
}
# --advantage: of the rewards of all ranks, [B, G]; gdpo looks at them one by one.
ADVANTAGES = {
    "group": advantages.group_advantages,
    "group_mean": advantages.group_mean,
    "group_mean_batch_std": advantages.group_mean_batch_std,
    "leave_one_out": advantages.leave_one_out,
}
PAPER_CLIP = dict(clip_low=0.2, clip_high=0.2)


@dataclass
class Args(CorrectionArgs, OnlineArgs, SamplingArgs, LoRAArgs, TrainArgs):
    PRESETS: ClassVar[dict[str, dict]] = {
        "grpo": dict(loss="clip", reduction="sequence", advantage="group", beta=0.04, **PAPER_CLIP),
        "dr_grpo": dict(loss="clip", reduction="constant", advantage="group_mean", **PAPER_CLIP),
        "gspo": dict(loss="gspo", reduction="sequence", advantage="group", clip_low=3e-4, clip_high=4e-4,
                     correction="sequence"),
        "cispo": dict(loss="cispo", reduction="token", advantage="group"),
        "sapo": dict(loss="sapo", reduction="sequence", advantage="group"),
        "topr": dict(loss="topr", reduction="sequence_sum", advantage="group_mean"),
        "liteppo": dict(loss="clip", reduction="token", advantage="group_mean_batch_std", **PAPER_CLIP),
        "gdpo": dict(loss="clip", reduction="token", advantage="gdpo", **PAPER_CLIP),
    }  # fmt: skip
    """what `--preset` may name, and the flags that each sets"""
    RENAMED_PRESETS: ClassVar[dict[str, str]] = {
        "dapo": "python dapo.py",
        "reinforce": "python reinforce.py --preset reinforce",
        "reinforce++": "python reinforce.py --preset reinforce++",
        "reinforce++_baseline": "python reinforce.py --preset reinforce++_baseline",
    }
    """presets that are scripts of their own"""
    output_dir: str = "runs/grpo"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/"""
    samples_per_prompt: AtLeast2 = 8
    """completions sampled for each prompt (G): a group, whose members are compared"""
    lr: Positive[float] = 1e-6
    """peak learning rate of AdamW"""
    preset: Literal[tuple(PRESETS)] | None = None
    """the flags of a published variant, see docs/grpo.md; one that is also given with another value is an error"""
    loss: Literal[tuple(LOSSES)] = "clip"
    """what is minimised for each token: the table in docs/grpo.md, `LOSSES` above"""
    reduction: losses.Reduction = "token"
    """mean over: tokens; completions, of their means (sequence) or sums; or sum / (completions x max_new_tokens)"""
    advantage: Literal[*ADVANTAGES, "gdpo"] = "group"
    """how rewards become advantages: the table in docs/grpo.md, `ADVANTAGES` above"""
    clip_low: BelowOne = 0.2
    """clip, gspo, sequence_clip: the importance ratio is clipped below at 1 - clip_low"""
    clip_high: NotNegative[float] = 0.28
    """clip, gspo, sequence_clip: the importance ratio is clipped above at 1 + clip_high"""
    dual_clip: NotNegative[float] = 0.0
    """clip, gspo, sequence_clip: a negative advantage's loss is at most dual_clip |A| (above 1; usual: 3); 0: not"""
    cispo_high: Positive[float] = 4.0
    """cispo: the weight of a token is at most 1 + cispo_high"""
    sapo_tau_positive: Positive[float] = 1.0
    """sapo: temperature of the gate for positive advantages"""
    sapo_tau_negative: Positive[float] = 1.05
    """sapo: temperature of the gate for the others"""
    vespo_k_positive: NotNegative[float] = 2.0
    """vespo: for advantages >= 0, how fast the weight falls as the completion's ratio goes below 1"""
    vespo_lambda_positive: NotNegative[float] = 3.0
    """vespo: for advantages >= 0, how fast it falls as the ratio goes above 1"""
    vespo_k_negative: NotNegative[float] = 3.0
    """vespo: vespo_k_positive for the others"""
    vespo_lambda_negative: NotNegative[float] = 2.0
    """vespo: vespo_lambda_positive for the others"""
    off_policy_threshold: Positive[float] | None = None
    """completions with a negative advantage have no loss where the mean over their tokens of log(policy that sampled /
    present policy) is above this (arXiv:2512.02556 Eq. 9)"""
    beta: NotNegative[float] = 0.0
    """weight of the KL to the starting model on each token of the loss; 0 never loads that model"""
    kl_estimator: losses.KLEstimator = "k3"
    """estimate of the KL per token: k1, k2 or k3"""
    kl_clamp: NotNegative[float] = 0.0
    """the estimate is clamped to [-kl_clamp, kl_clamp] on each token; 0: not"""
    unbiased_kl: bool = False
    """the estimate is multiplied by the token's importance ratio, gradient and all (arXiv:2512.02556)"""
    entropy_coef: NotNegative[float] = 0.0
    """weight of the entropy bonus, which is reduced as the loss is (--reduction)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_flags_read(self, {name: function for name, (function, _) in LOSSES.items()}, self.loss)
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"--dual_clip {self.dual_clip} must be above 1, or 0 for none")
        if self.loss in ("gspo", "sequence_clip"):
            for flag, fits in (("reduction", "sequence"), ("correction", "sequence or none")):
                if (value := getattr(self, flag)) not in fits.split(" or "):
                    raise ValueError(f"--loss {self.loss} is of whole completions: --{flag} {fits}, not {value}")
        for flag in ("kl_estimator", "kl_clamp", "unbiased_kl"):
            self.require_read(flag, self.beta > 0, "--beta is 0")


def completion_advantages(
    name: str, rewards_PG: Tensor, parts_KPG: Tensor, weights_K: Sequence[float], positions: Sequence[int]
) -> Tensor:
    """`--advantage` of this rank's completions, [P, G], with the statistics of all ranks'. Collective."""
    if name == "gdpo":
        parts_PKG = parts_KPG.masked_fill(rewards_PG.isnan(), math.nan).transpose(0, 1)
        advantages_BG = advantages.gdpo(statistics.gather_groups(parts_PKG, positions).transpose(0, 1), weights_K)
    else:
        advantages_BG = ADVANTAGES[name](statistics.gather_groups(rewards_PG, positions))
    return advantages_BG[list(positions)]


def main(args: Args) -> None:
    # ---- setup: one process per GPU, identical Args everywhere ----
    device, _, world_size = distributed.setup(args.seed, args.rollout_ranks, args.nccl_timeout)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until the others are done
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and what the rewards need beside them ----
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path, args)
    prompts, held_out = load_prompts(args, tokenizer, context_length(path, args))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)
    total_steps = args.max_steps or math.ceil(args.epochs * len(prompts) / args.prompts_per_step)

    # ---- models: FSDP2 shards train; vLLM samples, in the same process or on the rollout ranks ----
    model = load_policy(path, args, device)
    reference = load_reference(model, args, device) if args.beta else None
    optimizer = adamw(model, args)
    rollouts = make_rollouts(model, prompts, args, tokenizer, device, rewards)

    # ---- the objective, its floats bound to the flags of their names ----
    function, ratio_of = LOSSES[args.loss]
    policy_loss, correction = with_flags(function, args), with_flags(correction_weights, args)
    keep = with_flags(off_policy_mask, args)
    kl_estimate, weights_of = with_flags(losses.kl_estimate, args), with_flags(losses.reduction_weights, args)
    outside_clip, cut_off = with_flags(losses.clipped, args), with_flags(truncation_penalties, args)

    # ---- resume: everything else is a function of (seed, step) ----
    run = Run(
        args, model, optimizer, tokenizer, total_steps, rollouts=rollouts,
        show=("reward", "eval/pass_at_1", "completions/mean_length", "time/step"),
        curves=("reward", *(f"rewards/{name}/mean" for name in rewards.scorers), "eval/pass_at_1", "entropy",
                "completions/mean_length", "grad_norm", "sampling/sampling_logp_difference/max"),
    )  # fmt: skip
    meter, updates = run.meter, args.minibatches * args.epochs_per_rollout
    how = "on-policy" if updates == 1 and not rollouts.ahead else f"off-policy, {updates} updates per rollout"
    run.message(f"{prompts}, {held_out} held out, {total_steps} steps on {world_size} ranks, {rollouts}, {how}")
    if args.preset:
        flags = " ".join(f"--{flag} {value}" for flag, value in args.PRESETS[args.preset].items())
        run.message(f"preset {args.preset}: {flags}")
    if args.beta and args.kl_estimator == "k1":
        run.message("--kl_estimator k1 in the loss: its gradient is zero on average, it does not hold the policy")
    if args.loss == "reinforce" and updates > 1:
        run.message(f"--loss reinforce has no ratio: after the first of {updates} updates its gradient is biased")
    if held_out and run.first_step == 0:
        run.log(0, statistics.evaluate(rollouts, 0, held_out, rewards))

    for step in run.steps():
        # ---- 1. rollout, by the weights we are about to update or, with --rollout_ranks, somewhat older ones ----
        with meter.time("step"):
            rollouts.submit(step, total_steps)
            groups = rollouts.collect(step, meter)
            if groups is None:  # told to stop
                break

            # ---- 2. reward, and advantage: how much better than the rest of its group ----
            with meter.time("reward"):
                rewards_PG, parts = rewards(groups, meter)
            statistics.measure_groups(meter, groups, rewards_PG, parts, first=step == 0)
            penalties_PG = cut_off(statistics.truncated(groups))
            parts_KPG = torch.stack([*parts.values(), penalties_PG])
            advantages_PG = completion_advantages(
                args.advantage, rewards_PG + penalties_PG, parts_KPG, [*rewards.weights, 1.0], rollouts.positions
            )
            to_samples(groups, advantage=advantages_PG)  # the packer lays it on each token

            # ---- 3. pack; log-probs of the policy that sampled and of the reference ----
            minibatches = pack_minibatches(groups, args.minibatches, args.pack_tokens, device)
            with meter.time("logprobs"):
                if updates > 1 or run.checks_engine(step):  # else the update's own forward will do
                    add_logprobs("old", model, minibatches, args.temperature)
                if reference is not None:
                    add_logprobs("ref", reference, minibatches, args.temperature)
            if run.checks_engine(step):
                statistics.check_agreement(minibatches, step, args, device)

            # ---- 4. update: one optimizer step per minibatch ----
            with meter.time("train"):
                for minibatch in minibatches * args.epochs_per_rollout:
                    # Denominators count the *global* minibatch, before the first backward.
                    tokens, sequences = statistics.count_trained(minibatch)
                    minibatch_loss = torch.zeros((), device=device)
                    for mb in minibatch:
                        logprobs_T, entropy_T, *_ = model(mb, temperature=args.temperature)
                        if mb.old_logprobs_T is None:  # on-policy: the ratio is 1, its gradient is not 0
                            mb.old_logprobs_T = logprobs_T.detach()
                        log_ratio_T = ratio_of(mb, logprobs_T) - ratio_of(mb, mb.old_logprobs_T)
                        engine_T = mb.old_logprobs_T - mb.rollout_logprobs_T
                        mb.correction_T = correction(engine_T, mb.loss_mask_T, mb.sequence_ids_T)
                        keep_T = keep(
                            logprobs_T, mb.rollout_logprobs_T, mb.advantages_T, mb.loss_mask_T, mb.sequence_ids_T
                        )
                        loss_T = policy_loss(log_ratio_T, mb.advantages_T, logprobs_T) * mb.correction_T * keep_T
                        if reference is not None:
                            kl_T = kl_estimate(logprobs_T, mb.ref_logprobs_T, mb.old_logprobs_T)
                            loss_T = loss_T + args.beta * kl_T
                            meter.masked_mean("kl", kl_T, mb.loss_mask_T)
                        if args.entropy_coef:  # not times 0: the entropy's backward is another pass over the logits
                            loss_T = loss_T - args.entropy_coef * entropy_T
                        loss = (loss_T * weights_of(mb.loss_mask_T, mb.lengths_T, tokens, sequences)).sum()
                        (loss * world_size).backward()  # FSDP averages gradients over ranks; undo that
                        minibatch_loss += loss.detach()
                        statistics.measure_update(meter, mb, entropy_T)
                        if function is losses.clip_policy_loss:
                            clipped_T = outside_clip(log_ratio_T.detach(), mb.advantages_T)
                            meter.masked_mean("clip_ratio/region_mean", clipped_T, mb.loss_mask_T)
                    lr = run.learning_rate(step)
                    meter.mean("grad_norm", optimizer_step(model, optimizer, lr, args.max_grad_norm, minibatch_loss))
                    meter.mean("loss", minibatch_loss, 1 / world_size)

        # ---- 5. log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr, beta=args.beta)
        if held_out and run.evaluates(step + 1):
            metrics |= statistics.evaluate(rollouts, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        run.show_samples(step + 1, groups, rollouts.positions)

    run.end()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
