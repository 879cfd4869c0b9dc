"""Optuna's storages as a search needs them: a journal that opens quickly, a database that is waited for."""
