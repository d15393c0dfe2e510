"""From where a file may be fetched: what a URL, a host and an address may be."""

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.rafiqi.places import Host, NotAllowed, checked, hosts_of, place_of, public

HOSTS = hosts_of(("models.test", "depot.test:8080", "inside.test=10.1.2.3", "127.0.0.1:9000", "::1", "up.test:81=::1"))


def test_entries_of_the_setting() -> None:
    assert (
        Host("models.test", None, None),
        Host("depot.test", 8080, None),
        Host("inside.test", None, IPv4Address("10.1.2.3")),
        Host("127.0.0.1", 9000, IPv4Address("127.0.0.1")),
        Host("::1", None, IPv6Address("::1")),
        Host("up.test", 81, IPv6Address("::1")),
    ) == HOSTS


@pytest.mark.parametrize(
    "entry", ["", "http://models.test", "a b", "models.test:", "models.test:0", "models.test=here", "a/b", "2130706433"]
)
def test_entries_that_are_none_are_named(entry: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        hosts_of((entry,))


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://models.test/a/b.onnx?x=1#part", "/a/b.onnx?x=1"),
        ("http://MODELS.test.", "/"),
        ("http://depot.test:8080/x", "/x"),
        ("http://127.0.0.1:9000/x", "/x"),
        ("https://[::1]/x", "/x"),
    ],
)
def test_what_may_be_fetched(url: str, target: str) -> None:
    assert place_of(url, HOSTS).target == target


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("file:///etc/passwd", "only http"),
        ("gopher://models.test/1", "only http"),
        ("ftp://models.test/1", "only http"),
        ("data:text/plain,hello", "only http"),
        ("//models.test/x", "only http"),
        ("models.test/x", "only http"),
        ("http:///x", "no host"),
        ("http://user@models.test/x", "credentials"),
        ("http://user:word@models.test/x", "credentials"),
        ("http://models.test@169.254.169.254/x", "credentials"),
        ("http://models.test:x/", "cannot be read"),
        ("http://models.test\\@other.test/", "printable"),
        ("http://models.test/a b", "printable"),
        ("http://models.test/a\r\nHost: other", "printable"),
        ("http://modéls.test/", "printable"),
        ("http://models.test/" + "a" * 3000, "printable"),
        ("http://[::1", "cannot be read"),
        ("http://2130706433/", "no host name"),
        ("http://0x7f000001/", "no host name"),
        ("http://0177.0.0.1/", "no host name"),
        ("http://127.1/", "no host name"),
        ("http://127.0.0.0x1/", "no host name"),
    ],
)
def test_what_is_no_url_to_fetch(url: str, word: str) -> None:
    with pytest.raises(NotAllowed, match=word) as refused:
        place_of(url, HOSTS)
    assert not refused.value.forbidden


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test/",
        "http://models.test:8000/",
        "http://depot.test/",
        "http://sub.models.test/",
        "http://127.0.0.1/",
        "http://127.0.0.2:9000/",
        "http://169.254.169.254/latest/meta-data/",
        "http://localhost:9000/",
        "http://[::ffff:7f00:1]:9000/",
    ],
)
def test_hosts_that_the_operator_did_not_name(url: str) -> None:
    with pytest.raises(NotAllowed, match="register_hosts") as refused:
        place_of(url, HOSTS)
    assert refused.value.forbidden


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.0.8", "198.18.0.1", "203.0.113.5",
        "::", "::1", "fe80::1", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe", "::7f00:1", "2002:7f00:1::", "2002:a00:1::1",
        "64:ff9b::7f00:1", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ],
)  # fmt: skip
def test_addresses_of_private_networks(address: str) -> None:
    assert not public(ip_address(address))
    place = place_of("http://models.test/", HOSTS)
    with pytest.raises(NotAllowed, match="private"):
        checked([address], place)
    with pytest.raises(NotAllowed, match="private"):
        checked(["9.9.9.9", address], place)


@pytest.mark.parametrize("address", ["9.9.9.9", "2606:4700::1111", "::ffff:9.9.9.9", "64:ff9b::909:909"])
def test_addresses_of_the_internet(address: str) -> None:
    assert checked([address], place_of("http://models.test/", HOSTS)) == [address]


def test_a_host_with_an_address_may_be_nowhere_else() -> None:
    place = place_of("http://inside.test/", HOSTS)
    assert checked(["10.1.2.3"], place) == ["10.1.2.3"]
    assert checked(["::ffff:10.1.2.3"], place) == ["::ffff:10.1.2.3"]
    for other in ("10.1.2.4", "9.9.9.9", "::1"):
        with pytest.raises(NotAllowed, match="another address"):
            checked(["10.1.2.3", other], place)
    with pytest.raises(NotAllowed, match="no address"):
        checked([], place)


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_the_same_however_it_is_written(address: IPv4Address) -> None:
    mapped = ip_address(f"::ffff:{address}")
    assert public(mapped) == public(address)
    assert not (public(address) and (address.is_private or address.is_multicast or address.is_loopback))


@given(st.text(max_size=60))
def test_any_text_is_refused_or_leads_to_an_allowed_host(text: str) -> None:
    for url in (text, f"http://{text}", f"https://models.test{text}", f"http://{text}.models.test/"):
        try:
            place = place_of(url, HOSTS)
        except NotAllowed:
            continue
        assert place.host in {host.name for host in HOSTS}
        assert not set(place.target) & set(" \r\n\t")
