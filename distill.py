r"""On-policy distillation: a student learns from a teacher on what it writes itself (GKD, Agarwal
et al. 2023, arXiv:2306.13649; MiniLLM, Gu et al. 2023, arXiv:2306.08543).

    torchrun --nproc_per_node 8 distill.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B \
        --dataset openai/gsm8k

The student pi samples, and on each of its tokens its distribution is pulled towards that of the
teacher q:

    full:     L   = mean_t D(pi, q) of the distributions at t; D: --divergence                loss()
    sampled:  L   = mean_t [ -c_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) ]
              A_t = teacher_coef log(q(y_t) / pi_old(y_t)) + reward_coef A_i                  loss()
              A_i = (r_i - mean(r_1..r_G)) / std(r_1..r_G)                              advantages()
              rho_t = pi(y_t) / pi_old(y_t)

`--on_policy_fraction` below 1 takes the other completions of a step from the data. Differences from
the papers (docs/distill.md): the fraction is of each step's prompts, not a coin for each step; the
sampling has no gradient (as in GKD); only `sampled` learns from a reward; bounded weights c_t =
pi_old(y_t) / pi_engine(y_t).

Shapes: P prompts on this rank, G completions of each, T packed tokens of a micro-batch; x_T[t]
describes targets_T[t]."""

from dataclasses import fields, replace
from functools import partial
from itertools import chain
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import BelowOne, Fraction, NotNegative, OpenFraction, Positive, Several
from common.config.objectives import CorrectionArgs
from common.config.online import TINY_ONLINE, OnlineArgs
from common.config.parse import parse
from common.config.rules import require_default
from common.data.answers import read_samples
from common.data.encode import Encoder
from common.data.order import make_order
from common.data.packing import count_trained, pack, pack_minibatches, positions_of_share
from common.data.sample import Sample
from common.evaluate.greedy import evaluate_prompts
from common.metrics.meter import Meter
from common.model.comparison import Comparison
from common.model.fixed_streams import with_logprobs
from common.model.hub import context_length, load_tokenizer, require_same_tokenizer, resolve_model
from common.model.policy import load_policy
from common.model.student import Student, Teacher
from common.model.teacher import StoredTeacher, load_teacher, require_known, shared_vocabulary
from common.objectives.advantages import centre_groups, group_std
from common.objectives.divergence import DIVERGENCES, Divergence, jsd
from common.objectives.importance import bounded_exp, importance_weights, is_clipped
from common.parallel import distributed
from common.rewards.total import Rewards
from common.rollout.agreement import mean_weight, measure_mismatch, require_agreement
from common.rollout.measure import measure_groups, truncation_penalties
from common.rollout.prompts import Prompts, load_prompts
from common.rollout.sampler import make_sampler, serve
from common.train.optim import adamw, optimizer_step
from common.train.overview import dry_run, num_steps, repetitions
from common.train.run import Run
from common.train.run_folder import prepare_output_dir

SHOW = ("loss", "reverse_kl", "agreement", "eval_loss", "eval/solved", "time/step")
CURVES = (
    "loss", "eval_loss", "reverse_kl", "data/reverse_kl", "agreement", "eval/solved", "entropy",
    "teacher_entropy", "completions/mean_length", "grad_norm",
)  # fmt: skip
# Flags that only --estimator sampled reads.
SAMPLED_FLAGS = (
    "clip_low", "clip_high", "teacher_coef", "reward_coef",
    *(field.name for field in fields(CorrectionArgs)),
)  # fmt: skip

# ---- the objective ----


def divergence(args: "Args") -> Divergence:
    """Return the divergence of `--divergence`, a function of the log-probs of student and
    teacher."""
    if args.divergence == "jsd":
        return partial(jsd, jsd_beta=args.jsd_beta)
    return DIVERGENCES[args.divergence]


def advantages(rewards_PG: Tensor) -> Tensor:
    """Return the advantage A_i of every completion, [P, G] float64: 0 without a reward (NaN) or
    where all are equal."""
    return centre_groups(rewards_PG) / (group_std(rewards_PG) + 1e-6)


