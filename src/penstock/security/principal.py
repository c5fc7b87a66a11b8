"""Who a connection belongs to: a principal, and how the subject of a client certificate becomes one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

USER: Final = "User"


class Principal(NamedTuple):
    type: str
    name: str

    def __str__(self) -> str:
        return f"{self.type}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> Principal:
        """Parse TYPE:NAME; the name may contain further colons. Raises ValueError."""
        kind, colon, name = text.partition(":")
        if not colon or not kind:
            raise ValueError(f"{text!r} is no principal such as User:alice")
        return cls(kind, name)


ANONYMOUS: Final = Principal(USER, "ANONYMOUS")
#: In access rules they stand for everybody, and for clients that have not logged in: no login may give them.
RESERVED_NAMES: Final = frozenset({"*", ANONYMOUS.name})

#: As in Apache Kafka: DEFAULT, RULE:pattern/replacement/ with an optional L or U, or nothing.
_RULE: Final = r"(DEFAULT)|RULE:((?:\\.|[^\\/])*)/((?:\\.|[^\\/])*)/([LU]?).*?|(.*?)"
_RULE_PARSER: Final = re.compile(_RULE)
_RULE_SPLITTER: Final = re.compile(rf"\s*({_RULE})\s*(,\s*|$)")
#: In a replacement: `$1` is a group of the pattern, and a backslash makes the next character literal.
_REPLACED: Final = re.compile(r"\\(.)|\$(\d)", re.DOTALL)


class _Rule(NamedTuple):
    pattern: re.Pattern[str]
    replacement: str
    case: str

    def apply(self, subject: str) -> str | None:
        if self.pattern.fullmatch(subject) is None:
            return None
        name = self.pattern.sub(self.expand, subject)
        return name.lower() if self.case == "L" else name.upper() if self.case == "U" else name

    def expand(self, match: re.Match[str]) -> str:
        def part(found: re.Match[str]) -> str:
            literal, group = found.groups()
            if literal is not None:
                return literal
            # As in Apache Kafka, a reference to a group that the pattern does not have stays as it is.
            return (match[int(group)] or "") if int(group) <= self.pattern.groups else found[0]

        return _REPLACED.sub(part, self.replacement)


class DistinguishedNameRules:
    """`ssl.principal.mapping.rules`: the first rule that matches the subject gives the name of the principal."""

    def __init__(self, text: str = "DEFAULT") -> None:
        """Raises ValueError with a message that says what is wrong."""
        self._rules = tuple(_parse_rules(text))

    def name(self, subject: str) -> str | None:
        """Return the name for the subject of a certificate, or None if no rule matches."""
        for rule in self._rules:
            name = subject if rule is None else rule.apply(subject)
            if name is not None:
                return name
        return None


def _parse_rules(text: str) -> Iterator[_Rule | None]:
    """Yield the rules; None stands for DEFAULT."""
    for found in _RULE_SPLITTER.finditer(text.strip()):
        rule = found[1]
        parsed = _RULE_PARSER.fullmatch(rule)
        if parsed is None or (parsed[1] is None and parsed[2] is None and rule):
            raise ValueError(f"{rule!r} is neither DEFAULT nor RULE:pattern/replacement/[LU]")
        if parsed[1] is not None:
            yield None
        elif parsed[2] is not None:
            if not rule.endswith(f"/{parsed[4]}"):
                raise ValueError(f"{rule!r} ends in something other than L or U")
            try:
                yield _Rule(re.compile(parsed[2]), parsed[3], parsed[4])
            except re.error as error:
                raise ValueError(f"{rule!r} has a bad pattern: {error}") from None


# -- the subject of a certificate ------------------------------------------------------------------------

#: The attributes that RFC 2253 names. As in Java, any other attribute is written with its number and its bytes. Unlike
#: in Java, so is a text that is not UTF-8: two subjects must not have the same name.
_KEYWORDS: Final = {
    bytes.fromhex("550403"): "CN",
    bytes.fromhex("550406"): "C",
    bytes.fromhex("550407"): "L",
    bytes.fromhex("550408"): "ST",
    bytes.fromhex("55040a"): "O",
    bytes.fromhex("55040b"): "OU",
    bytes.fromhex("550409"): "STREET",
    bytes.fromhex("0992268993f22c640119"): "DC",
    bytes.fromhex("0992268993f22c640101"): "UID",
}
#: UTF8String, PrintableString, T61String, IA5String, GeneralString, UniversalString and BMPString.
_STRING_TAGS: Final = frozenset({0x0C, 0x13, 0x14, 0x16, 0x1B, 0x1C, 0x1E})
_ESCAPED: Final = re.compile(r'[,=+<>#;"\\]')
_EXPLICIT_VERSION: Final = 0xA0


class _Element(NamedTuple):
    """One value in DER: its tag, its content, and all its bytes."""

    tag: int
    content: bytes
    encoded: bytes


def certificate_subject(certificate: bytes) -> str:
    """Return the subject of a certificate in DER as Java writes it (RFC 2253): `CN=alice,OU=Payments,O=Acme`.

    Raises ValueError if the bytes are no certificate.
    """
    try:
        outer = next(_elements(certificate))
        fields = list(_elements(next(_elements(outer.content)).content))
        # version (optional), serial number, signature algorithm, issuer, validity, subject
        subject = fields[5 if fields[0].tag == _EXPLICIT_VERSION else 4]
        return ",".join(reversed([_relative_name(name.content) for name in _elements(subject.content)]))
    except (IndexError, StopIteration):
        raise ValueError("the certificate is damaged") from None


def _relative_name(content: bytes) -> str:
    return "+".join(_attribute(*_elements(pair.content)) for pair in _elements(content))


def _attribute(kind: _Element, value: _Element) -> str:
    keyword, text = _KEYWORDS.get(kind.content), None
    if keyword is not None and value.tag in _STRING_TAGS:
        with suppress(UnicodeDecodeError):
            text = value.content.decode()
    if text is None:
        return f"{keyword or _object_id(kind.content)}=#{value.encoded.hex()}"
    text = _ESCAPED.sub(r"\\\g<0>", text).replace("\0", "\\00")
    inner = text.strip(" ")
    before = len(text) - len(text.lstrip(" "))
    after = len(text) - before - len(inner)
    return f"{keyword}=" + "\\ " * before + inner + "\\ " * after


def _object_id(content: bytes) -> str:
    numbers, number = [], 0
    for byte in content:
        number = number << 7 | byte & 0x7F
        if not byte & 0x80:
            numbers.append(number)
            number = 0
    first = min(numbers[0] // 40, 2)
    return ".".join(map(str, (first, numbers[0] - 40 * first, *numbers[1:])))


def _elements(encoded: bytes) -> Iterator[_Element]:
    """Yield the values that follow each other. Raises IndexError if the last is cut short."""
    position = 0
    while position < len(encoded):
        start = position
        tag, size = encoded[position], encoded[position + 1]
        position += 2
        if size & 0x80:
            octets = size & 0x7F
            size = int.from_bytes(encoded[position : position + octets], "big")
            position += octets
        end = position + size
        if end > len(encoded):
            raise IndexError
        yield _Element(tag, encoded[position:end], encoded[start:end])
        position = end
