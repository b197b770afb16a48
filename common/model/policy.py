"""Hugging Face checkpoint -> FSDP2 shards, and the packed forward that returns token log-probs.

Shapes: T packed tokens, D hidden size, V vocabulary, N sequences.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as register_forward

from common.config.groups import BaseArgs, TrainArgs
from common.data.packing import PackedBatch, Sample, pack_groups
from common.model import lora
from common.model.attention import packed_attention, packed_inputs
from common.model.flops import forward_flops, matrix_weights
from common.model.loading import EXPERTS, draw_head, load_weights
from common.model.logprobs import token_logprobs
from common.model.memory import recomputes, require_room
from common.objectives.divergence import Comparison, Divergence, Logits, Teacher, compare, logits_of
from common.objectives.policy import expert_balance
from common.parallel import distributed
from common.parallel.mesh import shard_mesh
from common.parallel.placement import Stream, own, setup, unit_size

# ---- models that take packs ----


class PackedModel(nn.Module):
    """A transformer that takes a PackedBatch. `hf` is the Hugging Face model, with its own names; `flops` counts what
    its forwards and backwards compute; `expert_balance_N` is that of the sequences that it last computed, if it is
    watched, and `values` the forward of a value model in it (common/model/value.py)."""

    values = None

    def __init__(self, hf: nn.Module, path: str):
        super().__init__()
        self.hf, self.path = hf, path
        self.matrix_weights, self.flops = matrix_weights(hf), 0.0

    def hidden_states(self, stream: Stream, second: bool = False) -> Tensor:
        """Last hidden states [t, D]; with the `second` adapters, those of its value model."""
        if self.values is not None:
            lora.use(self.hf, second)
        flops = forward_flops(self.hf.config, self.matrix_weights, stream)
        if torch.is_grad_enabled():
            frozen = not self.hf.get_input_embeddings().weight.requires_grad  # all but adapters: those are not counted
            flops = 3 * flops - (2 * self.matrix_weights * len(stream.targets_T) if frozen else 0)
        self.flops += flops
        output = self.hf.base_model(**packed_inputs(stream))
        if router_logits := getattr(output, "router_logits", None):
            lengths_N, top_k = stream.cu_seqlens_N1.diff(), self.hf.config.num_experts_per_tok
            self.expert_balance_N = expert_balance(router_logits, lengths_N, top_k)[: stream.sequences]
        hidden_tD = output.last_hidden_state[0]
        if self.values is not None and hidden_tD.requires_grad:  # blocks may be computed again in the backward
            hidden_tD.register_hook(lambda _: lora.use(self.hf, second))
        return hidden_tD

    def watch_experts(self, flag: str) -> None:
        """Raises `ValueError` naming `flag` for a model without experts."""
        if self.hf.config.model_type not in EXPERTS:
            raise ValueError(f"{flag}: {self.hf.config.model_type} is no mixture of experts")
        if unit_size() > 1:
            raise ValueError(f"{flag} looks at whole sequences, of which each of --context_ranks has a part")
        self.hf.config.output_router_logits = True


class Policy(PackedModel):
    """A causal language model."""

    def forward(
        self, mb: PackedBatch, temperature: float = 1.0, teacher: Teacher = None, divergence: Divergence = None, top_k=0
    ) -> tuple[Tensor, ...]:
        """`(logprobs_T, entropy_T, correct_T, collision_T)` of the targets: see `token_logprobs`. Beside what a
        `teacher` makes of the pack, a `Comparison` of the two (see `compare`)."""
        # The head is a parameter of the FSDP root: it is whole here, inside the root's forward, and only here.
        logits, targets_t = logits_of(self.hf, self.hidden_states(mb.computed)), mb.computed.targets_T
        if teacher is not None:
            return Comparison(*own(compare(logits, teacher, targets_t, temperature, divergence, top_k), mb.shared))
        hidden_tD, head_VD, *rest = logits
        return own(token_logprobs(hidden_tD, head_VD, targets_t, temperature, *rest), mb.shared)

    def teach(self, mb: PackedBatch) -> Logits:
        """What a student's forward takes as its teacher. It holds a head of its own: use it, and let it go."""
        with torch.no_grad():
            return logits_of(self.hf, self.hidden_states(mb.computed)).kept()


class ScalarModel(PackedModel):
    """One number per token, the form of Hugging Face's sequence classifiers with one label: a reward model or a value
    model."""

    def forward(self, mb: PackedBatch) -> Tensor:
        """Scalars [T], float32. Like every stream they are aligned with targets: `x_T[t]` has seen the inputs up to t,
        not `targets_T[t]`."""
        return scalars(self.hidden_states(mb.computed), self.hf.score, mb)


def scalars(hidden_tD: Tensor, head: nn.Linear, mb: PackedBatch) -> Tensor:
    """What a scalar head makes of computed hidden states, on this rank's own tokens: [T], float32."""
    return own((hidden_tD.float() @ head.weight[0].float(),), mb.shared)[0]


# ---- loading ----


