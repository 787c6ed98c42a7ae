"""Fetches models and data sets of the Hugging Face hub: recognizes their names, resolves commits, downloads files.

`huggingface_hub` fetches files into its cache, and heeds HF_TOKEN, HF_HUB_OFFLINE, HF_HOME and HF_ENDPOINT. A
repository that is pinned to a commit and is in the cache needs no network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from fp8rl.models.cards import read_configurations
from fp8rl.numerics.core.errors import UserError, listed, shown, user_error
from fp8rl.numerics.core.reading import check_path
from fp8rl.numerics.core.section import Located, SpecPath, located_as

if TYPE_CHECKING:
    from fp8rl.models.downloads import Limits

Kind = Literal["model", "dataset"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = (".json", ".jsonl", ".parquet", ".csv", ".txt", ".yaml", ".gz", ".zst", ".safetensors")
"""Endings of paths: `data/train.jsonl` is a path even if there is no such file, and not the name of a repository."""
_MODEL = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_NOT_OF_A_MODEL = ["*/*", "consolidated*"]
"""Copies of the weights in other formats."""
_CARD = ["README.md", ".huggingface.yaml", "dataset_infos.json"]
_CONFIG = "config.json"


def is_hub_name(text: str) -> bool:
    """Return whether a text names a repository, `owner/name`. A text that exists as a path on this machine does not."""
    return bool(_NAME.fullmatch(text)) and not text.endswith(_FILES) and not os.path.exists(text)


def _local_or_name(text: str, directory: Path) -> str:
    local = located_as(SpecPath, text, directory)
    return text if not os.path.exists(local) and is_hub_name(text) else str(local)


HubPath = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(lambda text: check_path(text, "path") or text),
    Located("path or name", _local_or_name),
]
"""A `SpecPath`, or the name of a repository of the hub."""

Revision = Annotated[str, Field(min_length=1, pattern=r"^[\w./-]+$")]
"""A branch, tag or commit."""


def model_directory(path: str, revision: str | None, key: str, *, config_only: bool = False) -> Path:
    """Return the directory of a model, which is fetched if `path` names a repository of the hub.

    config_only: fetch only config.json.

    Raises UserError: the hub does not give the model; the message calls the model `key`.
    """
    check_path(path, key)
    if not is_hub_name(path):
        return _local(path, revision, key)
    with _explained(path, revision, "model", key) as limits:
        pinned = commit(path, revision, "model", key)
        folder = _snapshot(path, "model", pinned, limits, [_CONFIG] if config_only else _MODEL, _NOT_OF_A_MODEL)
    if not (folder / _CONFIG).is_file():
        raise _refusal(key, f"{path} without {_CONFIG}", "a model of transformers", "Choose another one.")
    return folder


def data_directory(path: str, revision: str | None, name: str | None, key: str) -> Path:
    """Return the path of data. If `path` is a data set of the hub, fetch the files of its configuration `name`. Raises
    UserError as `model_directory` does, or if there is no such configuration, or several and `name` is None."""
    if not is_hub_name(path):
        return _local(path, revision, key)
    with _explained(path, revision, "dataset", key) as limits:
        pinned = commit(path, revision, "dataset", key)
        card = _snapshot(path, "dataset", pinned, limits, _CARD)
        return _snapshot(path, "dataset", pinned, limits, _files_of(card, path, name, key))


def _local(path: str, revision: str | None, key: str) -> Path:
    if revision is not None:
        expected = f"none, as {path} is a path of this machine"
        remedy = "Remove it, or give the name of a repository of the hub."
        raise user_error(f"{key.removesuffix('.path')}.revision", revision, expected, remedy)
    return Path(path)


def commit(path: str, revision: str | None, kind: Kind, key: str) -> str:
    """Return the commit of a branch, a tag or the default branch (None) of a repository.

    Without a network, return the commit that the hub gave when it was last asked.

    Raises UserError: as `model_directory` does.
    """
    from huggingface_hub import HfApi

    from fp8rl.models.downloads import COMMIT, HubAnswerError

    with _explained(path, revision, kind, key):
        found = HfApi().resolve_revision(path, repo_type=kind, revision=revision).resolved
        if not isinstance(found, str) or not COMMIT.fullmatch(found):
            raise HubAnswerError(f"names a commit by {shown(found, 80)}, expected 40 hexadecimal digits")
        return found


def _snapshot(
    path: str, kind: Kind, pinned: str, limits: Limits, wanted: list[str] | None, unwanted: list[str] | None = None
) -> Path:
    """Return the folder of a commit with the files that match the patterns; without a network, from the cache."""
    import httpx
    from huggingface_hub import HfApi, constants, errors, snapshot_download
    from huggingface_hub._tree_cache import read_tree_cache
    from huggingface_hub.file_download import repo_folder_name

    from fp8rl.models.downloads import HubAnswerError

    repository = Path(constants.HF_HUB_CACHE).expanduser().resolve() / repo_folder_name(repo_id=path, repo_type=kind)
    snapshot = partial(snapshot_download, path, repo_type=kind, revision=pinned, ignore_patterns=unwanted)
    if (tree := read_tree_cache(str(repository), pinned)) is not None:  # which the client reads to know what is missing
        limits.expect(tree.values())
        with suppress(errors.LocalEntryNotFoundError):
            return Path(snapshot(allow_patterns=wanted, local_files_only=True))
    try:  # the downloads try again for half a minute, and side by side: this asks once
        HfApi().repo_info(path, repo_type=kind, revision=pinned)
    except (errors.OfflineModeIsEnabled, httpx.ConnectError, httpx.TimeoutException):
        return Path(snapshot(allow_patterns=wanted, local_files_only=True))
    snapshot(allow_patterns=["\n"])  # no file: the listing alone
    if (tree := read_tree_cache(str(repository), pinned)) is None:
        raise HubAnswerError(f"gives no listing of files that can be kept in {repository}")
    limits.expect(tree.values())
    return Path(snapshot(allow_patterns=wanted))


def _files_of(card: Path, path: str, name: str | None, key: str) -> list[str] | None:
    """Return the patterns of a configuration's files, from the card of a data set; None: all files."""
    configs = read_configurations(card, key)
    if not configs:
        return None
    default = next((config for config, files in configs.items() if files.default or config == "default"), None)
    chosen = name or (default if len(configs) > 1 else next(iter(configs)))
    if chosen not in configs:
        remedy = f"Set it: {{path: {path}, name: {listed([*configs][:1])}}}."
        raise user_error(f"{key}.name", name, f"one of {listed(configs)}, the configurations of {path}", remedy)
    patterns = configs[chosen].patterns
    if not patterns:
        return None
    return [*patterns, *(pattern.replace("**/", "") for pattern in patterns), *_CARD]


