"""The experiments of the paper, and some of our own: whole configurations, by name.

The four setups have the hyperparameters of the paper's tables (App. G), except for those of SGD,
which it does not give. NewtonSummary is the variant that the paper's author ran; Adam, K-FAC and
SGD keep their learning rates: the plateau schedule is a line of NewtonSummary's algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from newton_summary.display.names import nearest
from newton_summary.errors import UserError
from newton_summary.experiments.config import (
    AdamConfig,
    DataConfig,
    ExperimentConfig,
    KFACConfig,
    MeasureConfig,
    ModelConfig,
    NewtonSummaryConfig,
    OptimizerConfig,
    ScheduleConfig,
    SGDConfig,
)

PARTITIONS = (
    "trivial",
    "weights-biases",
    "blocks-2",
    "alternate-2",
    "blocks-4",
    "alternate-4",
    "canonical",
)
"""Of the partition study (App. J), coarsest first: S = 1, 2, 6, 6, 10, 10, 18 on VGG-11'."""

ADAM_RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""The grid from which we tune Adam, beside the paper's own rates."""

CONSTANT, PLATEAU = ScheduleConfig(), ScheduleConfig(factor=0.5)


# --- the registry --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A named configuration."""

    config: ExperimentConfig
    about: str

    def __call__(self) -> ExperimentConfig:
        """Return the configuration."""
        return self.config


RECIPES: dict[str, Recipe] = {}


def recipe(make: Callable[[], ExperimentConfig]) -> Callable[[], ExperimentConfig]:
    """Register a function as the recipe of its name."""
    add_recipe(make.__name__, make(), make.__doc__)
    return make


def add_recipe(name: str, config: ExperimentConfig, about: str | None) -> None:
    """Register a recipe; of ``about`` the first line is shown."""
    RECIPES[name] = Recipe(replace(config, recipe=name), (about or "").split("\n")[0])


def get_recipe(name: str) -> Recipe:
    """Return a recipe by its name; hyphens may stand for underscores."""
    known = name.replace("-", "_")
    if known not in RECIPES:
        raise UserError(
            f"Unknown recipe {name!r}.{nearest(known, RECIPES)} `newton-summary list` shows all."
        )
    return RECIPES[known]


# --- the four setups (Section 6.2) ---------------------------------------------------------------


def experiment(model: str, data: str, epochs: int, optimizer: OptimizerConfig) -> ExperimentConfig:
    """A model on a data set, both in their usual form."""
    config = ExperimentConfig(model=ModelConfig(model), data=DataConfig(data), epochs=epochs)
    return replace(config, optimizer=optimizer)


@dataclass(frozen=True)
class Setup:
    """A model and its data, with what the paper found best for each optimizer."""

    model: str
    data: str
    epochs: int
    adam: float  # learning rate
    kfac: tuple[float, float]  # learning rate and damping
    newton_summary: tuple[float, float]  # lambda_1 and lambda_int
    sgd: float = 1e-2  # learning rate, not from the paper
    tf32: bool = False  # torch's own default is True for convolutions


SETUPS = {
    "mlp_mnist": Setup("mlp", "mnist", 200, 3e-4, (1e-4, 1e-2), (3e-2, 1.0)),
    "lenet_cifar10": Setup("lenet", "cifar10", 200, 3e-4, (1e-4, 3e-2), (0.3, 1.0)),
    "vgg_cifar10": Setup(
        "vgg11", "cifar10", 100, 1e-5, (3e-4, 3e-2), (0.3, 1.0), sgd=1e-3, tf32=True
    ),
    "bigmlp_cifar10": Setup("big_mlp", "cifar10", 100, 1e-5, (1e-5, 1e-2), (0.1, 3.0), sgd=1e-3),
}


def paper_optimizer(
    name: str, variant: Literal["as-run", "as-published"] = "as-run"
) -> NewtonSummaryConfig:
    """NewtonSummary with the paper's lambda_1 and lambda_int for a setup."""
    lr, lambda_int = SETUPS[name].newton_summary
    return NewtonSummaryConfig(variant=variant, lr=lr, lambda_int=lambda_int, cuda_graph=True)


ABOUT = {
    "newton_summary": "NewtonSummary as the paper's author ran it.",
    "as_published": "NewtonSummary as the paper prints it: B = 1000, reshuffled, no warm-up, a "
    "window of 3, and abs(D3)^(1/3) averaged in it.",
    "default": "NewtonSummary with the package's own defaults, the same for every setup.",
    "default_plateau": "NewtonSummary with the package's own defaults, and the paper's plateau "
    "schedule.",
    "adam": "Adam, with the paper's learning rate.",
    "kfac": "K-FAC, with the paper's learning rate and damping.",
    "sgd": "SGD with momentum, with Hbar in full batch before each epoch (Section 6.1).",
}
for name, setup in SETUPS.items():
    ways: dict[str, tuple[OptimizerConfig, ScheduleConfig]] = {
        "newton_summary": (paper_optimizer(name), PLATEAU),
        "as_published": (paper_optimizer(name, "as-published"), PLATEAU),
        "default": (NewtonSummaryConfig(partition="trivial"), CONSTANT),
        "default_plateau": (NewtonSummaryConfig(partition="trivial"), PLATEAU),
        "adam": (AdamConfig(lr=setup.adam), CONSTANT),
        "kfac": (KFACConfig(lr=setup.kfac[0], damping=setup.kfac[1]), CONSTANT),
        "sgd": (SGDConfig(lr=setup.sgd), CONSTANT),
    }
    for way, (optimizer, schedule) in ways.items():
        config = experiment(setup.model, setup.data, setup.epochs, optimizer)
        config = replace(config, schedule=schedule, tf32=setup.tf32)
        if way == "sgd":
            config = replace(config, measure=MeasureConfig(every=1))
        add_recipe(f"{name}_{way}", config, ABOUT[way])


