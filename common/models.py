"""Hugging Face checkpoint -> FSDP2 shards, and the packed forward that returns token log-probs.

Shapes: T packed tokens, D hidden size, V vocabulary, N sequences.
"""

import math

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from common import distributed
from common.attention import packed_attention
from common.config import BaseArgs, TrainArgs
from common.hardware import forward_flops, matrix_weights
from common.loading import EXPERTS, load_weights
from common.logprobs import token_logprobs
from common.losses import expert_balance
from common.packing import PackedBatch, Sample, pack

# ---- models that take packs ----


class PackedModel(nn.Module):
    """A transformer that takes a PackedBatch. `hf` is the Hugging Face model, with its own names; `flops` counts what
    its forwards and backwards compute; `expert_balance_N` is that of the last forward's sequences, if it is watched."""

    def __init__(self, hf: nn.Module, path: str):
        super().__init__()
        self.hf, self.path = hf, path
        self.matrix_weights, self.flops = matrix_weights(hf), 0.0

    def hidden_states(self, mb: PackedBatch) -> Tensor:
        """Last hidden states [T, D]."""
        self.flops += forward_flops(self.hf.config, self.matrix_weights, mb) * (3 if torch.is_grad_enabled() else 1)
        output = self.hf.base_model(**packed_inputs(mb))
        if router_logits := getattr(output, "router_logits", None):
            lengths_N, top_k = mb.cu_seqlens_N1.diff(), self.hf.config.num_experts_per_tok
            balance_N = expert_balance(router_logits, mb.sequence_ids_T, lengths_N, top_k)
            self.expert_balance_N = balance_N[: len(mb.samples)]  # a filler is no sample
        return output.last_hidden_state[0]

    def watch_experts(self, flag: str) -> None:
        """Raises `ValueError` naming `flag` for a model without experts."""
        if self.hf.config.model_type not in EXPERTS:
            raise ValueError(f"{flag}: {self.hf.config.model_type} is no mixture of experts")
        self.hf.config.output_router_logits = True


