r"""On-policy distillation: a student learns from a teacher on what it writes itself (GKD, Agarwal
et al. 2023, arXiv:2306.13649; MiniLLM, Gu et al. 2023, arXiv:2306.08543).

    torchrun --nproc_per_node 8 distill.py --config configs/qwen3_1.7b_distill.yaml

The student pi samples, and on each of its tokens its distribution is pulled towards the teacher's,
q:

    full:     L   = mean_t [ D(pi, q) - sft_weight log pi(y_t) ]; D: --divergence             loss()
    sampled:  L   = mean_t [ -c_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) ]
              A_t = log(q(y_t) / pi_old(y_t)); rho_t = pi(y_t) / pi_old(y_t)                  loss()

Below `--on_policy_fraction 1` the other completions of a step are from the data; sft_weight counts
for these alone. c_t = min(pi_old(y_t) / pi_engine(y_t), 2). A row may have its own teacher.
Differences from the papers (docs/distill.md): every step has this fraction, no coin is tossed for
each step; the sampling has no gradient (as in GKD); a reward is measured, not trained on.

Shapes: P prompts on this rank, G completions each, T packed tokens; x_T[t] is for targets_T[t]."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import BelowOne, Fraction, Needs, NotNegative, Positive, Several
from common.config.online import TINY_ONLINE, OnlineArgs, refuse_agent
from common.config.parse import parse
from common.evaluate.held_out import evaluate_prompts
from common.metrics.meter import Meter
from common.model.distill import (
    Comparison,
    Student,
    Teacher,
    TeacherArgs,
    find_teachers,
    load_teachers,
    teacher_of,
)
from common.model.hub import longest_sequence, resolve_model
from common.model.policy import load_policy
from common.model.scoring import with_logprobs
from common.objectives import importance
from common.objectives.divergence import DIVERGENCES, DivergenceArgs
from common.objectives.importance import CorrectionArgs, bounded_exp, importance_weights, is_clipped
from common.objectives.policy import BY_TOKEN, PolicyInputs, PolicyLoss, PolicyLossArgs
from common.packs.order import make_order
from common.packs.packing import (
    Minibatches,
    count_trained,
    pack,
    pack_minibatches,
    positions_of_rank,
)
from common.packs.sample import Group, Sample
from common.parallel import distributed
from common.rewards.registry import columns_of_rewards
from common.rewards.total import Rewards
from common.rollout.agreement import measure_mismatch, require_agreement
from common.rollout.measure import measure_groups
from common.rollout.prompts import load_prompts
from common.rollout.sampler import make_sampler, serve
from common.text.columns import SFT_COLUMNS, choose_columns, require_all_read
from common.text.encode import Encoder, truncate
from common.text.rows import encode_each
from common.text.tokenizer import load_tokenizer
from common.train.optim import adamw, optimizer_step
from common.train.overview import describe_rollouts, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

SHOW = ("loss", "reverse_kl", "agreement", "eval_loss", "eval/solved", "time/step")
CURVES = (
    "loss", "eval_loss", "reverse_kl", "data/reverse_kl", "agreement", "eval/solved", "entropy",
    "teacher_entropy", "completions/mean_length", "grad_norm",
)  # fmt: skip
SAMPLED = Needs(estimator="sampled")

# ---- the objective ----


def clip(x: PolicyInputs) -> PolicyLoss:
    """Return loss, rho and clipping per token. The same in five scripts; a test compares them."""
    rho_T = bounded_exp(x.log_rho_T)
    clipped_T = rho_T.clamp(1 - x.clip_low, 1 + x.clip_high)
    loss_T = -torch.min(rho_T * x.A_T, clipped_T * x.A_T)
    return PolicyLoss(loss_T, rho_T, is_clipped(x.log_rho_T, x.A_T, x.clip_low, x.clip_high))


LOSSES = {"clip": clip} | BY_TOKEN  # by --loss


def loss(
    comparison: Comparison, old_logprobs_T: Tensor | None, rollout_logprobs_T: Tensor | None,
    mask_T: Tensor, sequence_ids_T: Tensor, num_tokens: Tensor, args: "Args",
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return each token's share of L, a mean over the `num_tokens` of the *global* minibatch, and
    tensors [T] to log. `comparison`: student and teacher. Only the student's own completions have
    `rollout_logprobs_T`, of the engine."""
    if args.estimator == "full":
        full_T, logged = comparison.divergence_T, {}
        if rollout_logprobs_T is None and args.sft_weight:
            full_T = full_T - args.sft_weight * comparison.logprobs_T
            logged["data/cross_entropy"] = -comparison.logprobs_T.detach()
        return full_T * mask_T / num_tokens, logged
    A_T = comparison.teacher_logprobs_T - old_logprobs_T
    low, high = args.clip_low, args.clip_high
    x = PolicyInputs(comparison.logprobs_T, old_logprobs_T, A_T, mask_T, sequence_ids_T, low, high)
    loss_T, ratio_T, stopped_T = LOSSES[args.loss](x)
    correction = args.correction_form()
    c_T = importance_weights(old_logprobs_T, rollout_logprobs_T, mask_T, sequence_ids_T, correction)
    logged = {
        "ratio": ratio_T.detach(),
        "clip_ratio/region_mean": stopped_T,
        "sampling/weight": c_T,
    }
    return loss_T * c_T * mask_T / num_tokens, logged


