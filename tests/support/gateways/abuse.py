"""What clients do to an HTTP gateway by mistake or on purpose: bytes, and the replies that they may get.

Used by tests/live/test_gateway_abuse.py, which runs all of it, and by benches/gateway_fuzz.py, which also times it.
"""

import json
import random
import zlib
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

APP = "digits"
INFER = f"/v2/models/{APP}/infer"


class Abuse(NamedTuple):
    """One request, or what looks like one. fine: statuses that it may get; 0: closed without a reply."""

    name: str
    data: bytes
    fine: frozenset[int]


def request(path: str, body: Any = b"", method: str = "POST", **headers: str) -> bytes:
    """A well-formed request; what is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {
        "Host": "localhost",
        "Content-Length": str(len(data)),
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    head = "".join(f"{name}: {text}\r\n" for name, text in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + data


def chunked(path: str, *chunks: bytes, **headers: str) -> bytes:
    """The same with a body in these chunks."""
    head = "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in headers.items())
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n{head}\r\n".encode()
        + body
        + b"0\r\n\r\n"
    )


def tensor(**changes: Any) -> dict[str, Any]:
    """The body of a query, with changes to its tensor."""
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 784], "data": [0.0] * 784, **changes}]}


def bomb(megabytes: int, coding: str = "gzip", *, layers: int = 1) -> bytes:
    """So many MB of zeros, compressed; made without ever holding them."""
    packer = zlib.compressobj(9, wbits=31 if coding == "gzip" else 15)
    zeros = bytes(2**20)
    packed = b"".join(packer.compress(zeros) for _ in range(megabytes)) + packer.flush()
    for _ in range(layers - 1):
        packed = zlib.compress(packed, 9)
    return packed


def endless_bomb() -> bytes:
    """10 MB that become 10 GB: one block of a deflate stream that says the same again and again."""
    packer = zlib.compressobj(9, wbits=31)
    start = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    again = zlib.compressobj(9, wbits=-15)
    block = again.compress(bytes(2**20)) + again.flush(zlib.Z_FULL_FLUSH)
    return start + block * (10 * 2**20 // len(block))


def _abuse(name: str, data: bytes, *fine: int) -> Abuse:
    return Abuse(name, data, frozenset(fine))


def everything() -> Iterator[Abuse]:
    """All of it, made one after the other."""
    yield from connections()
    yield from bodies()
    yield from tensors()
    yield from paths()


def connections() -> Iterator[Abuse]:
    """What is no request, or two, where more than its reply is at stake; tests/unit/shell/http/test_protocol.py has the others."""
    get = b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n"
    post = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n".encode()
    yield _abuse("noise", bytes(range(256)) * 40, 400)
    yield _abuse("HTTP/1.0", b"GET /v2 HTTP/1.0\r\n\r\n", 200)
    yield _abuse("another host", b"GET /v2 HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421)
    yield _abuse("another host in a URL", b"GET http://evil.example/v2 HTTP/1.1\r\nHost: localhost\r\n\r\n", 421)
    yield _abuse("a URL", b"GET http://localhost/v2 HTTP/1.1\r\nHost: evil.example\r\n\r\n", 200)
    yield _abuse("a length like no number", post + b"Content-Length: 0x10\r\n\r\n", 400)
    yield _abuse("a length of terabytes", post + b"Content-Length: 9000000000000\r\n\r\n", 413)
    yield _abuse("a line injected", get + b"X: a\rHost: b\r\n\r\n", 400)
    yield _abuse("a long line", b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414)
    yield _abuse("a long query", b"GET /v2?" + b"a" * 2**20 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414)
    yield _abuse("a long header", get + b"X: " + b"a" * 2**20 + b"\r\n\r\n", 431)
    yield _abuse("many headers", get + b"X: a\r\n" * 100_000 + b"\r\n", 431)
    yield _abuse("a long trailer", chunked(INFER, b"{}")[:-2] + b"X: " + b"a" * 2**20 + b"\r\n\r\n", 431, 400)
    yield _abuse("3 MB in chunks of a byte", chunked(INFER, *[b" "] * 500_000), 413)
    yield _abuse("a long extension", post + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * 2**20, 431)
    yield _abuse("requests ahead", (get + b"\r\n") * 5000, 200)
    yield _abuse(
        "a boundary of a megabyte",
        request("/v2/models/digits/infer", b"--", Content_Type="multipart/form-data; boundary=" + "-" * 2**20),
        431,
    )
    yield _abuse(
        "an offer of websockets",
        get + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n",
        200,
    )


def bodies() -> Iterator[Abuse]:
    """Bodies that are too large, packed too tightly, or no JSON."""
    deep = 10**6
    yield _abuse("lists in lists", request(INFER, b"[" * deep), 400)
    yield _abuse("closed lists in lists", request(INFER, b'{"inputs":' + b"[" * deep + b"]" * deep + b"}"), 400)
    yield _abuse("maps in maps", request(INFER, b'{"a":' * deep + b"1" + b"}" * deep), 400)
    yield _abuse(
        "deep data",
        request(INFER, b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,784],"data":' + b"[" * deep),
        400,
    )
    yield _abuse("deep parameters", request(INFER, b'{"parameters":{"a":' + b"[" * deep + b"]" * deep + b"}}"), 400)
    yield _abuse("10 MB that become 10 GB", request(INFER, endless_bomb(), Content_Encoding="gzip"), 413)
    yield _abuse("a bomb by deflate", request(INFER, bomb(200, "deflate"), Content_Encoding="deflate"), 413)
    yield _abuse("a bomb in a bomb", request(INFER, bomb(200, layers=2), Content_Encoding="deflate, gzip"), 415)
    yield _abuse("an unknown coding", request(INFER, b"abc", Content_Encoding="br"), 415)
    yield _abuse("no gzip", request(INFER, b"abc", Content_Encoding="gzip"), 400)
    yield _abuse("half a gzip", request(INFER, zlib.compress(b"{}" * 99)[:-9], Content_Encoding="deflate"), 400)
    for name, body in {
        "nothing": b"",
        "no JSON": b"{",
        "a number": b"1",
        "null": b"null",
        "NaN": json.dumps(tensor(data=[float("nan")] * 784)).encode(),
        "infinity": b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1e999]}]}',
        "a lone surrogate": b'{"id":"\\ud800","inputs":[]}',
        "bytes that are no text": b'{"id":"\xff\xfe","inputs":[]}',
        "a NUL": b'{"inputs":[]}\0',
        "two documents": b"{}{}",
        "UTF-16": json.dumps(tensor()).encode("utf-16"),
        "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
        "a huge number": b'{"inputs":[{"name":"x","datatype":"INT64","shape":[1],"data":[' + b"9" * 100_000 + b"]}]}",
        "duplicate keys": b'{"inputs":[],"inputs":{}}',
        "XML": b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>',
    }.items():
        yield _abuse(f"a body of {name}", request(INFER, body), 400)
    yield _abuse(
        "binary data that is not there",
        request(
            INFER,
            json.dumps(tensor(data=None, parameters={"binary_data_size": 3136})).encode(),
            Inference_Header_Content_Length="10",
        ),
        400,
    )
    start = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,784],"data":['
    for name, text in {
        "empty lists": start + b"[]," * 2**20 + b"0]}]}",
        "zeros": start + b"0," * 2**21 + b"0]}]}",
        "inputs": b'{"inputs":[' + b'{"name":"","shape":[],"datatype":""},' * 2**18 + b"0]}",
        "parameters": b'{"inputs":[],"parameters":{"a":[' + b"{}," * 2**18 + b"0]}}",
    }.items():
        yield _abuse(f"millions of {name}", request(INFER, text), 413)
    for path in ("/digits/predict", "/digits/update", "/classify?model_name=digits", "/register", "/admin/add_app"):
        yield _abuse(f"millions of lists to {path}", request(path, b"[" + b"[]," * 2**20 + b"0]"), 413)
        yield _abuse(f"depth to {path}", request(path, b"[" * deep), 400)
        yield _abuse(f"a bomb to {path}", request(path, bomb(20), Content_Encoding="gzip"), 413)
        yield _abuse(f"noise to {path}", request(path, bytes(range(256)) * 99), 400)
        yield _abuse(f"nothing to {path}", request(path, b""), 400)
    app = {"name": "../x", "input_type": "floats", "latency_slo_micros": 1, "default_output": "[" * 10**5}
    yield _abuse("a deep default", request("/admin/add_app", app), 400)
    for trace in ("\xff\xfe", "0" * 8000, "00-" + "g" * 32 + "-" + "0" * 16 + "-01", "", "\t"):
        yield _abuse(f"a trace of {trace[:9]!r}", request(INFER, tensor(), traceparent=trace), 200)
    for length in ("-1", "99999999999999999999", "1e3", "abc", "", "9999"):
        yield _abuse(
            f"a JSON length of {length!r}", request(INFER, tensor(), Inference_Header_Content_Length=length), 400
        )


def tensors() -> Iterator[Abuse]:
    """Tensors that are none by their number, and names that mean something elsewhere; tests/unit/gateway/test_stock_rest.py has the other wrong fields."""
    yield _abuse("10,000 axes", request(INFER, tensor(shape=[1] * 10_000)), 400)
    yield _abuse("a shape of 2^32 by 2^32", request(INFER, tensor(shape=[2**32, 2**32], data=[])), 400)
    yield _abuse("10,000 inputs", request(INFER, {"inputs": tensor(shape=[1, 1], data=[0.0])["inputs"] * 10_000}), 400)
    for name in ("../x", "a" * 300, "$(id)", "' or 1=1", "{{7*7}}", "a\0b", "\u202e"):
        text = json.dumps({**tensor(), "parameters": {"model": name}}).encode()
        yield _abuse(f"model of {name[:20]!r}", request(INFER, text), 400, 404)


def paths() -> Iterator[Abuse]:
    """Names and verbs that no route has."""
    for name in (
        "nothing", "..", "%2e%2e", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "a%00", "a%0d%0aX:1", "%ff", "a" * 300, "*", "%3e",
        "digits.", ".digits", "digits.a.b.c", "digits%20", "%20", "%24%28id%29", "digits;a=1", "_", "digits.logreg.nothing",
        "%EF%BD%84igits", "digits%E2%80%8B",
    ):  # fmt: skip
        for path, method in ((f"/v2/models/{name}/infer", "POST"), (f"/v2/models/{name}", "GET")):
            yield _abuse(
                f"{method} {path[:60]}", request(path, tensor() if method == "POST" else b"", method), 400, 404
            )
    for path in (
        "/v2/",
        "/v3",
        "//v2",
        "/v2/models/",
        "/apps/",
        "/apps/..%2f..",
        "/apps/%3cscript%3e",
        "/docs/x",
        "/etc/passwd",
        "/.git/config",
        "/v2/..%5c..%5c",
        "/%c0%ae%c0%ae/",
    ):
        yield _abuse(f"GET {path}", request(path, method="GET"), 400, 404)
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "PROPFIND", "HEAD", "GET"):
        yield _abuse(f"{method} on infer", request(INFER, method=method), 405)
    for method, path in product(("POST", "PUT", "DELETE"), ("/v2", "/v2/models", "/", "/docs", "/metrics")):
        yield _abuse(f"{method} on {path}", request(path, method=method), 405)
    yield _abuse("a page's query", request(INFER, tensor(), Origin="http://evil.example"), 403)
    yield _abuse("a page without origin", request(INFER, tensor(), Origin="null", Content_Type="text/plain"), 403)


def heavy() -> Iterator[Abuse]:
    """Bodies just below the limit of size that would become gigabytes: JSON of short items."""
    size = 20 * 2**20
    start = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,784],"data":['
    for name, text in {
        "lists": start + b"[]," * size + b"0]}]}",
        "numbers": start + b"0," * size + b"0]}]}",
        "fractions": start + b"0.5," * (size // 2) + b"0]}]}",
        "parameters": b'{"inputs":[],"parameters":{"a":[' + b"{}," * size + b"0]}}",
        "inputs": b'{"inputs":[' + b'{"name":"","shape":[],"datatype":""},' * (size // 13) + b"0]}",
        "axes": b'{"inputs":[{"name":"x","datatype":"FP32","data":[],"shape":[' + b"1," * size + b"1]}]}",
        "names": b'{"inputs":[],"parameters":{' + b",".join(b'"%x":1' % i for i in range(size // 10)) + b"}}",
    }.items():
        yield _abuse(f"{len(text) >> 20} MiB of {name}", request(INFER, text), 413)


def mutant(chance: random.Random) -> bytes:
    """A good request, or several, with some bytes changed, lost, repeated or exchanged."""
    good = [
        request(INFER, tensor()),
        request(INFER, json.dumps(tensor(data=None)).encode(), Inference_Header_Content_Length="60"),
        request(INFER, zlib.compress(json.dumps(tensor()).encode()), Content_Encoding="deflate"),
        chunked(INFER, json.dumps(tensor()).encode()[:1000], json.dumps(tensor()).encode()[1000:]),
        request("/v2/models/digits", method="GET", Connection="close"),
        request("/digits/predict", {"input": [0.0] * 784}),
        request("/classify?model_name=digits", bytes(3136), Content_Type="application/octet-stream"),
        b"GET http://localhost/v2 HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n\r\n",
    ]
    data = bytearray(b"".join(chance.choices(good, k=chance.choice((1, 1, 1, 2, 3)))))
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        at = chance.randrange(len(data) + 1) if chance.random() < 0.5 else chance.randrange(min(200, len(data)) + 1)
        match chance.randrange(5):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[at : at + chance.choice((1, 2, 10, 1000))]
            case 2:
                data[at:at] = data[at : at + chance.choice((1, 4, 100))] * chance.choice((1, 2, 50))
            case 3:
                data[at:at] = chance.choice(
                    (b"\r\n", b"\n", b"\0", b" ", b":", b"\xff", b"%2e", b"9" * 30, b"-1", b"\r\n\r\n", b"chunked")
                )
            case 4:
                del data[at:]
        if not data:
            break
    return bytes(data) or b"\r\n"


# What a mutant may get: 0 is a closed connection; 503 and 504, a variant that is being loaded.
MUTANTS_MAY = frozenset({0, 100, 200, 400, 404, 405, 408, 413, 414, 415, 421, 422, 431, 503, 504})
