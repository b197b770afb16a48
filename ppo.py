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

import torch
from torch import Tensor

from common import distributed, online
from common.advantages import gae, length_adaptive_lambda
from common.checkpoint import Checkpointer, prepare_output_dir
from common.cli import parse
from common.data import Encoder
from common.hub import context_length, load_tokenizer, require_same_tokenizer, resolve_model
from common.losses import KLEstimator, clip_policy_loss, clip_value_loss, kl_estimate
from common.metrics import Meter, RunLogger, Totals
from common.models import load_policy, load_scalar_model
from common.online import KLCoefficient, PolicyGradientArgs
from common.optim import adamw, learning_rate, optimizer_step
from common.packing import PackedBatch, pack
from common.prompts import encode_prompts, prompt_columns
from common.rewards.scoring import Rewards
from common.rollout.measure import check_agreement
from common.rollout.remote import make_rollouts, serve
from common.rows import train_and_eval_rows


@dataclass
class Args(PolicyGradientArgs):
    output_dir: str = "runs/ppo"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/"""
    value_model: str | None = None
    """Hugging Face id or folder the value model starts from: a reward model with its head, or a language model, which
    gets a new one; default: --model"""
    lr: float = 1e-6
    """peak learning rate of AdamW, policy"""
    value_lr: float = 1e-5
    """peak learning rate of AdamW, value model; warmup and schedule are the policy's"""
    value_warmup_steps: int = 0
    """steps at the beginning in which only the value model learns"""
    prompts_per_step: int = 512
    """prompts per rollout, over all ranks"""
    samples_per_prompt: int = 1
    """completions sampled for each prompt (G)"""
    minibatches: int = 4
    """optimizer steps per pass over a rollout; the prompts of a rollout are divided among them"""
    gamma: float = 1.0
    """discount per token"""
    gae_lambda: float = 0.95
    """lambda of the advantages: 0 trusts the value model, 1 only what was sampled"""
    value_lambda: float | None = None
    """lambda of the returns the value model learns; default: gae_lambda. 1: its targets have no bias (VC-PPO)"""
    lambda_alpha: float = 0.0
    """above 0: lambda of the advantages is 1 - 1 / (lambda_alpha x length) of the completion (VAPO: 0.05)"""
    whiten_advantages: bool = True
    """advantages get mean 0 and standard deviation 1 over the tokens of the rollout"""
    clip_low: float = 0.2
    """the importance ratio is clipped below at 1 - clip_low"""
    clip_high: float = 0.2
    """the importance ratio is clipped above at 1 + clip_high"""
    value_clip: float = 0.2
    """values may move this far from those at rollout time; 0: as far as they like"""
    beta: float = 0.05
    """weight of the KL penalty to the starting model in the rewards; 0 never loads it"""
    kl_estimator: KLEstimator = "k1"
    """estimate of the KL per token: k1, k2 or k3"""
    kl_clamp: float = 0.0
    """the estimate is clamped to [-kl_clamp, kl_clamp] on each token; 0: not"""
    kl_stop: float = 0.0
    """skip what is left of a rollout once the policy's KL to the one that sampled it is above this, nats per token,
    on the next minibatch; 0: never"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("value_lr")
        self.require_finite("value_lr")
        self.require_not_negative("value_warmup_steps", "lambda_alpha", "value_clip", "kl_clamp", "kl_stop")
        self.require_not_negative("entropy_coef")
        self.require_clip_bounds()
        for flag in ("gamma", "gae_lambda", "value_lambda"):
            if getattr(self, flag) is not None and not 0 <= getattr(self, flag) <= 1:
                raise ValueError(f"--{flag} {getattr(self, flag)} must be in [0, 1]")
        self.require_read(
            "gae_lambda", not self.lambda_alpha or self.value_lambda is None, "--lambda_alpha replaces it"
        )
        self.require_read("kl_stop", self.minibatches * self.epochs_per_rollout > 1, "a rollout has one update only")
        if self.max_steps is not None and self.value_warmup_steps >= self.max_steps:
            raise ValueError(
                f"--value_warmup_steps {self.value_warmup_steps} leaves no step of --max_steps to the policy"
            )
        for flag in ("kl_estimator", "kl_clamp"):
            self.require_read(flag, self.beta > 0, "--beta is 0")


def advantages_and_returns(args: Args, mb: PackedBatch, rewards_T: Tensor) -> tuple[Tensor, Tensor]:
    """GAE for the policy, and for the value model (the same plus the values) with a lambda of its own (VC-PPO,
    arXiv:2503.01491). Both [T], float32."""
    lengths_N = mb.sequence_sums(torch.ones_like(rewards_T))
    policy_lambda_N = torch.full_like(lengths_N, args.gae_lambda)
    value_lambda_N = policy_lambda_N if args.value_lambda is None else torch.full_like(lengths_N, args.value_lambda)
    if args.lambda_alpha:
        policy_lambda_N = length_adaptive_lambda(lengths_N, args.lambda_alpha)
    advantages_T, targets_T = (
        gae(rewards_T, mb.values_T, mb.loss_mask_T, mb.sequence_ids_T, args.gamma, lambda_N)
        for lambda_N in (policy_lambda_N, value_lambda_N)
    )
    return advantages_T.float(), (targets_T + mb.values_T).float()


def token_scores(mb: PackedBatch, score_of: dict[int, float], turn_weight: float) -> Tensor:
    """Each completion's score on its last token, [T] float32; but what an environment gave for an earlier turn, times
    `turn_weight`, is taken from it and stands on that turn's last token."""
    scores = [0.0] * len(mb.loss_mask_T)
    for sample, start, end in zip(mb.samples, mb.offsets, mb.offsets[1:], strict=False):  # a filler has no sample
        scores[end - 1] = score_of[id(sample)]
        for index, reward in sample.turn_rewards[: sample.turns - 1]:
            scores[start + index - 1] = turn_weight * reward  # targets begin with the second id
            scores[end - 1] -= turn_weight * reward
    return torch.tensor(scores).to(mb.loss_mask_T.device)


