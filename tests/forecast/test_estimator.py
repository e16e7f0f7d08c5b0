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


def test_rows_that_an_update_brings_again_are_looked_back_on_once():
    y = pandas.Series(waves(80).values[:, 0], index=pandas.period_range("2024", periods=80, freq="D"))
    settings = {"model.dim": 8, "model.num_layers": 1, "steps": 3, "eval_every": 3}
    one, other = (TitansForecaster(look_back=24, settings=settings).fit(y[:60], fh=[1, 2]) for _ in range(2))
    one.update(y[60:70], update_params=False)
    other.update(y[50:70], update_params=False)
    pandas.testing.assert_series_equal(one.predict(), other.predict())


def test_a_random_state_draws_the_seed():
    y = pandas.Series(waves(60).values[:, 0])
    settings = {"model.dim": 8, "model.num_layers": 1, "steps": 2, "eval_every": 2}
    found = [
        TitansForecaster(8, settings=settings, random_state=state).fit(y, fh=[1]).predict().item()
        for state in (np.random.RandomState(3), np.random.RandomState(3), np.random.RandomState(4))
    ]
    assert found[0] == found[1] != found[2]


def test_too_few_rows_are_said_of_y():
    with pytest.raises(ValueError, match=r"^y has 3 rows, 3 of them to train on"):
        TitansForecaster(24).fit(pandas.Series([1.0, 2.0, 3.0]), fh=[1, 2])


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