@dataclass
class Args(DivergenceArgs, TeacherArgs, PolicyLossArgs, CorrectionArgs, OnlineArgs):
    TINY_DEFAULTS: ClassVar = TINY_ONLINE | dict(
        prompts_per_step=256, samples_per_prompt=1, reward="exact_match"
    )
    samples_per_prompt: Positive[int] = 1
    reward: Several[str] = ()
    """measure completions by these rewards (docs/rewards.md lists all)"""
    lr: Positive[float] = 1e-5
    on_policy_fraction: Fraction = 1.0
    """let the student complete this fraction of a step's prompts (the paper's lambda); the other
    completions are from the data"""
    sft_weight: NotNegative[float] = 0.0
    """add the cross-entropy on the data's completions to their divergence with this weight"""
    estimator: Literal["full", "sampled"] = "full"
    """minimise this. full: the divergence; sampled: a policy loss (--loss) with log(teacher /
    student) of each token as its advantage"""
    loss: Annotated[Literal[tuple(LOSSES)], SAMPLED] = "clip"
    clip_low: Annotated[BelowOne, SAMPLED] = 0.2
    clip_high: Annotated[NotNegative[float], SAMPLED] = 0.2
    correction: Annotated[importance.Level | None, SAMPLED] = None
    correction_high: Annotated[Positive[float], SAMPLED] = 2.0

    def __post_init__(self) -> None:
        refuse_agent(self.agent)  # teachers read whole completions
        if self.missing_eos_penalty:
            raise ValueError("--missing_eos_penalty has no effect here: rewards are only measured")
        if self.on_policy_fraction == 1 and self.sft_weight:
            raise ValueError(
                f"--sft_weight {self.sft_weight} has no effect with --on_policy_fraction 1"
            )
        if self.estimator == "sampled" and self.on_policy_fraction < 1:
            problem = "--estimator sampled is for the student's own samples"
            raise ValueError(f"{problem}; set --on_policy_fraction 1")
        if not self.needs_engine and self.rollout_ranks:
            why = "with --on_policy_fraction 0 and no --reward"
            raise ValueError(f"--rollout_ranks {self.rollout_ranks} has no effect {why}")
        if self.teacher_logprobs == "stored" and (self.on_policy_fraction > 0 or not self.top_k):
            flag = "--teacher_logprobs stored"
            raise ValueError(f"{flag} needs --on_policy_fraction 0 and --top_k above 0")
        if 0 < self.on_policy_fraction < 1 and self.own_prompts in (0, self.prompts_per_step):
            advice = "use --on_policy_fraction 0 or 1 for none or all"
            raise ValueError(f"{self._fraction} is {self.own_prompts}; {advice}")

    @property
    def own_prompts(self) -> int:
        """Number of a step's prompts that the student completes."""
        return round(self.on_policy_fraction * self.prompts_per_step)

    @property
    def needs_engine(self) -> bool:
        """Whether anything is sampled, to train on or to measure."""
        return self.on_policy_fraction > 0 or len(self.reward) > 0

    @property
    def _fraction(self) -> str:
        prompts = f"--prompts_per_step {self.prompts_per_step}"
        return f"--on_policy_fraction {self.on_policy_fraction} of {prompts}"

    def sampler_args(self) -> "Args":
        """Return flags for a sampler that draws only the prompts that the student completes."""
        if not self.own_prompts:
            return self
        return replace(self, prompts_per_step=self.own_prompts, on_policy_fraction=1, sft_weight=0)

    def check_launch(self, training_ranks: int) -> None:
        """Raise `ValueError` without a teacher, or for prompts that do not divide evenly."""
        if not self.teacher:
            advice = "name a folder or a Hugging Face id with --model's tokenizer"
            raise ValueError(f"--teacher: there is none; {advice}")
        parts = training_ranks * self.minibatches
        if self.own_prompts % parts:
            divisor = f"the number of training ranks times --minibatches ({parts})"
            problem = f"{self._fraction} is {self.own_prompts}"
            raise ValueError(f"{problem}; it must be a multiple of {divisor}")


