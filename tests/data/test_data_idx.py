"""Fashion-MNIST's IDX files: good ones, and each way in which one can be damaged."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from experiments.data import load
from experiments.data.idx import read_idx


def idx_bytes(array: np.ndarray, kind: int = 8) -> bytes:
    return (
        bytes([0, 0, kind, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(np.uint8).tobytes()
    )


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "train-images-idx3-ubyte": rng.integers(0, 256, (30, 28, 28)),
        "train-labels-idx1-ubyte": np.arange(30) % 10,
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (20, 28, 28)),
        "t10k-labels-idx1-ubyte": np.arange(20)[::-1] % 10,
    }


def write(folder: Path, arrays: dict[str, np.ndarray], zipped: bool) -> None:
    for name, array in arrays.items():
        content = idx_bytes(array)
        (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(content) if zipped else content)


@pytest.mark.parametrize("zipped", [False, True])
def test_plain_and_zipped_files_give_what_was_written(
    tmp_path: Path, arrays: dict[str, np.ndarray], zipped: bool
) -> None:
    write(tmp_path, arrays, zipped)
    data = load("fashion_mnist", data_dir=tmp_path)
    assert (data.image_shape, data.num_classes, data.augmentation) == ((28, 28, 1), 10, "none")
    for split, prefix in ((data.train, "train"), (data.test, "t10k")):
        np.testing.assert_array_equal(split.images[..., 0], arrays[f"{prefix}-images-idx3-ubyte"])
        np.testing.assert_array_equal(split.labels, arrays[f"{prefix}-labels-idx1-ubyte"])
    np.testing.assert_allclose(data.mean, arrays["train-images-idx3-ubyte"].mean())


@pytest.mark.parametrize("keep", [0, 3, 10, 15, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "some-idx3-ubyte"
    path.write_bytes(idx_bytes(np.ones((2, 4, 4)))[:keep])
    with pytest.raises(ValueError, match=r"some-idx3-ubyte: (truncated|starts with)"):
        read_idx(path, 3)


@pytest.mark.parametrize("keep", [5, 18, -9, -1])
def test_a_truncated_zipped_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "some.gz"
    path.write_bytes(gzip.compress(idx_bytes(np.random.default_rng(0).integers(0, 256, (9, 9, 9))))[:keep])
    with pytest.raises(ValueError, match=r"some\.gz: truncated or damaged gzip file"):
        read_idx(path, 3)


def test_wrong_magic_axes_and_left_over_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(idx_bytes(np.ones((2, 4, 4)), kind=13))
    with pytest.raises(ValueError, match=r"file: starts with 00000d03, not with 00000803"):
        read_idx(path, 3)
    path.write_bytes(idx_bytes(np.ones(5)))
    with pytest.raises(ValueError, match=r"file: starts with 00000801, not with 00000803"):
        read_idx(path, 3)
    path.write_bytes(idx_bytes(np.ones((2, 4, 4))) + b"x")
    with pytest.raises(ValueError, match=r"file: bytes left over: 33 .* \[2, 4, 4\] needs 32"):
        read_idx(path, 3)


def test_counts_sizes_and_labels_are_checked(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    write(tmp_path, {**arrays, "t10k-labels-idx1-ubyte": np.zeros(19)}, zipped=False)
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte: 19 labels, .* 20 images"):
        load("fashion_mnist", data_dir=tmp_path)
    write(tmp_path, {**arrays, "t10k-images-idx3-ubyte": np.zeros((20, 27, 28))}, zipped=False)
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte: shape \[20, 27, 28\]"):
        load("fashion_mnist", data_dir=tmp_path)
    write(tmp_path, {**arrays, "t10k-labels-idx1-ubyte": np.arange(20) % 11}, zipped=False)
    with pytest.raises(ValueError, match="test split: example 10 has label 10"):
        load("fashion_mnist", data_dir=tmp_path)


def test_a_missing_file_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte.*Debian package dataset-fashion-mnist"):
        load("fashion_mnist", data_dir=tmp_path)
