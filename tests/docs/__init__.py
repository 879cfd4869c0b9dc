"""The pages of docs/: what they show is run, and the website is built."""
