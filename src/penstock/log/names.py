"""How Kafka names the files and folders of a log."""

import re
from typing import Final

from penstock.log.config import INT64_MAX

LOG: Final = ".log"
INDEX: Final = ".index"
TIME_INDEX: Final = ".timeindex"
TRANSACTION_INDEX: Final = ".txnindex"
SNAPSHOT: Final = ".snapshot"

#: What belongs to one segment; the log itself comes last, because its rename is the one that counts.
SEGMENT_FILES: Final = (INDEX, TIME_INDEX, TRANSACTION_INDEX, LOG)

DELETED: Final = ".deleted"
CLEANED: Final = ".cleaned"
SWAP: Final = ".swap"

EPOCH_CHECKPOINT: Final = "leader-epoch-checkpoint"
PARTITION_METADATA: Final = "partition.metadata"
#: In the folder of a log that was ever compacted: offsets may be missing in it that nothing has lost.
COMPACTED: Final = "penstock-compacted"

#: The longest name of a file or folder that common file systems take.
FILE_NAME_BYTES_MAX: Final = 255

_OFFSET_FILE: Final = re.compile(r"([0-9]{20})(\.[a-z]+)(\.[a-z]+)?")
_PARTITION_FOLDER: Final = re.compile(r"(.+)-(0|[1-9][0-9]*)", re.DOTALL)
_DELETED_FOLDER: Final = re.compile(r".+\.[0-9a-f]{32}-delete", re.DOTALL)


def offset_file(offset: int, kind: str, suffix: str = "") -> str:
    return f"{offset:020d}{kind}{suffix}"


def parse_offset_file(name: str) -> tuple[int, str, str] | None:
    """The offset, the kind and the suffix of a file that is named by an offset; None for any other."""
    match = _OFFSET_FILE.fullmatch(name)
    if match is None or int(match[1]) > INT64_MAX:
        return None
    return int(match[1]), match[2], match[3] or ""


def partition_folder(topic: str, index: int) -> str:
    return f"{topic}-{index}"


def parse_partition_folder(name: str) -> tuple[str, int] | None:
    match = _PARTITION_FOLDER.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def deleted_folder(topic: str, index: int, unique_hex: str) -> str:
    return _fitting(topic, f"-{index}.{unique_hex}-delete")


def stray_folder(topic: str, index: int, unique_hex: str) -> str:
    """For data that belongs to no topic any more; only an operator removes it."""
    return _fitting(topic, f"-{index}.{unique_hex}-stray")


def _fitting(topic: str, tail: str) -> str:
    """The topic's name is cut where the whole would not fit a file name."""
    return topic[: FILE_NAME_BYTES_MAX - len(tail)] + tail


def is_deleted_folder(name: str) -> bool:
    return _DELETED_FOLDER.fullmatch(name) is not None