def moments(micro_batches: list[PackedBatch], xs: list[Tensor]) -> tuple[float, float]:
    """Mean and standard deviation of a stream over the trained tokens of all ranks. Collective."""
    xs = [x_T[mb.loss_mask_T].double() for mb, x_T in zip(micro_batches, xs, strict=True)]
    count = max(1, int(distributed.all_sum(sum(x.numel() for x in xs))))
    mean = float(distributed.all_sum(sum(x.sum() for x in xs))) / count
    return mean, math.sqrt(float(distributed.all_sum(sum((x - mean).square().sum() for x in xs))) / count)


def measure_update(meter: Meter, args: Args, mb: PackedBatch, logprobs_T: Tensor, entropy_T: Tensor) -> Tensor:
    """Statistics of one micro-batch's update over its trained tokens. Returns its sum of the KL estimate (k3, nats) of
    the rollout's policy to the present one, whose samples these are."""
    mask_T, log_ratio_T = mb.loss_mask_T, logprobs_T - mb.old_logprobs_T
    too_low_T = (log_ratio_T < math.log(1 - args.clip_low)) & (mb.advantages_T < 0)
    too_high_T = (log_ratio_T > math.log(1 + args.clip_high)) & (mb.advantages_T > 0)
    moved_T = kl_estimate(mb.old_logprobs_T, logprobs_T)
    meter.masked_mean("clip_ratio/region_mean", too_low_T | too_high_T, mask_T)
    meter.masked_mean("entropy", entropy_T, mask_T)
    meter.masked_mean("policy/approx_kl", moved_T, mask_T)
    return (moved_T * mask_T).sum()


