"""Check each supported architecture (docs/models.md) with a tiny random checkpoint.

    OMP_NUM_THREADS=1 python bench/models.py    # on CPU; --only NAME ...

The tensors of a checkpoint have their names on the hub, and random values everywhere (norms and
biases too). Sequences are longer than the sliding window, if there is one. For each architecture:
- forward: log-probs of all targets, in packs that compute a common prefix once, are compared with
  those of transformers' own attention (eager) on padded, masked rows;
- gradient: the gradient of the sum of these log-probs is compared, too, over all parameters; the
  number is the largest difference over the largest gradient;
- vLLM: log-probs of vLLM's samples at temperature 0.7 are compared with the trainer's, after vLLM
  has got new weights from it. vLLM starts once per process, so this takes a separate process;
- export: logits of `hf/`, opened by transformers, are compared with those of the checkpoint.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from bench.completions import complete
from bench.delta_vllm import prepare
from common.config.groups import TrainArgs
from common.config.online import SamplingArgs
from common.model.flops import num_delta_nets
from common.model.loading import load_config, model_class, open_model
from common.model.policy import Policy, load_policy
from common.model.tiny import tiny_model
from common.packs.packing import pack, pack_groups
from common.packs.sample import Sample
from common.parallel import distributed
from common.rollout.engines import make_engine
from common.rollout.weights import sync_weights, whole_weights
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import export_hf

OUTSIDE = dict(os.environ)  # for child processes: this process becomes a rank
VOCABULARY, WINDOW = 384, 16
LENGTHS = (18, 41, 41, 6, 64, 2)  # two are equal: attention takes them as one batch
ROPE = dict(rope_type="default", rope_theta=10000.0)
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
ALTERNATE = ["sliding_attention", "full_attention"] * 2
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)

DELTA = dict(
    layer_types=["linear_attention"] * 3 + ["full_attention"], linear_key_head_dim=64,
    linear_value_head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
QWEN_VISION = dict(
    depth=2, num_heads=2, out_hidden_size=64, patch_size=14, spatial_merge_size=2,
    num_position_embeddings=16,
)  # fmt: skip


def with_images(kind: str, vision: dict, **text) -> dict:
    """Return the config of a model of images and text, with a small vision tower."""
    tower = dict(
        model_type=kind, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, patch_size=14,
    )  # fmt: skip
    return dict(
        text_config=SIZES | text, vision_config=tower | vision, image_token_id=300,
        image_token_index=300, tie_word_embeddings=text["model_type"].startswith("gemma"),
    )  # fmt: skip


# Every feature beyond Llama's is on, with a value that has an effect.
ARCHITECTURES: dict[str, dict] = dict(
    llama=dict(
        rope_parameters=dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            rope_theta=10000.0, original_max_position_embeddings=32,
        )
    ),
    mistral=dict(sliding_window=WINDOW), qwen2=dict(hidden_size=128, attention_dropout=0.5),
    qwen3=dict(tie_word_embeddings=True), olmo2=dict(hidden_size=128),
    gemma2=dict(
        sliding_window=WINDOW, query_pre_attn_scalar=48, attn_logit_softcapping=4.0,
        final_logit_softcapping=3.0,
    ),
    gemma3_text=dict(
        sliding_window=WINDOW, query_pre_attn_scalar=48, layer_types=ALTERNATE,
        rope_parameters=dict(
            sliding_attention=ROPE,
            full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
        ),
    ),
    phi3=dict(hidden_size=128, sliding_window=WINDOW),
    smollm3=dict(
        hidden_size=128, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=WINDOW,
        layer_types=ALTERNATE,
    ),
    glm4=dict(rope_parameters=ROPE | dict(partial_rotary_factor=0.5)),
    granite=dict(
        hidden_size=128, embedding_multiplier=3.0, residual_multiplier=0.5,
        attention_multiplier=0.3, logits_scaling=2.0,
    ),
    cohere=dict(hidden_size=128, logit_scale=0.5, use_qk_norm=True),
    phi=dict(
        hidden_size=128, num_key_value_heads=4,
        rope_parameters=ROPE | dict(partial_rotary_factor=0.5),
    ),
    qwen3_moe=EXPERTS | dict(num_experts=4, norm_topk_prob=True, mlp_only_layers=[1]),
    mixtral=dict(hidden_size=128, num_experts_per_tok=2, num_local_experts=4),
    olmoe=dict(hidden_size=128, num_experts_per_tok=2, num_experts=4),
    gpt_oss=dict(
        num_experts_per_tok=2, num_local_experts=4, sliding_window=WINDOW, layer_types=ALTERNATE,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0,
            truncate=False, original_max_position_embeddings=64,
        ),
    ),
    gpt_neox=dict(
        hidden_size=128, num_key_value_heads=4,
        rope_parameters=ROPE | dict(partial_rotary_factor=0.25),
    ),
    olmo3=dict(hidden_size=128, sliding_window=WINDOW, layer_types=ALTERNATE),
    qwen3_5_text=DELTA,
    qwen3_next=DELTA | EXPERTS | dict(
        num_experts=4, shared_expert_intermediate_size=32, norm_topk_prob=True,
    ),
    qwen3_5_moe_text=DELTA | EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=32),
    glm4_moe=EXPERTS | dict(
        n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True,
        routed_scaling_factor=1.5, rope_parameters=ROPE | dict(partial_rotary_factor=0.5),
    ),
    granitemoe=dict(
        hidden_size=128, num_experts_per_tok=2, num_local_experts=4, embedding_multiplier=3.0,
        residual_multiplier=0.5, attention_multiplier=0.3, logits_scaling=2.0,
    ),
    # Images and text: the language model alone is trained.
    gemma3=with_images(
        "siglip_vision_model", dict(image_size=28), model_type="gemma3_text",
        sliding_window=WINDOW, layer_types=ALTERNATE, query_pre_attn_scalar=48,
    ) | dict(mm_tokens_per_image=4),
    gemma4=with_images(
        "gemma4_vision", dict(), model_type="gemma4_text", sliding_window=WINDOW,
        layer_types=ALTERNATE, hidden_size_per_layer_input=16, vocab_size_per_layer_input=384,
        global_head_dim=64, num_global_key_value_heads=2, num_kv_shared_layers=2,
    ) | dict(audio_config=None),
    mistral3=with_images("pixtral", dict(head_dim=16), model_type="mistral"),
    smolvlm=with_images("smolvlm_vision", dict(image_size=28), model_type="llama"),
    idefics3=with_images("idefics3_vision", dict(image_size=28), model_type="llama"),
    qwen3_vl=with_images(
        "qwen3_vl", QWEN_VISION | dict(deepstack_visual_indexes=[0, 1]), model_type="qwen3_vl_text",
        rope_parameters=ROPE | dict(mrope_section=[6, 5, 5], mrope_interleaved=True),
    ),
    qwen2_5_vl=with_images(
        "qwen2_5_vl", QWEN_VISION | dict(fullatt_block_indexes=[1], out_hidden_size=128),
        model_type="qwen2_5_vl_text", hidden_size=128,
        rope_parameters=ROPE | dict(mrope_section=[6, 5, 5]),
    ),
    qwen3_5=with_images(
        "qwen3_5", QWEN_VISION | dict(deepstack_visual_indexes=[]), model_type="qwen3_5_text",
        **DELTA,
    ),
    qwen3_5_moe=with_images(
        "qwen3_5_moe", QWEN_VISION | dict(deepstack_visual_indexes=[]),
        model_type="qwen3_5_moe_text", num_experts=4, shared_expert_intermediate_size=32,
        **DELTA | EXPERTS,
    ),
)  # fmt: skip


@dataclass
class Args(SamplingArgs, TrainArgs):
    """Flags of a policy and of an engine."""


ARGS = Args(dtype="float32", max_new_tokens=24, engine="vllm")


def checkpoint(model_type: str, folder: Path, file_size: str = "1GB") -> str:
    """Write a tiny random checkpoint in float32, with the tokenizer of `tiny`, and return its
    folder. A file of weights has at most `file_size`."""
    fields = ARCHITECTURES[model_type]
    has_images = "text_config" in fields
    config = AutoConfig.for_model(model_type, **fields if has_images else SIZES | fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = model_class(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size=file_size)
    AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(folder)
    return str(folder)


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
    rows[2][:20] = rows[1][:20]  # a prefix that packs compute once
    return rows


def packed(policy: Policy, device: torch.device) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the log-probs of each row's targets, in the order of `rows`, and their sum's
    gradient."""
    logprobs: dict[tuple[int, ...], Tensor] = {}
    group = [Sample(ids, [True] * len(ids)) for ids in rows()]
    for mb in pack_groups([group], 100, device, policy.share_prefix, together=False):
        logprobs_T, *_ = policy(mb)
        logprobs_T.sum().backward()
        for begin, end in zip(mb.offsets, mb.offsets[1:], strict=False):
            logprobs[tuple(mb.targets_T[begin:end].tolist())] = logprobs_T[begin:end].detach().cpu()
    logprobs = distributed.gather_dict(logprobs)  # other ranks have trained on some rows
    parameters = policy.hf.named_parameters()
    gradients = {name: weight.grad for name, weight in parameters if weight.grad is not None}
    gradient: dict[str, Any] = {
        name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()
    }
    return [logprobs[tuple(ids[1:])] for ids in rows()], gradient


