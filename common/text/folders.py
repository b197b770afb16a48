"""The files of each split of a folder, by the rules of the library `datasets`: those that README.md
lists, else by names such as `math_train/` or `test_2.jsonl`; without such names, all are train."""

import glob
import os
from pathlib import Path
from typing import NamedTuple

import yaml
from datasets import data_files
from datasets.info import DatasetInfosDict
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard, DatasetCardData, logging

from common.config.flags import FILE_KINDS, SEPARATORS, kind_of
from common.parallel.distributed import first_line

SUFFIXES = [".jsonl", ".json", *SEPARATORS, ".parquet"]


def files_of_split(
    label: str, folder: Path, split: str, config: str | None
) -> tuple[list[Path], dict]:
    """Return the files of a split, and the types of columns with names of classes. Raises
    `ValueError` for a file that is in two splits, and for files of several kinds."""
    card = _card(label, folder, config)
    splits = _files_of_splits(label, folder, card)
    if split not in splits:  # dev is validation
        words = data_files.SPLIT_KEYWORDS.items()
        split = next((str(name) for name, others in words if split in others), split)
    own = splits.pop(split, [])
    for other, files in splits.items():
        if shared := {*own} & {*files}:
            file = min(shared).relative_to(folder)
            problem = f"{file} belongs to the splits {split} and {other}"
            advice = "rename it, or name files with --dataset and --eval_dataset"
            raise ValueError(f"{label}: {problem}; {advice}")
    kinds = sorted({f".{kind_of(file).split('.')[1]}" for file in own})
    if len(kinds) > 1:  # often the same rows twice
        raise ValueError(f"{label}: {' and '.join(kinds)} files; name one kind by a pattern")
    return own, card.classes


def splits_of_folder(label: str, folder: Path, config: str | None) -> list[str]:
    return [*_files_of_splits(label, folder, _card(label, folder, config))]


class Card(NamedTuple):
    """What README.md of a folder says about a configuration."""

    folder: str = ""  # of its files
    files: dict[str, list[str]] | None = None  # patterns of each split; None: names decide
    classes: dict = {}  # types of columns with names of classes


def _files_of_splits(label: str, folder: Path, card: Card) -> dict[str, list[Path]]:
    """Raises `ValueError` for a folder without files that can be read."""
    _require_regular_files(label, folder)
    root = os.path.abspath(folder)
    base = glob.escape(os.path.join(root, card.folder))
    found = _by_names(base) if card.files is None else _by_patterns(label, base, card.files)
    if not any(found.values()):
        raise ValueError(f"{label}: no {FILE_KINDS} files with a split in it")
    splits: dict[str, list[Path]] = {}
    for split, files in found.items():
        names = [os.path.relpath(file, root) for file in dict.fromkeys(files)]
        for name in names:
            if Path(name).parts[0] == "..":
                problem = f"README.md lists {name}, which is outside of the folder"
                raise ValueError(f"{label}: {problem}")
        splits[split] = [folder / name for name in names]
    return splits


def _require_regular_files(label: str, folder: Path) -> None:
    """Raise `ValueError` for what `datasets` would leave out: a pipe, a device or a broken link."""
    for file in folder.rglob("*"):
        name = file.relative_to(folder)
        is_hidden = any(part[0] == "." for part in name.parts)
        if kind_of(file) and not (is_hidden or file.is_dir() or file.is_file()):
            raise ValueError(f"{label}: {name}: not a regular file")


def _by_names(base: str) -> dict[str, list[str]]:
    try:
        patterns = data_files.get_data_patterns(base)
    except data_files.EmptyDatasetError:
        patterns = {}
    found = data_files.DataFilesDict.from_patterns(patterns, base, SUFFIXES)
    # pyrefly: ignore[unnecessary-type-conversion]  # datasets says `str`, but gives `NamedSplit`
    return {str(split): sorted({*files}) for split, files in found.items()}


def _by_patterns(label: str, base: str, patterns: dict[str, list[str]]) -> dict[str, list[str]]:
    """Raises `ValueError` for a pattern that no file matches."""
    found: dict[str, list[str]] = {split: [] for split in patterns}
    for split, own in patterns.items():
        for pattern in own:
            try:
                if "://" in pattern:  # not in this folder
                    raise FileNotFoundError
                found[split] += data_files.resolve_pattern(pattern, base, SUFFIXES)
            except FileNotFoundError:
                problem = f"README.md lists {pattern}: no {FILE_KINDS} file of this name in it"
                raise ValueError(f"{label}: {problem}") from None
    return found


# ---- README.md ----


def _card(label: str, folder: Path, config: str | None) -> Card:
    """Read README.md about the configuration `config`, by default its default one or `main`."""
    logging.set_verbosity_error()  # not a warning of a page without metadata
    try:
        return _configuration(_metadata(folder), config)
    except Exception as error:  # no text, no YAML, or values of other types
        problem = getattr(error, "problem", None) or first_line(error)
        raise ValueError(f"{label}: README.md: {problem}") from error


def _metadata(folder: Path) -> DatasetCardData:
    readme, further = folder / "README.md", folder / ".huggingface.yaml"
    data = DatasetCard.load(readme).data if readme.is_file() else DatasetCardData()
    if further.is_file():
        data = DatasetCardData(**data.to_dict() | yaml.safe_load(further.read_text("utf-8")))
    return data  # pyrefly: ignore[bad-return]  # `load` declares the base class of cards


def _configuration(data: DatasetCardData, config: str | None) -> Card:
    configs = MetadataConfigs.from_dataset_card_data(data)
    infos = DatasetInfosDict.from_dataset_card_data(data)
    name = config or configs.get_default_config_name()
    name = name or (next(iter(infos)) if len(infos) == 1 and not configs else "main")
    features = infos[name].features if name in infos else None
    classes = {
        column: kind for column, kind in (features or {}).items() if "ClassLabel" in repr(kind)
    }
    if not configs:
        return Card(classes=classes)
    if name not in configs:
        problem = f"has the configurations {', '.join(configs)}"
        raise ValueError(f"{problem}; name one with --dataset_config")
    chosen = configs[name]
    read = {"data_files", "data_dir", "default", "description", "version"}
    if unread := chosen.keys() - read:
        problem = f"the configuration {name} has {', '.join(sorted(unread))}"
        raise ValueError(f"{problem}; name its files with --dataset and --eval_dataset")
    listed = chosen.get("data_files")
    patterns = listed and data_files.sanitize_patterns(listed)
    return Card(chosen.get("data_dir") or "", patterns, classes)
