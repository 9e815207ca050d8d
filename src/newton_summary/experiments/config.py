"""The whole configuration of a run, as frozen dataclasses. Nothing here needs torch.

A recipe returns an :class:`ExperimentConfig`; the command line shows every field as an option;
``config.json`` of a run directory holds it.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from newton_summary.display.names import dotted_names, nearest
from newton_summary.errors import UserError

T = TypeVar("T")
# Those of newton_summary.derivatives, which needs torch.
Backend = Literal["auto", "sweep", "nested", "dense", "differences"]


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    name: str = "mlp"
    """mlp, lenet, vgg11, big_mlp, vbig_mlp, resnet18, autoencoder, gpt or rosenbrock."""
    width: int | None = None
    """Width of the layers, for models where it can be chosen."""
    depth: int | None = None
    """Number of layers, for models where it can be chosen."""
    ntk: bool = False
    """Use the NTK parameterisation: weights of unit size, times sigma / sqrt(fan_in)."""


@dataclass(frozen=True)
class DataConfig:
    """The samples."""

    name: str = "embedded"
    """mnist, cifar10, embedded (6000 digits in the package), addition or nothing."""
    root: Path | None = None
    """Folder with the official files (or --data-root, or the variable NEWTON_SUMMARY_DATA)."""
    download: bool = True
    """Download missing official files."""
    pad: bool = False
    """Pad digits with two pixels of background: 32 x 32, for LeNet."""
    validation: int | None = None
    """Training samples to hold out; by default 6000 of MNIST and 5000 of CIFAR-10."""
    samples: int | None = None
    """Use at most this many samples of each split, for quick trials."""


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer."""

    name: ClassVar[str] = ""


@dataclass(frozen=True)
class AdamConfig(OptimizerConfig):
    """Adam."""

    name: ClassVar[str] = "adam"

    lr: float = 1e-3
    """Initial learning rate."""
    beta1: float = 0.9
    """Decay of the mean gradient."""
    beta2: float = 0.999
    """Decay of the mean squared gradient."""


@dataclass(frozen=True)
class SGDConfig(OptimizerConfig):
    """SGD with momentum."""

    name: ClassVar[str] = "sgd"

    lr: float = 1e-2
    """Initial learning rate."""
    momentum: float = 0.9
    """Heavy-ball momentum."""


@dataclass(frozen=True)
class KFACConfig(OptimizerConfig):
    """K-FAC with momentum; the defaults are those of the paper's runs."""

    name: ClassVar[str] = "kfac"

    lr: float = 1e-4
    """Initial learning rate."""
    damping: float = 1e-2
    """lambda, added to the Fisher matrix."""
    factored: bool = False
    """Split the root of lambda between the factors: cheaper to invert, and damps more."""
    kl_clip: float = 0.01
    """Bound on lr^2 times the squared Fisher norm of a step."""
    weight_decay: float = 0.003
    """L2 penalty, added to the preconditioned gradient."""
    momentum: float = 0.9
    """Heavy-ball momentum, on the preconditioned gradient."""
    covariance_period: int = 10
    """Steps between updates of the covariances."""
    inverse_period: int = 100
    """Steps between inversions."""
    decay: float = 0.95
    """Weight of the past in the covariances."""


@dataclass(frozen=True)
class NewtonSummaryConfig(OptimizerConfig):
    """NewtonSummary. Fields without a value have the variant's own default."""

    name: ClassVar[str] = "newton_summary"

    variant: Literal["default", "as-run", "as-published"] = "default"
    """The package's own, or the paper's: as its author ran it (B = 100), as printed (B = 1000)."""
    lr: float | None = None
    """lambda_1, the initial factor on all rates."""
    lambda_int: float | None = None
    """Strength of the cubic term."""
    partition: str = "canonical"
    """canonical, trivial, weights-biases, layers, modules-K, blocks-K, chunks-K, ..."""
    diagonal: bool = False
    """Ignore the interactions between groups (App. K)."""
    momentum: float | None = None
    """mu_g, of the heavy ball."""
    summary_period: int | None = None
    """tau, steps from one summary to the next."""
    summary_window: int | None = None
    """upsilon, number of summaries to average in the paper's variants."""
    curvature_batch_size: int | None = None
    """B, samples per summary; by default 100 as run, 1000 as published, else a batch."""
    backend: Backend = "auto"
    """How to compute summaries."""
    cuda_graph: bool = False
    """On a GPU, replay the measurement as a CUDA graph: for small models."""

    @property
    def curvature(self) -> tuple[int, bool] | None:
        """B, and whether the batches are reshuffled; None to measure the training batches."""
        usual = {"as-run": 100, "as-published": 1000}.get(self.variant)
        size = self.curvature_batch_size or usual
        return None if size is None else (size, self.variant != "as-run")


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    kind.name: kind for kind in (NewtonSummaryConfig, AdamConfig, KFACConfig, SGDConfig)
}


