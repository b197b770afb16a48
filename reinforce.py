"""REINFORCE for language models (Williams 1992) and REINFORCE++ (Hu et al. 2025, arXiv:2501.03262).

    torchrun --nproc_per_node 8 reinforce.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k --reward gsm8k

-A log p(token) makes what was rewarded more likely; A is the completion's reward less a baseline. REINFORCE++ needs no
group: the reward, less beta times the KL of the completion, is whitened over all tokens of the batch, and PPO's clip
allows several updates of a rollout. Its variant with a baseline subtracts the group's mean first and puts the KL into
the loss. `--preset` has the three as published; beta may follow the KL.

Differences from the papers: the whole completion's KL is taken from its reward where REINFORCE++ takes at each token
what is still to come (the same mean, more variance), and engine and trainer are reconciled by truncated importance
weights. See docs/reinforce.md.

Shapes: P prompts on this rank, B prompts of the step on all ranks, G samples per prompt, N completions and T packed
tokens in one micro-batch. Every per-token stream is aligned with *targets*: x_T[t] describes targets_T[t].
"""

import math
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

import torch

from common.config.flags import BelowOne, NotNegative, Positive, require_flags_read, with_flags
from common.config.groups import OnlineArgs, SamplingArgs, TrainArgs
from common.config.parse import parse
from common.data.packing import of_samples, pack_minibatches, to_samples
from common.model.hub import context_length, load_tokenizer, resolve_model
from common.model.logprobs import add_logprobs
from common.model.lora import LoRAArgs
from common.model.policy import load_policy, load_reference
from common.objectives import policy as losses
from common.objectives.advantages import leave_one_out, reinforce_plus_plus, reinforce_plus_plus_baseline
from common.objectives.importance import CorrectionArgs, correction_weights
from common.objectives.shaping import KLCoefficient, RewardArgs, shape_rewards, truncation_penalties
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout import statistics
from common.rollout.prompts import load_prompts
from common.rollout.remote_sampler import make_rollouts, serve
from common.train.checkpoint import prepare_output_dir
from common.train.optim import adamw, optimizer_step
from common.train.run import Run

LOSSES = {"clip": losses.clip_policy_loss, "reinforce": losses.reinforce_loss}
# --advantage: of the rewards of all ranks' groups, [B, G], and of how many tokens of each completion are trained.
ADVANTAGES = {
    "reinforce++": reinforce_plus_plus,
    "reinforce++_baseline": reinforce_plus_plus_baseline,
    "leave_one_out": lambda rewards_BG, _: leave_one_out(rewards_BG),
}