class Policy(PackedModel):
    """A causal language model."""

    def forward(self, mb: PackedBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(logprobs_T, entropy_T, correct_T, collision_T)` of the targets: see `token_logprobs`."""
        hidden_TD = self.hidden_states(mb)
        head, config = self.hf.get_output_embeddings(), self.hf.config.get_text_config()
        # What some models do to their logits: Cohere, Granite, Gemma 2. `check_packing` refuses what is missing here.
        scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        # The head is a parameter of the FSDP root: it is whole here, inside the root's forward, and only here.
        return token_logprobs(hidden_TD, head.weight, mb.targets_T, temperature, head.bias, scale, softcap)


class ScalarModel(PackedModel):
    """One number per token, the form of Hugging Face's sequence classifiers with one label: a reward model or a value
    model."""

    def forward(self, mb: PackedBatch) -> Tensor:
        """Scalars [T], float32. Like every stream they are aligned with targets: `x_T[t]` has seen the inputs up to t,
        not `targets_T[t]`."""
        return self.hidden_states(mb).float() @ self.hf.score.weight[0].float()


def packed_inputs(mb: PackedBatch) -> dict:
    """Keyword arguments of a Hugging Face model whose attention is `packed_attention`."""
    return dict(
        input_ids=mb.input_ids_T[None],
        position_ids=mb.position_ids_T[None],
        use_cache=False,
        cu_seq_lens_q=mb.cu_seqlens_N1,
        max_length_q=mb.max_seqlen,
        pack=mb,  # not its list of offsets: a compiled block would be compiled anew for each
    )


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
    hf = _on_meta(AutoModelForCausalLM, config, what)
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
    hf = _on_meta(AutoModelForSequenceClassification, config, what)
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
    rope = getattr(config, "rope_parameters", None) or {}  # of the model, or of each type of layer
    for kind in (each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)):
        if kind in ("dynamic", "longrope"):
            raise ValueError(f"{what}: {kind} rotary embeddings mix packed sequences")
    for field in [name for name in vars(config) if name.endswith(("dropout", "pdrop", "jitter_noise"))]:
        setattr(config, field, 0.0)
    config.output_router_logits = False  # `watch_experts` asks for them
    return config


def _on_meta(auto_class, config, what: str) -> nn.Module:
    try:
        with torch.device("meta"):
            hf = auto_class.from_config(config, attn_implementation="packed", dtype=torch.float32)
    except (KeyError, ValueError) as error:  # GPT-J, for one, looks attention up in a table of its own
        raise ValueError(
            f"{what}: {config.model_type} has no packed attention: {distributed.first_line(error)}"
        ) from error
    if any(name.endswith("experts") for name, _ in hf.named_modules()) and config.model_type not in EXPERTS:
        supported = ", ".join(EXPERTS)
        raise ValueError(f"{what}: {config.model_type} is a mixture of experts; of those {supported} are supported")
    return hf


def _recomputes(args: TrainArgs, device: torch.device) -> bool:
    return device.type == "cuda" if args.activation_checkpointing is None else args.activation_checkpointing


def _load(model: PackedModel, what: str, args: BaseArgs, device: torch.device, trainable: bool) -> PackedModel:
    hf = model.hf.requires_grad_(trainable)
    if trainable and _recomputes(args, device):
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    model.train()  # for activation checkpointing; without dropout it changes nothing else
    if not isinstance(blocks := getattr(hf.base_model, "layers", None), nn.ModuleList):
        raise ValueError(f"{what}: {hf.config.model_type} does not keep its transformer blocks in `layers`")
    shard(model, blocks, args, device, reshard_root=not trainable)
    new_head = load_weights(hf, model.path, what, device)
    if new_head is not None:
        if not trainable:
            raise ValueError(f"{what}: a language model without a reward head")
        width, generator = new_head.shape[1], torch.Generator().manual_seed(args.seed)
        drawn = torch.randn(1, width, generator=generator) / math.sqrt(width + 1)
        new_head.copy_(distribute_tensor(drawn.to(device), new_head.device_mesh, new_head.placements))
    check_packing(model, what, args, device)
    model.compute_dtype = compute_dtype(args, device)
    return model


@torch.no_grad()
def check_packing(model: PackedModel, what: str, args: BaseArgs, device: torch.device) -> None:
    """Refuse a model in which a sequence of a pack sees the one before it, or whose log-probs are not those of its own
    logits.

    State-space and convolutional layers let one sequence see the other; what a model does to its logits has no one
    name. Of two packs that differ in their first sequence's tokens only, the second sequence has the same numbers:
    shapes, and so kernels, are the same. Collective. Raises `ValueError`.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, model.hf.config.vocab_size, (38,), generator=generator).tolist()
    first, other, second = (Sample(ids, [True] * len(ids)) for ids in (drawn[:13], drawn[13:26], drawn[26:]))
    packs = [pack(samples, 100, device)[0] for samples in ([first, second], [other, second], [second])]
    length = second.num_targets
    try:
        outs = [model(mb) for mb in packs[:2]]
        x_T, y_T = ((out[0] if isinstance(model, Policy) else out)[-length:] for out in outs)
        if isinstance(model, Policy):
            model.unshard()  # the head is in the root, whose forward this is not
            logits_TV = model.hf(**packed_inputs(packs[2])).logits[0].float()
    except (torch.OutOfMemoryError, torch.distributed.DistError):
        raise  # these are RuntimeErrors too
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{what}: {model.hf.config.model_type} has no packed forward: {distributed.first_line(error)}"
        ) from error
    model.reshard()  # the root stays whole after a forward without backward
    if not x_T.isfinite().all():
        raise ValueError(f"{what}: its weights give numbers that are not finite")
    if not (x_T - y_T).abs().max() < 1e-4:
        raise ValueError(f"{what}: {model.hf.config.model_type} does not keep packed sequences apart")
    if isinstance(model, Policy):
        own_T = logits_TV.log_softmax(-1).gather(-1, packs[2].targets_T[:, None])[:, 0]
        # Logits come in the compute dtype, log-probs in float32: nats, more of them where logits are large.
        limit = 1e-3 if compute_dtype(args, device) == torch.float32 else 0.5
        if not (own_T - x_T).abs().max() < limit * max(1.0, logits_TV.abs().max().item() / 64):
            raise ValueError(f"{what}: {model.hf.config.model_type} has a head that is not supported")


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
            for experts in (module for name, module in block.named_modules() if name.endswith("experts")):
                # Sizes are what the router says: in float32 inductor fails at them, at each anew (torch 2.13).
                experts.forward = torch.compiler.disable(experts.forward)
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_root)
