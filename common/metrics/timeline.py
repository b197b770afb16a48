"""Timeline of each rank: `<output_dir>/timeline/rank_<n>.jsonl`, which bench/timeline.py draws.

A line is `{"what": "train", "began": seconds since 1970, "ended": ...}`. `what` is a part of
`time/*`; on dedicated rollout ranks it is `sample`, `wait` (for prompts) or `weights` (receiving
them)."""

import json
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from common.parallel import distributed


class Span(NamedTuple):
    what: str
    began: float
    """seconds since 1970, by this machine's clock"""
    ended: float


class Timeline:
    """Timeline file of this rank; a resumed run appends to it."""

    def __init__(self, output_dir: str):
        role = (
            distributed.rollout_ranks
            if distributed.is_rollout_rank()
            else distributed.training_ranks
        )
        self.path = Path(output_dir) / "timeline" / f"rank_{role[dist.get_rank()]}.jsonl"

    def add(self, spans: list[Span]) -> None:
        if not spans:
            return
        self.path.parent.mkdir(
            parents=True, exist_ok=True
        )  # rank 0 may have cleared the folder since
        with self.path.open("a") as file:
            file.writelines(json.dumps(span._asdict()) + "\n" for span in spans)
