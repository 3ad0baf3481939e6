"""config.json from the Hugging Face hub, with nothing but the standard library. Loads no torch."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request

from .reading import ConfigError

TIMEOUT = 10  # seconds


def fetch_config(repo: str) -> dict:
    """The config.json of `repo` ("owner/model"). ConfigError in one sentence when it is not to be had.

    HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE count as they do for huggingface_hub.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise ConfigError(f"{repo} is not in the catalog and HF_HUB_OFFLINE is set; a config.json or its folder works")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{endpoint}/{repo}/resolve/main/config.json")
    if token := os.environ.get("HF_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            config = json.loads(answer.read().decode("utf-8"))
    except urllib.error.HTTPError as error:
        why = "it is gated or private: set HF_TOKEN" if error.code in (401, 403) else f"HTTP {error.code}"
        raise ConfigError(f"the hub gives no config.json for {repo}: {why}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"{repo} is not in the catalog and the hub cannot be reached ({reason}); a config.json or its folder works"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"the config.json of {repo} is not a JSON object")
    return {"_name_or_path": repo, **config}
