"""DAPO, GRPO for long chains of thought (Yu et al. 2025, arXiv:2503.14476).

    torchrun --nproc_per_node 8 dapo.py --model Qwen/Qwen3-1.7B --dataset openai/gsm8k --reward gsm8k

What it adds to grpo.py, read beside it: the clip's upper bound is wider than its lower one (clip-higher), groups whose
rewards are all equal are replaced by further ones (dynamic sampling), every token of the batch counts the same, and
completions near the length limit are penalised (overlong shaping) or not trained on (--mask_truncated). KL is gone. On
request only the tokens of highest entropy have a loss (Wang et al. 2025, arXiv:2506.01939).

Differences from the paper: engine and trainer are reconciled by truncated importance weights, and if --max_draws do
not find enough unequal groups the step trains on those there are. See docs/dapo.md.

Shapes: P prompts on this rank, B kept prompts of the step on all ranks, G samples per prompt, T packed tokens in one
micro-batch. Every per-token stream is aligned with *targets*: x_T[t] describes targets_T[t].
"""

import math
from dataclasses import dataclass
from itertools import chain, pairwise

import torch

from common.config.flags import AtLeast2, BelowOne, Fraction, NotNegative, Positive, PositiveFraction, with_flags
from common.config.groups import OnlineArgs, SamplingArgs, TrainArgs
from common.config.parse import parse
from common.data.packing import PackedBatch, Sample, pack, to_samples
from common.model.hub import context_length, load_tokenizer, resolve_model
from common.model.logprobs import add_logprobs
from common.model.lora import LoRAArgs
from common.model.policy import load_policy
from common.objectives.advantages import group_advantages, top_entropy_threshold, unequal
from common.objectives.importance import CorrectionArgs, correction_weights
from common.objectives.policy import clip_policy_loss, clipped
from common.objectives.shaping import overlong_penalties, truncation_penalties
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout import statistics
from common.rollout.prompts import load_prompts
from common.rollout.remote_sampler import make_rollouts, serve
from common.train.checkpoint import prepare_output_dir
from common.train.optim import adamw, optimizer_step
from common.train.run import Run


@dataclass
class Args(CorrectionArgs, OnlineArgs, SamplingArgs, LoRAArgs, TrainArgs):
    output_dir: str = "runs/dapo"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/"""
    samples_per_prompt: AtLeast2 = 8
    """completions sampled for each prompt (G): a group, whose members are compared"""
    lr: Positive[float] = 1e-6
    """peak learning rate of AdamW"""
    clip_low: BelowOne = 0.2
    """the importance ratio is clipped below at 1 - clip_low"""
    clip_high: NotNegative[float] = 0.28
    """the importance ratio is clipped above at 1 + clip_high"""
    max_draws: NotNegative[int] = 10
    """draw up to this many times prompts_per_step, until that many groups have unequal rewards; 0: take all groups"""
    overlong_buffer: Fraction = 0.2
    """a completion that reaches into this last fraction of max_new_tokens is penalised; 0: off"""
    overlong_penalty: NotNegative[float] = 1.0
    """subtracted from the reward of one of max_new_tokens; linearly less, down to 0 where the buffer begins"""
    mask_truncated: bool = False
    """do not train on completions that max_new_tokens cut off; their rewards still count in their groups"""
    top_entropy: PositiveFraction = 1.0
    """only this fraction of the tokens, those of highest entropy, has a loss (arXiv:2506.01939: 0.2)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_read("overlong_penalty", self.overlong_buffer > 0, "--overlong_buffer is 0")


def next_draw(kept: int, drawn: int, args: Args) -> int:
    """How many prompts to draw, if `kept` of the `drawn` groups so far have unequal rewards: as few as fill the step
    with a probability of about 0.98, the chance of each being that of those before, and at most a step's and what
    --max_draws leaves."""
    step, missing, chance = args.prompts_per_step, args.prompts_per_step - kept, kept / max(1, drawn)
    enough = (n for n in range(missing, step) if n * chance - 2 * math.sqrt(n * chance * (1 - chance)) >= missing)
    return min(next(enough, step), max(1, args.max_draws) * step - drawn)


