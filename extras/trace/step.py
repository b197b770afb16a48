"""A step in a file: what replay.py packs, and how anybody computes it again without the run.

A step.zip has neither pickles nor code: who opens it runs the functions of their own scripts.
step.json has flags, micro-batches, the gradient of the first update, and the rows with the texts
that rewards read; trace.jsonl all groups, with all digits; hf/ the weights before the step."""

import importlib
import inspect
import json
import math
import shutil
import sys
import zipfile
from collections import defaultdict
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from common.config.groups import flags_of
from common.metrics.meter import Meter
from common.model.loading import load_config, named_errors, whole
from common.model.policy import load_policy
from common.objectives.importance import importance_weights
from common.objectives.kl import kl_estimate
from common.packs.packing import PackedBatch, count_trained, join, per_sample
from common.packs.sample import Completion
from common.packs.tokens import TokenSequence
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

SCRIPTS = {"grpo", "dapo", "reinforce", "rloo"}
PARTS = "step"  # folder in that of the replay
WEIGHTS = "hf/model.safetensors"
NAMES = {"step.json", "trace.jsonl", "metrics.jsonl", "hf/config.json", WEIGHTS}
LARGEST, LARGEST_MODEL = 2**28, 10**8  # bytes of all parts, and of the weights
MOST_LAYERS = 1000
# Rewards that are computed again: `code`, or a user's, would run what the sender wrote.
SAFE = {*REWARDS, "math", "countdown", "choice", "stated", "ifeval"}
STREAMS = "logprobs entropy old_logprobs rollout_logprobs ref_logprobs advantages".split()
ROUNDING = 1e-5  # a difference below this share of the largest number is none
EXACT = 17  # digits of a number that is read as it was


# ---- in each rank of the replay ----


class Recorder:
    """What a replay writes to `parts` beside its trace."""

    def __init__(self, run: Run, parts: Path):
        """Begin before the step, with its weights. Collective."""
        trace.GROUPS, trace.DIGITS = sys.maxsize, EXACT
        self.run, self.parts, self.gradient = run, parts, {}
        args, model = run.args, run.models[0]
        module = sys.modules[type(args).__module__]
        optimizer_step = module.optimizer_step

        def step(*given):
            self.gradient = self.gradient or gradient_of(model)
            return optimizer_step(*given)

        module.optimizer_step = step
        is_small = 4 * sum(p.numel() for p in model.parameters()) <= LARGEST_MODEL
        if is_small and not (args.lora_rank or args.vision or args.context_ranks > 1):
            config = json.loads(run.checkpointer.files.get("config.json", "{}"))
            config |= dict(dtype="float32", torch_dtype="float32")
            write_model(model, {"config.json": json.dumps(config).encode()}, parts / "hf")

    def write(self) -> None:
        """Write the rest, after the updates. Collective."""
        args, now = self.run.args, self.run.trace
        thoughts, rows, packs = Thoughts(now.tokenizer, cut=True), {}, []
        for position, group in now.sampled.items():
            row = {name: x for name, x in group[0][0].row.items() if name[:1] != "_"}
            rows[position] = dict(row=row, texts=[thoughts.opened(c) + c.text for c, _ in group])
        for update, mb in ((forward.update, forward.mb) for forward in now.forwards):
            shared = [*map(int.__sub__, mb.lengths, mb.model_tokens.lengths)]
            packs.append(dict(update=update, index=mb.index_N.tolist(), shared=shared))
        rows, packs = distributed.gather_dict(rows), distributed.gather_objects(packs)
        dtype = str(self.run.models[0].compute_dtype).removeprefix("torch.")
        about = dict(
            script=type(args).__module__, step=self.run.finished + 1, gradient=self.gradient,
            flags=flags_of(args) | dict(dtype=dtype), template=template_text(now.tokenizer),
            packs=[*chain(*packs)], rows=[rows[position] for position in sorted(rows)],
        )  # fmt: skip
        if distributed.is_main():
            (self.parts / "step.json").write_text(json.dumps(about, default=str))


