"""Write the embedded MNIST subset from the four official files.

    python scripts/make_mnist_subset.py FOLDER

FOLDER holds train-images-idx3-ubyte.gz and the three others. From each split the same number
of images per digit is drawn at random, with a fixed seed: 500 for training, 100 for testing.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np

SEED = 0
PER_DIGIT = {"train": 500, "test": 100}
PREFIX = {"train": "train", "test": "t10k"}
OUTPUT = Path(__file__).parents[1] / "src/newton_summary/data/mnist_subset.npz"


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file of unsigned bytes.

    The header is 0, 0, 8 (unsigned byte), the number of dimensions, then each size as a
    big-endian 32-bit integer.
    """
    content = gzip.decompress(path.read_bytes())
    zero, kind, ndim = int.from_bytes(content[:2], "big"), content[2], content[3]
    if zero != 0 or kind != 8:
        raise ValueError(f"{path} is not an idx file of unsigned bytes.")
    shape = np.frombuffer(content, ">u4", count=ndim, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def choose(labels: np.ndarray, per_digit: int, rng: np.random.Generator) -> np.ndarray:
    """Return the indices of ``per_digit`` random images of every digit, shuffled."""
    chosen = [
        rng.choice(np.flatnonzero(labels == digit), per_digit, replace=False) for digit in range(10)
    ]
    return rng.permutation(np.concatenate(chosen))


def main() -> None:
    """Read the official files, choose, and write the subset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with the four official .gz files")
    folder = parser.parse_args().folder

    rng = np.random.default_rng(SEED)
    arrays = {}
    for split, prefix in PREFIX.items():
        images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
        indices = choose(labels, PER_DIGIT[split], rng)
        arrays[f"{split}_images"] = images[indices]
        arrays[f"{split}_labels"] = labels[indices]
    np.savez_compressed(OUTPUT, **arrays)
    print(f"{OUTPUT.name}: {OUTPUT.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
