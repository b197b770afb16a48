"""Policies, reward models and value models: transformers that take packs, and how they are loaded as FSDP2 shards.

Shapes: T packed tokens of this rank, t tokens that it computes, D hidden size, N sequences.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from common.config.groups import BaseArgs, SamplingArgs, TrainArgs
from common.config.training import PrefixArgs
from common.data.packing import PackedBatch, prefixes_are_shared, set_shortest_prefix
from common.model import lora
from common.model.attention import packed_inputs
from common.model.comparison import Comparison, TopK, compare
from common.model.flops import forward_flops, matrix_weights
from common.model.head import Logits, logits_of
from common.model.loading import EXPERTS, draw_head, load_weights
from common.model.logprobs import TokenStats, token_logprobs
from common.model.memory import may_recompute, require_memory
from common.model.packable import build_on_meta, check_packing, keeps_shared_prefixes, packable_config
from common.objectives.divergence import Divergence
from common.objectives.policy import expert_balance
from common.parallel.context import context_group_size, setup_context_groups
from common.parallel.mesh import shard_mesh
from common.parallel.placement import Tokens, scatter_back

# ---- models that take packs ----


class PackedModel(nn.Module):
    """Transformer that takes a PackedBatch. `hf` is the Hugging Face model with its own names; `flops` counts the
    operations of its forwards and backwards, `whole_flops` those that they would take without shared prefixes;
    `expert_balance_N` is that of the last computed sequences, if watched. `watch` gets the outputs that have a graph,
    for the trace."""

    watch: Callable[[PackedBatch, TokenStats | Comparison | Tensor], None] | None = None
    value_head: tuple[nn.Linear, ...] = ()  # of a value model on this model's layers (value.py); no submodule

    def __init__(self, hf: nn.Module, path: str):
        super().__init__()
        self.hf, self.path = hf, path
        self.matrix_weights, self.flops, self.whole_flops = matrix_weights(hf), 0.0, 0.0

    def hidden_states(self, mb: PackedBatch, second_adapters: bool = False) -> Tensor:
        """Return the last hidden states [t, D], with the value model's adapters if `second_adapters`."""
        if self.value_head:
            lora.use(self.hf, second_adapters)
        tokens = mb.computed
        self.flops += self._flops(tokens)
        self.whole_flops += self._flops(mb)
        output = self.hf.base_model(**packed_inputs(tokens))
        if router_logits := getattr(output, "router_logits", None):
            lengths_N, top_k = tokens.cu_seqlens_N1.diff(), self.hf.config.num_experts_per_tok
            self.expert_balance_N = expert_balance(router_logits, lengths_N, top_k)[: tokens.sequences]
        hidden_tD = output.last_hidden_state[0]
        if self.value_head and hidden_tD.requires_grad:  # the backward may compute blocks again
            hidden_tD.register_hook(lambda _: lora.use(self.hf, second_adapters))
        return hidden_tD

    def _watched(self, mb: PackedBatch, output: TokenStats | Comparison | Tensor) -> TokenStats | Comparison | Tensor:
        if self.watch is not None and torch.is_grad_enabled():
            self.watch(mb, output)
        return output

    def _flops(self, tokens: Tokens) -> float:
        """Return the operations of a forward and, if it keeps a graph, of its backward."""
        flops = forward_flops(self.hf.config, self.matrix_weights, tokens)
        if not torch.is_grad_enabled():
            return flops
        frozen = not self.hf.get_input_embeddings().weight.requires_grad  # under adapters, which are not counted
        return 3 * flops - (2 * self.matrix_weights * len(tokens.targets_T) if frozen else 0)

    def watch_experts(self, flag: str) -> None:
        """Keep `expert_balance_N` from now on. Raises `ValueError` naming `flag` for a model without experts."""
        if self.hf.config.model_type not in EXPERTS:
            raise ValueError(f"{flag}: {self.hf.config.model_type} is no mixture of experts")
        if context_group_size() > 1:
            raise ValueError(f"{flag} needs whole sequences on each rank; drop --context_ranks")
        if prefixes_are_shared():
            raise ValueError(f"{flag} counts how every token is routed; needs --share_prefix 0")
        self.hf.config.output_router_logits = True


