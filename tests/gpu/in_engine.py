"""One case of test_engine.py in a separate process: `python tests/gpu/in_engine.py CASE ENGINE
DTYPE MODEL`.

It has a policy and an engine of one rank, like a script, and prints its measurements as JSON on the
last line."""

import json
import os
import sys
from itertools import chain
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from bench.completions import complete
from common.config.online import OnlineArgs
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.packs.packing import pack
from common.parallel import distributed
from common.rollout.engines import make_engine
from common.rollout.weights import sync_weights, whole_weights
from common.text.tokenizer import load_tokenizer
from common.train.optim import adamw, optimizer_step

TEXTS = ("1+1=", "123+4=", "a", "the quick brown fox jumps over", "1+1=", "9", "x" * 40,
         "7 times 8 is ")  # fmt: skip


class Both:
    """Policy and engine."""

    def __init__(self, kind: str, dtype: str, path: str, trained: bool = True):
        self.device, *_ = distributed.setup(0)
        # A part of the GPU that fits beside other programs.
        part = ("gpu_memory_utilization=0.3",)
        self.args = OnlineArgs(
            engine=kind, dtype=dtype, max_new_tokens=24, engine_args=part, lr=1e-2, compile=False
        )
        tokenizer = load_tokenizer(path)
        self.policy = load_policy(path, self.args, self.device)
        self.optimizer = adamw(self.policy, self.args)
        self.engine = make_engine(path, self.args, tokenizer, self.device, trained)
        self.prompts = [tokenizer(text)["input_ids"] for text in TEXTS]

    def wake(self) -> None:
        sync_weights(self.engine, whole_weights(self.policy, self.engine.dtype))

    def generate(self, temperature: float, n: int = 1, seed: int = 1):
        seeds = [distributed.fold_seed(seed, i) for i in range(len(self.prompts))]
        return complete(self.engine, self.prompts, n, seeds, temperature)

    @torch.no_grad()
    def differences(self, groups, temperature: float) -> dict[str, float]:
        """Return mean and maximum difference between log-probs of engine and policy over the
        sampled tokens."""
        found = []
        for mb in pack([*chain(*groups)], 4096, self.device):
            logprobs_T, *_ = self.policy(mb, temperature=temperature)
            found.append((logprobs_T - mb.rollout_logprobs_T)[mb.loss_mask_T].abs())
        found = torch.cat(found)
        self.policy.reshard()  # after a forward without backward the root is still whole
        return dict(mean=found.mean().item(), max=found.max().item(), tokens=len(found))

    def negate(self) -> None:
        """Change the policy so that it samples other tokens; a second call restores it."""
        self.policy.reshard()
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                if name.endswith("v_proj.weight"):
                    parameter.to_local().neg_()


def ids_of(groups) -> list[list[int]]:
    return [sample.ids for sample in chain(*groups)]


def free_memory() -> int:
    """Return the bytes that another process could get; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def cycles(*which) -> tuple[Both, dict]:
    """Compare a new engine with itself after sleep, wake and the same weights, three times."""
    both = Both(*which, trained=False)
    fresh = ids_of(both.generate(0.0))
    both.engine.sleep()
    both.negate()
    both.wake()
    others = ids_of(both.generate(0.0))
    both.negate()
    same, free = [], []
    for _ in range(3):
        both.engine.sleep()
        free.append(free_memory())
        both.wake()
        same.append(ids_of(both.generate(0.0)) == fresh)
    return both, dict(same=same, changed=others != fresh, free=free)


def agreement(*which) -> tuple[Both, dict]:
    """Compare log-probs of engine and policy at two temperatures, and the samples of one seed with
    each other."""
    both, found = Both(*which), {}
    both.wake()
    for temperature in (1.0, 0.7):
        groups = both.generate(temperature, n=16)
        found[temperature] = both.differences(groups, temperature)
        both.wake()  # the same weights, without cached prefixes
        found[temperature]["again"] = ids_of(both.generate(temperature, n=16)) == ids_of(groups)
        found[temperature]["wrong"] = both.differences(groups, temperature * 1.2)
    return both, found


def early_ends(*which) -> tuple[Both, dict]:
    """Put the engine to sleep, or load weights, directly after completions that ended early at
    different steps."""
    both, rounds = Both(*which), []
    for _ in range(2):
        both.wake()
        rounds.append(both.generate(1.0, n=16))
        both.wake()  # while it is awake, as on ranks that only generate
        rounds.append(both.generate(1.0, n=16))
        both.engine.sleep()
    samples = [*chain(*rounds[0])]
    return both, dict(
        same=[ids_of(groups) == ids_of(rounds[0]) for groups in rounds],
        lengths=sorted({len(sample.completion_ids) for sample in samples}),
        reasons=sorted({sample.finish_reason for sample in samples}),
    )


def step(*which) -> tuple[Both, dict]:
    """Sample, take one step of Adam while the engine sleeps, and sample with the new weights."""
    both = Both(*which)
    both.wake()
    before = both.generate(1.0, n=4)
    both.engine.sleep()
    (mb,) = pack([*chain(*before)], 4096, both.device)
    logprobs_T, *_ = both.policy(mb)
    loss = -(logprobs_T * mb.loss_mask_T).sum() / mb.loss_mask_T.sum()
    loss.backward()
    grad_norm = optimizer_step(both.policy, both.optimizer, 1e-2, 1.0, loss.detach())
    stale = both.differences(before, 1.0)
    both.wake()
    after = both.generate(1.0, n=4)
    return both, dict(grad_norm=grad_norm, stale=stale, after=both.differences(after, 1.0))


if __name__ == "__main__":
    case, kind, dtype, path = sys.argv[1:]
    if os.environ.get("ONEFILE_GPU_TESTS_ON_CPU") != "1":
        assert torch.cuda.is_available()
    both, found = globals()[case](kind, dtype, tiny_model() if path == "tiny" else path)
    both.engine.close()
    distributed.cleanup()
    print(json.dumps(found), flush=True)
