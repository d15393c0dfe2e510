"""Where a job reads and writes: file://, nats://bucket/key and s3://bucket/key, and the format that the name's ending says.

Only the text counts here. Whether a file lies below an allowed directory is decided where it is opened (files.py).
"""

import posixpath
from urllib.parse import unquote, urlsplit

from msgspec import Struct

ENDINGS = {".npy": "npy", ".jsonl": "jsonl", ".ndjson": "jsonl", ".msgpack": "msgpack", ".mpk": "msgpack"}
SCHEMES = ("file", "nats", "s3")
LONGEST = 2000  # characters of a URL


class BadUrl(ValueError):
    """A URL that names no location; the text says which field, and what would do."""


class ParsedUrl(Struct, frozen=True):
    """What a URL names. path: of file://, absolute, without `.` and `..`. bucket, key: of the other schemes."""

    scheme: str
    format: str
    path: str = ""
    bucket: str = ""
    key: str = ""


def parse(url: str, field: str, prefix: str = "infaas") -> ParsedUrl:
    """The location that a URL names; raises BadUrl. field: the sender's name for it. prefix: of the cluster's own buckets."""
    if len(url) > LONGEST or any(ord(letter) < 32 for letter in url):
        raise BadUrl(f"{field}: a URL has at most {LONGEST} characters and no control characters")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise BadUrl(f"{field}: {url[:80]!r} is no URL: {error}") from error
    if parts.scheme not in SCHEMES:
        raise BadUrl(f"{field}: {url[:80]!r} must begin with file://, nats:// or s3://")
    if parts.query or parts.fragment:
        raise BadUrl(f"{field}: write ? and # in names as %3F and %23")
    path = unquote(parts.path, errors="strict") if _is_text(parts.path) else ""
    if not path or "\0" in path:
        raise BadUrl(f"{field}: {url[:80]!r} names nothing that could be opened")
    form = ENDINGS.get(posixpath.splitext(path)[1].lower())
    if form is None:
        raise BadUrl(f"{field}: the name must end in one of {', '.join(ENDINGS)}: the ending says the format")
    if parts.scheme == "file":
        return ParsedUrl("file", form, path=_absolute(parts.netloc, path, field))
    bucket, key = unquote(parts.netloc), path.lstrip("/")
    if not bucket or not key:
        raise BadUrl(f"{field}: write {parts.scheme}://bucket/key")
    if parts.scheme == "nats" and (bucket == prefix or bucket.startswith(f"{prefix}-")):
        raise BadUrl(f"{field}: the bucket {bucket} is the system's own: use one of yours")
    if not all(letter.isascii() and (letter.isalnum() or letter in "-_.") for letter in bucket):
        raise BadUrl(f"{field}: {bucket[:80]!r} is no name of a bucket: letters, digits, - and _")
    return ParsedUrl(parts.scheme, form, bucket=bucket, key=key)


def below(path: str, root: str) -> bool:
    """Whether an absolute path, without `..` and with symbolic links already followed, is inside a directory."""
    base = root.rstrip("/") + "/"
    plain = posixpath.normpath(path) == path and not path.startswith("//")  # which normpath leaves as it is
    return plain and path != base and path.startswith(base)


def _absolute(host: str, path: str, field: str) -> str:
    if host not in ("", "localhost"):
        raise BadUrl(f"{field}: file:// URLs have three slashes: file:///directory/name, not another machine's name")
    plain = posixpath.normpath("/" + path.lstrip("/"))
    if path.endswith("/") or plain == "/":
        raise BadUrl(f"{field}: {path[:80]!r} is a directory: name a file")
    if ".." in path.split("/"):
        raise BadUrl(f"{field}: a path may not contain ..")
    return plain


def _is_text(quoted: str) -> bool:
    try:
        unquote(quoted, errors="strict")
    except UnicodeDecodeError:
        return False
    return True
