"""One function for each figure of a summary or a training run, for papers and notebooks."""

from newton_summary.figures.charts import curves, heatmap, pairs, predicted_change, rate_bars, rates

__all__ = ["curves", "heatmap", "pairs", "predicted_change", "rate_bars", "rates"]
