"""Forwards without gradient: log-probs and values that stay fixed during an update, scores of a
reward model, log-probs of whole completions, and those of the reference for a data set."""

from collections.abc import Iterable, Sequence
from itertools import chain, islice

import torch
from torch import Tensor, nn

from common.model.hub import require_same_tokenizer, resolve_model
from common.model.logprobs import logprobs_or_scalars
from common.model.policy import PackedModel, Policy, ScalarModel, load_reference
from common.packs.packing import (
    Minibatches,
    PackedBatch,
    own_sample_values,
    pack_minibatches,
    per_sample,
    positions_of_rank,
)
from common.packs.sample import Sample, at_end
from common.parallel import distributed


@torch.no_grad()
def forwards(model: nn.Module, micro_batches: Iterable[PackedBatch], **options) -> list[Tensor]:
    """Return the log-probs of a policy, or the scalars of another model: [T] for each micro-batch.
    Collective."""
    streams = [logprobs_or_scalars(model(mb, **options)) for mb in micro_batches]
    model.reshard()  # no backward follows, so FSDP has not freed the root yet
    return streams


def sequence_sums(
    model: PackedModel, groups: list[list[Sample]], pack_tokens: int
) -> tuple[list[PackedBatch], list[Tensor]]:
    """Pack this rank's groups and run the model. Return the micro-batches and, for each, the sum of
    the log-probs (or scalars) over the trained tokens of each sample, [N]. Collective."""
    require_length(model, max((sample.num_targets for sample in chain(*groups)), default=0))
    positions = positions_of_rank(len(groups))
    (packs,) = pack_minibatches(groups, positions, 1, pack_tokens, model.device, model.share_prefix)
    streams = forwards(model, packs)
    return packs, [mb.sequence_sums(x_T) for mb, x_T in zip(packs, streams, strict=True)]


def require_length(model: PackedModel, longest: int) -> None:
    """Raise `ValueError` if a sequence of `longest` tokens does not fit in the model's context."""
    limit = getattr(model.hf.config.get_text_config(), "max_position_embeddings", longest)
    if longest > limit:
        problem = f"a sequence of {longest} tokens is longer than its context of {limit}"
        raise ValueError(f"{model.path}: {problem}")


def with_logprobs(
    minibatches: Minibatches, temperature: float, *, old: nn.Module | None = None,
    ref: nn.Module | None = None, old_of_first: bool = True,
) -> Minibatches:  # fmt: skip
    """Return the micro-batches with log-probs that stay fixed during the update: `old_logprobs_T`
    of the policy `old`, and `ref_logprobs_T` of the frozen model `ref`. If `old_of_first` is False,
    the first minibatch gets no old log-probs: no update comes before it, so the forward of its own
    update computes the same numbers. Collective."""
    if old is not None:
        first = [] if old_of_first else minibatches[:1]
        rest = minibatches[len(first) :]
        minibatches = first + _with_stream(rest, "old_logprobs_T", old, temperature=temperature)
    if ref is not None:
        minibatches = _with_stream(minibatches, "ref_logprobs_T", ref, temperature=temperature)
    return minibatches


def with_values(minibatches: Minibatches, value_model: nn.Module) -> Minibatches:
    """Return the micro-batches with the value model's `values_T` before the update. Collective."""
    return _with_stream(minibatches, "values_T", value_model)


def _with_stream(minibatches: Minibatches, name: str, model: nn.Module, **options) -> Minibatches:
    streams = iter(forwards(model, chain(*minibatches), **options))
    return [[mb.with_streams(**{name: next(streams)}) for mb in mbs] for mbs in minibatches]


def log_likelihoods(
    model: Policy, groups: list[list[Sample]], pack_tokens: int
) -> list[tuple[float, int]]:
    """Return log-prob and number of tokens of each of this rank's completions. Collective."""
    logps = own_sample_values(*sequence_sums(model, groups, pack_tokens))
    return [(x, sum(s.loss_mask)) for x, s in zip(logps, chain(*groups), strict=True)]


def score(model: ScalarModel, groups: list[list[list[int]]], pack_tokens: int) -> list[float]:
    """Return the reward of each of this rank's sequences (prompt and completion). Collective."""
    samples = [[at_end(ids) for ids in group] for group in groups]
    return own_sample_values(*sequence_sums(model, samples, pack_tokens))


# ---- log-probs of a data set by the frozen reference ----


def reference_logps(
    policy: Policy, datasets: Sequence[Sequence[list[Sample]]], tokenizer, args,
    device: torch.device, needed: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Return the reference's log-probs of all completions, float64 [groups, samples per group] for
    each of the `datasets` (training rows, held-out rows). Zeros if they are not `needed`.

    Call this before a checkpoint is loaded, since the reference often is the starting model itself.
    Collective."""
    shapes = [(len(groups), len(groups[0]) if groups else 0) for groups in datasets]
    if not needed:
        return [torch.zeros(shape) for shape in shapes]
    is_other = args.reference_model is not None
    path = resolve_model(args.reference_model if is_other else args.model, "--reference_model")
    require_same_tokenizer("--reference_model", path, tokenizer)
    distributed.say(f"the reference scores {sum(map(len, datasets))} rows once")
    model = load_reference(policy, args, device, path) if is_other else policy
    groups, logps = chain(*datasets), []
    while batch := list(islice(groups, 512 * distributed.world_size())):
        scored = sequence_sums(model, distributed.items_of_rank(batch), args.pack_tokens)
        logps += per_sample(*scored, (sum(map(len, batch)),)).tolist()
    columns = torch.tensor(logps, dtype=torch.float64).split([g * s for g, s in shapes])
    return [column.view(shape) for column, shape in zip(columns, shapes, strict=True)]
