"""Models without an exact packed forward are refused."""

import torch
from torch import nn

from common.model.attention import packed_inputs
from common.model.flops import num_delta_nets
from common.model.loading import named_errors
from common.model.logprobs import logprobs_or_scalars
from common.packs.packing import pack_groups
from common.packs.sample import Sample


def require_context_ranks(config, context_ranks: int) -> None:
    """Raise `ValueError` for a language model whose layers a context group cannot divide."""
    flag = f"--context_ranks {context_ranks}"
    if num_delta_nets(config):
        problem = f"gated delta nets ({config.model_type}) need whole sequences on each rank"
        raise ValueError(f"{flag}: {problem}; leave the flag out")
    heads = config.num_attention_heads
    if heads % context_ranks:
        raise ValueError(f"{flag}: does not divide the {heads} attention heads of the model")


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Refuse a model in which one sequence of a pack changes another, as in state-space layers, or
    whose own logits give other log-probs. Collective.

    Two packs differ only in the tokens of their first sequence. Shapes and thus kernels are the
    same, so that the second sequence must have the same numbers in both."""
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
            # Some models of images and text demand images while they train.
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
    # Log-probs are float32. Logits have the compute dtype, whose error in nats grows with them.
    tolerance = 1e-3 if model.compute_dtype == torch.float32 else 0.5
    tolerance *= max(1.0, logits_TV.abs().max().item() / 64)
    if not (expected_T - x_T).abs().max() < tolerance:
        raise ValueError(f"{model_type} has a head that is not supported")
