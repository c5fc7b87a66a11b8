"""Each codec reads what clients send, writes what they can read, and respects its bound."""

import gzip
import struct
import tracemalloc

import lz4.frame
import pytest
import snappy
import zstandard
from kafka import codec as kafka_codec

from penstock.protocol import compression
from penstock.protocol.compression import Codec, announced_bytes, compress, decompress
from penstock.protocol.errors import ApiError, ErrorCode

PLAIN = b"".join(b"line %d of something that repeats; " % (n % 97) for n in range(4000))
BOUND = 1 << 20
COMPRESSED = [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD]

#: What clients are known to send, by name.
FROM_CLIENTS = {
    "gzip": (Codec.GZIP, gzip.compress(PLAIN)),
    "gzip in two members": (Codec.GZIP, gzip.compress(PLAIN[:1000]) + gzip.compress(PLAIN[1000:])),
    "snappy as Java frames it": (Codec.SNAPPY, kafka_codec.snappy_encode(PLAIN)),
    "snappy framed with little-endian versions": (
        Codec.SNAPPY,
        b"\x82SNAPPY\x00" + struct.pack("<ii", 1, 1) + kafka_codec.snappy_encode(PLAIN)[16:],
    ),
    "snappy as one bare block": (Codec.SNAPPY, snappy.compress(PLAIN)),
    "lz4 with independent blocks": (Codec.LZ4, kafka_codec.lz4_encode(PLAIN)),
    "lz4 with linked blocks": (Codec.LZ4, lz4.frame.compress(PLAIN, block_linked=True)),
    "lz4 with checksums": (
        Codec.LZ4,
        lz4.frame.compress(PLAIN, content_checksum=True, block_checksum=True, store_size=False),
    ),
    "lz4 with blocks of 4 MB": (Codec.LZ4, lz4.frame.compress(PLAIN, block_size=lz4.frame.BLOCKSIZE_MAX4MB)),
    "zstd": (Codec.ZSTD, zstandard.compress(PLAIN)),
    "zstd streamed, of unknown size": (
        Codec.ZSTD,
        zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compress(PLAIN),
    ),
    "zstd in two frames": (Codec.ZSTD, zstandard.compress(PLAIN[:1000]) + zstandard.compress(PLAIN[1000:])),
}

READ_BY_CLIENTS = {
    Codec.GZIP: kafka_codec.gzip_decode,
    Codec.SNAPPY: kafka_codec.snappy_decode,
    Codec.LZ4: kafka_codec.lz4_decode,
    Codec.ZSTD: kafka_codec.zstd_decode,
}


@pytest.mark.parametrize("name", FROM_CLIENTS)
def test_reads_what_clients_send(name: str) -> None:
    codec, data = FROM_CLIENTS[name]
    assert bytes(decompress(codec, data, BOUND)) == PLAIN


@pytest.mark.parametrize("codec", COMPRESSED)
@pytest.mark.parametrize("plain", [b"x", PLAIN, PLAIN * 3])
def test_clients_read_what_we_write(codec: Codec, plain: bytes) -> None:
    data = compress(codec, plain)
    assert READ_BY_CLIENTS[codec](data) == plain
    assert bytes(decompress(codec, data, BOUND)) == plain


@pytest.mark.parametrize("codec", Codec)
def test_nothing_round_trips(codec: Codec) -> None:
    assert bytes(decompress(codec, compress(codec, b""), BOUND)) == b""


def test_lz4_blocks_are_independent() -> None:
    """Java clients refuse linked blocks."""
    assert lz4.frame.get_frame_info(compress(Codec.LZ4, PLAIN))["block_linked"] is False


def test_snappy_is_framed_as_java_expects() -> None:
    data = compress(Codec.SNAPPY, PLAIN)
    assert data[:16] == kafka_codec.snappy_encode(PLAIN)[:16]


@pytest.mark.parametrize("name", FROM_CLIENTS)
def test_the_bound_is_exact(name: str) -> None:
    codec, data = FROM_CLIENTS[name]
    assert len(decompress(codec, data, len(PLAIN))) == len(PLAIN)
    with pytest.raises(ApiError, match="more than") as refused:
        decompress(codec, data, len(PLAIN) - 1)
    assert refused.value.code is ErrorCode.corrupt_message


