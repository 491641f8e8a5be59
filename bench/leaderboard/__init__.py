"""What makes a head accept more for every token of training data: rows that are trained and paired.

__main__.py     options: which rows, budgets and seeds
experiment.py   a row's file, and the configuration that it makes of the base
runs.py         data, training and decoding of one row, budget and seed; continues where it stopped
peers.py        a cell that SpecForge or speculators trains
usage.py        CPU-hours and memory of a training
results.py      what a cell measured; experiments/results.jsonl, which keeps it
table.py        τ with its interval, differences of paired prompts, docs/leaderboard.md
"""
