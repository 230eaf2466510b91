"""The OpenAI-compatible HTTP interface over any `runtime.service.InferenceService`."""