# --- the studies of the appendices ---------------------------------------------------------------


def variant(name: str, **changes: Any) -> ExperimentConfig:
    """A setup with the paper's optimizer, with some options changed."""
    config = RECIPES[f"{name}_newton_summary"]()
    return replace(config, optimizer=replace(config.optimizer, **changes))


for name in PARTITIONS[:-1]:  # the last is that of vgg_cifar10_newton_summary
    about = f"App. J: VGG-11' with the partition {name}."
    config = variant("vgg_cifar10", partition=name)
    add_recipe(f"vgg_cifar10_{name.replace('-', '_')}", config, about)
for name in ("lenet_cifar10", "vgg_cifar10"):
    about = "App. K: the off-diagonal of Hbar set to zero."
    add_recipe(f"{name}_diagonal", variant(name, diagonal=True), about)


@recipe
def vbigmlp_cifar10() -> ExperimentConfig:
    """App. H: VBigMLP in five chunks of weights and biases; lambdas as for BigMLP."""
    optimizer = replace(paper_optimizer("bigmlp_cifar10"), partition="chunks-5")
    measure = MeasureConfig(every=1, partition="chunks-5", lambda_int=3.0)
    config = experiment("vbig_mlp", "cifar10", 200, optimizer)
    return replace(config, schedule=PLATEAU, measure=measure, tf32=True)


@recipe
def vbigmlp_cifar10_adam() -> ExperimentConfig:
    """App. H: VBigMLP with Adam; the paper gives no learning rate."""
    config = replace(vbigmlp_cifar10(), schedule=CONSTANT, measure=MeasureConfig())
    return replace(config, optimizer=AdamConfig(lr=1e-5))


@recipe
def vbigmlp_cifar10_kfac() -> ExperimentConfig:
    """App. H: VBigMLP with K-FAC, which the paper did not manage to tune; rates as for BigMLP."""
    lr, damping = SETUPS["bigmlp_cifar10"].kfac
    return replace(vbigmlp_cifar10_adam(), optimizer=KFACConfig(lr=lr, damping=damping))


# --- small ones on the embedded images -----------------------------------------------------------


def embedded(model: str, optimizer: OptimizerConfig, measure_every: int = 0) -> ExperimentConfig:
    """A small run on the images in the package: seconds per epoch on a laptop."""
    data, measure = DataConfig("embedded", pad=model == "lenet"), MeasureConfig(measure_every)
    return replace(experiment(model, "embedded", 10, optimizer), data=data, measure=measure)


for label, end, optimizer, every, what in (
    ("LeNet", "", NewtonSummaryConfig(), 0, "NewtonSummary"),
    ("LeNet", "_adam", AdamConfig(), 0, "Adam"),
    ("LeNet", "_sgd", SGDConfig(), 1, "SGD, measured before each epoch"),
    ("MLP", "", NewtonSummaryConfig(), 0, "NewtonSummary"),
    ("MLP", "_adam", AdamConfig(), 0, "Adam"),
    ("MLP", "_kfac", KFACConfig(lr=1e-3), 0, "K-FAC"),
):
    config = embedded(label.lower(), optimizer, every)
    add_recipe(f"{label.lower()}_embedded{end}", config, f"{label} on 4,500 digits with {what}.")


# --- our own -------------------------------------------------------------------------------------


@recipe
def resnet18_cifar10() -> ExperimentConfig:
    """ResNet-18 with batch norm on CIFAR-10."""
    return experiment("resnet18", "cifar10", 30, NewtonSummaryConfig())


@recipe
def resnet18_cifar10_adam() -> ExperimentConfig:
    """ResNet-18 with batch norm on CIFAR-10 with Adam."""
    return replace(resnet18_cifar10(), optimizer=AdamConfig(lr=1e-3))


@recipe
def autoencoder_mnist() -> ExperimentConfig:
    """An autoencoder of digits, with squared error: D3 = 0 in the last layer."""
    return experiment("autoencoder", "mnist", 50, NewtonSummaryConfig())


@recipe
def autoencoder_embedded() -> ExperimentConfig:
    """The autoencoder on the digits inside the package."""
    return embedded("autoencoder", NewtonSummaryConfig())


@recipe
def gpt_addition() -> ExperimentConfig:
    """A small GPT that learns to add numbers below 100."""
    return experiment("gpt", "addition", 30, NewtonSummaryConfig())


@recipe
def gpt_addition_adam() -> ExperimentConfig:
    """The small GPT with Adam."""
    return replace(gpt_addition(), optimizer=AdamConfig(lr=1e-3))


@recipe
def rosenbrock() -> ExperimentConfig:
    """Rosenbrock's valley with one group for each of its two numbers: a Newton method."""
    return ExperimentConfig(
        model=ModelConfig("rosenbrock"),
        data=DataConfig("nothing", samples=100),
        batch_size=1,
        epochs=5,
        dtype="float64",
        device="cpu",
        optimizer=NewtonSummaryConfig(
            variant="as-published",
            lr=1.0,
            momentum=0.0,
            summary_period=1,
            summary_window=1,
            curvature_batch_size=1,
        ),
    )
