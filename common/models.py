"""Hugging Face checkpoint -> FSDP2 shards, and the packed forward that returns token log-probs.

Shapes: T packed tokens, D hidden size, V vocabulary, N sequences.
"""

import contextlib
import json
import math
from itertools import groupby, pairwise

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from common import distributed
from common.config import BaseArgs
from common.logprobs import token_logprobs
from common.packing import PackedBatch, Sample, pack

# ---- attention over a packed stream ----


def packed_attention(module, query, key, value, attention_mask, scaling, sliding_window=None, **kwargs):
    """Causal attention within each sequence of the pack; nothing crosses a boundary and nothing is quadratic in T.

    `query` is [1, heads, T, head_dim], `key` and `value` may have fewer heads (grouped-query attention); the offsets
    come through the model's keyword arguments. FlashAttention's varlen kernel on CUDA, one SDPA call per sequence
    elsewhere. Raises `ValueError` for variants of attention it does not compute.
    """
    for variant in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(variant) is not None:
            raise ValueError(f"--model: {type(module).__name__} needs {variant} in attention, which is not supported")
    cu_seqlens_N1, max_seqlen = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]  # a KeyError is caught at load
    if query.is_cuda and query.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        window = (-1 if sliding_window is None else sliding_window - 1, 0)  # (-1, 0) is plain causal
        groups = query.shape[1] // key.shape[1]  # torch 2.11 has no enable_gqa here
        q, k, v = (
            x[0].transpose(0, 1) for x in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
        )
        out = varlen_attn(
            q, k, v, cu_seqlens_N1, cu_seqlens_N1, max_seqlen, max_seqlen, scale=scaling, window_size=window
        )
        return out[None], None
    outputs, start = [], 0
    lengths = [end - begin for begin, end in pairwise(kwargs["offsets"])]
    for length, run in groupby(lengths):  # packs are sorted by length: neighbours of one length go as one batch
        count = len(list(run))
        # [1, heads, count * length, head_dim] -> [count, heads, length, head_dim]
        q, k, v = (
            x[0, :, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)
            for x in (query, key, value)
        )
        start += count * length
        mask = None
        if sliding_window is not None and length > sliding_window:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [count * length, heads, head_dim]
    return torch.cat(outputs)[None], None


# ---- models that take packs ----


