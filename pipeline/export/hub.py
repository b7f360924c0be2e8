"""The Hugging Face Hub as the target of an export: all files in one commit to a data set's repository.

They are written into a temporary folder first, so that the repository has all of them or none. Errors of the hub become
ConfigError with what to do.
"""

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from pipeline.config.job import ConfigError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

KEY: Final = "--output"
HUB_URI: Final = "hf://"
DATASET_URI: Final = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)((?:/[^/@]+)*)/?")
REPOSITORY_FILES: Final = frozenset({".gitattributes", ".gitignore"})
"""Files of a repository without data."""
T = TypeVar("T")


@dataclass(frozen=True)
class HubTarget:
    """A folder of a data set on the hub that has no files yet."""

    repo: str
    """`ORG/NAME`."""
    folder: str
    """In the repository; empty: all of it."""
    commit: str
    """The state of the repository that was looked at; another one by the time of the upload is refused."""

    @property
    def root(self) -> str:
        return "/".join(part for part in (self.repo, self.folder) if part)

    @property
    def shown(self) -> str:
        return f"{HUB_URI}datasets/{self.root}"


def open_hub(uri: str) -> HubTarget:
    """The target, if it may be written; ConfigError."""
    if (found := DATASET_URI.fullmatch(uri)) is None:
        raise ConfigError(
            KEY, f"{uri}: a data set on the hub is hf://datasets/ORG/NAME or hf://datasets/ORG/NAME/FOLDER"
        )
    repo, folder = found[1], found[2].strip("/")
    api = _api(repo)
    info = _explained(repo, lambda: api.dataset_info(repo))
    names = [sibling.rfilename for sibling in info.siblings or ()]
    inside = [name for name in names if name.startswith(f"{folder}/" if folder else "")]
    if taken := sorted(set(inside) - REPOSITORY_FILES):
        reason = f"has files already ({taken[0]}); name another data set or folder of it, or delete them"
        raise ConfigError(KEY, f"{uri} {reason}")
    return HubTarget(repo, folder, info.sha or "")


@contextmanager
def upload_at_end(target: HubTarget) -> Iterator[str]:
    """A temporary folder whose files become one commit when the block ends; nothing does if it raises."""
    with tempfile.TemporaryDirectory(prefix="skipdecode-export-") as folder:
        yield folder
        _explained(target.repo, lambda: _commit(target, Path(folder)))


def _commit(target: HubTarget, folder: Path) -> None:
    """`upload_folder` would make several commits of many files."""
    from huggingface_hub import CommitOperationAdd

    above = f"{target.folder}/" if target.folder else ""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    _api(target.repo).create_commit(
        target.repo,
        [CommitOperationAdd(above + name, str(path)) for name, path in files.items()],
        commit_message="Export of a run of skipdecode-ray",
        repo_type="dataset",
        parent_commit=target.commit or None,
    )


def _api(repo: str) -> "HfApi":
    """The client of the hub; ConfigError where it has no token, without which nothing can be written."""
    from huggingface_hub import HfApi, get_token  # takes a second

    if get_token() is None:
        raise ConfigError(KEY, f"writing to {repo} needs a token of the hub: hf auth login, or set HF_TOKEN")
    return HfApi()


def _explained(repo: str, call: Callable[[], T]) -> T:
    """The result of a call to the hub; ConfigError with the remedy where it fails."""
    from huggingface_hub import constants, errors

    http_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]  # of its HTTP client, of which it has had several
    later = (
        f"`skipdecode export` into a folder, then hf upload {repo} FOLDER --type dataset, needs the hub only at the end"
    )
    try:
        return call()
    except errors.RepositoryNotFoundError as error:
        create = f"hf repos create {repo} --type dataset (--private)"
        reason = f"there is no data set {repo}, or the token may not see it; {create} makes it"
        raise ConfigError(KEY, reason) from error
    except errors.OfflineModeIsEnabled as error:
        raise ConfigError(KEY, f"the hub is switched off; unset HF_HUB_OFFLINE, or: {later}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        reasons = {
            401: "the hub does not accept the token; hf auth login, or set HF_TOKEN to another",
            403: f"the token may not write to {repo}; use one with write access (hf auth login, or HF_TOKEN)",
            412: f"{repo} has changed meanwhile; start again",
        }
        reason = reasons.get(status or 0, f"the hub answers {status}: {error}; try again, or: {later}")
        raise ConfigError(KEY, reason) from error
    except RuntimeError as error:  # of an upload, whose cause says more
        reason = f"the upload failed, and {repo} is as it was: {error.__cause__ or error}"
        raise ConfigError(KEY, f"{reason}; try again, or: {later}") from error
    except (OSError, http_error) as error:  # there is no connection
        reason = f"the hub cannot be reached ({constants.ENDPOINT}): {error}"
        raise ConfigError(KEY, f"{reason}; try again, or: {later}") from error
