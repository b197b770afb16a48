"""Reading datasets: files, folders, the hub or a built-in task -> rows.

A row is a dict of the dataset's columns plus `_source` (`train.jsonl:17`), which every complaint about it names. Every
rank reads all rows.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from common import distributed
from common.config import TrainArgs
from common.flags import pairs_of
from common.tasks import TASKS

# What the supervised scripts can train on: the first of these whose columns the dataset has.
SFT_COLUMNS = (("messages",), ("prompt", "completion"), ("question", "answer"), ("text",), ("input", "output"))
PAIR_COLUMNS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))  # preferences
KTO_COLUMNS = (("prompt", "completion", "label"),)
PROMPT_COLUMNS = (("prompt",), ("question",), ("input",))  # what the online scripts can sample from


def load_rows(
    flag: str, dataset: str, split: str, config: str | None = None, columns: Sequence[str] = ()
) -> list[dict] | None:
    """All rows of one split: a built-in task, a file, a folder or a Hugging Face dataset. `columns` is the flag.

    None if the dataset is there but has no such split. Raises `ValueError` naming `flag`, the file or the row.
    """
    path = Path(dataset).expanduser()
    if dataset in TASKS:
        rows, name = TASKS[dataset](split) if split in ("train", "test") else None, f"{dataset}/{split}"
    elif path.is_file():
        rows, name = _read_file(flag, path) if split == "train" else None, path.name
    elif path.is_dir():
        rows, name = _read_folder(flag, path, split), f"{path.name}/{split}"
    elif path.suffix in (".jsonl", ".json", ".parquet", ".csv") or dataset.startswith((".", "/", "~")):
        raise ValueError(f"{flag} {dataset}: no such file")
    else:
        rows, name = _read_hub(flag, dataset, split, config), f"{dataset}/{split}"
    if rows is None:
        return None
    if not rows:
        raise ValueError(f"{flag} {dataset}: {name} is empty")
    for number, row in enumerate(rows, 1):
        row.setdefault("_source", f"{name}:{number}")
    return renamed(f"{flag} {dataset}", rows, pairs_of("columns", columns)) if columns else rows


def rows_of_split(
    flag: str, dataset: str, split_flag: str, split: str, config: str | None, columns: Sequence[str],
    whole_file: bool = False,
) -> list[dict]:  # fmt: skip
    """`load_rows`, where there has to be such a split; with `whole_file` a file, which has no splits, is taken whole.

    Raises `ValueError` naming `split_flag`.
    """
    rows = load_rows(flag, dataset, split, config, columns)
    if rows is None and whole_file and Path(dataset).is_file():
        rows = load_rows(flag, dataset, "train", columns=columns)
    if rows is None:
        raise ValueError(f"{flag} {dataset} has no split {split!r}: see {split_flag}")
    return rows


def renamed(data: str, rows: list[dict], columns: dict[str, str]) -> list[dict]:
    """The rows with columns named anew, `columns` being new -> old. Raises `ValueError` for an old one that no row has,
    and for a new one that the data has already."""
    found = dict.fromkeys(column for row in rows for column in row if column != "_source")
    for new, old in columns.items():
        if old not in found:
            raise ValueError(f"--columns {new}={old}: no column {old}, {data} has {', '.join(found)}")
        if new == "_source" or (new in found and new not in columns.values()):
            raise ValueError(f"--columns {new}={old}: {data} has a column {new} already")
    return [
        {k: v for k, v in row.items() if k not in columns.values()}
        | {new: row[old] for new, old in columns.items() if old in row}
        for row in rows
    ]


def _read_file(flag: str, path: Path) -> list[dict]:
    if path.suffix in (".parquet", ".csv"):
        return _with_datasets(f"{flag} {path}", path.suffix[1:], data_files=str(path), split="train")
    if path.suffix not in (".jsonl", ".json"):
        raise ValueError(f"{flag} {path}: expected a .jsonl, .json, .parquet or .csv file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path}: {distributed.first_line(error)}") from error
    rows = []
    # not splitlines(): it also breaks at U+2028, which JSON strings may hold
    lines = [text] if path.suffix == ".json" else text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{flag} {path}: line {number + error.lineno - 1} is not valid JSON: {error.msg}"
            ) from error
        for item in value if path.suffix == ".json" and isinstance(value, list) else [value]:
            where = f"{path.name}:{number if path.suffix == '.jsonl' else len(rows) + 1}"
            if not isinstance(item, dict):
                raise ValueError(f"{flag} {path}: {where} is not an object")
            rows.append(item | {"_source": where})
    return rows


def _read_folder(flag: str, folder: Path, split: str) -> list[dict] | None:
    """`train.jsonl`, `train-00000-of-00002.parquet`, ... ; a folder whose files name no split is all `train`."""
    files = sorted(f for f in folder.rglob("*") if f.suffix in (".jsonl", ".json", ".parquet", ".csv"))
    if not files:
        raise ValueError(f"{flag} {folder}: no .jsonl, .json, .parquet or .csv files in it")
    named = [f for f in files if f.stem.split("-")[0].split(".")[0] in ("train", "test", "validation", "eval", split)]
    if named:
        files = [f for f in files if f.stem.split("-")[0].split(".")[0] == split]
    elif split != "train":
        return None
    return [row for f in files for row in _read_file(flag, f)] or None


def _read_hub(flag: str, dataset: str, split: str, config: str | None) -> list[dict] | None:
    try:
        return _with_datasets(f"{flag} {dataset}", dataset, config, split=split)
    except ValueError as error:  # openai/gsm8k and others have several configurations, `main` being the usual one
        if config is None and "Config name is missing" in str(error) and "'main'" in str(error.__cause__):
            return _with_datasets(f"{flag} {dataset}", dataset, "main", split=split)
        raise


def _with_datasets(what: str, *where, split: str, **options) -> list[dict] | None:
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    from pyarrow import ArrowException

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is raised, and said once
    huggingface_hub.logging.set_verbosity_error()
    try:
        return datasets.load_dataset(*where, split=split, **options).to_list()
    except (OSError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled) as error:
        raise ValueError(
            f"{what}: no such file or folder, and not found on the hub ({distributed.first_line(error)})"
        ) from error
    except (datasets.exceptions.DatasetsError, ArrowException) as error:
        raise ValueError(f"{what}: cannot be read: {distributed.first_line(error.__cause__ or error)}") from error
    except (ValueError, RuntimeError) as error:
        if "Unknown split" in str(error) or "Bad split" in str(error):
            return None
        raise ValueError(f"{what}: {distributed.first_line(error)}") from error  # e.g. a missing --dataset_config


def train_and_eval_rows(args: TrainArgs) -> tuple[list[dict], list[dict]]:
    """The training rows and at most `--eval_size` held-out rows, disjoint: from `--eval_dataset`, from the dataset's
    own `--eval_split`, or else set aside from the training rows. No held-out rows if `--eval_every 0`."""
    config, columns = args.dataset_config, args.columns
    train = rows_of_split("--dataset", args.dataset, "--dataset_split", args.dataset_split, config, columns)
    if not args.eval_every:
        return train, []
    held_out = None
    if args.eval_dataset is not None:
        held_out = rows_of_split(
            "--eval_dataset", args.eval_dataset, "--eval_split", args.eval_split, config, columns, whole_file=True
        )
    elif args.eval_split != args.dataset_split:
        held_out = load_rows("--dataset", args.dataset, args.eval_split, config, columns)
    order = random.Random(0)  # not --seed: runs that differ in seed are compared on the same rows
    if held_out is not None:
        return train, order.sample(held_out, min(args.eval_size, len(held_out)))
    if len(train) <= args.eval_size:
        raise ValueError(f"--eval_size {args.eval_size} leaves no training rows of {len(train)}; or --eval_every 0")
    order.shuffle(train)
    return train[args.eval_size :], train[: args.eval_size]


def require_columns(flag: str, rows: list[dict], choices: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The first of `choices` that the rows have. Raises `ValueError` saying what was found and what would do."""
    found = [column for column in rows[0] if column != "_source"]
    for columns in choices:
        if all(column in found for column in columns):
            if "input" in columns and "instruction" in found:
                raise ValueError(f"{flag} would lose its instruction beside input: make one column prompt of both")
            return columns
    wanted = ", or ".join(" and ".join(columns) for columns in choices)
    raise ValueError(f"{flag} has the columns {', '.join(found)}; needed: {wanted}")


def reasons(counts: dict[str, int]) -> str:
    """What happened to rows, by how many: `3 dropped as too long, 1 truncated`."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())