def loss(
    comparison: Comparison, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor | None,
    advantages_T: Tensor | None, mask_T: Tensor, sequence_ids_T: Tensor, tokens: Tensor,
    args: "Args", c_mean: float = 1,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return each token's share of L, a mean over the `tokens` of the *global* minibatch, and
    tensors [T] to log. `comparison`: student and teacher. Only the student's own completions have
    `rollout_logprobs_T`, of the engine, and `advantages_T`, reward_coef A_i."""
    if args.estimator == "full":
        logged = {}
        if rollout_logprobs_T is not None:
            logged["sampling/kept_fraction"] = torch.ones_like(mask_T)
        return comparison.divergence_T * mask_T / tokens, logged
    A_T = args.teacher_coef * (comparison.teacher_logprobs_T - old_logprobs_T) + advantages_T
    c_T = importance_weights(
        old_logprobs_T, rollout_logprobs_T, mask_T, sequence_ids_T, args.correction_form, c_mean
    )
    log_rho_T = comparison.logprobs_T - old_logprobs_T
    rho_T = bounded_exp(log_rho_T)
    clipped_T = rho_T.clamp(1 - args.clip_low, 1 + args.clip_high)
    loss_T = -torch.min(rho_T * A_T, clipped_T * A_T) * c_T
    logged = {"ratio": rho_T.detach(), "sampling/weight": c_T, "sampling/kept_fraction": c_T > 0}
    clipped_T = is_clipped(log_rho_T.detach(), A_T, args.clip_low, args.clip_high)
    return loss_T * mask_T / tokens, logged | {"clip_ratio/region_mean": clipped_T}


@dataclass
class Args(CorrectionArgs, OnlineArgs):
    TINY_DEFAULTS: ClassVar = TINY_ONLINE | dict(
        prompts_per_step=256, samples_per_prompt=1, reward="exact_match"
    )
    samples_per_prompt: Positive[int] = 1
    reward: Several[str] = ()
    """rewards by which completions are measured (docs/rewards.md lists all); trained on only with
    --reward_coef"""
    lr: Positive[float] = 1e-5
    teacher: str | None = None
    """Hugging Face id or folder of the model to learn from, with the student's tokenizer;
    required"""
    on_policy_fraction: Fraction = 1.0
    """fraction of a step's prompts that the student completes (the paper's lambda); the data
    completes other rows"""
    divergence: Literal[tuple(DIVERGENCES)] = "reverse_kl"
    """divergence of student pi from teacher q. reverse_kl: KL(pi || q); forward_kl: KL(q || pi);
    jsd: to a mixture"""
    jsd_beta: OpenFraction = 0.5
    """jsd: weight of the teacher in the mixture; near 0: like forward_kl, near 1: like
    reverse_kl"""
    top_k: NotNegative[int] = 0
    """number of the teacher's most likely tokens to compare, the others as one token: a lower
    bound; 0: all tokens"""
    teacher_logprobs: Literal["live", "stored"] = "live"
    """live: computed in every step; stored (with --on_policy_fraction 0): the teacher's top_k
    log-probs of the data are written once, before training, which then needs no teacher in
    memory"""
    estimator: Literal["full", "sampled"] = "full"
    """full: the divergence; sampled: PPO's clipped loss with log(teacher / student) of each token
    as its advantage"""
    teacher_coef: NotNegative[float] = 1.0
    """sampled: weight of log(teacher / student) in a token's advantage"""
    reward_coef: NotNegative[float] = 0.0
    """sampled: weight of the completion's advantage by `reward` within its group, (r - mean) / std
    as in grpo.py"""
    clip_low: BelowOne = 0.2
    """sampled: lower clip bound of the importance ratio, 1 - clip_low"""
    clip_high: NotNegative[float] = 0.2
    """sampled: upper clip bound of the importance ratio, 1 + clip_high"""

    def __post_init__(self) -> None:
        if self.divergence != "jsd":
            require_default(self, ("jsd_beta",), f"with --divergence {self.divergence}")
        if not self.reward_coef:
            require_default(self, ("missing_eos_penalty",), "with --reward_coef 0")
        if self.estimator == "sampled":
            require_default(self, ("divergence", "top_k"), "with --estimator sampled")
        else:
            require_default(self, SAMPLED_FLAGS, "with --estimator full")
        if self.estimator == "sampled" and self.on_policy_fraction < 1:
            problem = "--estimator sampled is for the student's own samples"
            raise ValueError(f"{problem}; set --on_policy_fraction 1")
        if self.reward_coef and (not self.reward or self.samples_per_prompt == 1):
            flag = f"--reward_coef {self.reward_coef}"
            raise ValueError(f"{flag} needs --reward and --samples_per_prompt above 1")
        if not self.teacher_coef and not self.reward_coef:
            problem = "--teacher_coef 0 leaves nothing to learn from"
            raise ValueError(f"{problem}; set --reward_coef above 0")
        if not self.needs_engine:
            why = "with --on_policy_fraction 0 and without --reward"
            require_default(self, ("rollout_ranks",), why)
        if not (self.own_prompts and self.reward):
            require_default(self, ("draw",), "without --reward or with --on_policy_fraction 0")
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
        """Return the flags for a step of the student's prompts alone."""
        if not self.own_prompts:
            return self
        return replace(self, prompts_per_step=self.own_prompts, on_policy_fraction=1.0)

    def check_launch(self, training_ranks: int) -> None:
        """Raise `ValueError` without a teacher, or for prompts that do not divide evenly."""
        if self.teacher is None:
            advice = "name a folder or a Hugging Face id with --model's tokenizer"
            raise ValueError(f"--teacher: there is none; {advice}")
        shares = training_ranks * self.minibatches
        if self.own_prompts % shares:
            divisor = f"the number of training ranks times --minibatches ({shares})"
            problem = f"{self._fraction} is {self.own_prompts}"
            raise ValueError(f"{problem}; it must be a multiple of {divisor}")