def pack_kept(
    groups: dict[int, list[Sample]], kept: list[int], count: int, pack_tokens: int, device: torch.device
) -> list[list[PackedBatch]]:
    """Minibatches of this rank's share of the `kept` groups, which are named by their positions in the step: each is of
    the same global prompts on any number of ranks, and none is empty. Collective."""
    count = min(count, len(kept))
    cuts = [len(kept) * m // count for m in range(count + 1)]
    chosen = [[s for i in kept[low:high] for s in groups.get(i, ())] for low, high in pairwise(cuts)]
    # pack() gives every rank the same number of micro-batches: FSDP collectives must match.
    return [pack(samples, pack_tokens, device) for samples in chosen]


def entropy_threshold(minibatches: list[list[PackedBatch]], fraction: float) -> float:
    """The entropy that this fraction of all ranks' trained tokens reaches. Collective."""
    if fraction == 1:
        return -math.inf
    mine = torch.cat([mb.old_entropy_T[mb.loss_mask_T] for mb in chain(*minibatches)]).cpu()
    return top_entropy_threshold(torch.cat(distributed.gather_objects(mine)), fraction)


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
    optimizer = adamw(model, args)
    rollouts = make_rollouts(model, prompts, args, tokenizer, device, rewards)

    # ---- the objective, its floats bound to the flags of their names ----
    policy_loss, outside_clip = with_flags(clip_policy_loss, args), with_flags(clipped, args)
    correction = with_flags(correction_weights, args)
    cut_off, overlong = with_flags(truncation_penalties, args), with_flags(overlong_penalties, args)

    # ---- resume: everything else is a function of (seed, step) ----
    run = Run(
        args, model, optimizer, tokenizer, total_steps, rollouts=rollouts,
        show=("reward", "eval/pass_at_1", "completions/mean_length", "time/step"),
        curves=("reward", *(f"rewards/{name}/mean" for name in rewards.scorers), "eval/pass_at_1", "entropy",
                "completions/mean_length", "dynamic_sampling/unequal_fraction", "grad_norm"),
    )  # fmt: skip
    meter, updates = run.meter, args.minibatches * args.epochs_per_rollout
    first_pass = updates > 1 or args.top_entropy < 1  # else the update's own forward will do
    how = "on-policy" if updates == 1 and not rollouts.ahead else f"off-policy, {updates} updates per rollout"
    run.message(f"{prompts}, {held_out} held out, {total_steps} steps on {world_size} ranks, {rollouts}, {how}")
    if held_out and run.first_step == 0:
        run.log(0, statistics.evaluate(rollouts, 0, held_out, rewards))

    for step in run.steps():
        with meter.time("step"):
            # ---- 1. rollout and reward; again until enough groups can teach something (dynamic sampling) ----
            groups, everyones_BG, kept, drawn = {}, [], [], 0  # groups: this rank's, by their positions in the step
            while len(kept) < args.prompts_per_step and (size := next_draw(len(kept), drawn, args)) > 0:
                rollouts.submit(step, total_steps, size)
                fresh = rollouts.collect(step, meter)
                if fresh is None:  # told to stop
                    break
                with meter.time("reward"):
                    rewards_PG, parts = rewards(fresh, meter)
                statistics.measure_groups(meter, fresh, rewards_PG, parts, first=step == drawn == 0)
                penalties_PG = cut_off(statistics.truncated(fresh)) + overlong(statistics.lengths(fresh))
                to_samples(fresh, advantage=group_advantages(rewards_PG + penalties_PG))
                groups |= zip((drawn + i for i in rollouts.positions), fresh, strict=True)
                everyones_BG.append(statistics.gather_groups(rewards_PG, rollouts.positions))
                informative_B = unequal(torch.cat(everyones_BG)) | (args.max_draws == 0)
                kept = informative_B.nonzero()[:, 0].tolist()[: args.prompts_per_step]
                drawn = len(informative_B)
            if fresh is None:
                break
            if not kept:
                what = f"no group has unequal rewards after --max_draws {args.max_draws}"
                raise distributed.RunError(f"step {step + 1}: {what}")

            # ---- 2. pack what is kept; log-probs of the policy that sampled ----
            for sample in chain(*(groups[i] for i in groups.keys() - kept)):
                sample.advantage = 0.0  # samples.jsonl has all that was drawn
            for sample in chain(*groups.values()) if args.mask_truncated else ():
                if sample.finish_reason == "length":
                    sample.loss_mask = [False] * len(sample.ids)
            minibatches = pack_kept(groups, kept, args.minibatches, args.pack_tokens, device)
            with meter.time("logprobs"):
                if first_pass or run.checks_engine(step):
                    add_logprobs("old", model, minibatches, args.temperature)
            if run.checks_engine(step):
                statistics.check_agreement(minibatches, step, args, device)
            threshold = entropy_threshold(minibatches, args.top_entropy)

            # ---- 3. update: one optimizer step per minibatch ----
            with meter.time("train"):
                for minibatch in minibatches * args.epochs_per_rollout:
                    # Token mean over the *global* minibatch. FSDP averages gradients over ranks; undo that.
                    tokens, _ = statistics.count_trained(minibatch)
                    minibatch_loss = torch.zeros((), device=device)
                    for mb in minibatch:
                        logprobs_T, entropy_T, *_ = model(mb, temperature=args.temperature)
                        if mb.old_logprobs_T is None:  # on-policy: the ratio is 1, its gradient is not 0
                            mb.old_logprobs_T = logprobs_T.detach()
                        log_ratio_T = logprobs_T - mb.old_logprobs_T
                        engine_T = mb.old_logprobs_T - mb.rollout_logprobs_T
                        mb.correction_T = correction(engine_T, mb.loss_mask_T, mb.sequence_ids_T)
                        loss_T = policy_loss(log_ratio_T, mb.advantages_T) * mb.correction_T
                        if args.top_entropy < 1:
                            loss_T = loss_T * (mb.old_entropy_T >= threshold)
                        loss = (loss_T * mb.loss_mask_T).sum() / tokens
                        (loss * world_size).backward()
                        minibatch_loss += loss.detach()
                        clipped_T = outside_clip(log_ratio_T.detach(), mb.advantages_T)
                        meter.masked_mean("clip_ratio/region_mean", clipped_T, mb.loss_mask_T)
                        statistics.measure_update(meter, mb, entropy_T)
                    lr = run.learning_rate(step)
                    meter.mean("grad_norm", optimizer_step(model, optimizer, lr, args.max_grad_norm, minibatch_loss))
                    meter.mean("loss", minibatch_loss, 1 / world_size)

        # ---- 4. log and evaluate ----
        trained = (sample for mb in chain(*minibatches) for sample in mb.samples)
        metrics = run.reduce(trained, lr=lr)
        metrics["dynamic_sampling/draws"] = drawn / args.prompts_per_step
        metrics["dynamic_sampling/unequal_fraction"] = float(informative_B.double().mean())
        if held_out and run.evaluates(step + 1):
            metrics |= statistics.evaluate(rollouts, step + 1, held_out, rewards)
        run.log(step + 1, metrics)
        run.show_samples(step + 1, list(groups.values()), list(groups))

    run.end()
    rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
