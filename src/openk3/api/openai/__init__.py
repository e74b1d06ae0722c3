"""The server that OpenAI's and Anthropic's clients use, and a chat page for people."""
