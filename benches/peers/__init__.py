"""What benches/comparison.py is made of: other servers of models, each in an environment of its own, asked the same."""
