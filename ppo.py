r"""PPO for language models (Schulman et al. 2017, arXiv:1707.06347; for RLHF: Ziegler et al. 2019,
arXiv:1909.08593).

    torchrun --nproc_per_node 8 ppo.py --config configs/qwen3_1.7b_ppo.yaml

Each token y_t of a sampled completion is an action. A second model predicts its value V_t, the sum
of future rewards:

    r_t   = -beta log(pi_old(y_t) / pi_ref(y_t)), plus the score at the last token   token_rewards()
    A_t   = sum_j gae_lambda^j (r_{t+j} + V_{t+j+1} - V_{t+j})                          advantages()
    R_t   = A_t + V_t; then A_t is whitened                                   advantages(), whiten()
    L     = mean_t [ -c_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) ]      loss()
    L_V   = mean_t [ max((v_t - R_t)^2, (v'_t - R_t)^2) / 2 ]                           value_loss()
            v'_t = clip(v_t, V_t - 0.2, V_t + 0.2)
    rho_t = pi(y_t) / pi_old(y_t)                        pi_old, V: the models before the updates

Differences from the papers: value and policy are separate models with an optimizer each, advantages
are whitened over the rollout and not over a minibatch, and weights c_t = min(pi_old(y_t) /
pi_engine(y_t), 2) correct for the engine. Its core in 175 lines: course/lessons/nano_ppo.py.

Shapes: P prompts on this rank, B on all ranks, G completions per prompt, N completions and T packed
tokens of a micro-batch. Per-token tensors are aligned with the *targets*: x_T[t] is about
targets_T[t]; values_T[t] is V of the tokens before it."""

from itertools import chain

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from common.config.flags import Fraction, NamesModels, NotNegative, Positive
from common.config.online import TINY_ONLINE, OnlineArgs
from common.config.parse import parse
from common.evaluate.held_out import evaluate_prompts
from common.metrics.meter import Meter
from common.metrics.moments import explained_variance, moments
from common.model.hub import longest_sequence, require_same_tokenizer, resolve_model
from common.model.policy import Policy, load_policy, load_reference, load_scalar_model
from common.model.scoring import with_logprobs, with_values
from common.objectives.advantages import EPSILON, gae
from common.objectives.importance import CorrectionArgs, bounded_exp, importance_weights, is_clipped
from common.objectives.kl import KLEstimateArgs, LogKLArgs, kl_estimate
from common.objectives.policy import BY_TOKEN, PolicyInputs, PolicyLoss, PolicyLossArgs
from common.packs.packing import PackedBatch, count_trained, pack_minibatches, per_sample
from common.parallel import distributed
from common.rewards.total import Rewards, without_unscored
from common.rollout.agreement import measure_mismatch, require_agreement
from common.rollout.measure import measure_groups, truncation_penalties
from common.rollout.prompts import load_prompts
from common.rollout.sampler import make_sampler, serve
from common.text.tokenizer import load_tokenizer
from common.train.optim import adamw, optimizer_step
from common.train.overview import CURVES, describe_rollouts, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

SHOW = ("reward", "objective/kl", "eval/solved", "time/step")

# ---- the objective ----


def token_rewards(mb: PackedBatch, scores_BG: Tensor, turn_weight: float, args: "Args") -> Tensor:
    """Return the reward of each token, [T] float32: the score of the completion on its last token,
    and -beta KL on every token. Rewards that an environment gave for earlier turns, times
    `turn_weight`, are taken out of the score and put on the last token of their turn."""
    rewards_T = torch.zeros(len(mb.loss_mask_T), device=mb.loss_mask_T.device)
    rewards_T[mb.ends_N] = mb.select(scores_BG).float()
    if mb.turn_rewards_T is not None:
        earlier_T = turn_weight * mb.turn_rewards_T
        rewards_T[mb.ends_N] -= mb.sequence_sums(earlier_T).float()
        rewards_T += earlier_T
    if mb.ref_logprobs_T is not None:
        kl_T = kl_estimate(mb.old_logprobs_T, mb.ref_logprobs_T, args.kl_estimator)
        rewards_T -= args.beta * kl_T
    return rewards_T


