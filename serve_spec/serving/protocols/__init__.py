"""HTTP APIs: OpenAI's completions, chats and responses, SGLang's `/generate`, and their formats."""
