import pytest
import torch
import torch.nn.functional as F

from mpcompare.errors import InputError
from mpcompare.tasks.data.generated import digits, synthetic, synthetic_images

DIGIT_SUM = -352.7818
SYNTHETIC_CLASSES = [1, 4, 0, 2, 2, 3, 1, 2, 4, 2, 1, 2]


@pytest.mark.slow
def test_digits_are_seeded_augmented_and_held_out():
    first, again, other = (digits(seed, 4000) for seed in (0, 0, 1))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.x_train.shape == (4000, 1, 28, 28)
    assert first.x_test.shape == (297, 1, 28, 28)
    assert first.x_train.min() >= -1
    assert first.x_train.max() <= 1
    assert torch.equal(first.x_train[:1500], other.x_train[:1500])  # the first round is as it was scanned
    assert torch.equal(first.y_train[1500:3000], first.y_train[:1500])
    change = (first.x_train[1500:3000] - first.x_train[:1500]).abs().mean(dim=(1, 2, 3))
    assert (change > 0).all()  # every later one is moved
    assert change.mean() < 0.6  # and still looks like itself: unrelated digits differ by 0.8
    unrelated = (first.x_train[1:1500] - first.x_train[:1499]).abs().mean()
    assert change.mean() < unrelated


def test_digits_are_recognisable_at_28_x_28():
    """Area averages of the upsampled image give back the 8 x 8 scan."""
    from sklearn.datasets import load_digits

    image = digits(0, 100).x_train / 2 + 0.5
    small = F.interpolate(image, (8, 8), mode="area").reshape(100, 64)
    scans = torch.from_numpy(load_digits().data[:100]).float() / 16
    assert torch.corrcoef(torch.stack([small.flatten(), scans.flatten()]))[0, 1] > 0.95


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_synthetic_has_any_shape_and_can_be_learned(loss):
    dataset = synthetic(0, 512, 12, 4, loss)
    assert (
        dataset.fingerprint == synthetic(0, 512, 12, 4, loss).fingerprint != synthetic(1, 512, 12, 4, loss).fingerprint
    )
    assert dataset.x_test.shape == (64, 12)
    # A linear fit already explains much of held-out targets that were never seen.
    y = F.one_hot(dataset.y_train, 4).float() if loss == "cross_entropy" else dataset.y_train
    fit = torch.linalg.lstsq(dataset.x_train, y - y.mean(0)).solution
    guess = dataset.x_test @ fit + y.mean(0)
    if loss == "cross_entropy":
        assert (guess.argmax(1) == dataset.y_test).float().mean() > 0.5  # chance: 0.25
    else:
        assert (guess - dataset.y_test).square().mean() < 0.5 * dataset.y_test.var()


def test_the_draws_of_a_seed_stay_the_same():
    """The draws are the same as in earlier versions, because published results depend on generated data sets."""
    assert digits(0, 2000).x_train[1999].sum().item() == pytest.approx(DIGIT_SUM, abs=1e-3)
    assert synthetic(0, 96, 20, 5, "cross_entropy").y_train[:12].tolist() == SYNTHETIC_CLASSES


@pytest.mark.slow
def test_synthetic_images_are_seeded_normalised_and_can_be_learned():
    first, again, other = (synthetic_images(seed, 800) for seed in (0, 0, 1))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert (first.x_train.shape, first.x_test.shape) == ((800, 3, 32, 32), (100, 3, 32, 32))
    assert first.x_train.mean().item() == pytest.approx(0, abs=0.02)
    assert first.x_train.std().item() == pytest.approx(1, abs=0.02)
    # The nearest class mean already tells most of the held-out images' classes.
    means = torch.stack([first.x_train[first.y_train == c].mean(0) for c in range(10)]).flatten(1)
    guess = torch.cdist(first.x_test.flatten(1), means).argmin(1)
    assert (guess == first.y_test).float().mean() > 0.5  # chance: 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: digits(0, 0), "data.samples=0: expected a whole number of at least 1"),
        (lambda: synthetic_images(0, 2.5), "data.samples=2.5: expected a whole number"),
        (lambda: synthetic(0, 8, 0, 3, "mse"), "data.in_features=0: expected a whole number"),
        (lambda: synthetic(0, 8, 3, 3, "hinge"), "data.loss=hinge: expected one of cross_entropy, mse"),
    ],
)
def test_what_cannot_be_generated_is_named(make, message):
    with pytest.raises(InputError, match=message):
        make()
