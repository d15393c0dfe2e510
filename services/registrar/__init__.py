"""Takes models in: plans their variants, has a worker build and profile them, and keeps the catalogue."""
