"""Names that a run writes into its folder. It removes files of these names and no others, whatever lies beside them."""

from __future__ import annotations

import filecmp
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path


class Kind(Enum):
    """A form that stands under a name, if not a directory of which every name is known."""

    FILE = "a file"
    LIBRARY = "a file, or a directory that a library fills by itself, with links too"


FILE, LIBRARY = Kind.FILE, Kind.LIBRARY
Tree = dict[str, "Tree | Kind"]
"""What may stand in a directory: regular expressions of whole names."""

MODEL: Tree = {
    r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors|\d+-\d+\.safetensors": FILE,
    r"model\.safetensors\.index\.json|(config|adapter_config|generation_config|preprocessor_config)\.json": FILE,
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json": FILE,
    r"merges\.txt|vocab\.txt|tokenizer\.model|chat_template\.(jinja|json)": FILE,
}
"""Files of a model directory. Further ones are copies of those of the model that the run began with."""
CHECKPOINT: Tree = {
    r"about\.json|groups\.jsonl": FILE,
    "state": {r"__\d+_\d+\.distcp|\.metadata|common\.pt|metadata\.json": FILE},
}
CAPSULE: Tree = {
    r"(capsule|manifest)\.json|tensors\.safetensors|spec\.yaml|SHA256SUMS|attribution\.html": FILE,
    "weights|adapter": MODEL,
}
SERVED: Tree = {"start|teacher|served_checkpoint|sync_checkpoint": LIBRARY}
RUN: Tree = {
    r"\.fp8rl|spec\.yaml|(metrics|events|sessions)\.jsonl|log\.txt|(engine|teacher)_\d+\.log": FILE,
    r"(report|attribution|certify)\.html|\.seen-[0-9a-f]{8}": FILE,
    "checkpoints": {r"step_\d+": CHECKPOINT},
    "manifests": {r"step_\d+\.json": FILE},
    "rollouts": {r"(step|ahead)_\d+\.jsonl|step_\d+\.certify\.html": FILE},
    "capsules": {r"step_\d+": CAPSULE, r"step_\d+\.attribution\.html": FILE},
    "model|adapter": MODEL,
    "served": SERVED,
    "ray_logs": LIBRARY,
    "wandb": {
        r"latest-run|debug[\w.-]*\.log|run_id|told|upload\.log|log\.txt|data|settings": LIBRARY,
        r"(offline-)?run-\d{8}_\d{6}-.+": LIBRARY,
    },
    "tensorboard": {r"events\.out\.tfevents\..*|told|log\.txt": FILE},
    "mlflow|trackio": LIBRARY,
}
_UNFINISHED = re.compile(r"\.(.+)\.(partial|pending|retired)")


def foreign_files(folder: Path, tree: Tree = RUN, source: Path | None = None) -> list[Path]:
    """Return the files in `folder` that no run wrote: other names, links, and other disks.

    source: directory of the model that the run began with, whose files it copies.
    """
    return [path for path, written in _entries(folder, tree, source) if not written]


def remove_written(folder: Path, tree: Tree = RUN, source: Path | None = None, keep: Collection[Path] = ()) -> None:
    """Remove what a run wrote into `folder`, but for `keep`, and the folder if that leaves it empty.

    source: as for `foreign_files`.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for path, written in _entries(folder, tree, source):
        if written and path not in keep:
            _remove(path)
    if folder not in keep:
        _remove(folder)


def unfinished(name: str, pattern: str) -> bool:
    """Return whether `name` is the temporary name of a file whose final name matches `pattern`, while it is written or
    removed."""
    return _UNFINISHED.fullmatch(name) is not None and re.fullmatch(pattern, _whole(name)) is not None


def _entries(
    folder: Path, tree: Tree | Kind, source: Path | None, original: Path | None = None
) -> Iterator[tuple[Path, bool]]:
    """Yield each entry, a directory after what is in it, and whether a run wrote it. original: the copied directory."""
    disk, original = folder.lstat().st_dev, source if tree is MODEL else original
    for path in sorted(folder.iterdir()):
        kind = _kind(path.name, tree)
        copied = original / path.name if original is not None else None
        if path.is_symlink():
            yield path, kind is LIBRARY
        elif not path.is_dir():
            yield path, isinstance(kind, Kind) or (copied is not None and _same(path, copied))
        elif path.lstat().st_dev != disk or kind is FILE or (kind is None and not (copied and copied.is_dir())):
            yield path, False
        else:
            yield from _entries(path, kind or {}, source, copied)
            yield path, True


def _kind(name: str, tree: Tree | Kind) -> Tree | Kind | None:
    if isinstance(tree, Kind):
        return LIBRARY
    return next((kind for pattern, kind in tree.items() if re.fullmatch(pattern, _whole(name))), None)


def _whole(name: str) -> str:
    """The name that a file gets once it is written."""
    while (whole := _UNFINISHED.fullmatch(name)) is not None:
        name = whole[1]
    return name


def _same(path: Path, copied: Path) -> bool:
    return path.is_file() and copied.is_file() and filecmp.cmp(path, copied, shallow=False)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        with suppress(OSError):  # something else is in it, or it is where a disk is mounted
            path.rmdir()
    else:
        path.unlink(missing_ok=True)
