"""The table of metric names is one table: unique, complete, readable without torch."""

import re
import subprocess
import sys

import pytest

from lightning_cann.metrics.names import METRICS, metric, metric_names


def test_names_are_unique_and_prefixed():
    names = list(metric_names())
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"ft_[a-z_]+", name) for name in names)


def test_every_row_says_what_its_number_means():
    for row in METRICS:
        assert row.kind in ("gauge", "counter")
        assert row.unit
        assert row.help.endswith(".")
        assert ("seconds" in row.name) == (row.unit == "seconds")


def test_lookup_and_its_error():
    assert metric("ft_view").kind == "gauge"
    with pytest.raises(KeyError, match=r"unknown metric 'ft_viev'.*ft_view"):
        metric("ft_viev")


def test_metrics_import_neither_torch_nor_lightning():
    heavy = {"torch", "lightning", "pytorch_lightning"}
    code = f"import sys, lightning_cann.metrics; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
