"""GGUF files on the Hugging Face hub, by name. huggingface_hub downloads them into its own cache, and resumes.

OWNER/NAME             a repository of GGUF files; which one: see ``PREFERRED``
OWNER/NAME:Q4_K_M      its file of this quantization
hf.co/OWNER/NAME       the same, with or without a quantization
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..core import SettingsError
from ..core.errors import first_line, shown, summary

_NAME = re.compile(
    r"(?P<host>(?:https?://)?(?:hf\.co|huggingface\.co)/)?(?P<repository>\w[\w.-]*/\w[\w.-]*)(?::(?P<tag>[\w.-]+))?/?"
)
#: A file of one of these quantizations is chosen if the name has none and there are several files; the first counts.
PREFERRED = ("Q4_K_M", "Q4_0", "Q4_K_S", "Q5_K_M", "Q8_0")
#: Seconds to wait for a connection.
CONNECTING = 5.0
#: Files beside the weights of a language model.
BESIDE = ("mmproj", "imatrix")


class HubName(NamedTuple):
    """The name of a model on the hub.

    Attributes:
        repository: OWNER/NAME.
        tag: the quantization; "" for none.
        is_gguf: whether the name can only mean a GGUF file; else it may be a repository for transformers.
    """

    repository: str
    tag: str
    is_gguf: bool


class CachedModel(NamedTuple):
    """A repository in huggingface_hub's cache.

    Attributes:
        repository: OWNER/NAME.
        files: paths of its GGUF files.
        size: bytes on disk of everything in it.
        last_used: seconds since the epoch.
    """

    repository: str
    files: tuple[Path, ...]
    size: int
    last_used: float


def parse(text: str) -> HubName | None:
    """The name of a model on the hub; None if the text is not one."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    tag = match["tag"] or ""
    return HubName(match["repository"], tag, bool(match["host"] or tag))


def find(name: HubName, revision: str | None, local_files_only: bool) -> Path | None:
    """The GGUF file of a name, downloaded unless it is in the cache; None if the name is not that of a GGUF file.

    Raises:
        SettingsError: there is no such file, the choice among several is open, or it cannot be downloaded.
    """
    text = f"{name.repository}:{name.tag}" if name.tag else name.repository
    try:
        files = _files(name.repository, revision, local_files_only)
    except Exception as error:  # its HTTP client raises types of its own
        if not name.is_gguf:
            return None  # transformers looks for it, and says what is wrong
        raise _failure(text, revision, error) from None
    weights = [file for file in files if file.lower().endswith(".gguf")]
    if not name.is_gguf and (not weights or any(file.endswith(".safetensors") for file in files)):
        return None
    file = choose(text, weights, name.tag)

    from huggingface_hub import hf_hub_download

    try:
        offline = local_files_only or not reachable()
        return Path(hf_hub_download(name.repository, file, revision=revision, local_files_only=offline))
    except Exception as error:
        raise _failure(text, revision, error) from None


def choose(text: str, files: Sequence[str], tag: str) -> str:
    """The file that a name means.

    Args:
        text: the name, for messages.
        files: the names of all GGUF files in the repository.
        tag: a quantization, in any case; "" for the preferred one.

    Raises:
        SettingsError: no file or several files match, or the file is split.
    """
    found = [file for file in files if not any(word in file.lower() for word in BESIDE)]
    if not found:
        raise SettingsError(f"a repository must have a GGUF file of a language model, and {text} has none")
    if tag or len(found) > 1:
        wanted = (tag,) if tag else PREFERRED
        groups = [[file for file in found if _is_of(file, one)] for one in wanted]
        tagged = next((group for group in groups if group), [])
        if not tagged:
            what = f"quantization {tag!r}" if tag else "one of the usual quantizations"
            names = shown(", ".join(sorted(found)), 600)
            raise SettingsError(
                f"{text} has no file of {what}; its files: {names}; choose one as in {text.partition(':')[0]}:Q8_0"
            )
        found = tagged
    if any(re.search(r"-\d{5}-of-\d{5}\.gguf$", file) for file in found):
        raise SettingsError(
            f"a GGUF file must be whole, and that of {text} is split; download its parts, merge them with "
            "llama-gguf-split --merge, and give the merged file"
        )
    if len(found) > 1:
        raise SettingsError(
            f"{text} must mean one file, but matches {shown(', '.join(found), 600)}; download one, and give the file"
        )
    return found[0]