class Policy(nn.Module):
    """A causal language model that takes a PackedBatch. `policy.hf` is the Hugging Face model, with its own names."""

    def __init__(self, hf: nn.Module, path: str):
        super().__init__()
        self.hf, self.path = hf, path

    def forward(self, mb: PackedBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(logprobs_T, entropy_T, correct_T, collision_T)` of the targets: see `token_logprobs`."""
        hidden_TD = packed_hidden_states(self.hf, mb)
        # The head is a parameter of the FSDP root: it is whole here, inside the root's forward, and only here.
        return token_logprobs(hidden_TD, self.hf.get_output_embeddings().weight, mb.targets_T, temperature)


class ScalarModel(nn.Module):
    """A transformer with a head of one number per token, the form of Hugging Face's sequence classifiers with one
    label: a reward model or a value model."""

    def __init__(self, hf: nn.Module, path: str):
        super().__init__()
        self.hf, self.path = hf, path

    def forward(self, mb: PackedBatch) -> Tensor:
        """Scalars [T], float32. Like every stream they are aligned with targets: `x_T[t]` has seen the inputs up to t,
        not `targets_T[t]`."""
        return packed_hidden_states(self.hf, mb).float() @ self.hf.score.weight[0].float()


def packed_hidden_states(hf: nn.Module, mb: PackedBatch) -> Tensor:
    """Last hidden states [T, D] of a packed micro-batch."""
    output = hf.base_model(
        input_ids=mb.input_ids_T[None],
        position_ids=mb.position_ids_T[None],
        use_cache=False,
        cu_seq_lens_q=mb.cu_seqlens_N1,
        max_length_q=mb.max_seqlen,
        offsets=mb.offsets,
    )
    return output.last_hidden_state[0]


PackedModel = Policy | ScalarModel


# ---- loading ----


def compute_dtype(args: BaseArgs, device: torch.device) -> torch.dtype:
    """`--dtype`, with auto resolved: bfloat16 on CUDA, float32 elsewhere."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, auto if args.dtype == "auto" else args.dtype)


def load_policy(
    path: str, args: BaseArgs, device: torch.device, trainable: bool = True, flag: str = "--model"
) -> Policy:
    """Causal LM of a local checkpoint folder as FSDP2 shards: float32 masters, `--dtype` compute, float32 reduction.

    Built on meta, sharded, then each rank reads only its slices. `trainable=False` gives a frozen reference. Dropout
    is off: the log-probs of a sample must not depend on when they are computed. `flag` is what errors name.
    Raises `ValueError` for a model this forward would not compute exactly.
    """
    from transformers import AutoModelForCausalLM

    what = f"{flag} {path}"
    config = _packable_config(path, what)
    for field in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, field, None) not in (None, 1, 1.0):
            raise ValueError(f"{what}: {config.model_type} has {field}, which the chunked log-probs do not apply")
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="packed", dtype=torch.float32)
    if hf.get_output_embeddings().bias is not None:
        raise ValueError(f"{what}: {config.model_type} has a bias in its head, which is not supported")
    return _load(Policy(hf, path), what, args, device, trainable)


def load_scalar_model(
    path: str, args: BaseArgs, device: torch.device, trainable: bool = True, flag: str = "--model"
) -> ScalarModel:
    """`load_policy` with a scalar head: the checkpoint's own, or where it has none (a language model) a new one drawn
    from N(0, 1 / (D + 1)) by `--seed`, as in arXiv:2009.01325. Frozen models must have one.

    Raises `ValueError`, also for a classifier with more than one label.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

    what = f"{flag} {path}"
    config = _packable_config(path, what)
    config.num_labels = 1
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(f"{what}: transformers has no sequence classifier of {config.model_type}")
    with torch.device("meta"):
        hf = AutoModelForSequenceClassification.from_config(config, attn_implementation="packed", dtype=torch.float32)
    if not isinstance(getattr(hf, "score", None), nn.Linear):
        raise ValueError(f"{what}: {type(hf).__name__} has no linear head `score`, which is not supported")
    return _load(ScalarModel(hf, path), what, args, device, trainable)


def _packable_config(path: str, what: str):
    """The model's configuration without dropout. Raises `ValueError` for rotary embeddings that mix sequences."""
    from transformers import AttentionInterface, AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    AttentionInterface.register("packed", packed_attention)
    config = AutoConfig.from_pretrained(path)  # resolve_model has seen that it can be read
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise ValueError(f"{what}: {rope['rope_type']} rotary embeddings mix packed sequences")
    for field in [name for name in vars(config) if name.endswith(("dropout", "pdrop"))]:
        setattr(config, field, 0.0)
    return config


def _load(model: PackedModel, what: str, args: BaseArgs, device: torch.device, trainable: bool) -> PackedModel:
    hf = model.hf.requires_grad_(trainable)
    if trainable and args.activation_checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    model.train()  # for activation checkpointing; without dropout it changes nothing else
    if not isinstance(blocks := getattr(hf.base_model, "layers", None), nn.ModuleList):
        raise ValueError(f"{what}: {hf.config.model_type} does not keep its transformer blocks in `layers`")
    shard(model, blocks, args, device, reshard_root=not trainable)
    new_head = load_weights(model, what, device)
    if new_head is not None:
        if not trainable:
            raise ValueError(f"{what}: a language model without a reward head")
        width, generator = new_head.shape[1], torch.Generator().manual_seed(args.seed)
        drawn = torch.randn(1, width, generator=generator) / math.sqrt(width + 1)
        new_head.copy_(distribute_tensor(drawn.to(device), new_head.device_mesh, new_head.placements))
    check_packing(model, what, args, device)
    return model


@torch.no_grad()
def check_packing(model: PackedModel, what: str, args: BaseArgs, device: torch.device) -> None:
    """Refuse a model that computes something else for a sequence in a pack than for the same sequence alone.

    State-space and convolutional layers let one sequence see the one before it. Collective.
    Raises `ValueError`.
    """
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(0, model.hf.config.vocab_size, (n,), generator=generator).tolist() for n in (13, 12))
    samples = [Sample(ids, [True] * len(ids)) for ids in (first, second)]
    (both,), (alone,) = pack(samples, 100, device), pack(samples[1:], 100, device)
    try:
        packed_T, alone_T = (out[0] if isinstance(out, tuple) else out for out in (model(both), model(alone)))
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{what}: {model.hf.config.model_type} has no packed forward: {distributed.first_line(error)}"
        ) from error
    model.reshard()  # the root stays whole after a forward without backward
    if not alone_T.isfinite().all():
        raise ValueError(f"{what}: its weights give numbers that are not finite")
    limit = 1e-3 if compute_dtype(args, device) == torch.float32 else 0.5  # nats; a leak is worth more than rounding
    if not (packed_T[-alone.max_seqlen :] - alone_T).abs().max() < limit:
        raise ValueError(f"{what}: {model.hf.config.model_type} does not keep packed sequences apart")


def shard(
    model: nn.Module, blocks: nn.ModuleList, args: BaseArgs, device: torch.device, reshard_root: bool = False
) -> None:
    """`fully_shard` every transformer block and the rest, as the root; compile the blocks if `--compile` says so.

    The root stays whole from forward to backward, which needs it next; without a backward `reshard_root` frees it.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype(args, device), reduce_dtype=torch.float32)
    mesh = torch.distributed.init_device_mesh(device.type, (distributed.world_size(),))
    for block in blocks:
        if args.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_root)


def load_weights(model: PackedModel, what: str, device: torch.device) -> Tensor | None:
    """Fill the sharded parameters of a meta model from safetensors: each rank reads its own slices.

    Returns the scalar head if the checkpoint has none, to be filled by the caller.
    Raises `ValueError` if the checkpoint's names or shapes are not the model's.
    """
    hf, path = model.hf, model.path
    hf.to_empty(device=device)
    # Buffers that no checkpoint holds (rotary frequencies): NaN until their module computes them again.
    for name, buffer in list(hf.named_non_persistent_buffers()):
        buffer.fill_(float("nan") if buffer.is_floating_point() else 0)
        with torch.no_grad():
            hf._init_weights(hf.get_submodule(name.rpartition(".")[0]))
    if any(buffer.isnan().any() for _, buffer in hf.named_non_persistent_buffers()):
        raise ValueError(f"{what}: {hf.config.model_type} keeps buffers that cannot be rebuilt")
    wanted = hf.state_dict()
    for name in hf.all_tied_weights_keys:
        wanted.pop(name, None)  # the tied head is the embedding, and checkpoints need not list it
    reader = HuggingFaceStorageReader(path)
    with one_line_errors(what):
        stored = {name: list(meta.size) for name, meta in reader.read_metadata().state_dict_metadata.items()}
    if isinstance(model, Policy) and "score.weight" in stored:
        raise ValueError(f"{what}: a reward model (it has score.weight), not a language model")
    new_head = wanted.pop("score.weight", None) if "score.weight" not in stored else None
    for name, tensor in wanted.items():
        if stored.get(name) != list(tensor.shape):
            found = f"shape {stored[name]}" if name in stored else "no such weight"
            raise ValueError(f"{what}: {name} {list(tensor.shape)} expected, the checkpoint has {found}")
    unused = stored.keys() - hf.state_dict().keys() - {"lm_head.weight"}  # a scalar model has no use for that one
    if unused and distributed.is_main():
        print(f"{len(unused)} weights of {path} are not used by {hf.config.model_type}, {min(unused)} for one")
    with one_line_errors(what):
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(path))
    return new_head


@contextlib.contextmanager
def one_line_errors(what: str):
    """Unreadable files become a ValueError that names them."""
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (OSError, EOFError, json.JSONDecodeError, SafetensorError, CheckpointException) as error:
        raise ValueError(f"{what}: cannot read the checkpoint: {distributed.first_line(error)}") from error