class Policy(PackedModel):
    """Causal language model. Its head is a parameter of the FSDP root, and therefore whole within the forward methods:
    `forward`, `distill`, `teach` and `values`."""

    def forward(self, mb: PackedBatch, temperature: float = 1.0) -> TokenStats:
        """Return log-probs and further statistics of the targets."""
        tokens = mb.computed
        stats = token_logprobs(self._logits(mb), tokens.targets_T, temperature, self.compiled)
        return self._watched(mb, TokenStats(*scatter_back(stats, tokens)))

    def distill(
        self, mb: PackedBatch, teacher: Logits | TopK, divergence: Divergence | None = None, top_k: int = 0,
        temperature: float = 1.0,
    ) -> Comparison:  # fmt: skip
        """Return statistics of this student and its `teacher`, the result of the teacher's `teach`: see `compare`."""
        tokens = mb.computed
        comparison = compare(self._logits(mb), teacher, tokens.targets_T, temperature, divergence, top_k)
        return self._watched(mb, Comparison(*scatter_back(comparison, tokens)))

    @torch.no_grad()
    def teach(self, mb: PackedBatch) -> Logits:
        """Return the logits for a student's `distill`, with a copy of the head: FSDP frees its own. Keep it for one
        micro-batch only."""
        logits = self._logits(mb)
        bias_V = None if logits.bias_V is None else logits.bias_V.clone()
        return logits._replace(head_VD=logits.head_VD.clone(), bias_V=bias_V)

    def values(self, mb: PackedBatch) -> Tensor:
        """Return scalars [T], float32, of the value model that shares this policy's layers (value.py)."""
        return self._watched(mb, scalars(self.hidden_states(mb, second_adapters=True), self.value_head[0], mb))

    def _logits(self, mb: PackedBatch) -> Logits:
        return logits_of(self.hf, self.hidden_states(mb))


class ScalarModel(PackedModel):
    """Model with one number per token, in the form of Hugging Face's sequence classifiers with one label: a reward
    model or a value model."""

    def forward(self, mb: PackedBatch) -> Tensor:
        """Return scalars [T], float32. Like every stream they are aligned with targets: `x_T[t]` depends on the inputs
        up to t, not on `targets_T[t]`."""
        return self._watched(mb, scalars(self.hidden_states(mb), self.hf.score, mb))


def scalars(hidden_tD: Tensor, head: nn.Linear, mb: PackedBatch) -> Tensor:
    """Apply a scalar head to computed hidden states, and return its numbers of this rank's own tokens: [T], float32."""
    return scatter_back((hidden_tD.float() @ head.weight[0].float(),), mb.computed)[0]


# ---- loading ----


def compute_dtype(args: BaseArgs, device: torch.device) -> torch.dtype:
    """Return `--dtype`, where auto is bfloat16 on CUDA and float32 elsewhere."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, auto if args.dtype == "auto" else args.dtype)


def master_dtype(args: BaseArgs, device: torch.device, trainable: bool) -> torch.dtype:
    """Return the dtype of the shards: float32 for weights that are trained. Frozen weights, also under adapters, have
    the compute dtype: FSDP casts to it before every forward, so that the numbers are the same in fewer bytes."""
    return torch.float32 if trainable and not lora.has_adapters(args) else compute_dtype(args, device)


def load_reference(policy: Policy, args: BaseArgs, device: torch.device, path: str | None = None) -> nn.Module:
    """Load the frozen model of `--reference_model` from `path`, by default the model that the policy starts from. With
    adapters the default is the policy with its present adapters: call before a checkpoint is loaded."""
    if path is None and lora.has_adapters(args):
        return lora.StartingModel(policy)
    flag = "--reference_model" if path else "--model"
    return load_policy(path or policy.path, args, device, trainable=False, flag=flag)


def load_policy(
    path: str, args: BaseArgs, device: torch.device, trainable=True, flag="--model", values: nn.Module | None = None
) -> Policy:
    """Load the causal language model of a local folder as FSDP2 shards: float32 masters, `--dtype` compute, float32
    reduction. With `--lora_rank` only adapters are trained (lora.py), and a value model may share them (value.py).

    The model is built on meta and sharded; then each rank reads its slices. `trainable=False` gives a frozen reference
    in the compute dtype. Dropout is off: the log-probs of a sample must not depend on when they are computed. On
    device meta the model is neither sharded nor filled. `flag` stands in errors. Raises `ValueError` for a model that
    would not be computed exactly, or that does not fit.
    """
    from transformers import AutoModelForCausalLM

    label = f"{flag} {path}"
    config = packable_config(path, label)
    hf = build_on_meta(AutoModelForCausalLM, config, label, master_dtype(args, device, trainable))
    return _load(Policy(hf, path), label, args, device, trainable, values)


def load_scalar_model(
    path: str, args: BaseArgs, device: torch.device, trainable: bool = True, flag: str = "--model"
) -> ScalarModel:
    """Load a model with a scalar head, like `load_policy`. If the checkpoint has no such head, one is drawn from
    N(0, 1 / (D + 1)) by `--seed`, as in arXiv:2009.01325. Frozen models need their own.

    Raises `ValueError` also for a classifier with more than one label.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

    label = f"{flag} {path}"
    config = packable_config(path, label)
    config.num_labels = 1
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(f"{label}: transformers has no sequence classifier of {config.model_type}")
    hf = build_on_meta(AutoModelForSequenceClassification, config, label, master_dtype(args, device, trainable))
    if not isinstance(getattr(hf, "score", None), nn.Linear):
        raise ValueError(f"{label}: {type(hf).__name__} has no linear head `score`, which is not supported")
    return _load(ScalarModel(hf, path), label, args, device, trainable)