@contextmanager
def _explained(path: str, revision: str | None, kind: Kind, key: str) -> Iterator[Limits]:
    """Turn errors of the hub's clients in the block into one message that says why a repository cannot be fetched."""
    import httpx
    from huggingface_hub import constants, errors

    from fp8rl.models.downloads import HubAnswerError, limited

    of = "" if revision is None else f" at revision {revision}"
    hub = constants.ENDPOINT
    page = f"{hub}/{'datasets/' if kind == 'dataset' else ''}{path}"
    what = "a model" if kind == "model" else "a data set"
    local = "directory" if kind == "model" else "file or directory"
    try:
        with limited() as limits:
            yield limits
    except UserError:
        raise
    except errors.GatedRepoError as error:
        found = f"{path}, {what} that {hub} gives only to accounts that it has let in"
        remedy = f"Ask for access at {page}, and set HF_TOKEN to a token of the account (or run hf auth login)."
        raise _refusal(key, found, "one that may be read", remedy) from error
    except errors.RevisionNotFoundError as error:
        remedy = f"Correct it, or leave it out for the default branch; {page} lists them."
        where = f"{key.removesuffix('.path')}.revision"
        raise _refusal(where, f"{revision}", f"a branch, tag or commit of {path}", remedy) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        found = f"{path}, no {local} here, and on {hub} no {what.removeprefix('a ')} of that name"
        remedy = (
            "Correct the path, which in a spec is relative to the spec's folder, or the name; for a private repository "
            "set HF_TOKEN to a token that may read it."
        )
        raise _refusal(key, found, f"a {local}, or the name of {what} of the hub", remedy) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.RevisionResolutionError) as error:
        raise _unreached(key, path, of, kind, error.__cause__ or error) from error
    except (httpx.HTTPError, errors.FileMetadataError) as error:
        raise _unreached(key, path, of, kind, error) from error
    except Exception as error:  # whatever the hub's clients raise at an answer that is none
        if isinstance(error, OSError) and error.strerror:
            found = f"{path}{of}, and {error.strerror} at {constants.HF_HUB_CACHE}"
            raise _refusal(key, found, "a cache with room", "Free some, or set HF_HOME to another disk.") from error
        why = str(error) if isinstance(error, HubAnswerError) else f"gives an unknown answer ({type(error).__name__})"
        found = f"{path}{of} at {hub}, a hub that {why}"
        remedy = f"Correct HF_ENDPOINT, or try later; {page} should open in a browser."
        raise _refusal(key, found, "an answer in the hub's protocol", remedy) from error


def _unreached(key: str, path: str, of: str, kind: Kind, error: BaseException) -> UserError:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set"
    else:
        why = f"not available from {constants.ENDPOINT} ({' '.join(str(error).split())[:100]})"
    found = f"{path}{of}, which is no path here and not complete in the cache {constants.HF_HUB_CACHE}; {why}"
    option = " --repo-type dataset" if kind == "dataset" else ""
    remedy = (
        f"Correct the path, which in a spec is relative to the spec's folder. If {path} is a repository of the hub, "
        f"download it where there is a network (hf download {path}{option})."
    )
    return _refusal(key, found, "an existing path, or a repository in the cache or on the hub", remedy)


def _refusal(key: str, found: str, expected: str, remedy: str) -> UserError:
    return UserError(f"{key}: found {found}, expected {expected}. {remedy}")