@dataclass(frozen=True)
class ScheduleConfig:
    """ReduceLROnPlateau on the training loss of the epochs; off unless factor < 1."""

    factor: float = 1.0
    """Factor on the learning rate; 1 keeps it constant. The paper's NewtonSummary has 0.5."""
    patience: int = 2
    """Epochs without improvement to tolerate."""
    threshold: float = 1e-4
    """Smallest relative improvement that counts."""


@dataclass(frozen=True)
class MeasureConfig:
    """Summaries along the full-batch gradient, measured before epochs (Section 6.1)."""

    every: int = 0
    """Measure every N epochs, and at the end; 0 never measures."""
    partition: str = "canonical"
    """Partition of the measurement."""
    lambda_int: float = 1.0
    """Strength of the cubic term in the rates that are stored."""
    batch_size: int = 1000
    """Samples at a time."""
    samples: int | None = None
    """Total number of samples; by default the whole training set."""


@dataclass(frozen=True)
class ExperimentConfig:
    """A run."""

    recipe: str = "custom"
    """Name of the recipe."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=NewtonSummaryConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    epochs: int = 10
    """Passes over the training set."""
    batch_size: int = 100
    """B_g, samples for one gradient."""
    seed: int = 0
    """Seed of the initial weights and of the order of the samples."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto uses a GPU if there is one."""
    dtype: Literal["float32", "float64"] = "float32"
    """Floating-point type of parameters and data."""
    tf32: bool = False
    """Let a GPU round products to TF32."""
    graph_steps: bool = False
    """On a GPU, replay forward and backward passes as a CUDA graph: for many small runs."""


# --- as plain values -----------------------------------------------------------------------------


def to_dict(config: ExperimentConfig) -> dict[str, Any]:
    """Return the configuration as values that JSON can hold."""
    values = asdict(config)
    values["optimizer"] = {"name": config.optimizer.name, **values["optimizer"]}
    root = values["data"]["root"]
    values["data"]["root"] = None if root is None else str(root)
    return values


def from_dict(values: Mapping[str, Any]) -> ExperimentConfig:
    """Return what :func:`to_dict` wrote; fields of a newer version are ignored."""
    parts: dict[str, Any] = {}
    for name, kind in get_type_hints(ExperimentConfig).items():
        if not is_dataclass(kind):
            continue
        section = values.get(name)
        if not isinstance(section, Mapping):
            raise UserError(f"The configuration has no section {name!r}.")
        if name == "optimizer":
            kind = OPTIMIZERS.get(str(which := section.get("name")))
            if kind is None:
                raise UserError(f"Unknown optimizer {which!r}.{nearest(str(which), OPTIMIZERS)}")
        if isinstance(section.get("root"), str):
            section = {**section, "root": Path(section["root"])}
        parts[name] = _known(kind, section)
    return _known(ExperimentConfig, {**values, **parts})


def _known(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return a configuration from the fields that this version knows."""
    names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})


def flatten(config: ExperimentConfig) -> dict[str, Any]:
    """Return all fields by their dotted names, as on the command line."""
    return dict(dotted_names(to_dict(config)))


# --- checks --------------------------------------------------------------------------------------

# The smallest valid value of numbers whose mistakes would only show later.
_ZERO = """
    epochs seed optimizer.lr optimizer.damping optimizer.lambda_int optimizer.kl_clip
    optimizer.weight_decay schedule.patience measure.every measure.lambda_int
"""
_ONE = """
    batch_size data.validation data.samples model.width model.depth optimizer.summary_period
    optimizer.summary_window optimizer.curvature_batch_size optimizer.covariance_period
    optimizer.inverse_period measure.batch_size measure.samples
"""
LEAST = dict.fromkeys(_ZERO.split(), 0) | dict.fromkeys(_ONE.split(), 1)


def check(config: ExperimentConfig) -> None:
    """Raise a UserError for values of the wrong type or out of range."""
    parts = {f"{name}.": part for name, part in vars(config).items() if is_dataclass(part)}
    for prefix, owner in [("", config), *parts.items()]:
        hints = get_type_hints(type(owner))
        for f in fields(owner):
            name, value = f"{prefix}{f.name}", getattr(owner, f.name)
            if not is_dataclass(value) and not _fits(value, hints[f.name]):
                raise UserError(f"{name} = {value!r} is not of type {f.type}.")
            least = LEAST.get(name)
            if least is not None and value is not None and not least <= value < float("inf"):
                raise UserError(f"{name} = {value}: expected a finite number, {least} or more.")
    if not 0 < config.schedule.factor <= 1:
        raise UserError(
            f"schedule.factor = {config.schedule.factor}: expected a number above 0, at most 1."
        )


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return any(_fits(value, k) for k in get_args(kind))
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)
