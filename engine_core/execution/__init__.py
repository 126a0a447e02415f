"""Doing what a StepPlan says: batches, the model's forward, sampling."""
