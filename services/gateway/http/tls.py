"""The gateway's TLS, for HTTP."""

import ssl


class BadTls(Exception):
    """A certificate or key cannot be used; the text names the setting."""


def context(certificate: str, key: str) -> ssl.SSLContext | None:
    """TLS 1.2 and newer with this certificate chain and key (paths of PEM files); None where neither is set. Raises BadTls."""
    if not certificate and not key:
        return None
    for path, setting, kind in (
        (certificate, "gateway.tls_certificate", "CERTIFICATE"),
        (key, "gateway.tls_key", "PRIVATE KEY"),
    ):
        if not path:
            raise BadTls(f"{setting} must name a PEM file: a certificate and its key belong together")
        try:
            with open(path, "rb") as file:
                text = file.read(2**20)
        except OSError as error:
            raise BadTls(f"{setting}: cannot read {path}: {error.strerror}") from error
        if b"-----BEGIN " not in text:
            raise BadTls(f"{setting}: {path} is no PEM file")
        if f"{kind}-----".encode() not in text:
            raise BadTls(f"{setting}: there is no {kind.lower()} in {path}")
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found.minimum_version = ssl.TLSVersion.TLSv1_2
    found.set_alpn_protocols(["http/1.1"])
    found.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        found.load_cert_chain(certificate, key, password=_no_password)
    except _Locked as error:
        raise BadTls(f"gateway.tls_key: {key} is encrypted: it must be a key without a password") from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadTls(f"gateway.tls_key: {key} is not the key of {certificate}") from error
        raise BadTls(f"gateway.tls_certificate, gateway.tls_key: {error.reason or error}") from error
    return found


class _Locked(Exception):
    """Somebody would have to type a password."""


def _no_password() -> str:
    raise _Locked
