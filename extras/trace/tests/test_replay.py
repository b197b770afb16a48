"""A replayed step has the weights of the run; changed flags change this step alone."""

import importlib
import shutil
import sys

import pytest
from helpers import ROOT
from in_process import call_main
from processes import run

from extras.trace import replay
from extras.trace.tests.test_trace import LARGE_STEPS, SCRIPTS, flags, traces

EQUAL = "the weights after it are bitwise those of the run; "


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """A replay loads a script again and changes its Run. Give the other tests of this process the
    old modules back."""
    for script in SCRIPTS:
        monkeypatch.setitem(
            sys.modules, script, sys.modules.get(script) or importlib.import_module(script)
        )


@pytest.fixture
def here(main, monkeypatch):
    """Replay in this process, by running the script's `main` in it."""

    def launch(ranks, log, script, step, *words):
        module = replay.load_script(script)
        module.Run, replay.ReplayRun.replayed = replay.ReplayRun, int(step)
        main(module.__name__, *words)

    monkeypatch.setattr(replay, "launch", launch)


def forked(ranks, log, *words):
    """Replay in forked ranks. Another test has the launch by torchrun."""
    run(ranks, replay.__file__, "--work", *words)


@pytest.mark.slow
def test_step_from_a_checkpoint_is_exact_and_a_changed_flag_holds_in_it_alone(
    main, here, small, tmp_path, capsys
):
    run = tmp_path / "run"
    main("ppo", *flags(small, "ppo", run, "--max_steps", 3, "--save_every", 1, "--keep_last", 3))
    replay.replay(run, 2, ["--lr", "1e-3"])
    shown = capsys.readouterr().out
    assert "run/checkpoints/step_000001\n" in shown and f"step 2: {EQUAL}" in shown
    exact, changed = (run / "replay" / name for name in ("step_000002", "step_000002_lr_1e-3"))
    (one, *groups), (two, *others) = traces(exact)[2], traces(changed)[2]
    assert one["weights"] == traces(run)[2][0]["weights"] != two["weights"]
    ids, other_ids = (
        [c["ids"] for group in each for c in group["completions"]] for each in (groups, others)
    )
    assert ids == other_ids and "  grad_norm " in shown
    assert sorted(traces(exact)) == sorted(traces(changed)) == [2]  # it ends after the step


@pytest.mark.slow
def test_two_ranks_trace_what_one_rank_traces_and_repeat_it(
    main, small, tmp_path, capsys, monkeypatch
):
    """Only for the first step: weights of later steps differ by rounding, and so do the samples."""
    one_rank, two_ranks = tmp_path / "one", tmp_path / "two"
    main("grpo", *flags(small, "reinforce", one_rank, *LARGE_STEPS))
    run(2, ROOT / "grpo.py", *flags(small, "reinforce", two_ranks, *LARGE_STEPS))
    (one, *groups), (two, *other_groups) = traces(one_rank)[1], traces(two_ranks)[1]
    assert len(one["weights"]) == 1 and len(two["weights"]) == 2
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-4, abs=1e-6)
    for group, other in zip(groups, other_groups, strict=True):
        assert all(group[key] == other[key] for key in ("group", "chosen", "prompt"))
        for x, y in zip(group["completions"], other["completions"], strict=True):
            assert x["ids"] == y["ids"] and x["reward"] == y["reward"]
            for u, v in zip(x["updates"], y["updates"], strict=True):
                assert u["share"] == pytest.approx(v["share"], rel=1e-3, abs=1e-6)

    monkeypatch.setattr(replay, "launch", forked)
    replay.replay(two_ranks, 2, [])
    shown = capsys.readouterr().out
    assert "from the start of the run" in shown and f"step 2: {EQUAL}" in shown


@pytest.mark.slow
def test_rollout_ranks_are_started_too(small, tmp_path, capsys, monkeypatch):
    apart = ("--rollout_ranks", 1, "--max_staleness", 0, "--max_steps", 2)
    run(2, ROOT / "grpo.py", *flags(small, "reinforce", tmp_path, *LARGE_STEPS, *apart))
    monkeypatch.setattr(replay, "launch", forked)
    replay.replay(tmp_path, 2, [])
    assert f"step 2: {EQUAL}" in capsys.readouterr().out


@pytest.mark.slow
def test_launched_ranks_get_the_words_and_the_first_error_is_raised(tmp_path, monkeypatch):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\n"
        "line = ' '.join(['rank', os.environ['RANK'], *sys.argv[1:]])\n"
        "os.write(1, f'{line}\\n'.encode())\n"  # at once: the ranks write to one file
        "if sys.argv[-1] == 'bad': sys.exit('error: no such step')\n"
    )
    monkeypatch.setattr(replay, "__file__", str(script))
    log = tmp_path / "log.txt"
    with pytest.raises(ValueError, match=r"^no such step \(its output: .*/log.txt\)$"):
        replay.launch(1, log, "grpo.py", "bad")
    assert "rank 0 --work grpo.py bad\n" in log.read_text()


@pytest.mark.slow
def test_another_run_and_bad_input_are_named(main, here, small, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    main("sft", *flags(small, "sft", folder))
    shutil.copy(folder / "trace/step_000001.jsonl.gz", folder / "trace/step_000002.jsonl.gz")
    replay.replay(folder, 2, [])
    assert "step 2: the weights after it DIFFER from those of the run; " in capsys.readouterr().out

    def refused(folder, step) -> str:
        words = ("replay.py", folder, "--step", step)
        _, error = call_main(replay.main, words, 2, monkeypatch, capsys)
        assert error.count("\n") == 1
        return error

    assert refused(folder, 9) == f"error: --step 9: {folder} has no such step\n"
    assert "error: argument --step: invalid int value: 'x'" in refused(folder, "x")
    (folder / "args.yaml").write_text("{")
    assert "args.yaml: the first line names no script: {" in refused(folder, 1)
    shown = refused(tmp_path / "nowhere", 1)
    assert "no args.yaml; name the --output_dir of a training run" in shown
