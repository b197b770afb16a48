"""Models without an exact packed forward are refused, before or after they are loaded."""

import torch
from torch import Tensor, nn

from common.config.extra import extra
from common.data.packing import pack_groups
from common.data.sample import Sample
from common.model.attention import packed_attention, packed_inputs
from common.model.flops import num_delta_nets
from common.model.loading import (
    has_images,
    load_config,
    method_of_quantization,
    model_class,
    named_errors,
)
from common.model.logprobs import TokenStats


def model_on_meta(path: str, dtype: torch.dtype, scalar: bool) -> tuple[nn.Module, list]:
    """Return the model of a folder, whole, or its sequence classifier with one label, a `scalar`
    head, without dropout and in no memory: weights of `dtype`, float32 buffers. Also return
    transformers' rules from the names in files to those of the model."""
    from transformers import AttentionInterface, AutoModelForSequenceClassification
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.utils import logging

    logging.disable_progress_bar()
    AttentionInterface.register("packed", packed_attention)
    config = load_config(path)
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}  # of the model, or of each type of layer
    for fields in (rope, *rope.values()):
        kind = fields.get("rope_type") if isinstance(fields, dict) else None
        if kind in ("dynamic", "longrope"):
            raise ValueError(f"{kind} rotary embeddings mix packed sequences")
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for name in vars(part) if part is not None else ():
            if name.endswith(("dropout", "pdrop", "jitter_noise")):
                setattr(part, name, 0.0)
    text.output_router_logits = False  # nobody reads them
    if method_of_quantization(config) is not None:
        del config.quantization_config  # weights in MXFP4 are read as floats
    auto_class, kind = model_class(config), "language model"
    if scalar:
        auto_class, kind = AutoModelForSequenceClassification, "sequence classifier"
        config.num_labels = 1
    attention: str | dict[str, str] = "packed"
    if has_images(config):
        attention = dict.fromkeys(config.sub_configs, "sdpa") | dict(text_config="packed")
    options = dict(attn_implementation=attention, dtype=torch.float32, trust_remote_code=False)
    # GPT-J, for example, has an attention table of its own.
    with named_errors(f"transformers has no {kind} of {config.model_type} with packed attention"):
        with torch.device("meta"):
            hf = auto_class.from_config(config, **options)
        assert not scalar or isinstance(hf.score, nn.Linear), "the head is not linear"
        if num_delta_nets(text):
            with extra("architectures", config.model_type):
                from extras.architectures.delta_net import keep_sequences_apart
            keep_sequences_apart(hf)
    if not isinstance(getattr(hf.get_decoder(), "layers", None), nn.ModuleList):
        raise ValueError(f"{config.model_type} does not keep its blocks in `layers`")
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(dtype)
    return hf, get_model_conversion_mapping(hf)  # before shards change the names of classes


def require_context_ranks(hf: nn.Module, context_ranks: int) -> None:
    """Raise `ValueError` for a model whose layers a context group cannot divide."""
    config = hf.config.get_text_config()
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
    whose log-probs differ from those of its own logits. Collective.

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
    with named_errors(f"{model_type} has no packed forward"):
        x_T, y_T = (numbers_of(model(mb))[-second.num_targets :] for mb in packs)
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
        model.images.check(model, first, second)
    if logits_TV is None:
        return
    expected_T = logits_TV.log_softmax(-1).gather(-1, alone.targets_T[:, None])[:, 0]
    # Log-probs are float32. Logits have the compute dtype, whose error in nats grows with them.
    tolerance = 1e-3 if model.compute_dtype == torch.float32 else 0.5
    tolerance *= max(1.0, logits_TV.abs().max().item() / 64)
    if not (expected_T - x_T).abs().max() < tolerance:
        raise ValueError(f"{model_type} has a head that is not supported")


def numbers_of(output: TokenStats | Tensor) -> Tensor:
    """Return the log-probs of a policy or the scalars of another model, [T]."""
    return output if isinstance(output, Tensor) else output.logprobs_T
