"""HTTP in OpenAI's form, over an engine's client."""
