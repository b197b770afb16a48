"""Swap chosen and rejected in pairs where a reward model prefers the rejected side.

    torchrun --nproc_per_node 4 tools/relabel.py --model runs/rm/hf --dataset pairs.jsonl \\
        --output_dir runs/relabelled

It takes the flags of rm.py for model and data, prints how often the model agrees with the pairs,
and writes <output_dir>/relabelled.jsonl. If pairs have margins, that of a swapped pair becomes
0."""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import durable
from common.config.parse import parse
from common.evaluate.offline import wilson_interval
from common.model.hub import fit_max_length, resolve_model
from common.model.policy import load_scalar_model
from common.model.scoring import score
from common.parallel import distributed
from common.text.columns import OUR_COLUMNS, PAIR_COLUMNS, require_columns
from common.text.encode import Encoder
from common.text.load import encode_all, reasons
from common.text.rows import rows_of_split
from common.text.tokenizer import load_tokenizer
from rm import Args, encode_row


def json_line(row: dict) -> str:
    """Return the row as a line of JSON, without columns that onefile added."""
    columns = {name: x for name, x in row.items() if name not in OUR_COLUMNS}
    return json.dumps(columns, ensure_ascii=False) + "\n"


def main(args: Args) -> None:
    device, _, world_size = distributed.setup(args.seed)
    file = Path(args.output_dir, "relabelled.jsonl")
    if file.exists():
        raise ValueError(f"--output_dir {args.output_dir}: it has a {file.name}; name another one")
    try:  # before all pairs are scored
        file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        problem = f"--output_dir {args.output_dir}: {error.strerror}; name another one"
        raise ValueError(problem) from error
    path = resolve_model(args.model)
    args = fit_max_length(args, path, {})
    rows = rows_of_split("--dataset", args.dataset, "--dataset_split", args.dataset_split, args)
    columns = require_columns(args.dataset_flag, rows, PAIR_COLUMNS)
    encoder = Encoder(load_tokenizer(path, args), args)
    pairs, counts = encode_all(encode_row, rows, columns, encoder, args)
    if not pairs:
        raise ValueError(f"{args.dataset_flag}: no rows are left: {reasons(counts)}")
    try:
        lines = [json_line(pair.row) for pair, _ in pairs]
    except TypeError as error:
        problem = "its rows cannot be written as JSON"
        raise ValueError(f"{args.dataset_flag}: {problem}: {error}") from error
    model = load_scalar_model(path, args, device, trainable=False)
    share = [[sample.ids for sample in pair] for pair in distributed.items_of_rank(pairs)]
    scores = score(model, share, args.pack_tokens)
    scores_of_ranks = distributed.gather_objects(list(zip(scores[::2], scores[1::2], strict=True)))
    if distributed.is_main():
        right = 0.0
        for i, (pair, _) in enumerate(pairs):
            chosen, rejected = scores_of_ranks[i % world_size][i // world_size]
            right += (chosen > rejected) + (chosen == rejected) / 2
            if chosen < rejected:
                row = pair.row | dict(chosen=pair.row["rejected"], rejected=pair.row["chosen"])
                lines[i] = json_line(row | (dict(margin=0.0) if "margin" in row else {}))
        durable.write_text(file, "".join(lines))
        low, high = wilson_interval(right / len(pairs), len(pairs))
        print(f"of {len(rows)} rows {reasons(counts)}" if counts else f"{len(pairs)} pairs")
        print(f"the reward model agrees with {right / len(pairs):.3f} ({low:.3f} to {high:.3f})")
        print(file)
    distributed.cleanup()


if __name__ == "__main__":
    main(parse(Args))
    distributed.end_process()
