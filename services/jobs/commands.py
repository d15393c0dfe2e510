"""The commands of the coordinator's actor to its edge, and their results; and where a job reads and writes: file://,
nats://bucket/key and s3://bucket/key, and the format that the name's ending says.

Only a URL's text counts here. Whether a file lies below an allowed directory is decided where it is opened (files.py).
"""

import posixpath
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from bus.messages.catalog import Signature
from bus.messages.jobs import Checkpoint, JobRecord, Position, uploads_of
from bus.messages.public import Error
from bus.subjects import Subjects

ENDINGS = {".npy": "npy", ".jsonl": "jsonl", ".ndjson": "jsonl", ".msgpack": "msgpack", ".mpk": "msgpack"}
SCHEMES = ("file", "nats", "s3")
LONGEST = 2000  # characters of a URL
SUBJECTS = Subjects()


class BadUrl(ValueError):
    """A URL that names no location; the text says which field, and what would do."""


class ParsedUrl(Struct, frozen=True):
    """What a URL names. path: of file://, absolute, without `.` and `..`. bucket, key: of the other schemes."""

    scheme: str
    format: str
    path: str = ""
    bucket: str = ""
    key: str = ""


def parse(url: str, field: str, subjects: Subjects = SUBJECTS, app: str = "") -> ParsedUrl:
    """The location that a URL names; raises BadUrl. field: the sender's name for it. subjects: of the cluster, whose buckets are its own.

    app: whose uploads the URL may name.
    """
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
    own = bucket == subjects.uploads_bucket and key.startswith(uploads_of(app))
    if parts.scheme == "nats" and not own and (bucket == subjects.prefix or bucket.startswith(f"{subjects.prefix}-")):
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


class JobRoute(Struct, frozen=True):
    """Where a job's items come from and go to. signature: the model's, which says what they look like."""

    job: str
    source: ParsedUrl
    target: ParsedUrl
    signature: Signature


class Accept(Struct, frozen=True):
    """Check that input and output can be used, then keep the job. Result: None, or the Error that it is refused with."""

    route: JobRoute
    record: JobRecord


class Read(Struct, frozen=True):
    """Fetch a remote input, and look at every item. Result: WasRead or Broken."""

    route: JobRoute


class WasRead(Struct, frozen=True):
    """items: in the whole input. stamp: of the file that was read."""

    items: int
    stamp: str


class Broken(Struct, frozen=True):
    """The job cannot go on, on no coordinator; reason: which field, and why."""

    reason: str


class ChunkRange(Struct, frozen=True):
    """One chunk: its number, its first item, how many items, and where it begins and ends in the input."""

    number: int
    first: int
    items: int
    start: Position
    end: Position


class Feed(Struct, frozen=True):
    """Cut up to `count` chunks from `position` on and queue them, except those in `skip`. Result: list of ChunkRange, or Broken."""

    route: JobRoute
    stamp: str
    chunk_items: int
    number: int
    first: int
    total: int
    position: Position
    count: int
    skip: frozenset[int]
    generation: int


class Resume(Struct, frozen=True):
    """Find what is already done of a job. Result: Resumed."""

    route: JobRoute
    checkpoint: Checkpoint


class Resumed(Struct, frozen=True):
    """written: the output is there up to the checkpoint. parts: numbers of those in the bucket."""

    written: bool
    parts: frozenset[int]


class Assemble(Struct, frozen=True):
    """Append to the output the parts of these chunks, which follow the checkpoint. Result: Assembled or Broken."""

    route: JobRoute
    total: int
    checkpoint: Checkpoint
    chunks: list[ChunkRange]


class Assembled(Struct, frozen=True):
    """checkpoint: after the parts that were appended, which are on disk. cost, variants: of these parts.

    failure: why the next chunk has no outputs; failed: its items.
    """

    checkpoint: Checkpoint
    cost: float
    variants: list[str]
    failure: str = ""
    failed: int = 0


class Keep(Struct, frozen=True):
    """Write the record, unless another coordinator has written it since. Result: whether it was written.

    drop: chunks whose parts nobody needs after that.
    """

    record: JobRecord
    drop: list[int] = []


class Conclude(Struct, frozen=True):
    """Give the finished output its name, or store it where the job says. Result: None or Broken."""

    route: JobRoute
    checkpoint: Checkpoint


class Abandon(Struct, frozen=True):
    """Delete what a job that failed or was cancelled leaves behind. keep: its partial output stays, under another name.

    Result: the URL of the partial output; empty if there is none.
    """

    route: JobRoute
    checkpoint: Checkpoint
    keep: bool


class MarkJobCancelled(Struct, frozen=True):
    """Mark the job as cancelled, whichever coordinator carries it on. Result: CancelResult."""

    job: str
    now: float


class CancelResult(Struct, frozen=True):
    """record: as it is kept now. error: why the job was not cancelled."""

    record: JobRecord | None = None
    error: Error | None = None


class ForgetJob(Struct, frozen=True):
    """Delete the record of a job that ended long ago."""

    job: str