def describe(
    args: Args, prompts: Prompts, held_out: Prompts, held_out_samples: list[Sample], rollouts
) -> list[str]:
    """Return lines about the data, the length, the engine and the updates of the run."""
    steps = f"{num_steps(args, prompts)} steps on {distributed.world_size()} ranks"
    how = f"{rollouts or 'no engine'}, {args.updates_per_rollout} updates per rollout"
    share = f"the student completes {args.own_prompts} of {args.prompts_per_step} prompts"
    share += f" ({args.on_policy_fraction:g})"
    lines = [f"{prompts}, {held_out} held out, {steps}, {how}", share, *repetitions(args, prompts)]
    if len(held_out) and not held_out_samples:
        lines.append("no eval_loss: the held-out rows have no completions")
    return lines


def compared(comparison: Comparison, prefix: str) -> dict[str, Tensor]:
    """Return streams to log about student and teacher: nats, and whether their most likely tokens
    agree."""
    return {
        f"{prefix}reverse_kl": comparison.reverse_kl_T,
        f"{prefix}agreement": comparison.agree_T,
        f"{prefix}entropy": comparison.entropy_T,
        f"{prefix}teacher_entropy": comparison.teacher_entropy_T,
        f"{prefix}teacher_mass": comparison.teacher_mass_T,
    }


