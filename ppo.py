"""PPO for language models (Schulman et al. 2017, arXiv:1707.06347; for RLHF: Ziegler et al. 2019, arXiv:1909.08593).

    torchrun --nproc_per_node 8 ppo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k --reward gsm8k

One completion per prompt is sampled; each token is an action. A token's reward is minus beta times its KL to the
starting model, and the last one's has the score of the completion added. A second model predicts from each prefix what
is still to come; generalised advantage estimation turns its errors into advantages, PPO's clipped loss makes better
tokens more likely, and the value model is fitted to the returns.

Differences from the papers: value and policy are separate models with an optimizer each, advantages are whitened over
the rollout and not over a minibatch, and engine and trainer are reconciled by truncated importance weights. See
docs/ppo.md.

Shapes: P prompts on this rank, G samples per prompt, N completions and T packed tokens in one micro-batch. Every
per-token stream is aligned with *targets*: x_T[t] describes the prediction of targets_T[t], and values_T[t] is the
value of the prefix before it.
"""

import math
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from common.config.flags import BelowOne, Fraction, NotNegative, Positive, with_flags
from common.config.groups import OnlineArgs, SamplingArgs, TrainArgs
from common.config.parse import parse
from common.data.packing import PackedBatch, pack_minibatches, to_samples
from common.metrics.meter import Meter
from common.model.hub import context_length, load_tokenizer, require_same_tokenizer, resolve_model
from common.model.logprobs import add_logprobs, add_values
from common.model.lora import LoRAArgs
from common.model.policy import load_reference
from common.model.value import load_with_value_model
from common.objectives.advantages import gae, length_adaptive_lambda
from common.objectives.importance import CorrectionArgs, correction_weights
from common.objectives.policy import KLEstimator, clip_policy_loss, clip_value_loss, clipped, kl_estimate
from common.objectives.shaping import KLCoefficient, RewardArgs, shape_rewards, truncation_penalties
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout import statistics
from common.rollout.prompts import load_prompts
from common.rollout.remote_sampler import make_rollouts, serve
from common.train.checkpoint import prepare_output_dir
from common.train.optim import adamw, optimizer_step
from common.train.run import Run


