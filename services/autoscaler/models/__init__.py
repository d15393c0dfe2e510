"""The model-autoscaler of one worker: replicate, upgrade, load between two plans (INFaaS, section 4.2.2)."""
