"""sktime's own checks of TitansForecaster, and what a user of it does."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from tables import waves

pandas = pytest.importorskip("pandas")
pytest.importorskip("sktime", reason="sktime is not installed: pip install 'titanmem[forecast]'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from titanmem.forecast.estimator import TitansForecaster

pytestmark = pytest.mark.filterwarnings("ignore")  # sktime's own
QUICK = ["test_constructor", "test_clone", "test_persistence_via_pickle", "test_y_multivariate_raises_error"]
SMALL = {"model.dim": 8, "model.num_layers": 1, "optim.lr": 1e-2, "data.batch": 16}


def check(names: list[str] | None) -> None:
    from sktime.utils.estimator_checks import check_estimator

    found = check_estimator(TitansForecaster, raise_exceptions=False, verbose=False, tests_to_run=names)
    assert found
    assert {name: said for name, said in found.items() if said != "PASSED"} == {}


def test_quick_checks_of_sktime_pass():
    check(QUICK)


@pytest.mark.slow
def test_all_checks_of_sktime_pass():
    check(None)


def test_it_learns_a_season_and_looks_back_on_updates():
    series = waves(200)
    y = pandas.DataFrame(series.values, columns=series.columns, index=pandas.date_range("2024", periods=200, freq="h"))
    forecaster = TitansForecaster(look_back=24, epochs=2, settings=SMALL).fit(y[:160], fh=[1, 2, 6])
    found = forecaster.predict()
    assert list(found.index) == [y.index[i] for i in (160, 161, 165)]
    assert list(found.columns) == ["a", "b"]
    np.testing.assert_allclose(found["a"], y["a"].iloc[[160, 161, 165]], atol=0.6)
    forecaster.update(y[160:180])
    later = forecaster.predict()
    assert later.index[0] == y.index[180]
    np.testing.assert_allclose(later["a"], y["a"].iloc[[180, 181, 185]], atol=0.6)
