"""Compare the vLLM engine to `model.generate` of transformers: tokens per second of `tiny`, and
weight sync.

    OMP_NUM_THREADS=1 python bench/rollout.py       # one process, the same threads for all

256 different prompts of 4 to 12 tokens, sampled from the whole distribution at temperature 1, in
two workloads: (a) every completion has exactly 128 tokens; (b) lengths are geometric with mean 32,
at most 256: as in training, most completions end early. EOS is ignored and every request has a
fixed length, so all variants make the same tokens.
- vllm: the LLM of `VLLMEngine`, with a seed per request and the log-prob of every sampled token, as
  in the engine;
- generate: plain `do_sample=True`, one left-padded batch of 256 until its longest member ends; only
  wanted tokens count. It has no log-probs and no seeds, so it does less;
- vllm, plain: neither seeds nor log-probs, as `generate`;
- transformers: our `TransformersEngine` (seeds, log-probs, batches of 64), only in (a), because it
  has one length. (c) is the time of `load_weights`, and of one whole `VLLMEngine.generate` call of
  at most 128 tokens each (EOS ends it). The variants take turns; the first call of each is not
  timed.
"""

import argparse
import importlib.util
import os
import random
import sys
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from pydantic.dataclasses import dataclass
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from bench.completions import complete
from common.config.groups import TrainArgs
from common.config.online import SamplingArgs
from common.model.hub import load_tokenizer, resolve_model
from common.model.policy import compute_dtype, load_policy
from common.parallel import distributed
from common.rollout.engine import make_engine
from common.rollout.weights import whole_weights

COUNT, FIXED, MEAN, LONGEST = 256, 128, 32, 256
TARGETS = {"a": 1.3, "b": 2.0}


@dataclass
class Args(SamplingArgs, TrainArgs):
    """Flags of a policy and of an engine."""


class RowsDone(StoppingCriteria):
    """Stopping criterion: True for each row that has its wanted number of new tokens."""

    def __init__(self, lengths: list[int], prompt_length: int, device):
        self.ends = torch.tensor(lengths, device=device) + prompt_length

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.ends


def with_vllm(llm, prompts: list[list[int]], lengths: list[int], plain: bool = False) -> int:
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False)
        if plain
        else SamplingParams(
            temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False, seed=i, logprobs=0
        )
        for i, n in enumerate(lengths)
    ]
    stance = "force_eager" if not torch.cuda.is_available() else "default"  # as VLLMEngine does
    with torch.compiler.set_stance(stance):
        outputs = llm.generate([dict(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def with_generate(hf, prompts: list[list[int]], lengths: list[int]) -> int:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=hf.device)
    mask = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=hf.device
    )
    out = hf.generate(
        ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=max(lengths),
        stopping_criteria=StoppingCriteriaList([RowsDone(lengths, longest, hf.device)]),
    )  # fmt: skip
    assert out.shape[1] == longest + max(lengths)
    return sum(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each variant")
    rounds = parser.parse_args().rounds
    if importlib.util.find_spec("vllm") is None:
        print("vllm is not installed: nothing to compare")
        return
    device, _, _ = distributed.setup(seed=0)
    args, path, rng = Args(max_new_tokens=FIXED), resolve_model("tiny"), random.Random(0)
    tokenizer, threads = load_tokenizer(path), torch.get_num_threads()
    prompts = [[rng.randrange(95) for _ in range(rng.randint(4, 12))] for _ in range(COUNT)]
    geometric = [
        min(LONGEST, 1 + int(rng.expovariate(1) / -torch.tensor(1 - 1 / MEAN).log()))
        for _ in range(COUNT)
    ]
    workloads = {"a": [FIXED] * COUNT, "b": geometric}

    policy = load_policy(path, args, device)
    hf = (
        AutoModelForCausalLM.from_pretrained(path, dtype=compute_dtype(args, device))
        .to(device)
        .eval()
    )
    hf.generation_config.eos_token_id = None  # ignore EOS
    vllm = make_engine(path, args, [], tokenizer, device)
    args.engine = "transformers"
    ours = make_engine(path, args, [tokenizer.pad_token_id], tokenizer, device)
    ours.replica.generation_config.min_new_tokens = FIXED  # no EOS before that
    vllm.wake()
    vllm.load_weights(whole_weights(policy, vllm.dtype))

    def sampled(engine) -> int:
        groups = complete(engine, prompts, n=1, seeds=list(range(COUNT)), temperature=1.0)
        return sum(len(group[0].completion_ids) for group in groups)

    def sync() -> int:
        vllm.load_weights(whole_weights(policy, vllm.dtype))
        return 0

    calls = {
        f"{workload} {name}": call
        for workload, lengths in workloads.items()
        for name, call in {
            "vllm": lambda lengths=lengths: with_vllm(vllm.llm, prompts, lengths),
            "generate": lambda lengths=lengths: with_generate(hf, prompts, lengths),
        }.items()
    } | {"a vllm, plain": lambda: with_vllm(vllm.llm, prompts, workloads["a"], plain=True)}
    calls |= {
        "a transformers": lambda: sampled(ours),
        "c VLLMEngine": lambda: sampled(vllm),
        "c load_weights": sync,
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    tokens = {}
    for _ in range(1 + rounds):
        for name, call in calls.items():
            torch.set_num_threads(threads)  # an engine may have changed it
            start = time.perf_counter()
            tokens[name] = call()  # token ids on the host: all work is complete
            seconds[name].append(time.perf_counter() - start)
    times = {name: median(values[1:]) for name, values in seconds.items()}
    assert all(
        tokens[f"{w} {name}"] == sum(n)
        for w, n in workloads.items()
        for name in ("vllm", "generate")
    )
    print(
        f"{device}, {threads} threads, {rounds} rounds; (b): mean {sum(geometric) / COUNT:.1f}, "
        f"max {max(geometric)}"
    )
    for name, took in times.items():
        rate = (
            f"{tokens[name]:6} tokens {tokens[name] / took:8.0f} tokens/s" if tokens[name] else ""
        )
        print(f"{name:16} {took:8.3f} s {rate}")
    for workload, target in TARGETS.items():
        ratio = times[f"{workload} generate"] / times[f"{workload} vllm"]
        print(f"({workload}) vllm is {ratio:.2f}x generate (target: at least {target}x)")
    without, both = (
        times["a generate"] / times["a vllm, plain"],
        times["a transformers"] / times["a vllm"],
    )
    print(f"(a) like with like: {without:.2f}x without seeds and log-probs, {both:.2f}x with both")
    vllm.close()
    distributed.cleanup()


if __name__ == "__main__":
    main()
