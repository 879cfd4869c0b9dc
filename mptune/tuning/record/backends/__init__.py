"""What a search adds to Optuna's storages: a journal file that survives killed processes, patience with a database."""
