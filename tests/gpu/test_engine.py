"""Engine and policy on one GPU: sleep, wake, weights, log-probs. Each case is a process of its own (in_engine.py)."""

from pathlib import Path

import pytest
from conftest import talkative
from on_gpu import DTYPES, ENGINES, gpu, measured

PROGRAM = Path(__file__).parent / "in_engine.py"
pytestmark = [gpu(1), pytest.mark.parametrize("engine", ENGINES)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_three_cycles_of_sleep_leave_a_fresh_engine(engine, dtype):
    """Sleep gives weights and KV cache back to the driver, and waking maps them again with nothing in them: greedy
    completions after sleep, wake, load_weights, three times, are those of the engine before it ever slept, other
    weights give others, and no cycle keeps memory. CPU twin: test_engine.test_without_the_sync_they_differ (there is
    no sleep on a CPU)."""
    found = measured(PROGRAM, "cycles", engine, dtype, "tiny")
    assert found["same"] == [True] * 3 and found["changed"]
    assert max(found["free"]) - min(found["free"]) <= 200e6, found["free"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_seeded_samples_are_those_of_the_trainer(engine, dtype):
    """Other kernels compute the same model in the engine than in the trainer: attention, norms, the head in another
    precision, in float32 perhaps TF32. At temperatures 1 and 0.7 the log-probs of what was sampled agree within 0.02
    nats in the mean in bfloat16 and 1e-3 at every token in float32; at another temperature they do not, and a seed
    gives its samples again. CPU twin: test_engine.test_engine_and_trainer_agree_on_the_synced_weights."""
    for at in measured(PROGRAM, "agreement", engine, dtype, "tiny").values():
        assert at["mean"] < 0.02 if dtype == "bfloat16" else at["max"] < 1e-3, at
        assert at["wrong"]["mean"] > 0.02 and at["tokens"] > 1000 and at["again"], at


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_sleep_right_after_completions_that_ended_early(engine, dtype, tmp_path):
    """An engine that schedules ahead may still be at work on requests that have ended when its memory is taken away, or
    hold their blocks when its prefix cache is to be emptied for new weights. CPU twin:
    test_engine.test_what_a_sample_holds, without sleep."""
    found = measured(PROGRAM, "early_ends", engine, dtype, talkative(tmp_path / "talkative"))
    assert found["same"] == [True] * 4
    assert len(found["lengths"]) > 3 and found["lengths"][0] == 1 and "stop" in found["reasons"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_of_adam_between_sleep_and_wake(engine, dtype):
    """Gradients, optimizer states and what the allocator caches take the memory that the engine gave back, and must
    leave it; what wakes has the new weights. CPU twin: test_grpo.test_engine_and_trainer_agree_on_every_step."""
    found = measured(PROGRAM, "step", engine, dtype, "tiny")
    bound = 0.02 if dtype == "bfloat16" else 1e-3
    assert found["grad_norm"] > 0 and found["stale"]["mean"] > 2 * bound > 2 * found["after"]["mean"], found
