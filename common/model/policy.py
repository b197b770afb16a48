"""Policies, reward models and value models: transformers that run packs, and how scripts load them
as FSDP2 shards (`load_policy` and its relatives).

Shapes: T packed tokens, t computed ones (fewer if prefixes are shared), D hidden size."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from common.config.extra import extra
from common.config.groups import NO_IMAGES, BaseArgs, ImageArgs, ModelArgs
from common.model.attention import packed_inputs
from common.model.flops import forward_flops, matrix_weights, num_delta_nets
from common.model.loading import (
    base_dtype,
    fill,
    model_on_meta,
    named_errors,
    read_weights,
    towers_of,
)
from common.model.logprobs import Logits, TokenStats, token_logprobs
from common.model.packing_check import check_packing, require_context_ranks
from common.packs.packing import PackedBatch
from common.parallel import distributed

Output = TypeVar("Output", bound=tuple[Tensor | None, ...] | Tensor)  # statistics of each token


class PackedModel(nn.Module):
    """Base class of a transformer that runs a `PackedBatch`. `hf` is the Hugging Face model, with
    its own names. `flops` counts the operations of all forwards and backwards."""

    image_args: ImageArgs = NO_IMAGES
    share_prefix = 0  # the value of `--share_prefix` for this model; 0 if it cannot share
    needs_whole_sequences = False
    # The trace (extras/trace) sets it, to see the outputs of training and their gradients' scale.
    watch: Callable[[PackedBatch, Any, float], None] | None = None
    forward_methods: tuple[str, ...] = ()  # for these, too, FSDP gathers the root
    loss_scale: Tensor | None  # float16 sets it (common/train/optim.py)
    is_averaged = True  # whether the last gradient was averaged over the copies of the model
    distils = False  # whether the loss compares every token with a teacher's distribution

    def __init__(self, hf: nn.Module, path: str):
        super().__init__()
        self.hf = hf
        self.images = None  # `--vision` sets it (extras/images/tower.py)
        self.path = path
        self.matrix_weights = matrix_weights(hf)
        self.register_buffer("loss_scale", None)
        self.flops = 0.0
        # `shard` sets these three.
        self.device: torch.device
        self.compute_dtype: torch.dtype
        self.compiled: bool

    def hidden_states(self, mb: PackedBatch) -> Tensor:
        """Return the last hidden states [t, D]."""
        if self.needs_whole_sequences and mb.compact is not None:  # packed for another model
            raise ValueError(f"{self.path} needs whole sequences; set --share_prefix 0")
        tokens = mb.model_tokens
        flops = forward_flops(self.hf.config, self.matrix_weights, tokens)
        if torch.is_grad_enabled():  # a backward costs two forwards, one if matrices are frozen
            flops = 3 * flops
            if not self.hf.get_input_embeddings().weight.requires_grad:
                flops -= 2 * self.matrix_weights * len(tokens.targets_T)
            if hasattr(self, "set_requires_all_reduce"):  # FSDP2 shards it
                # Hybrid sharding averages gradients over the copies at the last micro-batch of a
                # minibatch. With a tower, at each: there may be no image in the last one.
                self.is_averaged = mb.is_last or self.images is not None
                self.set_requires_all_reduce(self.is_averaged)
        self.flops += flops
        inputs = packed_inputs(tokens) if self.images is None else self.images.inputs(tokens)
        return self.hf.get_decoder()(**inputs).last_hidden_state[0]

    def _output(self, mb: PackedBatch, output: Output) -> Output:
        """Return the output of a forward, with its gradient multiplied by `loss_scale`."""
        scale = None if self.loss_scale is None else self.loss_scale[0]
        if self.watch is not None and torch.is_grad_enabled():
            self.watch(mb, output, 1.0 if scale is None else float(scale))
        if scale is not None:  # a tensor: reading its value would wait for the GPU
            for x in (output,) if isinstance(output, Tensor) else output:
                if x is not None and x.requires_grad:
                    x.register_hook(lambda grad: None if grad is None else grad * scale)
        return output


class Policy(PackedModel):
    """Causal language model. `forward` can use the head's weight directly: it belongs to the FSDP
    root, which is whole during a forward."""

    def forward(self, mb: PackedBatch, temperature: float = 1.0) -> TokenStats:
        """Return log-probs and further statistics of the targets."""
        tokens = mb.model_tokens
        stats = token_logprobs(
            self._logits(mb), tokens.targets_T, temperature, self.compiled, tokens.support_T
        )
        return self._output(mb, TokenStats(*mb.expand(stats)))

    def _logits(self, mb: PackedBatch) -> Logits:
        head = self.hf.get_output_embeddings()
        config = self.hf.config.get_text_config()
        # In the configs of Cohere, Granite and Gemma 2. `check_packing` refuses models that do
        # something else with their logits.
        multiplier = getattr(config, "logit_scale", None) or 1.0
        divisor = getattr(config, "logits_scaling", None) or 1.0
        softcap = getattr(config, "final_logit_softcapping", None)
        hidden_tD = self.hidden_states(mb)
        return Logits(hidden_tD, head.weight, head.bias, multiplier / divisor, softcap)


class ScalarModel(PackedModel):
    """Reward model or value model: it returns one number for each token. In Hugging Face's terms it
    is a sequence classifier with one label."""

    def forward(self, mb: PackedBatch) -> Tensor:
        """Return scalars [T], float32. They are aligned with targets, like every stream: `x_T[t]`
        depends on the tokens before `targets_T[t]`, and not on that token itself."""
        scalars_t = self.hidden_states(mb).float() @ self.hf.score.weight[0].float()
        return self._output(mb, mb.expand([scalars_t])[0])


# ---- loading ----


def compute_dtype(args: ModelArgs, device: torch.device) -> torch.dtype:
    """Return the dtype of forwards and backwards: `--dtype`, where auto depends on the device."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, auto if args.dtype == "auto" else args.dtype)


