"""The forms in which calibration data are given: files of arrays, images, Polygraphy's inputs, and loader scripts."""
