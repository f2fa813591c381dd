"""Objects of an S3-compatible store, through s3fs: the settings of its client, what its errors mean, and many at once.

botocore reads address and credentials from the environment of each process (AWS_ENDPOINT_URL, AWS_PROFILE and so on).
"""

import asyncio
import errno
from collections.abc import Sequence, Set
from contextvars import ContextVar
from typing import Any

from paceline.tasks.data.samples import File
from paceline.tasks.errors import InputError, OutsideError, SourceError, one_line

PROTOCOLS = ("s3", "s3a")
AT_ONCE = 64  # concurrent requests, to hide the latency. botocore's default is 10 connections.
BODY_TRIES = 5  # tries for an answer that breaks off. botocore itself retries refused, lost and timed-out requests.
FIRST_WAIT_SECONDS = 0.1  # doubled with every further try

GONE = frozenset({"NoSuchKey", "NoSuchVersion", "404"})
DENIED = frozenset({"AccessDenied", "AllAccessDisabled", "InvalidObjectState", "403"})
CHANGED = frozenset({"PreconditionFailed", "412"})

_MEANINGS: dict[str, Set[str]] = {
    "the store has no bucket {bucket}; name an existing one, or correct AWS_ENDPOINT_URL": {"NoSuchBucket"},
    "the store denies this user access ({code}); allow s3:ListBucket and s3:GetObject there, or name another "
    "AWS_PROFILE": DENIED,
    "the store does not accept the credentials ({code}); renew those of AWS_PROFILE or of the environment, and look at "
    "the clock": {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
    | {"TokenRefreshRequired", "RequestTimeTooSkewed", "RequestExpired"},
    "the bucket is not in this region ({code}); set AWS_REGION to the one where it lies": {"PermanentRedirect", "301"}
    | {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"},
    "there are no credentials ({reason}); set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a "
    "public bucket FSSPEC_S3_ANON=true": {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"},
    "{reason}; correct AWS_PROFILE or ~/.aws/config": {"ProfileNotFound", "ConfigParseError", "ConfigNotFound"},
    "{reason}; correct the root or AWS_ENDPOINT_URL": {"ValueError", "ParamValidationError"},
}
"""Messages of the InputError by codes of the store or classes of botocore; the first that fits."""
_UNREACHABLE = frozenset({"ConnectionError", "HTTPClientError"})

Fetched = tuple[bytes | OSError, int]
"""The content of an object, or why the store has it no more or refuses it; requests, those sent again included."""
_SENT: ContextVar[list[int] | None] = ContextVar("_SENT", default=None)
"""One entry for each request of the running coroutine; None where s3fs fetches on its own."""


def is_s3(root: str) -> bool:
    """Whether a root names an S3 store."""
    return root.partition("://")[0] in PROTOCOLS and "://" in root


def options() -> dict[str, Any]:
    """Options of s3fs: enough connections, and no cache of listings."""
    from fsspec.config import conf  # the user's own settings, which s3fs would not merge

    given = conf.get("s3", {}).get("config_kwargs", {})
    return {"use_listings_cache": False, "config_kwargs": {"max_pool_connections": AT_ONCE, **given}}


def check_access(root: str, filesystem: Any, path: str) -> None:
    """Ask the store for one name below a root, and raise its refusal."""
    bucket, key, _ = filesystem.split_path(path)
    try:
        filesystem.call_s3("list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=1)
    except Exception as error:
        raise refusal(root, error) from error


def endpoint_of(root: str, filesystem: Any) -> str:
    """Connect, and return the address of the store; raise the refusal of the settings."""
    try:
        filesystem.connect()
        return str(filesystem.s3.meta.endpoint_url)
    except Exception as error:
        raise refusal(root, error) from error


def refusal(root: str, error: Exception) -> InputError:
    """The error of a store as an `InputError` with a fix."""
    code = code_of(error)
    names = {code} if code else {parent.__name__ for parent in type(error).__mro__}
    reason, bucket = one_line(error).rstrip("."), root.partition("://")[2].partition("/")[0]
    for text, codes in _MEANINGS.items():
        if codes & names:
            return InputError(f"data.root={root}: {text.format(bucket=bucket, code=code, reason=reason)}")
    fault = f"the store does not answer ({reason}); correct the address or the access"
    if names & _UNREACHABLE:
        fault = f"the store cannot be reached ({reason}); start it, or correct AWS_ENDPOINT_URL"
    return SourceError(f"data.root={root}: {fault}")


def is_of_store(error: Exception) -> bool:
    """Whether an error comes from the store or the network, and not from the content."""
    return any(kind.__module__.partition(".")[0] == "botocore" for kind in type(error).__mro__)


def code_of(error: BaseException | None) -> str:
    """The store's code for an error, also of one that s3fs has translated; empty without one."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


async def fetch(root: str, filesystem: Any, wanted: Sequence[File]) -> list[Fetched]:
    """Get objects, all at once, in the given order, in the event loop of the file system.

    SourceError if one has changed since it was listed, or the store does not answer; InputError if the store does not
    let this process in; OutsideError if an answer broke off again and again.
    """
    if not wanted:
        return []
    try:
        await filesystem.set_session()
        client = await filesystem.get_s3(filesystem.split_path(wanted[0].path)[0])
    except Exception as error:
        raise refusal(root, error) from error
    client.meta.events.register("before-send.s3.GetObject", _note_sent, unique_id="paceline")
    tasks = [asyncio.create_task(_fetch_one(root, filesystem, client, target)) for target in wanted]
    try:
        return await asyncio.gather(*tasks)
    finally:  # the first error is raised; cancel the others
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _note_sent(request: object, **_: object) -> None:
    """Called by botocore for every request, in the task that waits for its answer."""
    sent = _SENT.get()
    if sent is not None:
        sent.append(1)


async def _fetch_one(root: str, filesystem: Any, client: Any, one: File) -> Fetched:
    from botocore.exceptions import ClientError

    sent: list[int] = []
    _SENT.set(sent)
    bucket, key, _ = filesystem.split_path(one.path)
    request = {"Bucket": bucket, "Key": key, **filesystem.req_kw}
    if one.stamp and not filesystem.local_expiry_check:  # what s3fs calls stores that do not know If-Match
        request["IfMatch"] = one.stamp
    if one.start is not None and one.size:
        request["Range"] = f"bytes={one.start}-{one.start + one.size - 1}"
    content: bytes | OSError
    try:
        content = await _whole(root, client, request, one)
    except ClientError as error:
        code = code_of(error)
        if code in GONE:
            content = FileNotFoundError(errno.ENOENT, "the store has it no more")
        elif code in DENIED:
            content = PermissionError(errno.EACCES, f"the store denies access ({code})")
        else:
            raise _change_error(root, one) if code in CHANGED else refusal(root, error) from error
    return content, len(sent)


async def _whole(root: str, client: Any, asked: dict[str, Any], one: File) -> bytes:
    """The content of one object; what breaks off, or has another checksum than the store says, is requested again."""
    from aiohttp import ClientError as BrokenOff
    from botocore.exceptions import BotoCoreError

    waits = [FIRST_WAIT_SECONDS * 2**number for number in range(BODY_TRIES - 1)]
    while True:
        try:
            answer = await client.get_object(**asked)
        except BotoCoreError as error:
            raise refusal(root, error) from error
        if one.stamp and answer.get("ETag") != one.stamp:  # a store that does not know If-Match
            answer["Body"].close()
            raise _change_error(root, one)
        try:
            async with answer["Body"] as body:
                return bytes(await body.read())
        except (BrokenOff, BotoCoreError, OSError) as error:
            if not waits:
                fault = f"{one.path} broke off {BODY_TRIES} times ({one_line(error)})"
                fix = "look at the store and at the way to it, and run again"
                raise OutsideError(f"{root}: {fault}; {fix}") from error
        await asyncio.sleep(waits.pop(0))


def _change_error(root: str, one: File) -> SourceError:
    fault = f"{one.path} has changed since it was listed"
    return SourceError(f"data.root={root}: {fault}; let the writer finish, and run again")
