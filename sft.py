r"""Supervised fine-tuning: next-token cross-entropy on completions, packed without padding.

    torchrun --nproc_per_node 8 sft.py --config configs/qwen3_1.7b_sft.yaml

The policy imitates the completions of the data. Its loss is a mean over the M trained tokens y_t of
the global batch, on any number of ranks and in any packing:

    L = -1/M sum_t log pi(y_t)                  loss(), --loss nll
    L = -1/M sum_t sg(pi(y_t)) log pi(y_t)      loss(), --loss dft (arXiv:2508.05629)

sg(x) is x without gradient. See docs/sft.md. Its core in 111 lines: course/lessons/nano_sft.py.

Shapes: T packed tokens of a micro-batch. Per-token tensors are aligned with the *targets*: x_T[t]
describes the prediction of targets_T[t]."""

from itertools import chain
from typing import ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import Positive
from common.config.groups import TINY_OFFLINE, ImageArgs, LengthArgs, OfflineArgs, PrefixArgs
from common.config.parse import parse
from common.evaluate.offline import start_generation
from common.metrics.meter import Meter, evaluate_sets
from common.model.hub import fit_max_length, resolve_model
from common.model.policy import Policy, load_policy
from common.packs.packing import pack_groups
from common.packs.sample import Sample
from common.parallel import distributed
from common.text.columns import SFT_COLUMNS
from common.text.encode import Encoder
from common.text.load import Samples, StreamArgs, load_samples
from common.text.tokenizer import load_tokenizer
from common.train.optim import adamw, optimizer_step
from common.train.overview import cost_of_rewriting, describe_data, dry_run, num_steps
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

SHOW = ("eval/solved", "loss", "mean_token_accuracy", "eval_loss", "tokens_per_second")
CURVES = (
    "eval/solved",
    "loss",
    "eval_loss",
    "mean_token_accuracy",
    "eval_mean_token_accuracy",
    "grad_norm",
    "lr",
)


def loss(name: str, logprobs_T: Tensor) -> Tensor:
    """Return the loss of each token. nll: maximum likelihood. dft: weighted by p: the gradient
    is -grad p, and unlikely tokens contribute less."""
    return -logprobs_T if name == "nll" else logprobs_T.exp().detach() * -logprobs_T


@dataclass
class Args(ImageArgs, StreamArgs, PrefixArgs, LengthArgs, OfflineArgs):
    TINY_DEFAULTS: ClassVar[dict] = TINY_OFFLINE | dict(max_steps=300, eval_every=50)
    batch_size: Positive[int] = 64
    """train on this many rows per optimizer step, over all ranks. A conversation is one sequence,
    or several if the chat template rewrites its earlier turns (docs/data.md)"""
    train_on: Literal["completion", "last", "all"] = "completion"
    """train on these tokens. completion: completions, or every assistant turn; last: the last
    assistant turn alone; all: prompts too"""
    loss: Literal["nll", "dft"] = "nll"
    """minimise this loss of a token of probability pi. nll: -log pi; dft: -pi log pi, without
    gradient of the factor. Evaluations always use nll, so that runs are comparable"""
    lr: Positive[float] = 2e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"


def encode_row(row: dict, columns: tuple[str, ...], encoder: Encoder, args: Args) -> list[Sample]:
    """Tokenise a row: one sequence, or several whose prompts begin alike."""
    return encoder.sft(row, columns, args.train_on)


@torch.no_grad()
def evaluate(
    policy: Policy, samples: Samples, indices: list[int], args: Args, device: torch.device
) -> Meter:
    """Measure this rank's part of the held-out rows with these indices: nll in nats per token,
    entropy, accuracy of the targets."""
    meter = Meter()
    own = [samples[i] for i in distributed.items_of_rank(indices)]
    for mb in pack_groups(own, args.pack_tokens, device, policy.share_prefix, together=False):
        logprobs_T, entropy_T, correct_T = policy(mb)
        measured = dict(loss=-logprobs_T, entropy=entropy_T, mean_token_accuracy=correct_T)
        meter.tokens(mb, {f"eval_{name}": x_T for name, x_T in measured.items()})
    return meter


