"""URIs in configurations: they name a place, and never hold credentials."""

from typing import Final

from pipeline.config.tree import ConfigError
from pipeline.formatting import mask

AZURE: Final = "AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET"
VARIABLES: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS",
    "abfs": AZURE,
    "abfss": AZURE,
    "hf": "HF_TOKEN",
}
"""The environment variables that hold the credentials of each scheme."""


def refuse_credentials(key: str, path: str) -> None:
    """ConfigError if a path is a URI with credentials: it is stored in `run.json` and shown in reports, and the
    environment of all workers has to have them anyway."""
    if (shown := mask(path)) != path:
        scheme = path.partition("://")[0]
        names = VARIABLES.get(scheme, f"the environment variables of {scheme}")
        raise ConfigError(key, f"{shown}: credentials do not belong into a URI, which run.json keeps; set {names}")
