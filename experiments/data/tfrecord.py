"""Random access to TFRecord files without TensorFlow.

A record is ``<Q length>``, 4 bytes of checksum, the payload, 4 bytes of checksum. Offsets are indexed once. The checksums are not
verified: the bounds of every record and the number of records are.
"""

import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_HEADER, _FOOTER = 12, 4
_THREADS = 16  # shards indexed at once: it is waiting for the disk, not computing


def index_shard(path: Path, num_records: int) -> np.ndarray:
    """Where the payloads of a shard are: int64 ``[num_records, 2]`` of (offset, length) in bytes.

    Raises:
        FileNotFoundError: naming the shard.
        ValueError: naming the shard, if it ends inside a record or holds another number of records.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        spans: list[tuple[int, int]] = []
        position = 0
        while position < size:
            header = os.pread(file.fileno(), 8, position)
            length = struct.unpack("<Q", header)[0] if len(header) == 8 else size
            end = position + _HEADER + length + _FOOTER
            if end > size:
                raise ValueError(
                    f"{path}: truncated or damaged: record {len(spans)} at byte {position} ends after the file ({size} bytes)"
                )
            spans.append((position + _HEADER, length))
            position = end
    if len(spans) != num_records:
        raise ValueError(f"{path}: {len(spans)} records, but dataset_info.json says {num_records}")
    return np.array(spans, np.int64).reshape(-1, 2)


@dataclass(frozen=True, eq=False)
class TFRecords(Sequence[bytes]):
    """The records of some shards, one after the other. Holds no open file, so it can be pickled and shared by threads.

    Attributes:
        paths: the shards.
        spans: (shard, offset, length) of each record, int64 ``[n, 3]``.
    """

    paths: tuple[Path, ...]
    spans: np.ndarray

    @classmethod
    def open(cls, paths: Sequence[Path], shard_lengths: Sequence[int]) -> "TFRecords":
        """Index the shards.

        Args:
            paths: shards in their order.
            shard_lengths: how many records each must have.

        Raises:
            FileNotFoundError, ValueError: see :func:`index_shard`.
        """
        with ThreadPoolExecutor(_THREADS) as pool:
            indexed = list(pool.map(index_shard, paths, shard_lengths))
        shards = [np.full(len(spans), shard) for shard, spans in enumerate(indexed)]
        return cls(tuple(paths), np.column_stack([np.concatenate(shards), np.concatenate(indexed)]))

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # integers only
        shard, offset, length = self.spans[index].tolist()
        with self.paths[shard].open("rb", buffering=0) as file:
            record = os.pread(file.fileno(), length, offset)
        if len(record) != length:
            raise ValueError(f"{self.paths[shard]}: truncated since it was opened, in record {index}")
        return record