@dataclass
class Args(RewardArgs, CorrectionArgs, OnlineArgs, SamplingArgs, LoRAArgs, TrainArgs):
    TINY_DEFAULTS: ClassVar[dict] = dict(value_lr=5e-3, beta=0.01)
    output_dir: str = "runs/ppo"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/"""
    value_model: str | None = None
    """Hugging Face id or folder the value model starts from: a reward model with its head, or a language model, which
    gets a new one; default: --model"""
    lr: Positive[float] = 1e-6
    """peak learning rate of AdamW, policy"""
    value_lr: Positive[float] = 1e-5
    """peak learning rate of AdamW, value model; warmup and schedule are the policy's"""
    value_warmup_steps: NotNegative[int] = 0
    """steps at the beginning in which only the value model learns"""
    prompts_per_step: Positive[int] = 512
    """prompts per rollout, over all ranks"""
    samples_per_prompt: Positive[int] = 1
    """completions sampled for each prompt (G)"""
    minibatches: Positive[int] = 4
    """optimizer steps per pass over a rollout; the prompts of a rollout are divided among them"""
    gamma: Fraction = 1.0
    """discount per token"""
    gae_lambda: Fraction = 0.95
    """lambda of the advantages: 0 trusts the value model, 1 only what was sampled"""
    value_lambda: Fraction | None = None
    """lambda of the returns the value model learns; default: gae_lambda. 1: its targets have no bias (VC-PPO)"""
    lambda_alpha: NotNegative[float] = 0.0
    """above 0: lambda of the advantages is 1 - 1 / (lambda_alpha x length) of the completion (VAPO: 0.05)"""
    whiten_advantages: bool = True
    """advantages get mean 0 and standard deviation 1 over the tokens of the rollout"""
    clip_low: BelowOne = 0.2
    """the importance ratio is clipped below at 1 - clip_low"""
    clip_high: NotNegative[float] = 0.2
    """the importance ratio is clipped above at 1 + clip_high"""
    value_clip: NotNegative[float] = 0.2
    """values may move this far from those at rollout time; 0: as far as they like"""
    beta: NotNegative[float] = 0.05
    """weight of the KL penalty to the starting model in the rewards; 0 never loads it"""
    kl_estimator: KLEstimator = "k1"
    """estimate of the KL per token: k1, k2 or k3"""
    kl_clamp: NotNegative[float] = 0.0
    """the estimate is clamped to [-kl_clamp, kl_clamp] on each token; 0: not"""
    kl_stop: NotNegative[float] = 0.0
    """skip what is left of a rollout once the policy's KL to the one that sampled it is above this, nats per token,
    on the next minibatch; 0: never"""
    entropy_coef: NotNegative[float] = 0.0
    """weight of the entropy bonus"""
    positive_nll: NotNegative[float] = 0.0
    """weight of the mean negative log-likelihood of the tokens with a positive advantage (VAPO, arXiv:2504.05118)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_read(
            "gae_lambda", not self.lambda_alpha or self.value_lambda is None, "--lambda_alpha replaces it"
        )
        self.require_read("kl_stop", self.minibatches * self.epochs_per_rollout > 1, "a rollout has one update only")
        if self.max_steps is not None and self.value_warmup_steps >= self.max_steps:
            raise ValueError(f"--value_warmup_steps {self.value_warmup_steps} leaves the policy no step of --max_steps")
        for flag in ("kl_estimator", "kl_clamp"):
            self.require_read(flag, self.beta > 0, "--beta is 0")


def advantages_and_returns(
    mb: PackedBatch,
    rewards_T: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    value_lambda: float | None,
    lambda_alpha: float,
) -> tuple[Tensor, Tensor]:
    """GAE for the policy, and for the value model (the same plus the values) with a lambda of its own (VC-PPO,
    arXiv:2503.01491). Both [T], float32."""
    lengths_N = mb.sequence_sums(torch.ones_like(rewards_T))
    policy_lambda_N = torch.full_like(lengths_N, gae_lambda)
    value_lambda_N = policy_lambda_N if value_lambda is None else torch.full_like(lengths_N, value_lambda)
    if lambda_alpha:
        policy_lambda_N = length_adaptive_lambda(lengths_N, lambda_alpha)
    advantages_T, targets_T = (
        gae(rewards_T, mb.values_T, mb.loss_mask_T, mb.sequence_ids_T, gamma, lambda_N)
        for lambda_N in (policy_lambda_N, value_lambda_N)
    )
    return advantages_T.float(), (targets_T + mb.values_T).float()


def token_scores(mb: PackedBatch, turn_weight: float) -> Tensor:
    """Each completion's score on its last token, [T] float32; but what an environment gave for an earlier turn, times
    `turn_weight`, is taken from it and stands on that turn's last token."""
    scores = [0.0] * len(mb.loss_mask_T)
    for sample, start, end in zip(mb.samples, mb.offsets, mb.offsets[1:], strict=False):  # a filler has no sample
        scores[end - 1] = sample.score
        for index, reward in sample.turn_rewards[: sample.turns - 1]:
            scores[start + index - 1] = turn_weight * reward  # targets begin with the second id
            scores[end - 1] -= turn_weight * reward
    return torch.tensor(scores).to(mb.loss_mask_T.device)


def moments(micro_batches: list[PackedBatch], xs: list[Tensor]) -> tuple[float, float]:
    """Mean and standard deviation (n - 1) of a stream over the trained tokens of all ranks. Collective."""
    xs = [x_T[mb.loss_mask_T].double() for mb, x_T in zip(micro_batches, xs, strict=True)]
    count = max(1, int(distributed.all_sum(sum(x.numel() for x in xs))))
    mean = float(distributed.all_sum(sum(x.sum() for x in xs))) / count
    squares = float(distributed.all_sum(sum((x - mean).square().sum() for x in xs)))
    return mean, math.sqrt(squares / max(1, count - 1))


def explained_variance(micro_batches: list[PackedBatch]) -> float:
    """1 - Var(returns - values) / Var(returns) over the trained tokens of all ranks; 0 if all returns are equal.
    Collective."""
    _, error = moments(micro_batches, [mb.returns_T - mb.values_T for mb in micro_batches])
    _, spread = moments(micro_batches, [mb.returns_T for mb in micro_batches])
    return 1 - (error / spread) ** 2 if spread else 0.0


def count_tokens(minibatch: list[PackedBatch]) -> tuple[Tensor, Tensor]:
    """Trained tokens of a *global* minibatch, and those with a positive advantage; at least 1 each. Collective."""
    trained = sum(mb.loss_mask_T.sum() for mb in minibatch)
    positive = sum((mb.loss_mask_T & (mb.advantages_T > 0)).sum() for mb in minibatch)
    return distributed.all_sum(trained).clamp(min=1), distributed.all_sum(positive).clamp(min=1)


