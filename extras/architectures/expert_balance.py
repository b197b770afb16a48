"""`--router_aux_loss_coef`: load balancing of a mixture of experts.

Shapes: T packed tokens, N sequences, E experts.
"""

import torch
from torch import Tensor

from common.data.packing import PackedBatch
from common.model.policy import PackedModel
from common.parallel.context import context_group_size


def watch_experts(model: PackedModel, flag: str) -> None:
    """Keep `model.expert_balance_N`, the balance of the sequences of the last forward. Raises
    `ValueError` naming `flag` for a model without experts, and with context ranks."""
    decoder = model.hf.get_decoder()
    if not any(name.endswith("experts") for name, _ in decoder.named_modules()):
        raise ValueError(f"{flag}: {decoder.config.model_type} is no mixture of experts")
    if context_group_size() > 1:
        raise ValueError(f"{flag} needs whole sequences on each rank; drop --context_ranks")
    decoder.config.output_router_logits = True

    def keep(module, args: tuple, inputs: dict, output) -> None:
        mb = inputs["pack"]
        if not isinstance(mb, PackedBatch):  # prefixes are computed once
            what = "the balance of experts counts how every token is routed"
            raise ValueError(f"{what}; needs --share_prefix 0")
        top_k = decoder.config.num_experts_per_tok
        balance_N = expert_balance(output.router_logits, mb.cu_seqlens_N1.diff(), top_k)
        model.expert_balance_N = balance_N[: mb.num_samples]

    decoder.register_forward_hook(keep, with_kwargs=True)


def expert_balance(router_logits: tuple[Tensor, ...], lengths_N: Tensor, top_k: int) -> Tensor:
    """Return the load-balancing loss of each sequence, the mean over layers of sum_j load_j prob_j
    (arXiv:2412.19437 Eq. 17-20). It is 1 for a uniform load, and experts / `top_k` if all tokens
    choose the same experts with certainty.

    load_j is the fraction of tokens that choose expert j, divided by the uniform fraction top_k /
    experts. prob_j is the mean probability of expert j and carries the gradient. `router_logits`:
    [T, experts] of each layer; `lengths_N`: tokens of each sequence. Shape [N], float32."""
    N = len(lengths_N)
    sequence_ids_T = torch.arange(N, device=lengths_N.device).repeat_interleave(lengths_N)
    balance_N = torch.zeros(N, device=lengths_N.device)
    for logits_TE in router_logits:
        E = logits_TE.shape[-1]
        probs_TE = logits_TE.float().softmax(-1)
        chosen_TE = torch.zeros_like(probs_TE).scatter(-1, probs_TE.topk(top_k).indices, 1.0)
        zeros_NE = probs_TE.new_zeros(N, E)
        chosen_NE = zeros_NE.index_add(0, sequence_ids_T, chosen_TE) / lengths_N[:, None]
        load_NE = chosen_NE * E / top_k
        prob_NE = zeros_NE.index_add(0, sequence_ids_T, probs_TE) / lengths_N[:, None]
        balance_N = balance_N + (load_NE * prob_NE).sum(-1)
    return balance_N / len(router_logits)