def load_policy(
    path: str, args: BaseArgs, device: torch.device, trainable: bool = True, flag: str = "--model",
    kind: type[PackedModel] = Policy, moves: bool = False, image_args: ImageArgs = NO_IMAGES,
) -> Any:  # fmt: skip
    """Load the causal language model in a local folder as FSDP2 shards: master weights and gradient
    reduction in float32, compute in `--dtype`, no dropout. With `--lora_rank` only adapters are
    trained (lora.py). With `--vision` in `image_args` the model reads images.

    `trainable=False` gives a frozen reference in the compute dtype, or in float32 if `moves`: then
    `move_towards` may change it. On device meta the model is neither sharded nor filled. `flag` is
    named in errors; `kind` is the class of the result. Raises `ValueError` if the model cannot run
    packs exactly. Collective."""
    with named_errors(f"{flag} {path}", ValueError):
        model, files = build_on_meta(path, args, device, trainable, flag, kind, moves, image_args)
        if device.type != "meta":
            shard_and_fill(model, files, args, device, trainable)
            check_packs(model, args)
        return model


class WeightFiles(NamedTuple):
    """How to fill the weights of a model on meta from the files of its folder."""

    rules: list
    """transformers' rules that turn names in files into names of the model"""
    change: Callable[[dict], dict] = dict
    """quantizes weights as they are read (`--quantize`)"""
    adapter: dict[str, Tensor] | None = None
    """weights of `--adapter`; {} for a new adapter; None without adapters"""