@torch.no_grad()
def evaluate(
    policy: Student, teacher: Teacher | StoredTeacher, samples: list[Sample], args: Args,
    device: torch.device,
) -> dict[str, float]:  # fmt: skip
    """Compare student and teacher on held-out completions, divided among the ranks; {} without any.
    Collective."""
    meter = Meter()
    share = distributed.share_of(samples)
    for mb in pack(share, args.pack_tokens, device) if samples else []:
        x = policy.distill(mb, teacher.teach(mb), divergence(args), args.top_k, args.temperature)
        means = {"eval_loss": x.divergence_T, "eval/reverse_kl": x.reverse_kl_T}
        meter.tokens(mb, means | {"eval/agreement": x.agree_T})
    return meter.reduce() if samples else {}


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed, args.live_rollout_ranks, args.nccl_timeout)
    if distributed.is_rollout_rank():
        return serve(args, device)  # generates until training ends
    args.check_launch(world_size)
    prepare_output_dir(args, owned=("teacher_logprobs/*",))

    # ---- data: prompts as token ids; samples: completions of the data ----
    path = resolve_model(args.model, weights=not args.dry_run, rope=args.rope)
    teacher_path = resolve_model(args.teacher, "--teacher", not args.dry_run)
    tokenizer = load_tokenizer(path, args)
    require_same_tokenizer("--teacher", teacher_path, tokenizer)
    vocabulary = shared_vocabulary(path, teacher_path, args.top_k)
    context = min(context_length(path, args), context_length(teacher_path, args))
    prompts, held_out = load_prompts(args, tokenizer, context)
    encoder = Encoder(tokenizer, args)
    num_sampled = args.own_prompts  # prompts of a step that the student completes
    num_from_data = args.prompts_per_step - num_sampled
    samples = read_samples(prompts.rows, encoder, args, needed=True) if num_from_data else []
    held_samples = read_samples(held_out.rows, encoder, args, needed=False)
    order_args = replace(args, seed=distributed.fold_seed(args.seed, 1))
    order = make_order([sample.row for sample in samples] or prompts.rows, order_args)
    rewards = Rewards(args, prompts.rows + held_out.rows, tokenizer, device)
    if args.dry_run:  # ends the process
        frozen = [teacher_path] if args.teacher_logprobs == "live" else []
        dry_run(args, path, tokenizer, prompts, held_out, rewards, frozen)

    # ---- models: FSDP2 shards ----
    policy = load_policy(path, args, device, kind=Student)  # trained
    teacher = load_teacher(teacher_path, samples + held_samples, vocabulary, args, device)  # frozen
    optimizer = adamw(policy, args)
    rollouts = None  # nothing is sampled
    if args.needs_engine:
        rollouts = make_sampler(policy, prompts, args.sampler_args(), tokenizer, rewards)

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    # The first of the cursors counts the epochs.
    cursors = dict(rollouts=rollouts, order=order) if num_sampled else dict(order=order)
    total_steps = num_steps(args, prompts)
    run = Run(args, policy, optimizer, tokenizer, total_steps, **cursors, show=SHOW, curves=CURVES)
    run.models.append(teacher)  # counts in speed/tflops
    run.message(*describe(args, prompts, held_out, held_samples, rollouts))
    meter = run.meter
    reward_prompts = held_out if args.reward else []  # prompts whose completions have a reward
    compare_with = divergence(args) if args.estimator == "full" else None
    if run.first_step == 0:
        first = evaluate_prompts(rollouts, 0, reward_prompts, rewards)
        run.log(0, first | evaluate(policy, teacher, held_samples, args, device))

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. batch: completions of the student, and those of the data ----
        groups = []
        if num_sampled:
            groups = rollouts.rollout(step, total_steps, meter)  # syncs weights, then samples
            if groups is None:  # a stop was requested
                break
            positions = list(rollouts.positions)  # of this rank's prompts among those of all ranks
            require_known(chain(*groups), teacher)
            with meter.time("reward"):
                rewards_PG, named_rewards, _ = rewards(groups, meter)
            measure_groups(meter, groups, rewards_PG, named_rewards, warn=step == 0)
            penalties_PG = truncation_penalties(groups, args.missing_eos_penalty)
            advantages_PG = args.reward_coef * advantages(rewards_PG + penalties_PG)
            advantages_BG = distributed.gather_rows(advantages_PG, positions)
        drawn = order.draw(num_from_data * args.samples_per_prompt)
        from_data = [[samples[i]] for i in drawn[distributed.rank() :: world_size]]

        # ---- 2. pack, each kind apart: completions move to the ranks that train on them ----
        sampled = written = [[] for _ in range(args.minibatches)]  # by the student, in the data
        if num_sampled:
            sampled = pack_minibatches(
                groups, positions, args.minibatches, args.pack_tokens, device, args.share_prefix
            )
        if num_from_data:
            share = positions_of_share(len(from_data))
            written = pack_minibatches(from_data, share, args.minibatches, args.pack_tokens, device)
        checks_engine = num_sampled > 0 and run.checks_engine(step)
        with meter.time("logprobs"):  # None: those of the update serve as old ones
            needs_old = checks_engine or args.updates_per_rollout > 1 or args.correction_normalize
            old = policy if num_sampled and needs_old else None
            sampled = with_logprobs(sampled, args.temperature, old=old)
        if checks_engine:
            require_agreement(sampled, step, args, device)

        # ---- 3. update: one optimizer step per minibatch; none if the loss is not finite ----
        with meter.time("train"):
            lr = run.learning_rate(step)
            for m in [*range(args.minibatches)] * args.epochs_per_rollout:
                tokens, _ = count_trained(sampled[m] + written[m])  # of all ranks
                c_mean = mean_weight(sampled[m], args.correction_form)
                total_loss = torch.zeros((), device=device)
                for mb in sampled[m] + written[m]:
                    is_sampled = mb in sampled[m]
                    comparison = policy.distill(
                        mb, teacher.teach(mb), compare_with, args.top_k, args.temperature
                    )
                    old_logprobs_T = mb.old_logprobs_T
                    if old_logprobs_T is None:  # on policy
                        old_logprobs_T = comparison.logprobs_T.detach()
                    advantages_T = mb.on_tokens(advantages_BG) if is_sampled else None
                    share_T, logged = loss(
                        comparison, old_logprobs_T, mb.rollout_logprobs_T, advantages_T,
                        mb.loss_mask_T, mb.sequence_ids_T, tokens, args, c_mean,
                    )  # fmt: skip
                    # FSDP averages gradients over ranks; undo that.
                    (share_T.sum() * world_size).backward()
                    total_loss += share_T.detach().sum()
                    prefix = "" if is_sampled else "data/"
                    meter.tokens(mb, logged | compared(comparison, prefix), share_T)
                    if is_sampled:
                        measure_mismatch(meter, old_logprobs_T, mb)
                grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, total_loss)
                meter.mean("grad_norm", grad_norm)
                meter.mean("loss", total_loss, 1 / world_size)  # the loss is the sum over ranks

        # ---- 4. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*groups, *from_data), lr=lr)
        if run.evaluates(step + 1):
            metrics |= evaluate_prompts(rollouts, step + 1, reward_prompts, rewards)
            metrics |= evaluate(policy, teacher, held_samples, args, device)
        run.log(step + 1, metrics)
        if num_sampled:
            run.show_samples(step + 1, groups, positions, rewards_PG, advantages_PG, named_rewards)

    run.end()
    if rollouts is not None:
        rollouts.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