@dataclass
class Args(RewardArgs, CorrectionArgs, OnlineArgs, SamplingArgs, LoRAArgs, TrainArgs):
    PRESETS: ClassVar[dict[str, dict]] = {
        "reinforce": dict(loss="reinforce", reduction="sequence_sum", advantage="leave_one_out", beta=0.0,
                          minibatches=1, epochs_per_rollout=1),
        "reinforce++": dict(loss="clip", reduction="token", advantage="reinforce++", beta=0.01, kl_in="reward",
                            kl_estimator="k1", clip_low=0.2, clip_high=0.2),
        "reinforce++_baseline": dict(loss="clip", reduction="token", advantage="reinforce++_baseline", beta=0.01,
                                     kl_in="loss", kl_estimator="k2", clip_low=0.2, clip_high=0.2),
    }  # fmt: skip
    """what `--preset` may name, and the flags that each sets"""
    output_dir: str = "runs/reinforce"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/"""
    lr: Positive[float] = 1e-6
    """peak learning rate of AdamW"""
    preset: Literal[tuple(PRESETS)] | None = None
    """the flags of a published variant, see docs/reinforce.md; one that is also given with another value is an error"""
    loss: Literal[tuple(LOSSES)] = "clip"
    """clip: PPO's clipped importance ratio times A; reinforce: -A log p, without a ratio"""
    reduction: Literal["token", "sequence_sum"] = "token"
    """mean over tokens, or over completions of their sums"""
    advantage: Literal[tuple(ADVANTAGES)] = "reinforce++"
    """rewards whitened over the batch's tokens; the same less the group's mean; less the mean of the group's others"""
    clip_low: BelowOne = 0.2
    """clip: the importance ratio is clipped below at 1 - clip_low"""
    clip_high: NotNegative[float] = 0.2
    """clip: the importance ratio is clipped above at 1 + clip_high"""
    beta: NotNegative[float] = 0.01
    """weight of the KL to the starting model; 0 never loads it"""
    kl_in: Literal["loss", "reward"] = "reward"
    """where beta x KL goes: on each token of the loss, or summed over a completion and taken from its reward"""
    kl_estimator: losses.KLEstimator = "k1"
    """estimate of the KL per token: k1, k2 or k3"""
    kl_clamp: NotNegative[float] = 0.0
    """the estimate is clamped to [-kl_clamp, kl_clamp] on each token; 0: not"""
    entropy_coef: NotNegative[float] = 0.0
    """weight of the entropy bonus, which is reduced as the loss is (--reduction)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_flags_read(self, LOSSES, self.loss)
        if self.samples_per_prompt < 2 and self.advantage != "reinforce++":
            raise ValueError(f"--samples_per_prompt {self.samples_per_prompt}: {self.advantage} compares at least 2")
        for flag in ("kl_in", "kl_estimator", "kl_clamp"):
            self.require_read(flag, self.beta > 0, "--beta is 0")


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
    policy_loss, correction = with_flags(LOSSES[args.loss], args), with_flags(correction_weights, args)
    kl_estimate, weights_of = with_flags(losses.kl_estimate, args), with_flags(losses.reduction_weights, args)
    shape, cut_off = with_flags(shape_rewards, args), with_flags(truncation_penalties, args)
    outside_clip = with_flags(losses.clipped, args)

    # ---- resume: everything else is a function of (seed, step) ----
    beta = KLCoefficient(args.beta, args.kl_target, args.kl_horizon)
    run = Run(
        args, model, optimizer, tokenizer, total_steps, rollouts=rollouts, beta=beta,
        show=("reward", "kl", "eval/pass_at_1", "time/step"),
        curves=("reward", *(f"rewards/{name}/mean" for name in rewards.scorers), "eval/pass_at_1", "kl", "entropy",
                "completions/mean_length", "grad_norm", "sampling/sampling_logp_difference/max"),
    )  # fmt: skip
    meter, updates = run.meter, args.minibatches * args.epochs_per_rollout
    first_pass = updates > 1 or (args.beta and args.kl_in == "reward")  # else the update's own forward will do
    how = "on-policy" if updates == 1 and not rollouts.ahead else f"off-policy, {updates} updates per rollout"
    run.message(f"{prompts}, {held_out} held out, {total_steps} steps on {world_size} ranks, {rollouts}, {how}")
    if args.preset:
        flags = " ".join(f"--{flag} {value}" for flag, value in args.PRESETS[args.preset].items())
        run.message(f"preset {args.preset}: {flags}")
    if args.beta and (args.kl_in, args.kl_estimator) == ("loss", "k1"):
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

            # ---- 2. score; pack; log-probs of the policy that sampled and of the starting model ----
            with meter.time("reward"):
                scores_PG, parts = rewards(groups, meter)
            statistics.measure_groups(meter, groups, scores_PG, parts, first=step == 0)
            minibatches = pack_minibatches(groups, args.minibatches, args.pack_tokens, device)
            with meter.time("logprobs"):
                if first_pass or run.checks_engine(step):
                    add_logprobs("old", model, minibatches, args.temperature)
                if reference is not None:
                    add_logprobs("ref", reference, minibatches, args.temperature)
            if run.checks_engine(step):
                statistics.check_agreement(minibatches, step, args, device)

            # ---- 3. advantage: the reward, less its KL, less what was to be expected ----
            if reference is not None and args.kl_in == "reward":
                for mb in chain(*minibatches):
                    kl_T = kl_estimate(mb.old_logprobs_T, mb.ref_logprobs_T)
                    mb.to_samples(kl=mb.sequence_sums(kl_T))
                    meter.masked_mean("kl", kl_T, mb.loss_mask_T)
            rewards_PG = (
                shape(scores_PG) + cut_off(statistics.truncated(groups)) - beta.value * of_samples(groups, "kl")
            )
            rewards_BG = statistics.gather_groups(rewards_PG, rollouts.positions)
            counts_BG = statistics.gather_groups(statistics.trained_counts(groups), rollouts.positions)
            advantages_BG = ADVANTAGES[args.advantage](rewards_BG, counts_BG)
            to_samples(groups, advantage=advantages_BG[list(rollouts.positions)])
            for mb in chain(*minibatches):
                mb.advantages_T = mb.on_tokens("advantage")

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
                        log_ratio_T = logprobs_T - mb.old_logprobs_T
                        engine_T = mb.old_logprobs_T - mb.rollout_logprobs_T
                        mb.correction_T = correction(engine_T, mb.loss_mask_T, mb.sequence_ids_T)
                        loss_T = policy_loss(log_ratio_T, mb.advantages_T, logprobs_T) * mb.correction_T
                        if reference is not None and args.kl_in == "loss":
                            kl_T = kl_estimate(logprobs_T, mb.ref_logprobs_T)
                            loss_T = loss_T + beta.value * kl_T
                            meter.masked_mean("kl", kl_T, mb.loss_mask_T)
                        if args.entropy_coef:  # not times 0: the entropy's backward is another pass over the logits
                            loss_T = loss_T - args.entropy_coef * entropy_T
                        loss = (loss_T * weights_of(mb.loss_mask_T, mb.lengths_T, tokens, sequences)).sum()
                        (loss * world_size).backward()  # FSDP averages gradients over ranks; undo that
                        minibatch_loss += loss.detach()
                        statistics.measure_update(meter, mb, entropy_T)
                        if args.loss == "clip":
                            clipped_T = outside_clip(log_ratio_T.detach(), mb.advantages_T)
                            meter.masked_mean("clip_ratio/region_mean", clipped_T, mb.loss_mask_T)
                    lr = run.learning_rate(step)
                    meter.mean("grad_norm", optimizer_step(model, optimizer, lr, args.max_grad_norm, minibatch_loss))
                    meter.mean("loss", minibatch_loss, 1 / world_size)

        # ---- 5. log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr)
        if "kl" in metrics:
            metrics["beta"] = beta.value
            beta.update(metrics["kl"], args.prompts_per_step * args.samples_per_prompt)
        if held_out and run.evaluates(step + 1):
            metrics |= statistics.evaluate(rollouts, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        run.show_samples(step + 1, groups, rollouts.positions)

    run.end()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