def advantages(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return advantages for the policy, before they are whitened, and returns for the value model,
    [T] float32 each."""
    A_T = gae(rewards_T, values_T, mask_T, sequence_ids_T, gae_lambda)
    return A_T.float(), (A_T + values_T).float()


def clip(x: PolicyInputs) -> PolicyLoss:
    """Return loss, rho and clipping per token. The same in five scripts; a test compares them."""
    rho_T = bounded_exp(x.log_rho_T)
    clipped_T = rho_T.clamp(1 - x.clip_low, 1 + x.clip_high)
    loss_T = -torch.min(rho_T * x.A_T, clipped_T * x.A_T)
    return PolicyLoss(loss_T, rho_T, is_clipped(x.log_rho_T, x.A_T, x.clip_low, x.clip_high))


LOSSES = {"clip": clip} | BY_TOKEN  # by --loss


def loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, entropy_T: Tensor, advantages_T: Tensor,
    importance_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, num_tokens: Tensor, args: "Args",
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return each token's share of the policy loss and per-token tensors to log. The loss is a mean
    over the `num_tokens` of the *global* minibatch."""
    low, high = args.clip_low, args.clip_high
    x = PolicyInputs(logprobs_T, old_logprobs_T, advantages_T, mask_T, sequence_ids_T, low, high)
    loss_T, ratio_T, stopped_T = LOSSES[args.loss](x)
    loss_T = loss_T * importance_T
    if args.entropy_coef:  # skipped at 0: its backward pass reads all logits again
        loss_T = loss_T - args.entropy_coef * entropy_T
    logged = {
        "ratio": ratio_T.detach(),
        "clip_ratio/region_mean": stopped_T,
        "policy/approx_kl": kl_estimate(old_logprobs_T, logprobs_T.detach()),
    }
    return loss_T * mask_T / num_tokens, logged


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor) -> Tensor:
    """Return the loss of each value, [T]: half the larger of two squared errors, its own and that
    of the value clipped to 0.2 around the old one. If the second is larger, no gradient flows."""
    loss_T = (values_T - returns_T).square()
    clipped_T = torch.clamp(values_T, old_values_T - 0.2, old_values_T + 0.2)
    return torch.max(loss_T, (clipped_T - returns_T).square()) / 2


@dataclass
class Args(PolicyLossArgs, KLEstimateArgs, LogKLArgs, CorrectionArgs, OnlineArgs):
    TINY_DEFAULTS = TINY_ONLINE | dict(
        value_lr=1e-3, prompts_per_step=256, samples_per_prompt=1, max_steps=30
    )
    value_model: NamesModels[str | None] = None
    """start the value model from this Hugging Face id or folder: a reward model with its head, or a
    language model, which gets a new head; default: `model`"""
    lr: Positive[float] = 1e-6
    """train the policy with this peak learning rate of AdamW"""
    value_lr: Positive[float] = 1e-5
    """train the value model with this peak learning rate, on the policy's schedule"""
    value_warmup_steps: NotNegative[int] = 0
    """train only the value model in the first N steps"""
    prompts_per_step: Positive[int] = 512
    samples_per_prompt: Positive[int] = 1
    minibatches: Positive[int] = 4
    gae_lambda: Fraction = 0.95
    """compute advantages with this lambda. 0: from the next value; 1: from sampled returns alone"""
    beta: NotNegative[float] = 0.05
    """subtract the KL to the starting model from the rewards with this weight; 0: no penalty, and
    no reference model in memory"""
    entropy_coef: NotNegative[float] = 0.0
    """add an entropy bonus with this weight"""

    def __post_init__(self) -> None:
        if self.max_steps is not None and self.value_warmup_steps >= self.max_steps:
            raise ValueError(
                f"--value_warmup_steps {self.value_warmup_steps} must be below --max_steps"
            )


