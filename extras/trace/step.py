"""A step in a file: what replay.py packs, and how others compute it again without the run.

A step.zip has neither pickles nor code, so who opens it runs only functions of their own scripts.
step.json has flags, micro-batches, the gradient of the first update, and the rows and texts that
rewards read. trace.jsonl has all groups, with all digits, and hf/ the weights before the step."""

import importlib
import inspect
import json
import math
import shutil
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from common.config.groups import flags_of
from common.metrics.meter import Meter
from common.model.loading import load_config, named_errors, whole
from common.model.policy import PackedModel, load_policy
from common.packs.packing import PackedBatch, count_trained, join
from common.packs.sample import Completion, Group, Sample
from common.packs.tokens import sequence_of
from common.parallel import distributed
from common.parallel.process import visible
from common.rewards.functions import REWARDS
from common.rewards.total import Rewards
from common.rollout.measure import lengths, truncation_penalties
from common.text.thoughts import Thoughts, template_text
from common.train.checkpoint import write_model
from common.train.run import Run
from extras.trace import file as trace_file
from extras.trace import trace

SCRIPTS = ("grpo", "dapo")
PARTS = "step"  # subfolder of the replay's folder
WEIGHTS = "hf/model.safetensors"
NAMES = ("step.json", "trace.jsonl", "metrics.jsonl", "hf/config.json", WEIGHTS)
LARGEST, LARGEST_MODEL = 2**28, 10**8  # bytes of all parts, and of the weights
MOST_LAYERS = 1000
# Only these rewards are computed again: `code` or a user's function would run what the sender
# wrote.
SAFE = {*REWARDS, "math", "countdown", "choice", "stated", "ifeval"}
STREAMS = "logprobs entropy old_logprobs rollout_logprobs ref_logprobs advantages".split()
ROUNDING = 1e-5  # differences below this share of the largest number do not count
EXACT = 17  # digits with which a number is read back exactly
CPU = torch.device("cpu")


# ---- the file ----


@contextmanager
def recorded(run: Run, parts: Path) -> Iterator[None]:
    """Write to the folder `parts` what a packed step needs beside the trace: the weights before the
    step, and everything else after its updates. Collective."""
    trace.GROUPS, trace.DIGITS = sys.maxsize, EXACT  # they stay: the trace is written after this
    args, model = run.args, run.models[0]
    is_small = 4 * sum(p.numel() for p in model.parameters()) <= LARGEST_MODEL
    if is_small and not (args.lora_rank or model.images or args.context_ranks > 1):
        config = json.loads(run.checkpointer.files.get("config.json", "{}"))
        config |= dict(dtype="float32", torch_dtype="float32")
        write_model(model, {"config.json": json.dumps(config).encode()}, parts / "hf")
    script = sys.modules[type(args).__module__]
    optimizer_step, gradient = script.optimizer_step, {}

    def step(*given):
        if not gradient:
            gradient.update(gradient_of(model))
        return optimizer_step(*given)

    with mock.patch.object(script, "optimizer_step", step):
        yield
    tokenizer, rows, packs = run.trace.tokenizer, {}, []
    thoughts = Thoughts(tokenizer, cut=True)
    for position, group in run.trace.sampled.items():
        row = {name: x for name, x in group[0][0].row.items() if name[:1] != "_"}
        texts = [thoughts.opened(c) + c.text for c, _ in group]
        rows[position] = dict(row=row | dict(_source="its row"), texts=texts)
    for forward in run.trace.forwards:
        if (mb := forward.mb).num_samples:
            shared = [*map(int.__sub__, mb.lengths, mb.model_tokens.lengths)]
            packs.append(dict(update=forward.update, index=mb.index_N.tolist(), shared=shared))
    rows, packs = distributed.gather_dict(rows), distributed.gather_objects(packs)
    dtype = str(model.compute_dtype).removeprefix("torch.")
    about = dict(
        script=script.__name__, step=run.finished + 1, gradient=gradient,
        flags=flags_of(args) | dict(dtype=dtype), template=template_text(tokenizer),
        packs=[*chain(*packs)], rows=[rows[position] for position in sorted(rows)],
    )  # fmt: skip
    if distributed.is_main():
        (parts / "step.json").write_text(json.dumps(about, default=str))


def gradient_of(model: PackedModel) -> dict[str, float]:
    """Return the norm and the sum of each parameter's gradient. Collective."""
    scale = 1.0 if model.loss_scale is None else model.loss_scale[0].item()  # of --dtype float16
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients = {name: whole(x).double() / scale for name, x in gradients.items()}
    sums = {f"sum of {name}": x.sum().item() for name, x in gradients.items()}
    return {f"norm of {name}": x.norm().item() for name, x in gradients.items()} | sums


