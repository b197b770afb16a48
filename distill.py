"""On-policy distillation: a student learns from a teacher on what it writes itself (GKD, Agarwal et al. 2023,
arXiv:2306.13649; MiniLLM, Gu et al. 2023, arXiv:2306.08543).

    torchrun --nproc_per_node 8 distill.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B --dataset openai/gsm8k

The student samples, and at each of its tokens its distribution is drawn to the teacher's: no reward, no advantage over
a group, and as many numbers to learn from as the vocabulary has tokens, at every token. `--on_policy_fraction` below 1
has the rest of a step's completions from the data.

Differences from the papers: the fraction is of each step's prompts, not a coin for each step; nothing is learned
through the sampling (as in GKD), and a reward is mixed in with `--estimator sampled` alone. See docs/distill.md.

Shapes: P prompts on this rank, G samples per prompt, T packed tokens in one micro-batch. Every per-token stream is
aligned with *targets*: x_T[t] describes the prediction of targets_T[t].
"""

import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar, Literal

import torch
from torch import Tensor

from common.config.flags import (
    BelowOne,
    Fraction,
    NotNegative,
    OpenFraction,
    Positive,
    require_flags_read,
    with_flags,
)
from common.config.groups import OnlineArgs, SamplingArgs, TrainArgs
from common.config.parse import parse
from common.data.encode import Encoder, cut
from common.data.order import make_order
from common.data.packing import Sample, pack, pack_minibatches, to_samples
from common.data.rows import SFT_COLUMNS, require_columns, usable
from common.metrics.meter import Meter
from common.model.hub import context_length, load_tokenizer, require_same_tokenizer, resolve_model
from common.model.logprobs import add_logprobs
from common.model.lora import LoRAArgs
from common.model.policy import Policy, load_policy
from common.model.teacher import StoredTeacher, load_teacher, require_known, shared_vocabulary
from common.objectives.advantages import group_advantages
from common.objectives.divergence import DIVERGENCES, Comparison
from common.objectives.importance import CorrectionArgs, correction_weights
from common.objectives.policy import clip_policy_loss, clipped
from common.objectives.shaping import truncation_penalties
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout import statistics
from common.rollout.prompts import Prompts, load_prompts
from common.rollout.remote_sampler import make_rollouts, serve
from common.train.checkpoint import prepare_output_dir
from common.train.optim import adamw, optimizer_step
from common.train.run import Run

COLUMNS = tuple(pair for pair in SFT_COLUMNS if len(pair) == 2)  # a prompt and its completion


