"""Forecasting for users: trained forecasters on tables, online forecasting, pictures, the published comparison."""

from titanmem.forecast.online import OnlineForecaster
from titanmem.forecast.predictor import Predictor

__all__ = ["OnlineForecaster", "Predictor"]
