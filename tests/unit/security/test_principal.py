"""Principals, and the names that certificates give."""

import pytest

from penstock.security.principal import ANONYMOUS, DistinguishedNameRules, Principal, certificate_subject


def test_a_principal_is_written_as_type_and_name():
    assert str(Principal("User", "alice")) == "User:alice"
    assert Principal.parse("User:CN=a:b") == Principal("User", "CN=a:b")
    assert str(ANONYMOUS) == "User:ANONYMOUS"
    for text in ("alice", ":alice", ""):
        with pytest.raises(ValueError, match="no principal"):
            Principal.parse(text)


SUBJECT = "CN=kafka1,OU=ServiceUsers,O=Unknown,L=Unknown,ST=Unknown,C=Unknown"


@pytest.mark.parametrize(
    ("rules", "subject", "name"),
    [
        ("DEFAULT", SUBJECT, SUBJECT),
        ("", SUBJECT, None),
        ("RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/", SUBJECT, "kafka1"),
        ("RULE:^CN=(.*?),OU=(.*?),O=(.*?),L=(.*?),ST=(.*?),C=(.*?)$/$1@$2/L", SUBJECT, "kafka1@serviceusers"),
        ("RULE:^.*[Cc][Nn]=([a-zA-Z0-9.]*).*$/$1/U", SUBJECT, "KAFKA1"),
        ("RULE:^CN=(x.*),OU=.*$/$1/, RULE:^CN=(.*?),.*$/$1/L , DEFAULT", SUBJECT, "kafka1"),
        ("RULE:^CN=nobody$/x/,DEFAULT", SUBJECT, SUBJECT),
        ("RULE:^CN=nobody$/x/", SUBJECT, None),
        ("RULE:^cn=(.*)$/$1/", "cn=a", "a"),
        (r"RULE:^CN=(.*)\/(.*)$/$2\/$1/", "CN=a/b", "b/a"),
        (r"RULE:^CN=(.*)$/\$1$2/", "CN=a", "$1$2"),
        ("RULE:^CN=([^,]{2,3}),.*$/$1/", "CN=ab,O=c", "ab"),
    ],
)
def test_the_first_rule_that_matches_the_subject_names_the_principal(rules, subject, name):
    assert DistinguishedNameRules(rules).name(subject) == name


@pytest.mark.parametrize(
    "rules", ["default", "RULE:^CN=(.*)$", "RULE:^CN=(.*)$/$1/X", "RULE:^(/$1/", "DEFAULT RULE:a/b/"]
)
def test_wrong_rules_are_refused(rules):
    with pytest.raises(ValueError, match=r"DEFAULT nor RULE|bad pattern|other than L or U"):
        DistinguishedNameRules(rules)


def subject_der(*names):
    """Return a certificate that has nothing but the fields up to its subject."""

    def element(tag, content):
        size = bytes([len(content)]) if len(content) < 128 else b"\x82" + len(content).to_bytes(2, "big")
        return bytes([tag]) + size + content

    def pair(oid, tag, value):
        return element(0x30, element(0x06, bytes.fromhex(oid)) + element(tag, value))

    subject = element(0x30, b"".join(element(0x31, b"".join(pair(*each) for each in name)) for name in names))
    version, number, empty = element(0xA0, b"\x02\x01\x02"), element(0x02, b"\x01"), element(0x30, b"")
    return element(0x30, element(0x30, version + number + empty + empty + empty + subject + empty))


def test_the_subject_is_written_as_java_writes_it():
    certificate = subject_der(
        [("550406", 0x13, b"DE")],
        [("55040a", 0x0C, b"Acme, Inc. "), ("55040b", 0x0C, b' "a+b"')],
        [("550403", 0x0C, "Zoë".encode())],
        [("2a864886f70d010901", 0x16, b"a@b")],
    )
    expected = '1.2.840.113549.1.9.1=#1603614062,CN=Zoë,O=Acme\\, Inc.\\ +OU=\\ \\"a\\+b\\",C=DE'
    assert certificate_subject(certificate) == expected


@pytest.mark.parametrize("size", [0, 1, 5, 20, 45])
def test_a_damaged_certificate_is_refused(size):
    with pytest.raises(ValueError, match="damaged"):
        certificate_subject(subject_der([("550403", 0x0C, b"a" * 200)])[:size])


@pytest.mark.parametrize(("tag", "text"), [(0x14, "m\xfcller"), (0x1E, "\0m\0\xfc"), (0x0C, "m\xff")])
def test_two_subjects_never_have_the_same_name(tag, text):
    """Bytes that are not UTF-8 are shown as they are: a replacement character would stand for all of them."""
    value = text.encode("latin-1")
    subject = certificate_subject(subject_der([("550403", tag, value)]))
    assert subject == f"CN=#{bytes([tag, len(value)]).hex()}{value.hex()}"
    assert subject != certificate_subject(subject_der([("550403", tag, value.replace(value[-1:], b"\xfe"))]))
