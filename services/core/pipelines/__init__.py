"""Pipelines: a query is answered by a graph of apps (InferLine, paper 004). Specification, estimator, planners and tuner. Pure."""
