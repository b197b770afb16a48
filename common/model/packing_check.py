"""Refuse models that cannot run packs exactly: `load_policy` tries each model with tiny packs."""

import torch
from torch import nn

from common.model.attention import packed_inputs
from common.model.flops import num_delta_nets
from common.model.loading import named_errors
from common.model.logprobs import logprobs_or_scalars
from common.packs.packing import pack_groups
from common.packs.sample import Sample


def require_context_ranks(config, context_ranks: int) -> None:
    """Raise `ValueError` if the ranks of a context group cannot share the layers of this model."""
    flag = f"--context_ranks {context_ranks}"
    if num_delta_nets(config):
        problem = f"gated delta nets ({config.model_type}) need whole sequences on each rank"
        raise ValueError(f"{flag}: {problem}; leave the flag out")
    heads = config.num_attention_heads
    if heads % context_ranks:
        raise ValueError(f"{flag}: does not divide the {heads} attention heads of the model")


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Raise `ValueError` if one sequence of a pack changes another, as in state-space layers, or if
    our log-probs are not those of the model's own logits. Collective.

    We run two packs that differ only in the tokens of their first sequence. Their shapes, and so
    the kernels, are the same. So the second sequence must get the same numbers in both."""
    model_type = model.hf.config.model_type
    generator = torch.Generator().manual_seed(0)
    size = model.hf.config.get_text_config().vocab_size
    drawn = torch.randint(0, size, (38,), generator=generator).tolist()
    first, other, second = (
        Sample(ids, [True] * len(ids)) for ids in (drawn[:13], drawn[13:26], drawn[26:])
    )
    groups = [first, second], [other, second], [second]
    *packs, alone = (pack_groups([samples], 100, model.device)[0] for samples in groups)
    logits_TV = None
    compiled = ", or cannot be compiled; try --compile false" * model.compiled
    with named_errors(f"{model_type} has no packed forward{compiled}"):
        x_T, y_T = (logprobs_or_scalars(model(mb))[-second.num_targets :] for mb in packs)
        if model.hf.get_output_embeddings() is not None:
            model.unshard()  # the head belongs to the root, and this is not the root's forward
            # In training mode, some models of images and text refuse to run without images.
            logits_TV = model.hf.eval()(**packed_inputs(alone)).logits[0].float()
            model.hf.train()
    model.reshard()  # after a forward without backward the root is still whole
    if not x_T.isfinite().all():
        name = str(model.compute_dtype).removeprefix("torch.")
        raise ValueError(f"its weights give numbers that are not finite in {name}")
    if not (x_T - y_T).abs().max() < 1e-4:
        raise ValueError(f"{model_type} does not keep packed sequences apart")
    if model.images is not None:
        model.images.check(model, first.ids, second.ids)
    if logits_TV is None:
        return
    expected_T = logits_TV.log_softmax(-1).gather(-1, alone.targets_T[:, None])[:, 0]
    # Log-probs are float32. The model's logits have the compute dtype: large ones are less exact.
    tolerance = 1e-3 if model.compute_dtype == torch.float32 else 0.5
    tolerance *= max(1.0, logits_TV.abs().max().item() / 64)
    if not (expected_T - x_T).abs().max() < tolerance:
        raise ValueError(f"{model_type} has a head that is not supported")