def gradient_of(model: nn.Module) -> dict[str, list[float]]:
    """Return the norm and the sum of the gradient of each parameter. Collective."""
    scale = 1.0 if model.loss_scale is None else model.loss_scale[0].item()  # of float16
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients = {name: whole(x).double() / scale for name, x in gradients.items()}
    return {name: [x.norm().item(), x.sum().item()] for name, x in gradients.items()}


# ---- the file ----


def pack(folder: Path, step: int, out: Path) -> None:
    """Pack what the replay in `folder` has written."""
    lines = trace_file.read(folder / "trace" / f"step_{step:06}.jsonl.gz")
    (folder / PARTS / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shutil.copy(folder / "metrics.jsonl", folder / PARTS)
    files = {name: folder / PARTS / name for name in sorted(NAMES)}
    files = {name: path for name, path in files.items() if path.is_file()}
    if (size := sum(path.stat().st_size for path in files.values())) > LARGEST:
        raise ValueError(f"--pack {out}: {size / 1e9:.1f} GB are too much for a file")
    with zipfile.ZipFile(out, "x", zipfile.ZIP_DEFLATED) as file:
        for name, path in files.items():
            file.write(path, name)
    print(visible(f"{out}: {out.stat().st_size / 1e6:.1f} MB"))


def unpack(path: Path, folder: Path) -> tuple[dict, list[dict]]:
    """Write a step to a new `folder` in the form of a run; return step.json and the groups. Raises
    `ValueError` for any other file; it writes nothing of one with other parts."""
    with named_errors(f"{path}: no packed step"), zipfile.ZipFile(path) as file:
        members = file.infolist()
        if wrong := [x.filename for x in members if x.filename not in NAMES]:
            raise ValueError(f"its part {wrong[0]!r:.80} is unknown")
        kinds = {x.compress_type for x in members} - {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
        if kinds or sum(x.file_size for x in members) > LARGEST:
            raise ValueError("its parts are too large, or compressed in another way")
        (folder / "hf").mkdir(parents=True)
        for member in members:
            with file.open(member) as source, (folder / member.filename).open("wb") as target:
                shutil.copyfileobj(source, target)
        about = json.loads((folder / "step.json").read_bytes())
        lines = [*map(json.loads, (folder / "trace.jsonl").open(encoding="utf-8"))]
        trace_path = folder / "trace" / f"step_{int(about['step']):06}.jsonl.gz"
        trace_file.write(trace_path, lines)
        (folder / "args.yaml").write_text(json.dumps(about["flags"]))
        return about, sorted(trace_file.read(trace_path)[1:], key=lambda group: group["group"])


# ---- the step again ----


def check(path: Path) -> int:
    """Compute a packed step again, print what differs, and return the exit status."""
    with TemporaryDirectory() as temporary:
        about, groups = unpack(path, folder := Path(temporary, "step"))
        hf = folder / "hf" if (folder / WEIGHTS).is_file() else None
        with named_errors(f"{path}: no packed step"):
            found = compute(about, groups, hf)
            lines = [verdict(quantity, numbers) for quantity, numbers in found.items()]
    if others := [name for name in about["flags"]["reward"] if name not in SAFE]:
        lines.append(f"not run, but taken as recorded: reward {', '.join(others)}")
    if hf is None:
        lines.append("not checked, because the file has no weights: log-probs, gradient")
    print(visible("\n".join([f"{path}: step {about['step']} of {about['script']}.py", *lines])))
    return int(any("DIFFER" in line for line in lines))


def verdict(quantity: str, numbers: list[tuple[str, list, list]]) -> str:
    """Say whether a quantity differs, by how much, and where first."""
    pairs = [
        (place.replace("#", str(t)), x, y)
        for place, then, now in numbers
        for t, (x, y) in enumerate(zip(then, now, strict=True))
    ]
    largest = max((abs(x) for _, x, _ in pairs if x is not None), default=0.0)
    apart = [(math.inf if None in (x, y) else abs(x - y), p, x, y) for p, x, y in pairs if x != y]
    wrong = [each for each in apart if each[0] > ROUNDING * largest]
    if not wrong:
        rounding = f", but for rounding by up to {max(apart)[0]:.1g}" if apart else ""
        return f"{quantity}: {len(pairs)} equal{rounding}"
    _, place, x, y = wrong[0]
    by = max(size for size, *_ in wrong)
    count = f"{len(wrong)} of {len(pairs)} DIFFER by up to {by:.3g}"
    return f"{quantity}: {count}; first {place}: {x} in the file, {y} here"


def compute(
    about: dict, groups: list[dict], hf: Path | None
) -> dict[str, list[tuple[str, list, list]]]:
    """Compute each quantity of a step from other numbers of the file, whose model is in `hf`.
    Return by quantity the places, the numbers of the file there, and those computed here."""
    if (script := about["script"]) not in SCRIPTS:
        raise ValueError("its script is unknown")
    trace.DIGITS = EXACT
    module, cpu, flags = importlib.import_module(script), torch.device("cpu"), about["flags"]
    safe = [name for name in flags["reward"] if name in SAFE]
    weights = flags["reward_weights"] if len(safe) == len(flags["reward"]) else ()
    args = object.__new__(module.Args)  # unchecked, because checks open files that flags name
    vars(args).update(flags | dict(reward=safe, reward_weights=weights, max_reward_errors=1.0))
    vars(args).update(reward_workers=2, reward_timeout=10.0)
    found = defaultdict(list)
    samples, trained = [], {}  # trained: by update and index
    for group, row in zip(groups, about["rows"], strict=True):
        samples.append([])
        for g, (c, text) in enumerate(zip(group["completions"], row["texts"], strict=True)):
            mask, source = [False] * c["start"] + c["mask"], dict(_source="its row")
            sample = Completion(c["ids"], mask, c["start"], row["row"] | source, text=text)
            sample.finish_reason = c["finish_reason"]
            samples[-1].append(sample)
            c["place"] = f"group {group['group']}, completion {g}"
            for u in c["updates"]:
                known = dict(advantages=[c["advantage"]] * len(c["mask"]), row={}) | c["fixed"] | u
                trained[u["update"], u["index"]] = c, known

    def add_table(name: str, x_PG: Tensor) -> None:
        """Add numbers of completions; no rewards that failed."""
        for group, x_G in zip(groups, x_PG, strict=True):
            for c, x in zip(group["completions"], trace.all_rounded(x_G), strict=True):
                if c["updates"] if name == "advantage" else c[name] is not None:
                    found[name].append((c["place"], [c[name]], [x]))

    def add(name: str, mb: PackedBatch, x: Tensor) -> None:
        """Add numbers of the tokens of a micro-batch or, in rloo.py, of its completions."""
        for n, index in enumerate(mb.index_N.tolist()):
            c, known = trained[mb.update, index]
            place = f"{c['place']}, update {mb.update}"
            if name in known["row"]:
                then, now = [known["row"][name]], x[n : n + 1]
            else:
                then, now = known[name], x[mb.offsets[n] + c["start"] - 1 : mb.offsets[n + 1]]
                place += ", token #"
            found[name].append((place, then, trace.all_rounded(now)))

    # ---- rewards, by built-in functions alone ----
    if safe:
        tokenizer = SimpleNamespace(chat_template=about["template"], decode=lambda ids: "")
        total_PG, by_name, _ = Rewards(args, [], tokenizer, cpu).wait(samples, Meter())
        total = dict(reward=total_PG) if len(safe) == len(flags["reward"]) else {}
        for name, x_PG in (by_name | total).items():
            add_table(name, x_PG)

    # ---- micro-batches, as the ranks had them ----
    updates = defaultdict(list)
    for each in about["packs"]:
        sequences = []
        for index, shared in zip(each["index"], each["shared"], strict=True):
            c, known = trained[each["update"], index]
            padded = {name: [0] * c["start"] + known[name] for name in STREAMS if name in known}
            streams = {name: np.array(x, np.float32) for name, x in padded.items()}
            mask = np.array([0] * c["start"] + known["loss_mask"], bool)
            ids = np.array(c["ids"], np.int32)
            sequences.append(TokenSequence(index, ids, mask, streams, shared=shared))
        if sequences:  # a rank may have none
            mb = join([sequences], streams, cpu)
            mb.update = each["update"]
            updates[mb.update].append(mb)

    # ---- advantages, from the rewards of the file ----
    first = [mb for mb in chain(*updates.values()) if mb.update < args.minibatches]  # each once
    penalties_BG = truncation_penalties(samples, args.missing_eos_penalty)
    if script == "dapo":
        penalties_BG = penalties_BG + module.overlong_penalties(lengths(samples), args)
    rewards = [[c["reward"] for c in group["completions"]] for group in groups]
    rewards_BG = torch.from_numpy(np.array(rewards, np.float64)) + penalties_BG  # None: NaN
    if script == "rloo" and args.beta:
        kl = [kl_estimate(mb.old_logprobs_T, mb.ref_logprobs_T, "k1") for mb in first]
        kl = [mb.sequence_sums(kl_T) for mb, kl_T in zip(first, kl, strict=True)]
        rewards_BG = rewards_BG - args.beta * per_sample(first, kl, rewards_BG.shape)
    if script == "reinforce":
        for mb in chain(*module.with_advantages([first], rewards_BG, args)):
            add("advantages", mb, mb.advantages_T)
    else:
        function = module.ADVANTAGES[args.advantage] if script == "grpo" else module.advantages
        add_table("advantage", function(rewards_BG))

    # ---- losses; with the model, log-probs and the gradient of the first update ----
    if hf is not None:
        if load_config(hf).get_text_config().num_hidden_layers > MOST_LAYERS:
            raise ValueError("its model has too many layers")
        policy = load_policy(str(hf), module.Args(dtype=args.dtype), distributed.setup(0)[0])
    for mb in chain(*updates.values()):
        mb.logprobs_T.requires_grad_()
        mb.entropy_T.requires_grad_()
        is_engine = getattr(args, "old_logprobs", None) == "engine"
        old_T = mb.rollout_logprobs_T if is_engine else mb.old_logprobs_T
        tokens, sequences = count_trained(updates[mb.update])
        given = dict(old_logprobs_T=old_T, mask_T=mb.loss_mask_T, tokens=tokens, args=args)
        given |= dict(sequences=sequences, num_completions=sequences)
        if script == "rloo":
            where = mb.loss_mask_T, mb.sequence_ids_T, args.correction_form
            A = [trained[mb.update, index][0]["advantage"] for index in mb.index_N.tolist()]
            given |= dict(
                logprobs_N=mb.sequence_sums(mb.logprobs_T), old_logprobs_N=mb.sequence_sums(old_T),
                weights_N=importance_weights(old_T, mb.rollout_logprobs_T, *where)[mb.ends_N],
                advantages_N=torch.tensor(A, dtype=torch.float64),
            )  # fmt: skip
        names = inspect.signature(module.loss).parameters
        share, logged = module.loss(**{x: given.get(x, getattr(mb, x, None)) for x in names})
        share.sum().backward()
        for name, x in (dict(share=share, logprobs_gradient=mb.logprobs_T.grad) | logged).items():
            add(name, mb, x)
        if hf is not None and mb.update == 0:
            logprobs_T, entropy_T, *_ = policy(mb, temperature=args.temperature)
            computed = dict(logprobs=logprobs_T, old_logprobs=logprobs_T, entropy=entropy_T)
            for name, x_T in computed.items():
                add(name, mb, x_T)
            total = (logprobs_T * mb.logprobs_T.grad).sum()
            if mb.entropy_T.grad is not None:
                total = total + (entropy_T * mb.entropy_T.grad).sum()
            total.backward()
    for name, then in about["gradient"].items() if hf is not None else ():
        found["gradient"].append((name, then, gradient_of(policy)[name]))
    return found
