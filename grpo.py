"""GRPO and its family, reinforcement learning with verifiable rewards (Shao et al. 2024, arXiv:2402.03300).

    torchrun --nproc_per_node 8 grpo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k --reward gsm8k --preset dapo

Several completions of each prompt are sampled and rewarded; a completion's advantage is how much better it did than its
group, and PPO's clipped loss makes the better ones more likely. No value model, and no reference unless `--beta`. The
family differs in the loss, in what a token counts, and in the advantage: a flag for each, a `--preset` for a paper's.

Differences from the paper, without a preset: the loss is a mean over the tokens of the whole global batch and the clip
bounds differ (both DAPO, arXiv:2503.14476), KL to the reference is off, and the probabilities of engine and trainer are
reconciled by truncated importance weights. See docs/grpo.md.

Shapes: P prompts on this rank, B prompts of the step on all ranks, G samples per prompt, K rewards, N completions and T
packed tokens in one micro-batch. Every per-token stream is aligned with *targets*: x_T[t] describes targets_T[t].
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from common import advantages, distributed, losses, online
from common.checkpoint import Checkpointer, prepare_output_dir
from common.cli import parse
from common.data import Encoder
from common.hub import context_length, load_tokenizer, resolve_model
from common.metrics import Meter, RunLogger, Totals
from common.models import load_policy
from common.online import KLCoefficient, PolicyGradientArgs
from common.optim import adamw, learning_rate, optimizer_step
from common.packing import PackedBatch, pack
from common.prompts import encode_prompts, prompt_columns
from common.rewards.scoring import Rewards
from common.rollout.measure import check_agreement
from common.rollout.remote import make_rollouts, serve
from common.rows import train_and_eval_rows

PAPER_CLIP = dict(clip_low=0.2, clip_high=0.2)
PRESETS: dict[str, dict] = {
    "grpo": dict(loss="clip", reduction="sequence", advantage="group", beta=0.04, **PAPER_CLIP),
    "dr_grpo": dict(loss="clip", reduction="constant", advantage="group_mean", **PAPER_CLIP),
    "dapo": dict(loss="clip", reduction="token", advantage="group", clip_low=0.2, clip_high=0.28, max_draws=10,
                 overlong_buffer=0.2),
    "gspo": dict(loss="gspo", reduction="sequence", advantage="group", clip_low=3e-4, clip_high=4e-4,
                 correction="sequence"),
    "cispo": dict(loss="cispo", reduction="token", advantage="group"),
    "sapo": dict(loss="sapo", reduction="sequence", advantage="group"),
    "topr": dict(loss="topr", reduction="sequence_sum", advantage="group_mean"),
    "reinforce": dict(loss="reinforce", reduction="sequence_sum", advantage="leave_one_out", minibatches=1,
                      epochs_per_rollout=1),
    "reinforce++": dict(loss="clip", reduction="token", advantage="reinforce++", beta=0.01, kl_in="reward",
                        kl_estimator="k1", **PAPER_CLIP),
    "reinforce++_baseline": dict(loss="clip", reduction="token", advantage="reinforce++_baseline", beta=0.01,
                                 kl_estimator="k2", **PAPER_CLIP),
    "liteppo": dict(loss="clip", reduction="token", advantage="group_mean_batch_std", **PAPER_CLIP),
    "gdpo": dict(loss="clip", reduction="token", advantage="gdpo", **PAPER_CLIP),
}  # fmt: skip


@dataclass
class Args(PolicyGradientArgs):
    PRESETS: ClassVar[dict[str, dict]] = PRESETS
    """what `--preset` may name, and the flags each sets"""
    output_dir: str = "runs/grpo"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/"""
    lr: float = 1e-6
    """peak learning rate of AdamW"""
    preset: Literal[tuple(PRESETS)] | None = None
    """the flags of a published variant, see docs/grpo.md; one that is also given with another value is an error"""
    loss: Literal["clip", "reinforce", "cispo", "gspo", "sequence_clip", "sapo", "topr"] = "clip"
    """what is minimised for each token: the table in docs/grpo.md, `policy_loss` below"""
    reduction: losses.Reduction = "token"
    """mean over: tokens; completions, of their means (sequence) or sums; or sum / (completions x max_new_tokens)"""
    advantage: Literal["group", "group_mean", "group_mean_batch_std", "leave_one_out", "reinforce++",
                       "reinforce++_baseline", "gdpo"] = "group"  # fmt: skip
    """how rewards become advantages: the table in docs/grpo.md, `completion_advantages` below"""
    clip_low: float = 0.2
    """clip, gspo, sequence_clip: the importance ratio is clipped below at 1 - clip_low"""
    clip_high: float = 0.28
    """clip, gspo, sequence_clip: the importance ratio is clipped above at 1 + clip_high"""
    dual_clip: float = 0.0
    """clip, gspo, sequence_clip: a negative advantage's loss is at most dual_clip |A| (above 1; usual: 3); 0: not"""
    cispo_high: float = 4.0
    """cispo: the weight of a token is at most 1 + cispo_high"""
    sapo_tau_positive: float = 1.0
    """sapo: temperature of the gate for positive advantages"""
    sapo_tau_negative: float = 1.05
    """sapo: temperature of the gate for the others"""
    kl_in: Literal["loss", "reward"] = "loss"
    """where beta x KL goes: on each token of the loss, or summed over a completion and taken from its reward"""
    kl_estimator: losses.KLEstimator = "k3"
    """estimate of the KL per token: k1, k2 or k3"""
    kl_clamp: float = 0.0
    """the estimate is clamped to [-kl_clamp, kl_clamp] on each token; 0: not"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus"""
    positive_nll: float = 0.0
    """weight of the mean negative log-likelihood of the tokens with a positive advantage (VAPO, arXiv:2504.05118)"""
    top_entropy: float = 1.0
    """only this fraction of the tokens, those of highest entropy, has a policy loss (arXiv:2506.01939: 0.2)"""
    mask_truncated: bool = False
    """do not train on completions that max_new_tokens cut off; their rewards still count in their groups"""
    max_draws: int = 0
    """draw up to this many times prompts_per_step, until as many groups have unequal rewards (DAPO); 0: take all"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_prompt < 2:
            raise ValueError(f"--samples_per_prompt {self.samples_per_prompt}: GRPO compares samples, at least 2")
        self.require_clip_bounds()
        self.require_positive("cispo_high", "sapo_tau_positive", "sapo_tau_negative")
        self.require_finite("cispo_high", "sapo_tau_positive", "sapo_tau_negative")
        self.require_not_negative("dual_clip", "kl_clamp", "entropy_coef", "positive_nll", "max_draws")
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"--dual_clip {self.dual_clip} must be above 1, or 0 for none")
        if not 0 < self.top_entropy <= 1:
            raise ValueError(f"--top_entropy {self.top_entropy} is a fraction of the tokens: above 0, at most 1")
        if self.loss in ("gspo", "sequence_clip"):
            for flag, fits in (("reduction", "sequence"), ("correction", "sequence or none"), ("top_entropy", "1.0")):
                if (value := str(getattr(self, flag))) not in fits.split(" or "):
                    raise ValueError(f"--loss {self.loss} is of whole completions: --{flag} {fits}, not {value}")
        if self.mask_truncated and self.kl_in == "reward":
            raise ValueError("--mask_truncated: a completion that is masked has no KL for --kl_in reward to take")
        if self.advantage == "gdpo" and (self.reward_scale != 1 or self.reward_clip or self.kl_in == "reward"):
            raise ValueError("--advantage gdpo normalises each reward: no --reward_scale, _clip, --kl_in reward")
        clips = self.loss in ("clip", "gspo", "sequence_clip")
        for flag, read in (("clip_low", clips), ("clip_high", clips), ("dual_clip", clips),
                           ("cispo_high", self.loss == "cispo"), ("sapo_tau_positive", self.loss == "sapo"),
                           ("sapo_tau_negative", self.loss == "sapo")):  # fmt: skip
            self.require_read(flag, read, f"--loss is {self.loss}")
        for flag in ("kl_in", "kl_estimator", "kl_clamp"):
            self.require_read(flag, self.beta > 0, "--beta is 0")


def completion_advantages(
    args: Args, rewards_BG: Tensor, parts_KBG: Tensor, weights_K: list[float], lengths_BG: Tensor
) -> Tensor:
    """`--advantage`: one number per completion, [B, G]. The rewards are of all ranks."""
    match args.advantage:
        case "group":
            return advantages.group_advantages(rewards_BG)
        case "group_mean":
            return advantages.group_advantages(rewards_BG, scale_by_std=False)
        case "group_mean_batch_std":
            return advantages.group_mean_batch_std(rewards_BG)
        case "leave_one_out":
            return advantages.leave_one_out(rewards_BG)
        case "reinforce++":
            return advantages.reinforce_plus_plus(rewards_BG, lengths_BG)
        case "reinforce++_baseline":
            return advantages.reinforce_plus_plus(rewards_BG, lengths_BG, baseline=True)
        case "gdpo":  # penalties for length are one more reward
            return advantages.gdpo(parts_KBG.masked_fill(rewards_BG.isnan(), math.nan), weights_K)


def policy_loss(meter: Meter, args: Args, mb: PackedBatch, logprobs_T: Tensor) -> Tensor:
    """`--loss`, one value per token, not reduced."""
    old_T, advantages_T = mb.old_logprobs_T, mb.advantages_T
    new_T = torch.where(mb.loss_mask_T, logprobs_T, old_T)  # ratio 1: what is masked cannot overflow
    match args.loss:
        case "reinforce":
            return losses.reinforce_loss(new_T, advantages_T)
        case "cispo":
            return losses.cispo_loss(new_T, old_T, advantages_T, args.cispo_high)
        case "sapo":
            return losses.sapo_loss(new_T, old_T, advantages_T, args.sapo_tau_positive, args.sapo_tau_negative)
        case "topr":
            return losses.topr_loss(new_T, mb.sequence_sum_T(new_T - old_T), advantages_T)
        case "gspo":  # the ratio of a completion, length-normalised, on each of its tokens
            new_T, old_T = mb.sequence_mean_T(new_T), mb.sequence_mean_T(old_T)
        case "sequence_clip":  # the ratio of a completion, as in RLOO
            new_T, old_T = mb.sequence_sum_T(new_T), mb.sequence_sum_T(old_T)
    too_low_T = ((new_T - old_T).detach() < math.log(1 - args.clip_low)) & (advantages_T < 0)
    too_high_T = ((new_T - old_T).detach() > math.log(1 + args.clip_high)) & (advantages_T > 0)
    meter.masked_mean("clip_ratio/region_mean", too_low_T | too_high_T, mb.loss_mask_T)
    return losses.clip_policy_loss(new_T, old_T, advantages_T, args.clip_low, args.clip_high, args.dual_clip)


def top_entropy_threshold(micro_batches: list[PackedBatch], fraction: float) -> float:
    """The entropy that this fraction of all ranks' trained tokens reaches. Collective."""
    if fraction == 1:
        return -math.inf
    mine = torch.cat([mb.entropy_T[mb.loss_mask_T] for mb in micro_batches])
    highest = torch.cat(distributed.gather_objects(mine.cpu())).sort(descending=True).values
    return float(highest[math.ceil(fraction * len(highest)) - 1]) if len(highest) else math.inf


