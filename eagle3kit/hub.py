"""Models on the hub: whether it answers, a model's config and size, and the files of one as a folder on this machine."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from pathlib import Path

from eagle3kit.errors import KitError


def reachable(timeout: float = 5.0) -> tuple[bool, str]:
    """Whether the hub answers, and why not. Never takes longer than `timeout` seconds, whatever the network does."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False, "HF_HUB_OFFLINE is set"
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    answer = [(False, f"{url} did not answer within {timeout:g} s")]

    def ask() -> None:
        try:
            request = urllib.request.Request(url + "/", method="HEAD")  # noqa: S310 - the user's own endpoint
            with urllib.request.urlopen(request, timeout=timeout):  # noqa: S310
                answer[0] = True, f"{url} answers"
        except urllib.error.HTTPError:
            answer[0] = True, f"{url} answers"  # with an error page, but it is there
        except (OSError, ValueError) as error:
            answer[0] = False, f"{url} cannot be reached ({getattr(error, 'reason', error)})"

    # In a thread, because looking up a host name has no time limit of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return answer[0]


def config_file(hub_id: str, revision: str, parameters: str) -> tuple[Path | None, str]:
    """`config.json` of a model on the hub and where it came from; None and why not when the hub cannot be reached.

    Args:
        parameters: those that name the model, for the remedy.

    Raises:
        KitError: the hub answers, and refuses: no such model, no such revision, no access.
    """
    from huggingface_hub import errors, hf_hub_download

    online, why = reachable()
    try:
        path = hf_hub_download(hub_id, "config.json", revision=revision, etag_timeout=5, local_files_only=not online)
    except errors.GatedRepoError:
        raise KitError(f"{hub_id} needs its licence to be accepted", fix="accept it on the hub and set HF_TOKEN") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            return None, why if not online else "the hub's answer could not be read"
        raise KitError(
            f"the hub has no config.json for {hub_id}",
            seen=f"revision {revision}",
            fix=f"check {parameters}; a private model needs HF_TOKEN",
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        return None, f"the download failed ({error})"
    place = "from the hub" if online else f"from the hub's local cache ({why})"
    return Path(path), f"config.json of {hub_id}@{revision} {place}"


def cached_file(model: str | Path, revision: str, name: str) -> Path | None:
    """A file of a model, in its folder, where it need not exist, or in the hub's cache; None where that has none. Asks nobody."""
    if Path(model).is_dir():
        return Path(model) / name
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(str(model), name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def weight_bytes(hub_id: str, revision: str) -> int | None:
    """Size of a hub model's weight files; None where the hub does not say: a convenience that must not stop anything."""
    from huggingface_hub import HfApi

    if not reachable()[0]:
        return None
    try:
        files = HfApi().model_info(hub_id, revision=revision, files_metadata=True, timeout=5).siblings or []
        return sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors")) or None
    except Exception:  # whatever the hub's client raises, the size is then counted from the config
        return None


def local_folder(name: str | Path, revision: str | None = None) -> Path:
    """The folder of a drafter or target: `name` itself, or what the hub's cache holds of it, downloaded where it does not.

    Raises:
        KitError: it is neither a folder nor on the hub, or the hub cannot be reached.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    from huggingface_hub import errors, snapshot_download

    try:
        patterns = ["*.json", "*.safetensors"]
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns, etag_timeout=5))
    except (errors.HfHubHTTPError, errors.HFValidationError, errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        raise KitError(
            f"{name} is neither a local folder nor to be had from the hub",
            seen=str(error).splitlines()[0] if str(error) else type(error).__name__,
            fix="correct the name, or give this machine access to the hub",
        ) from None