def padded(path: str, device: torch.device) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the same from transformers alone: rows padded on the right to one length, a mask."""
    model = open_model(path, torch.float32, attn_implementation="eager").to(device)
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows()], batch_first=True
    ).to(device)
    mask = (torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]).long().to(device)
    logp = model.eval()(ids, attention_mask=mask, use_cache=False).logits[:, :-1].log_softmax(-1)
    logp = logp.gather(-1, ids[:, 1:, None])[..., 0]
    logprobs = [row[: n - 1] for row, n in zip(logp, LENGTHS, strict=True)]
    sum(row.sum() for row in logprobs).backward()
    # Of a model of images and text, only the language model has a gradient for text.
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [row.detach() for row in logprobs], gradient


def against_transformers(path: str, policy: Policy, device: torch.device) -> tuple[float, float]:
    """Return the largest difference of a log-prob, in nats, and of the gradient, relative to its
    largest."""
    (ours, our_gradient), (theirs, gradient) = packed(policy, device), padded(path, device)
    forward = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    assert torch.cat(theirs).std() > 0.3, "log-probs are too uniform for a comparison"
    assert our_gradient.keys() == gradient.keys()
    largest = max(g.abs().max() for g in gradient.values())
    return forward, max(
        ((our_gradient[name] - g).abs().max() / largest).item() for name, g in gradient.items()
    )


@torch.no_grad()
def against_export(path: str, policy: Policy, folder: Path, device: torch.device) -> float:
    """Return the largest difference of a logit between the checkpoint and its export."""
    export_hf(policy, load_tokenizer(path), folder)
    ids = torch.tensor([rows()[-2]])
    one, other = (
        open_model(p, torch.float32)(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        for p in (path, folder)
    )
    return (one - other).abs().max().item()


@torch.no_grad()
def against_vllm(path: str, device: torch.device) -> float:
    """Return the largest difference of a sampled token's log-prob, in nats."""
    policy, tokenizer = load_policy(path, ARGS, device), load_tokenizer(path)
    if num_delta_nets(load_config(path).get_text_config()):
        prepare()
    engine = make_engine(path, ARGS, tokenizer, device)
    for _ in range(3):  # syncs, as in training
        policy.reshard()
        for parameter in policy.parameters():
            parameter.mul_(1.05)
        sync_weights(engine, whole_weights(policy, engine.dtype))
    groups = complete(engine, rows(), 2, list(range(len(LENGTHS))), 0.7)
    worst = 0.0
    for mb in pack([sample for group in groups for sample in group], 200, device):
        logprobs_T, *_ = policy(mb, temperature=0.7)
        worst = max(
            worst, ((logprobs_T - mb.rollout_logprobs_T).abs() * mb.loss_mask_T).max().item()
        )
    load_policy(
        path, ARGS, device
    )  # a later model must still load: vLLM shares transformers' classes
    engine.close()
    return worst


