"""A replayed step has the weights of the run; one with a changed flag has those of such a run."""

import importlib
import shutil
import sys

import pytest
from helpers import ROOT, run

from extras.trace import replay
from extras.trace.tests.test_trace import SCRIPTS, flags, traces


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """Give the other tests of this process their modules back: a replay loads a script again and
    changes its Run."""
    for script in SCRIPTS:
        monkeypatch.setitem(
            sys.modules, script, sys.modules.get(script) or importlib.import_module(script)
        )


@pytest.fixture
def here(main, monkeypatch):
    """Replay in this process, as `main` runs a script in it."""
    monkeypatch.setattr(
        replay, "launch", lambda ranks, folder, *words: replay.work(*map(str, words))
    )


EQUAL = "the weights after it are bitwise those of the run; "


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sft", "dpo", "grpo", "ppo", "distill"])
def test_replayed_step_has_the_weights_of_the_run(main, here, script, small, tmp_path, capsys):
    main(
        script,
        *flags(
            small, script, tmp_path / "run", "--max_steps", 3, "--save_every", 1, "--keep_last", 3
        ),
    )
    replay.replay(tmp_path / "run", 3, 3, {})
    shown = capsys.readouterr().out
    assert (
        "starts from checkpoint step_000002, replays step 3" in shown
        and f"step 3: {EQUAL}" in shown
    )


@pytest.mark.slow
def test_steps_are_repeated_from_the_start_on_two_ranks(small, tmp_path, capsys, monkeypatch):
    """The ranks are forked; the next test has the launch."""
    monkeypatch.setattr(
        replay,
        "launch",
        lambda ranks, folder, *words: run(ranks, replay.__file__, "--work", *words),
    )
    run(
        2,
        ROOT / "grpo.py",
        *flags(small, "reinforce", tmp_path / "run", "--max_steps", 3, "--lr", 1e-3),
    )
    replay.replay(tmp_path / "run", 2, 3, {})
    shown = capsys.readouterr().out
    assert (
        "grpo.py, 2 ranks: starts from the start of the run, repeats 1 steps, then replays step 2"
        in shown
    )
    assert f"step 2: {EQUAL}" in shown and f"step 3: {EQUAL}" in shown


@pytest.mark.slow
def test_launched_ranks_get_the_words_and_a_failed_launch_raises_the_first_error(
    tmp_path, monkeypatch
):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\n"
        "line = ' '.join(['rank', os.environ['RANK'], *sys.argv[1:]])\n"
        "os.write(1, f'{line}\\n'.encode())\n"  # at once: the ranks write to one file
        "if sys.argv[-1] == 'bad': sys.exit('error: no such step')\n"
    )
    monkeypatch.setattr(replay, "__file__", str(script))
    replay.launch(2, tmp_path, "grpo.py", 3, 5)
    log = (tmp_path / "log.txt").read_text()
    assert all(f"rank {rank} --work grpo.py 3 5\n" in log for rank in (0, 1))
    with pytest.raises(
        ValueError, match=r"^no such step \(the replay's output is in .*/log.txt\)$"
    ):
        replay.launch(1, tmp_path, "bad")


@pytest.mark.slow
def test_counterfactual_has_the_rollouts_of_the_run_and_other_weights(
    main, here, small, tmp_path, capsys
):
    main("grpo", *flags(small, "grpo", tmp_path, "--max_steps", 3, "--lr", 1e-3))
    replay.replay(tmp_path, 3, 3, {"advantage": "group_mean"})
    exact, changed = (
        tmp_path / "replay" / name for name in ("step_000003", "step_000003_advantage=group_mean")
    )
    (one, *groups), (two, *others) = traces(exact)[3], traces(changed)[3]
    assert one["weights"] == traces(tmp_path)[3][0]["weights"] != two["weights"]
    assert [c["ids"] for g in groups for c in g["completions"]] == [
        c["ids"] for g in others for c in g["completions"]
    ]
    assert "  loss " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("script, change", [("grpo", {"loss": "cispo"}), ("dpo", {"beta": "0.7"})])
def test_counterfactual_equals_a_run_with_that_flag(main, here, script, change, small, tmp_path):
    main(script, *flags(small, script, tmp_path / "run"))
    replay.replay(tmp_path / "run", 1, 2, change)
    name, value = next(iter(change.items()))
    main(script, *flags(small, script, tmp_path / "launched", f"--{name}", value))
    changed = traces(tmp_path / "run" / "replay" / f"step_000001_{name}={value}")
    launched = traces(tmp_path / "launched")
    assert [changed[n][0]["weights"] for n in (1, 2)] == [launched[n][0]["weights"] for n in (1, 2)]
    assert changed[1][0]["weights"] != traces(tmp_path / "run")[1][0]["weights"]


@pytest.mark.slow
def test_another_run_is_noticed(main, here, small, tmp_path, capsys):
    main("sft", *flags(small, "sft", tmp_path / "run"))
    shutil.copy(
        tmp_path / "run/trace/step_000001.jsonl.gz", tmp_path / "run/trace/step_000002.jsonl.gz"
    )
    replay.replay(tmp_path / "run", 2, 2, {})
    assert "step 2: the weights after it DIFFER from those of the run; " in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ("nowhere", "--step", "3"),
            "error: nowhere: no args.yaml; name the --output_dir of a training run\n",
        ),
        (
            ("nowhere", "--step", "x"),
            "error: expected --step N or --steps FIRST:LAST from 1 on, and changed flags",
        ),
        (("nowhere", "--steps", "3:2"), "error: expected --step N or --steps FIRST:LAST from 1 on"),
        (
            ("nowhere", "--step", "3", "--loss"),
            "error: expected --step N or --steps FIRST:LAST from 1 on",
        ),
        (
            ("nowhere", "--step", "3", "loss", "gspo"),
            "error: expected --step N or --steps FIRST:LAST from 1 on",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["replay.py", *words])
    with pytest.raises(SystemExit) as exit:
        replay.main()
    assert exit.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_unknown_step_wrong_flag_and_damage_are_refused_in_one_line(main, small, tmp_path):
    main("dpo", *flags(small, "dpo", tmp_path))
    with pytest.raises(ValueError, match=f"^--step 9: {tmp_path} has no such step$"):
        replay.replay(tmp_path, 9, 9, {})
    with pytest.raises(ValueError, match="^--beta -3 must be greater than 0$"):
        replay.replay(tmp_path, 1, 1, {"beta": "-3"})
    with pytest.raises(ValueError, match="^--bet"):
        replay.replay(tmp_path, 1, 1, {"bet": "3"})
    (tmp_path / "args.yaml").write_text("{")
    with pytest.raises(ValueError, match="args.yaml: the first line names no script: {"):
        replay.replay(tmp_path, 1, 1, {})


def test_reasons_against_an_exact_replay_are_named():
    assert list(replay.obstacles(dict(rollout_ranks=1, max_staleness=0))) == []
    (reason,) = replay.obstacles(dict(rollout_ranks=1, max_staleness=2))
    assert reason == "--rollout_ranks with --max_staleness 2: timing decides which weights sample"
