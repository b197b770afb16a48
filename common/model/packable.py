"""Support of architectures: models without an exact packed forward are refused, before or after they are loaded."""

import math

import torch
from torch import nn

from common.data.packing import pack_groups
from common.data.sample import Sample
from common.model.attention import packed_attention, packed_inputs
from common.model.loading import EXPERTS, load_config
from common.model.logprobs import TokenStats
from common.parallel import distributed
from common.parallel.distributed import first_line


def packable_config(path: str, label: str):
    """Return the model's configuration without dropout. Raises `ValueError` if its rotary embeddings mix sequences."""
    from transformers import AttentionInterface
    from transformers.utils import logging

    logging.disable_progress_bar()
    AttentionInterface.register("packed", packed_attention)
    config = load_config(path)  # resolve_model has checked that it can be read
    rope = getattr(config, "rope_parameters", None) or {}  # of the model, or of each type of layer
    for kind in (each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)):
        if kind in ("dynamic", "longrope"):
            raise ValueError(f"{label}: {kind} rotary embeddings mix packed sequences")
    for field in [name for name in vars(config) if name.endswith(("dropout", "pdrop", "jitter_noise"))]:
        setattr(config, field, 0.0)
    config.output_router_logits = False  # `watch_experts` turns them on
    return config


def build_on_meta(auto_class, config, label: str, dtype: torch.dtype) -> nn.Module:
    """Return the model without memory: weights of `dtype`, float32 buffers. Raises `ValueError` if it cannot take the
    packed attention, or is an unknown mixture of experts."""
    options = dict(attn_implementation="packed", dtype=torch.float32, trust_remote_code=False)
    try:
        with torch.device("meta"):
            hf = auto_class.from_config(config, **options)
    except (KeyError, ValueError) as error:  # GPT-J, for example, has an attention table of its own
        raise ValueError(f"{label}: {config.model_type} has no packed attention: {first_line(error)}") from error
    except (AssertionError, ArithmeticError, AttributeError, RuntimeError, TypeError) as error:
        raise ValueError(f"{label}: config.json describes no model: {first_line(error)}") from error
    if any(name.endswith("experts") for name, _ in hf.named_modules()) and config.model_type not in EXPERTS:
        supported = ", ".join(EXPERTS)
        raise ValueError(f"{label}: mixtures of experts of type {config.model_type} are not supported; use {supported}")
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(dtype)
    return hf


@torch.no_grad()
def check_packing(model: nn.Module, label: str) -> None:
    """Refuse a model in which one sequence of a pack changes another, or whose log-probs differ from those of its own
    logits. Collective. Raises `ValueError`.

    State-space and convolutional layers mix sequences; what a model does to its logits has no common name. Two packs
    differ only in the tokens of their first sequence. Shapes and thus kernels are the same, so that the second sequence
    must have the same numbers in both.
    """
    model_type, generator = model.hf.config.model_type, torch.Generator().manual_seed(0)
    drawn = torch.randint(0, model.hf.config.vocab_size, (38,), generator=generator).tolist()
    first, other, second = (Sample(ids, [True] * len(ids)) for ids in (drawn[:13], drawn[13:26], drawn[26:]))
    groups = [first, second], [other, second], [second]
    packs = [pack_groups([samples], 100, model.device, shortest=0)[0] for samples in groups]
    length, logits_TV = second.num_targets, None
    try:
        outputs = [model(mb) for mb in packs[:2]]
        is_policy = isinstance(outputs[0], TokenStats)
        x_T, y_T = ((out.logprobs_T if is_policy else out)[-length:] for out in outputs)
        if is_policy:
            model.unshard()  # the head belongs to the root, and this is not the root's forward
            logits_TV = model.hf(**packed_inputs(packs[2])).logits[0].float()
    except (torch.OutOfMemoryError, torch.distributed.DistError):
        raise  # these are RuntimeErrors too
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{label}: {model_type} has no packed forward: {first_line(error)}") from error
    model.reshard()  # after a forward without backward the root is still whole
    if not x_T.isfinite().all():
        raise ValueError(f"{label}: its weights give numbers that are not finite")
    if not (x_T - y_T).abs().max() < 1e-4:
        raise ValueError(f"{label}: {model_type} does not keep packed sequences apart")
    if is_policy:
        expected_T = logits_TV.log_softmax(-1).gather(-1, packs[2].targets_T[:, None])[:, 0]
        # Log-probs are float32, logits have the compute dtype, whose error in nats grows with the logits.
        limit = 1e-3 if model.compute_dtype == torch.float32 else 0.5
        if not (expected_T - x_T).abs().max() < limit * max(1.0, logits_TV.abs().max().item() / 64):
            raise ValueError(f"{label}: {model_type} has a head that is not supported")


@torch.no_grad()
def keeps_shared_prefixes(model: nn.Module, label: str) -> bool:
    """Return whether samples whose common prefix is computed once have the numbers that they have alone, up to
    rounding or a share of what another prefix changes. If not, rank 0 says so. Collective."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, model.hf.config.vocab_size, (48,), generator=generator)
    prefix, other, *suffixes = (ids.tolist() for ids in drawn.split([16, 16, 7, 9]))
    numbers = []
    for start, shortest in ((prefix, 1), (prefix, 0), (other, 0)):
        pair = [Sample(start + ids, [True] * (16 + len(ids))) for ids in suffixes]
        (mb,) = pack_groups([pair], 100, model.device, shortest=shortest)
        output = model(mb)
        numbers.append(output.logprobs_T if isinstance(output, TokenStats) else output)
    model.reshard()
    shared_T, alone_T, other_T = numbers
    error, effect = (
        distributed.all_max((x_T - alone_T).abs().max().nan_to_num(math.inf)) for x_T in (shared_T, other_T)
    )
    rounding, share = (1e-3, 0.01) if model.compute_dtype == torch.float32 else (0.05, 0.25)
    if error < max(rounding, share * effect):
        return True
    model_type = model.hf.config.model_type
    distributed.say(f"{label}: {model_type} needs every prefix with its sequence; continues as with --share_prefix 0")
    return False
