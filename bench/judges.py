"""The cost of judges (docs/judges.md): seconds and operations for each completion, with and without
shared prefixes.

    OMP_NUM_THREADS=1 python bench/judges.py"""

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.config.online import OnlineArgs
from common.data.sample import Completion
from common.model.hub import load_tokenizer, resolve_model
from common.parallel import distributed
from extras.judges.judges import Judge

PROMPTS, COMPLETIONS = 2, 8
RUBRIC = ["It is polite.", "It is short.", "It is correct."]


def main() -> None:
    device, _, _ = distributed.setup(0)
    path = resolve_model("tiny")
    tokenizer = load_tokenizer(path)
    rng = random.Random(0)

    def words(count: int) -> str:
        return " ".join(rng.choice(("red", "blue", "seven", "house", "runs")) for _ in range(count))

    rows = [dict(prompt=words(20), _source="row", rubric=RUBRIC) for _ in range(PROMPTS)]
    groups = [
        [Completion([], [], row=row, text=words(12)) for _ in range(COMPLETIONS)] for row in rows
    ]
    print("| reward | `--share_prefix` | ms for each completion | Mflop for each completion |")
    print("| --- | --- | --- | --- |")
    for kind in ("judge", "rank"):
        for share_prefix in (0, 16):
            args = OnlineArgs(
                reward=f"{kind}:{path}", prompt_format="plain", dtype="float32",
                max_new_tokens=80, pack_tokens=8192, share_prefix=share_prefix,
            )  # fmt: skip
            judge = Judge("--reward", kind, path, args, rows, tokenizer, device)
            judge.model.flops = 0.0
            start = time.perf_counter()
            judge(groups)
            count = PROMPTS * COMPLETIONS
            milliseconds = 1e3 * (time.perf_counter() - start) / count
            flops = judge.model.flops / count / 1e6
            print(f"| `{kind}` | {share_prefix} | {milliseconds:.0f} | {flops:.0f} |", flush=True)
    distributed.cleanup()


if __name__ == "__main__":
    main()
