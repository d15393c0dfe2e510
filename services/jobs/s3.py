"""s3:// inputs and outputs, by boto3 where it is installed; credentials as boto3 finds them.

Written against boto3's documentation and never run here: no S3 was at hand.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def missing() -> str:
    """Why s3:// cannot be used here; empty when it can."""
    return "" if find_spec("boto3") is not None else "s3:// needs the package boto3, which is not installed here"


def _client() -> Any:
    return import_module("boto3").client("s3")


def exists(bucket: str, key: str) -> bool:
    """Whether the object is there; raises OSError when that cannot be told."""
    errors = import_module("botocore.exceptions")
    try:
        _client().head_object(Bucket=bucket, Key=key)
    except errors.ClientError as error:
        if error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey", "NotFound"):
            return False
        raise OSError(f"S3 says: {error}") from error
    except errors.BotoCoreError as error:
        raise OSError(f"S3 cannot be reached: {error}") from error
    return True


def download(bucket: str, key: str, path: Path) -> None:
    """Write the object to a file, in pieces; raises OSError."""
    _transfer("download_file", bucket, key, str(path))


def upload(bucket: str, key: str, path: Path) -> None:
    """Store a file, in pieces; raises OSError."""
    _transfer("upload_file", str(path), bucket, key)


def _transfer(what: str, *arguments: str) -> None:
    errors = import_module("botocore.exceptions")
    try:
        getattr(_client(), what)(*arguments)
    except (errors.ClientError, errors.BotoCoreError) as error:
        raise OSError(f"S3 says: {error}") from error
