"""Models and data sets that show one finding each, made by script with a seed, with sound twins."""