@dataclass
class Args(CorrectionArgs, OnlineArgs, SamplingArgs, LoRAArgs, TrainArgs):
    TINY_DEFAULTS: ClassVar[dict] = dict(prompts_per_step=256, samples_per_prompt=1, on_policy_fraction=0.5)
    output_dir: str = "runs/distill"
    """where everything goes: args.yaml, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, hf/"""
    teacher: str | None = None
    """Hugging Face id or folder of the model to learn from; it has the student's tokenizer. There must be one"""
    samples_per_prompt: Positive[int] = 1
    """completions sampled for each prompt (G)"""
    reward: tuple[str, ...] = ()
    """what to measure completions by: exact_match, gsm8k, math, ... (docs/rewards.md); nothing is learned from it
    unless reward_coef is above 0"""
    lr: Positive[float] = 1e-5
    """peak learning rate of AdamW"""
    on_policy_fraction: Fraction = 1.0
    """the fraction of a step's prompts that the student completes (lambda of the paper); the others' completions are
    the data's, of other rows"""
    divergence: Literal[tuple(DIVERGENCES)] = "reverse_kl"
    """what is minimised at each token, over the whole vocabulary: the table in docs/distill.md"""
    jsd_beta: OpenFraction = 0.5
    """jsd: weight of the teacher in the mixture; towards 0 it is like forward_kl, towards 1 like reverse_kl"""
    top_k: NotNegative[int] = 0
    """keep so many of the teacher's most likely tokens and take all others as one: the divergence is then a lower bound
    of that over the whole vocabulary; 0: the whole vocabulary"""
    teacher_logprobs: Literal["live", "stored"] = "live"
    """stored: the teacher's `top_k` log-probs of the data's completions are written once, before training, which then
    goes without the teacher in memory; for `--on_policy_fraction 0`"""
    estimator: Literal["full", "sampled"] = "full"
    """full: of the whole vocabulary; sampled: log(teacher / student) of each sampled token as its advantage in PPO's
    clipped loss, of which the expected gradient is that of reverse_kl"""
    teacher_coef: NotNegative[float] = 1.0
    """sampled: weight of log(teacher / student) in a token's advantage"""
    reward_coef: NotNegative[float] = 0.0
    """sampled: weight of the completion's advantage by `reward` over its group, (r - mean) / std as in grpo.py, on each
    of its tokens"""
    clip_low: BelowOne = 0.2
    """sampled: the importance ratio is clipped below at 1 - clip_low"""
    clip_high: NotNegative[float] = 0.2
    """sampled: the importance ratio is clipped above at 1 + clip_high"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_flags_read(self, DIVERGENCES, self.divergence, flag="divergence")
        self.require_read("missing_eos_penalty", self.reward_coef > 0, "rewards are measured, not learned from")
        self.require_read("divergence", self.estimator == "full", "--estimator sampled is of reverse_kl")
        self.require_read("top_k", self.estimator == "full", "--estimator sampled is of the sampled token")
        for flag in ("clip_low", "clip_high", "correction", "correction_mode", "correction_low", "correction_high",
                     "correction_filter", "teacher_coef", "reward_coef"):  # fmt: skip
            self.require_read(flag, self.estimator == "sampled", "--estimator is full")
        if self.estimator == "sampled" and self.on_policy_fraction < 1:
            raise ValueError("--estimator sampled is for the student's own samples: --on_policy_fraction 1")
        if self.reward_coef and (not self.reward or self.samples_per_prompt == 1):
            raise ValueError(f"--reward_coef {self.reward_coef} needs --reward and --samples_per_prompt above 1")
        if not self.teacher_coef and not self.reward_coef:
            raise ValueError("--teacher_coef 0 leaves nothing to learn from without --reward_coef")
        self.require_read("rollout_ranks", self.needs_engine, "nothing is sampled")
        if self.teacher_logprobs == "stored" and (self.on_policy_fraction > 0 or not self.top_k):
            raise ValueError("--teacher_logprobs stored needs --on_policy_fraction 0 and --top_k above 0")
        if 0 < self.on_policy_fraction < 1 and self.own_prompts in (0, self.prompts_per_step):
            raise ValueError(f"{self._fraction} is {self.own_prompts}: all or nothing is 1 or 0")

    @property
    def own_prompts(self) -> int:
        """How many of a step's prompts the student completes."""
        return round(self.on_policy_fraction * self.prompts_per_step)

    @property
    def needs_engine(self) -> bool:
        """Whether anything is sampled, be it to measure."""
        return self.on_policy_fraction > 0 or len(self.reward) > 0

    @property
    def _fraction(self) -> str:
        return f"--on_policy_fraction {self.on_policy_fraction} of --prompts_per_step {self.prompts_per_step}"

    def check_ranks(self, ranks: int) -> None:
        super().check_ranks(ranks)
        if self.own_prompts % (shares := self.ranks_that_train(ranks) * self.minibatches):
            of = "the ranks that train times --minibatches"
            raise ValueError(f"{self._fraction} is {self.own_prompts}, not a multiple of {of} ({shares})")


def given_samples(prompts: Prompts, encoder: Encoder, args: Args, needed: bool) -> list[Sample]:
    """Each prompt with the data's completion, which ends where the student's own would: after `--max_new_tokens`. Where
    they are not `needed`, rows without one are left out."""
    if needed:
        columns = require_columns(args.dataset_flag, prompts.rows, COLUMNS)
    else:
        columns = next((pair for pair in COLUMNS if all({*pair} <= row.keys() for row in prompts.rows)), None)

    def encode(row: dict) -> Sample:
        sample = encoder.completion(row, "_prompt" if "_prompt" in row else columns[0], columns[1])
        return cut(sample, sample.prompt_length + args.max_new_tokens)

    rows = prompts.rows if columns else []
    samples = [sample for _, sample in usable(rows, encode, args.on_bad_row if needed else "skip")]
    if needed and not samples:
        raise ValueError(f"{args.dataset_flag}: no row has a completion that can be read")
    return samples


def measure_both(meter: Meter, prefix: str, both: Comparison, mask_T: Tensor) -> None:
    """Student beside teacher, over the trained tokens of a micro-batch: nats, and how often they have the same most
    likely token."""
    meter.masked_mean(f"{prefix}reverse_kl", both.reverse_kl_T, mask_T)
    meter.masked_mean(f"{prefix}agreement", both.agree_T, mask_T)
    meter.masked_mean(f"{prefix}entropy", both.entropy_T, mask_T)
    meter.masked_mean(f"{prefix}teacher_entropy", both.teacher_entropy_T, mask_T)
    meter.masked_mean(f"{prefix}teacher_mass", both.teacher_mass_T, mask_T)