def main(args: Args) -> None:
    # ---- setup: one process per GPU, the same Args on each ----
    device, _, world_size = distributed.setup(args.seed)
    earlier_flags = prepare_output_dir(args, args.dry_run)  # {} unless a run is resumed

    # ---- data: token ids with masks, and their order ----
    path = resolve_model(args.model, weights=not args.dry_run)
    args = fit_max_length(args, path, earlier_flags)
    tokenizer = load_tokenizer(path, args)
    (samples, counts), (eval_samples, eval_counts) = load_samples(
        encode_row, SFT_COLUMNS, tokenizer, args, stream=args.streaming, apart=True, image_args=args
    )
    if args.dry_run:
        counts += eval_counts
        return dry_run(args, path, tokenizer, samples, eval_samples, counts=counts, image_args=args)
    begin_run(args, samples.rows, eval_samples.rows)
    order = samples.order(args)

    # ---- model: FSDP2 shards of float32 masters ----
    policy = load_policy(path, args, device, image_args=args)
    optimizer = adamw(policy, args)
    # --eval_generate: answers held-out prompts; None without it
    generation = start_generation(policy, args, tokenizer, eval_samples.all_rows)

    # ---- resume from the newest checkpoint; everything else is a function of (seed, step) ----
    total_steps = num_steps(args, samples)
    run = Run(
        args, policy, optimizer, tokenizer, total_steps, order=order, show=SHOW, curves=CURVES
    )
    run.message(*describe_data(args, samples, eval_samples, counts, eval_counts))
    run.message(*cost_of_rewriting(policy, samples))
    run.logger.preview(samples[0][-1], tokenizer, of=len(samples[0]))
    meter = run.meter
    if generation and run.first_step == 0:
        run.log(0, generation.evaluate(0))

    for step in run.steps():  # saves checkpoints between steps
        # ---- 1. batch: this rank's part of the rows; packing then evens out the ranks' work ----
        batch = [samples[i] for i in distributed.items_of_rank(order.draw(args.batch_size))]
        micro_batches = pack_groups(
            batch, args.pack_tokens, device, policy.share_prefix, together=False
        )
        num_tokens = distributed.all_sum(sum(mb.loss_mask_T.sum() for mb in micro_batches))

        # ---- 2. update: one optimizer step; the loss is a mean over the tokens of all ranks ----
        with meter.time("train"):
            batch_loss = torch.zeros((), device=device)
            for mb in micro_batches:
                logprobs_T, entropy_T, correct_T = policy(mb)
                loss_T = loss(args.loss, logprobs_T)
                share_T = loss_T * mb.loss_mask_T / num_tokens
                # FSDP averages gradients over ranks; undo that.
                (share_T.sum() * world_size).backward()
                batch_loss += share_T.detach().sum()
                measured = dict(loss=loss_T, entropy=entropy_T, mean_token_accuracy=correct_T)
                meter.tokens(mb, measured, share_T)
                for name, mask_T in mb.source_masks_T.items():
                    meter.masked_mean(f"loss{name}", loss_T, mask_T)
            lr = run.learning_rate(step)
            grad_norm = optimizer_step(policy, optimizer, lr, args.max_grad_norm, batch_loss)

        # ---- 3. metrics, with the tokens of the samples; log and evaluate ----
        metrics = run.reduce(chain(*batch), grad_norm=grad_norm, lr=lr)
        if run.evaluates(step + 1):
            metrics |= evaluate_sets(
                eval_samples, lambda indices: evaluate(policy, eval_samples, indices, args, device)
            )
            if generation:
                metrics |= generation.evaluate(step + 1)
        run.log(step + 1, metrics)

    run.end()
    if generation:
        generation.close()
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