def with_advantages(
    mb: PackedBatch, scores_BG: Tensor, turn_weight: float, args: Args, meter: Meter
) -> PackedBatch:
    """Return the micro-batch with advantages, returns and importance weights; measure its rewards
    and KL."""
    rewards_T = token_rewards(mb, scores_BG, turn_weight, args)
    meter.mean("objective/rlhf_reward", mb.sequence_sums(rewards_T).sum(), mb.is_trained_N.sum())
    if mb.ref_logprobs_T is not None:
        log_ratio_N = mb.sequence_sums(mb.old_logprobs_T - mb.ref_logprobs_T)
        meter.mean("objective/kl", log_ratio_N.sum(), mb.is_trained_N.sum())
    advantages_T, returns_T = advantages(
        rewards_T, mb.values_T, mb.loss_mask_T, mb.sequence_ids_T, args.gae_lambda
    )
    importance_T = importance_weights(
        mb.old_logprobs_T, mb.rollout_logprobs_T, mb.loss_mask_T, mb.sequence_ids_T,
        args.correction_form(),
    )  # fmt: skip
    measure_mismatch(meter, mb.old_logprobs_T, mb)
    return mb.with_streams(
        advantages_T=advantages_T, returns_T=returns_T, importance_T=importance_T
    )


def whiten(minibatches: list[list[PackedBatch]]) -> list[list[PackedBatch]]:
    """Return the micro-batches with advantages of mean 0 and standard deviation 1 over the trained
    tokens of the rollout, and 0 on all others. Collective."""
    mean, std = moments(minibatches, lambda mb: mb.advantages_T)

    def whitened(mb: PackedBatch) -> Tensor:
        return (mb.advantages_T - mean) / (std + EPSILON) * mb.loss_mask_T

    return [[mb.with_streams(advantages_T=whitened(mb)) for mb in mbs] for mbs in minibatches]


def add_policy_gradient(
    policy: Policy, minibatch: list[PackedBatch], num_tokens: Tensor, args: Args, meter: Meter
) -> Tensor:
    """Run forward and backward over a minibatch, which has `num_tokens` trained tokens on all
    ranks. Return this rank's share of the loss."""
    total_loss = torch.zeros((), device=num_tokens.device)
    for mb in minibatch:
        logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
        share_T, logged = loss(
            logprobs_T, mb.old_logprobs_T, entropy_T, mb.advantages_T, mb.importance_T,
            mb.loss_mask_T, mb.sequence_ids_T, num_tokens, args,
        )  # fmt: skip
        # FSDP averages gradients over ranks; undo that.
        (share_T.sum() * distributed.world_size()).backward()
        total_loss += share_T.detach().sum()
        meter.tokens(mb, {"entropy": entropy_T} | logged, share_T)
    return total_loss