def in_own_process(model_type: str) -> float | str:
    """Run `against_vllm` in a process of its own. Return its result, or vLLM's error."""
    done = subprocess.run(
        [sys.executable, __file__, "--vllm", model_type],
        capture_output=True,
        text=True,
        env=OUTSIDE,
    )
    last = (done.stdout.splitlines() or [""])[-1]
    if done.returncode or not last.startswith("{"):
        sys.exit(f"{model_type}: {done.stdout[-2000:]}{done.stderr[-6000:]}")
    return json.loads(last)["vllm"]


def measure(model_type: str, folder: Path, device: torch.device) -> dict[str, float | str]:
    """Return `forward`, `gradient` and `export`, or `refused` with the message why."""
    path = checkpoint(model_type, folder / "checkpoint", "200KB")
    try:
        policy = load_policy(path, ARGS, device)
    except ValueError as error:
        return dict(refused=str(error).removeprefix(f"--model {path}: "))
    exported = against_export(path, policy, folder / "hf", device)
    forward, gradient = against_transformers(path, policy, device)
    return dict(forward=forward, gradient=gradient, export=exported)


def row(model_type: str, found: dict[str, float | str]) -> str:
    """Return a line of the table in docs/models.md."""
    name = f"| `{model_type}` |"
    if "refused" in found:
        return f"{name} no: {found['refused']} | | | |"
    values = [found[column] for column in ("forward", "gradient", "vllm", "export")]
    shown = [v if isinstance(v, str) else "equal" if v == 0 else f"{v:.0e}" for v in values]
    return f"{name} {' | '.join(shown)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ARCHITECTURES, help="print only these rows")
    parser.add_argument("--vllm", choices=ARCHITECTURES, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    device, _, _ = distributed.setup(0)
    with tempfile.TemporaryDirectory() as folder:
        if flags.vllm:
            try:
                outcome = against_vllm(checkpoint(flags.vllm, Path(folder), "200KB"), device)
            except ValueError as error:
                outcome = str(error)
            print(json.dumps(dict(vllm=outcome)))
            return
        for model_type in flags.only or ARCHITECTURES:
            found = measure(model_type, Path(folder) / model_type, device)
            if "refused" not in found:
                found |= dict(vllm=in_own_process(model_type))
            print(row(model_type, found), flush=True)


if __name__ == "__main__":
    main()