@pytest.mark.parametrize("name", FROM_CLIENTS)
def test_what_is_announced_is_close_to_what_comes(name: str) -> None:
    codec, data = FROM_CLIENTS[name]
    announced = announced_bytes(codec, data, 64 << 20)
    if "two" in name:
        return  # of the last or the first part only, and found out
    assert len(PLAIN) <= announced <= len(PLAIN) + (4 << 20)


def test_small_sizes_of_zstd_are_read_right() -> None:
    for size in (0, 1, 255, 256, 257, 65_791, 65_792, 300_000):
        assert announced_bytes(Codec.ZSTD, zstandard.compress(bytes(size)), 1 << 20) == size


def test_data_that_announces_too_little_is_read_all_the_same() -> None:
    data = gzip.compress(PLAIN)[:-4] + struct.pack("<I", 10)
    with pytest.raises(ApiError):
        decompress(Codec.GZIP, data, BOUND)
    for name in ("gzip in two members", "zstd in two frames"):
        codec, data = FROM_CLIENTS[name]
        assert announced_bytes(codec, data, BOUND) < len(PLAIN)
        assert bytes(decompress(codec, data, BOUND)) == PLAIN


BOMB_BYTES = 64 << 20
BOMBS = {
    "gzip": (Codec.GZIP, gzip.compress(bytes(BOMB_BYTES), 1)),
    "snappy block": (Codec.SNAPPY, snappy.compress(bytes(BOMB_BYTES))),
    "snappy frame": (Codec.SNAPPY, kafka_codec.snappy_encode(bytes(BOMB_BYTES))),
    "snappy block that claims 4 GB": (Codec.SNAPPY, b"\xff\xff\xff\xff\x0f" + b"\x00" * 16),
    "lz4": (Codec.LZ4, lz4.frame.compress(bytes(BOMB_BYTES))),
    "zstd": (Codec.ZSTD, zstandard.compress(bytes(BOMB_BYTES))),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_no_more_than_the_bound(name: str) -> None:
    codec, data = BOMBS[name]
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as refused:
            decompress(codec, data, BOUND)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.value.code is ErrorCode.corrupt_message
    assert peak_bytes < 3 * BOUND


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_that_announces_its_size_is_refused_before_any_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_work(_: int) -> memoryview:
        raise AssertionError("memory was taken for it")

    monkeypatch.setattr(compression, "_buffer", no_work)
    codec, data = BOMBS[name]
    with pytest.raises(ApiError, match="more than"):
        decompress(codec, data, BOUND)


@pytest.mark.parametrize("codec", COMPRESSED)
def test_many_small_blocks_are_not_walked_to_their_end(codec: Codec) -> None:
    """Looking at headers has to stay cheap: the loop does it."""
    blocks = {
        Codec.GZIP: gzip.compress(PLAIN)[:-4] + b"\xff\xff\xff\xff",
        Codec.SNAPPY: kafka_codec.snappy_encode(PLAIN)[:16] + (struct.pack(">i", 3) + b"\x01\x00x") * 5_000,
        Codec.LZ4: b"\x04\x22\x4d\x18\x60\x40\x82" + (struct.pack("<I", 1 | 1 << 31) + b"x") * 5_000,
        Codec.ZSTD: b"\x28\xb5\x2f\xfd\x00\x58" + (b"\x0a\x00\x00x") * 5_000,
    }
    assert announced_bytes(codec, blocks[codec], 1 << 30) == 1 << 30


@pytest.mark.parametrize("codec", COMPRESSED)
@pytest.mark.parametrize("damage", ["empty", "garbage", "cut"])
def test_damage_is_a_corrupt_message(codec: Codec, damage: str) -> None:
    data = {"empty": b"", "garbage": b"\xfe" * 40, "cut": compress(codec, PLAIN)[:-7]}[damage]
    with pytest.raises(ApiError) as refused:
        decompress(codec, data, BOUND)
    assert refused.value.code is ErrorCode.corrupt_message


@pytest.mark.parametrize(
    "blocks",
    [b"\x00\x00", b"\x00\x00\x00\x10abc", b"\xff\xff\xff\xffabc", b"\x7f\xff\xff\xffabc"],
    ids=["cut length", "cut block", "negative length", "huge length"],
)
def test_a_damaged_snappy_frame_is_a_corrupt_message(blocks: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        decompress(Codec.SNAPPY, compress(Codec.SNAPPY, b"") + blocks, BOUND)
    assert refused.value.code is ErrorCode.corrupt_message
