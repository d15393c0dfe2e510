"""The parts of benches/fluctuating.py and benches/step.py."""
