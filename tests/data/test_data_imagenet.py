"""ImageNet's crops and the stream of its batches, over examples in memory."""

import io
import itertools
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from PIL import Image

from experiments.data.crops import eval_crop, random_box, to_pil, train_crop
from experiments.data.imagenet import ImageNet

SIZE = 16


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def example(i: int) -> dict[str, object]:
    """A random PNG of its own size; the label is i."""
    rng = np.random.default_rng(i)
    height, width = rng.integers(12, 40, 2)
    return {"image": encoded(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)), "label": i}


def imagenet(n: int = 10, worker_count: int = 0, **options: int) -> ImageNet:
    return ImageNet([example(i) for i in range(n)], [example(i) for i in range(7)], SIZE, worker_count, **options)


def take(stream: Iterator[tuple[np.ndarray, ...]], count: int) -> list[tuple[np.ndarray, ...]]:
    with closing(stream):  # type: ignore[type-var]
        return list(itertools.islice(stream, count))


def assert_same(left: list[tuple[np.ndarray, ...]], right: list[tuple[np.ndarray, ...]]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def test_boxes_have_the_published_area_and_aspect() -> None:
    rng, side = np.random.default_rng(0), 2000
    boxes = np.array([random_box(rng, side, side) for _ in range(4000)], float)
    top, left, h, w = boxes.T
    assert (top >= 0).all()
    assert (top + h <= side).all()
    assert (left >= 0).all()
    assert (left + w <= side).all()
    area, aspect = h * w / side**2, w / h
    assert area.min() > 0.079
    assert area.max() <= 1
    assert area.min() < 0.09
    assert area.max() > 0.9
    # accepted draws only: near area 1 few aspects fit, so the mean lies a little below (1 + 0.08) / 2
    assert 0.47 < area.mean() < 0.54
    assert aspect.min() > 0.749
    assert aspect.max() < 1.335
    assert abs(np.log(aspect).mean()) < 0.015  # log-uniform around 1; the standard error is 0.0026
    assert abs((top / np.maximum(side - h, 1)).mean() - 0.5) < 0.03
    assert abs((left / np.maximum(side - w, 1)).mean() - 0.5) < 0.03


@pytest.mark.parametrize(("height", "width", "box"), [(10, 1000, (0, 493, 10, 13)), (1000, 10, (493, 0, 13, 10))])
def test_a_long_image_falls_back_to_its_centre(height: int, width: int, box: tuple[int, ...]) -> None:
    rng = np.random.default_rng(
        0
    )  # 8 % of the area is 800 pixels: no box of an allowed aspect is less than 24 high or wide
    assert {random_box(rng, height, width) for _ in range(20)} == {box}


def test_a_training_crop_is_the_resized_box_flipped_half_of_the_time() -> None:
    gradient = np.broadcast_to(np.arange(64, dtype=np.uint8)[None, :, None] * 4, (64, 64, 3)).copy()
    image = to_pil(gradient)
    flipped = 0
    for seed in range(200):
        got = train_crop(np.random.default_rng(seed), image, SIZE)
        top, left, h, w = random_box(np.random.default_rng(seed), 64, 64)
        expected = np.asarray(
            image.crop((left, top, left + w, top + h)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        )
        is_flipped = int(got[0, 0, 0]) > int(got[0, -1, 0])
        np.testing.assert_array_equal(got, expected[:, ::-1] if is_flipped else expected)
        flipped += is_flipped
    assert abs(flipped - 100) < 36  # 5 standard deviations


@pytest.mark.parametrize(("height", "width"), [(512, 768), (768, 512), (300, 300)])
def test_an_evaluation_crop_is_the_centre(height: int, width: int) -> None:
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([255 * y / height, 255 * x / width, 0 * x], -1).astype(np.uint8)
    got = eval_crop(to_pil(pixels), 224).astype(float)
    assert got.shape == (224, 224, 3)
    # the shorter side shows 224/256 of its length, the longer one as many pixels: both around the middle
    for axis, side in ((0, height), (1, width)):
        profile = got[..., axis].mean(1 - axis)
        shown = 224 / 256 * min(height, width) / side
        np.testing.assert_allclose(profile[-1] - profile[0], 255 * shown, atol=3)
        np.testing.assert_allclose(profile.mean(), 127.5, atol=2)


def test_pixels_bytes_and_grey_files_become_rgb() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    np.testing.assert_array_equal(np.asarray(to_pil(pixels)), pixels)
    np.testing.assert_array_equal(np.asarray(to_pil(encoded(pixels))), pixels)
    grey = np.asarray(to_pil(encoded(pixels[..., 0])))
    np.testing.assert_array_equal(grey, np.repeat(pixels[..., :1], 3, -1))


def test_batches_have_the_documented_shapes_and_cover_an_epoch() -> None:
    data = imagenet(10)
    assert data.steps_per_epoch(5) == 2
    batches = take(data.batches(5, seed=0), 4)
    for images, labels in batches:
        assert images.shape == (5, *data.image_shape)
        assert images.dtype == data.image_dtype == np.uint8
        assert labels.dtype == np.int32
    first, second = (np.concatenate([labels for _, labels in batches[k : k + 2]]) for k in (0, 2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first.tolist() != second.tolist()


def test_image_and_label_of_a_row_belong_together() -> None:
    flat = [{"image": np.full((20, 30, 3), 10 * i, np.uint8), "label": i} for i in range(8)]
    for images, labels in take(ImageNet(flat, flat, SIZE).batches(4, seed=1), 4):
        np.testing.assert_array_equal(images[:, 3, 3, 0], 10 * labels)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    data = imagenet(10)
    run = take(data.batches(3, seed=5), 7)
    assert_same(take(data.batches(3, seed=5), 7), run)
    assert_same(take(data.batches(3, seed=5, start_step=4), 3), run[4:])
    other = take(data.batches(3, seed=6), 7)
    assert any((a[1] != b[1]).any() for a, b in zip(run, other, strict=True))


def test_every_step_and_every_row_is_cropped_otherwise() -> None:
    same = [{**example(3), "label": 0}] * 4
    (first, _), (second, _) = take(ImageNet(same, same, SIZE).batches(4, seed=0), 2)
    assert len({crop.tobytes() for crop in (*first, *second)}) == 8


def test_grain_workers_give_what_the_process_itself_gives() -> None:
    alone, helped = imagenet(10), imagenet(10, worker_count=2)
    assert_same(take(helped.batches(4, seed=2, start_step=1), 5), take(alone.batches(4, seed=2, start_step=1), 5))


def test_evaluation_covers_the_test_split_once_and_pads_the_end() -> None:
    data = imagenet()
    batches = list(data.eval_batches(3))
    assert [valid.tolist() for _, _, valid in batches] == [[True] * 3, [True] * 3, [True, False, False]]
    assert np.concatenate([labels[valid] for _, labels, valid in batches]).tolist() == list(range(7))
    got = np.concatenate([images[valid] for images, _, valid in batches])
    np.testing.assert_array_equal(got, np.stack([eval_crop(to_pil(example(i)["image"]), SIZE) for i in range(7)]))
    assert not batches[-1][0][1:].any()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_size=11 .* 10 examples"):
        imagenet().batches(11, seed=0)
    with pytest.raises(ValueError, match="batch_size=0"):
        imagenet().eval_batches(0)
    with pytest.raises(ValueError, match="worker_count=-1"):
        imagenet(worker_count=-1)
    with pytest.raises(ValueError, match=r"train split: example 9 has label 9, outside the range \[0, 9\)"):
        take(imagenet(num_classes=9).batches(10, seed=0), 1)
    with pytest.raises(ValueError, match=r"test split: example 6 has label 6, outside the range \[0, 6\)"):
        take(imagenet(num_classes=6).eval_batches(7), 1)
