"""ImageNet's crops, of one PIL image: random resized crop with flip for training, resize and centre crop for evaluation.

The recipe of "Going deeper with convolutions" (Szegedy et al., 2015), with the constants in common use since.
"""

import io
import math
from typing import Any

import numpy as np
from PIL import Image

Box = tuple[int, int, int, int]

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_ATTEMPTS = 10


def random_box(rng: np.random.Generator, height: int, width: int) -> Box:
    """A box (top, left, height, width) with 8–100 % of the area and aspect width/height in 3/4–4/3.

    The area is uniform, the aspect log-uniform. If ten draws do not fit into the image, the largest centred box with an allowed
    aspect is taken.

    >>> random_box(np.random.default_rng(0), height=10, width=100)
    (0, 43, 10, 13)
    """
    for _ in range(_ATTEMPTS):
        area = rng.uniform(*SCALE) * height * width
        aspect = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < h <= height and 0 < w <= width:
            return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
    h, w = min(height, round(width / RATIO[0])), min(width, round(height * RATIO[1]))
    return (height - h) // 2, (width - w) // 2, h, w


def to_pil(image: Any) -> Image.Image:
    """An RGB image from the bytes of a JPEG or PNG file, or from uint8 ``[H, W, 3]``."""
    opened = Image.fromarray(image) if isinstance(image, np.ndarray) else Image.open(io.BytesIO(image))
    return opened.convert("RGB")


def train_crop(rng: np.random.Generator, image: Image.Image, size: int) -> np.ndarray:
    """A random resized crop, flipped left-right with a fair coin: uint8 ``[size, size, 3]``."""
    top, left, h, w = random_box(rng, image.height, image.width)
    cropped = image.crop((left, top, left + w, top + h)).resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(cropped)
    return pixels[:, ::-1] if rng.random() < 0.5 else pixels


def eval_crop(image: Image.Image, size: int) -> np.ndarray:
    """Resize the shorter side to 256/224 of ``size``, then take the centre: uint8 ``[size, size, 3]``."""
    scale = size * 256 / 224 / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return np.asarray(resized.crop((left, top, left + size, top + size)))