def compute_dtype(args: BaseArgs, device: torch.device) -> torch.dtype:
    """`--dtype`, with auto resolved: bfloat16 on CUDA, float32 elsewhere."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, auto if args.dtype == "auto" else args.dtype)


def master_dtype(args: BaseArgs, device: torch.device, trainable: bool) -> torch.dtype:
    """Of the sharded weights: float32 where steps add up, else, so under adapters, what is computed with: the same
    numbers in fewer bytes, a scalar head's too, since FSDP hands every weight to its forward in the compute dtype."""
    return torch.float32 if trainable and not lora.has_adapters(args) else compute_dtype(args, device)


def load_reference(policy: Policy, args: BaseArgs, device: torch.device, path: str | None = None) -> nn.Module:
    """The frozen model of `--reference_model` in `path`; without it, the one that the policy starts from. Beside
    adapters that is the policy itself, with its adapters as they are now: call it before a checkpoint is loaded."""
    if path is None and lora.has_adapters(args):
        return lora.StartingModel(policy)
    flag = "--reference_model" if path else "--model"
    return load_policy(path or policy.path, args, device, trainable=False, flag=flag)


def load_policy(
    path: str, args: BaseArgs, device: torch.device, trainable=True, flag="--model", values: nn.Module | None = None
) -> Policy:
    """Causal LM of a local checkpoint folder as FSDP2 shards: float32 masters, `--dtype` compute, float32 reduction.
    With `--lora_rank` its adapters alone are trained (lora.py); `values` join them (value.py).

    Built on meta, sharded, then each rank reads only its slices. `trainable=False` gives a frozen reference, kept in
    the compute dtype. Dropout is off: the log-probs of a sample must not depend on when they are computed. `flag` is
    what errors name. Raises `ValueError` for a model this forward would not compute exactly, or that does not fit.
    """
    from transformers import AutoModelForCausalLM

    what = f"{flag} {path}"
    config = _packable_config(path, what)
    hf = _on_meta(AutoModelForCausalLM, config, what, master_dtype(args, device, trainable))
    return _load(Policy(hf, path), what, args, device, trainable, values)


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
    hf = _on_meta(AutoModelForSequenceClassification, config, what, master_dtype(args, device, trainable))
    if not isinstance(getattr(hf, "score", None), nn.Linear):
        raise ValueError(f"{what}: {type(hf).__name__} has no linear head `score`, which is not supported")
    return _load(ScalarModel(hf, path), what, args, device, trainable)


def _packable_config(path: str, what: str):
    """Return the model's configuration without dropout. Raises `ValueError` if rotary embeddings mix sequences."""
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


def _on_meta(auto_class, config, what: str, dtype: torch.dtype) -> nn.Module:
    """The model without memory; its weights are of `dtype`, its buffers float32."""
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
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(dtype)
    return hf


def on_host(args: BaseArgs) -> bool:  # frozen weights too, if the script trains
    return isinstance(args, TrainArgs) and args.offload == "all"


def _load(
    model: PackedModel, what: str, args: BaseArgs, device: torch.device, trainable: bool, values=None
) -> PackedModel:
    hf = model.hf.requires_grad_(trainable)
    if trainable and recomputes(args, device):
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    model.train()  # for activation checkpointing; without dropout it changes nothing else
    if not isinstance(blocks := getattr(hf.base_model, "layers", None), nn.ModuleList):
        raise ValueError(f"{what}: {hf.config.model_type} does not keep its transformer blocks in `layers`")
    if (R := args.context_ranks) > 1 and (heads := hf.config.get_text_config().num_attention_heads) % R:
        raise ValueError(f"{what}: --context_ranks {R} does not divide its {heads} attention heads")
    setup(R, args.nccl_timeout)
    stored = lora.add_adapters(hf, args, what) if trainable and lora.has_adapters(args) else {}
    if values is not None:
        values.join(model)
    shard(model, blocks, args, device, reshard_root=not trainable)
    if isinstance(model, Policy):
        register_forward(model, "teach")
    model.compute_dtype, model.device = compute_dtype(args, device), device
    require_room(model, what, args)
    home = torch.device("cpu") if on_host(args) else device
    new_head = load_weights(hf, model.path, what, home)
    for module in hf.modules():  # only what FSDP gathers may be elsewhere
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    if new_head is not None:
        if not trainable:
            raise ValueError(f"{what}: a language model without a reward head")
        draw_head(new_head, args.seed)
    if values is not None:
        values.leave(args.seed, home)
    if trainable and lora.has_adapters(args):
        lora.fill_adapters(hf, stored, args.seed)
    check_packing(model, what, args, device)
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
    packs = [pack_groups([samples], 100, device)[0] for samples in ([first, second], [other, second], [second])]
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
    `--offload all` has FSDP keep shards and their gradients on the host and bring over what it gathers.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype(args, device), reduce_dtype=torch.float32)
    mesh, model.copies = shard_mesh(args, device)
    home = CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host(args) else OffloadPolicy()
    for block in blocks:
        if args.compile:
            for experts in (module for name, module in block.named_modules() if name.endswith("experts")):
                # Sizes are what the router says: in float32 inductor fails at them, at each anew (torch 2.13).
                experts.forward = torch.compiler.disable(experts.forward)
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=home)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=home, reshard_after_forward=reshard_root)