def main(args: Args) -> None:
    # ---- setup: one process per GPU, identical Args everywhere ----
    device, rank, world_size = distributed.setup(args.seed, args.rollout_ranks)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until the others are done
    prepare_output_dir(args)

    # ---- data: prompts as token ids, and what the rewards need beside them ----
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path)
    encoder = Encoder(tokenizer, args)
    rows, eval_rows = train_and_eval_rows(args)
    columns = prompt_columns(args, rows + eval_rows)
    rewards = Rewards(args, rows + eval_rows, tokenizer, device)
    room = context_length(path, args) - args.max_new_tokens
    prompts, rows, dropped = encode_prompts(rows, columns, encoder, room, args)
    eval_prompts, eval_rows, eval_dropped = encode_prompts(eval_rows, columns, encoder, room, args)
    total_steps = args.max_steps or math.ceil(args.epochs * len(prompts) / args.prompts_per_step)

    # ---- models: FSDP2 shards train; vLLM samples, in the same process or on the rollout ranks ----
    model = load_policy(path, args, device)
    reference = load_policy(path, args, device, trainable=False) if args.beta else None
    optimizer = adamw(model, args)
    rollouts = make_rollouts(model, prompts, rows, args, tokenizer, device)

    # ---- resume: everything else is a function of (seed, step) ----
    totals, beta = Totals(), KLCoefficient(args)
    checkpointer = Checkpointer(args, model, optimizer, rollouts=rollouts, totals=totals, beta=beta)
    first_step = checkpointer.load_latest()
    meter = Meter()
    logger = RunLogger(
        args, first_step, total_steps, show=("reward", "eval/pass_at_1", "completions/mean_length", "time/step"),
        curves=("reward", *(f"rewards/{name}/mean" for name in rewards.scorers), "eval/pass_at_1", "entropy",
                "completions/mean_length", "grad_norm", "sampling/sampling_logp_difference/max"),
    )  # fmt: skip
    updates = args.minibatches * args.epochs_per_rollout
    first_pass = updates > 1 or args.kl_in == "reward" or args.top_entropy < 1  # else the update's own forward will do
    logger.message(
        f"{len(prompts)} prompts ({dropped} too long), {len(eval_prompts)} held out ({eval_dropped} too long), "
        f"{total_steps} steps on {world_size} ranks, {rollouts}, "
        + ("on-policy" if updates == 1 and not rollouts.ahead else f"off-policy, {updates} updates per rollout")
    )
    if args.preset:
        flags = " ".join(f"--{flag} {value}" for flag, value in PRESETS[args.preset].items())
        logger.message(f"preset {args.preset}: {flags}")
    if args.beta and args.kl_in == "loss" and args.kl_estimator == "k1":
        logger.message("--kl_estimator k1 in the loss: its gradient is zero on average, it does not hold the policy")
    if args.loss == "reinforce" and updates > 1:
        logger.message(f"--loss reinforce has no ratio: after the first of {updates} updates its gradient is biased")
    if eval_prompts and first_step == 0:
        logger.log(0, online.evaluate(rollouts, 0, eval_prompts, eval_rows, rewards))

    stopping = False
    for step in range(first_step, total_steps):
        # ---- 1. rollout, by the weights we are about to update or, with --rollout_ranks, older ones; and reward ----
        with meter.time("step"):
            # This rank's groups and where they stand in the step; all ranks' rewards; groups that can teach something.
            groups, positions, kept, informative, draws = [], [], [], 0, 0
            while len(kept) < args.prompts_per_step and draws < max(1, args.max_draws):
                draws += 1
                rollouts.submit(step, total_steps)
                fresh = rollouts.collect(step, meter)
                stopping = fresh is None
                if stopping:
                    break
                with meter.time("reward"):
                    rewards_PG, parts = rewards(fresh, meter)
                    penalties_PG = online.length_penalties(fresh, args)
                online.measure_groups(meter, fresh, rewards_PG, parts)
                lengths_PG = torch.tensor([[len(s.completion_ids) for s in group] for group in fresh]).double()
                known = torch.stack([rewards_PG, penalties_PG, lengths_PG, *parts.values()], 1)
                known, wanted = online.all_groups(known, rollouts.positions), list(range(args.prompts_per_step))
                if args.max_draws:
                    told_apart_by = (
                        known[:, 3:] if args.advantage == "gdpo" else online.shape_rewards(known[:, :1], args)
                    )
                    wanted = advantages.unequal(told_apart_by).any(-1).nonzero()[:, 0].tolist()
                informative += len(wanted)
                for i in wanted[: args.prompts_per_step - len(kept)]:
                    if i % world_size == rank:
                        groups.append(fresh[i // world_size])
                        positions.append(len(kept))
                    kept.append(known[i])
            if stopping:
                break
            if not kept:
                raise distributed.RunError(
                    f"step {step + 1}: no group has unequal rewards after --max_draws {args.max_draws}"
                )
            rewards_BG, penalties_BG, lengths_BG, *parts_KBG = torch.stack(kept).unbind(1)

            # ---- 2. pack, log-probs of the rollout policy and the reference, advantage ----
            if args.mask_truncated:
                for sample in (s for group in groups for s in group if s.finish_reason == "length"):
                    sample.loss_mask = [False] * len(sample.ids)
            # Minibatch m is the same global prompts on any number of ranks, and never empty.
            # pack() gives every rank the same number of micro-batches: FSDP collectives must match.
            count = min(args.minibatches, len(kept))
            cuts = [len(kept) * m // count for m in range(count + 1)]
            minibatches = [
                pack([s for i, group in zip(positions, groups, strict=True) if low <= i < high for s in group],
                     args.pack_tokens, device)
                for low, high in pairwise(cuts)
            ]  # fmt: skip
            micro_batches, kl_of = [mb for minibatch in minibatches for mb in minibatch], {}
            with meter.time("logprobs"), torch.no_grad():
                for mb in micro_batches:
                    if first_pass:
                        mb.old_logprobs_T, mb.entropy_T, *_ = model(mb, temperature=args.temperature)
                    if reference is not None:
                        mb.ref_logprobs_T, *_ = reference(mb, temperature=args.temperature)
                    if args.kl_in == "reward":
                        logprobs_T, ref_logprobs_T = mb.old_logprobs_T, mb.ref_logprobs_T
                        kl_T = losses.kl_estimate(logprobs_T, ref_logprobs_T, args.kl_estimator, args.kl_clamp)
                        kl_of |= zip(map(id, mb.samples), mb.sequence_sums(kl_T).tolist(), strict=True)
                        meter.masked_mean("kl", kl_T, mb.loss_mask_T)
                model.reshard()  # a forward without backward leaves the root whole
            threshold = top_entropy_threshold(micro_batches, args.top_entropy)
            totals_BG = online.shape_rewards(rewards_BG, args) + penalties_BG
            if args.kl_in == "reward":
                kl_PG = torch.tensor([[kl_of[id(s)] for s in group] for group in groups], dtype=torch.float64)
                totals_BG = totals_BG - beta.value * online.all_groups(kl_PG, positions)
            parts_KBG, weights_K = torch.stack([*parts_KBG, penalties_BG]), [*rewards.weights.tolist(), 1.0]
            advantages_BG = completion_advantages(args, totals_BG, parts_KBG, weights_K, lengths_BG)
            for i, group in zip(positions, groups, strict=True):
                for sample, advantage in zip(group, advantages_BG[i].tolist(), strict=True):
                    sample.advantage = advantage  # of the whole completion
            for mb in micro_batches:
                mb.advantages_T = mb.per_token(mb.per_sequence(s.advantage for s in mb.samples))

            # ---- 3. update ----
            with meter.time("train"):
                for update in range(count * args.epochs_per_rollout):
                    minibatch = minibatches[update % count]
                    # Denominators count the *global* minibatch, before the first backward.
                    tokens = distributed.all_sum(sum(mb.loss_mask_T.sum() for mb in minibatch))
                    sequences = distributed.all_sum(sum(any(s.loss_mask) for mb in minibatch for s in mb.samples))
                    if args.positive_nll:
                        positives = sum((mb.loss_mask_T & (mb.advantages_T > 0)).sum() for mb in minibatch)
                        positive_tokens = distributed.all_sum(positives).clamp(min=1)
                    minibatch_loss = torch.zeros((), device=device)
                    for mb in minibatch:
                        logprobs_T, entropy_T, *_ = model(mb, temperature=args.temperature)
                        if mb.old_logprobs_T is None:
                            mb.old_logprobs_T = logprobs_T.detach()
                        weights_T = online.correction_weights(mb, args)
                        loss_T = policy_loss(meter, args, mb, logprobs_T) * weights_T
                        if args.top_entropy < 1:
                            loss_T = loss_T * (mb.entropy_T >= threshold)
                        if args.beta and args.kl_in == "loss":
                            kl_T = losses.kl_estimate(logprobs_T, mb.ref_logprobs_T, args.kl_estimator, args.kl_clamp)
                            loss_T = loss_T + beta.value * kl_T
                            meter.masked_mean("kl", kl_T, mb.loss_mask_T)
                        if args.entropy_coef:  # not times 0: the entropy's backward is another pass over the logits
                            loss_T = loss_T - args.entropy_coef * entropy_T
                        counts_T = losses.reduction_weights(mb, args.reduction, tokens, sequences, args.max_new_tokens)
                        loss = (loss_T * counts_T).sum()
                        if args.positive_nll:
                            positive_T = mb.loss_mask_T & (mb.advantages_T > 0)
                            loss = loss - args.positive_nll * (logprobs_T * positive_T).sum() / positive_tokens
                        (loss * world_size).backward()  # FSDP averages gradients over ranks; undo that
                        minibatch_loss += loss.detach()
                        meter.masked_mean("entropy", entropy_T, mb.loss_mask_T)
                        if update < count:
                            online.measure_sampling(meter, mb, weights_T)
                    if step == first_step and update == 0:
                        check_agreement(micro_batches, args, device)
                    lr = learning_rate(step, total_steps, args)
                    grad_norm = optimizer_step(model, optimizer, lr, args.max_grad_norm, minibatch_loss)
                    meter.mean("grad_norm", grad_norm)
                    meter.mean("loss", minibatch_loss, 1 / world_size)

        # ---- 4. log, evaluate, checkpoint ----
        totals.num_tokens += int(distributed.all_sum(sum(s.num_targets for group in groups for s in group)))
        metrics = online.effective_sample_size(meter.reduce())
        metrics |= dict(lr=lr, epoch=rollouts.epochs_done, num_tokens=totals.num_tokens)
        if args.max_draws:
            metrics["dynamic_sampling/draws"] = draws
            metrics["dynamic_sampling/unequal_fraction"] = informative / (draws * args.prompts_per_step)
        if args.beta:
            metrics["beta"] = beta.value
            if "kl" in metrics:  # not if everything was masked
                beta.update(metrics["kl"], rewards_BG.numel())
        last = step + 1 == total_steps
        if eval_prompts and ((step + 1) % args.eval_every == 0 or last):
            metrics |= online.evaluate(rollouts, step + 1, eval_prompts, eval_rows, rewards)
        logger.log(step + 1, metrics)
        if (step + 1) % args.log_every == 0 or last:
            logger.samples(step + 1, groups, rewards_BG[positions], positions)
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