def cached_models() -> list[CachedModel]:
    """The repositories with GGUF files in huggingface_hub's cache, the latest used first."""
    found = []
    for repository in _cached():
        files = {file.file_path for revision in repository.revisions for file in revision.files}
        weights = tuple(sorted(path for path in files if path.suffix == ".gguf"))
        if weights:
            found.append(
                CachedModel(repository.repo_id, weights, repository.size_on_disk, repository.last_accessed)
            )
    return sorted(found, key=lambda model: -model.last_used)


def remove(repository: str) -> int:
    """Remove a repository from huggingface_hub's cache. Returns the bytes that are free again.

    Raises:
        SettingsError: it is not there.
    """
    from huggingface_hub import scan_cache_dir

    for cached in _cached():
        if cached.repo_id == repository:
            commits = [revision.commit_hash for revision in cached.revisions]
            strategy = scan_cache_dir().delete_revisions(*commits)
            strategy.execute()
            return int(strategy.expected_freed_size)
    names = ", ".join(model.repository for model in cached_models()) or "none"
    raise SettingsError(f"a model to remove must be in the cache, got {repository!r:.200}; there: {names}")


def reachable() -> bool:
    """Whether the hub accepts a connection. Without a network, its client would retry for half a minute."""
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    if getproxies().keys() & {"https", "all"}:
        return True

    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    try:
        port = hub.port or (80 if hub.scheme == "http" else 443)
        socket.create_connection((hub.hostname or "", port), CONNECTING).close()
    except (OSError, ValueError):
        return False
    return True


def _is_of(file: str, tag: str) -> bool:
    return re.search(rf"(?:^|[-._/]){re.escape(tag)}(?=[-._/])", file, re.IGNORECASE) is not None


def _files(repository: str, revision: str | None, local_files_only: bool) -> list[str]:
    """The names of the files of a repository; those in the cache if the hub must not or cannot be asked."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    offline = local_files_only or not reachable()
    if not offline:
        try:
            return list(HfApi().list_repo_files(repository, revision=revision))
        except HfHubHTTPError:
            raise
        except Exception:  # the connection failed
            pass
    if not (known := _cached_files(repository, revision)):
        raise FileNotFoundError(
            "local_files_only is set" if local_files_only else "the hub cannot be reached"
        )
    return known


def _cached_files(repository: str, revision: str | None) -> list[str]:
    for cached in _cached():
        for each in cached.revisions:
            if cached.repo_id == repository and (revision or "main") in {*each.refs, each.commit_hash}:
                return [str(file.file_path.relative_to(each.snapshot_path)) for file in each.files]
    return []


def _cached() -> list[Any]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [repository for repository in scan_cache_dir().repos if repository.repo_type == "model"]
    except CacheNotFound:
        return []


def _failure(text: str, revision: str | None, error: Exception) -> SettingsError:
    """What went wrong, and what to do."""
    from huggingface_hub import errors

    at = f" at revision {revision!r:.60}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        why = "its owner asks for consent to terms first; give it on its page, and run: hf auth login"
    elif isinstance(error, errors.RepositoryNotFoundError):
        why = "the hub has no such repository, or it is private; check the name, or run: hf auth login"
    elif isinstance(error, errors.RevisionNotFoundError):
        why = "the hub has no such revision; omit it, or give a branch, a tag or a commit"
    elif isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, FileNotFoundError)):
        why = f"it is not in the cache, and {first_line(error)}; check the connection"
    else:
        why = summary(error)
    return SettingsError(f"a model by name must be one that the hub has, got {text}{at}: {why}")