def _load(
    model: PackedModel, label: str, args: BaseArgs, device: torch.device, trainable: bool, values=None
) -> PackedModel:
    hf = model.hf.requires_grad_(trainable)
    if trainable and may_recompute(args, device):
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    model.train()  # for activation checkpointing; without dropout it changes nothing else
    if not isinstance(blocks := getattr(hf.base_model, "layers", None), nn.ModuleList):
        raise ValueError(f"{label}: {hf.config.model_type} does not keep its transformer blocks in `layers`")
    if (R := args.context_ranks) > 1 and (heads := hf.config.get_text_config().num_attention_heads) % R:
        raise ValueError(f"--context_ranks {R}: does not divide the {heads} attention heads of {label}")
    adapted = trainable and lora.has_adapters(args)
    stored = lora.add_adapters(hf, args, label) if adapted else {}
    if values is not None:
        values.attach(model)
    if device.type == "meta":  # for its shapes
        return model
    _set_threads(model, args, device)
    if isinstance(args, SamplingArgs) and args.batch_invariant:
        # vLLM sets both when it starts, too late: cuBLAS reads them at the first matrix product.
        os.environ |= dict(CUBLAS_WORKSPACE_CONFIG=":16:8", CUBLASLT_WORKSPACE_SIZE="1")
    setup_context_groups(R, args.nccl_timeout)
    shard(model, blocks, args, device, not trainable)
    require_memory(model, label, args)
    home = torch.device("cpu") if offloads_all(args) else device
    new_head = load_weights(hf, model.path, label, home)
    for module in hf.modules():  # only parameters may stay on the host: FSDP gathers them on the device
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    if new_head is not None:
        if not trainable:
            raise ValueError(f"{label}: a language model without a reward head")
        draw_head(new_head, args.seed)
    if values is not None:
        values.detach(args.seed, home)
    if adapted:
        lora.fill_adapters(hf, stored, args.seed)
    check_packing(model, label)
    if isinstance(args, PrefixArgs) and args.share_prefix:
        set_shortest_prefix(args.share_prefix, allowed=keeps_shared_prefixes(model, label))
    return model


def _set_threads(model: PackedModel, args: BaseArgs, device: torch.device) -> None:
    """Choose the threads of this process, unless OMP_NUM_THREADS says more than torchrun's default of 1."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ and model.matrix_weights < 1e7:
        torch.set_num_threads(1)  # in so small a model threads wait for each other longer than they compute
    if device.type == "cuda" and offloads_all(args) and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores, ranks = len(os.sched_getaffinity(0)), int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(max(1, cores // ranks))  # the optimizer steps on the host


def offloads_all(args: BaseArgs) -> bool:
    """Return whether weights live on the host: frozen ones too, in scripts that train."""
    return isinstance(args, TrainArgs) and args.offload == "all"


def shard(model: PackedModel, blocks: nn.ModuleList, args: BaseArgs, device: torch.device, reshard_root: bool) -> None:
    """Apply `fully_shard` to every transformer block and to the rest, as the root. With `--compile` compile the blocks
    and the log-probs.

    The root stays whole from forward to backward, which needs it next; `reshard_root` frees it if there is no backward.
    With `--offload all` FSDP keeps shards and their gradients on the host, and gathers weights on the device.
    """
    from torch.distributed import fsdp

    model.device, model.compute_dtype, model.compiled = device, compute_dtype(args, device), args.compile
    precision = fsdp.MixedPrecisionPolicy(param_dtype=model.compute_dtype, reduce_dtype=torch.float32)
    mesh, model.copies = shard_mesh(device, args.shard_ranks, args.nccl_timeout)
    home = fsdp.CPUOffloadPolicy(pin_memory=device.type == "cuda") if offloads_all(args) else fsdp.OffloadPolicy()
    if args.compile:  # a block has variants: with a graph or not, with shared prefixes or not, of fixed or any sizes
        torch._dynamo.config.recompile_limit = 32
    for block in blocks:
        if args.compile:
            for experts in (module for name, module in block.named_modules() if name.endswith("experts")):
                # The router decides their sizes, and inductor fails to compile them in float32 (torch 2.13).
                experts.forward = torch.compiler.disable(experts.forward)
            block.compile()
        fsdp.fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=home)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=home, reshard_after_forward=reshard_root)
    if isinstance(model, Policy):
        for method in ("distill", "teach", "values"):
            fsdp.register_fsdp_forward_method(model, method)
