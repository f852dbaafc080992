"""The rules that are compared, and what the paper reports for its own."""

from __future__ import annotations

RULES = {
    "weighted_average": "uniform average",
    "geometric_median": "geometric median",
    "coordinate_median": "coordinate median",
    "ivar_vb": "IVAR-VB",
    "ivar_mle": "IVAR-MLE",
    "icov_vb": "ICOV-VB",
    "icov_mle": "ICOV-MLE",
    "krum": "Krum",
    "multi_krum": "multi-Krum",
    "trimmed_mean": "trimmed mean",
    "nearest_neighbour_mixing": "nearest-neighbour mixing",
    "norm_clipping": "norm clipping",
}
"""Registered name → title; each with its defaults, and equal weights where it takes any."""

PUBLISHED = {
    "synthetic": {
        "weighted_average": "10.17", "geometric_median": "8.13", "coordinate_median": "6.131", "ivar_vb": "4.62",
        "ivar_mle": "4.66", "icov_vb": "2.89", "icov_mle": "8.75",
    },
    "mnist": {
        "weighted_average": "0.4926", "geometric_median": "0.5233", "coordinate_median": "0.7987",
        "ivar_vb": "0.8943", "ivar_mle": "0.9043", "icov_vb": "0.8932", "icov_mle": "0.5253",
    },
    "shakespeare": {
        "weighted_average": "0.16", "geometric_median": "0.41", "coordinate_median": "0.29", "ivar_vb": "0.56",
        "ivar_mle": "0.50", "icov_vb": "0.52",
    },
}
"""Table 1 of the paper: prediction error, accuracy of one round, accuracy of the next character."""
