"""Completions that the data has for the prompts of a script that samples."""

from common.config.online import SamplingArgs
from common.data.encode import Encoder, truncate
from common.data.rows import SFT_COLUMNS, encode_each, require_columns
from common.data.sample import Sample

COLUMNS = tuple(pair for pair in SFT_COLUMNS if len(pair) == 2)  # a prompt and its completion


def read_samples(
    rows: list[dict], encoder: Encoder, args: SamplingArgs, needed: bool
) -> list[Sample]:
    """Return the prompt of each row with the data's completion, cut after `--max_new_tokens`;
    skip others unless `needed`."""
    if needed:
        columns = require_columns(args.dataset_flag, rows, COLUMNS)
    else:
        readable = (pair for pair in COLUMNS if all({*pair} <= row.keys() for row in rows))
        columns = next(readable, None)
    if columns is None:
        return []

    def encode(row: dict) -> Sample:
        sample = encoder.completion(row, "_prompt" if "_prompt" in row else columns[0], columns[1])
        return truncate(sample, sample.prompt_length + args.max_new_tokens)

    on_bad_row = args.on_bad_row if needed else "skip"
    samples = [sample for _, sample in encode_each(rows, encode, on_bad_row)]
    if needed and not samples:
        raise ValueError(f"{args.dataset_flag}: no row has a completion that can be read")
    return samples