def read_samples(
    rows: list[dict], encoder: Encoder, args: Args, needed: bool = True
) -> list[Sample]:
    """Return the prompt of each row with the data's completion, cut after `--max_new_tokens`. Skip
    rows without a completion unless they are `needed`."""
    pairs = [columns for columns in SFT_COLUMNS if len(columns) == 2]
    columns = next((pair for pair in pairs if all({*pair} <= row.keys() for row in rows)), None)
    if needed:
        columns = choose_columns(args.dataset_flag, rows, pairs)
        named, _ = columns_of_rewards(args, rows)
        if "_prompt" not in rows[0]:
            require_all_read(args.dataset_flag, rows, columns, {*named, args.teacher_column})
    if columns is None:
        return []

    def encode(row: dict) -> Sample:
        sample = encoder.completion(row, "_prompt" if "_prompt" in row else columns[0], columns[1])
        return truncate(sample, sample.prompt_length + args.max_new_tokens)

    on_bad_row = args.on_bad_row if needed else "skip"
    samples = [sample for _, sample in encode_each(rows, encode, on_bad_row)]
    if needed and not samples:
        raise ValueError(f"{args.dataset_flag}: no row has a completion that can be read")
    return samples


def pack_by_teacher(
    groups: Sequence[Group], positions: Sequence[int], teachers: dict[str, Teacher], meter: Meter,
    args: Args, device: torch.device, share_prefix: int = 0,
) -> dict[str, Minibatches]:  # fmt: skip
    """Pack the groups of each teacher apart. For one teacher all ranks get the same number of
    micro-batches: none if no rank has a sample for it. Collective."""
    packed = {}
    owners = [teacher_of(group[0].row, teachers, args.teacher_column) for group in groups]
    for name, teacher in teachers.items():  # empty groups keep the positions
        own = [group if name == owner else [] for group, owner in zip(groups, owners, strict=True)]
        read = teacher.read(own, meter)
        minibatches = pack_minibatches(
            read, positions, args.minibatches, args.pack_tokens, device, share_prefix
        )
        sizes = [distributed.all_sum(sum(mb.num_samples for mb in mbs)) for mbs in minibatches]
        packed[name] = [mbs if size else [] for mbs, size in zip(minibatches, sizes, strict=True)]
    return packed


def compared(comparison: Comparison, prefix: str) -> dict[str, Tensor]:
    """Return streams to log about student and teacher: nats, and whether their most likely tokens
    agree."""
    streams = {
        f"{prefix}reverse_kl": comparison.reverse_kl_T,
        f"{prefix}agreement": comparison.agree_T,
        f"{prefix}entropy": comparison.entropy_T,
        f"{prefix}teacher_entropy": comparison.teacher_entropy_T,
        f"{prefix}teacher_mass": comparison.teacher_mass_T,
    }
    return {name: x_T for name, x_T in streams.items() if x_T is not None}


