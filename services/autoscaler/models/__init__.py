"""The model-autoscaler of one worker: replicate, upgrade, downgrade, unload (INFaaS, section 4.2)."""
