"""Folders prepared by tensorflow-datasets, in both formats, read without TensorFlow.

The tests prepare small folders with builders of their own in array_record, and rewrite them as tfrecord.
"""

import io
import json
import pickle
import shutil
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordReader
from PIL import Image

from experiments.data import load
from experiments.data.imagenet import ImageNet
from experiments.data.tfds_source import cifar10_from_splits, examples, open_builder, split_from_examples
from experiments.data.tfrecord import TFRecords

FORMATS = ["array_record", "tfrecord"]


def file_of(pixels: np.ndarray, kind: str) -> io.BytesIO:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    file.seek(0)
    return file


class _Small(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Image i is filled with 3 * i, its label is i modulo 10."""

    SIZES: dict[str, int]
    SHAPE: tuple[int | None, int | None, int]
    CLASSES: int
    KIND: str

    def _info(self) -> tfds.core.DatasetInfo:
        image = tfds.features.Image(shape=self.SHAPE, encoding_format=self.KIND)
        label = tfds.features.ClassLabel(num_classes=self.CLASSES)
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict({"image": image, "label": label})
        )

    def _split_generators(self, _: Any) -> dict[str, Iterator[Any]]:
        return {split: self._generate_examples(size) for split, size in self.SIZES.items()}

    def _generate_examples(self, size: int) -> Iterator[Any]:
        for i in range(size):
            pixels = np.full([side or 20 + i for side in self.SHAPE], 3 * i, np.uint8)
            yield i, {"image": file_of(pixels, self.KIND), "label": i % 10}


class SmallCifar(_Small, skip_registration=True):
    name = "cifar10"
    VERSION = tfds.core.Version("3.0.2")
    SIZES, SHAPE, CLASSES, KIND = {"train": 40, "test": 15}, (32, 32, 3), 10, "png"


class SmallImagenet(_Small, skip_registration=True):
    name = "imagenet2012"
    VERSION = tfds.core.Version("5.1.0")
    SIZES, SHAPE, CLASSES, KIND = {"train": 12, "validation": 7}, (None, None, 3), 1000, "jpeg"


def write_tfrecord(path: Path, records: list[bytes]) -> None:
    """The checksums are zero: they are not verified."""
    frames = [struct.pack("<Q", len(record)) + bytes(4) + record + bytes(4) for record in records]
    path.write_bytes(b"".join(frames))


def rewrite_as_tfrecord(source: Path, target: Path) -> None:
    """The same records in two shards, and the metadata to match."""
    target.mkdir(parents=True)
    shutil.copy(source / "features.json", target)
    info = json.loads((source / "dataset_info.json").read_text())
    info["fileFormat"] = "tfrecord"
    for split in info["splits"]:
        (path,) = source.glob(f"*-{split['name']}.array_record-*")
        reader = ArrayRecordReader(str(path))
        records = reader.read_all()
        reader.close()
        shards = [records[:5], records[5:]]
        split["shardLengths"] = [str(len(shard)) for shard in shards]
        for i, shard in enumerate(shards):
            write_tfrecord(target / f"{info['name']}-{split['name']}.tfrecord-{i:05d}-of-00002", shard)
    (target / "dataset_info.json").write_text(json.dumps(info))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data folders named for their format, each with both datasets."""
    root = tmp_path_factory.mktemp("prepared")
    for builder_class in (SmallCifar, SmallImagenet):
        builder = builder_class(data_dir=root / "array_record", file_format="array_record")
        builder.download_and_prepare()
        folder = Path(builder.data_dir)
        rewrite_as_tfrecord(folder, root / "tfrecord" / folder.relative_to(root / "array_record"))
    return root


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("file_format", FORMATS)
def test_cifar10_is_read_in_both_formats(prepared: Path, file_format: str) -> None:
    data = load("cifar10", data_dir=prepared / file_format)
    assert (data.num_classes, data.image_shape, data.augmentation) == (10, (32, 32, 3), "crop_flip")
    for split, size in ((data.train, 40), (data.test, 15)):
        ids = split.images[:, 0, 0, 0] // 3
        assert sorted(ids) == list(range(size))
        assert (split.images == 3 * ids[:, None, None, None]).all()
        np.testing.assert_array_equal(split.labels, ids % 10)
    assert "tensorflow" not in sys.modules


def test_both_formats_give_the_same_examples_in_the_same_order(prepared: Path) -> None:
    left, right = (load("cifar10", data_dir=prepared / file_format) for file_format in FORMATS)
    np.testing.assert_array_equal(left.train.images, right.train.images)
    np.testing.assert_array_equal(left.test.labels, right.test.labels)


@pytest.mark.parametrize("file_format", FORMATS)
def test_imagenet_is_read_in_both_formats(prepared: Path, file_format: str) -> None:
    data = load("imagenet2012", data_dir=prepared / file_format, image_size=16, worker_count=0)
    assert (data.num_classes, data.image_shape) == (1000, (16, 16, 3))
    seen = []
    for images, labels, valid in data.eval_batches(4):
        ids = np.rint(images[valid].mean((1, 2, 3)) / 3).astype(int)
        np.testing.assert_array_equal(labels[valid], ids % 10)
        seen += ids.tolist()
    assert sorted(seen) == list(range(7))
    stream = data.batches(12, seed=0)
    images, labels = next(stream)
    ids = np.rint(images.mean((1, 2, 3)) / 3).astype(int)
    assert sorted(ids) == list(range(12))
    np.testing.assert_array_equal(labels, ids % 10)
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("file_format", FORMATS)
def test_images_stay_encoded_where_asked_and_examples_can_be_pickled(prepared: Path, file_format: str) -> None:
    source = examples(open_builder("imagenet2012", prepared / file_format), "train", encoded_images=True)
    assert source[3]["image"].startswith(b"\xff\xd8")  # JPEG
    again = pickle.loads(pickle.dumps(source))
    assert len(again) == 12
    assert again[3]["image"] == source[3]["image"]


def test_grain_workers_read_tfrecord_shards(prepared: Path) -> None:
    alone, helped = (
        load("imagenet2012", data_dir=prepared / "tfrecord", image_size=16, worker_count=n) for n in (0, 1)
    )
    for left, right in zip(alone.eval_batches(4), helped.eval_batches(4), strict=True):
        for x, y in zip(left, right, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("file_format", FORMATS)
def test_missing_and_truncated_shards_are_named(prepared: Path, tmp_path: Path, file_format: str) -> None:
    shutil.copytree(prepared / file_format, tmp_path, dirs_exist_ok=True)
    shard = max((tmp_path / "cifar10/3.0.2").glob("cifar10-test.*"))
    content = shard.read_bytes()
    for keep in (len(content) // 2, len(content) - 3):
        shard.write_bytes(content[:keep])
        with pytest.raises(ValueError, match=f"{shard.name}: truncated or damaged"):
            load("cifar10", data_dir=tmp_path)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        load("cifar10", data_dir=tmp_path)


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_wrong_number_of_records_is_named(prepared: Path, tmp_path: Path, file_format: str) -> None:
    shutil.copytree(prepared / file_format, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "cifar10/3.0.2/dataset_info.json"
    info = json.loads(path.read_text())
    (test,) = [split for split in info["splits"] if split["name"] == "test"]
    test["shardLengths"][-1] = "99"
    path.write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"cifar10-test.*: \d+ records, but dataset_info.json says 99"):
        load("cifar10", data_dir=tmp_path)


def test_every_cut_of_a_tfrecord_file_is_noticed(tmp_path: Path) -> None:
    path, records = tmp_path / "shard", [b"abc", b"", b"defgh"]
    write_tfrecord(path, records)
    opened = TFRecords.open([path], [3])
    assert [opened[i] for i in range(3)] == records
    assert opened[-1] == records[-1]
    with pytest.raises(IndexError):
        opened[3]
    content = path.read_bytes()
    for keep in range(len(content)):
        path.write_bytes(content[:keep])
        with pytest.raises(ValueError, match=r"shard: (truncated|damaged|[0-2] records)"):
            TFRecords.open([path], [3])


@pytest.mark.parametrize("name", ["cifar10", "imagenet2012"])
@pytest.mark.parametrize("exists", [True, False])
def test_what_is_not_prepared_is_said_at_once_with_the_command(tmp_path: Path, name: str, exists: bool) -> None:
    folder = tmp_path if exists else tmp_path / "absent"
    start = time.perf_counter()
    with pytest.raises(FileNotFoundError, match=f"tfds build {name} --data_dir={folder} --file_format=array_record"):
        load(name, data_dir=folder)
    assert time.perf_counter() - start < 2


def test_the_default_folder_is_that_of_tensorflow_datasets(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared / "tfrecord"))
    assert len(load("cifar10").train) == 40


def test_the_folder_of_a_version_can_be_named_and_the_newest_is_taken(prepared: Path, tmp_path: Path) -> None:
    version = prepared / "tfrecord/cifar10/3.0.2"
    assert len(load("cifar10", data_dir=version).train) == 40
    assert len(load("cifar10", data_dir=version.parent).train) == 40
    for number in ("3.0.2", "3.0.10"):
        shutil.copytree(version, tmp_path / "cifar10" / number)
    assert open_builder("cifar10", tmp_path).info.data_dir.endswith("3.0.10")
    shutil.copytree(version, tmp_path / "cifar10" / "incomplete.9_9.0.0")
    assert open_builder("cifar10", tmp_path).info.data_dir.endswith("3.0.10")


def test_another_dataset_format_or_split_is_refused(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds the dataset 'cifar10', not 'imagenet2012'"):
        load("imagenet2012", data_dir=prepared / "tfrecord/cifar10/3.0.2")
    builder = open_builder("cifar10", prepared / "tfrecord")
    with pytest.raises(ValueError, match="no split 'validation', only train, test"):
        examples(builder, "validation")
    shutil.copytree(prepared / "tfrecord", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "cifar10/3.0.2/dataset_info.json"
    path.write_text(path.read_text().replace('"tfrecord"', '"parquet"'))
    with pytest.raises(ValueError, match="stored as parquet"):
        load("cifar10", data_dir=tmp_path)


def test_an_image_of_another_shape_is_named() -> None:
    good, bad = ({"image": np.zeros((32, width, 3), np.uint8), "label": 0} for width in (32, 31))
    with pytest.raises(ValueError, match=r"example 1: .*\(32, 31, 3\)"):
        split_from_examples([good, bad], (32, 32, 3))


def test_mocked_cifar10_goes_through_the_same_code() -> None:
    with tfds.testing.mock_data(num_examples=8):
        source = tfds.data_source("cifar10", split="train")
        data = cifar10_from_splits(*(split_from_examples(source, (32, 32, 3)) for _ in range(2)))
        np.testing.assert_array_equal(data.train.images[5], source[5]["image"])
        np.testing.assert_array_equal(data.train.labels, [source[i]["label"] for i in range(8)])
    assert len({image.tobytes() for image in data.train.images}) == 8


def test_mocked_imagenet_goes_through_the_same_code() -> None:
    with tfds.testing.mock_data(num_examples=8):
        source = tfds.data_source("imagenet2012", split="train")
        data = ImageNet(source, source, image_size=16)
        (batch,) = data.eval_batches(8)
        np.testing.assert_array_equal(batch[1], [source[i]["label"] for i in range(8)])
        stream = data.batches(8, seed=0)
        assert sorted(next(stream)[1]) == sorted(batch[1])
        stream.close()  # type: ignore[attr-defined]
    assert len({image.tobytes() for image in batch[0]}) == 8