@torch.no_grad()
def evaluate(
    model: Policy, teacher: Policy | StoredTeacher, samples: list[Sample], args: Args, device: torch.device
) -> dict[str, float]:
    """Student beside teacher on the data's completions of held-out rows; `samples` is this rank's share. Collective."""
    meter, divergence = Meter(), with_flags(DIVERGENCES[args.divergence], args)
    for mb in pack(samples, args.pack_tokens, device):
        both = model(mb, args.temperature, teacher.teach(mb), divergence, args.top_k)
        meter.masked_mean("eval_loss", both.divergence_T, mb.loss_mask_T)
        meter.masked_mean("eval/reverse_kl", both.reverse_kl_T, mb.loss_mask_T)
        meter.masked_mean("eval/agreement", both.agree_T, mb.loss_mask_T)
    return meter.reduce()


def main(args: Args) -> None:
    # ---- setup: one process per GPU, identical Args everywhere ----
    device, rank, world_size = distributed.setup(args.seed, args.rollout_ranks, args.nccl_timeout)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until the others are done
    if args.teacher is None:
        raise ValueError("--teacher: there is none; name a folder or a Hugging Face id with --model's tokenizer")
    prepare_output_dir(args, owned=("teacher_logprobs/*",))

    # ---- data: prompts as token ids, for some steps' rows with the data's completions ----
    path, teacher_path = resolve_model(args.model), resolve_model(args.teacher, "--teacher")
    tokenizer = load_tokenizer(path, args)
    require_same_tokenizer("--teacher", teacher_path, tokenizer)
    vocabulary = shared_vocabulary(path, teacher_path, args.top_k)
    context = min(context_length(path, args), context_length(teacher_path, args))
    prompts, held_out = load_prompts(args, tokenizer, context)
    own, encoder = args.own_prompts, Encoder(tokenizer, args)
    given = given_samples(prompts, encoder, args, needed=True) if own < args.prompts_per_step else []
    given_held_out = given_samples(held_out, encoder, args, needed=False)
    rows = [sample.row for sample in given] or prompts.rows
    order = make_order(rows, replace(args, seed=distributed.fold_seed(args.seed, 1)))
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)
    total_steps = args.max_steps or math.ceil(args.epochs * len(prompts) / args.prompts_per_step)

    # ---- models: FSDP2 shards train, and frozen ones teach; vLLM samples ----
    model = load_policy(path, args, device)
    teacher = load_teacher(teacher_path, given + given_held_out, vocabulary, args, device)
    optimizer = adamw(model, args)
    sampled = replace(args, prompts_per_step=own, on_policy_fraction=1.0) if own else args
    rollouts = make_rollouts(model, prompts, sampled, tokenizer, device, rewards) if args.needs_engine else None

    # ---- the objective, its floats bound to the flags of their names ----
    divergence = with_flags(DIVERGENCES[args.divergence], args) if args.estimator == "full" else None
    policy_loss, correction = with_flags(clip_policy_loss, args), with_flags(correction_weights, args)
    outside_clip, cut_off = with_flags(clipped, args), with_flags(truncation_penalties, args)

    # ---- resume: everything else is a function of (seed, step) ----
    cursors = dict(rollouts=rollouts, order=order) if own else dict(order=order)
    run = Run(
        args, model, optimizer, tokenizer, total_steps, **cursors,  # the first says how many epochs are done
        show=("loss", "reverse_kl", "agreement", "eval_loss", "eval/pass_at_1", "time/step"),
        curves=("loss", "eval_loss", "reverse_kl", "data/reverse_kl", "agreement", "eval/pass_at_1", "entropy",
                "teacher_entropy", "completions/mean_length", "grad_norm"),
    )  # fmt: skip
    run.models.append(teacher)  # its forwards count too
    meter, updates = run.meter, args.minibatches * args.epochs_per_rollout
    how = f"{rollouts or 'no engine'}, {updates} updates per rollout"
    run.message(f"{prompts}, {held_out} held out, {total_steps} steps on {world_size} ranks, {how}")
    run.message(f"the student completes {own} of {args.prompts_per_step} prompts ({args.on_policy_fraction:g})")
    if len(held_out) and not given_held_out:
        run.message("no eval_loss: the held-out rows have no completions")

    def evaluated(step: int) -> dict[str, float]:
        """After so many steps: what the student writes, if there is a reward, and on what is given."""
        solved = statistics.evaluate(rollouts, step, held_out, rewards) if len(held_out) and args.reward else {}
        share = given_held_out[rank::world_size]
        return solved | (evaluate(model, teacher, share, args, device) if given_held_out else {})

    if run.first_step == 0 and (metrics := evaluated(0)):
        run.log(0, metrics)

    for step in run.steps():
        # ---- 1. batch: what the student writes, by its weights of now or somewhat older ones, and what is given ----
        with meter.time("step"):
            groups: list[list[Sample]] = []
            if own:
                rollouts.submit(step, total_steps)
                groups = rollouts.collect(step, meter)
                if groups is None:  # told to stop
                    break
                require_known(chain(*groups), teacher)
                with meter.time("reward"):
                    rewards_PG, parts = rewards(groups, meter)
                statistics.measure_groups(meter, groups, rewards_PG, parts, first=step == 0)
                of_group_PG = group_advantages(rewards_PG + cut_off(statistics.truncated(groups)))
                to_samples(groups, advantage=args.reward_coef * of_group_PG)
            count = (args.prompts_per_step - own) * args.samples_per_prompt
            from_data = [[given[i]] for i in order.draw(count)[rank::world_size]]

            # ---- 2. pack: the two apart, so that engine and trainer are compared on what was sampled ----
            own_packs, data_packs = (
                pack_minibatches(x, args.minibatches, args.pack_tokens, device) if x else [[]] * args.minibatches
                for x in (groups, from_data)
            )
            with meter.time("logprobs"):
                if own and (updates > 1 or run.checks_engine(step)):  # else the update's own forward will do
                    add_logprobs("old", model, own_packs, args.temperature)
            if own and run.checks_engine(step):
                statistics.check_agreement(own_packs, step, args, device)

            # ---- 3. update: one optimizer step per minibatch ----
            with meter.time("train"):
                for own_packs_of, data_packs_of in [*zip(own_packs, data_packs, strict=True)] * args.epochs_per_rollout:
                    # The denominator counts the *global* minibatch, before the first backward.
                    tokens, _ = statistics.count_trained(own_packs_of + data_packs_of)
                    minibatch_loss = torch.zeros((), device=device)
                    packs = [("", mb) for mb in own_packs_of] + [("data/", mb) for mb in data_packs_of]
                    for prefix, mb in packs:
                        both = model(mb, args.temperature, teacher.teach(mb), divergence, args.top_k)
                        if mb.old_logprobs_T is None:  # on-policy: the ratio is 1, its gradient is not 0
                            mb.old_logprobs_T = both.logprobs_T.detach()
                        if args.estimator == "full":
                            loss_T = both.divergence_T
                        else:
                            of_teacher_T = both.teacher_logprobs_T - mb.old_logprobs_T
                            mb.advantages_T = args.teacher_coef * of_teacher_T + mb.on_tokens("advantage")
                            engine_T = mb.old_logprobs_T - mb.rollout_logprobs_T
                            mb.correction_T = correction(engine_T, mb.loss_mask_T, mb.sequence_ids_T)
                            log_ratio_T = both.logprobs_T - mb.old_logprobs_T
                            loss_T = policy_loss(log_ratio_T, mb.advantages_T) * mb.correction_T
                            clipped_T = outside_clip(log_ratio_T.detach(), mb.advantages_T)
                            meter.masked_mean("clip_ratio/region_mean", clipped_T, mb.loss_mask_T)
                        loss = (loss_T * mb.loss_mask_T).sum() / tokens
                        (loss * world_size).backward()  # FSDP averages gradients over ranks; undo that
                        minibatch_loss += loss.detach()
                        measure_both(meter, prefix, both, mb.loss_mask_T)
                        if not prefix:
                            statistics.measure_sampling(meter, mb)
                    lr = run.learning_rate(step)
                    meter.mean("grad_norm", optimizer_step(model, optimizer, lr, args.max_grad_norm, minibatch_loss))
                    meter.mean("loss", minibatch_loss, 1 / world_size)

        # ---- 4. log and evaluate ----
        metrics = run.reduce(chain(*groups, *from_data), lr=lr)
        if run.evaluates(step + 1):
            metrics |= evaluated(step + 1)
        run.log(step + 1, metrics)
        if own:
            run.show_samples(step + 1, groups, rollouts.positions)

    run.end()
    if rollouts is not None:
        rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
