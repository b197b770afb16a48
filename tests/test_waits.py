"""Between the first forward of a step and its optimizer step, no script copies between host and
device, and none reads a number from the device: a GPU would first finish all that is queued.

The meta device stands for a GPU. torch refuses to read numbers from it, also to find the places of
a mask. Copies to it are recorded here."""

import importlib
from unittest import mock

import pytest
import torch
from helpers import write_rows
from in_process import write_teacher
from processes import last
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.config.parse import parse
from common.metrics.meter import Meter
from common.model.policy import PackedModel
from common.packs.sample import Completion
from common.parallel import distributed
from common.rollout.sampler import Rollout

META = torch.device("meta")
SAMPLED = ("--beta", 0, "--minibatches", 2)
SCRIPTS = dict(
    sft=("--share_prefix", 1), dpo=("--sft_weight", 0.5), kto=(), rm=(),
    grpo=("--preset", "gspo", "--beta", 0.1, "--entropy_coef", 0.1, "--share_prefix", 1),
    dapo=("--log_kl",), reinforce=("--preset", "reinforce++_baseline"), rloo=SAMPLED,
    ppo=SAMPLED, online_dpo=(), bok=SAMPLED,
    distill=("--estimator", "full", "--divergence", "jsd", "--top_k", 4),
    self_distill=("--hint", "sibling"),
)  # fmt: skip


class Copies(TorchDispatchMode):
    """Records operations that have tensors of both host and device. Single numbers of the host do
    not count, because they are arguments of a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        is_copy = func is torch.ops.aten._to_copy.default
        if len({x.device.type for x in tensors if x.ndim or is_copy}) > 1:
            self.found.append(str(func))
        return out


class Sampler:
    """A stand-in for the sampler: completions of several lengths for the first prompts."""

    def __init__(self, policy, prompts, args, *_, **__):
        self.prompts, self.args = prompts, args

    def rollout(self, *_) -> Rollout:
        positions = [*range(self.args.prompts_per_step)]
        groups = [
            [self.completion(*self.prompts[p], 1 + g) for g in range(self.args.samples_per_prompt)]
            for p in positions
        ]
        return Rollout(groups, positions, positions)

    def completion(self, prompt: list[int], row: dict, length: int) -> Completion:
        begin = [0] * len(prompt)
        return Completion(
            [*prompt, *range(20, 20 + length)], [*map(bool, begin), *[True] * length], len(prompt),
            row, rollout_logprobs=[*begin, *[-1.0] * length], versions=[*begin, *[0] * length],
            finish_reason="stop", text="7" * length,
        )  # fmt: skip


def known_sum(x: torch.Tensor | float) -> torch.Tensor:
    """A stand-in for `all_sum` that knows the number: bok.py reads the sum after its loop."""
    x = torch.as_tensor(x)
    return torch.ones(x.shape, dtype=x.dtype) if x.is_meta else x


class Stepped(Exception):
    """Raised at the end of the loop over micro-batches."""


@pytest.fixture
def loop_of(monkeypatch):
    """`loop_of(script, flags)` runs a script up to its first optimizer step, with real models on
    the meta device, and returns the copies that its loop over micro-batches made."""

    def run(script: str, flags: tuple) -> list[str]:
        module, copies, meter = importlib.import_module(script), Copies(), Meter()
        begin = mock.Mock(side_effect=lambda name: name == "train" and copies.__enter__())
        monkeypatch.setattr(meter, "start", begin)
        monkeypatch.setattr(meter, "stop", lambda _: None)
        step = dict(meter=meter, first_step=1, models=[])
        step["steps.return_value"], step["checks_engine.return_value"] = [0], False
        step["learning_rate.return_value"] = 0.1
        numbers = dict(
            Run=mock.Mock(return_value=mock.Mock(**step)), make_sampler=Sampler, adamw=mock.Mock(),
            optimizer_step=mock.Mock(side_effect=Stepped),
            # before the loop
            moments=lambda *_: (0.0, 1.0), gae=lambda _, values_T, *__: values_T.double(),
            divide=lambda mb: (mb, mb), reference_logps=lambda policy, datasets, *_: [
                torch.zeros(len(groups), len(groups[0])) for groups in datasets],
        )  # fmt: skip
        for name in numbers.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, numbers[name])
        monkeypatch.setattr(distributed, "setup", lambda *_: (META, 0, 1))
        monkeypatch.setattr(distributed, "all_sum", known_sum)
        of_shards = dict(device=META, compiled=False, compute_dtype=torch.float32)
        for name, value in (of_shards | dict(reshard=lambda _: None)).items():
            monkeypatch.setattr(PackedModel, name, value, raising=False)
        try:
            with pytest.raises(Stepped):
                module.main(parse(module.Args, last(flags)))
        finally:
            if begin.call_args_list[-1:] == [mock.call("train")]:
                copies.__exit__(None, None, None)
        return copies.found

    return run


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_is_copied_between_forward_and_optimizer_step(
    script, loop_of, small, pairs, reward_file, tmp_path
):
    flags = (*small, "--output_dir", tmp_path / "run", "--pack_tokens", 120, "--max_steps", 1)
    if script in ("sft", "dpo", "kto", "rm"):
        named = [write_rows(tmp_path / f"{name}.jsonl", [dict(question="1 + 1 =", answer=name)] * 9)
                 for name in ("one", "two")]  # fmt: skip
        data = [f"{path}:1" for path in named] if script == "sft" else [pairs]
        flags += ("--dataset", *data, "--batch_size", 4, "--eval_size", 2)
    else:
        flags += ("--reward", f"{reward_file}:digits", "--prompts_per_step", 4, "--eval_every", 0)
        flags += ("--samples_per_prompt", 3, "--max_new_tokens", 12)
    if script == "distill":
        flags += ("--teacher", write_teacher(tmp_path / "teacher"))
    assert loop_of(script, (*flags, *SCRIPTS[script])) == []
