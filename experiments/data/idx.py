"""Fashion-MNIST from IDX files, plain or gzipped.

IDX: two zero bytes, a byte for the type (8 is uint8), a byte for the number of axes, one big-endian uint32 for the length of each
axis, then the values.
"""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from experiments.data.dataset import Dataset, Split, channel_statistics

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_UINT8 = 8


def read_idx(path: Path, num_axes: int) -> np.ndarray:
    """The uint8 array in an IDX file, gzipped or not.

    Args:
        path: the file; what it holds decides whether it is unzipped, not its name.
        num_axes: how many axes it must have.

    Raises:
        ValueError: naming the file, if it is truncated, has bytes left over, or is no IDX file of that kind.
    """
    content = _content(path)
    expected = bytes([0, 0, _UINT8, num_axes])
    if content[:4] != expected:
        raise ValueError(f"{path}: starts with {content[:4].hex()}, not with {expected.hex()} (uint8, {num_axes} axes)")
    header = 4 + 4 * num_axes
    if len(content) < header:
        raise ValueError(f"{path}: truncated: {len(content)} bytes, the header alone has {header}")
    shape = struct.unpack(f">{num_axes}I", content[4:header])
    have, need = len(content) - header, int(np.prod(shape, dtype=np.int64))
    if have != need:
        problem = "truncated" if have < need else "bytes left over"
        raise ValueError(f"{path}: {problem}: {have} bytes of values, but shape {list(shape)} needs {need}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: truncated or damaged gzip file: {error}") from error


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"no {name} or {name}.gz in {folder}. Install the Debian package dataset-fashion-mnist, which puts Fashion-MNIST into "
        f"{DEBIAN_FOLDER}; or put the four *-ubyte.gz files that its authors publish on GitHub (zalandoresearch/fashion-mnist) "
        "into a folder and name it as data_dir"
    )


def _read_split(folder: Path, prefix: str) -> Split:
    image_path, label_path = (_find(folder, f"{prefix}-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
    if images.shape[1:] != (28, 28) or not len(images):
        raise ValueError(f"{image_path}: shape {list(images.shape)}, not [n, 28, 28]")
    if len(images) != len(labels):
        raise ValueError(f"{label_path}: {len(labels)} labels, but {image_path.name} has {len(images)} images")
    return Split(images[..., None], labels.astype(np.int32))


def load_fashion_mnist(data_dir: Path | None = None) -> Dataset:
    """Fashion-MNIST: 10 classes of 28x28 grey images.

    Args:
        data_dir: folder with the four IDX files, plain or ``.gz``; by default where Debian's package puts them.

    Raises:
        FileNotFoundError: if a file is missing; says how to get them.
        ValueError: naming the file, if one is damaged, or a label is out of range.
    """
    folder = DEBIAN_FOLDER if data_dir is None else data_dir
    train, test = _read_split(folder, "train"), _read_split(folder, "t10k")
    mean, std = channel_statistics(train.images)
    return Dataset(
        name="fashion_mnist",
        train=train,
        test=test,
        num_classes=10,
        image_shape=(28, 28, 1),
        mean=mean,
        std=std,
        augmentation="none",
        description=f"Fashion-MNIST: {len(train):,} training and {len(test):,} test images of 28x28 pixels",
    )
