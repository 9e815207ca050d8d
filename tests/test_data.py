"""The embedded MNIST images."""

import numpy as np
import pytest
import torch

from newton_summary.data import load_mnist_subset


@pytest.mark.parametrize(("split", "per_digit"), [("train", 500), ("test", 100)])
def test_as_many_images_of_each_digit(split, per_digit):
    images, labels = load_mnist_subset(split)
    assert images.shape == (10 * per_digit, 1, 32, 32)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert labels.bincount().tolist() == [per_digit] * 10


def test_order_is_random():
    """A prefix is a usable batch: it holds every digit."""
    _, labels = load_mnist_subset("train")
    assert set(labels[:100].tolist()) == set(range(10))


def test_raw_pixels_are_bytes_scaled_to_one():
    images, _ = load_mnist_subset("test", normalize=False, pad=False, dtype=torch.float64)
    assert images.shape == (1000, 1, 28, 28)
    levels = images * 255
    torch.testing.assert_close(levels, levels.round())
    assert images.min() == 0
    assert images.max() == 1


def test_mean_and_spread_are_those_of_mnist():
    """The full training set has mean 0.1307 and standard deviation 0.3081 (28 x 28 pixels)."""
    images, _ = load_mnist_subset("train", pad=False)
    assert abs(images.mean()) < 0.02
    assert abs(images.std() - 1) < 0.02


def test_padding_comes_before_normalisation():
    """The frame is background, whose value is (0 - 0.1307) / 0.3081."""
    images, _ = load_mnist_subset("test")
    bare, _ = load_mnist_subset("test", pad=False)
    torch.testing.assert_close(images[:, :, 2:-2, 2:-2], bare)
    inside = torch.zeros(32, 32, dtype=torch.bool)
    inside[2:-2, 2:-2] = True
    frame = images[:, 0, ~inside]
    torch.testing.assert_close(frame, torch.full_like(frame, -0.1307 / 0.3081))


def test_nearest_class_mean_reads_the_digits():
    """Labels belong to their images: the nearest class mean is right for about 4 in 5."""
    images, labels = load_mnist_subset("train")
    means = torch.stack([images[labels == digit].mean(0).flatten() for digit in range(10)])
    test_images, test_labels = load_mnist_subset("test")
    guesses = torch.cdist(test_images.flatten(1), means).argmin(1)
    assert (guesses == test_labels).double().mean() > 0.75


def test_no_test_image_is_a_training_image():
    train = {image.tobytes() for image in load_mnist_subset("train")[0].numpy()}
    test = {image.tobytes() for image in load_mnist_subset("test")[0].numpy()}
    assert len(train) == 5000
    assert len(test) == 1000
    assert not train & test


def test_same_images_every_time():
    """Also after the caller has written into them."""
    images, labels = load_mnist_subset("test")
    images.zero_()
    labels.zero_()
    again, labels_again = load_mnist_subset("test")
    assert again.std() > 0.5
    assert labels_again.sum() == 4500


def test_global_random_states_are_not_touched():
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()
    load_mnist_subset("test")
    assert torch.equal(torch_state, torch.get_rng_state())
    assert (numpy_state == np.random.get_state()[1]).all()


def test_dtype_and_device():
    images, labels = load_mnist_subset("test", dtype=torch.float64, device="cpu")
    assert images.dtype == torch.float64
    assert images.device == labels.device == torch.device("cpu")


def test_unknown_split_is_named():
    with pytest.raises(ValueError, match=r"'validation'.*train"):
        load_mnist_subset("validation")


def test_integer_dtype_is_refused():
    with pytest.raises(ValueError, match=r"torch\.uint8"):
        load_mnist_subset(dtype=torch.uint8)
