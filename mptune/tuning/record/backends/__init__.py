"""What a search adds to Optuna's storages: repair of a journal file, patience with a database."""
