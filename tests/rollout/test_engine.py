"""Both engines sample from exactly the trainer's weights, and completions depend only on their
seeds."""

import asyncio
import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
import torch
from engines import NEW_TOKENS, stopping
from in_process import Args
from transformers import AutoModelForCausalLM

from bench.completions import complete
from common.config.online import SLOTS
from common.metrics.meter import Meter
from common.model.policy import Policy, load_policy
from common.model.tiny import tiny_model
from common.packs.packing import pack
from common.packs.sample import Completion, Sample
from common.parallel import distributed
from common.rollout import transformers_engine
from common.rollout.engine import Engine, Request, empty_completion
from common.rollout.engines import make_engine
from common.rollout.episodes import PromptRequest
from common.rollout.sampler import ColocatedEngine
from common.rollout.vllm_engine import lost_asleep
from common.rollout.weights import sync_weights, whole_weights
from common.text.tokenizer import load_tokenizer


class Flight:
    """Requests in flight: one coroutine for each."""

    def __init__(self, engine: Engine, requests: list[Request]):
        self.engine = engine
        self.requests = requests
        self.meter = Meter()
        self.loop = asyncio.new_event_loop()
        self.tasks = [self.loop.create_task(engine.sample(request)) for request in requests]
        self.turn()

    def turn(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.engine.step(self.meter)
        self.turn()

    @property
    def ended(self) -> list[Request]:
        pairs = zip(self.requests, self.tasks, strict=True)
        return [request for request, task in pairs if task.done()]

    def finish(self) -> list[Completion]:
        while not all(task.done() for task in self.tasks):
            self.rounds(1)
        self.loop.close()
        return [request.completion for request in self.requests]


TEXTS = ("1+1=", "123+4=", "a", "the quick brown fox jumps over", "1+1=")
SEEDS = [11, 21, 31, 41, 12]  # the first and the last prompt have seeds next to each other


def prompts(engine: Engine) -> list[list[int]]:
    return [engine.tokenizer(text)["input_ids"] for text in TEXTS]


def sampled(engine: Engine, n: int = 4, temperature: float = 1.0) -> list[list[Completion]]:
    return complete(engine, prompts(engine), n, SEEDS, temperature)


def ids(groups: list[list[Completion]]) -> list[list[int]]:
    return [sample.ids for sample in chain(*groups)]


@torch.no_grad()
def difference(policy: Policy, groups: list[list[Completion]], temperature: float, device) -> float:
    """Return the largest difference between the log-probs of engine and trainer on sampled
    tokens."""
    worst = 0.0
    for mb in pack([*chain(*groups)], 1000, device):
        logprobs_T, *_ = policy(mb, temperature=temperature)
        gap_T = (logprobs_T - mb.rollout_logprobs_T).abs() * mb.loss_mask_T
        worst = max(worst, gap_T.max().item())
    return worst


@contextlib.contextmanager
def scaled(policy: Policy, name: str, factor: float) -> Iterator[None]:
    """Scale a weight of the policy inside the context, by a factor that can be undone exactly."""

    def scale(by: float) -> None:
        # a forward without a backward keeps the root's weights gathered, and would not see the
        # change
        policy.reshard()
        with torch.no_grad():
            dict(policy.named_parameters(remove_duplicate=False))[name].to_local().mul_(by)

    scale(factor)
    try:
        yield
    finally:
        scale(1 / factor)


@pytest.mark.slow
def test_prompt_is_computed_once_for_its_group_and_again_for_new_weights(engines, engine, policy):
    """vLLM caches whole blocks. Prompts of two groups share a cache as long as the weights stay the
    same."""
    if engine is not engines.get("vllm"):
        pytest.skip("only vLLM caches prompts")
    block = engine.llm.llm_engine.vllm_config.cache_config.block_size
    size, rates = block + block // 2, []
    prompt = [3 + i % 40 for i in range(size)]
    for version in (1, 2):
        engine.load_weights(whole_weights(policy, engine.dtype), version)
        for _ in range(2):
            requests = [Request(empty_completion(prompt), NEW_TOKENS, i, 1.0) for i in range(8)]
            flight = Flight(engine, requests)
            flight.finish()
            rates.append(flight.meter.reduce()["engine/prefix_hit_rate"] * size / block)
    assert rates == pytest.approx([7 / 8, 1, 7 / 8, 1])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_engine_and_trainer_agree_on_the_synced_weights(synced, policy, device, temperature):
    groups = sampled(synced, 4, temperature)
    assert difference(policy, groups, temperature, device) < 1e-4
    assert difference(policy, groups, temperature * 1.1, device) > 1e-3  # it has an effect


def submitted(
    engine: Engine, count: int, temperature: float = 1.0, limits: list[int] | None = None
) -> Flight:
    given, limits = prompts(engine), limits or [NEW_TOKENS] * count
    empty = [empty_completion(given[i % len(given)]) for i in range(count)]
    requests = [Request(empty[i], limits[i], 1000 * i, temperature) for i in range(count)]
    return Flight(engine, requests)


def test_in_flight_requests_continue_under_new_weights_and_record_versions(synced, policy, device):
    """Every token has the log-prob of the weights that sampled it, and of no others."""
    flight = submitted(synced, 80)
    # transformers samples 64 turns to their ends
    flight.rounds(1 if type(synced).__name__ == "TransformersEngine" else 5)
    with scaled(policy, "hf.lm_head.weight", 2.0):
        synced.load_weights(whole_weights(policy, synced.dtype), version=7)
        completions = flight.finish()
        packs = pack(completions, 1000, device)
        with torch.no_grad():
            new = [policy(mb)[0] for mb in packs]
    with torch.no_grad():
        old = [policy(mb)[0] for mb in packs]
    own, other = [], []
    for mb, new_T, old_T in zip(packs, new, old, strict=True):
        by_new_T, sampled_T = mb.versions_T == 7, mb.loss_mask_T
        own.append((torch.where(by_new_T, new_T, old_T) - mb.rollout_logprobs_T)[sampled_T].abs())
        other.append((torch.where(by_new_T, old_T, new_T) - mb.rollout_logprobs_T)[sampled_T].abs())
        assert set(mb.versions_T[sampled_T].tolist()) <= {0, 7}
        assert (mb.versions_T[~sampled_T] == -1).all()
    assert torch.cat(own).max() < 1e-4 and torch.cat(other).mean() > 1e-2
    spread = {(completion.version, max(completion.versions)) for completion in completions}
    assert {(0, 7), (7, 7)} & spread


@pytest.mark.parametrize("stops", [False, True])
def test_interrupted_requests_end_as_uninterrupted_ones(synced, policy, stops):
    """Weights are loaded after every third round: the same ones. A stop string may span two."""
    texts = [completion.text for completion in submitted(synced, 12).finish()]
    names = synced.tokenizer.decode([*synced.silent_ids]) + "\ufffd"
    pairs = {text[i : i + 2] for text in texts for i in range(3, len(text) - 1)}
    pairs = sorted(pair for pair in pairs if not {*pair} & {*names})
    with stopping(synced, tuple(pairs) if stops else ()):
        ended = require_equal_ends(synced, policy)
    assert not stops or sum(x != text for x, text in zip(ended, texts, strict=True)) > 3, texts


def require_equal_ends(synced, policy) -> list[str]:
    whole = submitted(synced, 12).finish()
    flight = submitted(synced, 12)
    for version in range(1, 4):
        flight.rounds(3)
        synced.load_weights(whole_weights(policy, synced.dtype), version)
    completions = flight.finish()
    assert [completion.ids for completion in completions] == [x.ids for x in whole]
    logprobs = torch.tensor([x for each in whole for x in each.rollout_logprobs])
    again = torch.tensor([x for each in completions for x in each.rollout_logprobs])
    assert (logprobs - again).abs().max() < 1e-5
    versions = [[v for v in each.versions if v >= 0] for each in completions]
    assert all(each == sorted(each) for each in versions)
    if hasattr(synced, "llm"):
        assert {0, 1, 2, 3} == {v for each in versions for v in each}
    synced.load_weights(whole_weights(policy, synced.dtype))
    return [completion.text for completion in completions]


def test_smaller_priorities_run_first(synced, monkeypatch):
    """More requests than run at a time: the last ones come first."""
    room = 64 if type(synced).__name__ == "TransformersEngine" else SLOTS
    monkeypatch.setattr(transformers_engine, "BATCH", room)
    completions = [empty_completion(prompts(synced)[0]) for _ in range(room + 8)]
    requests = [Request(each, 4, i, 1.0, priority=-i) for i, each in enumerate(completions)]
    flight = Flight(synced, requests)
    while not flight.ended:
        flight.rounds(1)
    assert not any(request.completion.completion_ids for request in requests[:8])
    flight.finish()


def test_unsynced_weights_are_detected(synced, policy, device):
    """Negative control: the same comparison detects weights that did not arrive, also if only the
    tied head is old."""
    groups = sampled(synced)
    with scaled(policy, "hf.lm_head.weight", 2.0):
        stale = difference(policy, sampled(synced), 1.0, device)
        synced.load_weights(whole_weights(policy, synced.dtype))
        fresh = difference(policy, sampled(synced), 1.0, device)
    assert stale > 1e-2 and fresh < 1e-4
    synced.load_weights(whole_weights(policy, synced.dtype))
    assert ids(sampled(synced)) == ids(groups)


def silent_sync(engine: Engine, without: str):
    """Return a `load_weights` that leaves out names with `without`, and says nothing."""
    original = engine.load_weights

    def load(weights, version=0):
        kept = [(name, weight) for name, weight in weights if without not in name]
        if kept:
            original(iter(kept), version)

    return load


@pytest.mark.parametrize("without", ["", "layers.2."])
def test_a_sync_without_effect_ends_the_run(without, synced, policy, monkeypatch):
    """Of all weights, or of one block, which would change log-probs less than rounding does."""
    with (
        scaled(policy, "hf.model.layers.2.mlp.down_proj.weight", 1 + 2**-10),
        monkeypatch.context() as patch,
    ):
        patch.setattr(synced, "load_weights", silent_sync(synced, without))
        words = r"--engine \w+: 1 of \d+ weights are not those of step 7, for example layers.2.mlp"
        with pytest.raises(distributed.RunError, match=words):
            sync_weights(synced, whole_weights(policy, synced.dtype), 7)
    sync_weights(synced, whole_weights(policy, synced.dtype))


def test_layouts_that_hide_weights_are_told(synced, policy, monkeypatch, capsys):
    monkeypatch.setattr(synced, "held_weights", lambda: iter(()))
    for _ in range(2):
        sync_weights(synced, whole_weights(policy, synced.dtype))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "hides whether their weights are the newest" in said[0]


@pytest.mark.parametrize("sleeps", [False, True])
def test_weights_around_an_evaluation_are_sent_once(sleeps, engine, policy, monkeypatch):
    """Also if they are lost when the engine sleeps: it stays awake until the next rollout.
    Otherwise it forgets prefixes: a resumed run has none of the evaluation before its step."""
    calls: list[str] = []
    for name in ("load_weights", "sleep"):
        original = getattr(engine, name)
        monkeypatch.setattr(
            engine, name, lambda *args, n=name, f=original: (calls.append(n), f(*args))
        )
    monkeypatch.setattr(engine, "keeps_weights", not sleeps)
    monkeypatch.setattr("common.rollout.sampler.make_engine", lambda *_, **__: engine)
    source = ColocatedEngine(policy, Args(max_new_tokens=4), engine.tokenizer, lambda group: None)
    prompt = prompts(engine)[0]
    for numbers, step in (([0], 0), ([-1], 1), ([1], 1), ([2], 1), ([3], 2), ([-1], 3)):
        requests = [PromptRequest(number, prompt, {}, number, 2, 1.0) for number in numbers]
        groups = source.complete(requests, numbers, step, Meter(), stops=numbers[0] >= 0)
        assert len(groups[0]) == 2
    source.episodes.close()
    load, sleep = "load_weights", "sleep"
    of_steps = [
        [load, sleep],
        [load, sleep, load, sleep] if sleeps else [load, sleep, sleep, sleep],
        [load, sleep],
        [load] if sleeps else [load, sleep],
    ]
    assert calls == [*chain(*of_steps)]


def test_prefixes_of_old_weights_are_not_reused(synced, policy, device):
    """The same prompt is sampled before and after a change, which would expose a stale KV cache."""
    prompt = [prompts(synced)[3] * 6]
    complete(synced, prompt, 2, [1], 1.0)
    with scaled(policy, "hf.model.layers.0.self_attn.v_proj.weight", -1.0):
        synced.load_weights(whole_weights(policy, synced.dtype))
        assert difference(policy, complete(synced, prompt, 2, [1], 1.0), 1.0, device) < 1e-4


def test_completions_depend_on_their_seeds_alone(synced):
    """Neither on the other prompts nor on the number of samples. Samples of one prompt differ, and
    so do those of equal prompts with other seeds."""
    groups = sampled(synced, 3)
    whole = zip(prompts(synced), SEEDS, groups, sampled(synced, 2), strict=True)
    for prompt, seed, group, fewer in whole:
        alone = complete(synced, [prompt], 3, [seed], 1.0)
        assert ids(alone) == ids([group]) and ids([group[:2]]) == ids([fewer])
        for x, y in zip(group, alone[0], strict=True):
            assert x.rollout_logprobs == pytest.approx(y.rollout_logprobs, abs=1e-5)
    assert TEXTS[0] == TEXTS[4] and len({*map(tuple, ids([groups[0], groups[4]]))}) == 6


def test_fields_of_a_completion_are_consistent(synced):
    """Ids, mask and log-probs have equal lengths; an EOS ends a completion, belongs to it and is
    trained."""
    reasons = set()
    for prompt, group in zip(prompts(synced), sampled(synced, 16, 1.6), strict=True):
        assert len(group) == 16
        for s in group:
            completion = s.completion_ids
            assert s.ids[: s.prompt_length] == prompt and 1 <= len(completion) <= NEW_TOKENS
            assert s.loss_mask == [False] * len(prompt) + [True] * len(completion)
            logprobs = s.rollout_logprobs
            assert len(logprobs) == len(s.ids) and not any(logprobs[: len(prompt)])
            assert all(logprob < 0 for logprob in logprobs[len(prompt) :])
            ends = [i for i, token in enumerate(completion) if token in synced.eos_ids]
            assert ends in ([], [len(completion) - 1])
            assert s.finish_reason == ("stop" if ends else "length")
            assert ends or len(completion) == NEW_TOKENS
            spoken = [i for i in completion if i not in synced.silent_ids]
            assert s.text == synced.tokenizer.decode(spoken)
            reasons.add((s.finish_reason, completion[-1] if ends else None))
    assert len(synced.eos_ids) == 2  # each ends a completion
    assert reasons == {("length", None)} | {("stop", eos) for eos in synced.eos_ids}


def test_requests_have_separate_length_limits(synced):
    """The tokens before the limit equal those without it."""
    limits, whole = [3, 1, 7, 2, 5], submitted(synced, 5).finish()
    cut = submitted(synced, 5, limits=limits).finish()
    for limit, completion, without in zip(limits, cut, whole, strict=True):
        assert completion.completion_ids == without.completion_ids[:limit]
        is_cut = len(without.completion_ids) > limit
        assert completion.finish_reason == ("length" if is_cut else without.finish_reason)
    assert "length" in {completion.finish_reason for completion in cut}


def test_temperature_0_is_greedy(synced, policy, device):
    plain = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).to(device)
    plain.load_state_dict(dict(whole_weights(policy, torch.float32)))
    ends = [[token] for token in synced.eos_ids]
    groups = complete(synced, prompts(synced), 1, [0] * len(TEXTS), 0.0)
    for prompt, (sample,) in zip(prompts(synced), groups, strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + NEW_TOKENS and ids[len(prompt) :][-1:] not in ends:
            with torch.no_grad():
                ids.append(int(plain(torch.tensor([ids], device=device)).logits[0, -1].argmax()))
        assert sample.ids == ids
    assert difference(policy, groups, 1.0, device) < 1e-4  # log-probs at temperature 1


def test_tensors_lost_during_sleep_are_named(synced):
    """An ordinary model loses none; a tensor that is neither weight nor buffer is named."""
    if not hasattr(synced, "llm"):
        pytest.skip("only vLLM sleeps")

    def with_a_table(worker) -> list[str]:
        module = worker.get_model().model.layers[0]
        module.table = torch.ones(3)
        try:
            return lost_asleep(worker)
        finally:
            del module.table

    assert synced.llm.collective_rpc(lost_asleep) == [[]]
    assert synced.llm.collective_rpc(with_a_table) == [["model.layers.0.table"]]


def test_global_generators_are_unchanged(synced):
    def draw() -> tuple:
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()

    def seed() -> None:
        for start in (torch.manual_seed, np.random.seed, random.seed):
            start(0)

    seed()
    expected = draw()
    seed()
    sampled(synced)
    assert draw() == expected


def naive_truncation(p: torch.Tensor, top_p: float, top_k: int, min_p: float) -> torch.Tensor:
    """Return the truncated distribution in vLLM's order: min_p, top_k, top_p of what is left."""
    kept = {i: x for i, x in enumerate(p.tolist()) if x >= min_p * p.max().item()}
    best = sorted(kept, key=kept.__getitem__, reverse=True)[: top_k or None]
    total, mass, nucleus = sum(kept[i] for i in best), 0.0, []
    for i in best:
        if mass < top_p * total:
            nucleus.append(i)
        mass += kept[i]
    out = torch.zeros_like(p)
    out[nucleus] = p[nucleus]
    return out / out.sum()


# Each flag alone leaves another number of tokens, and so does each pair.
TRUNCATIONS = (
    None,
    dict(top_p=0.8, top_k=0, min_p=0.0),
    dict(top_p=1.0, top_k=7, min_p=0.0),
    dict(top_p=1.0, top_k=0, min_p=0.3),
    dict(top_p=0.7, top_k=12, min_p=0.15),
)


@contextlib.contextmanager
def truncating(engine: Engine, truncation: dict | None) -> Iterator[None]:
    engine.truncation = truncation
    try:
        yield
    finally:
        engine.truncation = None


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_sampling_follows_the_distribution(synced, policy, device, truncation):
    """Compare first tokens of many samples with the exact probabilities, at a temperature other
    than 1. Recorded log-probs are those of the sampled distribution."""
    prompt, count, temperature = prompts(synced)[0], 2000, 0.5
    requests = [Request(empty_completion(prompt), 1, 5 + i, temperature) for i in range(count)]
    with truncating(synced, truncation):
        completions = Flight(synced, requests).finish()
    tokens = torch.tensor([completion.ids[-1] for completion in completions])
    counts = torch.bincount(tokens, minlength=len(synced.tokenizer))
    everything = [
        Sample(ids=[*prompt, token], loss_mask=[True] * (len(prompt) + 1))
        for token in range(len(counts))
    ]
    with torch.no_grad():
        (mb,) = pack(everything, 10**5, device)
        last = (mb.cu_seqlens_N1[1:] - 1).long()
        p = policy(mb, temperature=temperature)[0][last].exp().cpu().double()
    p = p[mb.targets_T[last].cpu().argsort()]
    assert abs(p.sum().item() - 1) < 1e-4
    if truncation is not None:
        p = naive_truncation(p, **truncation)
        assert 2 < (p > 0).sum() < len(p) / 2 and counts[p == 0].sum() == 0
        counts, p, all_p = counts[p > 0], p[p > 0], p
        logprobs = torch.tensor([request.completion.rollout_logprobs[-1] for request in requests])
        assert (logprobs - all_p[tokens].log()).abs().max() < 1e-4
    chi_square = ((counts - count * p).square() / (count * p)).sum().item()
    degrees = len(p) - 1
    assert abs(chi_square - degrees) < 6 * (2 * degrees) ** 0.5


def test_generation_config_of_the_model_is_ignored(tmp_path, device):
    """By the transformers engine; the flag generation_config="vllm" does this for vLLM."""
    path = shutil.copytree(tiny_model(), tmp_path / "model")
    config = json.loads((path / "generation_config.json").read_text())
    config |= dict(do_sample=True, temperature=0.3, top_k=5, top_p=0.5, repetition_penalty=1.5)
    (path / "generation_config.json").write_text(json.dumps(config))
    args = Args(dtype="float32", engine="transformers", max_new_tokens=NEW_TOKENS)
    policy = load_policy(str(path), args, device)
    engine = make_engine(str(path), args, load_tokenizer(path), device)
    assert difference(policy, sampled(engine), 1.0, device) < 1e-4