@torch.no_grad()
def evaluate(
    policy: Student, teachers: dict[str, Teacher], samples: list[Sample], args: Args,
    device: torch.device,
) -> dict[str, float]:  # fmt: skip
    """Compare student and teachers on held-out completions, divided among the ranks; {} without
    any. Teachers that read text are left out. Collective."""
    meter = Meter()
    compare_with = DIVERGENCES[args.divergence]
    owners = [teacher_of(sample.row, teachers, args.teacher_column) for sample in samples]
    for name, teacher in teachers.items():
        own = [sample for sample, owner in zip(samples, owners, strict=True) if owner == name]
        if teacher.reads_text or not own:
            continue
        for mb in pack(distributed.items_of_rank(own), args.pack_tokens, device):
            x = policy.distill(mb, teacher.teach(mb), compare_with, args.top_k, args.temperature)
            means = {"eval_loss": x.divergence_T, "eval/reverse_kl": x.reverse_kl_T}
            meter.tokens(mb, means | {"eval/agreement": x.agree_T})
    return meter.reduce()


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.live_rollout_ranks)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    args.check_launch(world_size)
    prepare_output_dir(args, args.dry_run)

    # ---- data: prompts as token ids; samples: completions of the data ----
    path = resolve_model(args.model, weights=not args.dry_run)
    tokenizer = load_tokenizer(path, args)
    folders = find_teachers(args, path, tokenizer, args.top_k, args.estimator, args.dry_run)
    limit = min(longest_sequence(each, args) for each in (path, *folders.values()))
    prompts, held_out = load_prompts(args, tokenizer, limit, also_read=[args.teacher_column])
    rows = prompts.rows + held_out.rows
    encoder = Encoder(tokenizer, args)
    num_sampled = args.own_prompts  # prompts of a step that the student completes
    num_from_data = args.prompts_per_step - num_sampled
    samples = read_samples(prompts.rows, encoder, args) if num_from_data else []
    held_samples = read_samples(held_out.rows, encoder, args, needed=False)
    order_args = replace(args, seed=distributed.fold_seed(args.seed, 1))
    order = make_order([sample.row for sample in samples] or prompts.rows, order_args)
    rewards = Rewards(args, rows, tokenizer, device, args.dry_run)
    if args.dry_run:
        frozen = [*folders.values()] if args.teacher_logprobs == "live" else []
        later = 1 - 1 / args.minibatches  # the first one's own forwards give its old log-probs
        return dry_run(args, path, tokenizer, prompts, held_out, rewards, frozen, kind=Student,
                       own_forwards=later * num_sampled / args.prompts_per_step)  # fmt: skip
    begin_run(args, prompts.rows, held_out.rows)

    # ---- models: FSDP2 shards; the teachers are frozen ----
    policy = load_policy(path, args, device, kind=Student)  # trained
    teachers = load_teachers(
        folders, policy, tokenizer, samples + held_samples, rows, args, device, args, args.top_k
    )
    optimizer = adamw(policy, args)
    sampler = None  # nothing is sampled
    if args.needs_engine:
        sampler = make_sampler(
            policy, prompts, args.sampler_args(), tokenizer, on_complete=rewards.begin
        )

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, prompts)
    run = Run(args, policy, optimizer, tokenizer, total_steps, order=order, show=SHOW,
              sampler=sampler if num_sampled else None, curves=CURVES,
              frozen=teachers.values())  # fmt: skip
    source = f"the student completes {num_sampled} of {args.prompts_per_step} prompts of a step"
    run.message(*describe_rollouts(args, prompts, held_out, sampler), source)
    if len(held_out) and not held_samples:
        run.message("no eval_loss: the held-out rows have no completions")
    meter = run.meter
    reward_prompts = held_out if args.reward else []  # prompts whose completions have a reward
    compare_with = DIVERGENCES[args.divergence]
    if run.first_step == 0:
        first = evaluate_prompts(sampler, 0, reward_prompts, rewards)
        run.log(0, first | evaluate(policy, teachers, held_samples, args, device))

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. batch: completions by the student and from the data ----
        groups, positions = [], []
        rewards_PG, named_rewards = torch.empty(0), {}
        if num_sampled:
            rollout = sampler.rollout(step, total_steps, meter)  # syncs weights, then samples
            if rollout is None:  # a stop was requested
                break
            groups, positions = rollout.groups, rollout.positions  # P of the B groups
            with meter.time("reward"):
                rewards_PG, named_rewards, _ = rewards.wait(groups, meter)
            measure_groups(meter, groups, rewards_PG, named_rewards, warn=step == 0)
        drawn = order.draw(num_from_data * args.samples_per_prompt)
        from_data = [[samples[i]] for i in distributed.items_of_rank(drawn)]

        # ---- 2. pack, each teacher and each kind apart: completions move between ranks ----
        nothing = {name: [[]] * args.minibatches for name in teachers}
        sampled, written = nothing, nothing
        if num_sampled:
            sampled = pack_by_teacher(
                groups, positions, teachers, meter, args, device, policy.share_prefix
            )
        if num_from_data:
            data_positions = positions_of_rank(len(from_data))
            written = pack_by_teacher(from_data, data_positions, teachers, meter, args, device)
        checks_engine = num_sampled > 0 and run.checks_engine(step)
        with meter.time("logprobs"):
            old = dict(old=policy if num_sampled else None, old_of_first=checks_engine)
            sampled = {k: with_logprobs(x, args.temperature, **old) for k, x in sampled.items()}
        if checks_engine:
            require_agreement([*chain(*sampled.values())], step, args, device)

        # ---- 3. update: one optimizer step per minibatch; a loss of nan or inf stops the run ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            for m in [*range(args.minibatches)] * args.epochs_per_rollout:
                pairs = []
                for name, teacher in teachers.items():
                    pairs += [(teacher, mb) for mb in sampled[name][m] + written[name][m]]
                num_tokens, _ = count_trained([mb for _, mb in pairs])  # on all ranks
                total_loss = torch.zeros((), device=device)
                for teacher, mb in pairs:
                    comparison = policy.distill(
                        mb, teacher.teach(mb), compare_with, args.top_k, args.temperature
                    )
                    is_sampled = mb.rollout_logprobs_T is not None
                    if is_sampled and mb.old_logprobs_T is None:  # before the first update
                        mb.old_logprobs_T = comparison.logprobs_T.detach()
                    share_T, logged = loss(
                        comparison, mb.old_logprobs_T, mb.rollout_logprobs_T, mb.loss_mask_T,
                        mb.sequence_ids_T, num_tokens, args,
                    )  # fmt: skip
                    # FSDP averages gradients over ranks; undo that.
                    (share_T.sum() * world_size).backward()
                    total_loss += share_T.detach().sum()
                    prefix = "" if is_sampled else "data/"
                    meter.tokens(mb, logged | compared(comparison, prefix), share_T)
                    if is_sampled:
                        measure_mismatch(meter, mb.old_logprobs_T, mb)
                grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, total_loss)
                meter.mean("grad_norm", grad_norm)
                meter.sum_over_ranks("loss", total_loss)

        # ---- 4. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*groups, *from_data), lr=lr)
        if run.evaluates(step + 1):
            metrics |= evaluate(policy, teachers, held_samples, args, device)
            metrics |= evaluate_prompts(sampler, step + 1, reward_prompts, rewards)
        run.log(step + 1, metrics)
        if num_sampled:
            none_PG = torch.zeros_like(rewards_PG)  # no completion has an advantage
            run.show_samples(step + 1, groups, positions, rewards_PG, none_PG, named_rewards)

    run.end()
    if sampler is not None:
        sampler.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