def build_on_meta(
    path: str, args: BaseArgs, device: torch.device, trainable: bool, flag: str,
    kind: type[PackedModel], moves: bool, image_args: ImageArgs,
) -> tuple[PackedModel, WeightFiles]:  # fmt: skip
    """Build the model on meta: which weights are trained, in which dtype, what is recomputed."""
    # Weights that change are float32. Frozen ones, also those under adapters, have the compute
    # dtype: otherwise FSDP would cast them before every forward.
    changes = (trainable or moves) and not args.lora_rank
    dtype = torch.float32 if changes else compute_dtype(args, device)
    hf, rules = model_on_meta(path, dtype, kind is ScalarModel)
    model = kind(hf, path)
    if image_args.vision is not None:
        with extra("images", f"--vision {image_args.vision}"):
            from extras.images.tower import Images
        model.image_args = image_args
        model.images = Images(hf, path, image_args, trainable)
    hf.requires_grad_(trainable)
    for tower in towers_of(hf):
        tower.requires_grad_(trainable and image_args.vision == "train")
        if model.images is None:  # the tower is only exported
            tower.to(base_dtype(path))
    recomputed = args.activation_checkpointing if trainable else False
    if recomputed is None:  # on CUDA, until `keep_activations_that_fit` (extras/plan) keeps some
        recomputed = device.type == "cuda"
    if recomputed:
        hf.get_decoder().gradient_checkpointing_enable(dict(use_reentrant=False))
    model.train()  # activation checkpointing needs it, and there is no dropout
    if args.context_ranks > 1:
        require_context_ranks(hf.config.get_text_config(), args.context_ranks)
    if not (trainable and args.lora_rank):
        return model, WeightFiles(rules)
    from common.model.lora import add_adapters, read_adapter

    add_adapters(hf, args)
    # The adapter belongs to --model; a value model beside it starts with a new one.
    adapter = read_adapter(hf, args.adapter) if args.adapter and flag == "--model" else {}
    if args.quantize is None:
        return model, WeightFiles(rules, adapter=adapter)
    with extra("quantized", f"--quantize {args.quantize}"):
        from extras.quantized.nf4 import pack_layers
    return model, WeightFiles(rules, pack_layers(hf, device), adapter)


def shard_and_fill(
    model: PackedModel, files: WeightFiles, args: BaseArgs, device: torch.device, trainable: bool
) -> None:
    """Shard a model on meta, and read this rank's slices of the files. Collective."""
    hf = model.hf
    _set_threads(model, args, device)
    if args.context_ranks > 1:
        from common.parallel.context import setup_context_groups

        setup_context_groups(args.context_ranks)
    # In a run without images the towers are units that are never gathered. If they read images they
    # belong to the root: a rank without images would not join the others to gather them.
    units = [*hf.get_decoder().layers, *(towers_of(hf) if model.images is None else ())]
    shard(model, units, args, device, reshard_root=not trainable)
    # Only parameters may stay on the host: FSDP gathers them on the device.
    home = torch.device("cpu") if args.offload == "all" else device
    lacks_head = read_weights(hf, model.path, files.rules, home, device, files.change)
    if lacks_head:
        if not trainable:
            raise ValueError("a language model without a reward head")
        head, generator = hf.score.weight, torch.Generator().manual_seed(args.seed)
        fill(head, torch.randn(head.shape, generator=generator) / (head.shape[1] + 1) ** 0.5)
    if files.adapter is not None:
        from common.model.lora import fill_adapters

        fill_adapters(hf, files.adapter, args.seed)
    if model.compiled and trainable:
        distributed.say("--compile: the first steps take longer, until all blocks are compiled")


def check_packs(model: PackedModel, args: BaseArgs) -> None:
    """Raise `ValueError` if the model cannot run packs exactly, and decide whether its packs share
    prefixes. Collective."""
    check_packing(model)
    config = model.hf.config
    # After a prefix, a gated delta net has a state. Only the keys of attention are shared.
    model.needs_whole_sequences = num_delta_nets(config.get_text_config()) > 0
    model.share_prefix = 0 if model.needs_whole_sequences else args.share_prefix
    if model.share_prefix != args.share_prefix:
        distributed.say(f"{config.model_type} cannot share prefixes: --share_prefix 0 is used")


