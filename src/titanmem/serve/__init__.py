"""Sessions over HTTP: the OpenAI interface, and /v1/sessions for what it lacks."""