def add_value_gradient(
    value_model: nn.Module, minibatch: list[PackedBatch], num_tokens: Tensor
) -> Tensor:
    """Run forward and backward of the value model. Return this rank's share of its loss."""
    total_loss = torch.zeros((), device=num_tokens.device)
    for mb in minibatch:
        loss_T = value_loss(value_model(mb), mb.values_T, mb.returns_T)
        share = (loss_T * mb.loss_mask_T).sum() / num_tokens
        (share * distributed.world_size()).backward()
        total_loss += share.detach()
    return total_loss


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, *_ = distributed.setup(args.seed, args.live_rollout_ranks)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    prepare_output_dir(args, args.dry_run)

    # ---- data: prompts as token ids, and the rewards of their completions ----
    needs_reference = args.beta > 0 or args.log_kl
    path = value_path = resolve_model(args.model, weights=not args.dry_run)
    if args.value_model is not None:
        value_path = resolve_model(args.value_model, "--value_model", not args.dry_run)
    tokenizer = load_tokenizer(path, args)
    require_same_tokenizer("--value_model", value_path, tokenizer)
    limit = min(longest_sequence(path, args), longest_sequence(value_path, args))
    prompts, held_out = load_prompts(args, tokenizer, limit)
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device, args.dry_run)
    if args.dry_run:
        frozen = [path] if needs_reference else []
        return dry_run(args, path, tokenizer, prompts, held_out, rewards, frozen,
                       value_path=value_path, own_forwards=2)  # fmt: skip  # log-probs and values
    begin_run(args, prompts.rows, held_out.rows)
    turn_weight = rewards.weights.get("environment", 0.0)

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device)  # trained
    value_model = load_scalar_model(value_path, args, device, flag="--value_model")  # trained
    reference = load_reference(policy, args, device) if needs_reference else None  # frozen
    optimizer = adamw(policy, args)
    value_optimizer = adamw(value_model, args)
    sampler = make_sampler(policy, prompts, args, tokenizer, on_complete=rewards.begin)

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, prompts)
    run = Run(
        args, policy, optimizer, tokenizer, total_steps, value=(value_model, value_optimizer),
        sampler=sampler, show=SHOW,
        curves=(*CURVES, "objective/kl", "value_loss", "explained_variance"),
    )  # fmt: skip
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
        penalties_PG = truncation_penalties(groups, args.missing_eos_penalty)
        scores_BG = distributed.gather_rows(rewards_PG + penalties_PG, positions).to(device)
        if args.has_turns:
            for sample in chain(*groups):
                for sequence in sample.sequences:  # its branches too
                    sequence.streams["turn_rewards"] = sequence.rewards_before_last_turn()
        trained = without_unscored(groups, rewards_PG)
        minibatches = pack_minibatches(
            trained, positions, args.minibatches, args.pack_tokens, device, policy.share_prefix
        )
        with meter.time("logprobs"):  # they stay fixed, like the values
            minibatches = with_logprobs(minibatches, args.temperature, old=policy, ref=reference)
            minibatches = with_values(minibatches, value_model)
        if run.checks_engine(step):
            require_agreement(minibatches, step, args, device)

        # ---- 3. rewards of tokens; advantages and returns ----
        minibatches = [
            [with_advantages(mb, scores_BG, turn_weight, args, meter) for mb in mbs]
            for mbs in minibatches
        ]
        minibatches = whiten(minibatches)

        # ---- 4. update: policy and value model, with an optimizer each ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            trains_policy = step >= args.value_warmup_steps
            for minibatch in minibatches * args.epochs_per_rollout:
                num_tokens, _ = count_trained(minibatch)  # on all ranks
                norm = args.max_grad_norm
                if trains_policy:
                    total_loss = add_policy_gradient(policy, minibatch, num_tokens, args, meter)
                    grad_norm = optimizer_step(policy, optimizer, lr, norm, total_loss)
                    meter.mean("grad_norm", grad_norm)
                    meter.sum_over_ranks("loss", total_loss)
                values_loss = add_value_gradient(value_model, minibatch, num_tokens)
                value_lr = lr * args.value_lr / args.lr
                value_grad_norm = optimizer_step(
                    value_model, value_optimizer, value_lr, norm, values_loss
                )
                meter.mean("value_grad_norm", value_grad_norm)
                meter.sum_over_ranks("value_loss", values_loss)

        # ---- 5. metrics, with the tokens of the samples; log and evaluate ----
        explained = explained_variance(minibatches)
        metrics = run.reduce(chain(*groups), lr=lr, explained_variance=explained)
        if run.evaluates(step + 1):
            metrics |= evaluate_prompts(sampler, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        # samples are shown with the advantage of their last token
        last_advantages = [mb.advantages_T[mb.ends_N] for mb in chain(*minibatches)]
        advantages_BG = per_sample(chain(*minibatches), last_advantages, scores_BG.shape)
        advantages_PG = advantages_BG[positions]
        run.show_samples(step + 1, groups, positions, rewards_PG, advantages_PG, named_rewards)

    run.end()
    sampler.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