def measure_update(meter: Meter, mb: PackedBatch, entropy_T: Tensor, moved_T: Tensor, clipped_T: Tensor) -> None:
    """Means over the trained tokens of a micro-batch; `moved_T`: how far the policy is from the rollout's, in nats."""
    for name, x_T in (("entropy", entropy_T), ("policy/approx_kl", moved_T), ("clip_ratio/region_mean", clipped_T)):
        meter.masked_mean(name, x_T, mb.loss_mask_T)


def main(args: Args) -> None:
    # ---- setup: one process per GPU, identical Args everywhere ----
    device, _, world_size = distributed.setup(args.seed, args.rollout_ranks, args.nccl_timeout)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until the others are done
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and what the rewards need beside them ----
    path = value_path = resolve_model(args.model)
    tokenizer = load_tokenizer(path, args)
    if args.value_model is not None:
        value_path = resolve_model(args.value_model, "--value_model")
        require_same_tokenizer("--value_model", value_path, tokenizer)
    context = min(context_length(path, args), context_length(value_path, args))
    prompts, held_out = load_prompts(args, tokenizer, context)
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)
    total_steps = args.max_steps or math.ceil(args.epochs * len(prompts) / args.prompts_per_step)

    # ---- models: FSDP2 shards train; vLLM samples, in the same process or on the rollout ranks ----
    model, value_model = load_with_value_model(path, value_path, args, device)
    reference = load_reference(model, args, device) if args.beta else None
    optimizer, value_optimizer = adamw(model, args), adamw(value_model, args)
    rollouts = make_rollouts(model, prompts, args, tokenizer, device, rewards)

    # ---- the objective, its floats bound to the flags of their names ----
    policy_loss, outside_clip = with_flags(clip_policy_loss, args), with_flags(clipped, args)
    value_loss_of, kl_of = with_flags(clip_value_loss, args), with_flags(kl_estimate, args)
    correction, estimate = with_flags(correction_weights, args), with_flags(advantages_and_returns, args)
    shape, cut_off = with_flags(shape_rewards, args), with_flags(truncation_penalties, args)
    turn_weight = args.reward_scale * rewards.weight_of("environment")

    # ---- resume: everything else is a function of (seed, step) ----
    beta = KLCoefficient(args.beta, args.kl_target, args.kl_horizon)
    run = Run(
        args, model, optimizer, tokenizer, total_steps, value=(value_model, value_optimizer), rollouts=rollouts,
        beta=beta, show=("reward", "objective/kl", "eval/pass_at_1", "time/step"),
        curves=("reward", *(f"rewards/{name}/mean" for name in rewards.scorers), "eval/pass_at_1", "objective/kl",
                "value_loss", "explained_variance", "entropy", "completions/mean_length", "grad_norm",
                "sampling/sampling_logp_difference/max"),
    )  # fmt: skip
    meter, updates = run.meter, args.minibatches * args.epochs_per_rollout
    how = "on-policy" if updates == 1 and not rollouts.ahead else f"off-policy, {updates} updates per rollout"
    run.message(f"{prompts}, {held_out} held out, {total_steps} steps on {world_size} ranks, {rollouts}, {how}")
    if held_out and run.first_step == 0:
        run.log(0, statistics.evaluate(rollouts, 0, held_out, rewards))

    for step in run.steps():
        # ---- 1. rollout, by the weights we are about to update or, with --rollout_ranks, somewhat older ones ----
        with meter.time("step"):
            rollouts.submit(step, total_steps)
            groups = rollouts.collect(step, meter)
            if groups is None:  # told to stop
                break

            # ---- 2. score; log-probs and values of the rollout, log-probs of the starting model ----
            with meter.time("reward"):
                rewards_PG, parts = rewards(groups, meter)
            statistics.measure_groups(meter, groups, rewards_PG, parts, first=step == 0)
            to_samples(groups, score=shape(rewards_PG) + cut_off(statistics.truncated(groups)))
            for sample in chain(*groups):
                if math.isnan(sample.score):  # no reward, nothing to learn
                    sample.loss_mask, sample.score = [False] * len(sample.ids), 0.0
            minibatches = pack_minibatches(groups, args.minibatches, args.pack_tokens, device)
            micro_batches = list(chain(*minibatches))
            with meter.time("logprobs"):
                add_logprobs("old", model, minibatches, args.temperature)
                add_values(value_model, minibatches)
                if reference is not None:
                    add_logprobs("ref", reference, minibatches, args.temperature)
            if run.checks_engine(step):
                statistics.check_agreement(minibatches, step, args, device)

            # ---- 3. a reward for each token; advantages and returns ----
            for mb in micro_batches:
                rewards_T = token_scores(mb, turn_weight)
                if reference is not None:
                    rewards_T -= beta.value * kl_of(mb.old_logprobs_T, mb.ref_logprobs_T)
                    log_ratio_N = mb.sequence_sums(mb.old_logprobs_T - mb.ref_logprobs_T)
                    meter.mean("objective/kl", log_ratio_N.sum(), len(log_ratio_N))
                meter.mean("objective/rlhf_reward", mb.sequence_sums(rewards_T).sum(), len(mb.samples))
                mb.advantages_T, mb.returns_T = estimate(mb, rewards_T)
                engine_T = mb.old_logprobs_T - mb.rollout_logprobs_T
                mb.correction_T = correction(engine_T, mb.loss_mask_T, mb.sequence_ids_T)
                statistics.measure_sampling(meter, mb)
            explained = explained_variance(micro_batches)
            mean, std = moments(micro_batches, [mb.advantages_T for mb in micro_batches])
            for mb in micro_batches:
                if args.whiten_advantages:
                    mb.advantages_T = (mb.advantages_T - mean) / (std + 1e-6)
                mb.to_samples(advantage=mb.advantages_T[mb.ends_N])  # of the last token, for samples.jsonl

            # ---- 4. update: policy and value model, with an optimizer each ----
            with meter.time("train"):
                learn_policy, updates_done, lr = step >= args.value_warmup_steps, 0, run.learning_rate(step)
                if step == args.value_warmup_steps:  # a save in warm-up made the optimizer's state by a step of zeros
                    for state in optimizer.state.values():
                        state["step"].zero_()
                for minibatch in minibatches * args.epochs_per_rollout:
                    # Token means over the *global* minibatch. FSDP averages gradients over ranks; undo that.
                    tokens, positives = count_tokens(minibatch)
                    policy_sum, value_sum, moved = (torch.zeros((), device=device) for _ in range(3))
                    for mb in minibatch:
                        if learn_policy:
                            logprobs_T, entropy_T, *_ = model(mb, temperature=args.temperature)
                            log_ratio_T = logprobs_T - mb.old_logprobs_T
                            loss_T = policy_loss(log_ratio_T, mb.advantages_T) * mb.correction_T
                            if args.entropy_coef:  # not times 0: its backward is another pass over the logits
                                loss_T = loss_T - args.entropy_coef * entropy_T
                            positive_T = mb.loss_mask_T & (mb.advantages_T > 0)
                            loss = (loss_T * mb.loss_mask_T).sum() / tokens
                            loss = loss - args.positive_nll * (logprobs_T * positive_T).sum() / positives
                            (loss * world_size).backward()
                            policy_sum += loss.detach()
                            moved_T = kl_estimate(mb.old_logprobs_T, logprobs_T.detach())  # from the rollout's policy
                            moved += (moved_T * mb.loss_mask_T).sum()
                            clipped_T = outside_clip(log_ratio_T.detach(), mb.advantages_T)
                            measure_update(meter, mb, entropy_T, moved_T, clipped_T)
                        value_loss_T = value_loss_of(value_model(mb), mb.values_T, mb.returns_T)
                        loss = (value_loss_T * mb.loss_mask_T).sum() / tokens
                        (loss * world_size).backward()
                        value_sum += loss.detach()
                    if args.kl_stop and distributed.all_sum(moved) / tokens > args.kl_stop:
                        optimizer.zero_grad()
                        value_optimizer.zero_grad()
                        break
                    updates_done += 1
                    if learn_policy:
                        meter.mean("grad_norm", optimizer_step(model, optimizer, lr, args.max_grad_norm, policy_sum))
                        meter.mean("loss", policy_sum, 1 / world_size)
                    value_lr = lr * args.value_lr / args.lr
                    grad_norm = optimizer_step(value_model, value_optimizer, value_lr, args.max_grad_norm, value_sum)
                    meter.mean("value_grad_norm", grad_norm)
                    meter.mean("value_loss", value_sum, 1 / world_size)

        # ---- 5. log and evaluate ----
        metrics = run.reduce(chain(*groups), lr=lr, updates=updates_done, explained_variance=explained)
        if args.beta:
            metrics["beta"] = beta.value
            if learn_policy:
                beta.update(metrics["objective/kl"], args.prompts_per_step * args.samples_per_prompt)
        if held_out and run.evaluates(step + 1):
            metrics |= statistics.evaluate(rollouts, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        run.show_samples(step + 1, groups, rollouts.positions)

    run.end()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