def main(args: Args) -> None:
    # ---- setup: one process per GPU, identical Args everywhere ----
    device, _, world_size = distributed.setup(args.seed, args.rollout_ranks)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until the others are done
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and what the rewards need beside them ----
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path)
    value_path = path
    if args.value_model is not None:
        value_path = resolve_model(args.value_model, "--value_model")
        require_same_tokenizer("--value_model", value_path, tokenizer)
    encoder = Encoder(tokenizer, args)
    rows, eval_rows = train_and_eval_rows(args)
    columns = prompt_columns(args, rows + eval_rows)
    rewards = Rewards(args, rows + eval_rows, tokenizer, device)
    room = min(context_length(path, args), context_length(value_path, args)) - args.max_new_tokens
    prompts, rows, dropped = encode_prompts(rows, columns, encoder, room, args)
    eval_prompts, eval_rows, eval_dropped = encode_prompts(eval_rows, columns, encoder, room, args)
    total_steps = args.max_steps or math.ceil(args.epochs * len(prompts) / args.prompts_per_step)

    # ---- models: FSDP2 shards train; vLLM samples, in the same process or on the rollout ranks ----
    model = load_policy(path, args, device)
    value_model = load_scalar_model(value_path, args, device, flag="--value_model")
    reference = load_policy(path, args, device, trainable=False) if args.beta else None
    optimizer, value_optimizer = adamw(model, args), adamw(value_model, args)
    rollouts = make_rollouts(model, prompts, rows, args, tokenizer, device)

    # ---- resume: everything else is a function of (seed, step) ----
    totals, beta = Totals(), KLCoefficient(args)
    value_state = (value_model, value_optimizer)
    checkpointer = Checkpointer(args, model, optimizer, value=value_state, rollouts=rollouts, totals=totals, beta=beta)
    first_step = checkpointer.load_latest()
    meter = Meter()
    logger = RunLogger(
        args, first_step, total_steps, show=("reward", "objective/kl", "eval/pass_at_1", "time/step"),
        curves=("reward", *(f"rewards/{name}/mean" for name in rewards.scorers), "eval/pass_at_1", "objective/kl",
                "value_loss", "explained_variance", "entropy", "completions/mean_length", "grad_norm",
                "sampling/sampling_logp_difference/max"),
    )  # fmt: skip
    updates = args.minibatches * args.epochs_per_rollout
    turn_weight = args.reward_scale * dict(zip(rewards.scorers, rewards.weights.tolist(), strict=True)).get(
        "environment", 0.0
    )
    logger.message(
        f"{len(prompts)} prompts ({dropped} too long), {len(eval_prompts)} held out ({eval_dropped} too long), "
        f"{total_steps} steps on {world_size} ranks, {rollouts}, "
        + ("on-policy" if updates == 1 and not rollouts.ahead else f"off-policy, {updates} updates per rollout")
    )
    if eval_prompts and first_step == 0:
        logger.log(0, online.evaluate(rollouts, 0, eval_prompts, eval_rows, rewards))

    stopping = False
    for step in range(first_step, total_steps):
        # ---- 1. rollout, by the weights we are about to update or, with --rollout_ranks, somewhat older ones ----
        with meter.time("step"):
            rollouts.submit(step, total_steps)
            groups = rollouts.collect(step, meter)
            if groups is None:  # told to stop
                stopping = True
                break

            # ---- 2. score; log-probs, values and reference of the rollout; advantages and returns ----
            with meter.time("reward"):
                rewards_PG, parts = rewards(groups, meter)
            online.measure_groups(meter, groups, rewards_PG, parts)
            scores_PG = online.shape_rewards(rewards_PG, args) + online.length_penalties(groups, args)
            score_of = {}
            for group, scores_G in zip(groups, scores_PG.tolist(), strict=True):
                for sample, score in zip(group, scores_G, strict=True):
                    if math.isnan(score):  # no reward, nothing to learn
                        sample.loss_mask, score = [False] * len(sample.ids), 0.0
                    score_of[id(sample)] = score
            # Groups [m * size, (m + 1) * size) of every rank are minibatch m: the same global prompts on any ranks.
            # pack() gives every rank the same number of micro-batches: FSDP collectives must match.
            size = len(groups) // args.minibatches
            minibatches = [
                pack([s for group in groups[m : m + size] for s in group], args.pack_tokens, device)
                for m in range(0, len(groups), size)
            ]
            micro_batches = [mb for minibatch in minibatches for mb in minibatch]
            with meter.time("logprobs"), torch.no_grad():
                for mb in micro_batches:
                    mb.old_logprobs_T, *_ = model(mb, temperature=args.temperature)
                    mb.values_T = value_model(mb)
                    rewards_T = token_scores(mb, score_of, turn_weight)
                    if reference is not None:
                        ref_logprobs_T, *_ = reference(mb, temperature=args.temperature)
                        kl_T = kl_estimate(mb.old_logprobs_T, ref_logprobs_T, args.kl_estimator, args.kl_clamp)
                        rewards_T -= beta.value * kl_T
                        meter.mean("objective/kl", mb.sequence_sums(kl_T).sum(), len(mb.samples))
                    mb.advantages_T, mb.returns_T = advantages_and_returns(args, mb, rewards_T)
                    mb.weights_T = online.correction_weights(mb, args)
                    online.measure_sampling(meter, mb, mb.weights_T)
                    meter.mean("objective/rlhf_reward", mb.sequence_sums(rewards_T).sum(), len(mb.samples))
                model.reshard()  # a forward without backward leaves the root whole
                value_model.reshard()
            if step == first_step:
                check_agreement(micro_batches, args, device)
            _, error = moments(micro_batches, [mb.returns_T - mb.values_T for mb in micro_batches])
            _, spread = moments(micro_batches, [mb.returns_T for mb in micro_batches])
            mean, std = moments(micro_batches, [mb.advantages_T for mb in micro_batches])
            for mb in micro_batches:
                if args.whiten_advantages:
                    mb.advantages_T = (mb.advantages_T - mean) / (std + 1e-6)
                for sample, advantage in zip(mb.samples, mb.advantages_T[mb.ends_N].tolist(), strict=True):
                    sample.advantage = advantage  # of the last token, for samples.jsonl

            # ---- 3. update: policy and value model, with an optimizer each ----
            with meter.time("train"):
                learn_policy, done = step >= args.value_warmup_steps, 0
                if step == args.value_warmup_steps:  # a save in warm-up made the optimizer's state by a step of zeros
                    for state in optimizer.state.values():
                        state["step"].zero_()
                lr = learning_rate(step, total_steps, args)
                for update in range(updates):
                    minibatch = minibatches[update % args.minibatches]
                    # Token means over the *global* minibatch. FSDP averages gradients over ranks; undo that.
                    tokens = distributed.all_sum(sum(mb.loss_mask_T.sum() for mb in minibatch)).clamp(min=1)
                    policy_loss, value_loss, moved = (torch.zeros((), device=device) for _ in range(3))
                    for mb in minibatch:
                        if learn_policy:
                            logprobs_T, entropy_T, *_ = model(mb, temperature=args.temperature)
                            logprobs_T = torch.where(mb.loss_mask_T, logprobs_T, mb.old_logprobs_T)  # no overflow there
                            loss_T = mb.weights_T * clip_policy_loss(
                                logprobs_T, mb.old_logprobs_T, mb.advantages_T, args.clip_low, args.clip_high
                            )
                            if args.entropy_coef:  # not times 0: its backward is another pass over the logits
                                loss_T = loss_T - args.entropy_coef * entropy_T
                            loss = (loss_T * mb.loss_mask_T).sum() / tokens
                            (loss * world_size).backward()
                            policy_loss += loss.detach()
                            moved += measure_update(meter, args, mb, logprobs_T.detach(), entropy_T)
                        values_T = value_model(mb)
                        value_loss_T = clip_value_loss(values_T, mb.values_T, mb.returns_T, args.value_clip)
                        loss = (value_loss_T * mb.loss_mask_T).sum() / tokens
                        (loss * world_size).backward()
                        value_loss += loss.detach()
                    if args.kl_stop and distributed.all_sum(moved) / tokens > args.kl_stop:
                        optimizer.zero_grad()
                        value_optimizer.zero_grad()
                        break
                    done += 1
                    if learn_policy:
                        grad_norm = optimizer_step(model, optimizer, lr, args.max_grad_norm, policy_loss)
                        meter.mean("grad_norm", grad_norm)
                        meter.mean("loss", policy_loss, 1 / world_size)
                    value_lr = lr * args.value_lr / args.lr
                    grad_norm = optimizer_step(value_model, value_optimizer, value_lr, args.max_grad_norm, value_loss)
                    meter.mean("value_grad_norm", grad_norm)
                    meter.mean("value_loss", value_loss, 1 / world_size)

        # ---- 4. log, evaluate, checkpoint ----
        totals.num_tokens += int(distributed.all_sum(sum(s.num_targets for group in groups for s in group)))
        metrics = online.effective_sample_size(meter.reduce())
        metrics |= dict(lr=lr, epoch=rollouts.epochs_done, num_tokens=totals.num_tokens, updates=done)
        metrics["explained_variance"] = 1 - (error / spread) ** 2 if spread else 0.0
        if args.beta:
            metrics["beta"] = beta.value
            if learn_policy:
                beta.update(metrics["objective/kl"], args.prompts_per_step * args.samples_per_prompt)
        last = step + 1 == total_steps
        if eval_prompts and ((step + 1) % args.eval_every == 0 or last):
            metrics |= online.evaluate(rollouts, step + 1, eval_prompts, eval_rows, rewards)
        logger.log(step + 1, metrics)
        if (step + 1) % args.log_every == 0 or last:
            logger.samples(step + 1, groups, rewards_PG, rollouts.positions)
        stopping = distributed.stop_requested()
        if stopping:
            step += 1
            break
        if (step + 1) % args.save_every == 0 or last:
            with meter.time("save"):  # counted in the next step's line
                checkpointer.save(step + 1)
            logger.draw_curves()

    if stopping:
        if step > 0:
            checkpointer.save(step)
        logger.message(f"told to stop after step {step}; the same command goes on from there")
    else:
        checkpointer.export_hf(tokenizer)
        logger.message(f"done: {args.output_dir}/hf")
    logger.close()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