def pack(folder: Path, step: int, out: Path) -> None:
    """Pack what the replay in `folder` has written into the file `out`."""
    parts = folder / PARTS
    lines = trace_file.read(folder / "trace" / f"step_{step:06}.jsonl.gz")
    (parts / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shutil.copy(folder / "metrics.jsonl", parts)
    names = [name for name in NAMES if (parts / name).is_file()]
    if (size := sum((parts / name).stat().st_size for name in names)) > LARGEST:
        raise ValueError(f"--pack {out}: {size / 1e9:.1f} GB are too much for a file")
    with zipfile.ZipFile(out, "x", zipfile.ZIP_DEFLATED) as file:
        for name in names:
            file.write(parts / name, name)
    print(visible(f"{out}: {out.stat().st_size / 1e6:.1f} MB"))


def unpack(path: Path, folder: Path) -> tuple[dict, list[dict]]:
    """Extract a packed step into a new `folder`, which looks like a run's; return step.json and the
    groups. Raises `ValueError` for other files, before it extracts any part of an unknown name."""
    with named_errors(f"{path}: no packed step"), zipfile.ZipFile(path) as file:
        members = file.infolist()
        if wrong := [x.filename for x in members if x.filename not in NAMES]:
            raise ValueError(f"its part {wrong[0]!r:.80} is unknown")
        kinds = {x.compress_type for x in members} - {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
        if kinds or sum(x.file_size for x in members) > LARGEST:
            raise ValueError("its parts are too large, or compressed in another way")
        file.extractall(folder)
        about = json.loads((folder / "step.json").read_bytes())
        lines = [*map(json.loads, (folder / "trace.jsonl").open(encoding="utf-8"))]
        trace_path = folder / "trace" / f"step_{int(about['step']):06}.jsonl.gz"
        trace_file.write(trace_path, lines)
        (folder / "args.yaml").write_text(json.dumps(about["flags"]))
        return about, sorted(trace_file.read(trace_path)[1:], key=lambda group: group["group"])


# ---- the step again ----

Number = tuple[str, str, float | None, float | None]  # quantity; place; in the file; computed here


def check(path: Path) -> int:
    """Compute a packed step again and print what differs. Return the exit status of the program."""
    found = defaultdict(list)
    with TemporaryDirectory() as temporary:
        about, groups = unpack(path, folder := Path(temporary, "step"))
        hf = folder / "hf" if (folder / WEIGHTS).is_file() else None
        with named_errors(f"{path}: no packed step"), mock.patch.object(trace, "DIGITS", EXACT):
            for quantity, *number in computed(about, groups, hf):
                found[quantity].append(number)
            lines = [verdict(quantity, numbers) for quantity, numbers in found.items()]
    if others := [name for name in about["flags"]["reward"] if name not in SAFE]:
        lines.append(f"not run, but taken as recorded: reward {', '.join(others)}")
    if hf is None:
        lines.append("not checked, because the file has no weights: log-probs, gradient")
    print(visible("\n".join([f"{path}: step {about['step']} of {about['script']}.py", *lines])))
    return int(any("DIFFER" in line for line in lines))


def verdict(quantity: str, numbers: list) -> str:
    """Return a line about a quantity: whether it differs, by how much, and where first."""
    largest = max((abs(x) for _, x, _ in numbers if x is not None), default=0.0)
    apart = [(math.inf if None in (x, y) else abs(x - y), p, x, y) for p, x, y in numbers if x != y]
    wrong = [each for each in apart if each[0] > ROUNDING * largest]
    if not wrong:
        rounding = f", but for rounding by up to {max(apart)[0]:.1g}" if apart else ""
        return f"{quantity}: {len(numbers)} equal{rounding}"
    _, place, x, y = wrong[0]
    count = f"{len(wrong)} of {len(numbers)} DIFFER by up to {max(wrong)[0]:.3g}"
    return f"{quantity}: {count}; first {place}: {x} in the file, {y} here"


def computed(about: dict, groups: list[dict], hf: Path | None) -> Iterator[Number]:
    """Compute each quantity of a step from other numbers of the file and its model in `hf`."""
    if about["script"] not in SCRIPTS:
        raise ValueError("its script is unknown")
    script, flags = importlib.import_module(about["script"]), about["flags"]
    safe = [name for name in flags["reward"] if name in SAFE]
    weights = flags["reward_weights"] if safe == flags["reward"] else ()
    args = object.__new__(script.Args)  # unchecked, because checks open files that flags name
    vars(args).update(flags | dict(reward=safe, reward_weights=weights, max_reward_errors=1.0))
    vars(args).update(reward_workers=2, reward_timeout=10.0)
    samples = [samples_of(*each) for each in zip(groups, about["rows"], strict=True)]
    found = dict(advantage=advantages(groups, samples, args, script))
    if safe:
        tokenizer = SimpleNamespace(chat_template=about["template"], decode=lambda ids: "")
        total_PG, by_name, _ = Rewards(args, [], tokenizer, CPU).wait(samples, Meter())
        found |= by_name | (dict(reward=total_PG) if safe == flags["reward"] else {})
    completions = [*chain(*(group["completions"] for group in groups))]
    for name, x_PG in found.items():
        yield from of_completions(name, x_PG, completions)
    policy = None
    if hf is not None:
        if load_config(hf).get_text_config().num_hidden_layers > MOST_LAYERS:
            raise ValueError("its model has too many layers")
        policy = load_policy(str(hf), script.Args(dtype=args.dtype), distributed.setup(0)[0])
    for update, mbs in micro_batches(about["packs"], completions).items():
        yield from of_tokens(mbs, policy if update == 0 else None, args, script)
    if policy is not None:
        for name, now in gradient_of(policy).items():
            yield "gradient", name, about["gradient"][name], now


def samples_of(group: dict, row: dict) -> Group:
    """Return a group of completions as the script had it, and give each the name of its `place`."""
    samples = []
    for g, (c, text) in enumerate(zip(group["completions"], row["texts"], strict=True)):
        c["place"] = f"group {group['group']}, completion {g}"
        mask = [False] * c["start"] + c["mask"]
        samples.append(Completion(c["ids"], mask, c["start"], row["row"], text=text))
        samples[-1].finish_reason = c["finish_reason"]
    return samples


def advantages(groups: list[dict], samples: list[Group], args, script: ModuleType) -> Tensor:
    """Return the advantages that follow from the rewards in the file, [B, G]."""
    rewards = [[c["reward"] for c in group["completions"]] for group in groups]
    scores_BG = torch.from_numpy(np.array(rewards, np.float64))  # None becomes NaN
    scores_BG += truncation_penalties(samples, args.missing_eos_penalty)
    if script.__name__ == "grpo":
        return script.ADVANTAGES[args.advantage](scores_BG)
    return script.advantages(scores_BG + script.overlong_penalties(lengths(samples), args))


def of_completions(name: str, x_PG: Tensor, completions: list[dict]) -> Iterator[Number]:
    """Yield the numbers of completions, except failed rewards and advantages of no update."""
    for c, x in zip(completions, trace.all_rounded(x_PG.flatten()), strict=True):
        if c["updates"] if name == "advantage" else c[name] is not None:
            yield name, c["place"], c[name], x


# A micro-batch and what the file has about each completion in it, from its first trained token on.
MicroBatch = tuple[PackedBatch, list[dict]]


def micro_batches(packs: list[dict], completions: list[dict]) -> dict[int, list[MicroBatch]]:
    """Return the micro-batches of all ranks, by the number of the update, packed as they were."""
    known = {}
    for c in completions:
        for u in c["updates"]:
            constant = dict(advantages=[c["advantage"]] * len(c["mask"]))
            known[u["update"], u["index"]] = c | constant | c["fixed"] | u
    updates = defaultdict(list)
    for pack in packs:
        packed = [known[pack["update"], index] for index in pack["index"]]
        sequences = []
        for c, shared in zip(packed, pack["shared"], strict=True):
            prompt = [0] * c["start"]
            streams = {name: prompt + c[name] for name in STREAMS if name in c}
            sample = Sample(c["ids"], prompt + c["loss_mask"], streams=streams)
            sequences.append(sequence_of(c["index"], sample)._replace(shared=shared))
        updates[pack["update"]].append((join([sequences], streams, CPU), packed))
    return updates


def of_tokens(
    mbs: list[MicroBatch], policy: PackedModel | None, args, script: ModuleType
) -> Iterator[Number]:
    """Yield the numbers of the tokens of an update: losses and, if there is a `policy`, its
    log-probs. The policy then has the gradient of the update."""
    num_tokens, num_sequences = count_trained([mb for mb, _ in mbs])
    names = inspect.signature(script.loss).parameters
    for mb, completions in mbs:
        inputs = mb.logprobs_T.requires_grad_(), mb.entropy_T.requires_grad_()
        is_engine = vars(args).get("old_logprobs") == "engine"
        old_logprobs_T = mb.rollout_logprobs_T if is_engine else mb.old_logprobs_T
        given = dict(mask_T=mb.loss_mask_T, num_tokens=num_tokens, num_sequences=num_sequences)
        given |= dict(old_logprobs_T=old_logprobs_T)
        given = {x: given[x] if x in given else getattr(mb, x) for x in names if x != "args"}
        share_T, logged = script.loss(**given, args=args)
        gradients = torch.autograd.grad(share_T.sum(), inputs, materialize_grads=True)
        found = dict(share=share_T, logprobs_gradient=gradients[0]) | logged
        if policy is not None:
            logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
            found |= dict(logprobs=logprobs_T, old_logprobs=logprobs_T, entropy=entropy_T)
            torch.autograd.backward((logprobs_T, entropy_T), gradients)
        for n, c in enumerate(completions):
            trained = slice(mb.offsets[n] + c["start"] - 1, mb.offsets[n + 1])
            for name, x_T in found.items():
                pairs = zip(c[name], trace.all_rounded(x_T[trained]), strict=True)
                for t, (then, now) in enumerate(pairs):
                    yield name, f"{c['place']}, update {c['update']}, token {t}", then, now
