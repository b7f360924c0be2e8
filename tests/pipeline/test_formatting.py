"""What humans are shown: no credentials, no control characters."""

import pytest

from pipeline.config.job import ConfigError
from pipeline.config.uris import refuse_credentials
from pipeline.formatting import mask, printable
from pipeline.input.files import resolve_path
from pipeline.store.run_folder import RunFolder

SECRETS = [
    ("s3://KEY:SECRET@bucket/in", "s3://***@bucket/in", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ("s3://KEY:SEC/RET@bucket/in", "s3://***@bucket/in", "AWS_SECRET_ACCESS_KEY"),
    ("abfs://fs@acct.dfs.core.windows.net/in?tenant_id=t&client_id=i&client_secret=SECRET",
     "abfs://fs@acct.dfs.core.windows.net/in?tenant_id=t&client_id=i&client_secret=***", "AZURE_CLIENT_SECRET"),
    ("abfs://acct:SECRET@fs/in", "abfs://***@fs/in", "AZURE_CLIENT_SECRET"),
    ("gs://TOKEN@bucket/in?region=x", "gs://***@bucket/in?region=x", "GOOGLE_APPLICATION_CREDENTIALS"),
    ("https://host/in?X-Amz-Signature=SECRET&a=b", "https://host/in?X-Amz-Signature=***&a=b",
     "the environment variables of https"),
]  # fmt: skip
HARMLESS = [
    "s3://bucket/a@b?region=eu-west-1&scheme=http&endpoint_override=127.0.0.1:9000", "gs://anonymous@bucket/in",
    "abfs://container@account.dfs.core.windows.net/in", "hdfs://user@host:9000/in", "http://host:8000/a@b",
    "in/key=1/secret.jsonl", "me@example.com",
]  # fmt: skip


@pytest.mark.parametrize(("uri", "shown", "remedy"), SECRETS)
def test_credentials_in_a_uri_are_refused_and_not_shown(uri: str, shown: str, remedy: str) -> None:
    assert mask(f"cannot read '{uri}', sorry") == f"cannot read '{shown}', sorry"
    for key, opens in (("input.path", resolve_path), ("output.path", RunFolder.open)):
        with pytest.raises(ConfigError) as caught:
            opens(uri)
        assert str(caught.value).startswith(f"{key}: {shown}: credentials do not belong into a URI")
        assert remedy in str(caught.value)
        assert "SEC" not in str(caught.value).replace("SECRET_ACCESS_KEY", "").replace("CLIENT_SECRET", "")


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_credential_stays(text: str) -> None:
    assert mask(text) == text
    refuse_credentials("input.path", text)


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[2Jb\x9bc\u202e\r") == "a\\x1b[2Jb\\x9bc\\u202e\\r"
    assert printable("zwei\tWörter\n日本") == "zwei\tWörter\n日本"