def load_scalar_model(
    path: str, args: BaseArgs, device: torch.device, trainable: bool = True, flag: str = "--model"
) -> ScalarModel:
    """Load a model with a scalar head, like `load_policy`. If the folder has no such head, draw one
    from N(0, 1 / (D + 1)) by `--seed` (arXiv:2009.01325). A frozen model must have a head."""
    return load_policy(path, args, device, trainable, flag, kind=ScalarModel)


def load_reference(
    policy: Policy, args: BaseArgs, device: torch.device, path: str | None = None,
    kind: type[Policy] = Policy, moves: bool = False,
) -> nn.Module:  # fmt: skip
    """Load the frozen reference from `path` (`--reference_model`), by default the model that the
    policy starts from. With adapters it copies these: call it before loading a checkpoint."""
    if path is not None:
        return load_policy(
            path, args, device, False, "--reference_model", image_args=policy.image_args
        )
    if args.lora_rank:
        from common.model.lora import StartingModel

        return StartingModel(policy)
    return load_policy(
        policy.path, args, device, False, kind=kind, moves=moves, image_args=policy.image_args
    )


@torch.no_grad()
def move_towards(frozen: nn.Module, policy: nn.Module, rate: float) -> None:
    """Move `frozen` towards the trained weights of `policy`: frozen <- (1 - rate) frozen + rate
    policy. Keep it in float32: a small rate is rounded away in bfloat16."""
    averages = dict(frozen.named_parameters())
    for name, weight in policy.named_parameters():
        if weight.requires_grad:
            averages[name].lerp_(weight.to(averages[name].dtype), rate)


def _set_threads(model: PackedModel, args: BaseArgs, device: torch.device) -> None:
    """Choose the number of threads, unless OMP_NUM_THREADS does (torchrun sets 1 by default)."""
    given = os.environ.get("OMP_NUM_THREADS")
    if device.type == "cpu" and given is None and model.matrix_weights < 1e7:
        # In a model this small, threads spend more time waiting for each other than computing.
        torch.set_num_threads(1)
    if device.type == "cuda" and args.offload == "all" and given in (None, "1"):
        cores = len(os.sched_getaffinity(0))  # the optimizer step is on the host
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))


def shard(
    model: PackedModel, units: Sequence[nn.Module], args: BaseArgs, device: torch.device,
    reshard_root: bool,
) -> None:  # fmt: skip
    """Apply `fully_shard` to every unit, such as a transformer block, and to the rest, the root.

    The root stays whole after a forward, because the backward needs it next. `reshard_root` frees
    it if there is no backward. With `--offload all` FSDP keeps shards and gradients on the host."""
    from torch.distributed import fsdp

    model.device = device
    model.compute_dtype = compute_dtype(args, device)
    model.compiled = device.type == "cuda" if args.compile is None else args.compile
    options: dict = dict(
        mesh=distributed.shard_mesh(device, args.shard_ranks),
        mp_policy=fsdp.MixedPrecisionPolicy(model.compute_dtype, reduce_dtype=torch.float32),
    )
    if args.offload == "all":
        options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=device.type == "cuda")
    if model.compiled:
        _compile(model.hf.get_decoder().layers)
    for unit in units:
        fsdp.fully_shard(unit, **options)
    fsdp.fully_shard(model, reshard_after_forward=reshard_root, **options)
    for method in model.forward_methods:
        fsdp.register_fsdp_forward_method(model, method)


def _compile(blocks: Iterable[nn.Module]) -> None:
    # Blocks are compiled many times: with and without gradients, shared prefixes, in many sizes.
    torch._dynamo.config.recompile_limit = 32
    for block in blocks:
        # The router decides how many tokens each expert gets. Inductor fails to compile that in
        # float32 (torch 2.13).
        for name, module in block.named_modules():
            if name.endswith("experts"):
                module.forward = torch.compiler.disable(module.forward)
        block.compile(options=dict(emulate_precision_casts=True))  # rounds as eager code does
