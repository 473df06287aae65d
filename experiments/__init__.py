"""Experiments a person runs: ``python -m experiments.NAME --help``. They import the library, never the reverse."""
