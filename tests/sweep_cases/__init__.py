"""Operations for the sweep: one file for each family, one table of cases."""

from sweep_cases import algebra, functions, images, layers, losses, products, shapes
from sweep_cases.table import CASES, Around

__all__ = [
    "CASES",
    "Around",
    "algebra",
    "functions",
    "images",
    "layers",
    "losses",
    "products",
    "shapes",
]
