"""Experiments on a trained model: `titanmem eval MODEL SUITE…`. A suite is a table of cells, measured one by one."""
